"""The result of a survey as data: a row for each leaf, and the patterns in which leaves are dead together."""

from typing import Any, NamedTuple

import numpy as np

from .._check import Finding, Report, plain


class SurveyRow(NamedTuple):
    """A leaf, or some of its entries that differ from the others.

    Attributes:
        path: Its path; empty where the tree is one leaf.
        type: Its shape and dtype, as `f32[3,4]`, or the name of its type.
        zero: The share of states at which its gradient is exactly zero, in all of its entries.
        not_finite: The share of states at which an entry of its gradient is NaN or infinite.
        sign_changes: The share of states at which an entry has the rarer of its two signs, on average over the entries:
            at most a half.
        size: The 5th, 50th and 95th percentile of the size of its gradient (the root mean square of its entries) where
            it is finite; None for some entries of a leaf, or if it is finite nowhere.
        outliers: The states at which its gradient is very much larger than at most others, the largest first.
        verdict: The worst of the states that were checked: `ok`, `inconclusive`, `stopped` or `error`; None for some
            entries of a leaf.
        entries: How many entries there are.
    """

    path: str
    type: str
    zero: float
    not_finite: float
    sign_changes: float
    size: tuple[float, float, float] | None
    outliers: tuple[int, ...]
    verdict: str | None
    entries: int


class Pattern(NamedTuple):
    """The leaves that are zero or not finite together, and the states at which it is these.

    Attributes:
        zero: The paths of the leaves whose gradient is exactly zero.
        not_finite: The paths of those whose gradient is not finite.
        states: At how many states.
        state: The state that stands for them.
        verdict: What a check says of that state; None if it was not checked.
    """

    zero: tuple[str, ...]
    not_finite: tuple[str, ...]
    states: int
    state: int
    verdict: str | None


class SurveyReport(Report[SurveyRow]):
    """What `partgrad.survey` found about the gradients at many states; it prints as a table.

    Attributes:
        function: The name of the function.
        states: How many states there are.
        rows: One row for each differentiated leaf, in the order of `jax.tree.leaves`, each followed by rows for entries
            that differ from the others.
        patterns: Which leaves are zero or not finite together, the most frequent first.
        findings: What is wrong or worth knowing at the states that were checked, errors first: each is one cause, and
            its details say at how many `states` there is such a pattern (0 if it was seen only where differences are
            off), and at which `state` it was seen.
        sizes: The size of the gradient of each leaf at each state: 0 where it is exactly zero, NaN where it is not
            finite.
        paths: The paths of these leaves.
        cost: How many states were computed at a time, and how many were checked.
        notes: Anything unusual.
    """

    _made_by, _elsewhere = "survey", "survey other states"
    _expected = "Expected every leaf to be ok{}, at each state that is checked."

    def __init__(
        self,
        function: str,
        states: int,
        rows: tuple[SurveyRow, ...],
        patterns: tuple[Pattern, ...],
        findings: tuple[Finding, ...],
        sizes: np.ndarray[Any, Any],
        paths: tuple[str, ...],
        cost: dict[str, int],
        notes: tuple[str, ...] = (),
    ):
        super().__init__(function, rows, findings, cost, notes)
        self.states, self.patterns, self.sizes, self.paths = states, patterns, sizes, paths

    @property
    def dead(self) -> tuple[str, ...]:
        """The paths of the leaves that learn nothing, as their gradient is exactly zero or not finite at all states."""
        is_alive = np.isfinite(self.sizes) & (self.sizes != 0)
        return tuple(path for path, alive in zip(self.paths, is_alive, strict=True) if not alive.any())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data, for `json.dumps`.

        Returns:
            `function`, `states`, `verdict`, `ok`, `dead`, `cost`; `rows`, `patterns` and `findings` as lists of dicts.
            A number that is not finite is the string `"nan"` or `"inf"`, because JSON has no such numbers.
        """
        as_dicts = lambda rows: [{name: plain(value) for name, value in row._asdict().items()} for row in rows]
        return {
            "function": self.function,
            "states": self.states,
            "verdict": self.verdict,
            "ok": self.ok,
            "dead": list(self.dead),
            "rows": as_dicts(self.rows),
            "patterns": as_dicts(self.patterns),
            "findings": [finding.to_dict() for finding in self.findings],
            "cost": {what: int(count) for what, count in self.cost.items()},
        }

    def plot(self, ax: Any = None) -> Any:
        """Draw the leaves by the states: the logarithm of the size of each gradient, zero and NaN in their own colours.

        Args:
            ax: The axes of matplotlib to draw into; None makes a figure.

        Returns:
            The axes; `ax.figure.savefig("survey.png")` writes a file.

        Raises:
            LibraryError: If matplotlib is not installed. It is an `ImportError` as well.
        """
        from .plotted import plotted

        return plotted(self, ax)

    def __str__(self) -> str:
        from .printed import text

        return text(self)

    def _repr_html_(self) -> str:
        from .printed import markup

        return markup(self)
