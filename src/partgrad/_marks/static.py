"""Static: Python data for the compiler."""

import functools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from .._trees import compared_exactly, describe, exact_key, is_array, too_deep, write, written
from ..errors import StaticError
from .diff import Diff, refuse_diff
from .nondiff import NonDiff
from .printing import Wrapped, text_of

T = TypeVar("T")


@compared_exactly
class StaticData:
    """A static value as part of a structure: equal to another only if no function could tell the two apart.

    Attributes:
        constant: The value, with copies of its plain containers.
    """

    __slots__ = ("_key", "constant")

    def __init__(self, value: Any, where: str = "`Static`"):
        try:
            self.constant = _copied(value)
            self._key = exact_key(self.constant, functools.partial(_refuse, where), takes_mutable=False)
        except (RecursionError, SystemError) as error:
            raise too_deep(value) from error

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StaticData) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.constant)

    def __reduce__(self) -> Any:
        # The key holds types, not all of which can be pickled.
        return StaticData, (self.constant,)


def _refuse(where: str, value: Any, path: Any) -> Any:
    """Raise for a part of static data that cannot be compared."""
    inside = f" at `{write(path)}`" if path else ""
    if is_array(value):
        kind = "a traced value" if isinstance(value, jax.core.Tracer) else "an array"
        raise StaticError(
            f"{where} holds {kind}{inside}, {describe(value)}.",
            "Expected Python data, or an array by itself, which is held: the compiler compares what is static, and "
            "would compile again for every new value of an array.",
            fix="make the array a field of its own, x: jax.Array = partgrad.field(nondiff=True), or NonDiff(x) in "
            "another tree; if the compiler should know the values, make it a tuple: tuple(x.tolist()).",
        )
    has_hash = type(value).__hash__ is not None
    raise StaticError(
        f"{where} holds {type(value).__name__} {written(value):.60}{inside}, which cannot be static.",
        "Expected data that `copy` can take apart to compare it."
        if has_hash
        else "Expected data that can be hashed and compared, or a dict, list, set or array of such.",
        fix=f"{'' if has_hash else 'give its class __eq__ and __hash__, or '}store the data that it is made from.",
    ) from None


def _copied(value: Any) -> Any:
    """Copy the plain containers of a value: the caller's dict or list may change afterwards."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, Diff):
        refuse_diff()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def typed_treedef(treedef: Any) -> Any:
    """A key of a treedef that tells apart static data which compares equal, as 1 and True do."""
    return exact_key(treedef, lambda value, _: type(value))


class Static(Generic[T]):
    """Python data that the compiler may specialise on: a string, a function, an `int` used as a shape.

    It is part of the structure of the tree (the treedef), so `jax.jit` compiles once for each value: two values are one
    only if no function could tell them apart. An array or a tracer is never part of the structure: `Static(x)` of one
    is `NonDiff(x)`, which compiles once for all values. In a field of a `partgrad.dataclass`, the plain value of
    `Static(x)` is stored; elsewhere use `.value`. Do not modify a dict or a list after making it static.

    Args:
        value: An array, any data that can be hashed and compared, or a dict, list or set of such data.

    Raises:
        StaticError: For an array or a tracer inside other data, and for a value that cannot be compared.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> jax.jit(lambda p: jnp.zeros(p["n"].value) + p["x"])({"n": pg.Static(2), "x": 1.0})
        Array([1., 1.], dtype=float32)
        >>> pg.Static(jnp.ones(2))
        NonDiff([1., 1.])
    """

    __slots__ = ("__weakref__", "_data")

    _data: StaticData

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts Static(x)
    else:

        def __new__(cls, value):
            while isinstance(value, Static):
                value = value.value
            if is_array(value.value if isinstance(value, NonDiff) else value):
                return NonDiff(value)
            return unflatten_static(StaticData(value), ())

    @property
    def value(self) -> T:
        """What it holds."""
        return self._data.constant

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
