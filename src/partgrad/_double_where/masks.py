"""Masks: for which elements of a tangent there is a path.

A mask is `True` (all elements), `False` (none), or a bool array of the tangent's rank, of size one along axes where all
elements agree. The first two are known while tracing and cost nothing when the program runs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._programs import explicit_sharding, varying_like
from .known import LARGEST, by_axes, conjunction, factors, learn, lifted, once, product, reshaped, union

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
    found = union(a, b)
    if found is not None:
        return found
    joined = lambda: lifted(np.logical_or, _lanewise(jax.lax.bitwise_or))(*_together(a, b))
    (one, own), (other, others) = factors(a), factors(b)
    if one is not other or math.prod(np.broadcast_shapes(own.shape, others.shape)) > LARGEST:
        return joined()
    elements = own | others
    # What is put together of parts is selected by one predicate, as its parts are.
    for mask, part in ((a, own), (b, others)):
        if np.array_equal(part, elements) and not elements.all():
            return mask
    return product(one, elements, joined)


def both(a: Mask, b: Mask) -> Mask:
    """The elements in both masks."""
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    return conjunction(a, b, lambda: lifted(np.logical_and, _lanewise(jax.lax.bitwise_and))(*_together(a, b)))


def _lanewise(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    # An operator of arrays would take several times as long to trace.
    def of_masks(a: Any, b: Any) -> Any:
        shape = np.broadcast_shapes(a.shape, b.shape)
        return operation(spelled_out(a, shape), spelled_out(b, shape))

    return of_masks


def spelled_out(value: Any, shape: Shape) -> Any:
    """A value broadcast to a shape."""
    old = jnp.shape(value)
    axes = range(len(shape) - len(old), len(shape))
    return value if old == shape else jax.lax.broadcast_in_dim(value, shape, axes)


def _together(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two masks; on every device if their shardings on a mesh with explicit axes cannot be combined."""
    placed = [explicit_sharding(jax.typeof(mask)) for mask in (a, b)]
    if None in placed:
        return a, b
    pairs = list(itertools.zip_longest(*(sharding.spec[::-1] for sharding in placed)))
    names = [name for one, other in pairs for name in np.atleast_1d(one or other or [])]
    if all(None in (one, other) or one == other for one, other in pairs) and len(set(names)) == len(names):
        return a, b
    return jax.sharding.reshard(a, PartitionSpec()), jax.sharding.reshard(b, PartitionSpec())


def anywhere(masks: Iterable[Mask], keep: int = 0) -> Mask:
    """Whether any element is in any of the masks, for each index of the first axes, with the other axes of size one.

    Args:
        masks: Masks that agree in their first axes.
        keep: How many axes are kept; 0 for a scalar.
    """
    of_array = lambda m: any_along(m, range(keep, m.ndim), keepdims=keep > 0)
    reduced = [m if isinstance(m, bool) else of_array(m) for m in masks]
    return either(*reduced)


def full_like(mask: Mask, aval: Any, shape: Shape | None = None) -> jax.Array:
    """A mask as an array of the shape of a tangent, or of another shape, that is spread over devices like it."""
    shape = tuple(aval.shape) if shape is None else shape
    return varying_like(jax.lax.full(shape, mask) if isinstance(mask, bool) else spelled_out(mask, shape), aval)


def spread(mask: Mask, shape: Shape) -> Mask:
    """The mask of an operand as a mask of the result it is broadcast to."""
    return mask if isinstance(mask, bool) else expanded(mask, range(len(shape) - mask.ndim))


def united(mask: Mask, axes: Iterable[Any]) -> Mask:
    """The elements in the mask of any device along some mesh axes."""
    axes = tuple(sorted(axes))
    return mask if isinstance(mask, bool) or not axes else jax.lax.pmax(jnp.asarray(mask, jnp.int8), axes) > 0


def placed(mask: Mask, axes: Sequence[int], rank: int) -> Mask:
    """A mask whose axes become the given axes among several, constant along all others."""
    others = [axis for axis in range(rank) if axis not in axes]
    return expanded(permuted(mask, np.argsort(axes).tolist()), others)


def any_along(mask: Mask, axes: Iterable[int], keepdims: bool = False) -> Mask:
    """Whether any element along given axes is in a mask."""
    axes = tuple(axes)
    if isinstance(mask, bool) or not axes:
        return mask
    if all(mask.shape[axis] == 1 for axis in axes):
        reduced = mask
    else:
        of_traced = lambda m: jax.lax.expand_dims(jax.lax.reduce_or(m, axes), axes)
        of_numbers = lambda m: m.any(axes, keepdims=True)
        of_mask = lambda m: lifted(of_numbers, of_traced)(m) if any(m.shape[axis] != 1 for axis in axes) else m
        reduced = once(("any", axes), mask, lambda: by_axes(mask, of_mask, of_numbers))
        learn(reduced, part=mask)
    if keepdims:
        return reduced
    kept = lambda m: [size for axis, size in enumerate(m.shape) if axis not in axes]
    return by_axes(reduced, lambda m: reshaped(m, kept(m)), lambda m: m.reshape(kept(m)))


def expanded(mask: Mask, axes: Iterable[int]) -> Mask:
    """A mask with new axes, along which it is constant."""
    axes = tuple(axes)
    if isinstance(mask, bool) or not axes:
        return mask

    def new(m: Any) -> list[int]:
        sizes = iter(m.shape)
        return [1 if axis in axes else next(sizes) for axis in range(m.ndim + len(axes))]

    return by_axes(mask, lambda m: reshaped(m, new(m)), lambda m: m.reshape(new(m)))


def permuted(mask: Mask, permutation: Sequence[int]) -> Mask:
    """A mask with its axes in another order."""
    if isinstance(mask, bool):
        return mask

    def of_mask(m: jax.Array) -> Mask:
        along = [axis for axis in permutation if m.shape[axis] != 1]
        if along == sorted(along):
            return reshaped(m, [m.shape[axis] for axis in permutation])
        return lifted(lambda m: m.transpose(permutation), lambda m: jax.lax.transpose(m, permutation))(m)

    return by_axes(mask, of_mask, lambda m: m.transpose(permutation))


def filled_out(mask: Mask, shape: Shape) -> Mask:
    """A mask in its full shape, unless it is known to be equal for all elements."""
    if isinstance(mask, bool) or tuple(mask.shape) == tuple(shape):
        return mask
    filled = lifted(lambda m: np.broadcast_to(m, shape), lambda m: spelled_out(m, tuple(shape)))(mask)
    learn(filled, factors=factors(mask))
    return filled
