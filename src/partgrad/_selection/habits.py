"""What people write who know other libraries, read on the tree: what they mean, as the code of a selector.

Nothing here selects anything. It is asked when a selector has failed, and what it says was tried on the tree.
"""

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import FlattenedIndexKey, SequenceKey

from .._marks import Layout, Place
from .._message import at
from .._trees import accepts, dtype_of, is_differentiable, written
from ..errors import SelectionError, SlotError
from .callables import MISFITS
from .masks import bools_in, masked_places
from .patterns import elements_at, fits, name_of, parse
from .remedies import asked, code_for, code_of_value, joined, lambda_of, places_at, spelled
from .skeletons import Skeleton
from .slots import Seen


class Reading(NamedTuple):
    """What was meant: a sentence about what was typed, and the code of a selector; empty where none would be right."""

    detail: str
    code: str = ""

    @property
    def fix(self) -> str:
        """What to write."""
        return as_fix(self.code)


def as_fix(code: str) -> str:
    """The remedy that says to write a selector."""
    return "leave `wrt` out, for every floating or complex leaf." if code == "None" else f"write {code}."


# Names of the whole, which other libraries write before a path or in place of one.
_WHOLE = frozenset({"params", "parameters", "variables", "model", "module", "net", "self", "state", "all"})
# How a variable calls the array in it.
VALUES = frozenset({"value", "raw_value", "data"})
_SEPARATORS = re.compile(r"[\s./\\\[\]'\"]+")
# Pieces of a regular expression, and what a glob has for them.
_REGULAR = ((r"\\\.", "/"), (r"\(\?:|[()^$]|\\b", ""), (r"(?:\\[dw]|\[0-9\]|\[\^[^]]*\])[+*]?|\.[*+]\??", "*"))
_IS_REGULAR = re.compile(r"\\[.dw]|\.[*+]|^\^|\$$")
_NOT = re.compile(r"\s*(?:!|~|-|not\s)\s*")
_BRACES = re.compile(r"\{([^{}]*)\}|\(([^()]*\|[^()]*)\)|\[(\s*-?\d+(?:\s*,\s*-?\d+)+\s*)\]")


# --- text ------------------------------------------------------------------------------------------------------------


def meant_by_text(skeleton: Skeleton, text: str) -> Reading | None:
    """What a text means that is no path of partgrad, or none of this tree."""
    tokens = _tokens(text)
    if not tokens:
        return Reading("It is the path of a tree that is one leaf.", "None") if not text.strip() else None
    example = f"A path of this tree reads as {_example(skeleton)}."
    if _IS_REGULAR.search(text) and (code := _as_regular(skeleton, text)):
        return Reading(example, code)
    negated = _NOT.match(text)
    if negated and negated.end() < len(text):
        inner = _code(skeleton, text[negated.end() :])
        return Reading("A complement is written by a function.", f"partgrad.exclude({inner})") if inner else None
    alternatives = _alternatives(text)
    if len(alternatives) > 1:
        codes = [_code(skeleton, own) for own in alternatives]
        detail = "A text is one path; several are joined by `|`."
        return Reading(detail, joined(codes)) if all(codes) else None
    if code := _loosely(skeleton, tokens):
        return Reading(example, code)
    if len(tokens) == 1 and tokens[0] in _WHOLE:
        return Reading("A path starts at the tree itself, and nothing in it has that name.", "None")
    return None


def _example(skeleton: Skeleton) -> str:
    return at(skeleton.layout.leaves[0].path) if skeleton.layout.leaves else "`layers[0].weight`"


def _code(skeleton: Skeleton, text: str) -> str:
    text = text.strip()
    if places_at(skeleton, text) or (is_readable(text) and elements_at(skeleton, parse(text))[0]):
        return repr(text)
    found = meant_by_text(skeleton, text)
    return found.code if found else ""


def is_readable(text: str) -> bool:
    """Whether a text is a path or a glob as partgrad writes it."""
    try:
        return bool(parse(text))
    except SelectionError:
        return False


def _alternatives(text: str) -> list[str]:
    """The paths in a text of several: `a, b`, `a|b`, `x.{a,b}`, `layers[0,1].w`."""
    found = _BRACES.search(text)
    if found:
        inner = re.split(r"[,|]", next(group for group in found.groups() if group is not None))
        own = [f"[{part.strip()}]" for part in inner] if found[3] else [part.strip() for part in inner]
        return [more for part in own for more in _alternatives(text[: found.start()] + part + text[found.end() :])]
    parts = [] if re.search(r"['\"]", text) else [part for part in re.split(r"[,;|+&\s]+", text) if part]
    return parts if len(parts) > 1 else [text]


