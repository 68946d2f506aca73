"""What depends on what in a jaxpr: sets of sources, from its inputs through every equation to its outputs.

A set is the bits of an int, so a union is `|`. What an equation passes on depends on the question: values go through
everything, derivatives through floating operations, tangents through linear ones. Small arrays are followed element by
element through operations that only move or combine elements, so that a sliced-away element is not reached.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._compat import is_root_primitive
from .elementwise import moved, union_of
from .equations import (
    Chain,
    branches_of,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    jaxpr_and_consts,
    scan_of,
    while_of,
)
from .interpreter import expanded, step_through, with_constants_as_inputs
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_LINEAR,
    DRAWS,
    FLAT,
    HIGH,
    HIGH_LINEAR,
    MOVES,
    OWN,
    PRODUCTS,
    SUMS,
    SURROGATE,
)
from .rules import LINEAR, fills

Sources = list[int]
# Takes an equation, preceded by those around it, and what its operands depend on; returns what its results depend on.
Transfer = Callable[[Chain, Sources], Sources]

# In a linear program: a number, which may be anything except a zero that JAX or a rule knows.
CONSTANT = 1
# A function of zero is zero.
_LINEAR = MOVES | SUMS
_ENTERED = CALLS | CHECKPOINTS | {"custom_vmap_call", "shard_map", OWN[0]}
# Expansions of equations, by id: two analyses of one program must see the same equations inside. An expansion is kept
# together with its equation, so that the id stays taken.
_expansions: weakref.WeakValueDictionary[int, Jaxpr] = weakref.WeakValueDictionary()


class Dependence:
    """What the operands and the results of every equation depend on.

    Args:
        jaxpr: An open jaxpr.
        sources: What its inputs depend on.
        transfer: What an equation passes on that is not looked into.
        constant: What constants depend on, and numbers other than zero.
        through_control: Whether a condition and the number of steps of a loop count for what they decide.
        into_rules: Whether the function of a custom rule is looked into.
        own: Further sources that the results of an equation have. By them, what chosen equations reach can be asked.
        ends_at_own: Whether nothing goes through an equation that has sources of its own.
        by_element: Whether the elements of small arrays are followed one by one.

    Attributes:
        outputs: What the outputs of the jaxpr depend on.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def f(x, y):
        ...     return jax.lax.scan(lambda carry, _: (jnp.sin(y), carry), x, None, length=3)
        >>> jaxpr = jax.make_jaxpr(f)(1.0, 2.0).jaxpr
        >>> flow = Dependence(jaxpr, [0b01, 0b10], smoothly)
        >>> flow.outputs  # the last carry is made of y, and x is the first of what is stacked
        [2, 3]
        >>> [flow.into(chain) for chain in flow.chains if chain[-1].primitive.name == "sin"]
        [[2]]
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        sources: Sources,
        transfer: Transfer,
        *,
        constant: int = 0,
        through_control: bool = False,
        into_rules: bool = False,
        own: Callable[[Chain], int] = lambda chain: 0,
        ends_at_own: bool = False,
        by_element: bool = True,
    ):
        self._transfer, self._constant, self._own, self._ends_at_own = transfer, constant, own, ends_at_own
        self._through_control, self._into_rules, self._by_element = through_control, into_rules, by_element
        self._records: dict[tuple[int, ...], tuple[Sources, Sources]] = {}
        self._chains: dict[tuple[int, ...], Chain] = {}
        self._expanded: dict[int, list[Jaxpr]] = {}
        self._looked_into: set[tuple[int, ...]] = set()
        self.outputs = _unions(self._through(jaxpr, sources, ()))

    @property
    def chains(self) -> list[Chain]:
        """All equations, each preceded by those around it, and before those inside it."""
        return list(self._chains.values())

    def knows(self, chain: Chain) -> bool:
        """Whether an equation was met."""
        return ids(chain) in self._records

    def is_entered(self, chain: Chain) -> bool:
        """Whether an equation was entered, so that the equations inside speak for it."""
        return ids(chain) in self._looked_into

    def into(self, chain: Chain) -> Sources:
        """What the operands of an equation depend on, at any step of the loops around it; empty if it was not met."""
        return self._records.get(ids(chain), ([0] * len(chain[-1].invars), []))[0]

    def union_into(self, chain: Chain) -> int:
        """What any operand depends on; of an equation that was not met, those of the one around it that was."""
        while chain and not self.knows(chain):
            chain = chain[:-1]
        return union(self.into(chain)) if chain else 0

    def out_of(self, chain: Chain) -> Sources:
        """What the results of an equation depend on."""
        return self._records.get(ids(chain), ([], [0] * len(chain[-1].outvars)))[1]

    def _through(self, jaxpr: Jaxpr, sources: list[Any], inside: Chain) -> list[Any]:
        self._looked_into.add(ids(inside))
        step = lambda equation, given: self._step((*inside, equation), given)
        return step_through(jaxpr, [self._constant] * len(jaxpr.constvars), sources, step, self._of_literal)

    def _of_literal(self, literal: Literal) -> int:
        # An array may be a user's value that happens to be zero; JAX and rules write a zero as a number.
        value = literal.val
        if literal.aval.dtype == jax.dtypes.float0:
            return 0
        is_zero = not isinstance(value, jax.Array) and not getattr(value, "shape", ()) and value == 0
        return 0 if is_zero else self._constant

    def _step(self, chain: Chain, given: list[Any]) -> list[Any]:
        key, own = ids(chain), self._own(chain)
        self._chains.setdefault(key, chain)
        results = self._of(chain, given)
        if own:
            results = [own if self._ends_at_own else result | own for result in results]
        into, out_of = self._records.get(key, ([0] * len(given), [0] * len(results)))
        self._records[key] = _joined(into, _unions(given)), _joined(out_of, _unions(results))
        return results

    def _of(self, chain: Chain, given: list[Any]) -> list[Any]:
        equation = chain[-1]
        name = equation.primitive.name
        if name == "scan":
            return self._of_scan(chain, _unions(given))
        if name == "while":
            return self._of_while(chain, _unions(given))
        if name == "cond":
            return self._of_cond(chain, given)
        inner = self._entered(equation)
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            # Inside a `shard_map`, each array is a part of the one outside.
            return self._through(inner[0], _unions(given) if name == "shard_map" else given, chain)
        if name == "optimization_barrier":
            return given
        passed = self._transfer(chain, _unions(given))
        if not self._by_element:
            return passed
        # A function of zero need not be zero, unless it is linear.
        everywhere = 0 if name in _LINEAR | PRODUCTS else self._constant
        return moved(equation, given, passed, everywhere)

    def _entered(self, equation: JaxprEqn) -> list[Jaxpr]:
        name = equation.primitive.name
        if name in _ENTERED or (self._into_rules and is_custom_rule(equation)):
            return list(inner_jaxprs(equation))
        if name in HIGH and is_root_primitive(equation) and not self._into_rules:
            # Its derivative is not that of the search.
            return []
        if name in HIGH and id(equation) not in self._expanded:
            body = _expansions.get(id(equation))
            if body is None and (closed := expanded(equation)) is not None:
                body = _expansions[id(equation)] = jaxpr_and_consts(closed)[0]
            self._expanded[id(equation)] = [] if body is None else [body]
        return self._expanded.get(id(equation), [])

    def _of_cond(self, chain: Chain, given: list[Any]) -> list[Any]:
        decided = union_of(given[0]) & ~self._constant if self._through_control else 0
        branches = [self._through(jaxpr_and_consts(branch)[0], given[1:], chain) for branch in branches_of(chain[-1])]
        return [functools.reduce(operator.or_, each) | decided for each in zip(*branches, strict=True)]

    def _of_scan(self, chain: Chain, given: Sources) -> Sources:
        loop = scan_of(chain[-1])
        body, carried = jaxpr_and_consts(loop.body)[0], loop.carried
        consts, carry, xs = given[: loop.consts], given[loop.consts :][:carried], given[loop.consts + carried :]
        step = lambda carry: _unions(self._through(body, [*consts, *carry, *xs], chain))
        stacked = [0] * (len(chain[-1].outvars) - carried)
        # First step by step: what the first step overwrites is unused, which a union over all lengths would not show.
        for _ in range(min(loop.length, 2 * carried + 2)):
            outputs = step(carry)
            stacked = _joined(stacked, outputs[carried:])
            if outputs[:carried] == carry:
                return [*carry, *stacked]
            carry = outputs[:carried]
        if loop.length <= 2 * carried + 2:
            return [*carry, *stacked]
        outputs = _fixed_point(step, carry)
        return [*outputs[:carried], *_joined(stacked, outputs[carried:])]

    def _of_while(self, chain: Chain, given: Sources) -> Sources:
        loop = while_of(chain[-1])
        test, body = jaxpr_and_consts(loop.test)[0], jaxpr_and_consts(loop.body)[0]
        tested, rest = given[: loop.test_consts], given[loop.test_consts :]
        consts, carry = rest[: loop.body_consts], rest[loop.body_consts :]

        def step(carry: Sources) -> Sources:
            decided = union(_unions(self._through(test, [*tested, *carry], chain))) & ~self._constant
            outputs = _unions(self._through(body, [*consts, *carry], chain))
            return [source | decided for source in outputs] if self._through_control else outputs

        return _fixed_point(step, carry)


