"""Gradients that are NaN or infinite: on a path that was not taken, at a singular point, and where a value overflows."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

import partgrad as pg

from ._fault import Fault

F = lambda *values: jnp.array(values, jnp.float32)


@pg.dataclass
class Cosmology:
    density: Any
    curvature: Any
    distance: Any


class Sphere(eqx.Module):
    centre: jax.Array
    radius: jax.Array


# --- on a path that was not taken --------------------------------------------------------------------------------


def where_sqrt(p):
    root = jnp.sqrt(p["x"])  # fault: where_sqrt
    return p["scale"] * jnp.sum(jnp.where(p["x"] > 0, root, 0.0))


def comoving_distance(p):
    k = jnp.sqrt(jnp.abs(p.curvature))
    curved = jnp.sin(k * p.distance) / k  # fault: comoving_distance
    return p.density * jnp.where(p.curvature == 0, p.distance, curved)


def index_reciprocal(p):
    choices = jnp.array([0.0, 1.0 / p["x"]])  # fault: index_reciprocal
    return choices[0] + p["y"]


def maximum_of_norm(p):
    length = jnp.sqrt(p["x"] ** 2 + p["y"] ** 2)  # fault: maximum_of_norm
    return jnp.maximum(length, 1e-3) + p["z"]


@jax.jit
def _arctangent(x, y):
    angle = jnp.arctan2(y, x)  # fault: where_arctan2_in_jit
    return jnp.where(x**2 + y**2 > 0, angle, 0.0)


def where_arctan2_in_jit(p):
    return jnp.sum(_arctangent(p["position"], p["position"])) + p["offset"]


def overflow_not_taken(p):
    growth = jnp.exp(p["x"])  # fault: overflow_not_taken
    return jnp.sum(jnp.where(p["x"] < 50, growth, 1.0)) * p["y"]


def masked_scan(p):
    def step(state, x):
        log = jnp.log(x)  # fault: masked_scan
        return state + jnp.where(x > 0, log, 0.0), None

    return p["weight"] * jax.lax.scan(step, jnp.float32(0), p["x"])[0]


def masked_vmap(p):
    def entropy(x):
        share = x * jnp.log(x)  # fault: masked_vmap
        return jnp.where(x > 0, share, 0.0)

    return jnp.sum(jax.vmap(entropy)(p["shares"])) + jnp.sum(p["other"] ** 2)


def rotation(p):
    angle = jnp.sqrt(jnp.sum(p["vector"] ** 2))  # fault: rotation
    sinc = jnp.where(angle < 1e-6, 1.0, jnp.sin(angle) / angle)  # fault: rotation
    return jnp.sum(sinc * p["vector"] * p["point"])


def distances_by_index(p):
    difference = p["points"][:, None] - p["points"]
    distances = jnp.sqrt(jnp.sum(difference**2, axis=-1))  # fault: distances_by_index
    return p["weight"] * jnp.sum(distances[jnp.triu_indices(3, 1)])


def masked_row_of_attention(p, visible):
    scores = p["queries"] @ p["keys"].T + jnp.where(visible, 0.0, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)  # fault: masked_row_of_attention
    return jnp.sum(jnp.where(visible, weights, 0.0) ** 2)


def where_sqrt_in_float64(p):
    root = jnp.sqrt(p["x"])  # fault: where_sqrt_in_float64
    return p["scale"] * jnp.sum(jnp.where(p["x"] > 0, root, 0.0))


def cumulative_maximum(p):
    return p["y"] * jax.lax.cummax(jnp.sqrt(p["x"]))[-1]  # fault: cumulative_maximum


# --- truly singular ----------------------------------------------------------------------------------------------


def sqrt_at_zero(p):
    return p["scale"] * jnp.sum(jnp.sqrt(p["variance"]))  # fault: sqrt_at_zero


def norm_at_zero(model):
    offset = jnp.zeros(3) - model.centre
    return jnp.linalg.norm(offset) - model.radius  # fault: norm_at_zero


def root_of_square(p):
    return p["a"] * jnp.sqrt(p["x"] ** 2)  # fault: root_of_square


def squared_norm_at_zero(p):
    distance = jnp.linalg.norm(p["x"] - p["y"])  # fault: squared_norm_at_zero
    return jnp.exp(-(distance**2) / p["length"])


def nuclear_norm(p):
    singular = jnp.linalg.svd(p["matrix"], full_matrices=False)  # fault: nuclear_norm
    return jnp.linalg.norm((singular[0] * singular[1]) @ singular[2]) * p["scale"]


def norm_at_the_second_call(p):
    first = jnp.linalg.norm(p["first"])
    second = jnp.linalg.norm(p["second"])  # fault: norm_at_the_second_call
    return first + second


def pairwise_distances(p):
    difference = p["points"][:, None] - p["points"]
    distances = jnp.linalg.norm(difference, axis=-1)  # fault: pairwise_distances
    return jnp.sum(jnp.exp(-distances / p["length"]))


def root_in_cond(p):
    return p["y"] * jax.lax.cond(
        p["x"] >= 0,
        lambda x: jnp.sqrt(x),  # fault: root_in_cond
        lambda x: x,
        p["x"],
    )


def power_at_zero(p):
    return jnp.sum(p[0] ** p[1])  # fault: power_at_zero


def arccos_at_one(p):
    cosine = jnp.vdot(p["u"], p["v"])
    return p["w"] * jnp.arccos(cosine)  # fault: arccos_at_one


def arctan2_at_origin(p):
    return p["gain"] * jnp.arctan2(p["y"], p["x"])  # fault: arctan2_at_origin


def std_of_constant(p):
    return p["scale"] * jnp.std(p["values"])  # fault: std_of_constant


def cbrt_at_zero(p):
    return p["scale"] * jnp.cbrt(p["x"])  # fault: cbrt_at_zero


def logsumexp_of_nothing(p):
    total = logsumexp(p["logits"] + p["mask"])  # fault: logsumexp_of_nothing
    return jnp.exp(total) + jnp.sum(p["other"])


def second_derivative_of_norm(p):
    slope = jax.grad(lambda x: jnp.linalg.norm(x) * p["scale"])  # fault: second_derivative_of_norm
    return jnp.sum(slope(p["x"]))


def eigenvectors_of_identity(p):
    _, vectors = jnp.linalg.eigh(p["matrix"])  # fault: eigenvectors_of_identity
    return p["scale"] * vectors[0, 1] ** 3


# --- on the way in -----------------------------------------------------------------------------------------------


def clipped_arccos(p):
    inside = jnp.clip(p["cosine"], -1.0, 1.0)
    return jnp.arccos(inside) * p["scale"]  # fault: clipped_arccos


def sqrt_of_where(p):
    positive = jnp.where(p["x"] > 0, p["x"], 0.0)
    return jnp.sum(jnp.sqrt(positive)) + p["y"]  # fault: sqrt_of_where


# --- values that overflow, and rules -----------------------------------------------------------------------------


def overflow(p):
    growth = jnp.exp(p["x"])  # fault: overflow
    return jnp.log(1 + growth) * p["y"]


def log_of_zero_in_scan(p):
    def step(state, x):
        return state + jnp.log(x), None  # fault: log_of_zero_in_scan

    return jax.lax.scan(step, p["start"], p["x"])[0]


def division_by_zero(p):
    return jnp.sum(p["numerator"] / p["denominator"])  # fault: division_by_zero


_signed_root = jax.custom_jvp(lambda x: jnp.sign(x) * jnp.sqrt(jnp.abs(x)))


@_signed_root.defjvp
def _signed_root_rule(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _signed_root(x), dx / (2 * jnp.sqrt(jnp.abs(x)))


def nan_in_a_rule(p):
    return jnp.sum(_signed_root(p["x"])) * p["y"]  # fault: nan_in_a_rule


def _unit_backward(x, g):
    length = jnp.sqrt(jnp.sum(x**2))
    return ((g * length - x * jnp.vdot(x, g) / length) / length**2,)


_unit = jax.custom_vjp(lambda x: x / jnp.maximum(jnp.sqrt(jnp.sum(x**2)), 1e-6))
_unit.defvjp(lambda x: (_unit(x), x), _unit_backward)


def nan_in_a_reverse_rule(p):
    return jnp.vdot(jax.vmap(_unit)(p["x"]).sum(axis=0), p["y"])  # fault: nan_in_a_reverse_rule


SAFE = "safe."
DOUBLE = "double_where"

FAULTS = [
    Fault("where_sqrt", where_sqrt, ({"x": F(0, 4), "scale": 2.0},), "nan", "error", "['x']", False, words=(DOUBLE,)),
    Fault(
        "comoving_distance",
        comoving_distance,
        (Cosmology(0.3, 0.0, 2.0),),
        "nan",
        "error",
        "curvature",
        False,
        words=(DOUBLE,),
        also=("distance",),
    ),
    Fault(
        "index_reciprocal",
        index_reciprocal,
        ({"x": F(0)[0], "y": 1.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "maximum_of_norm",
        maximum_of_norm,
        ({"x": 0.0, "y": 0.0, "z": 1.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
        also=("['y']",),
    ),
    Fault(
        "where_arctan2_in_jit",
        where_arctan2_in_jit,
        ({"position": F(3, 0, -5), "offset": 1.0},),
        "nan",
        "error",
        "['position']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "overflow_not_taken",
        overflow_not_taken,
        ({"x": F(1, 1000), "y": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "masked_scan",
        masked_scan,
        ({"x": F(1, 2, 0, 3), "weight": 0.5},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE, "iteration 2"),
    ),
    Fault(
        "masked_vmap",
        masked_vmap,
        ({"shares": F(0.5, 0, 0.5), "other": F(1, 2)},),
        "nan",
        "error",
        "['shares']",
        False,
        words=(DOUBLE, "[1]"),
        note="the log of 0 and the product are on one line",
    ),
    Fault(
        "rotation",
        rotation,
        ({"vector": F(0, 0, 0), "point": F(1, 2, 3)},),
        "nan",
        "error",
        "['vector']",
        False,
        words=(DOUBLE,),
        note="the division makes NaN of the cotangent before the root does",
    ),
    Fault(
        "distances_by_index",
        distances_by_index,
        ({"points": F(0, 0, 3, 4, 1, 2).reshape(3, 2), "weight": 2.0},),
        "nan",
        "error",
        "['points']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "masked_row_of_attention",
        masked_row_of_attention,
        (
            {"queries": F(1, 2, 3, 4).reshape(2, 2), "keys": F(1, 0, 2, 1).reshape(2, 2)},
            np.array([[True, True], [False, False]]),
        ),
        "nan",
        "error",
        "['queries']",
        False,
        words=(DOUBLE,),
        also=("['keys']",),
    ),
    Fault(
        "where_sqrt_in_float64",
        where_sqrt_in_float64,
        ({"x": np.array([0.0, 4.0]), "scale": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
        x64=True,
    ),
    Fault(
        "cumulative_maximum",
        cumulative_maximum,
        ({"x": F(0, 4), "y": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "sqrt_at_zero",
        sqrt_at_zero,
        ({"variance": F(1, 0), "scale": 2.0},),
        "nan",
        "error",
        "['variance']",
        False,
        words=("safe.sqrt",),
    ),
    Fault(
        "norm_at_zero",
        norm_at_zero,
        (Sphere(jnp.zeros(3), jnp.array(1.0)),),
        "nan",
        "error",
        "centre",
        False,
        words=("safe.norm",),
    ),
    Fault(
        "root_of_square",
        root_of_square,
        ({"a": 2.0, "x": 0.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.sqrt",),
    ),
    Fault(
        "squared_norm_at_zero",
        squared_norm_at_zero,
        ({"x": F(1, 2), "y": F(1, 2), "length": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.norm",),
        also=("['y']",),
        note="smooth as a whole",
    ),
    Fault(
        "nuclear_norm",
        nuclear_norm,
        ({"matrix": jnp.diag(F(1, 1, 2)), "scale": 2.0},),
        "nan",
        "error",
        "['matrix']",
        False,
        note="equal singular values: smooth as a whole, and no rule makes it so",
    ),
    Fault(
        "norm_at_the_second_call",
        norm_at_the_second_call,
        ({"first": F(3, 4), "second": F(0, 0)},),
        "nan",
        "error",
        "['second']",
        False,
        words=("safe.norm",),
        note="JAX traces the jitted function once, at the line of the first call",
    ),
    Fault(
        "pairwise_distances",
        pairwise_distances,
        ({"points": np.eye(3, 2, dtype=np.float32), "length": 2.0},),
        "nan",
        "error",
        "['points']",
        False,
        words=("safe.norm",),
    ),
    Fault(
        "root_in_cond",
        root_in_cond,
        ({"x": F(0)[0], "y": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.sqrt",),
    ),
    Fault(
        "power_at_zero",
        power_at_zero,
        ((F(0, 2), 0.5),),
        "nan",
        "error",
        "[0]",
        False,
        words=("safe.power",),
    ),
    Fault(
        "arccos_at_one",
        arccos_at_one,
        ({"u": F(1, 0), "v": F(1, 0), "w": 2.0},),
        "nan",
        "error",
        "['u']",
        False,
        words=("safe.arccos",),
        also=("['v']",),
    ),
    Fault(
        "arctan2_at_origin",
        arctan2_at_origin,
        ({"x": 0.0, "y": 0.0, "gain": 1.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.arctan2",),
        also=("['y']",),
    ),
    Fault(
        "std_of_constant",
        std_of_constant,
        ({"values": F(1, 1, 1), "scale": 2.0},),
        "nan",
        "error",
        "['values']",
        False,
        words=("safe.std",),
    ),
    Fault(
        "cbrt_at_zero",
        cbrt_at_zero,
        ({"x": 0.0, "scale": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.cbrt",),
    ),
    Fault(
        "logsumexp_of_nothing",
        logsumexp_of_nothing,
        ({"logits": F(1, 2), "mask": F(-np.inf, -np.inf), "other": F(1, 2)},),
        "nan",
        "error",
        "['logits']",
        False,
        words=("safe.logsumexp",),
        also=("['mask']",),
    ),
    Fault(
        "second_derivative_of_norm",
        second_derivative_of_norm,
        ({"x": F(0, 0), "scale": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        also=("['scale']",),
    ),
    Fault(
        "eigenvectors_of_identity",
        eigenvectors_of_identity,
        ({"matrix": np.eye(2, dtype=np.float32), "scale": 2.0},),
        "nan",
        "error",
        "['matrix']",
        False,
    ),
    Fault(
        "clipped_arccos",
        clipped_arccos,
        ({"cosine": 10.0, "scale": 2.0},),
        "nan",
        "error",
        "['cosine']",
        False,
        words=(DOUBLE,),
    ),
    Fault(
        "sqrt_of_where",
        sqrt_of_where,
        ({"x": F(-1, 4), "y": 2.0},),
        "nan",
        "error",
        "['x']",
        False,
        words=(DOUBLE,),
        note="reverse mode is right, forward mode is NaN",
    ),
    Fault("overflow", overflow, ({"x": 1000.0, "y": 2.0},), "nan", "error", "['x']", False, also=("['y']",)),
    Fault(
        "log_of_zero_in_scan",
        log_of_zero_in_scan,
        ({"start": 1.0, "x": F(1, 2, 3, 0)},),
        "nan",
        "error",
        "['x']",
        False,
        words=("safe.log", "iteration 3"),
    ),
    Fault(
        "division_by_zero",
        division_by_zero,
        ({"numerator": F(1, 1), "denominator": F(0, 2)},),
        "nan",
        "error",
        "['denominator']",
        False,
        words=("safe.divide",),
        also=("['numerator']",),
    ),
    Fault("nan_in_a_rule", nan_in_a_rule, ({"x": F(0, 4), "y": 2.0},), "nan", "error", "['x']", False),
    Fault(
        "nan_in_a_reverse_rule",
        nan_in_a_reverse_rule,
        ({"x": F(3, 4, 0, 0).reshape(2, 2), "y": F(1, 2)},),
        "nan",
        "error",
        "['x']",
        False,
    ),
]
