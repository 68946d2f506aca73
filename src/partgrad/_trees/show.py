"""How values are shown: short, one line each."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from .leaf import describe

_LONGEST = 6


def show(value: Any) -> str:
    """Write a value: a small array by its entries, a large one or a tracer by its type (`f32[3,4]`)."""
    if isinstance(value, jax.core.Tracer):
        return describe(value)
    if isinstance(value, jax.Array | np.ndarray):
        if value.size > _LONGEST or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return describe(value)
        array = np.asarray(value)
        return str(array[()]) if array.ndim == 0 else np.array2string(array, separator=", ").replace("\n", "")
    return repr(value)


def show_fields(name: str, fields: Iterable[tuple[str, Any, str | None]]) -> str:
    """Write an instance: `Name(field=value, ...)`, a wrapped value as `Wrapper(value)`.

    Args:
        name: The class.
        fields: Name, value and wrapper (NonDiff, Static or None) of each field.
    """
    words = [
        f"{field}={show(value) if wrapper is None else f'{wrapper}({show(value)})'}" for field, value, wrapper in fields
    ]
    return f"{name}({', '.join(words)})"
