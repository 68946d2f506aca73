"""Jacobians, Hessians and their products with vectors."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

import jax

from .._selection import Selector
from .arguments import Argnames, Argnums
from .call import Call, first_of_pair, refuse_other_kinds
from .options import JacobianOptions, NonFinite, ProductOptions, Unused, documented, refuse_options
from .pieces import IN_PIECES
from .transform import Derivative, Shaped, derivative_of, described, transform, without_value

P = ParamSpec("P")
X = TypeVar("X")


@overload
def jacfwd(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def jacfwd(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


@documented()
def jacfwd(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: Unused = "zero",
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Jacobian of `f` with respect to the selected leaves, in forward mode.

    Returns:
        A function with the same arguments that returns the output's tree, with each array replaced by its derivatives
        in the shape of the gradient, as `grad` has it. Each derivative has the shape of the output array followed by
        that of the leaf. Without `f`, a decorator.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> jacobian = pg.jacfwd(lambda p: p["a"] * jnp.arange(3.0), wrt="a")
        >>> print(jacobian({"a": 2.0, "n": 1}))
        [0. 1. 2.]

    See Also:
        `jacrev`, which costs less where there are fewer outputs than selected numbers; `jvp`, for one direction.
    """
    return transform(jacfwd, functools.partial(_jacobian, name="jacfwd"), "Jacobian", without_value, locals())


@overload
def jacrev(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def jacrev(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


@documented()
def jacrev(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: Unused = "zero",
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Jacobian of `f` with respect to the selected leaves, in reverse mode.

    Returns:
        A function with the same arguments that returns the output's tree, with each array replaced by its derivatives
        in the shape of the gradient, as `grad` has it. Each derivative has the shape of the output array followed by
        that of the leaf. Without `f`, a decorator.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> print(pg.jacrev(lambda p: {"y": p["a"] * jnp.arange(3.0)})({"a": 2.0, "n": 1})["y"]["a"])
        [0. 1. 2.]

    See Also:
        `jacfwd`, which costs less where there are fewer selected numbers than outputs; `vjp`, for one cotangent.
    """
    return transform(jacrev, functools.partial(_jacobian, name="jacrev"), "Jacobian", without_value, locals())


jacobian = jacrev


@overload
def hessian(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[JacobianOptions]) -> Callable[P, Any]: ...


@overload
def hessian(
    f: None = None, wrt: Selector = None, **options: Unpack[JacobianOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


@documented()
def hessian(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: Unused = "zero",
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    chunk_size: int | None = None,
) -> Any:
    """Create a function that computes the Hessian of `f` with respect to the selected leaves (forward over reverse).

    Returns:
        A function with the same arguments that returns, for each array of the output, a tree of trees, both in the
        shape of the gradient (`hessian["a"]["b"]`). Without `f`, a decorator.

    Example:
        >>> import partgrad as pg
        >>> second = pg.hessian(lambda p: p["a"] ** 2 * p["b"])({"a": 2.0, "b": 3.0, "n": 1})
        >>> print(second["a"]["a"], second["a"]["b"], second["a"]["n"])
        6.0 4.0 None

    See Also:
        `hvp`, for the product with a vector; `ravel`, for the Hessian as one matrix.
    """
    return transform(hessian, functools.partial(_jacobian, name="hessian"), "Hessian", without_value, locals())


def _jacobian(
    call: Call,
    leaves: list[Any],
    shaped: Shaped,
    name: str,
    has_aux: bool,
    holomorphic: bool,
    chunk_size: int | None,
) -> Derivative:
    """A Jacobian or a Hessian, by JAX's transform of the same name, which needs an input."""
    if not leaves:
        output = call(leaves)
        value, aux = (first_of_pair(output), output[1]) if has_aux else (output, None)
        return Derivative(jax.tree.map(lambda _: shaped([]), call.closed(value)), aux=call.closed(aux))
    treedefs = []

    def observed(values: list[Any]) -> Any:
        output = call(values)
        treedefs.append(jax.tree.structure(output[0] if has_aux else output))
        return output

    options: Any = {"has_aux": has_aux, "holomorphic": holomorphic}
    if chunk_size is None:
        result = getattr(jax, name)(observed, **options)(leaves)
    else:
        result = IN_PIECES[name](observed, leaves, int(chunk_size), **options)
    derivative, aux = result if has_aux else (result, None)
    outputs = treedefs[-1].flatten_up_to(derivative)
    if name == "hessian":
        outputs = [[shaped(row) for row in rows] for rows in outputs]
    treedef = call.closed_treedef(treedefs[-1])
    return Derivative(treedef.unflatten([shaped(values) for values in outputs]), aux=call.closed(aux))


@overload
def hvp(
    f: Callable[Concatenate[X, P], Any], wrt: Selector = None, **options: Unpack[ProductOptions]
) -> Callable[Concatenate[X, Any, P], Any]: ...


@overload
def hvp(
    f: None = None, wrt: Selector = None, **options: Unpack[ProductOptions]
) -> Callable[[Callable[Concatenate[X, P], Any]], Callable[Concatenate[X, Any, P], Any]]: ...


@documented(f="A function from any pytrees to a real scalar (with `has_aux`, to a pair of the scalar and other data).")
def hvp(
    f: Any = None,
    wrt: Selector = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    unused: Unused = "zero",
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
) -> Any:
    """Create a function that multiplies the Hessian of `f` by a vector, without forming the Hessian.

    Returns:
        A function `(x, v, *args, **kwargs)` that returns H·v for `f(x, *args, **kwargs)`, with `has_aux` in a pair with
        the auxiliary data. Both `v` and H·v have the shape of the gradient, as `grad` has it: a tuple for several
        arguments. Without `f`, a decorator.

    Example:
        >>> import partgrad as pg
        >>> product = pg.hvp(lambda p: p["a"] ** 2 * p["b"], wrt=lambda p: (p["a"], p["b"]))
        >>> a, b = product({"a": 2.0, "b": 3.0, "n": 1}, (1.0, 0.0))
        >>> print(a, b)
        6.0 4.0

    See Also:
        `hessian`, for the whole matrix.
    """
    given = locals()
    refuse_options(given)
    del given["f"]
    if f is None:
        return functools.partial(hvp, **given)
    derivative = derivative_of("hvp", f, _product, given)

    # Positional only: `f` may have parameters of these names.
    def product(x: Any, v: Any, /, *args: Any, **kwargs: Any) -> Any:
        return without_value(derivative((x, *args), kwargs, v), has_aux)

    return described("hvp", f, product)


def _product(call: Call, leaves: list[Any], shaped: Shaped, vector: Any, has_aux: bool) -> Derivative:
    direction = call.shape.values(vector, "vector")
    refuse_other_kinds("vector", call.kinds, direction)
    gradient = jax.grad(call, has_aux=has_aux)
    _, along, *aux = jax.jvp(gradient, (leaves,), (direction,), has_aux=has_aux)
    return Derivative(shaped(along), aux=call.closed(aux[0]) if has_aux else None)
