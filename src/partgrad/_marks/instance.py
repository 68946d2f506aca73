"""An instance of a dataclass: how it is built, what it may assign, how it compares, hashes and prints."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from wadler_lindig import TextDoc

from .._message import listed, near_misses, word
from .._trees import accepts, is_array, trees_equal
from ..errors import DataclassError
from .cover import hold_part
from .diff import Diff, diff_refused
from .fields import MARKS, SCHEMA, Marks, Schema
from .hold import hold_built
from .nondiff import NonDiff, cover_of
from .printing import Wrapped, document_of, rendered, text_of
from .static import Static, StaticData

_BUILDING = "_partgrad_building"
# The values of a field that are marks.
WRAPPERS = frozenset({NonDiff, Diff, Static})


def settle(instance: Any, origin: Any = None, complete: bool = True) -> None:
    """Turn the stored values into plain values and marks.

    The fields start with the marks of `origin`, another instance, or with those of the class. Unless it is
    `complete`, the instance may still lack some fields.
    """
    schema: Schema = getattr(instance, SCHEMA)
    values = instance.__dict__
    if origin is None and not schema.static and _settle_nondiff(schema, values):
        return
    before: Marks = schema.default if origin is None else getattr(origin, MARKS)
    before_static = dict(before.static)
    nondiff, static, covers = [], [], []
    for name in schema.names:
        if name not in values:
            if not hasattr(schema.cls, name):
                if complete:
                    raise _not_set(schema, name)
                if name in before.nondiff:
                    nondiff.append(name)
                continue
            values[name] = getattr(schema.cls, name)
        value, label, cover, given = values[name], schema.labels[name], before.cover(name), None
        may_be_static = name in schema.static or name in before_static
        while isinstance(value, NonDiff | Diff | Static):
            # The outermost wrapper was written last, so it decides; but what is static has no other mark.
            given = Static if isinstance(value, Static) and given is not Diff else given or type(value)
            may_be_static = may_be_static or isinstance(value, Static)
            cover = cover_of(value) if isinstance(value, NonDiff) else cover
            value = value.value
        # Whether an array is held because it is where static data may be; later it may be thawed.
        is_new = origin is None or name in before_static or name not in origin.__dict__
        # What was put in the place of an array, as `tree.map` does, is what the marks say.
        is_kept = given is None and not is_new and origin.__dict__[name] is value
        if may_be_static and given is not NonDiff and not is_kept and not is_array(value):
            if given is Diff:
                fix = "pass the value itself, or declare the field without static=True."
                raise diff_refused(f"`{label}`, which is static", fix)
            data = before_static.get(name)
            if data is None or data.constant is not value:
                data = StaticData(value, f"`{label}`")
            static.append((name, data))
            value = data.constant
        elif given is not Diff and (given is not None or name in before.nondiff or (may_be_static and is_new)):
            nondiff.append(name)
            covers += [] if cover is None else [(name, cover)]
            value = hold_built(value, label) if cover is None else hold_part(value, cover, label)
        values[name] = value
    marks = schema.marks(tuple(nondiff), tuple(static), tuple(covers))
    values.pop(MARKS, None)
    if marks is not schema.default:
        values[MARKS] = marks


def _not_set(schema: Schema, name: str) -> DataclassError:
    return DataclassError(
        f"`{schema.labels[name]}` has no value once the instance is built.",
        "Expected every field to be set by __init__ or __post_init__.",
        fix=f"set self.{name} there, or give the field a default.",
    )


def _settle_nondiff(schema: Schema, values: dict[str, Any]) -> bool:
    """Settle the fields of a new instance quickly if its only wrappers are whole `NonDiff`; otherwise return False."""
    nondiff, plain = schema.nondiff, {}
    for name in schema.names:
        value = values.get(name, Static)
        while value.__class__ is NonDiff and cover_of(value) is None:
            value = value.value
            if name not in nondiff:
                nondiff += (name,)
        if value is Static or value.__class__ in WRAPPERS:
            return False
        plain[name] = hold_built(value, schema.labels[name]) if name in nondiff else value
    values.update(plain)
    if nondiff is not schema.nondiff:
        values[MARKS] = schema.marks(tuple(n for n in schema.names if n in nondiff))
    return True


def run_post_init(instance: Any, origin: Any, arguments: tuple[Any, ...]) -> None:
    """Run `__post_init__` on plain values; a subclass's `__init__` that called this one settles the rest."""
    settle(instance, origin, complete=False)
    settled = _snapshot(instance)
    with _building(instance):
        instance.__post_init__(*arguments)
    if not _is_building(instance):
        _refuse_undeclared(instance)
    settle(instance, settled, complete=not _is_building(instance))


