"""Code for remedies: a selector for some leaves of a tree, tried on it, and how objects are spelled."""

import ast
import builtins
import functools
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._marks import Place
from .._skeletons import Skeleton, matching_places, name_of, parse
from .._trees import is_differentiable
from ..errors import NoMatchError

# How many parts a remedy joins by `|` at most.
JOINED = 12
_PACKAGE = __name__.partition(".")[0]


def code_for(skeleton: Skeleton, places: Sequence[Place], tries: Iterable[str] = (), *, free: bool = False) -> str:
    """The code of a selector that selects the leaves in these places and no others; empty if it would be long.

    Args:
        skeleton: The skeleton of a tree.
        places: Places in it.
        tries: Patterns to try first.
        free: Whether only leaves count that are differentiable and that no mark holds.
    """
    leaves = skeleton.layout.leaves
    counted = [
        i for i, leaf in enumerate(skeleton.leaves) if not free or (is_differentiable(leaf) and not leaves[i].is_held)
    ]
    inside = lambda some: {i for place in some for i in place.numbers}
    wanted = inside(places).intersection(counted)
    if not wanted:
        return ""
    if free and len(wanted) == len(counted):
        return "None"
    for pattern in dict.fromkeys([*tries, *_patterns(places), *_patterns([leaves[i] for i in sorted(wanted)])]):
        found = places_at(skeleton, pattern)
        if found and inside(found).intersection(counted) == wanted:
            return repr(pattern)
    if len(places) <= JOINED:
        return joined(repr(place.path) for place in places)
    paths = [leaf.path for leaf in leaves]
    for method, text in (
        ("startswith", _common(paths, wanted)),
        ("endswith", _common([p[::-1] for p in paths], wanted)[::-1]),
    ):
        if text and {i for i in counted if getattr(paths[i], method)(text)} == wanted:
            return f"partgrad.matching(lambda path, leaf: path.{method}({text!r}))"
    return ""


def joined(codes: Iterable[str]) -> str:
    """The code of the union of selectors."""
    return " | ".join(f"partgrad.path({code})" if code[0] in "'\"" else code for code in codes)


def places_at(skeleton: Skeleton, pattern: str) -> list[Place]:
    """The places that a pattern matches; none if it cannot be read."""
    try:
        return matching_places(skeleton.layout, parse(pattern))
    except NoMatchError:
        return []


def _patterns(places: Sequence[Place]) -> Iterator[str]:
    """Patterns that may match these places and no others."""
    if len(places) == 1:
        yield places[0].path
        return
    names = {name_of(place.step) for place in places}
    name = names.pop() if len(names) == 1 else None
    if name and name.isidentifier():
        yield f"**.{name}"
    # The same steps with a star at those that differ.
    steps = [place.steps for place in places]
    if len(set(map(len, steps))) == 1:
        columns = list(zip(*steps, strict=True))
        written = (".*" if len({*map(str, column)}) > 1 else _written(column[0]) for column in columns)
        yield "".join(written).removeprefix(".")


def _written(step: Any) -> str:
    name = name_of(step)
    if name is not None and name.isidentifier():
        return f".{name}"
    return f"[{getattr(step, 'idx', getattr(step, 'key', step))!r}]"


def _common(texts: Sequence[str], numbers: Iterable[int]) -> str:
    """How all of some texts begin."""
    chosen = [texts[i] for i in numbers]
    least, greatest = min(chosen), max(chosen)
    return "".join(
        a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(least, greatest, strict=False))
    )


def spelled(value: Any) -> str | None:
    """How the code that called partgrad spells an object, such as `eqx.nn.Linear`; None if it has no name there."""
    # That of `jax.Array` has dots.
    name = str(getattr(value, "__name__", "")).rpartition(".")[2]
    frame: types.FrameType | None = sys._getframe(1)
    proper: list[str] = []
    others: list[str] = []
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE:
            for own, held in {**frame.f_globals, **frame.f_locals}.items():
                if not own.isidentifier():
                    continue
                if held is value:
                    (proper if own == name else others).append(own)
                elif isinstance(held, types.ModuleType) and (inside := _inside_module(held, name, value)):
                    proper.append(f"{own}.{inside}")
        frame = frame.f_back
    if getattr(builtins, name, None) is value:
        proper.append(name)
    # Its own name says more than that of a parameter which it was given for.
    return min(proper, key=len) if proper else others[0] if others else None


def _inside_module(module: types.ModuleType, name: str, value: Any) -> str | None:
    if vars(module).get(name) is value:
        return name
    below = ((own, held) for own, held in vars(module).items() if isinstance(held, types.ModuleType))
    return next((f"{own}.{name}" for own, held in below if own[0] != "_" and vars(held).get(name) is value), None)


def code_of_value(value: Any) -> str | None:
    """The code of a function, a class or a filter object; None if it cannot be told."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return source_of(value) or spelled(value)
    # As a dataclass writes itself, with its classes as they are spelled here.
    text, home = repr(value), vars(sys.modules.get(type(value).__module__, builtins))
    names = {name: spelled(home.get(name)) for name in re.findall(r"\b[A-Z]\w*(?=\()", text)}
    if "<" in text or type(value).__name__ not in names or None in names.values():
        return spelled(value)
    return re.sub(r"\b[A-Z]\w*(?=\()", lambda found: str(names[found[0]]), text)


def source_of(function: Any) -> str | None:
    """The source of a lambda; None if there is none, or more than one on its line that it may be."""
    node = lambda_of(function)
    return None if node is None else ast.unparse(node)


def lambda_of(function: Any) -> ast.Lambda | None:
    """The syntax of a lambda, as its file has it."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    lines = linecache.getlines(code.co_filename, getattr(function, "__globals__", None))
    starts = {(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None}
    nodes = [node for node in _lambdas("".join(lines)) if node.lineno == code.co_firstlineno]
    fitting = [node for node in nodes if (node.body.lineno, node.body.col_offset) in starts] or nodes
    return fitting[0] if len({ast.unparse(node) for node in fitting}) == 1 else None


@functools.lru_cache(4)
def _lambdas(source: str) -> list[ast.Lambda]:
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda)]
    except SyntaxError:
        # A cell of a notebook may hold a magic command.
        return []


def asked(function: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """The code of a function of `path` and `leaf` that calls this one with some of them."""
    node = lambda_of(function)
    given = node.args if node is not None else None
    if node is None or given is None or given.defaults or len(given.args) != len(arguments):
        name = spelled(function)
        return None if name is None else f"lambda path, leaf: {name}({', '.join(arguments)})"
    names = dict(zip(arguments, (argument.arg for argument in given.args), strict=True))
    spare = itertools.chain(["path", "leaf"], ["_", "__"])
    free = (name for name in spare if name not in names.values())
    return f"lambda {', '.join(names.get(own) or next(free) for own in ('path', 'leaf'))}: {ast.unparse(node.body)}"
