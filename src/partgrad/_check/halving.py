"""Which elements of a leaf are to blame for what is seen along a direction that moves several: it is halved."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .agreement import ABSENT, AGREE, INCONCLUSIVE, MISMATCH, ROUNDING, Reading
from .exact import Leaves
from .point import Point
from .program import Array

# How many readings the elements of one leaf may take in all, and before one is clean.
_PARTINGS = 40
_PARTINGS_IN_VAIN = 6
# How far beyond two slopes a derivative is not between them, relative to these.
_OUTSIDE = 1e-3
# The disagreement of a single element that constants of low precision do not explain.
_BADLY = 1e-3


class Seen(NamedTuple):
    """A reading of part of a leaf along a direction."""

    reading: Reading
    indices: Array
    toward: Leaves

    @property
    def status(self) -> str:
        """The status of the reading."""
        return self.reading.status

    @property
    def is_outside(self) -> bool:
        """Whether the derivative is not between the slopes on the two sides of a kink, where these are known."""
        reading = self.reading
        low, high = sorted((reading.left, reading.right))
        slack = _OUTSIDE * max(abs(low), abs(high)) + reading.noise
        is_known = reading.kinks and not (reading.jumps or reading.unsure)
        return bool(is_known and not low - slack <= reading.telling.got <= high + slack)


# Of some parts that were seen, the one to go on with; None if there is none.
Choice = Callable[[list[Seen]], Seen | None]


class Halving(NamedTuple):
    """How parts of a leaf are read: `again`, with all that may excuse them, or at a first `glance`."""

    again: Callable[[Seen, Point], Seen]
    glance: Callable[[Seen, Point], Seen]

    def narrowed(self, blamed: Seen, here: Point, near: Point) -> Seen | None:
        """The element most to blame, if there is one; None if only the kinks of several elements together are."""
        # First nearby, so that a kink is not blamed for the fault of another element.
        beside = self.again(blamed, near)
        if beside.status == MISMATCH:
            found = self.again(self.single(beside, near, most_wrong), here)
            if found.status == MISMATCH:
                return found
        found = self.single(blamed, here, most_wrong)
        is_of_kinks = found.indices.size > 1 and found.reading.kinks
        return None if is_of_kinks and beside.status != MISMATCH else found

    def single(self, seen: Seen, place: Point, choose: Choice) -> Seen:
        """What is left of a set of elements that is halved as long as one half is chosen.

        What was chosen at a glance has to be confirmed at the end; if it is not, each half has to be.
        """
        found = halved(seen, choose, lambda part: self.glance(part, place))
        if found is seen:
            return seen
        confirmed = self.again(found, place)
        if choose([confirmed]) is not None:
            return confirmed
        return halved(seen, choose, lambda part: self.again(part, place))

    def hidden(self, seen: list[Seen], here: Point) -> Seen | None:
        """The element that causes all of a slight disagreement, if it is badly wrong itself."""
        if worst_status(seen) != ROUNDING:
            return None
        slight = self.single(_least_right(seen), here, _least_right)
        is_bad = slight.status == MISMATCH and slight.reading.telling.relative > _BADLY
        return slight if is_bad else None

    def parted(self, unclear: Seen, here: Point) -> list[Seen]:
        """The parts of a leaf that have slopes, without the elements that have none."""
        settled: list[Seen] = []
        parts, readings = [unclear], 0
        while parts:
            whole = parts.pop()
            for half in _halves(whole) if whole.indices.size > 1 else ():
                part = self.again(half, here)
                readings += 1
                (settled if part.reading.is_settled or part.status == MISMATCH else parts).append(part)
            if readings >= _PARTINGS or (readings >= _PARTINGS_IN_VAIN and not settled):
                # There are too many to tell them apart.
                break
        return settled


def most_wrong(seen: list[Seen]) -> Seen | None:
    """The mismatch that is the largest relative to the slope; None if there is none."""
    wrong = [s for s in seen if s.status == MISMATCH]
    return max(wrong, key=lambda s: s.reading.telling.relative, default=None)


def worst_status(seen: list[Seen]) -> str:
    """The worst status of some readings; `ABSENT` if they have none of those that count."""
    return next((s for s in (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE) if s in {x.status for x in seen}), ABSENT)


def _least_right(seen: list[Seen]) -> Seen:
    differences = lambda s: [abs(a.got - a.expected) for a in (s.reading.forward, s.reading.reverse)]
    return max(seen, key=lambda s: max(differences(s)))


def halved(seen: Seen, choose: Choice, read: Callable[[Seen], Seen]) -> Seen:
    """What is left of a set of elements that is halved as long as one half is chosen."""
    while seen.indices.size > 1:
        chosen = choose([read(half) for half in _halves(seen)])
        if chosen is None:
            break
        seen = chosen
    return seen


def _halves(seen: Seen) -> list[Seen]:
    return [seen._replace(indices=half) for half in np.array_split(seen.indices, 2)]
