"""Plans: what a selector says about a structure, resolved once to numbers of leaves, and kept.

A plan says which leaves are differentiated and how to build a gradient. It holds no leaves. Plans are kept with their
structure: those of paths, classes and masks by the selector, those of callables by what the callable returned.
"""

import contextlib
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from .._marks import (
    Place,
    alike,
    at_level,
    first_difference,
    opened,
    refuse_forgotten,
    remarked,
    without_marks,
)
from .._message import at
from .._trees import Elements, flatten, is_differentiable, put, reaches_array, shape_of, take
from ..errors import PartsError, SelectionError
from .slots import Structure, structure_of

if TYPE_CHECKING:
    from .choose import Purpose
    from .selectors import Selection

_PLANS = 128
# The most elements that a kept plan may name.
_ELEMENTS = 4096


class Node(NamedTuple):
    """A node or a leaf of a named part: where it is in the tree, and which of its leaves are selected.

    It `is_opened` if marks inside it hold all of it, so that naming it removes them.
    """

    route: tuple[int, ...]
    size: int
    selected: list[int]
    is_opened: bool


class Part(NamedTuple):
    """The shape of a named part: nodes and leaves in tuples, lists and dicts, which are None for a single leaf."""

    containers: Any
    nodes: list[Node]


class Plan:
    """A resolved selector: which leaves are differentiated, and how a gradient is built.

    Attributes:
        indices: The numbers of the differentiated leaves, each once; for a named part, in the order of the part.
        elements: For each of them which elements are differentiated; None for the whole leaf. A named part may have a
            leaf more than once, with other elements.
        thaw: The numbers of the selected leaves that a mark holds and that were named nevertheless.
        others: The leaves that the selector concerns (the considered ones) but that have no derivative.
        nodes: The nodes that the selector names or matches.
    """

    nodes: tuple[Place, ...] = ()

    def __init__(
        self,
        structure: Structure,
        indices: Sequence[int],
        elements: Sequence[Elements] | None = None,
        considered: Iterable[int] = (),
        part: Part | None = None,
        thaw: Sequence[int] = (),
    ):
        leaves = structure.leaves
        self.indices = tuple(indices)
        self.elements = (None,) * len(self.indices) if elements is None else tuple(elements)
        self._is_whole = all(own is None for own in self.elements)
        self._size = len(leaves)
        self._part = part
        self.thaw = tuple(thaw)
        self._thawed: Any = None
        self._opened: dict[int, Any] = {}
        if self.thaw:
            treedef = jax.tree.structure(structure.bound_tree)
            self._thawed = remarked(structure.bound_tree, self.thaw, False)
            self._opened[0] = opened(treedef, structure.layout, self.thaw, 0)
        numbers = list(considered)
        self._considered = tuple(numbers)
        self._differentiable = [is_differentiable(leaves[i]) for i in numbers]
        self.others = tuple(i for i in numbers if not is_differentiable(leaves[i]))
        self._shapes = () if self._is_whole else tuple((i, _shape(leaves[i])) for i in numbers)

    def fits(self, leaves: list[Any]) -> bool:
        """Whether it is right for other leaves in the same structure: they differ in nothing that mattered."""
        if list(map(is_differentiable, map(leaves.__getitem__, self._considered))) != self._differentiable:
            return False
        return not self._shapes or all(_shape(leaves[i]) == shape for i, shape in self._shapes)

    def may_be_kept(self, structure: Structure) -> bool:
        """Whether it is right for every structure that compares equal, and small."""
        if self.thaw and structure.typed is not None:
            return False
        return sum(own.size for own in self.elements if own is not None) <= _ELEMENTS

    def selected(self, leaves: list[Any]) -> list[Any]:
        """The differentiated leaves or elements."""
        if self._is_whole:
            return [leaves[i] for i in self.indices]
        return [take(leaves[i], elements) for i, elements in zip(self.indices, self.elements, strict=True)]

    def inserted(self, leaves: list[Any], values: Iterable[Any]) -> list[Any]:
        """The leaves with others in place of the differentiated ones."""
        leaves = leaves.copy()
        if self._is_whole:
            for i, value in zip(self.indices, values, strict=True):
                leaves[i] = value
            return leaves
        for i, elements, value in zip(self.indices, self.elements, values, strict=True):
            leaves[i] = put(leaves[i], elements, value)
        return leaves

    def structure(self, treedef: Any) -> Any:
        """The structure of a tree, thawed where a held place was named."""
        # The caller's own if possible: treedefs that compare equal may still differ (1 == True, two equal lists).
        return self._thawed if self.thaw else treedef

    def opened(self, treedef: Any, level: int) -> Any:
        """The structure of a tree, open at a level where a held place was named."""
        if not self.thaw:
            return treedef
        if level not in self._opened:
            self._opened[level] = at_level(self._opened[0], level)
        return self._opened[level]

    def gradient(self, treedef: Any, values: Iterable[Any]) -> Any:
        """Put one value per differentiated leaf into the shape of the gradient."""
        if self._part is None:
            everywhere = [None] * self._size
            for i, value in zip(self.indices, values, strict=True):
                everywhere[i] = value
            return unflatten_part(treedef, everywhere)
        containers, nodes = self._part
        if containers is None:
            (value,) = values
            return value
        remaining, built = iter(values), []
        for node in nodes:
            structure = treedef
            for number in node.route:
                structure = structure.children()[number]
            leaves: list[Any] = [None] * node.size
            for number in node.selected:
                leaves[number] = next(remaining)
            built.append((without_marks(structure) if node.is_opened else structure).unflatten(leaves))
        return containers.unflatten(built)


