"""What is beside a cause is not blamed for it: the line that has to change is named, once, with advice that works."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg

F = np.float32


def line_of(function, text):
    """The number of the line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines, start) if text in line]
    return found


def bisection(g, low, high):
    def halve(_, ends):
        middle = ends.mean()
        return jnp.where(g(middle) > 0, jnp.stack([ends[0], middle]), jnp.stack([middle, ends[1]]))

    return lax.fori_loop(0, 60, halve, jnp.stack([low, high])).mean()


def equilibrium(tangent_solve):
    def extent(p):
        g = lambda x: x**2 / (p["c"] - x) - p["k"]
        solve = lambda g, x: bisection(g, 0.0 * x, 0.999 * p["c"])
        return lax.custom_root(g, 0.5 * p["c"], solve, tangent_solve)

    return lambda p: (extent(p) - 0.3) ** 2, {"c": F(1.5), "k": F(0.4)}


def test_a_wrong_tangent_solve_is_named_and_not_the_search():
    loss, at = equilibrium(lambda g, y: y)
    report = pg.check(loss, progress=False)(at)
    (finding,) = report.findings
    assert (finding.severity, finding.reason, finding.leaves) == ("error", "root", ("['c']", "['k']")), str(report)
    assert finding.operation == "custom_root"
    assert finding.line == line_of(equilibrium, "lax.custom_root(")


def test_a_right_tangent_solve_is_clean():
    loss, at = equilibrium(lambda g, y: y / g(jnp.ones_like(y)))
    assert not pg.check(loss, progress=False)(at).findings


def second_difference(p):
    h = 1e-4
    potential = lambda x: p["depth"] * (1 - jnp.exp(-p["a"] * (x - 1.5))) ** 2
    up, middle, down = potential(1.7 + h), potential(1.7), potential(1.7 - h)
    return (up - 2 * middle + down) / h**2


def heat_capacity(p):
    levels = p["gap"] * jnp.arange(4.0) + p["offset"]
    energy = lambda t: jnp.sum(levels * jax.nn.softmax(-levels / t))
    below, above = energy(299.9999), energy(300.0001)
    rise = above - below
    return rise / 2e-4


@pytest.mark.parametrize(
    ("function", "at", "text"),
    [
        (second_difference, {"depth": F(4.7), "a": F(1.9)}, "up - 2 * middle"),
        (heat_capacity, {"gap": F(150.0), "offset": F(20.0)}, "rise = above - below"),
    ],
)
def test_digits_cancel_where_the_uses_of_a_number_meet(function, at, text):
    report = pg.check(function, progress=False)(at)
    found = {(f.kind, f.reason, f.line) for f in report.findings if f.severity != "info"}
    assert found == {("precision", "cancels", line_of(function, text))}, str(report)


def test_a_convention_for_some_leaves_of_one_line_is_one_finding():
    u = np.array([0.0, 0.5, 0.25], F)

    def misfit(sky):
        waves = 2 * jnp.pi * u[:, None] * sky["position"]
        real, imaginary = (jnp.sum(sky["flux"] * part(waves), -1) for part in (jnp.cos, jnp.sin))
        return jnp.sum((jnp.arctan2(imaginary, real) - 0.2) ** 2)

    at = {"flux": np.array([1.0, -1.0], F), "position": np.array([0.3, 0.9], F)}
    (finding,) = pg.check(misfit, progress=False)(at).findings
    assert (finding.kind, finding.leaves, finding.fix) == ("nan", ("['flux']", "['position']"), None)
    assert "differences cannot tell" in finding.message


def mean_temperature_difference(p):
    same = p["hot"] == p["cold"]
    ratio = jnp.where(same, 1.0, p["hot"]) / jnp.where(same, 2.0, p["cold"])
    return p["area"] * jnp.where(same, p["hot"], (p["hot"] - p["cold"]) / jnp.log(ratio))


def test_a_removable_singularity_is_at_the_branch_that_is_taken():
    report = pg.check(mean_temperature_difference, progress=False)({"area": 2.0, "cold": 15.0, "hot": 15.0})
    (finding,) = report.findings
    assert (finding.reason, finding.operation) == ("removable", "where")
    assert finding.line == line_of(mean_temperature_difference, 'p["area"] * jnp.where(')


