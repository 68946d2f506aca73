"""What a finding says and advises: its sentence, filled with the parts that it names."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .._programs import LOOPS, placed
from .sentences import OF_SEARCH, SENTENCES

# Those of `finding.py`, which asks for its sentences here.
Finding: TypeAlias = Any
Figures: TypeAlias = Any


def message(finding: Finding) -> str:
    """What was found, and the fix or the suggestion."""
    said, _ = SENTENCES[finding.kind, finding.reason]
    said = f"{_moved(finding)}{said.format_map(_Words(finding))}{_after(finding)}"
    said = f"intended: {said}{_unverified(finding)}" if finding.intended else said
    if finding.fix is not None:
        return f"{said} Fix: {_fix(finding)}."
    advice = suggestion(finding)
    return f"{said} Suggestion: {advice}." if advice else said


def _unverified(finding: Finding) -> str:
    """That what a rule is meant to be is not known, and how to say it."""
    is_rule = (finding.kind, finding.reason) == ("mismatch", "rule")
    return " Declared by `partgrad.surrogate(exact, smooth=...)`, it would be checked." if is_rule else ""


def suggestion(finding: Finding) -> str:
    """Advice that was not tried; empty if there is a fix, or nothing to do."""
    if finding.fix is not None or finding.intended:
        return ""
    return SENTENCES[finding.kind, finding.reason][1].format_map(_Words(finding))


class _Words(dict[str, Any]):
    """What the sentences name in braces: the details of a finding, and parts that are made of it when asked for."""

    def __init__(self, finding: Finding):
        super().__init__(finding.details)
        self._finding = finding

    def __missing__(self, name: str) -> str:
        return _PARTS[name](self._finding)


# --- parts of sentences ----------------------------------------------------------------------------------------------


def number(value: complex, noise: float = 0.0) -> str:
    """A number, without negative zeros and without digits that are noise."""
    exact = abs(value) / noise if noise > 0 else np.inf
    digits = int(np.clip(np.log10(exact), 2, 6)) if np.isfinite(value) and 0 < exact < np.inf else 6
    return f"{value + 0.0:.{digits}g}"


def _moved(finding: Finding) -> str:
    """How the point of a search differs from the given one."""
    moved = finding.details.get("moved") or {}
    named = lambda path: f"`{path}`" if path else "it"
    moves = [f"{named(path)} from {_short(before)} to {_short(after)}" for path, (before, after) in moved.items()]
    return f"at a point nearby, which moves {', '.join(moves)}: " if moves else ""


def _short(value: Any) -> str:
    """A number or an array in a few words."""
    text = np.array2string(np.asarray(value), precision=4, threshold=6, edgeitems=2, separator=", ")
    return " ".join(text.split())


def _after(finding: Finding) -> str:
    """Which named value comes before the operation."""
    after = finding.details.get("after")
    return f" What `{finding.operation}` takes there is computed from the value named `{after}`." if after else ""


def _fix(finding: Finding) -> str:
    fix = finding.fix
    assert fix is not None
    replaced = fix.replaces if " " in fix.replaces else f"`{fix.replaces}`"
    what = f"differentiate `{fix.by}`" if fix.replaces == "f" else f"write `{fix.by}` for {replaced}"
    what = ", and ".join([what, *fix.beside])
    beside = "between the slopes on the two sides" if fix.slope is None else f"and differences give {number(fix.slope)}"
    return f"{what}; tried: along a random direction its derivative is {number(fix.derivative)}, {beside}"


def _at(finding: Finding) -> str:
    """The operation and its line."""
    by = f"`{finding.operation}`" if finding.operation.isprintable() and finding.operation else "an operation"
    return by + _at_line(finding)


def _at_line(finding: Finding) -> str:
    """The line, and the map of coordinates that the operation is in."""
    of_map = finding.details.get("map")
    return (f" at {finding.where}" if finding.where else "") + (f" (in the map {of_map})" if of_map else "")


def _rule(finding: Finding) -> str:
    name = f"`{finding.rule.name}`" if finding.rule else "a custom rule"
    return f"{name}, called at {finding.where}" if finding.where else name


def place(finding: Finding) -> str:
    """Which element, in which steps of a loop."""
    element = finding.details.get("element") or finding.details.get("changes_in")
    return (f" in element {list(element)}" if element else "") + steps(finding)


def _most(finding: Finding) -> str:
    """In which element of its result a rule is off the most, and in which steps of a loop."""
    element = finding.details.get("element")
    return (f", most of all in element {list(element)} of its result" if element else "") + steps(finding)


def steps(finding: Finding) -> str:
    """Which steps of a loop; empty outside loops."""
    found = finding.details.get("steps") or []
    shown = [", ".join(map(str, step)) if len(step) == 1 else str(tuple(step)) for step in found]
    if not shown:
        return ""
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f" in iteration {shown[0]}" if len(shown) == 1 else f" in iterations {', '.join(shown[:5])}{more}"


def _compared(finding: Finding) -> str:
    """What the derivative is, and what the differences give."""
    figures: Figures | None = finding.figures
    if figures is None:
        return "the derivative is wrong"
    tolerance = 1e-6 * max(abs(figures.slope), abs(figures.derivative), 1e-300) + figures.noise
    is_right = lambda value: value is not None and abs(value - figures.slope) <= tolerance
    if figures.forward is None or is_right(figures.forward):
        which = "the gradient"
    else:
        which = "the forward derivative" if figures.reverse is None or is_right(figures.reverse) else "the derivative"
    along = " along a sampled direction" if figures.element is None else ""
    where = f" in element {list(figures.element)}" if figures.element else ""
    beside = ", at a point nearby (this one is at a kink)" if figures.nearby else ""
    got, meant = number(figures.derivative), number(figures.slope)
    return f"{which} is wrong{along}: it is {got}{where}, and differences give {meant}{beside}"


def _sides(finding: Finding) -> str:
    figures = finding.figures
    if figures is None:
        return ""
    left, right = (number(side, figures.noise) for side in (figures.left, figures.right))
    return f": the slopes on the two sides are {left} and {right}, and the derivative is {number(figures.derivative)}"


def _both_sides(finding: Finding) -> str:
    """That the differences on both sides give the same slope, if they do."""
    figures = finding.figures
    is_smooth = figures is not None and abs(figures.right - figures.left) <= 1e-6 * abs(figures.slope)
    return "both sides agree on that, " if is_smooth else ""


def _both_modes(finding: Finding) -> str:
    figures = finding.figures
    return f": they give {number(figures.forward or 0)} and {number(figures.reverse or 0)}" if figures else ""


def _changes(finding: Finding) -> str:
    figures = finding.figures
    if figures is None:
        return ""
    return f"the gradient is {number(figures.derivative)} where the function changes by {number(figures.slope)}; "


def _zero(finding: Finding) -> str:
    figures = finding.figures
    return f"the gradient is zero{f' where the function changes by {number(figures.slope)}' if figures else ''}: "


def _two_values(finding: Finding) -> str:
    names = {"jit": "`jax.jit(f)`", "vjp": "the value in `jax.value_and_grad`"}
    ways = " and ".join(names[way] for way in finding.details["ways"])
    gives = "gives" if len(finding.details["ways"]) == 1 else "give"
    plain, other = finding.details["plain"], finding.details["other"]
    return f"the function has more than one value: f(x) is {plain:.8g}, but {ways} {gives} {other:.8g}"


_WHAT = {"NaN": "NaN", "infinite": "infinity"}


def _not_finite(finding: Finding) -> str:
    what = "value" if finding.details.get("of_value") else "derivative"
    by = f"the {what} of {_at(finding)}" if finding.where or finding.operation else "an operation of JAX"
    beside = ", which meets a number that is NaN already" if finding.details.get("meets_nan") else ""
    mode, first = finding.details["mode"], _WHAT[finding.details["first"]]
    return f"the {mode} is not finite: first {first} in {by}{place(finding)}{beside}."


def _first_of_value(finding: Finding) -> str:
    first = finding.details["first"]
    return f": first {_WHAT[first]} in {_at(finding)}{steps(finding)}" if first else ""


def _narrow(finding: Finding) -> str:
    """That another precision would do, if it would."""
    dtype, lost = finding.details["dtype"], finding.details.get("lost")
    where = "here" if lost in (None, (finding.operation, finding.where)) else f"for `{lost[0]}` at {lost[1]}"
    return f" In float64 it is finite: {dtype} has too few digits {where}, or too small a range." if dtype else ""


def _smooth_here(finding: Finding) -> str:
    return f"{'The rule is at fault: the' if finding.details['of_rule'] else 'The'} function is smooth here"


def _unless_degenerate(otherwise: Callable[[Finding], str]) -> Callable[[Finding], str]:
    """Advice for a singularity, which is another one for the vectors of a degenerate space."""
    degenerate = (
        "where eigenvalues or singular values are equal, their vectors depend on the choice of a basis. What depends "
        "on the space as a whole (its projector, a sum over its values) has a derivative by `partgrad.safe.eigh` or "
        "`safe.svd`; a function of the matrix, such as its inverse or root, has one by `safe.matrix_function`, "
        "`jnp.linalg.pinv` or `solve`, and not by those"
    )
    return lambda finding: degenerate if finding.operation in ("eigh", "svd") else otherwise(finding)


def _make_smooth(finding: Finding) -> str:
    rule = "correct the rule, or " if finding.details["of_rule"] else ""
    return f"{rule}write the function so that each of its steps has a derivative"


def _index_outside(finding: Finding) -> str:
    details = finding.details
    index, length = details["index"], details["length"]
    # Negative indices do not get here: the program has already added the length.
    also = f" (or {index - length}, where negative ones count from the end)" if index < 0 else ""
    of = f"axis {details['axis']}, which has size {length}"
    return f"a {details['does']} at index {index}{also} is out of bounds for {of}{steps(finding)}."


def _held_by(finding: Finding) -> str:
    leaves = ", ".join(f"`{leaf}`" for leaf in finding.leaves if leaf) or "the argument"
    return f"{leaves} {'are' if len(finding.leaves) > 1 else 'is'} held by"


def _unexplained(finding: Finding) -> str:
    """What a conversion leaves to be said of the lost digits."""
    if finding.details["is_explained"]:
        return ""
    is_zero = finding.details["vanishes"]
    return ", which has nothing as small: it is zero" if is_zero else ", which has too few digits for it"


def _wider(finding: Finding) -> str:
    details = finding.details
    if details["is_explained"]:
        return f"none needed if {details['through']} is enough"
    if details["vanishes"]:
        return f"compute in {details['dtype']}, or scale the loss so that {details['through']} can hold its cotangents"
    return f"compute in {details['dtype']}, or rewrite what cancels"


def _in_search(finding: Finding) -> str:
    around = finding.chain[: placed(finding.chain)[2]] if finding.chain else ()
    return OF_SEARCH if any(equation.primitive.name in LOOPS for equation in around) else ""


def _where_digits_cancel(finding: Finding) -> str:
    if not finding.where:
        return ""
    return f" in {_at(finding)}" if finding.details["of_value"] else f" in the derivative of {finding.where}"


_PARTS: dict[str, Callable[[Finding], str]] = {
    "operation": lambda finding: finding.operation,
    "where": lambda finding: finding.where,
    "at": _at,
    "at_line": _at_line,
    "rule": _rule,
    "that_of_rule": lambda finding: f" (that of {_rule(finding)})" if finding.rule else "",
    "place": place,
    "most": _most,
    "compared": _compared,
    "sides": _sides,
    "both_sides": _both_sides,
    "both_modes": _both_modes,
    "changes": _changes,
    "of_value": lambda finding: "the value and " if finding.details["value"] else "",
    "are": lambda finding: "are" if finding.details["value"] else "is",
    "all_lines": lambda finding: ", ".join(finding.details.get("lines") or [finding.where]),
    "relative": lambda finding: f"{finding.figures.relative if finding.figures else 0:.1e}",
    "zero": _zero,
    "two_values": _two_values,
    "in_derivative": lambda finding: f" in the derivative of {_at(finding)}" if finding.operation else "",
    "not_finite": _not_finite,
    "first_of_value": _first_of_value,
    "narrow": _narrow,
    "smooth_here": _smooth_here,
    "make_smooth": _unless_degenerate(_make_smooth),
    "keep_away": _unless_degenerate(
        lambda finding: "keep the point away from it, or write the function so that it is smooth here"
    ),
    "index_outside": _index_outside,
    "held_by": _held_by,
    "wider": _wider,
    "untold": lambda finding: (
        "what differences still find wrong has a cause of its own"
        if finding.details.get("has_others")
        else "differences do not settle, so they cannot tell whether it is right"
    ),
    "unexplained": _unexplained,
    "where_digits_cancel": _where_digits_cancel,
    "in_search": _in_search,
    "outside_jax": lambda finding: f" It leaves JAX in {_at(finding)}." if finding.where else "",
}
