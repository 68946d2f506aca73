"""One check of a function at one point: the questions, in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._display import status_of, tie_in_words, tied_paths
from .._marks import Layout
from .._programs import Operands, line
from .._selection import Target
from .._transforms import OfSelected, selected
from .._trees import describe, paths
from ..errors import ArgumentError
from .derivatives.float64 import widened
from .derivatives.search import LeafDerivative, derivatives
from .evidence import Evidence, cotangents_of
from .finding import Finding
from .findings.draw import draw, has_implicit_draw
from .findings.mismatch import mismatch, slack_of_leaves, without_reverse
from .findings.nan import nan
from .findings.nondeterminism import nondeterminism
from .findings.oob import oob
from .findings.precision import precision
from .findings.tie import Ties, tie
from .findings.value import CONCRETIZATION, untraceable, value, value_with_open_marks
from .findings.zero import zero
from .intended import Meant, intended
from .numbered import NumberedProgram, differentiable
from .progress import Progress
from .report import GradientReport, LeafRow
from .rules import Rules

# The steps of progress before and after finite differences.
_STEPS = 4


class Options(NamedTuple):
    """What is compared, and how much of it."""

    exhaustive: bool
    seed: int
    directions: int
    has_aux: bool
    forward: bool
    intended: tuple[Meant, ...]


def examine(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: list[Target],
    options: Options,
    progress: Progress,
) -> GradientReport:
    """Check a call of a function, and report."""
    of_selected = OfSelected(_with_new_arguments(f), args, kwargs, targets)
    differentiated = lambda output: differentiable(output[0] if options.has_aux else output)
    outputs = lambda leaves: differentiated(of_selected(list(leaves)))
    leaves = list(map(jnp.asarray, selected(targets)))
    progress.expect(_STEPS)
    plain, again = outputs(leaves), outputs(leaves)
    refuse_tracers(f, plain)
    if not plain:
        raise ArgumentError(
            f"`{_name(f)}` returns nothing that has a derivative.",
            "Expected at least one floating or complex array among its outputs.",
            fix="return the number to differentiate; integers have no derivative.",
        )
    generator = np.random.default_rng(options.seed)
    weights = _weights(plain, generator)
    try:
        program = NumberedProgram(outputs, leaves, _paths(targets), forward=options.forward)
    except CONCRETIZATION as error:
        gradient = _eager_gradient(outputs, leaves, cotangents_of(weights, plain))
        return _report(f, targets, gradient, [untraceable(error)], None, {})
    program.differentiate()
    progress.tick("traced")
    evidence = Evidence(program, plain, weights)
    _ = evidence.runs
    progress.tick("values")
    examination = _Examination(evidence, options, generator, progress)
    if of_selected.level:
        held = differentiated(of_selected.with_marks_held(leaves))
        examination.findings += value_with_open_marks(plain, held)
    examination.run(again)
    findings = list(intended(examination.findings, options.intended))
    evaluations = 0 if examination.compared is None else evidence.point.exact.evaluations
    cost = {"function": 4, "derivative": 2, "finite differences": evaluations}
    return _report(f, targets, evidence.gradients, findings, examination.compared, cost)


class _Examination:
    """The questions about a program, and what they found."""

    def __init__(self, evidence: Evidence, options: Options, generator: np.random.Generator, progress: Progress):
        self._evidence, self._options, self._progress = evidence, options, progress
        self._generator = generator
        self._rules, self._ties = Rules(evidence), Ties(evidence)
        self.findings: list[Finding] = []
        self.compared: list[LeafDerivative] | None = None

    def run(self, again: Operands) -> None:
        """Ask all questions."""
        evidence, say = self._evidence, self.findings.extend
        say(nondeterminism(evidence, again))
        is_stable = all(finding.severity == "info" for finding in self.findings)
        if is_stable:
            say(value(evidence, self._rules))
        if not self._options.forward:
            say(without_reverse(evidence))
        say(nan(evidence))
        say(oob(evidence))
        say(draw(evidence))
        self._progress.tick("operations")
        if is_stable:
            self._compare()
        self._add_zeros()
        self._progress.tick("zeros")

    def _compare(self) -> None:
        """Compare derivatives with differences; what was already found needs no second explanation."""
        evidence = self._evidence
        # What is not finite has no slope, and that of an implicit draw is not its slope at a fixed key.
        bad = {finding.leaf for finding in self.findings if finding.kind == "nan" and finding.severity == "error"}
        everything = enumerate(evidence.program.paths)
        skipped = {i for i, path in everything if path in bad or has_implicit_draw(evidence, i)}

        def tick(now: int, of: int) -> None:
            if now == 1:
                self._progress.expect(of)
            self._progress.tick("finite differences")

        found = derivatives(
            evidence.program,
            evidence.point,
            self._generator,
            gradient=evidence.gradients or None,
            directions=self._options.directions,
            exhaustive=self._options.exhaustive,
            skipped=skipped,
            slack=slack_of_leaves(evidence),
            tick=tick,
        )
        self.compared = found
        explained = {f.leaf for f in self.findings if f.severity == "error" and f.kind in ("nan", "oob")}
        new = [*mismatch(evidence, self._rules, self._ties, found), *tie(evidence, self._ties, found)]
        new = [finding for finding in new if finding.leaf not in explained or finding.kind != "mismatch"]
        self.findings += new
        wrong = explained | {finding.leaf for finding in new if finding.severity == "error"}
        self.findings += [finding for finding in precision(evidence, found) if finding.leaf not in wrong]

    def _add_zeros(self) -> None:
        for finding in zero(self._evidence, self._is_flat):
            if any(f.leaf == finding.leaf and f.severity == "error" for f in self.findings):
                continue
            # A zero says more than that part of the derivative is stopped.
            self.findings = [f for f in self.findings if not _tells_part_of(finding, f)]
            self.findings.append(finding)

    def _is_flat(self, leaf: int, where: str) -> bool:
        """Whether a line has a tie at which the slopes on both sides equal the derivative."""
        is_right = self.compared is not None and self.compared[leaf].status == "agree"
        is_tied = is_right and any(line(tie.chain) == where for tie in self._ties.of(leaf))
        return is_tied and self._evidence.slope(leaf) is not None


def _tells_part_of(zero: Finding, other: Finding) -> bool:
    is_same = other.severity == "warning" or (bool(zero.where) and other.where == zero.where)
    is_milder = (zero.severity, other.severity) == ("info", "warning")
    return (other.leaf, other.kind) == (zero.leaf, "mismatch") and is_same and not is_milder


def refuse_tracers(f: Callable[..., Any], values: list[Any]) -> None:
    """Raise if a value is a tracer."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise ArgumentError(
            f"`check` of `{_name(f)}` was called inside `jit`, `grad`, `vmap` or another transformation.",
            "Expected concrete values, in the arguments and in what the function closes over: a check runs the "
            "function and looks at numbers.",
            fix="check the function outside, before it is transformed.",
        )


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _with_new_arguments(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments rebuilt for each run: some, such as `equinox.nn.State`, can be used only once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda leaf: leaf, (args, kwargs))
        return f(*args, **kwargs)

    return run


