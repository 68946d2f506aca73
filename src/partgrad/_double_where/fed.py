"""Where a path leads: the masks of a step's results, given those of its operands. One table for all primitives.

A primitive without a rule is treated as if everything in it depended on everything: that costs precision, never
correctness.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._programs import (
    CALLS,
    KINDS,
    any_equation,
    inner_jaxprs,
    jaxpr_and_consts,
    named,
    of_kind,
    solve_functions,
)
from .linear import LinearProgram, Step, Wire
from .masks import Mask, any_along, anywhere, on_mesh_of, spread
from .moves import lanes_fed, moved, selected
from .products import convolution_fed, dot_fed, scaled_fed

Fed = Callable[[Step, Sequence[Mask]], list[Mask]]

# Elementwise primitives that are not linear.
_POINTWISE = (KINDS["elementwise"] | KINDS["test"] | KINDS["flat"] | named("clamp max min")) - named(
    "polynomial stop_gradient"
)


def fed(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    """The masks of a step's results, given those of its operands: `False` for the fixed ones."""
    rule = FED.get(step.name, _unknown)
    (results,) = on_mesh_of(step.equation, lambda masks: (rule(step, masks),), list(masks))
    return list(results)


def outputs_fed(program: LinearProgram, masks: Sequence[Mask]) -> list[Mask]:
    """The masks of a program's outputs, given those of its inputs."""
    found = dict(zip(program.inputs, masks, strict=True))
    for step in program.steps:
        given = [found[operand] if isinstance(operand, Wire) else False for operand in step.operands]
        dead = all(mask is False for mask in given)
        found.update(zip(step.results, [False] * len(step.results) if dead else fed(step, given), strict=True))
    return [found[output] if isinstance(output, Wire) else False for output in program.outputs]


def _unknown(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    return [spread(anywhere(masks), wire.shape) for wire in step.results]


# --- coupled: every element of a problem depends on every element of it ----------------------------------------------


def coupled_axes(step: Step) -> tuple[int, ...]:
    """The axes of the right-hand side and the result along which elements depend on each other."""
    rank = len(step.shape)
    if step.name == "fft":
        return tuple(range(rank - len(step.equation.params["fft_lengths"]), rank))
    # The columns of a right-hand side, or its rows, are problems of their own.
    return (rank - 2 if step.equation.params.get("left_side", True) else rank - 1,)


def _coupled(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    if step.linear != [number == _RIGHT_SIDES[step.name] for number in range(len(step.linear))]:
        return _unknown(step, masks)
    mask = masks[step.position]
    if isinstance(mask, bool):
        return [mask]
    return [any_along(mask, coupled_axes(step), keepdims=True)]


_RIGHT_SIDES = {"fft": 0, "triangular_solve": 1, "tridiagonal_solve": 3}


def _solved(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    """Masks go through the equations of a direct solver, which itself runs unchanged."""
    right = step.of_wires(masks)
    if all(mask is True for mask in right) or not _is_direct(step):
        return _unknown(step, masks)
    jaxpr, operands = _functions(step)["solve"]
    return outputs_fed(LinearProgram.of(jaxpr, operands), right)


def _functions(step: Step) -> dict[str, tuple[Any, list[Any]]]:
    """The functions that make up a linear solve, by name: jaxprs and operands, of which the last are tangents."""
    functions, _ = solve_functions(step.equation, list(step.operands))
    return {name: (jaxpr, [*fixed, *(Wire(w.aval) for w in step.wires)]) for name, (jaxpr, fixed) in functions.items()}


def _is_direct(step: Step) -> bool:
    """Whether only the right-hand side is a tangent and the solver has no loops or callbacks."""
    _, right_sides = solve_functions(step.equation, list(step.operands))
    constants = len(step.operands) - len(right_sides)
    if any(step.linear[:constants]) or not all(step.linear[constants:]) or len(step.wires) != len(step.results):
        return False
    opaque = lambda equation: equation.primitive.name not in CALLS and any(inner_jaxprs(equation))
    return not any(any_equation(jaxpr_and_consts(jaxpr)[0], opaque) for jaxpr, _ in _functions(step).values())


FED: dict[str, Fed] = {
    **dict.fromkeys(_POINTWISE, lanes_fed),
    **dict.fromkeys(of_kind("lanes", "sum"), lanes_fed),
    **dict.fromkeys(of_kind("move"), moved),
    **dict.fromkeys(of_kind("each"), lambda step, masks: list(masks)),
    **dict.fromkeys(("mul", "div"), lanes_fed),
    "scatter-mul": scaled_fed,
    "dot_general": dot_fed,
    "conv_general_dilated": convolution_fed,
    "select_n": selected,
    **dict.fromkeys(_RIGHT_SIDES, _coupled),
    "custom_linear_solve": _solved,
}
