"""Run tests under JAX's strict modes and its flags for coming behaviour.

    PYTHONPATH=tests/scripts:src python -m pytest -n 0 -p under --under leaks tests/test_transform.py
    PYTHONPATH=tests/scripts:src python tests/scripts/under.py            # every mode in turn, or those that are named, on the quick tests

Tests do what a mode refuses themselves: they add an int to a float, or make a NaN to see what becomes of it. So a failure
counts only where the code that JAX refused is partgrad's: the innermost frame outside JAX is one of its files. The
others are reported as xfailed.
"""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import pytest
from jax._src import core

from partgrad.errors import PartgradError

MODES = {
    "leaks": {"jax_check_tracer_leaks": True},
    "checks": {"jax_enable_checks": True},
    "nans": {"jax_debug_nans": True},
    "dtypes": {"jax_numpy_dtype_promotion": "strict"},
    "ranks": {"jax_numpy_rank_promotion": "raise"},
    # What JAX will do by default one day; flags that a version does not have are passed over.
    "coming": {"jax_remat3": True, "jax_custom_vjp3": True, "jax_custom_jvp3": True},
}
# They look at files and times, or run processes of their own: a mode says nothing of these.
EXCEPT = "architecture benchmarks example_scripts house matrix public_api scale soak types"

# Tests that a mode changes, by the name of the case.
CHANGED = {
    # lineax keeps a tracer of its own.
    "leaks": {"test_enters_what_other_libraries_add[linear_function]"},
    # They ask what becomes of a NaN, which code of partgrad computes: on a path not taken, or in a value that is NaN.
    "nans": {
        "test_what_is_wrong_mismatches[NaN]",
        "test_a_gradient_that_is_nan_at_the_point_alone_is_no_tie",
        "test_changes_nothing_where_all_is_in_float64[indices]",
        "test_docstrings[partgrad._double_where]",
        "test_zoo[S-where_atan2]",
        "test_any_arguments_and_outputs",
        "test_option_of_the_transforms",
        "test_rows_of_padding_in_both_factors",
        "test_deviation_and_variance[std-{}]",
        "test_real_nans_are_not_hidden",
    },
    # They give a draw of bools to a function of `jax.scipy.stats`.
    "dtypes": {
        "test_value_gradient_and_hessian_are_unbiased[discrete]",
        "test_draws_that_cannot_be_counted_are_refused",
        "test_differentiated_before_the_expectation_is_refused[grad]",
    },
    # With `jax_remat3`, partgrad does not look into a checkpoint: `check` names no line in it, `expectation` cannot tell
    # that it runs again, and what is held inside is a zero. With `jax_custom_vjp3`, `check` does not say whose rule is
    # wrong, and all leaves count as used where a rule has a mutable reference.
    "coming": {
        "test_an_implicit_hold_raises_wherever_it_is[checkpoint]",
        "test_a_checkpoint_is_entered_whatever_it_prevents[True]",
        "test_a_checkpoint_is_entered_whatever_it_prevents[False]",
        "test_a_checkpoint_is_entered_whatever_it_prevents[prevent_cse2]",
        "test_draws_that_cannot_be_counted_are_refused",
        "test_inside_of_jit_checkpoint_and_custom_rules",
        "test_it_is_found_where_it_is[wrong_rule-checkpoint]",
        "test_mutable_references_in_a_backward_rule_are_conservative",
        "test_several_outputs_of_any_shape",
    },
}

# How JAX says that a mode refused something; it has no class for most of these.
_REFUSALS = [
    "Leaked",
    "FloatingPointError",
    "TypePromotionError",
    "jax_numpy_rank_promotion",
    "jax_numpy_dtype_promotion",
]

_SCRIPTS = Path(__file__).parent
TESTS = str(_SCRIPTS.parent)
_PACKAGE = str(Path(__file__).parents[2] / "src" / "partgrad")
PATH = os.pathsep.join([str(_SCRIPTS), str(Path(_PACKAGE).parent)])


def pytest_addoption(parser):
    parser.addoption("--under", default="", help=f"comma-separated: {', '.join(MODES)}")


def pytest_collection_finish(session):
    """Only now: the constants of test files are not what is tested."""
    # What holds a leaked tracer JAX finds out by a search through all objects, which takes minutes.
    core.leaked_tracer_error = lambda name, trace, tracers: Exception(
        f"Leaked {name} {trace} with {len(tracers)} tracers"
    )
    for mode in filter(None, session.config.getoption("--under").split(",")):
        for flag, value in MODES[mode].items():
            if flag in jax.config.values:
                jax.config.update(flag, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report, modes = (yield), item.config.getoption("--under").split(",")
    is_changed = any({item.name, item.originalname} & CHANGED.get(mode, set()) for mode in modes)
    if report.failed and any(modes) and (is_changed or is_refused(call.excinfo.value)):
        report.outcome, report.wasxfail = "skipped", "JAX refuses what the test does itself, or the mode changes it"
    return report


def is_refused(error):
    """Whether a mode refused something that stands in a test: the innermost frame outside JAX is not in our code."""
    if isinstance(error.__context__, PartgradError) and "Leaked" in str(error):
        # A rule that refuses a derivative raises while JAX linearizes a branch or the body of a loop. Its traceback holds
        # the tracers, which JAX takes for a leak, from any `custom_vjp` that raises.
        return True
    while error is not None:
        if any(words in f"{type(error).__name__}: {error}" for words in _REFUSALS):
            files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
            own = [file for file in files if file.startswith((_PACKAGE, TESTS))]
            return not own or own[-1].startswith(TESTS)
        error = error.__cause__ or error.__context__
    return False


def main():
    """Run some of the modes, or all, one after the other, and print how the tests went."""
    files = [TESTS, *(f"--ignore={TESTS}/test_{name}.py" for name in EXCEPT.split())]
    failed = False
    for mode in sys.argv[1:] or MODES:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "under", "--under", mode, *files]
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATH})
        failed |= run.returncode != 0
        lines = run.stdout.splitlines()
        print(f"{mode:7} {lines[-1]}", *(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n    ")
    sys.exit(failed)


if __name__ == "__main__":
    main()
