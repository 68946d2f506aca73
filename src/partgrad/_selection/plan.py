"""Plans: a selector resolved on one structure, once, and kept.

A plan says which leaves are differentiated and how a gradient is put together, in numbers of leaves and structures. It
holds no arrays, and the cache of plans is bounded.
"""

import collections
import contextlib
import types
from collections.abc import Hashable, Iterable
from typing import Any

import jax

from .. import _words as words
from .._marks import Layout, Marks, StaticData, remark
from .._trees import dtype_of, is_differentiable, put, reaches_array, shape_of, take
from .choose import Chosen, Subject
from .selectors import Selection

_CACHE_SIZE = 512


class Plan:
    """A resolved selector: which leaves are differentiated, and how a gradient is put together.

    Args:
        subject: The tree.
        chosen: What a selector chose in it.

    Attributes:
        indices: The numbers of the differentiated leaves.
        elements: For each of them which elements are differentiated; None for all.
        thaws: Whether a mark gives way.
    """

    def __init__(self, subject: Subject, chosen: Chosen):
        self.indices = tuple(chosen.selected)
        self.elements = tuple(chosen.elements)
        self._whole = all(elements is None for elements in self.elements)
        self.thaws = bool(chosen.thaw)
        self._size = len(subject.leaves)
        self._part = chosen.part
        self._thawed: Any = None
        if self.thaws:
            self._thawed = jax.tree.structure(remark(subject.tree, lambda i: False if i in chosen.thaw else None))
        # Opening a mark goes by what can be differentiated beside the named leaf, too.
        considered = range(self._size) if self.thaws else chosen.considered
        self._considered = tuple((i, is_differentiable(subject.leaves[i])) for i in considered)
        self._looked = tuple((i, _shape_and_dtype(subject.leaves[i])) for i in subject.looked())

    def fits(self, leaves: list[Any]) -> bool:
        """Whether it holds for other leaves in the same structure: they differ in nothing that mattered."""
        for i, differentiable in self._considered:
            if is_differentiable(leaves[i]) is not differentiable:
                return False
        return not self._looked or all(_shape_and_dtype(leaves[i]) == looked for i, looked in self._looked)

    def selected(self, leaves: list[Any]) -> list[Any]:
        """The differentiated leaves or elements."""
        if self._whole:
            return [leaves[i] for i in self.indices]
        return [take(leaves[i], elements) for i, elements in zip(self.indices, self.elements, strict=True)]

    def inserted(self, leaves: list[Any], values: Iterable[Any]) -> list[Any]:
        """The leaves with others in the place of the differentiated ones."""
        leaves = leaves.copy()
        if self._whole:
            for i, value in zip(self.indices, values, strict=True):
                leaves[i] = value
            return leaves
        for i, elements, value in zip(self.indices, self.elements, values, strict=True):
            leaves[i] = put(leaves[i], elements, value)
        return leaves

    def refuse_elements(self, what: str, tree: Any) -> None:
        """Raise if elements of a leaf are selected."""
        if not self._whole:
            i = next(i for i, elements in zip(self.indices, self.elements, strict=True) if elements is not None)
            raise words.elements_refused(what, Layout(tree).leaves[i].path)

    def structure(self, treedef: Any) -> Any:
        """The structure of a tree, thawed where a mark was named."""
        # The caller's own wherever possible: treedefs that compare equal may still differ (1 == True, two equal lists).
        return self._thawed if self.thaws else treedef

    def gradient(self, treedef: Any, values: Iterable[Any]) -> Any:
        """Put one value per differentiated leaf into the shape of the gradient."""
        if self._part is not None:
            return self._part.build(treedef, values)
        everywhere = [None] * self._size
        for i, value in zip(self.indices, values, strict=True):
            everywhere[i] = value
        return unflatten_part(treedef, everywhere)


def unflatten_part(treedef: Any, leaves: list[Any]) -> Any:
    """Build a tree with None in the place of leaves."""
    try:
        return treedef.unflatten(leaves)
    except Exception as error:
        error.add_note(
            "partgrad built a tree with None in the place of the leaves that are not in it, and the constructor of a "
            "class in it, which JAX runs to build one, refused that.\n"
            "Fix: let the constructor accept None, or name the leaves by a callable, whose gradient has no such tree."
        )
        raise


def _shape_and_dtype(leaf: Any) -> Any:
    try:
        return shape_of(leaf), dtype_of(leaf)
    except AttributeError:
        return type(leaf)


_plans: collections.OrderedDict[Hashable, Plan] = collections.OrderedDict()


def plan(selection: Selection, tree: Any, leaves: list[Any], treedef: Any) -> Plan:
    """Resolve a selection on a tree, or find the plan that was made for its structure.

    Args:
        selection: From `as_selection`.
        tree: The tree.
        leaves: Its leaves.
        treedef: Its structure.

    Returns:
        The plan. It is kept for the structure unless the selection may change without notice, or the structure reaches
        arrays, in another library's auxiliary data or by a closure.
    """
    key = selection.key()
    if key is not None:
        key = (key, treedef)
        try:
            found = _plans.get(key)
            if found is not None:
                _plans.move_to_end(key)
        except Exception:
            # Treedefs whose auxiliary data cannot be compared; or another thread dropped the plan just now.
            found = None
        if found is not None and found.fits(leaves):
            return found
    subject = Subject(tree, leaves, treedef)
    try:
        new = Plan(subject, selection.choose(subject))
    finally:
        subject.release()
    if key is not None and not reaches_array(treedef) and (not new.thaws or _compares_exactly(treedef)):
        with contextlib.suppress(Exception):
            _plans[key] = new
        while len(_plans) > _CACHE_SIZE:
            _plans.popitem(last=False)
    return new


def _compares_exactly(structure: Any) -> bool:
    """Whether structures that equal this one are the same in every respect."""
    data = structure.node_data()
    return data is None or (_is_exact(data[1]) and all(map(_compares_exactly, structure.children())))


def _is_exact(aux: Any) -> bool:
    if type(aux) in (tuple, list):
        return all(map(_is_exact, aux))
    return isinstance(aux, str | type | types.FunctionType | Marks | StaticData | None)
