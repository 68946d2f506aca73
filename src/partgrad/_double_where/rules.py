"""Custom derivative rules, run so that a linearization loses nothing of what JAX does with them."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import JaxprEqn

from .._compat import ordinary_custom_vjp, without_remat3
from .._programs import (
    CONSTANT,
    CUSTOM_JVPS,
    CUSTOM_VJPS,
    HIGH,
    Operands,
    along,
    bind,
    dependencies,
    evaluate,
    is_custom_rule,
    is_floating,
    is_of_jax,
    jaxpr_and_consts,
    primal_jaxpr,
    pushing,
    replaced,
    rule_file,
    varying_like,
    with_constants_as_inputs,
    written,
)
from .backward import marked, vjp_in_one
from .shares import has_competition, selecting_shares

_CUSTOM_VMAP = "custom_vmap_call"
_HERE = os.path.join(os.path.dirname(__file__), "")


def is_remade(equation: JaxprEqn) -> bool:
    """Whether an equation is a custom rule that a linearization would treat differently from JAX's derivatives."""
    name = equation.primitive.name
    if name == _CUSTOM_VMAP or name in CUSTOM_VJPS or _is_of_user(equation):
        return True
    is_discrete = is_custom_rule(equation) and not all(is_floating(variable.aval) for variable in equation.outvars)
    is_checkpoint = name in HIGH and without_remat3(equation, evaluate) is not None
    return is_discrete or is_checkpoint or (name in HIGH and not _is_linearized(equation))


