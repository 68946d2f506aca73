"""What type checkers know of partgrad: they accept `typed_usage.py`, and every error that it expects is one.

`pyright` reads the same file in `.ci/run`.
"""

import pathlib
import subprocess
import sys

import pytest

import partgrad as pg

USAGE = pathlib.Path(__file__).with_name("typed_usage.py")
SOURCE = pathlib.Path(pg.__file__).parents[1]


@pytest.mark.slow
def test_mypy_accepts_correct_use_and_refuses_the_rest():
    command = [sys.executable, "-m", "mypy", str(USAGE)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCE.parent)
    assert found.returncode == 0, found.stdout
