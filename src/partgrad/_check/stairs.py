"""Stairs: a leaf that moves the value through comparisons or roundings, by many small steps, as in a bisection.

At steps finer than those, the derivative is the slope. But from afar the function has another one, which is the same
over steps of several sizes, and which goes once what is compared and rounded stays as it is at the point.
"""

from itertools import pairwise

import numpy as np

from .._programs import Chain
from .agreement import MISMATCH, Agreement, Reading
from .exact import Leaves, Vector
from .outcomes import is_discrete
from .point import Point
from .stops import fewest, holding
from .zeros import blockers, is_told_with_draws

# Steps, relative to the size of a leaf, that are large beside those of a staircase.
_AFAR = (2.0**-5, 2.0**-7, 2.0**-9)
# Where derivatives are read between the point and the largest.
_BETWEEN = (-0.875, -0.625, -0.375, -0.125, 0.125, 0.375, 0.625, 0.875)
# A slope is the same over two of them up to this factor; what bends differs by their ratio, or its square.
_STEADY = 1.5
# The part of a slope that counts, and the part of what is missing that may be left.
_COUNTS, _LEFT = 2e-2, 0.1


def explaining_stairs(point: Point, leaf: int, direction: Leaves) -> tuple[Chain, ...]:
    """The fewest operations through which the value, and no derivative, has a slope from afar; none if it has none."""
    missing = missing_slope(point, direction)
    if not missing:
        return ()
    program = point.exact.program
    wanted = lambda chain: is_discrete(chain) and not is_told_with_draws(program, chain)
    chains = blockers(program, leaf, wanted=wanted)
    is_whole = lambda held: abs(_missing(held, direction)[1][-1]) <= _LEFT * missing
    return fewest(chains, holding(point, chains, is_whole)) if chains else ()


def missing_slope(point: Point, direction: Leaves) -> float:
    """By how much the slope that a function has from afar differs from its derivative; nothing if there is none.

    A function changes by the integral of its derivative, unless it goes by steps.
    """
    slopes, missing = _missing(point, direction)
    if not (np.isfinite(slopes).all() and _is_steady(slopes) and _is_steady(missing)):
        return 0.0
    size = max(np.max(np.abs(slopes)), np.max(np.abs(slopes - missing)))
    off = float(np.min(np.abs(missing)))
    if min(off, float(np.min(np.abs(slopes)))) <= _COUNTS * size:
        return 0.0
    mean = np.mean([point.derivative(direction, part * _AFAR[0]) for part in _BETWEEN])
    return off if _is_steady(np.array([missing[0], slopes[0] - mean])) else 0.0


def from_afar(point: Point, direction: Leaves, reading: Reading) -> Reading:
    """The reading with the slope that the function has from afar."""
    slopes, missing = _missing(point, direction)
    slope, off = float(slopes[-1]), float(missing[-1])
    got = slope - off
    found = Agreement(MISMATCH, got, slope, abs(off) / max(abs(slope), abs(got)))
    return reading._replace(forward=found, reverse=found, right=slope, left=slope, noise=0.0, steps=_AFAR)


def _missing(point: Point, direction: Leaves) -> tuple[Vector, Vector]:
    """The slopes of the weighted sum of the outputs over large steps, and what the derivative lacks of them."""
    exact = point.exact
    value = lambda step: (point.weights * exact.value(point.leaves, direction, step)).real.sum()
    with np.errstate(all="ignore"):
        slopes = np.array([(value(step) - value(-step)) / (2 * step) for step in _AFAR])
        return slopes, slopes - point.derivative(direction)


def _is_steady(numbers: Vector) -> bool:
    ratios = [one / other if other else np.inf for one, other in pairwise(numbers)]
    return all(1 / _STEADY <= ratio <= _STEADY for ratio in ratios)
