"""`reduce=`: a cotangent reduced in the backward pass, where it is made, so that only the result is kept.

A named value passes a *tap*, a function that returns it and ignores a second operand. The cotangent of that operand is
what the reduction makes of the cotangent of the value. It is one array of floats per value, so it is stacked, split
among devices and left out of branches as any other cotangent is; its first number says that the tap was reached.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._message import at
from .._programs import Operands, Site, evaluate, jaxpr_and_consts, varying_like
from .._trees import describe, is_known
from ..errors import ArgumentError

Reduce = Callable[[Any], Any]


class Reduction:
    """What is reduced of the values of one selector.

    Args:
        reduce: The function of a cotangent.
    """

    def __init__(self, reduce: Reduce):
        self._reduce = reduce
        self._packings: dict[Any, Packing] = {}

    def site(self, site: Site) -> Site:
        """What comes back of a value instead of its cotangent."""
        key = site.shape, site.dtype, site.sharding
        if key not in self._packings:
            self._packings[key] = Packing(self._reduce, site)
        packing, old = self._packings[key], site.sharding
        sharding = None if old is None else NamedSharding(old.mesh, PartitionSpec())
        return site._replace(shape=(packing.size,), dtype=packing.dtype, sharding=sharding, note=packing)


class Packing:
    """How what a reduction returns for one value becomes an array, and is made of it again.

    Args:
        reduce: The function of a cotangent.
        site: The value.

    Attributes:
        dtype: The dtype of the array, which holds each number of the result exactly.
        size: Its length.
        captured: The traced values that the function closes over.
    """

    def __init__(self, reduce: Reduce, site: Site):
        self._reduce, self._site = reduce, site
        try:
            like = jax.ShapeDtypeStruct(site.shape, site.dtype, sharding=site.sharding)
            closed, found = jax.make_jaxpr(self._reduced, return_shape=True)(like)
        except Exception as error:
            # Whatever it raises is raised.
            error.add_note(f"partgrad: in `reduce` of the cotangent of {at(site.name)}, {site.type}.")
            raise
        jaxpr, consts = jaxpr_and_consts(closed)
        # A backward pass inside a loop is staged where it cannot close over them.
        self.captured = consts if any(isinstance(const, jax.core.Tracer) for const in consts) else []
        self._jaxpr = jaxpr
        leaves, self._treedef = jax.tree.flatten(found)
        self._shapes, self._dtypes = [leaf.shape for leaf in leaves], [leaf.dtype for leaf in leaves]
        single = lambda dtype: 8 if jnp.issubdtype(dtype, jnp.complexfloating) else 4
        is_double = any(dtype.itemsize > single(dtype) for dtype in self._dtypes)
        self.dtype = np.dtype(np.float64 if is_double else np.float32)
        lengths = [
            math.prod(shape) * self._width(dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        self._starts = list(itertools.accumulate(lengths, initial=1))
        self.size = self._starts[-1]

    def _reduced(self, cotangent: Any) -> Any:
        leaves, treedef = jax.tree.flatten(self._reduce(cotangent))
        for leaf in leaves:
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex) or (
                jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else float, jax.dtypes.extended)
            ):
                raise ArgumentError(
                    f"`reduce` of the cotangent of {at(self._site.name)} returns {describe(leaf)}.",
                    "Expected a pytree of arrays of numbers or bools.",
                    fix="return arrays: lambda h: {'norm': jax.numpy.linalg.norm(h), 'max': jax.numpy.max(h)}.",
                )
        return treedef.unflatten([self._replicated(jnp.asarray(leaf)) for leaf in leaves])

    def _replicated(self, leaf: Any) -> Any:
        # Arrays of different shardings have no common one that a single array of their numbers could have.
        old = self._site.sharding
        return leaf if old is None else reshard(leaf, NamedSharding(old.mesh, PartitionSpec()))

    def _width(self, dtype: Any) -> int:
        """How many floats hold a number of a dtype."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return 2
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        return 2 if is_integer and jnp.iinfo(dtype).bits > jnp.finfo(self.dtype).nmant + 1 else 1

    def packed(self, cotangent: Any, captured: Operands) -> Any:
        """What the reduction makes of a cotangent, as one array; `captured` are the values that it closes over."""
        parts = [jnp.ones(1, self.dtype)]
        leaves = evaluate(self._jaxpr, captured, [cotangent]) if captured else self._reduced(cotangent)
        for leaf in jax.tree.leaves(leaves):
            halves = [leaf]
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                halves = [leaf.real, leaf.imag]
            elif self._width(leaf.dtype) == 2:
                half = jnp.iinfo(leaf.dtype).bits // 2
                halves = [leaf >> half, leaf & ((1 << half) - 1)]
            parts += [half.astype(self.dtype).ravel() for half in halves]
        return jnp.concatenate(parts)

    def unpacked(self, array: Any) -> Any:
        """What the reduction returned, from arrays of it; their first axes come first in each leaf."""
        leaves = [
            self._leaf(array[..., start:stop], shape, dtype)
            for (start, stop), shape, dtype in zip(
                itertools.pairwise(self._starts), self._shapes, self._dtypes, strict=True
            )
        ]
        is_reached = array[..., 0] > 0
        if is_known(is_reached):
            leaves = leaves if is_reached.all() else self._with_zeros(is_reached, leaves)
        else:
            leaves = lax.cond(jnp.all(is_reached), lambda _, own: own, self._with_zeros, is_reached, leaves)
        return self._treedef.unflatten(leaves)

    def _with_zeros(self, is_reached: Any, leaves: list[Any]) -> list[Any]:
        """The same, with what the reduction makes of zeros where no cotangent arrived."""
        # A zero that the compiler does not know, or it may spend long on a reduction of constants.
        zero = jnp.all(is_reached).astype(self._site.dtype)
        cotangent = jnp.broadcast_to(zero, self._site.shape)
        if self._site.sharding is not None:
            cotangent = reshard(cotangent, self._site.sharding)
        zeros = jax.tree.leaves(self._reduced(cotangent))
        pick = lambda own, other: jnp.where(is_reached.reshape(is_reached.shape + (1,) * other.ndim), own, other)
        return list(map(pick, leaves, zeros))

    def _leaf(self, numbers: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        count = math.prod(shape)
        first, second = numbers[..., :count], numbers[..., count:]
        if jnp.issubdtype(dtype, jnp.complexfloating):
            first = lax.complex(first, second)
        elif self._width(dtype) == 2:
            first = (first.astype(dtype) << jnp.iinfo(dtype).bits // 2) | second.astype(dtype)
        return first.reshape(*numbers.shape[:-1], *shape).astype(dtype)


def tapped(packing: Packing, value: Any, packed: Any) -> Any:
    """The value; the cotangent of `packed` is what a reduction makes of its own."""
    kind = jax.typeof(packed)

    @jax.custom_vjp
    def tap(value: Any, packed: Any, captured: Operands) -> Any:
        return value

    def backward(captured: Operands, cotangent: Any) -> tuple[Any, Any, None]:
        # What is the same on all devices has a place for each of them, too.
        return cotangent, varying_like(packing.packed(cotangent, captured), kind), None

    tap.defvjp(lambda value, packed, captured: (value, captured), backward)
    return tap(value, packed, packing.captured)
