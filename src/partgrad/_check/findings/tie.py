"""Exact ties: operations exactly at a kink or jump, where the derivative is a convention."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._programs import COMPARISONS, Chain, Operands, line
from ..derivatives.search import LeafDerivative
from ..evidence import Evidence, at, element, steps_of
from ..finding import Finding
from ..probe import Answer

_EXTREMES = frozenset({"reduce_max", "reduce_min", "argmax", "argmin"})
_STEPS = frozenset({"floor", "ceil"})


def tie(evidence: Evidence, ties: "Ties", found: list[LeafDerivative]) -> Iterator[Finding]:
    """One finding for each leaf whose slopes on both sides of the point differ."""
    for leaf, derivative in enumerate(found):
        path = evidence.program.paths[leaf]
        if not derivative.kinks or derivative.status not in ("agree", "inconclusive"):
            continue
        tied = ties.of(leaf)
        if tied:
            message = (
                f"the point is on {ties.described(tied[0])}, where the derivative is a convention. "
                "Fix: none needed if any slope between the two sides will do; otherwise use another point."
            )
            yield Finding("tie", "warning", path, line(tied[0].chain), message)


class Ties:
    """The ties of a function, looked for once, when they are first asked for.

    Args:
        evidence: The function.
    """

    def __init__(self, evidence: Evidence):
        self._evidence = evidence

    def of(self, leaf: int) -> list[Answer]:
        """The ties on the path of a leaf's derivative; each answer holds the flat index of one tied element."""
        return [tie for tie in self._all if leaf in self._evidence.leaves_into(tie.chain)]

    def described(self, tie: Answer) -> str:
        """A tie, described for a message."""
        equation = tie.chain[-1]
        shape = equation.outvars[0].aval.shape
        largest = max(len(atom.aval.shape) for atom in [*equation.invars, *equation.outvars])
        place = element(int(tie.numbers[0]), tuple(shape) if len(shape) == largest else ())
        return f"an exact tie of {at(tie.chain)}{place}{steps_of([tie.steps])}"

    @functools.cached_property
    def _all(self) -> list[Answer]:
        return self._evidence.answers(self._question)

    def _question(self, chain: Chain, operands: Operands, results: Operands) -> Any:
        if not operands or not self._evidence.leaves_into(chain):
            return None
        tied = _tied(chain, operands, results)
        if tied is None or not np.size(tied):
            return None
        flat = jnp.ravel(tied)
        return jnp.where(flat.any(), jnp.argmax(flat), -1)[None]


def _tied(chain: Chain, operands: Operands, results: Operands) -> Any:
    """Which elements are at a tie; None for an operation without ties."""
    equation = chain[-1]
    name, x = equation.primitive.name, operands[0]
    if name in ("max", "min") or name in COMPARISONS:
        return jnp.equal(operands[0], operands[1])
    if name in ("abs", "sign"):
        return jnp.equal(x, 0)
    if name in _EXTREMES:
        axes = tuple(equation.params["axes"])
        largest = (jnp.max if name.endswith("max") else jnp.min)(x, axis=axes, keepdims=True)
        return jnp.sum(jnp.equal(x, largest), axis=axes) > 1
    if name == "clamp":
        return jnp.equal(operands[1], operands[0]) | jnp.equal(operands[1], operands[2])
    if name == "sort":
        axis, keys = equation.params["dimension"], results[: equation.params.get("num_keys", 1)]
        length = keys[0].shape[axis]
        same = [jnp.take(k, jnp.arange(1, length), axis) == jnp.take(k, jnp.arange(length - 1), axis) for k in keys]
        return jnp.stack(same).all(axis=0)
    if name in _STEPS:
        return jnp.equal(x, jnp.round(x))
    return None
