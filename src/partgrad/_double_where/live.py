"""The derivative of a function one of whose custom rules holds a traced value, in a closure or as an argument.

Such a rule works only while the function is being traced. So the function itself is run again, in one trace with its
tangents; or, if it has a backward pass, with the cotangents of all outputs, and the push is the transpose of that pull.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import cached_property, transposed_program
from .._programs import (
    Operands,
    along,
    as_closed,
    cut,
    evaluate,
    jaxpr_and_consts,
    some_beside_all,
    without_calls,
    zeros_like_aval,
)
from .derivative import Derivative
from .forward import traced_jvp
from .shares import selecting_shares
from .unwrapped import without_double_where
from .walk import AFFINE

Function = Callable[[Operands], Operands]


class LiveDerivative(Derivative):
    """A derivative that saves nothing but what rules hold."""

    walk = AFFINE

    @classmethod
    def of_function(
        cls, function: Function, avals: list[Any], moving: Sequence[int], floating: dict[int, Any]
    ) -> "LiveDerivative":
        """The derivative of a function along some operands.

        Args:
            function: From operands to outputs; it runs the rules.
            avals: Of the operands.
            moving: The numbers of those along which this is the derivative.
            floating: The avals of the outputs that have derivatives, by their numbers.
        """
        whole = traced_jvp(function, avals, moving, list(floating))
        return cls._of_program(whole, len(avals), len(floating), list(floating))

    @classmethod
    def _of_program(cls, whole: ClosedJaxpr, count: int, last: int, floating: list[int]) -> "LiveDerivative":
        """A program of this many operands, and of tangents or cotangents; its last outputs are what these come to."""
        avals = [variable.aval for variable in jaxpr_and_consts(whole)[0].invars]
        selecting = jax.make_jaxpr(lambda *operands: selecting_shares(whole)(list(operands)))(*avals)
        jaxpr, consts = without_calls(without_double_where(selecting))
        held, outputs = jaxpr.invars[: len(consts)], jaxpr.outvars[: len(jaxpr.outvars) - last]
        values = cut(jaxpr, jaxpr.invars[: len(consts) + count], [*outputs, *held], jaxpr.eqns)
        linear = cut(jaxpr, jaxpr.invars, jaxpr.outvars[len(outputs) :], jaxpr.eqns)
        places = [*range(count, count + len(consts)), *range(count)]
        return cls(as_closed(values, consts), len(outputs), linear, places, floating, [None] * count)


class PulledDerivative(LiveDerivative):
    """The same of a function with a backward pass: what is given is the pull."""

    @classmethod
    def of_function(
        cls, function: Function, avals: list[Any], moving: Sequence[int], floating: dict[int, Any]
    ) -> "LiveDerivative":
        def both(operands: Operands, cotangents: Operands) -> tuple[Operands, Operands]:
            of_moving, start = along(function, moving, operands)
            _, pull, outputs = jax.vjp(some_beside_all(of_moving, list(floating)), *start, has_aux=True)
            return outputs, list(pull(cotangents))

        whole = jax.make_jaxpr(both)(avals, list(floating.values()))
        return cls._of_program(whole, len(avals), len(moving), list(floating))

    def __init__(self, values: ClosedJaxpr, count: int, pull: Jaxpr, *rest: Any):
        super().__init__(values, count, pull, *rest)
        self.tangents, self.rates = self.rates, self.tangents

    @cached_property
    def _linear(self) -> Jaxpr:
        # The pull is linear, or JAX says that the function has no forward mode.
        every = tuple(range(len(self.tangents)))
        return jaxpr_and_consts(transposed_program(self._given, len(self._places), every))[0]

    def _transpose(self, live: tuple[int, ...]) -> ClosedJaxpr:
        count, avals = len(self._places), [variable.aval for variable in self._given.invars]

        def pulled(*given: Any) -> Operands:
            at = dict(zip(live, given[count:], strict=True))
            cotangents = [at.get(number, zeros_like_aval(aval)) for number, aval in enumerate(self.rates)]
            return evaluate(self._given, [], [*given[:count], *cotangents])

        make = lambda: jax.make_jaxpr(pulled)(*avals[:count], *(self.rates[number] for number in live))
        return self.once(("transpose", live), make)
