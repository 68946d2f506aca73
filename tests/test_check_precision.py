"""Lost digits have a line, relative to what the dtype has; and a solver that stopped early is told to go on."""

import functools
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table

F = lambda *values: np.array(values, np.float32)
HILBERT = 1 / (1 + np.arange(8.0, dtype=np.float32)[:, None] + np.arange(8, dtype=np.float32))


def variance(x):
    return jnp.sqrt(jnp.mean(x**2) - jnp.mean(x) ** 2)  # lost


def log_one_minus_exp(x):
    return jnp.log(1 - jnp.exp(-x)) * jnp.sum(jnp.ones(3))  # lost


def hilbert(b):
    return jnp.sum(jnp.linalg.solve(HILBERT, b) ** 2)  # lost


def pairwise(x):
    squares = jnp.sum(x**2, axis=1)
    distances = squares[:, None] + squares - 2 * x @ x.T  # lost
    return jnp.sum(jnp.sqrt(jnp.where(jnp.eye(3, dtype=bool), 1.0, distances)))


def quadratic_root(b):
    return (-b + jnp.sqrt(b**2 - 4.0)) / 2  # lost


def versine(x):
    return (1 - jnp.cos(x)) / x**2  # lost


def in_a_scan(x):
    step = lambda c, k: (c + (jnp.cos(k * 1e-3 * x) - 1), None)  # lost
    return lax.scan(step, jnp.zeros_like(x), jnp.arange(1.0, 4.0))[0]


LOST = {
    variance: F(100.0, 100.1, 100.3),
    log_one_minus_exp: np.float32(1e-6),
    hilbert: np.ones(8, np.float32),
    pairwise: F(100, 1, 100.1, 1, 100, 1.2).reshape(3, 2),
    quadratic_root: np.float32(3e3),
    versine: np.float32(1e-3),
}


def lines_of(function):
    first = function.__code__.co_firstlineno
    with open(__file__) as source:
        lines = source.read().splitlines()
    (number,) = [n for n in range(first, first + 8) if lines[n - 1].endswith("# lost") and n > first][:1]
    return f"test_check_precision.py:{number}"


@pytest.mark.slow
@pytest.mark.parametrize("function", LOST, ids=lambda f: f.__name__)
def test_the_operation_that_loses_digits_has_its_line(function):
    report = pg.check(function, progress=False)(LOST[function])
    (finding,) = [f for f in report.findings if f.kind == "precision"]
    has_no_digit = finding.details["error"] >= 0.5
    assert (finding.severity, finding.reason) == ("error" if has_no_digit else "warning", "cancels"), str(report)
    assert finding.where == lines_of(function)
    assert report.ok == (finding.details["error"] <= 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("function", LOST, ids=lambda f: f.__name__)
def test_in_float64_there_is_nothing_to_tell(function):
    with jax.enable_x64(True):
        report = pg.check(function, progress=False)(np.asarray(LOST[function], float))
    assert "precision" not in {f.kind for f in report.findings if f.severity == "warning"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_rounding_of_a_dtype_is_right_for_it(dtype):
    x = jnp.asarray([0.3, 1.2, 2.1], dtype)
    report = pg.check(lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)), progress=False)(x)
    assert report.ok
    assert [f for f in report.findings if f.severity != "info"] == [], str(report)


