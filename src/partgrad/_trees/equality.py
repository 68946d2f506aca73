"""Equality of trees as one bool: structure first, then leaf by leaf."""

from typing import Any

import jax
import numpy as np

from .exact import exact_key
from .leaf import is_differentiable, number_class, shape_of


def trees_equal(first: Any, second: Any) -> bool:
    """Whether two trees have the same structure (classes, marks, static data) and the same leaves.

    Leaves are equal if they are one object, or if no program could tell them apart: both Python numbers of one type, or
    both arrays of one shape, dtype and weak type, with the same values down to the sign of zero. (`jax.jit` compares
    what it specialises on by `==`, and would reuse the program of one for the other.) Two different tracers are never
    equal: their values are not known while tracing, and the answer is one bool.
    """
    leaves, treedef = jax.tree.flatten(first)
    other_leaves, other_treedef = jax.tree.flatten(second)
    try:
        alike = bool(treedef == other_treedef)
    except Exception:
        # Another library's auxiliary data may hold an array, whose comparison is not a single bool.
        return False
    return alike and all(map(_leaves_equal, leaves, other_leaves))


def _leaves_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
        return False
    if not (_is_array(first) and _is_array(second)):
        # JAX has numbers of its own.
        kind = number_class(first)
        if kind is None or kind is not number_class(second):
            return bool(exact_key(first) == exact_key(second))
        return bool(first == second) and _same_sign(first, second)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in (first, second)):
        # Donated; nothing is known of its values.
        return False
    if shape_of(first) != shape_of(second) or first.dtype != second.dtype or _is_weak(first) is not _is_weak(second):
        return False
    if jax.dtypes.issubdtype(first.dtype, jax.dtypes.prng_key):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    if _subclass(first) is not _subclass(second):
        return False
    if not np.array_equal(np.ma.getmaskarray(first), np.ma.getmaskarray(second)):
        return False
    first, second = np.asarray(first), np.asarray(second)
    return np.array_equal(first, second) and _same_sign(first, second)


def _subclass(leaf: Any) -> type | None:
    """The class of an array of NumPy that is not a plain one: a masked array, a matrix."""
    return type(leaf) if isinstance(leaf, np.ndarray) and type(leaf) is not np.ndarray else None


def _is_array(leaf: Any) -> bool:
    # A NumPy array of strings, objects or records is compared by what is in it.
    is_other = isinstance(leaf, np.ndarray | np.generic) and not any(
        jax.numpy.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)
    )
    return hasattr(leaf, "dtype") and number_class(leaf) is None and not is_other


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def _same_sign(first: Any, second: Any) -> bool:
    """Whether equal numbers have the same sign of zero."""
    if not is_differentiable(first):
        return True
    components = [(np.real(first), np.real(second)), (np.imag(first), np.imag(second))]
    return all(np.array_equal(np.signbit(one), np.signbit(other)) for one, other in components)
