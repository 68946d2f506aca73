"""What a leaf is: whether it can be differentiated, and how its type is written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SCALARS: dict[type, bool] = {float: True, complex: True, int: False, bool: False, str: False}
_DTYPES: dict[Any, bool] = {}
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf is floating or complex: an array of such a dtype, or a Python float or complex number."""
    known = _SCALARS.get(leaf.__class__)
    if known is not None:
        return known
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    try:
        return _DTYPES[dtype]
    except KeyError:
        # dtypes are few, so the table stays small.
        _DTYPES[dtype] = found = _is_inexact(dtype)
        return found
    except TypeError:
        return False


def _is_inexact(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    except TypeError:
        # Another library's dtype.
        return False


def is_array(value: Any) -> bool:
    """Whether a value is an array that JAX can carry as a leaf, a tracer included."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" or bool(jnp.issubdtype(value.dtype, jnp.number))
    return isinstance(value, jax.Array)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of an array or a Python number; an AttributeError for anything else."""
    return () if isinstance(leaf, int | float | complex) else leaf.shape


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, or the one that JAX gives a Python number; an AttributeError for anything else."""
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return jax.dtypes.canonicalize_dtype(type(leaf))
    return leaf.dtype


def describe(leaf: Any) -> str:
    """Write the type of a leaf: `f32[3,4]` for an array, `float` for a Python number, else the type's name."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return "function" if callable(leaf) and hasattr(leaf, "__name__") else type(leaf).__name__
    name = str(leaf.dtype)
    letters = name.rstrip("0123456789")
    return f"{_SHORT.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, leaf.shape))}]"
