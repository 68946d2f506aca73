"""Patterns: paths and globs as text, read into steps, and the places of a tree that they match."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from .._marks import Layout, Place
from .._trees import written
from ..errors import NoMatchError
from .plan import Pick
from .skeletons import Skeleton

# A name, a part of one with `*` in it, or a star alone.
_WORD = re.compile(r"(?:[^\W\d]|\*)(?:\w|\*)*")
_FLAT_INDEX = re.compile(r"<flat index (\d+)>")


class PatternStep(NamedTuple):
    """One step of a pattern.

    Attributes:
        kind: `name`, `key` (or an index, or a slice), `glob` (a part of a name), `*`, `[*]` or `**`.
        value: The name, the key or the index.
        text: As it is written.
        matches: From a key entry and the number of its siblings to whether the step matches it.
    """

    kind: str
    value: Any
    text: str
    matches: Callable[[Any, int], bool]

    @property
    def is_wild(self) -> bool:
        """Whether it may match several places; a slice of an array is another matter."""
        return self.kind in ("glob", "*", "[*]", "**") or type(self.value) is slice

    @property
    def is_index(self) -> bool:
        """Whether it can take elements of an array."""
        parts = self.value if type(self.value) is tuple else (self.value,)
        return self.kind == "key" and all(type(part) in (int, slice, type(...)) for part in parts)


class _Raw(NamedTuple):
    """A key that is not a Python literal, such as an enum's, compared as text."""

    text: str


def name_of(step: Any) -> str | None:
    """The name that a key entry has: an attribute, or a key that is a string."""
    if isinstance(step, GetAttrKey):
        return str(step.name)
    name = getattr(step, "key", None)
    return name if isinstance(name, str) else None


def _of_name(name: str) -> PatternStep:
    if name in ("*", "**"):
        return PatternStep(name, None, name, lambda step, siblings: True)
    if "*" in name:
        return PatternStep("glob", name, name, lambda step, _: (own := name_of(step)) is not None and fits(name, own))
    return PatternStep("name", name, name, lambda step, _: name_of(step) == name)


def fits(glob: str, name: str) -> bool:
    """Whether a glob matches a name.

    Each part is taken where it first occurs, which leaves most to the next. A regular expression would try all places.
    """
    first, *inner = glob.split("*")
    if not inner:
        return glob == name
    last = inner.pop()
    start, stop = len(first), len(name) - len(last)
    if start > stop or not name.startswith(first) or not name.endswith(last):
        return False
    for part in inner:
        found = name.find(part, start, stop)
        if found < 0:
            return False
        start = found + len(part)
    return True


