"""Where a number first stops being finite while a program runs: the first operation whose operands all are."""

import dataclasses
import functools
from collections.abc import Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

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
    asked = _suspects(jaxpr, operands, flowing, of_nan) if asked is None else asked

    def is_seen(outputs: Operands) -> bool:
        pairs = zip(outputs, seen or (), strict=True)
        return all(np.array_equal(*(np.isfinite(widened(x)) for x in pair)) for pair in pairs)

    question = asking(flowing, asked, of_nan=of_nan)
    return probe(jaxpr, operands, question, trusted=all_finite if seen is None else is_seen)[1]


@dataclasses.dataclass(frozen=True)
class _Suspects(Container[tuple[int, ...]]):
    """Equations, by the identities of their chains, and all that is inside of some others."""

    equations: set[tuple[int, ...]]
    loops: set[int]

    def __contains__(self, key: Any) -> bool:
        return key in self.equations or not self.loops.isdisjoint(key)


def _suspects(jaxpr: ClosedJaxpr, operands: Operands, flowing: Dependence, of_nan: bool) -> _Suspects | None:
    """The equations of a program at which a number may first stop being finite; None if it is too large to tell.

    To compile the question takes much longer than to compile the program. So that runs once with all its results for
    outputs: of the equations outside of loops, only those are asked that make something else of what is finite.
    """
    body, consts = jaxpr_and_consts(jaxpr)
    if any_equation(body, is_mutating):
        return None
    # For each equation outside of loops, which of the outputs are its operands that flow, and its results.
    equations: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    loops, size = set[int](), 0

    def all_results(consts: Operands, operands: Operands) -> Operands:
        values, places = list[Any](), dict[int, int]()

        def places_of(some: Iterable[Any]) -> list[int]:
            nonlocal size
            for value in some:
                if id(value) not in places:
                    places[id(value)] = len(values)
                    values.append(value)
                    size += value.size * value.dtype.itemsize
            return [places[id(value)] for value in some]

        def rule(chain: Chain, given: Operands) -> Operands:
            equation = chain[-1]
            is_inlined = equation.primitive.name in INLINED
            if is_inlined:
                inner, constants = jaxpr_and_consts(primal_jaxpr(equation))
                results = run(inner, constants, given, rule, inside=chain)
            else:
                results = list(bind(equation, given))
            if not is_inlined and list(inner_jaxprs(equation)):
                loops.add(id(equation))
            elif not is_inlined or is_custom_rule(equation):
                flowing_in = zip(given, flowing.into(chain), strict=True)
                into = places_of([value for value, mask in flowing_in if mask and _is_floating(value)])
                equations[ids(chain)] = into, places_of([value for value in results if _is_floating(value)])
            return results

        run(body, consts, operands, rule)
        return values if size <= _MOST_BYTES else []

    results = quick_jit(all_results, trusted=lambda results: True)(consts, operands)
    if size > _MOST_BYTES:
        return None
    finite = [not bool((np.isnan(x) if of_nan else ~np.isfinite(x)).any()) for x in map(widened, results)]
    born = {
        key
        for key, (into, made) in equations.items()
        if all(finite[n] for n in into) and not all(finite[n] for n in made)
    }
    return _Suspects(born, loops)


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
