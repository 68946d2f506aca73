"""A walk over a program, equation by equation, with a mask beside every (co)tangent.

The same rules serve forward mode, where a linear program is walked, and reverse mode, where JAX's transposes of its
steps are. A value is *dirty* if it may be anything where no path leads. It stays dirty through steps that keep elements
apart, and is selected once before a step that mixes elements. Only what is summed over has to meet finite coefficients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import ad

from .._programs import (
    BACKWARD,
    CALLS,
    CHECKPOINTS,
    CUSTOM_LINEAR,
    HIGH_LINEAR,
    OWN,
    STEERED,
    Operands,
    along,
    bind,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    is_linear_in,
    jaxpr_and_consts,
    mesh_elsewhere,
    named,
    of_kind,
    primal_jaxpr,
    shown,
    source_of,
    step_through,
    varying_like,
    zeros_like_aval,
)
from . import bodies, loops
from .backward import forward_of, kept_rule, pulled_by_user
from .fed import fed
from .follow import follow
from .known import is_zero, numbers_of
from .linear import Step
from .masked import Masked, clean, copied
from .masks import Mask, either, spread
from .moves import as_operands
from .products import factors_fed, is_constant, solved, summed

# Dirt stays where it is.
_APART = (of_kind("lanes") - {"complex"}) | named(
    "broadcast_in_dim copy expand_dims reshape rev select_n slice squeeze transpose"
)
_SUMS, _MOVES = of_kind("sum"), of_kind("move") | {"complex"}
_SUMMED = named("dot_general conv_general_dilated")
_SOLVED = named("fft triangular_solve tridiagonal_solve")
# Their other operand is a factor, and not a summand.
_FACTORS = of_kind("product") | _SOLVED | {"custom_linear_solve"}


class Walk:
    """A walk over programs.

    Args:
        is_affine: Whether what is walked may add numbers to what it makes of cotangents, as the backward pass of a
            `custom_vjp` may. The tangents and cotangents that JAX makes are linear: a fixed summand there is zero,
            whatever it is computed from.
    """

    def __init__(self, is_affine: bool = False):
        self._is_affine = is_affine

    def through(self, jaxpr: Jaxpr, consts: Operands, items: Sequence[Masked]) -> list[Masked]:
        """The outputs of a program of fixed values and (co)tangents, with their masks."""
        literal = lambda literal: Masked(literal.val)
        return step_through(jaxpr, list(map(Masked, consts)), list(items), self.over, literal=literal)

    def over(self, equation: JaxprEqn, items: list[Masked]) -> list[Masked]:
        """The results of one equation."""
        if self._is_affine:
            items = list(map(_without_tangent, items))
        mesh = mesh_elsewhere(equation)
        if mesh is None:
            return self._over(equation, items)
        items = copied(items)
        with jax.sharding.use_abstract_mesh(mesh):
            found = copied(self._over(equation, copied(items)))
        return copied(found)

    def _over(self, equation: JaxprEqn, items: list[Masked]) -> list[Masked]:
        name = equation.primitive.name
        if name == BACKWARD:
            with source_of(equation):
                return pulled_by_user(equation, items, AFFINE.through)
        if all(item.mask is None for item in items):
            values = [item.value for item in items]
            results = bind(equation, values)
            follow(equation, values, results)
            return list(map(Masked, results))
        if name in CALLS:
            return self.through(*jaxpr_and_consts(primal_jaxpr(equation)), items)
        if name in OWN:
            return self.through(*jaxpr_and_consts(shown(equation)), items)
        if is_custom_rule(equation):
            return kept_rule(equation, items, AFFINE.through)
        if name in ENTERED:
            with source_of(equation):
                return ENTERED[name](equation, [Masked(clean(item), item.mask) for item in items], self.through)
        if name in CUSTOM_LINEAR | HIGH_LINEAR:
            found = forward_of(equation, items, self.through)
            if found is not None:
                return found
        return self._over_step(equation, items)

    def _over_step(self, equation: JaxprEqn, items: list[Masked]) -> list[Masked]:
        """The results of an equation without jaxprs, by the rule for its primitive."""
        step = Step(equation, [item.value for item in items], [item.mask is not None for item in items])
        wired, masks = step.of_tangents(items), [False if item.mask is None else item.mask for item in items]
        is_linear = is_linear_in(equation, step.linear)
        summands = step.fixed if self._is_affine and step.name not in _FACTORS | STEERED else []
        adds = any(is_floating(jax.typeof(value)) and not is_zero(value) for value in summands)
        if all(item.mask is False for item in wired) and not adds and (is_linear or not self._is_affine):
            return [Masked(zeros_like_aval(aval), False) for aval in step.results]
        if is_linear and not adds:
            return _RULES.get(step.name, _mixed)(step, wired, fed(step, masks))
        return _number_added(step, wired, fed(step, masks))


LINEAR, AFFINE = Walk(), Walk(is_affine=True)

ENTERED: dict[str, Callable[..., list[Masked]]] = {
    "scan": loops.scan,
    "while": loops.while_loop,
    "cond": bodies.cond,
    "shard_map": bodies.shard_map,
    **dict.fromkeys(CHECKPOINTS, bodies.checkpoint),
}


# --- rules: from the (co)tangents that enter a linear step, and the masks of its results, to these -------------------


def _apart(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    (result,) = step.run([item.value for item in wired])
    return [Masked(result, masks[0], any(item.dirty for item in wired))]


def _each(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    results = step.run([item.value for item in wired])
    found, operands = iter(wired), zip(results, masks, step.operands, step.linear, strict=True)

    def fixed(value: Any, result: Any) -> Masked:
        # The cotangent of what is not used is a zero that JAX 0.10 gives to a barrier: no path leads to it.
        is_dead = is_floating(jax.typeof(value)) and is_zero(value)
        return Masked(zeros_like_aval(jax.typeof(value)), False) if is_dead else Masked(result)

    return [Masked(r, m, next(found).dirty) if is_tangent else fixed(v, r) for r, m, v, is_tangent in operands]


def _factor(step: Step, wired: list[Masked], _: list[Mask]) -> list[Masked]:
    (item,), (factor,) = wired, step.fixed
    (result,) = step.run([item.value])
    dirty = item.dirty or not is_constant(factor, step.name == "div")
    return [Masked(result, spread(_mask(item), step.shape), dirty)]


def _sum(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    same = all(item.mask is wired[0].mask for item in wired)
    (result,) = step.run([item.value if same else clean(item) for item in wired])
    return [Masked(result, masks[0], same and any(item.dirty for item in wired))]


def _summed(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    (item,) = wired
    result, is_clean = summed(step, _mask(item), clean(item))
    return [Masked(result, masks[0], not is_clean)]


def _moved(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    return list(map(Masked, as_operands(step, list(map(clean, wired))), masks))


def _solved(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    (item,) = wired
    return solved(step, _mask(item), clean(item), masks)


def _mixed(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    """A linear step without a rule of its own: dead results may be anything, whatever its coefficients are."""
    results = step.run(list(map(clean, wired)))
    return [Masked(result, mask, True) for result, mask in zip(results, masks, strict=True)]


_RULES: dict[str, Callable[..., list[Masked]]] = {
    **dict.fromkeys(_MOVES, _moved),
    **dict.fromkeys(_APART, _apart),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(of_kind("each"), _each),
    **dict.fromkeys(("mul", "div"), _factor),
    **dict.fromkeys(_SUMMED, _summed),
    **dict.fromkeys(_SOLVED, _solved),
}


def _without_tangent(item: Masked) -> Masked:
    """A value that a backward pass computed of its cotangent is fixed if its dtype has no derivatives: a predicate."""
    return item if item.mask is None or is_floating(jax.typeof(item.value)) else Masked(clean(item))


def _mask(item: Masked) -> Mask:
    assert item.mask is not None
    return item.mask


# --- what is not linear, or adds a number: only in what a user wrote as a backward pass ------------------------------


def _number_added(step: Step, wired: list[Masked], masks: list[Mask]) -> list[Masked]:
    """Results to which a fixed number is added: live where a path leads, and where that number is not zero."""
    if step.name in {"mul", "div"} and len(wired) == 2 and is_floating(step.results[0]):
        # Where one factor is dead, the other may be infinite.
        (result,) = step.run(list(map(clean, wired)))
        return [Masked(result, factors_fed(step, list(map(_mask, wired))), True)]
    values = list(map(clean, wired))
    results = step.run(values)
    return list(map(Masked, results, _live(step, masks, values, results)))


def _live(step: Step, masks: list[Mask], given: Operands, results: Operands) -> list[Mask]:
    """Where a path leads, or a change of a fixed operand changes the result.

    A result may be zero by chance: its derivative goes through what comes before.
    """
    if all(mask is True for mask in masks):
        return masks
    # A predicate where nothing is fed is that of zeros.
    masks = [either(mask, r != 0) if is_floating(r) else mask for mask, r in zip(masks, results, strict=True)]
    fixed = enumerate(step.fixed)
    moving = [n for n, value in fixed if is_floating(jax.typeof(value)) and numbers_of(value) is None]
    if step.name in _FACTORS or not moving:
        return masks
    if any(inner_jaxprs(step.equation)) or step.equation.primitive not in ad.primitive_jvps:
        return [True] * len(masks)
    of_data, data = along(lambda fixed: step.with_fixed(fixed).run(given), moving, step.fixed)
    ones = [varying_like(jax.lax.full_like(value, 1), jax.typeof(value)) for value in data]
    _, changes = jax.jvp(of_data, data, ones)
    pairs = zip(masks, changes, strict=True)
    return [either(mask, change != 0) if is_floating(change) else mask for mask, change in pairs]
