"""Sets of sources for each element of an array, through operations that only move or combine elements.

What an array depends on is an int if all its elements depend on the same, and an array of ints otherwise.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .equations import (
    jaxpr_and_consts,
    primal_jaxpr,
    reshape_order,
    windows_of,
)
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    KINDS,
)

# Larger arrays are followed as a whole.
_MOST_ELEMENTS = 1024
_POINTWISE = KINDS["elementwise"] | {
    *("add", "add_any", "sub", "neg", "mul", "div", "max", "min", "clamp", "select_n", "convert_element_type"),
    *("copy", "real", "imag", "conj", "complex"),
}
# The elements of these results may differ in what they depend on, even if each operand is followed as a whole.
_PARTED = frozenset({"concatenate", "pad", "stack"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})


_BY_ITSELF = _POINTWISE | KINDS["flat"] | KINDS["test"] | {"and", "or", "not", "xor", "reduce_precision"}
_BODIES = CALLS | CHECKPOINTS | CUSTOM_RULES


def is_elementwise(jaxpr: Jaxpr) -> bool:
    """Whether each element of the one result depends on the same element of the one argument alone."""
    shapes = {getattr(atom.aval, "shape", None) for atom in (*jaxpr.invars, *jaxpr.outvars)}
    return len(jaxpr.invars) == len(jaxpr.outvars) == len(shapes) == 1 and _followed(jaxpr, [True]) is not None


def _followed(jaxpr: Jaxpr, varies: list[bool]) -> list[bool] | None:
    """Which results depend on the arguments that vary; None if an element depends on another one."""
    varying = {var for var, own in zip(jaxpr.invars, varies, strict=True) if own}
    is_varying = lambda atom: not isinstance(atom, Literal) and atom in varying
    for equation in jaxpr.eqns:
        given = list(map(is_varying, equation.invars))
        if not any(given):
            continue
        name, results = equation.primitive.name, [True] * len(equation.outvars)
        if name in _BODIES:
            body = primal_jaxpr(equation)
            inner = None if body is None else jaxpr_and_consts(body)[0]
            followed = None if inner is None or len(inner.invars) != len(given) else _followed(inner, given)
            if followed is None:
                return None
            results = followed
        elif name not in _BY_ITSELF or any(
            atom.aval.shape != equation.outvars[0].aval.shape
            for atom, own in zip(equation.invars, given, strict=True)
            if own
        ):
            return None
        varying.update(var for var, own in zip(equation.outvars, results, strict=True) if own)
    return list(map(is_varying, jaxpr.outvars))


def union_of(source: Any) -> int:
    """What any element depends on."""
    return source if isinstance(source, int) else int(np.bitwise_or.reduce(source, axis=None, initial=0))


def moved(equation: JaxprEqn, given: list[Any], passed: list[int], everywhere: int) -> list[Any]:
    """What each element of the results depends on.

    Args:
        equation: The equation.
        given: What its operands depend on.
        passed: What the equation passes on to each result as a whole: of what its operands depend on, and besides.
        everywhere: What all elements of a result depend on if any does.

    Returns:
        What the results depend on: `passed`, or less where it is known for each element.
    """
    name = equation.primitive.name
    if not any(passed):
        return list(passed)
    if all(isinstance(source, int) for source in given) and (name not in _PARTED or len(set(given)) == 1):
        return list(passed)
    rule = _pointwise if name in _POINTWISE else _reduction if name in _REDUCTIONS else MOVED.get(name)
    if rule is None or max(atom.aval.size for atom in (*equation.invars, *equation.outvars)) > _MOST_ELEMENTS:
        return list(passed)
    elements = rule(equation, given)
    if elements is None:
        return list(passed)
    union = functools.reduce(operator.or_, map(union_of, given), 0)
    return [
        _settled((each & whole) | (whole & (~union | everywhere))) for each, whole in zip(elements, passed, strict=True)
    ]


def _settled(elements: Any) -> Any:
    if isinstance(elements, int) or not elements.size:
        return union_of(elements)
    first = elements.flat[0]
    return first if all(each == first for each in elements.flat) else elements


def _full(source: Any, shape: Any) -> Any:
    return np.full(shape, source, object) if isinstance(source, int) else source


def _pointwise(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    # Axes of size one may be broadcast.
    return [functools.reduce(operator.or_, given)]


def _reduction(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    return [np.bitwise_or.reduce(given[0], axis=tuple(equation.params["axes"]), initial=0)]


def _reshaped(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    order = reshape_order(equation)
    operand = given[0] if order is None else np.transpose(given[0], order)
    return [np.reshape(operand, equation.outvars[0].aval.shape)]


def _transposed(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    return [np.transpose(given[0], equation.params["permutation"])]


def _reversed(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    return [np.flip(given[0], equation.params["dimensions"])]


def _cut_up(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    return [given[0][window] for window in windows_of(equation) or ()]


def _broadcast(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    operand, shape = given[0], equation.outvars[0].aval.shape
    spread = [1] * len(shape)
    for axis, size in zip(equation.params["broadcast_dimensions"], operand.shape, strict=True):
        spread[axis] = size
    return [np.broadcast_to(operand.reshape(spread), shape)]


def _concatenated(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    parts = [_full(source, atom.aval.shape) for source, atom in zip(given, equation.invars, strict=True)]
    return [np.concatenate(parts, axis=equation.params["dimension"])]


def _stacked(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    parts = [_full(source, atom.aval.shape) for source, atom in zip(given, equation.invars, strict=True)]
    return [np.stack(parts, axis=equation.params["axis"])]


def _unstacked(equation: JaxprEqn, given: list[Any]) -> list[Any]:
    return list(np.moveaxis(given[0], equation.params["axis"], 0))


def _padded(equation: JaxprEqn, given: list[Any]) -> list[Any] | None:
    windows = windows_of(equation)
    if windows is None:
        return None
    result = np.full(equation.outvars[0].aval.shape, np.asarray(given[1]).item(), object)
    result[windows[0]] = _full(given[0], equation.invars[0].aval.shape)
    return [result]


def _sliced_at(equation: JaxprEqn, given: list[Any]) -> list[Any] | None:
    starts, sizes = equation.invars[1:], equation.params["slice_sizes"]
    if isinstance(given[0], int) or not all(isinstance(start, Literal) for start in starts):
        return None
    windows = zip(starts, sizes, given[0].shape, strict=True)
    at = [(min(max(int(start.val), 0), extent - size), size) for start, size, extent in windows]
    return [given[0][tuple(slice(start, start + size) for start, size in at)]]


# How NumPy arrays go through moves, whatever their elements are; None if it depends on other operands.
MOVED: dict[str, Callable[[JaxprEqn, list[Any]], list[Any] | None]] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
    "transpose": _transposed,
    "rev": _reversed,
    **dict.fromkeys(("slice", "split"), _cut_up),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "stack": _stacked,
    "unstack": _unstacked,
    "pad": _padded,
    "dynamic_slice": _sliced_at,
}
