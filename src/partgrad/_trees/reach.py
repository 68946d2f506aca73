"""What objects hold: whether they reach an array, which no cache may keep alive, and under which name."""

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .functions import parameters_of

_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, np.dtype, type(None))
_CONTAINERS = (dict, tuple, list, set, frozenset)
_NO_ARRAYS = _PLAIN + _CONTAINERS
_ARRAYS = (jax.Array, np.ndarray)
# A structure may have a million keys.
_QUICK = frozenset({str, int, float, bool, type(None)})


def reaches_array(value: Any) -> bool:
    """Whether an array or a tracer can be reached: in containers, attributes, closures, defaults, partial arguments."""
    return reaches(value, _ARRAYS)


def reaches(value: Any, kinds: type | tuple[type, ...], beyond: type | tuple[type, ...] = ()) -> bool:
    """Whether an object of some kinds can be reached from another, in the same ways, but not through kinds `beyond`."""
    # Keeps the objects it has seen, or their ids might be used again.
    pending, seen = [value], {id(value): value}
    while pending:
        value = pending.pop()
        # Last, because it takes longest.
        if not isinstance(value, _NO_ARRAYS) and isinstance(value, kinds):
            return True
        for held in () if isinstance(value, (_ARRAYS, beyond)) else _inside(value):
            if held.__class__ not in _QUICK and id(held) not in seen:
                seen[id(held)] = held
                pending.append(held)
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, _PLAIN):
        return ()
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, jax.tree_util.PyTreeDef):
        return data_of(value)
    return [held for _, held in held_by(value)]


def data_of(treedef: Any) -> list[Any]:
    """The auxiliary data of all nodes of a treedef."""
    data: list[Any] = []
    treedef.walk(lambda _, own: data.append(own), callable, range(treedef.num_leaves))
    return data


def held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a method, a partial application or an object holds, each with its name."""
    if isinstance(value, functools.partial):
        names = list(parameters_of(value.func) or ())
        yield from ((names[i] if i < len(names) else f"args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from value.keywords.items()
        yield from held_by(value.func)
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield from held_by(value.__func__)
    elif isinstance(value, types.FunctionType):
        code, defaults = value.__code__, value.__defaults__ or ()
        empty = types.CellType()  # A variable that is assigned later has an empty cell.
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if cell != empty)
        yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
        yield from value.__dict__.items()
    elif not isinstance(value, type | types.ModuleType):
        yield from getattr(value, "__dict__", {}).items()
        yield from ((name, getattr(value, name, None)) for name in slots_of(type(value)))


def slots_of(cls: type) -> list[str]:
    """The names of the attributes for which a class has slots."""
    return [name for one in cls.__mro__ for name in _own_slots(one)]


def _own_slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(private + name if name.startswith("__") and not name.endswith("__") else name for name in names)
