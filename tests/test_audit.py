"""The audit: every gradient that a test suite or a script takes is checked where it is taken."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
import textwrap
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import partgrad as pg
from partgrad._audit import Recorder, audited, data, from_project, joined, page, text

HELPERS = """\
import jax
import jax.numpy as jnp


def log_of_positive(x):
    return jnp.where(x > 0, jnp.log(x), 0.0)


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(*primals), 2 * primals[0] ** 2 * tangents[0]))


def length(x):
    return jnp.sqrt(jnp.sum(x**2))


def smooth(x):
    return jnp.sum(jnp.tanh(x) ** 2)
"""
LOG, CUBE, LENGTH = 6, 10, 18

SUITE = """\
import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from helpers import cube, length, log_of_positive, smooth


def loss(x):
    return jnp.sum(log_of_positive(x))


def test_eager():
    jax.grad(loss)(jnp.array([0.0, 1.0]))


def test_jit():
    jax.jit(jax.value_and_grad(lambda x: length(x) * 2.0))(jnp.zeros(3))


def test_vmap():
    jax.vmap(jax.grad(lambda x: cube(x)))(jnp.arange(1.0, 4.0))


def test_scan():
    step = lambda x, _: (x - 0.1 * jax.grad(lambda x: jnp.sum(cube(x)))(x), None)
    jax.jit(lambda x: jax.lax.scan(step, x, None, length=3))(jnp.ones(2))


class Net(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.sum(log_of_positive(self.w * x))


def test_equinox():
    eqx.filter_jit(eqx.filter_grad(lambda net, x: net(x)))(Net(jnp.zeros(2)), jnp.ones(2))


def test_flax():
    nnx.grad(lambda layer: length(layer(jnp.zeros((1, 2)))))(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))


def test_clean():
    jax.grad(smooth)(jnp.ones(3))
    jax.jit(jax.vmap(jax.grad(smooth)))(jnp.ones((2, 3)))
    jax.hessian(smooth)(jnp.ones(3))
"""

SCRIPT = """\
import sys

import jax
import jax.numpy as jnp
from helpers import length, smooth

print("arguments", sys.argv[1:])
print(jax.grad(smooth)(jnp.ones(3)).shape)
if "wrong" in sys.argv:
    jax.jit(jax.grad(length))(jnp.zeros(2))
if "exit" in sys.argv:
    sys.exit(3)
if "raise" in sys.argv:
    raise ValueError("as before")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "planted"\n[tool.pytest.ini_options]\npythonpath = "."\n'
    )
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def run(project, *arguments):
    command = [sys.executable, "-m", *arguments]
    if arguments[0] == "pytest" and not importlib.metadata.entry_points(group="pytest11", name="partgrad"):
        # It runs from a checkout that is not installed.
        command += ["-p", "_partgrad_pytest"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)


def lines_of(found, severity="error"):
    return {(f["where"], f["kind"]) for f in found["findings"] if f["severity"] == severity}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one process", "xdist"])
def test_a_suite(project, workers):
    report, html = project / "found.json", project / "found.html"
    arguments = ("-q", *workers, "--gradients-strict")
    done = run(project, "pytest", *arguments, f"--gradients-json={report}", f"--gradients-html={html}")
    assert "7 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    found = json.loads(report.read_text())
    wheres = lines_of(found)
    assert (f"helpers.py:{LOG}", "nan") in wheres
    assert (f"helpers.py:{LENGTH}", "nan") in wheres
    assert {kind for _, kind in wheres} == {"nan", "mismatch"}
    by = {test for f in found["findings"] for test in f["differentiated_by"]}
    assert by == {f"test_suite.py::test_{name}" for name in ("eager", "jit", "vmap", "scan", "equinox", "flax")}
    assert not found["not_checked"]
    assert f"helpers.py:{LENGTH}" in done.stdout
    assert "<mark>" in html.read_text()


