"""The sentences of findings: what is said of each kind and reason, and what is advised.

Nothing reads them. Words in braces are details of the finding, or parts that `words.py` makes of it.
"""

_SCORE = "draw with `partgrad.draw(..., gradient='score', log_prob=...)` in a `partgrad.expectation`"
_REBUILT = "build the model in the function with `partgrad.Diff` around this field, or by `dataclasses.replace`"
_INDEX = "correct the index, unless that is intended"
_OTHER_POINT = "check another point"
_KINK = "another point, unless any slope between the two will do"
_ZERO = "the gradient is zero: "
_DECLARED = "the derivative of {at} is that of {smooth}, as declared{declared}"
_APART = "At this point the values of the two are up to {error:.3g} apart."
# Beside what decides in a loop.
OF_SEARCH = "; if it decides a search for a root, `jax.lax.custom_root` can differentiate what that solves"
_DRAW = "the draw of `{operation}` depends on it, and its gradient is "

# By kind and reason: what is said, and what is advised if no fix was found.
SENTENCES: dict[tuple[str, str], tuple[str, str]] = {
    ("value", "rule"): (
        "{two_values}; the rule of {rule}, computes another value.",
        "return from the rule what the function itself returns",
    ),
    ("value", "python"): (
        "{two_values}; Python takes another path while it is traced, or a rule detects that.",
        "compute the same value in every mode",
    ),
    ("value", "open marks"): (
        "the function depends on whether marks are open: it is {plain:.8g} with the marks open that `wrt` names, and "
        "{other:.8g} otherwise.",
        "differentiate inside it with `partgrad.grad`, or pass `partgrad.partition(model)[0]` to other transforms and "
        "solvers",
    ),
    ("value", "numpy"): (
        "the function passes traced values to NumPy or other code outside JAX, which cannot differentiate them; only "
        "its gradient was computed ({error}).",
        "call the function of `jax.numpy`, or `jax.pure_callback` with a custom rule",
    ),
    ("value", "branch"): (
        "the function needs the value of a traced array, as in `if x > 0`, so neither `jit` nor a full check can run "
        "it; only its gradient was computed ({error}).",
        "write `jnp.where` or `jax.lax.cond`, or make static whatever decides",
    ),
    ("mismatch", "rule"): (
        "{compared}; the rule of {rule}, is not the derivative of its function{most}.",
        "correct the rule",
    ),
    ("mismatch", "rule value"): (
        "{compared}; the rule of {rule}, computes another value than its function{place}.",
        "correct the rule",
    ),
    ("mismatch", "rule within"): (
        "the rule of `{outer}` is intended, and uses the rule of {rule}, which is not the derivative of its "
        "function{most}.",
        "correct that rule",
    ),
    ("mismatch", "removable"): (
        "{compared}; {both_sides}{at} decides here, and JAX differentiates the branch it takes.",
        "give that branch the slope of the points beside it (a series term instead of a constant), or write a custom "
        "rule",
    ),
    ("mismatch", "smooth tie"): (
        "{compared}; {both_sides}{at} is at a tie, and what JAX does there does not add up to it.",
        "write it without that tie, or write a custom rule",
    ),
    ("mismatch", "unknown rule"): (
        "{compared}; on its path is the rule of {rule}, which cannot be compared with its function ({raised}).",
        "look at that rule",
    ),
    ("mismatch", "solve"): (
        "{compared}; on its path is {at}, whose derivative is right only if its result solves the equations, and these "
        "are symmetric where that is promised.",
        "look at that solve",
    ),
    ("mismatch", "root"): (
        "{compared}; on its path is {at}, whose derivative is right only if it finds a root, and its `tangent_solve` "
        "solves linear equations.",
        "look at its `tangent_solve`",
    ),
    ("mismatch", "transpose"): (
        "{compared}; on its path is {at}, whose gradient is right only if the second function that it was given is the "
        "transpose of the first.",
        "look at that function",
    ),
    ("mismatch", "solver"): (
        "{compared}; on its path is {at}, whose derivative is made of that of the function that it solves.",
        "look at the rules and the `stop_gradient`s in that function",
    ),
    ("mismatch", "untried stop"): (
        "{compared}; on its path is {at}, and what it takes away cannot be tried.",
        "remove it, unless it is intentional",
    ),
    ("mismatch", "closed over"): (
        "{compared}; the rule of {rule}, closes over a value that is differentiated, and so gives no derivative by it.",
        "pass that value as an argument of the function that has the rule",
    ),
    ("mismatch", "twice"): (
        "{compared}; {at} promises unique indices, and index {index} occurs twice.",
        "leave out `unique_indices=True`",
    ),
    ("mismatch", "not unique"): (
        "{at} promises unique indices, and index {index} occurs twice: value and gradient are undefined, even where "
        "they agree, as on this device.",
        "leave out `unique_indices=True`",
    ),
    ("mismatch", "modes"): (
        "forward and reverse mode contradict each other{both_modes}.",
        "look at the derivative rules on its path",
    ),
    ("mismatch", "unexplained"): (
        "{compared}; no custom rule on its path differs from the derivative of its function.",
        "look at the rules and the `stop_gradient`s on its path",
    ),
    ("mismatch", "symmetric"): (
        "the derivative of {at} is that of a symmetric matrix, and this one is moved element by element; for symmetric "
        "changes the two agree.",
        "pass (a + a.T) / 2, unless the matrix stays symmetric anyway",
    ),
    ("mismatch", "stairs"): (
        "{changes}part of that goes through {at}, by steps that have no derivative.",
        f"choose smoothly, or leave out the rounding{OF_SEARCH}",
    ),
    ("mismatch", "stop"): (
        "{changes}`stop_gradient` at {all_lines} stops part of it, and without that the two agree.",
        "remove it, unless it is intentional",
    ),
    ("mismatch", "stopped draw"): (
        "`stop_gradient` at {all_lines} stops the implicit derivative of a draw, so the gradient lacks that part.",
        "remove it, unless it is intentional",
    ),
    ("mismatch", "stop beside"): (
        "`stop_gradient` at {all_lines} stops another part of the derivative.",
        "remove it, unless it is intentional",
    ),
    ("mismatch", "rule stop"): (
        "{changes}the rule of {rule}, gives no derivative at all.",
        "correct the rule, unless it is intentional",
    ),
    ("mismatch", "mark"): ("{changes}{held_by} {mark}, and without that the two agree.", _REBUILT),
    ("mismatch", "fixed draw"): (
        "{changes}the draw at {where} has gradient='fixed', and without that the two agree.",
        "",
    ),
    ("mismatch", "no loop"): (
        "reverse mode does not exist for the `while` loop at {where}, so there is no gradient; the forward derivative "
        "was checked.",
        "write a loop of a known number of steps (`jax.lax.scan`), or a custom rule",
    ),
    ("mismatch", "no reverse"): ("reverse mode raises {error}{in_derivative}, so there is no gradient: {text}", ""),
    ("nan", "states"): (
        "{of_value}the gradient {are} not finite at {bad} of the {states} states that were kept; there was no "
        "time to look for the cause, or no way.",
        "give it more time, --gradients-seconds and --gradients-total (--seconds and --total for a script)",
    ),
    ("nan", "value"): (
        "the value of the function is not finite{first_of_value}.{narrow}",
        "make the value finite first; no gradient is meaningful there",
    ),
    ("nan", "written"): (
        "the value of the function is infinite because the function says so: {at} selects an infinity. No gradient is "
        "meaningful there.",
        "check a point where the value is finite",
    ),
    ("nan", "not taken"): (
        "{not_finite} The value does not take this path.",
        "differentiate `{by}`: its derivative is finite, and {untold}",
    ),
    ("nan", "beside"): (
        "{not_finite} The value does not take this path.",
        "differentiate `partgrad.double_where(f)`, and fix the singularity{others}: the value takes that path",
    ),
    ("nan", "singular"): (
        "{not_finite} The value takes this path, and the operation has no derivative here.",
        "`{by}` has a derivative by convention, and it makes this one finite; differences cannot tell whether it is "
        "the one you want",
    ),
    ("nan", "refuted"): (
        "{not_finite} The value does not take this path; without it the derivative would be {got:.6g}, and differences "
        "give {expected:.6g}: the function is smooth here, and the branch it takes does not have its slope.",
        "give that branch the slope of the points beside it, or write a custom rule",
    ),
    ("nan", "rounding"): (
        "{not_finite}{narrow}",
        "rewrite what cancels or overflows, or compute it in a wider type",
    ),
    ("nan", "no remedy"): ("{not_finite} The value takes this path: a true singularity.", "{keep_away}"),
    ("nan", "edge"): (
        "{not_finite} The function is finite on one side of the point only, where differences give a slope of "
        "{slope:.6g}.",
        "keep the point away from the edge, or write the function so that it is smooth here",
    ),
    ("nan", "smooth"): ("{not_finite} {smooth_here}, and differences give a slope of {slope:.6g}.", "{make_smooth}"),
    ("nan", "rule"): (
        "the {mode} is not finite, but no operation produced that: a derivative rule{that_of_rule} returns NaN or "
        "infinity for any input.",
        "correct that rule",
    ),
    ("oob", "disagrees"): (
        "{index_outside} The gradient disagrees with the value because of it.",
        "correct the index; or differentiate `partgrad.consistent_indexing(f)`, whose gradient agrees with the value",
    ),
    ("oob", "moved"): ("{index_outside} It is moved inside, in both the value and the derivative.", _INDEX),
    ("oob", "clipped"): ("{index_outside} It is clipped, in both the value and the derivative.", _INDEX),
    ("oob", "filled"): ("{index_outside} It is filled, in both the value and the derivative.", _INDEX),
    ("oob", "dropped"): ("{index_outside} It is dropped, in both the value and the derivative.", _INDEX),
    ("oob", "value only"): ("{index_outside} No leaf's derivative goes through it, only the value.", _INDEX),
    ("zero", "no path"): (
        "no path to the output: the value of the function does not depend on it.",
        "use it, or mark it NonDiff",
    ),
    ("zero", "mark"): (_ZERO + "{held_by} {mark}.", f"if it is to be fitted, {_REBUILT}"),
    ("zero", "fixed draw"): (_ZERO + "the draw at {where} has gradient='fixed'.", ""),
    ("zero", "stop"): (_ZERO + "{at} stops it.", "remove it, if the leaf is to be fitted"),
    ("zero", "surrogate"): (
        _ZERO
        + "the surrogate called at {where} depends on it, and its smooth function, whose derivative counts, does not.",
        "let `smooth` depend on it too, or mark it NonDiff",
    ),
    ("zero", "compared"): (
        "{zero}it is only compared, by {at}.",
        "choose smoothly, for example with a sigmoid{in_search}",
    ),
    ("zero", "rounded"): ("{zero}{at} rounds it to steps.", "leave the rounding out of what is differentiated"),
    ("zero", "cast"): ("{zero}{at} casts it to {dtype}.", "leave the cast out of what is differentiated"),
    ("zero", "integers"): ("{zero}{at} turns it into integers.", "choose smoothly, for example with a softmax"),
    ("zero", "saturated"): (_ZERO + "{at} is saturated{place}.", "scale its operands"),
    ("zero", "rule"): (
        _ZERO + "the derivative of {at} by what depends on it is zero{place}.",
        "start elsewhere",
    ),
    ("zero", "not chosen"): (
        _ZERO + "{at} selects a value that does not depend on it{place}.",
        "start where it is selected, or choose smoothly",
    ),
    ("zero", "left out"): (
        _ZERO + "{at} selects elements that do not depend on it{place}.",
        "use it, or mark it NonDiff",
    ),
    ("zero", "truly zero"): (
        "the gradient is truly zero here: the derivative of {at} is zero at this point{place}.",
        "",
    ),
    ("zero", "underflow"): (
        "the gradient is zero because {dtype} has nothing as small: in float64 its size is {size:.1e}.",
        "scale what is small{at_line}, or compute it in a wider type",
    ),
    ("zero", "cancels"): ("the gradient is zero here: its terms cancel, or a factor is zero.", ""),
    ("zero", "rounding"): ("the gradient is zero up to rounding errors: its terms cancel.", ""),
    ("zero", "elements"): ("the gradient is zero in {dead:,} of its {size:,} elements.", ""),
    ("zero", "partly"): (
        "a part of it goes through {at}, by steps at which the value jumps: the gradient is that of the rest.",
        "if the steps are to count too, take them by `partgrad.surrogate`",
    ),
    ("draw", "discrete"): (
        _DRAW + "silently zero: what it draws is discrete.",
        f"{_SCORE}, or write gradient='fixed' if the zero is intended",
    ),
    ("draw", "biased"): (
        _DRAW + "biased: the choice of one of two roots has none.",
        "another sampler, or an estimate by the score",
    ),
    ("draw", "implicit"): (_DRAW + "implicit: right on average, and not compared at a fixed key.", ""),
    ("draw", "pathwise"): (_DRAW + "pathwise: that of the draw at a fixed key.", ""),
    ("draw", "score"): (
        "what is drawn at {where} stays as it is, and its logarithmic probability is differentiated in its place: an "
        "estimate by the score, right on average and not at a fixed key.",
        "",
    ),
    ("draw", "decision"): (
        "together with a random draw it decides {at}, whose gradient is silently zero.",
        f"{_SCORE}, or write gradient='fixed' if the zero is intended",
    ),
    ("draw", "straight-through"): (
        "together with a random draw it decides {at}, whose gradient is zero; a `stop_gradient` beside it puts another "
        "gradient in its place (straight-through).",
        "",
    ),
    ("draw", "threshold"): (
        "together with a random draw it decides {at}, whose gradient is zero; the value was not seen to jump there.",
        "",
    ),
    ("mismatch", "outside"): (
        "the point is on a kink, where {at} changes{sides}, which is not between them.",
        "check another point, or write the function so that it is smooth here",
    ),
    ("tie", "tie"): ("the point is on a kink, where {at} changes{place}{sides}, a convention.", _KINK),
    ("tie", "kink"): ("the point is on a kink{sides}, a convention.", _KINK),
    ("tie", "convention"): ("the point is on a kink of {at}{sides}, its convention.", ""),
    ("jump", "jump"): (
        "the point is on a jump, where {at} changes{place}: the value jumps, so no slope says whether the gradient is "
        "right.",
        _OTHER_POINT,
    ),
    ("noise", "noise"): (
        "differences do not settle, so they neither confirm nor refute the gradient: the slope is infinite, or the "
        "function is noise at small steps.",
        _OTHER_POINT,
    ),
    ("noise", "beside"): (
        "the function is not finite beside the point, or raises an error there, so differences neither confirm nor "
        "refute the gradient.",
        _OTHER_POINT,
    ),
    ("growth", "loop"): (
        "along the loop at {where}, tangents grow by a factor of {factor:.4g} a step (a Lyapunov exponent of "
        "{rate:.3g}) for {steps_of_loop} steps, and rounding errors with them: no gradient in {dtype} is meaningful "
        "there.",
        "shorten the horizon, or cut the loop into segments with `jax.lax.stop_gradient` between them",
    ),
    ("surrogate", "declared"): (_DECLARED + ", and differences of that agree with it. " + _APART, ""),
    ("surrogate", "undecided"): (_DECLARED + ". " + _APART, ""),
    ("surrogate", "not finite"): (
        _DECLARED + ", whose value is not finite here: nothing can be compared with its derivative.",
        "write a smooth function that is finite wherever the exact one is",
    ),
    ("precision", "narrow"): (
        "the gradient in {dtype} has a relative error of {error:.1e}; it goes through {through}{at_line}{unexplained}.",
        "{wider}",
    ),
    ("precision", "not finite"): (
        "in float64 the derivative is not finite{at_line}: what {dtype} gives is made of rounding errors.",
        "keep the point away from the singularity, or write the function so that it is smooth here",
    ),
    ("precision", "cancels"): (
        "the gradient in {dtype} has a relative error of {error:.1e}: digits cancel{where_digits_cancel}.",
        "rewrite what cancels, or compute it in a wider type",
    ),
    ("precision", "decides"): (
        "the gradient in {dtype} has a relative error of {error:.1e}: {at} decides otherwise than in float64, because "
        "of digits that were lost before.",
        "compare what has not lost them, as `x**2 > 0` in place of `1 + x**2 > 1`, or compute it in a wider type",
    ),
    ("precision", "constants"): (
        "derivative and differences disagree by {relative}, which constants of low precision may explain.",
        "",
    ),
    ("precision", "unconverged"): (
        "derivative and differences disagree by {relative}: the derivative of {at} is exact in the limit of many steps "
        "or small tolerances, which is not reached.",
        "take more steps, or tighten the tolerance, if it has to be more exact",
    ),
    ("nondeterminism", "runs"): (
        "two runs of {way} at the same point differ by {difference:.2g}, so no derivative can be compared with "
        "anything.{outside_jax}",
        "pass in what changes, such as a key, as an argument",
    ),
    ("nondeterminism", "rounding"): (
        "two runs at the same point differ by {difference:.1e}, within rounding: sums do not always run in the same "
        "order.",
        "",
    ),
    ("intended", "stale"): (
        "`intended` names `{entry:.60}`, but no finding matches it.",
        "correct the name, or remove it so that it hides nothing later",
    ),
}
