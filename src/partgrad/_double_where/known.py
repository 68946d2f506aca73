"""What is known about masks while tracing: those that do not depend on data are also computed with NumPy.

They are made of `iota`, comparisons, literals and the boolean and integer arrays that a function captured. A mask that
turns out equal for all elements becomes `True` or `False`, and costs nothing further. For others, the traced array is
kept along with its numbers: a program with the numbers written out would be larger.
"""

import contextlib
import contextvars
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._programs import (
    CALLS,
    MOVED,
    bind,
    is_reshape,
    jaxpr_and_consts,
    padded_window,
    primal_jaxpr,
    scan_of,
    step_through,
)

Numbers: TypeAlias = np.ndarray[Any, Any]

# Beyond this many elements, NumPy would take more time than it saves.
LARGEST = 1 << 20
# The same for integers, which are less often part of a mask.
_LARGEST_INDEX = 1 << 12

_DTYPES = frozenset(
    ("bool", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
# Sums, differences and products of integers below these are exact in single precision.
_WHOLE = {"add": 1 << 23, "sub": 1 << 23, "mul": 1 << 12}


class Fact(NamedTuple):
    """What is known about a traced value, which this keeps alive.

    Attributes:
        numbers: Its numbers, if it does not depend on data.
        origin: The value it was broadcast from, and the axes that value occupies.
        root: The value it is a reshape of.
        risky: If this value is a selection, the predicate and the number of its only case that may not be finite.
        complement: The mask of all other elements.
        part: A mask all of whose elements are in this one.
    """

    value: Any
    numbers: Numbers | None = None
    origin: tuple[Any, Sequence[int]] | None = None
    root: Any = None
    risky: tuple[Any, int] | None = None
    complement: Any = None
    part: Any = None


class _Knowledge:
    """What is known about traced values, by identity, and the masks made so far, so that none is made twice.

    Args:
        outside: What is known outside of a loop or branch, whose body may read any value from there.
    """

    def __init__(self, outside: "_Knowledge | None" = None):
        self.facts: ChainMap[int, Fact] = outside.facts.new_child() if outside else ChainMap()
        self.made: ChainMap[Hashable, Any] = outside.made.new_child() if outside else ChainMap()


_knowledge: contextvars.ContextVar[_Knowledge | None] = contextvars.ContextVar("knowledge", default=None)


@contextlib.contextmanager
def remembering(inside: bool = False) -> Iterator[None]:
    """A context that remembers what is known about traced values, and forgets it with the tracers on exit.

    Args:
        inside: Whether what is known outside counts too, as for a body that is used where it is traced.
    """
    token = _knowledge.set(_Knowledge(_knowledge.get() if inside else None))
    try:
        yield
    finally:
        _knowledge.reset(token)


def followed(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, with facts about every value in it."""

    def step(equation: JaxprEqn, given: list[Any]) -> list[Any]:
        results = bind(equation, given)
        follow(equation, given, results)
        return results

    return step_through(*jaxpr_and_consts(jaxpr), list(operands), step)


def remember(value: Any, numbers: Numbers | None) -> None:
    """Remember the numbers of a traced value."""
    if numbers is not None:
        learn(value, numbers=numbers)


def everywhere(shape: Sequence[int]) -> jax.Array:
    """A mask of all elements that is an array."""
    mask = jax.lax.full(shape, True)
    remember(mask, np.ones(shape, bool))
    return mask


def padded(mask: Any, pads: Sequence[tuple[int, int, int]]) -> Any:
    """A mask of more elements, `False` for those that `jax.lax.pad` adds."""

    def pad(m: Numbers) -> Numbers:
        axes = zip(m.shape, pads, strict=True)
        result = np.zeros([low + high + size + max(size - 1, 0) * inside for size, (low, high, inside) in axes], bool)
        result[padded_window(m.shape, pads)] = m
        return result

    return lifted(pad, lambda m: jax.lax.pad(m, False, pads))(mask)


def learn(value: Any, **facts: Any) -> None:
    knowledge = _knowledge.get()
    if knowledge is not None and isinstance(value, jax.core.Tracer):
        knowledge.facts[id(value)] = fact(value)._replace(**facts)


def fact(value: Any) -> Fact:
    knowledge = _knowledge.get()
    return Fact(value) if knowledge is None else knowledge.facts.get(id(value), Fact(value))


def once(key: tuple[Any, ...], value: Any, make: Callable[[], Any]) -> Any:
    """Something derived from a traced value, made once per key."""
    knowledge = _knowledge.get()
    if knowledge is None or not isinstance(value, jax.core.Tracer):
        return make()
    learn(value)
    place = (*key, id(value))
    if place not in knowledge.made:
        knowledge.made[place] = make()
    return knowledge.made[place]


def numbers_of(value: Any) -> Numbers | None:
    """The known numbers of a value, or None."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return np.asarray(value)
    return fact(value).numbers


def reshaped(mask: Any, shape: Sequence[int]) -> Any:
    """A mask in another shape; the same object for the same mask and shape."""
    shape = tuple(shape)
    if isinstance(mask, bool):
        return mask
    root = _root(mask)
    if root.shape == shape:
        return root

    def make() -> Any:
        new = lifted(lambda m: m.reshape(shape), lambda m: jax.lax.reshape(m, shape))(root)
        learn(new, root=root)
        return new

    return once((shape,), root, make)


def _root(mask: Any) -> Any:
    root = fact(mask).root
    return mask if root is None else root


def narrowed(value: Any) -> Any:
    """A value before broadcasting, with axes of size one, as far as that is known."""
    origin = fact(value).origin
    if origin is None:
        return value
    operand, axes = origin
    shape = [1] * value.ndim
    for axis, size in zip(axes, operand.shape, strict=True):
        shape[axis] = size
    return reshaped(operand, shape)


def taken(which: Any, case: int, rank: int) -> Any:
    """The mask of the elements for which a selection takes a case, given its predicate."""
    which = narrowed(which)
    if isinstance(which, bool):
        return which is bool(case)
    of_bool, chosen = jax.typeof(which).dtype == bool, lambda p: p == case
    function = lifted(np.logical_not, jax.lax.bitwise_not) if of_bool else lifted(chosen)
    mask = which if of_bool and case else once(("case", case), which, lambda: function(which))
    mask = lifted(lambda p: p)(mask) if mask is which else mask
    if of_bool and not case:
        learn(mask, complement=which)
        learn(which, complement=mask)
    return mask if isinstance(mask, bool) or mask.ndim == rank else reshaped(mask, (1,) * rank)


def contains(mask: Any, part: Any) -> None:
    """Remember that all elements of a mask are in another one."""
    learn(mask, part=part)


def is_everything(one: Any, other: Any) -> bool:
    """Whether it is known that each element is in one of two masks."""
    return _contains_rest(one, other) or _contains_rest(other, one)


def _contains_rest(mask: Any, of: Any) -> bool:
    rest = fact(_root(of)).complement
    while mask is not None and rest is not None:
        if mask.shape == of.shape and _root(mask) is rest:
            return True
        mask = fact(mask).part
    return False


def is_safe_outside(value: Any, mask: Any) -> bool:
    """Whether everything outside a mask is known to be finite."""
    risky = fact(value).risky
    if risky is None or isinstance(mask, bool):
        return False
    chosen = taken(*risky, value.ndim)
    numbers, live = numbers_of(chosen), numbers_of(mask)
    return chosen is mask or (numbers is not None and live is not None and not np.any(numbers & ~live))


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero, whatever the data are."""
    numbers = numbers_of(value)
    return numbers is not None and not np.any(numbers)


def captured(value: Any) -> Numbers | None:
    """The numbers of an array that a function captured, if it may be part of masks."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return None
    if jnp.issubdtype(value.dtype, jnp.bool_):
        small = value.size <= LARGEST
    else:
        small = jnp.issubdtype(value.dtype, jnp.integer) and value.size <= _LARGEST_INDEX
    return np.asarray(value) if small and getattr(value, "is_fully_addressable", True) else None


def lifted(function: Callable[..., Any], of_traced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function of masks that does the same to their known numbers.

    It may only use what arrays of NumPy and JAX have in common, unless there is another function for traced masks.
    """
    traced_by = of_traced or function

    def of_masks(*masks: Any) -> Any:
        numbers = [numbers_of(mask) for mask in masks]
        if any(known is None for known in numbers):
            return traced_by(*masks)
        result = np.asarray(function(*numbers))
        if result.size and (result.all() or not result.any()):
            return bool(result.flat[0])
        for mask, known in zip(masks, numbers, strict=True):
            if known is not None and np.array_equal(known, result) and hasattr(mask, "dtype") and mask.dtype == bool:
                return mask
        traced = traced_by(*masks)
        remember(traced, result)
        return traced

    return of_masks


def follow(equation: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Remember facts about the results of an equation that follow from facts about its operands."""
    name, numbers = equation.primitive.name, [numbers_of(operand) for operand in operands]
    if name == "broadcast_in_dim" and hasattr(operands[0], "shape"):
        if results[0].size == operands[0].size:
            learn(results[0], root=_root(operands[0]))
        else:
            learn(results[0], origin=(operands[0], equation.params["broadcast_dimensions"]))
    elif is_reshape(equation) and isinstance(operands[0], jax.core.Tracer):
        learn(results[0], root=_root(operands[0]))
    elif name == "select_n":
        unknown = [case for case, known in enumerate(numbers[1:]) if known is None or not np.all(np.isfinite(known))]
        learn(results[0], risky=(operands[0], unknown[0]) if len(unknown) == 1 else None)
    elif name == "scan":
        for result, origin in zip(results, _origins(equation), strict=True):
            if origin is not None:
                learn(result, origin=(operands[origin[0]], origin[1]))
    for result, known in zip(results, _results(equation, numbers), strict=True):
        remember(result, known)


_Origin: TypeAlias = tuple[int, tuple[int, ...]] | None


def _origins(equation: JaxprEqn) -> list[_Origin]:
    """For each result of a loop, the number of the operand that it is broadcast from, if it is a predicate."""
    loop = scan_of(equation)
    if not any(variable.aval.dtype == bool for variable in equation.outvars[loop.carried :]):
        return [None] * len(equation.outvars)
    body, _ = jaxpr_and_consts(loop.body)

    def step(equation: JaxprEqn, given: list[_Origin]) -> list[_Origin]:
        if equation.primitive.name in CALLS:
            inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
            return step_through(inner, [None] * len(consts), given, step, lambda literal: None)
        if equation.primitive.name == "broadcast_in_dim" and len(given) == 1 and given[0] is not None:
            number, axes = given[0]
            return [(number, tuple(equation.params["broadcast_dimensions"][axis] for axis in axes))]
        return [None] * len(equation.outvars)

    scanned = loop.consts + loop.carried
    given = [None if number < scanned else (number, tuple(range(v.aval.ndim))) for number, v in enumerate(body.invars)]
    outputs = step_through(body, [None] * len(body.constvars), given, step, lambda literal: None)[loop.carried :]
    shifted = [None if found is None else (found[0], (0, *(axis + 1 for axis in found[1]))) for found in outputs]
    return [*[None] * loop.carried, *shifted]


def _results(equation: JaxprEqn, operands: list[Numbers | None]) -> list[Numbers | None]:
    name = equation.primitive.name
    nothing: list[Numbers | None] = [None] * len(equation.outvars)
    if any(known is None for known in operands) or not (name in CALLS or name in MOVED or name in _FOLLOWED):
        return nothing
    avals = [variable.aval for variable in equation.outvars]
    if any(aval.size > LARGEST or str(aval.dtype) not in _DTYPES for aval in avals):
        return nothing
    if name in CALLS:
        inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
        literal = lambda literal: np.asarray(literal.val)
        return step_through(inner, [*map(captured, consts)], operands, _results, literal)
    with np.errstate(all="ignore"):
        moved = MOVED.get(name, lambda _, operands: [_FOLLOWED[name](equation.params, avals[0], *operands)])
        results = moved(equation, operands) or nothing
    filled = lambda result, aval: np.broadcast_to(np.asarray(result, aval.dtype), aval.shape)
    return [None if r is None else filled(r, aval) for r, aval in zip(results, avals, strict=True)]


def _iota(params: Any, aval: Any) -> Numbers:
    along = [-1 if axis == params["dimension"] else 1 for axis in range(len(aval.shape))]
    return np.arange(aval.shape[params["dimension"]]).astype(aval.dtype).reshape(along)


def _is_whole(x: Numbers, most: int) -> bool:
    return x.dtype.kind != "f" or bool(np.all(abs(x) < most) and np.all(x == np.round(x)))


def _by_ufunc(name: str, aval: Any, operands: Sequence[Numbers]) -> Numbers | None:
    # XLA may round a sum of products once, where NumPy rounds twice.
    is_rounded = name in _WHOLE and not all(_is_whole(operand, _WHOLE[name]) for operand in operands)
    of_bits = name in {"and", "or", "not"} and aval.dtype != bool
    return None if is_rounded or of_bits else _UFUNCS[name](*operands)


_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
}
_FOLLOWED: dict[str, Callable[..., Any]] = {
    "iota": _iota,
    "select_n": lambda _, aval, which, *cases: np.where(which, cases[1], cases[0]) if len(cases) == 2 else None,
    "convert_element_type": lambda _, aval, x: x if x.dtype.kind in "bi" or aval.dtype.kind == "f" else None,
    **dict.fromkeys(("copy", "copy_p", "pcast", "pvary"), lambda _, aval, x: x),
    "reduce_or": lambda params, aval, x: x.any(tuple(params["axes"])) if aval.dtype == bool else None,
    "reduce_and": lambda params, aval, x: x.all(tuple(params["axes"])) if aval.dtype == bool else None,
    **{name: lambda _, aval, *xs, name=name: _by_ufunc(name, aval, xs) for name in _UFUNCS},
}
