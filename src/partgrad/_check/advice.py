"""What a finding advises that was not tried, in words."""

from collections.abc import Callable
from typing import Any, TypeAlias

# That of `finding.py`, which asks for its advice here.
Finding: TypeAlias = Any

_SCORE = "draw with `partgrad.draw(..., gradient='score', log_prob=...)` in a `partgrad.expectation`"
_REBUILT = "build the model in the function with `partgrad.Diff` around this field, or by `dataclasses.replace`"


def suggestion(finding: Finding) -> str:
    """Advice that was not tried; empty if there is a fix, or nothing to do."""
    if finding.fix is not None or finding.intended:
        return ""
    advice = _ADVICE.get((finding.kind, finding.reason), "")
    return advice if isinstance(advice, str) else advice(finding)


def _of_singular(finding: Finding) -> str:
    return (
        f"`{finding.details['by']}` has a derivative by convention, and it makes this one finite; differences cannot "
        "tell whether it is the one you want"
    )


_DEGENERATE = (
    "where eigenvalues or singular values are equal, their vectors depend on the choice of a basis, and only a "
    "function that treats the space as a whole has a derivative: that of `partgrad.safe.eigh`, `safe.svd` or "
    "`safe.matrix_function`"
)

_ADVICE: dict[tuple[str, str], str | Callable[[Finding], str]] = {
    ("value", "rule"): "return from the rule what the function itself returns",
    ("value", "python"): "compute the same value in every mode",
    ("value", "open marks"): (
        "differentiate inside it with `partgrad.grad`, or pass `partgrad.partition(model)[0]` to other transforms and "
        "solvers"
    ),
    ("value", "numpy"): "call the function of `jax.numpy`, or `jax.pure_callback` with a custom rule",
    ("value", "branch"): "write `jnp.where` or `jax.lax.cond`, or make static whatever decides",
    ("mismatch", "rule"): "correct the rule",
    ("mismatch", "rule value"): "correct the rule",
    ("mismatch", "removable"): (
        "give that branch the slope of the points beside it (a series term instead of a constant), or write a custom "
        "rule"
    ),
    ("mismatch", "smooth tie"): "write it without that tie, or write a custom rule",
    ("mismatch", "unknown rule"): "look at that rule",
    ("mismatch", "closed over"): "pass that value as an argument of the function that has the rule",
    ("mismatch", "modes"): "look at the derivative rules on its path",
    ("mismatch", "unexplained"): "look at the rules and the `stop_gradient`s on its path",
    ("mismatch", "symmetric"): "pass (a + a.T) / 2, unless the matrix stays symmetric anyway",
    ("mismatch", "stop"): "remove it, unless it is intentional",
    ("mismatch", "mark"): _REBUILT,
    ("mismatch", "no loop"): "write a loop of a known number of steps (`jax.lax.scan`), or a custom rule",
    ("nan", "value"): "make the value finite first; no gradient is meaningful there",
    ("nan", "not taken"): lambda f: (
        f"differentiate `{f.details['by']}`: its derivative is finite, and differences do not settle, so they cannot "
        "tell whether it is right"
    ),
    ("nan", "singular"): _of_singular,
    ("nan", "rounding"): "rewrite what cancels or overflows, or compute it in a wider type",
    ("nan", "refuted"): "give that branch the slope of the points beside it, or write a custom rule",
    ("nan", "no remedy"): lambda f: (
        _DEGENERATE
        if f.operation in ("eigh", "svd")
        else "keep the point away from it, or write the function so that it is smooth here"
    ),
    ("nan", "smooth"): lambda f: (
        _DEGENERATE
        if f.operation in ("eigh", "svd")
        else f"{'correct the rule, or ' if f.details['of_rule'] else ''}write the function so that each of its "
        "steps has a derivative"
    ),
    ("nan", "rule"): "correct that rule",
    ("oob", "disagrees"): (
        "correct the index; or differentiate `partgrad.consistent_indexing(f)`, whose gradient agrees with the value"
    ),
    **dict.fromkeys(
        (("oob", reason) for reason in ("moved", "clipped", "filled", "dropped", "value only")),
        "correct the index, unless that is intended",
    ),
    ("zero", "no path"): "use it, or mark it NonDiff",
    ("zero", "mark"): f"if it is to be fitted, {_REBUILT}",
    ("zero", "fixed draw"): "",
    ("zero", "stop"): "remove it, if the leaf is to be fitted",
    ("zero", "compared"): "choose smoothly, for example with a sigmoid",
    ("zero", "rounded"): "leave the rounding out of what is differentiated",
    ("zero", "cast"): "leave the cast out of what is differentiated",
    ("zero", "integers"): "choose smoothly, for example with a softmax",
    ("zero", "saturated"): "scale its operands",
    ("zero", "rule"): "start elsewhere",
    ("zero", "not chosen"): "start where it is selected, or choose smoothly",
    ("zero", "left out"): "use it, or mark it NonDiff",
    ("draw", "discrete"): f"{_SCORE}, or write gradient='fixed' if the zero is intended",
    ("draw", "biased"): "another sampler, or an estimate by the score",
    ("draw", "decision"): f"{_SCORE}, or write gradient='fixed' if the zero is intended",
    ("tie", "tie"): "another point, unless any slope between the two will do",
    ("tie", "kink"): "another point, unless any slope between the two will do",
    ("jump", "jump"): "check another point",
    ("noise", "noise"): "check another point",
    ("precision", "narrow"): lambda f: (
        f"none needed if {f.details['through']} is enough"
        if f.details["is_explained"]
        else f"compute in {f.details['dtype']}, or rewrite what cancels"
    ),
    ("precision", "cancels"): "rewrite what cancels, or compute it in a wider type",
    ("precision", "unconverged"): "tighten its tolerance, or take more steps, if that is not enough",
    ("nondeterminism", "runs"): "pass in what changes, such as a key, as an argument",
    ("intended", "stale"): "correct the name, or remove it so that it hides nothing later",
}
