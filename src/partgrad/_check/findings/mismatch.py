"""Forward mode, reverse mode and finite differences that disagree, or that cannot be compared."""

from collections.abc import Iterator

import numpy as np

from ..._programs import (
    FOREIGN,
    HIGH,
    Chain,
    any_equation,
    inner_jaxprs,
    is_custom_rule,
    is_in_library,
    line,
    raised_at,
)
from ..derivatives.search import LeafDerivative
from ..evidence import Evidence, at, element
from ..finding import Finding
from ..rules import Blame, Rules
from .draw import has_implicit_draw
from .tie import Ties
from .zero import REBUILT, is_fixed_draw, mark_of

# The relative mismatch that a stop without consequences may leave.
_SLIGHT = 1e-3
# The disagreement that constants of low precision explain, and that of an iteration that has converged.
_OF_CONSTANTS = 1e-6
_CONVERGED = 1e-3
# How far off an iteration may be, a solver whose rule is exact in the limit, and such a solver of a library.
OF_LOOPS = 1e-3
_OF_SOLVERS = 3e-2
_OF_LIBRARIES = 0.2
_ITERATIONS = HIGH | {"while", "custom_linear_solve"}


def mismatch(evidence: Evidence, rules: Rules, ties: Ties, found: list[LeafDerivative]) -> Iterator[Finding]:
    """Findings for each leaf whose derivatives and differences disagree."""
    for leaf, derivative in enumerate(found):
        path = evidence.program.paths[leaf]
        if has_implicit_draw(evidence, leaf):
            continue
        # A derivative that is not finite has a finding of its own, or is NaN only because the zero tangents of other
        # leaves were multiplied by infinity.
        if derivative.status == "mismatch" and np.isfinite(derivative.got):
            yield from _mismatch(evidence, rules, ties, leaf, derivative)
        elif derivative.status == "stopped":
            # An adaptive solver may stop the derivatives of its step sizes, which have little effect.
            is_meant = all(map(is_fixed_draw, derivative.excuses))
            severity = "warning" if derivative.relative > _SLIGHT and not is_meant else "info"
            yield Finding("mismatch", severity, path, line(derivative.excuses[0]), _stopped(path, derivative))
        elif derivative.status == "symmetric":
            chain = derivative.excuses[0]
            message = (
                f"the derivative of {at(chain)} is that of a symmetric matrix, and this one is moved element by "
                "element; for symmetric changes the two agree. Fix: none needed, or pass (a + a.T) / 2."
            )
            yield Finding("mismatch", "warning", path, line(chain), message)
        elif derivative.status == "rounding":
            yield from _slight(evidence, rules, leaf, derivative)
        elif derivative.status == "inconclusive" and evidence.value_is_finite:
            yield Finding("mismatch", "info", path, "", _inconclusive(derivative))


def without_reverse(evidence: Evidence) -> Iterator[Finding]:
    """A finding if the function has no gradient that JAX could compute."""
    error = evidence.missing
    if error is None:
        return
    loops = [c for c in evidence.smooth.chains if c[-1].primitive.name == "while" and evidence.leaves_into(c)]
    if loops and isinstance(error, ValueError):
        where = line(loops[0])
        message = (
            f"reverse mode does not exist for the `while` loop at {where}, so there is no gradient; the forward "
            "derivative was checked. Fix: a loop of a known number of steps (`jax.lax.scan`), or a custom rule."
        )
    else:
        foreign = [c for c in evidence.smooth.chains if c[-1].primitive.name in FOREIGN and evidence.leaves_into(c)]
        where = raised_at(error) or (line(foreign[0]) if foreign else "")
        text = str(error).partition("\n")[0][:300]
        by = f" in the derivative of {at(foreign[0])}" if foreign else ""
        message = f"reverse mode raises {type(error).__name__}{by}, so there is no gradient: {text}"
    yield Finding("mismatch", "error", "", where, message)


def slack_of_leaves(evidence: Evidence) -> dict[int, float]:
    """The relative disagreement that an iteration after a leaf may explain, for each leaf that flows into one."""
    slack: dict[int, float] = {}
    for chain in evidence.smooth.chains:
        of_chain = _slack(chain)
        if of_chain:
            for leaf in evidence.leaves_into(chain):
                slack[leaf] = max(slack.get(leaf, 0.0), of_chain)
    return slack


def _slack(chain: Chain) -> float:
    name = chain[-1].primitive.name
    if name not in _ITERATIONS and not (is_custom_rule(chain[-1]) and _contains_iteration(chain)):
        return 0.0
    return OF_LOOPS if name == "while" else _OF_SOLVERS


def _contains_iteration(chain: Chain) -> bool:
    is_iteration = lambda equation: equation.primitive.name in _ITERATIONS
    return any(any_equation(inner, is_iteration) for inner in inner_jaxprs(chain[-1]))


