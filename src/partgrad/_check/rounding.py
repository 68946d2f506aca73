"""A gradient that has lost its digits to rounding, and the operation that loses them."""

from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from .._programs import (
    Chain,
    reaching,
)
from .agreement import NO_DIGIT, TWO_DIGITS
from .digits import LOST_ANYHOW, losing
from .exact import Leaves, size_of
from .finding import Finding
from .float64 import widened
from .names import finding
from .outcomes import selects
from .own import Own
from .point import Point
from .precision import Precision
from .program import Program
from .questions import Answer, Search

# Relative errors of a gradient: the least that cannot be trusted, in units in the last place and at all; the most at
# which it can; and, in units, what is worth telling if a conversion explains it, and what it explains.
_LOST, _LOST_UNITS, _LOST_AT_MOST = 3e-3, 30.0, 0.1
_TOLD_UNITS = 100.0
_EXPLAINED_UNITS = 10.0
# How many units in the last place leaves are moved, in how many directions, to see whether something changes.
_UNITS, _SEEDS = (1.0, 4.0, 16.0, 64.0), 4
# Tests that nothing near the point decides.
_EQUALITIES = frozenset({"eq", "ne", "is_finite"})
# How many elements that are off are looked at.
_MOST_ELEMENTS = 8


def lost_digits(
    own: Own, search: Search, answers: Mapping[int, Answer], exhaustive: bool, is_asked: Callable[[int], bool]
) -> Iterator[Finding]:
    """The findings of digits that are lost, of leaves that were compared.

    Args:
        own: The program as the user runs it.
        search: The readings of it.
        answers: What was found of the leaves.
        exhaustive: Whether every element counts.
        is_asked: Whether it is asked of a leaf.
    """
    precision = Precision(own, search.point, exhaustive)
    for leaf, answer in answers.items():
        if is_asked(leaf):
            yield from _rounding(own, leaf, answer, precision, search)


def _rounding(own: Own, leaf: int, answer: Answer, precision: Precision, search: Search) -> Iterator[Finding]:
    """A finding if the gradient of a leaf has lost its digits to rounding, relative to what its dtype has."""
    program, path = own.program, [own.program.paths[leaf]]
    if precision.cancels(leaf):
        yield finding("zero", "info", "rounding", path)
    dtype, worst = program.leaves[leaf].dtype, precision.worst(leaf)
    if worst is None or not worst.error < float("inf"):
        return
    error = worst.error
    unit = float(jnp.finfo(dtype).eps)
    lost = min(max(_LOST, _LOST_UNITS * unit), _LOST_AT_MOST)
    if answer.row.name == "unconverged" and answer.seen is not None:
        # In float64, a solver takes another number of steps.
        lost = max(lost, answer.seen.reading.telling.relative)
    is_lost = error > lost
    narrow = _narrowing(program, leaf, error) if error > _TOLD_UNITS * unit else None
    if narrow is not None and is_lost and not precision.is_of_narrow(leaf, worst):
        narrow = None
    if narrow is not None:
        kind = narrow[-1].outvars[0].aval.dtype
        is_explained = error <= min(_EXPLAINED_UNITS * float(jnp.finfo(kind).eps), LOST_ANYHOW)
        more = {
            "error": error,
            "dtype": str(dtype),
            "through": str(kind),
            "is_explained": is_explained,
            "vanishes": bool(own.gradients) and not own.gradients[leaf].any(),
        }
        severity = "info" if is_explained else "error" if error >= NO_DIGIT else "warning"
        yield finding("precision", severity, "narrow", path, narrow, **more)
    elif is_lost:
        found = losing(own, leaf, error, lost, worst.exact, worst.point)
        if found is None:
            return
        severity = "error" if error >= NO_DIGIT else "warning"
        if found.decided:
            decided = (chain for chain in found.decided if _is_decided_by_rounding(search.point, chain))
            if chain := next(decided, ()):
                yield finding("precision", severity, "decides", path, chain, error=error, dtype=str(dtype))
            return
        chain, of_value, *_ = found
        is_told = answer.row.name in ("kink", "jump") and bool(chain) and selects(chain)
        if is_told or (answer.row.name == "kink" and _is_between_sides(own, leaf, answer, search)):
            # Which side of it the point is on is a matter of rounding, and that it is there was said.
            return
        yield finding("precision", severity, "cancels", path, chain, error=error, dtype=str(dtype), of_value=of_value)


