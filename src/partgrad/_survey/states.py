"""The states of a survey: arguments of which some leaves have an axis of states, as for `jax.vmap`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._message import at, listed
from .._programs import explicit_sharding
from .._trees import describe, flatten, is_array, written
from ..errors import ArgumentError


class States:
    """The arguments of a call, with the axis of each leaf that has one for each state.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments: as for `jax.vmap`, their first axis is that of the states.
        in_axes: As for `jax.vmap`.

    Attributes:
        count: How many states there are.
        leaves: The leaves of all arguments.
        mapped: The numbers of those with an axis of states.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], in_axes: Any):
        self.leaves, self.treedef = flatten((tuple(args), kwargs))
        axes = tuple(in_axes) if isinstance(in_axes, list | tuple) else in_axes
        if isinstance(axes, tuple) and len(axes) != len(args):
            raise ArgumentError(
                f"`in_axes` has {len(axes)} entries, and {len(args)} arguments were passed by position.",
                "Expected one number for all of them, or a tuple with an entry for each.",
                fix="write in_axes=(None, 0) for a function of parameters and of a batch of states.",
            )
        self.axes = self._axes(args, kwargs, axes)
        self.mapped = [number for number, axis in enumerate(self.axes) if axis is not None]
        self.count = self._counted()

    def _axes(self, args: Sequence[Any], kwargs: dict[str, Any], in_axes: Any) -> list[int | None]:
        is_none = lambda node: node is None
        try:
            positional = jax.tree.broadcast(in_axes, tuple(args), is_leaf=is_none)
        except ValueError as error:
            raise ArgumentError(
                f"`in_axes` is {written(in_axes):.60}, which does not fit the arguments.",
                f"JAX says: {' '.join(str(error).split()):.200}",
                fix="write a number or None for each argument, or a tree of these that begins as the argument does.",
            ) from error
        axes = jax.tree.leaves((positional, jax.tree.map(lambda _: 0, kwargs)), is_leaf=is_none)
        # A leaf of the arguments that is None is no leaf.
        if len(axes) != len(self.leaves):
            given = jax.tree.leaves((tuple(args), kwargs), is_leaf=is_none)
            axes = [axis for axis, leaf in zip(axes, given, strict=True) if leaf is not None]
        return axes

    def _counted(self) -> int:
        sizes: dict[str, int] = {}
        for number in self.mapped:
            leaf, axis = self.leaves[number], self.axes[number]
            path = self._path(number)
            shape = np.shape(leaf) if is_array(leaf) else ()
            if axis is None or not -len(shape) <= axis < len(shape):
                raise ArgumentError(
                    f"{at(path)} has no axis {axis} for the states: it is {describe(leaf)}.",
                    "Expected an array whose axis has an entry for each state.",
                    fix="write None for what is the same in all states: in_axes=(None, 0).",
                )
            sizes[path] = shape[axis]
        counts = Counter(sizes.values())
        if len(counts) != 1:
            found = (
                listed(f"{at(path)} has {size}" for path, size in sizes.items()) or "no argument has an axis of states"
            )
            raise ArgumentError(
                "The arguments do not say how many states there are.",
                f"Expected one size of all axes that `in_axes` names; {found}.",
                fix="write in_axes=(None, 0): None for what is the same in all states, 0 for what has one for each.",
            )
        (count,) = counts
        if not count:
            raise ArgumentError(
                "There are no states: the axis that `in_axes` names has size 0.",
                "Expected at least one.",
                fix="pass a batch of states.",
            )
        return int(count)

    def _path(self, number: int) -> str:
        path, _ = jax.tree_util.tree_leaves_with_path(self.treedef.unflatten(range(len(self.leaves))))[number]
        is_keyword, *rest = path
        return f"args{jax.tree_util.keystr(tuple(rest))}" if is_keyword.idx == 0 else jax.tree_util.keystr(tuple(rest))

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other leaves."""
        return self.treedef.unflatten(leaves)

    @property
    def one(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the leaves with an axis of states, at one state."""
        found = []
        for number in self.mapped:
            leaf, shape = jnp.asarray(self.leaves[number]), list(np.shape(self.leaves[number]))
            shape.pop(self._axis(number))
            found.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return found

    def at(self, state: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments at one state."""
        leaves = list(self.leaves)
        for number in self.mapped:
            part = self._cut(number, state, 1)
            leaves[number] = part.reshape([size for axis, size in enumerate(part.shape) if axis != self._axis(number)])
        return self.arguments(leaves)

    def batch(self, start: int, size: int) -> list[Any]:
        """The leaves with an axis of states, cut to some states, which come first."""
        found = []
        for number in self.mapped:
            part = self.leaves[number] if size == self.count else self._cut(number, start, size)
            found.append(jnp.asarray(part) if not self._axis(number) else jnp.moveaxis(part, self._axis(number), 0))
        return found

    def _axis(self, number: int) -> int:
        """The axis of the states of a leaf, counted from the front."""
        return (self.axes[number] or 0) % np.ndim(self.leaves[number])

    def _cut(self, number: int, start: int, size: int) -> Any:
        leaf, axis = self.leaves[number], self._axis(number)
        if isinstance(leaf, np.ndarray):
            return leaf[(slice(None),) * axis + (slice(start, start + size),)]
        sharding = explicit_sharding(jax.typeof(leaf))
        if sharding is not None and len(sharding.spec) > axis and sharding.spec[axis] is not None:
            # What is sharded by its type cannot be cut along that axis.
            others = [None if i == axis else name for i, name in enumerate(sharding.spec)]
            leaf = self.leaves[number] = jax.sharding.reshard(
                leaf, NamedSharding(sharding.mesh, PartitionSpec(*others))
            )
        return lax.dynamic_slice_in_dim(leaf, start, size, axis)
