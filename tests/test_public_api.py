"""What importing the package gives and costs."""

import pathlib
import re
import subprocess
import sys

import pytest

import partgrad as pg


def test_public_names():
    public = set(pg.__all__)
    assert public == {
        *("Diff", "NonDiff", "Static", "unwrap", "dataclass", "field"),
        *("Selection", "each", "path", "of_type", "matching", "exclude"),
        *("partition", "combine", "apply_updates", "ravel"),
        *("items", "label", "select", "replace", "mask", "freeze", "thaw", "is_nondiff", "stop_gradient"),
        *("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian", "hvp", "jvp", "vjp", "linearize"),
        *("intermediate", "capture_intermediates", "intervene"),
        *("double_where", "consistent_indexing", "draw", "expectation", "safe", "show", "summary", "errors"),
        *("check", "GradientReport", "Finding", "testing"),
    }
    for name in public - {"errors"}:
        assert getattr(pg, name).__doc__
    assert public <= set(dir(pg))
    with pytest.raises(AttributeError, match="module 'partgrad' has no attribute 'gard'"):
        _ = pg.gard


def test_type_checkers_see_the_same_names():
    block = pathlib.Path(pg.__file__).read_text().partition("__version__")[0]
    assert sorted(re.findall(r"(\w+) as \1", block)) == sorted(pg.__all__)


def test_every_error_derives_from_a_builtin_too():
    classes = [c for c in vars(pg.errors).values() if isinstance(c, type) and issubclass(c, pg.errors.PartgradError)]
    assert len(classes) >= 9
    for cls in classes:
        if cls is not pg.errors.PartgradError:
            assert issubclass(cls, ValueError | TypeError | LookupError | AssertionError)


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_importing_starts_no_backend_and_imports_nothing_heavy():
    """What not every program needs is imported when it is first used."""
    code = """
import sys, jax
before = set(sys.modules)
import partgrad
jax.eval_shape(partgrad.grad(lambda p: p["a"] ** 2, wrt="a"), {"a": 3.0})
heavy = ("_check", "_consistent_indexing", "_display", "_double_where", "_programs", "_random", "safe", "testing")
print([name for name in heavy if f"partgrad.{name}" in sys.modules])
from partgrad import *
print(partgrad.check is check, "check" in vars(partgrad))
print(sorted({"equinox", "flax", "optax", "matplotlib", "scipy", "hypothesis"} & (set(sys.modules) - before)))
jax.config.update("jax_platforms", "nowhere")
try:
    jax.devices()
except RuntimeError:
    print("no backend was started")
"""
    assert run(code) == "[]\nTrue True\n[]\nno backend was started\n"
