"""Gradients along chaotic loops: the rate at which tangents grow is the published one, and no gradient of them is `ok`."""

import decimal
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax import lax

import partgrad as pg
from helpers.tables import examples


def logistic(r, steps):
    return lambda x: lax.scan(lambda x, _: (r * x * (1 - x), None), x, length=steps)[0]  # grows


def lorenz(steps, dt):
    """The trajectory by the Runge-Kutta method of order 4, as in Lorenz (1963)."""

    def velocity(state):
        x, y, z = state
        return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def step(state, _):
        a = velocity(state)
        b = velocity(state + dt / 2 * a)
        c = velocity(state + dt / 2 * b)
        d = velocity(state + dt * c)
        return state + dt / 6 * (a + 2 * b + 2 * c + d), None

    return lambda state: lax.scan(step, state, length=steps)[0].sum()  # grows


def grown(report):
    assert [finding.kind for finding in report.findings] == ["growth"]
    (finding,) = report.findings
    assert not report.ok
    assert "stop_gradient" in finding.suggestion
    with open(finding.file) as file:
        assert "# grows" in file.read().split("\n")[finding.line - 1]
    return finding


@pytest.mark.slow
@pytest.mark.parametrize("steps", [500, 3000])
def test_the_rate_of_the_logistic_map(x64, steps):
    """Its Lyapunov exponent at r = 4 is the logarithm of 2: S. Ulam and J. von Neumann (1947)."""
    finding = grown(pg.check(logistic(4.0, steps))(jnp.asarray(0.3)))
    assert finding.details["rate"] == pytest.approx(np.log(2), abs=0.005)
    assert finding.details["steps_of_loop"] == steps
    assert "a factor of 2" in finding.message or "a factor of 1.99" in finding.message


@pytest.mark.slow
def test_the_rate_of_the_lorenz_system():
    """Its largest exponent is 0.906 a unit of time: D. Viswanath, Lyapunov exponents from random Fibonacci sequences to
    the Lorenz equations, thesis, Cornell (1998)."""
    finding = grown(pg.check(lorenz(50_000, 0.01))(jnp.ones(3)))
    assert finding.details["rate"] / 0.01 == pytest.approx(0.906, abs=0.01)


@pytest.mark.slow
def test_a_gradient_of_the_lorenz_system_is_not_ok_in_float64():
    with jax.enable_x64(True):
        grown(pg.check(lorenz(6000, 0.01))(jnp.ones(3)))


LOOPS = {
    "a scan": logistic(3.9, 150),
    "a loop of a known number of steps": lambda x: lax.fori_loop(0, 150, lambda i, x: 3.9 * x * (1 - x), x),  # grows
    "a batch": lambda x: jax.vmap(logistic(3.9, 150))(jnp.stack([x, x / 2])).sum(),
    "under jit": jax.jit(logistic(3.9, 150)),
    "with a checkpoint": lambda x: lax.scan(  # grows
        jax.checkpoint(lambda x, _: (3.9 * x * (1 - x), x)), x, length=150
    )[0],
    "a loop of loops": lambda x: lax.scan(lambda x, _: (logistic(3.9, 10)(x), None), x, length=15)[0],  # grows
    "with inputs": lambda x: lax.scan(lambda x, a: (a * x * (1 - x), a), x, jnp.linspace(3.8, 3.9, 150))[0],  # grows
    "with a dictionary": lambda x: lax.scan(  # grows
        lambda c, _: ({"n": c["n"] + 1, "x": 3.9 * c["x"] * (1 - c["x"])}, None), {"n": 0, "x": x}, length=150
    )[0]["x"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_any_loop(name):
    finding = grown(pg.check(LOOPS[name])(jnp.float32(0.3)))
    steps = 15 if name == "a loop of loops" else 150
    assert finding.details["steps_of_loop"] == steps
    assert finding.details["rate"] * steps == pytest.approx(0.5 * 150, rel=0.25)


@pytest.mark.slow
def test_a_loop_without_reverse_mode():
    def until(x):
        return lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] + 1, 3.9 * c[1] * (1 - c[1])), (0, x))[1]  # grows

    finding = grown(pg.check(until, forward=True)(jnp.float32(0.3)))
    assert finding.details["steps_of_loop"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, 200])
