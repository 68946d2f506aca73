"""What a leaf is that is not differentiated."""

from typing import Any

import jax
import jax.numpy as jnp

from .._marks import Place
from .._trees import describe, is_differentiable


def status_of(place: Place, leaf: Any) -> str:
    """What a leaf is that is not differentiated."""
    if place.mark >= 0:
        return "static array" if place.is_static else "held by a mark"
    if is_differentiable(leaf):
        return "not selected"
    if isinstance(leaf, bool | int):
        return "bool" if isinstance(leaf, bool) else "integer"
    if isinstance(leaf, str):
        return "string"
    # A type whose name says what it is, or `function`, where there is no dtype.
    return _status_of_dtype(leaf.dtype) or type(leaf).__name__ if hasattr(leaf, "dtype") else describe(leaf)


def _status_of_dtype(dtype: Any) -> str | None:
    if getattr(dtype, "kind", None) in ("U", "T"):
        return "string"
    kinds = (("key", jax.dtypes.prng_key), ("bool", jnp.bool_), ("integer", jnp.integer))
    try:
        return next((name for name, kind in kinds if jax.dtypes.issubdtype(dtype, kind)), None)
    except TypeError:
        # The dtype of another library.
        return None