def _is_decided_by_rounding(point: Point, chain: Chain) -> bool:
    """Whether an operation decides something that it would not decide at any point within the digits of the leaves.

    Where it would, the point is at the threshold, and the derivative is that of one of its sides.
    """
    program = point.exact.program
    if not chain or chain[-1].primitive.name in _EQUALITIES or not program.leaves_into(chain, program.value):
        return False

    def moved(units: float, seed: int) -> Leaves:
        sign = np.random.default_rng(seed).choice
        eps = [units * float(jnp.finfo(leaf.dtype).eps) for leaf in program.leaves]
        return [x + by * size_of(x) * sign((-1.0, 1.0), x.shape) for x, by in zip(point.leaves, eps, strict=True)]

    places = (moved(units, seed) for units in _UNITS for seed in range(_SEEDS))
    return not any(point.outcomes.differs(chain, point.leaves, place) for place in places)


def is_undecided(finding: Finding) -> bool:
    """Whether so few digits of a gradient are right that it is not `ok`."""
    details = finding.details
    if finding.kind == "growth":
        return True
    return finding.kind == "precision" and not details.get("is_explained") and details.get("error", 0.0) > TWO_DIGITS


def _is_between_sides(own: Own, leaf: int, answer: Answer, search: Search) -> bool:
    """Whether the elements whose gradient is off, as it is, are at a kink, and it lies between the slopes there."""
    seen, exact = answer.seen, search.point.gradient
    if seen is None or exact is None or not own.gradients:
        return False
    got = widened(own.gradients[leaf]).reshape(-1)
    off = np.abs(got - exact[leaf].reshape(-1))
    for element in np.argsort(-off)[:_MOST_ELEMENTS]:
        if off[element] <= _LOST * np.linalg.norm(exact[leaf]):
            break
        alone = search.again(leaf, seen._replace(indices=np.array([element])), search.point)
        low, high = sorted((alone.reading.left, alone.reading.right))
        slope = float((got[element] * seen.toward[leaf].reshape(-1)[element]).real)
        slack = _LOST * max(abs(low), abs(high))
        if not alone.reading.kinks or not low - slack <= slope <= high + slack:
            return False
    return True


def _narrowing(program: Program, leaf: int, error: float) -> Chain | None:
    """The first conversion to fewer digits: of a value that depends on a leaf, in its derivative, or elsewhere."""
    unit = float(jnp.finfo(program.leaves[leaf].dtype).eps)
    narrowing = [chain for chain in program.smooth.chains if _is_narrowing(chain, unit)]
    for chain in narrowing:
        if any(mask >> leaf & 1 for mask in program.smooth.out_of(chain)):
            return chain
    for chain in program.pulled.chains if program.cotangent is not None else ():
        origin = program.origin(chain)
        if _is_narrowing(chain, unit) and origin and leaf in program.leaves_into(origin):
            return (*origin, chain[-1])
    explains = lambda chain: error < _TOLD_UNITS * float(jnp.finfo(chain[-1].outvars[0].aval.dtype).eps)
    return next(filter(explains, reaching(program.jaxpr.jaxpr, narrowing)), None)


def _is_narrowing(chain: Chain, unit: float) -> bool:
    """Whether an equation converts to fewer digits than it was given, and than a leaf of such a unit has."""
    equation = chain[-1]
    if equation.primitive.name != "convert_element_type":
        return False
    given, made = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if equation.invars[0].aval.weak_type:
        # A Python number takes the dtype of the array it meets.
        return False
    both = jnp.issubdtype(given, jnp.inexact) and jnp.issubdtype(made, jnp.inexact)
    return both and bool(jnp.finfo(made).eps > max(float(jnp.finfo(given).eps), unit))