@pytest.mark.slow
def test_a_suite_without_the_option_is_left_alone(project):
    done = run(project, "pytest", "-q", "-k", "clean")
    assert "gradients" not in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"), [((), 0), (("wrong",), 1), (("wrong", "exit"), 3), (("wrong", "raise"), 1)]
)
def test_a_script(project, arguments, status):
    report = project / "found.json"
    done = run(project, "partgrad", "audit", f"--json={report}", "script.py", *arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout == f"arguments {list(arguments)}\n(3,)\n"
    assert ("ValueError: as before" in done.stderr) == ("raise" in arguments)
    found = json.loads(report.read_text())
    assert lines_of(found) == ({(f"helpers.py:{LENGTH}", "nan")} if "wrong" in arguments else set())


@pytest.mark.slow
def test_a_module(project):
    done = run(project, "partgrad", "audit", "-m", "script", "wrong")
    assert done.returncode == 1
    assert f"helpers.py:{LENGTH}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py",), "no script 'nowhere.py'"),
        ((), "expected a script"),
        (("-m", "nowhere.at_all"), "no module 'nowhere.at_all'"),
        (("--json", "nowhere/found.json", "script.py"), "no folder"),
    ],
)
def test_wrong_usage(project, arguments, said):
    done = run(project, "partgrad", "audit", *arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


# --- in this process -------------------------------------------------------------------------------------------------


def recorded(tmp_path, run, **options):
    """What an audit finds in what `run` differentiates; functions of this file are the project's."""
    settings = from_project(tmp_path, everything=True, **options)
    recorder = Recorder(settings)
    recorder.install()
    try:
        run()
        jax.effects_barrier()
    finally:
        recorder.remove()
    return audited(recorder.places, settings), settings


def own(x):
    return jnp.sum(x**2)


def broken(x):
    return jnp.sum(jnp.sqrt(x))


TRANSFORMS = {
    "grad": lambda f, x: jax.grad(f)(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(f)(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x),
    "linearize": lambda f, x: jax.linearize(f, x),
    "pg.grad": lambda f, x: pg.grad(lambda m: f(m["w"]), wrt="w")({"w": x}),
    "eqx": lambda f, x: eqx.filter_grad(lambda m: f(m["w"]))({"w": x, "name": "n"}),
    "nnx": lambda f, x: nnx.grad(f)(x),
}
AROUND = {
    "eager": lambda g, x: g(x),
    "jit": lambda g, x: jax.jit(g)(x),
    "vmap": lambda g, x: jax.vmap(g)(jnp.stack([x, x])),
    "scan": lambda g, x: jax.lax.scan(lambda c, _: (c, g(c)), x, None, length=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("around", AROUND)
def test_every_transform_is_seen(tmp_path, transform, around):
    result, _ = recorded(
        tmp_path, lambda: AROUND[around](lambda x: jax.tree.leaves(TRANSFORMS[transform](broken, x)), jnp.zeros(2))
    )
    assert result.errors >= 1
    assert all(cause.finding["file"] == __file__ for cause in result.causes)
    assert not result.left


def test_values_and_what_is_printed_stay(tmp_path, capsys, recwarn):
    def loud(x):
        print("called")
        warnings.warn("once", UserWarning, stacklevel=1)
        return own(x)

    results = []
    result, _ = recorded(tmp_path, lambda: results.append(jax.grad(loud)(jnp.ones(2))))
    np.testing.assert_array_equal(results[0], 2.0)
    assert capsys.readouterr().out == "called\n"
    assert [str(warning.message) for warning in recwarn] == ["once"]
    assert [name for name, _, _ in result.functions] == [f"{__name__}.{loud.__qualname__}"]
    assert jax.grad.__module__.startswith("jax")


def test_a_function_is_checked_at_a_few_points(tmp_path):
    """The NaN is not at the first point."""

    def train():
        for x in (1.0, 2.0, 0.0, 3.0, 4.0):
            jax.grad(broken)(jnp.array([x]))

    result, _ = recorded(tmp_path, train)
    assert result.errors == 1
    assert len(result.functions) == 1


def test_functions_of_one_line_that_close_over_others(tmp_path):
    """The second of three is wrong; all have one line, and are differentiated at one."""

    def run():
        for f in (own, broken, jnp.sum):
            jax.grad(lambda x, f=f: f(x))(jnp.zeros(2))

    result, _ = recorded(tmp_path, run)
    assert result.errors == 1


def test_a_rule_that_closes_over_what_is_traced_raises_no_alarm(tmp_path):
    """It has a derivative where it runs, and none when it is replayed."""

    def scaled(scale):
        @jax.custom_jvp
        def f(x):
            return x * scale

        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * scale))
        return f

    step = jax.jit(lambda scale, x: jax.grad(lambda x: scaled(scale)(x))(x))
    result, _ = recorded(tmp_path, lambda: step(2.0, 1.0))
    assert not result.errors
    assert len(result.functions) + len(result.left) == 1


def test_what_cannot_be_checked_is_listed(tmp_path):
    result, settings = recorded(tmp_path, lambda: jax.grad(lambda x: x**2 if x > 0 else x)(3.0))
    (left,) = result.left
    assert "cannot be traced" in left.reason
    assert "not checked" in text(result, settings)


@pytest.mark.parametrize(("options", "which"), [({"seconds": 0.0}, "one function"), ({"total": 0.0}, "all functions")])
def test_time_is_bounded(tmp_path, options, which):
    result, _ = recorded(tmp_path, lambda: jax.grad(own)(jnp.ones(2)), **options)
    assert f"time for {which}" in result.left[0].reason


def test_a_search_does_not_take_the_time_of_the_checks(tmp_path):
    """Everything is checked first; what there is no time to search is said, and nothing that was found is lost."""

    def run():
        jax.grad(broken)(jnp.zeros(2))
        jax.grad(own)(jnp.ones(2))
        jax.jvp(own, (jnp.ones(2),), (jnp.ones(2),))

    result, settings = recorded(tmp_path, run, search=True, seconds=2.0)
    assert len(result.functions) == 2
    assert result.errors == 1
    # Once for each function, however it is differentiated.
    assert len(result.searched) + sum(left.what == "searched" for left in result.left) == 2
    assert "silence is no proof" in text(result, settings) or not result.searched


def test_a_function_that_was_running_is_intended_by_its_name(tmp_path, monkeypatch):
    file = tmp_path / "quantized_model.py"
    file.write_text(
        textwrap.dedent("""\
        import jax
        import jax.numpy as jnp
        def quantize(x):
            return x + jax.lax.stop_gradient(jnp.round(x) - x)
        def loss(x):
            return jnp.sum(quantize(x) ** 2)
        """)
    )
    (tmp_path / "pyproject.toml").write_text(
        '[tool.partgrad.audit]\nintended = ["quantized_model.quantize", "quantized_model.nothing", "jax.numpy.where"]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("quantized_model")
    monkeypatch.setitem(sys.modules, "quantized_model", module)
    result, _ = recorded(tmp_path, lambda: jax.grad(module.loss)(jnp.array([1.3, 1.7])))
    assert [(cause.finding["kind"], cause.finding["intended"]) for cause in result.causes] == [("mismatch", True)]
    assert result.unmatched == [("intended", "quantized_model.nothing"), ("intended", "jax.numpy.where")]


def test_intended(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        textwrap.dedent("""\
        import jax.numpy as jnp
        def first(x):
            return jnp.sum(jnp.sqrt(x))
        def second(x):
            return jnp.sum(jnp.sqrt(x))  # partgrad: intended
        def third(x):
            return jnp.sum(jnp.sqrt(x))
        """)
    )
    (tmp_path / "pyproject.toml").write_text(
        '[tool.partgrad.audit]\nintended = ["model.py:3", "other.py:1"]\nskip = ["*third", "fourth"]\n'
    )
    scope = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)

    def run():
        jax.grad(scope["first"])(jnp.zeros(2))
        jax.grad(scope["second"])(jnp.zeros(2))
        jax.grad(scope["third"])(jnp.zeros(2))

    result, settings = recorded(tmp_path, run)
    assert result.errors == 0
    assert [cause.finding["intended"] for cause in result.causes] == [True, True]
    assert result.unmatched == [("intended", "other.py:1"), ("skip", "fourth")]
    assert "'other.py:1'" in text(result, settings)


def test_settings_that_are_no_lists_are_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.partgrad.audit]\nintended = "model.py:3"\n')
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`intended`.*'model.py:3'.*intended = \["):
        from_project(tmp_path)


def test_what_is_skipped(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.partgrad.audit]\nskip = ["*.broken"]\n')
    result, settings = recorded(tmp_path, lambda: jax.grad(broken)(jnp.zeros(2)))
    assert not result.causes
    assert "no function of this project" in text(result, settings)


def test_results_of_workers_are_joined(tmp_path):
    result, settings = recorded(tmp_path, lambda: jax.grad(broken)(jnp.zeros(2)))
    assert len(joined([result, result]).causes) == 1
    assert json.loads(json.dumps(data(result, settings)))["findings"][0]["kind"] == "nan"
    assert "broken" in page(result, settings)


def test_workers_that_meet_one_cause_in_different_leaves(tmp_path):
    """Each result has one of the leaves; together they have both."""
    product = lambda x, y: jnp.sum(jnp.sqrt(x * y))
    results = [
        recorded(tmp_path, lambda argnums=argnums: jax.grad(product, argnums)(jnp.zeros(2), jnp.zeros(2)))[0]
        for argnums in (0, 1)
    ]
    (cause,) = joined(results).causes
    assert cause.finding["leaves"] == ["x", "y"]
    assert [one.causes[0].finding["leaves"] for one in results] == [["x"], ["y"]]


def test_precision_is_kept(tmp_path):
    """In float32 the difference would be lost."""
    with jax.enable_x64(True):
        run = lambda: jax.grad(lambda x: jnp.sum((1e8 + x) ** 2 - 1e16))(jnp.ones(2))
        result, _ = recorded(tmp_path, run)
    assert not [cause for cause in result.causes if cause.finding["severity"] != "info"]
    assert not result.left


def test_the_plugin_imports_neither_jax_nor_partgrad():
    code = "import sys, _partgrad_pytest; assert not {'jax', 'partgrad'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_in_another_folder_it_says_what_was_passed_over(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    settings = from_project(tmp_path / "elsewhere")
    recorder = Recorder(settings)
    recorder.install()
    try:
        jax.grad(own)(jnp.ones(2))
    finally:
        recorder.remove()
    said = text(audited(recorder.places, settings), settings)
    assert "own" in said
    assert f"not written below {tmp_path / 'elsewhere'}" in said
