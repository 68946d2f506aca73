"""Jacobians, Hessians and their products with vectors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

import jax

from .._selection import Selector, Target
from .arguments import (
    Argnames,
    Argnums,
    Arguments,
    F,
    JacobianOptions,
    described,
    dressed,
    refuse_no_function,
)
from .of_selected import of_selected
from .pieces import IN_PIECES, checked_chunk_size

P = ParamSpec("P")
X = TypeVar("X")


@overload
def jacfwd(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def jacfwd(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def jacfwd(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Jacobian of `f` with respect to the selected leaves, in forward mode.

    Args:
        f: A function from any pytrees to any pytree of arrays.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.jacfwd`.
        holomorphic: As in `jax.jacfwd`.
        double_where: As in `grad`.
        chunk_size: How many columns to compute at once, one after another by `lax.map`, so that the temporaries are
            those of so many columns. None computes all of them at once, as JAX does.

    Returns:
        A function with the same arguments that returns the output's tree, with each array replaced by its derivatives
        in the shape of the gradient. Each derivative has the shape of the output array followed by that of the leaf.
        Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not fit together, or do not fit the function; if
            `chunk_size` is not a positive integer.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> jacobian = pg.jacfwd(lambda p: p["a"] * jnp.arange(3.0), wrt="a")
        >>> print(jacobian({"a": 2.0, "n": 1}))
        [0. 1. 2.]
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic}
    options |= {"double_where": double_where, "chunk_size": checked_chunk_size(chunk_size)}
    return _jacobian(jacfwd, f, wrt=wrt, argnums=argnums, argnames=argnames, **options)


@overload
def jacrev(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def jacrev(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def jacrev(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Jacobian of `f` with respect to the selected leaves, in reverse mode.

    Args:
        f: As in `jacfwd`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.jacrev`.
        holomorphic: As in `jax.jacrev`.
        double_where: As in `grad`.
        chunk_size: As in `jacfwd`, of rows.

    Returns:
        As `jacfwd`.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not fit together, or do not fit the function; if
            `chunk_size` is not a positive integer.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> print(pg.jacrev(lambda p: {"y": p["a"] * jnp.arange(3.0)})({"a": 2.0, "n": 1})["y"]["a"])
        [0. 1. 2.]
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic}
    options |= {"double_where": double_where, "chunk_size": checked_chunk_size(chunk_size)}
    return _jacobian(jacrev, f, wrt=wrt, argnums=argnums, argnames=argnames, **options)


jacobian = jacrev


@overload
def hessian(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def hessian(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def hessian(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Hessian of `f` with respect to the selected leaves (forward over reverse).

    Args:
        f: As in `jacfwd`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.hessian`.
        holomorphic: As in `jax.hessian`.
        double_where: As in `grad`.
        chunk_size: As in `jacfwd`.

    Returns:
        A function with the same arguments that returns, for each array of the output, a tree of trees, both in the
        shape of the gradient (`hessian["a"]["b"]`). Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not fit together, or do not fit the function; if
            `chunk_size` is not a positive integer.

    Example:
        >>> import partgrad as pg
        >>> second = pg.hessian(lambda p: p["a"] ** 2 * p["b"])({"a": 2.0, "b": 3.0, "n": 1})
        >>> print(second["a"]["a"], second["a"]["b"], second["a"]["n"])
        6.0 4.0 None
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic}
    options |= {"double_where": double_where, "chunk_size": checked_chunk_size(chunk_size)}
    return _jacobian(hessian, f, wrt=wrt, argnums=argnums, argnames=argnames, **options)


def _jacobian(transform: Any, f: F | None, **options: Any) -> F:
    """A Jacobian or a Hessian, by JAX's transform of the same name; without a function, a decorator."""
    if f is None:
        return functools.partial(transform, **options)
    refuse_no_function(transform.__name__, f)
    return _jacobian_of(f, transform.__name__, **options)


def _jacobian_of(
    f: F,
    name: str,
    wrt: Any,
    argnums: Argnums,
    argnames: Argnames,
    has_aux: bool,
    holomorphic: bool,
    double_where: bool,
    chunk_size: int | None,
) -> F:
    arguments, is_hessian = Arguments(f, wrt, argnums, argnames, double_where), name == "hessian"

    def shaped(targets: Sequence[Target], values: Sequence[Any]) -> Any:
        if is_hessian:
            values = [arguments.shaped(targets, row) for row in values]
        return arguments.shaped(targets, values)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        call = arguments.call(args, kwargs)
        function, leaves = of_selected(call, has_aux)
        treedefs = []

        def observed(values: list[Any]) -> Any:
            output = function(values)
            treedefs.append(jax.tree.structure(output[0] if has_aux else output))
            return output

        try:
            if chunk_size is None:
                result = getattr(jax, name)(observed, has_aux=has_aux, holomorphic=holomorphic)(leaves)
            else:
                result = IN_PIECES[name](observed, leaves, chunk_size, has_aux=has_aux, holomorphic=holomorphic)
        except (TypeError, ValueError) as error:
            function.annotate(error)
            raise
        derivative = result[0] if has_aux else result
        outputs = treedefs[-1].flatten_up_to(derivative)
        treedef = function.closed_treedef(treedefs[-1])
        derivative = treedef.unflatten([shaped(call.targets, values) for values in outputs])
        return (derivative, function.closed(result[1])) if has_aux else derivative

    return dressed(name, f, "Hessian" if is_hessian else "Jacobian", jacobian)


def hvp(
    f: Callable[Concatenate[X, P], Any],
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    double_where: bool = False,
) -> Callable[Concatenate[X, Any, P], Any]:
    """Create a function that multiplies the Hessian of `f` by a vector, without forming the Hessian.

    Args:
        f: A function from any pytrees to a real scalar.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        double_where: As in `grad`.

    Returns:
        A function `(x, v, *args, **kwargs)` that returns H·v for `f(x, *args, **kwargs)`. Both `v` and the result have
        the shape of the gradient, a tuple for several arguments.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        PartsError: When called, if `v` does not have the shape of the gradient.

    Example:
        >>> import partgrad as pg
        >>> product = pg.hvp(lambda p: p["a"] ** 2 * p["b"], wrt=lambda p: (p["a"], p["b"]))
        >>> a, b = product({"a": 2.0, "b": 3.0, "n": 1}, (1.0, 0.0))
        >>> print(a, b)
        6.0 4.0
    """
    refuse_no_function("hvp", f)
    arguments = Arguments(f, wrt, argnums, argnames, double_where)

    # Positional only: `f` may have parameters of these names.
    def product(x: X, v: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        call = arguments.call((x, *args), kwargs)
        vectors = arguments.each(v, "The vector of `hvp`")
        direction = [
            value
            for target, vector in zip(call.targets, vectors, strict=True)
            for value in target.values(vector, "The vector of `hvp`")
        ]
        function, leaves = of_selected(call)
        _, along = jax.jvp(jax.grad(function), (leaves,), (direction,))
        return arguments.shaped(call.targets, along)

    return described("hvp", f, product)
