"""Reads and writes out of bounds, and twice where once is promised: at which line, and whether the gradient agrees."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from .._consistent_indexing import consistent_indexing
from .._programs import (
    EXTREMAL_WRITES,
    WRITES,
    Chain,
    Operands,
    any_equation,
    bind,
    ids,
    is_floating,
    is_in_library,
    line,
    written_window,
)
from .finding import Finding
from .names import finding, operation_of, steps_of
from .own import Own, tried
from .probe import Answer
from .program import Program

# Where in an answer the place of an index out of bounds is, and an index that occurs twice.
_OUTSIDE, _TWICE = 1, 5
_DELIBERATE = (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP)
_BY_INDEX = frozenset({"gather", "dynamic_slice", "dynamic_update_slice", *WRITES})


def asked(program: Program) -> dict[str, Any]:
    """The question about indices, if the program has any."""
    is_indexing = lambda equation: equation.primitive.name in _BY_INDEX
    return {"indices": question} if any_equation(program.jaxpr.jaxpr, is_indexing) else {}


def indices(own: Own) -> Iterator[Finding]:
    """One finding for each read or write out of bounds or twice, with the leaves that go through it."""
    program, grouped = own.program, _grouped(own, _OUTSIDE)
    yield from _not_unique(own)
    disagreeing = _disagreeing(own) if grouped else set()
    for chain, answers in grouped.values():
        leaves = program.leaves_into(chain)
        is_wrong = _may_disagree(chain[-1])
        wrong = [leaf for leaf in leaves if leaf in disagreeing and is_wrong]
        facts = _facts(chain, answers)
        if wrong:
            yield finding("oob", "error", "disagrees", [program.paths[leaf] for leaf in wrong], chain, **facts)
            continue
        rest = [program.paths[leaf] for leaf in leaves]
        # Libraries may read beyond the end and discard what they read.
        if operation_of(chain) in _DROPPING or (is_in_library(chain) and not _is_used(own, chain)):
            continue
        severity = "info" if is_in_library(chain) else "warning"
        if rest:
            yield finding("oob", severity, _treatment(chain[-1]), rest, chain, **facts)
        # `jnp.nonzero` and similar functions count by writes that drop what is out of bounds.
        elif not leaves and not _counts(chain[-1]) and line(chain):
            yield finding("oob", severity, "value only", [], chain, **facts)


def _not_unique(own: Own) -> Iterator[Finding]:
    """One finding for each broken promise of the user's that indices are unique, whatever it does on this device."""
    for chain, answers in _grouped(own, _TWICE).values():
        leaves = [own.program.paths[leaf] for leaf in own.program.leaves_into(chain)]
        if leaves and not is_in_library(chain):
            yield finding("mismatch", "warning", "not unique", leaves, chain, index=int(answers[0].numbers[_TWICE]))


def written_twice(own: Own, leaf: int) -> tuple[Chain, int] | None:
    """The first read or write of a leaf with `unique_indices=True` and an index that occurs twice; and that index."""
    for chain, answers in _grouped(own, _TWICE).values():
        if leaf in own.program.leaves_into(chain):
            return chain, int(answers[0].numbers[_TWICE])
    return None


def _grouped(own: Own, which: int) -> dict[tuple[int, ...], tuple[Chain, list[Answer]]]:
    """The reads and writes that have an answer of one kind, each with its answers."""
    grouped: dict[tuple[int, ...], tuple[Chain, list[Answer]]] = {}
    for answer in own.answers("indices"):
        origin = own.program.origin(answer.chain)
        # Its derivative reads or writes at the same index.
        is_own = origin and origin[-1].primitive.name == answer.chain[-1].primitive.name
        if is_own and answer.numbers[which] >= 0:
            grouped.setdefault(ids(origin), (origin, []))[1].append(answer)
    return grouped


def question(chain: Chain, operands: Operands, results: Operands) -> Any:
    """The first index out of bounds: its place, the axis, the index, and the length of the axis; and one that is twice.

    In front is a number that is not negative if there is either.
    """
    del results
    name = chain[-1].primitive.name
    if name in ("dynamic_slice", "dynamic_update_slice"):
        starts, axes, sizes = _of_slice(chain[-1], operands)
    elif name == "gather" or name in WRITES:
        starts, axes, sizes = _of_vectors(chain[-1], operands)
    else:
        return None
    shape = np.shape(operands[0])
    if not axes or not math.prod(starts.shape):
        return None
    lengths = jnp.array([shape[axis] for axis in axes])
    last = jnp.array([shape[axis] - size for axis, size in zip(axes, sizes, strict=True)])
    outside = jnp.ravel((starts < 0) | (starts > last))
    first = jnp.argmax(outside)
    which = first % len(axes)
    place, twice = jnp.where(outside.any(), first, -1), _twice(chain[-1], starts, outside)
    found = [jnp.maximum(place, twice), place, jnp.array(axes)[which], jnp.ravel(starts)[first], lengths[which], twice]
    return jnp.stack([number.astype(jnp.int32) for number in found])


