"""Keys of values: two are equal only if no function could tell the two values apart.

`==` alone says less: `1 == True`, `0.0 == -0.0`, and Python ignores the order of a dict, the trailing zeros of a
`Decimal` and what a dataclass declares with `compare=False`. So a value whose class has an `==` of its own is compared
by what it is made of, which is what `copy` and `pickle` take it apart into. Any other object is equal to itself only.
"""

import copyreg
import functools
import struct
import types
from collections.abc import Callable, Iterable
from inspect import getattr_static
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, PyTreeDef, SequenceKey

from .leaf import is_array

C = TypeVar("C", bound=type)
KeyPath = tuple[Any, ...]

_PROTOCOL = 4
_BITS: dict[type, Callable[[Any], bytes]] = {
    float: functools.partial(struct.pack, "d"),
    complex: lambda number: struct.pack("dd", number.real, number.imag),
}
_SEQUENCES = frozenset({tuple, list, set, frozenset})
# Classes that have no hash because they hold other values.
_CONTAINERS = (list, dict, set, slice, np.ndarray)
# Classes whose instances are equal only if they are the same in every respect.
_EXACT: set[type] = {int, bool, str, bytes, type, types.FunctionType, *map(type, (None, ..., NotImplemented))}


def compared_exactly(cls: C) -> C:
    """Declare that instances of a class are equal only if no function could tell them apart."""
    _EXACT.add(cls)
    return cls


class _Same:
    """A value that is equal to itself only; its class is asked nothing."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


Refuse = Callable[[Any, KeyPath], Any]


def exact_key(value: Any, refuse: Refuse = lambda value, _: _Same(value), takes_mutable: bool = True) -> Any:
    """A key that can be hashed and compared, and is equal only to that of a value which is the same throughout.

    Args:
        value: Any value; a treedef is compared with its auxiliary data.
        refuse: What takes the place of a key, given a part of the value and its key path: for an array, and for an
            object that `copy` cannot take apart.
        takes_mutable: Whether objects of classes without a hash are taken apart; else they are refused too.
    """
    return _Keys(refuse, takes_mutable, {}).key(value)


class _Keys:
    """Makes the keys of a value and its parts; `seen` has the objects that were taken apart, by their ids."""

    def __init__(self, refuse: Refuse, takes_mutable: bool, seen: dict[int, tuple[Any, int]]):
        self._refuse = refuse
        self._takes_mutable = takes_mutable
        self._seen = seen

    def key(self, value: Any, path: KeyPath = ()) -> Any:
        """The key of a value that is at a key path."""
        cls = type(value)
        if cls in _EXACT:
            return cls, value
        if cls in _BITS:
            return cls, _BITS[cls](value)
        if cls in _SEQUENCES:
            return cls, self._items(value, path)
        if cls is dict:
            return cls, self._pairs(value.items(), path)
        if isinstance(value, type | types.ModuleType):
            return _Same(value)
        if is_array(value):
            return self._refuse(value, path)
        if cls is PyTreeDef:
            return cls, self._treedef(value, path)
        if cls is types.MethodType:
            return cls, _Same(value.__func__), _Same(value.__self__)
        if not self._takes_mutable and _method(cls, "__hash__") is None and not issubclass(cls, _CONTAINERS):
            return self._refuse(value, path)
        if _is_objects_own(cls, "__eq__") and not jax.tree_util.is_tree_node(cls):
            return _Same(value)
        if id(value) in self._seen:
            # Objects may refer to each other in a circle.
            return _Same, self._seen[id(value)][1]
        self._seen[id(value)] = value, len(self._seen)
        try:
            reduce = copyreg.dispatch_table.get(cls)
            reduced = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
        except Exception:
            # Whatever its class raises.
            return self._refuse(value, path)
        # A text is the name of a global object.
        return _Same(value) if isinstance(reduced, str) else (cls, *self._parts(value, path, *reduced))

    def _parts(self, value: Any, path: KeyPath, make: Any, args: Any, state: Any = None, *contents: Any) -> Any:
        cls = type(value)
        items, pairs = (() if own is None else own for own in (*contents, None, None)[:2])
        # An object with a hash vouches for what it is made of.
        takes_mutable = self._takes_mutable or not issubclass(cls, _CONTAINERS)
        parts = _Keys(self._refuse, takes_mutable, self._seen)
        # What is in these has no path that a user knows.
        pathless = _Keys(lambda part, _: self._refuse(part, path), takes_mutable, self._seen)
        yield pathless.key(make)
        yield pathless.key(tuple(args))
        yield parts._items(items, path)
        yield parts._pairs(pairs, path)
        if not (_is_objects_own(cls, "__reduce__") and _is_objects_own(cls, "__reduce_ex__")):
            yield pathless.key(state)
        # Methods may read what a class of its own leaves out of its state.
        attributes: Any = object.__getstate__(value)
        for part in attributes if type(attributes) is tuple else (attributes,):
            for name in sorted(part or ()):
                # It is computed from the rest.
                if not isinstance(getattr_static(cls, name, None), functools.cached_property):
                    yield name, parts.key(part[name], (*path, GetAttrKey(name)))

    def _items(self, items: Iterable[Any], path: KeyPath) -> Any:
        return tuple(self.key(item, (*path, SequenceKey(i))) for i, item in enumerate(items))

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: KeyPath) -> Any:
        return tuple((self.key(name, path), self.key(item, (*path, DictKey(name)))) for name, item in pairs)

    def _treedef(self, treedef: Any, path: KeyPath) -> Any:
        """The key of a treedef: treedefs compare their auxiliary data by `==` alone."""
        data = treedef.node_data()
        below = (self._treedef(child, path) for child in treedef.children())
        return data and (data[0], self.key(data[1], path), tuple(below))


def _method(cls: type, name: str) -> Any:
    # Not by `getattr`: a mock makes another mock when it is asked.
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _is_objects_own(cls: type, name: str) -> bool:
    return _method(cls, name) is vars(object)[name]
