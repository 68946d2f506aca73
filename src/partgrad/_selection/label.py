"""Labels for the leaves of a tree."""

from collections.abc import Hashable, Mapping
from typing import Any

from .._message import at, listed
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
    labels: dict[int, Any] = {}
    target = Target(tree, as_selection(None))
    for name, wrt in groups.items():
        chosen = Target(tree, as_selection(wrt), purpose="edit")
        chosen.refuse_elements("label")
        for i in chosen.plan.indices:
            if i in labels:
                raise SelectionError(
                    f"Two groups select {at(target.skeleton.path(i))}: {labels[i]!r} and {name!r}.",
                    "Expected every leaf in at most one group.",
                    fix="take it out of one of them, as in partgrad.path('layers') - 'layers[1]'.",
                )
            labels[i] = name
    without = [i for i in range(len(target.leaves)) if i not in labels]
    if without and default is _MISSING:
        raise SelectionError(
            f"No group selects {listed(at(target.skeleton.path(i)) for i in without)}.",
            "Expected a label for every leaf, the held ones and those without a derivative too.",
            fix="give the others a label: default=...",
        )
    return target.treedef.unflatten([labels.get(i, default) for i in range(len(target.leaves))])
