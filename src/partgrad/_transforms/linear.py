"""jvp, vjp and linearize: transforms that take primals, instead of returning a function of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypeVar, TypeVarTuple, overload

import jax

from .._marks import alike, close
from .._selection import Form, Intermediate, Selector, Target, as_selection
from ..errors import ArgumentError, PartsError
from .arguments import (
    Call,
    call_of_intermediate,
    forms_of,
    refuse_empty,
    refuse_no_function,
    shaped,
    taken_paths,
    wrong_number_of_selectors,
)
from .opened import OfSelected, of_selected

A = TypeVar("A")
R = TypeVar("R")
Primals = TypeVarTuple("Primals")


def _called(
    transform: str, f: Any, primals: Sequence[Any], wrt: Any, has_aux: bool, double_where: bool
) -> tuple[list[Target], OfSelected, list[Any]]:
    """The selected parts of the primals, the function of the differentiated leaves, and these leaves."""
    refuse_no_function(transform, f)
    if not isinstance(primals, tuple | list):
        raise ArgumentError(
            f"`partgrad.{transform}` got {type(primals).__name__} {primals!r:.60} as primals.",
            "Expected a tuple of the arguments of the function.",
            fix="write (x,) for one argument.",
        )
    if isinstance(wrt, Intermediate):
        call = call_of_intermediate(f, wrt.name, primals, {}, double_where)
        return call.targets, *of_selected(call, has_aux)
    if wrt is None:
        wrt = (None,) * len(primals)
    elif not isinstance(wrt, tuple):
        wrt = (wrt,)
    elif len(wrt) != len(primals):
        fix = "write one selector for each primal, wrt=(selector, None), or one for the first alone, wrt=selector."
        raise wrong_number_of_selectors(wrt, range(len(primals)), fix)
    selections = map(as_selection, wrt)
    targets = [Target(primals[number], selection, number) for number, selection in enumerate(selections)]
    if targets and all(target.is_empty for target in targets):
        refuse_empty(targets)
    return targets, *of_selected(Call(taken_paths(f, double_where), primals, {}, targets), has_aux)


def _directions(forms: Sequence[Form], tangents: Any) -> list[Any]:
    if not isinstance(tangents, tuple | list) or len(tangents) != len(forms):
        found = len(tangents) if isinstance(tangents, tuple | list) else type(tangents).__name__
        raise ArgumentError(
            f"Expected {len(forms)} tangents, one for each selected primal, got {found}.",
            "Without wrt every primal is selected; one selector is for the first primal alone.",
            fix="give a tuple with one tree for each selected primal, or select more by wrt=(selector, None, ...).",
        )
    return [
        value
        for form, tangent in zip(forms, tangents, strict=True)
        for value in form.values(tangent, f"The tangent of primal {form.position}")
    ]


class _OfJax:
    """A linear function that JAX returned, whose leaves are residuals, with what else is known about it; a pytree."""

    def __init__(self, function: Any, *rest: Any):
        self._function = function
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        # The other attributes of JAX's own object.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._function, name)

    def tree_flatten(self) -> tuple[Any, Any]:
        """JAX's function, and the rest."""
        return (self._function,), self._rest

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> Self:
        """The function with other residuals."""
        return cls(children[0], *rest)


@jax.tree_util.register_pytree_node_class
class Pullback(_OfJax):
    """Pulls cotangents of a value back to the selected leaves; a pytree, as JAX's is.

    In addition to JAX's function, it has the shapes of the gradients and the structure of the value: outside the
    function, and inside, where marks may be open.
    """

    def __call__(self, *cotangents: Any) -> tuple[Any, ...]:
        """A tuple of one pulled-back cotangent for each selected primal, in the shape of its gradient."""
        forms, output, opened = self._rest
        if len(cotangents) != 1:
            raise ArgumentError(
                f"The function that `vjp` returns takes one cotangent, and got {len(cotangents)}.",
                "Expected a tree in the structure of the output.",
                fix="if the output is a tuple, give a tuple: pull((a, b)).",
            )
        leaves, structure = jax.tree.flatten(cotangents[0])
        if not alike(structure, output):
            raise PartsError(
                "The cotangent has a different structure from the output of the function.",
                f"Expected {output}, got {structure}.",
                fix="give a tree like the value, with a cotangent in the place of every array.",
            )
        return shaped(forms, self._function(opened.unflatten(leaves))[0])


@jax.tree_util.register_pytree_node_class
class LinearMap(_OfJax):
    """The derivative along tangents of the selected leaves; a pytree, as JAX's is.

    In addition to JAX's function, it has the shapes of the gradients, and the level at which marks are open in its
    results; 0 if none is.
    """

    def __call__(self, *tangents: Any) -> Any:
        """The derivative along tangents, one for each selected primal, in the shape of its gradient."""
        forms, level = self._rest
        along = self._function(_directions(forms, tangents))
        return close(along, level) if level else along


