"""A derivative: a linear program whose fixed operands are residuals, its push and its pull.

The values and the residuals are computed once. Three facts about residuals travel with them, or masks would have to
be computed: known numbers, what a predicate is broadcast from, and that a value is a selection, finite outside its
predicate.

Masks do not cross a saved residual. The cotangent of a residual that only a dead path reads is a zero, and to the
program that computed it a number like any other: `0 * inf`. So residuals serve for the *value* of a push or pull only;
to be differentiated, it starts from the operands again.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax

from .._programs import Operands, as_array, mesh_elsewhere, source_of, varying_like, zeros_like_aval
from .known import captured, fact, is_zero, learn, numbers_of, remember, remembering
from .linear import LinearProgram, Wire
from .masked import Masked, added, clean, copied
from .transpose import contains_custom, pulled_back
from .walk import LINEAR

# From operands to the outputs of a function and the linear program along some of them.
Linearized = Callable[[Operands], tuple[Operands, LinearProgram]]


@dataclasses.dataclass(frozen=True)
class _Residual:
    """A fixed operand of a step: the number of a residual."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Broadcast:
    """A residual that is another one, broadcast: only that one is kept."""

    number: int
    aval: Any
    axes: tuple[int, ...]

    def of(self, value: Any) -> Any:
        wide = varying_like(lax.broadcast_in_dim(value, self.aval.shape, self.axes), self.aval)
        learn(wide, origin=(value, self.axes))
        return wide


class Residuals:
    """The fixed operands of a linear program: operands of the function, values it computed, or broadcasts of these.

    Attributes:
        computed: The values that the function has to return.
        steps: The steps of the program, with `_Residual` in the place of arrays.
    """

    def __init__(self, program: LinearProgram, operands: Operands):
        self.computed: Operands = []
        self._sources: list[Any] = []
        self._numbers: list[Any] = []
        self._places = {id(operand): ("operand", number) for number, operand in enumerate(operands)}
        self._found: dict[int, int] = {}
        values: Operands = []
        kept = lambda o: _Residual(self._number(o, values)) if isinstance(o, jax.Array) else o
        needed = program.needed()[::-1]
        steps = [dataclasses.replace(step, operands=tuple(map(kept, step.operands))) for step in needed]
        self.steps = steps[::-1]
        # Which residuals were selected themselves, so that they are finite outside of the predicate.
        self._risky: dict[int, tuple[int, int]] = {}
        for value in list(values):
            risky = fact(value).risky
            if risky is None or not isinstance(risky[0], jax.Array):
                continue
            if id(risky[0]) in self._found or fact(risky[0]).origin:
                self._risky[self._found[id(value)]] = self._number(risky[0], values), risky[1]
        self._places.clear()
        self._found.clear()

    def _number(self, value: Any, values: Operands) -> int:
        if id(value) not in self._found:
            origin = fact(value).origin
            if origin and value.dtype == bool and isinstance(origin[0], jax.Array) and _is_here(value):
                source: Any = _Broadcast(self._number(origin[0], values), jax.typeof(value), tuple(origin[1]))
            elif id(value) in self._places:
                source = self._places[id(value)]
            else:
                source = "computed", len(self.computed)
                self.computed.append(value)
            self._found[id(value)] = len(self._sources)
            self._sources.append(source)
            self._numbers.append(numbers_of(value) if isinstance(value, jax.core.Tracer) else captured(value))
            values.append(value)
        return self._found[id(value)]

    def put(self, given: dict[str, Operands]) -> list[Any]:
        """The steps at given operands and computed values, with what is known of them."""
        known: Operands = []
        for source, numbers in zip(self._sources, self._numbers, strict=True):
            is_broadcast = isinstance(source, _Broadcast)
            known.append(source.of(known[source.number]) if is_broadcast else given[source[0]][source[1]])
            remember(known[-1], numbers)
        for number, (predicate, case) in self._risky.items():
            learn(known[number], risky=(known[predicate], case))
        put = lambda o: known[o.number] if isinstance(o, _Residual) else o
        return [dataclasses.replace(step, operands=tuple(map(put, step.operands))) for step in self.steps]

    def numbers(self, kind: str, count: int) -> list[Any]:
        """What is known of the numbers of the operands, or of the computed values."""
        found = [None] * count
        for source, numbers in zip(self._sources, self._numbers, strict=True):
            if not isinstance(source, _Broadcast) and source[0] == kind:
                found[source[1]] = numbers
        return found


def _is_here(value: Any) -> bool:
    """Whether a value lives on the current mesh, and not inside `jax.sharding.auto_axes`."""
    mesh = jax.typeof(value).sharding.mesh
    return mesh.empty or mesh == jax.sharding.get_abstract_mesh()


# --- the two passes ---------------------------------------------------------------------------------------------------


def pushed(program: LinearProgram, tangents: Operands) -> Operands:
    """The tangents of the outputs that are reached, walked with masks."""
    found = dict(zip(program.inputs, (Masked(tangent, True) for tangent in tangents), strict=True))
    for step in program.steps:
        given = [found[o] if isinstance(o, Wire) else Masked(o) for o in step.operands]
        found.update(zip(step.results, LINEAR.over(step.equation, given), strict=True))
    return [as_array(clean(found[w]), w.aval) for w in program.outputs if isinstance(w, Wire)]


