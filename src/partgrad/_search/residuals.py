"""Residuals: what is zero where an operation has no derivative, or where a choice is at its threshold.

That of `sqrt(x)` is x, of `x / y` y, of `x > y` x - y, of `eigh` the smallest gap between eigenvalues. That of a number
which becomes an index is its distance from the first place past the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._programs import (
    COMPARISONS,
    WRITES,
    Operands,
    Site,
    Visitor,
    any_equation,
    bind,
    is_custom_rule,
    is_floating,
)

_Residual = Callable[[JaxprEqn, Operands, Operands], Any]


def _gap(values: Any) -> Any:
    """The smallest gap between neighbours along the last axis, once they are sorted."""
    ordered = jnp.sort(values, axis=-1)
    return jnp.min(ordered[..., 1:] - ordered[..., :-1], axis=-1)


def _of_axes(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    """The gap between the first and the second of what a maximum or a minimum compares."""
    (values,), axes = operands[:1], equation.params["axes"]
    values = jnp.moveaxis(values, axes, range(-len(axes), 0))
    values = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    if equation.primitive.name == "reduce_min":
        values = -values
    first, second = jnp.moveaxis(jax.lax.top_k(values, 2)[0], -1, 0)
    return first - second


def _first(shift: float = 0.0) -> _Residual:
    return lambda equation, operands, results: operands[0] - shift


def _difference(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    return operands[0] - operands[1]


def _guarded(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    """What is compared with a number: a guard such as `x < 1e-10` is there because of what happens at zero."""
    return operands[1] if isinstance(equation.invars[0], Literal) else operands[0]


def _overflow(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    """The distance of an exponent from where the exponential is no longer finite; zero wherever it is not."""
    name, x = equation.primitive.name, jnp.real(operands[0])
    end = _OVER * (np.log2 if name == "exp2" else np.log)(float(jnp.finfo(x.dtype).max))
    return jnp.maximum(end - (jnp.abs(x) if name in ("cosh", "sinh") else x), 0.0)


def _root(square: Any) -> Any:
    """The square root; where that is zero, its slope would be NaN in the residuals beside it."""
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def _whole(equation: JaxprEqn, operands: Operands, results: Operands) -> Any:
    """The distance from the nearest number at which a rounded number jumps."""
    x, half = operands[0], 0.5 if equation.primitive.name == "round" else 0.0
    return x - half - jax.lax.stop_gradient(jnp.round(x - half))


_RESIDUALS: dict[str, tuple[_Residual, ...]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt", "log", "log2", "abs", "sign", "digamma", "lgamma"), (_first(),)),
    "log1p": (_first(-1.0),),
    **dict.fromkeys(("exp", "exp2", "expm1", "cosh", "sinh"), (_overflow,)),
    "acosh": (_first(1.0),),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv"), (_first(1.0), _first(-1.0))),
    **dict.fromkeys(("div", "rem"), (lambda equation, operands, results: operands[1],)),
    "pow": (_first(),),
    "integer_pow": (_first(),),
    "atan2": (lambda equation, operands, results: _root(operands[0] ** 2 + operands[1] ** 2),),
    **dict.fromkeys((*COMPARISONS, "eq", "ne"), (_difference, _guarded)),
    **dict.fromkeys(("max", "min"), (_difference,)),
    **dict.fromkeys(("reduce_max", "reduce_min"), (_of_axes,)),
    "eigh": (lambda equation, operands, results: _gap(results[1]),),
    "svd": (lambda equation, operands, results: _gap(results[0]),),
    "triangular_solve": (lambda equation, operands, results: jnp.diagonal(operands[0], axis1=-2, axis2=-1),),
}
# Those whose result may have no derivative come before those that choose.
CHOICES = frozenset({*COMPARISONS, "eq", "ne", "max", "min", "abs", "sign", "reduce_max", "reduce_min"})


# Where many of these are zero together, nothing happens that does not where one is.
_ALONE = CHOICES - {*COMPARISONS, "ne"} | {"exp", "exp2", "expm1", "cosh", "sinh"}
# Of the exponent at which an exponential just is finite, so much is certainly too much.
_OVER = 1.01
# At most so many lengths are tried as the end of what an index counts.
_ENDS = 3


def _ends(jaxpr: Jaxpr) -> tuple[_Residual, ...]:
    """Of a number that becomes an index: its distances from the lengths of what is read and written by index."""
    lengths: set[int] = set()

    def see(equation: JaxprEqn) -> bool:
        name, params = equation.primitive.name, equation.params
        shape = equation.invars[0].aval.shape if equation.invars else ()
        if name == "gather":
            lengths.update(shape[axis] for axis in params["dimension_numbers"].start_index_map)
        elif name in WRITES:
            lengths.update(shape[axis] for axis in params["dimension_numbers"].scatter_dims_to_operand_dims)
        elif name == "dynamic_slice":
            lengths.update(size for size, taken in zip(shape, params["slice_sizes"], strict=True) if taken < size)
        return False

    any_equation(jaxpr, see)
    return tuple(_first(float(length)) for length in sorted(lengths)[:_ENDS])


def _is_index(equation: JaxprEqn) -> bool:
    """Whether a floating number becomes an integer here, or a whole number, which has no slope."""
    if equation.primitive.name in ("floor", "ceil", "round"):
        return True
    if equation.primitive.name != "convert_element_type":
        return False
    return jnp.issubdtype(equation.params["new_dtype"], jnp.integer) and is_floating(equation.invars[0].aval)


def _residuals_of(equation: JaxprEqn, ends: tuple[_Residual, ...] = ()) -> tuple[_Residual, ...]:
    if _is_index(equation):
        return (_whole, *ends)
    name = equation.primitive.name
    found = _RESIDUALS.get(name, ())
    if not found or not is_floating(equation.invars[0].aval):
        return ()
    if name == "integer_pow" and equation.params["y"] >= 0:
        return ()
    if found[0] is _of_axes:
        shape, axes = equation.invars[0].aval.shape, equation.params["axes"]
        return found if np.prod([shape[axis] for axis in axes]) > 1 else ()
    return found


def _together(several: list[Any]) -> list[Any]:
    """What is zero where all elements of a row are, and then where all are; nothing for a single number."""
    rows = [jnp.sum(x**2, axis=-1) for x in several if x.ndim > 1 and 1 < x.shape[-1] < x.size]
    return [jnp.ravel(_root(part)) for part in (*rows, *(jnp.sum(x**2) for x in several if x.size > 1))]


class Residuals(Visitor):
    """Brings back the residuals of all operations of a program."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._ends = _ends(jaxpr)
        self.equations: dict[str, JaxprEqn] = {}

    def site_of(self, equation: JaxprEqn) -> Site | None:
        """An operation with a residual."""
        if not _residuals_of(equation, self._ends):
            return None
        single, joint = jax.eval_shape(lambda: self._residuals(equation, *_like(equation)))
        # By its own name: the operations of two branches have nothing to do with each other.
        self.equations[str(id(equation))] = equation
        return Site(str(id(equation)), (single.size + joint.size,), single.dtype, note=single.size)

    def at(self, equation: JaxprEqn, site: Site, operands: Operands, own: Any) -> tuple[Operands, Any]:
        """The results as they are, and the residual."""
        results = bind(equation, operands)
        return results, jnp.concatenate(self._residuals(equation, operands, results))

    def guise(self, equation: JaxprEqn) -> Any:
        """The function of a custom rule is looked into: its value is what counts."""
        return (lambda function: function) if is_custom_rule(equation) else None

    def _residuals(self, equation: JaxprEqn, operands: Operands, results: Operands) -> tuple[Any, Any]:
        """Those of single elements, and those of many that are zero together."""
        name, of = equation.primitive.name, _residuals_of(equation, self._ends)
        found = [jnp.real(residual(equation, operands, results)) for residual in of]
        single = jnp.concatenate(list(map(jnp.ravel, found)))
        if name in COMPARISONS - {"eq"}:
            # All on one side, as where a count is zero.
            found = [jnp.maximum(side, 0.0) for side in (found[0], -found[0])]
        elif name in _ALONE or _is_index(equation):
            found = []
        return single, jnp.concatenate([single[:0], *_together(found)])


def _like(equation: JaxprEqn) -> tuple[Operands, Operands]:
    zeros = lambda atoms: [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in atoms]
    return zeros(equation.invars), zeros(equation.outvars)
