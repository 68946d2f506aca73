"""The linearization of a traced function: its values, and the linear program of its tangents.

JAX's rule for each primitive is traced once for the shapes it meets, then replayed wherever it meets them again. JAX's
own `linearize` parts values from tangents only where control flow mixes them.
"""

import functools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._programs import (
    CALLS,
    Operands,
    bind,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    opened,
    primal_jaxpr,
    source_of,
    step_through,
    varying_axes,
    with_constants_as_inputs,
    zeros_like_aval,
)
from .competition import selecting
from .custom import is_remade
from .known import follow
from .program import LinearProgram, Step, Wire, number_in, taken_apart

_RULES_SIZE = 4096
# A rule is a few equations, and holds on to no arrays.
_rules: OrderedDict[Hashable, ClosedJaxpr] = OrderedDict()


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
        inner, consts = opened(primal_jaxpr(equation))
        with source_of(equation):
            return _walked(with_constants_as_inputs(inner), [*consts, *given], [*[None] * len(consts), *wires], steps)
    by_jax = any(inner_jaxprs(equation)) or is_custom_rule(equation) or is_remade(equation)
    if by_jax or any(varying_axes(jax.typeof(value)) for value in given):
        return _parted_by_jax(equation, given, wires, steps)
    return _by_rule(equation, given, wires, steps)


def _function(equation: JaxprEqn, given: Operands, numbers: Sequence[int], moved: Sequence[Any]) -> Any:
    """An equation as a function of some of its operands: its results that have tangents, and the others."""
    given = list(given)
    for number, value in zip(numbers, moved, strict=True):
        given[number] = value
    return _by_kind(equation, selecting(equation, given))


def _by_kind(equation: JaxprEqn, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    kinds = [is_floating(variable.aval) for variable in equation.outvars]
    pairs = list(zip(results, kinds, strict=True))
    return [value for value, floating in pairs if floating], [value for value, floating in pairs if not floating]


def _in_order(equation: JaxprEqn, floating: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    first, second = iter(floating), iter(others)
    return [next(first) if is_floating(variable.aval) else next(second) for variable in equation.outvars]


def _with_wires(
    equation: JaxprEqn, floating: Operands, found: Sequence[Any], others: Operands
) -> tuple[Operands, list[Wire | None]]:
    wires = [output if isinstance(output, Wire) else None for output in found]
    return _in_order(equation, floating, others), _in_order(equation, wires, [None] * len(others))


def _parted_by_jax(
    equation: JaxprEqn, given: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, list[Wire | None]]:
    numbers = [number for number, wire in enumerate(wires) if wire is not None]
    with source_of(equation):
        floating, push, others = jax.linearize(
            lambda *moved: _function(equation, given, numbers, moved), *[given[n] for n in numbers], has_aux=True
        )
        closed = jax.make_jaxpr(push)(*(zeros_like_aval(jax.typeof(given[number])) for number in numbers))
    found = taken_apart(*opened(closed), [wires[number] for number in numbers], steps)
    return _with_wires(equation, floating, found, others)


def _by_rule(
    equation: JaxprEqn, given: Operands, wires: Sequence[Wire | None], steps: list[Step]
) -> tuple[Operands, list[Wire | None]]:
    numbers = tuple(number for number, wire in enumerate(wires) if wire is not None)
    free = [number for number, atom in enumerate(equation.invars) if not isinstance(atom, Literal)]
    rule = _rule(equation, [jax.typeof(given[number]) for number in free], free, numbers)
    operands = [*(given[number] for number in free), *(wires[number] for number in numbers)]
    outputs = taken_apart(*opened(rule), operands, steps, equation)
    count = sum(is_floating(variable.aval) for variable in equation.outvars)
    return _with_wires(equation, outputs[:count], outputs[count : 2 * count], outputs[2 * count :])


def _rule(equation: JaxprEqn, avals: Sequence[Any], free: Sequence[int], numbers: tuple[int, ...]) -> ClosedJaxpr:
    """JAX's rule for an equation, from operands and tangents to results, their tangents, and results without any."""
    literals = [number_in(atom) for atom in equation.invars if isinstance(atom, Literal)]
    key = _key(equation, tuple(avals), literals, numbers)
    if key is not None and key in _rules:
        _rules.move_to_end(key)
        return _rules[key]

    def pushed(operands: Operands, tangents: Operands) -> Any:
        given: list[Any] = [atom.val if isinstance(atom, Literal) else None for atom in equation.invars]
        for number, value in zip(free, operands, strict=True):
            given[number] = value
        function = functools.partial(_function, equation, given, numbers)
        moved = [given[number] for number in numbers]
        return jax.jvp(lambda *moved: function(moved), moved, tangents, has_aux=True)

    rule = jax.make_jaxpr(pushed)(list(avals), [avals[free.index(number)] for number in numbers])
    if key is not None:
        _rules[key] = rule
        if len(_rules) > _RULES_SIZE:
            _rules.popitem(last=False)
    return rule


def _key(equation: JaxprEqn, avals: tuple[Any, ...], literals: Sequence[Any], numbers: tuple[int, ...]) -> Any:
    """What the rule for an equation depends on, or None where that cannot be told."""
    if equation.effects or "callback" in equation.primitive.name:
        return None
    parameters = tuple(sorted(equation.params.items()))
    values = tuple((type(value), getattr(value, "dtype", None), repr(value)) for value in literals)
    places = tuple(isinstance(atom, Literal) for atom in equation.invars)
    key = (equation.primitive, parameters, avals, values, places, numbers, equation.ctx, jax.config.jax_enable_x64)
    try:
        hash(key)
    except TypeError:
        return None
    return key
