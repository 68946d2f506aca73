"""Masks through a loop: a scan of the tangents, after one of the masks that runs against it."""

from collections.abc import Sequence
from typing import Any

from .._programs import Operands, ScanParts, evaluate, scan_like, scan_parts, zeros_like_aval
from .loop import Loop
from .mask import Mask
from .program import Step, Wire, recomputed, whole
from .sweep import Kept, Masks, Sweep
from .trim import RULES, Emit, Guard, Rule


def _emitted(loop: Loop, masks: Masks, guard: Guard) -> Emit:
    """The scan of the tangents alone."""
    outside, replaced = _replaced(loop, masks, guard)
    invariant, scanned = outside[: loop.invariant], outside[loop.invariant :]
    trimmed, fillers = masks.body, masks.body.fillers

    def step(consts: Operands, carry: Operands, x: Any) -> tuple[Operands, Operands]:
        xs, scanned, each, own = x
        values = [*invariant, *scanned]
        for (number, kept), mask in zip(replaced.items(), each, strict=True):
            values[number] = guard.coefficient(values[number], kept.at_step(mask), fillers[number], True)
        own = [kept.at_step(value) for kept, value in zip(masks.own, own, strict=True)]
        outputs = evaluate(trimmed.jaxpr, [], [*trimmed.merged(values, own), *consts, *carry, *xs])
        return outputs[: len(carry)], outputs[len(carry) :]

    if replaced or masks.own:
        # Otherwise JAX would compute what no tangent enters in a loop of its own, and keep it for every step.
        step = recomputed(step)

    def run(tangents: Sequence[Any]) -> Operands:
        consts, carry, xs = loop.tangents(loop.step.operands_with(tangents))
        given = xs, scanned, [kept.scanned for kept in replaced.values()], [kept.scanned for kept in masks.own]
        carry, stacked = scan_like(loop.step.equation, lambda carry, x: step(consts, carry, x), carry, given)
        tangent, known = iter(carry), iter(loop.final)
        return [*(next(tangent) if linear else next(known) for linear in loop.carries), *stacked]

    return run


def _replaced(loop: Loop, masks: Masks, guard: Guard) -> tuple[list[Any], dict[int, Kept]]:
    """The values from outside, and the masks by which steps replace those that are scanned, which takes no copy."""
    outside, replaced = list[Any](), dict[int, Kept]()
    used, fillers = set(masks.body.origins), masks.body.fillers
    for number, (value, mask) in enumerate(zip(loop.known, masks.needed, strict=True)):
        kept, mask = (mask, mask.stacked) if isinstance(mask, Kept) else (None, mask)
        if number not in used:
            outside.append(None)
        elif kept is not None and guard.is_left_to_steps(value, mask, fillers[number]):
            replaced[number] = kept
            outside.append(guard.cut(value, mask))
        else:
            outside.append(guard.coefficient(value, mask, fillers[number], True))
    return outside, replaced


def _scan_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    parts = scan_parts(step.equation)
    if parts.length == 0:
        return _no_steps(step, parts, demanded, guard)
    loop = Loop(step)
    # A step needs a mask of its own.
    of_wires, demanded = iter(whole(step.of_wires(fed), step.wires)), whole(demanded, step.results)
    fed = [next(of_wires) if isinstance(operand, Wire) else False for operand in step.operands]
    consts, carry, xs = loop.tangents(fed)
    masks = Sweep(loop, [*consts, *[True] * len(carry), *xs], loop.tangent_outputs(demanded), guard).run()
    of_tangents = iter(masks.demanded)
    of_inputs = [next(of_tangents) if linear else False for linear in loop.linear]
    return step.of_wires(of_inputs), _emitted(loop, masks, guard)


def _no_steps(step: Step, parts: ScanParts, demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    carries, stacked = slice(parts.consts, parts.consts + parts.carried), step.results[parts.carried :]
    of_inputs: list[Mask] = [False] * len(step.operands)
    of_inputs[carries] = demanded[: parts.carried]
    for value in step.operands[carries]:
        if not isinstance(value, Wire):
            guard.coefficient(value, True)
    nothing = [zeros_like_aval(wire.aval) for wire in stacked]
    return step.of_wires(of_inputs), lambda tangents: [*step.operands_with(tangents)[carries], *nothing]


def _scan_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    # Which steps feed a carry is not tracked: it only matters for a function that is constant from there on.
    return [True] * len(step.results)


RULES["scan"] = Rule(_scan_fed, _scan_trim)
