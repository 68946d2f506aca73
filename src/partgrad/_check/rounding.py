"""How far rounding moves the results of a program: its own operations are run with errors of one unit put in.

The errors are pseudo-random and go the way of the real ones, through cancellation and ill-conditioned steps; so no
higher precision is needed, and none would help to tell what another order of the same operations may change.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from .._programs import ENTERED, Operands, bind, is_custom_rule, is_floating, is_mutating, opened
from .walk import Chain, walk

SAMPLES = 8
_INPUT_SAMPLES = 4

# What moves, compares or selects values rounds nothing.
# fmt: off
_EXACT = frozenset([
    "abs", "and", "argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "complex",
    "concatenate", "conj", "copy", "cummax", "cummin", "device_put", "dynamic_slice", "dynamic_update_slice", "eq",
    "expand_dims", "floor", "gather", "ge", "gt", "imag", "iota", "is_finite", "le", "lt", "max", "min", "name", "ne",
    "neg", "nextafter", "not", "optimization_barrier", "or", "pad", "pvary", "real", "reduce_max", "reduce_min",
    "reduce_precision", "reshape", "rev", "round", "scatter", "select_and_gather_add", "select_n",
    "sharding_constraint", "sign", "slice", "sort", "split", "squeeze", "stop_gradient", "top_k", "transpose", "xor",
])
# What rounds its result correctly or nearly so; what is not named here may also cancel inside of itself.
_ROUNDING_ONCE = frozenset([
    "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "convert_element_type",
    "cosh", "div", "erf", "erfc", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "mul", "rsqrt",
    "sinh", "sqrt", "square", "sub", "tanh",
])
# fmt: on


def rounding_noise(jaxpr: ClosedJaxpr, operands: Operands, samples: int = SAMPLES) -> list[np.ndarray[Any, Any]]:
    """How far the floating outputs of a program move when each of its operations rounds in another way.

    Args:
        jaxpr: The program.
        operands: Its inputs.
        samples: How many times it is run, besides once without errors.

    Returns:
        For each output, elementwise, the root mean square of its moves, as float64: infinite where it is only sometimes
        finite.
    """
    _, consts = opened(jaxpr)

    def evaluate(consts: Operands, operands: Operands, seed: Any) -> Operands:
        return walk(ClosedJaxpr(opened(jaxpr)[0], consts), operands, _Errors(seed))

    compiled = jax.jit(evaluate)
    run = lambda seed: _wide(compiled(consts, list(operands), jnp.uint32(seed)))
    return _spread(run(0), (run(seed) for seed in range(1, samples + 1)))


def input_noise(outputs: Callable[[Operands], Operands], leaves: Operands) -> list[np.ndarray[Any, Any]]:
    """How far a function's outputs move when its inputs do, by a unit in the last place.

    For a function that cannot be traced, so that what goes on inside of it is not known.
    """
    seeds = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:
        unit = float(jnp.finfo(leaf.dtype).eps)
        return leaf * jnp.where(seeds.integers(0, 2, np.shape(leaf)) == 1, 1 + unit, 1 - unit)

    runs = (_wide(outputs([moved(leaf) for leaf in leaves])) for _ in range(_INPUT_SAMPLES))
    return _spread(_wide(outputs(list(leaves))), runs)


def _wide(outputs: Operands) -> list[np.ndarray[Any, Any]]:
    return [widened(value) for value in outputs]


def widened(value: Any) -> np.ndarray[Any, Any]:
    """A number or array as float64 or complex128 in NumPy."""
    is_complex = jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)
    return np.asarray(value).astype(np.complex128 if is_complex else np.float64)


def distance(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elementwise: 0 between equal infinities and between NaNs, infinite where only one value is finite."""
    with np.errstate(all="ignore"):
        gap = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))


def _spread(exact: list[np.ndarray[Any, Any]], runs: Any) -> list[np.ndarray[Any, Any]]:
    squares, count = [np.zeros(value.shape) for value in exact], 0
    for run in runs:
        squares = [total + distance(*pair) ** 2 for total, *pair in zip(squares, exact, run, strict=True)]
        count += 1
    return [np.sqrt(total / count) for total in squares]


class _Errors:
    """The rule that puts errors in: pseudo-random ones for each seed, none for the seed 0."""

    def __init__(self, seed: Any):
        self._seed = seed
        self._draws = 0

    def __call__(self, chain: Chain, operands: Operands) -> Operands | None:
        equation = chain[-1]
        name = equation.primitive.name
        if name in ("debug_callback", "debug_print"):
            return []
        # A loop until something is reached might never reach it if the numbers that it compares were disturbed.
        if name == "while":
            return bind(equation, operands)
        if name in ENTERED or is_custom_rule(equation):
            return None
        if name in _EXACT or is_mutating(equation):
            return bind(equation, operands)
        # A sampler that rejects would make another draw of disturbed operands.
        if name not in _ROUNDING_ONCE and not name.startswith("random_"):
            operands = self._operands(equation, operands)
        return [self._moved(value) for value in bind(equation, operands)]

    def _operands(self, equation: JaxprEqn, operands: Operands) -> Operands:
        given = zip(equation.invars, operands, strict=True)
        return [value if isinstance(atom, Literal) else self._moved(value) for atom, value in given]

    def _moved(self, value: Any) -> Any:
        # What is a Python number here is a literal, and exact.
        if not hasattr(value, "dtype") or not is_floating(value):
            return value
        self._draws += 1
        unit = float(jnp.finfo(value.dtype).eps)
        # Python numbers leave dtypes and weak types as they are.
        bits = self._bits(value)
        # Every other one is none, as real errors are mostly less than a unit.
        change = jnp.where(bits & 1 == 1, 1.0, jnp.where(bits & 2 == 2, 1 + unit, 1 - unit))
        return value * jnp.where(self._seed == 0, 1.0, change)

    def _bits(self, value: Any) -> Any:
        """Random bits that depend on the value's own, so that they change from one step of a loop to the next."""
        real = value.real if jnp.issubdtype(value.dtype, jnp.complexfloating) else value
        width = 8 * real.dtype.itemsize
        bits = lax.bitcast_convert_type(real, jnp.dtype(f"uint{width}"))
        folded = (bits ^ (bits >> 32)) if width == 64 else bits
        mixed = folded.astype(jnp.uint32) ^ (
            self._seed * np.uint32(0x9E3779B9) + np.uint32(self._draws * 0x85EBCA6B & 0xFFFFFFFF)
        )
        mixed = mixed + lax.iota(jnp.uint32, max(real.size, 1))[: real.size].reshape(real.shape) * np.uint32(0xC2B2AE35)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
        return mixed >> 16