def test_a_loop_that_contracts_or_only_scales_is_ok(steps):
    cell = 0.3 * np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for body in (lambda h: jnp.tanh(cell @ h), lambda h: 1.2 * h, lambda h: h + 0.01 * jnp.sin(h)):
        report = pg.check(lambda h, body=body: lax.scan(lambda h, _: (body(h), None), h, length=steps)[0].sum())(
            jnp.ones(4)
        )
        assert report.ok
        # A network forgets where it began.
        assert not [finding for finding in report.findings if finding.kind != "zero"]


@pytest.mark.slow
def test_a_gradient_that_vanishes_along_a_loop_is_not_called_wrong():
    """As in a recurrent network: what is less than the dtype can hold has lost no digit."""
    cell = 0.3 * np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    network = lambda h: lax.scan(lambda h, _: (jnp.tanh(cell @ h), None), h, length=200)[0].sum()
    report = pg.check(network)(jnp.ones(4))
    assert report.ok
    assert [(f.kind, f.reason) for f in report.findings] == [("zero", "underflow")]
    report = pg.check(logistic(3.833, 278))(jnp.float32(0.3))
    assert [(f.kind, f.reason) for f in report.findings] == [("zero", "underflow")]
    assert report.findings[0].details["size"] < 1e-50
    with jax.enable_x64(True):
        # Beside a periodic orbit, the value goes from one of its points to another over small steps.
        assert {f.kind for f in pg.check(logistic(3.833, 278))(0.3).findings} <= {"noise"}


@pytest.mark.slow
def test_intended_excuses_it():
    f = logistic(3.9, 100)
    report = pg.check(f)(jnp.float32(0.3))
    assert not report.ok
    (finding,) = report.findings
    assert pg.check(f, intended=finding.where)(jnp.float32(0.3)).ok


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(r=st.floats(3.4, 4.0), start=st.floats(0.05, 0.95), steps=st.integers(10, 400), wide=st.booleans())
@example(r=3.633, start=0.5, steps=337, wide=False)
def test_ok_only_if_two_digits_are_right(r, start, steps, wide):
    """The derivative by 400 decimal digits."""
    with jax.enable_x64(wide), decimal.localcontext(prec=400):
        start, r = np.float64(start) if wide else np.float32(start), float(np.float32(r))
        f = logistic(r, steps)
        x, exact = Decimal(float(start)), Decimal(1)
        for _ in range(steps):
            exact, x = exact * Decimal(r) * (1 - 2 * x), Decimal(r) * x * (1 - x)
        got, report = float(jax.grad(f)(jnp.asarray(start))), pg.check(f)(jnp.asarray(start))
        if report.ok and exact:
            assert abs((Decimal(got) - exact) / exact) < Decimal("0.02")


def test_what_multiplies_a_chaotic_state_has_no_digit_either(x64):
    """With 200 decimals the state after 150 steps is 0.9637; float32 gives 0.5, and float64 0.41."""
    state = logistic(3.9, 150)
    report = pg.check(lambda p: (p["scale"] * state(p["x"]) - 0.4) ** 2, progress=False)(
        {"scale": jnp.asarray(1.3), "x": jnp.asarray(0.31)}
    )
    assert grown(report).leaves == ("['scale']", "['x']")
    assert all(row.verdict != "ok" for row in report.rows)


def test_what_never_meets_a_chaotic_state_keeps_its_digits(x64):
    data = jax.random.normal(jax.random.key(0), (50,))

    def loss(p):
        fit = jnp.sum(jax.nn.log_softmax(p["logits"])) + jnp.sum((p["mean"] - data) ** 2)
        return logistic(p["r"], 300)(0.3) + fit

    report = pg.check(loss, progress=False)({"r": jnp.asarray(3.9), "logits": jnp.zeros(4), "mean": data.mean()})
    assert [row.path for row in report.rows if row.verdict != "ok"] == ["['r']"], str(report)