def _weights(plain: list[Any], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """1 for a single real number; else random weights that every precision holds exactly and that seldom cancel."""
    size, is_complex = sum(value.size for value in plain), any(map(jnp.iscomplexobj, plain))
    if size == 1 and not is_complex:
        return np.ones(1)
    draw_some = lambda: generator.choice([-1, 1], size) * generator.integers(4, 8, size) / 4.0
    return draw_some() + 1j * draw_some() if is_complex else draw_some()


def _eager_gradient(outputs: Callable[[Operands], Operands], leaves: Operands, cotangents: Operands) -> Operands:
    """The gradient of a function that cannot be traced, if it has one."""
    try:
        return list(jax.vjp(outputs, leaves)[1](cotangents)[0])
    except Exception:  # That it cannot be traced has its own finding.
        return []


def _paths(targets: list[Target]) -> list[str]:
    """The paths of the differentiated leaves; with several arguments, each begins with the argument."""
    return [_begun(targets, target, target.structure.path(i)) for target in targets for i in target.plan.indices]


def _begun(targets: list[Target], target: Target, path: str) -> str:
    if len(targets) == 1:
        return path
    position = target.position if isinstance(target.position, str) else f"args[{target.position}]"
    return f"{position}{'' if not path or path.startswith('[') else '.'}{path}"


def _report(
    f: Callable[..., Any],
    targets: list[Target],
    gradient: list[Any],
    findings: list[Finding],
    compared: list[LeafDerivative] | None,
    cost: dict[str, int],
) -> GradientReport:
    wrong = {finding.leaf for finding in findings if finding.severity == "error"}
    rows, number = [], 0
    for target in targets:
        chosen = frozenset(target.plan.indices)
        for index, (place, leaf) in enumerate(zip(Layout(target.tree).leaves, target.leaves, strict=True)):
            path = _begun(targets, target, paths.write(place.steps))
            if index not in chosen:
                rows.append(LeafRow(path, describe(leaf), status_of(place, leaf), None))
                continue
            own = gradient[number] if gradient else None
            is_compared = compared is not None and compared[number].status not in ("inconclusive", "absent")
            status = "checked" if is_compared or path in wrong else "inconclusive"
            size, dead = (None, None) if own is None else (_rms(own), int(np.sum(np.asarray(own) == 0)))
            rows.append(LeafRow(path, describe(leaf), status, size, dead))
            number += 1
    ties = (tie_in_words(paths) for target in targets for paths in tied_paths(target))
    notes = (*["matrix products at the highest precision"] * is_rounding_products(), *ties)
    return GradientReport(_name(f), tuple(rows), tuple(dict.fromkeys(findings)), cost, notes)


def is_rounding_products() -> bool:
    """Whether matrix products have fewer digits than their dtype by default."""
    return jax.default_backend() != "cpu"


def _rms(gradient: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(widened(gradient)) ** 2))) if np.size(gradient) else 0.0
