"""survey: the gradients at many states are those of `grad` at each, and what is said of them is what `check` says."""

import builtins
import functools
import json
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import partgrad as pg
from helpers.tables import in_turn, table
from partgrad._survey.patterns import _outliers

pytestmark = pytest.mark.slow


def valve(params, state):
    flow = jnp.maximum(state["s"] - params["threshold"], 0.0)
    jump = jnp.where(state["s"] > params["at"], 1.0, 0.0)
    chosen = jnp.where(state["s"] > 3.0, params["w"] * state["v"], params["w"] * jnp.array([1.0, 0.0, 1.0]))
    return jnp.sqrt(flow) * params["gain"] + chosen.sum() + jump


PARAMS = {"threshold": 1.0, "gain": 2.0, "w": jnp.ones(3), "at": 2.0, "unused": 1.0}
STATES = {
    "s": np.linspace(0.0, 4.0, 100).astype(np.float32),
    "v": np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32),
}


def sizes_by_grad(f, params, states, count):
    """The size of each gradient at each state, one after another."""
    found, gradient = [], jax.jit(jax.grad(f))
    for i in range(count):
        gradients = jax.tree.leaves(gradient(params, jax.tree.map(lambda leaf: leaf[i], states)))
        found.append(
            [np.sqrt(np.mean(np.asarray(g, float) ** 2)) if np.isfinite(g).all() else np.nan for g in gradients]
        )
    return np.array(found).T


@functools.cache
def surveyed():
    return pg.survey(valve, in_axes=(None, 0), progress=False)(PARAMS, STATES)


@functools.cache
def sizes_of_the_valve():
    return sizes_by_grad(valve, PARAMS, STATES, 100)


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 1000])
def test_the_numbers_are_those_of_grad(chunk_size):
    report = pg.survey(valve, in_axes=(None, 0), chunk_size=chunk_size, progress=False)(PARAMS, STATES)
    expected = sizes_of_the_valve()
    np.testing.assert_allclose(report.sizes, expected, rtol=1e-4)
    assert report.paths == ("['at']", "['gain']", "['threshold']", "['unused']", "['w']")
    rows = {row.path: row for row in report.rows}
    for path, sizes in zip(report.paths, expected, strict=True):
        row, finite = rows[path], sizes[np.isfinite(sizes)]
        assert (row.zero, row.not_finite) == (np.mean(sizes == 0), np.mean(np.isnan(sizes)))
        np.testing.assert_allclose(row.size, np.percentile(finite, (5, 50, 95)), rtol=1e-4, atol=1e-6)
    # The second entry is dead up to 3, where the others are not.
    assert rows["['w'][1]"].zero == np.mean(STATES["s"] <= 3.0)
    assert rows["['w'][1]"].verdict is None
    assert report.dead == ("['at']", "['unused']")


def test_each_pattern_is_checked_and_names_its_cause():
    report = surveyed()
    assert report.verdict == "error"
    assert [(p.zero, p.not_finite, p.states) for p in report.patterns] == [
        (("['at']", "['unused']"), (), 75),
        (("['at']", "['gain']", "['unused']"), ("['threshold']",), 25),
    ]
    for pattern in report.patterns:
        zero = [path for path, size in zip(report.paths, report.sizes[:, pattern.state], strict=True) if size == 0]
        assert tuple(zero) == pattern.zero
    found = {(f.kind, f.reason): f for f in report.findings}
    nan = found["nan", "not taken"]
    assert (nan.leaves, nan.operation, nan.details["states"]) == (("['threshold']",), "sqrt", 25)
    assert nan.fix is not None
    assert found["zero", "compared"].leaves == ("['at']",)
    assert found["zero", "compared"].fix is not None
    assert found["zero", "no path"].leaves == ("['unused']",)
    # As a check of that state says.
    (own,) = [
        f for f in pg.check(valve, progress=False)(PARAMS, {"s": 0.0, "v": STATES["v"][0]}).findings if f.kind == "nan"
    ]
    assert (own.reason, own.where, own.leaves) == (nan.reason, nan.where, nan.leaves)
    mended = pg.survey(valve, in_axes=(None, 0), double_where=True, progress=False)(PARAMS, STATES)
    assert mended.ok
    assert np.isfinite(mended.sizes).all()


