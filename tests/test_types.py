"""What type checkers know of partgrad: they accept `typed_usage.py`, and every error that it expects is one."""

import json
import pathlib
import subprocess
import sys

import pytest

import partgrad as pg

USAGE = pathlib.Path(__file__).with_name("typed_usage.py")
SOURCE = pathlib.Path(pg.__file__).parents[1]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_mypy_accepts_correct_use_and_refuses_the_rest():
    found = run(sys.executable, "-m", "mypy", str(USAGE), cwd=SOURCE.parent)
    assert found.returncode == 0, found.stdout


@pytest.mark.long
def test_pyright_accepts_correct_use_and_refuses_the_rest(tmp_path):
    (tmp_path / USAGE.name).write_text(USAGE.read_text())
    options = {"extraPaths": [str(SOURCE)], "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    found = run(sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable)
    assert found.returncode == 0, found.stdout
