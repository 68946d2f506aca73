"""Equality of trees as one bool: structure first, then leaf by leaf."""

from typing import Any

import jax
import numpy as np

from .leaf import dtype_of, shape_of


def trees_equal(first: Any, second: Any) -> bool:
    """Whether two trees have the same structure (classes, marks, static data) and the same leaves.

    Leaves are equal if they are one object, or have the same shape, dtype and values. Two different tracers are never
    equal: their values are not known while tracing, and the answer is one bool.
    """
    leaves, structure = jax.tree.flatten(first)
    other_leaves, other_structure = jax.tree.flatten(second)
    try:
        alike = bool(structure == other_structure)
    except Exception:
        # Another library's auxiliary data holds an array, which has no single answer.
        return False
    return alike and all(map(_leaves_equal, leaves, other_leaves))


def _leaves_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
        return False
    try:
        if shape_of(first) != shape_of(second) or dtype_of(first) != dtype_of(second):
            return False
    except AttributeError:
        return type(first) is type(second) and bool(first == second)
    if jax.dtypes.issubdtype(dtype_of(first), jax.dtypes.prng_key):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    return np.array_equal(np.asarray(first), np.asarray(second))
