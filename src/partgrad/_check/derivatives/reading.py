"""Forward and reverse derivatives compared with finite differences along one direction, in float64."""

import functools
from typing import Any, NamedTuple

import numpy as np

from .differences import JUMP, KINK, SMOOTH, UNSURE, Slope, slope
from .exact import Exact, Leaves, Vector

AGREE, ROUNDING, INCONCLUSIVE, MISMATCH, ABSENT = "agree", "rounding", "inconclusive", "mismatch", "absent"

# Relative disagreements: one that counts as none, and the largest that is no error if finite differences cannot tell.
_AIM = 1e-8
_WORST = 1e-4
# Steps that change only the last digits of a number.
_LAST_DIGITS = (-3e-15, -1e-15, 1e-15, 3e-15)
_MORE_DIGITS = (1e-15, 2e-15, 3e-15, 5e-15)
_MOST_NOISE = 1e-7
# In units of the error of the differences: what still counts as agreement, and what is a mismatch.
_WITHIN, _BEYOND = 3.0, 10.0
# Outputs this small, relative to the others of their array, are zero up to rounding.
_NOTHING = 1e-6


class Agreement(NamedTuple):
    """Whether a derivative agrees with finite differences, and the numbers where the agreement is worst.

    The status `rounding` means that constants of low precision or an iterative solver may explain the difference;
    `relative` is the difference relative to the sum of the magnitudes.
    """

    status: str
    got: Any = 0.0
    expected: Any = 0.0
    relative: float = 0.0


class Reading(NamedTuple):
    """Both derivatives compared with finite differences along one direction and, in `modes`, with each other.

    The reverse derivative is that of a weighted sum of the smooth outputs; the number of others is counted.
    """

    forward: Agreement
    reverse: Agreement
    modes: Agreement
    kinks: int
    jumps: int
    unsure: int

    @property
    def status(self) -> str:
        """A mismatch if there is any, or else the worse status of the two."""
        known = [self.forward.status, self.reverse.status]
        if MISMATCH in (*known, self.modes.status):
            return MISMATCH
        # If the two agree with each other, a status that one of them earned holds for both.
        order = (
            [ROUNDING, INCONCLUSIVE, AGREE] if self.modes.status == INCONCLUSIVE else [ROUNDING, AGREE, INCONCLUSIVE]
        )
        return next((status for status in order if status in known), ABSENT)

    @property
    def is_clean(self) -> bool:
        """Whether every output is smooth and both derivatives agree with the differences."""
        return self.status in (AGREE, ROUNDING, ABSENT) and not (self.kinks or self.jumps or self.unsure)


class _Noise(NamedTuple):
    """How far rounding moves the forward derivative of each output, and the reverse derivative of all."""

    forward: Any
    reverse: float


_NONE = _Noise(0.0, 0.0)


