"""The audit: every gradient that a test suite or a script takes is checked where it is taken."""

import importlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import partgrad as pg
from helpers.tables import table
from partgrad._audit import Recorder, audit, audited, data, from_project, joined, main, page, text

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
def test_a_suite(project):
    """In two workers; a suite in one process is below."""
    report, html = project / "found.json", project / "found.html"
    arguments = ("-q", "-n2", "--gradients-strict", "--gradients-seconds=600", "--gradients-total=3600")
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
@pytest.mark.parametrize(
    ("command", "option", "status"),
    [
        ("pytest", "--gradients-strict", 0),
        ("pytest", "--gradients-strict=stopped", 1),
        ("partgrad", "--strict=stopped", 1),
    ],
)
def test_a_gradient_that_is_cut_fails_if_that_is_asked(tmp_path, command, option, status):
    (tmp_path / "test_cut.py").write_text(
        "import jax\n\n\ndef test_cut():\n    jax.grad(lambda x: x * jax.lax.stop_gradient(x))(3.0)\n\n\ntest_cut()\n"
    )
    given = (option, "test_cut.py") if command == "pytest" else ("audit", option, "test_cut.py")
    done = run(tmp_path, command, *given)
    assert done.returncode == status
    assert "1 warning (1 gradient stopped)" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_suite_without_the_option_is_left_alone(project):
    done = run(project, "pytest", "-q", "-k", "clean")
    assert "gradients" not in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("wrong", "exit"), 3), (("wrong", "raise"), 1)])
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py",), "no script 'nowhere.py'"),
        ((), "expected a script"),
        (("-m", "nowhere.at_all"), "no module 'nowhere.at_all'"),
        (("--json", "nowhere/found.json", "script.py"), "no folder"),
    ],
)
def test_wrong_usage(project, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# --- in this process -------------------------------------------------------------------------------------------------

# No test fails because a machine is slow.
PATIENT = {"seconds": 600.0, "total": 3600.0}


def recorded(tmp_path, run, show=lambda line: None, **options):
    """What an audit finds in what `run` differentiates; functions of this file are the project's."""
    settings = from_project(tmp_path, everything=True, **{**PATIENT, **options})
    recorder = Recorder(settings)
    recorder.install()
    try:
        run()
        jax.effects_barrier()
    finally:
        recorder.remove()
    return audited(recorder, settings, show), settings


def own(x):
    return jnp.sum(x**2)


def broken(x):
    return jnp.sum(jnp.sqrt(x))


@jax.custom_jvp
def ruled(x):
    return x**3


ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2 * primals[0] ** 2 * tangents[0]))


def wrong(x):
    """What is sooner blamed than `broken`: there is no remedy to try."""
    return jnp.sum(ruled(x))


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


@table("transform, around", TRANSFORMS, AROUND, most=1, quick=0, kind=lambda transform, around: transform)
def test_every_transform_is_seen(tmp_path, transform, around):
    result, _ = recorded(
        tmp_path, lambda: AROUND[around](lambda x: jax.tree.leaves(TRANSFORMS[transform](wrong, x)), jnp.ones(2))
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


@pytest.mark.slow
def test_a_function_is_checked_at_a_few_points(tmp_path):
    """The NaN is not at the first point."""

    def train():
        for x in (1.0, 2.0, 0.0, 3.0, 4.0):
            jax.grad(broken)(jnp.array([x]))

    result, _ = recorded(tmp_path, train)
    assert result.errors == 1
    assert len(result.functions) == 1


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("total", "count", "seconds"), [(None, 10, 300), (None, 400, 1200), (60.0, 400, 60), (0.0, 1, 0)]
)
def test_the_time_for_all_grows_with_what_was_recorded_unless_somebody_says(tmp_path, total, count, seconds):
    assert from_project(tmp_path, total=total).time_for(count) == seconds


