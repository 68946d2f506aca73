"""What is known about the function under check, computed on first use."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._programs import (
    Chain,
    Dependence,
    Operands,
    by_value,
    custom_rule_body,
    inner_jaxprs,
    is_floating,
    line,
    of_cotangents,
    of_draws,
    opened,
    union,
    written,
)
from .derivatives.differences import SMOOTH
from .derivatives.exact import Exact
from .derivatives.float64 import widened
from .derivatives.reading import Point
from .noise import rounding_noise
from .numbered import NumberedProgram
from .probe import Answer, Question, probe
from .quick import quick_jit

Array = np.ndarray[Any, Any]


class Evidence:
    """A program, its derivative at one point, and what flows where in it.

    Args:
        program: The function.
        plain: Its outputs, run as the user wrote it.
        weights: One for each element of the outputs; the gradient is that of the weighted sum.
    """

    def __init__(self, program: NumberedProgram, plain: Operands, weights: Array):
        self.program, self.plain, self.weights = program, plain, weights
        self.cotangents = cotangents_of(weights, plain)

    @functools.cached_property
    def _runs(self) -> tuple[list[Operands], Exception | None]:
        program = self.program
        try:
            run = compiled(program.value_and_cotangent, [*program.leaves, *self.cotangents])
            return [run(), run()], None
        except Exception as error:  # Derivative rules raise errors of any kind.
            run = compiled(program.jaxpr, program.leaves)
            return [run(), run()], error

    @property
    def runs(self) -> list[Operands]:
        """Two runs of the compiled program, each of its outputs and the gradient."""
        return self._runs[0]

    @property
    def missing(self) -> Exception | None:
        """Why there is no gradient; None if there is one."""
        return self._runs[1]

    @functools.cached_property
    def gradients(self) -> list[Array]:
        """The gradient for each leaf; empty if there is no reverse derivative."""
        return [np.asarray(gradient) for gradient in self.runs[0][len(self.plain) :]]

    @functools.cached_property
    def _noise(self) -> list[Array] | None:
        try:
            return rounding_noise(self.program.jaxpr, self.program.leaves)
        except Exception:  # An operation that cannot run on its own must not end the check.
            return None

    def noise(self) -> list[Array] | None:
        """How far rounding may move the outputs, if that can be determined."""
        return self._noise

    @functools.cached_property
    def point(self) -> Point:
        """The point in float64, with both derivatives there."""
        return Point(Exact(self.program), [widened(leaf) for leaf in self.program.leaves], self.weights)

    def slope(self, leaf: int) -> float | None:
        """The slope along all elements of a leaf by finite differences; None if there is none."""
        direction = [np.ones_like(x) if i == leaf else np.zeros_like(x) for i, x in enumerate(self.point.leaves)]
        found = self.point.slope(direction)
        is_smooth = (found.verdict == SMOOTH).all()
        return float((self.point.weights * found.derivative).real.sum()) if is_smooth else None

    def answers(self, question: Question) -> list[Answer]:
        """What the equations of the function answer to a question."""
        return probe(self.program.jaxpr, self.program.leaves, question)

    @property
    def smooth(self) -> Dependence:
        """What the derivative of everything may depend on: one bit for each leaf."""
        return self.program.smooth

    @functools.cached_property
    def pulled(self) -> Dependence:
        """What depends on the cotangents in the reverse derivative."""
        return of_cotangents(self.program.cotangent.jaxpr, len(self.cotangents))

    @functools.cached_property
    def value(self) -> Dependence:
        """What the value of everything depends on: one bit for each leaf."""
        return by_value(self.program.jaxpr.jaxpr, [1 << leaf for leaf in range(len(self.program.leaves))])

    @functools.cached_property
    def drawn(self) -> Dependence:
        """What depends on a random draw inside the function."""
        return of_draws(self.program.jaxpr.jaxpr)

    @functools.cached_property
    def implicit_draws(self) -> list[Chain]:
        """The draws with an implicit derivative, which is not the difference at a fixed key."""
        return [chain for chain in self.smooth.chains if chain[-1].primitive.name == "random_gamma"]

    @functools.cached_property
    def value_is_finite(self) -> bool:
        """Whether the function itself is finite at the point."""
        return all(map(is_finite, self.plain))

    def leaves_into(self, chain: Chain) -> list[int]:
        """The leaves whose derivative goes through an equation, or through the equations around it."""
        while chain and not self.smooth.knows(chain):
            chain = chain[:-1]
        mask = union(self.smooth.into(chain)) if chain else 0
        return [leaf for leaf in range(len(self.program.leaves)) if mask >> leaf & 1]

    def is_into(self, leaf: int, chain: Chain, flow: Dependence | None = None) -> bool:
        """Whether a leaf flows differentiably into an operand of an equation that has a tangent."""
        operands = zip(chain[-1].invars, (flow or self.smooth).into(chain), strict=True)
        return any(mask >> leaf & 1 and is_floating(atom.aval) for atom, mask in operands)

    def is_out_of(self, leaf: int, chain: Chain) -> bool:
        """Whether a leaf flows differentiably out of an equation."""
        return bool(union(self.smooth.out_of(chain)) >> leaf & 1)

    def siblings(self, chain: Chain) -> list[JaxprEqn]:
        """The equations of the body that contains an equation, in order."""
        bodies = inner_jaxprs(chain[-2]) if len(chain) > 1 else [self.program.jaxpr.jaxpr]
        return next((list(body.eqns) for body in bodies if any(e is chain[-1] for e in body.eqns)), [])

    def gradients_of(self, function: Any) -> list[Array] | None:
        """The gradients of another function of the leaves, with the same weights; None if it has none."""
        return tried(
            lambda leaves, cotangents: jax.vjp(function, leaves)[1](cotangents)[0], self.program.leaves, self.cotangents
        )


def tried(function: Callable[..., Any], *operands: Any) -> list[Array] | None:
    """The result of a remedy, or None if it fails in any way."""
    try:
        return [np.asarray(result) for result in quick_jit(function)(*operands)]
    except Exception:
        return None


def compiled(jaxpr: ClosedJaxpr, operands: Operands) -> Callable[[], Operands]:
    """Run a program, compiled quickly."""
    staged = quick_jit(jaxpr_as_fun(jaxpr))
    return lambda: jax.device_get(list(staged(*operands)))


def cotangents_of(weights: Array, plain: Operands) -> Operands:
    """Weights, one per element, in the shapes and dtypes of the outputs."""
    ends = np.cumsum([value.size for value in plain], dtype=int)
    parts = [weights[end - value.size : end].reshape(value.shape) for end, value in zip(ends, plain, strict=True)]
    real = lambda part, value: part if jnp.iscomplexobj(value) else part.real
    return [real(*pair).astype(pair[1].dtype) for pair in zip(parts, plain, strict=True)]


def is_finite(value: Any) -> bool:
    """Whether every element of an array is finite."""
    return bool(np.isfinite(widened(value)).all())


def name_of(equation: JaxprEqn) -> str:
    """The name of an operation for a message: of the function with a custom rule, or of the primitive."""
    rule = rule_name(equation)
    if rule is not None:
        return f"`{rule}`"
    return f"`{_SPOKEN.get(equation.primitive.name, equation.primitive.name)}`"


def rule_name(equation: JaxprEqn) -> str | None:
    """The name of the function with a custom derivative rule that an equation calls; None if it calls none."""
    body = custom_rule_body(equation)
    if body is None:
        return None
    name = written(opened(body)[0]).name
    return name if name.isidentifier() else "a custom rule"


_SPOKEN = {
    "acos": "arccos",
    "asin": "arcsin",
    "atan2": "arctan2",
    "div": "divide",
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "lt_to": "<",
    "le_to": "<=",
    "eq": "==",
    "ne": "!=",
    "select_n": "where",
    "pow": "power",
    "integer_pow": "power",
    "logistic": "sigmoid",
    "reduce_max": "max",
    "reduce_min": "min",
    "dot_general": "matmul",
}


def at(chain: Chain) -> str:
    """An operation with its line, for a message."""
    where = line(chain)
    return f"{name_of(chain[-1])} at {where}" if where else name_of(chain[-1])


def steps_of(steps: list[tuple[int, ...]]) -> str:
    """Which steps of a loop, for a message; empty outside loops."""
    if not steps or not steps[0]:
        return ""
    shown = [", ".join(map(str, step)) if len(step) == 1 else str(step) for step in dict.fromkeys(steps)]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f" in iteration {shown[0]}" if len(shown) == 1 else f" in iterations {', '.join(shown[:5])}{more}"


def element(flat: int, shape: tuple[int, ...]) -> str:
    """Which element of an array, for a message; empty for a scalar."""
    return f" in element {[int(i) for i in np.unravel_index(flat, shape)]}" if shape else ""
