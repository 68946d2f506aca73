"""Steps in which every element of a problem depends on every element of it: solves, Fourier transforms."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .fed import coupled_axes
from .known import reshaped
from .linear import Step
from .masked import Masked, only
from .masks import Mask, any_along
from .products import coefficient


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
