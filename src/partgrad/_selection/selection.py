"""What every selector is, and how selectors combine as sets of leaves and elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from .._marks import Place
from .._skeletons import Found, Match, Pick, Skeleton, keep
from .._trees import common, is_differentiable, shape_of, without
from ..errors import SelectorTypeError
from .choose import Rules, leaves_in, nothing_selected, selected_in
from .target import Target, items_of


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
    # Makes a selection of what a user writes: `as_selection`, set where it is defined, which knows all kinds.
    _read: ClassVar[Callable[[Any], Selection]]

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

    def _key(self) -> Any:
        """What is equal in equal selections of a class."""
        return id(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    @property
    def rules(self) -> Rules:
        """What else matters when its leaves are chosen."""
        return Rules(self.words)

    def __or__(self, other: Any) -> Selection:
        return _Union(self, Selection._read(other))

    def __ror__(self, other: Any) -> Selection:
        return _Union(Selection._read(other), self)

    def __and__(self, other: Any) -> Selection:
        return _Intersection(self, Selection._read(other))

    def __rand__(self, other: Any) -> Selection:
        return _Intersection(Selection._read(other), self)

    def __sub__(self, other: Any) -> Selection:
        return _Difference(self, Selection._read(other))

    def __rsub__(self, other: Any) -> Selection:
        return _Difference(Selection._read(other), self)

    def __invert__(self) -> Selection:
        return _Difference(EVERYTHING, self)


class _Pair(Selection):
    """A combination of two selections as sets of leaves and elements."""

    symbol = ""

    def __init__(self, first: Selection, second: Selection):
        self._first = first
        self._second = second
        self.is_fixed = first.is_fixed and second.is_fixed
        self.is_about_marks = first.is_about_marks or second.is_about_marks

    def _key(self) -> Any:
        return self._first, self._second

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
    return all(i in found and found[i] is None for i in place.numbers if skeleton.is_wanted(i))


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
        return f"partgrad.exclude({self._second!r})" if self._first is EVERYTHING else super().__repr__()

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
        return "EVERYTHING"

    @property
    def rules(self) -> Rules:
        """The caller refuses a tree without such leaves."""
        return Rules(self.words, is_wide=True, may_be_empty=True)

    def match(self, skeleton: Skeleton) -> Match:
        """These leaves."""
        pairs = zip(skeleton.layout.leaves, skeleton.leaves, strict=True)
        return Match(tuple(place for place, leaf in pairs if is_differentiable(leaf)))


EVERYTHING = _Everything()