def test_a_narrow_conversion_explains_only_as_much_as_it_rounds():
    right = lambda x: jnp.sum(jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32))
    lost = lambda x: jnp.sum((x.astype(jnp.bfloat16) - jnp.mean(x.astype(jnp.bfloat16))).astype(jnp.float32) ** 2)
    explained = {}
    for name, function, x in (("right", right, F(0.3, 1.2)), ("lost", lost, F(100, 100.3, 100.9))):
        (finding,) = [f for f in pg.check(function, progress=False)(x).findings if f.kind == "precision"]
        explained[name] = finding.details["is_explained"]
        assert finding.details["through"] == "bfloat16"
    assert explained == {"right": True, "lost": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "x"),
    [(variance, F(100.0, 100.01, 100.03)), (lambda x: jnp.log(jnp.cosh(x) * jnp.exp(x)), np.float32(60))],
    ids=["digits", "range"],
)
def test_what_is_finite_in_float64_needs_a_wider_type_and_no_remedy(function, x):
    report = pg.check(function, progress=False)(x)
    assert report.verdict == "error"
    for finding in report.findings:
        assert finding.reason in ("rounding", "value"), str(report)
        assert finding.fix is None


@pytest.mark.slow
def test_an_overflow_is_said_first():
    report = pg.check(lambda p: jnp.log(1 + jnp.exp(p["x"])) * p["y"], progress=False)({"x": 100.0, "y": 2.0})
    assert (report.findings[0].reason, report.findings[0].operation) == ("value", "exp")
    assert report.verdict == "error"


OUTSIDE = {
    "where": lambda x: jnp.where(x > 0, -x, -jnp.inf).sum(),
    "select": lambda x: (2 * jnp.select([x > 1, x > 0], [x, -x], jnp.inf) + x**2).sum(),
    "scan": lambda x: lax.scan(lambda c, v: (c + jnp.where(v > 0, -v, -jnp.inf), None), 0.0, x)[0],
    "jit": lambda x: jax.jit(jax.vmap(lambda v: lax.cond(v > 0, lambda: jnp.log(v), lambda: -jnp.inf)))(x).sum(),
    "library": lambda x: jax.scipy.stats.expon.logpdf(x).sum(),
}
MADE = {
    "log of zero": lambda x: jnp.where(x < 5, jnp.log(x + 1), 0.0).sum(),
    "another infinity beside": lambda x: jnp.where(x > 0, -x, -jnp.inf).sum() + jnp.exp(100 * x + 200).sum(),
    "difference of infinities": lambda x: jnp.where(x > 0, -x, -jnp.inf).sum() - jnp.where(x > 0, -x, -jnp.inf).sum(),
}


@table("name", sorted(OUTSIDE))
def test_an_infinity_that_is_written_is_no_error_and_not_ok(name):
    report = pg.check(OUTSIDE[name], progress=False)(F(-1.0, 0.5))
    (found,) = [f for f in report.findings if f.severity != "info"]
    assert (found.kind, found.severity, found.reason) == ("nan", "warning", "written"), str(report)
    assert report.verdict == "inconclusive"


@table("name", sorted(MADE))
def test_an_infinity_that_is_computed_is_an_error(name):
    report = pg.check(MADE[name], progress=False)(F(-1.0, 0.5))
    assert report.verdict == "error", str(report)
    assert "written" not in {f.reason for f in report.findings}


# --- solvers ---------------------------------------------------------------------------------------------------------


def fixed_point_by_hand(tolerance, slope=1.0):
    @jax.custom_vjp
    def solve(a):
        step = lambda s: (s[1], jnp.cos(a * s[1]))
        return lax.while_loop(lambda s: jnp.abs(s[1] - s[0]) > tolerance, step, (jnp.zeros_like(a), jnp.ones_like(a)))[
            1
        ]

    def forward(a):
        x = solve(a)
        return x, (a, x)

    def backward(residuals, g):
        a, x = residuals
        return (-g * jnp.sin(a * x) * x / (1 + slope * jnp.sin(a * x) * a),)

    solve.defvjp(forward, backward)
    return solve


def optimistix_root(tolerance):
    optimistix = pytest.importorskip("optimistix")
    solver = optimistix.FixedPointIteration(tolerance, tolerance)
    return lambda a: optimistix.fixed_point(lambda y, a: jnp.cos(a * y), solver, jnp.array(1.0), a).value


