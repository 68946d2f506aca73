"""The values of leaves and the sizes of trees, as text."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from .._trees import dtype_of, hijax_type, is_array, is_differentiable, shape_of

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


class Size(NamedTuple):
    """The size of some leaves, and of a gradient with respect to them."""

    leaves: int
    entries: int
    gradient: int

    @property
    def adam(self) -> int:
        """The bytes of Adam's two moments."""
        return 2 * self.gradient


def value_of(leaf: Any) -> str:
    """A number, or the mean and the spread of a floating array, as text."""
    if isinstance(leaf, jax.core.Tracer) or not (
        issubclass(type(leaf), int | float | complex | np.generic) or is_array(leaf)
    ):
        return ""
    if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
        return "deleted" if leaf.is_deleted() else ""
    if not is_differentiable(leaf):
        is_number = shape_of(leaf) == () and not jax.dtypes.issubdtype(dtype_of(leaf), jax.dtypes.extended)
        return str(np.asarray(leaf).item()) if is_number else ""
    array = np.asarray(leaf)
    array = array.astype(complex if np.iscomplexobj(array) else float)
    if array.size == 1:
        return f"{array.item():.4g}"
    with np.errstate(all="ignore"):
        return f"{array.mean():.3g} ± {array.std():.2g}" if array.size else ""


def in_bytes(count: int) -> str:
    """Write a number of bytes, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    size, units = float(count), list(_UNITS)
    while units:
        size, unit = size / 1000, units.pop(0)
        # A number that rounds to 1000.0 belongs to the next unit.
        if size < 999.95:
            break
    return f"{size:,.1f} {unit}"


def size_of(leaves: list[Any]) -> Size:
    """The size of some leaves."""
    gradient = sum(_bytes(leaf) for leaf in leaves if is_differentiable(leaf))
    return Size(len(leaves), sum(map(_entries, leaves)), gradient)


def _entries(leaf: Any) -> int:
    """How many numbers or keys a leaf holds."""
    if (kind := hijax_type(leaf)) is not None:
        return sum(math.prod(part.shape) for part in kind.lo_ty())
    try:
        shape = shape_of(leaf)
        return math.prod(shape) if isinstance(shape, tuple) else 0
    except Exception:
        # It has no shape: a leaf may be any object.
        return 0


def _bytes(leaf: Any) -> int:
    """The size of the gradient of a leaf."""
    if (kind := hijax_type(leaf)) is not None:
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in kind.lo_ty())
    # A gradient has the dtype that JAX gives the leaf: float32 for a NumPy float64 if x64 is off.
    return _entries(leaf) * jax.dtypes.canonicalize_dtype(dtype_of(leaf)).itemsize
