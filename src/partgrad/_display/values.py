"""The values of leaves and the sizes of trees, as text."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees import dtype_of, hijax_type, is_array, is_differentiable, kind_of, shape_of

# How many numbers of an array are looked at at once.
_CHUNK = 2**16
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
    if kind_of(leaf) is None or math.prod(shape_of(leaf)) == 0:
        return ""
    if not is_differentiable(leaf):
        return written_integer(np.asarray(leaf).item()) if shape_of(leaf) == () else ""
    if math.prod(shape_of(leaf)) == 1:
        return f"{np.asarray(leaf).astype(_wide(leaf)).item():.4g}"
    with np.errstate(all="ignore"):
        mean, spread = _on_device(leaf) if _is_far(leaf) else _on_host(np.asarray(leaf))
    return f"{mean:.3g} ± {spread:.2g}"


def written_integer(number: int) -> str:
    """An integer as text; its size if it has more digits than Python writes."""
    try:
        return str(number)
    except ValueError:
        # Python writes no more than some thousand digits.
        return f"{'-' * (number < 0)}1e{math.log10(abs(number)):.0f}"


def _wide(leaf: Any) -> type:
    return complex if np.iscomplexobj(leaf) else float


def _is_far(leaf: Any) -> bool:
    """Whether an array is large, and not in the memory of the host."""
    return (
        isinstance(leaf, jax.Array)
        and leaf.size > _CHUNK
        and any(device.platform != "cpu" for device in leaf.devices())
    )


def _on_device(array: jax.Array) -> tuple[complex, float]:
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return jnp.mean(wide).item(), jnp.std(wide).item()


def _on_host(array: np.ndarray) -> tuple[complex, float]:
    """The mean and the spread, part by part, as a copy in double precision may take several times the memory."""
    parts = lambda: np.nditer(
        array, ["external_loop", "buffered"], op_dtypes=[_wide(array)], casting="unsafe", buffersize=_CHUNK
    )
    mean = sum(np.sum(part) for part in parts()) / array.size
    return mean, np.sqrt(sum(np.sum(np.abs(part - mean) ** 2) for part in parts()) / array.size)


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
