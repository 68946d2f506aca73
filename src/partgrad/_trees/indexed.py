"""Elements of one leaf that an index with arrays of JAX selects: which they are may be known only when a program runs.

An element may be selected twice. The derivative at each of its positions is that of the element, as if all positions
had been taken out of the gradient of the whole leaf.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..errors import ElementError


class Indexed:
    """The elements that an index selects, where it holds arrays of JAX; compared by identity.

    Args:
        index: The index, by JAX's rules: integers count from the end if negative, and beyond the end nothing is
            written.
        shape: The shape of the leaf.

    Attributes:
        shape: The shape of the elements when they are taken out.
    """

    def __init__(self, index: Any, shape: tuple[int, ...]):
        self._index = index
        self.shape: tuple[int, ...] = jax.eval_shape(lambda: jnp.zeros(shape).at[index].get()).shape

    @property
    def size(self) -> int:
        """How many they are, an element that is selected twice counted twice."""
        return math.prod(self.shape)

    def ravel(self) -> NoReturn:
        """Raise: nothing can be said of each of them before the program runs."""
        raise ElementError(
            "The selector takes elements by an array of JAX, and each of them is to have a name or a place of its own.",
            "Expected elements that are known while the program is made.",
            fix="index with integers of Python or NumPy, or select the whole leaf.",
        )

    def take(self, leaf: Any) -> Any:
        """The elements of a leaf."""
        return jnp.asarray(leaf).at[self._index].get(mode="clip")

    def put(self, leaf: Any, value: Any) -> Any:
        """The leaf with other elements, as an array of JAX."""
        leaf = jnp.asarray(leaf)
        parts = self._index if isinstance(self._index, tuple) else (self._index,)
        is_array = [isinstance(part, jax.Array) for part in parts]
        arrays = [part for part, own in zip(parts, is_array, strict=True) if own]

        def indexed(leaf: Any, arrays: list[Any]) -> Any:
            rest = iter(arrays)
            return leaf.at[tuple(next(rest) if own else part for part, own in zip(parts, is_array, strict=True))]

        return _written(indexed)(leaf, arrays, jnp.asarray(value, leaf.dtype))


def _written(indexed: Callable[..., Any]) -> Callable[..., Any]:
    """A write whose derivative with respect to a new element is that with respect to the element it is written to."""

    @jax.custom_jvp
    def written(leaf: Any, arrays: list[Any], value: Any) -> Any:
        return indexed(leaf, arrays).set(value, mode="drop")

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        (leaf, arrays, _), (along, _, added) = primals, tangents
        # Where elements are written, nothing is left of the tangent of the leaf.
        is_still = isinstance(along, SymbolicZero)
        along = jnp.zeros_like(leaf) if is_still else indexed(along, arrays).set(0, mode="drop")
        if not isinstance(added, SymbolicZero):
            # Not the one that is written last: an element has one derivative, at all its positions.
            along = indexed(along, arrays).add(added, mode="drop")
        return written(*primals), along

    written.defjvp(rule, symbolic_zeros=True)
    return written
