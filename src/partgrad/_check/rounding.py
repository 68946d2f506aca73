"""A gradient that has lost its digits to rounding."""

from collections.abc import Iterator

import jax.numpy as jnp

from ..._programs import Chain, line, reaching
from ..derivatives.search import LeafDerivative
from ..evidence import Evidence
from ..finding import Finding

# Relative errors of a gradient: one that cannot be trusted, and, in units in the last place, one worth reporting if a
# conversion explains it.
_LOST = 1e-2
_TOLD = 100.0


def precision(evidence: Evidence, found: list[LeafDerivative]) -> Iterator[Finding]:
    """One finding for each leaf whose gradient has lost its digits to rounding."""
    for leaf, derivative in enumerate(found):
        error, dtype, path = derivative.precision, evidence.program.leaves[leaf].dtype, evidence.program.paths[leaf]
        if derivative.cancels:
            message = "the gradient is zero up to rounding errors: its terms cancel."
            yield Finding("zero", "info", path, "", message)
        if error is None or not error < float("inf"):
            continue
        narrow = _narrowing(evidence, leaf, error) if error > _TOLD * float(jnp.finfo(dtype).eps) else None
        what = f"the gradient in {dtype} has a relative error of {error:.1e}"
        if narrow is not None:
            kind = narrow[-1].outvars[0].aval.dtype
            message = f"{what}; it goes through {kind} at {line(narrow)}. Fix: none needed if {kind} is enough."
            yield Finding("precision", "warning", path, line(narrow), message)
        elif error > _LOST:
            message = f"{what}: digits cancel. Fix: rewrite what cancels, or compute it in a wider type."
            yield Finding("precision", "warning", path, "", message)


def _narrowing(evidence: Evidence, leaf: int, error: float) -> Chain | None:
    """The first conversion to fewer digits: of a value that depends on a leaf, in its derivative, or elsewhere."""
    narrowing = [chain for chain in evidence.smooth.chains if _is_narrowing(chain)]
    for chain in narrowing:
        if evidence.is_out_of(leaf, chain):
            return chain
    for chain in evidence.pulled.chains if evidence.gradients else ():
        origin = evidence.program.origin(chain)
        if _is_narrowing(chain) and origin and leaf in evidence.leaves_into(origin):
            return (*origin, chain[-1])
    explains = lambda chain: error < _TOLD * float(jnp.finfo(chain[-1].outvars[0].aval.dtype).eps)
    return next(filter(explains, reaching(evidence.program.jaxpr.jaxpr, narrowing)), None)


def _is_narrowing(chain: Chain) -> bool:
    equation = chain[-1]
    if equation.primitive.name != "convert_element_type":
        return False
    given, made = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if equation.invars[0].aval.weak_type:
        # A Python number takes the dtype of the array it meets.
        return False
    both = jnp.issubdtype(given, jnp.inexact) and jnp.issubdtype(made, jnp.inexact)
    return both and bool(jnp.finfo(made).eps > jnp.finfo(given).eps)
