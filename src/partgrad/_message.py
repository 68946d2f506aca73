"""The form of error messages."""

import difflib
import itertools
import re
from collections.abc import Iterable

_LISTED = 10
# How many names are compared with a misspelled one and, if there are more, by how much they may be longer.
_COMPARED = 2000
_LONGER = 6
_STRING_KEY = re.compile(r"\['(\w+)'\]")


def word(what: str, *details: str, fix: str = "") -> str:
    """A message: what went wrong, then where, what was expected and found, and the remedy if it has one."""
    return "\n  ".join([what, *details, *([f"Fix: {fix}"] if fix else [])])


def at(path: str) -> str:
    """A path, for a message."""
    return f"`{path}`" if path else "the tree itself"


def listed(items: Iterable[str], count: int | None = None) -> str:
    """The first items, and how many more there are; if the count is given, only the shown items are read."""
    if count is None:
        items = list(items)
        count = len(items)
    shown = ", ".join(itertools.islice(items, _LISTED))
    return shown if count <= _LISTED else f"{shown}, ... {count - _LISTED} more"


def near_misses(name: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that a name may be a misspelling of."""
    candidates = list(candidates)
    if len(candidates) > _COMPARED:
        # A comparison takes some 20 us; a misspelling seldom changes both ends, or the length by much.
        start, end, length = name[:3], name[-3:], len(name)
        ends = (c for c in candidates if c.startswith(start) or c.endswith(end))
        candidates = list(itertools.islice((c for c in ends if abs(len(c) - length) <= _LONGER), _COMPARED))
    # `['a'].b` and `a.b` are one path, so they are compared in one spelling.
    spelled = {_STRING_KEY.sub(r".\1", candidate).removeprefix("."): candidate for candidate in candidates}
    found = difflib.get_close_matches(_STRING_KEY.sub(r".\1", name), list(spelled), n=4, cutoff=0.5)
    return [spelled[near] for near in found]
