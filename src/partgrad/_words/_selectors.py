"""The words of errors about selectors and what they select."""

from collections.abc import Iterable, Sequence

from .._message import at, listed, near_misses, word
from ..errors import (
    ElementError,
    NoMatchError,
    NotDifferentiableError,
    SelectionError,
    SelectorTypeError,
    SlotError,
)


def not_a_selector(wrt: object) -> SelectorTypeError:
    """Word the error for a `wrt` that is no selector."""
    several = isinstance(wrt, tuple | list)
    what = f"`wrt` is {type(wrt).__name__} {wrt!r:.80}, which is not a selector."
    if several:
        return SelectorTypeError(
            word(
                what,
                "A tuple of selectors is for several arguments, beside `argnums=(0, 1)`.",
                fix="return the parts from one callable: wrt=lambda m: (m.a, m.b).",
            )
        )
    return SelectorTypeError(
        word(
            what,
            "Expected a callable on the tree, a path such as 'kernels[0].variance', a class, a tree of bools, a "
            "`Selection`, or None.",
            fix="write wrt=lambda m: m.the_part, or wrt='the_part'.",
        )
    )


def fits_nowhere(
    root: str, reason: str, name: str | None, nodes: int, names: Iterable[str], leaves: Sequence[str]
) -> NoMatchError:
    """Word the error for a callable that fits neither the root nor any node below."""
    near = near_misses(name, names) if name else []
    details = [f"On the tree itself: {reason}.", f"Tried on {root} and the {nodes} nodes below it."]
    if near:
        details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {listed(leaves) or 'none'}.")
    fix = (
        f"write `{near[0]}` for `{name}`."
        if near and near[0] != name
        else "return one of the leaves, or a node that holds some."
    )
    return NoMatchError(word("The selector fits no part of the tree.", *details, fix=fix))


def path_not_found(pattern: str, leaves: Sequence[str], places: Sequence[str], note: str = "") -> NoMatchError:
    """Word the error for a path or glob that matches nothing."""
    near = near_misses(pattern, places)
    details = [note] if note else []
    if near:
        details.append(f"Near names: {listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {listed(leaves) or 'none'}.")
    fix = f"write {near[0]!r}." if near else "start at the tree itself, not with the argument's name."
    return NoMatchError(word(f"The path '{pattern}' matches nothing in the tree.", *details, fix=fix))


def path_syntax(pattern: str, position: int, expected: str) -> NoMatchError:
    """Word the error for a path that cannot be read."""
    return NoMatchError(
        word(
            f"The path {pattern!r} cannot be read at position {position}: {pattern[position:]!r}.",
            f"Expected {expected}.",
            fix="write it as Python would: kernels[0].variance, ['w'].scale; `*` is one step, `**` any number.",
        )
    )


def path_ambiguous(pattern: str, first: str, second: str) -> SelectionError:
    """Word the error for an exact path that fits both an attribute and a key."""
    return SelectionError(
        word(
            f"The path '{pattern}' names two leaves that differ only in the kind of a step.",
            f"Found {at(first)} and {at(second)}.",
            fix="use a callable, such as wrt=lambda m: m.the_part, which can tell them apart.",
        )
    )


def containers_unsortable(error: Exception) -> SelectionError:
    """Word the error for a selector that returns a dict which JAX cannot flatten."""
    return SelectionError(
        word(
            f"The selector returned a container that JAX cannot flatten: {str(error).splitlines()[0]:.80}",
            "Expected slots or nodes of the tree, or tuples, lists or dicts of them.",
            fix="use dict keys of one type, such as strings.",
        )
    )


def selects_nothing(wrt: str, reason: str, leaves: Sequence[str]) -> NoMatchError:
    """Word the error for a selector whose selection holds no differentiable leaf."""
    return NoMatchError(
        word(
            f"The selector {wrt} selects nothing to differentiate.",
            reason,
            f"Leaves: {listed(leaves) or 'none'}.",
            fix="select a floating or complex leaf, or a node that holds one.",
        )
    )


