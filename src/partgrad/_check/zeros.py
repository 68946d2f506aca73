"""A gradient of zeros: no path, a stop, a mark, an integer, a saturated operation, or truly zero."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._marks import EXPLICIT, mark_in
from ..._programs import (
    FIXED_DRAW,
    TESTS,
    Chain,
    Dependence,
    Operands,
    arriving,
    differentiably,
    is_custom_rule,
    is_floating,
    is_in_library,
    last_of,
    line,
    sampler_of,
    smoothly,
    union,
)
from ..evidence import Evidence, at, name_of, rule_name, steps_of
from ..finding import Finding
from ..probe import Answer, probe

_SATURATING = frozenset({"tanh", "logistic", "erf", "erfc", "exp", "exp2", "expm1", "log1p", "atan"})
# Operations that take one of several values: by their size or a condition, and by their position.
_CHOOSING = frozenset({"select_n", "max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin", "sort"})
_CHOOSING |= {"scatter-min", "scatter-max"}
_PLACING = frozenset({"gather", "scatter", "dynamic_slice", "dynamic_update_slice", "slice"})


# Tells whether a line has a tie at which the slopes on both sides equal the derivative of a leaf.
IsFlat = Callable[[int, str], bool]


def zero(evidence: Evidence, is_flat: IsFlat = lambda leaf, where: False) -> Iterator[Finding]:
    """One finding for each leaf whose gradient is zero, unless it is the slope on both sides of a tie."""
    program = evidence.program
    reached, smooth = union(evidence.value.outputs), union(evidence.smooth.outputs)
    killed: list[tuple[Answer, int]] | None = None
    for leaf, path in enumerate(program.paths):
        if not reached >> leaf & 1:
            message = "no path to the output: the value of the function does not depend on it."
            yield Finding("zero", "warning", path, "", f"{message} Fix: use it, or mark it NonDiff.")
        elif not smooth >> leaf & 1:
            yield from _blocked(evidence, leaf)
        elif evidence.gradients and not evidence.gradients[leaf].any() and evidence.gradients[leaf].size:
            killed = _where_cotangents_die(evidence) if killed is None else killed
            yield _vanishing(evidence, leaf, killed, is_flat)
        elif evidence.gradients and (dead := int(np.sum(evidence.gradients[leaf] == 0))):
            message = f"the gradient is zero in {dead:,} of its {evidence.gradients[leaf].size:,} elements."
            yield Finding("zero", "info", path, "", message)


def _is_no_test_for_nan(chain: Chain) -> bool:
    return chain[-1].primitive.name not in ("ne", "is_finite")


def blockers(
    evidence: Evidence,
    leaf: int,
    flow: Dependence | None = None,
    wanted: Callable[[Chain], bool] = _is_no_test_for_nan,
) -> list[Chain]:
    """The equations through which the value of a leaf reaches the output, but not its derivative.

    Of several in a row, the last counts: a `softmax` stops its maximum on the way to an `argmax`.
    """
    flow = flow or evidence.smooth
    found = [
        chain
        for chain in flow.chains
        if wanted(chain)
        and not flow.is_entered(chain)
        and evidence.is_into(leaf, chain, flow)
        # For example `argsort`, whose values have a derivative and whose indices have none. What a slice leaves out is
        # not stopped there.
        and not all(mask >> leaf & 1 for mask in smoothly(chain, flow.into(chain)))
    ]
    return last_of(evidence.program.jaxpr.jaxpr, found)


def _in_rules_of_libraries(evidence: Evidence, leaf: int) -> list[Chain]:
    """What the user's code blocks in a function passed to a library, whose own rule differentiates it."""
    jaxpr = evidence.program.jaxpr.jaxpr
    flow = differentiably(jaxpr, [1 << number for number in range(len(jaxpr.invars))], into_rules=True)
    is_ruled = lambda chain: any(is_custom_rule(outer) for outer in chain[:-1]) and not is_in_library(chain)
    return blockers(evidence, leaf, flow, lambda chain: is_ruled(chain) and _is_no_test_for_nan(chain))


def mark_of(chain: Chain) -> str | None:
    """The mark behind a `stop_gradient`: a field, or the name of a wrapper."""
    mark = mark_in(str(chain[-1].source_info.name_stack))
    return None if mark == EXPLICIT else mark


def is_fixed_draw(chain: Chain) -> bool:
    """Whether a `stop_gradient` is that of a draw whose gradient the user fixed."""
    return FIXED_DRAW in str(chain[-1].source_info.name_stack)


def _blocked(evidence: Evidence, leaf: int) -> Iterator[Finding]:
    path = evidence.program.paths[leaf]
    found = blockers(evidence, leaf)
    untold = [chain for chain in found if not _is_told_with_draws(evidence, chain)]
    if not found:
        untold = blockers(evidence, leaf, wanted=lambda chain: True)
    if not untold:
        return
    chain = next((c for c in untold if mark_of(c)), untold[0])
    severity = "info" if is_fixed_draw(chain) else "warning"
    yield Finding("zero", severity, path, line(chain), f"the gradient is zero: {_barrier(path, chain)}")


