"""The result of a check as data, text and HTML: a table of the leaves, the worst first, then the messages."""

import html
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from ..errors import CheckError
from .finding import SEVERITIES, Finding

# The widest that types, verdicts, gradients and findings may be; the path gets the rest of the line.
_WIDEST = (12, 14, 9, 24)
_SAID = {"error": "error", "warning": "warning", "info": "note"}
_VERDICTS = ("error", "warning", "inconclusive", "ok")
# If more leaves than this in a row have nothing to report, only some of them are shown.
_FOLDED = 200
_SHOWN = 10
_LISTED = 20
# What messages quote: paths and code.
_QUOTED = re.compile(r"`[^`\n]*`")
# Never in a text, because `printable` escapes it.
_UNBROKEN = "\N{NO-BREAK SPACE}"


class LeafRow(NamedTuple):
    """One leaf.

    Attributes:
        path: Its path; empty where the tree is one leaf.
        type: Its shape and dtype, as `f32[3,4]`, or the name of its type.
        status: `checked`; `inconclusive`, where no difference could confirm or refute its gradient; or why it was not
            differentiated, as in `partgrad.summary`.
        gradient: The root mean square of its gradient's entries; None where there is none.
        dead: How many entries of its gradient are zero; None where there is none.
    """

    path: str
    type: str
    status: str
    gradient: float | None
    dead: int | None = None


