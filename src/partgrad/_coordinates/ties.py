"""Ties: which leaves follow which, in an order in which each comes after what it follows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from .._marks import Layout, Place
from .._message import at, listed
from .._selection import Target, as_selection
from .._skeletons import PatternStep, matching_places, name_of, parse
from .._trees import is_differentiable, is_known, shape_of, written
from ..errors import PartsError, SelectionError, SelectorTypeError

# How far the value of a leaf may be from what it follows, in units of the rounding of the larger one.
_ROUNDINGS = 32


class Tie(NamedTuple):
    """A leaf that follows others.

    Attributes:
        leaf: Its number.
        sources: The numbers of the leaves that it follows.
        function: From their values to its own; None if it is equal to the one.
    """

    leaf: int
    sources: tuple[int, ...]
    function: Callable[..., Any] | None

    def value(self, values: Sequence[Any]) -> Any:
        """Its value, from the values of its sources."""
        return values[0] if self.function is None else self.function(*values)

    def at(self, positions: Sequence[int]) -> "Tie":
        """The tie with positions for numbers of leaves."""
        return self._replace(leaf=positions[self.leaf], sources=tuple(positions[own] for own in self.sources))


def resolve_ties(tree: Any, ties: Mapping[Any, Any]) -> list[Tie]:
    """The ties that a user wrote, leaf by leaf, each after those of its sources."""
    if not isinstance(ties, Mapping):
        raise SelectorTypeError(
            f"`ties` is {type(ties).__name__} {written(ties):.60}.",
            "Expected a dict from what follows to what it follows.",
            fix="write ties={'b.scale': 'a.scale'}.",
        )
    if not ties:
        return []
    everything = Target(tree, as_selection(None), purpose="marks")
    found: dict[int, Tie] = {}
    for follower, source in ties.items():
        sources, function = _read(follower, source)
        # `**` matches a node and what is inside it.
        pairs = dict.fromkeys(zip(*(_pairs(everything, follower, own) for own in sources), strict=True))
        for several in pairs:
            leaf = several[0][0]
            tie = Tie(leaf, tuple(own for _, own in several), function)
            if leaf in found:
                raise SelectionError(
                    f"Two ties are of {at(everything.path(leaf))}.",
                    "Expected every leaf to follow in one way.",
                    fix="take it out of one of them.",
                )
            found[leaf] = tie
    ordered = _ordered(found, everything.path)
    for tie in ordered:
        _compare(tie, everything)
    return ordered


def _read(follower: Any, source: Any) -> tuple[tuple[Any, ...], Callable[..., Any] | None]:
    """The selectors of the sources, and the function."""
    if type(source) is not tuple:
        return (source,), None
    *sources, function = source
    if not sources or not callable(function) or isinstance(function, type):
        raise SelectorTypeError(
            f"The tie of {follower!r} is {written(source):.60}.",
            "Expected what it follows, or a tuple of that and a function of its value.",
            fix="write ties={'sigma': ('mu', lambda mu: 2 * mu)}, or with more selectors before the function.",
        )
    return tuple(sources), function


def _pairs(tree: Target, follower: Any, source: Any) -> list[tuple[int, int]]:
    """The numbers of the leaves that follow, each with that of the leaf that it follows."""
    layout, followers = tree.skeleton.layout, _places(tree, follower)
    if _is_wild(follower) and _is_wild(source):
        pairs = [(place, _counterpart(layout, follower, source, place)) for place in followers]
    else:
        sources = _places(tree, source)
        if len(sources) == 1:
            # A glob may match what the others follow.
            followers = [place for place in followers if place is not sources[0] or not _is_wild(follower)]
            sources *= len(followers)
        if len(sources) != len(followers):
            raise SelectionError(
                f"The tie of {follower!r} to {source!r} does not say which leaf follows which.",
                f"Expected one source, or one for each that follows, got {len(sources)} for {len(followers)}.",
                fix="write the same wildcards on both sides, as in {'decoder.*.w': 'encoder.*.w'}, or one path each.",
            )
        pairs = list(zip(followers, sources, strict=True))
    return [leaves for place, own in pairs for leaves in _leaf_pairs(tree, place, own)]


def _is_wild(selector: Any) -> bool:
    return isinstance(selector, str) and any(step.is_wild for step in parse(selector))


def _places(tree: Target, selector: Any) -> list[Place]:
    """The places of a path or a glob; the leaves of any other selector."""
    layout, target = tree.skeleton.layout, Target(tree.tree, as_selection(selector), purpose="marks")
    target.refuse_elements("ties")
    places = matching_places(layout, parse(selector)) if isinstance(selector, str) and selector else []
    return places or [layout.leaves[i] for i in target.plan.indices]


def _leaf_pairs(tree: Target, follower: Place, source: Place) -> Iterator[tuple[int, int]]:
    """The leaves in two places, one to one by their paths from there; all follow a source that is one leaf."""
    leaves, inside = tree.leaves, tree.skeleton.layout.within
    within = lambda place: [own for own in inside(place) if own.is_leaf and is_differentiable(leaves[own.start])]
    if source.is_leaf:
        yield from ((own.start, source.start) for own in within(follower))
        return
    below = lambda place, own: tuple(map(_name, own.steps[len(place.steps) :]))
    of_source = {below(source, own): own.start for own in within(source)}
    of_follower = {below(follower, own): own.start for own in within(follower)}
    if of_source.keys() != of_follower.keys():
        missing = of_follower.keys() ^ of_source.keys()
        names = listed(sorted("".join(f"[{own!r}]" if kind else f".{own}" for kind, own in path) for path in missing))
        raise SelectionError(
            f"{at(follower.path)} cannot follow {at(source.path)}: they have different leaves.",
            f"Expected the same paths in both, and only one of them has {names}.",
            fix="tie the leaves that both have.",
        )
    yield from ((own, of_source[path]) for path, own in of_follower.items())


def _name(step: Any) -> tuple[bool, Any]:
    """A key entry as what it is compared by."""
    if isinstance(step, GetAttrKey):
        return False, step.name
    return True, getattr(step, "idx", getattr(step, "key", step))


# --- globs with the same wildcards ------------------------------------------------------------------------------------


def _counterpart(layout: Layout, follower: str, source: str, place: Place) -> Place:
    """What is at a glob if its wildcards stand for what those of another glob stand for at a place."""
    mine, other = parse(follower), parse(source)
    # `[*]` is `*` that takes no attribute.
    kinds, others = ([step.kind.strip("[]") for step in steps if step.is_wild] for steps in (mine, other))
    if kinds != others or any(type(step.value) is slice for step in (*mine, *other)):
        raise SelectionError(
            f"The tie of {follower!r} to {source!r} has other wildcards on its two sides.",
            f"Expected the same ones in the same order, got {' '.join(kinds)} and {' '.join(others)}.",
            fix="write as many on both sides, as in {'decoder.*.w': 'encoder.*.w'}, or a path each.",
        )
    stands_for = iter(_captured(layout, mine, place))
    steps: list[PatternStep] = []
    for step in other:
        steps += _filled(step, next(stands_for)) if step.is_wild else [step]
    found = matching_places(layout, steps)
    if len(found) != 1:
        path = "".join(step.text if step.text.startswith("[") else f".{step.text}" for step in steps).removeprefix(".")
        raise SelectionError(
            f"{at(place.path)} has nothing to follow: {source!r} is {at(path)} there, which does not exist.",
            "Expected a source for everything that follows.",
            fix="tie only what has one; write those paths out.",
        )
    return found[0]


def _captured(layout: Layout, steps: Sequence[PatternStep], place: Place) -> list[Any]:
    """What each wildcard of a pattern stands for at a place that it matches: `**` for as few steps as it can."""
    line = [own for own in (*reversed(list(place.above)), place) if own.step is not None]
    keys = [(own.step, len(layout.children(own.parent)) if own.parent else 1) for own in line]
    hopeless: set[tuple[int, int]] = set()

    def follow(number: int, start: int) -> list[Any] | None:
        if number == len(steps):
            return [] if start == len(keys) else None
        if (number, start) in hopeless:
            return None
        step = steps[number]
        ends = range(start, len(keys) + 1) if step.kind == "**" else [start + 1]
        for end in ends:
            if step.kind == "**" or (end <= len(keys) and step.matches(*keys[start])):
                rest = follow(number + 1, end)
                if rest is not None:
                    return [[key for key, _ in keys[start:end]], *rest] if step.is_wild else rest
        hopeless.add((number, start))
        return None

    found = follow(0, 0)
    assert found is not None
    # A part of a name stands for the text in its gaps.
    wild = [step for step in steps if step.is_wild]
    return [
        _gaps(step.value, name_of(own[0]) or "") if step.kind == "glob" else own
        for step, own in zip(wild, found, strict=True)
    ]


def _gaps(glob: str, name: str) -> list[str]:
    """What the stars of a glob stand for in a name: as little as they can, from the left."""
    first, *inner, last = glob.split("*")
    gaps, start, stop = [], len(first), len(name) - len(last)
    for part in inner:
        found = name.index(part, start, stop)
        gaps.append(name[start:found])
        start = found + len(part)
    return [*gaps, name[start:stop]]


def _filled(step: PatternStep, stands_for: Any) -> list[PatternStep]:
    """A wildcard with what it stands for in its place."""
    if step.kind == "glob":
        parts = step.value.split("*")
        if len(parts) - 1 != len(stands_for):
            return [_exactly(step.value, lambda key: False)]
        name = parts[0] + "".join(gap + part for gap, part in zip(stands_for, parts[1:], strict=True))
        return [_exactly(name, lambda key: name_of(key) == name)]
    return [_exactly(name_of(own) or f"[{_name(own)[1]!r}]", _is_key(own)) for own in stands_for]


def _is_key(key: Any) -> Callable[[Any], bool]:
    name = name_of(key)
    # An attribute of one class may be a key of a dict on the other side.
    return (lambda own: name_of(own) == name) if name is not None else (lambda own: _name(own) == _name(key))


def _exactly(text: str, is_it: Callable[[Any], bool]) -> PatternStep:
    return PatternStep("name", text, text, lambda key, siblings: is_it(key))


# --- the order, and the values ----------------------------------------------------------------------------------------


def _ordered(ties: dict[int, Tie], path: Callable[[int], str]) -> list[Tie]:
    """The ties, each after those of its sources."""
    ordered: dict[int, Tie] = {}
    for first in ties:
        pending, line = [(first, iter(ties[first].sources))], [first]
        while pending:
            leaf, sources = pending[-1]
            source = next((own for own in sources if own in ties and own not in ordered), None)
            if source is None:
                ordered.setdefault(leaf, ties[leaf])
                pending.pop()
                line.pop()
            elif source in line:
                circle = [*line[line.index(source) :], source]
                raise PartsError(
                    f"Ties go round in a circle: {' -> '.join(at(path(own)) for own in circle)}.",
                    "Expected a leaf at the end of every chain that follows nothing.",
                    fix="leave one of these ties out.",
                )
            else:
                pending.append((source, iter(ties[source].sources)))
                line.append(source)
    return list(ordered.values())


def _compare(tie: Tie, tree: Target) -> None:
    """Raise if a leaf has another shape or value than what it follows gives it."""
    leaf, sources = tree.leaves[tie.leaf], [tree.leaves[own] for own in tie.sources]
    what = f"{at(tree.path(tie.leaf))} follows {listed(at(tree.path(own)) for own in tie.sources)}"
    value = tie.value(sources)
    expected, found = shape_of(leaf), np.shape(value)
    if expected != found:
        raise PartsError(
            f"{what}, which gives it another shape.",
            f"Expected shape {expected}, got {found}.",
            fix="tie leaves of one shape, or give a function that makes it: ('source', lambda source: ...).",
        )
    if not all(map(is_known, (leaf, value, *sources))):
        return
    wide = [np.asarray(own).astype(np.complex128) for own in (leaf, value, *sources)]
    scale = max(float(np.max(np.abs(own), initial=0.0, where=np.isfinite(own))) for own in wide)
    rounding = float(jnp.finfo(jnp.result_type(leaf)).eps)
    agrees = np.isclose(wide[0], wide[1], rtol=0, atol=_ROUNDINGS * rounding * scale, equal_nan=True)
    if not np.all(agrees):
        entry, where = first_off(agrees)
        mine, other = (np.asarray(own)[entry] for own in (leaf, value))
        raise PartsError(
            f"{what} and does not agree with it{where}.",
            f"Expected {other}, got {mine}.",
            fix=f"set it first: tree = partgrad.replace(tree, {tree.path(tie.leaf)!r}, value).",
        )


def first_off(agrees: Any) -> tuple[tuple[int, ...], str]:
    """The first entry at which two values do not agree, and how a message says where that is."""
    entry = tuple(map(int, np.argwhere(~np.atleast_1d(agrees))[0]))[: np.ndim(agrees)]
    return entry, f" at [{','.join(map(str, entry))}]" if entry else ""
