"""What a dataclass declares, and the marks of its instances.

An instance stores plain values in its `__dict__`. Its marks (which fields are NonDiff, which are static data) are one
`Marks` object: the class's default, or the instance's own under `MARKS` in its `__dict__`. The marks are the auxiliary
data of the treedef, so whatever keeps the structure keeps them.
"""

import dataclasses
from typing import Any

from .._message import word
from ..errors import DataclassError
from .nondiff import hold
from .static import StaticData

MARKS = "_partgrad_marks"
# The name under which an instance gives itself, so that `dataclasses.replace` hands it to the new one's __init__.
ORIGIN = "_partgrad_origin"
SCHEMA = "_partgrad_schema"


class Marks:
    """The marks of one instance.

    Args:
        nondiff: Names of the fields whose values are held.
        static: Names of the fields whose values are static data, each with how to take it apart.
        regular: Whether the static fields are the class's own and hold no arrays, so that the children are exactly the
            class's other fields.
    """

    __slots__ = ("nondiff", "regular", "static")

    def __init__(self, nondiff: tuple[str, ...], static: tuple[tuple[str, StaticData], ...], regular: bool):
        self.nondiff = nondiff
        self.static = static
        self.regular = regular

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Marks) and self.nondiff == other.nondiff and self.static == other.static

    def __hash__(self) -> int:
        return hash((self.nondiff, self.static))

    def __repr__(self) -> str:
        words = [f"{name}=NonDiff" for name in self.nondiff]
        words += [f"{name}={data!r}" for name, data in self.static]
        return ", ".join(words)

    def __reduce__(self) -> Any:
        return Marks, (self.nondiff, self.static, self.regular)

    def __deepcopy__(self, memo: Any) -> "Marks":
        return self


class Schema:
    """What a class declares: its fields, which of them are marked, and its default marks."""

    def __init__(self, cls: type):
        fields = dataclasses.fields(cls)
        self.cls = cls
        self.names = tuple(f.name for f in fields)
        self.labels = {name: f"{cls.__name__}.{name}" for name in self.names}
        self.hidden = frozenset(f.name for f in fields if not f.repr)
        self.static = tuple(f.name for f in fields if _is_static(f))
        self.nondiff = tuple(f.name for f in fields if f.metadata.get("nondiff", False))
        self.dynamic = tuple(n for n in self.names if n not in self.static)
        for name in self.nondiff:
            if name in self.static:
                raise static_and_nondiff(f"The field `{cls.__name__}.{name}`")
        self.default = Marks(self.nondiff, (), not self.static)
        self._interned = {self.nondiff: self.default}

    def marks(self, nondiff: tuple[str, ...], static: tuple[tuple[str, StaticData], ...]) -> Marks:
        """The marks of an instance; one object for one set of names, which makes treedefs quick to compare."""
        if not static and not self.static:
            return self._interned.setdefault(nondiff, Marks(nondiff, (), True))
        own = tuple(name for name, _ in static) == self.static
        return Marks(nondiff, static, own and not any(data.arrays for _, data in static))


def static_and_nondiff(owner: str) -> DataclassError:
    """The error for a field that is declared both static and nondiff."""
    return DataclassError(
        word(
            f"{owner} sets both static=True and nondiff=True.",
            "Static data is in the structure, a nondiff value is a traced leaf; static data is never differentiated.",
            fix="keep nondiff=True for numbers, static=True for what the compiler may specialise on.",
        )
    )


def _is_static(f: "dataclasses.Field[Any]") -> bool:
    # The keys that jax.tree.static, equinox.field and flax.struct.field write.
    return bool(f.metadata.get("static", False)) or not f.metadata.get("pytree_node", True)


def schema_of(instance: Any) -> Schema | None:
    """The schema of an instance of a decorated class, else None."""
    return type(instance).__dict__.get(SCHEMA)


def children_of(instance: Any) -> list[tuple[str, Any, StaticData | None]]:
    """The fields of an instance that are children of its node: name, child, and its static data if it is static."""
    schema, marks = getattr(instance, SCHEMA), getattr(instance, MARKS)
    static = dict(marks.static)
    children: list[tuple[str, Any, StaticData | None]] = []
    for name in schema.names:
        data = static.get(name)
        if data is None:
            children.append((name, getattr(instance, name), None))
        elif data.arrays:
            children.append((name, data.child(getattr(instance, name)), data))
    return children


def rebuild(schema: Schema, marks: Marks, children: Any) -> Any:
    """Build an instance from its marks and children, without running `__init__`."""
    new: Any = object.__new__(schema.cls)
    values = new.__dict__
    static, rest = dict(marks.static), iter(children)
    for name in schema.names:
        data = static.get(name)
        if data is None:
            value = next(rest)
            values[name] = hold(value, schema.labels[name]) if name in marks.nondiff else value
        else:
            values[name] = data.value(next(rest), schema.labels[name]) if data.arrays else data.constant
    if marks is not schema.default:
        values[MARKS] = marks
    return new
