"""Scans over arrays of which some steps are selected: run in segments, so that the other steps have no backward pass.

A stacked array is one of which ranges along the leading axis have values of their own. Where such an array is read
step by step, by a scan, nobody needs it whole: the scan becomes one scan for each range, before, between and after
them. JAX then sees which of them depend on the values, as if the scan had been split by hand: a segment before the
first range has no tangents at all, and one after the last range has none for what it reads.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from .equations import (
    Operands,
    branches_of,
    explicit_sharding,
    is_mutating,
    is_plain_call,
    jaxpr_and_consts,
    primal_jaxpr,
    scan_of,
    shard_map_specs,
)
from .interpreter import bind, reenter, source_of, step_through
from .primitives import CALLS, CHECKPOINTS, named

# To the same bits whatever stands around a number.
_ALIKE = named("convert_element_type reduce_precision copy copy_p")
# Each segment is a loop of its own in the compiled program.
_MOST_SEGMENTS = 9
# If more of the steps are selected, what the others save may be less than what it costs to copy other arrays.
_MOST_SELECTED = 0.75

Segment = tuple[int, int]
Ranges = tuple[Segment, ...]


@jax.tree_util.register_pytree_node_class
class Stacked:
    """An array of which some ranges along the leading axis have values of their own; a pytree.

    Args:
        base: The array; what is in the ranges is of no interest.
        parts: For each range, what stands there.
        ranges: The first step of each range and that after the last, ascending and apart from each other.
        whole: The array with all parts in it, if it is known.
    """

    def __init__(self, base: Any, parts: Sequence[Any], ranges: Ranges, whole: Any = None):
        self.base, self.parts, self.ranges, self.whole = base, tuple(parts), ranges, whole

    def tree_flatten(self) -> tuple[Any, Ranges]:
        """The arrays, and the ranges."""
        return (self.base, self.parts, self.whole), self.ranges

    @classmethod
    def tree_unflatten(cls, ranges: Ranges, children: Any) -> "Stacked":
        """From the arrays and the ranges."""
        base, parts, whole = children
        return cls(base, parts, ranges, whole)

    def between(self, start: int, stop: int) -> Any:
        """The steps from `start` to before `stop`, which all are in one range, or in none."""
        for (first, last), part in zip(self.ranges, self.parts, strict=True):
            if first <= start and stop <= last:
                return _sliced(part, start - first, stop - first)
        return _sliced(self.base, start, stop)

    def changed(self, change: Callable[[Any], Any]) -> "Stacked":
        """The array with each number changed on its own."""
        whole = None if self.whole is None else change(self.whole)
        return Stacked(change(self.base), list(map(change, self.parts)), self.ranges, whole)

    def joined(self) -> Any:
        """The array with all parts in it."""
        if self.whole is not None:
            return self.whole
        joined = self.base
        for (first, last), part in zip(self.ranges, self.parts, strict=True):
            joined = joined.at[first:last].set(part, unique_indices=True)
        return joined


def _sliced(array: Any, start: int, stop: int) -> Any:
    return array if stop - start == array.shape[0] else lax.slice_in_dim(array, start, stop)


class Reading(NamedTuple):
    """How a program reads an array.

    Attributes:
        by_steps: Whether a scan reads it step by step.
        whole: Whether anything else reads it.
    """

    by_steps: bool = False
    whole: bool = False

    def __or__(self, other: Any) -> "Reading":
        return Reading(self.by_steps or other.by_steps, self.whole or other.whole)


_WHOLE = Reading(whole=True)


def reading(jaxpr: Jaxpr, variable: Any) -> Reading:
    """How a jaxpr reads one of its inputs or constants."""
    found = Reading()
    if any(atom is variable for atom in jaxpr.outvars):
        found |= _WHOLE
    for equation in jaxpr.eqns:
        for place, atom in enumerate(equation.invars):
            if atom is variable:
                found |= (
                    reading(jaxpr, equation.outvars[0])
                    if is_alike(equation.primitive, equation.params)
                    else _reading_by(equation, place)
                )
    return found


def is_alike(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation changes each number on its own, so that a stacked array stays stacked."""
    # What has no derivative afterwards is of no interest.
    stays_floating = jnp.issubdtype(params.get("new_dtype", float), jnp.inexact)
    return primitive.name in _ALIKE and bool(stays_floating) and params.get("sharding") is None


def _reading_by(equation: JaxprEqn, place: int) -> Reading:
    """How an equation reads one of its operands."""
    name = equation.primitive.name
    if name == "scan":
        return _reading_by_scan(equation, place)
    if name in CHECKPOINTS or (name in CALLS and is_plain_call(equation)):
        found = _reading_in(primal_jaxpr(equation), place)
    elif name == "cond" and place:
        found = Reading()
        for branch in branches_of(equation):
            found |= _reading_in(branch, place - 1)
    elif name == "shard_map" and not any(shard_map_specs(equation)[0][place][:1]):
        found = _reading_in(primal_jaxpr(equation), place)
    else:
        return _WHOLE
    return found if found.by_steps else _WHOLE


