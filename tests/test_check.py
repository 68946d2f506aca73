"""`check` as a user meets it: what it takes, what it returns, what it leaves alone."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad.errors import ArgumentError, CheckError, NoMatchError, NotDifferentiableError

quiet = lambda f, wrt=None, **options: pg.check(f, wrt, progress=False, **options)


def loss(p):
    return jnp.sum(jnp.sin(p["x"]) * p["scale"])


POINT = {"x": jnp.array([0.3, 1.0]), "scale": 2.0, "count": 3}


def test_a_right_gradient_is_ok_in_both_precisions(x64):
    report = quiet(loss)(POINT)
    assert report.ok
    assert report.findings == ()
    assert [(row.path, row.status) for row in report.rows] == [
        ("['count']", "integer"),
        ("['scale']", "checked"),
        ("['x']", "checked"),
    ]
    assert jax.config.jax_enable_x64 == x64


@pytest.mark.slow
def test_only_what_is_selected_is_checked_and_the_rest_says_why():
    def f(p):
        return jnp.sqrt(p["bad"]) + p["good"] ** 2

    point = {"bad": 0.0, "good": 2.0, "held": pg.NonDiff(1.0)}
    report = quiet(f, "good")(point)
    assert report.ok
    assert [row.status for row in report.rows] == ["not selected", "checked", "held by a mark"]
    assert not quiet(f)(point).ok


def test_side_arguments_and_keywords_are_passed_on():
    def f(p, n, *, power, shift):
        return jnp.sum(p["x"][:n] ** power) + shift.sum()

    assert quiet(f)({"x": jnp.array([1.0, 2.0, 3.0])}, 2, power=3, shift=jnp.array([1, 2])).ok


@pytest.mark.slow
def test_an_equinox_model():
    model = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    report = quiet(lambda model, x: model(x) ** 2)(model, jnp.array([0.3, 0.7]))
    assert report.ok
    assert "layers[0].weight" in str(report)


@pytest.mark.slow
def test_several_outputs_of_any_shape():
    @jax.custom_vjp
    def transposed(matrix, x):
        return matrix @ x

    transposed.defvjp(lambda m, x: (m @ x, (m, x)), lambda r, ct: (jnp.outer(ct, r[1]), r[0] @ ct))
    matrix = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    f = lambda p: {"y": transposed(matrix, p["x"]), "n": 3, "z": (p["a"] * 2,)}
    report = quiet(f)({"x": jnp.array([1.0, 2.0]), "a": 1.0})
    (finding,) = report.findings
    assert (finding.kind, finding.leaves) == ("mismatch", ("['x']",))
    assert re.fullmatch(r"test_check\.py:\d+", finding.where)
    assert finding.operation == "transposed"
    assert finding.rule.name.endswith(".transposed")


@pytest.mark.slow
def test_exhaustive_finds_the_element():
    @jax.custom_jvp
    def f(x):
        return x**2

    wrong = jnp.ones(50).at[17].set(1 + 1e-4)
    f.defjvp(lambda p, t: (p[0] ** 2, 2 * p[0] * t[0] * wrong))
    report = quiet(lambda x: f(x).sum(), exhaustive=True)(jnp.linspace(1.0, 2.0, 50))
    assert report.findings[0].figures.element == (17,)


def test_the_seed_decides_the_directions():
    first, again, other = (quiet(loss, seed=seed)(POINT) for seed in (0, 0, 1))
    assert first.to_dict() == again.to_dict()
    assert other.ok


@pytest.mark.slow
def test_the_report_is_json():
    report = quiet(lambda x: jnp.sqrt(x))(0.0)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is False
    assert data["findings"][0]["kind"] == "nan"
    assert data["cost"]["function"] > 0


@pytest.mark.slow
def test_raise_if_failed():
    quiet(loss)(POINT).raise_if_failed()
    with pytest.raises(CheckError, match="nan at test_check.py:"):
        quiet(lambda x: jnp.sqrt(x))(0.0).raise_if_failed()


def test_a_typo_in_the_selector():
    with pytest.raises(NoMatchError, match="scale"):
        quiet(loss, "skale")(POINT)


WRONG = {
    "directions": [0, True, 2.0, "3", None],
    "progress": ["yes"],
    "seed": [-1, 1.5, "0", None, True, jax.random.key(0)],
    "search": ["yes", None, -1, -1.0, float("nan"), (1,)],
    "intended": [3, None, [3], {"a": 1}, (None,), ("x", 2.0)],
    "bounds": [3.0, (1.0,), [0.0, 1.0], (0.0, 1.0, 2.0), ("a", None), ({"x": "a"}, None), "ab"],
    "has_aux": ["no", 1, None],
    "forward": ["no", 1, None],
    "exhaustive": ["no", 1, None],
    "argnums": ["x", 1.5, (0, "x"), None.__class__],
    "argnames": [3, (3,), 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_options_of_the_wrong_kind(name, value):
    beside = {"search": True} if name == "bounds" else {}
    with pytest.raises(ArgumentError, match=f"(?s){name}.*Expected.*Fix: ") as caught:
        pg.check(loss, **{name: value}, **beside)
    fix = str(caught.value).split("Fix: ")[1]
    written = re.search(rf"{name}=(\(.*?\)|[^\s,.]+(?:\.\d+)?)", fix)
    right = {name: eval(written[1])} if written and name not in ("argnums", "argnames") else {}
    pg.check(loss, **right, **beside)


@pytest.mark.parametrize("search", [False, np.False_])
def test_bounds_are_for_a_search(search):
    with pytest.raises(ArgumentError, match="Fix: write search=True"):
        pg.check(loss, bounds=(0.0, None), search=search)
    pg.check(loss, bounds=(0.0, None), search=True)


RIGHT = {
    "directions": [1, np.int64(2)],
    "seed": [0, np.uint8(3)],
    "search": [np.True_, 0, 0.5, np.float32(0.5), 1],
    "intended": [jnp.sin, "x", ["x", jnp.sin], {"x"}, (name for name in "x")],
    "has_aux": [np.False_],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_options_of_other_right_kinds(name, value):
    assert quiet(lambda x: jnp.sin(x), **{name: value})(0.3).verdict == "ok"


@pytest.mark.parametrize("bounds", [(jnp.zeros(3), None), (None, {"x": np.ones((2, 2)), "scale": 3.0})])
def test_bounds_of_another_shape(bounds):
    with pytest.raises(ArgumentError, match=r"(?s)Expected.*Fix"):
        quiet(loss, search=True, bounds=bounds)(POINT)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_whether_a_leaf_may_be_inconclusive_is_a_bool(value):
    with pytest.raises(ArgumentError, match="Fix: write allow_inconclusive=True"):
        quiet(loss)(POINT).raise_if_failed(allow_inconclusive=value)
    with pytest.raises(ArgumentError, match="Fix: write allow_inconclusive=True"):
        pg.testing.assert_gradients(loss, POINT, allow_inconclusive=value)


def test_what_cannot_be_checked():
    with pytest.raises(ArgumentError, match="returns nothing that has a derivative"):
        quiet(lambda x: x > 0)(1.0)
    with pytest.raises(TypeError, match="check"):
        quiet(3.0)
    with pytest.raises(ArgumentError, match="inside `jit`"):
        jax.jit(lambda x: quiet(loss)({"x": x, "scale": 1.0}).ok)(jnp.ones(2))


def test_an_error_of_the_function_is_the_users():
    with pytest.raises(KeyError, match="missing"):
        quiet(lambda p: p["missing"])(POINT)


def test_progress_is_told():
    told = []
    pg.check(loss, progress=lambda done, total, what: told.append((done, total, what)))(POINT)
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total, _ in told)
    assert told[-1][0] == told[-1][1]


def test_a_complex_leaf():
    assert quiet(lambda z: jnp.sum(jnp.abs(jnp.exp(z)) ** 2))(jnp.array([0.3 + 0.2j, 1.0 - 1j])).ok


def test_a_function_that_does_not_depend_on_anything():
    report = quiet(lambda p: jnp.ones(()) * 3)(POINT)
    assert report.ok
    assert [(f.kind, f.reason, f.leaves) for f in report.findings] == [("zero", "no path", ("['scale']", "['x']"))]


@jax.custom_vjp
def _scaled(x, by):
    return jnp.take(x, jnp.arange(3)) * by


def _scaled_forward(x, by):
    if by.perturbed:
        raise RuntimeError("the scale has no derivative")
    return jnp.take(x.value, jnp.arange(3)) * by.value, by.value


_scaled.defvjp(_scaled_forward, lambda by, cotangent: (cotangent * by, None), symbolic_zeros=True)


@pytest.mark.slow
def test_a_rule_that_refuses_an_operand_may_be_tried():
    inner = jax.jit(_scaled)
    f = lambda x: jnp.sum(inner(x, jnp.float32(2)) * x.at[jnp.array([0, 1, 5])].get(mode="clip"))
    report = pg.check(f, progress=False)(jnp.arange(1.0, 4.0))
    assert report.ok
    assert [finding.kind for finding in report.findings] == ["oob"]


@pytest.mark.slow
def test_a_gradient_that_is_zero_but_for_rounding_is_right(x64):
    inputs = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def loss(p):
        hidden = inputs @ p["weight"] + p["bias"]
        normal = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        return jnp.mean((jnp.tanh(normal) - 1) ** 2)

    p = {"bias": jnp.array([0.3, -0.2]), "weight": jnp.array([[1.0, 0.5], [0.3, -2.0], [0.7, 0.1]])}
    report = pg.check(loss, progress=False)(p)
    # Where the precision is that of the comparison, there is nothing to tell.
    found = [] if x64 else [("zero", "info", ("['bias']",))]
    assert [(f.kind, f.severity, f.leaves) for f in report.findings] == found
    assert [row.status for row in report.rows] == ["checked", "checked"]


@pytest.mark.slow
@pytest.mark.parametrize("part", [1e-5, 1e-2])
def test_a_stop_is_never_ok_however_small(part):
    f = lambda x: jnp.sum(jnp.sin(x) + part * jax.lax.stop_gradient(x))
    report = pg.check(f, progress=False)(jnp.array([0.3, 0.8]))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, report.verdict) == ("mismatch", "warning", "stopped")
    assert not report.ok
    with pytest.raises(pg.errors.CheckError, match="intended="):
        report.raise_if_failed(allow_inconclusive=True)


def test_a_gradient_that_exists_only_where_values_are_known():
    def largest(p):
        return jnp.sum(jax.lax.reduce_window(p["x"], p["start"], jax.lax.max, (2,), (2,), "VALID"))

    report = quiet(largest)({"x": jnp.arange(4.0), "start": -jnp.inf})
    assert not report.ok
    assert quiet(largest, "x")({"x": jnp.arange(4.0), "start": -jnp.inf}).ok


UNMOVABLE = {
    "more digits than JAX has": np.ones(2, np.longdouble),
    "complex with more": np.ones(2, np.clongdouble),
    "another order of bytes": np.ones(2, ">f4"),
    "a masked array": np.ma.masked_array([1.0, 2.0], [0, 1]),
    "a shape": jax.ShapeDtypeStruct((2,), jnp.float32),
}


@pytest.mark.parametrize("name", UNMOVABLE)
def test_a_leaf_that_cannot_be_moved(name):
    f = lambda p: jnp.sum(p["x"] ** 2)
    tree = {"odd": UNMOVABLE[name], "x": jnp.ones(2)}
    with pytest.raises(NotDifferentiableError, match=r"cannot check `\['odd'\]`") as caught:
        quiet(f)(tree)
    fix = re.search(r"Fix: leave it out: wrt=(.*)\.$", str(caught.value))[1]
    assert quiet(f, eval(fix, {"partgrad": pg}))(tree).ok
    with pytest.raises(NotDifferentiableError, match=r"cannot check the tree itself.*\n.*\n.*build it in the function"):
        quiet(lambda x: x.sum())(UNMOVABLE[name])
