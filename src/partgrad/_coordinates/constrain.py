"""From coordinates back to the tree."""

import contextlib
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from .._compat import cached_property
from .._marks import Layout, StaticData, alike, first_difference, united
from .._message import at
from .._programs import OF_MAP
from .._selection import filled, is_none, unflatten_part
from .._trees import dtype_of, flatten
from ..errors import ArgumentError, PartsError, StaticError
from .maps import Map, keeps_elements, log_det_of, maps_of, taken_apart
from .ties import Tie

T = TypeVar("T")


class Free(NamedTuple):
    """A leaf that moves.

    Attributes:
        path: Its path.
        shape, dtype: Those of its value.
        map: The number of its map, or None if it moves as it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    map: int | None


class Following(NamedTuple):
    """A leaf that follows: its path, its dtype, and its tie, with positions for numbers of leaves."""

    path: str
    dtype: str
    tie: Tie


class Wiring(NamedTuple):
    """What becomes of the coordinates.

    A position is the number of a leaf in the flattened tree, where None counts as one.

    Attributes:
        free: The leaves that move, with their positions.
        ties: The leaves that follow, each after its sources.
        words: What the maps are called.
        static: The functions and strings of the tree, with their positions.
    """

    free: tuple[tuple[int, Free], ...]
    ties: tuple[Following, ...]
    words: tuple[str, ...]
    static: tuple[tuple[int, Any], ...] = ()


@jax.tree_util.register_pytree_node_class
class Constrain(Generic[T]):
    """Puts coordinates back into the tree that they were taken from: what `partgrad.unconstrain` returns.

    It is a pytree, whose leaves are the arrays and numbers that do not move and the arrays of the maps; functions and
    strings are static. So it may be an argument of a function under `jit` or `vmap`. It can be pickled if the maps and
    the functions of ties can.
    """

    def __init__(self, rest: T, arrays: Sequence[Any], static: StaticData):
        self._rest = rest
        self._arrays = arrays
        self._static = static

    @property
    def _wiring(self) -> Wiring:
        return cast(Wiring, self._static.constant[1])

    @cached_property
    def _maps(self) -> list[Map]:
        return maps_of(self._static.constant[0], self._arrays)

    def __call__(self, free: T) -> T:
        """The tree at some coordinates, with its marks; those of leaves that were named are off.

        Args:
            free: A tree in the shape of the coordinates.

        Returns:
            The tree. A leaf with a map, and one that follows, has the dtype that it had.

        Raises:
            PartsError: If the coordinates have another structure.
        """
        values, treedef = self._values(free)
        maps = self._maps
        for position, own in self._wiring.free:
            if own.map is not None:
                # `check` reads there which map an operation is in.
                with jax.named_scope(f"{OF_MAP}`{self._wiring.words[own.map]}` of {at(own.path)}{OF_MAP}"):
                    values[position] = in_dtype(maps[own.map].forward(values[position]), own.dtype)
        for following in self._wiring.ties:
            tie = following.tie
            values[tie.leaf] = in_dtype(tie.value([values[source] for source in tie.sources]), following.dtype)
        return treedef.unflatten(values)

    def log_det(self, free: T) -> jax.Array:
        """The logarithm of the absolute determinant of the derivative of the values that move by their coordinates.

        The log density of the coordinates is the log density of the values plus this number.

        Args:
            free: A tree in the shape of the coordinates.

        Returns:
            A scalar: the sum over all leaves with a map.

        Raises:
            ArgumentError: If a map mixes the elements of its leaf and does not say its determinant.
            PartsError: If the coordinates have another structure.
        """
        values, _ = self._values(free)
        maps = self._maps
        moved = [(maps[own.map], values[i], own.path) for i, own in self._wiring.free if own.map is not None]
        return sum((log_det_of(*each) for each in moved), start=jnp.zeros(()))

    @property
    def bounds(self) -> tuple[T, T]:
        """The least and largest values of the numbers that move, as two trees in the shape of `partition`'s first part.

        They are for an optimiser that takes bounds instead of coordinates. The bounds of a map are its values at minus
        and plus infinity; a leaf without a map has these.

        Raises:
            ArgumentError: If a map does not take each element by itself, or has no value at infinity.
        """
        _, treedef = flatten(self._rest, is_none)
        ends: list[list[Any]] = [[None] * treedef.num_leaves for _ in range(2)]
        for position, own in self._wiring.free:
            for end, sign in zip(ends, (-1, 1), strict=True):
                end[position] = self._end(own, sign)
        one, other = (unflatten_part(treedef, end) for end in ends)
        return jax.tree.map(jnp.minimum, one, other), jax.tree.map(jnp.maximum, one, other)

    def _end(self, own: Free, sign: int) -> jax.Array:
        """The values of a leaf at coordinates of plus or minus infinity."""
        infinity = jnp.full(own.shape, sign * jnp.inf, own.dtype)
        if own.map is None:
            return infinity
        forward = self._maps[own.map].forward
        end = in_dtype(forward(infinity), own.dtype) if keeps_elements(forward, infinity) else None
        if end is None or bool(jnp.any(jnp.isnan(end))):
            raise ArgumentError(
                f"The map {self._wiring.words[own.map]} of {at(own.path)} has no bounds.",
                "Expected one that takes each element by itself and has a value at minus and plus infinity.",
                fix="give the optimiser the coordinates instead, which have no bounds.",
            )
        return end

    def _values(self, free: T) -> tuple[list[Any], Any]:
        """The rest of the tree with the coordinates, and its structure."""
        values, treedef = flatten(self._rest, is_none)
        given, own = flatten(free, is_none)
        if own != treedef:
            if not alike(own, treedef):
                raise _misfit(*first_difference(filled(self._rest), filled(free)))
            treedef = united(treedef, own)
        for position, value in self._wiring.static:
            values[position] = value
        expected = dict(self._wiring.free)
        for position, value in enumerate(given):
            if (value is None) == (position in expected):
                path = expected[position].path if value is None else _path(free, position)
                words = ("coordinates", "None") if value is None else ("None, as it does not move", "a value")
                raise _misfit(path, *words)
            if value is not None:
                values[position] = value
        return values, treedef

    def __repr__(self) -> str:
        rows = [
            (own.path, "as it is" if own.map is None else self._wiring.words[own.map]) for _, own in self._wiring.free
        ]
        paths = {position: own.path for position, own in self._wiring.free}
        paths |= {own.tie.leaf: own.path for own in self._wiring.ties}
        for following in self._wiring.ties:
            tie = following.tie
            sources = ", ".join(paths.get(own) or _path(self._rest, own) for own in tie.sources)
            rows.append((following.path, f"follows {sources}" + (", by a function" if tie.function else "")))
        width = max((len(path) for path, _ in rows), default=0)
        kind = "a leaf" if self._rest is None else type(self._rest).__name__
        return (
            "\n".join([f"<partgrad.unconstrain: back to {kind}", *(f"  {path:{width}}  {what}" for path, what in rows)])
            + ">"
        )

    def __reduce__(self) -> Any:
        # Without the maps as they are read, which hold functions of partgrad's own.
        return type(self), (self._rest, self._arrays, self._static)

    def tree_flatten(self) -> tuple[tuple[T, Sequence[Any]], StaticData]:
        """What does not move and the arrays of the maps; the rest is static."""
        return (self._rest, self._arrays), self._static

    @classmethod
    def tree_unflatten(cls, static: StaticData, children: tuple[T, Sequence[Any]]) -> "Constrain[T]":
        """Put them together."""
        return cls(*children, static)


def constrain_by(rest: T, bijections: Sequence[Any], wiring: Wiring) -> Constrain[T]:
    """What puts coordinates back into the rest of a tree, by some bijections."""
    static, arrays = taken_apart(bijections)
    leaves, treedef = flatten(rest, is_none)
    others = {position: leaf for position, leaf in enumerate(leaves) if _is_static(leaf)}
    traced = [None if position in others else leaf for position, leaf in enumerate(leaves)]
    wiring = wiring._replace(static=tuple(others.items()))
    return Constrain(unflatten_part(treedef, traced), arrays, StaticData((static, wiring)))


def _is_static(leaf: Any) -> bool:
    """Whether a leaf is for the compiler to compare: a function, a string."""
    if not callable(leaf) and type(leaf) is not str:
        return False
    # A function may hold what cannot be compared.
    with contextlib.suppress(StaticError):
        StaticData(leaf)
        return True
    return False


def in_dtype(value: Any, dtype: str) -> Any:
    """A value in a dtype; the same object if it has it."""
    return value if str(dtype_of(value)) == dtype else jnp.asarray(value).astype(dtype)


def _path(part: Any, position: int) -> str:
    return Layout(filled(part)).leaves[position].path


def _misfit(path: str, expected: str, found: str) -> PartsError:
    return PartsError(
        f"The coordinates have a different structure from those that `partgrad.unconstrain` returned, at {at(path)}.",
        f"Expected {expected}, got {found}.",
        fix="give a tree in the shape of `free`, of free, constrain = partgrad.unconstrain(...).",
    )
