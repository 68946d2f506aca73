"""A gradient of zeros: no path, a stop, a mark, an integer, a saturated operation, or truly zero."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import cached_property
from .._programs import (
    CHOOSING,
    TESTS,
    Chain,
    Dependence,
    Operands,
    arriving,
    branches_of,
    differentiably,
    feeding,
    ids,
    is_custom_root,
    is_custom_rule,
    is_floating,
    is_in_library,
    is_mutating,
    jaxpr_and_consts,
    sampler_of,
    smoothly,
    union,
)
from .._surrogate import is_surrogate
from .finding import Finding
from .names import finding, operation_of, steps_of
from .own import Own
from .probe import Answer, Question, probe, probing
from .program import Program
from .stops import is_fixed_draw, is_of_surrogate, mark_of

_SATURATING = frozenset({"tanh", "logistic", "erf", "erfc", "exp", "exp2", "expm1", "log1p", "atan"})
# Operations that take one of several values: by their size or a condition, and by their position.
_CHOOSING = CHOOSING | {"select_n"}
# What finds a place, or puts elements in order.
_PLACED_BY = CHOOSING | {"argmax", "argmin"}
# Functions that choose a sign, and nothing that depends on a leaf.
_REMAINDERS = frozenset({"mod", "%", "remainder", "fmod", "divmod"})
# What adds up what goes along several paths, forwards or back.
_SUMS = frozenset({"reduce_sum", "add_any", "add", "sub"})
_PARTS = frozenset({"slice", "split", "unstack"})
# Why the value of a leaf arrives in steps only.
STAIRS = ("compared", "rounded", "cast", "integers")
_PLACING = frozenset({"gather", "scatter", "dynamic_slice", "dynamic_update_slice", "slice"})


def zeros(own: Own, is_flat: Callable[[int], bool], but: Container[str]) -> Iterator[Finding]:
    """One finding for each leaf whose gradient is zero.

    Args:
        own: The function, after it ran.
        is_flat: Whether the slopes on both sides of a selection are zero too, for a leaf.
        but: The paths of the leaves to leave out.
    """
    program = own.program
    reached, smooth = union(program.value.outputs), union(program.smooth.outputs)
    deaths = _Deaths(own)
    for leaf, path in enumerate(program.paths):
        if path in but:
            continue
        if not reached >> leaf & 1:
            yield finding("zero", "warning", "no path", [path])
        elif not smooth >> leaf & 1:
            yield from _blocked(program, leaf)
        elif program.cotangent is None:
            continue
        elif own.gradients and not own.gradients[leaf].any() and own.gradients[leaf].size:
            yield _vanishing(program, leaf, deaths, is_flat)
        elif own.gradients and (dead := int(np.sum(own.gradients[leaf] == 0))):
            yield finding("zero", "info", "elements", [path], dead=dead, size=own.gradients[leaf].size)


def _is_no_test_for_nan(chain: Chain) -> bool:
    return chain[-1].primitive.name not in ("ne", "is_finite")


def blockers(
    program: Program,
    leaf: int,
    flow: Dependence | None = None,
    wanted: Callable[[Chain], bool] = _is_no_test_for_nan,
    *,
    all_in_a_row: bool = False,
) -> list[Chain]:
    """The equations through which the value of a leaf reaches the output, but not its derivative.

    Of several in a row, the last counts: a `softmax` stops its maximum on the way to an `argmax`.
    """
    flow = flow or program.smooth
    found = [
        chain
        for chain in flow.chains
        if wanted(chain)
        and not flow.is_entered(chain)
        and program.is_into(leaf, chain, flow)
        # For example `argsort`, whose values have a derivative and whose indices have none. What a slice leaves out is
        # not stopped there.
        and not all(mask >> leaf & 1 for mask in smoothly(chain, flow.into(chain)))
    ]
    return found if all_in_a_row else program.last_of(found)


def blockers_in_rules(
    program: Program, leaf: int, wanted: Callable[[Chain], bool] = _is_no_test_for_nan
) -> list[Chain]:
    """What the user's code blocks in a function passed to a library, whose own rule differentiates it."""
    jaxpr = program.jaxpr.jaxpr
    flow = differentiably(jaxpr, [1 << number for number in range(len(jaxpr.invars))], into_rules=True)
    is_rule = lambda equation: is_custom_rule(equation) or is_custom_root(equation)
    is_ruled = lambda chain: any(map(is_rule, chain[:-1])) and not is_in_library(chain)
    return blockers(program, leaf, flow, lambda chain: is_ruled(chain) and wanted(chain))


