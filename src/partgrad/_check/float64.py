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
    Chain,
    Iteration,
    Operands,
    apart,
    bind,
    expanded,
    is_floating,
    iterations,
    jaxpr_and_consts,
    primal_jaxpr,
    reenter,
    solve_jaxpr,
    source_of,
    step_through,
)
from .turns import RunsOn, Turn, turn_of, until_it_stands, waiting_in

# Takes an equation, after those that it is inside, and its operands; returns other results, or None to compute its own.
Rule = Callable[[Chain, Operands], Operands | None]


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
# What is raised by an operation that does not take the operands.
UNSUPPORTED = (TypeError, ValueError, NotImplementedError, AssertionError, KeyError)


def promoted(
    jaxpr: ClosedJaxpr,
    rule: Rule = lambda chain, operands: None,
    runs_on: RunsOn | None = None,
    x64: bool | None = None,
) -> Callable[..., Operands]:
    """A function that computes the outputs of a jaxpr in float64 and complex128, under `jax.enable_x64(True)`.

    Integers keep their dtypes, and random bits their values. What works on the bits of a number runs at the width of
    that number and is widened afterwards. So does an operation that does not support float64.

    Args:
        jaxpr: The jaxpr.
        rule: It may replace the results of equations.
        runs_on: Which loops, also unrolled ones, do not end where they end, but where another step changes nothing.
        x64: Whether the jaxpr was traced with 64 bits; None if it was traced as JAX is configured now.
    """
    evaluation = _Evaluation(bool(jax.config.jax_enable_x64) if x64 is None else x64, rule, runs_on)
    return lambda *operands: evaluation.run(*jaxpr_and_consts(jaxpr), list(operands))


def exactly(equation: JaxprEqn, operands: Operands) -> Operands:
    """The results of one equation in float64, of operands in float64, under `jax.enable_x64(True)`."""
    evaluation = _Evaluation(False, lambda chain, operands: None, None)
    return evaluation.step(equation, operands)


