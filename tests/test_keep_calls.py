"""`nonfinite=` in every transform, and `KeepCalls`: the arguments of the last calls on disk."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P

import partgrad as pg
from helpers.tables import in_turn, table

GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([0.0, 2.0])
MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))


def roots(x):
    return jnp.sqrt(x)


def total(m, x):
    """Of a function of this module, which another process finds by its name."""
    return jnp.sum(jnp.sqrt(m["w"] * x)) * m["b"]


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    if found := pg.last_nonfinite():
        found.clear()


def summed(x):
    return jnp.sum(roots(x))


TRANSFORMS = {
    "jacfwd": lambda x, **own: pg.jacfwd(roots, **own)(x),
    "jacrev": lambda x, **own: pg.jacrev(roots, **own)(x),
    "jacobian in pieces": lambda x, **own: pg.jacobian(roots, chunk_size=1, **own)(x),
    "hessian": lambda x, **own: pg.hessian(summed, **own)(x),
    "hvp": lambda x, **own: pg.hvp(summed, **own)(x, jnp.ones(2)),
    "jvp": lambda x, **own: pg.jvp(roots, (x,), (jnp.ones(2),), **own),
    "vjp": lambda x, **own: pg.vjp(roots, x, **own)[1](jnp.ones(2)),
    "linearize": lambda x, **own: pg.linearize(roots, x, **own)[1](jnp.ones(2)),
    "vjp that leaves jit": lambda x, **own: jax.jit(lambda x: pg.vjp(roots, x, **own))(x)[1](jnp.ones(2)),
    "linearize that leaves jit": lambda x, **own: jax.jit(lambda x: pg.linearize(roots, x, **own))(x)[1](jnp.ones(2)),
}


def last():
    jax.effects_barrier()
    return pg.last_nonfinite()


@table("transform, is_jitted", in_turn(TRANSFORMS, [False, True]), quick=0)
def test_every_transform_reports(transform, is_jitted, tmp_path):
    call = TRANSFORMS[transform]
    expected = jax.tree.leaves(call(GOOD))
    for nonfinite in ("report", pg.KeepCalls(tmp_path, last=3)):
        run = (jax.jit if is_jitted else lambda f: f)(lambda x, nonfinite=nonfinite: call(x, nonfinite=nonfinite))
        for one, other in zip(jax.tree.leaves(run(GOOD)), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        read = (lambda: last()) if nonfinite == "report" else (lambda: pg.last_nonfinite(tmp_path))
        assert read() is None
        run(BAD)
        jax.effects_barrier()
        found = read()
        np.testing.assert_array_equal(found.args[0], BAD)
    stored = pg.last_nonfinite(tmp_path)
    np.testing.assert_array_equal(stored.args[0], BAD)
    np.testing.assert_array_equal(stored.before[-1][0][0], GOOD)
    assert not stored.report.ok
    assert "sqrt" in {finding.operation for finding in stored.report.findings}


def test_the_report_has_the_name_of_the_function():
    pg.grad(summed, nonfinite="report")(BAD)
    assert str(last().report).startswith("summed: 1 error")


def tree(w):
    key = jax.random.key(3)
    return {"w": w, "b": pg.NonDiff(2.0), "n": 3, "half": w.astype(jnp.bfloat16), "key": key, "name": "x", "none": None}


CONTEXTS = {
    "eager": lambda g: g,
    "jit": jax.jit,
    "scan": lambda g: lambda w: jax.lax.scan(lambda c, w: (c, g(w)), 0.0, w[None]),
    "vmap": lambda g: lambda w: jax.vmap(g)(w[None]),
    "shard_map": lambda g: jax.jit(lambda w: jax.shard_map(g, mesh=MESH, in_specs=P("i"), out_specs=P("i"))(w)),
}


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_last_calls_are_in_the_folder(context, tmp_path, capfd):
    folder = tmp_path / "calls"
    gradient = pg.grad(total, wrt=lambda m: m["w"], nonfinite=pg.KeepCalls(folder, last=3))
    step = CONTEXTS[context](lambda w: gradient(tree(w), 1.0))
    for number in (1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 6.0):
        step(jnp.array([number, 1.0]))
        jax.effects_barrier()
    assert len(list(folder.glob("call-*.npz"))) == 3
    found = pg.last_nonfinite(folder)
    model, x = found.args
    assert x == 1.0
    np.testing.assert_array_equal(model["w"], [0.0, 1.0])
    assert [args[0]["w"][0] for args, _ in found.before] == [3.0, 4.0]
    assert str(jax.tree.structure(model)) == str(jax.tree.structure(tree(BAD)))
    assert (model["half"].dtype, model["n"], model["name"]) == (jnp.bfloat16, 3, "x")
    assert (jax.random.key_data(model["key"]) == jax.random.key_data(jax.random.key(3))).all()
    (finding,) = (finding for finding in found.report.findings if finding.severity == "error")
    assert (finding.operation, finding.leaves) == ("sqrt", ("['w']",))
    assert capfd.readouterr().err.count("is not finite") == 1
    found.clear()
    assert pg.last_nonfinite(folder) is None
    step(jnp.array([7.0, 1.0]))
    jax.effects_barrier()
    assert len(list(folder.glob("call-*.npz"))) == 1


def named(x, y):
    return jnp.sum(checkpoint_name(jnp.sqrt(x), "h") * y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"argnums": (0, 1)},
        {"wrt": {"x": None, "h": pg.intermediate("h", reduce=jnp.sum)}, "double_where": True},
        {"wrt": lambda x: x[jnp.array([0, 1, 0])]},
        {"wrt": lambda x: x[0]},
        {"dtype": jnp.float32},
    ],
)
def test_what_was_differentiated_comes_back(options, tmp_path):
    pg.grad(named, nonfinite=pg.KeepCalls(tmp_path), **options)(jnp.zeros(2), jnp.ones(2))
    found = pg.last_nonfinite(tmp_path)
    np.testing.assert_array_equal(found.args, (jnp.zeros(2), jnp.ones(2)))
    assert not found.report.ok


@pytest.mark.slow
def test_arguments_by_name_and_values_inside_alone(tmp_path):
    pg.grad(named, argnames="x", nonfinite=pg.KeepCalls(tmp_path / "a"))(x=jnp.zeros(2), y=jnp.ones(2))
    found = pg.last_nonfinite(tmp_path / "a")
    assert found.args == ()
    assert list(found.kwargs) == ["x", "y"]
    assert not found.report.ok
    norm = pg.intermediate("h", reduce=lambda h: jnp.sum(h) / 0)
    pg.grad(named, wrt=norm, nonfinite=pg.KeepCalls(tmp_path / "b"))(jnp.ones(2), jnp.ones(2))
    found = pg.last_nonfinite(tmp_path / "b")
    np.testing.assert_array_equal(found.args[0], jnp.ones(2))
    # It is the reduction that is not finite, not the derivative.
    assert found.report.ok


SCRIPT = """
import os, sys, jax, jax.numpy as jnp, partgrad as pg
from test_keep_calls import total
step = jax.jit(pg.grad(total, wrt=lambda m: m["w"], nonfinite=pg.KeepCalls(sys.argv[1], last=5)))
number = 1
while True:
    number += 1
    w = jnp.array([0.0 if number == 40 and sys.argv[2] == "bad" else number, 1.0])
    jax.block_until_ready(step({"w": w, "b": 2.0}, jnp.ones(2)))
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bad", "good"])
def test_a_job_that_is_killed_loses_nothing(kind, tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), kind]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.DEVNULL
    ) as job:
        assert any(int(line) >= 60 for line in job.stdout)
        os.kill(job.pid, signal.SIGKILL)
    assert 1 <= len(list(tmp_path.glob("call-*.npz"))) <= 6
    found = pg.last_nonfinite(tmp_path)
    assert (found is None) == (kind == "good")
    if found is not None:
        assert [args[0]["w"][0] for args, _ in found.before] == [36, 37, 38, 39]
        # The function is found by its name, and the line in it.
        assert found.report.findings[0].operation == "sqrt"
    # Another job goes on in the same folder, and does not overwrite what was found.
    pg.grad(total, nonfinite=pg.KeepCalls(tmp_path, last=2))({"w": GOOD, "b": 2.0}, 1.0)
    assert len(list(tmp_path.glob("call-*.npz"))) <= (6 if found else 2)
    assert (pg.last_nonfinite(tmp_path) is None) == (kind == "good")


