"""A point on a jump is not decided, whatever lies beside it; and what is smooth has no jump."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import in_turn, table

# A function, a point on a jump, and what jumps there.
JUMPS = {
    "where": (lambda x: jnp.where(x <= 1, x, x + 1), 1.0, "<="),
    "where of a product": (lambda x: jnp.where(2 * x < 3, x**2, -(x**2)), 1.5, "<"),
    "floor": (lambda x: x * jnp.floor(x), 2.0, "floor"),
    "ceil": (lambda x: x + jnp.ceil(x), 3.0, "ceil"),
    "round": (lambda x: x * jnp.round(x), 2.5, "round"),
    "mod": (lambda x: jnp.mod(x, 0.5), 1.5, "mod"),
    "operator": (lambda x: x % 1.0, 2.0, "%"),
    "sign": (lambda x: jnp.sign(x) + x, 0.0, "sign"),
    "heaviside": (lambda x: jnp.heaviside(x, 0.5) + x, 0.0, "heaviside"),
    "searchsorted": (lambda x: x * jnp.searchsorted(jnp.arange(4.0), x), 2.0, "searchsorted"),
    "astype": (lambda x: x * x.astype(int), 3.0, "astype"),
    "an isolated point": (lambda x: jnp.where(x == 1, 5.0, x), 1.0, "=="),
    "an even jump": (lambda x: jnp.abs(jnp.sign(x)) + x, 0.0, "sign"),
    "cond": (lambda x: lax.cond(x > 0, lambda x: x + 1, lambda x: x, x), 0.0, ">"),
    "switch": (lambda x: lax.switch(x.astype(int), [lambda x: x, lambda x: 2 * x, lambda x: 5 * x], x), 1.0, "astype"),
    "nearest knot": (lambda x: x * jnp.argmin(jnp.abs(x - jnp.array([0.0, 1.0, 2.0]))), 0.5, "argmin"),
    "atan2": (lambda x: jnp.arctan2(x, -1.0), 0.0, "arctan2"),
    "digitize": (lambda x: jnp.digitize(x, jnp.array([0.0, 1.0, 2.0])) * x, 1.0, "digitize"),
    "in a scan": (
        lambda x: lax.scan(lambda c, k: (c + jnp.floor(x * k), None), 0.0, jnp.arange(3.0))[0] + x,
        0.5,
        "floor",
    ),
    "in a vmap": (lambda x: jax.vmap(lambda k: jnp.where(x * k > 1, x, 0.0))(jnp.arange(1.0, 4)).sum(), 1.0, ">"),
}


@table("name, x64", in_turn(JUMPS, [False, True]), quick=4)
def test_a_jump_is_inconclusive_and_named(name, x64):
    function, x, operation = JUMPS[name]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(jnp.asarray(x))
    assert report.verdict == "inconclusive", str(report)
    (jump,) = [f for f in report.findings if f.kind == "jump"]
    assert jump.operation == operation
    assert jump.where.startswith("test_check_jump.py")
    assert jump.severity == "warning"
    # Those of the loop in a binary search are nobody's business.
    assert bool(jump.details["steps"]) == (name == "in a scan")


# Jumps and kinks at a float32 number that is not exactly where the operation changes, but has no neighbour between.
ROUNDED = {
    "floor": (lambda x: jnp.floor(x * 10) * x, 0.7, "jump", "floor"),
    "cast": (lambda x: jnp.asarray(x * 10, jnp.int32) * x, 0.2, "jump", "asarray"),
    "a whole turn": (lambda x: jnp.mod(x, 2 * jnp.pi), 2 * np.pi, "jump", "mod"),
    "half a turn": (lambda x: jnp.mod(x + np.float32(np.pi), np.float32(2 * np.pi)), np.pi, "jump", "mod"),
    "comparison": (lambda x: jnp.where(3 * x > 0.3, x, 0.0), 0.1, "jump", ">"),
    "maximum": (lambda x: jnp.maximum(3 * x - 0.3, 0.0), 0.1, "tie", "maximum"),
    "abs": (lambda x: jnp.sum(jnp.abs(3 * x - 0.3)), [0.1, 0.2, 0.3], "tie", "abs"),
}


@table("name", ROUNDED)
def test_a_jump_between_a_number_and_its_neighbours_is_at_the_number(name):
    function, x, kind, operation = ROUNDED[name]
    with jax.enable_x64(False):
        report = pg.check(function, progress=False)(np.float32(x))
    assert report.verdict == ("inconclusive" if kind == "jump" else "ok"), str(report)
    (finding,) = report.findings
    assert (finding.kind, finding.operation) == (kind, operation)


@pytest.mark.slow
def test_one_element_at_a_jump_leaves_its_leaf_undecided_and_no_other():
    f = lambda p: jnp.sum(jnp.floor(p["x"]) * p["y"])
    report = pg.check(f, progress=False)({"x": np.float32([0.5, 2, 3.5]), "y": np.float32(1.5)})
    assert {row.path: row.verdict for row in report.rows} == {"['x']": "inconclusive", "['y']": "ok"}


@pytest.mark.slow
def test_a_wrong_element_beside_a_jump_is_an_error():
    wrong = jax.custom_jvp(jnp.sin)
    wrong.defjvp(lambda p, t: (jnp.sin(p[0]), 2 * jnp.cos(p[0]) * t[0]))
    report = pg.check(lambda x: jnp.floor(x[0]) + wrong(x[1]), progress=False)(np.float32([2, 0.7]))
    assert report.verdict == "error"


def logistic(x):
    for _ in range(30):
        x = 3.9 * x * (1 - x)
    return x


SMOOTH = {
    "the logistic map": (logistic, 0.3),
    "a quotient that cancels": (lambda x: (1 - jnp.cos(x)) / x**2, 1e-3),
    "a steep sigmoid": (lambda x: jax.nn.sigmoid(1e5 * (x - 0.5)), 0.50001),
    "a rounded corner": (lambda x: jnp.sqrt(x**2 + 1e-10), 0.0),
    "a fast oscillation": (lambda x: jnp.sin(1e4 * x), 0.7),
    "a difference of exponentials": (lambda x: jnp.exp(x + 10) - jnp.exp(jnp.float32(10)), 1e-3),
    "a narrow peak": (lambda x: jnp.exp(-(((x - 0.5) / 1e-4) ** 2)), 0.50005),
    "a floor far from its steps": (lambda x: x * jnp.floor(x), 2.5),
}


@table("name, x64", in_turn(SMOOTH, [False, True]), quick=2)
def test_what_is_smooth_does_not_jump(name, x64):
    function, x = SMOOTH[name]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(x)
    assert "jump" not in {f.kind for f in report.findings}, str(report)
    # The logistic map in float32 has no right digit.
    assert not {f.kind for f in report.findings if f.severity == "error"} - {"precision"}, str(report)


def test_a_jump_may_be_intended_or_allowed():
    function = lambda x: jnp.floor(x) + x
    assert pg.check(function, progress=False, intended=jnp.floor)(2.0).ok
    report = pg.check(function, progress=False)(2.0)
    report.raise_if_failed(allow_inconclusive=True)
    with pytest.raises(AssertionError):
        report.raise_if_failed()


def in_cells(polynomial):
    def function(u):
        cell = jnp.floor(u)
        return cell + polynomial(u - cell)

    return function


# Slopes that are zero where two smooth pieces meet.
FLAT = {
    "smoothstep": (in_cells(lambda t: t**2 * (3 - 2 * t)), 1.0),
    "the quintic of Perlin noise": (in_cells(lambda t: t**3 * (t * (6 * t - 15) + 10)), 2.0),
    "a squared relu": (lambda x: jnp.maximum(x, 0.0) ** 2, 0.0),
    "x |x|": (lambda x: x * jnp.abs(x), 0.0),
    "the far side of a circle": (lambda x: jnp.cos(jnp.arctan2(jnp.sin(x), jnp.cos(x))), np.pi),
}


@table("name, x64", in_turn(FLAT, [False, True]))
def test_where_flat_pieces_meet_the_slope_is_zero(name, x64):
    function, x = FLAT[name]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(x)
    # Near the far side of the circle, the angle jumps.
    assert report.verdict == "ok" or name == "the far side of a circle", str(report)
    assert {f.severity for f in report.findings if f.kind != "jump"} <= {"info"}, str(report)
