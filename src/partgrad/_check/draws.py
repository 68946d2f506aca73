"""Random draws that depend on a leaf, and what the gradient through each of them means."""

from collections.abc import Container, Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from .._programs import (
    CALLS,
    COMPARISONS,
    Chain,
    Dependence,
    any_equation,
    by_value,
    ids,
    inner_jaxprs,
    is_custom_rule,
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
_PRODUCTS = frozenset({"mul", "dot_general"})
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
    """Whether a log density, of a leaf and of what was drawn, multiplies what else was made of that: a score estimator.

    A count that was drawn and a logarithm meet in an operation, as in `n * log(p)`; or it chooses the probability of
    which a logarithm is taken. One of a number that is computed of a count is none of a probability. What moves
    smoothly with the leaf, and was stopped, may meet the leaf in anything, as in `-((x - m) / s)**2 / 2`.
    """
    jaxpr, smooth = program.jaxpr.jaxpr, program.smooth
    is_cut = lambda chain: chain[-1].primitive.name == "stop_gradient" and program.is_into(leaf, chain)
    keys = {ids(chain): _NUMBER if is_cut(chain) else _COUNT for chain in drawn}
    of_draw = by_value(jaxpr, [0] * len(jaxpr.invars), own=lambda chain: keys.get(ids(chain), 0))
    is_inside = lambda chain: any(ids(chain[:length]) in keys for length in range(1, len(chain)))
    is_log = lambda chain: _takes_logarithm(chain) and program.is_into(leaf, chain) and not is_inside(chain)
    logs = list(filter(is_log, smooth.chains))
    keys_of_logs, of_log = set(map(ids, logs)), program.after(logs)
    chosen = {ids(chain) for chain in of_draw.chains if _is_choice(chain, of_draw)}
    number = lambda chain: _CHOSEN if (key := ids(chain)) in chosen else _DRAWN if key in keys else 0
    of_choice = by_value(jaxpr, [0] * len(jaxpr.invars), own=number, ends_at_own=True)

    def is_density(chain: Chain) -> bool:
        into = list(zip(of_draw.into(chain), of_log.into(chain), smooth.into(chain), strict=True))
        takes_log, is_of_leaf = ids(chain) in keys_of_logs, lambda mask: bool(mask >> leaf & 1)
        if any(mask & _NUMBER for mask, *_ in into):
            return any(is_of_leaf(by) for *_, by in into)
        # The draw on one side, and the logarithm, or the leaf in a function with one in it, on another.
        logarithmic = [not mask and bool(log or (takes_log and is_of_leaf(by))) for mask, log, by in into]
        if any(logarithmic) and any(mask and not log for mask, log, _ in into):
            return True
        # The factorials of a probability mass function are of numbers that were drawn.
        is_of_both = chain[-1].primitive.name == "lgamma" and any(mask for mask, *_ in into)
        return takes_log and (is_of_both or union(of_choice.into(chain)) == _CHOSEN)

    densities = program.after(chain for chain in smooth.chains if is_density(chain))

    def is_scored_by(chain: Chain) -> bool:
        into = list(zip(densities.into(chain), of_draw.into(chain), smooth.into(chain), strict=True))
        # Alone, a density estimates an entropy, with another derivative.
        is_reward = lambda place: any(
            drawn and not by >> leaf & 1 for other, (_, drawn, by) in enumerate(into) if other != place
        )
        return any(density and by >> leaf & 1 and is_reward(place) for place, (density, _, by) in enumerate(into))

    return any(is_scored_by(chain) for chain in smooth.chains if chain[-1].primitive.name in _PRODUCTS)


def _takes_logarithm(chain: Chain) -> bool:
    """Whether an equation is a logarithm, or a function with a rule that contains one, as that of a sigmoid."""
    is_logarithm = lambda equation: equation.primitive.name in _LOGARITHMS
    return is_logarithm(chain[-1]) or (
        is_custom_rule(chain[-1]) and any(any_equation(inner, is_logarithm) for inner in inner_jaxprs(chain[-1]))
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
