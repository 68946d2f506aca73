"""Programs that are compiled quickly, as each runs a few times, and kept for the next run of the same program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .equations import any_equation, is_floating, jaxpr_and_consts
from .same import Recent, keyed_jaxpr

R = TypeVar("R")

_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
_SAFE: dict[str, Any] = {"xla_backend_optimization_level": 1}
_NARROW = dict(_SAFE)
if jax.__version_info__ < (0, 11):  # JAX 0.10
    # XLA's older generator of fused kernels takes a fifth of the time; later versions no longer have it. Without the
    # fusion pass it would be as quick, but XLA then computes wrong numbers (0.10.2: the derivative of `eigvals`).
    _QUICK |= {"xla_cpu_use_fusion_emitters": False}
    _SAFE |= {"xla_cpu_use_fusion_emitters": False}
    # It compares an index with the length of an axis in the dtype of the index, which may not hold the length (0.10.2).
    _NARROW |= {"xla_cpu_use_fusion_emitters": True}


def all_finite(results: Any) -> bool:
    """Whether all results are finite; one that is traced counts as such."""
    return all(map(_is_finite, jax.tree.leaves(results)))


def quick_jit(function: Callable[..., Any], *, trusted: Callable[[Any], bool] = all_finite) -> Callable[..., Any]:
    """The function under `jax.jit`, compiled quickly rather than optimised.

    What is not trusted then is computed again by a program of the next level if the function asks which numbers are
    equal: at the lowest level, XLA (0.10.2, 0.12.0) may round an operand in two ways in two kernels, and the derivative
    of its largest element divides by the number of elements that equal it, which is none. Convolutions in float64 are
    compiled at the next level at once: they run many times, and a run takes up to ten times as long at the lowest. So
    is what has indices too narrow for an axis, by XLA's newer generator.

    Args:
        function: The function.
        trusted: Whether results need not be computed again. If it says no, they are.
    """
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    quick, safe = jax.jit(function, compiler_options=_QUICK), jax.jit(function, compiler_options=_SAFE)
    chosen = list[tuple[Any, bool]]()

    def run(*args: Any) -> Any:
        if not chosen:
            chosen.append(program_for(jaxpr_and_consts(quick.trace(*args).jaxpr)[0]))
        program, is_certain = chosen[0]
        results = program(*args)
        return results if is_certain or trusted(results) else safe(*args)

    def program_for(jaxpr: Jaxpr) -> tuple[Any, bool]:
        """The program, and whether its results are those of the next level."""
        if any_equation(jaxpr, _is_narrow):
            return jax.jit(function, compiler_options=_NARROW), True
        if any_equation(jaxpr, _is_wide_convolution):
            return safe, True
        return quick, not any_equation(jaxpr, _compares_numbers)

    return run


def _is_wide_convolution(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "conv_general_dilated" and equation.invars[0].aval.dtype.itemsize >= 8


def _is_narrow(equation: JaxprEqn) -> bool:
    """Whether an equation reads or writes along an axis that is longer than the dtype of its indices can say."""
    name = equation.primitive.name
    if name != "gather" and not name.startswith("scatter"):
        return False
    operand, indices, *_ = (atom.aval for atom in equation.invars)
    return max(operand.shape, default=0) > np.iinfo(indices.dtype).max


def _compares_numbers(equation: JaxprEqn) -> bool:
    """Whether an equation asks which numbers are equal."""
    return equation.primitive.name == "eq" and is_floating(equation.invars[0].aval)


def _is_finite(result: Any) -> bool:
    if isinstance(result, jax.core.Tracer) or not jax.dtypes.issubdtype(result.dtype, np.inexact):
        return True
    return bool(np.isfinite(np.asarray(result)).all())


_kept: Recent[Any] = Recent(128)


def kept(purpose: Hashable, jaxprs: Sequence[ClosedJaxpr | None], make: Callable[[], R]) -> R:
    """What was made of earlier programs if they were the same but for their constants, or is made now."""
    keys = [None if jaxpr is None else keyed_jaxpr(jaxpr_and_consts(jaxpr)[0], exact=False) for jaxpr in jaxprs]
    is_known = all(key is not None or jaxpr is None for key, jaxpr in zip(keys, jaxprs, strict=True))
    key = (purpose, jax.config.jax_enable_x64, jax.default_backend(), tuple(keys))
    return _kept.of(key if is_known else None, make)
