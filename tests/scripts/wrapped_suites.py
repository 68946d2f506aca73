"""Run a test suite of JAX, equinox or anyone else with every function wrapped that it differentiates.

    PYTHONPATH=tests/scripts:src pytest -p wrapped_suites --wrapped double_where  .../tests/custom_api_test.py

The suites are not part of this repository: take each from its own, at the version that is installed. What passes with
`--wrapped jit` should pass with `double_where` and `consistent_indexing`. At the end stand the counts of the tests that
differentiate anything.
"""

import functools
import inspect
import sys

import jax
import jax._src.api

_TRANSFORMS = ("grad", "value_and_grad", "jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian")
_differentiated = []


def _wrapper(name):
    if name == "jit":
        return lambda f: functools.wraps(f, updated=())(jax.jit(f))
    import partgrad as pg

    return getattr(pg, name)


def _is_of_library(frame):
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("jax.", "partgrad.")) and not module.endswith("test_util")


def _patched(transform, wrap):
    # JAX and partgrad differentiate as well, in ways of their own.
    @functools.wraps(transform)
    def patched(f, *args, **kwargs):
        if _is_of_library(sys._getframe(1)) or not callable(f):
            return transform(f, *args, **kwargs)
        _differentiated.append(transform.__name__)
        return transform(wrap(f), *args, **kwargs)

    patched.__signature__ = inspect.signature(transform)
    return patched


def pytest_addoption(parser):
    parser.addoption("--wrapped", default="plain", help="plain, jit, or the name of a function of partgrad")


def pytest_configure(config):
    name = config.getoption("--wrapped")
    wrap = (lambda f: f) if name == "plain" else _wrapper(name)
    for transform in _TRANSFORMS:
        original = getattr(jax._src.api, transform)
        for module in (jax, jax._src.api):
            setattr(module, transform, _patched(original, wrap))


def pytest_runtest_logstart(nodeid, location):
    _differentiated.clear()


def pytest_runtest_logreport(report):
    _counts.setdefault(report.nodeid, []).append((report.outcome, bool(_differentiated)))


_counts: dict = {}


def pytest_terminal_summary(terminalreporter):
    passed = failed = 0
    for outcomes in _counts.values():
        if not any(differentiates for _, differentiates in outcomes) or any(o == "skipped" for o, _ in outcomes):
            continue
        if all(outcome == "passed" for outcome, _ in outcomes):
            passed += 1
        else:
            failed += 1
    terminalreporter.write_line(f"{passed} of {passed + failed} tests that differentiate passed")
