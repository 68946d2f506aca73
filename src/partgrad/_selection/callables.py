"""Selector callables: run on the slots of a structure; what they return is turned into places."""

from collections.abc import Callable
from typing import Any

import jax

from .._compat import refuses_argument_of
from .._marks import Place, refuse_forgotten
from .._message import listed, near_misses
from .._trees import accepts
from ..errors import ElementError, NoMatchError, SelectionError, SelectorTypeError, SlotError
from .choose import LEAF
from .patterns import names_of
from .slots import ElementSlot, Pick, Slot, Structure, computed, refuse_changes

_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class _Misfit(Exception):
    """A callable does not fit a node: it looks for a missing name, for example, or returns static data."""

    def __init__(self, reason: str, name: str | None = None, is_static: bool = False):
        super().__init__(reason)
        self.name = name
        self.is_static = is_static


# What a callable that does not fit raises.
_MISFITS = (_Misfit, AttributeError, KeyError, IndexError, TypeError)


def answer_of(function: Callable[[Any], Any], structure: Structure, *, everywhere: bool) -> Any:
    """What a function returns for the root of a structure or, if it does not fit there, for the nodes where it does.

    With `everywhere`, every node is asked, the root included. See `Selection.answer` for what is returned.
    """
    if structure.failure is not None:
        what = "A callable cannot be asked here: a class in the tree does not keep the slots that stand for its leaves."
        reason = f"{type(structure.failure).__name__}: {structure.failure}".splitlines()[0]
        details = reason, f"Leaves: {structure.listed_leaves()}."
        raise SelectionError(what, *details, fix="write a path or a glob.") from structure.failure
    # Copied before the function can change any.
    containers = structure.containers
    try:
        return _answer(function, structure, everywhere)
    finally:
        refuse_changes(containers)


def _answer(function: Callable[[Any], Any], structure: Structure, everywhere: bool) -> Any:
    misfit = None
    if not everywhere:
        try:
            returned = function(structure.layout.root.value)
            return _parts(returned, structure)
        except _MISFITS as error:
            misfit = _misfit(error)
    nodes, leaves = structure.nodes, structure.layout.leaves
    answers = []
    for node in nodes if misfit is None else nodes[1:]:
        try:
            returned = function(node.value)
            # The fast path for what most callables return: this runs on every call, for every node.
            is_slot = returned.__class__ is Slot and returned._owner is structure
            answers.append((leaves[returned._number],) if is_slot else _parts(returned, structure)[0])
        except _MISFITS as error:
            new = _misfit(error)
            misfit = misfit or new
    if not answers:
        misfit = misfit or _Misfit("it is one leaf, and a leaf is not a node")
        raise _fits_nowhere(function, structure, misfit, max(len(nodes) - 1, 0))
    return tuple(answers), None


def _misfit(error: Exception) -> _Misfit:
    """Why a callable does not fit a node; raises the error if it is a mistake on any node.

    Always a new exception: the traceback of the old one would keep the frames of the call, and their leaves, alive.
    """
    if isinstance(error, _Misfit):
        return _Misfit(str(error), error.name, error.is_static)
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
    name = getattr(error, "name", None) or (error.args[0] if isinstance(error, KeyError) else None)
    return _Misfit(f"{type(error).__name__}: {error}", name if isinstance(name, str) else None)


def _parts(returned: Any, structure: Structure) -> tuple[tuple[Place | Pick, ...], Any]:
    """The places that a function returned, and the containers around them."""
    found = structure.find(returned)
    if found is not None:
        # What comes next would say the same, and takes longer.
        return (found,), LEAF
    try:
        places, containers = jax.tree.flatten(_to_places(returned, structure))
    except (TypeError, ValueError) as error:
        raise SelectionError(
            f"The selector returned a container that JAX cannot flatten: {str(error).splitlines()[0]:.80}",
            "Expected slots or nodes of the tree, or tuples, lists or dicts of them.",
            fix="use dict keys of one type, such as strings.",
        ) from error
    return tuple(places), containers


def _to_places(returned: Any, structure: Structure) -> Any:
    """Replace slots and nodes of the tree with their places, inside tuples, lists and dicts."""
    place = structure.find(returned)
    if place is not None:
        return place
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return type(returned)(*(_to_places(item, structure) for item in returned))
    if type(returned) in (tuple, list):
        return type(returned)(_to_places(item, structure) for item in returned)
    if type(returned) is dict:
        return {key: _to_places(item, structure) for key, item in returned.items()}
    if isinstance(returned, Slot):
        raise _Misfit(f"it returned {returned!r}, which belongs to another tree")
    kind = type(returned).__name__
    is_static = isinstance(returned, bool | int | float | str)
    static = "; static data is not a leaf" if is_static else ""
    raise _Misfit(
        f"it returned {returned!r:.60} ({kind}), which is not a part of the tree{static}", is_static=is_static
    )


def _fits_nowhere(function: Callable[[Any], Any], structure: Structure, misfit: _Misfit, nodes: int) -> SelectionError:
    if not accepts(function, None):
        return SelectorTypeError(
            f"The selector does not take one argument: {misfit}.",
            "Expected a function of the tree.",
            fix="write wrt=lambda m: m.the_part.",
        )
    refuse_forgotten(structure.leaves, structure.path, [misfit.name])
    near = near_misses(misfit.name, names_of(structure.layout.places)) if misfit.name else []
    root = type(structure.layout.root.value).__name__
    details = [f"On the tree itself: {misfit}.", f"Tried on {root} and the {nodes} nodes below it."]
    if near:
        details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {structure.listed_leaves()}.")
    fix = "return one of the leaves, or a node that holds some."
    if near and near[0] != misfit.name:
        fix = f"write `{near[0]}` for `{misfit.name}`."
    if misfit.is_static:
        fix = "make it a field of its own, without static=True and without `Static`, or return one of the leaves."
    return NoMatchError("The selector fits no part of the tree.", *details, fix=fix)
