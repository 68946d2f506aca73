"""A function that gives other numbers each time is found, and one that is only rounded otherwise is not."""

import itertools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg

generator = np.random.default_rng(0)
count = itertools.count()
POINT = np.linspace(0.5, 1.5, 3, dtype=np.float32)


def unstable(function):
    report = pg.check(lambda x: jnp.sum(function(x)), progress=False)(POINT)
    return [f for f in report.findings if f.kind == "nondeterminism"]


def noisy(x):
    return np.asarray(x) + np.float32(next(count))


def call(function, x):
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def honest(x):
    return call(np.asarray, x)


turns = itertools.cycle([jnp.sin, jnp.cos])


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sin(x) * generator.normal() + x,
        lambda x: jnp.cos(x) + jnp.asarray(generator.normal(size=3), jnp.float32),
        lambda x: x * jax.random.normal(jax.random.key(int(generator.integers(1000)))),
        lambda x: lax.scan(lambda c, _: (c * generator.normal(), None), x, None, length=3)[0],
        lambda x: next(turns)(x + 1) * 2,
    ],
    ids=["number", "array", "seed", "loop", "path"],
)
def test_what_python_draws(function):
    (finding,) = unstable(function)
    assert finding.severity == "error"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, _: (call(noisy, c), None), x, None, length=3)[0],
        lambda x: lax.cond(x[0] > 0, lambda x: call(noisy, x), lambda x: x, x),
        lambda x: jax.experimental.io_callback(noisy, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    ],
    ids=["scan", "cond", "io"],
)
def test_a_callback_that_answers_otherwise_each_time(function):
    (finding,) = unstable(function)
    assert finding.severity == "error"
    assert finding.where.startswith("test_check_stability.py")


def test_callbacks_are_listed():
    (finding,) = unstable(lambda x: honest(x) + call(noisy, 2 * x))
    assert "`pure_callback` at test_check_stability.py" in finding.message


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sin(x) * np.float32(3.0) + np.ones(3, np.float32),
        lambda x: honest(x) + honest(x + 1),
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: jax.nn.relu(x) + np.nan,
    ],
)
def test_what_gives_the_same_each_time(function):
    assert not unstable(function)


def test_a_difference_of_rounding_is_told_apart():
    turn = itertools.count()
    report = pg.check(lambda x: x * (1 + 1e-7 * (next(turn) % 2)), progress=False)(np.float32(1))
    assert [f.severity for f in report.findings if f.kind == "nondeterminism"] == ["info"]


@pytest.mark.slow
def test_a_reference_that_the_caller_passed_is_not_written():
    def f(m, x):
        m["count"][...] = m["again"][...] + jnp.ones((), m["count"].dtype)
        return jnp.sum(m["w"] * x)

    count = jax.new_ref(jnp.zeros((), jnp.bfloat16))
    model = {"w": jnp.ones(3), "count": count, "again": count}
    pg.check(lambda x, m: f(m, x), progress=False, directions=1)(jnp.arange(3.0), m=model)
    assert count[...] == 0


def reads(x, ref):
    return jnp.sum(x * ref[...]) + jnp.sum(x**2)


def writes(x, ref):
    ref[...] += 1
    return jnp.sum(x * ref[...])


def makes(x, ref):
    own = jax.new_ref(jnp.zeros_like(x))
    jax.lax.fori_loop(0, 2, lambda i, _: own.__setitem__(i, x[i] ** 2), None)
    return jnp.sum(own[...])


@pytest.mark.slow
@pytest.mark.parametrize("function", [reads, writes, makes, jax.jit(reads), jax.jit(writes), jax.jit(makes)])
def test_what_goes_through_references_is_followed(function):
    ref = jax.new_ref(jnp.array([0.5, 0.25]))
    report = pg.check(function, progress=False)(jnp.array([1.0, 2.0]), ref)
    assert (report.verdict, report.findings) == ("ok", ())
    assert np.array_equal(ref[...], [0.5, 0.25])
    guarded = lambda x, ref: function(x, ref) + jnp.sum(jnp.where(x > 1, jnp.sqrt(x - 1), 0.0))
    (finding,) = pg.check(guarded, progress=False)(jnp.array([1.0, 2.0]), ref).findings
    assert (finding.kind, finding.operation, finding.fix.by) == ("nan", "sqrt", "partgrad.double_where(f)")
    assert np.isfinite(jax.jit(jax.grad(pg.double_where(guarded)))(jnp.array([1.0, 2.0]), ref)).all()


@pytest.mark.slow
def test_what_jax_refuses_to_write_to_a_reference_has_no_gradient():
    def stores(x, ref):
        ref[...] = x
        return jnp.sum(ref[...] ** 2)

    (finding,) = pg.check(stores, progress=False)(jnp.ones(2), jax.new_ref(jnp.zeros(2))).findings
    assert (finding.kind, finding.reason) == ("mismatch", "no reverse")
    assert "differentiated value" in finding.message


@pytest.mark.parametrize("mode", ["custom_jvp", "custom_vjp"])
def test_a_callback_with_state_inside_of_a_custom_rule(mode):
    calls = itertools.count(1)
    counted = lambda x: jax.pure_callback(
        lambda v: np.float32(v * next(calls)), jax.ShapeDtypeStruct((), jnp.float32), x
    )
    function = getattr(jax, mode)(counted)
    if mode == "custom_jvp":
        function.defjvp(lambda p, t: (function(*p), t[0]))
    else:
        function.defvjp(lambda x: (function(x), None), lambda _, c: (c,))
    report = pg.check(lambda x: function(x))(jnp.float32(2))
    assert report.verdict == "error"
    assert ("nondeterminism", "error") in {(finding.kind, finding.severity) for finding in report.findings}
