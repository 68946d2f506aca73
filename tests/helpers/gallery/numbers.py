"""Ties, lost digits, and what cannot be differentiated at all."""

import jax
import jax.numpy as jnp

from ._fault import Fault

F = lambda *values: jnp.array(values, jnp.float32)
S = jnp.float32


# --- ties --------------------------------------------------------------------------------------------------------


def two_kinks_that_cancel(p):
    return p["y"] * jnp.sum(jnp.abs(p["x"]) - 2 * jax.nn.relu(p["x"]))  # fault: two_kinks_that_cancel


def where_equal(p):
    return p["y"] + jnp.sum(jnp.where(p["x"] == 0, 0.0, p["x"]))  # fault: where_equal


def maximum_of_equals(p):
    return jnp.maximum(p["a"], p["b"]) * p["c"]  # fault: maximum_of_equals


def largest_of_equals(p):
    return jnp.max(p["x"]) ** 2 + p["y"]  # fault: largest_of_equals


def sorted_equals(p):
    return jnp.vdot(jnp.sort(p["x"]), p["weights"])  # fault: sorted_equals


def clipped_at_the_bound(p):
    return jnp.clip(p["rate"], 0.0, 1.0) * p["x"]  # fault: clipped_at_the_bound


# --- digits ----------- --------------------------------------------------------------------------------------------


def half_precision_in_the_middle(p):
    hidden = jnp.tanh(p["x"]).astype(jnp.float16)  # fault: half_precision_in_the_middle
    return jnp.sum((hidden * p["gain"].astype(jnp.float16)).astype(jnp.float32) ** 2)


def cancellation(p):
    versine = (1 - jnp.cos(p["angle"])) / p["angle"] ** 2  # fault: cancellation
    return versine * p["y"]


def squared_small_difference(p):
    moments = jnp.mean(p["x"] ** 2) - jnp.mean(p["x"]) ** 2
    return jnp.sqrt(moments) * p["y"]


# --- not differentiable at all -----------------------------------------------------------------------------------


def while_on_the_leaf(p):
    step = lambda x: x - (x**2 - p["square"]) / (2 * x)
    root = jax.lax.while_loop(lambda x: x**2 - p["square"] > 1e-3, step, p["start"])  # fault: while_on_the_leaf
    return root * p["scale"]


@jax.jit
def _grown(start, rate, count):
    return jax.lax.fori_loop(0, count, lambda _, x: x * rate, start)  # fault: fori_with_a_traced_bound


def fori_with_a_traced_bound(p, count):
    return _grown(p["start"], p["rate"], count) ** 2


def branch_on_a_value(p):
    if p["x"] > 0:  # fault: branch_on_a_value
        return p["x"] ** 2 * p["y"]
    return p["y"]


FAULTS = [
    Fault(
        "two_kinks_that_cancel",
        two_kinks_that_cancel,
        ({"x": F(0, 1), "y": S(2)},),
        "mismatch",
        "error",
        "['x']",
        False,
        note="minus x everywhere, and its derivative at 0 is +1",
    ),
    Fault("where_equal", where_equal, ({"x": F(0, 1), "y": S(2)},), "mismatch", "error", "['x']", False),
    Fault(
        "maximum_of_equals", maximum_of_equals, ({"a": S(2), "b": S(2), "c": S(3)},), "tie", "warning", "['a']", True
    ),
    Fault("largest_of_equals", largest_of_equals, ({"x": F(1, 3, 3), "y": S(3)},), "tie", "warning", "['x']", True),
    Fault("sorted_equals", sorted_equals, ({"x": F(3, 1, 3), "weights": F(1, 2, 4)},), "tie", "warning", "['x']", True),
    Fault(
        "clipped_at_the_bound", clipped_at_the_bound, ({"rate": S(1), "x": S(2)},), "tie", "warning", "['rate']", True
    ),
    Fault(
        "half_precision_in_the_middle",
        half_precision_in_the_middle,
        ({"x": F(0.3, 0.7, 1.1), "gain": S(1.7)},),
        "precision",
        "info",
        "['x']",
        True,
        words=("float16",),
    ),
    Fault(
        "cancellation",
        cancellation,
        ({"angle": S(1e-3), "y": S(2)},),
        "precision",
        "error",
        "['angle']",
        False,
        marker="",
        note="the terms of the derivative cancel in float32",
    ),
    Fault(
        "squared_small_difference",
        squared_small_difference,
        ({"x": F(100.0, 100.1, 100.3), "y": S(2)},),
        "precision",
        "warning",
        "['y']",
        False,
        marker="",
        note="jit rounds otherwise: the values differ by some percent, which is no other function",
    ),
    Fault(
        "while_on_the_leaf",
        while_on_the_leaf,
        ({"square": S(2), "start": S(3), "scale": S(2)},),
        "mismatch",
        "error",
        "",
        False,
        words=("while", "reverse"),
        also=("['square']", "['start']"),
        note="JAX has no reverse mode for it",
    ),
    Fault(
        "fori_with_a_traced_bound",
        fori_with_a_traced_bound,
        ({"rate": S(0.5), "start": S(3)}, jnp.int32(3)),
        "mismatch",
        "error",
        "",
        False,
        words=("while", "reverse"),
        also=("['rate']", "['start']"),
    ),
    Fault(
        "branch_on_a_value",
        branch_on_a_value,
        ({"x": S(2), "y": S(3)},),
        "value",
        "error",
        "",
        False,
        words=("jit",),
        also=("['x']",),
        note="runs, but not under jit",
    ),
]
