"""Programs that are compiled quickly: each runs only a few times, so most of the time goes into compiling."""

from collections.abc import Callable
from typing import Any

import jax

_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # JAX 0.10
    # XLA's older generator of fused kernels takes a fifth of the time; later versions no longer have it. Without the
    # fusion pass it would be as quick, but XLA then computes wrong numbers (0.10.2: the derivative of `eigvals`).
    _QUICK["xla_cpu_use_fusion_emitters"] = False


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `jax.jit`, compiled quickly rather than optimised."""
    return jax.jit(function, compiler_options=_QUICK if jax.default_backend() == "cpu" else None)
