"""A program and its two derivatives, compiled in float64."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._programs import Operands, is_floating
from .program import Program
from .promote import promoted

Leaves = list[np.ndarray[Any, Any]]
Vector = np.ndarray[Any, Any]

# The axis of a point that has moved and the one that it has moved from.
_BOTH = "partgrad.both"


class Exact:
    """A program and its two derivatives, in float64 and complex128.

    Outputs are one vector, complex where one of them is.

    Args:
        program: The program.

    Attributes:
        sizes: The number of elements of each output.
        absent: For `forward` and `reverse`, why there is no such derivative; empty where there is one.
        evaluations: How often the function was evaluated.
    """

    def __init__(self, program: Program):
        self.sizes = [int(np.prod(aval.shape)) for aval in program.out_avals]
        self.absent = {"forward": "", "reverse": ""}
        self.evaluations = 0
        self._shapes = [aval.shape for aval in program.out_avals]
        self._is_complex = [jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in program.out_avals]
        evaluate = promoted(program.jaxpr)
        self._value = _compiled(lambda *moved: _joined(evaluate(*_moved(*moved))))
        self._forward = self._derivative("forward", lambda: program.tangent)
        self._reverse = self._derivative("reverse", lambda: program.cotangent)

    def _derivative(self, mode: str, jaxpr: Callable[[], ClosedJaxpr]) -> Callable[..., Any] | None:
        try:
            evaluate = promoted(jaxpr())
        except Exception as error:
            self.absent[mode] = str(error) or type(error).__name__
            return None
        join = _joined if mode == "forward" else list
        return _compiled(lambda point, others: join(evaluate(*point, *others)))

    def holding(self, program: Program, held: Callable[[JaxprEqn], bool]) -> "Exact":
        """The same, but for some equations that keep their results while the point moves along a direction."""

        def rule(equation: JaxprEqn, operands: Operands) -> Operands | None:
            if held(equation):
                return [lax.all_gather(operand, _BOTH)[1] for operand in operands]
            if equation.primitive.name.endswith("callback"):
                # Python code is not called for many points at once; where it matters, nothing is known.
                return [jnp.full(v.aval.shape, jnp.nan if is_floating(v.aval) else 0) for v in equation.outvars]
            return None

        evaluate = promoted(program.jaxpr, rule)

        def value(step: Any, point: Leaves, direction: Leaves) -> Any:
            at = lambda step: _joined(evaluate(*_moved(step, point, direction)))
            return jax.vmap(at, axis_name=_BOTH)(jnp.stack([step, jnp.zeros_like(step)]))[0]

        changed = copy.copy(self)
        changed._value = _compiled(value)
        return changed

    def value(self, point: Leaves, direction: Leaves, step: float) -> Vector:
        """The outputs at a point that is moved along a direction; NaN where the function raises."""
        self.evaluations += 1
        try:
            return np.asarray(self._value(np.float64(step), point, direction))
        except Exception:
            # What refuses a point does so where it is evaluated, and all points are asked for but the first.
            if step == 0:
                raise
            return np.full(sum(self.sizes), np.nan, np.complex128 if any(self._is_complex) else np.float64)

    def forward(self, point: Leaves, direction: Leaves) -> Vector | None:
        """The tangents of the outputs along a direction, or None where there is no forward derivative."""
        return None if self._forward is None else np.asarray(self._forward(point, direction))

    def reverse(self, point: Leaves, weights: Vector) -> Leaves | None:
        """The cotangents of the leaves for weights of the outputs, or None where there is no reverse derivative."""
        if self._reverse is None:
            return None
        return [np.asarray(cotangent) for cotangent in self._reverse(point, self.cotangents(weights))]

    def parts(self, outputs: Vector) -> list[Vector]:
        """A vector of outputs, output by output."""
        ends = np.cumsum(self.sizes, dtype=int)
        return [outputs[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def cotangents(self, weights: Vector) -> Leaves:
        """Weights, one for each element, in the shapes of the outputs."""
        parts = self.parts(weights)
        return [
            part.reshape(shape).astype(np.complex128 if is_complex else np.float64)
            for part, shape, is_complex in zip(parts, self._shapes, self._is_complex, strict=True)
        ]


def _moved(step: Any, point: Leaves, direction: Leaves) -> list[Any]:
    return [x + step * v for x, v in zip(point, direction, strict=True)]


def _joined(outputs: list[Any]) -> Any:
    return jnp.concatenate([jnp.ravel(output) for output in outputs]) if outputs else jnp.zeros(0)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    staged = jax.jit(function)

    def run(*operands: Any) -> Any:
        with jax.enable_x64(True):
            return jax.device_get(staged(*operands))

    return run
