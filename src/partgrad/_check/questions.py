"""What is asked of the derivatives of a program: do they agree with finite differences, along directions, in float64.

A direction moves all elements of a leaf, each in proportion to its size. Slopes by differences are judged before they
are compared: where the sides differ, the derivative must lie between them; where the value jumps or the differences do
not settle, there is nothing to compare with. Where something is off, the direction is split until the elements to blame
are found, and asked again at a generic point nearby.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from .evaluation import Exact, Leaves, Vector
from .float64 import wide_dtype, widened
from .outcomes import Crossing, Outcomes
from .program import Array, Program
from .slopes import JUMP, KINK, SMOOTH, UNSURE, Slope, slope
from .verdict import Evidence, Row, row_of

AGREE, ROUNDING, INCONCLUSIVE, MISMATCH, ABSENT = "agree", "rounding", "inconclusive", "mismatch", "absent"

# Relative disagreements: one that counts as none, and the largest that is no error if finite differences cannot tell.
_AIM = 1e-8
_WORST = 1e-4
# Steps that change only the last digits of a number: where digits cancel, more of them have to.
_DIGITS = (1e-15, 2e-15, 3e-15, 5e-15, 3e-11, 1e-9)
# In units of the error of the differences: what still counts as agreement, and what is a mismatch.
_WITHIN, _BEYOND = 3.0, 10.0
# How much of a derivative may be its own rounding errors, if it is to agree.
_MOST_NOISE = 1e-2
# How exact a slope must be that noise hides, if a derivative is to agree with it.
_COARSE = 0.05
# Outputs this small, relative to the others of their array, are zero up to rounding.
_NOTHING = 1e-6
# With more leaves than this, they are first moved together, in this many groups.
_ALONE = 64
_GROUPS = 32
# How many readings the elements of one leaf may take in all, before one is clean, and nearby.
_PARTINGS = 40
_PARTINGS_IN_VAIN = 6
_NEARBY_READINGS = 4
# The smallest size of an element, relative to the largest of its leaf; and the distance of the point nearby.
_SMALLEST = 1e-3
_NEARBY = 1e-3
# How far an element moves relative to its size: no two alike, so that exchanged elements are noticed.
_STRIDES = (0.5, 1.5)
# A disagreement, relative to the slope, that constants of low precision may explain, and that of a single element that
# they do not.
SLACK_OF_CONSTANTS = 1e-6
_BADLY = 1e-3
# Another ratio of steps, for a second opinion, and larger steps.
_OTHER_STEPS = 0.73
_LARGER_STEPS = 12.0

# A leaf, and flat indices of its elements.
Part = tuple[int, Array]


class Agreement(NamedTuple):
    """Whether a derivative agrees with finite differences, and the numbers where the agreement is worst.

    The status `rounding` means that constants of low precision may explain the difference; `relative` is the
    difference relative to the sum of the magnitudes.
    """

    status: str
    got: Any = 0.0
    expected: Any = 0.0
    relative: float = 0.0


class Reading(NamedTuple):
    """Both derivatives compared with finite differences along one direction and, in `modes`, with each other.

    The reverse derivative is that of a weighted sum of the outputs that have slopes; `right` and `left` are the slopes
    of that sum, `pushed` and `pulled` those by forward and reverse mode, and the numbers of kinks, jumps and unsettled
    outputs are counted.
    """

    forward: Agreement
    reverse: Agreement
    modes: Agreement
    kinks: int
    jumps: int
    unsure: int
    right: float
    left: float
    noise: float
    steps: tuple[float, ...]
    pushed: float | None
    pulled: float | None

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

    @property
    def is_settled(self) -> bool:
        """Whether every output has slopes, and the derivatives agree with them."""
        return self.status in (AGREE, ROUNDING, ABSENT) and not (self.jumps or self.unsure)

    @property
    def shown(self) -> Agreement:
        """The most telling agreement."""
        order = (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE, ABSENT)
        return min((self.forward, self.reverse, self.modes), key=lambda a: (order.index(a.status), -a.relative))


class Point:
    """A point at which the derivatives of a program are read, with a weight for each output."""

    def __init__(self, exact: Exact, leaves: Leaves, weights: Vector, outcomes: Outcomes):
        self.exact, self.leaves, self.weights, self.outcomes = exact, leaves, weights, outcomes

    def of(self, exact: Exact) -> "Point":
        """The same point of another program."""
        return Point(exact, self.leaves, self.weights, self.outcomes)

    @functools.cached_property
    def start(self) -> Vector:
        """The outputs."""
        return self.exact.value(self.leaves, [np.zeros_like(leaf) for leaf in self.leaves], 0.0)

    @functools.cached_property
    def gradient(self) -> Leaves | None:
        """The reverse derivative of the weighted sum of all outputs."""
        return self.exact.reverse(self.leaves, self.weights)

    def slope(self, direction: Leaves, shrink: float = 1.0, smallest: float = 0.0) -> Slope:
        """The slopes of the outputs along a direction by finite differences."""
        value = functools.cache(lambda step: self.exact.value(self.leaves, direction, step))
        largest = np.zeros(self.start.shape)

        def noise(step: float) -> Vector:
            """How far the outputs move with the last digits of a probe: more than their rounding if terms cancel."""
            nonlocal largest
            for side, by in ((1, self._unit), (-1, 3 * self._unit), (1, -2 * self._unit)):
                moved = self.exact.value(self.leaves, direction, side * step, self._nudge(by))
                with np.errstate(all="ignore"):
                    off = np.abs(moved - value(side * step))
                largest = np.fmax(largest, np.where(np.isfinite(off), off, 0.0))
            return largest

        return slope(value, self.start, shrink=shrink, noise=noise, smallest=smallest)

    @property
    def _unit(self) -> float:
        return 2 * self.exact.unit or 1e-15

    def _nudge(self, by: float) -> Vector:
        size = sum(leaf.size * (1 + np.iscomplexobj(leaf)) for leaf in self.leaves)
        return by * np.where(np.arange(size) * 7 % 3 == 0, -1.0, 1.0)

    def moved(self, direction: Leaves, step: float) -> Leaves:
        """The point moved along a direction."""
        return [x + step * v for x, v in zip(self.leaves, direction, strict=True)]

    def read(self, direction: Leaves, *, slack: float = 0.0, shrink: float = 1.0, smallest: float = 0.0) -> Reading:
        """Compare along a direction; `slack` is the relative disagreement that has another explanation."""
        found = self.slope(direction, shrink, smallest)
        tangents = self.exact.forward(self.leaves, direction)

        def agreements(off: tuple[Any, float]) -> tuple[Agreement, Agreement, Agreement]:
            return (
                self._forward(tangents, found, slack, off[0]),
                self._reverse(direction, found, slack, off[1]),
                self._modes(tangents, direction, slack, off),
            )

        each = agreements((0.0, 0.0))
        if any(agreement.status == MISMATCH for agreement in each):
            excused = agreements(self._noise_of_derivatives(direction))
            is_excused = all(agreement.status != MISMATCH for agreement in excused)
            # Beside a selection that changes at once, the last digits say nothing of the point itself.
            each = each if is_excused and self._is_isolated() else excused
        kinks, jumps, unsure = (int((found.kind == kind).sum()) for kind in (KINK, JUMP, UNSURE))
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        total = lambda slopes: float((self.weights * np.where(settled, slopes, 0)).real.sum())
        noise = float(np.sqrt(np.sum((np.abs(self.weights) * np.where(settled, found.error, 0.0)) ** 2)))
        pushed = None if tangents is None else total(tangents)
        pulled = each[1].got if each[1].status != ABSENT and settled.any() else None
        right, left = total(found.right), total(found.left)
        return Reading(*each, kinks, jumps, unsure, right, left, noise, found.steps, pushed, pulled)

    def _is_isolated(self) -> bool:
        beside = [self._beside(by) for side in (-1.0, 1.0) for by in (side * _DIGITS[0], side * _DIGITS[-1])]
        return bool(self.outcomes.crossings(None, self.leaves, [(1.0, other) for other in beside]))

    def _beside(self, by: float) -> Leaves:
        return [x + by * np.abs(x) for x in self.leaves]

    def _noise_of_derivatives(self, direction: Leaves) -> tuple[Any, float]:
        """How far both derivatives move with the last digits of the point, on two sides: a tie may lie between them."""
        forward, reverse = np.zeros(self.start.shape), 0.0
        for side in (-1.0, 1.0):
            points = [self._beside(side * by) for by in _DIGITS]
            gradients = [self.exact.reverse(point, self.weights) for point in points]
            reverse = max(reverse, float(_range([_product(g, direction)[0] for g in gradients if g is not None])))
            tangents = [self.exact.forward(point, direction) for point in points]
            if tangents[0] is not None:
                forward = np.maximum(forward, _range(tangents))
        return forward, reverse

    def noise_of_gradient(self, leaf: int) -> float:
        """How far the gradient of a leaf moves with the last digits of the point: its norm."""
        largest = 0.0
        for side in (-1.0, 1.0):
            gradients = [self.exact.reverse(self._beside(side * by), self.weights) for by in _DIGITS]
            largest = max(largest, float(np.linalg.norm(_range([g[leaf] for g in gradients if g is not None]))))
        return largest

    def _forward(self, tangents: Vector | None, found: Slope, slack: float, off: Any) -> Agreement:
        if tangents is None:
            return Agreement(ABSENT)
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        magnitude = np.maximum(np.abs(tangents), np.maximum(_size(found.right), _size(found.left)))
        finite = np.where(np.isfinite(magnitude) & settled, magnitude, 0.0)
        of_arrays = self.exact.parts(finite)
        largest = np.concatenate([np.zeros(0), *(np.full(p.shape, np.max(p, initial=0.0)) for p in of_arrays)])
        magnitude = np.maximum(finite, _NOTHING * largest)
        rounding = np.broadcast_to(off, settled.shape)
        given = (tangents, found.left, found.right, found.error + rounding, magnitude, rounding)
        return _agreement(slack, *(values[settled] for values in given))

    def _reverse(self, direction: Leaves, found: Slope, slack: float, off: float) -> Agreement:
        settled = (found.kind == SMOOTH) | (found.kind == KINK)
        if not settled.any():
            return Agreement(ABSENT if self.gradient is None else INCONCLUSIVE)
        weights = np.where(settled, self.weights, 0.0)
        gradient = self.gradient if settled.all() else self.exact.reverse(self.leaves, weights)
        if gradient is None:
            return Agreement(ABSENT)
        got, magnitude = _product(gradient, direction)
        sides = [(weights * np.where(settled, side, 0.0)).real for side in (found.left, found.right)]
        low, high = np.minimum(*sides), np.maximum(*sides)
        if np.iscomplexobj(found.derivative):
            # Only how far the sides are apart is known of a complex output, in whatever direction.
            half = np.abs(weights) * np.abs(np.where(settled, found.right - found.left, 0.0)) / 2
            low, high = (low + high) / 2 - half, (low + high) / 2 + half
        error = np.sqrt(np.sum((np.abs(weights) * np.where(settled, found.error, 0.0)) ** 2)) + off
        size = np.maximum(_size(low), _size(high))
        magnitude = max(magnitude, _size(low.sum()), _size(high.sum()), _NOTHING * size.sum())
        return _agreement(slack, *(np.atleast_1d(v) for v in (got, low.sum(), high.sum(), error, magnitude, off)))

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
        return _agreement(slack, *(np.atleast_1d(v) for v in (got, pushed, pushed, error, magnitude, error)))


def _agreement(
    slack: float, got: Vector, left: Vector, right: Vector, error: Vector, magnitude: Vector, off: Vector
) -> Agreement:
    """Whether numbers lie between others."""
    if not got.size:
        return Agreement(INCONCLUSIVE)
    with np.errstate(all="ignore"):
        middle = np.where(np.isfinite(left), np.where(np.isfinite(right), (left + right) / 2, left), right)
        beyond = np.maximum(np.minimum(left, right) - got, got - np.maximum(left, right))
        if np.iscomplexobj(left):
            beyond = np.abs(got - middle) - np.abs(right - left) / 2
        difference = np.where(np.isfinite(got), np.maximum(beyond, 0.0), np.inf)
        # The error of a finite difference may only explain away so much.
        agrees = difference <= np.maximum(_AIM * magnitude, np.minimum(_WITHIN * error, _WORST * magnitude))
        # Both are zero up to rounding.
        agrees |= magnitude <= _WITHIN * off
        # The derivative itself has lost digits, in float64.
        agrees |= (difference <= _WITHIN * off) & (off <= _MOST_NOISE * magnitude)
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
    numbers = got[worst].item() + 0.0, middle[worst].item() + 0.0
    return Agreement(status, *numbers, float(relative[worst]))


def _size(slopes: Any) -> Any:
    """The sizes of slopes; nothing for an infinite one."""
    return np.where(np.isfinite(slopes), np.abs(slopes), 0.0)


def _range(values: list[Any]) -> Any:
    if not values:
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.max([np.abs(value - values[0]) for value in values], axis=0)
    # Values that are not finite are not noise.
    return np.where(np.isfinite(apart), apart, 0.0)


def _product(gradient: Leaves, direction: Leaves) -> tuple[float, float]:
    """The slope along a direction according to a gradient, and the sum of the magnitudes of its terms."""
    moved = [(g.ravel(), v.ravel()) for g, v in zip(gradient, direction, strict=True) if np.any(v)]
    # An infinite derivative does not matter where the direction is zero.
    terms = [np.zeros(1), *((g[v != 0] * v[v != 0]).real for g, v in moved)]
    joined = np.concatenate(terms)
    return float(joined.sum()), float(np.abs(joined).sum())


# --- which directions ------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A reading of part of a leaf along a direction."""

    reading: Reading
    indices: Array
    toward: Leaves

    @property
    def status(self) -> str:
        """The status of the reading."""
        return self.reading.status