class Point:
    """A point at which the derivatives of a program are read, with a weight for each output."""

    def __init__(self, exact: Exact, leaves: Leaves, weights: Vector):
        self.exact, self.leaves, self.weights = exact, leaves, weights
        self.start = exact.value(leaves, [np.zeros_like(leaf) for leaf in leaves], 0.0)
        self._noise = self._measured_noise()

    def of(self, exact: Exact) -> "Point":
        """The same point of another program."""
        return Point(exact, self.leaves, self.weights)

    def _measured_noise(self) -> Vector:
        """How far the outputs move with the last digits of the point: more than their own rounding if terms cancel."""
        magnitudes, unit = [np.abs(leaf).astype(leaf.dtype) for leaf in self.leaves], self.exact.unit
        steps, most = (_LAST_DIGITS, _MOST_NOISE) if not unit else ([-2 * unit, -unit, unit, 2 * unit], 100 * unit)
        moved = [self.exact.value(self.leaves, magnitudes, step) for step in steps]
        with np.errstate(all="ignore"):
            off = np.max([np.abs(outputs - self.start) for outputs in moved], axis=0, initial=0.0)
            # An output that moves further is at a jump.
            return np.where(off <= most * np.abs(self.start), off, 0.0)

    @functools.cached_property
    def gradient(self) -> Leaves | None:
        """The reverse derivative of the weighted sum of all outputs."""
        return self.exact.reverse(self.leaves, self.weights)

    def slope(self, direction: Leaves, shrink: float = 1.0) -> Slope:
        """The slopes of the outputs along a direction by finite differences."""
        value = lambda step: self.exact.value(self.leaves, direction, step)
        return slope(value, self.start, shrink=shrink, noise=self._noise)

    def read(self, direction: Leaves, *, slack: float = 0.0, shrink: float = 1.0) -> Reading:
        """Compare along a direction; `slack` is the relative disagreement that has another explanation."""
        found = self.slope(direction, shrink)
        tangents = self.exact.forward(self.leaves, direction)

        def agreements(off: _Noise) -> tuple[Agreement, Agreement, Agreement]:
            return (
                self._forward(tangents, found, slack, off),
                self._reverse(direction, found, slack, off),
                self._modes(tangents, direction, slack, off),
            )

        each = agreements(_NONE)
        if any(agreement.status == MISMATCH for agreement in each):
            each = agreements(self._noise_of_derivatives(direction))
        counts = [int((found.verdict == verdict).sum()) for verdict in (KINK, JUMP, UNSURE)]
        return Reading(*each, kinks=counts[0], jumps=counts[1], unsure=counts[2])

    def _noise_of_derivatives(self, direction: Leaves) -> "_Noise":
        """How far both derivatives move with the last digits of the point."""
        forward, reverse = np.zeros(self.start.shape), 0.0
        for gradients in self._gradients_beside:
            reverse = max(reverse, float(_range([_product(gradient, direction)[0] for gradient in gradients])))
        for points in self._beside():
            tangents = [self.exact.forward(point, direction) for point in points]
            if tangents[0] is not None:
                forward = np.maximum(forward, _range(tangents))
        return _Noise(forward, reverse)

    def noise_of_gradient(self, leaf: int) -> float:
        """How far the gradient of a leaf moves with the last digits of the point: its norm."""
        ranges = (_range([gradient[leaf] for gradient in gradients]) for gradients in self._gradients_beside)
        return max((float(np.linalg.norm(moves)) for moves in ranges), default=0.0)

    @functools.cached_property
    def _gradients_beside(self) -> list[list[Leaves]]:
        if self.gradient is None:
            return []
        of = lambda point: self.exact.reverse(point, self.weights) or []
        return [[of(point) for point in points] for points in self._beside()]

    def _beside(self) -> list[list[Leaves]]:
        """Points that differ in their last digits, on two sides of the point: a tie may lie between them."""
        moved = lambda by: [x + by * np.abs(x) for x in self.leaves]
        return [[moved(side * by) for by in _MORE_DIGITS] for side in (-1.0, 1.0)]

    def _forward(self, tangents: Vector | None, found: Slope, slack: float, off: "_Noise") -> Agreement:
        if tangents is None:
            return Agreement(ABSENT)
        magnitude = np.maximum(np.abs(tangents), np.abs(found.derivative))
        finite = np.where(np.isfinite(magnitude) & (found.verdict == SMOOTH), magnitude, 0.0)
        of_arrays = self.exact.parts(finite)
        largest = np.concatenate([np.zeros(0), *(np.full(p.shape, np.max(p, initial=0.0)) for p in of_arrays)])
        magnitude = np.maximum(finite, _NOTHING * largest)
        smooth = found.verdict == SMOOTH
        rounding = np.broadcast_to(off.forward, smooth.shape)
        of_smooth = (v[smooth] for v in (tangents, found.derivative, found.error + rounding, magnitude, rounding))
        return self._agreement(slack, *of_smooth)

    def _reverse(self, direction: Leaves, found: Slope, slack: float, off: "_Noise") -> Agreement:
        smooth = found.verdict == SMOOTH
        if not smooth.any():
            return Agreement(ABSENT if self.gradient is None else INCONCLUSIVE)
        weights = np.where(smooth, self.weights, 0.0)
        gradient = self.gradient if smooth.all() else self.exact.reverse(self.leaves, weights)
        if gradient is None:
            return Agreement(ABSENT)
        got, magnitude = _product(gradient, direction)
        slopes = (weights * np.where(smooth, found.derivative, 0.0)).real
        error = np.sqrt(np.sum((np.abs(weights) * np.where(smooth, found.error, 0.0)) ** 2)) + off.reverse
        magnitude = np.maximum(np.maximum(magnitude, abs(slopes.sum())), _NOTHING * np.abs(slopes).sum())
        return self._agreement(slack, *(np.atleast_1d(v) for v in (got, slopes.sum(), error, magnitude, off.reverse)))

    def _modes(self, tangents: Vector | None, direction: Leaves, slack: float, off: "_Noise") -> Agreement:
        if tangents is None or self.gradient is None:
            return Agreement(ABSENT)
        got, magnitude = _product(self.gradient, direction)
        products = (self.weights * tangents).real
        magnitude = max(magnitude, _NOTHING * float(np.abs(products).sum()))
        if not np.isfinite(magnitude):
            return Agreement(INCONCLUSIVE, got, products.sum())
        error = np.linalg.norm(self.weights * off.forward) + off.reverse
        return self._agreement(slack, *(np.atleast_1d(v) for v in (got, products.sum(), error, magnitude, error)))

    def _agreement(
        self, slack: float, got: Vector, expected: Vector, error: Vector, magnitude: Vector, off: Vector
    ) -> Agreement:
        if not got.size:
            return Agreement(INCONCLUSIVE)
        with np.errstate(all="ignore"):
            difference = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
            # The error of a finite difference may only explain away so much.
            agrees = difference <= np.maximum(_AIM * magnitude, np.minimum(_WITHIN * error, _WORST * magnitude))
            # Both are zero up to rounding.
            agrees |= magnitude <= _WITHIN * off
            differs = ~agrees & (difference > _BEYOND * error)
            is_slight = difference <= slack * magnitude
            relative = np.where(difference > 0, difference / np.maximum(magnitude, np.finfo(float).tiny), 0.0)
        by_status = {
            MISMATCH: differs & ~is_slight,
            ROUNDING: differs & is_slight,
            AGREE: agrees,
            INCONCLUSIVE: np.ones(got.shape, bool),
        }
        status, of_status = next(item for item in by_status.items() if item[1].any())
        worst = int(np.argmax(np.where(of_status, relative, -1.0)))
        # No negative zeros.
        numbers = got[worst].item() + 0.0, expected[worst].item() + 0.0
        return Agreement(status, *numbers, float(relative[worst]))


def _range(values: list[Any]) -> Any:
    with np.errstate(all="ignore"):
        apart = np.max([np.abs(value - values[0]) for value in values], axis=0)
    # Values that are not finite are not noise.
    return np.where(np.isfinite(apart), apart, 0.0)


def _product(gradient: Leaves, direction: Leaves) -> tuple[float, float]:
    """The slope along a direction according to a gradient, and the sum of the magnitudes of its terms."""
    terms = [(g * v).real.ravel() for g, v in zip(gradient, direction, strict=True) if np.any(v)]
    terms = [*terms, np.zeros(1)]
    # An infinite derivative does not matter where the direction is zero.
    joined = np.concatenate(terms)
    moves = np.concatenate([*(v.ravel() != 0 for v in direction if np.any(v)), np.zeros(1, bool)])
    joined = np.where(moves, joined, 0.0)
    return float(joined.sum()), float(np.abs(joined).sum())