class _Evaluation:
    """An evaluation of a jaxpr that was traced with or without 64 bits."""

    def __init__(self, x64: bool, rule: Rule, runs_on: RunsOn | None):
        self.x64, self.rule, self.runs_on = x64, rule, runs_on
        self._inside: Chain = ()

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs of a jaxpr."""
        if self.runs_on is not None:
            for iteration in iterations(jaxpr):
                turn = jaxpr.eqns[iteration.start : iteration.stop]
                if self.runs_on.loops((*self._inside, turn[0]), turn):
                    return self._run_on_unrolled(jaxpr, iteration, [*consts, *operands])
        return self._run_through(jaxpr, consts, operands)

    def _run_through(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        return step_through(jaxpr, _wide(jaxpr.constvars, consts), _wide(jaxpr.invars, operands), self.step, exact)

    def step(self, equation: JaxprEqn, operands: Operands) -> Operands:
        """The results of an equation."""
        outside, self._inside = self._inside, (*self._inside, equation)
        try:
            return _wide(equation.outvars, self._results(equation, operands))
        finally:
            self._inside = outside

    def _results(self, equation: JaxprEqn, operands: Operands) -> Operands:
        name = equation.primitive.name
        results = self.rule(self._inside, operands)
        if results is not None:
            return results
        if name in _ENTERED_IN_PLACE:
            return self.run(*jaxpr_and_consts(primal_jaxpr(equation)), operands)
        if name == "reduce_precision":
            return operands
        if name in ("debug_callback", "debug_print"):
            # Printing once is enough.
            return []
        if name == "custom_linear_solve":
            solve, given = solve_jaxpr(equation, operands)
            return self.run(*jaxpr_and_consts(solve), given)
        parts = None if self.runs_on is None else turn_of(equation, operands, self.runs_on.thaws)
        if self.runs_on and parts and self.runs_on.loops(self._inside, jaxpr_and_consts(parts.body)[0].eqns):
            return self._run_on(equation, operands, parts)
        results = reenter(equation, operands, self.run)
        if results is not None:
            return results
        with jax.enable_x64(self.x64):
            inside = expanded(equation)
        if inside is not None:
            with source_of(equation):
                return self.run(*jaxpr_and_consts(inside), operands)
        if name in _OF_OWN_WIDTH or not any(map(_changes, (*equation.invars, *equation.outvars))):
            return at_own_width(equation, operands)
        return self._at_double_width(equation, operands)

    def _run_on(self, equation: JaxprEqn, operands: Operands, parts: Turn) -> Operands:
        """The results of a loop whose body runs on as long as that changes something, to what is finite."""
        carry = reenter(equation, operands, self._in_a_turn({}).run)
        assert carry is not None, "a loop has a body"
        thawed = self._in_a_turn(parts.waiting)
        turn = lambda old: thawed.run(*jaxpr_and_consts(parts.body), [*parts.consts, *old])
        return until_it_stands(turn, carry, [is_floating(variable.aval) for variable in equation.outvars])

    def _in_a_turn(self, waiting: dict[int, int]) -> "_Evaluation":
        """The evaluation of a turn. A loop inside is a part of it, and takes the turns that it takes."""
        thawed = lambda chain, given: [given[waiting[id(chain[-1])]]]
        rule = lambda chain, given: (thawed if id(chain[-1]) in waiting else self.rule)(chain, given)
        turn = _Evaluation(self.x64, rule, None)
        turn._inside = self._inside
        return turn

    def _run_on_unrolled(self, jaxpr: Jaxpr, iteration: Iteration, operands: Operands) -> Operands:
        """The outputs of a jaxpr in which Python unrolled an iteration, which runs on as well."""
        parts, last = apart(jaxpr, iteration), jaxpr.eqns[iteration.start : iteration.stop]
        known = self._in_a_turn({}).run(parts.before, [], operands)
        results, others = known[: len(parts.is_float)], known[len(parts.is_float) :]
        returned = {after: before for before, after in iteration.carried.items()}
        thawed = self._in_a_turn(waiting_in(last, returned) if self.runs_on and self.runs_on.thaws else {})
        turn = lambda old: thawed.run(parts.turn, [], [*parts.carried(old), *others])
        results = until_it_stands(turn, results, parts.is_float)
        return self.run(parts.after, [], [*results, *parts.carried(results), *others])

    def _at_double_width(self, equation: JaxprEqn, operands: Operands) -> Operands:
        try:
            changed = {name: self._parameter(name, value) for name, value in equation.params.items()}
            return bind(equation, operands, **changed)
        except UNSUPPORTED:
            return at_own_width(equation, operands)

    def _parameter(self, name: str, value: Any) -> Any:
        if name == "precision":
            # A precision may name an algorithm for another dtype; it means nothing in float64.
            return None
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return wide_dtype(value)
        inner, consts = jaxpr_and_consts(value)
        if hasattr(inner, "eqns"):
            traced = self._traced(inner, consts)
            return traced if hasattr(value, "jaxpr") else traced.jaxpr
        return tuple(_as_wide(item, item) for item in value) if name.endswith("consts") else value

    def _traced(self, jaxpr: Jaxpr, consts: Operands) -> ClosedJaxpr:
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        return jax.make_jaxpr(lambda *operands: self.run(jaxpr, consts, list(operands)))(*inputs)


def _wide(variables: Any, results: Operands) -> Operands:
    return [_as_wide(result, variable.aval) for variable, result in zip(variables, results, strict=True)]


def exact(literal: Any) -> Any:
    """What stands for a number that a jaxpr spells out: rounded, so that what is equal there is equal here."""
    value = literal.val
    if isinstance(value, int | float | complex) and jnp.issubdtype(literal.aval.dtype, jnp.inexact):
        value = np.asarray(value).astype(literal.aval.dtype)
    return _exact(_as_wide(value, literal.aval), literal.aval)


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


def without_callbacks(chain: Chain, operands: Operands, dtype: Callable[[Any], Any] = wide_dtype) -> Operands | None:
    """What code outside JAX returns is unknown: where it matters, nothing is known. Floats are wide by default."""
    if not leaves_jax(chain[-1]):
        return None
    unknown = lambda aval: jnp.full(aval.shape, jnp.nan if is_floating(aval) else 0, dtype(aval.dtype))
    return [unknown(variable.aval) for variable in chain[-1].outvars]


def one_by_one(chain: Chain, operands: Operands) -> Operands | None:
    """What code outside JAX returns, called for each of a batch, whatever its own way with batches.

    Of a batch, all branches run: what is called in one of them may be there to raise an error.
    """
    equation = chain[-1]
    if equation.primitive.name == "pallas_call":
        return exactly(equation, operands)
    if equation.primitive.name != "pure_callback" or any(outer.primitive.name == "cond" for outer in chain):
        return without_callbacks(chain, operands)
    return exactly(equation.replace(params={**equation.params, "vmap_method": "sequential"}), operands)


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


def at_own_width(equation: JaxprEqn, operands: Operands, **changed: Any) -> Operands:
    """The results of the original equation, with other parameters if given, on operands rounded to its dtypes."""
    narrow = [
        jnp.asarray(operand, atom.aval.dtype) if _changes(atom) and not hasattr(atom.aval, "inner_aval") else operand
        for operand, atom in zip(operands, equation.invars, strict=True)
    ]
    return bind(equation, narrow, **changed)
