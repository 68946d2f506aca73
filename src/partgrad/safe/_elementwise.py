"""The elementwise functions of `safe`."""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._rule import SafeRule, arrays, call, check, moved, operand

# A number or array, or one for each of two operands.
Pair: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike]"


def _unary(
    name: str, function: Callable, x: Any, at_singular: Any, singular: Callable[[Any], jax.Array], away: int = 1
) -> jax.Array:
    """Call a function of one operand that is singular where `singular` says, and not at `away`."""
    x = operand(x)
    if not arrays(x):
        return function(x)
    check(name, at_singular, np.shape(x), not jnp.iscomplexobj(x))
    rule = SafeRule(
        value=lambda o: function(o["x"]),
        smooth=lambda mask, o, at_singular: function(moved(mask, o["x"], away)),
        singular=lambda o, out: singular(o["x"]),
        partials=lambda o, at_singular: {"x": at_singular},
    )
    return call(rule, {"x": x}, at_singular)


def _binary(
    name: str,
    function: Callable,
    operands: tuple[Any, Any],
    at_singular: Any,
    singular: Callable[[Any, Any], jax.Array],
    partials: Callable[..., tuple[Any, Any]] = lambda x1, x2, at1, at2: (at1, at2),
) -> jax.Array:
    """Call a function of two operands that is singular where `singular` says, and not at (1, 1).

    `partials` gets the operands and the two derivatives that were given.
    """
    x1, x2 = map(operand, operands)
    if not arrays(x1, x2):
        return function(x1, x2)
    pair = _pair(name, at_singular, x1, x2)
    rule = SafeRule(
        value=lambda o: function(o["x1"], o["x2"]),
        smooth=lambda mask, o, at_singular: function(moved(mask, o["x1"], 1), moved(mask, o["x2"], 1)),
        singular=lambda o, out: singular(o["x1"], o["x2"]),
        partials=lambda o, at_singular: dict(zip(("x1", "x2"), partials(o["x1"], o["x2"], *at_singular), strict=True)),
    )
    return call(rule, {"x1": x1, "x2": x2}, pair)


def _pair(name: str, at_singular: Any, x1: Any, x2: Any) -> tuple[Any, Any]:
    pair = at_singular if isinstance(at_singular, tuple) and len(at_singular) == 2 else (at_singular, at_singular)
    try:
        shape = np.broadcast_shapes(np.shape(x1), np.shape(x2))
    except ValueError:  # `jax.numpy` raises the error.
        return pair
    for one in pair:
        check(name, one, shape, not (jnp.iscomplexobj(x1) or jnp.iscomplexobj(x2)))
    return pair


def _zero(x: Any) -> jax.Array:
    return jnp.equal(x, 0)