def test_it_prints_in_eighty_columns_and_as_html_and_json():
    params = {f"a_parameter_with_a_long_name_{i}" * 2: 1.0 for i in range(14)}

    def f(params, state):
        return sum(jnp.sqrt(jnp.maximum(state - i, 0.0)) * p for i, p in enumerate(params.values()))

    report = pg.survey(f, in_axes=(None, 0), progress=False)(params, jnp.linspace(0.0, 14.0, 100))
    for text in (str(report), repr(report)):
        assert max(map(len, text.splitlines())) <= 80
        assert "... 3 more patterns" in text
        assert "patterns not checked" in text
    html = report._repr_html_()
    assert html.count("<table") == 2
    assert "a_parameter" in html
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["states"], len(data["rows"]), data["verdict"]) == (100, 14, report.verdict)


def test_a_single_number_and_nothing_to_say():
    report = pg.survey(lambda p, s: p * s, in_axes=(None, 0), progress=False)(2.0, jnp.arange(1.0, 5.0))
    assert report.ok
    assert report.findings == ()
    lines = str(report).splitlines()
    assert lines[0].endswith("ok in 1 leaf over 4 states")
    assert lines[4].split()[:4] == ["(the", "tree", "itself)", "ok"]


# --- what is wrong somewhere only -------------------------------------------------------------------------------------


@jax.custom_jvp
def half(x):
    return x * x


half.defjvp(lambda primals, tangents: (half(*primals), primals[0] * tangents[0]))


def test_a_wrong_rule_in_some_states_of_a_pattern_is_found():
    f = lambda p, s: jnp.where(s > 3.0, half(p["a"]), p["a"] ** 2) * p["b"] * s
    report = pg.survey(f, in_axes=(None, 0), progress=False)({"a": 1.0, "b": 2.0}, jnp.linspace(1.0, 4.0, 100))
    assert report.verdict == "error"
    (error,) = report.findings
    assert (error.kind, error.leaves, error.details["states"]) == ("mismatch", ("['a']",), 0)
    assert error.details["state"] > 66
    assert "where differences are off" in str(report)


@settings(max_examples=10)
@given(st.floats(0.2, 5.0), st.integers(0, 10))
def test_a_right_function_has_no_doubts(scale, seed):
    f = lambda p, s: jnp.sin(p["w"] @ s) * p["k"] + jnp.exp(-p["k"] * s[0] ** 2)
    states = scale * jax.random.normal(jax.random.key(seed), (50, 3))
    report = pg.survey(f, in_axes=(None, 0), progress=False)({"w": jnp.ones(3), "k": 0.7}, states)
    assert report.verdict in ("ok", "inconclusive"), report
    assert not [finding for finding in report.findings if finding.severity == "error"]


def test_an_error_beside_a_state_hides_nothing():
    def f(p, s):
        return jnp.sqrt(eqx.error_if(s + p, s + p < 0.0, "below zero"))

    report = pg.survey(f, in_axes=(None, 0), progress=False)(0.0, jnp.array([0.001, 1.0, 2.0]))
    assert report.states == 3
    assert np.isfinite(report.sizes).all()


# --- arguments of every kind ------------------------------------------------------------------------------------------

