"""Reads and writes out of bounds: which index, at which line, and whether it makes the derivative disagree."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ..._consistent_indexing import consistent_indexing
from ..._programs import EXTREMAL_WRITES, WRITES, Chain, Operands, any_equation, is_in_library, line, written_window
from ..evidence import Evidence, steps_of
from ..finding import Finding
from ..probe import Answer

_DELIBERATE = (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP)


def oob(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each leaf that an equation reads or writes out of bounds."""
    program, by_index = evidence.program, {"gather", "dynamic_slice", "dynamic_update_slice", *WRITES}
    if not any_equation(program.jaxpr.jaxpr, lambda equation: equation.primitive.name in by_index):
        return
    grouped: dict[tuple[int, ...], list[Answer]] = {}
    for answer in evidence.answers(_question):
        grouped.setdefault(tuple(map(id, answer.chain)), []).append(answer)
    if not grouped:
        return
    disagreeing = _disagreeing(evidence)
    for answers in grouped.values():
        chain = answers[0].chain
        leaves = evidence.leaves_into(chain)
        for leaf in leaves:
            wrong = leaf in disagreeing and _may_disagree(chain[-1])
            # Libraries may read beyond the end and discard what they read.
            severity = "error" if wrong else "info" if is_in_library(chain) else "warning"
            message = f"{_words(answers)} {_meaning(chain[-1], wrong)}"
            yield Finding("oob", severity, program.paths[leaf], line(chain), message)
        # `jnp.nonzero` and similar functions count by writes that drop what is out of bounds.
        if not leaves and not _counts(chain[-1]):
            message = f"{_words(answers)} No leaf's derivative goes through it, only the value."
            yield Finding("oob", "warning", "", line(chain), message)


def _question(chain: Chain, operands: Operands, results: Operands) -> Any:
    """The first index out of bounds: its place, the axis, the index, and the length of the axis."""
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
    found = [jnp.where(outside.any(), first, -1), jnp.array(axes)[which], jnp.ravel(starts)[first], lengths[which]]
    return jnp.stack([number.astype(jnp.int32) for number in found])


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


def _disagreeing(evidence: Evidence) -> set[int]:
    """The leaves whose gradient changes if derivatives are made to agree with values."""
    if not evidence.gradients:
        return set()
    consistent = evidence.gradients_of(consistent_indexing(evidence.program.outputs))
    if consistent is None:
        return set()
    pairs = zip(evidence.gradients, consistent, strict=True)
    return {
        leaf for leaf, (found, meant) in enumerate(pairs) if not np.allclose(found, meant, rtol=1e-4, equal_nan=True)
    }


def _may_disagree(equation: JaxprEqn) -> bool:
    if equation.primitive.name in EXTREMAL_WRITES and jax.__version_info__ < (0, 12):  # JAX 0.10
        # It clips these when they write, but not when their derivative looks up the winner.
        return equation.params["mode"] != GatherScatterMode.FILL_OR_DROP
    return equation.params.get("mode") not in (None, *_DELIBERATE)


def _counts(equation: JaxprEqn) -> bool:
    is_integer = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
    return is_integer and equation.params.get("mode") == GatherScatterMode.FILL_OR_DROP


def _words(answers: list[Answer]) -> str:
    axis, index, length = (int(number) for number in answers[0].numbers[1:])
    name = answers[0].chain[-1].primitive.name
    does = "read" if name in ("gather", "dynamic_slice") else "write"
    # Negative indices do not get here: the program has already added the length.
    also = f" (or {index - length}, where negative ones count from the end)" if index < 0 else ""
    steps = steps_of([answer.steps for answer in answers])
    return f"a {does} at index {index}{also} is out of bounds for axis {axis}, which has size {length}{steps}."


def _meaning(equation: JaxprEqn, wrong: bool) -> str:
    if wrong:
        return (
            "The gradient disagrees with the value because of it. Fix: correct the index; or differentiate "
            "`partgrad.consistent_indexing(f)`, whose gradient agrees."
        )
    mode = equation.params.get("mode")
    if mode in _DELIBERATE:
        word = {GatherScatterMode.CLIP: "clipped"}.get(
            mode, "filled" if equation.primitive.name == "gather" else "dropped"
        )
        return f"It is {word}, in both the value and the derivative. Fix: correct the index, unless that is intended."
    return "It is moved inside, in both the value and the derivative. Fix: correct the index, unless that is intended."
