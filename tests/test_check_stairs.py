"""A gradient that is zero because the leaf is compared or rounded has the line of that, however fine the steps are.

Differences of steps that are finer than theirs see the slope of the whole staircase.
"""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table


def halving(steps, choose=jnp.where):
    def root(k):
        def half(_, ends):
            low, high = ends
            middle = (low + high) / 2
            above = middle**3 + k * middle > 2.0  # compared
            return choose(above, low, middle), choose(above, middle, high)

        return lax.fori_loop(0, steps, half, (0.0, 2.0))[0]

    return root


def by_branches(above, one, other):
    return lax.cond(above, lambda: one, lambda: other)


def unrolled(k):
    low, high = 0.0, 2.0
    for _ in range(26):
        middle = (low + high) / 2
        above = middle**3 + k * middle > 2.0  # unrolled
        low, high = jnp.where(above, low, middle), jnp.where(above, middle, high)
    return low


def ternary(k):
    def third(_, ends):
        low, high = ends
        left, right = low + (high - low) / 3, high - (high - low) / 3
        lower = (left - k) ** 2 < (right - k) ** 2  # ternary
        return jnp.where(lower, low, left), jnp.where(lower, right, high)

    return lax.fori_loop(0, 60, third, (-3.0, 3.0))[0]


def by_bits(k):
    bit = lambda v, weight: (jnp.where(v + weight <= k, v + weight, v), None)  # bits
    return lax.scan(bit, 0.0, 2.0 ** -jnp.arange(30.0))[0]


def after_a_solve(k):
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    return halving(40)(jnp.linalg.solve(matrix, k * jnp.array([5.0, 1.0]))[0])


STAIRS = {
    "a few halvings": (halving(20), "compared", "compared"),
    "many halvings": (halving(40), "compared", "compared"),
    "branches": (halving(40, by_branches), "compared", "compared"),
    "unrolled": (unrolled, "compared", "unrolled"),
    "mapped": (lambda k: jax.vmap(halving(40))(k * jnp.arange(1.0, 3.0)).sum(), "compared", "compared"),
    "a product": (lambda k: 3.0 * halving(40)(k), "compared", "compared"),
    "after a solve": (after_a_solve, "compared", "compared"),
    "ternary search": (ternary, "compared", "ternary"),
    "bits": (by_bits, "compared", "bits"),
    "rounded": (lambda k: jnp.round(k * 1e8) / 1e8, "rounded", "rounded"),  # rounded
    "a floor": (lambda k: jnp.floor(k * 2.0**24) / 2.0**24, "rounded", "a floor"),  # a floor
    "a cast": (lambda k: (k * 1e8).astype(int) / 1e8, "cast", "a cast"),  # a cast
}


def line(name):
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {name}")]
    return f"test_check_stairs.py:{found}"


@table("name", list(STAIRS), quick=2)
def test_what_is_only_compared_or_rounded_has_a_line(name):
    function, reason, at = STAIRS[name]
    report = pg.check(function, progress=False)(jnp.float32(0.7))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.reason) == ("zero", "warning", reason)
    assert finding.where == line(at)
    assert report.verdict == ("ok" if name == "a few halvings" else "stopped")
    assert ("where the function changes by" in finding.message) == (report.verdict == "stopped")


@pytest.mark.slow
def test_another_leaf_is_judged_by_itself():
    report = pg.check(lambda p: halving(40)(p["a"]) * jnp.sin(p["b"]), progress=False)({"a": 0.7, "b": 2.0})
    assert {row.path: row.verdict for row in report.rows} == {"['a']": "stopped", "['b']": "ok"}


@pytest.mark.slow
def test_what_is_meant_is_ok():
    report = pg.check(halving(40), intended=[line("compared")], progress=False)(0.7)
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.slow
def test_a_wrong_rule_keeps_the_blame():
    wrong = jax.custom_jvp(jnp.sin)
    wrong.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 0.0 * tangents[0]))
    report = pg.check(lambda k: wrong(k) + 0.0 * halving(40)(k), progress=False)(0.7)
    assert {finding.kind for finding in report.findings} == {"mismatch"}
    assert report.verdict in ("stopped", "error")
