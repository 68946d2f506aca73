"""The audit of functions that a program calls: what is seen, what is kept, and that the program is as before."""

import functools
import json
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tables import in_turn, table
from partgrad._audit import Recorder, audited, from_project, text

pytestmark = pytest.mark.slow

MODEL = """\
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.numpy import sin

import partgrad as pg


def smooth(x):
    return jnp.sum(jnp.tanh(x) ** 2)


def log_of_positive(params, x, floor=0.0):
    return jnp.sum(jnp.where(x > 0, jnp.log(x), floor)) * params["scale"]


@jax.jit
def root(x):
    return jnp.sqrt(x)


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(*primals), 2 * primals[0] ** 2 * tangents[0]))
half = functools.partial(jnp.multiply, 0.5)
halved = functools.partial(log_of_positive, {"scale": 0.5})


class Body:
    def energy(self, v):
        return jnp.sqrt(jnp.sum(v**2))

    @staticmethod
    def potential(r):
        return 1.0 / r

    @classmethod
    def drag(cls, v):
        return jnp.abs(v)

    def _hidden(self, v):
        return v


class Net(eqx.Module):
    w: jax.Array

    @property
    def size(self):
        return jnp.sqrt(jnp.sum(self.w**2))

    def __call__(self, x):
        return jnp.sum(jnp.sqrt(self.w * x))

    @eqx.filter_jit
    def jitted(self, x):
        return jnp.sum(jnp.sqrt(self.w * x))


@pg.dataclass
class Kernel:
    length: jax.Array | float
    period: jax.Array | float = pg.field(nondiff=True)

    def __call__(self, r):
        return jnp.exp(-r / self.length) * jnp.sqrt(self.period)


class State(NamedTuple):
    position: jax.Array
    step: jax.Array


def move(state, dt):
    return State(state.position + dt * jnp.sqrt(state.position), state.step + 1)


def _private(x):
    return jnp.sqrt(x)


def branching(x, n):
    return x * n if n > 0 else x


def counting(x, n):
    for _ in range(n):
        x = jnp.sin(x)
    return x


def shaped(x, shape):
    return x * jnp.ones(shape).sum()


def masked(x, mask):
    return jnp.sqrt(x[mask]).sum()


def writing(x, index, n):
    return x * index.at[0].set(3).sum() * sum(range(n))


def looping(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sqrt(c[1])), (0, x))[1]


def later(x):
    yield x


calls = []


def appending(x):
    calls.append(1)
    return x * 2.0
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    file = tmp_path / "physics_model.py"
    file.write_text(MODEL)
    module = types.ModuleType("physics_model")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "physics_model", module)
    exec(compile(MODEL, str(file), "exec"), module.__dict__)
    return module


# No test fails because a machine is slow.
PATIENT = {"seconds": 600.0, "total": 3600.0}


def recorded(folder, run, *globs, **options):
    settings = from_project(folder, calls=globs or ("physics_model.*",), **{**PATIENT, **options})
    recorder = Recorder(settings)
    recorder.install()
    recorder.see_calls()
    try:
        run()
        jax.effects_barrier()
    finally:
        recorder.remove()
    return audited(recorder, settings), settings


def errors_of(result):
    wrong = [cause.finding for cause in result.causes if cause.finding["severity"] == "error"]
    return {(MODEL.splitlines()[finding["line"] - 1].strip(), finding["kind"]) for finding in wrong}


def listed(result):
    """What was not checked, beside what cannot be seen in the module."""
    return [left for left in result.left if left.function not in ("physics_model.later", "physics_model.half")]


def checked(result):
    return {name.removeprefix("physics_model.") for name, _, _ in result.functions}


ZERO = jnp.zeros(2)
PARAMS = {"scale": 2.0}
LOG, ROOT, CUBE, SUM, RATIO = "jnp.log(x), floor", "jnp.sqrt(x)", "jax.custom_jvp", "jnp.sqrt(jnp.sum(v**2))", "1.0 / r"
# What is in each that is called, and how.
WRONG = {
    "a function": (lambda m: m.log_of_positive(PARAMS, jnp.arange(2.0)), LOG),
    "under jit": (lambda m: m.root(ZERO), ROOT),
    "a custom rule": (lambda m: m.cube(2.0), CUBE),
    "a partial": (lambda m: m.halved(jnp.arange(2.0)), LOG),
    "a method": (lambda m: m.Body().energy(ZERO), SUM),
    "a static method": (lambda m: m.Body.potential(jnp.array(0.0)), RATIO),
    "a property": (lambda m: m.Net(ZERO).size, "self.w**2"),
    "a module": (lambda m: m.Net(ZERO)(ZERO), "self.w * x"),
    "a method under filter_jit": (lambda m: m.Net(ZERO).jitted(ZERO), "self.w * x"),
    "a named tuple": (lambda m: m.move(m.State(ZERO, jnp.array(0)), 0.1), "jnp.sqrt(state.position)"),
}
AROUND = {
    "by itself": lambda f: f(),
    "jit": lambda f: jax.block_until_ready(jax.jit(f)()),
    "scan": lambda f: jax.block_until_ready(jax.lax.scan(lambda c, _: (c, f()), 0.0, None, length=2)),
}


@table("how, around", in_turn(WRONG, list(AROUND)))
def test_what_is_wrong_in_a_function_that_is_only_called(tmp_path, model, how, around):
    call, written = WRONG[how]
    result, _ = recorded(tmp_path, lambda: AROUND[around](lambda: call(model)))
    assert any(written in line for line, _ in errors_of(result))
    assert not listed(result)


def test_names_that_others_took_before(tmp_path, model):
    """A from-import, a table, a partial and a compiled function refer to the very function."""
    taken, table = model.smooth, {"loss": model.smooth}
    bound, jitted = functools.partial(model.smooth), jax.jit(model.smooth)
    jitted(jnp.ones(3))
    ways = taken, table["loss"], bound, jitted
    for way in ways:
        result, _ = recorded(tmp_path, lambda way=way: jax.block_until_ready(way(jnp.ones(3))))
        assert checked(result) == {"smooth"}
    assert taken is model.smooth
    assert taken.__code__.co_name == "smooth"


def test_a_program_is_as_before(tmp_path, model):
    before = model.smooth.__code__
    x = jnp.linspace(-1.0, 1.0, 5)
    values = [float(model.smooth(x)), float(jax.jit(model.smooth)(x)), np.asarray(jax.jit(jax.grad(model.smooth))(x))]
    again = []

    def run():
        again.extend(
            [float(model.smooth(x)), float(jax.jit(model.smooth)(x)), np.asarray(jax.jit(jax.grad(model.smooth))(x))]
        )
        model.appending(x)
        with pytest.raises(TypeError):
            model.smooth("no number")
        with pytest.raises(TypeError, match="smooth"):
            model.smooth()

    recorded(tmp_path, run)
    for one, other in zip(values, again, strict=True):
        np.testing.assert_array_equal(one, other)
    # Once by the program, and once when the audit traces it, after the program.
    assert len(model.calls) <= 3
    assert model.smooth.__code__ is before


def test_a_function_runs_once_in_the_program(tmp_path, model):
    counts = []

    def run():
        model.appending(jnp.ones(2))
        model.appending(jnp.ones(2))
        counts.append(len(model.calls))

    recorded(tmp_path, run)
    assert counts == [2]


@pytest.mark.parametrize("around", AROUND)
def test_numbers_of_python_that_are_differentiated(tmp_path, model, around):
    run = lambda: AROUND[around](lambda: jax.grad(model.Body.potential)(2.0))
    result, _ = recorded(tmp_path, run)
    assert checked(result) == {"Body.potential"}
    assert not listed(result)


def test_private_functions_only_if_a_glob_names_them(tmp_path, model):
    run = lambda: (model._private(jnp.ones(2)), model.Body()._hidden(jnp.ones(2)))
    assert checked(recorded(tmp_path, run)[0]) == set()
    assert checked(recorded(tmp_path, run, "physics_model._*")[0]) == {"_private"}
    assert checked(recorded(tmp_path, run, "physics_model.Body._hidden")[0]) == {"Body._hidden"}


def test_what_cannot_be_seen_is_listed(tmp_path, model):
    result, _ = recorded(tmp_path, lambda: list(model.later(1.0)))
    assert {left.function: left.reason.split()[0] for left in result.left} == {
        "physics_model.later": "generators",
        "physics_model.half": "it",
    }


def test_a_glob_for_every_module_meets_unusual_ones(tmp_path, model):
    model.Odd = type("Odd", (), {"__module__": property(lambda self: "physics_model")})
    errors = errors_of(recorded(tmp_path, lambda: model.root(ZERO), "*.root")[0])
    assert errors == {("return jnp.sqrt(x)", "nan")}


def test_a_glob_that_names_nothing_is_said(tmp_path, model):
    result, settings = recorded(tmp_path, lambda: None, "physics_modle.*")
    assert result.unmatched == [("calls", "physics_modle.*")]
    assert "matches no function" in text(result, settings)


@pytest.mark.parametrize("wrt", ["params.**", "params.scale", "x"])
def test_wrt_says_by_which_arguments(tmp_path, model, wrt):
    result, _ = recorded(tmp_path, lambda: model.log_of_positive(PARAMS, jnp.arange(1.0, 3.0)), wrt=(wrt, "nothing.**"))
    assert checked(result) == {"log_of_positive"}
    assert result.unmatched == [("wrt", "nothing.**")]
    bad, _ = recorded(tmp_path, lambda: model.log_of_positive(PARAMS, jnp.arange(2.0)), wrt=(wrt,))
    assert bool(errors_of(bad)) is (wrt == "x")


def test_marks_hold(tmp_path, model):
    """The slope by the period is infinite at zero, and it is held."""
    result, _ = recorded(tmp_path, lambda: model.Kernel(1.0, 0.0)(jnp.ones(2)))
    assert not errors_of(result)
    assert checked(result) == {"Kernel.__call__"}


def test_defaults_are_no_variables(tmp_path, model):
    result, _ = recorded(tmp_path, lambda: model.log_of_positive(PARAMS, jnp.ones(2)))
    assert not [cause for cause in result.causes if any("floor" in leaf for leaf in cause.finding["leaves"])]


def test_python_numbers_that_decide_are_constants(tmp_path, model):
    result, _ = recorded(tmp_path, lambda: [model.branching(jnp.ones(2), n) for n in (-1.0, 1.0, 2.0)])
    assert checked(result) == {"branching"}
    assert not listed(result)


DECIDED = [
    lambda m, of: m.counting(jnp.ones(2), of(3)),
    lambda m, of: m.shaped(jnp.ones(2), of([3, 4])),
    lambda m, of: m.masked(jnp.ones(2), of([True, False])),
    lambda m, of: m.branching(jnp.ones(2), of(1)),
    lambda m, of: m.branching(jnp.ones(2), of(True)),
    lambda m, of: m.branching(jnp.ones(2), of(1.5)),
    lambda m, of: m.writing(jnp.ones(2), jnp.arange(3), of(3)),
]


@table("run, of", in_turn(DECIDED, [np.array, jnp.array, lambda x: np.array(x)[()]]), quick=0)
def test_arrays_that_python_needs_are_constants(tmp_path, model, run, of):
    result, _ = recorded(tmp_path, lambda: run(model, of))
    assert len(checked(result)) == 1
    assert not listed(result)


def test_constants_do_not_hide_what_is_wrong(tmp_path, model):
    run = lambda: [model.masked(jnp.arange(2.0), np.array(mask)) for mask in ([False, True], [True, False])]
    assert errors_of(recorded(tmp_path, run)[0]) == {("return jnp.sqrt(x[mask]).sum()", "nan")}


def test_a_loop_has_its_forward_derivative(tmp_path, model):
    assert errors_of(recorded(tmp_path, lambda: model.looping(jnp.array(1.0)))[0]) == set()
    assert errors_of(recorded(tmp_path, lambda: model.looping(jnp.array(0.0)))[0])


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"total": 0.0}])
def test_what_is_not_finite_is_an_error_whatever_the_time(tmp_path, model, options):
    result, settings = recorded(tmp_path, lambda: model.Net(ZERO)(ZERO), **options)
    assert result.errors == 1
    assert [left.what for left in listed(result)] == ["partly"]
    said = text(result, settings)
    assert "1 error" in said
    assert "partly checked" in said
    (cause,) = result.causes
    assert cause.finding["leaves"] == ["self.w", "x"]


def test_the_first_look_at_calls_has_an_end(tmp_path, model, monkeypatch):
    monkeypatch.setattr("partgrad._audit.audit._LOOKING", -1.0)
    result, _ = recorded(tmp_path, lambda: [model.root(ZERO), model.smooth(ZERO)], total=0.0)
    assert {left.reason for left in listed(result)} == {"the time for all functions was up"}
    assert not result.errors


def test_the_states_that_are_kept_differ(tmp_path, model):
    """The one bad state comes after many that are alike."""

    def run():
        for x in [*np.linspace(1.0, 1.1, 40), 0.0, *np.linspace(1.0, 1.1, 40)]:
            model.root(jnp.array(x))

    assert errors_of(recorded(tmp_path, run)[0]) == {("return jnp.sqrt(x)", "nan")}


def test_a_function_that_returns_something_else_later_is_not_called_right(tmp_path, model):
    model.factor = 1.0
    exec("def scaled(x):\n    return x * factor\n", model.__dict__)
    model.scaled.__module__ = "physics_model"

    def run():
        model.scaled(jnp.ones(2))
        model.factor = 2.0

    result, _ = recorded(tmp_path, run)
    assert [left.reason for left in result.left if "scaled" in left.function] == [
        "it returns something else when it runs again"
    ]


def test_a_function_that_asks_for_the_type_of_a_number_is_not_called_random(tmp_path, model):
    exec(
        "def row(x):\n    return jnp.full(3, x) if isinstance(x, float) else x[None] * jnp.ones((2, 3))\n",
        model.__dict__,
    )
    model.row.__module__ = "physics_model"
    result, _ = recorded(tmp_path, lambda: model.row(2.0))
    assert [left.reason for left in result.left if "row" in left.function] == [
        "it returns other shapes when it is traced: it may ask for the type of a number"
    ]


def test_too_many_structures_are_listed(tmp_path, model):
    result, _ = recorded(tmp_path, lambda: [model.smooth(jnp.ones(n)) for n in range(1, 12)], total=0.0)
    assert any("more than 8 structures" in left.reason for left in result.left)


def test_a_function_with_more_structures_than_are_kept_is_partly_checked(tmp_path, model):
    result, _ = recorded(tmp_path, lambda: [model.smooth(jnp.ones(n)) for n in range(1, 12)])
    assert [left.what for left in result.left if "more than 8 structures" in left.reason] == ["partly"]


def test_a_decorated_function_is_shown_by_its_def(tmp_path, model):
    """Its code begins with the decorator, which says nothing, and may be the same for all functions of a class."""
    result, _ = recorded(tmp_path, lambda: model.root(ZERO), total=0.0)
    assert errors_of(result) == {("def root(x):", "nan")}


def test_what_is_imported_from_a_library_in_c_is_not_listed(tmp_path, model):
    exec("from math import sqrt\nfrom warnings import warn\n", model.__dict__)
    result, _ = recorded(tmp_path, lambda: model.root(ZERO + 1.0))
    assert not [left for left in result.left if left.function.endswith(("sqrt", "warn"))]


def test_calls_and_transforms_together(tmp_path, model):
    """A program that is recorded where it is differentiated has no taps in it."""
    (tmp_path / "pyproject.toml").write_text('[tool.partgrad.audit]\npackages = ["physics_model"]\n')
    run = lambda: jax.jit(jax.grad(lambda x: jnp.sum(model.root(x))))(ZERO)
    result, _ = recorded(tmp_path, run)
    (cause,) = [cause for cause in result.causes if cause.finding["severity"] == "error"]
    assert cause.called
    assert not listed(result)


def test_in_a_test_suite(tmp_path):
    from test_audit import run

    (tmp_path / "physics.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = "."\n[tool.partgrad.audit]\ncalls = ["physics.*"]\nwrt = ["x"]\n'
    )
    (tmp_path / "test_physics.py").write_text(
        textwrap.dedent("""\
        import jax.numpy as jnp
        from physics import cube, log_of_positive, root


        def test_root():
            assert root(jnp.zeros(2)).shape == (2,)


        def test_others():
            cube(2.0)
            log_of_positive({"scale": 1.0}, jnp.arange(2.0))
        """)
    )
    done = run(tmp_path, "pytest", "-q", "--gradients-strict")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    assert "3 errors" in done.stdout
    assert "called by test_physics.py::test_root" in done.stdout


SCRIPT = '''\
"""What the script says of itself."""
from __future__ import annotations

import sys

import jax.numpy as jnp
from physics import root


class Sim:
    def force(self, x: Unknown):
        return jnp.sqrt(x)


def loss(p):
    return jnp.sum(jnp.where(p > 0, jnp.log(p), 0.0))


if __name__ == "__main__":
    print(__doc__, sys.argv[1:], sys.modules["__main__"].loss is loss)
    loss(jnp.arange(2.0))
    Sim().force(jnp.zeros(2))
    root(jnp.zeros(2))
    sys.exit(3)
'''


@pytest.mark.parametrize("how", [("script.py",), ("-m", "script")], ids=["a script", "a module"])
def test_in_a_script(tmp_path, how):
    from test_audit import lines_of, run

    (tmp_path / "physics.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    report = tmp_path / "found.json"
    globs = ("--calls", "script.*", "--calls", "physics.root")
    done = run(tmp_path, "partgrad", "audit", f"--json={report}", *globs, *how, "more")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "What the script says of itself. ['more'] True\n"
    root = next(n for n, line in enumerate(MODEL.splitlines(), 1) if line == "    return jnp.sqrt(x)")
    assert lines_of(json.loads(report.read_text())) == {
        ("script.py:12", "nan"),
        ("script.py:16", "nan"),
        (f"physics.py:{root}", "nan"),
    }


class Unusual:
    """JAX takes it where it is not differentiated; nothing that it is asked answers."""

    def __eq__(self, other):
        raise RuntimeError("it cannot be compared")

    __hash__ = None

    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "run",
    [
        lambda: jax.grad(lambda x: x**2, argnums=np.int64(0))(3.0),
        lambda: jax.grad(lambda x, y: x * y, argnums=[np.int64(0), 1])(3.0, 2.0),
        lambda: jax.grad(lambda x: (x**2, Unusual()), has_aux=np.bool_(True))(3.0)[0],
        lambda: jax.value_and_grad(lambda x, y: x**2, has_aux=0)(3.0, np.array(["a"], dtype=object)[:0])[1],
    ],
)
def test_unusual_arguments(tmp_path, model, run):
    """Whatever JAX takes, it takes while it is recorded."""

    def outcome():
        try:
            return jax.tree.leaves(run())
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error)

    expected, found = outcome(), []
    recorded(tmp_path, lambda: found.append(outcome()))
    assert found == [expected]


def test_a_function_takes_whatever_it_took(tmp_path, model):
    model.identity = eval("lambda *args, **kwargs: (args, kwargs)", model.__dict__)
    model.identity.__module__, model.identity.__qualname__ = "physics_model", "identity"
    odd = Unusual(), {1: 1.0, "a": 2.0}, float("nan"), np.array([None]), (x for x in ())
    given = []
    recorded(tmp_path, lambda: given.extend(model.identity(*odd, key=odd[0])[0]))
    assert all(one is other for one, other in zip(given, odd, strict=True))


# --- what the program does ------------------------------------------------------------------------------------------


INVISIBLE = """
import jax.tree_util


