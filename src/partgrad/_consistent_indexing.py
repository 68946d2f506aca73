"""Derivatives of indexed reads and writes that agree with the values when an index is out of bounds."""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.lax import GatherScatterMode
from jax.tree_util import Partial

from ._programs import (
    CALLS,
    CUSTOM_JVPS,
    CUSTOM_VJPS,
    EXTREMAL_WRITES,
    HIGH,
    WRITES,
    Again,
    Chain,
    Operands,
    Run,
    along,
    any_equation,
    bind,
    closed_over,
    evaluate,
    float0_zeros,
    holds_tracers,
    index_batching_axes,
    is_floating,
    is_own_fault,
    jaxpr_and_consts,
    primal_jaxpr,
    rebind,
    rewritten,
    run,
    source_of,
    with_constants_as_inputs,
    written_window,
    zeros_like_aval,
)
from ._trees import refuse_uncallable
from .errors import ArgumentError

# The other parameters of these do not describe their jaxprs.
_HOLDERS = CALLS | {"scan", "while", "cond", "custom_linear_solve"}
# `HIGH` ones, such as `custom_root` from 0.12 on, show only their rules.
_RULED = CUSTOM_JVPS | CUSTOM_VJPS | HIGH
# How deep rules are searched that are called by rules.
_DEPTH = 3

P = ParamSpec("P")
R = TypeVar("R")


def consistent_indexing(function: Callable[P, R]) -> Callable[P, R]:
    """Return the same function, with derivatives that agree with its values where an index is out of bounds.

    A read that the value clamps is clamped in reverse mode too; a write that the value drops has no derivative, and one
    that it clamps has the derivative of a write there. Nothing else changes: if no read or write needs it, the traced
    function is the same, equation for equation. The backward function of a `jax.custom_vjp` is left alone.

    Args:
        function: A traceable function, as for `jax.jit`, with any arguments and outputs.

    Returns:
        A function with the same arguments and outputs. It composes with every JAX transformation.

    Raises:
        ArgumentError: If `function` is not callable.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import partgrad as pg
        >>> def last(x):
        ...     return x[jnp.array([7])].sum()
        >>> x = jnp.array([1.0, 2.0, 3.0])
        >>> print(last(x), jax.grad(last)(x))
        3.0 [0. 0. 0.]
        >>> print(pg.consistent_indexing(last)(x), jax.grad(pg.consistent_indexing(last))(x))
        3.0 [0. 0. 1.]
    """
    refuse_uncallable("consistent_indexing", function)
    return rewritten(function, _consistent)


def _consistent(jaxpr: Jaxpr) -> Run:
    """A function that runs a jaxpr with consistent derivatives."""
    rewriting = _Rewriting()
    if holds_tracers(jaxpr):
        return functools.partial(_consistent_alive, jaxpr, rewriting)
    if not any_equation(jaxpr, rewriting.wanted):
        return lambda consts, operands, _: evaluate(jaxpr, consts, operands)
    programs: list[ClosedJaxpr] = []

    def consistent(consts: Operands, operands: Operands, _: Any) -> Operands:
        if not programs:
            # To the compiler, a loop that is staged again is another loop; a kept one is compiled once.
            programs.append(rewriting.of(with_constants_as_inputs(jaxpr))(*consts, *operands))
        return evaluate(*jaxpr_and_consts(programs[0]), [*consts, *operands])

    return consistent


