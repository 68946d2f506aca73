"""Walking a jaxpr: run an equation as it was, and enter the control flow in it again.

What JAX keeps in the parameters of an equation changes between its versions. Each such parameter is read here.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

Operands = list[Any]
Rule = Callable[[JaxprEqn, Operands], Operands | None]

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


def opened(jaxpr: Any) -> tuple[Jaxpr, Operands]:
    """A jaxpr, open or closed, as an open jaxpr and its constants."""
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "jaxpr") else (jaxpr, [])


def with_constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr whose constants are its first inputs, and which holds on to none of their values."""
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None) if jaxpr.debug_info else None
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return Jaxpr([], inputs, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, debug_info)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs in the parameters of an equation."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            jaxpr, _ = opened(item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def any_equation(jaxpr: Jaxpr, predicate: Callable[[JaxprEqn], bool]) -> bool:
    """Whether an equation of a jaxpr, at any depth, is one of those looked for."""
    return any(predicate(e) or any(any_equation(inner, predicate) for inner in inner_jaxprs(e)) for e in jaxpr.eqns)


def custom_rule_body(equation: JaxprEqn) -> Any:
    """The function that a custom derivative rule is for, as a jaxpr, or None for an equation of another kind."""
    parameters = equation.params
    return parameters.get("call_jaxpr", parameters.get("fun_jaxpr")) if is_custom_rule(equation) else None


def is_custom_rule(equation: JaxprEqn) -> bool:
    """Whether an equation is the call of a function with a `custom_jvp` or a `custom_vjp`."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def is_mutating(equation: JaxprEqn) -> bool:
    """Whether an equation works on a mutable reference: what is written there does not show in its outputs."""
    return any(hasattr(v.aval, "inner_aval") for v in (*equation.invars, *equation.outvars))


def bind(equation: JaxprEqn, operands: Operands, **changed: Any) -> Operands:
    """Run an equation on other operands, under its own source line.

    Args:
        equation: The equation.
        operands: One value for each of its operands.
        **changed: Parameters in the place of the equation's own.

    Returns:
        One value for each of its results.
    """
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
    with source_of(equation):
        results = equation.primitive.bind(*functions, *operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def rebind(equation: JaxprEqn, operands: Operands, change: Callable[[Any], Any]) -> Operands:
    """Run an equation with other jaxprs in its parameters.

    Args:
        equation: The equation.
        operands: One value for each of its operands.
        change: From each jaxpr that a parameter is, or has as an item, to one of the same inputs and outputs.

    Returns:
        One value for each of its results.
    """
    changed = {}
    for name, parameter in equation.params.items():
        items = parameter if isinstance(parameter, tuple | list) else (parameter,)
        new = [change(item) if hasattr(opened(item)[0], "eqns") else item for item in items]
        if any(map(operator.is_not, new, items)):
            kind = type(parameter)
            changed[name] = new[0] if items[0] is parameter else getattr(kind, "_make", kind)(new)
    return bind(equation, operands, **changed)


class source_of:
    """A context in which what is traced gets the source line and the names of an equation."""

    def __init__(self, equation: JaxprEqn):
        source = equation.source_info
        names = source_info_util.current_name_stack() + source.name_stack
        self._contexts = (equation.ctx.manager, source_info_util.user_context(source.traceback, name_stack=names))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*raised)


def evaluate(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
    """The outputs of a jaxpr, equation by equation."""
    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*operands))


def interpret(
    jaxpr: Jaxpr, consts: Operands, operands: Operands, rule: Rule, wanted: Callable[[JaxprEqn], bool]
) -> Operands:
    """The outputs of a jaxpr in which a rule stands in for some equations, at any depth.

    Args:
        jaxpr: An open jaxpr.
        consts: The values of its constants.
        operands: The values of its inputs.
        rule: From an equation and the values of its operands to the values of its results, or to None: the equation
            is then run as it was. It is asked about every equation that is wanted or contains one that is; about a
            custom derivative rule it decides alone.
        wanted: Whether the rule may have an answer; where no equation is wanted, control flow is left as it is.

    Returns:
        The values of the outputs.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        results = None
        contains = any(any_equation(inner, wanted) for inner in inner_jaxprs(equation))
        if contains or wanted(equation):
            results = rule(equation, given)
            if results is None and contains:
                results = reenter(equation, given, functools.partial(interpret, rule=rule, wanted=wanted))
        if results is None:
            results = bind(equation, given)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def reenter(
    equation: JaxprEqn, operands: Operands, run: Callable[..., Operands], *, counted: bool = False
) -> Operands | None:
    """Run an equation that contains jaxprs, with each of them run in another way.

    Args:
        equation: A call, a loop, a conditional, a checkpoint or a `shard_map`.
        operands: The values of its operands.
        run: From an open jaxpr, its constants and its operands to its outputs; it may be staged.
        counted: Whether `run` is given, for the body of a loop, the number of the step as a further argument `step`;
            that of a scan is the place of what it reads and writes in the arrays, in either direction.

    Returns:
        The values of the results, or None for an equation of another kind.
    """
    enter = _REENTRIES.get(equation.primitive.name)
    if enter is None:
        return None
    with source_of(equation):
        return list(enter(equation, operands, _CountedRun(run) if counted else run))


