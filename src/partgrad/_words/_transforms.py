"""The words of errors about the arguments and options of transforms."""

from collections.abc import Sequence

from .._message import at, listed, near_misses, word
from ..errors import ArgumentError, PartsError, SelectionError


def argument_missing(argnums: object, needed: int, given: int) -> ArgumentError:
    """Word the error for an `argnums` beyond the positional arguments, in JAX's own terms."""
    return ArgumentError(
        word(
            f"differentiating with respect to argnums={argnums} requires at least {needed} positional arguments to be "
            f"passed by the caller, but got only {given} positional arguments.",
            fix="pass the differentiated arguments by position.",
        )
    )


def argument_twice(position: object) -> ArgumentError:
    """Word the error for `argnums` and `argnames` that name one argument twice."""
    return ArgumentError(
        word(
            f"`argnums` and `argnames` name argument {position} twice.",
            "Expected every argument at most once: one of the two would be a constant of the other.",
            fix="select several parts of one argument with one selector: wrt=lambda m: (m.a, m.b).",
        )
    )


def selectors_and_arguments(wrt: object, arguments: Sequence[object]) -> ArgumentError:
    """Word the error for a `wrt` that has not one selector for each argument."""
    count = f"{len(wrt)} selectors" if isinstance(wrt, tuple) else f"one selector ({wrt!r:.60})"
    return ArgumentError(
        word(
            f"`wrt` and the arguments do not go together: {count} for {len(arguments)} arguments, {list(arguments)}.",
            "Expected a tuple of one selector for each argument.",
            fix="write wrt=(selector, None) beside argnums=(0, 1); None is every unmarked differentiable leaf.",
        )
    )


def argument_unknown(name: str, known: Sequence[str]) -> ArgumentError:
    """Word the error for an `argnames` that is no parameter of the function."""
    near = near_misses(name, known)
    return ArgumentError(
        word(
            f"argnames names `{name}`, which is no parameter of the function.",
            f"Parameters: {listed(known) or 'none'}.",
            fix=f"write {near[0]!r}." if near else "name one of these.",
        )
    )


def argument_not_passed(name: str) -> ArgumentError:
    """Word the error for a named argument that the caller left out."""
    return ArgumentError(
        word(
            f"argnames names `{name}`, which the caller did not pass.",
            "A default value is not differentiated.",
            fix=f"pass it: f(..., {name}=...).",
        )
    )


def wrong_structure(what: str, path: str, expected: str, found: str) -> PartsError:
    """Word the error for tangents, updates or values of another structure than the selection."""
    return PartsError(
        word(
            f"{what} has another structure than the selection, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give it the shape of the gradient: the selected part, or the tree with None at what is not selected.",
        )
    )


def wrong_count(what: str, expected: int, found: object) -> ArgumentError:
    """Word the error for a number of trees that does not fit the selected primals."""
    return ArgumentError(
        word(
            f"Expected {expected} {what}, one for each selected primal, got {found}.",
            "Without wrt every primal is selected; one selector is for the first primal alone.",
            fix="give a tuple with one tree for each selected primal, or select more by wrt=(selector, None, ...).",
        )
    )


def not_a_function(transform: str, found: object) -> ArgumentError:
    """Word the error for a transform of something that cannot be called."""
    return ArgumentError(
        word(
            f"`partgrad.{transform}` got {type(found).__name__} {found!r:.60}, which cannot be called.",
            "Expected the function to differentiate.",
            fix=f"write partgrad.{transform}(f, wrt=...)(model), or @partgrad.{transform}(wrt=...).",
        )
    )


def not_a_callable(wrapper: str, found: object) -> ArgumentError:
    """Word the error for following something that cannot be called."""
    return ArgumentError(
        word(
            f"`partgrad.{wrapper}` got {type(found).__name__} {found!r:.60}, which cannot be called.",
            "Expected a function of arrays.",
            fix=f"pass the function itself: partgrad.{wrapper}(f)(x), not partgrad.{wrapper}(f(x)).",
        )
    )


def unused_option(found: object) -> ArgumentError:
    """Word the error for an unknown `unused`."""
    return ArgumentError(
        word(
            f"`unused` is {found!r}.",
            "Expected 'zero', 'none' or 'error'.",
            fix="leave it out for JAX's zeros, or write unused='error' to be told what the output cannot depend on.",
        )
    )


def unused_leaves(paths: Sequence[str]) -> SelectionError:
    """Word the error for selected leaves that the output cannot depend on."""
    return SelectionError(
        word(
            f"The output cannot depend on {listed(f'`{path}`' for path in paths)}.",
            "Expected a path to the output for every selected leaf; stop_gradient and conversion to int cut paths.",
            fix="select what the function uses, or write unused='none' for None at these leaves.",
        )
    )