def searched(price):
    def halve(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        above = middle**3 > price
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, 40, halve, (F(0.0), F(200.0)))
    return 0.5 * (low + high)


@pytest.mark.parametrize("price", [0.01, 2000.0])
def test_no_surrogate_is_a_fix_for_a_search_whose_slope_it_does_not_have(price):
    (finding,) = pg.check(searched, progress=False)(F(price)).findings
    assert (finding.kind, finding.fix) == ("zero", None)
    assert "custom_root" in finding.suggestion


def test_a_stop_in_the_function_of_a_wrong_rule_is_not_beside_it():
    def step(z, w):
        return jnp.tanh(w * z + 0.3)

    def iterated(w):
        return lax.fori_loop(0, 60, lambda _, z: step(z, w), F(0.0))

    @jax.custom_vjp
    def fixed_point(w):
        return step(lax.stop_gradient(iterated(w)), w)

    def backward(saved, g):
        w, z = saved
        by_z, by_w = jax.grad(step, argnums=(0, 1))(z, w)
        return (1.1 * g * by_w / (1 - by_z),)

    fixed_point.defvjp(lambda w: ((z := fixed_point(w)), (w, z)), backward)
    (finding,) = pg.check(lambda w: fixed_point(w) ** 2, progress=False)(F(0.6)).findings
    assert (finding.severity, finding.reason) == ("error", "rule")


def saturation(p):
    ratio = p["a"] / p["b"]
    part = ratio / (1 + ratio)
    return jnp.where(p["b"] > 0, part, 0.0) * p["a"]


def test_the_infinity_that_a_quotient_is_made_of_is_named():
    found = pg.check(saturation, progress=False)({"a": F(0.7), "b": F(0.0)}).findings
    assert {(finding.kind, finding.line) for finding in found} == {("nan", line_of(saturation, 'p["a"] / p["b"]'))}


def test_a_quotient_that_is_infinite_itself_is_named():
    function = lambda p: jnp.where(p["b"] > 0, p["a"] / p["b"], 0.0) + 0 * jnp.log(p["a"] - p["a"] + 1)
    found = pg.check(function, progress=False)({"a": F(0.7), "b": F(0.0)}).findings
    assert {(finding.kind, finding.reason, finding.operation) for finding in found} == {("nan", "not taken", "/")}


def load(turns, factor=1.0):
    """The root of a cubic by bisection, with a right rule if the factor is 1."""

    def found(p):
        g = lambda d: p["stiffness"] * d + d**3 - p["load"]
        search = lambda g, d: bisection_of(g, turns)
        return lax.custom_root(g, jnp.float32(0.7), search, lambda g, y: factor * y / g(1.0)) ** 2

    return found, {"load": F(1.6), "stiffness": F(2.5)}


def bisection_of(g, turns):
    def halve(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        above = g(middle) > 0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    return sum(lax.fori_loop(0, turns, halve, (F(0.0), F(4.0)))) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turns", "factor", "verdict"),
    [
        (12, 1.0, "inconclusive"),
        (16, 1.0, "ok"),
        (20, 1.0, "ok"),
        (40, 1.0, "ok"),
        (20, 1.3, "error"),
        (40, 1.3, "error"),
    ],
)
def test_what_a_bisection_finds_has_its_slope_from_afar(turns, factor, verdict):
    """Between two neighbours of its grid it is flat, and the rule for its limit is right to as many digits as it is."""
    function, at = load(turns, factor)
    report = pg.check(function, progress=False)(at)
    assert report.verdict == verdict, str(report)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.2, False)])
def test_a_bisection_may_end_on_a_tolerance(tolerance, factor, is_right):
    def halve(t, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        above = middle**3 + middle > t
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    @jax.custom_jvp
    def root(t):
        is_wide = lambda ends: ends[1] - ends[0] > tolerance
        low, high = lax.while_loop(is_wide, lambda ends: halve(t, ends), (0.0 * t, 0.0 * t + 4.0))
        return 0.5 * (low + high)

    root.defjvp(lambda p, t: ((x := root(*p)), factor * t[0] / (3 * x**2 + 1)))
    report = pg.check(lambda t: root(t) ** 2, progress=False)(F(1.3))
    assert report.verdict != "error" if is_right else report.verdict == "error", str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "ok"), (1.008, "error"), (1.03, "error")])
