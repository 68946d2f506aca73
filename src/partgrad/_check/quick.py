"""Programs that are compiled quickly: each runs once or a few times, so that compiling it is what takes time."""

from collections.abc import Callable
from typing import Any

import jax

# Fused kernels are generated one by one: without them, XLA compiles a program of a hundred small operations ten times
# as fast on a CPU.
_QUICK = {"xla_disable_hlo_passes": "fusion"}


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `jax.jit`, compiled quickly rather than well."""
    return jax.jit(function, compiler_options=_QUICK if jax.default_backend() == "cpu" else None)
