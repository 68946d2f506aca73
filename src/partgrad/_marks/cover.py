"""How much of a value a mark holds, and how much of that a transform has opened."""

from collections.abc import Iterable
from typing import Any

from jax.tree_util import keystr

from .._trees import compared_exactly
from .hold import CONCRETE, hold, hold_leaves

KeyPath = tuple[Any, ...]


@compared_exactly
class Cover:
    """What a mark does to the leaves of its value, unless it simply holds all of them.

    Leaves are key paths from the marked value, not numbers: a `None` in place of a leaf (in a gradient, in a part)
    would renumber those after it. `held` has the paths of the leaves, or of the nodes around them, or is None for all;
    `open` the paths of the leaves that a transform has opened, each with the level of the transform.
    """

    __slots__ = ("_opened", "held", "open")

    def __init__(self, held: frozenset[KeyPath] | None, open: Iterable[tuple[KeyPath, int]] = ()):
        self.held = held
        self.open = frozenset(open)
        self._opened = frozenset(path for path, _ in self.open)

    def holds(self, path: KeyPath) -> bool:
        """Whether a leaf is marked, open or not."""
        return self.held is None or _has_beginning(self.held, path)

    def is_open(self, path: KeyPath) -> bool:
        """Whether a leaf is open; if a leaf has become a tree, all of that tree is."""
        return _has_beginning(self._opened, path)

    def stops(self, path: KeyPath) -> bool:
        """Whether gradients stop at a leaf."""
        return self.holds(path) and not self.is_open(path)

    def with_open(self, paths: Iterable[KeyPath], level: int) -> "Cover":
        """The cover with more of its leaves open."""
        new = {(path, level) for path in paths if self.holds(path) and not self.is_open(path)}
        return Cover(self.held, self.open | new)

    def closed(self, level: int) -> "Cover":
        """The cover before transforms at this level or above opened it."""
        return Cover(self.held, (pair for pair in self.open if pair[1] < level))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cover) and self.held == other.held and self.open == other.open

    def __hash__(self) -> int:
        return hash((self.held, self.open))

    def __repr__(self) -> str:
        opened = sorted(keystr(path) for path, _ in self.open)
        parts = [] if self.held is None else [f"of={self.of!r}"]
        return ", ".join(parts + [f"open{path and ' ' + path}" for path in opened])

    @property
    def of(self) -> str:
        """The held paths, as text."""
        return ", ".join(sorted(map(keystr, self.held or ())))

    def __reduce__(self) -> Any:
        return Cover, (self.held, tuple(self.open))


def _has_beginning(paths: frozenset[KeyPath], path: KeyPath) -> bool:
    """Whether a path, or one that leads on the way to it, is among others."""
    return any(path[:length] in paths for length in range(len(path) + 1))


WHOLE = Cover(None)


def normal(cover: Cover | None) -> Cover | None:
    """None for a cover that holds everything, as a mark without a cover does."""
    return None if cover is None or (cover.held is None and not cover.open) else cover


def hold_part(value: Any, cover: Cover | None, label: str) -> Any:
    """Stop gradients at the leaves that a cover stops; see `hold`."""
    if cover is None:
        return hold(value, label)
    if value.__class__ in CONCRETE:
        return value
    return hold_leaves(value, label, cover.stops)
