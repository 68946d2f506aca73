"""Write into a leaf: the rule of dtypes, which the docstring of `partgrad.replace` states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._message import at
from ..errors import ArgumentError, PartsError
from .elements import put
from .indexed import Indexed
from .leaf import number_class, written

# The kinds of numbers: one may be written into an array of its own kind or a later one.
_KINDS: tuple[tuple[type, Any], ...] = (
    (bool, jnp.bool_),
    (int, jnp.integer),
    (float, jnp.floating),
    (complex, jnp.complexfloating),
)
BOOL, INTEGER = 0, 1


def is_known(value: Any) -> bool:
    """Whether the numbers of a value can be looked at here and now."""
    return not isinstance(value, jax.Array) or (not isinstance(value, jax.core.Tracer) and value.is_fully_addressable)


def stays_numpy(leaf: Any, value: Any) -> bool:
    """Whether a leaf is an array of NumPy after a write too, as JAX may lack its dtype, byte order or subclass."""
    if not isinstance(leaf, np.ndarray | np.generic) or not is_known(value):
        return False
    is_plain = type(leaf) in (np.ndarray, leaf.dtype.type) and kind_of(leaf) is not None
    return not (isinstance(value, jax.Array) and is_plain and _jax_dtype(leaf) == leaf.dtype)


def kind_of(value: Any) -> int | None:
    """The number of its kind for a number or an array of numbers; None for anything else."""
    number = number_class(value)
    dtype: Any = getattr(value, "dtype", None)
    # For NumPy a timedelta is a signed integer.
    dtype = dtype if isinstance(dtype, np.dtype) and dtype.kind not in "mM" else None
    if isinstance(value, np.ndarray) and value.dtype.kind == "O" and all(type(one) is int for one in value.flat):
        # Integers that no dtype holds.
        return INTEGER
    kinds = enumerate(_KINDS)
    return next((i for i, (own, kind) in kinds if number is own or (dtype and jnp.issubdtype(dtype, kind))), None)


def convert(value: Any, leaf: Any, path_of: Callable[[], str]) -> Any:
    """A value in the dtype of a leaf.

    Args:
        value: An array or a number.
        leaf: An array.
        path_of: Gives the path of the leaf, for an error.

    Raises:
        ArgumentError: If the dtype loses more of the value than digits.
    """
    kind, given, known = kind_of(leaf), kind_of(value), is_known(value)
    dtype = leaf.dtype if known else _jax_dtype(leaf)
    if hasattr(value, "dtype") and value.dtype == dtype:
        return value
    if kind is None or given is None:
        are_jax = isinstance(leaf, jax.Array) or isinstance(value, jax.Array)
        fits = not are_jax and (dtype.kind == "O" or (kind is given and np.can_cast(np.asarray(value).dtype, dtype)))
    elif known:
        fits = given <= kind and _survives(np.asarray(value), dtype, kind)
    else:
        is_narrowed = given == kind == INTEGER and not np.can_cast(value.dtype, dtype)
        fits = given <= kind and (value.weak_type or not is_narrowed)
    if not fits:
        raise _refused(value, leaf, path_of())
    if isinstance(value, jax.Array) and dtype == _jax_dtype(leaf):
        return value.astype(dtype)
    new = np.asanyarray(value)
    with np.errstate(over="ignore"):
        # From integers of Python, a dtype that is not NumPy's cannot be made at once.
        return (new.astype(_wide(dtype, kind)) if kind is not None and new.dtype.kind == "O" else new).astype(dtype)


def overwrite(leaf: Any, elements: np.ndarray | Indexed, value: Any, path_of: Callable[[], str]) -> Any:
    """The leaf with other elements; the rest keeps its bits, and the leaf its dtype."""
    if np.shape(value) != elements.shape:
        raise PartsError(
            f"The new elements do not fit the selected ones of {at(path_of())}.",
            f"Expected shape {elements.shape}, got {np.shape(value)}.",
            fix="give one value for each selected element, in their shape.",
        )
    in_numpy, value = stays_numpy(leaf, value), convert(value, leaf, path_of)
    if in_numpy and not isinstance(elements, Indexed):
        new = np.array(leaf, subok=True)
        # Through its class, as a masked array has a mask to change.
        new[np.unravel_index(elements, new.shape)] = value[()]
        return new
    if isinstance(leaf, np.ndarray):
        traced = leaf.astype(_jax_dtype(leaf))
        before, after = leaf, traced
        if not isinstance(elements, Indexed):
            before, after = (np.delete(array, elements.ravel()) for array in (leaf, traced))
        if not np.array_equal(before, after, equal_nan=True):
            raise _not_traced(path_of(), leaf.dtype, traced.dtype)
        leaf = traced
    return put(leaf, elements, value)


def in_jax(leaf: Any, path_of: Callable[[], str]) -> jax.Array:
    """A leaf as an array of JAX; an error if that loses more than digits."""
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    return jnp.asarray(convert(leaf, np.empty((), _jax_dtype(leaf)), path_of) if is_numpy else leaf)


def _jax_dtype(leaf: Any) -> Any:
    """The dtype that an array has in JAX."""
    own = leaf.dtype
    return jax.dtypes.canonicalize_dtype(own.newbyteorder("=")) if isinstance(own, np.dtype) else own


def _survives(value: np.ndarray, dtype: Any, kind: int) -> bool:
    """Whether a dtype loses no more of numbers than digits."""
    if value.dtype.kind == "b" or not value.size:
        return True
    if kind <= INTEGER:
        # Not every dtype has a minimum.
        wide = value if value.dtype.kind == "O" else value.astype(_wide(value.dtype, kind))
        return bool(jnp.iinfo(dtype).min <= int(wide.min()) and int(wide.max()) <= jnp.iinfo(dtype).max)
    try:
        with np.errstate(over="ignore"):
            before = value.astype(_wide(dtype, kind))
            after = before.astype(dtype).astype(before.dtype)
    except OverflowError:
        return False
    return all(np.array_equal(test(before), test(after)) for test in (np.isfinite, np.isnan))


def _wide(dtype: Any, kind: int) -> Any:
    """The dtype of the same kind that has most digits."""
    return np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.dtype(_KINDS[kind][0])


def _refused(value: Any, leaf: Any, path: str) -> ArgumentError:
    kind, given = kind_of(leaf), kind_of(value)
    own = str(leaf.dtype)
    other = str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
    fix = f"give a value that {own} holds."
    if kind is not None and given is not None and given > kind:
        wider = np.dtype(_KINDS[given][0])
        wider = wider if isinstance(leaf, np.ndarray) else jax.dtypes.canonicalize_dtype(wider)
        converted = f"tree.astype({str(wider)!r})"
        if path:
            converted = f"partgrad.replace(tree, {path!r}, fn=lambda x: x.astype({str(wider)!r}))"
        fix = f"give a value that {own} holds, or convert the leaf first: {converted}."
    elif not is_known(value):
        fix = f"give a value that {own} holds, by value.astype({own!r})."
    shown = f" {written(value):.60}" if is_known(value) and np.size(value) == 1 else ""
    return ArgumentError(
        f"{at(path)} cannot hold the new value{shown}.",
        f"Expected a value that fits {own}, got {other}.",
        fix=fix,
    )


def _not_traced(path: str, dtype: Any, other: Any) -> ArgumentError:
    return ArgumentError(
        f"{at(path)} is a NumPy array of {dtype}, and a traced value is written into some of its elements.",
        f"Expected the other elements to be the same in {other}, the dtype that JAX gives them.",
        fix="make the whole leaf an array of JAX first, by jax.numpy.asarray(leaf), or set jax_enable_x64.",
    )