def as_pattern(text: str) -> str:
    """The names and indices of a path in another library's notation, as partgrad writes them."""
    return _pattern(_tokens(text))


def _tokens(text: str) -> list[str]:
    """The names and indices in a path, however they are set apart; the `~` of haiku says nothing."""
    return [token for token in _SEPARATORS.split(text) if token and token != "~"]


def _as_regular(skeleton: Skeleton, text: str) -> str:
    """The code for a regular expression that a glob can stand for."""
    for piece, replacement in _REGULAR:
        text = re.sub(piece, replacement, text)
    tokens = ["**" if token == "*" else token for token in _tokens(text)]
    return _loosely(skeleton, tokens) if tokens and set(tokens) != {"**"} else ""


def _loosely(skeleton: Skeleton, tokens: Sequence[str]) -> str:
    """The code for names and indices that lead to places, from the tree itself or from further down."""
    forms = [tokens, tokens[:-1]] if tokens[-1] in VALUES else [tokens]
    for own in [own for start in (0, 1) for form in forms if (own := form[start:])] + [["**", *tokens]]:
        places = list(_led_to(skeleton.layout, own))
        if own[-1] != tokens[-1]:
            # A variable holds one array.
            places = [place for place in places if place.stop - place.start == 1]
        if places:
            return code_for(skeleton, places, [_pattern(own)])
    return ""


def _pattern(tokens: Sequence[str]) -> str:
    """These names and indices as a pattern."""
    steps = (
        f"[{own}]" if re.fullmatch(r"-?\d+", own) else f".{own}" if re.fullmatch(r"[\w*]+", own) else f"[{own!r}]"
        for own in tokens
    )
    return "".join(steps).removeprefix(".")


def _led_to(layout: Layout, tokens: Sequence[str]) -> Iterator[Place]:
    """The places to which names and indices lead, where a key such as `mlp/~/linear_0` counts as several names.

    Each place is asked once for each name.
    """
    # A place, what is left of the names of its own step, and how many names of the text are used up.
    pending: list[tuple[Place, tuple[str, ...], int]] = [(layout.root, (), 0)]
    met = set(pending)
    while pending:
        place, own, used = pending.pop()
        if used == len(tokens):
            yield place
            continue
        token, further = tokens[used], []
        if token == "**":
            further.append((place, own, used + 1))
        step = 0 if token == "**" else 1
        if own and (token == "**" or fits(token, own[0])):
            further.append((place, own[1:], used + step))
        elif not own:
            children = layout.children(place)
            for child in children:
                for names in _names(child, len(children)):
                    if not names:
                        further.append((child, (), used))
                    elif token == "**" or fits(token, names[0]):
                        further.append((child, names[1:], used + step))
        for state in reversed(further):
            if state not in met:
                met.add(state)
                pending.append(state)


def _names(place: Place, siblings: int) -> list[tuple[str, ...]]:
    """What the step to a place may be called: by an index from either end, or by the names in a key."""
    step = place.step
    if step is None:
        return [()]
    if isinstance(step, SequenceKey | FlattenedIndexKey):
        index = step.idx if isinstance(step, SequenceKey) else step.key
        return [(str(index),), (str(index - siblings),)]
    name = name_of(step)
    return [tuple(_tokens(name)) or (name,)] if name is not None else [(written(getattr(step, "key", step)),)]


# --- functions -------------------------------------------------------------------------------------------------------


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
    found = []
    for i, place in enumerate(skeleton.layout.leaves):
        if place.mark >= 0 or not is_differentiable(skeleton.leaves[i]):
            continue
        given = question.given(place, Seen(skeleton, i))
        if not accepts(function, *given):
            return None
        answer = _answer(function, *given)
        if not isinstance(answer, bool | np.bool_):
            return None
        found += [i] * bool(answer)
    return found


