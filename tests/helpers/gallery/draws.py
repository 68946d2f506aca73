"""Random draws that depend on a differentiated leaf, and functions whose value differs from run to run."""

import jax
import jax.numpy as jnp
import numpy as np

from ._fault import Fault

F = lambda *values: jnp.array(values, jnp.float32)
S = jnp.float32
KEY = jax.random.key(0)


def bernoulli_draw(p, key):
    passed = jax.random.bernoulli(key, p["probability"], (8,))  # fault: bernoulli_draw
    return jnp.mean(jnp.where(passed, p["gain"], 0.0))


def categorical_draw(p, key):
    choice = jax.random.categorical(key, p["logits"])  # fault: categorical_draw
    return p["values"][choice]


def poisson_draw(p, key):
    counts = jax.random.poisson(key, p["rate"], (8,))  # fault: poisson_draw
    return jnp.mean(counts * p["gain"])


def compared_uniform(p, key):
    accepted = jax.random.uniform(key, (8,)) < p["probability"]  # fault: compared_uniform
    return jnp.mean(accepted * p["gain"])


def compared_uniform_in_scan(p, key):
    def step(state, key):
        jump = jax.random.uniform(key) < p["probability"]  # fault: compared_uniform_in_scan
        return state + jnp.where(jump, p["height"], 0.0), None

    return jax.lax.scan(step, S(0), jax.random.split(key, 5))[0]


def choice_draw(p, key):
    weights = jax.nn.softmax(p["logits"])
    picked = jax.random.choice(key, p["values"], (4,), p=weights)  # fault: choice_draw
    return jnp.sum(picked**2)


def rounded_draw(p, key):
    length = jnp.floor(p["rate"] * jax.random.exponential(key, (8,)))  # fault: rounded_draw
    return jnp.mean(length) * p["gain"]


def gamma_draw(p, key):
    sizes = jax.random.gamma(key, p["shape"], (8,))  # fault: gamma_draw
    return jnp.mean(sizes) * p["scale"]


def beta_draw_in_vmap(p, key):
    def share(key):
        return jax.random.beta(key, p["a"], p["b"])  # fault: beta_draw_in_vmap

    return jnp.mean(jax.vmap(share)(jax.random.split(key, 4)))


def uniform_draw(p, key):
    x = jax.random.uniform(key, (8,), maxval=p["width"])  # fault: uniform_draw
    return jnp.mean(x**2) + p["offset"]


def truncated_normal_draw(p, key):
    x = jax.random.truncated_normal(key, p["lower"], p["upper"], (8,))  # fault: truncated_normal_draw
    return jnp.mean(x**2)


def wald_draw(p, key):
    x = jax.random.wald(key, p["mean"], (8,))  # fault: wald_draw
    return jnp.mean(x) * p["gain"]


# --- values that differ from run to run --------------------------------------------------------------------------

_generator = np.random.default_rng(0)


def random_callback(p):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    noise = jax.pure_callback(lambda: np.float32(_generator.normal()), shape)  # fault: random_callback
    return p["x"] ** 2 + noise * p["sigma"]


def random_callback_in_scan(p):
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def step(state, _):
        noise = jax.pure_callback(lambda: np.float32(_generator.normal()), shape)  # fault: random_callback_in_scan
        return p["rate"] * state + noise, None

    return jax.lax.scan(step, p["start"], length=3)[0]


def random_in_python(p):
    return jnp.sum(p["x"] * _generator.normal(size=3)) + p["y"]


_calls = [0]


def counted_in_python(p):
    _calls[0] += 1
    return p["x"] ** 2 * _calls[0] + p["y"]


def shuffled_in_python(p):
    order = _generator.permutation(6)
    return jnp.vdot(p["weights"], p["x"][order])


ZERO = ("zero",)

FAULTS = [
    Fault(
        "bernoulli_draw",
        bernoulli_draw,
        ({"probability": S(0.4), "gain": S(2)}, KEY),
        "draw",
        "warning",
        "['probability']",
        True,
        words=ZERO,
    ),
    Fault(
        "categorical_draw",
        categorical_draw,
        ({"logits": F(0, 1, 0.5), "values": F(1, 2, 3)}, KEY),
        "draw",
        "warning",
        "['logits']",
        True,
        words=ZERO,
    ),
    Fault(
        "poisson_draw",
        poisson_draw,
        ({"rate": S(3), "gain": S(2)}, KEY),
        "draw",
        "warning",
        "['rate']",
        True,
        words=ZERO,
    ),
    Fault(
        "compared_uniform",
        compared_uniform,
        ({"probability": S(0.4), "gain": S(2)}, KEY),
        "draw",
        "warning",
        "['probability']",
        True,
        words=ZERO,
    ),
    Fault(
        "compared_uniform_in_scan",
        compared_uniform_in_scan,
        ({"probability": S(0.4), "height": S(2)}, KEY),
        "draw",
        "warning",
        "['probability']",
        True,
        words=ZERO,
    ),
    Fault(
        "choice_draw",
        choice_draw,
        ({"logits": F(0, 1, 0.5), "values": F(1, 2, 3)}, KEY),
        "draw",
        "warning",
        "['logits']",
        True,
        words=ZERO,
    ),
    Fault(
        "rounded_draw",
        rounded_draw,
        ({"rate": S(3), "gain": S(2)}, KEY),
        "draw",
        "warning",
        "['rate']",
        True,
        words=ZERO,
    ),
    Fault(
        "gamma_draw",
        gamma_draw,
        ({"shape": S(2.5), "scale": S(2)}, KEY),
        "draw",
        "info",
        "['shape']",
        True,
        words=("implicit",),
        note="a difference at a fixed key disagrees with the right gradient",
    ),
    Fault(
        "beta_draw_in_vmap",
        beta_draw_in_vmap,
        ({"a": S(2), "b": S(3)}, KEY),
        "draw",
        "info",
        "['a']",
        True,
        words=("implicit",),
    ),
    Fault(
        "uniform_draw",
        uniform_draw,
        ({"width": S(2), "offset": S(1)}, KEY),
        "draw",
        "info",
        "['width']",
        True,
        words=("pathwise",),
    ),
    Fault(
        "truncated_normal_draw",
        truncated_normal_draw,
        ({"lower": S(-0.5), "upper": S(1.5)}, KEY),
        "draw",
        "info",
        "['upper']",
        True,
        words=("pathwise",),
    ),
    Fault(
        "wald_draw",
        wald_draw,
        ({"mean": S(1.3), "gain": S(2)}, KEY),
        "draw",
        "warning",
        "['mean']",
        True,
        words=("biased",),
    ),
    Fault(
        "random_callback",
        random_callback,
        ({"x": S(2), "sigma": S(0.5)},),
        "nondeterminism",
        "error",
        "",
        False,
    ),
    Fault(
        "random_callback_in_scan",
        random_callback_in_scan,
        ({"start": S(2), "rate": S(0.5)},),
        "nondeterminism",
        "error",
        "",
        False,
    ),
    Fault(
        "random_in_python",
        random_in_python,
        ({"x": F(1, 2, 3), "y": S(1)},),
        "nondeterminism",
        "error",
        "",
        False,
        marker="",
    ),
    Fault(
        "counted_in_python",
        counted_in_python,
        ({"x": S(2), "y": S(1)},),
        "nondeterminism",
        "error",
        "",
        False,
        marker="",
    ),
    Fault(
        "shuffled_in_python",
        shuffled_in_python,
        ({"weights": jnp.arange(6.0), "x": jnp.arange(6.0) ** 2},),
        "nondeterminism",
        "error",
        "",
        False,
        marker="",
    ),
]
