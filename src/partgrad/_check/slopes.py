"""Slopes by finite differences, with an error estimate for each output.

Differences are taken at steps that shrink by a factor of about four. Where a function is smooth, its central slopes
have a limit in even powers of the step, and the gap between its slopes to the right and to the left falls to zero in
odd ones. Where it has a kink the gap stays, and the central slopes converge all the same, to a number that is nobody's
derivative. The gap therefore counts as an error of the slope.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

SMOOTH, KINK, JUMP, UNSURE = range(4)

Array = np.ndarray[Any, Any]

# Not powers of two: a function rounds to multiples of one, and every step would meet them at the same phase.
_FIRST_STEP = 2.0**-6 * 0.9549150281252627
_RATIO = ((1 + 5**0.5) / 2) ** 3
_FEWEST_LEVELS = 3
_MOST_LEVELS = 11
# Rounding errors, relative to the rounded value.
_ROUNDING = 4 * float(np.finfo(np.float64).eps)
# Errors relative to the slope: the target, and the most at which it still counts as one.
_AIM = 1e-10
_WORST = 1e-6
# The same, relative to the rounding errors of the first step, for slopes that are zero or nearly so.
_AIM_IN_ROUNDING = 30.0
_WORST_IN_ROUNDING = 1000.0
# The same, relative to the slope of the first step, if that of the others vanishes.
_WORST_OF_FIRST = 1e-6
# By how much a slope grows at each step, at least and at most, if it grows without bound; and how nearly by the same.
_GROWTH, _FASTEST = 1.04, 0.9 * _RATIO
_STEADY = 0.95
# How far apart the estimates of two windows of steps may lie, in units of their errors.
_APART = 3.0
# How many outputs are judged together, which bounds the memory.
_TOGETHER = 1 << 15


class Slope(NamedTuple):
    """The slopes of the outputs of a function of one number, at zero, with their errors.

    The kind is `SMOOTH`; `KINK`, where the slopes to the right and to the left differ, of which one may be infinite;
    `JUMP`, where the value differs; or `UNSURE`.
    """

    derivative: Array
    error: Array
    kind: Array
    right: Array
    left: Array
    steps: tuple[float, ...] = ()


def slope(
    along: Callable[[float], Any],
    at_zero: Any = None,
    *,
    shrink: float = 1.0,
    noise: Callable[[float], Any] = lambda step: 0.0,
    smallest: float = 0.0,
    worst: float = 1e-4,
) -> Slope:
    """The slopes at zero of the outputs of a function, as a vector of float64 or complex128.

    Args:
        along: The function.
        at_zero: Its value at zero.
        shrink: Another factor between the steps gives a second opinion.
        noise: From a step to the error of the outputs there beyond their own rounding.
        smallest: No step is smaller.
        worst: The relative error with which a slope still counts as one, if no smaller step improves it.
    """
    start = np.asarray(along(0.0) if at_zero is None else at_zero)
    judged, probes, steps = _Judged.unknown(_real(start).size), list[_Probes](), list[float]()
    with np.errstate(all="ignore"):
        while len(steps) < _FEWEST_LEVELS or (len(steps) < _MOST_LEVELS and np.any(judged.may_improve)):
            step = _FIRST_STEP * shrink / _RATIO ** len(steps)
            if step < smallest and len(steps) >= _FEWEST_LEVELS:
                break
            off = noise(step)
            off = np.repeat(off, 2) if np.iscomplexobj(start) and np.ndim(off) else off
            probes.append(_Probes(step, _real(along(step)), _real(along(-step)), off))
            steps.append(step)
            if len(steps) >= _FEWEST_LEVELS:
                judged.improve(_levels(probes, _real(start)))
    is_known = (judged.kind == UNSURE) & (judged.error <= worst * np.abs(judged.derivative))
    kind = np.where(is_known & ~judged.disputed, SMOOTH, judged.kind)
    right, left = (np.where(kind == KINK, side, judged.derivative) for side in (judged.right, judged.left))
    found = Slope(judged.derivative, judged.error, kind, right, left, tuple(steps))
    if not np.iscomplexobj(start):
        return found
    of_parts = found.kind[::2], found.kind[1::2]
    finite = lambda side: np.where(np.isfinite(side), side, judged.derivative).view(np.complex128)
    return Slope(
        found.derivative.view(np.complex128),
        np.hypot(found.error[::2], found.error[1::2]),
        np.maximum(*of_parts),
        finite(right),
        finite(left),
        found.steps,
    )


def _real(outputs: Any) -> Array:
    outputs = np.ascontiguousarray(outputs)
    return outputs.view(np.float64) if np.iscomplexobj(outputs) else outputs.astype(np.float64)


class _Judged(NamedTuple):
    """What is known of each output so far, and whether smaller steps may improve it."""

    derivative: Array
    error: Array
    kind: Array
    right: Array
    left: Array
    disputed: Array
    may_improve: Array

    @classmethod
    def unknown(cls, outputs: int) -> "_Judged":
        derivative, error, right, left = (np.zeros(outputs) for _ in range(4))
        kind, disputed = np.zeros(outputs, int), np.zeros(outputs, bool)
        return cls(derivative, error, kind, right, left, disputed, np.ones(outputs, bool))

    def improve(self, levels: list["_Level"]) -> None:
        """Judge again the outputs for which smaller steps may help."""
        outputs = np.flatnonzero(self.may_improve)
        for start in range(0, outputs.size, _TOGETHER):
            part = outputs[start : start + _TOGETHER]
            parts = [_Level(*(values[part] for values in level)) for level in levels]
            for known, new in zip(self, _judgement(parts), strict=True):
                known[part] = new


def _judgement(levels: list["_Level"]) -> _Judged:
    """The estimate with the smallest error that no window of smaller steps contradicts."""
    windows = [_window(levels[first : last + 1]) for first, last in _windows(len(levels))]
    rounding = levels[0].rounding
    # A slope of zero has no size of its own; but those of the larger steps have, if they shrink with the steps.
    first = _first_of_vanishing(levels)
    best = windows[-1]
    for i, window in enumerate(windows[:-1]):
        agrees = np.logical_and.reduce([_agree(window, finer) for finer in windows[i + 1 :]])
        better = agrees & ~(best.error <= window.error)
        best = _Window(*(np.where(better, new, old) for new, old in zip(window, best, strict=True)))
    believable = lambda window: (
        np.isfinite(window.error)
        & (
            (window.error <= _WORST * np.abs(window.slope))
            | (window.error <= _WORST_IN_ROUNDING * rounding)
            | (window.error <= _WORST_OF_FIRST * first)
        )
    )
    # Two windows that contradict each other, both with small errors, are both worthless.
    disputed = np.logical_or.reduce([believable(window) & ~_agree(window, best) for window in windows])
    kind, sides = _unsmooth(levels, windows)
    is_smooth = believable(best) & ~disputed
    kind = np.where(is_smooth, SMOOTH, kind)
    is_nothing = np.abs(best.slope) <= _WORST_IN_ROUNDING * rounding
    reached = (best.error <= _AIM * np.abs(best.slope)) | (is_nothing & (best.error <= _AIM_IN_ROUNDING * rounding))
    # Steps smaller than the best only increase the rounding errors.
    reached |= believable(best) & (np.minimum(windows[-1].error, windows[-2].error) > best.error)
    return _Judged(
        best.slope,
        np.where(kind == KINK, sides.error, best.error),
        kind,
        sides.right,
        sides.left,
        disputed,
        ~(reached & ~disputed),
    )


def _first_of_vanishing(levels: list["_Level"]) -> Array:
    """The slope of the first step, if that of each step is less than half that of the step before, down to rounding.

    Of an even function, whose central slopes are all zero, it is the slope on one side.
    """
    is_even = np.logical_and.reduce([np.abs(level.central) <= 10 * level.rounding for level in levels])
    sizes = [np.where(is_even, np.abs(level.gap) / 2, np.abs(level.central)) for level in levels]
    pairs = zip(itertools.pairwise(sizes), levels[1:], strict=True)
    shrinks = (fine <= coarse / 2 + 10 * level.rounding for (coarse, fine), level in pairs)
    return np.where(np.logical_and.reduce(list(shrinks)), sizes[0], 0.0)


def _agree(one: "_Window", other: "_Window") -> Array:
    unknown = np.isinf(one.error) | np.isinf(other.error)
    return unknown | (np.abs(one.slope - other.slope) <= _APART * (one.error + other.error))


class _Level(NamedTuple):
    """The slopes of one step: the central one, and the difference between right and left."""

    central: Array
    gap: Array
    rounding: Array
    step: Array


class _Probes(NamedTuple):
    """The values at a step to both sides, and their noise."""

    step: float
    forward: Array
    backward: Array
    noise: Any


def _levels(probes: list[_Probes], start: Array) -> list[_Level]:
    """The slopes of each step. At the edge of a domain, beyond which nothing is finite, they are those from inside."""
    ends = [np.isfinite(probes[-1].forward), np.isfinite(probes[-1].backward)]
    no_forward, no_backward = ends[1] & ~ends[0] & np.isfinite(start), ends[0] & ~ends[1] & np.isfinite(start)
    levels = []
    for step, forward, backward, noise in probes:
        # As if the function went on with the same slope.
        ahead = np.where(no_forward, 2 * start - backward, forward)
        behind = np.where(no_backward, 2 * start - forward, backward)
        levels.append(_level(step, ahead, behind, start, noise))
    return levels


def _level(step: float, forward: Array, backward: Array, start: Array, noise: Any) -> _Level:
    central = (forward - backward) / (2 * step)
    gap = ((forward - start) - (start - backward)) / step
    # Both the point and the value are rounded.
    rounded = np.maximum(np.abs(forward), np.abs(backward)) + np.abs(central)
    return _Level(central, gap, (_ROUNDING * rounded + noise) / step, np.full(central.shape, step))


class _Window(NamedTuple):
    """The estimates of two or three neighbouring steps."""

    slope: Array
    error: Array
    # The gap in the limit, and its error.
    gap: Array
    gap_error: Array


def _windows(levels: int) -> Iterator[tuple[int, int]]:
    """First and last level of each window, from large steps to small ones."""
    for last in range(1, levels):
        if last > 1:
            yield last - 2, last
        yield last - 1, last


def _window(levels: list[_Level]) -> _Window:
    rounding = levels[-1].rounding
    slope, slope_error = _limit([level.central for level in levels], _RATIO**2)
    # In all powers if the second derivative jumps, as that of a spline does at a knot.
    other, other_error = _limit([level.central for level in levels], _RATIO, _RATIO)
    is_better = other_error < slope_error
    slope, slope_error = np.where(is_better, other, slope), np.where(is_better, other_error, slope_error)
    # The gap falls in the powers 1, 3, ... of the step, the central slope in the powers 2, 4, ...
    gap, gap_error = _limit([level.gap for level in levels], _RATIO)
    error = np.maximum(slope_error, np.abs(gap) / 2) + rounding
    unknown = ~(np.isfinite(error) & np.isfinite(slope))
    return _Window(slope, np.where(unknown, np.inf, error), gap, gap_error + 2 * rounding)


def _limit(values: list[Array], factor: float, growth: float = _RATIO**2) -> tuple[Array, Array]:
    """The limit of a sequence by Richardson extrapolation, and the distance between the last two extrapolations."""
    while True:
        pairs = list(itertools.pairwise(values))
        extrapolated = [fine + (fine - coarse) / (factor - 1) for coarse, fine in pairs]
        if len(extrapolated) == 1:
            coarse, fine = pairs[0]
            return extrapolated[0], np.maximum(np.abs(extrapolated[0] - fine), np.abs(extrapolated[0] - coarse))
        values, factor = extrapolated, factor * growth


class _Sides(NamedTuple):
    """The slopes on both sides, and their error."""

    right: Array
    left: Array
    error: Array


def _unsmooth(levels: list[_Level], windows: list[_Window]) -> tuple[Array, _Sides]:
    """Whether a function without a derivative has a kink or a jump, and the slopes on its sides."""
    best = windows[-1]
    for window in windows[:-1]:
        better = window.gap_error < best.gap_error
        best = _Window(*(np.where(better, new, old) for new, old in zip(window, best, strict=True)))
    last, before = windows[-1], windows[-3]
    gap = np.abs(last.gap)
    is_kink = (gap > 5 * last.gap_error) & (gap > _WORST * np.abs(last.slope))
    # The sides must be what the smallest steps see: a rounded corner has none.
    is_kink &= np.abs(best.gap - last.gap) <= 5 * (best.gap_error + last.gap_error)
    is_kink &= np.abs(last.gap - before.gap) <= 0.2 * gap
    (right, right_error), (left, left_error) = (_side(levels, side) for side in (0.5, -0.5))
    steep_right, steep_left = (_is_steep(levels[-5:], side) for side in (0.5, -0.5))
    of_level = lambda side: levels[-1].central + side * levels[-1].gap
    is_cusp = steep_right ^ steep_left
    right = np.where(steep_right, np.copysign(np.inf, of_level(0.5)), np.where(is_cusp, of_level(0.5), right))
    left = np.where(steep_left, np.copysign(np.inf, of_level(-0.5)), np.where(is_cusp, of_level(-0.5), left))
    error = np.where(
        is_cusp, levels[-1].rounding + 0.1 * np.abs(np.where(steep_right, left, right)), right_error + left_error
    )
    # Slopes on the sides that are less certain than how far they are apart tell nothing of either.
    is_kink &= error <= np.abs(right - left)
    kind = np.where(_jumps(levels[-5:]), JUMP, np.where(is_kink | is_cusp, KINK, UNSURE))
    return kind, _Sides(right, left, error)


def _side(levels: list[_Level], side: float) -> tuple[Array, Array]:
    """The slope on a side, in all powers of the step, and its error: the least that no finer one refutes."""
    slopes = [level.central + side * level.gap for level in levels]
    best, least, finer = slopes[-1], np.full(slopes[-1].shape, np.inf), list[tuple[Array, Array]]()
    for last in reversed(range(2, len(levels))):
        found, error = _limit(slopes[last - 2 : last + 1], _RATIO, _RATIO)
        error = error + 4 * levels[last].rounding
        agrees = [np.abs(found - other) <= _APART * (error + of_other) for other, of_other in finer]
        is_better = (error < least) & np.logical_and.reduce(agrees) if agrees else error < least
        best, least = np.where(is_better, found, best), np.where(is_better, error, least)
        finer.append((found, error))
    return best, least


def _is_steep(levels: list[_Level], side: float) -> Array:
    """Whether the slope on a side grows without bound although the value does not jump, as that of a root at zero.

    It grows by no less at each step than at the one before, as a logarithm does; what has a limit comes nearer to it.
    Noise grows faster, as the steps shrink, and from what is no growth at all.
    """
    other = [level.central - side * level.gap for level in levels]
    slopes = [np.abs(level.central + side * level.gap) for level in levels]
    grows = np.ones(slopes[0].shape, bool)
    for (coarse, fine), level in zip(itertools.pairwise(slopes), levels[1:], strict=True):
        grows &= (fine - coarse > 1000 * level.rounding) & (fine > _GROWTH * coarse) & (fine < _FASTEST * coarse)
    for coarse, fine in itertools.pairwise(np.diff(slopes, axis=0)):
        grows &= (fine > _STEADY * coarse) & (fine < _FASTEST * coarse)
    calm = np.abs(other[-1] - other[-2]) <= 0.1 * np.abs(other[-1]) + 10 * levels[-1].rounding
    return grows & calm


def _jumps(levels: list[_Level]) -> Array:
    """Whether the value changes, on either side, by what does not shrink with the step."""
    found = np.zeros(levels[0].gap.shape, bool)
    for side in (0.5, -0.5):
        changes = [np.abs((level.central + side * level.gap) * level.step) for level in levels]
        seen = changes[-1] > 1000 * levels[-1].rounding * levels[-1].step
        grows = np.logical_and.reduce([fine >= coarse for coarse, fine in itertools.pairwise(changes)])
        stays = np.max(changes, axis=0) <= 1.25 * np.min(changes, axis=0)
        found |= seen & (grows | stays)
    return found
