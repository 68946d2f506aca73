"""`search=True`: check a function at bad points near the given one too, and say what was moved to get there."""

import copy
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import silent_callbacks
from .._double_where import double_where
from .._message import at
from .._programs import jaxpr_and_consts, quick_jit, run
from .._search import Reached, Searched, search as points_near
from .._selection import Target
from .._transforms import Call
from ..errors import ArgumentError
from .finding import Finding
from .program import differentiable
from .report import GradientReport
from .surrogates import has_surrogates, smooth_instead

# At most so many of the points that were reached are checked, so many of those that look alike (where a gradient is
# not finite, and where it is), and so many pairs seen.
_CHECKED, _ALIKE, _TOGETHER = 8, (2, 4), 16
# At most so many numbers of a leaf that are left out of the value are made as large as this.
_LEFT_OUT, _LARGE = 4, (1e2, 1e18, np.inf)
# A slope is infinite if it grows as the step shrinks, and by ever as much, as that of `x log x` at zero does.
_STEPS, _AS_MUCH, _JUMP = (1e-1, 1e-2, 1e-3, 1e-4), 0.7, 9.0
_DIRECTIONS = 3
# The reasons of derivatives that are not finite although the value takes the path.
_TAKEN = frozenset({"singular", "no remedy", "smooth", "refuted", "rule"})

Check = Callable[[list[Target]], GradientReport]


def with_nearby(
    report: GradientReport,
    call: Call,
    has_aux: bool,
    bounds: Any,
    seed: int,
    seconds: float,
    check: Check,
    tick: Callable[[str], None],
) -> GradientReport:
    """The report on the given point, with what is wrong at bad points near it.

    Args:
        report: The report on the given point.
        call: The function of the differentiated leaves.
        has_aux: Whether it returns auxiliary data too.
        bounds: A pair of lower and upper bounds, or None.
        seed: For the search.
        seconds: How long it may take; a check at another point that has begun is finished.
        check: From the arguments at another point to the report on it.
        tick: Called now and then with what was done.
    """
    leaves, without_aux = call.selected, call.without_aux(has_aux)
    outputs = lambda *values: differentiable(without_aux(list(values)))
    program, generator = jax.make_jaxpr(outputs)(*map(jnp.asarray, leaves)), np.random.default_rng(seed)
    # How steep a surrogate is, only its smooth function tells.
    is_declared = has_surrogates(program)
    steep = (lambda *x: run(*jaxpr_and_consts(program), list(x), smooth_instead)) if is_declared else outputs
    end, limits = time.monotonic() + seconds, _bounds(bounds, call, leaves)
    try:
        with silent_callbacks():
            found = points_near(program, leaves, limits, generator, seconds, tick)
            points = _worst_first(found, outputs, leaves, limits)
    except jax.errors.JaxRuntimeError:
        # As `equinox.error_if` does.
        found, points = Searched([], 0, 1, "the function raises an error at other points"), []
    reports = _in_time(points, lambda point: check(_moved(call.targets, point)), end)
    if len(reports) < len(points):
        found = found._replace(left=found.left + len(points) - len(reports), reason="the time was up")
    paths = [row.path for row in report.rows if row.verdict is not None]
    known, new = {_cause(finding) for finding in report.findings}, dict[Any, Finding]()
    for point, other in zip(points, reports, strict=False):
        for finding in other.findings:
            cause = _cause(finding)
            # Where what is left out is infinite, much else is not defined.
            is_beside = finding.reason == "value" or (point.how == "left out" and finding.reason != "not taken")
            if finding.severity != "error" or is_beside or cause in known:
                continue
            # An infinite derivative is right where the function itself is infinitely steep.
            is_infinite = finding.kind == "nan" and finding.reason in _TAKEN and _is_infinite(steep, point)
            if cause not in new or (new[cause].severity == "info" and not is_infinite):
                new[cause] = _told(finding, paths, leaves, point, is_infinite)
    left = f", {found.left} left out ({found.reason})" if found.left else ""
    searched = f"search: {found.tried} operands tried, {len(found.points)} reached{left}; silence is no proof"
    search = {"tried": found.tried, "reached": len(found.points), "left": found.left, "reason": found.reason}
    findings, notes = (*report.findings, *new.values()), (*report.notes, searched)
    return GradientReport(report.function, report.rows, findings, report.cost, notes, search)


