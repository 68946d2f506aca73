"""The arguments of a call: other leaves in them for as long as it takes, and the order of their keys.

A function may write to a dict that it is given, read the order of its keys, or keep something in an object. A copy of
its arguments, as JAX's trees make one, would change what it does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .._trees import slots_of

# For a dict, the steps to it and its keys.
Orders = tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]


class Exchange:
    """Puts values in the place of others, in the very containers and objects, and takes them out again.

    Tuples are rebuilt. A leaf that an object computes when JAX flattens it is stored nowhere, so it is not exchanged.

    Args:
        others: The values to put in, by the `id` of those that they stand for, which somebody else keeps alive.
    """

    def __init__(self, others: Mapping[int, Any]):
        self._others = dict(others)
        # What was put in, with what it stands for; and where: the object, or a dict or list.
        self._back: dict[int, tuple[Any, Any]] = {}
        self._changed: list[Any] = []
        self._seen: dict[int, Any] = {}

    def put_in(self, value: Any) -> Any:
        """A value with the others in it: the same object, unless it is a tuple, or one of those that are exchanged."""
        if id(value) in self._others:
            return self._noted(self._others[id(value)], value)
        if isinstance(value, tuple):
            inner = [self.put_in(one) for one in value]
            is_same = all(new is old for new, old in zip(inner, value, strict=True))
            # A NamedTuple's class may have a constructor of its own.
            return value if is_same else self._noted(tuple.__new__(type(value), inner), value)
        if id(value) not in self._seen and _has_places(value):
            self._seen[id(value)] = value
            for key, old in _places(value):
                new = self.put_in(old)
                if new is not old:
                    # First, so that it is taken out even if the next one cannot be put in.
                    self._changed.append(value)
                    _put(value, key, new)
        return value

    def take_out(self) -> None:
        """Put everything back, wherever it is now, except for what the function has replaced."""
        for container in self._changed:
            for key, value in _places(container):
                new, old = self._back.get(id(value), (None, None))
                if new is value and value is not None:
                    _put(container, key, old)

    def _noted(self, new: Any, old: Any) -> Any:
        self._back[id(new)] = new, old
        return new


def _has_places(value: Any) -> bool:
    return isinstance(value, dict | list) or jax.tree_util.is_tree_node(type(value))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """The keys, indices or attributes of an object, and what is there."""
    if isinstance(value, list):
        return list(enumerate(value))
    own = [] if isinstance(value, dict) else [(name, getattr(value, name, None)) for name in slots_of(type(value))]
    return [*_dict_of(value).items(), *own]


def _put(value: Any, key: Any, new: Any) -> None:
    # Classes may forbid it: what is put in is equal to what was there, and does not stay.
    if isinstance(value, list):
        list.__setitem__(value, key, new)
    elif key in _dict_of(value):
        dict.__setitem__(_dict_of(value), key, new)
    else:
        object.__setattr__(value, key, new)


def _dict_of(value: Any) -> dict[Any, Any]:
    found = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return found if isinstance(found, dict) else {}


# --- the order of keys -----------------------------------------------------------------------------------------------


def orders_of(arguments: dict[str, Any]) -> Orders:
    """The order of the keys in the dicts among arguments, where it is not the one that JAX's trees give them."""
    return tuple(_orders(arguments, ()))


def _orders(value: Any, steps: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    if type(value) is dict:
        # The arguments themselves have their order from the signature.
        keys = tuple(value)
        if steps and len(keys) > 1 and keys != tuple(sorted(keys)):
            yield steps, keys
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, inner in items:
        yield from _orders(inner, (*steps, key))


def put_in_order(arguments: dict[str, Any], orders: Orders) -> None:
    """Give dicts the order of their keys again."""
    for steps, keys in orders:
        found: Any = arguments
        for step in steps:
            found = found[step]
        items = {key: found[key] for key in keys}
        found.clear()
        found.update(items)
