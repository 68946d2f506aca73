"""Masks through products of a tangent and a coefficient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._programs import bind, reading_dimensions, written_window
from .mask import Mask, any_along, anywhere, both, full_like, permuted, placed, spread
from .program import Step
from .structural import Demand, lanes_demanded, lanes_fed
from .trim import RULES, Emit, Guard, Loosely, Rule, is_constant, only


def _product(
    fed: Callable[[Step, list[Mask]], list[Mask]],
    demand: Demand,
    need: Callable[[Step, Mask, Mask], Mask],
    loosely: Loosely | None = None,
) -> Rule:
    """A rule for a bilinear map, one operand of which is known.

    Args:
        fed: As in `Rule`.
        demand: The demanded mask of the tangent, given that of the result.
        need: The mask of the coefficients that lie on a live edge, given where the tangent is fed and where the result
            is demanded.
        loosely: As in `Rule`.
    """

    def product_trim(step: Step, masks: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
        *others, coefficient = step.known
        mask = masks[step.position]
        needed = True if mask is True and demanded[0] is True else need(step, mask, demanded[0])
        replaced = guard.coefficient(coefficient, needed, divides=step.name == "div")
        return demand(step, demanded), step.with_known([*others, replaced]).run

    return Rule(fed, product_trim, loosely)


def _lanes_needed(step: Step, fed: Mask, demanded: Mask) -> Mask:
    return both(demanded, spread(fed, step.shape))


def _factors_loosely(
    step: Step, masks: list[Mask], demanded: list[Mask], guard: Guard
) -> tuple[list[Mask], Emit, bool] | None:
    """The coefficient stays unchanged; what dead lanes receive is selected away upstream."""
    if masks[step.position] is not True or step.wires[0].shape != step.shape:
        return None
    (coefficient,) = step.known
    if is_constant(coefficient) or not guard.is_apart(coefficient, step.shape):
        return None
    return lanes_demanded(step, demanded), step.with_known([guard.cut(coefficient, demanded[0])]).run, True


def _scaled_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    # Of a custom backward pass that is not linear, a factor may be a tangent as well.
    return [fed[0] if step.linear == [True, False, False] else spread(anywhere(fed), step.shape)]


def _scaled_needed(step: Step, fed: Mask, demanded: Mask) -> Mask:
    # An index promised to be in bounds that is not reads here, but writes nowhere.
    numbers, window = reading_dimensions(step.equation.params["dimension_numbers"]), written_window(step.equation)
    live = full_like(both(fed, demanded), step.results[0].aval)
    return jax.lax.gather(live, step.operands[1], numbers, window, mode=jax.lax.GatherScatterMode.CLIP)


class _DotAxes:
    """The axes of one operand of a `dot_general`, and the positions of its free ones in the result."""

    def __init__(self, step: Step, which: int):
        contracting, batch = step.equation.params["dimension_numbers"]
        shapes = [tuple(variable.aval.shape) for variable in step.equation.invars]
        free = [
            [axis for axis in range(len(shapes[k])) if axis not in contracting[k] and axis not in batch[k]]
            for k in (0, 1)
        ]
        self.shape = shapes[which]
        self.batch, self.contracting, self.free = list(batch[which]), list(contracting[which]), free[which]
        start = len(self.batch) + (len(free[0]) if which else 0)
        self.in_result = list(range(start, start + len(self.free)))
        self.result_batch = list(range(len(self.batch)))

    def without(self, mask: Mask, kept: list[int]) -> Mask:
        """The mask of this operand reduced to some of its axes, in the given order: true if any element is."""
        rest = [axis for axis in range(len(self.shape)) if axis not in kept]
        return any_along(permuted(mask, kept + rest), range(len(kept), len(self.shape)))


def _dot_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    if len(step.wires) != 1:
        return [spread(anywhere(fed), step.shape)]
    which = step.position
    mask, axes = fed[which], _DotAxes(step, which)
    if isinstance(mask, bool):
        return [mask]
    mask = axes.without(mask, axes.batch + axes.free)
    return [placed(mask, axes.result_batch + axes.in_result, len(step.shape))]


def _dot_demanded(step: Step, demanded: list[Mask]) -> list[Mask]:
    mask, wire = demanded[0], step.wires[0]
    if isinstance(mask, bool):
        return [mask]
    axes, other = (_DotAxes(step, which) for which in _wire_first(step))
    return [placed(any_along(mask, other.in_result), axes.batch + axes.free, len(wire.shape))]


def _dot_loosely(
    step: Step, masks: list[Mask], demanded: list[Mask], guard: Guard
) -> tuple[list[Mask], Emit, bool] | None:
    """Dead rows are selected away; the matrix, which they share with live rows, stays."""
    if not guard.cuts or is_constant(step.known[0]):
        return None
    _, other = (_DotAxes(step, which) for which in _wire_first(step))
    mask = demanded[0]
    if isinstance(mask, bool) or any(mask.shape[axis] != 1 for axis in other.in_result):
        return None
    fed = masks[step.position]
    coefficient = step.known[0] if fed is True else guard.coefficient(step.known[0], _dot_needed(step, fed, True))
    kept = step.with_known([guard.cut(coefficient, _dot_needed(step, True, mask))])
    (of_wire,) = _dot_demanded(step, [mask])
    return [of_wire], lambda tangents: kept.run([only(of_wire, tangents[0])]), False


def _wire_first(step: Step) -> tuple[int, int]:
    return step.position, 1 - step.position


def _dot_needed(step: Step, fed: Mask, demanded: Mask) -> Mask:
    wire, coefficient = (_DotAxes(step, which) for which in _wire_first(step))
    if not isinstance(demanded, bool):
        demanded = any_along(demanded, wire.in_result)
        demanded = placed(demanded, coefficient.batch + coefficient.free, len(coefficient.shape))
    if not isinstance(fed, bool):
        fed = wire.without(fed, wire.batch + wire.contracting)
        fed = placed(fed, coefficient.batch + coefficient.contracting, len(coefficient.shape))
    return both(demanded, fed)


def _convolution_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    if len(step.wires) != 1 or all(isinstance(mask, bool) for mask in fed):
        return [spread(anywhere(fed), step.shape)]
    (wire,) = step.wires
    tangent = full_like(fed[step.position], wire.aval).astype(wire.aval.dtype)
    return [step.with_known([jnp.ones_like(value) for value in step.known]).run([tangent])[0] != 0]


def _convolution_demanded(step: Step, demanded: list[Mask]) -> list[Mask]:
    if demanded[0] is True:
        return [True]
    ones = step.with_known([jnp.ones_like(value) for value in step.known])
    return [ones.transposed([_cotangent(step, demanded[0])])[0] != 0]


def _convolution_needed(step: Step, fed: Mask, demanded: Mask) -> Mask:
    (wire,), (coefficient,) = step.wires, step.known
    tangent = full_like(fed, wire.aval).astype(wire.aval.dtype)
    operands = lambda c: [tangent if operand is wire else c for operand in step.operands]
    transposed = jax.linear_transpose(lambda c: bind(step.equation, operands(c))[0], coefficient)
    return transposed(_cotangent(step, demanded))[0] != 0


def _cotangent(step: Step, mask: Mask) -> jax.Array:
    return full_like(mask, step.results[0].aval).astype(step.results[0].aval.dtype)


RULES.update(
    {
        **dict.fromkeys(("mul", "div"), _product(lanes_fed, lanes_demanded, _lanes_needed, _factors_loosely)),
        "scatter-mul": _product(_scaled_fed, lambda step, demanded: demanded[:1], _scaled_needed),
        "dot_general": _product(_dot_fed, _dot_demanded, _dot_needed, _dot_loosely),
        "conv_general_dilated": _product(_convolution_fed, _convolution_demanded, _convolution_needed),
    }
)
