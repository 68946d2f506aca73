"""The part of a tree that is drawn: few enough nodes and leaves to look at, with counts of what is omitted."""

import dataclasses
import reprlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey, SequenceKey

from .._marks import Layout, Place, Static
from .._selection import Target
from .._trees import describe, is_array, paths
from .look import LOOKS
from .status import kind_of, statuses
from .table import ROOT
from .values import value_of

# With more nodes and leaves than this, neighbours that are alike are drawn once.
_FOLDED = 60
# At most this many rows are drawn, and this many children of one node: the first and the last of them.
_ROWS = 1000
_FIRST, _LAST = 20, 5
_DEPTH = 40
# No mean is computed for larger arrays.
_ENTRIES = 10**6


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"an int of {x.bit_length():,} bits"


_REPR = _Short()
_REPR.maxstring = _REPR.maxother = 40


@dataclasses.dataclass
class Twig:
    """A row of a picture: a leaf, a node, or a number of omitted ones.

    Attributes:
        name: The step that leads here, as a path has it.
        path: The path.
        type: The type of a leaf, the class of a node.
        status: The status of a leaf.
        value: Its value.
        kind: Its look; empty for a node.
        counts: For a node, how many leaves of each kind it contains.
        below: The contents of a node.
        is_left_out: Whether a node has more contents, which are not drawn.
    """

    name: str
    path: str
    type: str
    status: str = ""
    value: str = ""
    kind: str = ""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    below: "list[Twig]" = dataclasses.field(default_factory=list)
    is_left_out: bool = False

    @property
    def counted(self) -> list[tuple[str, str]]:
        """The kinds of leaves in a node, each with its count."""
        return [(kind, f"{self.counts[kind]:,}") for kind in LOOKS if self.counts[kind]]

    def named(self, is_open: bool) -> str:
        """Its name, and whether it contains more than what follows."""
        return self.name + (" ..." if self.is_left_out or (self.below and not is_open) else "")

    def lines(self, rows: int) -> "Iterator[tuple[tuple[bool, ...], Twig, bool]]":
        """The rows from here on, at most this many: those closest to the root.

        Each comes with its place (of each node above it and of itself, from below the root on, whether it is the last
        in its node) and with whether what is in it follows.
        """
        shown, waiting = {id(self)}, deque([self])
        opened = set()
        while waiting:
            twig = waiting.popleft()
            if twig.below and len(shown) + len(twig.below) <= max(rows, 1 + len(self.below)):
                opened.add(id(twig))
                shown.update(map(id, twig.below))
                waiting.extend(twig.below)
        pending: list[tuple[tuple[bool, ...], Twig]] = [((), self)]
        while pending:
            last, twig = pending.pop()
            yield last, twig, id(twig) in opened
            if id(twig) in opened:
                flags = [False] * (len(twig.below) - 1) + [True]
                pending += reversed([((*last, flag), below) for flag, below in zip(flags, twig.below, strict=True)])


class _Stretch(NamedTuple):
    """Neighbours in a list that are alike."""

    first: Place
    last: Place


