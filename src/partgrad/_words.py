"""The words of every error: what went wrong, where, what was expected and found, and how to mend it, in that order."""

import difflib
import re
from collections.abc import Iterable, Sequence

from .errors import (
    ArgumentError,
    DataclassError,
    DrawError,
    ElementError,
    NoMatchError,
    NotDifferentiableError,
    PartsError,
    SelectionError,
    SelectorTypeError,
    SlotError,
    StaticError,
)

_LISTED = 10
_STRING_KEY = re.compile(r"\['(\w+)'\]")


def _word(what: str, *details: str, fix: str) -> str:
    return "\n  ".join([what, *details, f"Fix: {fix}"])


def _at(path: str) -> str:
    return f"`{path}`" if path else "the tree itself"


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    shown = ", ".join(items[:_LISTED])
    return shown if len(items) <= _LISTED else f"{shown}, ... {len(items) - _LISTED} more"


def _near(name: str, candidates: Iterable[str]) -> list[str]:
    # `['a'].b` and `a.b` are one path, so they are compared in one spelling.
    spelled = {_STRING_KEY.sub(r".\1", candidate).removeprefix("."): candidate for candidate in candidates}
    found = difflib.get_close_matches(_STRING_KEY.sub(r".\1", name), list(spelled), n=4, cutoff=0.5)
    return [spelled[near] for near in found]


# --- selectors ---------------------------------------------------------------------------------------------------


