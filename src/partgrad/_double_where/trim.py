"""Two passes over a linear program find its dead edges: where tangents come from, and where they go.

Forward, an element of a wire is *fed* if a path leads to it from an input. Backward, it is *demanded* if a path leads
from it to an output. An edge is live if it is fed at one end and demanded at the other. `inf` or NaN on a live edge is
part of the answer; on a dead edge it is multiplied by zero, forward or in reverse, and `0 * inf` is NaN: there the
coefficient is replaced by a finite one. So the program, and JAX's transpose of it, keep two promises: a tangent is
exactly zero where it is not fed, and a cotangent where it is not demanded.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import (
    KINDS,
    Operands,
    adds_a_constant,
    inner_jaxprs,
    is_floating,
    mesh_elsewhere,
    named,
    varying_like,
    zeros_like_aval,
)
from .known import is_safe_outside, numbers_of
from .mask import Mask, Shape, either, full_like, gathered, on_all_devices, on_mesh_of, spelled_out, spread
from .program import LinearProgram, Step, Wire

Emit = Callable[[Sequence[Any]], Operands]
# The filler of a known operand that stays unchanged.
CUT = object()


class Protected(Protocol):
    """A jaxpr as a function whose derivative flows along taken paths only."""

    def __call__(self, *operands: Any) -> Operands:
        """Its outputs."""
        ...

    def demanded(self, operands: Operands) -> list[Mask]:
        """For each operand, the elements from which a path leads to an output."""
        ...


class Guard:
    """What replaces the coefficients of dead edges.

    Args:
        protected: Makes a function of a jaxpr, for what is differentiated a second time.
        cuts: Whether known operands may stay as they are where no live edge needs them.
    """

    def __init__(self, protected: Callable[[Any], Protected], cuts: bool = True):
        self.protected, self.cuts = protected, cuts

    def coefficient(self, value: Any, needed: Mask, filler: Any = None, divides: bool = False) -> Any:
        """A known operand, with the filler (ones by default) where no live edge needs it."""
        is_safe = not divides and is_safe_outside(value, needed)
        if needed is True or is_safe or is_constant(value, divides):
            return value
        if filler is CUT:
            return self.cut(value, needed)
        if filler is None and not isinstance(needed, bool) and not jax.typeof(value).weak_type:
            mask, value = _of_one_shape(needed, value)
            return jax.lax.select(mask, value, varying_like(jax.lax.full_like(value, 1), jax.typeof(value)))
        # A Python number does not change a weak type.
        filler = 1 if filler is None else varying_like(filler, jax.typeof(value))
        return jnp.where(needed, value, filler)

    def cut(self, value: Any, needed: Mask) -> Any:
        """A known operand, unchanged, whose own derivative is followed only where a live edge needs it."""
        if isinstance(needed, bool) or is_constant(value):
            return value
        # What lanes share is written out for each, so that dead lanes have no say in it. XLA undoes this.
        mask, value = _of_one_shape(needed, value)
        return jax.lax.select(mask, value, jax.lax.stop_gradient(value))

    def is_left_to_steps(self, value: Any, needed: Mask, filler: Any) -> bool:
        """Whether the steps of a loop replace a scanned operand, which takes no copy of it."""
        return not (filler is CUT or isinstance(needed, bool) or is_constant(value, True))

    def is_apart(self, value: Any, shape: Shape) -> bool:
        """Whether the derivatives of an operand's elements stay apart, lane by lane of a result."""
        return True

    def whole(self, step: Step) -> Step:
        """A step all of whose known operands are needed as they are."""
        return step.with_known([self.coefficient(value, True) for value in step.known])


