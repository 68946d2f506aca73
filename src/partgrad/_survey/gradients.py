"""The gradients at all states: one compiled program, which keeps of each state only what a report needs."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from .._check import CONCRETIZATION, Progress, cotangents_of, differentiable, weights_of
from .._compat import silent_callbacks
from .._programs import jaxpr_and_consts, size_of
from .._transforms import Arguments, first_of_pair
from ..errors import ArgumentError
from .states import States

Array = np.ndarray[Any, Any]
# So many numbers are computed at a time, if nobody says how many states.
_AT_A_TIME = 1e7
# How many rounding errors of the value a coarse difference may have.
_NOISES = 100.0
_NEEDS_VALUES = (
    "partgrad: a survey compiles the function for many states, as jax.vmap does, and it needs the value of one.\n"
    "Fix: write jnp.where or jax.lax.cond for `if`; or check one state after another, partgrad.check(f)(params, state)."
)


class Gradients(NamedTuple):
    """The gradients of some leaves at some states.

    Attributes:
        sizes: The root mean square of the entries of each leaf at each state: 0 where all are zero, NaN where one is
            not finite.
        zero: For each leaf at how many states each of its entries is zero.
        not_finite: The same for NaN and infinity.
        positive: The same for positive ones.
        negative: The same for negative ones.
        values: At how many states the value is not finite.
        doubts: For each state how far a coarse difference is off the gradient, from 0 to 1: where to look, no verdict.
        chunk: How many states were computed at a time.
    """

    sizes: Array
    zero: list[Array]
    not_finite: list[Array]
    positive: list[Array]
    negative: list[Array]
    values: int
    doubts: Array
    chunk: int


def gradients_at(
    states: States, arguments: Arguments, has_aux: bool, seed: int, chunk_size: int | None, name: str, shown: Progress
) -> Gradients:
    """The gradients at all states, some states at a time.

    Args:
        states: The arguments.
        arguments: Which leaves are differentiated.
        has_aux: Whether the function returns auxiliary data as well.
        seed: For the weights of several outputs, which are those of a check.
        chunk_size: How many states are computed at a time; None decides by the size of the program.
        name: What the function is called.
        shown: Where the progress is shown.
    """
    program = _Program(states, arguments, has_aux, seed, name)
    try:
        closed = jax.make_jaxpr(program.gradient)(states.one, program.same)
    except CONCRETIZATION as error:
        error.add_note(_NEEDS_VALUES)
        raise
    chunk = min(states.count, chunk_size or _fitting(jaxpr_and_consts(closed)[0]))
    starts = [*range(0, states.count - chunk + 1, chunk)]
    # Some states of the last chunk were counted before.
    starts += [states.count - chunk] * (states.count % chunk > 0)
    of_chunk, doubts_of_chunk = jax.jit(program.counted), jax.jit(program.doubts)
    shown.expect(len(starts))
    done, sizes, totals, values, doubts = 0, list[list[Array]](), list[list[Array]](), 0, list[Array]()
    for start in starts:
        new, batch = np.arange(start, start + chunk) >= done, states.batch(start, chunk)
        found, gradients, counted, bad = of_chunk(batch, program.same, jnp.asarray(new))
        doubts.append(_ran(doubts_of_chunk, batch, program.same, gradients)[new])
        found, counted, bad = jax.device_get((found, counted, bad))
        sizes.append([size[new] for size in found])
        totals = counted if not totals else jax.tree.map(np.add, totals, counted)
        values, done = values + int(bad.sum()), start + chunk
        shown.tick("gradients")
    joined = [np.concatenate(parts) for parts in zip(*sizes, strict=True)]
    zero, not_finite, positive, negative = totals
    return Gradients(np.stack(joined), zero, not_finite, positive, negative, values, np.concatenate(doubts), chunk)


class _Program:
    """The function as one of the leaves with an axis of states, at one state and at many.

    Attributes:
        same: The differentiated leaves that are the same in all states.
    """

    def __init__(self, states: States, arguments: Arguments, has_aux: bool, seed: int, name: str):
        self._states, self._arguments, self._has_aux, self._seed, self._name = states, arguments, has_aux, seed, name
        self._others = [number for number in _differentiated(states, arguments) if number not in set(states.mapped)]
        self.same = [states.leaves[number] for number in self._others]

    def _at(self, of_state: Sequence[Any], same: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
        """The outputs as a function of the differentiated leaves, and these."""
        leaves = list(self._states.leaves)
        for number, leaf in zip([*self._states.mapped, *self._others], [*of_state, *same], strict=True):
            leaves[number] = leaf
        call = self._arguments.call_to_check(*self._states.arguments(leaves))
        outputs = lambda values: differentiable(
            first_of_pair(call(list(values))) if self._has_aux else call(list(values))
        )
        return outputs, [jnp.asarray(leaf) for leaf in call.selected]

    def _cotangents(self, outputs: list[Any]) -> list[Any]:
        return cotangents_of(weights_of(outputs, np.random.default_rng(self._seed)), outputs)

    def gradient(self, of_state: Sequence[Any], same: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the gradient of each leaf."""
        outputs, leaves = self._at(of_state, same)
        found, pull = jax.vjp(outputs, leaves)
        if not found:
            raise ArgumentError(
                f"`{self._name}` returns nothing that has a derivative.",
                "Expected at least one floating or complex array among its outputs.",
                fix="return the number to differentiate; integers have no derivative.",
            )
        return found, pull(self._cotangents(found))[0]

    def counted(self, batch: Sequence[Any], same: Sequence[Any], counts: Any) -> tuple[Any, ...]:
        """Of a chunk of states: sizes, gradients, the counts of each entry, and which values are not finite."""
        outputs, gradients = jax.vmap(self.gradient, in_axes=(0, None))(batch, same)
        is_bad = jnp.stack([~jnp.isfinite(o.reshape(counts.size, -1)).all(axis=1) for o in outputs]).any(axis=0)
        spread = lambda gradient: counts.reshape(-1, *[1] * (gradient.ndim - 1))
        found = [[jnp.sum(test(g) & spread(g), axis=0) for g in gradients] for test in _TESTS]
        return [jax.vmap(_size)(gradient) for gradient in gradients], gradients, found, is_bad & counts

    def doubts(self, batch: Sequence[Any], same: Sequence[Any], gradients: Sequence[Any]) -> Any:
        """Of a chunk of states: how far a coarse difference along a random direction is off the gradient."""

        def of_state(of_state: Sequence[Any], same: Sequence[Any], gradient: Sequence[Any]) -> Any:
            outputs, leaves = self._at(of_state, same)
            along, generator = [], np.random.default_rng(self._seed)
            for leaf in leaves:
                factors = generator.choice([-1.0, 1.0], leaf.shape) * generator.uniform(0.5, 1.5, leaf.shape)
                largest = jnp.max(jnp.abs(leaf), initial=0.0)
                size = jnp.where(leaf == 0, jnp.where(largest == 0, 1.0, largest), jnp.abs(leaf))
                along.append((size * factors).astype(leaf.dtype))
            unit = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
            step = unit ** (1 / 3)
            total = lambda by: sum(
                jnp.sum(jnp.real(weight * value))
                for weight, value in _weighted(
                    self, outputs([leaf + by * v for leaf, v in zip(leaves, along, strict=True)])
                )
            )
            right, left = total(step), total(-step)
            slope = (right - left) / (2 * step)
            got = sum(jnp.sum(jnp.real(g * v)) for g, v in zip(gradient, along, strict=True))
            noise = _NOISES * unit * (jnp.abs(right) + jnp.abs(left)) / step
            doubt = jnp.abs(slope - got) / (jnp.abs(slope) + jnp.abs(got) + noise + jnp.finfo(jnp.float32).tiny)
            return jnp.where(jnp.isfinite(doubt), doubt, 0.0)

        return jax.vmap(of_state, in_axes=(0, None, 0))(batch, same, gradients)


