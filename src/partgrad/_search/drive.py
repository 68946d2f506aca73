"""Search for points near the given one where an operation has no derivative, or a choice is at its threshold.

A residual (`residuals`) is a function of the inputs, and Gauss-Newton steps on one of its elements lead to a zero. All
elements are driven at once, as one batched program; how many, and whether at all, depends on the size of the function.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._double_where import double_where
from .._programs import COMPARISONS, any_equation, jaxpr_and_consts, line, quick_jit, size_of
from .residuals import CHOICES, Residuals

# At most so many elements of residuals are driven to zero, and so many of one operation.
_TARGETS, _OF_ONE = 48, 3
# An operation with no more elements than this has all of them driven.
_FEW = 4
_STEPS = 30
# The given point, and so many others, moved by this part of the size of each number.
_STARTS, _SPREAD = 2, 0.5
# The parts of a Gauss-Newton step that are tried: half of it where it is too bold, twice where the zero is double.
_PARTS = (0.25, 0.5, 1.0, 2.0)
# A residual so much smaller than at the start counts as reached; the point is then moved to where it is zero exactly.
_NEAR = 1e-4
# How much further a point beyond it is, relative to how far it is from the given one.
_FURTHER = 0.1
# At most so many numbers are computed: a step takes about eight evaluations. And so many at a time.
_NUMBERS, _EVALUATIONS, _AT_A_TIME = 4e9, 8, 1e7
# What it takes to compile a search, for each operation of the function; measured on two cores.
_COMPILING = 0.02
# How much longer than the value alone it takes, most of it to compile.
_SEARCH_TO_VALUE = 6.0


class Reached(NamedTuple):
    """A point at which a residual is zero.

    Attributes:
        leaves: The leaves there.
        operation: The name of the operation.
        where: Its line.
        how: Whether a residual is `zero` there, or all numbers are on one `side` of a threshold.
    """

    leaves: list[Any]
    operation: str
    where: str
    how: str = "zero"


class Searched(NamedTuple):
    """What a search came to: the points, how many residuals were driven and how many not, and why.

    A little beyond a point, a region may begin in which the derivative is wrong everywhere.
    """

    points: list[Reached]
    tried: int
    left: int = 0
    reason: str = ""
    beyond: tuple[Reached, ...] = ()


def search(
    program: ClosedJaxpr,
    leaves: Sequence[Any],
    bounds: Sequence[tuple[Any, Any]],
    generator: np.random.Generator,
    seconds: float = math.inf,
    tick: Callable[[str], None] = lambda what: None,
) -> Searched:
    """Points near the given one at which a residual of an operation is zero.

    Args:
        program: The function of the leaves.
        leaves: The given point.
        bounds: For each leaf its lower and upper bounds; None is open.
        generator: For the other starts, and for which elements are driven.
        seconds: How long it may take.
        tick: Called now and then with what was done.
    """
    end = time.monotonic() + seconds
    jaxpr, consts = jaxpr_and_consts(program)
    visitor = Residuals(jaxpr)
    sites = visitor.sites_in(jaxpr)
    if not sites:
        return Searched([], 0)
    most, numbers, reason = _limits(jaxpr, seconds)
    if reason:
        return Searched([], 0, len(sites), reason)
    flat = _Flat(leaves, bounds)

    def residuals(x: Any) -> Any:
        _, found = visitor.run(jaxpr, consts, flat.leaves(x), [None] * len(sites))
        return jnp.concatenate([jnp.ravel(one).astype(x.dtype) for one in found])

    start = flat.vector(leaves)
    began = time.monotonic()
    first = np.asarray(quick_jit(residuals, trusted=lambda results: True)(start))
    tick("operands")
    # The derivative of the same program, batched, in a loop.
    if time.monotonic() + _SEARCH_TO_VALUE * (time.monotonic() - began) > end:
        return Searched([], 0, len(sites), "the time was up")
    owners = np.repeat(np.arange(len(sites)), [math.prod(site.shape) for site in sites])
    names = [visitor.equations[site.name].primitive.name for site in sites]
    # In a loop, the elements of one step follow those of the step before.
    joint = np.concatenate([np.arange(math.prod(site.shape)) % site.shape[-1] >= site.note for site in sites])
    targets = _chosen(first, owners, joint, names, generator)
    left, targets = max(0, len(targets) - most), targets[:most]
    if not targets:
        return Searched([], 0)
    has_loops = any_equation(jaxpr, lambda equation: equation.primitive.name == "while")
    batch = max(1, int(_AT_A_TIME / numbers))
    starts = _starts(start, generator)
    driven, values = _drive(double_where(residuals), flat, starts, np.array(targets), has_loops, batch)
    tick("search")
    near = values <= _NEAR * np.maximum(np.abs(first[targets]), 1e-30)
    exact = _exact(residuals, flat, driven, np.asarray(start), targets, near, batch)
    tick("exact")
    of = lambda target: visitor.equations[sites[owners[target]].name]
    how = lambda n: "side" if joint[n] and of(n).primitive.name in COMPARISONS else "zero"
    reached = lambda n, x: Reached(flat.leaves(x), of(n).primitive.name, line((of(n),)), how(n))
    found = [reached(n, x) for n, x in exact.items()]
    beyond = tuple(reached(n, flat.within(x + _FURTHER * (x - start))) for n, x in exact.items())
    reason = f"{most} are driven in a function of this size" if left else ""
    return Searched(found, len(targets), left, reason, beyond)


def _limits(jaxpr: Jaxpr, seconds: float) -> tuple[int, float, str]:
    """How many elements are driven, how many numbers an evaluation computes, and why there is no search."""
    operations, numbers = size_of(jaxpr)
    most = int(min(_TARGETS, _NUMBERS / (numbers * _EVALUATIONS * _STEPS * (1 + _STARTS))))
    reason = "" if most else f"one evaluation computes {numbers:.0e} numbers"
    if operations * _COMPILING > seconds:
        reason = f"{operations} operations take longer than {seconds:.0f} s to compile"
    return most, numbers, reason


def _chosen(
    first: np.ndarray, owners: np.ndarray, joint: np.ndarray, names: list[str], generator: np.random.Generator
) -> list[int]:
    """The elements to drive: of each operation those that are nearest to zero, and one more; and some of many."""
    chosen = []
    for number in range(len(names)):
        may = (owners == number) & np.isfinite(first) & (first != 0)
        (own,), (many,) = np.nonzero(may & ~joint), np.nonzero(may & joint)
        near = own[np.argsort(np.abs(first[own]))][: _FEW if own.size <= _FEW else _OF_ONE - 1]
        more = generator.choice(own, 1).tolist() if own.size else []
        # The last ones are of all elements, the first is of a row.
        chosen.append(list(dict.fromkeys([*near.tolist(), *more, *many[:1].tolist(), *many[-2:].tolist()])))
    order = sorted(range(len(names)), key=lambda number: names[number] in CHOICES)
    return [target for number in order for target in chosen[number]]


class _Flat:
    """The differentiated leaves as one real vector within bounds."""

    def __init__(self, leaves: Sequence[Any], bounds: Sequence[tuple[Any, Any]]):
        self._leaves = [jnp.asarray(leaf) for leaf in leaves]
        self._is_complex = [jnp.iscomplexobj(leaf) for leaf in self._leaves]
        # In float64 where that is on; the steps of a search need no more digits than the leaves have.
        self._dtype = jnp.result_type(*(jnp.real(leaf).dtype for leaf in self._leaves), jnp.float32)
        self.lower = self.vector(
            [self._bound(low, leaf, -jnp.inf) for (low, _), leaf in zip(bounds, leaves, strict=True)]
        )
        self.upper = self.vector(
            [self._bound(high, leaf, jnp.inf) for (_, high), leaf in zip(bounds, leaves, strict=True)]
        )

    def _bound(self, bound: Any, leaf: Any, default: float) -> Any:
        full = jnp.broadcast_to(jnp.asarray(default if bound is None else bound, self._dtype), jnp.shape(leaf))
        # Not `1j * full`: it is NaN where there is no bound.
        return jax.lax.complex(full, full) if jnp.iscomplexobj(leaf) else full

    def vector(self, leaves: Sequence[Any]) -> Any:
        """The leaves as a vector."""
        parts = []
        for leaf, is_complex in zip(leaves, self._is_complex, strict=True):
            parts += [jnp.ravel(jnp.real(leaf)), jnp.ravel(jnp.imag(leaf))] if is_complex else [jnp.ravel(leaf)]
        return jnp.concatenate([part.astype(self._dtype) for part in parts])

    def leaves(self, x: Any) -> list[Any]:
        """A vector as the leaves."""
        found, start = [], 0
        for leaf, is_complex in zip(self._leaves, self._is_complex, strict=True):
            take = lambda begin, leaf=leaf: x[begin : begin + leaf.size].reshape(leaf.shape)
            value = jax.lax.complex(take(start), take(start + leaf.size)) if is_complex else take(start)
            start += leaf.size * (1 + is_complex)
            found.append(value.astype(leaf.dtype))
        return found

    def within(self, x: Any) -> Any:
        """The nearest point within the bounds."""
        return jnp.clip(x, self.lower, self.upper)


def _starts(start: Any, generator: np.random.Generator) -> Any:
    """The given point, and others around it."""
    scale = np.maximum(np.abs(start), 0.1)
    others = (start + _SPREAD * scale * generator.standard_normal(start.shape) for _ in range(_STARTS))
    return jnp.stack([start, *(jnp.asarray(other, start.dtype) for other in others)])


def _drive(
    residuals: Any, flat: _Flat, starts: Any, targets: np.ndarray, has_uncounted_loops: bool, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each target the point at which its residual is smallest, from the best of the starts, and its size there."""

    def sized(x: Any, target: Any) -> tuple[Any, Any]:
        value = lambda x: residuals(x)[target]
        if has_uncounted_loops:
            # A loop whose steps are not counted has forward mode only.
            gradient, here = jax.jacfwd(lambda x: (value(x),) * 2, has_aux=True)(x)
            return here, gradient
        return jax.value_and_grad(value)(x)

    def step(x: Any, target: Any) -> Any:
        here, gradient = sized(x, target)
        gradient = jnp.nan_to_num(gradient, posinf=0.0, neginf=0.0)
        size = jnp.sum(gradient**2)
        move = jnp.where(size > 0, here / jnp.where(size > 0, size, 1.0), 0.0) * gradient
        tried = jnp.stack([flat.within(x - part * move) for part in _PARTS])
        values = jnp.abs(jax.vmap(lambda x: residuals(x)[target])(tried))
        values = jnp.where(jnp.isnan(values), jnp.inf, values)
        best = jnp.argmin(values)
        return jnp.where(values[best] < jnp.abs(here), tried[best], x)

    def driven(given: tuple[Any, Any]) -> tuple[Any, Any]:
        x, target = given
        x = jax.lax.fori_loop(0, _STEPS, lambda _, x: step(x, target), flat.within(x))
        return x, jnp.abs(residuals(x)[target])

    pairs = jnp.repeat(starts, len(targets), axis=0), jnp.tile(jnp.asarray(targets), len(starts))
    run = quick_jit(lambda pairs: jax.lax.map(driven, pairs, batch_size=batch), trusted=lambda results: True)
    points, values = jax.device_get(run(pairs))
    points, values = points.reshape(len(starts), len(targets), -1), values.reshape(len(starts), len(targets))
    values = np.where(np.isnan(values), np.inf, values)
    # The given point counts for more: what is reached from there is nearer.
    best = np.where(values[0] <= 1e-6, 0, np.argmin(values, axis=0))
    numbers = np.arange(len(targets))
    return points[best, numbers], values[best, numbers]


