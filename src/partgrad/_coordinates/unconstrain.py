"""A tree in other coordinates: what moves, in which coordinates, and what follows."""

import functools
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import StaticData, remarked
from .._message import at, listed
from .._selection import Selector, Target, as_selection, is_none, owners, unflatten_part
from .._trees import describe, dtype_of, flatten, in_jax, is_known, shape_of, written
from ..errors import ArgumentError, SelectionError, SelectorTypeError
from .bounded import Interval
from .constrain import Constrain, Following, Free, Wiring, constrain_by
from .maps import Map, as_map, bijection_of, keeps_elements, maps_of, taken_apart
from .ties import Tie, first_off, resolve_ties

T = TypeVar("T")

# How far a value may be from what its coordinate gives, in units of rounding.
_ROUNDINGS = 64
# Enough for all digits: Newton's method doubles those that are right.
_POLISHES = 2


class _Given(NamedTuple):
    """A map that a user gave.

    Attributes:
        bijection: What has its functions.
        map: The same, read.
    """

    bijection: Any
    map: Map


def unconstrain(
    tree: T,
    coordinates: Mapping[Any, Any] | None = None,
    ties: Mapping[Any, Any] | None = None,
    *,
    wrt: Selector = None,
) -> tuple[T, Constrain[T]]:
    """Take out the numbers that move, in the coordinates in which they move; and what puts them back.

    The class, the code and the marks of the model stay as they are. `coordinates` says what keeps a parameter in its
    range, and `ties` which parameters follow others, so another fit in other coordinates changes one line.

    Args:
        tree: Any pytree.
        coordinates: A dict from selectors to maps, which take a coordinate to a value: `partgrad.coordinates.positive`
            or `interval(low, high)`; a pair of functions `(forward, inverse)`, or three with the logarithm of the
            absolute determinant, from the coordinate; a constraint or a transform of numpyro; a bijector of TensorFlow
            Probability, distrax, distreqx or flowjax. Here selectors reach through marks, so a table may cover a whole
            model; what no selector selects moves as it is. A map may change the shape of a leaf.
        ties: A dict from what follows to what it follows: `{"b.scale": "a.scale"}`, or, with functions of one or
            several values, `{"sigma": ("mu", lambda mu: 2 * mu)}`. The same wildcards on both sides stand for the same
            steps: `{"decoder.*.w": "encoder.*.w"}`. What follows does not move, nor is it held where its source moves.
        wrt: What moves. None selects every floating or complex leaf that no mark holds.

    Returns:
        The pair `(free, constrain)`. `free` is a tree like the first part of `partition`, with coordinates in place of
        the values that have a map and None where nothing moves; the dtypes are those of the leaves. `constrain(free)`
        is the tree; `constrain.log_det(free)` is the logarithm of the absolute determinant of its derivative, and
        `constrain.bounds` has the bounds of the values.

    Raises:
        SelectionError: If a selector does not fit the tree, or two of them give a leaf a map.
        ArgumentError: If a value is outside of the values of its map, or what should be a map is none.
        PartsError: If a leaf has another value than what it follows, or ties go round in a circle.

    Example:
        >>> import jax, partgrad as pg
        >>> beam = {"width": 2.0, "tilt": 0.1, "count": 3}
        >>> inside = {"width": pg.coordinates.positive, "tilt": pg.coordinates.interval(-0.5, 0.5)}
        >>> free, constrain = pg.unconstrain(beam, inside)
        >>> constrain
        <partgrad.unconstrain: back to dict
          ['tilt']   interval(-0.5, 0.5)
          ['width']  positive>
        >>> print(free["count"], f"{constrain(free)['width']:.4f}")
        None 2.0000
        >>> jax.grad(lambda free: constrain(free)["tilt"])(free)["width"]
        Array(0., dtype=float32)

    See Also:
        `partgrad.ravel(tree, wrt, coordinates=..., ties=...)`: the same as one vector.
    """
    target = Target(tree, as_selection(wrt))
    target.refuse_elements("unconstrain")
    followed = resolve_ties(tree, {} if ties is None else ties)
    following = {tie.leaf for tie in followed}
    _refuse_following(target, following)
    given = _given(tree, {} if coordinates is None else coordinates)
    moving = [i for i in target.plan.indices if i not in following]
    treedef = _thawed(target, followed, moving)
    everything, _ = flatten(treedef.unflatten(target.leaves), is_none)
    positions = [position for position, leaf in enumerate(everything) if leaf is not None]
    # One map may be that of many leaves.
    maps = {id(given[i].map): given[i] for i in moving if i in given}
    numbers = {key: number for number, key in enumerate(maps)}
    free: list[Any] = [None] * len(target.leaves)
    rest = [None if i in following else leaf for i, leaf in enumerate(target.leaves)]
    wires = []
    for i in sorted(moving):
        leaf, path, own = target.leaves[i], target.path(i), given.get(i)
        free[i], rest[i] = leaf if own is None else _coordinate(path, leaf, own), None
        number = None if own is None else numbers[id(own.map)]
        wires.append((positions[i], Free(path, shape_of(leaf), _dtype(leaf), number)))
    wiring = Wiring(
        tuple(wires),
        tuple(Following(target.path(tie.leaf), _dtype(target.leaves[tie.leaf]), tie.at(positions)) for tie in followed),
        tuple(own.map.words for own in maps.values()),
    )
    bijections = [own.bijection for own in maps.values()]
    return unflatten_part(treedef, free), constrain_by(unflatten_part(treedef, rest), bijections, wiring)


