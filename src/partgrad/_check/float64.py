"""A jaxpr evaluated in float64: what it would compute without rounding, from the same random draws.

Finite differences can only tell a wrong derivative from a right one if the function is evaluated exactly. The user's
Python does not run again: it may not support float64, or may compute something else there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._programs import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    FOREIGN,
    Operands,
    bind,
    expanded,
    opened,
    primal_jaxpr,
    reenter,
    solve_jaxpr,
    step_through,
)

# Takes an equation and its operands; returns other results for it, or None to compute its own.
Rule = Callable[[JaxprEqn, Operands], Operands | None]


# Their jaxprs compute their results; everything else about them serves derivatives and compilers.
_ENTERED_IN_PLACE = CALLS | CHECKPOINTS | CUSTOM_RULES
# These leave JAX, with the dtypes that they state.
_LEAVING = FOREIGN | {"pallas_call"}
# These compute with the bits of a number, or draw as many random bits as a number has.
_OF_OWN_WIDTH = _LEAVING | {"bitcast_convert_type", "random_gamma"}
# Constants that JAX rounds to the dtype of an operand in its derivatives, but not in its functions.
_CONSTANTS = np.array(
    [
        *(2 / np.sqrt(np.pi), np.sqrt(np.pi) / 2, np.sqrt(2 / np.pi), 1 / np.sqrt(2 * np.pi), 1 / np.sqrt(np.pi)),
        *(np.log(2), 1 / np.log(2), np.log(10), 1 / np.log(10), np.log(2 * np.pi) / 2, np.log(2 * np.pi)),
        *(1 / 3, 2 / 3, 1 / 6, np.pi, 1 / np.pi, 2 / np.pi, np.pi / 2, 2 * np.pi, np.sqrt(2), 1 / np.sqrt(2)),
    ]
)
_REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError, KeyError)


def promoted(jaxpr: ClosedJaxpr, rule: Rule = lambda equation, operands: None) -> Callable[..., Operands]:
    """A function that computes the outputs of a jaxpr in float64 and complex128, under `jax.enable_x64(True)`.

    Integers keep their dtypes, and random bits their values. What works on the bits of a number runs at the width of
    that number and is widened afterwards. So does an operation that does not support float64.
    """
    evaluation = _Evaluation(bool(jax.config.jax_enable_x64), rule)
    return lambda *operands: evaluation.run(*opened(jaxpr), list(operands))


class _Evaluation:
    """An evaluation of a jaxpr that was traced with or without 64 bits."""

    def __init__(self, x64: bool, rule: Rule):
        self.x64, self.rule = x64, rule

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs of a jaxpr."""
        wide = lambda variables, results: [_as_wide(r, v.aval) for v, r in zip(variables, results, strict=True)]
        step = lambda equation, given: wide(equation.outvars, self._results(equation, given))
        literal = lambda atom: _exact(_as_wide(atom.val, atom.aval), atom.aval)
        return step_through(jaxpr, wide(jaxpr.constvars, consts), wide(jaxpr.invars, operands), step, literal)

    def _results(self, equation: JaxprEqn, operands: Operands) -> Operands:
        name = equation.primitive.name
        results = self.rule(equation, operands)
        if results is not None:
            return results
        if name in _ENTERED_IN_PLACE:
            return self.run(*opened(primal_jaxpr(equation)), operands)
        if name == "reduce_precision":
            return operands
        if name in ("debug_callback", "debug_print"):
            # Printing once is enough.
            return []
        if name == "custom_linear_solve":
            solve, given = solve_jaxpr(equation, operands)
            return self.run(*opened(solve), given)
        results = reenter(equation, operands, self.run)
        if results is not None:
            return results
        with jax.enable_x64(self.x64):
            inside = expanded(equation)
        if inside is not None:
            return self.run(*opened(inside), operands)
        if name in _OF_OWN_WIDTH or not any(map(_changes, (*equation.invars, *equation.outvars))):
            return _at_own_width(equation, operands)
        return self._at_double_width(equation, operands)

    def _at_double_width(self, equation: JaxprEqn, operands: Operands) -> Operands:
        try:
            changed = {name: self._parameter(name, value) for name, value in equation.params.items()}
            return bind(equation, operands, **changed)
        except _REFUSALS:
            return _at_own_width(equation, operands)

    def _parameter(self, name: str, value: Any) -> Any:
        if name == "precision":
            # A precision may name an algorithm for another dtype; it means nothing in float64.
            return None
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return wide_dtype(value)
        inner, consts = opened(value)
        if hasattr(inner, "eqns"):
            traced = self._traced(inner, consts)
            return traced if hasattr(value, "jaxpr") else traced.jaxpr
        return tuple(_as_wide(item, item) for item in value) if name.endswith("consts") else value

    def _traced(self, jaxpr: Jaxpr, consts: Operands) -> ClosedJaxpr:
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        return jax.make_jaxpr(lambda *operands: self.run(jaxpr, consts, list(operands)))(*inputs)


def wide_dtype(dtype: Any) -> Any:
    """The dtype that replaces another in an exact evaluation: float64 or complex128 for those of lower precision."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def widened(value: Any) -> np.ndarray[Any, Any]:
    """A number or array as float64 or complex128 in NumPy."""
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def leaves_jax(equation: JaxprEqn) -> bool:
    """Whether an equation runs code outside JAX, which has a precision of its own."""
    return equation.primitive.name in _LEAVING


def _changes(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and wide_dtype(atom.aval.dtype) != atom.aval.dtype


def _as_wide(value: Any, aval: Any) -> Any:
    """A value, converted to the wide dtype of an aval."""
    if hasattr(aval, "inner_aval") or not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    dtype = wide_dtype(aval.dtype)
    if getattr(value, "dtype", None) == dtype:
        return value
    if isinstance(value, np.ndarray | np.generic | int | float | complex):
        return np.asarray(value, dtype)
    return jnp.asarray(value, dtype)


def _exact(value: Any, aval: Any) -> Any:
    """A constant before it was rounded to a dtype, if it is a known one."""
    if aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == np.float64:
        return value
    known = np.flatnonzero(_CONSTANTS.astype(aval.dtype) == np.abs(np.asarray(value)).astype(aval.dtype))
    return np.copysign(_CONSTANTS[known[0]], value) if known.size else value


def _at_own_width(equation: JaxprEqn, operands: Operands) -> Operands:
    """The results of the original equation, on operands rounded to its dtypes."""
    narrow = [
        jnp.asarray(operand, atom.aval.dtype) if _changes(atom) and not hasattr(atom.aval, "inner_aval") else operand
        for operand, atom in zip(operands, equation.invars, strict=True)
    ]
    return bind(equation, narrow)
