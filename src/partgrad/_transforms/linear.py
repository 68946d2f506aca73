"""jvp, vjp and linearize: transforms that take primals, instead of returning a function of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self, TypedDict, TypeVar, TypeVarTuple, Unpack, cast, overload

import jax

from .._marks import alike, close, flatten_one_level
from .._selection import Form, Intermediate, Selector, Target, as_selection
from ..errors import ArgumentError, PartsError
from .arguments import (
    Argnames,
    Argnums,
    Arguments,
    Call,
    call_of_intermediate,
    forms_of,
    refuse_arguments,
    refuse_empty,
    refuse_no_function,
    shaped,
    taken_paths,
    wrong_number_of_selectors,
)
from .of_selected import OfSelected, of_selected

A = TypeVar("A")
R = TypeVar("R")
Primals = TypeVarTuple("Primals")


class LinearOptions(TypedDict, total=False):
    """The options of `jvp`, `vjp` and `linearize`, for type checkers; those of JAX pass through."""

    wrt: Selector
    argnums: Argnums
    argnames: Argnames
    double_where: bool
    reduce_axes: Any
    saveable_args: Any
    in_nzs: Any


# JAX's own options that are trees of bools, prefixes of the primals.
_OF_PRIMALS = ("in_nzs", "saveable_args")


class _Called(NamedTuple):
    """The selected parts of the primals, the function of the differentiated leaves, these leaves, and JAX's options."""

    targets: list[Target]
    function: OfSelected
    leaves: list[Any]
    options: dict[str, Any]


def _called(
    transform: str,
    f: Any,
    primals: Sequence[Any],
    has_aux: bool,
    wrt: Any = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    double_where: bool = False,
    **options: Any,
) -> _Called:
    refuse_no_function(transform, f)
    if not isinstance(primals, tuple | list):
        raise ArgumentError(
            f"`partgrad.{transform}` got {type(primals).__name__} {primals!r:.60} as primals.",
            "Expected a tuple of the arguments of the function.",
            fix="write (x,) for one argument.",
        )
    if isinstance(wrt, Intermediate):
        refuse_arguments(wrt, argnums, argnames)
        call = call_of_intermediate(f, wrt.name, primals, {}, double_where)
        if unfit := [name for name in _OF_PRIMALS if name in options]:
            raise ArgumentError(
                f"`{transform}` got {unfit[0]}= beside wrt={wrt!r}.",
                "Expected options that are not about the primals, since a value inside the function is none.",
                fix=f"leave {unfit[0]} out.",
            )
        return _Called(call.targets, *of_selected(call, has_aux), options)
    if argnums is None and argnames is None:
        targets = _of_primals(primals, wrt)
        is_empty = targets and all(target.is_empty for target in targets)
    else:
        targets = Arguments(f, wrt, argnums, argnames).targets(primals, {})
        is_empty = True
    if is_empty:
        refuse_empty(targets)
    options = {name: _flags(own, targets) if name in _OF_PRIMALS else own for name, own in options.items()}
    call = Call(taken_paths(f, double_where), primals, {}, targets)
    return _Called(targets, *of_selected(call, has_aux), options)


def _of_primals(primals: Sequence[Any], wrt: Any) -> list[Target]:
    """Without `argnums`, `wrt` goes primal by primal, and one selector is for the first."""
    if wrt is None:
        wrt = (None,) * len(primals)
    elif not isinstance(wrt, tuple):
        wrt = (wrt,)
    elif len(wrt) != len(primals):
        fix = "write one selector for each primal, wrt=(selector, None), or one for the first alone, wrt=selector."
        raise wrong_number_of_selectors(wrt, range(len(primals)), fix)
    return [Target(primals[number], as_selection(own), number) for number, own in enumerate(wrt)]


def _flags(prefix: Any, targets: Sequence[Target]) -> Any:
    """Bools for the differentiated leaves, given a prefix of the primals."""
    if not isinstance(prefix, tuple | list):
        return prefix
    flags = [_broadcast(prefix[cast(int, target.position)], target.treedef) for target in targets]
    return (tuple(own[i] for own, target in zip(flags, targets, strict=True) for i in target.plan.indices),)


def _broadcast(prefix: Any, treedef: Any) -> list[Any]:
    """A value for each leaf; the classes of containers do not matter."""
    if isinstance(prefix, bool):
        return [prefix] * treedef.num_leaves
    below = [child for _, child in flatten_one_level(prefix)[0]]
    return [own for child, part in zip(below, treedef.children(), strict=True) for own in _broadcast(child, part)]


def _directions(forms: Sequence[Form], tangents: Any) -> list[Any]:
    if not isinstance(tangents, tuple | list) or len(tangents) != len(forms):
        found = len(tangents) if isinstance(tangents, tuple | list) else type(tangents).__name__
        raise ArgumentError(
            f"Expected {len(forms)} tangents, one for each selected primal, got {found}.",
            "Without wrt every primal is selected; one selector is for the first primal alone.",
            fix="give a tuple with one tree for each selected primal, or select others by wrt=(selector, None, ...) "
            "or by argnums.",
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._function, name, value)

    def tree_flatten(self) -> tuple[Any, Any]:
        """JAX's function, and the rest."""
        return (self._function,), self._rest

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> Self:
        """The function with other residuals."""
        return cls(children[0], *rest)


