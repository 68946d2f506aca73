"""Which operation loses the digits: a run operation by operation, each number as it is and in float64."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._programs import (
    CALLS,
    CHECKPOINTS,
    Chain,
    Operands,
    all_finite,
    bind,
    branches_of,
    is_floating,
    jaxpr_and_consts,
    line,
    primal_jaxpr,
    scan_of,
)
from .float64 import exact, exactly, widened
from .own import Own
from .point import Point
from .precision import Derivative, derivative_of, relative_error, tangent_of
from .program import Program

# An operation loses digits if it makes the relative error this many times larger.
_AMPLIFIES = 20.0
# The relative error of what is all wrong.
LOST_ANYHOW = 0.5
_LONGEST_LOOP = 100
_MOST_SUSPECTS = 8
# Of operations that cannot run on their own.
_REFUSALS = (TypeError, ValueError, NotImplementedError)


class _Suspect(NamedTuple):
    """An operation whose results are much less exact than its operands, by its number in the order of execution."""

    number: int
    chain: Chain
    of_value: bool
    of_uses: bool


class Losing(NamedTuple):
    """Why a derivative has lost its digits.

    Attributes:
        chain: The first operation without whose rounded operands it would be exact; empty if none is known.
        of_value: Whether that is an operation of the value.
        of_uses: Whether that adds up what comes back from several uses of a number.
        decided: If it is as exact as it has to be for what the program decides: what float64 decides otherwise.
    """

    chain: Chain
    of_value: bool = False
    of_uses: bool = False
    decided: Sequence[Chain] = ()


def losing(own: Own, leaf: int, error: float, least: float, wide: Any, point: Point) -> Losing | None:
    """Why a derivative has lost its digits; None if float64 decides something otherwise, and nobody knows what.

    Args:
        own: The program as the user runs it.
        leaf: The leaf.
        error: The relative error of its derivative, or of an element or a part of that.
        least: The relative error that counts.
        wide: The derivative in float64.
        point: In float64, with the weights of the outputs of which it is the gradient.
    """
    # Inside the derivative of `double_where` there are no operations to be run one by one.
    program = own.program.unwrapped
    derivative = derivative_of(program, leaf, point)
    if derivative is None:
        return Losing(())
    found = _losing(program, derivative, error, least, wide)
    if found is None or not found.of_uses or (tangent := tangent_of(program, leaf, point)) is None:
        return found
    # Forwards, it is where these uses meet.
    forwards = _losing(program, tangent, error, least, None)
    return forwards._replace(of_value=False) if forwards is not None and line(forwards.chain) else found


def _losing(program: Program, derivative: Derivative, error: float, least: float, wide: Any) -> Losing | None:
    jaxpr, operands, of_leaf = derivative
    both = lambda results: [widened(of_leaf([pair[side] for pair in results])) for side in (0, 1)]
    try:
        start = _InPairs(program, jaxpr, operands, error)
        got, meant = both(start.results())
        before = relative_error(got, meant)
        if wide is not None and before < least <= relative_error(meant, wide):
            return Losing((), decided=start.decided) if start.decided else None
        for suspect in start.suspects[:_MOST_SUSPECTS]:
            with_exact, _ = both(_InPairs(program, jaxpr, operands, error, suspect.number).results())
            if relative_error(with_exact, meant) < before / 5:
                return Losing(suspect.chain, suspect.of_value, suspect.of_uses)
    except _REFUSALS:
        return Losing(())
    told = (Losing(suspect.chain, suspect.of_value) for suspect in start.suspects if line(suspect.chain))
    return next(told, Losing(()))


def first_losing(own: Own) -> Chain:
    """The first operation of the value of which next to nothing is right; empty if none is known."""
    program = own.program.unwrapped
    if program.value_and_cotangent is None:
        return ()
    run = _in_pairs(program, program.value_and_cotangent, [*program.leaves, *own.cotangents])
    return next((suspect.chain for suspect in run.suspects if suspect.of_value and line(suspect.chain)), ())


def first_not_finite(own: Own, leaf: int, point: Point) -> Chain:
    """The first operation of a derivative that is not finite in float64, of finite numbers; empty if none is known."""
    program = own.program.unwrapped
    derivative = derivative_of(program, leaf, point)
    if derivative is None:
        return ()
    jaxpr, operands, _ = derivative
    return next(filter(line, _in_pairs(program, jaxpr, operands).infinite), ())


def _in_pairs(program: Program, jaxpr: ClosedJaxpr, operands: Operands) -> "_InPairs":
    """A run as it is and in float64, up to what cannot run on its own."""
    run = _InPairs(program, jaxpr, operands, 1.0)
    with contextlib.suppress(*_REFUSALS):
        run.results()
    return run


class _InPairs:
    """A run of a derivative, operation by operation: each number as it is, and in float64.

    One operation may be made exact.
    """

    def __init__(self, program: Program, jaxpr: ClosedJaxpr, operands: Operands, error: float, made_exact: int = -1):
        self._program, self._jaxpr, self._operands = program, jaxpr, operands
        self._error, self._made_exact = error, made_exact
        self._count = 0
        self.suspects: list[_Suspect] = []
        # What float64 decides otherwise, and where numbers cease to be finite in it.
        self.decided: list[Chain] = []
        self.infinite: list[Chain] = []

    def results(self) -> list[tuple[Any, Any]]:
        """The results, as they are and in float64."""
        jaxpr, consts = jaxpr_and_consts(self._jaxpr)
        pairs = lambda values, variables: [self._pair(v, a.aval) for v, a in zip(values, variables, strict=True)]
        return self._run(jaxpr, pairs(consts, jaxpr.constvars), pairs(self._operands, jaxpr.invars), ())

    def _pair(self, value: Any, aval: Any) -> tuple[Any, Any]:
        return value, widened(value) if is_floating(aval) else value

    def _run(self, jaxpr: Jaxpr, consts: list[Any], operands: list[Any], inside: Chain) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))

        def read(atom: Any) -> tuple[Any, Any]:
            return (atom.val, exact(atom)) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._step((*inside, equation), [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, chain: Chain, given: list[Any]) -> list[Any]:
        equation = chain[-1]
        name = equation.primitive.name
        if name in CALLS | CHECKPOINTS:
            return self._inner(primal_jaxpr(equation), given, chain)
        if name == "cond":
            branch = branches_of(equation)[int(given[0][0])]
            return self._inner(branch, given[1:], chain)
        if name == "scan" and scan_of(equation).length <= _LONGEST_LOOP:
            return self._scan(chain, given)
        own = bind(equation, [value for value, _ in given])
        with jax.enable_x64(True):
            wide = exactly(equation, [value for _, value in given])
        self._count += 1
        # What is decided is decided as it is.
        pairs = [(r, w if is_floating(r) else r) for r, w in zip(own, wide, strict=True)]
        # JAX compares, since NumPy knows no keys.
        if any(not is_floating(r) and np.any(r != w) for r, w in zip(own, wide, strict=True)):
            self.decided.append(self._program.origin(chain))
        is_finite = lambda numbers: all_finite(list(filter(is_floating, numbers)))
        if not is_finite(wide) and is_finite(number for _, number in given):
            self.infinite.append(self._program.origin(chain))
        if self._count == self._made_exact:
            return [(w if r is None else jnp.asarray(np.asarray(w), r.dtype), w) for r, w in pairs]
        before, after = max(map(_error, given), default=0.0), max(map(_error, pairs), default=0.0)
        unit = max((float(jnp.finfo(r.dtype).eps) for r in own if is_floating(r)), default=0.0)
        if after > max(_AMPLIFIES * max(before, unit), 0.1 * min(self._error, LOST_ANYHOW)):
            origin = self._program.origin(chain)
            if origin:
                is_same = origin[-1].primitive is equation.primitive
                self.suspects.append(_Suspect(self._count, origin, is_same, name == "add_any"))
        return pairs

    def _inner(self, jaxpr: Any, given: list[Any], chain: Chain) -> list[Any]:
        body, consts = jaxpr_and_consts(jaxpr)
        return self._run(
            body, [self._pair(v, a.aval) for v, a in zip(consts, body.constvars, strict=True)], given, chain
        )

    def _scan(self, chain: Chain, given: list[Any]) -> list[Any]:
        parts = scan_of(chain[-1])
        consts, carry, xs = (
            given[: parts.consts],
            given[parts.consts :][: parts.carried],
            given[parts.consts + parts.carried :],
        )
        steps = range(parts.length)[:: -1 if parts.is_reversed else 1]
        made: dict[int, list[Any]] = {}
        for step in steps:
            at = [(own[step], wide[step]) for own, wide in xs]
            outputs = self._inner(parts.body, [*consts, *carry, *at], chain)
            carry, made[step] = outputs[: parts.carried], outputs[parts.carried :]
        stacked = zip(*(made[step] for step in range(parts.length)), strict=True)
        return [*carry, *map(_stacked, stacked)]


def _stacked(pairs: tuple[tuple[Any, Any], ...]) -> tuple[Any, Any]:
    """What the steps of a loop made, in one array each; what is no number is the same in both."""
    own = jnp.stack([jnp.asarray(own) for own, _ in pairs])
    return own, np.stack([np.asarray(wide) for _, wide in pairs]) if is_floating(own) else own


def _error(pair: tuple[Any, Any]) -> float:
    """The largest relative error of an element, at most 1."""
    own, wide = pair
    if not hasattr(own, "dtype") or not is_floating(own) or not np.size(own):
        return 0.0
    own, wide = widened(own), widened(wide)
    with np.errstate(all="ignore"):
        off = np.abs(own - wide) / np.abs(wide)
    off = np.where((own == wide) | (np.isnan(own) & np.isnan(wide)), 0.0, np.where(np.isfinite(off), off, 1.0))
    return float(min(np.max(off), 1.0))