def _refuse_following(target: Target, following: Collection[int]) -> None:
    """Raise if what is to move follows something else: nothing is left, or a part that was named has nothing left."""
    plan = target.plan
    if plan.part is None:
        groups = [plan.indices]
    else:
        counts = [len(node.selected) for node in plan.part.nodes]
        ends = np.cumsum([0, *counts])
        groups = [plan.indices[start:stop] for start, stop in itertools.pairwise(ends)]
    for group in groups:
        if group and all(i in following for i in group):
            raise SelectionError(
                f"What is to move follows something else: {listed(at(target.path(i)) for i in group)}.",
                "Expected leaves with a freedom of their own.",
                fix="select what they follow, or leave their ties out.",
            )


def _given(tree: Any, coordinates: Mapping[Any, Any]) -> dict[int, _Given]:
    """The map of each leaf that has one."""
    if not isinstance(coordinates, Mapping):
        raise SelectorTypeError(
            f"The coordinates are {type(coordinates).__name__} {written(coordinates):.60}.",
            "Expected a dict from selectors to maps.",
            fix="write partgrad.unconstrain(tree, {'**.width': partgrad.coordinates.positive}).",
        )
    read: dict[Any, _Given] = {}
    for key, given in coordinates.items():
        bijection = bijection_of(given)
        own = as_map(bijection)
        if own is None:
            raise _no_map(key, given)
        read[key] = _Given(bijection, own)
    keys = owners(
        tree,
        {key: key for key in read},
        "marks",
        "unconstrain",
        lambda path, one, other: SelectionError(
            f"Two selectors give {at(path)} a map: {one!r} and {other!r}.",
            "Expected at most one map for every leaf.",
            fix="take it out of one of them, as in partgrad.path('**.width') - 'noise.width'.",
        ),
    )
    return {i: read[key] for i, key in keys.items()}


def _no_map(key: Any, given: Any) -> ArgumentError:
    fix = "write partgrad.coordinates.positive, partgrad.coordinates.interval(low, high), or a pair of functions: "
    fix += "(jax.numpy.exp, jax.numpy.log)."
    if isinstance(given, type):
        fix = f"make one: {given.__name__}(...)."
    elif type(given) in (tuple, list) and len(given) == 2 and not any(map(callable, given)):
        fix = f"write partgrad.coordinates.interval({given[0]!r}, {given[1]!r})."
    elif callable(given):
        fix = "give it with its inverse: (function, inverse)."
    return ArgumentError(
        f"The coordinates of {key!r} are {type(given).__name__} {written(given):.60}.",
        "Expected a map, which has a forward and an inverse.",
        fix=fix,
    )