PROCESSES = """
import sys
import jax, jax.numpy as jnp, numpy as np, partgrad as pg
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
# Later, as it makes arrays.
from test_keep_calls import total

mesh = jax.make_mesh((2,), ("devices",))

def put(x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

step = jax.jit(pg.grad(total, wrt=lambda m: m["w"], nonfinite=pg.KeepCalls(sys.argv[1], last=3)))
for number in range(5):
    w = put(np.arange(4, dtype=np.float32) + 4 - number, PartitionSpec("devices"))
    jax.block_until_ready(step({"w": w, "b": 2.0}, put(np.ones(4, np.float32), PartitionSpec())))
    jax.effects_barrier()
"""


@pytest.mark.slow
def test_two_processes_leave_the_calls_of_the_whole_program(tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path]), "XLA_FLAGS": ""}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", PROCESSES, str(tmp_path), port]
    jobs = [subprocess.Popen([*command, str(process)], env=environment) for process in (0, 1)]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    found = pg.last_nonfinite(tmp_path)
    np.testing.assert_array_equal(found.args[0]["w"], [0, 1, 2, 3])
    assert [args[0]["w"][0] for args, _ in found.before] == [2, 1]
    assert found.report.findings[0].operation == "sqrt"


@pytest.mark.slow
def test_models_and_functions_that_are_no_part_of_a_module(tmp_path):
    mlp = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    f = lambda m, x: jnp.sum(jnp.sqrt(m(x) * 0))
    pg.grad(f, nonfinite=pg.KeepCalls(tmp_path / "a"))(mlp, GOOD)
    found = pg.last_nonfinite(tmp_path / "a", f, like=(mlp, GOOD))
    for one, other in zip(jax.tree.leaves(found.args[0]), jax.tree.leaves(mlp), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not found.report.ok

    class Local(eqx.Module):
        w: jax.Array

    g = lambda m: jnp.sum(jnp.sqrt(m.w))
    pg.grad(g, nonfinite=pg.KeepCalls(tmp_path / "b"))(Local(BAD))
    said = r"(?s)`<lambda>`.*class that `pickle`.*1 arrays.*like=\(model, x\)"
    with pytest.raises(pg.errors.ArgumentError, match=said):
        pg.last_nonfinite(tmp_path / "b")
    found = pg.last_nonfinite(tmp_path / "b", like=(Local(GOOD),))
    np.testing.assert_array_equal(found.args[0].w, BAD)
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`<lambda>` is not found.*last_nonfinite\(path, f\)"):
        print(found.report)
    assert not pg.last_nonfinite(tmp_path / "b", g, like=(Local(GOOD),)).report.ok


def test_a_folder_without_calls(tmp_path):
    assert pg.last_nonfinite(tmp_path) is None
    assert pg.last_nonfinite(tmp_path / "nothing") is None


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "5"])
def test_how_many_is_a_positive_integer(count):
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`last`.*positive integer.*last=100"):
        pg.KeepCalls("calls", last=count)


def test_a_report_moves_nothing_while_all_is_well():
    step = jax.jit(pg.grad(lambda x: jnp.sum(jnp.tanh(x)), nonfinite="report"))
    step(GOOD)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(GOOD))


def test_a_sum_that_is_not_finite_of_numbers_that_are():
    large = jnp.full(4, 3e38)
    for run in (lambda f: f, jax.jit):
        assert jnp.isfinite(run(pg.grad(lambda x: jnp.sum(x * large), nonfinite="report"))(jnp.ones(4))).all()
        assert last() is None
