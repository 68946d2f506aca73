"""Patterns: paths and globs as text, read into steps, and the places of a tree that they match."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey, SequenceKey

from .._marks import Layout, Place, refuse_forgotten
from .._message import at, listed, near_misses
from .._trees import written
from ..errors import NoMatchError
from .slots import Pick, Structure

_NAME = re.compile(r"[^\W\d]\w*")
# In at most this many places, every path is compared with a misspelled one.
_COMPARED = 2000


class PatternStep(NamedTuple):
    """One step of a pattern: `kind` is name, key, index, `*`, `[*]` or `**`; `value` is the name, key or index.

    The text is kept for error messages. A key is an `index` where it can only take elements of an array: a slice, or
    several.
    """

    kind: str
    value: Any
    text: str

    def matches(self, step: Any, siblings: int) -> bool:
        """Whether it matches a key entry of a node with this many children."""
        if self.kind == "*":
            return True
        if self.kind == "[*]":
            return not isinstance(step, GetAttrKey)
        if self.kind == "name":
            return _same(step.name if isinstance(step, GetAttrKey) else getattr(step, "key", None), self.value)
        if isinstance(step, SequenceKey):
            return type(self.value) is int and self.value in (step.idx, step.idx - siblings)
        if isinstance(step, GetAttrKey):
            return False
        key = getattr(step, "key", step)
        return written(key) == self.value.text if isinstance(self.value, _Raw) else _same(key, self.value)

    @property
    def is_index(self) -> bool:
        """Whether it can take elements of an array."""
        parts = self.value if type(self.value) is tuple else (self.value,)
        return self.kind == "key" and all(type(part) in (int, slice, type(...)) for part in parts)


class _Raw(NamedTuple):
    """A key that is not a Python literal, such as an enum's, compared as text."""

    text: str


def _same(first: Any, second: Any) -> bool:
    return (type(first) is type(second) or isinstance(first, str)) and bool(first == second)


@functools.lru_cache(256)
def parse(pattern: str) -> tuple[PatternStep, ...]:
    """Parse a path or a glob: steps as Python writes them, `*` for any one step and `**` for any number of them."""
    steps: list[PatternStep] = []
    start = 0
    while start < len(pattern) or not steps:
        if pattern.startswith("[", start):
            end = _closing(pattern, start)
            steps.append(_parse_key(pattern, start, pattern[start + 1 : end].strip()))
            start = end + 1
            continue
        if steps:
            if pattern[start] != ".":
                raise _unreadable(pattern, start, "a dot or a bracket between two steps")
            start += 1
        stars = "**" if pattern.startswith("**", start) else "*" if pattern.startswith("*", start) else ""
        if stars:
            steps.append(PatternStep(stars, None, stars))
            start += len(stars)
        elif name := _NAME.match(pattern, start):
            steps.append(PatternStep("name", name.group(), name.group()))
            start = name.end()
        else:
            raise _unreadable(pattern, start, "a name, `*` or `**`")
    return tuple(steps)


def _unreadable(pattern: str, position: int, expected: str) -> NoMatchError:
    return NoMatchError(
        f"The path {pattern!r} cannot be read at position {position}: {pattern[position:]!r}.",
        f"Expected {expected}.",
        fix="write it as Python would: kernels[0].variance, ['w'].scale; `*` is one step, `**` any number.",
    )


def _closing(pattern: str, start: int) -> int:
    quote, escaped = "", False
    for position in range(start + 1, len(pattern)):
        character = pattern[position]
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character == "]":
            return position
    raise _unreadable(pattern, start, "a closing bracket")


def _parse_key(pattern: str, start: int, text: str) -> PatternStep:
    if not text:
        raise _unreadable(pattern, start, "an index, a key or `*` inside the brackets")
    if text == "*":
        return PatternStep("[*]", None, "[*]")
    try:
        value = _key_value(ast.parse(f"_[{text}]", mode="eval").body)
    except (ValueError, SyntaxError):
        value = _Raw(text)
    return PatternStep("key", value, f"[{text}]")


def _key_value(node: Any) -> Any:
    """The value of a subscript: a literal, a slice, or a tuple of them."""
    inner = node.slice if isinstance(node, ast.Subscript) else node
    if isinstance(inner, ast.Tuple):
        return tuple(map(_key_value, inner.elts))
    if isinstance(inner, ast.Slice):
        bounds = [inner.lower, inner.upper, inner.step]
        return slice(*(None if bound is None else ast.literal_eval(bound) for bound in bounds))
    return ast.literal_eval(inner)


def is_exact(steps: Iterable[PatternStep]) -> bool:
    """Whether a pattern names a single place, that is, has no wildcard."""
    return not any("*" in step.kind for step in steps)


def matching_places(layout: Layout, steps: Sequence[PatternStep]) -> list[Place]:
    """The places that a pattern matches; for a wrapper, what it holds."""
    found = []
    # Each place comes with the positions in the pattern that its path may have reached.
    pending = [(layout.root, _skipping(steps, 0))]
    while pending:
        place, positions = pending.pop()
        if len(steps) in positions and not place.is_wrapper:
            found.append(place)
        children = layout.children(place)
        for child in reversed(children):
            reached = positions if child.step is None else _advanced(steps, positions, child.step, len(children))
            if reached:
                pending.append((child, reached))
    return found


