"""Whether the value jumps where something discrete changes, at a point that a leaf may reach."""

import numpy as np

from .._programs import Chain
from .exact import Leaves, scale_of
from .point import Point

# How far the leaf is moved until something changes, relative to its size, and how often that is then halved.
_REACH = tuple(2.0**power for power in range(-30, 4))
_HALVINGS = 52
# What is no jump, relative to the value.
_CONTINUOUS = 1e-12


def jumps_at(point: Point, leaf: int, chain: Chain, direction: Leaves | None = None) -> bool:
    """Whether the outputs jump where the results of an operation change first as a leaf moves; not if they never do.

    Args:
        point: Where the leaf starts from.
        leaf: The leaf.
        chain: The operation.
        direction: How it moves: to either side, by default in proportion to its size.
    """
    if direction is None:
        sizes = scale_of(point.leaves[leaf])
        direction = [sizes if other == leaf else np.zeros_like(x) for other, x in enumerate(point.leaves)]
    along = direction

    def changes(step: float) -> bool:
        found = point.outcomes.crossings(leaf, point.leaves, [(1.0, point.moved(along, step))])
        return any(crossing.chain[-1] is chain[-1] for crossing in found)

    steps = (side * step for step in _REACH for side in (-1, 1))
    near, beyond = 0.0, next(filter(changes, steps), 0.0)
    for _ in range(_HALVINGS if beyond else 0):
        middle = (near + beyond) / 2
        near, beyond = (near, middle) if changes(middle) else (middle, beyond)
    before, after = (point.exact.value(point.leaves, along, step) for step in (near, beyond))
    # Where something changes, the value is often zero: its size is that at the point.
    largest = lambda values: np.max(np.abs(values), initial=0.0)
    outputs = zip(*map(point.exact.by_output, (point.start, before, after)), strict=True)
    with np.errstate(all="ignore"):
        return any(largest(b - a) > _CONTINUOUS * max(map(largest, (start, a, b))) for start, a, b in outputs)
