"""Whether two runs that should give the same numbers do, up to rounding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .rounding import distance, widened

Noise = Callable[[], list[np.ndarray[Any, Any]]]

# A difference is beyond rounding where it exceeds the noise of its element and that of its array by these factors. The
# noise is that of errors which are three times as large as real ones.
_NOISE_OF_ELEMENT = 3.0
_NOISE_OF_ARRAY = 2.0
_ARRAY_QUANTILE = 0.75
# What is let pass in any case, in units in the last place, and, where the noise is not known, in those of the largest
# element. Of half precision, many units would be all of the number.
_UNITS = 64.0
_UNITS_OF_HALF = 4.0
_UNITS_OF_ARRAY = 32.0
_HALF = 1e-4
_LEAST = 1e-7


class Apart(NamedTuple):
    """Where two runs give numbers that are further apart than rounding can bring them.

    Attributes:
        output: Which of the arrays.
        element: The index of the element that is furthest beyond its tolerance; empty also where shapes differ.
        first: Its value in the first run.
        second: Its value in the second run; NaN where shapes differ.
        absolute: How far the two are apart: infinite where only one of them is finite, or shapes differ.
        relative: The same, as a part of the larger.
        tolerance: How far they may be apart.
        elements: How many elements are apart.
        shapes: The two shapes where they differ, else None.
    """

    output: int
    element: tuple[int, ...]
    first: complex
    second: complex
    absolute: float
    relative: float
    tolerance: float
    elements: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None


def apart(first: list[Any], second: list[Any], noise: Noise | None = None) -> list[Apart]:
    """Where two runs are further apart than rounding can bring them.

    Args:
        first: The outputs of a run.
        second: The outputs of another run.
        noise: How far rounding may move each element of each output. Asked only where the outputs are not as good as
            equal.

    Returns:
        One entry for each output in which they are apart, and one more, of index -1, where their numbers differ.
    """
    if len(first) != len(second):
        return [_unlike(-1, (len(first),), (len(second),))]
    return [found for i, pair in enumerate(zip(first, second, strict=True)) if (found := _compared(i, *pair, noise))]


def _compared(output: int, first: Any, second: Any, noise: Noise | None) -> Apart | None:
    if np.shape(first) != np.shape(second):
        return _unlike(output, np.shape(first), np.shape(second))
    wide = widened(first), widened(second)
    information = [jnp.finfo(jnp.result_type(value)) for value in (first, second)]
    unit = max(float(info.eps) for info in information)
    sizes = np.where(np.isfinite(wide[0]), np.abs(wide[0]), 0.0)
    gap = distance(*wide)
    tolerance = _relative(unit) * sizes + max(float(info.tiny) for info in information)
    if noise is not None and np.any(gap > tolerance):
        moves = noise()[output]
        tolerance = tolerance + np.maximum(_NOISE_OF_ELEMENT * moves, _NOISE_OF_ARRAY * _typical(moves))
    elif noise is None:
        tolerance = tolerance + min(_UNITS_OF_ARRAY * unit, _relative(unit)) * np.max(sizes, initial=0.0)
    return _worst(output, *wide, gap, tolerance) if np.any(gap > tolerance) else None


def _relative(unit: float) -> float:
    return max((_UNITS_OF_HALF if unit > _HALF else _UNITS) * unit, _LEAST)


def _typical(moves: np.ndarray[Any, Any]) -> float:
    """A bound on the moves of most elements of an array: that of one element is small by chance at times."""
    finite = moves[np.isfinite(moves)]
    return float(np.quantile(finite, _ARRAY_QUANTILE)) if finite.size else 0.0


def _worst(output: int, first: Any, second: Any, gap: Any, tolerance: Any) -> Apart:
    with np.errstate(all="ignore"):
        excess = np.where(gap > tolerance, gap / tolerance, 0.0)
        # The larger of two infinite ones is that of the larger value; any will do.
        element = tuple(int(i) for i in np.unravel_index(np.argmax(excess), gap.shape))
        absolute, largest = float(gap[element]), max(abs(first[element]), abs(second[element]))
        relative = absolute / largest if np.isfinite(absolute) else np.inf
    values = (first[element].item(), second[element].item())
    return Apart(
        output,
        element,
        *values,
        absolute,
        float(relative),
        float(tolerance[element]),
        int(np.sum(gap > tolerance)),
        None,
    )


def _unlike(output: int, first: tuple[int, ...], second: tuple[int, ...]) -> Apart:
    return Apart(output, (), np.nan, np.nan, np.inf, np.inf, 0.0, 0, (first, second))
