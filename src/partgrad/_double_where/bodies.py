"""Masks through conditionals, checkpoints and `shard_map`: they enter and leave a body with the values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .._programs import (
    CHECKPOINTS,
    Operands,
    Recent,
    as_array,
    bind,
    branches_of,
    checkpoint_like,
    checkpoint_settings,
    evaluate,
    is_recomputed,
    jaxpr_and_consts,
    lasts,
    operation_of,
    primal_jaxpr,
    shard_map_like,
    shard_map_specs,
    shared_axes,
    step_through,
    switch_like,
    varying_axes,
    without_dead_code,
)
from .backward import Through
from .known import numbers_of, remember, remembering
from .linear import linear_outputs
from .masked import Masked, State, arrays_in, clean, fitted, joined, restored, state_of, with_masks
from .masks import Mask, full_like, united

# Models repeat them.
_checkpoints: Recent[tuple[Any, list[State]]] = Recent(128)


class _Body:
    """A jaxpr, walked from values and arrays of masks to values and arrays of masks.

    Attributes:
        states: What is known of the masks of its outputs, once it was run.
    """

    def __init__(self, jaxpr: Any, items: Sequence[Masked], through: Through):
        self._jaxpr, self._items, self._through = jaxpr, items, through
        self.states: list[State] = []

    def run(self, values: Operands, arrays: Operands) -> tuple[Operands, list[Mask | None]]:
        """The values and the masks of the outputs."""
        with remembering(inside=True):
            for item, value in zip(self._items, values, strict=True):
                remember(value, numbers_of(item.value))
            jaxpr, consts = jaxpr_and_consts(self._jaxpr)
            items = with_masks(values, [state_of(item.mask) for item in self._items], arrays)
            found = self._through(jaxpr, consts, items)
            outputs = [as_array(clean(item), v.aval) for item, v in zip(found, jaxpr.outvars, strict=True)]
        self.states = [state_of(item.mask) for item in found]
        return outputs, [item.mask for item in found]

    def with_arrays(self, values: Operands, arrays: Operands) -> tuple[Operands, Operands]:
        """The values and the masks that are arrays."""
        outputs, masks = self.run(values, arrays)
        return outputs, arrays_in(masks)


def _parted(items: Sequence[Masked]) -> tuple[Operands, Operands]:
    """Values, and those masks that are arrays."""
    return [item.value for item in items], arrays_in([item.mask for item in items])


def cond(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a conditional whose index is fixed."""
    given, avals = items[1:], [variable.aval for variable in equation.outvars]
    values, arrays = _parted(given)
    bodies = [_Body(branch, given, through) for branch in branches_of(equation)]
    traced = [jax.make_jaxpr(body.with_arrays)(values, arrays) for body in bodies]
    states = joined([body.states for body in bodies], avals)

    def of(closed: Any, own: Sequence[State]) -> Callable[..., tuple[Operands, Operands]]:
        def branch(values: Operands, arrays: Operands) -> tuple[Operands, Operands]:
            outputs = evaluate(*jaxpr_and_consts(closed), [*values, *arrays])
            values, masks = outputs[: len(avals)], restored(own, outputs[len(avals) :])
            return values, fitted(masks, states, [jax.typeof(value) for value in values])

        return branch

    branches = [of(closed, body.states) for closed, body in zip(traced, bodies, strict=True)]
    values, arrays = switch_like(equation, items[0].value, branches, values, arrays)
    return with_masks(values, states, arrays)


def checkpoint(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a checkpoint."""
    body, (values, arrays) = _Body(primal_jaxpr(equation), items, through), _parted(items)
    _, flags = checkpoint_settings(equation)
    prevented = (list(flags), [False] * len(arrays)) if isinstance(flags, tuple) else None

    def trace() -> tuple[Any, list[State]]:
        inner, consts = jaxpr_and_consts(jax.make_jaxpr(body.with_arrays)(values, arrays))
        pruned = without_dead_code(inner)
        run = checkpoint_like(equation, lambda *given: evaluate(pruned, consts, [*given[0], *given[1]]), prevented)
        return jax.make_jaxpr(run)(values, arrays), body.states

    operation = operation_of(equation) if all(numbers_of(value) is None for value in values) else None
    shapes = tuple(map(jax.typeof, [*values, *arrays]))
    key = operation and (operation, shapes, tuple(state_of(item.mask) for item in items), through)
    traced, states = _checkpoints.of(key, trace, lambda made: lasts(made[0]))
    found = step_through(*jaxpr_and_consts(traced), [*values, *arrays], functools.partial(_recomputed, equation))
    return with_masks(found[: len(equation.outvars)], states, found[len(equation.outvars) :])


def _recomputed(of: JaxprEqn, equation: JaxprEqn, operands: Operands) -> Operands:
    # Part of a derivative, it has to hide from the compiler that it computes values again.
    changed = {"differentiated": is_recomputed(of)} if equation.primitive.name in CHECKPOINTS else {}
    return bind(equation, operands, **changed)


def shard_map(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a `shard_map`: a mask is split among the devices like its value."""
    body = _Body(primal_jaxpr(equation), items, through)
    ins, outs = shard_map_specs(equation)
    is_array = [isinstance(item.mask, jax.Array) for item in items]
    arrays = [full_like(i.mask, jax.typeof(i.value)) for i, a in zip(items, is_array, strict=True) if a]
    linear = linear_outputs(primal_jaxpr(equation), [item.mask is not None for item in items])

    def run(values: Operands, arrays: Operands) -> tuple[Operands, Operands]:
        values, masks = body.run(values, arrays)
        whole = []
        for mask, value, spec, is_linear in zip(masks, values, outs, linear, strict=True):
            if is_linear:
                # Of what is the same on some devices, the union of their masks.
                excess = frozenset() if isinstance(mask, bool | None) else varying_axes(jax.typeof(mask))
                axes = shared_axes(equation, spec) | excess - varying_axes(jax.typeof(value))
                joint = united(False if mask is None else mask, axes)
                whole.append(full_like(joint, jax.typeof(value)))
        return values, whole

    specs = list(ins), [spec for spec, a in zip(ins, is_array, strict=True) if a]
    of_results = list(outs), [spec for spec, is_linear in zip(outs, linear, strict=True) if is_linear]
    values, arrays = shard_map_like(equation, run, specs, of_results)([item.value for item in items], arrays)
    rest = iter(arrays)
    masks = [next(rest) if is_linear else None for is_linear in linear]
    pairs = zip(values, masks, body.states, strict=True)
    return [Masked(value, state if isinstance(state, bool) else mask) for value, mask, state in pairs]
