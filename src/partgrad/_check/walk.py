"""Run a jaxpr with a rule for its equations at every depth, inside of custom derivative rules as well: for values."""

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._programs import Operands, bind, custom_rule_body, opened, reenter
from .program import Chain

ChainRule = Callable[[Chain, Operands], Operands | None]


def walk(jaxpr: ClosedJaxpr, operands: Operands, rule: ChainRule) -> Operands:
    """The outputs of a jaxpr, some of whose equations are run by a rule.

    Not to be differentiated: custom derivative rules are lost.

    Args:
        jaxpr: The jaxpr.
        operands: The values of its inputs.
        rule: From an equation, after those that it is inside of, and its operands to its results, or to None to run it
            as it was. It is asked about what contains other equations before it is asked about these.

    Returns:
        The values of the outputs.
    """
    return _walk(*opened(jaxpr), list(operands), chain=(), rule=rule)


def _walk(jaxpr: Jaxpr, consts: Operands, operands: Operands, chain: Chain, rule: ChainRule) -> Operands:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        inside = functools.partial(_walk, chain=(*chain, equation), rule=rule)
        results = rule((*chain, equation), given)
        if results is None and (body := custom_rule_body(equation)) is not None:
            results = inside(*opened(body), given)
        if results is None:
            results = reenter(equation, given, inside)
        if results is None:
            results = bind(equation, given)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
