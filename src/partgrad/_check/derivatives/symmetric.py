"""Factorizations that take a matrix for symmetric: their derivative is right only where the matrix moves as one.

`jax.scipy.linalg.cho_factor`, for one, reads one triangle. The rule of `cholesky` wants a symmetric tangent, which that
of a matrix from a covariance function is, and that of a single element is not.
"""

from typing import Any

import jax.numpy as jnp

from ..._programs import Chain, Operands, bind
from ..evidence import Evidence
from ..numbered import NumberedProgram

_FACTORIZATIONS = frozenset({"cholesky", "eigh"})


def factorizations(evidence: Evidence, leaf: int) -> list[Chain]:
    """The factorizations of symmetric matrices that a leaf flows into."""
    return [c for c in evidence.smooth.chains if c[-1].primitive.name in _FACTORIZATIONS and evidence.is_into(leaf, c)]


def symmetrised(program: NumberedProgram) -> NumberedProgram:
    """The program in which each of them is given the symmetric part of its matrix."""

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        if chain[-1].primitive.name not in _FACTORIZATIONS:
            return None
        return bind(chain[-1], [_symmetric_part(operands[0]), *operands[1:]])

    return NumberedProgram(lambda leaves: program.run(leaves, rule), program.leaves, program.paths)


def _symmetric_part(matrix: Any) -> Any:
    return (matrix + jnp.conj(jnp.swapaxes(matrix, -1, -2))) / 2
