"""Programs that run at two points at once, where each operation sees what it computes at the other one."""

from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap


@custom_vmap
def here(value: Any) -> Any:
    """A value at the point, in a program that `jax.vmap` runs where the point has moved to, and at the point itself."""
    return value


@here.def_vmap
def _(size: int, batched: list[bool], value: Any) -> tuple[Any, bool]:
    # Not a collective, which a `shard_map` inside does not take.
    return jnp.broadcast_to(value[1], value.shape), True
