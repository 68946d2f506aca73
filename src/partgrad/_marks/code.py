"""The generated Python of a dataclass: `__init__`, flatten and unflatten, as straight-line code.

These run for every node of every tree on every call, so they are compiled for the class, as `dataclasses` does.
"""

import dataclasses
import inspect
import linecache
from collections.abc import Callable, Container
from typing import Any, Union

from .cover import hold_part
from .fields import MARKS, ORIGIN, Schema
from .hold import CONCRETE, hold, hold_built
from .instance import WRAPPERS, check_decorated, run_post_init, settle

_SIMPLE = frozenset({int, str, bool, type(None)})
_CACHE_SIZE = 1024


# The default of a parameter whose field has a default factory.
FACTORY = object()


def _compile(cls: type, name: str, lines: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    source, file = "\n    ".join(lines) + "\n", f"<partgrad {cls.__module__}.{cls.__qualname__}.{name} {id(cls):x}>"
    exec(compile(source, file, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    # For debuggers and tracebacks; `linecache.checkcache` keeps entries without a loader and a time.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return function


def compile_init(cls: Any, schema: Schema) -> Callable[..., None]:
    """Generate the `__init__` of a class that `dataclasses.dataclass` has processed, whose signature it repeats.

    It stores the fields, and settles them only where something has to be settled: a wrapper was given, a field is
    static, a class-marked field may hold a tracer, or there is a `__post_init__`. It takes one more keyword: the
    instance that `dataclasses.replace` replaces.
    """
    standard = cls.__init__
    signature = inspect.signature(standard)
    me_parameter, *parameters = (p for p in signature.parameters.values() if p.name != ORIGIN)
    me = "self" if all(p.name != "self" for p in parameters) else "_partgrad_self"
    fields = {f.name: f for f in dataclasses.fields(cls)}
    given = [p.name for p in parameters if p.name in fields]
    made = {n: f.default_factory for n, f in fields.items() if f.default_factory is not dataclasses.MISSING}
    stored = [name for name in fields if name in given or name in made]

    namespace: dict[str, Any] = {"_partgrad_cls": cls, "_partgrad_wrappers": WRAPPERS, "_partgrad_hold": hold_built}
    namespace |= {"_partgrad_factory": FACTORY, "_partgrad_simple": {}, "_partgrad_simple_types": _SIMPLE}
    namespace |= {"_partgrad_settle": settle, "_partgrad_run_post_init": run_post_init}
    namespace["_partgrad_check_decorated"] = check_decorated
    namespace |= {f"_partgrad_make_{name}": factory for name, factory in made.items()}
    namespace |= {f"_partgrad_default_{p.name}": FACTORY if p.name in made else p.default for p in parameters}

    names = {p.name for p in parameters} - set(fields)
    # In order of declaration, from which keyword-only parameters depart in the signature.
    variables = "".join(f"{name}, " for name in cls.__dataclass_fields__ if name in names)
    has_post_init = hasattr(cls, "__post_init__")
    lines = [
        f"def __init__({_header(me, parameters)}):",
        f"_partgrad_d = {me}.__dict__",
        *_storing(stored, given, made),
    ]
    lines += [
        f"if {me}.__class__ is not _partgrad_cls:",
        f"    _partgrad_check_decorated({me})",
        *([f"    _partgrad_run_post_init({me}, None, ({variables}))"] if has_post_init else []),
        "    return",
    ]
    if has_post_init:
        lines.append(f"_partgrad_run_post_init({me}, {ORIGIN}, ({variables}))")
    else:
        lines += _settling(me, schema, set(stored), given)
    init: Any = _compile(cls, "__init__", lines, namespace)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__module__ = cls.__module__
    # A run-time type checker on the decorated class checks the arguments of `__init__`, marks included.
    marked = [p.replace(annotation=_or_mark(p.annotation)) if p.name in fields else p for p in parameters]
    init.__annotations__ = {p.name: p.annotation for p in marked if p.annotation is not p.empty} | {"return": None}
    init.__signature__ = signature.replace(parameters=[me_parameter, *marked])
    cls.__signature__ = signature.replace(parameters=parameters)
    return init


def _or_mark(annotation: Any) -> Any:
    try:
        return Union[(annotation, *WRAPPERS)]  # a string may be annotated, too
    except (TypeError, SyntaxError, IndexError):
        # Not a type; or a text that is no expression, or empty.
        return annotation


def _storing(stored: list[str], given: list[str], made: Container[str]) -> list[str]:
    """The lines that store arguments and the results of default factories."""
    lines = []
    for name in stored:
        if name in made:
            condition = f"if {name} is _partgrad_factory: " if name in given else ""
            lines.append(f"{condition}{name} = _partgrad_make_{name}()")
        lines.append(f"_partgrad_d[{name!r}] = {name}")
    return lines


def _header(me: str, parameters: list[inspect.Parameter]) -> str:
    def write(p: inspect.Parameter) -> str:
        return p.name if p.default is p.empty else f"{p.name}=_partgrad_default_{p.name}"

    positional = [write(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return ", ".join(
        [me, *positional, "*", *(write(p) for p in parameters if p.kind is p.KEYWORD_ONLY), f"{ORIGIN}=None"]
    )


def _settling(me: str, schema: Schema, stored: set[str], given: list[str]) -> list[str]:
    """The lines that settle the stored fields, in the cheapest way that suffices."""
    if stored != set(schema.names) or stored != set(given):
        return [f"_partgrad_settle({me}, {ORIGIN})"]
    wrapped = [f"{name}.__class__ in _partgrad_wrappers" for name in given if name not in schema.static]
    special = " or ".join([f"{ORIGIN} is not None", *wrapped])
    held = [
        f"if {n}.__class__ is not float: _partgrad_d[{n!r}] = _partgrad_hold({n}, {schema.labels[n]!r})"
        for n in schema.nondiff
    ]
    if not schema.static:
        lines = [f"if {special}:", f"    _partgrad_settle({me}, {ORIGIN})"]
        return [*lines, "else:", *(f"    {line}" for line in held)] if held else lines
    # Marks with the same simple static data are one object, which is quick to find and to compare in a treedef.
    key = f"({''.join(f'{n}.__class__, {n}, ' for n in schema.static)})"
    simple = " and ".join(f"{n}.__class__ in _partgrad_simple_types" for n in schema.static)
    return [
        f"if not ({special}) and {simple}:",
        f"    _partgrad_known = _partgrad_simple.get({key})",
        "    if _partgrad_known is not None:",
        f"        _partgrad_d[{MARKS!r}] = _partgrad_known",
        *(f"        {line}" for line in held),
        "        return",
        f"    _partgrad_settle({me}, None)",
        f"    if len(_partgrad_simple) >= {_CACHE_SIZE}: _partgrad_simple.clear()",
        f"    _partgrad_simple[{key}] = _partgrad_d[{MARKS!r}]",
        "else:",
        f"    _partgrad_settle({me}, {ORIGIN})",
    ]


def compile_tree_functions(
    schema: Schema, flatten_irregular: Callable[..., Any], rebuild: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Generate flatten and unflatten for regular instances of a class; others go to the two given functions.

    They are `flatten(instance) -> (children, marks)` and `unflatten(marks, children) -> instance`.
    """
    namespace: dict[str, Any] = {"irregular": flatten_irregular, "rebuild": rebuild, "schema": schema, "hold": hold}
    namespace |= {
        "concrete": CONCRETE,
        "new": object.__new__,
        "cls": schema.cls,
        "default": schema.default,
        "labels": schema.labels,
        "hold_part": hold_part,
    }
    values = "".join(f"x.{name}, " for name in schema.dynamic)
    lines = [
        "def flatten(x):",
        f"marks = x.{MARKS}",
        f"if marks.regular: return ({values}), marks",
        "return irregular(x)",
    ]
    flatten = _compile(schema.cls, "flatten", lines, namespace)
    return flatten, _compile(schema.cls, "unflatten", _unflatten(schema), namespace)


def _unflatten(schema: Schema) -> list[str]:
    """The lines of unflatten: first the class's own marks, then those of an instance, then what a cover stops."""
    targets = "".join(f"d[{name!r}], " for name in schema.dynamic)
    return [
        "def unflatten(marks, children):",
        "if not marks.regular: return rebuild(schema, marks, children)",
        "x = new(cls)",
        "d = x.__dict__",
        *([f"{targets}= children"] if targets else []),
        "if marks is default:",
        *(
            f"    if d[{n!r}].__class__ not in concrete: d[{n!r}] = hold(d[{n!r}], {schema.labels[n]!r})"
            for n in schema.nondiff
        ),
        "    return x",
        f"d[{MARKS!r}] = marks",
        *(["for name, data in marks.static: d[name] = data.constant"] if schema.static else []),
        "for name in marks.closed:",
        "    value = d[name]",
        "    if value.__class__ not in concrete: d[name] = hold(value, labels[name])",
        "for name, cover in marks.covers: d[name] = hold_part(d[name], cover, labels[name])",
        "return x",
    ]
