"""`search=True`: bad points near the given one are found, and what is well there raises no alarm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.tables import table

V, W = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 2.0])


@pg.dataclass
class Bond:
    length: jax.Array
    held: jax.Array = pg.field(nondiff=True)


def rotation(w):
    """Taylor's series for small angles, whose guard is not on both sides."""
    angle = jnp.sqrt(w @ w)
    return jnp.where(angle > 1e-6, jnp.sin(angle) / angle, 1.0) * w[0]


def turned(x):
    """A rotation about an axis, whose Jacobian is the matrix itself for small angles: twice the slope at zero."""
    angle = x[2]
    small = angle**2 < 1e-10
    safe = jnp.where(small, 1.0, angle)
    sine, cosine = jnp.sin(safe) / safe, (1 - jnp.cos(safe)) / safe
    sine, cosine = jnp.where(small, 1.0, sine), jnp.where(small, angle, cosine)
    return jnp.array([sine * x[0] - cosine * x[1], cosine * x[0] + sine * x[1]])


def interpolated(p, last=None):
    """A table at equal distances, which may be read past its end."""
    place = p["x"] * 8
    index = place.astype(int) if last is None else jnp.clip(place.astype(int), 0, last)
    return jnp.sum(p["table"][index] * (1 - place + index) + p["table"][index + 1] * (place - index))


TABLE = {"table": jnp.arange(9.0) ** 2, "x": jnp.array([0.3, 0.2])}


def in_a_loop(x):
    return jax.lax.scan(lambda c, t: (jnp.sqrt((c - t) ** 2) * (c - t), None), x, jnp.arange(3.0))[0]


def mean_of_positive(x):
    """Computes 0 / 0, behind a `where`, if no element is positive."""
    count = jnp.sum(x > 0)
    return jnp.where(count > 0, jnp.sum(jnp.maximum(x, 0.0)) / count * jnp.mean(x), 0.0)


def masked(p):
    """The masked element may be infinite: the value ignores it, and the gradient does not."""
    return jnp.sum(jnp.where(np.array([True, False]), (p["x"] * p["w"]) ** 2, 0.0))


# A function, a point where its gradient is right, and the operation whose derivative fails nearby.
PLANTED = {
    "norm": (lambda x: jnp.linalg.norm(x) ** 2, V, "norm"),
    "distance": (lambda p: jnp.exp(-(jnp.sqrt(jnp.sum((p[0] - p[1]) ** 2)) ** 2)), V[:2] + jnp.eye(2), "sqrt"),
    "all pairs": (
        lambda p: jnp.sum(jnp.sqrt(jnp.sum((p[:, None] - p[None]) ** 2, -1) + jnp.eye(3)) ** 3),
        jnp.array([[0.0, 0.0], [1.0, 0.2], [0.3, 1.0]]),
        "sqrt",
    ),
    "rotation": (rotation, V / 5, None),
    "guard": (turned, V, "<"),
    "sinc": (lambda x: jnp.sum(jnp.where(x == 0, 1.0, jnp.sin(x) / x)), W, "/"),
    "where sqrt": (lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x) * x, 0.0)), W, "sqrt"),
    "where log": (lambda x: jnp.sum(jnp.where(x > 0, x * x * jnp.log(x), 0.0)), W, None),
    "scan": (in_a_loop, jnp.array(2.5), "sqrt"),
    "map": (lambda x: jax.lax.map(lambda x: jnp.where(x > 1, jnp.sqrt(x - 1) ** 3, 0.0), x).sum(), W + 1, None),
    "cond": (
        lambda x: jax.lax.cond(x > 0, lambda x: jnp.sqrt(jnp.abs(x - 1.0)) ** 4, lambda x: x, x),
        jnp.array(3.0),
        "sqrt",
    ),
    "vmap": (lambda x: jax.vmap(lambda v: jnp.linalg.norm(v) ** 2)(x).sum(), jnp.ones((2, 2)), "norm"),
    "eigh": (lambda a: jnp.sum(jnp.linalg.eigh(a + a.T)[1][:, 0] ** 2), jnp.array([[1.0, 0.3], [0.2, 2.0]]), "eigh"),
    "arccos": (lambda x: jnp.arccos(jnp.clip(x, -1, 1)) ** 2 * (1 - x), jnp.array(0.5), "arccos"),
    "angle": (
        lambda p: jnp.arccos(p[0] @ p[1] / jnp.linalg.norm(p[0]) / jnp.linalg.norm(p[1])) ** 2,
        jnp.array([[1.0, 0.2], [0.3, 1.0]]),
        None,
    ),
    "arctan2": (lambda x: jnp.arctan2(x[0], x[1]) * (x[0] ** 2 + x[1] ** 2), W, "arctan2"),
    "power": (lambda x: jnp.sum(jnp.where(x > 0, x, 0.0) ** 0.5 * x), W, None),
    "std": (lambda x: jnp.std(x) ** 2, V, None),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sqrt(c[1] ** 2) * c[1]), (0, x))[1],
        jnp.array(2.0),
        None,
    ),
    "model": (lambda m: jnp.sqrt(m.length**2) * m.length * m.held, Bond(jnp.array(2.0), jnp.array(3.0)), "sqrt"),
    "jit": (jax.jit(lambda x: jnp.sum(jnp.linalg.norm(x, axis=-1) ** 2)), jnp.ones((3, 2)), "norm"),
    "past the end": (interpolated, TABLE, None),
    "floor": (lambda p: jnp.sum(p["table"][jnp.floor(p["x"] * 8).astype(int)] ** 2), TABLE, None),
    "none is counted": (mean_of_positive, jnp.array([0.4, -0.3, 0.9]), "/"),
    "left out": (masked, {"x": W, "w": W}, "**"),
    "zero in two leaves": (
        lambda p: jnp.sum(jnp.where(p["x"] == 0, 0.0, p["x"] ** 2 * jnp.log(p["y"]))),
        {"x": W, "y": V[1:]},
        None,
    ),
    "a product too large": (
        lambda p: jnp.where(p["x"] * p["w"] > 0, p["x"], jnp.exp(p["x"] * p["w"]) / (1 + jnp.exp(p["x"] * p["w"]))),
        {"x": jnp.array(0.7), "w": jnp.array(1.2)},
        None,
    ),
    "NaN where the value jumps": (lambda x: jnp.arctan2(x[0], x[1]), W, "arctan2"),
    "complex": (lambda z: jnp.sqrt(z.real**2 + z.imag**2) ** 2, jnp.array(0.3 + 0.4j), "sqrt"),
}