def remade(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    """The results of an equation whose derivative is that of the custom rule; `run` runs the body of a checkpoint."""
    name = equation.primitive.name
    function: Callable[..., Operands] = lambda *operands: bind(equation, list(operands))
    if name == _CUSTOM_VMAP or name in CUSTOM_JVPS:
        function = _with_jvp(equation)
    elif name in CUSTOM_VJPS:
        function = _with_vjp_in_one(equation) if _is_competing(equation) else marked(equation)
    elif name in HIGH:
        body = lambda jaxpr, *operands: run(*jaxpr_and_consts(jaxpr), list(operands))
        function = without_remat3(equation, body) or _with_vjp(function)
    pairs = zip(function(*operands), equation.outvars, strict=True)
    return [result if is_floating(variable.aval) else _held(result) for result, variable in pairs]


def _is_competing(equation: JaxprEqn) -> bool:
    """Whether an equation is a `custom_vjp` of a competition, whose rule may differentiate that itself."""
    body = jaxpr_and_consts(primal_jaxpr(equation))[0]
    is_own = not equation.params.get("symbolic_zeros") and not is_of_jax(written(body).file)
    return is_own and has_competition(body)


def _with_vjp_in_one(equation: JaxprEqn) -> Callable[..., Operands]:
    """A `custom_vjp` with the same rule, in which competitions select."""
    run = lambda rule, operands: selecting_shares(rule)(operands)
    return vjp_in_one(equation, lambda *operands: bind(equation, list(operands)), run)


def _is_of_user(equation: JaxprEqn) -> bool:
    """Whether an equation is a `custom_jvp` with a rule that may return anything."""
    if equation.primitive.name not in CUSTOM_JVPS:
        return False
    # JAX's own rules, and those beside this one, are linear and return arrays; and they are common.
    file = rule_file(equation)
    return not (is_of_jax(file) or file.startswith(_HERE))


@jax.custom_jvp
def _held(value: Any) -> Any:
    """A value of a dtype without derivatives, without the `float0` tangent that JAX lets a loop carry."""
    return value


@functools.partial(_held.defjvp, symbolic_zeros=True)
def _(primals: Any, _: Any) -> Any:
    (value,) = primals
    return value, zero_from_primal(value, symbolic_zeros=True)


def _with_jvp(equation: JaxprEqn) -> Callable[..., Operands]:
    """An equation whose values need no tangent, with the tangents of its own rule, whatever that rule returns."""
    function = jax.custom_jvp(lambda *operands: bind(equation, list(operands)))
    is_of_user = _is_of_user(equation)

    def rule(primals: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        moving = tuple(number for number, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero))
        # What follows is differentiated at the values of the rule, as JAX does, should they not be the function's.
        results, pushed = _pushed(equation, moving, list(primals), [tangents[number] for number in moving])
        floating = tuple(number for number in moving if is_floating(jax.typeof(primals[number])))
        if not is_of_user:
            # JAX computes them together with the tangents, so a linearization would not know them.
            results = bind(equation, list(primals))
        if is_of_user and floating:
            sources = _sources_of_tangents(equation, floating)
            if CONSTANT in sources:
                entered = sum(jnp.sum(tangents[number].real) for number in floating)
                pushed = [_carried(entered, t) if is_floating(jax.typeof(t)) else t for t in pushed]
            # A loop would carry a zero that is an array as a tangent.
            zero = lambda result: zero_from_primal(result, symbolic_zeros=True)
            triples = zip(results, pushed, sources, strict=True)
            pushed = [zero(result) if source == 0 else tangent for result, tangent, source in triples]
        return results, pushed

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _pushed(
    equation: JaxprEqn, moving: tuple[int, ...], primals: Operands, tangents: Operands
) -> tuple[Operands, Operands]:
    """The values and tangents that a rule returns; where it has differentiated a competition, that selects."""

    def pushed(primals: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        along_moving, start = along(functools.partial(bind, equation), moving, primals)
        return jax.jvp(along_moving, start, tangents)

    results, found = pushed(primals, tangents)
    if not _is_of_user(equation):
        return results, found
    floating = [number for number, variable in enumerate(equation.outvars) if is_floating(variable.aval)]
    rule = jax.make_jaxpr(lambda p, t: [pushed(p, t)[1][number] for number in floating])(primals, tangents)
    if not has_competition(rule.jaxpr):
        return results, found
    return results, replaced(found, floating, selecting_shares(rule)([*primals, *tangents]))


def _with_vjp(function: Callable[..., Operands]) -> Callable[..., Operands]:  # JAX 0.10
    """The function with its own backward pass, in the form that can be linearized."""
    pulled = ordinary_custom_vjp(function)
    pulled.defvjp(lambda *operands: jax.vjp(function, *operands), lambda pull, cotangents: pull(cotangents))
    return lambda *operands: list(pulled(*operands))


def _carried(entered: Any, tangent: Any) -> Any:
    # A linearization drops a tangent that depends on no input tangent, and reverse mode would find no path to it. So it
    # has to look as if it came from the inputs to everything that simplifies programs. A product with zero would turn
    # infinity into NaN, and selections are followed; but nothing checks that a loop overwrites its carry.
    tangent = jnp.asarray(tangent)
    start = varying_like(jnp.broadcast_to(entered.astype(tangent.dtype), tangent.shape), jax.typeof(tangent))
    return lax.scan(lambda *_: (tangent, None), start, None, length=1)[0]


@functools.lru_cache(maxsize=128)
def _sources_of_tangents(equation: JaxprEqn, moving: tuple[int, ...]) -> list[int | None]:
    """For each tangent that a rule returns 0 if it is zero, `CONSTANT` if no tangent enters it, or another number.

    None for a result without a derivative.
    """
    avals = [atom.aval for atom in equation.invars]
    floating = [number for number, variable in enumerate(equation.outvars) if is_floating(variable.aval)]
    pushed = pushing(functools.partial(bind, equation), moving, floating)
    rates = jax.make_jaxpr(lambda *given: pushed(*given)[1])(avals, [avals[number] for number in moving])
    jaxpr, consts = jaxpr_and_consts(rates)
    sources = [CONSTANT] * (len(consts) + len(avals)) + [2 * CONSTANT] * len(moving)
    found = dependencies(with_constants_as_inputs(jaxpr), sources)
    return replaced([None] * len(equation.outvars), floating, found)


def _is_linearized(equation: JaxprEqn) -> bool:
    avals = [atom.aval for atom in equation.invars]
    moving = tuple(number for number, aval in enumerate(avals) if is_floating(aval))

    def linearized(*operands: Any) -> Operands:
        along_moving, start = along(functools.partial(bind, equation), moving, list(operands))
        return jax.linearize(along_moving, *start)[0]

    try:
        jax.eval_shape(linearized, *avals)
    except NotImplementedError:  # JAX 0.10
        return False
    return True
