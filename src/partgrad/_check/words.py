"""What a finding says, in words: the only place where there are sentences. Nothing reads them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .advice import suggestion

# Those of `finding.py`, which asks for its sentences here.
Finding: TypeAlias = Any
Figures: TypeAlias = Any


def message(finding: Finding) -> str:
    """What was found, and the fix or the suggestion."""
    said = _SAID[finding.kind, finding.reason](finding)
    said = f"{_moved(finding)}{said}{_after(finding)}"
    said = f"intended: {said}" if finding.intended else said
    if finding.fix is not None:
        return f"{said} Fix: {_fix(finding)}."
    advice = suggestion(finding)
    return f"{said} Suggestion: {advice}." if advice else said


def _moved(finding: Finding) -> str:
    """How the point of a search differs from the given one."""
    moved = finding.details.get("moved") or {}
    steps = [f"{_leaf(path)} from {_short(before)} to {_short(after)}" for path, (before, after) in moved.items()]
    return f"at a point nearby, which moves {', '.join(steps)}: " if steps else ""


def _after(finding: Finding) -> str:
    """Which named value comes before the operation."""
    after = finding.details.get("after")
    return f" What `{finding.operation}` takes there is computed from the value named `{after}`." if after else ""


def _leaf(path: str) -> str:
    return f"`{path}`" if path else "it"


def _short(value: Any) -> str:
    """A number or an array in a few words."""
    text = np.array2string(np.asarray(value), precision=4, threshold=6, edgeitems=2, separator=", ")
    return " ".join(text.split())


def _fix(finding: Finding) -> str:
    fix = finding.fix
    assert fix is not None
    what = f"differentiate `{fix.by}`" if fix.replaces == "f" else f"write `{fix.by}` for `{fix.replaces}`"
    beside = "between the slopes on the two sides" if fix.slope is None else f"and differences give {number(fix.slope)}"
    return f"{what}; tried: along a random direction its derivative is {number(fix.derivative)}, {beside}"


# --- parts of sentences ----------------------------------------------------------------------------------------------


def number(value: complex, noise: float = 0.0) -> str:
    """A number, without negative zeros and without digits that are noise."""
    exact = abs(value) / noise if noise > 0 else np.inf
    digits = int(np.clip(np.log10(exact), 2, 6)) if np.isfinite(value) and 0 < exact < np.inf else 6
    return f"{value + 0.0:.{digits}g}"


def _at(finding: Finding) -> str:
    """The operation and its line."""
    by = f"`{finding.operation}`" if finding.operation.isprintable() and finding.operation else "an operation"
    return f"{by} at {finding.where}" if finding.where else by


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


def _compared(figures: Figures | None, finding: Finding) -> str:
    """What the derivative is, and what the differences give."""
    if figures is None:
        return "the derivative is wrong"
    tolerance = 1e-6 * max(abs(figures.slope), abs(figures.derivative), 1e-300)
    off = lambda value: value is not None and not abs(value - figures.slope) <= tolerance
    wrong = "the gradient" if off(figures.reverse) and not off(figures.forward) and figures.forward is not None else ""
    wrong = wrong or ("the gradient" if figures.forward is None else "")
    wrong = wrong or ("the forward derivative" if figures.reverse is None or not off(figures.reverse) else "")
    where = f" in element {list(figures.element)}" if figures.element else ""
    along = "" if figures.element is not None or not _is_direction(finding) else " along a sampled direction"
    beside = ", at a point nearby (this one is at a kink)" if figures.nearby else ""
    got, meant = number(figures.derivative), number(figures.slope)
    return f"{wrong or 'the derivative'} is wrong{along}: it is {got}{where}, and differences give {meant}{beside}"


def _is_direction(finding: Finding) -> bool:
    return finding.figures is not None and finding.figures.element is None


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


def _lines(finding: Finding) -> str:
    lines = finding.details.get("lines") or [finding.where]
    return ", ".join(lines)


def _way(finding: Finding) -> str:
    ways = {"jit": "`jax.jit(f)`", "vjp": "the value in `jax.value_and_grad`"}
    return ", ".join(ways[way] for way in finding.details["ways"])


def _values(finding: Finding) -> str:
    details = finding.details
    plain, other = number8(details["plain"]), number8(details["other"])
    return f"the function has more than one value: f(x) is {plain}, but {_way(finding)} gives {other}"


def number8(value: complex) -> str:
    """A number with eight digits, for values that are nearly equal."""
    return f"{value:.8g}"


def _first(finding: Finding) -> str:
    by = f"the derivative of {_at(finding)}" if finding.where or finding.operation else "an operation of JAX"
    return f"the {finding.details['mode']} is not finite: first {finding.details['first']} in {by}{place(finding)}."


def _first_value(finding: Finding) -> str:
    first = finding.details["first"]
    return f": first {first} in {_at(finding)}{steps(finding)}" if first else ""


def _narrow(finding: Finding) -> str:
    """That another precision would do, if it would."""
    dtype, lost = finding.details["dtype"], finding.details.get("lost")
    where = "here" if lost in (None, (finding.operation, finding.where)) else f"for `{lost[0]}` at {lost[1]}"
    return f" In float64 it is finite: {dtype} has too few digits {where}, or too small a range." if dtype else ""


def _index(finding: Finding) -> str:
    details = finding.details
    index, length = details["index"], details["length"]
    # Negative indices do not get here: the program has already added the length.
    also = f" (or {index - length}, where negative ones count from the end)" if index < 0 else ""
    of = f"axis {details['axis']}, which has size {length}"
    return f"a {details['does']} at index {index}{also} is out of bounds for {of}{steps(finding)}."


def _zero(text: str) -> Callable[[Finding], str]:
    return lambda f: f"the gradient is zero: {text.format(at=_at(f), place=place(f), **_named(f))}."


def _named(finding: Finding) -> dict[str, Any]:
    leaves = ", ".join(f"`{leaf}`" for leaf in finding.leaves if leaf) or "the argument"
    return {"leaf": leaves, "is": "are" if len(finding.leaves) > 1 else "is", **_plain(finding)}


def _plain(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in finding.details.items() if name.isidentifier()}


def _draw(text: str) -> Callable[[Finding], str]:
    return lambda f: f"the draw of `{f.operation}` depends on it, and its gradient is {text}."


def _stopped(finding: Finding, by: str) -> str:
    figures = finding.figures
    numbers = (
        ""
        if figures is None
        else (f"the gradient is {number(figures.derivative)} where the function changes by {number(figures.slope)}; ")
    )
    return f"{numbers}{by}, and without that the two agree."


_SAID: dict[tuple[str, str], Callable[[Finding], str]] = {
    ("value", "rule"): lambda f: f"{_values(f)}; the rule of {_rule(f)}, computes another value.",
    ("value", "python"): lambda f: (
        f"{_values(f)}; Python takes another path while it is traced, or a rule detects that."
    ),
    ("value", "open marks"): lambda f: (
        f"the function depends on whether marks are open: it is {number8(f.details['plain'])} with the marks open that "
        f"`wrt` names, and {number8(f.details['other'])} otherwise."
    ),
    ("value", "numpy"): lambda f: (
        "the function passes traced values to NumPy or other code outside JAX, which cannot differentiate them; only "
        f"its gradient was computed ({f.details['error']})."
    ),
    ("value", "branch"): lambda f: (
        "the function needs the value of a traced array, as in `if x > 0`, so neither `jit` nor a full check can run "
        f"it; only its gradient was computed ({f.details['error']})."
    ),
    ("mismatch", "rule"): lambda f: (
        f"{_compared(f.figures, f)}; the rule of {_rule(f)}, is not the derivative of its function{_most(f)}."
    ),
    ("mismatch", "rule value"): lambda f: (
        f"{_compared(f.figures, f)}; the rule of {_rule(f)}, computes another value than its function{place(f)}."
    ),
    ("mismatch", "removable"): lambda f: (
        f"{_compared(f.figures, f)}; {_both_sides(f)}{_at(f)} decides here, and JAX differentiates the branch it takes."
    ),
    ("mismatch", "smooth tie"): lambda f: (
        f"{_compared(f.figures, f)}; {_both_sides(f)}{_at(f)} is at a tie, and what JAX does there does not "
        "add up to it."
    ),
    ("mismatch", "unknown rule"): lambda f: (
        f"{_compared(f.figures, f)}; on its path is the rule of {_rule(f)}, which cannot be compared with its function "
        f"({f.details['raised']})."
    ),
    ("mismatch", "closed over"): lambda f: (
        f"{_compared(f.figures, f)}; the rule of {_rule(f)}, closes over a value that is differentiated, and so gives "
        "no derivative by it."
    ),
    ("mismatch", "modes"): lambda f: (
        "forward and reverse mode contradict each other: they give "
        f"{number(f.figures.forward or 0)} and {number(f.figures.reverse or 0)}."
        if f.figures
        else "forward and reverse mode contradict each other."
    ),
    ("mismatch", "unexplained"): lambda f: f"{_compared(f.figures, f)}; no custom rule is to blame.",
    ("mismatch", "symmetric"): lambda f: (
        f"the derivative of {_at(f)} is that of a symmetric matrix, and this one is moved element by element; for "
        "symmetric changes the two agree."
    ),
    ("mismatch", "stop"): lambda f: _stopped(f, f"`stop_gradient` at {_lines(f)} stops part of it"),
    ("mismatch", "mark"): lambda f: _stopped(f, f"{_named(f)['leaf']} {_named(f)['is']} held by {f.details['mark']}"),
    ("mismatch", "fixed draw"): lambda f: _stopped(f, f"the draw at {f.where} has gradient='fixed'"),
    ("mismatch", "no loop"): lambda f: (
        f"reverse mode does not exist for the `while` loop at {f.where}, so there is no gradient; the forward "
        "derivative was checked."
    ),
    ("mismatch", "no reverse"): lambda f: (
        f"reverse mode raises {f.details['error']}{f' in the derivative of {_at(f)}' if f.operation else ''}, so there "
        f"is no gradient: {f.details['text']}"
    ),
    ("nan", "value"): lambda f: f"the value of the function is not finite{_first_value(f)}.{_narrow(f)}",
    ("nan", "not taken"): lambda f: f"{_first(f)} The value does not take this path.",
    ("nan", "singular"): lambda f: f"{_first(f)} The value takes this path, and the operation has no derivative here.",
    ("nan", "refuted"): lambda f: (
        f"{_first(f)} The value does not take this path; without it the derivative would be "
        f"{number(f.details['got'])}, and differences give {number(f.details['expected'])}: the function is smooth "
        "here, and the branch it takes does not have its slope."
    ),
    ("nan", "rounding"): lambda f: f"{_first(f)}{_narrow(f)}",
    ("nan", "no remedy"): lambda f: f"{_first(f)} The value takes this path: a true singularity.",
    ("nan", "smooth"): lambda f: (
        f"{_first(f)} {'The rule is at fault: the' if f.details['of_rule'] else 'The'} function is smooth here, and "
        f"differences give a slope of {number(f.details['slope'])}."
    ),
    ("nan", "rule"): lambda f: (
        f"the {f.details['mode']} is not finite, and no operation on its way made it so: a derivative rule returns it, "
        f"whatever it is given{f', that of {_rule(f)}' if f.rule else ''}."
    ),
    ("oob", "disagrees"): lambda f: f"{_index(f)} The gradient disagrees with the value because of it.",
    ("oob", "moved"): lambda f: f"{_index(f)} It is moved inside, in both the value and the derivative.",
    ("oob", "clipped"): lambda f: f"{_index(f)} It is clipped, in both the value and the derivative.",
    ("oob", "filled"): lambda f: f"{_index(f)} It is filled, in both the value and the derivative.",
    ("oob", "dropped"): lambda f: f"{_index(f)} It is dropped, in both the value and the derivative.",
    ("oob", "value only"): lambda f: f"{_index(f)} No leaf's derivative goes through it, only the value.",
    ("zero", "no path"): lambda f: "no path to the output: the value of the function does not depend on it.",
    ("zero", "mark"): _zero("{leaf} {is} held by {mark}"),
    ("zero", "fixed draw"): lambda f: f"the gradient is zero: the draw at {f.where} has gradient='fixed'.",
    ("zero", "stop"): _zero("{at} stops it"),
    ("zero", "compared"): _zero("it is only compared, by {at}"),
    ("zero", "rounded"): _zero("{at} rounds it to steps"),
    ("zero", "cast"): _zero("{at} casts it to {dtype}"),
    ("zero", "integers"): _zero("{at} turns it into integers"),
    ("zero", "saturated"): _zero("{at} is saturated{place}"),
    ("zero", "rule"): _zero("the derivative of {at} is zero for all of its operands{place}"),
    ("zero", "not chosen"): _zero("{at} selects a value that does not depend on it{place}"),
    ("zero", "left out"): _zero("{at} selects elements that do not depend on it{place}"),
    ("zero", "truly zero"): lambda f: (
        f"the gradient is truly zero here: the derivative of {_at(f)} is zero at this point{place(f)}."
    ),
    ("zero", "cancels"): lambda f: "the gradient is zero here: its terms cancel, or a factor is zero.",
    ("zero", "rounding"): lambda f: "the gradient is zero up to rounding errors: its terms cancel.",
    ("zero", "elements"): lambda f: (
        f"the gradient is zero in {f.details['dead']:,} of its {f.details['size']:,} elements."
    ),
    ("draw", "discrete"): _draw("silently zero: what it draws is discrete"),
    ("draw", "biased"): _draw("biased: the choice of one of two roots has none"),
    ("draw", "implicit"): _draw("implicit: right on average, and not compared at a fixed key"),
    ("draw", "pathwise"): _draw("pathwise: that of the draw at a fixed key"),
    ("draw", "score"): lambda f: (
        f"what is drawn at {f.where} stays as it is, and its logarithmic probability is differentiated in its place: "
        "an estimate by the score, right on average and not at a fixed key."
    ),
    ("draw", "decision"): lambda f: (
        f"together with a random draw it decides {_at(f)}, whose gradient is silently zero."
    ),
    ("draw", "straight-through"): lambda f: (
        f"together with a random draw it decides {_at(f)}, whose gradient is zero; a `stop_gradient` beside it puts "
        "another gradient in its place (straight-through)."
    ),
    ("draw", "threshold"): lambda f: (
        f"together with a random draw it decides {_at(f)}, whose gradient is zero. If the alternatives agree there, "
        "all is well."
    ),
    ("tie", "tie"): lambda f: f"the point is on a kink, where {_at(f)} changes{place(f)}{_sides(f)}, a convention.",
    ("tie", "kink"): lambda f: f"the point is on a kink{_sides(f)}, a convention.",
    ("tie", "convention"): lambda f: f"the point is on a kink of {_at(f)}{_sides(f)}, its convention.",
    ("jump", "jump"): lambda f: (
        f"the point is on a jump, where {_at(f)} changes{place(f)}: the value jumps, so no slope says whether the "
        "gradient is right."
    ),
    ("noise", "noise"): lambda f: (
        "differences do not settle, so they neither confirm nor refute the gradient: the function is noise at small "
        "steps, or raises or is not finite beside the point."
    ),
    ("precision", "narrow"): lambda f: (
        f"the gradient in {f.details['dtype']} has a relative error of {f.details['error']:.1e}; it goes through "
        f"{f.details['through']}{f' at {f.where}' if f.where else ''}"
        f"{'' if f.details['is_explained'] else ', which alone does not explain as much'}."
    ),
    ("precision", "cancels"): lambda f: (
        f"the gradient in {f.details['dtype']} has a relative error of {f.details['error']:.1e}: digits cancel"
        f"{'' if not f.where else f' in {_at(f)}' if f.details['of_value'] else f' in its derivative, at {f.where}'}."
    ),
    ("precision", "constants"): lambda f: (
        f"derivative and differences disagree by {f.figures.relative if f.figures else 0:.1e}, which constants of low "
        "precision may explain."
    ),
    ("precision", "unconverged"): lambda f: (
        f"derivative and differences disagree by {f.figures.relative if f.figures else 0:.1e}: the derivative of "
        f"{_at(f)} is that of a limit, which its iteration has not reached."
    ),
    ("nondeterminism", "runs"): lambda f: (
        f"two runs of {f.details['way']} at the same point differ by {f.details['difference']:.2g}, so no derivative "
        f"can be compared with anything.{f' It leaves JAX in {_at(f)}.' if f.where else ''}"
    ),
    ("nondeterminism", "rounding"): lambda f: (
        f"two runs at the same point differ by {f.details['difference']:.1e}, within rounding: sums do not always run "
        "in the same order."
    ),
    ("intended", "stale"): lambda f: f"`intended` names `{f.details['entry']:.60}`, but no finding matches it.",
}
