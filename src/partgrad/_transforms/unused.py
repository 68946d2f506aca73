"""`unused=`: which leaves the output of a function depends on differentiably, according to the traced derivative.

JAX has removed symbolic zeros and `stop_gradient` from a traced derivative, so a leaf whose tangent no longer reaches
the output is unused whatever the values are. The rules of `custom_vjp` show only in reverse mode, where a second trace
follows the cotangent to the leaves.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._programs import CONSTANT, any_equation, dependencies, is_mutating, is_reverse_only, jaxpr_and_consts


def used_leaves(function: Callable[[list[Any]], Any], selected: list[Any]) -> list[bool]:
    """Tell for each floating or complex leaf whether the output can depend on it differentiably.

    Structure decides, not values: a leaf multiplied by 0.0 is used, and one behind `stop_gradient` is not. Nothing is
    computed unless the function branches in Python on the values of its leaves; then it runs once or twice, and the
    answer holds for the branches it took.
    """
    try:
        jaxpr, shape = _staged(_linear_map, function, selected, selected)
    except NotImplementedError:  # JAX 0.10
        # The `custom_vjp` of `jax_custom_vjp3` has a reverse mode only.
        return _reached_in_reverse(function, selected, _like_output(function, selected))
    count = len(selected)
    if any_equation(jaxpr, is_mutating):
        return [True] * count
    sources = [CONSTANT] * (len(jaxpr.invars) - count) + [2 << i for i in range(count)]
    reaching = functools.reduce(operator.or_, dependencies(jaxpr, sources), 0)
    used = [bool(reaching & source) for source in sources[-count:]] if count else []
    if any(used) and any_equation(jaxpr, is_reverse_only):
        used = list(map(operator.and_, used, _reached_in_reverse(function, selected, shape)))
    return used


def _like_output(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:  # JAX 0.10
    try:
        return jax.eval_shape(function, leaves)
    except jax.errors.ConcretizationTypeError:
        return function(leaves)


def _linear_map(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Callable[[Any], Any]:
    # Not `jax.jvp`, which refuses `custom_vjp`.
    linear: Callable[[Any], Any] = jax.linearize(function, leaves)[1]
    return linear


def _pullback(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Callable[[Any], Any]:
    pullback: Callable[[Any], Any] = jax.vjp(function, leaves)[1]
    return lambda cotangent: pullback(cotangent)[0]


def _staged(derivative: Callable[..., Any], function: Any, leaves: list[Any], argument: Any) -> tuple[Any, Any]:
    """The jaxpr of a derivative at some leaves, whose last inputs are the argument; and the shape of its output."""
    try:
        closed, shape = jax.make_jaxpr(lambda at, v: derivative(function, at)(v), return_shape=True)(leaves, argument)
    except jax.errors.ConcretizationTypeError:
        # Branching in Python on a leaf may be legal: `jax.grad` outside `jit` knows the values.
        # As arrays, so that a leaf of value zero is no literal zero in the jaxpr.
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        closed, shape = jax.make_jaxpr(derivative(function, arrays), return_shape=True)(argument)
    return jaxpr_and_consts(closed)[0], shape


def _reached_in_reverse(function: Callable[[list[Any]], Any], selected: list[Any], shape: Any) -> list[bool]:
    """Tell for each leaf whether its cotangent is anything but a structural zero."""
    try:
        jaxpr, _ = _staged(_pullback, function, selected, shape)
    except ValueError:
        # Reverse mode does not apply to the function (a `while_loop`, for example): only the linear map can tell.
        return [True] * len(selected)
    if any_equation(jaxpr, is_mutating):
        return [True] * len(selected)
    # A rule may ignore its cotangent and return a constant: that is a gradient, hence used.
    return [bool(mask) for mask in dependencies(jaxpr, [CONSTANT] * (len(jaxpr.invars) - 1) + [2])]
