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


def smoothed_by_a_loop(z):
    return jax.lax.fori_loop(0, 5, lambda _, z: z + 0.2 * (jnp.roll(z, 1) - 2 * z + jnp.roll(z, -1)), z)


def smoothed_one_by_one(z):
    for _ in range(5):
        z = z + 0.2 * (jnp.roll(z, 1) - 2 * z + jnp.roll(z, -1))
    return z


def steady_state(smooth, *, unrolled, tolerance=1e-6, factor=1.0, transposed=True):
    """Reaction, then diffusion in several equal parts, until nothing changes; or for many turns in Python."""

    def turn(z, p):
        return smooth(z + 0.3 * (p["source"] - p["rate"] * z**2 + 0.4 * jnp.cumsum(z) / 9))

    def solve(p):
        start = jnp.zeros_like(p["source"])
        if unrolled:
            for _ in range(round(-4 * np.log10(tolerance))):
                start = turn(start, p)
            return start
        moves = lambda pair: jnp.max(jnp.abs(pair[0] - pair[1])) > tolerance
        return jax.lax.while_loop(moves, lambda pair: (turn(pair[0], p), pair[0]), (turn(start, p), start))[0]

    solved = jax.custom_vjp(solve)

    def backward(saved, g):
        p, z = saved
        slopes = jax.jacfwd(turn)(z, p)
        u = jnp.linalg.solve(jnp.eye(4) - (slopes.T if transposed else slopes), g)
        (by_p,) = jax.vjp(lambda p: turn(z, p), p)[1](u)
        return ({"source": by_p["source"], "rate": factor * by_p["rate"]},)

    solved.defvjp(lambda p: ((z := solve(p)), (p, z)), backward)
    leaves = {"rate": np.float32(0.3), "source": np.linspace(0.1, 0.4, 4, dtype=np.float32)}
    return lambda p: jnp.sum((solved(p) - jnp.linspace(1.0, 3.0, 4)) ** 2), leaves


OF_PARTS = [(smooth, unrolled) for smooth in (smoothed_by_a_loop, smoothed_one_by_one) for unrolled in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
@pytest.mark.parametrize(("smooth", "unrolled"), OF_PARTS)
def test_the_parts_of_a_turn_are_no_solver(smooth, unrolled, tolerance):
    loss, at = steady_state(smooth, unrolled=unrolled, tolerance=tolerance)
    report = pg.check(loss, progress=False)(at)
    assert {finding.reason for finding in report.findings} <= {"unconverged", "constants"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"factor": 1.02}, {"factor": 1.1}, {"transposed": False}])
@pytest.mark.parametrize(("smooth", "unrolled"), OF_PARTS)
def test_a_wrong_rule_is_not_excused_by_them(smooth, unrolled, how):
    loss, at = steady_state(smooth, unrolled=unrolled, **how)
    report = pg.check(loss, progress=False)(at)
    assert report.verdict == "error", str(report)


def shooting(residual_of, tolerance):
    """The speed with which something arrives after a given time, by hand or by a library."""

    def loss(p):
        if tolerance is None:
            solver = optimistix.Newton(1e-6, 1e-6)
            return optimistix.root_find(residual_of, solver, jnp.float32(1.0), p, throw=False).value ** 2
        residual = lambda v: residual_of(v, p)
        is_far = lambda f: lambda v: jnp.abs(f(v)) > tolerance
        newton = lambda f, v: jax.lax.while_loop(is_far(f), lambda v: v - f(v) / jax.grad(f)(v), v)
        return jax.lax.custom_root(residual, jnp.float32(0.5), newton, lambda g, y: y / g(jnp.ones_like(y))) ** 2

    return loss, {"c": np.float32(0.4), "k": np.float32(1.3)}


def arrival(drag, steps=20):
    def residual(v, p):
        field = lambda z: jnp.stack([z[1], 0.2 - p["k"] * jnp.sin(z[0]) - p["c"] * z[1] - 0.1 * drag(z[0])])
        step = lambda z: z + field(z + 0.5 / steps * field(z)) / steps
        start = jnp.stack([jnp.zeros_like(v), v])
        return jax.lax.scan(lambda z, _: (step(z), None), start, None, length=steps)[0][0] - 1.0

    return residual


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, None])
def test_a_loop_in_the_equation_is_a_part_of_it(tolerance):
    loss, at = shooting(arrival(jnp.square), tolerance)
    report = pg.check(loss, progress=False)(at)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.1, 2.0])
@pytest.mark.parametrize("tolerance", [1e-5, None])
def test_a_wrong_rule_in_the_equation_is_no_tolerance(tolerance, factor):
    drag = jax.custom_jvp(lambda x: x * x)
    drag.defjvp(lambda p, t: (p[0] ** 2, factor * 2 * p[0] * t[0]))
    loss, at = shooting(arrival(drag), tolerance)
    report = pg.check(loss, progress=False)(at)
    assert report.verdict == "error", str(report)
    assert {finding.reason for finding in report.findings} <= {"rule", "solver", "root"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turns", "factor", "verdict"), [(200, 1.0, "inconclusive"), (1500, 1.0, "ok"), (1500, 1.01, "error")]
)
def test_a_slow_iteration_need_not_stand_after_some_more_turns(turns, factor, verdict):
    """Jacobi's method for 20 unknowns, which takes thousands."""
    matrix = jnp.asarray(2 * np.eye(20) - np.eye(20, k=1) - np.eye(20, k=-1), jnp.float32)

    def run(b):
        return jax.lax.fori_loop(0, turns, lambda _, x: x + (b - matrix @ x) / 2, jnp.zeros_like(b))

    solve = jax.custom_vjp(run)
    solve.defvjp(lambda b: (run(b), None), lambda _, g: (factor * jnp.linalg.solve(matrix, g),))
    at = np.random.default_rng(0).uniform(size=20).astype(np.float32)
    report = pg.check(lambda b: jnp.sum(solve(b) ** 2), progress=False)(at)
    assert report.verdict == verdict, str(report)
