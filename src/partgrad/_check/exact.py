"""A program and its derivatives in float64: one compiled program computes the value, the forward or the reverse one.

It is kept for the next check of the same program. Variants hold some operations fixed, let loops run on, or take the
reverse derivative of another program.
"""

import copy
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import silent_callbacks
from .._programs import (
    Chain,
    Operands,
    explicit_sharding,
    is_floating,
    jaxpr_and_consts,
    kept,
    quick_jit,
    reclosing,
)
from .float64 import Rule, exactly, leaves_jax, one_by_one, promoted
from .noise import REFUSALS, rounding_noise
from .program import Array, Program
from .surrogates import has_surrogates, moving_along, smooth_instead
from .turns import RunsOn
from .twice import here

Leaves = list[Array]
Vector = Array

# What is raised by a function that rejects the point, or float64, or cannot be batched.
_REJECTIONS = (jax.errors.JaxRuntimeError, TypeError, ValueError, NotImplementedError)

_VALUE, _FORWARD, _REVERSE = range(3)
# A few units in the last digit of float64.
UNIT = 1e-15
# The smallest size of an element, relative to the largest of its leaf.
_SMALLEST = 1e-3
# So many elements of the outputs are judged each for itself, and not by their arrays.
_FEW = 16
# How many runs with other rounding errors tell how far these move the results.
_SAMPLES = 4


