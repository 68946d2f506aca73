"""Whether a function has one value, as the user runs it and as JAX compiles and differentiates it; and its gradient.

A custom derivative rule may compute another value than the function that it is for, and Python may take another path
where values are not known.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._programs import Operands
from .noise import Apart, Noise, apart, noise_of
from .numbered import NumberedProgram
from .quick import quick_jit

CONCRETIZATION = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Disagreement(NamedTuple):
    """A way to evaluate a function that gives another value than the function itself.

    Attributes:
        way: `jit`, or `vjp` where it is differentiated.
        apart: The output and how far it is off: `first` is the function's own value.
    """

    way: str
    apart: Apart


class Values(NamedTuple):
    """The values of a function and of its gradient.

    Attributes:
        plain: The outputs of the function, run as it is.
        disagreements: One for each way and output that differ from `plain` by more than rounding.
        cotangents: What the reverse derivative was given.
        gradient: The cotangents of the leaves, or None where there is no reverse derivative.
        missing: Why there is none.
        runs: Two runs of the compiled program, each of its outputs and the gradient.
    """

    plain: Operands
    disagreements: list[Disagreement]
    cotangents: Operands
    gradient: Operands | None
    missing: Exception | None
    runs: tuple[Operands, Operands]


def values(program: NumberedProgram, plain: Operands, cotangents: Operands) -> Values:
    """Run a program and its reverse derivative, compiled together, and compare its outputs with those of a plain run.

    Args:
        program: The function, traced.
        plain: Its outputs, run as the user wrote it.
        cotangents: What to give the reverse derivative.

    Returns:
        The outputs and the gradient, and where the outputs disagree.
    """
    missing, count = None, len(plain)
    try:
        run = _compiled(program.value_and_cotangent, [*program.leaves, *cotangents])
        runs = run(), run()
    except Exception as error:  # What a rule refuses, it refuses in its own way.
        missing = error
        run = _compiled(program.jaxpr, program.leaves)
        runs = run(), run()
    noise = noise_of(program.jaxpr, program.leaves)
    way = "jit" if missing else "vjp"
    disagreements = _disagreements(way, plain, runs[0][:count], noise)
    if disagreements and not missing:
        jitted = _compiled(program.jaxpr, program.leaves)()
        disagreements = [*_disagreements("jit", plain, jitted, noise), *disagreements]
    return Values(plain, disagreements, cotangents, None if missing else runs[0][count:], missing, runs)


def _disagreements(way: str, plain: Operands, other: Operands, noise: Noise) -> list[Disagreement]:
    return [Disagreement(way, found) for found in apart(plain, other, noise)]


def _compiled(jaxpr: ClosedJaxpr, operands: Operands) -> Callable[[], Operands]:
    staged = quick_jit(jaxpr_as_fun(jaxpr))
    return lambda: jax.device_get(list(staged(*operands)))


def eager_gradient(outputs: Callable[[Operands], Operands], leaves: Operands, cotangents: Operands) -> Any:
    """The gradient of a function that cannot be traced, or None."""
    try:
        return jax.vjp(outputs, leaves)[1](cotangents)[0]
    except Exception:  # That it cannot be traced is told already.
        return None
