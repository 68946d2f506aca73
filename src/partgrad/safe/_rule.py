"""The one rule behind the functions of `safe`: JAX's derivative, taken where JAX has one.

The value is `jax.numpy`'s, called with the same operands. The derivative is that of the same function with its operands
moved away from the singular points, with one selection before and one after it, so that nothing leaves a moved lane in
forward or reverse mode.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..errors import ArgumentError

Operands = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SafeRule:
    """A function of named operands, where it is singular, and what its derivative is there.

    Attributes:
        value: The function of `jax.numpy`.
        smooth: From a mask, the operands and `at_singular` to the function, moved away where the mask is true.
        singular: From the operands and the value to that mask, in a shape that broadcasts against the operands. None
            where no point is singular; `smooth` then gets None.
        partials: From the operands and `at_singular` to the derivative in each operand where the mask is true. What it
            leaves out is zero.
        reduce: From the operands' shape to that of the value, by sums.
        outer: From the mask's shape to that of the value.
    """

    value: Callable[[Operands], Any]
    smooth: Callable[[Any, Operands, Any], Any]
    singular: Callable[[Operands, Any], jax.Array] | None
    partials: Callable[[Operands, Any], Operands]
    reduce: Callable[[jax.Array], jax.Array] = lambda tangent: tangent
    outer: Callable[[jax.Array], jax.Array] = lambda mask: mask


def call(rule: SafeRule, operands: Operands, at_singular: Any) -> Any:
    """Call the function of a rule, with the rule's derivative."""
    if not any(differentiable(x) for x in operands.values()):
        return rule.value(operands)

    @jax.custom_jvp
    def function(operands: Operands, at_singular: Any) -> Any:
        return rule.value(operands)

    def jvp(primals: tuple, tangents: tuple) -> tuple:
        operands, at_singular = primals
        # Not `rule.value`: at second order this value is differentiated again.
        out = function(operands, at_singular)
        # Zero times an infinite partial is NaN, so constant operands must not take part.
        moving = {name: t for name, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
        # The tangent of a Python number is one as well.
        moving = {name: t for name, t in moving.items() if getattr(t, "dtype", None) != jax.dtypes.float0}
        return out, _tangent(rule, operands, at_singular, moving, out)

    function.defjvp(jvp, symbolic_zeros=True)
    return function(operands, at_singular)


def _tangent(rule: SafeRule, operands: Operands, at_singular: Any, moving: Operands, out: Any) -> Any:
    if not moving:
        return jax.tree.map(jnp.zeros_like, out)
    mask = rule.singular and rule.singular(*jax.tree.map(jax.lax.stop_gradient, (operands, out)))
    primals = {name: operands[name] for name in moving}
    _, regular = jax.jvp(lambda moved: rule.smooth(mask, operands | moved, at_singular), (primals,), (moving,))
    if mask is None:
        return regular
    outer = rule.outer(mask)
    if isinstance(out, tuple):  # A value and its sign, which has no slope.
        singular = _convention(rule, mask, operands, at_singular, moving, out[0])
        return jnp.where(outer, singular, regular[0]), jnp.where(outer, 0, regular[1])
    return jnp.where(outer, _convention(rule, mask, operands, at_singular, moving, out), regular)


def _convention(rule: SafeRule, mask: Any, operands: Operands, at_singular: Any, moving: Operands, out: Any) -> Any:
    total: Any = jnp.zeros_like(out)
    for name, partial in rule.partials(operands, at_singular).items():
        if name in moving:
            # A partial of infinity must be zero where it does not count: 0 * inf is NaN in reverse mode.
            term = rule.reduce(jnp.where(mask, partial, 0) * moving[name])
            total = total + (term if jnp.iscomplexobj(out) else jnp.real(term)).astype(out.dtype)
    return total


def operand(x: Any) -> Any:
    """Unwrap an object that converts to an array, as `jax.numpy` does."""
    # A tracer has the attribute, which is None.
    return x if arrays(x) or not hasattr(x, "__jax_array__") else x.__jax_array__()


def arrays(*operands: Any) -> bool:
    """Whether all are arrays or numbers; if not, `jax.numpy` raises its own error."""
    return all(isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex) for x in operands)


def differentiable(x: Any) -> bool:
    """Whether an operand has a floating or complex dtype."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def moved(mask: jax.Array, x: Any, to: int) -> jax.Array:
    """Give an operand another value where the mask is true, in its own dtype, weak or not."""
    # A Python scalar takes the operand's dtype and weak type, but turns a bool into an integer.
    return jnp.where(mask, bool(to) if jnp.result_type(x) == jnp.bool_ else to, x)


def check(name: str, at_singular: Any, shape: tuple[int, ...], real: bool) -> None:
    """Refuse an `at_singular` of the function `name` that is not a number or an array that fits."""
    if not arrays(at_singular) or (real and jnp.iscomplexobj(at_singular)):
        raise ArgumentError(
            f"`at_singular` of `safe.{name}` is {type(at_singular).__name__} {at_singular!r:.60}.",
            f"Expected a {'real ' if real else ''}number or array{'' if real else ', real or complex'}.",
            fix=f"write safe.{name}(..., at_singular=0.0).",
        )
    try:
        fits = np.broadcast_shapes(np.shape(at_singular), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentError(
            f"`at_singular` of `safe.{name}` has shape {np.shape(at_singular)}.",
            f"Expected a shape that broadcasts to {shape}.",
            fix="give one number, or one for each element.",
        )
