"""A program as the user runs it, in its own precision: its value together with its gradient, compiled once.

What is compiled is kept for the next check of the same program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._compat import cached_property, silent_callbacks
from .._programs import (
    Operands,
    any_equation,
    evaluate,
    has_rule_outside_jax,
    jaxpr_and_consts,
    kept,
    quick_jit,
    reclosing,
)
from .float64 import widened
from .probe import Answer, Question, probing
from .program import Array, Program


class Own:
    """A program as the user runs it: its value and its gradient, in its own precision.

    Args:
        program: The program.
        weights: One for each element of the outputs; the gradient is that of the weighted sum.
        eager: The outputs of runs as the user wrote it; none if they are those of the program.
    """

    def __init__(self, program: Program, weights: Array, eager: Sequence[Operands] = ()):
        self.program, self.weights, self.eager = program, weights, list(eager)
        self.cotangents = cotangents_of(weights, program.out_avals)
        # Why there is no gradient; None if there is one.
        self.missing = program.missing.get("reverse")
        # Whether the gradient could be traced; if not, it was computed eagerly.
        self.is_traced = True
        self._answers: dict[str, list[Answer]] = {}

    def run(self, questions: dict[str, Question]) -> None:
        """Run the program twice, compiled, and ask the questions both times: they are part of the program."""
        jaxpr, operands = self.program.value_and_cotangent, [*self.program.leaves, *self.cotangents]
        if jaxpr is None:
            jaxpr, operands = self.program.numbered, self.program.leaves
        try:
            run = self._asking(jaxpr, questions)
            self.runs = [run(operands) for _ in range(2)]
        except jax.errors.UnexpectedTracerError as error:
            self._run_eagerly(error)

    def _run_eagerly(self, error: Exception) -> None:
        """Run a program whose rule closes over what is traced: JAX can differentiate it only as it goes."""
        program = self.program
        program.forget_derivatives(error)
        try:
            outputs, pull = jax.vjp(program.outputs, program.leaves)
            self.runs = [jax.device_get([*outputs, *pull(self.cotangents)[0]])] * 2
            self.eager = self.eager or [outputs]
            self.missing, self.is_traced = None, False
        except jax.errors.UnexpectedTracerError as own:
            self.missing = own
            self.runs = [_evaluating(program.numbered)(program.leaves)] * 2

    def _asking(self, jaxpr: ClosedJaxpr, questions: dict[str, Question]) -> Callable[[Operands], Operands]:
        """A jaxpr as a function that is compiled once, and keeps the answers to questions."""
        if not questions:
            return _evaluating(jaxpr)
        ((name, question),) = questions.items()
        ask = probing(jaxpr, question, purpose=name)

        def run(operands: Operands) -> Operands:
            outputs, self._answers[name] = ask(operands)
            return jax.device_get(outputs)

        return run

    def answers(self, name: str) -> list[Answer]:
        """The answers to a question that was asked while the program ran."""
        return self._answers.get(name, [])

    @cached_property
    def plain(self) -> Operands:
        """The outputs without differentiation, where only a custom rule could compute others."""
        if self.eager:
            return self.eager[0]
        if self.missing is not None or not any_equation(self.program.jaxpr.jaxpr, has_rule_outside_jax):
            return self.values[0]
        return _evaluating(self.program.numbered)(self.program.leaves)

    @property
    def values(self) -> list[Operands]:
        """The outputs of both runs."""
        return [run[: len(self.program.out_avals)] for run in self.runs]

    @cached_property
    def gradients(self) -> list[Array]:
        """The gradient for each leaf; empty if there is no reverse derivative."""
        return [np.asarray(gradient) for gradient in self.runs[0][len(self.program.out_avals) :]]

    def gradients_of_sum(self, weights: Array) -> list[Array]:
        """The gradient for each leaf of another weighted sum of the outputs."""
        cotangent = self.program.cotangent
        assert cotangent is not None
        pulled = _evaluating(cotangent)([*self.program.leaves, *cotangents_of(weights, self.program.out_avals)])
        return [np.asarray(gradient) for gradient in pulled]

    def tangents(self, direction: Sequence[Array]) -> list[Array]:
        """The tangents of the outputs along a direction; empty if there is no forward derivative."""
        if self.program.tangent is None:
            return []
        operands = [*self.program.leaves, *tangents_of(self.program, direction)]
        return [np.asarray(pushed) for pushed in _evaluating(self.program.tangent)(operands)]

    @cached_property
    def is_finite(self) -> bool:
        """Whether the value is finite."""
        return all(map(is_finite, self.plain))

    def gradients_of(self, function: Any) -> list[Array] | None:
        """The gradients of another function of the leaves; None if it has none."""
        return tried(pulled(function), self.program.leaves, self.cotangents)


def pulled(function: Any) -> Callable[[Operands, Operands], Operands]:
    """The gradients of a function of some leaves, as a function of these and of cotangents."""
    return lambda leaves, cotangents: jax.vjp(function, leaves)[1](cotangents)[0]


def _evaluating(jaxpr: ClosedJaxpr) -> Callable[[Operands], Operands]:
    run, consts = compiled(jaxpr), jaxpr_and_consts(jaxpr)[1]
    return lambda operands: jax.device_get(run(consts, operands))


def compiled(jaxpr: ClosedJaxpr) -> Callable[[Operands, Operands], Operands]:
    """A function of the constants and operands of a jaxpr without custom rules."""
    closed = reclosing(jaxpr_and_consts(jaxpr)[0])
    run = lambda consts, operands: evaluate(*jaxpr_and_consts(closed(consts)), operands)
    return kept("run", [jaxpr], lambda: quick_jit(run))


def tried(function: Callable[..., Any], *operands: Any) -> list[Array] | None:
    """The result of a remedy, or None if it fails in any way."""
    try:
        with silent_callbacks():
            return [np.asarray(result) for result in quick_jit(function)(*operands)]
    except Exception:  # It contains the user's code, which may raise anything: then nothing is said of the remedy.
        return None


def weights_of(outputs: Sequence[Any], generator: np.random.Generator) -> Array:
    """1 for a single real number; else random weights that every precision holds exactly and that seldom cancel."""
    is_complex = any(jnp.issubdtype(value.dtype, jnp.complexfloating) for value in outputs)
    size = sum(value.size for value in outputs)
    if size == 1 and not is_complex:
        return np.ones(1)
    draw_some = lambda: generator.choice([-1, 1], size) * generator.integers(4, 8, size) / 4.0
    return draw_some() + 1j * draw_some() if is_complex else draw_some()


def cotangents_of(weights: Array, outputs: Sequence[Any]) -> Operands:
    """Weights, one per element, in the shapes and dtypes of the outputs."""
    ends = np.cumsum([value.size for value in outputs], dtype=int)
    parts = [weights[end - value.size : end].reshape(value.shape) for end, value in zip(ends, outputs, strict=True)]
    real = lambda part, value: part if jnp.issubdtype(value.dtype, jnp.complexfloating) else part.real
    return [real(*pair).astype(pair[1].dtype) for pair in zip(parts, outputs, strict=True)]


def tangents_of(program: Program, direction: Sequence[Array]) -> Operands:
    """A direction in the dtypes of the leaves."""
    return [jnp.asarray(v, leaf.dtype) for v, leaf in zip(direction, program.leaves, strict=True)]


def is_finite(value: Any) -> bool:
    """Whether every element of an array is finite."""
    return bool(np.isfinite(widened(value)).all())
