"""Competitions (`max` and its relatives) as selections.

JAX differentiates them by multiplying with 0, 1/2 or 1, so an operand that lost still has a path. Here each becomes a
function with the same values whose derivative selects; ties are shared as JAX shares them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from .._programs import (
    Chain,
    Operands,
    as_array,
    bind,
    is_custom_rule,
    is_floating,
    reading_dimensions,
    run,
    written_window,
)
from .rules import is_remade, remade


def selecting(jaxpr: Jaxpr, operands: Operands) -> Operands:
    """The outputs of an open jaxpr without constants, in whose derivative every competition selects, at any depth."""
    outputs = _within(())(jaxpr, [], operands)
    return [as_array(output, atom.aval) for output, atom in zip(outputs, jaxpr.outvars, strict=True)]


def _within(chain: Chain) -> Callable[..., Operands]:
    return functools.partial(run, rule=_rewritten, inside=chain, wanted=_is_wanted)


def _is_wanted(equation: JaxprEqn) -> bool:
    return _is_competition(equation) or is_remade(equation)


def _is_competition(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in _COMPETITIONS:
        return False
    aval = equation.outvars[0].aval
    return is_floating(aval) and not jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _rewritten(chain: Chain, operands: Operands) -> Operands | None:
    equation = chain[-1]
    if is_remade(equation):
        return remade(equation, operands, _within(chain))
    if is_custom_rule(equation):
        # Their derivative is defined by the user.
        return bind(equation, operands)
    if not _is_competition(equation):
        return None
    operands = [as_array(value, atom.aval) for value, atom in zip(operands, equation.invars, strict=True)]
    return [_COMPETITIONS[equation.primitive.name](equation, *operands)]


def _of_two(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`max` or `min` of two arrays; the derivative at a tie is half of each."""

    @jax.custom_jvp
    def function(x: Any, y: Any) -> Any:
        return operation(x, y)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        z = operation(x, y)
        share = jnp.where((x == z) & (y == z), 0.5, 1.0)
        part = lambda value, tangent: jnp.where(value == z, share.astype(tangent.dtype) * tangent, 0)
        return z, part(x, dx) + part(y, dy)

    return function


def _reduction(equation: JaxprEqn, x: Any) -> Any:
    """`reduce_max` or `reduce_min`; all elements that attain it share the derivative."""
    axes = tuple(equation.params["axes"])

    @jax.custom_jvp
    def function(x: Any) -> Any:
        return bind(equation, [x])[0]

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        extreme = function(x)
        attained = x == lax.expand_dims(extreme, axes)
        count = jnp.sum(attained, axes, dtype=x.dtype)
        return extreme, jnp.sum(jnp.where(attained, dx, jnp.zeros_like(dx)), axes) / count

    return function(x)


def _cumulative(of_two: Callable[[Any, Any], Any], equation: JaxprEqn, x: Any) -> Any:
    """`cummax` or `cummin`, as JAX differentiates them: a tree of `max` or `min` of two."""
    return lax.associative_scan(of_two, x, reverse=equation.params["reverse"], axis=equation.params["axis"])


def _scatter(equation: JaxprEqn, operand: Any, indices: Any, updates: Any) -> Any:
    """`scatter_max` or `scatter_min`; the operand (if kept) and all updates that attain it share the derivative."""
    dimensions, mode = equation.params["dimension_numbers"], equation.params["mode"]
    read = lambda result, indices: lax.gather(
        result,
        indices,
        reading_dimensions(dimensions),
        written_window(equation),
        mode=mode,
    )
    add = lambda indices, values: lax.scatter_add(
        jnp.zeros(operand.shape, values.dtype), indices, values, dimensions, mode=mode
    )

    @jax.custom_jvp
    def function(operand: Any, indices: Any, updates: Any) -> Any:
        return bind(equation, [operand, indices, updates])[0]

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (operand, indices, updates), (d_operand, _, d_updates) = primals, tangents
        result = function(operand, indices, updates)
        # A NaN equals nothing, not even itself: it is kept where nothing competes with it.
        competing = add(indices, jnp.ones_like(updates)) != 0
        kept, attained = (operand == result) | ~competing, updates == read(result, indices)
        count = kept.astype(result.dtype) + add(indices, attained.astype(result.dtype))
        pushed = add(indices, jnp.where(attained, d_updates, jnp.zeros_like(d_updates)))
        moved = jnp.where(kept, d_operand, jnp.zeros_like(d_operand)) + pushed
        return result, moved / jnp.where(count == 0, jnp.ones_like(count), count)

    return function(operand, indices, updates)


_max, _min = _of_two(lax.max), _of_two(lax.min)
_COMPETITIONS: dict[str, Callable[..., Any]] = {
    "max": lambda _, x, y: _max(x, y),
    "min": lambda _, x, y: _min(x, y),
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "cummax": functools.partial(_cumulative, _max),
    "cummin": functools.partial(_cumulative, _min),
    **dict.fromkeys(("scatter-max", "scatter-min", "scatter_max", "scatter_min"), _scatter),
}
