"""A value with a mask beside it: where a path leads to it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._programs import varying_like
from .masks import Mask, full_like


class Masked:
    """A value in a program that is walked.

    Attributes:
        value: The value.
        mask: Where a path leads to it; None if it is fixed, that is, if it is no (co)tangent.
        dirty: Whether it may be anything where no path leads; otherwise it is zero there.
    """

    __slots__ = ("dirty", "mask", "value")

    def __init__(self, value: Any, mask: Mask | None = None, dirty: bool = False):
        self.value, self.mask, self.dirty = value, mask, dirty and mask is not True


def clean(item: Masked) -> Any:
    """The value, zero where no path leads; it is selected once, whoever reads it."""
    if item.dirty:
        assert item.mask is not None
        item.value, item.dirty = only(item.mask, item.value), False
    return item.value


def only(mask: Mask, value: Any) -> Any:
    """A (co)tangent where a mask says so, and zero elsewhere."""
    if mask is True:
        return value
    zeros = varying_like(lax.full_like(value, 0), jax.typeof(value))
    return zeros if mask is False else lax.select(full_like(mask, jax.typeof(value)), value, zeros)


def copied(items: Sequence[Masked]) -> list[Masked]:
    """Values, clean, with masks that every device has whole: these can be read on another mesh."""
    replicate = lambda m: m if m is None or isinstance(m, bool) else jax.sharding.reshard(m, PartitionSpec())
    return [Masked(clean(item), replicate(item.mask)) for item in items]


# --- masks that a body of a loop or a branch takes and returns ------------------------------------------------------

# What is known of a mask while tracing: None (no tangent), True, False, or the shape of an array.
State: TypeAlias = bool | tuple[int, ...] | None


def state_of(mask: Mask | None) -> State:
    """What is known of a mask while tracing."""
    return mask if mask is None or isinstance(mask, bool) else tuple(mask.shape)


def arrays_in(masks: Sequence[Mask | None]) -> list[Any]:
    """The masks that are arrays; `restored` puts them back."""
    return [mask for mask in masks if not (mask is None or isinstance(mask, bool))]


def restored(states: Sequence[State], arrays: Sequence[Any]) -> list[Mask | None]:
    """Masks, given what is known of them and those that are arrays."""
    rest = iter(arrays)
    return [next(rest) if isinstance(state, tuple) else state for state in states]


def with_masks(values: Sequence[Any], states: Sequence[State], arrays: Sequence[Any]) -> list[Masked]:
    """Values with masks of given states."""
    return [Masked(value, mask) for value, mask in zip(values, restored(states, arrays), strict=True)]


def joined(states: Sequence[Sequence[State]], avals: Sequence[Any]) -> list[State]:
    """For each value, the state that holds whichever of several states its mask is in."""
    found: list[State] = []
    for each, aval in zip(zip(*states, strict=True), avals, strict=True):
        shapes = [state for state in each if isinstance(state, tuple)]
        flags = {bool(state) for state in each if not isinstance(state, tuple)}
        if all(state is None for state in each):
            found.append(None)
        elif shapes or len(flags) > 1:
            found.append(jnp.broadcast_shapes((1,) * len(aval.shape), *shapes))
        else:
            found.append(flags.pop())
    return found


def fitted(masks: Sequence[Mask | None], states: Sequence[State], avals: Sequence[Any]) -> list[Any]:
    """Masks as arrays of the shapes that the states say, each varying over mesh axes as its value does.

    Args:
        masks: The masks.
        states: What is known of each; arrays are made of those that are shapes.
        avals: Of their values.
    """
    found = []
    for mask, state, aval in zip(masks, states, avals, strict=True):
        if isinstance(state, tuple):
            shape = tuple(1 if size == 1 else whole for size, whole in zip(state, aval.shape, strict=True))
            found.append(full_like(False if mask is None else mask, aval, shape))
    return found
