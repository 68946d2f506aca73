"""The one table of linear primitives: how each treats its elements, and in which operands it is linear.

From it come the answers to "is this linear" and, in `dependence`, "is it zero where its tangents are".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .equations import (
    branches_of,
    is_floating,
    jaxpr_and_consts,
    primal_jaxpr,
    residual_count,
    scan_of,
)
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_LINEAR,
    named,
)


class Rule(NamedTuple):
    """How a primitive treats its elements, in the operands that it is linear in.

    Attributes:
        kind: "lanes" if an element of the result depends on the same element of each operand, and "sum" if on the sum
            of these; "move" if each is an element, or a sum of elements, of the operands; "selection"; "product" of an
            operand and a coefficient; "coupled" if each depends on all elements of a problem.
        operands: The positions of the operands in which it is linear together; None for all.
        alone: Whether it is linear only in one of them at a time.
    """

    kind: str
    operands: tuple[int, ...] | None = None
    alone: bool = False


# Communication: a mask goes only where JAX's own tangents and cotangents go.
_COLLECTIVES = named(
    """all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic ppermute psum psum2
    psum_invariant ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter"""
)
_MOVES = _COLLECTIVES | named(
    """broadcast_in_dim concatenate copy cumsum expand_dims pad reduce_sum reduce_window_sum reshape rev slice split
    squeeze stack tile transpose unstack"""
)
_LANES = named(
    """complex conj convert_element_type copy_p imag layout_constraint mesh_cast name neg pcast preduced pvary real
    reduce_precision reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint
    vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint"""
)

LINEAR: dict[str, Rule] = {
    **dict.fromkeys(_LANES, Rule("lanes")),
    **dict.fromkeys(("add", "add_any", "sub"), Rule("sum")),
    **dict.fromkeys(_MOVES, Rule("move")),
    **dict.fromkeys(("gather", "dynamic_slice"), Rule("move", (0,))),
    "dynamic_update_slice": Rule("move", (0, 1)),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub"), Rule("move", (0, 2))),
    # Their other operand says where to look, and is no summand.
    "select_and_gather_add": Rule("move", (0,)),
    "select_and_scatter_add": Rule("move", (0,)),
    **dict.fromkeys(("device_put", "optimization_barrier"), Rule("each")),
    "select_n": Rule("selection", ()),
    "mul": Rule("product", (0, 1), alone=True),
    "div": Rule("product", (0,)),
    "scatter-mul": Rule("product", (0, 2), alone=True),
    **dict.fromkeys(("dot_general", "conv_general_dilated"), Rule("product", (0, 1), alone=True)),
    "ragged_dot_general": Rule("coupled", (0, 1), alone=True),
    "fft": Rule("coupled", (0,)),
    "triangular_solve": Rule("coupled", (1,)),
    "tridiagonal_solve": Rule("coupled", (3,)),
}
# What masks go through as numbers do, and collectives among them.
STEERED = named("select_and_gather_add select_and_scatter_add")


def of_kind(*kinds: str) -> frozenset[str]:
    """The names of the linear primitives of some kinds."""
    return frozenset(name for name, rule in LINEAR.items() if rule.kind in kinds)


def is_linear_in(equation: JaxprEqn, moving: Sequence[bool]) -> bool:
    """Whether an equation that contains no jaxprs is linear in the given operands together, and can be transposed."""
    name = equation.primitive.name
    at = [number for number, is_moving in enumerate(moving) if is_moving]
    if not at:
        return True
    if name == "custom_linear_solve":
        right_sides = len(moving) - sum(equation.params["const_lengths"])
        return not any(moving[: len(moving) - right_sides])
    if name in CUSTOM_LINEAR:
        return not any(moving[: residual_count(equation)])
    rule = LINEAR.get(name)
    if rule is None or not all(is_floating(equation.invars[number].aval) for number in at):
        return False
    if name == "select_n":
        return not moving[0]
    if name == "scatter" and not equation.params["unique_indices"]:
        # JAX cannot transpose a set whose indices may be equal.
        return False
    positions = range(len(moving)) if rule.operands is None else rule.operands
    return set(at).issubset(positions) and not (rule.alone and len(at) > 1)


def is_linear(jaxpr: Any, moving: Sequence[bool]) -> bool:
    """Whether a jaxpr, up to what it adds, is a linear function of some of its inputs that JAX can transpose."""
    return _linear_outputs(jaxpr_and_consts(jaxpr)[0], moving) is not None


def _linear_outputs(jaxpr: Any, moving: Sequence[bool]) -> list[bool] | None:
    """Which outputs depend on some inputs; None if they are not linear in them."""
    found = dict(zip(jaxpr.invars, moving, strict=True))
    moves = lambda atom: not hasattr(atom, "val") and found.get(atom, False)
    for equation in jaxpr.eqns:
        results = _moved(equation, list(map(moves, equation.invars)))
        if results is None:
            return None
        found.update(zip(equation.outvars, results, strict=True))
    return list(map(moves, jaxpr.outvars))


def _moved(equation: JaxprEqn, moving: list[bool]) -> list[bool] | None:
    name = equation.primitive.name
    if not any(moving):
        return [False] * len(equation.outvars)
    if name in CALLS | CHECKPOINTS or name == "shard_map":
        return _linear_outputs(jaxpr_and_consts(primal_jaxpr(equation))[0], moving)
    if name == "cond":
        branches = [_linear_outputs(jaxpr_and_consts(branch)[0], moving[1:]) for branch in branches_of(equation)]
        if moving[0] or None in branches:
            return None
        return [any(each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _scanned(equation, moving)
    return [True] * len(equation.outvars) if is_linear_in(equation, moving) else None


def _scanned(equation: JaxprEqn, moving: list[bool]) -> list[bool] | None:
    loop, moving = scan_of(equation), list(moving)
    carries = slice(loop.consts, loop.consts + loop.carried)
    while True:
        outputs = _linear_outputs(jaxpr_and_consts(loop.body)[0], moving)
        if outputs is None:
            return None
        grown = [before or after for before, after in zip(moving[carries], outputs, strict=False)]
        if grown == moving[carries]:
            return [*grown, *outputs[loop.carried :]]
        moving[carries] = grown


def fills(equation: JaxprEqn) -> bool:
    """Whether an equation reads a number other than zero where an index is out of bounds."""
    parameters = equation.params
    return parameters.get("mode") == jax.lax.GatherScatterMode.FILL_OR_DROP and parameters.get("fill_value", 0) != 0
