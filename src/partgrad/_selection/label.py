"""Labels for the leaves of a tree."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .._message import at, listed
from .._skeletons import Purpose
from ..errors import SelectionError, SelectorTypeError
from .selectors import Selector, as_selection
from .target import Target

_MISSING: Any = object()


def label(tree: Any, groups: Mapping[Any, Selector], default: Hashable = _MISSING) -> Any:
    """Label every leaf of a tree: for optimiser groups, weight decay, `in_axes`, partition specs.

    Args:
        tree: Any pytree.
        groups: A dict from labels to selectors. A leaf that is itself selected may be of any type; a selected node
            contributes the leaves in it that are differentiable and not held by a mark.
        default: The label of all other leaves. Without it, a leaf that no group selects is an error.

    Returns:
        A tree of labels with the structure of the tree.

    Raises:
        SelectionError: If a selector does not fit the tree, if two groups select the same leaf, or if no group does.

    Example:
        >>> import partgrad as pg
        >>> pg.label({"body": [1.0, 2.0], "head": 3.0, "n": 4}, {"slow": "body", "fast": "head"}, default="frozen")
        {'body': ['slow', 'slow'], 'head': 'fast', 'n': 'frozen'}
    """
    if not isinstance(groups, Mapping):
        raise SelectorTypeError(
            f"`partgrad.label` got {type(groups).__name__} {groups!r:.60} for its groups.",
            "Expected a dict from labels to selectors.",
            fix="write partgrad.label(tree, {'slow': 'body', 'fast': 'head'}).",
        )
    target = Target(tree, as_selection(None))
    labels = owners(
        tree,
        groups,
        "edit",
        "label",
        lambda path, one, other: SelectionError(
            f"Two groups select {at(path)}: {one!r} and {other!r}.",
            "Expected every leaf in at most one group.",
            fix="take it out of one of them, as in partgrad.path('layers') - 'layers[1]'.",
        ),
    )
    without = [i for i in range(len(target.leaves)) if i not in labels]
    if without and default is _MISSING:
        raise SelectionError(
            f"No group selects {listed(at(target.skeleton.path(i)) for i in without)}.",
            "Expected a label for every leaf, the held ones and those without a derivative too.",
            fix="give the others a label: default=...",
        )
    return target.treedef.unflatten([labels.get(i, default) for i in range(len(target.leaves))])


def owners(
    tree: Any,
    selectors: Mapping[Any, Selector],
    purpose: Purpose,
    name: str,
    overlap: Callable[[str, Any, Any], SelectionError],
) -> dict[int, Any]:
    """Which of several selectors, by its key, selects each leaf that one of them does.

    Args:
        tree: The tree.
        selectors: The selectors, each of whole leaves.
        purpose: What they are resolved for.
        name: The function that asks, for an error.
        overlap: The error for a leaf that two of them select, from its path and their keys.
    """
    found: dict[int, Any] = {}
    for key, wrt in selectors.items():
        chosen = Target(tree, as_selection(wrt), purpose=purpose)
        chosen.refuse_elements(name)
        for i in chosen.plan.indices:
            if i in found:
                raise overlap(chosen.path(i), found[i], key)
            found[i] = key
    return found
