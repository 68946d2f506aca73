"""Elements of one leaf: which they are, how to take them out and put them back, and their set operations.

A set of elements is an array of positions in the flattened leaf, in the shape that the elements have when taken out;
None stands for the whole leaf. Where an index holds arrays of JAX, nothing but the index is known of them (`indexed`).
"""

import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..errors import ElementError
from .indexed import Indexed

Elements: TypeAlias = np.ndarray | Indexed | None

_LARGE = 2**16
_NONE = np.zeros(0, int)


def positions(shape: tuple[int, ...], index: Any) -> np.ndarray:
    """The positions that an index selects by NumPy's rules; an IndexError if there are none."""
    size = math.prod(shape)
    if size <= _LARGE:
        return np.asarray(np.arange(size).reshape(shape)[index])
    # A number for each entry of a large leaf would take more than twice its memory.
    axes = (np.broadcast_to(axis, shape)[index] for axis in np.ogrid[tuple(map(slice, shape))])
    return np.asarray(np.ravel_multi_index(tuple(axes), shape))


def take(leaf: Any, elements: Elements) -> Any:
    """The elements of a leaf."""
    if elements is None:
        return leaf
    if isinstance(elements, Indexed):
        return elements.take(leaf)
    # A matrix of NumPy has two dimensions whatever is taken.
    leaf = np.asarray(leaf) if isinstance(leaf, np.matrix) else leaf
    window = _window(jnp.shape(leaf), elements)
    return leaf.reshape(-1)[elements] if window is None else leaf[window[0]].reshape(elements.shape)


def _window(shape: tuple[int, ...], elements: np.ndarray) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
    """The slices that take these elements, and the shape of the result; None if no slices do.

    Devices that share a leaf take slices of their parts without communication.
    """
    flat = elements.ravel()
    if not flat.size:
        return None
    size, first, count = math.prod(shape[1:]), int(flat[0]), len(flat)
    if not (first % size or count % size) and int(flat[-1]) - first == count - 1 and ascend(flat):
        # Whole steps along the leading axis, as of layers that are stacked: there may be a great many numbers in them.
        return (slice(first // size, (first + count) // size),), (count // size, *shape[1:])
    slices = []
    for axis in np.unravel_index(flat, shape):
        first, last = int(axis[0]), int(axis[-1])
        beyond = axis[axis > first]
        slices.append(slice(first, last + 1, int(beyond.min()) - first if beyond.size else 1))
    if math.prod(len(range(*own.indices(size))) for own, size in zip(slices, shape, strict=True)) != flat.size:
        # As for a diagonal, whose window has a number for each entry of the leaf.
        return None
    taken = np.ravel_multi_index(np.ix_(*(np.r_[own] for own in slices)), shape)
    return (tuple(slices), taken.shape) if np.array_equal(taken.ravel(), flat) else None


def put(leaf: Any, elements: Elements, value: Any) -> Any:
    """The leaf with other elements, as an array of JAX; a traced value has the dtype of the leaf there."""
    if elements is None:
        return value
    if isinstance(elements, Indexed):
        return elements.put(leaf, value)
    new = jnp.asarray(leaf)
    window = _window(new.shape, elements)
    if window is None:
        return new.reshape(-1).at[elements].set(value, unique_indices=True).reshape(new.shape)
    return new.at[window[0]].set(value.reshape(window[1]), unique_indices=True)


def overlap(several: list[Elements]) -> bool:
    """Whether an element occurs twice; of those that an array of JAX selects, nobody asks."""
    if _is_alone(several):
        return False
    if len(several) > 1 and any(elements is None for elements in several):
        return True
    flat = np.concatenate([_known(elements).ravel() for elements in several if elements is not None] or [_NONE])
    # Many take long to be sorted, as those of a slice of a large leaf.
    return not ascend(flat) and len(np.unique(flat)) < len(flat)


def ascend(flat: np.ndarray) -> bool:
    """Whether each of some positions is beyond the one before it."""
    return bool((flat[1:] > flat[:-1]).all())


def joined(several: list[Elements]) -> Elements:
    """The union of sets of elements, sorted by position if they differ."""
    if _is_alone(several):
        return several[0]
    arrays = [_known(elements) for elements in several if elements is not None]
    if all(np.array_equal(elements, arrays[0]) for elements in arrays[1:]):
        return arrays[0]
    return np.unique(np.concatenate([elements.ravel() for elements in arrays]))


def common(first: Elements, second: Elements) -> Elements:
    """The elements in both; an empty array if there are none."""
    if first is None or second is None:
        return second if first is None else first
    return np.intersect1d(_known(first), _known(second))


def without(first: Elements, second: Elements, size: int) -> Elements:
    """The elements of the first that are not in the second; an empty array if there are none."""
    if second is None:
        return _NONE
    return np.setdiff1d(np.arange(size) if first is None else _known(first), _known(second))


def _is_alone(several: list[Elements]) -> bool:
    return len(several) == 1 and isinstance(several[0], Indexed)


def _known(elements: "np.ndarray | Indexed") -> np.ndarray:
    """Elements that are combined with others of the leaf, or left out; an error if nobody knows which they are."""
    if isinstance(elements, Indexed):
        raise ElementError(
            "The selector combines elements of a leaf, and takes some of them by an array of JAX.",
            "Expected one index for all elements of the leaf: whether two of them overlap is not known.",
            fix="join the indices: m.table[jax.numpy.concatenate([rows, others])].",
        )
    return elements
