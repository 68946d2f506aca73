"""What selectors say and what it comes to, as records: a match of places, and the plan that is made of it.

A plan is made for a skeleton, holds no leaves, and is kept with it for other trees of the same treedef.
"""

import copy
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from .._marks import Place
from .._trees import Elements, Indexed, Steps, is_differentiable, shape_of, steps_of

# The purpose of a selection. For differentiation, marks count; for setting or querying marks, they do not; for reading
# and editing, leaves without a derivative are chosen too if a selector takes the leaf itself, and held ones if nothing
# else is described. What is only shown may be held altogether.
Purpose: TypeAlias = Literal["differentiate", "marks", "edit", "show"]
Found: TypeAlias = dict[int, Elements]

# The most elements that a kept plan may name.
_ELEMENTS = 4096
LEAF = jax.tree.structure(0)


class Pick:
    """Some elements of the leaf at a place: their positions in the flattened leaf, which has so many elements."""

    __slots__ = ("_key", "elements", "place", "size")
    # It is a part of one.
    is_leaf = False

    def __init__(self, place: Place, elements: np.ndarray | Indexed, size: int):
        self.place = place
        self.elements = elements
        self.size = size
        which = (elements,) if isinstance(elements, Indexed) else (elements.shape, elements.tobytes())
        self._key = (place, *which, size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pick) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def place_of(pick: "Place | Pick") -> Place:
    """The place of a leaf, or of the leaf that elements are taken of."""
    return pick.place if isinstance(pick, Pick) else pick


class Match(NamedTuple):
    """What a selector says about a skeleton.

    Attributes:
        places: The nodes, leaves and elements that it is about.
        containers: For a named part, the structure of the containers around these places; None if leaves are described.
        names: Where leaves are described: those places that are named nevertheless, so that marks give way.
        groups: Of a dict of selectors, what each says: its key, its rules, and its match.
    """

    places: "tuple[Place | Pick, ...]"
    containers: Any = None
    names: "tuple[Place | Pick, ...]" = ()
    groups: "tuple[tuple[str, Any, Match], ...]" = ()

    @property
    def named(self) -> "tuple[Place | Pick, ...]":
        """The places at which marks give way."""
        return self.names if self.containers is None else self.places


class Node(NamedTuple):
    """A node or a leaf of a named part: where it is in the tree, and which of its leaves are selected.

    It `is_thawed` if marks inside it hold all of it, so that naming it removes them.
    """

    route: tuple[int, ...]
    size: int
    selected: list[int]
    is_thawed: bool


class Part(NamedTuple):
    """The shape of a named part: nodes and leaves in tuples, lists and dicts, which are None for a single leaf."""

    containers: Any
    nodes: list[Node]


class Plan:
    """A resolved selector: which leaves are differentiated, and the shape of a gradient.

    Attributes:
        indices: The numbers of the differentiated leaves, each once; for a named part, in the order of the part.
        elements: For each of them which elements are differentiated; None for the whole leaf. A named part may have a
            leaf more than once, with other elements.
        is_whole: Whether all of them are whole leaves.
        thaw: The numbers of the selected leaves that a mark holds and that were named nevertheless.
        watched: The numbers of the named leaves whose class declares a mark: those of `thaw`, and those without it.
        others: The leaves that the selector concerns (the considered ones) but that have no derivative.
        part: The shape of the named part; None if leaves are described.
        groups: Of a dict of selectors, the plan of each by its key; their leaves follow each other in this one.
        nodes: The nodes that the selector names or matches.
        thawed: The treedef of the tree with the marks of these leaves off; None if there are none.
        opened: The treedef of the tree with these marks open, by the level of the call, as far as it was asked for.
        may_change: Whether the tree has nodes that a function may change in place; None until that was asked.
        asked: The functions that were searched for silent zeros of the watched leaves, by identity and flags.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        indices: Sequence[int],
        elements: Sequence[Elements] | None = None,
        considered: Iterable[int] = (),
        part: Part | None = None,
        nodes: tuple[Place, ...] = (),
        thaw: Sequence[int] = (),
        watched: Sequence[int] = (),
        groups: "dict[str, Plan] | None" = None,
    ):
        self.indices = tuple(indices)
        self.elements = (None,) * len(self.indices) if elements is None else tuple(elements)
        self.is_whole = elements is None or all(own is None for own in self.elements)
        self.part = part
        self.groups = groups
        self.nodes = nodes
        self.thaw = tuple(thaw)
        self.watched = tuple(watched)
        self.thawed: Any = None
        self.opened: dict[int, Any] = {}
        self.may_change: bool | None = None
        self._steps: list[tuple[int, Steps, list[int]]] | None = None
        self.asked: dict[Hashable, weakref.ref[Any]] = {}
        self._considered = tuple(considered)
        self._differentiable = [is_differentiable(leaves[i]) for i in self._considered]
        pairs = zip(self._considered, self._differentiable, strict=True)
        self.others = tuple(i for i, differentiable in pairs if not differentiable)
        self._shapes = () if self.is_whole else tuple((i, _shape(leaves[i])) for i in self._considered)

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether it is right for other leaves in the same skeleton: they differ in nothing that mattered."""
        if list(map(is_differentiable, map(leaves.__getitem__, self._considered))) != self._differentiable:
            return False
        return not self._shapes or all(_shape(leaves[i]) == shape for i, shape in self._shapes)

    def steps(self, leaves: Sequence[Any]) -> list[tuple[int, Steps, list[int]]]:
        """The leaves of which some steps along the leading axis are selected, and which of its elements these are.

        Returns:
            For each the number of the leaf, the steps, and the places of its entries among the differentiated ones.
        """
        if self._steps is None:
            places: dict[int, list[int]] = {}
            for place, number in enumerate(self.indices):
                places.setdefault(number, []).append(place)
            found = (
                (i, steps_of(_shape(leaves[i]) or (), [self.elements[n] for n in own]), own)
                for i, own in places.items()
            )
            self._steps = [(i, steps, own) for i, steps, own in found if steps is not None]
        return self._steps

    @property
    def is_small(self) -> bool:
        """Whether it may be kept: it is small, and holds no array of JAX."""
        if any(isinstance(own, Indexed) for own in self.elements):
            return False
        return self.is_whole or sum(own.size for own in self.elements if own is not None) <= _ELEMENTS

    def without_arrays(self) -> "Plan":
        """The plan as far as the shape of a gradient goes, which holds no array of JAX."""
        if not any(isinstance(own, Indexed) for own in self.elements):
            return self
        plan = copy.copy(self)
        plan.elements = tuple(None if isinstance(own, Indexed) else own for own in self.elements)
        if self.groups is not None:
            plan.groups = {name: own.without_arrays() for name, own in self.groups.items()}
        return plan


def _shape(leaf: Any) -> Any:
    try:
        return shape_of(leaf)
    except AttributeError:
        return None