def _fixed_point(step: Callable[[Sources], Sources], carry: Sources) -> Sources:
    """The outputs of a loop: the carry, including its start (a loop may not run at all), and the stacked outputs."""
    while True:
        outputs = step(carry)
        grown = [before | after for before, after in zip(carry, outputs, strict=False)]
        if grown == carry:
            return [*carry, *outputs[len(carry) :]]
        carry = grown


def ids(chain: Chain) -> tuple[int, ...]:
    """What tells a chain from others."""
    return tuple(map(id, chain))


def union(sources: Iterable[int]) -> int:
    """What is in any of the sets."""
    return functools.reduce(operator.or_, sources, 0)


def _unions(sources: Iterable[Any]) -> Sources:
    return list(map(union_of, sources))


def _joined(first: Sources, second: Sources) -> Sources:
    return list(map(operator.or_, first, second))


# --- what equations pass on ------------------------------------------------------------------------------------------


def everything(chain: Chain, sources: Sources) -> Sources:
    """What the value of each result depends on."""
    return [union(sources)] * len(chain[-1].outvars)


def smoothly(chain: Chain, sources: Sources) -> Sources:
    """What the derivative of each result may depend on: nothing goes through integers, comparisons or stops."""
    equation = chain[-1]
    # The derivative of a surrogate is that of its second operand.
    first = 1 if equation.primitive.name == SURROGATE else 0
    operands = list(zip(equation.invars, sources, strict=True))[first:]
    total = (
        0 if equation.primitive.name in FLAT else union(source for atom, source in operands if is_floating(atom.aval))
    )
    return [total if is_floating(result.aval) else 0 for result in equation.outvars]


