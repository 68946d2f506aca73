"""Masks: trees of bools, laid over a tree."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._marks import Layout, Place
from .._message import at
from ..errors import SelectionError
from .skeletons import Skeleton


def bools_in(tree: Any) -> list[bool]:
    """Whether each leaf is a bool."""
    return [isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(tree)]


def masked_places(mask: Layout, chosen: Sequence[bool], skeleton: Skeleton) -> list[Place]:
    """The places of a skeleton under True in a tree of bools of this layout, or in a prefix of one."""
    found = []
    pending = [(mask.root, skeleton.layout.root)]
    while pending:
        place, there = pending.pop()
        place, there = mask.inside(place), skeleton.layout.inside(there)
        if place.is_leaf:
            found += [there] * chosen[place.start]
            continue
        if place.value is not None and type(place.value) is not type(there.value):
            raise _other_structure(place.path, _class_name(there.value, place.value), _class_name(place.value, None))
        entries = {child.step: child for child in mask.children(place)}
        below = {child.step: child for child in skeleton.layout.children(there)}
        for step, child in entries.items():
            if step not in below:
                raise _other_structure(child.path, "nothing there", "a mask entry")
        for left_out in [there] if there.is_leaf else [child for step, child in below.items() if step not in entries]:
            if left_out.start < left_out.stop:
                raise _other_structure(skeleton.path(left_out.start), "True or False", "nothing")
        pending += [(child, below[step]) for step, child in reversed(entries.items())]
    return found


def _class_name(value: Any, other: Any) -> str:
    """The name of a class, qualified so that it differs from another class of the same name."""
    name = type(value).__name__
    return f"{name} (the class of that name when the tree was built)" if name == type(other).__name__ else name


def _other_structure(path: str, expected: str, found: str) -> SelectionError:
    return SelectionError(
        f"The mask has a different structure from the tree, at {at(path)}.",
        f"Expected {expected}, got {found}.",
        fix="build the mask from the tree, jax.tree.map(lambda leaf: ..., tree), or from a prefix of it.",
    )
