"""Custom derivative rules that are wrong, and values that are not what was differentiated."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import partgrad as pg

from ._fault import Fault

T = np.linspace(0.2, 1.4, 5, dtype=np.float32)


class Decay(NamedTuple):
    amplitude: Any
    rate: Any


@pg.dataclass
class Line:
    slope: Any
    offset: Any


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array


def layers():
    """Three layers of a small network, from a fixed seed."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [Layer(0.5 * jax.random.normal(key, (3, 3)), jnp.array([0.1, -0.2, 0.3])) for key in keys]


# --- forward rules -----------------------------------------------------------------------------------------------


def forward_rule(function, slope):
    """A function of one array with this slope as its rule."""
    ruled = jax.custom_jvp(function)
    ruled.defjvp(lambda primals, tangents: (function(*primals), slope(*primals) * tangents[0]))
    return ruled


doubled_sine = forward_rule(jnp.sin, lambda x: 2 * jnp.cos(x))
negated_cosine = forward_rule(jnp.cos, lambda x: jnp.sin(x))
nearly_exp = forward_rule(jnp.exp, lambda x: 1.001 * jnp.exp(x))
barely_wrong_log = forward_rule(jnp.log, lambda x: (1 + 1e-6) / x)
# Right for all elements but the third.
square_but_one = forward_rule(lambda x: x**2, lambda x: (2 * x).at[2].mul(1.5))
# Wrong for large operands alone.
early_tanh = forward_rule(jnp.tanh, lambda x: jnp.where(x > 1.5, 0.5, 1 - jnp.tanh(x) ** 2))


@jax.custom_jvp
def product(x, y):
    return x * y


@product.defjvp
def _product_rule(primals, tangents):
    (x, y), (dx, _) = primals, tangents
    return x * y, y * dx


def jvp_factor(p):
    wave = p["amplitude"] * doubled_sine(p["frequency"] * T)  # fault: jvp_factor
    return jnp.sum(wave**2) + p["offset"]


@jax.jit
def _phase(p):
    return negated_cosine(p["phase"] + T)  # fault: jvp_sign_in_jit


def jvp_sign_in_jit(p):
    return jnp.sum(p["amplitude"] * _phase(p))


def jvp_slightly_wrong_in_scan(p):
    def step(state, t):
        state = state + 0.1 * nearly_exp(-p.rate * t)  # fault: jvp_slightly_wrong_in_scan
        return state, state

    return p.amplitude * jnp.sum(jax.lax.scan(step, jnp.float32(0), T)[1])


def jvp_missing_term(p):
    return jnp.sum(product(p.slope, p.offset) + p.slope)  # fault: jvp_missing_term


def jvp_one_element(p):
    return jnp.sum(jax.vmap(lambda row: square_but_one(row).sum())(p["table"])) + p["bias"]  # fault: jvp_one_element


def jvp_one_of_thousands(p):
    return jnp.sum(square_but_one(p["table"]) * p["scale"])  # fault: jvp_one_of_thousands


def jvp_barely_wrong(p):
    return p["y"] * jnp.sum(barely_wrong_log(p["x"]))  # fault: jvp_barely_wrong


def jvp_in_cond(p):
    grown = jax.lax.cond(
        p["x"] > 0,
        lambda x: nearly_exp(x),  # fault: jvp_in_cond
        lambda x: x,
        p["x"],
    )
    return grown * p["y"]


_rotated = jax.jit(doubled_sine)


def jvp_in_checkpoint(p):
    @jax.checkpoint
    def body(x):
        return jnp.sum(_rotated(x) * p["weight"])  # fault: jvp_in_checkpoint

    return body(p["x"])


_squashed = jax.jit(early_tanh)


def jvp_at_the_second_call(p):
    first = _squashed(p["small"])
    second = _squashed(p["large"])  # fault: jvp_at_the_second_call
    return first + second


