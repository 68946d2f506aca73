"""Whether a draw that was stopped is scored by its density, and not only used: what tells the two apart is a pivot.

The density of a number that is drawn as `mean + scale * noise` is one of `(number - mean) / scale`. With the stop
removed that is the noise, which no parameter moves: a pivot. What else a stopped number meets, as a target does in a
squared difference, moves on. Where the derivative of a draw is implicit, as of `gamma`, there is no pivot.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._programs import Chain, Operands, ids, is_floating, jaxpr_and_consts, run
from .implicit import implicit_draws
from .probe import Answer, probing
from .program import Program

# What is left of tangents that cancel, relative to them.
_CANCELS = 1e-4
_SUMS = frozenset({"add", "add_any", "sub"})


class Pivots:
    """The pivots of a program; what looks for them is compiled once for all leaves."""

    def __init__(self, program: Program):
        self._program = program
        self._asked: dict[Any, Any] = {}

    def has(self, leaf: int, stops: Sequence[Chain]) -> bool:
        """Whether something made of a leaf and of what was stopped stays as it is, if nothing is stopped, as it moves.

        Args:
            leaf: The leaf.
            stops: The stops of what was drawn.
        """
        program, key = self._program, tuple(map(ids, stops))
        if any(program.is_into(leaf, draw) and _is_before(program, draw, stops) for draw in implicit_draws(program)):
            return True
        if key not in self._asked:
            self._asked[key] = _asking(program, stops)
        ask, tangents = self._asked[key], [np.zeros(x.shape, x.dtype) for x in program.leaves]
        moves = np.random.default_rng(leaf).uniform(0.5, 1.5, tangents[leaf].shape)
        tangents[leaf] = np.asarray(moves, tangents[leaf].dtype)
        return ask is not None and bool(ask([*program.leaves, *tangents])[1])


def _asking(program: Program, stops: Sequence[Chain]) -> Callable[[Operands], tuple[Operands, list[Answer]]] | None:
    """From leaves and tangents to what cancels if nothing is stopped; None without a forward derivative."""
    keys = set(map(ids, stops))
    through = lambda chain, operands: list(operands) if ids(chain) in keys else None
    body, consts = jaxpr_and_consts(program.jaxpr)
    moving = Program(lambda leaves: run(body, consts, leaves, through), program.leaves, program.paths, forward=True)
    if moving.tangent is None:
        return None

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if chain[-1].primitive.name not in _SUMS or not is_floating(results[0]):
            return None
        origin = moving.origin(chain)
        # What adds up tangents, and not values.
        if not origin or not any(moving.drawn.into(origin)) or not any(moving.pushed.into(chain)):
            return None
        largest = lambda x: jnp.max(jnp.abs(jnp.asarray(x)), initial=0.0)
        moves = jnp.minimum(*map(largest, operands))
        return jnp.where((moves > 0) & (largest(results[0]) <= _CANCELS * moves), 0, -1)[None]

    return probing(moving.tangent, question)


def _is_before(program: Program, draw: Chain, stops: Sequence[Chain]) -> bool:
    """Whether a draw flows into a stop."""
    drawn = program.after([draw])
    return any(any(drawn.into(stop)) for stop in stops)
