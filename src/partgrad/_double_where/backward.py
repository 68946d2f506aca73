"""Custom rules in a walk: the backward pass of a `custom_vjp` in forward mode, and rules that a pass itself calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from .._compat import ordinary_custom_vjp
from .._programs import (
    CUSTOM_JVPS,
    Operands,
    adds_a_constant,
    along,
    bind,
    custom_rule_body,
    evaluate,
    float0_zeros,
    is_floating,
    is_linear,
    jaxpr_and_consts,
    zeros_like_aval,
)
from .known import is_zero, remembering
from .linear import Step, Wire, linear_outputs, transposed
from .masked import Masked, arrays_in, clean, restored, state_of

# Walks over the outputs of a jaxpr, given its constants and what enters it.
Through = Callable[[Any, Operands, Sequence[Masked]], list[Masked]]


def forward_of(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked] | None:
    """The results of a step that stands for a backward pass: the walked transpose of it, if that pass is linear."""
    operands = [i.value if i.mask is None else Wire(a.aval) for i, a in zip(items, equation.invars, strict=True)]
    step = Step(equation, tuple(operands), tuple(Wire(variable.aval) for variable in equation.outvars))
    live = [number for number, wire in enumerate(step.results) if is_floating(wire.aval)]

    def pull(*cotangents: Any) -> Operands:
        at = dict(zip(live, cotangents, strict=True))
        return step.transposed([at.get(number) for number in range(len(step.results))])

    closed = jax.make_jaxpr(pull)(*(zeros_like_aval(step.results[number].aval) for number in live))
    # An affine pass would count as linear, because its constant does not show in a transpose.
    if adds_a_constant(closed) or not is_linear(closed, [True] * len(live)):
        return None
    jaxpr, consts = jaxpr_and_consts(closed)
    run = lambda cotangents: evaluate(jaxpr, consts, list(cotangents))
    push = lambda *tangents: transposed(run, [variable.aval for variable in jaxpr.invars], tangents)
    found = through(*jaxpr_and_consts(jax.make_jaxpr(push)(*(wire.aval for wire in step.wires))), step.of_wires(items))
    results = dict(zip(live, found, strict=True))
    zero = lambda wire: Masked(zeros_like_aval(wire.aval), False)
    return [_as_tangent(results[n]) if n in results else zero(wire) for n, wire in enumerate(step.results)]


def _as_tangent(item: Masked) -> Masked:
    return item if item.mask is not None else Masked(item.value, not is_zero(item.value))


def kept_rule(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a custom rule that a backward pass calls; its own derivative stays that of the rule."""
    body, count = custom_rule_body(equation), len(items)
    masks = [item.mask for item in items]
    states = list(map(state_of, masks))

    @remembering()
    def masked(*operands: Any) -> Operands:
        # The masks are operands too, because an outer differentiation may come after they were traced.
        pairs = zip(operands[:count], restored(states, operands[count:]), strict=True)
        return list(map(clean, through(*jaxpr_and_consts(body), [Masked(value, mask) for value, mask in pairs])))

    plain = lambda *operands: bind(equation, list(operands[:count]))
    if equation.primitive.name in CUSTOM_JVPS:
        function: Any = jax.custom_jvp(masked)
        function.defjvp(lambda primals, tangents: (masked(*primals), jax.jvp(plain, primals, tangents)[1]))
    else:
        function = ordinary_custom_vjp(masked)
        function.defvjp(*_passes(equation), symbolic_zeros=True)
    results = function(*map(clean, items), *arrays_in(masks))
    linear = linear_outputs(body, [mask is not None for mask in masks])
    return [Masked(result, True if is_linear else None) for result, is_linear in zip(results, linear, strict=True)]


def _passes(equation: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and backward pass of a `custom_vjp`, which takes further operands."""

    def forward(*operands: Any) -> tuple[Operands, Any]:
        # Only along what moves: JAX refuses to differentiate along what the function closes over.
        own = operands[: len(equation.invars)]
        moving = [number for number, operand in enumerate(own) if operand.perturbed]
        values, pull = jax.vjp(*_along(equation, moving, [operand.value for operand in own]))
        return values, jax.tree_util.Partial(functools.partial(_pulled, tuple(moving), len(operands)), pull)

    return forward, lambda pull, cotangents: pull(cotangents)


def _along(equation: JaxprEqn, moving: Sequence[int], operands: Operands) -> tuple[Any, ...]:
    function, start = along(equation, moving, operands)
    return function, *start


def _pulled(moving: Sequence[int], count: int, pull: Callable[..., Any], cotangents: Operands) -> tuple[Any, ...]:
    given = [_instantiated(ct) if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
    found = dict(zip(moving, pull(given), strict=True))
    return tuple(found.get(number) for number in range(count))


def _instantiated(zero: SymbolicZero) -> Any:
    return float0_zeros(zero.aval) if zero.aval.dtype == jax.dtypes.float0 else zeros_like_aval(zero.aval)
