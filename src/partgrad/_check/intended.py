"""What the user declares as intentional: rules, lines and leaves."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .finding import Finding

Meant = str | Callable[..., Any]

# Never intentional: a changed value, NaN, nondeterminism.
_KINDS = frozenset({"mismatch", "zero", "draw", "tie", "oob", "precision"})


def intended(findings: Sequence[Finding], meant: Sequence[Meant]) -> Iterator[Finding]:
    """Turn findings about what is intended into notes, and add a warning for each entry that matches none."""
    met = set()
    for finding in findings:
        about = [i for i, what in enumerate(meant) if finding.kind in _KINDS and _is_about(finding, what)]
        met.update(about)
        yield finding._replace(severity="info", message=f"intended: {finding.message}") if about else finding
    for i, what in enumerate(meant):
        if i not in met:
            name = what if isinstance(what, str) else getattr(what, "__name__", repr(what))
            message = (
                f"`intended` names `{name:.60}`, but no finding matches it. Fix: correct the name, or remove it so "
                "that it hides nothing later."
            )
            yield Finding("intended", "warning", "", "", message)


def _is_about(finding: Finding, meant: Meant) -> bool:
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
