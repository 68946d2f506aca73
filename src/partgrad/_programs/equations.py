"""What an equation holds: the jaxprs in it, the parameters of loops and branches, and those of shapes and indices.

Parameters move between versions of JAX. Each one that has moved is read here.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AxisType

from .._compat import adds_up_rules
from .primitives import CUSTOM_RULES, HIGH_LINEAR, named

Operands = list[Any]
# An equation, preceded by those around it, from the outermost inwards.
Chain = tuple[JaxprEqn, ...]


# --- jaxprs in equations ---------------------------------------------------------------------------------------------


def jaxpr_and_consts(jaxpr: Any) -> tuple[Jaxpr, Operands]:
    """A jaxpr, open or closed, as an open jaxpr and its constants."""
    is_closed = hasattr(jaxpr, "jaxpr") and hasattr(jaxpr, "consts")
    return (jaxpr.jaxpr, list(jaxpr.consts)) if is_closed else (jaxpr, [])


def reclosing(jaxpr: Jaxpr) -> Callable[[Operands], ClosedJaxpr]:
    """From other constants to the jaxpr with these. It keeps none of the jaxpr's own, which is open up to JAX 0.11."""
    body = Jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, jaxpr.debug_info)
    return lambda consts: ClosedJaxpr(body, list(consts))


def jaxprs_in(equation: JaxprEqn) -> Iterator[Any]:
    """The jaxprs, open or closed, in the parameters of an equation."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if hasattr(jaxpr_and_consts(item)[0], "eqns"):
                yield item


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The open jaxprs in the parameters of an equation."""
    return (jaxpr_and_consts(item)[0] for item in jaxprs_in(equation))


def any_equation(jaxpr: Jaxpr, predicate: Callable[[JaxprEqn], bool]) -> bool:
    """Whether a predicate holds for an equation of a jaxpr, at any depth."""
    return any(predicate(e) or any(any_equation(inner, predicate) for inner in inner_jaxprs(e)) for e in jaxpr.eqns)


def size_of(jaxpr: Jaxpr) -> tuple[int, float]:
    """How many operations a jaxpr has, at any depth, and how many numbers it computes, with one turn of a `while`."""
    operations, numbers = 0, 1.0
    for equation in jaxpr.eqns:
        inside = [size_of(inner) for inner in inner_jaxprs(equation)]
        turns = scan_of(equation).length if equation.primitive.name == "scan" else 1
        operations += 1 + sum(count for count, _ in inside)
        own = sum(math.prod(getattr(atom.aval, "shape", ())) for atom in equation.outvars)
        numbers += own + turns * sum(size for _, size in inside)
    return operations, numbers


