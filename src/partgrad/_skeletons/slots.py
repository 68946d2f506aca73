"""Slots: what a selector callable sees in place of a leaf."""

import math
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from .._message import at
from .._trees import Indexed, dtype_of, overlap, positions, shape_of
from ..errors import ElementError, SlotError


class Owner(Protocol):
    """A skeleton, as a slot of it sees it."""

    @property
    def leaves(self) -> Any:
        """The leaves that the slots stand for; None if no selector is running."""

    def path(self, number: int) -> str:
        """The path of a leaf."""


class Slot:
    """Stands for one leaf while a selector runs: it knows path, shape and dtype, and refuses to compute."""

    __slots__ = ("_number", "_owner")

    def __init__(self, owner: Owner, number: int):
        self._owner = owner
        self._number = number

    @property
    def path(self) -> str:
        """The key path of the leaf, as text."""
        return self._owner.path(self._number)

    @property
    def _words(self) -> str:
        return f"the leaf `{self.path}`" if self.path else "the tree, which is one leaf,"

    @property
    def _leaf(self) -> Any:
        leaves = self._owner.leaves
        if leaves is None:
            raise SlotError(
                f"The slot of {at(self.path)} is used after its selector has returned.",
                "A slot stands for a leaf only while the selector runs.",
                fix="ask for shape and dtype inside the selector.",
            )
        return leaves[self._number]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return shape_of(self._leaf)

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf."""
        return dtype_of(self._leaf)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the leaf."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)

    def __getattr__(self, name: str) -> NoReturn:
        # A leaf without shape and dtype, such as a string, has only a path.
        if not name.startswith("_") and name not in ("shape", "dtype", "ndim", "size") and hasattr(jax.Array, name):
            raise computed(self.path, f"it reads `.{name}`")
        raise AttributeError(f"{self._words} has no attribute {name!r}", name=name, obj=None)

    def __getitem__(self, index: Any) -> "ElementSlot":
        if isinstance(index, str):
            raise KeyError(index)
        try:
            shape = self.shape
        except AttributeError:
            raise TypeError(f"{self._words} has no elements") from None
        if not shape:
            raise TypeError(f"{self._words} is a single number, which has no elements")
        if any(isinstance(part, jax.Array) for part in jax.tree.leaves(index)):
            return ElementSlot(self, self._by_arrays(index, shape))
        return ElementSlot(self, self._positions(index, lambda: positions(shape, index), shape))

    def _by_arrays(self, index: Any, shape: tuple[int, ...]) -> "np.ndarray | Indexed":
        """The elements that an index selects which holds arrays of JAX."""
        traced = [part for part in jax.tree.leaves(index) if isinstance(part, jax.core.Tracer)]
        if not traced:
            try:
                found = positions(shape, jax.tree.map(_in_numpy, index))
            except IndexError:
                return Indexed(index, shape)
            # As where it is traced: an element may be there twice, and what is beyond the end is not there.
            return Indexed(index, shape) if overlap([found]) else found
        if any(part.dtype == bool for part in traced):
            raise ElementError(
                f"The selector takes elements of {at(self.path)} by a traced array of bools.",
                "Expected integers: how many elements a traced mask selects is not known.",
                fix="take integers, rows = jax.numpy.nonzero(mask, size=8, fill_value=mask.size)[0], those past the "
                "end counting for nothing, or select the whole leaf and mask its gradient.",
            )
        try:
            return Indexed(index, shape)
        except (IndexError, TypeError) as error:
            raise ElementError(
                f"The selector takes elements of {at(self.path)} by an index that does not fit.",
                f"{str(error).splitlines()[0]:.100}",
                fix=f"index an array of shape {shape} with integers.",
            ) from error

    def _positions(self, index: Any, take: Any, shape: tuple[int, ...]) -> np.ndarray:
        try:
            return np.asarray(take())
        except IndexError as error:
            raise ElementError(
                f"The selector takes element {index!r} of {at(self.path)}, which is out of range.",
                f"Expected an index into shape {shape}.",
                fix="select an element that is there, or the whole leaf.",
            ) from error

    def __repr__(self) -> str:
        return f"<slot {self.path}>"

    __hash__ = object.__hash__


def _in_numpy(part: Any) -> Any:
    return np.asarray(part) if isinstance(part, jax.Array) else part


class ElementSlot(Slot):
    """Stands for some elements of a leaf: their positions in the flattened leaf, or an index with arrays of JAX."""

    __slots__ = ("elements",)

    def __init__(self, slot: Slot, elements: np.ndarray | Indexed):
        super().__init__(slot._owner, slot._number)
        self.elements = elements

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return self.elements.shape

    def __getitem__(self, index: Any) -> "ElementSlot":
        elements = self.elements
        is_traced = any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(index))
        if is_traced or isinstance(elements, Indexed):
            raise ElementError(
                f"The selector takes elements of elements of {at(self.path)}, by arrays of JAX.",
                "Expected one index.",
                fix="write both indices in one pair of brackets: m.table[rows, 0].",
            )
        return ElementSlot(self, self._positions(index, lambda: elements[index], self.shape))


def computed(path: str, operation: str) -> SlotError:
    """The error for a selector that computes on a slot."""
    return SlotError(
        f"The selector computes on {at(path)}: {operation}.",
        "A selector points at parts of the tree; it sees slots (path, shape, dtype), never values.",
        fix="return the part itself, and compute in the function that is differentiated.",
    )


def _refuse(operation: str) -> Any:
    def method(self: Slot, *args: Any, **kwargs: Any) -> NoReturn:
        raise computed(self.path, operation)

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
for _name, _operation in {
    **{"iter": "it iterates it", "contains": "it uses `in`", "bool": "it asks whether it is true"},
    **{"len": "it calls `len`", "call": "it calls it", "array": "it converts it to an array"},
}.items():
    setattr(Slot, f"__{_name}__", _refuse(_operation))


class Seen(Slot):
    """A slot whose class reads as that of its leaf, so that questions about leaves are answered as for the leaf."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the leaf."""
        return type(self._leaf)
