"""No silent zeros: refuse a derivative that ends at a mark that was not written there explicitly."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import jax

from .._marks import EXPLICIT, Watch, mark_in
from .._message import at, listed
from .._programs import Chain, arrivals, line, reaching, running_line
from .._selection import keep
from ..errors import HeldError
from .call import Call

# Arguments of these types decide which branch a function takes.
_FLAGS = (bool, int, str, type(None))


def refuse_silent_zeros(call: Call, f: Callable[..., Any], has_aux: bool) -> None:
    """Raise if the derivative of a leaf that was named, and whose class declares a mark, ends at another mark.

    The error says at which line. A function is asked once for each structure of its arguments, and each value of its
    flags.

    Args:
        call: The call.
        f: The function as the user gave it.
        has_aux: Whether it returns auxiliary data too.
    """
    plans = [target.plan for target in call.targets if target.plan.watched]
    flags = (has_aux, *(arg if type(arg) in _FLAGS else None for arg in (*call.args, *call.kwargs.values())))
    if all((earlier := plan.asked.get((id(f), flags))) is not None and earlier() is f for plan in plans):
        return
    values = call.selected
    watched = [i in target.plan.watched for target in call.targets for i in target.plan.indices]
    _refuse(call.without_aux(has_aux), values, watched, lambda: _names(call))
    # A function that cannot be referenced weakly is asked on every call.
    with contextlib.suppress(TypeError):
        for plan in plans:
            keep(plan.asked, (id(f), flags), weakref.ref(f))


def _names(call: Call) -> str:
    return listed(at(target.skeleton.path(i)) for target in call.targets for i in target.plan.watched)


def _refuse(f: Callable[[list[Any]], Any], values: list[Any], watched: list[bool], names: Callable[[], str]) -> None:
    try:
        jaxpr = jax.make_jaxpr(f)(values).jaxpr
    except jax.errors.ConcretizationTypeError:
        # It branches in Python on values, so it cannot be traced; another eager derivative has to tell.
        for label, where in _met_while_running(f, values, watched):
            raise _held_again(label, where, names()) from None
        return
    met = [chain for chain, _ in arrivals(jaxpr, list(map(int, watched)), _is_implicit)]
    for chain in reaching(jaxpr, met):
        mark = mark_in(str(chain[-1].source_info.name_stack)) or ""
        raise _held_again(mark, line(chain), names())


def _met_while_running(f: Callable[[list[Any]], Any], values: list[Any], watched: list[bool]) -> list[Any]:
    numbers = [number for number, is_watched in enumerate(watched) if is_watched]

    def of_named(own: list[Any]) -> Any:
        everything = list(values)
        for number, value in zip(numbers, own, strict=True):
            everything[number] = value
        return f(everything)

    own = [jax.numpy.asarray(values[number]) for number in numbers]
    with Watch(running_line) as watch:
        jax.jvp(of_named, (own,), ([jax.numpy.ones_like(value) for value in own],))
    return watch.met


def _held_again(mark: str, where: str, names: str) -> HeldError:
    field = mark.rpartition(".")[2] if "." in mark else "field"
    return HeldError(
        f"The derivative of {names}, which `wrt` names, ends at another mark: {mark}{f' at {where}' if where else ''}.",
        "Expected the derivative to reach the output; this part of it would be a zero that nobody asked for.",
        fix=f"build the model by dataclasses.replace(model, {field}=...), which keeps its marks, or "
        f"with {field}=partgrad.Diff(x), without the mark; jax.lax.stop_gradient(x) if a zero is meant.",
    )


def _is_implicit(chain: Chain) -> bool:
    equation = chain[-1]
    if equation.primitive.name != "stop_gradient":
        return False
    mark = mark_in(str(equation.source_info.name_stack))
    return mark is not None and mark != EXPLICIT
