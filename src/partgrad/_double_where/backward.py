"""Custom rules in a walk: the backward pass of a `custom_vjp` in forward mode, and rules that a pass itself calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .._programs import (
    CUSTOM_JVPS,
    Operands,
    adds_a_constant,
    bind,
    custom_rule_body,
    evaluate,
    is_floating,
    is_linear,
    jaxpr_and_consts,
    zeros_like_aval,
)
from .known import is_zero, remembering
from .linear import Step, Wire, linear_outputs, transposed
from .masked import Masked, arrays_in, clean, restored, state_of
from .shares import vjp_in_one

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
    def walked(program: Any, operands: Operands) -> Operands:
        # The masks are operands too, because an outer differentiation may come after they were traced.
        own, arrays, cotangents = operands[:count], operands[count:last], operands[last:]
        given = [Masked(value, mask) for value, mask in zip(own, restored(states, arrays), strict=True)]
        found = through(*jaxpr_and_consts(program), [*given, *(Masked(ct, True) for ct in cotangents)])
        return list(map(clean, found))

    arrays = arrays_in(masks)
    last = count + len(arrays)
    masked = lambda *operands: walked(body, list(operands))
    if equation.primitive.name in CUSTOM_JVPS:
        plain = lambda *operands: bind(equation, list(operands[:count]))
        function: Any = jax.custom_jvp(masked)
        function.defjvp(lambda primals, tangents: (masked(*primals), jax.jvp(plain, primals, tangents)[1]))
    else:
        function = vjp_in_one(equation, masked, walked)
    results = function(*map(clean, items), *arrays)
    linear = linear_outputs(body, [mask is not None for mask in masks])
    return [Masked(result, True if is_linear else None) for result, is_linear in zip(results, linear, strict=True)]