def _of_key(text: str) -> PatternStep:
    if text == "*":
        return PatternStep("[*]", None, "[*]", lambda step, _: not isinstance(step, GetAttrKey))
    flat = _FLAT_INDEX.fullmatch(text)
    try:
        value = int(flat[1]) if flat else _key_value(ast.parse(f"_[{text}]", mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # Python's own parser gives up on what is nested too deeply.
        value = _Raw(text)
    return PatternStep("key", value, f"[{text}]", _key_test(value))


def _key_test(value: Any) -> Callable[[Any, int], bool]:
    """Whether a key entry has this key; in a sequence, this index or one in this slice."""
    kind = type(value)

    def matches(step: Any, siblings: int) -> bool:
        if isinstance(step, GetAttrKey):
            return False
        if isinstance(step, SequenceKey | FlattenedIndexKey) and kind in (int, slice):
            index = step.idx if isinstance(step, SequenceKey) else step.key
            return index in ((value, value + siblings) if kind is int else range(*value.indices(siblings)))
        if isinstance(step, SequenceKey):
            return False
        key = getattr(step, "key", step)
        if isinstance(value, _Raw):
            return written(key) == value.text
        return (type(key) is kind or isinstance(key, str)) and bool(key == value)

    return matches


def _key_value(node: Any) -> Any:
    """The value of a subscript: a literal, a slice, or a tuple of them."""
    inner = node.slice if isinstance(node, ast.Subscript) else node
    if isinstance(inner, ast.Tuple):
        return tuple(map(_key_value, inner.elts))
    if isinstance(inner, ast.Slice):
        bounds = [None if own is None else ast.literal_eval(own) for own in (inner.lower, inner.upper, inner.step)]
        if not all(own is None or type(own) is int for own in bounds) or bounds[2] == 0:
            raise ValueError("the bounds of a slice are integers, and its step is not 0")
        return slice(*bounds)
    return ast.literal_eval(inner)


@functools.lru_cache(256)
def parse(pattern: str) -> tuple[PatternStep, ...]:
    """Parse a path or a glob: steps as Python writes them, `*` for any one step and `**` for any number of them.

    A dot before the first step is allowed, as `jax.tree_util.keystr` writes it.
    """
    steps: list[PatternStep] = []
    start = 0
    while start < len(pattern) or not steps:
        if pattern.startswith("[", start):
            end = _closing(pattern, start)
            text = pattern[start + 1 : end].strip()
            if not text:
                raise _unreadable(pattern, start, "an index, a key or `*` inside the brackets")
            steps.append(_of_key(text))
            start = end + 1
            continue
        if pattern.startswith(".", start):
            start += 1
        elif steps:
            raise _unreadable(pattern, start, "a dot or a bracket between two steps")
        word = _WORD.match(pattern, start)
        if word is None or ("**" in word[0] and word[0] != "**"):
            raise _unreadable(pattern, start, "a name, `*` or `**`")
        steps.append(_of_name(word[0]))
        start = word.end()
    return tuple(steps)


def _unreadable(pattern: str, position: int, expected: str) -> NoMatchError:
    fix = "write it as Python would: kernels[0].variance, ['w'].scale; `*` is one step, `**` any number."
    return NoMatchError(
        f"The path {pattern!r} cannot be read at position {position}: {pattern[position:]!r}.",
        f"Expected {expected}.",
        fix=fix,
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


def matching_places(layout: Layout, steps: Sequence[PatternStep], *, of_jax: bool = False) -> list[Place]:
    """The places that a pattern matches, in the order of the tree; for a wrapper, what it holds.

    In a path `of_jax`, a wrapper takes a step.
    """
    *_, places = places_by_step(layout, steps, of_jax=of_jax)
    places = list(dict.fromkeys(_inside(layout, places))) if of_jax else places
    return sorted(places, key=lambda place: (place.start, place.depth)) if len(places) > 1 else places


def places_by_step(layout: Layout, steps: Sequence[PatternStep], *, of_jax: bool = False) -> Iterator[list[Place]]:
    """The places that the first steps of a pattern match: none of them, one of them, two of them ..."""
    unwrapped = (lambda _, places: places) if of_jax else _inside
    places = unwrapped(layout, [layout.root])
    yield places
    for step in steps:
        if step.kind == "**":
            places = _all_below(layout, places, of_jax)
        else:
            found: list[Place] = []
            for place in places:
                children, matches = layout.children(place), step.matches
                siblings = len(children)
                found += [child for child in children if matches(child.key, siblings)]
            places = unwrapped(layout, found)
        yield places


def _all_below(layout: Layout, places: list[Place], wrappers: bool) -> list[Place]:
    """The places and all below them, each once: what is below a place that was met was met too."""
    met: dict[Place, None] = {}
    pending = places[::-1]
    while pending:
        place = pending.pop()
        if place not in met:
            met[place] = None
            pending += reversed(layout.children(place))
    return [place for place in met if wrappers or not place.is_wrapper]


def _inside(layout: Layout, places: list[Place]) -> list[Place]:
    """What is in the wrappers at some places; nothing for one that holds nothing."""
    return [inside for place in places if not (inside := layout.inside(place)).is_wrapper]


def elements_at(skeleton: Skeleton, steps: Sequence[PatternStep]) -> tuple[list[Pick], Sequence[PatternStep]]:
    """The elements that the last steps of a pattern take from the arrays that the others match; and the others."""
    reached = list(places_by_step(skeleton.layout, steps))
    for count in range(len(steps) - 1, -1, -1):
        if not steps[count].is_index:
            break
        places = [place for place in reached[count] if place.is_leaf]
        arrays = [place for place in places if getattr(skeleton.leaves[place.start], "shape", None)]
        if arrays:
            arrays.sort(key=lambda place: place.start)
            return [_pick(skeleton, place, steps[count:]) for place in arrays], steps[:count]
    return [], steps


def _pick(skeleton: Skeleton, place: Place, steps: Sequence[PatternStep]) -> Pick:
    slot: Any = skeleton.slots[place.start]
    for step in steps:
        slot = slot[step.value]
    return skeleton.pick(slot)


def names_of(places: Iterable[Place]) -> dict[str, None]:
    """The distinct names of places: attributes, and keys that are strings."""
    return {name: None for place in places if (name := name_of(place.step))}
