"""Mutable references (`jax.Ref`) as values, so that all of a program can be followed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from .._compat import discharged, is_written
from .equations import Operands, any_equation, is_mutating, jaxpr_and_consts, refers
from .interpreter import evaluate
from .jaxprs import as_closed, cut


class Referring:
    """A jaxpr without constants, with values in place of mutable references.

    Args:
        given: The jaxpr.
        keep: Whether to leave it as it is.

    Attributes:
        jaxpr: From values to the outputs, and after these to what is left in the references that are written. It is
            the given jaxpr if that has no references, or if a custom rule works on one.
    """

    def __init__(self, given: Jaxpr, keep: bool = False):
        self._given, self._count = given, len(given.outvars)
        self.jaxpr, self._written = (given, []) if keep else without_references(given)
        self._has_references = any(map(refers, given.invars))

    def run(self, operands: Operands, run: Callable[[Operands], Operands]) -> Operands:
        """The outputs for operands some of which are references, and what they leave there.

        Args:
            operands: Of the given jaxpr.
            run: From values to the outputs of `jaxpr`.
        """
        if not self._has_references:
            return run(operands)
        references = [id(operand) for operand in operands if isinstance(operand, jax.Ref)]
        if len(set(references)) < len(references):
            # What is written to one is read from the other.
            return evaluate(self._given, [], operands)
        pairs = zip(operands, self.jaxpr.invars, strict=True)
        results = run([operand if refers(variable) else read(operand) for operand, variable in pairs])
        for number, value in zip(self._written, results[self._count :], strict=True):
            operands[number][...] = value
        return results[: self._count]


def without_references(jaxpr: Jaxpr) -> tuple[Jaxpr, list[int]]:
    """A jaxpr without constants that takes and has values in place of mutable references: then all can be followed.

    It is the same jaxpr if it has none, or if a custom rule works on one.

    Returns:
        The jaxpr, and the numbers of those inputs to whose references it writes: after its outputs comes what is left
        there.
    """
    if not any_equation(jaxpr, is_mutating):
        return jaxpr, []
    try:
        pure, consts = jaxpr_and_consts(discharged(as_closed(jaxpr)))
    except NotImplementedError:
        return jaxpr, []
    if consts:
        return jaxpr, []
    outputs, left = pure.outvars[: len(jaxpr.outvars)], pure.outvars[len(jaxpr.outvars) :]
    references = [number for number, variable in enumerate(jaxpr.invars) if refers(variable)]
    written = {n: last for n, last in zip(references, left, strict=True) if is_written(jaxpr, jaxpr.invars[n])}
    return cut(pure, pure.invars, [*outputs, *written.values()], pure.eqns), list(written)


def read(value: Any) -> Any:
    """The array that a reference refers to now, and any other value itself."""
    return value[...] if isinstance(value, jax.Ref) else value
