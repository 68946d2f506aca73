"""Progress of a check: silence at first, one line on a terminal, few lines in a log, or a function of the user's."""

import importlib
import io

import pytest

from messages import refused
from partgrad import errors
from partgrad._check.progress import Progress

pytestmark = pytest.mark.internal

# The package's function of that name hides the module.
progress_module = importlib.import_module("partgrad._check.progress")


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Screen(io.StringIO):
    """A standard error that keeps what was written."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(progress_module, "time", found)
    return found


def run(monkeypatch, clock, progress, terminal, seconds, what="differences"):
    """What is written by a hundred steps that take so long together."""
    screen = Screen(terminal)
    monkeypatch.setattr(progress_module.sys, "stderr", screen)
    with Progress(progress) as shown:
        shown.expect(40)
        shown.expect(60)
        for _ in range(100):
            clock.now += seconds / 100
            shown.tick(what)
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_short_check_says_nothing(monkeypatch, clock, terminal):
    assert run(monkeypatch, clock, None, terminal, 1.9) == ""
    assert run(monkeypatch, clock, False, terminal, 1000.0) == ""


def test_a_long_check_writes_few_lines_to_a_log_and_only_if_asked(monkeypatch, clock):
    assert run(monkeypatch, clock, None, False, 50.0) == ""
    lines = run(monkeypatch, clock, True, False, 50.0).splitlines()
    assert lines == [f"check: {n} of 100, differences" for n in (1, 21, 41, 61, 81)]
    assert run(monkeypatch, clock, True, False, 1.0).splitlines() == ["check: 1 of 100, differences"]


def test_a_long_check_rewrites_one_line_of_a_terminal(monkeypatch, clock):
    written = run(monkeypatch, clock, None, True, 50.0)
    assert "\n" not in written
    first, *_, last, blank, end = written.split("\r")[1:]
    assert first == "check: 4 of 100, differences"
    assert last == "check: 100 of 100, differences"
    assert (blank, end) == (" " * len(last), "")
    # A hundred steps in a second are ten lines.
    assert run(monkeypatch, clock, True, True, 1.0).count("check: ") <= 11


def test_a_shorter_line_covers_the_longer_one(monkeypatch, clock):
    screen = Screen(True)
    monkeypatch.setattr(progress_module.sys, "stderr", screen)
    with Progress(True) as shown:
        for what in ("a long name of a step", "short", "x" * 200, "two\nlines"):
            clock.now += 1
            shown.tick(what)
    first, second, third, fourth, blank, _ = screen.getvalue().split("\r")[1:]
    assert second == "check: 2 of 2, short".ljust(len(first))
    assert len(third) == 79
    assert fourth == r"check: 4 of 4, two\nlines".ljust(79)
    assert len(blank) >= len(fourth.rstrip())


def test_the_line_is_cleared_when_a_check_raises(monkeypatch, clock):
    screen = Screen(True)
    monkeypatch.setattr(progress_module.sys, "stderr", screen)

    def check():
        with Progress(True) as shown:
            shown.tick("values")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check()
    assert screen.getvalue().endswith(" \r")


def test_a_function_is_told_of_every_step(monkeypatch, clock):
    told = []
    assert run(monkeypatch, clock, lambda *step: told.append(step), True, 100.0) == ""
    assert told == [(n, 100, "differences") for n in range(1, 101)]


def test_there_may_be_more_steps_than_expected():
    told = []
    with Progress(lambda *step: told.append(step)) as shown:
        shown.tick("values")
        shown.expect(1)
        shown.tick("values")
        shown.tick("values")
    assert [(done, total) for done, total, _ in told] == [(1, 1), (2, 2), (3, 3)]


def test_without_a_standard_error(monkeypatch, clock):
    monkeypatch.setattr(progress_module.sys, "stderr", None)
    with Progress(True) as shown:
        shown.tick("values")


@pytest.mark.parametrize("progress", ["yes", 1, 0.5, []])
def test_anything_else_is_refused(progress):
    refused(lambda: Progress(progress), errors.ArgumentError, "`progress` is ", type(progress).__name__)
