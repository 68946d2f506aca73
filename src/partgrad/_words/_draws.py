"""The words of errors about random draws and expectations."""

from collections.abc import Sequence

from .._message import listed, near_misses, word
from ..errors import ArgumentError, DrawError


def draw_word(found: object, known: Sequence[str]) -> ArgumentError:
    """Word the error for a `gradient=` that is none of the words."""
    near = near_misses(found, known) if isinstance(found, str) else []
    return ArgumentError(
        word(
            f"`draw` got gradient={found!r:.60}.",
            f"Expected one of {listed(map(repr, known))}.",
            fix=f"write gradient={near[0]!r}." if near else "write gradient='pathwise' for JAX's own derivative.",
        )
    )


def draw_differentiated(sampler: str, site: str, parameter: str) -> DrawError:
    """Word the error for a derivative through a draw with `gradient="error"`."""
    return DrawError(
        word(
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
        word(
            f"`{sampler}` is drawn with gradient='score' and no `log_prob`.",
            f"At: {site}.",
            "Expected a function of the draw and the sampler's arguments to the log-probability of the draw.",
            fix="pass it: log_prob=jax.scipy.stats.bernoulli.logpmf, or log_prob=distribution.log_prob.",
        )
    )


def score_outside(sampler: str, site: str) -> DrawError:
    """Word the error for a derivative that reaches a score draw before its expectation is taken."""
    return DrawError(
        word(
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
        word(
            f"{draw} is drawn with gradient='score' inside {places.get(primitive, rule)}.",
            "Expected draws where `pg.expectation` can count them: in calls, vmap, scan, cond and checkpoints.",
            fix=fix.get(primitive, "draw outside of it and pass the draw in."),
        )
    )


def score_shared_key(draw: str) -> DrawError:
    """Word the error for score draws under `vmap` that are not independent."""
    return DrawError(
        word(
            f"{draw} is drawn with gradient='score' under `vmap` with one key for all elements.",
            "Expected independent draws, hence a key for each: with one key the gradient is biased.",
            fix="map over keys as well: jax.vmap(draw_one)(jax.random.split(key, n), params).",
        )
    )


def score_independent(draw: str) -> DrawError:
    """Word the error for a log-probability that does not see what is differentiated."""
    return DrawError(
        word(
            f"{draw} is drawn with gradient='score', and its `log_prob` does not depend on what is differentiated.",
            "Expected the log-probability as a function of the parameters that the sampler gets; its gradient is zero.",
            fix="compute it from those parameters, without stop_gradient; or write gradient='fixed' for a zero.",
        )
    )


def not_a_log_probability(sampler: str, site: str, found: Sequence[str], drawn: int) -> DrawError:
    """Word the error for a `log_prob` that returns something else."""
    return DrawError(
        word(
            f"The `log_prob` of `{sampler}` does not return the log-probability of the draw.",
            f"At: {site}.",
            f"Expected a real floating array of at most {drawn} elements, one for each number drawn; got "
            f"{listed(found) or 'no array'}.",
            fix="check that draw and parameters broadcast to the shape of the draw.",
        )
    )


def no_mean(dtype: object) -> DrawError:
    """Word the error for an output of which there is no mean."""
    return DrawError(
        word(
            f"The function given to `expectation` returns {dtype}, which has no mean.",
            "Expected arrays of numbers or bools.",
            fix="return what is to be averaged, a number.",
        )
    )


def not_a_count(name: str, found: object) -> ArgumentError:
    """Word the error for a count that is none."""
    return ArgumentError(
        word(
            f"`{name}` is {type(found).__name__} {found!r:.60}.",
            "Expected a positive integer, known when the function is built.",
            fix=f"write {name}=100.",
        )
    )
