"""An audit in words, and as JSON."""

import linecache
from typing import Any

from .audit import Audited, Cause, Left
from .settings import Settings

_SHOWN = 3
_LEFT = {"partly": "partly checked", "checked": "not checked", "searched": "not searched"}


def text(result: Audited, settings: Settings, *, is_verbose: bool = False) -> str:
    """The section `gradients`: one line for each cause, errors first, then what was not checked."""
    lines: list[str] = []
    for cause in result.causes:
        if cause.finding["severity"] != "info" or is_verbose:
            lines += _of_cause(cause, settings)
    reasons: dict[tuple[str, str], list[str]] = {}
    for left in result.left:
        reasons.setdefault((left.what, left.reason), []).append(_named(left))
    lines += [f"{_LEFT[what]}  {short(functions)}: {reason}" for (what, reason), functions in reasons.items()]
    what = {
        "intended": "finding",
        "skip": "function",
        "calls": "function",
        "wrt": "argument of a function that is called",
    }
    lines += [f"warning  the entry {entry!r} of `{key}` matches no {what[key]}" for key, entry in result.unmatched]
    return "\n".join([*lines, summary(result)])


def _named(left: Left) -> str:
    return f"{left.function} ({left.where})" if left.where else left.function


def summary(result: Audited) -> str:
    """What an audit comes to, in a line or two."""
    if not result.functions and not result.left and not result.causes:
        return "no function of this project was differentiated, and none was called that `calls` names"
    of = lambda severity: sum(cause.finding["severity"] == severity for cause in result.causes)
    parts = [_many(len(result.functions), "function") + " checked", _many(of("error"), "error")]
    stopped = f" ({_many(result.stopped, 'gradient')} stopped)" if result.stopped else ""  # what `stopped` fails on
    parts += [_many(of("warning"), "warning") + stopped, _many(of("info"), "note")]
    for what, said in _LEFT.items():
        count = sum(left.what == what for left in result.left)
        parts += [f"{count} {said}"] if count else []
    lines = [", ".join(parts)]
    if result.searched:
        tried, reached = map(sum, zip(*result.searched, strict=True))
        functions = _many(len(result.searched), "function")
        lines.append(f"search in {functions}: {tried} operands tried, {reached} reached; silence is no proof")
    return "\n".join(lines)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _of_cause(cause: Cause, settings: Settings) -> list[str]:
    finding = cause.finding
    where = settings.line(finding["file"], finding["line"])
    parts = [finding["severity"], finding["kind"], where, finding["operation"], f"in {short(cause.functions)}"]
    lines = ["  ".join(part for part in parts if part), f"    {source(finding)}" if source(finding) else ""]
    message = finding["message"].splitlines()
    lines += [f"    {line.strip()}" for line in message]
    if finding["leaves"]:
        lines.append(f"    with respect to {short(finding['leaves'])}")
    for how, names in (("differentiated", cause.met), ("called", cause.called)):
        lines += [f"    {how} by {short(names)}"] if names else []
    return [line for line in lines if line]


def short(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def source(finding: dict[str, Any]) -> str:
    """The line of code itself."""
    return linecache.getline(finding["file"], finding["line"]).strip() if finding["file"] else ""


def data(result: Audited, settings: Settings) -> dict[str, Any]:
    """An audit as plain data, for `json.dumps`."""
    return {
        "functions": [
            {"name": name, "where": where, "seconds": round(seconds, 3)} for name, where, seconds in result.functions
        ],
        "findings": [
            {
                **cause.finding,
                "where": settings.line(cause.finding["file"], cause.finding["line"]),
                "source": source(cause.finding),
            }
            | {"functions": cause.functions, "differentiated_by": cause.met, "called_by": cause.called}
            for cause in result.causes
        ],
        "not_checked": [left._asdict() for left in result.left],
        "searched": [{"tried": tried, "reached": reached} for tried, reached in result.searched],
        "unmatched": result.unmatched,
    }
