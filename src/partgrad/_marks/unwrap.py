"""Remove the wrappers from a tree."""

from typing import TypeVar, cast

from .._trees import flatten
from .nondiff import NonDiff
from .static import Static

T = TypeVar("T")


def unwrap(tree: T) -> T:
    """Replace every `NonDiff` and `Static` wrapper in a tree with its value.

    Fields of a `partgrad.dataclass` already store plain values; their marks stay. A value that was in a wrapper is no
    longer marked, so derivatives of the result include it.

    Args:
        tree: Any pytree.

    Returns:
        The same tree without wrapper nodes.

    Example:
        >>> import partgrad as pg
        >>> pg.unwrap({"a": pg.NonDiff(2.0), "n": pg.Static(3)})
        {'a': 2.0, 'n': 3}
    """
    is_wrapper = lambda node: isinstance(node, NonDiff | Static)
    nodes, treedef = flatten(tree, is_wrapper)
    return cast(T, treedef.unflatten([unwrap(node.value) if is_wrapper(node) else node for node in nodes]))
