"""A function with more than one value, or one that needs concrete values while it is traced."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._programs import Operands, arriving, line, opened, raised_at, while_parts
from ..evidence import Evidence, at, compiled
from ..finding import Finding
from ..noise import Apart, apart
from ..rules import Rules
from .mismatch import OF_LOOPS

CONCRETIZATION = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)
_WAYS = {"jit": "`jax.jit(f)`", "vjp": "the value in `jax.value_and_grad`"}


def value(evidence: Evidence, rules: Rules) -> Iterator[Finding]:
    """Findings if different ways to evaluate the function disagree: one for each rule to blame, or else one."""
    found = list(_unexplained(evidence))
    if not found:
        return
    worst = max((apart for _, apart in found), key=lambda apart: apart.absolute)
    ways = ", ".join(dict.fromkeys(_WAYS[way] for way, _ in found))
    what = f"the function has more than one value: f(x) is {worst.first:.8g}, but {ways} gives {worst.second:.8g}"
    wrong = rules.wrong_values()
    for blame in wrong:
        reason = f"the rule of {at(blame.chain)} computes another value"
        remedy = "Fix: return from the rule what the function itself returns."
        for path in [evidence.program.paths[leaf] for leaf in evidence.leaves_into(blame.chain)] or [""]:
            yield Finding("value", "error", path, line(blame.chain), f"{what}; {reason}. {remedy}")
    if not wrong:
        reason = "Python takes another path while it is traced, or a rule detects that"
        yield Finding("value", "error", "", "", f"{what}; {reason}. Fix: compute the same value in every mode.")


def disagreements(evidence: Evidence) -> list[tuple[str, Apart]]:
    """The ways to evaluate the function that change its value: `jit`, or differentiating it."""
    program, plain = evidence.program, evidence.plain
    compare = lambda way, other: [(way, found) for found in apart(plain, other[: len(plain)], evidence.noise)]
    found = compare("jit" if evidence.missing else "vjp", evidence.runs[0])
    if found and not evidence.missing:
        found = [*compare("jit", compiled(program.jaxpr, program.leaves)()), *found]
    return found


def _unexplained(evidence: Evidence) -> Iterator[tuple[str, Apart]]:
    """The disagreements that one step more or less of an iteration until convergence does not explain."""
    all_found = disagreements(evidence)
    loops = [chain for chain in evidence.value.chains if _is_until(chain[-1])] if all_found else []
    reached = arriving(evidence.program.jaxpr.jaxpr, loops) if loops else []
    for way, found in all_found:
        is_slight = found.absolute <= OF_LOOPS * abs(found.first)
        if not (is_slight and reached and reached[found.output]):
            yield way, found


def _is_until(equation: JaxprEqn) -> bool:
    """Whether an equation is a loop that ends on more than a count."""
    if equation.primitive.name != "while":
        return False
    test = opened(while_parts(equation).test)[0]
    asked = [atom for inner in test.eqns for atom in inner.invars] or test.outvars
    return not all(jnp.issubdtype(atom.aval.dtype, jnp.integer) for atom in asked)


def value_with_open_marks(plain: Operands, held: Operands) -> Iterator[Finding]:
    """One finding if opening the marks that `wrt` names changes the value of the function."""
    for found in apart(plain, held):
        message = (
            f"the function depends on whether marks are open: it is {found.first:.8g} with the marks open that "
            f"`wrt` names, and {found.second:.8g} otherwise. Fix: differentiate inside it with `partgrad.grad`, or "
            "pass `partgrad.partition(model)[0]` to other transforms and solvers."
        )
        yield Finding("value", "error", "", "", message)


def untraceable(error: Exception) -> Finding:
    """The finding for a function that needs concrete values while it is traced."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        message = (
            "the function passes traced values to NumPy or other code outside JAX, which cannot differentiate them; "
            f"only its gradient was computed ({type(error).__name__}). Fix: call the function of `jax.numpy`, or "
            "`jax.pure_callback` with a custom rule."
        )
        return Finding("value", "error", "", raised_at(error), message)
    message = (
        "the function needs the value of a traced array, as in `if x > 0`, so neither `jit` nor a full check can run "
        f"it; only its gradient was computed ({type(error).__name__}). Fix: write `jnp.where` or `jax.lax.cond`, or "
        "make static whatever decides."
    )
    return Finding("value", "error", "", raised_at(error), message)
