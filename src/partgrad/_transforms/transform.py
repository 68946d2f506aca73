"""grad and its family: put the selected leaves in, take their derivative out.

Everything that is not selected is a constant that the differentiated function closes over, so transforms outside still
see it.
"""

import functools
from collections.abc import Callable
from typing import Any, overload

import jax

from .. import _words as words
from .._double_where import taken_paths
from .._selection import as_selection
from .arguments import Argnames, Argnums, Arguments, Call, F
from .unused import used_leaves


def _named(transform: str, f: F, title: str, implementation: F) -> F:
    """Dress a transformed function as a plain Python function with the name and signature of the original."""
    # Not `__dict__`: a model with __call__ keeps its parameters there.
    wrapped = functools.wraps(f, updated=())(implementation)
    name = getattr(f, "__name__", type(f).__name__)
    wrapped.__name__ = name if hasattr(f, "__name__") else f"{transform}_{name}"
    wrapped.__doc__ = f"{title} of `{name}`.\n\n{getattr(f, '__doc__', None) or ''}".rstrip()
    return wrapped


def _refuse_uncallable(transform: str, f: Any) -> None:
    if not callable(f):
        raise words.not_a_function(transform, f)


def _value_and_grad(f: F, arguments: Arguments, unused: str, has_aux: bool, holomorphic: bool, double_where: bool) -> F:
    taken = taken_paths(f, double_where)
    if unused not in ("zero", "none", "error"):
        raise words.unused_option(unused)

    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        call = arguments.on(args, kwargs)
        call.refuse_empty()
        of_selected = call.of_selected(taken)
        used = None if unused == "zero" else _used(of_selected, call, has_aux)
        if used is not None and unused == "error" and not all(map(all, used)):
            raise words.unused_leaves(call.paths_where(used, False))
        transformed = jax.value_and_grad(of_selected, has_aux=has_aux, holomorphic=holomorphic)
        value, gradients = transformed(call.selected)
        if used is not None:
            gradients = jax.tree.map(lambda gradient, flag: gradient if flag else None, gradients, used)
        shaped = call.shaped(gradients)
        return value, shaped if arguments.several else shaped[0]

    return value_and_grad


def _used(of_selected: F, call: Call, has_aux: bool) -> list[list[bool]]:
    """Which differentiated leaves of each argument the output can depend on."""
    leaves, structure = jax.tree.flatten(call.selected)
    flags = used_leaves(lambda flat: of_selected(structure.unflatten(flat)), leaves, has_aux=has_aux)
    return structure.unflatten(flags)


def _jacobian(
    name: str, order: int, f: F, arguments: Arguments, has_aux: bool, holomorphic: bool, double_where: bool
) -> F:
    """A Jacobian (order 1) or a Hessian (order 2) by the transform of JAX of that name."""
    _refuse_uncallable(name, f)
    taken = taken_paths(f, double_where)

    def shaped(call: Any, values: list[list[Any]], order: int) -> Any:
        if order == 2:
            values = [[shaped(call, inner, 1) for inner in row] for row in values]
        parts = call.shaped(values)
        return parts if arguments.several else parts[0]

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        call = arguments.on(args, kwargs)
        call.refuse_empty()
        of_selected, structures = call.of_selected(taken), []

        def observed(selected: list[list[Any]]) -> Any:
            output = of_selected(selected)
            structures.append(jax.tree.structure(output[0] if has_aux else output))
            return output

        result = getattr(jax, name)(observed, has_aux=has_aux, holomorphic=holomorphic)(call.selected)
        derivative = result[0] if has_aux else result
        outputs = structures[-1].flatten_up_to(derivative)
        derivative = structures[-1].unflatten([shaped(call, values, order) for values in outputs])
        return (derivative, result[1]) if has_aux else derivative

    return _named(name, f, "Hessian" if order == 2 else "Jacobian", jacobian)