def jaxopt_root(tolerance):
    jaxopt = pytest.importorskip("jaxopt")
    solver = jaxopt.FixedPointIteration(lambda y, a: jnp.cos(a * y), maxiter=50, tol=tolerance, implicit_diff=True)
    return lambda a: solver.run(jnp.array(1.0), a).params


def conjugate_gradients(tolerance):
    spread = np.diag(np.logspace(0, 4, 12)).astype(np.float32)
    return lambda a: jax.scipy.sparse.linalg.cg(lambda x: spread @ x + a * x, jnp.ones(12), tol=tolerance)[0].sum()


SOLVERS = [fixed_point_by_hand, optimistix_root, jaxopt_root]


@pytest.mark.slow
@pytest.mark.parametrize("make", SOLVERS)
def test_a_solver_that_has_not_converged_is_told_to(make):
    """A rule that shares less than two digits with the differences is not `ok`, and without any it is an error."""
    report = pg.check(make(1e-1), progress=False)(np.float32(0.8))
    (finding,) = report.findings
    assert finding.figures.relative > 1e-2
    severity, verdict = ("error", "error") if finding.figures.relative >= 0.5 else ("warning", "inconclusive")
    assert report.verdict == verdict, str(report)
    assert (finding.kind, finding.severity, finding.reason) == ("precision", severity, "unconverged")
    assert "tolerance" in finding.suggestion
    assert finding.fix is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "verdict"), [(1, "error"), (4, "inconclusive"), (8, "inconclusive"), (16, "ok"), (50, "ok")]
)
def test_the_digits_that_a_solver_shares_with_the_slope_decide(steps, verdict):
    """Each step goes 0.3 of the way, so that 0.7 ** steps of the slope is missing."""

    def root(a):
        step = lambda _, x: x + 0.3 * (a - x)
        loop = lambda f, start: lax.fori_loop(0, steps, step, start)
        return lax.custom_root(lambda x: a - x, jnp.float32(0.0), loop, lambda g, y: y / g(jnp.ones_like(y)))

    report = pg.check(root, progress=False)(np.float32(2.0))
    assert report.verdict == verdict, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*SOLVERS, conjugate_gradients])
def test_a_solver_that_has_converged_is_clean(make):
    report = pg.check(make(1e-6), progress=False)(np.float32(0.8))
    assert report.ok, str(report)
    assert all(f.severity == "info" for f in report.findings), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-1, 1e-6])
def test_a_wrong_rule_of_a_solver_is_an_error_all_the_same(tolerance):
    report = pg.check(fixed_point_by_hand(tolerance, slope=3.0), progress=False)(np.float32(0.8))
    assert report.verdict == "error"
    (finding,) = report.findings
    # The loop has no reverse derivative to compare the rule with.
    assert (finding.kind, finding.reason, finding.operation) == ("mismatch", "unknown rule", "solve")


@pytest.mark.slow
def test_a_solver_is_not_blamed_for_a_wrong_rule_beside_it():
    """What it is off by itself is no more than its tolerance explains."""
    root = optimistix_root(1e-3)

    @jax.custom_vjp
    def halved(x):
        return x**2

    halved.defvjp(lambda x: (x**2, x), lambda x, cotangent: (x * cotangent,))
    report = pg.check(lambda a: root(a) + halved(a), progress=False)(np.float32(0.8))
    assert [(f.kind, f.reason) for f in report.findings] == [("mismatch", "rule")], str(report)
    assert "halved" in report.findings[0].message


def system(x):
    return jnp.diag(x) - 0.8 * (jnp.eye(8, k=1) + jnp.eye(8, k=-1))


def by_lineax(name, tag=False, **how):
    def solved(x):
        lineax = pytest.importorskip("lineax")
        tags = lineax.positive_semidefinite_tag if tag else ()
        operator = lineax.MatrixLinearOperator(system(x), tags)
        return jnp.sum(lineax.linear_solve(operator, jnp.arange(1.0, 9.0), getattr(lineax, name)(**how)).value ** 2)

    return solved


