"""NonDiff: a value that stays traced and is held out of differentiation."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

T = TypeVar("T")
_Tracer = jax.core.Tracer


# Classes of concrete leaves. isinstance(value, jax.Array) is slow, and this runs for every marked leaf.
CONCRETE: set[type] = {type(None), int, float, complex, bool, str, np.ndarray}


# Begins the scope, in the name stack of a traced equation, of what a mark does; the label of the mark follows.
HELD = "partgrad.held "


def hold(value: Any, label: str = "NonDiff") -> Any:
    """Stop gradients through every tracer in a value; anything concrete stays the object it is.

    Args:
        value: Any tree.
        label: The mark, for those who read a traced program: `Periodic.period`, or the name of a wrapper.

    Returns:
        The value, held.
    """
    if value.__class__ in CONCRETE:
        return value
    if isinstance(value, _Tracer):
        with jax.named_scope(HELD + label):
            return jax.lax.stop_gradient(value)
    if isinstance(value, jax.Array):
        CONCRETE.add(value.__class__)
        return value
    return _hold_leaves(value, label)


def _hold_leaves(tree: Any, label: str) -> Any:
    # Not in `hold`, where the closure would cost every call its cell.
    return jax.tree.map(lambda leaf: hold(leaf, label) if isinstance(leaf, _Tracer) else leaf, tree)


class NonDiff(Generic[T]):
    """A value that stays traced but is never differentiated, unless a selector names it.

    Given to a field of a `partgrad.dataclass` it becomes a mark of that field, and the plain value is stored. Anywhere
    else (a dict, a tuple, another library's class) it is a pytree node that behaves like its value: arithmetic,
    comparison, indexing, `jax.numpy` functions, attributes and calls. Arithmetic returns plain arrays. The functions
    of `jax.lax` accept no wrapper: give them `.value`, or `partgrad.unwrap(tree)`.

    The value may be a tracer and may change from call to call; nothing recompiles. Every transform sees it through
    `jax.lax.stop_gradient`: plain `jax.grad` returns zero for a floating value. For an *integer* value plain `jax.grad`
    raises, as it does for any integer leaf; `partgrad.grad` does not.

    Args:
        value: An array of any shape and dtype, a Python number, or a whole subtree.

    Example:
        >>> import jax, partgrad as pg
        >>> def loss(p):
        ...     return p["a"] ** 2 * p["b"]
        >>> pg.grad(loss)({"a": 3.0, "b": pg.NonDiff(2.0)})
        {'a': Array(12., dtype=float32, weak_type=True), 'b': NonDiff(None)}
    """

    __slots__ = ("__weakref__", "value")
    # Above numpy's arrays, so that `array + NonDiff(tracer)` comes here instead of converting the tracer.
    __array_priority__ = 200

    value: Any

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts NonDiff(x)
    else:

        def __init__(self, value):
            self.value = hold(value) if value.__class__ is not NonDiff else value.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return f"NonDiff({self.value!r})"

    def __reduce__(self) -> Any:
        return NonDiff, (self.value,)

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
        return pow(self.value, _plain(exponent), *(() if modulus is None else (modulus,)))

    def __jax_array__(self) -> Any:
        return jax.numpy.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.value, dtype=dtype)
        return array.copy() if copy else array


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


def _unflatten_nondiff(_: None, children: Any) -> NonDiff[Any]:
    new: NonDiff[Any] = object.__new__(NonDiff)
    new.value = hold(children[0])
    return new


jax.tree_util.register_pytree_with_keys(
    NonDiff,
    lambda node: (((GetAttrKey("value"), node.value),), None),
    _unflatten_nondiff,
    lambda node: ((node.value,), None),
)
