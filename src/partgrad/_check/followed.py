"""Programs in which comparisons and roundings are smooth: what follows them is followed as numbers too.

The result of a comparison is a bool, and what counts such results is an integer. So each of these gets a smooth number
beside it, until something floating is made of the two: there they meet in a surrogate, as the user's would.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from .._programs import (
    CALLS,
    MOVES,
    Chain,
    Operands,
    any_equation,
    bind,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    jaxpr_and_consts,
    primal_jaxpr,
    reenter,
    step_through,
)
from .._surrogate import surrogate
from .float64 import UNSUPPORTED
from .names import operation_of
from .program import Program

GREATER, LESS = {"gt": ">", "ge": ">="}, {"lt": "<", "le": "<="}
# What is done to the smooth numbers as it is to the others.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_ALIKE = MOVES | _PRODUCTS | {"reduce_sum", "cumsum", "add", "sub", "mul", "neg", "max", "min", "clamp"}
_LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: a * b,
    "or": lambda a, b: a + b - a * b,
    "xor": lambda a, b: a + b - 2 * a * b,
    "not": lambda a: 1 - a,
}


class _Both(NamedTuple):
    """A number that goes by steps, and the smooth one beside it."""

    value: Any
    smooth: Any


class _Refused(Exception):
    """Nobody knows what an operation makes of a smooth number."""


def smoothed(program: Program, chain: Chain) -> tuple[Program, set[str]] | None:
    """A program with a surrogate for one operation, and the names of what a user has to write otherwise then."""
    followed = _Followed([chain], is_partial=False)
    found = _followed_in(program, followed)
    return None if found is None else (found, followed.rewritten)


def straight_through(program: Program, chains: Sequence[Chain]) -> Program | None:
    """A program in which some roundings have the derivative of what they round, where that can be followed."""
    return _followed_in(program, _Followed(chains, is_partial=True))


def _followed_in(program: Program, followed: "_Followed") -> Program | None:
    function = lambda leaves: followed.run(*jaxpr_and_consts(program.jaxpr), list(leaves))
    try:
        return Program(function, program.leaves, program.paths)
    except (_Refused, *UNSUPPORTED):
        return None


class _Followed:
    """A jaxpr in which some operations are smooth; `rewritten` are those that a user has to write otherwise.

    What nobody can follow is refused, or if part of it is enough, has no derivative.
    """

    def __init__(self, targets: Sequence[Chain], *, is_partial: bool):
        self._targets, self._is_partial = {id(chain[-1]) for chain in targets}, is_partial
        self.rewritten: set[str] = set()

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs; `_Refused` if some are integers made of the smooth operation."""
        results = self._through(jaxpr, consts, operands)
        if any(isinstance(result, _Both) for result in results) and not self._is_partial:
            raise _Refused
        return list(map(_value_of, results))

    def _through(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        return step_through(jaxpr, consts, operands, self._step)

    def _step(self, equation: JaxprEqn, given: Operands) -> Operands:
        is_target, values = lambda equation: id(equation) in self._targets, list(map(_value_of, given))
        if is_target(equation):
            return [self._made(equation, bind(equation, values)[0], _smooth(equation, values))]
        is_met = any(isinstance(operand, _Both) for operand in given)
        contains = any(any_equation(inner, is_target) for inner in inner_jaxprs(equation))
        if (is_met or contains) and equation.primitive.name in CALLS:
            return self._through(*jaxpr_and_consts(primal_jaxpr(equation)), given)
        try:
            if is_met:
                return [self._followed(equation, given, values)]
            results = reenter(equation, given, self.run) if contains and not is_custom_rule(equation) else None
            if contains and results is None:
                raise _Refused
        except _Refused:
            if not self._is_partial:
                raise
            results = None
        return list(bind(equation, values)) if results is None else results

    def _followed(self, equation: JaxprEqn, given: Operands, values: Operands) -> Any:
        name = equation.primitive.name
        smooth = [operand.smooth if isinstance(operand, _Both) else operand for operand in given]
        (result,) = bind(equation, values) if len(equation.outvars) == 1 else [None]
        if result is None:
            raise _Refused
        is_cast = name == "convert_element_type"
        if is_cast and operation_of((equation,)) in ("astype", "asarray", "int32", "int64") and not is_floating(result):
            self.rewritten.add(name)
        if is_cast:
            return self._made(equation, result, smooth[0])
        if name == "select_n" and len(given) == 3:
            return self._made(equation, result, self._selected(equation, given, smooth))
        if name in _LOGIC and result.dtype == bool:
            self.rewritten.add(name)
            return self._made(equation, result, _LOGIC[name](*map(jnp.asarray, smooth)))
        if name in _ALIKE:
            dtype = _dtype_in(smooth)
            floating = [jnp.asarray(one, dtype) for one in smooth]
            # Of integers, products may be sums in a wider type.
            more = {"preferred_element_type": dtype} if name in _PRODUCTS else {}
            return self._made(equation, result, bind(equation, floating, **more)[0])
        raise _Refused

    def _selected(self, equation: JaxprEqn, given: Operands, smooth: Operands) -> Any:
        if not isinstance(given[0], _Both):
            return bind(equation, [given[0], *(jnp.asarray(one, _dtype_in(smooth[1:])) for one in smooth[1:])])[0]
        self.rewritten.add("select_n")
        which, off, on = smooth
        return off + (on - off) * which

    def _made(self, equation: JaxprEqn, value: Any, smooth: Any) -> Any:
        """The two numbers, or where they are floating a surrogate."""
        if not is_floating(equation.outvars[0].aval):
            return _Both(value, smooth)
        smooth = jnp.broadcast_to(jnp.asarray(smooth, value.dtype), value.shape)
        return surrogate(lambda value, smooth: value, smooth=lambda value, smooth: smooth)(value, smooth)


def _value_of(operand: Any) -> Any:
    return operand.value if isinstance(operand, _Both) else operand


def _dtype_in(operands: Sequence[Any]) -> Any:
    """The floating dtype among some operands."""
    return next(jnp.result_type(one) for one in operands if is_floating(jnp.asarray(one)))


def _smooth(equation: JaxprEqn, given: Operands) -> Any:
    """What is smooth in the place of an operation."""
    name = equation.primitive.name
    if name in GREATER | LESS:
        one, other = given if name in GREATER else given[::-1]
        return jnp.arctan(one - other) / jnp.pi + 0.5
    if name == "rem":
        return jnp.zeros_like(given[0])
    return 2 * jnp.arctan(given[0]) / jnp.pi if name == "sign" else given[0]
