"""When two jaxprs are the same program, so that what was made of the first serves for the second."""

import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._programs import opened

_LARGEST_LITERAL = 64
# JAX hands out the same jaxpr for each call of a function under `jit`.
_keys: weakref.WeakKeyDictionary[Jaxpr, "tuple[Hashable, list[Any]]"] = weakref.WeakKeyDictionary()


def structure_of(jaxpr: Jaxpr) -> tuple[Hashable, list[Any]] | None:
    """A key that two jaxprs share if they compute the same by the same lines of the user's code.

    Returns:
        The key, and what it tells apart by identity, which must be kept alive as long as the key; None where it cannot
        be told.
    """
    alive: list[Any] = []
    try:
        key = (_jaxpr(jaxpr, alive), jax.config.jax_enable_x64)
        hash(key)
    except TypeError:
        return None
    return key, alive


def _jaxpr(jaxpr: Jaxpr, alive: list[Any]) -> Hashable:
    if jaxpr not in _keys:
        own: list[Any] = []
        _keys[jaxpr] = _new_key(jaxpr, own), own
    key, kept = _keys[jaxpr]
    alive.extend(kept)
    return key


def _new_key(jaxpr: Jaxpr, alive: list[Any]) -> Hashable:
    numbers: dict[Any, int] = {}

    def named(atom: Any) -> Hashable:
        return _literal(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

    inputs = tuple((named(variable), variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple(map(named, equation.invars)),
            tuple((named(variable), variable.aval) for variable in equation.outvars),
            _parameters(equation.params, alive),
            equation.ctx,
            _line(equation),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(map(named, jaxpr.outvars))


def _literal(literal: Literal) -> Hashable:
    value = np.asarray(literal.val)
    if value.size > _LARGEST_LITERAL:
        raise TypeError
    return type(literal.val), literal.aval, value.dtype, value.tobytes()


def _parameters(parameters: dict[Any, Any], alive: list[Any]) -> Hashable:
    return tuple((name, _parameter(value, alive)) for name, value in sorted(parameters.items()))


def _parameter(value: Any, alive: list[Any]) -> Hashable:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        inner, consts = opened(value)
        if consts:
            # Arrays or tracers, which must not be kept alive.
            raise TypeError
        return _jaxpr(inner, alive)
    if isinstance(value, tuple | list):
        return type(value), tuple(_parameter(item, alive) for item in value)
    if isinstance(value, dict):
        return _parameters(value, alive)
    if isinstance(value, float):
        return repr(value)
    if callable(value):
        alive.append(value)
        return id(value)
    hash(value)
    return type(value), value


def _line(equation: JaxprEqn) -> Hashable:
    """Where in the user's code an equation comes from."""
    frames = getattr(equation.source_info.traceback, "raw_frames", None)
    names = str(equation.source_info.name_stack)
    if frames is None:
        return names
    pairs = zip(*frames(), strict=True)
    return names, next(((code, place) for code, place in pairs if not _is_jax(code.co_filename)), None)


_JAX = str(jax.__file__).removesuffix("__init__.py")


def _is_jax(path: str) -> bool:
    return path.startswith(_JAX)
