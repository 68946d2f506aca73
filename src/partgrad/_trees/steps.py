"""Ranges of steps: elements of a leaf as ranges along its leading axis, for leaves that a scan reads step by step."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .elements import Elements, ascend, put
from .indexed import Indexed

# More ranges than these are one, from the first to the last.
_MOST = 4
_Ranges = tuple[tuple[int, int], ...]


class Steps:
    """The ranges along the leading axis of a leaf outside of which no element is selected.

    Args:
        selected: The elements that each entry of a selection takes from the leaf.
        ranges: The first step of each range and that after the last, ascending and apart from each other.
        exact: For each entry the ranges that it fills in order, if all elements in the ranges are selected so.
    """

    def __init__(self, selected: Sequence[np.ndarray], ranges: _Ranges, exact: Sequence[_Ranges] | None):
        self._selected, self.ranges, self._exact = tuple(selected), ranges, exact

    def parts(self, leaf: Any, values: Sequence[Any]) -> list[Any]:
        """For each range what stands there, given a value for each entry."""
        if self._exact is None:
            ((start, stop),) = self.ranges
            part = leaf[start:stop]
            first = start * math.prod(leaf.shape[1:])
            for elements, value in zip(self._selected, values, strict=True):
                part = put(part, elements - first, value)
            return [part]
        found: dict[tuple[int, int], Any] = {}
        for own, value in zip(self._exact, values, strict=True):
            steps = value.reshape(-1, *leaf.shape[1:])
            starts = itertools.accumulate((stop - start for start, stop in own), initial=0)
            for (start, stop), first in zip(own, starts, strict=False):
                found[start, stop] = steps if len(own) == 1 else steps[first : first + stop - start]
        return [found[own] for own in self.ranges]

    def whole(self, leaf: Any, values: Sequence[Any]) -> Any:
        """The leaf with all values in it."""
        for elements, value in zip(self._selected, values, strict=True):
            leaf = put(leaf, elements, value)
        return leaf


def steps_of(shape: tuple[int, ...], selected: Sequence[Elements]) -> Steps | None:
    """The ranges of steps of a leaf that elements are in; None if they are not known, or all steps are among them."""
    known = [elements for elements in selected if elements is not None and not isinstance(elements, Indexed)]
    if len(known) < len(selected) or not shape or not all(elements.size for elements in known):
        return None
    exact = [_exact(shape, elements) for elements in known]
    ranges = tuple(sorted(itertools.chain.from_iterable(exact)))
    is_exact = all(exact) and len(ranges) <= _MOST
    if not is_exact:
        size = math.prod(shape[1:])
        first, last = min(int(own.min()) for own in known) // size, max(int(own.max()) for own in known) // size
        ranges = ((first, last + 1),)
    return None if ranges == ((0, shape[0]),) else Steps(known, ranges, exact if is_exact else None)


def _exact(shape: tuple[int, ...], elements: np.ndarray) -> _Ranges:
    """The ranges that elements fill, if they do so in order; empty if they do not."""
    size, flat = math.prod(shape[1:]), elements.ravel()
    if flat.size % size or not ascend(flat):
        return ()
    first, last = flat[::size], flat[size - 1 :: size]
    # They ascend, so that these are all elements of a step.
    if (first % size).any() or (last - first != size - 1).any():
        return ()
    steps = first // size
    starts = np.flatnonzero(np.diff(steps, prepend=-2) > 1)
    stops = [*starts[1:], len(steps)]
    return tuple((int(steps[a]), int(steps[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))
