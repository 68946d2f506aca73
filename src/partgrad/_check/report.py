"""The result of a check as data."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._trees import refuse_non_bools
from ..errors import CheckError
from .finding import SEVERITIES, Finding, plain
from .verdict import ERROR, INCONCLUSIVE, OK, STOPPED, worst

# How many leaves the first line of an error names.
_NAMED = 4


class LeafRow(NamedTuple):
    """One leaf.

    Attributes:
        path: Its path; empty where the tree is one leaf.
        type: Its shape and dtype, as `f32[3,4]`, or the name of its type.
        status: `checked`; `inconclusive`, where no difference could confirm or refute its gradient; or why it was not
            differentiated, as in `partgrad.summary`.
        gradient: The root mean square of its gradient's entries; None where there is none.
        dead: How many entries of its gradient are zero; None where there is none.
        verdict: `ok`, `inconclusive`, `stopped` or `error`; None where it was not differentiated.
    """

    path: str
    type: str
    status: str
    gradient: float | None
    dead: int | None = None
    verdict: str | None = None


def headline(findings: Sequence[Finding], rows: Sequence[Any]) -> str:
    """The worst of a report in a line: `mismatch at model.py:6 in ['v'], ['w']`."""
    verdict = worst([row.verdict for row in rows if row.verdict is not None])
    leaves = [row.path for row in rows if row.verdict == verdict]
    is_told = lambda finding: not finding.leaves or not set(leaves).isdisjoint(finding.leaves)
    told = [finding for finding in findings if finding.severity == ERROR]
    told += [finding for finding in findings if finding.severity != "info" and is_told(finding)]
    what = f"{told[0].kind} at {told[0].where}" if told and told[0].where else told[0].kind if told else verdict
    named = list(filter(None, told[0].leaves if told else leaves))
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{what} in {', '.join(named[:_NAMED])}{more}" if named else what


class GradientReport:
    """What `partgrad.check` found about a gradient; it prints as a table.

    The table has a line for each leaf, worst first, with its verdict and the worst finding; the messages follow.

    Attributes:
        function: The name of the function.
        rows: One row per leaf, in the order of `jax.tree.leaves`.
        findings: What is wrong or worth knowing, errors first: each is one cause, with its leaves.
        cost: How many times the function, its derivatives, and so on were evaluated.
        notes: Anything unusual about how it was evaluated.
        search: What the search for bad points came to, if there was one: how many operands were `tried`, `reached` and
            `left` out, and the `reason`.
    """

    def __init__(
        self,
        function: str,
        rows: tuple[LeafRow, ...],
        findings: tuple[Finding, ...],
        cost: dict[str, int],
        notes: tuple[str, ...] = (),
        search: dict[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.rows = rows
        self.findings = tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
        self.cost = cost
        self.notes = notes
        self.search = search

    @property
    def verdict(self) -> str:
        """The worst verdict on a leaf, which is `ok`, `inconclusive`, `stopped` or `error`."""
        of_findings = [ERROR for finding in self.findings if finding.severity == "error"]
        return worst([*(row.verdict for row in self.rows if row.verdict is not None), *of_findings])

    @property
    def ok(self) -> bool:
        """Whether every checked leaf is `ok`: none is in error, stopped or inconclusive."""
        return self.verdict == OK

    def raise_if_failed(self, *, allow_inconclusive: bool = False) -> "GradientReport":
        """Raise an error that shows the table unless every checked leaf is `ok`.

        Args:
            allow_inconclusive: Whether leaves may be inconclusive.

        Returns:
            The report itself.

        Raises:
            CheckError: If not `ok`. It is an `AssertionError` as well.
            ArgumentError: If `allow_inconclusive` is no bool.
        """
        refuse_non_bools(allow_inconclusive=allow_inconclusive)
        if self.ok or (allow_inconclusive and self.verdict == INCONCLUSIVE):
            return self
        fix = {
            ERROR: "start with the first error below the table; `partgrad.check` returns the report as data.",
            STOPPED: "let the derivative through, or pass intended= with what stops it: a line, a function or a leaf.",
            INCONCLUSIVE: "check another point, or pass allow_inconclusive=True.",
        }[self.verdict]
        __tracebackhide__ = True
        raise CheckError(
            f"{headline(self.findings, self.rows)}\n"
            f"The gradient of `{self.function}` did not pass its check.\n\n{self}\n",
            f"Expected every checked leaf to be ok{' or inconclusive' * allow_inconclusive}.",
            fix=fix,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data, for `json.dumps`.

        Returns:
            `function`, `verdict`, `ok`, `cost` and perhaps `search`; `rows` and `findings` as lists of dicts.
            A number that is not finite is the string `"nan"` or `"inf"`, because JSON has no such numbers.
        """
        return {
            "function": self.function,
            "verdict": self.verdict,
            "ok": self.ok,
            "rows": [{name: plain(value) for name, value in row._asdict().items()} for row in self.rows],
            "findings": [finding.to_dict() for finding in self.findings],
            "cost": {what: int(count) for what, count in self.cost.items()},
            **({} if self.search is None else {"search": self.search}),
        }

    def __str__(self) -> str:
        from .printed import text

        return text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from .printed import markup

        return markup(self)
