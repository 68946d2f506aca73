"""Slots: what a selector callable sees in place of a leaf; and structures, on which selectors are resolved."""

import collections
import contextlib
import functools
import itertools
import math
import operator
import threading
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from .._marks import Cover, Layout, Marks, Place, StaticData, flatten_one_level, schema_of, typed_structure
from .._message import at, listed
from .._trees import data_of, describe, dtype_of, is_differentiable, positions, reaches_array, shape_of
from ..errors import ElementError, SlotError

if TYPE_CHECKING:
    from .plans import Plan

_STRUCTURES = 256
# How many leaves all kept structures but the newest may have together: each leaf takes about a kilobyte.
_LEAVES = 1_000_000


class Slot:
    """Stands for one leaf while a selector runs: it knows path, shape and dtype, and refuses to compute."""

    __slots__ = ("_number", "_owner")

    def __init__(self, owner: "Structure", number: int):
        self._owner = owner
        self._number = number

    @property
    def path(self) -> str:
        """The key path of the leaf, as text."""
        return self._owner.path(self._number)

    @property
    def _words(self) -> str:
        return f"the leaf `{self.path}`" if self.path else "the tree, which is one leaf,"

    @property
    def _leaf(self) -> Any:
        leaves = self._owner.leaves
        if leaves is None:
            raise SlotError(
                f"The slot of {at(self.path)} is used after its selector has returned.",
                "A slot stands for a leaf only while the selector runs.",
                fix="ask for shape and dtype inside the selector.",
            )
        return leaves[self._number]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return shape_of(self._leaf)

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf."""
        return dtype_of(self._leaf)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the leaf."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)

    def __getattr__(self, name: str) -> NoReturn:
        # A leaf without shape and dtype, such as a string, has only a path.
        if not name.startswith("_") and name not in ("shape", "dtype", "ndim", "size") and hasattr(jax.Array, name):
            raise computed(self.path, f"it reads `.{name}`")
        raise AttributeError(f"{self._words} has no attribute {name!r}", name=name, obj=None)

    def __getitem__(self, index: Any) -> "ElementSlot":
        if isinstance(index, str):
            raise KeyError(index)
        try:
            shape = self.shape
        except AttributeError:
            raise TypeError(f"{self._words} has no elements") from None
        if not shape:
            raise TypeError(f"{self._words} is a single number, which has no elements")
        return ElementSlot(self, self._positions(index, lambda: positions(shape, index), shape))

    def _positions(self, index: Any, take: Any, shape: tuple[int, ...]) -> np.ndarray:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(index)):
            raise computed(self.path, "it indexes it with a traced value, which has no number yet")
        try:
            return np.asarray(take())
        except IndexError as error:
            raise ElementError(
                f"The selector takes element {index!r} of {at(self.path)}, which is out of range.",
                f"Expected an index into shape {shape}.",
                fix="select an element that is there, or the whole leaf.",
            ) from error

    def __repr__(self) -> str:
        return f"<slot {self.path}>"

    __hash__ = object.__hash__


class ElementSlot(Slot):
    """Stands for some elements of a leaf: their positions in the flattened leaf."""

    __slots__ = ("elements",)

    def __init__(self, slot: Slot, elements: np.ndarray):
        super().__init__(slot._owner, slot._number)
        self.elements = elements

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return self.elements.shape

    def __getitem__(self, index: Any) -> "ElementSlot":
        return ElementSlot(self, self._positions(index, lambda: self.elements[index], self.shape))


def computed(path: str, operation: str) -> SlotError:
    """The error for a selector that computes on a slot."""
    return SlotError(
        f"The selector computes on {at(path)}: {operation}.",
        "A selector points at parts of the tree; it sees slots (path, shape, dtype), never values.",
        fix="return the part itself, and compute in the function that is differentiated.",
    )


def _refuse(operation: str) -> Any:
    def method(self: Slot, *args: Any, **kwargs: Any) -> NoReturn:
        raise computed(self.path, operation)

    return method


for _name, _symbol in {
    **{"add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "divmod": "divmod"},
}.items():
    setattr(Slot, f"__{_name}__", _refuse(f"it uses `{_symbol}`"))
    setattr(Slot, f"__r{_name}__", _refuse(f"it uses `{_symbol}`"))
for _name, _symbol in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    setattr(Slot, f"__{_name}__", _refuse(f"it compares with `{_symbol}`"))
for _name in ("neg", "pos", "abs", "invert", "round", "float", "int", "complex", "index", "trunc", "floor", "ceil"):
    setattr(Slot, f"__{_name}__", _refuse(f"it calls `{_name}`"))
for _name, _operation in {
    **{"iter": "it iterates it", "contains": "it uses `in`", "bool": "it asks whether it is true"},
    **{"len": "it calls `len`", "call": "it calls it", "array": "it converts it to an array"},
}.items():
    setattr(Slot, f"__{_name}__", _refuse(_operation))


class Pick:
    """Some elements of the leaf at a place: their positions in the flattened leaf."""

    __slots__ = ("_key", "elements", "place")

    def __init__(self, place: Place, elements: np.ndarray):
        self.place = place
        self.elements = elements
        self._key = (place, elements.shape, elements.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pick) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Bound(threading.local):
    """The tree and the leaves that the slots of a structure stand for in one thread."""

    pair: tuple[Any, Any] = (None, None)


class Structure:
    """A structure of trees, on which selectors are resolved: its places, and a slot for every leaf.

    It is kept for other trees of the same structure, so it holds no leaves. A call binds its leaves while it resolves a
    selector; each thread binds its own.

    Attributes:
        layout: The places of a tree with a slot in place of every leaf.
        slots: The slots, by the number of the leaf.
        used: When it was used last, counted in uses.
        plans: The plans made for it, by purpose and by what the selector says.
        holds_arrays: Whether it keeps an array alive, through another library's auxiliary data or a closure in it.
        typed: A key that distinguishes structures that compare equal but differ in static data, as 1 and True do.
        failure: Why the tree could not be built with slots, if it could not.
    """

    def __init__(self, tree: Any, treedef: Any):
        self.treedef = treedef
        self.used = next(_clock)
        self._bound = _Bound()
        self.slots = [Slot(self, number) for number in range(treedef.num_leaves)]
        self.plans: dict[str, dict[Hashable, Plan]] = collections.defaultdict(dict)
        self.failure: Exception | None = None
        self.holds_arrays = False
        # Nodes of a kind share theirs.
        data = list({id(own): own for own in data_of(treedef)}.values())
        try:
            self.layout = Layout(self._build(tree, treedef), treedef)
            self.holds_arrays = self.holds_arrays or reaches_array(data)
        except Exception as error:
            # A class that loses its leaves when it is built: callables cannot run, all other selectors work.
            self.layout, self.holds_arrays = Layout(tree, treedef), True
            self.failure = error.with_traceback(None)
        self.typed = None if all(map(_is_exact, data)) else typed_structure(treedef)

    @functools.cached_property
    def nodes(self) -> list[Place]:
        """The places that are nodes, without wrappers."""
        return [place for place in self.layout.places if not place.is_leaf and not place.is_wrapper]

    @functools.cached_property
    def _places(self) -> dict[int, Place]:
        """The places that are nodes, by the identity of the node."""
        return {id(place.value): place for place in reversed(self.layout.places) if not place.is_leaf}

    @functools.cached_property
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

    def bind(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Let the slots stand for the leaves of a tree in this thread, and return what they stood for before."""
        before, self._bound.pair = self._bound.pair, pair
        return before

    @property
    def bound_tree(self) -> Any:
        """The tree whose leaves the slots stand for."""
        return self._bound.pair[0]

    @property
    def leaves(self) -> Any:
        """These leaves."""
        return self._bound.pair[1]

    def mark(self, leaf: int) -> int:
        """The depth of the lowest mark at or above a leaf, or -1."""
        return self.layout.leaves[leaf].mark

    def path(self, number: int) -> str:
        """The path of a leaf."""
        # While it is built or flattened, a class may trigger an error that asks a slot for its path.
        layout = getattr(self, "layout", None)
        return f"leaf {number}" if layout is None or layout.is_asking else layout.leaves[number].path

    def listed_leaves(self, leaves: Any = None) -> str:
        """The first leaves for an error message, each with its path, its type and whether a mark holds it."""
        places, leaves = self.layout.leaves, self.leaves if leaves is None else leaves
        described = (
            " ".join(filter(None, [place.path, describe(leaf), "(held)" if place.mark >= 0 else ""]))
            for place, leaf in zip(places, leaves, strict=True)
        )
        return listed(described, len(places)) or "none"

    def is_free(self, leaf: int) -> bool:
        """Whether a leaf can be differentiated and no mark holds it."""
        return self.mark(leaf) < 0 and is_differentiable(self.leaves[leaf])

    def find(self, value: Any) -> "Place | Pick | None":
        """The place of a slot or node of this tree, or None; for a wrapper, the place of what it holds."""
        if value.__class__ is Slot:
            return self.layout.leaves[value._number] if value._owner is self else None
        if value.__class__ is ElementSlot:
            return Pick(self.layout.leaves[value._number], value.elements) if value._owner is self else None
        if value is None:
            return None
        place = self._places.get(id(value)) or self._find_copy(value)
        while place is not None and place.is_wrapper:
            below = self._places.get(id(place.value.value))
            if below is None and place.stop - place.start != 1:
                # Static data, or a wrapper around no leaf, or around several that are not one node.
                return place
            place = below or self.layout.leaves[place.start]
        return place

    def _find_copy(self, node: Any) -> Place | None:
        """The node that this one is a copy of: some classes rebuild what they hold on every access."""
        if isinstance(node, tuple) or type(node) in (list, dict) or not jax.tree_util.is_tree_node(type(node)):
            return None
        leaves = jax.tree.leaves(node)
        if not leaves or not all(isinstance(leaf, Slot) and leaf._owner is self for leaf in leaves):
            return None
        numbers = [leaf._number for leaf in leaves]
        same = [p for p in self.layout.places if numbers == list(range(p.start, p.stop)) and _is_copy(node, p.value)]
        return same[-1] if same else None


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
    children, structure = flatten_one_level(node)
    rebuilt = [_with_leaves(child, leaves) for _, child in children]
    names = [step.name if isinstance(step, jax.tree_util.GetAttrKey) else None for step, _ in children]
    if schema_of(node) is not None or not set(names) <= set(getattr(node, "__dict__", ())):
        return structure.unflatten(rebuilt)
    new = object.__new__(type(node))
    new.__dict__.update(node.__dict__)
    new.__dict__.update(zip(names, rebuilt, strict=True))
    return new