def _blocked(program: Program, leaf: int) -> Iterator[Finding]:
    found = blockers(program, leaf)
    untold = [chain for chain in found if not is_told_with_draws(program, chain)]
    if not found:
        untold = blockers(program, leaf, wanted=lambda chain: True)
    if untold:
        # What rounds says more than a comparison beside it.
        untold = sorted(untold, key=lambda chain: (mark_of(chain) is None, chain[-1].primitive.name in TESTS))
        yield barrier(program.paths[leaf], untold[0])


def is_told_with_draws(program: Program, chain: Chain) -> bool:
    """Whether a random number decides here, which the findings of draws report."""
    is_stop = chain[-1].primitive.name == "stop_gradient"
    return any(map(sampler_of, chain)) or (any(program.drawn.into(chain)) and not is_stop)


def barrier(path: str, chain: Chain) -> Finding:
    """The finding for what lets the value through and not the derivative."""
    name = chain[-1].primitive.name
    severity, more = "warning", dict[str, Any]()
    if mark_of(chain) is not None:
        reason, more = "mark", {"mark": mark_of(chain)}
    elif is_fixed_draw(chain):
        reason, severity = "fixed draw", "info"
    elif is_of_surrogate(chain) or is_surrogate(chain[-1]):
        reason, more = "surrogate", {"operation": "a surrogate"}
    elif name == "stop_gradient":
        reason = "stop"
    elif name in TESTS:
        reason = "compared"
    elif name in ("floor", "ceil", "round", "sign"):
        reason = "rounded"
    elif name == "convert_element_type":
        reason, more = "cast", {"dtype": str(chain[-1].outvars[0].aval.dtype)}
    else:
        reason = "integers"
    return finding("zero", severity, reason, [path], chain, **more)


class _Deaths:
    """Where the derivative of a leaf becomes zero: the operations that return only zeros although something flows in.

    A tangent of one leaf is pushed through the forward derivative: compiled once, and run for each leaf. Where it only
    cancels, elements may be lost in different places: then, and without a forward derivative, cotangents are pulled. Of
    a product, only the side with the leaf counts.
    """

    def __init__(self, own: Own):
        self._own, self._program = own, own.program

    def of(self, leaf: int) -> list[tuple[Chain, Answer]]:
        """The operations on the path of the leaf, and in its derivative, in order of execution."""
        found = self._on_path(leaf, self._pushed(leaf))
        if not found or found[0][1].chain[-1].primitive.name in _SUMS:
            pulled = self._on_path(leaf, [answer for answer, leaves in self._pulled if leaves >> leaf & 1])
            return pulled or found
        return found

    def _on_path(self, leaf: int, answers: list[Answer]) -> list[tuple[Chain, Answer]]:
        program = self._program
        origins = ((program.origin(answer.chain), answer) for answer in answers)
        found = [(chain, answer) for chain, answer in origins if chain and leaf in program.leaves_into(chain)]
        # What a slice leaves out was on no path through it. It counts where nothing else does: `sort(x)[-1]`.
        return [pair for pair in found if pair[0][-1].primitive.name not in _PARTS] or found

    def _pushed(self, leaf: int) -> list[Answer]:
        program = self._program
        if self._pushing is None:
            return []
        generator = np.random.default_rng(leaf)
        # All of strong type. A leaf that is a Python number is weakly typed, and JAX would compile again for each leaf.
        tangents = [jnp.zeros(x.shape, x.dtype) for x in program.leaves]
        tangents[leaf] = jnp.asarray(generator.uniform(0.5, 1.5, tangents[leaf].shape), tangents[leaf].dtype)
        return self._pushing([*program.leaves, *tangents])[1]

    @cached_property
    def _pushing(self) -> Callable[[Operands], tuple[Operands, list[Answer]]] | None:
        """The question put to the forward derivative; None if there is none."""
        program = self._program
        if program.tangent is None:
            return None
        return probing(program.tangent, self._question(program.pushed), purpose="zeros")

    @cached_property
    def _pulled(self) -> list[tuple[Answer, int]]:
        """For all leaves at once: each operation with a bit for each leaf it leads to."""
        program = self._program
        jaxpr = program.cotangent
        if jaxpr is None:
            return []
        _, answers = probe(jaxpr, [*program.leaves, *self._own.cotangents], self._question(program.pulled))
        chains = {ids(answer.chain): answer.chain for answer in answers}
        reached = arriving(jaxpr.jaxpr, chains.values())
        leaves = {
            key: union((mask >> number & 1) << leaf for leaf, mask in enumerate(reached))
            for number, key in enumerate(chains)
        }
        return [(answer, leaves[ids(answer.chain)]) for answer in answers]

    @staticmethod
    def _question(flowing: Dependence) -> Question:
        def question(chain: Chain, operands: Operands, results: Operands) -> Any:
            if is_mutating(chain[-1]):
                return None
            pairs = [(jnp.asarray(operand), mask) for operand, mask in zip(operands, flowing.into(chain), strict=True)]
            given = [operand for operand, mask in pairs if mask and is_floating(operand)]
            made = [result for result, mask in zip(results, flowing.out_of(chain), strict=True) if mask]
            if not given or not made:
                return None
            some = jnp.stack([jnp.any(operand != 0) for operand in given]).any()
            none = jnp.stack([jnp.all(result == 0) for result in made]).all()
            is_product = chain[-1].primitive.name == "mul"
            # A product of two numbers that are not zero is too small for its dtype.
            is_lost = jnp.any((pairs[0][0] != 0) & (pairs[1][0] != 0)) if is_product else False
            return jnp.stack([jnp.where(some & none, 0, -1), jnp.asarray(is_lost, int)])

        return question