def jvp_in_while(p):
    body = lambda state: (state[0] + 1, state[1] + doubled_sine(state[1] * p.rate))  # fault: jvp_in_while
    return jax.lax.fori_loop(0, 3, lambda _, state: body(state), (0, p.amplitude))[1]


# --- reverse rules -----------------------------------------------------------------------------------------------


def reverse_rule(function, backward):
    """A function with this backward pass, which gets the operands and the cotangent."""
    ruled = jax.custom_vjp(function)
    ruled.defvjp(lambda *operands: (function(*operands), operands), lambda operands, g: backward(*operands, g))
    return ruled


halved_square = reverse_rule(lambda x: x**2, lambda x, g: (x * g,))
transposed = reverse_rule(lambda a, x: a @ x, lambda a, x, g: (jnp.outer(g, x), a @ g))
without_bias = reverse_rule(lambda w, b, x: w @ x + b, lambda w, b, x, g: (jnp.outer(g, x), jnp.zeros_like(b), w.T @ g))
scaled_bias = reverse_rule(lambda w, b, x: w @ x + b, lambda w, b, x, g: (jnp.outer(g, x), 0.9 * g, w.T @ g))
# Wrong where the operand is large: in one element of a batch.
late_square = reverse_rule(lambda x: x**2, lambda x, g: (jnp.where(x > 2, 2.2, 2.0) * x * g,))
clipped_backward = reverse_rule(lambda x: x**2, lambda x, g: (jnp.clip(2 * x * g, -1, 1),))

from_output = jax.custom_vjp(jnp.exp)
from_output.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g * x,))

summed_rows = reverse_rule(
    lambda m: m / m.sum(axis=1, keepdims=True),
    lambda m, g: (g / m.sum(axis=1, keepdims=True),),
)


def vjp_factor(p):
    return jnp.sum(halved_square(p["x"]) * p["y"])  # fault: vjp_factor


def vjp_transposed(p):
    hidden = jnp.tanh(p["first"])
    return jnp.sum(transposed(p["matrix"], hidden) * T[:3])  # fault: vjp_transposed


def vjp_missing_cotangent(p):
    hidden = without_bias(p.weight, p.bias, jnp.array([1.0, 2.0, 3.0]))  # fault: vjp_missing_cotangent
    return jnp.sum(hidden**2)


def vjp_one_batch_element(p):
    def energy(x):
        return p["stiffness"] * late_square(x)  # fault: vjp_one_batch_element

    return jnp.sum(jax.vmap(energy)(p["positions"]))


def vjp_wrong_residual(p):
    return p[0] * jnp.sum(from_output(p[1]["x"]))  # fault: vjp_wrong_residual


def vjp_clipped_in_scan(p):
    def step(state, t):
        return state + clipped_backward(p.rate + t), None  # fault: vjp_clipped_in_scan

    return p.amplitude * jax.lax.scan(step, jnp.float32(0), T)[0]


def vjp_missing_term(p):
    share = summed_rows(jnp.exp(p["logits"]))  # fault: vjp_missing_term
    return jnp.sum(share * p["values"])


def one_leaf_of_many(model):
    x = jnp.array([1.0, -0.5, 0.25])
    for layer in model[:2]:
        x = jnp.tanh(layer.weight @ x + layer.bias)
    return jnp.sum(scaled_bias(model[2].weight, model[2].bias, x) ** 2)  # fault: one_leaf_of_many


def in_a_nested_function(p):
    def outer(x):
        def inner(y):
            return halved_square(y) + x  # fault: in_a_nested_function

        return jax.jit(inner)(p["inner"])

    return outer(p["outer"])


# --- values ------------------------------------------------------------------------------------------------------

shifted = jax.custom_jvp(jnp.sin)
shifted.defjvp(lambda primals, tangents: (jnp.sin(primals[0]) + 0.01, jnp.cos(primals[0]) * tangents[0]))

