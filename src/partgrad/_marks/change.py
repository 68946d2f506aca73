"""Other marks on the same tree: what `freeze`, `thaw` and an explicitly named leaf come down to.

The leaves stay the same objects in the same order. A mark goes to the field of a partgrad dataclass, where the paths of
JAX do not change; in any other container, to a `NonDiff` around the largest node all of whose leaves are held.
"""

from collections.abc import Callable
from typing import Any

import jax

from .._message import word
from .._trees import is_differentiable
from ..errors import DataclassError
from .fields import MARKS, children_of, rebuild, schema_of
from .layout import flatten_one_level
from .nondiff import NonDiff
from .static import Static

Held = Callable[[int], bool | None]


def remark(tree: Any, held: Held) -> Any:
    """Rebuild a tree with other marks.

    Args:
        tree: Any pytree.
        held: For the number of a leaf, whether it shall be held from now on; None leaves it as it is.

    Returns:
        The tree. A node that was marked and shall be held only in part passes its mark down to the rest.
    """
    node, whole = _Visitor(held).visit(tree, False, False)
    return _marked(node) if whole else node


class _Visitor:
    """Walks a tree once, counting leaves."""

    def __init__(self, held: Held):
        self._held = held
        self._next = 0

    def visit(self, node: Any, own: bool, inherited: bool) -> tuple[Any, bool]:
        """Remark a node.

        Args:
            node: The node or leaf.
            own: Whether its place is marked now.
            inherited: Whether a mark above, which had to be opened, covered it.

        Returns:
            The node with the marks inside it as they shall be, and whether its place shall be marked.
        """
        if isinstance(node, NonDiff):
            return self.visit(node.value, True, inherited)
        if isinstance(node, Static):
            # Its arrays are held by themselves.
            self._next += node.data.arrays
            return node, own
        leaves = jax.tree.leaves(node)
        wanted = [self._held(i) for i in range(self._next, self._next + len(leaves))]
        marked = own or inherited
        if all(w or (w is None and (marked or not is_differentiable(x))) for w, x in zip(wanted, leaves, strict=True)):
            self._next += len(leaves)
            return node, own or any(wanted) or (inherited and any(map(is_differentiable, leaves)))
        if not jax.tree_util.is_tree_node(type(node)):
            self._next += 1
            return node, False
        return (self._open_foreign(node, marked) if schema_of(node) is None else self._open(node, marked)), False

    def _open_foreign(self, node: Any, marked: bool) -> Any:
        keyed, structure = flatten_one_level(node)
        visited = [self.visit(child, False, marked) for _, child in keyed]
        for mark in (_marked, _marked_leaves):
            children = [mark(child) if whole else child for child, whole in visited]
            rebuilt = structure.unflatten(children)
            if _leaves_and_marks(rebuilt) == _leaves_and_marks(children):
                return rebuilt
        name = type(node).__name__
        raise DataclassError(
            word(
                f"`{name}` takes NonDiff wrappers apart when JAX builds it, so its leaves cannot be marked.",
                "Expected a class that stores what it is given.",
                fix=f"leave them out by wrt=..., or make `{name}` a partgrad.dataclass, whose fields can be marked.",
            )
        )

    def _open(self, node: Any, marked: bool) -> Any:
        schema, marks = schema_of(node), getattr(node, MARKS)
        assert schema is not None
        nondiff, children = [], []
        for name, child, data in children_of(node):
            if data is not None:
                self._next += data.arrays
                children.append(child)
                continue
            child, whole = self.visit(child, name in marks.nondiff, marked)
            children.append(child)
            if whole:
                nondiff.append(name)
        return rebuild(schema, schema.marks(tuple(nondiff), marks.static), children)


def _marked(node: Any) -> Any:
    """Hold all of a node; a partgrad dataclass by its fields, so that its class and paths stay."""
    schema = schema_of(node)
    if schema is None:
        return NonDiff(node)
    marks = getattr(node, MARKS)
    nondiff, children = [], []
    for name, child, data in children_of(node):
        children.append(child)
        if data is None and (name in marks.nondiff or any(map(is_differentiable, jax.tree.leaves(child)))):
            nondiff.append(name)
    return rebuild(schema, schema.marks(tuple(nondiff), marks.static), children)


def _marked_leaves(node: Any) -> Any:
    """Hold all of a node leaf by leaf, for a class that takes the containers in it apart."""
    return jax.tree.map(lambda leaf: NonDiff(leaf) if is_differentiable(leaf) else leaf, node)


def _leaves_and_marks(tree: Any) -> list[tuple[bool, tuple[int, ...]]]:
    """The leaves of a tree by identity and how they are wrapped, to see whether a class kept what it was given."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, NonDiff))
    return [(isinstance(node, NonDiff), tuple(map(id, jax.tree.leaves(node)))) for node in nodes]