def _shape(leaf: Any) -> Any:
    try:
        return shape_of(leaf)
    except AttributeError:
        return None


def unflatten_part(treedef: Any, leaves: list[Any]) -> Any:
    """Build a tree with None in place of leaves."""
    try:
        return treedef.unflatten(leaves)
    except Exception as error:
        error.add_note(
            "partgrad built a tree with None in the place of the leaves that are not in it, and the constructor of a "
            "class in it, which JAX runs to build one, refused that.\n"
            "Fix: let the constructor accept None, or name the leaves by a callable, whose gradient has no such tree."
        )
        raise


def plan(
    selection: "Selection", tree: Any, leaves: list[Any], treedef: Any, purpose: "Purpose" = "differentiate"
) -> Plan:
    """Resolve a selection on a tree of these leaves, or find the plan kept for its structure.

    What the selection always says about a structure is looked up; a callable runs on every call.
    """
    structure = structure_of(tree, treedef, exactly=not selection.is_fixed)
    plans = structure.plans[purpose]
    found = _kept(plans, selection, leaves) if selection.is_fixed else None
    if found is not None:
        if selection.takes_everything and found.others:
            others = found.others
            refuse_forgotten([leaves[i] for i in others], lambda number: structure.path(others[number]))
        return found
    before = structure.bind((tree, leaves))
    try:
        answer = selection.answer(structure, purpose)
        if not selection.is_fixed and (found := _kept(plans, answer, leaves)) is not None:
            return found
        new = selection.plan(structure, answer, purpose)
        new.nodes = tuple(_nodes_in(answer))
    finally:
        structure.bind(before)
    key = selection if selection.is_fixed else answer
    if new.may_be_kept(structure) and not (selection.is_fixed and reaches_array(selection)):
        # Another thread may be doing the same.
        with contextlib.suppress(KeyError, RuntimeError, StopIteration, TypeError, ValueError):
            while len(plans) >= _PLANS:
                del plans[next(iter(plans))]
            plans[key] = new
    return new


def _nodes_in(answer: Any) -> Iterator[Place]:
    if isinstance(answer, Place) and not answer.is_leaf:
        yield answer
    elif type(answer) is tuple:
        for item in answer:
            yield from _nodes_in(item)


def _kept(plans: dict[Hashable, Plan], key: Any, leaves: list[Any]) -> Plan | None:
    try:
        found = plans.get(key)
    except Exception:
        # A mask whose structure has auxiliary data that cannot be compared.
        return None
    return found if found is not None and found.fits(leaves) else None


