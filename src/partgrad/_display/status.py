"""The status of a leaf, in words and as one of a few kinds that look alike."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._marks import Layout, Place, open_leaves
from .._selection import Target
from .._skeletons import Plan
from .._trees import describe, is_differentiable, tied

# How many places of one array are named.
_TIED = 4
_KINDS = {
    "differentiated": "differentiated",
    "not selected": "not selected",
    "held by a mark": "held",
    "open": "open",
}


def kind_of(status: str) -> str:
    """The kind of a status, which has a look; everything without a derivative is one kind."""
    return _KINDS.get(status, "no derivative")


def statuses(layout: Layout, leaves: Iterable[Any], plan: Plan) -> list[str]:
    """The status of each leaf of a tree, given what is selected."""
    chosen, opened = frozenset(plan.indices), open_leaves(layout)
    return [
        "differentiated" if i in chosen else "open" if i in opened else status_of(place, leaf)
        for i, (place, leaf) in enumerate(zip(layout.leaves, leaves, strict=True))
    ]


def status_of(place: Place, leaf: Any) -> str:
    """The status of a leaf that is not differentiated."""
    if place.is_held:
        return "held by a mark"
    if is_differentiable(leaf):
        return "not selected"
    if isinstance(leaf, bool | int):
        return "bool" if isinstance(leaf, bool) else "integer"
    if isinstance(leaf, str):
        return "string"
    try:
        dtype = leaf.dtype
    except Exception:
        # The name of its type, or `function`.
        return describe(leaf)
    return _status_of_dtype(dtype) or type(leaf).__name__


def _status_of_dtype(dtype: Any) -> str | None:
    kinds = (("key", jax.dtypes.prng_key), ("bool", jnp.bool_), ("integer", jnp.integer))
    try:
        if getattr(dtype, "kind", None) in ("U", "T"):
            return "string"
        return next((name for name, kind in kinds if jax.dtypes.issubdtype(dtype, kind)), None)
    except Exception:
        # A dtype of another library.
        return None


def tied_paths(target: Target) -> Iterator[tuple[str, ...]]:
    """The paths of leaves that are one array, for each such array that is differentiated at one of them."""
    for numbers in tied(target.leaves, target.plan.indices):
        yield tuple(target.skeleton.path(i) for i in numbers)


def tie_in_words(paths: Sequence[str]) -> str:
    """A line on leaves that are one array."""
    *some, last = paths if len(paths) <= _TIED else (*paths[:_TIED], f"{len(paths) - _TIED} more")
    places = f"{', '.join(some)} and {last}"
    return f"one array at {places}: updates make it several (partgrad.ravel: tie=True)"
