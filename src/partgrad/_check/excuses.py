"""What explains that a derivative differs from slopes: a solver that ends early, a stop, symmetric matrices, stairs."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .._compat import cached_property
from .._programs import COMPARISONS, CUSTOM_VJPS, Chain, ids, is_custom_root, is_in_library, line, union
from .agreement import AGREE, MISMATCH, ROUNDING, Reading
from .draws import is_scored
from .exact import Leaves
from .halving import Seen
from .implicit import stops_of_implicit_draws
from .jumps import jumps_within
from .outcomes import goes_by_steps
from .pivots import Pivots
from .point import Point
from .questions import Answer, Search
from .rules import Rules
from .stairs import Missing, explaining_stairs, from_afar, missing_slope, steady_slope
from .stops import (
    explain_loops,
    explaining_factorization,
    explaining_stops,
    fewest_to_remove,
    is_fixed_draw,
    is_linear_solve,
    is_of_partgrad,
    is_solver,
    mark_of,
    may_wait,
    promises_of,
    solvers_of,
    with_loops_running_on,
)
from .straight import by_many_steps, followed, roundings, taken_straight, through_roundings
from .verdict import OK, row_of
from .zeros import blockers, is_told_with_draws

# The relative mismatch that a stop of a library may leave without consequences, and an iteration that has converged.
SLIGHT = 1e-3
# The part of a mismatch that may be left once a solver runs on.
_LEFT = 1e-2
# The part of it that is left, at most, if what is little off comes nearer.
_NEARER = 0.5
# How much may be left of what is off by more than `_OF_SOLVERS`, after more turns that are still too few.
_LITTLE = 5e-3
# How far off a rule may be that is exact in the limit of an iteration, and such a rule of a library.
_OF_SOLVERS = 3e-2
_OF_LIBRARIES = 0.2

# What it is called in the table of verdicts, and the operations that explain; None if they do not.
Excuse = tuple[str, tuple[Chain, ...]] | None


class _Case(NamedTuple):
    """A disagreement to be explained: what was read of a leaf, where and along which direction."""

    leaf: int
    seen: Seen
    place: Point
    direction: Leaves
    slack: float
    is_flat: bool


class Beside(NamedTuple):
    """A part of a derivative that is cut, whatever else is found: why, by which operations, and a reading of it."""

    reason: str
    chains: tuple[Chain, ...]
    seen: Seen


class Excuses:
    """What explains the disagreements of a program.

    Attributes:
        chains: The operations that explain that of a leaf.
    """

    def __init__(self, search: Search, rules: Rules):
        self._search, self._rules, self._program = search, rules, search.program
        self.chains: dict[int, tuple[Chain, ...]] = {}
        # The readings of the leaves that have a slope from afar.
        self._afar: dict[int, Reading] = {}
        self._points: dict[Any, Point] = {}
        self._tried: dict[int, list[Any]] = {}
        # Points at which roundings are taken straight through.
        self._straight: dict[int, Point | None] = {}
        self._pivots = Pivots(self._program)
        # The stops that explain a disagreement together.
        self._held: dict[int, tuple[Chain, ...]] = {}

    def excused(self, leaf: int, answer: Answer) -> Answer:
        """The answer, with the first explanation that holds."""
        seen, name = answer.seen, answer.row.name
        if seen is None or name == "not finite" or (answer.row.verdict == OK and not self._may_lack_a_part(leaf)):
            return answer
        case = self._case(leaf, answer)
        tried = self._tried[leaf] = [explain for rows, explain in _EXPLANATIONS if name in rows]
        found = ((n, excuse) for n, explain in enumerate(tried) if (excuse := explain(self, case)))
        number, (excuse, self.chains[leaf]) = next(found, (len(tried), ("none", ())))
        del tried[number + 1 :]
        seen = seen._replace(reading=self._afar.pop(leaf, seen.reading))
        evidence = answer.evidence._replace(excuse=excuse)
        return answer._replace(seen=seen, evidence=evidence, row=row_of(evidence))

    def beside(self, leaf: int, answer: Answer) -> Iterator[Beside]:
        """What is cut besides what explains a disagreement."""
        seen, tried = answer.seen, self._tried.get(leaf, [])
        if seen is None or answer.row.name == "not finite" or not self._may_lack_a_part(leaf):
            return
        case = self._case(leaf, answer)._replace(is_flat=True)
        if Excuses.stopped_draw not in tried and (found := self.stopped_draw(case)):
            yield Beside("stopped draw", found[1], seen)
        if Excuses.stairs not in tried:
            place = self._explained(case, answer.row.name)
            if found := self.stairs(case._replace(place=place)):
                yield Beside("stairs", found[1], seen._replace(reading=self._afar.pop(leaf)))

    def _case(self, leaf: int, answer: Answer) -> _Case:
        assert answer.seen is not None
        is_here = answer.is_here or answer.row.verdict == OK or answer.row.name in _UNSETTLED
        place = self._search.point if is_here else self._search.near
        direction, is_flat = self._search.along(leaf, answer.seen), answer.seen.reading.status != MISMATCH
        return _Case(leaf, answer.seen, place, direction, max(self._search.slack, 0.0), is_flat)

    def _explained(self, case: _Case, row: str) -> Point:
        """The point of the function in which stops are held, or loops run on, that explain a disagreement."""
        chains = self._held.get(case.leaf) or self.chains.get(case.leaf, ())
        if row == "unconverged":
            return self._running_on(case.place, solvers_of(self._program, case.leaf))
        if chains and all(chain[-1].primitive.name == "stop_gradient" for chain in chains):
            return case.place.of(case.place.exact.holding(chains)(range(len(chains))))
        return case.place

    def _may_lack_a_part(self, leaf: int) -> bool:
        """Whether a leaf goes into a comparison, a rounding, or a draw, of which differences nearby show nothing."""
        return bool(self._chosen >> leaf & 1) or bool(stops_of_implicit_draws(self._program, leaf))

    @cached_property
    def _chosen(self) -> int:
        """The leaves that go into something discrete, as bits."""
        flow = self._program.value
        chosen = [chain for chain in flow.chains if goes_by_steps(chain)]
        return union(map(flow.union_into, [*chosen, *self._roundings]))

    def loops(self, case: _Case) -> Excuse:
        """The differences agree once the loops of a solver run on."""
        solvers = solvers_of(self._program, case.leaf)
        if not solvers:
            return None
        # If much is off, some more turns need not restore every digit.
        off = _off(case)
        left = _LITTLE if off > _OF_SOLVERS else _left_of(off)
        explains = lambda at: explain_loops(case.place, at, case.direction, case.slack, left)
        is_explained = any(map(explains, self._variants(case.place, solvers)))
        return ("solver", (solvers[0],)) if is_explained else None

    def approximate_rule(self, case: _Case) -> Excuse:
        """All that is off is little, and of rules that are exact only in the limit of an iteration."""
        blamed, off = self._rules.to_blame_for(case.leaf), case.seen.reading
        solvers = [b.chain for b in blamed if not b.of_value and is_solver(b.chain)]
        if len(solvers) < len(blamed):
            return None
        solvers = solvers or solvers_of(self._program, case.leaf)
        if not solvers or not is_of_a_limit(solvers, off):
            return None
        # What a solver leaves of a mismatch does not explain the rest of it.
        if stopped := self.stops(case, _NEARER * off.telling.relative):
            return stopped
        # The backward pass of a library may solve by itself, as one in time does, and has a limit of its own. Unless
        # something else may be to blame that cannot be compared.
        inside = {id(solver[-1]) for solver in solvers}
        is_beside = lambda chain: not any(id(outer) in inside for outer in chain)
        others = [chain for chain, _ in self._rules.incomparable_for(case.leaf)]
        others += [chain for chain in promises_of(self._program, case.leaf) if not is_in_library(chain)]
        is_reverse = all(solver[-1].primitive.name in CUSTOM_VJPS for solver in solvers)
        is_shown = is_of_library(solvers) and is_reverse and not any(map(is_beside, others))
        if not is_shown:
            readings = (at.read(case.direction, slack=case.slack) for at in self._variants(case.place, solvers))
            told = (found.telling for found in readings if not (found.kinks or found.jumps or found.unsure))
            nearer = _NEARER * off.telling.relative
            is_shown = any(one.status in (AGREE, ROUNDING) or one.relative <= nearer for one in told)
        return ("solver", (solvers[0],)) if is_shown else None

    def slight(self, case: _Case) -> Excuse:
        """All that is off is next to nothing, so that beside the point it may agree by chance."""
        is_slight = case.seen.reading.telling.relative <= SLIGHT
        return (self.stops(case) or self.approximate_rule(case)) if is_slight else None

    def _variants(self, place: Point, solvers: list[Chain]) -> Iterator[Point]:
        """The points of the program in which the loops of some solvers run on, in one way after the other."""
        yield self._running_on(place, solvers)
        yield self._running_on(place, solvers, all_in_rules=True)
        if may_wait(solvers):
            yield self._running_on(place, solvers, thaws=True)

    def _running_on(
        self, place: Point, solvers: list[Chain], *, all_in_rules: bool = False, thaws: bool = False
    ) -> Point:
        """A point of the program in which the loops of some solvers run on; made once for all leaves."""
        key = (id(place), all_in_rules, thaws, *(ids(solver) for solver in solvers))
        if key not in self._points:
            self._points[key] = with_loops_running_on(place, solvers, all_in_rules=all_in_rules, thaws=thaws)
        return self._points[key]

    def stops(self, case: _Case, left: float = 0.0) -> Excuse:
        """The differences agree, but for what may be left, if the results of some stops stay as they are."""
        stops = explaining_stops(case.place, case.direction, case.slack, left)
        if not stops and not left and (solvers := solvers_of(self._program, case.leaf)):
            # What a solver leaves of a slope, it leaves of the one beside a stop as well.
            left, running_on = _left_of(_off(case)), case._replace(place=self._running_on(case.place, solvers))
            return self.stops(case, left) or self.stops(running_on, left)
        if not stops:
            return None
        if all(map(is_fixed_draw, stops)) or self.is_score(case.leaf, stops):
            return "declared", stops
        if is_negligible(stops, case.seen.reading):
            return "negligible", stops
        self._held[case.leaf] = stops
        return "stop", fewest_to_remove(case.place, stops, case.direction) if len(stops) > 1 else stops

    def is_ruled(self, leaf: int, chain: Chain) -> bool:
        """Whether a wrong rule of a leaf replaces the derivative of an operation, or a root that is found by it."""
        # The steps of a search need not have the derivative of what they find.
        if any(map(is_custom_root, chain[:-1])):
            return chain[-1].primitive.name in COMPARISONS
        wrong = {id(blame.chain[-1]) for blame in self._rules.to_blame_for(leaf)}
        return any(id(outer) in wrong for outer in chain[:-1])

    def is_score(self, leaf: int, stops: tuple[Chain, ...]) -> bool:
        """Whether stops make an estimator by the score: partgrad's, or one by hand, of a draw whose probability counts.

        A random number in what is stopped, as in a target with noise, makes none.
        """
        program, drawn = self._program, [stop for stop in stops if not is_of_partgrad(stop)]
        if not all(any(program.drawn.into(stop)) and mark_of(stop) is None for stop in drawn):
            return False
        numbers = [stop for stop in drawn if program.is_into(leaf, stop)]
        has_density = not numbers or self._pivots.has(leaf, numbers)
        scored = drawn if has_density else [stop for stop in drawn if stop not in numbers]
        return not drawn or is_scored(program, leaf, scored)

    def stopping_rule(self, case: _Case) -> Excuse:
        """None of the rules to blame gives a derivative at all."""
        blamed = list(self._rules.to_blame_for(case.leaf))
        is_stopped = bool(blamed) and all(blame.stops for blame in blamed) and not case.seen.reading.kinks
        return ("stop", (blamed[0].chain,)) if is_stopped else None

    def factorization(self, case: _Case) -> Excuse:
        """The differences agree if matrices move symmetrically."""
        chain = explaining_factorization(case.place, case.leaf, case.direction, case.slack)
        return None if chain is None else ("symmetric", (chain,))

    def stopped_draw(self, case: _Case) -> Excuse:
        """A draw with an implicit derivative is stopped."""
        stops = stops_of_implicit_draws(self._program, case.leaf)
        return ("stop", stops) if stops and not self.is_score(case.leaf, stops) else None

    def stairs(self, case: _Case) -> Excuse:
        """From afar the function has a slope that its derivative lacks, at the point and beside it."""
        # Of several elements, what is missing may cancel along one direction.
        shape = case.direction[case.leaf].shape
        signs = np.where(np.arange(np.prod(shape, dtype=int)) % 2, -1.0, 1.0).reshape(shape)
        turned = [v * signs if leaf == case.leaf else v for leaf, v in enumerate(case.direction)]
        for direction in (case.direction, turned) if signs.size > 1 else (case.direction,):
            missing = missing_slope(case.place, direction)
            chains = explaining_stairs(case.place, case.leaf, direction, missing) if missing else ()
            if chains and self.is_ruled(case.leaf, chains[0]):
                return None
            # Where nearby steps agree with the derivative, narrow ramps may do what steps do.
            if missing and chains and (not case.is_flat or _is_of_jumps(case.place, direction, missing)):
                slope, lacks = float(missing.slopes[-1]), float(missing.lacks[-1])
                self._afar[case.leaf] = from_afar(case.seen.reading, slope, slope - lacks, missing.steps)
                return "stairs", chains
        return (self._straight_through(case) or self._by_many_steps(case)) if case.is_flat else None

    def _by_many_steps(self, case: _Case) -> Excuse:
        """The leaf goes into comparisons and roundings alone, and the value moves by many steps."""
        program = self._program
        if union(program.smooth.outputs) >> case.leaf & 1:
            return None
        wanted = lambda chain: goes_by_steps(chain) and not is_told_with_draws(program, chain)
        chains = blockers(program, case.leaf, wanted=wanted)
        found = by_many_steps(case.place, case.direction) if chains else None
        if found is None:
            return None
        self._afar[case.leaf] = from_afar(case.seen.reading, *found)
        return "stairs", tuple(chains[:1])

    def from_afar_if_flat(self, leaf: int, answer: Answer) -> Answer:
        """The answer for what is flat at the point, as what a bisection finds, with the slope that it has from afar."""
        if answer.seen is None:
            return answer
        return answer._replace(seen=answer.seen._replace(reading=_seen_from_afar(self._case(leaf, answer))))

    def _straight_through(self, case: _Case) -> Excuse:
        """The value follows roundings, as its derivative does if they are taken straight through."""
        chains = through_roundings(self._program, case.leaf, self._roundings) if self._roundings else []
        if not chains:
            return None
        if id(case.place) not in self._straight:
            self._straight[id(case.place)] = taken_straight(case.place, self._roundings)
        straight = self._straight[id(case.place)]
        found = None if straight is None else followed(case.place, straight, case.leaf, case.direction)
        if found is None:
            return None
        self._afar[case.leaf] = from_afar(case.seen.reading, *found)
        return "stairs", tuple(sorted(chains, key=lambda chain: not line(chain))[:1])

    @cached_property
    def _roundings(self) -> list[Chain]:
        return roundings(self._program)


_UNSETTLED = ("jump", "noise")
# In which order, for which rows of the table of verdicts, and how it is tried.
_EXPLANATIONS: tuple[tuple[tuple[str, ...], Callable[[Excuses, _Case], Excuse]], ...] = (
    (("wrong", "modes", "removable", *_UNSETTLED), Excuses.loops),
    (("wrong", "modes"), Excuses.stops),
    (("wrong", "modes"), Excuses.approximate_rule),
    (("removable",), Excuses.slight),
    (("wrong",), Excuses.stopping_rule),
    (("wrong",), Excuses.factorization),
    (("agrees", "zero", "kink"), Excuses.stopped_draw),
    (("wrong", "removable", "agrees", "zero", *_UNSETTLED), Excuses.stairs),
)


def _left_of(off: float) -> float:
    """What a solver may leave of a mismatch."""
    return min(SLIGHT, _LEFT * off)


def _off(case: _Case) -> float:
    """How far a derivative is off, of what is flat at the point from the slope that it has from afar."""
    return _seen_from_afar(case).telling.relative


def _seen_from_afar(case: _Case) -> Reading:
    """What was read, of what is flat at the point with the slope that it has from afar."""
    reading = case.seen.reading
    if reading.right or reading.left or (found := steady_slope(case.place, case.direction)) is None:
        return reading
    return from_afar(reading, found[0], reading.telling.got, found[1])


def _is_of_jumps(place: Point, direction: Leaves, missing: Missing) -> bool:
    """Whether the value jumps within the smallest of the large steps over which a slope is missing."""
    ends, slope = (-missing.steps[-1], missing.steps[-1]), missing.slopes[-1] - missing.lacks[-1]
    return jumps_within(place, direction, ends, slope, missing.output)


def is_negligible(stops: tuple[Chain, ...], reading: Reading) -> bool:
    """Whether stops have little effect and are a library's: an adaptive solver may stop the way to its step sizes."""
    return reading.telling.relative <= SLIGHT and all(map(is_in_library, stops))


def is_of_a_limit(solvers: list[Chain], reading: Reading) -> bool:
    """Whether rules of solvers, which are exact in the limit, are off by so little that it may not be reached yet."""
    return reading.telling.relative <= (_OF_LIBRARIES if is_of_library(solvers) else _OF_SOLVERS)


def is_of_library(solvers: list[Chain]) -> bool:
    """Whether solvers are those of a library, and not for linear equations."""
    return all(is_in_library(solver) and not is_linear_solve(solver[-1]) for solver in solvers)