def _in_time(points: Sequence[Reached], check: Callable[[Reached], GradientReport], end: float) -> list[GradientReport]:
    """The reports on the first points, as many as there is time for."""
    reports, took = list[GradientReport](), 0.0
    for point in points:
        began = time.monotonic()
        if began + took > end:
            break
        reports.append(check(point))
        took = time.monotonic() - began
    return reports


def _cause(finding: Finding) -> Any:
    return finding.kind, finding.file, finding.line, finding.operation


def _worst_first(
    found: Searched, outputs: Callable[..., list[Any]], given: list[Any], limits: Sequence[tuple[Any, Any]]
) -> list[Reached]:
    """The points at which the value is finite, a few of each kind; those with a new gradient that is not first.

    Of the points beyond them, where two were reached at once, or what is left out is large, only such.
    """
    total = lambda values: sum(jnp.sum(jnp.real(output)) for output in outputs(*values))
    value, slope = quick_jit(lambda values: outputs(*values)), quick_jit(jax.grad(total))
    # With NaN only on paths that the value takes.
    taken = quick_jit(jax.grad(double_where(total)))
    bad = lambda of, leaves: frozenset(n for n, own in enumerate(_gradient(of, leaves)) if not np.isfinite(own).all())
    known, ranked, counts = bad(slope, given), dict[bytes, tuple[bool, int, Reached]](), Counter[Any]()
    more = itertools.islice(_both(found.points, given), _TOGETHER)
    left_out = _left_out(value, _gradient(slope, given), given, limits)
    for number, point in enumerate([*found.points, *found.beyond, *more, *left_out]):
        key = b"".join(np.asarray(leaf).tobytes() for leaf in point.leaves)
        if key in ranked or not all(map(_is_moderate, value(point.leaves))):
            continue
        now, is_beyond = bad(slope, point.leaves), number >= len(found.points)
        if not is_beyond or point.how == "side" or not now <= known:
            kind = (*point[1:], is_beyond, now, now and bad(taken, point.leaves))
            counts[kind] += 1
            ranked[key] = now <= known, counts[kind], point
    first = sorted((one for one in ranked.values() if one[1] <= _ALIKE[one[0]]), key=lambda one: one[:2])
    return [point for *_, point in first[:_CHECKED]]


def _both(points: Sequence[Reached], given: list[Any]) -> Iterator[Reached]:
    """From points to which one leaf each was moved to those to which two were, in the same elements."""
    alone = list[tuple[int, Any, Reached]]()
    for point in points:
        moved = [np.not_equal(*pair) for pair in zip(point.leaves, given, strict=True)]
        numbers = [number for number, own in enumerate(moved) if own.any()]
        alone += [(number, moved[number], point) for number in numbers if len(numbers) == 1]
    for (first, own, one), (second, same, other) in itertools.combinations(alone, 2):
        if first != second and np.array_equal(own, same):
            leaves = [other.leaves[n] if n == second else leaf for n, leaf in enumerate(one.leaves)]
            yield one._replace(leaves=leaves, how="both")


def _left_out(
    value: Callable[[list[Any]], list[Any]], slope: list[Any], given: list[Any], limits: Sequence[tuple[Any, Any]]
) -> Iterator[Reached]:
    """Points at which numbers that the value does not depend on, as those under a mask, are large or infinite."""
    before = value(given)

    def at(leaf: int, place: Any, number: float) -> list[Any]:
        moved = jnp.clip(jnp.asarray(given[leaf]).at[place].set(number), *limits[leaf])
        return [*given[:leaf], moved, *given[leaf + 1 :]]

    is_same = lambda leaves: all(map(np.array_equal, value(leaves), before))
    for leaf, own in enumerate(map(np.asarray, slope)):
        # What has no part in the value at all has none in the gradient of the rest.
        places = np.argwhere(own == 0)[:_LEFT_OUT] if own.any() and not np.iscomplexobj(own) else ()
        for place in map(tuple, places):
            if all(is_same(at(leaf, place, side * size)) for size in _LARGE for side in (1.0, -1.0)):
                yield from (Reached(at(leaf, place, size), "", str(leaf), "left out") for size in _LARGE)


def _is_moderate(output: Any) -> bool:
    """Whether a value is finite, and not so large that it is beside a pole."""
    return bool(np.all(np.abs(output) < np.sqrt(float(jnp.finfo(output.dtype).max))))


def _gradient(slope: Callable[[list[Any]], Any], leaves: list[Any]) -> list[Any]:
    try:
        return list(slope(leaves))
    except (TypeError, ValueError):
        # No reverse mode, as for a loop whose steps are not counted: the check says so.
        return []


