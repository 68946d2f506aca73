"""Paths as other libraries write them, read on a tree: with slashes, dots, braces, commas, as regular expressions.

Nothing here selects anything. It is asked when a path has failed, and what it says was tried on the tree.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.tree_util import FlattenedIndexKey, SequenceKey

from .._marks import Layout, Place
from .._message import at
from .._skeletons import Skeleton, elements_at, fits, name_of, parse
from .._trees import written
from ..errors import SelectionError
from .code import JOINED, code_for, joined, places_at

# Names of the whole, which other libraries write before a path or in place of one.
_WHOLE = frozenset({"params", "parameters", "variables", "model", "module", "net", "self", "state", "all"})
# How a variable calls the array in it.
VALUES = frozenset({"value", "raw_value", "data"})
_SEPARATORS = re.compile(r"[\s./\\\[\]'\"]+")
# Pieces of a regular expression, and what a glob has for them.
_REGULAR = ((r"\\\.", "/"), (r"\(\?:|[()^$]|\\b", ""), (r"(?:\\[dw]|\[0-9\]|\[\^[^]]*\])[+*]?|\.[*+]\??", "*"))
_IS_REGULAR = re.compile(r"\\[.dw]|\.[*+]|^\^|\$$")
_NOT = re.compile(r"\s*(?:!|~(?!/)|-(?!\d)|not\s)\s*")
_BRACES = re.compile(r"\{([^{}]*)\}|\(([^()]*\|[^()]*)\)|\[(\s*-?\d+(?:\s*,\s*-?\d+)+\s*)\]")

# How many braces are multiplied out.
_BRACED = 3


class Reading(NamedTuple):
    """What was meant: a sentence about what was typed, and the code of a selector; empty where none would be right."""

    detail: str
    code: str = ""

    @property
    def fix(self) -> str:
        """What to write."""
        return as_fix(self.code)


def as_fix(code: str) -> str:
    """The remedy that says to write a selector."""
    return "leave `wrt` out, for every floating or complex leaf." if code == "None" else f"write {code}."


def meant_by_text(skeleton: Skeleton, text: str) -> Reading | None:
    """What a text means if partgrad cannot read it as a path, or the tree has no such path."""
    tokens = tokens_of(text)
    if not tokens:
        return Reading("It is the path of a tree that is one leaf.", "None") if not text.strip() else None
    example = f"A path of this tree reads as {_example(skeleton)}."
    if _IS_REGULAR.search(text) and (code := as_glob(skeleton, text)):
        return Reading(example, code)
    negated = _NOT.match(text)
    if negated and negated.end() < len(text):
        rest = text[negated.end() :]
        inner = "" if _NOT.match(rest) else code_of_text(skeleton, rest)
        return Reading("A complement is written by a function.", f"partgrad.exclude({inner})") if inner else None
    alternatives = _alternatives(text)
    if len(alternatives) > 1:
        codes = [code_of_text(skeleton, own) for own in alternatives]
        detail = "A text is one path; several are joined by `|`."
        return Reading(detail, joined(codes)) if all(codes) else None
    if code := _loosely(skeleton, tokens):
        return Reading(example, code)
    if len(tokens) == 1 and tokens[0] in _WHOLE:
        return Reading("A path starts at the tree itself, and nothing in it has that name.", "None")
    return None


def _example(skeleton: Skeleton) -> str:
    return at(skeleton.layout.leaves[0].path) if skeleton.layout.leaves else "`layers[0].weight`"


def code_of_text(skeleton: Skeleton, text: str) -> str:
    text = text.strip()
    if places_at(skeleton, text) or (is_readable(text) and elements_at(skeleton, parse(text))[0]):
        return repr(text)
    found = meant_by_text(skeleton, text)
    return found.code if found else ""


def is_readable(text: str) -> bool:
    """Whether a text is a path or a glob as partgrad writes it."""
    try:
        return bool(parse(text))
    except SelectionError:
        return False


def _alternatives(text: str) -> list[str]:
    """The paths in a text of several: `a, b`, `a|b`, `x.{a,b}`, `layers[0,1].w`."""
    found = _BRACES.search(text)
    if found and len(_BRACES.findall(text)) <= _BRACED:
        inner = re.split(r"[,|]", next(group for group in found.groups() if group is not None))
        own = [f"[{part.strip()}]" for part in inner] if found[3] else [part.strip() for part in inner]
        return [more for part in own for more in _alternatives(text[: found.start()] + part + text[found.end() :])]
    parts = [] if re.search(r"['\"]", text) else [part for part in re.split(r"[,;|+\s]+", text) if part]
    return parts if 1 < len(parts) <= JOINED else [text]


def as_pattern(text: str) -> str:
    """The names and indices of a path in another library's notation, as partgrad writes them."""
    return pattern_of(tokens_of(text))


