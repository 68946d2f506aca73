"""Selectors: what a user writes for `wrt=`.

A selector either names a part of a tree, and the gradient has the shape of that part, or describes leaves, and the
gradient is the tree with None elsewhere. On a skeleton it says which, with places: it returns a `Match`.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._marks import Layout, Place
from .._message import at, near_misses
from .._trees import common, is_differentiable, shape_of, without
from ..errors import NoMatchError, SelectionError, SelectorTypeError
from .advice import not_found, unreadable
from .callables import Misfit, match_of
from .choose import LEAF, Rules, leaves_in, nothing_selected, place_of, selected_in
from .habits import is_node, may_mean_a_part
from .intermediate import Intermediate
from .masks import bools_in, masked_places
from .misreadings import false_everywhere, fits_nowhere, no_node_of, no_path, not_a_selector, path_is_text
from .patterns import PatternStep, elements_at, matching_places, parse
from .plan import Found, Match, Pick
from .remedies import source_of
from .skeletons import Skeleton, keep
from .slots import Seen
from .target import Target, items_of

# What `wrt` accepts; a mask may be a tree of any class.
Selector: TypeAlias = Callable[[Any], Any] | object


class Selection:
    """A selector: `each`, `path`, `of_type`, `matching` and `exclude` return one, and every `wrt=` becomes one.

    Selections combine with each other and with any other selector: `a | b`, `a & b`, `a - b`, `~a`.

    Example:
        >>> import partgrad as pg
        >>> pg.path("layers[*].w") | "scale"
        partgrad.path('layers[*].w') | partgrad.path('scale')
        >>> (pg.path("layers[*].w") | "scale").paths({"layers": [{"w": 1.0}, {"w": 2.0}], "scale": 3.0})
        ["['layers'][0]['w']", "['layers'][1]['w']", "['scale']"]
    """

    # Whether its match depends only on the skeleton (and on shapes, if it takes elements). Then selections that
    # compare equal give equal matches.
    is_fixed: bool = True
    # Whether it is `None`, which must not ignore what only looks like a leaf.
    takes_everything = False
    # Whether it is about marks, so that reading it ignores none.
    is_about_marks = False
    # What it is called in an error.
    words: str

    def __new__(cls, *_: Any, **__: Any) -> Selection:
        """Refuse what is no selector of a kind."""
        if cls is Selection:
            raise SelectorTypeError(
                "`partgrad.Selection` is the class of selectors, and makes none.",
                "Expected one of the functions that do: each, path, of_type, matching, exclude.",
                fix="write partgrad.path('**') for every leaf, or another selector.",
            )
        return super().__new__(cls)

    def paths(self, tree: Any) -> list[str]:
        """The paths of what it selects in a tree, as `partgrad.items` lists them.

        Args:
            tree: Any pytree.

        Returns:
            One path for each leaf or element.

        Raises:
            SelectionError: If it does not fit the tree.
        """
        return [path for path, _ in items_of(Target(tree, self, purpose="edit"))]

    def __dir__(self) -> list[str]:
        return ["paths", *dir(object)]

    def match(self, skeleton: Skeleton) -> Match:
        """What it says about a skeleton; equal matches make equal plans."""
        raise NotImplementedError

    @property
    def rules(self) -> Rules:
        """What else matters when its leaves are chosen."""
        return Rules(self.words)

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


class _Pair(Selection):
    """A combination of two selections as sets of leaves and elements."""

    symbol = ""

    def __init__(self, first: Selection, second: Selection):
        self._first = first
        self._second = second
        self.is_fixed = first.is_fixed and second.is_fixed
        self.is_about_marks = first.is_about_marks or second.is_about_marks

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.symbol, self._first, self._second))

    @property
    def words(self) -> str:  # type: ignore[override]
        """Both sides, as they were combined."""
        return f"({self._first.words} {self.symbol} {self._second.words})"

    def __repr__(self) -> str:
        sides = (f"({side!r})" if isinstance(side, _Pair) else repr(side) for side in (self._first, self._second))
        return f" {self.symbol} ".join(sides)

    @property
    def rules(self) -> Rules:
        """It is empty if its sides are sets that do not go together."""
        # What is asked anew on every call is combined anew as well, or was for leaves of the same kinds.
        return Rules(self.words, self._why_empty(), is_wide=self.is_fixed)

    def match(self, skeleton: Skeleton) -> Match:
        """What both sides say, combined; kept for what a side said that is asked anew on every call."""
        if self.is_fixed:
            return self._combined(skeleton, self._first.match(skeleton), self._second.match(skeleton))
        free = tuple(map(is_differentiable, skeleton.leaves))
        asked = [side if side.is_fixed else side.match(skeleton) for side in (self._first, self._second)]
        found = skeleton.combined.get(key := (self.symbol, skeleton.purpose, free, *asked))
        if found is not None:
            return found
        first, second = (side.match(skeleton) if isinstance(side, Selection) else side for side in asked)
        found = self._combined(skeleton, first, second)
        # Which elements there are depends on shapes.
        has_elements = any(isinstance(pick, Pick) for pick in (*first.places, *second.places))
        return found if has_elements else keep(skeleton.combined, key, found)

    def _combined(self, skeleton: Skeleton, first: Match, second: Match) -> Match:
        # Marks count when both are compared: what is excluded need not be free.
        sides = [self._found(skeleton, *own) for own in ((self._first, first), (self._second, second))]
        combined = {i: own for i, own in self._set(skeleton, *sides).items() if own is None or own.size}
        nodes = [place for match in (first, second) for place in match.places if _is_inside(skeleton, place, combined)]
        leaves, slots = skeleton.layout.leaves, skeleton.slots
        places = [leaves[i] if own is None else Pick(leaves[i], own, slots[i].size) for i, own in combined.items()]
        return Match((*nodes, *places))

    def _found(self, skeleton: Skeleton, selection: Selection, match: Match) -> Found:
        found = leaves_in(skeleton, match, selection.rules.is_strict)
        if not found:
            raise nothing_selected(skeleton, [], Rules(selection.words))
        return found

    def _set(self, skeleton: Skeleton, first: Found, second: Found) -> Found:
        raise NotImplementedError

    def _why_empty(self) -> str:
        raise NotImplementedError


def _is_inside(skeleton: Skeleton, place: Place | Pick, found: Found) -> bool:
    """Whether a place is a node all of whose leaves were found."""
    if isinstance(place, Pick) or place.is_leaf:
        return False
    return all(i in found and found[i] is None for i in range(place.start, place.stop) if skeleton.is_wanted(i))


class _Union(_Pair):
    """What either side selects; what a side names is named."""

    symbol = "|"

    def _combined(self, skeleton: Skeleton, first: Match, second: Match) -> Match:
        named = [*first.named, *second.named]
        for selection, match in ((self._first, first), (self._second, second)):
            found = self._found(skeleton, selection, match)
            selected = selected_in(skeleton, match, found, selection.rules)
            if not selected and skeleton.purpose != "show":
                raise nothing_selected(skeleton, list(found), Rules(selection.words))
            # A side that is held altogether is read nevertheless.
            named += match.places if skeleton.purpose == "edit" and all(map(skeleton.is_held, selected)) else ()
        return Match((*first.places, *second.places), None, tuple(named))

    def _why_empty(self) -> str:
        return Rules("").reason


class _Intersection(_Pair):
    """What both sides select."""

    symbol = "&"

    def _set(self, skeleton: Skeleton, first: Found, second: Found) -> Found:
        return {i: common(own, second[i]) for i, own in first.items() if i in second}

    def _why_empty(self) -> str:
        return f"No leaf is selected both by {self._first.words} and by {self._second.words}."


class _Difference(_Pair):
    """What the first side selects and the second does not."""

    symbol = "-"

    @property
    def words(self) -> str:  # type: ignore[override]
        """A complement is written as one."""
        return f"~{self._second.words}" if isinstance(self._first, _Everything) else super().words

    def __repr__(self) -> str:
        return f"partgrad.exclude({self._second!r})" if self._first is _EVERYTHING else super().__repr__()

    def _set(self, skeleton: Skeleton, first: Found, second: Found) -> Found:
        sizes = {i: math.prod(shape_of(skeleton.leaves[i])) for i in first if second.get(i) is not None}
        return {i: without(own, second[i], sizes.get(i, 0)) if i in second else own for i, own in first.items()}

    def _why_empty(self) -> str:
        if isinstance(self._first, _Everything):
            return f"{self._second.words} selects every differentiable leaf, so nothing is left."
        return f"{self._second.words} selects all that {self._first.words} selects, so nothing is left."


class _Everything(Selection):
    """`wrt=None`: every differentiable leaf that no mark holds."""

    takes_everything = True
    words = "None"

    def __repr__(self) -> str:
        return self.words

    def __reduce__(self) -> str:
        # There is one.
        return "_EVERYTHING"

    @property
    def rules(self) -> Rules:
        """The caller refuses a tree without such leaves."""
        return Rules(self.words, is_wide=True, may_be_empty=True)

    def match(self, skeleton: Skeleton) -> Match:
        """These leaves."""
        pairs = zip(skeleton.layout.leaves, skeleton.leaves, strict=True)
        return Match(tuple(place for place, leaf in pairs if is_differentiable(leaf)))


class _Held(Selection):
    """A selector of every floating or complex leaf that a mark holds.

    It is for reading (`items`, `select`, `replace`, `mask`, `is_nondiff`, `summary`) and for `thaw`, alone or combined.
    It describes leaves, so a transform and `partition` refuse it: name the leaves, or thaw them first.

    Example:
        >>> import partgrad as pg
        >>> model = {"width": 1.0, "period": pg.NonDiff(2.0)}
        >>> pg.items(model, pg.held)
        [("['period']", 2.0)]
        >>> pg.thaw(model, pg.held)
        {'period': 2.0, 'width': 1.0}
    """

    is_about_marks = True
    words = "partgrad.held"

    def __repr__(self) -> str:
        return self.words

    @property
    def rules(self) -> Rules:
        """What is held depends on the tree alone."""
        return Rules(self.words, "No mark holds any floating or complex leaf.", is_wide=True)

    def match(self, skeleton: Skeleton) -> Match:
        """These leaves."""
        pairs = zip(skeleton.layout.leaves, skeleton.leaves, strict=True)
        return Match(tuple(place for place, leaf in pairs if place.is_held and is_differentiable(leaf)))


class CallableSelection(Selection):
    """A function from the tree to parts of it or, if it does not fit the root, from any node below."""

    is_fixed = False

    def __init__(self, function: Callable[[Any], Any], *, everywhere: bool = False):
        self._function = function
        self._everywhere = everywhere

    @property
    def words(self) -> str:  # type: ignore[override]
        """The function's name."""
        name = getattr(self._function, "__name__", type(self._function).__name__)
        name = "the lambda" if name == "<lambda>" else f"`{name}`"
        return f"each({name})" if self._everywhere else name

    def __repr__(self) -> str:
        text = _code(self._function)
        return f"partgrad.each({text})" if self._everywhere else text

    @property
    def rules(self) -> Rules:
        """What it returns was pointed at, so it must be differentiable."""
        return Rules(self.words if self._everywhere else "`wrt`", is_strict=True)

    def match(self, skeleton: Skeleton) -> Match:
        """What the function returns."""
        found = match_of(self._function, skeleton, everywhere=self._everywhere)
        if isinstance(found, Misfit):
            raise fits_nowhere(self._function, skeleton, found)
        return found


