"""`nonfinite=`: keep the arguments of the first derivative that is not finite, and say so; or of every call, on disk.

While all is well, "report" moves nothing off the device under `jax.jit`, where the callback is in a branch, and one
bool in a call that nothing traces. Under `jax.vmap` a branch would be taken for every member of the batch, so the batch
is reduced to its first bad member beforehand. A sum says whether to look closer: it is not finite if a number in it is
not, and the host looks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .._programs import Operands, Recorded, host_copies, read
from .._trees import is_array, is_known
from .call import Call
from .kept import Kept, keep
from .ring import Description, KeepCalls


def watch(call: Call, values: Sequence[Any], has_aux: bool, nonfinite: Any) -> None:
    """Keep the arguments of a call if a derivative is not finite, or in any case if `nonfinite` says so."""
    values = _numbers(values)
    if not values:
        return
    is_suspect = _is_suspect(values)
    # Outside of `jit`, a program would be made on every call.
    found = is_suspect if is_known(is_suspect) else _in_batch(is_suspect)
    if isinstance(nonfinite, KeepCalls) or not is_known(found) or jax.device_get(found):
        Watcher.of(call, has_aux, nonfinite).hand_over(is_suspect, values)


@jax.tree_util.register_pytree_node_class
class Watcher:
    """A call that is kept if a derivative that is found later is not finite; a pytree of the arrays of the call.

    Args:
        arrive: Takes whether the derivative is suspect, the numbers of it, and these arrays, on the host.
        arrays: The arrays.
        is_always: Whether it arrives in any case.
    """

    def __init__(self, arrive: Callable[..., None], arrays: Operands, is_always: bool):
        self._arrive, self._arrays, self._is_always = arrive, arrays, is_always

    @classmethod
    def of(cls, call: Call, has_aux: bool, nonfinite: Any) -> "Watcher":
        """What keeps a call."""
        call = call.unreduced
        name, leaves = getattr(call.f, "__name__", type(call.f).__name__), call.selected
        program = Recorded(call, (leaves,), {}, [True] * len(leaves), call.paths, has_aux)
        operands = program.taken()
        given, treedef = jax.tree.flatten((tuple(call.written.args), call.written.kwargs))
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

        description = None
        if isinstance(nonfinite, KeepCalls):
            description = Description.of(name, call, treedef, others, has_aux)

        def arrive(is_suspect: Any, found: Operands, values: Operands) -> None:
            is_bad = bool(is_suspect) and not all(np.isfinite(np.asarray(value)).all() for value in found)
            if description is not None:
                nonfinite.write(description, host_copies(values[count:]), is_bad)
            elif is_bad:
                copies = host_copies(values)
                keep(Kept(name, program, copies[:count], arguments, copies[count:]))

        return cls(arrive, lax.stop_gradient([*operands, *arrays]), description is not None)

    def watch(self, values: Sequence[Any]) -> None:
        """Keep the call if one of these values is not finite."""
        values = _numbers(values)
        if values:
            self.hand_over(_is_suspect(values), values)

    def hand_over(self, is_suspect: Any, values: Operands) -> None:
        """Keep the call if a derivative among these is not finite."""
        _hand_over(self._arrive, self._is_always, is_suspect, values, self._arrays)

    def tree_flatten(self) -> tuple[Any, Any]:
        """The arrays, and the rest."""
        return (self._arrays,), (self._arrive, self._is_always)

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> "Watcher":
        """The same call with other arrays."""
        return cls(rest[0], children[0], rest[1])


def _has_value(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.Ref)


def _numbers(values: Sequence[Any]) -> Operands:
    """The arrays among the values of a derivative that may hold something that is not finite."""
    values = [value for value in values if value is not None and jnp.issubdtype(value.dtype, jnp.inexact)]
    return list(lax.stop_gradient(values))


def _is_suspect(values: Operands) -> Any:
    """Whether a value may be not finite: its sum is not, or overflows, which is one operation for each number."""
    wide = lambda value: jnp.promote_types(value.dtype, jnp.float32) if value.dtype.itemsize <= 2 else None
    return _either([~jnp.isfinite(jnp.sum(value, dtype=wide(value))) for value in values])


def _is_bad(values: Operands) -> Any:
    return _either([jnp.any(~jnp.isfinite(value)) for value in values])


def _either(flags: Operands) -> Any:
    return functools.reduce(jnp.logical_or, flags)


@custom_vmap
def _in_batch(is_suspect: Any) -> Any:
    """Whether any member of the batch is suspect: a known value under a `jax.vmap` that is not inside of `jit`."""
    return is_suspect


@_in_batch.def_vmap
def _in_batch_of_batches(size: int, batched: Any, is_suspect: Any) -> Any:
    found = jnp.any(is_suspect)
    return found if is_known(found) else _in_batch(found), False


def _hand_over(
    arrive: Callable[..., None], is_always: bool, is_suspect: Any, values: Operands, operands: Operands
) -> None:
    """Call a function of the host with values of a derivative and with operands, if they are suspect or in any case."""
    if all(map(is_known, [is_suspect, *values, *operands])):
        flag = jax.device_get(is_suspect)
        if flag or is_always:
            arrive(flag, values, operands)
        return

    @custom_vmap
    def hand_over(is_suspect: Any, values: Operands, operands: Operands) -> Any:
        call = lambda values, operands: jax.debug.callback(arrive, is_suspect, values, operands)
        if is_always:
            # Of the values nothing is needed where they are not suspect; they are looked at here.
            is_bad = jnp.logical_and(is_suspect, _is_bad(values))
            jax.debug.callback(arrive, is_bad, [jnp.where(is_bad, jnp.inf, 0.0)], operands)
        else:
            lax.cond(is_suspect, call, lambda *_: None, values, operands)
        return is_suspect

    @hand_over.def_vmap
    def hand_over_first(size: int, batched: Any, is_suspect: Any, values: Operands, operands: Operands) -> Any:
        is_each, of_values, of_operands = batched
        axes = [0 if own else None for own in of_values]
        is_bad = jax.vmap(lambda *own: _is_bad(list(own)), axes, axis_size=size)(*values)
        # The member that is bad, if there is one; a sum that overflows is none.
        is_bad = jnp.logical_and(is_suspect, is_bad)
        first = jnp.argmax(is_bad)
        one = lambda given, are: [own[first] if is_one else own for own, is_one in zip(given, are, strict=True)]
        _hand_over(arrive, is_always, jnp.any(is_bad), one(values, of_values), one(operands, of_operands))
        return is_suspect, is_each

    hand_over(is_suspect, values, operands)
