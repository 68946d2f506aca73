"""Read and edit the selected leaves of a tree; nothing else changes, neither values nor key paths."""

import itertools
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import Place, remarked
from .._message import at
from .._trees import (
    BOOL,
    function_name,
    is_differentiable,
    kind_of,
    refuse_uncallable,
    written,
)
from ..errors import ArgumentError, PartsError, SelectionError
from .selectors import Selector, as_selection
from .target import Target, items_of, values_like

T = TypeVar("T")

_MISSING: Any = object()


def select(tree: Any, wrt: Selector) -> Any:
    """Return the selected leaves, in the shape of the gradient.

    Args:
        tree: Any pytree.
        wrt: A selector. A leaf that is itself selected may be of any type; a selected node contributes what is
            differentiable.

    Returns:
        The part that `wrt` names, or the tree with None at every leaf that is not selected.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.select({"a": [1.0, 2.0], "b": 3.0}, "a[1]")
        2.0
        >>> pg.select({"a": [1.0, 2.0], "b": 3.0}, "a[*]")
        {'a': [1.0, 2.0], 'b': None}
        >>> pg.select({"a": [1.0, 2.0], "name": "x"}, "name")
        'x'
    """
    target = Target(tree, as_selection(wrt), purpose="edit")
    return target.shaped(target.selected)


def replace(tree: T, wrt: Selector, value: Any = _MISSING, *, fn: Callable[[Any], Any] | None = None) -> T:
    """Replace the values of the selected leaves; marks stay.

    A leaf that is selected whole becomes the value, whatever its shape and dtype. Where elements are selected, the leaf
    keeps its dtype and all other elements keep their bits:

    - A value is written into an array of its own kind or a later one: bool, integer, float, complex. 1.5 or NaN into
      integers and complex numbers into floats are errors.
    - It is rounded to the digits of the leaf. Where it would lose more, it is an error: 300 into uint8, 1e300 into
      float32.
    - A traced value has no number to look at. It counts by its dtype: integers are written only into a dtype that holds
      all of theirs; floats are rounded, and may become infinite; one that began as a Python number (a weak type) takes
      the dtype of the leaf.
    - An array of NumPy remains one, of its class, byte order and memory order, unless the value is traced, or of JAX
      and JAX has its dtype. A traced value makes it an array of JAX, which without `jax_enable_x64` has no 64 bits: if
      that would change elements that are not selected, it is an error.

    Rows that integers of JAX select, `lambda m: m.table[rows]`, may be there twice: both get the same value, or it is
    not said which is written. What is past the end is not written.

    `apply_updates` and what `ravel` returns write by the same rule.

    Args:
        tree: Any pytree.
        wrt: A selector, as in `select`.
        value: The new value, a tree in the shape of the gradient: the new part, or the whole tree with None at every
            leaf that is not selected. It is a function only where functions were selected, such as the activation of a
            network.
        fn: A function that is applied to each selected leaf, instead of a value.

    Returns:
        The tree with the new leaves.

    Raises:
        SelectionError: If the selector does not fit the tree.
        PartsError: If `value` does not have the structure of the gradient.
        ArgumentError: If there is neither a value nor a function, or both; a function where a value belongs, or
            the reverse; or a value that the dtype of the leaf does not hold.

    Example:
        >>> import partgrad as pg
        >>> pg.replace({"a": 1.0, "b": 2.0}, "b", 5.0)
        {'a': 1.0, 'b': 5.0}
        >>> pg.replace({"a": 1.0, "b": 2.0}, None, fn=lambda x: 10 * x)
        {'a': 10.0, 'b': 20.0}
    """
    if (value is _MISSING) is (fn is None):
        raise ArgumentError(
            f"`partgrad.replace` got {'neither a value nor a function' if fn is None else 'a value and a function'}.",
            "Expected one of them.",
            fix="write partgrad.replace(tree, wrt, value), or partgrad.replace(tree, wrt, fn=function).",
        )
    if fn is not None:
        fix = "write partgrad.{0}(tree, wrt, value) for a value, or fn=function."
        refuse_uncallable("replace", fn, "a function of a selected leaf", fix)
    target = Target(tree, as_selection(wrt), purpose="edit")
    if fn is not None:
        return target.with_values([fn(leaf) for leaf in target.selected], checked=True)
    _refuse_function(value, target)
    template = target.shaped(target.selected)
    return target.with_values(values_like(template, value, "The new value of `replace`"), checked=True)


