"""Two passes over a linear program: where tangents come from, where they go to; and the program without dead edges.

Forward, an element of a wire is *fed* if a path leads to it from an input. Backward, it is *demanded* if a path leads
from it to an output. An edge is live if it is fed at one end and demanded at the other. `inf` or NaN on a live edge is
part of the answer; on a dead edge it is multiplied by zero, forward or in reverse, and `0 * inf` is NaN: there the
coefficient is replaced by a finite one. So the program, and JAX's transpose of it, keep two promises: a tangent is
exactly zero where it is not fed, and a cotangent where it is not demanded.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import Operands, is_floating, varying_like, zeros_like_aval
from .mask import Mask, either, gathered, on_all_devices
from .program import LinearProgram, Step, Wire

Emit = Callable[[Sequence[Any]], Operands]


class Guard:
    """What replaces the coefficients of dead edges.

    Args:
        protected: Runs a jaxpr on operands as `double_where` does, for what is differentiated a second time.
    """

    def __init__(self, protected: Callable[[Any, Operands], Operands]):
        self.protected = protected

    def coefficient(self, value: Any, needed: Mask, filler: Any = None) -> Any:
        """A known operand, with the filler, or else ones, where no live edge needs it."""
        if needed is True or is_constant(value):
            return value
        # A Python number does not change a weak type.
        filler = 1 if filler is None else varying_like(filler, jax.typeof(value))
        return jnp.where(needed, value, filler)

    def whole(self, step: Step) -> Step:
        """A step all of whose known operands are needed as they are."""
        return step.with_known([self.coefficient(value, True) for value in step.known])


class Recorder(Guard):
    """A guard inside a loop or a branch: what comes from outside is replaced there, once, by what is recorded here.

    Args:
        outside: The guard of the program that the loop or branch belongs to.
        values: The values that come from outside.

    Attributes:
        needed: For each of them, the mask of the elements that a live edge needs.
        fillers: For each of them, what stands for the others, or None for ones.
    """

    def __init__(self, outside: Guard, values: Sequence[Any]):
        super().__init__(outside.protected)
        self._values = values
        self._number = {id(value): number for number, value in enumerate(values)}
        self.needed: list[Mask] = [False] * len(values)
        self.fillers: list[Any] = [None] * len(values)

    def coefficient(self, value: Any, needed: Mask, filler: Any = None) -> Any:
        """Record the need of a value from outside; replace any other at once."""
        number = self._number.get(id(value))
        if number is None or is_constant(value):
            return super().coefficient(value, needed, filler)
        needed = gathered(needed, jnp.shape(value))
        self.needed[number] = either(self.needed[number], needed)
        self.fillers[number] = self.fillers[number] if filler is None else filler
        return value

    def replaced(self, guard: Guard) -> list[Any]:
        """The values from outside, with fillers where nothing recorded needs them."""
        numbers = [self._number[id(value)] for value in self._values]
        return [
            guard.coefficient(v, self.needed[n], self.fillers[n]) for v, n in zip(self._values, numbers, strict=True)
        ]


def is_constant(value: Any) -> bool:
    """Whether a value is not floating, or a finite number that the program spells out."""
    if isinstance(value, bool | int | float | complex | np.number | np.ndarray):
        return bool(np.all(np.isfinite(value)))
    return not is_floating(value)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How masks go through the steps of a primitive.

    Attributes:
        fed: From a step and the masks of its operands (`False` for known ones) to those of its results.
        trim: From a step, the masks of its operands, the demanded masks of its results and a guard to the demanded
            masks of its wires and a function that runs the step without its dead edges. That function is linear:
            everything else is computed before.
    """

    fed: Callable[[Step, list[Mask]], list[Mask]]
    trim: Callable[[Step, list[Mask], list[Mask], Guard], tuple[list[Mask], Emit]]


# By the name of the primitive: JAX does not export all of them as objects. The modules of rules fill it.
RULES: dict[str, Rule] = {}
UNKNOWN = "unknown"
# Those that work element by element without being linear.
POINTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp", "cos"),
        *("cosh", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "ne", "nextafter", "not", "or", "pow"),
        *("rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor"),
    )
)


def rule_of(step: Step) -> Rule:
    """The rule for a step; for a primitive without one, the rule that assumes least."""
    return RULES.get(step.name, RULES[UNKNOWN])


def feed(program: LinearProgram, fed: Sequence[Mask]) -> dict[Wire, Mask]:
    """The mask of every wire to which a path leads, given those of the inputs."""
    masks = dict(zip(program.inputs, fed, strict=True))
    for step in program.steps:
        given = [masks[operand] if isinstance(operand, Wire) else False for operand in step.operands]
        none = all(mask is False for mask in given)
        results = [False] * len(step.results) if none else fed_rule(step).fed(step, given)
        masks.update(zip(step.results, results, strict=True))
    return masks


def outputs_fed(program: LinearProgram, fed: Sequence[Mask]) -> list[Mask]:
    """The masks of a program's outputs, given those of its inputs."""
    masks = feed(program, fed)
    return [masks[output] if isinstance(output, Wire) else False for output in program.outputs]


def fed_rule(step: Step) -> Rule:
    """The rule by which a step passes masks on, in a program that need not be linear."""
    # An index that depends on a tangent: not linear, but the backward pass of a `custom_vjp` may be anything.
    steered = any(not is_floating(wire.aval) for wire in step.wires) and step.name not in POINTWISE
    return RULES[UNKNOWN] if steered else rule_of(step)


def trim(
    program: LinearProgram, fed: dict[Wire, Mask], demanded: Sequence[Mask], guard: Guard
) -> tuple[list[Mask], Emit]:
    """The demanded masks of a program's inputs, and a function that runs it without its dead edges.

    Args:
        program: A linear program.
        fed: The masks of its wires.
        demanded: A mask for each output.
        guard: What replaces coefficients.
    """
    masks: dict[Wire, Mask] = {}

    def demand(wire: Any, mask: Mask) -> None:
        if isinstance(wire, Wire):
            masks[wire] = either(masks.get(wire, False), on_all_devices(mask, wire.aval))

    for output, mask in zip(program.outputs, demanded, strict=True):
        demand(output, mask)
    emits: list[Emit | None] = []
    for step in reversed(program.steps):
        wanted = [masks.get(result, False) for result in step.results]
        given = [fed[operand] if isinstance(operand, Wire) else False for operand in step.operands]
        if all(mask is False for mask in wanted) or all(mask is False for mask in given):
            emits.append(None)
            continue
        operands, emit = rule_of(step).trim(step, given, wanted, guard)
        emits.append(emit)
        for wire, mask in zip(step.wires, operands, strict=True):
            demand(wire, mask)
    known = [output if isinstance(output, Wire) else guard.coefficient(output, True) for output in program.outputs]
    run = _runner(program, emits[::-1], known)
    return [masks.get(wire, False) for wire in program.inputs], run


def _runner(program: LinearProgram, emits: list[Emit | None], outputs: list[Any]) -> Emit:
    def run(tangents: Sequence[Any]) -> Operands:
        values = dict(zip(program.inputs, tangents, strict=True))
        for step, emit in zip(program.steps, emits, strict=True):
            if emit is None:
                results = [zeros_like_aval(wire.aval) for wire in step.results]
            else:
                results = emit([values[wire] for wire in step.wires])
            values.update(zip(step.results, results, strict=True))
        return [values[output] if isinstance(output, Wire) else output for output in outputs]

    return run
