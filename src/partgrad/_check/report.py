"""What a check found, as data."""

import math
from typing import Any, NamedTuple

from .. import _words as words
from . import table
from .finding import Finding, severity_of


class Row(NamedTuple):
    """One leaf.

    Attributes:
        path: Its path; empty where the tree is one leaf.
        type: Its shape and dtype, as `f32[3,4]`, or the name of its type.
        status: `checked`; `inconclusive`, where no difference could confirm or refute its gradient; or why it was not
            differentiated, as in `partgrad.summary`.
        gradient: The root mean square of its gradient's entries; None where there is none.
    """

    path: str
    type: str
    status: str
    gradient: float | None


class GradientReport:
    """What `partgrad.check` found out about a gradient; it prints as a table.

    The table has a line for each leaf, with its verdict and what was found there; the messages follow below it.

    Attributes:
        function: The name of the function.
        rows: One row a leaf, in the order of `jax.tree.leaves`.
        findings: What is wrong, or good to know, as tuples `(kind, severity, leaf, where, message)`; errors first.
        cost: How many times the function, its derivatives, and so on were evaluated.
    """

    def __init__(
        self, function: str, rows: tuple[Row, ...], findings: tuple[Finding, ...], cost: dict[str, int]
    ) -> None:
        self.function = function
        self.rows = rows
        self.findings = tuple(sorted(findings, key=severity_of))
        self.cost = cost

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def raise_if_failed(self) -> "GradientReport":
        """Raise an error that shows the table if any finding is an error.

        Returns:
            The report itself.

        Raises:
            CheckError: If not `ok`. It is an `AssertionError` as well.
        """
        if not self.ok:
            raise words.check_failed(self.function, str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report in plain Python data, for `json.dumps`.

        Returns:
            `function`, `ok`, and `cost`; under `rows` and `findings` a dict for each. A gradient that is not finite is
            the string `"nan"` or `"inf"`, for which JSON has no number.
        """
        return {
            "function": self.function,
            "ok": self.ok,
            "rows": [row._replace(gradient=_plain(row.gradient))._asdict() for row in self.rows],
            "findings": [finding._asdict() for finding in self.findings],
            "cost": {what: int(count) for what, count in self.cost.items()},
        }

    def __str__(self) -> str:
        return table.text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return table.markup(self)


def _plain(number: Any) -> Any:
    if number is None:
        return None
    return float(number) if math.isfinite(number) else str(float(number))
