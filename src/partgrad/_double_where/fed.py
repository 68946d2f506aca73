"""Where a path leads: the masks of a step's results, given those of its operands. One table for all primitives.

A primitive without a rule is treated as if everything in it depended on everything: that costs precision, never
correctness.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from .._programs import (
    CALLS,
    KINDS,
    any_equation,
    bind,
    inner_jaxprs,
    jaxpr_and_consts,
    named,
    of_kind,
    primal_jaxpr,
    solve_functions,
    step_through,
)
from .linear import Step
from .masked import Masked
from .masks import Mask, any_along, anywhere, spread
from .moves import lanes_fed, moved, selected
from .products import convolution_fed, coupled_axes, dot_fed, scaled_fed

Fed = Callable[[Step, Sequence[Mask]], list[Mask]]

# Elementwise primitives that are not linear.
_POINTWISE = (KINDS["elementwise"] | KINDS["test"] | KINDS["flat"] | named("clamp max min mul div")) - named(
    "polynomial stop_gradient"
)


def fed(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    """The masks of a step's results, given those of its operands: `False` for the fixed ones."""
    return list(FED.get(step.name, _unknown)(step, list(masks)))


def outputs_fed(jaxpr: Any, operands: Sequence[Any], masks: Sequence[Mask | None]) -> list[Mask]:
    """The masks of the outputs of a jaxpr, given values of its inputs, and the masks of those that are tangents."""

    def over(equation: JaxprEqn, items: list[Masked]) -> list[Masked]:
        if equation.primitive.name in CALLS:
            return through(primal_jaxpr(equation), items)
        values, linear = [item.value for item in items], [item.mask is not None for item in items]
        if not any(linear):
            return list(map(Masked, bind(equation, values)))
        step = Step(equation, values, linear)
        found = fed(step, [False if item.mask is None else item.mask for item in items])
        is_dead = all(item.mask is False or item.mask is None for item in items)
        return [Masked(None, False if is_dead else mask) for mask in found]

    def through(jaxpr: Any, items: list[Masked]) -> list[Masked]:
        inner, consts = jaxpr_and_consts(jaxpr)
        return step_through(inner, list(map(Masked, consts)), items, over, literal=lambda number: Masked(number.val))

    items = [Masked(value, mask) for value, mask in zip(operands, masks, strict=True)]
    return [False if item.mask is None else item.mask for item in through(jaxpr, items)]


def _unknown(step: Step, masks: Sequence[Mask]) -> list[Mask]:
    return [spread(anywhere(masks), aval.shape) for aval in step.results]


# --- coupled: every element of a problem depends on every element of it ----------------------------------------------


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
    right = step.of_tangents(masks)
    if all(mask is True for mask in right) or not _is_direct(step):
        return _unknown(step, masks)
    functions, _ = solve_functions(step.equation, list(step.operands))
    jaxpr, fixed = functions["solve"]
    return outputs_fed(jaxpr, [*fixed, *step.tangents], [*[None] * len(fixed), *right])


def _is_direct(step: Step) -> bool:
    """Whether only the right-hand side is a tangent and the solver has no loops or callbacks."""
    functions, right_sides = solve_functions(step.equation, list(step.operands))
    constants = len(step.operands) - len(right_sides)
    if any(step.linear[:constants]) or not all(step.linear[constants:]) or len(step.tangents) != len(step.results):
        return False
    opaque = lambda equation: equation.primitive.name not in CALLS and any(inner_jaxprs(equation))
    return not any(any_equation(jaxpr_and_consts(jaxpr)[0], opaque) for jaxpr, _ in functions.values())


FED: dict[str, Fed] = {
    **dict.fromkeys(_POINTWISE, lanes_fed),
    **dict.fromkeys(of_kind("lanes", "sum"), lanes_fed),
    **dict.fromkeys(of_kind("move"), moved),
    **dict.fromkeys(of_kind("each"), lambda step, masks: list(masks)),
    "scatter-mul": scaled_fed,
    "dot_general": dot_fed,
    "conv_general_dilated": convolution_fed,
    "select_n": selected,
    **dict.fromkeys(_RIGHT_SIDES, _coupled),
    "custom_linear_solve": _solved,
}
