"""grad and value_and_grad: put the selected leaves in, and take their derivatives out.

Everything that is not selected is a constant that the differentiated function closes over, so transforms outside still
see it.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax

from .._selection import Selector
from .arguments import Argnames, Argnums, F
from .call import Call
from .options import GradOptions, NonFinite, Unused, documented
from .state import write_back
from .transform import Derivative, Shaped, transform, without_value

P = ParamSpec("P")
R = TypeVar("R")


@overload
def grad(f: Callable[P, Any], wrt: Selector = None, **options: Unpack[GradOptions]) -> Callable[P, Any]: ...


@overload
def grad(
    f: None = None, wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


@documented(f="A function from any pytrees to a real scalar (with `has_aux`, to a pair of the scalar and other data).")
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
    dtype: Any = None,
) -> Any:
    """Create a function that computes the gradient of `f` with respect to the selected leaves of an argument.

    It is `jax.grad` with a selector. `pg.grad(f, wrt=w)(m)` is `jax.grad(lambda s: f(pg.combine(s, rest)))(s)` with
    `s, rest = pg.partition(m, w)`, in the shape of what `w` names, except that `f` sees the marks of `m` as they are.
    Leaves that are not selected are constants of this differentiation only; an enclosing transform still sees them.
    Leaves held by a mark (`NonDiff`) take part only if `wrt` names them. A callable that fits the argument itself names
    a part of it, and otherwise describes leaves of the nodes that it fits: `lambda m: m.variance` changes its meaning
    if the model gains a field `variance`, and `partgrad.each(lambda m: m.variance)` does not.

    Returns:
        A plain Python function with the same arguments that returns the gradient. If `wrt` names a part, the gradient
        has the shape of that part; otherwise it is the argument's tree with None at every leaf that was not
        differentiated. The gradient of a leaf has the leaf's shape and, without `dtype`, its dtype. Without `f`, a
        decorator.

    Example:
        >>> import partgrad as pg
        >>> def loss(model, x):
        ...     return model["w"] * x + model["b"] ** 2
        >>> pg.grad(loss)({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        {'b': Array(6., dtype=float32, weak_type=True), 'count': None, 'w': Array(5., dtype=float32, weak_type=True)}
        >>> pg.grad(loss, wrt="b")({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        Array(6., dtype=float32, weak_type=True)
        >>> print(pg.grad(loss, wrt={"slope": "w", "offset": "b"})({"w": 2.0, "b": 3.0}, 5.0)["slope"])
        5.0
        >>> pg.grad(loss, argnames="x")({"w": 2.0, "b": 3.0}, x=5.0)
        Array(2., dtype=float32, weak_type=True)

    See Also:
        `value_and_grad`; `partition` and `combine`, for transforms of other libraries; `check`, to test a gradient.
    """
    return transform(grad, _gradient, "Gradient", without_value, locals())


@overload
def value_and_grad(
    f: Callable[P, R], wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[P, tuple[R, Any]]: ...


@overload
def value_and_grad(
    f: None = None, wrt: Selector = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, Any]]]: ...


@documented(f="A function from any pytrees to a real scalar (with `has_aux`, to a pair of the scalar and other data).")
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
    dtype: Any = None,
) -> Any:
    """Create a function that computes `f` and its gradient with respect to the selected leaves of an argument.

    Returns:
        A plain Python function with the same arguments that returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`; the gradient is that of `grad`. Without `f`, a decorator.

    Example:
        >>> import partgrad as pg
        >>> value, gradient = pg.value_and_grad(lambda p: p["a"] * p["b"], wrt="a")({"a": 2.0, "b": 3.0})
        >>> print(value, gradient)
        6.0 3.0

    See Also:
        `grad`; `apply_updates`, for a step with the gradient.
    """
    return transform(value_and_grad, _gradient, "Value and gradient", _with_value, locals())


def _with_value(found: Derivative, has_aux: bool) -> Any:
    return ((found.value, found.aux) if has_aux else found.value), found.derivative


def _gradient(
    call: Call, leaves: list[Any], shaped: Shaped, has_aux: bool, holomorphic: bool, dtype: Any
) -> Derivative:
    def differentiated(function: F, has_aux: bool) -> tuple[Any, list[Any]]:
        if dtype is None:
            return _by_jax(function, leaves, has_aux, holomorphic)
        # Importing it takes longer than importing everything that `grad` needs.
        from .precision import in_precision

        return _by_jax(*in_precision(function, leaves, dtype), has_aux, holomorphic)

    if call.may_change:
        (value, (aux, changes)), gradients = differentiated(call.with_changes(has_aux), True)
        write_back(call.targets, changes)
        value = (value, aux) if has_aux else value
    else:
        value, gradients = differentiated(call, has_aux)
    value = call.closed(value) if call.level else value
    return Derivative(shaped(gradients), *(value if has_aux else (value,)))


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
