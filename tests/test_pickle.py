"""Pickling: classes, marks and static data come back from another process."""

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
def test_a_class_from_another_process(tmp_path):
    Shipped = pg.dataclass(type("Shipped", (), {"__annotations__": {"a": Any, "p": Any}, "__module__": "__main__"}))
    (tmp_path / "model").write_bytes(cloudpickle.dumps(Shipped(1.0, NonDiff(2.0))))
    program = (
        "import pickle, sys, partgrad as pg, jax; m = pickle.load(open(sys.argv[1], 'rb')); "
        "assert jax.tree.leaves(jax.tree.map(lambda x: 2 * x, m)) == [2., 4.]; assert pg.is_nondiff(m, 'p')"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
