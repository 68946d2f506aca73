"""Masks through products of a tangent and a coefficient, and the coefficients that no live edge needs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import is_floating, varying_like
from .known import is_safe_outside, numbers_of, reshaped
from .linear import Step
from .masked import Masked, only
from .masks import Mask, any_along, anywhere, both, full_like, permuted, placed, spelled_out, spread


def is_constant(value: Any, divides: bool = False) -> bool:
    """Whether a value is not floating, or finite whatever the data are, and so is its reciprocal if it divides."""
    numbers = numbers_of(value)
    if numbers is None or not is_floating(numbers):
        return not is_floating(jax.typeof(value))
    return bool(np.all(np.isfinite(numbers)) and (not divides or np.all(numbers)))


def coefficient(value: Any, needed: Mask, filler: Any = None) -> Any:
    """A fixed operand, with the filler (ones by default) where no live edge needs it."""
    if needed is True or is_safe_outside(value, needed) or is_constant(value):
        return value
    if filler is None and not isinstance(needed, bool) and not jax.typeof(value).weak_type:
        shape = jnp.broadcast_shapes(needed.shape, jnp.shape(value))
        value = spelled_out(value, shape)
        mask = varying_like(spelled_out(needed, shape), jax.typeof(value))
        return jax.lax.select(mask, value, varying_like(jax.lax.full_like(value, 1), jax.typeof(value)))
    # A Python number does not change a weak type.
    return jnp.where(needed, value, 1 if filler is None else varying_like(filler, jax.typeof(value)))


# --- sums of products ------------------------------------------------------------------------------------------------


class _DotAxes:
    """The axes of one operand of a `dot_general`, and the positions of its free ones in the result."""

    def __init__(self, step: Step, which: int):
        contracting, batch = step.equation.params["dimension_numbers"]
        shapes = [tuple(variable.aval.shape) for variable in step.equation.invars]
        free = [
            [axis for axis in range(len(shapes[k])) if axis not in contracting[k] and axis not in batch[k]]
            for k in (0, 1)
        ]
        self.shape = shapes[which]
        self.batch, self.contracting, self.free = list(batch[which]), list(contracting[which]), free[which]
        start = len(self.batch) + (len(free[0]) if which else 0)
        self.in_result = list(range(start, start + len(self.free)))
        self.result_batch = list(range(len(self.batch)))

    def without(self, mask: Mask, kept: list[int]) -> Mask:
        """The mask of this operand reduced to some of its axes, in the given order: true if any element is."""
        rest = [axis for axis in range(len(self.shape)) if axis not in kept]
        # Reduced first: one of its axes is never moved as a whole.
        reduced = permuted(any_along(mask, rest, keepdims=True), kept + rest)
        return reduced if isinstance(reduced, bool) else reshaped(reduced, reduced.shape[: len(kept)])


def dot_fed(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """The mask of a `dot_general`: of a row or column, whether any element of it is fed."""
    if len(step.tangents) != 1:
        return [spread(anywhere(fed), step.shape)]
    which = step.position
    mask, axes = fed[which], _DotAxes(step, which)
    if isinstance(mask, bool):
        return [mask]
    mask = axes.without(mask, axes.batch + axes.free)
    return [placed(mask, axes.result_batch + axes.in_result, len(step.shape))]


def _dot_needed(step: Step, mask: Any) -> Mask:
    own, other = _DotAxes(step, step.position), _DotAxes(step, 1 - step.position)
    mask = own.without(mask, own.batch + own.contracting)
    return placed(mask, other.batch + other.contracting, len(other.shape))


def convolution_fed(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """The mask of a convolution, which goes through one with ones."""
    if len(step.tangents) != 1 or all(isinstance(mask, bool) for mask in fed):
        return [spread(anywhere(fed), step.shape)]
    (aval,) = step.tangents
    tangent = full_like(fed[step.position], aval).astype(aval.dtype)
    return [step.with_fixed([jnp.ones_like(value) for value in step.fixed]).run([tangent])[0] != 0]


def _convolution_needed(step: Step, mask: Any) -> Mask:
    (aval,), (factor,) = step.tangents, step.fixed
    tangent = full_like(mask, aval).astype(aval.dtype)
    pull = jax.linear_transpose(lambda c: step.with_fixed([c]).run([tangent])[0], factor)
    return pull(full_like(True, step.results[0]).astype(step.results[0].dtype))[0] != 0


def summed(step: Step, mask: Mask, value: Any) -> tuple[Any, bool]:
    """The result of a `dot_general` or a convolution of one clean tangent, and whether it is zero where it is not fed.

    Coefficients are replaced only where every tangent that meets them is dead. Rows that are dead as a whole are
    selected from the result; only the axes summed over matter.
    """
    (factor,) = step.fixed
    needed, is_clean = True, is_constant(factor)
    if step.name == "conv_general_dilated":
        needed = True if mask is True else _convolution_needed(step, mask)
    elif not isinstance(mask, bool):
        own = _DotAxes(step, step.position)
        if any(mask.shape[axis] != 1 for axis in own.contracting):
            needed = _dot_needed(step, mask)
            is_clean = is_clean or all(mask.shape[axis] == 1 for axis in own.free)
    (result,) = step.with_fixed([coefficient(factor, needed)]).run([value])
    return result, is_clean


def scaled_fed(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """The mask of a `scatter_mul`."""
    # Of a custom backward pass that is not linear, a factor may be a tangent as well.
    return [fed[0] if step.linear == [True, False, False] else spread(anywhere(fed), step.shape)]


def factors_fed(step: Step, masks: Sequence[Mask]) -> Mask:
    """The mask of a product or quotient of two tangents, as in a pass that scales its cotangent by its norm."""
    one, other = (spread(mask, step.shape) for mask in masks)
    return both(one, other) if step.name == "mul" else one


# --- solves and Fourier transforms: every element of a problem depends on every element of it ------------------------


def coupled_axes(step: Step) -> tuple[int, ...]:
    """The axes of the right-hand side and the result along which elements depend on each other."""
    rank = len(step.shape)
    if step.name == "fft":
        return tuple(range(rank - len(step.equation.params["fft_lengths"]), rank))
    # The columns of a right-hand side, or its rows, are problems of their own.
    return (rank - 2 if step.equation.params.get("left_side", True) else rank - 1,)


def solved(step: Step, mask: Mask, value: Any, fed: Sequence[Mask]) -> list[Masked]:
    """The results for a clean right-hand side, and zero for the problems that no path leads to."""
    problems = any_along(mask, sorted({*coupled_axes(step), *_columns(step)}), keepdims=True)
    # Ones in a triangle are a system that can be solved; on three diagonals the middle one has to dominate.
    fillers = [3 if (step.name, number) == ("tridiagonal_solve", 1) else None for number in range(len(step.fixed))]
    fixed = [coefficient(v, _of_rank(problems, v), filler) for v, filler in zip(step.fixed, fillers, strict=True)]
    results = step.with_fixed(fixed).run([value])
    return [Masked(only(mask, result), mask) for mask, result in zip(fed, results, strict=True)]


def _columns(step: Step) -> list[int]:
    """The axes of the right-hand side along which the problems share a matrix."""
    return [] if step.name == "fft" else [len(step.shape) - 1, len(step.shape) - 2]


def _of_rank(mask: Mask, value: Any) -> Mask:
    """A mask of batches for an operand that may have fewer trailing axes than the result."""
    rank = jnp.ndim(value)
    return mask if isinstance(mask, bool) or mask.ndim <= rank else reshaped(mask, mask.shape[:rank])
