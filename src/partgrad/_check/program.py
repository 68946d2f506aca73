"""The function under check, as jaxprs of the selected leaves: itself, its forward and its reverse derivative.

Every equation of the function gets a number, which the equations that JAX derives from it bear in their name stacks: so
a fault in a derivative leads back to the operation that it is the derivative of.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._programs import (
    CALLS,
    ENTERED,
    Operands,
    any_equation,
    bind,
    inner_jaxprs,
    is_floating,
    opened,
    primal_jaxpr,
    reenter,
)

# An equation, and before it those that it is inside of, from the outermost in.
Chain = tuple[JaxprEqn, ...]
Rule = Callable[[JaxprEqn, Operands], Operands | None]

_NUMBER = re.compile(r"partgrad\.(\d+)")


class Program:
    """A function of some leaves, traced.

    Args:
        function: From a list of leaves to a tree. Its outputs that are not floating or complex are left out.
        leaves: The point: floating or complex arrays or Python numbers.
        paths: The path of each leaf.

    Attributes:
        outputs: The function, as the user wrote it, from a list of leaves to the list of its floating and complex
            outputs.
        leaves: The point.
        paths: The path of each leaf.
        jaxpr: `outputs`, traced: its inputs are the leaves.
    """

    def __init__(self, function: Callable[[list[Any]], Any], leaves: list[Any], paths: list[str]):
        self.leaves = [jnp.asarray(leaf) for leaf in leaves]
        self.paths = paths
        self.outputs = lambda leaves: differentiable(function(list(leaves)))
        self.jaxpr: ClosedJaxpr = jax.make_jaxpr(self.outputs)(self.leaves)
        self._equations: list[JaxprEqn] = []
        self._numbers: dict[int, int] = {}
        self._number(self.jaxpr.jaxpr)

    @property
    def out_avals(self) -> list[Any]:
        """Shapes and dtypes of the outputs."""
        return list(self.jaxpr.out_avals)

    def differentiate(self) -> None:
        """Trace both derivatives, as far as there are any.

        JAX remembers of a `custom_vjp` how it was traced last, and can use it no more where that failed: so this comes
        before anything that may fail.
        """
        for derivative in ("tangent", "cotangent"):
            with contextlib.suppress(Exception):
                getattr(self, derivative)

    @functools.cached_property
    def tangent(self) -> ClosedJaxpr:
        """The forward derivative, of the leaves and their tangents to the tangents of the outputs.

        Raises:
            TypeError: If the function has a `custom_vjp`, and so no forward derivative.
        """
        forward = lambda leaves, tangents: jax.jvp(self.run, (leaves,), (tangents,))[1]
        jaxpr = jax.make_jaxpr(forward)(self.leaves, self.leaves)
        # Where `jax.jvp` would refuse a `custom_vjp`, its trace leaves what only reverse mode can use.
        if any_equation(jaxpr.jaxpr, lambda equation: equation.primitive.name == "custom_lin"):
            raise TypeError("A function with a `custom_vjp` has no forward derivative.")
        return jaxpr

    @functools.cached_property
    def cotangent(self) -> ClosedJaxpr:
        """The reverse derivative, of the leaves and the cotangents of the outputs to the cotangents of the leaves.

        Raises:
            ValueError: If the function has a `while_loop`, and so no reverse derivative.
        """
        reverse = lambda leaves, cotangents: jax.vjp(self.run, leaves)[1](cotangents)[0]
        return jax.make_jaxpr(reverse)(self.leaves, [jnp.zeros(a.shape, a.dtype) for a in self.out_avals])

    def pullback(self, cotangents: Operands) -> Operands:
        """The cotangents of the leaves at the point."""
        return list(self._reverse(*self.leaves, *cotangents))

    @functools.cached_property
    def _reverse(self) -> Callable[..., Operands]:
        reverse: Callable[..., Operands] = jax.jit(jaxpr_as_fun(self.cotangent))
        return reverse

    def run(self, leaves: Operands, rule: Rule = lambda equation, operands: None) -> Operands:
        """The outputs, computed by equations that bear their numbers; a rule may change some of them.

        Args:
            leaves: The leaves.
            rule: From an equation and its operands to other results for it, or to None to run it as it was. It is asked
                at every depth, but not about what is inside a custom rule.

        Returns:
            The outputs.
        """
        return self._run(*opened(self.jaxpr), list(leaves), rule=rule)

    def _run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands, rule: Rule) -> Operands:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
        inside = functools.partial(self._run, rule=rule)
        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            with jax.named_scope(f"partgrad.{self._numbers[id(equation)]}"):
                results = rule(equation, given)
                if results is None and equation.primitive.name in CALLS:
                    # Entered in place, so that what is inside bears the number of the call as well.
                    results = inside(*opened(primal_jaxpr(equation)), given)
                if results is None:
                    results = reenter(equation, given, inside)
                if results is None:
                    results = bind(equation, given)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def origin(self, derived: Iterable[JaxprEqn]) -> Chain:
        """From what the function was derived an equation of a derivative.

        Args:
            derived: The equation, and before it those that it is inside of.

        Returns:
            The equation of the function, with those that it is inside of; empty where there is none.
        """
        numbers: list[int] = []
        for equation in derived:
            for text in _NUMBER.findall(str(equation.source_info.name_stack)):
                # The name stack of one equation may name a call twice, as in `transpose(jvp(f))/jvp(f)`.
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


def differentiable(tree: Any) -> list[Any]:
    """The floating and complex leaves of an output, as arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") or isinstance(leaf, float | complex)]
    return [jnp.asarray(leaf) for leaf in leaves if not hasattr(leaf, "dtype") or is_floating(leaf)]