def by_jax(name, matrix=system, **how):
    solve = getattr(jax.scipy.sparse.linalg, name)
    return lambda x: jnp.sum(solve(lambda u: matrix(x) @ u, jnp.arange(1.0, 9.0), **how)[0] ** 2)


LINEAR = {
    "lineax CG, hardly": by_lineax("CG", tag=True, rtol=0.5, atol=0.5),
    "lineax CG, nearly": by_lineax("CG", tag=True, rtol=1e-2, atol=1e-2),
    "lineax BiCGStab": by_lineax("BiCGStab", rtol=1e-1, atol=1e-1),
    "lineax GMRES": by_lineax("GMRES", rtol=1e-1, atol=1e-1, restart=3),
    "CG, one step": by_jax("cg", maxiter=1),
    "CG, three steps": by_jax("cg", maxiter=3),
    "BiCGStab": by_jax("bicgstab", maxiter=3),
    "GMRES": by_jax("gmres", maxiter=1, restart=3),
}
UNEVEN = np.linspace(2, 31, 8, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_solver_that_has_not_converged_is_told_to(name):
    (finding,) = pg.check(LINEAR[name], progress=False)(UNEVEN).findings
    assert (finding.kind, finding.reason) == ("precision", "unconverged"), finding.message
    assert "tolerance" in finding.suggestion


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"maxiter": 3}, {"tol": 1e-6}])
def test_a_promise_of_symmetry_that_is_not_kept_is_an_error_however_far_the_solver_went(how):
    report = pg.check(by_jax("cg", lambda x: jnp.diag(x) + jnp.eye(8, k=1), **how), progress=False)(UNEVEN)
    (finding,) = report.findings
    assert (report.verdict, finding.kind, finding.reason) == ("error", "mismatch", "solve")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weight"), [("CG", 1e-2), ("LU", 1e-2), ("LU", 1e-4)])
def test_a_stop_beside_a_solve_is_to_be_removed_only_if_it_is_the_users(name, weight):
    tight = by_lineax("CG", tag=True, rtol=1e-6, atol=1e-6) if name == "CG" else by_lineax("LU")
    function = lambda x: tight(x) + weight * jnp.sum(x * lax.stop_gradient(x))
    (finding,) = pg.check(function, progress=False)(UNEVEN).findings
    assert (finding.kind, finding.reason, finding.operation) == ("mismatch", "stop", "stop_gradient")


@pytest.mark.slow
def test_a_stop_beside_a_solver_of_jax_has_a_line():
    solved = by_jax("cg", tol=1e-6)
    (finding,) = pg.check(lambda x: solved(x) + 1e-2 * x @ lax.stop_gradient(x), progress=False)(UNEVEN).findings
    assert (finding.kind, finding.reason) == ("mismatch", "stop")


# What cancels so far that small steps change none of the digits that are left.
CANCELLING = {
    "a quotient": lambda x: (1 - jnp.cos(x)) / x,
    "a root": lambda x: (jnp.sqrt(1 + x * x) - 1) / x,
    "a spherical Bessel function": lambda x: (jnp.sin(x) / x - jnp.cos(x)) / x,
    "a difference": lambda x: (jnp.tan(x) - x) * 1e6,
}


@table("name, x64, x", CANCELLING, [False, True], [1e-5, 2e-6], quick=2, most=8)
def test_where_nearly_all_digits_cancel_the_derivative_is_not_called_wrong(name, x64, x):
    with jax.enable_x64(x64):
        report = pg.check(CANCELLING[name], progress=False)(x)
    assert {f.kind for f in report.findings} == (set() if x64 else {"precision"})
    error = 0.0 if x64 else report.findings[0].details["error"]
    assert report.verdict == ("ok" if error <= 1e-2 else "inconclusive" if error < 0.5 else "error"), str(report)


