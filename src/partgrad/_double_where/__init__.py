"""Derivatives along the paths that the value used: no NaN from a branch that was not taken.

The files, in the order of the data: `enter` takes a traced function, `program` makes it a primitive that JAX can
differentiate, transpose, batch and lower (`primitives`). `forward` has JAX's derivative of the whole function, in which
`competition` made lost maxima selections; `rules`, `shares` and `live` are for custom rules. `derivative` takes that
program apart into values and one linear program: the push is a walk over it, the pull over its transpose. All are walks
over equations (`walk`, `backward`, `bodies`, `loops`) with a mask beside each value (`masked`). `fed` says where a mask
goes, with `moves` and `products`; `masks` are the masks themselves, `known` what tracing knows of them, and `follow`
finds it. `vmap` batches.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .._programs import rewritten
from .._trees import refuse_uncallable
from . import primitives  # noqa: F401
from .enter import along_taken_paths
from .unwrapped import is_double_where as is_double_where

P = ParamSpec("P")
R = TypeVar("R")


def double_where(f: Callable[P, R]) -> Callable[P, R]:
    """Return the same function, with derivatives that flow only along the paths that its value used.

    A derivative is a sum, over paths, of products of local derivatives. A path ends where the value does not depend on
    it: in the case of a `where` or the branch of a `cond` that was not selected, or at an element that was sliced,
    masked or indexed away, was overwritten, or lost a `max`, a `clip` or a `sort`. JAX multiplies whatever lies on such
    a path by zero, and `0 * inf` is NaN. This transform removes the path, as if every selection had been written with
    the double-where trick.

    Where the function has no derivative (`sqrt(x) ** 2` at zero, a product with the number 0.0), NaN stays. A gradient
    that is finite in JAX does not change. It composes with every JAX transform, in any order and to any depth.

    Args:
        f: A function from any arguments to any pytree. It must be traceable, as for `jax.jit`, and is traced on every
            transformed call; Python numbers stay Python numbers.

    Returns:
        A function with the same arguments and the same values, bit for bit.

    Raises:
        ArgumentError: If `f` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> f = lambda x: jnp.where(x > 0, jnp.log(x), 0.0)
        >>> print(jax.grad(f)(0.0), jax.grad(pg.double_where(f))(0.0))
        nan 0.0
    """
    refuse_uncallable("double_where", f)
    return rewritten(f, along_taken_paths)
