"""Findings from comparisons: of values with values, of derivatives with differences, of runs with runs."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .derivatives import Derivatives, LeafDerivative
from .divergence import eager_or_traced
from .draws import has_implicit_draw
from .evidence import Evidence, at, element, steps_of
from .finding import Finding
from .program import Chain
from .rules import Rules
from .source import line
from .stability import Scale, Unstable, condition, unstable_equation
from .ties import Ties
from .values import Disagreement, Unavailable
from .zeros import mark_of

_WAYS = {
    "jit": "`jax.jit(f)`",
    "vjp": "the value in `jax.value_and_grad`",
    "jvp": "the value in `jax.jvp`",
    "linearize": "the value in `jax.linearize`",
}
# Relative errors of a gradient: what cannot be trusted, and what is worth telling where a conversion explains it.
_LOST = 1e-2
_TOLD = 1e-5
# What a stop of no consequence leaves of a mismatch.
_SLIGHT = 1e-3
_ILL_CONDITIONED = 1e10
# Curvatures that are rounding, in proportion to the largest slope.
_NO_CURVATURE = 1e-8


def of_runs(evidence: Evidence, found: list[Unstable]) -> Iterator[Finding]:
    """One finding if two runs at one point differ; severe if by more than rounding."""
    if not found:
        return
    if all(unstable.is_rounding for unstable in found):
        largest = max(unstable.absolute for unstable in found)
        message = f"two runs at the same point differ by {largest:.1e}, by rounding: sums are not always in one order."
        yield Finding("nondeterminism", "info", "", "", message)
        return
    chain = unstable_equation(evidence.program)
    worst = max((u for u in found if u.apart), key=lambda u: u.absolute)
    by = f" The first that differs is {at(chain)}." if chain else ""
    ways = {"eager": "the function", "jit": "the function under `jit`", "gradient": "the gradient"}
    message = (
        f"two runs of {ways[worst.way]} at the same point differ by {worst.absolute:.2g}; no derivative can be "
        f"compared with anything.{by} Fix: pass in what changes, a key for one, as an argument."
    )
    yield Finding("nondeterminism", "error", "", line(chain) if chain else "", message)


def of_values(evidence: Evidence, rules: Rules, found: list[Disagreement]) -> Iterator[Finding]:
    """Findings if the ways to evaluate the function do not agree: one for each leaf of the rule to blame, else one."""
    if not found:
        return
    worst = max(found, key=lambda disagreement: disagreement.apart.absolute)
    ways = ", ".join(dict.fromkeys(_WAYS[disagreement.way] for disagreement in found))
    first, second = worst.apart.first, worst.apart.second
    what = f"the function has more than one value: f(x) is {first:.8g}, but {ways} gives {second:.8g}"
    wrong = rules.wrong_values()
    if len({line(blame.chain) for blame in wrong}) == 1:
        chain = wrong[0].chain
        reason = f"the rule of {at(chain)} computes another value"
        mend = "Fix: return from the rule what the function itself returns."
        for path in [evidence.program.paths[leaf] for leaf in evidence.leaves_into(chain)] or [""]:
            yield Finding("value", "error", path, line(chain), f"{what}; {reason}. {mend}")
        return
    where = eager_or_traced(evidence.program.outputs, evidence.program.leaves)
    reason = "Python takes another way where it is traced" if where else "a rule or a branch knows that it is traced"
    yield Finding("value", "error", "", where, f"{what}; {reason}. Fix: compute the same value in every mode.")


def untraceable(unavailable: Unavailable | Exception, where: str) -> Finding:
    """The function needs values where JAX has none to give."""
    error = unavailable.error if isinstance(unavailable, Unavailable) else unavailable
    message = (
        "the function needs to know the value of what is traced, as `if x > 0` does, and so runs neither under `jit` "
        f"nor in a check; only its gradient was computed ({type(error).__name__}). Fix: write `jnp.where` or "
        "`jax.lax.cond`, or mark as static what decides."
    )
    return Finding("value", "error", "", where, message)


def without_reverse(evidence: Evidence, unavailable: Unavailable) -> Finding:
    """The function has no gradient that JAX could compute."""
    loops = [c for c in evidence.smooth.chains if c[-1].primitive.name == "while" and evidence.leaves_into(c)]
    chain: Chain = loops[0] if unavailable.reason == "while" and loops else ()
    if chain:
        message = (
            f"reverse mode does not exist for the `while` loop at {line(chain)}, so there is no gradient; the forward "
            "derivative was checked. Fix: a loop of a known number of steps (`jax.lax.scan`), or a custom rule."
        )
        return Finding("mismatch", "error", "", line(chain), message)
    text = str(unavailable.error).partition("\n")[0][:300]
    message = f"reverse mode raises {type(unavailable.error).__name__}, so there is no gradient: {text}"
    return Finding("mismatch", "error", "", unavailable.where, message)


def of_derivatives(evidence: Evidence, rules: Rules, ties: Ties, found: Derivatives) -> Iterator[Finding]:
    """Findings about each leaf whose derivatives and differences disagree, or are at a tie."""
    for leaf, derivative in enumerate(found.leaves):
        path = evidence.program.paths[leaf]
        if has_implicit_draw(evidence, leaf):
            continue
        # A derivative that is not finite has a finding of its own; or it is NaN only where the zero tangents of other
        # leaves were multiplied by infinity.
        if derivative.status == "mismatch" and np.isfinite(derivative.got):
            yield _mismatch(evidence, rules, leaf, derivative)
        elif derivative.status == "stopped":
            chain = derivative.stopped[0]
            # An adaptive solver may stop the derivative of its steps: they change little.
            severity = "warning" if derivative.relative > _SLIGHT else "info"
            yield Finding("mismatch", severity, path, line(chain), _stopped(path, derivative, chain))
        elif derivative.status == "symmetric":
            chain = derivative.stopped[0]
            message = (
                f"the derivative of {at(chain)} is that of a symmetric matrix, and this one is moved element by "
                "element; if it moves symmetrically, the two agree. Fix: nothing, or give it (a + a.T) / 2."
            )
            yield Finding("mismatch", "warning", path, line(chain), message)
        elif derivative.status == "rounding":
            message = (
                f"derivative and differences disagree by {derivative.relative:.1e}, as the tolerance of an iteration "
                "or constants of low precision may explain."
            )
            yield Finding("precision", "info", path, "", message)
        if derivative.status == "tie" or (derivative.kinks and derivative.status in ("agree", "inconclusive")):
            yield from _tie(ties, leaf, path, derivative)


def _mismatch(evidence: Evidence, rules: Rules, leaf: int, derivative: LeafDerivative) -> Finding:
    names = {
        "forward": "the forward derivative is wrong",
        "reverse": "the gradient is wrong",
        "both": "the derivative is wrong",
        "one": "the forward and the reverse derivative contradict each other",
    }
    where_in = "" if derivative.element is None else _of_element(evidence, leaf, derivative.element)
    nearby = "" if derivative.at_point == "mismatch" else ", at a point nearby (this one is at a kink)"
    got, expected = _number(derivative.got), _number(derivative.expected)
    size = f"it is {got}{where_in}, and finite differences give {expected}{nearby}"
    begin = f"{names.get(derivative.wrong, 'the derivative is wrong')}: {size}"
    blame = rules.to_blame_for(leaf)
    path = evidence.program.paths[leaf]
    wrong_values = rules.wrong_values()
    if blame is None and len({line(wrong.chain) for wrong in wrong_values}) == 1:
        chain = wrong_values[0].chain
        message = f"{begin}; the rule of {at(chain)} computes another value than its function. Fix: the rule."
        return Finding("mismatch", "error", path, line(chain), message)
    if blame is None:
        advice = "No single custom rule is to blame. Fix: check the rules and the `stop_gradient`s on its way."
        return Finding("mismatch", "error", path, "", f"{begin}. {advice}")
    place = f"{element(blame.element, blame.shape)}{steps_of(blame.steps)}"
    message = f"{begin}; the rule of {at(blame.chain)} is not the derivative of its function{place}. Fix: the rule."
    return Finding("mismatch", "error", path, line(blame.chain), message)


def _of_element(evidence: Evidence, leaf: int, flat: int) -> str:
    return element(flat, evidence.program.leaves[leaf].shape)


def _number(value: complex) -> str:
    return f"{value:.6g}"


def _stopped(path: str, derivative: LeafDerivative, chain: Chain) -> str:
    mark = mark_of(chain)
    lines = ", ".join(dict.fromkeys(filter(None, map(line, derivative.stopped))))
    by = f"`{path}` is held by {mark}" if mark else f"`stop_gradient` at {lines} stops a part of it"
    mend = "thaw it" if mark else "take it away"
    got, expected = _number(derivative.got), _number(derivative.expected)
    return (
        f"the gradient is {got} where the function changes by {expected}; {by}, and without that the two agree. "
        f"Fix: {mend}, unless it is meant."
    )


def _tie(ties: Ties, leaf: int, path: str, derivative: LeafDerivative) -> Iterator[Finding]:
    tied = ties.of(leaf)
    if not tied:
        if derivative.status == "tie":
            message = "the derivative here is not that of points nearby: a kink, whose operation was not found."
            yield Finding("tie", "warning", path, "", message)
        return
    first = tied[0]
    place = f"{element(int(first.numbers[0]), _shape(first.chain[-1]))}{steps_of([first.steps])}"
    message = (
        f"the point is on an exact tie of {at(first.chain)}{place}, where the derivative is a convention. "
        "Fix: nothing, if any slope between those of the two sides will do; else another point."
    )
    yield Finding("tie", "warning", path, line(first.chain), message)


def _shape(equation: JaxprEqn) -> tuple[int, ...]:
    aval = max((atom.aval for atom in [*equation.invars, *equation.outvars]), key=lambda aval: len(aval.shape))
    return tuple(aval.shape) if len(equation.outvars[0].aval.shape) == len(aval.shape) else ()


def of_precision(evidence: Evidence, found: Derivatives) -> Iterator[Finding]:
    """One finding for each leaf whose gradient has lost its digits to rounding."""
    for leaf, derivative in enumerate(found.leaves):
        error, dtype = derivative.precision, evidence.program.leaves[leaf].dtype
        if derivative.cancels:
            message = "the gradient is zero but for rounding errors: its parts cancel."
            yield Finding("zero", "info", evidence.program.paths[leaf], "", message)
        if error is None or not error < float("inf"):
            continue
        narrow = _narrowing(evidence, leaf) if error > _TOLD else None
        if error <= _LOST and narrow is None:
            continue
        path = evidence.program.paths[leaf]
        what = f"the gradient in {dtype} is off by {error:.1e} of its size from that in float64"
        if narrow is None:
            message = f"{what}: digits cancel. Fix: rewrite what cancels, or compute it in a wider type."
            yield Finding("precision", "warning", path, "", message)
        else:
            kind = narrow[-1].outvars[0].aval.dtype
            through = f"it goes through {kind} at {line(narrow)}"
            message = f"{what}; {through}. Fix: nothing, if {kind} is meant to be enough."
            yield Finding("precision", "warning", path, line(narrow), message)


def _narrowing(evidence: Evidence, leaf: int) -> Chain | None:
    """The first conversion of what depends on a leaf to a type with fewer digits."""
    for chain in evidence.smooth.chains:
        equation = chain[-1]
        if equation.primitive.name == "convert_element_type" and evidence.is_out_of(leaf, chain):
            given, made = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            if jnp.finfo(made).eps > jnp.finfo(given).eps:
                return chain
    return None


def of_scale(evidence: Evidence, scale: Scale | None) -> Iterator[Finding]:
    """One finding if one step size cannot serve all leaves."""
    if scale is None:
        return
    paths = evidence.program.paths
    message = (
        f"gradients are so unlike in size that one step size cannot serve both: {scale.gradients[0]:.1e} for "
        f"`{paths[scale.largest]}` and {scale.gradients[1]:.1e} for `{paths[scale.smallest]}`. "
        "Fix: rescale the parameters, or optimise their logarithms."
    )
    yield Finding("scale", "warning", "", "", message)


def of_curvature(evidence: Evidence, found: Derivatives | None) -> Iterator[Finding]:
    """One finding if a function curves far more along one leaf than along another: slow for a first-order optimiser."""
    leaves = found.leaves if found else []
    # A function that is linear in a leaf seems to curve along it, by the rounding of its differences.
    nothing = _NO_CURVATURE * max((derivative.size for derivative in leaves), default=0.0)
    means = [(leaf, float(np.mean(np.abs(d.second)))) for leaf, d in enumerate(leaves) if d.second]
    pairs = [(leaf, mean) for leaf, mean in means if mean > nothing]
    number = condition([second for _, second in pairs])
    if number is None or not number.number > _ILL_CONDITIONED:
        return
    most, least = (evidence.program.paths[pairs[place][0]] for place in (number.largest, number.smallest))
    message = (
        f"curvatures along the leaves, each moved in proportion to its size, differ by {number.number:.0e}: most along "
        f"`{most}`, least along `{least}`. Nothing is wrong, but a first-order optimiser will be slow."
    )
    yield Finding("scale", "info", "", "", message)


def of_tracing(evidence: Evidence, leaves: list[int], known: list[Finding]) -> Iterator[Finding]:
    """One finding for each leaf whose gradient is another where the function is traced, unless more is known of it."""
    named = {finding.leaf for finding in known if finding.severity == "error"}
    if "" in named:
        return
    for leaf in leaves:
        path = evidence.program.paths[leaf]
        if path not in named:
            where = eager_or_traced(evidence.program.outputs, evidence.program.leaves)
            message = "the gradient is another under `jit` than without it. Fix: do the same where values are traced."
            yield Finding("mismatch", "error", path, where, message)
