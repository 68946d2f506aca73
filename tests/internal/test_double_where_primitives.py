"""Every primitive through which JAX can send a tangent has a rule of `double_where`, or a reason for having none."""

import jax
import jax.experimental.multihost_utils
import jax.experimental.pallas  # These two define primitives of their own, whatever test runs before.
import numpy as np
from jax._src.interpreters import ad

from partgrad._double_where.fed import FED
from partgrad._double_where.known import captured
from partgrad._double_where.walk import ENTERED
from partgrad._programs import CALLS

RULES = {*FED, *ENTERED}

# Without a rule, a primitive is live as a whole: a NaN may stay, no number is wrong.
REASONS = {
    "a call, opened before any rule is asked": [*CALLS, "call", "composite", "stage"],
    "a custom rule, which the derivative has applied already": [
        *("custom_jvp_call", "call_hi_primitive", "call_hi_primitive_linearized", "linear_call", "remat_opt"),
    ],
    "a mutable reference or a log: JAX follows these alone": [
        *("addupdate", "get", "swap", "box_get", "box_set", "new_box", "log_extend", "log_read", "new_log"),
    ],
    "foreign code, of which nothing is known": [
        *("debug_callback", "debug_print", "ffi_call", "io_callback", "mpmd_map", "pallas_call", "pure_callback"),
    ],
    "it orders operations and computes nothing": ["dce_sink", "tie"],
    "it names an operation for the compiler": ["xla_metadata_call", "xla_metadata_value"],
    "it moves arrays between processes, outside jit": [
        *("global_array_to_host_local_array", "host_local_array_to_global_array"),
    ],
    "a random key has no tangent": ["from_edtype", "to_edtype"],
    "what it reads depends on data": ["ragged_dot_general"],
    "the backward pass of a `custom_vjp`, which is walked": ["custom_lin"],
    "a function under `double_where`, which is opened": ["partgrad_double_where", "partgrad_double_where_linear"],
    "its factors are known only together": ["polynomial"],
    "experimental sparse arrays": [
        *("bcoo_dot_general", "bcoo_dot_general_sampled", "bcoo_extract", "bcoo_fromdense", "bcoo_todense"),
        *("bcoo_transpose", "bcsr_dot_general", "bcsr_extract", "bcsr_fromdense", "bcsr_todense", "coo_fromdense"),
        *("coo_matmat", "coo_matvec", "coo_todense", "csr_fromdense", "csr_matmat", "csr_matvec", "csr_todense"),
        *("spsolve", "todense"),
    ],
}


def linear_primitives():
    """The names of JAX's own primitives that have a transpose."""
    rules = {**ad.primitive_transposes, **getattr(ad, "fancy_transposes", {})}
    own = lambda rule: (getattr(getattr(rule, "func", rule), "__module__", "") or "").startswith("jax")
    # On JAX 0.12 a loop or a call that `vjp` has met stands for itself under a name such as `vjp_node[scan]`.
    plain = lambda name: name.removeprefix("vjp_node[").removesuffix("]") if name.startswith("vjp_node[") else name
    return {plain(primitive.name) for primitive, rule in rules.items() if own(rule)}


def test_every_linear_primitive_has_a_rule_or_a_reason():
    reasons = {name for names in REASONS.values() for name in names}
    new = sorted(linear_primitives() - set(RULES) - reasons)
    assert not new, (
        f"JAX {jax.__version__} sends tangents through {', '.join(new)}, of which double_where knows nothing. Give each a "
        f"rule ('Adding a rule' in docs/develop/double_where_inside.md), or a line in REASONS that says why it has none."
    )


def test_no_primitive_has_both():
    assert not set(RULES) & {name for names in REASONS.values() for name in names}


def test_numbers_that_are_on_several_hosts_are_not_fetched():
    on_this_one = np.arange(3) > 0
    assert captured(on_this_one) is not None
    assert captured(on_this_one.view(type("Spread", (np.ndarray,), {"is_fully_addressable": False}))) is None
