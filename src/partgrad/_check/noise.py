"""How far rounding moves the results of a program, and whether two runs agree up to rounding.

The operations of the program run with errors of one unit added. The errors are pseudo-random and propagate like real
ones, through cancellation and ill-conditioned steps. So no higher precision is needed, and none would tell what another
order of the same operations may change.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._programs import (
    CUSTOM_RULES,
    ENTERED,
    KINDS,
    Chain,
    Operands,
    bind,
    is_custom_rule,
    is_floating,
    is_mutating,
    jaxpr_and_consts,
    kept,
    quick_jit,
    reclosing,
    run,
    size_of,
)
from .float64 import UNSUPPORTED, widened, without_callbacks
from .twice import here

SAMPLES = 8
# To compile so many operations with errors takes as long as to run them this often, for all seeds at once, or longer.
# Of fewer, most are the first of their kind, and are compiled as well.
_LARGE, _MOST_UNCOMPILED = 600, 10
_HALF_OF_BITS = np.uint32(2**31)
# What is raised by an operation that cannot run on its own.
REFUSALS = (*UNSUPPORTED, jax.errors.JaxRuntimeError)

# Operations that move, compare or select values do not round.
_EXACT = frozenset[str]().union(*(KINDS[kind] for kind in ("move", "selection", "flat", "test", "integer")))
# fmt: off
_EXACT |= frozenset([
    "abs", "device_put", "dynamic_slice", "dynamic_update_slice", "gather", "name", "neg", "optimization_barrier",
    "pvary", "reduce_precision", "scatter", "select_and_gather_add", "sharding_constraint",
])
# Operations whose result is correctly rounded, or nearly so; any other may also cancel internally.
_ROUNDING_ONCE = frozenset([
    "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "convert_element_type",
    "cosh", "div", "erf", "erfc", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "mul", "rsqrt",
    "sinh", "sqrt", "square", "sub", "tanh",
])
# fmt: on


def rounding_noise(
    jaxpr: ClosedJaxpr, operands: Operands, samples: int = SAMPLES, still: Operands | None = None
) -> list[np.ndarray[Any, Any]]:
    """How far the floating outputs of a program move if each of its operations rounds differently.

    It is the elementwise root mean square over some runs, and infinite where an element is finite only in some.

    Args:
        jaxpr: The program.
        operands: Where it runs.
        samples: How often.
        still: Other operands: only what changes from these rounds differently. None if everything does.
    """
    body, consts = jaxpr_and_consts(jaxpr)
    program = kept("noise", [jaxpr], lambda: _Disturbed(body))
    exact, *runs = map(_wide, program.runs(consts, list(operands), still, samples))
    return _spread(exact, runs)


class _Disturbed:
    """A program whose operations round differently for each seed. A large one is compiled only if it runs often."""

    def __init__(self, body: Jaxpr):
        self._with_errors = _with_errors(body)
        self._compiled = quick_jit(self._with_errors)
        self._left = _MOST_UNCOMPILED if size_of(body)[0] > _LARGE else 0

    def runs(self, consts: Operands, operands: Operands, still: Operands | None, samples: int) -> Iterator[Operands]:
        """The outputs without errors, and those of some seeds."""
        seeds = np.arange(samples + 1, dtype=np.uint32)
        if self._left:
            self._left -= 1
            found = jax.vmap(lambda seed: self._with_errors(consts, operands, still, seed))(seeds)
            return ([value[seed] for value in found] for seed in seeds)
        return (self._compiled(consts, operands, still, seed) for seed in seeds)


def _with_errors(body: Jaxpr) -> Callable[..., Operands]:
    """A program whose operations round differently for each seed: all of them, or those of what moves."""
    closed = reclosing(body)

    def evaluate(consts: Operands, operands: Operands, still: Operands | None, seed: Any) -> Operands:
        at = lambda rule, operands: run(*jaxpr_and_consts(closed(consts)), operands, rule, in_place=CUSTOM_RULES)
        if still is None:
            return at(_Errors(seed, seed != 0), operands)
        pairs = [jnp.stack(pair) for pair in zip(operands, still, strict=True)]
        rule = lambda is_still: _ErrorsOfMoved(jnp.where(is_still, 0, seed), seed != 0)
        both = jax.vmap(lambda is_still, operands: at(rule(is_still), operands))(jnp.array([False, True]), pairs)
        return [moved for moved, _ in both]

    return evaluate


def _wide(outputs: Operands) -> list[np.ndarray[Any, Any]]:
    return [widened(value) for value in outputs]


def gap_between(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elementwise: 0 between equal infinities and between NaNs, infinite where only one value is finite."""
    with np.errstate(all="ignore"):
        gap = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))


