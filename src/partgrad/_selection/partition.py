"""Split a tree by a selection, recombine it, and update it."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import Layout, alike, first_difference, united
from .._message import at
from .._trees import INTEGER, convert, describe, flatten, in_jax, is_known, kind_of, stays_numpy
from ..errors import PartsError
from .selectors import Selector, as_selection
from .target import Target, unflatten_part

T = TypeVar("T")

# JAX asks it of every node and leaf, and calls a built-in faster than a function of Python.
is_none = functools.partial(operator.is_, None)


def partition(tree: T, wrt: Selector = None) -> tuple[T, T]:
    """Split a tree into the selected leaves and the rest.

    Both parts have the tree's node types and marks, and None where the leaf is in the other part, so an optimiser's
    state for `selected` has nothing for the rest. If the selector describes leaves, `selected` has the structure of the
    gradient. Held leaves, ints, bools, strings, keys and functions are in `rest`. Where a held leaf is named, its mark
    is off in both parts.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.

    Returns:
        The pair `(selected, rest)`; `combine(selected, rest)` is the tree.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.partition({"w": 1.0, "count": 3})
        ({'count': None, 'w': 1.0}, {'count': 3, 'w': None})
    """
    target = Target(tree, as_selection(wrt))
    target.refuse_elements("partition")
    leaves, treedef = target.leaves, target.thawed
    selected: list[Any] = [None] * len(leaves)
    rest = leaves.copy()
    for i in target.plan.indices:
        selected[i], rest[i] = leaves[i], None
    return unflatten_part(treedef, selected), unflatten_part(treedef, rest)


def combine(*parts: T) -> T:
    """Put together what `partition` took apart.

    Args:
        *parts: Trees with the same structure; each leaf is in one of them and None in the others.

    Returns:
        The whole tree, with None where no part has a leaf.

    Raises:
        PartsError: If two parts have the same leaf, or their structures differ; the message gives the path.

    Example:
        >>> import partgrad as pg
        >>> pg.combine({"w": 1.0, "count": None}, {"w": None, "count": 3})
        {'count': 3, 'w': 1.0}
    """
    if not parts:
        raise PartsError("`combine` got no parts.", fix="pass what `partition` returned: combine(selected, rest).")
    whole, treedef = flatten(parts[0], is_none)
    for number, part in enumerate(parts[1:], start=1):
        leaves, own = flatten(part, is_none)
        if own != treedef:
            if not alike(own, treedef):
                raise _differ(parts[0], number, part)
            treedef = united(treedef, own)
        for i, leaf in enumerate(leaves):
            if leaf is not None:
                if whole[i] is not None:
                    raise _overlap(parts, number, i)
                whole[i] = leaf
    return treedef.unflatten(whole)


def filled(part: Any) -> Any:
    """The part with a leaf wherever any part may have one."""
    return jax.tree.map(lambda _: 0, part, is_leaf=is_none)


def _differ(first: Any, number: int, part: Any) -> PartsError:
    path, expected, found = first_difference(filled(first), filled(part))
    return PartsError(
        f"Part {number} has a different structure from part 0, at {at(path)}.",
        f"Expected {expected}, got {found}.",
        fix="combine parts of one tree; a mark that was added or removed on one side alone counts as a difference.",
    )


def _overlap(parts: tuple[Any, ...], number: int, leaf: int) -> PartsError:
    earlier = [jax.tree.leaves(part, is_leaf=is_none)[leaf] is not None for part in parts[:number]]
    path = Layout(filled(parts[0])).leaves[leaf].path
    return PartsError(
        f"Parts {earlier.index(True)} and {number} both hold {at(path)}.",
        "Expected every leaf in exactly one part, and None in the others.",
        fix="combine what one `partition` returned, or what `partgrad.mask` marks apart.",
    )


def apply_updates(tree: T, updates: Any, wrt: Selector = None) -> T:
    """Add an optimiser's updates to a tree; a leaf whose update is None stays.

    Leaves that are one array (tied weights) become several, since each gets its own update.

    Args:
        tree: The tree, or its selected part.
        updates: With a selector, a tree in the shape of the gradient, as `grad` and `value_and_grad` return it for this
            `wrt`. Without one, a tree of the same structure, with None wherever nothing changes.
        wrt: A selector, for the updates of a part.

    Returns:
        The tree. An updated leaf keeps its shape and dtype (a Python number becomes an array); the others are the same
        objects. Marks stay. A row that `lambda m: m.table[rows]` selects by integers of JAX is updated once, even if it
        is there twice, and one past the end is not.

    Raises:
        SelectionError: If the selector does not fit the tree.
        PartsError: If the updates have a different structure.

    Example:
        >>> import partgrad as pg
        >>> pg.apply_updates({"w": 1.0, "count": 3}, {"w": 0.5, "count": None})
        {'count': 3, 'w': Array(1.5, dtype=float32, weak_type=True)}
        >>> pg.apply_updates({"w": 1.0, "b": 2.0}, 0.5, wrt="w")
        {'b': 2.0, 'w': Array(1.5, dtype=float32, weak_type=True)}
    """
    if wrt is not None:
        return _updated_part(tree, updates, wrt)
    leaves, treedef = flatten(tree, is_none)
    changes, other = flatten(updates, is_none)
    if not alike(other, treedef):
        raise _misfit(*first_difference(filled(tree), filled(updates)))
    path_of = lambda i: Layout(filled(tree)).leaves[i].path
    pairs = enumerate(zip(leaves, changes, strict=True))
    return treedef.unflatten([_updated(leaf, change, functools.partial(path_of, i)) for i, (leaf, change) in pairs])


def _updated_part(tree: T, updates: Any, wrt: Selector) -> T:
    target = Target(tree, as_selection(wrt))
    template = target.shaped(list(range(len(target.plan.indices))))
    changes, found = flatten(updates, is_none)
    # What is None on both sides is not selected; what is None among the updates alone stays.
    numbers, expected = flatten(template, is_none)
    if not alike(found, expected):
        raise _misfit(*first_difference(filled(template), filled(updates)), wrt)
    values = target.selected
    for number, change in zip(numbers, changes, strict=True):
        path_of = lambda number=number: target.skeleton.path(target.plan.indices[number or 0])
        if number is not None:
            values[number] = _updated(values[number], change, path_of, wrt)
        elif change is not None:
            raise _misfit("", "None at what is not selected", describe(change), wrt)
    return cast(T, target.with_values(values, checked=True))


def _updated(leaf: Any, change: Any, path_of: Callable[[], str], wrt: Any = None) -> Any:
    """A leaf with its update; the same object if there is none."""
    # Integers have float0 as their derivative: nothing changes.
    if change is None or getattr(change, "dtype", None) == jax.dtypes.float0:
        return leaf
    if leaf is None or kind_of(leaf) is None:
        raise _misfit(path_of(), "None" if leaf is None else f"None for {describe(leaf)}", describe(change), wrt)
    if kind_of(change) is None:
        raise _misfit(path_of(), "an array, a number or None", describe(change), wrt)
    in_numpy = stays_numpy(leaf, change)
    old = leaf if in_numpy else in_jax(leaf, path_of)
    if np.shape(change) != old.shape:
        raise _misfit(path_of(), f"shape {old.shape}", f"shape {np.shape(change)}", wrt)
    if kind_of(old) == kind_of(change) == INTEGER and is_known(old) and is_known(change) and hasattr(leaf, "dtype"):
        # Their sum is not taken in a dtype that it may exceed.
        new = np.add(old, change, dtype=object)
    else:
        convert(change, old, path_of)
        with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
            new = old + (np.asanyarray(change) if in_numpy else change)
    new = convert(new, old, path_of)
    # A number of NumPy stays one, and an array without dimensions an array.
    return np.asanyarray(new)[() if isinstance(leaf, np.generic) else ...] if in_numpy else jnp.asarray(new)


def _misfit(path: str, expected: str, found: str, wrt: Any = None) -> PartsError:
    if wrt is None:
        what, fix = "tree", "give the whole tree with None at what stays, or say whose updates they are: "
        fix += "partgrad.apply_updates(tree, updates, wrt=...), with the selector of their gradient."
    else:
        what, fix = "selection", "give them the shape of the gradient for this wrt=, as partgrad.grad returns it."
    what = f"The updates have a different structure from the {what}, at {at(path)}."
    return PartsError(what, f"Expected {expected}, got {found}.", fix=fix)
