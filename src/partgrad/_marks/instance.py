"""An instance of a dataclass: how it is built, what it may assign, how it compares, hashes and prints."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from .._message import listed, near_misses, word
from .._trees import show_fields, trees_equal
from ..errors import DataclassError
from .fields import MARKS, SCHEMA, Marks, Schema
from .nondiff import NonDiff, hold
from .static import Static, StaticData

_BUILDING = "_partgrad_building"


def settle(instance: Any, origin: Any = None, complete: bool = True) -> None:
    """Turn what was stored into plain values and marks.

    Args:
        instance: Whose fields were stored.
        origin: The instance whose marks these fields have to start with; None for the class's own.
        complete: Whether every field must be there.
    """
    schema: Schema = getattr(instance, SCHEMA)
    values = instance.__dict__
    if origin is None and not schema.static and _settle_nondiff(schema, values):
        return
    before: Marks = schema.default if origin is None else getattr(origin, MARKS)
    before_static = dict(before.static)
    nondiff, static = [], []
    for name in schema.names:
        if name not in values:
            if not hasattr(schema.cls, name):
                if complete:
                    raise DataclassError(
                        word(
                            f"`{schema.labels[name]}` has no value once the instance is built.",
                            "Expected every field to be set by __init__ or __post_init__.",
                            fix=f"set self.{name} there, or give the field a default.",
                        )
                    )
                continue
            values[name] = getattr(schema.cls, name)
        value = values[name]
        is_nondiff, is_static = name in before.nondiff, name in schema.static or name in before_static
        while isinstance(value, NonDiff | Static):
            is_nondiff, is_static = is_nondiff or isinstance(value, NonDiff), is_static or isinstance(value, Static)
            value = value.value
        if is_static:
            data = before_static.get(name)
            # What is an array was decided when the value came in; a placeholder in its place does not change that.
            if data is None or origin.__dict__[name] is not value:
                data = StaticData(value, f"`{schema.cls.__name__}.{name}`")
            static.append((name, data))
            value = data.value(data.child(value), schema.labels[name]) if data.arrays else data.constant
        elif is_nondiff:
            nondiff.append(name)
            value = hold(value, schema.labels[name])
        values[name] = value
    marks = schema.marks(tuple(nondiff), tuple(static))
    values.pop(MARKS, None)
    if marks is not schema.default:
        values[MARKS] = marks


def _settle_nondiff(schema: Schema, values: dict[str, Any]) -> bool:
    """Settle the fields of a new instance, quickly, if they hold no wrapper but NonDiff; otherwise return False."""
    nondiff, plain = schema.nondiff, {}
    for name in schema.names:
        value = values.get(name, Static)
        while value.__class__ is NonDiff:
            value = value.value
            if name not in nondiff:
                nondiff += (name,)
        if value is Static or value.__class__ is Static:
            return False
        plain[name] = hold(value, schema.labels[name]) if name in nondiff else value
    values.update(plain)
    if nondiff is not schema.nondiff:
        values[MARKS] = schema.marks(tuple(n for n in schema.names if n in nondiff), ())
    return True


def run_post_init(instance: Any, origin: Any, arguments: tuple[Any, ...]) -> None:
    """Run `__post_init__` on plain values; a subclass's `__init__`, which called this one, settles what follows."""
    settle(instance, origin, complete=False)
    settled = _snapshot(instance)
    with _building(instance):
        instance.__post_init__(*arguments)
    settle(instance, settled, complete=not _is_building(instance))


@contextlib.contextmanager
def _building(instance: Any) -> Iterator[None]:
    """Let fields be assigned. The flag is the instance's own id, so that a copy made meanwhile is frozen."""
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


def check_decorated(instance: Any) -> None:
    cls = type(instance)
    if SCHEMA not in cls.__dict__:
        base = getattr(cls, SCHEMA).cls.__name__
        raise DataclassError(
            word(
                f"`{cls.__name__}` derives from the partgrad dataclass `{base}` but is not decorated itself.",
                "JAX would not know how to take it apart, and its own fields would be lost.",
                fix=f"write @partgrad.dataclass above `class {cls.__name__}`.",
            )
        )


def wrap_own_init(cls: Any) -> Callable[..., None]:
    """Wrap an `__init__` written by hand: fields may be assigned inside it, and are settled after it."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, _partgrad_origin: Any = None, **kwargs: Any) -> None:
        if self.__class__ is not cls:
            check_decorated(self)
            original(self, *args, **kwargs)
            return
        with _building(self):
            # dataclasses.replace passes fields by name, which an __init__ with other parameters cannot take.
            if _partgrad_origin is None or _accepts(original, self, args, kwargs):
                original(self, *args, **kwargs)
            else:
                _store(self, kwargs)
        # A base class's __init__ may have settled some fields already.
        settled = _snapshot(self) if MARKS in self.__dict__ else None
        settle(self, _partgrad_origin or settled)

    return __init__


def _store(instance: Any, fields: Mapping[str, Any]) -> None:
    names = getattr(instance, SCHEMA).names
    for name in fields:
        if name not in names:
            near = near_misses(name, names)
            raise DataclassError(
                word(
                    f"`{type(instance).__name__}` has no field `{name}`.",
                    f"Fields: {listed(names) or 'none'}.",
                    fix=f"write `{near[0]}`." if near else "name one of these.",
                )
            )
    instance.__dict__.update(fields)


def _accepts(function: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(instance, *args, **kwargs)
    except TypeError:
        return False
    return True


def frozen_setattr(self: Any, name: str, value: Any) -> None:
    if not _is_building(self):
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
            word(
                f"cannot delete field `{type(self).__name__}.{name}`.",
                "Expected every field to have a value: it is part of the tree.",
                fix=f"set it to None: instance.{name} = None.",
            )
        )
    object.__delattr__(self, name)


def mutable_hash(self: Any) -> int:
    name = type(self).__name__
    raise DataclassError(
        word(
            f"`{name}` is mutable (frozen=False), so its instances have no hash, and `jax.jit(instance)` cannot cache.",
            fix="pass it as an argument: jax.jit(lambda m, x: m(x))(instance, x), or leave out frozen=False.",
        )
    )


def equal(self: Any, other: object) -> Any:
    return trees_equal(self, other) if type(self) is type(other) else NotImplemented


def frozen_hash(self: Any) -> int:
    return hash((type(self), jax.tree.structure(self)))


def show(self: Any) -> str:
    schema, marks = getattr(self, SCHEMA), getattr(self, MARKS)
    static = frozenset(name for name, _ in marks.static) - frozenset(schema.static)
    wrappers: dict[str, str] = dict.fromkeys(marks.nondiff, "NonDiff") | dict.fromkeys(static, "Static")
    shown = [(n, self.__dict__.get(n, ...), wrappers.get(n)) for n in schema.names if n not in schema.hidden]
    return show_fields(type(self).__qualname__.rsplit("<locals>.", 1)[-1], shown)