def pulled(program: LinearProgram, live: Sequence[int], cotangents: Operands) -> Operands:
    """The cotangents of the inputs, given those of some of the outputs that are reached, walked with masks."""
    found: dict[Wire, Masked] = {}
    # Whose line it is that an input is selected last.
    last: dict[Wire, Any] = {}

    def add(wire: Wire, item: Masked) -> None:
        if item.mask is None:
            if is_zero(item.value):
                return
            item = Masked(item.value, True)
        if item.mask is not False:
            found[wire] = added(found[wire], item) if wire in found else item

    reached = [wire for wire in program.outputs if isinstance(wire, Wire)]
    for number, cotangent in zip(live, cotangents, strict=True):
        add(reached[number], Masked(cotangent, True))
    for step in reversed(program.steps):
        given = [found.pop(wire, None) for wire in step.results]
        if any(item is not None for item in given):
            for wire, item in zip(step.wires, _on_mesh(step, given), strict=True):
                add(wire, item)
                last[wire] = step.equation

    def result(wire: Wire) -> Any:
        if wire not in found:
            return zeros_like_aval(wire.aval)
        with source_of(last[wire]) if wire in last else contextlib.nullcontext():
            return as_array(clean(found[wire]), wire.aval)

    return list(map(result, program.inputs))


def _on_mesh(step: Any, cotangents: Sequence[Masked | None]) -> list[Masked]:
    mesh = mesh_elsewhere(step.equation)
    if mesh is None:
        return pulled_back(step, cotangents)
    there = lambda items: [None if item is None else copied([item])[0] for item in items]
    outside = there(cotangents)
    with jax.sharding.use_abstract_mesh(mesh):
        found = copied(pulled_back(step, there(outside)))
    return copied(found)


class Derivative:
    """The derivative of a function along some operands.

    It is made of the steps themselves: neither JAX's tracing nor its transposition is run on the whole.

    Attributes:
        avals: Of the operands of the function.
        computed: Of the residuals that it computes.
        inputs: The wires of the tangents that go in.
        outputs: For each output its wire; None where no tangent reaches it.
    """

    def __init__(self, linearized: Linearized, operands: Operands, program: LinearProgram, numbers: Sequence[Any]):
        self._linearized, self.numbers = linearized, list(numbers)
        self._residuals = Residuals(program, operands)
        self.avals = list(map(jax.typeof, operands))
        self.computed = list(map(jax.typeof, self._residuals.computed))
        self.inputs, self.outputs = program.inputs, program.outputs
        self.made: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        """The operations, which a printed jaxpr shows in place of an address."""
        return "{ " + "; ".join(str(step.equation) for step in self._residuals.steps) + " }"

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made of this derivative for a key, or is made now."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def taken(self) -> Operands:
        """The residuals that the function has to return, which are not kept here."""
        computed, self._residuals.computed = self._residuals.computed, []
        return computed

    @property
    def reached(self) -> list[Any]:
        """The shapes of the outputs that a tangent reaches."""
        return [wire.aval for wire in self.outputs if wire is not None]

    def at(self, operands: Operands, computed: Operands) -> LinearProgram:
        """The linear program at given residuals, with what is known of them."""
        steps = self._residuals.put({"operand": operands, "computed": computed})
        return LinearProgram(self.inputs, steps, self.outputs)

    def computed_at(self, operands: Operands) -> Operands:
        """The residuals, computed anew."""
        _, program = self._linearized(operands)
        return Residuals(program, operands).computed

    def anew(self, operands: Operands) -> LinearProgram:
        """The same linear program, made from the operands, so that it is one program with its residuals."""
        return self._linearized(operands)[1]

    def numbers_of_computed(self) -> list[Any]:
        """What is known of the numbers of the residuals."""
        return self._residuals.numbers("computed", len(self.computed))

    def pushed(self, given: Operands) -> Operands:
        """The tangents of the outputs, given operands, computed residuals and tangents."""
        operands, computed, tangents = self.parted(given)
        with remembering():
            return pushed(self.at(operands, computed), tangents)

    def plain(self, given: Operands) -> Operands:
        """The same as JAX computes them, for `vmap`; walked, if a backward pass is in there, which JAX cannot batch."""
        operands, computed, tangents = self.parted(given)
        with remembering():
            program = self.at(operands, computed)
            if any(contains_custom(step.equation) for step in program.steps):
                return pushed(program, tangents)
            return [result for result in program.run(tangents) if result is not None]

    def parted(self, given: Sequence[Any]) -> tuple[Operands, Operands, Operands]:
        """Operands, computed residuals, and tangents."""
        first, last = len(self.avals), len(self.avals) + len(self.computed)
        return list(given[:first]), list(given[first:last]), list(given[last:])

    def push(self, *given: Any) -> Operands:
        """The tangents of the outputs, given operands and tangents."""
        operands, tangents = list(given[: len(self.avals)]), list(given[len(self.avals) :])
        with remembering():
            return pushed(self.anew(operands), tangents)

    def pull(self, live: Sequence[int], *given: Any) -> Operands:
        """The cotangents of the inputs, given operands and the cotangents of some outputs."""
        operands, cotangents = list(given[: len(self.avals)]), list(given[len(self.avals) :])
        with remembering():
            return pulled(self.anew(operands), live, cotangents)

    def pull_at(self, live: Sequence[int], *given: Any) -> Operands:
        """The same, given operands, cotangents and computed residuals."""
        first, last = len(self.avals), len(self.avals) + len(live)
        operands, cotangents, computed = given[:first], given[first:last], given[last:]
        with remembering():
            return pulled(self.at(list(operands), list(computed)), live, list(cotangents))
