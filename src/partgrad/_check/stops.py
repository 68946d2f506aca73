"""Why a derivative may rightly differ from the slope of the function.

A `stop_gradient` explains it if the derivative is the slope of the function in which the stopped values stay as they
were at the point. So does a factorization that assumes a symmetric matrix, such as `jax.scipy.linalg.cho_factor`, which
reads one triangle, or a lineax solver that is told so: its rule needs a symmetric tangent, and the tangent of a single
element is not symmetric.
"""

from typing import Any

import jax.numpy as jnp

from ..._programs import Chain, Operands, bind, by_value, is_custom_rule, is_floating, is_in_library, union
from ..numbered import NumberedProgram
from .exact import Exact, Leaves
from .reading import AGREE, ROUNDING, Point

# Each attempt costs a compilation.
_MOST_TRIED = 12
_FACTORIZATIONS = frozenset({"cholesky", "eigh", "linear_solve"})


def explaining_stops(program: NumberedProgram, point: Point, direction: Leaves, slack: float) -> tuple[Chain, ...]:
    """The fewest `stop_gradient` equations that explain a mismatch along a direction; none if they do not."""
    stops = {id(chain[-1]): chain for chain in _stops(program)}
    if not stops:
        return ()

    def explain(held: set[int]) -> bool:
        try:
            exact = point.exact.holding(program, lambda equation: id(equation) in held)
            return _agrees(exact, point, direction, slack)
        except Exception:  # Some programs cannot be evaluated at two points at once.
            return False

    tried = list(stops)[:_MOST_TRIED]
    needed = set(stops) if explain(set(stops)) else set()
    if len(stops) > 1:
        for one in tried:
            if explain({one}):
                return (stops[one],)
    for one in tried:
        if len(needed) > 1 and explain(needed - {one}):
            needed -= {one}
    return tuple(chain for one, chain in stops.items() if one in needed)


def explaining_factorization(
    program: NumberedProgram, leaf: int, point: Point, direction: Leaves, slack: float
) -> Chain | None:
    """The first factorization a leaf flows into, if both derivatives agree when its matrix moves symmetrically."""
    flow = program.smooth
    into = (c for c in flow.chains if c[-1].primitive.name in _FACTORIZATIONS and union(flow.into(c)) >> leaf & 1)
    first = next(into, None)
    if first is None:
        return None
    symmetrised = NumberedProgram(
        lambda leaves: program.run(leaves, _with_symmetric_parts), program.leaves, program.paths
    )
    return first if _agrees(Exact(symmetrised), point, direction, slack) else None


def _agrees(exact: Exact, point: Point, direction: Leaves, slack: float) -> bool:
    return point.of(exact).read(direction, slack=slack).status in (AGREE, ROUNDING)


def _stops(program: NumberedProgram) -> list[Chain]:
    """The `stop_gradient` equations written by the user, or by a library outside its derivative rules."""
    chains = by_value(program.jaxpr.jaxpr, [0] * len(program.leaves)).chains
    # A stop beside a solve is another way to the same derivative.
    solving = {tuple(map(id, chain[:-1])) for chain in chains if chain[-1].primitive.name == "custom_linear_solve"}

    def is_candidate(chain: Chain) -> bool:
        outer = [chain[:length] for length in range(len(chain))]
        ruled = [inside for inside in outer if inside and is_custom_rule(inside[-1])]
        return (
            chain[-1].primitive.name == "stop_gradient"
            and not any(tuple(map(id, inside)) in solving for inside in outer)
            # Inside a library's rule: what the user stopped in a function passed to that library.
            and all(map(is_in_library, ruled))
            and not (ruled and is_in_library(chain))
        )

    return [chain for chain in chains if is_candidate(chain)]


def _with_symmetric_parts(chain: Chain, operands: Operands) -> Operands | None:
    """Run a factorization on the symmetric part of a matrix that only its tangent makes asymmetric."""
    if chain[-1].primitive.name not in _FACTORIZATIONS:
        return None
    return bind(chain[-1], list(map(_symmetric_part, operands)))


def _symmetric_part(operand: Any) -> Any:
    shape = jnp.shape(operand)
    if len(shape) < 2 or shape[-1] != shape[-2] or not is_floating(operand):
        return operand
    other = jnp.conj(jnp.swapaxes(operand, -1, -2))
    return jnp.where(jnp.allclose(operand, other, rtol=1e-2), (operand + other) / 2, operand)
