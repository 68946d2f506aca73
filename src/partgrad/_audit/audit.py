"""Check what was recorded, and gather what was found by its cause."""

import linecache
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._check import GradientReport, check
from .recorder import Place, Point, Recorder, last_line
from .settings import Settings

# What a person writes on a line whose findings are intended.
COMMENT = "# partgrad: intended"
_NO_DERIVATIVE = frozenset({"no reverse", "no loop"})
_STOPPING = frozenset({"stop", "rule stop", "mark"})
_SEVERITIES = ("error", "warning", "info")
# The least that it takes to compile a check, for each operation of the function.
_COMPILING = 0.004


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
    """What was not checked or not searched, and why."""

    what: str
    function: str
    where: str
    reason: str


class Audited(NamedTuple):
    """The result of an audit, as plain data that a worker can send.

    Attributes:
        functions: The functions that were checked: the qualified name, the line, and the seconds that it took.
        causes: What was found, errors first.
        left: What was not checked.
        unmatched: The entries of `intended` that match no finding, and those of `skip` that match no function.
        searched: For each function in which bad points were searched for, how many operands were tried and reached.
    """

    functions: list[tuple[str, str, float]]
    causes: list[Cause]
    left: list[Left]
    unmatched: list[tuple[str, str]]
    searched: list[tuple[int, int]]

    @property
    def errors(self) -> int:
        """The number of causes of wrong gradients."""
        return sum(cause.finding["severity"] == "error" for cause in self.causes)

    @property
    def stopped(self) -> int:
        """The number of causes that cut a gradient: a `stop_gradient`, a mark, or a rule without a derivative."""
        found = (cause.finding for cause in self.causes)
        return sum(f["severity"] == "warning" and f["reason"] in _STOPPING for f in found)


class _OutOfTime(Exception):
    """A check took as long as it may."""


def audited(recorder: Recorder, settings: Settings, show: Callable[[str], object] = lambda line: None) -> Audited:
    """Check every function that was recorded, and then search near their points, as long as there is time."""
    audit, places = _Audit(settings, show), recorder.places
    audit.check(places)
    if settings.search:
        audit.search(places)
    if not audit.functions and not audit.left:
        # The audit was run in another folder than the project's.
        why = f"it is not written below {settings.root}"
        audit.left += [Left("checked", name, file, why) for name, file in settings.elsewhere.items()]
    why = "the gradients that another process takes are not recorded"
    audit.left += [Left("checked", how, settings.line(*where), why) for where, how in recorder.children.items()]
    causes, unmatched = _gathered(audit.found, settings, audit.used)
    unmatched += [("skip", glob) for glob in settings.skip if glob not in settings.matched]
    return Audited(_listed(audit.functions), causes, audit.left, unmatched, audit.searched)


