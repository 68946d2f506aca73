"""One equation through which tangents go, and which values depend on tangents."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from .._programs import Operands, bind, by_value, jaxpr_and_consts
from .masks import Shape


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation through which tangents go.

    Attributes:
        equation: The equation.
        operands: The values of its fixed operands; what stands for a tangent is not read.
        linear: For each of its operands, whether it is a tangent.
    """

    equation: JaxprEqn
    operands: Sequence[Any]
    linear: list[bool]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.equation.primitive.name)

    @property
    def tangents(self) -> list[Any]:
        """The avals of the operands that are tangents."""
        return self.of_tangents([atom.aval for atom in self.equation.invars])

    @property
    def results(self) -> list[Any]:
        """The avals of the results."""
        return [variable.aval for variable in self.equation.outvars]

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        return tuple(self.results[0].shape)

    @property
    def position(self) -> int:
        """The position of the first tangent among the operands."""
        return self.linear.index(True)

    @property
    def fixed(self) -> Operands:
        """The operands that are not tangents."""
        return [operand for operand, is_tangent in zip(self.operands, self.linear, strict=True) if not is_tangent]

    def of_tangents(self, values: Sequence[Any]) -> list[Any]:
        """From one value per operand, such as a mask, those of the tangents."""
        return [value for value, is_tangent in zip(values, self.linear, strict=True) if is_tangent]

    def with_fixed(self, fixed: Sequence[Any]) -> "Step":
        """The same step with other fixed operands."""
        rest = iter(fixed)
        return dataclasses.replace(self, operands=[None if is_tangent else next(rest) for is_tangent in self.linear])

    def run(self, tangents: Sequence[Any]) -> Operands:
        """The results for these tangents."""
        rest = iter(tangents)
        pairs = zip(self.operands, self.linear, strict=True)
        return bind(self.equation, [next(rest) if is_tangent else value for value, is_tangent in pairs])


def linear_outputs(jaxpr: Any, linear: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr depend on the inputs that are tangents."""
    return list(map(bool, by_value(jaxpr_and_consts(jaxpr)[0], list(map(int, linear)), by_element=False).outputs))


def carried_tangents(body: Any, linear: Sequence[bool], consts: int, carried: int) -> list[bool]:
    """For each input of a loop's body, whether it depends on a tangent at any step; a carry may take one up."""
    linear, carries = list(linear), slice(consts, consts + carried)
    while True:
        outputs = linear_outputs(body, linear)[:carried]
        grown = [before or after for before, after in zip(linear[carries], outputs, strict=True)]
        if grown == linear[carries]:
            return linear
        linear[carries] = grown
