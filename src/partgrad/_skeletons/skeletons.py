"""Skeletons: a tree with a slot in place of every leaf, on which selectors are resolved."""

import collections
import contextlib
import itertools
import operator
import threading
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from .._compat import cached_property
from .._marks import (
    Cover,
    Layout,
    Marks,
    Place,
    StaticData,
    flatten_one_level,
    registrations,
    schema_of,
    typed_treedef,
)
from .._message import listed
from .._trees import data_of, describe, is_differentiable, reaches_array
from ..errors import SlotError
from .plan import Match, Pick, Plan, Purpose
from .slots import ElementSlot, Slot

T = TypeVar("T")

_STRUCTURES = 256
# How many leaves all kept skeletons but the newest may have together: each leaf takes about a kilobyte.
_LEAVES = 1_000_000
# How many plans and combinations are kept for a skeleton and a purpose.
_KEPT = 128


class Bound(NamedTuple):
    """What the slots of a skeleton stand for while a selector is resolved, and what for."""

    tree: Any = None
    leaves: Any = None
    purpose: Purpose = "differentiate"


class _Local(threading.local):
    bound = Bound()


class Skeleton:
    """A tree with a slot in place of every leaf, on which selectors are resolved.

    It is kept for other trees of the same treedef, so it holds no leaves. A call binds its leaves and its purpose
    while it resolves a selector; each thread binds its own.

    Attributes:
        layout: The places of a tree with a slot in place of every leaf.
        slots: The slots, by the number of the leaf.
        used: When it was used last, counted in uses.
        plans: The plans made for it, by purpose and by what the selector says.
        combined: What combinations of matches come to.
        holds_arrays: Whether it keeps an array alive, through another library's auxiliary data or a closure in it.
        typed: A key that distinguishes treedefs that compare equal but differ in static data, as 1 and True do.
        failure: Why the tree could not be built with slots, if it could not.
    """

    def __init__(self, tree: Any, treedef: Any):
        self.treedef = treedef
        self.used = next(_clock)
        self.registrations = registrations()
        self._local = _Local()
        self.slots = [Slot(self, number) for number in range(treedef.num_leaves)]
        self.plans: dict[Purpose, dict[Hashable, Plan]] = collections.defaultdict(dict)
        self.combined: dict[Hashable, Match] = {}
        self.failure: Exception | None = None
        self.holds_arrays = False
        self._data = data_of(treedef)
        # Nodes of a kind share theirs.
        data = list({id(own): own for own in self._data}.values())
        try:
            self.layout = Layout(self._build(tree, treedef), treedef)
            # The usual marks hold nothing.
            kept = [own for own in data if type(own) is not Marks or own.static]
            self.holds_arrays = self.holds_arrays or (bool(kept) and reaches_array(kept))
        except Exception as error:
            # A class that loses its leaves when it is built: callables cannot run, all other selectors work.
            self.layout, self.holds_arrays = Layout(tree, treedef), True
            self.failure = error.with_traceback(None)
        self.typed = None if all(map(_is_exact, data)) else typed_treedef(treedef)
        # A path tells the keys 1, True and an enum's 1 apart.
        keys = itertools.chain.from_iterable(own for own in data if isinstance(own, list | tuple))
        self.has_typed_keys = self.typed is not None and any(type(key) is not str for key in keys)

    def is_of(self, treedef: Any) -> bool:
        """Whether a treedef that compares equal to this one's also has static data of the same types."""
        # Nearly always the same objects: the key of a treedef takes longer than most selectors.
        return all(map(_is_same, self._data, data_of(treedef))) or self.typed == typed_treedef(treedef)

    @cached_property
    def nodes(self) -> list[Place]:
        """The places that are nodes, without wrappers."""
        return [place for place in self.layout.places if not place.is_leaf and not place.is_wrapper]

    @cached_property
    def _places(self) -> dict[int, Place]:
        """The places that are nodes, by the identity of the node."""
        return {id(place.value): place for place in reversed(self.layout.places) if not place.is_leaf}

    @cached_property
    def containers(self) -> list[tuple[Any, Any]]:
        """The lists and dicts of the tree, each with a copy."""
        containers = [place.value for place in self.nodes if type(place.value) in (list, dict)]
        return [(node, node.copy()) for node in containers]

    def _build(self, tree: Any, treedef: Any) -> Any:
        try:
            built = treedef.unflatten(self.slots)
            leaves = jax.tree.leaves(built)
            if len(leaves) == len(self.slots) and all(map(operator.is_, leaves, self.slots)):
                return built
        except Exception:
            # A constructor that checks or converts its arguments may reject slots.
            pass
        built = _with_leaves(tree, iter(self.slots))
        # Flattened here, as a lookup of a place will.
        if len(jax.tree_util.tree_flatten_with_path(built)[0]) != len(self.slots):
            raise TypeError("What its class builds has other leaves.")
        # It has all attributes of the tree's own nodes, including those that are not part of the structure.
        self.holds_arrays = self.holds_arrays or reaches_array(built)
        return built

    def bind(self, bound: Bound) -> Bound:
        """Let the slots stand for the leaves of a tree in this thread, and return what they stood for before."""
        before, self._local.bound = self._local.bound, bound
        return before

    @property
    def tree(self) -> Any:
        """The tree whose leaves the slots stand for."""
        return self._local.bound.tree

    @property
    def leaves(self) -> Any:
        """These leaves."""
        return self._local.bound.leaves

    @property
    def purpose(self) -> Purpose:
        """What they are selected for."""
        return self._local.bound.purpose

    def is_wanted(self, leaf: int, *, is_itself: bool = False) -> bool:
        """Whether a selector that takes a leaf, directly or within a node, concerns it, marks aside."""
        return (is_itself and self.purpose == "edit") or is_differentiable(self.leaves[leaf])

    def is_held(self, leaf: int) -> bool:
        """Whether a mark keeps a leaf out of what is described."""
        return self.purpose != "marks" and self.layout.leaves[leaf].is_held

    def path(self, number: int) -> str:
        """The path of a leaf."""
        # While it is built or flattened, a class may trigger an error that asks a slot for its path.
        layout = getattr(self, "layout", None)
        return f"leaf {number}" if layout is None or layout.is_asking else layout.leaves[number].path

    def listed_leaves(self, leaves: Any = None) -> str:
        """The first leaves for an error message, each with its path, its type and whether a mark holds it."""
        places, leaves = self.layout.leaves, self.leaves if leaves is None else leaves
        described = (
            " ".join(filter(None, [place.path, describe(leaf), "(held)" if place.is_held else ""]))
            for place, leaf in zip(places, leaves, strict=True)
        )
        return listed(described, len(places)) or "none"

    def find(self, value: Any) -> "Place | Pick | None":
        """The place of a slot or node of this tree, or None; for a wrapper, the place of what it holds."""
        kind = type(value)
        if kind is Slot:
            return self.layout.leaves[value._number] if value._owner is self else None
        if kind is ElementSlot:
            return self.pick(value) if value._owner is self else None
        if value is None:
            return None
        place = self._places.get(id(value)) or self._find_copy(value)
        return None if place is None else self.layout.inside(place)

    def pick(self, slot: ElementSlot) -> Pick:
        """The elements that a slot stands for."""
        number = slot._number
        return Pick(self.layout.leaves[number], slot.elements, self.slots[number].size)

    def holds(self, value: Any) -> bool:
        """Whether an object is a node of the tree, or what a node keeps besides its children."""
        if id(value) in self._places:
            return True
        return any(value is kept for place in self.nodes for kept in getattr(place.value, "__dict__", {}).values())

    def _find_copy(self, node: Any) -> Place | None:
        """The node that this one is a copy of: some classes rebuild what they hold on every access."""
        if isinstance(node, tuple) or type(node) in (list, dict) or not jax.tree_util.is_tree_node(type(node)):
            return None
        leaves = jax.tree.leaves(node)
        if not leaves or not all(isinstance(leaf, Slot) and leaf._owner is self for leaf in leaves):
            return None
        numbers = [leaf._number for leaf in leaves]
        same = [p for p in self.layout.places if numbers == list(p.numbers) and _is_copy(node, p.value)]
        return same[-1] if same else None


