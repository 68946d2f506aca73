"""Functions of `jax.numpy` with a derivative at their singular points.

Values are those of `jax.numpy`, bit for bit, everywhere: an infinity stays an infinity, and NaN stays NaN. Only where
there is no derivative, as for `sqrt` at 0, it is `at_singular`, 0 by default. Everywhere else it is JAX's. At a
singular point the function counts as locally linear, so its second derivative there is 0.

The decompositions `eigh` and `svd` and `matrix_function` have derivatives where eigenvalues or singular values are
equal; each says for which functions they are right.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from partgrad import safe
    >>> def distance(x, y): return safe.norm(x - y)
    >>> print(jax.grad(distance)(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])))
    [0. 0.]
"""

from ._decompositions import eigh, svd
from ._elementwise import arccos, arcsin, arctan2, cbrt, divide, log, power, reciprocal, sqrt
from ._matrix_function import matrix_function
from ._reductions import logsumexp, norm, std, var
from ._where import where

__all__ = [
    "arccos",
    "arcsin",
    "arctan2",
    "cbrt",
    "divide",
    "eigh",
    "log",
    "logsumexp",
    "matrix_function",
    "norm",
    "power",
    "reciprocal",
    "sqrt",
    "std",
    "svd",
    "var",
    "where",
]


def __dir__() -> list[str]:
    return __all__