def _refuse_undeclared(instance: Any) -> None:
    schema: Schema = getattr(instance, SCHEMA)
    for name in instance.__dict__:
        # A `cached_property` is an attribute of the class too.
        if name not in schema.names and name not in (MARKS, _BUILDING) and not hasattr(schema.cls, name):
            raise DataclassError(
                f"`{schema.cls.__name__}` sets the attribute {name!r}, which is not a field.",
                f"It would be lost when JAX takes the instance apart. Fields: {listed(schema.names) or 'none'}.",
                fix=f"declare it, `{name}: ... = partgrad.field(init=False)`, or compute it in a property.",
            )


@contextlib.contextmanager
def _building(instance: Any) -> Iterator[None]:
    """Allow assignment to fields. The flag is the instance's own id, so that a copy made meanwhile is frozen."""
    values, outer = instance.__dict__, _is_building(instance)
    values[_BUILDING] = id(instance)
    try:
        yield
    finally:
        if not outer:
            del values[_BUILDING]


def _is_building(instance: Any) -> bool:
    return instance.__dict__.get(_BUILDING) == id(instance)


def _snapshot(instance: Any) -> Any:
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__)
    return copy


def restore(self: Any, state: dict[str, Any]) -> None:
    """Take what was pickled, if it fits the class as it is now: the `__setstate__` of an instance."""
    schema: Schema = getattr(self, SCHEMA)
    # Only an instance of a class without static fields has no marks of its own.
    marks: Marks = state.get(MARKS, Marks((), (), True))
    static = [name for name, _ in marks.static]
    missing = [name for name in schema.names if name not in state and not hasattr(schema.cls, name)]
    changed = {*marks.nondiff, *static} - set(schema.names)
    if marks.regular:
        changed |= set(static) ^ set(schema.static)
    if (missing or changed) and _BUILDING not in state:
        values = ", ".join(f"{name}=state[{name!r}]" for name in schema.names if name in state)
        raise DataclassError(
            f"A `{schema.cls.__name__}` was pickled when its class had other fields, or other static ones: "
            f"{listed(sorted({*missing, *changed}))}.",
            "Its marks would go to the wrong fields.",
            fix=f"build it again from what was pickled: def __setstate__(self, state): self.__init__({values}), "
            "in the class.",
        )
    if MARKS in state:
        state = {**state, MARKS: schema.marks(marks.nondiff, marks.static, marks.covers)}
    self.__dict__.update(state)


def check_decorated(instance: Any) -> None:
    cls = type(instance)
    if SCHEMA not in cls.__dict__:
        base = getattr(cls, SCHEMA).cls.__name__
        raise DataclassError(
            f"`{cls.__name__}` derives from the partgrad dataclass `{base}` but is not decorated itself.",
            "JAX would not know how to take it apart, and its own fields would be lost.",
            fix=f"write @partgrad.dataclass above `class {cls.__name__}`.",
        )


