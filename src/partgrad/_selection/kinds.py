"""The kinds of selectors: callables, paths, classes, masks, questions, dicts of them. Each says what it matches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._marks import Layout, Place
from .._message import at, near_misses
from .._skeletons import (
    LEAF,
    Match,
    Misfit,
    PatternStep,
    Seen,
    Skeleton,
    elements_at,
    masked_places,
    match_of,
    matching_places,
    parse,
    place_of,
)
from .._trees import is_differentiable
from ..errors import NoMatchError, SelectionError
from .choose import Rules, nothing_selected
from .selection import Selection


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
            from .._remedies import fits_nowhere

            raise fits_nowhere(self._function, skeleton, found)
        return found


class _Made(Selection):
    """A selection that a function makes of one object, and that is equal to another of an equal object."""

    maker = "path"

    def __init__(self, of: Any):
        self._of = of
        self.words = repr(of)

    def _key(self) -> Any:
        return self._of

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
            from .._remedies import unreadable

            raise unreadable(skeleton, self._of, error) from None
        places: list[Any] = matching_places(layout, steps)
        if not places:
            places, steps = elements_at(skeleton, steps)
        if not places:
            # As JAX writes it, a wrapper takes a step.
            places, steps = matching_places(layout, written, of_jax=True), written
        if not places:
            from .._remedies import not_found

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
            from .._remedies import no_path

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
            from .._remedies import no_node_of

            raise no_node_of(self._of, skeleton)
        return Match(tuple(found))


class Mask(Selection):
    """A tree of bools, or a prefix of one."""

    words = "the mask"

    def __init__(self, tree: Any):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._chosen = tuple(map(bool, leaves))

    def _key(self) -> Any:
        return self._chosen, self._treedef

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
            from .._remedies import false_everywhere

            raise false_everywhere(self._function, skeleton, len(free))
        return Match(chosen)

    def _chosen(self, skeleton: Skeleton, asked: Sequence[int]) -> tuple[Place, ...]:
        places = skeleton.layout.leaves
        try:
            return tuple([places[i] for i in asked if self._function(places[i].path, Seen(skeleton, i))])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            from .._remedies import path_is_text

            error.add_note(path_is_text(self._function, skeleton))
            raise


class Misread(Selection):
    """What is no selector, and may mean a part of the tree: the error says which."""

    is_fixed = False
    words = "`wrt`"

    def __init__(self, wrt: Any):
        self._wrt = wrt

    def __repr__(self) -> str:
        return repr(self._wrt)

    def match(self, skeleton: Skeleton) -> Match:
        """Raises the error."""
        from .._remedies import not_a_selector

        raise not_a_selector(self._wrt, skeleton)


def _code(function: Any) -> str:
    """A function as code: the source of a lambda, or its name."""
    from .._remedies import source_of

    name = getattr(function, "__name__", None)
    return source_of(function) or (repr(function) if name in (None, "<lambda>") else str(name))


class Groups(Selection):
    """A dict of selectors: the gradient is a dict of their gradients."""

    def __init__(self, wrt: dict[str, Any]):
        self._wrt = wrt
        # In the order in which JAX takes a dict apart.
        self._selections = tuple(sorted((name, Selection._read(own)) for name, own in wrt.items()))
        self.is_fixed = all(own.is_fixed for _, own in self._selections)
        self.words = f"{{{', '.join(f'{name!r}: {own.words}' for name, own in self._selections)}}}"

    def __repr__(self) -> str:
        return repr(dict(self._selections))

    def _key(self) -> Any:
        return self._selections

    def match(self, skeleton: Skeleton) -> Match:
        """What all of them say together, and each alone."""
        try:
            groups = tuple((name, own.rules, own.match(skeleton)) for name, own in self._selections)
        except NoMatchError:
            if self._are_labels(skeleton):
                from .._remedies import not_a_selector

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


held: Selection = _Held()
