"""What is asked of each leaf: does its derivative agree with differences, along directions and nearby.

A direction moves all elements of a leaf, each in proportion to its size. Where something is off, the direction is split
until the elements to blame are found, and asked again at a generic point nearby.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from .._compat import cached_property
from .agreement import AGREE, COARSE, INCONCLUSIVE, MISMATCH, NOTHING, ROUNDING, Reading, coarsely
from .exact import Leaves, scale_of, size_of
from .float64 import wide_dtype
from .halving import Halving, Seen, halved, most_wrong, worst_status
from .outcomes import Crossing
from .point import Point
from .program import Array, Program
from .stairs import missing_slope
from .verdict import Evidence, Row, row_of

# Each leaf is moved by itself. With more leaves than this, further directions move some together, in so many groups.
_ALONE = 8
_GROUPS = 4
# In so many leaves that are plainly wrong the element to blame is looked for: more of them are shown by none of these.
_MOST_HALVED = 4
# How many parts of a leaf that are not clear are read at the point nearby.
_NEARBY_READINGS = 4
# Along how many directions it is asked whether a derivative is between the slopes.
_OTHER_DIRECTIONS = 6
# The distance of the point nearby.
_NEARBY = 1e-3
# How far an element moves relative to its size: no two alike, so that exchanged elements are noticed.
_STRIDES = (0.5, 1.5)
# A disagreement, relative to the slope, that constants of low precision may explain.
SLACK_OF_CONSTANTS = 1e-6
# Other steps, for a second opinion, and larger ones.
_OTHER_STEPS = (0.73, 1.37)
_LARGER_STEPS = 12.0
_SMALLER_STEPS = _LARGER_STEPS**-3
# By how much steps grow that are too small to move the value, from where on, and how much alike two slopes have to be.
_WIDER, _SMALLEST_SEEN, _ALIKE = 1e3, 1e-15, 1e-2
# Parts of a step at which derivatives are compared with that of the point, and how nearly it has to be among them.
_BESIDE = (-0.97, -0.71, -0.43, -0.19, 0.13, 0.37, 0.59, 0.83)
_AMONG = 1e-9
# By how many times their errors slopes differ that contradict each other.
_APART = 3.0
# How many times the resolution of the leaves the steps are from which a selection looks as if it changed at the point.
_FROM_AFAR = 64.0

# A leaf, and flat indices of its elements.
Part = tuple[int, Array]


class Answer(NamedTuple):
    """What was found of a leaf.

    Attributes:
        row: The row of the table that decided.
        evidence: What it was decided by.
        seen: The reading that shows it best; None if none was taken.
        is_here: Whether the derivative is off at the point itself, and not only nearby.
    """

    row: Row
    evidence: Evidence
    seen: Seen | None
    is_here: bool
    status: str


class Search:
    """The derivatives of a program at a point and near it, and the readings taken so far."""

    def __init__(self, point: Point, generator: np.random.Generator, compared: Collection[int]):
        self.point, self._generator, self._compared = point, generator, list(compared)
        self.program: Program = point.exact.program
        self._scales = [scale_of(leaf) for leaf in point.leaves]
        self._shift = [v * generator.uniform(_NEARBY / 2, _NEARBY, v.shape) for v in self._toward()]
        self._seen: list[list[Seen]] = [[] for _ in point.leaves]
        self._halved = 0
        inexact = [v.aval.dtype for v in (*self.program.jaxpr.jaxpr.invars, *self.program.jaxpr.jaxpr.outvars)]
        self.slack = SLACK_OF_CONSTANTS if any(wide_dtype(dtype) != dtype for dtype in inexact) else 0.0

    def look_around(self, directions: int, exhaustive: bool, tick: Callable[[int, int], None]) -> None:
        """Read the sampled directions, and if asked for every element on its own."""
        whole = [[(i, np.arange(self._scales[i].size))] for i in self._compared]
        parts = [(0, part) for part in whole]
        parts += [(turn, part) for turn in range(1, directions) for part in self._groups(whole) if self._turns(part)]
        if exhaustive:
            single = [(0, [(i, np.array([k]))]) for i in self._compared for k in range(self._scales[i].size)]
            parts += [part for part in single if self._scales[part[1][0][0]].size > 1]
        toward = [self._toward() for _ in range(directions)]
        for done, (turn, part) in enumerate(parts):
            # Of what is wrong along one direction, another says nothing new.
            asked = part if exhaustive else [(i, own) for i, own in part if most_wrong(self._seen[i]) is None]
            if asked:
                self._look(asked, toward[turn])
            tick(done + 1, len(parts))

    @cached_property
    def near(self) -> Point:
        """A generic point nearby."""
        moved = [x + by for x, by in zip(self.point.leaves, self._shift, strict=True)]
        return Point(self.point.exact, moved, self.point.weights, self.point.outcomes)

    def _groups(self, whole: list[list[Part]]) -> list[list[Part]]:
        together = 1 if len(whole) <= _ALONE else -(-len(whole) // _GROUPS)
        return [list(itertools.chain(*whole[i : i + together])) for i in range(0, len(whole), together)]

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
        if len(group) == 1 and reading.is_unseen:
            reading, toward = self._from_larger_steps(group, toward) or (reading, toward)
        for leaf, indices in group:
            self._seen[leaf].append(Seen(reading, indices, toward))

    def _from_larger_steps(self, group: list[Part], toward: Leaves) -> tuple[Reading, Leaves] | None:
        """What larger steps see of a leaf that is so small that its own size does not move the value.

        What is wrong along two of them in the same way is wrong; what bends on that scale says nothing of the point.
        """
        ((leaf, _),) = group
        slopes: list[float] = []
        while 0 < (size := float(np.max(size_of(toward[leaf])))) < 1:
            wider = min(max(_WIDER * size, _SMALLEST_SEEN), 1.0)
            toward = [v * (wider / size) if i == leaf else v for i, v in enumerate(toward)]
            reading = self.read(self.point, group, toward)
            if reading.is_clean and not reading.is_unseen:
                return reading, toward
            if reading.status == MISMATCH and not (reading.kinks or reading.jumps or reading.unsure):
                slopes.append(reading.right / wider)
                if len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) <= _ALIKE * abs(slopes[-1]):
                    return reading, toward
        return None

    def direction(self, group: list[Part], toward: Leaves) -> Leaves:
        """The direction that moves some elements only."""
        moved = [np.zeros_like(v) for v in toward]
        for leaf, indices in group:
            moved[leaf].reshape(-1)[indices] = toward[leaf].reshape(-1)[indices]
        return moved

    def along(self, i: int, seen: Seen) -> Leaves:
        """The direction along which part of a leaf was seen."""
        return self.direction([(i, seen.indices)], seen.toward)

    def read(self, place: Point, group: list[Part], toward: Leaves) -> Reading:
        """Compare along a direction, twice if the first reading is not clear."""
        direction = self.direction(group, toward)
        reading = place.read(direction, slack=self.slack)
        if reading.status == MISMATCH and place.learn_rounding(direction):
            # Where digits cancel, small steps change none of what is left of them, and agree on another slope.
            return self.read(place, group, toward)
        if reading.unsure or reading.jumps or reading.status == INCONCLUSIVE:
            beyond = self._beyond(place, group, direction, reading)
            if beyond is not None and beyond.status == MISMATCH and place.learn_rounding(direction):
                return self.read(place, group, toward)
            return beyond or coarsely(reading)
        if MISMATCH not in (reading.forward.status, reading.reverse.status):
            return reading
        if self._is_at_edge(place, group, direction, reading):
            nothing = {name: getattr(reading, name)._replace(status=INCONCLUSIVE) for name in ("forward", "reverse")}
            return reading._replace(unsure=1, **nothing)
        # Other steps have to confirm it, of which the smaller ones may drown in noise.
        others = (place.read(direction, slack=self.slack, shrink=shrink) for shrink in _OTHER_STEPS)
        other = next(
            (found for found in others if not found.unsure), reading._replace(forward=NOTHING, reverse=NOTHING)
        )
        is_wrong = lambda found, mode: getattr(found, mode).status == MISMATCH
        refuted = [mode for mode in ("forward", "reverse") if is_wrong(reading, mode) and not is_wrong(other, mode)]
        if from_near := self._from_near(place, direction, reading):
            return from_near
        return reading._replace(**{mode: getattr(reading, mode)._replace(status=INCONCLUSIVE) for mode in refuted})

    def _from_near(self, place: Point, direction: Leaves, reading: Reading) -> Reading | None:
        """What smaller steps see of a function with many small kinks, if they agree with its derivative.

        Larger ones see a mean of derivatives. That of the point is among those, or else it is an exception; and none is
        missing, or else the function goes by steps.
        """
        found = place.read(direction, slack=self.slack, shrink=_SMALLER_STEPS, excused=False)
        # They have to contradict the larger ones, and not merely to know less.
        is_another = abs(found.right - reading.right) > _APART * (found.noise + reading.noise)
        if not (found.is_settled and is_another):
            return None
        own, *others = (place.derivative(direction, side * max(reading.steps)) for side in (0.0, *_BESIDE))
        off = _AMONG * np.max(np.abs([own, *others]))
        is_typical = min(others) - off <= own <= max(others) + off
        return found if is_typical and not missing_slope(place, direction) else None

    def _is_at_edge(self, place: Point, group: list[Part], direction: Leaves, reading: Reading) -> bool:
        """Whether the function is finite on one side only, and a selection changes there: the other slope may count."""
        step = min(reading.steps)
        ends = [np.isfinite(place.exact.value(place.leaves, direction, side * step)).all() for side in (-1, 1)]
        return not all(ends) and bool(self._changing(place, group, direction, reading.steps))

    def _changing(self, place: Point, group: list[Part], direction: Leaves, steps: Sequence[float]) -> list[Crossing]:
        """The selections that change between the point and these steps."""
        probes = [(step, place.moved(direction, side * step)) for step in steps for side in (-1, 1)]
        leaf = group[0][0] if len(group) == 1 else None
        return place.outcomes.crossings(leaf, place.leaves, probes)

    def _beyond(self, place: Point, group: list[Part], direction: Leaves, reading: Reading) -> Reading | None:
        """The slopes that larger steps see, if a selection changes between the point and them, and not at once.

        If none changes, noise may hide the slope at small steps: then others may confirm it, but not refute it.
        """
        crossings: list[Crossing] = []
        if reading.unsure or reading.jumps:
            crossings = self._changing(place, group, direction, reading.steps)
        if crossings:
            is_at_once = crossings[0].distance <= min(reading.steps) and not place.resolution
            # Of a selection that changes within the digits of the leaves, nothing is to be seen but from afar.
            is_within = crossings[0].distance <= 2 * place.resolution
            smallest = _FROM_AFAR * place.resolution if is_within else 2 * crossings[0].distance
            found = None
            if not is_at_once:
                found = place.read(direction, slack=self.slack, shrink=_LARGER_STEPS, smallest=smallest)
            if found is None or found.unsure:
                # A function that is steep and bends at once.
                found = place.read(direction, slack=self.slack, shrink=_SMALLER_STEPS)
            return None if found.unsure or found.jumps else found
        others = []
        # The smaller ones are for a function that is steep and bends at once.
        for shrink in (*(_LARGER_STEPS**power for power in (1, 2, 3, 4)), _SMALLER_STEPS):
            found = place.read(direction, slack=self.slack, shrink=shrink, worst=COARSE)
            if found.is_clean:
                return found
            others.append(coarsely(found))
        # What is known to a digit or two has to be seen twice.
        confirming = [found for found in others if found.is_clean]
        return confirming[0] if len(confirming) > 1 else None

    # --- what was found ----------------------------------------------------------------------------------------------

    def answer(self, i: int) -> Answer:
        """What was found of a leaf, read in parts and at a point nearby if it is not clear."""
        seen, halving = self._seen[i], self._halving(i)
        blamed = most_wrong(seen) or halving.hidden(seen, self.point)
        unsettled = [s for s in seen if not s.reading.is_settled]
        if unsettled and blamed is None:
            seen = [*seen, *halving.parted(unsettled[0], self.point)]
            blamed = most_wrong(seen)
        beside: Callable[[Seen, Point], Seen] = halving.again
        if blamed is not None and self._is_halved(blamed):
            blamed = halving.narrowed(blamed, self.point, self.near)
        elif blamed is not None:
            beside = halving.glance
        unclear = [s for s in seen if not s.reading.is_clean and s.status != MISMATCH]
        near = [beside(s, self.near) for s in ([blamed] if blamed else unclear[:_NEARBY_READINGS])]
        shown = blamed or self._elsewhere(i, near) or max(seen, key=lambda s: s.reading.telling.relative, default=None)
        evidence = self._evidence(i, seen, blamed, near)
        if blamed is None and evidence.nearby != "off":
            # The one at the kink or jump.
            telling = {"jump": "jumps", "noise": "unsure", "differ": "kinks"}.get(evidence.sides)
            shown = next((s for s in seen if telling and getattr(s.reading, telling)), shown)
        return Answer(
            row=row_of(evidence),
            evidence=evidence,
            seen=shown,
            is_here=blamed is not None,
            status=worst_status(seen),
        )

    def _is_halved(self, blamed: Seen) -> bool:
        """Whether it is asked which element of a leaf is to blame: not of many leaves that are plainly wrong."""
        reading = blamed.reading
        if reading.kinks or reading.jumps or reading.unsure:
            return True
        self._halved += 1
        return self._halved <= _MOST_HALVED

    def _evidence(self, i: int, seen: list[Seen], blamed: Seen | None, near: list[Seen]) -> Evidence:
        readings = [blamed.reading] if blamed else [s.reading for s in seen]
        shown = [reading.telling for reading in readings]
        is_finite = blamed is None or bool(np.isfinite(shown[0].got))
        wrong_modes = any(r.modes.status == MISMATCH for r in readings)
        jumps, unsure, kinks = (any(getattr(r, name) for r in readings) for name in ("jumps", "unsure", "kinks"))
        # Along some directions little is left of the slopes; one that shows all elements is enough.
        whole = (s for s in seen if s.indices.size == self._scales[i].size)
        unsure = unsure and not any(s.reading.is_clean for s in whole)
        beside = worst_status(near)
        match = "off" if any(MISMATCH in (r.forward.status, r.reverse.status) for r in readings) else "equal"
        if match == "equal" and kinks:
            match = "between"
        elif match == "equal" and readings and all(r.status == INCONCLUSIVE for r in readings):
            match, unsure = "unknown", True
        elif match == "equal" and all(a.got == 0 for a in shown):
            match = "zero"
        return Evidence(
            "finite" if is_finite else "not finite",
            "disagree" if wrong_modes and match != "off" else "agree",
            "jump" if jumps else "noise" if unsure else "differ" if kinks else "equal",
            match,
            {MISMATCH: "off", AGREE: "equal", ROUNDING: "equal"}.get(beside, "unknown"),
        )

    def _elsewhere(self, i: int, near: list[Seen]) -> Seen | None:
        wrong = most_wrong(near)
        return None if wrong is None else self._halving(i).single(wrong, self.near, most_wrong)

    def again(self, i: int, seen: Seen, place: Point) -> Seen:
        """The same part along the same direction, at another point."""
        return seen._replace(reading=self.read(place, [(i, seen.indices)], seen.toward))

    def at_kink(self, i: int, answer: Answer) -> Seen | None:
        """A reading of the part of a leaf that is at a kink."""
        at_kink = lambda halves: next((half for half in halves if half.reading.kinks), None)
        return answer.seen and halved(answer.seen, at_kink, lambda half: self.again(i, half, self.point))

    def outside(self, i: int, seen: Seen) -> Seen | None:
        """A reading along which the derivative is not between the slopes on the two sides of a kink, if there is one.

        For kinks of one operation, such as where eigenvalues meet. Those of several elements need not add up.
        """
        generator, scale = np.random.default_rng(i), self._scales[i]
        for _ in range(_OTHER_DIRECTIONS):
            toward = [scale * generator.normal(size=scale.shape) if j == i else v for j, v in enumerate(seen.toward)]
            found = self.again(i, Seen(seen.reading, np.arange(scale.size), toward), self.point)
            if found.is_outside:
                return found
        return None

    def _halving(self, i: int) -> Halving:
        def glance(seen: Seen, place: Point) -> Seen:
            direction = self.along(i, seen)
            return seen._replace(reading=place.read(direction, slack=self.slack, excused=False))

        return Halving(functools.partial(self.again, i), glance)

    def crossings(self, i: int, seen: Seen, place: Point | None = None) -> list[Crossing]:
        """The selections that change nearest to the point, along the direction of a reading."""
        place = place or self.point
        direction = self.along(i, seen)
        steps = seen.reading.steps
        probes = [(step, place.moved(direction, side * step)) for step in steps for side in (-1, 1)]
        return place.outcomes.crossings(i, place.leaves, probes)


def _signs(generator: np.random.Generator, leaf: Array) -> Array:
    if np.iscomplexobj(leaf):
        return np.exp(2j * np.pi * generator.random(leaf.shape))
    return generator.choice([-1.0, 1.0], leaf.shape)