@pytest.mark.slow
def test_a_gradient_of_rounding_errors_that_is_large_is_no_zero():
    with jax.enable_x64(False):
        report = pg.check(lambda x: (1 - jnp.cos(x)) / x**2, progress=False)(1e-4)
    assert "precision" in {f.kind for f in report.findings}
    assert "zero" not in {f.kind for f in report.findings}


HIDDEN = {
    "a logarithm": (lambda x: jnp.log(1 + x) / x, 1e-10),
    "a cosine": (lambda x: (1 - jnp.cos(x)) / x**2, 1e-8),
    "a sine": (lambda x: (jnp.sin(x) - x) / x**3, 1e-6),
    "an exponential": (lambda x: (jnp.exp(x) - 1 - x) / x**2, 1e-9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_noise_in_float64_hides_no_slope(name):
    """No digit of these gradients is right, and no higher precision is there to tell."""
    function, point = HIDDEN[name]
    with jax.enable_x64(True):
        assert pg.check(function)(point).verdict == "inconclusive"


@pytest.mark.slow
@jax.custom_vjp
def nearly(x):
    return x**2


nearly.defvjp(lambda x: (x**2, x), lambda x, cotangent: (1.97 * x * cotangent,))


def through_float32(x):
    return jax.pure_callback(np.cos, jax.ShapeDtypeStruct((), np.float32), x)


@pytest.mark.parametrize("x64", [False, True])
def test_a_callback_on_a_branch_that_is_not_taken_hides_nothing(x64):
    """As `equinox.error_if` has one, which raises: its float32 is not the precision of the function."""
    outside = lambda x: through_float32(lax.stop_gradient(x).astype(np.float32)).astype(x.dtype)
    raises = lambda x: lax.cond(x > 1e6, outside, lambda x: x, x)
    with jax.enable_x64(x64):
        report = pg.check(lambda x: nearly(raises(x)), progress=False)(jnp.asarray(1.3))
        (finding,) = report.findings
        assert (finding.kind, finding.reason) == ("mismatch", "rule"), str(report)
        assert pg.check(lambda x: jnp.sin(raises(x)), progress=False)(jnp.asarray(1.3)).ok


def test_a_callback_in_float32_has_its_own_rounding():
    cosine = jax.custom_jvp(through_float32)
    cosine.defjvp(lambda p, t: (cosine(*p), -jnp.sin(p[0]) * t[0]))
    report = pg.check(lambda x: x + 1e-2 * cosine(x), progress=False)(np.float32(1.3))
    assert report.ok, str(report)
    assert not report.findings


@pytest.mark.parametrize("factor", [1e8, 1e10, 1e11, 1e13, 1e15])
def test_differences_do_not_refute_what_changes_within_the_last_digits(factor):
    """The fraction of a large number, as shaders make noise of coordinates."""

    def hashed(x):
        large = jnp.sin(x @ jnp.array([12.9898, 78.233])) * factor
        return large - jnp.floor(large) + x.sum()

    report = pg.check(hashed, progress=False)(np.array([0.37, 0.81], np.float32))
    assert report.verdict == "inconclusive", str(report)
    assert {finding.kind for finding in report.findings} <= {"noise", "jump"}


def test_noise_of_one_output_excuses_no_other():
    halved = jax.custom_jvp(lambda x: x**2)
    halved.defjvp(lambda p, t: (halved(*p), p[0] * t[0]))
    with jax.enable_x64(True):
        hashed = lambda x: jnp.mod(jnp.sin(x) * 1e11, 1.0)
        report = pg.check(lambda x: jnp.stack([hashed(x), halved(x)]), progress=False)(jnp.asarray(0.37))
        assert report.verdict == "error", str(report)
        assert ("mismatch", "rule") in {(f.kind, f.reason) for f in report.findings}


def test_noise_that_a_derivative_does_not_explain_excuses_no_wrong_one():
    lossy = lambda x: (nearly(x) + 1e6) - 1e6
    with jax.enable_x64(True):
        assert pg.check(lossy, progress=False)(jnp.asarray(1.3)).verdict == "error"


def test_a_verdict_has_a_finding():
    """The gradient in float32 is finite by rounding only."""

    def angle(p):
        unit = p / jnp.linalg.norm(p)
        return jnp.arccos(jnp.clip(unit @ unit, -1.0, 1.0))

    report = pg.check(angle)(jnp.array([0.3, 0.7]))
    assert report.verdict == "error"
    assert any(finding.severity == "error" for finding in report.findings)


def test_a_cotangent_too_small_for_half_precision():
    narrow = lambda w: 1e-10 * jnp.sum(w.astype(jnp.float16).astype(jnp.float32) ** 2)
    (finding,) = pg.check(narrow, progress=False)(jnp.array([0.5, -0.3])).findings
    assert (finding.kind, finding.severity) == ("precision", "error")
    assert "float16" in finding.message
    assert "nothing as small" in finding.message
    assert "scale the loss" in finding.suggestion


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_solver_that_is_far_from_converged_has_a_right_rule(steps):
    def loss(p):
        newton = optimistix.Newton(rtol=1e-8, atol=1e-8)
        residual = lambda x, args: jnp.exp(x) * args[1] + x - args[0]
        return optimistix.root_find(residual, newton, 2.5, (p["c"], p["k"]), max_steps=steps, throw=False).value ** 2

    report = pg.check(loss, progress=False)({"c": 0.7, "k": 1.3})
    (finding,) = report.findings
    assert (finding.kind, finding.reason, len(finding.leaves)) == ("precision", "unconverged", 2)
    assert not report.ok


@pytest.mark.slow
def test_steps_that_adapt_are_a_tolerance():
    def solved(p):
        term, steps = diffrax.ODETerm(lambda t, y, k: -k * y**2), diffrax.PIDController(rtol=1e-4, atol=1e-6)
        solve = lambda y, k: diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.25, y, args=k, max_steps=32, stepsize_controller=steps
        )
        return solve(p["y"], p["k"]).ys[-1]

    report = pg.check(solved, progress=False)({"k": 1.3, "y": 0.9})
    (finding,) = report.findings
    assert (finding.kind, finding.reason, finding.operation) == ("precision", "unconverged", "diffeqsolve")
    assert report.ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_that_adapt_are_no_branch_that_is_wrong(seed):
    """The derivative is that at fixed steps, and off by 7e-6; beside the point the two happen to agree."""

    def predators_and_prey(rate):
        field = lambda t, y, a: jnp.stack([a * y[0] - 0.4 * y[0] * y[1], -0.4 * y[1] + 0.1 * y[0] * y[1]])
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            4.0,
            0.05,
            jnp.array([2.0, 1.0]),
            args=rate,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 4.0, 9)),
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-8),
            max_steps=128,
        )
        return jnp.sum((solution.ys - 1.0) ** 2)

    report = pg.check(predators_and_prey, seed=seed, progress=False)(jnp.array(1.1))
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.slow
def test_the_derivative_of_a_library_is_what_it_was_after_a_check():
    """A rule that refused to be differentiated by an operand left JAX without what it keeps of it."""
    field = lambda t, y, p: -p["k"] * y
    times, steps = diffrax.SaveAt(ts=jnp.linspace(0.0, 3.0, 5)), diffrax.PIDController(rtol=1e-6, atol=1e-8)

    def decayed(p):
        term, start = diffrax.ODETerm(field), jnp.array([1.0, 2.0])
        solve = functools.partial(diffrax.diffeqsolve, saveat=times, stepsize_controller=steps, max_steps=64)
        return jnp.sum(solve(term, diffrax.Tsit5(), 0.0, 3.0, 0.05, start, args=p).ys ** 2)

    at = {"k": jnp.array(0.7)}
    first = pg.check(decayed, progress=False)(at)
    assert first.ok, str(first)
    assert jax.grad(decayed)(at)["k"] == pytest.approx(-5.8754, rel=1e-4)
    assert str(pg.check(decayed, progress=False)(at)) == str(first)