def not_a_selector(wrt: object) -> SelectorTypeError:
    """Word the error for a `wrt` that is no selector."""
    several = isinstance(wrt, tuple | list)
    what = f"`wrt` is {type(wrt).__name__} {wrt!r:.80}, which is not a selector."
    if several:
        return SelectorTypeError(
            _word(
                what,
                "A tuple of selectors is for several arguments, beside `argnums=(0, 1)`.",
                fix="return the parts from one callable: wrt=lambda m: (m.a, m.b).",
            )
        )
    return SelectorTypeError(
        _word(
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
    near = _near(name, names) if name else []
    details = [f"On the tree itself: {reason}.", f"Tried on {root} and the {nodes} nodes below it."]
    if near:
        details.append(f"Near names: {_listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {_listed(leaves) or 'none'}.")
    fix = (
        f"write `{near[0]}` for `{name}`."
        if near and near[0] != name
        else "return one of the leaves, or a node that holds some."
    )
    return NoMatchError(_word("The selector fits no part of the tree.", *details, fix=fix))


def path_not_found(pattern: str, leaves: Sequence[str], places: Sequence[str], note: str = "") -> NoMatchError:
    """Word the error for a path or glob that matches nothing."""
    near = _near(pattern, places)
    details = [note] if note else []
    if near:
        details.append(f"Near names: {_listed(f'`{n}`' for n in near)}.")
    details.append(f"Leaves: {_listed(leaves) or 'none'}.")
    fix = f"write {near[0]!r}." if near else "start at the tree itself, not with the argument's name."
    return NoMatchError(_word(f"The path '{pattern}' matches nothing in the tree.", *details, fix=fix))


def path_syntax(pattern: str, position: int, expected: str) -> NoMatchError:
    """Word the error for a path that cannot be read."""
    return NoMatchError(
        _word(
            f"The path {pattern!r} cannot be read at position {position}: {pattern[position:]!r}.",
            f"Expected {expected}.",
            fix="write it as Python would: kernels[0].variance, ['w'].scale; `*` is one step, `**` any number.",
        )
    )


def path_ambiguous(pattern: str, first: str, second: str) -> SelectionError:
    """Word the error for an exact path that fits both an attribute and a key."""
    return SelectionError(
        _word(
            f"The path '{pattern}' names two leaves that differ only in the kind of a step.",
            f"Found {_at(first)} and {_at(second)}.",
            fix="use a callable, such as wrt=lambda m: m.the_part, which can tell them apart.",
        )
    )


def containers_unsortable(error: Exception) -> SelectionError:
    """Word the error for a selector that returns a dict which JAX cannot flatten."""
    return SelectionError(
        _word(
            f"The selector returned a container that JAX cannot flatten: {str(error).splitlines()[0]:.80}",
            "Expected slots or nodes of the tree, or tuples, lists or dicts of them.",
            fix="use dict keys of one type, such as strings.",
        )
    )


def selects_nothing(wrt: str, reason: str, leaves: Sequence[str]) -> NoMatchError:
    """Word the error for a selector whose selection holds no differentiable leaf."""
    return NoMatchError(
        _word(
            f"The selector {wrt} selects nothing to differentiate.",
            reason,
            f"Leaves: {_listed(leaves) or 'none'}.",
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
        _word(
            f"All that the selector {wrt} selects is held by a mark.",
            f"Held: {_listed(f'`{p}`' for p in marked)}.",
            f"{why}{'' if in_named_node else ' a mark'}.",
            fix=f"name the leaf itself, wrt={marked[0]!r}, or remove the mark first: "
            f"partgrad.thaw(tree, {marked[0]!r}).",
        )
    )


def element_out_of_range(path: str, index: object, shape: tuple[int, ...]) -> ElementError:
    """Word the error for an index into a leaf that is out of range."""
    return ElementError(
        _word(
            f"The selector takes element {index!r} of {_at(path)}, which is out of range.",
            f"Expected an index into shape {shape}.",
            fix="select an element that is there, or the whole leaf.",
        )
    )


def elements_refused(what: str, path: str) -> SelectionError:
    """Word the error for elements of a leaf where only whole leaves will do."""
    return SelectionError(
        _word(
            f"`{what}` works on whole leaves, and the selector takes elements of {_at(path)}.",
            "Expected leaves or nodes.",
            fix="select the whole leaf; for single elements use grad, select, replace, ravel or stop_gradient.",
        )
    )


def no_node_of(cls: str, present: Iterable[str]) -> NoMatchError:
    """Word the error for a class of which the tree has no node."""
    return NoMatchError(
        _word(
            f"The class {cls} selects nothing: the tree has no node of it.",
            f"Classes of its nodes: {_listed(present) or 'none'}.",
            fix="use one of these, or select the leaves by a path or a callable.",
        )
    )


def mask_structure(path: str, expected: str, found: str) -> SelectionError:
    """Word the error for a mask that has another structure than the tree."""
    return SelectionError(
        _word(
            f"The mask has another structure than the tree, at {_at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="build the mask from the tree, jax.tree.map(lambda leaf: ..., tree), or from a prefix of it.",
        )
    )


def selected_twice(path: str) -> SelectionError:
    """Word the error for a leaf that one selector returns twice."""
    return SelectionError(
        _word(
            f"The selector returns {_at(path)} twice.",
            "Expected every leaf at most once: its gradient could not be told which place to take.",
            fix="return it once, or the node around it alone.",
        )
    )


def not_differentiable(path: str, leaf: str) -> NotDifferentiableError:
    """Word the error for a selector that names a leaf without a derivative."""
    remedy = "store a float (1.0 for 1)" if leaf in ("int", "bool") or leaf[:1] in "iu" else "select a floating leaf"
    return NotDifferentiableError(
        _word(
            f"The selector names {_at(path)}, which cannot be differentiated.",
            f"Expected a floating or complex leaf, got {leaf}.",
            fix=f"{remedy}, or select the node around it: what has no derivative stays out of a node silently.",
        )
    )


def computed_on_slot(path: str, operation: str) -> SlotError:
    """Word the error for arithmetic on a slot."""
    return SlotError(
        _word(
            f"The selector computes on {_at(path)}: {operation}.",
            "A selector points at parts of the tree; it sees slots (path, shape, dtype), never values.",
            fix="return the part itself, and compute in the function that is differentiated.",
        )
    )


def nothing_to_differentiate(argument: str, leaves: Sequence[str]) -> NotDifferentiableError:
    """Word the error for `wrt=None` on a tree whose leaves are all marked, or have no derivative."""
    return NotDifferentiableError(
        _word(
            f"There is nothing to differentiate in {argument}.",
            f"Expected a floating or complex leaf that is not held by a mark, got: {_listed(leaves)}.",
            fix="store floats (1.0 for 1), name a held leaf with wrt=..., or choose another argument by argnums.",
        )
    )


# --- transforms --------------------------------------------------------------------------------------------------


def argument_missing(argnums: object, needed: int, given: int) -> ArgumentError:
    """Word the error for an `argnums` beyond the positional arguments, in JAX's own terms."""
    return ArgumentError(
        _word(
            f"differentiating with respect to argnums={argnums} requires at least {needed} positional arguments to be "
            f"passed by the caller, but got only {given} positional arguments.",
            fix="pass the differentiated arguments by position.",
        )
    )


def argument_twice(position: object) -> ArgumentError:
    """Word the error for `argnums` and `argnames` that name one argument twice."""
    return ArgumentError(
        _word(
            f"`argnums` and `argnames` name argument {position} twice.",
            "Expected every argument at most once: one of the two would be a constant of the other.",
            fix="select several parts of one argument with one selector: wrt=lambda m: (m.a, m.b).",
        )
    )


def selectors_and_arguments(wrt: object, arguments: Sequence[object]) -> ArgumentError:
    """Word the error for a `wrt` that has not one selector for each argument."""
    count = f"{len(wrt)} selectors" if isinstance(wrt, tuple) else f"one selector ({wrt!r:.60})"
    return ArgumentError(
        _word(
            f"`wrt` and the arguments do not go together: {count} for {len(arguments)} arguments, {list(arguments)}.",
            "Expected a tuple of one selector for each argument.",
            fix="write wrt=(selector, None) beside argnums=(0, 1); None is every unmarked differentiable leaf.",
        )
    )


def argument_unknown(name: str, known: Sequence[str]) -> ArgumentError:
    """Word the error for an `argnames` that is no parameter of the function."""
    near = _near(name, known)
    return ArgumentError(
        _word(
            f"argnames names `{name}`, which is no parameter of the function.",
            f"Parameters: {_listed(known) or 'none'}.",
            fix=f"write {near[0]!r}." if near else "name one of these.",
        )
    )


def argument_not_passed(name: str) -> ArgumentError:
    """Word the error for a named argument that the caller left out."""
    return ArgumentError(
        _word(
            f"argnames names `{name}`, which the caller did not pass.",
            "A default value is not differentiated.",
            fix=f"pass it: f(..., {name}=...).",
        )
    )


def wrong_structure(what: str, path: str, expected: str, found: str) -> PartsError:
    """Word the error for tangents, updates or values of another structure than the selection."""
    return PartsError(
        _word(
            f"{what} has another structure than the selection, at {_at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give it the shape of the gradient: the selected part, or the tree with None at what is not selected.",
        )
    )


def wrong_count(what: str, expected: int, found: object) -> ArgumentError:
    """Word the error for a number of trees that does not fit the selected primals."""
    return ArgumentError(
        _word(
            f"Expected {expected} {what}, one for each selected primal, got {found}.",
            "Without wrt every primal is selected; one selector is for the first primal alone.",
            fix="give a tuple with one tree for each selected primal, or select more by wrt=(selector, None, ...).",
        )
    )


def not_a_function(transform: str, found: object) -> ArgumentError:
    """Word the error for a transform of something that cannot be called."""
    return ArgumentError(
        _word(
            f"`partgrad.{transform}` got {type(found).__name__} {found!r:.60}, which cannot be called.",
            "Expected the function to differentiate.",
            fix=f"write partgrad.{transform}(f, wrt=...)(model), or @partgrad.{transform}(wrt=...).",
        )
    )


def not_a_callable(wrapper: str, found: object) -> ArgumentError:
    """Word the error for following something that cannot be called."""
    return ArgumentError(
        _word(
            f"`partgrad.{wrapper}` got {type(found).__name__} {found!r:.60}, which cannot be called.",
            "Expected a function of arrays.",
            fix=f"pass the function itself: partgrad.{wrapper}(f)(x), not partgrad.{wrapper}(f(x)).",
        )
    )


def unused_option(found: object) -> ArgumentError:
    """Word the error for an unknown `unused`."""
    return ArgumentError(
        _word(
            f"`unused` is {found!r}.",
            "Expected 'zero', 'none' or 'error'.",
            fix="leave it out for JAX's zeros, or write unused='error' to be told what the output cannot depend on.",
        )
    )


def unused_leaves(paths: Sequence[str]) -> SelectionError:
    """Word the error for selected leaves that the output cannot depend on."""
    return SelectionError(
        _word(
            f"The output cannot depend on {_listed(f'`{path}`' for path in paths)}.",
            "Expected a path to the output for every selected leaf; stop_gradient and conversion to int cut paths.",
            fix="select what the function uses, or write unused='none' for None at these leaves.",
        )
    )


# --- draws -------------------------------------------------------------------------------------------------------


def draw_word(found: object, known: Sequence[str]) -> ArgumentError:
    """Word the error for a `gradient=` that is none of the words."""
    near = _near(found, known) if isinstance(found, str) else []
    return ArgumentError(
        _word(
            f"`draw` got gradient={found!r:.60}.",
            f"Expected one of {_listed(map(repr, known))}.",
            fix=f"write gradient={near[0]!r}." if near else "write gradient='pathwise' for JAX's own derivative.",
        )
    )


def draw_differentiated(sampler: str, site: str, parameter: str) -> DrawError:
    """Word the error for a derivative through a draw with `gradient="error"`."""
    return DrawError(
        _word(
            f"`{sampler}` is drawn with gradient='error' and differentiated through {parameter}.",
            f"At: {site}.",
            "Expected no derivative through the parameters of this draw.",
            fix="write gradient='fixed' to hold the draw, 'pathwise' for JAX's own derivative, or 'score' inside "
            "`pg.expectation` for that of the mean.",
        )
    )


def score_without_log_prob(sampler: str, site: str) -> ArgumentError:
    """Word the error for a score function without the log-probability it is the gradient of."""
    return ArgumentError(
        _word(
            f"`{sampler}` is drawn with gradient='score' and no `log_prob`.",
            f"At: {site}.",
            "Expected a function of the draw and the sampler's arguments to the log-probability of the draw.",
            fix="pass it: log_prob=jax.scipy.stats.bernoulli.logpmf, or log_prob=distribution.log_prob.",
        )
    )


def score_outside(sampler: str, site: str) -> DrawError:
    """Word the error for a derivative that reaches a score draw before its expectation is taken."""
    return DrawError(
        _word(
            f"`{sampler}` is drawn with gradient='score' and differentiated outside of `pg.expectation`.",
            f"At: {site}.",
            "Expected the expectation between the draw and the derivative: only the mean has this gradient.",
            fix="differentiate the expectation, jax.grad(pg.expectation(f, samples=100), argnums=1)(key, params), also "
            "where this is a derivative inside of `f`.",
        )
    )


def score_hidden(draw: str, primitive: str) -> DrawError:
    """Word the error for a score draw where it cannot be counted, or would be counted twice."""
    places = {
        "while": "a `while` loop",
        "shard_map": "`shard_map`",
        "checkpoint differentiated": "a checkpoint that a derivative inside of the function runs again",
    }
    rule = "a custom derivative rule" if primitive.startswith("custom_") else f"`{primitive}`"
    fix = {
        "custom_jvp_call": "draw outside of it and pass the draw in. `pg.double_where` makes such a rule: put it "
        "around `pg.expectation`, or around the part of the function that follows the draw.",
        "while": "write the loop as `jax.lax.scan`, with a `jax.lax.cond` in each step.",
        "checkpoint differentiated": "leave out the `jax.checkpoint` around the draw, or draw outside of it.",
    }
    return DrawError(
        _word(
            f"{draw} is drawn with gradient='score' inside {places.get(primitive, rule)}.",
            "Expected draws where `pg.expectation` can count them: in calls, vmap, scan, cond and checkpoints.",
            fix=fix.get(primitive, "draw outside of it and pass the draw in."),
        )
    )


def score_shared_key(draw: str) -> DrawError:
    """Word the error for score draws under `vmap` that are not independent."""
    return DrawError(
        _word(
            f"{draw} is drawn with gradient='score' under `vmap` with one key for all elements.",
            "Expected independent draws, hence a key for each: with one key the gradient is biased.",
            fix="map over keys as well: jax.vmap(draw_one)(jax.random.split(key, n), params).",
        )
    )


def score_independent(draw: str) -> DrawError:
    """Word the error for a log-probability that does not see what is differentiated."""
    return DrawError(
        _word(
            f"{draw} is drawn with gradient='score', and its `log_prob` does not depend on what is differentiated.",
            "Expected the log-probability as a function of the parameters that the sampler gets; its gradient is zero.",
            fix="compute it from those parameters, without stop_gradient; or write gradient='fixed' for a zero.",
        )
    )


def not_a_log_probability(sampler: str, site: str, found: Sequence[str], drawn: int) -> DrawError:
    """Word the error for a `log_prob` that returns something else."""
    return DrawError(
        _word(
            f"The `log_prob` of `{sampler}` does not return the log-probability of the draw.",
            f"At: {site}.",
            f"Expected a real floating array of at most {drawn} elements, one for each number drawn; got "
            f"{_listed(found) or 'no array'}.",
            fix="check that draw and parameters broadcast to the shape of the draw.",
        )
    )


def no_mean(dtype: object) -> DrawError:
    """Word the error for an output of which there is no mean."""
    return DrawError(
        _word(
            f"The function given to `expectation` returns {dtype}, which has no mean.",
            "Expected arrays of numbers or bools.",
            fix="return what is to be averaged, a number.",
        )
    )


def not_a_count(name: str, found: object) -> ArgumentError:
    """Word the error for a count that is none."""
    return ArgumentError(
        _word(
            f"`{name}` is {type(found).__name__} {found!r:.60}.",
            "Expected a positive integer, known when the function is built.",
            fix=f"write {name}=100.",
        )
    )


# --- parts -------------------------------------------------------------------------------------------------------


def no_parts() -> PartsError:
    """Word the error for `combine()`."""
    return PartsError(_word("`combine` got no parts.", fix="pass what `partition` returned: combine(selected, rest)."))


def parts_overlap(path: str, first: int, second: int) -> PartsError:
    """Word the error for a leaf that two parts hold."""
    return PartsError(
        _word(
            f"Parts {first} and {second} both hold {_at(path)}.",
            "Expected every leaf in exactly one part, and None in the others.",
            fix="combine what one `partition` returned, or what `partgrad.mask` marks apart.",
        )
    )


def parts_differ(number: int, path: str, expected: str, found: str) -> PartsError:
    """Word the error for parts of different structure."""
    return PartsError(
        _word(
            f"Part {number} has another structure than part 0, at {_at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="combine parts of one tree; a mark that was added or removed on one side alone counts as a difference.",
        )
    )


def updates_structure(path: str, expected: str, found: str) -> PartsError:
    """Word the error for updates of another structure than the tree."""
    return PartsError(
        _word(
            f"The updates have another structure than the tree, at {_at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give updates for the tree that the optimiser was given: the selected part, or the tree with None.",
        )
    )


def elements_shape(expected: tuple[int, ...], found: tuple[int, ...]) -> PartsError:
    """Word the error for new elements of another shape than the selected ones."""
    return PartsError(
        _word(
            "The new elements do not fit the selected ones.",
            f"Expected shape {expected}, got {found}.",
            fix="give one value for each selected element, in their shape.",
        )
    )


def condition_shape(expected: tuple[int, ...], found: tuple[int, ...]) -> PartsError:
    """Word the error for a condition that does not broadcast to a leaf."""
    return PartsError(
        _word(
            "The condition of `stop_gradient` does not fit a selected leaf.",
            f"Expected a bool, or bools that broadcast to shape {expected}, got shape {found}.",
            fix="give one bool, or a tree of conditions in the shape of the gradient.",
        )
    )


def vector_length(expected: int, found: tuple[int, ...]) -> PartsError:
    """Word the error for a vector of another length than the selection."""
    return PartsError(
        _word(
            "The vector does not fit the selected entries.",
            f"Expected shape ({expected},), got {found}.",
            fix="give one entry for each of `unravel.names`.",
        )
    )


# --- classes and marks -------------------------------------------------------------------------------------------


def static_and_nondiff(owner: str) -> DataclassError:
    """Word the error for a field that is declared both static and nondiff."""
    return DataclassError(
        _word(
            f"{owner} sets both static=True and nondiff=True.",
            "Static data is in the structure, a nondiff value is a traced leaf; static data is never differentiated.",
            fix="keep nondiff=True for numbers, static=True for what the compiler may specialise on.",
        )
    )


def slots_refused(cls: str) -> DataclassError:
    """Word the error for `slots=True`."""
    return DataclassError(
        _word(
            f"`{cls}` asks for slots=True (or defines __slots__).",
            "Expected instances with a __dict__: that is where unflattening writes, without running __init__.",
            fix="leave slots out; reading a field costs the same.",
        )
    )


def decorated_twice(cls: str) -> DataclassError:
    """Word the error for a class that is a dataclass or a pytree already."""
    return DataclassError(
        _word(
            f"`{cls}` is a dataclass already.",
            "partgrad.dataclass makes a class a dataclass and registers it with JAX; another decorator does so too.",
            fix="leave partgrad.dataclass as the only decorator.",
        )
    )


def dataclass_refused(cls: str, error: Exception) -> DataclassError:
    """Word the error for a class that `dataclasses.dataclass` or JAX refuses."""
    return DataclassError(
        _word(
            f"`{cls}` cannot be a partgrad dataclass: {error}.",
            "Expected a class that dataclasses.dataclass accepts; partgrad's are frozen without frozen=False.",
            fix="mend the class; a base that is a plain dataclass must be frozen like this one.",
        )
    )


def none_refused_note() -> str:
    """Word the note on an error of a constructor that JAX runs when partgrad builds a part of a tree."""
    return (
        "partgrad built a tree with None in the place of the leaves that are not in it, and the constructor of a class "
        "in it, which JAX runs to build one, refused that.\n"
        "Fix: let the constructor accept None, or name the leaves by a callable, whose gradient has no such tree."
    )


def cannot_hold(cls: str) -> DataclassError:
    """Word the error for a class of another library whose instances cannot hold a wrapper."""
    return DataclassError(
        _word(
            f"`{cls}` takes NonDiff wrappers apart when JAX builds it, so its leaves cannot be marked.",
            "Expected a class that stores what it is given.",
            fix=f"leave its leaves out by wrt=..., or make `{cls}` a partgrad.dataclass, whose fields can be marked.",
        )
    )


def undecorated(cls: str, base: str) -> DataclassError:
    """Word the error for an instance of a subclass that was not decorated."""
    return DataclassError(
        _word(
            f"`{cls}` derives from the partgrad dataclass `{base}` but is not decorated itself.",
            "JAX would not know how to take it apart, and its own fields would be lost.",
            fix=f"write @partgrad.dataclass above `class {cls}`.",
        )
    )


def field_not_set(cls: str, name: str) -> DataclassError:
    """Word the error for a field without a value once an instance is built."""
    return DataclassError(
        _word(
            f"`{cls}.{name}` has no value once the instance is built.",
            "Expected every field to be set by __init__ or __post_init__.",
            fix=f"set self.{name} there, or give the field a default.",
        )
    )


def field_unknown(cls: str, name: str, fields: Sequence[str]) -> DataclassError:
    """Word the error for replacing a field that is none."""
    near = _near(name, fields)
    return DataclassError(
        _word(
            f"`{cls}` has no field `{name}`.",
            f"Fields: {_listed(fields) or 'none'}.",
            fix=f"write `{near[0]}`." if near else "name one of these.",
        )
    )


def field_deleted(cls: str, name: str) -> DataclassError:
    """Word the error for deleting a field."""
    return DataclassError(
        _word(
            f"cannot delete field `{cls}.{name}`.",
            "Expected every field to have a value: it is a part of the tree.",
            fix=f"set it to None: instance.{name} = None.",
        )
    )


def not_a_class(found: object) -> DataclassError:
    """Word the error for decorating something that is no class."""
    return DataclassError(
        _word(
            f"`partgrad.dataclass` got {type(found).__name__} {found!r:.60}, which is not a class.",
            fix="write @partgrad.dataclass or @partgrad.dataclass(kw_only=True) above a class.",
        )
    )


def frozen_message(cls: str, name: str) -> str:
    """Word the message of the FrozenInstanceError for an assignment to a field of a built instance."""
    return _word(
        f"cannot assign to field `{cls}.{name}`: instances are frozen.",
        fix=f"build a new one, dataclasses.replace(instance, {name}=...), or decorate with frozen=False.",
    )


def unhashable(cls: str) -> TypeError:
    """Word the error for the hash of a mutable instance."""
    return DataclassError(
        _word(
            f"`{cls}` is mutable (frozen=False), so its instances have no hash, and `jax.jit(instance)` cannot cache.",
            fix="pass it as an argument: jax.jit(lambda m, x: m(x))(instance, x), or leave frozen=False out.",
        )
    )


def static_unhashable(where: str, path: str, value: object) -> StaticError:
    """Word the error for static data that cannot be compared."""
    inside = f" at `{path}`" if path else ""
    return StaticError(
        _word(
            f"{where} holds {type(value).__name__} {value!r:.60}{inside}, which cannot be static.",
            "Expected data that can be hashed and compared, or a dict, list, set or array of such.",
            fix="give its class __eq__ and __hash__, or store the data it is made from.",
        )
    )


def static_unsortable(where: str, error: Exception) -> StaticError:
    """Word the error for static containers that JAX cannot take apart."""
    return StaticError(
        _word(
            f"{where} holds a container that JAX cannot flatten: {str(error).splitlines()[0]:.100}",
            "Expected dicts whose keys can be sorted.",
            fix="use keys of one type, such as strings.",
        )
    )


# --- safe --------------------------------------------------------------------------------------------------------


def at_singular_dtype(name: str, found: object, real: bool) -> ArgumentError:
    """Word the error for a derivative at the singular point that is no number, or complex where all is real."""
    return ArgumentError(
        _word(
            f"`at_singular` of `safe.{name}` is {type(found).__name__} {found!r:.60}.",
            f"Expected a {'real ' if real else ''}number or array{'' if real else ', real or complex'}.",
            fix=f"write safe.{name}(..., at_singular=0.0).",
        )
    )


def at_singular_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ArgumentError:
    """Word the error for a derivative at the singular point that does not fit."""
    return ArgumentError(
        _word(
            f"`at_singular` of `safe.{name}` has shape {found}.",
            f"Expected a shape that broadcasts to {expected}.",
            fix="give one number, or one for each element.",
        )
    )


def safe_where_not_callable(which: str, found: object) -> ArgumentError:
    """Word the error for a branch of `safe.where` that is a value."""
    return ArgumentError(
        _word(
            f"`{which}` of `safe.where` is {type(found).__name__} {found!r:.60}, which is not callable.",
            "Expected a function of the operands.",
            fix="write safe.where(pred, lambda x: ..., lambda x: ..., x); for arrays that exist there is jnp.where.",
        )
    )


def safe_where_trees(true_tree: object, false_tree: object) -> ArgumentError:
    """Word the error for branches of `safe.where` whose results do not go together."""
    return ArgumentError(
        _word(
            "the functions of `safe.where` return trees of different structures.",
            f"`true_fun` returned {true_tree!s:.200}, `false_fun` returned {false_tree!s:.200}.",
            fix="return the same containers from both.",
        )
    )
