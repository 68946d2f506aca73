"""From a traced function to a program: the same for all that are equal."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from .._compat import is_staging
from .._programs import (
    MOVED,
    Again,
    Operands,
    Recent,
    Referring,
    Run,
    any_equation,
    as_array,
    as_closed,
    evaluate,
    holds_tracers,
    is_mutating,
    is_unreduced,
    jaxpr_and_consts,
    keyed_jaxpr,
    named,
    with_constants_as_inputs,
    without_dead_code,
)
from .known import captured
from .live import Live
from .program import Program
from .unwrapped import without_double_where

# How to run a program, and how to run it compiled. The second is not kept in the program: what JAX compiles holds the
# program, and lasts as long as the function that is compiled.
_Runs = tuple[Callable[[Operands], Operands], Callable[..., Operands]]
# Programs of equal structure share their derivatives.
_programs: Recent[_Runs] = Recent(256)
_BIG = 4096
# What may stand beside a call under `jit`: compiled with it, the values are the same to the last bit.
_EXACT = {*MOVED, *named("neg copy copy_p stop_gradient")}


def along_taken_paths(jaxpr: Jaxpr) -> Run:
    """A function that runs an open jaxpr so that derivatives flow only along taken paths."""
    # Constants become operands: a derivative is kept for later calls, and must not close over a tracer.
    plain = without_dead_code(with_constants_as_inputs(jaxpr))
    opened, found = jaxpr_and_consts(without_double_where(as_closed(plain)))
    stateful = with_constants_as_inputs(opened)
    # A rule that holds a traced value is run again, with the references.
    is_live = holds_tracers(stateful)
    referring = Referring(stateful, keep=is_live)
    inner = referring.jaxpr
    # Only JAX can follow what a custom rule does to a mutable reference, and no mask is a sum.
    is_left = any_equation(inner, lambda equation: is_mutating(equation) or is_unreduced(equation))
    keyed = keyed_jaxpr(inner, exact=True)
    is_jitted = keyed is not None and _is_jitted(plain)
    own: dict[Hashable, _Runs] = {}

    def runs_of(consts: Operands) -> _Runs:
        # Masks that were captured once may change.
        numbers = [*map(captured, consts), *[None] * (len(inner.invars) - len(consts))]
        key = tuple(None if known is None else (known.shape, known.dtype, known.tobytes()) for known in numbers)
        if key not in own:
            place = None if keyed is None else (keyed, key)
            own.clear()
            own[key] = _programs.of(place, lambda: _runs(Program(lambda: as_closed(inner), numbers)))
        return own[key]

    def along(consts: Operands, operands: Operands, again: Again) -> Operands:
        count = len(found) + len(consts)
        run = lambda values: along_values(values[:count], values[count:], again)
        return referring.run([*found, *consts, *operands], run)

    def along_values(consts: Operands, operands: Operands, again: Again) -> Operands:
        given = [*map(_unfolded, consts), *operands]
        given = [as_array(operand, v.aval) for operand, v in zip(given, inner.invars, strict=True)]
        if is_left or not any(isinstance(operand, jax.core.Tracer) for operand in given):
            return evaluate(inner, [], [*consts, *operands])
        if is_live:
            live = Live(lambda operands: list(again(*operands[len(consts) :])), len(consts))
            return Program(lambda: as_closed(inner), live=live).run(given)
        run, compiled = runs_of(consts)
        return compiled(*given) if is_jitted and not is_staging() else run(given)

    return along


def _runs(program: Program) -> _Runs:
    return program.run, jax.jit(lambda *operands: program.run(operands))


def _is_jitted(jaxpr: Jaxpr) -> bool:
    """Whether all that rounds in a function is one call of a function under `jit`, which JAX runs compiled."""
    rest = [equation for equation in jaxpr.eqns if equation.primitive.name not in _EXACT]
    return len(rest) == 1 and rest[0].primitive.name == "jit" and not jaxpr.effects


def _unfolded(const: Any) -> Any:
    # XLA would fold all masks that follow from a large constant one while compiling, which is slow.
    is_mask = hasattr(const, "dtype") and const.dtype == bool and const.size >= _BIG
    return jax.lax.optimization_barrier(const) if is_mask else const
