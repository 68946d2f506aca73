"""Whether a function gives the same numbers each time, which operation is to blame if not, and how gradients scale."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._programs import Operands, any_equation, bind, inner_jaxprs, opened
from .agreement import Apart, Noise, apart
from .program import Program
from .rounding import distance, widened
from .walk import Chain, walk

Outputs = Callable[[Operands], Operands]

# Operations whose results JAX does not determine from their operands.
_FOREIGN = frozenset({"pure_callback", "io_callback", "ffi_call", "rng_uniform"})
_UNLIKE = 1e6
_ABOVE_NOISE = 100.0
_OUTERMOST = 50


class Unstable(NamedTuple):
    """Two runs on the same numbers that gave other numbers.

    Attributes:
        way: `eager`, `jit` or `gradient`.
        is_rounding: Whether they are no further apart than another order of summation could bring them.
        absolute: The largest difference of two finite numbers.
        apart: Where they are further apart than that.
    """

    way: str
    is_rounding: bool
    absolute: float
    apart: list[Apart]


class Scale(NamedTuple):
    """Two leaves whose gradients are so unlike in size that one step size cannot serve both.

    Attributes:
        largest: The index of the leaf with the larger gradient.
        smallest: The index of the other leaf.
        gradients: The root mean square gradient of each of the two.
        magnitudes: The root mean square value of each of the two.
        ratio: How many times larger a step size the second needs.
    """

    largest: int
    smallest: int
    gradients: tuple[float, float]
    magnitudes: tuple[float, float]
    ratio: float


class Condition(NamedTuple):
    """How unlike the curvatures of a function are, along some directions.

    Attributes:
        largest: The index of the direction along which the function curves most.
        smallest: The index of that along which it curves least, of those along which it does.
        number: The ratio of the two.
    """

    largest: int
    smallest: int
    number: float


def unstable(
    outputs: Outputs,
    leaves: Operands,
    plain: Operands,
    cotangents: Operands,
    gradient: Operands | None,
    noise: Noise | None = None,
) -> list[Unstable]:
    """In which ways a function gives other numbers on the same point.

    Runs the function and its gradient eagerly once more, and twice under `jit`.

    Args:
        outputs: From the leaves to a list of floating or complex arrays.
        leaves: The point.
        plain: The outputs of an earlier run.
        cotangents: Of the outputs.
        gradient: An earlier reverse derivative, or None where there is none.
        noise: How far rounding may move the outputs. None where an operation of them may answer otherwise each time,
            whose changes would pass for rounding.

    Returns:
        One entry for each way in which two runs differ in any bit.
    """
    compiled = jax.jit(outputs)
    runs: dict[str, Callable[[], tuple[Operands, Operands]]] = {
        "eager": lambda: (plain, outputs(list(leaves))),
        "jit": lambda: (compiled(list(leaves)), compiled(list(leaves))),
    }
    if gradient is not None:
        runs["gradient"] = lambda: (gradient, jax.vjp(outputs, list(leaves))[1](cotangents)[0])
    found = []
    for way, run in runs.items():
        try:
            first, second = run()
        # What cannot be run at all is told by `values`.
        except Exception:
            continue
        if not _bitwise(first, second):
            beyond = apart(first, second, noise if way != "gradient" else None)
            found.append(Unstable(way, not beyond, _largest_difference(first, second), beyond))
    return found


def has_foreign(program: Program) -> bool:
    """Whether a program has operations whose results JAX does not determine from their operands."""
    return any_equation(program.jaxpr.jaxpr, _is_foreign)


def unstable_equation(program: Program) -> Chain | None:
    """The first operation of a function whose result is another one each time.

    That is a callback that answers differently to the same operands, or the first operation of the trace that has
    another constant when the function is traced again, as one that Python drew.

    Args:
        program: The function, traced once. It is traced again and, where it has callbacks, run twice.

    Returns:
        The equation, and before it those that it is inside of; None where there is none.
    """
    if has_foreign(program) and (chain := _unstable_callback(program)):
        return chain
    # A function of its own, or JAX would find the first trace in its cache.
    again = jax.make_jaxpr(lambda leaves: program.outputs(leaves))(program.leaves)
    return next(_first_unlike(program.jaxpr, again), None)


def unlike_in_scale(gradients: Operands, leaves: Operands, noise: Noise | None = None) -> Scale | None:
    """The two leaves whose gradients are the least alike in size, if one step size cannot serve both.

    A leaf that is as much larger as its gradient is takes the same step size: so both the gradients and the gradients
    over the leaves must be unlike.

    Args:
        gradients: For each leaf.
        leaves: The point.
        noise: How far rounding may move the gradients; one that is all rounding is not counted. Asked only if needed.

    Returns:
        The two leaves, or None.
    """
    sizes, magnitudes = [_rms(g) for g in gradients], [_rms(leaf) for leaf in leaves]
    found = _least_alike(sizes, magnitudes)
    if found is not None and noise is not None:
        moves = noise()
        sizes = [size if size > _ABOVE_NOISE * _rms(move) else 0.0 for size, move in zip(sizes, moves, strict=True)]
        found = _least_alike(sizes, magnitudes)
    return found


def condition(second_derivatives: Operands, lengths: Operands | None = None) -> Condition | None:
    """How unlike the second derivatives along some directions are.

    Args:
        second_derivatives: Along each direction.
        lengths: Of the directions, where they are not of length 1.

    Returns:
        The ratio of the largest to the smallest that is not zero, and which they are; None for fewer than two.
    """
    squares = np.ones(len(second_derivatives)) if lengths is None else np.asarray(lengths, float) ** 2
    curvatures = np.abs(np.asarray(second_derivatives, float)) / squares
    usable = [i for i, value in enumerate(curvatures) if np.isfinite(value) and value > 0]
    if len(usable) < 2:
        return None
    largest, smallest = max(usable, key=curvatures.__getitem__), min(usable, key=curvatures.__getitem__)
    return Condition(largest, smallest, float(curvatures[largest] / curvatures[smallest]))


def _bitwise(first: Operands, second: Operands) -> bool:
    return len(first) == len(second) and all(
        np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _largest_difference(first: Operands, second: Operands) -> float:
    gaps = [distance(widened(a), widened(b)) for a, b in zip(first, second, strict=False) if np.shape(a) == np.shape(b)]
    return max((float(np.max(gap[np.isfinite(gap)], initial=0.0)) for gap in gaps), default=0.0)


def _is_foreign(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _FOREIGN


def _unstable_callback(program: Program) -> Chain | None:
    """The first callback that gave other results, in two runs, to the same operands."""
    chains: dict[int, Chain] = {}
    answers: list[dict[Any, Counter[bytes]]] = []

    def record(number: int, count: int, *arrays: Any) -> None:
        digests = [hashlib.blake2b(np.asarray(a).tobytes(), digest_size=16).digest() for a in arrays]
        answers[-1][number, *digests[:count]][b"".join(digests[count:])] += 1

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        if not _is_foreign(chain[-1]):
            return None
        number = next((n for n, known in chains.items() if known == chain), len(chains))
        chains[number] = chain
        results = bind(chain[-1], operands)
        jax.debug.callback(lambda *arrays: record(number, len(operands), *arrays), *operands, *results)
        return results

    compiled = jax.jit(lambda leaves: walk(program.jaxpr, leaves, rule))
    for _ in range(2):
        answers.append(defaultdict(Counter))
        jax.block_until_ready(compiled(program.leaves))
        jax.effects_barrier()
    unlike = [key[0] for key in answers[0] if key in answers[1] and answers[0][key] != answers[1][key]]
    return chains[min(unlike)] if unlike else None


def _first_unlike(first: ClosedJaxpr, second: ClosedJaxpr) -> Iterator[Chain]:
    """The equations that are not the same in two traces of a function, from the first."""
    (jaxpr, consts), (other, other_consts) = opened(first), opened(second)
    values = dict(zip(jaxpr.constvars, consts, strict=True)), dict(zip(other.constvars, other_consts, strict=True))
    yield from _unlike_inside(jaxpr, other, *values)


def _unlike_inside(jaxpr: Jaxpr, other: Jaxpr, known: dict[Any, Any], known_other: dict[Any, Any]) -> Iterator[Chain]:
    for equation, counterpart in zip(jaxpr.eqns, other.eqns, strict=False):
        if not _alike(equation, counterpart):
            yield (equation,)
            continue
        atoms = zip(equation.invars, counterpart.invars, strict=True)
        given = [(_constant(atom, known), _constant(match, known_other)) for atom, match in atoms]
        if any(not _equal(*pair) for pair in given):
            yield (equation,)
            continue
        for inner, inner_other in zip(inner_jaxprs(equation), inner_jaxprs(counterpart), strict=True):
            yield from ((equation, *chain) for chain in _unlike_inside(inner, inner_other, {}, {}))


def _alike(equation: JaxprEqn, counterpart: JaxprEqn) -> bool:
    """Whether two equations apply the same operation to operands of the same shapes."""
    of = lambda e: (e.primitive, [v.aval for v in (*e.invars, *e.outvars)], len(list(inner_jaxprs(e))))
    if of(equation) != of(counterpart):
        return False
    parameters = ((value, counterpart.params.get(name)) for name, value in equation.params.items())
    return all(value == other for value, other in parameters if isinstance(value, int | float | str))


def _constant(atom: Any, known: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known.get(atom)


def _equal(first: Any, second: Any) -> bool:
    return first is second or (first is not None and second is not None and _bitwise([first], [second]))


def _rms(value: Any) -> float:
    wide = np.abs(widened(value))
    return float(np.sqrt(np.mean(wide**2))) if wide.size else 0.0


def _least_alike(sizes: list[float], magnitudes: list[float]) -> Scale | None:
    counted = [i for i, size in enumerate(sizes) if np.isfinite(size) and size > 0]
    rates = [size / (magnitude or 1.0) for size, magnitude in zip(sizes, magnitudes, strict=True)]
    # Of very many leaves, the outermost in either respect are enough.
    ranked = [sorted(counted, key=by.__getitem__) for by in (sizes, rates)]
    outermost = {i for order in ranked for i in (*order[:_OUTERMOST], *order[-_OUTERMOST:])}
    pairs = [(min(sizes[i] / sizes[j], rates[i] / rates[j]), i, j) for i in outermost for j in outermost]
    ratio, largest, smallest = max(pairs, default=(0.0, 0, 0))
    if not ratio > _UNLIKE:
        return None
    pair = (largest, smallest)
    of = lambda numbers: (numbers[pair[0]], numbers[pair[1]])
    return Scale(largest, smallest, of(sizes), of(magnitudes), ratio)
