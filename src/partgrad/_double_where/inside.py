"""Masks inside what JAX runs as a unit: a checkpoint, a `shard_map`, the backward pass of a `custom_vjp`.

In the first two, the masks are computed inside, next to the values, together with the tangents. A second derivative in
there is protected by a `double_where` of its own.
"""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._programs import (
    CHECKPOINTS,
    CUSTOM_LINEAR,
    HIGH_LINEAR,
    Operands,
    Recent,
    adds_a_constant,
    any_equation,
    checkpoint_like,
    checkpoint_settings,
    evaluate,
    is_floating,
    is_mutating,
    opened,
    primal_jaxpr,
    shard_map_like,
    shard_map_specs,
    shared_axes,
    structure_of,
    with_constants_as_inputs,
    zeros_like_aval,
)
from .backward import fed_factors, has_rule, live_masks, pulled
from .batched import pulled_only
from .body import State, as_arrays, state_of
from .known import is_zero, remembering
from .mask import Mask, arrays_in, full_like, restored, united
from .program import LinearProgram, Step, Wire, linear_outputs, split, transposed, whole, without_dead_code
from .trim import RULES, UNKNOWN, Emit, Guard, Rule, feed, only, results_fed, trim

# JAX does not linearize these again: the backward pass of a `custom_vjp`, the tangents of a `custom_vmap`.
_CUSTOM = CUSTOM_LINEAR | HIGH_LINEAR | {"custom_vmap_call"}
_LOOPS = CHECKPOINTS | {"scan", "while", "cond"}


def _all_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    return [True] * len(step.results)


def _linear_part(step: Step, known: Operands) -> LinearProgram:
    """The body of a checkpoint, which also computes values, reduced to the equations that tangents go through."""
    body = primal_jaxpr(step.equation)
    if not _contains(step, _LOOPS) or _contains(step, _CUSTOM):
        # The equations tell values from tangents.
        return LinearProgram.at(body, step.linear, known)
    # A loop in there carries both values and tangents; JAX's own linearization separates them.
    zeros = [zeros_like_aval(wire.aval) for wire in step.wires]
    operands = step.with_known(known).operands_with
    _, linear = jax.linearize(lambda *tangents: evaluate(*opened(body), operands(tangents)), *zeros)
    closed = jax.make_jaxpr(linear)(*zeros)
    return LinearProgram.of(closed, [Wire(variable.aval) for variable in closed.jaxpr.invars])


def _contains(step: Step, names: Container[str]) -> bool:
    return any_equation(opened(primal_jaxpr(step.equation))[0], lambda e: e.primitive.name in names)


def _parted(of_known: Callable[[Operands], Emit], known: Operands, avals: Sequence[Any]) -> tuple[ClosedJaxpr, Jaxpr]:
    """A linear function of tangents: its coefficients, as a function of known values, and the rest of it."""
    linear: list[Any] = []

    def coefficients(*known: Any) -> Operands:
        jaxpr, consts = split(of_known(list(known)), avals)
        linear[:] = [jaxpr]
        return consts

    return jax.make_jaxpr(coefficients)(*known), linear[0]


