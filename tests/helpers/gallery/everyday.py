"""What users of JAX get wrong from day to day, as others planted it to see whether a check would find it."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

import partgrad as pg

from ._fault import Fault

KEY = jax.random.key(0)
F = lambda *values: np.array(values, np.float32)


@jax.custom_vjp
def scaled(x, factor):
    return x * factor


scaled.defvjp(lambda x, factor: (x * factor, factor), lambda factor, g: (g * factor, jnp.sum(g)))


def rule_for_one_of_two(p):
    return jnp.sum(scaled(p["x"], p["y"]) ** 2)  # fault: rule_for_one_of_two


def _normalised(x):
    return x / lax.stop_gradient(jnp.max(jnp.abs(x)))  # fault: stop_in_a_helper


def stop_in_a_helper(p):
    return jnp.sum(_normalised(p["x"]) ** 3) * p["y"]


def ranks(p):
    rank = jnp.argsort(jnp.argsort(p["x"]))  # fault: ranks
    return jnp.sum(rank * F(1, 2, 4)) * p["y"]


def staircase(p):
    return p["y"] * jnp.sum(0.9 ** jnp.floor(p["x"] / 2))  # fault: staircase


def beyond_the_table(p):
    return jnp.sum(jnp.interp(p["x"] + 9, F(0, 1, 2), F(1, 2, 4))) * p["y"]  # fault: beyond_the_table


def nearest_of_a_table(p):
    return jnp.sum(jsp.ndimage.map_coordinates(F(1, 2, 4), [p["x"]], order=0)) * p["y"]  # fault: nearest_of_a_table


def gumbel_by_hand(p):
    chosen = jnp.argmax(p["x"] + jax.random.gumbel(KEY, (3,)))  # fault: gumbel_by_hand
    return jnp.asarray(F(1, 2, 4))[chosen] * p["y"]


@pg.double_where
def _drawn(p):
    return jnp.mean(jax.random.geometric(KEY, p["y"] / 2, (4,)) * p["x"][0])  # fault: draw_in_a_wrapper


def draw_in_a_wrapper(p):
    return _drawn(p)


def not_a_number_made_one(p):
    return jnp.sum(jnp.nan_to_num(p["x"] * jnp.log(p["x"]))) * p["y"]  # fault: not_a_number_made_one


def switched_by_a_leaf(p):
    return lax.cond(p["y"] > 0.5, jnp.sum, jnp.max, p["x"])  # fault: switched_by_a_leaf


def histogram(p):
    counts, _ = jnp.histogram(p["x"], bins=2, range=(0, 1))  # fault: histogram
    return jnp.sum(counts**2) * p["y"]


def forgotten_carry(p):
    def step(state, x):
        state = jnp.tanh(p["y"] * lax.stop_gradient(state) + x)  # fault: forgotten_carry
        return state, state

    return jnp.sum(lax.scan(step, jnp.float32(0.1), F(0.3, 0.2))[1]) + jnp.sum(p["x"])


def callback_without_a_rule(p):
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    return jnp.sum(jax.pure_callback(np.sin, shape, p["x"])) * p["y"]  # fault: callback_without_a_rule


TAPS = jnp.array([1.0, 4.0, 0.0]) / 6


@jax.custom_vjp
def smoothed(x):
    return jnp.convolve(x, TAPS, mode="same")


# The transpose turns the taps around.
smoothed.defvjp(lambda x: (smoothed(x), None), lambda _, cotangent: (jnp.convolve(cotangent, TAPS, mode="same"),))


def rule_with_a_constant_array(p):
    return jnp.sum(smoothed(p["x"]) ** 2) * p["y"]  # fault: rule_with_a_constant_array


def entropy_of_masked_logits(p):
    logarithms = jax.nn.log_softmax(p["x"])
    terms = jnp.exp(logarithms) * logarithms  # fault: entropy_of_masked_logits
    return -jnp.sum(jnp.where(jnp.isfinite(logarithms), terms, 0.0)) * p["y"]


def clipped_ratio_at_one(p):
    ratio = jnp.exp(p["x"])
    return jnp.sum(jnp.minimum(ratio, jnp.clip(ratio, 1.0, 1.2))) * p["y"]  # fault: clipped_ratio_at_one


def logarithm_of_a_variance(p):
    variance = jnp.mean(p["x"] ** 2) - jnp.mean(p["x"]) ** 2
    return jnp.log(variance) * p["y"]  # fault: logarithm_of_a_variance


def identity_of_two_kinks(p):
    return jnp.sum(jax.nn.relu(p["x"]) - jax.nn.relu(-p["x"])) * p["y"]  # fault: identity_of_two_kinks


def guarded_on_another_line(p):
    is_zero = p["angle"] == 0  # fault: guarded_on_another_line
    angle = jnp.where(is_zero, 1.0, p["angle"])
    ratio = (1 - jnp.cos(angle)) / angle
    return jnp.sum(jnp.where(is_zero, 0.0, ratio)) * p["y"]


X, Y = F(0.3, -1.2, 0.7), np.float32(0.8)
POINT = ({"x": X, "y": Y},)
FAULTS = [
    Fault("rule_for_one_of_two", rule_for_one_of_two, POINT, "mismatch", "error", "['y']", False, words=("scaled`",)),
    Fault("stop_in_a_helper", stop_in_a_helper, POINT, "mismatch", "warning", "['x']", False),
    Fault("ranks", ranks, POINT, "zero", "warning", "['x']", True, words=("`argsort`",)),
    Fault("staircase", staircase, POINT, "zero", "warning", "['x']", True, words=("`floor`",)),
    Fault("beyond_the_table", beyond_the_table, POINT, "zero", "warning", "['x']", True),
    Fault("nearest_of_a_table", nearest_of_a_table, ({"x": F(0.6, 1.3), "y": Y},), "zero", "warning", "['x']", True),
    Fault("gumbel_by_hand", gumbel_by_hand, POINT, "draw", "warning", "['x']", True, words=("`argmax`",)),
    Fault("draw_in_a_wrapper", draw_in_a_wrapper, POINT, "draw", "warning", "['y']", True, words=("`geometric`",)),
    Fault(
        "not_a_number_made_one",
        not_a_number_made_one,
        ({"x": F(0, 1), "y": Y},),
        "nan",
        "error",
        "['x']",
        False,
        words=("double_where",),
    ),
    Fault("switched_by_a_leaf", switched_by_a_leaf, POINT, "zero", "warning", "['y']", True, words=("`>`",)),
    Fault("histogram", histogram, POINT, "zero", "warning", "['x']", True),
    Fault("forgotten_carry", forgotten_carry, POINT, "mismatch", "warning", "['y']", False),
    Fault(
        "callback_without_a_rule",
        callback_without_a_rule,
        POINT,
        "mismatch",
        "error",
        "",
        False,
        words=("`pure_callback`",),
    ),
    Fault("rule_with_a_constant_array", rule_with_a_constant_array, POINT, "mismatch", "error", "['x']", False),
    Fault(
        "entropy_of_masked_logits",
        entropy_of_masked_logits,
        ({"x": F(0, 1, -np.inf), "y": Y},),
        "nan",
        "error",
        "['x']",
        False,
        words=("double_where",),
        note="an element is infinite, and stays where it is",
    ),
    Fault(
        "clipped_ratio_at_one",
        clipped_ratio_at_one,
        ({"x": F(0, 0.3), "y": Y},),
        "mismatch",
        "error",
        "['x']",
        False,
        words=("is at a tie",),
    ),
    Fault(
        "logarithm_of_a_variance",
        logarithm_of_a_variance,
        ({"x": F(1000.2, 1000.1, 1000.4), "y": Y},),
        "nan",
        "error",
        "['y']",
        False,
        words=("In float64 it is finite",),
        also=("['x']",),
    ),
    Fault(
        "guarded_on_another_line",
        guarded_on_another_line,
        ({"angle": F(0, 0.4), "y": Y},),
        "mismatch",
        "error",
        "['angle']",
        False,
        x64=True,
    ),
    Fault(
        "identity_of_two_kinks",
        identity_of_two_kinks,
        ({"x": F(0, 0.4), "y": Y},),
        "mismatch",
        "error",
        "['x']",
        False,
        words=("`relu`", "is at a tie"),
        note="no rule is to blame, JAX's own least of all",
    ),
]
