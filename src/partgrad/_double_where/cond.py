"""Masks through a conditional: they go through a conditional of their own."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._programs import Operands, branches_of, evaluate, switch_like, varying_axes, varying_like
from .body import TrimmedBody, as_arrays, joined, state_of, trimmed_body
from .known import remembering
from .mask import Mask, arrays_in, restored, varying_over
from .program import LinearProgram, Step
from .trim import RULES, Emit, Guard, Rule, one_filler, outputs_fed


class _Branches:
    """The branches of a conditional as linear programs of its operands without the index."""

    def __init__(self, step: Step):
        self.equation, self.index, self.jaxprs = step.equation, step.operands[0], branches_of(step.equation)
        self.linear, self.known = step.linear[1:], step.known[1:]
        self.wires, self.results = step.wires, step.results
        self.apart: defaultdict[int, set[int]] = defaultdict(set)

    def program(self, jaxpr: Any, known: Operands) -> LinearProgram:
        return LinearProgram.at(jaxpr, self.linear, known)

    def probed(self, of_branch: Callable[..., Any], *operands: Any) -> list[Any]:
        """What a function returns for each branch, as far as it is known while tracing."""
        found: list[Any] = []
        for jaxpr in self.jaxprs:
            jax.eval_shape(lambda *values, jaxpr=jaxpr: found.append(of_branch(jaxpr, *values)), *operands)
        return found

    def switch(self, of_branch: Callable[..., Any], *operands: Any) -> Any:
        """What a function returns for the branch that is taken."""
        functions = [
            lambda *values, number=number, jaxpr=jaxpr: of_branch(number, jaxpr, *values)
            for number, jaxpr in enumerate(self.jaxprs)
        ]
        return switch_like(self.equation, self.index, functions, *operands)

    def masks(self, of_branch: Callable[..., Any], *operands: Any) -> Any:
        """The masks a function returns for the branch that is taken, varying over all mesh axes of a `shard_map`."""
        values = jax.tree.leaves((self.index, self.known, operands))
        avals = [*map(jax.typeof, values), *(wire.aval for wire in (*self.wires, *self.results))]
        axes = frozenset[Any]().union(*map(varying_axes, avals))
        return self.switch(lambda *values: varying_over(axes, of_branch(*values)), *operands)


def _cond_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    branches, masks = _Branches(step), step.of_wires(fed)

    @remembering(inside=True)
    def one(jaxpr: Any, known: Operands, arrays: Operands) -> list[Mask]:
        return outputs_fed(branches.program(jaxpr, known), restored(masks, arrays))

    given = (branches.known, arrays_in(masks))
    found = branches.probed(lambda *values: list(map(state_of, one(*values))), *given)
    states = [joined(of_branches) for of_branches in zip(*found, strict=True)]
    if None not in states:
        return list(states)
    avals = [wire.aval for wire in branches.results]
    arrays = branches.masks(lambda _, jaxpr, *values: as_arrays(one(jaxpr, *values), states, avals), *given)
    return restored(states, arrays)


def _cond_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    branches, fed = _Branches(step), step.of_wires(fed)

    @remembering(inside=True)
    def one(jaxpr: Any, known: Operands, fed_arrays: Operands, demanded_arrays: Operands) -> TrimmedBody:
        program = branches.program(jaxpr, known)
        masks, apart = (restored(fed, fed_arrays), restored(demanded, demanded_arrays)), branches.apart[id(jaxpr)]
        return trimmed_body(program, known, *masks, guard, apart)

    given = (branches.known, arrays_in(fed), arrays_in(demanded))
    found: list[TrimmedBody] = branches.probed(lambda *values: one(*values).forgotten(), *given)
    operands = [joined(list(map(state_of, masks))) for masks in zip(*(t.operands for t in found), strict=True)]
    needed = [joined(list(map(state_of, masks))) for masks in zip(*(t.needed for t in found), strict=True)]
    own = [trimmed.own for trimmed in found]

    def masks_of(number: int, jaxpr: Any, *values: Any) -> Any:
        trimmed = one(jaxpr, *values)
        found[number] = trimmed.forgotten()
        of_all = [[varying_like(jnp.ones(c.shape, c.dtype), c) for c in of_branch] for of_branch in own]
        of_all[number] = trimmed.own
        in_wires = as_arrays(trimmed.operands, operands, [wire.aval for wire in branches.wires])
        in_known = as_arrays(trimmed.needed, needed, list(map(jax.typeof, branches.known)))
        return in_wires, in_known, of_all

    in_wires, in_known, of_all = [], [], [list[Any]() for _ in found]
    if None in operands or None in needed or any(own):
        in_wires, in_known, of_all = branches.masks(masks_of, *given)
    used = {origin for trimmed in found for origin in trimmed.origins}
    fillers = [functools.reduce(one_filler, each) for each in zip(*(t.fillers for t in found), strict=True)]
    triples = enumerate(zip(branches.known, restored(needed, in_known), fillers, strict=True))
    outside = [guard.coefficient(v, m, filler, True) if number in used else None for number, (v, m, filler) in triples]

    def run(tangents: Sequence[Any]) -> Operands:
        def branch(number: int, _: Any, *tangents: Any) -> Operands:
            coefficients = found[number].merged(outside, of_all[number])
            results = evaluate(found[number].jaxpr, [], [*coefficients, *tangents])
            return [varying_like(r, wire.aval) for r, wire in zip(results, branches.results, strict=True)]

        return branches.switch(branch, *tangents)

    return restored(operands, in_wires), run


RULES["cond"] = Rule(_cond_fed, _cond_trim)
