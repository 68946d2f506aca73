"""Rules that are called many times in one program, as by a loop in Python: one compiled question is put to each."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._programs import (
    CUSTOM_RULES,
    Chain,
    Operands,
    ids,
    jaxpr_and_consts,
    kept,
    keyed_jaxpr,
    quick_jit,
    reclosing,
    run,
)
from .names import rule_of
from .probe import INLINED, Answer, visited
from .program import Program

# From so many calls on, to run a program of their operands first takes less time than to compile a question for each.
_MANY = 8


class Repeated:
    """The calls of rules that are called many times outside of loops, and the question put to each of them.

    Args:
        program: The program.
        chains: The calls that are asked.
        question: From a call and its operands to what `probe` asks for.
    """

    def __init__(self, program: Program, chains: Sequence[Chain], question: Callable[[Chain, Operands], Any]):
        self._program, self._question = program, question
        kinds = {chain: _kind(chain) for chain in chains if _is_outside_of_loops(chain)}
        counts = Counter(kinds.values())
        asked = {chain: self._asked(chain) for chain, kind in kinds.items() if counts[kind] >= _MANY}
        keys = {chain: keyed_jaxpr(closed.jaxpr, exact=False) for chain, closed in asked.items()}
        alike = Counter(keys.values())
        self._calls = {chain: asked[chain] for chain, key in keys.items() if key is not None and alike[key] >= _MANY}

    def __contains__(self, chain: Chain) -> bool:
        return chain in self._calls

    def answers(self) -> list[Answer]:
        """What the calls answer."""
        found = []
        given = self._operands() if self._calls else {}
        for chain, closed in self._calls.items():
            compiled = kept("a rule", [closed], functools.partial(_compiled, closed.jaxpr))
            # Of what cannot be asked, there is no result.
            for numbers in map(np.asarray, compiled(closed.consts, given[chain])):
                if numbers[0] >= 0:
                    found.append(Answer(chain, (), numbers, ()))
        return found

    def _asked(self, chain: Chain) -> ClosedJaxpr:
        """The question put to a call, as a jaxpr of its operands that is the same for calls of which it is the same."""
        avals = [atom.aval for atom in chain[-1].invars]
        closed = jax.make_jaxpr(lambda *operands: self._question(chain, list(operands)))(*avals)
        # Called for its value, a rule is nothing but its function.
        plain = lambda *operands: run(*jaxpr_and_consts(closed), list(operands), _nothing, in_place=CUSTOM_RULES)
        return jax.make_jaxpr(plain)(*avals)

    def _operands(self) -> dict[Chain, Operands]:
        """What the calls are given."""
        body, consts = jaxpr_and_consts(self._program.jaxpr)
        numbers = {ids(chain): number for number, chain in enumerate(self._calls)}

        def all_given(consts: Operands, operands: Operands) -> dict[int, Operands]:
            found: dict[int, Operands] = {}

            def visit(chain: Chain, given: Operands, results: Operands) -> None:
                if (number := numbers.get(ids(chain))) is not None:
                    found[number] = given

            visited(body, consts, operands, visit)
            return found

        found = quick_jit(all_given)(consts, list(self._program.leaves))
        return {chain: found[number] for number, chain in enumerate(self._calls)}


def _compiled(body: Jaxpr) -> Callable[[Operands, Operands], Operands]:
    closed = reclosing(body)
    return quick_jit(lambda consts, operands: run(*jaxpr_and_consts(closed(consts)), operands, _nothing))


def _nothing(chain: Chain, operands: Operands) -> None:
    """The rule that replaces nothing."""


def _is_outside_of_loops(chain: Chain) -> bool:
    return all(outer.primitive.name in INLINED for outer in chain[:-1])


def _kind(chain: Chain) -> Hashable:
    """What is equal for two calls of one rule with operands of the same shapes."""
    rule, equation = rule_of(chain), chain[-1]
    functions = tuple(map(id, rule.functions)) if rule else ()
    return equation.primitive.name, functions, tuple(atom.aval for atom in equation.invars)