def keep(kept: dict[Any, T], key: Hashable, value: T) -> T:
    """Keep a value, and not too many of them."""
    # Another thread may be doing the same; a key may be unhashable.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration, TypeError, ValueError):
        while len(kept) >= _KEPT:
            del kept[next(iter(kept))]
        kept[key] = value
    return value


def refuse_changes(containers: list[tuple[Any, Any]]) -> None:
    """Raise if a selector changed a list or a dict of a tree, which is kept for the next call, and repair it."""
    changed = [(node, copy) for node, copy in containers if not _is_unchanged(node, copy)]
    for node, copy in changed:
        node.clear()
        (node.extend if isinstance(node, list) else node.update)(copy)
    if changed:
        raise SlotError(
            "The selector changes a list or a dict of the tree.",
            "A selector only points at parts of the tree.",
            fix="copy it first: list(m.layers), dict(m.params).",
        )


def _is_unchanged(node: Any, copy: Any) -> bool:
    # By identity: slots refuse to be compared.
    if len(node) != len(copy) or not all(map(operator.is_, node, copy)):
        return False
    return type(node) is list or all(map(operator.is_, node.values(), copy.values()))


def _is_copy(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # A mapping may return its contents as another class.
        first, second = (jax.tree_util.tree_leaves_with_path(node) for node in (one, other))
        return [path for path, _ in first] == [path for path, _ in second]
    return bool(jax.tree.structure(one) == jax.tree.structure(other))


def _with_leaves(node: Any, leaves: Iterator[Any]) -> Any:
    """A tree with other leaves, built without constructors wherever a node keeps its children as attributes."""
    if not jax.tree_util.is_tree_node(type(node)):
        return next(leaves)
    children, skeleton = flatten_one_level(node)
    rebuilt = [_with_leaves(child, leaves) for _, child in children]
    names = [step.name if isinstance(step, jax.tree_util.GetAttrKey) else None for step, _ in children]
    if schema_of(node) is not None or not set(names) <= set(getattr(node, "__dict__", ())):
        return skeleton.unflatten(rebuilt)
    new = object.__new__(type(node))
    new.__dict__.update(node.__dict__)
    new.__dict__.update(zip(names, rebuilt, strict=True))
    return new


def _is_exact(data: Any) -> bool:
    """Whether auxiliary data that compares equal to this is the same in every respect."""
    if type(data) in (tuple, list):
        return all(map(_is_exact, data))
    return isinstance(data, str | type | types.FunctionType | Cover | Marks | StaticData | None)


def _is_same(one: Any, other: Any) -> bool:
    """Whether auxiliary data that compares equal is seen at once to be the same in every respect."""
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) in (tuple, list):
        return all(map(_is_same, one, other))
    return type(one) in (bool, int, str)


