"""Which findings explain others, so that each cause is reported once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .finding import Finding
from .zeros import STAIRS


def _is(*kinds: str, reasons: Sequence[str] = ()) -> Callable[[Finding], bool]:
    """Whether a finding is of some kinds and, if any are given, of some reasons."""
    return lambda finding: finding.kind in kinds and (not reasons or finding.reason in reasons)


def _is_at_the_same_line(one: Finding, other: Finding) -> bool:
    return bool(one.where) and one.where == other.where


def _has_same_rule(one: Finding, other: Finding) -> bool:
    return (one.where, one.rule) == (other.where, other.rule)


def _says_more(zero: Finding, other: Finding) -> bool:
    """Whether a zero gradient tells more about the same leaves than a stopped part or lost digits do."""
    is_same = other.severity == "warning" or (bool(zero.where) and other.where == zero.where)
    is_milder = (zero.severity, other.severity) == ("info", "warning")
    return other.leaves == zero.leaves and is_same and not is_milder


class _Row(NamedTuple):
    """What explains what.

    Attributes:
        explains: Which findings explain others: all the leaves of those are leaves of these.
        explained: Which findings they explain.
        goes_with: Whether one of the first and one of the second go together.
        gathers: Whether the first take over the leaves of the second, instead of having them already.
    """

    explains: Callable[[Finding], bool]
    explained: Callable[[Finding], bool]
    goes_with: Callable[[Finding, Finding], bool] = lambda one, other: True
    gathers: bool = False

    def applied(self, findings: list[Finding]) -> list[Finding]:
        """The findings without those that others explain."""
        causes, told = [found for found in findings if self.explains(found)], list[Finding]()
        gathered: dict[int, list[Finding]] = {}
        for found in findings:
            own = [cause for cause in causes if self.explained(found) and self.goes_with(cause, found)]
            leaves = {leaf for cause in own for leaf in cause.leaves}
            if not own or not (self.gathers or leaves.issuperset(found.leaves)):
                told.append(found)
            for cause in own if self.gathers else ():
                gathered.setdefault(id(cause), [cause]).append(found)
        return [_joined(gathered.get(id(found), [found])) for found in told]


def _joined(findings: list[Finding]) -> Finding:
    """The first of some findings, with the leaves of all."""
    leaves = dict.fromkeys(leaf for finding in findings for leaf in finding.leaves)
    return dataclasses.replace(findings[0], leaves=tuple(leaves)) if len(findings) > 1 else findings[0]


# In order: what was explained explains nothing.
_TABLE = (
    _Row(_is("growth"), _is("noise")),
    # What a draw decides arrives by it.
    _Row(_is("draw", reasons=["discrete", "decision"]), _is("zero", reasons=["not chosen", "left out"])),
    _Row(_is("mismatch", reasons=["twice"]), _is("mismatch", reasons=["not unique"]), _is_at_the_same_line),
    # A rule that changes the value is why the derivatives of leaves are wrong.
    _Row(_is("value", reasons=["rule"]), _is("mismatch", reasons=["rule value"]), _has_same_rule, gathers=True),
    _Row(_is("tie", "jump"), _is("zero", reasons=["rule", "not chosen", "truly zero"])),
    _Row(_is("mismatch", reasons=["rule stop"]), _is("zero", reasons=["rule", "cancels", "truly zero"])),
    # Where something changes through a stop only, rounding and the like are not why nothing arrives.
    _Row(
        _is("mismatch", reasons=["stop", "mark"]),
        _is("zero", reasons=["not chosen", "left out", *STAIRS]),
    ),
    # Of a value that arrives by steps only, that is said.
    _Row(_is("zero", reasons=STAIRS), _is("mismatch", reasons=["stairs"])),
    _Row(
        _is("mismatch", reasons=["stairs"]),
        _is("zero", reasons=["rule", "not chosen", "left out", "cancels", "truly zero"]),
    ),
    # What cancels, or is lost, is not truly zero.
    _Row(_is("precision"), _is("zero", reasons=["truly zero", "cancels"])),
    _Row(_is("zero", reasons=["rounding"]), _is("zero", reasons=["truly zero", "cancels"])),
    _Row(_is("zero"), _is("mismatch", "precision"), _says_more),
)


def told_once(findings: list[Finding]) -> list[Finding]:
    """The findings without those that others explain."""
    for row in _TABLE:
        findings = row.applied(findings)
    return findings
