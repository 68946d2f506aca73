"""Values and tangents in one pass, as `jax.jvp` computes them: a loop then saves nothing for its tangents.

JAX's derivative of the whole function is traced and walked with masks. Where the linear part is wanted on its own, as
in reverse mode, `derivative` takes the same program apart.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._programs import Operands, jaxpr_and_consts, zeros_like_aval
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
        at = dict(zip(self.make()[1].reached, rates, strict=True))
        tangents = [at[n] if n in at else zeros_like_aval(jax.typeof(outputs[n])) for n in self.reached]
        return [*outputs[: self.count], *tangents, *outputs[self.count :]]

    def values(self, operands: Operands) -> tuple[Operands, Operands]:
        """The outputs of the function, and what the linear part needs beside the operands."""
        values, derivative = self.make()
        results = values.run(operands)
        count = len(results) - len(derivative.computed)
        return results[:count], results[count:]


def forwarded(
    whole: ClosedJaxpr, floating: Sequence[int], operands: Operands, tangents: Operands
) -> tuple[Operands, dict[int, Any]]:
    """The outputs of a traced derivative, walked with masks, and by their numbers the tangents that arrive."""
    items = [*map(Masked, operands), *(Masked(tangent, True) for tangent in tangents)]
    found = LINEAR.through(*jaxpr_and_consts(whole), items)
    count = len(found) - len(floating)
    rates = zip(floating, found[count:], strict=True)
    return [item.value for item in found[:count]], {n: clean(rate) for n, rate in rates if rate.mask is not None}
