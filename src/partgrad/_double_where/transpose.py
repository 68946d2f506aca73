"""Where a path leads in reverse mode: JAX's transpose of each step, traced once per shapes, and walked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._programs import (
    CHECKPOINTS,
    CUSTOM_LINEAR,
    HIGH_LINEAR,
    Operands,
    Recent,
    any_equation,
    evaluate,
    inner_jaxprs,
    is_floating,
    is_mutating,
    jaxpr_and_consts,
    kind_of,
    lasts,
    operation_of,
    source_of,
    zeros_like_aval,
)
from .known import numbers_of, remember
from .linear import Step, Wire, without_dead_code
from .linearize import key_of
from .masked import Masked, clean
from .walk import AFFINE, LINEAR

_transposes: Recent[ClosedJaxpr] = Recent(4096)


def pulled_back(step: Step, cotangents: Sequence[Masked | None]) -> list[Masked]:
    """The cotangents of a step's wires, given those of its results; None is a zero."""
    cotangents = list(cotangents)
    if step.name == "optimization_barrier":
        return _barrier(step, cotangents)
    if step.name in CUSTOM_LINEAR and not step.equation.params.get("symbolic_zeros", False):
        # What a pass makes of a zero that it is given counts only where it is not zero.
        dead = lambda wire: Masked(zeros_like_aval(wire.aval), False) if is_floating(wire.aval) else None
        cotangents = [dead(w) if ct is None else ct for ct, w in zip(cotangents, step.results, strict=True)]
    given = tuple(number for number, cotangent in enumerate(cotangents) if cotangent is not None)
    if kind_of(step.name) is None or step.name in CUSTOM_LINEAR:
        # The rule of a user or of another library may index its operands, or ask them for attributes of arrays.
        fixed = zip(step.equation.invars, step.operands, strict=True)
        step = step.with_fixed([_as_array(o, atom.aval) for atom, o in fixed if not isinstance(o, Wire)])
    arrays = [operand for operand in step.operands if isinstance(operand, jax.Array)]
    items = [*map(Masked, arrays), *(ct for ct in cotangents if ct is not None)]
    with source_of(step.equation):
        jaxpr, consts = jaxpr_and_consts(_transpose(step, given, list(map(jax.typeof, arrays))))
        if any_equation(jaxpr, is_mutating):
            # Only JAX can follow what goes through a mutable reference.
            results = evaluate(jaxpr, consts, list(map(clean, items)))
            return [Masked(result, True) for result in results]
        walk = AFFINE if contains_custom(step.equation) else LINEAR
        return walk.through(jaxpr, consts, items)


def _as_array(value: Any, aval: Any) -> Any:
    """A fixed operand as an array of JAX, with what is known of its numbers."""
    if isinstance(value, jax.Array) or not hasattr(jax.typeof(value), "dtype"):
        return value
    if isinstance(value, int) and aval.weak_type:
        # What was a number of Python in the rule may be part of a shape there.
        return value
    array = jnp.asarray(value)
    remember(array, numbers_of(value))
    return array


def _barrier(step: Step, cotangents: list[Masked | None]) -> list[Masked]:
    # The transpose of 0.12 takes no constant operand, such as the zero of a result that is not used.
    of_wires = step.of_wires(cotangents)
    given = [item for item in of_wires if item is not None]
    values = iter(jax.lax.optimization_barrier([item.value for item in given]))
    found = lambda item: Masked(next(values), item.mask, item.dirty)
    pairs = zip(of_wires, step.wires, strict=True)
    # What is not used is on no path, so its zero may meet an infinite derivative.
    dead = lambda wire: Masked(zeros_like_aval(wire.aval), False)
    return [dead(wire) if item is None else found(item) for item, wire in pairs]


def _transpose(step: Step, given: tuple[int, ...], avals: list[Any]) -> ClosedJaxpr:
    """JAX's transpose of a step: from its fixed arrays and the cotangents of some results to those of its wires."""
    is_array = [isinstance(operand, jax.Array) for operand in step.operands]
    fixed = [None if a or isinstance(o, Wire) else o for o, a in zip(step.operands, is_array, strict=True)]

    def transposed(arrays: Operands, cotangents: Operands) -> Operands:
        rest, at = iter(arrays), dict(zip(given, cotangents, strict=True))
        operands = [next(rest) if a else o for o, a in zip(step.operands, is_array, strict=True)]
        new = dataclasses.replace(step, operands=tuple(operands))
        return new.transposed([at.get(number) for number in range(len(step.results))])

    def trace() -> ClosedJaxpr:
        closed = jax.make_jaxpr(transposed)(avals, [step.results[number].aval for number in given])
        return closed.replace(jaxpr=_anywhere(without_dead_code(closed.jaxpr)))

    key: Any = None
    places = tuple(zip(step.linear, is_array, strict=True)), given
    shapes = tuple(avals), tuple(wire.aval for wire in step.wires)
    if step.name in CHECKPOINTS and all(operand is None for operand in fixed):
        operation = operation_of(step.equation)
        key = operation and (operation, shapes, places)
    elif not any(inner_jaxprs(step.equation)) and step.name not in CUSTOM_LINEAR | HIGH_LINEAR:
        key = key_of(step.equation, shapes, [f for f in fixed if f is not None], places)
    return _transposes.of(key, trace, lasts)


def _anywhere(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr whose equations do not say where they come from, since it may be kept and used elsewhere."""
    # `SourceInfo.replace(traceback=None)` would keep the traceback.
    nowhere = source_info_util.new_source_info()
    return jaxpr.replace(eqns=[equation.replace(source_info=nowhere) for equation in jaxpr.eqns])


def contains_custom(equation: JaxprEqn) -> bool:
    """Whether an equation stands for a backward pass that a user wrote, or contains one."""
    is_custom = lambda e: e.primitive.name in CUSTOM_LINEAR | HIGH_LINEAR
    return is_custom(equation) or any(any_equation(inner, is_custom) for inner in inner_jaxprs(equation))
