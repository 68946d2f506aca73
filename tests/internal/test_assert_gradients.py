"""Assertions about gradients, as a test suite uses them."""

import dataclasses

import jax.numpy as jnp
import pytest

import partgrad as pg
from partgrad import errors, testing
from partgrad._check.finding import Finding
from partgrad._check.report import GradientReport, LeafRow as Row

NAN = Finding("nan", "error", "value", ("a",), "/model.py", 42, "log", details={"first": "NaN", "dtype": "float32"})


@pytest.fixture
def asked(monkeypatch):
    """What `check` was asked, with the findings that it shall report."""
    calls = {"findings": (), "verdict": "ok"}

    def check(*args, **options):
        calls["check"] = (args, options)

        def run(*args, **kwargs):
            calls["run"] = (args, kwargs)
            return GradientReport(
                "f", (Row("a", "float", "checked", 1.0, None, calls["verdict"]),), calls["findings"], {}
            )

        return run

    monkeypatch.setattr(testing, "check", check)
    return calls


def f(tree, scale, *, power=2):
    return scale * tree["a"] ** power


def test_everything_is_handed_on_to_check(asked):
    testing.assert_gradients(f, {"a": 1.0}, 2.0, wrt="a", exhaustive=True, seed=3, directions=5, power=4)
    (given,), options = asked["check"]
    named = {"wrt": "a", "exhaustive": True, "seed": 3, "directions": 5, "progress": False}
    assert given is f
    assert {name: options[name] for name in named} == named
    assert asked["run"] == (({"a": 1.0}, 2.0), {"power": 4})


def test_errors_fail_and_show_the_table(asked):
    asked.update(findings=(NAN,), verdict="error")
    with pytest.raises(AssertionError, match="(?s)a +float +error +1 +nan at model.py:42\n\n.*is not finite") as caught:
        testing.assert_gradients(f, {"a": 1.0}, 2.0)
    assert isinstance(caught.value, errors.CheckError)


def test_warnings_do_not_fail(asked):
    asked["findings"] = (dataclasses.replace(NAN, severity="warning"),)
    assert testing.assert_gradients(f, {"a": 1.0}, 2.0) is None


def test_inconclusive_fails_unless_it_is_allowed(asked):
    asked["verdict"] = "inconclusive"
    with pytest.raises(errors.CheckError, match="allow_inconclusive=True"):
        testing.assert_gradients(f, {"a": 1.0}, 2.0)
    testing.assert_gradients(f, {"a": 1.0}, 2.0, allow_inconclusive=True)


@pytest.mark.slow
def test_a_right_and_a_singular_gradient():
    pg.testing.assert_gradients(f, {"a": 1.5}, 2.0)
    pg.testing.assert_gradients(jnp.linalg.norm, jnp.arange(3.0))
    with pytest.raises(AssertionError, match="nan"):
        pg.testing.assert_gradients(jnp.linalg.norm, jnp.zeros(3))
