"""What runs by default and what only with everything (`python -m pytest -m ""`).

A parametrised test marked `share(48, kind=...)` runs every 48th case of each kind by default, beginning with the
first, so that no kind is without one; rows that are marked `long` themselves are counted apart. `kind` maps the
parameters, by name, to what the case is a case of. A law draws `examples(n)`: all of them with everything, and a
48th, at least two, by default, unless an example takes no time. A test of both precisions (`x64`) runs in one of them
by default, in the other with everything.

`.ci/run` deals these tables out: TESTS_TURN is 0 or 1, a lane with `-m "not elsewhere"` runs that quarter of each, or
that half if the mark says `parts=2`, and of each kind the first case. A law draws half of its examples on each lane.
What is marked `lane(1)` runs on that lane only.
"""

import collections
import os
import zlib

import pytest

SHARE = 48
PARTS = 4
TURN = os.environ.get("TESTS_TURN")
CASES = os.environ.get("LAW_CASES")
_everything = False


def configure(config):
    """Whether everything was asked for; pytest calls it, through `conftest.py`, before it imports a test."""
    global _everything
    _everything = "not long" not in config.option.markexpr


def examples(number, is_quick=False):
    """How many examples a law draws; the variable LAW_CASES asks for more."""
    if CASES:
        return int(CASES)
    if is_quick:
        return number
    if _everything:
        return max(3, number // 2) if TURN else number
    return max(2, number // SHARE)


def share_out(items):
    """Mark as long what is not in the default share; a case that is asked for by its name always runs."""
    counts = collections.Counter()
    for item in items:
        lane = item.get_closest_marker("lane")
        if TURN and lane and lane.args[0] != int(TURN):
            item.add_marker(pytest.mark.elsewhere)
        mark = item.get_closest_marker("share")
        if mark is None:
            if _is_other_precision(item):
                item.add_marker(pytest.mark.long)
            continue
        kind = mark.kwargs.get("kind", lambda parameters: None)(item.callspec.params)
        is_long = item.get_closest_marker("long") is not None
        family = (item.path, item.originalname, kind, is_long)
        place = counts[family]
        counts[family] += 1
        if place % (mark.args[0] if mark.args else SHARE):
            item.add_marker(pytest.mark.long)
        parts = mark.kwargs.get("parts", PARTS)
        # What `turns` shares out is half of its cases already.
        parts, own = (2, 0) if hasattr(item.module, "is_mine") else (parts, 1 - int(TURN or 0))
        if TURN and (place or is_long) and place % parts != own:
            item.add_marker(pytest.mark.elsewhere)


def _is_other_precision(item):
    precision = item.callspec.params.get("x64") if hasattr(item, "callspec") else None
    return precision is not None and precision != zlib.crc32(item.originalname.encode()) % 2
