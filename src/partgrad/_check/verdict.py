"""From evidence to a verdict: the table.

What is known of a leaf is put into six words, and the first row that fits decides. Nothing else in the package does.
"""

from typing import NamedTuple

OK, INCONCLUSIVE, STOPPED, ERROR = "ok", "inconclusive", "stopped", "error"
# The worst last.
VERDICTS = (OK, INCONCLUSIVE, STOPPED, ERROR)


class Evidence(NamedTuple):
    """What is known of the derivative of a leaf.

    Attributes:
        derivative: Whether it is `finite`, or `not finite`.
        modes: Whether forward and reverse mode `agree` (also if there is one only) or `disagree`.
        sides: The slopes by differences on both sides of the point: `equal`, they `differ`, the value `jump`s, or they
            do not settle (`noise`).
        match: Whether the derivative is `equal` to the slope, lies `between` those of the two sides, is `off`, or is
            `zero` as the slope is; `unknown` where there is no slope.
        nearby: The same at a point beside this one: `equal`, `off`, or `unknown` if nobody asked or could tell.
        excuse: What explains that it is off, or that the differences do not settle: a `stop`, which may be a rule that
            gives no derivative at all; a `declared` stop, such as that of a draw with `gradient="fixed"`; a
            `negligible` one of a library; a `solver` that has not converged; a `symmetric` matrix whose elements
            were moved one by one; or `stairs`, of which the derivative has no part. `none` if nothing does.
    """

    derivative: str = "finite"
    modes: str = "agree"
    sides: str = "equal"
    match: str = "equal"
    nearby: str = "unknown"
    excuse: str = "none"


class Row(NamedTuple):
    """A row of the table: what it is called, what it fits, and what follows.

    Attributes:
        name: What was found.
        fits: For each word of the evidence the alternatives, or `*` for any.
        verdict: On the leaf.
    """

    name: str
    fits: tuple[str, str, str, str, str, str]
    verdict: str


# fmt: off
TABLE = (
    #   name           derivative    modes       sides           match   nearby   excuse       verdict
    Row("not finite",  ("not finite", "*",        "*",           "*",    "*",     "*"),        ERROR),
    Row("unconverged", ("finite",     "*",        "*",           "*",    "*",     "solver"),   OK),
    Row("stopped",     ("finite",     "*",        "*",           "*",    "*",     "stop"),     STOPPED),
    Row("stairs",      ("finite",     "*",        "*",           "*",    "*",     "stairs"),   STOPPED),
    Row("declared",    ("finite",     "*",        "*",           "*",    "*",     "declared|negligible"), OK),
    Row("symmetric",   ("finite",     "*",        "*",           "*",    "*",     "symmetric"), OK),
    Row("modes",       ("finite",     "disagree", "*",           "*",    "*",     "none"),     ERROR),
    Row("jump",        ("finite",     "agree",    "jump",        "*",    "*",     "none"),     INCONCLUSIVE),
    Row("removable",   ("finite",     "agree",    "equal",       "off",  "equal", "none"),     ERROR),
    Row("wrong",       ("finite",     "agree",    "*",           "off",  "*",     "none"),     ERROR),
    Row("wrong",       ("finite",     "agree",    "differ|noise","*",    "off",   "none"),     ERROR),
    Row("noise",       ("finite",     "agree",    "noise",       "*",    "*",     "none"),     INCONCLUSIVE),
    Row("kink",        ("finite",     "agree",    "differ",      "*",    "*",     "none"),     OK),
    Row("zero",        ("finite",     "agree",    "equal",       "zero", "*",     "none"),     OK),
    Row("agrees",      ("finite",     "agree",    "*",           "*",    "*",     "none"),     OK),
)
# fmt: on


def row_of(evidence: Evidence) -> Row:
    """The first row that fits."""
    fits = lambda row: all(
        wanted == "*" or word in wanted.split("|") for wanted, word in zip(row.fits, evidence, strict=True)
    )
    return next(filter(fits, TABLE))


def worst(verdicts: list[str]) -> str:
    """The worst of some verdicts; `ok` if there are none."""
    return max(verdicts, key=VERDICTS.index, default=OK)