class _Made(Selection):
    """A selection that a function makes of one object, and that is equal to another of an equal object."""

    maker = "path"

    def __init__(self, of: Any):
        self._of = of
        self.words = repr(of)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._of == other._of

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return f"partgrad.{self.maker}({self.words})"


class Path(_Made):
    """A path or a glob."""

    def __reduce__(self) -> Any:
        return Path, (self._of,)

    def match(self, skeleton: Skeleton) -> Match:
        """The places that it leads to."""
        layout = skeleton.layout
        try:
            written = steps = self._steps(layout)
        except NoMatchError as error:
            raise unreadable(skeleton, self._of, error) from None
        places: list[Any] = matching_places(layout, steps)
        if not places:
            places, steps = elements_at(skeleton, steps)
        if not places:
            # As JAX writes it, a wrapper takes a step.
            places, steps = matching_places(layout, written, of_jax=True), written
        if not places:
            raise not_found(skeleton, self._of, written)
        if any(step.is_wild for step in steps):
            return Match(tuple(places))
        if len(places) > 1:
            one, other = map(place_of, places[:2])
            raise SelectionError(
                f"The path '{self._of}' names two leaves that differ only in the kind of a step.",
                f"Found {at(one.path)} and {at(other.path)}.",
                fix="use a callable, such as wrt=lambda m: m.the_part, which can tell them apart.",
            )
        return Match((places[0],), LEAF)

    def _steps(self, layout: Layout) -> Sequence[PatternStep]:
        # The path of a tree that is one leaf has no steps.
        return () if not self._of and all(place.is_leaf for place in matching_places(layout, ())) else parse(self._of)


