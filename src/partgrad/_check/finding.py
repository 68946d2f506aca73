"""The findings of a check: each is one thing that is wrong with a leaf, or worth knowing."""

from typing import NamedTuple

KINDS = (
    "value",
    "mismatch",
    "nan",
    "oob",
    "zero",
    "draw",
    "tie",
    "precision",
    "nondeterminism",
    "intended",
)
# The most severe first.
SEVERITIES = ("error", "warning", "info")


class Finding(NamedTuple):
    """A problem with a gradient, or something worth knowing about it.

    Attributes:
        kind: `value`, `mismatch`, `nan`, `oob`, `zero`, `draw`, `tie`, `precision`, `nondeterminism` or `intended`.
        severity: `error` if the gradient cannot be trusted, `warning` if it may not mean what you think, `info` if
            there is nothing to fix.
        leaf: The path of the leaf, as `partgrad.summary` writes it; empty if it concerns the whole function.
        where: The line of the user's code, as `file.py:42`; empty if there is none.
        message: What was found, what was expected, and how to fix it.
    """

    kind: str
    severity: str
    leaf: str
    where: str
    message: str
