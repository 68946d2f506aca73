"""The words of errors about classes, their instances and their marks."""

from collections.abc import Sequence

from .._message import listed, near_misses, word
from ..errors import DataclassError, StaticError


def static_and_nondiff(owner: str) -> DataclassError:
    """Word the error for a field that is declared both static and nondiff."""
    return DataclassError(
        word(
            f"{owner} sets both static=True and nondiff=True.",
            "Static data is in the structure, a nondiff value is a traced leaf; static data is never differentiated.",
            fix="keep nondiff=True for numbers, static=True for what the compiler may specialise on.",
        )
    )


def slots_refused(cls: str) -> DataclassError:
    """Word the error for `slots=True`."""
    return DataclassError(
        word(
            f"`{cls}` asks for slots=True (or defines __slots__).",
            "Expected instances with a __dict__: that is where unflattening writes, without running __init__.",
            fix="leave slots out; reading a field costs the same.",
        )
    )


def decorated_twice(cls: str) -> DataclassError:
    """Word the error for a class that is a dataclass or a pytree already."""
    return DataclassError(
        word(
            f"`{cls}` is a dataclass already.",
            "partgrad.dataclass makes a class a dataclass and registers it with JAX; another decorator does so too.",
            fix="leave partgrad.dataclass as the only decorator.",
        )
    )


def dataclass_refused(cls: str, error: Exception) -> DataclassError:
    """Word the error for a class that `dataclasses.dataclass` or JAX refuses."""
    return DataclassError(
        word(
            f"`{cls}` cannot be a partgrad dataclass: {error}.",
            "Expected a class that dataclasses.dataclass accepts; partgrad's are frozen without frozen=False.",
            fix="mend the class; a base that is a plain dataclass must be frozen like this one.",
        )
    )


def none_refused_note() -> str:
    """Word the note on an error of a constructor that JAX runs when partgrad builds a part of a tree."""
    return (
        "partgrad built a tree with None in the place of the leaves that are not in it, and the constructor of a class "
        "in it, which JAX runs to build one, refused that.\n"
        "Fix: let the constructor accept None, or name the leaves by a callable, whose gradient has no such tree."
    )


def cannot_hold(cls: str) -> DataclassError:
    """Word the error for a class of another library whose instances cannot hold a wrapper."""
    return DataclassError(
        word(
            f"`{cls}` takes NonDiff wrappers apart when JAX builds it, so its leaves cannot be marked.",
            "Expected a class that stores what it is given.",
            fix=f"leave its leaves out by wrt=..., or make `{cls}` a partgrad.dataclass, whose fields can be marked.",
        )
    )


def undecorated(cls: str, base: str) -> DataclassError:
    """Word the error for an instance of a subclass that was not decorated."""
    return DataclassError(
        word(
            f"`{cls}` derives from the partgrad dataclass `{base}` but is not decorated itself.",
            "JAX would not know how to take it apart, and its own fields would be lost.",
            fix=f"write @partgrad.dataclass above `class {cls}`.",
        )
    )


def field_not_set(cls: str, name: str) -> DataclassError:
    """Word the error for a field without a value once an instance is built."""
    return DataclassError(
        word(
            f"`{cls}.{name}` has no value once the instance is built.",
            "Expected every field to be set by __init__ or __post_init__.",
            fix=f"set self.{name} there, or give the field a default.",
        )
    )


def field_unknown(cls: str, name: str, fields: Sequence[str]) -> DataclassError:
    """Word the error for replacing a field that is none."""
    near = near_misses(name, fields)
    return DataclassError(
        word(
            f"`{cls}` has no field `{name}`.",
            f"Fields: {listed(fields) or 'none'}.",
            fix=f"write `{near[0]}`." if near else "name one of these.",
        )
    )


def field_deleted(cls: str, name: str) -> DataclassError:
    """Word the error for deleting a field."""
    return DataclassError(
        word(
            f"cannot delete field `{cls}.{name}`.",
            "Expected every field to have a value: it is a part of the tree.",
            fix=f"set it to None: instance.{name} = None.",
        )
    )


def not_a_class(found: object) -> DataclassError:
    """Word the error for decorating something that is no class."""
    return DataclassError(
        word(
            f"`partgrad.dataclass` got {type(found).__name__} {found!r:.60}, which is not a class.",
            fix="write @partgrad.dataclass or @partgrad.dataclass(kw_only=True) above a class.",
        )
    )


def frozen_message(cls: str, name: str) -> str:
    """Word the message of the FrozenInstanceError for an assignment to a field of a built instance."""
    return word(
        f"cannot assign to field `{cls}.{name}`: instances are frozen.",
        fix=f"build a new one, dataclasses.replace(instance, {name}=...), or decorate with frozen=False.",
    )


def unhashable(cls: str) -> TypeError:
    """Word the error for the hash of a mutable instance."""
    return DataclassError(
        word(
            f"`{cls}` is mutable (frozen=False), so its instances have no hash, and `jax.jit(instance)` cannot cache.",
            fix="pass it as an argument: jax.jit(lambda m, x: m(x))(instance, x), or leave frozen=False out.",
        )
    )


def static_unhashable(where: str, path: str, value: object) -> StaticError:
    """Word the error for static data that cannot be compared."""
    inside = f" at `{path}`" if path else ""
    return StaticError(
        word(
            f"{where} holds {type(value).__name__} {value!r:.60}{inside}, which cannot be static.",
            "Expected data that can be hashed and compared, or a dict, list, set or array of such.",
            fix="give its class __eq__ and __hash__, or store the data it is made from.",
        )
    )


def static_unsortable(where: str, error: Exception) -> StaticError:
    """Word the error for static containers that JAX cannot take apart."""
    return StaticError(
        word(
            f"{where} holds a container that JAX cannot flatten: {str(error).splitlines()[0]:.100}",
            "Expected dicts whose keys can be sorted.",
            fix="use keys of one type, such as strings.",
        )
    )
