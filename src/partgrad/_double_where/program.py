"""A traced function with a derivative that flows along taken paths only, as a primitive of JAX.

`call_p` is such a function, and `linear_p` the linear part of its derivative: its value is the push, its transpose the
pull. What JAX does with them is in `primitives`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from .._compat import cached_property
from .._programs import (
    CALLS,
    LOOPS,
    OWN,
    Operands,
    any_equation,
    as_closed,
    evaluate,
    holds_tracers,
    is_floating,
    jaxpr_and_consts,
    made_once,
    named,
    pushing,
    with_constants_as_inputs,
    with_outputs,
    without_dead_code,
)
from .competition import selecting
from .derivative import Derivative
from .forward import Parts, forwarded
from .known import remember, remembering
from .live import Live
from .unwrapped import without_double_where
from .vmap import Axes, Vmap, batched_outputs

call_p, linear_p = map(Primitive, OWN)
call_p.multiple_results = linear_p.multiple_results = True

# No step of these, of their derivatives, or of the transposes of these, makes a mask other than True.
_PLAIN = CALLS | named(
    """add add_any sub neg mul div exp exp2 expm1 log log1p log2 tanh logistic sin cos sqrt rsqrt cbrt square
    integer_pow erf dot_general reduce_sum broadcast_in_dim reshape transpose squeeze expand_dims
    convert_element_type copy copy_p stop_gradient sinh cosh iota"""
)


class Program:
    """A jaxpr as a function whose derivative flows along taken paths only.

    It may have a fast form too, of *hints*: values that were computed from its operands before, the residuals that a
    function leaves to its derivative. Only the value is computed from them. A derivative starts from the operands
    again, because masks must not end where values are saved.

    Args:
        trace: Makes the jaxpr, when it is first needed.
        numbers: What is known of the numbers of its operands, None for each of which nothing is.
        count: How many outputs have derivatives; the others are residuals. None for all.
        fast: The same of operands and hints.
        live: The function itself, if it is run again for its derivative.
        parts: Takes it apart, if it is a forward pass: of operands and tangents, to outputs, tangents and residuals.
    """

    def __init__(
        self,
        trace: Callable[[], Any],
        numbers: Sequence[Any] = (),
        count: int | None = None,
        fast: ClosedJaxpr | None = None,
        live: Live | None = None,
        parts: Parts | None = None,
    ):
        self._trace, self._numbers, self._count, self._fast = trace, list(numbers), count, fast
        self._live, self.parts = live, parts

    @cached_property
    def _traced(self) -> tuple[Jaxpr, Operands]:
        # A custom rule may call a function under `double_where`, which shows when a derivative is traced.
        jaxpr, consts = jaxpr_and_consts(without_double_where(self._trace()))
        return without_dead_code(with_constants_as_inputs(jaxpr) if consts else jaxpr), consts

    def shown(self, count: int) -> Any:
        """The jaxpr of this many operands, hints among them or not."""
        if self._fast is not None and len(jaxpr_and_consts(self._fast)[0].invars) == count:
            return self._fast
        return self._own

    @cached_property
    def _own(self) -> ClosedJaxpr:
        jaxpr, consts = self._traced
        return as_closed(jaxpr, consts)

    @cached_property
    def avals(self) -> list[Any]:
        """The shapes of the operands."""
        jaxpr, consts = self._traced
        return [variable.aval for variable in jaxpr.invars[len(consts) :]]

    @property
    def numbers(self) -> list[Any]:
        """What is known of the numbers of the operands."""
        return [*self._numbers, *[None] * (len(self.avals) - len(self._numbers))]

    def run(self, operands: Operands, hints: Sequence[Any] = ()) -> Operands:
        """The outputs, with a derivative that flows along taken paths only."""
        jaxpr, consts = self._traced if self._fast is None else (None, [])
        if jaxpr is not None and any(isinstance(const, jax.core.Tracer) for const in consts):
            # A traced value that a rule holds has to be seen by what transforms this call.
            live = self._live and self._live.holding(len(consts))
            numbers = [*[None] * len(consts), *self.numbers]
            held = Program(lambda: as_closed(jaxpr), numbers, self._count, live=live)
            return held.run([*consts, *operands])
        given = [*operands, *hints]
        shown = self.shown(len(given))
        if self._fast is None and _is_plain(jaxpr_and_consts(shown)[0]):
            return evaluate(*jaxpr_and_consts(shown), given)
        return call_p.bind(*given, program=self, hints=len(hints), jaxpr=shown)

    def changed(self, run: Callable[..., Operands], operands: Operands) -> "Program":
        """The same function of operands like the given ones, with its jaxpr run in another way."""
        jaxpr, consts = jaxpr_and_consts(self._own)
        traced = jax.make_jaxpr(lambda *operands: run(jaxpr, consts, list(operands)))(*operands)
        return Program(lambda: traced, self._numbers, self._count)

    @made_once
    def keeping(self, used: tuple[bool, ...]) -> "Program":
        """The same function without the outputs that nobody reads."""
        own, fast = (None if closed is None else with_outputs(closed, used) for closed in (self._own, self._fast))
        count = None if self._count is None else sum(used[: self._count])
        return Program(lambda: own, self._numbers, count, fast, self._live and self._live.keeping(used))

    @cached_property
    def _holds(self) -> bool:
        """Whether the function has to be run again, because a rule holds a value of its trace."""
        return self._live is not None and holds_tracers(self._traced[0])

    @made_once
    def derivative(self, moving: tuple[int, ...]) -> "tuple[Program, Derivative]":
        """The values with residuals, as a program, and the linear part along some operands."""
        if self._live is not None and self._holds and min(moving) >= self._live.held:
            derivative = self._live.derivative(self._traced[0], self.avals, moving, self._floating)
        else:
            derivative = Derivative.of(self._jvp(moving), len(moving), self._floating, self.numbers)
        # After a derivative, the outputs are those of the forward passes of custom rules.
        live = self._live and self._live.saving(derivative.values, self.count)
        return Program(lambda: derivative.values, self._numbers, self.count, live=live), derivative

    @made_once
    def _jvp(self, moving: tuple[int, ...]) -> ClosedJaxpr:
        """From operands and tangents to outputs and their tangents; competitions select."""
        jaxpr, consts = self._traced
        function = lambda operands: selecting(jaxpr, [*consts, *operands])
        trace = jax.make_jaxpr(pushing(function, moving, self._floating))
        return trace(self.avals, [self.avals[number] for number in moving])

    @property
    def _floating(self) -> list[int]:
        """The numbers of the outputs that have derivatives and a dtype that has any."""
        return [n for n, variable in enumerate(self._traced[0].outvars[: self.count]) if is_floating(variable.aval)]

    @cached_property
    def has_forward_pass(self) -> bool:
        """Whether values and tangents are computed in one pass, where no linear part is asked for.

        Outside of loops the compiler sees that they share what they compute, and tracing is cheaper in parts.
        """
        return not self._holds and any_equation(self._traced[0], lambda e: e.primitive.name in LOOPS)

    @made_once
    def forward(self, moving: tuple[int, ...]) -> "tuple[Program, Parts]":
        """From operands and tangents to outputs, tangents and residuals, and how that is taken apart."""
        reached, first, count = list[int](), len(self.avals), self.count
        whole = self._jvp(moving)

        def run(*given: Any) -> Operands:
            with remembering():
                for operand, known in zip(given, self.numbers, strict=False):
                    remember(operand, known)
                outputs, rates = forwarded(whole, self._floating, list(given[:first]), list(given[first:]))
            reached[:] = rates
            return [*outputs[:count], *rates.values(), *outputs[count:]]

        closed = jax.make_jaxpr(run)(*self.avals, *(self.avals[number] for number in moving))
        parts = Parts(first, count, reached, lambda: self.derivative(moving))
        return Program(lambda: closed, self.numbers, count + len(reached), parts=parts), parts

    @property
    def count(self) -> int:
        """How many outputs have derivatives."""
        return len(self._traced[0].outvars) if self._count is None else self._count

    @made_once
    def batched(self, axes: Axes, vmap: Vmap) -> "tuple[Program, list[bool]]":
        """The same function, batched, and which of its outputs have the axis; `axes` may include those of hints."""
        count = len(axes)
        is_fast = self.shown(count) is self._fast
        of_operands = axes[: len(self.avals)] if is_fast else axes
        fast = vmap.of_jaxpr(self._fast, axes)[0] if is_fast else None
        numbers = [None if axis is not None else known for known, axis in zip(self._numbers, axes, strict=False)]
        trace, outs = lambda: vmap.of_jaxpr(self._own, of_operands)[0], batched_outputs(self.shown(count), axes)
        parts = None
        if self.parts is not None:
            make = functools.partial(self._batched_parts, self.parts, axes, vmap)
            parts = Parts(self.parts.operands, self.parts.count, self.parts.reached, make)
        live = self._live and self._live.batched(of_operands, outs, vmap)
        return Program(trace, numbers, self._count, fast, live, parts), outs

    @staticmethod
    def _batched_parts(parts: Parts, axes: Axes, vmap: Vmap) -> "tuple[Program, Derivative]":
        values, derivative = parts.make()
        batched, outs = values.batched(axes[: parts.operands], vmap)
        computed = [0 if is_batched else None for is_batched in outs[len(outs) - len(derivative.computed) :]]
        return batched, derivative.batched((*axes, *computed), vmap)[0]


@made_once
def push_of(derivative: Derivative) -> Program:
    """From operands and tangents to the tangents of the outputs."""
    trace = lambda: jax.make_jaxpr(derivative.push())(*derivative.avals, *derivative.tangents)
    live = derivative.live and derivative.live(None)
    return Program(trace, derivative.numbers, live=live)


@made_once
def pull_of(derivative: Derivative, live: tuple[int, ...]) -> Program:
    """From operands and the cotangents of some outputs (and computed residuals) to the cotangents of the inputs."""
    avals = [*derivative.avals, *(derivative.rates[number] for number in live)]
    trace = lambda: jax.make_jaxpr(derivative.pull(live))(*avals)
    again = derivative.live and derivative.live([derivative.reached[number] for number in live])
    return Program(trace, derivative.numbers, fast=derivative.fast_pull(live), live=again)


def _is_plain(jaxpr: Jaxpr) -> bool:
    """Whether nothing is selected in a program: it is left to JAX."""
    return not any_equation(jaxpr, lambda equation: equation.primitive.name not in _PLAIN)
