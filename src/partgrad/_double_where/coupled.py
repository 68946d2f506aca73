"""Masks through primitives in which every element of a result depends on every element of an operand, per problem.

Unknown primitives are treated the same way: a missing rule costs precision, never correctness.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .._programs import CALLS, Operands, any_equation, inner_jaxprs, opened, solve_parts
from .known import reshaped
from .mask import Mask, anywhere, both, spread
from .program import LinearProgram, Step, Wire
from .structural import lanes_fed
from .trim import POINTWISE, RULES, UNKNOWN, Emit, Guard, Recorder, Rule, feed, only, outputs_fed, trim


def _batch_axes(step: Step) -> int:
    """How many leading axes of a coupled primitive merely enumerate independent problems."""
    if step.name == "fft":
        return len(step.shape) - len(step.equation.params["fft_lengths"])
    return len(step.shape) - 2 if step.name in {"triangular_solve", "tridiagonal_solve"} else 0


def _coupled_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    live = _anywhere_in(step, fed)
    return [spread(live, wire.shape) for wire in step.results]


def _anywhere_in(step: Step, masks: Sequence[Mask]) -> Mask:
    return anywhere(masks, _batch_axes(step))


def coupled_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    is_fed, is_demanded = _anywhere_in(step, fed), _anywhere_in(step, demanded)
    needed = both(is_fed, is_demanded)
    if any(inner_jaxprs(step.equation)):
        # What it computes besides tangents has to terminate too.
        trimmed = guard.whole(step)
    else:
        known = [pair for pair in enumerate(step.operands) if not isinstance(pair[1], Wire)]
        # Ones in a triangle are a system that can be solved; on three diagonals the middle one has to dominate.
        fillers = [3 if (step.name, number) == ("tridiagonal_solve", 1) else None for number, _ in known]
        pairs = zip(known, fillers, strict=True)
        trimmed = step.with_known([guard.coefficient(v, _of_rank(needed, v), filler, True) for (_, v), filler in pairs])
    of_wires = [spread(is_demanded, wire.shape) for wire in step.wires]
    return of_wires, _between(of_wires, trimmed, [is_fed] * len(step.results))


def _between(demanded: Sequence[Mask], step: Step, fed: Sequence[Mask]) -> Emit:
    """A step that keeps both promises, whatever its coefficients are."""

    def run(tangents: Sequence[Any]) -> Operands:
        results = step.run([only(mask, tangent) for mask, tangent in zip(demanded, tangents, strict=True)])
        return [only(mask, result) for mask, result in zip(fed, results, strict=True)]

    return run


def _of_rank(mask: Mask, value: Any) -> Mask:
    """A mask of batches for an operand that may have fewer trailing axes than the result."""
    if isinstance(mask, bool) or mask.ndim <= jnp.ndim(value):
        return mask
    return reshaped(mask, mask.shape[: jnp.ndim(value)])


# --- linear solves: masks go through the equations of a direct solver, which itself runs unchanged ------------------


def _solve_fed(step: Step, fed: list[Mask]) -> list[Mask]:
    right = step.of_wires(fed)
    if all(mask is True for mask in right) or not _is_direct(step):
        return _coupled_fed(step, fed)
    return outputs_fed(_programs(step)["solve"], right)


def _solve_trim(step: Step, fed: list[Mask], demanded: list[Mask], guard: Guard) -> tuple[list[Mask], Emit]:
    right = step.of_wires(fed)
    if all(mask is True for mask in (*right, *demanded)):
        return [True] * len(step.wires), guard.whole(step).run
    if not _is_direct(step):
        return coupled_trim(step, fed, demanded, guard)
    programs, recorder = _programs(step), Recorder(guard, step.known)
    solved = outputs_fed(programs["solve"], right)
    of_wires, _ = trim(programs["solve"], feed(programs["solve"], right), demanded, recorder)
    # What the other functions need matters when the solve is differentiated again, or transposed.
    masks = {"matvec": (solved, of_wires), "vecmat": (of_wires, solved), "transpose_solve": (demanded, right)}
    for name in masks.keys() & programs.keys():
        trim(programs[name], feed(programs[name], masks[name][0]), masks[name][1], recorder)
    for value in (value for program in programs.values() for value in program.read):
        recorder.coefficient(value, True)
    return of_wires, _between(of_wires, step.with_known(recorder.replaced(guard)), solved)


def _parts(step: Step) -> Iterator[tuple[str, Any, list[Any]]]:
    """The functions that make up a linear solve: their names, jaxprs and operands, of which the last are tangents."""
    parts, _ = solve_parts(step.equation, list(step.operands))
    for name, (jaxpr, known) in parts.items():
        yield name, jaxpr, [*known, *(Wire(wire.aval) for wire in step.wires)]


def _programs(step: Step) -> dict[str, LinearProgram]:
    return {name: LinearProgram.of(jaxpr, operands) for name, jaxpr, operands in _parts(step)}


def _is_direct(step: Step) -> bool:
    """Whether only the right-hand side is a tangent and the solver has no loops or callbacks."""
    _, right_sides = solve_parts(step.equation, list(step.operands))
    constants = len(step.operands) - len(right_sides)
    if any(step.linear[:constants]) or not all(step.linear[constants:]) or len(step.wires) != len(step.results):
        return False
    opaque = lambda equation: equation.primitive.name not in CALLS and any(inner_jaxprs(equation))
    return not any(any_equation(opened(jaxpr)[0], opaque) for _, jaxpr, _ in _parts(step))


_COUPLED = Rule(_coupled_fed, coupled_trim, cleans=True)

RULES.update(
    {
        **dict.fromkeys(("fft", "triangular_solve", "tridiagonal_solve", UNKNOWN), _COUPLED),
        "custom_linear_solve": Rule(_solve_fed, _solve_trim),
        **dict.fromkeys(POINTWISE - {"select_n"}, Rule(lanes_fed, coupled_trim)),
    }
)