def _reading_in(closed: Any, place: int) -> Reading:
    jaxpr, _ = jaxpr_and_consts(closed)
    return reading(jaxpr, jaxpr.invars[place])


def _reading_by_scan(equation: JaxprEqn, place: int) -> Reading:
    loop = scan_of(equation)
    if place < loop.consts:
        found = _reading_in(loop.body, place)
        return found if found.by_steps else _WHOLE
    first = loop.consts + loop.carried
    split = [*equation.invars[first:], *equation.outvars[loop.carried :]]
    # A reference is read in its place, and a mesh axis along which the steps are split must divide them.
    is_left = is_mutating(equation) or any(map(_is_split_among_devices, split))
    return _WHOLE if place < first or is_left else Reading(by_steps=True)


def _is_split_among_devices(atom: Any) -> bool:
    sharding = explicit_sharding(atom.aval)
    return sharding is not None and any(sharding.spec[:1])


def run(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
    """The outputs of a jaxpr some operands or constants of which are stacked: its scans over these run in segments."""
    wholes: dict[int, Any] = {}

    def joined(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = value, value.joined()
        return wholes[id(value)][1]

    def passed(equation: JaxprEqn, place: int, value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        found = _reading_by(equation, place)
        if not found.by_steps:
            return joined(value)
        return Stacked(value.base, value.parts, value.ranges, joined(value) if found.whole else None)

    def step(equation: JaxprEqn, given: Operands) -> Operands:
        if is_alike(equation.primitive, equation.params) and isinstance(given[0], Stacked):
            return [given[0].changed(lambda value: bind(equation, [value])[0])]
        given = [passed(equation, place, value) for place, value in enumerate(given)]
        if not any(isinstance(value, Stacked) for value in given):
            return bind(equation, given)
        if equation.primitive.name == "scan":
            return _in_segments(equation, given)
        return reenter(equation, given, run) or []

    return list(map(joined, step_through(jaxpr, consts, operands, step)))


def _in_segments(equation: JaxprEqn, given: Operands) -> Operands:
    """A scan, in segments between the ends of the ranges."""
    loop = scan_of(equation)
    consts, carry, xs = given[: loop.consts], given[loop.consts :][: loop.carried], given[loop.consts + loop.carried :]
    segments = _segments(equation, xs)
    if len(segments) == 1:
        xs = [own.joined() if isinstance(own, Stacked) else own for own in xs]
    found: dict[Segment, Operands] = {}
    for start, stop in reversed(segments) if loop.is_reversed else segments:
        with source_of(equation):
            own = [x.between(start, stop) if isinstance(x, Stacked) else _sliced(x, start, stop) for x in xs]
        results = _segment(equation, consts, carry, own, stop - start)
        carry, found[start, stop] = results[: loop.carried], results[loop.carried :]
    with source_of(equation):
        pieces = zip(*(found[segment] for segment in segments), strict=True)
        return [*carry, *(lax.concatenate(own, 0) if len(own) > 1 else own[0] for own in pieces)]


def _segments(equation: JaxprEqn, xs: Operands) -> list[Segment]:
    """The first step of each segment and that after the last; one segment for all steps if it is not worth it."""
    loop = scan_of(equation)
    stacked = [own for own in xs if isinstance(own, Stacked)]
    selected = set(itertools.chain.from_iterable(own.ranges for own in stacked))
    segments = list(itertools.pairwise(sorted({0, loop.length, *itertools.chain.from_iterable(selected)})))
    steps = set(itertools.chain.from_iterable(range(*own) for own in selected))
    # Whatever else it reads and writes step by step is copied, as in a scan that is split by hand.
    copied = sum(_bytes(own) for own in xs if not isinstance(own, Stacked))
    copied += sum(_bytes(atom.aval) for atom in equation.outvars[loop.carried :])
    saves_enough = len(steps) <= _MOST_SELECTED * loop.length or copied <= sum(_bytes(own.base) for own in stacked)
    return segments if saves_enough and len(segments) <= _MOST_SEGMENTS else [(0, loop.length)]


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * int(array.dtype.itemsize)


def _segment(equation: JaxprEqn, consts: Operands, carry: Operands, xs: Operands, length: int) -> Operands:
    loop, unroll = scan_of(equation), min(equation.params["unroll"], length)
    if not any(isinstance(own, Stacked) for own in consts):
        return bind(equation, [*consts, *carry, *xs], length=length, unroll=unroll)

    def step(carry: Operands, own: Operands) -> tuple[Operands, Operands]:
        results = run(*jaxpr_and_consts(loop.body), [*consts, *carry, *own])
        return results[: loop.carried], results[loop.carried :]

    with source_of(equation):
        carry, stacked = lax.scan(step, carry, xs, length=length, reverse=loop.is_reversed, unroll=unroll)
    return [*carry, *stacked]
