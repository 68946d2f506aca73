"""Masks through maps without coefficients: lane by lane, moves, selections. They go through a move as numbers do."""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import ASSEMBLIES, STEERED, Operands, Window, bind, is_floating, is_reshape, named, windows_of
from .known import by_axes, everywhere, factors, lifted, padded, reshaped, taken
from .linear import Step
from .masks import Mask, Shape, any_along, both, either, expanded, filled_out, full_like, permuted, spread

_STACKS = named("stack unstack")
# All elements of their results come from somewhere, if every floating operand is fed everywhere.
_NOT_ONTO = named("gather pad reduce_window_sum scatter scatter-add scatter-sub select_and_gather_add") | STEERED


def lanes_fed(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """An element of the result depends on the same element of each operand."""
    return [either(*(spread(mask, step.shape) for mask in fed))]


def selected(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """The masks of a selection, whose predicate is fixed."""
    cases = fed[1:]
    if all(mask is True for mask in cases):
        return [True]
    of_case = lambda case: taken(step.operands[0], case, len(step.shape))
    return [either(*(both(mask, of_case(case)) for case, mask in enumerate(cases)))]


def moved(step: Step, fed: Sequence[Mask]) -> list[Mask]:
    """The masks of a move."""
    only_tangents = not any(is_floating(jax.typeof(operand)) for operand in step.fixed)
    if all(mask is True for mask in step.of_tangents(fed)) and only_tangents and _covers_result(step):
        return [True] * len(step.results)
    if step.name in _BY_AXES and not isinstance(fed[0], bool):
        return [_BY_AXES[step.name](step, fed[0])]
    if is_reshape(step.equation) and not isinstance(fed[0], bool):
        return [_reshaped(fed[0], step.tangents[0].shape, step.shape)]
    # The padding of a `pad` lies everywhere.
    windows = windows_of(step.equation) if step.name != "pad" or step.linear == [True, False] else None
    if windows is not None:
        axes = [step.equation.params["axis"]] if step.name in _STACKS else []
        if step.name in ASSEMBLIES:
            return _put_together([expanded(mask, axes) for mask in fed], windows, step.shape)
        return [any_along(mask, axes) for mask in _cut_up(fed[0], windows)]
    numbers = [_as_number(step, number, mask) for number, mask in enumerate(fed)]
    if step.name == "scatter-sub":
        # So that two masks add up.
        numbers[2] = -numbers[2]
    readings = [bind(read.equation, numbers) for read in _readings(step)]
    return [either(*(number != 0 for number in each)) for each in zip(*readings, strict=True)]


def _as_number(step: Step, number: int, mask: Mask) -> Any:
    """A tangent is one where it is fed and zero elsewhere; a fixed summand is zero."""
    operand, aval = step.operands[number], step.equation.invars[number].aval
    if step.linear[number]:
        return full_like(mask, aval).astype(aval.dtype)
    if step.name in STEERED or not is_floating(jax.typeof(operand)):
        return operand
    return jnp.zeros_like(operand)


def _readings(step: Step) -> list[Step]:
    """The same move in each way JAX may run it.

    If the program promises that indices are in bounds, JAX clamps them in reads, including the transpose of a write,
    and drops writes out of bounds, including the transpose of a read. What either of them touches is live.
    """
    modes = jax.lax.GatherScatterMode
    if step.equation.params.get("mode") != modes.PROMISE_IN_BOUNDS:
        return [step]
    # Clamping makes indices equal and may reorder them. JAX cannot transpose a `scatter` at such indices.
    assumed = {} if step.name == "scatter" else {"unique_indices": False, "indices_are_sorted": False}
    changed = {**step.equation.params, **assumed, "mode": modes.CLIP}
    clamped = dataclasses.replace(step, equation=step.equation.replace(params=changed))
    return [clamped] if step.name == "gather" else [step, clamped]


# Masks need not be written out along whole axes.
_BY_AXES: dict[str, Callable[[Step, Any], Mask]] = {
    "broadcast_in_dim": lambda step, mask: expanded(
        mask, [axis for axis in range(len(step.shape)) if axis not in step.equation.params["broadcast_dimensions"]]
    ),
    "reduce_sum": lambda step, mask: any_along(mask, step.equation.params["axes"]),
    "transpose": lambda step, mask: permuted(mask, step.equation.params["permutation"]),
}


def _covers_result(step: Step) -> bool:
    if step.name == "gather":
        # In the other modes, an index out of bounds reads another element; here it reads a constant.
        return step.equation.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP
    return step.name not in _NOT_ONTO


def _reshaped(mask: jax.Array, old: Shape, new: Shape) -> Mask:
    """A mask through a reshape; axes that become others of the same elements need not be written out."""
    groups = _regrouped(old, new)
    varies = lambda m, axes: any(m.shape[axis] != 1 for axis in axes)

    def through(m: Any, fill: Callable[[Any, Shape], Any], reshape: Callable[[Any, Shape], Any]) -> Any:
        wide, sizes = list(m.shape), list[int]()
        for before, after in groups:
            is_whole = varies(m, before)
            sizes += [new[axis] if is_whole else 1 for axis in after]
            for axis in before:
                wide[axis] = old[axis] if is_whole else 1
        return reshape(fill(m, tuple(wide)), tuple(sizes))

    of_mask = lambda m: through(m, filled_out, reshaped)
    traced, elements = factors(mask)
    if any(varies(traced, axes) and varies(elements, axes) for axes, _ in groups):
        return of_mask(mask)
    return by_axes(mask, of_mask, lambda m: through(m, np.broadcast_to, np.reshape))


def _regrouped(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """The axes before and after a reshape, in the smallest groups that have the same number of elements."""
    if 0 in old:
        return [(list(range(len(old))), list(range(len(new))))]
    before, after = (list(itertools.accumulate(shape, operator.mul)) for shape in (old, new))
    ends = sorted({*before, 1} & {*after, 1})
    groups: list[tuple[list[int], list[int]]] = [([], []) for _ in ends]
    for kind, products in enumerate((before, after)):
        for axis, elements in enumerate(products):
            groups[bisect.bisect_left(ends, elements)][kind].append(axis)
    return groups


def _cut_up(mask: Mask, windows: Sequence[Window]) -> list[Mask]:
    """The masks of the parts of an array."""
    if isinstance(mask, bool):
        return [mask] * len(windows)
    return [_cut(mask, window) for window in windows]


def _cut(mask: jax.Array, window: Window) -> Mask:
    def cut(m: Any) -> Any:
        at = tuple(slice(None) if size == 1 else w for size, w in zip(m.shape, window, strict=True))
        return m if all(place == slice(None) for place in at) else m[at]

    return by_axes(mask, lifted(cut), cut)


def _put_together(masks: Sequence[Mask], windows: Sequence[Window], shape: Shape) -> list[Mask]:
    """The mask of an array, from the masks of its parts."""
    return [either(*(_put_in(mask, window, shape) for mask, window in zip(masks, windows, strict=False)))]


def _put_in(mask: Mask, window: Window, shape: Shape) -> Mask:
    if mask is False:
        return False
    sizes, pads = [1] * len(shape) if mask is True else list(mask.shape), [(0, 0, 0)] * len(shape)
    for axis, size in enumerate(shape):
        place = range(*window[axis].indices(size))
        # Along an axis that it fills, a part need not be written out.
        if len(place) != size:
            sizes[axis] = len(place)
            pads[axis] = (place.start, size - 1 - place[-1], place.step - 1) if place else (0, size, 0)
    if not any(map(any, pads)):
        return mask
    return padded(everywhere(sizes) if mask is True else filled_out(mask, tuple(sizes)), pads)


def as_operands(step: Step, values: Operands) -> Operands:
    """The values of a move's tangents, and what it reads elsewhere without a derivative."""
    if step.name not in STEERED:
        return step.run(values)
    # Otherwise a second derivative would send a zero to the source of the value, as if it were a summand.
    return step.with_fixed([jax.lax.stop_gradient(value) for value in step.fixed]).run(values)
