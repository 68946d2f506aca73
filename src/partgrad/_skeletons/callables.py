"""Selector callables: run on the slots of a skeleton; what they return is turned into a match."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compat import refuses_argument_of
from .._marks import Place
from .._message import at
from .._trees import Elements, overlap
from ..errors import ElementError, SelectionError, SlotError
from .plan import LEAF, Match, Pick, place_of
from .skeletons import Skeleton, refuse_changes
from .slots import ElementSlot, Slot, computed

_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# What a node says that lacks what it is asked for, rather than what goes wrong inside it.
_ASKING = frozenset({"__getattr__", "__getitem__", "__missing__"})
_IS_LEAF = operator.attrgetter("is_leaf")


class Misfit(Exception):
    """A callable does not fit a node: it looks for a missing name, for example, or returns static data."""

    def __init__(self, reason: str, name: str | None = None, found: Any = None):
        super().__init__(reason)
        self.name = name
        self.found = found


# What a callable that does not fit raises.
MISFITS = (Misfit, AttributeError, KeyError, IndexError, TypeError)


def match_of(function: Callable[[Any], Any], skeleton: Skeleton, *, everywhere: bool) -> Match | Misfit:
    """What a function returns for the root of a skeleton or, if it does not fit there, for the nodes where it does.

    With `everywhere`, every node is asked, the root included. If it fits nowhere, why not.
    """
    if skeleton.failure is not None:
        what = "A callable cannot be asked here: a class in the tree does not keep the slots that stand for its leaves."
        reason = f"{type(skeleton.failure).__name__}: {skeleton.failure}".splitlines()[0]
        details = reason, f"Leaves: {skeleton.listed_leaves()}."
        raise SelectionError(what, *details, fix="write a path or a glob.") from skeleton.failure
    # Copied before the function can change any.
    containers = skeleton.containers
    try:
        return _asked(function, skeleton, everywhere)
    finally:
        if containers:
            refuse_changes(containers)


def _asked(function: Callable[[Any], Any], skeleton: Skeleton, everywhere: bool) -> Match | Misfit:
    misfit = None
    if not everywhere:
        try:
            return Match(*parts_of(function(skeleton.layout.root.value), skeleton))
        except MISFITS as error:
            misfit = _misfit(error, function, skeleton)
    nodes, leaves = skeleton.nodes, skeleton.layout.leaves
    places: list[Place | Pick] = []
    groups: list[tuple[Place | Pick, ...]] = []
    fits = False
    for node in nodes if misfit is None else nodes[1:]:
        try:
            returned = function(node.value)
            # The fast path for what most callables return: this runs on every call, for every node.
            if type(returned) is Slot and returned._owner is skeleton:
                places.append(leaves[returned._number])
            else:
                several, _ = parts_of(returned, skeleton)
                places += several
                if len(several) > 1:
                    groups.append(several)
            fits = True
        except MISFITS as error:
            new = _misfit(error, function, skeleton)
            misfit = misfit or new
    if not fits:
        return misfit or Misfit("it is one leaf, and a leaf is not a node")
    if groups:
        refuse_twice(skeleton, groups)
    return Match(tuple(places))


def _misfit(error: Exception, function: Callable[[Any], Any], skeleton: Skeleton) -> Misfit:
    """Why a callable does not fit a node; raises the error if it is a mistake on any node.

    Always a new exception: the traceback of the old one would keep the frames of the call, and their leaves, alive.
    """
    if isinstance(error, Misfit):
        return Misfit(str(error), error.name, error.found)
    if isinstance(error, SlotError | ElementError):
        raise error
    if refuses_argument_of(error, Slot) or refuses_argument_of(error, ElementSlot):
        raise computed("a leaf", "it gives it to a function of JAX") from None
    if isinstance(error, _TRACED):
        raise SlotError(
            "The selector uses a traced value where Python needs a number, an index for one.",
            "What is selected is part of the program; it cannot depend on what is traced.",
            fix="index with a Python int, or select the whole and mask its gradient.",
        ) from None
    if _is_from_inside(error, function, skeleton):
        raise error
    name = getattr(error, "name", None) or (error.args[0] if isinstance(error, KeyError) else None)
    return Misfit(f"{type(error).__name__}: {error}", name if isinstance(name, str) else None)


def _is_from_inside(error: Exception, function: Callable[[Any], Any], skeleton: Skeleton) -> bool:
    """Whether an error comes from inside a property or a method of a node, not from a node that lacks something."""
    traceback = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if traceback is None or (traceback.tb_next is None and traceback.tb_frame.f_code is _code_of(function)):
        # What nearly all callables do that do not fit.
        return False
    declared = getattr(type(getattr(error, "obj", None)), str(getattr(error, "name", "")), None)
    if isinstance(error, AttributeError) and isinstance(declared, property | functools.cached_property):
        # It is there; its own `AttributeError` made Python ask `__getattr__`.
        return True
    # The first frame is the one that asked; the next is the selector's, unless it is written in C.
    if traceback.tb_frame.f_code is _code_of(function):
        traceback = traceback.tb_next
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        # Every attribute of an `eqx.Module` goes through its `__getattribute__`, properties too.
        if frame.f_code.co_name != "__getattribute__" and _is_of_node(frame, skeleton):
            return frame.f_code.co_name not in _ASKING
    return False


def _code_of(function: Any) -> Any:
    if type(function) is types.FunctionType:
        return function.__code__
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType | types.MethodType):
        function = inspect.getattr_static(type(function), "__call__", None)
    return getattr(function, "__code__", None)


def _is_of_node(frame: types.FrameType, skeleton: Skeleton) -> bool:
    """Whether a frame runs a method or a property of a node of the tree, or of what a node keeps."""
    code = frame.f_code
    if not code.co_argcount or str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
        return False
    owner = frame.f_locals.get(code.co_varnames[0])
    members = (member for cls in type(owner).__mro__ for member in vars(cls).items())
    return skeleton.holds(owner) and any(
        code_of(member) is code or (name == code.co_name and code_of(member) is not None) for name, member in members
    )


def code_of(member: Any) -> types.CodeType | None:
    """The code of a property or a method, as a class has it."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    elif isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None


