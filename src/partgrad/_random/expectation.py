"""expectation: the mean of a random function, with an unbiased gradient through discrete draws too."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn

from .._programs import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_JVPS,
    CUSTOM_VJPS,
    Chain,
    Operands,
    Run,
    custom_rule_body,
    inner_jaxprs,
    is_recomputed,
    jaxpr_and_consts,
    name_of,
    reenter,
    rewritten,
    run,
)
from .._trees import refuse_uncallable
from ..errors import ArgumentError, DrawError
from .draw import SCORE

P = ParamSpec("P")
_ENTERED = CALLS | CHECKPOINTS | {"scan", "cond"}


def expectation(f: Callable[P, Any], *, samples: int) -> Callable[P, Any]:
    """Create a function that estimates the expectation of a random function as the mean of independent samples.

    The value is the mean of `f(k, *args)` over `samples` keys split from the key. Its derivatives, of any order and in
    either mode, are unbiased estimates of those of the expectation: through `pg.draw(..., gradient="score")` by the
    score function, with the mean of the other samples as baseline, and through everything else by JAX's own rules. So
    a `"pathwise"` draw is right where its sampler is (see the page on random functions), a `"fixed"` one has no
    derivative, and the kinds may be mixed, in `jit`, `vmap`, `scan`, `cond` and `jax.checkpoint`.

    Draws with `"score"` must have independent keys. They may not be inside a `while` loop, a custom derivative rule or
    `shard_map`, or be differentiated by a `jax.grad` inside `f`: these raise. Using one key twice, or a key that is not
    derived from the one given to `f`, does not raise, but the gradient is biased.

    Args:
        f: A traceable function of a key and any further arguments that returns a scalar, an array or a tree of arrays.
        samples: The number of samples, which are run with `vmap`. A single sample has no baseline.

    Returns:
        A function of a key and the arguments of `f` that returns the mean of each output, with the output's shape and
        dtype. Integers and bools become floating-point numbers.

    Raises:
        ArgumentError: If `samples` is not a positive integer.
        DrawError: If a `"score"` draw is where its gradient would be wrong, when the function is called; or if its
            `log_prob` does not depend on what is differentiated, when the derivative is traced.

    Example:
        >>> import jax, partgrad as pg
        >>> from jax.scipy.stats import bernoulli
        >>> def f(key, p):
        ...     heads = pg.draw(jax.random.bernoulli, key, p, gradient="score", log_prob=bernoulli.logpmf)
        ...     return jax.numpy.where(heads, 3.0, 1.0)
        >>> mean = pg.expectation(f, samples=10_000)
        >>> value, slope = jax.value_and_grad(mean, argnums=1)(jax.random.key(0), 0.3)
        >>> print(f"{value:.1f} {slope:.1f}")
        1.6 2.0

    References:
        Williams (1992), Machine Learning 8, 229, for the score function; Kool, van Hoof and Welling (2019), Buy 4
        REINFORCE samples, get a baseline for free, for the baseline; Foerster et al. (2018), DiCE, arXiv:1802.05098,
        section 4, for the factor that makes derivatives of every order unbiased.
    """
    refuse_uncallable("expectation", f)
    if isinstance(samples, bool) or not hasattr(samples, "__index__") or samples < 1:
        raise ArgumentError(
            f"`samples` is {type(samples).__name__} {samples!r:.60}.",
            "Expected a positive integer, known when the function is built.",
            fix="write samples=100.",
        )
    count = samples.__index__()
    # The zero is replaced with the log-probability of what `f` draws.
    scored = rewritten(lambda *args, **kwargs: (f(*args, **kwargs), jnp.zeros(())), _with_scores)

    @functools.wraps(f, updated=())
    def estimate(key: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, scores = jax.vmap(lambda key: scored(key, *args, **kwargs))(jax.random.split(key, count))
        return jax.tree.map(lambda samples: _mean(samples, scores), outputs)

    return cast(Callable[P, Any], estimate)


def _mean(samples: Any, scores: Any) -> Any:
    """The mean over the first axis, whose derivatives account for the log-probability of each sample.

    With box = exp(score - stop_gradient(score)), which is one, it is the mean of sample * box + baseline * (1 - box).
    """
    if not (jnp.issubdtype(samples.dtype, jnp.number) or samples.dtype == bool):
        raise DrawError(
            f"The function given to `expectation` returns {samples.dtype}, which has no mean.",
            "Expected arrays of numbers or bools.",
            fix="return what is to be averaged, a number.",
        )
    if not jnp.issubdtype(samples.dtype, jnp.inexact):
        samples = samples.astype(float)
    count = len(samples)
    box_minus_one = jnp.expm1(scores - lax.stop_gradient(scores)).astype(jnp.finfo(samples.dtype).dtype)
    box_minus_one = box_minus_one.reshape(count, *(1,) * (samples.ndim - 1))
    held = lax.stop_gradient(samples)
    others = held - (held - jnp.mean(held, 0)) * (count / (count - 1)) if count > 1 else jnp.zeros_like(held)
    return jnp.mean(samples + _zero_times(box_minus_one, samples - others), 0)


def _zero_times(zero: Any, factor: Any) -> Any:
    """The product of a zero that has derivatives and a factor; if the factor is infinite, so are its derivatives."""
    # A plain product would turn the mean of infinite samples into NaN.
    finite = jnp.isfinite(factor)
    return jnp.where(finite, zero * jnp.where(finite, factor, 0), jnp.sqrt(jnp.where(finite, 1, zero)))


def _with_scores(jaxpr: Jaxpr) -> Run:
    def scored(consts: Operands, operands: Operands, _: Any) -> Operands:
        *outputs, _, score = _with_score(jaxpr, consts, operands)
        return [*outputs, score]

    return scored


def _with_score(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
    """The outputs of a jaxpr, followed by the log-probability of everything that was drawn."""
    scores = [jnp.zeros((), float)]

    def rule(chain: Chain, given: Operands) -> Operands:
        equation = chain[-1]
        tag = _tag_of(equation)
        if tag is not None:
            scores.append(_score(tag, given).astype(float))
            body, body_consts = jaxpr_and_consts(custom_rule_body(equation))
            # Without the name: an outer expectation must not find it again.
            return run(body, body_consts, given, lambda _chain, named: named, wanted=_is_tag)
        _refuse_hidden(equation)
        entered = reenter(equation, given, _with_score)
        assert entered is not None
        *results, score = entered
        # A scan has stacked the tags of its steps.
        scores.append(jnp.sum(score).astype(float))
        return results

    outputs = run(jaxpr, consts, operands, rule, wanted=_is_tag)
    return [*outputs, sum(scores[1:], start=scores[0])]


def _is_tag(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "name" and name_of(equation).startswith(SCORE)


def _tag_of(equation: JaxprEqn) -> JaxprEqn | None:
    """The tag in an equation that `draw` made."""
    if equation.primitive.name not in CUSTOM_VJPS:
        return None
    return next((inner for body in inner_jaxprs(equation) for inner in body.eqns if _is_tag(inner)), None)


def _score(tag: JaxprEqn, given: Operands) -> Any:
    key_axes, values, text = name_of(tag).removeprefix(SCORE).split("|", 2)
    score, *rest = given
    if key_axes and jnp.ndim(rest[0]) - int(key_axes) < jnp.ndim(score):
        raise DrawError(
            f"{text} is drawn with gradient='score' under `vmap` with one key for all elements.",
            "Expected independent draws, hence a key for each: with one key the gradient is biased.",
            fix="map over keys as well: jax.vmap(draw_one)(jax.random.split(key, n), params).",
        )
    parameters = rest[bool(key_axes) + int(values) :]
    return jnp.sum(_depending(score, parameters, lambda: _independent(text))).astype(float)


def _independent(draw: str) -> DrawError:
    return DrawError(
        f"{draw} is drawn with gradient='score', and its `log_prob` does not depend on what is differentiated.",
        "Expected the log-probability as a function of the parameters that the sampler gets; its gradient is zero.",
        fix="compute it from those parameters, without stop_gradient; or write gradient='fixed' for a zero.",
    )


def _depending(score: Any, parameters: list[Any], error: Callable[[], Exception]) -> Any:
    """A log-probability that must not be constant if a parameter of the draw is not."""
    checked = jax.custom_jvp(lambda score, parameters: score)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        is_zero = [isinstance(tangent, SymbolicZero) for tangent in jax.tree.leaves(tangents)]
        if is_zero[0] and not all(is_zero):
            raise error()
        return checked(*primals), tangents[0]

    checked.defjvp(rule, symbolic_zeros=True)
    return checked(score, parameters)


# Where a draw cannot be counted, or would be counted twice, and what to do instead.
_HIDDEN = {
    "while": ("a `while` loop", "write the loop as `jax.lax.scan`, with a `jax.lax.cond` in each step."),
    "shard_map": ("`shard_map`", "draw outside it and pass the draw in."),
    "custom rule": ("a custom derivative rule", "draw outside it and pass the draw in."),
    "checkpoint differentiated": (
        "a checkpoint that a derivative inside the function runs again",
        "leave out the `jax.checkpoint` around the draw, or draw outside it.",
    ),
}


def _refuse_hidden(equation: JaxprEqn) -> None:
    """Refuse a draw inside something that would hide it, or run it twice."""
    name = equation.primitive.name
    again = name in CHECKPOINTS and is_recomputed(equation)
    if name not in _ENTERED or again:
        text = name_of(_first_tag(equation)).rsplit("|", 1)[-1]
        kind = "checkpoint differentiated" if again else "custom rule" if name.startswith("custom_") else name
        place, fix = _HIDDEN.get(kind, (f"`{name}`", "draw outside it and pass the draw in."))
        if name in CUSTOM_JVPS:
            fix += (
                " `pg.double_where` makes such a rule: put it around `pg.expectation`, or around the part of the "
                "function that follows the draw."
            )
        raise DrawError(
            f"{text} is drawn with gradient='score' inside {place}.",
            "Expected draws where `pg.expectation` can count them: in calls, vmap, scan, cond and checkpoints.",
            fix=fix,
        )


def _first_tag(equation: JaxprEqn) -> Any:
    if _is_tag(equation):
        return equation
    equations = (inner for body in inner_jaxprs(equation) for inner in body.eqns)
    return next(filter(None, map(_first_tag, equations)), None)
