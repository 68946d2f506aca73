"""Finite numbers stay as they are: reads and writes out of bounds, rules that ignore tangents, captured state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

wrapped = pg.double_where


def equal(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


X = np.array([0.3, 0.7, 1.1], np.float32)


BEYOND = np.array([5])


def read(x):
    return jnp.sin(x)[BEYOND][0]


def interpolated(x):
    return (0.75 * jnp.exp(x)[np.array([2])] + 0.25 * jnp.exp(x)[np.array([3])])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("derivative", "f", "truth"),
    [
        (lambda f: jax.jvp(wrapped(f), (X,), (np.ones(3, np.float32),))[1], read, np.cos(1.1)),
        (lambda f: jax.jacfwd(jax.jacfwd(wrapped(f)))(X)[2, 2], read, -np.sin(1.1)),
        (lambda f: jax.grad(pg.consistent_indexing(wrapped(f)))(X)[2], read, np.cos(1.1)),
        (lambda f: jax.jacfwd(wrapped(f))(X)[2], interpolated, np.exp(1.1)),
        (lambda f: jax.jacfwd(pg.consistent_indexing(wrapped(f)))(X)[2], interpolated, np.exp(1.1)),
    ],
    ids=["forward", "second", "reverse, consistent", "interpolation", "interpolation, consistent"],
)
def test_a_read_out_of_bounds(derivative, f, truth):
    np.testing.assert_allclose(derivative(f), truth, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("f", [lambda x: x.at[0].min(5.0)[1], lambda x: x.at[0].max(-5.0)[1]], ids=["min", "max"])
def test_a_scatter_beside_a_nan(f):
    equal(jax.grad(wrapped(f))(np.array([1.0, np.nan], np.float32)), [0.0, 1.0])


@pytest.mark.slow
def test_a_scatter_multiply_out_of_bounds():
    f = lambda c: jnp.asarray(X).at[BEYOND].multiply(c, mode="promise_in_bounds", unique_indices=True).sum()
    equal(jax.grad(wrapped(f))(7.0), jax.grad(f)(7.0))


@jax.custom_jvp
def constant_rule(x):
    return x


constant_rule.defjvp(lambda primals, tangents: (primals[0], jnp.float32(3.0)))


def test_a_rule_that_ignores_its_tangent():
    equal(jax.jvp(wrapped(constant_rule), (1.0,), (1.0,)), (1.0, 3.0))


@pytest.mark.parametrize(
    ("f", "x"), [(lambda i: i // 2, np.int64(2**40)), (lambda x: x / 3, np.float64(1.0))], ids=["int64", "float64"]
)
def test_an_untransformed_call_is_a_call(f, x):
    got, want = wrapped(f)(x), f(x)
    assert got == want
    assert got.dtype == want.dtype


def test_captured_state_is_read_afresh():
    state = {"w": 2.0}
    f = wrapped(lambda x: x * state["w"])
    equal(jax.value_and_grad(f)(3.0), (6.0, 2.0))
    state["w"] = 5.0
    equal(jax.value_and_grad(f)(3.0), (15.0, 5.0))
