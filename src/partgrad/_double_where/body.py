"""The body of a loop or a branch, without its dead edges.

A loop or branch of its own computes the masks inside, ahead of the tangents. It leaves the coefficients behind, so the
program for the tangents stays linear and JAX can transpose it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from .._programs import Operands, named
from .mask import Mask, full_like
from .program import LinearProgram, split
from .trim import Guard, Recorder, feed, trim

# What is known about a mask before anything is computed: `True`, `False`, or None for an array.
State = bool | None


def state_of(mask: Mask) -> State:
    """What is known about a mask."""
    return mask if isinstance(mask, bool) else None


def joined(states: Sequence[State]) -> State:
    """What is known about a mask that is one of several."""
    return states[0] if all(state is states[0] for state in states) else None


def as_arrays(masks: Sequence[Mask], states: Sequence[State], avals: Sequence[Any]) -> list[jax.Array]:
    """The masks of which nothing else is known, as arrays spread over devices like their tangents."""
    triples = zip(masks, states, avals, strict=True)
    return [full_like(mask, aval) for mask, state, aval in triples if state is None]


# Each of these needs its operands at some elements, and a copy of them is no larger than its tangent.
_SPLIT = named("mul div triangular_solve tridiagonal_solve")


@dataclasses.dataclass
class TrimmedBody:
    """A body without its dead edges.

    Attributes:
        operands: The demanded masks of its inputs.
        needed: The masks of the elements that are needed of the values from outside.
        fillers: What stands for the other elements.
        jaxpr: The body, from coefficients and tangents to tangents.
        coefficients: The values of the coefficients.
        origins: For each of these, the number of the value from outside that it is, or None.
    """

    operands: list[Mask]
    needed: list[Mask]
    fillers: list[Any]
    jaxpr: Jaxpr
    coefficients: Operands
    origins: list[int | None]

    def forgotten(self) -> "TrimmedBody":
        """What remains when the trace of the body has ended: shapes in place of its tracers."""
        left = lambda values: [value.aval if isinstance(value, jax.core.Tracer) else value for value in values]
        masks = {"operands": left(self.operands), "needed": left(self.needed)}
        return dataclasses.replace(self, coefficients=left(self.coefficients), **masks)

    @property
    def own(self) -> Operands:
        """The coefficients that were computed in the body."""
        return [c for c, origin in zip(self.coefficients, self.origins, strict=True) if _is_own(c, origin)]

    def merged(self, outside: list[Any], own: Sequence[Any]) -> Operands:
        """The coefficients: values from outside, merged with those computed in the body."""
        rest = iter(own)
        pairs = zip(self.coefficients, self.origins, strict=True)
        return [next(rest) if _is_own(c, origin) else c if origin is None else outside[origin] for c, origin in pairs]


def _is_own(coefficient: Any, origin: int | None) -> bool:
    return origin is None and isinstance(coefficient, jax.core.Tracer | jax.core.ShapedArray)


def trimmed_body(
    program: LinearProgram,
    outside: Operands,
    fed: Sequence[Mask],
    demanded: Sequence[Mask],
    guard: Guard,
    apart: set[int],
    cuts: bool = False,
    invariant: int = 0,
) -> TrimmedBody:
    """Trim a body.

    Args:
        program: The body.
        outside: The values from outside: what is needed of them is recorded, they are not replaced here.
        fed: Masks of its inputs.
        demanded: Masks of its outputs.
        guard: The guard of the program that the body belongs to.
        apart: The numbers of the values from outside that are replaced here nevertheless; what is found is added.
        cuts: Whether a value from outside may stay as it is where no live edge needs it.
        invariant: How many of these values are the same at every step of a loop.
    """
    masks = feed(program, fed)
    others = {id(value) for step in program.steps if step.name not in _SPLIT for value in step.known}
    # Every step of a loop would keep a copy, which of a matrix may be larger than all else that it keeps.
    joined = {number for number in range(invariant) if id(outside[number]) in others}
    while True:
        recorder = Recorder(guard, outside, cuts, apart, joined)
        operands, emit = trim(program, masks, demanded, recorder)
        if not recorder.clashing:
            break
        apart |= recorder.clashing
    jaxpr, coefficients = split(emit, [wire.aval for wire in program.inputs])
    numbers = {id(value): number for number, value in enumerate(outside)}
    origins = [numbers.get(id(coefficient)) for coefficient in coefficients]
    return TrimmedBody(operands, recorder.needed, recorder.fillers, jaxpr, coefficients, origins)
