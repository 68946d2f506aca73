"""Masks: which elements of a tangent there is a path for.

A mask is `True` (all elements), `False` (none), or a bool array of the tangent's rank, of size one along the axes where
it says the same of every element. The first two are known while tracing and cost nothing when the program runs.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import varying_axes

Mask: TypeAlias = bool | jax.Array
Shape = tuple[int, ...]


def either(*masks: Mask) -> Mask:
    """The elements in at least one mask."""
    return functools.reduce(_or, masks, False)


def _or(a: Mask, b: Mask) -> Mask:
    if a is True or b is True:
        return True
    if a is False or b is False:
        return b if a is False else a
    return a | b


def both(a: Mask, b: Mask) -> Mask:
    """The elements in both masks."""
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    return a & b


def anywhere(masks: Iterable[Mask], keep: int = 0) -> Mask:
    """Whether any element is in any of the masks, for each index of the first axes, with the other axes of size one.

    Args:
        masks: Masks that agree in their first axes.
        keep: How many axes are kept; 0 for a scalar.
    """
    reduced = [m if isinstance(m, bool) else m.any(tuple(range(keep, m.ndim)), keepdims=keep > 0) for m in masks]
    return either(*reduced)


def full(mask: Mask, shape: Shape) -> jax.Array:
    """A mask as an array."""
    return jnp.full(shape, mask) if isinstance(mask, bool) else jnp.broadcast_to(mask, shape)


def spread(mask: Mask, shape: Shape) -> Mask:
    """A mask of an operand as a mask of the result it is broadcast to."""
    return mask if isinstance(mask, bool) else jnp.expand_dims(mask, tuple(range(len(shape) - mask.ndim)))


def gathered(mask: Mask, shape: Shape) -> Mask:
    """A mask of a result as a mask of an operand that was broadcast to it."""
    if isinstance(mask, bool) or not exceeds(mask, shape):
        return mask
    mask = mask.any(tuple(range(mask.ndim - len(shape))))
    ones = tuple(axis for axis, size in enumerate(shape) if size == 1 and mask.shape[axis] != 1)
    return mask.any(ones, keepdims=True)


def exceeds(mask: jax.Array, shape: Shape) -> bool:
    """Whether a mask tells apart what is one element in a shape."""
    pairs = zip(mask.shape[::-1], shape[::-1], strict=False)
    return mask.ndim > len(shape) or any(of_mask > size for of_mask, size in pairs)


def on_all_devices(mask: Mask, aval: Any) -> Mask:
    """A mask of a tangent that, inside `shard_map`, is the same on some devices, from what each of these says of it."""
    axes = frozenset[Any]() if isinstance(mask, bool) else varying_axes(jax.typeof(mask)) - varying_axes(aval)
    return jax.lax.pmax(jnp.asarray(mask, jnp.int8), tuple(sorted(axes))) > 0 if axes else mask


def varying_over(axes: frozenset[Any], arrays: Any) -> Any:
    """A tree of arrays that, inside `shard_map`, vary over some mesh axes at least."""

    def one(array: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(jax.typeof(array))))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(one, arrays)


def placed(mask: jax.Array, axes: Sequence[int], rank: int) -> jax.Array:
    """A mask whose axes become the given axes among several, which says the same along all others."""
    others = tuple(axis for axis in range(rank) if axis not in axes)
    return jnp.expand_dims(jnp.transpose(mask, np.argsort(axes).tolist()), others)


def arrays_in(masks: Iterable[Mask]) -> list[jax.Array]:
    """The masks that are arrays; `restored` puts them back."""
    return [mask for mask in masks if not isinstance(mask, bool)]


def restored(masks: Iterable[Mask], arrays: Iterable[Any]) -> list[Mask]:
    """Masks with other arrays in the place of their arrays."""
    rest = iter(arrays)
    return [mask if isinstance(mask, bool) else next(rest) for mask in masks]
