"""`dtype=`: gradients that are accumulated, and arrive, in a wider dtype than the leaves have.

A narrow leaf is a constant of the program. Beside it goes a *place*, an array of zeros in the wide dtype, through
loops, calls and whatever only moves numbers. Where the leaf is used, the cotangent of the result is the place's too. So
contributions meet in the wide dtype, and products such as matrix multiplications make theirs in it, of operands that
are as narrow as before. No value depends on a place.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from .._double_where import double_where, is_double_where
from .._programs import (
    CALLS,
    CHECKPOINTS,
    LINEAR,
    Operands,
    bind,
    jaxpr_and_consts,
    named,
    primal_jaxpr,
    reenter,
    scan_of,
    step_through,
    traced_call,
    varying_like,
    zeros_like_aval,
)

# Linear in each operand alone (a quotient in the first), with a transpose that is made of products, sums and moves.
_PRODUCTS = named("mul div dot_general conv_general_dilated")
# What they add may have been broadcast, so that their transpose sums.
_SUMS = named("add sub add_any")
# They write numbers of a leaf among others.
_WRITES = named("scatter dynamic_update_slice")
# It rounds, and would round the derivative too.
_ROUNDING = named("reduce_precision")


class Wide(NamedTuple):
    """A narrow value that depends on nothing but a leaf, and the place for its derivative; a pytree."""

    value: Any
    place: Any


def in_precision(
    function: Callable[[list[Any]], Any], leaves: Sequence[Any], dtype: Any
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """A function, and where to differentiate it, whose gradient is that of another one in at least a dtype.

    Args:
        function: The other function, of a list of leaves. It is traced, as under `jax.jit`.
        leaves: The leaves.
        dtype: A floating dtype. Leaves that have as many bits keep their own.
    """
    places = [_place(leaf, dtype) for leaf in leaves]
    if all(place is None for place in places):
        return function, list(leaves)

    is_narrow = [place is not None for place in places]
    narrow = [jnp.asarray(leaf) for leaf, own in zip(leaves, is_narrow, strict=True) if own]

    def merged(narrow: Sequence[Any], others: Sequence[Any]) -> Any:
        parts = {True: iter(narrow), False: iter(others)}
        return function([next(parts[own]) for own in is_narrow])

    def of_places(values: list[Any]) -> Any:
        others = [value for value, own in zip(values, is_narrow, strict=True) if not own]
        wide = map(Wide, narrow, [value for value, own in zip(values, is_narrow, strict=True) if own])
        call = traced_call(merged, (narrow, others), {})
        operands = [*wide, *call.operands[len(narrow) :]]
        return call.result(_joined(_run(call.jaxpr, call.consts, operands)))

    return of_places, [leaf if place is None else place for leaf, place in zip(leaves, places, strict=True)]


def _place(leaf: Any, dtype: Any) -> Any:
    """Zeros for the derivative of a leaf that is narrower than a dtype; None for others."""
    own = getattr(leaf, "dtype", None)
    if own is None or not jnp.issubdtype(own, jnp.floating) or jnp.finfo(own).bits >= jnp.finfo(dtype).bits:
        return None
    return jnp.zeros_like(leaf, dtype)


def _run(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
    """The outputs of a jaxpr, some of them with the place for their derivative."""
    return step_through(jaxpr, consts, operands, _step)


def _step(equation: JaxprEqn, given: Operands) -> Operands:
    wide = [isinstance(operand, Wide) for operand in given]
    if not any(wide):
        return bind(equation, given)
    name = equation.primitive.name
    if name in CALLS or name in CHECKPOINTS:
        return reenter(equation, given, _run) or []
    if name == "scan":
        return _scanned(equation, given)
    if name in ("cond", "shard_map"):
        operands = [*_joined(given[:1]), *given[1:]] if name == "cond" else given
        return reenter(equation, operands, lambda *own: _joined(_run(*own))) or []
    if is_double_where(equation):
        inner = jaxpr_and_consts(primal_jaxpr(equation))
        return list(double_where(lambda *own: _joined(_run(*inner, list(own))))(*given))
    if name in _SUMS or (name in _PRODUCTS and not (name == "div" and wide[1])):
        return _used(equation, given)
    return _moved(equation, given, wide) or bind(equation, _joined(given))


def _scanned(equation: JaxprEqn, given: Operands) -> Operands:
    """A scan: what is carried unchanged keeps its place, and what the steps read keeps it too."""
    loop = scan_of(equation)
    body, _ = jaxpr_and_consts(loop.body)
    first, last = loop.consts, loop.consts + loop.carried
    kept = [one is other for one, other in zip(body.invars[first:last], body.outvars, strict=False)]
    carried = [own if keeps else _narrow(own) for own, keeps in zip(given[first:last], kept, strict=True)]

    def run(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        outputs = _run(jaxpr, consts, operands)
        new = [own if keeps else _narrow(own) for own, keeps in zip(outputs[: loop.carried], kept, strict=True)]
        return [*new, *outputs[loop.carried :]]

    return reenter(equation, [*given[:first], *carried, *given[last:]], run) or []


def _moved(equation: JaxprEqn, given: Operands, wide: list[bool]) -> Operands | None:
    """The results of an equation that moves the numbers of a leaf, or adds them, with their places; None for others."""
    rule, name = LINEAR.get(equation.primitive.name), equation.primitive.name
    if rule is None or rule.kind not in ("lanes", "move") or name in _ROUNDING:
        return None
    linear = range(len(given)) if rule.operands is None else rule.operands
    if [number for number, is_wide in enumerate(wide) if is_wide] != list(linear) and name not in _WRITES:
        return None
    values = bind(equation, _values(given))
    changed: dict[str, Any] = {}
    if name == "convert_element_type":
        if not jnp.issubdtype(equation.params["new_dtype"], jnp.floating):
            return values
        changed["new_dtype"] = given[0].place.dtype
    dtype = next(own.place.dtype for own in given if isinstance(own, Wide))
    empty = lambda value: varying_like(jnp.zeros_like(value, dtype), jax.typeof(value))
    others = [empty(own) if number in linear else own for number, own in enumerate(_values(given))]
    pairs = zip(given, others, strict=True)
    return list(map(Wide, values, bind(equation, [getattr(own, "place", other) for own, other in pairs], **changed)))


def _values(given: Operands) -> Operands:
    return [own.value if isinstance(own, Wide) else own for own in given]


def _joined(values: Operands) -> Operands:
    return [_narrow(value) for value in values]


def _narrow(value: Any) -> Any:
    """A value alone, whose derivative goes to its place."""
    return _with_places(value.value, [value.place], [], lambda _, own: [own]) if isinstance(value, Wide) else value


def _used(equation: JaxprEqn, given: Operands) -> Operands:
    """A product or a sum; the derivative with respect to each leaf in it is made in the dtype of its place."""
    narrow, is_sum = _values(given), equation.primitive.name in _SUMS
    numbers = [number for number, own in enumerate(given) if isinstance(own, Wide)]
    dtypes = [given[number].place.dtype for number in numbers]

    # What is needed is kept. A sum is linear in one operand where the other is zero, and an operand needs no value for
    # its own derivative.
    needed = [number for number in range(len(given)) if not is_sum and numbers != [number]]

    def backward(residuals: Operands, cotangent: Any) -> Operands:
        operands = [zeros_like_aval(atom.aval) for atom in equation.invars]
        for number, residual in zip(needed, residuals, strict=True):
            operands[number] = residual
        pairs = zip(numbers, dtypes, strict=True)
        return [_transposed(equation, number, operands, cotangent, dtype) for number, dtype in pairs]

    (result,) = bind(equation, narrow)
    places = [given[number].place for number in numbers]
    return [_with_places(result, places, [narrow[number] for number in needed], backward)]


def _transposed(equation: JaxprEqn, number: int, operands: Operands, cotangent: Any, dtype: Any) -> Any:
    """The cotangent of an operand of a bilinear equation, in a wider dtype than that of the operand."""

    def linear(own: Any) -> Any:
        return bind(equation, [*operands[:number], own, *operands[number + 1 :]])[0]

    transpose = jax.linear_transpose(linear, operands[number])
    jaxpr, consts = jaxpr_and_consts(jax.make_jaxpr(lambda cotangent: transpose(cotangent)[0])(cotangent))
    wider = lambda value: value.astype(dtype) if _is_narrower(value, dtype) else value

    def step(equation: JaxprEqn, given: Operands) -> Operands:
        if "preferred_element_type" in equation.params:
            product = lambda *given: bind(equation, list(given), preferred_element_type=dtype)
            # Elsewhere such products take narrow operands as fast as before; XLA has not all of them for CPUs.
            return list(lax.platform_dependent(*given, cpu=lambda *own: product(*map(wider, own)), default=product))
        if equation.primitive.name == "convert_element_type":
            return given
        if equation.primitive.name in CALLS:
            return step_through(*jaxpr_and_consts(primal_jaxpr(equation)), given, step)
        return bind(equation, list(map(wider, given)))

    return wider(step_through(jaxpr, consts, [cotangent], step)[0])


def _is_narrower(value: Any, dtype: Any) -> bool:
    own = jnp.result_type(value)
    return bool(jnp.issubdtype(own, jnp.floating)) and jnp.finfo(own).bits < jnp.finfo(dtype).bits


def _with_places(value: Any, places: Operands, residuals: Operands, backward: Callable[..., Operands]) -> Any:
    """The value; its cotangent goes on, and to the places, by a function of the residuals and the cotangent."""
    dtypes = [place.dtype for place in places]

    @jax.custom_vjp
    def joined(value: Any, places: Operands, residuals: Operands) -> Any:
        return value

    def pull(residuals: Operands, cotangent: Any) -> tuple[Any, Operands, None]:
        found = zip(backward(residuals, cotangent), dtypes, strict=True)
        return cotangent, [own.astype(dtype) for own, dtype in found], None

    joined.defvjp(lambda value, places, residuals: (value, residuals), pull)
    return joined(value, places, residuals)