def _consistent_alive(
    jaxpr: Jaxpr, rewriting: "_Rewriting", consts: Operands, operands: Operands, again: Again
) -> Operands:
    """The outputs of a jaxpr one of whose custom rules holds a traced value: the function is differentiated itself."""
    if not any_equation(jaxpr, lambda equation: _index_rule(equation) is not None):
        return again(*operands)
    function = jax.custom_jvp(
        lambda *operands: run(jaxpr, consts, list(operands), rewriting.rule, wanted=rewriting.wanted)
    )

    def rule(primals: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        if any_equation(jaxpr, lambda equation: equation.primitive.name in CUSTOM_VJPS):
            raise ArgumentError(
                "`partgrad.consistent_indexing` got a `jax.custom_vjp` beside a custom rule that holds a traced value",
                "expected rules that get what is traced as arguments, because an index may be out of bounds here",
                fix="make what the rule closes over an argument of its function, with the cotangent None",
            )
        moving = [number for number, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        outs = [variable.aval for variable in jaxpr.outvars]
        derivative, given = _jvp_of(again, outs, moving, len(primals)), [*primals, *(tangents[n] for n in moving)]
        traced, consts = jaxpr_and_consts(jax.make_jaxpr(derivative)(*given))
        return _with_tangents(outs, _consistent(traced)(consts, given, derivative))

    function.defjvp(rule, symbolic_zeros=True)
    return function(*operands)


class _Rewriting:
    """What the rewriting of one jaxpr remembers."""

    def __init__(self) -> None:
        # Holds each equation too, so that its id stays taken.
        self._decided: dict[int, tuple[JaxprEqn, bool]] = {}
        self._rules: list[str] = []

    def wanted(self, equation: JaxprEqn) -> bool:
        """Whether an equation, or the derivative rule of a custom one, is to be rewritten."""
        if equation.primitive.name not in _RULED:
            return _index_rule(equation) is not None
        if id(equation) not in self._decided:
            self._decided[id(equation)] = equation, self._has_wanted_rule(equation)
        return self._decided[id(equation)][1]

    def _has_wanted_rule(self, equation: JaxprEqn) -> bool:
        # The rule of a function may call the function itself, or an endless family of functions.
        text = str(primal_jaxpr(equation) or equation)
        if text in self._rules or len(self._rules) == _DEPTH:
            return False
        self._rules.append(text)
        try:
            return any_equation(_traced_rule(equation).jaxpr, self.wanted)
        except Exception as error:
            if is_own_fault(error):
                raise
            # A rule of the user's: what it raises here, it raises when it is used, or never.
            return False
        finally:
            self._rules.pop()

    def run(self, jaxpr: Any, operands: Operands) -> Operands:
        """The outputs of a jaxpr, rewritten."""
        return run(*jaxpr_and_consts(jaxpr), operands, self.rule, wanted=self.wanted)

    def of(self, jaxpr: Any) -> Callable[..., ClosedJaxpr]:
        """A function from operands to the outputs of the rewritten jaxpr."""
        return jax.make_jaxpr(lambda *operands: self.run(jaxpr, list(operands)))

    def rule(self, chain: Chain, operands: Operands) -> Operands | None:
        """The results of an equation that is wanted or contains one that is; None to run or enter it unchanged."""
        equation = chain[-1]
        name = equation.primitive.name
        if name in CUSTOM_JVPS | HIGH:
            return self._custom_jvp(equation, operands)
        if name in CUSTOM_VJPS:
            return self._custom_vjp(equation, operands)
        if name in _HOLDERS:
            return rebind(
                equation, operands, lambda inner: self.of(inner)(*(v.aval for v in jaxpr_and_consts(inner)[0].invars))
            )
        indexed = _index_rule(equation)
        return None if indexed is None else indexed(equation, operands)

    def _custom_jvp(self, equation: JaxprEqn, operands: Operands) -> Operands:
        """The same function with the same rule, both rewritten."""
        function = jax.custom_jvp(self._primal(equation))

        def rule(primals: Operands, tangents: Operands) -> tuple[Operands, Operands]:
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
            moved = [tangents[i] for i in moving]
            return _with_tangents(
                _outs(equation), self.run(_traced_rates(equation, moving, primals, moved), [*primals, *moved])
            )

        function.defjvp(rule, symbolic_zeros=True)
        with source_of(equation):
            return function(*operands)

    def _custom_vjp(self, equation: JaxprEqn, operands: Operands) -> Operands:
        """The same function with the same backward function, the forward one rewritten."""
        function = jax.custom_vjp(self._primal(equation))

        def forward(*operands: Any) -> tuple[Operands, Any]:
            # What the function closes over is an operand here, and JAX refuses to differentiate with respect to it.
            moving = [i for i, operand in enumerate(operands) if operand.perturbed]
            primals = [operand.value for operand in operands]
            traced, pullback = _traced_vjp(equation, moving, primals)
            outputs = self.run(traced, primals)
            pull = pullback(outputs[len(equation.outvars) :])
            return outputs[: len(equation.outvars)], Partial(
                functools.partial(_pulled_back, moving, len(primals)), pull
            )

        function.defvjp(forward, lambda pull, cotangents: pull(cotangents), symbolic_zeros=True)
        with source_of(equation):
            return function(*operands)

    def _primal(self, equation: JaxprEqn) -> Callable[..., Operands]:
        if equation.primitive.name in HIGH:
            return lambda *operands: bind(equation, list(operands))
        primal = lambda *operands: self.run(primal_jaxpr(equation), list(operands))
        primal.__name__ = jaxpr_and_consts(primal_jaxpr(equation))[0].debug_info.func_name
        return primal


def _traced_rule(equation: JaxprEqn) -> ClosedJaxpr:
    """The rule of a custom derivative, applied to operands that all have tangents."""
    avals = [atom.aval for atom in equation.invars]
    moving = [i for i, aval in enumerate(avals) if is_floating(aval) and i >= closed_over(equation)]
    if equation.primitive.name in CUSTOM_VJPS:
        return _traced_vjp(equation, moving, avals)[0]
    return _traced_rates(equation, moving, avals, [avals[i] for i in moving])


def _outs(equation: JaxprEqn) -> list[Any]:
    return [variable.aval for variable in equation.outvars]


def _traced_rates(equation: JaxprEqn, moving: list[int], primals: Operands, tangents: Operands) -> ClosedJaxpr:
    function = lambda *operands: bind(equation, list(operands))
    return jax.make_jaxpr(_jvp_of(function, _outs(equation), moving, len(primals)))(*primals, *tangents)


def _jvp_of(
    function: Callable[..., Operands], outs: list[Any], moving: list[int], count: int
) -> Callable[..., Operands]:
    """From operands and the tangents of some to results, of given shapes, and the tangents of the floating ones."""

    def derivative(*operands: Any) -> Operands:
        of_moving, start = along(lambda given: function(*given), moving, operands[:count])
        values, rates = jax.jvp(of_moving, start, list(operands[count:]))
        return [*values, *(rate for rate, aval in zip(rates, outs, strict=True) if is_floating(aval))]

    return derivative


def _with_tangents(outs: list[Any], outputs: Operands) -> tuple[Operands, Operands]:
    """Results and the tangents of all of them, given those of the floating ones."""
    moved = iter(outputs[len(outs) :])
    # The tangent of an integer output cannot be returned from a jaxpr.
    return outputs[: len(outs)], [next(moved) if is_floating(aval) else float0_zeros(aval) for aval in outs]


def _traced_vjp(
    equation: JaxprEqn, moving: list[int], operands: Operands
) -> tuple[ClosedJaxpr, Callable[[Operands], Any]]:
    """Functions from operands to results and residuals, and from these to what pulls back to the moving operands."""
    treedefs = []

    def forward(*operands: Any) -> Operands:
        function, start = along(functools.partial(bind, equation), moving, list(operands))
        values, pull = jax.vjp(function, *start)
        residuals, treedef = jax.tree.flatten(pull)
        treedefs.append(treedef)
        return [*values, *residuals]

    traced = jax.make_jaxpr(forward)(*operands)
    return traced, treedefs[0].unflatten


def _pulled_back(moving: list[int], count: int, pull: Callable[..., Any], cotangents: Operands) -> tuple[Any, ...]:
    """The cotangents of all operands, None for those that do not move."""
    given = [_instantiated(c) if isinstance(c, SymbolicZero) else c for c in cotangents]
    found = dict(zip(moving, pull(given), strict=True))
    return tuple(found.get(i) for i in range(count))


def _instantiated(zero: SymbolicZero) -> Any:
    return float0_zeros(zero.aval) if zero.aval.dtype == jax.dtypes.float0 else zeros_like_aval(zero.aval)


def _index_rule(equation: JaxprEqn) -> Callable[[JaxprEqn, Operands], Operands] | None:
    """A function that runs a read or write whose derivative may disagree with its value."""
    name, p = equation.primitive.name, equation.params
    if (name not in WRITES and name != "gather") or not is_floating(equation.outvars[0].aval):
        return None
    promised = p["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    clipped = p["mode"] == GatherScatterMode.CLIP
    if name == "gather":
        return _read if promised or (clipped and p["unique_indices"] and _count(equation) > 1) else None
    if name == "scatter" and p["update_jaxpr"] is not None:
        return None
    if promised:
        return _dropping_write
    return _clipped_write if clipped and name in EXTREMAL_WRITES else None


def _count(equation: JaxprEqn) -> int:
    """How many positions of one array a read or write touches."""
    batching, shape = index_batching_axes(equation), equation.invars[1].aval.shape[:-1]
    return math.prod(size for axis, size in enumerate(shape) if axis not in batching)


def _read(equation: JaxprEqn, operands: Operands) -> Operands:
    # Its value is clamped anyway; as a clipped read, its transpose is clamped too. Clamping makes indices equal.
    unique = equation.params["unique_indices"] and _count(equation) <= 1
    return bind(equation, operands, mode=GatherScatterMode.CLIP, unique_indices=unique)


def _dropping_write(equation: JaxprEqn, operands: Operands) -> Operands:
    return bind(equation, operands, mode=GatherScatterMode.FILL_OR_DROP)


def _clipped_write(equation: JaxprEqn, operands: Operands) -> Operands:
    operand, indices, updates = operands
    with source_of(equation):
        clamped = lax.clamp(indices.dtype.type(0), indices, _upper_bound(equation, indices))
        return _dropping_write(equation, [operand, clamped, updates])


def _upper_bound(equation: JaxprEqn, indices: Any) -> Any:
    """The last index vector at which the window of a write fits."""
    shape, window = equation.invars[0].aval.shape, written_window(equation)
    axes = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    # An index of few bits cannot reach the end of a long axis; one into an empty axis is always dropped.
    most = int(jnp.iinfo(indices.dtype).max)
    last = np.array([min(max(shape[axis] - window[axis], 0), most) for axis in axes], indices.dtype)
    return lax.broadcast_in_dim(last, indices.shape, (indices.ndim - 1,))