def in_order(d):
    return jnp.stack([jnp.sqrt(value) for value in d.values()])


def in_order_of_keywords(**d):
    return in_order(d)


def of_pair(pair):
    return in_order(pair[1])


def written(d, x):
    d["new"] = x * d["b"]
    d["b"] = x + d["b"]


def moved(d):
    d["z"] = d.pop("b")
    return d["z"] * 2.0


def appended(xs):
    xs.append(2.0 * xs.pop(0))


class Counter:
    def __init__(self, w, n):
        self.w, self.n = w, n

    def count(self, x):
        self.n, self.last = self.n + x, 3.0
        return self.w * x


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def double(self):
        self.w = 2.0 * self.w
        return self.w


for cls, of in ((Counter, lambda c: (c.w, c.n)), (Slotted, lambda c: (c.w,))):
    jax.tree_util.register_pytree_node(cls, lambda c, of=of: (of(c), None), lambda _, parts, cls=cls: cls(*parts))
raised = []


def failing(d):
    raised.append(d)
    raise ValueError(d["b"])
"""


@pytest.fixture
def invisible(model):
    exec(INVISIBLE, model.__dict__)
    for name in (
        "in_order",
        "in_order_of_keywords",
        "of_pair",
        "written",
        "moved",
        "appended",
        "failing",
        "Counter",
        "Slotted",
    ):
        getattr(model, name).__module__ = "physics_model"
    return model


def _all_of(m, x):
    """Everything that a program can see of what it calls."""
    d, xs, counter, slotted = {"b": x, "a": 4.0 * x}, [x, 3.0 * x], m.Counter(x, x), m.Slotted(x)
    inner = {"b": x, "a": x + 1.0}
    outer = {"inner": inner, "pair": (inner, x)}
    out = {
        "order": m.in_order(d),
        "keywords": m.in_order_of_keywords(b=x, a=4.0 * x),
        "pair": m.of_pair((x, d)),
        "keys": m.moved({"b": x, "a": x}),
    }
    m.written(d, x)
    m.written(outer["inner"], x)
    m.appended(xs)
    counter.count(x)
    slotted.double()
    failed = {"b": x, "a": x}
    try:
        m.failing(failed)
    except ValueError as error:
        out["raised"] = error.args[0]
    assert m.raised.pop() is failed
    assert failed["b"] is x
    assert outer["pair"][0] is inner
    assert list(d) == ["b", "a", "new"]
    return {**out, "d": d, "xs": xs, "outer": outer, "counter": [counter.n, counter.last], "slotted": slotted.w}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap, lambda f: lambda x: jax.lax.map(f, x), jax.jacfwd])
def test_what_a_function_writes_and_reads_is_as_before(tmp_path, invisible, around):
    x = jnp.array([1.0, 2.0])
    expected = around(lambda x: _all_of(invisible, x))(x)
    found = []
    result, _ = recorded(tmp_path, lambda: found.append(around(lambda x: _all_of(invisible, x))(x)))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(*found), strict=True):
        np.testing.assert_array_equal(one, other)
    assert checked(result) >= {"in_order", "in_order_of_keywords", "of_pair", "Counter.count", "Slotted.double"}
    # One only fails, and one returns nothing.
    assert {left.function for left in listed(result)} <= {"physics_model.failing", "physics_model.appended"}


def test_a_function_that_reads_the_order_of_keys_has_it_again(tmp_path, invisible):
    result, _ = recorded(tmp_path, lambda: invisible.in_order({"b": jnp.array(1.0), "a": jnp.array(0.0)}))
    assert errors_of(result)
    assert not listed(result)


def test_objects_of_flax_keep_what_a_method_writes(tmp_path, model):
    nnx = pytest.importorskip("flax.nnx")

    class Mod(nnx.Module):
        def __init__(self):
            self.w, self.n = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.n[...] = self.n[...] + 1.0
            return self.w[...] * x

    Mod.__module__ = Mod.__call__.__module__ = "physics_model"
    model.Mod, made = Mod, Mod()

    def run():
        step = nnx.jit(lambda m, x: m(x))
        step(made, jnp.ones(2))
        nnx.jit(nnx.grad(lambda m: m(jnp.ones(2)).sum()))(made)

    result, _ = recorded(tmp_path, run)
    assert float(made.n[...]) == 2.0
    assert not result.errors


RULES = """
@jax.custom_jvp
def by_jvp(x):
    return x**3


