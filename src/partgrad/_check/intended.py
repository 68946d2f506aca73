"""What the user declares as intentional: a cause, by its function, its rule, its line or its leaf."""

import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._programs import Chain, place, running
from .finding import Finding
from .names import known_as, operation_of, rule_of

Meant = str | Callable[..., Any]

# Never intentional: a changed value, NaN, nondeterminism, and differences that do not settle.
_KINDS = frozenset({"mismatch", "zero", "draw", "tie", "oob", "precision", "growth", "jump"})


def intended(findings: Sequence[Finding], meant: Sequence[Meant]) -> Iterator[Finding]:
    """Turn findings about what is intended into notes, and add a warning for each entry that matches none."""
    met: set[int] = set()
    for whole in findings:
        for finding in _by_leaf(whole, meant):
            # What is the cause only together with others is meant if all of them are.
            parts = [finding, *(_of_chain(finding, chain) for chain in finding.together)]
            is_able = finding.kind in _KINDS
            about = [[i for i, what in enumerate(meant) if is_able and _is_about(part, what)] for part in parts]
            met.update(itertools.chain(*about))
            is_meant = all(about)
            yield dataclasses.replace(finding, severity="info", intended=True) if is_meant else finding
    for i, what in enumerate(meant):
        if i not in met:
            name = what if isinstance(what, str) else getattr(what, "__qualname__", repr(what))
            yield Finding("intended", "warning", "stale", details={"entry": name})


def _of_chain(finding: Finding, chain: Chain) -> Finding:
    """The same finding about another operation."""
    file, line = place(chain)
    return dataclasses.replace(
        finding, file=file, line=line, operation=operation_of(chain), rule=rule_of(chain), chain=chain
    )


def _by_leaf(finding: Finding, meant: Sequence[Meant]) -> list[Finding]:
    """A finding whose leaves are not all intended, in parts."""
    if len(finding.leaves) < 2 or not any(leaf in meant for leaf in finding.leaves):
        return [finding]
    return [dataclasses.replace(finding, leaves=(leaf,)) for leaf in finding.leaves]


def _is_about(finding: Finding, meant: Meant) -> bool:
    if isinstance(meant, str):
        if meant in finding.leaves or _is_name(finding, meant) or _is_line(finding, meant):
            return True
        named = _loaded(meant)
        return named is not None and _is_about(finding, named)
    own = [getattr(meant, name, None) for name in ("jvp", "fwd", "bwd")]
    if any(own):
        # A rule is known by its functions, which may be of the same lines as others, or each of another rule too.
        ruled = finding.rule.functions if finding.rule else ()
        return all(any(function is one for function in ruled) for one in own if one is not None)
    if any(meant is one for one in known_as(finding.operation)):
        return True
    function = inspect.unwrap(meant)
    if finding.rule and any(one is function for one in finding.rule.functions):
        return True
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not finding.chain:
        return False
    site = (code.co_filename, code.co_firstlineno)
    return any((file, line) == site for file, line, _ in running(finding.chain)) or _holds_line(function, finding)


def _loaded(name: str) -> Callable[..., Any] | None:
    """What has a qualified name in the modules that are loaded; None if that is nothing, or nothing to be called."""
    parts = name.split(".")
    for length in reversed(range(1, len(parts))):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None:
            found: Any = module
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found if callable(found) else None
    return None


def _is_name(finding: Finding, meant: str) -> bool:
    return finding.rule is not None and meant == finding.rule.name


def _is_line(finding: Finding, meant: str) -> bool:
    file, _, line = meant.rpartition(":")
    if not finding.file or line != str(finding.line):
        return False
    return os.path.normpath(finding.file).endswith(os.path.normpath(os.sep + file)) or finding.file == file


def _holds_line(function: Any, finding: Finding) -> bool:
    """Whether a line is written inside a function."""
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return False
    return finding.file == file and first <= finding.line < first + len(lines)
