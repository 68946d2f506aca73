"""How a report is written: a table of the leaves, then the messages, as text and as HTML.

Paths and lines of code are never cut or broken: one looks for them, or clicks on them.
"""

import html
import itertools
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .._display import ROOT, columns, html_row, padded, printable
from .finding import Finding

if TYPE_CHECKING:
    from .report import GradientReport, Row

_GAP = "  "
_STYLE = "style='text-align: left; white-space: nowrap'"
_COLUMNS = 100
# The most that a column is padded to; a longer entry moves the rest of its own line only.
_WIDEST = (48, 24, 24, 9)
_HEADLINE = 72
_SAID = {"error": "error", "warning": "warning", "info": "note"}
# So many leaves in a row with nothing to tell are shown in part.
_FOLDED = 200
_SHOWN = 10
_LISTED = 20
# What a message quotes: paths and code.
_QUOTED = re.compile(r"`[^`\n]*`")
# Not in any text, since `printable` escapes it; `textwrap` does not break at it.
_UNBROKEN = "\N{NO-BREAK SPACE}"


class _Line(NamedTuple):
    """A line of the table: a leaf, a further finding of it, or a number of leaves that are left out."""

    path: str
    type: str
    verdict: str
    gradient: str
    found: str


class _Entry(NamedTuple):
    """Findings that differ in their leaves alone."""

    finding: Finding
    leaves: list[str]

    def lines(self) -> Iterator[str]:
        finding, leaves = self.finding, [path for path in self.leaves if path]
        title = f"{_SAID[finding.severity]}: {_located(finding)}"
        if leaves:
            shown = ", ".join(leaves[:_LISTED])
            more = f" and {len(leaves) - _LISTED:,} more" if len(leaves) > _LISTED else ""
            title = f"{title} in {shown}{more}"
        yield from _wrapped(_glued(title, finding.where, *leaves[:_LISTED]), _GAP)
        for line in _glued(finding.message.strip(), finding.where, *leaves).split("\n"):
            yield from _wrapped(line.strip(), _GAP * 2 + " " * (len(line) - len(line.lstrip())))


def text(report: "GradientReport") -> str:
    """Write a report for a terminal."""
    lines = list(_lines(report))
    head = _head(lines)
    widths = [min(most, max(columns(line[i]) for line in [head, *lines])) for i, most in enumerate(_WIDEST)]
    widths.append(len(head.found))
    rule = ["-" * width for width in widths]
    table = [_GAP.join(map(padded, line, widths)).rstrip() for line in [head, rule, *lines]]
    return "\n\n".join([_title(report), "\n".join(table), _below(report)])


def markup(report: "GradientReport") -> str:
    """Write a report for a notebook, without colours of its own."""
    lines = list(_lines(report))
    parts = [f"<p><strong>{html.escape(_title(report))}</strong></p>", "<table>"]
    parts += ["<thead>", html_row("th", _head(lines)), "</thead>", "<tbody>", *map(_html_line, lines), "</tbody>"]
    return "\n".join(["<div>", *parts, "</table>", f"<pre>{html.escape(_below(report))}</pre>", "</div>"])


# --- the table ---------------------------------------------------------------------------------------------------


def _lines(report: "GradientReport") -> Iterator[_Line]:
    """The lines of the table; leaves in a row that are alike and have nothing to tell are folded if they are many."""
    found = defaultdict(list)
    for finding in report.findings:
        found[finding.leaf].append(finding)
    if not _is_one_leaf(report):
        found.pop("", None)
    for quiet, group in itertools.groupby(report.rows, lambda row: None if found.get(row.path) else row.status):
        rows = list(group)
        if quiet is None or len(rows) <= _FOLDED:
            yield from itertools.chain.from_iterable(_leaf(row, found.get(row.path, [])) for row in rows)
            continue
        hidden = len(rows) - 2 * _SHOWN
        yield from (line for row in rows[:_SHOWN] for line in _leaf(row, []))
        yield _Line(f"... {hidden:,} more leaves", "", _verdict(rows[0], []), "", "")
        yield from (line for row in rows[-_SHOWN:] for line in _leaf(row, []))


def _leaf(row: "Row", findings: list[Finding]) -> Iterator[_Line]:
    path = printable(row.path) or ROOT
    size = "" if row.gradient is None else f"{float(row.gradient):.3g}"
    found = "; also ".join(
        [*map(_headed, findings[:1]), *dict.fromkeys(printable(_located(finding)) for finding in findings[1:])]
    )
    yield _Line(path, printable(row.type), printable(_verdict(row, findings)), size, found)
    for finding in findings[1:]:
        yield _Line(path, "", "", "", _headed(finding))


