"""Pickling: classes, marks and static data come back from another process."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import typing
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import partgrad as pg
from partgrad import NonDiff


@pytest.mark.slow
def test_cloudpickle_takes_classes_to_another_process(tmp_path):
    @pg.dataclass
    class Local:
        a: typing.Any
        p: typing.Any = pg.field(nondiff=True)
        name: str = pg.field(static=True, default="x")

        def loss(self):
            return (self.a * self.p) ** 2

    models = [
        Local(2.0, 3.0),
        pg.freeze(Local(2.0, 3.0), "a"),
        Local(2.0, pg.Diff(3.0)),
        {"w": pg.NonDiff(Local(1.0, 2.0))},
    ]
    gradients = pg.grad(lambda m: m.loss(), wrt=lambda m: (m.a, m.p))
    path = tmp_path / "models.pickle"
    path.write_bytes(cloudpickle.dumps((models, gradients)))
    program = (
        "import pickle, sys, partgrad as pg\n"
        "models, gradients = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(models)\n"
        "print([tuple(map(float, gradients(m))) for m in models[:3]], pg.grad(type(models[0]).loss)(models[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        str(models),
        "[(36.0, 24.0), (36.0, 24.0), (36.0, 24.0)] " + str(pg.grad(Local.loss)(models[0])),
    ], done.stderr


@pytest.mark.slow
def test_a_registration_goes_along_with_a_class(tmp_path):
    @pg.dataclass
    class Local:
        a: typing.Any

    pg.register_nondiff(Local)
    loss = lambda t: t["m"].a * t["w"]
    (tmp_path / "model").write_bytes(cloudpickle.dumps((Local(2.0), loss)))
    program = (
        "import pickle, sys, partgrad as pg; m, f = pickle.load(open(sys.argv[1], 'rb')); "
        "assert pg.grad(f)({'m': m, 'w': 3.0})['m'].a is None; assert pg.is_nondiff({'m': m}, 'm.a')"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def changed(**fields):
    """A class of one name with these fields, where pickle finds it: what a later version of a program declares."""
    namespace = {"__annotations__": dict.fromkeys(fields, Any), "__module__": __name__, "__qualname__": "Changed"}
    globals()["Changed"] = cls = pg.dataclass(type("Changed", (), namespace | fields))
    return cls


def static():
    return pg.field(static=True)


VERSIONS = {
    "static": ({"a": pg.field(), "b": pg.field()}, {"a": pg.field(), "b": static()}),
    "no longer static": ({"a": pg.field(), "b": static()}, {"a": pg.field(), "b": pg.field()}),
    "another is static": ({"a": pg.field(), "b": static()}, {"a": static(), "b": pg.field()}),
    "another field": ({"a": pg.field(), "b": pg.field()}, {"a": pg.field(), "b": pg.field(), "c": pg.field()}),
    "a static field less": ({"a": pg.field(), "b": static()}, {"a": pg.field()}),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_model_that_does_not_fit_its_class_any_more_says_so(name):
    before, after = (
        {key: dataclasses.field(metadata=f.metadata) for key, f in each.items()} for each in VERSIONS[name]
    )
    models = [changed(**before)(1.0, 2.0), changed(**before)(pg.NonDiff(1.0), 2.0)]
    globals()["Changed"] = type(models[0])
    states = [pickle.dumps(models[0])]
    globals()["Changed"] = type(models[1])
    states.append(pickle.dumps(models[1]))
    changed(**after)
    for state in states:
        with pytest.raises(pg.errors.DataclassError, match="was pickled when its class had other fields"):
            pickle.loads(state)


def test_a_model_that_fits_its_class_is_loaded():
    state = pickle.dumps(changed(a=pg.field(), b=static())(pg.NonDiff(1.0), "x"))
    # Fields in another order, and one more with a default.
    changed(b=static(), a=pg.field(), c=pg.field(default=3.0))
    loaded = pickle.loads(state)
    assert repr(pg.freeze(pg.thaw(loaded, "a"), "c")) == "Changed(b='x', a=1.0, c=NonDiff(3.0))"
    assert copy.deepcopy(loaded) == copy.copy(loaded) == loaded


@pytest.mark.slow
def test_a_class_from_another_process(tmp_path):
    Shipped = pg.dataclass(type("Shipped", (), {"__annotations__": {"a": Any, "p": Any}, "__module__": "__main__"}))
    (tmp_path / "model").write_bytes(cloudpickle.dumps(Shipped(1.0, NonDiff(2.0))))
    program = (
        "import pickle, sys, partgrad as pg, jax; m = pickle.load(open(sys.argv[1], 'rb')); "
        "assert jax.tree.leaves(jax.tree.map(lambda x: 2 * x, m)) == [2., 4.]; assert pg.is_nondiff(m, 'p')"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_cloudpickle_takes_transformed_functions_to_another_process(tmp_path):
    def guarded(x):
        return jnp.where(x > 0, jnp.log(x), 0.0).sum()

    def read(x):
        return (x * x[jnp.array([7])]).sum()

    def drawn(x):
        key = jax.random.key(0)
        heads = lambda key, x: pg.draw(
            jax.random.bernoulli, key, x, gradient="score", log_prob=jax.scipy.stats.bernoulli.logpmf
        )
        return pg.expectation(lambda key, x: jnp.where(heads(key, x), 3.0, 1.0), samples=7)(key, jax.nn.sigmoid(x[0]))

    expected = pg.expectation(lambda key, x: x.sum() * jax.random.normal(key), samples=3)
    functions = {
        "double_where": jax.grad(pg.double_where(guarded)),
        "an option": pg.grad(guarded, double_where=True),
        "consistent_indexing": jax.grad(pg.consistent_indexing(read)),
        "both": pg.grad(pg.consistent_indexing(read), double_where=True),
        "a draw": jax.grad(drawn),
        "expectation": lambda x: jax.grad(expected, argnums=1)(jax.random.key(1), x),
        "a decorator": pg.grad(double_where=True)(guarded),
        "hvp": lambda x: pg.hvp(pg.double_where(guarded))(x, x),
        "check": lambda x: pg.check(pg.double_where(guarded), progress=False)(x).to_dict()["verdict"],
    }
    x = jnp.array([0.0, 0.5])
    # Those that have run, and so hold programs, are sent too.
    own = {name: str(function(x)) for name, function in functions.items()}
    path = tmp_path / "functions.pickle"
    path.write_bytes(cloudpickle.dumps(functions))
    program = (
        "import pickle, sys, jax.numpy as jnp; x = jnp.array([0.0, 0.5])\n"
        "print({name: str(f(x)) for name, f in pickle.load(open(sys.argv[1], 'rb')).items()})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(own), done.stderr


@jax.custom_vjp
def _wrong(x):
    return jnp.sin(x)


_wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct,))
_X = jnp.array([0.0, 0.5])
_CHECKED = {
    "a rule": lambda x: _wrong(x).sum(),
    "a local rule": lambda x: _local(x).sum(),
    "a NaN": lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(),
    "an index": lambda x: x[jnp.array([7])].sum(),
    "ties": lambda x: jnp.max(x * 0),
    "a branch": lambda x: float(x[0]) * x.sum(),
    "a draw": lambda x: jax.random.gamma(jax.random.key(0), x + 1).sum(),
    "none": lambda x: jnp.sin(x).sum(),
}


def _local(x):
    own = jax.custom_vjp(lambda x: jnp.sin(x))
    own.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct,))
    return own(x)


_COPIES = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]


@pytest.mark.slow
@pytest.mark.parametrize("name", _CHECKED)
def test_reports_are_data(name):
    report = pg.check(_CHECKED[name], progress=False, intended=("nothing",))(_X)
    for copied in (make(report) for make in _COPIES):
        assert str(copied) == str(report)
        assert copied._repr_html_() == report._repr_html_()
        assert copied.to_dict() == report.to_dict()
        assert copied.findings == report.findings
        assert copied.ok is report.ok
    for finding in report.findings:
        for copied in (make(finding) for make in _COPIES):
            assert (copied, copied.message, copied.where) == (finding, finding.message, finding.where)


@pytest.mark.slow
@pytest.mark.parametrize("make", _COPIES)
def test_summaries_and_selections_are_data(make):
    tree = {"a": _X, "d": NonDiff(2.0), "n": 3, "model": Plain(_X, 2.0)}
    for shown in (pg.summary(tree), pg.summary(tree, "a"), pg.show(tree)):
        assert str(make(shown)) == str(shown)
    for selector in (pg.intermediate("h"), pg.path("a") | "d", pg.of_type(dict) & pg.exclude("a")):
        assert repr(make(selector)) == repr(selector)
    with pytest.raises(pg.errors.CheckError) as caught:
        pg.testing.assert_gradients(_CHECKED["a NaN"], _X)
    assert str(make(caught.value)) == str(caught.value)


@pg.dataclass
class Plain:
    a: Any
    p: Any = pg.field(nondiff=True)
