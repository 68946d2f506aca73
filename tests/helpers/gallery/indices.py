"""Indices out of bounds: reads and writes, consistent with their derivative and not."""

import jax
import jax.numpy as jnp

from ._fault import Fault

F = lambda *values: jnp.array(values, jnp.float32)
S = jnp.float32
AFTER = jnp.array([0, 3])


def read_after_the_end(p):
    picked = p["table"][p["where"]]  # fault: read_after_the_end
    return jnp.sum(picked**2) * p["scale"]


def read_before_the_start(p):
    picked = p["table"][jnp.array([1, -9])]  # fault: read_before_the_start
    return jnp.sum(picked * p["scale"])


def read_a_column(p):
    rows, columns = jnp.array([0, 1]), jnp.array([1, 7])
    return jnp.sum(p["matrix"][rows, columns]) + p["bias"]  # fault: read_a_column


def read_in_scan(p):
    def step(state, i):
        window = p["signal"][jnp.array([i, i + 1])]  # fault: read_in_scan
        return state + p["gain"] * window[1], None

    return jax.lax.scan(step, S(0), jnp.arange(4))[0]


@jax.jit
def _embedded(table, tokens):
    return table[tokens]  # fault: read_in_jit_and_vmap


def read_in_jit_and_vmap(p):
    rows = jax.vmap(lambda tokens: _embedded(p["embedding"], tokens).sum(axis=0))(jnp.array([[0, 1], [2, 3]]))
    return jnp.sum(rows * p["head"])


def added_where_promised(p):
    total = jnp.zeros(3).at[jnp.array([1, 5])].add(p["x"], mode="promise_in_bounds")  # fault: added_where_promised
    return jnp.sum(total * p["y"])


def written_after_the_end(p):
    grid = jnp.zeros(3).at[AFTER].set(p["x"])  # fault: written_after_the_end
    return jnp.sum(grid**2) + p["y"]


def added_after_the_end(p):
    counts = jax.ops.segment_sum(p["x"], AFTER, 2)  # fault: added_after_the_end
    return jnp.sum(counts * p["y"])


def window_after_the_end(p):
    window = jax.lax.dynamic_slice(p["signal"], (2,), (2,))  # fault: window_after_the_end
    return jnp.sum(window * p["kernel"])


def window_in_scan(p):
    def step(state, i):
        window = jax.lax.dynamic_slice_in_dim(p["signal"], i, 2)  # fault: window_in_scan
        return state + jnp.vdot(window, p["kernel"]), None

    return jax.lax.scan(step, S(0), jnp.arange(4))[0]


def window_written_after_the_end(p):
    signal = jax.lax.dynamic_update_slice(p["signal"], p["patch"], (3,))  # fault: window_written_after_the_end
    return jnp.sum(signal**2)


def one_entry_after_the_end(p):
    last = jnp.argmax(p["x"]) + 1
    return p["x"][last] * p["y"]  # fault: one_entry_after_the_end


def deliberate_fill(p):
    picked = p["table"].at[AFTER].get(mode="fill", fill_value=0.0)  # fault: deliberate_fill
    return jnp.sum(picked * p["y"])


def deliberate_drop(p):
    grid = jnp.zeros(3).at[AFTER].add(p["x"], mode="drop")  # fault: deliberate_drop
    return jnp.sum(grid * p["y"])


def deliberate_clip(p):
    picked = jnp.take(p["table"], AFTER, mode="clip")  # fault: deliberate_clip
    return jnp.sum(picked * p["y"])


TABLE = F(1, 2, 4)

FAULTS = [
    Fault(
        "read_after_the_end",
        read_after_the_end,
        ({"table": TABLE, "scale": S(2), "where": jnp.array([0, 5])},),
        "oob",
        "error",
        "['table']",
        False,
        words=("5", "3"),
        note="the value clamps the index, the derivative drops it",
    ),
    Fault(
        "read_before_the_start",
        read_before_the_start,
        ({"table": TABLE, "scale": S(2)},),
        "oob",
        "error",
        "['table']",
        False,
        words=("-9",),
    ),
    Fault(
        "read_a_column",
        read_a_column,
        ({"matrix": jnp.arange(6.0).reshape(2, 3), "bias": S(1)},),
        "oob",
        "error",
        "['matrix']",
        False,
        words=("7", "axis 1"),
    ),
    Fault(
        "read_in_scan",
        read_in_scan,
        ({"signal": F(1, 2, 4, 3), "gain": S(2)},),
        "oob",
        "error",
        "['signal']",
        False,
        words=("4", "iteration 3"),
    ),
    Fault(
        "read_in_jit_and_vmap",
        read_in_jit_and_vmap,
        ({"embedding": jnp.arange(6.0).reshape(3, 2), "head": F(1, 2)},),
        "oob",
        "error",
        "['embedding']",
        False,
        words=("3", "axis 0"),
    ),
    Fault(
        "added_where_promised",
        added_where_promised,
        ({"x": F(1, 2), "y": F(1, 2, 3)},),
        "oob",
        "error",
        "['x']",
        False,
        words=("5",),
        note="the value drops what is written, its derivative does not",
    ),
    Fault(
        "written_after_the_end",
        written_after_the_end,
        ({"x": F(1, 2), "y": S(1)},),
        "oob",
        "warning",
        "['x']",
        True,
        words=("3",),
        note="dropped in the value and in the derivative",
    ),
    Fault(
        "added_after_the_end",
        added_after_the_end,
        ({"x": F(1, 2), "y": F(1, 2)},),
        "oob",
        "warning",
        "['x']",
        True,
        words=("3",),
    ),
    Fault(
        "window_after_the_end",
        window_after_the_end,
        ({"signal": TABLE, "kernel": F(1, 2)},),
        "oob",
        "warning",
        "['signal']",
        True,
        note="clamped in the value and in the derivative",
    ),
    Fault(
        "window_in_scan",
        window_in_scan,
        ({"signal": F(1, 2, 4, 3), "kernel": F(1, 2)},),
        "oob",
        "warning",
        "['signal']",
        True,
        words=("iteration 3",),
    ),
    Fault(
        "window_written_after_the_end",
        window_written_after_the_end,
        ({"signal": F(1, 2, 4, 3), "patch": F(1, 2)},),
        "oob",
        "warning",
        "['patch']",
        True,
    ),
    Fault(
        "one_entry_after_the_end",
        one_entry_after_the_end,
        ({"x": TABLE, "y": S(2)},),
        "oob",
        "warning",
        "['x']",
        True,
        words=("3",),
    ),
    Fault(
        "deliberate_fill",
        deliberate_fill,
        ({"table": TABLE, "y": F(1, 2)},),
        "oob",
        "warning",
        "['table']",
        True,
    ),
    Fault("deliberate_drop", deliberate_drop, ({"x": F(1, 2), "y": TABLE},), "oob", "warning", "['x']", True),
    Fault("deliberate_clip", deliberate_clip, ({"table": TABLE, "y": F(1, 2)},), "oob", "warning", "['table']", True),
]
