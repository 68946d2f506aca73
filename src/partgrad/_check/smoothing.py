"""A surrogate in the place of a comparison or a rounding, tried."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from .._programs import Chain, Operands
from .exact import Exact
from .finding import Finding, Fix
from .followed import GREATER, LESS, smoothed
from .names import operation_of
from .outcomes import Outcomes
from .own import Own, is_finite, pulled, tried
from .point import Point
from .questions import Search
from .remedies import fix_of, is_confirmed
from .stairs import missing_slope

# The reasons of zeros that a surrogate mends.
MENDED = frozenset({"compared", "rounded", "cast", "integers"})
# So many operations are tried: each takes the compilations of a small check.
_MOST = 3
# How far the derivative of a surrogate may be from the slope of the function from afar, relative to that.
_LIKE = 0.05
_COMPARED_BY = frozenset({">", ">=", "<", "<=", "greater", "greater_equal", "less", "less_equal"})
_ROUNDED = frozenset({"floor", "ceil", "round", "rint", "around", "sign"})
_REWRITTEN = {
    "and": "write `c * d` for `c & d`",
    "or": "write `c + d - c * d` for `c | d`",
    "xor": "write `c + d - 2 * c * d` for `c ^ d`",
    "not": "write `1 - c` for `~c`",
    "select_n": "write `b + (a - b) * c` for `jnp.where(c, a, b)`",
    "convert_element_type": "leave out the cast to integers",
}


class Smoothing:
    """Surrogates in the place of operations, each tried once.

    Args:
        own: The function, after it ran.
        point: The point, for the weights of the outputs.
    """

    def __init__(self, own: Own, point: Point):
        self._own, self._point = own, point
        self._tried: dict[int, tuple[Point, Operands, tuple[str, ...]] | None] = {}

    def fix(self, found: Finding, leaf: int) -> Fix | None:
        """What makes the derivative of a leaf something else than zero, if differences agree with it then."""
        if not found.chain or (words := _words(found.chain)) is None:
            return None
        key = id(found.chain[-1])
        if key not in self._tried and len(self._tried) < _MOST:
            self._tried[key] = self._smoothed(found.chain)
        if (found_there := self._tried.get(key)) is None:
            return None
        point, gradient, beside = found_there
        if not gradient[leaf].any() or not is_finite(gradient[leaf]):
            return None
        search = Search(point, np.random.default_rng(0), [leaf])
        search.look_around(1, False, lambda done, of: None)
        answer = search.answer(leaf)
        if not is_confirmed(answer) or answer.row.name != "agrees" or answer.seen is None:
            return None
        fix = fix_of(*words, answer, beside)
        # What is rounded has the slope of what it rounds; a comparison, that of a width that nobody knows.
        is_compared = found.reason == "compared"
        missing = missing_slope(self._point, search.along(leaf, answer.seen)) if is_compared else None
        if missing is None:
            return fix
        slope = float(missing.slopes[-1])
        is_like = abs(fix.derivative - slope) <= _LIKE * abs(slope)
        return dataclasses.replace(fix, slope=slope) if is_like else None

    def _smoothed(self, chain: Chain) -> tuple[Point, Operands, tuple[str, ...]] | None:
        """The point of the program with a surrogate, its gradient, and what has to be rewritten beside it."""
        if (found := smoothed(self._own.program, chain)) is None:
            return None
        program, rewritten = found
        gradient = tried(pulled(program.outputs), program.leaves, self._own.cotangents)
        if gradient is None:
            return None
        point = Point(Exact(program), self._point.leaves, self._point.weights, Outcomes(program))
        return point, gradient, tuple(_REWRITTEN[name] for name in sorted(rewritten))


def _words(chain: Chain) -> tuple[str, str] | None:
    """What is replaced, and by which surrogate; None if none is known."""
    name, operation = chain[-1].primitive.name, operation_of(chain)
    if name in GREATER | LESS and operation in _COMPARED_BY:
        sign, difference = (GREATER | LESS)[name], "x - y" if name in GREATER else "y - x"
        exact, smooth = f"lambda x, y: jnp.where(x {sign} y, 1.0, 0.0)", f"jnp.arctan({difference}) / jnp.pi + 0.5"
        return f"the comparison `x {sign} y`", f"partgrad.surrogate({exact}, smooth=lambda x, y: {smooth})(x, y)"
    if name in _ROUNDED and (operation in _ROUNDED or operation == name):
        smooth = "2 * jnp.arctan(x) / jnp.pi" if name == "sign" else "x"
        return operation, f"partgrad.surrogate(jnp.{operation}, smooth=lambda x: {smooth})"
    if name == "convert_element_type" and jnp.issubdtype(chain[-1].outvars[0].aval.dtype, jnp.integer):
        return "the cast to integers", "partgrad.surrogate(jnp.trunc, smooth=lambda x: x)(x)"
    return None
