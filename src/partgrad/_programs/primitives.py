"""What JAX's primitives are called, what kind each is, and where an equation keeps its parameters.

Names and parameters move between versions of JAX. Every set of names is here, once, and every parameter that has moved
is read here.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType

from .._compat import adds_up_rules

Operands = list[Any]
# An equation, preceded by those around it, from the outermost inwards.
Chain = tuple[JaxprEqn, ...]


def named(names: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(names.split())


# --- what contains jaxprs --------------------------------------------------------------------------------------------

# `eval_jaxpr` is the `closed_call` of 0.12.
CALLS = named("jit pjit closed_call core_call eval_jaxpr")
# The names of calls that partgrad makes around the user's functions.
TRANSPARENT = named("partgrad_double_where")
# Functions under `double_where`, and the linear parts of their derivatives.
OWN = ("partgrad_double_where", "partgrad_double_where_linear")
# The scope of the stops that `partgrad.draw` makes with gradient="fixed".
FIXED_DRAW = "partgrad.fixed"
CHECKPOINTS = named("checkpoint remat remat2")
CUSTOM_JVPS = named("custom_jvp_call custom_jvp_call_jaxpr")
CUSTOM_VJPS = named("custom_vjp_call custom_vjp_call_jaxpr")
CUSTOM_RULES = CUSTOM_JVPS | CUSTOM_VJPS
# From 0.12 on, `custom_root` and others. With `jax_remat3` and `jax_custom_vjp3` so are checkpoints and `custom_vjp`.
HIGH = named("call_hi_primitive")
HIGH_LINEAR = named("call_hi_primitive_linearized")
# What the forward pass of a `custom_vjp` leaves in a linear program, to be transposed later.
CUSTOM_LINEAR = named("custom_lin")
# The equations whose jaxprs `reenter` can replace.
ENTERED = CALLS | CHECKPOINTS | named("scan while cond shard_map")

# --- what has no derivative, or one that is zero ---------------------------------------------------------------------

COMPARISONS = named("gt ge lt le eq lt_to le_to")
TESTS = COMPARISONS | named("ne eq_to is_finite")
# The derivative of these is zero wherever it exists.
FLAT = named("stop_gradient floor ceil round sign nextafter")
DRAWS = named("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32 random_wrap")
# Operations whose results JAX does not determine by their operands.
FOREIGN = named("pure_callback io_callback ffi_call rng_uniform")

# --- what reads and writes by index ----------------------------------------------------------------------------------

EXTREMAL_WRITES = named("scatter-min scatter-max")
WRITES = EXTREMAL_WRITES | named("scatter scatter-add scatter-sub scatter-mul")

# --- what is linear --------------------------------------------------------------------------------------------------

# Each element of a result is an element of an operand.
MOVES = named(
    """broadcast_in_dim concatenate copy copy_p expand_dims pad reshape rev slice split squeeze stack tile transpose
    unstack"""
)
SUMS = named("add add_any sub neg reduce_sum cumsum convert_element_type")
PRODUCTS = named("mul dot_general conv_general_dilated ragged_dot_general")

# Every primitive that JAX 0.10.2 or 0.12 can put into a jaxpr, by kind. A primitive without a kind is new.
# fmt: off
KINDS: dict[str, frozenset[str]] = {
    "call": CALLS | named("call composite jaxpr_call xla_metadata_call"),
    "checkpoint": CHECKPOINTS | named("remat_opt"),
    "custom rule": CUSTOM_RULES | CUSTOM_LINEAR | HIGH | HIGH_LINEAR | named(
        "custom_vmap_call custom_partitioning custom_linear_solve linear_call unreachable"),
    "control flow": named("scan while cond platform_index"),
    "sharding": named("""shard_map all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast
        pbroadcast_dynamic pmax pmin ppermute precv preduced psend psum psum_invariant pvary ragged_all_to_all
        reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum
        unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p all_gather_done all_gather_start
        all_gather_reduced_start all_to_all_done all_to_all_start pbroadcast_done pbroadcast_start ppermute_done
        ppermute_start psum_done psum_start psum_invariant_start reduce_scatter_done reduce_scatter_start
        unreduced_psum_start unreduced_reduce_scatter_start sharding_constraint reshard relayout layout_constraint
        inspect_sharding mpmd_map"""),
    "move": MOVES | named("real imag complex conj zeros_like"),
    "sum": SUMS | named("tie name device_put optimization_barrier reduce_precision with_memory_space_constraint"),
    "product": PRODUCTS | named("div symmetric_product scaled_dot scaled_matmul scaled_matmul_wrapper"),
    "selection": named("""select_n clamp max min sort top_k approx_top_k reduce_max reduce_min argmax argmin cummax
        cummin"""),
    "window": named("""reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        select_and_scatter select_and_scatter_add"""),
    "reduction": named("reduce reduce_and reduce_or reduce_xor reduce_prod cumprod cumlogsumexp"),
    "index": WRITES | named("gather dynamic_slice dynamic_update_slice"),
    "elementwise": named("""abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf
        erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac integer_pow lgamma log log1p log2 logistic
        one_minus_square polygamma polynomial pow reciprocal regularized_incomplete_beta rem rsqrt sin sinh sqrt square
        tan tanh zeta"""),
    "flat": FLAT,
    "test": TESTS,
    "integer": named("""and or not xor clz mulhi population_count shift_left shift_right_arithmetic shift_right_logical
        bitcast_convert_type iota iota_2x32_shape multiple_of dim_as_value dimension_size shape_assertion check"""),
    "random": DRAWS | named("""random_clone random_fold_in random_seed random_split random_unwrap philox2x32 philox4x32
        threefry4x32 from_edtype to_edtype"""),
    "linear algebra": named("""cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu
        lu_pivots_to_permutation ormqr qr schur svd triangular_solve tridiagonal tridiagonal_solve fft"""),
    "callback": FOREIGN | named("debug_callback debug_print call_exported xla_metadata_value"),
    "reference": named("""accum_grad_in_ref addupdate get swap new_ref freeze empty_ref free_ref get_global box_get
        box_set new_box log_extend log_read new_log masked_load masked_swap run_state run_scoped core_map empty empty2
        pin unpin stage create_linear"""),
    "token": named("after_all create_token dce_sink delay semaphore_read semaphore_signal semaphore_wait"),
    "kernel": named("""pallas_call cudnn_fusion num_programs program_id dot_product_attention_bwd
        dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
        dot_product_attention_fwd_wrapper"""),
}
# fmt: on


def kind_of(name: str) -> str | None:
    """The kind of a primitive; None for one that is not JAX's own, or in neither JAX 0.10.2 nor 0.12."""
    return _KIND_OF.get(name)


