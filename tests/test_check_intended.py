"""`intended=` excuses a cause: a function by identity, a rule by its qualified name, a line, a leaf; and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg


def ruled(function, factor):
    rule = jax.custom_jvp(function)
    rule.defjvp(lambda primals, tangents: (function(*primals), factor * jnp.cos(primals[0]) * tangents[0]))
    return rule


# Made by the same lines, of the same function: only they themselves tell them apart.
twice, thrice = ruled(jnp.sin, 2.0), ruled(jnp.sin, 3.0)


@jax.custom_vjp
def clipped(x):
    return x


def clipped_backward(_, g):
    return (jnp.clip(g, -0.1, 0.1),)


clipped.defvjp(lambda x: (x, None), clipped_backward)


def target(p):
    return lax.stop_gradient(p["target"]) * 2.0


def scattered(v):
    return jnp.zeros(3).at[jnp.array([0, 5])].add(v, mode="promise_in_bounds").sum()


def both(p):
    return (p["online"] - target(p)) ** 2 + scattered(p["v"])


POINT = {"online": 1.0, "target": 0.7, "v": np.ones(2, np.float32)}


def severities(f, *args, **options):
    report = pg.check(f, progress=False, **options)(*args)
    return report, {f.kind: f.severity for f in report.findings}


@pytest.mark.slow
@pytest.mark.parametrize("what", [lax.stop_gradient, target, "['target']"], ids=["stop_gradient", "function", "leaf"])
def test_a_stop_is_excused_and_a_wrong_scatter_is_not(what):
    report, found = severities(both, POINT, intended=what)
    assert found == {"zero": "info", "oob": "error"}
    assert report.verdict == "error"
    assert {row.path: row.verdict for row in report.rows} == {"['online']": "ok", "['target']": "ok", "['v']": "error"}


@pytest.mark.slow
@pytest.mark.parametrize("what", [f"{__name__}.target", f"{__name__}.clipped", "jax.lax.stop_gradient"])
def test_a_function_by_its_qualified_name(what):
    f = lambda p: both(p) + clipped(p["online"])
    found = {finding.kind: finding for finding in pg.check(f, progress=False, intended=what)(POINT).findings}
    expected = "mismatch" if what.endswith("clipped") else "zero"
    assert {kind for kind, finding in found.items() if finding.intended} == {expected}, found


@pytest.mark.slow
def test_a_name_of_nothing_is_stale():
    report = pg.check(both, progress=False, intended=[f"{__name__}.tarket", "no.such.module"])(POINT)
    assert sorted(f.details["entry"] for f in report.findings if f.kind == "intended") == [
        "no.such.module",
        f"{__name__}.tarket",
    ]
    assert not any(f.intended for f in report.findings)


@pytest.mark.slow
def test_one_rule_does_not_excuse_another_of_the_same_name():
    f = lambda p: twice(p["a"]) + thrice(p["b"])
    point = {"a": 0.3, "b": 0.4}
    report = pg.check(f, progress=False, intended=twice)(point)
    assert {f.leaves: f.severity for f in report.findings} == {("['a']",): "info", ("['b']",): "error"}
    assert {row.path: row.verdict for row in report.rows} == {"['a']": "ok", "['b']": "error"}
    assert pg.check(f, progress=False, intended=[twice, thrice])(point).ok


@pytest.mark.slow
@pytest.mark.parametrize("what", [clipped, clipped_backward, "name"], ids=["rule", "backward", "qualified name"])
def test_a_rule_by_itself_by_its_function_or_by_the_name_that_the_report_prints(what):
    f = lambda x: clipped(x) * 3.0
    (finding,) = pg.check(f, progress=False)(0.7).findings
    assert finding.rule.name.endswith("test_check_intended.clipped")
    assert finding.rule.name in str(pg.check(f, progress=False)(0.7))
    report = pg.check(f, progress=False, intended=finding.rule.name if what == "name" else what)(0.7)
    assert report.ok
    assert [f.intended for f in report.findings] == [True]


@pytest.mark.slow
def test_a_line():
    (finding, *_) = pg.check(both, progress=False)(POINT).findings
    assert finding.kind == "oob"
    report, found = severities(both, POINT, intended=finding.where)
    assert (found["oob"], found["zero"]) == ("info", "warning")
    assert report.verdict == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stop_gradient", "clipped", "twice", "target", jnp.sin, severities, "other.py:3"])
def test_a_word_or_another_function_excuses_nothing(what):
    report, found = severities(both, POINT, intended=what)
    assert found == {"zero": "warning", "oob": "error", "intended": "warning"}
    (stale,) = [f for f in report.findings if f.kind == "intended"]
    assert stale.reason == "stale"


@pytest.mark.slow
def test_of_a_cause_of_two_leaves_one_may_be_intended():
    f = lambda p: lax.stop_gradient(p["a"] * p["b"]) + p["c"]
    report = pg.check(f, progress=False, intended="['a']")({"a": 1.0, "b": 2.0, "c": 3.0})
    assert {f.leaves: f.severity for f in report.findings} == {("['a']",): "info", ("['b']",): "warning"}


@pytest.mark.slow
def test_not_finite_is_never_intended():
    report, found = severities(lambda p: jnp.sqrt(p["x"]), {"x": 0.0}, intended=["['x']", jnp.sqrt])
    assert found["nan"] == "error"
    assert report.verdict == "error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "verdict"),
    [((), "error"), ((twice,), "stopped"), ((lax.stop_gradient,), "error"), ((twice, lax.stop_gradient), "ok")],
    ids=["nothing", "rule", "stop", "both"],
)
def test_of_a_wrong_rule_and_a_stop_beside_it_each_is_meant_on_its_own(what, verdict):
    report = pg.check(lambda x: twice(x) + lax.stop_gradient(x) * x, intended=what)(1.3)
    assert report.verdict == verdict
    assert [finding.kind for finding in report.findings] == ["mismatch", "mismatch"]
    assert sum(finding.intended for finding in report.findings) == len(what)
