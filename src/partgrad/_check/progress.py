"""The progress of a check: nothing for a short one, a line on standard error for a long one."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from .._display import columns, fitted, printable
from ..errors import ArgumentError

_SILENT = 2.0
# Seconds between two lines in a log, and between two on a terminal, where each replaces the last.
_LOG, _TERMINAL = 10.0, 0.1
_COLUMNS = 79


class Progress:
    """Counts steps and reports them as the option of `check` says; a context that clears its line."""

    def __init__(self, progress: bool | Callable[[int, int, str], object] | None) -> None:
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ArgumentError(
                f"`progress` is {type(progress).__name__} {progress!r:.60}.",
                "Expected None (shown after two seconds), True, False, or a function of (done, total, what).",
                fix="omit it, or write progress=False.",
            )
        self._call = progress if callable(progress) else None
        # How long to stay silent.
        self._silent = 0.0 if progress is True else _SILENT if progress is None else float("inf")
        # Nothing is written to a log unless it was asked for.
        self._is_asked = progress is True
        self._done = self._total = self._width = 0
        self._next = 0.0

    def __enter__(self) -> "Progress":
        self._next = time.monotonic() + self._silent
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._width:
            _write("\r" + " " * self._width + "\r")

    def expect(self, steps: int) -> None:
        """Announce more steps."""
        self._total += steps

    def tick(self, what: str) -> None:
        """Count a finished step."""
        self._done += 1
        self._total = max(self._total, self._done)
        if self._call is not None:
            self._call(self._done, self._total, what)
        elif time.monotonic() >= self._next and (self._is_asked or _is_terminal()):
            self._tell(f"check: {self._done:,} of {self._total:,}, {printable(what)}")

    def _tell(self, line: str) -> None:
        if _is_terminal():
            line = fitted(line, min(_COLUMNS, max(columns(line), self._width)))
            self._width = columns(line.rstrip())
            _write(f"\r{line}")
        else:
            _write(f"{line}\n")
        self._next = time.monotonic() + (_TERMINAL if self._width else _LOG)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    # A program without a console has no standard error.
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
