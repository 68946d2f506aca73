"""What a check finds, as data: each finding is one cause, with every leaf that it concerns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._programs import Chain

# The most severe first.
SEVERITIES = ("error", "warning", "info")
# Details that differ from leaf to leaf although the cause is the same.
_OF_A_LEAF = frozenset({"error", "changes_in", "element", "slope", "got", "expected"})


@dataclasses.dataclass(frozen=True)
class Rule:
    """A custom derivative rule.

    Attributes:
        name: The qualified name of its function, as `module.function`; `intended=` takes it.
        functions: The Python functions of the rule: that of a `custom_jvp`, or both of a `custom_vjp`.
    """

    name: str
    functions: tuple[Callable[..., Any], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # They may be local functions, which cannot be pickled.
        return {**self.__dict__, "functions": ()}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The numbers that decided, along the direction of one leaf in which they are furthest apart.

    Attributes:
        leaf: The path of the leaf.
        element: The one element that moves, as indices; None if several do. Then the slopes are those along a
            direction, else derivatives by the element.
        reverse: The slope by reverse mode; None if there is none.
        forward: The slope by forward mode; None if there is none.
        right: The slope to the right, by differences.
        left: The slope to the left.
        noise: The error of these slopes.
        steps: The steps of the differences, relative to the size of the elements.
        relative: How far the derivative is off, relative to the slope.
        nearby: Whether the numbers are those of a point beside this one.
    """

    leaf: str
    element: tuple[int, ...] | None
    reverse: complex | None
    forward: complex | None
    right: complex
    left: complex
    noise: float
    steps: tuple[float, ...]
    relative: float
    nearby: bool = False

    @property
    def derivative(self) -> complex:
        """The derivative that is further off."""
        known = [value for value in (self.reverse, self.forward) if value is not None]
        return max(known, key=lambda value: abs(value - self.slope)) if known else 0.0

    @property
    def slope(self) -> complex:
        """The slope by differences; at a kink, that in the middle."""
        return (self.right + self.left) / 2


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change that was tried: the derivative is then finite, and agrees with the differences.

    Attributes:
        replaces: What is replaced: an operation, or `f` for the whole function.
        by: What replaces it.
        derivative: The slope then, along the direction of the differences.
        slope: The slope by differences; None at a kink, where the derivative lies between those of its two sides.
        beside: What else was changed, and has to be.
    """

    replaces: str
    by: str
    derivative: complex
    slope: complex | None
    beside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause of trouble with a gradient, or something worth knowing about it.

    Attributes:
        kind: `value`, `mismatch`, `nan`, `oob`, `zero`, `draw`, `tie`, `jump`, `noise`, `precision`, `growth`,
            `surrogate`, `nondeterminism` or `intended`.
        severity: `error` if the gradient cannot be trusted, `warning` if it may not mean what you think, `info` if
            there is nothing to fix.
        reason: What it is, within its kind: `rule`, `stop`, `removable`, `no path` and so on.
        leaves: The paths of the leaves that it concerns, as `partgrad.summary` writes them; none if it concerns the
            whole function.
        file: The whole path of the file of the user's line; empty if there is no line.
        line: The number of the line; 0 if there is none.
        operation: What is called there, as the user wrote it: `sqrt`, `clip`, `safe.norm`, or `>`.
        rule: The custom derivative rule to blame, if any.
        figures: The numbers that decided, if any were compared.
        fix: What was tried and helps.
        details: More numbers and names, by reason.
    """

    kind: str
    severity: str
    reason: str
    leaves: tuple[str, ...] = ()
    file: str = ""
    line: int = 0
    operation: str = ""
    rule: Rule | None = None
    figures: Figures | None = None
    fix: Fix | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chain: Chain = dataclasses.field(default=(), compare=False, repr=False)
    # The other operations that are the cause only together with that one.
    together: tuple[Chain, ...] = dataclasses.field(default=(), compare=False, repr=False)
    intended: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Equations of JAX can be neither pickled nor copied.
        return {**self.__dict__, "chain": (), "together": ()}

    @property
    def where(self) -> str:
        """The line, as `file.py:42`; empty if there is none."""
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}" if self.file else ""

    @property
    def message(self) -> str:
        """What was found, and what to do, in words."""
        from .words import message

        return message(self)

    @property
    def suggestion(self) -> str:
        """Advice that was not tried, or that cannot be; empty if there is a fix or nothing to do."""
        from .words import suggestion

        return suggestion(self)

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for `json.dumps`."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("chain", "together")]
        own = {name: getattr(self, name) for name in names}
        own |= {
            "rule": self.rule and self.rule.name,
            "figures": self.figures and dataclasses.asdict(self.figures),
            "fix": self.fix and dataclasses.asdict(self.fix),
            "details": dict(self.details),
            "where": self.where,
            "suggestion": self.suggestion,
            "message": self.message,
        }
        return {name: plain(value) for name, value in own.items()}


def plain(value: Any) -> Any:
    """A value for JSON, which has neither complex numbers nor such as are not finite."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, complex):
        return str(value)
    return float(value) if abs(value) < float("inf") else str(float(value))


def merged(findings: list[Finding], paths: Sequence[str]) -> list[Finding]:
    """One finding for each cause, the most severe first, with all its leaves in order, and the worst of its figures."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        details = tuple(
            sorted((name, repr(value)) for name, value in finding.details.items() if name not in _OF_A_LEAF)
        )
        rule = finding.rule and (finding.rule.name, tuple(map(id, finding.rule.functions)))
        # What a function is by convention helps some leaves, and is nothing that differences tell of others.
        fix = None if "by" in finding.details else finding.fix
        helps = fix and (fix.replaces, fix.by)
        place = (finding.kind, finding.reason, finding.file, finding.line, finding.operation)
        groups.setdefault((*place, rule, helps, details, finding.intended, not finding.leaves), []).append(finding)
    found = []
    for group in groups.values():
        size = lambda f: f.figures.relative if f.figures else f.details.get("error", 0.0)
        shown = max(group, key=lambda f: (-SEVERITIES.index(f.severity), size(f)))
        leaves = {leaf for finding in group for leaf in finding.leaves}
        fix = shown.fix if all(finding.fix for finding in group) else None
        found.append(dataclasses.replace(shown, leaves=tuple(path for path in paths if path in leaves), fix=fix))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def located(finding: Finding) -> str:
    """The kind of a finding, and the line."""
    return f"{finding.kind} at {finding.where}" if finding.where else finding.kind
