"""The words of errors about parts of a tree that do not fit together."""

from .._message import at, word
from ..errors import PartsError


def no_parts() -> PartsError:
    """Word the error for `combine()`."""
    return PartsError(word("`combine` got no parts.", fix="pass what `partition` returned: combine(selected, rest)."))


def parts_overlap(path: str, first: int, second: int) -> PartsError:
    """Word the error for a leaf that two parts hold."""
    return PartsError(
        word(
            f"Parts {first} and {second} both hold {at(path)}.",
            "Expected every leaf in exactly one part, and None in the others.",
            fix="combine what one `partition` returned, or what `partgrad.mask` marks apart.",
        )
    )


def parts_differ(number: int, path: str, expected: str, found: str) -> PartsError:
    """Word the error for parts of different structure."""
    return PartsError(
        word(
            f"Part {number} has another structure than part 0, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="combine parts of one tree; a mark that was added or removed on one side alone counts as a difference.",
        )
    )


def updates_structure(path: str, expected: str, found: str) -> PartsError:
    """Word the error for updates of another structure than the tree."""
    return PartsError(
        word(
            f"The updates have another structure than the tree, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give updates for the tree that the optimiser was given: the selected part, or the tree with None.",
        )
    )


def elements_shape(expected: tuple[int, ...], found: tuple[int, ...]) -> PartsError:
    """Word the error for new elements of another shape than the selected ones."""
    return PartsError(
        word(
            "The new elements do not fit the selected ones.",
            f"Expected shape {expected}, got {found}.",
            fix="give one value for each selected element, in their shape.",
        )
    )


def condition_shape(expected: tuple[int, ...], found: tuple[int, ...]) -> PartsError:
    """Word the error for a condition that does not broadcast to a leaf."""
    return PartsError(
        word(
            "The condition of `stop_gradient` does not fit a selected leaf.",
            f"Expected a bool, or bools that broadcast to shape {expected}, got shape {found}.",
            fix="give one bool, or a tree of conditions in the shape of the gradient.",
        )
    )


def vector_length(expected: int, found: tuple[int, ...]) -> PartsError:
    """Word the error for a vector of another length than the selection."""
    return PartsError(
        word(
            "The vector does not fit the selected entries.",
            f"Expected shape ({expected},), got {found}.",
            fix="give one entry for each of `unravel.names`.",
        )
    )
