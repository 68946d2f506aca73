"""capture_intermediates and intervene: read and replace values inside a function."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp

from .._trees import refuse_uncallable
from ..errors import ArgumentError
from .program import Program
from .sites import by_name

P = ParamSpec("P")
R = TypeVar("R")


def capture_intermediates(f: Callable[P, R], name: str = "*") -> Callable[P, tuple[R, dict[str, Any]]]:
    """Create a function that returns, beside the output of `f`, the values that `f` names inside.

    A value has a name if `f` computes it as `x = jax.ad_checkpoint.checkpoint_name(x, "x")`.

    Args:
        f: A function that JAX can trace.
        name: The name, or a glob, such as `"block*"`. By default all names.

    Returns:
        A function with the same arguments that returns `(output, values)`: `values` is a dict by name, in the order of
        the program. A name that occurs more than once has a tuple. In a `scan` or `map` the values of all steps are
        stacked along a new first axis, in a `while` there is that of the last step, in a `shard_map` those of
        different devices are stacked, and in a branch that was not taken there are zeros.

    Raises:
        NoMatchError: When called, if `f` names no such value.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def f(x):
        ...     return 3.0 * checkpoint_name(x**2, "square")
        >>> output, values = pg.capture_intermediates(f, "square")(jnp.float32(2.0))
        >>> print(output, values["square"])
        12.0 4.0
    """
    refuse_uncallable("capture_intermediates", f, "the function", "write partgrad.{0}(f, 'h').")
    _refuse_no_name("capture_intermediates", name)

    @functools.wraps(f, updated=())
    def captured(*args: P.args, **kwargs: P.kwargs) -> tuple[R, dict[str, Any]]:
        program = Program(f, args, kwargs)
        wanted, sites = program.sites(name)
        output, values = program.visited(wanted, lambda _, value, __: value, [None] * len(sites))
        found = by_name(wanted, sites, values)
        return output, found if wanted.is_glob else {name: found}

    return captured


def intervene(f: Callable[P, R], changes: Mapping[str, Callable[[Any], Any]]) -> Callable[P, R]:
    """Create a function that is `f` with some of the values that it names replaced.

    Everything that `f` computes from the value follows, and so do derivatives of the result, which end at the value if
    the change is `jax.lax.stop_gradient`. Intervene first and differentiate then: a derivative that `f` itself takes is
    part of its program, and stays that of the function as it was.

    Args:
        f: A function that JAX can trace.
        changes: For each name or glob the function from the value to the one that takes its place, of the same shape
            and dtype. In a loop it is applied in every step, under `jax.vmap` inside `f` to all lanes at once. If
            several match a name, they are applied one after the other.

    Returns:
        A function with the same arguments and outputs.

    Raises:
        NoMatchError: When called, if `f` names no such value.
        ArgumentError: When called, if a change returns another shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def f(x):
        ...     return jnp.sum(x * checkpoint_name(jnp.sin(x), "sine"))
        >>> cut = pg.intervene(f, {"sine": jax.lax.stop_gradient})
        >>> print(jax.grad(cut)(jnp.zeros(2)))
        [0. 0.]
        >>> patched = pg.intervene(f, {"sine": lambda sine: sine.at[0].set(2.0)})
        >>> print(patched(jnp.ones(2)) == 2.0 + jnp.sin(1.0))
        True
    """
    refuse_uncallable("intervene", f, "the function", "write partgrad.{0}(f, {{'h': change}}).")
    if not isinstance(changes, Mapping) or not changes or not all(map(callable, changes.values())):
        raise ArgumentError(
            f"`partgrad.intervene` got {type(changes).__name__} {changes!r:.60} as changes.",
            "Expected a dict from names to functions.",
            fix=f"write {{{_first_name(changes)!r}: lambda h: new}}, with a value of the shape and dtype of `h`.",
        )
    for name in changes:
        _refuse_no_name("intervene", name)

    changed = f
    for name, change in changes.items():
        changed = _changed(changed, name, change)
    return changed


def _changed(f: Callable[..., Any], pattern: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def replacement(name: str, value: Any, _: Any) -> Any:
        new = change(value)
        shape, dtype = jnp.shape(new), jnp.result_type(new)
        if shape != value.shape or dtype != value.dtype:
            raise ArgumentError(
                f"The change of `{name}` returns another kind of value.",
                f"Expected {value.dtype}{list(value.shape)}, got {dtype}{list(shape)}.",
                fix="return an array of the same shape and dtype: jnp.broadcast_to(new, h.shape).astype(h.dtype).",
            )
        return jnp.asarray(new)

    @functools.wraps(f, updated=())
    def intervened(*args: Any, **kwargs: Any) -> Any:
        program = Program(f, args, kwargs)
        wanted, sites = program.sites(pattern)
        return program.visited(wanted, replacement, [None] * len(sites))[0]

    return intervened


def _refuse_no_name(transform: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f"`partgrad.{transform}` got {type(name).__name__} {name!r:.60} as a name.",
            "Expected a name that jax.ad_checkpoint.checkpoint_name gives, or a glob.",
            fix="write 'h', or 'block*' for all names that begin so.",
        )


def _first_name(changes: Any) -> str:
    return next(iter(changes), "h") if isinstance(changes, Mapping) else "h"
