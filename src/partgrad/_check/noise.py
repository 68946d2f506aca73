"""How far rounding moves the results of a program, and whether two runs agree up to that.

A program's own operations are run with errors of one unit put in. The errors are pseudo-random and go the way of the
real ones, through cancellation and ill-conditioned steps; so no higher precision is needed, and none would help to tell
what another order of the same operations may change.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._programs import (
    CUSTOM_RULES,
    ENTERED,
    Chain,
    Operands,
    bind,
    is_custom_rule,
    is_floating,
    is_mutating,
    opened,
    run,
)
from .derivatives.float64 import widened
from .quick import quick_jit

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
        return run(opened(jaxpr)[0], consts, operands, _Errors(seed), in_place=CUSTOM_RULES)

    compiled = quick_jit(evaluate)
    with_seed = lambda seed: _wide(compiled(consts, list(operands), np.uint32(seed)))
    return _spread(with_seed(0), (with_seed(seed) for seed in range(1, samples + 1)))


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


def distance(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elementwise: 0 between equal infinities and between NaNs, infinite where only one value is finite."""
    with np.errstate(all="ignore"):
        gap = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))


def _spread(exact: list[np.ndarray[Any, Any]], runs: Any) -> list[np.ndarray[Any, Any]]:
    squares, count = [np.zeros(value.shape) for value in exact], 0
    for outputs in runs:
        squares = [total + distance(*pair) ** 2 for total, *pair in zip(squares, exact, outputs, strict=True)]
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


Noise = Callable[[], list[np.ndarray[Any, Any]]]

# A difference is beyond rounding where it exceeds the noise of its element and that of its array by these factors. The
# noise is that of errors which are three times as large as real ones.
_NOISE_OF_ELEMENT = 3.0
_NOISE_OF_ARRAY = 2.0
_ARRAY_QUANTILE = 0.75
# What is let pass in any case, in units in the last place, and, where the noise is not known, in those of the largest
# element. Of half precision, many units would be all of the number.
_UNITS = 64.0
_UNITS_OF_HALF = 4.0
_UNITS_OF_ARRAY = 32.0
_HALF = 1e-4
_LEAST = 1e-7


class Apart(NamedTuple):
    """Where two runs give numbers that are further apart than rounding can bring them.

    Attributes:
        output: Which of the arrays; -1 where their numbers differ.
        first: In the first run, the value of the element that is furthest off; NaN where shapes differ.
        second: Its value in the second run.
        absolute: How far the two are apart: infinite where only one of them is finite, or shapes differ.
    """

    output: int
    first: complex
    second: complex
    absolute: float


def apart(first: list[Any], second: list[Any], noise: Noise | None = None) -> list[Apart]:
    """Where two runs are further apart than rounding can bring them.

    Args:
        first: The outputs of a run.
        second: The outputs of another run.
        noise: How far rounding may move each element of each output. Asked only where the outputs are not as good as
            equal.

    Returns:
        One entry for each output in which they are apart.
    """
    if len(first) != len(second):
        return [Apart(-1, np.nan, np.nan, np.inf)]
    pairs = zip(first, second, strict=True)
    return [found for i, pair in enumerate(pairs) if (found := _compared(i, *pair, noise))]


def _compared(output: int, first: Any, second: Any, noise: Noise | None) -> Apart | None:
    if np.shape(first) != np.shape(second):
        return Apart(output, np.nan, np.nan, np.inf)
    wide = widened(first), widened(second)
    information = [jnp.finfo(jnp.result_type(value)) for value in (first, second)]
    unit = max(float(info.eps) for info in information)
    sizes = np.where(np.isfinite(wide[0]), np.abs(wide[0]), 0.0)
    gap = distance(*wide)
    tolerance = _relative(unit) * sizes + max(float(info.tiny) for info in information)
    if noise is not None and np.any(gap > tolerance):
        moves = noise()[output]
        tolerance = tolerance + np.maximum(_NOISE_OF_ELEMENT * moves, _NOISE_OF_ARRAY * _typical(moves))
    elif noise is None:
        tolerance = tolerance + min(_UNITS_OF_ARRAY * unit, _relative(unit)) * np.max(sizes, initial=0.0)
    if not np.any(gap > tolerance):
        return None
    with np.errstate(all="ignore"):
        worst = int(np.argmax(np.where(gap > tolerance, gap / tolerance, 0.0)))
    return Apart(output, wide[0].flat[worst].item(), wide[1].flat[worst].item(), float(gap.flat[worst]))


def _relative(unit: float) -> float:
    return max((_UNITS_OF_HALF if unit > _HALF else _UNITS) * unit, _LEAST)


def _typical(moves: np.ndarray[Any, Any]) -> float:
    """A bound on the moves of most elements of an array: that of one element is small by chance at times."""
    finite = moves[np.isfinite(moves)]
    return float(np.quantile(finite, _ARRAY_QUANTILE)) if finite.size else 0.0


def noise_of(jaxpr: ClosedJaxpr, operands: Operands) -> Noise:
    """How far rounding may move the outputs of a jaxpr, found when it is first asked for."""

    def find() -> list[Any]:
        try:
            return rounding_noise(jaxpr, operands)
        except Exception:  # An operation that cannot be run on its own must not end a check.
            compiled = quick_jit(jaxpr_as_fun(jaxpr))
            return input_noise(lambda values: list(compiled(*values)), operands)

    return functools.cache(find)