by_jvp.defjvp(lambda primals, tangents: (primals[0] ** 3, 2 * primals[0] ** 2 * tangents[0]))


@jax.custom_jvp
def by_jvps(x):
    return x**3


by_jvps.defjvps(lambda tangent, result, x: 2 * x**2 * tangent)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def by_held(x, n):
    return x**n


by_held.defjvp(lambda n, primals, tangents: (primals[0] ** n, primals[0] ** (n - 1) * tangents[0]))


@jax.custom_vjp
def by_vjp(x):
    return x**3


by_vjp.defvjp(lambda x: (x**3, x), lambda x, g: (2 * x**2 * g,))


@jax.custom_vjp
def by_itself(x):
    return x**3


by_itself.defvjp(lambda x: (by_itself(x), x), lambda x, g: (2 * x**2 * g,))
"""


@table(
    "around, called",
    in_turn(
        [lambda f: f(2.0), lambda f: jax.jit(f)(2.0), lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2))],
        [
            lambda m, x: m.by_jvp(x),
            lambda m, x: m.by_jvps(x),
            lambda m, x: m.by_held(x, 3),
            lambda m, x: m.by_vjp(x),
            lambda m, x: m.by_itself(x),
        ],
    ),
    quick=0,
)
def test_a_rule_that_runs_in_the_place_of_its_function(tmp_path, model, around, called):
    exec(RULES, model.__dict__)
    rules = [name for name in vars(model) if name.startswith("by_")]
    for name in rules:
        vars(model)[name].__wrapped__.__module__ = "physics_model"
    before = [model.by_vjp.fwd.__code__, model.by_jvp.jvp.__code__]
    run = lambda: jax.block_until_ready(around(jax.grad(lambda x: called(model, x) * 2.0)))
    result, _ = recorded(tmp_path, run)
    assert not listed(result)
    assert any(set(cause.functions) & {f"physics_model.{name}" for name in rules} for cause in result.causes)
    assert result.errors
    assert [model.by_vjp.fwd.__code__, model.by_jvp.jvp.__code__] == before


def test_an_object_that_is_called_is_seen_by_its_class(tmp_path, model):
    model.net = model.Net(ZERO)
    result, _ = recorded(tmp_path, lambda: model.net(ZERO), "physics_model.net")
    assert checked(result) == {"Net.__call__"}
    assert not result.unmatched


def test_a_function_that_raises_is_listed_as_such(tmp_path, invisible):
    def run():
        with pytest.raises(ValueError, match="1"):
            invisible.failing({"b": jnp.ones(())})

    assert [left.reason for left in listed(recorded(tmp_path, run)[0])] == ["it raised an error"]
