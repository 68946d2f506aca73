"""The words of errors about functions that cannot be followed."""

from .._message import word
from ..errors import ArgumentError


def not_a_callable(wrapper: str, found: object) -> ArgumentError:
    """Word the error for following something that cannot be called."""
    return ArgumentError(
        word(
            f"`partgrad.{wrapper}` got {type(found).__name__} {found!r:.60}, which cannot be called.",
            "Expected a function of arrays.",
            fix=f"pass the function itself: partgrad.{wrapper}(f)(x), not partgrad.{wrapper}(f(x)).",
        )
    )
