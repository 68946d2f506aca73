"""`vmap` batches the linear program, before that is transposed: weights that all examples share keep one product."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .._programs import Operands, evaluate, jaxpr_and_consts, with_constants_as_inputs
from .derivative import Derivative
from .known import remember
from .linear import LinearProgram, Wire, linear_outputs

# For each operand or result, 0 if it has the axis of the batch in front, or None.
Axes = tuple[int | None, ...]


class Vmap:
    """What `jax.vmap` was given."""

    def __init__(self, data: Any):
        self._size, self._spmd, self._explicit = data.size, data.spmd_name, data.explicit_mesh_axis
        self._name = None if type(data.name).__name__ == "_TempAxisName" else data.name
        self.key = self._size, self._name, self._spmd, self._explicit

    def wide(self, aval: Any, axis: int | None) -> Any:
        """A shape with the axis of the batch in front, if there is one, sharded over the axes of an explicit mesh."""
        if axis is None:
            return aval
        shape, sharding = (self._size, *aval.shape), getattr(aval, "sharding", None)
        if sharding is None or not any((self._explicit, *sharding.spec)):
            return aval.update(shape=shape)
        spec = jax.sharding.PartitionSpec(self._explicit, *sharding.spec)
        return aval.update(shape=shape, sharding=jax.sharding.NamedSharding(sharding.mesh, spec))

    def of(self, function: Callable[..., Any], axes: Sequence[int | None], kept: Sequence[bool]) -> Callable[..., Any]:
        """A function batched; a result that depends on nothing batched has no axis for it."""
        names = {"axis_size": self._size, "axis_name": self._name, "spmd_axis_name": self._spmd}
        mapped = jax.vmap(function, tuple(axes), 0, **names)
        return lambda *o: [r if k else self._one(r) for r, k in zip(mapped(*o), kept, strict=True)]

    def _one(self, result: Any) -> Any:
        """The result of one example, where that of all is the same."""
        if self._explicit:
            # JAX slices no axis that is split among devices.
            sharding = jax.typeof(result).sharding
            spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
            result = jax.sharding.reshard(result, jax.sharding.NamedSharding(sharding.mesh, spec))
        return lax.index_in_dim(result, 0, 0, False)

    def of_jaxpr(self, closed: Any, axes: Axes) -> tuple[Any, list[bool]]:
        """A jaxpr batched, and which of its outputs have the axis."""
        jaxpr, consts = jaxpr_and_consts(closed)
        kept = batched_outputs(closed, axes)
        avals = [self.wide(v.aval, axis) for v, axis in zip(jaxpr.invars, axes, strict=True)]
        return jax.make_jaxpr(self.of(lambda *o: evaluate(jaxpr, consts, list(o)), axes, kept))(*avals), kept


def batched_outputs(closed: Any, axes: Axes) -> list[bool]:
    """Which outputs of a jaxpr have the axis of the batch."""
    jaxpr, consts = jaxpr_and_consts(closed)
    flags = [*[False] * len(consts), *(axis is not None for axis in axes)]
    return linear_outputs(with_constants_as_inputs(jaxpr), flags)


class BatchedDerivative(Derivative):
    """A derivative that `vmap` batched: a jaxpr of operands, computed residuals and tangents.

    Attributes:
        kept: Which outputs have the axis of the batch.
    """

    def __init__(self, inner: Derivative, axes: Axes, vmap: Vmap):
        count = len(inner.avals)
        one = [*inner.avals, *inner.computed, *(wire.aval for wire in inner.inputs)]
        self._inner, self._axes, self._vmap = inner, axes, vmap
        closed, self.kept = vmap.of_jaxpr(jax.make_jaxpr(self._unbatched)(*one), axes)
        self._jaxpr, self._consts = jaxpr_and_consts(closed)
        self.avals, self.computed, tangents = inner.parted([v.aval for v in self._jaxpr.invars])
        self.inputs = list(map(Wire, tangents))
        found = iter([Wire(variable.aval) for variable in self._jaxpr.outvars])
        self.outputs = [None if wire is None else next(found) for wire in inner.outputs]
        self.numbers = self._unbatched_only(inner.numbers, axes[:count])
        self.made = {}

    def __repr__(self) -> str:
        return str(self._jaxpr)

    def _unbatched(self, *given: Any) -> Operands:
        return self._inner.plain(list(given))

    @staticmethod
    def _unbatched_only(numbers: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
        return [None if axis is not None else known for known, axis in zip(numbers, axes, strict=True)]

    def computed_at(self, operands: Operands) -> Operands:
        count = len(self.avals)
        of_computed = self._axes[count : count + len(self.computed)]
        kept = [axis is not None for axis in of_computed]
        return self._vmap.of(lambda *o: self._inner.computed_at(list(o)), self._axes[:count], kept)(*operands)

    def anew(self, operands: Operands) -> LinearProgram:
        return self.at(operands, self.computed_at(operands))

    def numbers_of_computed(self) -> list[Any]:
        count = len(self.avals)
        return self._unbatched_only(self._inner.numbers_of_computed(), self._axes[count : count + len(self.computed)])

    def at(self, operands: Operands, computed: Operands) -> LinearProgram:
        jaxpr = with_constants_as_inputs(self._jaxpr)
        for value, numbers in zip([*operands, *computed], [*self.numbers, *self.numbers_of_computed()], strict=True):
            remember(value, numbers)
        program = LinearProgram.of(jaxpr, [*self._consts, *operands, *computed, *map(Wire, self._tangent_avals())])
        found = iter(program.outputs)
        outputs = [None if wire is None else next(found) for wire in self.outputs]
        return LinearProgram(program.inputs, program.steps, [o if isinstance(o, Wire) else None for o in outputs])

    def _tangent_avals(self) -> list[Any]:
        return [wire.aval for wire in self.inputs]
