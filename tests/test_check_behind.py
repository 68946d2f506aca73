"""What is wrong behind something else that `check` tells, or that is meant: each is looked for by itself.

Each row stands for a class: a stop, a draw, a solver, a kink, a callback or a rule that explained all there was to say.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import partgrad as pg
from helpers.tables import table

KEY = jax.random.key(0)
stop = lax.stop_gradient
fine = lambda x: jnp.round(x * 1e4) / 1e4
cancelling = lambda y: (1 - jnp.cos(y)) / y**2


def found(function, *args, **how):
    report = pg.check(function, progress=False, **how)(*args)
    return report.verdict, {(f.kind, f.reason) for f in report.findings if f.severity != "info"}


def target(x):
    return x * stop(x)


through = jax.custom_jvp(lambda x: jnp.round(x))
through.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))
quantized = lambda x: through(x * 1e4) / 1e4
fixed = lambda p: pg.draw(lambda key, p: p + jax.random.normal(key), KEY, p, gradient="fixed")


@jax.custom_jvp
def root(a):
    return lax.while_loop(lambda s: jnp.abs(s**3 - a) > 1e-2, lambda s: s - (s**3 - a) / (3 * s**2), a)


root.defjvp(lambda p, t: (root(p[0]), t[0] / (3 * root(p[0]) ** 2)))


def outside(x):
    run = lambda v: np.sin(np.asarray(v, np.float64)).astype(np.float32)
    return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, jnp.float32), x, vmap_method="sequential")


host, wrong_host = jax.custom_jvp(outside), jax.custom_jvp(outside)
host.defjvp(lambda p, t: (outside(p[0]), jnp.cos(p[0]) * t[0]))
wrong_host.defjvp(lambda p, t: (outside(p[0]), -2 * jnp.cos(p[0]) * t[0]))


def by_a_kernel(x):
    def kernel(given, made):
        made[...] = jnp.sin(given[...])

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


sine = jax.custom_vjp(by_a_kernel)
sine.defvjp(lambda x: (by_a_kernel(x), x), lambda x, g: (g * jnp.cos(x),))


def of_equation(c):
    equation = lambda y: y**3 - fine(c) - 0.1 * c
    newton = lambda h, y: lax.fori_loop(0, 20, lambda _, y: y - h(y) / jax.grad(h)(y), y)
    return lax.custom_root(equation, 1.0, newton, lambda h, y: y / h(1.0))


def truncated(x):
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    return lax.bitcast_convert_type(bits, jnp.float32)


GRID = jnp.linspace(0.0, 3.0, 3001)
SINES = jnp.sin(GRID)
STEPS = {
    "a stop that is meant": (lambda x: target(x) + 3 * fine(x), 1.2345, {"intended": target}),
    "a draw that is fixed": (lambda x: fixed(x) + 3 * fine(x) + 0.01 * x, 1.2345, {}),
    "a solver that is not there yet": (lambda a: root(a) + 3 * fine(a), 2.3, {}),
    "a kink": (lambda x: pg.safe.norm(x[:2]) + 3 * fine(x[2]) + 0.01 * x[2], jnp.array([0.0, 0.0, 1.23]), {}),
    "a rule that is meant": (lambda x: 2 * quantized(x) + 3 * fine(jnp.sin(x)), 1.2345, {"intended": through}),
    "a callback": (lambda x: host(jnp.float32(2.0)) + 3 * fine(x) + 0.01 * x, 1.2345, {}),
    "a callback of the leaf": (lambda x: host(x) + 3 * fine(x), jnp.float32(1.2345), {}),
    "a kernel": (lambda w: jnp.sum(sine(fine(w))) + 0.01 * jnp.sum(w**2), jnp.array([1.2345, 0.7]), {}),
    "a root": (of_equation, 2.3, {}),
    "an implicit draw": (lambda a: 3 * jax.random.gamma(KEY, fine(a)) + a**2, 2.0, {}),
    "the nearest few": (lambda x: 3 * jnp.mean(SINES[lax.top_k(-((GRID - x) ** 2), 5)[1]]) + 0.01 * x, 1.2345, {}),
    "an order": (lambda x: 3 * jnp.mean(SINES[jnp.argsort(jnp.abs(GRID - x))[:5]]) + 0.01 * x, 1.2345, {}),
    "a rank": (lambda x: 3e-3 * jnp.argsort(jnp.argsort(jnp.append(GRID, x)))[-1] + 0.01 * x, 1.2345, {}),
    "the first of some": (lambda x: 3 * SINES[jnp.argmax(x < GRID)] + 0.01 * x, 1.2345, {}),
    "a count": (lambda x: 3e-3 * jnp.count_nonzero(x > GRID) + 0.01 * x, 1.2345, {}),
    "bits": (lambda w: jnp.sum((truncated(w) - 0.3) ** 2 + 0.01 * w**2), jnp.array([0.73, -0.4]), {}),
}


@table("name", list(STEPS), quick=3)
def test_steps_are_found_behind(name):
    function, at, how = STEPS[name]
    verdict, findings = found(function, at, **how)
    assert (verdict, findings) == ("stopped", {("mismatch", "stairs")})


SKEWED = jnp.array([[2.0, 1.0], [0.0, 3.0]])


def solved(b):
    """A solution whose gradient solves the same equations, instead of the transposed ones."""
    solve = lambda _, y: jnp.linalg.solve(SKEWED, y)
    return lax.custom_linear_solve(lambda x: SKEWED @ x, b, solve, transpose_solve=solve)


filled = lambda x: jnp.where(x == 0, 1.0, 2 * x + jnp.sin(x) / jnp.where(x == 0, 1.0, x))
PRICES = jnp.array([1.0, 5.0])
WRONG = {
    "a callback": (lambda x: 2 * quantized(x) + wrong_host(x), jnp.float32(1.2345), {"intended": through}),
    "a transpose": (lambda b: solved(quantized(b)) @ PRICES, jnp.array([1.234, 2.345]), {"intended": through}),
    "a gap that was filled": (lambda x: quantized(x) + filled(x), 0.0, {"intended": through}),
    "a transpose after a draw": (lambda e: solved(jax.random.gamma(KEY, e)) @ PRICES, jnp.array([2.0, 3.0]), {}),
    "a small element": (lambda x: jnp.stack([100 * jnp.cos(x), wrong_host(x)]), jnp.float32(1.0), {"forward": True}),
}


@table("name", list(WRONG), quick=2)
def test_what_is_wrong_behind_something_else_is_an_error(name):
    function, at, how = WRONG[name]
    verdict, findings = found(function, at, **how)
    assert verdict == "error"
    assert {kind for kind, _ in findings} == {"mismatch"}


def test_rules_that_share_a_function_are_not_both_meant_by_one():
    back = lambda _, g: (g,)
    meant, other = jax.custom_vjp(lambda x: jnp.round(x)), jax.custom_vjp(lambda x: 5 * jnp.sin(x))
    meant.defvjp(lambda x: (jnp.round(x), None), back)
    other.defvjp(lambda x: (5 * jnp.sin(x), None), back)
    assert found(lambda x: meant(x * 1e4) / 1e4 + other(x), 1.2345, intended=meant)[0] == "error"


LOST = {
    "forward mode": (cancelling, 5e-3, {"forward": True}),
    "a loop": (
        lambda x: lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] + cancelling(x), s[1] + 1), (0.0, 0))[0],
        5e-3,
        {},
    ),
    "a residual": (lambda x: jnp.stack([cancelling(x), 1e4 * x]), 5e-3, {}),
    "an element": (lambda x: 1e6 * x[0] + cancelling(x[1]), jnp.array([1.0, 5e-3]), {"exhaustive": True}),
    "an imaginary part": (
        lambda z: 1e3 * jnp.real(z) ** 2 + cancelling(jnp.imag(z)),
        jnp.complex64(1 + 5e-3j),
        {"exhaustive": True},
    ),
    "beside an implicit draw": (lambda p: jax.random.gamma(KEY, p[0]) + cancelling(p[1]), jnp.array([2.0, 5e-3]), {}),
}


@table("name", list(LOST), quick=2)
def test_lost_digits_are_found_behind(name):
    function, at, how = LOST[name]
    verdict, findings = found(function, at, **how)
    assert verdict in ("inconclusive", "error")
    assert {kind for kind, _ in findings} - {"mismatch"} == {"precision"}


def on_a_sphere(p):
    c = p @ jnp.array([1.0, 0.0, 0.0]) / jnp.linalg.norm(p)
    return jnp.where(c < 1, jnp.arccos(jnp.where(c < 1, c, 0.0)), 0.0) + 0.01 * jnp.sum(p**2)


def between(x):
    squares = jnp.sum(x**2, 1)
    apart = jnp.where(jnp.eye(len(x), dtype=bool), 0.0, squares[:, None] + squares[None] - 2 * x @ x.T)
    return jnp.sum(jnp.where(apart > 0, jnp.sqrt(jnp.where(apart > 0, apart, 1.0)), 0.0))


def guarded_norm(x):
    square = jnp.sum(x**2)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0) + 0.01 * jnp.sum(x)


DECIDED = {
    "an angle": (on_a_sphere, jnp.array([1.0, 1e-4, 0.0])),
    "a cross entropy": (lambda x: -jnp.log(jnp.maximum(1 - jax.nn.sigmoid(x), 1e-12)) + 0.01 * x, 17.0),
    "distances": (between, jnp.array([[100.0, 200.0], [100.01, 200.0], [0.0, 50.0]])),
    "a norm": (guarded_norm, jnp.array([1e-25, 2e-25])),
}


@table("name", list(DECIDED), quick=1)
def test_what_rounding_decides_otherwise_is_told(name):
    function, at = DECIDED[name]
    with jax.enable_x64(False):
        verdict, findings = found(function, at)
    assert verdict in ("inconclusive", "error")
    assert findings == {("precision", "decides")}


IN_CELLS = {
    "cells": lambda x: jnp.sum(jnp.sin(3 * x) * jnp.floor(10 * x)),
    "a clock": lambda x: (x - jnp.floor(x * 10) / 10) ** 2 + x,
    "a threshold": lambda x: jnp.where(x * 3 > 0.9, 2 * x, x) ** 2,
}


@table("name, at", list(IN_CELLS), [0.3, 0.7, 0.1], quick=2)
def test_a_point_at_a_threshold_within_its_digits_has_lost_none(name, at):
    with jax.enable_x64(False):
        _, findings = found(IN_CELLS[name], at)
    assert not {reason for kind, reason in findings if kind == "precision"}


def test_a_rule_that_does_nothing_here_is_not_to_blame():
    clipping, wrong = jax.custom_vjp(lambda x: x), jax.custom_vjp(jnp.sin)
    clipping.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))
    wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (-2 * g * jnp.cos(x),))
    (finding,) = pg.check(lambda x: 0.1 * wrong(clipping(x)), progress=False)(0.7).findings
    assert finding.operation == "sin"
    both = pg.check(lambda x: jnp.sum(wrong(wrong(x) * 2.0)) + jnp.sum(5 * clipping(x)), progress=False)(0.7)
    assert {f.operation for f in both.findings if f.severity == "error"} == {"sin", "a custom rule"}


def test_of_several_stops_the_one_to_remove_is_named():
    def pooled(p, h):
        s = h * p
        s = s - stop(s.max())
        e = jnp.exp(s)
        return (jnp.sum(e * h) / stop(e.sum())) ** 2  # cut

    args = jnp.float32(0.7), jnp.array([0.3, -1.0, 2.0, 0.5])
    (finding,) = pg.check(pooled, progress=False)(*args).findings
    lines, first = inspect.getsourcelines(pooled)
    assert finding.line == first + next(n for n, text in enumerate(lines) if "# cut" in text)
    assert pg.check(pooled, intended=f"test_check_behind.py:{finding.line}", progress=False)(*args).ok


OVERWRITTEN = {
    "in place": lambda v, q: v.at[0].set(q),
    "by a mask": lambda v, q: jnp.where(jnp.array([True, False]), q, v),
}


@pytest.mark.parametrize("name", OVERWRITTEN)
@pytest.mark.parametrize(
    ("steps", "reason"), [(jnp.floor, "rounded"), (lambda x: jnp.where(x > 2.0, 2.0, 1.0), "compared")]
)
def test_a_leaf_that_is_replaced_by_its_steps_is_not_left_out(name, steps, reason):
    function = lambda k: jnp.sum(OVERWRITTEN[name](jnp.stack([k["a"], k["b"]]), steps(8 * k["a"])) ** 2)
    report = pg.check(function, progress=False)({"a": jnp.float32(0.3), "b": jnp.float32(0.4)})
    assert [(f.kind, f.reason) for f in report.findings] == [("zero", reason)]


def choice(logits):
    y = jax.nn.softmax(logits + jax.random.gumbel(KEY, (3,)))
    index = jnp.argmax(y)
    return index, (y + stop(jax.nn.one_hot(index, 3) - y)) @ jnp.array([1.0, 2.0, 5.0])


def with_its_cost(logits):
    index, value = choice(logits)
    return value + jnp.array([90.0, 40.0, 1.0])[index]


@pytest.mark.parametrize(("function", "is_told"), [(with_its_cost, True), (lambda x: choice(x)[1], False)])
def test_another_use_of_a_choice_than_straight_through_is_told(function, is_told):
    findings = found(function, jnp.array([0.1, 0.5, -0.3]))[1]
    assert (("draw", "decision") in findings) == is_told


def test_a_fix_agrees_with_the_differences_or_is_none():
    def likelihood(p, x):
        bell = lambda m: jnp.exp(-0.5 * ((x - m) / p["s"]) ** 2)
        return jnp.sum(jnp.log(bell(0.0) + bell(p["mu"])))

    at = {"mu": jnp.float32(2.0), "s": jnp.float32(0.5)}
    findings = pg.check(likelihood, progress=False)(at, jnp.array([0.1, 1.5, 40.0])).findings
    assert [(f.kind, f.reason, f.fix) for f in findings] == [("nan", "value", None), ("nan", "singular", None)]