class Answer(NamedTuple):
    """What was found of a leaf.

    Attributes:
        row: The row of the table that decided.
        evidence: What it was decided by.
        seen: The reading that shows it best; None if none was taken.
        is_here: Whether the derivative is off at the point itself, and not only nearby.
        precision: The relative error of the gradient in the precision of the program, compared with float64; None if
            there is none, or if it consists of rounding errors only (`cancels`).
    """

    row: Row
    evidence: Evidence
    seen: Seen | None
    is_here: bool
    status: str
    precision: float | None
    cancels: bool


class Search:
    """The derivatives of a program at a point and near it, and the readings taken so far."""

    def __init__(self, point: Point, generator: np.random.Generator, compared: Collection[int]):
        self.point, self._generator, self._compared = point, generator, list(compared)
        self.program: Program = point.exact.program
        self._scales = [_scale(leaf) for leaf in point.leaves]
        self._shift = [v * generator.uniform(_NEARBY / 2, _NEARBY, v.shape) for v in self._toward()]
        self._seen: list[list[Seen]] = [[] for _ in point.leaves]
        inexact = [v.aval.dtype for v in (*self.program.jaxpr.jaxpr.invars, *self.program.jaxpr.jaxpr.outvars)]
        self.slack = SLACK_OF_CONSTANTS if any(wide_dtype(dtype) != dtype for dtype in inexact) else 0.0

    def look_around(self, directions: int, exhaustive: bool, tick: Callable[[int, int], None]) -> None:
        """Read the sampled directions, and if asked for every element on its own."""
        parts = [(turn, part) for turn in range(directions) for part in self._groups() if not turn or self._turns(part)]
        if exhaustive:
            single = [(0, [(i, np.array([k]))]) for i in self._compared for k in range(self._scales[i].size)]
            parts += [part for part in single if self._scales[part[1][0][0]].size > 1]
        toward = [self._toward() for _ in range(directions)]
        for done, (turn, part) in enumerate(parts):
            self._look(part, toward[turn])
            tick(done + 1, len(parts))

    @functools.cached_property
    def near(self) -> Point:
        """A generic point nearby."""
        moved = [x + by for x, by in zip(self.point.leaves, self._shift, strict=True)]
        return Point(self.point.exact, moved, self.point.weights, self.point.outcomes)

    def _groups(self) -> list[list[Part]]:
        whole = [(i, np.arange(self._scales[i].size)) for i in self._compared]
        together = 1 if len(whole) <= _ALONE else -(-len(whole) // _GROUPS)
        return [whole[i : i + together] for i in range(0, len(whole), together)]

    def _turns(self, group: list[Part]) -> bool:
        """Whether there are directions other than forwards and backwards."""
        return sum(indices.size for _, indices in group) > 1 or np.iscomplexobj(self.point.leaves[group[0][0]])

    def _toward(self) -> Leaves:
        """A random direction in which each element moves by about its own size."""
        return [
            scale * _signs(self._generator, leaf) * self._generator.uniform(*_STRIDES, leaf.shape)
            for scale, leaf in zip(self._scales, self.point.leaves, strict=True)
        ]

    def _look(self, group: list[Part], toward: Leaves) -> None:
        reading = self.read(self.point, group, toward)
        if len(group) > 1 and not reading.is_clean:
            middle = len(group) // 2
            self._look(group[:middle], toward)
            self._look(group[middle:], toward)
            return
        for leaf, indices in group:
            self._seen[leaf].append(Seen(reading, indices, toward))

    def direction(self, group: list[Part], toward: Leaves) -> Leaves:
        """The direction that moves some elements only."""
        moved = [np.zeros_like(v) for v in toward]
        for leaf, indices in group:
            moved[leaf].reshape(-1)[indices] = toward[leaf].reshape(-1)[indices]
        return moved

    def read(self, place: Point, group: list[Part], toward: Leaves) -> Reading:
        """Compare along a direction, twice if the first reading is not clear."""
        direction = self.direction(group, toward)
        reading = place.read(direction, slack=self.slack)
        if reading.unsure or reading.jumps or reading.status == INCONCLUSIVE:
            return self._beyond(place, group, direction, reading) or _coarsely(reading)
        if MISMATCH not in (reading.forward.status, reading.reverse.status):
            return reading
        # Another ratio of steps has to confirm it.
        other = place.read(direction, slack=self.slack, shrink=_OTHER_STEPS)
        is_wrong = lambda found, mode: getattr(found, mode).status == MISMATCH
        refuted = [mode for mode in ("forward", "reverse") if is_wrong(reading, mode) and not is_wrong(other, mode)]
        return reading._replace(**{mode: getattr(reading, mode)._replace(status=INCONCLUSIVE) for mode in refuted})

    def _beyond(self, place: Point, group: list[Part], direction: Leaves, reading: Reading) -> Reading | None:
        """The slopes that larger steps see, if a selection changes between the point and them, and not at once.

        If none changes, noise may hide the slope at small steps: then larger ones may confirm it, but not refute it.
        """
        crossings: list[Crossing] = []
        if reading.unsure or reading.jumps:
            probes = [(step, place.moved(direction, side * step)) for step in reading.steps for side in (-1, 1)]
            leaf = group[0][0] if len(group) == 1 else None
            crossings = place.outcomes.crossings(leaf, place.leaves, probes)
        if crossings and crossings[0].distance <= min(reading.steps):
            return None
        if crossings:
            smallest = 2 * crossings[0].distance
            found = place.read(direction, slack=self.slack, shrink=_LARGER_STEPS, smallest=smallest)
            return None if found.unsure or found.jumps else found
        larger = (place.read(direction, slack=self.slack, shrink=_LARGER_STEPS**power) for power in (1, 2, 3, 4))
        return next((found for found in larger if found.is_clean), None)

    # --- what was found ----------------------------------------------------------------------------------------------

    def answer(self, i: int, gradient: Leaves | None) -> Answer:
        """What was found of a leaf, read in parts and at a point nearby if it is not clear."""
        seen = self._seen[i]
        blamed = _most_wrong(seen) or self._hidden(i, seen)
        unsettled = [s for s in seen if not s.reading.is_settled]
        if unsettled and blamed is None:
            seen = [*seen, *self._parted(i, unsettled[0])]
            blamed = _most_wrong(seen)
        if blamed is not None:
            blamed = self._narrowed(i, blamed)
        unclear = [s for s in seen if not s.reading.is_clean and s.status != MISMATCH]
        near = [self.again(i, s, self.near) for s in ([blamed] if blamed else unclear[:_NEARBY_READINGS])]
        shown = blamed or self._elsewhere(i, near) or max(seen, key=lambda s: s.reading.shown.relative, default=None)
        evidence = self._evidence(i, seen, blamed, near)
        if blamed is None and evidence.nearby != "off":
            # The one at the kink or jump.
            telling = {"jump": "jumps", "noise": "unsure", "differ": "kinks"}.get(evidence.sides)
            shown = next((s for s in seen if telling and getattr(s.reading, telling)), shown)
        cancels = self._cancels(i, gradient)
        return Answer(
            row=row_of(evidence),
            evidence=evidence,
            seen=shown,
            is_here=blamed is not None,
            status=_worst(seen),
            precision=None if cancels else self._precision(i, gradient),
            cancels=cancels,
        )

    def _evidence(self, i: int, seen: list[Seen], blamed: Seen | None, near: list[Seen]) -> Evidence:
        readings = [blamed.reading] if blamed else [s.reading for s in seen]
        shown = [reading.shown for reading in readings]
        is_finite = blamed is None or bool(np.isfinite(shown[0].got))
        wrong_modes = any(r.modes.status == MISMATCH for r in readings)
        jumps, unsure, kinks = (any(getattr(r, name) for r in readings) for name in ("jumps", "unsure", "kinks"))
        # Along some directions little is left of the slopes; one that shows all elements is enough.
        whole = (s for s in seen if s.indices.size == self._scales[i].size)
        unsure = unsure and not any(s.reading.is_clean for s in whole)
        beside = _worst(near)
        match = "off" if any(MISMATCH in (r.forward.status, r.reverse.status) for r in readings) else "equal"
        if match == "equal" and kinks:
            match = "between"
        elif match == "equal" and all(a.got == 0 for a in shown):
            match = "zero"
        if match == "equal" and readings and all(r.status == INCONCLUSIVE for r in readings):
            match, unsure = "unknown", True
        return Evidence(
            "finite" if is_finite else "not finite",
            "disagree" if wrong_modes and match != "off" else "agree",
            "jump" if jumps else "noise" if unsure else "differ" if kinks else "equal",
            match,
            {MISMATCH: "off", AGREE: "equal", ROUNDING: "equal"}.get(beside, "unknown"),
        )

    def _elsewhere(self, i: int, near: list[Seen]) -> Seen | None:
        wrong = _most_wrong(near)
        return None if wrong is None else self._bisected(i, wrong, self.near, _most_wrong)

    def again(self, i: int, seen: Seen, place: Point) -> Seen:
        """The same part along the same direction, at another point."""
        return seen._replace(reading=self.read(place, [(i, seen.indices)], seen.toward))

    def _narrowed(self, i: int, blamed: Seen) -> Seen | None:
        """The element most to blame, if there is one; None if only the kinks of several elements together are."""
        # First nearby, so that a kink is not blamed for the fault of another element.
        near = self.again(i, blamed, self.near)
        if near.status == MISMATCH:
            apart = self._bisected(i, near, self.near, _most_wrong)
            here = self.again(i, apart, self.point)
            if here.status == MISMATCH:
                return here
        found = self._bisected(i, blamed, self.point, _most_wrong)
        is_of_kinks = found.indices.size > 1 and found.reading.kinks
        return None if is_of_kinks and near.status != MISMATCH else found

    def _bisected(self, i: int, seen: Seen, place: Point, choose: Callable[[list[Seen]], Seen | None]) -> Seen:
        """Halve a set of elements as long as one half is chosen, and return what is left."""
        while seen.indices.size > 1:
            chosen = choose([self.again(i, half, place) for half in _halves(seen)])
            if chosen is None:
                break
            seen = chosen
        return seen

    def _hidden(self, i: int, seen: list[Seen]) -> Seen | None:
        """The element that causes all of a slight disagreement, if it is badly wrong itself."""
        if _worst(seen) != ROUNDING:
            return None
        slight = self._bisected(i, _least_right(seen), self.point, _least_right)
        is_bad = slight.status == MISMATCH and slight.reading.shown.relative > _BADLY
        return slight if is_bad else None

    def _parted(self, i: int, unclear: Seen) -> list[Seen]:
        """The parts of a leaf that have slopes, without the elements that have none."""
        settled: list[Seen] = []
        parts, readings = [unclear], 0
        while parts:
            whole = parts.pop()
            for half in _halves(whole) if whole.indices.size > 1 else ():
                part = self.again(i, half, self.point)
                readings += 1
                (settled if part.reading.is_settled or part.status == MISMATCH else parts).append(part)
            if readings >= _PARTINGS or (readings >= _PARTINGS_IN_VAIN and not settled):
                # There are too many to tell them apart.
                break
        return settled

    def crossings(self, i: int, seen: Seen, place: Point | None = None) -> list[Crossing]:
        """The selections that change nearest to the point, along the direction of a reading."""
        place = place or self.point
        direction = self.direction([(i, seen.indices)], seen.toward)
        steps = seen.reading.steps
        probes = [(step, place.moved(direction, side * step)) for step in steps for side in (-1, 1)]
        return place.outcomes.crossings(i, place.leaves, probes)

    # --- in the precision of the program -----------------------------------------------------------------------------

    def _precision(self, i: int, gradient: Leaves | None) -> float | None:
        """The relative error of the gradient in the precision of the program, compared with float64."""
        if self.point.gradient is None or gradient is None:
            return None
        return distance(widened(gradient[i]), self.point.gradient[i])

    def _cancels(self, i: int, own: Leaves | None) -> bool:
        error, gradient = self._precision(i, own), self.point.gradient
        if error is None or not 1e-2 < error < np.inf or gradient is None:
            return False
        return bool(np.linalg.norm(gradient[i]) <= 10 * self.point.noise_of_gradient(i))


def _coarsely(reading: Reading) -> Reading:
    """The reading; if all that is known of the slope is a digit or two, that is what the derivative may agree with."""
    confirms = lambda a: (
        a.status == INCONCLUSIVE
        and abs(a.got - a.expected) <= _WITHIN * reading.noise
        and reading.noise <= _COARSE * abs(a.expected)
    )
    agreed = {
        name: a._replace(status=AGREE) for name in ("forward", "reverse") if confirms(a := getattr(reading, name))
    }
    return reading._replace(**agreed)


def _halves(seen: Seen) -> list[Seen]:
    return [seen._replace(indices=half) for half in np.array_split(seen.indices, 2)]


def _worst(seen: list[Seen]) -> str:
    return next((s for s in (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE) if s in {x.status for x in seen}), ABSENT)


def _least_right(seen: list[Seen]) -> Seen:
    differences = lambda s: [abs(a.got - a.expected) for a in (s.reading.forward, s.reading.reverse)]
    return max(seen, key=lambda s: max(differences(s)))


def _most_wrong(seen: list[Seen]) -> Seen | None:
    wrong = [s for s in seen if s.status == MISMATCH]
    return max(wrong, key=lambda s: s.reading.shown.relative, default=None)


def distance(got: Any, expected: Any) -> float:
    """The relative distance of one array from another."""
    size, apart = np.linalg.norm(expected), np.linalg.norm(got - expected)
    return float(apart / size) if size else float(apart > 0)


def _scale(leaf: Array) -> Array:
    """The size of each element, or that of the others if it is much smaller."""
    sizes = np.where(np.isfinite(leaf), np.abs(leaf), 0.0)
    largest = sizes.max(initial=0.0)
    return np.maximum(sizes, _SMALLEST * largest) if largest else np.ones(leaf.shape)


def _signs(generator: np.random.Generator, leaf: Array) -> Array:
    if np.iscomplexobj(leaf):
        return np.exp(2j * np.pi * generator.random(leaf.shape))
    return generator.choice([-1.0, 1.0], leaf.shape)
