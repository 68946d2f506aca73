"""Whether the value jumps where something discrete changes, at a point that a leaf may reach."""

import math
from collections.abc import Sequence

import numpy as np

from .._programs import Chain
from .exact import Leaves, scale_of
from .point import Point

# How far the leaf is moved until something changes, relative to its size.
_REACH = tuple(2.0**power for power in range(-30, 4, 3))
# How often the way there is halved, beyond what a continuous function needs.
_MORE_HALVINGS = 12
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

    def place(number: int) -> tuple[float, float]:
        """Two steps between which something changes, from the first of all by as many bits as the number has."""
        near, beyond = 0.0, end
        for halving in range(_MORE_HALVINGS - round(math.log2(least)) if end else 0):
            middle = (near + beyond) / 2
            is_before = differs(near, middle)
            if is_before and number >> halving & 1:
                is_before = not differs(middle, beyond)
            near, beyond = (near, middle) if is_before else (middle, beyond)
        return near, beyond

    return any(_jumps(point, along, *place(number), least) for number in range(tries))


def _jumps(point: Point, along: Leaves, near: float, beyond: float, least: float) -> bool:
    """Whether an output changes between two steps by more than such a part of it."""
    before, after = (point.exact.value(point.leaves, along, step) for step in (near, beyond))
    # Where something changes, the value is often zero: its size is that at the point.
    largest = lambda values: np.max(np.abs(values), initial=0.0)
    outputs = zip(*map(point.exact.by_output, (point.start, before, after)), strict=True)
    with np.errstate(all="ignore"):
        return any(largest(b - a) > least * max(map(largest, (start, a, b))) for start, a, b in outputs)
