"""Random draws that depend on a leaf, and what the gradient through each of them means."""

from collections.abc import Container, Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from .._programs import (
    CALLS,
    COMPARISONS,
    Chain,
    Dependence,
    by_value,
    ids,
    is_of_jax_random,
    line,
    reaching,
    running,
    sampler_of,
    smoothly,
    union,
)
from .finding import Finding
from .implicit import implicit_draws
from .names import finding
from .program import Program
from .stops import is_of_surrogate, is_users_stop, stops_of

# Tests for NaN, which make no decision.
_TESTS = frozenset({"ne", "is_finite", "stop_gradient"})
# Samplers that `jax.random` differentiates wrongly: `wald` chooses between two roots, and drops the derivative of the
# choice.
_BIASED = frozenset({"wald"})
_OWN_DRAWS = f"{__file__.rpartition('_check')[0]}_random"
# What a logarithm of a probability is made with.
_LOGARITHMS = frozenset({"log", "log1p", "log2", "lgamma"})
_PRODUCTS, _SUMS = frozenset({"mul", "dot_general"}), frozenset({"add", "sub", "add_any"})
# What is drawn: a continuous number that was stopped, or anything else.
_NUMBER, _COUNT = 1, 2
# What depends on a draw itself, and on what a draw chose.
_DRAWN, _CHOSEN = 1, 2


def draws(program: Program) -> Iterator[Finding]:
    """One finding for each line with a draw and each meaning of its gradient."""
    for meaning, groups in ((_of_draw, _samplers(program)), (_of_decision, _decisions(program))):
        for chains in groups:
            for leaf, path in enumerate(program.paths):
                own = [chain for chain in chains if program.is_into(leaf, chain)]
                if own:
                    severity, reason, more = meaning(program, leaf, chains)
                    yield finding("draw", severity, reason, [path], own[0], **more)


def _samplers(program: Program) -> list[list[Chain]]:
    """The equations of each call of a function of `jax.random`, without the calls it makes itself."""
    groups: dict[Any, list[Chain]] = {}
    for chain in program.smooth.chains:
        name = _sampler(chain[-1])
        if name is not None and not any(map(_sampler, chain[:-1])):
            groups.setdefault((ids(chain[:-1]), name, line(chain)), []).append(chain)
    reached = reaching(program.jaxpr.jaxpr, [chain for group in groups.values() for chain in group])
    known = set(map(id, reached))
    return [group for group in groups.values() if any(id(chain) in known for chain in group)]


def _sampler(equation: JaxprEqn) -> str | None:
    """The name of a function of `jax.random` that is a call in the jaxpr or, like `binomial`, several equations."""
    if equation.primitive.name in CALLS and is_of_jax_random(equation):
        return str(equation.params["name"]).strip("_").removeprefix("random_")
    return sampler_of(equation) or ("gamma" if equation.primitive.name == "random_gamma" else None)


def _decisions(program: Program) -> list[list[Chain]]:
    """Where a random number and a leaf together decide something discrete, outside the samplers of `jax.random`."""
    found = []
    for chain in program.smooth.chains:
        if (
            chain[-1].primitive.name in _TESTS
            or any(smoothly(chain, program.smooth.into(chain)))
            or program.smooth.is_entered(chain)
            or any(map(_sampler, chain))
            or is_of_surrogate(chain)
            # What it means was said with `partgrad.draw`.
            or any(file.startswith(_OWN_DRAWS) for file, _, _ in running(chain))
        ):
            continue
        if any(program.smooth.into(chain)) and any(program.drawn.into(chain)):
            found.append(chain)
    return [[chain] for chain in reaching(program.jaxpr.jaxpr, found)]


def _of_draw(program: Program, leaf: int, chains: list[Chain]) -> tuple[str, str, dict[str, Any]]:
    """The severity, the reason, and more."""
    name = _sampler(chains[0][-1])
    inside = [c for c in implicit_draws(program) if any(c[: len(chain)] == chain for chain in chains)]
    own = {id(chain[-1]) for chain in chains}
    used = {id(atom) for other in program.siblings(chains[0]) if id(other) in own for atom in other.invars}
    # The equations whose results the sampler itself does not use: the draw.
    last = [chain for chain in chains if not any(id(result) in used for result in chain[-1].outvars)]
    is_out = any(union(program.smooth.out_of(chain)) >> leaf & 1 for chain in last)
    more = {"operation": name}
    if name in _BIASED:
        return "warning", "biased", more
    if any(program.is_into(leaf, other) for other in inside):
        return "info", "implicit", more
    if is_out:
        return "info", "pathwise", more
    return ("info", "score", more) if is_scored(program, leaf, last) else ("warning", "discrete", more)