def _spread(exact: list[np.ndarray[Any, Any]], runs: Any) -> list[np.ndarray[Any, Any]]:
    squares, count = [np.zeros(value.shape) for value in exact], 0
    for outputs in runs:
        squares = [total + gap_between(*pair) ** 2 for total, *pair in zip(squares, exact, outputs, strict=True)]
        count += 1
    return [np.sqrt(total / count) for total in squares]


class _Errors:
    """The rule that adds errors: pseudo-random ones for each seed, none for the seed 0."""

    def __init__(self, seed: Any, on: Any):
        self._on = on
        self._seed = seed * np.uint32(0x9E3779B9)
        self._draws = 0
        # Python numbers do not change dtypes and weak types.
        self._size = jnp.where(seed == 0, 0.0, 1.0)

    def __call__(self, chain: Chain, operands: Operands) -> Operands | None:
        equation = chain[-1]
        name = equation.primitive.name
        if name in ("debug_callback", "debug_print"):
            return []
        # A loop that runs until a condition holds may never end if the numbers it compares are disturbed.
        if name == "while":
            return bind(equation, operands)
        if name in ENTERED or is_custom_rule(equation):
            return None
        if name in _EXACT or is_mutating(equation):
            return bind(equation, operands)
        # A sampler by rejection would draw another number from disturbed operands.
        if name not in _ROUNDING_ONCE and not name.startswith("random_"):
            given = zip(equation.invars, operands, strict=True)
            operands = [value if isinstance(atom, Literal) else self._moved(value) for atom, value in given]
        return [self._moved(value) for value in bind(equation, operands)]

    def _size_of(self, value: Any) -> Any:
        """The size of the errors of an operand or result, in units of its last digit."""
        return self._size

    def _moved(self, value: Any) -> Any:
        # A Python number is a literal here, and exact.
        if not hasattr(value, "dtype") or not is_floating(value):
            return value
        self._draws += 1
        draw = self._seed + np.uint32(self._draws * 0x85EBCA6B & 0xFFFFFFFF)
        return _disturbed(self._on, value, self._size_of(value), draw)


# What follows is under `jax.jit`, to be traced once for each shape: there are as many calls as operations.
@jax.jit
def _disturbed(on: Any, value: Any, size: Any, draw: Any) -> Any:
    """An array with errors, if they are on."""
    # In a branch, across which XLA does not fuse: it writes out what it fuses again for each use, without end.
    return lax.cond(on, _with_errors_of, lambda value, *_: value, value, size, draw)


