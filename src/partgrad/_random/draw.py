"""draw: the meaning of the gradient through a draw, stated where the draw is made."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import ordinary_custom_vjp, ordinary_name
from .._message import listed, near_misses
from .._programs import FIXED_DRAW, evaluate
from .._trees import refuse_uncallable
from ..errors import ArgumentError, DrawError
from .sampler import Drawing, is_parameter

_WORDS = ("pathwise", "fixed", "error", "score")

# The name of the value that carries a log-probability through a jaxpr, followed by the axes of the key, the number of
# drawn arrays and the description of the draw.
SCORE = "partgrad.draw|"


def draw(
    sampler: Callable[..., Any],
    key: Any,
    *args: Any,
    gradient: str = "pathwise",
    log_prob: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Draw from a sampler, and say what the gradient of the draw means.

    The values are always those of `sampler(key, *args, **kwargs)`. `gradient` decides the derivative with respect to
    the parameters of the distribution, whether they are arguments or values that the sampler closes over:

    - `"pathwise"`: JAX's own. The draw is a deterministic function of key and parameters, and is differentiated as one.
    - `"fixed"`: none. The number is drawn, then held.
    - `"error"`: a derivative through the parameters raises when it is traced. Otherwise the draw is silent. A tangent
      of explicit zeros, as in `jax.jvp(f, (p,), (0.0,))`, counts as a derivative.
    - `"score"`: the draw is held, and its log-probability enters the gradient of the enclosing `pg.expectation`.
      Differentiating it anywhere else raises.

    Args:
        sampler: A function from a key and parameters to an array or a tree of arrays: one from `jax.random`, the
            `sample` method of a distribution, or your own. The key is passed to its parameter named `key`, `rng_key`,
            `rng` or `seed`, else as its first argument.
        key: The key.
        *args: Further arguments of the sampler.
        gradient: One of the four words.
        log_prob: For `"score"`: a function of the draw and the sampler's `args` and `kwargs`, except those that the
            sampler calls `shape`, `sample_shape` or `dtype`, to the logarithm of the probability or of the density of
            the draw. Arrays are summed. The other words ignore it.
        **kwargs: Further keyword arguments of the sampler.

    Returns:
        What the sampler returns.

    Raises:
        ArgumentError: If the sampler is not a function, the word is not one of the four, or `"score"` has no
            `log_prob`.
        DrawError: When a derivative that `gradient` does not allow is traced; or if what `log_prob` returns is not the
            log-probability of the draw.

    Example:
        >>> import jax, partgrad as pg
        >>> key = jax.random.key(0)
        >>> scaled = lambda x, word: pg.draw(jax.random.uniform, key, maxval=x, gradient=word)
        >>> print(jax.grad(scaled)(10.0, "pathwise") * 10 == scaled(10.0, "pathwise"))
        True
        >>> print(jax.grad(scaled)(10.0, "fixed"))
        0.0
    """
    if gradient not in _WORDS:
        near = near_misses(gradient, _WORDS) if isinstance(gradient, str) else []
        raise ArgumentError(
            f"`draw` got gradient={gradient!r:.60}.",
            f"Expected one of {listed(map(repr, _WORDS))}.",
            fix=f"write gradient={near[0]!r}." if near else "write gradient='pathwise' for JAX's own derivative.",
        )
    refuse_uncallable("draw", sampler, "a sampler", "write partgrad.{0}(jax.random.normal, key, gradient='pathwise').")
    drawing = Drawing(sampler, key, args, kwargs)
    if gradient == "pathwise":
        return drawing.run()
    if gradient == "fixed":
        return _held(drawing)
    if gradient == "error":
        return _refusing(drawing)
    if log_prob is None:
        raise ArgumentError(
            f"`{drawing.name}` is drawn with gradient='score' and no `log_prob`.",
            f"At: {drawing.site}.",
            "Expected a function of the draw and the sampler's arguments to the log-probability of the draw.",
            fix="pass it: log_prob=jax.scipy.stats.bernoulli.logpmf, or log_prob=distribution.log_prob.",
        )
    return _scored(drawing, log_prob)


def _held(drawing: Drawing) -> Any:
    # The parameters too: the sampler may not be differentiable at all, like a callback to NumPy.
    held = drawing.changed(lambda parameter, _name: _stopped(parameter)).run()
    # The draw too: the sampler may close over parameters.
    return jax.tree.map(lambda leaf: _stopped(leaf) if is_parameter(leaf) else leaf, held)


def _stopped(value: Any) -> Any:
    with jax.named_scope(FIXED_DRAW):
        return lax.stop_gradient(value)


