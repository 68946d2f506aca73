"""A function has one value: two runs, `jit`, differentiation and open marks must not change it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._compat import cached_property
from .._programs import (
    FOREIGN,
    Chain,
    Operands,
    any_equation,
    arriving,
    evaluate,
    jaxpr_and_consts,
    line,
    raised_at,
    reclosing,
)
from .eager import is_same
from .finding import Finding
from .float64 import widened
from .names import finding
from .noise import REFUSALS, Disagreement, disagreeing, gap_between, rounding_noise
from .own import Own, compiled
from .program import Array
from .rules import Rules
from .stops import is_until

CONCRETIZATION = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)
# How far off an iteration until convergence may be.
_OF_LOOPS = 1e-3


class Values:
    """The values of a function in different ways of running it.

    Args:
        own: The function, after it ran.
    """

    def __init__(self, own: Own):
        self._own = own

    @cached_property
    def _noise(self) -> list[Array] | None:
        program = self._own.program
        return _noise_of(program.jaxpr, program.leaves)

    @cached_property
    def _noise_of_gradients(self) -> list[Array] | None:
        own, jaxpr = self._own, self._own.program.value_and_cotangent
        moves = None if jaxpr is None else _noise_of(jaxpr, [*own.program.leaves, *own.cotangents])
        return moves and moves[len(own.program.out_avals) :]

    def noise(self) -> list[Array] | None:
        """How far rounding may move the outputs, if that can be determined."""
        return self._noise

    def noise_of_gradients(self) -> list[Array] | None:
        """How far rounding may move the gradients, if that can be determined."""
        return self._noise_of_gradients

    def repeated(self) -> Iterator[Finding]:
        """One finding if two runs differ; an error if they differ by more than rounding."""
        own = self._own
        foreign = [chain for chain in own.program.value.chains if chain[-1].primitive.name in FOREIGN]
        # A change made by a callback, be it in a custom rule, could pass for rounding.
        programs = filter(None, (own.program.jaxpr, own.program.value_and_cotangent))
        leaves_jax = any(any_equation(jaxpr.jaxpr, lambda e: e.primitive.name in FOREIGN) for jaxpr in programs)
        noise, noise_of_gradients = (None, None) if leaves_jax else (self.noise, self.noise_of_gradients)
        count, (first, second) = len(own.program.out_avals), own.runs
        pairs = {
            "the function under `jit`": (first[:count], second[:count], noise),
            "the gradient": (first[count:], second[count:], noise_of_gradients),
        }
        if len(own.eager) > 1:
            pairs = {"the function": (own.eager[0], own.eager[1], noise), **pairs}
        unlike = {way: runs for way, runs in pairs.items() if not _is_bitwise_equal(*runs[:2])}
        if not unlike:
            return
        gaps = ((found.absolute, way) for way, runs in unlike.items() for found in disagreeing(*runs))
        worst = max(gaps, default=None)
        if worst is None:
            largest = max(_largest_difference(*runs[:2]) for runs in unlike.values())
            yield finding("nondeterminism", "info", "rounding", [], difference=largest)
            return
        chain: Chain = next((chain for chain in foreign if line(chain)), ())
        yield finding("nondeterminism", "error", "runs", [], chain, difference=worst[0], way=worst[1])

    def compared(self, rules: Rules) -> Iterator[Finding]:
        """Findings if different ways to evaluate the function disagree: one for each rule to blame, or else one."""
        found = list(self._unexplained())
        if not found:
            return
        program = self._own.program
        worst = max((one for _, one in found), key=lambda one: one.absolute)
        said: dict[str, Any] = {
            "plain": worst.first,
            "other": worst.second,
            "ways": list(dict.fromkeys(way for way, _ in found)),
        }
        wrong = rules.wrong_values()
        for blame in wrong:
            leaves = [program.paths[leaf] for leaf in program.leaves_into(blame.chain)]
            yield finding("value", "error", "rule", leaves, blame.chain, **said)
        if not wrong:
            yield finding("value", "error", "python", [], **said)

    def disagreements(self) -> list[tuple[str, Disagreement]]:
        """The ways to evaluate the function that change its value: `jit`, or differentiating it."""
        own = self._own
        compare = lambda way, other: [(way, found) for found in disagreeing(own.plain, other, self.noise)]
        if not compare("", own.values[0]):
            return []
        # As JAX compiles it: what rounding decides may be decided otherwise where it is compiled quickly.
        jaxpr, count = own.program.numbered, len(own.program.out_avals)
        found = compare("jit", _as_usual(jaxpr, own.program.leaves))
        if own.missing or (derivative := own.program.value_and_cotangent) is None:
            return found
        return [*found, *compare("vjp", _as_usual(derivative, [*own.program.leaves, *own.cotangents])[:count])]

    def _unexplained(self) -> Iterator[tuple[str, Disagreement]]:
        """The disagreements that one step more or less of an iteration until convergence does not explain."""
        all_found = self.disagreements()
        program = self._own.program
        loops = [chain for chain in program.value.chains if is_until(chain[-1])] if all_found else []
        reached = arriving(program.jaxpr.jaxpr, loops) if loops else []
        for way, found in all_found:
            is_slight = found.absolute <= _OF_LOOPS * abs(found.first)
            if not (is_slight and reached and reached[found.output]):
                yield way, found


def _as_usual(jaxpr: ClosedJaxpr, operands: Operands) -> Operands:
    """The outputs of a jaxpr under `jax.jit` without options."""
    closed = reclosing(jaxpr.jaxpr)
    run = jax.jit(lambda consts, operands: evaluate(*jaxpr_and_consts(closed(consts)), operands))
    return jax.device_get(run(jaxpr.consts, list(operands)))


def _noise_of(jaxpr: ClosedJaxpr, operands: Operands) -> list[Array] | None:
    try:
        return rounding_noise(jaxpr, operands)
    except REFUSALS:
        return None


def with_open_marks(own: Own, held: Callable[[Operands], Operands]) -> Iterator[Finding]:
    """One finding if opening the marks that `wrt` names changes the value of the function."""
    traced = jax.make_jaxpr(lambda leaves: held(leaves))(own.program.leaves)
    if is_same(traced, own.program.traced):
        return
    for found in disagreeing(own.plain, compiled(traced)(traced.consts, own.program.leaves)):
        yield finding("value", "error", "open marks", [], plain=found.first, other=found.second)


def untraceable(error: Exception) -> Finding:
    """The finding for a function that needs concrete values while it is traced."""
    is_numpy = isinstance(error, jax.errors.TracerArrayConversionError)
    file, line = raised_at(error)
    return Finding(
        "value", "error", "numpy" if is_numpy else "branch", (), file, line, details={"error": type(error).__name__}
    )


def _is_bitwise_equal(first: Operands, second: Operands) -> bool:
    return len(first) == len(second) and all(
        np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _largest_difference(first: Operands, second: Operands) -> float:
    pairs = ((widened(a), widened(b)) for a, b in zip(first, second, strict=False))
    gaps = [gap_between(a, b) for a, b in pairs if a.shape == b.shape]
    return max((float(np.max(gap[np.isfinite(gap)], initial=0.0)) for gap in gaps), default=0.0)
