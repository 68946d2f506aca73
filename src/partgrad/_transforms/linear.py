"""jvp, vjp and linearize: transforms that take primals instead of returning a function of them."""

from collections.abc import Sequence
from typing import Any

import jax

from .._double_where import taken_paths
from .._message import word
from .._selection import Target, as_selection, values_like
from ..errors import ArgumentError
from .arguments import F, refuse_empty, refuse_uncallable, selected, shaped, wrong_number_of_selectors
from .opened import OfSelected


def _targets(f: Any, transform: str, primals: Sequence[Any], wrt: Any) -> list[Target]:
    refuse_uncallable(transform, f)
    if wrt is None:
        wrt = (None,) * len(primals)
    elif not isinstance(wrt, tuple):
        wrt = (wrt,)
    elif len(wrt) != len(primals):
        raise wrong_number_of_selectors(wrt, range(len(primals)))
    selections = map(as_selection, wrt)
    targets = [Target(primals[number], selection, number) for number, selection in enumerate(selections)]
    if targets and all(target.is_empty for target in targets):
        refuse_empty(targets)
    return targets


def _directions(targets: Sequence[Target], tangents: Any) -> list[Any]:
    if not isinstance(tangents, tuple | list) or len(tangents) != len(targets):
        found = len(tangents) if isinstance(tangents, tuple | list) else type(tangents).__name__
        raise ArgumentError(
            word(
                f"Expected {len(targets)} tangents, one for each selected primal, got {found}.",
                "Without wrt every primal is selected; one selector is for the first primal alone.",
                fix="give a tuple with one tree for each selected primal, or select more by wrt=(selector, None, ...).",
            )
        )
    return [
        value
        for target, tangent in zip(targets, tangents, strict=True)
        for value in target.values(tangent, f"The tangent of primal {target.position}")
    ]


def jvp(
    f: F,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Any = None,
    has_aux: bool = False,
    double_where: bool = False,
) -> Any:
    """The value of a function and its derivative along a direction (forward mode).

    Args:
        f: A function of the primals, any pytrees, to any pytree of arrays.
        primals: The arguments of `f`.
        tangents: The direction, one tree for each selected primal, in the shape of its gradient: the selected part, or
            the tree with None at every leaf that is not selected.
        wrt: None for every primal, a selector for the first primal alone (the others are constants), or a tuple of
            selectors, one for each primal.
        has_aux: As in `jax.jvp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The pair of value and derivative; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not go with its primal.
        PartsError: If a tangent has another structure than the gradient.
        ArgumentError: If the number of selectors or of tangents does not fit.

    Example:
        >>> import partgrad as pg
        >>> f = lambda p, x: p["a"] ** 2 * x
        >>> value, derivative = pg.jvp(f, ({"a": 3.0, "n": 1}, 2.0), (1.0,), wrt="a")
        >>> print(value, derivative)
        18.0 12.0
    """
    targets = _targets(f, "jvp", primals, wrt)
    function, leaves = OfSelected(taken_paths(f, double_where), primals, {}, targets), selected(targets)
    function.refuse_silent_zeros(leaves, has_aux)
    return function.closed(jax.jvp(function, (leaves,), (_directions(targets, tangents),), has_aux=has_aux))


def vjp(f: F, *primals: Any, wrt: Any = None, has_aux: bool = False, double_where: bool = False) -> Any:
    """The value of a function and the function that pulls cotangents back to the selected leaves (reverse mode).

    Args:
        f: A function of the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        has_aux: As in `jax.vjp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The pair of value and a function from a cotangent of the value to a tuple of pulled-back cotangents, one for
        each selected primal, in the shape of its gradient; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not go with its primal.
        ArgumentError: If the number of selectors does not fit.

    Example:
        >>> import partgrad as pg
        >>> value, pull = pg.vjp(lambda p, x: p["a"] ** 2 * x, {"a": 3.0, "n": 1}, 2.0)
        >>> print(value, pull(1.0))
        18.0 ({'a': Array(12., dtype=float32, weak_type=True), 'n': None}, Array(9., dtype=float32, weak_type=True))
    """
    targets = _targets(f, "vjp", primals, wrt)
    function, leaves = OfSelected(taken_paths(f, double_where), primals, {}, targets), selected(targets)
    function.refuse_silent_zeros(leaves, has_aux)
    value, pull, *aux = jax.vjp(function, leaves, has_aux=has_aux)
    opened = jax.tree.structure(value)
    value, *aux = function.closed((value, *aux))

    def pulled(cotangent: Any) -> Any:
        if function.level:
            cotangent = opened.unflatten(values_like(value, cotangent, "The cotangent"))
        return shaped(targets, pull(cotangent)[0])

    return value, pulled, *aux


def linearize(f: F, *primals: Any, wrt: Any = None, has_aux: bool = False, double_where: bool = False) -> Any:
    """The value of a function and its linear approximation in the selected leaves, for many directions.

    Args:
        f: A function of the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        has_aux: As in `jax.linearize`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The pair of value and a function from tangents, one for each selected primal in the shape of its gradient, to
        the derivative along them; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not go with its primal.
        ArgumentError: If the number of selectors or of tangents does not fit.
        PartsError: If a tangent has another structure than the gradient.

    Example:
        >>> import partgrad as pg
        >>> value, linear = pg.linearize(lambda p: p["a"] ** 2, {"a": 3.0, "n": 1}, wrt="a")
        >>> print(value, linear(1.0), linear(10.0))
        9.0 6.0 60.0
    """
    targets = _targets(f, "linearize", primals, wrt)
    function, leaves = OfSelected(taken_paths(f, double_where), primals, {}, targets), selected(targets)
    function.refuse_silent_zeros(leaves, has_aux)
    value, linear, *aux = jax.linearize(function, leaves, has_aux=has_aux)
    value, *aux = function.closed((value, *aux))
    return value, lambda *tangents: function.closed(linear(_directions(targets, tangents))), *aux
