"""What is known of the function under check, computed when it is first asked for."""

import functools
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from .._programs import (
    Chain,
    Dependence,
    by_value,
    custom_rule_body,
    differentiably,
    inner_jaxprs,
    is_floating,
    line,
    of_cotangents,
    of_draws,
    opened,
    union,
)
from .derivatives.exact import Exact
from .derivatives.float64 import widened
from .derivatives.reading import Point
from .numbered import NumberedProgram
from .probe import Answer, Question, probe
from .quick import quick_jit
from .values import Values

Array = np.ndarray[Any, Any]


class Evidence:
    """A program, its derivative at one point, and what flows where in it.

    Args:
        program: The function.
        values: Its outputs and its gradient.
        weights: The weights of the outputs of which the gradient is that of the sum, one for each element.

    Attributes:
        program: The function.
        values: Its outputs and its gradient.
        weights: The weights.
        plain: Its outputs, run as the user wrote it.
        cotangents: The weights in the shapes of the outputs.
        gradients: The gradient for each leaf; empty where there is no reverse derivative.
    """

    def __init__(self, program: NumberedProgram, values: Values, weights: Array):
        self.program, self.values, self.weights = program, values, weights
        self.cotangents, self.plain = values.cotangents, values.plain
        self.gradients = [np.asarray(gradient) for gradient in values.gradient or []]
        self._answers: dict[Question, list[Answer]] = {}

    @functools.cached_property
    def point(self) -> Point:
        """The point in float64, with both derivatives there."""
        return Point(Exact(self.program), [widened(leaf) for leaf in self.program.leaves], self.weights)

    def answers(self, *questions: Question) -> list[list[Answer]]:
        """What the equations of the function answer; each question is asked once, those of one call together."""
        new = [question for question in questions if question not in self._answers]
        if new:
            self._answers.update(zip(new, probe(self.program.jaxpr, self.program.leaves, new), strict=True))
        return [self._answers[question] for question in questions]

    @functools.cached_property
    def smooth(self) -> Dependence:
        """What the derivative of everything may depend on: one bit for each leaf."""
        return differentiably(self.program.jaxpr.jaxpr, self._bits)

    @functools.cached_property
    def pulled(self) -> Dependence:
        """What depends on the cotangents in the reverse derivative."""
        return of_cotangents(self.program.cotangent.jaxpr, len(self.cotangents))

    @functools.cached_property
    def value(self) -> Dependence:
        """What the value of everything depends on: one bit for each leaf."""
        return by_value(self.program.jaxpr.jaxpr, self._bits)

    @functools.cached_property
    def drawn(self) -> Dependence:
        """What depends on a random draw inside the function."""
        return of_draws(self.program.jaxpr.jaxpr)

    @functools.cached_property
    def value_is_finite(self) -> bool:
        """Whether the function itself is finite at the point."""
        return all(map(is_finite, self.plain))

    @property
    def _bits(self) -> list[int]:
        return [1 << leaf for leaf in range(len(self.program.leaves))]

    def leaves_into(self, chain: Chain) -> list[int]:
        """The leaves whose derivative goes through an equation, or through what it is inside of."""
        for length in range(len(chain), 0, -1):
            if self.smooth.knows(chain[:length]):
                mask = union(self.smooth.into(chain[:length]))
                return [leaf for leaf in range(len(self.program.leaves)) if mask >> leaf & 1]
        return []

    def is_into(self, leaf: int, chain: Chain, flow: Dependence | None = None) -> bool:
        """Whether a leaf flows differentiably into an operand of an equation that has a tangent."""
        operands = zip(chain[-1].invars, (flow or self.smooth).into(chain), strict=True)
        return any(mask >> leaf & 1 and is_floating(atom.aval) for atom, mask in operands)

    def is_out_of(self, leaf: int, chain: Chain) -> bool:
        """Whether a leaf flows differentiably out of an equation."""
        return bool(union(self.smooth.out_of(chain)) >> leaf & 1)

    def siblings(self, chain: Chain) -> list[JaxprEqn]:
        """The equations of the body that an equation is in, in their order."""
        bodies = inner_jaxprs(chain[-2]) if len(chain) > 1 else [self.program.jaxpr.jaxpr]
        return next((list(body.eqns) for body in bodies if any(e is chain[-1] for e in body.eqns)), [])

    def gradients_of(self, function: Any) -> list[Array] | None:
        """The gradients of another function of the leaves, weighted alike; None if it has none."""
        try:
            pulled = quick_jit(lambda leaves, cotangents: jax.vjp(function, leaves)[1](cotangents)[0])
            gradients = pulled(self.program.leaves, self.cotangents)
        except Exception:  # What was tried as a remedy may fail in any way; then it is none.
            return None
        return [np.asarray(gradient) for gradient in gradients]


def is_finite(value: Any) -> bool:
    """Whether all of an array is."""
    return bool(np.isfinite(widened(value)).all())


def name_of(equation: JaxprEqn) -> str:
    """What a user calls an operation: the custom rule by its function's name, others by their primitive's."""
    rule = rule_name(equation)
    if rule is not None:
        return f"`{rule}`"
    return f"`{_SPOKEN.get(equation.primitive.name, equation.primitive.name)}`"


def rule_name(equation: JaxprEqn) -> str | None:
    """The name of the function that has a custom derivative rule; None if the equation is no call of one."""
    body = custom_rule_body(equation)
    if body is None:
        return None
    described = getattr(opened(body)[0].debug_info, "func_src_info", None) or ""
    name = str(described).partition(" at ")[0]
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
    """Which steps of a loop, for a message; empty outside of loops."""
    if not steps or not steps[0]:
        return ""
    shown = [", ".join(map(str, step)) if len(step) == 1 else str(step) for step in dict.fromkeys(steps)]
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f" in iteration {shown[0]}" if len(shown) == 1 else f" in iterations {', '.join(shown[:5])}{more}"


def element(flat: int, shape: tuple[int, ...]) -> str:
    """Which element of an array, for a message; empty for a scalar."""
    return f" in element {[int(i) for i in np.unravel_index(flat, shape)]}" if shape else ""
