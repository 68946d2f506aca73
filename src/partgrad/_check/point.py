"""Derivatives compared with finite differences at a point, along one direction, in float64.

Slopes by differences are judged before they are compared: where the sides differ, the derivative must lie between them;
where the value jumps or the differences do not settle, there is nothing to compare with.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .._compat import cached_property
from .agreement import ABSENT, AGREE, INCONCLUSIVE, MISMATCH, Agreement, Reading, agreement
from .exact import UNIT, Exact, Leaves, Vector, scale_of, signs, size_of
from .float64 import wide_dtype
from .outcomes import Outcomes
from .slopes import JUMP, KINK, SMOOTH, UNSURE, Slope, slope

# Steps that change only the last digits of a number: where digits cancel, more of them have to.
_DIGITS = (1e-15, 2e-15, 3e-15, 5e-15, 3e-11, 1e-9)
LAST_DIGITS = _DIGITS[:4]
# Of so many steps a jump is the same, up to this factor.
_FEW, _STEADY = 4, 1.05
# How far rounding moves an output, relative to its size, and if it is zero: more is the noise of what cancels.
_USUAL, _USUAL_OF_ZERO = 1e-10, 1e-12
# Where rounding is looked at: at a step like the first difference, and if that leaves the domain, at a smaller one.
_PROBES = (2.0**-6, 2.0**-20)
# Slopes that are so many times their errors are known.
_BEYOND_NOISE = 1e3
# How large an output is, beside others, that is zero but for rounding errors.
_ZERO = 1e-10
# Outputs this small, relative to the others of their array, are zero up to rounding.
_NOTHING = 1e-6
# A slope is as steep as the noise if a step of the last digit moves the value by such a part of that.
_AS_STEEP = 1e-2


class Point:
    """A point at which the derivatives of a program are read, with a weight for each output."""

    def __init__(self, exact: Exact, leaves: Leaves, weights: Vector, outcomes: Outcomes):
        self.exact, self.leaves, self.weights, self.outcomes = exact, leaves, weights, outcomes
        # How far rounding moves the outputs along directions, as far as anybody asked.
        self._roundings: dict[int, Vector] = {}

    def of(self, exact: Exact) -> "Point":
        """The same point of another program."""
        return Point(exact, self.leaves, self.weights, self.outcomes)

    def with_weights(self, weights: Vector) -> "Point":
        """The same point with other weights."""
        return Point(self.exact, self.leaves, weights, self.outcomes)

    @cached_property
    def start(self) -> Vector:
        """The outputs."""
        return self.exact.value(self.leaves, [np.zeros_like(leaf) for leaf in self.leaves], 0.0)

    @cached_property
    def _sizes(self) -> Vector:
        """How large the outputs are: each as the largest of its array, unless that is zero beside the others."""
        largest = [np.max(size_of(output), initial=0.0) for output in self.exact.by_output(self.start)]
        least = _ZERO * max(largest, default=0.0) or np.inf
        return np.maximum(largest, least)[self.exact.output_of]

    def is_defined_beside(self, direction: Leaves, step: float) -> bool:
        """Whether the function has a finite value on both sides of the point."""
        sides = (self.exact.value(self.leaves, direction, side * step) for side in (-1, 1))
        return all(bool(np.isfinite(value).all()) for value in sides)

    @cached_property
    def gradient(self) -> Leaves | None:
        """The reverse derivative of the weighted sum of all outputs."""
        return self.exact.reverse(self.leaves, self.weights)

    def along(self, direction: Leaves) -> Callable[[float], Vector]:
        """The outputs at a step along a direction, each computed once."""
        return functools.cache(self.exact.along(self.leaves, direction))

    def slope(self, direction: Leaves, *, value: Callable[[float], Vector] | None = None, **how: float) -> Slope:
        """The slopes of the outputs along a direction by finite differences."""
        value, nudged = value or self.along(direction), self.exact.along(self.leaves, direction)
        known = self._rounding(direction)
        largest = np.zeros(self.start.shape) if known is None else known

        @functools.cache
        def noise(step: float) -> Vector:
            """How far the outputs move with the last digits of a probe: more than their rounding if terms cancel."""
            nonlocal largest
            for side, by in ((1, 1.0), (-1, 3.0), (1, -2.0)):
                moved = nudged(side * step, by)
                with np.errstate(all="ignore"):
                    off = np.abs(moved - value(side * step))
                largest = np.fmax(largest, np.where(np.isfinite(off), off, 0.0))
            return largest

        found = slope(value, self.start, noise=noise, **how)
        # Of an output that is zero but for rounding, differences are noise however little they are.
        is_nothing = size_of(self.start) < _ZERO * np.max(size_of(self.start), initial=0.0)
        is_nothing &= size_of(found.derivative) + found.error <= _NOTHING * self._sizes
        np.copyto(found.kind, SMOOTH, where=is_nothing & (found.kind == UNSURE))
        if not self.resolution or how.get("smallest", 0.0) >= self.resolution:
            return found
        # What jumps or bends within the digits of the leaves does so at the point.
        from_outside = slope(value, self.start, noise=noise, **{**how, "smallest": self.resolution})
        changes = [[np.abs(value(side * step) - self.start) for step in from_outside.steps[-_FEW:]] for side in (-1, 1)]
        # Beside a pole the value changes too, and by more for each step.
        is_steady = np.any(np.max(changes, axis=1) <= _STEADY * np.min(changes, axis=1), axis=0)
        is_bent = ((from_outside.kind == JUMP) & is_steady) | (from_outside.kind == KINK)
        for inside, outside in zip(found[:-1], from_outside[:-1], strict=True):
            np.copyto(inside, outside, where=is_bent)
        return found

    def learn_rounding(self, direction: Leaves) -> bool:
        """Let slopes along a direction take into account how far rounding moves the outputs; False if they do."""
        if self._rounding(direction) is not None:
            return False
        largest = np.zeros(self.start.shape)
        for step in _PROBES:
            moves = self.exact.rounding(self.leaves, self.moved(direction, step))
            largest = largest if moves is None else np.maximum(largest, _joined(moves))
            if moves is None or all(np.isfinite(move).all() for move in moves):
                break
        self._roundings[_key(direction)] = largest
        return True

    def _rounding(self, direction: Leaves) -> Vector | None:
        return self._roundings.get(_key(direction))

    def _hides(self, direction: Leaves, slopes: Callable[[Vector], tuple[Any, Any]]) -> Vector | None:
        """Whether rounding hides slopes; None if it is not known to move an output by much more than its own digits.

        It hides those that are as steep as the noise: of them, larger steps tell nothing.
        """
        rounding, size = self._rounding(direction), np.abs(self.start)
        if rounding is None:
            return None
        usual = np.where(size > 10 * rounding, _USUAL * size, _USUAL_OF_ZERO)
        if not np.any(rounding > usual):
            return None
        moved, noise = slopes(np.where(rounding > usual, rounding, 0.0))
        return (UNIT * np.abs(moved) >= _AS_STEEP * noise) & (noise > 0)

    def derivative(self, direction: Leaves, step: float = 0.0) -> float:
        """That of the weighted sum of all outputs, by forward mode or else reverse mode, after a step along it."""
        at = self.moved(direction, step)
        tangents = self._tangents(at, direction)
        return self._pulled_back(at, direction, self.weights) if tangents is None else float(self.sums(tangents).sum())

    def derivatives(self, direction: Leaves, step: float = 0.0) -> Vector:
        """Those of the weighted sum of each output, after a step along the direction."""
        at = self.moved(direction, step)
        tangents = self._tangents(at, direction)
        if tangents is not None:
            return self.sums(tangents)
        parts = [self.weights * (self.exact.output_of == output) for output in range(len(self.exact.sizes))]
        return np.array([self._pulled_back(at, direction, weights) for weights in parts])

    def _tangents(self, at: Leaves, direction: Leaves) -> Vector | None:
        """The tangents of the outputs, unless reverse mode has to tell.

        The zero tangent of a leaf is NaN where it meets an infinite derivative; the gradients of the others are finite.
        """
        tangents = self.exact.forward(at, direction)
        is_told = tangents is None or np.isfinite(tangents).all() or self.gradient is None
        return tangents if is_told else None

    def pulled_back(self, direction: Leaves) -> float:
        """The derivative of the weighted sum of all outputs along a direction, by reverse mode."""
        return self._pulled_back(self.leaves, direction, self.weights)

    def _pulled_back(self, at: Leaves, direction: Leaves, weights: Vector) -> float:
        gradient = self.exact.reverse(at, weights)
        with np.errstate(all="ignore"):
            return np.nan if gradient is None else _product(gradient, direction)[0]

    def sums(self, outputs: Vector) -> Vector:
        """The weighted sum of each output."""
        with np.errstate(all="ignore"):
            return np.array([part.real.sum() for part in self.exact.by_output(self.weights * outputs)])

    @cached_property
    def resolution(self) -> float:
        """Half a unit of float32 if a leaf has no more digits: what changes nearer than that changes at the point."""
        is_narrow = any(wide_dtype(leaf.dtype) != leaf.dtype for leaf in self.exact.program.leaves)
        return float(np.finfo(np.float32).eps) / 2 if is_narrow else 0.0

    def along_leaf(self, leaf: int) -> Leaves:
        """A direction that moves one leaf in proportion to its size, up and down so that seldom anything cancels."""
        return [scale_of(x) * signs(x.size).reshape(x.shape) * (i == leaf) for i, x in enumerate(self.leaves)]

    def moved(self, direction: Leaves, step: float) -> Leaves:
        """The point moved along a direction."""
        return [x + step * v for x, v in zip(self.leaves, direction, strict=True)]

    def read(self, direction: Leaves, *, slack: float = 0.0, excused: bool = True, **how: float) -> Reading:
        """Compare along a direction.

        Args:
            direction: The direction.
            slack: The relative disagreement that has another explanation.
            excused: Whether the noise of the derivatives excuses a disagreement.
            how: How slopes are taken.
        """
        value, tangents = self.along(direction), self.exact.forward(self.leaves, direction)
        # How far rounding moves a value takes most of the evaluations. Nobody needs to know it of slopes that settle
        # where the derivatives are.
        smallest = max(how.get("smallest", 0.0), self.resolution)
        found = slope(value, self.start, noise=lambda step: 0.0, **{**how, "smallest": smallest})
        plain = (self._forward(tangents, direction, found, 0.0, 0.0), self._reverse(direction, found, 0.0, 0.0))
        if not np.all(found.kind == SMOOTH) or any(a.status not in (AGREE, ABSENT) for a in plain):
            found = self.slope(direction, value=value, **how)

        def agreements(off: tuple[Any, float]) -> tuple[Agreement, Agreement, Agreement]:
            return (
                self._forward(tangents, direction, found, slack, off[0]),
                self._reverse(direction, found, slack, off[1]),
                self._modes(tangents, direction, slack, off),
            )

        each = agreements((0.0, 0.0))
        if excused and any(one.status == MISMATCH for one in each):
            with_noise = agreements(self._noise_of_derivatives(direction))
            if all(one.status != MISMATCH for one in with_noise) and self._is_isolated():
                # Beside a selection that changes at once, the last digits say nothing of the point itself. If it is one
                # of what does not move, those of what does have a say.
                own = agreements(self._noise_of_derivatives(direction, direction))
                with_noise = (*each[:2], with_noise[2]) if self._is_isolated(direction) else own
            each = with_noise
        if excused and each[2].status == MISMATCH:
            each = (*each[:2], self._modes(tangents, direction, slack, self._rounding_of_derivatives(direction)))
        if each[0].status == INCONCLUSIVE and len(self.exact.sizes) > 1 and each[1].status == AGREE:
            # The sum of several outputs says nothing of one that is small beside the others.
            each = (each[0], each[1]._replace(status=INCONCLUSIVE), each[2])
        kinks, jumps, unsure = (int((found.kind == kind).sum()) for kind in (KINK, JUMP, UNSURE))
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        total = lambda slopes: float((self.weights * np.where(settled, slopes, 0)).real.sum())
        noise = float(np.sqrt(np.sum((np.abs(self.weights) * np.where(settled, found.error, 0.0)) ** 2)))
        pushed = None if tangents is None else total(tangents)
        pulled = each[1].got if each[1].status != ABSENT and settled.any() else None
        right, left = total(found.right), total(found.left)
        return Reading(*each, kinks, jumps, unsure, right, left, noise, found.steps, pushed, pulled)

    def _is_isolated(self, along: Leaves | None = None) -> bool:
        """Whether a selection changes with the last digits of the point, or of what moves along a direction."""
        beside = [self.beside(by, along) for side in (-1.0, 1.0) for by in (side * _DIGITS[0], side * _DIGITS[-1])]
        return bool(self.outcomes.crossings(None, self.leaves, [(1.0, other) for other in beside]))

    def beside(self, by: float, along: Leaves | None = None) -> Leaves:
        """The point with other last digits, everywhere or where a direction moves it."""
        moves = [True] * len(self.leaves) if along is None else [v != 0 for v in along]
        return [x + by * size_of(x) * own for x, own in zip(self.leaves, moves, strict=True)]

    def _noise_of_derivatives(self, direction: Leaves, along: Leaves | None = None) -> tuple[Any, float]:
        """How far both derivatives move with the last digits of the point, on two sides: a tie may lie between them."""
        forward, reverse = np.zeros(self.start.shape), 0.0
        for side in (-1.0, 1.0):
            points = [self.beside(side * by, along) for by in _DIGITS]
            gradients = self._gradients_beside[side] if along is None else self._gradients_at(points)
            reverse = max(reverse, float(reach_of([_product(g, direction)[0] for g in gradients if g is not None])))
            tangents = [self.exact.forward(point, direction) for point in points]
            if tangents[0] is not None:
                forward = np.maximum(forward, reach_of(tangents))
        return forward, reverse

    @cached_property
    def _gradients_beside(self) -> dict[float, list[Leaves | None]]:
        """Those at the point with other last digits, on each side."""
        return {side: self._gradients_at([self.beside(side * by) for by in _DIGITS]) for side in (-1.0, 1.0)}

    def _gradients_at(self, points: list[Leaves]) -> list[Leaves | None]:
        return [self.exact.reverse(point, self.weights) for point in points]

    def _rounding_of_derivatives(self, direction: Leaves) -> tuple[Any, float]:
        """How far rounding moves both derivatives; not at all where a selection changes at the point."""
        if self._rounding(direction) is None or self._is_isolated():
            return 0.0, 0.0
        pushed = self.exact.rounding_of_tangents(self.leaves, direction)
        pulled = self.exact.rounding_of_cotangents(self.leaves, self.weights)
        return 0.0 if pushed is None else _joined(pushed), 0.0 if pulled is None else _product(pulled, direction)[1]

    def noise_of_tangents(self, direction: Leaves) -> Vector:
        """How far the tangents along a direction move with the last digits of the point."""
        return np.broadcast_to(self._noise_of_derivatives(direction)[0], self.start.shape)

    def _forward(self, tangents: Vector | None, direction: Leaves, found: Slope, slack: float, off: Any) -> Agreement:
        if tangents is None:
            return Agreement(ABSENT)
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        if self.gradient is not None and not np.isfinite(tangents[settled]).all():
            # The zero tangent of another leaf met an infinite derivative; what is not finite itself is found otherwise.
            return Agreement(ABSENT)
        magnitude = np.maximum(np.abs(tangents), np.maximum(size_of(found.right), size_of(found.left)))
        finite = np.where(np.isfinite(magnitude) & settled, magnitude, 0.0)
        of_arrays = self.exact.by_output(finite)
        largest = np.concatenate([np.zeros(0), *(np.full(p.shape, np.max(p, initial=0.0)) for p in of_arrays)])
        magnitude = np.maximum(finite, _NOTHING * largest)
        rounding = np.broadcast_to(off, settled.shape)
        given = (tangents, found.left, found.right, found.error, magnitude, rounding)
        hidden = self._hides(direction, lambda noise: (tangents[settled], noise[settled]))
        more = {"size": self._sizes[settled], "hidden": hidden, "arrays": self.exact.part_of[settled]}
        return agreement(slack, *(values[settled] for values in given), **more)

    def _reverse(self, direction: Leaves, found: Slope, slack: float, off: float) -> Agreement:
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        if not settled.any():
            return Agreement(ABSENT if self.gradient is None else INCONCLUSIVE)
        weights = np.where(settled, self.weights, 0.0)
        gradient = self.gradient if settled.all() else self.exact.reverse(self.leaves, weights)
        if gradient is None:
            return Agreement(ABSENT)
        agreed = self._pulled(direction, found, slack, off, weights, gradient)
        if not self.exact.is_reverse_only or agreed.status != AGREE or settled.size < 2:
            return agreed
        # Outputs with small slopes have no say in a sum with large or noisy ones, unless they have larger weights.
        steep = np.where(settled, np.maximum(size_of(found.left), size_of(found.right)), 0.0)
        steep[steep <= _BEYOND_NOISE * found.error] = 0.0
        least = np.min(steep, where=steep > 0, initial=np.inf)
        balanced = weights * np.divide(least, steep, out=np.zeros_like(steep), where=steep > 0)
        other = self.exact.reverse(self.leaves, balanced) if np.any(balanced) else None
        if other is None:
            return agreed
        # As much of it is noise as of the first sum.
        (_, size), (_, moves) = _product(gradient, direction), _product(other, direction)
        return self._pulled(direction, found, slack, off * moves / size if size else 0.0, balanced, other)

    def _pulled(
        self, direction: Leaves, found: Slope, slack: float, off: float, weights: Vector, gradient: Leaves
    ) -> Agreement:
        """Whether the slopes of a weighted sum of the outputs agree with its gradient."""
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        got, magnitude = _product(gradient, direction)
        sides = [(weights * np.where(settled, side, 0.0)).real for side in (found.left, found.right)]
        low, high = np.minimum(*sides), np.maximum(*sides)
        if np.iscomplexobj(found.derivative):
            # Only how far the sides are apart is known of a complex output, in whatever direction.
            half = np.abs(weights) * np.abs(np.where(settled, found.right - found.left, 0.0)) / 2
            low, high = (low + high) / 2 - half, (low + high) / 2 + half
        noise = np.sqrt(np.sum((np.abs(weights) * np.where(settled, found.error, 0.0)) ** 2))
        size = np.maximum(size_of(low), size_of(high))
        magnitude = max(magnitude, size_of(low.sum()), size_of(high.sum()), _NOTHING * size.sum())
        given = (got, low.sum(), high.sum(), noise, magnitude, off)
        hidden = self._hides(direction, lambda noise: (got, np.linalg.norm(weights * noise)))
        total = np.atleast_1d(np.linalg.norm(weights[settled] * self._sizes[settled]))
        return agreement(slack, *map(np.atleast_1d, given), size=total, hidden=hidden)

    def _modes(self, tangents: Vector | None, direction: Leaves, slack: float, off: tuple[Any, float]) -> Agreement:
        if tangents is None or self.gradient is None:
            return Agreement(ABSENT)
        got, magnitude = _product(self.gradient, direction)
        products = (self.weights * tangents).real
        magnitude = max(magnitude, _NOTHING * float(np.abs(products).sum()))
        if not np.isfinite(magnitude) or not np.isfinite(products).all():
            return Agreement(INCONCLUSIVE, got, products.sum())
        error = np.linalg.norm(self.weights * off[0]) + off[1]
        pushed = products.sum()
        given = (np.atleast_1d(v) for v in (got, pushed, pushed, error, magnitude, error))
        return agreement(slack, *given, size=np.array([np.inf]))


def _joined(arrays: Leaves) -> Vector:
    """Arrays as one vector; what is not finite is no rounding."""
    joined = np.concatenate([np.zeros(0), *map(np.ravel, arrays)])
    return np.where(np.isfinite(joined), joined, 0.0)


def reach_of(values: list[Any]) -> Any:
    """How far some values are from the first of them, at most, in each element."""
    if not values:
        return 0.0
    with np.errstate(all="ignore"):
        reach = np.max([np.abs(value - values[0]) for value in values], axis=0)
    # Values that are not finite are not noise.
    return np.where(np.isfinite(reach), reach, 0.0)


def _product(gradient: Leaves, direction: Leaves) -> tuple[float, float]:
    """The slope along a direction according to a gradient, and the sum of the magnitudes of its terms."""
    moved = [(g.ravel(), v.ravel()) for g, v in zip(gradient, direction, strict=True) if np.any(v)]
    # An infinite derivative does not matter where the direction is zero.
    terms = [np.zeros(1), *((g[v != 0] * v[v != 0]).real for g, v in moved)]
    joined = np.concatenate(terms)
    return float(joined.sum()), float(np.abs(joined).sum())


def _key(direction: Leaves) -> int:
    return hash(tuple(v.tobytes() for v in direction))
