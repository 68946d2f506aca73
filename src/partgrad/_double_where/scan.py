"""Masks through a loop: backward, in a loop that runs against that of the tangents."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from .._programs import (
    Operands,
    ScanParts,
    evaluate,
    opened,
    scan_like,
    scan_parts,
    step_through,
    union,
    varying_axes,
    zeros_like_aval,
)
from .backward import settled
from .body import State, TrimmedBody, as_arrays, joined, state_of, trimmed_body
from .known import narrowed, remembering, widened
from .mask import Mask, arrays_in, restored, varying_over
from .program import LinearProgram, Step, Wire, recomputed, whole, wired_outputs, without_dead_code
from .trim import RULES, Emit, Guard, Rule


class _Scan:
    """A scan whose operands are sorted into constants, carries and scanned ones, and into tangents and values.

    Attributes:
        step: The scan.
        linear: For each input of the body, whether it is a tangent there.
        known: The values from outside, carried ones stacked: one for each other input of the body.
        invariant: How many of these are the same at every step.
        slices: What the others are cut from: predicates as they were before they were broadcast.
        final: The final values of the known carries.
        apart: The numbers of known values that parts of the body need at different elements.
    """

    def __init__(self, step: Step):
        self.step = step
        self.body, self.consts, self.carried, *_ = scan_parts(step.equation)
        self.linear = settled(self.body, step.linear, self.consts, self.carried, wired_outputs)
        self.avals = [variable.aval for variable in opened(self.body)[0].invars]
        consts, carry, xs = (self._known(section) for section in self._sections(list(step.operands)))
        self.invariant = len(consts)
        self.final, stacked = self._replayed(consts, carry, xs)
        self.known = [*consts, *stacked, *xs]
        self.slices = [self._slim(value) for value in self.known[self.invariant :]]
        self.apart: set[int] = set()

    @staticmethod
    def _slim(value: Any) -> Any:
        slim = narrowed(value) if jax.typeof(value).dtype == bool else value
        return slim if slim.shape[0] == value.shape[0] else value

    def at_step(self, slices: Operands) -> Operands:
        """The known inputs of one step, from those that are the same at every step and slices of the others."""
        wholes = zip(slices, self.known[self.invariant :], strict=True)
        cut = [x if x is None or x.shape == whole.shape[1:] else widened(x, whole.shape[1:]) for x, whole in wholes]
        return [*self.known[: self.invariant], *cut]

    def _sections(self, values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        pairs = list(zip(values, self.linear, strict=True))
        start, stop = self.consts, self.consts + self.carried
        return pairs[:start], pairs[start:stop], pairs[stop:]

    @staticmethod
    def _known(section: list[Any]) -> Operands:
        return [value for value, linear in section if not linear]

    def tangents(self, values: list[Any]) -> tuple[Operands, Operands, Operands]:
        """From one value per operand, those that are tangents in the body: constants, carries, scanned ones."""
        consts, carry, xs = ([v for v, linear in section if linear] for section in self._sections(values))
        return consts, carry, xs

    def program(self, known: Operands) -> LinearProgram:
        """The body as a linear program, given the known inputs of one step."""
        return LinearProgram.at(self.body, self.linear, known)

    @property
    def carries(self) -> list[bool]:
        """For each carry, whether it is a tangent."""
        return self.linear[self.consts : self.consts + self.carried]

    def _replayed(self, consts: Operands, carry: Operands, xs: Operands) -> tuple[Operands, Operands]:
        """The known carries, such as a loop's counter: at the end, and before each step."""
        if not carry:
            return [], []

        @remembering(inside=True)
        def body(carry: Operands, xs: Operands) -> tuple[Operands, Operands]:
            outputs = self.program([*consts, *carry, *xs]).outputs[: self.carried]
            return [value for value, linear in zip(outputs, self.carries, strict=True) if not linear], carry

        final, stacked = scan_like(self.step.equation, body, carry, xs)
        return final, stacked

    def tangent_outputs(self, values: Sequence[Any]) -> list[Any]:
        """From one value per output, those that are tangents: carries and stacked ones."""
        carries = [v for v, linear in zip(values[: self.carried], self.carries, strict=True) if linear]
        return [*carries, *values[self.carried :]]

    @remembering(inside=True)
    def trimmed(self, slices: Operands, fed: Sequence[Mask], demanded: Sequence[Mask], guard: Guard) -> TrimmedBody:
        """One step without its dead edges."""
        known = self.at_step(slices)
        program = self.program(known)
        program = dataclasses.replace(program, outputs=self.tangent_outputs(program.outputs))
        return trimmed_body(program, known, fed, demanded, guard, self.apart, True, self.invariant)

    def emit(self, masks: "_Masks", guard: Guard) -> Emit:
        """The scan of the tangents alone.

        Args:
            masks: What the scan of the masks found.
            guard: What replaces coefficients: those that are scanned in each step, which takes no copy of them.
        """
        trimmed, used = masks.body, set(masks.body.origins)
        fillers = trimmed.fillers
        replaced: dict[int, _Kept] = {}
        outside: list[Any] = []
        for number, (value, mask) in enumerate(zip(self.known, masks.needed, strict=True)):
            kept, mask = (mask, mask.stacked) if isinstance(mask, _Kept) else (None, mask)
            if number not in used:
                outside.append(None)
            elif kept is not None and guard.is_left_to_steps(value, mask, fillers[number]):
                replaced[number] = kept
                outside.append(guard.cut(value, mask))
            else:
                outside.append(guard.coefficient(value, mask, fillers[number], True))
        invariant, scanned = outside[: self.invariant], outside[self.invariant :]

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
            consts, carry, xs = self.tangents(self.step.operands_with(tangents))
            given = xs, scanned, [kept.scanned for kept in replaced.values()], [kept.scanned for kept in masks.own]
            carry, stacked = scan_like(self.step.equation, lambda carry, x: step(consts, carry, x), carry, given)
            tangent, known = iter(carry), iter(self.final)
            return [*(next(tangent) if linear else next(known) for linear in self.carries), *stacked]

        return run


