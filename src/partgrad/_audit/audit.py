"""Check what was recorded, and gather what was found by its cause."""

import contextlib
import dataclasses
import functools
import linecache
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._check import SEVERITIES, Finding, Glance, GradientReport, check, glances
from .._programs import Operands, Recorded
from .calls import CalledPlace
from .place import Place, Point, last_line
from .recorder import Recorder
from .settings import Settings

# What a person writes on a line whose findings are intended.
COMMENT = "# partgrad: intended"
_NO_DERIVATIVE = frozenset({"no reverse", "no loop"})
_STOPPING = frozenset({"stop", "rule stop", "mark"})
# The least that it takes to compile a check, for each operation of the function.
_COMPILING = 0.004
# How many seconds the first look at functions that are only called may take beyond the time for all: there may be
# thousands of them, and each is compiled.
_LOOKING = 60.0
# At how many states a function is checked, if it is finite at all that are kept.
_CHECKED = 3
# How far a function that runs again may be from what it returned, relative to the size of that.
_SAME = 1e-2


class Cause(NamedTuple):
    """A finding, with everything that meets it.

    Attributes:
        finding: The finding as plain data, as `Finding.to_dict` returns it, with the names of the leaves.
        functions: The qualified names of the functions whose gradients it is in.
        met: Where they are differentiated: names of tests, or lines.
        called: Where they are called, and were differentiated by the audit alone.
    """

    finding: dict[str, Any]
    functions: list[str]
    met: list[str]
    called: list[str]


class Left(NamedTuple):
    """What was not checked, checked in part only, or not searched, and why."""

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


class Found(NamedTuple):
    """A finding in a function, where that was met, and whether it was called there, not differentiated."""

    finding: dict[str, Any]
    function: str
    met: str
    is_called: bool


class _OutOfTime(Exception):
    """A check took as long as it may."""


def audited(recorder: Recorder, settings: Settings, show: Callable[[str], object] = lambda line: None) -> Audited:
    """Check every function that was recorded, and then search near their points, as long as there is time."""
    places = recorder.places
    audit = _Audit(settings, show, settings.time_for(len(places)))
    places = audit.look(places)
    audit.check(places)
    if settings.search:
        audit.search(places)
    if not audit.functions and not audit.left and not settings.calls:
        # The audit was run in another folder than the project's.
        why = f"it is not written below {settings.root}"
        audit.left += [Left("checked", name, file, why) for name, file in settings.elsewhere.items()]
    why = "the gradients that another process takes are not recorded"
    audit.left += [Left("checked", how, settings.line(*where), why) for where, how in recorder.children.items()]
    seen = {name for name, _ in audit.functions}
    # A function may be called with a few structures that are kept, and others that are not.
    left = recorder.swapped.left.items()
    audit.left += [Left("partly" if name in seen else "checked", name, "", reason) for name, reason in left]
    causes, unmatched = _gathered(audit.found, settings, audit.used)
    unmatched += [("skip", glob) for glob in settings.skip if glob not in settings.matched]
    unmatched += [("calls", glob) for glob in settings.calls if glob not in recorder.swapped.matched]
    unmatched += [("wrt", entry) for entry in settings.wrt if entry not in audit.differentiated]
    return Audited(_listed(audit.functions), causes, _in_part(audit.left, causes), unmatched, audit.searched)


def _in_part(left: list[Left], causes: list[Cause]) -> list[Left]:
    """What is left, where a function in which an error was found is checked in part."""
    wrong = {name for cause in causes if cause.finding["severity"] == "error" for name in cause.functions}
    return [one._replace(what="partly") if one.what == "checked" and one.function in wrong else one for one in left]


