"""Slots: what a selector callable sees in the place of a leaf."""

from typing import Any, NoReturn

import jax

from . import errors
from ._layout import Layout
from ._leaf import dtype_of, shape_of


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
            raise errors.computed_on_slot(self.path, f"it reads `.{name}`")
        raise AttributeError(f"the leaf `{self.path}` has no attribute {name!r}", name=name, obj=None)

    def __repr__(self) -> str:
        return f"<slot {self.path}>"

    __hash__ = object.__hash__


def _refuse(operation: str) -> Any:
    def method(self: Slot, *args: Any, **kwargs: Any) -> NoReturn:
        raise errors.computed_on_slot(self.path, operation)

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


class SlotTree:
    """A tree with a slot in the place of every leaf.

    Args:
        leaves: The leaves of the tree.
        treedef: Its structure.

    Attributes:
        tree: The tree of slots.
        layout: The layout of that tree.
    """

    def __init__(self, leaves: list[Any], treedef: Any):
        self._slots = [Slot(self, number, leaf) for number, leaf in enumerate(leaves)]
        self.tree: Any = treedef.unflatten(self._slots)
        self.layout = Layout(self.tree)
        self._nodes = {}
        for place in reversed(self.layout.places):
            if not place.is_leaf:
                self._nodes[id(place.value)] = self._nodes[id(place.alias)] = place

    def find(self, value: Any) -> Any:
        """The place of a slot or of a node of this tree (of what a wrapper holds, for a wrapper), else None."""
        if isinstance(value, Slot):
            return self.layout.leaves[value._number] if value._owner is self else None
        if value is None or (type(value) is tuple and not value):
            return None
        place = self._nodes.get(id(value))
        if place is not None and place.is_wrapper:
            return self.layout.places[self.layout.places.index(place) + 1]
        return place

    def looked(self) -> list[int]:
        """The numbers of the leaves whose shape or dtype was read."""
        return [slot._number for slot in self._slots if slot._looked]
