"""Stopping gradients: what a mark does to a value, and how a traced program records which mark did it."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._compat import is_differentiated
from .._message import word
from .._trees import flatten

_Tracer = jax.core.Tracer
_running = threading.local()

# Held tracers, by id, because a tracer cannot be hashed. Holding one again returns the same object: libraries map the
# identity over a tree and expect the leaves that they put in (`eqx.tree_at` inside diffrax).
_held: dict[int, weakref.ref] = {}

# Classes of concrete leaves. isinstance(value, jax.Array) is slow, and this runs for every marked leaf.
CONCRETE: set[type] = {type(None), int, float, complex, bool, str, np.ndarray}

# The fields about which `hold_built` has warned.
_warned: set[str] = set()

# The prefix of a mark's scope in the name stack of a traced equation; the label of the mark follows.
HELD = "partgrad.held "
# The label of a stop that the user wrote, as `NonDiff(x)` or `freeze`; all others are implicit.
EXPLICIT = "NonDiff"
# The label of a wrapper that is rebuilt by `jax.tree.unflatten`.
WRAPPER = "a NonDiff wrapper"


def hold(value: Any, label: str) -> Any:
    """Stop gradients through every tracer in a value; concrete leaves stay the same objects.

    The label records the mark in the traced program: `Periodic.period`, EXPLICIT or WRAPPER.
    """
    if value.__class__ in CONCRETE:
        return value
    if isinstance(value, _Tracer):
        earlier = _held.get(id(value))
        if earlier is not None and earlier() is value:
            return value
        watch = getattr(_running, "watch", None)
        with jax.named_scope(HELD + label):
            if watch is None or label == EXPLICIT:
                held = jax.lax.stop_gradient(value)
            else:
                held = _watched(value, Met(label, watch.where()))
        if isinstance(held, _Tracer):
            _held[id(held)] = weakref.ref(held, functools.partial(_forget, id(held)))
        return held
    if isinstance(value, jax.Array):
        CONCRETE.add(value.__class__)
        return value
    return hold_leaves(value, label)


def hold_built(value: Any, label: str) -> Any:
    """`hold`, for a field of an instance that is being built: warns if a derivative ends there.

    A model that is built of a parameter that is fitted or sampled has no gradient for it, and nothing else says so: a
    sampler goes on, with errors that are too small. One that is passed to the function arrives without a tangent.
    """
    if value.__class__ in CONCRETE:
        return value
    if label not in _warned and getattr(_running, "watch", None) is None and _has_derivative(value):
        _warned.add(label)
        warnings.warn(
            word(
                f"A derivative ends at `{label}`, which its class holds, as an instance is built.",
                "What the instance is built of has no gradient through this field, or only a part of it.",
                fix="build it with partgrad.Diff(x) where the field is to be differentiated, and with "
                "jax.lax.stop_gradient(x) where it is not.",
            ),
            stacklevel=3,
        )
    return hold(value, label)


def _has_derivative(value: Any) -> bool:
    return is_differentiated(value) or (
        not isinstance(value, jax.Array) and any(map(is_differentiated, flatten(value)[0]))
    )


def _forget(key: int, _: weakref.ref) -> None:
    _held.pop(key, None)


def hold_leaves(tree: Any, label: str, stops: Callable[[Any], bool] | None = None) -> Any:
    """Stop gradients through the tracers of a tree, or through those for whose key paths `stops` is true."""
    leaves, treedef = flatten(tree)
    # A mark inside a rebuilt tree held its value when it was built; walking through it again at every level would
    # take time exponential in the depth.
    if getattr(_running, "rebuilding", False) or not any(isinstance(leaf, _Tracer) for leaf in leaves):
        return tree
    if stops is None:
        leaves = [hold(leaf, label) if isinstance(leaf, _Tracer) else leaf for leaf in leaves]
    else:
        keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [hold(leaf, label) if isinstance(leaf, _Tracer) and stops(path) else leaf for path, leaf in keyed]
    _running.rebuilding = True
    try:
        return treedef.unflatten(leaves)
    finally:
        _running.rebuilding = False


class Met(NamedTuple):
    """A mark that holds a value: its label, and the line."""

    label: str
    where: str


class Watch:
    """Records which implicit marks end derivatives in the code that it surrounds, which cannot be traced beforehand.

    `met` are these marks; `where` returns the running line.
    """

    def __init__(self, where: Callable[[], str]):
        self.where = where
        self.met: list[Met] = []

    def __enter__(self) -> "Watch":
        self._outer = getattr(_running, "watch", None)
        _running.watch = self
        return self

    def __exit__(self, *_: object) -> None:
        _running.watch = self._outer


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _watched(value: Any, met: Met) -> Any:
    return jax.lax.stop_gradient(value)


def _see(met: Met, primals: Any, tangents: Any) -> Any:
    watch = getattr(_running, "watch", None)
    if watch is not None and not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        watch.met.append(met)
    stopped = jax.lax.stop_gradient(primals[0])
    return stopped, jax.tree.map(jax.numpy.zeros_like, stopped)


_watched.defjvp(_see, symbolic_zeros=True)


def mark_in(name_stack: str) -> str | None:
    """The label of the mark in the name stack of an equation that stops gradients; None if it was not a mark."""
    _, found, label = name_stack.rpartition(HELD)
    return label.partition("/")[0].rstrip(")") if found else None
