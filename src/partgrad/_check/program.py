"""The function under check as jaxprs of the selected leaves: itself and its derivatives, and what flows where in it.

Every equation of the function gets a number, which the equations that JAX derives from it carry in their name stacks.
So a fault in a derivative leads back to the operation that it is the derivative of.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._compat import cached_property
from .._double_where import double_where, is_double_where
from .._intermediates import name_given
from .._programs import (
    CALLS,
    CUSTOM_LINEAR,
    CUSTOM_RULES,
    ENTERED,
    HIGH_LINEAR,
    TRANSPARENT,
    Chain,
    Dependence,
    EquationRule,
    Operands,
    any_equation,
    as_closed,
    bind,
    by_value,
    cut,
    differentiably,
    ids,
    inner_jaxprs,
    is_floating,
    jaxpr_and_consts,
    last_of,
    name_of,
    of_cotangents,
    of_draws,
    primal_jaxpr,
    reaching,
    read,
    run,
    shown,
    with_constants_as_inputs,
    without_references,
)

Array = np.ndarray[Any, Any]

# No scope of a user is called that.
_SCOPE = "partgrad equation "
_NUMBER = re.compile(rf"{_SCOPE}(\d+)")


class Program:
    """A function of some leaves, traced at a point, and differentiated in both modes or `forward` alone.

    `outputs` is the function as the user wrote it, from a list of leaves to the list of its floating and complex
    outputs. In `jaxpr`, a function under `double_where` is a call, so that its operations are visible.
    """

    def __init__(
        self, function: Callable[[list[Any]], Any], leaves: list[Any], paths: list[str], *, forward: bool = False
    ):
        self.leaves, self.paths, self._forward = list(leaves), paths, forward
        self.outputs = lambda leaves: differentiable(function(list(leaves)))
        self.traced = jax.make_jaxpr(self.outputs)(self.leaves)
        pure = _without_references(self.traced)
        # Whether the function works on mutable references, in place of which the program has values.
        self.is_mutating = pure is not self.traced
        self.jaxpr = _with_open_wrappers(pure, self.leaves)
        self._equations: list[JaxprEqn] = []
        self._numbers: dict[int, int] = {}
        self._number(self.jaxpr.jaxpr)
        # Why there is no derivative in a mode, if there is none.
        self.missing: dict[str, Exception] = {}
        # This comes before anything that may fail: JAX remembers how a `custom_vjp` was traced last, and cannot use it
        # again if that trace failed.
        self.tangent = self._derivative("forward", self._traced_forward)
        self.value_and_cotangent = self._derivative("reverse", self._traced_reverse)

    @property
    def out_avals(self) -> list[Any]:
        """Shapes and dtypes of the outputs."""
        return list(self.jaxpr.out_avals)

    # --- derivatives -------------------------------------------------------------------------------------------------

    def _derivative(self, mode: str, trace: Callable[[Any], ClosedJaxpr]) -> ClosedJaxpr | None:
        """The derivative of the numbered equations, or else of the function: a rule may close over a traced value."""
        for function in (self.run, self.outputs):
            try:
                if self.is_mutating:
                    # What JAX refuses to write to a reference of the caller has no derivative, though a value has one.
                    trace(self.outputs)
                traced = trace(function)
                self.missing.pop(mode, None)
                return traced
            except Exception as error:  # A derivative rule is the user's code and may raise anything: it is reported.
                self.missing[mode] = error
        return None

    def _traced_forward(self, function: Callable[[Operands], Operands]) -> ClosedJaxpr:
        """From the leaves and their tangents to the tangents of the outputs."""
        forward = lambda leaves, tangents: jax.jvp(function, (leaves,), (tangents,))[1]
        jaxpr = jax.make_jaxpr(forward)(self.leaves, self.leaves)
        # Where `jax.jvp` would refuse a `custom_vjp`, its trace leaves an equation that only reverse mode can use.
        if any_equation(jaxpr.jaxpr, lambda equation: equation.primitive.name in CUSTOM_LINEAR | HIGH_LINEAR):
            raise TypeError("A function with a `custom_vjp` has no forward derivative.")
        return jaxpr

    def _traced_reverse(self, function: Callable[[Operands], Operands]) -> ClosedJaxpr:
        """From leaves and cotangents of the outputs to the outputs, as reverse mode has them, and the gradient."""
        if self._forward:
            raise ValueError("Only the forward derivative is asked for.")

        def reverse(leaves: Operands, cotangents: Operands) -> tuple[Operands, Operands]:
            outputs, pull = jax.vjp(function, leaves)
            return outputs, pull(cotangents)[0]

        return jax.make_jaxpr(reverse)(self.leaves, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.out_avals])

    def forget_derivatives(self, error: Exception) -> None:
        """There are none that can run."""
        self.missing = {"forward": error, "reverse": error}
        self.tangent = self.value_and_cotangent = None

    @cached_property
    def cotangent(self) -> ClosedJaxpr | None:
        """The reverse derivative: from the leaves and the cotangents of the outputs to the cotangents of the leaves."""
        if self.value_and_cotangent is None:
            return None
        jaxpr, consts = jaxpr_and_consts(self.value_and_cotangent)
        debug_info = jaxpr.debug_info._replace(result_paths=None) if jaxpr.debug_info else None
        return ClosedJaxpr(jaxpr.replace(outvars=jaxpr.outvars[len(self.out_avals) :], debug_info=debug_info), consts)

    # --- running it with numbers -------------------------------------------------------------------------------------

    def run(
        self,
        leaves: Operands,
        rule: EquationRule = lambda chain, operands: None,
        *,
        into_rules: bool = False,
    ) -> Operands:
        """The outputs, computed by equations that carry their numbers; a rule may replace the results of some.

        The rule is applied at every depth, but inside custom rules only if these are entered and so lost.
        """
        # Calls are entered in place, so that the equations inside carry the number of the call too.
        in_place = CALLS | CUSTOM_RULES if into_rules else CALLS
        numbered = functools.partial(run, in_place=in_place, context=self._scope)

        def change(chain: Chain, operands: Operands) -> Operands | None:
            results = rule(chain, operands)
            if results is None and name_of(chain[-1]) in TRANSPARENT and not into_rules:
                jaxpr, consts = jaxpr_and_consts(primal_jaxpr(chain[-1]))
                body = lambda *given: numbered(jaxpr, consts, list(given), change, inside=chain)
                results = list(double_where(body)(*operands))
            return results

        return numbered(*jaxpr_and_consts(self.jaxpr), list(leaves), change)

    @cached_property
    def numbered(self) -> ClosedJaxpr:
        """The function as one jaxpr without custom rules, whose equations carry their numbers."""
        return jax.make_jaxpr(lambda leaves: self.run(leaves, into_rules=True))(self.leaves)

    @cached_property
    def unwrapped(self) -> "Program":
        """The same function without `double_where`; this program itself if there is none in it."""
        if not any_equation(self.jaxpr.jaxpr, lambda equation: name_of(equation) in TRANSPARENT):
            return self
        body, consts = jaxpr_and_consts(self.jaxpr)
        plain = lambda leaves: run(body, consts, list(leaves), lambda chain, given: None, in_place=CALLS)
        return Program(plain, self.leaves, self.paths)

    def _scope(self, chain: Chain) -> Any:
        number = self._numbers.get(id(chain[-1]))
        return contextlib.nullcontext() if number is None else jax.named_scope(f"{_SCOPE}{number}")

    def origin(self, derived: Iterable[JaxprEqn]) -> Chain:
        """The equation of the function that an equation of a derivative was derived from; empty if there is none."""
        numbers: list[int] = []
        for equation in derived:
            for text in _NUMBER.findall(str(equation.source_info.name_stack)):
                # A name stack may name a call twice, as in `transpose(jvp(f))/jvp(f)`.
                if int(text) not in numbers:
                    numbers.append(int(text))
        chain = tuple(self._equations[number] for number in numbers)
        # JAX moves what every step of a loop computes alike out of the loop.
        return chain if not chain or self.value.knows(chain) else self._whole.get(id(chain[-1]), chain)

    @cached_property
    def _whole(self) -> dict[int, Chain]:
        return {id(chain[-1]): chain for chain in reversed(self.value.chains)}

    def _number(self, jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if id(equation) in self._numbers:
                continue
            self._numbers[id(equation)] = len(self._equations)
            self._equations.append(equation)
            if equation.primitive.name in ENTERED | CUSTOM_RULES:
                for inner in inner_jaxprs(equation):
                    self._number(inner)

    # --- what flows where --------------------------------------------------------------------------------------------

    @cached_property
    def smooth(self) -> Dependence:
        """What the derivative of everything may depend on: one bit for each leaf."""
        return differentiably(self.jaxpr.jaxpr, self._bits())

    @cached_property
    def value(self) -> Dependence:
        """What the value of everything depends on: one bit for each leaf."""
        return by_value(self.jaxpr.jaxpr, self._bits())

    @cached_property
    def drawn(self) -> Dependence:
        """What depends on a random draw inside the function."""
        return of_draws(self.jaxpr.jaxpr)

    def last_of(self, chains: Sequence[Chain]) -> list[Chain]:
        """Of some equations those whose value reaches the output without going through another of them."""
        arriving = [chain for chain in chains if ids(chain) in self._arriving]
        return arriving if len(arriving) < 2 else last_of(self.jaxpr.jaxpr, arriving)

    @cached_property
    def _arriving(self) -> frozenset[tuple[int, ...]]:
        """The equations whose value reaches the output."""
        return frozenset(map(ids, reaching(self.jaxpr.jaxpr, self.value.chains)))

    def after(self, chains: Iterable[Chain]) -> Dependence:
        """What the value of everything depends on: one bit, for the results of some equations."""
        jaxpr, keys = self.jaxpr.jaxpr, set(map(ids, chains))
        return by_value(jaxpr, [0] * len(jaxpr.invars), own=lambda chain: int(ids(chain) in keys))

    @cached_property
    def pushed(self) -> Dependence:
        """What depends on the tangents in the forward derivative."""
        assert self.tangent is not None
        return of_cotangents(self.tangent.jaxpr, len(self.leaves))

    @cached_property
    def pulled(self) -> Dependence:
        """What depends on the cotangents in the reverse derivative."""
        assert self.cotangent is not None
        return of_cotangents(self.cotangent.jaxpr, len(self.out_avals))

    def _bits(self) -> list[int]:
        return [1 << leaf for leaf in range(len(self.leaves))]

    def leaves_into(self, chain: Chain, flow: Dependence | None = None) -> list[int]:
        """The leaves that go, differentiably, into an equation or into the equations around it."""
        mask = (flow or self.smooth).union_into(chain)
        return [leaf for leaf in range(len(self.leaves)) if mask >> leaf & 1]

    def is_into(self, leaf: int, chain: Chain, flow: Dependence | None = None) -> bool:
        """Whether a leaf flows differentiably into an operand of an equation that has a tangent."""
        operands = zip(chain[-1].invars, (flow or self.smooth).into(chain), strict=True)
        return any(mask >> leaf & 1 and is_floating(atom.aval) for atom, mask in operands)

    def named_before(self, chain: Chain) -> str:
        """The last named value that an equation, or what is around it, is computed from; empty if there is none."""
        if not chain or not any_equation(self.jaxpr.jaxpr, lambda equation: bool(name_given(equation))):
            return ""
        names, flow = self._named
        mask = flow.union_into(chain)
        return names[mask.bit_length() - 1] if mask else ""

    @cached_property
    def _named(self) -> tuple[list[str], Dependence]:
        """The names of values in the order of execution, and what depends on them: one bit for each."""
        names: dict[str, int] = {}

        def own(chain: Chain) -> int:
            name = name_given(chain[-1])
            return 1 << names.setdefault(name, len(names)) if name else 0

        flow = by_value(self.jaxpr.jaxpr, [0] * len(self.jaxpr.jaxpr.invars), own=own)
        return list(names), flow

    def siblings(self, chain: Chain) -> list[JaxprEqn]:
        """The equations of the body that contains an equation, in order."""
        bodies = inner_jaxprs(chain[-2]) if len(chain) > 1 else [self.jaxpr.jaxpr]
        return next((list(body.eqns) for body in bodies if any(e is chain[-1] for e in body.eqns)), [])


def _without_references(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same with values for mutable references, those of the caller as they are now; the same if there are none."""
    body, consts = jaxpr_and_consts(jaxpr)
    own = with_constants_as_inputs(body)
    pure, _ = without_references(own)
    if pure is own:
        return jaxpr
    values = list(map(read, consts))
    return as_closed(cut(pure, pure.invars, pure.outvars[: len(body.outvars)], pure.eqns), values)


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
        inner, consts = jaxpr_and_consts(shown(chain[-1]))
        body = lambda *given: run(inner, consts, list(given), opening)
        body.__name__ = name
        return list(jax.jit(body)(*operands))

    return jax.make_jaxpr(lambda *leaves: run(*jaxpr_and_consts(jaxpr), list(leaves), opening))(*leaves)


def differentiable(tree: Any) -> list[Any]:
    """The floating and complex leaves of an output, as arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") or isinstance(leaf, float | complex)]
    return [jnp.asarray(leaf) for leaf in leaves if not hasattr(leaf, "dtype") or is_floating(leaf)]