def primal_jaxpr(equation: JaxprEqn) -> Any:
    """The jaxpr, open or closed, that a call, a checkpoint or a custom rule computes its results by."""
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def solve_jaxpr(equation: JaxprEqn, operands: Operands) -> tuple[Any, Operands]:
    """The jaxpr by which a `custom_linear_solve` solves, and its operands."""
    counts = equation.params["const_lengths"]
    before = counts.matvec + counts.vecmat
    constants = operands[before : before + counts.solve]
    right_sides = operands[before + counts.solve + counts.transpose_solve :]
    return equation.params["jaxprs"].solve, [*constants, *right_sides]


def expanded(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a primitive that is not JAX's own, or that shows only its rules, computes.

    Returns:
        A jaxpr of the operands of the equation; None for JAX's other primitives, and where it cannot be traced.
    """
    implementation = equation.primitive.impl
    home = getattr(getattr(implementation, "func", implementation), "__module__", None) or "jax"
    if equation.primitive.name == "call_hi_primitive":
        primitive = equation.params["_prim"]
        unflattened = lambda operands: jax.tree.unflatten(primitive.in_tree, operands)
        function: Callable[..., Any] = lambda *operands: jax.tree.leaves(primitive.expand(*unflattened(operands)))
    elif home.split(".")[0] not in ("jax", "jaxlib"):
        function = lambda *operands: implementation(*operands, **equation.params)
    else:
        return None
    try:
        with source_of(equation):
            return jax.make_jaxpr(function)(*(atom.aval for atom in equation.invars))
    except Exception:
        # What runs Python code has nothing to show.
        return None


class _CountedRun:
    """A way to run a jaxpr that is told the number of the step."""

    def __init__(self, run: Callable[..., Operands]):
        self._run = run

    def __call__(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        return self._run(jaxpr, consts, operands)

    def at(self, step: Any) -> Callable[..., Operands]:
        return functools.partial(self._run, step=step)


def _body(jaxpr: Any, run: Callable[..., Operands]) -> Callable[..., Operands]:
    return lambda *operands: run(*opened(jaxpr), list(operands))


def _call(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    parameters = equation.params
    body = _body(primal_jaxpr(equation), run)
    body.__name__ = parameters.get("name", "call")
    return jax.jit(body, inline=parameters.get("inline", False))(*operands)


def _scan(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    count_consts, count_carry = scan_counts(equation)
    consts, carry = operands[:count_consts], operands[count_consts:][:count_carry]
    counted = isinstance(run, _CountedRun)

    def step(carry: Operands, xs: tuple[Any, Operands]) -> tuple[Operands, Operands]:
        number, own = xs
        body = _body(equation.params["jaxpr"], run.at(number) if isinstance(run, _CountedRun) else run)
        outputs = body(*consts, *carry, *own)
        return outputs[:count_carry], outputs[count_carry:]

    numbers = jnp.arange(equation.params["length"]) if counted else None
    carry, stacked = scan_like(equation, step, carry, (numbers, operands[count_consts + count_carry :]))
    return [*carry, *stacked]


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are the same at every step, and how many are carried."""
    (body, _), outer = opened(equation.params["jaxpr"]), equation.params
    if "num_consts" in outer:
        return outer["num_consts"], outer["num_carry"]
    # From 0.11 on, the parameters tell it in JAX's own containers; but only what is scanned has one axis more outside.
    scanned = sum(_has_more_axes(*pair) for pair in zip(equation.invars, body.invars, strict=True))
    stacked = sum(_has_more_axes(*pair) for pair in zip(equation.outvars, body.outvars, strict=True))
    carried = len(equation.outvars) - stacked
    return len(equation.invars) - scanned - carried, carried


def _has_more_axes(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.aval.shape)


def scan_like(equation: JaxprEqn, step: Callable[..., Any], carry: Any, xs: Any, *, backwards: bool = False) -> Any:
    """`jax.lax.scan` with the length, direction and unrolling of an equation, or in the other direction."""
    p = equation.params
    return lax.scan(step, carry, xs, length=p["length"], reverse=p["reverse"] != backwards, unroll=p["unroll"])


def _while(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    p = equation.params
    tested, rest = operands[: p["cond_nconsts"]], operands[p["cond_nconsts"] :]
    consts, carry = rest[: p["body_nconsts"]], rest[p["body_nconsts"] :]
    (predicate,) = opened(p["cond_jaxpr"])[0].outvars
    first: tuple[Any, Operands] = (jnp.zeros((), int), carry)
    at = run.at if isinstance(run, _CountedRun) else lambda number: run

    def going(number: Any, carry: Operands) -> Any:
        return _body(p["cond_jaxpr"], at(number))(*tested, *carry)[0]

    def step(numbered: tuple[Any, Operands]) -> tuple[Any, Operands]:
        number, carry = numbered
        new = _body(p["body_jaxpr"], at(number))(*consts, *carry)
        if predicate.aval.shape:
            # Under `jax.vmap` each element of the batch, the leading axes of all that is carried, stops by itself.
            mask = going(number, carry)
            spread = lambda value: lax.broadcast_in_dim(mask, value.shape, range(mask.ndim))
            new = [lax.select(spread(after), after, before) for after, before in zip(new, carry, strict=True)]
        return number + 1, new

    return lax.while_loop(lambda numbered: going(*numbered).any(), step, first)[1]


def _cond(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    branches = [_body(branch, run) for branch in equation.params["branches"]]
    return lax.switch(operands[0], branches, *operands[1:])


def _checkpoint(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    return checkpoint_like(equation, _body(equation.params["jaxpr"], run))(*operands)


def checkpoint_like(equation: JaxprEqn, function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint` with the policy of an equation."""
    p = equation.params
    return jax.checkpoint(function, prevent_cse=p["prevent_cse"], policy=p["policy"])


def _shard_map(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    p = equation.params
    body = lambda *operands: tuple(run(*opened(p["jaxpr"]), list(operands)))
    return shard_map_like(equation, body, tuple(p["in_specs"]), tuple(p["out_specs"]))(*operands)


def shard_map_like(equation: JaxprEqn, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`jax.shard_map` over the mesh axes of an equation."""
    p = equation.params
    axes = p.get("newly_manual_axes", p.get("manual_axes"))
    names = {"axis_names": set(axes)} if axes else {}
    return jax.shard_map(
        function, mesh=p["mesh"], in_specs=in_specs, out_specs=out_specs, check_vma=p["check_vma"], **names
    )


_REENTRIES = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
# The equations whose jaxprs `reenter` runs in another way.
ENTERED = frozenset(_REENTRIES)


def is_floating(aval: Any) -> bool:
    """Whether values of this shape and dtype have tangents."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def zeros_like_aval(aval: Any) -> Any:
    """Zeros of a shape, dtype, weak type and, inside `shard_map`, the mesh axes over which they vary."""
    if aval.weak_type and is_floating(aval):
        zeros = lax.full(aval.shape, 0j if jnp.issubdtype(aval.dtype, jnp.complexfloating) else 0.0)
        zeros = zeros if zeros.dtype == aval.dtype else jnp.zeros(aval.shape, aval.dtype)
    else:
        zeros = jnp.zeros(aval.shape, aval.dtype)
    return varying_like(zeros, aval)


def varying_like(value: Any, aval: Any) -> Any:
    """A value that, inside `shard_map`, varies over the mesh axes over which another does."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a value varies inside `shard_map`."""
    # 0.11 moved them from `vma` to `mat.varying`.
    return frozenset(getattr(getattr(aval, "mat", None), "varying", None) or getattr(aval, "vma", None) or ())


def float0_zeros(value: Any) -> np.ndarray[Any, Any]:
    """The tangent of a value of a dtype that has none."""
    return np.zeros(value.shape, jax.dtypes.float0)


def reading_dimensions(writing: Any) -> lax.GatherDimensionNumbers:
    """The dimension numbers of the gather that reads where a scatter writes."""
    return lax.GatherDimensionNumbers(
        offset_dims=writing.update_window_dims,
        collapsed_slice_dims=writing.inserted_window_dims,
        start_index_map=writing.scatter_dims_to_operand_dims,
        operand_batching_dims=writing.operand_batching_dims,
        start_indices_batching_dims=writing.scatter_indices_batching_dims,
    )


def written_window(equation: JaxprEqn) -> list[int]:
    """The shape of what a scatter writes at one index vector."""
    numbers, (operand, _, updates) = equation.params["dimension_numbers"], (atom.aval for atom in equation.invars)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(updates.shape[axis] for axis in numbers.update_window_dims)
    return [1 if axis in single else next(sizes) for axis in range(operand.ndim)]
