"""grad and value_and_grad: put the selected leaves in, and take their derivatives out.

Everything that is not selected is a constant that the differentiated function closes over, so transforms outside still
see it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax

from .._message import listed
from .._selection import Selector
from ..errors import ArgumentError, SelectionError
from .arguments import (
    Argnames,
    Argnums,
    Arguments,
    F,
    GradOptions,
    NonFinite,
    Unused,
    dressed,
    paths,
    refuse_no_function,
)
from .of_selected import of_selected

P = ParamSpec("P")
R = TypeVar("R")


@overload
def grad(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[GradOptions]) -> Callable[P, Any]: ...


@overload
def grad(
    f: None = None, wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def grad(
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
) -> Any:
    """Create a function that computes the gradient of `f` with respect to the selected leaves of an argument.

    It is `jax.grad` with a selector. Leaves that are not selected are constants of this differentiation only; an
    enclosing transform still sees them. Leaves held by a mark (`NonDiff`) take part only if `wrt` names them.

    Args:
        f: A function from any pytrees to a real scalar (with `has_aux`, to a pair of the scalar and auxiliary data).
        wrt: A selector: a callable on the argument (`lambda k: k.variance`), a path or glob
            (`"kernels[0].variance"`), a class, a mask, or a `Selection`. None selects every floating or complex leaf
            that no mark holds. With several arguments, a tuple of selectors. `partgrad.intermediate("h")` selects a
            value inside the function instead.
        argnums: The positional argument or arguments to differentiate; by default the first, unless `argnames` is
            given.
        argnames: The name or names of the arguments to differentiate, keyword arguments included. A single string gives
            a single gradient, as an int does.
        has_aux: As in `jax.grad`.
        holomorphic: As in `jax.grad`.
        unused: What to do about selected leaves that the output cannot depend on, found by tracing: `"zero"` gives
            JAX's zero gradient, `"none"` gives None, `"error"` raises and names them. A leaf that only passes through
            `stop_gradient` counts as unused.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.
        nonfinite: `"report"` keeps the arguments of the first gradient that is not finite on the host, and says so on
            standard error; `partgrad.last_nonfinite` returns them. While all is well nothing is kept and, under
            `jit`, nothing is moved; outside of it, each call waits for one bool.

    Returns:
        A plain Python function with the same arguments that returns the gradient. If `wrt` names a part, the gradient
        has the shape of that part; otherwise it is the argument's tree with None at every leaf that was not
        differentiated. The gradient of a leaf has the leaf's shape and dtype. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not fit together, or do not fit the function.

    Example:
        >>> import partgrad as pg
        >>> def loss(model, x):
        ...     return model["w"] * x + model["b"] ** 2
        >>> pg.grad(loss)({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        {'b': Array(6., dtype=float32, weak_type=True), 'count': None, 'w': Array(5., dtype=float32, weak_type=True)}
        >>> pg.grad(loss, wrt="b")({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        Array(6., dtype=float32, weak_type=True)
        >>> pg.grad(loss, argnames="x")({"w": 2.0, "b": 3.0}, x=5.0)
        Array(2., dtype=float32, weak_type=True)
    """
    if f is None:
        options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
        options |= {"unused": unused, "nonfinite": nonfinite}
        return functools.partial(grad, wrt=wrt, argnums=argnums, argnames=argnames, **options)
    refuse_no_function("grad", f)
    both = _value_and_grad(Arguments(f, wrt, argnums, argnames, double_where), has_aux, holomorphic, unused, nonfinite)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return dressed("grad", f, "Gradient", gradient)


@overload
def value_and_grad(
    f: Callable[P, R], wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[P, tuple[R, Any]]: ...


@overload
def value_and_grad(
    f: None = None, wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...


def value_and_grad(
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
) -> Any:
    """Create a function that computes `f` and its gradient with respect to the selected leaves of an argument.

    Args:
        f: As in `grad`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.value_and_grad`.
        holomorphic: As in `jax.value_and_grad`.
        unused: As in `grad`.
        double_where: As in `grad`.
        nonfinite: As in `grad`.

    Returns:
        A plain Python function with the same arguments that returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not fit together, or do not fit the function.

    Example:
        >>> import partgrad as pg
        >>> value, gradient = pg.value_and_grad(lambda p: p["a"] * p["b"], wrt="a")({"a": 2.0, "b": 3.0})
        >>> print(value, gradient)
        6.0 3.0
    """
    if f is None:
        options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
        options |= {"unused": unused, "nonfinite": nonfinite}
        return functools.partial(value_and_grad, wrt=wrt, argnums=argnums, argnames=argnames, **options)
    refuse_no_function("value_and_grad", f)
    both = _value_and_grad(Arguments(f, wrt, argnums, argnames, double_where), has_aux, holomorphic, unused, nonfinite)
    return dressed("value_and_grad", f, "Value and gradient", both)


def _value_and_grad(arguments: Arguments, has_aux: bool, holomorphic: bool, unused: str, nonfinite: str) -> F:
    if unused not in ("zero", "none", "error"):
        raise ArgumentError(
            f"`unused` is {unused!r}.",
            "Expected 'zero', 'none' or 'error'.",
            fix="omit it for JAX's zeros, or write unused='error' to be told what the output cannot depend on.",
        )

    if nonfinite not in ("ignore", "report"):
        raise ArgumentError(
            f"`nonfinite` is {nonfinite!r}.",
            "Expected 'ignore' or 'report'.",
            fix="omit it, or write nonfinite='report' to keep the arguments of the first gradient that is not finite.",
        )

    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        call = arguments.call(args, kwargs)
        function, leaves = of_selected(call, has_aux)
        used = None if unused == "zero" else _used(function.without_aux(has_aux), leaves)
        if used is not None and unused == "error" and not all(used):
            raise _unused(path for path, flag in zip(paths(call.targets), used, strict=True) if not flag)
        try:
            value, gradients = _by_jax(function, leaves, has_aux, holomorphic)
        except (TypeError, ValueError) as error:
            # The backward pass of a `custom_vjp` runs after the function has returned.
            function.annotate(error)
            raise
        if nonfinite == "report":
            _watch(call, function, leaves, gradients, has_aux)
        if used is not None:
            gradients = [gradient if flag else None for gradient, flag in zip(gradients, used, strict=True)]
        return function.closed(value), arguments.shaped(call.targets, gradients)

    return value_and_grad


def _used(function: F, leaves: list[Any]) -> list[bool]:
    # Importing it takes longer than importing everything that `grad` needs.
    from .unused import used_leaves

    return used_leaves(function, leaves)


def _watch(*given: Any) -> None:
    # Not every program needs it.
    from .nonfinite import watch

    watch(*given)


def _by_jax(function: F, leaves: list[Any], has_aux: bool, holomorphic: bool) -> tuple[Any, list[Any]]:
    """The result of `jax.value_and_grad` without its handling of arguments, which costs as much as a small gradient."""
    if not holomorphic:
        value, pull, *aux = jax.vjp(function, leaves, has_aux=has_aux)
        if _is_real_scalar(value):
            (gradients,) = pull(jax.lax.full_like(value, 1))
            return ((value, *aux) if has_aux else value), gradients
    # JAX has its own error for what cannot be differentiated.
    return jax.value_and_grad(function, has_aux=has_aux, holomorphic=holomorphic)(leaves)


def _is_real_scalar(value: Any) -> bool:
    return (
        isinstance(value, jax.Array)
        and value.shape == ()
        and bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))
    )


def _unused(unused: Iterable[str]) -> SelectionError:
    return SelectionError(
        f"The output cannot depend on {listed(f'`{path}`' for path in unused)}.",
        "Expected a path to the output for every selected leaf; stop_gradient and conversion to int cut paths.",
        fix="select what the function uses, or write unused='none' for None at these leaves.",
    )
