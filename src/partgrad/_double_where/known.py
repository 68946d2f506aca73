"""What is known about masks while tracing: those that do not depend on data are also computed with NumPy.

They are made of `iota`, comparisons, literals and the boolean and integer arrays that a function captured. A mask that
turns out equal for all elements becomes `True` or `False`, and costs nothing further. For others, the traced array is
kept along with its numbers: a program with the numbers written out would be larger.
"""

import contextlib
import contextvars
import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import padded_window

Numbers: TypeAlias = np.ndarray[Any, Any]

# Beyond this many elements, NumPy would take more time than it saves.
LARGEST = 1 << 20
# The same for integers, which are less often part of a mask.
_LARGEST_INDEX = 1 << 12


class Fact(NamedTuple):
    """What is known about a traced value, which this keeps alive.

    Attributes:
        numbers: Its numbers, if it does not depend on data.
        origin: The value it was broadcast from, and the axes that value occupies.
        root: The value it is a reshape of.
        risky: If this value is a selection, the predicate and the number of its only case that may not be finite.
        complement: The mask of all other elements.
        literals: If it is a conjunction of masks, their ids.
        part: A mask all of whose elements are in this one.
        factors: If it is another mask cut to known elements, these two; each has size one where the other varies.
    """

    value: Any
    numbers: Numbers | None = None
    origin: tuple[Any, Sequence[int]] | None = None
    root: Any = None
    risky: tuple[Any, int] | None = None
    complement: Any = None
    literals: frozenset[int] | None = None
    part: Any = None
    factors: tuple[Any, Numbers] | None = None


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


def remember(value: Any, numbers: Numbers | None) -> None:
    """Remember the numbers of a traced value."""
    if numbers is not None:
        learn(value, numbers=numbers)


def everywhere(shape: Sequence[int]) -> jax.Array:
    """A mask of all elements that is an array."""
    mask = jax.lax.full(shape, True)
    if math.prod(shape) <= LARGEST:
        remember(mask, np.ones(shape, bool))
    return mask


def padded(mask: Any, pads: Sequence[tuple[int, int, int]]) -> Any:
    """A mask of more elements, `False` for those that `jax.lax.pad` adds."""

    def larger(shape: Sequence[int]) -> list[int]:
        axes = zip(shape, pads, strict=True)
        return [low + high + size + max(size - 1, 0) * inside for size, (low, high, inside) in axes]

    def pad(m: Numbers) -> Numbers:
        result = np.zeros(larger(m.shape), bool)
        result[padded_window(m.shape, pads)] = m
        return result

    of_traced = lambda m: jax.lax.pad(m, False, pads)
    if numbers_of(mask) is not None:
        return lifted(pad, of_traced)(mask)
    traced, elements = factors(mask)
    grows = [any(of_axis) for of_axis in pads]
    sizes = [size if g else own for g, size, own in zip(grows, mask.shape, elements.shape, strict=True)]
    is_mixed = any(g and size != 1 for g, size in zip(grows, traced.shape, strict=True))
    if is_mixed or math.prod(larger(sizes)) > LARGEST:
        return of_traced(mask)
    return product(traced, pad(np.broadcast_to(elements, sizes)), lambda: of_traced(mask))


def factors(mask: Any) -> tuple[Any, Numbers]:
    """A mask as another one cut to known elements; each has size one along all axes along which the other varies."""
    return fact(mask).factors or (mask, np.ones((1,) * mask.ndim, bool))


def product(traced: Any, elements: Numbers, make: Callable[[], Any]) -> Any:
    """A mask cut to known elements; `make` makes it, if it is neither empty nor the whole mask."""
    if elements.all() or not elements.any():
        return traced if elements.all() else False
    made = make()
    learn(made, factors=(traced, elements))
    return made


def by_axes(mask: Any, of_mask: Callable[[Any], Any], of_numbers: Callable[[Numbers], Numbers]) -> Any:
    """A function of a mask that treats axes one by one; factors go through it on their own."""
    if isinstance(mask, bool):
        return mask
    traced, elements = factors(mask)
    if traced is mask:
        return of_mask(mask)
    return product(of_mask(traced), of_numbers(elements), lambda: of_mask(mask))


def learn(value: Any, **facts: Any) -> None:
    """Remember facts about a traced value, or about what stands for one."""
    knowledge = _knowledge.get()
    if knowledge is not None and isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
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
    root = root_of(mask)
    if root.shape == shape:
        return root

    def make() -> Any:
        new = lifted(lambda m: m.reshape(shape), lambda m: jax.lax.reshape(m, shape))(root)
        learn(new, root=root)
        return new

    return once((shape,), root, make)


def root_of(mask: Any) -> Any:
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


def conjunction(a: Any, b: Any, make: Callable[[], Any]) -> Any:
    """The elements in both masks; `make` makes it, if it is neither of them, known to be empty, nor there already."""
    knowledge = _knowledge.get()
    if knowledge is None or not (isinstance(a, jax.core.Tracer) and isinstance(b, jax.core.Tracer)):
        return make()
    of_a, of_b = _literals(a), _literals(b)
    literals = of_a | of_b
    if literals in (of_a, of_b):
        return a if literals == of_a else b
    if any(_opposite(knowledge, literal) in literals for literal in literals):
        return False
    if literals not in knowledge.made:
        knowledge.made[literals] = made = make()
        # The literals are ids, so what they are of has to stay.
        for mask, facts in ((a, {}), (b, {}), (made, {"literals": literals})):
            learn(mask, **facts)
    return knowledge.made[literals]


def union(a: Any, b: Any) -> Any:
    """The elements in at least one of two masks, if that is everything or a mask that is there already; or None."""
    if _contains_rest(a, b) or _contains_rest(b, a):
        return True
    knowledge, of_a, of_b = _knowledge.get(), _literals(a), _literals(b)
    if knowledge is None or a.ndim != b.ndim:
        return None
    if of_a <= of_b or of_b <= of_a:
        return a if of_a <= of_b else b
    # What one predicate divides is put together again.
    (of_a, of_b), both = (of_a - of_b, of_b - of_a), of_a & of_b
    if len(of_a) != 1 or {_opposite(knowledge, *of_a)} != of_b:
        return None
    return knowledge.facts[min(both)].value if len(both) == 1 else knowledge.made.get(both)


def _literals(mask: Any) -> frozenset[int]:
    return fact(mask).literals or frozenset((id(mask),))


def _opposite(knowledge: _Knowledge, literal: int) -> int | None:
    found = knowledge.facts.get(literal)
    return None if found is None or found.complement is None else id(found.complement)


def _contains_rest(mask: Any, of: Any) -> bool:
    rest = fact(root_of(of)).complement
    while mask is not None and rest is not None:
        if mask.shape == of.shape and root_of(mask) is rest:
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
    # A copy: it is kept, and a view would keep the array.
    return np.array(value) if small and getattr(value, "is_fully_addressable", True) else None


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
