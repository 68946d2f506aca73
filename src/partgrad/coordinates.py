"""Maps from coordinates to values, for `partgrad.unconstrain` and `partgrad.ravel`.

All others are those of libraries of bijections, or pairs of functions.

Example:
    >>> import partgrad as pg
    >>> free, constrain = pg.unconstrain({"w": 2.0, "s": 0.3}, {"w": pg.coordinates.positive})
    >>> constrain
    <partgrad.unconstrain: back to dict
      ['s']  as it is
      ['w']  positive>
"""

from ._coordinates import interval, positive

__all__ = ["interval", "positive"]


def __dir__() -> list[str]:
    return __all__
