"""One check of a function at one point: the questions, in order."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import cached_property, is_staging
from .._programs import FOREIGN, Chain, Operands, raised_at
from .._transforms import Call, first_of_pair
from ..errors import ArgumentError
from .compare import Comparison
from .cuts import around
from .draws import draws
from .eager import may_differ_eagerly
from .exact import Exact
from .explained import told_once
from .finding import Finding, merged
from .float64 import widened
from .growth import with_growth
from .implicit import has_implicit_draw, holding_implicit_draws, implicit_draws_of_leaves
from .indices import asked, indices
from .intended import Meant, intended
from .jumps import jumps_at
from .names import finding, rule_of
from .nonfinite import nonfinite
from .outcomes import Outcomes
from .own import Own, cotangents_of, weights_of
from .point import Point
from .precision import least
from .program import Program, differentiable
from .progress import Progress
from .questions import Search
from .report import GradientReport
from .rounding import is_undecided, lost_digits
from .rows import paths_of, report_of
from .rules import Rules
from .smoothing import MENDED, Smoothing
from .steps import coarse_steps
from .surrogates import declared
from .untraced import compared_eagerly
from .values import CONCRETIZATION, Values, untraceable, with_open_marks
from .verdict import ERROR, INCONCLUSIVE, OK, STOPPED, worst
from .zeros import STAIRS, barrier, zeros

# What JAX adds to its errors.
_BESIDE_THE_POINT = ("See http", "For simplicity, JAX", "To catch the leak", "JAX transformations require")
# How far beside the point a function that is flat there is looked at, relative to the size of a leaf.
_BESIDE = 1e-2
# The kinds of findings about whether a derivative is right, and the reasons of those by which a part of it is cut.
_ABOUT = frozenset({"mismatch", "jump", "noise", "oob"})
_CUTS = frozenset({"stop", "stop beside", "stopped draw", "rule stop", "mark", "stairs"})
# The steps of progress before and after finite differences.
_STEPS = 4


class Options(NamedTuple):
    """What is compared, and how much of it; the function has the name."""

    name: str
    exhaustive: bool
    seed: int
    directions: int
    has_aux: bool
    forward: bool
    intended: tuple[Meant, ...]


def examine(call: Call, options: Options, progress: Progress) -> GradientReport:
    """Check a call of a function, and report."""
    differentiated = lambda output: differentiable(first_of_pair(output) if options.has_aux else output)
    evaluated = 0

    def outputs(leaves: Operands) -> Operands:
        nonlocal evaluated
        evaluated += 1
        return differentiated(call(list(leaves)))

    leaves = list(map(jnp.asarray, call.selected))
    progress.expect(_STEPS)
    generator = np.random.default_rng(options.seed)
    report = lambda gradient, findings, verdicts, **cost: report_of(
        options.name, call, gradient, findings, verdicts, {"function": evaluated, **cost}
    )
    try:
        program = Program(outputs, leaves, paths_of(call), forward=options.forward)
    except CONCRETIZATION as error:
        plain = outputs(leaves)
        refuse_tracers(options.name, plain)
        gradient = _eager_gradient(outputs, leaves, cotangents_of(weights_of(plain, generator), plain))
        return report(gradient, [untraceable(error)], [ERROR] * len(leaves))
    except jax.errors.UnexpectedTracerError as error:
        return report([], [no_reverse(None, error)], [ERROR] * len(leaves))
    refuse_tracers(options.name, program.traced.consts)
    if not program.out_avals:
        raise ArgumentError(
            f"`{options.name}` returns nothing that has a derivative.",
            "Expected at least one floating or complex array among its outputs.",
            fix="return the number to differentiate; integers have no derivative.",
        )
    progress.tick("traced")
    may_differ = may_differ_eagerly(outputs, program.traced, leaves)
    own = Own(program, weights_of(program.out_avals, generator), [outputs(leaves) for _ in range(2 * may_differ)])
    try:
        own.run(asked(program))
    except jax.errors.JaxRuntimeError as error:
        # What fails when it runs fails as the user wrote it too; or else it would print its traceback again.
        outputs(leaves)
        return report([], [no_reverse(program, error)], [ERROR] * len(leaves))
    progress.tick("values")
    examination = _Examination(own, options, generator, progress)
    if call.level:
        held = lambda leaves: differentiated(call.with_marks_held(leaves))
        examination.findings += with_open_marks(own, held)
    examination.run()
    findings, verdicts = examination.concluded()
    cost = {"derivative": len(own.runs), "finite differences": examination.evaluations}
    return report(own.gradients, findings, verdicts, **cost)


class _Examination:
    """The questions about a program, and what they found."""

    def __init__(self, own: Own, options: Options, generator: np.random.Generator, progress: Progress):
        self._own, self._options, self._progress = own, options, progress
        self._program, self._generator = own.program, generator
        self._rules = Rules(own.program)
        self._comparison: Comparison | None = None
        self.findings: list[Finding] = []

    @cached_property
    def _with_draws(self) -> Point:
        """The point of the program as it is, with all that it draws."""
        program = self._program
        leaves = [widened(leaf) for leaf in program.leaves]
        return Point(Exact(program), leaves, self._own.weights, Outcomes(program))

    @cached_property
    def _point(self) -> Point:
        return self._with_draws.of(holding_implicit_draws(self._with_draws.exact))

    @property
    def evaluations(self) -> int:
        """How often the function was evaluated in float64."""
        return self._point.exact.evaluations if "_point" in self.__dict__ else 0

    def run(self) -> None:
        """Ask all questions."""
        own, say, values = self._own, self.findings.extend, Values(self._own)
        say(values.repeated())
        is_stable = all(finding.severity == "info" for finding in self.findings)
        if is_stable:
            say(values.compared(self._rules))
        if own.missing is not None and not self._options.forward:
            self.findings.append(no_reverse(self._program, own.missing, self._rules.refusing(own.missing)))
        say(nonfinite(own, lambda: self._point))
        say(indices(own))
        say(self._draws())
        self._progress.tick("operations")
        if is_stable:
            self._compare()
        self.findings = with_growth(self.findings, self._program, lambda: self._point)
        self.findings = [self._with_surrogate(found) for found in told_once([*self.findings, *self._zeros()])]
        self.findings += self._coarse_steps()
        verdict = lambda leaf: self._verdict(leaf, self._program.paths[leaf], self.findings)
        self.findings += list(declared(self._program, verdict))
        self._progress.tick("zeros")

    def _compare(self) -> None:
        """Compare derivatives with differences; what was already found needs no second explanation."""
        own, program = self._own, self._program
        if not own.is_traced:
            self.findings += compared_eagerly(own, self._point, self._rules, self._generator)
            return
        # What is not finite has no slope, and what is read out of bounds was found to disagree.
        bad = self._in_error("nan", "oob")
        leaves = [leaf for leaf, path in enumerate(program.paths) if path not in bad and own.is_finite]

        def tick(now: int, of: int) -> None:
            if now == 1:
                self._progress.expect(of)
            self._progress.tick("finite differences")

        search = Search(self._point, self._generator, leaves)
        search.look_around(self._options.directions, self._options.exhaustive, tick)
        answers = {leaf: search.answer(leaf) for leaf in leaves}
        self._comparison = Comparison(own, search, self._rules, answers)
        self.findings += self._comparison.findings()
        # What is stopped before or after a draw was told, unless the draw is scored.
        beside_draws = self._around(implicit_draws_of_leaves(program))
        self.findings += (found for found in beside_draws if found.reason not in ("stop", "stop beside"))
        wrong = self._in_error("mismatch")
        # In float64, an implicit draw is held.
        is_asked = lambda leaf: program.paths[leaf] not in wrong and not has_implicit_draw(program, leaf)
        answers, exhaustive = self._comparison.answers, self._options.exhaustive
        self.findings += lost_digits(own, search, answers, exhaustive, is_asked)

    def _around(self, chains: Sequence[Chain]) -> Iterator[Finding]:
        """What is wrong before and after operations whose own derivative is declared."""
        how = self._options.directions, self._options.exhaustive
        return around(self._program, chains, self._generator, *how, known=self.findings) if chains else iter(())

    def _draws(self) -> Iterator[Finding]:
        """The findings of draws; a threshold at which the value jumps decides like any other."""
        for found in draws(self._program):
            is_decision = found.reason == "threshold" and self._jumps(found)
            yield dataclasses.replace(found, severity="warning", reason="decision") if is_decision else found

    def _jumps(self, found: Finding) -> bool:
        return jumps_at(self._with_draws, self._numbers(found)[0], found.chain)

    def _numbers(self, found: Finding) -> list[int]:
        """Which of the leaves a finding concerns."""
        return [leaf for leaf, path in enumerate(self._program.paths) if path in found.leaves]

    def _in_error(self, *kinds: str) -> set[str]:
        """The leaves in which there are errors of some kinds."""
        found = (f for f in self.findings if f.severity == "error" and f.kind in kinds)
        return {leaf for finding in found for leaf in finding.leaves}

    def _zeros(self) -> list[Finding]:
        is_flat = self._comparison.is_flat if self._comparison else lambda leaf: False
        explained = {leaf for found in self.findings if found.severity == "error" for leaf in found.leaves}
        stairs = {leaf: found.figures for found in self.findings if found.reason == "stairs" for leaf in found.leaves}
        found = zeros(self._own, is_flat, explained) if self._own.is_finite else ()
        told = (self._by_steps(self._stationary(self._underflowing(zero))) for zero in found)
        in_steps = lambda zero: dataclasses.replace(zero, figures=stairs.get(zero.leaves[0]))
        return [in_steps(zero) if zero.reason in STAIRS else zero for zero in told]

    def _coarse_steps(self) -> Iterator[Finding]:
        """Notes for leaves of which nothing else is known but that the derivative is the slope."""
        told = {
            leaf for found in self.findings if found.severity != "info" or found.kind == "draw" for leaf in found.leaves
        }
        answers = self._comparison.answers.items() if self._comparison else ()
        is_quiet = lambda leaf, answer: answer.row.name == "agrees" and self._program.paths[leaf] not in told
        return coarse_steps(self._point, [leaf for leaf, answer in answers if is_quiet(leaf, answer)])

    def _underflowing(self, zero: Finding) -> Finding:
        """The finding for a gradient that is zero only in its own precision; or else the same."""
        exact = self._point.gradient if zero.reason in ("truly zero", "cancels") and self._comparison else None
        leaves = self._numbers(zero)
        dtype = self._program.leaves[leaves[0]].dtype
        if exact is None or not all(0 < np.linalg.norm(exact[leaf]) < least(dtype) for leaf in leaves):
            return zero
        size = max(float(np.linalg.norm(exact[leaf])) for leaf in leaves)
        return finding("zero", "warning", "underflow", zero.leaves, zero.chain, rule=None, dtype=str(dtype), size=size)

    @cached_property
    def _smoothing(self) -> Smoothing:
        return Smoothing(self._own, self._point)

    def _with_surrogate(self, zero: Finding) -> Finding:
        """The finding for what is only compared, rounded or counted, with a surrogate as its fix if that helps."""
        if zero.kind != "zero" or zero.reason not in MENDED or self._program.cotangent is None:
            return zero
        (leaf,) = self._numbers(zero)
        return dataclasses.replace(zero, fix=self._smoothing.fix(zero, leaf))

    def _stationary(self, zero: Finding) -> Finding:
        """The finding for a rule that gives a zero where the slope is zero, but not beside; or else the same."""
        if zero.reason != "rule" or not self._comparison:
            return zero
        point = self._point
        for leaf in self._numbers(zero):
            along = [np.zeros_like(x) for x in point.leaves]
            along[leaf] = np.where(point.leaves[leaf] == 0, 1.0, point.leaves[leaf])
            beside = [point.exact.value(point.leaves, along, step) for step in (_BESIDE, -_BESIDE)]
            if all(np.array_equal(value, point.start) for value in beside):
                return zero
        return dataclasses.replace(zero, severity="info", reason="truly zero")

    def _by_steps(self, zero: Finding) -> Finding:
        """The finding for a leaf that arrives by steps only, as it is rounded, and elsewhere is left out."""
        told = {leaf for found in self.findings if found.kind in ("tie", "jump") for leaf in found.leaves}
        if zero.reason not in ("left out", "not chosen") or not self._comparison or told.issuperset(zero.leaves):
            return zero
        partly = next(coarse_steps(self._point, self._numbers(zero)), None)
        return zero if partly is None else barrier(zero.leaves[0], partly.chain)

    def concluded(self) -> tuple[list[Finding], list[str]]:
        """The findings, each cause once, and the verdict on each leaf."""
        found = [self._with_name(finding) for finding in self.findings]
        meant = [f.rule.functions for f in intended(found, self._options.intended) if f.intended and f.rule]
        if meant and self._comparison:
            ruled = [c for c in self._program.smooth.chains if (rule := rule_of(c)) and rule.functions in meant]
            found += self._around(ruled)
        findings = list(intended(found, self._options.intended))
        findings += [wrong for finding in findings if finding.intended for wrong in self._within(finding)]
        verdicts = [self._verdict(leaf, path, findings) for leaf, path in enumerate(self._program.paths)]
        return merged(findings, self._program.paths), verdicts

    def _within(self, meant: Finding) -> Iterator[Finding]:
        """What is wrong in a rule that is intended: the rules that it uses."""
        if meant.rule is None or meant.kind != "mismatch":
            return
        for blame in self._rules.wrong_within(meant.chain):
            more = {"element": blame.element, "steps": blame.steps, "outer": meant.rule.name}
            yield finding("mismatch", "error", "rule within", meant.leaves, blame.chain, figures=meant.figures, **more)

    def _with_name(self, finding: Finding) -> Finding:
        """A finding that says which named value the operation is computed from."""
        after = self._program.named_before(finding.chain) if finding.severity != "info" else ""
        return dataclasses.replace(finding, details={**finding.details, "after": after}) if after else finding

    def _verdict(self, leaf: int, path: str, findings: list[Finding]) -> str:
        own = [finding for finding in findings if path in finding.leaves or not finding.leaves]
        if any(finding.severity == "error" for finding in own):
            return ERROR
        compared = self._comparison.answers.get(leaf) if self._comparison else None
        if compared is None:
            is_unknown = self._own.is_traced or any(finding.kind == "noise" for finding in own)
            return INCONCLUSIVE if is_unknown else OK
        told = [finding for finding in own if finding.kind in _ABOUT or is_undecided(finding)]
        # A zero may stand for the mismatch that it explains; one that is meant excuses it.
        told += [finding for finding in own if finding.kind == "zero" and finding.intended]
        left = [finding for finding in told if not finding.intended]
        # What is meant explains the row; and what was compared with noise says nothing.
        is_of_row = len(left) == len(told) and not any(finding.kind == "growth" for finding in own)
        return worst([*([compared.row.verdict] if is_of_row else []), *map(_verdict_of, left)])


def _verdict_of(finding: Finding) -> str:
    """The verdict on a leaf of which nothing else is known."""
    if is_undecided(finding) or finding.kind in ("jump", "noise") or finding.reason == "outside":
        return INCONCLUSIVE
    return STOPPED if finding.reason in _CUTS and finding.severity == "warning" else OK


def no_reverse(program: Program | None, error: Exception, rule: Chain = ()) -> Finding:
    """The finding for a function without a gradient that JAX could compute, and the rule that raises.

    There is no program if it cannot even be traced.
    """
    chains = program.smooth.chains if program else []
    loops = [c for c in chains if c[-1].primitive.name == "while" and program and program.leaves_into(c)]
    if loops and isinstance(error, ValueError):
        return finding("mismatch", "error", "no loop", [], loops[0])
    foreign = [c for c in chains if c[-1].primitive.name in FOREIGN and program and program.leaves_into(c)]
    # What went wrong is said last; what was going on then, first.
    lines = [line.strip() for line in str(error).split("\n")]
    told = [line for line in lines if line.strip("-") and not line.startswith(_BESIDE_THE_POINT)]
    text = (told or [type(error).__name__])[-1][:300]
    more = {"error": type(error).__name__, "text": text}
    if raising := [*foreign, *filter(None, [rule])]:
        return finding("mismatch", "error", "no reverse", [], raising[0], **more)
    file, number = raised_at(error)
    return Finding("mismatch", "error", "no reverse", (), file, number, details=more)


def refuse_tracers(name: str, values: list[Any], what: str = "check") -> None:
    """Raise if a value is a tracer, or what is computed of values is one, for a check or a survey."""
    if is_staging() or any(isinstance(value, jax.core.Tracer) for value in values):
        raise ArgumentError(
            f"`{what}` of `{name}` was called inside `jit`, `grad`, `vmap` or another transformation.",
            "Expected concrete values, in the arguments and in what the function closes over: it runs the "
            "function and looks at numbers.",
            fix=f"{what} the function outside, before it is transformed.",
        )


def with_new_arguments(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments rebuilt for each run: some, such as `equinox.nn.State`, can be used only once."""

    @functools.wraps(f, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda leaf: leaf, (args, kwargs))
        return f(*args, **kwargs)

    return run


def _eager_gradient(outputs: Callable[[Operands], Operands], leaves: Operands, cotangents: Operands) -> Operands:
    """The gradient of a function that cannot be traced, if it has one."""
    try:
        return list(jax.vjp(outputs, leaves)[1](cotangents)[0])
    except Exception:  # It is the user's code; that it cannot be traced has its own finding, whatever is raised here.
        return []
