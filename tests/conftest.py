"""Fixtures shared by the tests, and how many of them run: see `tiers.py`."""

import jax
import pytest

import tiers


def _names_tests(config):
    return any(".py" in argument for argument in config.invocation_params.args)


def pytest_xdist_auto_num_workers(config):
    """Two for the suite; a file or a test is sooner done by one, which debuggers can enter."""
    return 0 if _names_tests(config) else 2


def pytest_configure(config):
    if any("::" in argument for argument in config.invocation_params.args) and config.option.markexpr == "not long":
        config.option.markexpr = ""
    tiers.configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.share_out(items)


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Run a test in both precisions."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def no_compiled_programs_of_other_files():
    """Compiled programs take gigabytes by the end of a run."""
    yield
    jax.clear_caches()