def _not_taken(program: Program, leaf: int) -> Chain:
    """The first branching whose branches use different operands that depend on a leaf; empty if there is none."""
    for chain in program.smooth.chains:
        if chain[-1].primitive.name != "cond" or not program.is_into(leaf, chain):
            continue
        masks = [(mask >> leaf & 1) << number for number, mask in enumerate(program.smooth.into(chain)[1:])]
        flows = (differentiably(jaxpr_and_consts(branch)[0], masks) for branch in branches_of(chain[-1]))
        if len({union(flow.outputs) for flow in flows}) > 1:
            return chain
    return ()


def _is_of_several(program: Program, leaf: int, chain: Chain) -> bool:
    """Whether a rule has other operands with a derivative than those that depend on a leaf, as a product has."""
    operands = zip(chain[-1].invars, program.smooth.into(chain), strict=True)
    return any(is_floating(atom.aval) and not mask >> leaf & 1 for atom, mask in operands)


def _vanishing(program: Program, leaf: int, deaths: _Deaths, is_flat: Callable[[int], bool]) -> Finding:
    """The finding for a gradient that has a path but is zero at this point."""
    path = program.paths[leaf]
    own = deaths.of(leaf)
    if not own:
        blocked = [c for c in blockers(program, leaf) if any(e.primitive.name == "cond" for e in c[:-1])]
        blocked = blocked or blockers_in_rules(program, leaf)
        if blocked:
            return barrier(path, blocked[0])
        branching = _not_taken(program, leaf)
        return finding("zero", *(("warning", "not chosen") if branching else ("info", "cancels")), [path], branching)
    # What still arrives at another operation was not lost where something is selected; and what arrives at the last
    # selection was not lost at those before.
    chain, first = next((pair for pair in own if not _selecting(program, leaf, pair[0])), own[-1])
    if first.chain[-1].primitive.name in _SUMS:
        return finding("zero", "info", "cancels", [path])
    name = chain[-1].primitive.name
    more = {"steps": steps_of([answer for other, answer in own if other == chain])}
    if name in _SATURATING and not first.numbers[1]:
        return finding("zero", "warning", "saturated", [path], chain, **more)
    if is_custom_rule(chain[-1]) and not _is_of_several(program, leaf, chain):
        return finding("zero", "warning", "rule", [path], chain, **more)
    if is_flat(leaf) or operation_of(chain) in _REMAINDERS:
        return finding("zero", "info", "truly zero", [path], chain, **more)
    if selecting := _selecting(program, leaf, chain):
        return finding("zero", "warning", "not chosen", [path], selecting, **more)
    if name in _PLACING:
        return finding("zero", "warning", "left out", [path], chain, **more)
    return finding("zero", "info", "truly zero", [path], chain, **more)


def _selecting(program: Program, leaf: int, chain: Chain) -> Chain:
    """The operation by which other elements were selected, if that is how a leaf was lost at an operation; else empty.

    Where an element is read by its place, it is what found the place or put the elements in order.
    """
    name = chain[-1].primitive.name
    if name in _CHOOSING:
        return chain
    if name not in _PLACING:
        return ()
    depends = lambda c: bool(union(program.value.into(c)) >> leaf & 1)
    found = [c for c in program.value.chains if c[-1].primitive.name in _PLACED_BY and depends(c)]
    found = feeding(program.jaxpr.jaxpr, found, chain)
    return found[-1] if found else ()
