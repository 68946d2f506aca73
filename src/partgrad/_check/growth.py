"""Loops along which tangents grow, as in a chaotic system: after enough steps no digit of a gradient is left.

The rate is the largest Lyapunov exponent of the run: a tangent is pushed along the loop and brought back to length one
after each step, and the logarithms of its lengths are averaged. The method is that of G. Benettin, L. Galgani, A.
Giorgilli and J.-M. Strelcyn, Meccanica 15, 9-20 and 21-30 (1980).
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import silent_callbacks
from .._programs import LOOPS, Chain, Operands, is_floating, line, quick_jit, scan_of, while_of
from .agreement import TWO_DIGITS
from .exact import scale_of
from .finding import Finding
from .float64 import promoted
from .names import finding
from .noise import REFUSALS
from .point import Point
from .program import Program
from .rounding import is_undecided

# The first part of the steps, in which the tangent turns into the direction that grows the fastest, does not count.
_SETTLES = 0.1
# Findings that may be noise: of differences, which may look like numbers.
_OF_NOISE = frozenset({("noise", "noise"), ("noise", "beside"), ("tie", "kink")})
_OF_NOISE |= {("mismatch", "unexplained"), ("mismatch", "modes")}
# What moves the value by no more than this, relative to it, is nothing.
_NOTHING = 1e-6
# How much of the range of a dtype a gradient has to fill for growth to explain that it leaves it.
_OF_RANGE = 0.9


class Growth(NamedTuple):
    """How tangents grow along a loop.

    Attributes:
        chain: The loop, after the equations that it is inside.
        rate: By how much the logarithm of their length grows a step, on average.
        steps: How many steps the loop has.
    """

    chain: Chain
    rate: float
    steps: int

    def explains(self, found: Finding, program: Program, leaves: list[int]) -> bool:
        """Whether this is why a finding was made of some leaves, one of those that growth may explain."""
        is_inside = any(equation is self.chain[-1] for equation in found.chain)
        # What only multiplies the result of a loop loses the digits that this has lost.
        if not (set(leaves) <= set(program.leaves_into(self.chain)) or (found.kind == "precision" and is_inside)):
            return False
        total, dtype = self.rate * self.steps, jnp.finfo(_narrowest(program, leaves))
        if found.kind == "nan":
            # A tangent grows about as large as the dtype can hold.
            return is_inside and total > _OF_RANGE * np.log(float(dtype.max))
        # Differences are computed in float64.
        unit = float(dtype.eps) if found.kind == "precision" else np.finfo(float).eps
        return bool(total > np.log(TWO_DIGITS / unit))

    def finding(self, found: Finding, program: Program, leaves: list[int]) -> Finding:
        """The finding that takes the place of one that this explains."""
        # Where the differences are noise, nothing is known of the gradient.
        severity = "error" if found.kind in ("nan", "precision") and found.severity == "error" else "warning"
        more = {"rate": self.rate, "factor": float(np.exp(self.rate)), "steps_of_loop": self.steps}
        dtype = str(_narrowest(program, leaves))
        paths, figures = found.leaves, found.figures
        return finding("growth", severity, "loop", paths, self.chain, figures=figures, dtype=dtype, rule=None, **more)


def with_growth(findings: list[Finding], program: Program, point: Callable[[], Point]) -> list[Finding]:
    """The findings, with the growth along a loop in place of the noise, lost digits and overflows that it explains."""
    candidates = list(map(_may_be_growth, findings))
    grown, told = growths(program) if any(candidates) else [], list[Finding]()
    for is_candidate, found in zip(candidates, findings, strict=True):
        leaves = [leaf for leaf, path in enumerate(program.paths) if path in found.leaves]
        explaining = (growth for growth in grown if is_candidate and growth.explains(found, program, leaves))
        growth = next(explaining, None)
        told.append(found if growth is None else growth.finding(found, program, leaves))
    shown = next((found for found in told if found.kind == "growth"), None)
    lost = () if shown is None else _without_digits(point(), shown.leaves)
    return [*told, dataclasses.replace(shown, severity="warning", leaves=lost)] if shown and lost else told


def _without_digits(point: Point, known: Collection[str]) -> tuple[str, ...]:
    """The leaves of whose gradients rounding leaves no digits in float64, which only meet what grew."""
    noise, gradient = point.exact.rounding_of_cotangents(point.leaves, point.weights), point.gradient
    if noise is None or gradient is None:
        return ()
    # A gradient that cancels to zero has no digits either, and needs none.
    nothing = _NOTHING * float(np.linalg.norm(point.weights * point.start))
    size = lambda numbers, leaf: float(np.linalg.norm(scale_of(leaf) * numbers))
    found = zip(point.exact.program.paths, noise, gradient, point.leaves, strict=True)
    sizes = ((path, size(off, leaf), size(own, leaf)) for path, off, own, leaf in found if path not in known)
    return tuple(path for path, off, own in sizes if off > max(TWO_DIGITS * own, nothing))


def _may_be_growth(found: Finding) -> bool:
    """Whether growing tangents may explain a finding."""
    if found.kind == "nan":
        return found.details.get("first") == "infinite" and found.reason != "value"
    is_lost = found.reason == "cancels" and is_undecided(found)
    return bool(found.leaves) and ((found.kind, found.reason) in _OF_NOISE or is_lost)


def _narrowest(program: Program, leaves: list[int]) -> Any:
    return max((program.leaves[leaf].dtype for leaf in leaves), key=lambda dtype: float(jnp.finfo(dtype).eps))


def growths(program: Program) -> list[Growth]:
    """What grows along the outermost loops with a user's line, the fastest growing in all first."""
    if not any(chain[-1].primitive.name in LOOPS for chain in program.smooth.chains):
        return []
    chains: list[Chain] = []
    x64 = bool(jax.config.jax_enable_x64)

    def evaluate(leaves: Operands) -> list[Any]:
        found: list[Any] = []

        def rule(chain: Chain, operands: Operands) -> Operands | None:
            if chain[-1].primitive.name not in LOOPS or _is_inside(chain) or not _carried(chain):
                return None
            results, measured = _measured(chain, operands, x64)
            chains.append(program.origin(chain))
            found.append(measured)
            return results

        promoted(program.numbered, rule, x64=x64)(*leaves)
        return found

    try:
        with jax.enable_x64(True), silent_callbacks():
            measured = jax.device_get(quick_jit(evaluate)(program.leaves))
    except REFUSALS:
        return []
    pairs = zip(chains, measured, strict=True)
    found = [Growth(chain, float(rate), int(steps)) for chain, (rate, steps) in pairs if chain and line(chain)]
    return sorted(found, key=lambda growth: -growth.rate * growth.steps)