class _Audit:
    """What was checked so far, what was found, and what is left."""

    def __init__(self, settings: Settings, show: Callable[[str], object], seconds: float):
        self._settings, self._show = settings, show
        self._end = time.monotonic() + seconds
        self.functions: dict[tuple[str, str], float] = {}
        self.found: list[Found] = []
        self.left: list[Left] = []
        self.searched: list[tuple[int, int]] = []
        self.used: set[str] = set()
        # The entries of `wrt` that some argument fits.
        self.differentiated: set[str] = set()
        self._glances: dict[Place, list[Glance]] = {}
        self._severity: dict[Place, int] = {}

    def look(self, places: Sequence[Place]) -> list[Place]:
        """Say of every function, before anything is checked, whether its gradient is finite; the worst ones first."""
        kept = []
        for number, place in enumerate(places, 1):
            self._show(f"gradients: first look, {number} of {len(places)}, {place.origin.name}")
            if place.is_called and time.monotonic() > self._end + _LOOKING:
                self._leave("checked", place, "the time for all functions was up")
                continue
            with _as_it_ran(place):
                if isinstance(place, CalledPlace) and not place.trace(self._settings.wrt, self.differentiated):
                    continue
                kept.append(place)
                self._glances[place] = self._glanced(place)
        return sorted(kept, key=lambda place: -sum(bool(one.bad) for one in self._glances[place]))

    def _glanced(self, place: Place) -> list[Glance]:
        """One glance for each state; none if there is no derivative, of which the check says why."""
        programs: dict[Any, list[Point]] = {}
        for point in () if place.reason else place.points:
            programs.setdefault(point.program.keyed or id(point.program), []).append(point)
        found: dict[int, Glance] = {}
        for points in programs.values():
            pairs = [(one.program.point(one.operands), one.operands) for one in points]
            seen = self._seen(place, points[0].program, pairs)
            if seen is None:
                return []
            found |= {id(point): one for point, one in zip(points, seen, strict=True)}
        several = [found[id(point)] for point in place.points] if found else []
        for point, glanced in zip(place.points, several, strict=False):
            place.reason = place.reason or _another(point, glanced)
        return [] if place.reason else several

    @staticmethod
    def _seen(place: Place, program: Recorded, pairs: list[tuple[Any, Operands]]) -> list[Glance] | None:
        # What nobody has differentiated yet may have a derivative in forward mode alone.
        for forward in (False, True) if place.is_called and not place.is_forward else (place.is_forward,):
            try:
                seen = glances(program.function, pairs, forward=forward)
            except Exception:
                # A program that runs only where it was recorded, or a rule of the user's: the check will say so.
                continue
            place.is_forward = forward
            return seen
        return None

    def check(self, places: Sequence[Place]) -> None:
        """Check each function, first where its gradient is not finite; then, if there is time, at other states."""
        done: dict[Place, set[int]] = {}
        for place in places:
            if place.reason or not place.points:
                self._leave("checked", place, place.reason or "it was traced and did not run")
            else:
                done[place] = set()
        for turn, what in enumerate(("checked", "partly")):
            for number, place in enumerate(done, 1):
                self._show(f"gradients: {number} of {len(done)}, {place.origin.name}")
                if turn == 0 or done[place]:
                    done[place] |= self._checked(what, place, self._chosen(place)[turn])
        for place, numbers in done.items():
            self._state(place, numbers)

    def _checked(self, what: str, place: Place, numbers: list[int]) -> set[int]:
        """Check a function at some of its states, and return those at which that was done; none if one was not."""
        begin = time.monotonic()
        for which in numbers:
            if self._report(what, place, place.points[which], begin + self._settings.seconds, search=False) is None:
                return set()
        function = self._function(place)
        self.functions[function] = self.functions.get(function, 0.0) + time.monotonic() - begin
        return set(numbers)

    def _chosen(self, place: Place) -> tuple[list[int], list[int]]:
        """The numbers of the states that are checked: the ways of not being finite, or the first; and some others."""
        glanced = self._glances[place]
        ways: dict[tuple[int, ...], int] = {}
        # With a finite value first: what is not finite there is a matter of the gradient.
        for which in sorted(range(len(glanced)), key=lambda which: not glanced[which].is_value_finite):
            if glanced[which].bad:
                ways.setdefault(glanced[which].bad, which)
        first = list(ways.values())[:_CHECKED] or [0]
        rest = [which for which in range(len(place.points)) if which not in first]
        return first, rest[: _CHECKED - len(first)]

    def _state(self, place: Place, done: set[int]) -> None:
        """Say where a gradient is not finite, if no check has said more."""
        glanced = self._glances[place]
        told = {leaf for which in done if glanced for leaf in glanced[which].bad}
        bad = [which for which, one in enumerate(glanced) if not told.issuperset(one.bad)]
        if not bad:
            return
        paths = place.points[0].program.point(place.points[0].operands).paths
        found = {leaf for which in bad for leaf in glanced[which].bad} - told
        leaves = tuple(path for leaf, path in enumerate(paths) if leaf in found)
        is_value = all(not glanced[which].is_value_finite for which in bad)
        details = {"bad": len(bad), "states": len(glanced), "value": is_value}
        origin = place.origin
        name = origin.name.rpartition(".")[2]
        self._keep(place, [Finding("nan", "error", "states", leaves, origin.file, origin.line, name, details=details)])

    def _keep(self, place: Place, findings: Iterable[Finding]) -> None:
        met = place.running or self._settings.line(*place.where)
        for finding in map(functools.partial(self._as_called, place), findings):
            number = SEVERITIES.index(finding.severity)
            self._severity[place] = min(number, self._severity.get(place, number))
            self.found.append(Found(finding.to_dict(), place.origin.name, met, place.is_called))

    def _as_called(self, place: Place, finding: Finding) -> Finding:
        """A finding where nobody asked for the derivative: a zero without a path, or at some states only, is a note."""
        if not place.is_called or finding.kind != "zero" or finding.severity != "warning":
            return finding
        paths = place.points[0].program.point(place.points[0].operands).paths
        numbers = [leaf for leaf, path in enumerate(paths) if path in finding.leaves]
        is_alive = all(any(one.sizes[leaf] > 0 for one in self._glances[place]) for leaf in numbers)
        is_asked = bool(self._settings.wrt) or finding.reason != "no path"
        return finding if is_asked and not is_alive else dataclasses.replace(finding, severity="info")

    def search(self, places: Sequence[Place]) -> None:
        """Search near the first point of each program, wherever it is differentiated; the worst first."""
        # A reverse derivative, if there is one, is wrong wherever a forward one is.
        first = {place.kind: place for place in sorted(places, key=lambda place: -place.is_forward)}
        ordered = sorted(first.values(), key=lambda place: self._severity.get(place, len(SEVERITIES)))
        for number, place in enumerate(ordered, 1):
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

        program, operands, _ = point
        try:
            watch()
            seconds = until - time.monotonic()
            if program.operations * _COMPILING > seconds:
                raise _OutOfTime
            with _as_it_ran(place):
                checked = check(
                    program.function(operands),
                    forward=place.is_forward,
                    search=search and seconds,
                    progress=watch,
                    intended=self._settings.intended,
                )
                report = checked(program.point(operands))
        except _OutOfTime:
            size = f" ({program.operations} operations)" if which == "one function" else ""
            self._leave(what, place, f"the time for {which} was up{size}")
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
        stale = {finding.details["entry"] for finding in report.findings if finding.kind == "intended"}
        self.used.update(set(self._settings.intended) - stale)
        self._keep(place, [finding for finding in report.findings if finding.kind != "intended"])
        return report

    def _function(self, place: Place) -> tuple[str, str]:
        return place.origin.name, self._settings.line(place.origin.file, place.origin.line)

    def _leave(self, what: str, place: Place, reason: str) -> None:
        self.left.append(Left(what, place.origin.name, self._settings.line(*place.where), reason))