def is_scored(program: Program, leaf: int, drawn: list[Chain]) -> bool:
    """Whether a logarithm that depends on a leaf is evaluated at what was drawn: an estimator by the score.

    What is drawn and a logarithm meet in an operation, as in `n * log(p)`; or it chooses the probability of which a
    logarithm is taken. One of a number that is computed of what is drawn is none of a probability.
    """
    jaxpr = program.jaxpr.jaxpr
    # A count multiplies a logarithm, as in `n * log(p)`: that is nothing which moves smoothly with the leaf, and was
    # stopped. It is such a number that a logarithm is added to, as in `-((x - m) / s)**2 / 2 - log(s)`.
    is_cut = lambda chain: chain[-1].primitive.name == "stop_gradient" and program.is_into(leaf, chain)
    keys = {ids(chain): _NUMBER if is_cut(chain) else _COUNT for chain in drawn}
    of_draw = by_value(jaxpr, [0] * len(jaxpr.invars), own=lambda chain: keys.get(ids(chain), 0))
    wanted = {**dict.fromkeys(_PRODUCTS, _COUNT), **dict.fromkeys(_SUMS, _NUMBER)}
    logs = [c for c in program.smooth.chains if c[-1].primitive.name in _LOGARITHMS and program.is_into(leaf, c)]
    keys_of_logs = {ids(chain) for chain in logs}
    of_log = program.after(logs)

    def meets(chain: Chain) -> bool:
        into = [mask & wanted.get(chain[-1].primitive.name, _NUMBER | _COUNT) for mask in of_draw.into(chain)]
        if not (any(into) and any(of_log.into(chain)) and program.is_into(leaf, chain)):
            return False
        # The draw on one side, and the smooth logarithm on another.
        pairs = list(zip(into, of_log.into(chain), strict=True))
        return any(drawn and not log for drawn, log in pairs) and any(log and not drawn for drawn, log in pairs)

    chosen = {ids(chain) for chain in of_draw.chains if _is_choice(chain, of_draw)}
    number = lambda chain: _CHOSEN if (key := ids(chain)) in chosen else _DRAWN if key in keys else 0
    of_choice = by_value(jaxpr, [0] * len(jaxpr.invars), own=number, ends_at_own=True)

    def is_after(chain: Chain) -> bool:
        if ids(chain) not in keys_of_logs:
            return False
        # The factorials of a probability mass function are of numbers that were drawn.
        is_of_both = chain[-1].primitive.name == "lgamma" and any(of_draw.into(chain))
        return is_of_both or union(of_choice.into(chain)) == _CHOSEN

    # What is scored by them multiplies them, and is drawn too: the logarithms alone make the estimate of an entropy.
    scores = program.after(chain for chain in program.smooth.chains if meets(chain) or is_after(chain))
    products = (chain for chain in program.smooth.chains if chain[-1].primitive.name in _PRODUCTS)
    sides = lambda chain: enumerate(zip(scores.into(chain), of_draw.into(chain), strict=True))
    return any(
        score and any(drawn for other, (_, drawn) in sides(chain) if other != place)
        for chain in products
        for place, (score, _) in sides(chain)
    )


def _is_choice(chain: Chain, of_draw: Dependence) -> bool:
    """Whether an equation selects, or reads by index, by what was drawn and nothing that was."""
    into = list(of_draw.into(chain))
    match chain[-1].primitive.name:
        case "select_n":
            by, of = into[:1], into[1:]
        case "gather" | "dynamic_slice":
            by, of = into[1:], into[:1]
        case _:
            return False
    return any(by) and not any(of)


def _of_decision(program: Program, leaf: int, chains: list[Chain]) -> tuple[str, str, dict[str, Any]]:
    chain = chains[0]
    operands = list(zip(program.smooth.into(chain), program.drawn.into(chain), strict=True))
    # A random number on one side and the leaf on the other make a draw by hand. A threshold for a value that depends on
    # both may be a kink like any other.
    is_by_hand = {(True, False), (False, True)} <= {(bool(mask), bool(drawn)) for mask, drawn in operands}
    # A leaf without another path to the output has no continuous one.
    is_only = not union(program.smooth.outputs) >> leaf & 1
    is_threshold = chain[-1].primitive.name in COMPARISONS and not (is_by_hand or is_only)
    decided = program.after([chain])
    stops = [stop for stop in stops_of(program) if is_users_stop(stop) and program.is_into(leaf, stop)]
    through = {ids(stop) for stop in stops if any(decided.into(stop))}
    if through and not (is_only or is_by_hand) and not _is_used_beside(program, chain, through):
        return "info", "straight-through", {}
    if is_scored(program, leaf, chains):
        return "info", "score", {}
    return ("info", "threshold", {}) if is_threshold else ("warning", "decision", {})


def _is_used_beside(program: Program, decision: Chain, stops: Container[Any]) -> bool:
    """Whether what was decided reaches the output by other ways than through some stops."""
    jaxpr, key = program.jaxpr.jaxpr, ids(decision)
    bits = lambda chain: 1 if (own := ids(chain)) == key else 2 if own in stops else 0
    flow = by_value(jaxpr, [0] * len(jaxpr.invars), own=bits, ends_at_own=True)
    return bool(union(flow.outputs) & 1)
