"""Iterations that Python unrolled, under a rule for their limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg


def newton(steps, factor=1.0):
    """A square root by Newton's method; the rule is exact for the limit."""

    @jax.custom_jvp
    def root(a):
        y = jnp.ones_like(a)
        for _ in range(steps):
            y = 0.5 * (y + a / y)
        return y

    @root.defjvp
    def rule(primals, tangents):
        y = root(*primals)
        return y, factor * tangents[0] / (2 * y)

    return lambda a: jnp.sum(root(a) * jnp.arange(1.0, 4.0)), np.array([2.0, 3.0, 11.0], np.float32)


def equilibrium(steps, factor=1.0):
    """A fixed point whose rule iterates as well."""

    def step(z, w, x):
        return jnp.tanh(w @ z + x)

    @jax.custom_vjp
    def fixed_point(w, x):
        z = jnp.zeros_like(x)
        for _ in range(steps):
            z = step(z, w, x)
        return z

    def forward(w, x):
        z = fixed_point(w, x)
        return z, (w, x, z)

    def backward(saved, g):
        w, x, z = saved
        u = g
        for _ in range(40):
            u = g + jax.vjp(lambda z: step(z, w, x), z)[1](u)[0]
        by_w, by_x = jax.vjp(lambda w, x: step(z, w, x), w, x)[1](u)
        return factor * by_w, by_x

    fixed_point.defvjp(forward, backward)
    random = np.random.default_rng(7)
    leaves = {"w": 0.35 * random.normal(size=(3, 3)), "x": 0.5 * random.normal(size=3)}
    return lambda p: jnp.sum(fixed_point(p["w"], p["x"]) ** 2), jax.tree.map(np.float32, leaves)


def transport(steps, factor=1.0):
    """Entropic transport: two numbers are carried, and the cost is made of both."""
    cost = np.random.default_rng(3).uniform(size=(4, 4)).astype(np.float32)

    def potentials(c):
        f, g = jnp.zeros(4), jnp.zeros(4)
        for _ in range(steps):
            f = -0.3 * jax.nn.logsumexp((g[None] - c) / 0.3, axis=1) - 0.3 * jnp.log(4.0)
            g = -0.3 * jax.nn.logsumexp((f[:, None] - c) / 0.3, axis=0) - 0.3 * jnp.log(4.0)
        return f, g

    @jax.custom_vjp
    def distance(c):
        f, g = potentials(c)
        return jnp.mean(f) + jnp.mean(g)

    def forward(c):
        f, g = potentials(c)
        return jnp.mean(f) + jnp.mean(g), (c, f, g)

    def backward(saved, g_out):
        c, f, g = saved
        plan = jnp.exp((f[:, None] + g[None] - c) / 0.3)
        return (factor * g_out * plan / jnp.sum(plan),)

    distance.defvjp(forward, backward)
    return lambda t: distance(cost * t[0] + t[1] * cost**2), np.array([1.0, 0.3], np.float32)


def kepler(steps, factor=1.0):
    """The iteration is inside a compiled function, and something follows it."""

    @jax.jit
    def eccentric(m, e):
        x = m
        for _ in range(steps):
            x = m + e * jnp.sin(x)
        return x

    @jax.custom_jvp
    def cosine(m, e):
        return jnp.cos(eccentric(m, e))

    @cosine.defjvp
    def rule(primals, tangents):
        m, e = primals
        x = eccentric(m, e)
        moves = (tangents[0] + jnp.sin(x) * tangents[1]) / (1 - e * jnp.cos(x))
        return jnp.cos(x), -factor * jnp.sin(x) * moves

    leaves = {"m": np.array([0.3, 1.0, 2.0], np.float32), "e": np.float32(0.4)}
    return lambda p: jnp.sum(cosine(p["m"], p["e"]) ** 2), leaves


FEW = {"newton": (newton, 4), "equilibrium": (equilibrium, 5), "transport": (transport, 3), "kepler": (kepler, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_rule_for_the_limit_is_right_after_few_steps(name):
    make, steps = FEW[name]
    loss, at = make(steps)
    report = pg.check(loss, progress=False)(at)
    assert {finding.reason for finding in report.findings} == {"unconverged"}, str(report)
    assert report.verdict in ("ok", "inconclusive")


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_it_is_clean_after_many(name):
    loss, at = FEW[name][0](40)
    report = pg.check(loss, progress=False)(at)
    assert report.verdict == "ok"
    assert not report.findings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["few", "many"])
@pytest.mark.parametrize("name", FEW)
def test_a_wrong_rule_is_wrong_all_the_same(name, steps):
    make, few = FEW[name]
    loss, at = make(few if steps == "few" else 40, factor=1.1)
    report = pg.check(loss, progress=False)(at)
    assert {(f.severity, f.reason) for f in report.findings} >= {("error", "rule")}, str(report)


def masked(tolerance, unrolled, factor=1.0):
    """Newton's method for many numbers, each of which waits once it has converged."""

    def turn(x, a):
        new = 0.5 * (x + a / x)
        return jnp.where(jnp.abs(new - x) > tolerance, new, x)

    @jax.custom_jvp
    def root(a):
        x = jnp.ones_like(a)
        if not unrolled:
            return jax.lax.fori_loop(0, 10, lambda _, x: turn(x, a), x)
        for _ in range(10):
            x = turn(x, a)
        return x

    root.defjvp(lambda p, t: (root(*p), factor * t[0] / (2 * root(*p))))
    return lambda a: jnp.sum(root(a) * jnp.arange(1.0, 4.0)), np.array([2.0, 3.0, 11.0], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize(("tolerance", "verdict"), [(1e-1, "inconclusive"), (1e-3, "ok"), (1e-6, "ok")])
def test_what_waits_for_others_has_not_converged_either(tolerance, verdict, unrolled):
    loss, at = masked(tolerance, unrolled)
    report = pg.check(loss, progress=False)(at)
    assert report.verdict == verdict, str(report)
    assert {finding.reason for finding in report.findings} <= {"unconverged", "constants"}


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-6])
def test_a_wrong_rule_is_not_excused_by_waiting(tolerance, unrolled):
    loss, at = masked(tolerance, unrolled, factor=1.05)
    report = pg.check(loss, progress=False)(at)
    assert report.verdict == "error", str(report)
