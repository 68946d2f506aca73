"""Competitions that a custom rule has differentiated itself, with `jax.jvp` or `jax.vjp`: selections again.

JAX multiplies a tangent with the share of an operand in `max(x, y)`: 0, 1/2 or 1, computed from `x == max(x, y)`. Where
that is false, the operand lost, and no path leads through it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._programs import (
    CALLS,
    COMPARISONS,
    Operands,
    any_equation,
    bind,
    is_floating,
    jaxpr_and_consts,
    named,
    primal_jaxpr,
    step_through,
)

_EXTREMES = named("max min reduce_max reduce_min")
# JAX differentiates these as competitions of two.
_CUMULATIVE = named("cummax cummin")
_RESHAPED = named("reshape broadcast_in_dim expand_dims squeeze")


class _Value(NamedTuple):
    """A value in a rule, and what it says of a competition.

    Attributes:
        value: The value.
        kind: "zero"; "extreme", the winner of a competition; "won", whether an operand is the winner; "share", zero
            where it is not; "" for any other.
        won: Of a share, where the operand won.
    """

    value: Any
    kind: str = ""
    won: Any = None


def has_competition(jaxpr: Jaxpr) -> bool:
    """Whether there is a competition between numbers in a jaxpr."""
    is_one = lambda e: e.primitive.name in _EXTREMES | _CUMULATIVE and is_floating(e.outvars[0].aval)
    return any_equation(jaxpr, is_one)


def selecting_shares(closed: Any) -> Callable[[Operands], Operands]:
    """A function of the inputs of a jaxpr in which tangents are selected where they meet a share of zero."""
    jaxpr, consts = jaxpr_and_consts(closed)
    return lambda operands: [item.value for item in _Selecting().through(jaxpr, consts, list(map(_Value, operands)))]


def _of_literal(literal: Literal) -> _Value:
    return _Value(literal.val, "zero" if is_floating(literal.aval) and np.all(literal.val == 0) else "")


class _Selecting:
    """A run of a rule that marks what its values say of competitions."""

    def __init__(self) -> None:
        # What has competed, by its id, which this keeps taken.
        self._competed: dict[int, Any] = {}

    def through(self, jaxpr: Jaxpr, consts: Operands, given: list[_Value]) -> list[_Value]:
        """The outputs."""
        return step_through(jaxpr, list(map(_Value, consts)), given, self._step, literal=_of_literal)

    def _step(self, equation: JaxprEqn, given: list[_Value]) -> list[_Value]:
        name, kinds = equation.primitive.name, [item.kind for item in given]
        if name in CALLS:
            return self.through(*jaxpr_and_consts(primal_jaxpr(equation)), given)
        results = bind(equation, [item.value for item in given])
        if name == "mul" and "share" in kinds:
            won = given[kinds.index("share")].won
            return [_Value(lax.select(won, results[0], jnp.zeros_like(results[0])))]
        if name in _EXTREMES and is_floating(jax.typeof(results[0])):
            self._competed.update((id(i.value), i.value) for i in given if isinstance(i.value, jax.core.Tracer))
            return [_Value(results[0], "extreme")]
        if name in COMPARISONS and ("extreme" in kinds or any(id(item.value) in self._competed for item in given)):
            # 0.10 compares the operands with the winner, 0.12 with each other.
            return [_Value(results[0], "won", results[0])]
        return [_marked(name, given, kinds, result) for result in results]


def _marked(name: str, given: list[_Value], kinds: list[str], result: Any) -> _Value:
    if name in _RESHAPED and kinds[0] in {"zero", "extreme"}:
        return _Value(result, kinds[0])
    if name == "convert_element_type" and kinds[0] == "won":
        return _Value(result, "share", given[0].value)
    if name == "select_n" and kinds[:2] == ["won", "zero"]:
        return _Value(result, "share", given[0].value)
    if name == "select_n" and kinds[:2] == ["won", "share"]:
        return _Value(result, "share", given[0].value | given[1].won)
    if name == "div" and kinds[0] == "share":
        return _Value(result, "share", given[0].won)
    return _Value(result)
