"""Whether an object reaches an array: what a cache must not keep alive, and a structure cannot compare."""

import functools
import types
from typing import Any

import jax
import numpy as np

_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, np.dtype, type(None))
# A structure may have a million keys.
_QUICK = frozenset({str, int, float, bool, type(None)})


def reaches_array(value: Any) -> bool:
    """Whether an array or a tracer can be reached: in containers, attributes, closures, defaults, partial arguments.

    Args:
        value: Any object, auxiliary data of a tree, or a structure.
    """
    # Keeps what it has seen, or an id might be used again.
    pending, seen = [value], {id(value): value}
    while pending:
        value = pending.pop()
        if isinstance(value, jax.Array | np.ndarray):
            return True
        for held in [] if isinstance(value, _PLAIN) else _held_by(value):
            if held.__class__ not in _QUICK and id(held) not in seen:
                seen[id(held)] = held
                pending.append(held)
    return False


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return [value.node_data(), *value.children()]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    held = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, types.FunctionType):
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    for cls in type(value).__mro__:
        held += [getattr(value, name, None) for name in _slots(cls)]
    return held


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(private + name if name.startswith("__") and not name.endswith("__") else name for name in names)
