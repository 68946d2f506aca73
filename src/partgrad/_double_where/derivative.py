"""The derivative of a traced function: JAX's linearization of it, without its dead edges."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Jaxpr, JaxprEqn

from .._programs import (
    Operands,
    Recent,
    Run,
    any_equation,
    as_array,
    custom_rule_body,
    evaluate,
    is_floating,
    is_mutating,
    opened,
    structure_of,
    with_constants_as_inputs,
    written,
)
from . import cond, coupled, inside, products, scan, structural  # noqa: F401
from .batched import pushed
from .body import State, state_of
from .known import Numbers, captured, remember, remembering
from .linearize import linearized
from .mask import Mask, arrays_in, restored
from .program import Wire, split, without_dead_code
from .trim import Guard, feed, trim

_BIG = 4096


class _Derivative(NamedTuple):
    """A derivative with respect to some operands.

    Attributes:
        values: From constants and the operands to the outputs, followed by the coefficients.
        consts: These constants.
        linear: From the coefficients and the tangents to the tangents of the reached outputs.
        reached: For each output, whether a tangent reaches it.
        demanded: For each operand, what is known of the mask of the elements from which a path leads to an output.
        masks: From constants and the operands to those of these masks that are arrays.
    """

    values: "_Core"
    consts: Operands
    linear: Jaxpr
    reached: list[bool]
    demanded: list[State]
    masks: Jaxpr


def along_taken_paths(jaxpr: Jaxpr) -> Run:
    """A function that runs an open jaxpr so that derivatives flow only along taken paths."""
    return Program(jaxpr).run


class Program:
    """A jaxpr as a function whose derivative flows along taken paths only.

    Args:
        jaxpr: The traced function, as an open or a closed jaxpr.
    """

    def __init__(self, jaxpr: Any):
        # Constants become operands: a derivative is kept for later calls, and must not close over a tracer.
        inner, self._consts = opened(jaxpr)
        self._jaxpr = without_dead_code(with_constants_as_inputs(inner))
        self._is_mutating = any_equation(inner, is_mutating)
        self._structure = structure_of(self._jaxpr, exact=True)
        self._nothing: list[Numbers | None] = [None] * len(inner.invars)
        self._cores: dict[Hashable, _Core] = {}

    def __call__(self, *operands: Any) -> Operands:
        """The outputs of a closed jaxpr."""
        return self.run(self._consts, list(operands))

    def run(self, consts: Operands, operands: Operands, again: Any = None) -> Operands:
        """The outputs, given the values of the constants too."""
        if not self._is_mutating:
            return self._core(consts).run(consts, operands)
        # Only JAX can follow what goes through a mutable reference.
        return evaluate(self._jaxpr, [], [*consts, *operands])

    def demanded(self, operands: Operands) -> list[Mask]:
        """For each operand, the elements from which a path leads to an output."""
        return self._core(self._consts).demanded([*self._consts, *operands])[len(self._consts) :]

    def _core(self, consts: Operands) -> "_Core":
        numbers = [*map(captured, consts), *self._nothing]
        key = tuple(None if known is None else (known.shape, known.dtype, known.tobytes()) for known in numbers)
        if key not in self._cores:
            # Masks that were captured once may change.
            place = None if self._structure is None else (self._structure, key)
            self._cores = {key: _cores.of(place, lambda: _Core(self._jaxpr, numbers))}
        return self._cores[key]


class _Core:
    """What programs of equal structure share: an open jaxpr as a function, and its derivatives.

    Derivatives are traced once for each set of differentiated operands.

    Args:
        jaxpr: An open jaxpr without constants.
        numbers: What is known of its inputs, or None for each of which nothing is.
    """

    def __init__(self, jaxpr: Jaxpr, numbers: Sequence[Numbers | None]):
        self._jaxpr, self._numbers = jaxpr, numbers
        self._floating = [is_floating(variable.aval) for variable in jaxpr.outvars]
        self._derivatives: dict[Any, _Derivative] = {}
        self._function = jax.custom_jvp(lambda *operands: evaluate(jaxpr, [], list(operands)))
        self._function.defjvp(self._rule, symbolic_zeros=True)

    def run(self, consts: Operands, operands: Operands) -> Operands:
        """The outputs, given the inputs, of which the first ones are constants."""
        if any(isinstance(operand, jax.core.Tracer) for operand in (*consts, *operands)):
            return list(self._function(*map(_unfolded, consts), *operands))
        return evaluate(self._jaxpr, [], [*consts, *operands])

    def demanded(self, operands: Operands) -> list[Mask]:
        """For each operand, the elements from which a path leads to an output."""
        moving = tuple(number for number, operand in enumerate(operands) if is_floating(jax.typeof(operand)))
        derivative = self._derivative(operands, moving)
        masks = restored(derivative.demanded, evaluate(derivative.masks, [], [*derivative.consts, *operands]))
        of_moving = dict(zip(moving, masks, strict=True))
        return [of_moving.get(number, False) for number in range(len(operands))]

    def _rule(self, operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Operands, list[Any]]:
        # The primal of `jax.grad(f)(1.0)` is a number, but rules of other libraries may ask for attributes of arrays.
        operands = [as_array(operand, jax.typeof(operand)) for operand in operands]
        moving = tuple(
            number
            for number, (operand, tangent) in enumerate(zip(operands, tangents, strict=True))
            if not isinstance(tangent, SymbolicZero) and is_floating(jax.typeof(operand))
        )
        derivative = self._derivative(operands, moving)
        results = derivative.values.run(derivative.consts, operands)
        outputs, coefficients = results[: len(self._floating)], results[len(self._floating) :]
        pushed_tangents = iter(pushed(derivative.linear, coefficients, [tangents[number] for number in moving]))
        return outputs, [
            next(pushed_tangents) if reached else zero_from_primal(output, symbolic_zeros=True)
            for output, reached in zip(outputs, derivative.reached, strict=True)
        ]

    def _derivative(self, operands: Sequence[Any], moving: tuple[int, ...]) -> _Derivative:
        key = moving, tuple(map(jax.typeof, operands))
        if key not in self._derivatives:
            found: list[Any] = []
            # What is remembered holds tracers, and must not outlive the trace.
            linearize = remembering()(functools.partial(self._linearized, moving, found))
            jaxpr, consts = opened(jax.make_jaxpr(linearize)(*operands))
            jaxpr = with_constants_as_inputs(jaxpr)
            linear, reached, demanded = found
            count = len(jaxpr.outvars) - demanded.count(None)
            of_outputs = functools.partial(without_dead_code, jaxpr)
            values = _Core(of_outputs(jaxpr.outvars[:count]), [*map(captured, consts), *self._numbers])
            masks = of_outputs(jaxpr.outvars[count:])
            self._derivatives[key] = _Derivative(values, consts, linear, reached, demanded, masks)
        return self._derivatives[key]

    def _linearized(self, moving: tuple[int, ...], found: list[Any], *operands: Any) -> Operands:
        """The outputs, the coefficients and the demanded masks; the derivative itself goes into a list."""
        for operand, numbers in zip(operands, self._numbers, strict=True):
            remember(operand, numbers)
        outputs, program = linearized(self._jaxpr, list(operands), moving)
        fed = feed(program, [True] * len(moving))
        reached = [isinstance(wire, Wire) and fed[wire] is not False for wire in program.outputs]
        program = dataclasses.replace(
            program, outputs=[w for w, is_in in zip(program.outputs, reached, strict=True) if is_in]
        )
        masks, emit = trim(program, fed, [True] * sum(reached), Guard(Program))
        jaxpr, coefficients = split(emit, [wire.aval for wire in program.inputs])
        found[:] = [jaxpr, reached, list(map(state_of, masks))]
        return [*outputs, *coefficients, *arrays_in(masks)]


# Programs of equal structure share their derivatives.
_cores: Recent[_Core] = Recent(256)


def is_double_where(equation: JaxprEqn) -> bool:
    """Whether an equation calls a function under `double_where`."""
    body = custom_rule_body(equation)
    return body is not None and written(opened(body)[0]).file.startswith(__file__)


def _unfolded(const: Any) -> Any:
    # XLA would fold all masks that follow from a large constant one while compiling, which is slow.
    is_mask = hasattr(const, "dtype") and const.dtype == bool and const.size >= _BIG
    return jax.lax.optimization_barrier(const) if is_mask else const
