"""`nonfinite="report"`: keep the arguments of the first gradient that is not finite, and say so.

Nothing leaves the device while all is well: the callback is in a branch. Under `jax.vmap` a branch would be taken for
every member of the batch, so the batch is reduced to its first bad member beforehand.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .._programs import Operands, Recorded, host_copies
from .._trees import is_array
from .call import Call
from .kept import Kept, keep


def watch(call: Call, leaves: list[Any], gradients: Sequence[Any], has_aux: bool) -> None:
    """Keep the arguments of a call if a gradient is not finite."""
    is_bad = functools.reduce(jnp.logical_or, [jnp.any(~jnp.isfinite(gradient)) for gradient in gradients])
    name = getattr(call.f, "__name__", type(call.f).__name__)
    program = Recorded(call, (leaves,), {}, [True] * len(leaves), call.paths, has_aux)
    operands = program.taken()
    found, treedef = jax.tree.flatten((tuple(call.args), call.kwargs))
    # Without the arrays, which may be tracers and are not to be kept alive.
    others = [(is_array(leaf), None if is_array(leaf) else leaf) for leaf in found]
    arrays = [leaf for leaf in found if is_array(leaf)]

    def arguments(arrays: Operands) -> Any:
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if is_one else other for is_one, other in others])

    def arrive(*values: Any) -> None:
        copies = host_copies(values)
        keep(Kept(name, program, copies[: len(operands)], arguments, copies[len(operands) :]))

    _hand_over(arrive, lax.stop_gradient(is_bad), lax.stop_gradient([*operands, *arrays]))


def _hand_over(arrive: Callable[..., None], is_bad: Any, operands: Operands) -> None:
    """Call a function of the host with these values, if they are bad."""

    @custom_vmap
    def hand_over(is_bad: Any, operands: Operands) -> Any:
        lax.cond(is_bad, lambda values: jax.debug.callback(arrive, *values), lambda values: None, operands)
        return is_bad

    @hand_over.def_vmap
    def hand_over_first(size: int, batched: Any, is_bad: Any, operands: Operands) -> Any:
        is_each, are_batched = batched
        first = jnp.argmax(is_bad) if is_each else 0
        one = [value[first] if own else value for value, own in zip(operands, are_batched, strict=True)]
        hand_over(jnp.any(is_bad), one)
        return is_bad, is_each

    hand_over(is_bad, operands)