def _cut(demanded: Callable[[Operands], list[Mask]]) -> Callable[[Operands], Operands]:
    """A function that returns known values unchanged, whose own derivatives are followed only where they are demanded.

    What is inside sends exact zeros to the others, but only these masks tell what computes the values. They are not
    needed before a second derivative is.

    Args:
        demanded: Computes the masks of these values.
    """
    floating = lambda known: [value for value in known if is_floating(jax.typeof(value))]

    @jax.custom_jvp
    def unchanged(known: Operands) -> Operands:
        return floating(known)

    @unchanged.defjvp
    def rule(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[Operands, Operands]:
        ((known,), (rates,)) = primals, tangents
        triples = zip(known, demanded(known), rates, strict=True)
        return unchanged(known), [only(mask, rate) for value, mask, rate in triples if is_floating(jax.typeof(value))]

    def cut(known: Operands) -> Operands:
        values = iter(unchanged(known))
        return [next(values) if is_floating(jax.typeof(value)) else value for value in known]

    return cut


# --- checkpoint -----------------------------------------------------------------------------------------------------


class _Checkpoint(NamedTuple):
    """A checkpoint without its dead edges, as functions of the known operands and the array masks.

    Attributes:
        masks: Computes the demanded masks of the wires that are arrays.
        operands: What is known of the demanded masks.
        cut: Passes on the known operands, cut from what no live edge in the checkpoint needs.
        run: The checkpoint of the tangents. JAX knows the same function again, and traces it once.
    """

    masks: ClosedJaxpr
    operands: list[State]
    cut: Callable[[Operands], Operands]
    run: Callable[[Operands, Operands], Operands]


# The layers of a model are often checkpoints of equal structure.
_checkpoints: Recent[_Checkpoint] = Recent(64)


def _checkpoint_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    if _contains(step, _CUSTOM) and _contains(step, _LOOPS):
        return RULES[UNKNOWN].trim(step, fed, demanded, guard)
    step, fed = guard.whole(step), step.of_wires(fed)
    known = [*step.known, *arrays_in(fed), *arrays_in(demanded)]
    trimmed = _trimmed_checkpoint(step, fed, demanded, known, guard)
    arrays = evaluate(*opened(trimmed.masks), known) if None in trimmed.operands else []
    known = trimmed.cut(known)
    return restored(trimmed.operands, arrays), lambda tangents: trimmed.run(known, list(tangents))


def _trimmed_checkpoint(
    step: Step, fed: list[Mask], demanded: list[Mask], known: Operands, guard: Guard
) -> _Checkpoint:
    body, consts = opened(primal_jaxpr(step.equation))
    structure = None if consts else structure_of(body, exact=True)
    masks, avals = (*map(state_of, fed), *map(state_of, demanded)), tuple(map(jax.typeof, known))
    key = (
        None if structure is None else (structure, checkpoint_settings(step.equation), tuple(step.linear), masks, avals)
    )
    make = lambda: _new_checkpoint(step, fed, demanded, known, guard)
    return _checkpoints.of(key, make, lambda new: not any(isinstance(c, jax.core.Tracer) for c in new.masks.consts))


def _new_checkpoint(step: Step, fed: list[Mask], demanded: list[Mask], known: Operands, guard: Guard) -> _Checkpoint:
    count, avals = len(step.known), [wire.aval for wire in step.wires]
    found: list[Any] = []

    @remembering()
    def parts(*known: Any) -> tuple[Operands, Operands]:
        masks = iter(known[count:])
        of_wires, of_results = restored(fed, masks), restored(demanded, masks)
        program = _linear_part(step, list(known[:count]))
        operands, emit = trim(program, feed(program, of_wires), of_results, Guard(guard.protected))
        linear, coefficients = split(emit, avals)
        states = list(map(state_of, operands))
        found[:] = [linear, states]
        return coefficients, as_arrays(operands, states, avals)

    closed, shapes = jax.make_jaxpr(parts, return_shape=True)(*known)
    jaxpr, consts = opened(closed)
    own = len(shapes[0])
    of_outputs = lambda outputs: ClosedJaxpr(without_dead_code(jaxpr, outputs), consts)
    linear, operands = found
    coefficients = guard.protected(of_outputs(jaxpr.outvars[:own]))

    _, flags = checkpoint_settings(step.equation)
    prevented = None
    if isinstance(flags, tuple):
        pairs = list(zip(flags, step.linear, strict=True))
        of_known = [flag for flag, linear in pairs if not linear]
        prevented = [*of_known, *[False] * (len(known) - count)], step.of_wires(flags)

    def body(known: Operands, tangents: Operands) -> Operands:
        return evaluate(linear, [], [*coefficients(*known), *tangents])

    run = checkpoint_like(step.equation, body, prevented)
    return _Checkpoint(of_outputs(jaxpr.outvars[own:]), operands, _cut(coefficients.demanded), run)


# --- shard_map ------------------------------------------------------------------------------------------------------


def _shard_map_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    # A mask is split among the devices like its tangent.
    fed, demanded = whole(step.of_wires(fed), step.wires), whole(demanded, step.results)
    step = guard.whole(step)
    specs, out_specs = shard_map_specs(step.equation)
    of_wires = step.of_wires(specs)
    of_known = [spec for spec, linear in zip(specs, step.linear, strict=True) if not linear]
    of_masks = [s for s, m in zip((*of_wires, *out_specs), (*fed, *demanded), strict=True) if not isinstance(m, bool)]
    known = [*step.known, *arrays_in(fed), *arrays_in(demanded)]
    avals = step.of_wires([variable.aval for variable in opened(primal_jaxpr(step.equation))[0].invars])
    # JAX keeps the functions below, so they must not hold what is traced here.
    equation, linear, count, protected = step.equation, step.linear, len(step.known), guard.protected
    of_fed, of_demanded = list(map(state_of, fed)), list(map(state_of, demanded))

    @remembering()
    def trimmed(known: Operands) -> tuple[list[Mask], Emit]:
        masks = iter(known[count:])
        fed_inside, demanded_inside = restored(of_fed, masks), restored(of_demanded, masks)
        program = LinearProgram.at(primal_jaxpr(equation), linear, known[:count])
        return trim(program, feed(program, fed_inside), demanded_inside, Guard(protected))

    def parted(known: Operands) -> tuple[ClosedJaxpr, Jaxpr]:
        return _parted(lambda known: trimmed(known)[1], known, avals)

    inside, states = [*of_known, *of_masks], list[State]()

    def masks_of_wires(known: Operands) -> Operands:
        masks, _ = trimmed(known)
        states[:] = map(state_of, masks)
        return _leaving(equation, masks, of_wires, avals)

    def masks_of_known(known: Operands) -> Operands:
        masks = protected(parted(known)[0]).demanded(known)
        return _leaving(equation, masks, inside, list(map(jax.typeof, known)))

    def body(known: Operands, tangents: Operands) -> Operands:
        coefficients, rest = parted(known)
        return evaluate(rest, [], [*protected(coefficients)(*known), *tangents])

    mapped = functools.partial(shard_map_like, equation)
    found = jax.make_jaxpr(mapped(masks_of_wires, (inside,), of_wires))(known)
    arrays = evaluate(*opened(found), known) if None in states else [None] * len(states)
    operands = [array if state is None else state for array, state in zip(arrays, states, strict=True)]
    known = _cut(mapped(masks_of_known, (inside,), inside))(known)
    run = mapped(body, (inside, of_wires), list(out_specs))
    return operands, lambda tangents: run(known, list(tangents))


def _leaving(equation: JaxprEqn, masks: Sequence[Mask], specs: Sequence[Any], avals: Sequence[Any]) -> Operands:
    """Masks inside a `shard_map` as arrays that leave it: of what is the same on some devices, the union of theirs."""
    # Elsewhere, the types say over which axes a value varies, and masks are united where they are demanded.
    masks = [united(mask, shared_axes(equation, spec)) for mask, spec in zip(masks, specs, strict=True)]
    return [full_like(mask, aval) for mask, aval in zip(masks, avals, strict=True)]


# --- custom_vjp -----------------------------------------------------------------------------------------------------


def _custom_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    """A custom backward pass that is linear becomes the program of tangents whose transpose it is."""
    # The cotangent of a result that nothing demands is a symbolic zero, which the pass may test for.
    pairs = enumerate(zip(step.results, demanded, strict=True))
    live = [number for number, (wire, mask) in pairs if mask is not False and is_floating(wire.aval)]
    avals = [step.results[number].aval for number in live]

    def pull(cotangents: Sequence[Any]) -> Operands:
        return step.transposed(_placed(live, cotangents, len(step.results)))

    closed = jax.make_jaxpr(lambda *cotangents: pull(cotangents))(*map(zeros_like_aval, avals))
    if any_equation(closed.jaxpr, is_mutating):
        # Only JAX can follow what goes through a mutable reference.
        return [True] * len(step.wires), guard.whole(step).run
    backward = LinearProgram.of(closed, [Wire(aval) for aval in avals])
    of_live = [demanded[number] for number in live]
    push = _transpose_of(closed, backward, [wire.aval for wire in step.wires])
    if push is None:
        # For example, a pass that clips cotangents. Whatever it computes from a zero is part of the answer.
        operands = _reached(backward, of_live)
        return operands, _masked(guard.whole(step), (live, *opened(closed)), step.of_wires(fed), demanded, guard)
    program = LinearProgram.of(push, [Wire(wire.aval) for wire in step.wires])
    found = feed(program, step.of_wires(fed))
    operands, emit = trim(program, found, of_live, guard)
    reached = [isinstance(output, Wire) and found[output] is not False for output in program.outputs]
    nothing = lambda known, cotangents: [zeros_like_aval(wire.aval) for wire in step.wires]

    def run(tangents: Sequence[Any]) -> Operands:
        pushed = dict(zip(live, emit(tangents), strict=True))
        # A constant zero would not do where only a backward pass follows, which JAX refuses to run on constants.
        pushed |= {
            number: pulled_only(nothing, [step.results[number].aval], [], list(tangents))[0]
            for number, is_reached in zip(live, reached, strict=True)
            if not is_reached
        }
        return [pushed[n] if n in pushed else zeros_like_aval(wire.aval) for n, wire in enumerate(step.results)]

    return operands, run


def _reached(backward: LinearProgram, demanded: Sequence[Mask]) -> list[Mask]:
    """Where a backward pass that is not linear may return anything but zeros, given where its cotangents are not zero.

    Where no path leads, a value is that of a pass of zeros: a factor there need not be zero.
    """
    masks = dict(zip(backward.inputs, demanded, strict=True))
    values = {wire: zeros_like_aval(wire.aval) for wire in backward.inputs}
    for step in backward.steps:
        fed = fed_factors(step, results_fed(step, masks), (masks[wire] for wire in step.wires))
        given = [values[wire] for wire in step.wires]
        results = step.run(given)
        masks.update(zip(step.results, live_masks(step, fed, given, results), strict=True))
        values.update(zip(step.results, results, strict=True))
    return [masks[output] if isinstance(output, Wire) else not is_zero(output) for output in backward.outputs]


def _masked(
    step: Step, traced: tuple[list[int], Jaxpr, Operands], fed: list[Mask], demanded: list[Mask], guard: Guard
) -> Emit:
    """A custom backward pass with masks beside its cotangents.

    Args:
        step: The pass.
        traced: The pass as a jaxpr, its constants, and the numbers of the results whose cotangents it takes. A trace
            made later may fail: JAX forgets what it knows of a forward pass when another trace of that raises.
        fed: The masks of its wires.
        demanded: The masks of its results.
        guard: What replaces coefficients.
    """
    # Values other than arrays may decide, in Python, what the pass does. JAX keeps the functions below, so they may not
    # hold arrays that are traced here.
    live_then, traced_then, consts = traced
    backward_then = with_constants_as_inputs(traced_then)
    arrays = {id(value): value for value in (*step.known, *consts) if isinstance(value, jax.Array)}
    known = [*arrays.values(), *arrays_in(fed), *arrays_in(demanded)]
    places = {value: number for number, value in enumerate(arrays)}
    kept = lambda values: [(places.get(id(value)), None if id(value) in places else value) for value in values]
    of_step, of_pass, count = kept(step.known), kept(consts), len(arrays)
    of_fed, of_demanded = list(map(state_of, fed)), list(map(state_of, demanded))
    bare, protected = step.with_known([None] * len(of_step)), guard.protected

    def pass_of(live: list[int], known: Operands, cotangents: Operands) -> ClosedJaxpr:
        @remembering()
        def masked(*given: Any) -> Operands:
            values, masks, of_live = given[:count], iter(given[count : len(known)]), list(given[len(known) :])
            at = lambda kept: [value if number is None else values[number] for number, value in kept]
            of_wires, of_results = restored(of_fed, masks), restored(of_demanded, masks)
            if live == live_then:
                backward, consts = backward_then, at(of_pass)
            else:
                step = bare.with_known(at(of_step))
                pull = lambda *given: step.transposed(_placed(live, given, len(step.results)))
                now, consts = opened(jax.make_jaxpr(pull)(*of_live))
                backward = with_constants_as_inputs(now)
            paths = [*[None] * len(consts), *(of_results[number] for number in live)]
            found, _ = pulled(backward, [], [*consts, *of_live], paths, Guard(protected))
            return [only(mask, cotangent) for mask, cotangent in zip(of_wires, found, strict=True)]

        return jax.make_jaxpr(masked)(*known, *cotangents)

    def backward(known: Operands, cotangents: Operands) -> Operands:
        live = [number for number, cotangent in enumerate(cotangents) if cotangent is not None]
        given = [cotangents[number] for number in live]
        return protected(pass_of(live, known, given))(*known, *given)

    def of_known(known: Operands) -> list[Mask]:
        zeros = [zeros_like_aval(bare.results[number].aval) for number in live_then]
        program = protected(pass_of(live_then, known, zeros))
        avals = list(map(jax.typeof, known))

        def full(*given: Any) -> Operands:
            masks = program.demanded(list(given))[: len(known)]
            return [full_like(mask, aval) for mask, aval in zip(masks, avals, strict=True)]

        closed = jax.make_jaxpr(full)(*known, *zeros)
        # A mask that depends on cotangents is not known before they are.
        steered = linear_outputs(closed, [False] * len(known) + [True] * len(zeros))
        masks = evaluate(*opened(closed), [*known, *zeros])
        return [is_steered or mask for is_steered, mask in zip(steered, masks, strict=True)]

    known, avals = _cut(of_known)(known), [wire.aval for wire in step.results]
    return lambda tangents: pulled_only(backward, avals, known, list(tangents))


def _placed(numbers: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    at = dict(zip(numbers, values, strict=True))
    return [at.get(number) for number in range(count)]


def _transpose_of(backward: ClosedJaxpr, program: LinearProgram, avals: Sequence[Any]) -> ClosedJaxpr | None:
    """The function whose transpose a backward pass is; None if the pass is not linear, or JAX cannot transpose it."""
    jaxpr, consts = opened(backward)
    # An affine pass would count as linear, because its constant does not show in a transpose.
    if adds_a_constant(backward) or not all(map(has_rule, program.steps)):
        return None
    run = lambda cotangents: evaluate(jaxpr, consts, list(cotangents))
    push = lambda *tangents: transposed(run, [variable.aval for variable in jaxpr.invars], tangents)
    try:
        return jax.make_jaxpr(push)(*map(zeros_like_aval, avals))
    except Exception:
        # JAX has no single exception for what it cannot transpose.
        return None


RULES.update(
    {
        **dict.fromkeys(CHECKPOINTS, Rule(_all_fed, _checkpoint_trim)),
        "shard_map": Rule(_all_fed, _shard_map_trim),
        "custom_lin": Rule(_all_fed, _custom_trim),
    }
)
