"""A function one of whose custom rules holds a traced value, in a closure or as an argument.

Such a rule works only while the function is being traced. So for a derivative the function itself is run again, in one
trace with its tangents; or, if it has a backward pass, with the cotangents of all outputs, and the push is the
transpose of that pull. Push and pull are functions of this kind again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._programs import (
    CUSTOM_VJPS,
    Operands,
    any_equation,
    as_closed,
    cut,
    evaluate,
    jaxpr_and_consts,
    pulling,
    pushing,
    without_calls,
)
from .derivative import Derivative
from .known import remembering
from .masked import Masked, clean
from .shares import selecting_shares
from .unwrapped import without_double_where
from .vmap import Axes, Vmap
from .walk import AFFINE


@dataclasses.dataclass(frozen=True)
class Live:
    """A function that runs its rules.

    Attributes:
        function: From operands to outputs.
        held: How many of the operands it does not read, but holds already.
        moved: How many of the last operands are tangents or cotangents, of which it is linear.
    """

    function: Callable[[Operands], Operands]
    held: int
    moved: int = 0

    def derivative(self, jaxpr: Jaxpr, avals: list[Any], moving: Sequence[int], floating: Sequence[int]) -> Derivative:
        """The derivative along some operands; it saves nothing but what rules hold.

        Args:
            jaxpr: The function as it was traced.
            avals: Of its operands.
            moving: The numbers of the operands along which this is the derivative.
            floating: The numbers of the outputs that have derivatives.
        """
        is_pull = any_equation(jaxpr, lambda equation: equation.primitive.name in CUSTOM_VJPS)
        entering = [jaxpr.outvars[n].aval for n in floating] if is_pull else [avals[n] for n in moving]
        step = pulling if is_pull else pushing
        traced = jax.make_jaxpr(step(self.function, moving, floating))(avals, entering)
        selecting = jax.make_jaxpr(lambda *given: selecting_shares(traced)(list(given)))(*avals, *entering)
        opened = without_double_where(selecting)
        if self.moved:
            # Masks must not end where values are saved.
            opened = jax.make_jaxpr(_masked(opened, len(avals) - self.moved))(*avals, *entering)
        whole, consts = without_calls(opened)
        held, count = whole.invars[: len(consts)], len(jaxpr.outvars)
        values = cut(whole, whole.invars[: len(consts) + len(avals)], [*whole.outvars[:count], *held], whole.eqns)
        linear = cut(whole, whole.invars, whole.outvars[count:], whole.eqns)
        places = [*range(len(avals), len(avals) + len(consts)), *range(len(avals))]
        along = functools.partial(self._along, moving, floating, len(avals))
        given = as_closed(values, consts), count, linear, places, floating, [None] * len(avals)
        return Derivative(*given, AFFINE, is_pull, along)

    def _along(self, moving: Sequence[int], floating: Sequence[int], count: int, live: Sequence[int] | None) -> "Live":
        """The push, or the pull of some outputs; the function has this many operands."""
        step = pushing(self.function, moving, floating) if live is None else pulling(self.function, moving, live)
        push_or_pull = lambda given: step(given[:count], given[count:])[1]
        return Live(push_or_pull, self.held, self.moved + len(moving if live is None else live))

    def saving(self, values: ClosedJaxpr, count: int) -> "Live":
        """The same function with residuals, which a program computes after its outputs."""
        residuals = lambda operands: evaluate(*jaxpr_and_consts(values), jax.lax.stop_gradient(operands))[count:]
        return dataclasses.replace(self, function=lambda o: [*self.function(o)[:count], *residuals(o)])

    def batched(self, axes: Axes, kept: Sequence[bool], vmap: Vmap) -> "Live | None":
        """The same function, batched, unless what its rules hold is."""
        if any(axis is not None for axis in axes[: self.held]):
            return None
        batch = vmap.of(lambda *operands: self.function(list(operands)), axes, kept)
        return dataclasses.replace(self, function=lambda operands: batch(*operands))

    def holding(self, more: int) -> "Live":
        """The same function, of which a program holds more operands."""
        return dataclasses.replace(self, function=lambda o: self.function(o[more:]), held=self.held + more)

    def keeping(self, used: Sequence[bool]) -> "Live":
        """The same function without the outputs that nobody reads."""
        some = lambda o: [output for output, is_used in zip(self.function(o), used, strict=True) if is_used]
        return dataclasses.replace(self, function=some)


def _masked(closed: ClosedJaxpr, first: int) -> Callable[..., Operands]:
    """A program walked from tangents and cotangents, the first of which has this number."""
    jaxpr, consts = jaxpr_and_consts(closed)

    @remembering()
    def run(*given: Any) -> Operands:
        items = [Masked(value, True if number >= first else None) for number, value in enumerate(given)]
        return list(map(clean, AFFINE.through(jaxpr, consts, items)))

    return run