clipped = jax.custom_vjp(lambda x: x**2)
clipped.defvjp(lambda x: (jnp.clip(x**2, 0, 4), x), lambda x, g: (2 * x * g,))

rescaled = jax.custom_vjp(lambda x: x / jnp.linalg.norm(x))
rescaled.defvjp(
    lambda x: (x / jnp.linalg.norm(x, ord=1), x),
    lambda x, g: (jax.vjp(lambda x: x / jnp.linalg.norm(x), x)[1](g)[0],),
)


def wrong_primal_of_a_forward_rule(p):
    wave = shifted(p["x"])  # fault: wrong_primal_of_a_forward_rule
    return jnp.sum(wave * p["y"])


def clipped_value_of_a_reverse_rule(p):
    return jnp.sum(jax.vmap(clipped)(p["x"]))  # fault: clipped_value_of_a_reverse_rule


def wrong_primal_in_scan(p):
    def step(state, _):
        return rescaled(p["matrix"] @ state), None  # fault: wrong_primal_in_scan

    return jnp.sum(jax.lax.scan(step, p["start"], length=2)[0] ** 3)


def wrong_under_jit(p):
    x = p["x"]
    if isinstance(x, jax.core.Tracer):
        x = 1.25 * x
    return jnp.sum(x**2) * p["y"]


X = np.array([0.3, 0.7, 1.1], np.float32)
MATRIX = np.array([[1.0, 2.0, 0.5], [0.0, 1.0, -1.0], [0.3, 0.2, 2.0]], np.float32)

