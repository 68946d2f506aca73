"""A custom backward pass that is not linear, run with masks beside its cotangents.

A mask says where a path leads from an incoming cotangent. Elsewhere, a cotangent is exactly zero, and its factors are
replaced. Whatever the pass computes from a zero is part of the answer, and so live. A loop assumes that everything it
carries is live, at every step.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from .._compat import ordinary_custom_vjp
from .._programs import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_JVPS,
    Operands,
    bind,
    branches_of,
    custom_rule_body,
    evaluate,
    is_custom_rule,
    is_floating,
    named,
    opened,
    primal_jaxpr,
    reenter,
    scan_parts,
    step_through,
    varying_like,
    while_parts,
    zeros_like_aval,
)
from .known import follow, is_zero, numbers_of, remembering
from .mask import Mask, both, either, spread
from .program import Step, Wire, linear_outputs
from .trim import RULES, Guard, fed_rule, rule_of

# What they know is no summand.
_FACTORS = named(
    "mul dot_general conv_general_dilated div scatter-mul triangular_solve tridiagonal_solve custom_linear_solve"
)
# A mask for a cotangent and whatever is computed from cotangents; None for any other value.
Path = Mask | None


def pulled(
    jaxpr: Jaxpr, consts: Operands, values: Operands, paths: Sequence[Path], guard: Guard
) -> tuple[Operands, list[Path]]:
    """The outputs of a backward pass, and the masks of where a path leads to them."""

    def step(equation: JaxprEqn, pairs: list[Any]) -> list[Any]:
        given, masks = zip(*pairs, strict=True) if pairs else ((), ())
        return list(zip(*_step(equation, list(given), list(masks), guard), strict=True))

    known = [(const, None) for const in consts]
    pairs = list(zip(values, paths, strict=True))
    outputs = step_through(jaxpr, known, pairs, step, literal=lambda literal: (literal.val, None))
    return [value for value, _ in outputs], [path for _, path in outputs]


def _step(equation: JaxprEqn, values: Operands, paths: list[Path], guard: Guard) -> tuple[Operands, list[Path]]:
    name = equation.primitive.name
    if all(path is None for path in paths):
        results = bind(equation, values)
        follow(equation, values, results)
        return results, [None] * len(equation.outvars)
    if name in CALLS:
        return pulled(*opened(primal_jaxpr(equation)), values, paths, guard)
    if is_custom_rule(equation):
        return _custom(equation, values, paths, guard)
    if name in _INSIDE:
        return _entered(equation, values, paths, guard)
    operands = [
        value if p is None else Wire(a.aval) for value, p, a in zip(values, paths, equation.invars, strict=True)
    ]
    step = Step(equation, tuple(operands), tuple(Wire(variable.aval) for variable in equation.outvars))
    masks: list[Mask] = [False if path is None else path for path in paths]
    fed = fed_factors(step, fed_rule(step).fed(step, masks), step.of_wires(masks))
    cotangents = step.of_wires(values)
    if is_linear_step(step):
        _, emit = rule_of(step).trim(step, masks, [True] * len(step.results), guard)
        results = emit(cotangents)
        if _is_homogeneous(step):
            return results, list(fed)
    else:
        results = step.run(cotangents)
    return results, live_masks(step, fed, cotangents, results)


def _custom(equation: JaxprEqn, values: Operands, paths: list[Path], guard: Guard) -> tuple[Operands, list[Path]]:
    """The results of a custom rule, whose derivative stays that of the rule."""
    body, count = custom_rule_body(equation), len(values)
    arrays = [path for path in paths if isinstance(path, jax.Array)]

    @remembering()
    def masked(*operands: Any) -> Operands:
        # The masks are operands too, because an outer differentiation may come after they were traced.
        rest = iter(operands[count:])
        inside = [next(rest) if isinstance(path, jax.Array) else path for path in paths]
        return pulled(*opened(body), list(operands[:count]), inside, guard)[0]

    plain = lambda *operands: bind(equation, list(operands[:count]))
    if equation.primitive.name in CUSTOM_JVPS:
        function: Any = jax.custom_jvp(masked)
        function.defjvp(lambda primals, tangents: (masked(*primals), jax.jvp(plain, primals, tangents)[1]))
    else:
        function = ordinary_custom_vjp(masked)
        function.defvjp(lambda *operands: jax.vjp(plain, *operands), lambda pull, cotangents: pull(cotangents))
    return list(function(*values, *arrays)), _all_live(linear_outputs(body, _linear(paths)))


def fed_factors(step: Step, fed: list[Mask], masks: Iterable[Mask]) -> list[Mask]:
    """The masks of a step's results, if it may be a product or quotient of two wires.

    Args:
        step: The step.
        fed: The masks that its rule returns.
        masks: Those of its wires.
    """
    if step.name not in {"mul", "div"} or len(step.wires) == 1 or not is_floating(step.results[0].aval):
        return fed
    # For example, a pass that scales its cotangent by its norm.
    factors = itertools.islice(masks, 2 if step.name == "mul" else 1)
    return [functools.reduce(both, (spread(mask, step.shape) for mask in factors), fed[0])]


def live_masks(step: Step, fed: list[Mask], given: Operands, results: Operands) -> list[Mask]:
    """The masks of a step's results, with whatever it adds to what is fed: `c + r` also takes what it knows.

    A result may be zero by chance. It is live if a change of what the step knows changes it, since its derivative goes
    through what comes before.

    Args:
        step: The step.
        fed: Where a path leads.
        given: Its cotangents.
        results: What it makes of them.
    """
    if all(mask is True for mask in fed):
        return fed
    # A predicate where nothing is fed is that of zeros.
    masks = [either(mask, r != 0) if is_floating(r) else mask for mask, r in zip(fed, results, strict=True)]
    is_data = [is_floating(jax.typeof(value)) and numbers_of(value) is None for value in step.known]
    if step.name in _FACTORS or not any(is_data):
        return masks
    data = list(itertools.compress(step.known, is_data))

    def of_data(*data: Any) -> Operands:
        rest = iter(data)
        return step.with_known([next(rest) if d else v for v, d in zip(step.known, is_data, strict=True)]).run(given)

    ones = [varying_like(jax.lax.full_like(value, 1), jax.typeof(value)) for value in data]
    try:
        _, changes = jax.jvp(of_data, data, ones)
    except Exception:
        # A custom rule in there may have no forward mode.
        return [True] * len(fed)
    pairs = zip(masks, changes, strict=True)
    return [either(mask, change != 0) if is_floating(change) else mask for mask, change in pairs]


def _is_homogeneous(step: Step) -> bool:
    """Whether nothing but zeros comes from zeros through a linear step, which may add a number as well."""
    return step.name in _FACTORS or all(is_zero(value) for value in step.known if is_floating(jax.typeof(value)))


def is_linear_step(step: Step) -> bool:
    """Whether a step has a rule and is a linear function of its wires."""
    if not has_rule(step):
        return False
    try:
        jax.eval_shape(step.transposed, [zeros_like_aval(wire.aval) for wire in step.results])
    except Exception:
        # JAX has no single exception for what it cannot transpose.
        return False
    return True


def has_rule(step: Step) -> bool:
    """Whether there is a rule for a step if it is linear."""
    # A selection by a wire, for example, or a wire that is an index.
    return step.name in RULES and all(is_floating(wire.aval) for wire in step.wires)


# --- equations that contain programs ----------------------------------------------------------------------------------


def _entered(equation: JaxprEqn, values: Operands, paths: list[Path], guard: Guard) -> tuple[Operands, list[Path]]:
    """The results of a loop or branch, in whose body every carried or scanned cotangent is live."""
    bodies, results = _INSIDE[equation.primitive.name](equation, paths)

    def run(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        inside = next((inside for body, inside in bodies if opened(body)[0] is jaxpr), None)
        if inside is None:
            return evaluate(jaxpr, consts, operands)
        # What is remembered of a mask from outside may be a value of this body.
        with remembering(inside=True):
            return pulled(jaxpr, consts, operands, inside, guard)[0]

    entered = reenter(equation, values, run)
    assert entered is not None
    return entered, _all_live(results)


def _all_live(linear: Sequence[bool]) -> list[Path]:
    return [True if is_linear else None for is_linear in linear]


# The bodies, with a path for each of their inputs, and which results depend on cotangents.
Bodies = tuple[list[tuple[Any, list[Path]]], list[bool]]


def _linear(paths: list[Path]) -> list[bool]:
    return [path is not None for path in paths]


def _scan(equation: JaxprEqn, paths: list[Path]) -> Bodies:
    parts = scan_parts(equation)
    linear = settled(parts.body, _linear(paths), parts.consts, parts.carried)
    inside = [*paths[: parts.consts], *_all_live(linear[parts.consts :])]
    return [(parts.body, inside)], linear_outputs(parts.body, linear)


def _while(equation: JaxprEqn, paths: list[Path]) -> Bodies:
    parts = while_parts(equation)
    paths = paths[parts.test_consts :]
    linear = settled(parts.body, _linear(paths), parts.body_consts, len(equation.outvars))
    carries = linear[parts.body_consts :]
    return [(parts.body, [*paths[: parts.body_consts], *_all_live(carries)])], carries


def _cond(equation: JaxprEqn, paths: list[Path]) -> Bodies:
    branches, linear = branches_of(equation), _linear(paths)
    of_branches = zip(*(linear_outputs(branch, linear[1:]) for branch in branches), strict=True)
    # The index of the branch may come from a cotangent.
    return [(branch, paths[1:]) for branch in branches], [linear[0] or any(each) for each in of_branches]


def _checkpoint(equation: JaxprEqn, paths: list[Path]) -> Bodies:
    body = primal_jaxpr(equation)
    return [(body, paths)], linear_outputs(body, _linear(paths))


def settled(
    body: Any,
    linear: list[bool],
    consts: int,
    carried: int,
    outputs_of: Callable[[Any, list[bool]], list[bool]] = linear_outputs,
) -> list[bool]:
    """For each input of a loop's body, whether it depends on a tangent at any step; a carry may take one up."""
    linear, carries = list(linear), slice(consts, consts + carried)
    while True:
        outputs = outputs_of(body, linear)[:carried]
        grown = [before or after for before, after in zip(linear[carries], outputs, strict=True)]
        if grown == linear[carries]:
            return linear
        linear[carries] = grown


_INSIDE = {"scan": _scan, "while": _while, "cond": _cond, **dict.fromkeys(CHECKPOINTS, _checkpoint)}
