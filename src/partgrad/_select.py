"""Selectors: what a user writes for `wrt=`, resolved to leaf numbers once per structure of a tree.

A selector either names a part of a tree, whose gradient then has the shape of that part, or describes leaves, and the
gradient is the tree with None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax

from . import _path, errors
from ._fingerprint import captures_nothing, fingerprint
from ._layout import Layout, Place
from ._leaf import describe, is_differentiable
from ._slot import Slot, SlotTree


class Subject:
    """The tree that a selector is resolved on.

    Args:
        tree: The tree.
        leaves: Its leaves.
        treedef: Its structure.
        through_marks: Whether leaves that a mark holds are selected like others.
    """

    def __init__(self, tree: Any, leaves: list[Any], treedef: Any, *, through_marks: bool = False):
        self.tree = tree
        self.leaves = leaves
        self.treedef = treedef
        self.through_marks = through_marks
        self._layout: Layout | None = None
        self._slots: SlotTree | None = None

    @property
    def layout(self) -> Layout:
        """The layout; of the tree itself, or of its slots where those are there already."""
        if self._layout is None:
            self._layout = Layout(self.tree)
        return self._layout

    @property
    def slots(self) -> SlotTree:
        """The tree of slots."""
        if self._slots is None:
            self._slots = SlotTree(self.tree, self.leaves, self.treedef)
            self._layout = self._slots.layout
        return self._slots

    def is_held(self, leaf: int, depth: int = -1) -> bool:
        """Whether a mark below a depth keeps a leaf out."""
        return not self.through_marks and self.layout.leaves[leaf].mark > depth

    def looked(self) -> list[int]:
        """The numbers of the leaves whose shape or dtype a selector read."""
        return [] if self._slots is None else self._slots.looked()

    def release(self) -> None:
        """Let the slots go, once all is resolved."""
        if self._slots is not None:
            self._slots.release()

    def typed_paths(self) -> list[str]:
        """The leaves for an error message: path, type and whether a mark holds it."""
        return [
            " ".join(filter(None, [place.path, describe(leaf), "(held)" if place.mark >= 0 else ""]))
            for place, leaf in zip(self.layout.leaves, self.leaves, strict=True)
        ]


class Chosen:
    """What a selector chose in a subject.

    Attributes:
        considered: The numbers of the leaves that it was about.
        selected: Those of them that are differentiated, each once; of a named part, in the part's order.
        thaw: Those of the selected that a mark holds, and that were named in spite of it.
        part: The named part, or None for a selector that describes leaves.
    """

    def __init__(
        self, considered: list[int], selected: list[int], thaw: Iterable[int] = (), part: NamedPart | None = None
    ):
        self.considered = considered
        self.selected = selected
        self.thaw = frozenset(thaw)
        self.part = part


class NamedPart:
    """The shape of a named part: nodes and leaves of a tree, in tuples, lists and dicts.

    Args:
        containers: The structure of the tuples, lists and dicts.
        nodes: For each node or leaf its route in the tree, how many leaves it has, which of them are selected, and
            whether it is in static data.
        is_leaf: Whether the part is one leaf, and nothing around it.
    """

    def __init__(self, containers: Any, nodes: list[tuple[tuple[int, ...], int, list[int], bool]], is_leaf: bool):
        self._containers = containers
        self._nodes = nodes
        self._is_leaf = is_leaf

    def build(self, treedef: Any, values: Iterable[Any]) -> Any:
        """Put one value per selected leaf, in the order of the part, into its shape.

        Args:
            treedef: The structure of the tree, whose nodes the part has.
            values: The values.
        """
        if self._is_leaf:
            (value,) = values
            return value
        remaining, built = iter(values), []
        for route, size, selected, is_static in self._nodes:
            structure = treedef
            for number in route:
                structure = structure.children()[number]
            leaves: list[Any] = [None] * size
            for at in selected:
                leaves[at] = next(remaining)
            built.append(_none_for_constants(structure.unflatten(leaves)) if is_static else structure.unflatten(leaves))
        return self._containers.unflatten(built)


def _none_for_constants(child: Any) -> Any:
    """Put None for the constants of static data, which its child has as ()."""
    return jax.tree.map(lambda x: None if _is_empty(x) else x, child, is_leaf=_is_empty)


def _is_empty(node: Any) -> bool:
    return type(node) is tuple and not node


class Selection:
    """A selector: what `partgrad.each` and its like return, and what every `wrt=` is turned into."""

    def choose(self, subject: Subject) -> Chosen:
        """Choose leaves."""
        raise NotImplementedError

    def key(self) -> Hashable | None:
        """What its choice depends on besides the subject's structure; None if that may change without notice."""
        raise NotImplementedError


