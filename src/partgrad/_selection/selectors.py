"""Selectors: what a user writes for `wrt=`, resolved to leaf numbers once per structure of a tree.

A selector either names a part of a tree, whose gradient then has the shape of that part, or describes leaves, and the
gradient is the tree with None elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from .. import _words as words, errors
from .._marks import Layout, Place, refuse_forgotten
from .._trees import Elements, common, is_differentiable, joined, paths, shape_of, without
from .choose import (
    Chosen,
    Subject,
    choose_described,
    choose_elements,
    choose_named,
    counts,
    is_free,
    nothing_selected,
    refuse_twice,
    refuse_undifferentiable,
)
from .fingerprint import captures_nothing, fingerprint
from .slots import Pick, Slot, SlotTree


class Selection:
    """A selector: what `partgrad.each` and its like return, and what every `wrt=` is turned into."""

    def choose(self, subject: Subject) -> Chosen:
        """Choose leaves."""
        raise NotImplementedError

    def key(self) -> Hashable | None:
        """What its choice depends on besides the subject's structure; None if that may change without notice."""
        raise NotImplementedError

    def __or__(self, other: Any) -> Selection:
        return _Union(self, as_selection(other))

    def __ror__(self, other: Any) -> Selection:
        return _Union(as_selection(other), self)

    def __and__(self, other: Any) -> Selection:
        return _Intersection(self, as_selection(other))

    def __rand__(self, other: Any) -> Selection:
        return _Intersection(as_selection(other), self)

    def __sub__(self, other: Any) -> Selection:
        return _Difference(self, as_selection(other))

    def __rsub__(self, other: Any) -> Selection:
        return _Difference(as_selection(other), self)

    def __invert__(self) -> Selection:
        return _Difference(_EVERYTHING, self)


class _Pair(Selection):
    """A combination of two selections; it describes leaves, whatever they do."""

    symbol = ""

    def __init__(self, first: Selection, second: Selection):
        self._first = first
        self._second = second

    def __repr__(self) -> str:
        return f"({self._first!r} {self.symbol} {self._second!r})"

    def key(self) -> Hashable | None:
        first, second = self._first.key(), self._second.key()
        return None if first is None or second is None else (self.symbol, first, second)

    def choose(self, subject: Subject) -> Chosen:
        # A held leaf counts as chosen until both are compared: what is taken away need not be free.
        through = subject.through_all_marks()
        first, second = self._first.choose(through), self._second.choose(through)
        found = self._combined(subject, _by_leaf(first), _by_leaf(second))
        return choose_elements(subject, found, repr(self), {*first.considered, *second.considered})

    def _combined(self, subject: Subject, first: _ByLeaf, second: _ByLeaf) -> _ByLeaf:
        raise NotImplementedError


_ByLeaf: TypeAlias = dict[int, Elements]


def _by_leaf(chosen: Chosen) -> _ByLeaf:
    several: dict[int, list[Elements]] = {}
    for i, elements in zip(chosen.selected, chosen.elements, strict=True):
        several.setdefault(i, []).append(elements)
    return {i: joined(own) for i, own in several.items()}


class _Union(_Pair):
    symbol = "|"

    def _combined(self, subject: Subject, first: _ByLeaf, second: _ByLeaf) -> _ByLeaf:
        for selection, leaves in ((self._first, first), (self._second, second)):
            if leaves and subject.compared:
                continue
            if not any(is_free(subject, i) for i in leaves):
                raise nothing_selected(subject, list(leaves), repr(selection), in_named_node=False)
        both = [i for i in first if i in second and counts(subject, i)]
        refuse_twice(subject, [*both, *both], [*(first[i] for i in both), *(second[i] for i in both)])
        return first | second | {i: joined([first[i], second[i]]) for i in both}


class _Intersection(_Pair):
    symbol = "&"

    def _combined(self, subject: Subject, first: _ByLeaf, second: _ByLeaf) -> _ByLeaf:
        return {i: common(own, second[i]) for i, own in first.items() if i in second}


class _Difference(_Pair):
    symbol = "-"

    def _combined(self, subject: Subject, first: _ByLeaf, second: _ByLeaf) -> _ByLeaf:
        sizes = {i: math.prod(shape_of(subject.leaves[i])) for i in first if i in second}
        return {i: without(own, second[i], sizes[i]) if i in second else own for i, own in first.items()}


