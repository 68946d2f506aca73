"""A fix is what was tried and agrees with the differences; what cannot be tried is a suggestion; following it helps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

F = lambda *values: np.array(values, np.float32)
KEY = jax.random.key(0)
check = lambda f, *args, **options: pg.check(f, progress=False, **options)(*args)


def masked(x):
    return jnp.sum(jnp.where(x > 1, jnp.sqrt(jnp.where(x > 1, x, 1.0) - 1) * jnp.sqrt(x - 1), 0.0))


def norm(x):
    return jnp.linalg.norm(x)


def distance(x):
    return jnp.sqrt(jnp.sum(x**2)) + jnp.sum(x)


def curved(k):
    root = jnp.sqrt(jnp.abs(k))
    return jnp.where(k == 0, 2.0, jnp.sin(root * 2.0) / root)


def discrete(p):
    return jnp.mean(jax.random.bernoulli(KEY, p["p"], (4,)) * p["gain"])


def scored(p):
    log_prob = lambda b, p: b * jnp.log(p) + (1 - b) * jnp.log1p(-p)
    draw = lambda key, p: jax.random.bernoulli(key, p).astype(float)
    sample = lambda key: pg.draw(draw, key, p["p"], gradient="score", log_prob=log_prob) * p["gain"]
    return pg.expectation(sample, samples=4)(KEY)


def fixed(p):
    draw = lambda key, p: jax.random.bernoulli(key, p).astype(float)
    return pg.draw(draw, KEY, p["p"], gradient="fixed") * p["gain"]


P = {"p": np.float32(0.4), "gain": np.float32(2)}
# The function, the point, the remedy that its report names, and the function with it.
REMEDIES = {
    "double_where": (masked, F(0.5, 3), "partgrad.double_where(f)", pg.double_where(masked)),
    "double_where at a kink": (curved, 0.0, "partgrad.double_where(f)", pg.double_where(curved)),
    "safe.norm": (norm, F(0, 0), "partgrad.safe.norm", lambda x: pg.safe.norm(x)),
    "safe.norm by hand": (distance, F(0, 0), "partgrad.safe.norm", lambda x: pg.safe.norm(x) + jnp.sum(x)),
    "score": (discrete, P, "gradient='score'", scored),
    "fixed": (discrete, P, "gradient='fixed'", fixed),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REMEDIES)
def test_who_follows_a_remedy_is_warned_of_nothing(name):
    function, point, remedy, followed = REMEDIES[name]
    assert remedy in str(check(function, point)).replace("\n  ", " ")
    report = check(followed, point)
    assert report.ok, str(report)
    assert all(f.severity == "info" for f in report.findings), str(report)


FIXES = {
    "double_where": (masked, F(0.5, 3), "partgrad.double_where(f)"),
    "double_where at a kink": (curved, 0.0, "partgrad.double_where(f)"),
    "safe.norm": (norm, F(0, 0), "partgrad.safe.norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXES)
def test_a_fix_was_tried_and_its_derivative_agrees(name):
    function, point, by = FIXES[name]
    (finding,) = [f for f in check(function, point).findings if f.severity == "error"]
    assert finding.fix.by == by
    assert np.isfinite(finding.fix.derivative)
    assert finding.suggestion == ""


# Finite with a remedy, and wrong or not to be told.
NOT_FIXED = {
    "a slope of another value": (lambda x: jnp.where(x == 0, 3 * x, x + 0 * jnp.sqrt(x**2)), 0.0),
    "a branch without a slope": (lambda x: jnp.where(x == 0, 1.0, jnp.log1p(x) / x), 0.0),
    "a root": (lambda x: jnp.sqrt(x), 0.0),
    "a logarithm": (lambda x: jnp.log(x), 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_FIXED)
def test_what_does_not_agree_is_no_fix(name):
    function, point = NOT_FIXED[name]
    for finding in check(function, point).findings:
        assert finding.fix is None, finding.message
        assert finding.severity != "error" or finding.suggestion


@pytest.mark.slow
def test_a_suggestion_that_cannot_be_told_says_so():
    (finding,) = check(lambda x: jnp.sqrt(x), 0.0).findings
    assert finding.details["by"] == "partgrad.safe.sqrt"
    assert "cannot tell" in finding.suggestion


NAMES = {
    "clip": (lambda x: jnp.arccos(jnp.clip(x, -1.0, 1.0)), 1.0, {"arccos"}),
    "safe": (lambda x: pg.safe.norm(x), F(0, 0), {"safe.norm"}),
    "power": (lambda x: x**0.5, 0.0, {"power", "**", "sqrt"}),
    "divide": (lambda x: 1.0 / x, 0.0, {"/"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_is_what_was_written(name):
    function, point, operations = NAMES[name]
    assert {f.operation for f in check(function, point).findings} <= operations


def test_a_fix_around_constants_is_compared():
    """They are the first operands of what `double_where` traces."""
    scales = jnp.array([1.0, 2.0, 3.0])
    scaled = jax.custom_vjp(lambda x: jnp.sum(x * scales))
    scaled.defvjp(lambda x: (jnp.sum(x * scales), None), lambda _, cotangent: (cotangent * scales,))
    (finding,) = check(lambda x: scaled(jnp.where(x > 0, jnp.sqrt(x), 0.0)), F(-1, 1, 2)).findings
    assert finding.fix.slope == pytest.approx(finding.fix.derivative)
