"""Steps of leaves that a scan reads: which of them a call selects, so that the others have no backward pass."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._selection import Target

if TYPE_CHECKING:
    from .._programs import Selected


def selected_steps(targets: Sequence[Target], values: Sequence[Any]) -> "list[Selected]":
    """The leaves of which some steps along the leading axis are selected, with what is selected.

    Args:
        targets: The arguments.
        values: One value for each of their differentiated leaves.
    """
    # Importing it takes longer than importing everything that `grad` needs.
    from .._programs import Selected

    found, start = [], 0
    for target in targets:
        for number, steps, places in target.plan.steps(target.leaves):
            own = Selected(target.position, number, steps, [values[start + place] for place in places])
            if own.fits(target.leaves[number]):
                found.append(own)
        start += len(target.plan.indices)
    return found


def inserting(selected: "Sequence[Selected]", level: int) -> Callable[[Target, Sequence[Any]], Any]:
    """How an argument is built from its differentiated leaves, if those of which steps are selected stay as they are.

    Args:
        selected: The leaves of which steps are selected.
        level: That at which marks are open, or 0.
    """

    def insert(target: Target, values: Sequence[Any]) -> Any:
        apart = {own.number for own in selected if own.position == target.position}
        if level:
            return target.with_opened(values, level, apart)
        return target.with_selected(values, apart=apart)

    return insert


def of_steps(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given first of which leaves steps are selected."""
    # Importing it takes longer than importing everything that `grad` needs.
    from .._programs import stacking

    return stacking(function)
