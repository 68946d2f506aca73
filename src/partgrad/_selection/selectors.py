"""Selectors: what a user writes for `wrt=`.

A selector either names a part of a tree, and the gradient has the shape of that part, or describes leaves, and the
gradient is the tree with None elsewhere. It answers for a structure with places; `choose` turns these into a plan.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

from .._marks import Layout, Place, refuse_forgotten
from .._message import at, listed
from .._trees import common, is_differentiable, joined, shape_of, without
from ..errors import NoMatchError, SelectionError, SelectorTypeError
from .callables import answer_of
from .choose import (
    LEAF,
    NOTHING_DIFFERENTIABLE,
    Found,
    Purpose,
    choose_described,
    choose_named,
    leaves_of,
    nothing_selected,
    refuse_twice,
    refuse_undifferentiable,
)
from .intermediate import Intermediate
from .masks import masked_places
from .patterns import elements_at, is_exact, matching_places, not_found, parse
from .plans import Plan
from .slots import Pick, Structure

# What `wrt` accepts; a mask may be a tree of any class.
Selector: TypeAlias = Callable[[Any], Any] | object


class Selection:
    """A selector: `each`, `path`, `of_type`, `matching` and `exclude` return one, and every `wrt=` becomes one.

    Selections combine with each other and with any other selector: `a | b`, `a & b`, `a - b`, `~a`.
    """

    # Whether its answer depends only on the structure (and on shapes, if it takes elements). Then selections that
    # compare equal give equal answers.
    is_fixed: bool = True
    # Whether it is `None`, which must not ignore what only looks like a leaf.
    takes_everything = False

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        """What it says about a structure: places, and for a named part the containers around them.

        Returns:
            Something hashable; equal answers make equal plans. Here a pair: for a named part of a tuple of places and
            the structure of the containers, for described leaves of a tuple of tuples of places and None.
        """
        raise NotImplementedError

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        """The leaves that an answer concerns, marks aside."""
        places, containers = answer
        if containers is not None:
            places = (places,)
        for several in places:
            for pick in several:
                place = pick.place if isinstance(pick, Pick) else pick
                refuse_undifferentiable(structure, place, purpose)
            whole = [place for place in several if isinstance(place, Place)]
            numbers = [i for place in whole for i in range(place.start, place.stop)]
            refuse_twice(structure, [i for i in numbers if purpose == "marks" or structure.is_free(i)])
        return leaves_of(structure, [place for several in places for place in several], purpose)

    def plan(self, structure: Structure, answer: Any, purpose: Purpose) -> Plan:
        """The plan for an answer."""
        places, containers = answer
        if containers is not None:
            return choose_named(structure, places, containers, repr(self), purpose)
        found = self.found(structure, answer, purpose)
        # Whether a leaf has these elements depends on its shape.
        has_elements = any(isinstance(pick, Pick) for several in places for pick in several)
        considered = range(len(structure.leaves)) if has_elements else _numbers(places)
        return choose_described(structure, found, repr(self), purpose, considered)

    def __or__(self, other: Any) -> Selection:
        return _Union(self, as_selection(other))

    def __ror__(self, other: Any) -> Selection:
        return _Union(as_selection(other), self)

    def __and__(self, other: Any) -> Selection:
        return _Intersection(self, as_selection(other))

    def __rand__(self, other: Any) -> Selection:
        return _Intersection(as_selection(other), self)

    def __sub__(self, other: Any) -> Selection:
        return _Difference(self, as_selection(other))

    def __rsub__(self, other: Any) -> Selection:
        return _Difference(as_selection(other), self)

    def __invert__(self) -> Selection:
        return _Difference(_EVERYTHING, self)


def _numbers(places: Iterable[Iterable[Place]]) -> list[int]:
    return sorted({i for several in places for place in several for i in range(place.start, place.stop)})


class _Pair(Selection):
    """A combination of two selections, which always describes leaves."""

    symbol = ""

    def __init__(self, first: Selection, second: Selection):
        self._first = first
        self._second = second
        self.is_fixed = first.is_fixed and second.is_fixed

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.symbol, self._first, self._second))

    def __repr__(self) -> str:
        return f"({_in_words(self._first)} {self.symbol} {_in_words(self._second)})"

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        return self.symbol, self._first.answer(structure, purpose), self._second.answer(structure, purpose)

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        # Marks count when both are compared: what is excluded need not be free.
        sides = []
        for selection, own in zip((self._first, self._second), answer[1:], strict=True):
            sides.append(selection.found(structure, own, purpose))
            if not sides[-1]:
                raise nothing_selected(structure, [], repr(selection))
        combined = self._combined(structure, sides[0], sides[1], purpose)
        return {i: own for i, own in combined.items() if own is None or own.size}

    def plan(self, structure: Structure, answer: Any, purpose: Purpose) -> Plan:
        found = self.found(structure, answer, purpose)
        everything = range(len(structure.leaves))
        return choose_described(structure, found, repr(self), purpose, everything, self._why_empty())

    def _why_empty(self) -> str:
        return NOTHING_DIFFERENTIABLE

    def _combined(self, structure: Structure, first: Found, second: Found, purpose: Purpose) -> Found:
        raise NotImplementedError


class _Union(_Pair):
    symbol = "|"

    def _combined(self, structure: Structure, first: Found, second: Found, purpose: Purpose) -> Found:
        both = [i for i in first if i in second and (purpose == "marks" or structure.is_free(i))]
        refuse_twice(structure, [*both, *both], [*(first[i] for i in both), *(second[i] for i in both)])
        return first | second | {i: joined([first[i], second[i]]) for i in both}

    def plan(self, structure: Structure, answer: Any, purpose: Purpose) -> Plan:
        for selection, own in zip((self._first, self._second), answer[1:], strict=True):
            leaves = list(selection.found(structure, own, purpose))
            if leaves and purpose != "marks" and all(structure.mark(i) >= 0 for i in leaves):
                raise nothing_selected(structure, leaves, repr(selection))
        return super().plan(structure, answer, purpose)


class _Intersection(_Pair):
    symbol = "&"

    def _combined(self, structure: Structure, first: Found, second: Found, purpose: Purpose) -> Found:
        return {i: common(own, second[i]) for i, own in first.items() if i in second}

    def _why_empty(self) -> str:
        return f"No leaf is selected both by {_in_words(self._first)} and by {_in_words(self._second)}."


class _Difference(_Pair):
    symbol = "-"

    def __repr__(self) -> str:
        return f"~{_in_words(self._second)}" if self._first is _EVERYTHING else super().__repr__()

    def _combined(self, structure: Structure, first: Found, second: Found, purpose: Purpose) -> Found:
        sizes = {i: math.prod(shape_of(structure.leaves[i])) for i in first if second.get(i) is not None}
        return {i: without(own, second[i], sizes.get(i, 0)) if i in second else own for i, own in first.items()}

    def _why_empty(self) -> str:
        if self._first is _EVERYTHING:
            return f"{_in_words(self._second)} selects every differentiable leaf, so nothing is left."
        return f"{_in_words(self._second)} selects all that {_in_words(self._first)} selects, so nothing is left."


class _Everything(Selection):
    """`wrt=None`: every differentiable leaf that no mark holds."""

    takes_everything = True

    def __repr__(self) -> str:
        return "None"

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        return None

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        return {i: None for i, leaf in enumerate(structure.leaves) if is_differentiable(leaf)}

    def plan(self, structure: Structure, answer: Any, purpose: Purpose) -> Plan:
        refuse_forgotten(structure.leaves, structure.path)
        found = self.found(structure, answer, purpose)
        # The caller refuses a tree without such leaves.
        selected = [i for i in found if purpose == "marks" or structure.mark(i) < 0]
        return Plan(structure, selected, considered=range(len(structure.leaves)))


class CallableSelection(Selection):
    """A function from the tree to parts of it or, if it does not fit the root, from any node below."""

    is_fixed = False

    def __init__(self, function: Callable[[Any], Any], *, everywhere: bool = False):
        self._function = function
        self._everywhere = everywhere

    def __repr__(self) -> str:
        return _in_words(self) if self._everywhere else "`wrt`"

    @property
    def words(self) -> str:
        """What it is called in an error about a combination of selections."""
        name = getattr(self._function, "__name__", type(self._function).__name__)
        name = "the lambda" if name == "<lambda>" else f"`{name}`"
        return f"each({name})" if self._everywhere else name

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        return answer_of(self._function, structure, everywhere=self._everywhere)


class Path(Selection):
    """A path or a glob."""

    def __init__(self, pattern: str):
        self._pattern = pattern
        self._steps = parse(pattern)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path) and self._pattern == other._pattern

    def __hash__(self) -> int:
        return hash(self._pattern)

    def __repr__(self) -> str:
        return repr(self._pattern)

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        places: list[Any] = matching_places(structure.layout, self._steps) or elements_at(structure, self._steps)
        if not places:
            raise not_found(structure, self._pattern, self._steps)
        if not is_exact(self._steps):
            return tuple((place,) for place in places), None
        if len(places) > 1:
            one, other = (place.place if isinstance(place, Pick) else place for place in places[:2])
            raise SelectionError(
                f"The path '{self._pattern}' names two leaves that differ only in the kind of a step.",
                f"Found {at(one.path)} and {at(other.path)}.",
                fix="use a callable, such as wrt=lambda m: m.the_part, which can tell them apart.",
            )
        return (places[0],), LEAF

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        places, containers = answer
        if containers is not None:
            return super().found(structure, answer, purpose)
        flat = [place for several in places for place in several]
        leaves = [place for place in flat if isinstance(place, Place)]
        if len(leaves) == len(flat) and all(
            place.is_leaf and not is_differentiable(structure.leaves[place.start]) for place in leaves
        ):
            refuse_undifferentiable(structure, leaves[0], purpose)
        return leaves_of(structure, flat, purpose)


class OfType(Selection):
    """Every leaf in the nodes of a class."""

    def __init__(self, cls: type):
        self._cls = cls

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfType) and self._cls is other._cls

    def __hash__(self) -> int:
        return hash(self._cls)

    def __repr__(self) -> str:
        return self._cls.__name__

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        found = [place for place in structure.nodes if isinstance(place.value, self._cls)]
        if not found:
            refuse_forgotten(structure.leaves, structure.path)
            are_leaves = any(isinstance(leaf, self._cls) for leaf in structure.leaves)
            raise self._not_there(dict.fromkeys(type(place.value) for place in structure.nodes), are_leaves)
        return tuple((place,) for place in found), None

    def _not_there(self, present: Iterable[type], are_leaves: bool) -> NoMatchError:
        name, classes = self._cls.__name__, list(present)
        details = [f"Classes of its nodes: {listed(cls.__name__ for cls in classes) or 'none'}."]
        fix = "use one of these, or select the leaves by a path or a callable."
        if are_leaves:
            details.append("A class is that of a node; here it is that of a leaf.")
            fix = "write partgrad.matching(lambda path, leaf: ...), which is asked about every leaf."
        if any(
            cls.__qualname__ == self._cls.__qualname__ and cls.__module__ == self._cls.__module__ for cls in classes
        ):
            details = [f"It has nodes of another class `{name}`: the class was defined anew after the tree was built."]
            fix = f"build the tree again, with the new `{name}`."
        return NoMatchError(f"The class {name} selects nothing: the tree has no node of it.", *details, fix=fix)


class _Mask(Selection):
    """A tree of bools, or a prefix of one."""

    def __init__(self, tree: Any):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._chosen = tuple(map(bool, leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask) and self._chosen == other._chosen and self._treedef == other._treedef

    def __hash__(self) -> int:
        return hash((self._treedef, self._chosen))

    def __repr__(self) -> str:
        return "the mask"

    def answer(self, structure: Structure, purpose: Purpose) -> Any:
        if not any(self._chosen):
            raise nothing_selected(structure, [], repr(self), reason="It is False everywhere.")
        layout = Layout(self._treedef.unflatten(self._chosen))
        return tuple((place,) for place in masked_places(layout, self._chosen, structure)), None

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        return leaves_of(structure, [place for several in answer[0] for place in several], purpose)


class Matching(Selection):
    """The free leaves for which a function of path and slot returns true."""

    is_fixed = False

    def __init__(self, function: Callable[[str, Any], bool]):
        self._function = function

    def __repr__(self) -> str:
        return "matching(...)"

    def answer(self, structure: Structure, purpose: Purpose) -> Hashable:
        numbers = [i for i, leaf in enumerate(structure.leaves) if is_differentiable(leaf)]
        asked = numbers if purpose == "marks" else [i for i in numbers if structure.mark(i) < 0]
        slots = structure.slots
        chosen = tuple([i for i in asked if self._function(slots[i].path, slots[i])])
        if not chosen:
            reason = f"The function is false for all of the {len(asked)} leaves that it was asked about."
            raise nothing_selected(structure, [], repr(self), reason=reason)
        return chosen

    def found(self, structure: Structure, answer: Any, purpose: Purpose) -> Found:
        return dict.fromkeys(answer)

    def plan(self, structure: Structure, answer: Any, purpose: Purpose) -> Plan:
        return Plan(structure, answer, considered=range(len(structure.leaves)))


_EVERYTHING = _Everything()


def _in_words(selection: Selection) -> str:
    return selection.words if isinstance(selection, CallableSelection) else repr(selection)


def as_selection(wrt: Any) -> Selection:
    """Turn what the user passed as `wrt` into a selection."""
    if wrt is None:
        return _EVERYTHING
    if isinstance(wrt, Selection):
        return wrt
    if isinstance(wrt, str):
        return Path(wrt)
    if isinstance(wrt, type):
        return OfType(wrt)
    if isinstance(wrt, Intermediate):
        raise SelectorTypeError(
            f"{wrt!r} is a value inside a function.",
            "Expected leaves of a tree, which a value inside a function is not.",
            fix="give it alone as `wrt` of a transform, partgrad.grad(f, wrt=...); partgrad.capture_intermediates(f) "
            "reads such values and partgrad.intervene(f, ...) replaces them.",
        )
    # A function is no tree, and is asked on every call.
    bools = [] if isinstance(wrt, types.FunctionType) else _bools(wrt)
    if bools and all(bools):
        return _Mask(wrt)
    if callable(wrt) and not any(bools):
        return CallableSelection(wrt)
    raise _not_a_selector(wrt)


def _bools(tree: Any) -> list[bool]:
    """Whether each leaf is a bool."""
    return [isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(tree)]


def _not_a_selector(wrt: Any) -> SelectorTypeError:
    """The error for what is not a selector."""
    bools = _bools(wrt)
    details = [
        "Expected a callable on the tree, a path such as 'kernels[0].variance', a class, a tree of bools, a "
        "`Selection`, or None."
    ]
    fix = "write wrt=lambda m: m.the_part, or wrt='the_part'."
    is_number = lambda item: isinstance(item, int) and not isinstance(item, bool)
    if is_number(wrt) or (isinstance(wrt, tuple) and wrt and all(map(is_number, wrt))):
        details = ["Which arguments are differentiated is said by keyword."]
        fix = f"write argnums={wrt!r}."
    elif any(bools) and not isinstance(wrt, tuple):
        path, leaf = next(
            (p.path, p.value) for p, is_bool in zip(Layout(wrt).leaves, bools, strict=True) if not is_bool
        )
        details = [f"It holds bools, as a mask does, and {type(leaf).__name__} {leaf!r:.40} at {at(path)}."]
        fix = "make every leaf of the mask True or False."
    elif isinstance(wrt, types.UnionType) and all(cls is not type(None) for cls in wrt.__args__):
        first, *others = (cls.__name__ for cls in wrt.__args__)
        details = ["Python makes a type of two classes with `|` between them."]
        fix = f"write {' | '.join([f'partgrad.of_type({first})', *others])}."
    elif isinstance(wrt, tuple | list):
        details = ["A tuple of selectors is for several arguments, beside `argnums=(0, 1)`."]
        fix = "return the parts from one callable: wrt=lambda m: (m.a, m.b)."
        if wrt and all(isinstance(item, str) for item in wrt):
            fix = f"join the paths: {' | '.join(f'partgrad.path({item!r})' for item in wrt)}."
    what = f"`wrt` is {type(wrt).__name__} {wrt!r:.80}, which is not a selector."
    return SelectorTypeError(what, *details, fix=fix)
