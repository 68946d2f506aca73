"""An optimiser's state for another selection."""

from typing import Any, TypeVar

import numpy as np

from .._marks import Layout
from .._message import at
from .._trees import describe, flatten
from ..errors import PartsError
from .partition import filled, is_none

T = TypeVar("T")


def carry_over(state: Any, fresh: T) -> T:
    """An optimiser's state for a wider or narrower selection, with what was there before.

    A leaf of `fresh` takes the value that `state` has at the same path, so the moments of a parameter that goes on
    being trained are kept; a parameter that was not trained before starts as in `fresh`, and what is trained no longer
    is left out. Marks take no step of a path, so it does not matter whether a parameter was named, thawed or frozen.

    Adam corrects the bias of young moments by one count for all parameters, and this count goes on. With its usual
    rates of decay the first updates of a new parameter are therefore up to five times the learning rate: raise the rate
    slowly again, or start with a fresh state.

    Args:
        state: The state of the optimiser for the old selection: any pytree.
        fresh: A state of the same optimiser for the new one, `optimiser.init(partition(tree, wrt)[0])`.

    Returns:
        A tree of the structure of `fresh`.

    Raises:
        PartsError: If a leaf has another shape in the two states, or no leaf is in both.

    Example:
        >>> import partgrad as pg
        >>> state = {"count": 7, "mean": {"head": 0.3, "body": None}}
        >>> fresh = {"count": 0, "mean": {"head": 0.0, "body": 0.0}}
        >>> pg.carry_over(state, fresh)
        {'count': 7, 'mean': {'body': 0.0, 'head': 0.3}}

    See Also:
        `partgrad.partition`: what an optimiser is given.
    """
    old, new = _by_path(state), _by_path(fresh)
    common = [key for key, leaf in new.items() if leaf is not None and old.get(key) is not None]
    if not common and any(leaf is not None for leaf in new.values()):
        raise PartsError(
            "The two states have no leaf at the same path.",
            "Expected the states of one optimiser for two selections from one tree.",
            fix="write partgrad.carry_over(state, optimiser.init(partgrad.partition(tree, wrt)[0])); if no parameter "
            "goes on being trained, take the fresh state.",
        )
    for key in common:
        if np.shape(old[key]) != np.shape(new[key]):
            raise PartsError(
                f"The two states have leaves of different shapes at {at(key[0])}.",
                f"Expected {describe(new[key])}, got {describe(old[key])}.",
                fix="carry over the state of the same optimiser and model; where a parameter got another shape, its "
                "state has to begin anew.",
            )
        new[key] = old[key]
    _, treedef = flatten(fresh, is_none)
    return treedef.unflatten(new.values())


def _by_path(state: Any) -> dict[tuple[str, int], Any]:
    """The leaves with None, in order, each by its path and the number of leaves before it that have the same one."""
    leaves, _ = flatten(state, is_none)
    counts: dict[str, int] = {}
    found = {}
    for place, leaf in zip(Layout(filled(state)).leaves, leaves, strict=True):
        number = counts.get(place.path, 0)
        counts[place.path] = number + 1
        found[place.path, number] = leaf
    return found
