"""Which leaves the output of a function depends on differentiably, read off the traced derivative.

JAX has removed symbolic zeros and `stop_gradient` from a traced derivative, so a leaf whose tangent no longer reaches
the output is unused whatever the values are. The rules of `custom_vjp` show only in reverse mode, where a second trace
follows the cotangent to the leaves.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from .interpreter import CALLS, CHECKPOINTS, any_equation, inner_jaxprs, is_mutating, opened, scan_counts

# What a value depends on: a set of bits, one for each source, so that a union is `|`. The empty set is a known zero.
CONSTANT = 1
_CALLS = CALLS | CHECKPOINTS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_LINEAR = frozenset(
    (
        "add",
        "add_any",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "neg",
        "pad",
        "reduce_sum",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "sub",
        "transpose",
    )
)
_BILINEAR = frozenset({"mul", "dot_general"})


def used_leaves(function: Callable[[list[Any]], Any], selected: list[Any], *, has_aux: bool = False) -> list[bool]:
    """Tell of each leaf whether the output of a function can depend on it differentiably.

    What is decided is structure, not values: a leaf multiplied by 0.0 is used, and one behind `stop_gradient` is not.
    Nothing is computed, unless the function branches in Python on the values of its leaves; then it runs once or twice,
    and the answer holds for the branches it took.

    Args:
        function: A function of one list of arrays to a scalar, or to a pair of it and auxiliary data.
        selected: The floating or complex leaves.
        has_aux: Whether the function returns a pair.

    Returns:
        One bool for each leaf.
    """
    differentiated = _first(function) if has_aux else function
    jaxpr, shape = _staged(_linear_map, differentiated, selected, selected)
    count = len(selected)
    if any_equation(jaxpr, is_mutating):
        return [True] * count
    sources = [CONSTANT] * (len(jaxpr.invars) - count) + [2 << i for i in range(count)]
    reaching = _union(dependencies(jaxpr, sources))
    used = [bool(reaching & source) for source in sources[-count:]] if count else []
    if any(used) and any_equation(jaxpr, _has_own_rule):
        used = list(map(operator.and_, used, _reached_in_reverse(differentiated, selected, shape)))
    return used


def _first(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    return lambda leaves: function(leaves)[0]


def _linear_map(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Callable[[Any], Any]:
    # Not `jax.jvp`, which refuses `custom_vjp`.
    linear: Callable[[Any], Any] = jax.linearize(function, leaves)[1]
    return linear


def _pullback(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Callable[[Any], Any]:
    pullback: Callable[[Any], Any] = jax.vjp(function, leaves)[1]
    return lambda cotangent: pullback(cotangent)[0]


def _staged(derivative: Callable[..., Any], function: Any, leaves: list[Any], argument: Any) -> tuple[Any, Any]:
    """The jaxpr of a derivative at some leaves, whose last inputs are the argument; and the shape of its output."""
    try:
        closed, shape = jax.make_jaxpr(lambda at, v: derivative(function, at)(v), return_shape=True)(leaves, argument)
    except jax.errors.ConcretizationTypeError:
        # A branch in Python on a leaf: it may be legal, for `jax.grad` outside of `jit` knows the values.
        # As arrays, so that a leaf of value zero is no literal zero in the jaxpr.
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        closed, shape = jax.make_jaxpr(derivative(function, arrays), return_shape=True)(argument)
    return opened(closed)[0], shape


def _reached_in_reverse(function: Callable[[list[Any]], Any], selected: list[Any], shape: Any) -> list[bool]:
    """Tell of each leaf whether its cotangent is anything but a structural zero."""
    try:
        jaxpr, _ = _staged(_pullback, function, selected, shape)
    except ValueError:
        # Reverse mode does not apply to the function, a `while_loop` for one; then the linear map is all there is.
        return [True] * len(selected)
    if any_equation(jaxpr, is_mutating):
        return [True] * len(selected)
    # A rule may ignore its cotangent and return a constant: that is a gradient, hence used.
    return [bool(mask) for mask in dependencies(jaxpr, [CONSTANT] * (len(jaxpr.invars) - 1) + [2])]


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _has_own_rule(equation: Any) -> bool:
    return "bwd" in equation.params


def dependencies(jaxpr: Any, masks: list[int]) -> list[int]:
    """What each output of a jaxpr depends on, given what its inputs depend on; 0 is what is known to be zero."""
    known = dict.fromkeys(jaxpr.constvars, CONSTANT)
    known.update(zip(jaxpr.invars, masks, strict=True))

    def read(atom: Any) -> int:
        return _of_literal(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        results = _of_equation(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_literal(value: Any) -> int:
    # An array may be a value of the user's that happens to be zero; what JAX and rules write as zero is a number.
    is_zero = not isinstance(value, jax.Array) and not getattr(value, "shape", ()) and value == 0
    return 0 if is_zero else CONSTANT


def _of_equation(equation: Any, masks: list[int]) -> list[int]:
    name, inner = equation.primitive.name, list(inner_jaxprs(equation))
    if name == "scan":
        return _of_scan(equation, inner[0], masks)
    if name == "while":
        return _of_while(equation, masks)
    if name == "cond":
        branches = zip(*(dependencies(branch, masks[1:]) for branch in inner), strict=True)
        return [_union(each) | _sources(masks[0]) for each in branches]
    if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(masks):
        return dependencies(inner[0], masks)
    if name == "optimization_barrier":
        return masks
    return [_of_primitive(name, masks)] * len(equation.outvars)


def _sources(mask: int) -> int:
    return mask & ~CONSTANT


def _of_primitive(name: str, masks: list[int]) -> int:
    union = _union(masks)
    if name in _LINEAR:
        return union
    if name in _BILINEAR:
        # A zero that the program multiplies by is a number, but the zero that a rule returned stays one.
        return union if _sources(union) or all(masks) else 0
    if name == "select_n":
        return _union(masks[1:]) | _sources(masks[0])
    if name in {"div", "dynamic_slice"}:
        return masks[0] | _sources(union)
    return union | CONSTANT


def _of_scan(equation: Any, body: Any, masks: list[int]) -> list[int]:
    constants, carried = scan_counts(equation)
    consts, carry, xs = masks[:constants], masks[constants : constants + carried], masks[constants + carried :]
    step = lambda carry: dependencies(body, [*consts, *carry, *xs])
    stacked = [0] * (len(equation.outvars) - carried)
    # Step by step first: what the first step overwrites is unused, and a union over all lengths would not tell.
    for _ in range(min(equation.params["length"], 2 * carried + 2)):
        outputs = step(carry)
        stacked = [before | now for before, now in zip(stacked, outputs[carried:], strict=True)]
        if outputs[:carried] == carry:
            return [*carry, *stacked]
        carry = outputs[:carried]
    if equation.params["length"] <= 2 * carried + 2:
        return [*carry, *stacked]
    outputs = _fixed_point(step, carry)
    return [*outputs[:carried], *(before | now for before, now in zip(stacked, outputs[carried:], strict=True))]


def _of_while(equation: Any, masks: list[int]) -> list[int]:
    condition, body = opened(equation.params["cond_jaxpr"])[0], opened(equation.params["body_jaxpr"])[0]
    carried = len(equation.outvars)
    of_condition = len(condition.invars) - carried
    of_body = len(body.invars) - carried
    tested, consts, carry = masks[:of_condition], masks[of_condition:][:of_body], masks[of_condition + of_body :]

    def step(carry: list[int]) -> list[int]:
        predicate = _sources(_union(dependencies(condition, [*tested, *carry])))
        return [mask | predicate for mask in dependencies(body, [*consts, *carry])]

    return _fixed_point(step, carry)


def _fixed_point(step: Callable[[list[int]], list[int]], carry: list[int]) -> list[int]:
    """The outputs of a loop: the carry, which contains its start (a loop may run no time), and what is stacked."""
    while True:
        outputs = step(carry)
        grown = [before | after for before, after in zip(carry, outputs, strict=False)]
        if grown == carry:
            return [*carry, *outputs[len(carry) :]]
        carry = grown
