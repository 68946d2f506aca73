"""Run a jaxpr once, compiled, and ask its equations questions: at every depth, in every step of every loop."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._programs import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    LOOPS,
    Chain,
    Operands,
    all_finite,
    bind,
    ids,
    inner_jaxprs,
    is_custom_rule,
    jaxpr_and_consts,
    kept,
    primal_jaxpr,
    quick_jit,
    reclosing,
    reenter,
    run,
)

# Takes an equation with the equations around it, its operands and its results; returns a vector of integers, or None
# if the question does not apply. A vector is an answer if its first entry is not negative.
Question = Callable[[Chain, Operands, Operands], Any]

INLINED = CALLS | CHECKPOINTS | CUSTOM_RULES
_OPAQUE = frozenset({"shard_map"})
# A loop that goes wrong usually goes wrong at many steps.
_MOST_ANSWERS = 10_000


class Answer(NamedTuple):
    """What one equation answered in one step of each of the loops around it, from the outermost in.

    Sorting by `order` sorts answers by execution.
    """

    chain: Chain
    steps: tuple[int, ...]
    numbers: np.ndarray[Any, Any]
    order: tuple[int, ...]


def probe(
    jaxpr: ClosedJaxpr,
    operands: Operands,
    question: Question,
    *,
    purpose: str = "",
    trusted: Callable[[Any], bool] = all_finite,
) -> tuple[Operands, list[Answer]]:
    """The outputs of a jaxpr, and the answers of its equations to a question, in order of execution.

    The question goes to each equation that contains no others, and to each call of a custom rule. Of very many answers
    only the first are kept. With a `purpose`, the compiled run is kept for the next jaxpr that is the same: then a
    question may depend on nothing else. Outputs that are not trusted are computed again, as `quick_jit` does.
    """
    return probing(jaxpr, question, purpose=purpose, trusted=trusted)(operands)


def probing(
    jaxpr: ClosedJaxpr, question: Question, *, purpose: str = "", trusted: Callable[[Any], bool] = all_finite
) -> Callable[[Operands], tuple[Operands, list[Answer]]]:
    """`probe` of one jaxpr and one question as a function of the operands, compiled once."""
    body, consts = jaxpr_and_consts(jaxpr)
    made = lambda: _Run(question, body, trusted)
    asked = kept(purpose, [jaxpr], made) if purpose else made()

    def ask(operands: Operands) -> tuple[Operands, list[Answer]]:
        outputs, answers = asked(consts, operands)
        if asked.equations is not body.eqns:
            # The equations of this jaxpr, not those of the one that was compiled.
            places = {ids(chain): number for number, chain in enumerate(_chains(asked.equations))}
            chains = list(_chains(body.eqns))
            answers = [answer._replace(chain=chains[places[ids(answer.chain)]]) for answer in answers]
        return outputs, sorted(answers, key=lambda answer: answer.order)

    return ask


def _stepped(
    chain: Chain, given: Operands, within: Callable[..., Operands], enter: Callable[[], Operands | None] = lambda: None
) -> tuple[Operands, bool]:
    """The results of an equation, and whether it is asked: it contains no others, or it calls a custom rule.

    Args:
        chain: The equation.
        given: Its operands.
        within: From a jaxpr that is inlined, its constants and operands, and the chain, to the outputs.
        enter: The results of another equation that contains some; None if it contains none.
    """
    equation = chain[-1]
    if equation.primitive.name in INLINED:
        results: Operands | None = within(*jaxpr_and_consts(primal_jaxpr(equation)), given, chain)
    else:
        results = enter()
    is_asked = results is None or is_custom_rule(equation)
    return (bind(equation, given) if results is None else results), is_asked


def visited(
    jaxpr: Jaxpr, consts: Operands, operands: Operands, visit: Callable[[Chain, Operands, Operands], None]
) -> Operands:
    """The outputs of a jaxpr, with calls opened; each equation that may be asked is visited once it has its results.

    A loop is not entered. The visit takes an equation after those that it is inside, its operands and its results.
    """

    def within(jaxpr: Jaxpr, consts: Operands, operands: Operands, inside: Chain = ()) -> Operands:
        return run(jaxpr, consts, operands, rule, inside=inside)

    def rule(chain: Chain, given: Operands) -> Operands:
        results, is_asked = _stepped(chain, given, within)
        if is_asked:
            visit(chain, given, results)
        return results

    return within(jaxpr, consts, operands)


def _chains(equations: Sequence[JaxprEqn], inside: Chain = ()) -> Iterator[Chain]:
    for equation in equations:
        yield (*inside, equation)
        for inner in inner_jaxprs(equation):
            yield from _chains(inner.eqns, (*inside, equation))


class _Asked(NamedTuple):
    """An equation that was asked when the body that contains it was traced."""

    chain: Chain
    length: int


class _Body(NamedTuple):
    """A body that is staged on its own; the answers of its equations leave it together, with the steps around it."""

    steps: tuple[Any, ...]
    asked: list[_Asked]
    vectors: list[Any]


class _Answers:
    """What the equations of a run answer; `places` are their positions in their bodies."""

    def __init__(self) -> None:
        self.found: list[Answer] = []
        self.places: dict[int, int] = {}

    def record(self, asked: list[_Asked], starts: Any, everything: Any, steps: tuple[int, ...]) -> None:
        """Keep what the equations of one body answer in one step."""
        for one, start in zip(asked, starts, strict=True):
            if everything[start] >= 0 and len(self.found) < _MOST_ANSWERS:
                numbers = everything[start : start + one.length]
                self.found.append(Answer(one.chain, steps, numbers, self._order(one, steps)))

    def _order(self, one: _Asked, steps: tuple[int, ...]) -> tuple[int, ...]:
        """When an equation was executed: its position in each body around it, with the step numbers in between."""
        order: list[int] = []
        remaining = iter(steps)
        for equation in one.chain:
            order.append(self.places[id(equation)])
            if equation.primitive.name in LOOPS and equation is not one.chain[-1]:
                step = next(remaining)
                order.append(-step if equation.params.get("reverse") else step)
        return tuple(order)


class _Run:
    """One run of a jaxpr, and the answers it collects."""

    def __init__(self, question: Question, jaxpr: Jaxpr, trusted: Callable[[Any], bool]):
        self._question, self.equations, self._answers = question, jaxpr.eqns, _Answers()
        closed = reclosing(jaxpr)
        self._is_trusted = trusted
        run = lambda consts, operands: self.body(*jaxpr_and_consts(closed(consts)), operands)
        self._staged = quick_jit(run, trusted=self._trusted)

    def __call__(self, consts: Operands, operands: Operands) -> tuple[Operands, list[Answer]]:
        """The outputs and the answers."""
        self._answers.found = []
        outputs = jax.block_until_ready(self._staged(consts, operands))
        jax.effects_barrier()
        return outputs, self._answers.found

    def _trusted(self, outputs: Any) -> bool:
        if self._is_trusted(outputs):
            return True
        # It runs again, and answers again.
        jax.block_until_ready(outputs)
        jax.effects_barrier()
        self._answers.found = []
        return False

    def body(
        self, jaxpr: Jaxpr, consts: Operands, operands: Operands, inside: Chain = (), steps: tuple[Any, ...] = ()
    ) -> Operands:
        """The outputs of a jaxpr that is staged on its own."""
        body = _Body(steps, [], [])
        outputs = self._within(body, jaxpr, consts, operands, inside)
        if body.vectors:
            self._send(body)
        return outputs

    def _within(self, body: _Body, jaxpr: Jaxpr, consts: Operands, operands: Operands, inside: Chain) -> Operands:
        self._answers.places.update({id(equation): number for number, equation in enumerate(jaxpr.eqns)})
        return run(jaxpr, consts, operands, functools.partial(self._step, body), inside=inside)

    def _step(self, body: _Body, chain: Chain, given: Operands) -> Operands:
        def enter() -> Operands | None:
            if chain[-1].primitive.name in _OPAQUE:
                return None
            return reenter(chain[-1], given, functools.partial(self._inside, body, chain), counted=True)

        results, is_asked = _stepped(chain, given, functools.partial(self._within, body), enter)
        if is_asked:
            self._ask(body, chain, given, results)
        return results

    def _inside(
        self, body: _Body, chain: Chain, jaxpr: Jaxpr, consts: Operands, operands: Operands, step: Any = None
    ) -> Operands:
        return self.body(jaxpr, consts, operands, chain, body.steps if step is None else (*body.steps, step))

    def _ask(self, body: _Body, chain: Chain, given: Operands, results: Operands) -> None:
        vector = self._question(chain, given, results)
        if vector is not None:
            body.vectors.append(jnp.ravel(vector).astype(jnp.int32))
            body.asked.append(_Asked(chain, body.vectors[-1].size))

    def _send(self, body: _Body) -> None:
        starts = np.cumsum([0, *(one.length for one in body.asked)])[:-1]
        everything = jnp.concatenate(body.vectors)
        # Not the body, which has tracers, nor the question, which may have the arguments: JAX keeps what it calls.
        asked, answers = body.asked, self._answers

        def record(everything: Any, *steps: Any) -> None:
            answers.record(asked, starts, np.asarray(everything), tuple(map(int, steps)))

        send = lambda: jax.debug.callback(record, everything, *body.steps)
        lax.cond(jnp.any(everything[starts] >= 0), send, lambda: None)