CLEAN = {
    "tanh": (lambda x: jnp.sum(jnp.tanh(x)), V),
    "relu": (lambda x: jnp.sum(jax.nn.relu(x)), W),
    "softplus": (lambda x: jnp.sum(jax.nn.softplus(x)), W),
    "normal": (lambda p: jnp.sum(jnp.log(p["s"]) + (p["m"] / p["s"]) ** 2), {"s": jnp.array(1.0), "m": jnp.array(0.3)}),
    "maximum": (jnp.max, V),
    "softmax": (lambda x: jax.nn.softmax(x)[0], V),
    "sqrt": (lambda x: jnp.sum(jnp.sqrt(x)), W),
    "abs": (lambda x: jnp.sum(jnp.abs(x)), W),
    "safe": (lambda x: pg.safe.norm(x) ** 2, W),
    "clip": (lambda x: jnp.sum(jnp.clip(x, 0.0, 1.0)), jnp.array([0.2, 0.7])),
    "logsumexp": (jax.scipy.special.logsumexp, W),
    "guarded": (lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)) * x, 0.0)), W),
    "double_where": (pg.double_where(lambda x: jnp.sum(jnp.where(x == 0, 1.0, jnp.cos(x)))), W),
    "eigenvalues": (lambda a: jnp.sum(jnp.linalg.eigh(a + a.T)[0] ** 2), jnp.array([[1.0, 0.3], [0.2, 2.0]])),
    "polynomial": (lambda x: jnp.sum(x**3 - 2 * x), W),
    "pole": (lambda x: jnp.sum(1 / (x[0] - x[1]) ** 12), jnp.array([1.0, 1.9])),
    "quotient": (lambda x: jnp.sum(1 / (1 + x**2)), W),
    "huber": (lambda x: jnp.sum(jnp.where(jnp.abs(x) < 1, x**2 / 2, jnp.abs(x) - 0.5)), W),
    "sort": (lambda x: jnp.sort(x) @ jnp.arange(3.0), V),
    "scan": (lambda x: jax.lax.scan(lambda c, t: (jnp.sin(c) + t, None), x, jnp.arange(3.0))[0], jnp.array(0.5)),
    "within the end": (lambda p: interpolated(p, last=7), TABLE),
    "gelu": (lambda x: jnp.sum(jax.nn.gelu(x)), V),
    "dead units": (lambda w: jnp.sum(jax.nn.relu(w @ V) ** 2), jnp.array([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])),
    "dropout": (lambda x: jnp.sum(jnp.where(np.array([True, False]), jnp.tanh(x) / 0.9, 0.0)), W),
    "saturated": (lambda x: jnp.sum(jnp.tanh(x) + jnp.exp(-(x**2))), jnp.array([0.3, 40.0])),
}