class _Everything(Selection):
    """`wrt=None`: every differentiable leaf that no mark holds."""

    def choose(self, subject: Subject) -> Chosen:
        refuse_forgotten(subject.leaves, lambda i: subject.layout.leaves[i].path)
        everything = range(len(subject.leaves))
        return Chosen(list(everything), [i for i in everything if is_free(subject, i)])

    def key(self) -> Hashable:
        return "everything"


class _Misfit(Exception):
    """A callable does not fit a node."""

    def __init__(self, reason: str, name: str | None = None):
        super().__init__(reason)
        self.name = name


class CallableSelection(Selection):
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
                return choose_named(subject, *self._parts(slots, slots.layout.root), "`wrt`")
            except _Misfit as error:
                # A new one: with its traceback it would keep this call's frames, and the leaves in them, alive.
                misfit = _Misfit(str(error), error.name)
        return self._describe(subject, misfit)

    def _parts(self, slots: SlotTree, node: Place) -> tuple[list[Place | Pick], Any]:
        """The places that the function returns for a node, and the containers around them."""
        try:
            returned = self._function(node.value)
        except (errors.SlotError, errors.ElementError):
            raise
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            if Slot.__module__ in str(error):
                raise words.computed_on_slot("a leaf", f"JAX says: {str(error).splitlines()[0]}") from None
            name = getattr(error, "name", None) or (error.args[0] if isinstance(error, KeyError) else None)
            raise _Misfit(f"{type(error).__name__}: {error}", name if isinstance(name, str) else None) from None
        places = _to_places(returned, slots)
        try:
            return jax.tree.flatten(places, is_leaf=lambda node: isinstance(node, Pick))
        except (TypeError, ValueError) as error:
            raise words.containers_unsortable(error) from error

    def _describe(self, subject: Subject, misfit: _Misfit | None) -> Chosen:
        slots = subject.slots
        nodes = [p for p in slots.layout.places if not p.is_leaf and not p.is_wrapper]
        fitting, found = False, []
        for node in nodes if misfit is None else nodes[1:]:
            try:
                places, _ = self._parts(slots, node)
            except _Misfit as error:
                misfit = misfit or _Misfit(str(error), error.name)
                continue
            fitting = True
            whole = [p for p in places if isinstance(p, Place)]
            refuse_twice(subject, [i for p in whole for i in range(p.start, p.stop) if is_free(subject, i)])
            for place in places:
                refuse_undifferentiable(subject, place.place if isinstance(place, Pick) else place)
            found += places
        if not fitting:
            misfit = misfit or _Misfit("it is one leaf, and a leaf is no node")
            raise _fits_nowhere(subject, misfit, max(len(nodes) - 1, 0))
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
    kind = type(returned).__name__
    static = "; static data is no leaf" if isinstance(returned, bool | int | float | str) else ""
    raise _Misfit(f"it returned {returned!r:.60} ({kind}), which is no part of the tree{static}")


def _fits_nowhere(subject: Subject, misfit: _Misfit, nodes: int) -> errors.NoMatchError:
    layout = subject.layout
    steps = [place.step for place in layout.places if place.step is not None]
    names = [name for step in steps if isinstance(name := getattr(step, "name", getattr(step, "key", None)), str)]
    root = type(layout.root.value).__name__
    return words.fits_nowhere(root, str(misfit), misfit.name, nodes, names, subject.typed_paths())


class Path(Selection):
    """A path or a glob.

    Args:
        pattern: The text.
    """

    def __init__(self, pattern: str):
        self._pattern = pattern
        self._steps = paths.parse(pattern)

    def __repr__(self) -> str:
        return repr(self._pattern)

    def key(self) -> Hashable:
        return "path", self._pattern

    def choose(self, subject: Subject) -> Chosen:
        places: list[Place | Pick] = list(_matching(subject.layout, self._steps))
        if not places and paths.is_exact(self._steps):
            places = _elements_at(subject, self._steps)
        if not places:
            leaves = subject.layout.paths()
            nodes = [place.path for place in subject.layout.places if place.step is not None]
            raise words.path_not_found(self._pattern, subject.typed_paths(), nodes or leaves)
        if not paths.is_exact(self._steps):
            found = [place for place in places if isinstance(place, Place)]
            if all(place.is_leaf and not is_differentiable(subject.leaves[place.start]) for place in found):
                refuse_undifferentiable(subject, found[0])
            return choose_described(subject, places, repr(self))
        if len(places) > 1:
            one, other = (place.place if isinstance(place, Pick) else place for place in places[:2])
            raise words.path_ambiguous(self._pattern, one.path, other.path)
        return choose_named(subject, places, jax.tree.structure(0), repr(self))


