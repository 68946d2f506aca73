"""Diff: the opposite of NonDiff, for one field of one instance."""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from ..errors import DataclassError
from .printing import Wrapped, text_of

T = TypeVar("T")


class Diff(Generic[T]):
    """The value of a `partgrad.dataclass` field that is differentiated even if the class marks the field.

    Use it to build a model from a parameter that is fitted or sampled, if the class declares that field `nondiff=True`.
    Without it, the mark of the class stops the derivative. The plain value is stored, and the repr shows `p=Diff(3.0)`.
    Anywhere else `Diff` is an error.

    Args:
        value: The value of the field.

    Example:
        >>> import jax, partgrad as pg
        >>> @pg.dataclass
        ... class Oscillator:
        ...     amplitude: float
        ...     frequency: float = pg.field(nondiff=True)
        >>> def loss(frequency):
        ...     model = Oscillator(2.0, pg.Diff(frequency))
        ...     return model.amplitude * model.frequency**2
        >>> print(jax.grad(loss)(3.0))
        12.0
        >>> Oscillator(2.0, pg.Diff(3.0))
        Oscillator(amplitude=2.0, frequency=Diff(3.0))
    """

    __slots__ = ("__weakref__", "value")

    value: Any

    if TYPE_CHECKING:

        def __new__(cls, value: T) -> T: ...  # type: ignore[misc]  # a field of type T accepts Diff(x)
    else:

        def __init__(self, value):
            self.value = value

    def __repr__(self) -> str:
        return text_of(Wrapped("Diff", self.value))


def diff_refused(where: str, fix: str) -> DataclassError:
    """The error for a `Diff` that is not the value of a field that can be held."""
    return DataclassError(
        f"A `Diff` was given to {where}.",
        "Expected a field of a partgrad.dataclass that is not static: `Diff(x)` says that this field of this "
        "instance is differentiated.",
        fix=fix,
    )


def refuse_diff(*_: Any) -> Any:
    """Raise for a `Diff` that is part of a tree or of static data."""
    raise diff_refused(
        "something other than a field of a partgrad.dataclass",
        "pass the value itself; partgrad.thaw(tree, wrt) removes marks that are there.",
    )


# Registered so that flattening one, as every call of JAX or partgrad does, raises.
jax.tree_util.register_pytree_node(Diff, refuse_diff, refuse_diff)
