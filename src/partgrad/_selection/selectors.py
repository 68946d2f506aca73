"""What a user writes for `wrt=`, read as a selection.

A selector either names a part of a tree, and the gradient has the shape of that part, or describes leaves, and the
gradient is the tree with None elsewhere. On a skeleton it says which, with places: it returns a `Match`.
"""

import types
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .._skeletons import bools_in
from .._trees import is_node
from ..errors import SelectorTypeError
from .intermediate import Intermediate
from .kinds import CallableSelection, Groups, Mask, Misread, OfType, Path
from .selection import EVERYTHING, Selection

# What `wrt` accepts; a mask may be a tree of any class.
Selector: TypeAlias = Callable[[Any], Any] | object


def _refuse_unsortable(wrt: dict[Any, Any]) -> None:
    try:
        sorted(wrt)
    except TypeError:
        raise SelectorTypeError(
            f"The keys of the dict `wrt` cannot be sorted: {', '.join(map(repr, wrt))}.",
            "Expected keys of one kind, because JAX sorts the keys of a dict.",
            fix="write strings.",
        ) from None


def as_selection(wrt: Any) -> Selection:
    """Turn what the user passed as `wrt` into a selection."""
    if wrt is None:
        return EVERYTHING
    if isinstance(wrt, Selection):
        return wrt
    if isinstance(wrt, str):
        return Path(wrt)
    if isinstance(wrt, type):
        return OfType(wrt)
    if isinstance(wrt, Intermediate):
        raise SelectorTypeError(
            f"{wrt!r} is a value inside a function.",
            "Expected leaves of a tree, which a value inside a function is not.",
            fix="give it as `wrt` of a transform, partgrad.grad(f, wrt=...), alone or in a dict with selectors of the "
            "first argument; partgrad.capture_intermediates(f) reads such values and partgrad.intervene(f, ...) "
            "replaces them.",
        )
    if type(wrt) is dict:
        _refuse_unsortable(wrt)
    # A function is no tree, and is asked on every call.
    bools = [] if isinstance(wrt, types.FunctionType) else bools_in(wrt)
    if bools and all(bools):
        return Mask(wrt)
    if type(wrt) is dict and wrt and not any(isinstance(own, bool | np.bool_) for own in wrt.values()):
        return Groups(wrt)
    if callable(wrt) and not any(bools) and not is_node(wrt):
        return CallableSelection(wrt)
    # Not needed by a program that is right.
    from .._remedies import may_mean_a_part, not_a_selector

    if not any(bools) and may_mean_a_part(wrt):
        return Misread(wrt)
    raise not_a_selector(wrt)


Selection._read = staticmethod(as_selection)