class WholePath(_Made):
    """The leaves whose whole path a regular expression matches."""

    def match(self, skeleton: Skeleton) -> Match:
        """The leaves."""
        places = tuple(place for place in skeleton.layout.leaves if self._of.fullmatch(place.path))
        if not places:
            raise no_path(skeleton, self._of)
        return Match(places)


class OfType(_Made):
    """Every leaf in the nodes of a class."""

    maker = "of_type"

    def __init__(self, of: type):
        super().__init__(of)
        self.words = of.__name__

    def match(self, skeleton: Skeleton) -> Match:
        """The nodes of the class."""
        found = [place for place in skeleton.nodes if isinstance(place.value, self._of)]
        if not found:
            raise no_node_of(self._of, skeleton)
        return Match(tuple(found))


class _Mask(Selection):
    """A tree of bools, or a prefix of one."""

    words = "the mask"

    def __init__(self, tree: Any):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._chosen = tuple(map(bool, leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask) and self._chosen == other._chosen and self._treedef == other._treedef

    def __hash__(self) -> int:
        return hash((self._treedef, self._chosen))

    def __repr__(self) -> str:
        return repr(self._treedef.unflatten(self._chosen))

    def match(self, skeleton: Skeleton) -> Match:
        """The places under True."""
        if not any(self._chosen):
            raise nothing_selected(skeleton, [], Rules(self.words, "It is False everywhere."))
        mask = self._treedef.unflatten(self._chosen)
        try:
            return Match(tuple(masked_places(Layout(mask), self._chosen, skeleton)))
        except SelectionError:
            # A dict of masks of the tree is a dict of selectors.
            if type(mask) is not dict or any(isinstance(own, bool) for own in mask.values()):
                raise
            with contextlib.suppress(SelectionError):
                return Groups(mask).match(skeleton)
            raise


class Matching(Selection):
    """The free leaves for which a function of path and slot returns true."""

    is_fixed = False
    words = "matching(...)"

    def __init__(self, function: Callable[[str, Any], bool]):
        self._function = function

    def __repr__(self) -> str:
        return f"partgrad.matching({_code(self._function)})"

    def match(self, skeleton: Skeleton) -> Match:
        """The leaves for which it is true."""
        inexact = [i for i, leaf in enumerate(skeleton.leaves) if is_differentiable(leaf)]
        free = [i for i in inexact if not skeleton.is_held(i)]
        chosen = self._chosen(skeleton, free)
        if not chosen and skeleton.purpose in ("edit", "show"):
            # What is only read may be held.
            chosen = self._chosen(skeleton, [i for i in inexact if skeleton.is_held(i)])
        if not chosen:
            raise false_everywhere(self._function, skeleton, len(free))
        return Match(chosen)

    def _chosen(self, skeleton: Skeleton, asked: Sequence[int]) -> tuple[Place, ...]:
        places = skeleton.layout.leaves
        try:
            return tuple([places[i] for i in asked if self._function(places[i].path, Seen(skeleton, i))])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            error.add_note(path_is_text(self._function, skeleton))
            raise


class _Misread(Selection):
    """What is no selector, and may mean a part of the tree: the error says which."""

    is_fixed = False
    words = "`wrt`"

    def __init__(self, wrt: Any):
        self._wrt = wrt

    def __repr__(self) -> str:
        return repr(self._wrt)

    def match(self, skeleton: Skeleton) -> Match:
        """Raises the error."""
        raise not_a_selector(self._wrt, skeleton)


def _code(function: Any) -> str:
    """A function as code: the source of a lambda, or its name."""
    name = getattr(function, "__name__", None)
    return source_of(function) or (repr(function) if name in (None, "<lambda>") else str(name))


class Groups(Selection):
    """A dict of selectors: the gradient is a dict of their gradients."""

    def __init__(self, wrt: dict[str, Any]):
        self._wrt = wrt
        # In the order in which JAX takes a dict apart.
        self._selections = tuple(sorted((name, as_selection(own)) for name, own in wrt.items()))
        self.is_fixed = all(own.is_fixed for _, own in self._selections)
        self.words = f"{{{', '.join(f'{name!r}: {own.words}' for name, own in self._selections)}}}"

    def __repr__(self) -> str:
        return repr(dict(self._selections))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Groups) and self._selections == other._selections

    def __hash__(self) -> int:
        return hash(self._selections)

    def match(self, skeleton: Skeleton) -> Match:
        """What all of them say together, and each alone."""
        try:
            groups = tuple((name, own.rules, own.match(skeleton)) for name, own in self._selections)
        except NoMatchError:
            if self._are_labels(skeleton):
                raise not_a_selector(self._wrt) from None
            raise
        matches = [match for _, _, match in groups]
        places = tuple(place for match in matches for place in match.places)
        return Match(places, None, tuple(place for match in matches for place in match.named), groups)

    def _are_labels(self, skeleton: Skeleton) -> bool:
        """Whether the keys are paths of the tree, and the values words that are no paths of it, nor nearly."""
        words = self._wrt.values()
        if not all(isinstance(word, str) for word in (*self._wrt, *words)):
            return False
        paths = [*self._wrt, *(skeleton.path(i) for i in range(len(skeleton.leaves)))]
        is_path = lambda word: _names_a_place(word, skeleton)
        return all(map(is_path, self._wrt)) and not any(is_path(word) or near_misses(word, paths) for word in words)