def _exact(
    residuals: Any, flat: _Flat, driven: np.ndarray, start: np.ndarray, targets: list[int], near: np.ndarray, batch: int
) -> dict[int, Any]:
    """For the targets whose residual is nearly zero the points beside them where it is zero, if there are any."""
    pairs = [
        (target, candidate)
        for target, x, is_near in zip(targets, driven, near, strict=True)
        if is_near
        for candidate in _rounded(x, start)
    ]
    if not pairs:
        return {}
    points = flat.within(jnp.asarray(np.stack([candidate for _, candidate in pairs]), driven.dtype))
    run = lambda given: jax.lax.map(lambda pair: residuals(pair[0])[pair[1]], given, batch_size=batch)
    evaluated = quick_jit(run, trusted=lambda results: True)
    values = np.asarray(evaluated((points, jnp.asarray([target for target, _ in pairs]))))
    found: dict[int, Any] = {}
    for (target, _), x, value in zip(pairs, points, values, strict=True):
        if value == 0.0:
            found.setdefault(target, x)
    return found


def _rounded(x: np.ndarray, start: np.ndarray) -> list[np.ndarray]:
    """A point and simpler ones beside it: without what is tiny, with fewer digits, with neighbours made equal."""
    scale = max(float(np.abs(start).max(initial=0)), float(np.abs(x).max(initial=0)), 1e-30)
    clean = np.where(np.abs(x) < 1e-4 * scale, 0.0, x)
    equal = clean.copy()
    order = np.argsort(clean)
    for one, other in itertools.pairwise(order):
        if abs(equal[other] - equal[one]) < 1e-4 * scale:
            equal[other] = equal[one]
    moved = np.abs(x - start) > 1e-9 * scale
    digits = [np.where(moved, np.round(clean, number), start) for number in (0, 1, 2, 3, 4)]
    return [x, clean, equal, *digits, *(np.round(equal, number) for number in (1, 2, 3))]