@overload
def jvp(
    f: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Selector = None,
    has_aux: Literal[False] = False,
    double_where: bool = False,
) -> tuple[R, R]: ...


@overload
def jvp(
    f: Callable[..., tuple[R, A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Selector = None,
    has_aux: Literal[True],
    double_where: bool = False,
) -> tuple[R, R, A]: ...


def jvp(
    f: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Selector = None,
    has_aux: bool = False,
    double_where: bool = False,
) -> Any:
    """Compute the value of a function and its derivative along a direction (forward mode).

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        primals: The arguments of `f`.
        tangents: The direction, one tree for each selected primal, in the shape of its gradient: the selected part, or
            the tree with None at every leaf that is not selected.
        wrt: None for every primal, one selector for the first primal (the others are then constants), or a tuple of
            selectors, one for each primal.
        has_aux: As in `jax.jvp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The value and the derivative; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not fit its primal.
        PartsError: If a tangent does not have the structure of the gradient.
        ArgumentError: If the number of selectors or of tangents does not fit.

    Example:
        >>> import partgrad as pg
        >>> f = lambda p, x: p["a"] ** 2 * x
        >>> value, derivative = pg.jvp(f, ({"a": 3.0, "n": 1}, 2.0), (1.0,), wrt="a")
        >>> print(value, derivative)
        18.0 12.0
    """
    targets, function, leaves = _called("jvp", f, primals, wrt, has_aux, double_where)
    return function.closed(jax.jvp(function, (leaves,), (_directions(targets, tangents),), has_aux=has_aux))


@overload
def vjp(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    wrt: Selector = None,
    has_aux: Literal[False] = False,
    double_where: bool = False,
) -> tuple[R, Pullback]: ...


@overload
def vjp(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    wrt: Selector = None,
    has_aux: Literal[True],
    double_where: bool = False,
) -> tuple[R, Pullback, A]: ...


def vjp(f: Any, *primals: *Primals, wrt: Selector = None, has_aux: bool = False, double_where: bool = False) -> Any:
    """Compute the value of a function, and a function that maps cotangents back to the selected leaves (reverse mode).

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        has_aux: As in `jax.vjp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The value, and a function from a cotangent of the value to a tuple of cotangents, one for each selected primal,
        in the shape of its gradient; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not fit its primal.
        ArgumentError: If the number of selectors does not fit.

    Example:
        >>> import partgrad as pg
        >>> value, pull = pg.vjp(lambda p, x: p["a"] ** 2 * x, {"a": 3.0, "n": 1}, 2.0)
        >>> print(value, pull(1.0))
        18.0 ({'a': Array(12., dtype=float32, weak_type=True), 'n': None}, Array(9., dtype=float32, weak_type=True))
    """
    targets, function, leaves = _called("vjp", f, primals, wrt, has_aux, double_where)
    value, pull, *aux = jax.vjp(function, leaves, has_aux=has_aux)
    opened = jax.tree.structure(value)
    value, *aux = function.closed((value, *aux))
    return value, Pullback(pull, forms_of(targets), jax.tree.structure(value), opened), *aux


@overload
def linearize(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    wrt: Selector = None,
    has_aux: Literal[False] = False,
    double_where: bool = False,
) -> tuple[R, LinearMap]: ...


@overload
def linearize(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    wrt: Selector = None,
    has_aux: Literal[True],
    double_where: bool = False,
) -> tuple[R, LinearMap, A]: ...


def linearize(
    f: Any, *primals: *Primals, wrt: Selector = None, has_aux: bool = False, double_where: bool = False
) -> Any:
    """Compute the value of a function and its linear approximation in the selected leaves, to apply to many directions.

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        has_aux: As in `jax.linearize`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        The value, and a function from tangents, one for each selected primal in the shape of its gradient, to the
        derivative along them; with `has_aux` also the auxiliary data.

    Raises:
        SelectionError: If a selector does not fit its primal.
        ArgumentError: If the number of selectors or of tangents does not fit.
        PartsError: If a tangent does not have the structure of the gradient.

    Example:
        >>> import partgrad as pg
        >>> value, linear = pg.linearize(lambda p: p["a"] ** 2, {"a": 3.0, "n": 1}, wrt="a")
        >>> print(value, linear(1.0), linear(10.0))
        9.0 6.0 60.0
    """
    targets, function, leaves = _called("linearize", f, primals, wrt, has_aux, double_where)
    value, linear, *aux = jax.linearize(function, leaves, has_aux=has_aux)
    value, *aux = function.closed((value, *aux))
    return value, LinearMap(linear, forms_of(targets), function.level), *aux
