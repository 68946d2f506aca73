"""The functions with which a user writes selectors."""

import re
from collections.abc import Callable
from typing import Any

from .._trees import accepts
from ..errors import SelectorTypeError
from .kinds import CallableSelection, Matching, OfType, Path, WholePath
from .selection import Selection
from .selectors import Selector, as_selection


def _refused(name: str, found: object, expected: str, fix: str) -> SelectorTypeError:
    what = f"`partgrad.{name}` got {type(found).__name__} {found!r:.60}."
    return SelectorTypeError(what, f"Expected {expected}.", fix=fix)


def each(function: Callable[[Any], Any]) -> Selection:
    """Select what a function returns at every node that it fits, including the root.

    A plain callable that fits the root names a part of it. `each` always describes leaves: the gradient has the shape
    of the tree, and leaves held by a mark are skipped.

    Args:
        function: A function from a node to a leaf or node inside it, or a tuple, list or dict of them. It fits a node
            if it returns one of these; an AttributeError, KeyError, IndexError or TypeError about the node itself means
            that it does not. One from inside a property or a method of the node is raised.

    Returns:
        A selection, for any `wrt=`.

    Example:
        >>> import partgrad as pg
        >>> tree = {"w": 1.0, "deep": {"w": 2.0, "b": 3.0}}
        >>> pg.grad(lambda t: t["w"] * t["deep"]["w"], wrt=pg.each(lambda node: node["w"]))(tree)["deep"]
        {'b': None, 'w': Array(1., dtype=float32, weak_type=True)}
    """
    if not callable(function):
        raise _refused("each", function, "a function of a node", "write partgrad.each(lambda node: node.the_part).")
    return CallableSelection(function, everywhere=True)


def path(pattern: "str | re.Pattern[str]") -> Selection:
    """Select by a path or a glob; the string itself as `wrt=` does the same.

    Args:
        pattern: Steps as in Python, starting at the tree itself: `kernels[0].variance`, `['w'].scale`. A name matches
            an attribute or a string key. `*` is one step, `**` any number of steps, and in a name any part of it:
            `conv*`. A slice takes elements of a sequence: `layers[1:].bias`. A path without wildcards names a part.
            What `jax.tree_util.keystr` writes is a path too. A compiled regular expression selects the leaves whose
            whole path it matches, as `partgrad.items` prints it.

    Returns:
        A selection, for any `wrt=`.

    Raises:
        NoMatchError: When it is used, if the text cannot be read as a path or matches nothing.

    Example:
        >>> import re, partgrad as pg
        >>> pg.grad(lambda t: t["a"][0] * t["a"][1], wrt=pg.path("a[1]"))({"a": [2.0, 3.0]})
        Array(2., dtype=float32, weak_type=True)
        >>> pg.partition({"conv1": 1.0, "conv2": 2.0, "head": 3.0}, "conv*")[0]
        {'conv1': 1.0, 'conv2': 2.0, 'head': None}
        >>> pg.items({"conv1": 1.0, "conv2": 2.0}, pg.path(re.compile(".*conv2.*")))
        [("['conv2']", 2.0)]
    """
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return WholePath(pattern)
    if not isinstance(pattern, str):
        expected = "a path, as text, or a compiled regular expression of text"
        raise _refused("path", pattern, expected, "write wrt=... without `path` around it.")
    return Path(pattern)


def of_type(cls: type) -> Selection:
    """Select every differentiable leaf inside the nodes of a class; the class itself as `wrt=` does the same.

    Args:
        cls: A class of nodes: a model class, `dict`, `list`. Instances of subclasses count.

    Returns:
        A selection, for any `wrt=`.

    Raises:
        SelectorTypeError: If `cls` is not a class.

    Example:
        >>> import partgrad as pg
        >>> pg.partition({"a": [1.0, 2.0], "b": 3.0}, pg.of_type(list))[0]
        {'a': [1.0, 2.0], 'b': None}
    """
    if not isinstance(cls, type):
        raise _refused("of_type", cls, "a class", f"write partgrad.of_type({type(cls).__name__}).")
    return OfType(cls)


def matching(function: Callable[[str, Any], bool]) -> Selection:
    """Select the leaves for which a function returns true.

    Args:
        function: A function of the path, as text, and the leaf, a slot with `shape`, `dtype`, `ndim` and `size` (for
            Python numbers too), of which `isinstance` says what it says of the leaf. It is called for floating and
            complex leaves that no mark holds.

    Returns:
        A selection, for any `wrt=`.

    Example:
        >>> import partgrad as pg
        >>> pg.partition({"a": 1.0, "b": 2.0}, pg.matching(lambda path, leaf: "b" in path and leaf.ndim == 0))[0]
        {'a': None, 'b': 2.0}
    """
    if not callable(function) or not accepts(function, "", None):
        expected = "a function of the path and the leaf"
        raise _refused("matching", function, expected, "write partgrad.matching(lambda path, leaf: ...).")
    return Matching(function)


def exclude(selector: Selector) -> Selection:
    """Select every differentiable leaf that no mark holds, except those that another selector selects.

    Selections combine as sets of leaves: `a | b`, `a & b`, `a - b`, and `~a`, which is `exclude(a)`. Only one side has
    to be a `Selection`; the other may be any selector. The gradient has the shape of the tree. Held leaves are skipped,
    except those that a side of `|` names.

    Args:
        selector: Any selector.

    Returns:
        A selection, for any `wrt=`.

    Example:
        >>> import partgrad as pg
        >>> pg.partition({"a": 1.0, "b": 2.0, "c": 3.0}, pg.exclude("b") - pg.path("c"))[0]
        {'a': 1.0, 'b': None, 'c': None}
    """
    return ~as_selection(selector)
