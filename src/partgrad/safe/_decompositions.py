"""Decompositions of matrices, with derivatives where eigenvalues or singular values are equal."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._trees import refuse_non_bools
from ._rule import arrays, operand

# The rounding error of a computed eigenvalue, in units of the largest one's last place, for each row of the matrix.
_ROUNDING = 8
# As in JAX's own rules: on accelerators the default is less precise.
product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def eigh(a: ArrayLike, UPLO: str | None = None, symmetrize_input: bool = True) -> Any:
    """Compute `jax.numpy.linalg.eigh`, with a derivative where eigenvalues are equal.

    No derivative of the eigenvectors serves every function there, as they may be any basis of their space. This one
    turns them only against the eigenvectors of other eigenvalues. It is right for what depends on the space as a whole:
    its projector `v @ v.conj().T`, or the sum of its eigenvalues or of a function of them. It is wrong for what depends
    on the choice of a basis, such as one entry of an eigenvector, and for `v @ diag(fn(w)) @ v.conj().T`, where the
    basis and the eigenvalues change together: that is `matrix_function`. Eigenvalues that differ by more than rounding
    have JAX's derivative. First order only: the second derivative where eigenvalues are equal is not right.

    Args:
        a: Symmetric or Hermitian matrices of shape (..., n, n).
        UPLO: Which triangle to read if `symmetrize_input` is false: "L", the default, or "U".
        symmetrize_input: Whether to take the mean of the matrix and its conjugate transpose.

    Returns:
        What `jax.numpy.linalg.eigh` returns: eigenvalues of shape (..., n) in ascending order, and eigenvectors of
        shape (..., n, n) in columns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> def projector(a):  # onto the space of the two lowest eigenvalues
        ...     v = safe.eigh(a).eigenvectors[:, :2]
        ...     return v @ v.T
        >>> a, h = jnp.diag(jnp.array([1.0, 1.0, 3.0])), jnp.ones((3, 3))
        >>> print(jax.jvp(projector, (a,), (h,))[1])
        [[ 0.   0.  -0.5]
         [ 0.   0.  -0.5]
         [-0.5 -0.5  0. ]]

    References:
        M. B. Giles (2008), An extended collection of matrix derivative results for forward and reverse mode automatic
        differentiation, section 3.1.
    """
    refuse_non_bools(symmetrize_input=symmetrize_input)
    a = operand(a)
    if not arrays(a):
        return jnp.linalg.eigh(a, UPLO, symmetrize_input)
    a = inexact(a)
    return _eigh(UPLO, (a + adjoint(a)) / 2 if symmetrize_input else a)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _eigh(uplo: str | None, a: jax.Array) -> Any:
    return jnp.linalg.eigh(a, uplo, symmetrize_input=False)


@_eigh.defjvp
def _eigh_jvp(uplo: str | None, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (direction,) = primals, tangents
    out = values, vectors = _eigh(uplo, a)
    inside = product(adjoint(vectors), product(direction, vectors))
    turned = product(vectors, _reciprocal_gaps(values).astype(a.dtype) * inside)
    return out, type(out)(_diagonal(inside).real, turned)


def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
    subset_by_index: tuple[int, int] | None = None,
) -> Any:
    """Compute `jax.numpy.linalg.svd`, with a derivative where singular values are equal or zero.

    It is right for what depends on the space of equal singular values as a whole: the projectors on the left and on the
    right, the sum of its singular values or of a function of them and, unless they are zero, the product of both bases
    `u @ vh`, as in the nearest orthogonal matrix. It is wrong for what depends on the choice of a basis. A singular
    value of zero has no derivative; here it has that of the product `u[:, i].conj() @ da @ vh[i].conj()`. Singular
    values that differ by more than rounding have JAX's derivative, and with `full_matrices` there is one for matrices
    that are not square, which JAX does not have. First order only: the second derivative where singular values are
    equal is not right.

    Args:
        a: Matrices of shape (..., m, n).
        full_matrices: Whether `u` and `vh` are square.
        compute_uv: Whether to return the bases too.
        hermitian: Whether the matrices are symmetric or Hermitian.
        subset_by_index: A range of singular values. If it is given, the derivative is JAX's.

    Returns:
        What `jax.numpy.linalg.svd` returns: `u` of shape (..., m, m) or (..., m, k), singular values of shape (..., k)
        in descending order, and `vh` of shape (..., n, n) or (..., k, n), where k is the smaller of m and n; or the
        singular values alone.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> def nearest_orthogonal(a):
        ...     u, _, vh = safe.svd(a)
        ...     return u @ vh
        >>> print(jax.jvp(nearest_orthogonal, (2 * jnp.eye(2),), (jnp.array([[1.0, 2.0], [0.0, 1.0]]),))[1])
        [[ 0.   0.5]
         [-0.5  0. ]]

    References:
        M. B. Giles (2008), An extended collection of matrix derivative results for forward and reverse mode automatic
        differentiation, section 3.2; J. Townsend (2016), Differentiating the singular value decomposition.
    """
    refuse_non_bools(full_matrices=full_matrices, compute_uv=compute_uv, hermitian=hermitian)
    a = operand(a)
    if not arrays(a) or subset_by_index is not None:
        return jnp.linalg.svd(a, full_matrices, compute_uv, hermitian, subset_by_index)
    a = inexact(a)
    if not compute_uv:
        return _singular_values(hermitian, a)
    return _svd(full_matrices, hermitian, (a + adjoint(a)) / 2 if hermitian else a)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _singular_values(hermitian: bool, a: jax.Array) -> Any:
    return jnp.linalg.svd(a, compute_uv=False, hermitian=hermitian)


@_singular_values.defjvp
def _singular_values_jvp(hermitian: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (out,), (tangent,) = (
        (result[1],) for result in jax.jvp(functools.partial(_svd, False, hermitian), primals, tangents)
    )
    return out, tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _svd(full_matrices: bool, hermitian: bool, a: jax.Array) -> Any:
    return jnp.linalg.svd(a, full_matrices, hermitian=hermitian)


@_svd.defjvp
def _svd_jvp(full_matrices: bool, hermitian: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (a,), (direction,) = primals, tangents
    out = u, s, vh = _svd(full_matrices, hermitian, a)
    size = s.shape[-1]
    left, right = u[..., :size], adjoint(vh[..., :size, :])
    inside = product(adjoint(left), product(direction, right))
    # The turns of both bases are u @ (even + odd) and v @ (even - odd); only `even` depends on differences of singular
    # values. For complex matrices, the phases on the diagonal turn the left basis alone.
    even = _reciprocal_gaps(s).astype(a.dtype) * (inside + adjoint(inside)) / 2
    difference = (inside - adjoint(inside)) / 2
    odd = _reciprocal(s[..., :, None] + s[..., None, :]).astype(a.dtype) * difference
    phases = jnp.eye(size, dtype=a.dtype) * odd
    scale = _reciprocal(s).astype(a.dtype)[..., None, :]
    turned_left = _turned(u, left, even + odd + phases, product(direction, right) * scale)
    turned_right = _turned(adjoint(vh), right, even - odd + phases, product(adjoint(direction), left) * scale)
    return out, type(out)(turned_left, _diagonal(inside).real, adjoint(turned_right))


def _turned(basis: jax.Array, leading: jax.Array, within: jax.Array, towards: jax.Array) -> jax.Array:
    """The tangent of a basis whose leading vectors turn within their space, and towards what is outside of it."""
    outside = towards - product(leading, product(adjoint(leading), towards))
    turned = product(leading, within) + outside
    rest = basis[..., leading.shape[-1] :]
    if not rest.shape[-1]:
        return turned
    return jnp.concatenate([turned, -product(leading, product(adjoint(outside), rest))], axis=-1)


def _reciprocal_gaps(values: jax.Array) -> jax.Array:
    """`1 / (values[j] - values[i])`, or 0 where the two are equal but for rounding."""
    gaps = values[..., None, :] - values[..., :, None]
    rounding = _ROUNDING * values.shape[-1] * jnp.finfo(values.dtype).eps
    largest = jnp.max(jnp.abs(values), axis=-1, initial=0)[..., None, None]
    return _reciprocal(jnp.where(jnp.abs(gaps) > rounding * largest, gaps, 0))


def _reciprocal(x: jax.Array) -> jax.Array:
    """`1 / x`, or 0 where that is infinite."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))


def _diagonal(matrix: jax.Array) -> jax.Array:
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def adjoint(a: jax.Array) -> jax.Array:
    """The conjugate transpose of matrices."""
    return jnp.matrix_transpose(a).conj()


def inexact(a: Any) -> jax.Array:
    """An array of a floating or complex dtype, as `jax.numpy.linalg` makes it of any array."""
    a = jnp.asarray(a)
    return a if jnp.issubdtype(a.dtype, jnp.inexact) else a.astype(float)
