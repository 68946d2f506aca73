"""`vmap` batches the linear program, before that is transposed: weights that all examples share keep one product."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .._programs import evaluate, jaxpr_and_consts, with_constants_as_inputs
from .linear import linear_outputs

# For each operand or result, 0 if it has the axis of the batch in front, or None.
Axes = tuple[int | None, ...]


class Vmap(NamedTuple):
    """What `jax.vmap` was given."""

    size: int
    name: Any
    spmd_name: Any
    explicit_axis: Any

    @classmethod
    def given(cls, data: Any) -> "Vmap":
        """The same, from the axis data that JAX passes to a batching rule."""
        name = None if type(data.name).__name__ == "_TempAxisName" else data.name
        return cls(data.size, name, data.spmd_name, data.explicit_mesh_axis)

    def wide(self, aval: Any, axis: int | None) -> Any:
        """A shape with the axis of the batch in front, if there is one, sharded over the axes of an explicit mesh."""
        if axis is None:
            return aval
        shape, sharding = (self.size, *aval.shape), getattr(aval, "sharding", None)
        if sharding is None or not any((self.explicit_axis, *sharding.spec)):
            return aval.update(shape=shape)
        spec = jax.sharding.PartitionSpec(self.explicit_axis, *sharding.spec)
        return aval.update(shape=shape, sharding=jax.sharding.NamedSharding(sharding.mesh, spec))

    def of(self, function: Callable[..., Any], axes: Sequence[int | None], kept: Sequence[bool]) -> Callable[..., Any]:
        """A function batched; a result that depends on nothing batched has no axis for it."""
        names = {"axis_size": self.size, "axis_name": self.name, "spmd_axis_name": self.spmd_name}
        mapped = jax.vmap(function, tuple(axes), 0, **names)
        return lambda *o: [r if k else self._one(r) for r, k in zip(mapped(*o), kept, strict=True)]

    def _one(self, result: Any) -> Any:
        """The result of one example, where that of all is the same."""
        if self.explicit_axis:
            # JAX slices no axis that is split among devices.
            sharding = jax.typeof(result).sharding
            spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
            result = jax.sharding.reshard(result, jax.sharding.NamedSharding(sharding.mesh, spec))
        return lax.index_in_dim(result, 0, 0, False)

    def of_jaxpr(self, closed: Any, axes: Axes, kept: Sequence[bool] | None = None) -> tuple[Any, Sequence[bool]]:
        """A jaxpr batched, and which of its outputs have the axis: those that depend on what has it, if nobody says."""
        jaxpr, consts = jaxpr_and_consts(closed)
        kept = batched_outputs(closed, axes) if kept is None else kept
        avals = [self.wide(v.aval, axis) for v, axis in zip(jaxpr.invars, axes, strict=True)]
        return jax.make_jaxpr(self.of(lambda *o: evaluate(jaxpr, consts, list(o)), axes, kept))(*avals), kept


def batched_outputs(closed: Any, axes: Axes) -> list[bool]:
    """Which outputs of a jaxpr have the axis of the batch."""
    jaxpr, consts = jaxpr_and_consts(closed)
    flags = [*[False] * len(consts), *(axis is not None for axis in axes)]
    return linear_outputs(with_constants_as_inputs(jaxpr), flags)