class Recorder(Guard):
    """A guard inside a loop or a branch: what comes from outside is replaced there, once, by what is recorded here.

    Args:
        outside: The guard of the program that the loop or branch belongs to.
        values: The values that come from outside.
        cuts: Whether a value from outside may stay as it is where no live edge needs it.
        apart: The numbers of values that are replaced inside nevertheless, by each step that needs them.
        joined: The numbers of values that are never replaced inside, where several steps need them.

    Attributes:
        needed: For each of them, the mask of the elements that a live edge needs.
        fillers: For each of them, what stands for the others: None for ones, or `CUT`.
        clashing: The numbers of those that have to be kept apart, because steps need them at different elements.
    """

    def __init__(
        self,
        outside: Guard,
        values: Sequence[Any],
        cuts: bool = False,
        apart: Set[int] = frozenset(),
        joined: Set[int] = frozenset(),
    ):
        super().__init__(outside.protected, cuts)
        self._values, self._apart, self._joined = values, apart, joined
        self.clashing: set[int] = set()
        self._number = {id(value): number for number, value in enumerate(values)}
        self.needed: list[Mask] = [False] * len(values)
        self.fillers: list[Any] = [CUT] * len(values)

    def coefficient(self, value: Any, needed: Mask, filler: Any = None, divides: bool = False) -> Any:
        """Record the need for a value from outside; replace any other at once."""
        number = self._number.get(id(value))
        if number is not None and number in self._apart:
            self.needed[number] = True
            number = None
        if number is None:
            return super().cut(value, needed) if filler is CUT else super().coefficient(value, needed, filler, divides)
        if is_constant(value, True):
            return value
        # What is scanned gets an axis in front.
        needed, old = spread(gathered(needed, jnp.shape(value)), jnp.shape(value)), self.fillers[number]
        if self.needed[number] is not False and self.needed[number] is not needed and number not in self._joined:
            self.clashing.add(number)
        self.fillers[number] = one_filler(old, filler)
        self.needed[number] = either(self.needed[number], needed)
        return value

    def is_left_to_steps(self, value: Any, needed: Mask, filler: Any) -> bool:
        """No: the outermost loop replaces it."""
        return False

    def cut(self, value: Any, needed: Mask) -> Any:
        """Record the need for a value from outside; cut any other at once."""
        return self.coefficient(value, needed, CUT)

    def is_apart(self, value: Any, shape: Shape) -> bool:
        """Whether the derivatives of an operand's elements stay apart, lane by lane of a result."""
        return self.cuts and (id(value) not in self._number or jnp.shape(value) == shape)

    def replaced(self, guard: Guard) -> list[Any]:
        """The values from outside, with fillers where nothing recorded needs them."""
        numbers = [self._number[id(value)] for value in self._values]
        return [
            guard.coefficient(v, self.needed[n], self.fillers[n], True)
            for v, n in zip(self._values, numbers, strict=True)
        ]


def one_filler(one: Any, other: Any) -> Any:
    """What does for two steps that read the same value: it stays unchanged only if both let it."""
    return one if other is CUT or (other is None and one is not CUT) else other


def _of_one_shape(mask: Any, value: Any) -> tuple[Any, Any]:
    shape = np.broadcast_shapes(mask.shape, jnp.shape(value))
    value = spelled_out(value, shape)
    return varying_like(spelled_out(mask, shape), jax.typeof(value)), value


def only(mask: Mask, value: Any) -> Any:
    """A tangent where a mask says so, and zero elsewhere."""
    if mask is True:
        return value
    zeros = varying_like(jax.lax.full_like(value, 0), jax.typeof(value))
    return zeros if mask is False else jax.lax.select(full_like(mask, jax.typeof(value)), value, zeros)


def is_constant(value: Any, divides: bool = False) -> bool:
    """Whether a value is not floating, or finite whatever the data are, and so is its reciprocal if it divides."""
    numbers = numbers_of(value)
    if numbers is None or not is_floating(numbers):
        return not is_floating(jax.typeof(value))
    return bool(np.all(np.isfinite(numbers)) and (not divides or np.all(numbers)))


