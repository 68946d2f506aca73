"""Models that are spread over devices: `tests/scripts/sharded.py`, in processes of their own, where JAX has eight."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import partgrad as pg
import sharded
from helpers import tables

# With one kind of mesh every case runs, with the other a few; `python tests/scripts/sharded.py automatic` has the rest.
CASES = {"explicit": sharded.NAMES, "automatic": ["grad", "elements", "edits_move_nothing"]}


def outcomes(axes, names):
    run = subprocess.run(
        [sys.executable, "-W", "error", sharded.__file__, axes, *names], capture_output=True, text=True, timeout=600
    )
    found = dict(map(json.loads, run.stdout.splitlines()))
    assert list(found) == names, run.stderr
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.slow
@pytest.mark.parametrize("axes", sharded.AXES)
def test_devices_tell_each_other_what_they_do_by_hand(axes):
    names = sharded.NAMES if tables.whole else CASES[axes]
    assert outcomes(axes, names) == {}


@pytest.mark.slow
def test_a_step_of_a_selected_part_needs_what_it_does_by_hand():
    script = Path(__file__).parent.parent / "benchmarks" / "large_model.py"
    command = [sys.executable, "-W", "error", str(script), "--small", "partgrad", "by hand"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    ours, theirs = (line.partition("compiled")[0].split()[-7:] for line in run.stdout.splitlines()[2:])
    assert ours == theirs
    parameters, gradient, state, _ = map(float, ours[:4])
    assert gradient < parameters / 40
    assert state < parameters / 20


def test_a_traced_model_may_be_larger_than_memory():
    huge = jax.eval_shape(lambda: {"w": jnp.zeros((10**6, 10**6)), "b": jnp.zeros(3)})

    def edited(m):
        m = pg.freeze(m, "w")
        gradient = pg.grad(lambda m: m["b"].sum() + m["w"].value[0, 0])(m)
        return pg.thaw(m, "w"), pg.apply_updates(pg.thaw(m, "w"), pg.partition(gradient)[0] | {"w": None})

    assert jax.tree.map(jnp.shape, jax.eval_shape(edited, huge)) == ({"b": (3,), "w": (10**6,) * 2},) * 2
