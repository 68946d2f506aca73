"""Where a number first stops being finite while a program runs: the first operation whose operands all are."""

import functools
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from .._programs import Chain, Dependence, Operands, Sources, all_finite, ids, is_floating, is_mutating
from .float64 import widened
from .probe import Answer, Question, probe

# The first places of an infinity, and of an element that is finite: one reduction tells all that is asked of an array.
_INFINITE, _FINITE = 1 << 29, 1 << 30


def births_in(
    jaxpr: ClosedJaxpr,
    operands: Operands,
    flowing: Dependence,
    seen: Operands | None = None,
    asked: Container[tuple[int, ...]] | None = None,
) -> list[Answer]:
    """Where a derivative first stops being finite, in order of execution.

    Args:
        jaxpr: The derivative, or the function.
        operands: Where it runs.
        flowing: What flows in it.
        seen: What the user's own run computed.
        asked: Which equations may be the place, by the identities of their chains; None for any.
    """

    def is_seen(outputs: Operands) -> bool:
        pairs = zip(outputs, seen or (), strict=True)
        return all(np.array_equal(*(np.isfinite(widened(x)) for x in pair)) for pair in pairs)

    return probe(jaxpr, operands, asking(flowing, asked), trusted=all_finite if seen is None else is_seen)[1]


def asking(flowing: Dependence, asked: Container[tuple[int, ...]] | None = None) -> Question:
    """The question whether a derivative first stops being finite at an equation."""

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if is_mutating(chain[-1]) or (asked is not None and ids(chain) not in asked):
            return None
        return _birth(operands, flowing.into(chain), results)

    return question


def _birth(operands: Operands, masks: Sources, results: Operands) -> Any:
    """The element of the first result that is not finite although all operands are, and whether it is NaN.

    And whether an operand that is a constant of the derivative, a value, is NaN itself.
    """
    pairs = [pair for pair in zip(operands, masks, strict=True) if hasattr(pair[0], "dtype")]
    made = [_worst(result) for result in results if hasattr(result, "dtype") and _is_floating(result)]
    if not any(mask for _, mask in pairs) or not made:
        return None
    worst = [(bool(mask), _worst(x)) for x, mask in pairs if _is_floating(x)]
    is_finite = jnp.stack([True, *(x == _FINITE for flows, x in worst if flows)]).all()
    of_value = jnp.stack([False, *(x < _INFINITE for flows, x in worst if not flows)]).any()
    first = functools.reduce(lambda first, then: jnp.where(first < _FINITE, first, then), made)
    return jnp.stack([jnp.where(is_finite & (first < _FINITE), first % _INFINITE, -1), first < _INFINITE, of_value])


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
