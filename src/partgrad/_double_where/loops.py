"""Masks in the carry of a loop, beside their values.

What is known of a carried mask while tracing must hold at every step, so a body is traced until it no longer changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._programs import (
    Operands,
    as_array,
    bind,
    evaluate,
    jaxpr_and_consts,
    scan_like,
    scan_of,
    while_of,
    without_dead_code,
)
from .backward import Through
from .known import is_zero, remembering
from .linear import carried_tangents
from .masked import Masked, State, arrays_in, clean, fitted, joined, restored, state_of, with_masks
from .masks import Mask


def _settled(
    walk: Callable[..., list[Masked]],
    avals: Sequence[Any],
    out_avals: Sequence[Any],
    states: list[State],
    scanned: Sequence[Any] = (),
    whole: bool = False,
) -> tuple[Any, list[State], list[State]]:
    """A traced body, the states of its outputs, and those of its carries, which are the same after every step.

    Args:
        walk: From carries and what is scanned to the outputs of the body.
        avals: Of the carries.
        out_avals: Of the outputs.
        states: Those in which the carries start.
        scanned: The shapes of what is scanned.
        whole: Whether a mask that is an array has the shape of its carry.
    """
    outputs: list[State] = []

    def step(carry: Operands, masks: Operands, *scanned: Any) -> tuple[Operands, Operands]:
        with remembering(inside=True):
            values, new = _left(walk(with_masks(carry, states, masks), *scanned), out_avals, states)
        outputs[:] = map(state_of, new)
        return values, arrays_in(new)

    while True:
        # A function of its own, which JAX has not traced for other states.
        body = jax.make_jaxpr(lambda *given: step(*given))(avals, _shapes(states, avals), *scanned)
        # A carry that the body overwrites with a number is no longer a tangent, but others may see it as one.
        carried = [old if new is None else new for new, old in zip(outputs, states, strict=False)]
        grown = joined([states, carried], avals)
        grown = [tuple(a.shape) if whole and isinstance(s, tuple) else s for s, a in zip(grown, avals, strict=True)]
        if grown == states:
            return body, outputs, states
        states = grown


def _left(found: Sequence[Masked], avals: Sequence[Any], states: Sequence[State]) -> tuple[Operands, list[Mask | None]]:
    """The values and masks that a body leaves, given the states of what it carries; what is stacked has none."""
    values = [as_array(clean(item), aval) for item, aval in zip(found, avals, strict=True)]
    states = [*states, *[None] * (len(found) - len(states))]
    # A carry that started as a tangent and is known now is live where it is not zero.
    became_known = lambda item, state: item.mask is None and state is not None
    pairs = zip(found, states, strict=True)
    return values, [not is_zero(i.value) if became_known(i, state) else i.mask for i, state in pairs]


def _first(items: Sequence[Masked], linear: Sequence[bool]) -> list[State]:
    pairs = zip(items, linear, strict=True)
    return [state_of(item.mask) if item.mask is not None else False if moves else None for item, moves in pairs]


class _Scanned:
    """The scanned operands of a loop: those masks that are the same at every step are constants."""

    def __init__(self, items: Sequence[Masked]):
        self.values = [item.value for item in items]
        self._constant: list[Mask | None] = []
        self.arrays, self._is_scanned = list[Any](), list[bool]()
        for mask in (item.mask for item in items):
            varies = isinstance(mask, jax.Array) and mask.shape[0] != 1
            self._constant.append(None if varies else mask[0] if isinstance(mask, jax.Array) else mask)
            self._is_scanned.append(varies)
            self.arrays += [mask] if varies else []

    def at(self, values: Operands, arrays: Operands) -> list[Masked]:
        """What a step gets of them."""
        rest = iter(arrays)
        triples = zip(values, self._constant, self._is_scanned, strict=True)
        return [Masked(value, next(rest) if varies else constant) for value, constant, varies in triples]


def scan(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a scan."""
    loop = scan_of(equation)
    jaxpr, consts = jaxpr_and_consts(loop.body)
    count, carries = loop.carried, slice(loop.consts, loop.consts + loop.carried)
    constant, carried, xs = items[: loop.consts], items[carries], _Scanned(items[carries.stop :])
    if not loop.length:
        results = bind(equation, [item.value for item in items])
        return [*carried, *(Masked(ys, False) for ys in results[count:])]
    avals, out_avals = [v.aval for v in jaxpr.invars[carries]], [v.aval for v in jaxpr.outvars]
    slices = [v.aval for v in jaxpr.invars[carries.stop :]], [jax.typeof(array[0]) for array in xs.arrays]
    linear = carried_tangents(loop.body, [item.mask is not None for item in items], loop.consts, count)
    # An accumulator starts at zero and is everything afterwards.
    pairs = zip(_first(carried, linear[carries]), avals, strict=True)
    states: list[State] = [(1,) * len(aval.shape) if state is False else state for state, aval in pairs]

    walk = lambda carry, x, x_masks: through(jaxpr, consts, [*constant, *carry, *xs.at(x, x_masks)])
    body, outputs, states = _settled(walk, avals, out_avals, states, slices)
    used = _used_masks(body, count, states)
    start = [as_array(item.value, aval) for item, aval in zip(carried, avals, strict=True)]
    start_masks = fitted([item.mask for item in carried], states, list(map(jax.typeof, start)))

    def step(carry: Any, x: Any) -> Any:
        (values, masks), (x, x_masks) = carry, x
        found = evaluate(*jaxpr_and_consts(body), [*values, *masks, *x, *x_masks])
        values, new = found[: len(out_avals)], restored(outputs, found[len(out_avals) :])
        carried = fitted(new[:count], states, list(map(jax.typeof, values[:count])))
        # A mask that no step reads stays as it was.
        kept = [mask if is_used else old for mask, is_used, old in zip(carried, used, masks, strict=True)]
        return (values[:count], kept), (values[count:], arrays_in(new[count:]))

    (values, masks), (ys, y_masks) = scan_like(equation, step, (start, start_masks), (xs.values, xs.arrays))
    final = _final(outputs[:count], states, masks, used)
    return [*map(Masked, values, final), *with_masks(ys, outputs[count:], y_masks)]


