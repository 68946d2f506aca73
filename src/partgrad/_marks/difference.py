"""Where two trees of different structure first differ."""

import itertools
from typing import Any

import jax

from .fields import MARKS
from .layout import Layout


def first_difference(first: Any, second: Any) -> tuple[str, str, str]:
    """Where two structures first differ: the path, and what the first and the second have there."""
    for one, other in itertools.zip_longest(Layout(first).places, Layout(second).places):
        if one is None or other is None or one.path != other.path:
            expected, found = ("nothing" if place is None else f"`{place.path}`" for place in (one, other))
            return (one or other).path, expected, found
        expected, found = _describe_node(one.value), _describe_node(other.value)
        if expected != found:
            return one.path, expected, found
    return "", f"{jax.tree.structure(first)}", f"{jax.tree.structure(second)}"


def _describe_node(node: Any) -> str:
    if node is None:
        return "None"
    if not jax.tree_util.is_tree_node(type(node)):
        return "a leaf"
    marks = getattr(node, MARKS, None)
    return f"{type(node).__name__}" + (f" with the marks [{marks!r}]" if marks is not None else "")
