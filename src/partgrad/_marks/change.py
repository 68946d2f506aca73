"""Other marks on the same tree: what `freeze`, `thaw` and a named leaf of a part come down to.

The leaves stay the same objects in the same order. What was named is marked whole, and nothing more is:

- in a partgrad dataclass the field, where JAX's key paths do not change;
- a leaf of a plain container (dict, list, tuple), or a container that was named, by a `NonDiff` around it;
- leaves of a module (a node with behaviour, as an `eqx.Module`) by a `NonDiff` around the module, whose cover says
  which leaves are held: the module's own methods must find plain arrays.

The result depends on what is marked, not on the order in which it was marked.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from .._trees import is_differentiable
from .cover import Cover, KeyPath
from .fields import MARKS, Schema, children_of, rebuild, schema_of
from .foreign import is_foreign_mark
from .layout import Layout, flatten_one_level
from .nondiff import NonDiff, cover_of, covering
from .opening import closed, is_open, open_leaves, opened, without_marks
from .static import Static

# The mark of a place: none, one that holds everything (None), or one that holds a part (a Cover).
_FREE: Any = object()
Route = tuple[int, ...]


def remarked(tree: Any, leaves: Collection[int], held: bool, nodes: Collection[Route] = ()) -> Any:
    """The structure of a tree in which some leaves are held from now on, or no longer.

    The nodes with the given routes are marked whole; all of their leaves are among the leaves. Where a node was marked
    and is held only in part from now on, its mark is passed down to the rest. A mark that is open stays open, unless it
    is changed.
    """
    values, structure = jax.tree.flatten(tree)
    changed = frozenset(leaves)
    if not changed:
        return structure
    if is_open(structure) or any(isinstance(value, jax.core.Tracer) for value in values):
        # Marks that are tried out here stop nothing, and a mark that is open counts as one.
        tree = closed(structure).unflatten(map(_placeholder, values))
    before = [place.mark >= 0 for place in Layout(tree).leaves]
    after = [held if number in changed else was for number, was in enumerate(before)]
    visitor = _Visitor(changed, after, list(map(is_differentiable, values)), frozenset(nodes))
    new = jax.tree.structure(visitor.realized(*visitor.visit(tree, (), 0, _FREE, False, False), 0))
    if is_open(structure):
        old, layout = (Layout(each.unflatten(range(each.num_leaves))) for each in (structure, new))
        for number, level in open_leaves(old).items():
            if number not in changed:
                new = opened(new, layout, [number], level)
    return new


def _placeholder(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer) and is_differentiable(leaf):
        # One zero, seen as many: a traced leaf may be larger than the memory here.
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


class _Visitor:
    """Walks a tree. A place is its node or leaf, its route, and the number of its first leaf.

    Args:
        changed: The leaves whose marks change.
        after: For each leaf, whether it is held in the end.
        differentiable: For each leaf, whether it can be differentiated.
        named: The routes of the nodes that are marked whole.
    """

    def __init__(self, changed: frozenset[int], after: list[bool], differentiable: list[bool], named: frozenset[Route]):
        self._changed, self._after, self._differentiable, self._named = changed, after, differentiable, named

    def visit(self, node: Any, route: Route, start: int, mark: Any, passed: bool, in_module: bool) -> tuple[Any, Any]:
        """Remark a node.

        Args:
            node: The node or leaf.
            route: Where it is.
            start: The number of its first leaf.
            mark: The mark of its place now.
            passed: Whether a mark above, which covered it, is passed down.
            in_module: Whether it is in plain containers that belong to a module.

        Returns:
            The node with other marks inside it, and the mark of its place.
        """
        numbers = range(start, start + _size(node))
        if not passed and self._changed.isdisjoint(numbers):
            return node, mark
        if isinstance(node, NonDiff):
            if cover_of(node) is None and all(self._after[i] for i in numbers):
                return node, mark
            inner = cover_of(node) if mark is _FREE else mark
            return self.visit(node.value, self._below(route, 0), start, inner, passed, in_module)
        if isinstance(node, Static):
            return node, _FREE
        if is_foreign_mark(node):
            return self._foreign_mark(node, route, start, mark, in_module)
        if not jax.tree_util.is_tree_node(type(node)):
            return node, self._mark_of_leaf(start, mark, passed)
        counted = [i for i in numbers if self._differentiable[i]]
        is_whole = bool(counted) and all(self._after[i] for i in counted)
        if is_whole and mark is None:
            return node, None
        owned = in_module and _is_plain(node)
        if is_whole and (route in self._named or passed) and not owned:
            return _bare(node), None
        passed = passed or mark is not _FREE
        if schema_of(node) is not None:
            return self._dataclass(node, route, start, passed), _FREE
        return self._foreign(node, route, start, passed, in_module)

    def _foreign_mark(self, node: Any, route: Route, start: int, mark: Any, in_module: bool) -> tuple[Any, Any]:
        (_, value), *_ = flatten_one_level(node)[0]
        if all(self._after[start : start + _size(node)]):
            return node, mark
        return self.visit(value, self._below(route, 0), start, None, False, in_module)

    def _below(self, route: Route, number: int) -> Route:
        """The route of a child; a node in what was named counts as named too."""
        below = (*route, number)
        if route in self._named:
            self._named |= {below}
        return below

    def _mark_of_leaf(self, number: int, mark: Any, passed: bool) -> Any:
        if number in self._changed:
            return None if self._after[number] else _FREE
        if mark is _FREE and passed and self._after[number] and self._differentiable[number]:
            return None
        return mark

    def _dataclass(self, node: Any, route: Route, start: int, passed: bool) -> Any:
        schema, marks = schema_of(node), getattr(node, MARKS)
        assert schema is not None
        fields: dict[str, Any] = {}
        children = []
        for number, (name, child, data) in enumerate(children_of(node)):
            size = _size(child)
            if data is None:
                mark = marks.cover(name) if name in marks.nondiff else _FREE
                child, mark = self.visit(child, self._below(route, number), start, mark, passed, False)
                if isinstance(child, NonDiff) and mark is _FREE:
                    # A wrapper in a field is the field's mark.
                    child, mark = child.value, cover_of(child)
                fields[name] = mark
            children.append(child)
            start += size
        return _with_fields(schema, marks, fields, children)

    def _foreign(self, node: Any, route: Route, start: int, passed: bool, in_module: bool) -> tuple[Any, Any]:
        keyed, structure = flatten_one_level(node)
        is_plain, first = _is_plain(node), start
        inside = in_module or not is_plain
        children, paths = [], set[KeyPath]()
        for number, (key, child) in enumerate(keyed):
            size = _size(child)
            new, mark = self.visit(child, self._below(route, number), start, _FREE, passed, inside)
            if inside and mark is not _FREE and _is_owned(new):
                paths |= {(key,)} if mark is None else {(key, *path) for path in mark.held}
            else:
                new = self.realized(new, mark, start)
            children.append(new)
            start += size
        rebuilt = structure.unflatten(children)
        if not is_plain and _wrappers(rebuilt) != _wrappers(children):
            # Its class takes wrappers apart: its own mark says all that is held inside.
            rebuilt = _bare(node)
            keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(rebuilt)[0]]
            paths = {path for number, path in enumerate(keys, first) if self._is_held(number)}
        if not paths:
            return rebuilt, _FREE
        whole = not is_plain and self._holds_all(paths, rebuilt, first)
        return rebuilt, None if whole else Cover(frozenset(paths))

    def _is_held(self, number: int) -> bool:
        return self._after[number] and (self._differentiable[number] or number in self._changed)

    def _holds_all(self, paths: set[KeyPath], node: Any, start: int) -> bool:
        """Whether paths hold every leaf of a node that can be differentiated."""
        cover, keyed = Cover(frozenset(paths)), jax.tree_util.tree_flatten_with_path(node)[0]
        return all(cover.holds(path) or not self._differentiable[i] for i, (path, _) in enumerate(keyed, start))

    def realized(self, node: Any, mark: Any, start: int) -> Any:
        """A node with the mark of its place, where there is no field to mark."""
        if mark is _FREE:
            return node
        schema = schema_of(node)
        if schema is None:
            return covering(node, mark)
        marks, children = getattr(node, MARKS), children_of(node)
        fields: dict[str, Any] = {}
        for name, child, data in children:
            stop = start + _size(child)
            if data is None:
                fields[name] = None if name in marks.nondiff or any(self._differentiable[start:stop]) else _FREE
            start = stop
        return _with_fields(schema, marks, fields, [child for _, child, _ in children])


def _size(node: Any) -> int:
    return len(jax.tree.leaves(node))


def _is_plain(node: Any) -> bool:
    """Whether a node is a container without behaviour of its own."""
    return isinstance(node, dict | list | tuple | Mapping)


def _is_owned(node: Any) -> bool:
    """Whether a child of a module belongs to it: a leaf, or a plain container."""
    return _is_plain(node) or not jax.tree_util.is_tree_node(type(node))


def _with_fields(schema: Schema, marks: Any, fields: dict[str, Any], children: list[Any]) -> Any:
    """An instance whose fields have these marks."""
    nondiff = tuple(name for name, mark in fields.items() if mark is not _FREE)
    covers = tuple((name, mark) for name, mark in fields.items() if isinstance(mark, Cover))
    return rebuild(schema, schema.marks(nondiff, marks.static, covers), children)


def _bare(node: Any) -> Any:
    """A node that is about to be marked whole, without the marks inside it that no class declares."""
    leaves, structure = jax.tree.flatten(node)
    return without_marks(structure, declared=True).unflatten(leaves)


def _wrappers(tree: Any) -> list[tuple[bool, int]]:
    """The leaves of a tree and how they are wrapped, to see whether a class kept what it was given."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, NonDiff))
    return [(isinstance(node, NonDiff), _size(node)) for node in nodes]
