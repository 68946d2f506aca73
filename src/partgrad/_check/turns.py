"""Loops that run on beyond their end, turn by turn, until another turn changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._programs import Chain, Operands, jaxpr_and_consts, scan_of, while_of

# How many turns are added at most.
_MOST_TURNS = 300


class RunsOn(NamedTuple):
    """Which loops run on, until another turn changes nothing.

    Attributes:
        loops: From a loop, or an equation of an unrolled one, after those that it is inside, and a turn of it.
        thaws: Whether a turn also moves what a selection leaves as it was, as those do that have reached their end.
    """

    loops: Callable[[Chain, Sequence[JaxprEqn]], bool]
    thaws: bool = False


def until_it_stands(turn: Callable[[Operands], Operands], start: Operands, is_float: list[bool]) -> Operands:
    """What is left if a turn of a loop is repeated as long as that changes something, and everything is finite."""

    def step(state: Any) -> Any:
        count, old, _ = state
        new = turn(old)
        floats = [(n, o) for n, o, floating in zip(new, old, is_float, strict=True) if floating]
        is_finite = jnp.stack([True, *(jnp.isfinite(n).all() for n, _ in floats)]).all()
        is_new = jnp.stack([False, *((n != o).any() for n, o in floats)]).any()
        kept = [jnp.where(is_finite, n, o) if f else n for n, o, f in zip(new, old, is_float, strict=True)]
        return count + 1, kept, is_finite & is_new

    goes_on = lambda state: (state[0] < _MOST_TURNS) & state[2]
    begin = (jnp.zeros((), jnp.int32), [jnp.asarray(value) for value in start], jnp.ones((), bool))
    return list(lax.while_loop(goes_on, step, begin)[1])


class Turn(NamedTuple):
    """The body of a loop that only carries, its constants, and its selections that let what has ended wait."""

    body: Any
    consts: Operands
    waiting: dict[int, int]


def turn_of(equation: JaxprEqn, operands: Operands, thaws: bool) -> Turn | None:
    """A turn of a loop; None for another equation, and for a loop over arrays."""
    if equation.primitive.name == "while":
        loop = while_of(equation)
        body, consts, count = loop.body, operands[loop.test_consts :], loop.body_consts
        thaws |= _waits_for_others(loop)
    elif equation.primitive.name == "scan":
        scan = scan_of(equation)
        body, consts, count = scan.body, operands, scan.consts
        if count + scan.carried < len(equation.invars) or scan.carried < len(equation.outvars):
            return None
    else:
        return None
    jaxpr, _ = jaxpr_and_consts(body)
    pairs = zip(jaxpr.outvars, jaxpr.invars[count:], strict=True)
    carried = {after: before for after, before in pairs if not isinstance(after, Literal)}
    return Turn(body, consts[:count], waiting_in(jaxpr.eqns, carried) if thaws else {})


def _waits_for_others(loop: Any) -> bool:
    """Whether a loop runs until all that `jax.vmap` runs at once have reached their ends."""
    test, _ = jaxpr_and_consts(loop.test)
    # One over no axes is not of `jax.vmap`.
    last = (e for e in test.eqns if e.primitive.name == "reduce_or" and test.outvars[0] in e.outvars)
    return any(equation.params.get("axes") for equation in last)


def waiting_in(equations: Sequence[JaxprEqn], carried: dict[Any, Any]) -> dict[int, int]:
    """The selections that may leave what a loop carries as it was, each with the number of the other operand.

    Args:
        equations: Those of a turn.
        carried: For what a turn returns, what it reads in its place.
    """
    found = {}
    for equation in equations:
        is_selection = equation.primitive.name == "select_n" or equation.params.get("name") == "_where"
        before = carried.get(equation.outvars[0]) if is_selection and len(equation.invars) == 3 else None
        others = [n for n, atom in enumerate(equation.invars) if n and atom is not before]
        if before is not None and len(others) == 1:
            found[id(equation)] = others[0]
    return found
