"""Check what was recorded, and gather what was found by its cause."""

import linecache
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._check import check
from .recorder import Place, Point, last_line
from .settings import Settings

# What a person writes on a line whose findings are intended.
COMMENT = "# partgrad: intended"
_SEVERITIES = ("error", "warning", "info")


class Cause(NamedTuple):
    """A finding, with everything that meets it.

    Attributes:
        finding: The finding as plain data, as `Finding.to_dict` returns it, with the names of the leaves.
        functions: The qualified names of the functions whose gradients it is in.
        met: Where they are differentiated: names of tests, or lines.
    """

    finding: dict[str, Any]
    functions: list[str]
    met: list[str]


class Left(NamedTuple):
    """What was not checked, and why."""

    function: str
    where: str
    reason: str


class Audited(NamedTuple):
    """The result of an audit, as plain data that a worker can send.

    Attributes:
        functions: The qualified names of the functions that were checked, each with the seconds that it took.
        causes: What was found, errors first.
        left: What was not checked.
        unmatched: The entries of `intended` that match no finding.
    """

    functions: list[tuple[str, float]]
    causes: list[Cause]
    left: list[Left]
    unmatched: list[str]

    @property
    def errors(self) -> int:
        """The number of causes of wrong gradients."""
        return sum(cause.finding["severity"] == "error" for cause in self.causes)


class _OutOfTime(Exception):
    """A check took as long as it may."""


def audited(places: Sequence[Place], settings: Settings, show: Callable[[str], object] = lambda line: None) -> Audited:
    """Check every function that was recorded, as long as there is time."""
    functions, found, left = [], [], []
    end = time.monotonic() + settings.total
    for number, place in enumerate(places, 1):
        show(f"gradients: {number} of {len(places)}, {place.origin.name}")
        name, where, begin = place.origin.name, settings.line(*place.where), time.monotonic()
        if place.reason or not place.points:
            left.append(Left(name, where, place.reason or "it was traced and did not run"))
            continue
        until = min(begin + settings.seconds, end)
        try:
            for point in place.points:
                for finding in _findings(place, point, settings, until):
                    found.append((finding, name, place.running or where))
        except _OutOfTime:
            all_or_one = "all functions" if until == end else "one function"
            left.append(Left(name, where, f"the time for {all_or_one} was up"))
        except Exception as error:
            # A program that runs only in a `shard_map`, or a fault of the check: it is listed, and the rest goes on.
            left.append(Left(name, where, f"the check failed: {last_line(error)}"))
        else:
            functions.append((name, time.monotonic() - begin))
    causes, unmatched = _gathered(found, settings)
    return Audited(functions, causes, left, unmatched)


def _findings(place: Place, point: Point, settings: Settings, until: float) -> list[dict[str, Any]]:
    def watch(*_: Any) -> None:
        if time.monotonic() > until:
            raise _OutOfTime

    program, operands = point
    with place.conditions.again():
        watch()
        options: dict[str, Any] = {"forward": place.is_forward, "search": settings.search, "progress": watch}
        report = check(program.function(operands), **options)(program.point(operands))
    return [finding.to_dict() for finding in report.findings]


def _gathered(found: list[tuple[dict[str, Any], str, str]], settings: Settings) -> tuple[list[Cause], list[str]]:
    """What was found by its cause, and the entries of `intended` that match none of it."""
    causes: list[Cause] = []
    used: set[str] = set()
    for finding, function, met in found:
        meant = [entry for entry in settings.intended if _is_meant(entry, finding, function)]
        used.update(meant)
        if finding["severity"] != "error" and finding["kind"] == "intended":
            continue
        if meant or COMMENT in linecache.getline(finding["file"], finding["line"]):
            finding = {**finding, "severity": "info", "intended": True}
        causes.append(Cause(finding, [function], [met]))
    return _merged(causes), [entry for entry in settings.intended if entry not in used]


def _merged(causes: Iterable[Cause]) -> list[Cause]:
    """Each cause once, with every leaf, function and test that meets it; errors first."""
    merged: dict[Any, Cause] = {}
    for cause in causes:
        finding = cause.finding
        key = tuple(finding[name] for name in ("severity", "kind", "reason", "file", "line", "operation"))
        # Without a line, a function's findings are its own.
        key = key if finding["file"] else (*key, *cause.functions)
        known = merged.get(key)
        if known is None:
            merged[key] = Cause({**finding, "leaves": list(finding["leaves"])}, list(cause.functions), list(cause.met))
            continue
        lists = (known.functions, cause.functions), (known.met, cause.met), (known.finding["leaves"], finding["leaves"])
        for own, new in lists:
            own += [item for item in new if item not in own]
    return sorted(merged.values(), key=lambda cause: _SEVERITIES.index(cause.finding["severity"]))


def _is_meant(entry: str, finding: dict[str, Any], function: str) -> bool:
    file, _, line = entry.rpartition(":")
    if file and line.isdigit():
        path = Path(finding["file"]).as_posix()
        return finding["line"] == int(line) and (path == file or path.endswith(f"/{file}"))
    return entry in (finding["rule"], function) or entry in finding["leaves"]


def joined(several: Sequence[Audited]) -> Audited:
    """The results of several workers as one."""
    functions = {name: seconds for one in several for name, seconds in one.functions}
    left = list(dict.fromkeys(item for one in several for item in one.left))
    # An entry matches if it matches in one worker.
    unmatched = [e for e in several[0].unmatched if all(e in one.unmatched for one in several)] if several else []
    causes = _merged(cause for one in several for cause in one.causes)
    return Audited(list(functions.items()), causes, left, unmatched)
