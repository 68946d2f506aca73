"""Which operations select something else beside the point: comparisons, indices, steps, maxima and sorts.

A function that is made of smooth operations can have a kink or a jump only where one of its selections changes. So the
outcomes of all selections are recorded at the point and at the probes beside it, in float64, and compared.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from .._compat import cached_property, silent_callbacks
from .._programs import CHOOSING, TESTS, Chain, Dependence, Operands, Sources, bind, ids, is_floating, line, union
from .._surrogate import is_surrogate
from .exact import Leaves
from .float64 import promoted
from .probe import Answer, probing
from .program import Program

_STEPS = frozenset({"floor", "ceil", "round", "sign"})
_BY_INDEX = frozenset({"argmax", "argmin"})
_PLACES = frozenset({"sort", "top_k", "approx_top_k"})
_CHOOSING = CHOOSING | {"abs"}
# Larger arrays of outcomes are summed up to one number.
_MOST_ELEMENTS = 1 << 16
_Key = tuple[tuple[int, ...], tuple[int, ...]]


class Crossing(NamedTuple):
    """A selection that changes between the point and a probe.

    Attributes:
        chain: The operation.
        steps: The steps of the loops around it.
        element: The first element of its outcome that changes, and the shape of the outcome.
        distance: The smallest step, of those that were tried, at which it changes.
    """

    chain: Chain
    steps: tuple[int, ...]
    element: tuple[int, tuple[int, ...]]
    distance: float


class Outcomes:
    """The outcomes of all selections of a program, recorded when they are first asked for."""

    def __init__(self, program: Program):
        self._program = program
        self._found: dict[tuple[bytes, ...], dict[_Key, Answer]] = {}

    def crossings(self, leaf: int | None, point: Leaves, others: list[tuple[float, Leaves]]) -> list[Crossing]:
        """The selections that depend on a leaf, reach the output, and change at the nearest of some other points.

        Args:
            leaf: The leaf; None for any.
            point: The point.
            others: The other points, with their distances.
        """
        start = self._at(point)
        for distance in sorted({distance for distance, _ in others}):
            changed: dict[_Key, Crossing] = {}
            for by, other in others:
                if by == distance:
                    changed |= self._changed(start, self._at(other), distance)
            found = self._reaching([c for c in changed.values() if leaf is None or self._is_into(leaf, c.chain)])
            if found:
                return found
        return []

    def differs(self, chain: Chain, one: Leaves, other: Leaves) -> bool:
        """Whether an operation selects something else at another point, whatever comes of it."""
        changed = self._changed(self._at(one), self._at(other), 1.0)
        return any(crossing.chain[-1] is chain[-1] for crossing in changed.values())

    def _changed(self, start: dict[_Key, Answer], other: dict[_Key, Answer], by: float) -> dict[_Key, Crossing]:
        changed = {}
        for key, answer in start.items():
            if key in other and not np.array_equal(answer.numbers, other[key].numbers):
                origin = self._program.origin(answer.chain)
                shape = tuple(map(int, answer.numbers[2 : 2 + answer.numbers[1]]))
                element = int(np.argmax(answer.numbers != other[key].numbers)) - 2 - len(shape)
                if origin:
                    changed[key] = Crossing(origin, answer.steps, (element, shape), by)
        return changed

    def _is_into(self, leaf: int, chain: Chain) -> bool:
        return leaf in self._program.leaves_into(chain, self._program.value)

    def _reaching(self, found: list[Crossing]) -> list[Crossing]:
        """Those whose change reaches the output, through no other selection that says less than a number."""
        bits = {ids(crossing.chain): 1 << number for number, crossing in enumerate(found)}
        outer = lambda chain: (ids(chain[:length]) for length in range(1, len(chain) + 1))

        def transfer(chain: Chain, sources: Sources) -> Sources:
            bit = union(bits.get(key, 0) for key in outer(chain))
            if is_surrogate(chain[-1]):
                sources = sources[1:]
            passed = bit if is_discrete(chain) else union(sources) | bit
            return [passed] * len(chain[-1].outvars)

        jaxpr = self._program.jaxpr.jaxpr
        nothing = [0] * len(jaxpr.invars)
        flow = Dependence(jaxpr, nothing, transfer, through_control=True, into_rules=True, by_element=False)
        reached = union(flow.outputs)
        return [crossing for number, crossing in enumerate(found) if reached >> number & 1]

    @cached_property
    def _jaxpr(self) -> Any:
        promote = promoted(self._program.numbered)
        with jax.enable_x64(True):
            wide = [np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64) for x in self._program.leaves]
            return jax.make_jaxpr(promote)(*wide)

    @cached_property
    def _asking(self) -> Callable[[Operands], tuple[Operands, list[Answer]]]:
        return probing(self._jaxpr, _question, purpose="outcomes")

    def _at(self, point: Leaves) -> dict[_Key, Answer]:
        name = tuple(leaf.tobytes() for leaf in point)
        if name not in self._found:
            with jax.enable_x64(True), silent_callbacks():
                try:
                    _, answers = self._asking(list(point))
                except (jax.errors.JaxRuntimeError, ValueError):  # The function rejects the point.
                    answers = []
            self._found[name] = {(ids(a.chain), a.steps): a for a in answers}
        return self._found[name]


def _question(chain: Chain, operands: Operands, results: Operands) -> Any:
    """Zero, the number of axes, the shape of the outcome, and the outcome."""
    outcome = _outcome(chain, operands, results)
    if outcome is None or not np.size(outcome):
        return None
    flat, shape = jnp.ravel(outcome).astype(jnp.int32), np.shape(outcome)
    if flat.size > _MOST_ELEMENTS:
        flat, shape = jnp.sum(flat * (1 + jnp.arange(flat.size, dtype=jnp.int32) % 8191))[None], ()
    return jnp.concatenate([jnp.array([0, len(shape), *shape], jnp.int32), flat])


def is_discrete(chain: Chain) -> bool:
    """Whether the results of an operation are steps, of which there is nothing between."""
    equation = chain[-1]
    name = equation.primitive.name
    return name in TESTS or name in _STEPS or name in _BY_INDEX or _is_cast(chain)


def selection_by(program: Program, chain: Chain) -> Chain:
    """The last selection that goes by a comparison, where it is on another line; else the comparison."""
    asked, last = set(chain[-1].outvars), chain[-1]
    for equation in program.siblings(chain):
        goes_by = [isinstance(atom, Var) and atom in asked for atom in equation.invars]
        if any(goes_by) and all(variable.aval.dtype == bool for variable in equation.outvars):
            asked.update(equation.outvars)
        elif any(goes_by[:1]):
            last = equation
    selection = (*chain[:-1], last)
    return selection if line(selection) and line(selection) != line(chain) else chain


def goes_by_steps(chain: Chain) -> bool:
    """Whether a result of an operation goes by steps: all of them, a place in an order, or the bits of a number."""
    equation = chain[-1]
    is_place_or_bits = equation.primitive.name in _PLACES | {"bitcast_convert_type"}
    return is_discrete(chain) or (is_place_or_bits and _leaves_floats(equation))


def selects(chain: Chain) -> bool:
    """Whether an operation selects: by steps, or among numbers."""
    return is_discrete(chain) or chain[-1].primitive.name in _CHOOSING | {"rem"}


def _is_cast(chain: Chain) -> bool:
    equation = chain[-1]
    return equation.primitive.name == "convert_element_type" and _leaves_floats(equation)


def _leaves_floats(equation: JaxprEqn) -> bool:
    """Whether an equation makes something else of a floating number."""
    return is_floating(equation.invars[0].aval) and not all(is_floating(v.aval) for v in equation.outvars)


def _outcome(chain: Chain, operands: Operands, results: Operands) -> Any:
    """What an operation selects, as an array of integers; None for one that selects nothing."""
    equation = chain[-1]
    name, x = equation.primitive.name, operands[0] if operands else None
    if name in TESTS:
        # A test for NaN.
        return None if len(equation.invars) > 1 and equation.invars[0] is equation.invars[1] else results[0]
    if name in _STEPS:
        return jnp.nan_to_num(jnp.real(results[0]))
    if name in _BY_INDEX or _is_cast(chain):
        return results[0]
    if name == "rem":
        return jnp.nan_to_num(jnp.trunc(operands[0] / operands[1])) if is_floating(x) else None
    if name == "atan2":
        return jnp.where(operands[1] < 0, jnp.where(operands[0] < 0, 1, 2), 0)
    if name in ("log", "sqrt", "pow") and jnp.iscomplexobj(x):
        return jnp.where(jnp.real(x) < 0, jnp.where(jnp.imag(x) < 0, 1, 2), 0)
    if name == "lu":
        return results[1]
    if name in _CHOOSING and is_floating(x):
        return _chosen(lambda *moved: bind(equation, list(moved)), operands)
    return None


def _chosen(run: Callable[..., Operands], operands: Operands) -> Any:
    """What is chosen among numbers, told by what would flow back to them."""
    where = [i for i, operand in enumerate(operands) if is_floating(jnp.asarray(operand))]

    def of_floating(*moved: Any) -> Operands:
        given = list(operands)
        for i, value in zip(where, moved, strict=True):
            given[i] = value
        return [result for result in run(*given) if is_floating(result)]

    results, pull = jax.vjp(of_floating, *(jnp.asarray(operands[i]) for i in where))
    weights = lambda r: (64 * (1 + lax.iota(jnp.int32, max(r.size, 1))[: r.size] % 997)).reshape(r.shape)
    pulled = pull([weights(result).astype(result.dtype) for result in results])
    parts = [jnp.round(jnp.real(part)) for part in pulled]
    # A bound that holds for all elements says nothing of one.
    of_elements = [part for part in parts if part.size != 1] or parts
    if all(part.shape == of_elements[0].shape for part in of_elements):
        return sum((1 + number) * part for number, part in enumerate(of_elements))
    return jnp.concatenate(list(map(jnp.ravel, parts)))