def linearly(chain: Chain, sources: Sources) -> Sources:
    """What each result of a linear program depends on; the empty set is a zero that JAX or a rule knows."""
    equation, total = chain[-1], union(sources)
    name = equation.primitive.name
    rule = LINEAR.get(name)
    if name in CUSTOM_LINEAR | HIGH_LINEAR:
        passed = total & ~CONSTANT
    elif name == "select_n":
        passed = union(sources[1:]) | sources[0] & ~CONSTANT
    elif rule is None or fills(equation):
        passed = total | CONSTANT
    elif rule.operands is None:
        passed = total
    elif rule.alone:
        # A zero factor in the program is a number, but a zero that a rule returned stays a zero.
        passed = total if total & ~CONSTANT or all(sources[position] for position in rule.operands) else 0
    else:
        passed = union(sources[position] for position in rule.operands) | total & ~CONSTANT
    return [passed] * len(equation.outvars)


# --- questions -------------------------------------------------------------------------------------------------------


def dependencies(jaxpr: Jaxpr, sources: Sources) -> Sources:
    """What each output of a linear program depends on, given what its inputs depend on; 0 for a known zero."""
    return Dependence(jaxpr, sources, linearly, constant=CONSTANT, through_control=True, into_rules=True).outputs


def adds_a_constant(closed: Any) -> bool:
    """Whether a function, linear but for what it adds, makes anything but zeros of zeros."""
    jaxpr, consts = jaxpr_and_consts(closed)
    sources = [CONSTANT] * len(consts) + [0] * len(jaxpr.invars)
    return any(dependencies(with_constants_as_inputs(jaxpr), sources))


