"""Static: Python data for the compiler."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from .._trees import describe, is_array, too_deep, write, written
from ..errors import PartgradError, StaticError
from .printing import Wrapped, text_of

T = TypeVar("T")


class StaticData:
    """A static value as part of a structure: compared and hashed by type and `==`, recursively.

    Attributes:
        constant: The value, with copies of its plain containers.
    """

    __slots__ = ("_key", "constant")

    def __init__(self, value: Any, where: str = "`Static`"):
        try:
            self._key = _key(value, where)
            self.constant = _copied(value)
        except (RecursionError, SystemError) as error:
            raise too_deep(value) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticData) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.constant)

    def __reduce__(self) -> Any:
        # The key holds types, not all of which can be pickled.
        return StaticData, (self.constant,)


def _key(value: Any, where: str) -> Any:
    """What static data is compared by; an error for an array, and for what cannot be compared."""
    try:
        paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    except PartgradError:
        raise
    except (TypeError, ValueError) as error:
        raise StaticError(
            f"{where} holds a container that JAX cannot flatten: {str(error).splitlines()[0]:.100}",
            "Expected dicts whose keys can be sorted.",
            fix="use keys of one type, such as strings.",
        ) from error
    for path, leaf in paths_and_leaves:
        if is_array(leaf):
            raise _is_an_array(where, path, leaf)
    keys = [_typed(leaf, functools.partial(_unhashable, where, write(path))) for path, leaf in paths_and_leaves]
    return typed_treedef(treedef), treedef, tuple(keys)


def _is_an_array(where: str, path: Any, leaf: Any) -> StaticError:
    inside = f" at `{write(path)}`" if path else ""
    value = "a traced value" if isinstance(leaf, jax.core.Tracer) else "an array"
    return StaticError(
        f"{where} holds {value}{inside}, {describe(leaf)}.",
        "Expected Python data: the compiler compares what is static, and would compile again for every new value of an "
        "array.",
        fix="make it a field of its own, x: jax.Array = partgrad.field(nondiff=True), or NonDiff(x) in another tree; "
        "if the compiler should know the values, make it a tuple: tuple(x.tolist()).",
    )


def _copied(value: Any) -> Any:
    """Copy the plain containers of a value: the caller's dict or list may change afterwards."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def typed_treedef(treedef: Any) -> Any:
    """A key of a treedef that compares by type and value: treedefs only compare by `==`, and `1 == True`."""
    data = treedef.node_data()
    return data and (data[0], _typed(data[1]), tuple(map(typed_treedef, treedef.children())))


def _typed(value: Any, unhashable: Callable[[Any], Any] = type) -> Any:
    """A key that compares by type and `==`, recursively; for what cannot be hashed, the result of `unhashable`."""
    typed = functools.partial(_typed, unhashable=unhashable)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(typed, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(typed, value))
    if isinstance(value, slice):
        # Python 3.11 does not hash one.
        return slice, typed((value.start, value.stop, value.step))
    if isinstance(value, dict):
        return type(value), tuple((typed(key), typed(item)) for key, item in value.items())
    if issubclass(type(value), float | complex | np.inexact):
        # 0.0 differs from -0.0, but NaN equals itself, or every call would compile again.
        # A subclass may print all of its values alike.
        kind: Any = next((kind for kind in (float, complex) if issubclass(type(value), kind)), type(value))
        return type(value), kind.__repr__(value)
    try:
        hash(value)
    except Exception:
        return unhashable(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), value, tuple(_typed(getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return type(value), value


def _unhashable(where: str, path: str, value: Any) -> Any:
    """The key of a NumPy array of strings and the like; an error for anything that cannot be compared."""
    if isinstance(value, np.ndarray):
        entries = (_typed(entry, functools.partial(_unhashable, where, path)) for entry in value.ravel().tolist())
        return np.ndarray, value.dtype.str, value.shape, tuple(entries)
    inside = f" at `{path}`" if path else ""
    raise StaticError(
        f"{where} holds {type(value).__name__} {written(value):.60}{inside}, which cannot be static.",
        "Expected data that can be hashed and compared, or a dict, list, set or array of such.",
        fix="give its class __eq__ and __hash__, or store the data it is made from.",
    ) from None


class Static(Generic[T]):
    """Python data that the compiler may specialise on: a string, a function, an `int` used as a shape.

    It is part of the structure of the tree (the treedef), compared by type and `==`, so `jax.jit` compiles once for
    each value. An array is refused, as it would compile again for each new one: make it a field. In a field of a
    `partgrad.dataclass`, the plain value of `Static(x)` is stored; elsewhere use `.value`. Do not modify a dict or a
    list after making it static.

    Args:
        value: Any data that can be hashed and compared, or a dict, list or set, or containers of such.

    Raises:
        StaticError: For an array or a tracer, at any depth, and for a value that cannot be hashed.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> jax.jit(lambda p: jnp.zeros(p["n"].value) + p["x"])({"n": pg.Static(2), "x": 1.0})
        Array([1., 1.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_data")

    _data: StaticData

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts Static(x)
    else:

        def __init__(self, value):
            while isinstance(value, Static):
                value = value.value
            self._data = StaticData(value)

    @property
    def value(self) -> T:
        """What it holds."""
        return self._data.constant

    @property
    def data(self) -> StaticData:
        """What it is compared by."""
        return self._data

    def __eq__(self, other: object) -> Any:
        return self._data == other._data if isinstance(other, Static) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return text_of(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        return Wrapped("Static", self.value).__pdoc__(**kwargs)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return Wrapped("Static", self.value).__treescope_repr__(path and f"{path}.value", subtree_renderer)

    def __reduce__(self) -> Any:
        return Static, (self.value,)


def unflatten_static(data: StaticData, children: Any) -> Static[Any]:
    """Build a `Static` from what it is compared by."""
    new: Static[Any] = object.__new__(Static)
    new._data = data
    return new


def _flatten_static(node: Static[Any]) -> tuple[tuple[()], StaticData]:
    return (), node._data


jax.tree_util.register_pytree_with_keys(Static, _flatten_static, unflatten_static, _flatten_static)