@pytest.mark.slow
def test_a_solver_does_not_explain_a_wrong_branch_beside_it():
    branch = lambda x: jnp.where(x == 0, 1.0, jnp.expm1(x) / jnp.where(x == 0, 1.0, x))

    def loss(a):
        newton = optimistix.Newton(rtol=1e-6, atol=1e-6)
        root = optimistix.root_find(lambda y, a: y**3 + y - a, newton, jnp.ones_like(a), args=2.0 + a).value
        return 5 * root + 0.3 * branch(a)

    (finding,) = pg.check(loss, progress=False)(jnp.array(0.0)).findings
    assert (finding.severity, finding.reason) == ("error", "removable")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.007])
def test_a_tolerance_does_not_explain_what_is_stopped_beside_it(share):
    def solved(p):
        field = lambda t, y, k: -(k + share * jax.lax.stop_gradient(k)) * y  # stopped
        steps = diffrax.PIDController(rtol=1e-3, atol=1e-5)
        term = diffrax.ODETerm(field)
        return diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.1, p["y"], args=p["k"], max_steps=32, stepsize_controller=steps
        ).ys[-1]

    report = pg.check(solved, progress=False)({"k": 1.3, "y": 0.9})
    (found,) = (f for f in report.findings if f.leaves == ("['k']",))
    assert (report.verdict, found.kind, found.reason) == ("stopped", "mismatch", "stop")
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# stopped"))
    assert found.where == f"test_check_precision.py:{number}"


