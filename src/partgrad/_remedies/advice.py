"""What errors say of a path that matches nothing: at which step it fails, and what is there."""

import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from .._marks import Layout, Place, refuse_forgotten
from .._message import at, listed, near_misses
from .._skeletons import (
    MISFITS,
    PatternStep,
    Skeleton,
    code_of,
    elements_at,
    matching_places,
    name_of,
    names_of,
    parse,
    parts_of,
    places_by_step,
)
from ..errors import NoMatchError, SlotError
from .notations import VALUES, as_pattern, is_readable, meant_by_text

# In at most this many places, every path is compared with a misspelled one.
_COMPARED = 2000
_ANY = parse("**")


class _Advice(NamedTuple):
    """What there is, line by line, and what to write."""

    details: list[str]
    fix: str = ""


def not_found(skeleton: Skeleton, pattern: str, steps: Sequence[PatternStep]) -> NoMatchError:
    """The error for a pattern that matches nothing."""
    refuse_forgotten(skeleton.leaves, skeleton.path, [step.text for step in steps if step.kind == "name"])
    details, fix = _instead(skeleton, pattern, steps)
    if not fix:
        near = near_misses(pattern, [place.path for place in _told_apart(skeleton.layout.places)])
        if near:
            details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
        fix = "write a path to one of these: paths start at the tree itself, not with the argument's name."
        fix = f"write {near[0]!r}." if near else fix
    what = f"The path '{pattern}' matches nothing in the tree."
    return NoMatchError(what, *details, f"Leaves: {skeleton.listed_leaves()}.", fix=fix)


def unreadable(skeleton: Skeleton, pattern: str, error: NoMatchError) -> NoMatchError:
    """The error for a text that is no path: the error of the parser, and what the text means on this tree."""
    *parsed, fix = str(error).split("\n  ")
    details, better = _instead(skeleton, pattern, ())
    fix = better or fix.removeprefix("Fix: ")
    return NoMatchError(*parsed, *details, f"Leaves: {skeleton.listed_leaves()}.", fix=fix)


def _instead(skeleton: Skeleton, pattern: str, steps: Sequence[PatternStep]) -> _Advice:
    layout = skeleton.layout
    if not steps:
        meant = meant_by_text(skeleton, pattern)
        if meant is not None:
            return _Advice([meant.detail], meant.fix)
        # The same path in brackets and with dots may be misspelled.
        pattern = as_pattern(pattern)
        steps = parse(pattern) if is_readable(pattern) else ()
        return _instead(skeleton, pattern, steps) if steps else _Advice([])
    by_step = list(itertools.takewhile(bool, places_by_step(layout, steps))) or [[layout.root]]
    reached, count = by_step[-1], len(by_step) - 1
    step = steps[min(count, len(steps) - 1)]
    if steps[-1].text in VALUES and (advice := _written_otherwise(skeleton, pattern)):
        return advice
    ways = (
        _stored_otherwise(skeleton, reached, step),
        _deeper(layout, pattern, steps),
        _further_down(layout, steps, count),
        _after_the_name(skeleton, steps),
        _out_of_range(layout, reached, step),
        _by_name(layout, reached, step),
        _written_otherwise(skeleton, pattern),
        _misspelled(layout, reached, steps, count),
    )
    return next((advice for advice in ways if advice is not None), _Advice([]))


def _stored_otherwise(skeleton: Skeleton, reached: Sequence[Place], step: PatternStep) -> _Advice | None:
    """What the nodes have under this name that is no part of the tree: a property, a method, static data."""
    if step.kind != "name":
        return None
    for cls, place in {type(place.value): place for place in reversed(reached)}.items():
        code = code_of(inspect.getattr_static(cls, step.value, None))
        if code is not None:
            return _computed(skeleton, place, step.value, code)
    holder = next((place for place in reached if step.value in getattr(place.value, "__dict__", {})), None)
    if holder is None:
        return None
    kind, value = type(holder.value).__name__, vars(holder.value)[step.value]
    path = at(f"{holder.path}.{step.value}".removeprefix("."))
    for child in skeleton.layout.children(holder):
        if child.value is value:
            what = f"`{kind}` is registered without names: {path} is `{child.path}`."
            return _Advice([what], fix=f"write {child.path!r}, or a callable.")
    what = f"{path} is static data of `{kind}`, which is never differentiated."
    return _Advice([what], fix="make it a field of its own that is not static.")


def _computed(skeleton: Skeleton, place: Place, name: str, code: types.CodeType) -> _Advice:
    """A property or a method: a callable, if that returns a part of the tree; else what it is computed from."""
    kind = type(place.value).__name__
    what = f"`{name}` is computed by `{kind}`, and a path names what is stored."
    where = f"m{'' if place.path.startswith('[') or not place.path else '.'}{place.path}"
    try:
        parts_of(getattr(place.value, name), skeleton)
    except (*MISFITS, SlotError):
        used = _names_in(code)
        stored = [own for child in skeleton.layout.children(place) if (own := name_of(child.step)) in used]
        named = ", ".join(f"{where}.{own}" for own in stored)
        if not stored:
            return _Advice([what], fix="name the leaves that it is computed from.")
        named = named if len(stored) == 1 else f"({named})"
        return _Advice([what], fix=f"name what it is computed from: wrt=lambda m: {named}.")
    return _Advice([what], fix=f"write a callable: wrt=lambda m: {where}.{name}.")


