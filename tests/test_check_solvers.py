"""A `stop_gradient` in what a solver solves, at tight and at loose tolerances."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

import partgrad as pg


def stop(x):
    return jax.lax.stop_gradient(x)


def root(tolerance, stop=stop):
    solver = optimistix.Newton(tolerance, tolerance)
    solve = lambda a: optimistix.root_find(lambda y, a: y**3 + a * y - stop(a), solver, jnp.float32(1.0), args=a)
    return lambda a: solve(a).value ** 2


def fixed_point(tolerance, stop=stop):
    solver = optimistix.FixedPointIteration(tolerance, tolerance)
    step = lambda y, a: jnp.cos(y * a) * 0.5 + 0.1 * stop(a) * y
    return lambda a: optimistix.fixed_point(step, solver, jnp.float32(1.0), args=a).value ** 2


def least_squares(tolerance, stop=stop):
    x, solver = np.linspace(0, 1, 8, dtype=np.float32), optimistix.LevenbergMarquardt(tolerance, tolerance)
    residuals = lambda y, a: jnp.exp(-y * x) - a * x + 0.3 * stop(a) * y
    return lambda a: optimistix.least_squares(residuals, solver, jnp.float32(1.0), args=a).value ** 2


def pendulum(tolerance, stop=stop):
    field = lambda t, y, a: jnp.stack([y[1], -a * jnp.tanh(y[0]) - 0.05 * stop(a) * y[1]])
    steps = diffrax.PIDController(rtol=tolerance, atol=tolerance)

    def final(a):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            2.0,
            0.1,
            jnp.array([1.0, 0.0]),
            args=a,
            stepsize_controller=steps,
        ).ys

    return lambda a: jnp.sum(final(a) ** 2)


def unrolled(tolerance, stop=stop):
    """By hand, with a rule for the limit, after few or many steps."""
    step = lambda z, a: jnp.cos(z * a) * 0.5 + 0.1 * stop(a) * z

    @jax.custom_vjp
    def solve(a):
        z = jnp.ones_like(a)
        for _ in range(5 if tolerance > 1e-3 else 40):
            z = step(z, a)
        return z

    def backward(saved, g):
        a, z = saved
        by_z, by_a = jax.vjp(step, z, a)[1](jnp.ones_like(z))
        return (g * by_a / (1 - by_z),)

    solve.defvjp(lambda a: ((z := solve(a)), (a, z)), backward)
    return lambda a: solve(a) ** 2


SOLVED = [root, fixed_point, least_squares, pendulum, unrolled]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5])
@pytest.mark.parametrize("make", SOLVED)
def test_a_stop_in_what_is_solved_stops(make, tolerance):
    report = pg.check(make(tolerance), progress=False)(np.float32(1.3))
    (finding,) = report.findings
    assert (report.verdict, finding.reason, finding.operation) == ("stopped", "stop", "stop_gradient"), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("make", SOLVED)
def test_without_it_nothing_is_stopped(make):
    report = pg.check(make(1e-5, stop=lambda x: x), progress=False)(np.float32(1.3))
    assert report.verdict == "ok", str(report)


@pytest.mark.slow
@pytest.mark.parametrize("make", SOLVED)
def test_a_wrong_rule_there_is_an_error(make):
    @jax.custom_jvp
    def wrong(x):
        return 1.0 * x

    wrong.defjvp(lambda p, t: (wrong(*p), 0.9 * t[0]))
    report = pg.check(make(1e-5, stop=wrong), progress=False)(np.float32(1.3))
    assert report.verdict == "error", str(report)
    assert ["wrong" in str(finding.rule) for finding in report.findings] == [True], str(report)
