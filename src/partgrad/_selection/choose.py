"""Choosing: from the places that a selector names or describes to a plan, with the rules about marks."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._marks import Place, remarked
from .._message import at, listed
from .._skeletons import LEAF, Found, Match, Node, Part, Pick, Plan, Skeleton, place_of, refuse_twice
from .._trees import Elements, describe, is_differentiable, joined, overlap
from ..errors import NoMatchError, NotDifferentiableError, SelectionError

# How many leaves an error names in its remedy.
_NAMED = 4
NOTHING_DIFFERENTIABLE = "Nothing in what it selects is floating or complex."


class Rules(NamedTuple):
    """What else about a selector matters when leaves are chosen.

    Attributes:
        name: What it is called in an error.
        reason: Why it may be empty.
        is_strict: Whether a leaf without a derivative among others is an error.
        is_wide: Whether what it says depends on other leaves than those in its places.
        may_be_empty: Whether selecting nothing is no error.
    """

    name: str
    reason: str = NOTHING_DIFFERENTIABLE
    is_strict: bool = False
    is_wide: bool = False
    may_be_empty: bool = False


class _Named(NamedTuple):
    """What naming a place selects: the leaves, and whether it opens marks inside it."""

    leaves: list[Place]
    is_thawed: bool


def _named(skeleton: Skeleton, place: Place) -> _Named:
    """What naming a place selects: a mark on or above it gives way, one inside it keeps its leaves out."""
    leaves = [leaf for leaf in skeleton.layout.within(place) if leaf.is_leaf]
    wanted = [leaf for leaf in leaves if skeleton.is_wanted(leaf.start, is_itself=place.is_leaf)]
    free = [leaf for leaf in wanted if skeleton.purpose == "marks" or leaf.mark <= place.depth]
    # A node that is held as a whole is opened.
    return _Named(free or wanted, not free and not place.is_leaf)


def choose(skeleton: Skeleton, match: Match, rules: Rules) -> Plan:
    """The plan for a match."""
    if match.groups:
        return _choose_groups(skeleton, match)
    return (_choose_described if match.containers is None else _choose_named)(skeleton, match, rules)


def _choose_groups(skeleton: Skeleton, match: Match) -> Plan:
    """The plan of a dict of selectors, each of which has a part of the gradient to itself."""
    plans = {name: choose(skeleton, own, rules) for name, rules, own in match.groups}
    owners: dict[int, list[tuple[str, Elements]]] = {}
    for name, plan in plans.items():
        for i, elements in zip(plan.indices, plan.elements, strict=True):
            others = [own for own in owners.setdefault(i, []) if overlap([own[1], elements])]
            if others:
                raise SelectionError(
                    f"Two entries of the dict select {at(skeleton.path(i))}: {others[0][0]!r} and {name!r}.",
                    "Expected every leaf in at most one entry: its gradient has one place to go.",
                    fix="take it out of one of them, as in partgrad.path('layers') - 'layers[1]'.",
                )
            owners[i].append((name, elements))
    return _plan(
        skeleton,
        match,
        [skeleton.layout.leaves[i] for plan in plans.values() for i in plan.indices],
        [elements for plan in plans.values() for elements in plan.elements],
        range(len(skeleton.leaves)),
        groups=plans,
    )


def _choose_named(skeleton: Skeleton, match: Match, rules: Rules) -> Plan:
    considered: list[int] = []
    selected: list[Place | Pick] = []
    nodes = []
    for pick in match.places:
        place = place_of(pick)
        refuse_undifferentiable(skeleton, place)
        named = _named(skeleton, place)
        considered += place.numbers
        selected += [pick] * len(named.leaves) if isinstance(pick, Pick) else named.leaves
        own = [leaf.start - place.start for leaf in named.leaves]
        nodes.append(Node(place.route, place.stop - place.start, own, named.is_thawed))
    refuse_twice(skeleton, [selected], lambda leaf: True)
    elements = [pick.elements if isinstance(pick, Pick) else None for pick in selected]
    if not any(own is None or own.size for own in elements):
        has_elements = any(own is not None for own in elements)
        reason = "Its index takes no element." if has_elements else NOTHING_DIFFERENTIABLE
        raise nothing_selected(skeleton, [], Rules(rules.name, reason))
    first = match.places[0]
    is_leaf = match.containers == LEAF and (isinstance(first, Pick) or first.is_leaf)
    part = Part(None if is_leaf else match.containers, nodes)
    return _plan(skeleton, match, list(map(place_of, selected)), elements, considered, part)


def _choose_described(skeleton: Skeleton, match: Match, rules: Rules) -> Plan:
    found = leaves_in(skeleton, match, rules.is_strict)
    found = {i: own for i, own in sorted(found.items()) if own is None or own.size}
    selected = selected_in(skeleton, match, found, rules)
    if not selected and not rules.may_be_empty and not (found and skeleton.purpose == "show"):
        raise nothing_selected(skeleton, list(found), rules)
    # Whether a leaf has these elements depends on its shape.
    is_wide = rules.is_wide or any(isinstance(pick, Pick) for pick in match.places)
    count = len(skeleton.leaves)
    considered = range(count) if is_wide else dict.fromkeys(i for pick in match.places for i in place_of(pick).numbers)
    leaves, elements = skeleton.layout.leaves, [found[i] for i in selected]
    return _plan(skeleton, match, [leaves[i] for i in selected], elements, considered)


def selected_in(skeleton: Skeleton, match: Match, found: Found, rules: Rules) -> list[int]:
    """The leaves among those found that no mark holds, or that are named; to be read, held ones rather than none."""
    opens = {leaf.start for pick in match.named for leaf in _named(skeleton, place_of(pick)).leaves}
    selected = [i for i in found if i in opens or not skeleton.is_held(i)]
    return list(found) if not selected and skeleton.purpose == "edit" and not rules.may_be_empty else selected


def _plan(
    skeleton: Skeleton,
    match: Match,
    leaves: Sequence[Place],
    elements: Sequence[Elements],
    considered: Iterable[int],
    part: Part | None = None,
    groups: dict[str, Plan] | None = None,
) -> Plan:
    is_thawing = skeleton.purpose != "marks"
    thaw = [leaf.start for leaf in leaves if is_thawing and leaf.is_held]
    # What becomes of a mark also depends on what else can be differentiated beside the named leaf.
    considered = range(len(skeleton.leaves)) if thaw else considered
    nodes = tuple(place for place in match.places if isinstance(place, Place) and not place.is_leaf)
    indices = [leaf.start for leaf in leaves]
    watched = thaw
    if skeleton.purpose == "differentiate" and match.named:
        named = leaves
        if match.containers is None:
            opened = {leaf.start for pick in match.named for leaf in _named(skeleton, place_of(pick)).leaves}
            named = [leaf for leaf in leaves if leaf.start in opened]
        watched = [leaf.start for leaf in named if leaf.is_held or leaf.is_released]
    plan = Plan(skeleton.leaves, indices, elements, considered, part, nodes, thaw, watched, groups)
    if thaw:
        plan.thawed = remarked(skeleton.tree, thaw, False)
    return plan


def leaves_in(skeleton: Skeleton, match: Match, is_strict: bool) -> Found:
    """The leaves, or elements of leaves, in the places of a match, marks aside.

    It is an error if a place is a leaf without a derivative: any of them if it `is_strict`, as where a part is named,
    else if all are.
    """
    is_strict = is_strict or match.containers is not None
    places = [place_of(pick) for pick in match.places]
    useless = [place for place in places if _is_useless(skeleton, place)]
    if useless and (is_strict or len(useless) == len(places)):
        refuse_undifferentiable(skeleton, useless[0])
    if match.containers is not None:
        for place in places:
            refuse_undifferentiable(skeleton, place)
    whole: set[int] = set()
    chosen: dict[int, list[Elements]] = {}
    for pick, place in zip(match.places, places, strict=True):
        if isinstance(pick, Pick):
            chosen.setdefault(place.start, []).append(pick.elements)
        elif place.is_leaf:
            whole.update([place.start] if skeleton.is_wanted(place.start, is_itself=True) else [])
        else:
            whole.update(filter(skeleton.is_wanted, place.numbers))
    merged = {i: joined(own) for i, own in chosen.items() if i not in whole}
    return {**dict.fromkeys(sorted(whole)), **merged}


def _is_useless(skeleton: Skeleton, place: Place) -> bool:
    return place.is_leaf and not skeleton.is_wanted(place.start, is_itself=True)


def nothing_selected(skeleton: Skeleton, held: Sequence[int], rules: Rules) -> NoMatchError:
    """The error for a selection that is empty, or empty because marks hold all its leaves."""
    if not held:
        return NoMatchError(
            f"The selector {rules.name} selects nothing to differentiate.",
            rules.reason,
            f"Leaves: {skeleton.listed_leaves()}.",
            fix="select a floating or complex leaf, or a node that holds one.",
        )
    paths = [skeleton.path(i) for i in held]
    remedies = [f"name {_named_each(paths)}"]
    if not any(skeleton.layout.leaves[i].foreign_mark for i in held):
        # Otherwise its class holds it, and there is no mark to take off.
        is_code = rules.name.isidentifier() or rules.name.startswith(("'", '"', "partgrad."))
        what = repr(paths[0]) if len(paths) == 1 else rules.name if is_code else "wrt"
        remedies.append(f"remove the mark first: partgrad.thaw(tree, {what})")
    return NoMatchError(
        f"All that the selector {rules.name} selects is held by a mark.",
        f"Held: {listed(f'`{p}`' for p in paths)}.",
        "Describing leaves never reaches through a mark.",
        fix=f"{', or '.join(remedies)}.",
    )


def _named_each(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return f"the leaf itself, wrt={paths[0]!r}"
    more = " | ..." if len(paths) > _NAMED else ""
    return f"the leaves themselves, wrt={' | '.join(f'partgrad.path({p!r})' for p in paths[:_NAMED])}{more}"


def refuse_undifferentiable(skeleton: Skeleton, place: Place) -> None:
    """Raise if a place is a leaf without a derivative."""
    if skeleton.purpose == "edit" or not place.is_leaf or is_differentiable(skeleton.leaves[place.start]):
        return
    leaf = describe(skeleton.leaves[place.start])
    remedy = "store a float (1.0 for 1)" if leaf.startswith(("bool", "i", "u")) else "select a floating leaf"
    raise NotDifferentiableError(
        f"The selector names {at(place.path)}, which cannot be differentiated.",
        f"Expected a floating or complex leaf, got {leaf}.",
        fix=f"{remedy}, or select the node around it: non-differentiable leaves inside are skipped.",
    )
