"""Dataclasses without the decorator: JAX sees each as one leaf, so nothing in it is differentiated."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from .._message import at, word
from .._trees import is_differentiable
from ..errors import ForgottenDecoratorError
from .fields import SCHEMA

# Whether the class of a leaf is a dataclass. A tree has few classes, but every call asks about all leaves.
_is_dataclass: dict[type, bool] = {}
_warned: set[type] = set()
_ARRAYS = 2
_NUMBERS = 1


def refuse_forgotten(
    leaves: Sequence[Any], path_of: Callable[[int], str], names: "Collection[str | None] | None" = ()
) -> None:
    """Raise if a leaf is a dataclass that holds floating arrays; warn once per class if it holds only Python floats.

    If it has one of the attributes that a selector looks for in vain, or any if the names are None, it raises too.
    """
    for number, leaf in enumerate(leaves):
        cls = type(leaf)
        is_dataclass = _is_dataclass.get(cls)
        if is_dataclass is None:
            is_dataclass = _is_dataclass[cls] = dataclasses.is_dataclass(cls) and not jax.tree_util.is_tree_node(cls)
        if is_dataclass and (held := _holds(leaf, {id(leaf)})):
            message = _message(cls, path_of(number))
            if held == _ARRAYS or names is None or any(name and hasattr(leaf, name) for name in names):
                raise ForgottenDecoratorError(message)
            if cls not in _warned:
                _warned.add(cls)
                warnings.warn(message, stacklevel=2)


def _holds(leaf: Any, seen: set[int]) -> int:
    """What a dataclass that is a leaf holds: floating arrays, only Python floats, or neither."""
    most = 0
    fields = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    for value in [*fields, *getattr(leaf, "__dict__", {}).values()]:
        for inner in jax.tree.leaves(value):
            if is_differentiable(inner):
                most = max(most, _NUMBERS if isinstance(inner, float | complex) else _ARRAYS)
            elif dataclasses.is_dataclass(inner) and not isinstance(inner, type) and id(inner) not in seen:
                most = max(most, _holds(inner, seen | {id(inner)}))
    return most


def _message(cls: type, path: str) -> str:
    base = getattr(cls, SCHEMA).cls.__name__ if hasattr(cls, SCHEMA) else None
    derives = f", and derives from the partgrad dataclass `{base}`" if base else ""
    return word(
        f"{at(path)} is a `{cls.__name__}`, a dataclass that JAX does not know as a pytree{derives}.",
        "JAX sees one leaf, so none of the numbers in it are differentiated.",
        fix=f"write @partgrad.dataclass above `class {cls.__name__}` (instead of @dataclasses.dataclass), or make it "
        "static, partgrad.Static(...), if its numbers are constants.",
    )
