"""Why a derivative may rightly differ from the slope of the function.

A `stop_gradient` explains it if the derivative is the slope of the function in which the stopped values stay as they
were at the point. So does a factorization that assumes a symmetric matrix, such as `jax.scipy.linalg.cho_factor`, which
reads one triangle, or a lineax solver that is told so: its rule needs a symmetric tangent, and the tangent of a single
element is not symmetric. And so does a solver that has not converged: if its loops run on until nothing changes, the
two agree.
"""

import itertools
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._marks import EXPLICIT, mark_in
from .._programs import (
    CALLS,
    FIXED_DRAW,
    FOREIGN,
    HIGH,
    LOOPS,
    OF_SURROGATE,
    Chain,
    Operands,
    any_equation,
    bind,
    expanded,
    ids,
    inner_jaxprs,
    is_custom_root,
    is_custom_rule,
    is_floating,
    is_in_library,
    is_of_jax,
    iterations,
    jaxpr_and_consts,
    made_once,
    running,
    union,
    while_of,
)
from .agreement import AGREE, ROUNDING
from .exact import Exact, Leaves
from .names import is_made_by_branches, operation_of
from .point import Point
from .program import Program
from .turns import RunsOn

# How many are tried one by one.
_MOST_TRIED = 24
# The primitive of lineax.
_OF_LINEAX = "linear_solve"
# What has a derivative that the user promises, and no function to compare it with.
_BY_HAND = {"custom_linear_solve": "solve", _OF_LINEAX: "solve", "linear_call": "transpose"}
_FACTORIZATIONS = frozenset({"cholesky", "eigh", _OF_LINEAX})
_LINEAR_SOLVES = frozenset({"custom_linear_solve", _OF_LINEAX})
# How far symmetric parts may move the value of a matrix that is symmetric up to rounding, relative to it.
_SYMMETRIC = 1e-6
# How nearly the derivative without a stop has to be the slope, relative to it and in units of its error.
_REMOVED, _ERRORS = 1e-5, 10.0
# What is raised by programs that cannot be evaluated at two points at once.
_NOT_TWICE = (TypeError, ValueError, NotImplementedError, AssertionError)
_ITERATIONS = HIGH | {"while", "scan"}
# How far the value may move if a loop runs on to where nothing depends on the leaf: a rule of zeros agrees with that.
_FURTHEST, _VANISHING = 0.5, 1e-6


def explaining_stops(point: Point, direction: Leaves, slack: float, left: float = 0.0) -> tuple[Chain, ...]:
    """The fewest `stop_gradient` equations that explain a mismatch along a direction; none if they do not.

    If some of it may be left, only those that the user wrote.
    """
    program = point.exact.program
    stops = list({id(chain[-1]): chain for chain in stops_of(program) if not left or is_users_stop(chain)}.values())
    # All can be held by one program, which is compiled once for all leaves; those of what stays need not be tried.
    moving = {leaf for leaf, moves in enumerate(direction) if np.any(moves)}
    tried = [n for n, stop in enumerate(stops) if moving.intersection(program.leaves_into(stop, program.value))]
    explain = holding(point, stops, lambda held: agrees(held, direction, slack, left))
    return fewest([stops[n] for n in tried], lambda some: explain({tried[n] for n in some})) if tried else ()


def fewest_to_remove(point: Point, stops: Sequence[Chain], direction: Leaves) -> tuple[Chain, ...]:
    """Of the stops that explain a mismatch together, the fewest without which it is gone; all if it does not go.

    One that makes no difference, as that of the maximum in a `softmax`, may make one beside another.
    """
    program, numbers = point.exact.program, {id(stop[-1]): number for number, stop in enumerate(stops)}
    count = len(program.leaves)

    def function(given: Operands) -> Operands:
        def rule(chain: Chain, operands: Operands) -> Operands | None:
            if (number := numbers.get(id(chain[-1]))) is None:
                return None
            through = given[count + number]
            stopped = bind(chain[-1], operands)
            moves = zip(stopped, operands, strict=True)
            return [held + through.astype(held.dtype) * (x - held) for held, x in moves]

        return program.run(given[:count], rule)

    flags = [np.zeros((), np.float32) for _ in stops]
    removing = Exact(Program(function, [*program.leaves, *flags], [*program.paths, *map(str, numbers)]))
    slopes = point.slope(direction)
    slope, error = point.sums(slopes.derivative).sum(), np.linalg.norm(point.weights * slopes.error)

    def explain(removed: Collection[int]) -> bool:
        through = [np.array(float(number in removed)) for number in range(len(stops))]
        at = Point(removing, [*point.leaves, *through], point.weights, point.outcomes)
        derivative = at.derivative([*direction, *map(np.zeros_like, through)])
        return bool(abs(derivative - slope) <= _REMOVED * abs(slope) + _ERRORS * error)

    return fewest(list(stops), explain) or tuple(stops)