def _is_inside(chain: Chain) -> bool:
    """Whether an equation is in a branch or a loop, out of which no number can be told."""
    return any(equation.primitive.name in LOOPS | {"cond"} for equation in chain[:-1])


def _carried(chain: Chain) -> list[int]:
    """Which of the carries of a loop are floating."""
    equation = chain[-1]
    carries = equation.outvars if equation.primitive.name == "while" else equation.outvars[: scan_of(equation).carried]
    return [number for number, variable in enumerate(carries) if is_floating(variable.aval)]


def _measured(chain: Chain, operands: Operands, x64: bool) -> tuple[Operands, tuple[Any, Any]]:
    """The results of a loop; its rate and number of steps."""
    return (_of_while if chain[-1].primitive.name == "while" else _of_scan)(chain, operands, x64)


def _of_while(chain: Chain, operands: Operands, x64: bool) -> tuple[Operands, tuple[Any, Any]]:
    parts, floating = while_of(chain[-1]), _carried(chain)
    test, body = promoted(parts.test, x64=x64), promoted(parts.body, x64=x64)
    for_test, rest = operands[: parts.test_consts], operands[parts.test_consts :]
    consts, carry = rest[: parts.body_consts], rest[parts.body_consts :]
    count = lambda state: (state[0] + 1, body(*consts, *state[1]))
    steps = lax.while_loop(lambda state: jnp.all(test(*for_test, *state[1])[0]), count, (0, list(carry)))[0]
    push = lambda state: _pushed(lambda carry: (body(*consts, *carry), []), floating, state, steps)[0]
    *_, logs, counted, results = lax.while_loop(lambda state: state[0] < steps, push, _start(carry, floating))
    return list(results), (logs / jnp.maximum(counted, 1), steps)


def _of_scan(chain: Chain, operands: Operands, x64: bool) -> tuple[Operands, tuple[Any, Any]]:
    parts, floating = scan_of(chain[-1]), _carried(chain)
    body = promoted(parts.body, x64=x64)
    consts, rest = operands[: parts.consts], operands[parts.consts :]
    carry, xs = rest[: parts.carried], rest[parts.carried :]

    def step(carry: Operands, x: Operands) -> tuple[Operands, Operands]:
        results = body(*consts, *carry, *x)
        return results[: parts.carried], results[parts.carried :]

    push = lambda state, x: _pushed(lambda carry: step(carry, x), floating, state, parts.length)
    start = _start(carry, floating)
    (*_, logs, counted, results), made = lax.scan(push, start, xs, parts.length, reverse=parts.is_reversed)
    return [*results, *made], (logs / jnp.maximum(counted, 1), parts.length)


def _start(carry: Operands, floating: list[int]) -> tuple[Any, ...]:
    """The state before the first step: the step, the tangent, its logarithms, how many there are, and the carry."""
    generator = np.random.default_rng(0)
    tangents = [jnp.asarray(generator.standard_normal(np.shape(carry[i])), carry[i].dtype) for i in floating]
    return jnp.zeros((), int), tangents, jnp.zeros(()), jnp.zeros(()), [jnp.asarray(value) for value in carry]


def _pushed(
    body: Callable[[Operands], tuple[Operands, Operands]], floating: list[int], state: tuple[Any, ...], steps: Any
) -> tuple[tuple[Any, ...], Operands]:
    """The state after a step, and what else the step makes."""
    step, tangents, logs, counted, carry = state

    def moved(floats: Operands) -> tuple[Operands, Any]:
        given = list(carry)
        for number, value in zip(floating, floats, strict=True):
            given[number] = value
        results, made = body(given)
        return [results[number] for number in floating], (list(results), made)

    _, pushed, (results, made) = jax.jvp(moved, ([carry[i] for i in floating],), (tangents,), has_aux=True)
    length = jnp.sqrt(sum(jnp.sum(jnp.abs(tangent) ** 2) for tangent in pushed))
    tangents = [tangent / jnp.where(length > 0, length, 1.0) for tangent in pushed]
    counts = step >= _SETTLES * steps
    logs = logs + jnp.where(counts, jnp.log(length), 0.0)
    return (step + 1, tangents, logs, counted + counts, results), made
