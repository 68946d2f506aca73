"""Masks through maps without coefficients: elementwise, moves, selections, and communication between devices."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import ASSEMBLIES, Operands, Window, bind, is_floating, is_reshape, named, windows_of
from .known import everywhere, lifted, padded, reshaped, taken
from .mask import (
    Mask,
    Shape,
    any_along,
    both,
    either,
    expanded,
    filled_out,
    full_like,
    gathered,
    permuted,
    spread,
)
from .program import Step, Wire
from .trim import RULES, Emit, Guard, Rule

Demand = Callable[[Step, list[Mask]], list[Mask]]

# Their known floating operand says where to look, and is not a summand.
_STEERED = named("select_and_gather_add select_and_scatter_add")


def structural(fed: Callable[[Step, list[Mask]], list[Mask]], demand: Demand) -> Rule:
    """A rule for a map without coefficients: only its masks matter, and it runs unchanged."""

    def structural_trim(step: Step, _: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
        if step.name in _STEERED:
            # Otherwise a second derivative would send a zero to the source of the value, as if it were a summand.
            step = step.with_known([jax.lax.stop_gradient(value) for value in step.known])
        return demand(step, demanded), guard.whole(step).run

    return Rule(fed, structural_trim)


# --- lane by lane: an element of the result depends on the same element of each operand -----------------------------


def lanes_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    return [either(*(spread(mask, step.shape) for mask in fed))]


def lanes_demanded(step: Step, demanded: list[Mask]) -> list[Mask]:
    return [gathered(demanded[0], wire.shape) for wire in step.wires]


def _each_demanded(step: Step, demanded: list[Mask]) -> list[Mask]:
    return step.of_wires(demanded)


_LANE_BY_LANE = named(
    """add add_any complex conj convert_element_type copy_p imag layout_constraint mesh_cast name neg pcast preduced
    pvary real reduce_precision reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint sub
    vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint"""
)


# --- moves: 0/1 matrices. A mask goes through them as a number does, and back through their transpose ----------------

# Communication: a mask goes only where JAX's own tangents and cotangents go.
_COLLECTIVES = named(
    """all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic ppermute psum psum2
    psum_invariant ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter"""
)

# All elements of the result come from somewhere, if every floating operand is fed everywhere ...
_ONTO_RESULT = _COLLECTIVES | named(
    """broadcast_in_dim concatenate copy cumsum dynamic_slice dynamic_update_slice expand_dims reduce_sum reshape rev
    slice split squeeze stack tile transpose unstack"""
)
# ... and all elements of the operands go somewhere.
_ONTO_OPERAND = (_ONTO_RESULT | named("scatter-add scatter-sub")) - named("dynamic_slice dynamic_update_slice slice")
_OTHER_MOVES = named("gather pad reduce_window_sum scatter select_and_gather_add select_and_scatter_add")


def _as_numbers(step: Step, masks: list[Mask]) -> Operands:
    """Operands in which a wire is one where it is fed and zero elsewhere, and known summands are zero."""
    return [_as_number(step, operand, mask) for operand, mask in zip(step.operands, masks, strict=True)]


def _as_number(step: Step, operand: Any, mask: Mask) -> Any:
    if isinstance(operand, Wire):
        return full_like(mask, operand.aval).astype(operand.aval.dtype)
    if step.name in _STEERED or not is_floating(jax.typeof(operand)):
        return operand
    return jnp.zeros_like(operand)


def _moved(step: Step, fed: list[Mask]) -> list[Mask]:
    wires = step.of_wires(fed)
    only_wires = not any(is_floating(jax.typeof(operand)) for operand in step.known)
    if all(mask is True for mask in wires) and only_wires and _covers_result(step):
        return [True] * len(step.results)
    if step.name in _BY_AXES and not isinstance(fed[0], bool):
        return [_BY_AXES[step.name][0](step, fed[0])]
    if is_reshape(step.equation) and not isinstance(fed[0], bool):
        return [_reshaped(fed[0], step.wires[0].shape, step.shape)]
    windows = _windows(step)
    if windows is not None:
        return _put_together(fed, windows, step.shape) if step.name in ASSEMBLIES else _cut_up(fed[0], windows)
    numbers = _as_numbers(step, fed)
    if step.name == "scatter-sub":
        # So that two masks add up.
        numbers[2] = -numbers[2]
    return _united([bind(read.equation, numbers) for read in _readings(step)])


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


def _united(readings: list[Operands]) -> list[Mask]:
    """The elements that any of some moves reaches."""
    return [either(*(number != 0 for number in numbers)) for numbers in zip(*readings, strict=True)]


def _new_axes(step: Step) -> tuple[int, ...]:
    kept = step.equation.params["broadcast_dimensions"]
    return tuple(axis for axis in range(len(step.shape)) if axis not in kept)


# Masks need not be written out along whole axes: how they go through, and back.
_BY_AXES: dict[str, tuple[Callable[[Step, Any], Mask], Callable[[Step, Any], Mask]]] = {
    "broadcast_in_dim": (
        lambda step, mask: expanded(mask, _new_axes(step)),
        lambda step, mask: gathered(any_along(mask, _new_axes(step)), step.wires[0].shape),
    ),
    "reduce_sum": (
        lambda step, mask: any_along(mask, step.equation.params["axes"]),
        lambda step, mask: expanded(mask, step.equation.params["axes"]),
    ),
    "transpose": (
        lambda step, mask: permuted(mask, step.equation.params["permutation"]),
        lambda step, mask: permuted(mask, np.argsort(step.equation.params["permutation"]).tolist()),
    ),
}


def _covers_result(step: Step) -> bool:
    if step.name == "gather":
        # In the other modes, an index out of bounds reads another element; here it reads a constant.
        return step.equation.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP
    return step.name in _ONTO_RESULT


def _moved_back(step: Step, demanded: list[Mask]) -> list[Mask]:
    if step.name in _ONTO_OPERAND and all(mask is True for mask in demanded) and _drops_nothing(step):
        return [True] * len(step.wires)
    if step.name in _BY_AXES and not isinstance(demanded[0], bool):
        return [_BY_AXES[step.name][1](step, demanded[0])]
    if is_reshape(step.equation) and not isinstance(demanded[0], bool):
        return [_reshaped(demanded[0], step.shape, step.wires[0].shape)]
    windows = _windows(step)
    if windows is not None:
        if step.name not in ASSEMBLIES:
            return _put_together(demanded, windows, step.wires[0].shape)
        return [mask for mask, linear in zip(_cut_up(demanded[0], windows), step.linear, strict=False) if linear]
    cotangents = [
        full_like(mask, wire.aval).astype(wire.aval.dtype) for mask, wire in zip(demanded, step.results, strict=True)
    ]
    moved = step.with_known([_as_number(step, operand, False) for operand in step.known])
    return _united([read.transposed(cotangents) for read in _readings(moved)])


def _reshaped(mask: jax.Array, old: Shape, new: Shape) -> Mask:
    """A mask through a reshape; axes that only appear or vanish need not be written out."""
    kept = [size for size in old if size != 1], [size for size in new if size != 1]
    if kept[0] != kept[1] or 0 in old:
        return reshaped(filled_out(mask, old), new)
    sizes = iter(size for size, whole in zip(mask.shape, old, strict=True) if whole != 1)
    return reshaped(mask, [1 if size == 1 else next(sizes) for size in new])


def _windows(step: Step) -> list[Window] | None:
    # The padding of a `pad` lies everywhere.
    return windows_of(step.equation) if step.name != "pad" or step.linear == [True, False] else None


def _cut_up(mask: Mask, windows: Sequence[Window]) -> list[Mask]:
    """The masks of the parts of an array."""
    if isinstance(mask, bool):
        return [mask] * len(windows)
    at = lambda window: tuple(slice(None) if size == 1 else w for size, w in zip(mask.shape, window, strict=True))
    return [lifted(operator.itemgetter(at(window)))(mask) for window in windows]


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


def _drops_nothing(step: Step) -> bool:
    return step.name not in {"scatter-add", "scatter-sub"} or not isinstance(step.operands[2], Wire)


# --- selections -----------------------------------------------------------------------------------------------------


def _selected(step: Step, fed: list[Mask]) -> list[Mask]:
    if isinstance(step.operands[0], Wire):
        return lanes_fed(step, fed)
    cases = fed[1:]
    if all(mask is True for mask in cases):
        return [True]
    return [either(*(both(mask, _taken(step, case)) for case, mask in enumerate(cases)))]


def _selected_back(step: Step, demanded: list[Mask]) -> list[Mask]:
    cases = enumerate(step.operands[1:])
    return [both(demanded[0], _taken(step, case)) for case, operand in cases if isinstance(operand, Wire)]


def _taken(step: Step, case: int) -> Mask:
    return taken(step.operands[0], case, len(step.shape))


_LANES = structural(lanes_fed, lanes_demanded)

RULES.update(
    {
        **dict.fromkeys(_LANE_BY_LANE, _LANES),
        **dict.fromkeys(_ONTO_RESULT | _ONTO_OPERAND | _OTHER_MOVES, structural(_moved, _moved_back)),
        **dict.fromkeys(("device_put", "optimization_barrier"), structural(lambda step, fed: fed, _each_demanded)),
        "select_n": structural(_selected, _selected_back),
    }
)
