"""Competitions that a custom rule has differentiated itself, with `jax.jvp` or `jax.vjp`: selections again.

JAX multiplies a tangent with the share of an operand in `max(x, y)`: 0, 1/2 or 1, computed from `x == max(x, y)`. Where
that is false, the operand lost, and no path leads through it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._compat import ordinary_custom_vjp
from .._programs import (
    CALLS,
    COMPARISONS,
    CUSTOM_VJPS,
    Operands,
    along,
    any_equation,
    bind,
    evaluate,
    is_floating,
    is_of_jax,
    jaxpr_and_consts,
    named,
    primal_jaxpr,
    step_through,
    written,
    zeros_like_aval,
)
from .known import is_zero, remembering
from .linear import LinearProgram, Wire, split

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


# --- the rule of a `custom_vjp`, forward and backward pass in one -----------------------------------------------------


def is_competing_vjp(equation: JaxprEqn) -> bool:
    """Whether an equation is a `custom_vjp` of a competition, whose rule may differentiate that itself."""
    if equation.primitive.name not in CUSTOM_VJPS or equation.params.get("symbolic_zeros"):
        return False
    body = jaxpr_and_consts(primal_jaxpr(equation))[0]
    return has_competition(body) and not is_of_jax(written(body).file)


def competing_vjp(equation: JaxprEqn) -> Callable[..., Operands]:
    """A `custom_vjp` with the same rule, in which competitions select."""

    def run(rule: Any, operands: Operands) -> Operands:
        return (
            selecting_shares(rule)(operands)
            if has_competition(rule.jaxpr)
            else evaluate(*jaxpr_and_consts(rule), operands)
        )

    return vjp_in_one(equation, lambda *operands: bind(equation, list(operands)), run)


def vjp_in_one(
    equation: JaxprEqn, function: Callable[..., Operands], run: Callable[[Any, Operands], Operands]
) -> Callable[..., Operands]:
    """A function with the rule of a `custom_vjp`, whose forward and backward pass are run as one program.

    Args:
        equation: The `custom_vjp`.
        function: Takes the operands of the equation, and maybe others, which have no derivative.
        run: From the program and its operands, the cotangents after those that the function takes, to its outputs.
    """
    count, own = len(equation.outvars), len(equation.invars)
    floating = [number for number, variable in enumerate(equation.outvars) if is_floating(variable.aval)]
    avals = [equation.outvars[number].aval for number in floating]
    ruled, backward = ordinary_custom_vjp(function), list[Any]()

    @remembering()
    def forward(*given: Any) -> tuple[Operands, Operands]:
        moving = [number for number, operand in enumerate(given[:own]) if operand.perturbed]
        operands = [operand.value for operand in given]
        rule = jax.make_jaxpr(functools.partial(_both, equation, moving, floating))(operands[:own], avals)
        shapes = [v.aval for v in rule.jaxpr.invars]
        shapes[own:own] = map(jax.typeof, operands[own:])
        changed = jax.make_jaxpr(lambda *o: run(rule, list(o)))(*shapes)
        program = LinearProgram.of(changed, [*operands, *map(Wire, avals)])
        # A zero that is saved would look like a number that the pass adds.
        anew = lambda value: zeros_like_aval(jax.typeof(value)) if is_zero(value) else value

        def pull(cotangents: Any) -> Operands:
            steps = [step.with_fixed(list(map(anew, step.fixed))) for step in program.steps]
            found = LinearProgram(program.inputs, steps, program.outputs).run(cotangents)
            pairs = zip(found, program.outputs, strict=True)
            return [output if cotangent is None else cotangent for cotangent, output in list(pairs)[count:]]

        jaxpr, residuals = split(pull, avals)
        backward[:] = [jaxpr, moving, len(given)]
        return program.outputs[:count], residuals

    def pulled(residuals: Operands, cotangents: Operands) -> tuple[Any, ...]:
        zero = lambda ct: zeros_like_aval(ct.aval) if isinstance(ct, SymbolicZero) else ct
        jaxpr, moving, total = backward
        found = evaluate(jaxpr, [], [*residuals, *(zero(cotangents[number]) for number in floating)])
        at = dict(zip(moving, found, strict=True))
        return tuple(at.get(number) for number in range(total))

    ruled.defvjp(forward, pulled, symbolic_zeros=True)
    return lambda *operands: list(ruled(*operands))


def _both(
    equation: JaxprEqn, moving: list[int], floating: list[int], operands: Operands, cotangents: Operands
) -> Operands:
    """The results of a rule's forward pass, and those of its backward pass."""
    function, start = along(equation, moving, operands)

    def parted(*moved: Any) -> tuple[Operands, Operands]:
        results = function(*moved)
        return [results[number] for number in floating], results

    _, pull, results = jax.vjp(parted, *start, has_aux=True)
    return [*results, *pull(cotangents)]