_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


# --- jaxprs in equations ---------------------------------------------------------------------------------------------


def opened(jaxpr: Any) -> tuple[Jaxpr, Operands]:
    """A jaxpr, open or closed, as an open jaxpr and its constants."""
    is_closed = hasattr(jaxpr, "jaxpr") and hasattr(jaxpr, "consts")
    return (jaxpr.jaxpr, list(jaxpr.consts)) if is_closed else (jaxpr, [])


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs in the parameters of an equation."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            jaxpr, _ = opened(item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def any_equation(jaxpr: Jaxpr, predicate: Callable[[JaxprEqn], bool]) -> bool:
    """Whether a predicate holds for an equation of a jaxpr, at any depth."""
    return any(predicate(e) or any(any_equation(inner, predicate) for inner in inner_jaxprs(e)) for e in jaxpr.eqns)


def size_of(jaxpr: Jaxpr) -> tuple[int, float]:
    """How many operations a jaxpr has, at any depth, and how many numbers it computes, with one turn of a `while`."""
    operations, numbers = 0, 1.0
    for equation in jaxpr.eqns:
        inside = [size_of(inner) for inner in inner_jaxprs(equation)]
        turns = scan_parts(equation).length if equation.primitive.name == "scan" else 1
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
    body, _ = opened(primal_jaxpr(equation))
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
    return any(hasattr(v.aval, "inner_aval") for v in (*equation.invars, *equation.outvars))


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


def shared_axes(equation: JaxprEqn, spec: Any) -> frozenset[Any]:
    """The mesh axes over which a `shard_map` does not split a value, if the types inside do not tell."""
    checked = equation.params["check_vma"]
    return frozenset[Any]() if checked else shard_map_axes(equation).difference(jax.tree.leaves(tuple(spec)))


