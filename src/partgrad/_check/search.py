"""Search for points near the given one where an operation has no derivative, or a choice is at its threshold.

Whatever can go wrong in an operation goes wrong where a *residual* of its operands is zero: that of `sqrt(x)` is x, of
`x / y` y, of `x > y` x - y, of `eigh` the smallest gap between eigenvalues. A residual is a function of the inputs, and
Gauss-Newton steps on one of its elements lead to a zero. All elements are driven at once, as one batched program.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._double_where import double_where
from .._programs import (
    COMPARISONS,
    Operands,
    Site,
    Visitor,
    any_equation,
    bind,
    is_custom_rule,
    is_floating,
    line,
    opened,
)

# At most so many elements of residuals are driven to zero, and so many of one operation.
_TARGETS, _OF_ONE = 48, 3
_STEPS = 30
# The given point, and so many others, moved by this part of the size of each number.
_STARTS, _SPREAD = 2, 0.5
# The parts of a Gauss-Newton step that are tried: half of it where it is too bold, twice where the zero is double.
_PARTS = (0.25, 0.5, 1.0, 2.0)
# A residual so much smaller than at the start counts as reached; the point is then moved to where it is zero exactly.
_NEAR = 1e-4


class Reached(NamedTuple):
    """A point at which a residual is zero.

    Attributes:
        leaves: The leaves there.
        operation: The name of the operation.
        where: Its line.
    """

    leaves: list[Any]
    operation: str
    where: str


class Searched(NamedTuple):
    """What a search came to: the points, how many residuals were driven, and how many reached zero."""

    points: list[Reached]
    tried: int
    reached: int


# --- residuals -------------------------------------------------------------------------------------------------------

_Residual = Callable[[JaxprEqn, Operands, Operands], Any]


def _gap(values: Any) -> Any:
    """The smallest gap between neighbours along the last axis, once they are sorted."""
    ordered = jnp.sort(values, axis=-1)
    return jnp.min(ordered[..., 1:] - ordered[..., :-1], axis=-1)


def _of_axes(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    """The gap between the first and the second of what a maximum or a minimum compares."""
    (values,), axes = operands[:1], equation.params["axes"]
    values = jnp.moveaxis(values, axes, range(-len(axes), 0))
    values = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    if equation.primitive.name == "reduce_min":
        values = -values
    first, second = jnp.moveaxis(jax.lax.top_k(values, 2)[0], -1, 0)
    return first - second


def _first(shift: float = 0.0) -> _Residual:
    return lambda equation, operands, results: operands[0] - shift


_RESIDUALS: dict[str, tuple[_Residual, ...]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt", "log", "log2", "abs", "sign", "digamma", "lgamma"), (_first(),)),
    "log1p": (_first(-1.0),),
    "acosh": (_first(1.0),),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv"), (_first(1.0), _first(-1.0))),
    **dict.fromkeys(("div", "rem"), (lambda equation, operands, results: operands[1],)),
    "pow": (_first(),),
    "integer_pow": (_first(),),
    "atan2": (lambda equation, operands, results: jnp.sqrt(operands[0] ** 2 + operands[1] ** 2),),
    **dict.fromkeys((*COMPARISONS, "eq", "ne", "max", "min"), (lambda e, operands, r: operands[0] - operands[1],)),
    **dict.fromkeys(("reduce_max", "reduce_min"), (_of_axes,)),
    "eigh": (lambda equation, operands, results: _gap(results[1]),),
    "svd": (lambda equation, operands, results: _gap(results[0]),),
    "triangular_solve": (lambda equation, operands, results: jnp.diagonal(operands[0], axis1=-2, axis2=-1),),
}
# Those whose result may have no derivative come before those that choose.
_CHOICES = frozenset({*COMPARISONS, "eq", "ne", "max", "min", "abs", "sign", "reduce_max", "reduce_min"})


def _residuals_of(equation: JaxprEqn) -> tuple[_Residual, ...]:
    name = equation.primitive.name
    found = _RESIDUALS.get(name, ())
    if not found or not is_floating(equation.invars[0].aval):
        return ()
    if name == "integer_pow" and equation.params["y"] >= 0:
        return ()
    if found[0] is _of_axes:
        shape, axes = equation.invars[0].aval.shape, equation.params["axes"]
        return found if np.prod([shape[axis] for axis in axes]) > 1 else ()
    return found


class _Residuals(Visitor):
    """Brings back the residuals of all operations."""

    def __init__(self) -> None:
        self.equations: dict[str, JaxprEqn] = {}

    def site_of(self, equation: JaxprEqn) -> Site | None:
        """An operation with a residual."""
        if not _residuals_of(equation):
            return None
        shape = jax.eval_shape(lambda: self._residual(equation, *_like(equation)))
        # By its own name: the operations of two branches have nothing to do with each other.
        self.equations[str(id(equation))] = equation
        return Site(str(id(equation)), shape.shape, shape.dtype)

    def at(self, equation: JaxprEqn, site: Site, operands: Operands, own: Any) -> tuple[Operands, Any]:
        """The results as they are, and the residual."""
        results = bind(equation, operands)
        return results, self._residual(equation, operands, results)

    def guise(self, equation: JaxprEqn) -> Any:
        """The function of a custom rule is looked into: its value is what counts."""
        return (lambda function: function) if is_custom_rule(equation) else None

    def _residual(self, equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
        found = [jnp.ravel(residual(equation, operands, results)) for residual in _residuals_of(equation)]
        return jnp.real(jnp.concatenate(found))


def _like(equation: JaxprEqn) -> tuple[Operands, Operands]:
    zeros = lambda atoms: [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in atoms]
    return zeros(equation.invars), zeros(equation.outvars)


# --- the search ------------------------------------------------------------------------------------------------------


def search(
    program: ClosedJaxpr,
    leaves: Sequence[Any],
    bounds: Sequence[tuple[Any, Any]],
    generator: np.random.Generator,
    tick: Callable[[str], None] = lambda what: None,
) -> Searched:
    """Points near the given one at which a residual of an operation is zero.

    Args:
        program: The function of the leaves.
        leaves: The given point.
        bounds: For each leaf its lower and upper bounds; None is open.
        generator: For the other starts, and for which elements are driven.
        tick: Called now and then with what was done.
    """
    jaxpr, consts = opened(program)
    visitor = _Residuals()
    sites = visitor.sites_in(jaxpr)
    if not sites:
        return Searched([], 0, 0)
    flat = _Flat(leaves, bounds)

    def residuals(x: Any) -> Any:
        _, found = visitor.run(jaxpr, consts, flat.leaves(x), [None] * len(sites))
        return jnp.concatenate([jnp.ravel(one).astype(x.dtype) for one in found])

    start = flat.vector(leaves)
    first = np.asarray(jax.jit(residuals)(start))
    tick("operands")
    owners = np.repeat(np.arange(len(sites)), [int(np.prod(site.shape)) for site in sites])
    has_loops = any_equation(jaxpr, lambda equation: equation.primitive.name == "while")
    names = [visitor.equations[site.name].primitive.name for site in sites]
    targets = _chosen(first, owners, names, generator)
    driven = _drive(double_where(residuals), flat, start, np.array(targets), generator, has_loops)
    tick("search")
    found = []
    for target, x in zip(targets, driven, strict=True):
        tick("search")
        exact = _exact(residuals, flat, x, start, target, abs(first[target]))
        if exact is not None:
            equation = visitor.equations[sites[owners[target]].name]
            found.append(Reached(flat.leaves(exact), equation.primitive.name, line((equation,))))
    return Searched(found, len(targets), len(found))


def _chosen(first: np.ndarray, owners: np.ndarray, names: list[str], generator: np.random.Generator) -> list[int]:
    """The elements to drive: of each operation those that are nearest to zero, and one more."""
    chosen = []
    for number in range(len(names)):
        (own,) = np.nonzero((owners == number) & np.isfinite(first) & (first != 0))
        near = own[np.argsort(np.abs(first[own]))][: _OF_ONE - 1]
        more = generator.choice(own, 1).tolist() if own.size else []
        chosen.append(list(dict.fromkeys([*near.tolist(), *more])))
    order = sorted(range(len(names)), key=lambda number: names[number] in _CHOICES)
    return [target for number in order for target in chosen[number]][:_TARGETS]


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
        return full + 1j * full if jnp.iscomplexobj(leaf) else full

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


def _drive(
    residuals: Any,
    flat: _Flat,
    start: Any,
    targets: np.ndarray,
    generator: np.random.Generator,
    has_uncounted_loops: bool,
) -> list[Any]:
    """For each target the point at which its residual is smallest, from the best of a few starts."""
    if not targets.size:
        return []
    scale = np.maximum(np.abs(start), 0.1)
    # A loop whose steps are not counted has forward mode only.
    derivative = jax.jacfwd if has_uncounted_loops else jax.grad
    starts = [start, *(start + _SPREAD * scale * generator.standard_normal(start.shape) for _ in range(_STARTS))]

    def step(x: Any, target: Any) -> Any:
        value = lambda x: residuals(x)[target]
        here, gradient = value(x), derivative(value)(x)
        gradient = jnp.nan_to_num(gradient, posinf=0.0, neginf=0.0)
        size = jnp.sum(gradient**2)
        move = jnp.where(size > 0, here / jnp.where(size > 0, size, 1.0), 0.0) * gradient
        tried = jnp.stack([flat.within(x - part * move) for part in _PARTS])
        values = jnp.abs(jax.vmap(value)(tried))
        values = jnp.where(jnp.isnan(values), jnp.inf, values)
        best = jnp.argmin(values)
        return jnp.where(values[best] < jnp.abs(here), tried[best], x)

    def driven(x: Any, target: Any) -> tuple[Any, Any]:
        x = jax.lax.fori_loop(0, _STEPS, lambda _, x: step(x, target), flat.within(x))
        return x, jnp.abs(residuals(x)[target])

    over_targets = jax.vmap(driven, (None, 0))
    points, values = jax.jit(jax.vmap(over_targets, (0, None)))(jnp.stack([jnp.asarray(s) for s in starts]), targets)
    values = np.where(np.isnan(values), np.inf, values)
    # The given point counts for more: what is reached from there is nearer.
    best = np.where(values[0] <= 1e-6, 0, np.argmin(values, axis=0))
    return [points[best[number], number] for number in range(len(targets))]


def _exact(residuals: Any, flat: _Flat, x: Any, start: Any, target: int, before: float) -> Any | None:
    """The point beside one at which a residual is nearly zero where it is zero, or None."""
    value = lambda x: float(np.abs(np.asarray(residuals(jnp.asarray(x))[target])))
    if not value(x) <= _NEAR * max(before, 1e-30):
        return None
    for candidate in _rounded(np.asarray(x), np.asarray(start)):
        inside = flat.within(jnp.asarray(candidate, x.dtype))
        if value(inside) == 0.0:
            return inside
    return None


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
