"""The masks of a loop: a scan that runs against that of the tangents, of what no step has in common."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from .._programs import Operands, evaluate, opened, scan_like, step_through, union, varying_axes
from .body import State, TrimmedBody, as_arrays, joined, state_of
from .loop import Loop
from .mask import Mask, arrays_in, restored, varying_over
from .program import without_dead_code
from .trim import Guard


class Kept(NamedTuple):
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


class Masks(NamedTuple):
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
    own: list[Kept]


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


class _Part:
    """The part of a step of the masks that a loop has to compute.

    What is the same at every step is computed once, outside, and what nobody needs not at all.

    Args:
        step: The step.
        count: How many of its inputs, and of its results, are carried.
        united: How many of its results count by their union over all steps. The others count for a step alone.

    Attributes:
        count: As given.
        sums: The numbers of the results that differ from step to step and count by their union.
        each: The numbers of those that count for a step alone.
    """

    def __init__(self, step: _MaskStep, count: int, united: int):
        self._step, self.count, self._first = step, count, count + united
        inputs = len(step.jaxpr.invars)
        # Whatever an equation takes has to be there, even if its value does not depend on it.
        bits = [1 << number for number in range(inputs)]
        read = lambda equation, given: [union(given) | bool(equation.effects) << inputs] * len(equation.outvars)
        # For each result, a bit for each input that it is computed from, and one for effects.
        self._sources = step_through(step.jaxpr, [0] * len(step.consts), bits, read, literal=lambda literal: 0)
        numbers = range(count, len(self._sources))
        self._moving = list({self._place(number): number for number in numbers if self._sources[number]}.values())
        self.sums = [number for number in self._moving if number < self._first]
        self.each = [number for number in self._moving if number >= self._first]

    def _place(self, number: int) -> Any:
        # The same mask may count for several operands.
        return number < self._first, id(self._step.jaxpr.outvars[number])

    def run(self, jaxpr: Jaxpr, results: Sequence[int], operands: Mapping[int, Any]) -> Operands:
        """Some results of the step, from the inputs that they are computed from, by number."""
        needed = without_dead_code(jaxpr, [jaxpr.outvars[number] for number in results])
        given = [operands.get(number) for number in range(len(jaxpr.invars))]
        return evaluate(needed, self._step.consts, given)

    def outside(self) -> dict[int, Any]:
        """The results that are the same at every step."""
        jaxpr = self._step.jaxpr
        fixed = [number for number, source in enumerate(self._sources) if not source]
        pure = jaxpr.replace(eqns=[equation for equation in jaxpr.eqns if not equation.effects])
        return dict(zip(fixed, self.run(pure, fixed, {}), strict=True))

    def entering(self, carried: Sequence[int]) -> list[int]:
        """The inputs that the loop reads, if it hands on these carries."""
        if self._step.jaxpr.effects:
            return list(range(len(self._step.jaxpr.invars)))
        carries, read = list[int](), 0
        while True:
            read = union(self._sources[number] for number in (*carried, *self._moving, *carries))
            grown = [n for n in range(self.count) if read >> n & 1 or n in carried]
            if grown == carries:
                return [*carries, *(n for n in range(self.count, read.bit_length()) if read >> n & 1)]
            carries = grown

    def sorted(self, values: Mapping[int, Any]) -> tuple[Operands, list[Kept]]:
        """From the values of results, by number: the unions, and what each step computed."""
        number_of = {self._place(number): number for number in values if number >= self.count}
        places = [number_of[self._place(number)] for number in range(self.count, len(self._sources))]
        united = self._first - self.count
        kept = [Kept(values[number], bool(self._sources[number])) for number in places[united:]]
        return [values[number] for number in places[:united]], kept


class Sweep:
    """The scan of the masks, which runs against the scan of the tangents.

    Args:
        loop: The scan of the tangents.
        fed: Masks of the tangents of the body, those of scanned ones stacked.
        demanded: Masks of the tangents of the outputs, those of stacked ones stacked.
        guard: What replaces coefficients outside.
    """

    def __init__(self, loop: Loop, fed: list[Mask], demanded: list[Mask], guard: Guard):
        self.loop, self.fed, self.demanded, self.guard = loop, fed, demanded, guard
        consts, carry, xs = loop.tangents(loop.avals)
        self.consts, self.carries, self.scanned = len(consts), len(carry), len(xs)
        self.carry_avals = carry
        avals = [*(wire.aval for wire in loop.step.wires), *map(jax.typeof, loop.known)]
        self.axes = frozenset[Any]().union(*map(varying_axes, avals))
        self.xs = (
            loop.slices,
            arrays_in(fed[self.consts + self.carries :]),
            arrays_in(demanded[self.carries :]),
        )

    def run(self) -> Masks:
        """Run the scan, as far as there is anything to compute."""
        step = self._settled()
        before, in_any, in_each = self._kinds(step.body)
        carried, summed, kept = self._swept(step, before, in_any)
        unions, of_each = restored(in_any, summed), iter(kept)
        of_steps = [mask if isinstance(mask, bool) else next(of_each) for mask in in_each]
        of_tangents = [mask if isinstance(mask, bool) else mask.stacked for mask in of_steps[: self.scanned]]
        return Masks(
            [*unions[: self.consts], *restored(before, carried), *of_tangents],
            [*unions[self.consts :], *of_steps[self.scanned :]],
            step.body,
            list(of_each),
        )

    def _swept(self, step: _MaskStep, before: list[Mask], in_any: list[Mask]) -> tuple[Operands, Operands, list[Kept]]:
        """What the step finds in the course of the scan: the carried masks at its end, the unions, and all else."""
        of_carries = [mask for mask, state in zip(before, step.states, strict=True) if state is None]
        part = _Part(step, len(of_carries), len(arrays_in(in_any)))
        values = part.outside()
        wanted = [n for n, mask in enumerate(of_carries) if n not in values and not isinstance(mask, bool)]
        entering = part.entering(wanted)
        if entering or step.jaxpr.effects:
            carries, scanned = [n for n in entering if n < part.count], [n for n in entering if n >= part.count]

            def body(before: Any, x: Operands) -> Any:
                results = [*carries, *part.sums, *part.each]
                found = part.run(step.jaxpr, results, dict(zip(entering, (*before[0], *x), strict=True)))
                masks, unions = found[: len(carries)], found[len(carries) :][: len(part.sums)]
                joined = [old | new for old, new in zip(before[1], unions, strict=True)]
                return varying_over(self.axes, (masks, joined)), found[len(carries) + len(part.sums) :]

            arrays, xs = self._arrays(self.demanded[: self.carries], step.states), jax.tree.leaves(self.xs)
            none = [jnp.zeros(step.jaxpr.outvars[number].aval.shape, bool) for number in part.sums]
            start = [arrays[number] for number in carries], varying_over(self.axes, none)
            given = [xs[number - part.count] for number in scanned]
            (masks, unions), stacked = scan_like(self.loop.step.equation, body, start, given, backwards=True)
            values |= zip((*carries, *part.sums, *part.each), (*masks, *unions, *stacked), strict=True)
        unions, kept = part.sorted(values)
        return [values[n] for n, mask in enumerate(of_carries) if not isinstance(mask, bool)], unions, kept

    def _kinds(self, one: TrimmedBody) -> tuple[list[Mask], list[Mask], list[Mask]]:
        """The masks of a step: carried ones, those whose union counts, and those of this step alone."""
        consts, rest = one.operands[: self.consts], one.operands[self.consts :]
        carry, xs = rest[: self.carries], rest[self.carries :]
        invariant, scanned = one.needed[: self.loop.invariant], one.needed[self.loop.invariant :]
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
        return self.loop.trimmed(known, fed, demanded, self.guard)

    def _arrays(self, masks: list[Mask], states: list[State]) -> list[jax.Array]:
        """As `as_arrays`; inside `shard_map`, all vary over every mesh axis that any varies over, as carries must."""
        return varying_over(self.axes, as_arrays(masks, states, self.carry_avals))
