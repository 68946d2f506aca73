"""The selector of values inside a function, which are leaves of no tree."""

from typing import Any, NoReturn

from ..errors import SelectorTypeError


class Intermediate:
    """What `intermediate` returns: `wrt=` of a transform, and of nothing else.

    Attributes:
        name: The name, or a glob.
    """

    def __init__(self, name: str):
        if not isinstance(name, str) or not name:
            raise SelectorTypeError(
                f"`partgrad.intermediate` got {type(name).__name__} {name!r:.60}.",
                "Expected a name that jax.ad_checkpoint.checkpoint_name gives, or a glob.",
                fix="write partgrad.intermediate('h'), or 'block*' for all names that begin so.",
            )
        self.name = name

    def __repr__(self) -> str:
        return f"intermediate({self.name!r})"

    def _refuse(self, *_: Any) -> NoReturn:
        raise SelectorTypeError(
            f"{self!r} is combined with another selector.",
            "A value inside a function is no part of an argument, so there is nothing to join it with.",
            fix="write a glob for several names, partgrad.intermediate('block*').",
        )

    __or__ = __ror__ = __and__ = __rand__ = __sub__ = __rsub__ = __invert__ = _refuse


def intermediate(name: str) -> Intermediate:
    """Select a value that the function names inside, by `x = jax.ad_checkpoint.checkpoint_name(x, "x")`.

    The derivative with respect to it treats the value as an input: everything computed from it follows, and nothing
    else. Every transform takes it as `wrt`.

    Args:
        name: The name, or a glob, such as `"block*"`.

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

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def f(x):
        ...     h = checkpoint_name(jnp.sin(x), "h")
        ...     return h**2 * x
        >>> print(pg.grad(f, wrt=pg.intermediate("h"))(jnp.pi / 2))      # 2 h x
        3.1415927
    """
    return Intermediate(name)
