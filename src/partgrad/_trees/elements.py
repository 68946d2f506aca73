"""Elements of one leaf: which they are, how to take them out and put them back, and set operations on them.

A set of elements is an array of positions in the flattened leaf, in the shape that the elements have when taken out;
None stands for the whole leaf.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._message import word
from ..errors import PartsError

Elements: TypeAlias = np.ndarray | None


def positions(shape: tuple[int, ...], index: Any) -> np.ndarray:
    """The positions that an index selects, as NumPy indexes; an IndexError where there are none."""
    return np.asarray(np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[index])


def take(leaf: Any, elements: Elements) -> Any:
    """The elements of a leaf."""
    return leaf if elements is None else leaf.reshape(-1)[elements]


def put(leaf: Any, elements: Elements, value: Any) -> Any:
    """The leaf with other elements."""
    if elements is None:
        return value
    if jnp.shape(value) != elements.shape:
        raise PartsError(
            word(
                "The new elements do not fit the selected ones.",
                f"Expected shape {elements.shape}, got {jnp.shape(value)}.",
                fix="give one value for each selected element, in their shape.",
            )
        )
    if isinstance(leaf, np.ndarray) and not isinstance(value, jax.Array):
        # Stays NumPy's: a jax array may have less precision.
        new = leaf.astype(np.result_type(leaf, value))
        new.reshape(-1)[elements] = value
        return new
    flat = jnp.asarray(leaf).reshape(-1)
    if jnp.iscomplexobj(value) and not jnp.iscomplexobj(flat):
        flat = flat.astype(jnp.result_type(flat, value))
    return flat.at[elements].set(value, unique_indices=True).reshape(leaf.shape)


def overlap(several: list[Elements]) -> bool:
    """Whether an element is there twice."""
    if len(several) > 1 and any(elements is None for elements in several):
        return True
    flat = np.concatenate([elements.ravel() for elements in several if elements is not None] or [np.zeros(0, int)])
    return len(np.unique(flat)) < len(flat)


def joined(several: list[Elements]) -> Elements:
    """Disjoint sets of elements as one, in order of position if they are more than one."""
    if len(several) == 1:
        return several[0]
    return np.sort(np.concatenate([elements.ravel() for elements in several if elements is not None]))


def common(first: Elements, second: Elements) -> Elements:
    """The elements that are in both; an empty array where there are none."""
    if first is None or second is None:
        return second if first is None else first
    return np.intersect1d(first, second)


def without(first: Elements, second: Elements, size: int) -> Elements:
    """The elements of the first that are not in the second; an empty array where there are none."""
    if second is None:
        return np.zeros(0, int)
    return np.setdiff1d(np.arange(size) if first is None else first, second)