def _advanced(steps: Sequence[PatternStep], positions: Iterable[int], step: Any, siblings: int) -> frozenset[int]:
    reached: frozenset[int] = frozenset()
    for position in positions:
        if position == len(steps):
            continue
        if steps[position].kind == "**":
            reached |= _skipping(steps, position)
        elif steps[position].matches(step, siblings):
            reached |= _skipping(steps, position + 1)
    return reached


def _skipping(steps: Sequence[PatternStep], position: int) -> frozenset[int]:
    """A position, and those after a `**`, which may match no step at all."""
    first = position
    while position < len(steps) and steps[position].kind == "**":
        position += 1
    return frozenset(range(first, position + 1))


def elements_at(structure: Structure, steps: Sequence[PatternStep]) -> list[Pick]:
    """The elements that the last steps of a pattern take from the arrays that the others match."""
    for count in range(1, len(steps) + 1):
        if not steps[-count].is_index:
            return []
        places = [place for place in matching_places(structure.layout, steps[:-count]) if place.is_leaf]
        arrays = [place for place in places if getattr(structure.leaves[place.start], "shape", None)]
        if arrays:
            return [_pick(structure, place, steps[-count:]) for place in arrays]
    return []


def _pick(structure: Structure, place: Place, steps: Sequence[PatternStep]) -> Pick:
    slot: Any = structure.slots[place.start]
    for step in steps:
        slot = slot[step.value]
    return Pick(place, slot.elements)


def not_found(structure: Structure, pattern: str, steps: Sequence[PatternStep]) -> NoMatchError:
    """The error for a pattern that matches nothing: at which step it fails, and what is there instead."""
    refuse_forgotten(structure.leaves, structure.path, [step.text for step in steps if step.kind == "name"])
    details, fix = _instead(structure.layout, pattern, steps)
    if not fix:
        near = near_misses(pattern, [place.path for place in _told_apart(structure.layout.places)])
        if near:
            details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
        fix = "write a path to one of these: paths start at the tree itself, not with the argument's name."
        fix = f"write {near[0]!r}." if near else fix
    what = f"The path '{pattern}' matches nothing in the tree."
    return NoMatchError(what, *details, f"Leaves: {structure.listed_leaves()}.", fix=fix)


def _instead(layout: Layout, pattern: str, steps: Sequence[PatternStep]) -> tuple[list[str], str]:
    """What is at the first step of a pattern that leads nowhere, and how to write the pattern."""
    reached, count = [layout.root], 0
    while count < len(steps) and (further := matching_places(layout, steps[: count + 1])):
        reached, count = further, count + 1
    step = steps[min(count, len(steps) - 1)]
    for place in reached:
        if step.kind == "name" and _has_static(place.value, step.value):
            path = f"{place.path}.{step.value}".removeprefix(".")
            value = vars(place.value)[step.value]
            for child in layout.children(place):
                if child.value is value:
                    what = f"`{type(place.value).__name__}` is registered without names: {at(path)} is `{child.path}`."
                    return [what], f"write {child.path!r}, or a callable."
            what = f"{at(path)} is static data of `{type(place.value).__name__}`, which is never differentiated."
            return [what], "make it a field of its own that is not static."
    below = matching_places(layout, [PatternStep("**", None, "**"), *steps])
    if below:
        several = [repr(place.path) for place in below[:3]]
        every = f", or '**.{pattern}' for all of them" if not pattern.startswith("[") else ""
        known = listed((repr(place.path) for place in below), len(below))
        details = [f"It starts at the tree itself; deeper there {'is' if len(below) == 1 else 'are'} {known}."]
        return details, f"write {several[0]}." if len(below) == 1 else f"write {' or '.join(several)}{every}."
    if step.kind == "key" and type(step.value) is slice and not all(place.is_leaf for place in reached):
        return ["A slice in a path takes elements of an array."], "write a callable, as wrt=lambda m: m.layers[1:]."
    if step.kind != "name":
        return [], ""
    names = names_of(child for place in reached for child in _below(layout, place))
    if step.value in names:
        what = f"`{step.value}` is static data, which is never differentiated."
        return [what], "make it a leaf of its own, without `Static`."
    near = near_misses(step.value, names)
    if not near:
        return [], ""
    texts = [other.text for other in steps]
    texts[count] = near[0]
    fixed = "".join(text if text.startswith("[") else f".{text}" for text in texts).removeprefix(".")
    there = matching_places(layout, parse(fixed))
    if not there:
        return [f"Near names: {listed(f'`{name}`' for name in near)}."], f"write `{near[0]}` for `{step.value}`."
    return [f"Near names: {listed((f'`{place.path}`' for place in there), len(there))}."], f"write {fixed!r}."


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
    return {name: place for place in reversed(places) if (name := _name(place.step))}.values()


def names_of(places: Iterable[Place]) -> dict[str, None]:
    """The distinct names of places: attributes, and keys that are strings."""
    return {name: None for place in places if (name := _name(place.step))}


def _name(step: Any) -> str | None:
    if isinstance(step, GetAttrKey):
        return str(step.name)
    name = getattr(step, "key", None)
    return name if isinstance(name, str) else None


def _has_static(node: Any, name: str) -> bool:
    """Whether a node keeps an attribute that is not one of its children."""
    return name in getattr(node, "__dict__", {})
