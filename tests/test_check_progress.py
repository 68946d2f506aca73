"""What a check says of itself while it runs: a bar if tqdm is there, and never a line that nobody asked for."""

import io
import sys

import pytest

import partgrad as pg


def square(x):
    return x**2


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("progress", "terminal"), [(None, False), (None, True), (False, False), (False, True)])
def test_a_short_check_says_nothing(progress, terminal, monkeypatch):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    pg.check(square, progress=progress)(2.0)
    assert stream.getvalue().strip() == ""


def test_a_bar_is_shown_if_it_is_asked_for(monkeypatch):
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    pg.check(square, progress=True)(2.0)
    assert "check" in stream.getvalue()


def test_without_tqdm_there_is_at_most_one_plain_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for progress, lines in ((True, 1), (None, 0)):
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        pg.check(square, progress=progress)(2.0)
        assert len(stream.getvalue().splitlines()) == lines


def test_a_program_without_a_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert pg.check(square, progress=True)(2.0).ok
    assert pg.check(square)(2.0).ok


def test_a_function_is_told_of_every_step_of_every_check():
    told = []
    check = pg.check(square, progress=lambda done, total, what: told.append((done, total, what)))
    for _ in range(2):
        told.clear()
        check(2.0)
        assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
        assert told[-1][0] == told[-1][1]
        assert {"traced", "finite differences"} <= {what for _, _, what in told}