# Not an OrderedDict, which would hash a treedef, slowly, at every step of an iteration.
_skeletons: dict[Any, Skeleton] = {}
_clock = itertools.count()


def skeleton_of(tree: Any, treedef: Any, exactly: bool = False) -> Skeleton:
    """The skeleton of a tree, kept from an earlier call unless that would keep an array alive.

    `exactly` requires static data of the same types too, because a callable reads it.
    """
    # It is not there, or its auxiliary data cannot be compared.
    with contextlib.suppress(Exception):
        found = _skeletons[treedef]
        compares_types = found.typed is not None and (exactly or found.has_typed_keys)
        if (not compares_types or found.is_of(treedef)) and found.registrations == registrations():
            found.used = next(_clock)
            return found
    new = Skeleton(tree, treedef)
    if not new.holds_arrays:
        # Another thread may be dropping the same one.
        with contextlib.suppress(Exception):
            _skeletons[treedef] = new
            # Leaves are summed up for large skeletons only: all small ones have at most `_LEAVES` together.
            if len(_skeletons) > _STRUCTURES or len(new.slots) > _LEAVES // _STRUCTURES:
                _drop_oldest()
    return new


def _drop_oldest() -> None:
    """Drop what was used longest ago, while there are too many skeletons or the older ones have too many leaves."""
    *older, _ = sorted(_skeletons.values(), key=lambda skeleton: skeleton.used)
    leaves = sum(len(skeleton.slots) for skeleton in older)
    for oldest in older:
        if len(_skeletons) <= _STRUCTURES and leaves <= _LEAVES:
            break
        del _skeletons[oldest.treedef]
        leaves -= len(oldest.slots)
