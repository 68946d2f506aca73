"""What JAX's primitives are called, and what kind each is.

Names move between versions of JAX. Every set of names is here, once.
"""


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
# The backward pass of a user's `custom_vjp`, in the transpose of a function under `double_where`.
BACKWARD = "partgrad_backward"
# The value of one function with the derivative of another: its operands are the results of the two.
SURROGATE = "partgrad_surrogate"
# The scopes of the stops that `partgrad.draw` makes with gradient="fixed", and of the exact function of a surrogate.
FIXED_DRAW = "partgrad.fixed"
OF_SURROGATE = "partgrad.surrogate"
# Before and after what says in a scope which map of coordinates, of which leaf, it is of.
OF_MAP = "partgrad.map:"
CHECKPOINTS = named("checkpoint remat remat2")
# Of a `custom_vjp` with `optimize_remat`, after the first derivative.
FORWARD_PASSES = named("remat_opt")
CUSTOM_JVPS = named("custom_jvp_call custom_jvp_call_jaxpr")
CUSTOM_VJPS = named("custom_vjp_call custom_vjp_call_jaxpr")
CUSTOM_RULES = CUSTOM_JVPS | CUSTOM_VJPS
# From 0.12 on, `custom_root` and others. With `jax_remat3` and `jax_custom_vjp3` so are checkpoints and `custom_vjp`.
HIGH = named("call_hi_primitive")
HIGH_LINEAR = named("call_hi_primitive_linearized")
# What the forward pass of a `custom_vjp` leaves in a linear program, to be transposed later.
CUSTOM_LINEAR = named("custom_lin")
LOOPS = named("scan while")
# The equations whose jaxprs `reenter` can replace.
ENTERED = CALLS | CHECKPOINTS | LOOPS | named("cond shard_map")

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

# --- what takes one of several numbers, by their size -----------------------------------------------------------------

CHOOSING = EXTREMAL_WRITES | named(
    "max min clamp sort top_k approx_top_k reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin"
)

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
    "checkpoint": CHECKPOINTS | FORWARD_PASSES,
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
