"""What a selector function's answer depends on besides the tree: its code and the values that it captures.

Two functions with one fingerprint select the same parts, so a lambda written anew for every call need not be resolved
anew; and a function whose captured values changed gets another fingerprint.
"""

import builtins
import dis
import types
from collections.abc import Hashable, Iterator
from typing import Any

_SIMPLE = (int, float, complex, str, bytes, bool, type(None), type(...))
_CONSTANT_MODULES = {"jax", "numpy", "math", "operator", "functools", "itertools", "builtins"}
# Ways to read a value that is named nowhere.
_OPAQUE = {"globals", "locals", "vars", "eval", "exec", "__import__", "IMPORT_NAME"}
_names: dict[types.CodeType, tuple[str, ...] | None] = {}
_NAMES_SIZE = 1024


def fingerprint(function: Any) -> Hashable | None:
    """A key for a function's answer, or None if it captures what may change without notice (a list, a class, ...)."""
    try:
        return _function(function, ())
    except _MayChange:
        return None


class _MayChange(Exception):
    pass


def _function(function: Any, callers: tuple[Any, ...]) -> Hashable:
    if not isinstance(function, types.FunctionType):
        raise _MayChange
    if function in callers:
        return "recursion"
    callers = (*callers, function)
    code = function.__code__
    if function.__dict__ or _names_of(code) is None:
        raise _MayChange
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *_captured(function, code)]
    return code, tuple([_value(value, callers) for value in values])


def _captured(function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            raise _MayChange from None
    scope = function.__globals__
    for name in _names_of(code) or ():
        if name in scope:
            yield scope[name]
        elif hasattr(builtins, name):
            yield name


def _names_of(code: types.CodeType) -> tuple[str, ...] | None:
    """Every global that the code, or a function defined in it, reads; None if it may read anything."""
    if code in _names:
        return _names[code]
    reads = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    may_read_anything = not _OPAQUE.isdisjoint({*reads, *(i.opname for i in dis.get_instructions(code))})
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_of(constant)
            may_read_anything = may_read_anything or inner is None
            reads |= dict.fromkeys(inner or ())
    if len(_names) >= _NAMES_SIZE:
        _names.clear()
    _names[code] = found = None if may_read_anything else tuple(reads)
    return found


def captures_nothing(function: Any) -> bool:
    """Whether a function's answer depends on nothing but its code, so that its fingerprint never changes."""
    if not isinstance(function, types.FunctionType) or function.__closure__ or function.__dict__:
        return False
    return not (function.__defaults__ or function.__kwdefaults__) and _names_of(function.__code__) == ()


def _value(value: Any, callers: tuple[Any, ...]) -> Hashable:
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, tuple):
        return tuple, tuple([_value(item, callers) for item in value])
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None):
        return value
    if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _CONSTANT_MODULES:
        return value.__name__
    return _function(value, callers)
