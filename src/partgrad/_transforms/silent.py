"""No silent zeros: refuse a derivative that ends at a mark that was not written there explicitly."""

import contextlib
import enum
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from .._marks import EXPLICIT, Watch, mark_in
from .._message import at, listed
from .._programs import Chain, arrivals, line, reaching, running_line
from .._skeletons import keep
from .._trees import data_of, reaches_array
from ..errors import HeldError
from .call import Call

# Arguments of these types, and members of enums, decide which branch a function takes.
_FLAGS = (bool, int, float, complex, str, bytes)


def refuse_silent_zeros(call: Call, f: Callable[..., Any], has_aux: bool) -> None:
    """Raise if the derivative of a leaf that was named, and whose class declares a mark, ends at another mark.

    The error says at which line. A function is asked once for each structure of its arguments, each shape in them, and
    each value of its flags; one that branches on the values of arrays, on every call.

    Args:
        call: The call.
        f: The function as the user gave it.
        has_aux: Whether it returns auxiliary data too.
    """
    plans = [target.plan for target in call.targets if target.plan.watched]
    key = (id(f), has_aux, _what_decides(call))
    # A key that cannot be hashed or compared, or that would keep an array alive, is not kept.
    with contextlib.suppress(TypeError, ValueError):
        if all((earlier := plan.asked.get(key)) is not None and earlier() is f for plan in plans):
            return
    values = call.selected
    watched = [i in target.plan.watched for target in call.targets for i in target.plan.indices]
    is_traceable = _refuse(call.without_aux(has_aux), values, watched, lambda: _names(call))
    # A function that cannot be referenced weakly is asked on every call.
    with contextlib.suppress(TypeError):
        for plan in plans if is_traceable and key[-1] is not None else ():
            keep(plan.asked, key, weakref.ref(f))


def _what_decides(call: Call) -> Hashable:
    """What tells apart calls in which a function may take different branches; None if that cannot be kept."""
    own = {target.position for target in call.targets}
    args = {i: arg for i, arg in enumerate(call.args) if i not in own}
    kwargs = {name: arg for name, arg in call.kwargs.items() if name not in own}
    leaves, treedef = [], None
    if args or kwargs:
        try:
            leaves, treedef = jax.tree.flatten((args, kwargs))
        except (TypeError, ValueError):
            # An argument that is no tree of JAX, such as a dict whose keys cannot be sorted.
            return None
        if reaches_array(data_of(treedef)):
            return None
    leaves += [leaf for target in call.targets for leaf in target.leaves]
    return treedef, tuple(map(_decisive, leaves))


def _decisive(leaf: Any) -> Hashable:
    kind = type(leaf)
    if kind in _FLAGS or isinstance(leaf, enum.Enum | np.generic):
        return kind, leaf
    if isinstance(leaf, jax.Array | np.ndarray | jax.Ref):
        return kind, leaf.shape, leaf.dtype
    if callable(leaf):
        with contextlib.suppress(TypeError):
            return weakref.ref(leaf)
    return (kind,)


def _names(call: Call) -> str:
    return listed(at(target.skeleton.path(i)) for target in call.targets for i in target.plan.watched)


def _refuse(f: Callable[[list[Any]], Any], values: list[Any], watched: list[bool], names: Callable[[], str]) -> bool:
    """Raise if a derivative ends; otherwise, whether the function can be traced, so that no values decide."""
    try:
        jaxpr = jax.make_jaxpr(f)(values).jaxpr
    except jax.errors.ConcretizationTypeError:
        # It branches in Python on values, so it cannot be traced; another eager derivative has to tell.
        for label, where in _met_while_running(f, values, watched):
            raise _held_again(label, where, names()) from None
        return False
    met = [chain for chain, _ in arrivals(jaxpr, list(map(int, watched)), _is_implicit)]
    for chain in reaching(jaxpr, met):
        mark = mark_in(str(chain[-1].source_info.name_stack)) or ""
        raise _held_again(mark, line(chain), names())
    return True


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
