"""Random draws that depend on a leaf, and what the gradient through each of them means."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from ..._programs import (
    CALLS,
    COMPARISONS,
    Chain,
    holds_users_function,
    is_custom_rule,
    is_of_jax_random,
    line,
    reaching,
    sampler_of,
    smoothly,
    union,
)
from ..evidence import Evidence, name_of
from ..finding import Finding

# Tests for NaN, which make no decision.
_TESTS = frozenset({"ne", "is_finite", "stop_gradient"})
# Samplers that `jax.random` differentiates wrongly: `wald` chooses between two roots, and drops the derivative of the
# choice.
_BIASED = frozenset({"wald"})
_SCORE = (
    "Fix: draw with `partgrad.draw(..., gradient='score', log_prob=...)` in a `partgrad.expectation`, or write "
    "gradient='fixed'"
)


def draw(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each leaf and each line with a draw that depends on it."""
    found: dict[Finding, None] = {}
    for meaning, groups in ((_of_draw, _samplers(evidence)), (_of_decision, _decisions(evidence))):
        for chains in groups:
            for leaf, path in enumerate(evidence.program.paths):
                own = [chain for chain in chains if evidence.is_into(leaf, chain)]
                if own:
                    severity, message = meaning(evidence, leaf, chains)
                    found[Finding("draw", severity, path, line(own[0]), message)] = None
    yield from found


def has_implicit_draw(evidence: Evidence, leaf: int) -> bool:
    """Whether a draw with an implicit derivative depends on a leaf."""
    return any(evidence.is_into(leaf, chain) for chain in evidence.implicit_draws)


def _samplers(evidence: Evidence) -> list[list[Chain]]:
    """The equations of each call of a function of `jax.random`, without the calls it makes itself."""
    groups: dict[Any, list[Chain]] = {}
    for chain in evidence.smooth.chains:
        name = _sampler(chain[-1])
        if name is not None and not any(map(_sampler, chain[:-1])):
            groups.setdefault((tuple(map(id, chain[:-1])), name, line(chain)), []).append(chain)
    reached = reaching(evidence.program.jaxpr.jaxpr, [chain for group in groups.values() for chain in group])
    known = set(map(id, reached))
    return [group for group in groups.values() if any(id(chain) in known for chain in group)]


def _sampler(equation: JaxprEqn) -> str | None:
    """The name of a function of `jax.random` that is a call in the jaxpr or, like `binomial`, several equations."""
    if equation.primitive.name in CALLS and is_of_jax_random(equation):
        return str(equation.params["name"]).strip("_").removeprefix("random_")
    return sampler_of(equation) or ("gamma" if equation.primitive.name == "random_gamma" else None)


def _decisions(evidence: Evidence) -> list[list[Chain]]:
    """Where a random number and a leaf together decide something discrete, outside the samplers of `jax.random`."""
    found = []
    for chain in evidence.smooth.chains:
        if (
            chain[-1].primitive.name in _TESTS
            or any(smoothly(chain, evidence.smooth.into(chain)))
            or evidence.smooth.is_entered(chain)
            or any(map(_sampler, chain))
        ):
            continue
        if any(evidence.smooth.into(chain)) and any(evidence.drawn.into(chain)):
            found.append(chain)
    return [[chain] for chain in reaching(evidence.program.jaxpr.jaxpr, found)]


def _of_draw(evidence: Evidence, leaf: int, chains: list[Chain]) -> tuple[str, str]:
    """The severity, and the message."""
    name = _sampler(chains[0][-1])
    inside = [other for other in evidence.implicit_draws if any(other[: len(chain)] == chain for chain in chains)]
    is_implicit = any(evidence.is_into(leaf, other) for other in inside)
    own = {id(chain[-1]) for chain in chains}
    used = {id(atom) for other in evidence.siblings(chains[0]) if id(other) in own for atom in other.invars}
    # The equations whose results the sampler itself does not use: the draw.
    last = [chain for chain in chains if not any(id(result) in used for result in chain[-1].outvars)]
    is_out = any(evidence.is_out_of(leaf, chain) for chain in last)
    what = f"the draw of `{name}` depends on it"
    if name in _BIASED:
        return "warning", (
            f"{what}, and its gradient is biased: the choice of one of two roots has none. Fix: another sampler, or a "
            "score-function estimate."
        )
    if is_implicit:
        return "info", f"{what}, and its gradient is implicit: right on average, and not compared at a fixed key."
    if is_out:
        return "info", f"{what}, and its gradient is pathwise: that of the draw at a fixed key."
    return (
        "warning",
        f"{what}, and its gradient is silently zero: what it draws is discrete. {_SCORE} if the zero is intended.",
    )


def _is_users_stop(chain: Chain) -> bool:
    """Whether an equation is a `stop_gradient` written by the user rather than by a library."""
    is_call = lambda equation: equation.primitive.name in CALLS
    return chain[-1].primitive.name == "stop_gradient" and all(
        holds_users_function(outer) for outer in chain[:-1] if is_call(outer) or is_custom_rule(outer)
    )


def _of_decision(evidence: Evidence, leaf: int, chains: list[Chain]) -> tuple[str, str]:
    chain = chains[0]
    operands = list(zip(evidence.smooth.into(chain), evidence.drawn.into(chain), strict=True))
    # A random number on one side and the leaf on the other make a draw by hand. A threshold for a value that depends on
    # both may be a kink like any other.
    apart = any(drawn and not mask for mask, drawn in operands) and any(mask and not drawn for mask, drawn in operands)
    # A leaf without another path to the output has no continuous one.
    is_only = not union(evidence.smooth.outputs) >> leaf & 1
    is_threshold = chain[-1].primitive.name in COMPARISONS and not (apart or is_only)
    begin = f"together with a random draw it decides {name_of(chain[-1])}, whose gradient is silently zero"
    stops = [other for other in evidence.smooth.chains if _is_users_stop(other) and evidence.is_into(leaf, other)]
    if stops and not (is_only or apart):
        return "info", f"{begin}; a `stop_gradient` beside it puts another gradient in its place (straight-through)."
    if is_threshold:
        return "info", f"{begin}. If the alternatives agree there, all is well."
    return "warning", f"{begin}. {_SCORE} if the zero is intended."
