"""`where` with functions: each sees only operands that are selected for it."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..errors import ArgumentError


def where(pred: ArrayLike, true_fun: Callable[..., Any], false_fun: Callable[..., Any], /, *operands: Any) -> Any:
    """Select between two functions of the operands, each of which sees only the operands selected for it.

    This is `jnp.where(pred, true_fun(*operands), false_fun(*operands))`, with the derivatives of the selected function.
    In lanes that are not selected for it, a function sees the operands of the first lane that is, as constants. If no
    lane is selected for it, it sees ones everywhere.

    Lanes are the elements of `pred`. Functions must treat them separately: elementwise functions do, and so do those
    that mix elements along an axis that has size 1 in `pred`, such as
    `safe.where(use[:, None], lambda x: jnp.linalg.norm(x, axis=1, keepdims=True), ..., x)` for rows of `x`. A parameter
    that a function closes over is differentiated as well.

    Args:
        pred: A bool or an array of bools.
        true_fun: The function where `pred` is true.
        false_fun: The function where it is false.
        operands: Arrays, numbers or trees of them, that broadcast against `pred`.

    Returns:
        The selected results, as from `jax.numpy.where`: broadcast, and promoted to a common dtype. A tree if the
        functions return trees, which must have the same structure.

    Raises:
        ArgumentError: If a function is not callable, or the results have different structures.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> f = lambda x: safe.where(x > 0, jnp.log, lambda x: 0.0, x).sum()
        >>> print(jax.grad(f)(jnp.array([0.0, 2.0])))
        [0.  0.5]
    """
    for which, function in (("true_fun", true_fun), ("false_fun", false_fun)):
        if not callable(function):
            raise ArgumentError(
                f"`{which}` of `safe.where` is {type(function).__name__} {function!r:.60}, which is not callable.",
                "Expected a function of the operands.",
                fix="write safe.where(pred, lambda x: ..., lambda x: ..., x); for arrays that exist there is "
                "jnp.where.",
            )
    pred = jnp.asarray(pred).astype(bool)
    true, false = (
        function(*jax.tree.map(lambda x, chosen=chosen: _only(chosen, x), operands))
        for function, chosen in ((true_fun, pred), (false_fun, ~pred))
    )
    trees = jax.tree.structure(true), jax.tree.structure(false)
    if trees[0] != trees[1]:
        raise ArgumentError(
            "the functions of `safe.where` return trees of different structures.",
            f"`true_fun` returned {trees[0]!s:.200}, `false_fun` returned {trees[1]!s:.200}.",
            fix="return the same containers from both.",
        )
    return jax.tree.map(lambda t, f: jnp.where(pred, t, f), true, false)


def _only(chosen: jax.Array, x: Any) -> jax.Array:
    """Replace the elements that are not chosen with the first chosen one, as a constant."""
    x = jnp.asarray(x)
    shape = np.broadcast_shapes(chosen.shape, x.shape)
    x = jnp.broadcast_to(x, shape)
    if math.prod(shape) == 0:
        return x
    lanes = [axis for axis, n in enumerate(chosen.shape, len(shape) - chosen.ndim) if n > 1]
    front = jnp.moveaxis(jax.lax.stop_gradient(x), lanes, range(len(lanes)))
    rest = front.shape[len(lanes) :]
    first = jnp.take(front.reshape(-1, *rest), jnp.argmax(chosen.reshape(-1)), axis=0, mode="clip")
    if jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool:
        first = jnp.where(jnp.any(chosen), first, jnp.ones_like(first))
    return jnp.where(chosen, x, jnp.expand_dims(first, lanes))
