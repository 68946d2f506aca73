"""From what was found of each leaf to findings: what explains a disagreement, and which operation is to blame."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from .._compat import cached_property
from .._programs import TRANSPARENT, Chain, ids, is_custom_rule, is_in_library, line, name_of
from .agreement import MISMATCH, NO_DIGIT, ROUNDING
from .digits import first_not_finite
from .exact import Exact
from .excuses import SLIGHT, Excuses, is_negligible, is_of_a_limit
from .finding import Figures, Finding
from .halving import Seen
from .implicit import has_implicit_draw, through_draws
from .indices import written_twice
from .names import all_of, element_in, element_of, finding, operation_of, rule_of, steps_of
from .outcomes import Crossing, is_discrete, selection_by
from .own import Own, compiled, is_finite
from .point import Point
from .program import Program
from .questions import Answer, Search
from .rules import Blame, Rules
from .stops import (
    agrees,
    explaining_stops,
    holding,
    is_fixed_draw,
    is_solver,
    mark_of,
    promised,
    promises_of,
    solvers_of,
    stops_of,
)
from .verdict import OK, STOPPED

# Of so many selections that change at the point it is tried whether they decide: each takes a compilation.
_MOST_CROSSINGS = 4
# Decompositions that put numbers in order.
SPECTRAL = frozenset({"eigh", "svd"})
# The part of the value that a leaf moves, if it moves what a solver has not reached.
_NOTHING = 1e-6
# The part of a mismatch that is left without the rule of a solver, if that is not why.
_LEFT = 0.5
# How nearly a derivative is the same without a rule, and of how many that is asked.
_SAME, _MOST_RULES = 1e-9, 4


def _chains(blames: list[Blame]) -> list[Chain]:
    return [blame.chain for blame in blames]


class Comparison:
    """The answers for the leaves that were compared, with what explains them."""

    def __init__(self, own: Own, search: Search, rules: Rules, answers: dict[int, Answer]):
        self._own, self._search, self._rules = own, search, rules
        self._program: Program = own.program
        self._excuses = Excuses(search, rules)
        # The points of the function without some rules.
        self._corrected: dict[Any, Point] = {}
        self.answers = {leaf: self._excuses.excused(leaf, answer) for leaf, answer in answers.items()}

    def verdict(self, leaf: int) -> str:
        """The verdict on a leaf that was compared."""
        return self.answers[leaf].row.verdict

    def is_flat(self, leaf: int) -> bool:
        """Whether the slopes beside a selection that changes near the point are zero, as the derivative is."""
        answer = self.answers.get(leaf)
        if answer is None or answer.row.name not in ("zero", "agrees") or answer.seen is None:
            return False
        return bool(self._search.crossings(leaf, answer.seen))

    def findings(self) -> Iterator[Finding]:
        """What there is to tell."""
        for leaf, answer in self.answers.items():
            match answer.row.name:
                case "not finite":
                    # Where it is not finite in the precision of the program, that was found.
                    if self._own.gradients and is_finite(self._own.gradients[leaf]):
                        dtype = str(self._program.leaves[leaf].dtype)
                        yield finding(
                            "precision", "error", "not finite", [self._path(leaf)], self._first_not_finite, dtype=dtype
                        )
                case "zero" | "agrees":
                    yield from self._of_draws(leaf)
                case "unconverged":
                    found = self._of_solver(leaf, self._excuses.from_afar_if_flat(leaf, answer))
                    # What does not settle may differ by nothing on average.
                    if found.figures is None or found.figures.relative:
                        yield found
                case "stopped" | "declared":
                    yield self._of_stop(leaf, answer)
                case "symmetric" | "stairs" as reason:
                    (chain, *together), figures = self._excuses.chains[leaf], self._figures(leaf, answer)
                    more = {"figures": figures, "together": tuple(together)}
                    yield finding("mismatch", "warning", reason, [self._path(leaf)], chain, **more)
                case "kink":
                    yield self._of_kink(leaf, answer)
                    yield from self._of_draws(leaf)
                case "jump" | "noise":
                    yield self._of_unsettled(leaf, answer)
                case _:
                    yield from self._of_mismatch(leaf, answer)
            yield from self._of_parts(leaf, answer)
            if answer.status == ROUNDING and answer.row.verdict == OK and answer.seen is not None:
                figures = self._figures(leaf, answer)
                yield finding("precision", "info", "constants", [self._path(leaf)], figures=figures)

    @cached_property
    def _first_not_finite(self) -> Chain:
        """Where the derivative ceases to be finite in float64, by the first leaf for which it is not."""
        leaf = next(leaf for leaf, answer in self.answers.items() if answer.row.name == "not finite")
        return first_not_finite(self._own, leaf, self._search.point)

    # --- what is explained ----------------------------------------------------------------------------------------

    def _of_solver(self, leaf: int, answer: Answer) -> Finding:
        figures, chain, path = self._figures(leaf, answer), self._excuses.chains[leaf][0], [self._path(leaf)]
        error = 0.0 if figures is None or self._is_nothing(answer) else figures.relative
        severity = "info" if error <= SLIGHT else "warning" if error < NO_DIGIT else "error"
        return finding("precision", severity, "unconverged", path, chain, figures=figures, rule=None, error=error)

    def _is_nothing(self, answer: Answer) -> bool:
        """Whether a leaf hardly moves the value, by the derivative as by differences: both are what is left of zero."""
        point, reading = self._search.point, answer.seen.reading if answer.seen else None
        moves = [] if reading is None else [abs(x) for x in (reading.right, reading.left, reading.telling.got)]
        return bool(moves) and max(moves) <= _NOTHING * float(np.linalg.norm(point.weights * point.start))

    def _of_stop(self, leaf: int, answer: Answer) -> Finding:
        path, figures, chains = self._path(leaf), self._figures(leaf, answer), self._excuses.chains[leaf]
        severity = "warning" if answer.row.verdict == STOPPED else "info"
        if is_custom_rule(chains[0][-1]):
            return finding("mismatch", severity, "rule stop", [path], chains[0], figures=figures)
        if all(map(is_fixed_draw, chains)):
            return finding("mismatch", severity, "fixed draw", [path], chains[0], figures=figures)
        if self._excuses.is_score(leaf, chains):
            return finding("draw", severity, "score", [path], chains[0], figures=figures)
        if (mark := mark_of(chains[0])) is not None:
            return finding("mismatch", severity, "mark", [path], chains[0], figures=figures, mark=mark)
        if answer.seen is not None and answer.seen.reading.status != MISMATCH:
            return finding("mismatch", severity, "stopped draw", [path], chains[0], **all_of(chains))
        return finding("mismatch", severity, "stop", [path], chains[0], figures=figures, **all_of(chains))

    def _of_parts(self, leaf: int, answer: Answer) -> Iterator[Finding]:
        """The findings of what is cut besides."""
        for reason, chains, seen in self._excuses.beside(leaf, answer):
            figures = self._figures(leaf, answer._replace(seen=seen)) if reason == "stairs" else None
            more = {"figures": figures, **all_of(chains)}
            yield finding("mismatch", "warning", reason, [self._path(leaf)], chains[0], **more)

    def _crossing(self, leaf: int, answer: Answer, *, last: bool = False) -> Crossing | None:
        """The selection that decides at the point, the first or the last one; a user's line rather than a library's."""
        seen = answer.seen
        if seen is None:
            return None
        # A custom rule has the derivative that it has, whatever is selected in its function.
        is_ruled = lambda chain: any(map(is_custom_rule, chain[:-1]))
        order = lambda crossing: (is_ruled(crossing.chain), not line(crossing.chain))
        found = sorted(self._search.crossings(leaf, seen)[:: -1 if last else 1], key=order)
        if len({id(crossing.chain[-1]) for crossing in found}) > 1:
            tried = found[:_MOST_CROSSINGS]
            of_row = self._smooth if answer.row.name in ("kink", "jump") else self._right
            decides = of_row(leaf, seen, [crossing.chain for crossing in tried])
            found = [crossing for number, crossing in enumerate(tried) if decides({number})] or found
        return next(iter(found), None)

    def _smooth(self, leaf: int, seen: Seen, chains: list[Chain]) -> Callable[[Container[int]], bool]:
        """Whether the function is smooth at the point if the results of some operations stay as they are there."""
        along = self._search.along(leaf, seen)
        return holding(self._search.point, chains, lambda point: not point.slope(along).kind.any())

    def _right(self, leaf: int, seen: Seen, chains: list[Chain]) -> Callable[[Container[int]], bool]:
        """Whether the derivative is the slope if the results of some operations stay as they are at the point."""
        along, slack = self._search.along(leaf, seen), max(self._search.slack, 0.0)
        return holding(self._search.point, chains, lambda point: agrees(point, along, slack))

    def _of_kink(self, leaf: int, answer: Answer) -> Finding:
        answer = answer._replace(seen=self._search.at_kink(leaf, answer))
        crossing = self._crossing(leaf, answer)
        figures = self._figures(leaf, answer)
        path = [self._path(leaf)]
        if crossing is None and (spectrum := self._degenerate(leaf, answer)) is not None:
            if answer.seen is not None and (seen := self._search.outside(leaf, answer.seen)) is not None:
                figures = self._figures(leaf, answer._replace(seen=seen))
                return finding("mismatch", "warning", "outside", path, spectrum, figures=figures)
            return finding("tie", "warning", "tie", path, spectrum, figures=figures)
        if crossing is None:
            chain = self._safe_rule(leaf)
            severity = "info" if chain else "warning"
            return finding("tie", severity, "convention" if chain else "kink", path, chain, figures=figures)
        is_chosen = operation_of(crossing.chain).startswith("safe.") or self._is_mended(leaf, crossing)
        severity = "info" if is_chosen else "warning"
        more = {"figures": figures, "changes_in": element_in(crossing.chain, *crossing.element)}
        return finding("tie", severity, "tie", path, crossing.chain, steps=steps_of([crossing]), **more)

    def _degenerate(self, leaf: int, answer: Answer) -> Chain | None:
        """The decomposition whose eigenvalues or singular values meet at the kink; None if there is none."""
        program, seen = self._program, answer.seen
        chains = [c for c in program.smooth.chains if c[-1].primitive.name in SPECTRAL and program.is_into(leaf, c)]
        if seen is None:
            return None
        tried = chains[:_MOST_CROSSINGS]
        decides = self._smooth(leaf, seen, tried)
        return next((chain for number, chain in enumerate(tried) if decides({number})), None)

    def _safe_rule(self, leaf: int) -> Chain:
        chains = self._program.smooth.chains
        ruled = (c for c in chains if is_custom_rule(c[-1]) and leaf in self._program.leaves_into(c))
        return next((chain for chain in ruled if operation_of(chain).startswith("safe.")), ())

    def _is_mended(self, leaf: int, crossing: Crossing) -> bool:
        """Whether `double_where` is what makes the derivative finite at the selection, as its user wanted."""
        if not any(name_of(equation) in TRANSPARENT for equation in crossing.chain):
            return False
        plain = self._program.unwrapped
        if plain.cotangent is None:
            return False
        operands = [*plain.leaves, *self._own.cotangents]
        return not is_finite(compiled(plain.cotangent)(plain.cotangent.consts, operands)[leaf])

    def _of_unsettled(self, leaf: int, answer: Answer) -> Finding:
        crossing, figures, path = self._crossing(leaf, answer), self._figures(leaf, answer), [self._path(leaf)]
        if answer.row.name == "jump" and crossing is not None:
            more = {"changes_in": element_in(crossing.chain, *crossing.element), "steps": steps_of([crossing])}
            return finding("jump", "warning", "jump", path, crossing.chain, figures=figures, **more)
        chain = () if crossing is None else crossing.chain
        reason = "noise" if self._is_defined_beside(leaf, answer) else "beside"
        return finding("noise", "info", reason, path, chain, figures=figures)

    def _is_defined_beside(self, leaf: int, answer: Answer) -> bool:
        """Whether the function has a finite value on both sides of the point."""
        seen, point = answer.seen, self._search.point
        if seen is None:
            return True
        direction = self._search.along(leaf, seen)
        return point.is_defined_beside(direction, min(seen.reading.steps))

    # --- what is wrong -----------------------------------------------------------------------------------------------

    def _of_mismatch(self, leaf: int, answer: Answer) -> Iterator[Finding]:
        """One finding for each rule to blame, or a single one if there is none."""
        figures, path = self._figures(leaf, answer), [self._path(leaf)]
        blamed = self._rules.to_blame_for(leaf)
        is_right_beside = answer.evidence.nearby == "equal"
        if is_right_beside:
            # Only a rule of the user's own can be to blame rather than a selection, not those of JAX or in a library.
            is_users = lambda chain: not is_in_library(chain) and (rule := rule_of(chain)) and rule.functions
            blamed = [blame for blame in blamed if is_users(blame.chain)]
        blamed = self._without_limits(leaf, answer, self._effective(leaf, answer, blamed))
        for blame in blamed:
            yield self._of_rule("rule value" if blame.of_value else "rule", path, blame, figures)
        if blamed and (stops := self._stops_beside(leaf, answer)):
            yield finding("mismatch", "warning", "stop beside", path, stops[0], **all_of(stops))
        # The first selections guard what the last one selects.
        is_possible = not blamed and (
            is_right_beside or (answer.row.name != "modes" and answer.evidence.nearby != "off")
        )
        if is_possible and (crossing := self._crossing(leaf, answer, last=True)) is not None:
            reason = "removable" if is_discrete(crossing.chain) else "smooth tie"
            decides = selection_by(self._program, crossing.chain)
            yield finding("mismatch", "error", reason, path, decides, figures=figures)
        elif not blamed:
            yield self._unblamed(leaf, answer, figures)

    def _effective(self, leaf: int, answer: Answer, blamed: list[Blame]) -> list[Blame]:
        """Of a few rules to blame, those without which the derivative is another one, if need be without others."""
        if not 1 < len(blamed) <= _MOST_RULES or answer.seen is None:
            return blamed
        direction = self._search.along(leaf, answer.seen)
        slopes = lambda at: (at.derivative(direction), at.pulled_back(direction))
        without = lambda blames: slopes(self._without(_chains(blames)))
        found, before = list[Blame](), slopes(self._search.point)
        while len(found) < len(blamed):
            tried = {n: without([*found, one]) for n, one in enumerate(blamed) if one not in found}
            more = [n for n, own in tried.items() if not np.allclose(own, before, rtol=_SAME, atol=0.0, equal_nan=True)]
            if not more:
                break
            found += [blamed[n] for n in more]
            before = without(found) if len(found) < len(blamed) else before
        return found or blamed

    def _without_limits(self, leaf: int, answer: Answer, blamed: list[Blame]) -> list[Blame]:
        """The rules to blame without those of solvers, if what is off without the others is no more than a limit's."""
        solvers = [blame for blame in blamed if not blame.of_value and is_solver(blame.chain)]
        others = [blame for blame in blamed if blame not in solvers]
        if not solvers or answer.seen is None:
            return blamed
        direction = self._search.along(leaf, answer.seen)
        if not others:
            # Unless as much is off without them, by a rule that cannot be compared.
            if not self._rules.incomparable_for(leaf):
                return blamed
            left = self._without(_chains(solvers)).read(direction, slack=self._search.slack)
            is_left = left.telling.relative > _LEFT * answer.seen.reading.telling.relative
            return [] if left.status == MISMATCH and is_left else blamed
        reading = self._without(_chains(others)).read(direction, slack=self._search.slack)
        return others if is_of_a_limit([blame.chain for blame in solvers], reading) else blamed

    def _without(self, rules: list[Chain] | None = None) -> Point:
        """The point of the function without some rules, or all wrong ones; made once, whatever the number of leaves."""
        key = None if rules is None else tuple(map(ids, rules))
        if key not in self._corrected:
            self._corrected[key] = self._search.point.of(Exact(self._rules.left_out(rules)))
        return self._corrected[key]

    def _stops_beside(self, leaf: int, answer: Answer) -> tuple[Chain, ...]:
        """The stops that explain what is still wrong with a leaf without wrong rules."""
        seen, slack = answer.seen, max(self._search.slack, 0.0)
        # A stop in the function of a wrong rule counts only without that rule.
        counting = {line(stop) for stop in stops_of(self._program, leaf) if not self._excuses.is_ruled(leaf, stop)}
        if seen is None or not counting:
            return ()
        direction = self._search.along(leaf, seen)
        corrected = self._without()
        if agrees(corrected, direction, slack):
            return ()
        stops = explaining_stops(corrected, direction, slack)
        is_other = not counting.issuperset(map(line, stops))
        return () if is_other or (stops and is_negligible(stops, corrected.read(direction, slack=slack))) else stops

    def _of_draws(self, leaf: int) -> Iterator[Finding]:
        """The rules that differ from their functions where an implicit draw is held, so that no difference shows it."""
        if has_implicit_draw(self._program, leaf):
            is_through = through_draws(self._program, leaf)
            for blame in (blame for blame in self._rules.to_blame_for(leaf) if is_through(blame.chain)):
                yield self._of_rule("rule value" if blame.of_value else "rule", [self._path(leaf)], blame, None)

    def _slightly_wrong_rule(self, leaf: int, answer: Answer) -> Chain | None:
        """A rule that differs by less than it is compared to in the precision of the program, if it explains it all."""
        ruled = [chain for chain in self._rules.ruled_for(leaf) if not is_in_library(chain)][:_MOST_RULES]
        if answer.seen is None:
            return None
        direction, slack = self._search.along(leaf, answer.seen), max(self._search.slack, 0.0)
        return next((rule for rule in ruled if agrees(self._without([rule]), direction, slack)), None)

    def _unblamed(self, leaf: int, answer: Answer, figures: Figures | None) -> Finding:
        """The finding if neither a rule that differs nor a selection is to blame."""
        path = [self._path(leaf)]
        if answer.row.name == "modes":
            return finding("mismatch", "error", "modes", path, figures=figures)
        if wrong := self._rules.wrong_values():
            return self._of_rule("rule value", path, wrong[0], figures)
        if twice := written_twice(self._own, leaf):
            chain, index = twice
            return finding("mismatch", "error", "twice", path, chain, figures=figures, index=index)
        # A rule for an iteration has more to be wrong in than one for a step of it.
        if unknown := sorted(self._rules.incomparable_for(leaf), key=lambda pair: not is_solver(pair[0])):
            chain, raised = unknown[0]
            return finding("mismatch", "error", "unknown rule", path, chain, figures=figures, raised=raised)
        if (rule := self._slightly_wrong_rule(leaf, answer)) is not None:
            return finding("mismatch", "error", "rule", path, rule, figures=figures, element=(), steps=[])
        for reason, on_path in (("", promises_of), ("untried stop", stops_of), ("solver", solvers_of)):
            for chain in on_path(self._program, leaf)[:1]:
                return finding("mismatch", "error", reason or promised(chain[-1]), path, chain, figures=figures)
        return finding("mismatch", "error", "unexplained", path, figures=figures)

    def _of_rule(self, reason: str, path: list[str], blame: Blame, figures: Figures | None) -> Finding:
        more = {"element": blame.element, "steps": blame.steps}
        reason = promised(blame.chain[-1]) or reason
        return finding("mismatch", "error", reason, path, blame.chain, figures=figures, **more)

    def _path(self, leaf: int) -> str:
        return self._program.paths[leaf]

    def _figures(self, leaf: int, answer: Answer) -> Figures | None:
        seen = answer.seen
        if seen is None:
            return None
        reading, shape = seen.reading, self._program.leaves[leaf].shape
        by: complex = 1.0
        element = None
        if seen.indices.size == 1:
            by = seen.toward[leaf].reshape(-1)[int(seen.indices[0])].item()
            # A complex number has a slope only along a direction.
            by = abs(by) if isinstance(by, complex) else by
            element = element_of(int(seen.indices[0]), shape)
        scaled: Callable[[Any], Any] = lambda value: None if value is None else value / by + 0.0
        right, left = (
            (reading.right, reading.left) if not isinstance(by, float) or by > 0 else (reading.left, reading.right)
        )
        return Figures(
            self._path(leaf),
            element,
            scaled(reading.pulled),
            scaled(reading.pushed),
            scaled(right),
            scaled(left),
            abs(reading.noise / by),
            reading.steps,
            reading.telling.relative,
            nearby=not answer.is_here and answer.row.name in ("wrong", "modes"),
        )
