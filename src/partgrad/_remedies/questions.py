"""Functions that ask about leaves or nodes, or make masks, as other libraries take them: what they mean on a tree."""

import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._marks import Layout, Place
from .._skeletons import MISFITS, Seen, Skeleton, bools_in, masked_places, name_of
from .._trees import accepts, is_differentiable
from ..errors import SelectionError, SlotError
from .code import asked, code_for, code_of_value, joined, spelled
from .notations import Reading, code_of_text


class _Question(NamedTuple):
    """How a library asks a function about a leaf.

    Attributes:
        what: What it gives the function.
        given: The arguments, from a place and what stands for the leaf.
        ours: The same in the words of `matching`: `path` and `leaf`; None where these are something else.
    """

    what: str
    given: Callable[[Place, Any], tuple[Any, ...]]
    ours: tuple[str, ...] | None = None


def _keys(place: Place) -> tuple[str | int, ...]:
    steps = [getattr(step, "idx", None) if name_of(step) is None else name_of(step) for step in place.steps]
    return tuple(step for step in steps if step is not None)


def _variable(place: Place, leaf: Any) -> Any:
    """What holds a leaf alone, as a variable does."""
    parent = place.parent
    return parent.value if parent is not None and parent.stop - parent.start == 1 else leaf


def _dotted(place: Place) -> str:
    return ".".join(map(str, _keys(place)))


_TEXT_AND_LEAF = _Question("the path, as text, and the leaf", lambda p, leaf: (p.path, leaf), ("path", "leaf"))
_QUESTIONS = (
    _Question("a leaf", lambda p, leaf: (leaf,), ("leaf",)),
    _Question("a path, as text", lambda p, leaf: (p.path,), ("path",)),
    _Question("a name with dots", lambda p, leaf: (_dotted(p),)),
    _Question("a name with slashes", lambda p, leaf: ("/".join(map(str, _keys(p))),)),
    _Question("a tuple of names", lambda p, leaf: (_keys(p),)),
    _Question("a key path", lambda p, leaf: (tuple(p.steps),)),
    _TEXT_AND_LEAF,
    _Question("a tuple of names and the leaf", lambda p, leaf: (_keys(p), leaf)),
    _Question("a tuple of names and the variable", lambda p, leaf: (_keys(p)[:-1], _variable(p, leaf))),
    _Question("a name with dots and the leaf", lambda p, leaf: (_dotted(p), leaf)),
    _Question("a name with slashes and the leaf", lambda p, leaf: ("/".join(map(str, _keys(p))), leaf)),
    _Question("a key path and the leaf", lambda p, leaf: (tuple(p.steps), leaf)),
    _Question(
        "a module's name, a name and the leaf",
        lambda p, leaf: ("/".join(map(str, _keys(p)[:-1])), str(_keys(p)[-1]) if p.steps else "", leaf),
    ),
)


def meant_by_function(skeleton: Skeleton, function: Callable[..., Any]) -> Reading | None:
    """What a function means that is no callable on the tree: a question about leaves or nodes, or what makes a mask."""
    answered = {question: _answers(skeleton, function, question) for question in _QUESTIONS}
    found = _question_of_leaves(skeleton, function, {question: own for question, own in answered.items() if own})
    found = found or _question_of_nodes(skeleton, function) or _makes(skeleton, function)
    if found is None and any(own is not None for own in answered.values()):
        return Reading(f"It asks about a leaf, and {spelled(function) or 'the function'} is false of every leaf.")
    return found


def _answers(skeleton: Skeleton, function: Callable[..., Any], question: _Question) -> list[int] | None:
    """The free leaves of which a function says that they are meant; None if it does not answer such a question."""
    leaves = skeleton.layout.leaves
    free = [i for i, place in enumerate(leaves) if not place.is_held and is_differentiable(skeleton.leaves[i])]
    if not free or not accepts(function, *question.given(leaves[free[0]], None)):
        return None
    found = []
    for i in free:
        answer = _answer(function, *question.given(leaves[i], Seen(skeleton, i)))
        if not isinstance(answer, bool | np.bool_):
            return None
        found += [i] * bool(answer)
    return found