class _Kept(NamedTuple):
    """What a step of the masks computed.

    Attributes:
        value: The value of each step, stacked, or the value of all steps.
        varies: Whether it is stacked.
    """

    value: Any
    varies: bool

    @property
    def stacked(self) -> Any:
        """The value with an axis for the steps, which may have size one."""
        return self.value if self.varies else jax.lax.expand_dims(self.value, (0,))

    @property
    def scanned(self) -> Any:
        """What a loop scans of it."""
        return self.value if self.varies else None

    def at_step(self, scanned: Any) -> Any:
        """The value of a step, given a slice of what is scanned."""
        return scanned if self.varies else self.value


class _Masks(NamedTuple):
    """What the scan of the masks found.

    Attributes:
        demanded: The demanded masks of the tangents.
        needed: The masks of the elements that are needed of the known values, scanned ones step by step.
        body: One step without its dead edges.
        own: The coefficients that the steps computed.
    """

    demanded: list[Mask]
    needed: list[Any]
    body: TrimmedBody
    own: list[_Kept]


class _MaskStep(NamedTuple):
    """A step of the masks, traced under an assumption about the carried ones.

    Attributes:
        states: The assumption.
        body: The step of the tangents without its dead edges.
        jaxpr: From the carried masks that are arrays, and slices of what is scanned, to the same masks one step
            earlier, the masks whose union counts, those of this step alone, and the coefficients.
        consts: Its constants.
    """

    states: list[State]
    body: TrimmedBody
    jaxpr: Jaxpr
    consts: Operands


