"""What a selector chooses: from places of a tree to the leaves that are differentiated, and the rules about marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .. import _words as words, errors
from .._marks import Layout, Place
from .._trees import Elements, describe, is_differentiable, joined, overlap
from .slots import Pick, SlotTree


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
        # Whether it is compared with another selection: then a held leaf is chosen for now, but does not count.
        self.compared = False
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

    def through_all_marks(self) -> Subject:
        """The same tree, on which leaves that a mark holds are selected like others."""
        other = Subject(self.tree, self.leaves, self.treedef, through_marks=True)
        other._slots, other._layout = self.slots, self.layout
        other.compared = self.compared or not self.through_marks
        return other

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
        elements: For each of the selected, which of its elements; None for the whole leaf. A named part may have a leaf
            more than once, with other elements.
    """

    def __init__(
        self,
        considered: list[int],
        selected: list[int],
        thaw: Iterable[int] = (),
        part: NamedPart | None = None,
        elements: list[Elements] | None = None,
    ):
        self.considered = considered
        self.selected = selected
        self.elements = elements or [None] * len(selected)
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
    if type(child) is tuple and not child:
        return None
    if type(child) is dict:
        return {key: _none_for_constants(item) for key, item in child.items()}
    return type(child)(map(_none_for_constants, child)) if type(child) in (tuple, list) else child


def is_free(subject: Subject, leaf: int) -> bool:
    """Whether a leaf can be differentiated and no mark keeps it out."""
    return not subject.is_held(leaf) and is_differentiable(subject.leaves[leaf])


def counts(subject: Subject, leaf: int) -> bool:
    """Whether a leaf can be differentiated and no mark keeps it out in the end."""
    held = subject.compared and subject.layout.leaves[leaf].mark >= 0
    return not held and is_free(subject, leaf)


def choose_named(subject: Subject, places: list[Place | Pick], containers: Any, wrt: str) -> Chosen:
    """Choose named places: a mark on or above a place gives way, one inside it keeps its leaves out."""
    considered: list[int] = []
    selected: list[int] = []
    held: list[int] = []
    nodes: list[tuple[tuple[int, ...], int, list[int], bool]] = []
    elements: list[Elements] = []
    for pick in places:
        place, own = (pick.place, pick.elements) if isinstance(pick, Pick) else (pick, None)
        refuse_undifferentiable(subject, place)
        numbers = range(place.start, place.stop)
        differentiable = [i for i in numbers if is_differentiable(subject.leaves[i])]
        free = [i for i in differentiable if not subject.is_held(i, place.depth)]
        considered += numbers
        selected += free
        elements += [own] * len(free)
        held += [i for i in differentiable if subject.is_held(i, place.depth)]
        nodes.append((place.route, len(numbers), [i - place.start for i in free], place.alias is not place.value))
    refuse_twice(subject, selected, elements)
    if not any(own is None or own.size for own in elements):
        raise nothing_selected(subject, held, wrt, in_named_node=True)
    is_leaf = containers == jax.tree.structure(0) and (isinstance(places[0], Pick) or places[0].is_leaf)
    thaw = [i for i in selected if subject.layout.leaves[i].mark >= 0]
    return Chosen(considered, selected, thaw, NamedPart(containers, nodes, is_leaf), elements)


def choose_described(subject: Subject, places: Iterable[Place | Pick], wrt: str) -> Chosen:
    """Choose the leaves in places, in the tree's order; no mark gives way."""
    whole: set[int] = set()
    parts: dict[int, list[Elements]] = {}
    for pick in places:
        if isinstance(pick, Pick):
            parts.setdefault(pick.place.start, []).append(pick.elements)
        else:
            whole.update(range(pick.start, pick.stop))
    for i, several in parts.items():
        refuse_twice(subject, [i] * len(several) + [i] * (i in whole), [*several, *[None] * (i in whole)])
    return choose_elements(subject, dict.fromkeys(whole) | {i: joined(own) for i, own in parts.items()}, wrt)


def choose_elements(
    subject: Subject, found: Mapping[int, Elements], wrt: str, considered: Iterable[int] | None = None
) -> Chosen:
    """Choose leaves, or elements of them, in the tree's order; no mark gives way."""
    leaves = sorted(i for i, own in found.items() if own is None or own.size)
    selected = [i for i in leaves if is_free(subject, i)]
    if not selected:
        held = [i for i in leaves if is_differentiable(subject.leaves[i])]
        raise nothing_selected(subject, held, wrt, in_named_node=False)
    elements = [found[i] for i in selected]
    return Chosen(sorted(leaves if considered is None else considered), selected, elements=elements)


def nothing_selected(subject: Subject, held: list[int], wrt: str, *, in_named_node: bool) -> errors.NoMatchError:
    """The error for a selection that is empty, or empty for all the leaves that marks hold."""
    if held:
        paths = [subject.layout.leaves[i].path for i in held]
        return words.all_marked(wrt, paths, in_named_node=in_named_node)
    return words.selects_nothing(wrt, "Nothing in what it selects is floating or complex.", subject.typed_paths())


def refuse_undifferentiable(subject: Subject, place: Place) -> None:
    """Raise if a place is a leaf without a derivative."""
    if place.is_leaf and not is_differentiable(subject.leaves[place.start]):
        raise words.not_differentiable(place.path, describe(subject.leaves[place.start]))


def refuse_twice(subject: Subject, leaves: list[int], elements: list[Elements] | None = None) -> None:
    """Raise if a leaf, or an element of one, is there twice."""
    if elements is None and len(set(leaves)) == len(leaves):
        return
    several: dict[int, list[Elements]] = {}
    for i, own in zip(leaves, elements or [None] * len(leaves), strict=True):
        several.setdefault(i, []).append(own)
    for i, parts in several.items():
        if overlap(parts):
            raise words.selected_twice(subject.layout.leaves[i].path)
