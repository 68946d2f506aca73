"""Masks through a loop: backward, in a loop that runs against that of the tangents."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from .._programs import Operands, evaluate, opened, scan_like, scan_parts, varying_axes
from .backward import settled
from .body import State, TrimmedBody, as_arrays, joined, state_of, trimmed_body
from .known import remembering
from .mask import Mask, arrays_in, restored, varying_over
from .program import LinearProgram, Step, Wire, whole, wired_outputs
from .trim import RULES, Emit, Guard, Rule


class _Scan:
    """A scan whose operands are sorted into constants, carries and scanned ones, and into tangents and values.

    Attributes:
        step: The scan.
        linear: For each input of the body, whether it is a tangent there.
        known: The values from outside, carried ones stacked: one for each other input of the body.
        invariant: How many of these are the same at every step.
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
        self.apart: set[int] = set()

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

        @remembering()
        def body(carry: Operands, xs: Operands) -> tuple[Operands, Operands]:
            outputs = self.program([*consts, *carry, *xs]).outputs[: self.carried]
            return [value for value, linear in zip(outputs, self.carries, strict=True) if not linear], carry

        final, stacked = scan_like(self.step.equation, body, carry, xs)
        return final, stacked

    def tangent_outputs(self, values: Sequence[Any]) -> list[Any]:
        """From one value per output, those that are tangents: carries and stacked ones."""
        carries = [v for v, linear in zip(values[: self.carried], self.carries, strict=True) if linear]
        return [*carries, *values[self.carried :]]

    @remembering()
    def trimmed(self, known: Operands, fed: Sequence[Mask], demanded: Sequence[Mask], guard: Guard) -> TrimmedBody:
        """One step without its dead edges."""
        program = self.program(known)
        program = dataclasses.replace(program, outputs=self.tangent_outputs(program.outputs))
        return trimmed_body(program, known, fed, demanded, guard, self.apart, True, self.invariant)

    def run(self, trimmed: TrimmedBody, outside: Operands, own: Sequence[Any], tangents: Sequence[Any]) -> Operands:
        """The scan of the tangents alone."""
        consts, carry, xs = self.tangents(self.step.operands_with(tangents))
        invariant, scanned = outside[: self.invariant], outside[self.invariant :]

        def body(carry: Operands, x: Any) -> tuple[Operands, Operands]:
            xs, scanned, own = x
            coefficients = trimmed.merged([*invariant, *scanned], own)
            outputs = evaluate(trimmed.jaxpr, [], [*coefficients, *consts, *carry, *xs])
            return outputs[: len(carry)], outputs[len(carry) :]

        carry, stacked = scan_like(self.step.equation, body, carry, (xs, scanned, list(own)))
        tangent, known = iter(carry), iter(self.final)
        return [*(next(tangent) if linear else next(known) for linear in self.carries), *stacked]


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
            scan.known[scan.invariant :],
            arrays_in(fed[self.consts + self.carries :]),
            arrays_in(demanded[self.carries :]),
        )

    def run(self) -> tuple[list[Mask], list[Mask], TrimmedBody, Operands]:
        """Run the scan, as far as there is anything to compute.

        Returns:
            The demanded masks of the tangents, the masks of the elements that are needed of the known values, one
            step, and the coefficients that the steps computed, stacked.
        """
        states, one = self._settled()
        carried, summed, stacked = (list(map(state_of, masks)) for masks in self._kinds(one))
        _, summed_avals, stacked_avals = self._kinds(one)
        own: Operands = []
        of_carry, of_summed, of_stacked = list(states), list(summed), list(stacked)
        if None in (*states, *carried, *summed, *stacked) or one.own:
            steps: list[TrimmedBody] = []

            def body(before: Any, x: Any) -> Any:
                step = self._one(restored(states, before[0]), x)
                steps[:] = [step.forgotten()]
                carried, in_any, in_each = self._kinds(step)
                masks = self._arrays(carried, states, self.carry_avals)
                union = self._arrays(in_any, summed, summed_avals)
                union = [old | new for old, new in zip(before[1], union, strict=True)]
                return (masks, union), (as_arrays(in_each, stacked, stacked_avals), step.own)

            none = [False] * len(summed)
            start = (
                self._arrays(self.demanded[: self.carries], states, self.carry_avals),
                self._arrays(none, summed, summed_avals),
            )
            equation = self.scan.step.equation
            (masks, union), (each, own) = scan_like(equation, body, start, self.xs, backwards=True)
            of_carry, of_summed, of_stacked = restored(states, masks), restored(summed, union), restored(stacked, each)
            (one,) = steps
        demanded = [*of_summed[: self.consts], *of_carry, *of_stacked[: self.scanned]]
        return demanded, [*of_summed[self.consts :], *of_stacked[self.scanned :]], one, own

    def _kinds(self, one: TrimmedBody) -> tuple[list[Mask], list[Mask], list[Mask]]:
        """The masks of a step: carried ones, those whose union counts, and those of this step alone."""
        consts, rest = one.operands[: self.consts], one.operands[self.consts :]
        carry, xs = rest[: self.carries], rest[self.carries :]
        invariant, scanned = one.needed[: self.scan.invariant], one.needed[self.scan.invariant :]
        return carry, [*consts, *invariant], [*xs, *scanned]

    def _settled(self) -> tuple[list[State], TrimmedBody]:
        """What is known about the masks of the carries at every step, and one step under that assumption."""
        states = [state_of(mask) for mask in self.demanded[: self.carries]]
        while True:
            one = self._probed(states)
            before, _, _ = self._kinds(one)
            merged = [joined([state, state_of(mask)]) for state, mask in zip(states, before, strict=True)]
            if merged == states:
                return states, one
            states = merged

    def _probed(self, states: list[State]) -> TrimmedBody:
        """One step, as far as it is known while tracing."""
        found: list[TrimmedBody] = []

        def probe(xs: Any) -> None:
            x = jax.tree.map(lambda stacked: lax.index_in_dim(stacked, 0, keepdims=False), xs)
            arrays = self._arrays([True] * len(states), states, self.carry_avals)
            found.append(self._one(restored(states, arrays), x).forgotten())

        jax.eval_shape(probe, self.xs)
        return found[0]

    def _one(self, carry: list[Mask], x: Any) -> TrimmedBody:
        known, fed_arrays, demanded_arrays = x
        outside = self.consts + self.carries
        fed = [*self.fed[:outside], *restored(self.fed[outside:], fed_arrays)]
        demanded = [*carry, *restored(self.demanded[self.carries :], demanded_arrays)]
        return self.scan.trimmed([*self.scan.known[: self.scan.invariant], *known], fed, demanded, self.guard)

    def _arrays(self, masks: list[Mask], states: list[State], avals: list[Any]) -> list[jax.Array]:
        """As `as_arrays`; inside `shard_map`, all vary over every mesh axis that any varies over, as carries must."""
        return varying_over(self.axes, as_arrays(masks, states, avals))


def _scan_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    parts = scan_parts(step.equation)
    if parts.length == 0:
        others = [False] * (len(step.operands) - parts.consts - parts.carried)
        inputs = [*[False] * parts.consts, *demanded[: parts.carried], *others]
        return step.of_wires(inputs), guard.whole(step).run
    scan = _Scan(step)
    # A step needs a mask of its own.
    of_wires, demanded = iter(whole(step.of_wires(fed), step.wires)), whole(demanded, step.results)
    fed = [next(of_wires) if isinstance(operand, Wire) else False for operand in step.operands]
    consts, carry, xs = scan.tangents(fed)
    masked = _MaskedScan(scan, [*consts, *[True] * len(carry), *xs], scan.tangent_outputs(demanded), guard)
    operands, needed, body, own = masked.run()
    outside = body.outside(scan.known, needed, guard)
    of_tangents = iter(operands)
    of_inputs = [next(of_tangents) if linear else False for linear in scan.linear]
    return step.of_wires(of_inputs), lambda tangents: scan.run(body, outside, own, tangents)


def _scan_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    # Which steps feed a carry is not tracked: it only matters for a function that is constant from there on.
    return [True] * len(step.results)


RULES["scan"] = Rule(_scan_fed, _scan_trim)
