"""Values and tangents in one pass, as `jax.jvp` computes them: a loop then saves nothing for its tangents.

JAX's derivative of the whole function is traced and walked with masks. Where the linear part is wanted on its own, as
in reverse mode, it is made by `linearize` instead.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from .._programs import LOOPS, Operands, any_equation, is_floating, jaxpr_and_consts, step_through, zeros_like_aval
from .competition import selecting
from .derivative import Derivative
from .masked import Masked, clean
from .walk import LINEAR


class Parts:
    """How a forward pass is taken apart: into values and a linear part, which is made when it is first needed.

    Args:
        operands: How many operands the function has; tangents come after these.
        count: How many outputs have derivatives. The tangents come after these, and residuals last.
        reached: Of which outputs.
        make: Makes a program of the outputs and of what the linear part needs, and the linear part.
    """

    def __init__(self, operands: int, count: int, reached: Sequence[int], make: Callable[[], tuple[Any, Derivative]]):
        self.operands, self.count, self.reached = operands, count, list(reached)
        self.make = functools.cache(make)

    def parted(self, results: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """The outputs of the function, and by their numbers the tangents."""
        last = self.count + len(self.reached)
        rates = dict(zip(self.reached, results[self.count : last], strict=True))
        return [*results[: self.count], *results[last:]], rates

    def joined(self, outputs: Sequence[Any], rates: Sequence[Any]) -> list[Any]:
        """The results of the forward pass, given the outputs of the function and what the linear part returns."""
        found = iter(rates)
        at = {number: next(found) for number, wire in enumerate(self.make()[1].outputs) if wire is not None}
        tangents = [at[n] if n in at else zeros_like_aval(jax.typeof(outputs[n])) for n in self.reached]
        return [*outputs[: self.count], *tangents, *outputs[self.count :]]

    def values(self, operands: Operands) -> tuple[Operands, Operands]:
        """The outputs of the function, and what the linear part needs beside the operands."""
        values, derivative = self.make()
        results = values.run(operands)
        count = len(results) - len(derivative.computed)
        return results[:count], results[count:]


def saves_in_loops(jaxpr: Jaxpr) -> bool:
    """Whether a linear program would need what a loop computes at every step.

    Elsewhere the compiler sees that values and tangents share what they compute, and tracing is cheaper in parts.
    """
    return any_equation(jaxpr, lambda equation: equation.primitive.name in LOOPS)


def forwarded(
    jaxpr: Jaxpr, operands: Operands, moving: Sequence[int], tangents: Operands
) -> tuple[Operands, list[Any | None]]:
    """The outputs of an open jaxpr without constants, and the tangent of each; None where none arrives."""

    def rates(operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        def function(*moved: Any) -> Operands:
            at = dict(zip(moving, moved, strict=True))
            return step_through(jaxpr, [], [at.get(n, operand) for n, operand in enumerate(operands)], selecting)

        outputs, found = jax.jvp(function, [operands[number] for number in moving], tangents)
        return outputs, [found[number] for number in floating]

    floating = [number for number, variable in enumerate(jaxpr.outvars) if is_floating(variable.aval)]
    traced = jax.make_jaxpr(rates)(list(map(jax.typeof, operands)), list(map(jax.typeof, tangents)))
    items = [*map(Masked, operands), *(Masked(tangent, True) for tangent in tangents)]
    found = LINEAR.through(*jaxpr_and_consts(traced), items)
    count = len(jaxpr.outvars)
    at = dict(zip(floating, found[count:], strict=True))
    reached = [None if n not in at or at[n].mask is None else clean(at[n]) for n in range(count)]
    return [item.value for item in found[:count]], reached