def _answer(function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except (*MISFITS, SlotError, ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
        # It was a guess what the function is about.
        return None


def _question_of_leaves(
    skeleton: Skeleton, function: Callable[..., Any], answered: dict[_Question, list[int]]
) -> Reading | None:
    is_plain = isinstance(function, types.FunctionType | types.BuiltinFunctionType)
    # A filter object is asked as its library asks it, and may answer another question too.
    order = sorted(answered, key=lambda question: question.ours is not None and not is_plain)
    if not order:
        return None
    chosen, numbers = order[0], answered[order[0]]
    places = [skeleton.layout.leaves[i] for i in numbers]
    detail = f"It asks about {chosen.what}, and is given the tree and its nodes."
    ours = next((question for question, own in answered.items() if question.ours is not None and own == numbers), None)
    if ours is not None and ours.ours is not None:
        own = code_of_value(function) if ours is _TEXT_AND_LEAF else asked(function, ours.ours)
        if own is not None:
            return Reading(detail, f"partgrad.matching({own})")
        detail += " partgrad.matching asks such functions."
    return Reading(detail, code_for(skeleton, places, free=True))


def _question_of_nodes(skeleton: Skeleton, function: Callable[..., Any]) -> Reading | None:
    """A question about nodes, such as `isinstance(node, Linear)`: the class of those of which it is true, or they."""
    if not accepts(function, None):
        return None
    answers = [_answer(function, place.value) for place in skeleton.nodes]
    nodes = {place for place, answer in zip(skeleton.nodes, answers, strict=True) if answer is True}
    # What only some nodes can answer is a question about what they hold.
    if not nodes or not all(isinstance(answer, bool) for answer in answers):
        return None
    outermost = [place for place in skeleton.nodes if place in nodes and nodes.isdisjoint(place.above)]
    detail = "It asks whether a node is meant; a callable returns what is meant."
    for cls in dict.fromkeys(cls for place in outermost for cls in type(place.value).__mro__[:-1]):
        of_class = {place for place in skeleton.nodes if isinstance(place.value, cls)}
        if of_class == nodes and (name := spelled(cls)):
            return Reading(detail, name)
    return Reading(detail, code_for(skeleton, outermost, free=True))


def _makes(skeleton: Skeleton, function: Callable[..., Any]) -> Reading | None:
    """A function that makes a mask of the tree, labels, or a tree without what is not meant."""
    if not accepts(function, None):
        return None
    made = _answer(
        lambda root: function(jax.tree.map(lambda slot: Seen(skeleton, slot._number), root)), skeleton.layout.root.value
    )
    if isinstance(made, str):
        code = code_of_text(skeleton, made)
        return Reading("It returns a text; a text is a selector itself.", code) if code else None
    leaves = jax.tree.leaves(made)
    if isinstance(made, bool) or not leaves:
        return None
    if all(type(leaf) is Seen for leaf in leaves):
        places = [skeleton.layout.leaves[leaf._number] for leaf in leaves]
        return Reading("It returns a new tree, and no part of the old one.", code_for(skeleton, places, free=True))
    if all(type(leaf) is str for leaf in leaves):
        return labels_of(made)
    if not all(bools_in(made)):
        return None
    try:
        places = masked_places(Layout(made), leaves, skeleton)
    except SelectionError:
        return None
    return Reading(
        "It makes a mask; a mask is given itself, as a tree of bools.", code_for(skeleton, places, free=True)
    )


def labels_in(wrt: Any) -> Reading | None:
    """What a tree of labels means."""
    leaves = jax.tree.leaves(wrt)
    is_labelled = isinstance(wrt, dict) and leaves and all(isinstance(leaf, str) for leaf in leaves)
    return labels_of(wrt) if is_labelled else None


def labels_of(made: Any) -> Reading:
    """How labels are written."""
    groups: dict[str, list[str]] = {}
    for place in Layout(made).leaves:
        groups.setdefault(str(place.value), []).append(repr(_plain(place.path)))
    entries = ", ".join(f"{label!r}: {joined(p) if p[1:] else p[0]}" for label, p in groups.items())
    detail = "It holds labels, as for the groups of an optimiser; a selector says which leaves have one of them."
    return Reading(detail, f"partgrad.label(tree, {{{entries}}})")


def _plain(path: str) -> str:
    return re.sub(r"\['([A-Za-z_]\w*)'\]", r".\1", path).removeprefix(".")
