"""Static: Python data for the compiler, and how it is split if it holds arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from .._trees import is_array, too_deep, trees_equal, write, written
from ..errors import PartgradError, StaticError
from .hold import hold
from .printing import Wrapped, text_of

T = TypeVar("T")


class StaticData:
    """A static value, split into constants, compared by type and `==`, and arrays, which travel as leaves.

    What counts as an array is decided once, when this is built; splitting and rejoining the value only follow that
    decision. Arrays and tracers are never hashed. `constant` is the value itself, if it holds no array; `arrays` is
    their number.
    """

    __slots__ = ("_child_def", "_constants", "_key", "_positions", "_treedef", "arrays", "constant")

    def __init__(self, value: Any, where: str = "`Static`"):
        try:
            self._take_apart(value, where)
        except (RecursionError, SystemError) as error:
            raise too_deep(value) from error

    def _take_apart(self, value: Any, where: str) -> None:
        try:
            paths_and_leaves, self._treedef = jax.tree_util.tree_flatten_with_path(value)
        except PartgradError:
            raise
        except (TypeError, ValueError) as error:
            raise StaticError(
                f"{where} holds a container that JAX cannot flatten: {str(error).splitlines()[0]:.100}",
                "Expected dicts whose keys can be sorted.",
                fix="use keys of one type, such as strings.",
            ) from error
        leaves = [leaf for _, leaf in paths_and_leaves]
        self._positions = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
        self.arrays = len(self._positions)
        self.constant = None if self.arrays else _copied(value)
        self._constants = [None if is_array(leaf) else leaf for leaf in leaves]
        keys = [
            _ARRAY if is_array(leaf) else _typed(leaf, functools.partial(_unhashable, where, write(path)))
            for path, leaf in paths_and_leaves
        ]
        self._key = typed_structure(self._treedef), tuple(keys)
        # Not None for a constant: None stands for the leaves of another part of a tree.
        shown = [True if is_array(leaf) else () for leaf in leaves]
        self._child_def = jax.tree.structure(self._treedef.unflatten(shown))

    def child(self, value: Any) -> Any:
        """The arrays of a value, in the value's own containers, with () for its constants."""
        leaves = self._treedef.flatten_up_to(value)
        return self._child_def.unflatten([leaves[i] for i in self._positions])

    def value(self, child: Any, label: str = "Static") -> Any:
        """Rebuild a value from what `child` returned, or from anything of that structure, held as `label`."""
        leaves = list(self._constants)
        for i, leaf in zip(self._positions, self._child_def.flatten_up_to(child), strict=True):
            leaves[i] = hold(leaf, label)
        return self._treedef.unflatten(leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticData) and self._key == other._key and self._treedef == other._treedef

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.constant) if not self.arrays else f"{self._treedef} with {self.arrays} arrays"

    def __reduce__(self) -> Any:
        # Rebuilt from a value of this kind with empty arrays: the key holds types, not all of which can be pickled.
        leaves = list(self._constants)
        for i in self._positions:
            leaves[i] = np.zeros(0)
        return StaticData, (self._treedef.unflatten(leaves) if self.arrays else self.constant,)


def _copied(value: Any) -> Any:
    """Copy the plain containers of a value: the caller's dict or list may change afterwards."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


# Stands for an array in the key of static data.
_ARRAY = object()


def typed_structure(structure: Any) -> Any:
    """A key of a treedef that compares by type and value: treedefs only compare by `==`, and `1 == True`."""
    data = structure.node_data()
    return data and (data[0], _typed(data[1]), tuple(map(typed_structure, structure.children())))


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
    """The key of an array of constants, such as strings; an error for anything that cannot be compared."""
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
    each value. An array or a tracer in it is never hashed: it is carried as a leaf, as if marked `NonDiff`, and may
    change without recompiling. A dict or a list may mix both. In a field of a `partgrad.dataclass`, the plain value of
    `Static(x)` is stored; elsewhere use `.value`. Do not modify a dict or a list after making it static.

    Args:
        value: Any data that can be hashed and compared, or a dict, list, set or array, or containers of such.

    Raises:
        StaticError: For a value that can be neither hashed nor carried as a leaf.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> jax.jit(lambda p: jnp.zeros(p["n"].value) + p["x"])({"n": pg.Static(2), "x": 1.0})
        Array([1., 1.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_data", "_value")

    _data: StaticData
    _value: Any

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts Static(x)
    else:

        def __init__(self, value):
            while isinstance(value, Static):
                value = value.value
            self._data = StaticData(value)
            self._value = self._data.value(self._data.child(value)) if self._data.arrays else self._data.constant

    @property
    def value(self) -> T:
        """What it holds."""
        return self._value

    @property
    def data(self) -> StaticData:
        """How the value is split."""
        return self._data

    def __eq__(self, other: object) -> Any:
        return trees_equal(self, other) if isinstance(other, Static) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return text_of(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        return Wrapped("Static", self._value).__pdoc__(**kwargs)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return Wrapped("Static", self._value).__treescope_repr__(path and f"{path}.value", subtree_renderer)

    def __reduce__(self) -> Any:
        return unflatten_static, (self._data, (self._data.child(self._value),) if self._data.arrays else ())


def _flatten_static(node: Static[Any]) -> tuple[tuple[Any, ...], StaticData]:
    data = node._data
    return ((data.child(node._value),) if data.arrays else ()), data


def _flatten_static_with_keys(node: Static[Any]) -> Any:
    children, data = _flatten_static(node)
    return tuple((GetAttrKey("value"), child) for child in children), data


def unflatten_static(data: StaticData, children: Any) -> Static[Any]:
    """Build a `Static` from the split of its value and from its arrays."""
    new: Static[Any] = object.__new__(Static)
    new._data = data
    new._value = data.value(children[0]) if data.arrays else data.constant
    return new


jax.tree_util.register_pytree_with_keys(Static, _flatten_static_with_keys, unflatten_static, _flatten_static)