class _Audit:
    """What was checked so far, what was found, and what is left."""

    def __init__(self, settings: Settings, show: Callable[[str], object]):
        self._settings, self._show = settings, show
        self._end = time.monotonic() + settings.total
        self.functions: dict[tuple[str, str], float] = {}
        self.found: list[tuple[dict[str, Any], str, str]] = []
        self.left: list[Left] = []
        self.searched: list[tuple[int, int]] = []
        self.used: set[str] = set()

    def check(self, places: Sequence[Place]) -> None:
        """Check each function at the points that were kept."""
        for number, place in enumerate(places, 1):
            self._show(f"gradients: {number} of {len(places)}, {place.origin.name}")
            if place.reason or not place.points:
                self._leave("checked", place, place.reason or "it was traced and did not run")
                continue
            begin = time.monotonic()
            for point in place.points:
                if self._report("checked", place, point, begin + self._settings.seconds, search=False) is None:
                    break
            else:
                function = self._function(place)
                self.functions[function] = self.functions.get(function, 0.0) + time.monotonic() - begin

    def search(self, places: Sequence[Place]) -> None:
        """Search near the first point of each program, wherever it is differentiated."""
        # A reverse derivative, if there is one, is wrong wherever a forward one is.
        first = {place.kind: place for place in sorted(places, key=lambda place: -place.is_forward)}
        for number, place in enumerate(first.values(), 1):
            self._show(f"gradients: search, {number} of {len(first)}, {place.origin.name}")
            if not place.points or self._function(place) not in self.functions:
                continue
            until = time.monotonic() + self._settings.seconds
            report = self._report("searched", place, place.points[0], until, search=True)
            if report is not None and report.search is not None:
                self.searched.append((report.search["tried"], report.search["reached"]))
                if report.search["left"]:
                    self._leave("searched", place, f"{report.search['left']} operands: {report.search['reason']}")

    def _report(self, what: str, place: Place, point: Point, until: float, search: bool) -> GradientReport | None:
        """The report on a point, whose findings are kept; None if there is none, which is said."""
        until, which = min((until, "one function"), (self._end, "all functions"))

        # A search keeps to its time itself, so that what it found so far is not lost.
        last = until + self._settings.seconds * search

        def watch(*_: Any) -> None:
            if time.monotonic() > last:
                raise _OutOfTime

        program, operands = point
        try:
            watch()
            seconds = until - time.monotonic()
            if program.operations * _COMPILING > seconds:
                raise _OutOfTime
            with place.conditions.again(), warnings.catch_warnings():
                # The function has warned when it ran; under `-W error` it would raise.
                warnings.simplefilter("ignore")
                checked = check(
                    program.function(operands),
                    forward=place.is_forward,
                    search=search and seconds,
                    progress=watch,
                    intended=self._settings.intended,
                )
                report = checked(program.point(operands))
        except _OutOfTime:
            self._leave(what, place, f"the time for {which} was up ({program.operations} operations)")
            return None
        except Exception as error:
            # A program that runs only in a `shard_map`, or a fault of the check: it is listed, and the rest goes on.
            self._leave(what, place, f"the check failed: {last_line(error)}")
            return None
        missing = next((finding for finding in report.findings if finding.reason in _NO_DERIVATIVE), None)
        if missing is not None:
            # The function has just been differentiated: it is its replay that has no derivative.
            why = missing.details.get("error", "a loop")
            self._leave(what, place, f"its derivative is there only where it runs ({why})")
            return None
        met = place.running or self._settings.line(*place.where)
        stale = {finding.details["entry"] for finding in report.findings if finding.kind == "intended"}
        self.used.update(set(self._settings.intended) - stale)
        self.found += [(f.to_dict(), place.origin.name, met) for f in report.findings if f.kind != "intended"]
        return report

    def _function(self, place: Place) -> tuple[str, str]:
        return place.origin.name, self._settings.line(place.origin.file, place.origin.line)

    def _leave(self, what: str, place: Place, reason: str) -> None:
        self.left.append(Left(what, place.origin.name, self._settings.line(*place.where), reason))


def _gathered(
    found: list[tuple[dict[str, Any], str, str]], settings: Settings, used: set[str]
) -> tuple[list[Cause], list[tuple[str, str]]]:
    """What was found by its cause, and the entries of `intended` that match none of it and were not used before."""
    causes: list[Cause] = []
    for finding, function, met in found:
        meant = [entry for entry in settings.intended if _is_meant(entry, finding, function)]
        used.update(meant)
        if meant or COMMENT in linecache.getline(finding["file"], finding["line"]):
            finding = {**finding, "severity": "info", "intended": True}
        causes.append(Cause(finding, [function], [met]))
    return _merged(causes), [("intended", entry) for entry in settings.intended if entry not in used]


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
    functions = {(name, where): seconds for one in several for name, where, seconds in one.functions}
    left = list(dict.fromkeys(item for one in several for item in one.left))
    # An entry matches if it matches in one worker.
    unmatched = [e for e in several[0].unmatched if all(e in one.unmatched for one in several)] if several else []
    causes = _merged(cause for one in several for cause in one.causes)
    searched = [pair for one in several for pair in one.searched]
    return Audited(_listed(functions), causes, left, unmatched, searched)


def _listed(functions: dict[tuple[str, str], float]) -> list[tuple[str, str, float]]:
    return [(name, where, seconds) for (name, where), seconds in functions.items()]
