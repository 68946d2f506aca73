"""A scan of a linear program, taken apart: what is a tangent in it, what is known, and a step without dead edges."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._programs import Operands, opened, scan_like, scan_parts
from .backward import settled
from .body import TrimmedBody, trimmed_body
from .known import narrowed, remembering, widened
from .mask import Mask
from .program import LinearProgram, Step, wired_outputs
from .trim import Guard


class Loop:
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