def primal_jaxpr(equation: JaxprEqn) -> Any:
    """The jaxpr, open or closed, with which a call, a checkpoint, a `shard_map` or a custom rule computes its results.

    None for an equation that contains none. `jit`, `shard_map` and checkpoints call it `jaxpr`, a custom rule and
    `closed_call` `call_jaxpr`, and the `custom_vjp` of earlier versions `fun_jaxpr`.
    """
    parameters = equation.params
    return next((parameters[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in parameters), None)


def shown(equation: JaxprEqn) -> Any:
    """What a function under `double_where`, or the linear part of its derivative, computes of its operands."""
    function, avals = equation.primitive.impl, [atom.aval for atom in equation.invars]
    return primal_jaxpr(equation) or jax.make_jaxpr(lambda *o: function(*o, **equation.params))(*avals)


def is_custom_rule(equation: JaxprEqn) -> bool:
    """Whether an equation is the call of a function with a `custom_jvp` or a `custom_vjp`."""
    return equation.primitive.name in CUSTOM_RULES


def custom_rule_body(equation: JaxprEqn) -> Any:
    """The function that a custom derivative rule is for, as a jaxpr; None for an equation of another kind."""
    return primal_jaxpr(equation) if is_custom_rule(equation) else None


class Written(NamedTuple):
    """The name of the function that something was traced from, and its file and line."""

    name: str
    file: str


def written(traced: Any) -> Written:
    """Where the function of a jaxpr, or of a rule that is yet to be traced, was written."""
    name, _, file = str(getattr(getattr(traced, "debug_info", None), "func_src_info", None) or "").partition(" at ")
    return Written(name, file)


def rule_file(equation: JaxprEqn) -> str:
    """The file that the rule of a `custom_jvp` was written in; empty if JAX does not say.

    Of rules for single arguments (`defjvps`), JAX only names its own function that adds them up. They count as written
    where the function was, unless that uses another rule: somebody may have given a new rule to a function of JAX.
    """
    rule = written(equation.params["jvp_jaxpr_fun"])
    body, _ = jaxpr_and_consts(primal_jaxpr(equation))
    if adds_up_rules(*rule):
        return "" if any_equation(body, is_custom_rule) else written(body).file
    return rule.file


def closed_over(equation: JaxprEqn) -> int:
    """How many of the first operands of a custom rule the function closes over."""
    return int(equation.params.get("num_consts", 0))


def residual_count(equation: JaxprEqn) -> int:
    """How many of the first operands of a `custom_lin` are residuals."""
    return int(equation.params["num_res"])


def name_of(equation: JaxprEqn) -> str:
    """The name of the called function, the name that a `checkpoint_name` gives, or that of the primitive."""
    return str(equation.params.get("name", equation.primitive.name))


def is_recomputed(equation: JaxprEqn) -> bool:
    """Whether a checkpoint is part of a derivative, and so recomputes the values it needs."""
    return bool(equation.params.get("differentiated", False))


def is_mutating(equation: JaxprEqn) -> bool:
    """Whether an equation works on a mutable reference, so that what it writes is not among its outputs."""
    return any(map(refers, (*equation.invars, *equation.outvars)))


def refers(atom: Any) -> bool:
    """Whether what an atom of a jaxpr stands for is a mutable reference."""
    return hasattr(atom.aval, "inner_aval")


def is_unreduced(equation: JaxprEqn) -> bool:
    """Whether an equation works on a sum that no device has whole, `unreduced`, or on what has such a cotangent."""
    return any(_is_unreduced(v.aval) for v in (*equation.invars, *equation.outvars))


def _is_unreduced(aval: Any) -> bool:
    # Outside of a `shard_map` the sharding says so, inside of it the type.
    places = getattr(getattr(aval, "sharding", None), "spec", None), getattr(aval, "mat", None)
    return any(getattr(place, "unreduced", None) or getattr(place, "reduced", None) for place in places)


def is_reverse_only(equation: JaxprEqn) -> bool:
    """Whether an equation of a linear program stands for a backward pass: dependence shows only in reverse mode."""
    return "bwd" in equation.params or equation.primitive.name in HIGH_LINEAR


# --- loops and branches ----------------------------------------------------------------------------------------------


def checkpoint_settings(equation: JaxprEqn) -> tuple[Any, bool | tuple[bool, ...]]:
    """The policy of a checkpoint and its `prevent_cse`: one per operand if the user gave a tree of them."""
    return equation.params["policy"], equation.params["prevent_cse"]


def shard_map_specs(equation: JaxprEqn) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """How a `shard_map` splits its operands among the devices, and how its results are joined."""
    return tuple(equation.params["in_specs"]), tuple(equation.params["out_specs"])


def shard_map_axes(equation: JaxprEqn) -> frozenset[Any]:
    """The mesh axes that a `shard_map` takes over."""
    parameters = equation.params
    axes = parameters.get("newly_manual_axes", parameters.get("manual_axes"))
    return frozenset(axes or parameters["mesh"].axis_names)


def is_plain_call(equation: JaxprEqn) -> bool:
    """Whether a call says nothing about itself that another call of `jax.jit` would have to repeat."""
    parameters = equation.params
    unspecified = [*parameters.get("in_shardings", ()), *parameters.get("out_shardings", ())]
    layouts = [*parameters.get("in_layouts", ()), *parameters.get("out_layouts", ())]
    return (
        # JAX exports no name for what is not specified.
        all(type(own).__name__ == "UnspecifiedValue" for own in unspecified)
        and all(own is None for own in layouts)
        and not any(parameters.get("donated_invars", ()))
        and not parameters.get("compiler_options_kvs")
    )


def shared_axes(equation: JaxprEqn, spec: Any) -> frozenset[Any]:
    """The mesh axes over which a `shard_map` does not split a value, if the types inside do not tell."""
    checked = equation.params["check_vma"]
    return frozenset[Any]() if checked else shard_map_axes(equation).difference(jax.tree.leaves(tuple(spec)))


class Scan(NamedTuple):
    """What a scan is made of.

    Attributes:
        body: From constants, carries and one slice of each scanned operand to carries and slices of what is stacked.
        consts: How many operands, the first ones, are the same at every step.
        carried: How many operands after these, and how many results, are carried.
        length: The number of steps.
        is_reversed: Whether the last slice comes first.
    """

    body: Any
    consts: int
    carried: int
    length: int
    is_reversed: bool


def scan_of(equation: JaxprEqn) -> Scan:
    """What a scan is made of."""
    outer = equation.params
    body = outer["jaxpr"]
    if "num_consts" in outer:  # JAX 0.10
        return Scan(body, outer["num_consts"], outer["num_carry"], outer["length"], outer["reverse"])
    # From 0.11 on, the parameters hold it in containers of JAX; but only scanned operands have one more axis outside.
    inside, _ = jaxpr_and_consts(body)
    scanned = sum(_has_more_axes(*pair) for pair in zip(equation.invars, inside.invars, strict=True))
    stacked = sum(_has_more_axes(*pair) for pair in zip(equation.outvars, inside.outvars, strict=True))
    carried = len(equation.outvars) - stacked
    return Scan(body, len(equation.invars) - scanned - carried, carried, outer["length"], outer["reverse"])


def _has_more_axes(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.aval.shape)


class While(NamedTuple):
    """What a `while` loop is made of.

    Attributes:
        test: From its constants and the carries to a bool, or to one for each element of a batch.
        test_consts: How many operands, the first ones, are constants of the test.
        body: From its constants and the carries to the carries.
        body_consts: How many operands after these are constants of the body.
    """

    test: Any
    test_consts: int
    body: Any
    body_consts: int


def while_of(equation: JaxprEqn) -> While:
    """What a `while` loop is made of; its operands: the constants of the test, those of the body, and the carries."""
    p = equation.params
    return While(p["cond_jaxpr"], p["cond_nconsts"], p["body_jaxpr"], p["body_nconsts"])


def branches_of(equation: JaxprEqn) -> tuple[Any, ...]:
    """The jaxprs of the branches of a conditional, whose first operand is the number of the one to run."""
    return tuple(equation.params["branches"])


def platforms_of(equation: JaxprEqn) -> tuple[tuple[str, ...] | None, ...] | None:
    """For each branch the platforms that take it, None for all others; None if a number chooses."""
    platforms = equation.params.get("branches_platforms")
    return None if platforms is None else tuple(platforms)


def solve_functions(equation: JaxprEqn, operands: Operands) -> tuple[dict[str, tuple[Any, Operands]], Operands]:
    """What a `custom_linear_solve` is made of.

    Returns:
        By name, the jaxpr of each function that it has and the operands that are its constants; and the operands that
        are right-hand sides, which come last.
    """
    jaxprs, counts = equation.params["jaxprs"], equation.params["const_lengths"]
    functions, rest = {}, list(operands)
    for name in jaxprs._fields:
        count = getattr(counts, name)
        functions[name], rest = (getattr(jaxprs, name), rest[:count]), rest[count:]
    return {name: part for name, part in functions.items() if part[0] is not None}, rest


def solve_jaxpr(equation: JaxprEqn, operands: Operands) -> tuple[Any, Operands]:
    """The jaxpr with which a `custom_linear_solve` solves, and its operands."""
    functions, right_sides = solve_functions(equation, operands)
    jaxpr, constants = functions["solve"]
    return jaxpr, [*constants, *right_sides]


# --- shapes ----------------------------------------------------------------------------------------------------------


def reshape_order(equation: JaxprEqn) -> tuple[int, ...] | None:
    """The permutation of axes that a reshape begins with, as in JAX's own rule for a product; None for none."""
    order = equation.params["dimensions"] if equation.primitive.name == "reshape" else None
    return None if order is None else tuple(order)


def is_reshape(equation: JaxprEqn) -> bool:
    """Whether an equation changes the shape of an array, and nothing else."""
    return equation.primitive.name in {"reshape", "squeeze", "expand_dims"} and reshape_order(equation) is None


# Where a part lies in a larger array, axis by axis.
Window = tuple[slice, ...]
# They put parts together.
ASSEMBLIES = named("concatenate pad stack")


def padded_window(shape: Sequence[int], pads: Sequence[tuple[int, int, int]]) -> Window:
    """Where an array of this shape lies in what `jax.lax.pad` makes of it, unless that cuts some of it off."""
    axes = zip(shape, pads, strict=True)
    return tuple(slice(low, low + size * (inside + 1), inside + 1) for size, (low, _, inside) in axes)


def windows_of(equation: JaxprEqn) -> list[Window] | None:
    """Where the parts lie of an array that an equation cuts up or puts together; None for any other equation.

    The parts of a `stack` or `unstack` have no axis along which they lie; here they have one of size one.
    """
    p, name, shape = equation.params, equation.primitive.name, equation.invars[0].aval.shape
    if name == "slice":
        return [tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(shape)))]
    if name == "pad" and all(low >= 0 and high >= 0 for low, high, _ in p["padding_config"]):
        return [padded_window(shape, p["padding_config"])]
    if name not in {"split", "concatenate", "stack", "unstack"}:
        return None
    axis = p["dimension"] if name == "concatenate" else p["axis"]
    parts = equation.invars if name in ASSEMBLIES else equation.outvars
    sizes = [part.aval.shape[axis] if name in {"split", "concatenate"} else 1 for part in parts]
    stops = itertools.accumulate(sizes)
    along = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    whole = equation.outvars[0] if name in ASSEMBLIES else equation.invars[0]
    return [tuple(one if n == axis else slice(None) for n in range(whole.aval.ndim)) for one in along]


