"""Change the marks of a tree: the basis of `freeze`, `thaw`, and of naming a leaf of a held part.

The leaves stay the same objects in the same order. Exactly what was named is marked, as a whole:

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

from .._trees import is_differentiable, too_deep
from .cover import Cover, KeyPath
from .fields import MARKS, children_of, rebuild, schema_of
from .foreign import is_foreign_mark, is_wrapper_class
from .layout import Layout, Place, flatten_one_level
from .nondiff import NonDiff, cover_of, covering
from .opening import closed, is_open, open_leaves, with_open_marks, without_marks
from .static import Static

# The mark of a place: none, one that holds everything (None), or one that holds a part (a Cover).
_FREE: Any = object()


def remarked(tree: Any, leaves: Collection[int], held: bool, nodes: Collection[Place] = ()) -> Any:
    """The structure of a tree in which some leaves are held from now on, or no longer.

    The given nodes are marked whole; all of their leaves are among the leaves. Where a node was marked
    and is held only in part from now on, its mark is passed down to the rest. A mark that is open stays open, unless it
    is changed.
    """
    values, treedef = jax.tree.flatten(tree)
    changed = frozenset(leaves)
    if not changed:
        return treedef
    if is_open(treedef) or any(isinstance(value, jax.core.Tracer) for value in values):
        # Marks that are tried out here stop no gradients, and an open mark counts as a mark.
        tree = closed(treedef).unflatten(map(_placeholder, values))
    layout = Layout(tree, treedef)
    after = [held if place.start in changed else place.is_held for place in layout.leaves]
    named = frozenset((place.depth, place.start, place.stop) for place in nodes)
    visitor = _Visitor(layout, changed, after, list(map(is_differentiable, values)), named)
    try:
        new = jax.tree.structure(_realized(*visitor.visit(layout.root, _FREE, False, False, False)))
    except (RecursionError, SystemError) as error:
        raise too_deep(tree) from error
    if is_open(treedef):
        old, layout = (Layout(each.unflatten(range(each.num_leaves))) for each in (treedef, new))
        for number, level in open_leaves(old).items():
            if number not in changed:
                new = with_open_marks(new, layout, [number], level)
    return new


def _placeholder(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer) and is_differentiable(leaf):
        # A single zero, broadcast: a traced leaf may be larger than the memory of this machine.
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


class _Visitor:
    """Walks the places of a tree.

    Args:
        layout: The places.
        changed: The leaves whose marks change.
        after: For each leaf, whether it is held in the end.
        differentiable: For each leaf, whether it can be differentiated.
        named: The nodes that are marked whole: their depth, and the range of their leaves.
    """

    def __init__(
        self,
        layout: Layout,
        changed: frozenset[int],
        after: list[bool],
        differentiable: list[bool],
        named: frozenset[tuple[int, int, int]],
    ):
        self._layout, self._changed, self._after = layout, changed, after
        self._differentiable, self._named = differentiable, named

    def visit(self, place: Place, mark: Any, passed: bool, in_module: bool, is_named: bool) -> tuple[Any, Any]:
        """Remark a node or leaf.

        Args:
            place: Where it is.
            mark: The mark of its place now.
            passed: Whether a mark above, which covered it, is passed down.
            in_module: Whether it is in plain containers that belong to a module.
            is_named: Whether it is in a node that is marked whole.

        Returns:
            The node with other marks inside it, and the mark of its place.
        """
        node, numbers = place.value, place.numbers
        if not passed and self._changed.isdisjoint(numbers):
            return node, mark
        is_named = is_named or (place.depth, place.start, place.stop) in self._named
        if isinstance(node, NonDiff):
            if cover_of(node) is None and all(self._after[i] for i in numbers):
                return node, mark
            inner = cover_of(node) if mark is _FREE else mark
            return self.visit(self._layout.children(place)[0], inner, passed, in_module, is_named)
        if isinstance(node, Static):
            return node, _FREE
        if is_foreign_mark(node):
            if not is_wrapper_class(type(node)):
                # Its class holds it, whatever is marked around it.
                return node, _FREE
            if all(self._after[i] for i in numbers):
                return node, mark
            return self.visit(self._layout.children(place)[0], None, False, in_module, is_named)
        if place.is_leaf:
            return node, self._mark_of_leaf(place.start, mark, passed)
        counted = [i for i in numbers if self._differentiable[i]]
        is_whole = bool(counted) and all(self._after[i] for i in counted)
        if mark is None and (is_whole or self._changed.isdisjoint(numbers)):
            return node, None
        owned = in_module and _is_plain(node)
        if is_whole and (is_named or passed) and not owned:
            return _bare(node), None
        if schema_of(node) is not None:
            return self._dataclass(place, passed or mark is not _FREE, is_named), _FREE
        return self._foreign(place, passed or mark is None, in_module, is_named)

    def _mark_of_leaf(self, number: int, mark: Any, passed: bool) -> Any:
        if number in self._changed:
            return None if self._after[number] else _FREE
        if mark is _FREE and passed and self._after[number] and self._differentiable[number]:
            return None
        return mark

    def _dataclass(self, place: Place, passed: bool, is_named: bool) -> Any:
        marks = getattr(place.value, MARKS)
        fields: dict[str, Any] = {}
        children = []
        for (name, child), below in zip(children_of(place.value), self._layout.children(place), strict=True):
            mark = marks.cover(name) if name in marks.nondiff else _FREE
            child, mark = self.visit(below, mark, passed, False, is_named)
            if isinstance(child, NonDiff) and mark is _FREE:
                # A wrapper in a field is the field's mark.
                child, mark = child.value, cover_of(child)
            fields[name] = mark
            children.append(child)
        return _with_fields(place.value, fields, children)

    def _foreign(self, place: Place, passed: bool, in_module: bool, is_named: bool) -> tuple[Any, Any]:
        is_plain = _is_plain(place.value)
        inside = in_module or not is_plain
        children, paths = [], set[KeyPath]()
        for below in self._layout.children(place):
            # A mark that holds only a part passes nothing down to the rest.
            is_covered = passed or below.mark == below.depth or bool(below.below)
            new, mark = self.visit(below, _FREE, is_covered, inside, is_named)
            if inside and mark is not _FREE and _is_owned(new):
                paths |= {(below.step,)} if mark is None else {(below.step, *path) for path in mark.held}
            else:
                new = _realized(new, mark)
            children.append(new)
        rebuilt = flatten_one_level(place.value)[1].unflatten(children)
        if not is_plain and _wrappers(rebuilt) != _wrappers(children):
            # Its class unwraps what it is given, so its own mark says everything that is held inside.
            rebuilt = _bare(place.value)
            keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(rebuilt)[0]]
            paths = {path for number, path in enumerate(keys, place.start) if self._is_held(number)}
        if not paths:
            return rebuilt, _FREE
        cover, keyed = Cover(frozenset(paths)), jax.tree_util.tree_flatten_with_path(rebuilt)[0]
        holds_all = all(cover.holds(path) or not is_differentiable(leaf) for path, leaf in keyed)
        return rebuilt, None if holds_all and not is_plain else cover

    def _is_held(self, number: int) -> bool:
        return self._after[number] and (self._differentiable[number] or number in self._changed)


def _realized(node: Any, mark: Any) -> Any:
    """A node with the mark of its place, if there is no field to mark."""
    if mark is _FREE:
        return node
    if schema_of(node) is None:
        return covering(node, mark)
    nondiff, children = getattr(node, MARKS).nondiff, children_of(node)
    holds = lambda name, child: name in nondiff or any(map(is_differentiable, jax.tree.leaves(child)))
    fields = {name: None if holds(name, child) else _FREE for name, child in children}
    return _with_fields(node, fields, [child for _, child in children])


def _is_plain(node: Any) -> bool:
    """Whether a node is a container without behaviour of its own."""
    return isinstance(node, dict | list | tuple | Mapping)


def _is_owned(node: Any) -> bool:
    """Whether a child of a module belongs to it: a leaf, or a plain container."""
    return _is_plain(node) or not jax.tree_util.is_tree_node(type(node))


def _with_fields(node: Any, fields: dict[str, Any], children: list[Any]) -> Any:
    """An instance with other children, whose fields have these marks."""
    schema: Any = schema_of(node)
    nondiff = tuple(name for name, mark in fields.items() if mark is not _FREE)
    covers = tuple((name, mark) for name, mark in fields.items() if isinstance(mark, Cover))
    return rebuild(schema, schema.marks(nondiff, getattr(node, MARKS).static, covers), children)


def _bare(node: Any) -> Any:
    """A node that is about to be marked as a whole, without the marks inside it that no class declares."""
    leaves, treedef = jax.tree.flatten(node)
    return without_marks(treedef, declared=True).unflatten(leaves)


def _wrappers(tree: Any) -> list[tuple[bool, int]]:
    """The leaves of a tree and how they are wrapped, to check whether a class kept what it was given."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, NonDiff))
    return [(isinstance(node, NonDiff), len(jax.tree.leaves(node))) for node in nodes]
