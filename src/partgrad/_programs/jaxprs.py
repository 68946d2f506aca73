"""Jaxprs opened, cut, joined and taken apart: nothing is traced, unless JAX has to take a loop or a branch apart."""

import functools
from collections.abc import Container, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._compat import has_side_effects, is_forward_pass, parted_program
from .equations import Operands, inner_jaxprs, jaxpr_and_consts, primal_jaxpr
from .interpreter import expanded, step_through, with_constants_as_inputs
from .lines import has_line
from .primitives import CALLS, FORWARD_PASSES


def inlined(equations: list[JaxprEqn], jaxpr: Jaxpr, atoms: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr whose inputs are given variables or literals, after its equations were added to others."""
    return _inlined(equations, jaxpr, atoms, (), {})


def _inlined(
    equations: list[JaxprEqn],
    jaxpr: Jaxpr,
    atoms: Sequence[Any],
    opened: Container[str],
    constants: dict[Var, Any],
) -> list[Any]:
    """The same, with calls opened.

    Args:
        equations: What they are added to, each with results that are new.
        jaxpr: An open jaxpr without constants.
        atoms: For each of its inputs.
        opened: The names of calls whose bodies are added in their place.
        constants: Takes the constants of such bodies, each with its variable.
    """

    def step(around: JaxprEqn | None, equation: JaxprEqn, given: list[Any]) -> list[Any]:
        source = equation.source_info
        if around is not None:
            traceback = source.traceback if has_line(equation) else around.source_info.traceback
            names = around.source_info.name_stack + source.name_stack
            source = source.replace(traceback=traceback, name_stack=names)
            equation = equation.replace(source_info=source)
        inner, consts = jaxpr_and_consts(_body_of(equation, opened))
        if isinstance(inner, Jaxpr):
            own = [Var(variable.aval) for variable in inner.constvars]
            constants.update(zip(own, consts, strict=True))
            return step_through(inner, own, given, functools.partial(step, equation), literal=lambda literal: literal)
        results = [Var(variable.aval) for variable in equation.outvars]
        equations.append(equation.replace(invars=given, outvars=results))
        return results

    return step_through(jaxpr, [], list(atoms), functools.partial(step, None), literal=lambda literal: literal)


def _body_of(equation: JaxprEqn, opened: Container[str]) -> Any:
    """What stands in the place of a call that is opened; None for another equation.

    A call with constants stays: a rule around it may take these for its own.
    """
    if opened and is_forward_pass(equation):
        return expanded(equation)
    if equation.primitive.name not in opened:
        return None
    if equation.primitive.name in FORWARD_PASSES:
        return equation.params["fwd_jaxpr"]
    body = primal_jaxpr(equation)
    return None if jaxpr_and_consts(body)[1] else body


def without_calls(closed: Any, opened: Container[str] = CALLS | FORWARD_PASSES) -> tuple[Jaxpr, Operands]:
    """A closed jaxpr as an open one, whose first inputs are its constants, with the bodies of calls in their place."""
    jaxpr, consts = jaxpr_and_consts(closed)
    jaxpr, equations, constants = with_constants_as_inputs(jaxpr), list[JaxprEqn](), dict[Var, Any]()
    outputs = _inlined(equations, jaxpr, jaxpr.invars, opened, constants)
    opened_jaxpr = jaxpr.replace(invars=[*constants, *jaxpr.invars], outvars=outputs, eqns=equations)
    return without_dead_code(opened_jaxpr), [*constants.values(), *consts]


def parted(jaxpr: Jaxpr, moving: int) -> tuple[Jaxpr, Operands, Jaxpr, list[bool]]:
    """A jaxpr without constants and calls taken apart by its last inputs, which are not known yet.

    Only what contains jaxprs itself, such as a loop, is traced again.

    Returns:
        From constants and its other inputs to the outputs that they determine, and residuals; these constants; from
        residuals and the last inputs to the other outputs; and which outputs these are.
    """
    count = len(jaxpr.invars) - moving
    inputs, tangents = jaxpr.invars[:count], jaxpr.invars[count:]
    first, second, constants = list[JaxprEqn](), list[JaxprEqn](), dict[Var, Any]()

    def step(equation: JaxprEqn, given: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        atoms, unknown = [atom for atom, _ in given], [is_unknown for _, is_unknown in given]
        if not any(unknown) or not any(inner_jaxprs(equation)):
            (second if any(unknown) else first).append(equation.replace(invars=atoms))
            return [(variable, any(unknown)) for variable in equation.outvars]
        operands, results = ([Var(atom.aval) for atom in side] for side in (equation.invars, equation.outvars))
        one = cut(jaxpr, operands, results, [equation.replace(invars=operands, outvars=results)])
        known, rest, flags = parted_program(one, unknown)
        inner, consts = jaxpr_and_consts(known)
        own = [Var(variable.aval) for variable in inner.constvars]
        constants.update(zip(own, consts, strict=True))
        here = [*own, *(atom for atom, is_unknown in given if not is_unknown)]
        found = inlined(first, with_constants_as_inputs(inner), here)
        saved = found[flags.count(False) :]
        moved = inlined(second, rest, [*saved, *(atom for atom, is_unknown in given if is_unknown)])
        now, later = iter(found), iter(moved)
        return [(next(later if is_later else now), is_later) for is_later in flags]

    given = [*((variable, False) for variable in inputs), *((variable, True) for variable in tangents)]
    outputs = step_through(jaxpr, [], given, step, literal=lambda literal: (literal, False))
    rest = cut(jaxpr, tangents, [atom for atom, is_unknown in outputs if is_unknown], second)
    made = {*tangents, *(variable for equation in rest.eqns for variable in equation.outvars)}
    read = [*(atom for equation in rest.eqns for atom in equation.invars), *rest.outvars]
    residuals = list(dict.fromkeys(a for a in read if not isinstance(a, Literal) and a not in made))
    known = cut(
        jaxpr, [*constants, *inputs], [*(atom for atom, is_unknown in outputs if not is_unknown), *residuals], first
    )
    return (
        known,
        list(constants.values()),
        rest.replace(invars=[*residuals, *tangents]),
        [is_unknown for _, is_unknown in outputs],
    )


def as_closed(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """An open jaxpr as a closed one whose constants are its first inputs."""
    count = len(consts)
    parts = jaxpr.outvars, jaxpr.eqns, jaxpr.effects, jaxpr.debug_info
    return ClosedJaxpr(Jaxpr(jaxpr.invars[:count], jaxpr.invars[count:], *parts) if count else jaxpr, list(consts))


def cut(jaxpr: Jaxpr, inputs: Sequence[Var], outputs: Sequence[Any], equations: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr like another, of other inputs and outputs, with those of some equations that are needed."""
    return without_dead_code(Jaxpr([], list(inputs), list(outputs), list(equations), jaxpr.effects, _unnamed(jaxpr)))


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without the equations that nothing needs, which would cost time where it is not compiled."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if has_side_effects(equation) or any(variable in needed for variable in equation.outvars):
            equations.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return jaxpr.replace(eqns=equations[::-1])


def with_outputs(closed: Any, used: Sequence[bool]) -> Any:
    """A closed jaxpr with some of its outputs only, and what they need."""
    jaxpr, _ = jaxpr_and_consts(closed)
    outputs = [atom for atom, is_used in zip(jaxpr.outvars, used, strict=True) if is_used]
    return closed.replace(jaxpr=without_dead_code(jaxpr.replace(outvars=outputs, debug_info=_unnamed(jaxpr))))


def _unnamed(jaxpr: Jaxpr) -> Any:
    """What JAX knows of where a jaxpr is from, without the names of inputs and outputs, which change."""
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None) if jaxpr.debug_info else None