Loosely = Callable[[Step, list[Mask], list[Mask], Guard], tuple[list[Mask], Emit, bool] | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How masks go through the steps of a primitive.

    Attributes:
        fed: Takes a step and the masks of its operands (`False` for known ones); returns those of its results.
        trim: Takes a step, the masks of its operands, the demanded masks of its results and a guard; returns the
            demanded masks of its wires and a function that runs the step without its dead edges. That function is
            linear: everything else is computed before.
        loosely: Like `trim`, for a result that may be anything where it is not demanded. It also returns whether the
            cotangent of the wire is then anything where that is not demanded. None where it does not apply.
        cleans: Whether `trim` takes of each wire only what is demanded.
    """

    fed: Callable[[Step, list[Mask]], list[Mask]]
    trim: Callable[[Step, list[Mask], list[Mask], Guard], tuple[list[Mask], Emit]]
    loosely: Loosely | None = None
    cleans: bool = False


# By the name of the primitive, because JAX does not export all of them as objects. The modules of rules fill it.
RULES: dict[str, Rule] = {}
UNKNOWN = "unknown"
# Elementwise primitives that are not linear.
POINTWISE = (
    KINDS["elementwise"] | KINDS["test"] | KINDS["flat"] | named("and clamp max min not or select_n xor")
) - named("polynomial stop_gradient")


def rule_of(step: Step) -> Rule:
    """The rule for a step; for a primitive without one, the rule with the fewest assumptions."""
    return RULES.get(step.name, RULES[UNKNOWN])


def feed(program: LinearProgram, fed: Sequence[Mask]) -> dict[Wire, Mask]:
    """The mask of every wire that a path leads to, given those of the inputs."""
    masks = dict(zip(program.inputs, fed, strict=True))
    for step in program.steps:
        masks.update(zip(step.results, results_fed(step, masks), strict=True))
    return masks


def results_fed(step: Step, masks: Mapping[Wire, Mask]) -> list[Mask]:
    """The masks of a step's results, given those of the wires."""
    given = [masks[operand] if isinstance(operand, Wire) else False for operand in step.operands]
    if all(mask is False for mask in given):
        return [False] * len(step.results)
    (results,) = on_mesh_of(step.equation, lambda given: (fed_rule(step).fed(step, given),), given)
    return results


def outputs_fed(program: LinearProgram, fed: Sequence[Mask]) -> list[Mask]:
    """The masks of a program's outputs, given those of its inputs."""
    masks = feed(program, fed)
    return [masks[output] if isinstance(output, Wire) else False for output in program.outputs]


def fed_rule(step: Step) -> Rule:
    """The rule with which a step passes masks on, in a program that need not be linear."""
    # An index that depends on a tangent is not linear, but the backward pass of a `custom_vjp` may be anything.
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
    trimming = _Trimming(program, guard)
    for output, mask in zip(program.outputs, demanded, strict=True):
        trimming.demand(output, mask)
    emits: list[Emit | None] = []
    for step in reversed(program.steps):
        wanted = [trimming.masks.get(result, False) for result in step.results]
        given = [fed[operand] if isinstance(operand, Wire) else False for operand in step.operands]
        dead = all(mask is False for mask in wanted) or all(mask is False for mask in given)
        emits.append(None if dead else trimming.step(step, given, wanted))
    emits = _without_zeros(program, emits[::-1])
    outputs = [guard.coefficient(output, True) for output in program.outputs]
    masks = [trimming.masks.get(wire, False) for wire in program.inputs]
    unclean = [wire in trimming.unclean for wire in program.inputs]
    run = _runner(program, emits, outputs)
    loose = trimming.loosened(program)
    if not loose.isdisjoint(output for output in program.outputs if isinstance(output, Wire)):
        of_output = lambda output: trimming.masks[output] if isinstance(output, Wire) and output in loose else True
        run = _cleaned_after(run, list(map(of_output, program.outputs)))
    return masks, _cleaned_before(run, masks, unclean) if any(unclean) else run


# Primitives whose arithmetic keeps elements apart that go into different elements of the result ...
_APART = named(
    """add add_any broadcast_in_dim convert_element_type copy div expand_dims imag mul neg real reduce_sum reshape
    select_n squeeze sub transpose"""
)
# ... and those where each element of the operand goes into one element of the result.
_ONE_TO_ONE = _APART - {"broadcast_in_dim", "select_n"}


class _Trimming:
    """The backward pass over a program: what is demanded of its wires, and which of them are unclean.

    In a chain of products that ends in a selection, each coefficient could be replaced where nothing selects it. It
    costs less to leave the coefficients alone and to select once from the tangent, at the upstream end of the chain.
    In between, a tangent and a cotangent may be anything where the tangent is not demanded.

    Attributes:
        masks: The demanded masks of the wires.
        unclean: The wires whose cotangent may be anything where they are not demanded.
    """

    def __init__(self, program: LinearProgram, guard: Guard):
        self._guard = guard
        self.masks: dict[Wire, Mask] = {}
        self.unclean: set[Wire] = set()
        atoms = [*program.outputs, *(operand for step in program.steps for operand in step.operands)]
        self._uses = Counter(atom for atom in atoms if isinstance(atom, Wire))
        # Wires that something reads as a whole: their tangents have to be right even where they are not demanded.
        self._read_whole: set[Wire] = set()
        self._loosened: set[Wire] = set()

    def demand(self, wire: Any, mask: Mask) -> None:
        """Add to what is demanded of a wire."""
        if isinstance(wire, Wire):
            self.masks[wire] = either(self.masks.get(wire, False), on_all_devices(mask, wire.aval))

    def step(self, step: Step, given: list[Mask], wanted: list[Mask]) -> Emit:
        """A step without its dead edges, given the masks of its operands and the demanded ones of its results."""
        operands, emit = on_mesh_of(step.equation, functools.partial(self._trimmed, step), given, wanted)
        for wire, mask in zip(step.wires, operands, strict=True):
            self.demand(wire, mask)
        return emit

    def _trimmed(self, step: Step, given: list[Mask], wanted: list[Mask]) -> tuple[list[Mask], Emit]:
        rule, loose, found = rule_of(step), self._is_loose(step, wanted), None
        if loose and rule.loosely is not None and not isinstance(wanted[0], bool):
            found = rule.loosely(step, given, wanted, self._guard)
        operands, emit, soils = found or (*rule.trim(step, given, wanted, self._guard), False)
        if found:
            self._loosened.update(step.results)
        if not (rule.cleans or (found and not soils) or (loose and self._keeps_apart(step))):
            self._read_whole.update(step.wires)
        if not self.unclean.isdisjoint(step.results):
            if soils or self._hands_on(step, operands):
                soils = True
            else:
                emit = _cleaned_after(emit, wanted)
        if soils and self._uses[step.wires[0]] == 1:
            self.unclean.add(step.wires[0])
        elif soils:
            emit = _cleaned_before(emit, operands, [True])
        return operands, emit

    def loosened(self, program: LinearProgram) -> set[Wire]:
        """The wires whose tangent may be anything where it is not demanded."""
        loose = set(self._loosened)
        for step in program.steps:
            if not rule_of(step).cleans and not loose.isdisjoint(step.wires):
                loose.update(step.results)
        return loose

    def _is_loose(self, step: Step, wanted: list[Mask]) -> bool:
        """Whether the result may be anything where it is not demanded."""
        return len(step.results) == 1 and (wanted[0] is True or step.results[0] not in self._read_whole)

    def _keeps_apart(self, step: Step) -> bool:
        steered = step.name == "select_n" and isinstance(step.operands[0], Wire)
        return step.name in _APART and not steered and self._are_apart(step)

    def _are_apart(self, step: Step) -> bool:
        """Whether the derivatives of a step's coefficients stay apart, element by element."""
        factors = step.known if step.name in {"mul", "div"} else []
        return all(is_constant(value) or self._guard.is_apart(value, step.shape) for value in factors)

    def _hands_on(self, step: Step, operands: list[Mask]) -> bool:
        one_to_one = step.name in _ONE_TO_ONE and len(step.wires) == 1 and not isinstance(operands[0], bool)
        same = step.name not in {"mul", "div"} or step.wires[0].shape == step.shape
        return one_to_one and same and self._are_apart(step)


def _without_zeros(program: LinearProgram, emits: list[Emit | None]) -> list[Emit | None]:
    """The functions of the steps, without those that make zeros of the zeros of dead steps."""
    # JAX refuses to run a custom backward pass on constants.
    zeros: set[Wire] = set()
    found: list[Emit | None] = []
    for step, emit in zip(program.steps, emits, strict=True):
        found.append(None if zeros.issuperset(step.wires) and _keeps_zeros(step) else emit)
        if found[-1] is None:
            zeros.update(step.results)
    return found


def _keeps_zeros(step: Step) -> bool:
    """Whether a step makes nothing but zeros of zeros."""
    # A rule may return a constant as a tangent, which a loop then carries.
    if not any(inner_jaxprs(step.equation)):
        return True
    zeros = [zeros_like_aval(wire.aval) for wire in step.wires]
    return not adds_a_constant(jax.make_jaxpr(lambda *tangents: step.run(tangents))(*zeros))


def _cleaned_after(emit: Emit, masks: Sequence[Mask]) -> Emit:
    return lambda tangents: [only(mask, result) for mask, result in zip(masks, emit(tangents), strict=True)]


def _cleaned_before(emit: Emit, masks: Sequence[Mask], unclean: Sequence[bool]) -> Emit:
    def run(tangents: Sequence[Any]) -> Operands:
        triples = zip(masks, tangents, unclean, strict=True)
        return emit([only(mask, tangent) if is_unclean else tangent for mask, tangent, is_unclean in triples])

    return run


def _runner(program: LinearProgram, emits: list[Emit | None], outputs: list[Any]) -> Emit:
    def run(tangents: Sequence[Any]) -> Operands:
        values = dict(zip(program.inputs, tangents, strict=True))
        for step, emit in zip(program.steps, emits, strict=True):
            zeros = lambda _, step=step: [zeros_like_aval(wire.aval) for wire in step.results]
            mesh = mesh_elsewhere(step.equation)
            with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
                results = (emit or zeros)([values[wire] for wire in step.wires])
            values.update(zip(step.results, results, strict=True))
        return [values[output] if isinstance(output, Wire) else output for output in outputs]

    return run
