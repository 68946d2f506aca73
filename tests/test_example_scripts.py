"""The examples that are notebooks as well: each runs on its real data, as a user runs it, and meets its numbers."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# A script, what makes its run shorter here, and how many numbers it compares.
SCRIPTS = {
    "radial_velocities": ((), 9),
    "frozen_digits": (("--seeds", "4"), 4),
    "adapters": (("--steps", "16"), 6),
    "hare_and_lynx": ((), 4),
    "saliency": (("--steps", "60"), 1),
    "cotangents": ((), 6),
    # Its tables say ok too.
    "transits": ((), None),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_cell_is_python(name):
    """As jupytext reads them: a cell begins with `# %%`, and markdown is comments or one string."""
    title, *cells = re.split("^# %%", (EXAMPLES / f"{name}.py").read_text(), flags=re.MULTILINE)
    assert title == ""
    assert len(cells) > 4
    for cell in cells:
        if cell.startswith(" [markdown]"):
            *prose, rest = ast.parse(cell.removeprefix(" [markdown]")).body or [None]
            assert prose == []
            assert rest is None or isinstance(rest.value, ast.Constant)
        else:
            ast.parse(cell)


# The first by default, the others with everything, on one lane each.
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_meets_its_numbers_and_draws_its_picture(name, tmp_path):
    shorter, numbers = SCRIPTS[name]
    # `-f` is what Jupyter adds.
    command = [
        sys.executable,
        "-W",
        "error",
        EXAMPLES / f"{name}.py",
        "--out",
        "picture.png",
        *shorter,
        "-f",
        "kernel.json",
    ]
    one_thread = {**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    run = subprocess.run(command, env=one_thread, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert [line for line in run.stderr.splitlines() if not line.startswith("check: ")] == []
    assert run.returncode == 0
    assert "MISSED" not in run.stdout
    assert numbers in (None, sum(line.endswith("  ok") for line in run.stdout.splitlines()))
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
