"""A program in which nothing is under `double_where` already, so that one engine sees all of it."""

from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .._programs import OWN, Chain, Operands, any_equation, evaluate, jaxpr_and_consts, run, shown


def is_double_where(equation: JaxprEqn) -> bool:
    """Whether an equation calls a function under `double_where`, or a derivative of one."""
    return equation.primitive.name in OWN


def without_double_where(closed: Any) -> Any:
    """A closed jaxpr in which nothing is under `double_where`.

    Residuals that a function under it returns have no derivative, because its own derivative starts from the operands
    again. A program that reads them has to see how they are computed.
    """
    jaxpr, consts = jaxpr_and_consts(closed)
    if not any_equation(jaxpr, is_double_where):
        return closed

    def opening(chain: Chain, operands: Operands) -> Operands | None:
        return evaluate(*jaxpr_and_consts(shown(chain[-1])), operands) if is_double_where(chain[-1]) else None

    unwrapped = lambda *o: run(jaxpr, consts, list(o), opening, wanted=is_double_where)
    return jax.make_jaxpr(unwrapped)(*(variable.aval for variable in jaxpr.invars))