@overload
def grad(
    f: F,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> F: ...


@overload
def grad(
    *,
    wrt: Any = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> Callable[[F], F]: ...


def grad(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> Any:
    """The gradient of a function with respect to the selected leaves of an argument.

    `jax.grad` with one more word. Leaves that are not selected are constants of this differentiation only; an enclosing
    transform still sees them. Leaves held by a mark (`NonDiff`) take part only if `wrt` names them.

    Args:
        f: A function of any pytrees to a real scalar (or to a pair of it and auxiliary data, with `has_aux`).
        wrt: A selector: a callable on the argument (`lambda k: k.variance`), a path or glob
            (`"kernels[0].variance"`), a class, a mask, or a `Selection`. None selects every floating or complex leaf
            that no mark holds. With several arguments, a tuple of selectors.
        argnums: Which positional argument to differentiate, or several; the first, unless `argnames` is given.
        argnames: The name of the argument to differentiate, or several; keyword arguments too. One string alone gives
            one gradient, as an int does.
        has_aux: As in `jax.grad`.
        holomorphic: As in `jax.grad`.
        unused: What to do about selected leaves that the output cannot depend on, found by tracing: `"zero"` is JAX's
            gradient, `"none"` puts None there, `"error"` raises and names them. `stop_gradient` counts as unused.
        double_where: Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.

    Returns:
        A plain Python function of the same arguments that returns the gradient: in the shape of the part, if `wrt`
        names a part; else the tree of the argument with None at every leaf that was not differentiated. A leaf's
        gradient has its shape and dtype. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not go together, or with the function.

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
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
    if f is None:
        return functools.partial(grad, wrt=wrt, argnums=argnums, argnames=argnames, unused=unused, **options)
    _refuse_uncallable("grad", f)
    both = _value_and_grad(f, Arguments(f, wrt, argnums, argnames), unused=unused, **options)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return _named("grad", f, "Gradient", gradient)


@overload
def value_and_grad(
    f: F,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> F: ...


@overload
def value_and_grad(
    *,
    wrt: Any = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> Callable[[F], F]: ...


def value_and_grad(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    unused: str = "zero",
    double_where: bool = False,
) -> Any:
    """The value of a function and its gradient with respect to the selected leaves of an argument.

    Args:
        f: As in `grad`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.value_and_grad`.
        holomorphic: As in `jax.value_and_grad`.
        unused: As in `grad`.
        double_where: As in `grad`.

    Returns:
        A plain Python function of the same arguments that returns `(value, gradient)`, or
        `((value, aux), gradient)` with `has_aux`. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not go together, or with the function.

    Example:
        >>> import partgrad as pg
        >>> value, gradient = pg.value_and_grad(lambda p: p["a"] * p["b"], wrt="a")({"a": 2.0, "b": 3.0})
        >>> print(value, gradient)
        6.0 3.0
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
    if f is None:
        return functools.partial(value_and_grad, wrt=wrt, argnums=argnums, argnames=argnames, unused=unused, **options)
    _refuse_uncallable("value_and_grad", f)
    both = _value_and_grad(f, Arguments(f, wrt, argnums, argnames), unused=unused, **options)
    return _named("value_and_grad", f, "Value and gradient", both)


def jacfwd(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
) -> Any:
    """The Jacobian of a function with respect to the selected leaves, column by column (forward mode).

    Args:
        f: A function of any pytrees to any pytree of arrays.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.jacfwd`.
        holomorphic: As in `jax.jacfwd`.
        double_where: As in `grad`.

    Returns:
        A function of the same arguments that returns the tree of the output with, in the place of each array, the
        derivatives of that array in the shape of the gradient. An entry has the shape of the output array followed by
        that of the leaf. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not go together, or with the function.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> jacobian = pg.jacfwd(lambda p: p["a"] * jnp.arange(3.0), wrt="a")
        >>> print(jacobian({"a": 2.0, "n": 1}))
        [0. 1. 2.]
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
    if f is None:
        return functools.partial(jacfwd, wrt=wrt, argnums=argnums, argnames=argnames, **options)
    return _jacobian("jacfwd", 1, f, Arguments(f, wrt, argnums, argnames), **options)


def jacrev(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
) -> Any:
    """The Jacobian of a function with respect to the selected leaves, row by row (reverse mode).

    Args:
        f: As in `jacfwd`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.jacrev`.
        holomorphic: As in `jax.jacrev`.
        double_where: As in `grad`.

    Returns:
        As `jacfwd`.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not go together, or with the function.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> print(pg.jacrev(lambda p: {"y": p["a"] * jnp.arange(3.0)})({"a": 2.0, "n": 1})["y"]["a"])
        [0. 1. 2.]
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
    if f is None:
        return functools.partial(jacrev, wrt=wrt, argnums=argnums, argnames=argnames, **options)
    return _jacobian("jacrev", 1, f, Arguments(f, wrt, argnums, argnames), **options)


jacobian = jacrev


def hessian(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    double_where: bool = False,
) -> Any:
    """The second derivatives of a function with respect to the selected leaves (forward over reverse).

    Args:
        f: As in `jacfwd`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        argnames: As in `grad`.
        has_aux: As in `jax.hessian`.
        holomorphic: As in `jax.hessian`.
        double_where: As in `grad`.

    Returns:
        A function of the same arguments that returns, for each array of the output, a tree in the shape of the gradient
        of trees in the shape of the gradient: `hessian["a"]["b"]`. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt`, `argnums` and `argnames` do not go together, or with the function.

    Example:
        >>> import partgrad as pg
        >>> second = pg.hessian(lambda p: p["a"] ** 2 * p["b"])({"a": 2.0, "b": 3.0, "n": 1})
        >>> print(second["a"]["a"], second["a"]["b"], second["a"]["n"])
        6.0 4.0 None
    """
    options: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic, "double_where": double_where}
    if f is None:
        return functools.partial(hessian, wrt=wrt, argnums=argnums, argnames=argnames, **options)
    return _jacobian("hessian", 2, f, Arguments(f, wrt, argnums, argnames), **options)


def hvp(f: F, wrt: Any = None, *, double_where: bool = False) -> F:
    """The product of a function's Hessian and a vector, without forming the Hessian.

    Args:
        f: A function of any pytrees to a real scalar; the first argument is differentiated.
        wrt: A selector for the first argument.
        double_where: As in `grad`.

    Returns:
        A function `(x, v, *args, **kwargs)` that returns H·v for `f(x, *args, **kwargs)`. Both `v` and the result have
        the shape of the gradient.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        PartsError: When called, if `v` has another shape than the gradient.

    Example:
        >>> import partgrad as pg
        >>> product = pg.hvp(lambda p: p["a"] ** 2 * p["b"], wrt=lambda p: (p["a"], p["b"]))
        >>> a, b = product({"a": 2.0, "b": 3.0, "n": 1}, (1.0, 0.0))
        >>> print(a, b)
        6.0 4.0
    """
    _refuse_uncallable("hvp", f)
    arguments, taken = Arguments(f, as_selection(wrt), None, None), taken_paths(f, double_where)

    def product(x: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        call = arguments.on((x, *args), kwargs)
        call.refuse_empty()
        direction = [call.targets[0].values(v, "The vector of `hvp`")]
        _, along = jax.jvp(jax.grad(call.of_selected(taken)), (call.selected,), (direction,))
        return call.shaped(along)[0]

    return product
