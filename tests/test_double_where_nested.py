"""Programs that raised: derivatives within derivatives, of functions under `double_where` within such functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from jax.experimental.ode import odeint

import partgrad as pg
from helpers.tables import table
from test_double_where_composed import ORDERS, compare

X = np.array([0.0, 1.7, 0.6])
by_hand = lambda f: f


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def a_cond_in_a_scan(guarded):
    root = lambda c: jnp.where(c > 0, jnp.sqrt(jnp.where(c > 0, c, 1.0) if guarded else c), c)
    step = lambda x: lambda c, k: (lax.cond(k, root, lambda c: c * x, c), None)
    return lambda x: lax.scan(step(x), x, np.array([True, False, True]))[0].sum()


def logarithm(guarded):
    log = lambda v: jnp.log(jnp.where(v > 0, v, 1.0) if guarded else v)
    return lambda v, y: lax.cond(v > 0, lambda v: log(v) * y, lambda v: v**2 * y, v)


def gradients_in_a_batched_scan(guarded, wrap):
    gradient = jax.grad(wrap(logarithm(guarded)))
    step = lambda v: lambda k, _: (k * 0.5 + gradient(v, 2.0), None)
    return lambda x: jax.vmap(lambda v: lax.scan(step(v), v, None, length=2)[0])(x).sum()


def of_a_parameter(rate):
    field = lambda y, t, a: rate(a) * y
    return lambda x: jnp.sum(odeint(field, jnp.ones(2), np.array([0.0, 0.5]), x) ** 2)


def solved_of_a_parameter(x):
    return jnp.sum(1 + jnp.exp(-jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)))


def of_the_state(rate):
    return lambda x: jnp.sum(odeint(lambda y, t: rate(y), x, np.array([0.0, 0.5])) ** 2)


def solved_of_the_state(x):
    y = jnp.where(x > 0, (jnp.sqrt(jnp.where(x > 0, x, 1.0)) - 0.25) ** 2, x)
    return jnp.sum(x**2 + y**2)


def unused_in_a_barrier(x):
    return jnp.sum(lax.optimization_barrier((jnp.sin(x), x))[1] * 2.0 * x)


PROGRAMS = {
    "a cond in a scan": (pg.double_where(a_cond_in_a_scan(False)), a_cond_in_a_scan(True)),
    "gradients in a batched scan": (
        gradients_in_a_batched_scan(False, pg.double_where),
        gradients_in_a_batched_scan(True, by_hand),
    ),
    "wrapped again": (
        pg.double_where(gradients_in_a_batched_scan(False, pg.double_where)),
        gradients_in_a_batched_scan(True, by_hand),
    ),
    "a barrier": (pg.double_where(unused_in_a_barrier), unused_in_a_barrier),
}


@table("name, order", PROGRAMS, ORDERS, quick=0, most=2, kind=lambda name, order: name)
def test_what_raised(name, order):
    ours, expected = PROGRAMS[name]
    compare(ours, expected, order, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trajectory", "solved", "is_outside"),
    [(of_a_parameter, solved_of_a_parameter, True), (of_the_state, solved_of_the_state, False)],
)
def test_an_ordinary_differential_equation(trajectory, solved, is_outside):
    """Its rule differentiates the vector field, solves for that by the rule itself, and saves what it solved."""
    rate = lambda v: -jnp.where(v > 0, jnp.sqrt(v), 0.0)
    x, reverse = X[:2], lambda f: jax.jacrev(jax.jacrev(f))
    np.testing.assert_allclose(jax.jit(jax.grad(pg.double_where(trajectory(rate))))(x), jax.grad(solved)(x), rtol=1e-6)
    ours = pg.double_where(trajectory(rate)) if is_outside else trajectory(pg.double_where(rate))
    np.testing.assert_allclose(jax.jit(reverse(ours))(x), reverse(solved)(x), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_at_both_orders():
    inner, outer = a_cond_in_a_scan(False), a_cond_in_a_scan(True)
    f = lambda f, wrap: lambda x: jnp.sum(jax.grad(wrap(f))(x) ** 2)
    for transform in (jax.grad, jax.jacfwd):
        found = transform(pg.double_where(f(inner, pg.double_where)))(X)
        np.testing.assert_allclose(found, transform(f(outer, by_hand))(X), rtol=1e-9)


@pytest.mark.slow
def test_an_ordinary_differential_equation_at_both_orders():
    f = lambda y: jnp.sum(jnp.sin(odeint(lambda y, t: -jnp.sin(y), y, np.array([0.0, 0.5]))))
    solved = lambda y: jnp.sum(jnp.sin(y) + jnp.sin(2 * jnp.arctan(jnp.exp(-0.5) * jnp.tan(y / 2))))
    slopes = lambda f: lambda y: jnp.sum(jax.grad(f)(y) ** 2)
    found = jax.jit(jax.grad(pg.double_where(slopes(pg.double_where(f)))))(X)
    np.testing.assert_allclose(found, jax.grad(slopes(solved))(X), rtol=1e-6)


@pytest.mark.slow
def test_differential_equations_that_stop_on_their_own():
    """A loop under `vmap` keeps the mask of each element of the batch."""

    def f(root):
        field = lambda y, t: jnp.where(y > 0, root(y), -0.1) - y
        solved = jax.vmap(lambda y: odeint(field, y, np.array([0.0, 1.0])))
        return lambda y: jnp.sum(solved(jnp.stack([y, 5 * y]))[:, -1] ** 2)

    guarded = lambda y: jnp.sqrt(jnp.where(y > 0, y, 1.0))
    gradients = jax.jit(lambda x: (jax.grad(pg.double_where(f(jnp.sqrt)))(x), jax.grad(f(guarded))(x)))
    np.testing.assert_allclose(*gradients(X - 0.1), rtol=1e-9)


@pytest.mark.slow
def test_jet():
    f = lambda v: jnp.where(v > 0, jnp.sin(v) * v, v)
    series = lambda f: jet(f, (0.7,), ([1.0, 0.0],))
    np.testing.assert_allclose(series(pg.double_where(f))[1], series(f)[1])


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


@root.defjvp
def _(primals, tangents):
    # As many rules are written: the value is a call of the function itself.
    return root(*primals), tangents[0] * 0.5 / jnp.sqrt(primals[0])


def forward(function, tangent):
    return lambda x: jax.jvp(function, (x,), (tangent,))[1]


def batched(function, tangent):
    return lambda x: jax.vmap(lambda t: jax.jvp(function, (x,), (t,))[1])(jnp.stack([tangent]))[0]


@pytest.mark.parametrize(
    ("outer", "inner", "holds_traced"),
    [
        *((outer, inner, False) for outer in (forward, batched) for inner in (forward, batched)),
        # A rule that holds a traced value is not batched: `docs/guide/double_where_limits.md`.
        *((outer, forward, True) for outer in (forward, batched)),
    ],
)
def test_a_gradient_of_a_rule_under_double_where_twice_has_its_second_derivative(outer, inner, holds_traced):
    def of(scale):
        @jax.custom_jvp
        def scaled(x):
            return scale * jnp.sqrt(x)

        scaled.defjvp(lambda p, t: (scale * jnp.sqrt(p[0]), t[0] * scale * 0.5 / jnp.sqrt(p[0])))
        return scaled if holds_traced else root

    def second(x, tangent):
        slope = pg.double_where(lambda x: jax.grad(pg.double_where(lambda x: of(tangent)(x) * x))(x))
        return outer(inner(slope, tangent), tangent)(x)

    # The third derivative of x ** 1.5.
    np.testing.assert_allclose(jax.jit(second)(0.6, 1.0), -0.375 * 0.6**-1.5, rtol=1e-5)