def _refuse_function(value: Any, target: Target) -> None:
    # A model may itself be callable: a tree counts as a value, and a bare function does not.
    leaves = [value] if isinstance(value, jax.tree_util.Partial) else jax.tree.leaves(value)
    old = target.selected
    pairs = zip(leaves, old, strict=True) if len(leaves) == len(old) else ((leaf, None) for leaf in leaves)
    for new, leaf in pairs:
        if callable(new) and not callable(leaf):
            name = function_name(new) or type(new).__name__
            raise ArgumentError(
                f"`partgrad.replace` got the function `{name}` as the value of leaves that are not functions.",
                "Expected a value, in the shape of the gradient.",
                fix="to apply it to each selected leaf, write partgrad.replace(tree, wrt, fn=function).",
            )


def items(tree: Any, wrt: Selector = None) -> list[tuple[str, Any]]:
    """Return the selected leaves with their paths, for priors, logging and the sites of a probabilistic program.

    Args:
        tree: Any pytree.
        wrt: A selector, as in `select`. None selects every floating or complex leaf that no mark holds.

    Returns:
        Pairs of path and leaf. Every path selects its leaf. Selected elements are listed one by one.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> model = {"layers": [{"w": 1.0}, {"w": 2.0}], "n": 3}
        >>> for path, leaf in pg.items(model):
        ...     print(path, leaf)
        ['layers'][0]['w'] 1.0
        ['layers'][1]['w'] 2.0
        >>> pg.items(model, "n")
        [("['n']", 3)]
    """
    return items_of(Target(tree, as_selection(wrt), purpose="edit"))


def mask(tree: T, wrt: Selector = None) -> T:
    """Return the tree with True at every selected leaf and False elsewhere, for optimisers and as a selector.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds; `held` those that one holds.

    Returns:
        A tree of bools with the structure of the tree.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.mask({"a": 1.0, "b": 2.0, "n": 3}, "b")
        {'a': False, 'b': True, 'n': False}
    """
    selection = as_selection(wrt)
    target = Target(tree, selection, purpose="marks" if selection.is_about_marks else "differentiate")
    target.refuse_elements("mask")
    chosen = set(target.plan.indices)
    return target.treedef.unflatten([i in chosen for i in range(len(target.leaves))])


def is_nondiff(tree: Any, wrt: Selector) -> bool:
    """Return whether marks hold every selected leaf.

    Args:
        tree: Any pytree.
        wrt: A selector; here it reaches through marks. None asks about all floating and complex leaves.

    Returns:
        One bool.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.is_nondiff({"a": 1.0, "b": pg.NonDiff(2.0)}, "b"), pg.is_nondiff({"a": 1.0, "b": pg.NonDiff(2.0)}, None)
        (True, False)
    """
    target = _whatever_marks(tree, wrt)
    return all(target.skeleton.layout.leaves[i].is_held for i in target.plan.indices)


def stop_gradient(tree: T, wrt: Selector = None, when: Any = True) -> T:
    """Stop gradients at the selected leaves, in this trace only; marks do not change.

    `when` may be traced, so a schedule that freezes and releases leaves can run inside one compiled step. Every
    transform, enclosing ones included, sees the stopped leaves as constants. Values do not change.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        when: Whether to stop: a bool or an array of bools, traced or not, that broadcasts against each selected leaf;
            or a tree of these in the shape of the gradient.

    Returns:
        The tree.

    Raises:
        SelectionError: If the selector does not fit the tree.
        PartsError: If `when` is a tree that does not have the structure of the gradient.
        ArgumentError: If `when` holds something else than bools.

    Example:
        >>> import jax, partgrad as pg
        >>> def loss(p, frozen):
        ...     p = pg.stop_gradient(p, "a", when=frozen)
        ...     return p["a"] ** 2 * p["b"]
        >>> step = jax.jit(jax.grad(loss))
        >>> print(step({"a": 3.0, "b": 2.0}, True)["a"], step({"a": 3.0, "b": 2.0}, False)["a"])
        0.0 12.0
    """
    target = Target(tree, as_selection(wrt))
    for one in jax.tree.leaves(when):
        if kind_of(one) != BOOL:
            raise ArgumentError(
                f"`when` of `partgrad.stop_gradient` is {type(one).__name__} {written(one):.60}.",
                "Expected a bool or an array of bools.",
                fix="write a comparison, such as when=step < 100.",
            )
    if jax.tree.structure(when) == jax.tree.structure(0):
        conditions = [when] * len(target.selected)
    else:
        template = target.shaped(target.selected)
        conditions = values_like(template, when, "The condition of `stop_gradient`")
    return target.with_values([_stopped(leaf, on) for leaf, on in zip(target.selected, conditions, strict=True)])


