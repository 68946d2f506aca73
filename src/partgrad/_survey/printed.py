"""A survey as text and as HTML: a table of the leaves, one of the patterns, then the messages, as in a check."""

import html
from collections.abc import Iterator
from typing import Any, TypeAlias

from .._check import ERROR, OK, Entry, counted, located, marked, said_of, totals_of
from .._display import COLUMNS, ROOT, cells, printable, shortened, styled, table

# Those of `report.py`, which are printed here.
SurveyReport: TypeAlias = Any
SurveyRow: TypeAlias = Any
Pattern: TypeAlias = Any

_HEAD = ("leaf", "verdict", "zero", "nan", "sign", "5 %", "50 %", "95 %", "found")
_WIDEST = (12, 5, 5, 5, 7, 7, 7, 14)
_OF_PATTERNS = ("states", "zero", "not finite", "found")
_WIDEST_OF_PATTERNS = (24, 20, 22)
# If there are more rows, or patterns, only the first are shown.
_MOST_ROWS, _MOST_PATTERNS, _MOST_OUTLIERS, _NAMED = 60, 12, 5, 3


def text(report: SurveyReport) -> str:
    """The report for a terminal."""
    blocks = [_title(report), "\n".join(table(_HEAD, _rows(report), _WIDEST))]
    if len(report.patterns) > 1:
        blocks.append("\n".join(table(_OF_PATTERNS, _patterns(report), _WIDEST_OF_PATTERNS)))
    if report.findings:
        blocks.append("\n".join(line for entry in _entries(report) for line in entry.lines()))
    return "\n\n".join([*blocks, _below(report)])


def markup(report: SurveyReport) -> str:
    """The report for a notebook."""
    escaped = lambda rows: [[html.escape(printable(cell)) for cell in row] for row in rows]
    rows = escaped(_rows(report))
    for row in rows:
        row[1] = marked(row[1]) if row[1] else ""
    parts = [f'<div class="pg-head"><strong>{html.escape(_title(report))}</strong></div>', cells(_HEAD, rows)]
    if len(report.patterns) > 1:
        parts.append(cells(_OF_PATTERNS, escaped(_patterns(report))))
    parts += [entry.markup() for entry in _entries(report)]
    return styled("\n".join([*parts, f"<pre>{html.escape(_below(report))}</pre>"]))


def _title(report: SurveyReport) -> str:
    said = said_of(report.findings)
    said = said if report.verdict == ERROR and said else [report.verdict, *said]
    leaves, states = counted(len(report.paths), "leaf", "leaves"), counted(report.states, "state")
    title = f"{', '.join(said)} in {leaves} over {states}"
    return f"{shortened(printable(report.function), COLUMNS - len(title) - 2)}: {title}"


def _rows(report: SurveyReport) -> list[tuple[str, ...]]:
    found: dict[str, list[Any]] = {}
    for finding in report.findings:
        for leaf in finding.leaves or ([""] if len(report.paths) == 1 else []):
            found.setdefault(leaf, []).append(finding)
    # The worst first; the rows of its entries stay with a leaf.
    groups: list[list[SurveyRow]] = []
    for row in report.rows:
        if row.verdict:
            groups.append([])
        groups[-1].append(row)
    order = ("error", "stopped", "inconclusive", "ok")
    groups.sort(key=lambda group: (order.index(group[0].verdict), -group[0].not_finite, -group[0].zero))
    rows = [_row(row, found.get(row.path, [])) for group in groups for row in group]
    if len(rows) > _MOST_ROWS:
        hidden = len(rows) - _MOST_ROWS
        rows = [*rows[:_MOST_ROWS], (f"... {hidden:,} more rows", *[""] * (len(_HEAD) - 1))]
    return rows


def _row(row: SurveyRow, found: list[Any]) -> tuple[str, ...]:
    sizes = ["", "", ""] if row.size is None else [_number(size) for size in row.size]
    verdict = row.verdict or ""
    if verdict == OK and any(finding.severity == "warning" for finding in found):
        verdict = "warning"
    more = f" (+{len(found) - 1})" if len(found) > 1 else ""
    named = f"{found[0].kind}{more}" if found else ""
    return (row.path or ROOT, verdict, *map(_share, (row.zero, row.not_finite, row.sign_changes)), *sizes, named)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def _share(value: float) -> str:
    """A share in percent: 0 % only for none, and 100 % only for all."""
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    return "<1%" if value < 0.01 else ">99%" if value > 0.99 else f"{value:.0%}"


def _patterns(report: SurveyReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for pattern in report.patterns[:_MOST_PATTERNS]:
        own = [f for f in report.findings if pattern.state in f.details.get("seen", ()) and f.severity != "info"]
        said = located(own[0]) if own else pattern.verdict or "not checked"
        rows.append((f"{pattern.states:,}", _listed(pattern.zero), _listed(pattern.not_finite), said))
    if len(report.patterns) > _MOST_PATTERNS:
        rest = report.patterns[_MOST_PATTERNS:]
        rows.append((f"{sum(p.states for p in rest):,}", f"... {len(rest):,} more patterns", "", ""))
    return rows


def _listed(paths: tuple[str, ...]) -> str:
    named = ", ".join(path or ROOT for path in paths[:_NAMED])
    return f"{named} and {len(paths) - _NAMED} more" if len(paths) > _NAMED else named


def _entries(report: SurveyReport) -> Iterator[Entry]:
    for finding in report.findings:
        count, state = finding.details["states"], finding.details["state"]
        others = f", at {count:,} of {counted(report.states, 'state')}, such as state {state}"
        yield Entry(finding, others if count else f", at state {state}")


def _below(report: SurveyReport) -> str:
    """The totals below the tables."""
    checked = sum(pattern.verdict is not None for pattern in report.patterns)
    of_patterns = counted(len(report.patterns), "pattern")
    more = report.cost["checks"] - checked
    doubted = f", and {counted(more, 'state')} where differences are off" if more else ""
    totals = [("checked", f"a state of {checked:,} of {of_patterns}{doubted}")]
    outliers = [_outliers(row, report) for row in report.rows if row.outliers]
    totals += [("outliers", said) for said in outliers[:_MOST_OUTLIERS]]
    if report.dead:
        totals.append(("dead", f"at all states: {_listed(report.dead)}"))
    return totals_of([*totals, *(("with", note) for note in report.notes)])


def _outliers(row: SurveyRow, report: SurveyReport) -> str:
    """Where a gradient is very much larger than elsewhere, and how much."""
    largest = report.sizes[report.paths.index(row.path)][row.outliers[0]]
    times = f", {largest / row.size[1]:.0e} times the median" if row.size and row.size[1] > 0 else ""
    where = f"{counted(len(row.outliers), 'state')}, the largest state {row.outliers[0]}"
    return f"{row.path or ROOT} at {where}: {largest:.2g}{times}"
