"""How JAX differentiates, transposes, batches and lowers a function under `double_where`, and its linear part."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet, jet_rules
from jax.interpreters import ad, batching, mlir, partial_eval

from .._programs import (
    Operands,
    along,
    as_closed,
    evaluate,
    is_floating,
    jaxpr_and_consts,
    replaced,
    with_constants_as_inputs,
    zeros_like_aval,
)
from .backward import backward_p
from .derivative import Derivative
from .program import Program, call_p, linear_p, pull_of, push_of
from .vmap import Vmap


def _call(*operands: Any, program: Program, hints: int, jaxpr: Any) -> Operands:
    return evaluate(*jaxpr_and_consts(jaxpr), list(operands))


def _linear(*operands: Any, derivative: Derivative) -> Operands:
    return evaluate(*jaxpr_and_consts(derivative.fast_push()), list(operands))


# Outside of `jit` operation by operation, as JAX runs the function itself, so that values are the same bit for bit.
call_p.def_impl(_call)
linear_p.def_impl(_linear)
call_p.def_abstract_eval(lambda *_, program, hints, jaxpr: [v.aval for v in jaxpr_and_consts(jaxpr)[0].outvars])
linear_p.def_abstract_eval(lambda *_, derivative: derivative.rates)
# What 0.12 makes of a program that contains primitives such as `custom_root`, which show only their rules.
call_p.to_lojax = _call
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=True))
mlir.register_lowering(linear_p, mlir.lower_fun(_linear, multiple_results=True))


def _moving(values: Sequence[Any], rates: Sequence[Any]) -> tuple[int, ...]:
    pairs = enumerate(zip(values, rates, strict=True))
    return tuple(n for n, (v, r) in pairs if type(r) is not ad.Zero and is_floating(jax.typeof(v)))


def _zero(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _call_jvp(primals: Any, tangents: Any, program: Program, hints: int, jaxpr: Any) -> Any:
    # A derivative starts from the operands, without hints.
    count = len(primals) - hints
    operands, moving = primals[:count], _moving(primals[:count], tangents[:count])
    if not moving:
        results = call_p.bind(*primals, program=program, hints=hints, jaxpr=jaxpr)
        return results, list(map(_zero, results))
    if program.has_forward_pass and not any(isinstance(rate, partial_eval.JaxprTracer) for rate in tangents):
        forward, parts = program.forward(moving)
        outputs, at = parts.parted(forward.run([*operands, *(tangents[n] for n in moving)]))
        return outputs, [at[n] if n in at else _zero(output) for n, output in enumerate(outputs)]
    values, derivative = program.derivative(moving)
    results = values.run(list(operands))
    count = len(jaxpr_and_consts(jaxpr)[0].outvars)
    outputs, computed = results[:count], results[count:]
    rates = list(map(_zero, outputs))
    if derivative.reached:
        found = linear_p.bind(*operands, *(tangents[n] for n in moving), *computed, derivative=derivative)
        for number, rate in zip(derivative.reached, found, strict=True):
            rates[number] = rate
    return outputs, rates


def _call_transpose(cotangents: Any, *operands: Any, program: Program, hints: int, jaxpr: Any) -> Any:
    """A forward pass is linear in tangents, and a pull in cotangents: a user may transpose it."""
    free = [number for number, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    if program.parts is not None and free[0] >= program.parts.operands:
        parts, count = program.parts, program.parts.operands
        given, derivative = list(operands[:count]), parts.make()[1]
        _, computed = parts.values(given)
        at = parts.parted(cotangents)[1]
        own = [at.get(n, ad.Zero(aval)) for n, aval in zip(derivative.reached, derivative.rates, strict=True)]
        return _linear_transpose(own, *given, *operands[count:], *computed, derivative=derivative)[: len(operands)]
    function, undefined = along(functools.partial(evaluate, *jaxpr_and_consts(jaxpr)), free, operands)
    pull = jax.linear_transpose(function, *(zeros_like_aval(operand.aval) for operand in undefined))
    found = pull([zeros_like_aval(ct.aval) if type(ct) is ad.Zero else ct for ct in cotangents])
    return replaced([None] * len(operands), free, found)


def _call_partly_known(trace: Any, *tracers: Any, program: Program, hints: int, jaxpr: Any) -> Any:
    """A forward pass part of which is computed now: the values, if only tangents are not known."""
    parts, known = program.parts, [tracer.is_known() for tracer in tracers]
    if parts is None or all(known) or not all(known[: parts.operands]):
        return trace.default_process_primitive(call_p, tracers, {"program": program, "hints": hints, "jaxpr": jaxpr})
    operands = [tracer.pval.get_known() for tracer in tracers[: parts.operands]]
    outputs, computed = parts.values(operands)
    given = [*operands, *tracers[parts.operands :], *computed]
    return parts.joined(outputs, trace.default_process_primitive(linear_p, given, {"derivative": parts.make()[1]}))


def _call_partly_needed(policy: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """The same in a checkpoint or a loop: an equation of what is computed now, and one of what is computed later."""
    program, count = equation.params["program"], len(equation.outvars)
    parts, every = program.parts, [True] * count
    missing = [atom for atom, is_there in zip(equation.invars, instantiated, strict=True) if not is_there]
    if not any(unknown):
        saved = policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params)
        # Policies that decide by name return other objects, and this has no name.
        if saved is True:
            return equation, None, [False] * count, [False] * count, []
        return equation, equation, [False] * count, every, missing
    if parts is None or any(unknown[: parts.operands]):
        return None, equation, every, every, missing
    variables, _ = parts.parted(equation.outvars)
    values, derivative = parts.make()
    program = values.keeping((*[True] * len(variables), *[False] * len(derivative.computed)))
    known = equation.replace(
        invars=equation.invars[: parts.operands],
        outvars=variables,
        params={"program": program, "hints": 0, "jaxpr": program.shown(parts.operands)},
    )
    is_tangent = [parts.count <= number < parts.count + len(parts.reached) for number in range(count)]
    return known, equation, is_tangent, every, missing


def _linear_jvp(given: Any, rates: Any, derivative: Derivative) -> Any:
    outputs = linear_p.bind(*given, derivative=derivative)
    operands, tangents, computed = derivative.parted(given)
    of_operands, of_tangents, _ = derivative.parted(rates)
    parts = []
    if any(type(rate) is not ad.Zero for rate in of_tangents):
        moved = map(ad.instantiate_zeros, of_tangents)
        parts.append(linear_p.bind(*operands, *moved, *computed, derivative=derivative))
    moving = _moving(operands, of_operands)
    if moving:
        # Residuals do not move: the push starts from the operands again.
        function, start = along(push_of(derivative).run, moving, [*operands, *tangents])
        parts.append(jax.jvp(function, start, [ad.instantiate_zeros(of_operands[n]) for n in moving])[1])
    if not parts:
        return outputs, list(map(_zero, outputs))
    return outputs, [functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)]


def _linear_transpose(cotangents: Any, *given: Any, derivative: Derivative) -> Any:
    operands, tangents, computed = derivative.parted(given)
    live = tuple(number for number, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    found: list[Any] = [None] * len(tangents)
    if live:
        pull = pull_of(derivative, live)
        pulled = pull.run([*operands, *(cotangents[number] for number in live)], computed)
        pairs = zip(tangents, pulled, strict=True)
        found = [value if ad.is_undefined_primal(tangent) else None for tangent, value in pairs]
    return [*[None] * len(operands), *found, *[None] * len(computed)]


def _batched(primitive: Any, axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    axes = tuple(None if dim is None else 0 for dim in dims)
    if not any(axis == 0 for axis in axes):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results)
    moved = [o if dim is None else jnp.moveaxis(o, dim, 0) for o, dim in zip(operands, dims, strict=True)]
    if primitive is call_p:
        program, kept = params["program"].batched(axes, Vmap.given(axis_data))
        results = call_p.bind(*moved, program=program, hints=params["hints"], jaxpr=program.shown(len(moved)))
    elif primitive is backward_p:
        batch, kept = Vmap.given(axis_data).of_jaxpr(params["jaxpr"], axes)
        jaxpr, consts = jaxpr_and_consts(batch)
        changed = {"jaxpr": as_closed(with_constants_as_inputs(jaxpr)), "residuals": len(consts) + params["residuals"]}
        results = backward_p.bind(*consts, *moved, **changed)
    else:
        derivative, kept = params["derivative"].batched(axes, Vmap.given(axis_data))
        results = linear_p.bind(*moved, derivative=derivative)
    return results, [0 if is_kept else None for is_kept in kept]


def _needed(used: Sequence[bool], *given: Any) -> tuple[list[bool], Any]:
    """What remains of a call some of whose results nobody reads, such as the value beside a gradient."""
    # JAX 0.12 also says which references are alive.
    equation = given[-1]
    if not any(used) or all(used) or equation.params["program"].parts is not None:
        return [any(used)] * len(equation.invars), equation if any(used) else None
    program = equation.params["program"].keeping(tuple(used))
    params = {**equation.params, "program": program, "jaxpr": program.shown(len(equation.invars))}
    outvars = [variable for variable, is_used in zip(equation.outvars, used, strict=True) if is_used]
    return [True] * len(equation.invars), equation.replace(outvars=outvars, params=params)


partial_eval.dce_rules[call_p] = _needed
partial_eval.custom_partial_eval_rules[call_p] = _call_partly_known
partial_eval.partial_eval_jaxpr_custom_rules[call_p] = _call_partly_needed
ad.primitive_jvps[call_p], ad.primitive_jvps[linear_p] = _call_jvp, _linear_jvp
ad.primitive_transposes[call_p], ad.primitive_transposes[linear_p] = _call_transpose, _linear_transpose
# As JAX does with a custom rule: `jet` sees what is computed.
jet_rules[call_p] = lambda given, series, **params: jet(
    functools.partial(_call, **params), given, series, factorial_scaled=False
)
for _primitive in (call_p, linear_p, backward_p):
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batched, _primitive)
