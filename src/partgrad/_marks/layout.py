"""A tree laid out: every node and leaf with its path, its leaves' numbers and the marks above it.

Leaves are numbered as `jax.tree.flatten` numbers them. `NonDiff` and `Static` wrappers are places, but take no step in
a path.
"""

import dataclasses
import itertools
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from .._message import word
from .._trees import paths
from ..errors import DataclassError
from .cover import Cover, KeyPath
from .fields import MARKS, Marks, children_of, schema_of
from .foreign import is_foreign_mark
from .nondiff import NonDiff, cover_of
from .static import Static

_VALUE = GetAttrKey("value")
_NOTHING: frozenset[KeyPath] = frozenset()
_without_marks: set[type] = set()


class Place:
    """A node or a leaf of a tree.

    Attributes:
        value: The node or leaf.
        parent: The place above, or None at the root.
        step: The key entry that leads here, or None for the root and for what a wrapper holds.
        below: Where marks above hold only a part of their value, the key paths from here to what they hold.
        number, siblings: Which child of its parent it is, and of how many.
        index, end: The range of places from here to the last one below.
        depth: How many places are above.
        mark: The depth of the lowest marked place from the root down to here, or -1.
        start, stop: The range of its leaves.
        is_leaf: Whether it is a leaf.
    """

    __slots__ = (
        *("_text", "below", "depth", "end", "index", "is_leaf", "mark", "number"),
        *("parent", "siblings", "start", "step", "stop", "value"),
    )

    def __init__(
        self,
        value: Any,
        parent: "Place | None" = None,
        step: Any = None,
        mark: "bool | Cover" = False,
        number: int = 0,
        siblings: int = 1,
    ):
        self.value = value
        self.parent = parent
        self.step = step
        self.number = number
        self.siblings = siblings
        self.is_leaf = False
        self.start = self.stop = self.index = self.end = 0
        self._text: str | None = None
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.below: frozenset[KeyPath] = _NOTHING
        if parent is not None and parent.below:
            self.below = frozenset(path[1:] for path in parent.below if path[0] == self.key)
        if isinstance(mark, Cover):
            self.below |= mark.held or _NOTHING
            mark = mark.held is None
        if () in self.below:
            mark, self.below = True, _NOTHING
        self.mark: int = self.depth if mark else -1 if parent is None else parent.mark

    @property
    def key(self) -> Any:
        """The key entry that leads here in JAX's key path, where a wrapper takes a step."""
        return _VALUE if self.step is None else self.step

    @property
    def steps(self) -> list[Any]:
        """The key entries from the root to here."""
        steps, place = [], self
        while place.parent is not None:
            if place.step is not None:
                steps.append(place.step)
            place = place.parent
        return steps[::-1]

    @property
    def route(self) -> tuple[int, ...]:
        """The numbers of the children from the root to here, in the structure of the tree."""
        numbers, place = [], self
        while place.parent is not None:
            numbers.append(place.number)
            place = place.parent
        return tuple(reversed(numbers))

    @property
    def path(self) -> str:
        """The path from the root to here, as text."""
        parent = self.parent
        if parent is None:
            return ""
        if parent._text is None:
            # Kept, for leaves are many and their nodes are few.
            parent._text = paths.write(parent.steps)
        own = "" if self.step is None else paths.write_step(self.step)
        return parent._text + own if parent._text else own.removeprefix(".")

    @property
    def foreign_mark(self) -> "Place | None":
        """The place of another library's mark above, which only `thaw` takes off."""
        above = self.parent
        while above is not None and not is_foreign_mark(above.value):
            above = above.parent
        return above

    @property
    def is_wrapper(self) -> bool:
        """Whether it is a `NonDiff` or `Static` wrapper."""
        return isinstance(self.value, NonDiff | Static)

    @property
    def is_static(self) -> bool:
        """Whether it is in static data."""
        place = self
        while place.parent is not None:
            node = place.parent.value
            if isinstance(node, Static):
                return True
            if schema_of(node) is not None and any(name == place.step.name for name, _ in getattr(node, MARKS).static):
                return True
            place = place.parent
        return False


