"""The selection that decides is named: its line and what is called there, also where no tie is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import in_turn, table

F = lambda *values: np.array(values, np.float32)


def line_of(name):
    with open(__file__) as source:
        (number,) = [i for i, text in enumerate(source, 1) if text.rstrip().endswith(f"  # {name}")]
    return f"test_check_selection_named.py:{number}"


# --- in the manner of libraries: a wrong slope where a series takes over ---------------------------------------------


def sinc_of_a_rotation(omega):
    """The exponential map of rotations, with a series that has lost a term."""
    squared = jnp.sum(omega**2)
    angle = jnp.sqrt(jnp.where(squared < 1e-10, 1.0, squared))
    factor = jnp.where(squared < 1e-10, 1.0, jnp.expm1(angle) / angle)  # sinc_of_a_rotation
    return jnp.sum(factor * omega) + jnp.where(squared < 1e-10, 0.0, factor - 1.0) * omega[0]


def right_jacobian(theta):
    small = jnp.abs(theta) < 1e-6
    safe = jnp.where(small, 1.0, theta)
    return jnp.where(small, 0.5, (jnp.exp(safe) - 1 - safe) / safe**2)  # right_jacobian


def transmittance(density):
    """How much light passes, per density: the limit has no slope."""
    is_clear = jnp.abs(density) < 1e-6
    safe = jnp.where(is_clear, 1.0, density)
    return jnp.where(is_clear, 1.0, -jnp.expm1(-safe) / safe)  # transmittance


def annuity(rate):
    return lax.cond(jnp.abs(rate) < 1e-9, lambda r: 10.0, lambda r: (1 - (1 + r) ** -10.0) / r, rate)  # annuity


def box_cox(power):
    x = 2.5
    return jnp.where(power == 0, jnp.log(x), (x**power - 1) / jnp.where(power == 0, 1.0, power))  # box_cox


def slerp(angle):
    is_close = jnp.abs(angle) < 1e-7
    safe = jnp.where(is_close, 0.3, angle)
    return jnp.where(is_close, 0.25, jnp.sin(0.25 * safe) / jnp.sin(safe) + safe)  # slerp


REMOVABLE = {
    right_jacobian: (0.0, "where"),
    transmittance: (0.0, "where"),
    annuity: (0.0, "<"),
    box_cox: (0.0, "=="),
    slerp: (0.0, "where"),
}


@pytest.mark.slow
@table("function, x64", in_turn(REMOVABLE, [False, True]), quick=2, ids=lambda f: getattr(f, "__name__", None))
def test_a_wrong_slope_of_a_series_is_an_error_with_its_line(function, x64):
    x, operation = REMOVABLE[function]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(x)
    assert report.verdict == "error", str(report)
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert (finding.kind, finding.reason) == ("mismatch", "removable")
    assert (finding.where, finding.operation) == (line_of(function.__name__), operation)
    assert finding.figures.left == pytest.approx(finding.figures.right, rel=1e-4)


@pytest.mark.parametrize("x64", [False, True])
def test_a_series_with_its_slope_is_clean(x64):
    def right(theta):
        small = jnp.abs(theta) < 1e-6
        safe = jnp.where(small, 1.0, theta)
        return jnp.where(small, 0.5 + theta / 6, (jnp.exp(safe) - 1 - safe) / safe**2)

    with jax.enable_x64(x64):
        report = pg.check(right, progress=False)(0.0)
    assert report.ok
    assert all(f.severity == "info" for f in report.findings), str(report)


# --- ties ------------------------------------------------------------------------------------------------------------


def spline(x):
    knots = jnp.array([0.0, 1.0, 2.0])
    i = jnp.clip(jnp.searchsorted(knots, x) - 1, 0, 1)
    values = jnp.array([0.0, 1.0, 4.0])
    return values[i] + (values[i + 1] - values[i]) * (x - knots[i])


TIES = {
    "relu": (lambda x: jax.nn.relu(x), 0.0, "relu"),
    "abs": (lambda x: jnp.abs(x - 2), 2.0, "abs"),
    "clip": (lambda x: jnp.clip(x, -1.0, 1.0), 1.0, "clip"),
    "maximum": (lambda x: jnp.maximum(x, 0.5), 0.5, "maximum"),
    "minimum": (lambda x: jnp.minimum(x, x**2), 1.0, "minimum"),
    "where": (lambda x: jnp.where(x > 1, 3 * x - 2, x), 1.0, ">"),
    "max": (lambda x: jnp.max(x), F(1, 3, 3), "max"),
    "median": (lambda x: jnp.median(x), F(1, 2, 2), "median"),
    "sort": (lambda x: jnp.sort(x) @ F(1, 2, 4), F(2, 1, 2), "sort"),
    "top_k": (lambda x: lax.top_k(x, 2)[0] @ F(1, 3), F(2, 1, 2), "top_k"),
    "reduce_window": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID").sum(),
        F(1, 1, 2, 3),
        "reduce_window",
    ),
    "segment_max": (lambda x: jax.ops.segment_max(x, np.array([0, 0, 1]), 2).sum(), F(1, 1, 2), "segment_max"),
    "cummax": (lambda x: lax.cummax(x).sum(), F(1, 1, 2), "cummax"),
    "hinge": (lambda x: jnp.maximum(0.0, 1 - x) ** 1, 1.0, "maximum"),
    "linear spline at a knot": (spline, 1.0, "searchsorted"),
    "in a scan": (lambda x: lax.scan(lambda c, k: (c + jnp.abs(x - k), None), 0.0, jnp.arange(3.0))[0], 1.0, "abs"),
    "floor, continuous": (lambda x: (x - 2) * jnp.floor(x), 2.0, "floor"),
}


@pytest.mark.slow
@table("name, x64", in_turn(TIES, [False, True]), quick=4)
def test_a_tie_is_a_warning_with_its_line(name, x64):
    function, x, operation = TIES[name]
    with jax.enable_x64(x64):
        report = pg.check(function, progress=False)(jnp.asarray(x, float))
    assert report.verdict == "ok", str(report)
    (tie,) = [f for f in report.findings if f.kind == "tie"]
    assert (tie.severity, tie.operation) == ("warning", operation)
    assert tie.where.startswith("test_check_selection_named.py")
    low, high = sorted((tie.figures.left, tie.figures.right))
    assert low < high
    assert low - 1e-6 <= tie.figures.derivative <= high + 1e-6


@pytest.mark.slow
def test_of_max_pool_in_a_library():
    nn = pytest.importorskip("flax.linen")
    report = pg.check(lambda x: nn.max_pool(x[None, :, None], (2,), (2,)).sum(), progress=False)(F(1, 1, 2, 3))
    assert report.verdict == "ok"
    assert [f.kind for f in report.findings if f.severity == "warning"] == ["tie"]


@pytest.mark.slow
def test_what_only_feeds_a_comparison_is_not_blamed():
    def loss(x):
        return jnp.where(jnp.abs(x) < 0.5, x, 2 * x)

    report = pg.check(loss, progress=False)(0.5)
    (jump,) = [f for f in report.findings if f.kind == "jump"]
    assert jump.operation == "<"
    # Elsewhere, that the value jumps at it is a note.
    assert [f.reason for f in pg.check(loss, progress=False)(0.0).findings] == ["partly"]


@pytest.mark.slow
def test_of_several_selections_at_a_kink_the_one_that_decides_is_named():
    def distance_to_a_box(q):
        inside = jnp.minimum(jnp.max(q), 0.0)
        return jnp.max(q) + 2 * inside  # outside

    report = pg.check(distance_to_a_box, progress=False)(F(0.5, 0.5))
    (finding,) = report.findings
    assert (finding.kind, finding.operation, finding.where) == ("tie", "max", line_of("outside"))