@pytest.mark.slow
def test_a_time_that_reaches_its_end_exactly_is_not_moved_by_the_rounding_of_others():
    """Rounding errors of the time would take another step; no error of a state moves the time."""
    halved = jax.custom_jvp(jnp.sinh)
    halved.defjvp(lambda p, t: (jnp.sinh(p[0]), 0.8 * jnp.cosh(p[0]) * t[0]))

    def solved(y):
        term = diffrax.ODETerm(lambda t, y, args: -halved(y))
        return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.5, y, max_steps=4).ys[-1]

    (finding,) = pg.check(solved, progress=False)(0.9).findings
    assert (finding.kind, finding.severity, finding.reason) == ("mismatch", "error", "rule")
    assert finding.where.startswith("test_check_precision.py:")


def test_digits_that_cancel_have_a_line_though_keys_are_drawn_from():
    def spread(p):
        noise = jnp.stack([jax.random.normal(key) for key in jax.random.split(jax.random.key(3), 9)])
        x = p["offset"] + p["gain"] * noise
        return jnp.log(jnp.abs(jnp.mean(x**2) - jnp.mean(x) ** 2) + 1.0)  # cancels

    report = pg.check(spread, progress=False)({"offset": np.float32(5000.0), "gain": np.float32(0.3)})
    found = {f.where for f in report.findings if f.kind == "precision"}
    assert found == {f"test_check_precision.py:{spread.__code__.co_firstlineno + 3}"}


def test_what_is_only_finite_because_of_rounding_has_a_line():
    ring = jnp.roll(jnp.eye(6), 1, 0) + jnp.roll(jnp.eye(6), -1, 0)

    def participation(p):
        _, vectors = jnp.linalg.eigh(jnp.diag(p["onsite"]) - p["hopping"] * ring)
        return jnp.sum(vectors[:, 1] ** 4)

    report = pg.check(participation, progress=False)({"hopping": 1.0, "onsite": jnp.zeros(6)})
    (found,) = (f for f in report.findings if f.severity == "error")
    assert (found.reason, found.line) == ("not finite", participation.__code__.co_firstlineno + 1)
