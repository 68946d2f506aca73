"""`nonfinite="report"`: keep the arguments of the first gradient that is not finite, and say so.

While all is well, nothing leaves the device under `jax.jit`, where the callback is in a branch, and one bool does in a
call that nothing traces. Under `jax.vmap` a branch would be taken for every member of the batch, so the batch is
reduced to its first bad member beforehand.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .._programs import Operands, Recorded, host_copies, read
from .._trees import is_array, is_known
from .call import Call
from .kept import Kept, keep


def watch(call: Call, leaves: list[Any], gradients: Sequence[Any], has_aux: bool) -> None:
    """Keep the arguments of a call if a gradient is not finite."""
    if not gradients:
        return
    found_bad = [jnp.any(~jnp.isfinite(gradient)) for gradient in gradients]
    is_bad = lax.stop_gradient(functools.reduce(jnp.logical_or, found_bad))
    # Outside of `jit`, a program would be made on every call.
    found = is_bad if is_known(is_bad) else _in_batch(is_bad)
    if is_known(found) and not jax.device_get(found):
        return
    call = call.unreduced
    name, leaves = getattr(call.f, "__name__", type(call.f).__name__), call.selected
    program = Recorded(call, (leaves,), {}, [True] * len(leaves), call.paths, has_aux)
    operands = program.taken()
    given, treedef = jax.tree.flatten((tuple(call.args), call.kwargs))
    # Without the arrays, which may be tracers and are not to be kept alive.
    others = [None if _has_value(leaf) else (leaf,) for leaf in given]
    are_references = [isinstance(leaf, jax.Ref) for leaf in given]
    arrays = [read(leaf) for leaf in given if _has_value(leaf)]
    count = len(operands)

    def arguments(arrays: Operands) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if other is None else other[0] for other in others]
        pairs = zip(leaves, are_references, strict=True)
        return treedef.unflatten([jax.new_ref(jnp.asarray(leaf)) if is_one else leaf for leaf, is_one in pairs])

    def arrive(*values: Any) -> None:
        copies = host_copies(values)
        keep(Kept(name, program, copies[:count], arguments, copies[count:]))

    _hand_over(arrive, is_bad, lax.stop_gradient([*operands, *arrays]))


def _has_value(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.Ref)


@custom_vmap
def _in_batch(is_bad: Any) -> Any:
    """Whether any member of the batch is bad: a known value under a `jax.vmap` that is not inside of `jit`."""
    return is_bad


@_in_batch.def_vmap
def _in_batch_of_batches(size: int, batched: Any, is_bad: Any) -> Any:
    found = jnp.any(is_bad)
    return found if is_known(found) else _in_batch(found), False


def _hand_over(arrive: Callable[..., None], is_bad: Any, operands: Operands) -> None:
    """Call a function of the host with these values, if they are bad."""
    if all(map(is_known, [is_bad, *operands])):
        if jax.device_get(is_bad):
            arrive(*operands)
        return

    @custom_vmap
    def hand_over(is_bad: Any, operands: Operands) -> Any:
        lax.cond(is_bad, lambda values: jax.debug.callback(arrive, *values), lambda values: None, operands)
        return is_bad

    @hand_over.def_vmap
    def hand_over_first(size: int, batched: Any, is_bad: Any, operands: Operands) -> Any:
        is_each, are_batched = batched
        first = jnp.argmax(is_bad) if is_each else 0
        one = [value[first] if own else value for value, own in zip(operands, are_batched, strict=True)]
        _hand_over(arrive, jnp.any(is_bad), one)
        return is_bad, is_each

    hand_over(is_bad, operands)
