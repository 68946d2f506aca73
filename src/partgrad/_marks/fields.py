"""The declarations of a dataclass, and the marks of its instances.

An instance stores plain values in its `__dict__`. Its marks (which fields are NonDiff, which are static data) are one
`Marks` object: the class's default, or the instance's own under `MARKS` in its `__dict__`. The marks are the auxiliary
data of the treedef, so whatever keeps the structure keeps them.
"""

import contextlib
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Collection
from typing import Any

from jax.tree_util import GetAttrKey

from .._trees import compared_exactly
from ..errors import DataclassError
from .cover import Cover, hold_part
from .static import StaticData

MARKS = "_partgrad_marks"
# The attribute under which an instance returns itself, so that `dataclasses.replace` passes it to `__init__`.
ORIGIN = "_partgrad_origin"
SCHEMA = "_partgrad_schema"
_INTERNED = 1024
# The keys in a field's metadata that say whether it is held or static.
_MARKING = frozenset({"nondiff", "static", "pytree_node"})


@compared_exactly
class Marks:
    """The marks of one instance: the names of the fields that are held, and of those that are static.

    Attributes:
        regular: Whether the static fields are the class's own, so that the children are exactly the class's other
            fields.
        covers: The held fields that are held in part, or that a transform has opened, with their covers.
        closed: The fields that are simply held.
    """

    __slots__ = ("closed", "covers", "nondiff", "regular", "static")

    def __init__(
        self,
        nondiff: tuple[str, ...],
        static: tuple[tuple[str, StaticData], ...],
        regular: bool,
        covers: tuple[tuple[str, Cover], ...] = (),
    ):
        self.nondiff = nondiff
        self.static = static
        self.regular = regular
        self.covers = covers
        self.closed = tuple(name for name in nondiff if self.cover(name) is None)

    def cover(self, name: str) -> Cover | None:
        """The cover of a held field; None if all of it is held."""
        return next((cover for own, cover in self.covers if own == name), None) if self.covers else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        return self.nondiff, self.static, self.covers

    def __repr__(self) -> str:
        covers = {name: f"({cover!r})" for name, cover in self.covers}
        words = [f"{name}=NonDiff{covers.get(name, '')}" for name in self.nondiff]
        return ", ".join(words + [f"{name}={data!r}" for name, data in self.static])

    def __reduce__(self) -> Any:
        return Marks, (self.nondiff, self.static, self.regular, self.covers)

    def __deepcopy__(self, memo: Any) -> "Marks":
        return self


@functools.lru_cache(_INTERNED)
def _interned(nondiff: tuple[str, ...], covers: tuple[tuple[str, Cover], ...]) -> Marks:
    return Marks(nondiff, (), True, covers)


class Schema:
    """The declarations of a class: its fields, which of them are marked, and its default marks."""

    def __init__(self, cls: type):
        fields = dataclasses.fields(cls)
        for f in fields:
            _inherit(cls, f)
            _refuse_options(cls, f)
        self.cls = cls
        self.names = tuple(f.name for f in fields)
        self.labels = {name: f"{cls.__name__}.{name}" for name in self.names}
        self.hidden = frozenset(f.name for f in fields if not f.repr)
        self.static = tuple(f.name for f in fields if _is_static(f))
        self.nondiff = tuple(f.name for f in fields if f.metadata.get("nondiff", False))
        # Those of which an instance holds arrays, unless `Diff` or `thaw` say otherwise.
        self.declared = self.nondiff + self.static
        self.dynamic = tuple(n for n in self.names if n not in self.static)
        self.keys = tuple(map(GetAttrKey, self.dynamic))
        for name in self.nondiff:
            if name in self.static:
                raise static_and_nondiff(f"The field `{cls.__name__}.{name}`")
        self.default = Marks(self.nondiff, (), not self.static)

    def marks(
        self,
        nondiff: tuple[str, ...],
        static: tuple[tuple[str, StaticData], ...] = (),
        covers: tuple[tuple[str, Cover], ...] = (),
    ) -> Marks:
        """The marks of an instance; one object per set of names, which makes treedefs quick to compare."""
        if static or self.static:
            return Marks(nondiff, static, tuple(name for name, _ in static) == self.static, covers)
        return self.default if nondiff == self.nondiff and not covers else _interned(nondiff, covers)


def static_and_nondiff(owner: str) -> DataclassError:
    """The error for a field that is declared both static and nondiff."""
    return DataclassError(
        f"{owner} sets both static=True and nondiff=True.",
        "Static data is in the structure, a nondiff value is a traced leaf; static data is never differentiated.",
        fix="keep nondiff=True for numbers, static=True for what the compiler may specialise on.",
    )


