"""The function under check as jaxprs of the selected leaves: itself, its forward and its reverse derivative.

Every equation of the function gets a number, which the equations that JAX derives from it carry in their name stacks.
So a fault in a derivative leads back to the operation that it is the derivative of.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._double_where import double_where, is_double_where
from .._programs import (
    CALLS,
    CUSTOM_LINEAR,
    ENTERED,
    HIGH_LINEAR,
    TRANSPARENT,
    Chain,
    Dependence,
    EquationRule,
    Operands,
    any_equation,
    bind,
    differentiably,
    inner_jaxprs,
    is_floating,
    name_of,
    opened,
    primal_jaxpr,
    run,
    shown,
)

_NUMBER = re.compile(r"partgrad\.(\d+)")


class NumberedProgram:
    """A function of some leaves, traced at a point, and differentiated in both modes or `forward` alone.

    `outputs` is the function as the user wrote it, from a list of leaves to the list of its floating and complex
    outputs. In `jaxpr`, a function under `double_where` is a call, so that its operations are visible.
    """

    def __init__(
        self, function: Callable[[list[Any]], Any], leaves: list[Any], paths: list[str], *, forward: bool = False
    ):
        self.leaves, self._forward = list(leaves), forward
        self.paths = paths
        self.outputs = lambda leaves: differentiable(function(list(leaves)))
        self.jaxpr = _with_open_wrappers(jax.make_jaxpr(self.outputs)(self.leaves), self.leaves)
        self._equations: list[JaxprEqn] = []
        self._numbers: dict[int, int] = {}
        self._number(self.jaxpr.jaxpr)

    @property
    def out_avals(self) -> list[Any]:
        """Shapes and dtypes of the outputs."""
        return list(self.jaxpr.out_avals)

    @functools.cached_property
    def smooth(self) -> Dependence:
        """What the derivative of everything may depend on: one bit for each leaf."""
        return differentiably(self.jaxpr.jaxpr, [1 << leaf for leaf in range(len(self.leaves))])

    def differentiate(self) -> None:
        """Trace both derivatives, if they exist.

        This comes before anything that may fail: JAX remembers how a `custom_vjp` was traced last, and cannot use it
        again if that trace failed.
        """
        for derivative in ("tangent", "cotangent"):
            with contextlib.suppress(Exception):
                getattr(self, derivative)

    @functools.cached_property
    def tangent(self) -> ClosedJaxpr:
        """The forward derivative: from the leaves and their tangents to the tangents of the outputs.

        Raises:
            TypeError: If the function has a `custom_vjp`, and so no forward derivative.
        """
        forward = lambda leaves, tangents: jax.jvp(self.run, (leaves,), (tangents,))[1]
        jaxpr = jax.make_jaxpr(forward)(self.leaves, self.leaves)
        # Where `jax.jvp` would refuse a `custom_vjp`, its trace leaves an equation that only reverse mode can use.
        if any_equation(jaxpr.jaxpr, lambda equation: equation.primitive.name in CUSTOM_LINEAR | HIGH_LINEAR):
            raise TypeError("A function with a `custom_vjp` has no forward derivative.")
        return jaxpr

    @functools.cached_property
    def value_and_cotangent(self) -> ClosedJaxpr:
        """The outputs, as reverse mode computes them, and `cotangent`.

        Raises:
            ValueError: If the function has a `while_loop`, and so no reverse derivative, or needs none.
        """
        if self._forward:
            raise ValueError("Only the forward derivative is asked for.")

        def reverse(leaves: Operands, cotangents: Operands) -> tuple[Operands, Operands]:
            outputs, pull = jax.vjp(self.run, leaves)
            return outputs, pull(cotangents)[0]

        return jax.make_jaxpr(reverse)(self.leaves, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.out_avals])

    @functools.cached_property
    def cotangent(self) -> ClosedJaxpr:
        """The reverse derivative: from the leaves and the cotangents of the outputs to the cotangents of the leaves."""
        jaxpr, consts = opened(self.value_and_cotangent)
        debug_info = jaxpr.debug_info._replace(result_paths=None) if jaxpr.debug_info else None
        return ClosedJaxpr(jaxpr.replace(outvars=jaxpr.outvars[len(self.out_avals) :], debug_info=debug_info), consts)

    @functools.cached_property
    def has_forward(self) -> bool:
        """Whether there is a forward derivative."""
        try:
            return bool(self.tangent)
        except Exception:  # Custom rules may raise anything.
            return False

    def run(self, leaves: Operands, rule: EquationRule = lambda chain, operands: None) -> Operands:
        """The outputs, computed by equations that carry their numbers; a rule may replace the results of some.

        The rule is applied at every depth, but not inside custom rules.
        """
        # Calls are entered in place, so that the equations inside carry the number of the call too.
        numbered = functools.partial(run, in_place=CALLS, scope=self._scope)

        def change(chain: Chain, operands: Operands) -> Operands | None:
            results = rule(chain, operands)
            if results is None and name_of(chain[-1]) in TRANSPARENT:
                jaxpr, consts = opened(primal_jaxpr(chain[-1]))
                body = lambda *given: numbered(jaxpr, consts, list(given), change, inside=chain)
                results = list(double_where(body)(*operands))
            return results

        return numbered(*opened(self.jaxpr), list(leaves), change)

    def _scope(self, chain: Chain) -> Any:
        return jax.named_scope(f"partgrad.{self._numbers[id(chain[-1])]}")

    def origin(self, derived: Iterable[JaxprEqn]) -> Chain:
        """The equation of the function that an equation of a derivative was derived from; empty if there is none."""
        numbers: list[int] = []
        for equation in derived:
            for text in _NUMBER.findall(str(equation.source_info.name_stack)):
                # A name stack may name a call twice, as in `transpose(jvp(f))/jvp(f)`.
                if int(text) not in numbers:
                    numbers.append(int(text))
        return tuple(self._equations[number] for number in numbers)

    def _number(self, jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if id(equation) in self._numbers:
                continue
            self._numbers[id(equation)] = len(self._equations)
            self._equations.append(equation)
            if equation.primitive.name in ENTERED:
                for inner in inner_jaxprs(equation):
                    self._number(inner)


def _with_open_wrappers(jaxpr: ClosedJaxpr, leaves: Operands) -> ClosedJaxpr:
    """A jaxpr in which each function under `double_where` is a call that shows its operations."""
    if not any_equation(jaxpr.jaxpr, is_double_where):
        return jaxpr
    (name,) = TRANSPARENT

    def opening(chain: Chain, operands: Operands) -> Operands | None:
        if not is_double_where(chain[-1]):
            # An equation without one inside stays the same object, which tells whose function it is.
            is_wrapped = any(any_equation(body, is_double_where) for body in inner_jaxprs(chain[-1]))
            return None if is_wrapped else list(bind(chain[-1], operands))
        inner, consts = opened(shown(chain[-1]))
        body = lambda *given: run(inner, consts, list(given), opening)
        body.__name__ = name
        return list(jax.jit(body)(*operands))

    return jax.make_jaxpr(lambda *leaves: run(*opened(jaxpr), list(leaves), opening))(*leaves)


def differentiable(tree: Any) -> list[Any]:
    """The floating and complex leaves of an output, as arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") or isinstance(leaf, float | complex)]
    return [jnp.asarray(leaf) for leaf in leaves if not hasattr(leaf, "dtype") or is_floating(leaf)]