class _MaskedScan:
    """The scan of the masks, which runs against the scan of the tangents.

    Args:
        scan: The scan of the tangents.
        fed: Masks of the tangents of the body, those of scanned ones stacked.
        demanded: Masks of the tangents of the outputs, those of stacked ones stacked.
        guard: What replaces coefficients outside.
    """

    def __init__(self, scan: _Scan, fed: list[Mask], demanded: list[Mask], guard: Guard):
        self.scan, self.fed, self.demanded, self.guard = scan, fed, demanded, guard
        consts, carry, xs = scan.tangents(scan.avals)
        self.consts, self.carries, self.scanned = len(consts), len(carry), len(xs)
        self.carry_avals = carry
        avals = [*(wire.aval for wire in scan.step.wires), *map(jax.typeof, scan.known)]
        self.axes = frozenset[Any]().union(*map(varying_axes, avals))
        self.xs = (
            scan.slices,
            arrays_in(fed[self.consts + self.carries :]),
            arrays_in(demanded[self.carries :]),
        )

    def run(self) -> _Masks:
        """Run the scan, as far as there is anything to compute."""
        step = self._settled()
        before, in_any, in_each = self._kinds(step.body)
        carried, summed, kept = self._swept(step)
        unions, of_each = restored(in_any, summed), iter(kept)
        of_steps = [mask if isinstance(mask, bool) else next(of_each) for mask in in_each]
        of_tangents = [mask if isinstance(mask, bool) else mask.stacked for mask in of_steps[: self.scanned]]
        return _Masks(
            [*unions[: self.consts], *restored(before, carried), *of_tangents],
            [*unions[self.consts :], *of_steps[self.scanned :]],
            step.body,
            list(of_each),
        )

    def _swept(self, step: _MaskStep) -> tuple[Operands, Operands, list[_Kept]]:
        """What the step finds in the course of the scan: the carried masks at its end, the unions, and all else.

        What is the same at every step is computed once, and what nobody needs not at all.
        """
        before, in_any, _ = self._kinds(step.body)
        of_carries = [mask for mask, state in zip(before, step.states, strict=True) if state is None]
        count, first = len(of_carries), len(of_carries) + len(arrays_in(in_any))
        jaxpr, inputs = step.jaxpr, len(step.jaxpr.invars)
        # Whatever an equation takes has to be there, even if its value does not depend on it.
        bits = [1 << number for number in range(inputs)]
        read = lambda equation, given: [union(given) | bool(equation.effects) << inputs] * len(equation.outvars)
        sources = step_through(jaxpr, [0] * len(step.consts), bits, read, literal=lambda literal: 0)
        run = lambda jaxpr, numbers, operands: evaluate(
            without_dead_code(jaxpr, [jaxpr.outvars[number] for number in numbers]), step.consts, operands
        )
        fixed = [number for number, source in enumerate(sources) if not source]
        pure = jaxpr.replace(eqns=[equation for equation in jaxpr.eqns if not equation.effects])
        values = dict(zip(fixed, run(pure, fixed, [None] * inputs), strict=True))
        # The same mask may count for several operands.
        place = lambda number: (number < first, id(jaxpr.outvars[number]))
        moving = list({place(n): n for n, source in enumerate(sources) if source and n >= count}.values())
        sums, each = [n for n in moving if n < first], [n for n in moving if n >= first]
        wanted = [n for n, mask in enumerate(of_carries) if n not in values and not isinstance(mask, bool)]
        entering = list(range(inputs)) if jaxpr.effects else _entering([*wanted, *moving], sources, count)
        carries, scanned = [n for n in entering if n < count], [n for n in entering if n >= count]

        def body(before: Any, x: Operands) -> Any:
            operands = dict(zip(entering, (*before[0], *x), strict=True))
            found = run(jaxpr, [*carries, *sums, *each], [operands.get(number) for number in range(inputs)])
            masks, unions = found[: len(carries)], found[len(carries) : len(carries) + len(sums)]
            joined = [old | new for old, new in zip(before[1], unions, strict=True)]
            return varying_over(self.axes, (masks, joined)), found[len(carries) + len(sums) :]

        if entering or jaxpr.effects:
            arrays, xs = self._arrays(self.demanded[: self.carries], step.states), jax.tree.leaves(self.xs)
            none = [jnp.zeros(jaxpr.outvars[number].aval.shape, bool) for number in sums]
            start = [arrays[number] for number in carries], varying_over(self.axes, none)
            given = [xs[number - count] for number in scanned]
            (masks, unions), stacked = scan_like(self.scan.step.equation, body, start, given, backwards=True)
            values |= zip((*carries, *sums, *each), (*masks, *unions, *stacked), strict=True)
        number_of = {place(number): number for number in values if number >= count}
        places = [number_of[place(number)] for number in range(count, len(sources))]
        unions = [values[number] for number in places[: first - count]]
        kept = [_Kept(values[number], bool(sources[number])) for number in places[first - count :]]
        return [values[n] for n, mask in enumerate(of_carries) if not isinstance(mask, bool)], unions, kept

    def _kinds(self, one: TrimmedBody) -> tuple[list[Mask], list[Mask], list[Mask]]:
        """The masks of a step: carried ones, those whose union counts, and those of this step alone."""
        consts, rest = one.operands[: self.consts], one.operands[self.consts :]
        carry, xs = rest[: self.carries], rest[self.carries :]
        invariant, scanned = one.needed[: self.scan.invariant], one.needed[self.scan.invariant :]
        return carry, [*consts, *invariant], [*xs, *scanned]

    def _settled(self) -> _MaskStep:
        """One step under an assumption about the carries that holds at every step."""
        states = [state_of(mask) for mask in self.demanded[: self.carries]]
        while True:
            step = self._traced(states)
            before, _, _ = self._kinds(step.body)
            merged = [joined([state, state_of(mask)]) for state, mask in zip(states, before, strict=True)]
            if merged == states:
                return step
            states = merged

    def _traced(self, states: list[State]) -> _MaskStep:
        bodies: list[TrimmedBody] = []

        def step(carry: Operands, slices: Any) -> Any:
            one = self._one(restored(states, carry), slices)
            bodies.append(one.forgotten())
            before, in_any, in_each = self._kinds(one)
            return self._arrays(before, states), arrays_in(in_any), arrays_in(in_each), one.own

        def inputs(xs: Any) -> Any:
            first = lambda stacked: lax.index_in_dim(stacked, 0, keepdims=False)
            return self._arrays([True] * len(states), states), jax.tree.map(first, xs)

        closed, shapes = jax.make_jaxpr(inputs, return_shape=True)(self.xs)
        avals = jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)
        jaxpr, consts = opened(jax.make_jaxpr(step)(*avals))
        return _MaskStep(states, bodies[0], jaxpr, consts)

    def _one(self, carry: list[Mask], slices: Any) -> TrimmedBody:
        known, fed_arrays, demanded_arrays = slices
        outside = self.consts + self.carries
        fed = [*self.fed[:outside], *restored(self.fed[outside:], fed_arrays)]
        demanded = [*carry, *restored(self.demanded[self.carries :], demanded_arrays)]
        return self.scan.trimmed(known, fed, demanded, self.guard)

    def _arrays(self, masks: list[Mask], states: list[State]) -> list[jax.Array]:
        """As `as_arrays`; inside `shard_map`, all vary over every mesh axis that any varies over, as carries must."""
        return varying_over(self.axes, as_arrays(masks, states, self.carry_avals))