def fewest(chains: list[Chain], explain: Callable[[Collection[int]], bool]) -> tuple[Chain, ...]:
    """The fewest of some equations that explain something, by their numbers; none if all together do not."""
    tried, needed = range(len(chains))[:_MOST_TRIED], set(range(len(chains)))
    if not explain(needed):
        needed = set()
    if len(chains) > 1:
        for one in tried:
            if explain({one}):
                return (chains[one],)
    for one in tried:
        if len(needed) > 1 and explain(needed - {one}):
            needed -= {one}
    return tuple(chains[one] for one in sorted(needed))


def holding(
    point: Point, chains: list[Chain], question: Callable[[Point], bool], *, only_places: bool = False
) -> Callable[[Container[int]], bool]:
    """From the numbers of some equations to the answer at a point of the program in which these keep their results."""
    with_held = point.exact.holding(chains, only_places=only_places)

    def answer(held: Container[int]) -> bool:
        try:
            return question(point.of(with_held(held)))
        except _NOT_TWICE:
            return False

    return answer


def explaining_factorization(point: Point, leaf: int, direction: Leaves, slack: float) -> Chain | None:
    """The first factorization a leaf flows into, if both derivatives agree when its matrix moves symmetrically."""
    program = point.exact.program
    flow = program.smooth
    into = (c for c in flow.chains if c[-1].primitive.name in _FACTORIZATIONS and union(flow.into(c)) >> leaf & 1)
    first = next(into, None)
    if first is None:
        return None
    symmetrised = Program(lambda leaves: program.run(leaves, _with_symmetric_parts), program.leaves, program.paths)
    other = point.of(Exact(symmetrised))
    is_symmetric = np.allclose(other.start, point.start, rtol=_SYMMETRIC, atol=0.0, equal_nan=True)
    return first if is_symmetric and agrees(other, direction, slack) else None


def with_loops_running_on(point: Point, solvers: list[Chain], *, all_in_rules: bool, thaws: bool) -> Point:
    """The point of the program in which the loops of some solvers run on until they stand.

    In the rule of a solver, what solves its equations runs on, and with `all_in_rules` any loop: one over a few equal
    parts of a turn is none that has a limit. If it thaws, what a selection leaves as it was, since it has reached its
    end, goes on too.
    """
    program = point.exact.differentiated
    if program is not point.exact.program:
        # It has its own equations.
        solvers = _solvers_in(program)
    inside = {id(solver[-1]) for solver in solvers}
    turns = set[Hashable]().union(*(_turns_in(body) for solver in solvers for body in _bodies(solver[-1])))

    def runs_on(chain: Chain, turn: Sequence[JaxprEqn]) -> bool:
        if not any(id(outer) in inside for outer in program.origin(chain)):
            return False
        return all_in_rules or is_until(chain[-1]) or _kind(turn) in turns

    return point.of(Exact(program, RunsOn(runs_on, thaws)))


def may_wait(solvers: list[Chain]) -> bool:
    """Whether a selection in some solvers may leave what has reached its end as it was."""
    selects = lambda equation: equation.primitive.name == "select_n"
    return any(any_equation(body, selects) for solver in solvers for body in _bodies(solver[-1]))