FAULTS = [
    Fault(
        "jvp_factor",
        jvp_factor,
        ({"amplitude": 1.5, "frequency": 0.8, "offset": 0.1},),
        kind="mismatch",
        severity="error",
        leaf="['frequency']",
        ok=False,
    ),
    Fault(
        "jvp_sign_in_jit",
        jvp_sign_in_jit,
        ({"amplitude": jnp.array(1.5), "phase": jnp.array(0.4)},),
        kind="mismatch",
        severity="error",
        leaf="['phase']",
        ok=False,
    ),
    Fault(
        "jvp_slightly_wrong_in_scan",
        jvp_slightly_wrong_in_scan,
        (Decay(2.0, 0.7),),
        kind="mismatch",
        severity="error",
        leaf="rate",
        ok=False,
        note="wrong by one in a thousand",
    ),
    Fault(
        "jvp_missing_term",
        jvp_missing_term,
        (Line(X, 2 * X),),
        kind="mismatch",
        severity="error",
        leaf="offset",
        ok=False,
    ),
    Fault(
        "jvp_one_element",
        jvp_one_element,
        ({"table": np.outer(X, [1.0, 2.0, 0.5, 1.5]).astype(np.float32), "bias": 0.5},),
        kind="mismatch",
        severity="error",
        leaf="['table']",
        ok=False,
    ),
    Fault(
        "jvp_one_of_thousands",
        jvp_one_of_thousands,
        ({"table": np.linspace(0.5, 1.5, 2000, dtype=np.float32), "scale": 0.5},),
        kind="mismatch",
        severity="error",
        leaf="['table']",
        ok=False,
    ),
    Fault(
        "jvp_barely_wrong",
        jvp_barely_wrong,
        ({"x": np.array([0.5, 2.0]), "y": np.array(1.5)},),
        kind="mismatch",
        severity="error",
        leaf="['x']",
        ok=False,
        x64=True,
        note="wrong by one in a million",
    ),
    Fault(
        "jvp_in_cond",
        jvp_in_cond,
        ({"x": jnp.array(0.5), "y": jnp.array(2.0)},),
        kind="mismatch",
        severity="error",
        leaf="['x']",
        ok=False,
    ),
    Fault(
        "jvp_in_checkpoint",
        jvp_in_checkpoint,
        ({"x": X, "weight": 2 * X},),
        kind="mismatch",
        severity="error",
        leaf="['x']",
        ok=False,
    ),
    Fault(
        "jvp_at_the_second_call",
        jvp_at_the_second_call,
        ({"small": jnp.array(0.5), "large": jnp.array(2.0)},),
        kind="mismatch",
        severity="error",
        leaf="['large']",
        ok=False,
        note="JAX traces the jitted rule once, at the line of the first call",
    ),
    Fault(
        "jvp_in_while",
        jvp_in_while,
        (Decay(0.5, 0.7),),
        kind="mismatch",
        severity="error",
        leaf="rate",
        ok=False,
        also=("amplitude",),
    ),
    Fault(
        "vjp_factor",
        vjp_factor,
        ({"x": X, "y": X},),
        kind="mismatch",
        severity="error",
        leaf="['x']",
        ok=False,
    ),
    Fault(
        "vjp_transposed",
        vjp_transposed,
        ({"first": X, "matrix": MATRIX},),
        kind="mismatch",
        severity="error",
        leaf="['first']",
        ok=False,
    ),
    Fault(
        "vjp_missing_cotangent",
        vjp_missing_cotangent,
        (Layer(jnp.asarray(MATRIX), jnp.asarray(X)),),
        kind="mismatch",
        severity="error",
        leaf="bias",
        ok=False,
    ),
    Fault(
        "vjp_one_batch_element",
        vjp_one_batch_element,
        ({"positions": np.array([0.5, 1.0, 3.0, 1.5], np.float32), "stiffness": 0.5},),
        kind="mismatch",
        severity="error",
        leaf="['positions']",
        ok=False,
    ),
    Fault(
        "vjp_wrong_residual",
        vjp_wrong_residual,
        ([2.0, {"x": X}],),
        kind="mismatch",
        severity="error",
        leaf="[1]['x']",
        ok=False,
    ),
    Fault(
        "vjp_clipped_in_scan",
        vjp_clipped_in_scan,
        (Decay(1.0, 0.2),),
        kind="mismatch",
        severity="error",
        leaf="rate",
        ok=False,
    ),
    Fault(
        "vjp_missing_term",
        vjp_missing_term,
        ({"logits": MATRIX, "values": MATRIX.T},),
        kind="mismatch",
        severity="error",
        leaf="['logits']",
        ok=False,
    ),
    Fault(
        "one_leaf_of_many",
        one_leaf_of_many,
        (layers(),),
        kind="mismatch",
        severity="error",
        leaf="[2].bias",
        ok=False,
    ),
    Fault(
        "in_a_nested_function",
        in_a_nested_function,
        ({"inner": jnp.array(3.0), "outer": jnp.array(2.0)},),
        kind="mismatch",
        severity="error",
        leaf="['inner']",
        ok=False,
    ),
    Fault(
        "wrong_primal_of_a_forward_rule",
        wrong_primal_of_a_forward_rule,
        ({"x": X, "y": X},),
        kind="value",
        severity="error",
        leaf="['x']",
        ok=False,
        note="the derivative by y is wrong as well: it is of the other value",
        also=("['y']",),
    ),
    Fault(
        "clipped_value_of_a_reverse_rule",
        clipped_value_of_a_reverse_rule,
        ({"x": np.array([1.0, 3.0], np.float32)},),
        kind="value",
        severity="error",
        leaf="['x']",
        ok=False,
    ),
    Fault(
        "wrong_primal_in_scan",
        wrong_primal_in_scan,
        ({"matrix": MATRIX, "start": X},),
        kind="value",
        severity="error",
        leaf="['matrix']",
        ok=False,
        also=("['start']",),
    ),
    Fault(
        "wrong_under_jit",
        wrong_under_jit,
        ({"x": X, "y": 2.0},),
        kind="value",
        severity="error",
        leaf="",
        ok=False,
        marker="",
        note="nothing in the program itself is at fault",
    ),
]