class _Everything(Selection):
    """`wrt=None`: every differentiable leaf that no mark holds."""

    def choose(self, subject: Subject) -> Chosen:
        everything = range(len(subject.leaves))
        return Chosen(list(everything), [i for i in everything if _is_free(subject, i)])

    def key(self) -> Hashable:
        return "everything"


def _is_free(subject: Subject, leaf: int) -> bool:
    return not subject.is_held(leaf) and is_differentiable(subject.leaves[leaf])


class _Misfit(Exception):
    """A callable does not fit a node."""

    def __init__(self, reason: str, name: str | None = None):
        super().__init__(reason)
        self.name = name


class _Callable(Selection):
    """A function from the tree to parts of it, or, where it does not fit the root, from any node below."""

    def __init__(self, function: Callable[[Any], Any], *, everywhere: bool = False):
        self._function = function
        self._everywhere = everywhere
        self._fixed = self._fingerprint() if captures_nothing(function) else None

    def __repr__(self) -> str:
        return f"each({self._function!r})" if self._everywhere else "`wrt`"

    def key(self) -> Hashable | None:
        return self._fixed or self._fingerprint()

    def _fingerprint(self) -> Hashable | None:
        known = fingerprint(self._function)
        return known and ("each" if self._everywhere else "callable", known)

    def choose(self, subject: Subject) -> Chosen:
        slots, misfit = subject.slots, None
        if not self._everywhere:
            try:
                return _choose_named(subject, *self._parts(slots, slots.layout.root), "`wrt`")
            except _Misfit as error:
                misfit = error
        return self._describe(subject, misfit)

    def _parts(self, slots: SlotTree, node: Place) -> tuple[list[Place], Any]:
        """The places that the function returns for a node, and the containers around them."""
        try:
            returned = self._function(node.value)
        except errors.SlotError:
            raise
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            if Slot.__module__ in str(error):
                raise errors.computed_on_slot("a leaf", f"JAX says: {str(error).splitlines()[0]}") from None
            name = getattr(error, "name", None) or (error.args[0] if isinstance(error, KeyError) else None)
            raise _Misfit(f"{type(error).__name__}: {error}", name if isinstance(name, str) else None) from None
        return jax.tree.flatten(_to_places(returned, slots))

    def _describe(self, subject: Subject, misfit: _Misfit | None) -> Chosen:
        slots = subject.slots
        nodes = [p for p in slots.layout.places if not p.is_leaf and not p.is_wrapper]
        fitting, found = False, []
        for node in nodes if misfit is None else nodes[1:]:
            try:
                places, _ = self._parts(slots, node)
            except _Misfit as error:
                misfit = misfit or error
                continue
            fitting = True
            _refuse_twice(subject, [i for place in places for i in range(place.start, place.stop)])
            for place in places:
                _refuse_undifferentiable(subject, place)
            found += places
        if not fitting:
            assert misfit is not None
            raise _fits_nowhere(subject, misfit, len(nodes) - 1)
        return choose_described(subject, found, repr(self))


def _to_places(returned: Any, slots: SlotTree) -> Any:
    """Replace slots and nodes of the tree by their places, inside tuples, lists and dicts."""
    place = slots.find(returned)
    if place is not None:
        return place
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return type(returned)(*(_to_places(item, slots) for item in returned))
    if type(returned) in (tuple, list):
        return type(returned)(_to_places(item, slots) for item in returned)
    if type(returned) is dict:
        return {key: _to_places(item, slots) for key, item in returned.items()}
    if isinstance(returned, Slot):
        raise _Misfit(f"it returned {returned!r}, which belongs to another tree")
    raise _Misfit(f"it returned {returned!r:.60} ({type(returned).__name__}), which is no part of the tree")


