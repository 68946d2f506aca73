"""Dataclasses that are pytrees, whose marks belong to the fields of an instance."""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

import jax
from jax.tree_util import GetAttrKey
from typing_extensions import dataclass_transform

from .. import _words as words
from .._trees import show_fields, trees_equal
from .code import compile_init, compile_tree_functions
from .fields import MARKS, ORIGIN, SCHEMA, Marks, Schema, children_of, rebuild
from .nondiff import NonDiff, hold
from .static import Static, StaticData

T = TypeVar("T")

_BUILDING = "_partgrad_building"


# --- building an instance ----------------------------------------------------------------------------------------


def _settle(instance: Any, origin: Any = None, complete: bool = True) -> None:
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
                    raise words.field_not_set(schema.cls.__name__, name)
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
                new = StaticData(value, f"`{schema.cls.__name__}.{name}`")
                data = new.with_live(data.live) if data is not None and new == data.with_live(frozenset()) else new
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


def _run_post_init(instance: Any, origin: Any, arguments: tuple[Any, ...]) -> None:
    """Run `__post_init__` on plain values; a subclass's `__init__`, which called this one, settles what follows."""
    _settle(instance, origin, complete=False)
    settled = _snapshot(instance)
    with _building(instance):
        instance.__post_init__(*arguments)
    _settle(instance, settled, complete=not _is_building(instance))


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


def _check_decorated(instance: Any) -> None:
    cls = type(instance)
    if SCHEMA not in cls.__dict__:
        raise words.undecorated(cls.__name__, getattr(cls, SCHEMA).cls.__name__)


def _watch_subclasses(cls: Any) -> None:
    """See to it that a subclass which is not decorated says so when it is first built, whatever its `__init__` does."""
    own = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: Any, **kwargs: Any) -> None:
        if own is None:
            super(cls, subclass).__init_subclass__(**kwargs)
        else:
            own.__func__(subclass, **kwargs)
        original = subclass.__dict__.get("__init__")
        if hasattr(original, "_partgrad_original"):
            return

        @functools.wraps(original or cls.__init__)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            _check_decorated(self)
            (original or super(subclass, type(self)).__init__)(self, *args, **kwargs)

        __init__._partgrad_original = original  # type: ignore[attr-defined]
        subclass.__init__ = __init__

    cls.__init_subclass__ = classmethod(__init_subclass__)


def _unwatch(cls: Any) -> None:
    init = cls.__dict__.get("__init__")
    if hasattr(init, "_partgrad_original"):
        del cls.__init__
        if init._partgrad_original is not None:
            cls.__init__ = init._partgrad_original


