"""Slots: what a selector callable sees in the place of a leaf."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from .. import _words as words
from .._marks import Layout, Place, flatten_one_level, schema_of
from .._trees import dtype_of, positions, shape_of


class Slot:
    """Stands for one leaf while a selector runs: it knows path, shape and dtype, and refuses to compute."""

    __slots__ = ("_leaf", "_looked", "_number", "_owner")

    def __init__(self, owner: "SlotTree", number: int, leaf: Any):
        self._owner = owner
        self._number = number
        self._leaf = leaf
        self._looked = False

    @property
    def path(self) -> str:
        """The key path of the leaf, as text."""
        return self._owner.layout.leaves[self._number].path

    def _look(self) -> Any:
        self._looked = True
        return self._leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return shape_of(self._look())

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf."""
        return dtype_of(self._look())

    @property
    def ndim(self) -> int:
        """The number of dimensions of the leaf."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(jax.Array, name):
            raise words.computed_on_slot(self.path, f"it reads `.{name}`")
        raise AttributeError(f"the leaf `{self.path}` has no attribute {name!r}", name=name, obj=None)

    def __getitem__(self, index: Any) -> "ElementSlot":
        if isinstance(index, str):
            raise KeyError(index)
        try:
            shape = self.shape
        except AttributeError:
            raise TypeError(f"the leaf `{self.path}` has no elements") from None
        if not shape:
            raise TypeError(f"the leaf `{self.path}` is a single number, which has no elements")
        try:
            return ElementSlot(self, positions(shape, index))
        except IndexError as error:
            raise words.element_out_of_range(self.path, index, shape) from error

    def __repr__(self) -> str:
        return f"<slot {self.path}>"

    __hash__ = object.__hash__


class ElementSlot(Slot):
    """Stands for some elements of a leaf."""

    __slots__ = ("_elements",)

    def __init__(self, slot: Slot, elements: np.ndarray):
        super().__init__(slot._owner, slot._number, slot._leaf)
        self._elements = elements

    @property
    def elements(self) -> np.ndarray:
        """Their positions in the flattened leaf."""
        return self._elements

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return self._elements.shape

    def __getitem__(self, index: Any) -> "ElementSlot":
        try:
            return ElementSlot(self, np.asarray(self._elements[index]))
        except IndexError as error:
            raise words.element_out_of_range(self.path, index, self.shape) from error


def _refuse(operation: str) -> Any:
    def method(self: Slot, *args: Any, **kwargs: Any) -> NoReturn:
        raise words.computed_on_slot(self.path, operation)

    return method


for _name, _symbol in {
    **{"add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "divmod": "divmod"},
}.items():
    setattr(Slot, f"__{_name}__", _refuse(f"it uses `{_symbol}`"))
    setattr(Slot, f"__r{_name}__", _refuse(f"it uses `{_symbol}`"))
for _name, _symbol in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    setattr(Slot, f"__{_name}__", _refuse(f"it compares with `{_symbol}`"))
for _name in ("neg", "pos", "abs", "invert", "round", "float", "int", "complex", "index", "trunc", "floor", "ceil"):
    setattr(Slot, f"__{_name}__", _refuse(f"it calls `{_name}`"))
for _name, _words in {
    **{"iter": "it iterates it", "contains": "it uses `in`", "bool": "it asks whether it is true"},
    **{"len": "it calls `len`", "call": "it calls it", "array": "it converts it to an array"},
}.items():
    setattr(Slot, f"__{_name}__", _refuse(_words))


class Pick(NamedTuple):
    """Some elements of the leaf at a place."""

    place: Place
    elements: np.ndarray


class SlotTree:
    """A tree with a slot in the place of every leaf.

    Args:
        tree: The tree.
        leaves: Its leaves.
        treedef: Its structure.

    Attributes:
        tree: The tree of slots.
        layout: The layout of that tree.
    """

    def __init__(self, tree: Any, leaves: list[Any], treedef: Any):
        # Before there are slots: a class's constructor may ask one for its path.
        self.layout = Layout(tree)
        self._slots = [Slot(self, number, leaf) for number, leaf in enumerate(leaves)]
        self.tree: Any = self._build(tree, treedef)
        self.layout = Layout(self.tree)
        self._nodes = {}
        for place in reversed(self.layout.places):
            if not place.is_leaf:
                self._nodes[id(place.value)] = place
                if place.stop > place.start:
                    self._nodes[id(place.alias)] = place

    def _build(self, tree: Any, treedef: Any) -> Any:
        try:
            built = treedef.unflatten(self._slots)
            if all(map(operator.is_, jax.tree.leaves(built), self._slots)):
                return built
        except Exception:
            # A constructor that checks or converts its arguments, which slots do not survive.
            pass
        return _with_leaves(tree, iter(self._slots))

    def find(self, value: Any) -> "Place | Pick | None":
        """The place of a slot or of a node of this tree (of what a wrapper holds, for a wrapper), else None."""
        if isinstance(value, ElementSlot):
            return Pick(self.layout.leaves[value._number], value.elements) if value._owner is self else None
        if isinstance(value, Slot):
            return self.layout.leaves[value._number] if value._owner is self else None
        if value is None or (type(value) is tuple and not value):
            return None
        place = self._nodes.get(id(value)) or self._find_copy(value)
        while place is not None and place.is_wrapper:
            below = self._nodes.get(id(place.value.value))
            place = below or self.layout.leaves[place.start]
        return place

    def _find_copy(self, node: Any) -> Place | None:
        """The node that this one is a copy of, as of classes that build what they hold anew on every access."""
        if isinstance(node, tuple) or type(node) in (list, dict) or not jax.tree_util.is_tree_node(type(node)):
            return None
        leaves = jax.tree.leaves(node)
        if not leaves or not all(isinstance(leaf, Slot) and leaf._owner is self for leaf in leaves):
            return None
        numbers = [leaf._number for leaf in leaves]
        same = [p for p in self.layout.places if numbers == list(range(p.start, p.stop)) and _is_copy(node, p.value)]
        return same[-1] if same else None

    def slot(self, number: int) -> Slot:
        """The slot of a leaf."""
        return self._slots[number]

    def looked(self) -> list[int]:
        """The numbers of the leaves whose shape or dtype was read."""
        return [slot._number for slot in self._slots if slot._looked]

    def release(self) -> None:
        """Let the leaves go: slots and their tree refer to each other, and would keep them until a collection."""
        for slot in self._slots:
            slot._leaf = None
        self.layout = Layout(())


def _is_copy(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # A mapping may hand out what is in it as its own kind.
        first, second = (jax.tree_util.tree_leaves_with_path(node) for node in (one, other))
        return [path for path, _ in first] == [path for path, _ in second]
    return bool(jax.tree.structure(one) == jax.tree.structure(other))


def _with_leaves(node: Any, leaves: Iterator[Any]) -> Any:
    """A tree with other leaves, built without running constructors wherever a node keeps its children as attributes."""
    if not jax.tree_util.is_tree_node(type(node)):
        return next(leaves)
    children, structure = flatten_one_level(node)
    rebuilt = [_with_leaves(child, leaves) for _, child in children]
    names = [step.name if isinstance(step, jax.tree_util.GetAttrKey) else None for step, _ in children]
    if schema_of(node) is not None or not set(names) <= set(getattr(node, "__dict__", ())):
        return structure.unflatten(rebuilt)
    new = object.__new__(type(node))
    new.__dict__.update(node.__dict__)
    new.__dict__.update(zip(names, rebuilt, strict=True))
    return new