def _matching(layout: Layout, steps: tuple[paths.Step, ...]) -> list[Place]:
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


def _elements_at(subject: Subject, steps: tuple[paths.Step, ...]) -> list[Place | Pick]:
    """The elements that the last steps of a path take of the leaf that the others name."""
    for count in range(1, len(steps) + 1):
        indices = [step.value for step in steps[-count:]]
        if not all(type(part) is int for index in indices for part in (index if type(index) is tuple else (index,))):
            return []
        leaves = [place for place in _matching(subject.layout, steps[:-count]) if place.is_leaf]
        leaf = subject.leaves[leaves[0].start] if leaves else None
        if is_differentiable(leaf) and shape_of(leaf):
            slot: Any = subject.slots.slot(leaves[0].start)
            for index in indices:
                slot = slot[index]
            return [Pick(leaves[0], slot.elements)]
    return []


def _advance(steps: tuple[paths.Step, ...], positions: Iterable[int], place: Place) -> Iterator[int]:
    for at in positions:
        if at == len(steps):
            continue
        if steps[at].kind == "**":
            yield from _skipping(steps, {at})
        elif steps[at].matches(place.step, place.siblings):
            yield from _skipping(steps, {at + 1})


def _skipping(steps: tuple[paths.Step, ...], positions: set[int]) -> frozenset[int]:
    """The positions, and those behind a `**`, which may stand for no step at all."""
    at = max(positions)
    while at < len(steps) and steps[at].kind == "**":
        at += 1
        positions.add(at)
    return frozenset(positions)


class OfType(Selection):
    """Every leaf in the nodes of a class."""

    def __init__(self, cls: type):
        self._cls = cls

    def __repr__(self) -> str:
        return self._cls.__name__

    def key(self) -> Hashable:
        return "type", self._cls

    def choose(self, subject: Subject) -> Chosen:
        nodes = [place for place in subject.layout.places if not place.is_leaf and not place.is_wrapper]
        found = [place for place in nodes if isinstance(place.value, self._cls)]
        if not found:
            raise words.no_node_of(self._cls.__name__, dict.fromkeys(type(place.value).__name__ for place in nodes))
        return choose_described(subject, found, repr(self))


class _Mask(Selection):
    """A tree of bools, or a prefix of one."""

    def __init__(self, tree: Any):
        self._layout = Layout(tree)
        self._chosen = [bool(leaf.value) for leaf in self._layout.leaves]
        self._key = ("mask", jax.tree.structure(tree), tuple(self._chosen))

    def __repr__(self) -> str:
        return "the mask"

    def key(self) -> Hashable:
        return self._key

    def choose(self, subject: Subject) -> Chosen:
        # Wrappers take no step, so the last place of a path is what they hold.
        places = {place.path: place for place in subject.layout.places}
        covered: set[int] = set()
        for place in self._layout.places:
            path = place.path
            if path not in places:
                raise words.mask_structure(path, "nothing there", "a mask entry")
            there = places[path]
            if place.is_leaf:
                covered.update(range(there.start, there.stop))
            elif not place.is_wrapper and place.value is not None and type(place.value) is not type(there.value):
                raise words.mask_structure(path, type(there.value).__name__, type(place.value).__name__)
        for number, leaf in enumerate(subject.layout.leaves):
            if number not in covered:
                raise words.mask_structure(leaf.path, "True or False", "nothing")
        wanted = [places[leaf.path] for leaf, on in zip(self._layout.leaves, self._chosen, strict=True) if on]
        return choose_described(subject, wanted, repr(self))


def _is_mask(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, bool | np.bool_) for leaf in leaves)


class Matching(Selection):
    """The free leaves for which a function of path and slot returns true."""

    def __init__(self, function: Callable[[str, Any], bool]):
        self._function = function

    def __repr__(self) -> str:
        return "matching(...)"

    def key(self) -> Hashable | None:
        known = fingerprint(self._function)
        return known and ("matching", known)

    def choose(self, subject: Subject) -> Chosen:
        leaves = [(i, subject.slots.slot(i)) for i in range(len(subject.leaves)) if counts(subject, i)]
        chosen = [i for i, slot in leaves if self._function(slot.path, slot)]
        if not chosen:
            raise nothing_selected(subject, [], repr(self), in_named_node=False)
        return Chosen(list(range(len(subject.leaves))), chosen)


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
    if isinstance(wrt, type):
        return OfType(wrt)
    if _is_mask(wrt):
        return _Mask(wrt)
    if callable(wrt):
        return CallableSelection(wrt)
    raise words.not_a_selector(wrt)
