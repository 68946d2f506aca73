"""The progress of a check: a bar if tqdm is installed, a function of the user's, or nothing."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError

# Seconds before a bar appears that nobody asked for.
_SILENT = 2.0


class Progress:
    """Counts steps and shows them as the option of `check` says; a context that removes the bar, which has a name."""

    def __init__(self, progress: bool | Callable[[int, int, str], object] | None, name: str = "check") -> None:
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ArgumentError(
                f"`progress` is {type(progress).__name__} {progress!r:.60}.",
                "Expected None (shown after two seconds), True, False, or a function of (done, total, what).",
                fix="omit it, or write progress=False.",
            )
        self._progress, self._name, self._bar = progress, name, None
        self._done = self._total = 0

    def __enter__(self) -> "Progress":
        self._done = self._total = 0
        self._bar = None if callable(self._progress) or self._progress is False else self._made_bar()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _made_bar(self) -> Any:
        # A bar that nobody asked for is for terminals; a program without a console has no standard error.
        is_asked = self._progress is True
        if sys.stderr is None or not (is_asked or sys.stderr.isatty()):
            return None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

            return tqdm(total=0, desc=self._name, leave=False, delay=0.0 if is_asked else _SILENT, file=sys.stderr)
        if is_asked:
            sys.stderr.write(f"{self._name}: running; with tqdm installed there is a bar\n")
        return None

    def expect(self, steps: int) -> None:
        """Announce more steps."""
        self._total += steps

    def tick(self, what: str) -> None:
        """Count a finished step."""
        self._done += 1
        self._total = max(self._total, self._done)
        if callable(self._progress):
            self._progress(self._done, self._total, what)
        elif self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update()
