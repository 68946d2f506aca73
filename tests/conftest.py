"""Fixtures shared by the tests."""

import jax
import pytest


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
