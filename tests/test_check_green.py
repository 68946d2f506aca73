"""What strangers found `ok` although its gradient is wrong, cut, or beyond what can be seen; and right ones called wrong.

Each row stands for a class: something beside the fault, of another size or in another output, hid it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table

KEY = jax.random.key(0)
stop = lax.stop_gradient


def found(function, *args, **how):
    report = pg.check(function, progress=False, **how)(*args)
    return report.verdict, {(f.kind, f.reason) for f in report.findings if f.severity != "info"}


@jax.custom_vjp
def wrong(x):
    """A sine with a wrong rule in reverse mode, the only one."""
    return jnp.sin(x)


wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (-2 * g * jnp.cos(x),))
wrong_forward = jax.custom_jvp(lambda x: 1.1 * x)
wrong_forward.defjvp(lambda p, t: (1.1 * p[0], -2.2 * t[0]))
cancelling = lambda y: (1 - jnp.cos(y)) / y**2
fine = lambda x: jnp.round(x * 1e4) / 1e4
gamma = lambda a: jax.random.gamma(KEY, a)


def outside(dtype, function=np.sin):
    """A function in NumPy of a dtype, with a wrong rule."""

    def call(x):
        result = jax.ShapeDtypeStruct(x.shape, dtype)
        run = lambda v: function(np.asarray(v, np.float64)).astype(dtype)
        return jax.pure_callback(run, result, x, vmap_method="sequential").astype(x.dtype)

    ruled = jax.custom_vjp(call)
    ruled.defvjp(lambda x: (call(x), x), lambda x, g: (-2 * g * jnp.cos(x),))
    return ruled


# Whose derivative is off: `mismatch` by the rule, wherever it is.
WRONG = {
    "a gamma as auxiliary output": (lambda a: (wrong(a), gamma(a)), 2.0, {"has_aux": True}),
    "beside a gamma": (lambda a: wrong(a) + gamma(3.0 + 0 * a), 2.0, {}),
    "a gamma that is not drawn": (lambda a: lax.cond(a > 9.0, gamma, lambda a: 0.0, a) + wrong(a), 2.0, {}),
    "after a gamma": (lambda a: jnp.sum(wrong(jax.random.gamma(KEY, a, (5,)))), 2.0, {}),
    "before a gamma": (lambda a: jnp.sum(jax.random.gamma(KEY, 2 + wrong(a), (5,))), 2.0, {}),
    "a stopped gamma": (lambda a: stop(gamma(a)) * 5 + wrong(a), 2.0, {}),
    "a dirichlet": (lambda e: jax.random.dirichlet(KEY, jnp.exp(e))[0] + wrong(e).sum(), jnp.arange(3.0), {}),
    "a tiny leaf": (lambda x: 1.0 + wrong(x), 1e-12, {}),
    "a tinier leaf": (lambda x: 1.0 + wrong(x), 1e-20, {}),
    "another output, forward": (lambda x: (wrong_forward(x) - 1.1e5, x**2), 1e5, {}),
    "a small output, reverse": (lambda x: (jnp.cos(x), 1e-9 * wrong(x)), 1.0, {}),
    "beside a large output": (
        lambda p: {"a": 1e-4 * wrong(p["y"]) + p["x"], "b": 1e9 * p["x"]},
        {"x": jnp.arange(1.0, 4.0), "y": jnp.linspace(0.2, 0.9, 3)},
        {},
    ),
    "small elements, reverse": (lambda x: jnp.stack([1e4 * jnp.cos(x), 1e-6 * wrong(x)]), 1.0, {}),
    "small outputs, reverse": (lambda x: {"a": x**2, "b": 1e-6 * jnp.tanh(x), "c": 1e-9 * wrong(x)}, 1.0, {}),
}


@table("name", list(WRONG), quick=3)
def test_a_wrong_rule_is_an_error_whatever_is_beside_it(name):
    function, at, how = WRONG[name]
    verdict, findings = found(function, at, **how)
    assert verdict == "error"
    assert ("mismatch", "rule") in findings


def flag(x):
    return 0.1 * jnp.mod(jnp.floor(x * 1e15), 2)


HIDDEN = {
    "a callback in float16": (outside(np.float16), 1.0),
    "a callback in float32 far from zero": (outside(np.float32, lambda v: 1e4 + np.sin(v)), 1.0),
    "a callback in float32 at a small argument": (outside(np.float32, np.exp), 1e-4),
    "noise in the last digits": (lambda x: wrong(x) + flag(x), 1.0),
}


@table("name", list(HIDDEN), quick=2)
def test_what_differences_cannot_see_is_not_ok(name):
    function, at = HIDDEN[name]
    assert pg.check(function, progress=False)(jnp.float32(at)).verdict in ("inconclusive", "error")


def teacher(t):
    noisy = jax.random.normal(KEY, (3,)) + t * jnp.arange(3.0)
    return -jnp.sum(stop(jax.nn.softmax(noisy)) * jax.nn.log_softmax(t * jnp.arange(3.0)))


def barrier(t):
    scale = stop(t * jnp.exp(0.1 * jax.random.normal(KEY, (3,))))
    return jnp.sum(scale * jnp.log(t + 2) * jnp.arange(1.0, 4.0))


def averaged(p):
    return pg.expectation(lambda key, p: (p + jax.random.normal(key)) * stop(p) * 3, samples=16)(KEY, p)


def drawn(p):
    sampler = lambda key, p: p + stop(p) * jax.random.normal(key)
    return pg.draw(sampler, KEY, p, gradient="pathwise") ** 2


spike = pg.surrogate(lambda x: jnp.where(x > 0, 1.0, 0.0), smooth=jax.nn.sigmoid)
TABLE = jnp.sin(jnp.linspace(0.0, 3.0, 101))
CUT = {
    "a tiny leaf": (lambda x: 1.0 + 3 * stop(x) + x, 1e-12),
    "a noisy teacher": (teacher, 0.7),
    "a noisy scale and a logarithm": (barrier, 0.7),
    "in an expectation": (averaged, 0.7),
    "in a sampler": (drawn, 0.7),
    "of a surrogate": (lambda x: 2 * stop(spike(x)) + 0.01 * x, 0.4),
    "before a gamma": (lambda a: jnp.sum(jax.random.gamma(KEY, stop(a), (5,)) * a), 2.0),
    "of a gamma": (lambda a: stop(gamma(a)) * 5 + a, 0.7),
    "steps beside a steep leaf": (
        lambda p: 2 * fine(p["b"]) + 0.01 * p["b"] ** 2 + 1e3 * p["a"],
        {"a": 1.0, "b": 1.23},
    ),
    "steps beside waves": (lambda p: 3 * fine(p["b"]) + 0.01 * p["b"] + jnp.sin(300 * p["a"]), {"a": 1.0, "b": 1.23}),
    "steps beside a steep output": (lambda b: (3 * fine(b) + 0.01 * b, 1e4 * jnp.sin(b)), 1.2345),
    "steps in a wave": (lambda b: jnp.sin(80 * fine(b)) + 0.01 * b, 1.2345),
    "a grid of eight bits": (
        lambda w: jnp.sum((jnp.round(w * 127) / 127 - 0.3) ** 2 + 0.01 * w**2),
        jnp.array([0.73, -0.4]),
    ),
    "a number of a pixel": (lambda b: jnp.sin(0.05 * jnp.floor(b)) + 1e-3 * b, 137.3),
    "a table read by a cast": (lambda x: TABLE[(x * 30).astype(int)] + 0.01 * x**2, 1.0117),
}


@table("name", list(CUT), quick=3)
def test_what_is_cut_is_stopped_whatever_is_beside_it(name):
    function, at = CUT[name]
    verdict, findings = found(function, at)
    assert verdict == "stopped"
    assert {kind for kind, _ in findings} == {"mismatch"}


def apart(x):
    first = x * stop(x)  # the first of two
    return first + x * stop(x) ** 2  # the second


@pytest.mark.slow
def test_of_several_stops_all_have_to_be_intended():
    (finding,) = pg.check(apart, progress=False)(1.5).findings
    lines = finding.details["lines"]
    assert len(lines) == 2
    for meant, verdict in (([lines[0]], "stopped"), ([lines[1]], "stopped"), (lines, "ok"), ([apart], "ok")):
        report = pg.check(apart, intended=meant, progress=False)(1.5)
        assert report.verdict == verdict
        assert not [finding for finding in report.findings if finding.kind == "intended"]


F16, BF16, F8 = jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn
LOST = {
    "float16": (jnp.tanh, F16(4.3), {}),
    "float16, a difference": (lambda x: jnp.sqrt(x * x + 1) - x, F16(20.0), {}),
    "bfloat16": (jnp.tanh, BF16(3.0), {}),
    "float8": (
        lambda x: jnp.sum(x.astype(F8).astype(jnp.float32) * 5e-4) + 1e-4 * jnp.sum(x**2),
        jnp.array([0.5, 1.0]),
        {},
    ),
    "a small element": (lambda x: 1e3 * x[0] + cancelling(x[1]), jnp.array([1.0, 5e-3]), {"exhaustive": True}),
    "an element beside a kink": (
        lambda x: 10 * pg.safe.norm(x[:2]) + cancelling(x[2]),
        jnp.array([0.0, 0.0, 5e-3]),
        {},
    ),
    "a small output": (lambda x: (1e3 * x, cancelling(x)), jnp.float32(5e-3), {}),
    "beside a narrow cast": (
        lambda x: cancelling(x) + 1e-9 * x.astype(BF16).astype(jnp.float32),
        jnp.float32(0.038),
        {},
    ),
    "a sum in bfloat16": (lambda x: jnp.sum((jnp.exp(x) - 1.0) / x), jnp.array([2e-3], BF16), {}),
}


@table("name", list(LOST), quick=3)
def test_digits_that_are_lost_are_missed(name):
    function, at, how = LOST[name]
    verdict, findings = found(function, at, **how)
    assert verdict in ("inconclusive", "error")
    assert {kind for kind, _ in findings} == {"precision"}


@pytest.mark.slow
@pytest.mark.parametrize("function", [lambda x: jnp.sum(jax.nn.sigmoid(x)), lambda x: jnp.sum((jnp.exp(x) - 1.0) / x)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_sum_in_half_precision_is_not_to_blame(function, dtype):
    at = jnp.array([8.0 if "sigmoid" in function.__code__.co_names else 2e-3], dtype)
    for finding in pg.check(function, progress=False)(at).findings:
        assert "sum" not in finding.operation
        assert f"compute in {at.dtype}" not in finding.suggestion


BINS = jnp.arange(1.0, 101.0) / 10
DATA = jnp.array([0.31, 1.42, 0.55])


def clock(k):
    def step(carry, _):
        time, value = carry
        time = time + 0.2
        return (time, jnp.where(time <= 1.0, value - 0.2 * k * value, value)), value

    return lax.scan(step, (0.0, 1.0), None, length=8)[0][1]


def newton(a):
    until = lambda s: jnp.abs(s[0] ** 3 - a) > 1e-6
    step = lambda s: (s[0] - (s[0] ** 3 - a) / (3 * s[0] ** 2), s[1] + 1)
    return lax.while_loop(until, step, (a, 0))[0]


root = jax.custom_jvp(newton)
root.defjvp(lambda p, t: (root(p[0]), t[0] / (3 * root(p[0]) ** 2)))
RANDOM = np.random.default_rng(0)
RAIN = jnp.asarray(np.cumsum(np.where(RANDOM.random(2000) < 0.04, RANDOM.exponential(5, 2000), 0.0)), jnp.float32)


def residual(a):
    matrix, right = a @ a.T + jnp.eye(3), jnp.arange(3.0)
    solved = jnp.linalg.solve(matrix, right)
    return {"solved": solved, "residual": matrix @ solved - right}


def solved(p):
    equation = lambda x: p["c"] * (x**3 + p["a"] * x - p["b"])
    until = lambda f: lambda x: jnp.abs(f(x)) > 1e-6 * p["c"]
    solve = lambda f, x: lax.while_loop(until(f), lambda x: x - f(x) / jax.grad(f)(x), x)
    return lax.custom_root(equation, 1.0, solve, lambda g, y: y / g(1.0))


def standard(p):
    moved = p["scale"] * p["x"] + 3.0
    score = (moved - moved.mean()) / moved.std()
    return {"score": score * 1e3, "mean": score.mean(), "deviation": score.std() - 1}


def unit(q):
    scaled = q / jnp.linalg.norm(q)
    return {"unit": scaled * 100, "error": jnp.sum(scaled * scaled) - 1}


# In float32, 1.42 / 0.02 is 71; in float64, 1.42 rounded to float32 is in the cell before.
RIGHT = {
    "an index on an edge": (lambda bins: jnp.sum(bins[jnp.floor(DATA / 0.02).astype(int)] ** 2), BINS),
    "a mask of equality": (
        lambda p: jnp.where(jnp.array([1.0, 2.0]) * 0.1 + 0.2 == 0.3, p[0], 3 * p[1]).sum(),
        BINS[:2],
    ),
    "a clock": (clock, 0.7),
    "a series until it stands": (lambda p: jnp.sum(jax.scipy.special.hyp1f1(1.0, 2.0, p)), jnp.linspace(0.3, 0.7, 7)),
    "mapped Newton steps": (lambda a: jnp.sum(jax.vmap(root)(a)), jnp.array([2.3, 1.1, 4.0])),
    "a gamma": (lambda a: gamma(a) ** 2 + jnp.sin(a), 0.7),
    "a beta": (lambda a: jax.random.beta(KEY, a, 2.0) + a**2, 0.7),
    "a dirichlet": (lambda a: jax.random.dirichlet(KEY, a) @ jnp.array([1.0, 5.0, 2.0]), jnp.array([1.0, 2.0, 0.4])),
    "a softmax of gammas": (lambda a: -jax.nn.log_softmax(jax.random.gamma(KEY, a, (4, 3)))[:, 0].mean(), 2.0),
    "a draw of constants": (lambda w: jax.nn.logsumexp(stop(jax.random.beta(KEY, 0.4, 0.4)) * w), BINS[:3]),
    "a shift of what is centred": (lambda b: jnp.mean((BINS + b - jnp.mean(BINS + b)) * BINS[::-1]), 0.3),
    "a shift of all differences": (lambda b: jnp.mean(jnp.abs((DATA + b)[:, None] - (DATA + b))), 0.3),
    "a residual beside a solution": (residual, jax.random.normal(KEY, (3, 3))),
    "a norm that is one": (unit, jax.random.normal(KEY, (4,))),
    "a standard score": (standard, {"x": jax.random.normal(KEY, (6,)), "scale": 1.3}),
    "a scale of an equation": (solved, {"a": 2.0, "b": 0.7, "c": 0.4}),
    "a plateau between narrow ramps": (lambda x: jnp.floor(x) + jnp.clip((x % 1.0 - 0.45) * 10, 0, 1), 52.7),
    "a dry hour": (lambda t: jnp.interp(t, jnp.arange(2000.0), RAIN), 1200.6),
    "no influence": (lambda x: 1.0 + 1e-3 * jax.nn.softmax(jnp.arange(3.0) + x)[0], 1e-9),
    "outputs of many sizes": (lambda x: (1e9 * x, jnp.sin(x), 1e-9 * x**2, 0 * x), 1.2),
    "a count of cells": (lambda x: jnp.sin(x) * jnp.floor(x * 3.0), 1.2),
    "a comparison with a draw": (lambda t: jax.nn.relu(t + jax.random.normal(KEY, (4,))).sum() + t**2, 0.3),
}


@table("name", list(RIGHT), quick=3)
def test_what_is_right_is_ok_without_a_word(name):
    function, at = RIGHT[name]
    assert found(function, at) == ("ok", set())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (1,)])
def test_a_decision_with_a_draw_at_which_the_value_jumps_is_one(shape):
    by_hand = lambda t: (t + jax.random.logistic(KEY, shape) > 0).astype(float)
    _, findings = found(lambda t: jnp.sum((by_hand(t) - 0.3) ** 2) + 0.01 * t**2, 0.7)
    assert findings == {("draw", "decision")}
    kinked = lambda t: jnp.where(t + jax.random.logistic(KEY, shape) > 0, t + jax.random.logistic(KEY, shape), 0.0)
    assert found(lambda t: jnp.sum(kinked(t)) + 0.01 * t**2, 0.7)[1] == set()
    assert found(lambda t: kinked(t).sum(), 3.0)[1] == set()


def barrier_option(drawn, select):
    return lambda m: jnp.mean(select(drawn(m))) + jax.nn.logsumexp(jnp.arange(4.0) * m)


PATHS = {
    "normal": lambda m: jnp.exp(m + 0.2 * jax.random.normal(KEY, (200,))),
    "gamma": lambda m: jax.random.gamma(KEY, 4 * m, (200,)),
}
ABOVE = {
    "where": lambda s: jnp.where(s > 1.5, 0.0, s),
    "cond": jax.vmap(lambda s: lax.cond(s > 1.5, lambda s: 0.0, lambda s: s, s)),
}


@pytest.mark.slow
@pytest.mark.parametrize("drawn", PATHS)
@pytest.mark.parametrize("select", ABOVE)
def test_no_stop_or_logarithm_beside_a_decision_excuses_it(drawn, select):
    assert found(barrier_option(PATHS[drawn], ABOVE[select]), 0.3)[1] == {("draw", "decision")}


def test_of_a_rule_that_cannot_be_traced_a_jump_is_not_passed_over():
    def scaled(x, scale):
        @jax.custom_vjp
        def f(x):
            return x * scale

        f.defvjp(lambda x: (f(x), None), lambda _, g: (-g * scale,))
        return f(x)

    function = lambda x: scaled(x, jnp.cos(x)) + jnp.where(x > 1.0, 1.0, 0.0)
    assert pg.check(function, progress=False)(1.0).verdict != "ok"