def errors(report):
    return [finding for finding in report.findings if finding.severity == "error"]


@pytest.mark.slow
@table("name", PLANTED, quick=2, most=8)
def test_bad_points_are_found(name):
    f, point, operation = PLANTED[name]
    report = pg.check(f, search=True)(point)
    assert not report.ok
    found = [finding for finding in errors(report) if finding.details.get("moved")]
    assert found
    # At the given point nothing is wrong, except that a loop has no gradient.
    assert name == "while" or found == errors(report)
    assert operation is None or operation in {finding.operation for finding in found}
    assert "point nearby" in found[0].message


@pytest.mark.slow
@table("name", CLEAN, quick=2, most=8)
def test_what_is_well_raises_no_alarm(name):
    f, point = CLEAN[name]
    report = pg.check(f, search=True)(point)
    assert not errors(report), report
    assert any("silence is no proof" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("f", [jnp.sqrt, jax.scipy.special.entr, lambda x: x**0.3])
def test_a_slope_that_is_infinite_is_a_note(f):
    report = pg.check(lambda x: f(x), search=True)(2.0)
    assert [(finding.kind, finding.severity) for finding in report.findings] == [("nan", "info")]
    assert report.ok


@pytest.mark.slow
def test_it_says_what_was_moved():
    f = lambda p: jnp.linalg.norm(p["a"]) ** 2 * p["b"]
    (finding,) = errors(pg.check(f, search=True)({"a": W, "b": 2.0}))
    ((path, (before, after)),) = finding.details["moved"].items()
    assert path == "['a']"
    np.testing.assert_allclose(before, W)
    assert after == [0.0, 0.0]


def bounded(p):
    return jnp.sum(jnp.where(p["a"] > 0, jnp.sqrt(p["a"]) * p["a"], 0.0)) * p["b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", [(0.1, None), ({"a": 0.1, "b": None}, None), (0.1, 5.0), (0.1, {"a": 3.0, "b": 3.0})]
)
def test_points_stay_within_bounds(bounds):
    assert not errors(pg.check(bounded, search=True, bounds=bounds)({"a": W, "b": 2.0}))


@pytest.mark.slow
def test_without_bounds_points_are_anywhere():
    assert errors(pg.check(bounded, search=True)({"a": W, "b": 2.0}))


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (3.0, "`bounds` is float 3.0.*pair"),
        ((1.0, None), r"exclude the given point, at `\['a'\]`.*from 1.0 to None"),
        (({"a": 0.0}, None), "have 1 leaves, and 2 are differentiated"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds, said):
    with pytest.raises(pg.errors.ArgumentError, match=f"(?s){said}"):
        pg.check(lambda p: jnp.sum(p["a"]) * p["b"], search=True, bounds=bounds)({"a": W, "b": 2.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "reason"), [(0.0, "0 s to compile"), (True, "are driven in a function of this size")]
)
def test_what_is_left_out_is_said(monkeypatch, search, reason):
    monkeypatch.setattr("partgrad._search.drive._NUMBERS", 1e5)
    report = pg.check(lambda x: jnp.sum(jnp.sqrt(x) / jnp.log(x + 3)), search=search)(jnp.arange(1.0, 20.0))
    assert report.search["left"] > 0
    assert reason in report.search["reason"]
    assert reason in str(report)
    assert report.to_dict()["search"] == report.search


@pytest.mark.slow
def test_a_function_that_refuses_other_points():
    """The search cannot go there, and says so."""
    f = lambda x: jnp.sqrt(eqx.error_if(x, x < 1.0, "too small")) ** 2
    report = pg.check(f, search=True)(2.0)
    assert report.ok
    assert "raises an error at other points" in str(report)


@pytest.mark.slow
def test_marks_and_wrt_are_respected():
    f = lambda m: jnp.sqrt(m.length**2) * m.length * m.held
    bond = Bond(jnp.array(2.0), jnp.array(3.0))
    (finding,) = errors(pg.check(f, search=True)(bond))
    assert list(finding.details["moved"]) == ["length"]
    assert not errors(pg.check(f, wrt="held", search=True)(bond))