class GradientReport:
    """What `partgrad.check` found about a gradient; it prints as a table.

    The table has a line for each leaf, worst first, with its verdict and the worst finding; the messages follow.

    Attributes:
        function: The name of the function.
        rows: One row per leaf, in the order of `jax.tree.leaves`.
        findings: What is wrong or worth knowing, as tuples `(kind, severity, leaf, where, message)`, errors first.
        cost: How many times the function, its derivatives, and so on were evaluated.
        notes: Anything unusual about how it was evaluated.
    """

    def __init__(
        self,
        function: str,
        rows: tuple[LeafRow, ...],
        findings: tuple[Finding, ...],
        cost: dict[str, int],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.function = function
        self.rows = rows
        self.findings = tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
        self.cost = cost
        self.notes = notes

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def raise_if_failed(self) -> "GradientReport":
        """Raise an error that shows the table if any finding is an error.

        Returns:
            The report itself.

        Raises:
            CheckError: If not `ok`. It is an `AssertionError` as well.
        """
        if not self.ok:
            raise CheckError(
                f"The gradient of `{self.function}` did not pass its check.\n\n{self}\n",
                "Expected no finding of severity error.",
                fix="start with the first error below the table; `partgrad.check` returns the report as data.",
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data, for `json.dumps`.

        Returns:
            `function`, `ok` and `cost`; `rows` and `findings` as lists of dicts. A gradient that is not finite is the
            string `"nan"` or `"inf"`, because JSON has no such numbers.
        """
        return {
            "function": self.function,
            "ok": self.ok,
            "rows": [row._replace(gradient=_plain(row.gradient))._asdict() for row in self.rows],
            "findings": [finding._asdict() for finding in self.findings],
            "cost": {what: int(count) for what, count in self.cost.items()},
        }

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return _markup(self)


def _plain(number: Any) -> Any:
    if number is None:
        return None
    return float(number) if math.isfinite(number) else str(float(number))


# --- the table ---------------------------------------------------------------------------------------------------


class _TableLine(NamedTuple):
    """A line of the table: a leaf, or a number of omitted leaves."""

    path: str
    type: str
    verdict: str
    gradient: str
    found: str


_HEAD = _TableLine("leaf", "type", "verdict", "gradient", "found")


def _text(report: GradientReport) -> str:
    rows, count = _lines(report), 5 if report.findings else 4
    lines = table(_HEAD[:count], [line[:count] for line in rows], _WIDEST[: count - 1])
    blocks = ["\n".join(entry.lines()) for entry in _entries(report)]
    return "\n\n".join([_title(report), "\n".join(lines), *(["\n".join(blocks)] if blocks else []), _below(report)])


def _lines(report: GradientReport) -> list[_TableLine]:
    """The lines of the table; long runs of similar leaves with nothing to report are folded."""
    found = defaultdict(list)
    for finding in report.findings:
        found[finding.leaf].append(finding)
    if not _is_one_leaf(report):
        found.pop("", None)
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
    found = f"{shortened(printable(_located(findings[0])), _WIDEST[-1] - len(more))}{more}" if findings else ""
    return _TableLine(row.path or ROOT, row.type, _verdict(row, findings), size, found)


def _verdict(row: LeafRow, findings: list[Finding]) -> str:
    """The worst that is known about a leaf."""
    severity = findings[0].severity if findings else "info"
    if severity == "error" or (severity == "warning" and row.status == "checked"):
        return severity
    return "ok" if row.status == "checked" else row.status


def _rank(verdict: str) -> int:
    return _VERDICTS.index(verdict) if verdict in _VERDICTS else len(_VERDICTS) - 1


def _located(finding: Finding) -> str:
    return f"{finding.kind} at {finding.where}" if finding.where else finding.kind


# --- around it ---------------------------------------------------------------------------------------------------


def _title(report: GradientReport) -> str:
    counts = Counter(finding.severity for finding in report.findings)
    leaves, unsure = len(report.rows), sum(row.status == "inconclusive" for row in report.rows)
    said = [_counted(counts[severity], name) for severity, name in _SAID.items() if counts[severity]]
    if not (counts["error"] or counts["warning"]):
        said.insert(0, "inconclusive" if unsure else "ok")
    title = f"{', '.join(said)} in {_counted(leaves, 'leaf', 'leaves')}"
    if unsure:
        title += f", {unsure:,} of which {'is' if unsure == 1 else 'are'} not decided"
    name = shortened(printable(report.function), COLUMNS - len(title) - 2)
    return f"{name}: {title}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _below(report: GradientReport) -> str:
    """The totals below the table."""
    leaves, statuses = len(report.rows), Counter(row.status for row in report.rows)
    totals = [("checked", f"{statuses['checked']:,} of {_counted(leaves, 'leaf', 'leaves')}")]
    if report.cost:
        totals.append(("evaluations", ", ".join(f"{count:,} {what}" for what, count in report.cost.items())))
    totals += [("with", note) for note in report.notes]
    label = max(len(name) for name, _ in totals)
    return "\n".join(f"{name:{label}}{GAP}{total}" for name, total in totals)


class _Entry(NamedTuple):
    """Findings that differ only in their leaves."""

    finding: Finding
    leaves: list[str]

    def title(self) -> str:
        paths = [path for path in self.leaves if path]
        listed = ", ".join(shortened(printable(path), COLUMNS - 4) for path in paths[:_LISTED])
        more = f" and {len(paths) - _LISTED:,} more" if len(paths) > _LISTED else ""
        return f"{_SAID[self.finding.severity]}: {_located(self.finding)}{f' in {listed}{more}' if paths else ''}"

    def lines(self) -> Iterator[str]:
        finding = self.finding
        yield from _wrapped(_glued(self.title(), finding.where, *self.leaves[:_LISTED]), "")
        for line in _glued(finding.message.strip(), finding.where, *self.leaves).split("\n"):
            yield from _wrapped(line.strip(), GAP + " " * (len(line) - len(line.lstrip())))


def _entries(report: GradientReport) -> list[_Entry]:
    """The messages, errors first; a message that concerns several leaves appears once."""
    merged: dict[Finding, list[str]] = defaultdict(list)
    for finding in report.findings:
        merged[finding._replace(leaf="")].append(finding.leaf)
    return [_Entry(finding, list(dict.fromkeys(leaves))) for finding, leaves in merged.items()]


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


def _markup(report: GradientReport) -> str:
    """The report as HTML, with a symbol for each verdict and messages that unfold."""
    rows = [
        [html.escape(printable(line.path)), html.escape(line.type), _marked(line.verdict), line.gradient, found]
        for line in _lines(report)
        for found in [html.escape(line.found)]
    ]
    parts = [f'<div class="pg-head"><strong>{html.escape(_title(report))}</strong></div>', cells(_HEAD, rows)]
    for entry in _entries(report):
        is_open = " open" if entry.finding.severity == "error" else ""
        message = html.escape(entry.finding.message.strip())
        parts.append(
            f'<details class="pg-message"{is_open}><summary>{_marked(entry.finding.severity, entry.title())}</summary>'
            f"<p>{message}</p></details>"
        )
    return styled("\n".join([*parts, f"<pre>{html.escape(_below(report))}</pre>"]))


def _marked(verdict: str, text: str = "") -> str:
    return f"{symbol(verdict)} {html.escape(text or verdict)}"