def test_what_a_search_compares_does_not_excuse_a_wrong_rule(factor, verdict):
    """A golden section that has converged: to let what waits go on makes another function of it, which is flat."""
    ratio = (5**0.5 - 1) / 2
    cost = lambda x, t: jnp.cosh(x - t**2) + 0.1 * x**2
    slope = jax.grad(cost)

    def shorten(t, ends):
        low, high = ends
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        is_left = cost(a, t) < cost(b, t)
        return jnp.where(is_left, low, a), jnp.where(is_left, b, high)

    @jax.custom_jvp
    def lowest(t):
        start = jnp.zeros_like(t), jnp.full_like(t, 5.0)
        return sum(lax.fori_loop(0, 30, lambda _, ends: shorten(t, ends), start)) / 2

    @lowest.defjvp
    def rule(primals, tangents):
        (t,) = primals
        x = lowest(t)
        return x, -factor * jax.grad(slope, 1)(x, t) / jax.grad(slope)(x, t) * tangents[0]

    report = pg.check(lambda t: jnp.sin(lowest(t)), progress=False)(F(1.2))
    assert report.verdict == verdict, str(report)


SAMPLES = np.random.default_rng(7).normal(size=300).astype(F)


@pytest.mark.parametrize("scale", [0.5, 0.7, 1.0])
def test_counts_that_many_samples_change_are_stopped(scale):
    def misfit(p):
        counts, _ = jnp.histogram(SAMPLES * jnp.exp(p["scale"]), bins=12, range=(-3.0, 3.0))
        return jnp.mean((counts - 25.0) ** 2)

    report = pg.check(misfit, progress=False)({"scale": F(scale)})
    (finding,) = report.findings
    assert (report.verdict, finding.kind, finding.reason) == ("stopped", "zero", "compared"), str(report)
    assert "custom_root" not in finding.suggestion


def test_a_few_steps_are_no_slope():
    report = pg.check(lambda p: jnp.floor(3 * p["x"]) * 2.0, progress=False)({"x": F(1.7)})
    assert report.verdict == "ok", str(report)


def test_what_a_histogram_leaves_out_is_no_index_out_of_bounds():
    data = 1.5 * SAMPLES

    def misfit(p):
        weights = jnp.exp(p["a"] * jnp.tanh(data))
        counts, _ = jnp.histogram(data, bins=12, range=(-3.0, 3.0), weights=weights)
        return jnp.mean((counts - 20.0) ** 2)

    assert not pg.check(misfit, progress=False)({"a": F(0.3)}).findings


@pytest.mark.slow
def test_steps_that_are_accepted_by_rounding_do_not_change_the_value():
    """The method of Levenberg and Marquardt by hand: at its end, rounding decides which step is accepted."""
    x = jnp.linspace(0, 2, 12)
    model = lambda p: p[0] * jnp.exp(-p[1] * x)

    def solve(y):
        residual = lambda p: model(p) - y

        def turn(_, state):
            p, damping, cost = state
            jacobian = jax.jacfwd(residual)(p)
            step = jnp.linalg.solve(jacobian.T @ jacobian + damping * jnp.eye(2), -jacobian.T @ residual(p))
            other = jnp.sum(residual(p + step) ** 2)
            is_better = other < cost
            damping = jnp.where(is_better, damping / 5, damping * 5)
            return jnp.where(is_better, p + step, p), damping, jnp.where(is_better, other, cost)

        start = jnp.array([1.0, 1.0])
        return lax.fori_loop(0, 15, turn, (start, F(0.1), jnp.sum(residual(start) ** 2)))[0]

    fit = jax.custom_vjp(solve)

    def backward(saved, g):
        p, y = saved
        gradient = lambda p, y: jax.grad(lambda p: 0.5 * jnp.sum((model(p) - y) ** 2))(p)
        pulled = jnp.linalg.solve(jax.jacfwd(gradient)(p, y).T, g)
        return (-jax.vjp(lambda y: gradient(p, y), y)[1](pulled)[0],)

    fit.defvjp(lambda y: ((p := solve(y)), (p, y)), backward)
    generator = np.random.default_rng(0)
    generator.normal(size=(4, 4))
    y = 2 * jnp.exp(-1.3 * x) + 0.1 * jnp.asarray(generator.normal(size=12), F)
    report = pg.check(lambda y: jnp.sum(fit(y) ** 2), progress=False)(y)
    assert report.verdict == "ok", str(report)