# --- reads and writes by index ---------------------------------------------------------------------------------------


def reading_dimensions(writing: Any) -> lax.GatherDimensionNumbers:
    """The dimension numbers of the gather that reads where a given scatter writes."""
    return lax.GatherDimensionNumbers(
        offset_dims=writing.update_window_dims,
        collapsed_slice_dims=writing.inserted_window_dims,
        start_index_map=writing.scatter_dims_to_operand_dims,
        operand_batching_dims=writing.operand_batching_dims,
        start_indices_batching_dims=writing.scatter_indices_batching_dims,
    )


def index_batching_axes(equation: JaxprEqn) -> tuple[int, ...]:
    """The axes of a gather's or scatter's indices along which each index has an array of its own."""
    numbers = equation.params["dimension_numbers"]
    is_read = hasattr(numbers, "start_indices_batching_dims")
    return tuple(numbers.start_indices_batching_dims if is_read else numbers.scatter_indices_batching_dims)


def written_window(equation: JaxprEqn) -> list[int]:
    """The shape of what a scatter writes at one index vector."""
    numbers, (operand, _, updates) = equation.params["dimension_numbers"], (atom.aval for atom in equation.invars)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(updates.shape[axis] for axis in numbers.update_window_dims)
    return [1 if axis in single else next(sizes) for axis in range(operand.ndim)]


# --- shapes and dtypes -----------------------------------------------------------------------------------------------


def is_floating(aval: Any) -> bool:
    """Whether values of this shape and dtype have tangents; a token and a key have none."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a value varies inside `shard_map`."""
    # 0.11 moved them from `vma` to `mat.varying`.
    return frozenset(getattr(getattr(aval, "mat", None), "varying", None) or getattr(aval, "vma", None) or ())


def explicit_sharding(aval: Any) -> Any:
    """The sharding of a value on a mesh whose axes are part of its type; None otherwise."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types else None


def mesh_elsewhere(equation: JaxprEqn) -> Any:
    """The mesh that an equation runs on, if it is not the current one, as inside `auto_axes`; None otherwise."""
    mesh, current = equation.ctx.cur_abstract_mesh, jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in (*mesh.axis_types, *current.axis_types)
    return None if mesh.empty or current.empty or is_manual or mesh == current else mesh