def _is_told_with_draws(evidence: Evidence, chain: Chain) -> bool:
    """Whether a random number decides here, which the findings of draws report."""
    is_stop = chain[-1].primitive.name == "stop_gradient"
    return bool(sampler_of(chain[-1])) or (any(evidence.drawn.into(chain)) and not is_stop)


def _barrier(path: str, chain: Chain) -> str:
    name, where = chain[-1].primitive.name, line(chain)
    place = f" at {where}" if where else ""
    mark = mark_of(chain)
    if mark is not None:
        return f"`{path}` is held by {mark}{place}. Fix: if it is to be fitted, {REBUILT}."
    if is_fixed_draw(chain):
        return f"the draw{place} has gradient='fixed'. Fix: none needed if the zero is meant, else another word for it."
    if name == "stop_gradient":
        return f"`stop_gradient`{place} stops it. Fix: remove it, if the leaf is to be fitted."
    if name in TESTS:
        return f"it is only compared, by {name_of(chain[-1])}{place}. Fix: choose smoothly, for example with a sigmoid."
    if name in ("floor", "ceil", "round", "sign"):
        return f"{name_of(chain[-1])}{place} rounds it to steps. Fix: leave the rounding out of what is differentiated."
    if name == "convert_element_type":
        kind = chain[-1].outvars[0].aval.dtype
        return f"it is cast to {kind}{place}. Fix: leave the cast out of what is differentiated."
    # The values have a derivative.
    by = at(chain).replace("`sort`", "`argsort`")
    return f"{by} turns it into integers. Fix: choose smoothly, for example with a softmax."


# A mark that holds a differentiated leaf belongs to something the function builds from it.
REBUILT = "build the model in the function with `partgrad.Diff` around this field, or by `dataclasses.replace`"


def _where_cotangents_die(evidence: Evidence) -> list[tuple[Answer, int]]:
    """The operations of the reverse pass that return only zeros although something flows in.

    Of a product, only the side with the leaf counts: each operation has a bit for each leaf it leads to.
    """
    program = evidence.program
    jaxpr, flowing = program.cotangent, evidence.pulled

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        given = [jnp.asarray(operand) for operand, mask in zip(operands, flowing.into(chain), strict=True) if mask]
        given = [operand for operand in given if is_floating(operand)]
        made = [result for result, mask in zip(results, flowing.out_of(chain), strict=True) if mask]
        if not given or not made:
            return None
        some = jnp.stack([jnp.any(operand != 0) for operand in given]).any()
        none = jnp.stack([jnp.all(result == 0) for result in made]).all()
        return jnp.where(some & none, 0, -1)[None]

    answers = probe(jaxpr, [*program.leaves, *evidence.cotangents], question)
    chains = {tuple(map(id, answer.chain)): answer.chain for answer in answers}
    reached = arriving(jaxpr.jaxpr, chains.values())
    leaves = {
        key: union((mask >> number & 1) << leaf for leaf, mask in enumerate(reached))
        for number, key in enumerate(chains)
    }
    return [(answer, leaves[tuple(map(id, answer.chain))]) for answer in answers]


def _vanishing(evidence: Evidence, leaf: int, killed: list[tuple[Answer, int]], is_flat: IsFlat) -> Finding:
    """The finding for a gradient that has a path but is zero at this point."""
    path = evidence.program.paths[leaf]
    origins = [(evidence.program.origin(answer.chain), answer) for answer, leaves in killed if leaves >> leaf & 1]
    own = [(chain, answer) for chain, answer in origins if chain and leaf in evidence.leaves_into(chain)]
    if not own:
        # The path may be in the branch that is not taken.
        blocked = [c for c in blockers(evidence, leaf) if any(e.primitive.name == "cond" for e in c[:-1])]
        blocked = blocked or _in_rules_of_libraries(evidence, leaf)
        if blocked:
            message = f"the gradient is zero: {_barrier(path, blocked[0])}"
            return Finding("zero", "warning", path, line(blocked[0]), message)
        return Finding("zero", "info", path, "", "the gradient is zero here: its terms cancel, or a factor is zero.")
    chain = own[0][0]
    name, operation = chain[-1].primitive.name, at(chain)
    steps = steps_of([answer.steps for other, answer in own if other == chain])
    if name in _SATURATING:
        message = f"{operation} is saturated{steps}. Fix: scale its operands."
    elif rule_name(chain[-1]) is not None:
        message = f"the derivative of {operation} is zero for all of its operands{steps}. Fix: start elsewhere."
    elif name in _CHOOSING | _PLACING and not is_flat(leaf, line(chain)):
        remedy = "start where it is selected, or choose smoothly" if name in _CHOOSING else "use it, or mark it NonDiff"
        message = f"{operation} selects a value that does not depend on it{steps}. Fix: {remedy}."
    else:
        message = f"the gradient is truly zero here: the derivative of {operation} is zero at this point{steps}."
        return Finding("zero", "info", path, line(chain), message)
    return Finding("zero", "warning", path, line(chain), f"the gradient is zero: {message}")