def wrap_own_init(cls: Any) -> Callable[..., None]:
    """Wrap a hand-written `__init__`: it may assign fields, which are settled afterwards."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, _partgrad_origin: Any = None, **kwargs: Any) -> None:
        if self.__class__ is not cls:
            check_decorated(self)
            original(self, *args, **kwargs)
            return
        with _building(self):
            # `dataclasses.replace` passes fields by name, which an `__init__` with other parameters cannot take.
            if _partgrad_origin is None or accepts(original, self, *args, **kwargs):
                original(self, *args, **kwargs)
            else:
                _store(self, kwargs)
        _refuse_undeclared(self)
        if _partgrad_origin is None and MARKS in self.__dict__:
            # The `__init__` of a base class has settled some fields already.
            _partgrad_origin = _snapshot(self)
        settle(self, _partgrad_origin)

    # A subclass of a class with a generated `__init__` may have one of its own.
    signature = inspect.signature(original)
    cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return __init__


def _store(instance: Any, fields: Mapping[str, Any]) -> None:
    names = getattr(instance, SCHEMA).names
    for name in fields:
        if name not in names:
            near = near_misses(name, names)
            raise DataclassError(
                f"`{type(instance).__name__}` has no field `{name}`.",
                f"Fields: {listed(names) or 'none'}.",
                fix=f"write `{near[0]}`." if near else "name one of these.",
            )
    instance.__dict__.update(fields)


def frozen_setattr(self: Any, name: str, value: Any) -> None:
    if not _is_building(self):
        check_decorated(self)
        raise dataclasses.FrozenInstanceError(
            word(
                f"cannot assign to field `{type(self).__name__}.{name}`: instances are frozen.",
                fix=f"build a new one, dataclasses.replace(instance, {name}=...), or decorate with frozen=False.",
            )
        )
    object.__setattr__(self, name, value)


def mutable_setattr(self: Any, name: str, value: Any) -> None:
    settled = _snapshot(self)
    object.__setattr__(self, name, value)
    if not _is_building(self) and name in getattr(self, SCHEMA).names:
        settle(self, settled, complete=False)


def mutable_delattr(self: Any, name: str) -> None:
    if name in getattr(self, SCHEMA).names:
        raise DataclassError(
            f"cannot delete field `{type(self).__name__}.{name}`.",
            "Expected every field to have a value: it is part of the tree.",
            fix=f"set it to None: instance.{name} = None.",
        )
    object.__delattr__(self, name)


def mutable_hash(self: Any) -> int:
    name = type(self).__name__
    raise DataclassError(
        f"`{name}` is mutable (frozen=False), so its instances have no hash, and `jax.jit(instance)` cannot cache.",
        fix="pass it as an argument: jax.jit(lambda m, x: m(x))(instance, x), or leave out frozen=False.",
    )


def equal(self: Any, other: object) -> Any:
    return trees_equal(self, other) if type(self) is type(other) else NotImplemented


def frozen_hash(self: Any) -> int:
    return hash((type(self), jax.tree.structure(self)))


def wrappers_of(instance: Any) -> dict[str, str]:
    """The wrappers around the values of fields that differ from the class's declaration, or that are held."""
    schema, marks = getattr(instance, SCHEMA), getattr(instance, MARKS)
    static = dict(marks.static)
    wrappers = dict.fromkeys(static.keys() - frozenset(schema.static), "Static") | dict.fromkeys(
        marks.nondiff, "NonDiff"
    )
    wrappers |= {name: "Diff" for name in schema.declared if name not in marks.nondiff and name not in static}
    return wrappers


def _written_fields(instance: Any) -> dict[str, Any]:
    """The fields that a repr shows, with their marks."""
    schema, marks, wrappers = getattr(instance, SCHEMA), getattr(instance, MARKS), wrappers_of(instance)
    covers = {name: cover.of for name, cover in marks.covers}
    values = {name: instance.__dict__.get(name, ...) for name in schema.names if name not in schema.hidden}
    return {
        name: Wrapped(wrappers[name], value, covers.get(name, "")) if name in wrappers else value
        for name, value in values.items()
    }


def pdoc(self: Any, **kwargs: Any) -> Any:
    if type(self).__repr__ is not text_of:
        # The user's own.
        return TextDoc(repr(self))
    return document_of(type(self).__qualname__.rsplit("<locals>.", 1)[-1], _written_fields(self).items(), **kwargs)


def treescope_repr(self: Any, path: str | None, subtree_renderer: Any) -> Any:
    return rendered(type(self), _written_fields(self), path, subtree_renderer)
