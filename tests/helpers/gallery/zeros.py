"""Gradients that are zero, or less than they should be: nothing leads to the output, or something stops them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import partgrad as pg

from ._fault import Fault

F = lambda *values: jnp.array(values, jnp.float32)
S = jnp.float32


@pg.dataclass
class Seasonal:
    amplitude: Any
    period: Any = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amplitude * jnp.sin(2 * jnp.pi * t / self.period)


class Head(eqx.Module):
    weight: jax.Array
    unused: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.weight @ x)


def dead(p):
    return jnp.sum(p["used"] ** 2)


def dead_in_a_module(model):
    return jnp.sum(model(F(1, 2)))


def dead_carry_of_a_scan(p):
    def step(state, t):
        kept, lost = state
        return (kept * p["rate"] + t, lost + p["lost"]), None

    return jax.lax.scan(step, (p["start"], p["lost"]), F(1, 2, 3))[0][0]


def overwritten(p):
    table = p["table"].at[:].set(p["new"])  # fault: overwritten
    return table[1] ** 2


# --- marks and stop_gradient -------------------------------------------------------------------------------------


def held_inside(p):
    model = Seasonal(p["amplitude"], p["period"])  # fault: held_inside
    return jnp.sum(model(F(0.1, 0.3)) ** 2)  # fault: held_inside


def partly_held_inside(p):
    model = Seasonal(p["amplitude"], p["period"])  # fault: partly_held_inside
    return model(0.3) + p["period"] ** 2  # fault: partly_held_inside


def marked_inside(p):
    x = pg.NonDiff(p["x"])  # fault: marked_inside
    return pg.unwrap(x) ** 2 * p["y"]  # fault: marked_inside


def stopped(p):
    scale = jax.lax.stop_gradient(p["scale"])  # fault: stopped
    return jnp.sum((p["x"] / scale) ** 2)


def partly_stopped(p):
    weights = jax.nn.softmax(p["x"])
    centred = p["x"] - jax.lax.stop_gradient(jnp.mean(p["x"]))  # fault: partly_stopped
    return jnp.sum(weights * centred) + p["y"]


def stopped_in_scan(p):
    def step(value, reward):
        target = jax.lax.stop_gradient(reward + 0.9 * value)  # fault: stopped_in_scan
        return value + p["rate"] * (target - value), None

    return jax.lax.scan(step, p["value"], F(1, 0, 2))[0]


@jax.jit
def _normalised(x):
    largest = jax.lax.stop_gradient(jnp.sum(x**2))  # fault: stopped_in_jit
    return x / largest


def stopped_in_jit(p):
    return jnp.sum(_normalised(p["x"]) * p["y"])


def straight_through(p):
    x = p["x"]
    quantised = x + jax.lax.stop_gradient(jnp.round(x) - x)  # fault: straight_through
    return jnp.sum(quantised * p["y"])


# --- integers and comparisons ------------------------------------------------------------------------------------


def integer_cast(p):
    count = p["count"].astype(jnp.int32)  # fault: integer_cast
    return p["mass"] * count


def rounded(p):
    grid = jnp.round(p["x"] * 10) / 10  # fault: rounded
    return jnp.sum(grid * p["y"])


def floored_in_vmap(p):
    def bin_of(x):
        return jnp.floor(x / 0.5)  # fault: floored_in_vmap

    return jnp.sum(jax.vmap(bin_of)(p["x"])) * p["y"]


def signed(p):
    return jnp.sum(jnp.sign(p["x"]) * p["y"])  # fault: signed


def compared(p):
    inside = p["x"] < p["edge"]  # fault: compared
    return jnp.sum(jnp.where(inside, p["y"], 0.0))


def argmax_in_the_middle(p):
    best = jnp.argmax(p["scores"])  # fault: argmax_in_the_middle
    return p["values"][best] ** 2


def one_hot_of_argmax(p):
    choice = jax.nn.one_hot(jnp.argmax(p["logits"]), 3)  # fault: one_hot_of_argmax
    return jnp.vdot(choice, p["values"])


def integer_cast_in_scan(p):
    def step(state, t):
        steps = (p["speed"] * t).astype(int)  # fault: integer_cast_in_scan
        return state + p["gain"] * steps, None

    return jax.lax.scan(step, S(0), F(1.2, 2.3, 3.4))[0]


# --- saturated, and truly zero -----------------------------------------------------------------------------------


def saturated_tanh(p):
    return jnp.sum(jnp.tanh(1e4 * p["x"])) * p["y"]  # fault: saturated_tanh


def saturated_sigmoid(p):
    gate = jax.nn.sigmoid(p["gate"])  # fault: saturated_sigmoid
    return gate * p["y"]


def clipped_out_of_range(p):
    rate = jnp.clip(p["rate"], 0.0, 1.0)  # fault: clipped_out_of_range
    return p["x"] * rate


def dead_relu(p):
    hidden = jax.nn.relu(p["weight"] @ F(1, 2) + p["bias"])  # fault: dead_relu
    return jnp.sum(hidden) + jnp.sum(p["output"] ** 2)


def saturated_softmax(p):
    shares = jax.nn.softmax(p["logits"])  # fault: saturated_softmax
    return jnp.vdot(shares, p["values"])


def honestly_zero(p):
    return jnp.sum(p["x"] ** 2) + p["y"]


def honestly_zero_by_symmetry(p):
    return p["x"] * p["y"] + jnp.cos(p["phase"])


NO_PATH = ("no path to the output",)

FAULTS = [
    Fault("dead", dead, ({"used": F(1, 2), "lost": F(1)},), "zero", "warning", "['lost']", True, None, "", NO_PATH),
    Fault(
        "dead_in_a_module",
        dead_in_a_module,
        (Head(jnp.eye(2), jnp.ones(3)),),
        "zero",
        "warning",
        "unused",
        True,
        None,
        "",
        NO_PATH,
    ),
    Fault(
        "dead_carry_of_a_scan",
        dead_carry_of_a_scan,
        ({"rate": S(0.5), "start": S(1), "lost": S(2)},),
        "zero",
        "warning",
        "['lost']",
        True,
        None,
        "",
        NO_PATH,
    ),
    Fault("overwritten", overwritten, ({"table": F(1, 2), "new": S(3)},), "zero", "warning", "['table']", True),
    Fault(
        "held_inside",
        held_inside,
        ({"amplitude": S(2), "period": S(1.3)},),
        "zero",
        "warning",
        "['period']",
        False,
        words=("Seasonal.period", "Diff"),
    ),
    Fault(
        "partly_held_inside",
        partly_held_inside,
        ({"amplitude": S(2), "period": S(1.3)},),
        "mismatch",
        "warning",
        "['period']",
        False,
        words=("Seasonal.period", "Diff"),
    ),
    Fault("marked_inside", marked_inside, ({"x": S(3), "y": S(2)},), "zero", "warning", "['x']", False),
    Fault("stopped", stopped, ({"x": F(1, 2), "scale": S(2)},), "zero", "warning", "['scale']", False),
    Fault("partly_stopped", partly_stopped, ({"x": F(1, 2, 4), "y": S(1)},), "mismatch", "warning", "['x']", False),
    Fault(
        "stopped_in_scan",
        stopped_in_scan,
        ({"value": S(0.5), "rate": S(0.1)},),
        "mismatch",
        "warning",
        "['value']",
        False,
    ),
    Fault("stopped_in_jit", stopped_in_jit, ({"x": F(1, 2), "y": F(3, 1)},), "mismatch", "warning", "['x']", False),
    Fault(
        "straight_through",
        straight_through,
        ({"x": F(0.3, 1.8), "y": F(1, 2)},),
        "mismatch",
        "warning",
        "['x']",
        False,
        note="a deliberate straight-through estimator",
    ),
    Fault("integer_cast", integer_cast, ({"count": S(3.4), "mass": S(2)},), "zero", "warning", "['count']", True),
    Fault("rounded", rounded, ({"x": F(0.33, 0.71), "y": F(1, 2)},), "zero", "warning", "['x']", True),
    Fault("floored_in_vmap", floored_in_vmap, ({"x": F(0.3, 1.7), "y": S(2)},), "zero", "warning", "['x']", True),
    Fault("signed", signed, ({"x": F(0.3, -1.7), "y": F(1, 2)},), "zero", "warning", "['x']", True),
    Fault("compared", compared, ({"x": F(0.3, 1.7), "edge": S(1), "y": F(1, 2)},), "zero", "warning", "['edge']", True),
    Fault(
        "argmax_in_the_middle",
        argmax_in_the_middle,
        ({"scores": F(1, 3, 2), "values": F(1, 2, 3)},),
        "zero",
        "warning",
        "['scores']",
        True,
    ),
    Fault(
        "one_hot_of_argmax",
        one_hot_of_argmax,
        ({"logits": F(1, 3, 2), "values": F(1, 2, 3)},),
        "zero",
        "warning",
        "['logits']",
        True,
    ),
    Fault(
        "integer_cast_in_scan",
        integer_cast_in_scan,
        ({"speed": S(1.1), "gain": S(2)},),
        "zero",
        "warning",
        "['speed']",
        True,
    ),
    Fault("saturated_tanh", saturated_tanh, ({"x": F(0.3, 1), "y": S(2)},), "zero", "warning", "['x']", True),
    Fault("saturated_sigmoid", saturated_sigmoid, ({"gate": S(300), "y": S(2)},), "zero", "warning", "['gate']", True),
    Fault(
        "clipped_out_of_range",
        clipped_out_of_range,
        ({"rate": S(1.5), "x": S(2)},),
        "zero",
        "warning",
        "['rate']",
        True,
    ),
    Fault(
        "dead_relu",
        dead_relu,
        ({"weight": -jnp.eye(2), "bias": F(-1, -1), "output": F(1, 2)},),
        "zero",
        "warning",
        "['bias']",
        True,
    ),
    Fault(
        "saturated_softmax",
        saturated_softmax,
        ({"logits": F(0, 1e4), "values": F(1, 2)},),
        "zero",
        "warning",
        "['logits']",
        True,
    ),
    Fault("honestly_zero", honestly_zero, ({"x": F(0, 0), "y": S(1)},), "zero", "info", "['x']", True, None, ""),
    Fault(
        "honestly_zero_by_symmetry",
        honestly_zero_by_symmetry,
        ({"x": S(1), "y": S(2), "phase": S(0)},),
        "zero",
        "info",
        "['phase']",
        True,
        None,
        "",
    ),
]