@contextlib.contextmanager
def _as_it_ran(place: Place) -> Iterator[None]:
    """A context with the settings under which a function ran; it has warned then, and would raise under `-W error`."""
    with place.conditions.again(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _another(point: Point, seen: Glance) -> str:
    """How running a function again differs from its call, beyond what a new compilation changes; empty if it does not.

    A function may ask whether an argument is a number of Python, which it is no more when it is differentiated.
    """
    if point.returned is None:
        return ""
    if [np.shape(value) for value in seen.outputs] != [np.shape(value) for value in point.returned]:
        return "it returns other shapes when it is traced: it may ask for the type of a number"
    is_same = all(map(_is_close, seen.outputs, point.returned))
    return "" if is_same else "it returns something else when it runs again"


def _is_close(one: Any, other: Any) -> bool:
    first, second = (np.asarray(value).astype(np.complex128) for value in (one, other))
    both = np.isfinite(first) & np.isfinite(second)
    size = np.abs(second[both]).max(initial=0.0)
    return bool((np.abs(first[both] - second[both]) <= _SAME * size + np.finfo(np.float32).tiny).all())


def _gathered(found: list[Found], settings: Settings, used: set[str]) -> tuple[list[Cause], list[tuple[str, str]]]:
    """What was found by its cause, and the entries of `intended` that match none of it and were not used before."""
    causes: list[Cause] = []
    for finding, function, met, is_called in found:
        meant = [entry for entry in settings.intended if _is_meant(entry, finding, function)]
        used.update(meant)
        if meant or COMMENT in linecache.getline(finding["file"], finding["line"]):
            finding = {**finding, "severity": "info", "intended": True}
        where = ([], [met]) if is_called else ([met], [])
        causes.append(Cause(finding, [function], *where))
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
            own_lists = (list(names) for names in cause[1:])
            merged[key] = Cause({**finding, "leaves": list(finding["leaves"])}, *own_lists)
            continue
        lists = *zip(known[1:], cause[1:], strict=True), (known.finding["leaves"], finding["leaves"])
        for own, new in lists:
            own += [item for item in new if item not in own]
    return sorted(merged.values(), key=lambda cause: SEVERITIES.index(cause.finding["severity"]))


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
