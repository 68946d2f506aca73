"""Gradients in a test suite."""

from collections.abc import Callable
from typing import Any

from ._check import check

__all__ = ["assert_gradients"]


def assert_gradients(
    f: Callable[..., Any],
    *args: Any,
    wrt: Any = None,
    exhaustive: bool = False,
    seed: int = 0,
    directions: int = 3,
    **kwargs: Any,
) -> None:
    """Check the gradient of a function at some arguments, and fail if anything is wrong with it.

    Warnings do not fail. The options are those of `partgrad.check`, which returns the whole report.

    Args:
        f: The function.
        *args: Its arguments.
        wrt: A selector. None selects every floating or complex leaf of the first argument that no mark holds.
        exhaustive: Whether to compare every entry of the gradient, and not only sampled directions.
        seed: What the directions are drawn with.
        directions: How many directions.
        **kwargs: Its keyword arguments.

    Raises:
        CheckError: If a finding is an error. It is an `AssertionError` and shows the table of the report.

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
    report = check(f, wrt, exhaustive=exhaustive, seed=seed, directions=directions, progress=False)(*args, **kwargs)
    report.raise_if_failed()
