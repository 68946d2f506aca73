"""Draws whose derivative is implicit: right on average, and not the difference at a fixed key.

Where derivatives are compared with differences, what these draws return is held, in the value and in its derivatives.
"""

from collections.abc import Callable

from jax import lax

from .._programs import Chain, bind
from .exact import Exact
from .program import Program
from .stops import is_users_stop, stops_of


def implicit_draws(program: Program) -> list[Chain]:
    """The draws with an implicit derivative, which is not the difference at a fixed key."""
    return [chain for chain in program.smooth.chains if _is_implicit(chain)]


def has_implicit_draw(program: Program, leaf: int) -> bool:
    """Whether a draw with an implicit derivative depends on a leaf."""
    return any(program.is_into(leaf, chain) for chain in implicit_draws(program))


def holding_implicit_draws(exact: Exact) -> Exact:
    """The program with draws that stay as they are at the point, and have no derivative; itself if there are none."""
    program = exact.program
    draws = implicit_draws_of_leaves(program)
    if not draws:
        return exact
    held = {id(chain[-1]) for chain in draws}
    stopped = lambda chain, given: lax.stop_gradient(bind(chain[-1], given)) if id(chain[-1]) in held else None
    other = Program(lambda leaves: program.run(leaves, stopped), program.leaves, program.paths)
    return exact.with_derivatives_of(other).holding(draws)(range(len(draws)))


def through_draws(program: Program, leaf: int) -> Callable[[Chain], bool]:
    """Whether an equation comes before or after an implicit draw of a leaf: no difference shows what it does there."""
    held = implicit_draws_of_leaves(program)
    drawn = program.after(chain for chain in held if program.is_into(leaf, chain))
    is_before = lambda chain: any(map(any, map(program.after([chain]).into, held)))
    return lambda chain: any(drawn.into(chain)) or is_before(chain)


def stops_of_implicit_draws(program: Program, leaf: int) -> tuple[Chain, ...]:
    """The stops before or after an implicit draw of a leaf."""
    if not implicit_draws_of_leaves(program):
        return ()
    # A `softmax` stops its maximum, which makes no difference.
    stops = [stop for stop in stops_of(program) if is_users_stop(stop) and program.is_into(leaf, stop)]
    return tuple(filter(through_draws(program, leaf), stops))


def implicit_draws_of_leaves(program: Program) -> list[Chain]:
    """The implicit draws that a leaf moves, be it by a way that has no derivative."""
    return [chain for chain in program.value.chains if _is_implicit(chain) and any(program.value.into(chain))]


def _is_implicit(chain: Chain) -> bool:
    return chain[-1].primitive.name == "random_gamma"
