"""A program and its two derivatives, compiled in float64."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..._programs import Operands, inner_jaxprs, is_floating
from ..numbered import NumberedProgram
from ..quick import quick_jit
from .float64 import leaves_jax, promoted

Leaves = list[np.ndarray[Any, Any]]
Vector = np.ndarray[Any, Any]

# The axis that holds a point that has moved, and the point it has moved from.
_BOTH = "partgrad.both"


class Exact:
    """A program and its two derivatives in float64. The outputs are one vector, complex if any output is.

    `unit` is the precision of the steps that run outside JAX, in their own dtype; zero if there are none.
    """

    def __init__(self, program: NumberedProgram):
        self.sizes = [int(np.prod(aval.shape)) for aval in program.out_avals]
        self.unit = _unit(program.jaxpr.jaxpr)
        self.evaluations = 0
        self._shapes = [aval.shape for aval in program.out_avals]
        self._is_complex = [jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in program.out_avals]
        self._inputs = [(leaf.shape, jnp.iscomplexobj(leaf)) for leaf in program.leaves]
        evaluate = promoted(program.jaxpr)
        self._value = _compiled(lambda moved, point: _joined(evaluate(*self._parted(moved))))
        self._forward = self._derivative(lambda: program.tangent, _joined, self._parted)
        self._reverse = self._derivative(lambda: program.cotangent, list)

    def _derivative(
        self, jaxpr: Callable[[], ClosedJaxpr], join: Callable[..., Any], parted: Callable[[Any], Leaves] = list
    ) -> Callable[..., Any] | None:
        try:
            evaluate = promoted(jaxpr())
        except Exception:  # There is none: each rule raises its own kind of error.
            return None
        return _compiled(lambda point, others: join(evaluate(*self._parted(point), *parted(others))))

    def _parted(self, vector: Any) -> Leaves:
        """The leaves of a vector: passing one operand is much faster than passing hundreds."""
        parts = lax.split(vector, [int(np.prod(shape)) * (1 + is_complex) for shape, is_complex in self._inputs])
        return [
            lax.complex(part[::2], part[1::2]).reshape(shape) if is_complex else part.reshape(shape)
            for part, (shape, is_complex) in zip(parts, self._inputs, strict=True)
        ]

    def with_reverse_of(self, program: NumberedProgram) -> "Exact":
        """The same function with the reverse derivative of another program, and without a forward derivative."""
        changed = copy.copy(self)
        changed._forward, changed._reverse = None, changed._derivative(lambda: program.cotangent, list)
        return changed

    def holding(self, program: NumberedProgram, held: Callable[[JaxprEqn], bool]) -> "Exact":
        """The same, except that some equations keep their results while the point moves along a direction."""

        def rule(equation: JaxprEqn, operands: Operands) -> Operands | None:
            if held(equation):
                return [lax.all_gather(operand, _BOTH)[1] for operand in operands]
            if leaves_jax(equation):
                # Callbacks to Python cannot run at many points at once; where they matter, nothing is known.
                return [jnp.full(v.aval.shape, jnp.nan if is_floating(v.aval) else 0) for v in equation.outvars]
            return None

        evaluate = promoted(program.jaxpr, rule)

        def value(moved: Any, point: Any) -> Any:
            at = lambda vector: _joined(evaluate(*self._parted(vector)))
            return jax.vmap(at, axis_name=_BOTH)(jnp.stack([moved, point]))[0]

        changed = copy.copy(self)
        changed._value = _compiled(value)
        return changed

    def value(self, point: Leaves, direction: Leaves, step: float) -> Vector:
        """The outputs at a point moved along a direction."""
        self.evaluations += 1
        start = _vector(point)
        return np.asarray(self._value(start + step * _vector(direction), start))

    def forward(self, point: Leaves, direction: Leaves) -> Vector | None:
        """The tangents of the outputs along a direction, or None if there is no forward derivative."""
        return None if self._forward is None else np.asarray(self._forward(_vector(point), _vector(direction)))

    def reverse(self, point: Leaves, weights: Vector) -> Leaves | None:
        """The cotangents of the leaves for given weights of the outputs, or None if there is no reverse derivative."""
        if self._reverse is None:
            return None
        return [np.asarray(cotangent) for cotangent in self._reverse(_vector(point), self.cotangents(weights))]

    def parts(self, outputs: Vector) -> list[Vector]:
        """Split a vector of outputs into the outputs."""
        ends = np.cumsum(self.sizes, dtype=int)
        return [outputs[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def cotangents(self, weights: Vector) -> Leaves:
        """Arrange weights, one per element, in the shapes of the outputs."""
        parts = zip(self.parts(weights), self._shapes, self._is_complex, strict=True)
        return [(part if is_complex else part.real).reshape(shape) for part, shape, is_complex in parts]


def _unit(jaxpr: Jaxpr) -> float:
    """The largest relative rounding error of the steps that are not evaluated in float64."""
    largest = 0.0
    for equation in jaxpr.eqns:
        made = [v.aval.dtype for v in equation.outvars if leaves_jax(equation) and is_floating(v.aval)]
        largest = max([largest, *(float(jnp.finfo(d).eps) for d in made), *map(_unit, inner_jaxprs(equation))])
    return largest if largest > np.finfo(np.float64).eps else 0.0


def _vector(leaves: Leaves) -> Vector:
    parts = [np.ascontiguousarray(leaf).reshape(-1).view(np.float64) for leaf in leaves]
    return np.concatenate([*parts, np.zeros(0)])


def _joined(outputs: list[Any]) -> Any:
    return jnp.concatenate([jnp.ravel(output) for output in outputs]) if outputs else jnp.zeros(0)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in float64, compiled; its results are NaN where it raises because it rejects the point."""
    staged = quick_jit(function)

    def run(*operands: Any) -> Any:
        with jax.enable_x64(True):
            try:
                return jax.device_get(staged(*operands))
            except Exception:
                # What cannot be traced raises again.
                made = jax.eval_shape(staged, *operands)
                return jax.tree.map(lambda aval: np.full(aval.shape, np.nan, aval.dtype), made)

    return run