def all_marked(wrt: str, marked: Sequence[str], *, in_named_node: bool) -> NoMatchError:
    """Word the error for a selector that describes, or encloses, only leaves held by a mark."""
    why = (
        "A mark inside a named node keeps its leaves out"
        if in_named_node
        else "Describing leaves never reaches through"
    )
    return NoMatchError(
        word(
            f"All that the selector {wrt} selects is held by a mark.",
            f"Held: {listed(f'`{p}`' for p in marked)}.",
            f"{why}{'' if in_named_node else ' a mark'}.",
            fix=f"name the leaf itself, wrt={marked[0]!r}, or remove the mark first: "
            f"partgrad.thaw(tree, {marked[0]!r}).",
        )
    )


def element_out_of_range(path: str, index: object, shape: tuple[int, ...]) -> ElementError:
    """Word the error for an index into a leaf that is out of range."""
    return ElementError(
        word(
            f"The selector takes element {index!r} of {at(path)}, which is out of range.",
            f"Expected an index into shape {shape}.",
            fix="select an element that is there, or the whole leaf.",
        )
    )


def elements_refused(what: str, path: str) -> SelectionError:
    """Word the error for elements of a leaf where only whole leaves will do."""
    return SelectionError(
        word(
            f"`{what}` works on whole leaves, and the selector takes elements of {at(path)}.",
            "Expected leaves or nodes.",
            fix="select the whole leaf; for single elements use grad, select, replace, ravel or stop_gradient.",
        )
    )


def no_node_of(cls: str, present: Iterable[str]) -> NoMatchError:
    """Word the error for a class of which the tree has no node."""
    return NoMatchError(
        word(
            f"The class {cls} selects nothing: the tree has no node of it.",
            f"Classes of its nodes: {listed(present) or 'none'}.",
            fix="use one of these, or select the leaves by a path or a callable.",
        )
    )


def mask_structure(path: str, expected: str, found: str) -> SelectionError:
    """Word the error for a mask that has another structure than the tree."""
    return SelectionError(
        word(
            f"The mask has another structure than the tree, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="build the mask from the tree, jax.tree.map(lambda leaf: ..., tree), or from a prefix of it.",
        )
    )


def selected_twice(path: str) -> SelectionError:
    """Word the error for a leaf that one selector returns twice."""
    return SelectionError(
        word(
            f"The selector returns {at(path)} twice.",
            "Expected every leaf at most once: its gradient could not be told which place to take.",
            fix="return it once, or the node around it alone.",
        )
    )


def not_differentiable(path: str, leaf: str) -> NotDifferentiableError:
    """Word the error for a selector that names a leaf without a derivative."""
    remedy = "store a float (1.0 for 1)" if leaf in ("int", "bool") or leaf[:1] in "iu" else "select a floating leaf"
    return NotDifferentiableError(
        word(
            f"The selector names {at(path)}, which cannot be differentiated.",
            f"Expected a floating or complex leaf, got {leaf}.",
            fix=f"{remedy}, or select the node around it: what has no derivative stays out of a node silently.",
        )
    )


def computed_on_slot(path: str, operation: str) -> SlotError:
    """Word the error for arithmetic on a slot."""
    return SlotError(
        word(
            f"The selector computes on {at(path)}: {operation}.",
            "A selector points at parts of the tree; it sees slots (path, shape, dtype), never values.",
            fix="return the part itself, and compute in the function that is differentiated.",
        )
    )


def nothing_to_differentiate(argument: str, leaves: Sequence[str]) -> NotDifferentiableError:
    """Word the error for `wrt=None` on a tree whose leaves are all marked, or have no derivative."""
    return NotDifferentiableError(
        word(
            f"There is nothing to differentiate in {argument}.",
            f"Expected a floating or complex leaf that is not held by a mark, got: {listed(leaves)}.",
            fix="store floats (1.0 for 1), name a held leaf with wrt=..., or choose another argument by argnums.",
        )
    )
