"""Choosing: from the places that a selector names or describes to a plan, with the rules about marks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from .._marks import Place
from .._message import at, listed
from .._trees import Elements, describe, is_differentiable, joined, overlap
from ..errors import NoMatchError, NotDifferentiableError, SelectionError
from .plans import Node, Part, Plan
from .slots import Pick, Structure

# The purpose of a selection. For differentiation, marks count; for setting or querying marks, they do not; for reading
# and editing, leaves without a derivative are chosen too if a selector takes the leaf itself.
Purpose: TypeAlias = Literal["differentiate", "marks", "edit"]
Found: TypeAlias = dict[int, Elements]

LEAF = jax.tree.structure(0)
NOTHING_DIFFERENTIABLE = "Nothing in what it selects is floating or complex."


def choose_named(
    structure: Structure, places: Sequence[Place | Pick], containers: Any, wrt: str, purpose: Purpose
) -> Plan:
    """Choose named places: a mark on or above a place gives way, one inside it keeps its leaves out."""
    considered: list[int] = []
    selected: list[int] = []
    elements: list[Elements] = []
    thaw: list[Place] = []
    nodes = []
    for pick in places:
        place, own = (pick.place, pick.elements) if isinstance(pick, Pick) else (pick, None)
        refuse_undifferentiable(structure, place, purpose)
        leaves = [leaf for leaf in structure.layout.within(place) if leaf.is_leaf]
        wanted = [leaf for leaf in leaves if is_wanted(structure, leaf.start, purpose, is_itself=place.is_leaf)]
        free = wanted if purpose == "marks" else [leaf for leaf in wanted if leaf.mark <= place.depth]
        is_opened = not free
        # A node that is held as a whole is opened.
        free = free or wanted
        numbers = [leaf.start for leaf in free]
        considered += range(place.start, place.stop)
        selected += numbers
        thaw += [leaf for leaf in free if leaf.mark >= 0] if purpose == "differentiate" else []
        elements += [own] * len(free)
        own_numbers = [i - place.start for i in numbers]
        nodes.append(Node(place.route, len(leaves), own_numbers, is_opened and not place.is_leaf))
    refuse_twice(structure, selected, elements)
    if not any(own is None or own.size for own in elements):
        has_elements = any(own is not None for own in elements)
        reason = "Its index takes no element." if has_elements else NOTHING_DIFFERENTIABLE
        raise nothing_selected(structure, [], wrt, reason=reason)
    is_leaf = containers == LEAF and (isinstance(places[0], Pick) or places[0].is_leaf)
    for leaf in thaw:
        _refuse_foreign_mark(leaf)
    # What becomes of a mark also depends on what else can be differentiated beside the named leaf.
    considered = list(range(len(structure.leaves))) if thaw else considered
    part = Part(None if is_leaf else containers, nodes)
    return Plan(structure, selected, elements, considered, part, [leaf.start for leaf in thaw])


def _refuse_foreign_mark(place: Place) -> None:
    mark = place.foreign_mark
    if mark is not None:
        raise SelectionError(
            f"The selector names {at(place.path)}, which a `{type(mark.value).__name__}` of another library holds.",
            "Expected a mark of partgrad: that library would hold it all the same.",
            fix=f"`pg.thaw` first: partgrad.thaw(tree, {place.path!r}) takes it off.",
        )


def leaves_of(structure: Structure, places: Iterable[Place | Pick], purpose: Purpose) -> Found:
    """The leaves, or elements of leaves, in the places that a selector describes."""
    whole: set[int] = set()
    parts: dict[int, list[Elements]] = {}
    for pick in places:
        if isinstance(pick, Pick):
            parts.setdefault(pick.place.start, []).append(pick.elements)
        else:
            numbers = range(pick.start, pick.stop)
            whole.update(i for i in numbers if is_wanted(structure, i, purpose, is_itself=pick.is_leaf))
    for i, several in parts.items():
        refuse_twice(structure, [i] * len(several) + [i] * (i in whole), [*several, *[None] * (i in whole)])
    return {**dict.fromkeys(sorted(whole)), **{i: joined(own) for i, own in parts.items()}}


def choose_described(
    structure: Structure,
    found: Mapping[int, Elements],
    wrt: str,
    purpose: Purpose,
    considered: Iterable[int],
    reason: str = NOTHING_DIFFERENTIABLE,
) -> Plan:
    """Choose leaves, or elements of them, in the tree's order; no mark gives way."""
    leaves = sorted(i for i, own in found.items() if own is None or own.size)
    selected = [i for i in leaves if purpose == "marks" or structure.mark(i) < 0]
    if not selected:
        raise nothing_selected(structure, leaves, wrt, reason=reason)
    return Plan(structure, selected, [found[i] for i in selected], considered)


def is_wanted(structure: Structure, leaf: int, purpose: Purpose, *, is_itself: bool = False) -> bool:
    """Whether a selector that takes a leaf, directly or within a node, concerns it, marks aside."""
    return (is_itself and purpose == "edit") or is_differentiable(structure.leaves[leaf])


def nothing_selected(
    structure: Structure, held: list[int], wrt: str, *, reason: str = NOTHING_DIFFERENTIABLE
) -> NoMatchError:
    """The error for a selection that is empty, or empty because marks hold all its leaves."""
    if not held:
        return NoMatchError(
            f"The selector {wrt} selects nothing to differentiate.",
            reason,
            f"Leaves: {structure.listed_leaves()}.",
            fix="select a floating or complex leaf, or a node that holds one.",
        )
    paths = [structure.path(i) for i in held]
    return NoMatchError(
        f"All that the selector {wrt} selects is held by a mark.",
        f"Held: {listed(f'`{p}`' for p in paths)}.",
        "Describing leaves never reaches through a mark.",
        fix=f"name the leaf itself, wrt={paths[0]!r}, or remove the mark first: partgrad.thaw(tree, {paths[0]!r}).",
    )


def refuse_undifferentiable(structure: Structure, place: Place, purpose: Purpose) -> None:
    """Raise if a place is a leaf without a derivative."""
    if purpose == "edit" or not place.is_leaf or is_differentiable(structure.leaves[place.start]):
        return
    leaf = describe(structure.leaves[place.start])
    remedy = "store a float (1.0 for 1)" if leaf.startswith(("bool", "i", "u")) else "select a floating leaf"
    raise NotDifferentiableError(
        f"The selector names {at(place.path)}, which cannot be differentiated.",
        f"Expected a floating or complex leaf, got {leaf}.",
        fix=f"{remedy}, or select the node around it: non-differentiable leaves inside are skipped.",
    )


def refuse_twice(structure: Structure, leaves: Sequence[int], elements: Sequence[Elements] | None = None) -> None:
    """Raise if a leaf, or an element of one, is there twice."""
    if len(set(leaves)) == len(leaves) and (elements is None or all(own is None for own in elements)):
        return
    several: dict[int, list[Elements]] = {}
    for i, own in zip(leaves, elements or [None] * len(leaves), strict=True):
        several.setdefault(i, []).append(own)
    for i, parts in several.items():
        if overlap(parts):
            raise SelectionError(
                f"The selector returns {at(structure.path(i))} twice.",
                "A leaf may appear once: its gradient has one place to go.",
                fix="return it once, or the node around it alone.",
            )
