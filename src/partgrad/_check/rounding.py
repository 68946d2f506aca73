"""A gradient that has lost its digits to rounding, and the operation that loses them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from .._programs import (
    CALLS,
    CHECKPOINTS,
    Chain,
    bind,
    branches_of,
    is_floating,
    line,
    opened,
    primal_jaxpr,
    reaching,
    scan_parts,
)
from .evaluation import Own
from .finding import Finding
from .float64 import exact, exactly, widened
from .names import finding
from .program import Program
from .questions import Answer, distance

# Relative errors of a gradient: the least that cannot be trusted, in units in the last place and at all; the most at
# which it can; and, in units, what is worth telling if a conversion explains it, and what it explains.
_LOST, _LOST_UNITS = 3e-3, 30.0
_LOST_ANYHOW = 0.5
_TOLD_UNITS = 100.0
_EXPLAINED_UNITS = 10.0
# An operation loses digits if it makes the relative error this many times larger.
_AMPLIFIES = 20.0
_LONGEST_LOOP = 100
_MOST_SUSPECTS = 8


def rounding(own: Own, leaf: int, answer: Answer) -> Iterator[Finding]:
    """A finding if the gradient of a leaf has lost its digits to rounding, relative to what its dtype has."""
    program, path = own.program, [own.program.paths[leaf]]
    if answer.cancels:
        yield finding("zero", "info", "rounding", path)
    error, dtype = answer.precision, program.leaves[leaf].dtype
    if error is None or not error < float("inf"):
        return
    unit = float(jnp.finfo(dtype).eps)
    is_lost = error > min(max(_LOST, _LOST_UNITS * unit), _LOST_ANYHOW)
    narrow = _narrowing(program, leaf, error) if error > _TOLD_UNITS * unit else None
    if narrow is not None:
        kind = narrow[-1].outvars[0].aval.dtype
        is_explained = error <= _EXPLAINED_UNITS * float(jnp.finfo(kind).eps)
        more = {"error": error, "dtype": str(dtype), "through": str(kind), "is_explained": is_explained}
        yield finding("precision", "warning", "narrow", path, narrow, **more)
    elif is_lost:
        chain, of_value = _losing(own, leaf, error)
        yield finding("precision", "warning", "cancels", path, chain, error=error, dtype=str(dtype), of_value=of_value)


def _narrowing(program: Program, leaf: int, error: float) -> Chain | None:
    """The first conversion to fewer digits: of a value that depends on a leaf, in its derivative, or elsewhere."""
    narrowing = [chain for chain in program.smooth.chains if _is_narrowing(chain)]
    for chain in narrowing:
        if any(mask >> leaf & 1 for mask in program.smooth.out_of(chain)):
            return chain
    for chain in program.pulled.chains if program.cotangent is not None else ():
        origin = program.origin(chain)
        if _is_narrowing(chain) and origin and leaf in program.leaves_into(origin):
            return (*origin, chain[-1])
    explains = lambda chain: error < _TOLD_UNITS * float(jnp.finfo(chain[-1].outvars[0].aval.dtype).eps)
    return next(filter(explains, reaching(program.jaxpr.jaxpr, narrowing)), None)


def _is_narrowing(chain: Chain) -> bool:
    equation = chain[-1]
    if equation.primitive.name != "convert_element_type":
        return False
    given, made = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if equation.invars[0].aval.weak_type:
        # A Python number takes the dtype of the array it meets.
        return False
    both = jnp.issubdtype(given, jnp.inexact) and jnp.issubdtype(made, jnp.inexact)
    return both and bool(jnp.finfo(made).eps > jnp.finfo(given).eps)


# --- operation by operation ------------------------------------------------------------------------------------------


class _Suspect(NamedTuple):
    """An operation whose results are much less exact than its operands, by its number in the order of execution."""

    number: int
    chain: Chain
    of_value: bool


def _losing(own: Own, leaf: int, error: float) -> tuple[Chain, bool]:
    """The first operation without whose rounded operands the gradient would be exact, and whether it is of the value.

    The equation is empty if none is known.
    """
    program = own.program
    if program.value_and_cotangent is None:
        return (), False
    try:
        start = _InPairs(program, own, error)
        gradients = start.gradients()
        meant = widened(gradients[leaf][1])
        before = distance(widened(gradients[leaf][0]), meant)
        for suspect in start.suspects[:_MOST_SUSPECTS]:
            with_exact = _InPairs(program, own, error, suspect.number).gradients()[leaf][0]
            if distance(widened(with_exact), meant) < before / 5:
                return suspect.chain, suspect.of_value
    except (TypeError, ValueError, NotImplementedError):
        # Some operations cannot run on their own.
        return (), False
    return next(((suspect.chain, suspect.of_value) for suspect in start.suspects if line(suspect.chain)), ((), False))


class _InPairs:
    """A run of the value and the gradient, operation by operation: each number as it is, and in float64.

    One operation may be made exact.
    """

    def __init__(self, program: Program, own: Own, error: float, made_exact: int = -1):
        self._program, self._own, self._error, self._made_exact = program, own, error, made_exact
        self._count = 0
        self.suspects: list[_Suspect] = []

    def gradients(self) -> list[tuple[Any, Any]]:
        """The gradient by each leaf, as it is and in float64."""
        jaxpr, consts = opened(self._program.value_and_cotangent)
        operands = [*self._program.leaves, *self._own.cotangents]
        pairs = lambda values, variables: [self._pair(v, a.aval) for v, a in zip(values, variables, strict=True)]
        results = self._run(jaxpr, pairs(consts, jaxpr.constvars), pairs(operands, jaxpr.invars), ())
        return results[len(self._own.plain) :]

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
        if name == "scan" and scan_parts(equation).length <= _LONGEST_LOOP:
            return self._scan(chain, given)
        own = bind(equation, [value for value, _ in given])
        with jax.enable_x64(True):
            wide = exactly(equation, [value for _, value in given])
        self._count += 1
        pairs = list(zip(own, wide, strict=True))
        if self._count == self._made_exact:
            return [(w if r is None else jnp.asarray(np.asarray(w), r.dtype), w) for r, w in pairs]
        before, after = max(map(_error, given), default=0.0), max(map(_error, pairs), default=0.0)
        unit = max((float(jnp.finfo(r.dtype).eps) for r in own if is_floating(r)), default=0.0)
        if after > max(_AMPLIFIES * max(before, unit), 0.1 * min(self._error, _LOST_ANYHOW)):
            origin = self._program.origin(chain)
            if origin:
                is_same = origin[-1].primitive is equation.primitive
                self.suspects.append(_Suspect(self._count, origin, is_same))
        return pairs

    def _inner(self, jaxpr: Any, given: list[Any], chain: Chain) -> list[Any]:
        body, consts = opened(jaxpr)
        return self._run(
            body, [self._pair(v, a.aval) for v, a in zip(consts, body.constvars, strict=True)], given, chain
        )

    def _scan(self, chain: Chain, given: list[Any]) -> list[Any]:
        parts = scan_parts(chain[-1])
        consts, carry, xs = (
            given[: parts.consts],
            given[parts.consts :][: parts.carried],
            given[parts.consts + parts.carried :],
        )
        steps = range(parts.length)[:: -1 if parts.is_reversed else 1]
        made: dict[int, list[Any]] = {}
        for step in steps:
            at = [(np.asarray(own)[step], np.asarray(wide)[step]) for own, wide in xs]
            outputs = self._inner(parts.body, [*consts, *carry, *at], chain)
            carry, made[step] = outputs[: parts.carried], outputs[parts.carried :]
        stacked = zip(*(made[step] for step in range(parts.length)), strict=True)
        both = lambda rows: (
            jnp.stack([jnp.asarray(own) for own, _ in rows]),
            np.stack([np.asarray(w) for _, w in rows]),
        )
        return [*carry, *map(both, stacked)]


def _error(pair: tuple[Any, Any]) -> float:
    """The largest relative error of an element, at most 1."""
    own, wide = pair
    if not hasattr(own, "dtype") or not is_floating(own) or not np.size(own):
        return 0.0
    own, wide = widened(own), widened(wide)
    with np.errstate(all="ignore"):
        off = np.abs(own - wide) / np.abs(wide)
    off = np.where(own == wide, 0.0, np.where(np.isfinite(off), off, 1.0))
    return float(min(np.max(off), 1.0))
