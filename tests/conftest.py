"""Fixtures shared by the tests, and what a run says of itself."""

import gc
import os
import zlib
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax import monitoring

from helpers import tables

# Most of a run goes into compiling programs that run once, so they are compiled at the lowest level. XLA's older generator
# of fused kernels halves that time; later versions no longer have it, and end a process for a flag that they lack.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):  # JAX 0.10
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)

# No test fails because a machine is slow. Few examples, as most of them are programs that are compiled.
settings.register_profile("patient", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
# `--hypothesis-profile=long`: every law with ten thousand cases.
settings.register_profile("long", settings.get_profile("patient"), max_examples=10_000)
settings.load_profile("patient")

# Of the slow tests, which share runs: "1/2" or "2/2". No option: tests start other suites, which inherit options.
SHARE = os.environ.get("SHARE_OF_SLOW_TESTS", "1/1")


def pytest_addoption(parser):
    parser.addoption("--whole-tables", action="store_true", help="run every row of the tables that are sampled")


def _names_tests(config):
    return any(".py" in argument for argument in config.invocation_params.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two for the suite; a file or a test is sooner done by one, which debuggers can enter."""
    return 0 if _names_tests(config) else 2


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run in parallel unless an option says otherwise, where pytest-xdist is installed."""
    is_worker = hasattr(config, "workerinput")
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None and not is_worker:
        config.option.numprocesses, config.option.dist = "auto", "worksteal"


def _own_compilation_cache():
    """JAX writes the files of its cache in place, so a worker could read half of what another one is writing."""
    cache, worker = os.environ.get("JAX_COMPILATION_CACHE_DIR"), os.environ.get("PYTEST_XDIST_WORKER")
    if cache and worker:
        # Of this process, and of those it starts.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = own = os.path.join(cache, worker)
        jax.config.update("jax_compilation_cache_dir", own)


def pytest_configure(config):
    _own_compilation_cache()
    tables.whole = config.option.whole_tables
    if any("::" in argument for argument in config.invocation_params.args) and config.option.markexpr == "not slow":
        # A test that is asked for by its name runs, slow or not.
        config.option.markexpr = ""


def pytest_collection_modifyitems(config, items):
    """Deselect the slow tests of other shares. The name of a test decides, so any version of Python shares alike."""
    share, shares = map(int, SHARE.split("/"))
    others = [
        item
        for item in items
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % shares != share - 1
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Look for garbage seldom, and never in what was imported: the search for cycles takes a tenth of a run."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_report_header(config):
    sampled = "whole" if tables.whole else f"sampled with seed {tables.SEED}"
    return f"tables: {sampled}; share of the slow tests: {SHARE}"


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Run a test in both precisions."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def compilations():
    """How many programs were compiled, in a list of one number that a test may set back to 0."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += "backend_compile" in event

    monitoring.register_event_duration_secs_listener(listen)
    yield count
    monitoring.unregister_event_duration_listener(listen)


def _resident_gigabytes():
    """What this process holds in memory; infinite where there is no /proc."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30 if pages.exists() else float("inf")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_of_other_files():
    """Keep what other files compiled, until it takes gigabytes: a tenth of a run goes into compiling it again."""
    yield
    if _resident_gigabytes() > 2:
        jax.clear_caches()