def _inherit(cls: type, f: "dataclasses.Field[Any]") -> None:
    """Give a field that a subclass declares again, with only another default, its mark from the base class."""
    if not _MARKING.isdisjoint(f.metadata):
        return
    bases = (base.__dict__.get("__dataclass_fields__", {}).get(f.name) for base in cls.__mro__[1:])
    inherited: Any = next((own.metadata for own in bases if own is not None), {})
    f.metadata = types.MappingProxyType({**f.metadata, **{k: inherited[k] for k in _MARKING & inherited.keys()}})


def refuse_idle_marks(cls: type, marks: Collection[Any]) -> None:
    """Raise for a mark that could have no effect: on what is not a field, or as an annotation."""
    names = [f.name for f in dataclasses.fields(cls)]
    for f in cls.__dict__["__dataclass_fields__"].values():
        annotation = f.type
        # Most names in the text of an annotation need not be known yet, and take a while to look up.
        if isinstance(annotation, str) and any(own.__name__ in annotation for own in marks):
            with contextlib.suppress(Exception):
                annotation = eval(annotation, vars(sys.modules[cls.__module__]))
        mark = _mark_of(annotation, marks)
        if f.name not in names and not _MARKING.isdisjoint(name for name, is_set in f.metadata.items() if is_set):
            raise DataclassError(
                f"`{cls.__name__}.{f.name}` is marked, but it is a ClassVar or an InitVar.",
                "Expected a field: neither is part of an instance, so nothing would be held or static.",
                fix=f"make it a field, `{f.name}: ... = partgrad.field(...)`, or leave the mark out.",
            )
        if mark is not None:
            word = {"NonDiff": "nondiff=True", "Static": "static=True"}.get(mark.__name__, "nondiff=False")
            raise DataclassError(
                f"The type of the field `{cls.__name__}.{f.name}` is `{mark.__name__}`, and a type marks nothing.",
                "A field stores the plain value.",
                fix=f"annotate that, and mark the field: `{f.name}: float = partgrad.field({word})`.",
            )


def _mark_of(annotation: Any, marks: Collection[Any]) -> Any:
    """The mark that is a type, or that `Annotated` puts on one; None if there is none."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *extras = typing.get_args(annotation)
        found = (_mark_of(extra, marks) for extra in (inner, *(e if isinstance(e, type) else type(e) for e in extras)))
        return next((mark for mark in found if mark is not None), None)
    mark = typing.get_origin(annotation) or annotation
    return next((own for own in marks if mark is own), None)


def _refuse_options(cls: type, f: "dataclasses.Field[Any]") -> None:
    """Raise for a field option that would have no effect, or a wrong one."""
    if "converter" in f.metadata:
        raise DataclassError(
            f"The field `{cls.__name__}.{f.name}` has a converter, which a partgrad.dataclass would not call.",
            "Expected a field of partgrad.field or dataclasses.field.",
            fix=f"convert in __post_init__, which may assign: self.{f.name} = convert(self.{f.name}).",
        )
    options = {"compare=False": not f.compare, f"hash={f.hash}": f.hash is not None}
    idle = " and ".join(option for option, is_set in options.items() if is_set)
    if idle:
        raise DataclassError(
            f"The field `{cls.__name__}.{f.name}` sets {idle}.",
            "Every field is compared: jax.jit would reuse a program that was compiled for another value of it.",
            fix=f"leave {idle} out.",
        )


def _is_static(f: "dataclasses.Field[Any]") -> bool:
    # The keys that `jax.tree.static`, `equinox.field` and `flax.struct.field` write.
    return bool(f.metadata.get("static", False)) or not f.metadata.get("pytree_node", True)


def schema_of(instance: Any) -> Schema | None:
    """The schema of an instance of a decorated class, or None."""
    return type(instance).__dict__.get(SCHEMA)


def children_of(instance: Any) -> list[tuple[str, Any]]:
    """The fields of an instance that are children of its node, with their names."""
    schema, static = getattr(instance, SCHEMA), dict(getattr(instance, MARKS).static)
    return [(name, getattr(instance, name)) for name in schema.names if name not in static]


def rebuild(schema: Schema, marks: Marks, children: Any) -> Any:
    """Build an instance from its marks and children, without running `__init__`."""
    new: Any = object.__new__(schema.cls)
    values = new.__dict__
    static, rest = dict(marks.static), iter(children)
    for name in schema.names:
        data = static.get(name)
        if data is None:
            value = next(rest)
            held = name in marks.nondiff
            values[name] = hold_part(value, marks.cover(name), schema.labels[name]) if held else value
        else:
            values[name] = data.constant
    if marks is not schema.default:
        values[MARKS] = marks
    return new