def _fits_nowhere(subject: Subject, misfit: _Misfit, nodes: int) -> errors.NoMatchError:
    layout = subject.layout
    steps = [place.step for place in layout.places if place.step is not None]
    names = [name for step in steps if isinstance(name := getattr(step, "name", getattr(step, "key", None)), str)]
    root = type(layout.root.value).__name__
    return errors.fits_nowhere(root, str(misfit), misfit.name, nodes, names, subject.typed_paths())


class Path(Selection):
    """A path or a glob.

    Args:
        pattern: The text.
    """

    def __init__(self, pattern: str):
        self._pattern = pattern
        self._steps = _path.parse(pattern)

    def __repr__(self) -> str:
        return repr(self._pattern)

    def key(self) -> Hashable:
        return "path", self._pattern

    def choose(self, subject: Subject) -> Chosen:
        places = _matching(subject.layout, self._steps)
        if not places:
            leaves = subject.layout.paths()
            nodes = [place.path for place in subject.layout.places if place.step is not None]
            raise errors.path_not_found(self._pattern, subject.typed_paths(), nodes or leaves)
        if not _path.is_exact(self._steps):
            if all(place.is_leaf and not is_differentiable(subject.leaves[place.start]) for place in places):
                _refuse_undifferentiable(subject, places[0])
            return choose_described(subject, places, repr(self))
        if len(places) > 1:
            raise errors.path_ambiguous(self._pattern, places[0].path, places[1].path)
        return _choose_named(subject, places, jax.tree.structure(0), repr(self))


def _matching(layout: Layout, steps: tuple[_path.Step, ...]) -> list[Place]:
    """The places that a pattern matches; of a wrapper, what it holds."""
    # For each place, the positions in the pattern that its path may have reached.
    reached: dict[int, frozenset[int]] = {}
    found = []
    for place in layout.places:
        if place.parent is None:
            at = _skipping(steps, {0})
        elif place.step is None:
            at = reached[id(place.parent)]
        else:
            at = frozenset(_advance(steps, reached[id(place.parent)], place))
        reached[id(place)] = at
        if len(steps) in at and not place.is_wrapper:
            found.append(place)
    return found


def _advance(steps: tuple[_path.Step, ...], positions: Iterable[int], place: Place) -> Iterator[int]:
    for at in positions:
        if at == len(steps):
            continue
        if steps[at].kind == "**":
            yield from _skipping(steps, {at})
        elif steps[at].matches(place.step, place.siblings):
            yield from _skipping(steps, {at + 1})


def _skipping(steps: tuple[_path.Step, ...], positions: set[int]) -> frozenset[int]:
    """The positions, and those behind a `**`, which may stand for no step at all."""
    at = max(positions)
    while at < len(steps) and steps[at].kind == "**":
        at += 1
        positions.add(at)
    return frozenset(positions)


# --- from places to leaves ---------------------------------------------------------------------------------------


def _choose_named(subject: Subject, places: list[Place], containers: Any, wrt: str) -> Chosen:
    """Choose named places: a mark on or above a place gives way, one inside it keeps its leaves out."""
    considered: list[int] = []
    selected: list[int] = []
    held: list[int] = []
    nodes: list[tuple[tuple[int, ...], int, list[int], bool]] = []
    for place in places:
        _refuse_undifferentiable(subject, place)
        numbers = range(place.start, place.stop)
        differentiable = [i for i in numbers if is_differentiable(subject.leaves[i])]
        free = [i for i in differentiable if not subject.is_held(i, place.depth)]
        considered += numbers
        selected += free
        held += [i for i in differentiable if i not in set(free)]
        nodes.append((place.route, len(numbers), [i - place.start for i in free], place.alias is not place.value))
    _refuse_twice(subject, selected)
    if not selected:
        raise _nothing(subject, held, wrt, in_named_node=True)
    is_leaf = containers == jax.tree.structure(0) and places[0].is_leaf
    thaw = [i for i in selected if subject.layout.leaves[i].mark >= 0]
    return Chosen(considered, selected, thaw, NamedPart(containers, nodes, is_leaf))