class ScanParts(NamedTuple):
    """The parts of a scan.

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


def scan_parts(equation: JaxprEqn) -> ScanParts:
    """The parts of a scan."""
    outer = equation.params
    body = outer["jaxpr"]
    if "num_consts" in outer:  # JAX 0.10
        return ScanParts(body, outer["num_consts"], outer["num_carry"], outer["length"], outer["reverse"])
    # From 0.11 on, the parameters hold it in containers of JAX; but only scanned operands have one more axis outside.
    inside, _ = opened(body)
    scanned = sum(_has_more_axes(*pair) for pair in zip(equation.invars, inside.invars, strict=True))
    stacked = sum(_has_more_axes(*pair) for pair in zip(equation.outvars, inside.outvars, strict=True))
    carried = len(equation.outvars) - stacked
    return ScanParts(body, len(equation.invars) - scanned - carried, carried, outer["length"], outer["reverse"])


def _has_more_axes(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.aval.shape)


class WhileParts(NamedTuple):
    """The parts of a `while` loop.

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


def while_parts(equation: JaxprEqn) -> WhileParts:
    """The parts of a `while` loop; its operands are the constants of the test, those of the body, and the carries."""
    p = equation.params
    return WhileParts(p["cond_jaxpr"], p["cond_nconsts"], p["body_jaxpr"], p["body_nconsts"])


def branches_of(equation: JaxprEqn) -> tuple[Any, ...]:
    """The jaxprs of the branches of a conditional, whose first operand is the number of the one to run."""
    return tuple(equation.params["branches"])


def platforms_of(equation: JaxprEqn) -> tuple[tuple[str, ...] | None, ...] | None:
    """For each branch the platforms that take it, None for all others; None if a number chooses."""
    platforms = equation.params.get("branches_platforms")
    return None if platforms is None else tuple(platforms)


def solve_parts(equation: JaxprEqn, operands: Operands) -> tuple[dict[str, tuple[Any, Operands]], Operands]:
    """What a `custom_linear_solve` is made of.

    Returns:
        By name, the jaxpr of each function that it has and the operands that are its constants; and the operands that
        are right-hand sides, which come last.
    """
    jaxprs, counts = equation.params["jaxprs"], equation.params["const_lengths"]
    parts, rest = {}, list(operands)
    for name in jaxprs._fields:
        count = getattr(counts, name)
        parts[name], rest = (getattr(jaxprs, name), rest[:count]), rest[count:]
    return {name: part for name, part in parts.items() if part[0] is not None}, rest


def solve_jaxpr(equation: JaxprEqn, operands: Operands) -> tuple[Any, Operands]:
    """The jaxpr with which a `custom_linear_solve` solves, and its operands."""
    parts, right_sides = solve_parts(equation, operands)
    jaxpr, constants = parts["solve"]
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
ASSEMBLIES = named("concatenate pad")


def padded_window(shape: Sequence[int], pads: Sequence[tuple[int, int, int]]) -> Window:
    """Where an array of this shape lies in what `jax.lax.pad` makes of it, unless that cuts some of it off."""
    axes = zip(shape, pads, strict=True)
    return tuple(slice(low, low + size * (inside + 1), inside + 1) for size, (low, _, inside) in axes)


def windows_of(equation: JaxprEqn) -> list[Window] | None:
    """Where the parts lie of an array that an equation cuts up or puts together; None for any other equation."""
    p, name, shape = equation.params, equation.primitive.name, equation.invars[0].aval.shape
    if name == "slice":
        return [tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(shape)))]
    if name == "pad" and all(low >= 0 and high >= 0 for low, high, _ in p["padding_config"]):
        return [padded_window(shape, p["padding_config"])]
    if name not in {"split", "concatenate"}:
        return None
    axis = p["axis"] if name == "split" else p["dimension"]
    sizes = p["sizes"] if name == "split" else [atom.aval.shape[axis] for atom in equation.invars]
    stops = itertools.accumulate(sizes)
    along = [slice(int(stop - size), int(stop)) for size, stop in zip(sizes, stops, strict=True)]
    return [tuple(one if n == axis else slice(None) for n in range(len(shape))) for one in along]


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
