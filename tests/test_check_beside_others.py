"""The report on a leaf does not depend on faults in other leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table


@jax.custom_vjp
def halved(x):
    return x**2


halved.defvjp(lambda x: (x**2, x), lambda x, cotangent: (x * cotangent,))

# A function of [-1, 0.5, 2], what is found of it, and the verdict.
ALONE = {
    "a wrong rule": (lambda x: halved(x).sum(), {("mismatch", "rule")}, "error"),
    "nan": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(), {("nan", "not taken")}, "error"),
    "a stop": (lambda x: (x * lax.stop_gradient(jnp.cos(x))).sum(), {("mismatch", "stop")}, "stopped"),
    "out of bounds": (lambda x: x[jnp.array([0, 7])].sum(), {("oob", "disagrees")}, "error"),
    "a constant branch": (
        lambda x: jnp.where(x[0] == -1, np.float32(np.exp(np.float32(-1))), jnp.exp(x[0])),
        {("mismatch", "removable")},
        "error",
    ),
    "lost digits": (lambda x: ((1 - jnp.cos(1e-4 * x)) / (1e-4 * x) ** 2).sum(), {("precision", "cancels")}, "error"),
    "a jump": (lambda x: jnp.round(3 * x).sum(), {("jump", "jump"), ("zero", "rounded")}, "inconclusive"),
    "chaos": (
        lambda x: lax.scan(lambda c, _: (3.9 * c * (1 - c), None), jax.nn.sigmoid(x[1]), length=100)[0],
        {("growth", "loop")},
        "error",
    ),
    "steps": (lambda x: (x + jnp.floor(1000 * x) / 1000).sum(), {("mismatch", "stairs")}, "stopped"),
    "nothing": (lambda x: jnp.sin(x).sum(), set(), "ok"),
}
OTHERS = ["a constant branch", *(name for name in ALONE if name not in ("a constant branch", "a jump"))]


@table("name", OTHERS, quick=1, most=6)
def test_a_leaf_is_judged_beside_one_on_a_jump_as_it_is_alone(name):
    """A jump of another leaf is not mistaken for rounding noise."""
    loss = lambda p: ALONE[name][0](p[name]) + ALONE["a jump"][0](p["a jump"])
    report = pg.check(loss, progress=False)({key: jnp.array([-1.0, 0.5, 2.0]) for key in (name, "a jump")})
    told = {(f.kind, f.reason, leaf) for f in report.findings if f.severity != "info" for leaf in f.leaves}
    assert told == {(*what, f"['{key}']") for key in (name, "a jump") for what in ALONE[key][1]}, str(report)
    assert [row.verdict for row in report.rows] == [ALONE[key][2] for key in sorted((name, "a jump"))]


@table("name", OTHERS, quick=2, most=6)
@pytest.mark.parametrize("of", [jnp.sqrt, lambda z: jnp.where(z > 0, jnp.sqrt(z), 0.0)], ids=["singular", "not taken"])
def test_a_leaf_is_judged_beside_one_without_a_finite_derivative_as_it_is_alone(name, of):
    report = pg.check(lambda p: ALONE[name][0](p["x"]) + of(p["z"]), progress=False)(
        {"x": jnp.array([-1.0, 0.5, 2.0]), "z": jnp.array(0.0)}
    )
    told = {(f.kind, f.reason) for f in report.findings if f.severity != "info" and "['x']" in f.leaves}
    assert told == ALONE[name][1], str(report)
    assert [row.verdict for row in report.rows] == [ALONE[name][2], "error"]


def test_an_element_is_judged_beside_one_on_a_jump():
    loss = lambda x: ALONE["a constant branch"][0](x) + ALONE["a jump"][0](x)
    (found,) = pg.check(loss, progress=False)(jnp.array([-1.0, 0.5, 2.0])).findings
    assert (found.kind, found.reason, found.figures.element) == ("mismatch", "removable", (0,))