def _wrap_own_init(cls: Any) -> Callable[..., None]:
    """Wrap an `__init__` written by hand: fields may be assigned inside it, and are settled after it."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, _partgrad_origin: Any = None, **kwargs: Any) -> None:
        if self.__class__ is not cls:
            _check_decorated(self)
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
        _settle(self, _partgrad_origin or settled)

    return __init__


def _store(instance: Any, fields: Mapping[str, Any]) -> None:
    names = getattr(instance, SCHEMA).names
    for name in fields:
        if name not in names:
            raise words.field_unknown(type(instance).__name__, name, names)
    instance.__dict__.update(fields)


def _accepts(function: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(instance, *args, **kwargs)
    except TypeError:
        return False
    return True


def _frozen_setattr(self: Any, name: str, value: Any) -> None:
    if not _is_building(self):
        raise dataclasses.FrozenInstanceError(words.frozen_message(type(self).__name__, name))
    object.__setattr__(self, name, value)


def _mutable_setattr(self: Any, name: str, value: Any) -> None:
    settled = _snapshot(self)
    object.__setattr__(self, name, value)
    if not _is_building(self) and name in getattr(self, SCHEMA).names:
        _settle(self, settled, complete=False)


def _mutable_delattr(self: Any, name: str) -> None:
    if name in getattr(self, SCHEMA).names:
        raise words.field_deleted(type(self).__name__, name)
    object.__delattr__(self, name)


def _mutable_hash(self: Any) -> int:
    raise words.unhashable(type(self).__name__)


def _equal(self: Any, other: object) -> Any:
    return trees_equal(self, other) if type(self) is type(other) else NotImplemented


def _frozen_hash(self: Any) -> int:
    return hash((type(self), jax.tree.structure(self)))


def _repr(self: Any) -> str:
    schema, marks = getattr(self, SCHEMA), getattr(self, MARKS)
    static = frozenset(name for name, _ in marks.static) - frozenset(schema.static)
    wrappers: dict[str, str] = dict.fromkeys(marks.nondiff, "NonDiff") | dict.fromkeys(static, "Static")
    shown = [(n, self.__dict__.get(n, ...), wrappers.get(n)) for n in schema.names if n not in schema.hidden]
    return show_fields(type(self).__qualname__.rsplit("<locals>.", 1)[-1], shown)


# --- the decorator -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Carrier:
    # `dataclasses.replace` reads this off the old instance and hands it to __init__; `fields()` does not list it.
    _partgrad_origin: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)


def field(
    *,
    nondiff: bool = False,
    static: bool = False,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    init: bool = True,
    repr: bool = True,
    kw_only: Any = dataclasses.MISSING,
    metadata: Mapping[Any, Any] | None = None,
) -> Any:
    """Declare a field of a `partgrad.dataclass`, and its mark.

    Args:
        nondiff: Values of this field are traced, but never differentiated unless a selector names them.
        static: Values of this field are Python data for the compiler, part of the tree's structure; arrays in them are
            carried as leaves that are not differentiated.
        default: As in `dataclasses.field`.
        default_factory: As in `dataclasses.field`.
        init: As in `dataclasses.field`.
        repr: As in `dataclasses.field`.
        kw_only: As in `dataclasses.field`.
        metadata: As in `dataclasses.field`; the keys `nondiff` and `static` are partgrad's.

    Returns:
        What `dataclasses.field` returns.

    Raises:
        DataclassError: If both `nondiff` and `static` are set.

    Example:
        >>> import partgrad as pg
        >>> @pg.dataclass
        ... class Periodic:
        ...     lengthscale: float
        ...     period: float = pg.field(nondiff=True, default=1.0)
        >>> pg.grad(lambda k: k.lengthscale * k.period)(Periodic(2.0))
        Periodic(lengthscale=1.0, period=NonDiff(None))
    """
    if nondiff and static:
        raise words.static_and_nondiff("`field`")
    marks = {name: True for name, given in (("nondiff", nondiff), ("static", static)) if given}
    return dataclasses.field(
        default=default,
        default_factory=default_factory,
        init=init,
        repr=repr,
        kw_only=kw_only,
        metadata={**(metadata or {}), **marks},
    )


@overload
def dataclass(cls: type[T], /) -> type[T]: ...


@overload
def dataclass(
    *,
    frozen: bool = True,
    kw_only: bool = False,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    match_args: bool = True,
    slots: bool = False,
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, field))
def dataclass(
    cls: Any = None,
    /,
    *,
    frozen: bool = True,
    kw_only: bool = False,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    match_args: bool = True,
    slots: bool = False,
) -> Any:
    """Make a class a dataclass and a pytree, with marks on its fields.

    Fields hold plain values. `NonDiff(x)` and `Static(x)` given to a field are stored as `x`, and the mark is kept in
    the structure of the instance, where `jit`, `vmap`, `scan`, `tree.map`, copying, pickling and `dataclasses.replace`
    keep it. Taking an instance apart and putting it together never runs `__init__` or `__post_init__`. While an
    instance is being built its fields may be assigned, in an `__init__` written by hand and in `__post_init__`.

    `a == b` is one bool: same class, marks, static data and leaves (shape, dtype, values). Frozen instances hash by
    class and structure, so `jax.jit(model)(x)` and `jax.jit(model.method)(x)` work; the values are then constants of
    the compiled function. To compile once for all values pass the model as an argument, `jax.jit(f)(model, x)`.

    Args:
        cls: The class.
        frozen: Whether instances are immutable. Mutable ones have no hash.
        kw_only: Whether all fields are keyword-only.
        init: Whether to generate `__init__`; one that the class defines is kept.
        repr: Whether to generate `__repr__`.
        eq: Whether to generate `__eq__` and `__hash__`.
        match_args: Whether to set `__match_args__`.
        slots: Refused: instances keep their values in `__dict__`.

    Returns:
        The same class, registered with JAX; or a decorator, if called without a class.

    Raises:
        DataclassError: For `slots=True`, and for a field that is both static and nondiff.

    Example:
        >>> import partgrad as pg
        >>> @pg.dataclass
        ... class RBF:
        ...     variance: float
        ...     lengthscale: float = 1.0
        >>> RBF(pg.NonDiff(2.0))
        RBF(variance=NonDiff(2.0), lengthscale=1.0)
        >>> RBF(pg.NonDiff(2.0)).variance
        2.0
    """
    options = {"frozen": frozen, "kw_only": kw_only, "init": init, "match_args": match_args}

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            raise words.not_a_class(cls)
        if slots or "__slots__" in cls.__dict__:
            raise words.slots_refused(cls.__name__)
        return _decorate(cls, options, repr, eq)

    return decorate if cls is None else decorate(cls)


def _decorate(cls: Any, options: dict[str, bool], repr: bool, eq: bool) -> type:
    _unwatch(cls)
    own_init = "__init__" in cls.__dict__ or not options["init"]
    own = set(cls.__dict__)
    if "__dataclass_params__" in own:
        raise words.decorated_twice(cls.__name__)
    try:
        dataclasses.dataclass(cls, repr=False, eq=False, **options)
    except TypeError as error:
        raise words.dataclass_refused(cls.__name__, error) from error
    cls.__dataclass_fields__[ORIGIN] = _Carrier.__dataclass_fields__[ORIGIN]
    schema = Schema(cls)
    if any(isinstance(getattr(cls, name, None), types.MemberDescriptorType) for name in schema.names):
        raise words.slots_refused(cls.__name__)
    setattr(cls, SCHEMA, schema)
    setattr(cls, MARKS, schema.default)
    setattr(cls, ORIGIN, property(lambda self: self))
    _watch_subclasses(cls)
    helpers: dict[str, Callable[..., Any]] = {
        "settle": _settle,
        "run_post_init": _run_post_init,
        "check_decorated": _check_decorated,
    }
    init = _wrap_own_init(cls) if own_init else compile_init(cls, schema, helpers)
    generated: dict[str, Any] = {"__setattr__": _frozen_setattr if options["frozen"] else _mutable_setattr}
    if not options["frozen"]:
        generated["__delattr__"] = _mutable_delattr
    if repr:
        generated["__repr__"] = _repr
    if eq:
        generated["__eq__"] = _equal
        if "__eq__" not in own:
            generated["__hash__"] = _frozen_hash if options["frozen"] else _mutable_hash
    for name, function in generated.items():
        # A `__hash__` of None is what Python puts beside an `__eq__`.
        if name not in own or (name == "__hash__" and cls.__dict__[name] is None):
            setattr(cls, name, function)
    cls.__init__ = init
    _register(cls, schema)
    return cls


def _register(cls: type, schema: Schema) -> None:
    flatten, unflatten = compile_tree_functions(schema, _flatten_irregular, rebuild)
    keys = tuple(GetAttrKey(name) for name in schema.dynamic)

    def flatten_with_keys(instance: Any) -> Any:
        marks = getattr(instance, MARKS)
        if marks.regular:
            return tuple(zip(keys, flatten(instance)[0], strict=True)), marks
        return tuple((GetAttrKey(name), child) for name, child, _ in children_of(instance)), marks

    try:
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    except ValueError as error:
        raise words.decorated_twice(cls.__name__) from error


def _flatten_irregular(instance: Any) -> tuple[tuple[Any, ...], Marks]:
    return tuple(child for _, child, _ in children_of(instance)), getattr(instance, MARKS)