def _names_in(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _deeper(layout: Layout, pattern: str, steps: Sequence[PatternStep]) -> _Advice | None:
    """The same path, from a node further down."""
    every = f"**.{pattern.removeprefix('.')}" if not pattern.startswith("[") else ""
    return _there(layout, [*_ANY, *steps], "It starts at the tree itself; deeper", every)


def _further_down(layout: Layout, steps: Sequence[PatternStep], count: int) -> _Advice | None:
    """The rest of the path, from a node below the one where it fails."""
    reached = list(steps[:count])
    while reached and reached[-1].text == "*":
        reached.pop()
    if not reached:
        return None
    meant = [*reached, *_ANY, *steps[count:]]
    advice = _there(layout, meant, f"Below `{_joined(reached)}`", _joined(meant))
    # Who writes a wildcard means all of them.
    is_glob = any("*" in step.text for step in steps)
    return advice._replace(fix=f"write {_joined(meant)!r}.") if advice is not None and is_glob else advice


def _there(layout: Layout, steps: Sequence[PatternStep], where: str, every: str) -> _Advice | None:
    """What these steps match."""
    below = matching_places(layout, steps)
    if not below:
        return None
    several = [repr(place.path) for place in below[:3]]
    paths = listed((repr(place.path) for place in below), len(below))
    details = [f"{where} there {'is' if len(below) == 1 else 'are'} {paths}."]
    if len(below) == 1:
        return _Advice(details, fix=f"write {several[0]}.")
    for_all = f", or {every!r} for all of them" if every else ""
    return _Advice(details, fix=f"write {' or '.join(several)}{for_all}.")


def _after_the_name(skeleton: Skeleton, steps: Sequence[PatternStep]) -> _Advice | None:
    """The same path without its first name, which may be that of the argument."""
    rest = steps[1:]
    if not rest or steps[0].kind != "name":
        return None
    if not (matching_places(skeleton.layout, rest) or elements_at(skeleton, rest)[0]):
        return None
    return _Advice([f"It starts at the tree itself, not with `{steps[0].text}`."], fix=f"write {_joined(rest)!r}.")


def _joined(steps: Iterable[PatternStep]) -> str:
    texts = [step.text for step in steps]
    return "".join(text if text.startswith("[") else f".{text}" for text in texts).removeprefix(".")


def _out_of_range(layout: Layout, reached: Sequence[Place], step: PatternStep) -> _Advice | None:
    """How long the sequences are in which there is no such index, or none in such a slice."""
    if step.kind != "key" or type(step.value) not in (int, slice):
        return None
    counts = {place: layout.children(place) for place in reached}
    is_sequence = lambda children: children and isinstance(children[0].step, SequenceKey | FlattenedIndexKey)
    counts = {place: children for place, children in counts.items() if is_sequence(children)}
    if not counts:
        return None
    place, children = next(iter(counts.items()))
    lengths = f"{at(place.path)} has {len(children)} element{'s' * (len(children) != 1)}"
    ends = dict.fromkeys([children[0].path, children[-1].path])
    details = [f"{lengths}.", f"Near names: {listed(f'`{path}`' for path in ends)}."]
    if len(ends) == 1:
        return _Advice(details, fix=f"write {next(iter(ends))!r}, the only element.")
    what = "an index that is there" if type(step.value) is int else "a slice that takes some of them"
    return _Advice(details, fix=f"write {what}, from {' to '.join(map(repr, ends))}.")


def _by_name(layout: Layout, reached: Sequence[Place], step: PatternStep) -> _Advice | None:
    """What the parts are called of which one is asked for by its position, as in a named tuple."""
    if step.kind != "key" or type(step.value) not in (int, slice):
        return None
    for place in reached:
        children = [child for child in layout.children(place) if isinstance(child.step, GetAttrKey)]
        named = children[step.value : step.value + 1 or None] if type(step.value) is int else children[step.value]
        if named:
            what = f"The parts of `{type(place.value).__name__}` have names."
            return _Advice([what], fix=f"write {' or '.join(repr(child.path) for child in named[:3])}.")
    return None


def _written_otherwise(skeleton: Skeleton, pattern: str) -> _Advice | None:
    """What a path means as another library writes it."""
    meant = meant_by_text(skeleton, pattern)
    return None if meant is None else _Advice([meant.detail], meant.fix)


def _misspelled(layout: Layout, reached: Sequence[Place], steps: Sequence[PatternStep], count: int) -> _Advice | None:
    """The same path with the nearest name at the step that fails."""
    step = steps[min(count, len(steps) - 1)]
    if step.kind != "name":
        return None
    names = names_of(child for place in reached for child in _below(layout, place))
    if step.value in names:
        what = f"`{step.value}` is static data, which is never differentiated."
        return _Advice([what], fix="make it a leaf of its own, without `Static`.")
    near = near_misses(step.value, names)
    if not near:
        return None
    fixed = _joined(
        [*steps[:count], *parse(near[0] if near[0].isidentifier() else f"[{near[0]!r}]"), *steps[count + 1 :]]
    )
    there = matching_places(layout, parse(fixed))
    if not there:
        details = [f"Near names: {listed(f'`{name}`' for name in near)}."]
        return _Advice(details, fix=f"write `{near[0]}` for `{step.value}`.")
    details = [f"Near names: {listed((f'`{place.path}`' for place in there), len(there))}."]
    return _Advice(details, fix=f"write {fixed!r}.")


def _below(layout: Layout, place: Place) -> Iterator[Place]:
    """The places one step below; a wrapper takes no step."""
    for child in layout.children(place):
        if child.step is None:
            yield from _below(layout, child)
        else:
            yield child


def _told_apart(places: Sequence[Place]) -> Iterable[Place]:
    """The places that take a step; one per name if there are many, because each path is text to be compared."""
    if len(places) <= _COMPARED:
        return [place for place in places if place.step is not None]
    return {name: place for place in reversed(places) if (name := name_of(place.step))}.values()
