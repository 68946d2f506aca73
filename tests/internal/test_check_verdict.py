"""From evidence to a verdict: every row of the table by itself, and functions whose evidence it is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import in_turn, table
from partgrad._check.verdict import ERROR, INCONCLUSIVE, OK, STOPPED, TABLE, Evidence, row_of, worst

WORDS = Evidence(
    ("finite", "not finite"),
    ("agree", "disagree"),
    ("equal", "differ", "jump", "noise"),
    ("equal", "between", "off", "zero", "unknown"),
    ("equal", "off", "unknown"),
    ("none", "stop", "declared", "negligible", "solver", "symmetric", "stairs"),
)
EVERYTHING = [Evidence(*words) for words in itertools.product(*WORDS)]

# By row: the evidence that is plainest.
PLAIN = {
    "not finite": Evidence(derivative="not finite"),
    "unconverged": Evidence(match="off", excuse="solver"),
    "stopped": Evidence(match="off", excuse="stop"),
    "stairs": Evidence(match="off", excuse="stairs"),
    "declared": Evidence(match="off", excuse="declared"),
    "symmetric": Evidence(match="off", excuse="symmetric"),
    "modes": Evidence(modes="disagree"),
    "jump": Evidence(sides="jump"),
    "removable": Evidence(match="off", nearby="equal"),
    "wrong": Evidence(match="off", nearby="off"),
    "noise": Evidence(sides="noise", match="unknown"),
    "kink": Evidence(sides="differ", match="between"),
    "zero": Evidence(match="zero"),
    "agrees": Evidence(),
}
VERDICTS = {
    **dict.fromkeys(("not finite", "modes", "removable", "wrong"), ERROR),
    **dict.fromkeys(("jump", "noise"), INCONCLUSIVE),
    **dict.fromkeys(("unconverged", "declared", "symmetric", "kink", "zero", "agrees"), OK),
    **dict.fromkeys(("stopped", "stairs"), STOPPED),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_row(name):
    row = row_of(PLAIN[name])
    assert (row.name, row.verdict) == (name, VERDICTS[name])


def test_every_row_is_needed_and_every_word_is_known():
    assert {row.name for row in TABLE} == set(PLAIN)
    first = [row_of(evidence) for evidence in EVERYTHING]
    assert all(row in first for row in TABLE)
    for row in TABLE:
        for fits, words in zip(row.fits, WORDS, strict=True):
            assert fits == "*" or set(fits.split("|")) <= set(words)


def test_laws_of_the_table():
    for evidence in EVERYTHING:
        row = row_of(evidence)
        if evidence.derivative == "not finite":
            assert row.verdict == ERROR
        elif evidence.excuse == "stop":
            assert row.verdict == STOPPED
        elif evidence.excuse == "none":
            if evidence.modes == "disagree":
                assert row.verdict == ERROR, "at a jump too"
            elif evidence.sides == "jump":
                assert row.verdict == INCONCLUSIVE, "whatever the neighbourhood says"
            elif evidence.match == "off":
                assert row.verdict == ERROR
            elif evidence.sides == "noise" and evidence.nearby != "off":
                assert row.verdict == INCONCLUSIVE


def test_the_worst_of_several():
    assert worst([]) == OK
    assert worst([OK, INCONCLUSIVE, OK]) == INCONCLUSIVE
    assert worst([INCONCLUSIVE, STOPPED, OK]) == STOPPED
    assert worst([STOPPED, ERROR, OK]) == ERROR


# --- functions -------------------------------------------------------------------------------------------------------


def ruled(function, slope):
    rule = jax.custom_jvp(function)
    rule.defjvp(lambda primals, tangents: (function(*primals), slope(*primals) * tangents[0]))
    return rule


@jax.custom_vjp
def only_backwards(x):
    return jnp.sin(x)


only_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (1.01 * g * jnp.cos(x),))
at_one = lambda taken, otherwise: lambda x: jnp.where(x == 1, taken(x), otherwise(jnp.where(x == 1, 2.0, x)))

# A function, a point, and the verdict.
FUNCTIONS = {
    "smooth": (lambda x: jnp.exp(jnp.sin(x)), 0.7, OK),
    "an even function at its middle": (lambda x: jnp.cosh(x), 0.0, OK),
    "a rule": (ruled(jnp.sin, lambda x: 1.01 * jnp.cos(x)), 0.7, ERROR),
    "a rule without a derivative": (ruled(jnp.sin, lambda x: 0.0 * x), 0.7, STOPPED),
    "a part that is stopped": (lambda x: x * jax.lax.stop_gradient(x), 0.7, STOPPED),
    "a reverse rule": (only_backwards, 0.7, ERROR),
    "a removable gap": (at_one(lambda x: 1.0, lambda x: (x**3 - 1) / (x - 1) / 3), 1.0, ERROR),
    "a removable gap, filled well": (at_one(lambda x: x, lambda x: (x**3 - 1) / (x - 1) / 3), 1.0, OK),
    "a kink": (lambda x: jnp.abs(x - 0.5), 0.5, OK),
    "a corner of three": (lambda x: jnp.maximum(jnp.maximum(x, 2 * x), 0.0), 0.0, OK),
    "a slope beyond both sides": (lambda x: 3 * jax.nn.relu(x) - jnp.where(x >= 0, 2 * x, 0.0), 0.0, ERROR),
    "a root on one side": (lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), x), 0.0, OK),
    "a jump": (lambda x: jnp.where(x < 0.5, x, x + 1), 0.5, INCONCLUSIVE),
    "a pole": (lambda x: jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x)), 0.0, INCONCLUSIVE),
    "not finite": (lambda x: jnp.sqrt(x), 0.0, ERROR),
    "a kink behind a wrong rule": (lambda x: ruled(jnp.sin, lambda x: 1.5 * jnp.cos(x))(jnp.abs(x)), 0.0, ERROR),
    "complex": (lambda x: jnp.abs(jnp.exp(1j * x) + 1) ** 2, 0.7, OK),
}


@table("name, x64", in_turn(FUNCTIONS, [False, True]), quick=0)
def test_a_function(name, x64):
    function, x, verdict = FUNCTIONS[name]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(x)
    assert report.verdict == verdict, str(report)
    assert report.ok == (verdict == OK)
    assert [row.verdict for row in report.rows] == [verdict]


@pytest.mark.slow
def test_forward_and_reverse_that_disagree_are_an_error_at_a_jump_too():
    linear = jax.custom_jvp(lambda x: x)

    @linear.defjvp
    def _(primals, tangents):
        doubled = jax.custom_derivatives.linear_call(lambda _, t: t, lambda _, t: 3 * t, (), tangents[0])
        return primals[0], doubled

    for extra in (lambda x: 0.0, jnp.floor):
        report = pg.check(lambda x, extra=extra: linear(x) + extra(x), progress=False)(2.0)
        assert report.verdict == ERROR, str(report)


@pytest.mark.slow
def test_exhaustive_finds_what_the_default_finds():
    wrong = ruled(jnp.sin, lambda x: jnp.cos(x).at[3].mul(1.1))
    functions = {
        "rule": (lambda p: wrong(p["a"]).sum() * p["b"], "mismatch"),
        "stop": (lambda p: (lax.stop_gradient(p["a"]) * p["a"]).sum() * p["b"], "mismatch"),
        "tie": (lambda p: jnp.abs(p["a"] - 0.5).sum() * p["b"], "tie"),
        "jump": (lambda p: jnp.floor(p["a"] / 0.5).sum() * p["b"], "jump"),
    }
    point = {"a": np.linspace(0.5, 2, 5, dtype=np.float32), "b": np.float32(1.3)}
    data = lambda f: (f.kind, f.severity, f.reason, f.leaves, f.where)
    for name, (function, kind) in functions.items():
        some, every = (pg.check(function, progress=False, exhaustive=e)(point) for e in (False, True))
        assert kind in {f.kind for f in some.findings}, name
        assert {data(f) for f in some.findings} <= {data(f) for f in every.findings}, name
