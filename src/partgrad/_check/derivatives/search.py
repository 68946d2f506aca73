"""Forward and reverse derivatives of each leaf compared with finite differences, in float64.

A direction moves all elements of a leaf, each in proportion to its size. Where derivatives and differences disagree, or
where a kink hides whether they do, the direction is split until the elements to blame are found, and the comparison is
repeated at a generic point nearby, where there are no ties.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._programs import Chain
from ..numbered import NumberedProgram
from .exact import Leaves
from .excuses import explaining_factorization, explaining_stops
from .float64 import wide_dtype, widened
from .reading import ABSENT, AGREE, INCONCLUSIVE, MISMATCH, ROUNDING, Agreement, Point, Reading

STOPPED, SYMMETRIC = "stopped", "symmetric"

# With more leaves than this, they are first moved together, in this many groups.
_ALONE = 64
_GROUPS = 32
# How many readings the elements of one leaf may take in all, before one is clean, and nearby.
_PARTINGS = 40
_PARTINGS_IN_VAIN = 6
_NEARBY_READINGS = 4
# The smallest size of an element, relative to the largest of its leaf; and the distance of the point nearby.
_SMALLEST = 1e-3
_NEARBY = 1e-3
# How far an element moves relative to its size: no two alike, so that exchanged elements are noticed.
_STRIDES = (0.5, 1.5)
# A disagreement, relative to the slope, that constants of low precision may explain.
_SLACK_OF_CONSTANTS = 1e-6
# The disagreement of a single element that no rounded constant explains.
_BADLY = 1e-3
# A gradient whose relative error in low precision exceeds the first is noise if its norm is below the second, in units
# of its noise.
_UNLIKE = 1e-2
_BURIED = 10.0
# Another ratio of steps, for a second opinion.
_OTHER_STEPS = 0.73

# A leaf, and flat indices of its elements.
Part = tuple[int, np.ndarray[Any, Any]]


class LeafDerivative(NamedTuple):
    """The result for the derivative with respect to one leaf.

    Attributes:
        status: The status of an `Agreement`; or `stopped` or `symmetric` for a mismatch that the `stop_gradient`
            equations or the factorization in `excuses` explain.
        place: Where it mismatches: `here`, at the point and nearby; `tie`, at the point alone; or `nearby`.
        wrong: Which derivative mismatches: `forward`, `reverse`, `both`, `one` where they contradict each other and
            differences do not tell which is right; or empty.
        got: The slope along a direction according to the derivative; for a single `element`, the derivative.
        precision: The relative error of the gradient in the precision of the program, compared with float64; None if
            there is none, or if it consists of rounding errors only (`cancels`).
    """

    status: str
    place: str
    wrong: str
    got: Any
    expected: Any
    relative: float
    element: int | None
    kinks: int
    jumps: int
    precision: float | None
    cancels: bool
    excuses: tuple[Chain, ...]


def derivatives(
    program: NumberedProgram,
    point: Point,
    generator: np.random.Generator,
    *,
    gradient: Leaves | None = None,
    directions: int = 3,
    exhaustive: bool = False,
    skipped: Collection[int] = (),
    slack: Mapping[int, float] | None = None,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> list[LeafDerivative]:
    """Compare the derivatives of a program with finite differences, leaf by leaf.

    Args:
        program: The program.
        point: Where.
        generator: What directions are drawn with.
        gradient: The gradient in the precision of the program.
        directions: How many for each leaf.
        exhaustive: Whether to move every element of every leaf by itself, instead.
        skipped: Leaves that are not compared: their status is `absent`.
        slack: For some leaves, the relative disagreement that an iterative solver on their way may explain.
        tick: Called with the number of directions done and of all.
    """
    count = len(program.leaves)
    compared = [i for i in range(count) if i not in skipped]
    search = _Search(program, point, generator, compared, gradient, slack or {})
    parts = search.elements() if exhaustive else search.groups()
    looks = [(turn, part) for turn in range(directions) for part in parts if turn == 0 or search.turns(part)]
    toward = [search.toward() for _ in range(directions)]
    for done, (turn, part) in enumerate(looks):
        search.look(part, toward[turn])
        tick(done + 1, len(looks))
    return [search.leaf(i) for i in range(count)]


class _Seen(NamedTuple):
    """A reading of part of a leaf along a direction."""

    reading: Reading
    indices: Any
    toward: Leaves

    @property
    def status(self) -> str:
        return self.reading.status


class _Search:
    """The derivatives of a program at a point and near it, and the readings taken so far."""

    def __init__(
        self,
        program: NumberedProgram,
        point: Point,
        generator: np.random.Generator,
        compared: list[int],
        gradient: Leaves | None,
        slack: Mapping[int, float],
    ):
        self.program, self._point, self._generator = program, point, generator
        self._compared, self._gradient, self._slack_of_leaf = compared, gradient, slack
        self._scales = [_scale(leaf) for leaf in point.leaves]
        self._shift = [v * generator.uniform(_NEARBY / 2, _NEARBY, v.shape) for v in self.toward()]
        self._seen: list[list[_Seen]] = [[] for _ in point.leaves]
        inexact = [v.aval.dtype for v in (*program.jaxpr.jaxpr.invars, *program.jaxpr.jaxpr.outvars)]
        self._least_slack = _SLACK_OF_CONSTANTS if any(wide_dtype(dtype) != dtype for dtype in inexact) else 0.0

    @functools.cached_property
    def _near(self) -> Point:
        moved = [x + by for x, by in zip(self._point.leaves, self._shift, strict=True)]
        return Point(self._point.exact, moved, self._point.weights)

    def groups(self) -> list[list[Part]]:
        """The groups of leaves that are moved together."""
        whole = [(i, np.arange(self._scales[i].size)) for i in self._compared]
        together = 1 if len(whole) <= _ALONE else -(-len(whole) // _GROUPS)
        return [whole[i : i + together] for i in range(0, len(whole), together)]

    def elements(self) -> list[list[Part]]:
        """Every element on its own."""
        return [[(i, np.array([k]))] for i in self._compared for k in range(self._scales[i].size)]

    def turns(self, group: list[Part]) -> bool:
        """Whether there are directions other than forwards and backwards."""
        return sum(indices.size for _, indices in group) > 1 or np.iscomplexobj(self._point.leaves[group[0][0]])

    def toward(self) -> Leaves:
        """A random direction in which each element moves by about its own size."""
        return [
            scale * _signs(self._generator, leaf) * self._generator.uniform(*_STRIDES, leaf.shape)
            for scale, leaf in zip(self._scales, self._point.leaves, strict=True)
        ]

    def look(self, group: list[Part], toward: Leaves) -> None:
        """Read a direction; split it into leaves unless all is well."""
        reading = self._read(self._point, group, toward)
        if len(group) > 1 and not reading.is_clean:
            middle = len(group) // 2
            self.look(group[:middle], toward)
            self.look(group[middle:], toward)
            return
        for leaf, indices in group:
            self._seen[leaf].append(_Seen(reading, indices, toward))

    def _direction(self, group: list[Part], toward: Leaves) -> Leaves:
        moved = [np.zeros_like(v) for v in toward]
        for leaf, indices in group:
            moved[leaf].reshape(-1)[indices] = toward[leaf].reshape(-1)[indices]
        return moved

    def _slack(self, group: list[Part]) -> float:
        return max(self._least_slack, min(self._slack_of_leaf.get(leaf, 0.0) for leaf, _ in group))

    def _read(self, place: Point, group: list[Part], toward: Leaves) -> Reading:
        direction, slack = self._direction(group, toward), self._slack(group)
        reading = place.read(direction, slack=slack)
        if MISMATCH not in (reading.forward.status, reading.reverse.status):
            return reading
        # Another ratio of steps has to confirm it.
        other = place.read(direction, slack=slack, shrink=_OTHER_STEPS)
        is_wrong = lambda found, mode: getattr(found, mode).status == MISMATCH
        refuted = [mode for mode in ("forward", "reverse") if is_wrong(reading, mode) and not is_wrong(other, mode)]
        return reading._replace(**{mode: getattr(reading, mode)._replace(status=INCONCLUSIVE) for mode in refuted})

    def leaf(self, i: int) -> LeafDerivative:
        """The result for a leaf, read in parts and at a point nearby if it is not clear."""
        seen = self._seen[i]
        unclear = [s for s in seen if not s.reading.is_clean]
        blamed = _most_wrong(seen) or self._hidden(i, seen)
        if unclear and blamed is None:
            seen = [*seen, *self._parted(i, unclear[0])]
            blamed = _most_wrong(seen)
        near = [self._again(i, s, self._near) for s in ([blamed] if blamed else []) + unclear[:_NEARBY_READINGS]]
        place = _place(blamed, near)
        status = MISMATCH if place else _worst(near) if near and _worst(seen) == INCONCLUSIVE else _worst(seen)
        excuses: tuple[Chain, ...] = ()
        elsewhere = _most_wrong(near)
        if place and (suspect := blamed or elsewhere) is not None:
            if place != "tie":
                status, excuses = self._excused(i, suspect, blamed is not None)
            blamed = self._narrowed(i, suspect, elsewhere)
        cancels = self._cancels(i)
        return LeafDerivative(
            status=status,
            place=place,
            **self._numbers(i, blamed),
            kinks=max((s.reading.kinks for s in seen), default=0),
            jumps=max((s.reading.jumps for s in seen), default=0),
            precision=None if cancels else self._precisions[i],
            cancels=cancels,
            excuses=excuses,
        )

    def _excused(self, i: int, suspect: _Seen, is_here: bool) -> tuple[str, tuple[Chain, ...]]:
        """The status of a mismatch, and what explains it."""
        # All of it has to be explained: an excuse for one element must not excuse another.
        part = (i, suspect.indices)
        place, direction = self._point if is_here else self._near, self._direction([part], suspect.toward)
        stops = explaining_stops(self.program, place, direction, self._slack([part]))
        if stops:
            return STOPPED, stops
        factor = explaining_factorization(self.program, i, place, direction, self._slack([part]))
        return (MISMATCH, ()) if factor is None else (SYMMETRIC, (factor,))

    def _numbers(self, i: int, blamed: _Seen | None) -> dict[str, Any]:
        """The slopes shown for a leaf; for a single element, its derivative."""
        shown = blamed or max(self._seen[i], key=lambda s: _shown(s.reading).relative, default=None)
        agreement = Agreement(ABSENT) if shown is None else _shown(shown.reading)
        found = {"got": agreement.got, "expected": agreement.expected, "relative": agreement.relative}
        if blamed is None:
            return {"wrong": "", "element": None, **found}
        if blamed.indices.size > 1:
            return {"wrong": _wrong(blamed.reading), "element": None, **found}
        element = int(blamed.indices[0])
        by = blamed.toward[i].reshape(-1)[element].item()
        # A complex number has a slope only along a direction.
        by = abs(by) if isinstance(by, complex) else by
        found.update(got=agreement.got / by, expected=agreement.expected / by)
        return {"wrong": _wrong(blamed.reading), "element": element, **found}

    def _again(self, i: int, seen: _Seen, place: Point) -> _Seen:
        return seen._replace(reading=self._read(place, [(i, seen.indices)], seen.toward))

    def _narrowed(self, i: int, blamed: _Seen, nearby: _Seen | None) -> _Seen:
        """The element most to blame, if there is one; nearby, so that ties are not blamed for other faults."""
        start, place = (blamed, self._point) if nearby is None else (nearby, self._near)
        seen = self._bisected(i, start, place, _most_wrong)
        at_point = self._again(i, seen, self._point)
        return at_point if at_point.status == MISMATCH else seen

    def _bisected(self, i: int, seen: _Seen, place: Point, choose: Callable[[list[_Seen]], _Seen | None]) -> _Seen:
        """Halve a set of elements as long as one half is chosen, and return what is left."""
        while seen.indices.size > 1:
            chosen = choose([self._again(i, half, place) for half in _halves(seen)])
            if chosen is None:
                break
            seen = chosen
        return seen

    def _hidden(self, i: int, seen: list[_Seen]) -> _Seen | None:
        """The element that causes all of a slight disagreement, if it is badly wrong itself."""
        slack = self._slack([(i, np.zeros(0, int))])
        if _worst(seen) != ROUNDING or slack > _SLACK_OF_CONSTANTS:
            return None
        slight = self._bisected(i, _least_right(seen), self._point, _least_right)
        is_bad = slight.status == MISMATCH and _shown(slight.reading).relative > _BADLY
        return slight if is_bad else None

    def _parted(self, i: int, unclear: _Seen) -> list[_Seen]:
        """The parts of a leaf that are smooth, without the elements that are not."""
        smooth: list[_Seen] = []
        parts, readings = [unclear], 0
        while parts:
            whole = parts.pop()
            for half in _halves(whole) if whole.indices.size > 1 else ():
                part = self._again(i, half, self._point)
                readings += 1
                (smooth if part.reading.is_clean or part.status == MISMATCH else parts).append(part)
            if readings >= _PARTINGS or (readings >= _PARTINGS_IN_VAIN and not smooth):
                # There are too many to tell them apart.
                break
        return smooth

    @functools.cached_property
    def _precisions(self) -> list[float | None]:
        """The error of the gradient in the precision of the program, compared with float64."""
        if self._point.gradient is None or self._gradient is None:
            return [None] * len(self._seen)
        pairs = zip(self._gradient, self._point.gradient, strict=True)
        return [_distance(widened(low), exact) for low, exact in pairs]

    def _cancels(self, i: int) -> bool:
        error, gradient = self._precisions[i], self._point.gradient
        if error is None or not _UNLIKE < error < np.inf or gradient is None:
            return False
        return bool(np.linalg.norm(gradient[i]) <= _BURIED * self._point.noise_of_gradient(i))


def _halves(seen: _Seen) -> list[_Seen]:
    return [seen._replace(indices=half) for half in np.array_split(seen.indices, 2)]


def _place(blamed: _Seen | None, near: list[_Seen]) -> str:
    """Where the mismatch is; empty if there is none."""
    nearby = _worst(near)
    if blamed is None:
        return "nearby" if nearby == MISMATCH else ""
    return "tie" if nearby in (AGREE, ROUNDING) else "here"


def _shown(reading: Reading) -> Agreement:
    """The most telling agreement of a reading."""
    order = (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE, ABSENT)
    return min((reading.forward, reading.reverse, reading.modes), key=lambda a: (order.index(a.status), -a.relative))


def _wrong(reading: Reading) -> str:
    wrong = [mode for mode in ("forward", "reverse") if getattr(reading, mode).status == MISMATCH]
    return "both" if len(wrong) == 2 else wrong[0] if wrong else "one"


def _worst(seen: list[_Seen]) -> str:
    return next((s for s in (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE) if s in {x.status for x in seen}), ABSENT)


def _least_right(seen: list[_Seen]) -> _Seen:
    differences = lambda s: [abs(a.got - a.expected) for a in (s.reading.forward, s.reading.reverse)]
    return max(seen, key=lambda s: max(differences(s)))


def _most_wrong(seen: list[_Seen]) -> _Seen | None:
    wrong = [s for s in seen if s.status == MISMATCH]
    return max(wrong, key=lambda s: _shown(s.reading).relative, default=None)


def _distance(got: Any, expected: Any) -> float:
    size, distance = np.linalg.norm(expected), np.linalg.norm(got - expected)
    return float(distance / size) if size else float(distance > 0)


def _scale(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The size of each element, or that of the others if it is much smaller."""
    sizes = np.where(np.isfinite(leaf), np.abs(leaf), 0.0)
    largest = sizes.max(initial=0.0)
    return np.maximum(sizes, _SMALLEST * largest) if largest else np.ones(leaf.shape)


def _signs(generator: np.random.Generator, leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if np.iscomplexobj(leaf):
        return np.exp(2j * np.pi * generator.random(leaf.shape))
    return generator.choice([-1.0, 1.0], leaf.shape)
