"""Dataclasses that are pytrees, whose marks belong to the fields of an instance.

The life of an instance, in order:

1. `dataclass` reads what the class declares into a `Schema` (`fields.py`), generates `__init__`, flatten and unflatten
   (`code.py`), and registers the class with JAX.
2. `__init__` stores what it is given in `__dict__`. Where that is all (no wrapper, no static field, no tracer in a
   field that the class holds), the instance is built, and its marks are the class's own.
3. Otherwise `settle` (`instance.py`) decides for each field: a wrapper is taken off and becomes a mark, static data
   becomes part of the marks, an array in a static field is held, and gradients stop at held tracers. The marks are one
   `Marks` object in `__dict__`. Around a `__post_init__`, which sees plain values, this happens twice; after a
   hand-written `__init__`, once.
4. Flattening returns the fields that are not static, and the marks as auxiliary data, so a treedef keeps the marks.
5. Unflattening stores children, static data and marks in a new `__dict__` and stops gradients at held tracers. It
   decides nothing, takes any placeholder, and runs no code of the class.
6. `dataclasses.replace` calls `__init__` with the old instance, under `ORIGIN`, whose marks a field keeps if it is
   given no other. A pickle is checked against the class when it is loaded (`restore`).
"""

import copyreg
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import jax
from jax.tree_util import GetAttrKey
from typing_extensions import dataclass_transform

from .._trees import refuse_non_bools
from ..errors import DataclassError
from .code import compile_init, compile_tree_functions
from .fields import (
    MARKS,
    ORIGIN,
    SCHEMA,
    Marks,
    Schema,
    children_of,
    rebuild,
    refuse_idle_marks,
    static_and_nondiff,
)
from .instance import (
    WRAPPERS,
    equal,
    frozen_hash,
    frozen_setattr,
    mutable_delattr,
    mutable_hash,
    mutable_setattr,
    pdoc,
    restore,
    treescope_repr,
    wrap_own_init,
)
from .printing import text_of

T = TypeVar("T")
# Py_TPFLAGS_HEAPTYPE: whether a class is made by a class statement.
_IS_WRITTEN_IN_PYTHON = 1 << 9


@dataclasses.dataclass
class _Carrier:
    # `dataclasses.replace` reads this off the old instance and hands it to __init__; `fields()` does not list it.
    _partgrad_origin: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)


def field(
    *,
    nondiff: bool | None = None,
    static: bool | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    kw_only: Any = dataclasses.MISSING,
    metadata: Mapping[Any, Any] | None = None,
) -> Any:
    """Declare a field of a `partgrad.dataclass`, and its mark.

    Args:
        nondiff: Whether values of this field are traced, but never differentiated unless a selector names them. A
            field that a subclass declares again keeps the mark of its base, unless this or `static` is given.
        static: Whether values of this field are Python data for the compiler, part of the tree's structure. An array
            is held in the instance that it is given to, as if it had been marked by `NonDiff`.
        default: As in `dataclasses.field`.
        default_factory: As in `dataclasses.field`.
        init: As in `dataclasses.field`.
        repr: As in `dataclasses.field`.
        hash: Refused, with `compare=False`, by `partgrad.dataclass`: every field is compared.
        compare: As `hash`.
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
        raise static_and_nondiff("`field`")
    marks = {name: given for name, given in (("nondiff", nondiff), ("static", static)) if given is not None}
    refuse_non_bools(**marks, init=init, repr=repr, compare=compare)
    return dataclasses.field(
        default=default,
        default_factory=default_factory,
        init=init,
        repr=repr,
        hash=hash,
        compare=compare,
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
    order: bool = False,
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
    order: bool = False,
) -> Any:
    """Make a class a dataclass and a pytree, with marks on its fields.

    Fields hold plain values. `NonDiff(x)` and `Static(x)` given to a field are stored as `x`, and the mark is kept in
    the structure of the instance, where `jit`, `vmap`, `scan`, `tree.map`, copying, pickling and `dataclasses.replace`
    keep it. Flattening and unflattening never run `__init__` or `__post_init__`. A hand-written `__init__`, and
    `__post_init__`, may assign fields while they build an instance.

    `a == b` is one bool: same class, marks, static data and leaves (shape, dtype, values). Frozen instances hash by
    class and structure, so `jax.jit(model)(x)` and `jax.jit(model.method)(x)` work; the values are then constants of
    the compiled function. To compile once for all values, pass the model as an argument: `jax.jit(f)(model, x)`.

    Args:
        cls: The class.
        frozen: Whether instances are immutable. Mutable ones have no hash.
        kw_only: Whether all fields are keyword-only.
        init: Whether to generate `__init__`; one that the class defines is kept.
        repr: Whether to generate `__repr__`.
        eq: Whether to generate `__eq__` and `__hash__`.
        match_args: Whether to set `__match_args__`.
        slots: Refused: instances keep their values in `__dict__`.
        order: Refused: an order of arrays is not one bool, and a traced value has none.

    Returns:
        The same class, registered with JAX; or a decorator, if called without a class.

    Raises:
        DataclassError: For `slots=True` or `order=True`, for a field that is both static and nondiff, and for a field
            option that would have no effect.

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
            raise DataclassError(
                f"`partgrad.dataclass` got {type(cls).__name__} {cls!r:.60}, which is not a class.",
                fix="write @partgrad.dataclass or @partgrad.dataclass(kw_only=True) above a class.",
            )
        if slots or "__slots__" in cls.__dict__:
            raise _slots_refused(cls.__name__)
        _refuse_builtin_base(cls)
        if order:
            raise DataclassError(
                f"`{cls.__name__}` asks for order=True.",
                "Models have no order: comparing arrays gives no single bool, and a traced value has none.",
                fix="leave order out; sort by a number, sorted(models, key=lambda m: float(m.a)).",
            )
        return _decorate(cls, options, repr, eq)

    return decorate if cls is None else decorate(cls)


