"""The cheapest statement: whether a gradient is finite, and how large it is, at several points."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import silent_callbacks
from .._programs import Operands, quick_jit
from .own import cotangents_of, is_finite, weights_of
from .program import differentiable


class Glance(NamedTuple):
    """A function at one point.

    Attributes:
        outputs: Its floating and complex outputs.
        sizes: For each leaf the largest element of its gradient; NaN or infinite if one is.
    """

    outputs: Operands
    sizes: list[float]

    @property
    def is_value_finite(self) -> bool:
        """Whether all outputs are finite."""
        return all(map(is_finite, self.outputs))

    @property
    def bad(self) -> tuple[int, ...]:
        """The leaves whose gradient is not finite."""
        return tuple(number for number, size in enumerate(self.sizes) if not np.isfinite(size))


def glance(
    function: Callable[[Operands], Callable[[Any], Any]], points: Sequence[tuple[Any, Operands]], forward: bool
) -> list[Glance]:
    """The values and the gradients of the weighted sum that `check` differentiates, at each point.

    The points are taken one after another: under `vmap`, a `cond` is a selection, whose other branch may make a NaN.
    """

    def run(point: Any, operands: Operands) -> tuple[Operands, Operands]:
        outputs_of = lambda leaves: differentiable(function(operands)(leaves))
        if forward:
            ones = jax.tree.map(jnp.ones_like, point)
            outputs, tangents = jax.jvp(outputs_of, (point,), (ones,))
            return outputs, [_size(tangents)] * len(jax.tree.leaves(point))
        outputs, pull = jax.vjp(outputs_of, point)
        # Hidden, so that XLA does not fold a gradient that is linear in them, for which it takes seconds.
        weights = jax.lax.optimization_barrier(jnp.asarray(weights_of(outputs, np.random.default_rng(0))))
        (gradient,) = pull(cotangents_of(weights, outputs))
        return outputs, [_size([leaf]) for leaf in jax.tree.leaves(gradient)]

    compiled = quick_jit(run)
    with silent_callbacks():
        found = [jax.device_get(compiled(jax.tree.map(jnp.asarray, point), operands)) for point, operands in points]
    return [Glance(outputs, [float(size) for size in sizes]) for outputs, sizes in found]


def _size(values: Operands) -> Any:
    """The largest element of some arrays."""
    wide = lambda value: jnp.promote_types(jnp.abs(value).dtype, jnp.float32)
    return jnp.stack([0.0, *(jnp.max(jnp.abs(value).astype(wide(value)), initial=0) for value in values)]).max()
