"""check: run a function and its derivatives, and say what is wrong, in which leaf, at which line."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _words as words
from .._display import status_of
from .._marks import Layout
from .._programs import refuse_uncallable
from .._selection import Target
from .._transforms import Arguments, OfSelected, paths as paths_of, refuse_empty
from .._trees import describe, paths
from . import comparisons
from .derivatives import Derivatives, derivatives
from .draws import draws, has_implicit_draw
from .evidence import Evidence
from .finding import Finding as Finding
from .indices import indices
from .nonfinite import nonfinite
from .program import Program, differentiable
from .progress import Progress
from .report import GradientReport as GradientReport, Row
from .rules import Rules
from .stability import has_foreign, unlike_in_scale, unstable
from .symmetric import factorizations, symmetrised
from .ties import Ties
from .user import raised_at
from .values import CONCRETIZATION, Unavailable, Values, noise_of, program_noise, traced_gradient_apart, values
from .zeros import zeros


def check(
    f: Callable[..., Any],
    wrt: Any = None,
    *,
    exhaustive: bool = False,
    seed: int = 0,
    directions: int = 3,
    progress: bool | Callable[[int, int, str], object] | None = None,
) -> Callable[..., GradientReport]:
    """A function that runs `f` and its derivatives at its arguments and reports what is wrong with them.

    Compared are the value of `f` in every mode; the forward and the reverse derivative of each leaf with each other
    and with finite differences of the traced function in float64, whatever its precision, and without running its
    Python again. What is not finite, out of bounds, zero, random, tied or rounded away is traced back to the leaf and
    to the line of the user's code. Nothing of JAX's configuration is changed outside the call.

    Args:
        f: A function of any pytrees to an array or a tree of arrays; of several, a random weighted sum is
            differentiated. `wrt` is about its first argument.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        exhaustive: Whether every element of every leaf is compared by itself, and not only sampled directions.
        seed: What the directions and the weights are drawn with.
        directions: How many directions are sampled for each leaf. About ten evaluations each.
        progress: None shows progress on the standard error after two seconds, True at once, False never; a function is
            called with the number of steps done, the number known of, and what was done.

    Returns:
        A function of the arguments of `f` that returns a `GradientReport`: it prints as a table with a line for each
        leaf, has `ok`, `findings`, `rows` and `cost`, and `raise_if_failed()`.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If an option is not one; when called, inside of a transformation, or if `f` returns nothing that
            has a derivative.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> def loss(p):
        ...     return jnp.sum(jnp.where(p["x"] > 0, jnp.log(p["x"]), 0.0)) * p["scale"]
        >>> report = pg.check(loss)({"x": jnp.array([0.0, 1.0]), "scale": 2.0, "old": 1.0})
        >>> report.ok
        False
        >>> [(finding.kind, finding.leaf) for finding in report.findings]
        [('nan', "['x']"), ('zero', "['old']"), ('zero', "['scale']")]
    """
    refuse_uncallable("check", f)
    if isinstance(directions, bool) or not isinstance(directions, int) or directions < 1:
        raise words.not_a_number_of_directions(directions)
    arguments = Arguments(f, wrt, None, None)
    shown = Progress(progress)

    # Not `__dict__`: a model with __call__ keeps its parameters there.
    @functools.wraps(f, updated=())
    def checked(*args: Any, **kwargs: Any) -> GradientReport:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            raise words.check_of_tracers(getattr(f, "__name__", type(f).__name__))
        targets = arguments.targets(args, kwargs)
        refuse_empty(targets)
        function = OfSelected(f, args, kwargs, targets)
        # NaN and infinity are what is looked for.
        with shown, np.errstate(all="ignore"):
            return _Checking(f, function, targets[0], exhaustive, seed, directions, shown).report()

    return checked


class _Checking:
    """One check of a function at one point."""

    def __init__(
        self,
        f: Callable[..., Any],
        function: Callable[..., Any],
        target: Target,
        exhaustive: bool,
        seed: int,
        directions: int,
        progress: Progress,
    ):
        self._name = getattr(f, "__name__", type(f).__name__)
        self._target = target
        self._function = function
        self._leaves = [jnp.asarray(leaf) for leaf in target.selected]
        self._paths = paths_of([target])
        self._exhaustive, self._directions, self._progress = exhaustive, directions, progress
        self._generator = np.random.default_rng(seed)
        self._findings: list[Finding] = []
        self._cost = {"function": 0, "derivative": 0, "finite differences": 0}
        self._found: Derivatives | None = None

    def report(self) -> GradientReport:
        """Check, and report."""
        self._progress.expect(6)
        outputs = lambda leaves: differentiable(self._function(leaves))
        plain = outputs(self._leaves)
        if not plain:
            raise words.nothing_differentiable_returned(self._name)
        cotangents = self._weights(plain)
        try:
            program = Program(self._function, self._leaves, self._paths)
        except CONCRETIZATION as error:
            found = values(outputs, self._leaves, None, cotangents)
            self._findings.append(comparisons.untraceable(error, raised_at(error)))
            return self._reported(found.gradient)
        program.differentiate()
        self._progress.tick("traced")
        found = values(program.outputs, program.leaves, program_noise(program), cotangents)
        self._cost["function"] += 5
        self._cost["derivative"] += 3
        self._progress.tick("values")
        self._examine(program, found)
        return self._reported(found.gradient)

    def _weights(self, plain: list[Any]) -> list[Any]:
        """Of one number the gradient; of several that of a sum in which none has the weight of another."""
        if len(plain) == 1 and plain[0].ndim == 0 and not jnp.iscomplexobj(plain[0]):
            return [jnp.ones_like(plain[0])]
        draw = lambda shape: self._generator.choice([-1.0, 1.0], shape) * self._generator.uniform(0.5, 1.5, shape)
        return [jnp.asarray(draw(value.shape)).astype(value.dtype) for value in plain]

    def _examine(self, program: Program, found: Values) -> None:
        found = _as_traced(program, found)
        evidence = Evidence(program, found)
        say = self._findings.extend
        gradient = found.gradient
        self._cost["function"] += 3
        noise = None if has_foreign(program) else program_noise(program)
        runs = unstable(program.outputs, program.leaves, found.plain, found.cotangents, gradient, noise)
        say(comparisons.of_runs(evidence, runs))
        is_stable = all(run.is_rounding for run in runs)
        self._progress.tick("runs")
        rules, ties = Rules(evidence), Ties(evidence)
        if is_stable:
            say(comparisons.of_values(evidence, rules, found.disagreements))
        missing = found.unavailable.get("gradient") or found.unavailable.get("vjp")
        if missing is not None:
            say([comparisons.without_reverse(evidence, missing)])
        say(nonfinite(evidence))
        say(indices(evidence))
        say(draws(evidence))
        self._progress.tick("operations")
        if is_stable:
            self._compare(evidence, rules, ties)
            if gradient is not None:
                apart = traced_gradient_apart(program, found.cotangents, gradient)
                say(comparisons.of_tracing(evidence, [a.output for a in apart], self._findings))
        self._progress.tick("derivatives")
        self._add_zeros(zeros(evidence))
        if gradient is not None:
            noise = noise_of(program.cotangent, [*program.leaves, *found.cotangents])
            say(comparisons.of_scale(evidence, unlike_in_scale(gradient, program.leaves, noise)))
            say(comparisons.of_curvature(evidence, self._found))
        self._progress.tick("zeros")

    def _compare(self, evidence: Evidence, rules: Rules, ties: Ties) -> None:
        """Derivatives with differences; what was found already needs no second explanation."""
        done = 0

        def tick(now: int, of: int) -> None:
            nonlocal done
            if done == 0:
                self._progress.expect(of)
            self._progress.tick("finite differences")
            done = now

        # What is not finite has no slope, and an implicit draw has another one at a fixed key.
        bad = {finding.leaf for finding in self._findings if finding.kind == "nan" and finding.severity == "error"}
        skipped = {i for i, path in enumerate(self._paths) if path in bad or has_implicit_draw(evidence, i)}
        self._found = derivatives(
            evidence.program,
            self._generator,
            directions=self._directions,
            exhaustive=self._exhaustive,
            skipped=skipped,
            tick=tick,
        )
        self._cost["finite differences"] += self._found.evaluations
        self._found = self._as_symmetric(evidence, self._found)
        explained = {f.leaf for f in self._findings if f.severity == "error" and f.kind in ("nan", "oob")}
        fresh = [
            finding
            for finding in comparisons.of_derivatives(evidence, rules, ties, self._found)
            if finding.leaf not in explained or finding.kind != "mismatch"
        ]
        self._findings += fresh
        wrong = explained | {finding.leaf for finding in fresh if finding.severity == "error"}
        self._findings += [
            finding for finding in comparisons.of_precision(evidence, self._found) if finding.leaf not in wrong
        ]

    def _as_symmetric(self, evidence: Evidence, found: Derivatives) -> Derivatives:
        """What was found, but for mismatches that are none where matrices move symmetrically."""
        factors = {
            leaf: chains
            for leaf, derivative in enumerate(found.leaves)
            if derivative.status == "mismatch" and (chains := factorizations(evidence, leaf))
        }
        if not factors:
            return found
        others = set(range(len(found.leaves))) - set(factors)
        again = derivatives(symmetrised(evidence.program), self._generator, directions=self._directions, skipped=others)
        self._cost["finite differences"] += again.evaluations
        leaves = list(found.leaves)
        for leaf, chains in factors.items():
            if again.leaves[leaf].status == "agree":
                leaves[leaf] = found.leaves[leaf]._replace(status="symmetric", stopped=(chains[0],))
        return found._replace(leaves=leaves)

    def _add_zeros(self, found: Any) -> None:
        for finding in found:
            wrong = any(f.leaf == finding.leaf and f.severity == "error" for f in self._findings)
            if wrong:
                continue
            # That nothing of it flows is more than that something of it is stopped.
            stopped = lambda f, leaf=finding.leaf: (f.leaf, f.kind, f.severity) == (leaf, "mismatch", "warning")
            self._findings = [f for f in self._findings if not stopped(f)]
            self._findings.append(finding)

    def _reported(self, gradient: list[Any] | None) -> GradientReport:
        target = self._target
        places = zip(Layout(target.tree).leaves, target.leaves, strict=True)
        chosen = {index: number for number, index in enumerate(target.plan.indices)}
        rows = []
        for index, (place, leaf) in enumerate(places):
            number = chosen.get(index)
            status = status_of(place, leaf) if number is None else self._status(number)
            size = None if number is None or gradient is None else _rms(gradient[number])
            rows.append(Row(paths.write(place.steps), describe(leaf), status, size))
        return GradientReport(self._name, tuple(rows), tuple(dict.fromkeys(self._findings)), self._cost)

    def _status(self, number: int) -> str:
        if any(f.leaf == self._paths[number] and f.severity == "error" for f in self._findings):
            return "checked"
        if self._found is None:
            return "inconclusive"
        return "inconclusive" if self._found.leaves[number].status in ("inconclusive", "absent") else "checked"


def _as_traced(program: Program, found: Values) -> Values:
    """What was found, without the gradient if that exists only where values are known."""
    if found.gradient is None:
        return found
    try:
        _ = program.cotangent
    except Exception as error:  # What a rule refuses it refuses in its own way.
        reason = Unavailable("other", raised_at(error), error)
        return found._replace(gradient=None, unavailable={**found.unavailable, "gradient": reason})
    return found


def _rms(gradient: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(np.asarray(gradient, np.complex128)) ** 2))) if np.size(gradient) else 0.0
