"""Pickling: classes, marks and static data come back from another process."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import typing
from typing import Any

import cloudpickle
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
