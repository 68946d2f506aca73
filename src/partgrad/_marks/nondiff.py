"""NonDiff: a value that stays traced and is held out of differentiation."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from ..errors import ArgumentError
from .cover import Cover, hold_part
from .hold import EXPLICIT, WRAPPER, hold
from .printing import Wrapped, text_of

T = TypeVar("T")


class NonDiff(Generic[T]):
    """A value that stays traced but is never differentiated, unless a selector names it.

    In a field of a `partgrad.dataclass` it becomes a mark of that field, and the plain value is stored. Anywhere else
    (a dict, a tuple, another library's class) it is a pytree node that behaves like its value: arithmetic, comparison,
    indexing, `jax.numpy` functions, attributes and calls. Arithmetic returns plain arrays. Functions of `jax.lax`
    accept no wrapper: pass `.value`, or `partgrad.unwrap(tree)`.

    The value may be a tracer and may change from call to call without recompiling. Every transform sees it through
    `jax.lax.stop_gradient`, so plain `jax.grad` returns zero for a floating-point value. For an *integer* value plain
    `jax.grad` raises, as it does for any integer leaf; `partgrad.grad` does not.

    Args:
        value: An array of any shape and dtype, a Python number, or a whole subtree.

    Example:
        >>> import jax, partgrad as pg
        >>> def loss(p):
        ...     return p["a"] ** 2 * p["b"]
        >>> pg.grad(loss)({"a": 3.0, "b": pg.NonDiff(2.0)})
        {'a': Array(12., dtype=float32, weak_type=True), 'b': NonDiff(None)}
    """

    __slots__ = ("__weakref__", "_cover", "value")
    # Above NumPy's arrays, so that `array + NonDiff(tracer)` comes here instead of converting the tracer.
    __array_priority__ = 200

    value: Any
    # None if all of the value is held, and no transform has opened any of it.
    _cover: Cover | None

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts NonDiff(x)
    else:

        def __init__(self, value):
            if value.__class__ is NonDiff:
                value = value.value
            self.value, self._cover = hold(value, EXPLICIT), None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in NonDiff.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # `jax.random` asks for this first when it is given something other than a key; without it, it would go on to
        # treat the wrapper as raw numbers.
        if name == "ndim" and _is_key(self.value):
            raise ArgumentError(
                f"{self!r} is given to a function that takes a key, such as those of `jax.random`.",
                "Expected the key itself: they accept no wrapper.",
                fix="give it the `.value`, or store the key without a mark; it has no derivative to be held.",
            )
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return text_of(self)

    def __pdoc__(self, **kwargs: Any) -> Any:
        return _printed(self).__pdoc__(**kwargs)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return _printed(self).__treescope_repr__(path and f"{path}.value", subtree_renderer)

    def __reduce__(self) -> Any:
        return covering, (self.value, self._cover)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.value[_plain(index)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __contains__(self, item: Any) -> bool:
        return _plain(item) in self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)

    def __pow__(self, exponent: Any, modulus: Any = None) -> Any:
        if not hasattr(type(self.value), "__pow__"):
            # The whole wrapper is for the exponent: in `tree**ω`, as equinox has it, it is a node.
            return NotImplemented
        return pow(self.value, _plain(exponent), *(() if modulus is None else (modulus,)))

    def __jax_array__(self) -> Any:
        return jax.numpy.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.value, dtype=dtype)
        return array.copy() if copy else array


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _printed(wrapper: NonDiff[Any]) -> Wrapped:
    return Wrapped("NonDiff", wrapper.value, "" if wrapper._cover is None else wrapper._cover.of)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, NonDiff) else value


def _forward_operators() -> None:
    def binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda self, other: function(self.value, _plain(other))

    def reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda self, other: function(_plain(other), self.value)

    def unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda self: function(self.value)

    arithmetic = {n: getattr(operator, n) for n in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod")}
    arithmetic |= {"divmod": divmod, "lshift": operator.lshift, "rshift": operator.rshift}
    arithmetic |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    for name, function in arithmetic.items():
        setattr(NonDiff, f"__{name}__", binary(function))
        setattr(NonDiff, f"__r{name}__", reflected(function))
    setattr(NonDiff, "__rpow__", reflected(pow))  # noqa: B010
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(NonDiff, f"__{name}__", binary(getattr(operator, name)))
    for name in ("neg", "pos", "abs", "invert", "index"):
        setattr(NonDiff, f"__{name}__", unary(getattr(operator, name)))
    conversions: list[Callable[[Any], Any]] = [bool, int, float, complex, len]
    for convert in conversions:
        setattr(NonDiff, f"__{convert.__name__}__", unary(convert))
    for name in ("trunc", "floor", "ceil"):
        setattr(NonDiff, f"__{name}__", unary(getattr(math, name)))


_forward_operators()


def covering(value: Any, cover: Cover | None) -> NonDiff[Any]:
    """A wrapper whose mark has a cover; None for one that holds everything."""
    return _unflatten(cover, (value,))


def cover_of(wrapper: NonDiff[Any]) -> Cover | None:
    """The cover of a wrapper's mark, or None if it holds everything."""
    return wrapper._cover


def _unflatten(cover: Cover | None, children: Any) -> NonDiff[Any]:
    new: NonDiff[Any] = object.__new__(NonDiff)
    new.value = hold(children[0], WRAPPER) if cover is None else hold_part(children[0], cover, WRAPPER)
    new._cover = cover
    return new


jax.tree_util.register_pytree_with_keys(
    NonDiff,
    lambda node: (((GetAttrKey("value"), node.value),), node._cover),
    _unflatten,
    lambda node: ((node.value,), node._cover),
)
