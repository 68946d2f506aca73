"""Whether a function has one value: as it is, under `jit`, and as the primal of its derivatives.

A custom derivative rule may compute another value than the function that it is for, and Python may take another path
where values are not known.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._programs import Operands
from .agreement import Apart, Noise, apart
from .program import Program
from .rounding import input_noise, rounding_noise
from .user import raised_at

Outputs = Callable[[Operands], Operands]

CONCRETIZATION = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)
# How much more than its noise a gradient may move.
_OF_GRADIENTS = 3.0
# How JAX words that a derivative does not exist.
_WORDINGS = (
    ("custom_vjp", "custom_vjp"),
    ("while_loop", "while"),
    ("while_p", "while"),
    ("fori_loop", "while"),
    ("callback", "callback"),
)


class Disagreement(NamedTuple):
    """A way to evaluate a function that gives another value than the function itself.

    Attributes:
        way: `jit`, `vjp`, `jvp` or `linearize`.
        apart: The output and how far it is off: `first` is the function's own value.
    """

    way: str
    apart: Apart


class Unavailable(NamedTuple):
    """A way to evaluate a function that raised an exception.

    Attributes:
        reason: `concretization` (Python needed the value of what is traced), `custom_vjp` (no forward derivative),
            `while` (no reverse derivative), `callback` (no derivative), or `other`.
        where: The user's line from which the exception came, or "".
        error: The exception.
    """

    reason: str
    where: str
    error: Exception


class Values(NamedTuple):
    """The values of a function, evaluated in several ways.

    Attributes:
        plain: Its outputs, run as it is.
        disagreements: One for each way and output that differ from `plain` by more than rounding.
        unavailable: For each way that raised an exception, why. `gradient` is a way: the reverse derivative itself.
        cotangents: What the reverse derivative was given.
        gradient: The reverse derivative of the function as the user's Python computes it, or None.
    """

    plain: Operands
    disagreements: list[Disagreement]
    unavailable: dict[str, Unavailable]
    cotangents: Operands
    gradient: Operands | None


def values(
    outputs: Outputs, leaves: Operands, noise: Noise | None = None, cotangents: Operands | None = None
) -> Values:
    """Evaluate a function in each way that JAX offers. Runs it eagerly four times, and once under `jit`.

    Args:
        outputs: From the leaves to a list of floating or complex arrays.
        leaves: The point: floating or complex arrays.
        noise: How far rounding may move the outputs; by default it is found from how they move with the leaves.
        cotangents: What to give the reverse derivative; by default pseudo-random normal numbers.

    Returns:
        Which ways agree, which do not and which there are not.
    """
    leaves, ways, unavailable = list(leaves), {}, {}
    plain = outputs(leaves)
    cotangents = random_like(plain) if cotangents is None else list(cotangents)
    tangents = [jnp.ones_like(leaf) for leaf in leaves]

    def attempt(way: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            unavailable[way] = Unavailable(_reason(error), raised_at(error), error)
            return None

    ways["jit"] = attempt("jit", lambda: jax.jit(outputs)(leaves))
    ways["vjp"], pull = attempt("vjp", lambda: jax.vjp(outputs, leaves)) or (None, None)
    ways["jvp"], _ = attempt("jvp", lambda: jax.jvp(outputs, (leaves,), (tangents,))) or (None, None)
    ways["linearize"], _ = attempt("linearize", lambda: jax.linearize(outputs, leaves)) or (None, None)
    gradient = attempt("gradient", lambda: pull(cotangents)[0]) if pull else None
    noise = remembered(noise or (lambda: input_noise(outputs, leaves)))
    disagreements = [
        Disagreement(way, found)
        for way, other in ways.items()
        if other is not None
        for found in apart(plain, other, noise)
    ]
    return Values(plain, disagreements, unavailable, cotangents, gradient)


def traced_gradient_apart(program: Program, cotangents: Operands, gradient: Operands) -> list[Apart]:
    """Where the reverse derivative of a program's trace is not that of the user's Python.

    Args:
        program: The function, traced.
        cotangents: Of its outputs.
        gradient: The reverse derivative of the function that was not traced.

    Returns:
        One entry for each leaf whose derivatives differ by more than rounding: `output` is the leaf's index, `first`
        is the user's derivative.
    """
    given = [*program.leaves, *cotangents]
    noise = noise_of(program.cotangent, given)
    # That of a few runs is several times too small for one leaf in a hundred, and a wrong gradient is far off.
    wide = lambda: [_OF_GRADIENTS * moves for moves in noise()]
    return apart(gradient, program.pullback(cotangents), wide)


def program_noise(program: Program) -> Noise:
    """How far rounding may move the outputs of a program, found when it is first asked for."""
    return noise_of(program.jaxpr, program.leaves)


def noise_of(jaxpr: ClosedJaxpr, operands: Operands) -> Noise:
    """How far rounding may move the outputs of a jaxpr, found when it is first asked for."""

    def find() -> list[Any]:
        try:
            return rounding_noise(jaxpr, operands)
        # An operation that cannot be run on its own must not end a check.
        except Exception:
            run = jax.jit(jaxpr_as_fun(jaxpr))
            return input_noise(lambda values: list(run(*values)), operands)

    return remembered(find)


def remembered(noise: Noise) -> Noise:
    """A noise that is found once."""
    found: list[Any] = []

    def once() -> list[Any]:
        if not found:
            found.append(noise())
        return found[0]

    return once


def random_like(outputs: Operands, seed: int = 0) -> Operands:
    """Normal numbers of the shapes and dtypes of some outputs."""
    generator = np.random.default_rng(seed)

    def draw(value: Any) -> Any:
        drawn = generator.standard_normal(value.shape)
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            drawn = drawn + 1j * generator.standard_normal(value.shape)
        return jnp.asarray(drawn, value.dtype)

    return [draw(value) for value in outputs]


def _reason(error: Exception) -> str:
    if isinstance(error, CONCRETIZATION):
        return "concretization"
    text = str(error)
    return next((reason for wording, reason in _WORDINGS if wording in text.lower()), "other")
