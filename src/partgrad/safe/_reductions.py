"""The functions of `safe` that reduce axes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._trees import refuse_non_bools
from ._elementwise import power
from ._rule import Operands, SafeRule, arrays, call, check, moved, operand

Axis = int | Sequence[int] | None


def _along(axis: Any, keepdims: bool) -> dict[str, Callable]:
    """Make `reduce` and `outer` of a rule, for masks that keep the reduced axes."""
    axis = tuple(axis) if isinstance(axis, list) else axis
    return {
        "reduce": lambda tangent: jnp.sum(tangent, axis, keepdims=keepdims),
        "outer": lambda mask: mask if keepdims else jnp.squeeze(mask, axis),
    }


def norm(
    x: ArrayLike,
    ord: int | float | str | None = None,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    *,
    at_singular: ArrayLike = 0.0,
) -> jax.Array:
    """Compute `jax.numpy.linalg.norm`, with a derivative at zero vectors and matrices.

    In a vector or matrix of zeros, the derivative with respect to each element is `at_singular`, whatever the order.
    The same goes for every element of a vector with a zero if the order is negative, and for each zero if the order is
    between 0 and 1. Everything else is JAX's: the absolute value of a zero beside other numbers has derivative 1, and a
    vector so small that its squares underflow has JAX's infinite or NaN derivative.

    Args:
        x: An array, real or complex.
        ord: Any order of `jax.numpy.linalg.norm`: None, a number, inf, -inf, "fro", "nuc".
        axis: The axis of vectors or the two axes of matrices; None for all.
        keepdims: Whether to keep the reduced axes, with size 1.
        at_singular: The derivative where it is singular; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.linalg.norm(x, ord, axis, keepdims)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> print(jax.grad(lambda x: safe.norm(x, axis=1).sum())(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
        [[0.6 0.8]
         [0.  0. ]]
    """
    refuse_non_bools(keepdims=keepdims)
    x = operand(x)
    if not arrays(x):
        return jnp.linalg.norm(x, ord, axis, keepdims)
    check("norm", at_singular, np.shape(x), not jnp.iscomplexobj(x))
    axes = axis if isinstance(axis, tuple) else tuple(range(np.ndim(x))) if axis is None else (axis,)
    # The orders that `jax.numpy` computes with powers.
    powers = len(axes) == 1 and not isinstance(ord, str) and ord not in (None, 0, 1, 2, np.inf, -np.inf)

    def singular(o: Operands, out: Any) -> jax.Array:
        zeros = jnp.equal(o["x"], 0)
        some = powers and ord < 0  # type: ignore[operator]
        return (jnp.any if some else jnp.all)(zeros, axis=axis, keepdims=True)

    def smooth(mask: jax.Array, o: Operands, at_singular: Any) -> jax.Array:
        if powers:
            return _power_norm(moved(mask, o["x"], 1), float(ord), axis, keepdims, at_singular)  # type: ignore[arg-type]
        # The singular values have second derivatives only at a diagonal of distinct numbers.
        away = _diagonal(np.shape(o["x"]), axes) if ord in ("nuc", 2, -2) and len(axes) == 2 else 1
        return jnp.linalg.norm(jnp.where(mask, away, o["x"]), ord, axis, keepdims)

    rule = SafeRule(
        value=lambda o: jnp.linalg.norm(o["x"], ord, axis, keepdims),
        smooth=smooth,
        singular=singular,
        partials=lambda o, at_singular: {"x": at_singular},
        **_along(axis, keepdims),
    )
    return call(rule, {"x": x}, at_singular)


def _power_norm(x: jax.Array, order: float, axis: Any, keepdims: bool, at_singular: Any) -> jax.Array:
    """Compute the norm by `jax.numpy`'s formula, with powers whose derivatives at single zeros are defined."""
    size = jnp.abs(x)
    exponent = np.asarray(order, size.dtype)
    total = jnp.sum(power(size, exponent), axis, keepdims=keepdims)
    out = jnp.power(total, np.asarray(1.0 / exponent, size.dtype))
    if 0 < order < 1:
        slope = jnp.where(jnp.equal(x, 0), at_singular, 0) * (x - jax.lax.stop_gradient(x))
        out = out + jnp.real(jnp.sum(slope, axis, keepdims=keepdims)).astype(out.dtype)
    return out


def _diagonal(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    row, column = (axis % len(shape) for axis in axes)
    index = np.ogrid[tuple(slice(n if axis in (row, column) else 1) for axis, n in enumerate(shape))]
    return np.where(index[row] == index[column], index[row] + 1, 0)


def std(
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    correction: int | float | None = None,
    at_singular: ArrayLike = 0.0,
) -> jax.Array:
    """Compute `jax.numpy.std`, with a derivative where all values are equal.

    If all values along the axes are equal (and equal to `mean`, if that is given), the derivative with respect to each
    of them is `at_singular`, and with respect to `mean` and `correction` 0. Values that `where` leaves out have
    derivative 0, whatever they are, NaN included. A deviation that is NaN because there are too few values keeps JAX's
    derivative.

    Args:
        a: An array, real or complex.
        axis: The axes to reduce; None for all.
        dtype: The dtype to compute in.
        out: None.
        ddof: The number to subtract from the number of values in the divisor.
        keepdims: Whether to keep the reduced axes, with size 1.
        where: Which values to include.
        mean: The mean, if it is known.
        correction: Another name for `ddof`.
        at_singular: The derivative where all values are equal; a number, or an array that broadcasts to the shape of
            `a`.

    Returns:
        The value, shape and dtype of `jax.numpy.std` of these arguments.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> print(jax.grad(safe.std)(jnp.array([2.0, 2.0, 2.0])))
        [0. 0. 0.]
    """
    given, static = _moments(a, where, mean, ddof, correction, axis=axis, dtype=dtype, out=out, keepdims=keepdims)
    if not arrays(*given.values()):
        return jnp.std(**given, **static)
    check("std", at_singular, np.shape(given["a"]), not jnp.iscomplexobj(given["a"]))

    def smooth(mask: jax.Array, o: Operands, at_singular: Any) -> jax.Array:
        variance = jnp.var(**_chosen(o), **static)
        return jnp.sqrt(moved(rule.outer(mask), variance, 1))

    rule = SafeRule(
        value=lambda o: jnp.std(**o, **static),
        smooth=smooth,
        singular=lambda o, value: _all_equal(o, value, axis, dtype),
        partials=lambda o, at_singular: {"a": at_singular},
        **_along(axis, keepdims),
    )
    return call(rule, given, at_singular)


def var(
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    correction: int | float | None = None,
    at_singular: ArrayLike = 0.0,
) -> jax.Array:
    """Compute `jax.numpy.var`, with a derivative of 0 for values that `where` leaves out.

    The variance has no singular point: where all values are equal its derivative is 0 and its second derivative JAX's.
    Values that `where` leaves out have derivative 0, whatever they are, NaN included.

    Args:
        a: An array, real or complex.
        axis: The axes to reduce; None for all.
        dtype: The dtype to compute in.
        out: None.
        ddof: The number to subtract from the number of values in the divisor.
        keepdims: Whether to keep the reduced axes, with size 1.
        where: Which values to include.
        mean: The mean, if it is known.
        correction: Another name for `ddof`.
        at_singular: Accepted as in `std`, but never needed.

    Returns:
        The value, shape and dtype of `jax.numpy.var` of these arguments.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> print(jax.grad(lambda a: safe.var(a, where=~jnp.isnan(a)))(jnp.array([1.0, jnp.nan, 3.0])))
        [-1.  0.  1.]
    """
    given, static = _moments(a, where, mean, ddof, correction, axis=axis, dtype=dtype, out=out, keepdims=keepdims)
    if not arrays(*given.values()):
        return jnp.var(**given, **static)
    check("var", at_singular, np.shape(given["a"]), not jnp.iscomplexobj(given["a"]))
    rule = SafeRule(
        value=lambda o: jnp.var(**o, **static),
        smooth=lambda mask, o, at_singular: jnp.var(**_chosen(o), **static),
        singular=None,
        partials=lambda o, at_singular: {},
    )
    return call(rule, given, at_singular)


def _moments(
    a: Any, where: Any, mean: Any, ddof: Any, correction: Any, **static: Any
) -> tuple[Operands, dict[str, Any]]:
    """Separate what may be traced from what may not."""
    refuse_non_bools(keepdims=static["keepdims"])
    given = {"a": a, "where": where, "mean": mean, "ddof": ddof, "correction": correction}
    # Not without the operand itself, of which `jax.numpy` says what it is.
    given = {name: operand(x) for name, x in given.items() if x is not None or name == "a"}
    traced = {name: x for name, x in given.items() if name in ("a", "where", "mean") or isinstance(x, jax.Array)}
    return traced, static | {name: x for name, x in given.items() if name not in traced}


def _chosen(o: Operands, **fill: int) -> Operands:
    """Put numbers where `where` leaves an operand out: 0 times a NaN is NaN."""
    if "where" not in o:
        return o
    chosen = {}
    for name, to in (fill or {"a": 0}).items():
        # If the mask is larger, axes refer to its shape, and there is nothing to leave out.
        if name in o and np.broadcast_shapes(np.shape(o["where"]), np.shape(o[name])) == np.shape(o[name]):
            chosen[name] = moved(jnp.logical_not(o["where"]), o[name], to)
    return o | chosen


def _all_equal(o: Operands, value: jax.Array, axis: Any, dtype: Any) -> jax.Array:
    a, chosen = jnp.asarray(o["a"], dtype), o.get("where", True)
    if "mean" in o:
        equal = jnp.all(jnp.equal(a, o["mean"]) | jnp.logical_not(chosen), axis, keepdims=True)
    else:
        equal = jnp.asarray(True)
        for part in (a.real, a.imag) if jnp.iscomplexobj(a) else (a,):
            real = part if jnp.issubdtype(part.dtype, jnp.inexact) else part.astype(float)
            low = jnp.min(real, axis, keepdims=True, initial=jnp.inf, where=chosen)
            equal = equal & (low == jnp.max(real, axis, keepdims=True, initial=-jnp.inf, where=chosen))
    # A deviation that is NaN or infinite is not at its singular point: it has no values or overflowed.
    return equal & jnp.isfinite(value).reshape(equal.shape)


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    at_singular: ArrayLike = 0.0,
) -> Any:
    """Compute `jax.scipy.special.logsumexp`, with a derivative where the value is infinite.

    If the sum is 0, as when all of `a` is -inf, or if an element of `a` is +inf, the derivative with respect to each
    `a` is `at_singular`, and with respect to each `b` 0. Values that `where` leaves out have derivative 0, whatever
    they are. A NaN stays.

    Args:
        a: An array, real or complex.
        axis: The axes to reduce; None for all.
        b: Factors of the exponentials.
        keepdims: Whether to keep the reduced axes, with size 1.
        return_sign: Whether to return the logarithm of the sum's size, and its sign.
        where: Which values to include.
        at_singular: The derivative where it is singular; a number, or an array that broadcasts to the shape of `a`.

    Returns:
        The value, shape and dtype of `jax.scipy.special.logsumexp` of these arguments; with `return_sign`, two of them.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> print(jax.grad(safe.logsumexp)(jnp.array([-jnp.inf, -jnp.inf])))
        [0. 0.]
        >>> print(jax.grad(safe.logsumexp)(jnp.array([-jnp.inf, 2.0])))
        [0. 1.]
    """
    refuse_non_bools(keepdims=keepdims, return_sign=return_sign)
    given = {name: operand(x) for name, x in {"a": a, "b": b, "where": where}.items() if x is not None or name == "a"}

    def value(o: Operands) -> Any:
        return jax.scipy.special.logsumexp(**o, axis=axis, keepdims=keepdims, return_sign=return_sign)

    if not arrays(*given.values()):
        return value(given)
    complex_ = any(jnp.iscomplexobj(x) for x in given.values())
    check("logsumexp", at_singular, np.shape(given["a"]), not complex_)

    def singular(o: Operands, out: Any) -> jax.Array:
        counts = jnp.not_equal(o.get("b", 1), 0) & jnp.asarray(o.get("where", True), bool)
        infinite = jnp.any(counts & jnp.isposinf(jnp.real(o["a"])), axis, keepdims=True)
        size = jnp.real(out[0] if return_sign else out).reshape(infinite.shape)
        return jnp.isneginf(size) | (infinite & jnp.isposinf(size))

    def smooth(mask: jax.Array, o: Operands, at_singular: Any) -> Any:
        o = _chosen(o, a=0, b=1)
        return value(o | {name: moved(mask, o[name], to) for name, to in (("a", 0), ("b", 1)) if name in o})

    rule = SafeRule(value, smooth, singular, lambda o, at_singular: {"a": at_singular}, **_along(axis, keepdims))
    return call(rule, given, at_singular)
