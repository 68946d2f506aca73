"""Faults of the kinds that public repositories had to fix in their gradients, each in a few lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

S = np.float32


def told(report):
    return {(finding.kind, finding.severity, finding.reason, finding.operation) for finding in report.findings}


# --- a search looks where the derivative is wrong --------------------------------------------------------------------


def unit(x):
    n = jnp.linalg.norm(x)
    return (x / jnp.where(n == 0, 1.0, n)) @ jnp.array([1.0, 2.0, 3.0])


IMAGE = jnp.array([0.0, 1.0, 2.0, 3.0, 4.0])


def interpolate(c):
    lower, upper = jnp.floor(c), jnp.ceil(c)
    w = 1 - (c - lower)
    return w * IMAGE[lower.astype(int)] + (1 - w) * IMAGE[upper.astype(int)]


REGIONS = {
    "NaN at and below zero": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), S(1)),
    "NaN below zero only": (lambda x: jnp.where(x >= 0, x**1.5, 0.0), S(0.5)),
    "NaN on both sides": (lambda x: jnp.where(1 - x**2 < 0, 7.0, jnp.sqrt(1 - x**2)), S(0.5)),
    "a power of a maximum": (lambda x: jnp.where(x > 0, jnp.power(jnp.maximum(x, 0), 0.5), 0.0), S(0.7)),
    "a root of a rectifier": (lambda x: jnp.sqrt(jax.nn.relu(x)), S(0.7)),
    "in a scan": (
        lambda x: jax.lax.scan(lambda c, _: (jnp.where(c > 0, jnp.sqrt(c), 0.0), None), x, length=2)[0],
        S(0.7),
    ),
    "an overflow on a path not taken": (lambda x: jnp.where(x > 0, x, jnp.expm1(x)), S(88)),
    "an overflow far away": (lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1), S(1)),
    "a NaN where the value jumps": (unit, jnp.array([0.3, 0.1, 0.2])),
    "where a number is rounded": (interpolate, S(2.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_a_search_finds(name):
    function, start = REGIONS[name]
    assert pg.check(function)(start).ok
    report = pg.check(function, search=True)(start)
    assert report.verdict == "error"
    assert any(f.severity == "error" and f.details["moved"] for f in report.findings)


# --- a right derivative is not called wrong --------------------------------------------------------------------------

RIGHT = {
    "a kink on a steep slope": (lambda x: jnp.abs(x) + jnp.tanh(1e6 * x), 0.0),
    "a kink on a steep slope that bends at once": (lambda x: jnp.abs(x) + x / (1e-6 + jnp.abs(x)), 0.0),
    "Matern 3/2 at zero": (lambda x: (1 + jnp.abs(x)) * jnp.exp(-jnp.abs(x)), 0.0),
    "a cube of an absolute value": (lambda x: jnp.abs(x) ** 3, 0.0),
    "a power from inside": (lambda x: jnp.sqrt(x) ** 4, 1.0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_derivative_is_ok(name, x64):
    function, point = RIGHT[name]
    report = pg.check(function)(point)
    assert report.ok
    assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.slow
def test_a_rule_whose_zero_is_right_is_a_note():
    square = jax.custom_jvp(lambda x: x * x)
    square.defjvp(lambda p, t: (square(*p), jnp.where(p[0] == 0, 0.0, 2 * p[0] * t[0])))
    assert told(pg.check(lambda x: square(x))(S(0))) == {("zero", "info", "truly zero", "a custom rule")}
    # Where a function is flat, its zero is a warning as before.
    assert told(pg.check(lambda x: jax.nn.relu(x))(S(-1))) == {("zero", "warning", "rule", "relu")}


# --- what decides is named -------------------------------------------------------------------------------------------


def logsumexp_with_weights(b):
    a = jnp.where(b != 0, 1.0, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(a))
    return jnp.log(jnp.sum(jnp.exp(a - largest) * b)) + largest


@pytest.mark.slow
def test_the_selection_that_decides():
    nested = lambda x: jnp.where(x == 0, 0.0, jnp.where(x > 0, x, x))
    assert told(pg.check(nested)(0.0)) == {("mismatch", "error", "removable", "==")}
    assert told(pg.check(logsumexp_with_weights)(jnp.array([2.0, 0.0]))) == {("mismatch", "error", "removable", "!=")}


@pytest.mark.slow
def test_one_cause_is_told_once():
    softly = lambda x, y: jnp.maximum(x, y) + jax.nn.softplus(-abs(x - y))
    report = pg.check(softly, argnums=(0, 1))(1.0, 1.0)
    (finding,) = report.findings
    assert (finding.kind, finding.leaves) == ("mismatch", ("args[0]", "args[1]"))
    assert finding.operation in ("abs", "maximum")


@pytest.mark.slow
def test_a_stop_is_told_rather_than_a_condition_in_front_of_it():
    f = lambda x: jnp.where(jnp.array(True), jax.lax.stop_gradient(x**2), x)
    report = pg.check(f)(3.0)
    assert report.verdict == "stopped"
    assert told(report) == {("mismatch", "warning", "stop", "stop_gradient")}


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "slope"), [(2.0, 0.0), (1.0, 2.0)])
def test_a_rule_at_the_edge_of_a_domain(factor, slope):
    """From inside, the slope is 2 at one; beyond, the function is not defined."""
    beta = jax.custom_jvp(lambda x: jax.scipy.special.betainc(2.0, 1.0, x))
    beta.defjvp(lambda p, t: (beta(*p), jnp.where(p[0] == 1, slope, factor * p[0]) * t[0]))
    report = pg.check(lambda x: beta(x))(S(1))
    if slope == 2.0:
        assert report.ok
    else:
        (finding,) = report.findings
        assert (finding.kind, finding.severity, finding.operation) == ("mismatch", "error", "a custom rule")


@pytest.mark.slow
def test_a_nan_among_the_values_is_named_where_it_is_made():
    def cosine(a, b):
        unit_a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        unit_b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        return jnp.sum(unit_a * unit_b, axis=-1)

    def masked(e):
        x = cosine(e[None], e[:, None])
        return jnp.sum(jnp.where(jnp.isnan(x), 0.0, x) * jnp.array([[0.0, 1.0], [1.0, 0.0]]))

    report = pg.check(masked)(jnp.array([[1.0, 2.0], [0.0, 0.0]]))
    first = cosine.__code__.co_firstlineno
    assert {(finding.operation, finding.line) for finding in report.findings} == {("/", first + 1), ("/", first + 2)}
    assert all("in the value of `/`" in finding.message for finding in report.findings)


@pytest.mark.slow
def test_advice_for_equal_singular_values_is_right_when_it_is_followed():
    def inverse(a):
        u, s, v = jnp.linalg.svd(a, full_matrices=False)
        return jnp.sum(jnp.array([[1.0, 2.0], [3.0, 4.0]]) * (v.T @ (u.T / s[:, None])))

    (finding,) = pg.check(inverse)(jnp.eye(2)).findings
    assert "jnp.linalg.pinv" in finding.suggestion
    advised = lambda a: jnp.sum(jnp.array([[1.0, 2.0], [3.0, 4.0]]) * jnp.linalg.pinv(a))
    assert pg.check(advised)(jnp.eye(2)).ok
    np.testing.assert_allclose(jax.grad(advised)(jnp.eye(2)), [[-1, -2], [-3, -4]], atol=1e-5)
