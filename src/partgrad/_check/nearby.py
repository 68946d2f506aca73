"""`search=True`: check a function at bad points near the given one too, and say what was moved to get there."""

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import silent_callbacks
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

# At most so many of the points that were reached are checked, and so many of one operation.
_CHECKED, _OF_ONE = 8, 4
# A slope is infinite if it grows as the step shrinks, and by ever as much, as that of `x log x` at zero does.
_STEPS, _AS_MUCH = (1e-1, 1e-2, 1e-3, 1e-4), 0.7
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
    end = time.monotonic() + seconds
    try:
        with silent_callbacks():
            found = points_near(program, leaves, _bounds(bounds, call, leaves), generator, seconds, tick)
    except jax.errors.JaxRuntimeError:
        # As `equinox.error_if` does.
        found = Searched([], 0, 1, "the function raises an error at other points")
    points = _worst_first(found.points, found.beyond, outputs, leaves)
    reports = _in_time(points, lambda point: check(_moved(call.targets, point)), end)
    if len(reports) < len(points):
        found = found._replace(left=found.left + len(points) - len(reports), reason="the time was up")
    paths = [row.path for row in report.rows if row.verdict is not None]
    known, new = {_cause(finding) for finding in report.findings}, dict[Any, Finding]()
    for point, other in zip(points, reports, strict=False):
        for finding in other.findings:
            cause = _cause(finding)
            if finding.severity != "error" or finding.reason == "value" or cause in known:
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
    points: Sequence[Reached], beyond: Sequence[Reached], outputs: Callable[..., list[Any]], given: list[Any]
) -> list[Reached]:
    """The points at which the value is finite, a few of each operation; those with a new gradient that is not first.

    Of the points beyond them, only such.
    """
    total = lambda values: sum(jnp.sum(jnp.real(output)) for output in outputs(*values))
    value, slope = quick_jit(lambda values: outputs(*values)), quick_jit(jax.grad(total))
    bad = lambda leaves: {number for number, own in enumerate(_gradient(slope, leaves)) if not np.isfinite(own).all()}
    known, ranked = bad(given), dict[bytes, tuple[bool, Reached]]()
    for number, point in enumerate([*points, *beyond]):
        key = b"".join(np.asarray(leaf).tobytes() for leaf in point.leaves)
        if key not in ranked and all(map(_is_moderate, value(point.leaves))):
            is_known = bad(point.leaves) <= known
            if number < len(points) or not is_known:
                ranked[key] = is_known, point
    chosen, counts = list[Reached](), Counter[tuple[str, str]]()
    for _, point in sorted(ranked.values(), key=lambda pair: pair[0]):
        counts[point.operation, point.where] += 1
        if counts[point.operation, point.where] <= _OF_ONE:
            chosen.append(point)
    return chosen[:_CHECKED]


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
    more = np.diff(slopes)
    return bool(np.isfinite(more).all() and more[0] > 0.1 * slopes[0] and np.all(more[1:] > _AS_MUCH * more[:-1]))


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