class Grower:
    """Makes the rows of a picture, down to a number of levels below the root; None is as many as there is room for."""

    def __init__(self, target: Target, depth: int | None):
        leaves, plan = target.leaves, target.plan
        # A layout of its own: the kept one may be of a tree with other data that compares equal.
        self._layout = layout = Layout(target.tree, target.treedef)
        self._depth = _DEPTH if depth is None else min(depth, _DEPTH)
        self._leaves = leaves
        self._elements: Counter[int] = Counter()
        for i, own in zip(plan.indices, plan.elements, strict=True):
            self._elements[i] += 0 if own is None else own.size
        self._statuses = statuses(layout, leaves, plan)
        self.kinds = [kind_of(status) for status in self._statuses]
        for i in plan.thaw:
            self._statuses[i], self.kinds[i] = "opened by wrt", "open"
        self._alike = self._signatures(layout) if len(layout.places) > _FOLDED else {}
        self.root = self._grown(layout.root)

    def _signatures(self, layout: Layout) -> dict[Place, int]:
        """A number for each place; places that differ only in values have the same number."""
        numbers: dict[Any, int] = {}
        found: dict[Place, int] = {}
        for place in reversed(layout.places):
            if place.is_leaf:
                key: Any = describe(self._leaves[place.start]), self._statuses[place.start]
            else:
                key = type(place.value), *((below.key, found[below]) for below in layout.children(place))
            found[place] = numbers.setdefault(key, len(numbers))
        return found

    def _grown(self, root: Place) -> Twig:
        top = self._twig(root, is_alone=True)
        top.name, top.type = (ROOT, top.type) if top.kind else (top.type, "")
        waiting, room = deque([(top, root, 0, True)]), _ROWS
        while waiting:
            twig, place, depth, is_alone = waiting.popleft()
            below = self._inside(place)
            room -= len(below)
            if below and (depth == self._depth or room < 0):
                twig.is_left_out, room = True, room + len(below)
                continue
            for item in below:
                if isinstance(item, Twig):
                    twig.below.append(item)
                    continue
                own = is_alone and item.first is item.last
                twig.below.append(self._twig(item.first, item.last, own))
                waiting.append((twig.below[-1], item.first, depth + 1, own))
        return top

    def _twig(self, place: Place, last: Place | None = None, is_alone: bool = True) -> Twig:
        """The row of a place, or of a run of them."""
        last, step = last or place, place.step
        name = paths.write([step]) if step is not None else ""
        path = place.path
        if last is not place:
            path = path.removesuffix(name)
            name = f"[{place.step.idx}..{last.step.idx}]"
            path += name
        inner = self._layout.inside(place)
        if inner.is_leaf:
            i, leaf = inner.start, self._leaves[inner.start]
            some = self._elements[i]
            status = f"{some:,} of {leaf.size:,} elements" if some else self._statuses[i]
            is_small = not is_array(leaf) or leaf.size <= _ENTRIES
            return Twig(
                name, path, describe(leaf), status, value_of(leaf) if is_alone and is_small else "", self.kinds[i]
            )
        if isinstance(inner.value, Static):
            return _constant(name, path, inner.value.value)
        cls, size = type(inner.value).__name__, len(self._layout.children(inner))
        cls = f"{cls}[{size}]" if type(inner.value) in (list, tuple) else "None" if inner.value is None else cls
        many = "" if last is place else f"{last.step.idx - place.step.idx + 1:,} x "
        return Twig(name, path, many + cls, counts=Counter(self.kinds[place.start : last.stop]))

    def _inside(self, place: Place) -> "list[Twig | _Stretch]":
        """The contents of a node: runs of places, static fields, and rows for those that are omitted."""
        place = self._layout.inside(place)
        if place.is_leaf or place.is_wrapper:
            return []
        runs: list[_Stretch] = []
        for below in self._layout.children(place):
            if runs and self._continues(runs[-1], below):
                runs[-1] = _Stretch(runs[-1].first, below)
            else:
                runs.append(_Stretch(below, below))
        items: list[Twig | _Stretch] = list(_with_constants(place, runs))
        if len(items) <= _FIRST + _LAST + 1:
            return items
        hidden = items[_FIRST:-_LAST]
        counts: Counter[str] = Counter()
        for item in hidden:
            counts.update([item.kind] if isinstance(item, Twig) else self.kinds[item.first.start : item.last.stop])
        return [*items[:_FIRST], Twig(f"... {len(hidden):,} more", place.path, "", counts=counts), *items[-_LAST:]]

    def _continues(self, run: _Stretch, place: Place) -> bool:
        return (
            bool(self._alike)
            and isinstance(place.step, SequenceKey)
            and self._alike[run.last] == self._alike[place]
            and place.step.idx == run.last.step.idx + 1
        )


def _with_constants(place: Place, runs: list[_Stretch]) -> "Iterator[Twig | _Stretch]":
    """The runs in a node, with the fields in its structure at the position where the class declares them."""
    node = place.value
    if not dataclasses.is_dataclass(node):
        yield from runs
        return
    children = {run.first.step.name: run for run in runs if isinstance(run.first.step, GetAttrKey)}
    for field in dataclasses.fields(node):
        if field.name in children:
            yield children.pop(field.name)
        elif hasattr(node, field.name):
            path = paths.write([*place.steps, GetAttrKey(field.name)])
            yield _constant(field.name, path, getattr(node, field.name))
    named = {id(run) for run in children.values()}
    yield from (run for run in runs if id(run) in named or not isinstance(run.first.step, GetAttrKey))


def _constant(name: str, path: str, value: Any) -> Twig:
    is_named = callable(value) and hasattr(value, "__name__")
    text = str(value.__name__) if is_named else _REPR.repr(value)
    return Twig(name, path, describe(value), "static", text, "static")
