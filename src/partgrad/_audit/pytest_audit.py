"""`python -m pytest --gradients`: what the plugin does once it is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..errors import ArgumentError
from .audit import Audited, Cause, Left, audited, joined
from .page import page
from .recorder import Recorder, wait
from .report import data, text
from .settings import from_project

_KEY = "partgrad_gradients"


class Gradients:
    """Records while tests run, checks when they have run, and adds a section to the summary."""

    def __init__(self, config: pytest.Config, options: Any):
        for file in filter(None, (options.gradients_json, options.gradients_html)):
            if not Path(file).absolute().parent.is_dir():
                raise pytest.UsageError(
                    f"there is no folder {str(Path(file).absolute().parent)!r} to write {file!r} to"
                )
        self._config = config
        try:
            self._settings = from_project(
                Path(config.rootpath),
                everything=options.gradients_all,
                search=options.gradients_search,
                seconds=options.gradients_seconds,
                total=options.gradients_total,
                calls=tuple(options.gradients_calls or ()),
            )
        except ArgumentError as error:
            raise pytest.UsageError(str(error)) from None
        self._recorder = Recorder(self._settings)
        self._results: list[Audited] = []
        self._recorder.install()

    # Last, since others may still take tests out or put them in another order.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Show the calls of the functions that `calls` names, now that everything is imported."""
        self._recorder.see_calls()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Remember which test runs."""
        self._recorder.running = item.nodeid
        yield
        self._recorder.running = ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Take what a worker found."""
        found = getattr(node, "workeroutput", {}).get(_KEY)
        if found is not None:
            self._results.append(_from_plain(json.loads(found)))

    # First, so that the summary, which is written at the end of the session, has it.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        """Check what was recorded."""
        wait()
        self._recorder.remove()
        result = audited(self._recorder, self._settings, self._show)
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_KEY] = json.dumps(result)
            return
        if self._recorder.places or not self._results:
            self._results.append(result)
        if self._fails(joined(self._results)) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _fails(self, result: Audited) -> bool:
        """Whether what was found fails a run, by the options."""
        option = self._config.getoption
        of_stops = option("gradients_strict_stopped")
        return bool((result.errors and (option("gradients_strict") or of_stops)) or (result.stopped and of_stops))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the section, and the files that were asked for."""
        result, option = joined(self._results), self._config.getoption
        terminalreporter.section("gradients")
        terminalreporter.write_line(text(result, self._settings, is_verbose=self._config.getoption("verbose") > 0))
        if option("gradients_json"):
            Path(option("gradients_json")).write_text(json.dumps(data(result, self._settings), indent=1), "utf-8")
        if option("gradients_html"):
            Path(option("gradients_html")).write_text(page(result, self._settings), "utf-8")

    def _show(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and reporter.isatty:
            reporter.rewrite(line[:79], erase=True)


def _from_plain(found: Any) -> Audited:
    functions, causes, left, unmatched, searched = found
    return Audited(
        [(name, where, seconds) for name, where, seconds in functions],
        [Cause(*cause) for cause in causes],
        [Left(*item) for item in left],
        [(key, entry) for key, entry in unmatched],
        [(tried, reached) for tried, reached in searched],
    )
