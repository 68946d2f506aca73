"""What one does with a selection without differentiating."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .. import _words as words, errors
from .._marks import Layout, first_difference
from .._trees import describe
from .plan import plan, unflatten_part
from .selectors import as_selection

T = TypeVar("T")


def partition(tree: T, wrt: Any = None) -> tuple[T, T]:
    """Split a tree into the selected leaves and the rest.

    Both parts have the tree's node types and marks, and None where the leaf is in the other, so an optimiser's state
    for `selected` holds nothing for the rest. With a selector that describes leaves, `selected` has the structure of
    the gradient. Leaves that a mark holds, ints, bools, strings, keys and functions are in `rest`. Where a held leaf is
    named, both parts are built thawed there.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.

    Returns:
        The pair `(selected, rest)`; `combine(selected, rest)` is the tree.

    Raises:
        SelectionError: If the selector does not go with the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.partition({"w": 1.0, "count": 3})
        ({'count': None, 'w': 1.0}, {'count': 3, 'w': None})
    """
    leaves, treedef = jax.tree.flatten(tree)
    resolved = plan(as_selection(wrt), tree, leaves, treedef)
    resolved.refuse_elements("partition", tree)
    structure = resolved.structure(treedef)
    selected: list[Any] = [None] * len(leaves)
    rest = leaves.copy()
    for i in resolved.indices:
        selected[i], rest[i] = leaves[i], None
    return unflatten_part(structure, selected), unflatten_part(structure, rest)


def combine(*parts: T) -> T:
    """Put together what `partition` took apart.

    Args:
        *parts: Trees of one structure, each leaf in one of them and None in the others.

    Returns:
        The whole tree; None where no part holds a leaf.

    Raises:
        PartsError: If two parts hold the same leaf, or their structures differ; the message names the path.

    Example:
        >>> import partgrad as pg
        >>> pg.combine({"w": 1.0, "count": None}, {"w": None, "count": 3})
        {'count': 3, 'w': 1.0}
    """
    if not parts:
        raise words.no_parts()
    whole, treedef = jax.tree.flatten(parts[0], is_leaf=_is_none)
    for number, part in enumerate(parts[1:], start=1):
        leaves, structure = jax.tree.flatten(part, is_leaf=_is_none)
        if structure != treedef:
            raise words.parts_differ(number, *first_difference(_filled(parts[0]), _filled(part)))
        for i, leaf in enumerate(leaves):
            if leaf is not None:
                if whole[i] is not None:
                    raise _overlap(parts, number, i)
                whole[i] = leaf
    return treedef.unflatten(whole)


def _is_none(node: Any) -> bool:
    return node is None


def _filled(part: Any) -> Any:
    """The part with a leaf wherever any part may have one."""
    return jax.tree.map(lambda _: 0, part, is_leaf=_is_none)


def _overlap(parts: tuple[Any, ...], number: int, leaf: int) -> errors.PartsError:
    earlier = [jax.tree.leaves(part, is_leaf=_is_none)[leaf] is not None for part in parts[:number]]
    return words.parts_overlap(Layout(_filled(parts[0])).leaves[leaf].path, earlier.index(True), number)


def apply_updates(tree: T, updates: Any) -> T:
    """Add an optimiser's updates to a tree; where an update is None the leaf stays.

    Args:
        tree: The tree, or its selected part.
        updates: A tree of the same structure, with None wherever nothing changes.

    Returns:
        The tree. An updated leaf keeps its shape and dtype (a Python number becomes an array); the others are the same
        objects.

    Raises:
        PartsError: If the updates have another structure.

    Example:
        >>> import partgrad as pg
        >>> pg.apply_updates({"w": 1.0, "count": 3}, {"w": 0.5, "count": None})
        {'count': 3, 'w': Array(1.5, dtype=float32, weak_type=True)}
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_none)
    changes, structure = jax.tree.flatten(updates, is_leaf=_is_none)
    if structure != treedef:
        raise words.updates_structure(*first_difference(_filled(tree), _filled(updates)))
    for i, change in enumerate(changes):
        if change is not None:
            if leaves[i] is None:
                raise words.updates_structure(Layout(_filled(tree)).leaves[i].path, "None", describe(change))
            old = jnp.asarray(leaves[i])
            if jnp.shape(change) != old.shape:
                path = Layout(_filled(tree)).leaves[i].path
                raise words.updates_structure(path, f"shape {old.shape}", f"shape {jnp.shape(change)}")
            leaves[i] = (old + change).astype(old.dtype) if jnp.result_type(old, change) != old.dtype else old + change
    return treedef.unflatten(leaves)
