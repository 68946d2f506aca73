"""The pytest plugin of partgrad, which costs nothing until it is asked for: it imports neither JAX nor partgrad."""

from typing import Any

import pytest

_NAME = "partgrad-gradients"


def pytest_addoption(parser: Any) -> None:
    """Add `--gradients` and its options."""
    group = parser.getgroup("partgrad", "check every gradient that the tests take (partgrad)")
    flag = lambda name, text: group.addoption(f"--gradients{name}", action="store_true", help=text)
    flag("", "check the functions that are differentiated, and say so in the summary")
    flag("-strict", "the same, and fail if a gradient is wrong")
    # An option of its own, since one with an optional value would take the next argument, a file, for it.
    group.addoption(
        "--gradients-strict=stopped",
        dest="gradients_strict_stopped",
        action="store_true",
        help="the same, and fail too if one is cut by a stop_gradient, a mark or a rule",
    )
    flag("-all", "also check functions of other libraries")
    group.addoption(
        "--gradients-calls",
        action="append",
        metavar="GLOB",
        help="also check the functions with such qualified names that are called, as 'package.physics.*'",
    )
    flag("-search", "also search for bad points near the given ones")
    group.addoption("--gradients-seconds", type=float, default=20.0, help="the most for one function (20)")
    group.addoption("--gradients-total", type=float, help="the most for all functions (3 for each, and at least 300)")
    group.addoption("--gradients-json", metavar="FILE", help="write the findings as JSON")
    group.addoption("--gradients-html", metavar="FILE", help="write the findings as a page")


# Before the root `conftest.py`, which may import the project, and the project JAX's transforms by name.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Begin to record, if an option asks for it."""
    _record(early_config, early_config.known_args_namespace)


def pytest_configure(config: Any) -> None:
    """Begin to record now if the plugin was loaded late, as by a `conftest.py`."""
    _record(config, config.option)


def _record(config: Any, options: Any) -> None:
    names = ("", "_strict", "_strict_stopped", "_all", "_search", "_json", "_html", "_calls")
    if any(getattr(options, f"gradients{name}") for name in names) and not config.pluginmanager.has_plugin(_NAME):
        from partgrad._audit.pytest_audit import Gradients

        config.pluginmanager.register(Gradients(config, options), _NAME)