KEYS = jax.random.split(jax.random.key(0), 6)
CALLS = {
    "one argument": (lambda p: p["a"] ** 2, {}, ({"a": jnp.arange(6.0)},), {}, ["['a']"]),
    "both mapped": (lambda p, s: p * s, {}, (jnp.arange(6.0), jnp.ones(6)), {}, [""]),
    "a tree of axes": (
        lambda p, s: p["a"] * p["b"] * s,
        {"in_axes": ({"a": 0, "b": None}, 0)},
        ({"a": jnp.ones(6), "b": 2.0}, jnp.ones(6)),
        {},
        ["['a']", "['b']"],
    ),
    "another axis": (lambda p, s: p @ s, {"in_axes": (None, -1)}, (np.ones(3), np.ones((3, 6))), {}, [""]),
    "keywords and keys": (
        lambda p, *, k: p * jax.random.normal(k),
        {"in_axes": None},
        (2.0,),
        {"k": KEYS},
        [""],
    ),
    "argnums": (
        lambda p, s: p * s,
        {"in_axes": (None, 0), "argnums": (0, 1)},
        (2.0, jnp.ones(6)),
        {},
        ["args[0]", "args[1]"],
    ),
    "argnames": (lambda p, s: p * s, {"argnames": "s"}, (jnp.ones(6),), {"s": jnp.ones(6)}, [""]),
    "auxiliary data": (
        lambda p, s: (p * s, {"s": s}),
        {"in_axes": (None, 0), "has_aux": True},
        (2.0, jnp.ones(6)),
        {},
        [""],
    ),
    "several outputs": (
        lambda p, s: {"o": p * s, "i": 3, "c": p * 1j},
        {"in_axes": (None, 0)},
        (np.ones(2), np.ones((6, 2))),
        {},
        [""],
    ),
    "static data": (
        lambda p, s: sum(p["w"] * s for _ in range(p["n"])) if p["name"] == "a" else None,
        {"in_axes": (None, 0)},
        ({"w": 1.0, "n": 3, "name": "a"}, jnp.ones(6)),
        {},
        ["['w']"],
    ),
    "elements": (lambda p, s: p @ s, {"in_axes": (None, 0), "wrt": "[0]"}, (np.ones(3), np.ones((6, 3))), {}, [""]),
}


@pytest.mark.parametrize(("f", "options", "args", "kwargs", "paths"), CALLS.values(), ids=CALLS)
def test_arguments(f, options, args, kwargs, paths):
    report = pg.survey(f, progress=False, **options)(*args, **kwargs)
    assert report.states == 6
    assert list(report.paths) == paths
    assert report.verdict == "ok", report
    assert np.isfinite(report.sizes).all()


@pg.dataclass
class Kernel:
    scale: jax.Array | float
    period: jax.Array | float = pg.field(nondiff=True, default=1.0)

    def __call__(self, x):
        return self.scale * jnp.sin(x / self.period)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)[0]


def test_models():
    x = jax.random.normal(jax.random.key(1), (40, 3))
    kernel = pg.survey(lambda m, x: m(x), in_axes=(None, 0), progress=False)
    assert kernel(Kernel(2.0), x[:, 0]).paths == ("scale",)
    named = pg.survey(lambda m, x: m(x), "period", in_axes=(None, 0), progress=False)
    assert named(Kernel(2.0), x[:, 0]).paths == ("period",)
    mlp = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))
    report = pg.survey(lambda m, x: m(x), in_axes=(None, 0), progress=False)(mlp, x)
    expected = sizes_by_grad(
        lambda m, x: eqx.combine(m, eqx.filter(mlp, callable))(x), eqx.filter(mlp, eqx.is_array), x, 40
    )
    np.testing.assert_allclose(report.sizes, expected, rtol=1e-4)
    net = Net(nnx.Rngs(0))
    report = pg.survey(lambda m, x: m(x), in_axes=(None, 0), progress=False)(net, x)
    assert report.paths == ("linear.bias.value", "linear.kernel.value")
    assert net.calls[...] == 0


@table("kind, chunk_size", in_turn([AxisType.Auto, AxisType.Explicit], [None, 3]))
def test_on_a_mesh(kind, chunk_size):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    states = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data"))), STATES)
    with jax.set_mesh(mesh):
        report = pg.survey(valve, in_axes=(None, 0), chunk_size=chunk_size, progress=False)(PARAMS, states)
    plain = surveyed()
    np.testing.assert_allclose(report.sizes, plain.sizes, rtol=1e-5)
    assert report.patterns == plain.patterns


def test_in_both_precisions(x64):
    report = pg.survey(valve, in_axes=(None, 0), progress=False)(PARAMS, STATES)
    assert report.dead == ("['at']", "['unused']")
    assert report.sizes.dtype == (np.float64 if x64 else np.float32)


