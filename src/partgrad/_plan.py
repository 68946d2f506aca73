"""Plans: a selector resolved on one structure, once, and kept.

A plan says which leaves are differentiated and how a gradient is put together, in numbers of leaves and structures. It
holds no arrays, and the cache of plans is bounded.
"""

import collections
from collections.abc import Hashable, Iterable
from typing import Any

import jax

from ._leaf import dtype_of, is_differentiable, shape_of
from ._remark import remark
from ._select import Chosen, Selection, Subject

_CACHE_SIZE = 512


class Plan:
    """A resolved selector: which leaves are differentiated, and how a gradient is put together.

    Args:
        subject: The tree.
        chosen: What a selector chose in it.

    Attributes:
        indices: The numbers of the differentiated leaves, each once.
        treedef: The structure of the tree, thawed where a mark was named.
        named: Whether the gradient has the shape of a part, not of the tree.
    """

    def __init__(self, subject: Subject, chosen: Chosen):
        self.indices = tuple(chosen.selected)
        self.named = chosen.part is not None
        self.treedef = subject.treedef
        if chosen.thaw:
            self.treedef = jax.tree.structure(remark(subject.tree, lambda i: False if i in chosen.thaw else None))
        self._structure = chosen.part if chosen.part is not None else self.treedef
        self._size = self._structure.num_leaves
        numbers = chosen.leaves if self.named else range(self._size)
        wanted = set(self.indices)
        self._positions = tuple(at for at, i in enumerate(numbers) if i in wanted)
        self._single = self.named and self._structure == jax.tree.structure(0)
        self._candidates = tuple((i, is_differentiable(subject.leaves[i])) for i in chosen.leaves)
        self._looked = tuple((i, _shape_and_dtype(subject.leaves[i])) for i in subject.looked())

    def fits(self, leaves: list[Any]) -> bool:
        """Whether it holds for other leaves in the same structure: they differ in nothing that mattered."""
        for i, differentiable in self._candidates:
            if is_differentiable(leaves[i]) is not differentiable:
                return False
        return not self._looked or all(_shape_and_dtype(leaves[i]) == looked for i, looked in self._looked)

    def gradient(self, values: Iterable[Any]) -> Any:
        """Put one value per differentiated leaf into the shape of the gradient."""
        if self._single:
            (value,) = values
            return value
        everywhere = [None] * self._size
        for at, value in zip(self._positions, values, strict=True):
            everywhere[at] = value
        return self._structure.unflatten(everywhere)


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
        The plan. It is kept for the structure unless the selection may change without notice, or the structure holds
        arrays in another library's auxiliary data.
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
    new = Plan(subject, selection.choose(subject))
    if key is not None and not subject.layout.aux_holds_arrays:
        _plans[key] = new
        while len(_plans) > _CACHE_SIZE:
            _plans.popitem(last=False)
    return new
