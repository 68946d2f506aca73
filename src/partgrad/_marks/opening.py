"""Open marks: what a transform does to the marks that its selector names, on treedefs alone.

Inside a function that a transform differentiates, a named mark is still there, but the derivative passes it: the mark
is *open*. Openness is part of the structure, so a function traced for a held model is traced again for an open one.
Each call opens marks at its own level, one above that of the calls around it, and closes that level and those above
when the function has returned.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import jax
from jax.tree_util import PyTreeDef, default_registry

from .cover import WHOLE, Cover, KeyPath, normal
from .fields import MARKS, SCHEMA, Marks, schema_of
from .foreign import closed_class, is_wrapper_class, level_of, open_class
from .layout import Layout, Place
from .nondiff import NonDiff, cover_of

_running = threading.local()


class Inside:
    """Runs a function in which marks are open at a level."""

    def __init__(self, level: int):
        self._level = level

    def __enter__(self) -> None:
        self._outer = getattr(_running, "level", 0)
        _running.level = self._level

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _running.level = self._outer


def next_level() -> int:
    """A level for a call, above that of every call that is running."""
    return 1 + getattr(_running, "level", 0)


def close(tree: Any, level: int = 0) -> Any:
    """A tree without the open marks of transforms at this level or above; the same object if there are none."""
    leaves, treedef = jax.tree.flatten(tree)
    after = closed(treedef, level)
    return tree if after is treedef else after.unflatten(leaves)


def closed(treedef: Any, level: int = 0) -> Any:
    """A treedef without the open marks of transforms at this level or above; the same object if there are none."""
    reached = lambda kind: (level_of(kind) or 0) >= level
    return _map_covers(
        treedef, lambda cover, *_: cover.closed(level), lambda kind, _: closed_class(kind) if reached(kind) else kind
    )


def is_open(treedef: Any) -> bool:
    """Whether a mark in a treedef is open."""
    return closed(treedef) is not treedef


def alike(first: Any, second: Any) -> bool:
    """Whether two treedefs are equal apart from which marks are open."""
    return bool(first == second) or bool(closed(first) == closed(second))


def with_open_marks(treedef: Any, layout: Layout, leaves: Iterable[int], level: int) -> Any:
    """A treedef in which the marks above some leaves are open at a level, given a layout of its structure."""
    paths: dict[Any, list[KeyPath]] = {}
    wrappers = set()
    for number in leaves:
        for mark, path, _ in _marks_above(layout.leaves[number]):
            paths.setdefault(mark, []).append(path)
        wrappers |= {place.route for place in layout.leaves[number].above if is_wrapper_class(type(place.value))}
    return _map_covers(
        treedef,
        lambda cover, *mark: cover.with_open(paths.get(mark, ()), level),
        lambda kind, route: open_class(kind, level) if route in wrappers else kind,
    )


def open_leaves(layout: Layout) -> dict[int, int]:
    """The open leaves, each with the highest level at which a mark above it was opened."""
    levels: dict[int, int] = {}
    for number, leaf in enumerate(layout.leaves):
        for _, path, cover in _marks_above(leaf) if leaf.is_held else ():
            for opened_path, level in cover.open if cover is not None else ():
                if path[: len(opened_path)] == opened_path:
                    levels[number] = max(level, levels.get(number, 0))
    return levels


def _marks_above(place: Place) -> Iterator[tuple[Any, KeyPath, Cover | None]]:
    """The marks above a leaf: each as route and field, the key path from its value to the leaf, and its cover."""
    path: KeyPath = ()
    while place.parent is not None:
        node = place.parent.value
        if isinstance(node, NonDiff):
            yield (place.parent.route, None), path, cover_of(node)
        elif schema_of(node) is not None and place.step.name in getattr(node, MARKS).nondiff:
            yield (place.parent.route, place.step.name), path, getattr(node, MARKS).cover(place.step.name)
        path, place = (place.key, *path), place.parent


def without_marks(treedef: Any, declared: bool = False) -> Any:
    """A treedef without any marks, or with only those that classes declare."""

    def bare(node: Any, children: list[Any], *_: Any) -> Any:
        kind, aux = node.node_data()
        if kind is NonDiff:
            return children[0]
        if type(aux) is Marks:
            schema, static = kind.__dict__[SCHEMA], {name for name, _ in aux.static}
            aux = schema.marks(tuple(n for n in schema.nondiff if declared and n not in static), aux.static)
        return PyTreeDef.from_node_data_and_children(default_registry, (kind, aux), children)

    return _rebuilt(treedef, bare)


def _rebuilt(treedef: Any, change: Callable[[Any, list[Any], bool, tuple[int, ...]], Any]) -> Any:
    """A treedef whose nodes are changed, from the leaves up: without recursion, as JAX flattens deeper trees than that.

    `change` takes a node, its children after the change, whether they are the same objects as before, and the node's
    route, and returns the new node.
    """
    nodes: list[tuple[Any, tuple[int, ...]]] = [(treedef, ())]
    starts = []
    for node, route in nodes:
        starts.append(len(nodes))
        nodes += [(child, (*route, number)) for number, child in enumerate(node.children())]
    after = [node for node, _ in nodes]
    ends = [*starts[1:], len(nodes)]
    for number, (node, route) in reversed(list(enumerate(nodes))):
        data, below = node.node_data(), range(starts[number], ends[number])
        if data is not None and data[0] is not type(None):
            is_same = all(after[i] is nodes[i][0] for i in below)
            after[number] = change(node, [after[i] for i in below], is_same, route)
    return after[0]


def united(first: Any, second: Any) -> Any:
    """A treedef whose marks are open where those of either of two are; they are otherwise alike."""
    others = _covers(second)
    return _map_covers(first, lambda cover, *mark: Cover(cover.held, cover.open | others[mark].open))


def _covers(treedef: Any) -> dict[Any, Cover]:
    """The covers of the marks in a treedef, each by the route of its node and the marked field."""
    found: dict[Any, Cover] = {}
    _map_covers(treedef, lambda cover, *mark: found.setdefault(mark, cover))
    return found


def _map_covers(
    treedef: Any,
    change: Callable[..., Cover],
    change_class: Callable[[type, tuple[int, ...]], type] = lambda kind, _: kind,
) -> Any:
    """A treedef with other covers on its marks; the same object if nothing changes.

    `change` takes a cover, the route of the marked node and the marked field (None for a wrapper), and returns the
    new cover. `change_class` takes the class of a node and its route, and returns the class that is there instead.
    """

    def changed(node: Any, children: list[Any], is_same: bool, route: tuple[int, ...]) -> Any:
        before, old = node.node_data()
        kind = change_class(before, route)
        aux = _changed(kind, old, lambda cover, field: change(cover, route, field))
        if is_same and kind is before and aux is old:
            return node
        return PyTreeDef.from_node_data_and_children(default_registry, (kind, aux), children)

    return _rebuilt(treedef, changed)


def _changed(kind: Any, aux: Any, change: Callable[[Cover, str | None], Cover]) -> Any:
    """The auxiliary data of a node with other covers; the same object if nothing changes."""
    if kind is NonDiff:
        new = change(aux or WHOLE, None)
        return aux if new == (aux or WHOLE) else normal(new)
    if type(aux) is not Marks or not aux.nondiff:
        return aux
    before = [(name, aux.cover(name) or WHOLE) for name in aux.nondiff]
    after = [(name, change(cover, name)) for name, cover in before]
    if after == before:
        return aux
    covers = tuple((name, cover) for name, cover in after if normal(cover) is not None)
    return kind.__dict__[SCHEMA].marks(aux.nondiff, aux.static, covers)
