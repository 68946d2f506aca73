"""How exact a gradient is in the precision of the program: it is compared with that in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._compat import cached_property, silent_callbacks
from .._programs import Chain, Operands, inner_jaxprs, is_floating, jaxpr_and_consts, kept, quick_jit, reclosing
from .exact import Leaves, scale_of, size_of
from .float64 import Rule, exactly, promoted, wide_dtype, widened
from .own import Own, cotangents_of, tangents_of
from .point import LAST_DIGITS, Point, reach_of
from .program import Array, Program

# Parts of the value that are little, next to nothing, and rounding errors in float64.
_LITTLE, _HARDLY, _NOTHING = 1e-3, 1e-5, 1e-13
# In the smallest normal number of a dtype: what has lost no digit although it is next to that, and not in float16.
_LEAST, _LEAST_AT_MOST = 1e3, 1e-4
# How far the rounding of a whole leaf may move an element, in units of the leaf.
_OF_OTHERS = 1e3
# In units of how far it moves with the last digits of the point, what of an element is more than that of larger ones,
# and how much has to be off to be looked at.
_OF_ITS_OWN, _AT_LEAST = 100.0, 1e-2
# Outputs whose gradients differ by such a factor are unlike: their sum has the digits of the larger one.
_UNLIKE = 1e3
# How many points near this one tell how far a gradient moves.
_MOVED = 6
# How much more than rounding to fewer digits moves a gradient it may explain.
_EXPLAINS = 5.0


class Worst(NamedTuple):
    """A relative error of a derivative, the derivative in float64, and the point with the weights of the outputs."""

    error: float
    exact: Any
    point: Point


class _Sum(NamedTuple):
    """The gradient of a weighted sum of the outputs, as the user gets it, and in float64."""

    gradients: list[Array]
    exact: Leaves
    point: Point

    def error(self, leaf: int, by_element: bool) -> float | None:
        """The relative error of the gradient of a leaf; None if it consists of rounding errors."""
        if self.cancels(leaf):
            return None
        got, expected, dtype = widened(self.gradients[leaf]), self.exact[leaf], self.gradients[leaf].dtype
        error = relative_error(got, expected, least(dtype))
        if not by_element:
            return error
        # Of an element, or a part of a complex one, what the rounding of larger ones does not explain.
        parts = lambda array: np.ravel(array).view(np.float64)
        unit = float(jnp.finfo(dtype).eps)
        with np.errstate(all="ignore"):
            off, sizes = np.abs(parts(got - expected)), np.maximum(np.abs(parts(expected)), least(dtype))
            is_own = off > _OF_OTHERS * unit * np.linalg.norm(expected)
            if np.any(off > _AT_LEAST * np.maximum(sizes, unit * np.linalg.norm(expected))):
                moves = _moves_of_gradient(self.point, leaf, unit)
                is_own |= off > _OF_ITS_OWN * np.maximum(moves, unit * sizes)
        return max(error, float(np.max(off / sizes, where=is_own, initial=0.0)))

    def cancels(self, leaf: int) -> bool:
        """Whether the gradient of a leaf is zero up to rounding errors, of which it consists."""
        own, exact, point = self.gradients[leaf], self.exact[leaf], self.point
        if not 1e-2 < relative_error(widened(own), exact, least(own.dtype)) < np.inf:
            return False
        moves = lambda by: float(np.linalg.norm(widened(by) * scale_of(point.leaves[leaf])))
        # An output that is zero by construction, as a residual is, has no size of its own.
        size, value = np.linalg.norm(exact), np.linalg.norm(point.start)
        if moves(own) > _LITTLE * value:
            # What the user gets is far from zero.
            return False
        # That of a function that is linear in pieces does not move with the point, but may consist of rounding errors.
        if moves(exact) <= _NOTHING * value or size <= 10 * _noise_of_gradient(point, leaf):
            return True
        # Or with those that the leaf has, if all of the leaf would hardly move the value.
        is_hardly = moves(exact) <= _HARDLY * value
        return bool(is_hardly and size <= 10 * _noise_of_gradient(point, leaf, (2 * point.resolution,)))


class Precision:
    """The gradient in the precision of the program, beside that in float64.

    Args:
        own: The program as the user runs it.
        point: The same in float64.
        by_element: Whether every element counts, and not only a whole leaf.
    """

    def __init__(self, own: Own, point: Point, by_element: bool):
        self._own, self._point, self._is_by_element = own, point, by_element
        self._sums: dict[int, _Sum | None] = {}

    @cached_property
    def _whole(self) -> _Sum | None:
        exact = self._point.gradient
        return _Sum(self._own.gradients, exact, self._point) if self._own.gradients and exact is not None else None

    @cached_property
    def _outputs(self) -> list[Point]:
        """Each of several outputs alone, or of a few elements of them."""
        point, part_of = self._point, self._point.exact.part_of
        return [point.with_weights(point.weights * (part_of == part)) for part in np.unique(part_of)]

    def _of_output(self, output: int) -> _Sum | None:
        if output not in self._sums:
            one = self._outputs[output]
            gradients = self._own.gradients_of_sum(one.weights)
            self._sums[output] = None if one.gradient is None else _Sum(gradients, one.gradient, one)
        return self._sums[output]

    def worst(self, leaf: int) -> Worst | None:
        """The largest relative error of a derivative by a leaf, and of which sum of outputs; None if there is none."""
        if self._whole is None:
            return self._worst_of_tangents(leaf)
        sums: list[_Sum | None] = [self._whole]
        if len(self._outputs) > 1:
            # A sum has the digits of what is large in it.
            norms = [0.0 if one.gradient is None else np.linalg.norm(one.gradient[leaf]) for one in self._outputs]
            sums += [self._of_output(i) for i, norm in enumerate(norms) if 0 < norm < max(norms) / _UNLIKE]
        errors = ((one.error(leaf, self._is_by_element), one) for one in sums if one is not None)
        known = [Worst(error, one.exact[leaf], one.point) for error, one in errors if error is not None]
        return max(known, key=lambda worst: worst.error, default=None)

    def _worst_of_tangents(self, leaf: int) -> Worst | None:
        """The same of the tangents of each output along a direction, if there is no gradient."""
        point, direction = self._point, self._point.along_leaf(leaf)
        expected, own = point.exact.forward(point.leaves, direction), self._own.tangents(direction)
        if expected is None or not own:
            return None
        got = np.concatenate([np.ravel(widened(pushed)) for pushed in own])
        noise, found = point.noise_of_tangents(direction), list[Worst]()
        smallest = max(least(pushed.dtype) for pushed in own)
        for one in self._outputs:
            here = one.weights != 0
            size = np.linalg.norm(expected[here])
            # What is no more than rounding errors, or next to nothing beside the value, has no digits to lose.
            if size > max(10 * np.linalg.norm(noise[here]), _HARDLY * _LITTLE * np.linalg.norm(point.start[here])):
                error = relative_error(got[here], expected[here], smallest)
                found.append(Worst(error, one.weights * expected, one))
        return max(found, key=lambda worst: worst.error, default=None)

    def cancels(self, leaf: int) -> bool:
        """Whether the gradient of a leaf is zero up to rounding errors."""
        return self._whole is not None and self._whole.cancels(leaf)

    def is_of_narrow(self, leaf: int, worst: Worst) -> bool:
        """Whether an error of the derivative by a leaf is that of rounding to dtypes that are narrower than its own."""
        program, dtype = self._own.program, self._own.program.leaves[leaf].dtype
        derivative = derivative_of(program, leaf, worst.point)
        if derivative is None:
            return False
        jaxpr, operands, of_leaf = derivative
        closed = reclosing(jaxpr_and_consts(jaxpr)[0])
        how = dict[str, Any](rule=_rounding_narrow(dtype), x64=bool(jax.config.jax_enable_x64))
        run = lambda consts, operands: promoted(closed(consts), **how)(*operands)
        with jax.enable_x64(True), silent_callbacks():
            compiled = kept(f"narrower than {dtype}", [jaxpr], lambda: quick_jit(run))
            moved = jax.device_get(compiled(jaxpr_and_consts(jaxpr)[1], list(map(widened, operands))))
        return worst.error <= _EXPLAINS * relative_error(widened(of_leaf(moved)), worst.exact, least(dtype))


# A derivative, its operands, and from its results to those of a leaf.
Derivative = tuple[ClosedJaxpr, Operands, Callable[[Operands], Any]]


def derivative_of(program: Program, leaf: int, point: Point) -> Derivative | None:
    """The derivative of a program by a leaf, by reverse or else forward mode; None if there is none."""
    if program.value_and_cotangent is not None:
        operands = [*program.leaves, *cotangents_of(point.weights, program.out_avals)]
        return program.value_and_cotangent, operands, lambda results: results[len(program.out_avals) + leaf]
    return tangent_of(program, leaf, point)


def tangent_of(program: Program, leaf: int, point: Point) -> Derivative | None:
    """The derivative of a program along a leaf, by forward mode; None if there is none."""
    if program.tangent is None:
        return None
    operands = [*program.leaves, *tangents_of(program, point.along_leaf(leaf))]
    joined = lambda results: np.concatenate([np.ravel(widened(pushed)) for pushed in results])
    return program.tangent, operands, lambda results: point.weights * joined(results)


def _noise_of_gradient(point: Point, leaf: int, digits: tuple[float, ...] = LAST_DIGITS) -> float:
    """How far the gradient of a leaf moves with the last digits of the point: its norm."""
    largest = 0.0
    for side in (-1.0, 1.0):
        gradients = [point.exact.reverse(point.beside(side * by), point.weights) for by in (0.0, *digits)]
        largest = max(largest, float(np.linalg.norm(reach_of([g[leaf] for g in gradients if g is not None]))))
    return largest


def _moves_of_gradient(point: Point, leaf: int, units: float) -> Array:
    """How far each element of a gradient moves, at most, if all leaves move up or down by so much of their size.

    As one vector of real numbers: complex elements have two.
    """
    found = [point.gradient]
    for seed in range(_MOVED):
        choose = np.random.default_rng(seed).choice
        at = [x + units * size_of(x) * choose((-1.0, 1.0), x.shape) for x in point.leaves]
        found.append(point.exact.reverse(at, point.weights))
    return np.asarray(reach_of([np.ravel(own[leaf]).view(np.float64) for own in found if own is not None]))


def _rounding_narrow(dtype: Any) -> Rule:
    """The rule for a program in float64 that rounds, as it was, what is narrower than a dtype."""
    unit = float(jnp.finfo(dtype).eps)

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        equation = chain[-1]
        is_narrow = lambda aval: is_floating(aval) and float(jnp.finfo(aval.dtype).eps) > unit
        if any(inner_jaxprs(equation)) or not any(is_narrow(variable.aval) for variable in equation.outvars):
            return None
        pairs = zip(exactly(equation, operands), equation.outvars, strict=True)
        narrow = lambda value, dtype: jnp.asarray(value).astype(dtype).astype(wide_dtype(dtype))
        return [narrow(value, v.aval.dtype) if is_narrow(v.aval) else value for value, v in pairs]

    return rule


def least(dtype: Any) -> float:
    """What is smaller than this has no digits to lose, because the dtype can hardly tell it from zero."""
    return min(_LEAST * float(jnp.finfo(dtype).tiny), _LEAST_AT_MOST)


def relative_error(got: Any, expected: Any, smallest: float = 0.0) -> float:
    """The distance of one array from another, relative to the size of that, or to the smallest size that counts."""
    size, off = max(float(np.linalg.norm(expected)), smallest), np.linalg.norm(got - expected)
    return float(off / size) if size else float(off > 0)
