"""Masks: trees of bools, laid over a structure."""

from collections.abc import Sequence
from typing import Any

from .._marks import Layout, Place
from .._message import at, word
from ..errors import SelectionError
from .slots import Structure


def masked_places(mask: Layout, chosen: Sequence[bool], structure: Structure) -> list[Place]:
    """The places of a structure under True.

    Args:
        mask: The layout of a tree of bools, or of a prefix of one.
        chosen: Its bools.
        structure: The structure.

    Raises:
        SelectionError: If the mask has another structure.
    """
    # Wrappers take no step, so the last place of a path is what they hold.
    places = {place.path: place for place in structure.layout.places}
    covered: set[int] = set()
    for place in mask.places:
        path = place.path
        if path not in places:
            raise _other_structure(path, "nothing there", "a mask entry")
        there = places[path]
        if place.is_leaf:
            covered.update(range(there.start, there.stop))
        elif not place.is_wrapper and place.value is not None and type(place.value) is not type(there.value):
            raise _other_structure(path, _class_name(there.value, place.value), _class_name(place.value, None))
    for number, leaf in enumerate(structure.layout.leaves):
        if number not in covered:
            raise _other_structure(leaf.path, "True or False", "nothing")
    return [places[leaf.path] for leaf, on in zip(mask.leaves, chosen, strict=True) if on]


def _class_name(value: Any, other: Any) -> str:
    """The name of a class, which tells it from another one of the same name."""
    name = type(value).__name__
    return f"{name} (the class of that name when the tree was built)" if name == type(other).__name__ else name


def _other_structure(path: str, expected: str, found: str) -> SelectionError:
    return SelectionError(
        word(
            f"The mask has another structure than the tree, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="build the mask from the tree, jax.tree.map(lambda leaf: ..., tree), or from a prefix of it.",
        )
    )