def _mismatch(evidence: Evidence, rules: Rules, ties: Ties, leaf: int, derivative: LeafDerivative) -> Iterator[Finding]:
    """One finding for each rule to blame, or a single one if there is none."""
    path, begin = evidence.program.paths[leaf], _numbers_of(evidence, leaf, derivative)
    blamed = rules.to_blame_for(leaf)
    # The rule of a solver is exact only in the limit.
    solvers = [b.chain for b in blamed if not b.of_value and is_in_library(b.chain) and _contains_iteration(b.chain)]
    if blamed and len(solvers) == len(blamed) and derivative.relative <= _OF_LIBRARIES:
        yield _unconverged(path, derivative.relative, solvers[0])
        return
    for blame in blamed:
        yield Finding("mismatch", "error", path, line(blame.chain), f"{begin}; {_blame(blame)}")
    if blamed:
        return
    wrong_values = rules.wrong_values()
    tied = ties.of(leaf) if derivative.place == "tie" else []
    unknown = rules.incomparable_for(leaf)
    where = ""
    if tied:
        where = line(tied[0].chain)
        reason = (
            f"{ties.described(tied[0])} decides here, and JAX differentiates the branch it takes. Fix: give that "
            "branch the slope of the points beside it (a series term instead of a constant), or write a custom rule."
        )
    elif wrong_values:
        where = line(wrong_values[0].chain)
        rule = at(wrong_values[0].chain)
        reason = f"the rule of {rule} computes another value than its function. Fix: correct the rule."
    elif unknown:
        where = line(unknown[0])
        named = ", ".join(map(at, unknown))
        reason = f"on its path is the rule of {named}, which cannot be compared with its function. Fix: that rule."
    else:
        reason = "no custom rule is to blame. Fix: check the rules and the `stop_gradient`s on its path."
    yield Finding("mismatch", "error", path, where, f"{begin}; {reason}")


def _blame(blame: Blame) -> str:
    does = "computes another value than" if blame.of_value else "is not the derivative of"
    return f"the rule of {at(blame.chain)} {does} its function{blame.place}. Fix: correct the rule."


def _numbers_of(evidence: Evidence, leaf: int, derivative: LeafDerivative) -> str:
    names = {
        "forward": "the forward derivative is wrong",
        "reverse": "the gradient is wrong",
        "both": "the derivative is wrong",
        "one": "the forward and the reverse derivative contradict each other",
    }
    flat = derivative.element
    where_in = "" if flat is None else element(flat, evidence.program.leaves[leaf].shape)
    nearby = ", at a point nearby (this one is at a kink)" if derivative.place == "nearby" else ""
    got, expected = _number(derivative.got), _number(derivative.expected)
    begin = names.get(derivative.wrong, "the derivative is wrong")
    return f"{begin}: it is {got}{where_in}, and finite differences give {expected}{nearby}"


def _number(value: complex) -> str:
    # No negative zeros.
    return f"{value + 0.0:.6g}"


def _slight(evidence: Evidence, rules: Rules, leaf: int, derivative: LeafDerivative) -> Iterator[Finding]:
    """Findings for a disagreement that low precision or an iteration may explain, unless another rule is wrong."""
    path, off = evidence.program.paths[leaf], derivative.relative
    loops = [c for c in evidence.smooth.chains if _slack(c) and leaf in evidence.leaves_into(c)]
    if off <= _OF_CONSTANTS:
        why = "an iteration" if loops else "constants of low precision"
        message = f"derivative and differences disagree by {off:.1e}, which {why} may explain."
        yield Finding("precision", "info", path, "", message)
        return
    blamed = [blame for blame in rules.to_blame_for(leaf) if not _contains_iteration(blame.chain)]
    for blame in blamed:
        begin = _numbers_of(evidence, leaf, derivative)
        yield Finding("mismatch", "error", path, line(blame.chain), f"{begin}; {_blame(blame)}")
    if blamed:
        return
    yield _unconverged(path, off, next((c for c in loops if line(c)), loops[0]))


def _unconverged(path: str, off: float, solver: Chain) -> Finding:
    message = (
        f"derivative and differences disagree by {off:.1e}: the iteration in {at(solver)} has not converged further. "
        "Fix: tighten its tolerance, if that is not enough."
    )
    return Finding("precision", "info" if off <= _CONVERGED else "warning", path, line(solver), message)


def _inconclusive(derivative: LeafDerivative) -> str:
    begin = "inconclusive: finite differences neither confirm nor refute the gradient"
    if derivative.kinks or derivative.jumps:
        return f"{begin}, because the point is at a {'kink' if derivative.kinks else 'jump'}. Fix: check another point."
    return (
        f"{begin}: the function is noise at small steps, or raises beside the point. Fix: check in float64, or at "
        "another point."
    )


def _stopped(path: str, derivative: LeafDerivative) -> str:
    mark = mark_of(derivative.excuses[0])
    lines = ", ".join(dict.fromkeys(filter(None, map(line, derivative.excuses))))
    by = f"`{path}` is held by {mark}" if mark else f"`stop_gradient` at {lines} stops part of it"
    remedy = REBUILT if mark else "remove it, unless it is intentional"
    if all(map(is_fixed_draw, derivative.excuses)):
        by, remedy = (
            f"the draw at {lines} has gradient='fixed'",
            "none needed if that is meant, else another word for it",
        )
    got, expected = _number(derivative.got), _number(derivative.expected)
    return (
        f"the gradient is {got} where the function changes by {expected}; {by}, and without that the two agree. "
        f"Fix: {remedy}."
    )
