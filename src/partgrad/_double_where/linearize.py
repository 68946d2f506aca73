"""The linearization of a traced function: its values, and the linear program of its tangents.

JAX's rule for each primitive is traced once for given shapes, and replayed wherever these shapes recur. JAX's own
`linearize` only separates values from tangents where control flow mixes them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._programs import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_JVPS,
    HIGH,
    Operands,
    Recent,
    along,
    bind,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    jaxpr_and_consts,
    lasts,
    operation_of,
    primal_jaxpr,
    source_of,
    step_through,
    varying_axes,
    with_constants_as_inputs,
)
from .competition import selecting
from .follow import follow, followed
from .linear import LinearProgram, Step, Wire, into_steps, number_in, split
from .rules import is_remade

# A rule is a few equations, and holds no arrays.
_rules: Recent[ClosedJaxpr] = Recent(4096)
# What JAX's own functions call often, and models repeat.
_KEPT = CHECKPOINTS | CUSTOM_JVPS | {"scan"}


class _Parts(NamedTuple):
    """The linearization of an equation.

    Attributes:
        values: From its operands to its results and the fixed operands of the linear part.
        linear: From these, and the tangents, to the tangents of the results.
    """

    values: ClosedJaxpr
    linear: Jaxpr


_parts: Recent[_Parts] = Recent(128)


def linearized(jaxpr: Jaxpr, operands: Operands, moving: Sequence[int]) -> tuple[Operands, LinearProgram]:
    """The outputs of an open jaxpr without constants, and the linear program from some operands to its outputs.

    Args:
        jaxpr: The traced function.
        operands: The values of its inputs.
        moving: The numbers of the inputs that have tangents.

    Returns:
        The outputs, and a program whose outputs are wires, or None where no tangent reaches an output.
    """
    wires: list[Wire | None] = [None] * len(operands)
    for number in moving:
        wires[number] = Wire(jax.typeof(operands[number]))
    steps: list[Step] = []
    outputs, tangents = _walked(jaxpr, operands, wires, steps)
    return outputs, LinearProgram([wire for wire in wires if wire is not None], steps, tangents)


def _walked(
    jaxpr: Jaxpr, operands: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, list[Wire | None]]:
    def step(equation: JaxprEqn, given: Operands) -> Operands:
        values, tangents = zip(*given, strict=True) if given else ((), ())
        results, found = _linearized_equation(equation, list(values), tangents, steps)
        return list(zip(results, found, strict=True))

    pairs = list(zip(operands, wires, strict=True))
    outputs = step_through(jaxpr, [], pairs, step, literal=lambda literal: (literal.val, None))
    return [value for value, _ in outputs], [wire for _, wire in outputs]


def _linearized_equation(
    equation: JaxprEqn, given: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, Sequence[Wire | None]]:
    if all(wire is None for wire in wires):
        results = bind(equation, given)
        follow(equation, given, results)
        return results, [None] * len(equation.outvars)
    if equation.primitive.name in CALLS:
        inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
        with source_of(equation):
            return _walked(with_constants_as_inputs(inner), [*consts, *given], [*[None] * len(consts), *wires], steps)
    is_ruled = is_custom_rule(equation) or equation.primitive.name in HIGH or is_remade(equation)
    if is_ruled or any(inner_jaxprs(equation)) or any(varying_axes(jax.typeof(value)) for value in given):
        return _parted_by_jax(equation, given, wires, steps)
    return _by_rule(equation, given, wires, steps)


def _floating(equation: JaxprEqn, rates: Sequence[Any]) -> list[Any]:
    """From one value per result of an equation, those of the results that have tangents."""
    return [rate for rate, variable in zip(rates, equation.outvars, strict=True) if is_floating(variable.aval)]


def _wires_of(equation: JaxprEqn, found: Sequence[Any]) -> list[Wire | None]:
    """For each result of an equation its wire, given the tangents of those that have any."""
    rest = iter([tangent if isinstance(tangent, Wire) else None for tangent in found])
    return [next(rest) if is_floating(variable.aval) else None for variable in equation.outvars]


def _parted_by_jax(
    equation: JaxprEqn, given: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, list[Wire | None]]:
    numbers = tuple(number for number, wire in enumerate(wires) if wire is not None)
    free = [number for number, atom in enumerate(equation.invars) if not isinstance(atom, Literal)]
    operands, linear = [given[number] for number in free], list[Jaxpr]()

    def parted(*operands: Any) -> tuple[Operands, Operands]:
        at = dict(zip(free, operands, strict=True))
        values = [at.get(number, value) for number, value in enumerate(given)]
        function, moved = along(equation, numbers, values, selecting)
        results, push = jax.linearize(function, *moved)
        rest, fixed = split(lambda tangents: _floating(equation, push(*tangents)), list(map(jax.typeof, moved)))
        linear[:] = [rest]
        return results, fixed

    with source_of(equation):
        if equation.primitive.name in _KEPT and not is_remade(equation):
            operation = operation_of(equation)
            key = operation and (operation, tuple(map(jax.typeof, operands)), numbers)
            make = lambda: _Parts(jax.make_jaxpr(parted)(*operands), linear[0])
            made = _parts.of(key, make, lambda made: lasts(made.values))
            # What a loop computes from no data, or from predicates alone, says much about its masks.
            values = followed(made.values, operands)
            results, fixed = values[: len(equation.outvars)], values[len(equation.outvars) :]
            rest = made.linear
        else:
            results, fixed = parted(*operands)
            rest = linear[0]
    found = into_steps(rest, [], [*fixed, *(wires[number] for number in numbers)], steps)
    return results, _wires_of(equation, found)


def _by_rule(
    equation: JaxprEqn, given: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, list[Wire | None]]:
    numbers = tuple(number for number, wire in enumerate(wires) if wire is not None)
    free = [number for number, atom in enumerate(equation.invars) if not isinstance(atom, Literal)]
    rule = _rule(equation, [jax.typeof(given[number]) for number in free], free, numbers)
    operands = [*(given[number] for number in free), *(wires[number] for number in numbers)]
    outputs = into_steps(*jaxpr_and_consts(rule), operands, steps, equation)
    count = len(equation.outvars)
    return outputs[:count], _wires_of(equation, outputs[count:])


def _rule(equation: JaxprEqn, avals: Sequence[Any], free: Sequence[int], numbers: tuple[int, ...]) -> ClosedJaxpr:
    """JAX's rule for an equation: from operands and tangents to results and the tangents of those that have any."""
    literals = [number_in(atom) for atom in equation.invars if isinstance(atom, Literal)]

    def pushed(operands: Operands, tangents: Operands) -> Any:
        given: list[Any] = [atom.val if isinstance(atom, Literal) else None for atom in equation.invars]
        for number, value in zip(free, operands, strict=True):
            given[number] = value
        results, rates = jax.jvp(*along(equation, numbers, given, selecting), tangents)
        return results, _floating(equation, rates)

    trace = lambda: jax.make_jaxpr(pushed)(list(avals), [avals[free.index(number)] for number in numbers])
    return _rules.of(key_of(equation, tuple(avals), literals, numbers), trace)


def key_of(equation: JaxprEqn, avals: tuple[Any, ...], literals: Sequence[Any], numbers: Any) -> Any:
    """What the rule for an equation depends on, or None if that cannot be determined."""
    if equation.effects or "callback" in equation.primitive.name:
        return None
    parameters = tuple(sorted(equation.params.items()))
    values = tuple((type(value), getattr(value, "dtype", None), repr(value)) for value in literals)
    places = tuple(isinstance(atom, Literal) for atom in equation.invars)
    key = (equation.primitive, parameters, avals, values, places, numbers, equation.ctx, jax.config.jax_enable_x64)
    try:
        hash(key)
    except TypeError:
        # JAX runs primitives with such parameters outside of `jit`.
        return None
    return key
