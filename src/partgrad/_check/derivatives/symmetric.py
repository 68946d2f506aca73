"""Factorizations that take a matrix for symmetric: their derivative is right only where the matrix moves as one.

`jax.scipy.linalg.cho_factor`, for one, reads one triangle. The rule of `cholesky` wants a symmetric tangent, which that
of a matrix from a covariance function is, and that of a single element is not. So does that of lineax, where it is told
that a matrix is symmetric.
"""

from typing import Any

import jax.numpy as jnp

from ..._programs import Chain, Operands, bind, is_floating
from ..evidence import Evidence
from ..numbered import NumberedProgram

_FACTORIZATIONS = frozenset({"cholesky", "eigh", "linear_solve"})


def factorizations(evidence: Evidence, leaf: int) -> list[Chain]:
    """The factorizations of symmetric matrices that a leaf flows into."""
    return [c for c in evidence.smooth.chains if c[-1].primitive.name in _FACTORIZATIONS and evidence.is_into(leaf, c)]


def symmetrised(program: NumberedProgram) -> NumberedProgram:
    """The program in which each of them is given the symmetric part of its matrix."""

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        if chain[-1].primitive.name not in _FACTORIZATIONS:
            return None
        return bind(chain[-1], [_symmetric_part(operand) if _is_square(operand) else operand for operand in operands])

    return NumberedProgram(lambda leaves: program.run(leaves, rule), program.leaves, program.paths)


def _is_square(operand: Any) -> bool:
    shape = jnp.shape(operand)
    return len(shape) > 1 and shape[-1] == shape[-2] and bool(is_floating(operand))


def _symmetric_part(matrix: Any) -> Any:
    """Of a matrix that is symmetric but for how it moves; any other as it is."""
    other = jnp.conj(jnp.swapaxes(matrix, -1, -2))
    return jnp.where(jnp.allclose(matrix, other, rtol=1e-2), (matrix + other) / 2, matrix)