def tokens_of(text: str) -> list[str]:
    """The names and indices in a path, however they are set apart; the `~` of haiku says nothing."""
    return [token for token in _SEPARATORS.split(text) if token and token != "~"]


def as_glob(skeleton: Skeleton, text: str) -> str:
    """The code for a regular expression that a glob can stand for."""
    for piece, replacement in _REGULAR:
        text = re.sub(piece, replacement, text)
    tokens = ["**" if token == "*" else token for token in tokens_of(text)]
    return _loosely(skeleton, tokens) if tokens and set(tokens) != {"**"} else ""


def _loosely(skeleton: Skeleton, tokens: Sequence[str]) -> str:
    """The code for names and indices that lead to places, from the tree itself or from further down."""
    forms = [tokens, tokens[:-1]] if tokens[-1] in VALUES else [tokens]
    for own in [own for start in (0, 1) for form in forms if (own := form[start:])] + [["**", *tokens]]:
        places = list(led_to(skeleton.layout, own))
        if own[-1] != tokens[-1]:
            # A variable holds one array.
            places = [place for place in places if place.stop - place.start == 1]
        if places:
            return code_for(skeleton, places, [pattern_of(own)])
    return ""


def pattern_of(tokens: Sequence[str]) -> str:
    """These names and indices as a pattern."""
    steps = (
        f"[{own}]" if re.fullmatch(r"-?\d+", own) else f".{own}" if re.fullmatch(r"[\w*]+", own) else f"[{own!r}]"
        for own in tokens
    )
    return "".join(steps).removeprefix(".")


def led_to(layout: Layout, tokens: Sequence[str]) -> Iterator[Place]:
    """The places to which names and indices lead, where a key such as `mlp/~/linear_0` counts as several names.

    Each place is asked once for each name.
    """
    # A place, what is left of the names of its own step, and how many names of the text are used up.
    pending: list[tuple[Place, tuple[str, ...], int]] = [(layout.root, (), 0)]
    met = set(pending)
    while pending:
        place, own, used = pending.pop()
        if used == len(tokens):
            yield place
            continue
        token, further = tokens[used], []
        if token == "**":
            further.append((place, own, used + 1))
        step = 0 if token == "**" else 1
        if own and (token == "**" or fits(token, own[0])):
            further.append((place, own[1:], used + step))
        elif not own:
            children = layout.children(place)
            for child in children:
                for names in _names(child, len(children)):
                    if not names:
                        further.append((child, (), used))
                    elif token == "**" or fits(token, names[0]):
                        further.append((child, names[1:], used + step))
        for state in reversed(further):
            if state not in met:
                met.add(state)
                pending.append(state)


def _names(place: Place, siblings: int) -> list[tuple[str, ...]]:
    """What the step to a place may be called: by an index from either end, or by the names in a key."""
    step = place.step
    if step is None:
        return [()]
    if isinstance(step, SequenceKey | FlattenedIndexKey):
        index = step.idx if isinstance(step, SequenceKey) else step.key
        return [(str(index),), (str(index - siblings),)]
    name = name_of(step)
    return [tuple(tokens_of(name)) or (name,)] if name is not None else [(written(getattr(step, "key", step)),)]
