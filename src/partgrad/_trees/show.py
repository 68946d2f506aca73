"""The `repr` of values: on one line if that fits, or with one line per field."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .leaf import describe, function_name, written

_LONGEST_ARRAY = 6
_COLUMNS = 120


def show(value: Any, room: int = _COLUMNS) -> str:
    """Write a value.

    A small array is written by its entries, a large one or a tracer by its type (`f32[3,4]`), a function by its name.

    Args:
        value: Any value.
        room: The columns of its first line; what needs more goes over several lines.
    """
    if isinstance(value, jax.core.Tracer):
        return describe(value)
    if isinstance(value, jax.Array | np.ndarray):
        return _array(value)
    if room <= 0 and type(value) in (dict, list, tuple):
        # Sixty levels down: what is shown may even contain itself.
        return "..."
    if type(value) is dict:
        return _joined("{", [f"{written(key)}: {show(item, room - 2)}" for key, item in value.items()], "}", room)
    if type(value) in (list, tuple):
        start, end = ("[", "]") if type(value) is list else ("(", ",)" if len(value) == 1 else ")")
        return _joined(start, [show(item, room - 2) for item in value], end, room)
    name = None if jax.tree_util.is_tree_node(type(value)) else function_name(value)
    return written(value) if name is None else name


def _array(value: Any) -> str:
    if isinstance(value, jax.Array) and value.is_deleted():
        # The buffer was donated.
        return f"deleted {describe(value)}"
    if value.size > _LONGEST_ARRAY or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return describe(value)
    array = np.asarray(value)
    return str(array[()]) if array.ndim == 0 else np.array2string(array, separator=", ").replace("\n", "")


def _joined(start: str, texts: list[str], end: str, room: int) -> str:
    line = f"{start}{', '.join(texts)}{end}"
    if not texts or ("\n" not in line and len(line) <= room):
        return line
    return "\n".join([start, ",\n".join(textwrap.indent(text, "  ") for text in texts), end.removeprefix(",")])


def show_wrapped(wrapper: str, value: Any, of: str = "") -> str:
    """Write a wrapped value: `Wrapper(value)`, with the held paths if it does not hold all of it."""
    return f"{wrapper}({show(value)}{of and f', of={of!r}'})"


def show_fields(name: str, fields: Iterable[tuple[str, Any, str | None, str]]) -> str:
    """Write an instance: `Name(field=value, ...)`; each field with its wrapper, if any, and what it holds."""
    return _joined(f"{name}(", list(_fields(fields)), ")", _COLUMNS)


def _fields(fields: Iterable[tuple[str, Any, str | None, str]]) -> Iterator[str]:
    for field, value, wrapper, of in fields:
        yield f"{field}={show(value) if wrapper is None else show_wrapped(wrapper, value, of)}"
