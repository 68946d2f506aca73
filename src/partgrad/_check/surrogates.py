"""What the declared derivative of a surrogate is compared with, and what is said of it.

Beside the point, a surrogate moves as its smooth function does, from the value that the exact one has at the point:
`exact(here) + smooth(there) - smooth(here)`. The slope of that program is what the declared derivative has to be, also
where what follows is not linear, and along loops. So the program runs at both points at once, by `jax.vmap`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from .._programs import (
    Chain,
    Dependence,
    Operands,
    Sources,
    any_equation,
    differentiably,
    ids,
    inner_jaxprs,
    is_floating,
    jaxpr_and_consts,
    smoothly,
)
from .._surrogate import is_surrogate
from .finding import Finding
from .float64 import Rule, at_own_width, exactly
from .names import finding
from .probe import Answer, probe
from .program import Program
from .twice import here
from .verdict import ERROR, OK


def has_surrogates(jaxpr: ClosedJaxpr) -> bool:
    """Whether there is a surrogate in a program."""
    return any_equation(jaxpr_and_consts(jaxpr)[0], is_surrogate)


def moving_along(jaxpr: ClosedJaxpr) -> Rule:
    """The rule for a program whose surrogates move as their smooth functions do; it runs as `here` says."""
    body = jaxpr_and_consts(jaxpr)[0]
    every = [1] * len(body.invars)
    whole, others = differentiably(body, every), Dependence(body, every, _but_through_surrogates)

    def is_of_surrogates(chain: Chain) -> bool:
        # A comparison of a spike with 1 sees the spike, which stays, and not how its derivative moves it.
        is_step = not any(smoothly(chain, [1] * len(chain[-1].invars))) and not any(inner_jaxprs(chain[-1]))
        is_step &= chain[-1].primitive.name != "stop_gradient"
        return is_step and any(whole.into(chain)) and not any(others.into(chain))

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        equation = chain[-1]
        if is_surrogate(equation):
            value, slope = operands
            return [here(value) + (slope - here(slope))]
        if equation.primitive.name == "pure_callback":
            return at_own_width(equation, operands, vmap_method="sequential")
        return list(map(here, exactly(equation, operands))) if is_of_surrogates(chain) else None

    return rule


def smooth_instead(chain: Chain, operands: Operands) -> Operands | None:
    """The rule for a program with the smooth functions of its surrogates in their place."""
    return operands[1:] if is_surrogate(chain[-1]) else None


def _but_through_surrogates(chain: Chain, sources: Sources) -> Sources:
    return [0] if is_surrogate(chain[-1]) else smoothly(chain, sources)


def declared(program: Program, verdict: Callable[[int], str]) -> Iterator[Finding]:
    """A note for each surrogate that a derivative goes through, or an error if its smooth function is not finite.

    Args:
        program: The program.
        verdict: From a leaf to the verdict on it; what is in error needs no note.
    """
    if not has_surrogates(program.jaxpr):
        return
    calls: dict[tuple[int, ...], list[Answer]] = {}
    for answer in probe(program.jaxpr, program.leaves, _question, purpose="surrogates")[1]:
        calls.setdefault(ids(answer.chain), []).append(answer)
    for answers in calls.values():
        chain, names = answers[0].chain, answers[0].chain[-1].params
        distance = float(np.max([answer.numbers[1:].view(np.float32) for answer in answers]))
        told: dict[str, list[str]] = {}
        for leaf in program.leaves_into(chain):
            told.setdefault(verdict(leaf), []).append(program.paths[leaf])
        for found, leaves in told.items():
            severity, reason = ("info", "declared" if found == OK else "undecided")
            if not np.isfinite(distance):
                severity, reason = "error", "not finite"
            if found != ERROR:
                smooth = "its smooth function" if names["smooth"] == "<lambda>" else f"`{names['smooth']}`"
                operation = "surrogate" if names["name"] == "<lambda>" else names["name"]
                site = f" at {names['declared']}" if names["declared"] else ""
                more = {"operation": operation, "smooth": smooth, "declared": site, "error": distance}
                yield finding("surrogate", severity, reason, leaves, chain, **more)


def _question(chain: Chain, operands: Operands, results: Operands) -> Any:
    """Zero, and the bits of the largest distance between the two values."""
    if not is_surrogate(chain[-1]) or not results[0].size or not is_floating(results[0]):
        return None
    value, slope = operands
    # What is not finite in both functions is found as a value.
    distance = jnp.max(jnp.where(jnp.isfinite(value), jnp.abs(value - slope), 0.0)).astype(jnp.float32)
    return jnp.stack([jnp.int32(0), lax.bitcast_convert_type(distance, jnp.int32)])
