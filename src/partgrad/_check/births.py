"""Where a number first stops being finite while a program runs: the first operation whose operands all are."""

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._programs import (
    Chain,
    Dependence,
    Operands,
    Sources,
    all_finite,
    any_equation,
    bind,
    ids,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    is_mutating,
    jaxpr_and_consts,
    primal_jaxpr,
    quick_jit,
    run,
)
from .float64 import widened
from .probe import INLINED, Answer, Question, probe

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
    if asked is None and (found := _among_results(jaxpr, operands, flowing, good, trusted)) is not None:
        return found
    return probe(jaxpr, operands, asking(flowing, asked, of_nan=of_nan), trusted=trusted)[1]


class _Made(NamedTuple):
    """An equation, and which of the numbers that are kept are its operands that flow, the others, and its results."""

    chain: Chain
    flowing: list[int]
    others: list[int]
    results: list[int]


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
            floating = [value for value in some if hasattr(value, "dtype") and _is_floating(value)]
            for value in floating:
                if id(value) not in places:
                    places[id(value)] = len(kept)
                    kept.append(value)
                    size += np.size(value) * value.dtype.itemsize
            return [places[id(value)] for value in floating]

        def rule(chain: Chain, given: Operands) -> Operands:
            equation = chain[-1]
            is_inlined = equation.primitive.name in INLINED
            if is_inlined:
                inner, constants = jaxpr_and_consts(primal_jaxpr(equation))
                results = run(inner, constants, given, rule, inside=chain)
            else:
                results = list(bind(equation, given))
            if not is_inlined or is_custom_rule(equation):
                pairs = list(zip(given, flowing.into(chain), strict=True))
                into, others = ([value for value, mask in pairs if bool(mask) is flows] for flows in (True, False))
                if into:
                    made.append(_Made(chain, *map(places_of, (into, others, results))))
            return results

        outputs = run(body, consts, operands, rule)
        return (kept if size <= _MOST_BYTES else []), outputs

    kept, _ = quick_jit(with_results, trusted=lambda results: trusted(results[1]))(consts, operands)
    if size > _MOST_BYTES:
        return None
    worst = [_worst_of(np.ravel(widened(value))) for value in kept]
    return [answer for number, one in enumerate(made) if (answer := _answer(number, one, worst, good)) is not None]


def _is_loop(equation: JaxprEqn) -> bool:
    return equation.primitive.name not in INLINED and any(True for _ in inner_jaxprs(equation))


def _answer(order: int, made: _Made, worst: list[int], good: int) -> Answer | None:
    """The answer of an equation, from what is worst in each number; None if it makes nothing of what is good."""
    first = next((worst[place] for place in made.results if worst[place] < _FINITE), _FINITE)
    if first >= good or any(worst[place] < good for place in made.flowing):
        return None
    of_values = min((worst[place] for place in made.others), default=_FINITE)
    numbers = [first % _INFINITE, first < _INFINITE, _meets(of_values)]
    return Answer(made.chain, (), np.array(numbers, np.int32), (order,))


def _worst_of(values: np.ndarray[Any, Any]) -> int:
    """The same as `_worst`, of an array that was computed."""
    bad = np.flatnonzero(~np.isfinite(values))
    nans = bad[np.isnan(values[bad])]
    return int(nans[0]) if nans.size else _INFINITE + int(bad[0]) if bad.size else _FINITE


def _meets(worst: int) -> int:
    return 1 if worst < _INFINITE else 2 if worst < _FINITE else 0


def asking(flowing: Dependence, asked: Container[tuple[int, ...]] | None = None, *, of_nan: bool = False) -> Question:
    """The question whether a derivative first stops being finite at an equation."""

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if is_mutating(chain[-1]) or (asked is not None and ids(chain) not in asked):
            return None
        return _birth(operands, flowing.into(chain), results, _INFINITE if of_nan else _FINITE)

    return question


def _birth(operands: Operands, masks: Sources, results: Operands, good: int) -> Any:
    """The element of the first result that is not finite although all operands are, and whether it is NaN.

    And whether an operand that is a constant of the derivative, a value, is NaN (1) or infinite (2) itself.
    """
    pairs = [pair for pair in zip(operands, masks, strict=True) if hasattr(pair[0], "dtype")]
    made = [_worst(result) for result in results if hasattr(result, "dtype") and _is_floating(result)]
    if not any(mask for _, mask in pairs) or not made:
        return None
    worst = [(bool(mask), _worst(x)) for x, mask in pairs if _is_floating(x)]
    is_good = jnp.stack([True, *(x >= good for flows, x in worst if flows)]).all()
    of_values = jnp.stack([_FINITE, *(x for flows, x in worst if not flows)]).min()
    of_value = jnp.where(of_values < _INFINITE, 1, jnp.where(of_values < _FINITE, 2, 0))
    first = functools.reduce(lambda first, then: jnp.where(first < _FINITE, first, then), made)
    return jnp.stack([jnp.where(is_good & (first < good), first % _INFINITE, -1), first < _INFINITE, of_value])


@jax.jit
def _worst(value: Any) -> Any:
    """The place of the first NaN in an array, else that of the first infinity, else what is beyond them."""
    # It is asked of every operand of a program: compiled, it is traced once for each shape.
    flat = jnp.ravel(value)
    place = lax.iota(np.int32, flat.size)
    told = jnp.where(jnp.isnan(flat), place, jnp.where(jnp.isfinite(flat), _FINITE, _INFINITE + place))
    return jnp.min(told, initial=_FINITE)


def _is_floating(value: Any) -> bool:
    return is_floating(value) and value.dtype != jax.dtypes.float0
