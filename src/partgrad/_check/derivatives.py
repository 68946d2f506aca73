"""The forward and the reverse derivative of each leaf against finite differences, all in float64.

A direction moves all elements of a leaf, each in proportion to its size. Where derivatives and differences disagree, or
where a kink hides whether they do, the direction is parted until the elements that are to blame are found; and the same
is asked at a generic point nearby, where there is no tie.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._programs import any_equation
from .exact import Exact, Leaves
from .program import Chain, Program
from .reading import ABSENT, AGREE, INCONCLUSIVE, MISMATCH, ROUNDING, Agreement, Place, Reading, slope_along
from .stopped import explaining_stops

TIE, STOPPED = "tie", "stopped"

# More leaves than this are moved together at first, so many groups of them.
_ALONE = 64
_GROUPS = 32
# Readings that may be spent on the elements of one leaf, those before any of them is clean, and those nearby.
_PARTINGS = 40
_PARTINGS_IN_VAIN = 6
_NEARBY_READINGS = 4
# The smallest size of an element, in proportion to the largest of its leaf; and how far the point nearby is.
_SMALLEST = 1e-3
_NEARBY = 1e-3
# Disagreements, in proportion to the slope, that constants of low precision and iterative solvers may explain.
_SLACK_OF_CONSTANTS = 1e-6
_SLACK_OF_ITERATIONS = 1e-3
# The disagreement of one element that no rounded constant explains.
_BADLY = 1e-3
# Those whose derivative need not be that of their iterates.
_ITERATIONS = frozenset({"while", "call_hi_primitive"})
# A gradient in low precision that may be noise; and how little of it is.
_UNLIKE = 1e-2
_BURIED = 10.0
# Other steps give a second opinion.
_OTHER_STEPS = 0.73

# A leaf, and flat indices of its elements.
Part = tuple[int, np.ndarray[Any, Any]]


class LeafDerivative(NamedTuple):
    """What is known of the derivative with respect to one leaf.

    Attributes:
        path: The path of the leaf.
        status: `agree`; `rounding`, a disagreement that constants of low precision or an iterative solver may explain;
            `mismatch`; `tie`, a mismatch of finite numbers at the point and none nearby; `stopped`, a mismatch that is
            none where what the `stop_gradient` in `stopped` stop does not move; `inconclusive`; or `absent`, where
            there is neither derivative.
        at_point: What the point itself says: `agree`, `rounding`, `mismatch`, `inconclusive` or `absent`.
        nearby: What a generic point nearby says; empty where it was not asked.
        wrong: Which derivative mismatches: `forward`, `reverse`, `both`, `one` where they contradict each other and
            differences do not tell which is right; or empty.
        got: The slope along a direction that the wrong derivative gives, or else that a derivative gives; of one
            element, the derivative.
        expected: The same by finite differences.
        relative: The distance of the two, in proportion to the sum of the magnitudes.
        element: The flat index of the one element that the numbers are of; None where they are of many.
        kinks: Outputs that have a kink in a direction, at the point.
        jumps: Outputs that have a jump.
        unsure: Outputs that finite differences tell nothing of.
        set_aside: Flat indices of the elements without which the leaf is smooth, where it is not.
        size: The largest slope by finite differences, for a change of each element by its own size.
        second: Second derivatives of the weighted sum of the outputs along the directions.
        precision: How far the gradient in the precision of the program is from that in float64, in proportion to it;
            None where there is none, or where it is nothing but rounding errors.
        cancels: Whether it is nothing but rounding errors in float64: zero.
        stopped: The `stop_gradient` equations that explain a mismatch.
    """

    path: str
    status: str
    at_point: str
    nearby: str
    wrong: str
    got: Any
    expected: Any
    relative: float
    element: int | None
    kinks: int
    jumps: int
    unsure: int
    set_aside: tuple[int, ...]
    size: float
    second: tuple[float, ...]
    precision: float | None
    cancels: bool
    stopped: tuple[Chain, ...]


class Derivatives(NamedTuple):
    """The derivatives of a program.

    Attributes:
        leaves: What is known of each leaf.
        absent: For `forward` and `reverse`, why there is no such derivative; empty where there is one.
        evaluations: How often the function was evaluated, its derivatives not counted.
    """

    leaves: list[LeafDerivative]
    absent: dict[str, str]
    evaluations: int


def derivatives(
    program: Program,
    generator: np.random.Generator,
    *,
    directions: int = 3,
    exhaustive: bool = False,
    skipped: Collection[int] = (),
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> Derivatives:
    """Compare the derivatives of a program with finite differences.

    Args:
        program: The program.
        generator: Where directions come from.
        directions: How many for each leaf.
        exhaustive: Whether to move every element of every leaf by itself, instead.
        skipped: Leaves that are not compared: their status is `absent`.
        tick: Called with the number of directions done and of all.

    Returns:
        What was found.
    """
    comparison = _Comparison(program, generator, [i for i in range(len(program.leaves)) if i not in skipped])
    parts = comparison.elements() if exhaustive else comparison.groups()
    looks = [(turn, part) for turn in range(directions) for part in parts if turn == 0 or comparison.turns(part)]
    toward = [comparison.toward() for _ in range(directions)]
    for done, (turn, part) in enumerate(looks):
        comparison.look(part, toward[turn])
        tick(done + 1, len(looks))
    leaves = [comparison.leaf(i) for i in range(len(program.leaves))]
    return Derivatives(leaves, comparison.exact.absent, comparison.exact.evaluations)


class _Seen(NamedTuple):
    """A reading of a part of a leaf along a direction."""

    reading: Reading
    indices: Any
    toward: Leaves

    @property
    def status(self) -> str:
        return self.reading.status


class _Comparison:
    """The derivatives of a program at a point and near it, and what was seen of them."""

    def __init__(self, program: Program, generator: np.random.Generator, compared: list[int]):
        self.program, self.exact, self._generator = program, Exact(program), generator
        self._compared = compared
        point = [_wide(leaf) for leaf in program.leaves]
        self._scales = [_scale(leaf) for leaf in point]
        outputs = sum(self.exact.sizes)
        # Every precision holds these weights.
        weights = generator.choice([-1, 1], outputs) * generator.integers(4, 8, outputs) / 4.0
        self._weights = weights if outputs > 1 else np.ones(outputs)
        self._place = lambda point: Place(self.exact, point, self._weights, _slack(program))
        self._point = self._place(point)
        self._shift = [v * generator.uniform(_NEARBY / 2, _NEARBY, v.shape) for v in self.toward()]
        self._seen: list[list[_Seen]] = [[] for _ in point]

    @functools.cached_property
    def _near(self) -> Place:
        return self._place([x + by for x, by in zip(self._point.point, self._shift, strict=True)])

    @functools.cached_property
    def _precisions(self) -> list[float | None]:
        return _precisions(self.program, self.exact, self._point)

    def _cancels(self, i: int) -> bool:
        error, gradient = self._precisions[i], self._point.gradient
        if error is None or not _UNLIKE < error < np.inf or gradient is None:
            return False
        return bool(np.linalg.norm(gradient[i]) <= _BURIED * self._point.noise_of_gradient(i))

    def groups(self) -> list[list[Part]]:
        """Leaves to be moved together."""
        whole = [(i, np.arange(self._scales[i].size)) for i in self._compared]
        together = 1 if len(whole) <= _ALONE else -(-len(whole) // _GROUPS)
        return [whole[i : i + together] for i in range(0, len(whole), together)]

    def elements(self) -> list[list[Part]]:
        """Every element by itself."""
        return [[(i, np.array([k]))] for i in self._compared for k in range(self._scales[i].size)]

    def turns(self, group: list[Part]) -> bool:
        """Whether there is another direction than forwards and backwards."""
        return sum(indices.size for _, indices in group) > 1 or np.iscomplexobj(self._point.point[group[0][0]])

    def toward(self) -> Leaves:
        """A random direction in which each element moves by its own size."""
        pairs = zip(self._scales, self._point.point, strict=True)
        return [scale * _signs(self._generator, leaf) for scale, leaf in pairs]

    def look(self, group: list[Part], toward: Leaves) -> None:
        """Read a direction; part it into leaves unless all is well."""
        reading = self._read(self._point, group, toward)
        if len(group) > 1 and not reading.is_clean:
            middle = len(group) // 2
            self.look(group[:middle], toward)
            self.look(group[middle:], toward)
            return
        for part in group:
            of_leaf = reading if len(group) == 1 else self._share(reading, part, toward)
            self._seen[part[0]].append(_Seen(of_leaf, part[1], toward))

    def _share(self, reading: Reading, part: Part, toward: Leaves) -> Reading:
        """What one leaf has in the slope of many."""
        leaf, indices = part
        gradient = self._point.gradient
        moved = np.zeros_like(toward[leaf])
        moved.reshape(-1)[indices] = toward[leaf].reshape(-1)[indices]
        size = np.nan if gradient is None else abs(slope_along([gradient[leaf]], [moved]))
        return reading._replace(size=size, second=np.nan)

    def _direction(self, group: list[Part], toward: Leaves) -> Leaves:
        moved = [np.zeros_like(v) for v in toward]
        for leaf, indices in group:
            moved[leaf].reshape(-1)[indices] = toward[leaf].reshape(-1)[indices]
        return moved

    def _read(self, place: Place, group: list[Part], toward: Leaves) -> Reading:
        direction = self._direction(group, toward)
        reading = place.read(direction)
        if MISMATCH not in (reading.forward.status, reading.reverse.status):
            return reading
        # Other steps have to say the same.
        other = place.read(direction, _OTHER_STEPS)
        confirmed = {
            mode: getattr(reading, mode)
            if getattr(reading, mode).status != MISMATCH or getattr(other, mode).status == MISMATCH
            else getattr(reading, mode)._replace(status=INCONCLUSIVE)
            for mode in ("forward", "reverse")
        }
        return reading._replace(**confirmed)

    def leaf(self, i: int) -> LeafDerivative:
        """What was seen of a leaf, after its parts and a point nearby were asked where it is not clear."""
        seen = self._seen[i]
        at_point = _worst(seen)
        unclear = [s for s in seen if not s.reading.is_clean]
        blamed = _most_wrong(seen)
        if at_point == ROUNDING and (blamed := self._hidden(i, _least_right(seen))) is not None:
            at_point = MISMATCH
        set_aside: tuple[int, ...] = ()
        if unclear and blamed is None:
            smooth, set_aside = self._parted(i, unclear[0])
            blamed = _most_wrong(smooth)
            at_point = _worst([*seen, *smooth]) if at_point == INCONCLUSIVE or blamed else at_point
        near = [self._again(i, s, self._near) for s in ([blamed] if blamed else []) + unclear[:_NEARBY_READINGS]]
        nearby = _worst(near) if near else ""
        status, blamed = _status(at_point, nearby), blamed or _most_wrong(near)
        stopped: tuple[Chain, ...] = ()
        if blamed is not None:
            place = self._point if at_point == MISMATCH else self._near
            if status == MISMATCH:
                # All of it has to be explained: what one element bears may not excuse another.
                direction = self._direction([(i, blamed.indices)], blamed.toward)
                stopped = explaining_stops(self.program, place, direction)
            blamed = self._narrowed(i, blamed, _most_wrong(near))
            if status == TIE and not np.isfinite(_shown(blamed.reading).got):
                # A tie is between derivatives.
                status = MISMATCH
        return LeafDerivative(
            path=self.program.paths[i],
            status=STOPPED if stopped else status,
            at_point=at_point,
            nearby=nearby,
            **self._numbers(i, blamed),
            kinks=max((s.reading.kinks for s in seen), default=0),
            jumps=max((s.reading.jumps for s in seen), default=0),
            unsure=max((s.reading.unsure for s in seen), default=0),
            set_aside=set_aside,
            size=max((s.reading.size for s in seen), default=0.0),
            second=tuple(s.reading.second for s in seen),
            precision=None if self._cancels(i) else self._precisions[i],
            cancels=self._cancels(i),
            stopped=stopped,
        )

    def _numbers(self, i: int, blamed: _Seen | None) -> dict[str, Any]:
        """The slopes that are shown of a leaf: of one element, its derivative."""
        shown = blamed or max(self._seen[i], key=lambda s: _shown(s.reading).relative, default=None)
        agreement = Agreement(ABSENT) if shown is None else _shown(shown.reading)
        found = {"got": agreement.got, "expected": agreement.expected, "relative": agreement.relative}
        if blamed is None:
            return {"wrong": "", "element": None, **found}
        if blamed.indices.size > 1:
            return {"wrong": _wrong(blamed.reading), "element": None, **found}
        element = int(blamed.indices[0])
        by = blamed.toward[i].reshape(-1)[element].item()
        found.update(got=agreement.got / by, expected=agreement.expected / by)
        return {"wrong": _wrong(blamed.reading), "element": element, **found}

    def _again(self, i: int, seen: _Seen, place: Place) -> _Seen:
        return seen._replace(reading=self._read(place, [(i, seen.indices)], seen.toward))

    def _narrowed(self, i: int, blamed: _Seen, nearby: _Seen | None) -> _Seen:
        """The element that is most to blame, if one is; nearby, ties are not blamed for the faults of others."""
        seen, place = (blamed, self._point) if nearby is None else (nearby, self._near)
        while seen.indices.size > 1:
            halves = np.array_split(seen.indices, 2)
            worse = _most_wrong([self._again(i, seen._replace(indices=half), place) for half in halves])
            if worse is None:
                break
            seen = worse
        at_point = self._again(i, seen, self._point)
        return at_point if at_point.status == MISMATCH else seen

    def _hidden(self, i: int, slight: _Seen) -> _Seen | None:
        """The element that makes up all of a slight disagreement, if it is badly wrong itself."""
        if self._point.slack > _SLACK_OF_CONSTANTS:
            return None
        while slight.indices.size > 1:
            halves = np.array_split(slight.indices, 2)
            slight = _least_right([self._again(i, slight._replace(indices=half), self._point) for half in halves])
        is_bad = slight.status == MISMATCH and _shown(slight.reading).relative > _BADLY
        return slight if is_bad else None

    def _parted(self, i: int, unclear: _Seen) -> tuple[list[_Seen], tuple[int, ...]]:
        """The parts of a leaf that are smooth, and the few elements that are not."""
        smooth: list[_Seen] = []
        parts, aside, readings = [unclear.indices], [], 0
        while parts:
            indices = parts.pop()
            if indices.size == 1:
                aside.append(int(indices[0]))
                continue
            for half in np.array_split(indices, 2):
                part = self._again(i, unclear._replace(indices=half), self._point)
                readings += 1
                if part.reading.is_clean or part.status == MISMATCH:
                    smooth.append(part)
                else:
                    parts.append(half)
            if readings >= _PARTINGS or (readings >= _PARTINGS_IN_VAIN and not smooth):
                # Too many to tell them apart.
                return smooth, ()
        return smooth, tuple(sorted(aside))


def _shown(reading: Reading) -> Agreement:
    """The agreement of a reading that says most."""
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


def _status(at_point: str, nearby: str) -> str:
    if at_point == MISMATCH:
        return TIE if nearby in (AGREE, ROUNDING) else MISMATCH
    return nearby if nearby == MISMATCH or (nearby and at_point == INCONCLUSIVE) else at_point


def _precisions(program: Program, exact: Exact, place: Place) -> list[float | None]:
    """How far the gradient in the precision of the program is from that in float64."""
    if place.gradient is None:
        return [None] * len(program.leaves)
    pairs = zip(exact.cotangents(place.weights), program.out_avals, strict=True)
    weights = [jnp.asarray(w, aval.dtype) for w, aval in pairs]
    low = program.pullback(weights)
    return [_distance(_wide(a), b) for a, b in zip(low, place.gradient, strict=True)]


def _distance(got: Any, expected: Any) -> float:
    size, distance = np.linalg.norm(expected), np.linalg.norm(got - expected)
    return float(distance / size) if size else float(distance > 0)


def _slack(program: Program) -> float:
    if any_equation(program.jaxpr.jaxpr, lambda equation: equation.primitive.name in _ITERATIONS):
        return _SLACK_OF_ITERATIONS
    inexact = [v.aval for v in (*program.jaxpr.jaxpr.invars, *program.jaxpr.jaxpr.outvars)]
    return _SLACK_OF_CONSTANTS if any(_wide_dtype(a.dtype) != a.dtype for a in inexact) else 0.0


def _wide(leaf: Any) -> np.ndarray[Any, Any]:
    return np.asarray(leaf).astype(_wide_dtype(leaf.dtype))


def _wide_dtype(dtype: Any) -> Any:
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def _scale(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The size of each element, and that of the others where it is much smaller."""
    sizes = np.where(np.isfinite(leaf), np.abs(leaf), 0.0)
    largest = sizes.max(initial=0.0)
    return np.maximum(sizes, _SMALLEST * largest) if largest else np.ones(leaf.shape)


def _signs(generator: np.random.Generator, leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if np.iscomplexobj(leaf):
        return np.exp(2j * np.pi * generator.random(leaf.shape))
    return generator.choice([-1.0, 1.0], leaf.shape)
