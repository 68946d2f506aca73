"""Where a number first stops being finite while a program runs: the first operation whose operands all are."""

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._programs import (
    Chain,
    Dependence,
    Operands,
    all_finite,
    any_equation,
    ids,
    inner_jaxprs,
    is_floating,
    is_mutating,
    jaxpr_and_consts,
    quick_jit,
)
from .float64 import widened
from .probe import INLINED, Answer, Question, probe, visited

# The first places of an infinity, and of an element that is finite: one reduction tells all that is asked of an array.
_INFINITE, _FINITE = 1 << 29, 1 << 30
# So many bytes of results are kept.
_MOST_BYTES = 1 << 26


def births_in(
    jaxpr: ClosedJaxpr,
    operands: Operands,
    flowing: Dependence,
    seen: Operands | None = None,
    asked: Container[tuple[int, ...]] | None = None,
    *,
    of_nan: bool = False,
) -> list[Answer]:
    """Where a derivative first stops being finite, in order of execution.

    Args:
        jaxpr: The derivative, or the function.
        operands: Where it runs.
        flowing: What flows in it.
        seen: What the user's own run computed.
        asked: Which equations may be the place, by the identities of their chains; None for any.
        of_nan: Whether what is infinite counts as finite.
    """

    def is_seen(outputs: Operands) -> bool:
        pairs = zip(outputs, seen or (), strict=True)
        return all(np.array_equal(*(np.isfinite(widened(x)) for x in pair)) for pair in pairs)

    trusted: Callable[[Any], bool] = all_finite if seen is None else is_seen
    good = _INFINITE if of_nan else _FINITE
    if (found := _among_results(jaxpr, operands, flowing, good, trusted)) is not None:
        return [answer for answer in found if asked is None or ids(answer.chain) in asked]
    return probe(jaxpr, operands, asking(flowing, asked, good), trusted=trusted)[1]


class _Made(NamedTuple):
    """An equation, and which of the numbers that are kept are its results, its operands that flow, and the others."""

    chain: Chain
    results: list[int]
    flowing: list[int]
    others: list[int]


def _among_results(
    jaxpr: ClosedJaxpr, operands: Operands, flowing: Dependence, good: int, trusted: Callable[[Any], bool]
) -> list[Answer] | None:
    """The answers of a program without loops; None if it has any, or is too large to keep all of its results.

    To compile the question takes much longer than to compile the program, which is run with all results for outputs.
    """
    body, consts = jaxpr_and_consts(jaxpr)
    if any_equation(body, lambda equation: is_mutating(equation) or _is_loop(equation)):
        return None
    made, size = list[_Made](), 0

    def with_results(consts: Operands, operands: Operands) -> tuple[Operands, Operands]:
        nonlocal size
        kept, places, size = list[Any](), dict[int, int](), 0
        made.clear()

        def places_of(some: Iterable[Any]) -> list[int]:
            nonlocal size
            floating = list(filter(_is_floating, some))
            for value in floating:
                if id(value) not in places:
                    places[id(value)] = len(kept)
                    kept.append(value)
                    size += np.size(value) * value.dtype.itemsize
            return [places[id(value)] for value in floating]

        def visit(chain: Chain, given: Operands, results: Operands) -> None:
            pairs = list(zip(given, flowing.into(chain), strict=True))
            into, others = ([value for value, mask in pairs if bool(mask) is flows] for flows in (True, False))
            if into:
                made.append(_Made(chain, *map(places_of, (results, into, others))))

        outputs = visited(body, consts, operands, visit)
        return (kept if size <= _MOST_BYTES else []), outputs

    kept, _ = quick_jit(with_results, trusted=lambda results: trusted(results[1]))(consts, operands)
    if size > _MOST_BYTES:
        return None
    worst = [_worst_in(np, widened(value)) for value in kept]
    answers = []
    for order, one in enumerate(made):
        results, into, others = ([worst[place] for place in places] for places in one[1:])
        if results and (numbers := _numbers(np, results, into, others, good))[0] >= 0:
            answers.append(Answer(one.chain, (), numbers, (order,)))
    return answers


def _is_loop(equation: JaxprEqn) -> bool:
    return equation.primitive.name not in INLINED and any(True for _ in inner_jaxprs(equation))


def asking(flowing: Dependence, asked: Container[tuple[int, ...]] | None = None, good: int = _FINITE) -> Question:
    """The question whether a derivative first stops being finite at an equation, or NaN comes where all is `good`."""

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if is_mutating(chain[-1]) or (asked is not None and ids(chain) not in asked):
            return None
        pairs = list(zip(operands, flowing.into(chain), strict=True))
        made = [_worst(result) for result in results if _is_floating(result)]
        if not made or not any(mask for operand, mask in pairs if hasattr(operand, "dtype")):
            return None
        into, others = (
            [_worst(operand) for operand, mask in pairs if bool(mask) is flows and _is_floating(operand)]
            for flows in (True, False)
        )
        return _numbers(jnp, made, into, others, good)

    return question


def _numbers(xp: Any, made: list[Any], flowing: list[Any], others: list[Any], good: int) -> Any:
    """The element of the first result that is not good although all operands are, or -1; and whether it is NaN.

    And whether an operand that is a constant of the derivative, a value, is NaN (1) or infinite (2) itself. Of each
    number it is given what is worst in it, in NumPy's arrays or in JAX's.
    """
    first = functools.reduce(lambda first, then: xp.where(first < _FINITE, first, then), made)
    of_values = xp.stack([xp.asarray(worst) for worst in (_FINITE, *others)]).min()
    is_born = (first < good) & xp.stack([xp.asarray(worst) >= good for worst in (_FINITE, *flowing)]).all()
    of_value = xp.where(of_values < _INFINITE, 1, xp.where(of_values < _FINITE, 2, 0))
    return xp.stack([xp.where(is_born, first % _INFINITE, -1), first < _INFINITE, of_value])


def _worst_in(xp: Any, value: Any) -> Any:
    """The place of the first NaN in an array, else that of the first infinity, else what is beyond them."""
    flat = xp.ravel(value)
    place = xp.arange(flat.size, dtype=np.int32)
    told = xp.where(xp.isnan(flat), place, xp.where(xp.isfinite(flat), _FINITE, _INFINITE + place))
    return xp.min(told, initial=_FINITE)


# It is asked of every operand of a program: compiled, it is traced once for each shape.
_worst = jax.jit(functools.partial(_worst_in, jnp))


def _is_floating(value: Any) -> bool:
    return hasattr(value, "dtype") and is_floating(value) and value.dtype != jax.dtypes.float0
