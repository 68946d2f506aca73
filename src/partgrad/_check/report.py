"""The result of a check as data."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

from .._trees import refuse_non_bools
from ..errors import CheckError
from .finding import SEVERITIES, Finding, located, plain
from .verdict import ERROR, INCONCLUSIVE, OK, STOPPED, worst

# A row of a table, which has a `path` and a `verdict`.
Row = TypeVar("Row", bound=Any)

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
    what = located(told[0]) if told else verdict
    named = list(filter(None, told[0].leaves if told else leaves))
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{what} in {', '.join(named[:_NAMED])}{more}" if named else what


class Report(Generic[Row]):
    """What the report of a check and that of a survey have in common.

    Args:
        function: The name of the function.
        rows: The rows of the table, each with a `path` and a `verdict`.
        findings: The findings, in any order.
        cost: What it took, by name.
        notes: Anything unusual.
    """

    # What made it, what is expected of each leaf, and what to do if one is inconclusive.
    _made_by, _expected, _elsewhere = "check", "Expected every checked leaf to be ok{}.", "check another point"

    def __init__(
        self,
        function: str,
        rows: tuple[Row, ...],
        findings: tuple[Finding, ...],
        cost: dict[str, int],
        notes: tuple[str, ...],
    ) -> None:
        self.function, self.rows, self.cost, self.notes = function, rows, cost, notes
        self.findings = tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))

    @property
    def verdict(self) -> str:
        """The worst verdict on a leaf, which is `ok`, `inconclusive`, `stopped` or `error`."""
        of_findings = [ERROR for finding in self.findings if finding.severity == "error"]
        return worst([*(row.verdict for row in self.rows if row.verdict is not None), *of_findings])

    @property
    def ok(self) -> bool:
        """Whether every checked leaf is `ok`: none is in error, stopped or inconclusive."""
        return self.verdict == OK

    def raise_if_failed(self, *, allow_inconclusive: bool = False) -> Self:
        """Raise an error that shows the table unless every checked leaf is `ok`.

        Args:
            allow_inconclusive: Whether leaves may be inconclusive.

        Returns:
            The report itself.

        Raises:
            CheckError: If not `ok`. It is an `AssertionError` as well.
            ArgumentError: If `allow_inconclusive` is no bool.
        """
        __tracebackhide__ = True
        refuse_non_bools(allow_inconclusive=allow_inconclusive)
        if self.ok or (allow_inconclusive and self.verdict == INCONCLUSIVE):
            return self
        made_by = f"`partgrad.{self._made_by}`"
        fix = {
            ERROR: f"start with the first error below the table; {made_by} returns the report as data.",
            STOPPED: "let the derivative through, or pass intended= with what stops it: a line, a function or a leaf.",
            INCONCLUSIVE: f"{self._elsewhere}, or pass allow_inconclusive=True.",
        }[self.verdict]
        raise CheckError(
            f"{headline(self.findings, self.rows)}\n"
            f"The gradient of `{self.function}` did not pass its {self._made_by}.\n\n{self}\n",
            self._expected.format(" or inconclusive" * allow_inconclusive),
            fix=fix,
        )

    def __repr__(self) -> str:
        return str(self)


class GradientReport(Report[LeafRow]):
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
        super().__init__(function, rows, findings, cost, notes)
        self.search = search

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

    def _repr_html_(self) -> str:
        from .printed import markup

        return markup(self)