def _refusing(drawing: Drawing) -> Any:
    """A draw in which every parameter, closed over or not, refuses a tangent."""
    # Not the drawing itself, whose arguments may be tracers: JAX keeps the rule that raises the error.
    error = functools.partial(_differentiated, drawing.name, drawing.site)
    guard = lambda parameter, name: _guarded(parameter, functools.partial(error, name))
    try:
        staged, shape = jax.make_jaxpr(lambda: drawing.isolated().run(), return_shape=True)()
    except (TypeError, jax.errors.NonConcreteBooleanIndexError):
        # It cannot be traced, because of values it branches on or of what it returns. What it closes over stays unseen,
        # unless it reaches the draw.
        drawn = drawing.changed(lambda parameter, name: guard(parameter, f"`{name}`")).run()
        unseen = "a value that the sampler closes over"
        return jax.tree.map(lambda leaf: guard(leaf, unseen) if is_parameter(leaf) else leaf, drawn)
    consts = [guard(c, drawing.parameter_name(c)) if is_parameter(c) else c for c in staged.consts]
    return jax.tree.structure(shape).unflatten(evaluate(staged.jaxpr, consts, []))


def _differentiated(sampler: str, site: str, parameter: str) -> DrawError:
    return DrawError(
        f"`{sampler}` is drawn with gradient='error' and differentiated through {parameter}.",
        f"At: {site}.",
        "Expected no derivative through the parameters of this draw.",
        fix="write gradient='fixed' to hold the draw, 'pathwise' for JAX's own derivative, or 'score' inside "
        "`pg.expectation` for that of the mean.",
    )


def _guarded(value: Any, error: Callable[[], Exception]) -> Any:
    return _refusing_tangents(lambda value: value, error)(value)


def _refusing_tangents(function: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
    """The function, which raises if any of its arguments has a tangent or, when traced, may have one."""
    # Not a `custom_jvp`: partial evaluation of a scan replaces it with its body, and an outer derivative slips through.
    # `jax.jvp` calls the rule of a `custom_vjp` too.
    guarded = ordinary_custom_vjp(function)

    def forward(*args: Any) -> tuple[Any, None]:
        # JAX calls the rule only if one of them is perturbed.
        raise error()

    guarded.defvjp(forward, lambda _residuals, _cotangent: None, symbolic_zeros=True)
    return guarded


def _scored(drawing: Drawing, log_prob: Callable[..., Any]) -> Any:
    leaves, structure = jax.tree.flatten(_held(drawing))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
    values = [leaves[i] for i in positions]
    total = _total(drawing, drawing.log_prob_of(log_prob, structure.unflatten(leaves)), values)
    key = drawing.key if isinstance(drawing.key, jax.Array) else None
    label = f"{SCORE}{'' if key is None else key.ndim}|{len(values)}|`{drawing.name}` at {drawing.site}"
    error = functools.partial(_outside, drawing.name, drawing.site)
    for i, value in zip(positions, _tagged(label, error, total, key, values, drawing.parameters()), strict=True):
        leaves[i] = value
    return structure.unflatten(leaves)


def _outside(sampler: str, site: str) -> DrawError:
    return DrawError(
        f"`{sampler}` is drawn with gradient='score' and differentiated outside `pg.expectation`.",
        f"At: {site}.",
        "Expected the expectation between the draw and the derivative: only the mean has this gradient.",
        fix="differentiate the expectation, jax.grad(pg.expectation(f, samples=100), argnums=1)(key, params), also "
        "where this is a derivative inside `f`.",
    )


def _total(drawing: Drawing, log_probability: Any, values: list[Any]) -> Any:
    """The log-probability as a single number."""
    parts = [jnp.asarray(part) for part in jax.tree.leaves(log_probability)]
    sizes = [sum(part.size for part in parts), sum(np.size(value) for value in values)]
    if not parts or not all(jnp.issubdtype(part.dtype, jnp.floating) for part in parts) or sizes[0] > sizes[1]:
        found = [f"{part.dtype}{list(part.shape)}" for part in parts]
        raise DrawError(
            f"The `log_prob` of `{drawing.name}` does not return the log-probability of the draw.",
            f"At: {drawing.site}.",
            f"Expected a real floating array of at most {sizes[1]} elements, one for each number drawn; got "
            f"{listed(found) or 'no array'}.",
            fix="check that draw and parameters broadcast to the shape of the draw.",
        )
    return sum(map(jnp.sum, parts), start=jnp.zeros((), parts[0].dtype))


def _tagged(
    label: str, error: Callable[[], Exception], total: Any, key: Any, values: list[Any], parameters: list[Any]
) -> list[Any]:
    """The drawn values, through an equation that carries their log-probability and refuses to be differentiated."""

    def tag(total: Any, key: Any, values: list[Any], parameters: list[Any]) -> list[Any]:
        # The values must depend on the log-probability, or dead code elimination removes it from a jaxpr.
        marked = ordinary_name(total, label) > 0
        return [lax.select_n(marked, value, value) for value in values]

    return list(_refusing_tangents(tag, error)(total, key, values, parameters))