def _thawed(target: Target, followed: list[Tie], moving: list[int]) -> Any:
    """The structure of the tree without the marks of what was named, and of what follows something that moves."""
    layout, moves = target.skeleton.layout, set(moving)
    for tie in followed:
        if not moves.isdisjoint(tie.sources):
            moves.add(tie.leaf)
    held = [tie.leaf for tie in followed if tie.leaf in moves and layout.leaves[tie.leaf].is_held]
    if not held:
        return target.thawed
    return remarked(target.thawed.unflatten(target.leaves), held, False)


def _coordinate(path: str, leaf: Any, own: _Given) -> jax.Array:
    """The coordinate of a value."""
    value = in_jax(leaf, lambda: path)
    if isinstance(own.bijection, Interval) and jnp.iscomplexobj(value):
        raise ArgumentError(
            f"{at(path)} is complex, and {own.map.words} is a map of real numbers.",
            f"Expected a real leaf, got {describe(leaf)}.",
            fix="leave it out of what the selector of the map selects, or give it a pair of functions.",
        )
    try:
        # At a bound and outside of it there are infinities and NaN, for which an error of ours is better.
        with jax.debug_nans(False), jax.debug_infs(False):
            coordinate, back, change = _solve(*taken_apart([own.bijection]), value)
    except Exception as error:
        error.add_note(f"It was raised by the map {own.map.words} of {at(path)}, {describe(leaf)}.")
        raise
    if jnp.shape(back) != value.shape:
        raise ArgumentError(
            f"The map {own.map.words} does not fit {at(path)}.",
            f"Expected a map that gives shape {value.shape}, got {jnp.shape(back)}.",
            fix="give first the function from coordinates to values, then its inverse.",
        )
    if is_known(value) and is_known(back):
        wide = [
            np.asarray(array, np.float64 if jnp.isrealobj(value) else np.complex128) for array in (value, back, change)
        ]
        limits = jnp.finfo(value.dtype)
        # As far as a coordinate resolves its value; one of infinity moves nothing.
        scale = np.abs(wide[0]) + np.nan_to_num(np.abs(wide[2]), posinf=0.0)
        with np.errstate(invalid="ignore"):
            agrees = np.abs(wide[1] - wide[0]) <= _ROUNDINGS * (float(limits.eps) * scale + float(limits.tiny))
        agrees |= wide[0] == wide[1]
        if not agrees.all():
            entry, where = first_off(agrees)
            raise ArgumentError(
                f"{at(path)} is outside of the values of its map, {own.map.words}.",
                f"Expected a value that the map takes from its coordinate, got {wide[0][entry]:g}{where}.",
                fix="start from a value inside, or give the leaf another map, such as "
                "partgrad.coordinates.interval(low, high).",
            )
    return coordinate


@functools.partial(jax.jit, static_argnums=0)
def _solve(static: StaticData, arrays: list[Any], value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The coordinate of a value, the value that it comes back to, and how that moves with the coordinate."""
    (own,) = maps_of(static, arrays)
    coordinate = jnp.asarray(own.inverse(value)).astype(value.dtype)
    if jnp.shape(coordinate) == value.shape and keeps_elements(own.forward, coordinate):
        coordinate = _polished(own, coordinate, value).astype(value.dtype)
    return coordinate, *jax.jvp(own.forward, (coordinate,), (coordinate,))


def _dtype(leaf: Any) -> str:
    """The name of the dtype that a leaf has in JAX."""
    return str(jax.dtypes.canonicalize_dtype(dtype_of(leaf)))


def _polished(own: Map, coordinate: jax.Array, value: jax.Array) -> jax.Array:
    """The coordinate that comes back nearest to the value, by Newton's method: an inverse may lose digits."""
    back, slope = jax.jvp(own.forward, (coordinate,), (jnp.ones_like(coordinate),))
    for _ in range(_POLISHES):
        other = coordinate + (value - back) / slope
        again, other_slope = jax.jvp(own.forward, (other,), (jnp.ones_like(other),))
        is_nearer = jnp.abs(value - again) < jnp.abs(value - back)
        pairs = ((other, coordinate), (again, back), (other_slope, slope))
        coordinate, back, slope = (jnp.where(is_nearer, new, old) for new, old in pairs)
    return coordinate