class Layout:
    """All places of a tree, each node before what is in it.

    Args:
        tree: Any pytree.

    Attributes:
        places: The nodes and leaves.
        leaves: The leaves, by number.
        data: The auxiliary data of its nodes.
    """

    def __init__(self, tree: Any):
        self.places: list[Place] = []
        self.leaves: list[Place] = []
        self.data: list[Any] = []
        pending = [Place(tree)]
        while pending:
            place = pending.pop()
            place.index, place.start = len(self.places), len(self.leaves)
            self.places.append(place)
            children = _children(place.value, self.data)
            if children is None:
                place.is_leaf = True
                self.leaves.append(place)
                continue
            count = len(children)
            below = [Place(value, place, step, mark, n, count) for n, (step, value, mark) in enumerate(children)]
            pending += reversed(below)
        for place in reversed(self.places):
            if not place.end:
                place.end, place.stop = place.index + 1, place.start + place.is_leaf
            if place.parent is not None and not place.parent.end:
                # The last of its children.
                place.parent.end, place.parent.stop = place.end, place.stop

    @property
    def root(self) -> Place:
        """The place of the tree itself."""
        return self.places[0]

    def children(self, place: Place) -> list[Place]:
        """The places right below one."""
        # They are not kept, for then every layout would be a cycle, which holds its leaves for a while.
        found, index = [], place.index + 1
        while index < place.end:
            found.append(self.places[index])
            index = self.places[index].end
        return found

    def paths(self) -> list[str]:
        """The paths of all leaves."""
        return [leaf.path for leaf in self.leaves]


def _children(node: Any, data: list[Any]) -> list[tuple[Any, Any, bool | Cover]] | None:
    """The children of a node, each as step, value and its mark, while its auxiliary data is noted; None for a leaf."""
    kind = type(node)
    # Plain containers make up most of a large tree, and JAX takes longer over one level of one than over the tree.
    if kind is dict:
        keys = sorted(node)
        data += [key for key in keys if key.__class__ is not str]
        return [(DictKey(key), node[key], False) for key in keys]
    if kind is list or kind is tuple:
        return [(SequenceKey(number), child, False) for number, child in enumerate(node)]
    schema = schema_of(node)
    if schema is not None:
        marks = getattr(node, MARKS)
        data += marks.static
        if marks.regular and not marks.nondiff:
            return [(key, getattr(node, key.name), False) for key in schema.keys]
        return [
            (GetAttrKey(name), child, held is not None or _mark(marks, name)) for name, child, held in children_of(node)
        ]
    if not jax.tree_util.is_tree_node(kind):
        return None
    if isinstance(node, NonDiff):
        return [(None, node.value, cover_of(node) or True)]
    if isinstance(node, Static):
        data.append(node.data)
        return [(None, node.data.child(node.value), True)] if node.data.arrays else []
    _refuse_ignored_marks(kind)
    mark, (keyed, structure) = is_foreign_mark(node), flatten_one_level(node)
    data.append(structure.node_data())
    return [(step, child, mark) for step, child in keyed]


def _refuse_ignored_marks(cls: type) -> None:
    """Raise if a class that is not a partgrad dataclass declares a mark, which nothing would look at."""
    if cls in _without_marks:
        return
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.metadata.get("nondiff", False):
            name = f"{cls.__name__}.{field.name}"
            raise DataclassError(
                word(
                    f"`{name}` is declared by partgrad.field(nondiff=True), but `{cls.__name__}` is not a "
                    "partgrad.dataclass, so nothing would hold it.",
                    "Expected a class decorated by @partgrad.dataclass.",
                    fix=f"decorate it so, or hold the leaf of an instance: partgrad.freeze(model, {field.name!r}).",
                )
            )
    _without_marks.add(cls)


def _mark(marks: Marks, name: str) -> bool | Cover:
    return name in marks.nondiff and (marks.cover(name) or True)


def flatten_one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their key entries, and the structure that puts them together again."""
    # jax.tree_util.flatten_one_level_with_keys names all fields of a NamedTuple alike in JAX 0.10.2.
    keyed, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    return [(path[0], child) for path, child in keyed], structure


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