def _is_exact(data: Any) -> bool:
    """Whether auxiliary data that compares equal to this is the same in every respect."""
    if type(data) in (tuple, list):
        return all(map(_is_exact, data))
    return isinstance(data, str | type | types.FunctionType | Cover | Marks | StaticData | None)


# Not an OrderedDict, which would hash a treedef, slowly, at every step of an iteration.
_structures: dict[Any, Structure] = {}
_clock = itertools.count()


def structure_of(tree: Any, treedef: Any, exactly: bool = False) -> Structure:
    """The structure of a tree, kept from an earlier call unless that would keep an array alive.

    `exactly` requires static data of the same types too, because a callable reads it.
    """
    # It is not there, or its auxiliary data cannot be compared.
    with contextlib.suppress(Exception):
        found = _structures[treedef]
        if not exactly or found.typed is None or found.typed == typed_structure(treedef):
            found.used = next(_clock)
            return found
    new = Structure(tree, treedef)
    if not new.holds_arrays:
        # Another thread may be dropping the same one.
        with contextlib.suppress(Exception):
            _structures[treedef] = new
            # Leaves are summed up for large structures only: all small ones have at most `_LEAVES` together.
            if len(_structures) > _STRUCTURES or len(new.slots) > _LEAVES // _STRUCTURES:
                _drop_oldest()
    return new


def _drop_oldest() -> None:
    """Drop what was used longest ago, while there are too many structures or the older ones have too many leaves."""
    *older, _ = sorted(_structures.values(), key=lambda structure: structure.used)
    leaves = sum(len(structure.slots) for structure in older)
    for oldest in older:
        if len(_structures) <= _STRUCTURES and leaves <= _LEAVES:
            break
        del _structures[oldest.treedef]
        leaves -= len(oldest.slots)