@pytest.mark.slow
@pytest.mark.parametrize("is_up", [True, False], ids=["no time to search", "time to search"])
def test_a_search_does_not_take_the_time_of_the_checks(tmp_path, monkeypatch, is_up):
    """Everything is checked first; what there is no time to search is said, and nothing that was found is lost."""
    passed = [0.0]
    monkeypatch.setattr(audit, "time", types.SimpleNamespace(monotonic=lambda: passed[0]))

    def show(line):
        if is_up and "search" in line:
            passed[0] = 1e6

    def run():
        jax.grad(broken)(jnp.zeros(2))
        jax.grad(own)(jnp.ones(2))
        jax.jvp(own, (jnp.ones(2),), (jnp.ones(2),))

    result, settings = recorded(tmp_path, run, show, search=True, seconds=1e3, total=1e4)
    assert len(result.functions) == 2
    assert result.errors == 1
    # Once for each function, however it is differentiated.
    assert len(result.searched) == 2 * (not is_up)
    assert [left.what for left in result.left] == ["searched"] * 2 * is_up
    assert all("the time for all functions was up" in left.reason for left in result.left)
    assert ("silence is no proof" in text(result, settings)) is not is_up


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("written", "said", "corrected"),
    [
        ('[tool.partgrad.audit]\nintended = "model.py:3"', "`intended`.*'model.py:3'", 'intended = ["model.py:3"]'),
        ("[tool.partgrad.audit]\nskip = [1]", "`skip`.*list of strings", 'skip = ["legacy.*"]'),
        ("[tool.partgrad.audit]\npackages = true", "`packages`.*list of strings", 'packages = ["package"]'),
        ("[tool.partgrad.audit]\nintended = {a = 1}", "`intended`.*list of strings", 'intended = ["model.py:42"]'),
        ("[tool.partgrad.audit]\nintendet = []", "no key `intendet`", "intended"),
        ("[tool.partgrad.audit]\nskips = []", "no key `skips`", "skip"),
        ("[tool.partgrad.audit]\nzzz = []", "no key `zzz`", "take it out"),
        ("[tool.partgrad]\naudit = 3", "`tool.partgrad.audit`.*is 3", "[tool.partgrad.audit]"),
        ("[tool]\npartgrad = []", r"`tool.partgrad`.*is \[\]", "[tool.partgrad.audit]"),
        ("tool = 3", "`tool`.*is 3", "[tool.partgrad.audit]"),
        ("[tool.partgrad.audti]\nskip = []", "no key `audti`", "[tool.partgrad.audit]"),
        ("[tool.partgrad.audit", "cannot be read", "TOML"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(tmp_path, written, said, corrected):
    (tmp_path / "pyproject.toml").write_text(written + "\n")
    with pytest.raises(pg.errors.ArgumentError, match=f"(?s){said}.*Fix: ") as caught:
        from_project(tmp_path)
    fix = str(caught.value).split("Fix: ")[1]
    assert corrected in fix
    if fix.startswith(("write intended =", "write skip =", "write packages =")):
        line = fix.removeprefix("write ").removesuffix(".")
        (tmp_path / "pyproject.toml").write_text(f"[tool.partgrad.audit]\n{line}\n")
        from_project(tmp_path)


@pytest.mark.slow
def test_settings_of_the_wrong_kind_are_wrong_usage(project):
    (project / "pyproject.toml").write_text("[tool.partgrad.audit]\nintendet = []\n")
    for done in (run(project, "pytest", "--gradients"), run(project, "partgrad", "audit", "script.py")):
        said = done.stdout + done.stderr
        assert ("Fix: write intended" in said, "INTERNALERROR" in said, "Traceback" in said) == (True, False, False)
        assert done.returncode in (2, 4)


def test_what_is_skipped(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.partgrad.audit]\nskip = ["*.broken"]\n')
    result, settings = recorded(tmp_path, lambda: jax.grad(broken)(jnp.zeros(2)))
    assert not result.causes
    assert "no function of this project" in text(result, settings)


@pytest.mark.slow
def test_results_of_workers_are_joined(tmp_path):
    result, settings = recorded(tmp_path, lambda: jax.grad(broken)(jnp.zeros(2)))
    assert len(joined([result, result]).causes) == 1
    assert json.loads(json.dumps(data(result, settings)))["findings"][0]["kind"] == "nan"
    assert "broken" in page(result, settings)


@pytest.mark.slow
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


@pytest.mark.slow
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
    said = text(audited(recorder, settings), settings)
    assert "own" in said
    assert f"not written below {tmp_path / 'elsewhere'}" in said


# --- where gradients hide --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_transforms_that_were_imported_by_name_before(project):
    (project / "early.py").write_text("from jax import grad\nfrom jax import value_and_grad as both\n")
    (project / "conftest.py").write_text("import helpers, early\n")
    (project / "test_suite.py").write_text(
        "import jax.numpy as jnp\nimport early, helpers\n"
        "def test_one():\n    early.grad(helpers.length)(jnp.zeros(2))\n"
        "def test_other():\n    early.both(lambda x: jnp.sum(helpers.log_of_positive(x)))(jnp.zeros(2))\n"
    )
    report = project / "found.json"
    done = run(project, "pytest", "-q", f"--gradients-json={report}")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert lines_of(json.loads(report.read_text())) == {(f"helpers.py:{LENGTH}", "nan"), (f"helpers.py:{LOG}", "nan")}


@pytest.mark.slow
def test_transforms_that_a_module_has_imported(tmp_path, monkeypatch):
    module = types.ModuleType("early")
    module.__file__, module.derivative, original = str(tmp_path / "early.py"), jax.grad, jax.grad
    monkeypatch.setitem(sys.modules, "early", module)
    result, _ = recorded(tmp_path, lambda: module.derivative(wrong)(jnp.ones(2)))
    assert result.errors == 1
    assert module.derivative is jax.grad is original


@pytest.mark.slow
def test_threads_at_once(tmp_path):
    count = 6
    functions, barrier = [_scaled(factor) for factor in range(1, count + 1)], threading.Barrier(count)

    def differentiate(f):
        barrier.wait()
        jax.grad(f)(jnp.ones(2))

    def run():
        threads = [threading.Thread(target=differentiate, args=(f,)) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    out = sys.stdout
    result, _ = recorded(tmp_path, run)
    assert sys.stdout is out
    assert sorted(name for name, _, _ in result.functions) == [f"{__name__}.scaled_{n}" for n in range(1, count + 1)]
    assert result.left == []


def _scaled(factor):
    def scaled(x):
        return jnp.sum(factor * x**2)

    scaled.__qualname__ = f"scaled_{factor}"
    return scaled


HIDDEN = """\
import atexit, os, sys
import jax, jax.numpy as jnp

def length(x):
    return jnp.sqrt(jnp.sum(x**2))

def take():
    jax.grad(length)(jnp.zeros(2))

"""
HIDES = {
    "at exit, beside others and an error there": "atexit.register(take)\natexit.register(lambda: print('first'))\n"
    "atexit.register(lambda: 1 / 0)\n",
    "at exit, by a decorator, after an error": "@atexit.register\ndef last():\n    take()\nraise SystemExit(3)\n",
    "in a thread, in another folder": "import threading\nos.chdir('/')\n"
    "t = threading.Thread(target=take)\nt.start()\nt.join()\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HIDES)
def test_where_a_script_hides_gradients(tmp_path, how):
    (tmp_path / "script.py").write_text(HIDDEN + HIDES[how])
    report = tmp_path / "found.json"
    done = run(tmp_path, "partgrad", "audit", f"--json={report}", "script.py")
    assert lines_of(json.loads(report.read_text())) == {("script.py:5", "nan")}, done.stderr
    assert done.returncode == (3 if "raise" in HIDES[how] else 1)
    assert done.stdout == "first\n" * ("first" in HIDES[how])
    assert ("ZeroDivisionError" in done.stderr) is ("1 / 0" in HIDES[how])


@pytest.mark.slow
def test_a_handler_that_is_taken_back_does_not_run(tmp_path):
    (tmp_path / "script.py").write_text(HIDDEN + "atexit.register(take)\natexit.unregister(take)\n")
    assert "no function" in run(tmp_path, "partgrad", "audit", "script.py").stderr


CHILDREN = """\
import multiprocessing, subprocess, sys

if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", "pass"])  # child
    subprocess.run(f"{sys.executable} -c pass", shell=True)  # child
    p = multiprocessing.get_context("spawn").Process(target=print)
    p.start()  # child
    p.join()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # child
        pool.map(abs, [1])
"""


@pytest.mark.slow
def test_other_processes_are_listed(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    report = tmp_path / "found.json"
    done = run(tmp_path, "partgrad", "audit", f"--json={report}", "script.py")
    lefts = json.loads(report.read_text())["not_checked"]
    lines = [n for n, line in enumerate(CHILDREN.splitlines(), 1) if line.endswith("# child")]
    assert sorted(left["where"] for left in lefts) == [f"script.py:{n}" for n in lines], done.stderr
    assert {left["reason"] for left in lefts} == {"the gradients that another process takes are not recorded"}
    assert lefts[0]["reason"] in done.stderr


def test_other_commands_are_not_listed(tmp_path):
    result, _ = recorded(tmp_path, lambda: subprocess.run(["true"], check=True))
    assert result.left == []


def test_a_transform_can_be_pickled_while_it_is_recorded(tmp_path):
    def run():
        for name in TRANSFORMS:
            transform = getattr(jax, name, None)
            if transform is not None:
                assert pickle.loads(pickle.dumps(transform)) is transform
        sent = cloudpickle.loads(cloudpickle.dumps(jax.grad(own)))
        assert sent(jnp.ones(2)).tolist() == [2.0, 2.0]

    recorded(tmp_path, run)


@pytest.mark.slow
def test_without_the_folder_in_the_path(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    (library / "helpers.py").write_text(HELPERS)
    (tmp_path / "script.py").write_text("import helpers, sys\nprint(sys.path)\n")
    path = os.pathsep.join([str(library), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = [
        subprocess.run(
            [sys.executable, "-P", *command, "script.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in ([], ["-m", "partgrad", "audit"])
    ]
    assert said[0] == said[1]
