"""Key paths as text: write one, parse a pattern, match its steps.

A path reads as Python does, starting at the tree itself: `kernels[0].variance`, `['w'].scale`.
"""

import ast
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from .. import _words as words

_NAME = re.compile(r"[^\W\d]\w*")


def write_step(step: Any) -> str:
    """Write one key entry: `.name`, `['key']` or `[0]`."""
    if isinstance(step, GetAttrKey):
        return f".{step.name}"
    if isinstance(step, SequenceKey):
        return f"[{step.idx}]"
    if isinstance(step, DictKey | FlattenedIndexKey):
        return f"[{step.key!r}]"
    return str(step)


def write(steps: Iterable[Any]) -> str:
    """Write a key path; the path of the tree itself is empty."""
    return "".join(map(write_step, steps)).removeprefix(".")


class Step(NamedTuple):
    """One step of a pattern: `kind` is name, key, `*`, `[*]` or `**`; `value` is the name or the key."""

    kind: str
    value: Any = None

    def matches(self, step: Any, siblings: int) -> bool:
        """Whether it matches a key entry of a node with so many children."""
        if self.kind == "*":
            return True
        if self.kind == "[*]":
            return not isinstance(step, GetAttrKey)
        if self.kind == "name":
            return self.value == (step.name if isinstance(step, GetAttrKey) else getattr(step, "key", None))
        if isinstance(step, SequenceKey):
            return type(self.value) is int and self.value in (step.idx, step.idx - siblings)
        if isinstance(step, GetAttrKey):
            return False
        key = getattr(step, "key", step)
        return repr(key) == self.value.text if isinstance(self.value, _Raw) else _same(key, self.value)


class _Raw(NamedTuple):
    """A key that is not a Python literal, as an enum's, compared as text."""

    text: str


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)


def parse(pattern: str) -> tuple[Step, ...]:
    """Parse a path or a glob.

    Args:
        pattern: Steps as Python writes them, `*` for any one step and `**` for any number of them.

    Returns:
        The steps. A pattern is exact when no step is a `*`, a `[*]` or a `**`.

    Raises:
        NoMatchError: Where the pattern cannot be read.
    """
    steps: list[Step] = []
    at = 0
    while at < len(pattern) or not steps:
        if pattern.startswith("[", at):
            end = _closing(pattern, at)
            steps.append(_parse_key(pattern, at, pattern[at + 1 : end].strip()))
            at = end + 1
            continue
        if steps:
            if pattern[at] != ".":
                raise words.path_syntax(pattern, at, "a dot or a bracket between two steps")
            at += 1
        if pattern.startswith("**", at):
            steps.append(Step("**"))
            at += 2
        elif pattern.startswith("*", at):
            steps.append(Step("*"))
            at += 1
        elif name := _NAME.match(pattern, at):
            steps.append(Step("name", name.group()))
            at = name.end()
        else:
            raise words.path_syntax(pattern, at, "a name, `*` or `**`")
    return tuple(steps)


def _closing(pattern: str, start: int) -> int:
    quote, escaped = "", False
    for at in range(start + 1, len(pattern)):
        character = pattern[at]
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character == "]":
            return at
    raise words.path_syntax(pattern, start, "a closing bracket")


def _parse_key(pattern: str, at: int, text: str) -> Step:
    if not text:
        raise words.path_syntax(pattern, at, "an index, a key or `*` inside the brackets")
    if text == "*":
        return Step("[*]")
    try:
        return Step("key", ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return Step("key", _Raw(text))


def is_exact(steps: Iterable[Step]) -> bool:
    """Whether a pattern names one place: it has no wildcard."""
    return not any("*" in step.kind for step in steps)
