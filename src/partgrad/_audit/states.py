"""The few states that are kept of all that a function meets: they are chosen to differ."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")

# How many elements of an array tell two states apart, beside its least, its largest and that nearest to zero.
_SAMPLED = 32
# Below this size, numbers count as near to zero.
_SMALL = 1e-6


class Look(NamedTuple):
    """A state as a few numbers, and where those of each array begin."""

    point: np.ndarray[Any, Any]
    starts: list[int]


class States(Generic[T]):
    """At most so many states, of which the first stays, and the others are far from each other.

    Two that differ in nothing but a random key are one.
    """

    def __init__(self, most: int):
        self._most = most
        self._kept: list[T] = []
        self._points: list[np.ndarray[Any, Any]] = []
        self._apart = np.zeros((most, most))

    def __iter__(self) -> Iterator[T]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def look(self, operands: Sequence[Any]) -> Look | None:
        """What tells a state from others, if it would be kept."""
        here = Look(*_point(operands))
        return None if self._number(here, self._gaps(here)) is None else here

    def keep(self, here: Look, made: T) -> None:
        """Keep what was made of a state, if it is still one of the few."""
        gaps = self._gaps(here)
        number = self._number(here, gaps)
        if number is not None:
            self._kept[number : number + 1], self._points[number : number + 1] = [made], [here.point]
            self._apart[number, : gaps.size] = self._apart[: gaps.size, number] = gaps
            self._apart[number, number] = 0.0

    def offer(self, operands: Sequence[Any], make: Callable[[], T]) -> None:
        """Keep what is made of a state, if it is one of the few."""
        here = self.look(operands)
        if here is not None:
            self.keep(here, make())

    def _gaps(self, here: Look) -> np.ndarray[Any, Any]:
        """How far a state is from each one that is kept."""
        if not self._points or not here.point.size:
            return np.zeros(len(self._points))
        differences = np.abs(np.stack(self._points) - here.point)
        return np.asarray(np.maximum.reduceat(differences, here.starts, axis=1).sum(axis=1))

    def _number(self, here: Look, gaps: np.ndarray[Any, Any]) -> int | None:
        """The place that a state takes; None if it is not kept."""
        if not gaps.size or gaps.min() == 0.0:
            return None if gaps.size else 0
        if len(self._kept) < self._most:
            return len(self._kept)
        first, second = self._closest()
        return second if gaps.min() > self._apart[first, second] and second else None

    def _closest(self) -> tuple[int, int]:
        """The two states that differ least, the earlier one first."""
        gaps = self._apart + np.where(np.tri(self._most), np.inf, 0.0)
        first, second = np.unravel_index(int(np.argmin(gaps)), gaps.shape)
        return int(first), int(second)


def _point(operands: Sequence[Any]) -> tuple[np.ndarray[Any, Any], list[int]]:
    parts = [part for part in map(_numbers, operands) if part is not None and part.size]
    starts = np.cumsum([0, *(part.size for part in parts[:-1])]).tolist() if parts else [0]
    return np.concatenate(parts) if parts else np.zeros(0), starts


def _numbers(operand: Any) -> np.ndarray[Any, Any] | None:
    """Some elements of an array and its extremes, so that zero, one and a million are about equally far apart."""
    if jax.dtypes.issubdtype(getattr(operand, "dtype", None), jax.dtypes.prng_key):
        return None
    array = np.asarray(operand)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    # Numbers of half precision are of a kind of their own.
    values = np.ravel(array).astype(np.float64) if array.dtype.kind in "fiubV" else np.zeros(0)
    if not values.size:
        return None
    if values.size > _SAMPLED:
        sampled = values[np.linspace(0, values.size - 1, _SAMPLED).astype(int)]
        values = np.concatenate([sampled, [values.min(), values.max(), np.abs(values).min()]])
    values = np.nan_to_num(values, nan=1e300, posinf=1e299, neginf=-1e299)
    return np.sign(values) * np.log1p(np.abs(values) / _SMALL)