def _answer(function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except (*MISFITS, SlotError, ValueError):
        # It is not about what it was given.
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
    nodes = [place for place in skeleton.nodes if isinstance(answer := _answer(function, place.value), bool) and answer]
    outermost = [place for place in nodes if not any(above in nodes for above in place.above)]
    if not outermost:
        return None
    detail = "It asks whether a node is meant; a callable returns what is meant."
    for cls in dict.fromkeys(cls for place in outermost for cls in type(place.value).__mro__[:-1]):
        of_class = [place for place in skeleton.nodes if isinstance(place.value, cls)]
        if set(of_class) == set(nodes) and (name := spelled(cls)):
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
        code = _code(skeleton, made)
        return Reading("It returns a text; a text is a selector itself.", code) if code else None
    leaves = jax.tree.leaves(made)
    if isinstance(made, bool) or not leaves:
        return None
    if all(type(leaf) is Seen for leaf in leaves):
        places = [skeleton.layout.leaves[leaf._number] for leaf in leaves]
        return Reading("It returns a new tree, and no part of the old one.", code_for(skeleton, places, free=True))
    if all(type(leaf) is str for leaf in leaves):
        return _labels(made)
    if not all(bools_in(made)):
        return None
    try:
        places = masked_places(Layout(made), leaves, skeleton)
    except SelectionError:
        return None
    return Reading(
        "It makes a mask; a mask is given itself, as a tree of bools.", code_for(skeleton, places, free=True)
    )


# --- what is neither -------------------------------------------------------------------------------------------------


def may_mean_a_part(wrt: Any) -> bool:
    """Whether what is no selector may mean a part of a tree, so that the error has to wait for one."""
    if isinstance(wrt, tuple | list | set | frozenset):
        is_one = lambda item: isinstance(item, str | int | re.Pattern) or _is_key(item) or _is_selector(item)
        if wrt and all(map(is_one, wrt)):
            return not all(isinstance(item, int) for item in wrt)
    if wrt is ... or isinstance(wrt, re.Pattern | np.dtype) or hasattr(wrt, "argnum"):
        return True
    return is_node(wrt) or any(map(_is_array, jax.tree.leaves(wrt)))


def _is_key(item: Any) -> bool:
    return isinstance(item, tuple(getattr(jax.tree_util, name) for name in _KEYS))


_KEYS = ("DictKey", "GetAttrKey", "SequenceKey", "FlattenedIndexKey")


def _is_selector(item: Any) -> bool:
    return isinstance(item, type) or hasattr(item, "takes_everything")


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def is_node(value: Any) -> bool:
    """Whether an object is a node of a tree with leaves, other than a plain container or a function."""
    plain = tuple | list | dict | jax.tree_util.Partial | None
    return not isinstance(value, plain) and jax.tree_util.is_tree_node(type(value)) and bool(jax.tree.leaves(value))


def meant_by_object(skeleton: Skeleton, wrt: Any) -> Reading | None:
    """What an object means that is no selector: a part of the tree, a path in another form, several selectors."""
    if isinstance(wrt, str):
        return meant_by_text(skeleton, wrt)
    if wrt is ...:
        return Reading("An ellipsis is no selector.", "None")
    if isinstance(wrt, re.Pattern):
        return _regular_expression(skeleton, wrt)
    if inspect.isclass(wrt) or isinstance(wrt, np.dtype):
        return _kind_of_leaves(skeleton, wrt)
    if any(map(_is_array, jax.tree.leaves(wrt))) or is_node(wrt):
        return _part(skeleton, wrt)
    if isinstance(wrt, tuple | list | set | frozenset):
        return _several(skeleton, wrt)
    return _of_filter(skeleton, wrt.filter) if hasattr(wrt, "filter") else None


def _regular_expression(skeleton: Skeleton, pattern: re.Pattern[Any]) -> Reading | None:
    paths = [place.path for place in skeleton.layout.leaves]
    detail = "A regular expression is for whole paths, as partgrad.items prints them."
    if any(map(pattern.fullmatch, paths)):
        return Reading(detail, f"partgrad.path({pattern!r})")
    if any(map(pattern.search, paths)):
        # Flags at its beginning are among its flags.
        inner = re.sub(r"^\(\?[aiLmsux]+\)", "", pattern.pattern)
        return Reading(detail, f"partgrad.path({re.compile(f'.*(?:{inner}).*', pattern.flags)!r})")
    code = _as_regular(skeleton, pattern.pattern)
    return Reading(detail, code) if code else None


def _several(skeleton: Skeleton, wrt: Any) -> Reading | None:
    items = list(wrt) if isinstance(wrt, tuple | list) else sorted(wrt, key=repr)
    if all(map(_is_key, items)):
        places = places_at(skeleton, jax.tree_util.keystr(tuple(items)))
        return Reading("A key path is written as text.", code_for(skeleton, places)) if places else None
    if isinstance(wrt, tuple) and all(isinstance(item, str | int) for item in items):
        tokens = [token for item in items for token in _tokens(str(item))]
        places = list(_led_to(skeleton.layout, tokens)) if len(items) > 1 else []
        code = code_for(skeleton, places, [_pattern(tokens)]) if places else ""
        if code:
            return Reading("A path is one text, not a tuple of its steps.", code)
    codes = [_code_of_item(skeleton, item) for item in items]
    if not all(codes):
        return None
    return Reading("A tuple of selectors is for several arguments, beside `argnums=(0, 1)`.", joined(map(str, codes)))


def _code_of_item(skeleton: Skeleton, item: Any) -> str:
    if isinstance(item, str):
        return _code(skeleton, item)
    if isinstance(item, type) and any(isinstance(place.value, item) for place in skeleton.nodes):
        name = spelled(item)
        return f"partgrad.of_type({name})" if name else ""
    if _is_selector(item) and not isinstance(item, type):
        code = repr(item)
        return "" if "<" in code else f"({code})" if " | " in code or " - " in code or " & " in code else code
    found = meant_by_object(skeleton, item)
    return found.code if found else ""


def _kind_of_leaves(skeleton: Skeleton, wrt: Any) -> Reading | None:
    """A class or a dtype of leaves."""
    free = [i for i, place in enumerate(skeleton.layout.leaves) if place.mark < 0]
    leaves = {i: skeleton.leaves[i] for i in free if is_differentiable(skeleton.leaves[i])}
    detail = "A class is that of a node; here it is that of a leaf."
    if isinstance(wrt, type):
        found = [i for i, leaf in leaves.items() if isinstance(leaf, wrt)]
        test = f"isinstance(leaf, {spelled(wrt)})" if spelled(wrt) else ""
    else:
        found, test = [], ""
    if not found and (dtype := _dtype(wrt)) is not None:
        found = [i for i, leaf in leaves.items() if dtype_of(leaf) == dtype]
        test = f"leaf.dtype == {dtype.name!r}"
    if not found:
        return None
    places = [skeleton.layout.leaves[i] for i in found]
    return Reading(
        detail, f"partgrad.matching(lambda path, leaf: {test})" if test else code_for(skeleton, places, free=True)
    )


def _dtype(wrt: Any) -> Any:
    try:
        return jax.numpy.dtype(wrt)
    except TypeError:
        return None


def _part(skeleton: Skeleton, wrt: Any) -> Reading | None:
    """A part of the tree itself, or a tree and a selector in each other's place."""
    root = skeleton.tree
    if isinstance(root, str):
        return Reading(f"The tree comes first, and then the selector: here the tree is the text {root!r:.60}.")
    ids = list(map(id, jax.tree.leaves(wrt)))
    own = list(map(id, skeleton.leaves))
    detail = "It is a part of a tree; a selector says where the part is."
    if ids == own:
        return Reading("It is the tree itself, which is an argument of the function and no selector.", "None")
    for place in reversed(skeleton.layout.places):
        if own[place.start : place.stop] == ids:
            return Reading(detail, code_for(skeleton, [place]))
    return Reading(detail)


def _of_filter(skeleton: Skeleton, inner: Any) -> Reading | None:
    """What says which argument and which leaves, as `nnx.DiffState` does."""
    detail = "Which argument is meant is said by `argnums=`, and which leaves by `wrt=`."
    if isinstance(inner, type) and any(isinstance(place.value, inner) for place in skeleton.nodes):
        return Reading(detail, name) if (name := spelled(inner)) else None
    found = meant_by_function(skeleton, inner) if callable(inner) else meant_by_object(skeleton, inner)
    return Reading(detail, found.code) if found else None


def labels_in(wrt: Any) -> Reading | None:
    """What a tree of labels means."""
    leaves = jax.tree.leaves(wrt)
    is_labelled = isinstance(wrt, dict) and leaves and all(isinstance(leaf, str) for leaf in leaves)
    return _labels(wrt) if is_labelled else None


def _labels(made: Any) -> Reading:
    groups: dict[str, list[str]] = {}
    for place in Layout(made).leaves:
        groups.setdefault(str(place.value), []).append(repr(_plain(place.path)))
    entries = ", ".join(f"{label!r}: {joined(p) if p[1:] else p[0]}" for label, p in groups.items())
    return Reading(
        f"It holds labels, as for the groups of an optimiser: partgrad.label(tree, {{{entries}}}).",
        joined(next(iter(groups.values()))),
    )


def _plain(path: str) -> str:
    return re.sub(r"\['([A-Za-z_]\w*)'\]", r".\1", path).removeprefix(".")


def merged(wrt: Any) -> Reading | None:
    """Several lambdas, as one that returns all their parts."""
    nodes = [lambda_of(item) for item in wrt] if isinstance(wrt, tuple | list) and wrt else []
    if not all(nodes) or len({ast.unparse(node.args) for node in nodes if node is not None}) != 1:
        return None
    bodies = ", ".join(ast.unparse(node.body) for node in nodes if node is not None)
    arguments = ast.unparse(nodes[0].args) if nodes[0] is not None else ""
    detail = "A tuple of selectors is for several arguments, beside `argnums=(0, 1)`."
    return Reading(detail, f"wrt=lambda {arguments}: ({bodies}{',' * (len(nodes) == 1)})")
