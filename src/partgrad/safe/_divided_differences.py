"""Divided differences of a function at points that may be equal, or nearly so."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[[jax.Array], jax.Array]
# How many times its estimated rounding error a quotient may be off, by what a function of several operations adds.
_ROUNDING = 64


class _Rule(NamedTuple):
    """A rule of integration: weights, and the coordinates of each of its points by the corners of a simplex.

    They are numbers of Python, which leave float32 what it is.
    """

    weights: list[float]
    points: list[list[float]]


def _interval(nodes: int) -> _Rule:
    """Gauss and Legendre's rule for the mean over an interval."""
    x, weights = np.polynomial.legendre.leggauss(nodes)
    return _Rule((weights / 2).tolist(), np.stack([(1 - x) / 2, (1 + x) / 2], axis=1).tolist())


def _triangle(centre: float, *orbits: tuple[float, float]) -> _Rule:
    """A rule for half the mean over a triangle: the weight of its centre, and of each orbit with its coordinate."""
    weights, points = [centre], [(1 / 3, 1 / 3, 1 / 3)]
    for weight, b in orbits:
        weights += [weight] * 3
        points += [(b, b, 1 - 2 * b), (b, 1 - 2 * b, b), (1 - 2 * b, b, b)]
    return _Rule((np.array(weights) / 2).tolist(), np.array(points).tolist())


_ROOT = np.sqrt(15)
# By the number of differences, the rule that is used and a coarser one, whose distance bounds its error. For triangles
# they are Radon's rule of degree 5 (1948) and one of degree 2.
_RULES = {
    1: (_interval(5), _interval(3)),
    2: (
        _triangle(9 / 40, ((155 - _ROOT) / 1200, (6 - _ROOT) / 21), ((155 + _ROOT) / 1200, (6 + _ROOT) / 21)),
        _triangle(0.0, (1 / 3, 1 / 6)),
    ),
}


def first_differences(fn: Function, x: jax.Array) -> jax.Array:
    """The differences `f[x_i, x_j]` of an elementwise function at points in ascending order.

    Args:
        fn: The function.
        x: The points, of shape (..., n).

    Returns:
        An array of shape (..., n, n).
    """
    return _first(fn, x)[0]


def second_differences(fn: Function, x: jax.Array) -> jax.Array:
    """The differences `f[x_i, x_j, x_k]`, of shape (..., n, n, n)."""
    below, error = _first(fn, x)
    n = x.shape[-1]
    low, middle, high = jnp.sort(jnp.stack(jnp.indices((n, n, n))), axis=0)
    gap = _nonzero(x[..., high] - x[..., low])
    quotient = (below[..., middle, high] - below[..., low, middle]) / gap
    rounding = (error[..., middle, high] + error[..., low, middle]) / gap
    corners = [x[..., index] for index in (low, middle, high)]
    return _chosen(fn, 2, corners, quotient, rounding)[0]


def _first(fn: Function, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first differences and their errors."""
    y = fn(x)
    row, column = x[..., :, None], x[..., None, :]
    gap = _nonzero(column - row)
    quotient = (y[..., None, :] - y[..., :, None]) / gap
    rounding = jnp.finfo(x.dtype).eps * (abs(y[..., None, :]) + abs(y[..., :, None])) / abs(gap)
    return _chosen(fn, 1, jnp.broadcast_arrays(row, column), quotient, rounding)


def _chosen(
    fn: Function, order: int, corners: list[jax.Array], quotient: jax.Array, rounding: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The quotient or, where rounding spoils it, the mean of a derivative between the points; and the error.

    A divided difference is the integral of a derivative over the simplex of the points (Hermite and Genocchi). The
    integral must agree with the quotient as far as rounding lets it, so that a jump of the function between two points
    is not passed over.
    """
    fine, coarse = (_integral(fn, order, corners, rule) for rule in _RULES[order])
    agrees = abs(fine - quotient) <= _ROUNDING * rounding
    is_exact = abs(fine - coarse) <= rounding
    is_one_point = corners[0] == corners[-1]
    smooth = is_one_point | (agrees & is_exact)
    error = 4 * jnp.finfo(fine.dtype).eps * abs(fine)
    return jnp.where(smooth, fine, quotient), jnp.where(smooth, error, rounding)


def _integral(fn: Function, order: int, corners: list[jax.Array], rule: _Rule) -> jax.Array:
    derivative = fn
    for _ in range(order):
        derivative = _derivative(derivative)
    total = jnp.zeros_like(corners[0])
    for weight, point in zip(rule.weights, rule.points, strict=True):
        # Not the sum of products with the coordinates, which may leave the interval by rounding.
        point = corners[0] + sum(
            share * (corner - corners[0]) for share, corner in zip(point[1:], corners[1:], strict=True)
        )
        total += weight * _at(derivative, point, order)
    return total


def _derivative(fn: Function) -> Function:
    return lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def _at(fn: Function, points: jax.Array, order: int) -> jax.Array:
    """A function of arrays of shape (..., n), at arrays with more axes behind."""
    front, behind = range(order), range(-order, 0)
    moved = jnp.moveaxis(points, behind, front)
    # Without -1, which has no meaning for an empty array.
    rows = moved.reshape(math.prod(moved.shape[:order]), *moved.shape[order:])
    return jnp.moveaxis(jax.vmap(fn)(rows).reshape(moved.shape), front, behind)


def _nonzero(gap: jax.Array) -> jax.Array:
    return jnp.where(gap == 0, 1, gap)
