"""The derivative of a traced function: JAX's linearization of it, without its dead edges."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._programs import (
    Operands,
    Run,
    any_equation,
    as_array,
    custom_rule_body,
    evaluate,
    is_floating,
    is_mutating,
    opened,
    with_constants_as_inputs,
    zeros_like_aval,
)
from . import cond, coupled, inside, products, scan, structural  # noqa: F401
from .batched import pushed
from .body import split
from .competition import with_selections
from .program import LinearProgram, Wire
from .trim import Guard, feed, trim

_BIG = 4096


class _Derivative(NamedTuple):
    """A derivative with respect to some operands.

    Attributes:
        values: From the operands to the outputs, followed by the coefficients.
        linear: From the coefficients and the tangents to the tangents of the reached outputs.
        reached: For each output, whether a tangent reaches it.
    """

    values: "Program"
    linear: Jaxpr
    reached: list[bool]


def along_taken_paths(jaxpr: Jaxpr) -> Run:
    """How to run an open jaxpr such that derivatives flow along taken paths only."""
    return Program(jaxpr).run


class Program:
    """A jaxpr as a function whose derivative flows along taken paths only.

    Derivatives are traced once for each set of operands that they are taken with respect to.

    Args:
        jaxpr: The traced function, as an open or a closed jaxpr.
    """

    def __init__(self, jaxpr: Any):
        # Constants are operands: a derivative is kept for later calls, and may not close over a tracer.
        inner, self._consts = opened(jaxpr)
        self._jaxpr = _without_dead_code(with_constants_as_inputs(inner))
        self._is_mutating = any_equation(inner, is_mutating)
        self._floating = [is_floating(variable.aval) for variable in inner.outvars]
        self._derivatives: dict[Any, _Derivative] = {}
        self._function = jax.custom_jvp(lambda *operands: evaluate(self._jaxpr, [], list(operands)))
        self._function.defjvp(self._rule, symbolic_zeros=True)

    def __call__(self, *operands: Any) -> Operands:
        """The outputs of a closed jaxpr."""
        return self.run(self._consts, list(operands))

    def run(self, consts: Operands, operands: Operands) -> Operands:
        """The outputs, given the values of the constants too."""
        given = [*consts, *operands]
        if self._is_mutating:
            # What goes through a mutable reference is followed by JAX alone.
            return evaluate(self._jaxpr, [], given)
        if any(isinstance(operand, jax.core.Tracer) for operand in given):
            return list(self._function(*map(_unfolded, consts), *operands))
        return evaluate(self._jaxpr, [], given)

    def _rule(self, operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Operands, list[Any]]:
        # The primal of `jax.grad(f)(1.0)` is a number, which the rules of others may ask for what only arrays tell.
        operands = [as_array(operand, jax.typeof(operand)) for operand in operands]
        moving = tuple(
            number
            for number, (operand, tangent) in enumerate(zip(operands, tangents, strict=True))
            if not isinstance(tangent, SymbolicZero) and is_floating(jax.typeof(operand))
        )
        if not moving:
            outputs = list(self._function(*operands))
            return outputs, [zero_from_primal(output, symbolic_zeros=True) for output in outputs]
        derivative = self._derivative(operands, moving)
        results = derivative.values(*operands)
        outputs, coefficients = results[: len(self._floating)], results[len(self._floating) :]
        pushed_tangents = iter(pushed(derivative.linear, coefficients, [tangents[number] for number in moving]))
        return outputs, [
            next(pushed_tangents) if reached else zero_from_primal(output, symbolic_zeros=True)
            for output, reached in zip(outputs, derivative.reached, strict=True)
        ]

    def _derivative(self, operands: Sequence[Any], moving: tuple[int, ...]) -> _Derivative:
        key = moving, tuple(map(jax.typeof, operands))
        if key not in self._derivatives:
            linear: list[Any] = []
            values = jax.make_jaxpr(functools.partial(self._linearized, moving, linear))(*operands)
            self._derivatives[key] = _Derivative(Program(values), *linear)
        return self._derivatives[key]

    def _linearized(self, moving: tuple[int, ...], linear: list[Any], *operands: Any) -> Operands:
        """The outputs and the coefficients of the derivative; the derivative itself is put into a list."""

        def function(*moved: Any) -> tuple[Operands, Operands]:
            given = list(operands)
            for number, value in zip(moving, moved, strict=True):
                given[number] = value
            outputs = with_selections(self._jaxpr, given)
            return self._of_kind(outputs, True), self._of_kind(outputs, False)

        moved = [operands[number] for number in moving]
        avals = [jax.typeof(value) for value in moved]
        floating, push, others = jax.linearize(function, *moved, has_aux=True)
        closed = jax.make_jaxpr(push)(*map(zeros_like_aval, avals))
        program = LinearProgram.of(closed, list(map(Wire, avals)))
        fed = feed(program, [True] * len(moving))
        of_floating = iter(program.outputs)
        of_outputs = [next(of_floating) if is_floating else None for is_floating in self._floating]
        reached = [isinstance(wire, Wire) and fed[wire] is not False for wire in of_outputs]
        program = dataclasses.replace(
            program, outputs=[w for w, is_in in zip(of_outputs, reached, strict=True) if is_in]
        )
        _, emit = trim(program, fed, [True] * sum(reached), Guard(lambda j, values: Program(j)(*values)))
        jaxpr, coefficients = split(emit, avals)
        linear[:] = [jaxpr, reached]
        first, second = iter(floating), iter(others)
        return [*(next(first) if is_floating else next(second) for is_floating in self._floating), *coefficients]

    def _of_kind(self, outputs: Operands, floating: bool) -> Operands:
        return [output for output, kind in zip(outputs, self._floating, strict=True) if kind is floating]


def is_double_where(equation: JaxprEqn) -> bool:
    """Whether an equation is the call of a function under `double_where`."""
    body = custom_rule_body(equation)
    return body is not None and __file__ in str(getattr(opened(body)[0].debug_info, "func_src_info", ""))


def _unfolded(const: Any) -> Any:
    # XLA would compute while compiling, slowly, all the masks that follow from a big constant one.
    is_mask = const.dtype == bool and const.size >= _BIG
    return jax.lax.optimization_barrier(const) if is_mask else const


def _without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without the equations that nothing needs, which would cost time where it is not compiled."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(variable in needed for variable in equation.outvars):
            equations.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return jaxpr.replace(eqns=equations[::-1])