def _moved(targets: Sequence[Target], point: Reached) -> list[Target]:
    """What is differentiated, at another point."""
    rest, moved = iter(point.leaves), []
    for target in targets:
        other = copy.copy(target)
        other.tree = target.with_values([next(rest) for _ in target.plan.indices])
        other.leaves = jax.tree.leaves(other.tree)
        moved.append(other)
    return moved


def _is_infinite(outputs: Callable[..., list[Any]], point: Reached) -> bool:
    """Whether the slope itself grows without bound, as that of `sqrt` at 0."""
    generator = np.random.default_rng(0)
    here = outputs(*point.leaves)

    def slope(directions: list[Any], step: float) -> float:
        moved = [leaf + (step * d).astype(leaf.dtype) for leaf, d in zip(point.leaves, directions, strict=True)]
        pairs = zip(outputs(*moved), here, strict=True)
        return max(float(np.max(np.abs(there - own), initial=0)) for there, own in pairs) / abs(step)

    grows = []
    for _ in range(_DIRECTIONS):
        directions = [generator.standard_normal(np.shape(leaf)) for leaf in point.leaves]
        sides = [[slope(directions, side * step) for step in _STEPS] for side in (-1.0, 1.0)]
        grows.append(any(map(_grows, sides)))
    return all(grows)


def _grows(slopes: list[float]) -> bool:
    """Whether they grow, but not as at a jump, where half the step doubles the slope."""
    more = np.diff(slopes)
    is_more = np.isfinite(more).all() and more[0] > 0.1 * slopes[0] and np.all(more[1:] > _AS_MUCH * more[:-1])
    return bool(is_more and slopes[-1] < _JUMP * slopes[-2])


def _told(finding: Finding, paths: list[str], leaves: list[Any], point: Reached, is_infinite: bool) -> Finding:
    """The finding, with which leaves were moved, from where to where."""
    moved = {
        path: (np.asarray(before).tolist(), np.asarray(after).tolist())
        for path, before, after in zip(paths, leaves, point.leaves, strict=True)
        if not np.array_equal(before, after)
    }
    severity = "info" if is_infinite else finding.severity
    return dataclasses.replace(finding, severity=severity, details={**finding.details, "moved": moved})


def _bounds(bounds: Any, call: Call, leaves: list[Any]) -> list[tuple[Any, Any]]:
    """The lower and the upper bound of each leaf."""
    if bounds is None:
        return [(None, None)] * len(leaves)
    lower, upper = (_of_leaves(bound, call.targets, leaves) for bound in bounds)
    for path, leaf, low, high in zip(call.paths, leaves, lower, upper, strict=True):
        for bound in (low, high):
            if bound is not None and np.shape(bound) not in ((), np.shape(leaf)):
                raise ArgumentError(
                    f"A bound of {at(path)} has the shape {np.shape(bound)}.",
                    f"Expected a number, or the shape of the leaf, {np.shape(leaf)}.",
                    fix="write one number for all of the leaf.",
                )
        if (low is not None and np.any(leaf < low)) or (high is not None and np.any(leaf > high)):
            raise ArgumentError(
                f"The bounds exclude the given point, at {at(path)}.",
                f"Expected numbers from {low} to {high}, got {np.asarray(leaf)!s:.60}.",
                fix="give bounds that hold at the point where the search starts.",
            )
    return list(zip(lower, upper, strict=True))


def _of_leaves(bound: Any, targets: Sequence[Target], leaves: list[Any]) -> list[Any]:
    if bound is None or isinstance(bound, int | float | np.number):
        return [bound] * len(leaves)
    trees = bound if len(targets) > 1 else (bound,)
    found: list[Any] = []
    for target, tree in zip(targets, trees, strict=False):
        # None is a bound here, where JAX sees no leaf.
        own = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
        found += own if len(own) == len(target.plan.indices) else _by_position(own, target)
    if len(found) != len(leaves):
        raise ArgumentError(
            f"The bounds have {len(found)} leaves, and {len(leaves)} are differentiated.",
            "Expected a number or None for each differentiated leaf, in a tree like the gradient.",
            fix="write one number for all of them, or jax.tree.map(lambda _: 0.0, tree).",
        )
    return found


def _by_position(own: list[Any], target: Target) -> list[Any]:
    return [own[i] for i in target.plan.indices] if len(own) == len(target.leaves) else own