def _shapes(states: Sequence[State], avals: Sequence[Any]) -> list[Any]:
    """The masks that are arrays, spread over devices as their values are."""
    return jax.make_jaxpr(lambda: fitted([False] * len(states), states, avals))().out_avals


def _used_masks(body: Any, count: int, states: Sequence[State]) -> list[bool]:
    """Which of the masks that are arrays the next step reads."""
    inner, _ = jaxpr_and_consts(body)
    atoms = [atom for e in without_dead_code(inner).eqns for atom in e.invars] + list(inner.outvars)
    used = {atom for atom in atoms if not isinstance(atom, Literal)}
    arrays = sum(isinstance(state, tuple) for state in states)
    return [variable in used for variable in inner.invars[count : count + arrays]]


def _final(
    outputs: Sequence[State], states: Sequence[State], masks: Sequence[Any], used: Sequence[bool]
) -> list[Mask | None]:
    """The masks of the last carry; everything where none was carried."""
    carried = restored(states, [mask if is_used else True for mask, is_used in zip(masks, used, strict=True)])
    return [mask if isinstance(output, tuple) else output for output, mask in zip(outputs, carried, strict=True)]


def while_loop(equation: JaxprEqn, items: Sequence[Masked], through: Through) -> list[Masked]:
    """The results of a `while` loop, whose condition is known."""
    loop, count = while_of(equation), len(equation.outvars)
    jaxpr, consts = jaxpr_and_consts(loop.body)
    tested, rest = items[: loop.test_consts], items[loop.test_consts :]
    constant, carried = rest[: loop.body_consts], rest[loop.body_consts :]
    avals = [v.aval for v in jaxpr.invars[loop.body_consts :]]
    linear = carried_tangents(loop.body, [item.mask is not None for item in rest], loop.body_consts, count)
    test, test_consts = jaxpr_and_consts(loop.test)
    # Under `vmap`, each element of the batch (the leading axes of every carry) stops on its own.
    is_batched = bool(test.outvars[0].aval.shape)
    states = _first(carried, linear[loop.body_consts :])

    walk = lambda carry: through(jaxpr, consts, [*constant, *carry])
    body, outputs, states = _settled(walk, avals, avals, states, whole=is_batched)
    start = [as_array(item.value, aval) for item, aval in zip(carried, avals, strict=True)]
    start_masks = fitted([item.mask for item in carried], states, list(map(jax.typeof, start)))
    going = lambda carry: evaluate(test, test_consts, [*(item.value for item in tested), *carry[0]])[0]

    def step(carry: Any) -> Any:
        found = evaluate(*jaxpr_and_consts(body), [*carry[0], *carry[1]])
        values, masks = found[:count], restored(outputs, found[count:])
        new = values, fitted(masks, states, list(map(jax.typeof, values)))
        if not is_batched:
            return new
        on = going(carry)
        wide = lambda value: lax.broadcast_in_dim(on, value.shape, range(on.ndim))
        return jax.tree.map(lambda after, before: lax.select(wide(after), after, before), new, carry)

    values, masks = lax.while_loop(lambda carry: going(carry).any(), step, (start, start_masks))
    return with_masks(values, states, masks)