def _stopped(leaf: Any, when: Any) -> Any:
    # No derivative flows through a leaf that is not traced, and stopping it would change its type.
    if not isinstance(leaf, jax.core.Tracer) or when is False:
        return leaf
    if when is not True and not _broadcasts(jnp.shape(when), leaf.shape):
        raise PartsError(
            "The condition of `stop_gradient` does not fit a selected leaf.",
            f"Expected a bool, or bools that broadcast to shape {leaf.shape}, got shape {jnp.shape(when)}.",
            fix="give one bool, or a tree of conditions in the shape of the gradient.",
        )
    stopped = jax.lax.stop_gradient(leaf)
    return stopped if when is True else jnp.where(when, stopped, leaf)


def _broadcasts(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether one shape broadcasts to another."""
    try:
        return np.broadcast_shapes(shape, other) == other
    except ValueError:
        return False


def freeze(tree: T, wrt: Selector = _MISSING) -> T:
    """Mark the selected leaves NonDiff: still traced, but not differentiated until they are thawed or named.

    Values do not change. In a `partgrad.dataclass` the mark goes on the field, and JAX's key paths do not change. In a
    plain container (dict, list, tuple), a `NonDiff` is put around each selected leaf, or around the container if that
    was selected. If leaves of another library's module are selected, such as an `eqx.Module`, the module itself is
    wrapped, so that its methods still find plain arrays, and the wrapper says which leaves it holds. Nothing else is
    held.

    Args:
        tree: Any pytree.
        wrt: A selector; here it reaches through existing marks. None selects everything, and has to be written.

    Returns:
        The tree with more marks.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.freeze({"w": 1.0, "b": 2.0}, "b")
        {'b': NonDiff(2.0), 'w': 1.0}
    """
    if wrt is _MISSING:
        raise ArgumentError(
            "`partgrad.freeze` got a tree and no selector.",
            "Expected what is to be held.",
            fix="write partgrad.freeze(tree, None) to hold every leaf, or name a part of the tree.",
        )
    return _remarked(tree, wrt, True)


def thaw(tree: T, wrt: Selector = None) -> T:
    """Remove the marks of the selected leaves, including those that a class declares.

    Values do not change. If part of a marked node is thawed, the rest of it stays held.

    Args:
        tree: Any pytree.
        wrt: A selector; here it reaches through marks. None, the default, removes every mark.

    Returns:
        The tree with fewer marks.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> pg.thaw({"w": 1.0, "b": pg.NonDiff(2.0)}, "b")
        {'b': 2.0, 'w': 1.0}
    """
    return _remarked(tree, wrt, False)


def _remarked(tree: T, wrt: Any, held: bool) -> T:
    target = _whatever_marks(tree, wrt)
    chosen, layout = frozenset(target.plan.indices), target.skeleton.layout
    # What is inside a thawed node and no mark of partgrad holds stays held; alone it cannot be thawed.
    stays = [i for i in chosen if not held and layout.leaves[i].foreign_mark]
    if stays and wrt is not None and len(stays) == len(chosen):
        raise _not_thawed(layout.leaves[min(stays)])
    chosen -= set(stays)
    nodes = _whole(target, chosen) if held else []
    # `freeze` states explicitly what a mark does silently: the derivative of a leaf that is open here ends.
    leaves = [_stopped(leaf, held and i in chosen) for i, leaf in enumerate(target.leaves)]
    return cast(T, remarked(tree, chosen, held, nodes).unflatten(leaves))


def _not_thawed(place: Place) -> SelectionError:
    assert place.foreign_mark is not None
    return SelectionError(
        f"{at(place.path)} cannot be thawed: the class `{type(place.foreign_mark.value).__name__}` holds it.",
        "Expected a mark that can be taken off.",
        fix=f"name it where it is to be differentiated: wrt={place.path!r}.",
    )


def _whole(target: Target, chosen: Collection[int]) -> list[Place]:
    """The nodes that were selected, all of whose differentiable leaves are chosen."""
    left_out = itertools.accumulate(
        (number not in chosen and is_differentiable(leaf) for number, leaf in enumerate(target.leaves)), initial=0
    )
    before = list(left_out)
    return [place for place in target.plan.nodes if before[place.start] == before[place.stop]]


def _whatever_marks(tree: Any, wrt: Any) -> Target:
    """What a selector chooses if marks do not count."""
    target = Target(tree, as_selection(wrt), purpose="marks")
    target.refuse_elements("freeze, thaw and is_nondiff")
    return target
