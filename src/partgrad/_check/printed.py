"""A report as text and as HTML: a table of the leaves, the worst first, then the messages."""

import html
import itertools
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._display import (
    COLUMNS,
    GAP,
    ROOT,
    cells,
    columns,
    printable,
    shortened,
    styled,
    symbol,
    table,
    within,
)
from .finding import Finding, located
from .verdict import ERROR, INCONCLUSIVE, STOPPED
from .words import message

# Those of `report.py`, which is printed here.
GradientReport: TypeAlias = Any
LeafRow: TypeAlias = Any

# The widest that types, verdicts, gradients and findings may be; the path gets the rest of the line.
_WIDEST = (12, 14, 9, 24)
_SAID = {"error": "error", "warning": "warning", "info": "note"}
_VERDICTS = ("error", "stopped", "inconclusive", "warning", "ok")
# If more leaves than this in a row have nothing to report, only some of them are shown.
_FOLDED = 200
_SHOWN = 10
_LISTED = 20
# What messages quote: paths and code.
_QUOTED = re.compile(r"`[^`\n]*`")
# Never in a text, because `printable` escapes it.
_UNBROKEN = "\N{NO-BREAK SPACE}"


# --- the table ---------------------------------------------------------------------------------------------------


class _TableLine(NamedTuple):
    """A line of the table: a leaf, or a number of omitted leaves."""

    path: str
    type: str
    verdict: str
    gradient: str
    found: str


_HEAD = _TableLine("leaf", "type", "verdict", "gradient", "found")


def text(report: GradientReport) -> str:
    rows, count = _lines(report), 5 if report.findings else 4
    lines = table(_HEAD[:count], [line[:count] for line in rows], _WIDEST[: count - 1])
    blocks = ["\n".join(entry.lines()) for entry in _entries(report)]
    return "\n\n".join([_title(report), "\n".join(lines), *(["\n".join(blocks)] if blocks else []), _below(report)])


def _lines(report: GradientReport) -> list[_TableLine]:
    """The lines of the table; long runs of similar leaves with nothing to report are folded."""
    found = defaultdict(list)
    for finding in report.findings:
        for leaf in finding.leaves or ([""] if _is_one_leaf(report) else []):
            found[leaf].append(finding)
    lines: list[_TableLine] = []
    rank = lambda row: _rank(_verdict(row, found.get(row.path, [])))
    quiet = lambda row: None if found.get(row.path) else row.status
    for status, group in itertools.groupby(sorted(report.rows, key=rank), quiet):
        rows = list(group)
        if status is None or len(rows) <= _FOLDED:
            lines += (_leaf(row, found.get(row.path, [])) for row in rows)
            continue
        hidden = f"... {len(rows) - 2 * _SHOWN:,} more leaves"
        lines += (_leaf(row, []) for row in rows[:_SHOWN])
        lines.append(_TableLine(hidden, "", _verdict(rows[0], []), "", ""))
        lines += (_leaf(row, []) for row in rows[-_SHOWN:])
    return lines


def _leaf(row: LeafRow, findings: list[Finding]) -> _TableLine:
    size = "" if row.gradient is None else f"{float(row.gradient):.3g}"
    more = f" (+{len(findings) - 1})" if len(findings) > 1 else ""
    found = f"{shortened(printable(located(findings[0])), _WIDEST[-1] - len(more))}{more}" if findings else ""
    return _TableLine(row.path or ROOT, row.type, _verdict(row, findings), size, found)


def _verdict(row: LeafRow, findings: list[Finding]) -> str:
    """The worst that is known about a leaf."""
    if row.verdict is None:
        return row.status
    if row.verdict != "ok":
        return row.verdict
    return "warning" if any(finding.severity == "warning" for finding in findings) else "ok"


def _rank(verdict: str) -> int:
    return _VERDICTS.index(verdict) if verdict in _VERDICTS else len(_VERDICTS) - 1


# --- around it ---------------------------------------------------------------------------------------------------


def _title(report: GradientReport) -> str:
    verdicts, said = Counter(row.verdict for row in report.rows), said_of(report.findings)
    leaves, stopped, undecided = len(report.rows), verdicts[STOPPED], verdicts[INCONCLUSIVE]
    if report.verdict == STOPPED:
        title = ", ".join([f"stopped in {stopped:,} of {counted(leaves, 'leaf', 'leaves')}{_how_far(report)}", *said])
    else:
        said = said if report.verdict == ERROR else [report.verdict, *said]
        title = f"{', '.join(said)} in {counted(leaves, 'leaf', 'leaves')}"
        title += f", {stopped:,} of which {_is(stopped)} stopped" if stopped else ""
    if undecided and leaves > 1:
        title += f", {undecided:,} of which {_is(undecided)} not decided"
    name = shortened(printable(report.function), COLUMNS - len(title) - 2)
    return f"{name}: {title}"


def said_of(findings: Iterable[Finding]) -> list[str]:
    """How many errors, warnings and notes there are, in words."""
    counts = Counter(finding.severity for finding in findings)
    return [counted(counts[severity], name) for severity, name in _SAID.items() if counts[severity]]


