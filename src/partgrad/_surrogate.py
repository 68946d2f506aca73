"""surrogate: the value of one function with the derivative of another, declared in one place.

The two meet in a primitive of its own. A `jax.custom_jvp` would do the same at first order; but where JAX splits a loop
into what it knows and what it does not, up to 0.10.2, it puts the function in the place of the rule, and a second
derivative of that loop is silently another one.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.jet import jet_rules
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from ._programs import OF_SURROGATE, SURROGATE, running_line, varying_like
from ._trees import describe, dtype_of, flatten, function_name, is_differentiable, refuse_uncallable, shape_of
from .errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


@overload
def surrogate(exact: Callable[P, R], smooth: Callable[P, R]) -> Callable[P, R]: ...
@overload
def surrogate(*, smooth: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def surrogate(exact: Any = None, smooth: Any = None) -> Any:
    """Return a function with the value of `exact` and the derivative of `smooth`.

    A spike, a threshold, a rounding or a change of phase has a derivative of zero almost everywhere, and nothing learns
    through it. A surrogate gradient puts the derivative of a smooth function in its place. The value is that of
    `exact`, bit for bit, and every derivative, in forward and reverse mode and of any order, is that of `smooth` at the
    same arguments; `exact` is never differentiated, and may be what JAX cannot differentiate.

    Both functions run with the same arguments: any number of them, of any pytrees. What they close over counts too.
    `partgrad.check` compares the derivative with differences of `smooth`: if it is right, that is a note, and if it is
    not, an error.

    Args:
        exact: The function whose value counts. Omit it to decorate: `@partgrad.surrogate(smooth=...)`.
        smooth: The function whose derivative counts: of the same arguments, and with results of the same structure,
            shapes and dtypes. Integers among them are those of `exact`.

    Returns:
        A function of the same arguments and results as `exact`; as a decorator, a function that makes it of `exact`.

    Raises:
        ArgumentError: If one of the two is missing or cannot be called; or, when called, if their results differ in
            structure, shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> step = pg.surrogate(lambda v: jnp.where(v > 1.0, 1.0, 0.0), smooth=lambda v: jax.nn.sigmoid(4 * (v - 1.0)))
        >>> print(step(1.5), jax.grad(step)(1.0))
        1.0 1.0
        >>> @pg.surrogate(smooth=lambda x: x)
        ... def quantized(x):
        ...     return jnp.round(x * 8) / 8
        >>> print(jax.value_and_grad(quantized)(0.3))
        (Array(0.25, dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))

    See Also:
        `partgrad.check`, which verifies it; `partgrad.draw`, for what is drawn at random. The method is reviewed by
        E. O. Neftci, H. Mostafa and F. Zenke, IEEE Signal Processing Magazine 36(6), 51-63 (2019).
    """
    if smooth is None:
        raise ArgumentError(
            "`surrogate` has no `smooth`.",
            "Expected a function of the same arguments, whose derivative is to be used.",
            fix="write partgrad.surrogate(exact, smooth=lambda x: x) for a straight-through gradient.",
        )
    if exact is None:
        return functools.partial(surrogate, smooth=smooth)
    for function in (exact, smooth):
        refuse_uncallable(
            "surrogate", function, fix="pass the functions themselves: partgrad.{0}(exact, smooth=smooth)."
        )
    names, site = (_name(exact), _name(smooth)), running_line()

    @functools.wraps(exact, updated=())
    def declared(*args: Any, **kwargs: Any) -> Any:
        # Apart, since an argument may allow a single use.
        with jax.named_scope(OF_SURROGATE):
            stopped = jax.tree.map(_stopped, (args, kwargs))
            values, treedef = flatten(exact(*stopped[0], **stopped[1]))
        slopes, other = flatten(smooth(*args, **kwargs))
        _refuse_unlike(names, (values, treedef), (slopes, other))
        return treedef.unflatten([_joined(*pair, names, site) for pair in zip(values, slopes, strict=True)])

    return declared


def is_surrogate(equation: JaxprEqn) -> bool:
    """Whether an equation gives its first operand the derivative of its second."""
    return equation.primitive.name == SURROGATE


def _name(function: Any) -> str:
    return function_name(function) or function_name(getattr(function, "func", None)) or type(function).__name__


def _stopped(leaf: Any) -> Any:
    """A leaf without its tangent, so that nothing of `exact` is differentiated."""
    if not (isinstance(leaf, jax.core.Tracer) and is_differentiable(leaf)):
        return leaf
    stopped = lax.stop_gradient(leaf)
    # Without its tangent, a Python number is one again.
    return stopped if isinstance(stopped, jax.Array) else jnp.asarray(stopped)


def _joined(value: Any, slope: Any, names: tuple[str, str], site: str) -> Any:
    """One result, and the value itself where there is nothing to differentiate."""
    if not is_differentiable(value) or not any(isinstance(one, jax.core.Tracer) for one in (value, slope)):
        return value
    value, slope = jnp.asarray(value), jnp.asarray(slope)
    slope = varying_like(slope, jax.typeof(value))
    value = varying_like(value, jax.typeof(slope))
    return surrogate_p.bind(value, slope, name=names[0], smooth=names[1], declared=site)


def _refuse_unlike(names: tuple[str, str], exact: tuple[list[Any], Any], smooth: tuple[list[Any], Any]) -> None:
    """Raise if two functions return different structures, shapes or dtypes."""
    (values, treedef), (slopes, other) = exact, smooth
    what = f"The two functions of a surrogate, `{names[0]}` and `{names[1]}`, return different results."
    if treedef != other:
        raise ArgumentError(
            what,
            f"At: {running_line()}.",
            f"Expected one structure; `exact` returns {treedef}, and `smooth` {other}.",
            fix="return the same containers from both.",
        )
    paths = None
    for number, (value, slope) in enumerate(zip(values, slopes, strict=True)):
        if _type_of(value) == _type_of(slope):
            continue
        paths = paths or [
            jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(treedef.unflatten(values))
        ]
        where = f", in their results at {paths[number]}" if paths[number] else ""
        raise ArgumentError(
            what,
            f"At: {running_line()}{where}.",
            f"Expected one shape and dtype; `exact` returns {describe(value)}, and `smooth` {describe(slope)}.",
            fix=_fix_of(value, slope),
        )


def _type_of(leaf: Any) -> Any:
    try:
        return shape_of(leaf), dtype_of(leaf)
    except AttributeError:
        return type(leaf)


def _fix_of(value: Any, slope: Any) -> str:
    if not is_differentiable(slope):
        return "return floating numbers from `smooth`: others have no derivative."
    if not is_differentiable(value):
        dtype = jnp.dtype(dtype_of(slope)).name
        return f"return numbers from `exact`: jnp.where(condition, 1.0, 0.0), or .astype(jnp.{dtype})."
    if _type_of(value)[0] != _type_of(slope)[0]:
        return "let both broadcast their arguments alike."
    return "compute both in the dtype of the arguments: .astype(x.dtype)."


# --- the primitive ---------------------------------------------------------------------------------------------------

surrogate_p = Primitive(SURROGATE)
surrogate_p.def_impl(lambda value, slope, **params: value)
surrogate_p.def_abstract_eval(lambda value, slope, **params: value)
mlir.register_lowering(surrogate_p, lambda context, value, slope, **params: [value])


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    result, tangent = surrogate_p.bind(*primals, **params), tangents[1]
    return result, ad.Zero(jax.typeof(result).to_tangent_aval()) if type(tangent) is ad.Zero else tangent


def _batched(operands: Any, axes: Any, **params: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    first = lambda x, axis: jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    value, slope = map(first, operands, axes)
    slope = varying_like(slope, jax.typeof(value))
    return surrogate_p.bind(varying_like(value, jax.typeof(slope)), slope, **params), 0


ad.primitive_jvps[surrogate_p] = _jvp
batching.primitive_batchers[surrogate_p] = _batched
jet_rules[surrogate_p] = lambda given, series, **params: (surrogate_p.bind(*given, **params), series[1])
