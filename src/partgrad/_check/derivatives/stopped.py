"""Which `stop_gradient` explains that a derivative is not the slope of the function.

It does if the derivative is the slope of the function in which what it stops stays as it was at the point.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr

from ..._programs import ENTERED, Chain, inner_jaxprs, is_custom_rule, is_in_library
from ..numbered import NumberedProgram
from .exact import Leaves
from .reading import AGREE, ROUNDING, Point

# Each costs a compilation.
_MOST_TRIED = 12


def explaining_stops(program: NumberedProgram, point: Point, direction: Leaves, slack: float) -> tuple[Chain, ...]:
    """The `stop_gradient` equations that explain a mismatch.

    Args:
        program: The program.
        point: Where the derivative mismatches.
        direction: The direction in which it does.
        slack: As of `Point.read`.

    Returns:
        As few equations as explain it, each after those that it is inside of; none where they do not.
    """
    stops = {id(chain[-1]): chain for chain in _chains(program.jaxpr.jaxpr, ())}
    explain = lambda held: _agrees_holding(program, point, direction, slack, held)
    if not stops:
        return ()
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


def _chains(jaxpr: Jaxpr, outer: Chain) -> Iterator[Chain]:
    if any(equation.primitive.name == "custom_linear_solve" for equation in jaxpr.eqns):
        # What is stopped there is another way to the same derivative.
        return
    for equation in jaxpr.eqns:
        chain = (*outer, equation)
        is_ruled = any(map(is_custom_rule, outer))
        # Inside of the rule of a library only what the user stopped in a function that was given to it.
        if equation.primitive.name == "stop_gradient" and not (is_ruled and is_in_library(chain)):
            yield chain
        if equation.primitive.name in ENTERED or (is_custom_rule(equation) and is_in_library(chain)):
            for inner in inner_jaxprs(equation):
                yield from _chains(inner, chain)


def _agrees_holding(program: NumberedProgram, point: Point, direction: Leaves, slack: float, held: set[int]) -> bool:
    try:
        exact = point.exact.holding(program, lambda equation: id(equation) in held)
        reading = point.of(exact).read(direction, slack=slack)
    except Exception:
        # Not everything can be evaluated at two points at once.
        return False
    return reading.status in (AGREE, ROUNDING)
