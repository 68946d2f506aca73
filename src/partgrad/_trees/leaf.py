"""Leaves: whether they can be differentiated, and how their types are written."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError

# The class of `jnp.float32`, a function with a dtype, is here too.
_SCALARS: dict[type, bool] = {float: True, complex: True, int: False, bool: False, str: False, type(jnp.float32): False}
_NUMBERS = (bool, int, float, complex)
_DTYPES: dict[Any, bool] = {}
# Classes of concrete arrays, which have been met.
_ARRAYS: set[type] = {np.ndarray}
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def is_differentiable(leaf: Any) -> bool:
    """Whether JAX's transforms differentiate a leaf.

    It is a floating or complex array, a Python float or complex number, or of a hijax class with such a tangent. A
    `jax.Ref` is not, whatever it refers to.
    """
    kind = _SCALARS.get(type(leaf))
    if kind is not None:
        return kind
    if type(leaf) not in _ARRAYS:
        if is_reference(leaf):
            return False
        if hijax_type(leaf) is not None:
            return _has_tangent(leaf)
        if issubclass(type(leaf), jax.Array) and not issubclass(type(leaf), jax.core.Tracer):
            _ARRAYS.add(type(leaf))
    try:
        # Asked of every leaf in every call: nearly all are arrays of a dtype that was met before.
        return _DTYPES[leaf.dtype]
    except Exception:
        return _is_inexact(leaf)


def _is_inexact(leaf: Any) -> bool:
    dtype = _dtype(leaf)
    if dtype is None:
        return issubclass(type(leaf), float | complex)
    # There are few dtypes, so the table stays small.
    _DTYPES[dtype] = found = bool(jnp.issubdtype(dtype, jnp.inexact))
    return found


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a `jax.Ref`, traced or not."""
    # By its type first: a leaf may be any object, and have any attribute.
    kind = type(leaf)
    return jax.Ref in kind.__mro__ or (issubclass(kind, jax.core.Tracer) and isinstance(leaf, jax.Ref))


def hijax_type(leaf: Any) -> Any:
    """The type of a leaf of a hijax class, or None: nobody can have one who has not imported hijax."""
    hijax = sys.modules.get("jax.experimental.hijax")
    if hijax is None or type(leaf) in _ARRAYS or type(leaf) in _SCALARS:
        return None
    try:
        kind = jax.typeof(leaf)
    except Exception:
        # Not only TypeError: a leaf may be any object.
        return None
    return kind if isinstance(kind, hijax.HiType) else None


def _has_tangent(leaf: Any) -> bool:
    """Whether the tangents of a leaf of a hijax class are floating or complex."""
    # In flax's mode `hijax=True` a Variable is a leaf, with its class; as elsewhere, only a Param is a parameter.
    variable, nnx = getattr(leaf, "var_type", None), sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(variable, type) and issubclass(variable, nnx.Variable):
        return issubclass(variable, nnx.Param)
    tangent = hijax_type(leaf).to_tangent_aval()
    parts = tangent.lo_ty() if isinstance(tangent, sys.modules["jax.experimental.hijax"].HiType) else [tangent]
    return any(jnp.issubdtype(part.dtype, jnp.inexact) for part in parts)


def _dtype(leaf: Any) -> np.dtype | None:
    """The dtype of an array; None for anything without a NumPy dtype, such as another library's array or a mock."""
    try:
        dtype = leaf.dtype
    except Exception:
        # Not only AttributeError: a leaf may be any object.
        return None
    return dtype if isinstance(dtype, np.dtype) else None


def number_class(leaf: Any) -> type | None:
    """The class of a Python number, of which JAX and others have subclasses."""
    return (
        None if isinstance(leaf, np.generic) else next((cls for cls in _NUMBERS if issubclass(type(leaf), cls)), None)
    )


def is_array(value: Any) -> bool:
    """Whether a value is an array that JAX can carry as a leaf, a tracer included."""
    if isinstance(value, np.ndarray):
        # For NumPy a timedelta is a signed integer.
        return value.dtype.kind in "biufc" or (
            value.dtype.kind == "V" and bool(jnp.issubdtype(value.dtype, jnp.number))
        )
    return isinstance(value, jax.Array)


def is_node(value: Any) -> bool:
    """Whether an object is a node of a tree with leaves, other than a plain container or a function."""
    plain = tuple | list | dict | jax.tree_util.Partial | None
    return not isinstance(value, plain) and jax.tree_util.is_tree_node(type(value)) and bool(jax.tree.leaves(value))


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of an array or a Python number; an AttributeError for anything else."""
    return () if isinstance(leaf, int | float | complex) else leaf.shape


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, or the one that JAX gives a Python number; an AttributeError for anything else."""
    number = number_class(leaf)
    return leaf.dtype if number is None else jax.dtypes.canonicalize_dtype(number)


def tied(leaves: Sequence[Any], among: Iterable[int] | None = None) -> list[list[int]]:
    """The numbers of floating and complex leaves that are one array, for each such array with one of them among some.

    Under `jit` every argument is an array of its own. Python numbers are never tied.
    """
    same: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray) and is_differentiable(leaf):
            same.setdefault(id(leaf), []).append(i)
    chosen = frozenset(range(len(leaves)) if among is None else among)
    return [numbers for numbers in same.values() if len(numbers) > 1 and not chosen.isdisjoint(numbers)]


def describe(leaf: Any) -> str:
    """Write the type of a leaf: `f32[3,4]` for an array, `float` for a Python number, else the type's name."""
    if is_reference(leaf) or hijax_type(leaf) is not None:
        # As JAX writes it.
        return jax.typeof(leaf).str_short(short_dtypes=True)
    try:
        name, shape = str(leaf.dtype), leaf.shape
    except Exception:
        shape = None
    if not isinstance(shape, tuple):
        # An object that has every attribute has an endless shape.
        return type(leaf).__name__ if function_name(leaf) is None else "function"
    letters = name.rstrip("0123456789")
    return f"{_SHORT.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, shape))}]"


def function_name(value: Any) -> str | None:
    """The name of a function or a class; None for anything else."""
    try:
        name = value.__name__ if callable(value) else None
    except Exception:
        return None
    return name if isinstance(name, str) else None


def written(value: Any) -> str:
    """The `repr` of a value or, if that raises, the name of its class."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves and the structure of a tree that may contain anything."""
    try:
        if is_leaf is not None:
            # On Python 3.11 a callback of JAX that meets the limit leaves no levels, not even to raise an error.
            jax.tree.structure(tree)
        return jax.tree.flatten(tree, is_leaf)
    except (RecursionError, SystemError) as error:
        raise too_deep(tree) from error


def too_deep(tree: Any) -> ArgumentError:
    """The error for a tree in which JAX, or a function that calls itself at every node, reached Python's limit."""
    return ArgumentError(
        f"A tree is nested too deeply: it is, or begins with, {type(tree).__name__}.",
        f"Expected fewer levels than sys.getrecursionlimit(), which is {sys.getrecursionlimit()}.",
        fix="look for a container that contains itself; put a long chain of nodes into one list.",
    )
