"""Gradients in a test suite."""

from collections.abc import Callable, Sequence
from typing import Any

from ._check import check
from ._transforms import refuse_options
from ._trees import parameters_of
from .errors import ArgumentError

__all__ = ["assert_gradients"]


def assert_gradients(
    f: Callable[..., Any],
    *args: Any,
    wrt: Any = None,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    forward: bool = False,
    intended: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
    exhaustive: bool = False,
    seed: int = 0,
    directions: int = 3,
    allow_inconclusive: bool = False,
    **kwargs: Any,
) -> None:
    """Check the gradient of a function at some arguments, and fail unless it is `ok` for every checked leaf.

    Warnings do not fail. The options are those of `partgrad.check`, which returns the whole report.

    Args:
        f: The function.
        *args: Its arguments.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        argnums: Which arguments, by position; the first one if neither this nor `argnames` is given.
        argnames: Which arguments, by name.
        has_aux: Whether the function returns a pair of the value to differentiate and auxiliary data.
        forward: Whether the derivative is only used in forward mode.
        intended: What is intentional: functions, qualified names of rules, lines as `file.py:42`, leaves.
        exhaustive: Whether to compare every entry of the gradient instead of sampled directions.
        seed: The seed for the directions.
        directions: How many directions.
        allow_inconclusive: Whether a leaf may be inconclusive, as at a jump; one that is stopped still fails.
        **kwargs: Its keyword arguments.

    Raises:
        ArgumentError: If the function has a parameter with the name of an option, or an option is not valid.
        CheckError: If a leaf is in error, stopped or inconclusive. It is an `AssertionError` and shows the table of the
            report.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> def test_distance_at_the_origin():
        ...     pg.testing.assert_gradients(jnp.linalg.norm, jnp.zeros(3))
        >>> try:
        ...     test_distance_at_the_origin()
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        The gradient of `norm` did not pass its check.
        >>> pg.testing.assert_gradients(pg.safe.norm, jnp.zeros(3))
    """
    options = {
        "wrt": wrt,
        "argnums": argnums,
        "argnames": argnames,
        "has_aux": has_aux,
        "forward": forward,
        "intended": intended,
        "exhaustive": exhaustive,
        "seed": seed,
        "directions": directions,
    }
    parameters = parameters_of(f) or {}
    for name in (*options, "allow_inconclusive"):
        if name in parameters:
            raise ArgumentError(
                f"`{name}` is an option of `assert_gradients`, and a parameter of the function as well.",
                "Expected names that say which of the two is meant.",
                fix=f"give the function its own beforehand, `functools.partial(f, {name}=...)`, in a lambda.",
            )
    refuse_options({"allow_inconclusive": allow_inconclusive})
    check(f, **options, progress=False)(*args, **kwargs).raise_if_failed(allow_inconclusive=allow_inconclusive)


def __dir__() -> list[str]:
    return __all__
