"""The errors for what is no selector, and for a selector that is about leaves or classes the tree does not have."""

import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from .._marks import Layout, refuse_forgotten
from .._message import at, listed, near_misses
from .._skeletons import Misfit, Skeleton, bools_in, is_static, names_of
from .._trees import accepts
from ..errors import NoMatchError, SelectionError, SelectorTypeError
from .code import spelled
from .habits import meant_by_object, merged
from .notations import Reading
from .questions import labels_in, meant_by_function


def not_a_selector(wrt: Any, skeleton: Skeleton | None = None) -> SelectorTypeError:
    """The error for what is not a selector; with a tree, it says which part of it is meant."""
    what = f"`wrt` is {type(wrt).__name__} {wrt!r:.80}, which is not a selector."
    meant = _meant(wrt) if skeleton is None else meant_by_object(skeleton, wrt)
    details = [] if skeleton is None else [f"Leaves: {skeleton.listed_leaves()}."]
    if meant is not None and meant.code:
        is_list_of_paths = isinstance(wrt, tuple | list) and meant.code.startswith("partgrad.path(")
        fix = f"join the paths: {meant.code}." if is_list_of_paths else meant.fix
        fix = f"return the parts from one callable: {meant.code}." if meant.code.startswith("wrt=lambda") else fix
        return SelectorTypeError(what, meant.detail, *details, fix=fix)
    bools = bools_in(wrt)
    expected = "Expected a callable on the tree, a path such as 'kernels[0].variance', a class, a tree of bools, a "
    details = [meant.detail if meant is not None else f"{expected}`Selection`, or None.", *details]
    fix = "write wrt=lambda m: m.the_part, or wrt='the_part'."
    if skeleton is not None:
        fix = f"write a path, such as {skeleton.path(0)!r}." if skeleton.leaves else fix
    elif any(bools) and not isinstance(wrt, tuple):
        path, leaf = next(
            (p.path, p.value) for p, is_bool in zip(Layout(wrt).leaves, bools, strict=True) if not is_bool
        )
        details = [f"It holds bools, as a mask does, and {type(leaf).__name__} {leaf!r:.40} at {at(path)}."]
        fix = "make every leaf of the mask True or False."
    elif isinstance(wrt, tuple | list):
        details[0] = "A tuple of selectors is for several arguments, beside `argnums=(0, 1)`."
        fix = "return the parts from one callable: wrt=lambda m: (m.a, m.b)."
    return SelectorTypeError(what, *details, fix=fix)


def _meant(wrt: Any) -> Reading | None:
    """What something means on any tree."""
    is_number = lambda item: isinstance(item, int) and not isinstance(item, bool)
    if is_number(wrt) or (isinstance(wrt, tuple) and wrt and all(map(is_number, wrt))):
        return Reading("Which arguments are differentiated is said by keyword.", f"argnums={wrt!r}")
    if isinstance(wrt, types.UnionType) and all(cls is not type(None) for cls in wrt.__args__):
        first, *others = (spelled(cls) or cls.__name__ for cls in wrt.__args__)
        code = " | ".join([f"partgrad.of_type({first})", *others])
        return Reading("Python makes a type of two classes with `|` between them.", code)
    return merged(wrt) or labels_in(wrt)


def fits_nowhere(function: Callable[..., Any], skeleton: Skeleton, misfit: Misfit) -> SelectionError:
    """The error for a callable that fits neither the tree nor a node in it."""
    meant = meant_by_function(skeleton, function)
    if not accepts(function, None):
        fix = meant.fix if meant is not None and meant.code else "write wrt=lambda m: m.the_part."
        return SelectorTypeError(
            f"The selector does not take one argument: {misfit}.", "Expected a function of the tree.", fix=fix
        )
    refuse_forgotten(skeleton.leaves, skeleton.path, [misfit.name])
    value, count = skeleton.layout.root.value, max(len(skeleton.nodes) - 1, 0)
    details = [f"On the tree itself: {misfit}.", f"Tried on {type(value).__name__} and the {count} nodes below it."]
    near = near_misses(misfit.name, names_of(skeleton.layout.places)) if misfit.name else []
    if near:
        details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {skeleton.listed_leaves()}.")
    fix = "return one of the leaves, or a node that holds some."
    if meant is not None:
        details.insert(2, meant.detail)
        fix = meant.fix if meant.code else "leave `wrt` out, for every floating or complex leaf."
    elif near and near[0] != misfit.name:
        fix = f"write `{near[0]}` for `{misfit.name}`."
    elif isinstance(value, Mapping) and misfit.name in value:
        fix = f"write m[{misfit.name!r}]: it is a key of a dict."
    elif "index out of range" in str(misfit):
        fix = "write an index that the sequence has."
    elif misfit.found is not None and is_static(misfit.found):
        fix = "make it a field of its own, without static=True and without `Static`, or return one of the leaves."
    return NoMatchError("The selector fits no part of the tree.", *details, fix=fix)


def false_everywhere(function: Callable[..., Any], skeleton: Skeleton, count: int) -> NoMatchError:
    """The error for a question that no leaf answers."""
    details = [f"The function is false for all of the {count} leaves that it was asked about."]
    meant = meant_by_function(skeleton, function)
    fix = "ask for path, leaf.shape or leaf.dtype; or leave `wrt` out, for all of these leaves."
    if meant is not None and meant.code:
        details.append(_given(skeleton))
        fix = meant.fix
    details.append(f"Leaves: {skeleton.listed_leaves()}.")
    return NoMatchError("The selector matching(...) selects nothing to differentiate.", *details, fix=fix)


def path_is_text(function: Callable[..., Any], skeleton: Skeleton) -> str:
    """The note for a function that takes the path for something else."""
    meant = meant_by_function(skeleton, function)
    return _given(skeleton) + (f"\n  Fix: {meant.fix}" if meant is not None and meant.code else "")


def _given(skeleton: Skeleton) -> str:
    path = next((place.path for place in skeleton.layout.leaves), "")
    return f"partgrad.matching gives it a path as text, such as {path!r}, and what stands for the leaf."


def no_path(skeleton: Skeleton, pattern: re.Pattern[str]) -> NoMatchError:
    """The error for a regular expression that matches no path."""
    meant = meant_by_object(skeleton, pattern)
    fix = "match a whole path, as partgrad.items prints it."
    if meant is not None:
        fix = f"match the whole path: {meant.code}."
    what = f"The regular expression {pattern.pattern!r} matches the path of no leaf."
    details = "Expected one that matches a whole path.", f"Leaves: {skeleton.listed_leaves()}."
    return NoMatchError(what, *details, fix=fix)


def no_node_of(cls: type, skeleton: Skeleton) -> NoMatchError:
    """The error for a class of which the tree has no node."""
    refuse_forgotten(skeleton.leaves, skeleton.path)
    name, classes = cls.__name__, list(dict.fromkeys(type(place.value) for place in skeleton.nodes))
    details = [f"Classes of its nodes: {listed(own.__name__ for own in classes) or 'none'}."]
    fix = "use one of these, or select the leaves by a path or a callable."
    meant = meant_by_object(skeleton, cls)
    if any((own.__qualname__, own.__module__) == (cls.__qualname__, cls.__module__) for own in classes):
        details = [f"It has nodes of another class `{name}`: the class was defined anew after the tree was built."]
        fix = f"build the tree again, with the new `{name}`."
    elif meant is not None:
        details.append(meant.detail)
        fix = meant.fix
    return NoMatchError(f"The class {name} selects nothing: the tree has no node of it.", *details, fix=fix)
