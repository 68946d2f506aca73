"""How marks and dataclasses are printed: by wadler_lindig, which prints equinox's modules too, and by treescope."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from wadler_lindig import AbstractDoc, TextDoc, bracketed, comma, pdoc, pformat

from .._trees import describe, function_name, written

_COLUMNS = 120
_LONGEST_ARRAY = 6


class Wrapped(NamedTuple):
    """A value in its wrapper, as it is printed; `of` has the paths that a mark holds, if it does not hold all."""

    wrapper: str
    value: Any
    of: str = ""

    @property
    def _end(self) -> str:
        return f", of={self.of!r})" if self.of else ")"

    def __pdoc__(self, **kwargs: Any) -> AbstractDoc:
        return TextDoc(f"{self.wrapper}(") + pdoc(self.value, **kwargs) + TextDoc(self._end)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The value has the path of its wrapper, unless another is given."""
        from treescope import rendering_parts

        inner = subtree_renderer(self.value, path=path)
        return rendering_parts.siblings_with_annotations(f"{self.wrapper}(", inner, self._end)


def text_of(value: Any) -> str:
    """The repr of a mark or a dataclass: on one line if that fits, else with a line for each field."""
    try:
        return pformat(value, width=_COLUMNS, custom=_leaf)
    except RecursionError:
        return f"{type(value).__name__}(...)"


def document_of(name: str, fields: Iterable[tuple[str, Any]], **kwargs: Any) -> AbstractDoc:
    """A constructor, for wadler_lindig to lay out."""
    documents = [TextDoc(f"{field}=") + pdoc(value, **kwargs) for field, value in fields]
    return bracketed(TextDoc(f"{name}("), documents, comma, TextDoc(")"), kwargs["indent"])


def rendered(cls: type, fields: Mapping[str, Any], path: str | None, subtree_renderer: Any) -> Any:
    """A constructor, for treescope to show."""
    from treescope import repr_lib

    return repr_lib.render_object_constructor(cls, fields, path, subtree_renderer, roundtrippable=True)


def _leaf(value: Any) -> AbstractDoc | None:
    """What is no container: a small array by its entries, a large one by its type, a function by its name."""
    if isinstance(value, jax.Array | np.ndarray):
        return TextDoc(_array(value))
    if hasattr(type(value), "__pdoc__") or isinstance(value, dict | list | tuple):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return None
    name = None if jax.tree_util.is_tree_node(type(value)) else function_name(value)
    return TextDoc(written(value) if name is None else name)


def _array(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return describe(value)
    if isinstance(value, jax.Array) and value.is_deleted():
        # The buffer was donated.
        return f"deleted {describe(value)}"
    if value.size > _LONGEST_ARRAY or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return describe(value)
    array = np.asarray(value)
    return str(array[()]) if array.ndim == 0 else np.array2string(array, separator=", ").replace("\n", "")
