"""What a user says is meant as it is: rules, lines and leaves."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from .finding import Finding

# Never meant: another value, NaN, chance.
_KINDS = frozenset({"mismatch", "zero", "draw", "tie", "oob", "precision"})


def intended(findings: Sequence[Finding], meant: Sequence[str | Callable[..., Any]]) -> list[Finding]:
    """The findings, in which those about what is meant are notes."""
    is_meant = lambda finding: finding.kind in _KINDS and any(_is_about(finding, what) for what in meant)
    return [_as_note(finding) if is_meant(finding) else finding for finding in findings]


def _as_note(finding: Finding) -> Finding:
    return finding._replace(severity="info", message=f"intended: {finding.message}")


def _is_about(finding: Finding, meant: str | Callable[..., Any]) -> bool:
    if isinstance(meant, str):
        return meant in (finding.where, finding.leaf)
    function = inspect.unwrap(meant)
    if f"`{getattr(function, '__name__', '')}`" in finding.message:
        return True
    try:
        lines, first = inspect.getsourcelines(function)
        file = os.path.basename(inspect.getsourcefile(function) or "")
    except (OSError, TypeError):
        return False
    name, _, number = finding.where.rpartition(":")
    return name == file and first <= int(number) < first + len(lines)
