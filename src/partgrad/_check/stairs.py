"""Stairs: a leaf that moves the value through comparisons or roundings, by many small steps, as in a bisection.

At steps finer than those, the derivative is the slope. But from afar the function has another one, which is the same
over steps of several sizes, and which goes once what is compared and rounded stays as it is at the point.
"""

from typing import NamedTuple

import numpy as np

from .._programs import Chain
from .agreement import MISMATCH, Agreement, Reading
from .exact import Leaves, Vector
from .outcomes import goes_by_steps
from .point import Point
from .stops import fewest, holding
from .zeros import blockers, blockers_in_rules, is_told_with_draws

# Steps, relative to the size of a leaf, of which three neighbours may be large beside those of a staircase.
_AFAR = tuple(2.0**-power for power in (1, 3, 5, 7, 9, 11, 13))
_TOGETHER = 3
# Where derivatives are read between the point and the largest.
_BETWEEN = (-0.875, -0.625, -0.375, -0.125, 0.125, 0.375, 0.625, 0.875)
# A slope is the same over two of them up to this factor; what bends differs by their ratio, or its square.
_STEADY = 1.5
# The part of a slope that counts, and the part of what is missing that may be left.
_COUNTS, _LEFT = 2e-2, 0.1


class Missing(NamedTuple):
    """The slopes of the weighted sum of one output over large steps, and what the derivative lacks of them."""

    steps: tuple[float, ...]
    slopes: Vector
    lacks: Vector
    output: int


def explaining_stairs(point: Point, leaf: int, direction: Leaves, missing: Missing) -> tuple[Chain, ...]:
    """The fewest operations through which the value, and no derivative, has a slope from afar."""
    program = point.exact.program
    wanted = lambda chain: goes_by_steps(chain) and not is_told_with_draws(program, chain)
    last = blockers(program, leaf, wanted=wanted) + blockers_in_rules(program, leaf, wanted)
    left = lambda held: _over(missing.steps[-1:], held, direction)[1][-1, missing.output]
    is_whole = lambda held: abs(left(held)) <= _LEFT * abs(missing.lacks[-1])
    explaining = lambda chains: fewest(chains, holding(point, chains, is_whole, only_places=True)) if chains else ()
    # In a loop, what comes before another may come after it as well.
    return explaining(last) or explaining(blockers(program, leaf, wanted=wanted, all_in_a_row=True))


def missing_slope(point: Point, direction: Leaves) -> Missing | None:
    """What a function has of a slope from afar that its derivative lacks; None if there is none.

    A function changes by the integral of its derivative, unless it goes by steps.
    """
    slopes, lacks = _over(_AFAR, point, direction)
    firsts = range(len(_AFAR) - _TOGETHER + 1)
    windows = [(slice(first, first + _TOGETHER), i) for first in firsts for i in range(slopes.shape[1])]
    counting = [found for i in windows if _counts(found := Missing(_AFAR[i[0]], slopes[i], lacks[i], i[1]))]
    for found in sorted(counting, key=lambda found: _unsteadiness(found.lacks)):
        between = [point.derivatives(direction, part * found.steps[0])[found.output] for part in _BETWEEN]
        if _unsteadiness(np.array([found.lacks[0], found.slopes[0] - np.mean(between)])) <= _STEADY:
            return found
    return None


def steady_slope(point: Point, direction: Leaves) -> tuple[float, tuple[float, ...]] | None:
    """The slope of a function that is flat between small steps, over larger ones; None if it is not steady."""
    slopes = _over(_AFAR, point, direction)[0].sum(axis=1)
    windows = [slice(first, first + _TOGETHER) for first in range(len(_AFAR) - _TOGETHER + 1)]
    best = min(windows, key=lambda window: _unsteadiness(slopes[window]))
    if not _unsteadiness(slopes[best]) <= _STEADY:
        return None
    # Steps of the function count more in small ones, and its curvature in large ones.
    return float(slopes[best][1]), _AFAR[best]


def from_afar(reading: Reading, slope: float, derivative: float, steps: tuple[float, ...]) -> Reading:
    """The reading with the slope that the function has from afar."""
    off = Agreement(MISMATCH, derivative, slope, abs(slope - derivative) / max(abs(slope), abs(derivative)))
    return reading._replace(forward=off, reverse=off, right=slope, left=slope, noise=0.0, steps=steps)


def _over(steps: tuple[float, ...], point: Point, direction: Leaves) -> tuple[Vector, Vector]:
    """The slopes over some steps, and what the derivative lacks of them, of each output."""
    along = point.along(direction)
    value = lambda step: point.sums(along(step))
    with np.errstate(all="ignore"):
        slopes = np.array([(value(step) - value(-step)) / (2 * step) for step in steps])
        return slopes, slopes - point.derivatives(direction)


def _counts(missing: Missing) -> bool:
    """Whether the slopes over large steps are the same, and so is what the derivative lacks of them, which is much."""
    slopes, lacks = missing.slopes, missing.lacks
    if not (np.isfinite(slopes).all() and max(map(_unsteadiness, (slopes, lacks))) <= _STEADY):
        return False
    size = max(np.max(np.abs(slopes)), np.max(np.abs(slopes - lacks)))
    return bool(min(np.min(np.abs(lacks)), np.min(np.abs(slopes))) > _COUNTS * size)


def _unsteadiness(numbers: Vector) -> float:
    """By which factor neighbours differ, at most; infinite if they have two signs, or are not finite."""
    with np.errstate(all="ignore"):
        ratios = numbers[1:] / numbers[:-1]
    return float(np.max(np.maximum(ratios, 1 / ratios))) if np.all(ratios > 0) else np.inf
