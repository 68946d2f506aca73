"""Backward passes that users wrote for a `custom_vjp`, in a walk.

All else in a transpose is JAX's, and linear. Only in such a pass does a fixed summand count, is a zero that is given a
dead one, and is what goes through mutable references left to JAX. So it is one equation, by which a walk can tell.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from .._compat import ordinary_custom_vjp, with_backward_pass
from .._programs import (
    BACKWARD,
    CUSTOM_JVPS,
    Operands,
    adds_a_constant,
    along,
    any_equation,
    as_closed,
    bind,
    custom_rule_body,
    evaluate,
    is_floating,
    is_linear,
    is_mutating,
    jaxpr_and_consts,
    parted,
    pulling,
    replaced,
    with_constants_as_inputs,
    without_calls,
    zeros_like_aval,
)
from .follow import stand_ins
from .known import is_zero, remembering
from .linear import Step, linear_outputs
from .masked import Masked, arrays_in, clean, restored, state_of

# Walks over the outputs of a jaxpr, given its constants and what enters it.
Through = Callable[[Any, Operands, Sequence[Masked]], list[Masked]]

backward_p = Primitive(BACKWARD)
backward_p.multiple_results = True


@backward_p.def_impl
def _run(*operands: Any, jaxpr: ClosedJaxpr, residuals: int) -> Operands:
    return evaluate(*jaxpr_and_consts(jaxpr), list(operands))


@backward_p.def_effectful_abstract_eval
def _(*_: Any, jaxpr: ClosedJaxpr, residuals: int) -> Any:
    inner = jaxpr_and_consts(jaxpr)[0]
    return [variable.aval for variable in inner.outvars], inner.effects


def marked_pass(function: Callable[..., Any], residuals: int, given: Sequence[Any]) -> Any:
    """What a backward pass returns for residuals and cotangents; what is not traced it gets as it is."""
    traced = [number for number, value in enumerate(given) if isinstance(value, jax.core.Tracer)]
    backward, arrays = along(lambda given: function(*given), traced, given)
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(*arrays)
    jaxpr, consts = jaxpr_and_consts(closed)
    own = ClosedJaxpr(with_constants_as_inputs(jaxpr), [])
    results = backward_p.bind(*consts, *arrays, jaxpr=own, residuals=len(consts) + sum(n < residuals for n in traced))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def marked(equation: JaxprEqn) -> Callable[..., Operands]:
    """A `custom_vjp` whose backward pass is marked."""

    def marking(function: Callable[..., Any], residuals: int, given: Sequence[Any]) -> Any:
        # From 0.11 on the pass itself makes numbers of these, which could then not be told from its own.
        is_made = not equation.params.get("symbolic_zeros", False)
        zero = lambda value: is_made and isinstance(value, SymbolicZero) and is_floating(value.aval)
        return marked_pass(function, residuals, [zeros_like_aval(v.aval) if zero(v) else v for v in given])

    changed = with_backward_pass(equation, marking)
    return lambda *operands: bind(equation, list(operands), **changed)


def pulled_by_user(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a marked pass, given a walk that knows that numbers may be added."""
    jaxpr, residuals = jaxpr_and_consts(equation.params["jaxpr"])[0], equation.params["residuals"]
    if any_equation(jaxpr, is_mutating):
        return [Masked(result, True) for result in evaluate(jaxpr, [], list(map(clean, items)))]
    # What a pass makes of a zero that it is given counts only where it is not zero.
    is_dead = lambda n, i: n >= residuals and i.mask is None and is_floating(jax.typeof(i.value)) and is_zero(i.value)
    given = [Masked(item.value, False) if is_dead(n, item) else item for n, item in enumerate(items)]
    return list(map(_as_tangent, through(jaxpr, [], given)))


def forward_of(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked] | None:
    """The results of a step that stands for a backward pass: the walked transpose of it, if that pass is linear."""
    step = Step(equation, [item.value for item in items], [item.mask is not None for item in items])
    live = [number for number, aval in enumerate(step.results) if is_floating(aval)]
    results = lambda *tangents: [step.run(tangents)[number] for number in live]
    pull = lambda *cotangents: jax.linear_transpose(results, *step.tangents)(list(cotangents))
    traced = jax.make_jaxpr(pull)(*(step.results[number] for number in live))
    closed = as_closed(*without_calls(traced, {BACKWARD}))
    # An affine pass would count as linear, because its constant does not show in a transpose.
    if adds_a_constant(closed) or not is_linear(closed, [True] * len(live)):
        return None
    jaxpr, consts = jaxpr_and_consts(closed)
    run = lambda *cotangents: evaluate(jaxpr, consts, list(cotangents))
    push = lambda *tangents: jax.linear_transpose(run, *(v.aval for v in jaxpr.invars))(list(tangents))
    found = through(*jaxpr_and_consts(jax.make_jaxpr(push)(*step.tangents)), step.of_tangents(items))
    dead = (Masked(zeros_like_aval(aval), False) for aval in step.results)
    return replaced(dead, live, map(_as_tangent, found))


def _as_tangent(item: Masked) -> Masked:
    return item if item.mask is not None else Masked(item.value, not is_zero(item.value))


# --- the rule of a `custom_vjp`, forward and backward pass in one -----------------------------------------------------


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
        rule = jax.make_jaxpr(pulling(functools.partial(bind, equation), moving, floating))(operands[:own], avals)
        shapes = [v.aval for v in rule.jaxpr.invars]
        shapes[own:own] = map(jax.typeof, operands[own:])
        changed = jax.make_jaxpr(lambda *o: run(rule, list(o)))(*shapes)
        jaxpr, consts = without_calls(changed)
        known, constants, rest, flags = parted(jaxpr, len(avals))
        found, last = evaluate(known, [], [*constants, *consts, *operands]), flags.count(False)
        stands = stand_ins(known, [None] * len(known.invars))
        # A zero that is saved would look like a number that the pass adds.
        zeros = [atom.aval if is_zero(stands[atom]) else None for atom in known.outvars[last:]]
        saved = [value for value, zero in zip(found[last:], zeros, strict=True) if zero is None]
        backward[:] = [rest, flags[count:], zeros, moving, len(given)]
        return found[:count], [*found[count:last], *saved]

    def pulled(residuals: Operands, cotangents: Operands) -> tuple[Any, ...]:
        rest, flags, zeros, moving, total = backward

        def run(*given: Any) -> Operands:
            fixed, values = iter(given[: flags.count(False)]), iter(given[flags.count(False) :])
            own = [next(values) if zero is None else zeros_like_aval(zero) for zero in zeros]
            found = iter(evaluate(rest, [], [*own, *values]))
            return [next(found if is_pulled else fixed) for is_pulled in flags]

        at_zero = lambda ct: zeros_like_aval(ct.aval) if isinstance(ct, SymbolicZero) else ct
        given = [*residuals, *(at_zero(cotangents[number]) for number in floating)]
        return tuple(replaced([None] * total, moving, marked_pass(run, len(residuals), given)))

    ruled.defvjp(forward, pulled, symbolic_zeros=True)
    return lambda *operands: list(ruled(*operands))


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
