"""Objects that are no selectors and mean a part of a tree: parts of it, key paths, lists, expressions, dtypes."""

import ast
import inspect
import re
from typing import Any

import jax
import numpy as np

from .._skeletons import Skeleton
from .._trees import dtype_of, is_differentiable, is_node
from .code import code_for, joined, lambda_of, places_at, spelled
from .notations import Reading, as_glob, code_of_text, led_to, meant_by_text, pattern_of, tokens_of
from .questions import meant_by_function


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
    code = as_glob(skeleton, pattern.pattern)
    return Reading(detail, code) if code else None


def _several(skeleton: Skeleton, wrt: Any) -> Reading | None:
    items = list(wrt) if isinstance(wrt, tuple | list) else sorted(wrt, key=repr)
    if all(map(_is_key, items)):
        places = places_at(skeleton, jax.tree_util.keystr(tuple(items)))
        return Reading("A key path is written as text.", code_for(skeleton, places)) if places else None
    if isinstance(wrt, tuple) and all(isinstance(item, str | int) for item in items):
        tokens = [token for item in items for token in tokens_of(str(item))]
        places = list(led_to(skeleton.layout, tokens)) if len(items) > 1 else []
        code = code_for(skeleton, places, [pattern_of(tokens)]) if places else ""
        if code:
            return Reading("A path is one text, not a tuple of its steps.", code)
    codes = [_code_of_item(skeleton, item) for item in items]
    if not all(codes):
        return None
    return Reading("A tuple of selectors is for several arguments, beside `argnums=(0, 1)`.", joined(map(str, codes)))


def _code_of_item(skeleton: Skeleton, item: Any) -> str:
    if isinstance(item, str):
        return code_of_text(skeleton, item)
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
    free = [i for i, place in enumerate(skeleton.layout.leaves) if not place.is_held]
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
        detail = "The tree comes first, and then the selector; here the tree is a text."
        return Reading(detail, f"the tree first and {root!r:.60} second")
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


def merged(wrt: Any) -> Reading | None:
    """Several lambdas, as one that returns all their parts."""
    nodes = [lambda_of(item) for item in wrt] if isinstance(wrt, tuple | list) and wrt else []
    if not all(nodes) or len({ast.unparse(node.args) for node in nodes if node is not None}) != 1:
        return None
    bodies = ", ".join(ast.unparse(node.body) for node in nodes if node is not None)
    arguments = ast.unparse(nodes[0].args) if nodes[0] is not None else ""
    detail = "A tuple of selectors is for several arguments, beside `argnums=(0, 1)`."
    return Reading(detail, f"wrt=lambda {arguments}: ({bodies}{',' * (len(nodes) == 1)})")