def _entering(wanted: list[int], sources: Sequence[int], count: int) -> list[int]:
    """Which inputs of a step some of its results are computed from, in the course of a scan.

    Args:
        wanted: The numbers of these results.
        sources: For each result, a bit for each input that it is computed from.
        count: How many results, and inputs, are carried.
    """
    entering = [number for number in wanted if number < count]
    while True:
        read = union(sources[number] for number in (*wanted, *(n for n in entering if n < count)))
        grown = [n for n in range(max(read.bit_length(), count)) if read >> n & 1 or (n < count and n in wanted)]
        if grown == entering:
            return entering
        entering = grown


def _scan_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    parts = scan_parts(step.equation)
    if parts.length == 0:
        return _no_steps(step, parts, demanded, guard)
    scan = _Scan(step)
    # A step needs a mask of its own.
    of_wires, demanded = iter(whole(step.of_wires(fed), step.wires)), whole(demanded, step.results)
    fed = [next(of_wires) if isinstance(operand, Wire) else False for operand in step.operands]
    consts, carry, xs = scan.tangents(fed)
    masked = _MaskedScan(scan, [*consts, *[True] * len(carry), *xs], scan.tangent_outputs(demanded), guard)
    masks = masked.run()
    of_tangents = iter(masks.demanded)
    of_inputs = [next(of_tangents) if linear else False for linear in scan.linear]
    return step.of_wires(of_inputs), scan.emit(masks, guard)


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
