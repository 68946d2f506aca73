"""The derivative of a function one of whose custom rules holds a traced value, in a closure or as an argument.

Such a rule works only while the function is being traced. So the function itself is run again under `jax.jvp` and
`jax.vjp`, and their programs are walked.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._programs import (
    Again,
    Operands,
    evaluate,
    is_floating,
    jaxpr_and_consts,
)
from .derivative import Derivative
from .known import remembering
from .linear import Wire, transposed
from .masked import Masked, clean
from .shares import selecting_shares
from .unwrapped import without_double_where
from .walk import AFFINE


class LiveDerivative(Derivative):
    """A derivative whose programs are JAX's, of the function itself.

    Args:
        again: Runs the function on operands.
        avals: The shapes of constants, which it knows itself, and of operands.
        moving: The numbers of those along which this is the derivative.
        outs: The shapes of the outputs.
        consts: How many constants there are.
        has_vjp: Whether a `custom_vjp` is called.
    """

    def __init__(
        self, again: Again, avals: Sequence[Any], moving: Sequence[int], outs: Sequence[Any], consts: int, has_vjp: bool
    ):
        self._again, self._moving, self._consts, self._has_backward_passes = again, moving, consts, has_vjp
        self.avals, self.computed, self.made = list(avals), [], {}
        self.numbers = [None] * len(self.avals)
        self.inputs = [Wire(avals[number]) for number in moving]
        self.outputs = [Wire(aval) if is_floating(aval) else None for aval in outs]

    def __repr__(self) -> str:
        return "{ the derivative of the function itself }"

    def _of_moving(self, operands: Operands) -> tuple[Any, Operands]:
        def function(*moved: Any) -> Operands:
            at = dict(zip(self._moving, moved, strict=True))
            outputs = self._again(*[at.get(n, o) for n, o in enumerate(operands)][self._consts :])
            return [output for output in outputs if is_floating(jax.typeof(output))]

        return function, [operands[number] for number in self._moving]

    def values(self, *operands: Any) -> Operands:
        """The outputs, as the forward passes of custom rules compute them."""

        def function(*moved: Any) -> tuple[Operands, Operands]:
            at = dict(zip(self._moving, moved, strict=True))
            outputs = self._again(*[at.get(n, o) for n, o in enumerate(operands)][self._consts :])
            return [output for output in outputs if is_floating(jax.typeof(output))], outputs

        return list(jax.vjp(function, *(operands[number] for number in self._moving), has_aux=True)[2])

    def _walked(self, traced: Any, operands: Operands, moved: Operands) -> Operands:
        jaxpr, _ = jaxpr_and_consts(traced)
        selecting = jax.make_jaxpr(lambda *o: selecting_shares(traced)(list(o)))(*(v.aval for v in jaxpr.invars))
        items = [*map(Masked, operands), *(Masked(value, True) for value in moved)]
        with remembering():
            found = AFFINE.through(*jaxpr_and_consts(without_double_where(selecting)), items)
            return list(map(clean, found))

    def push(self, *given: Any) -> Operands:
        operands, _, tangents = self.parted(given)

        def rates(operands: Operands, tangents: Operands) -> Operands:
            function, start = self._of_moving(operands)
            return jax.jvp(function, start, tangents)[1]

        if self._has_backward_passes:
            return self._walked(self._transposed(operands, tangents), operands, tangents)
        return self._walked(jax.make_jaxpr(rates)(operands, tangents), operands, tangents)

    def _transposed(self, operands: Operands, tangents: Operands) -> Any:
        """The push whose transpose the pull is: it is linear, or JAX says that it has no forward mode."""
        every = range(len(self.reached))
        pull = jax.make_jaxpr(lambda o, c: self._cotangents(every, o, c))(operands, self.reached)
        jaxpr, consts = jaxpr_and_consts(pull)

        def push(operands: Operands, tangents: Operands) -> Operands:
            run = lambda cotangents: evaluate(jaxpr, consts, [*operands, *cotangents])
            return transposed(run, self.reached, tangents)

        return jax.make_jaxpr(push)(operands, tangents)

    def pull(self, live: Sequence[int], *given: Any) -> Operands:
        operands, _, cotangents = self.parted(given)
        traced = jax.make_jaxpr(lambda o, c: self._cotangents(live, o, c))(operands, cotangents)
        return self._walked(traced, operands, cotangents)

    def _cotangents(self, live: Sequence[int], operands: Operands, cotangents: Operands) -> Operands:
        function, start = self._of_moving(operands)
        _, pull = jax.vjp(lambda *moved: [function(*moved)[number] for number in live], *start)
        return list(pull(cotangents))

    def pushed(self, given: Operands) -> Operands:
        return self.push(*given)

    def pull_at(self, live: Sequence[int], *given: Any) -> Operands:
        return self.pull(live, *given)

    def computed_at(self, operands: Operands) -> Operands:
        return []

    def numbers_of_computed(self) -> list[Any]:
        return []

    def plain(self, given: Operands) -> Operands:
        return self.pushed(given)
