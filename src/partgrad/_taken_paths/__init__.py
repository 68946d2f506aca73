"""Derivatives along the paths that the value used: no NaN from a branch that was not taken."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .._programs import rewritten
from .._trees import refuse_uncallable
from . import primitives  # noqa: F401
from .enter import along_taken_paths, is_double_where as is_double_where

P = ParamSpec("P")
R = TypeVar("R")


def double_where(f: Callable[P, R]) -> Callable[P, R]:
    """Return the same function, with derivatives that flow only along the paths that its value used."""
    refuse_uncallable("double_where", f)
    return rewritten(f, along_taken_paths)
