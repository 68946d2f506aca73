"""The selector of values inside a function, which are leaves of no tree."""

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import SelectorTypeError


class Intermediate:
    """What `intermediate` returns: `wrt=` of a transform, and of nothing else.

    Attributes:
        name: The name, or a glob.
        reduce: The function of a cotangent that takes its place; None for the cotangent itself.
    """

    def __init__(self, name: str, reduce: Callable[[Any], Any] | None = None):
        if not isinstance(name, str) or not name:
            raise SelectorTypeError(
                f"`partgrad.intermediate` got {type(name).__name__} {name!r:.60}.",
                "Expected a name that jax.ad_checkpoint.checkpoint_name gives, or a glob.",
                fix="write partgrad.intermediate('h'), or 'block*' for all names that begin so.",
            )
        if reduce is not None and not callable(reduce):
            raise SelectorTypeError(
                f"`partgrad.intermediate` got {type(reduce).__name__} {reduce!r:.60} as `reduce`.",
                "Expected a function of a cotangent, or None for the cotangent itself.",
                fix=f"write partgrad.intermediate({name!r}, reduce=jax.numpy.linalg.norm).",
            )
        self.name, self.reduce = name, reduce

    def __repr__(self) -> str:
        reduce = "" if self.reduce is None else f", reduce={getattr(self.reduce, '__name__', repr(self.reduce))}"
        return f"intermediate({self.name!r}{reduce})"

    def _refuse(self, *_: Any) -> NoReturn:
        raise SelectorTypeError(
            f"{self!r} is combined with another selector.",
            "A value inside a function is no part of an argument, so there is nothing to join it with.",
            fix="write a glob for several names, partgrad.intermediate('block*').",
        )

    __or__ = __ror__ = __and__ = __rand__ = __sub__ = __rsub__ = __invert__ = _refuse


def intermediate(name: str, reduce: Callable[[Any], Any] | None = None) -> Intermediate:
    """Select a value that the function names inside, by `x = jax.ad_checkpoint.checkpoint_name(x, "x")`.

    The derivative with respect to it treats the value as an input: everything computed from it follows, and nothing
    else. Every transform takes it as `wrt`, alone or in a dict beside parts of the first argument: one backward pass
    gives both.

    With `reduce`, the cotangent is reduced in the backward pass, where it is made, so that only the result is kept: a
    norm, a maximum, a histogram. What comes back is `reduce` of the derivative that there is without it, step by step
    in a loop and device by device in a `shard_map`; under `jax.vmap` inside the function, of all lanes at once. Where
    the value is not computed it is `reduce` of zeros. It needs a backward pass: `grad`, `value_and_grad`, `jacrev`
    (where each row has one) or `vjp`.

    Args:
        name: The name, or a glob, such as `"block*"`.
        reduce: A function from a cotangent, an array of the shape and dtype of the value, to any pytree of arrays, of
            integers or bools too. It may be differentiated itself. `check` checks the cotangents before they are
            reduced.

    Returns:
        A selector. The derivative has the shape and dtype of the value. A name that occurs more than once has a tuple,
        in the order of the program; a glob a dict by name. In a `scan` or `map` the derivatives for all steps are
        stacked along a new first axis, and under `jax.vmap` inside the function those for all lanes; in a `while`,
        which has forward mode only, one value stands for all steps; in a `shard_map` there is an axis for each mesh
        axis over which the value differs. For a branch that is not taken they are zero.

    Raises:
        SelectorTypeError: If it is given to what selects leaves of a tree, such as `partition`.
        NoMatchError: When a transformed function is called, if it names no such value.
        SelectionError: When a transformed function is called, if the value is not floating or complex.
        ArgumentError: When a transformed function is called, if `reduce` does not return arrays, or the transform has
            no backward pass to reduce in.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def f(x):
        ...     h = checkpoint_name(jnp.sin(x), "h")
        ...     return h**2 * x
        >>> print(pg.grad(f, wrt=pg.intermediate("h"))(jnp.pi / 2))      # 2 h x
        3.1415927
        >>> largest = pg.intermediate("h", reduce=lambda h: jnp.max(jnp.abs(h)))
        >>> gradients = pg.grad(lambda x: jnp.sum(f(x)), wrt={"x": None, "h": largest})(jnp.array([0.0, jnp.pi / 2]))
        >>> print(gradients["x"].shape, gradients["h"])
        (2,) 3.1415927
    """
    return Intermediate(name, reduce)
