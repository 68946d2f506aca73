"""Straight through: whether the value follows roundings as if each had the derivative of what it rounds.

Quantized weights move the value by many small jumps. Where their steps are coarse, or the function bends before there
are enough of them, no slope from afar is steady. But along a path the value is the integral of the derivative and the
sum of its jumps: with roundings taken straight through, the integral alone is the value, up to single steps.
"""

from typing import NamedTuple

import numpy as np

from .._programs import Chain, is_custom_rule, is_floating
from .exact import Leaves, Vector
from .followed import straight_through
from .jumps import jumps_within
from .outcomes import goes_by_steps
from .point import Point
from .program import Program
from .stops import is_of_surrogate
from .zeros import blockers, is_told_with_draws

_ROUNDING = frozenset({"floor", "ceil", "round", "convert_element_type"})
# How far leaves are moved, relative to their sizes: the first one that stays in the domain. And in how many parts.
_REACH, _PARTS = (0.5, 2.0**-4), 16
# In how many of them the value jumps, at least, by such a part of all that it changes by: those are many steps.
_JUMPING, _A_JUMP = 12, 2e-3
# What is left of a change, squared, that is explained; and the part of it that counts.
_LEFT, _COUNTS = 0.25, 0.1


class Followed(NamedTuple):
    """The slope over a path, that which the derivative gives, and how far the path goes to either side."""

    slope: float
    derivative: float
    steps: tuple[float, ...]


def roundings(program: Program) -> list[Chain]:
    """What rounds in a program, other than random numbers, and outside of rules and surrogates.

    A remainder is what rounding leaves over.
    """
    is_one = lambda c: (c[-1].primitive.name in _ROUNDING and goes_by_steps(c)) or _is_remainder(c)
    is_plain = lambda c: not (any(map(is_custom_rule, c)) or is_of_surrogate(c) or is_told_with_draws(program, c))
    return [chain for chain in program.value.chains if is_one(chain) and is_plain(chain)]


def _is_remainder(chain: Chain) -> bool:
    return chain[-1].primitive.name == "rem" and is_floating(chain[-1].outvars[0].aval)


def taken_straight(point: Point, chains: list[Chain]) -> Point | None:
    """The point with the derivatives of the function in which some roundings are taken straight through."""
    program = straight_through(point.exact.program, chains)
    return None if program is None else point.of(point.exact.with_derivatives_of(program))


def through_roundings(program: Program, leaf: int, chains: list[Chain]) -> list[Chain]:
    """Of some roundings, those that a leaf goes through and its derivative does not, or not all of it."""
    wanted = {id(chain[-1]) for chain in chains if not _is_remainder(chain)}
    left = [chain for chain in chains if _is_remainder(chain) and program.is_into(leaf, chain)]
    return (blockers(program, leaf, wanted=lambda chain: id(chain[-1]) in wanted) if wanted else []) + left


def followed(point: Point, straight: Point, leaf: int, toward: Leaves) -> Followed | None:
    """How the value follows what the derivative of a leaf lacks and the straight one has; None if it does not.

    Each element moves in proportion to its size: uphill, where what is rounded adds up and does not cancel by chance,
    or else up and down, where a scale that is the largest of them does not move along with the others.
    """
    gradient = straight.gradient
    if gradient is None or not np.isfinite(gradient[leaf]).all():
        return None
    uphill = [np.abs(v) * np.sign(gradient[leaf]) if i == leaf else v for i, v in enumerate(toward)]
    directions = [uphill, toward] if toward[leaf].size > 1 else [toward]
    return next((found for way in directions if (found := _followed_along(point, straight, way))), None)


def by_many_steps(point: Point, direction: Leaves) -> Followed | None:
    """How the value changes along a direction in which its derivative is zero, if it does so in nearly all parts."""
    path = _path_along(point, direction)
    if path is None or any(point.derivatives(direction, step).any() for step in path.middles):
        return None
    sizes = np.abs(path.changes)
    jumping = np.sum(sizes > _A_JUMP * np.max(sizes, axis=0, initial=0.0), axis=0)
    output = int(np.argmax(jumping))
    slope = float(path.changes[:, output].sum() / (2 * path.reach))
    return Followed(slope, 0.0, (path.reach,)) if jumping[output] >= _JUMPING and slope else None


class _Path(NamedTuple):
    """How the outputs change in equal parts of a path, and the nodes between these and their middles."""

    reach: float
    nodes: Vector
    middles: Vector
    changes: Vector


def _path_along(point: Point, direction: Leaves) -> _Path | None:
    value = point.along(direction)
    for reach in _REACH:
        nodes = np.linspace(-reach, reach, _PARTS + 1)
        with np.errstate(all="ignore"):
            values = np.array([point.sums(value(step)) for step in nodes])
        if np.isfinite(values).all():
            return _Path(reach, nodes, (nodes[1:] + nodes[:-1]) / 2, np.diff(values, axis=0))
    return None


def _followed_along(point: Point, straight: Point, direction: Leaves) -> Followed | None:
    if (path := _path_along(point, direction)) is None:
        return None
    reach, part = path.reach, 2 * path.reach / _PARTS
    own, other = (np.array([at.derivatives(direction, step) for step in path.middles]) for at in (point, straight))
    for output in range(path.changes.shape[1]):
        change, integral = path.changes[:, output], part * own[:, output]
        if _is_followed(change, integral, part * other[:, output]):
            most = int(np.argmax(np.abs(change - integral)))
            ends = path.nodes[most], path.nodes[most + 1]
            if jumps_within(point, direction, ends, own[most, output], output):
                return Followed(float(change.sum() / (2 * reach)), float(integral.sum() / (2 * reach)), (reach,))
    return None


def _is_followed(changes: Vector, own: Vector, straight: Vector) -> bool:
    if not all(np.isfinite(part).all() for part in (changes, own, straight)):
        return False
    value, integral, through = map(_from_the_middle, (changes, own, straight))
    size = max(np.sum(value**2), np.sum(integral**2))
    lacking, left = np.sum((value - integral) ** 2), np.sum((value - through) ** 2)
    jumping = np.sum(np.abs(changes - own) > _A_JUMP * np.max(np.abs(value), initial=0.0))
    explains = left <= _LEFT * min(lacking, np.sum(value**2))
    # What is folded climbs between its jumps as far as these fall.
    is_folded = np.sum(value**2) < _COUNTS**2 * size
    return bool(explains and not is_folded and lacking > _COUNTS**2 * size and jumping >= _JUMPING)


def _from_the_middle(changes: Vector) -> Vector:
    """How far a value is from that in the middle, after each part of the path to either side."""
    middle = changes.size // 2
    return np.concatenate([np.cumsum(changes[middle:]), np.cumsum(changes[:middle][::-1])])
