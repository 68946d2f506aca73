"""The derivative of a function: its values with residuals, and one linear program of residuals and tangents.

JAX's forward derivative of the whole function is traced once, and taken apart by JAX's partial evaluation. The push is
a walk over the linear program, the pull a walk over JAX's transpose of that program as a whole.

Masks do not cross a saved residual. The cotangent of a residual that only a dead path reads is a zero, and to the
program that computed it a number like any other: `0 * inf`. So residuals serve for the *value* of a push or pull only;
to be differentiated, it starts from the operands again, as one program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._compat import cached_property, transposed_program
from .._programs import (
    CUSTOM_LINEAR,
    HIGH_LINEAR,
    Operands,
    any_equation,
    as_array,
    as_closed,
    cut,
    evaluate,
    inlined,
    jaxpr_and_consts,
    made_once,
    parted,
    replaced,
    varying_like,
    with_constants_as_inputs,
    without_calls,
    without_dead_code,
    zeros_like_aval,
)
from .follow import stand_ins
from .known import captured, fact, learn, remember, remembering
from .masked import Masked, clean
from .vmap import Axes, Vmap, batched_outputs
from .walk import LINEAR, Walk


class Derivative:
    """The derivative of a function along some operands.

    Args:
        values: From operands to outputs and residuals.
        count: How many outputs there are.
        linear: From residuals and tangents to the tangents of some outputs, without constants.
        places: For each residual its number among the operands and, after these, what `values` computes of them; or
            its value, if that is a constant.
        reached: Which outputs these are, by number.
        numbers: What is known of the numbers of the operands.
        walk: How the push and the pull are walked.
        is_pull: Whether `linear` is the pull instead: from residuals and the cotangents of those outputs.
        live: Makes the push or the pull as a function that is run again to be differentiated, if that is needed; given
            None or the numbers of the outputs that have cotangents.

    Attributes:
        avals: Of the operands of the function.
        tangents: The avals of the tangents that enter.
        computed: The avals of the residuals that are not operands.
        rates: The avals of the tangents of the outputs that are reached.
    """

    def __init__(
        self,
        values: ClosedJaxpr,
        count: int,
        linear: Jaxpr,
        places: Sequence[Any],
        reached: Sequence[int],
        numbers: Sequence[Any],
        walk: Walk = LINEAR,
        is_pull: bool = False,
        live: Any = None,
    ):
        self.values, self._count, self._given, self._places = values, count, linear, list(places)
        self.reached, self.numbers = list(reached), list(numbers)
        jaxpr, _ = jaxpr_and_consts(values)
        self.avals, self.computed = [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars[count:]]
        entering, leaving = [v.aval for v in linear.invars[len(places) :]], [v.aval for v in linear.outvars]
        self.tangents, self.rates = (leaving, entering) if is_pull else (entering, leaving)
        self._walk, self._is_pull, self.live = walk, is_pull, live

    @classmethod
    def of(cls, whole: ClosedJaxpr, moving: int, floating: Sequence[int], numbers: Sequence[Any]) -> "Derivative":
        """The derivative of a function, whose values and tangents are computed by one program.

        Args:
            whole: The program, as of `traced_jvp`.
            moving: How many tangents enter it.
            floating: The numbers of the outputs whose tangents it computes, after all outputs.
            numbers: What is known of the numbers of the operands.
        """
        jaxpr, consts = without_calls(whole)
        known, constants, rest, flags = parted(jaxpr, moving)
        consts = [*constants, *consts]
        # A tangent that depends on none that enters is a zero.
        count = len(flags) - len(floating)
        reached = [number for number, is_reached in zip(floating, flags[count:], strict=True) if is_reached]
        saved, equations = len(rest.invars) - moving, list[JaxprEqn]()
        tangents, operands = rest.invars[saved:], known.invars[len(consts) :]
        with remembering():
            stands = stand_ins(known, [*map(captured, consts), *numbers])
            inputs, residuals = _narrowed(stands, known.outvars[len(known.outvars) - saved :], equations)
        outputs = inlined(equations, rest, [*residuals, *tangents])
        computed = [variable for variable in inputs if variable not in set(operands)]
        values = cut(known, known.invars, [*known.outvars[:count], *computed], known.eqns)
        linear = cut(rest, [*inputs.values(), *tangents], outputs, equations)
        numbered = {variable: number for number, variable in enumerate([*operands, *computed])}
        places = [numbered[variable] for variable in inputs]
        return cls(as_closed(values, consts), count, linear, places, reached, numbers)

    def __repr__(self) -> str:
        """The operations, which a printed jaxpr shows in place of an address."""
        return str(self._given)

    @cached_property
    def _linear(self) -> Jaxpr:
        if not self._is_pull:
            return self._given
        # The pull is linear, or JAX says that the function has no forward mode.
        every = tuple(range(len(self.tangents)))
        return jaxpr_and_consts(transposed_program(self._given, len(self._places), every))[0]

    def parted(self, given: Sequence[Any]) -> tuple[Operands, Operands, Operands]:
        """Operands, tangents, and computed residuals."""
        first, last = len(self.avals), len(self.avals) + len(self.tangents)
        return list(given[:first]), list(given[first:last]), list(given[last:])

    # --- the push and the pull, of operands and of tangents or cotangents; fast ones of computed residuals too --------

    def push(self) -> Callable[..., Operands]:
        """From operands and tangents to the tangents of the outputs that are reached."""
        return functools.partial(self._anew, as_closed(self._linear))

    def pull(self, live: tuple[int, ...]) -> Callable[..., Operands]:
        """From operands and the cotangents of some outputs that are reached to those of what moves."""
        return functools.partial(self._anew, self._transpose(live))

    @made_once
    def fast_push(self) -> ClosedJaxpr:
        """The push, at residuals."""
        return self._fast(as_closed(self._linear), self.tangents)

    def fast_pull(self, live: tuple[int, ...]) -> ClosedJaxpr:
        """The pull, at residuals."""
        return self._fast(self._transpose(live), [self.rates[number] for number in live])

    @made_once
    def _transpose(self, live: tuple[int, ...]) -> ClosedJaxpr:
        make = self._some_of_pull if self._is_pull else functools.partial(transposed_program, self._given)
        return make(len(self._places), live)

    def _some_of_pull(self, count: int, live: tuple[int, ...]) -> ClosedJaxpr:
        """The pull of residuals, which are so many, and of some cotangents."""

        def pulled(*given: Any) -> Operands:
            cotangents = replaced(map(zeros_like_aval, self.rates), live, given[count:])
            return evaluate(self._given, [], [*given[:count], *cotangents])

        residuals = [variable.aval for variable in self._given.invars[:count]]
        return jax.make_jaxpr(pulled)(*residuals, *(self.rates[number] for number in live))

    @remembering()
    def _anew(self, program: ClosedJaxpr, *given: Any) -> Operands:
        operands, moved = list(given[: len(self.avals)]), given[len(self.avals) :]
        for operand, known in zip(operands, self.numbers, strict=True):
            remember(operand, known)
        found = self._walk.through(*jaxpr_and_consts(self.values), list(map(Masked, operands)))
        return self._walked(program, [*operands, *(item.value for item in found[self._count :])], moved)

    def _fast(self, program: ClosedJaxpr, moved: Sequence[Any]) -> ClosedJaxpr:
        first, last = len(self.avals), len(self.avals) + len(moved)

        @remembering()
        def run(*given: Any) -> Operands:
            residuals = [*given[:first], *given[last:]]
            self._tell(residuals)
            return self._walked(program, residuals, given[first:last])

        traced = jax.make_jaxpr(run)(*self.avals, *moved, *self.computed)
        return traced.replace(jaxpr=without_dead_code(traced.jaxpr))

    def _walked(self, program: ClosedJaxpr, residuals: Operands, moved: Sequence[Any]) -> Operands:
        jaxpr, consts = jaxpr_and_consts(program)
        fixed = [residuals[place] if isinstance(place, int) else place for place in self._places]
        items = [*map(Masked, fixed), *(Masked(value, True) for value in moved)]
        found = self._walk.through(jaxpr, consts, items)
        return [as_array(clean(item), atom.aval) for item, atom in zip(found, jaxpr.outvars, strict=True)]

    @cached_property
    def _flat_values(self) -> tuple[Jaxpr, Operands]:
        return without_calls(self.values)

    def _tell(self, residuals: Operands) -> None:
        """Remember what the program that computes operands and residuals knows of them.

        That is their numbers, and that a value is a selection, finite outside of its predicate.
        """
        jaxpr, consts = self._flat_values
        found = stand_ins(jaxpr, [*map(captured, consts), *self.numbers])
        atoms = [*jaxpr.invars[len(consts) :], *jaxpr.outvars[self._count :]]
        # JAX may compute a residual while it traces.
        stands = [None if isinstance(atom, Literal) else found.get(atom) for atom in atoms]
        place = {id(stand): residual for stand, residual in zip(stands, residuals, strict=True) if stand is not None}
        for stand, residual in zip(stands, residuals, strict=True):
            remember(residual, fact(stand).numbers)
            predicate, case = fact(stand).risky or (None, 0)
            origin, axes = fact(predicate).origin or (None, ())
            if id(predicate) in place:
                learn(residual, risky=(place[id(predicate)], case))
            elif id(origin) in place:
                # What stands for the predicate is never computed, only what it is broadcast from.
                learn(predicate, origin=(place[id(origin)], axes))
                learn(residual, risky=(predicate, case))

    # --- `vmap` -------------------------------------------------------------------------------------------------------

    @made_once
    def batched(self, axes: Axes, vmap: Vmap) -> "tuple[Derivative, Sequence[bool]]":
        """The derivative batched, before it is transposed, and which outputs of its push have the axis."""
        of_operands, of_tangents, of_computed = map(tuple, self.parted(axes))
        own = [*batched_outputs(self.values, of_operands)[: self._count], *(axis is not None for axis in of_computed)]
        is_batched = any(axis is not None for axis in of_operands)
        values = vmap.of_jaxpr(self.values, of_operands, own)[0] if is_batched else self.values
        is_of_user = any_equation(self._linear, lambda e: e.primitive.name in CUSTOM_LINEAR | HIGH_LINEAR)
        # JAX cannot batch the backward pass of a user; it can what a walk makes of it.
        linear = self._walked_push() if is_of_user else as_closed(self._linear)
        of_residuals = (*of_operands, *of_computed)
        places = range(len(of_residuals)) if is_of_user else self._places
        of_places = [of_residuals[place] if isinstance(place, int) else None for place in places]
        batch, outs = vmap.of_jaxpr(linear, (*of_places, *of_tangents))
        jaxpr, consts = jaxpr_and_consts(batch)
        numbers = [None if axis is not None else known for known, axis in zip(self.numbers, of_operands, strict=True)]
        linear, places = with_constants_as_inputs(jaxpr), [*consts, *places]
        live = functools.partial(self._batched_live, (*of_operands, *of_tangents), outs, vmap)
        found = Derivative(values, self._count, linear, places, self.reached, numbers, self._walk, False, live)
        return found, outs

    def _batched_live(self, axes: Axes, outs: Sequence[bool], vmap: Vmap, live: Sequence[int] | None) -> Any:
        """The push alone: a pull would have to sum what all examples share."""
        return None if self.live is None or live is not None else self.live(None).batched(axes, outs, vmap)

    def _walked_push(self) -> ClosedJaxpr:
        """The push of operands, computed residuals and tangents."""
        first, last = len(self.avals), len(self.avals) + len(self.computed)
        push = jaxpr_and_consts(self.fast_push())
        run = lambda *given: evaluate(*push, [*given[:first], *given[last:], *given[first:last]])
        return jax.make_jaxpr(run)(*self.avals, *self.computed, *self.tangents)


def _narrowed(
    stands: dict[Var, Any], residuals: Sequence[Any], equations: list[JaxprEqn]
) -> tuple[dict[Var, Var], list[Any]]:
    """What is saved of residuals: a predicate that is broadcast as it was before.

    Args:
        stands: What stands for each variable of the program that computes them.
        residuals: Their variables there.
        equations: To which those are added that broadcast a predicate again.

    Returns:
        For each variable that is saved one of the linear program; and what each residual is there.
    """
    variables = {id(stand): variable for variable, stand in stands.items()}
    inputs: dict[Var, Var] = {}

    def of(variable: Var) -> Any:
        aval, origin = variable.aval, fact(stands[variable]).origin
        if origin is None or aval.dtype != bool or id(origin[0]) not in variables or not _is_here(aval):
            return inputs.setdefault(variable, Var(aval))
        source = of(variables[id(origin[0])])
        spread = lambda value: varying_like(lax.broadcast_in_dim(value, aval.shape, tuple(origin[1])), aval)
        (wide,) = inlined(equations, jax.make_jaxpr(spread)(source.aval).jaxpr, [source])
        return wide

    return inputs, [of(residual) for residual in residuals]


def _is_here(aval: Any) -> bool:
    """Whether a value lives on the current mesh, and not inside `jax.sharding.auto_axes`."""
    mesh = aval.sharding.mesh
    return mesh.empty or mesh == jax.sharding.get_abstract_mesh()