def _weighted(program: _Program, outputs: list[Any]) -> Any:
    return zip(program._cotangents(outputs), outputs, strict=True)


def _ran(doubts: Callable[..., Any], batch: list[Any], same: list[Any], gradients: list[Any]) -> Array:
    """The doubts; none where the function raises an error at a point beside, as `equinox.error_if` does."""
    try:
        with silent_callbacks():
            return np.asarray(doubts(batch, same, gradients))
    except jax.errors.JaxRuntimeError:
        return np.zeros(len(jax.tree.leaves(batch)[0]))


_TESTS: tuple[Callable[[Any], Any], ...] = (
    lambda g: g == 0,
    lambda g: ~jnp.isfinite(g),
    lambda g: jnp.real(g) > 0,
    lambda g: jnp.real(g) < 0,
)


def _size(gradient: Any) -> Any:
    """The root mean square, without over- or underflow: NaN if an entry is not finite, and 0 only if all are zero."""
    largest = jnp.max(jnp.abs(gradient), initial=0.0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    mean = jnp.sqrt(jnp.mean((jnp.abs(gradient) / scale) ** 2)) if gradient.size else jnp.zeros(())
    # What is hardly more than zero is not zero.
    least = jnp.where(largest > 0, jnp.finfo(largest.dtype).tiny, 0.0)
    size = jnp.where(jnp.isfinite(largest), jnp.maximum(scale * mean, least), jnp.nan)
    return size.astype(jnp.promote_types(largest.dtype, jnp.float32))


def _differentiated(states: States, arguments: Arguments) -> list[int]:
    """The numbers of the differentiated leaves among those of all arguments."""
    args, kwargs = states.at(0)
    call = arguments.call_to_check(args, kwargs)
    positions: list[Any] = [*range(len(args)), *sorted(kwargs)]
    begins, begin = {}, 0
    for position in positions:
        begins[position] = begin
        begin += len(jax.tree.leaves(kwargs[position] if isinstance(position, str) else args[position]))
    return [begins[t.position] + i for t in call.targets if t.position in begins for i in t.plan.indices]


def _fitting(jaxpr: Jaxpr) -> int:
    """How many states are computed at a time, so that memory is bounded."""
    _, numbers = size_of(jaxpr)
    return max(1, math.floor(_AT_A_TIME / max(numbers, 1.0)))
