"""Maps from coordinates to values: what a user gives as one, read into three functions."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from .._marks import StaticData
from .._programs import is_elementwise
from .._trees import function_name, is_array, written
from ..errors import ArgumentError

# A longer representation says less than the name of the class.
_LONGEST = 40


class Map(NamedTuple):
    """A map with its inverse.

    Attributes:
        forward: From the coordinate to the value.
        inverse: From the value to the coordinate.
        log_det: From the coordinate to the logarithm of the absolute determinant of the derivative; None if the map
            does not say.
        words: What it is called in a message.
    """

    forward: Callable[[Any], Any]
    inverse: Callable[[Any], Any]
    log_det: Callable[[Any], Any] | None
    words: str


def bijection_of(given: Any) -> Any:
    """What has the functions of a map: that of a constraint of numpyro, or what was given."""
    constraints = sys.modules.get("numpyro.distributions.constraints")
    if constraints is not None and isinstance(given, constraints.Constraint):
        from numpyro.distributions import biject_to

        return biject_to(given)
    return given


def as_map(given: Any) -> Map | None:
    """Read a map; None if it is none.

    The interfaces are those of the public libraries of bijections. Each says how many trailing axes of its argument
    are one event, and gives one logarithm for each event.
    """
    has = lambda *names: all(callable(getattr(given, name, None)) for name in names)
    if isinstance(given, type):
        return None
    if type(given) in (tuple, list):
        if len(given) not in (2, 3) or not all(map(callable, given)):
            return None
        log_det = None if len(given) == 2 else _summed(given[2])
        return Map(given[0], given[1], log_det, f"({', '.join(function_name(own) or '...' for own in given)})")
    # A representation with an address would tell equal maps apart.
    words = written(given) if len(written(given)) <= _LONGEST and "<" not in written(given) else type(given).__name__
    if has("__call__", "inv", "log_abs_det_jacobian"):
        # numpyro.
        axes = given.domain.event_dim
        log_det = lambda x: _broadcast_sum(given.log_abs_det_jacobian(x, given(x)), x, axes)
        return Map(given, given.inv, log_det, type(given).__name__)
    if has("forward", "inverse"):
        log_det = None
        if has("forward_log_det_jacobian"):
            log_det = _summed(given.forward_log_det_jacobian)
            if hasattr(given, "forward_min_event_ndims"):
                # TensorFlow Probability, which leaves out axes along which the logarithm is constant unless it is told.
                log_det = lambda x: given.forward_log_det_jacobian(x, event_ndims=jnp.ndim(x))
            elif hasattr(given, "event_ndims_in"):
                # distrax.
                log_det = lambda x: _broadcast_sum(given.forward_log_det_jacobian(x), x, given.event_ndims_in)
        return Map(given.forward, given.inverse, log_det, words)
    if has("transform", "inverse", "transform_and_log_det"):
        # flowjax.
        return Map(given.transform, given.inverse, _summed(lambda x: given.transform_and_log_det(x)[1]), words)
    return None


def taken_apart(bijections: Sequence[Any]) -> tuple[StaticData, list[Any]]:
    """Bijections as what the compiler may compare, and their arrays, which may be traced."""
    leaves, treedef = jax.tree.flatten(list(bijections))
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]
    others = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    return StaticData((treedef, others), "A map of `partgrad.unconstrain`"), arrays


def maps_of(static: StaticData, arrays: Sequence[Any]) -> list[Map]:
    """The maps of bijections that were taken apart."""
    treedef, others = static.constant
    leaves = [array if other is None else other for array, other in zip(arrays, others, strict=True)]
    return [cast(Map, as_map(bijection)) for bijection in treedef.unflatten(leaves)]


def keeps_elements(forward: Callable[[Any], Any], x: Any) -> bool:
    """Whether each element of the value depends on that element of the coordinate alone."""
    return is_elementwise(jax.make_jaxpr(forward)(x).jaxpr)


def log_det_of(own: Map, x: Any, path: str) -> jax.Array:
    """The logarithm of the absolute determinant of the derivative of a map at a coordinate."""
    if own.log_det is not None:
        return own.log_det(x)
    if not keeps_elements(own.forward, x) or jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
        raise ArgumentError(
            f"The map {own.words} of `{path}` does not say its determinant.",
            "Expected a map that takes each element by itself, whose determinant is the product of its derivatives; or "
            "one that gives the logarithm of its determinant.",
            fix="give it as a third function, (forward, inverse, log_det), which takes the coordinate; or take a "
            "bijector of numpyro or another library.",
        )
    slope = jax.jvp(own.forward, (x,), (jnp.ones_like(x),))[1]
    return jnp.log(jnp.abs(slope)).sum()


def _summed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jnp.sum(function(x))


def _broadcast_sum(per_event: Any, x: Any, axes: int) -> jax.Array:
    """The sum over all events, each of which has some trailing axes of the coordinate."""
    shape = jnp.shape(x)
    return jnp.broadcast_to(per_event, shape[: len(shape) - axes]).sum()
