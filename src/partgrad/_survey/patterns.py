"""From gradients at many states to a report: rows, patterns, and a check of one state of each pattern."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .._check import ERROR, SEVERITIES, Finding, GradientReport, LeafRow, worst
from .._selection import entry_names
from .._trees import Elements
from .gradients import Array, Gradients
from .report import Pattern, SurveyRow

# So many patterns are checked, the most frequent first, and those in which something is not finite before all.
MOST_CHECKED = 12
# So many entries of a leaf that differ from the others get a row each.
_ENTRIES = 5
# A gradient is an outlier if it is so many times the median, and so far beyond the quartiles of the logarithms.
_TIMES, _QUARTILES = 100.0, 3.0
_PERCENTILES = (5, 50, 95)
# How far off a coarse difference is, where a gradient is doubted: from 0 to 1.
_DOUBTED = 0.1

# The shape of a leaf, and which of its entries are differentiated; None for all.
Place = tuple[tuple[int, ...], Elements]


class Group(NamedTuple):
    """The states of a pattern, and which leaves are zero or not finite there.

    The first stands for the others; if coarse differences are off the gradient somewhere, the one where they are off
    the most is checked as well.
    """

    states: Array
    zero: tuple[int, ...]
    not_finite: tuple[int, ...]
    doubted: tuple[int, ...] = ()

    @property
    def state(self) -> int:
        """The state that stands for the others."""
        return int(self.states[0])

    @property
    def checked(self) -> tuple[int, ...]:
        """The states that are checked."""
        return (self.state, *self.doubted)


def grouped(sizes: Array, doubts: Array) -> list[Group]:
    """The states by the leaves that are zero or not finite there: the most frequent first."""
    kinds = np.where(np.isfinite(sizes), np.where(sizes == 0, 1, 0), 2).astype(np.int8).T
    patterns, number = np.unique(kinds, axis=0, return_inverse=True)
    number = np.ravel(number)
    of = lambda pattern, kind: tuple(np.flatnonzero(pattern == kind).tolist())
    groups = []
    for i, pattern in enumerate(patterns):
        states = np.flatnonzero(number == i)
        most = int(states[np.argmax(doubts[states])])
        doubted = (most,) if doubts[most] > _DOUBTED and most != states[0] else ()
        groups.append(Group(states, of(pattern, 1), of(pattern, 2), doubted))
    return sorted(groups, key=lambda group: (-group.states.size, group.state))


def checked_of(groups: list[Group]) -> list[Group]:
    """The patterns of which a state is checked."""
    return sorted(groups, key=lambda group: (not group.not_finite, -group.states.size))[:MOST_CHECKED]


def patterns_of(groups: list[Group], paths: tuple[str, ...], reports: dict[int, GradientReport]) -> tuple[Pattern, ...]:
    """The patterns, with the verdicts of the checks."""
    named = lambda numbers: tuple(paths[number] for number in numbers)
    checked = lambda group: [reports[state].verdict for state in group.checked if state in reports]
    verdict = lambda group: worst(found) if (found := checked(group)) else None
    return tuple(
        Pattern(named(group.zero), named(group.not_finite), int(group.states.size), group.state, verdict(group))
        for group in groups
    )


def findings_of(groups: list[Group], reports: dict[int, GradientReport]) -> tuple[Finding, ...]:
    """The findings at all states that were checked, each cause once."""
    causes: dict[tuple[Any, ...], list[tuple[Group, int, Finding]]] = {}
    pairs = ((group, state) for group in groups for state in group.checked if state in reports)
    for group, state in pairs:
        for finding in reports[state].findings:
            if finding.reason == "elements":
                # The rows say more, of all states.
                continue
            rule = finding.rule and finding.rule.name
            place = (finding.kind, finding.reason, finding.file, finding.line, finding.operation, rule)
            causes.setdefault((*place, finding.intended), []).append((group, state, finding))
    found = []
    for met in causes.values():
        # At some states a fix helps, at others not.
        _, state, shown = min(met, key=lambda one: (SEVERITIES.index(one[2].severity), one[2].fix is None))
        leaves = tuple(dict.fromkeys(leaf for *_, finding in met for leaf in finding.leaves))
        # What is seen only where a gradient is doubted says nothing of the other states of the pattern.
        counts = {group.state: int(group.states.size) for group, at, _ in met if at == group.state}
        seen = tuple(dict.fromkeys(group.state for group, *_ in met))
        more = {"states": sum(counts.values()), "state": state, "seen": seen}
        found.append(dataclasses.replace(shown, leaves=leaves, details={**shown.details, **more}))
    return tuple(found)


def rows_of(
    gradients: Gradients, leaves: list[LeafRow], places: list[Place], reports: dict[int, GradientReport]
) -> tuple[SurveyRow, ...]:
    """The rows of all leaves, each before those of its entries that differ.

    Args:
        gradients: The gradients.
        leaves: The differentiated leaves.
        places: Of each its shape, and which of its entries are differentiated.
        reports: The checks, by state.
    """
    rows: list[SurveyRow] = []
    for number, leaf in enumerate(leaves):
        verdicts = [row.verdict for report in reports.values() for row in report.rows if row.path == leaf.path]
        sizes = gradients.sizes[number]
        verdict = worst([verdict for verdict in verdicts if verdict is not None])
        verdict = verdict if np.isfinite(sizes).all() else ERROR
        finite = sizes[np.isfinite(sizes)]
        size = tuple(np.percentile(finite, _PERCENTILES).tolist()) if finite.size else None
        rows.append(
            SurveyRow(
                leaf.path,
                leaf.type,
                float(np.mean(sizes == 0)),
                float(np.mean(~np.isfinite(sizes))),
                _signs(gradients, number, slice(None)),
                size,
                _outliers(sizes),
                verdict,
                int(gradients.zero[number].size),
            )
        )
        rows += _of_entries(gradients, number, leaf, places[number])
    return tuple(rows)


def _signs(gradients: Gradients, number: int, entries: Any) -> float:
    rarer = np.minimum(gradients.positive[number], gradients.negative[number])
    chosen = np.ravel(rarer)[entries]
    return float(np.mean(chosen) / gradients.sizes.shape[1]) if chosen.size else 0.0


def _of_entries(gradients: Gradients, number: int, leaf: LeafRow, place: Place) -> list[SurveyRow]:
    """Rows for the entries of a leaf that are zero or not finite at more or fewer states than most."""
    zero, bad = gradients.zero[number], gradients.not_finite[number]
    states = gradients.sizes.shape[1]
    pairs = np.stack([zero.ravel(), bad.ravel()], axis=1)
    kinds, which, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    which = np.ravel(which)
    if len(kinds) < 2:
        return []
    said = lambda entries: (
        float(np.mean(pairs[entries, 0]) / states),
        float(np.mean(pairs[entries, 1]) / states),
        _signs(gradients, number, entries),
    )
    (others,) = np.nonzero(which != np.argmax(counts))
    if others.size <= min(_ENTRIES, zero.size // 2):
        shape, elements = place
        names = entry_names(leaf.path, shape, others if elements is None else elements.ravel()[others])
        return [
            SurveyRow(name, "", *said([entry]), None, (), None, 1) for name, entry in zip(names, others, strict=True)
        ]
    # Where each has its own, those that nothing is learned of, and those that are to blame for a leaf.
    dead, bad_ones = pairs.sum(axis=1) == states, pairs[:, 1] > 0
    named = lambda entries: f"{entries.size:,} entries of {leaf.path or 'it'}"
    return [
        SurveyRow(named(entries), "", *said(entries), None, (), None, int(entries.size))
        for entries in (np.flatnonzero(dead), np.flatnonzero(bad_ones & ~dead))
        if 0 < entries.size < zero.size
    ]


def _outliers(sizes: Array) -> tuple[int, ...]:
    """The states at which a gradient is very much larger than at most others, the largest first."""
    is_alive = np.isfinite(sizes) & (sizes > 0)
    if is_alive.sum() < 4:
        return ()
    logarithms = np.log(np.where(is_alive, sizes, 1.0))
    low, middle, high = np.percentile(logarithms[is_alive], (25, 50, 75))
    beyond = max(high + _QUARTILES * (high - low), middle + np.log(_TIMES))
    (found,) = np.nonzero(is_alive & (logarithms > beyond))
    return tuple(found[np.argsort(-sizes[found])].tolist())
