"""Who wrote a function that is handed to a transform, and which line hands it over."""

import functools
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from .._programs import is_users
from .._trees import held_by

# How deep a function may be wrapped by libraries.
_DEPTH = 6


class Origin(NamedTuple):
    """A function's file, line and qualified name."""

    file: str
    line: int
    name: str


def origin_of(function: Any, is_audited: Callable[[str, str], bool]) -> Origin | None:
    """The function of the project that another one is, or wraps: the outermost; None if there is none."""
    level: list[Any] = [function]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            found = _written(value)
            if found is not None and is_audited(found.file, found.name):
                return found
            below += [held for _, held in held_by(value) if callable(held) and not isinstance(held, type)]
            wrapped = getattr(value, "__wrapped__", None)
            below += [] if wrapped is None else [wrapped]
        level = below
    return None


def _written(value: Any) -> Origin | None:
    if isinstance(value, functools.partial):
        return None
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, types.FunctionType):
        # An object that can be called.
        function = vars(type(value)).get("__call__")
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return written(code, function)


def written(code: types.CodeType, function: Any) -> Origin:
    """Where a function is written: the line of its `def`, as its code begins with its decorators."""
    file, first = code.co_filename, code.co_firstlineno
    body = min((line for *_, line in code.co_lines() if line and line > first), default=first)
    own = (
        line
        for line in range(first, body + 1)
        if linecache.getline(file, line).lstrip().startswith(("def ", "async def "))
    )
    return Origin(file, next(own, first), name_of(function))


def name_of(function: Any) -> str:
    """The qualified name of a function."""
    name = getattr(function, "__qualname__", function.__code__.co_name)
    return f"{getattr(function, '__module__', '')}.{name}".removeprefix(".")


def caller(beyond: int = 0) -> tuple[str, int]:
    """The innermost running line of code that is no library's; some frames may be passed over."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1 + beyond)))
    return next((frame for frame in frames if is_users(frame[0])), ("", 0))