def _how_far(report: GradientReport) -> str:
    """How far the derivatives that are stopped are off, where one is furthest."""
    compared = [f.figures for f in report.findings if f.kind == "mismatch" and f.figures and not f.intended]
    if not compared:
        return ""
    worst = max(compared, key=lambda figures: figures.relative)
    return f" ({worst.derivative:.3g} for a slope of {worst.slope:.3g})"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _below(report: GradientReport) -> str:
    """The totals below the table."""
    leaves, verdicts = len(report.rows), Counter(row.verdict for row in report.rows)
    checked = sum(verdicts.values()) - verdicts[None] - verdicts[INCONCLUSIVE]
    totals = [("checked", f"{checked:,} of {counted(leaves, 'leaf', 'leaves')}")]
    if report.cost:
        totals.append(("evaluations", ", ".join(f"{count:,} {what}" for what, count in report.cost.items())))
    totals += [("with", note) for note in report.notes]
    return totals_of(totals)


def totals_of(totals: Sequence[tuple[str, str]]) -> str:
    """Lines of names and totals."""
    label = max(len(name) for name, _ in totals)
    return "\n".join(f"{name:{label}}{GAP}{total}" for name, total in totals)


def _entries(report: GradientReport) -> list["Entry"]:
    return list(map(Entry, report.findings))


class Entry(NamedTuple):
    """A finding below the table, and what is said of it after its title."""

    finding: Finding
    after: str = ""

    def title(self) -> str:
        """What it is, where, and in which leaves."""
        paths = [path for path in self.finding.leaves if path]
        listed = ", ".join(shortened(printable(path), COLUMNS - 4) for path in paths[:_LISTED])
        more = f" and {len(paths) - _LISTED:,} more" if len(paths) > _LISTED else ""
        where = f" in {listed}{more}" if paths else ""
        return f"{_SAID[self.finding.severity]}: {located(self.finding)}{where}{self.after}"

    def lines(self) -> Iterator[str]:
        """The title, the line of the user's code, and the message."""
        finding = self.finding
        yield from _wrapped(_glued(self.title(), finding.where, *finding.leaves[:_LISTED]), "")
        if code := source(finding):
            yield f"{GAP}| {shortened(printable(code), COLUMNS - 4)}"
        for line in _glued(message(finding).strip(), finding.where, *finding.leaves[:_LISTED]).split("\n"):
            yield from _wrapped(line.strip(), GAP)

    def markup(self) -> str:
        """The same as HTML that unfolds."""
        finding = self.finding
        is_open = " open" if finding.severity == "error" else ""
        code, said = html.escape(source(finding)), html.escape(message(finding).strip())
        return (
            f'<details class="pg-message"{is_open}><summary>{marked(finding.severity, self.title())}</summary>'
            f"{f'<pre>{code}</pre>' if code else ''}<p>{said}</p></details>"
        )


def source(finding: Finding) -> str:
    """The line of the user's code; empty if it cannot be read."""
    return linecache.getline(finding.file, finding.line).strip() if finding.file else ""


def _is_one_leaf(report: GradientReport) -> bool:
    """Whether the tree is a single leaf, whose line then also reports what concerns the whole function."""
    return len(report.rows) == 1 and not report.rows[0].path


def _wrapped(line: str, indent: str) -> Iterator[str]:
    """The lines of a text, broken between words; a word is broken only if it does not fit on any line."""
    taken = indent
    for whole in line.split(" "):
        word = whole
        if columns(taken) + 1 + columns(word) > COLUMNS and taken.strip():
            yield taken.replace(_UNBROKEN, " ")
            taken = indent + GAP * (not indent)
        while columns(taken) + columns(word) > COLUMNS:
            part = within(word, COLUMNS - columns(taken))
            yield (taken + part).replace(_UNBROKEN, " ")
            taken, word = indent + GAP * (not indent), word[len(part) :]
        taken += f" {word}" if taken.strip() else word
    yield taken.replace(_UNBROKEN, " ")


def _glued(text: str, *whole: str) -> str:
    """Escape what does not print, and mark the spaces where no line may break: inside backquotes and these names."""
    text = "\n".join(map(printable, text.split("\n")))
    for name in whole:
        if " " in name:
            text = text.replace(printable(name), printable(name).replace(" ", _UNBROKEN))
    return _QUOTED.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)


# --- in a notebook -----------------------------------------------------------------------------------------------


def markup(report: GradientReport) -> str:
    """The report as HTML, with a symbol for each verdict and messages that unfold."""
    rows = [
        [html.escape(printable(line.path)), html.escape(line.type), marked(line.verdict), line.gradient, found]
        for line in _lines(report)
        for found in [html.escape(line.found)]
    ]
    parts = [f'<div class="pg-head"><strong>{html.escape(_title(report))}</strong></div>', cells(_HEAD, rows)]
    parts += [entry.markup() for entry in _entries(report)]
    return styled("\n".join([*parts, f"<pre>{html.escape(_below(report))}</pre>"]))


def marked(verdict: str, text: str = "") -> str:
    """A verdict as HTML, with its symbol."""
    return f"{symbol(verdict)} {html.escape(text or verdict)}"
