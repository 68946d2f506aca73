"""Run a jaxpr once, compiled, and ask its equations what they see: at every depth, in every step of every loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._programs import (
    CALLS,
    CHECKPOINTS,
    Operands,
    bind,
    custom_rule_body,
    is_custom_rule,
    opened,
    primal_jaxpr,
    reenter,
)
from .program import Chain

# From an equation with what it is inside of, its operands and its results, to a vector of integers, or to None where
# the question does not apply. A vector is an answer if its first entry is not negative.
Question = Callable[[Chain, Operands, Operands], Any]

_INLINED = CALLS | CHECKPOINTS
_OPAQUE = frozenset({"shard_map"})
# A loop that goes wrong goes wrong often.
_MOST_ANSWERS = 10_000


class Answer(NamedTuple):
    """What one equation answered in one step.

    Attributes:
        chain: The equation, and before it those that it is inside of.
        steps: The number of the step of each loop around it, from the outermost in.
        numbers: The answer.
        order: Answers in the order of execution have their orders in the order of tuples.
    """

    chain: Chain
    steps: tuple[int, ...]
    numbers: np.ndarray[Any, Any]
    order: tuple[int, ...]


def probe(jaxpr: ClosedJaxpr, operands: Operands, question: Question) -> list[Answer]:
    """The answers of a jaxpr's equations, in the order of their execution.

    Args:
        jaxpr: The jaxpr; it is run as it is, and is not differentiated.
        operands: Its operands.
        question: What each equation that contains no others is asked, and each call of a custom rule as well.

    Returns:
        The answers; where there are very many, the first.
    """
    run = _Run(question)
    opened_jaxpr, consts = opened(jaxpr)
    top = lambda *operands: run.body(opened_jaxpr, consts, list(operands), _Place((), (), ()))
    jax.block_until_ready(jax.jit(top)(*operands))
    jax.effects_barrier()
    return sorted(run.answers, key=lambda answer: answer.order)


class _Place(NamedTuple):
    """Where a body is run: inside which equations, at which place in each, and in which steps (traced)."""

    inside: Chain
    places: tuple[int, ...]
    steps: tuple[Any, ...]


class _Asked(NamedTuple):
    """An equation that was asked, when the body that it is in was traced."""

    chain: Chain
    places: tuple[int, ...]
    length: int


class _Run:
    """One run of a jaxpr, and the answers that come out of it."""

    def __init__(self, question: Question):
        self._question = question
        self.answers: list[Answer] = []

    def body(self, jaxpr: Jaxpr, consts: Operands, operands: Operands, place: _Place) -> Operands:
        """The outputs of a jaxpr in one place; its answers are sent out together."""
        asked: list[_Asked] = []
        vectors: list[Any] = []
        outputs = self._equations(jaxpr, consts, operands, place, asked, vectors)
        if vectors:
            self._send(asked, vectors, place.steps)
        return outputs

    def _equations(
        self, jaxpr: Jaxpr, consts: Operands, operands: Operands, place: _Place, asked: list[_Asked], vectors: list[Any]
    ) -> Operands:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
        for number, equation in enumerate(jaxpr.eqns):
            given = [read(atom) for atom in equation.invars]
            here = _Place((*place.inside, equation), (*place.places, number), place.steps)
            name, results = equation.primitive.name, None
            if name in _INLINED or is_custom_rule(equation):
                inner, inner_consts = opened(custom_rule_body(equation) or primal_jaxpr(equation))
                if len(inner.invars) == len(given):
                    results = self._equations(inner, inner_consts, given, here, asked, vectors)
            elif name not in _OPAQUE:
                results = self._reentered(here, given)
            contains = results is not None
            results = bind(equation, given) if results is None else results
            if not contains or is_custom_rule(equation):
                vector = self._question(here.inside, given, results)
                if vector is not None:
                    vectors.append(jnp.ravel(vector).astype(jnp.int32))
                    asked.append(_Asked(here.inside, here.places, vectors[-1].size))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _reentered(self, here: _Place, given: Operands) -> Operands | None:
        def run(jaxpr: Jaxpr, consts: Operands, operands: Operands, step: Any = None) -> Operands:
            steps = here.steps if step is None else (*here.steps, step)
            return self.body(jaxpr, consts, operands, here._replace(steps=steps))

        return reenter(here.inside[-1], given, run, counted=True)

    def _send(self, asked: list[_Asked], vectors: list[Any], steps: tuple[Any, ...]) -> None:
        starts = np.cumsum([0, *(one.length for one in asked)])[:-1]
        everything = jnp.concatenate(vectors)
        record = lambda everything, *steps: self._record(asked, starts, np.asarray(everything), tuple(map(int, steps)))
        send = lambda: jax.debug.callback(record, everything, *steps)
        lax.cond(jnp.any(everything[starts] >= 0), send, lambda: None)

    def _record(self, asked: list[_Asked], starts: Any, everything: Any, steps: tuple[int, ...]) -> None:
        for one, start in zip(asked, starts, strict=True):
            if everything[start] >= 0 and len(self.answers) < _MOST_ANSWERS:
                numbers = everything[start : start + one.length]
                self.answers.append(Answer(one.chain, steps, numbers, _order(one, steps)))


def _order(one: _Asked, steps: tuple[int, ...]) -> tuple[int, ...]:
    """When an equation was executed: its place in each body it is inside of, with the number of each step between."""
    order: list[int] = []
    remaining = iter(steps)
    for equation, number in zip(one.chain, one.places, strict=True):
        order.append(number)
        if equation.primitive.name in ("scan", "while") and equation is not one.chain[-1]:
            step = next(remaining)
            order.append(-step if equation.params.get("reverse") else step)
    return tuple(order)
