"""Iterations that Python unrolled: the same equations again and again, each time of what they returned before."""

from collections.abc import Hashable
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .equations import Operands, inner_jaxprs, is_floating
from .jaxprs import cut
from .primitives import CALLS, CUSTOM_RULES, FOREIGN
from .same import operation_of

# So many turns show an iteration, and not a formula in which something stands twice.
_TURNS = 3
_MOST_EQUATIONS = 200
_MADE_ANEW = CALLS | CUSTOM_RULES | FOREIGN | {"debug_callback", "debug_print"}


class Iteration(NamedTuple):
    """The last turn of an iteration.

    Attributes:
        start: The number of its first equation.
        stop: The number of the equation after its last one.
        carried: What it reads of the turn before, each with what it returns in its place.
    """

    start: int
    stop: int
    carried: dict[Var, Var]


class Parts(NamedTuple):
    """A jaxpr taken apart at the last turn of an iteration.

    Attributes:
        before: From constants and inputs to what the last turn returns and what else is needed.
        turn: From what the turn carries and what else is needed to what it returns.
        after: The same to the outputs.
        fed: For each number that is carried, which of the results stands for it in the next turn.
        is_float: Which results are floating.
    """

    before: Jaxpr
    turn: Jaxpr
    after: Jaxpr
    fed: list[int]
    is_float: list[bool]

    def carried(self, results: Operands) -> Operands:
        """What the next turn reads of the results of one."""
        return [results[number] for number in self.fed]


def iterations(jaxpr: Jaxpr) -> list[Iteration]:
    """The iterations that are unrolled in a jaxpr, not in one inside it, from the first to the last."""
    kinds, found, stop = _kinds(jaxpr), list[Iteration](), len(jaxpr.eqns)
    while stop >= _TURNS:
        # The longest first: a turn may have parts that are repeated inside it.
        lengths = range(min(stop // _TURNS, _MOST_EQUATIONS), 0, -1)
        longest = next((one for length in lengths if (one := _last_turn(jaxpr, kinds, stop, length))), None)
        if longest is None:
            stop -= 1
            continue
        found.append(_shortest(jaxpr, kinds, longest))
        stop, length = longest.start, stop - longest.start
        while kinds[max(stop - length, 0) : stop] == kinds[stop : stop + length]:
            stop -= length
    return found[::-1]


def apart(jaxpr: Jaxpr, iteration: Iteration) -> Parts:
    """A jaxpr taken apart, so that the last turn of an iteration can be run again."""
    start, stop, carried = iteration
    inputs, equations = [*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns
    used = lambda some: {atom for one in some for atom in one.invars if isinstance(atom, Var)}
    later = used(equations[stop:]) | {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    needed = (used(equations[start:stop]) | later) - carried.keys()
    made = lambda some: [variable for one in some for variable in one.outvars]
    others = [variable for variable in [*inputs, *made(equations[:start])] if variable in needed]
    results = [variable for variable in made(equations[start:stop]) if variable in later | set(carried.values())]
    return Parts(
        cut(jaxpr, inputs, [*results, *others], equations[:stop]),
        cut(jaxpr, [*carried, *others], results, equations[start:stop]),
        cut(jaxpr, [*results, *carried, *others], jaxpr.outvars, equations[stop:]),
        [results.index(returned) for returned in carried.values()],
        [is_floating(variable.aval) for variable in results],
    )


def _kinds(jaxpr: Jaxpr) -> list[Hashable]:
    """Numbers for the equations of a jaxpr, equal for those that compute the same of their operands."""
    numbers: dict[Hashable, int] = {}
    kinds = list[Hashable]()
    for equation in jaxpr.eqns:
        key = _operation(equation), *(variable.aval for variable in equation.outvars)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _operation(equation: JaxprEqn) -> Hashable:
    """Equal for two equations that compute the same, even if JAX made a rule or a callback anew for each of them."""
    if equation.primitive.name in _MADE_ANEW:
        literals = [str(atom.val) for atom in equation.invars if isinstance(atom, Literal)]
        inside = (_operation(inner) for body in inner_jaxprs(equation) for inner in body.eqns)
        return equation.primitive.name, *literals, *inside
    return operation_of(equation, exact=False) or id(equation)


def _shortest(jaxpr: Jaxpr, kinds: list[Hashable], several: Iteration) -> Iteration:
    """The turn of which an iteration may have several in what was found."""
    start, stop, _ = several
    of_all = kinds[stop - _TURNS * (stop - start) : stop]
    for length in range(1, stop - start):
        is_whole = (stop - start) % length == 0 and of_all[length:] == of_all[:-length]
        if is_whole and (one := _last_turn(jaxpr, kinds, stop, length)):
            return one
    return several


def _last_turn(jaxpr: Jaxpr, kinds: list[Hashable], stop: int, length: int) -> Iteration | None:
    """The turn of some length that ends before an equation, if it is one of an iteration."""
    start = stop - length
    # Most are unlike at a glance.
    if not kinds[stop - 1] == kinds[start - 1] == kinds[start - length - 1]:
        return None
    if not kinds[start:stop] == kinds[start - length : start] == kinds[start - 2 * length : start - length]:
        return None
    places = [
        {
            variable: (number, place)
            for number, equation in enumerate(jaxpr.eqns[stop - turn * length :][:length])
            for place, variable in enumerate(equation.outvars)
        }
        for turn in (1, 2, 3)
    ]
    last, before, first = places
    carried: dict[Var, Var] = {}
    for now, then in zip(jaxpr.eqns[start:stop], jaxpr.eqns[start - length : start], strict=True):
        for one, other in zip(now.invars, then.invars, strict=True):
            if isinstance(one, Literal) or isinstance(other, Literal):
                # Of equal kinds, they are equal.
                continue
            is_inside = other in before and last.get(one) == before[other]
            is_fed = other in first and before.get(one) == first[other]
            if is_fed:
                number, place = before[one]
                carried[one] = jaxpr.eqns[start + number].outvars[place]
            elif not is_inside and (one is not other or other in before):
                return None
    return Iteration(start, stop, carried) if carried else None
