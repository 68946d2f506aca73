"""A tree as places: every node and leaf with its path, the numbers of its leaves and the marks above it.

Leaves are numbered as by `jax.tree.flatten`. `NonDiff` and `Static` wrappers are places, but take no step in a path.
"""

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from .._compat import cached_property
from .._trees import paths
from ..errors import DataclassError
from .cover import Cover, KeyPath
from .fields import MARKS, Marks, children_of, schema_of
from .foreign import is_foreign_mark, is_wrapper_class
from .nondiff import NonDiff, cover_of
from .static import Static

_VALUE = GetAttrKey("value")
_WRAPPERS = (NonDiff, Static)
_NOTHING: frozenset[KeyPath] = frozenset()
_without_marks: set[type] = set()


class Place:
    """A node or a leaf of a tree.

    Attributes:
        value: The node or leaf.
        treedef: The treedef of a node, until its children are known.
        parent: The place above, or None at the root.
        step: The key entry that leads here, or None for the root and for what a wrapper holds.
        below: If marks above hold only part of their value, the key paths from here to what they hold.
        number: Which child of its parent it is.
        depth: How many places are above.
        mark: The depth of the lowest marked place from the root down to here, or -1.
        foreign_mark: The lowest place above whose class holds its contents and cannot be taken off, or None.
        start, stop: The range of its leaves.
        is_leaf: Whether it is a leaf.
    """

    __slots__ = (
        *("_text", "below", "depth", "foreign_mark", "is_leaf", "mark", "number"),
        *("parent", "start", "step", "stop", "treedef", "value"),
    )

    def __init__(
        self,
        value: Any,
        treedef: Any,
        parent: "Place | None" = None,
        step: Any = None,
        mark: "bool | Cover" = False,
        number: int = 0,
        start: int = 0,
    ):
        self.value = value
        self.parent = parent
        self.step = step
        self.number = number
        self.start, self.stop = start, start + treedef.num_leaves
        self.is_leaf: bool = treedef.num_nodes == 1 == treedef.num_leaves
        self.treedef = None if self.is_leaf else treedef
        self._text: str | None = None
        self.below: frozenset[KeyPath] = _NOTHING
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.mark: int = -1 if parent is None else parent.mark
        self.foreign_mark: Place | None = None if parent is None else parent.foreign_mark
        if mark and parent is not None and is_foreign_mark(parent.value) and not is_wrapper_class(type(parent.value)):
            self.foreign_mark = parent
        if parent is not None and (mark or parent.below):
            self._set_mark(mark, parent)

    def _set_mark(self, mark: "bool | Cover", parent: "Place") -> None:
        self.below = frozenset(path[1:] for path in parent.below if path[0] == self.key)
        if isinstance(mark, Cover):
            self.below |= mark.held or _NOTHING
            mark = mark.held is None
        if () in self.below:
            mark, self.below = True, _NOTHING
        if mark:
            self.mark = self.depth

    @property
    def key(self) -> Any:
        """The key entry that leads here in JAX's key path, in which a wrapper takes a step."""
        return _VALUE if self.step is None else self.step

    @property
    def _line(self) -> "list[Place]":
        """The places from below the root to here."""
        line, place = [], self
        while place.parent is not None:
            line.append(place)
            place = place.parent
        return line[::-1]

    @property
    def steps(self) -> list[Any]:
        """The key entries from the root to here."""
        return [place.step for place in self._line if place.step is not None]

    @property
    def route(self) -> tuple[int, ...]:
        """The numbers of the children from the root to here, in the structure of the tree."""
        return tuple(place.number for place in self._line)

    @property
    def path(self) -> str:
        """The path from the root to here, as text."""
        parent = self.parent
        if parent is None:
            return ""
        if parent._text is None:
            # Kept, because leaves are many and their nodes few.
            parent._text = paths.write(parent.steps)
        own = "" if self.step is None else paths.write_step(self.step)
        return parent._text + own if parent._text else own.removeprefix(".")

    @property
    def above(self) -> "Iterator[Place]":
        """The places above, from the parent up to the root."""
        place = self.parent
        while place is not None:
            yield place
            place = place.parent

    @property
    def numbers(self) -> range:
        """The numbers of its leaves."""
        return range(self.start, self.stop)

    @property
    def is_held(self) -> bool:
        """Whether a mark at this place or above holds all of it."""
        return self.mark >= 0

    @property
    def is_released(self) -> bool:
        """Whether a class above declares a mark for it that `Diff` or `thaw` took off."""
        place = self
        while place.parent is not None:
            node = place.parent.value
            schema, name = schema_of(node), getattr(place.step, "name", None)
            if schema is not None and name in schema.declared and name not in getattr(node, MARKS).nondiff:
                return True
            place = place.parent
        return False

    @property
    def is_wrapper(self) -> bool:
        """Whether it is a `NonDiff` or `Static` wrapper."""
        return isinstance(self.value, _WRAPPERS)


