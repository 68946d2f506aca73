"""Programs that are compiled quickly, as each runs a few times, and kept for the next run of the same program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from .equations import jaxpr_and_consts
from .same import Recent, keyed_jaxpr

R = TypeVar("R")

_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # JAX 0.10
    # XLA's older generator of fused kernels takes a fifth of the time; later versions no longer have it. Without the
    # fusion pass it would be as quick, but XLA then computes wrong numbers (0.10.2: the derivative of `eigvals`).
    _QUICK["xla_cpu_use_fusion_emitters"] = False


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `jax.jit`, compiled quickly rather than optimised."""
    return jax.jit(function, compiler_options=_QUICK if jax.default_backend() == "cpu" else None)


_kept: Recent[Any] = Recent(128)


def kept(purpose: Hashable, jaxprs: Sequence[ClosedJaxpr | None], make: Callable[[], R]) -> R:
    """What was made of earlier programs if they were the same but for their constants, or is made now."""
    keys = [None if jaxpr is None else keyed_jaxpr(jaxpr_and_consts(jaxpr)[0], exact=False) for jaxpr in jaxprs]
    is_known = all(key is not None or jaxpr is None for key, jaxpr in zip(keys, jaxprs, strict=True))
    key = (purpose, jax.config.jax_enable_x64, jax.default_backend(), tuple(keys))
    return _kept.of(key if is_known else None, make)
