"""Functions of symmetric and Hermitian matrices, with derivatives that do not need distinct eigenvalues."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from ..errors import ArgumentError
from ._decompositions import adjoint, inexact, product
from ._divided_differences import first_differences, second_differences
from ._rule import operand

# An elementwise function of eigenvalues, and of the values that it closes over.
Function = Callable[..., jax.Array]


class Spectrum(NamedTuple):
    """The eigenvalues and eigenvectors of a matrix, as constants."""

    values: jax.Array
    vectors: jax.Array

    def inside(self, matrix: jax.Array) -> jax.Array:
        """A matrix in the basis of the eigenvectors."""
        return product(adjoint(self.vectors), product(matrix, self.vectors))

    def outside(self, matrix: jax.Array) -> jax.Array:
        """A matrix given in the basis of the eigenvectors."""
        return product(self.vectors, product(matrix, adjoint(self.vectors)))


def matrix_function(fn: Callable[[jax.Array], jax.Array], a: ArrayLike) -> jax.Array:
    r"""Apply a function to a symmetric or Hermitian matrix: :math:`f(A) = V f(\Lambda) V^H`.

    The derivative is also right where eigenvalues are equal, or so close that the derivatives of the eigenvectors
    cancel. It takes differences of `fn` over differences of eigenvalues, which become the slope of `fn` where two
    eigenvalues meet. It is right to second order, in forward and reverse mode.

    Args:
        fn: An elementwise function of a real array, such as `jax.numpy.exp`. It may close over traced values, which
            are differentiated too.
        a: Symmetric or Hermitian matrices of shape (..., n, n). As in `jax.numpy.linalg.eigh`, the mean of each matrix
            and its conjugate transpose is taken.

    Returns:
        The matrices, with the shape and dtype of `a`.

    Raises:
        ArgumentError: If `a` is not square, or if `fn` does not return a real number for each eigenvalue.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partgrad import safe
        >>> root = lambda a: safe.matrix_function(jnp.sqrt, a)
        >>> print(jax.jvp(root, (4 * jnp.eye(2),), (jnp.ones((2, 2)),))[1].round(4))
        [[0.25 0.25]
         [0.25 0.25]]

    References:
        Yu. L. Daleckii and S. G. Krein (1965), Integration and differentiation of functions of Hermitian operators and
        applications to the theory of perturbations; N. J. Higham (2008), Functions of Matrices, section 3.2.
    """
    a = inexact(operand(a))
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ArgumentError(
            f"`safe.matrix_function` got an array of shape {a.shape}.",
            "Expected square matrices: (..., n, n).",
            fix="pass symmetric or Hermitian matrices.",
        )
    a = (a + adjoint(a)) / 2
    spectrum = Spectrum(*jnp.linalg.eigh(lax.stop_gradient(a), symmetrize_input=False))
    expected = jax.eval_shape(lambda: spectrum.values)
    found = jax.eval_shape(fn, expected)
    if getattr(found, "shape", None) != expected.shape or found.dtype != expected.dtype:
        raise ArgumentError(
            f"The function given to `safe.matrix_function` returned {_described(found)}.",
            f"Expected a real number for each eigenvalue, {_described(expected)}.",
            fix="give it an elementwise function of a real array.",
        )
    converted, captured = jax.closure_convert(fn, spectrum.values)
    return _apply(converted, spectrum, a, tuple(captured))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(fn: Function, spectrum: Spectrum, a: jax.Array, captured: tuple[Any, ...]) -> jax.Array:
    """The function of a matrix with this spectrum; `a` is there for its tangent."""
    return product(spectrum.vectors * fn(spectrum.values, *captured)[..., None, :], adjoint(spectrum.vectors))


def _apply_jvp(fn: Function, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (spectrum, a, captured), (_, direction, moved) = primals, tangents
    out = _apply(fn, spectrum, a, captured)
    total = jnp.zeros_like(out)
    if not isinstance(direction, SymbolicZero):
        total += _self_adjoint(lambda h: _first(fn, spectrum, a, captured, h), direction)
    if not all(isinstance(tangent, SymbolicZero) for tangent in moved):
        of = lambda slope, captured: _apply(slope, spectrum, a, captured)
        total += _along_captured(of, fn, captured, moved).astype(out.dtype)
    return out, total


_apply.defjvp(_apply_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first(fn: Function, spectrum: Spectrum, a: jax.Array, captured: tuple[Any, ...], h: jax.Array) -> jax.Array:
    """The derivative of `_apply` along a matrix."""
    differences = first_differences(lambda x: fn(x, *captured), spectrum.values)
    return spectrum.outside(differences * spectrum.inside(h))


def _first_jvp(fn: Function, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (spectrum, a, captured, h), (_, direction, moved, along) = primals, tangents
    out = _first(fn, spectrum, a, captured, h)
    total = jnp.zeros_like(out)
    if not isinstance(along, SymbolicZero):
        total += _first(fn, spectrum, a, captured, along)
    if not isinstance(direction, SymbolicZero):
        total += _second(lambda x: fn(x, *captured), spectrum, h, direction)
    if not all(isinstance(tangent, SymbolicZero) for tangent in moved):
        of = lambda slope, captured: _first(slope, spectrum, a, captured, h)
        total += _along_captured(of, fn, captured, moved).astype(out.dtype)
    return out, total


_first.defjvp(_first_jvp, symbolic_zeros=True)


def _second(fn: Callable[[jax.Array], jax.Array], spectrum: Spectrum, h: jax.Array, k: jax.Array) -> jax.Array:
    """The second derivative of `_apply` along two matrices."""
    differences = second_differences(fn, spectrum.values).astype(spectrum.vectors.dtype)
    h, k = spectrum.inside(h), spectrum.inside(k)
    contracted = functools.partial(jnp.einsum, "...imj,...im,...mj->...ij", differences, precision="highest")
    return spectrum.outside(contracted(h, k) + contracted(k, h))


def _along_captured(
    of: Callable[[Function, tuple[Any, ...]], jax.Array],
    fn: Function,
    captured: tuple[Any, ...],
    moved: tuple[Any, ...],
) -> jax.Array:
    """The derivative of a linear functional `of(fn, captured)` of a function along what the function closes over.

    It is a product with the derivatives along single numbers. Those do not depend on the tangents, so that JAX can
    transpose the product and still use the rules by which they are computed.
    """
    moving = [i for i, tangent in enumerate(moved) if not isinstance(tangent, SymbolicZero)]
    tangents, unravel = jax.flatten_util.ravel_pytree([_real(moved[i]) for i in moving])

    def along(unit: jax.Array) -> jax.Array:
        units = tuple(_like(part, moved[i]) for part, i in zip(unravel(unit), moving, strict=True))

        def slope(x: jax.Array, *constants: Any) -> jax.Array:
            def of_moving(*values: Any) -> jax.Array:
                own = dict(zip(moving, values, strict=True))
                return fn(x, *(own.get(i, constant) for i, constant in enumerate(constants)))

            return jax.jvp(of_moving, tuple(constants[i] for i in moving), units)[1]

        return of(slope, captured)

    return jnp.tensordot(tangents, jax.vmap(along)(jnp.eye(tangents.size, dtype=tangents.dtype)), 1)


def _self_adjoint(apply: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
    """`apply(h)`, in a form that JAX can transpose and still differentiate by the rules of `apply`.

    `apply` must be linear and its own adjoint. When JAX transposes a call that has a rule, it forgets the rule, but it
    keeps those in the operator of a linear solve. This operator takes `(x, y)` to `(y, x - apply(y))`. It is symmetric,
    and the solution for `(h, 0)` is `(apply(h), h)`.
    """

    def operator(unknown: jax.Array) -> jax.Array:
        x, y = unknown
        return jnp.stack([y, x - _real(apply(_like(y, h)))])

    def solve(_: Any, right: jax.Array) -> jax.Array:
        y, rest = right
        return jnp.stack([rest + _real(apply(_like(y, h))), y])

    # JAX transposes a solve only if its right-hand side is one linear array.
    right = jnp.stack([_real(h), jnp.zeros_like(_real(h))])
    return _like(lax.custom_linear_solve(operator, right, solve, symmetric=True)[0], h)


def _real(x: jax.Array) -> jax.Array:
    """An array in real numbers; of complex ones both parts."""
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _like(x: jax.Array, like: jax.Array) -> jax.Array:
    """What `_real` made of an array such as `like`."""
    return lax.complex(x[0], x[1]) if jnp.iscomplexobj(like) else x


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.ShapeDtypeStruct) else type(x).__name__
