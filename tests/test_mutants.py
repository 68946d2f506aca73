"""What `tests/scripts/mutants.py` does to one small module, and to a test of it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("mutmut")

import mutants

MODULE = '''
"""A module."""

from typing import Literal, TypeVar

T = TypeVar("T")
How = Literal["up", "down"]


def larger(a: int, b: int) -> int:
    """The larger of two."""
    if not isinstance(a, int):
        error = TypeError("give an integer", a + b)
        raise error from ValueError(a - b)
    pairs = zip([a], [b], strict=True)
    return [x if x > y else y for x, y in pairs][0]
'''


def test_mutants_change_what_runs_and_not_what_is_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    found = mutants.mutants_of(path)
    assert {mutant.function for mutant in found} == {"larger"}
    changed = [mutant.entry["name"].split(": ", 1)[1] for mutant in found]
    assert (
        "return [x if x > y else y for x, y in pairs][0] -> return [x if x >= y else y for x, y in pairs][0]" in changed
    )
    assert not any(
        ("Error(" in line and "-> error = None" not in line) or ("strict=True" not in line and "zip" in line)
        for line in changed
    )
    assert len({mutant.entry["code"] for mutant in found}) > 10


TRIAL = """
import mutants

path = "src/partgrad/_marks/unwrap.py"
code = (mutants.ROOT / path).read_text()
tests = [("tests/test_nondiff.py", ["tests/test_nondiff.py::test_unwrap_takes_wrappers_out_at_any_depth"])]
for one in (code.replace("unwrap(node.value)", "unwrap(None)"), code.replace('TypeVar("T")', 'TypeVar("T", bound=None)')):
    assert one != code
    print(mutants.in_child(120, mutants.attempt, path, one, tests))
"""


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_of_its_line_and_one_that_means_the_same_is_not(tmp_path):
    command = [sys.executable, "-c", TRIAL]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(mutants.ROOT / "src"), str(mutants.ROOT / "tests" / "scripts")])
    }
    done = subprocess.run(command, cwd=mutants.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tests/test_nondiff.py::test_unwrap_takes_wrappers_out_at_any_depth", "None"]


def test_the_interval_of_a_share_is_that_of_wilson():
    assert mutants.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    low, high = mutants.wilson(45, 50)
    assert low == pytest.approx(0.7864, abs=1e-4)
    assert high == pytest.approx(0.9565, abs=1e-4)
