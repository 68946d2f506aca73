"""A linear program: the equations of a derivative that carry tangents, with everything else already computed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._compat import has_side_effects, transposed_loop
from .._programs import (
    CALLS,
    Operands,
    bind,
    by_value,
    is_floating,
    jaxpr_and_consts,
    primal_jaxpr,
    with_constants_as_inputs,
    zeros_like_aval,
)
from .follow import follow
from .masks import Shape


class Wire:
    """A tangent: an input of a linear program, or the result of a step.

    Attributes:
        aval: Its shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return tuple(self.aval.shape)


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation through which tangents go.

    Attributes:
        equation: The equation.
        operands: For each of its operands a wire, or the value of a fixed one.
        results: A wire for each of its results.
    """

    equation: JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[Wire, ...]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.equation.primitive.name)

    @property
    def wires(self) -> list[Wire]:
        """The operands that are tangents."""
        return [operand for operand in self.operands if isinstance(operand, Wire)]

    @property
    def linear(self) -> list[bool]:
        """For each operand, whether it is a tangent."""
        return [isinstance(operand, Wire) for operand in self.operands]

    @property
    def position(self) -> int:
        """The position of the first tangent among the operands."""
        # Not with `index`, which would compare it with arrays.
        return next(number for number, operand in enumerate(self.operands) if isinstance(operand, Wire))

    @property
    def fixed(self) -> Operands:
        """The operands that are not tangents."""
        return [operand for operand in self.operands if not isinstance(operand, Wire)]

    def of_wires(self, values: Sequence[Any]) -> list[Any]:
        """From one value per operand, such as a mask, those of the tangents."""
        return [value for value, linear in zip(values, self.linear, strict=True) if linear]

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        return self.results[0].shape

    def operands_with(self, tangents: Sequence[Any]) -> Operands:
        """The operands, with tangents in place of the wires."""
        rest = iter(tangents)
        return [next(rest) if isinstance(operand, Wire) else operand for operand in self.operands]

    def with_fixed(self, fixed: Sequence[Any]) -> "Step":
        """The same step with other fixed operands."""
        rest = iter(fixed)
        operands = tuple(operand if isinstance(operand, Wire) else next(rest) for operand in self.operands)
        return dataclasses.replace(self, operands=operands)

    def run(self, tangents: Sequence[Any]) -> Operands:
        """The results for these tangents."""
        return bind(self.equation, self.operands_with(tangents))

    def transposed(self, cotangents: Sequence[Any]) -> Operands:
        """What JAX's transpose of the step makes of cotangents of the results: one value for each wire.

        Args:
            cotangents: One for each result, or None for a zero, which the rule of a `custom_vjp` may ask for.
        """
        if self.name == "scan":
            pairs = [(number, o) for number, o in enumerate(self.operands) if not isinstance(o, Wire)]
            return transposed_loop(self.equation, pairs, list(cotangents))
        return transposed(self.run, [wire.aval for wire in self.wires], cotangents)


@dataclasses.dataclass(frozen=True)
class LinearProgram:
    """The steps from the tangents of some inputs to the tangents of some outputs.

    Attributes:
        inputs: The wires that come in.
        steps: The steps, in order.
        outputs: For each output a wire, or the value if no tangent reaches it.
    """

    inputs: list[Wire]
    steps: list[Step]
    outputs: list[Any]

    @classmethod
    def of(cls, jaxpr: Any, operands: Sequence[Any]) -> "LinearProgram":
        """Take a jaxpr apart, calls opened, and compute what does not depend on a tangent.

        Args:
            jaxpr: A jaxpr that is linear in its operands that are wires.
            operands: A wire or a value for each of its inputs.
        """
        program = cls([operand for operand in operands if isinstance(operand, Wire)], [], [])
        program.outputs.extend(into_steps(*jaxpr_and_consts(jaxpr), list(operands), program.steps))
        return program

    def needed(self) -> list[Step]:
        """The steps that an output depends on."""
        needed, steps = {wire for wire in self.outputs if isinstance(wire, Wire)}, list[Step]()
        for step in reversed(self.steps):
            if not needed.isdisjoint(step.results):
                needed.update(step.wires)
                steps.append(step)
        return steps[::-1]

    def run(self, tangents: Sequence[Any]) -> Operands:
        """The tangents of the outputs, as JAX computes them; None where none arrives."""
        found = dict(zip(self.inputs, tangents, strict=True))
        for step in self.steps:
            found.update(zip(step.results, step.run([found[wire] for wire in step.wires]), strict=True))
        return [found[wire] if isinstance(wire, Wire) else None for wire in self.outputs]


def transposed(run: Callable[[Sequence[Any]], Operands], avals: Sequence[Any], cotangents: Sequence[Any]) -> Operands:
    """The cotangents that the transpose of a linear function returns for those of its results; None is a zero."""
    given = [number for number, cotangent in enumerate(cotangents) if cotangent is not None]

    def function(*tangents: Any) -> Operands:
        results = run(tangents)
        return [results[number] for number in given]

    return list(jax.linear_transpose(function, *avals)([cotangents[number] for number in given]))


def into_steps(
    jaxpr: Jaxpr, consts: Operands, operands: Sequence[Any], steps: list[Step], source: JaxprEqn | None = None
) -> list[Any]:
    """The outputs of a jaxpr, wires or values; the equations through which wires go become steps.

    Args:
        jaxpr: An open jaxpr.
        consts: The values of its constants.
        operands: A wire or a value for each of its inputs.
        steps: What the steps are added to.
        source: The equation of whose derivative this is a part, if its equations have no source lines of their own.
    """
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    value_of = lambda atom, divides=False: number_in(atom, divides) if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        if source is not None:
            equation = equation.replace(source_info=source.source_info, ctx=source.ctx)
        given = [value_of(atom, equation.primitive.name == "div") for atom in equation.invars]
        if not any(isinstance(value, Wire) for value in given):
            results = bind(equation, given)
            follow(equation, given, results)
        elif equation.primitive.name in CALLS:
            results = into_steps(*jaxpr_and_consts(primal_jaxpr(equation)), given, steps, source)
        else:
            results = [Wire(variable.aval) for variable in equation.outvars]
            steps.append(Step(equation, tuple(given), tuple(results)))
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def number_in(literal: Literal, divides: bool = False) -> Any:
    """The number in a literal."""
    is_kept = not is_floating(literal.aval) or np.all(np.isfinite(literal.val) & ((literal.val != 0) | (not divides)))
    # A rule may have to replace it by a number of the same dtype. Otherwise it stays weak.
    return literal.val if is_kept else np.asarray(literal.val, literal.aval.dtype)


def split(function: Callable[[Sequence[Any]], Operands], avals: Sequence[Any]) -> tuple[Jaxpr, Operands]:
    """A linear function as a jaxpr of coefficients and tangents, and the values of the coefficients."""
    closed = jax.make_jaxpr(lambda *tangents: function(tangents))(*[zeros_like_aval(aval) for aval in avals])
    jaxpr, coefficients = jaxpr_and_consts(closed)
    return with_constants_as_inputs(jaxpr), coefficients


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


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without the equations that nothing needs, which would cost time where it is not compiled."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if has_side_effects(equation) or any(variable in needed for variable in equation.outvars):
            equations.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return jaxpr.replace(eqns=equations[::-1])


def with_outputs(closed: Any, used: Sequence[bool]) -> Any:
    """A closed jaxpr with some of its outputs only, and what they need."""
    jaxpr, _ = jaxpr_and_consts(closed)
    outputs = [atom for atom, is_used in zip(jaxpr.outvars, used, strict=True) if is_used]
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None) if jaxpr.debug_info else None
    return closed.replace(jaxpr=without_dead_code(jaxpr.replace(outvars=outputs, debug_info=debug_info)))
