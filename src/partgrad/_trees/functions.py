"""What users pass to a function: functions, their parameters, and switches, with the errors for what is neither."""

import inspect
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .leaf import written


def parameters_of(function: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function by name; None if it has no signature, as some functions written in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def accepts(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, judging by its signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        # It has no signature, as some functions written in C.
        pass
    return True


def refuse_uncallable(
    wrapper: str,
    found: object,
    expected: str = "a function of arrays",
    fix: str = "pass the function itself: partgrad.{0}(f)(x), not partgrad.{0}(f(x)).",
) -> None:
    """Raise if what `partgrad.<wrapper>` was given cannot be called; `{0}` in the fix is the wrapper."""
    if not callable(found):
        raise ArgumentError(
            f"`partgrad.{wrapper}` got {type(found).__name__} {written(found):.60}, which cannot be called.",
            f"Expected {expected}.",
            fix=fix.format(wrapper),
        )


def refuse_non_bools(**switches: object) -> None:
    """Raise if an option that is on or off is not a bool: a string such as "no" would count as True."""
    for name, given in switches.items():
        if not isinstance(given, bool | np.bool_):
            raise ArgumentError(f"`{name}` is {written(given):.60}.", "Expected a bool.", fix=f"write {name}=True.")
