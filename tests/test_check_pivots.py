"""A stopped number is scored if its density is formed, which has a pivot; a target with noise in it is a stop."""

import gc

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jax.scipy import stats

import partgrad as pg
from helpers.tables import table
from partgrad._check.program import Program

KEY, stop = random.key(3), lax.stop_gradient
P = {"m": jnp.array(0.3), "s": jnp.array(0.7), "w": jnp.array([[0.4, -0.2], [0.1, 0.9]])}


def scored(density, sample):
    """A function whose samples do not move with the parameters, times its reward."""

    def loss(p):
        drawn = stop(sample(p))
        return jnp.mean(density(drawn, p) * (jnp.cos(drawn) + drawn**2))

    return loss


def matrix(p):
    factor = jnp.tril(p["w"]) + jnp.eye(2)
    drawn = stop(p["m"] + factor @ random.normal(KEY, (2,)))
    noise = jax.scipy.linalg.solve_triangular(factor, drawn - p["m"], lower=True)
    return (-0.5 * noise @ noise - jnp.sum(jnp.log(jnp.diag(factor)))) * jnp.sum(drawn**3)


def rollout(p):
    def step(state, key):
        mean = jnp.tanh(p["m"] * state)
        action = stop(mean + p["s"] * random.normal(key))
        return stop(0.9 * state + action), (stats.norm.logpdf(action, mean, p["s"]), -(state**2))

    _, (density, reward) = lax.scan(step, jnp.array(0.5), random.split(KEY, 6))
    return jnp.sum(density) * stop(jnp.sum(reward))


def clipped(p):
    drawn = stop(p["m"] + p["s"] * random.normal(KEY, (5,)))
    density = stats.norm.logpdf(drawn, p["m"], p["s"])
    ratio, advantage = jnp.exp(density - stop(density)), drawn**2 - 1
    return jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))


SCORED = {
    "normal": scored(
        lambda x, p: stats.norm.logpdf(x, p["m"], p["s"]), lambda p: p["m"] + p["s"] * random.normal(KEY, (4,))
    ),
    "normal in many dimensions": matrix,
    "exponential": scored(
        lambda x, p: jnp.log(p["s"]) - p["s"] * x, lambda p: random.exponential(KEY, (4,)) / p["s"] + 0 * p["m"]
    ),
    "logistic by its quantiles": scored(
        lambda x, p: stats.logistic.logpdf(x, p["m"], p["s"]),
        lambda p: stats.logistic.ppf(random.uniform(KEY, (4,)), p["m"], p["s"]),
    ),
    "squashed": scored(
        lambda x, p: stats.norm.logpdf(jnp.arctanh(x), p["m"], p["s"]) - jnp.log1p(-(x**2)),
        lambda p: jnp.tanh(p["m"] + p["s"] * random.normal(KEY, (4,))),
    ),
    "log normal": scored(
        lambda x, p: stats.norm.logpdf(jnp.log(x), p["m"], p["s"]) - jnp.log(x),
        lambda p: jnp.exp(p["m"] + p["s"] * random.normal(KEY, (4,))),
    ),
    "a rollout": rollout,
    "a clipped ratio": clipped,
}


@table("name", list(SCORED), quick=2)
def test_what_is_drawn_and_stopped_is_scored_by_its_density(name):
    report = pg.check(lambda p: SCORED[name](p) + jnp.sum(p["w"] ** 2), progress=False)(P)
    assert report.verdict == "ok"
    assert {f.reason for f in report.findings if f.kind == "draw"} == {"score"}


@pytest.mark.slow
def test_a_draw_whose_derivative_is_implicit_may_be_scored():
    def loss(p):
        drawn = stop(random.gamma(KEY, p["s"], (4,)))
        return jnp.mean(stats.gamma.logpdf(drawn, p["s"]) * jnp.sin(drawn))

    assert pg.check(loss, progress=False)({"s": P["s"]}).verdict == "ok"


def pseudo_labels(p):
    data = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    weak = stop(jax.nn.softmax((data + 0.1 * random.normal(KEY, data.shape)) @ p["w"]))
    return jnp.mean(jnp.max(weak, -1) * -jnp.sum(weak * jax.nn.log_softmax(data @ p["w"]), -1))


def smoothed_target(p):
    value = lambda state, action: jnp.tanh(state @ p["w"]) @ jnp.array([0.5, -1.0]) * action
    states = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    action = jnp.clip(0.3 + 0.1 * random.normal(KEY, (4,)), -1, 1)
    error = value(states, 0.3) - stop(0.5 + 0.9 * value(states[::-1], action))
    return jnp.mean(stop(jnp.abs(error)) * error**2)


def noisy_code(p):
    code = jnp.round(p["w"] * 4 + random.uniform(KEY, (2, 2)) - 0.5) / 4 + 0.1 * p["w"]
    return jnp.sum(stop(code) * p["w"] + (p["w"] - 1) ** 2 * stop(jnp.abs(code)))


TARGETS = {f.__name__: f for f in (pseudo_labels, smoothed_target, noisy_code)}


@table("name", list(TARGETS), quick=1)
def test_a_target_with_noise_is_no_draw_that_is_scored(name):
    report = pg.check(TARGETS[name], progress=False)(P)
    verdicts = {row.path: row.verdict for row in report.rows}
    assert verdicts["['w']"] == "stopped"
    assert "score" not in {f.reason for f in report.findings}


@pytest.mark.slow
def test_nothing_of_a_scored_program_is_kept():
    def programs():
        gc.collect()
        return sum(type(thing) is Program for thing in gc.get_objects())

    before = programs()
    pg.check(SCORED["normal"], progress=False)({"m": P["m"], "s": P["s"]})
    assert programs() <= before
