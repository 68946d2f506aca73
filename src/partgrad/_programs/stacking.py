"""A function of stacked arrays, run as it is: each scan that reads one step by step runs in segments.

The function is not traced beforehand. It runs operation by operation in the trace that is current, such as that of
`jax.vjp`, so that its prints, branches on known numbers and side effects are what they were. Only what it does with a
stacked array is looked at: a scan, or a call, checkpoint or conditional with one inside, is rewritten. To anything else
the array is passed whole.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import set_current_trace, take_current_trace

from .._compat import PassingTrace, cached_property, is_eager
from .._trees import Steps, flatten
from .equations import Operands, explicit_sharding, jaxpr_and_consts, varying_axes
from .interpreter import evaluate
from .primitives import CALLS, CHECKPOINTS, named
from .same import Recent, hashable, lasts
from .stacked import Reading, Stacked, is_alike, reading, run

_LOOKED_INTO = CALLS | CHECKPOINTS | named("scan cond shard_map")
# Of functions that run outside of `jit`, whose calls JAX would compile again.
_programs: Recent[Any] = Recent(64)


class Selected(NamedTuple):
    """A leaf of an argument of which steps are selected; a pytree of the values.

    Attributes:
        position: Which argument it is in.
        number: The number of the leaf.
        steps: Which steps are selected.
        values: What stands there.
    """

    position: int | str
    number: int
    steps: Steps
    values: Sequence[Any]

    def fits(self, leaf: Any) -> bool:
        """Whether the leaf and the values are arrays of the same kind, whose leading axis is on every device."""
        base = jax.typeof(leaf)
        sharding = explicit_sharding(base)
        return (sharding is None or not any(sharding.spec[:1])) and all(
            own.dtype == base.dtype and not base.weak_type and varying_axes(own) == varying_axes(base)
            for own in map(jax.typeof, self.values)
        )


def stacking(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given first of which leaves of its arguments steps are selected (`Selected`)."""

    @functools.wraps(function, updated=())
    def stacked(selected: Sequence[Selected], /, *args: Any, **kwargs: Any) -> Any:
        with take_current_trace() as around:
            trace = StackedTrace(around)
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        for position in dict.fromkeys(own.position for own in selected):
            leaves, treedef = flatten(given[position])
            for own in selected:
                if own.position == position:
                    leaves[own.number] = StackedTracer(trace, leaves[own.number], own.steps, own.values)
            with set_current_trace(trace):
                given[position] = treedef.unflatten(leaves)
        args, kwargs = tuple(given[number] for number in range(len(args))), {name: given[name] for name in kwargs}
        with set_current_trace(trace):
            output = function(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(output)
        if any(map(trace.owns, leaves)):
            output = treedef.unflatten(map(trace.passed, leaves))
        trace.invalidate()
        return output

    return stacked


class StackedTracer(jax.core.Tracer):
    """An array of which steps are selected."""

    def __init__(self, trace: "StackedTrace", base: Any, steps: Steps, values: Sequence[Any]):
        super().__init__(trace, jax.typeof(base))
        self.base, self.steps, self.values = base, steps, values

    @cached_property
    def stacked(self) -> Stacked:
        """The steps, apart from the rest."""
        with set_current_trace(self._trace.parent_trace):
            return Stacked(self.base, self.steps.parts(self.base, self.values), self.steps.ranges)

    def changed(self, change: Callable[[Any], Any]) -> "StackedTracer":
        """The array with each number changed on its own."""
        return StackedTracer(self._trace, change(self.base), self.steps, list(map(change, self.values)))

    @cached_property
    def whole(self) -> Any:
        """The array."""
        with set_current_trace(self._trace.parent_trace):
            return self.steps.whole(self.base, self.values)

    def as_read(self, found: Reading) -> Any:
        """The array as a program reads it."""
        if not found.by_steps:
            return self.whole
        own = self.stacked
        return Stacked(own.base, own.parts, own.ranges, self.whole) if found.whole else own

    def to_concrete_value(self) -> Any:
        """The numbers, if they are known."""
        return self.whole.to_concrete_value() if isinstance(self.whole, jax.core.Tracer) else self.whole


class StackedTrace(PassingTrace):
    """Passes everything on to the trace around it, but looks into what reads a stacked array."""

    def owns(self, value: Any) -> bool:
        """Whether a value is a stacked array of this trace."""
        return isinstance(value, StackedTracer) and value._trace is self

    def passed(self, value: Any) -> Any:
        """A value as the trace around this one has it."""
        return value.whole if self.owns(value) else value

    def run_operation(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run an operation in the trace around this one."""
        if any(map(self.owns, operands)):
            if primitive.name in _LOOKED_INTO:
                return self._looked_into(primitive, operands, params)
            if is_alike(primitive, params):
                return operands[0].changed(lambda value: primitive.bind(value, **params))
        return primitive.bind(*map(self.passed, operands), **params)

    def run_function(self, function: Callable[..., Any], operands: Sequence[Any]) -> Operands:
        """Run a function that may close over stacked arrays in the trace around this one."""
        jaxpr, consts = jaxpr_and_consts(jax.make_jaxpr(function)(*map(jax.typeof, operands)))
        return run(jaxpr, *self._read(jaxpr, consts, operands))

    def _looked_into(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run an operation that may contain a scan over a stacked array."""
        bound = lambda *operands: primitive.bind(*operands, **params)
        avals = tuple(map(jax.typeof, operands))
        if any(hasattr(aval, "inner_aval") for aval in avals):
            # What is written to a reference has to be written once.
            return bound(*map(self.passed, operands))
        jaxpr, consts = jaxpr_and_consts(jax.make_jaxpr(bound)(*avals))
        consts, read = self._read(jaxpr, consts, operands)
        if not any(isinstance(own, Stacked) for own in (*consts, *read)):
            return bound(*read)
        if not is_eager(self.parent_trace):
            return run(jaxpr, consts, read)
        # A call that is made anew would be compiled anew.
        leaves, treedef = jax.tree.flatten(read)
        key = hashable((primitive, *sorted(params.items(), key=lambda item: item[0]), avals, treedef))
        make = lambda: jax.make_jaxpr(lambda *read: run(jaxpr, consts, list(read)))(*read)
        return evaluate(*jaxpr_and_consts(_programs.of(key, make, lasts)), leaves)

    def _read(self, jaxpr: Any, consts: Operands, operands: Sequence[Any]) -> tuple[Operands, Operands]:
        """Constants and operands as a jaxpr reads them."""
        one = lambda variable, value: value.as_read(reading(jaxpr, variable)) if self.owns(value) else value
        return list(map(one, jaxpr.constvars, consts)), list(map(one, jaxpr.invars, operands))