def _arguments(forms: Sequence[Form]) -> str:
    counts = (f"argument {form.position} ({len(form.plan.indices)} leaves)" for form in forms)
    return ", ".join(counts)


@jax.tree_util.register_pytree_node_class
class Pullback(_OfJax):
    """Pulls cotangents of a value back to the selected leaves; a pytree, as JAX's is.

    In addition to JAX's function, it has the shapes of the gradients and the structure of the value: outside the
    function, and inside, where marks may be open.
    """

    def __repr__(self) -> str:
        return f"<partgrad.vjp: from a cotangent of {self._rest[1]} to gradients of {_arguments(self._rest[0])}>"

    def __call__(self, *cotangents: Any) -> tuple[Any, ...]:
        """A tuple of one pulled-back cotangent for each selected primal, in the shape of its gradient."""
        forms, output, inside = self._rest
        if len(cotangents) != 1:
            raise ArgumentError(
                f"The function that `vjp` returns takes one cotangent, and got {len(cotangents)}.",
                "Expected a tree in the structure of the output.",
                fix="if the output is a tuple, give a tuple: pull((a, b)).",
            )
        leaves, treedef = jax.tree.flatten(cotangents[0])
        if not alike(treedef, output):
            raise PartsError(
                "The cotangent has a different structure from the output of the function.",
                f"Expected {output}, got {treedef}.",
                fix="give a tree like the value, with a cotangent in the place of every array.",
            )
        return shaped(forms, self._function(inside.unflatten(leaves))[0])


@jax.tree_util.register_pytree_node_class
class LinearMap(_OfJax):
    """The derivative along tangents of the selected leaves; a pytree, as JAX's is.

    In addition to JAX's function, it has the shapes of the gradients, and the level at which marks are open in its
    results; 0 if none is.
    """

    def __repr__(self) -> str:
        return f"<partgrad.linearize: a linear map of tangents of {_arguments(self._rest[0])}>"

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
    has_aux: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> tuple[R, R]: ...


@overload
def jvp(
    f: Callable[..., tuple[R, A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[R, R, A]: ...


def jvp(
    f: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    **options: Any,
) -> Any:
    """Compute the value of a function and its derivative along a direction (forward mode).

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        primals: The arguments of `f`.
        tangents: The direction, one tree for each selected primal, in the shape of its gradient: the selected part, or
            the tree with None at every leaf that is not selected.
        wrt: None for every primal, one selector for the first primal (the others are then constants), or a tuple of
            selectors, one for each primal. With `argnums` or `argnames`, as in `grad`.
        argnums: The position or positions of the selected primals.
        argnames: Their names.
        has_aux: As in `jax.jvp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.
        **options: Other options of `jax.jvp`.

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
        >>> print(pg.jvp(f, ({"a": 3.0, "n": 1}, 2.0), (1.0,), argnums=1))
        (Array(18., dtype=float32, weak_type=True), Array(9., dtype=float32, weak_type=True))
    """
    targets, function, leaves, options = _called(
        "jvp", f, primals, has_aux, wrt, argnums, argnames, double_where, **options
    )
    return function.closed(jax.jvp(function, (leaves,), (_directions(targets, tangents),), has_aux=has_aux, **options))


@overload
def vjp(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> tuple[R, Pullback]: ...


@overload
def vjp(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    has_aux: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[R, Pullback, A]: ...


def vjp(
    f: Any,
    *primals: *Primals,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    **options: Any,
) -> Any:
    """Compute the value of a function, and a function that maps cotangents back to the selected leaves (reverse mode).

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        argnums: As in `jvp`.
        argnames: As in `jvp`.
        has_aux: As in `jax.vjp`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.
        **options: Other options of `jax.vjp`. Trees of bools among them are prefixes of the primals.

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
    targets, function, leaves, options = _called(
        "vjp", f, primals, has_aux, wrt, argnums, argnames, double_where, **options
    )
    value, pull, *aux = jax.vjp(function, leaves, has_aux=has_aux, **options)
    inside = jax.tree.structure(value)
    value, *aux = function.closed((value, *aux))
    return value, Pullback(pull, forms_of(targets), jax.tree.structure(value), inside), *aux


@overload
def linearize(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> tuple[R, LinearMap]: ...


@overload
def linearize(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    has_aux: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[R, LinearMap, A]: ...


def linearize(
    f: Any,
    *primals: *Primals,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    **options: Any,
) -> Any:
    """Compute the value of a function and its linear approximation in the selected leaves, to apply to many directions.

    Args:
        f: A function from the primals, any pytrees, to any pytree of arrays.
        *primals: The arguments of `f`.
        wrt: As in `jvp`.
        argnums: As in `jvp`.
        argnames: As in `jvp`.
        has_aux: As in `jax.linearize`.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.
        **options: Other options of `jax.linearize`. Trees of bools among them are prefixes of the primals.

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
    targets, function, leaves, options = _called(
        "linearize", f, primals, has_aux, wrt, argnums, argnames, double_where, **options
    )
    value, linear, *aux = jax.linearize(function, leaves, has_aux=has_aux, **options)
    value, *aux = function.closed((value, *aux))
    return value, LinearMap(linear, forms_of(targets), function.level), *aux
