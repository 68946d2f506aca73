"""The words of errors of a check."""

from .._message import word
from ..errors import ArgumentError, CheckError


def check_failed(function: str, table: str) -> CheckError:
    """Word the error for a gradient with errors."""
    return CheckError(
        word(
            f"The gradient of `{function}` did not pass its check.\n\n{table}\n",
            "Expected no finding of severity error.",
            fix="start with the first error below the table; `partgrad.check` returns the report as data.",
        )
    )


def not_a_number_of_directions(directions: object) -> ArgumentError:
    """Word the error for a count of directions that is none."""
    return ArgumentError(
        word(f"`directions` is {directions!r:.80}.", "Expected an int of at least 1.", fix="leave it out, it is 3.")
    )


def check_of_tracers(function: str) -> ArgumentError:
    """Word the error for a check inside of a transformation."""
    return ArgumentError(
        word(
            f"`check` of `{function}` was called inside `jit`, `grad`, `vmap` or another transformation.",
            "Expected arguments with values: a check runs the function and looks at numbers.",
            fix="check the function outside, before it is transformed.",
        )
    )


def nothing_differentiable_returned(function: str) -> ArgumentError:
    """Word the error for a function without an output that has a derivative."""
    return ArgumentError(
        word(
            f"`{function}` returns nothing that has a derivative.",
            "Expected at least one floating or complex array among its outputs.",
            fix="return the number that is to be differentiated; of integers there is no derivative.",
        )
    )


def not_a_progress(found: object) -> ArgumentError:
    """Word the error for a `progress` that is none."""
    return ArgumentError(
        word(
            f"`progress` is {type(found).__name__} {found!r:.60}.",
            "Expected None (shown after two seconds), True, False, or a function of (done, total, what).",
            fix="leave it out, or write progress=False.",
        )
    )
