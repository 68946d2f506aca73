"""Whether the value jumps where a comparison changes, at a point that a leaf may reach."""

import numpy as np

from .._programs import Chain
from .exact import size_of
from .point import Point

# How far the leaf is moved until the comparison changes, relative to its size, and how often that is then halved.
_REACH = tuple(2.0**power for power in range(-8, 4))
_HALVINGS = 45
# What is no jump, relative to the value.
_CONTINUOUS = 1e-6


def jumps_at(point: Point, leaf: int, chain: Chain) -> bool:
    """Whether the outputs jump where a comparison changes first as a leaf moves; not if it never does."""
    direction = [np.zeros_like(x) for x in point.leaves]
    direction[leaf] = np.where(point.leaves[leaf] == 0, 1.0, size_of(point.leaves[leaf]))

    def changes(step: float) -> bool:
        found = point.outcomes.crossings(leaf, point.leaves, [(1.0, point.moved(direction, step))])
        return any(crossing.chain[-1] is chain[-1] for crossing in found)

    steps = (side * step for step in _REACH for side in (-1, 1))
    near, beyond = 0.0, next(filter(changes, steps), 0.0)
    for _ in range(_HALVINGS if beyond else 0):
        middle = (near + beyond) / 2
        near, beyond = (near, middle) if changes(middle) else (middle, beyond)
    before, after = (point.exact.value(point.leaves, direction, step) for step in (near, beyond))
    with np.errstate(all="ignore"):
        return bool(np.any(np.abs(after - before) > _CONTINUOUS * np.maximum(np.abs(before), np.abs(after))))