class Layout:
    """The places of a tree; those in a node are made when they are asked for.

    Args:
        tree: Any pytree.
        treedef: Its treedef, where that is known.

    Attributes:
        root: The place of the tree itself.
    """

    def __init__(self, tree: Any, treedef: Any = None):
        self.root = Place(tree, jax.tree.structure(tree) if treedef is None else treedef)
        # Not kept in the places: every layout would be a reference cycle, which keeps its leaves alive for a while.
        self._children: dict[Place, list[Place]] = {}
        self._asking: set[int] = set()

    @property
    def is_asking(self) -> bool:
        """Whether a node is being flattened in this thread, so that its children have no paths yet."""
        return threading.get_ident() in self._asking

    def children(self, place: Place) -> list[Place]:
        """The places right below one."""
        # Read first: another thread that makes the children drops the structure at the end.
        treedef = place.treedef
        found = self._children.get(place)
        if found is None and treedef is not None:
            found, start = [], place.start
            thread = threading.get_ident()
            self._asking.add(thread)
            try:
                entries = zip(treedef.children(), *_children(place.value), strict=False)
            finally:
                self._asking.discard(thread)
            for number, (own, step, value, mark) in enumerate(entries):
                found.append(Place(value, own, place, step, mark, number, start))
                start = found[-1].stop
            found = self._children.setdefault(place, found)
            place.treedef = None
        return found or []

    def inside(self, place: Place) -> Place:
        """What is in the wrappers at a place, if they hold something: a wrapper takes no step in a path."""
        while place.is_wrapper and (below := self.children(place)):
            (place,) = below
        return place

    def within(self, place: Place) -> Iterator[Place]:
        """A place and all places below it, each node before its contents."""
        pending = [place]
        while pending:
            place = pending.pop()
            yield place
            pending += reversed(self.children(place))

    @cached_property
    def places(self) -> list[Place]:
        """All nodes and leaves, each node before its contents."""
        return list(self.within(self.root))

    @cached_property
    def leaves(self) -> list[Place]:
        """All leaves, by number."""
        return [place for place in self.places if place.is_leaf]


_Children: TypeAlias = tuple[Iterable[Any], Iterable[Any], Iterable[bool | Cover]]
_UNMARKED = itertools.repeat(False)


def _children(node: Any) -> _Children:
    """The steps to the children of a node, the children, and their marks."""
    kind = type(node)
    # A large tree is mostly plain containers, and JAX takes longer for one level of one than for the tree.
    if kind is dict:
        keys = sorted(node)
        return map(DictKey, keys), map(node.__getitem__, keys), _UNMARKED
    if kind is list or kind is tuple:
        return map(SequenceKey, itertools.count()), node, _UNMARKED
    schema = schema_of(node)
    if schema is not None:
        marks, is_held = getattr(node, MARKS), is_foreign_mark(node)
        if marks.regular and not marks.nondiff:
            children = [getattr(node, name) for name in schema.dynamic]
            return schema.keys, children, itertools.repeat(True) if is_held else _UNMARKED
        fields = children_of(node)
        held = [is_held or _mark(marks, name) for name, _ in fields]
        return [GetAttrKey(name) for name, _ in fields], [child for _, child in fields], held
    if isinstance(node, NonDiff):
        return [None], [node.value], [cover_of(node) or True]
    if isinstance(node, Static):
        return [], [], []
    _refuse_ignored_marks(kind)
    keyed, _ = flatten_one_level(node)
    return [step for step, _ in keyed], [child for _, child in keyed], itertools.repeat(is_foreign_mark(node))


def _refuse_ignored_marks(cls: type) -> None:
    """Raise if a class that is not a partgrad dataclass declares a mark, which would be ignored."""
    if cls in _without_marks:
        return
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.metadata.get("nondiff", False):
            name = f"{cls.__name__}.{field.name}"
            raise DataclassError(
                f"`{name}` is declared by partgrad.field(nondiff=True), but `{cls.__name__}` is not a "
                "partgrad.dataclass, so nothing would hold it.",
                "Expected a class decorated by @partgrad.dataclass.",
                fix=f"decorate it so, or hold the leaf of an instance: partgrad.freeze(model, {field.name!r}).",
            )
    _without_marks.add(cls)


def _mark(marks: Marks, name: str) -> bool | Cover:
    return name in marks.nondiff and (marks.cover(name) or True)


def flatten_one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their key entries, and the structure that rebuilds it from them."""
    # In JAX 0.10.2, `jax.tree_util.flatten_one_level_with_keys` gives all fields of a NamedTuple the same key.
    keyed, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    return [(path[0], child) for path, child in keyed], treedef


def first_difference(first: Any, second: Any) -> tuple[str, str, str]:
    """Where two structures first differ: the path, and what the first and the second have there."""
    for one, other in itertools.zip_longest(Layout(first).places, Layout(second).places):
        if one is None or other is None or one.path != other.path:
            expected, found = ("nothing" if place is None else f"`{place.path}`" for place in (one, other))
            return (one or other).path, expected, found
        expected, found = _describe_node(one.value), _describe_node(other.value)
        if expected != found:
            return one.path, expected, found
        if type(one.value) is not type(other.value) and not one.is_leaf:
            return one.path, expected, f"another class {found}: it was defined anew after one of the two was built"
    return "", f"{jax.tree.structure(first)}", f"{jax.tree.structure(second)}"


def _describe_node(node: Any) -> str:
    if node is None:
        return "None"
    if not jax.tree_util.is_tree_node(type(node)):
        return "a leaf"
    marks = getattr(node, MARKS, None)
    return f"{type(node).__name__}" + (f" with the marks [{marks!r}]" if marks is not None else "")
