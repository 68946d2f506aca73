"""A program that is cut at some operations: what they return is a leaf, and what they take is an output.

The derivative of such an operation is declared: a rule that is intended, or a draw whose derivative is implicit. No
difference of the whole program shows what comes before or after it. Cut there, both are compared.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._programs import (
    CALLS,
    Chain,
    EquationRule,
    Operands,
    bind,
    ids,
    is_floating,
    jaxpr_and_consts,
    primal_jaxpr,
    run,
)
from .compare import Comparison
from .exact import Exact
from .finding import Finding
from .float64 import widened
from .outcomes import Outcomes
from .own import Own, weights_of
from .point import Point
from .program import Program
from .questions import Search
from .rounding import lost_digits
from .rules import Rules
from .verdict import ERROR

# The kinds of findings about parts of a program.
_OF_PARTS = frozenset({"mismatch", "precision"})


def around(
    program: Program,
    chains: Sequence[Chain],
    generator: np.random.Generator,
    directions: int,
    exhaustive: bool,
    known: Sequence[Finding],
) -> Iterator[Finding]:
    """What is wrong before and after some operations.

    Args:
        program: The program.
        chains: The operations.
        generator: For directions and weights.
        directions: How many directions are sampled for each leaf.
        exhaustive: Whether every element counts.
        known: What was found so far, of which nothing is said again.
    """
    cut = _cut_at(program, chains, generator)
    if cut is None:
        return
    cut.own.run({})
    leaves = range(len(cut.paths))
    search = Search(cut.point, generator, leaves)
    search.look_around(directions, exhaustive, lambda now, of: None)
    comparison = Comparison(cut.own, search, Rules(cut.own.program), {leaf: search.answer(leaf) for leaf in leaves})
    is_right = lambda leaf: comparison.answers[leaf].row.verdict != ERROR
    lost = lost_digits(cut.own, search, comparison.answers, exhaustive, is_right)
    named, where = dict(zip(cut.own.program.paths, cut.paths, strict=True)), lambda f: (f.file, f.line, f.operation)
    told = {where(found) for found in known if found.kind in _OF_PARTS}
    for found in (*comparison.findings(), *lost):
        if found.kind in _OF_PARTS and where(found) not in told:
            own = [path for leaf in found.leaves for path in named[leaf]]
            figures = found.figures if set(own) == set(found.leaves) else None
            yield dataclasses.replace(found, leaves=tuple(own), figures=figures)


class _Cut(NamedTuple):
    """A program that is cut, as the user runs it and in float64.

    Attributes:
        own: As the user runs it.
        point: In float64.
        paths: Of each leaf, the paths of the leaves that it depends on in the whole program.
    """

    own: Own
    point: Point
    paths: list[tuple[str, ...]]


def _cut_at(program: Program, chains: Sequence[Chain], generator: np.random.Generator) -> _Cut | None:
    """The program cut at some operations; None if all of them are inside loops, branches or rules.

    Args:
        program: The program.
        chains: The operations.
        generator: For the weights of the outputs.
    """
    chains = [chain for chain in chains if all(outer.primitive.name in CALLS for outer in chain[:-1])]
    if not chains:
        return None
    keys, (body, consts) = list(map(ids, chains)), jaxpr_and_consts(program.jaxpr)
    around = {key[:length] for key in keys for length in range(1, len(key))}

    def through(leaves: Operands, rule: EquationRule) -> Operands:
        """The outputs, with a rule for the operations; the calls that they are inside are run in place."""

        def change(chain: Chain, operands: Operands) -> Operands | None:
            if ids(chain) not in around:
                return rule(chain, operands)
            return run(*jaxpr_and_consts(primal_jaxpr(chain[-1])), operands, change, inside=chain)

        return run(body, consts, list(leaves), change)

    def results(leaves: Operands) -> list[Operands]:
        found: dict[Any, Operands] = {}

        def record(chain: Chain, operands: Operands) -> Operands | None:
            return found.setdefault(ids(chain), bind(chain[-1], operands)) if ids(chain) in keys else None

        through(leaves, record)
        return [found[key] for key in keys]

    values = dict(zip(keys, jax.device_get(jax.jit(results)(program.leaves)), strict=True))
    places = [(key, place) for key in keys for place, value in enumerate(values[key]) if is_floating(value)]

    def function(given: Operands) -> Operands:
        leaves, taken = given[: len(program.leaves)], list[Any]()
        new = dict(zip(places, given[len(leaves) :], strict=True))

        def replace(chain: Chain, operands: Operands) -> Operands | None:
            if (key := ids(chain)) not in values:
                return None
            taken.extend(filter(is_floating, operands))
            return [new.get((key, place), value) for place, value in enumerate(values[key])]

        return [*through(leaves, replace), *taken]

    made = [values[key][place] for key, place in places]
    into = {ids(chain): program.leaves_into(chain, program.value) for chain in chains}
    of_results = [tuple(program.paths[leaf] for leaf in into[key]) for key, _ in places]
    names = [f"result {number}" for number in range(len(places))]
    cut = Program(function, [*program.leaves, *made], [*program.paths, *names])
    own = Own(cut, weights_of(cut.out_avals, generator))
    point = Point(Exact(cut), list(map(widened, cut.leaves)), own.weights, Outcomes(cut))
    return _Cut(own, point, [*((path,) for path in program.paths), *of_results])
