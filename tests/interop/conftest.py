"""Libraries beside partgrad: what a test is about goes with its report, so that the run can make the table."""

import inspect

import jax
import pytest

# Whoever fits to a known answer wants its digits.
jax.config.update("jax_enable_x64", True)


def pytest_configure(config):
    config.addinivalue_line("markers", "library(name, lines=): of which library, and which lines its user must add")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        marks = list(item.iter_markers("library"))
        if not marks:
            continue
        name = next(mark.args[0] for mark in marks if mark.args)
        lines = next((mark.kwargs["lines"] for mark in marks if "lines" in mark.kwargs), None)
        what = inspect.getdoc(item.function).partition("\n\n")[0].replace("\n", " ")
        # The lines that the table shows are lines of the test, or of what it shares with others.
        assert lines is None or lines in inspect.getsource(item.module), (item.nodeid, lines)
        item.user_properties += [("library", name), ("what", what), ("lines", lines)]