def _twice(equation: JaxprEqn, starts: Any, outside: Any) -> Any:
    """The first index along the first axis of one that occurs twice although they are promised to be unique, or -1."""
    if not equation.params.get("unique_indices"):
        return jnp.array(-1)
    vectors = jnp.reshape(starts, (-1, starts.shape[-1]))
    is_inside = ~jnp.any(jnp.reshape(outside, vectors.shape), axis=1)
    order = jnp.lexsort([*vectors.T, ~is_inside])
    ordered, counts = vectors[order], is_inside[order]
    is_same = jnp.all(ordered[1:] == ordered[:-1], axis=1) & counts[1:] & counts[:-1]
    return jnp.where(is_same.any(), ordered[jnp.argmax(is_same), 0], -1) if len(order) > 1 else jnp.array(-1)


def _of_slice(equation: JaxprEqn, operands: Operands) -> tuple[Any, list[int], list[int]]:
    is_read = equation.primitive.name == "dynamic_slice"
    starts = operands[1 if is_read else 2 :][: np.ndim(operands[0])]
    sizes = equation.params["slice_sizes"] if is_read else np.shape(operands[1])
    return (
        jnp.stack([_signed(start) for start in starts]) if starts else jnp.zeros(0, int),
        [*range(len(starts))],
        [*sizes],
    )


def _of_vectors(equation: JaxprEqn, operands: Operands) -> tuple[Any, list[int], list[int]]:
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "gather":
        axes, window = numbers.start_index_map, equation.params["slice_sizes"]
    else:
        axes, window = numbers.scatter_dims_to_operand_dims, written_window(equation)
    return _signed(operands[1]), list(axes), [window[axis] for axis in axes]


def _signed(index: Any) -> Any:
    index = jnp.asarray(index)
    return index.astype(jnp.int32) if jnp.issubdtype(index.dtype, jnp.unsignedinteger) else index


def _disagreeing(own: Own) -> set[int]:
    """The leaves whose gradient changes if derivatives are made to agree with values."""
    if not own.gradients:
        return set()
    consistent = own.gradients_of(consistent_indexing(own.program.outputs))
    if consistent is None:
        return set()
    pairs = zip(own.gradients, consistent, strict=True)
    return {
        leaf for leaf, (found, meant) in enumerate(pairs) if not np.allclose(found, meant, rtol=1e-4, equal_nan=True)
    }


def _is_used(own: Own, chain: Chain) -> bool:
    """Whether the output changes with what is read out of bounds."""

    def rule(other: Chain, operands: Operands) -> Operands | None:
        equation = other[-1]
        if equation is not chain[-1] or not _is_read(equation) or not is_floating(equation.outvars[0].aval):
            return None
        if equation.primitive.name == "dynamic_slice":
            return [result + 1 for result in bind(equation, operands)]
        return bind(equation, operands, mode=GatherScatterMode.FILL_OR_DROP, fill_value=np.nan)

    changed = tried(lambda leaves: own.program.run(leaves, rule, into_rules=True), own.program.leaves)
    plain = own.values[0]
    return changed is None or not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(plain, changed, strict=True))


def _may_disagree(equation: JaxprEqn) -> bool:
    if equation.primitive.name in EXTREMAL_WRITES and jax.__version_info__ < (0, 12):  # JAX 0.10
        # It clips these when they write, but not when their derivative looks up the winner.
        return equation.params["mode"] != GatherScatterMode.FILL_OR_DROP
    return equation.params.get("mode") not in (None, *_DELIBERATE)


# What these functions leave out, they write beyond the end.
_DROPPING = frozenset({"histogram", "histogram2d", "histogramdd"})


def _counts(equation: JaxprEqn) -> bool:
    is_integer = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
    return is_integer and equation.params.get("mode") == GatherScatterMode.FILL_OR_DROP


def _treatment(equation: JaxprEqn) -> str:
    """What becomes of an index out of bounds, in the value and in the derivative."""
    mode = equation.params.get("mode")
    if mode not in _DELIBERATE:
        return "moved"
    return "clipped" if mode == GatherScatterMode.CLIP else "filled" if _is_read(equation) else "dropped"


def _facts(chain: Chain, answers: list[Answer]) -> dict[str, Any]:
    axis, index, length = (int(number) for number in answers[0].numbers[2:5])
    return {
        "does": "read" if _is_read(chain[-1]) else "write",
        "axis": axis,
        "index": index,
        "length": length,
        "steps": steps_of(answers),
    }


def _is_read(equation: JaxprEqn) -> bool:
    return equation.primitive.name in ("gather", "dynamic_slice")