def choose_described(subject: Subject, places: Iterable[Place], wrt: str) -> Chosen:
    """Choose the leaves in places, in the tree's order; no mark gives way."""
    leaves = sorted({i for place in places for i in range(place.start, place.stop)})
    selected = [i for i in leaves if _is_free(subject, i)]
    if not selected:
        raise _nothing(subject, [i for i in leaves if is_differentiable(subject.leaves[i])], wrt, in_named_node=False)
    return Chosen(leaves, selected)


def _nothing(subject: Subject, held: list[int], wrt: str, *, in_named_node: bool) -> errors.NoMatchError:
    if held:
        paths = [subject.layout.leaves[i].path for i in held]
        return errors.all_marked(wrt, paths, in_named_node=in_named_node)
    return errors.selects_nothing(wrt, "Nothing in what it selects is floating or complex.", subject.typed_paths())


def _refuse_undifferentiable(subject: Subject, place: Place) -> None:
    if place.is_leaf and not is_differentiable(subject.leaves[place.start]):
        raise errors.not_differentiable(place.path, describe(subject.leaves[place.start]))


def _refuse_twice(subject: Subject, leaves: list[int]) -> None:
    if len(set(leaves)) < len(leaves):
        twice = next(i for i in leaves if leaves.count(i) > 1)
        raise errors.selected_twice(subject.layout.leaves[twice].path)


_EVERYTHING = _Everything()


def as_selection(wrt: Any) -> Selection:
    """Turn what a user gave as `wrt` into a selection.

    Raises:
        SelectorTypeError: If it is no selector.
    """
    if wrt is None:
        return _EVERYTHING
    if isinstance(wrt, Selection):
        return wrt
    if isinstance(wrt, str):
        return Path(wrt)
    if callable(wrt) and not isinstance(wrt, type):
        return _Callable(wrt)
    raise errors.not_a_selector(wrt)


def each(function: Callable[[Any], Any]) -> Selection:
    """Select what a function returns on every node that it fits, the root included.

    A plain callable that fits the root names a part of it; `each` always describes leaves, so that the gradient has
    the shape of the tree, and leaves held by a mark stay out.

    Args:
        function: From a node to a leaf or node in it, or a tuple, list or dict of them. It fits a node if it returns
            such a thing; an AttributeError, KeyError, IndexError or TypeError means that it does not.

    Returns:
        A selection, for every `wrt=`.

    Example:
        >>> import partgrad as pg
        >>> tree = {"w": 1.0, "deep": {"w": 2.0, "b": 3.0}}
        >>> pg.grad(lambda t: t["w"] * t["deep"]["w"], wrt=pg.each(lambda node: node["w"]))(tree)["deep"]
        {'b': None, 'w': Array(1., dtype=float32, weak_type=True)}
    """
    if not callable(function):
        raise errors.not_a_selector(function)
    return _Callable(function, everywhere=True)


def path(pattern: str) -> Selection:
    """Select by a path or a glob, as the bare string does.

    Args:
        pattern: Steps as Python writes them, from the tree itself: `kernels[0].variance`, `['w'].scale`. A name matches
            an attribute or a string key; `*` is one step, `**` any number. A path without these names a part.

    Returns:
        A selection, for every `wrt=`.

    Raises:
        NoMatchError: If the text cannot be read as a path.

    Example:
        >>> import partgrad as pg
        >>> pg.grad(lambda t: t["a"][0] * t["a"][1], wrt=pg.path("a[1]"))({"a": [2.0, 3.0]})
        Array(2., dtype=float32, weak_type=True)
    """
    if not isinstance(pattern, str):
        raise errors.not_a_selector(pattern)
    return Path(pattern)
