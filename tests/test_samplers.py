"""What the gradient of each sampler of this JAX is, as the page on random functions says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.special import gammaln
from jax.scipy.stats import norm

from helpers.tables import table

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "guide" / "random.md").read_text()
KEYS = 4000


def halves(b):
    return (norm.pdf(0.0) - norm.pdf(b)) / (norm.cdf(b) - 0.5)


def ball_moment(p):
    return 2 * jnp.exp(gammaln(3 / p) + gammaln(1 + 2 / p) - gammaln(1 / p) - gammaln(1 + 4 / p))


# A number made of a draw, the parameter, and the derivative of its mean.
PATHWISE = {
    "uniform": (lambda k, p: random.uniform(k, maxval=p), 2.0, 0.5),
    "truncated_normal": (lambda k, p: random.truncated_normal(k, 0.0, p), 1.0, jax.grad(halves)),
    "pareto": (lambda k, p: random.pareto(k, p), 5.0, -1 / 16),
    "rayleigh": (lambda k, p: random.rayleigh(k, p), 2.0, np.sqrt(np.pi / 2)),
    "weibull_min": (lambda k, p: random.weibull_min(k, p, 2.0), 2.0, np.sqrt(np.pi) / 2),
    "triangular": (lambda k, p: random.triangular(k, 0.0, p, 2.0), 1.0, 1 / 3),
    "double_sided_maxwell": (lambda k, p: random.double_sided_maxwell(k, 1.0, p) ** 2, 2.0, 12.0),
    "lognormal": (lambda k, p: random.lognormal(k, p), 0.5, 0.5 * np.exp(0.125)),
    "multivariate_normal": (
        lambda k, p: (random.multivariate_normal(k, jnp.zeros(2), p * jnp.eye(2)) ** 2).sum(),
        1.5,
        2.0,
    ),
}
IMPLICIT = {
    "gamma": (lambda k, p: random.gamma(k, p), 2.0, 1.0),
    "loggamma": (lambda k, p: jnp.exp(random.loggamma(k, p)), 2.0, 1.0),
    "beta": (lambda k, p: random.beta(k, p, 3.0), 2.0, 3 / 25),
    "dirichlet": (lambda k, p: random.dirichlet(k, jnp.array([1.0, 3.0]).at[0].set(p))[0], 2.0, 3 / 25),
    "t": (lambda k, p: random.t(k, p) ** 2, 10.0, -2 / 64),
    "chisquare": (lambda k, p: random.chisquare(k, p), 3.0, 1.0),
    "f": (lambda k, p: random.f(k, 3.0, p), 12.0, -2 / 100),
    "generalized_normal": (
        lambda k, p: jnp.abs(random.generalized_normal(k, p)),
        2.0,
        jax.grad(lambda p: jnp.exp(gammaln(2 / p) - gammaln(1 / p))),
    ),
    "ball": (lambda k, p: (random.ball(k, 2, p) ** 2).sum(), 2.0, jax.grad(ball_moment)),
}
ZERO = {
    "bernoulli": lambda k, p: random.bernoulli(k, p),
    "categorical": lambda k, p: random.categorical(k, jnp.array([0.0, 1.0]) * p),
    "poisson": lambda k, p: random.poisson(k, p),
    "binomial": lambda k, p: random.binomial(k, 5.0, p),
    "multinomial": lambda k, p: random.multinomial(k, 5.0, jnp.stack([p, 1 - p]))[0],
    "geometric": lambda k, p: random.geometric(k, p),
    "choice": lambda k, p: random.choice(k, 2, p=jnp.stack([1 - p, p])),
}
BIASED = {"wald": (lambda k, p: random.wald(k, p), 1.3, 1.0)}


def keys():
    return random.split(random.key(5), KEYS)


def measured(f, p, truth):
    """How many standard errors the mean gradient is off; and the share of keys at which it is the difference's."""

    def at(key, p):
        step = 1e-4 * p
        return jax.grad(f, 1)(key, p), (f(key, p + step) - f(key, p - step)) / (2 * step)

    gradients, differences = map(np.asarray, jax.jit(jax.vmap(at, (0, None)))(keys(), p))
    off = gradients.mean() - (float(truth(p)) if callable(truth) else truth)
    same = np.abs(differences - gradients) < 1e-4 * (1 + np.abs(gradients))
    return abs(off) / (gradients.std() / np.sqrt(KEYS)), same.mean()


@table("name", PATHWISE)
def test_pathwise(name):
    with jax.enable_x64(True):
        off, same = measured(*PATHWISE[name])
    assert off < 4
    assert same == 1


@pytest.mark.slow
@table("name", IMPLICIT)
def test_implicit(name):
    with jax.enable_x64(True):
        off, same = measured(*IMPLICIT[name])
    assert off < 4
    assert same < 0.99


@table("name", ZERO)
def test_silently_zero(name):
    def both(key, p):
        return jax.value_and_grad(lambda p: ZERO[name](key, p) * 1.0)(p)

    (low, gradients), (high, _) = (jax.jit(jax.vmap(both, (0, None)))(keys()[:1000], p) for p in (0.3, 0.7))
    assert not np.any(gradients)
    error = np.sqrt((np.var(low) + np.var(high)) / 1000)
    assert abs(np.mean(high) - np.mean(low)) > 3 * error


def test_biased():
    with jax.enable_x64(True):
        off, _ = measured(*BIASED["wald"])
    assert off > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "samplers"), [("pathwise", PATHWISE), ("implicit", IMPLICIT), ("silently zero", ZERO), ("biased", BIASED)]
)
def test_the_page_says_so(word, samplers):
    row = re.search(rf"^\| {word}: .*\|(.*)\|$", PAGE, re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", row) == list(samplers)