def test_one_program_is_compiled_for_all_states():
    traces = []

    def f(p, s):
        traces.append(s)
        return p * s

    pg.survey(f, in_axes=(None, 0), chunk_size=10, progress=False)(2.0, jnp.arange(1.0, 1001.0))
    few = len(traces)
    pg.survey(f, in_axes=(None, 0), chunk_size=10, progress=False)(2.0, jnp.arange(1.0, 31.0))
    assert len(traces) == 2 * few


def test_progress():
    seen = []
    told = lambda done, total, what: seen.append((done, total, what))
    pg.survey(valve, in_axes=(None, 0), chunk_size=50, progress=told)(PARAMS, STATES)
    assert seen[:2] == [(1, 2, "gradients"), (2, 2, "gradients")]
    assert [what for *_, what in seen[2:]] == ["checks"] * (seen[-1][1] - 2)
    assert seen[-1][0] == seen[-1][1]


def test_outliers():
    sizes = np.exp(np.random.default_rng(0).normal(size=200))
    assert _outliers(sizes) == ()
    sizes[[3, 90]] = 1e6, 1e9
    assert _outliers(sizes) == (90, 3)
    sizes[5], sizes[6] = 0.0, np.nan
    assert _outliers(sizes) == (90, 3)
    report = pg.survey(lambda p, s: p / s, in_axes=(None, 0), progress=False)(1.0, jnp.r_[jnp.linspace(1, 2, 50), 1e-6])
    assert report.rows[0].outliers == (50,)
    assert "outliers" in str(report)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_plot(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = surveyed()
    axes = report.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == list(report.paths)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"zero", "not finite"}
    axes.figure.savefig(tmp_path / "survey.png")
    assert report.plot(axes) is axes
    pyplot.close("all")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match="(?s)matplotlib, which is not installed.*Fix: run python -m pip install"
    ) as caught:
        report.plot()
    assert isinstance(caught.value, pg.errors.LibraryError)


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG = {
    "no axis": ({}, (PARAMS, STATES), "has no axis 0 for the states: it is", r"in_axes=\(None, 0\)"),
    "too many": (
        {"in_axes": (None, 0, 0)},
        (PARAMS, STATES),
        "`in_axes` has 3 entries, and 2 arguments",
        "write in_axes",
    ),
    "another tree": ({"in_axes": (None, {"x": 0})}, (PARAMS, STATES), "does not fit the arguments", "number or None"),
    "none": ({"in_axes": None}, (PARAMS, STATES), "no argument has an axis of states", "write in_axes"),
    "sizes": (
        {"in_axes": (None, 0)},
        (PARAMS, {"s": np.ones(3), "v": np.ones((4, 3))}),
        r"`args\[1\]\['s'\]` has 3, `args\[1\]\['v'\]` has 4",
        "write in_axes",
    ),
    "no states": ({"in_axes": (None, 0)}, (PARAMS, {"s": np.ones(0), "v": np.ones((0, 3))}), "no states", "batch"),
}


@pytest.mark.parametrize(("options", "args", "said", "fix"), WRONG.values(), ids=WRONG)
def test_wrong_axes(options, args, said, fix):
    with pytest.raises(pg.errors.ArgumentError, match=f"(?s){said}.*Fix: .*{fix}"):
        pg.survey(valve, progress=False, **options)(*args)


def test_wrong_options_and_calls():
    for options, said in (({"chunk_size": 0}, "chunk_size"), ({"has_aux": "no"}, "has_aux"), ({"seed": -1}, "seed")):
        with pytest.raises(pg.errors.ArgumentError, match=said):
            pg.survey(valve, **options)
    with pytest.raises(TypeError, match=r"partgrad.survey` got float"):
        pg.survey(1.0)
    of = pg.survey(lambda p, s: p * s, in_axes=(None, 0), progress=False)
    with pytest.raises(TypeError, match="`survey` of .* was called inside `jit`"):
        jax.jit(lambda s: of(2.0, s).states)(jnp.ones(3))
    with pytest.raises(pg.errors.NotDifferentiableError, match="nothing to differentiate"):
        of(2, jnp.ones(3))
    with pytest.raises(pg.errors.ArgumentError, match="returns nothing that has a derivative"):
        pg.survey(lambda p, s: jnp.int32(p), in_axes=(None, 0), progress=False)(2.0, jnp.ones(3))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        pg.survey(lambda p, s: p if s > 0 else -p, in_axes=(None, 0), progress=False)(2.0, jnp.ones(3))
    assert any("Fix: write jnp.where or jax.lax.cond" in note for note in caught.value.__notes__)


