"""Maps from the real line onto an interval."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._message import at
from .._trees import is_array, written
from ..errors import ArgumentError

# The logarithm of 2 has these digits after those of a float64.
_LOG_2_REST = 2.319046813846299558e-17


@jax.tree_util.register_pytree_node_class
class Interval:
    """An increasing map from the real line onto an interval, element by element.

    With one bound it is `low + softplus(x)` or `high - softplus(-x)`, and with two `low + (high - low) * sigmoid(x)`,
    in the form that keeps most digits. Make one with `partgrad.coordinates.interval`.

    Args:
        low: The lower bound: a number, an array that broadcasts against the leaf, or None.
        high: The upper bound.
    """

    def __init__(self, low: Any, high: Any):
        self._low = low
        self._high = high

    def __repr__(self) -> str:
        if self._high is None and type(self._low) is float and self._low == 0:
            return "positive"
        return f"interval({_written(self._low)}, {_written(self._high)})"

    def forward(self, x: Any) -> jax.Array:
        """The value at a coordinate."""
        x = jnp.asarray(x)
        low, high = (_like(bound, x) for bound in (self._low, self._high))
        if high is None:
            return _shifted(jax.nn.softplus(x), low)
        if low is None:
            return _shifted(-jax.nn.softplus(-x), high)
        if _is_number(low) and _is_number(high):
            # The forms that lose no digits at zero.
            if low == -high:
                return high * jnp.tanh(0.5 * x)
            if low == 0:
                return high * jax.nn.sigmoid(x)
            if high == 0:
                return low * jax.nn.sigmoid(-x)
        width = high - low
        # In one form alone, the rounding of the sum may leave the interval at its other end.
        return jnp.where(x < 0, low + width * jax.nn.sigmoid(x), high - width * jax.nn.sigmoid(-x))

    def inverse(self, y: Any) -> jax.Array:
        """The coordinate of a value; an infinity at a bound, NaN outside."""
        y = jnp.asarray(y)
        low, high = (_like(bound, y) for bound in (self._low, self._high))
        if high is None:
            return _inverse_softplus(_shifted(y, low, -1))
        if low is None:
            return -_inverse_softplus(_shifted(-y, high))
        half = 0.5 * high - 0.5 * low
        from_middle = (y - (0.5 * low + 0.5 * high)) / half
        near = jnp.clip(from_middle, -0.5, 0.5)
        below, above = y - low, high - y
        is_near = jnp.abs(from_middle) < 0.5
        # What is not taken has a finite derivative.
        far = jnp.log(jnp.where(is_near, half, below)) - jnp.log(jnp.where(is_near, half, above))
        return jnp.where(is_near, 2 * jnp.arctanh(near), far)

    def forward_log_det_jacobian(self, x: Any) -> jax.Array:
        """The logarithm of the derivative at a coordinate, for each element."""
        x = jnp.asarray(x)
        low, high = (_like(bound, x) for bound in (self._low, self._high))
        if high is None:
            return -jax.nn.softplus(-x)
        if low is None:
            return -jax.nn.softplus(x)
        width = high - low
        log_width = math.log(width) if _is_number(width) else jnp.log(width)
        return log_width - jax.nn.softplus(x) - jax.nn.softplus(-x)

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        """The bounds that are arrays, and the others."""
        bounds = (self._low, self._high)
        is_child = [bound is not None and not _is_number(bound) for bound in bounds]
        children = [bound for bound, is_one in zip(bounds, is_child, strict=True) if is_one]
        return children, tuple(_CHILD if is_one else bound for bound, is_one in zip(bounds, is_child, strict=True))

    @classmethod
    def tree_unflatten(cls, bounds: tuple[Any, ...], children: Any) -> "Interval":
        """Put them together."""
        remaining = iter(children)
        return cls(*(next(remaining) if bound is _CHILD else bound for bound in bounds))


_CHILD = "array"


def _is_number(bound: Any) -> bool:
    return type(bound) is float


def _written(bound: Any) -> str:
    return f"{bound:g}" if _is_number(bound) else "array" if bound is not None else "None"


def _like(bound: Any, x: jax.Array) -> Any:
    """A bound in the dtype of a leaf; a number takes part in any."""
    return bound if bound is None or _is_number(bound) else jnp.asarray(bound, x.dtype)


def _shifted(x: Any, by: Any, sign: int = 1) -> Any:
    return x if _is_number(by) and by == 0 else x + sign * by


def _inverse_softplus(y: jax.Array) -> jax.Array:
    """log(exp(y) - 1), with all its digits."""
    # For small y, near log 2, where it is zero, and for large y. Each form gets arguments with a finite derivative.
    log_2 = np.asarray(math.log(2.0), y.dtype)
    rest = math.log(2.0) - float(log_2) + _LOG_2_REST
    small = jnp.log(jnp.expm1(jnp.minimum(y, 0.25)))
    middle = jnp.log1p(2 * jnp.expm1((jnp.clip(y, 0.25, 1.5) - log_2) - rest))
    large = jnp.maximum(y, 1.5)
    return jnp.where(y < 0.25, small, jnp.where(y < 1.5, middle, large + jnp.log1p(-jnp.exp(-large))))


def interval(low: Any, high: Any) -> Interval:
    """The coordinate of a number between two bounds, or on one side of a bound.

    Its values are inside the bounds; a coordinate of plus or minus infinity is a bound.

    Args:
        low: The lower bound: a real number, an array that broadcasts against the leaf, or None (or minus infinity) for
            none. The unit is that of the leaf.
        high: The upper bound.

    Returns:
        A map, for `partgrad.unconstrain` and `partgrad.ravel`: `low + (high - low) / (1 + exp(-x))` with two bounds,
        `low + log(1 + exp(x))` or `high - log(1 + exp(-x))` with one. It has the methods `forward`, `inverse` and
        `forward_log_det_jacobian` of other libraries' bijectors, and is a pytree whose leaves are the bounds that are
        arrays.

    Raises:
        ArgumentError: If there is no bound, one is not a real number, or the lower one is not below the upper one.

    Example:
        >>> import partgrad as pg
        >>> tilt = pg.coordinates.interval(-0.5, 0.5)
        >>> print(tilt.forward(0.0), tilt.inverse(0.25))
        0.0 1.0986123
        >>> pg.coordinates.interval(1.0, None)
        interval(1, None)
    """
    low, high = _read("low", low, -math.inf), _read("high", high, math.inf)
    if low is None and high is None:
        raise ArgumentError(
            "`partgrad.coordinates.interval` got no bound.",
            "Expected a lower bound, an upper bound, or both.",
            fix="leave the leaf out of the coordinates: it moves as it is.",
        )
    are_known = not any(bound is None or isinstance(bound, jax.core.Tracer) for bound in (low, high))
    if are_known and not np.all(np.asarray(low) < np.asarray(high)):
        raise ArgumentError(
            f"`partgrad.coordinates.interval` got the bounds {written(low):.40} and {written(high):.40}.",
            "Expected the lower bound below the upper one.",
            fix="give the lower bound first; to hold a leaf at a value, mark it: partgrad.freeze(tree, ...).",
        )
    return Interval(low, high)


def _read(name: str, bound: Any, none: float) -> Any:
    """A bound as a float, an array, or None."""
    if bound is None:
        return None
    is_tracer = isinstance(bound, jax.core.Tracer)
    if is_array(bound) and np.shape(bound) == () and not is_tracer:
        bound = bound.item()
    is_real = (
        jnp.issubdtype(bound.dtype, jnp.floating) or jnp.issubdtype(bound.dtype, jnp.integer)
        if is_array(bound)
        else (isinstance(bound, int | float | np.number) and not isinstance(bound, bool | complex))
    )
    if not is_real or (not is_tracer and np.any(np.isnan(bound))):
        raise ArgumentError(
            f"{at(name)} of `partgrad.coordinates.interval` is {type(bound).__name__} {written(bound):.40}.",
            "Expected a real number, an array of them, or None.",
            fix="give the bound as a number.",
        )
    if is_array(bound):
        return bound
    return None if bound == none else float(bound)


#: Every positive number is softplus(x) = log(1 + exp(x)) of a coordinate.
positive = Interval(0.0, None)