class Exact:
    """A program and its two derivatives in float64. The outputs are one vector, complex if any output is.

    Some loops, of the value and of both derivatives, may run on until another step changes nothing.
    """

    def __init__(self, program: Program, runs_on: RunsOn | None = None):
        # What is differentiated may be another program.
        self.program = self.differentiated = program
        self.sizes = [int(np.prod(aval.shape)) for aval in program.out_avals]
        # The number of the output that each element is of; and, if there are few elements, each for itself.
        self.output_of = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.part_of = np.arange(sum(self.sizes)) if sum(self.sizes) <= _FEW else self.output_of
        self.evaluations = 0
        self._shapes = [aval.shape for aval in program.out_avals]
        self._is_complex = [jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in program.out_avals]
        self._inputs = [(leaf.shape, jnp.iscomplexobj(leaf)) for leaf in program.leaves]
        self._jaxprs = [program.numbered, program.tangent, program.cotangent]
        # How the program moves where there are surrogates, together with the point that it has moved from.
        self._moving = moving_along(program.numbered) if has_surrogates(program.numbered) else None
        self._held: dict[tuple[int, ...], Callable[..., Any]] = {}
        # The equations that keep their results already.
        self._fixed: tuple[Chain, ...] = ()
        self._traced: dict[int, ClosedJaxpr] = {}
        self._runs_on = runs_on
        made = lambda: self._staged(runs_on)
        self._run = kept("float64", self._jaxprs, made) if runs_on is None else made()

    def _staged(self, runs_on: RunsOn | None) -> Callable[..., Any]:
        given: dict[str, Any] = {} if runs_on is None else {"runs_on": runs_on, "rule": one_by_one}
        value, forward, reverse = (_of_constants(jaxpr, **given) for jaxpr in self._jaxprs)
        own = _either(self._moving, given.get("rule"))
        is_complex, pairs = any(self._is_complex), self._moving is not None
        # Not `self`, which has the arguments: what is compiled is kept.
        leaves_of = functools.partial(_leaves_of, self._inputs)
        outputs = np.zeros(sum(self.sizes))
        gradient = np.zeros(sum(int(np.prod(shape)) * (1 + c) for shape, c in self._inputs))
        wide = lambda vector: vector.astype(jnp.complex128 if is_complex else jnp.float64)

        def of_value(consts: Any, moved: Any, start: Any, weights: Any, off: Any) -> Any:
            rule = _either(own, _rounding_outside(off))
            at = lambda vector: _joined(value(consts[_VALUE], leaves_of(vector), rule=rule))
            found = at(moved) if not pairs else jax.vmap(at)(jnp.stack([moved, start]))[0]
            return wide(found), wide_real(gradient)

        def of_forward(consts: Any, point: Any, direction: Any, weights: Any, off: Any) -> Any:
            tangents = forward(consts[_FORWARD], [*leaves_of(point), *leaves_of(direction)])
            return wide(_joined(tangents)), wide_real(gradient)

        def of_reverse(consts: Any, point: Any, direction: Any, weights: Any, off: Any) -> Any:
            pulled = reverse(consts[_REVERSE], [*leaves_of(point), *weights])
            return wide(outputs), _as_real(pulled)

        branches = [
            of_value if jaxpr is None else branch
            for jaxpr, branch in zip(self._jaxprs, (of_value, of_forward, of_reverse), strict=True)
        ]
        return quick_jit(lambda which, *operands: lax.switch(which, branches, *operands))

    def _called(
        self, which: int, point: Vector, other: Vector, weights: Leaves, off: float = 0.0
    ) -> tuple[Vector, Vector]:
        consts = [[] if jaxpr is None else jaxpr_and_consts(jaxpr)[1] for jaxpr in self._jaxprs]
        with jax.enable_x64(True), silent_callbacks():
            try:
                return jax.device_get(self._run(which, consts, point, other, weights, off))
            except _REJECTIONS:
                missing = lambda size, dtype: np.full(size, np.nan, dtype)
                kind = np.complex128 if any(self._is_complex) else np.float64
                return missing(sum(self.sizes), kind), missing(point.size, np.float64)

    @property
    def is_reverse_only(self) -> bool:
        """Whether there is no forward derivative."""
        return self._jaxprs[_FORWARD] is None

    # --- the same function with something changed --------------------------------------------------------------------

    def with_derivatives_of(self, program: Program, *, forward: bool = True) -> "Exact":
        """The same function with the derivatives of another program, or its reverse derivative alone."""
        changed = copy.copy(self)
        changed.differentiated, changed._traced = program, {}
        changed._jaxprs = [self._jaxprs[_VALUE], program.tangent if forward else None, program.cotangent]
        changed._run = changed._staged(None)
        return changed

    def holding(self, chains: Sequence[Chain], *, only_places: bool = False) -> Callable[[Container[int]], "Exact"]:
        """The same with some equations that keep their results while the point moves along a direction.

        Args:
            chains: The equations.
            only_places: Whether one that returns numbers and their places, as a sort may, keeps the places only.

        Returns:
            From the numbers of those that keep them, among the given ones, to the program; all are compiled once.
        """
        chains = [*chains, *self._fixed]
        numbers = {id(chain[-1]): number for number, chain in enumerate(chains)}
        value, leaves_of = self._jaxprs[_VALUE], functools.partial(_leaves_of, self._inputs)
        other = _either(self._moving, one_by_one)

        def of_value(held: Any, consts: Any, moved: Any, point: Any) -> Any:
            def rule(chain: Chain, operands: Operands) -> Operands | None:
                # What is not entered, as a `custom_root` of new versions of JAX, has its own equations in it.
                ends = (*self.program.origin(chain)[-1:], chain[-1])
                number = next((numbers[id(end)] for end in ends if id(end) in numbers), None)
                if number is None:
                    return other(chain, operands)
                results = exactly(chain[-1], operands)
                is_mixed = only_places and len({is_floating(v.aval) for v in chain[-1].outvars}) > 1
                pairs = zip(results, chain[-1].outvars, strict=True)
                keeps = [held[number] & (not (is_mixed and is_floating(v.aval))) for _, v in pairs]
                return [jnp.where(keep, here(r), r) for keep, r in zip(keeps, results, strict=True)]

            run = _of_constants(value, rule=rule, runs_on=self._runs_on)
            at = lambda vector: _joined(run(consts[_VALUE], leaves_of(vector)))
            return jax.vmap(at)(jnp.stack([moved, point]))[0], jnp.zeros(0)

        key = (only_places, *numbers)
        if key not in self._held:
            self._held[key] = quick_jit(of_value)
        staged, own, fixed = self._held[key], self._run, set(map(id, self._fixed))

        def with_held(some: Container[int]) -> "Exact":
            held, changed = np.zeros(len(chains), bool), copy.copy(self)
            for number, chain in enumerate(chains):
                held[numbers[id(chain[-1])]] |= number in some or id(chain) in fixed
            run = lambda which, consts, moved, point, *more: (
                staged(held, consts, moved, point) if which == _VALUE else own(which, consts, moved, point, *more)
            )
            changed._run = run
            changed._fixed = tuple(chain for n, chain in enumerate(chains) if n in some or id(chain) in fixed)
            return changed

        return with_held

    # --- what it computes --------------------------------------------------------------------------------------------

    def along(self, point: Leaves, direction: Leaves) -> Callable[..., Vector]:
        """The outputs at a point moved along a direction, as a function.

        Args:
            point: The point.
            direction: The direction.

        Returns:
            From how far it is moved, and by how many units, of about its last digit, what moves is moved besides, and
            in what runs outside of JAX, in a precision of its own, the operands and results.
        """
        start, along = _vector(point), _vector(direction)
        last_digits = UNIT * signs(start.size) * size_of(start) * (along != 0)
        nothing = self.cotangents(np.zeros(sum(self.sizes)))

        def value(step: float, nudge: float = 0.0) -> Vector:
            self.evaluations += 1
            moved = start + nudge * last_digits + step * along
            return np.asarray(self._called(_VALUE, moved, start, nothing, nudge)[0])

        return value

    def value(self, point: Leaves, direction: Leaves, step: float) -> Vector:
        """The outputs at a point moved along a direction by a step."""
        return self.along(point, direction)(step)

    def forward(self, point: Leaves, direction: Leaves) -> Vector | None:
        """The tangents of the outputs along a direction, or None if there is no forward derivative."""
        if self._jaxprs[_FORWARD] is None:
            return None
        zeros = self.cotangents(np.zeros(sum(self.sizes)))
        return np.asarray(self._called(_FORWARD, _vector(point), _vector(direction), zeros)[0])

    def reverse(self, point: Leaves, weights: Vector) -> Leaves | None:
        """The cotangents of the leaves for given weights of the outputs, or None if there is no reverse derivative."""
        if self._jaxprs[_REVERSE] is None:
            return None
        start = _vector(point)
        pulled = np.asarray(self._called(_REVERSE, start, np.zeros_like(start), self.cotangents(weights))[1])
        parts = np.split(pulled, np.cumsum([int(np.prod(s)) * (1 + c) for s, c in self._inputs])[:-1])
        return [
            (part.view(np.complex128) if is_complex else part).reshape(shape)
            for part, (shape, is_complex) in zip(parts, self._inputs, strict=True)
        ]

    def rounding(self, point: Leaves, moved: Leaves) -> Leaves | None:
        """How far rounding moves what the outputs change by from one point to another; None if nobody can tell."""
        found = self._rounding(_VALUE, moved, still=point)
        # Callbacks to Python may not run at two points at once, where it matters what they return.
        is_known = found is not None and all(np.isfinite(moves).all() for moves in found)
        return found if is_known else self._rounding(_VALUE, moved)

    def rounding_of_tangents(self, point: Leaves, direction: Leaves) -> Leaves | None:
        """How far rounding moves the tangents of the outputs along a direction."""
        return self._rounding(_FORWARD, [*point, *direction])

    def rounding_of_cotangents(self, point: Leaves, weights: Vector) -> Leaves | None:
        """How far rounding moves the cotangents of the leaves for given weights of the outputs."""
        return self._rounding(_REVERSE, [*point, *self.cotangents(weights)])

    def _rounding(self, which: int, operands: Leaves, **how: Leaves) -> Leaves | None:
        with jax.enable_x64(True), silent_callbacks():
            try:
                traced = self._in_float64(which, operands)
                return None if traced is None else rounding_noise(traced, operands, _SAMPLES, **how)
            except REFUSALS:
                return None

    def _in_float64(self, which: int, operands: Leaves) -> ClosedJaxpr | None:
        jaxpr = self._jaxprs[which]
        if jaxpr is not None and which not in self._traced:
            promote = promoted(jaxpr, smooth_instead) if which == _VALUE else promoted(jaxpr)
            self._traced[which] = jax.make_jaxpr(promote)(*operands)
        return self._traced.get(which)

    def by_output(self, outputs: Vector) -> list[Vector]:
        """Split a vector of outputs into the outputs."""
        ends = np.cumsum(self.sizes, dtype=int)
        return [outputs[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def cotangents(self, weights: Vector) -> Leaves:
        """Arrange weights, one per element, in the shapes of the outputs."""
        parts = zip(self.by_output(weights), self._shapes, self._is_complex, strict=True)
        return [(part.astype(complex) if c else part.real.astype(float)).reshape(shape) for part, shape, c in parts]


def _of_constants(jaxpr: ClosedJaxpr | None, **how: Any) -> Callable[..., Operands]:
    """A jaxpr in float64 as a function of its constants and its operands; of nothing if there is none."""
    if jaxpr is None:
        return lambda consts, operands: []
    closed, x64 = reclosing(jaxpr_and_consts(jaxpr)[0]), bool(jax.config.jax_enable_x64)
    return lambda consts, operands, **more: promoted(closed(consts), x64=x64, **how | more)(*operands)


def _either(first: Rule | None, second: Rule | None) -> Rule:
    """A rule, and where it says nothing another."""

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        results = None if first is None else first(chain, operands)
        return second(chain, operands) if results is None and second is not None else results

    return rule


def wide_real(vector: Any) -> Any:
    """A real vector in float64, under `jax.enable_x64(True)`."""
    return vector.astype(jnp.float64)


def _rounding_outside(off: Any) -> Rule:
    """The rule by which what runs outside of JAX rounds differently, by so many units of its own dtypes."""

    def moved(value: Any, aval: Any) -> Any:
        if not is_floating(aval):
            return value
        array = jnp.asarray(value)
        by = 2 * float(jnp.finfo(aval.dtype).eps) * off * signs(array.size).reshape(array.shape)
        return array * (1 + by).astype(array.real.dtype)

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        equation = chain[-1]
        if not leaves_jax(equation) or not any(is_floating(variable.aval) for variable in equation.outvars):
            return None
        given = [moved(x, atom.aval) for x, atom in zip(operands, equation.invars, strict=True)]
        return [moved(x, v.aval) for x, v in zip(exactly(equation, given), equation.outvars, strict=True)]

    return rule


def signs(size: int) -> Vector:
    """Signs that alternate irregularly, so that they seldom cancel."""
    return np.where(np.arange(size) * 7 % 3 == 0, -1.0, 1.0)


def _unsharded(value: Any) -> Any:
    """An array on all devices: one whose sharding is part of its type cannot be reshaped at will."""
    array = jnp.asarray(value)
    sharding = explicit_sharding(jax.typeof(array))
    return array if sharding is None else jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _as_real(arrays: Operands) -> Any:
    """Arrays as one real vector; real and imaginary parts alternate."""
    parts = [
        jnp.ravel(jnp.stack([a.real, a.imag], axis=-1)) if jnp.iscomplexobj(a) else jnp.ravel(a)
        for a in map(_unsharded, arrays)
    ]
    return wide_real(jnp.concatenate([*parts, jnp.zeros(0)]))


def size_of(values: Array) -> Array:
    """The size of each number; nothing for one that is not finite, which stays where it is."""
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def _leaves_of(inputs: list[tuple[tuple[int, ...], bool]], vector: Any) -> Leaves:
    """The leaves of a vector: passing one operand is much faster than passing hundreds."""
    parts = lax.split(vector, [int(np.prod(shape)) * (1 + is_complex) for shape, is_complex in inputs])
    return [
        lax.complex(part[::2], part[1::2]).reshape(shape) if is_complex else part.reshape(shape)
        for part, (shape, is_complex) in zip(parts, inputs, strict=True)
    ]


def _vector(leaves: Leaves) -> Vector:
    parts = [np.ascontiguousarray(leaf).reshape(-1).view(np.float64) for leaf in leaves]
    return np.concatenate([*parts, np.zeros(0)])


def _joined(outputs: list[Any]) -> Any:
    return jnp.concatenate([jnp.ravel(_unsharded(output)) for output in outputs]) if outputs else jnp.zeros(0)


def scale_of(leaf: Array) -> Array:
    """The size of each element, or that of the others if it is much smaller; a zero has none of its own."""
    sizes = size_of(leaf)
    largest = sizes.max(initial=0.0) or 1.0
    return np.where(sizes == 0, largest, np.maximum(sizes, _SMALLEST * largest))
