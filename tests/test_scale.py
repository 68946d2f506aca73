"""Models that are spread over devices: `tests/sharded.py`, in processes of their own, where JAX has eight."""

import json
import subprocess
import sys

import pytest

import sharded

# The quick tier has one process with a few of the cases.
FEW = ["grad", "elements", "edits_move_nothing"]


def outcomes(axes, names):
    run = subprocess.run(
        [sys.executable, "-W", "error", sharded.__file__, axes, *names], capture_output=True, text=True, timeout=600
    )
    found = dict(map(json.loads, run.stdout.splitlines()))
    assert list(found) == names, run.stderr
    return {name: wrong for name, wrong in found.items() if wrong}


def test_a_spread_model_stays_where_it_is():
    assert outcomes("explicit", FEW) == {}


@pytest.mark.long
@pytest.mark.parametrize("axes", sharded.AXES)
def test_devices_tell_each_other_what_they_do_by_hand(axes):
    assert outcomes(axes, sharded.NAMES) == {}
