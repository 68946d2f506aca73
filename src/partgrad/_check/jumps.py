"""Whether the value jumps: where something discrete changes, or anywhere along a direction.

As an interval is halved, a jump stays, and what is only steep becomes less.
"""

from collections.abc import Sequence

import numpy as np

from .._programs import Chain
from .exact import Leaves, scale_of
from .point import Point

# How far the leaf is moved until something changes, relative to its size.
_REACH = tuple(2.0**power for power in range(-30, 4, 3))
# How often an interval is halved: over the last halvings, what stays of a change is a jump, and not a root. It is not
# halved down to a single point, which may be an exception.
_HALVINGS, _LAST, _STAYS = 40, 12, 0.5
# What is no jump, relative to the value, but rounding.
_CONTINUOUS = 1e-12


def jumps_at(
    point: Point,
    leaf: int,
    chain: Chain,
    direction: Leaves | None = None,
    *,
    reach: Sequence[float] = _REACH,
    tries: int = 1,
    least: float = _CONTINUOUS,
) -> bool:
    """Whether the outputs jump where the results of an operation change as a leaf moves; not if they never do.

    Args:
        point: Where the leaf starts from.
        leaf: The leaf.
        chain: The operation.
        direction: How it moves: to either side, by default in proportion to its size.
        reach: How far it is moved, until something changes.
        tries: At how many of the places up to there, the first one before others, it is looked.
        least: What is less than this, relative to the value, is no jump.
    """
    if direction is None:
        sizes = scale_of(point.leaves[leaf])
        direction = [sizes if other == leaf else np.zeros_like(x) for other, x in enumerate(point.leaves)]
    along = direction
    differs = lambda one, other: point.outcomes.differs(chain, point.moved(along, one), point.moved(along, other))
    end = next((side * step for step in reach for side in (-1, 1) if differs(0.0, side * step)), 0.0)

    def place(number: int) -> list[tuple[float, float]]:
        """Smaller and smaller steps between which something changes, from the first of all by the bits of a number."""
        near, beyond, found = 0.0, end, list[tuple[float, float]]()
        for halving in range(_HALVINGS if end else 0):
            middle = (near + beyond) / 2
            is_before = differs(near, middle)
            if is_before and number >> halving & 1:
                is_before = not differs(middle, beyond)
            near, beyond = (near, middle) if is_before else (middle, beyond)
            found.append((near, beyond))
        return found

    return any(found and _jumps(point, along, found, least) for found in map(place, range(tries)))


def _jumps(point: Point, along: Leaves, between: Sequence[tuple[float, float]], least: float) -> bool:
    """Whether the change of an output stays as an interval is halved, and is more than such a part of the value."""
    largest = lambda values: np.max(np.abs(values), initial=0.0)

    def changes(near: float, beyond: float) -> list[tuple[float, float]]:
        """The change of each output, and its size: at the point, since where something changes it is often zero."""
        ends = (point.exact.value(point.leaves, along, step) for step in (near, beyond))
        outputs = zip(*map(point.exact.by_output, (point.start, *ends)), strict=True)
        return [(largest(b - a), max(map(largest, (start, a, b)))) for start, a, b in outputs]

    with np.errstate(all="ignore"):
        pairs = zip(changes(*between[-_LAST]), changes(*between[-1]), strict=True)
        return any(after > max(least * size, _STAYS * before) for (before, _), (after, size) in pairs)


def jumps_within(point: Point, direction: Leaves, ends: tuple[float, float], slope: float, output: int) -> bool:
    """Whether the weighted sum of an output jumps between two steps, and does not only climb steep ramps.

    Of an interval that is halved, the half goes on in which the value changes by more than its derivative says.

    Args:
        point: Where the leaves are.
        direction: How they move.
        ends: The steps.
        slope: The derivative.
        output: The number of the output.
    """
    along = point.along(direction)
    value = lambda step: float(point.sums(along(step))[output])
    (near, beyond), changes = ends, list[float]()
    at_near, at_beyond = value(near), value(beyond)
    for _ in range(_HALVINGS):
        middle = (near + beyond) / 2
        at_middle, half = value(middle), slope * (beyond - near) / 2
        if abs(at_middle - at_near - half) >= abs(at_beyond - at_middle - half):
            beyond, at_beyond = middle, at_middle
        else:
            near, at_near = middle, at_middle
        changes.append(abs(at_beyond - at_near))
    return changes[-1] > max(_CONTINUOUS * abs(at_near), _STAYS * changes[-_LAST])
