"""The right-hand sides of a linear solve are problems of their own: one that is not used does not spoil the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table
from test_double_where_composed import ORDERS, derivative

X = np.array([0.0, 1.7, 0.6])
MATRIX = np.array([[2.0, 0.5, 0.1], [0.5, 3.0, 0.2], [0.1, 0.2, 1.5]])
LOWER, UPPER = np.array([0.0, 0.1, 0.2]), np.array([0.1, 0.2, 0.0])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


triangular = jax.scipy.linalg.solve_triangular
by_cholesky = lambda a, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b)
SOLVES = {
    "solve": jnp.linalg.solve,
    "positive": lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos"),
    "triangular": lambda a, b: triangular(a, b, lower=True),
    "transposed": lambda a, b: triangular(a, b, lower=True, trans=1),
    "from the right": lambda a, b: lax.linalg.triangular_solve(jnp.tril(a), b.T, left_side=False, lower=True).T,
    "cho_solve": by_cholesky,
    "lu_solve": lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b),
    "inverse": lambda a, b: jnp.linalg.inv(a) @ b,
    "vmap of solve": jax.vmap(jnp.linalg.solve, (None, 1), 1),
    "vmap of cho_solve": jax.vmap(by_cholesky, (None, 1), 1),
    "vmap of triangular": jax.vmap(lambda a, b: triangular(a, b, lower=True), (None, 1), 1),
    "in a checkpoint": jax.checkpoint(jnp.linalg.solve),
    "tridiagonal": lambda a, b: lax.linalg.tridiagonal_solve(LOWER, np.array([2.0, 3.0, 2.0]), UPPER, b),
}


def program(name, moves, by_hand):
    def f(x):
        matrix = MATRIX + (jnp.outer(jnp.sin(x), jnp.sin(x)) if moves else 0.0)
        positive = x > 0
        columns = jnp.log(jnp.where(positive, x, 1.0) if by_hand else x)
        found = SOLVES[name](matrix, jnp.outer(jnp.array([1.0, 2.0, -1.0]), columns) + x[1])
        return jnp.sum(jnp.where(positive, found, 0.0) * x)

    return f


@table("name, moves, order", SOLVES, [False, True], ORDERS, most=1, quick=0, kind=lambda name, moves, order: name)
def test_a_column_that_is_not_used(name, moves, order):
    found, expected = pg.double_where(program(name, moves, False)), program(name, moves, True)
    both = jax.jit(lambda x: (derivative(found, order)(x), derivative(expected, order)(x)))(X)
    np.testing.assert_allclose(*both, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_missing_data_in_a_gaussian_process():
    y = np.array([[0.3, np.nan], [np.nan, -0.4], [0.1, 0.2]])
    t = np.array([0.0, 0.7, 1.9])

    def likelihood(scale, by_hand=False):
        covariance = jnp.exp(-((t[:, None] - t) ** 2) / scale**2) + 0.1 * jnp.eye(3)
        given = np.nan_to_num(y) if by_hand else y
        mean = jnp.where(np.isnan(y), 0.0, given - jnp.sqrt(scale))
        return jnp.sum(mean * jnp.linalg.solve(covariance, mean)) + jnp.linalg.slogdet(covariance)[1]

    by_hand = lambda scale: likelihood(scale, True)
    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        both = jax.jit(lambda x, order=order: (order(pg.double_where(likelihood))(x), order(by_hand)(x)))(1.3)
        np.testing.assert_allclose(*both, rtol=1e-9)