def _decorate(cls: Any, options: dict[str, bool], repr: bool, eq: bool) -> type:
    own_init = "__init__" in cls.__dict__ or not options["init"]
    own = set(cls.__dict__)
    if "__dataclass_params__" in own:
        raise _decorated_twice(cls.__name__)
    try:
        dataclasses.dataclass(cls, repr=False, eq=False, **options)
    except (TypeError, ValueError, SyntaxError) as error:
        raise DataclassError(
            f"`{cls.__name__}` cannot be a partgrad dataclass: {error}.",
            "Expected a class that dataclasses.dataclass accepts; partgrad's are frozen without frozen=False.",
            fix=_change(str(error)),
        ) from error
    refuse_idle_marks(cls, WRAPPERS)
    cls.__dataclass_fields__[ORIGIN] = _Carrier.__dataclass_fields__[ORIGIN]
    schema = Schema(cls)
    for name in schema.names:
        _refuse_descriptor(cls, name)
    setattr(cls, SCHEMA, schema)
    setattr(cls, MARKS, schema.default)
    setattr(cls, ORIGIN, property(lambda self: self))
    init = wrap_own_init(cls) if own_init else compile_init(cls, schema)
    generated: dict[str, Any] = {"__setattr__": frozen_setattr if options["frozen"] else mutable_setattr}
    if not options["frozen"]:
        generated["__delattr__"] = mutable_delattr
    if not hasattr(cls, "__setstate__"):
        generated["__setstate__"] = restore
    if repr:
        generated["__repr__"] = text_of
        generated["__treescope_repr__"] = treescope_repr
        generated["__pdoc__"] = pdoc
    if eq:
        generated["__eq__"] = equal
        if "__eq__" not in own:
            generated["__hash__"] = frozen_hash if options["frozen"] else mutable_hash
    for name, function in generated.items():
        # A `__hash__` of None is what Python puts beside an `__eq__`.
        if name not in own or (name == "__hash__" and cls.__dict__[name] is None):
            setattr(cls, name, function)
    cls.__init__ = init
    _register(cls, schema)
    return cls


def _change(reason: str) -> str:
    """How to change a class that `dataclasses.dataclass` refuses."""
    if "mutable default" in reason:
        return "write partgrad.field(default_factory=lambda: ...), which makes the value for each instance."
    if "no type annotation" in reason:
        return "annotate it: `name: float = partgrad.field(...)`."
    return "change the class; a base that is a plain dataclass must be frozen like this one."


def _refuse_builtin_base(cls: type) -> None:
    """Raise if instances hold more than their fields: the items of a list, the entries of an array."""
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & _IS_WRITTEN_IN_PYTHON:
            raise DataclassError(
                f"`{cls.__name__}` derives from `{base.__name__}`.",
                "What it holds beside its fields would be lost when JAX takes an instance apart.",
                fix=f"make the {base.__name__} a field of the class.",
            )


def _slots_refused(cls: str) -> DataclassError:
    return DataclassError(
        f"`{cls}` asks for slots=True (or defines __slots__).",
        "Expected instances with a __dict__: that is where unflattening writes, without running __init__.",
        fix="leave slots out; reading a field costs the same.",
    )


def _refuse_descriptor(cls: type, name: str) -> None:
    """Raise if a class attribute hides what an instance stores in a field."""
    kind = type(inspect.getattr_static(cls, name, None))
    if kind is types.MemberDescriptorType:
        raise _slots_refused(cls.__name__)
    if hasattr(kind, "__set__"):
        raise DataclassError(
            f"`{cls.__name__}.{name}` is a field, and a {kind.__name__} of the class as well.",
            "Expected a field whose value is read from the instance: its derivative is that of the stored value.",
            fix="give one of the two another name.",
        )


def _decorated_twice(cls: str) -> DataclassError:
    return DataclassError(
        f"`{cls}` is a dataclass, or registered with JAX, already.",
        "partgrad.dataclass makes a class a dataclass and registers it with JAX; another decorator does so too.",
        fix="leave partgrad.dataclass as the only decorator.",
    )


def _register(cls: type, schema: Schema) -> None:
    flatten, unflatten = compile_tree_functions(schema, _flatten_irregular, rebuild)

    def flatten_with_keys(instance: Any) -> Any:
        marks = getattr(instance, MARKS)
        if marks.regular:
            return tuple(zip(schema.keys, flatten(instance)[0], strict=True)), marks
        return tuple((GetAttrKey(name), child) for name, child in children_of(instance)), marks

    try:
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    except ValueError as error:
        raise _decorated_twice(cls.__name__) from error


def _restored(schema: Schema, state: dict[str, Any]) -> Schema:
    vars(schema).update(state)
    if not jax.tree_util.is_tree_node(schema.cls):
        _register(schema.cls, schema)
    return schema


def _reduced(schema: Schema) -> Any:
    return object.__new__, (Schema,), vars(schema), None, None, _restored


# A class that cloudpickle sends to another process by value comes with its schema; JAX has to know it there too.
copyreg.pickle(Schema, _reduced)


def _flatten_irregular(instance: Any) -> tuple[tuple[Any, ...], Marks]:
    return tuple(child for _, child in children_of(instance)), getattr(instance, MARKS)
