"""Coarse steps: a leaf that is rounded or compared, where the value jumps, and has a derivative by another path.

At the point the derivative is the slope. That it lacks the steps is worth knowing: with a penalty beside them, the
gradient of quantized weights is that of the penalty alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from .._programs import Chain, ids, is_custom_rule, is_in_library
from .exact import scale_of
from .finding import Finding
from .jumps import jumps_at
from .names import finding, operation_of
from .outcomes import goes_by_steps
from .point import Point
from .stops import is_of_surrogate
from .zeros import blockers, is_told_with_draws

# What users call what goes by steps; what is inside other functions is the affair of these.
_ROUNDED = frozenset({"floor", "ceil", "round", "rint", "around", "trunc", "fix", "sign", "astype"})
_COMPARED = frozenset({">", ">=", "<", "<=", "greater", "greater_equal", "less", "less_equal"})
_PLACES = frozenset({"argmax", "argmin", "argsort", "searchsorted", "digitize", "top_k"})
# Jumps that are less, relative to the value, are those between two formulas for the same, or of a tolerance.
_LEAST = 1e-6
# Of so many operations it is asked whether the value jumps there, in so many places.
_MOST_TRIED, _TRIES = 4, 4
# How far leaves are moved, relative to their sizes.
_REACH = (4.0,)


def coarse_steps(point: Point, leaves: Sequence[int]) -> Iterator[Finding]:
    """One note for each operation that goes by steps, for leaves whose derivative is right and not zero."""
    program = point.exact.program
    is_wanted = lambda chain: _is_by_steps(chain) and not is_told_with_draws(program, chain)
    # Most functions have none, and it is the same for every leaf.
    wanted = {ids(chain) for chain in program.smooth.chains if is_wanted(chain)}
    if not wanted:
        return
    blocked: dict[tuple[int, ...], tuple[Chain, list[int]]] = {}
    for leaf in leaves:
        for chain in blockers(program, leaf, wanted=lambda chain: ids(chain) in wanted):
            blocked.setdefault(ids(chain), (chain, []))[1].append(leaf)
    # If all elements grew alike, the largest would stay the largest.
    generator = np.random.default_rng(0)
    toward = [scale_of(x) * generator.uniform(-1.0, 1.0, x.shape) for x in point.leaves]
    for chain, through in list(blocked.values())[:_MOST_TRIED]:
        along = [v * (leaf in through) for leaf, v in enumerate(toward)]
        if jumps_at(point, through[0], chain, along, reach=_REACH, tries=_TRIES, least=_LEAST):
            yield finding("zero", "info", "partly", [program.paths[leaf] for leaf in through], chain)


def _is_by_steps(chain: Chain) -> bool:
    """Whether the user rounds or compares here, and not only to end a loop."""
    if not goes_by_steps(chain):
        return False
    operation, outer = operation_of(chain), {equation.primitive.name for equation in chain[:-1]}
    return (
        (operation in _ROUNDED | _PLACES or (operation in _COMPARED and "while" not in outer))
        and not is_in_library(chain)
        and not any(map(is_custom_rule, chain))
        and not is_of_surrogate(chain)
    )