class Form:
    """The shape of the gradient of an argument.

    Two are equal only if they are one, like the programs in what `jax.vjp` returns, which is part of one structure.
    """

    __slots__ = ("plan", "position", "treedef")

    def __init__(self, plan: Plan, treedef: Any, position: "int | str"):
        self.plan = plan
        self.treedef = treedef
        self.position = position

    def shaped(self, values: Iterable[Any]) -> Any:
        """One value per differentiated leaf, in the shape of the gradient."""
        return self.plan.gradient(self.treedef, values)

    def values(self, shaped: Any, what: str) -> list[Any]:
        """Take one value per differentiated leaf out of a tree in the shape of the gradient."""
        return values_like(self.shaped([0.0] * len(self.plan.indices)), shaped, what)


class Target(Form):
    """A tree with what is selected of it for a purpose: its leaves, and how to replace their values."""

    __slots__ = ("leaves", "tree")

    def __init__(
        self, tree: Any, selection: "Selection", position: "int | str" = 0, purpose: "Purpose" = "differentiate"
    ):
        self.tree = tree
        self.leaves, treedef = flatten(tree)
        super().__init__(plan(selection, tree, self.leaves, treedef, purpose), treedef, position)

    @property
    def is_empty(self) -> bool:
        """Whether there are leaves, and none of them is differentiated."""
        return not self.plan.indices and bool(self.leaves)

    @property
    def structure(self) -> Structure:
        """The structure of the tree."""
        return structure_of(self.tree, self.treedef)

    @property
    def selected(self) -> list[Any]:
        """The differentiated leaves."""
        return self.plan.selected(self.leaves)

    def with_selected(self, values: Iterable[Any]) -> Any:
        """The tree with other values in the differentiated leaves."""
        return self.plan.structure(self.treedef).unflatten(self.plan.inserted(self.leaves, values))

    def with_values(self, values: Iterable[Any]) -> Any:
        """The tree with other values in the differentiated leaves, with its own marks."""
        return self.treedef.unflatten(self.plan.inserted(self.leaves, values))

    def with_opened(self, values: Iterable[Any], level: int) -> Any:
        """The tree with other values in the differentiated leaves; named marks are open at a level."""
        return self.plan.opened(self.treedef, level).unflatten(self.plan.inserted(self.leaves, values))

    def values(self, shaped: Any, what: str) -> list[Any]:
        """Like `Form.values`, but with the tree's own leaves when building the shape."""
        return values_like(self.shaped(self.selected), shaped, what)

    def refuse_elements(self, what: str) -> None:
        """Raise if elements of a leaf are selected where only whole leaves make sense."""
        for i, elements in zip(self.plan.indices, self.plan.elements, strict=True):
            if elements is not None:
                raise SelectionError(
                    f"`{what}` works on whole leaves, and the selector takes elements of {at(self.structure.path(i))}.",
                    "Expected leaves or nodes.",
                    fix="select the whole leaf; for single elements use grad, select, replace, ravel or stop_gradient.",
                )


def values_like(template: Any, shaped: Any, what: str) -> list[Any]:
    """The leaves of a tree, which must have the structure of a template; `what` names the tree."""
    leaves, structure = jax.tree.flatten(shaped)
    if not alike(structure, jax.tree.structure(template)):
        path, expected, found = first_difference(template, shaped)
        raise PartsError(
            f"{what} has a different structure from the selection, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give it the shape of the gradient: the selected part, or the tree with None at what is not selected.",
        )
    return leaves


def entry_names(path: str, shape: tuple[int, ...], elements: Elements = None) -> list[str]:
    """The paths of all or some entries of a leaf, which are selectors, like `w[0,1]`; for a number, its own path."""
    if not shape:
        return [path]
    if elements is None:
        axes = [list(map(str, range(length))) for length in shape]
        return [f"{path}[{index}]" for index in map(",".join, itertools.product(*axes))]
    indices = zip(*(axis.tolist() for axis in np.unravel_index(elements.ravel(), shape)), strict=True)
    return [f"{path}[{','.join(map(str, index))}]" for index in indices]