def _bodies(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs of an equation, or of what it shows if it shows only its rules."""
    shown = expanded(equation) if equation.primitive.name in HIGH else None
    return inner_jaxprs(equation) if shown is None else iter([jaxpr_and_consts(shown)[0]])


def _turns_in(jaxpr: Jaxpr) -> set[Hashable]:
    """The turns of the loops in a jaxpr that are inside no other, also of those that Python unrolled."""
    turns: set[Hashable] = {_kind(jaxpr.eqns[one.start : one.stop]) for one in iterations(jaxpr)}
    for equation in jaxpr.eqns:
        if equation.primitive.name in LOOPS:
            turns |= {_kind(body.eqns) for body in inner_jaxprs(equation)}
        else:
            turns = turns.union(*map(_turns_in, _bodies(equation)))
    return turns


def _kind(turn: Sequence[JaxprEqn]) -> tuple[Hashable, ...]:
    """What a turn consists of, whether or not calls are opened in it."""
    parts = list[Hashable]()
    for equation in turn:
        if equation.primitive.name in CALLS:
            parts += itertools.chain(*(_kind(body.eqns) for body in inner_jaxprs(equation)))
        else:
            made = tuple((variable.aval.shape, variable.aval.dtype) for variable in equation.outvars)
            parts.append((equation.primitive.name, made))
    return tuple(parts)


def explain_loops(point: Point, running_on: Point, direction: Leaves, slack: float, left: float) -> bool:
    """Whether a tolerance explains a mismatch: both derivatives agree if the loops of the solver run on.

    A solver may use its tolerance in its steps too: a relative mismatch may be left.
    """
    with np.errstate(all="ignore"):
        change = np.max(np.abs(running_on.start - point.start), initial=0.0)
    if not np.isfinite(change) or not agrees(running_on, direction, slack, left):
        return False
    is_near = bool(change <= _FURTHEST * np.max(np.abs(point.start), initial=0.0))
    return is_near or abs(running_on.derivative(direction)) > _VANISHING * abs(point.derivative(direction))


def solvers_of(program: Program, leaf: int) -> list[Chain]:
    """The rules and solvers on the path of a leaf that contain an iteration, the user's lines first."""
    found = [chain for chain in _solvers_in(program) if leaf in program.leaves_into(chain)]
    # The outermost, whose rule is responsible.
    inner = {id(chain[-1]) for chain in found for other in found if chain[: len(other)] == other and chain != other}
    return [chain for chain in found if id(chain[-1]) not in inner]


@made_once
def _solvers_in(program: Program) -> list[Chain]:
    return list(filter(is_solver, program.smooth.chains))


def is_solver(chain: Chain) -> bool:
    """Whether an equation iterates, or is a rule for a function that does."""
    name = chain[-1].primitive.name
    if name == "while":
        return is_until(chain[-1]) or any(is_solver(chain[:length]) for length in range(1, len(chain)))
    if is_custom_rule(chain[-1]):
        return any(any_equation(inner, _iterates) or _is_unrolled(inner) for inner in inner_jaxprs(chain[-1]))
    return _iterates(chain[-1]) and name != "scan"


def _iterates(equation: JaxprEqn) -> bool:
    """Whether an equation may end before it has converged; a linear solve does if what solves it iterates."""
    if equation.primitive.name == "custom_linear_solve":
        may = lambda inner: _iterates(inner) or inner.primitive.name in FOREIGN
        return any_equation(jaxpr_and_consts(equation.params["jaxprs"].solve)[0], may)
    return equation.primitive.name in _ITERATIONS or _is_foreign_solve(equation)


def _is_unrolled(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr contains an iteration that Python unrolled, at any depth."""
    return bool(iterations(jaxpr)) or any(_is_unrolled(inner) for e in jaxpr.eqns for inner in inner_jaxprs(e))


def promised(equation: JaxprEqn) -> str:
    """What the user promises of an equation whose derivative relies on it, as a reason; empty for any other."""
    return "root" if is_custom_root(equation) else _BY_HAND.get(equation.primitive.name, "")


def promises_of(program: Program, leaf: int) -> list[Chain]:
    """The solves, roots and transposes on the path of a leaf that the user wrote, then those that are a library's."""
    chains = (c for c in program.smooth.chains if promised(c[-1]))
    is_users = lambda c: c[-1].primitive.name == _OF_LINEAX or not is_in_library(c)
    found = [c for c in chains if is_users(c) and leaf in program.leaves_into(c)]
    return sorted(found, key=lambda chain: chain[-1].primitive.name == _OF_LINEAX)


def is_linear_solve(equation: JaxprEqn) -> bool:
    """Whether an equation solves linear equations, by JAX or by lineax."""
    return equation.primitive.name in _LINEAR_SOLVES


def _is_foreign_solve(equation: JaxprEqn) -> bool:
    """Whether an equation is of a solver that has a primitive of its own, such as one of lineax, and iterates."""
    if equation.primitive.name != _OF_LINEAX:
        return False
    inside = expanded(equation)
    return inside is not None and any_equation(jaxpr_and_consts(inside)[0], is_until)


def is_until(equation: JaxprEqn) -> bool:
    """Whether an equation is a loop that ends on more than a count."""
    if equation.primitive.name != "while":
        return False
    test = jaxpr_and_consts(while_of(equation).test)[0]
    asked = [atom for inner in test.eqns for atom in inner.invars] or test.outvars
    return not all(jnp.issubdtype(atom.aval.dtype, jnp.integer) for atom in asked)


def agrees(point: Point, direction: Leaves, slack: float, left: float = 0.0) -> bool:
    """Whether the derivatives of a program are its slope along a direction, but for what may be left of a mismatch."""
    reading = point.read(direction, slack=slack)
    is_smooth = not (reading.kinks or reading.jumps or reading.unsure)
    return reading.status in (AGREE, ROUNDING) or bool(left and is_smooth and reading.telling.relative <= left)


def stops_of(program: Program, leaf: int | None = None) -> list[Chain]:
    """The `stop_gradient` equations written by the user, or by a library outside its rules; of one leaf, or of all."""
    chains = program.value.chains
    # A stop of JAX or of a library beside a solve is another way to the same derivative.
    solving = {ids(chain[:-1]) for chain in chains if is_linear_solve(chain[-1])}

    def is_candidate(chain: Chain) -> bool:
        outer = [chain[:length] for length in range(len(chain))]
        is_ruled = any(map(is_custom_rule, chain[:-1]))
        return (
            chain[-1].primitive.name == "stop_gradient"
            and not is_of_surrogate(chain)
            and (is_users_stop(chain) or not any(ids(inside) in solving for inside in outer))
            # Inside a rule: what the user stopped in its function, as its derivative does too.
            and not (is_ruled and is_in_library(chain))
        )

    is_of_leaf = lambda chain: leaf is None or leaf in program.leaves_into(chain, program.value)
    return [chain for chain in chains if is_candidate(chain) and is_of_leaf(chain)]


def is_users_stop(chain: Chain) -> bool:
    """Whether the user called `stop_gradient`, or made a mark, rather than called a function that stops something."""
    is_marked = mark_in(str(chain[-1].source_info.name_stack)) is not None
    is_own = operation_of(chain) == "stop_gradient" and not is_made_by_branches(chain[-1])
    return is_marked or (not is_in_library(chain) and is_own)


def mark_of(chain: Chain) -> str | None:
    """The mark behind a `stop_gradient`: a field, or the name of a wrapper."""
    mark = mark_in(str(chain[-1].source_info.name_stack))
    return None if mark == EXPLICIT else mark


def is_fixed_draw(chain: Chain) -> bool:
    """Whether a `stop_gradient` is that of a draw whose gradient the user fixed."""
    return FIXED_DRAW in str(chain[-1].source_info.name_stack)


def is_of_surrogate(chain: Chain) -> bool:
    """Whether an equation is of the exact function of a surrogate, whose derivative does not count."""
    return any(OF_SURROGATE in str(equation.source_info.name_stack) for equation in chain)


def is_of_partgrad(chain: Chain) -> bool:
    """Whether partgrad itself stops here, as its estimators and safe functions do, and no mark of the user's."""
    innermost = next((file for file, _, _ in running(chain[-1:]) if not is_of_jax(file)), "")
    return any(innermost.startswith(f"{_OWN}{room}") for room in ("_random", "safe"))


_OWN = f"{__file__.rpartition('_check')[0]}"


def _with_symmetric_parts(chain: Chain, operands: Operands) -> Operands | None:
    """Run a factorization on the symmetric part of a matrix that only its tangent makes asymmetric."""
    if chain[-1].primitive.name not in _FACTORIZATIONS:
        return None
    return bind(chain[-1], list(map(_symmetric_part, operands)))


def _symmetric_part(operand: Any) -> Any:
    shape = jnp.shape(operand)
    if len(shape) < 2 or shape[-1] != shape[-2] or not is_floating(operand):
        return operand
    other = jnp.conj(jnp.swapaxes(operand, -1, -2))
    return jnp.where(jnp.allclose(operand, other, rtol=1e-2), (operand + other) / 2, operand)
