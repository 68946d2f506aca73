"""The words of errors of the functions in `safe`."""

from .._message import word
from ..errors import ArgumentError


def at_singular_dtype(name: str, found: object, real: bool) -> ArgumentError:
    """Word the error for a derivative at the singular point that is no number, or complex where all is real."""
    return ArgumentError(
        word(
            f"`at_singular` of `safe.{name}` is {type(found).__name__} {found!r:.60}.",
            f"Expected a {'real ' if real else ''}number or array{'' if real else ', real or complex'}.",
            fix=f"write safe.{name}(..., at_singular=0.0).",
        )
    )


def at_singular_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ArgumentError:
    """Word the error for a derivative at the singular point that does not fit."""
    return ArgumentError(
        word(
            f"`at_singular` of `safe.{name}` has shape {found}.",
            f"Expected a shape that broadcasts to {expected}.",
            fix="give one number, or one for each element.",
        )
    )


def safe_where_not_callable(which: str, found: object) -> ArgumentError:
    """Word the error for a branch of `safe.where` that is a value."""
    return ArgumentError(
        word(
            f"`{which}` of `safe.where` is {type(found).__name__} {found!r:.60}, which is not callable.",
            "Expected a function of the operands.",
            fix="write safe.where(pred, lambda x: ..., lambda x: ..., x); for arrays that exist there is jnp.where.",
        )
    )


def safe_where_trees(true_tree: object, false_tree: object) -> ArgumentError:
    """Word the error for branches of `safe.where` whose results do not go together."""
    return ArgumentError(
        word(
            "the functions of `safe.where` return trees of different structures.",
            f"`true_fun` returned {true_tree!s:.200}, `false_fun` returned {false_tree!s:.200}.",
            fix="return the same containers from both.",
        )
    )
