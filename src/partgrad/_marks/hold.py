"""Stopping gradients: what a mark does to a value, and how a traced program shows which mark did it."""

from typing import Any

import jax
import numpy as np

_Tracer = jax.core.Tracer

# Classes of concrete leaves. isinstance(value, jax.Array) is slow, and this runs for every marked leaf.
CONCRETE: set[type] = {type(None), int, float, complex, bool, str, np.ndarray}

# Begins the scope, in the name stack of a traced equation, of what a mark does; the label of the mark follows.
HELD = "partgrad.held "
# The label of a stop that the user wrote, as `NonDiff(x)` or `freeze`: all others are implicit.
EXPLICIT = "NonDiff"
# The label of a wrapper that is put together again, by `jax.tree.unflatten`.
WRAPPER = "a NonDiff wrapper"


def hold(value: Any, label: str) -> Any:
    """Stop gradients through every tracer in a value; anything concrete stays the object it is.

    Args:
        value: Any tree.
        label: The mark, for those who read a traced program: `Periodic.period`, EXPLICIT or WRAPPER.

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


def mark_in(name_stack: str) -> str | None:
    """The label of the mark in the name stack of an equation that stops gradients; None if no mark does it."""
    _, found, label = name_stack.rpartition(HELD)
    return label.partition("/")[0].rstrip(")") if found else None