def parts_of(returned: Any, skeleton: Skeleton) -> tuple[tuple[Place | Pick, ...], Any]:
    """The places that a function returned, and the containers around them."""
    found = skeleton.find(returned)
    if found is not None:
        # What comes next would say the same, and takes longer.
        return (found,), LEAF
    try:
        places, containers = jax.tree.flatten(_to_places(returned, skeleton))
    except (TypeError, ValueError) as error:
        raise SelectionError(
            f"The selector returned a container that JAX cannot flatten: {str(error).splitlines()[0]:.80}",
            "Expected slots or nodes of the tree, or tuples, lists or dicts of them.",
            fix="use dict keys of one type, such as strings.",
        ) from error
    return tuple(places), containers


def _to_places(returned: Any, skeleton: Skeleton) -> Any:
    """Replace slots and nodes of the tree with their places, inside tuples, lists and dicts."""
    place = skeleton.find(returned)
    if place is not None:
        return place
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return type(returned)(*(_to_places(item, skeleton) for item in returned))
    if type(returned) in (tuple, list):
        return type(returned)(_to_places(item, skeleton) for item in returned)
    if type(returned) is dict:
        return {key: _to_places(item, skeleton) for key, item in returned.items()}
    if isinstance(returned, Slot):
        raise Misfit(f"it returned {returned!r}, which belongs to another tree")
    kind = type(returned).__name__
    static = "; static data is not a leaf" if is_static(returned) else ""
    reason = f"it returned {returned!r:.60} ({kind}), which is not a part of the tree{static}"
    raise Misfit(reason, found=returned)


def is_static(returned: Any) -> bool:
    """Whether what a function returned is static data, of which a tree knows no place."""
    return isinstance(returned, int | float | str)


def refuse_twice(
    skeleton: Skeleton, groups: "Sequence[Sequence[Place | Pick]]", counts: Callable[[int], bool] | None = None
) -> None:
    """Raise if a leaf that counts, or an element of one, is twice in a group; those count that can be selected."""
    flat = [pick for group in groups for pick in group]
    if len(set(flat)) == len(flat) and all(map(_IS_LEAF, flat)):
        return
    counts = counts or (lambda i: skeleton.is_wanted(i) and not skeleton.is_held(i))
    for group in groups:
        several: dict[int, list[Elements]] = {}
        for pick in group:
            for i in place_of(pick).numbers:
                several.setdefault(i, []).append(pick.elements if isinstance(pick, Pick) else None)
        twice = (
            i
            for i, chosen in several.items()
            if (len(chosen) > 1 or chosen[0] is not None) and overlap(chosen) and counts(i)
        )
        for i in twice:
            raise SelectionError(
                f"The selector returns {at(skeleton.path(i))} twice.",
                "A leaf may appear once: its gradient has one place to go.",
                fix="return it once, or the node around it alone.",
            )
