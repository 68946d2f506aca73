"""A linear program under `vmap`, kept in a form that JAX can transpose.

`vmap` turns a conditional on a batch into a selection that JAX cannot transpose, and has no rule for the backward pass
of a `custom_vjp`; both are batched here instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn

from .._compat import is_batched, is_batching, ordinary_custom_vjp
from .._programs import (
    Chain,
    Operands,
    bind,
    branches_of,
    evaluate,
    float0_zeros,
    is_floating,
    opened,
    platforms_of,
    residual_count,
    run,
    zeros_like_aval,
)
from .program import transposed


def pushed(jaxpr: Jaxpr, coefficients: Operands, tangents: Operands) -> Operands:
    """The outputs of a jaxpr of coefficients that is linear in tangents."""
    if is_batching():
        return run(jaxpr, [], [*coefficients, *tangents], _batched, wanted=_is_special)
    return evaluate(jaxpr, [], [*coefficients, *tangents])


def _is_special(equation: JaxprEqn) -> bool:
    return equation.primitive.name in {"cond", "custom_lin"}


def _batched(chain: Chain, operands: Operands) -> Operands | None:
    equation = chain[-1]
    if equation.primitive.name == "cond" and platforms_of(equation) is None:
        # What a loop records may be batched later.
        return _selected(equation, operands) if is_batched(operands[0]) or not is_batching() else None
    if equation.primitive.name == "custom_lin":
        return _pulled_only(equation, operands)
    return None


def _selected(equation: JaxprEqn, operands: Operands) -> Operands:
    """Run all branches of a conditional, each on operands selected for it, and select among their results."""
    index, given = operands[0], operands[1:]
    floating = [is_floating(variable.aval) for variable in equation.invars[1:]]
    results: Operands = [zeros_like_aval(variable.aval) for variable in equation.outvars]
    for number, branch in enumerate(branches_of(equation)):
        taken = index == number
        only = lambda value, taken=taken: jnp.where(taken, value, jnp.zeros_like(value))
        kept = [only(value) if is_float else value for value, is_float in zip(given, floating, strict=True)]
        of_branch = run(*opened(branch), kept, _batched, wanted=_is_special)
        results = [jnp.where(taken, new, old) for new, old in zip(of_branch, results, strict=True)]
    return results


Backward = Callable[[Operands, Operands], Operands]


def _pulled_only(equation: JaxprEqn, operands: Operands) -> Operands:
    count = residual_count(equation)
    tangents = [jax.typeof(value) for value in operands[count:]]

    def backward(known: Operands, cotangents: Operands) -> Operands:
        return transposed(lambda t: bind(equation, [*known, *t]), tangents, cotangents)

    results = [variable.aval for variable in equation.outvars]
    return pulled_only(backward, results, operands[:count], operands[count:])


def pulled_only(backward: Backward, results: Sequence[Any], known: Operands, tangents: Operands) -> Operands:
    """A linear function of tangents that can only be transposed.

    Args:
        backward: From the known values and a cotangent for each result, or None for a zero, to the cotangents of the
            tangents.
        results: The shapes and dtypes of the results.
        known: Values.
        tangents: Tangents.
    """
    floating = [is_floating(aval) for aval in results]

    def of_floating(known: Operands, cotangents: Operands) -> Operands:
        rest = iter(cotangents)
        return backward(known, [next(rest) if is_float else None for is_float in floating])

    avals = [aval for aval, is_float in zip(results, floating, strict=True) if is_float]
    found = iter(_with_pullback(of_floating, avals, known, tangents))
    pairs = zip(results, floating, strict=True)
    return [next(found) if is_float else zeros_like_aval(aval) for aval, is_float in pairs]


def _with_pullback(backward: Backward, results: Sequence[Any], known: Operands, tangents: Operands) -> Operands:
    """A linear function of tangents that can only be transposed, by a given function."""
    if not is_batching():
        return _with_own_transpose(backward, results, known, tangents)

    @custom_vmap
    def function(known: Operands, tangents: Operands) -> Operands:
        return list(map(zeros_like_aval, results))

    @function.def_vmap
    def rule(size: int, batched: Any, known: Operands, tangents: Operands) -> Any:
        axes = [0 if is_batched else None for is_batched in batched[0]]
        tangents = [
            t if is_batched else jnp.broadcast_to(t, (size, *t.shape))
            for t, is_batched in zip(tangents, batched[1], strict=True)
        ]
        stacked = [jax.typeof(jax.lax.broadcast(zeros_like_aval(aval), (size,))) for aval in results]
        every = jax.vmap(backward, in_axes=(axes, 0), axis_size=size)
        return _with_pullback(every, stacked, known, tangents), [True] * len(results)

    return list(function(known, tangents))


def _with_own_transpose(backward: Backward, results: Sequence[Any], known: Operands, tangents: Operands) -> Operands:
    zeros = lambda avals: list(map(zeros_like_aval, avals))

    function = ordinary_custom_vjp(lambda known, tangents: zeros(results))

    def pull(known: Operands, cotangents: Operands) -> tuple[Operands, Operands]:
        given = [None if isinstance(cotangent, SymbolicZero) else cotangent for cotangent in cotangents]
        return [_no_cotangent(value) for value in known], backward(known, given)

    forward = lambda known, tangents: (zeros(results), [operand.value for operand in known])
    function.defvjp(forward, pull, symbolic_zeros=True)
    _, push = jax.linearize(lambda tangents: function(known, tangents), zeros([jax.typeof(t) for t in tangents]))
    return list(push(tangents))


def _no_cotangent(value: Any) -> Any:
    return jnp.zeros_like(value) if is_floating(jax.typeof(value)) else float0_zeros(jax.typeof(value))