def _with_errors_of(value: Any, size: Any, draw: Any) -> Any:
    """An array with errors of a size."""
    unit = size * float(jnp.finfo(value.dtype).eps)
    bits, less, more = _bits(value, draw), 1 - unit, 1 + unit
    # Half of them are zero, because real errors are mostly smaller than a unit.
    factor = jnp.where(bits < _HALF_OF_BITS + _HALF_OF_BITS // 2, less, more)
    return value * jnp.where(bits < _HALF_OF_BITS, 1.0, factor)


def _bits(value: Any, draw: Any) -> Any:
    """Random bits that depend on the bits of a value, so that they change from one step of a loop to the next."""
    real = value.real if jnp.issubdtype(value.dtype, jnp.complexfloating) else value
    width = 8 * real.dtype.itemsize
    bits = lax.bitcast_convert_type(real, jnp.dtype(f"uint{width}"))
    folded = (bits ^ (bits >> 32)) if width == 64 else bits
    # Few operations, since all are compiled.
    mixed = (folded.astype(jnp.uint32) ^ (_positions(real.shape) + draw)) * np.uint32(0x85EBCA6B)
    return (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE35)


class _ErrorsOfMoved(_Errors):
    """The same for what differs between two points, at which the program runs at once.

    Where an operand has changed, and no element of the result, the change is lost to rounding: then all of them get
    errors. What does not change at all gets none: of a time that is compared with the last, they would add a step.
    """

    _arrives: Any = False

    def __call__(self, chain: Chain, operands: Operands) -> Operands | None:
        unknown = without_callbacks(chain, operands, lambda dtype: dtype)
        if unknown is not None:
            return unknown
        self._arrives = _any_changes([x for x in operands if hasattr(x, "dtype") and is_floating(x)])
        return super().__call__(chain, operands)

    def _size_of(self, value: Any) -> Any:
        return _size_of_moved(value, self._arrives, self._size)


@jax.jit
def _any_changes(values: Operands) -> Any:
    return jnp.any(jnp.array([jnp.any(value != here(value)) for value in values], bool))


@jax.jit
def _size_of_moved(value: Any, arrives: Any, size: Any) -> Any:
    """The size of the errors of a result: that of all, where it changes; nothing elsewhere, unless a change is lost."""
    changed = value != here(value)
    return jnp.where(changed | (arrives & ~jnp.any(changed)), size, 0.0)


def _positions(shape: tuple[int, ...]) -> Any:
    """Numbers that differ from element to element."""
    size = math.prod(shape)
    return lax.iota(jnp.uint32, max(size, 1))[:size].reshape(shape) * np.uint32(0x27D4EB2F)


# None if no operation can run with errors.
Noise = Callable[[], list[np.ndarray[Any, Any]] | None]

# A difference is beyond rounding if it exceeds the noise of its element and that of its array by these factors. The
# simulated errors are about three times as large as real ones.
_NOISE_OF_ELEMENT = 3.0
_NOISE_OF_ARRAY = 2.0
_ARRAY_QUANTILE = 0.75
# Differences that always pass, in units in the last place and, where the noise is unknown, in those of the largest
# element. In half precision, many units would be the whole number.
_UNITS = 64.0
_UNITS_OF_HALF = 4.0
_UNITS_OF_ARRAY = 32.0
_HALF = 1e-4
_LEAST = 1e-7


class Disagreement(NamedTuple):
    """An output in which two runs differ by more than rounding, with the element that is furthest off.

    The output is -1 if the runs have different numbers of outputs. If shapes differ, the distance is infinite.
    """

    output: int
    first: complex
    second: complex
    absolute: float


def disagreeing(first: list[Any], second: list[Any], noise: Noise | None = None) -> list[Disagreement]:
    """The outputs in which two runs differ by more than rounding; `noise` is called only if they are not close."""
    if len(first) != len(second):
        return [Disagreement(-1, np.nan, np.nan, np.inf)]
    pairs = zip(first, second, strict=True)
    return [found for i, pair in enumerate(pairs) if (found := _compared(i, *pair, noise))]


def _compared(output: int, first: Any, second: Any, noise: Noise | None) -> Disagreement | None:
    if np.shape(first) != np.shape(second):
        return Disagreement(output, np.nan, np.nan, np.inf)
    wide = widened(first), widened(second)
    information = [jnp.finfo(jnp.result_type(value)) for value in (first, second)]
    unit = max(float(info.eps) for info in information)
    sizes = np.where(np.isfinite(wide[0]), np.abs(wide[0]), 0.0)
    gap = gap_between(*wide)
    tolerance = _relative(unit) * sizes + max(float(info.tiny) for info in information)
    moves = noise() if noise is not None and np.any(gap > tolerance) else None
    if moves is not None:
        known = np.maximum(_NOISE_OF_ELEMENT * moves[output], _NOISE_OF_ARRAY * _typical(moves[output]))
        tolerance = tolerance + known
    else:
        tolerance = tolerance + min(_UNITS_OF_ARRAY * unit, _relative(unit)) * np.max(sizes, initial=0.0)
    if not np.any(gap > tolerance):
        return None
    with np.errstate(all="ignore"):
        worst = int(np.argmax(np.where(gap > tolerance, gap / tolerance, 0.0)))
    return Disagreement(output, wide[0].flat[worst].item(), wide[1].flat[worst].item(), float(gap.flat[worst]))


def _relative(unit: float) -> float:
    return max((_UNITS_OF_HALF if unit > _HALF else _UNITS) * unit, _LEAST)


def _typical(moves: np.ndarray[Any, Any]) -> float:
    """A bound on how far most elements of an array move: a single element sometimes moves little by chance."""
    finite = moves[np.isfinite(moves)]
    return float(np.quantile(finite, _ARRAY_QUANTILE)) if finite.size else 0.0