def sqrt(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.sqrt`, with a derivative at 0.

    The derivative at 0, where JAX's is infinite, is `at_singular`. The root of a negative number is NaN.

    Args:
        x: A number or an array, real or complex.
        at_singular: The derivative where `x` is 0; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.sqrt(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> jax.grad(lambda x: safe.sqrt(x * x + 0.0))(0.0)
        Array(0., dtype=float32, weak_type=True)
        >>> float(jax.grad(safe.sqrt)(4.0))
        0.25
    """
    return _unary("sqrt", jnp.sqrt, x, at_singular, _zero)


def cbrt(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.cbrt`, with a derivative at 0.

    The derivative at 0, where it is infinite and JAX gives NaN, is `at_singular`.

    Args:
        x: A real number or array.
        at_singular: The derivative where `x` is 0; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.cbrt(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> float(jax.grad(safe.cbrt)(0.0))
        0.0
    """
    return _unary("cbrt", jnp.cbrt, x, at_singular, _zero)


def log(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.log`, with a derivative at 0.

    The derivative at 0, where JAX's is infinite, is `at_singular`; the value there is -inf. The logarithm of a negative
    number is NaN.

    Args:
        x: A number or an array, real or complex.
        at_singular: The derivative where `x` is 0; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.log(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(number) for number in jax.value_and_grad(safe.log)(0.0)]
        [-inf, 0.0]
    """
    return _unary("log", jnp.log, x, at_singular, _zero)


def reciprocal(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.reciprocal`, with a derivative at 0.

    The derivative at 0, where JAX's is infinite, is `at_singular`; the value there is infinite.

    Args:
        x: A number or an array, real or complex.
        at_singular: The derivative where `x` is 0; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.reciprocal(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(number) for number in jax.value_and_grad(safe.reciprocal)(0.0)]
        [inf, 0.0]
    """
    return _unary("reciprocal", jnp.reciprocal, x, at_singular, _zero)


def _unit(x: Any) -> jax.Array:
    return jnp.equal(x, 1) | jnp.equal(x, -1)


def arccos(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.arccos`, with a derivative at 1 and -1.

    The derivative at 1 and -1, where JAX's is infinite, is `at_singular`. Outside [-1, 1], value and derivative are
    NaN.

    Args:
        x: A number or an array, real or complex.
        at_singular: The derivative where `x` is 1 or -1; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.arccos(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(number) for number in jax.value_and_grad(safe.arccos)(1.0)]
        [0.0, 0.0]
    """
    return _unary("arccos", jnp.arccos, x, at_singular, _unit, away=0)


def arcsin(x: ArrayLike, /, *, at_singular: ArrayLike = 0.0) -> jax.Array:
    """Compute `jax.numpy.arcsin`, with a derivative at 1 and -1.

    The derivative at 1 and -1, where JAX's is infinite, is `at_singular`. Outside [-1, 1], value and derivative are
    NaN.

    Args:
        x: A number or an array, real or complex.
        at_singular: The derivative where `x` is 1 or -1; a number, or an array that broadcasts to the shape of `x`.

    Returns:
        The value, shape and dtype of `jax.numpy.arcsin(x)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> float(jax.grad(safe.arcsin)(-1.0))
        0.0
    """
    return _unary("arcsin", jnp.arcsin, x, at_singular, _unit, away=0)


def divide(x1: ArrayLike, x2: ArrayLike, /, *, at_singular: Pair = 0.0) -> jax.Array:
    """Compute `jax.numpy.divide`, with derivatives where the denominator is 0.

    Where `x2` is 0, the derivatives with respect to `x1` and `x2` are both `at_singular`; values stay infinite or NaN.

    Args:
        x1: The numerator, a number or an array, real or complex.
        x2: The denominator, with a shape that broadcasts with `x1`.
        at_singular: The derivative where `x2` is 0; a number, or an array that broadcasts to the shape of the result,
            or a tuple of two of these, for `x1` and for `x2`.

    Returns:
        The value, shape and dtype of `jax.numpy.divide(x1, x2)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(slope) for slope in jax.grad(safe.divide, argnums=(0, 1))(3.0, 0.0)]
        [0.0, 0.0]
        >>> [float(slope) for slope in jax.grad(safe.divide, argnums=(0, 1))(3.0, 2.0)]
        [0.5, -0.75]
    """
    return _binary("divide", jnp.divide, (x1, x2), at_singular, lambda x1, x2: _zero(x2))


def arctan2(x1: ArrayLike, x2: ArrayLike, /, *, at_singular: Pair = 0.0) -> jax.Array:
    """Compute `jax.numpy.arctan2`, with derivatives at the origin.

    At (0, 0), where the angle jumps and JAX's derivatives are NaN, both derivatives are `at_singular`.

    Args:
        x1: The ordinate, a real number or array.
        x2: The abscissa, with a shape that broadcasts with `x1`.
        at_singular: The derivative where both are 0; a number, or an array that broadcasts to the shape of the result,
            or a tuple of two of these, for `x1` and for `x2`.

    Returns:
        The value, shape and dtype of `jax.numpy.arctan2(x1, x2)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(slope) for slope in jax.grad(safe.arctan2, argnums=(0, 1))(0.0, 0.0)]
        [0.0, 0.0]
    """
    return _binary("arctan2", jnp.arctan2, (x1, x2), at_singular, lambda x1, x2: _zero(x1) & _zero(x2))


def power(x1: ArrayLike, x2: ArrayLike, /, *, at_singular: Pair = 0.0) -> jax.Array:
    """Compute `jax.numpy.power`, with derivatives at base 0.

    At base 0, the derivative with respect to `x1` is `at_singular` if the exponent is below 1 (JAX's is infinite or
    NaN), and the derivative with respect to `x2` is `at_singular` if the exponent is below 0 (JAX's is NaN). If the
    exponent is 1, or a non-integer above 1, first derivatives are JAX's, 1 or 0, and the function counts as locally
    linear: second derivatives are 0 where JAX's may be infinite or NaN. Everything else is JAX's: integer exponents of
    2 or more, integer dtypes, and NaN for the derivative with respect to the exponent of a negative base.

    Args:
        x1: The base, a number or an array, real or complex.
        x2: The exponent, with a shape that broadcasts with `x1`. A concrete integer is not differentiated, as in JAX.
        at_singular: The derivative where it is singular; a number, or an array that broadcasts to the shape of the
            result, or a tuple of two of these, for `x1` and for `x2`.

    Returns:
        The value, shape and dtype of `jax.numpy.power(x1, x2)`.

    Raises:
        ArgumentError: If `at_singular` does not fit.

    Example:
        >>> import jax
        >>> from partgrad import safe
        >>> [float(slope) for slope in jax.grad(safe.power, argnums=(0, 1))(0.0, 0.5)]
        [0.0, 0.0]
        >>> float(jax.hessian(safe.power)(0.0, 2.0))
        2.0
    """
    try:
        exponent = operator.index(x2)
    except TypeError:
        return _binary("power", jnp.power, (x1, x2), at_singular, _power_singular, _power_partials)
    # `jax.numpy` multiplies where the exponent is a concrete integer: it must see one, not a tracer.
    if exponent >= 0:
        _pair("power", at_singular, operand(x1), exponent)
        return jnp.power(x1, exponent)
    at_base = at_singular[0] if isinstance(at_singular, tuple) and len(at_singular) == 2 else at_singular
    return _unary("power", lambda x: jnp.power(x, exponent), x1, at_base, _zero)


def _power_singular(x1: Any, x2: Any) -> jax.Array:
    real = jnp.real(x2)
    if not jnp.issubdtype(jnp.result_type(x2), jnp.inexact):
        return _zero(x1) & (real < 0)
    # An infinite or NaN exponent is neither: JAX's NaN stays.
    rough = jnp.isfinite(real) & ((jnp.floor(real) != real) | (jnp.imag(x2) != 0))
    return _zero(x1) & ((real <= 1) | rough)


def _power_partials(x1: Any, x2: Any, at1: Any, at2: Any) -> tuple[Any, Any]:
    real, turning = jnp.real(x2), jnp.imag(x2) != 0
    in_base = jnp.where((real < 1) | ((real == 1) & turning), at1, jnp.where(jnp.equal(x2, 1), 1, 0))
    return in_base, jnp.where((real < 0) | ((real == 0) & turning), at2, 0)