def _verdict(row: "Row", findings: list[Finding]) -> str:
    """The worst that was found, and what the leaf is if it was not checked to the end."""
    severity = findings[0].severity if findings else "info"
    if row.status == "checked":
        return "ok" if severity == "info" else severity
    return row.status if severity == "info" else f"{severity}, {row.status}"


def _headed(finding: Finding) -> str:
    """The kind, the line of code, and the first words of the message."""
    message = _glued(finding.message.strip(), finding.where, finding.leaf)
    # The line stands before these words already.
    message = message.replace(f" at {finding.where}", "") if finding.where else message
    words = re.split(r"[;.] |\n", message, maxsplit=1)[0].rstrip(".:;")
    if len(words) > _HEADLINE and " " in words[:_HEADLINE]:
        words = f"{words[:_HEADLINE].rpartition(' ')[0]} ..."
    return ": ".join(filter(None, [printable(_located(finding)), words.replace(_UNBROKEN, " ")]))


def _located(finding: Finding) -> str:
    return f"{finding.kind} at {finding.where}" if finding.where else finding.kind


def _head(lines: list[_Line]) -> _Line:
    return _Line("leaf", "type", "verdict", "gradient", "found" if any(line.found for line in lines) else "")


def _html_line(line: _Line) -> str:
    cells = [html.escape(cell) for cell in line]
    if line.verdict.startswith(("error", "warning")):
        cells[2] = f"<strong>{cells[2]}</strong>"
    # The style of a notebook is that of each cell, so it is no use to say this once.
    return f"<tr>{''.join(f'<td {_STYLE}>{cell}</td>' for cell in cells)}</tr>"


# --- around it ---------------------------------------------------------------------------------------------------


def _title(report: "GradientReport") -> str:
    counts = Counter(finding.severity for finding in report.findings)
    said = [_counted(counts[severity], name) for severity, name in _SAID.items() if counts[severity]]
    verdict = ", ".join(said if counts["error"] or counts["warning"] else ["ok", *said])
    return f"{printable(report.function)}: {verdict} in {_counted(len(report.rows), 'leaf', 'leaves')}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _below(report: "GradientReport") -> str:
    """What stands below the table: the messages, and what was done."""
    totals = _totals(report)
    label = max(len(name) for name, _ in totals)
    blocks = [
        [heading, *(line for entry in entries for line in entry.lines())] for heading, entries in _sections(report)
    ]
    blocks.append([f"{name:{label}}{_GAP}{total}" for name, total in totals])
    return "\n\n".join("\n".join(block) for block in blocks)


def _totals(report: "GradientReport") -> list[tuple[str, str]]:
    leaves, statuses = len(report.rows), Counter(row.status for row in report.rows)
    checked = statuses["checked"] + statuses["inconclusive"]
    totals = [("checked", f"{checked:,} of {_counted(leaves, 'leaf', 'leaves')}")]
    if statuses["inconclusive"]:
        what = _counted(statuses["inconclusive"], "leaf", "leaves")
        totals.append(("inconclusive", f"{what}: finite differences neither confirm nor refute the gradient there"))
    if report.cost:
        totals.append(("evaluations", ", ".join(f"{count:,} {what}" for what, count in report.cost.items())))
    return totals


def _sections(report: "GradientReport") -> Iterator[tuple[str, list[_Entry]]]:
    """The messages, errors first: those of the whole function, then those of leaves."""
    merged: dict[Finding, list[str]] = defaultdict(list)
    for finding in report.findings:
        merged[finding._replace(leaf="")].append(finding.leaf)
    entries = [_Entry(finding, list(dict.fromkeys(leaves))) for finding, leaves in merged.items()]
    if _is_one_leaf(report):
        sections = {"What was found": entries}
    else:
        # One fault may be told of the whole function and of leaves.
        sections = {
            "Of the whole function": [entry for entry in entries if "" in entry.leaves],
            "Of leaves": [entry for entry in entries if "" not in entry.leaves],
        }
    return ((heading, chosen) for heading, chosen in sections.items() if chosen)


def _is_one_leaf(report: "GradientReport") -> bool:
    """Whether the tree is a leaf: then what is true of the whole function is told in its line."""
    return len(report.rows) == 1 and not report.rows[0].path


def _wrapped(line: str, indent: str) -> Iterator[str]:
    wrapper = textwrap.TextWrapper(
        _COLUMNS, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return (part.replace(_UNBROKEN, " ") for part in wrapper.wrap(line))


def _glued(text: str, *whole: str) -> str:
    """Escape what does not print, and mark the blanks at which no line may end: in `...`, and in these names."""
    text = "\n".join(map(printable, text.split("\n")))
    for name in whole:
        if " " in name:
            text = text.replace(printable(name), printable(name).replace(" ", _UNBROKEN))
    return _QUOTED.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
