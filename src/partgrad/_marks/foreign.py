"""Classes that hold what is in them: those of other libraries, and those that a user registers."""

import collections
import sys
from typing import Any, TypeVar

import jax
import numpy as np

from ..errors import ArgumentError

C = TypeVar("C", bound=type)

_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, type(None))
_LEAVES = (int, float, complex, str, bytes, np.ndarray, np.generic)

# Py_TPFLAGS_IMMUTABLETYPE: whether a class takes no attributes.
_IS_IMMUTABLE = 1 << 8
# The attribute of a class that is registered: it goes along where cloudpickle sends the class.
_REGISTERED = "_partgrad_nondiff"
_registrations = 0
# Whether a class holds its contents. A tree has few classes, but every layout asks about all nodes.
_known: dict[type, bool] = {}
_opened: dict[tuple[type, int], type] = {}
_OPEN = "_partgrad_open"


def register_nondiff(cls: C) -> C:
    """Hold everything inside the nodes of a class, as a mark would: running statistics, buffers, data.

    No transform of partgrad differentiates these leaves unless a selector names them. Nothing stops `jax.grad` of JAX
    itself, which knows nothing of the class; `freeze` adds no mark there, but `NonDiff` around the node does. What
    other libraries hold is held without being registered: `paramax.NonTrainable`, and every `flax.nnx.Variable` that
    is not a `Param`.

    Args:
        cls: A class of nodes (a pytree) that is not a plain container. Subclasses are held too.

    Returns:
        The class, so that it is a decorator too.

    Raises:
        ArgumentError: If it is not a class, or a plain container.

    Example:
        >>> import equinox as eqx, partgrad as pg
        >>> @pg.register_nondiff
        ... class Statistics(eqx.Module):
        ...     mean: float
        >>> pg.partition({"w": 1.0, "norm": Statistics(2.0)})[0]
        {'norm': Statistics(mean=None), 'w': 1.0}
        >>> pg.grad(lambda t: t["w"] * t["norm"].mean, wrt="norm.mean")({"w": 3.0, "norm": Statistics(2.0)})
        Array(3., dtype=float32, weak_type=True)
    """
    global _registrations
    is_own = isinstance(cls, type) and cls not in _CONTAINERS and not cls.__flags__ & _IS_IMMUTABLE
    if not is_own or issubclass(cls, _LEAVES) or jax.Array in cls.__mro__:
        raise ArgumentError(
            f"`partgrad.register_nondiff` got {cls!r:.60}.",
            "Expected a class of nodes of one's own, which is neither a plain container nor that of a leaf.",
            fix="hold an instance by partgrad.freeze(tree, wrt), or pass the class of the nodes.",
        )
    setattr(cls, _REGISTERED, True)
    _registrations += 1
    _known.clear()
    return cls


def registrations() -> int:
    """How many classes have been registered: a structure that was laid out before is out of date."""
    return _registrations


def is_foreign_mark(node: Any) -> bool:
    """Whether a node holds its contents because of its class."""
    cls = type(node)
    answer = _known.get(cls)
    if answer is None:
        answer = _known[cls] = _holds(cls)
    return answer


def _holds(cls: type) -> bool:
    if is_wrapper_class(cls) or getattr(cls, _REGISTERED, False):
        return True
    # A node of a class of flax exists only where flax has been imported.
    variable, parameter = (_of_library("flax.nnx", name) for name in ("Variable", "Param"))
    return variable is not None and issubclass(cls, variable) and not issubclass(cls, parameter)


def is_wrapper_class(cls: type) -> bool:
    """Whether a class is a wrapper of another library that can be taken off: `paramax.NonTrainable`."""
    wrapper = _of_library("paramax", "NonTrainable")
    return wrapper is not None and issubclass(cls, wrapper)


def _of_library(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def open_class(cls: type, level: int) -> type:
    """The class of a wrapper that a transform has opened at a level: its library does not hold its contents either."""
    base = closed_class(cls)
    if (base, level) not in _opened:
        members = {"unwrap": lambda self: self.tree, _OPEN: (base, level), "__module__": base.__module__}
        _opened[base, level] = type(base)(base.__name__, (base,), members)
    return _opened[base, level]


def closed_class(cls: type) -> type:
    """The class of a wrapper that is not open."""
    return cls.__dict__[_OPEN][0] if _OPEN in cls.__dict__ else cls


def level_of(cls: type) -> int | None:
    """The level at which a wrapper of this class was opened; None if it is not open."""
    return cls.__dict__[_OPEN][1] if _OPEN in cls.__dict__ else None