def by_value(jaxpr: Jaxpr, sources: Sources, **asked: Any) -> Dependence:
    """What the value of everything depends on, through conditions and indices too."""
    return Dependence(jaxpr, sources, everything, through_control=True, into_rules=True, **asked)


def differentiably(jaxpr: Jaxpr, sources: Sources, *, into_rules: bool = False) -> Dependence:
    """What the derivative of everything may depend on."""
    return Dependence(jaxpr, sources, smoothly, into_rules=into_rules)


def of_cotangents(jaxpr: Jaxpr, count: int) -> Dependence:
    """What in a derivative is computed from its last inputs, the tangents or cotangents, or from zeros of theirs."""
    first = len(jaxpr.invars) - count
    return Dependence(jaxpr, [0] * first + [1] * count, smoothly, by_element=False)


def of_draws(jaxpr: Jaxpr) -> Dependence:
    """What depends on random bits drawn inside."""
    drawn = lambda chain: int(chain[-1].primitive.name in DRAWS)
    return Dependence(jaxpr, [0] * len(jaxpr.invars), everything, into_rules=True, own=drawn)


def arrivals(jaxpr: Jaxpr, sources: Sources, wanted: Callable[[Chain], bool]) -> Iterator[tuple[Chain, Sources]]:
    """Where the derivative of some inputs arrives at equations of some kind, through everything that contains them.

    Args:
        jaxpr: An open jaxpr.
        sources: For each input its bit, or 0.
        wanted: Which equations, each after those that it is inside. A named scope shows in the name stack of any of
            these: inside a loop it begins anew.

    Yields:
        Each such equation, after those that it is inside, that a source reaches, and which reach each operand.
    """
    flow = differentiably(jaxpr, sources, into_rules=True)
    for chain in flow.chains:
        if wanted(chain) and any(flow.into(chain)):
            yield chain, flow.into(chain)


def reaching(jaxpr: Jaxpr, chains: Iterable[Chain]) -> list[Chain]:
    """The given equations whose results the value of the output depends on."""
    chains = list(chains)
    reached = union(arriving(jaxpr, chains))
    return [chain for number, chain in enumerate(chains) if reached >> number & 1]


def feeding(jaxpr: Jaxpr, chains: Iterable[Chain], into: Chain) -> list[Chain]:
    """The given equations whose results the value of an operand of another equation depends on."""
    chains = list(chains)
    flow = _marking(jaxpr, chains)
    reached = union(flow.into(into)) if flow.knows(into) else 0
    return [chain for number, chain in enumerate(chains) if reached >> number & 1]


def arriving(jaxpr: Jaxpr, chains: Iterable[Chain]) -> Sources:
    """For each output, which of the given equations its value depends on: a bit for each of them."""
    return _marking(jaxpr, chains).outputs


def _marking(jaxpr: Jaxpr, chains: Iterable[Chain]) -> Dependence:
    bits = {ids(chain): 1 << number for number, chain in enumerate(chains)}
    # Equations inside one of them are part of it.
    own = lambda chain: union(bits.get(ids(chain[:length]), 0) for length in range(1, len(chain) + 1))
    return by_value(jaxpr, [0] * len(jaxpr.invars), own=own)


def last_of(jaxpr: Jaxpr, chains: Iterable[Chain]) -> list[Chain]:
    """The given equations whose value reaches the output without going through another of them."""
    chains = list(chains)
    bits = {ids(chain): 1 << number for number, chain in enumerate(chains)}
    own = lambda chain: bits.get(ids(chain), 0)
    reached = union(by_value(jaxpr, [0] * len(jaxpr.invars), own=own, ends_at_own=True).outputs)
    return [chain for chain in chains if reached & bits[ids(chain)]]
