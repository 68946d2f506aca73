# %% [markdown]
"""
Where gradients vanish: activations and cotangents of 24 layers
===============================================================

One layer of a transformer has a scale that is wrong by a factor of a thousand. The loss falls all the same, and the
activations that one usually logs look alike, since the layer is one of 24 that add to a stream. Its cotangents tell.
They come from the backward pass that trains: `pg.intermediate` reduces each to its size where it is made, so nothing
large is kept, and `pg.capture_intermediates` has the sizes of the values under the same names. The script fails if the
faulty layer does not stand out by the factor that was put in::

    python -m pip install -e ".[examples-all]" && python examples/cotangents.py [--out cotangents.png]
"""

# %%
import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from matplotlib.figure import Figure

import partgrad as pg

parser = argparse.ArgumentParser(description="Activations and cotangents of a transformer with a fault.")
parser.add_argument("--out", type=Path, default=Path("cotangents.png"), help="where the picture goes")
# A notebook has arguments of its own.
OUT = parser.parse_known_args()[0].out

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 24, 64, 4, 32, 8
FAULTY, FACTOR = 12, 1e-3

# %% [markdown]
# The transformer
# ---------------
#
# All layers have a leading axis, and a scan goes over them. Two values have names in it: what the heads make, and what
# the first product of the MLP makes. Each layer adds what it makes times its scale.


# %%
@pg.dataclass
class Layers:
    """The weights of all layers."""

    attention: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array = pg.field(nondiff=True)


def made(key: jax.Array, scale: jax.Array) -> Layers:
    """Layers with random weights."""
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return Layers(*(jax.random.normal(key, (LAYERS, *shape)) / shape[0] ** 0.5 for key, shape in pairs), scale)


def normalised(x: jax.Array) -> jax.Array:
    """Each token at size one."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(x: jax.Array, own: Layers) -> tuple[jax.Array, None]:
    """What a layer makes of (batch, length, width)."""
    query, key, value = jnp.split((normalised(x) @ own.attention).reshape(BATCH, LENGTH, HEADS, -1), 3, axis=-1)
    heads = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
    x = x + own.scale * checkpoint_name(heads, "heads") @ own.out
    hidden = checkpoint_name(normalised(x) @ own.up, "hidden")
    return x + own.scale * jax.nn.gelu(hidden) @ own.down, None


def loss(layers: Layers, x: jax.Array, target: jax.Array) -> jax.Array:
    """How far the last layer is from a target."""
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
    return jnp.mean((normalised(x) - target) ** 2)


# %% [markdown]
# One pass for the loss, the gradient, the values and the cotangents
# ------------------------------------------------------------------


# %%
def size(array: jax.Array) -> jax.Array:
    """The root of the mean square, of what a step of the scan has."""
    return jnp.sqrt(jnp.mean(array**2))


@jax.jit
def sizes(layers: Layers, x: jax.Array, target: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The sizes of the value and of the cotangent in each layer, by name."""
    wrt = {"weights": None, "inside": pg.intermediate("*", reduce=size)}
    looking = pg.value_and_grad(pg.capture_intermediates(loss, "*"), wrt=wrt, has_aux=True)
    (_, values), gradients = looking(layers, x, target)
    return jax.tree.map(lambda value, own: (jax.vmap(size)(value), own), values, gradients["inside"])


keys = jax.random.split(jax.random.key(0), 3)
x, target = (jax.random.normal(key, (BATCH, LENGTH, WIDTH)) for key in keys[:2])
right = jnp.full(LAYERS, (2 * LAYERS) ** -0.5)
found = {
    "right": sizes(made(keys[2], right), x, target),
    "with a fault": sizes(made(keys[2], right.at[FAULTY].multiply(FACTOR)), x, target),
}

# %% [markdown]
# The picture, and the numbers
# ----------------------------

# %%
figure = Figure(figsize=(9, 4), layout="constrained")
panels = dict(zip(("activations", "cotangents"), figure.subplots(1, 2), strict=True))
for which, own in found.items():
    for name, pair in own.items():
        for panel, numbers in zip(panels.values(), pair, strict=True):
            panel.semilogy(numbers, "o-" if which == "right" else "x--", label=f"{name}, {which}", ms=4)
for title, panel in panels.items():
    panel.set(title=title, xlabel="layer", ylabel="root of the mean square")
panels["cotangents"].legend(fontsize=8)
figure.savefig(OUT)

is_faulty = np.arange(LAYERS) == FAULTY
for name, (before, after) in ((name, (found["right"][name], found["with a fault"][name])) for name in found["right"]):
    values, cotangents = (np.asarray(after[i]) / np.asarray(before[i]) for i in range(2))
    checks = {
        f"{name}: cotangents of layer {FAULTY} are {cotangents[FAULTY]:.1e} of what they were": bool(
            0.5 * FACTOR < cotangents[FAULTY] < 2 * FACTOR
        ),
        f"{name}: those of the others are {cotangents[~is_faulty].min():.2f} times theirs or more": bool(
            cotangents[~is_faulty].min() > 0.5
        ),
        f"{name}: activations are between {values.min():.2f} and {values.max():.2f} of theirs": bool(
            values.min() > 0.5 and values.max() < 2
        ),
    }
    for said, is_right in checks.items():
        print(f"{said}  {'ok' if is_right else 'MISSED'}")
        assert is_right, said