# --- in a test suite --------------------------------------------------------------------------------------------------


def test_leaves_that_have_to_be_live():
    states = {name: leaf[30:] for name, leaf in STATES.items()}
    given = {"in_axes": (None, 0), "intended": "['at']"}
    pg.testing.assert_gradients(valve, PARAMS, states, live=lambda p: (p["gain"], p["w"]), **given)
    with pytest.raises(AssertionError) as caught:
        pg.testing.assert_gradients(valve, PARAMS, states, live=lambda p: (p["gain"], p["at"]), **given)
    first, second, *_ = str(caught.value).splitlines()
    assert first.startswith("zero at test_survey.py:")
    assert first.endswith(" in ['at']")
    assert second == "`['at']` is named live, and its gradient is exactly zero at all of 70 states."
    with pytest.raises(pg.errors.CheckError, match=r"(?s)^nan at test_survey.py:\d+ in \['threshold'\]\n.*its survey"):
        pg.testing.assert_gradients(valve, PARAMS, STATES, live="gain", in_axes=(None, 0))


def test_live_at_one_point():
    state = {"s": 2.5, "v": np.ones(3, np.float32)}
    pg.testing.assert_gradients(valve, PARAMS, state, live="**.gain")
    with pytest.raises(AssertionError, match=r"`\['unused'\]` is named live, and its gradient is exactly zero\."):
        pg.testing.assert_gradients(valve, PARAMS, state, live="unused")
    with pytest.raises(AssertionError, match="is named live, and it is not differentiated: not selected"):
        pg.testing.assert_gradients(valve, PARAMS, state, wrt="gain", live="w")
    with pytest.raises(pg.errors.NoMatchError, match="Near names: `\\['gain'\\]`"):
        pg.testing.assert_gradients(valve, PARAMS, state, live="gian")
    with pytest.raises(pg.errors.SelectionError, match="whole leaves"):
        pg.testing.assert_gradients(valve, PARAMS, state, live="w[0]")
    with pytest.raises(pg.errors.ArgumentError, match="`exhaustive` is True beside `in_axes`"):
        pg.testing.assert_gradients(valve, PARAMS, STATES, in_axes=(None, 0), exhaustive=True)


def test_search_and_bounds_are_handed_on():
    f = lambda x: jnp.sqrt(jnp.abs(x - 1.0)) * x
    pg.testing.assert_gradients(f, 2.0)
    pg.testing.assert_gradients(f, 2.0, search=True, bounds=(1.5, 3.0))
    g = lambda x: jnp.where(x > 1.0, jnp.sqrt(jnp.maximum(x - 1.0, 0.0)), x)
    with pytest.raises(AssertionError, match="at a point nearby"):
        pg.testing.assert_gradients(g, 2.0, search=True)


def test_a_failure_hides_the_frames_of_the_library(tmp_path):
    (tmp_path / "test_model.py").write_text(
        "import jax.numpy as jnp, partgrad as pg\n"
        "model = lambda p: jnp.sqrt(p['x']) * p['y']\n"
        "def test_gradient():\n"
        "    pg.testing.assert_gradients(model, {'x': 0.0, 'y': 1.0})\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "-q", "."]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout.splitlines()
    said = [line for line in lines if line.startswith("E ")]
    assert said[0] == "E       partgrad.errors.CheckError: nan at test_model.py:2 in ['x']"
    assert not [line for line in lines if "testing.py" in line or "report.py" in line]