def _names_a_place(path: str, skeleton: Skeleton) -> bool:
    try:
        return bool(Path(path).match(skeleton))
    except SelectionError:
        return False


_EVERYTHING = _Everything()
held: Selection = _Held()


def _refuse_unsortable(wrt: dict[Any, Any]) -> None:
    try:
        sorted(wrt)
    except TypeError:
        raise SelectorTypeError(
            f"The keys of the dict `wrt` cannot be sorted: {', '.join(map(repr, wrt))}.",
            "Expected keys of one kind, because JAX sorts the keys of a dict.",
            fix="write strings.",
        ) from None


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
            fix="give it as `wrt` of a transform, partgrad.grad(f, wrt=...), alone or in a dict with selectors of the "
            "first argument; partgrad.capture_intermediates(f) reads such values and partgrad.intervene(f, ...) "
            "replaces them.",
        )
    if type(wrt) is dict:
        _refuse_unsortable(wrt)
    # A function is no tree, and is asked on every call.
    bools = [] if isinstance(wrt, types.FunctionType) else bools_in(wrt)
    if bools and all(bools):
        return _Mask(wrt)
    if type(wrt) is dict and wrt and not any(isinstance(own, bool | np.bool_) for own in wrt.values()):
        return Groups(wrt)
    if callable(wrt) and not any(bools) and not is_node(wrt):
        return CallableSelection(wrt)
    if not any(bools) and may_mean_a_part(wrt):
        return _Misread(wrt)
    raise not_a_selector(wrt)
