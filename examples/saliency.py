# %% [markdown]
"""
What a network looks at: derivatives by intermediate values
===========================================================

A small convolutional network learns to read digits. Which part of an image decides what it reads? The derivative of
the winning logit by a feature map, a value inside the network, says where (Selvaraju et al. 2017, "Grad-CAM"). The
network gives its feature maps a name, and `pg.intermediate` selects them: neither the model nor the training knows of
the question. Then the answer is tested, by cutting what is called important out of the network with `pg.intervene`:
the script fails if that does not lower the logit more than cutting at random::

    python -m pip install -e ".[examples-all]" && python examples/saliency.py [--out saliency.png]
"""

# %%
import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import partgrad as pg

parser = argparse.ArgumentParser(description="Where a network looks, by derivatives inside it.")
parser.add_argument("--out", type=Path, default=Path("saliency.png"), help="where the picture goes")
parser.add_argument("--steps", type=int, default=300, help="steps of training")
# A notebook has arguments of its own.
ARGUMENTS = parser.parse_known_args()[0]

PIXELS, DIGITS = load_digits(return_X_y=True)
PIXELS, DIGITS = jnp.asarray(PIXELS.reshape(-1, 1, 8, 8) / 16, jnp.float32), jnp.asarray(DIGITS)
TRAINING = 1500

# %% [markdown]
# The network, in equinox
# -----------------------
#
# `checkpoint_name` is JAX's own. It changes nothing, and compiles to nothing.


# %%
class Reader(eqx.Module):
    """Two convolutions, the second of which is named, and a head."""

    convolutions: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        """A network with random weights."""
        keys = jax.random.split(key, 3)
        self.convolutions = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[1]),
        ]
        self.head = eqx.nn.Linear(16 * 64, 10, key=keys[2])

    def __call__(self, image: jax.Array) -> jax.Array:
        """The logits of one image of shape (1, 8, 8)."""
        for convolution in self.convolutions:
            image = jax.nn.relu(convolution(image))
        features = checkpoint_name(image, "features")
        return self.head(features.ravel())


def loss(model: Reader, images: jax.Array, digits: jax.Array) -> jax.Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), digits).mean()


@eqx.filter_jit
def train(model: Reader, steps: int) -> Reader:
    """Train with Adam on batches of 128."""
    adam = optax.adam(3e-3)

    def step(state: tuple, key: jax.Array) -> tuple[tuple, None]:
        part, memory = state
        batch = jax.random.choice(key, TRAINING, (128,))
        gradient = pg.grad(lambda part: loss(pg.combine(part, rest), PIXELS[batch], DIGITS[batch]))(part)
        updates, memory = adam.update(gradient, memory)
        return (pg.apply_updates(part, updates), memory), None

    part, rest = pg.partition(model)
    (part, _), _ = jax.lax.scan(step, (part, adam.init(part)), jax.random.split(jax.random.key(1), steps))
    return pg.combine(part, rest)


model = train(Reader(jax.random.key(0)), ARGUMENTS.steps)
accuracy = float((jax.vmap(model)(PIXELS[TRAINING:]).argmax(axis=1) == DIGITS[TRAINING:]).mean())
print(f"accuracy on {len(DIGITS) - TRAINING} unseen images: {accuracy:.1%}")

# %% [markdown]
# Where it looks
# --------------
#
# The derivative of the winning logit by each feature, times the feature, is to first order what cutting the feature
# would take from the logit.


# %%
def winning(model: Reader, image: jax.Array) -> jax.Array:
    """The highest logit."""
    return model(image).max()


@jax.jit
def contributions(image: jax.Array) -> jax.Array:
    """How much each of the features, of shape (16, 8, 8), contributes to the winning logit."""
    _, values = pg.capture_intermediates(winning, "features")(model, image)
    return values["features"] * pg.grad(winning, wrt=pg.intermediate("features"))(model, image)


test = PIXELS[TRAINING:]
maps = jax.vmap(contributions)(test)

# %% [markdown]
# Cut it out
# ----------
#
# `pg.intervene` puts another value in the place of a named one: here, zero where the map is highest, or anywhere.


# %%
@jax.jit
@jax.vmap
def without(image: jax.Array, kept: jax.Array) -> jax.Array:
    """The winning logit when only the features at some places, of shape (8, 8), are kept."""
    digit = model(image).argmax()
    return pg.intervene(model, {"features": lambda features: features * kept})(image)[digit]


COUNT = 8
ranks = maps.sum(axis=1).reshape(len(test), 64).argsort(axis=1).argsort(axis=1).reshape(len(test), 8, 8)
at_random = jax.vmap(lambda key: jax.random.permutation(key, 64).reshape(8, 8))(
    jax.random.split(jax.random.key(2), len(test))
)
before = jax.vmap(lambda image: winning(model, image))(test)
agree = []
print(f"\nThe winning logit is {before.mean():.1f} on average; without {COUNT} of the 64 places it falls by")
falls = {
    name: before - without(test, order < 64 - COUNT) for name, order in (("salient", ranks), ("random", at_random))
}
for name, fall in falls.items():
    print(f"  {fall.mean():5.2f}  {name} places")
agree = bool((falls["salient"] > falls["random"]).mean() > 0.95)
print(
    f"cutting salient places costs more, in {(falls['salient'] > falls['random']).mean():.1%} of the images", end="  "
)
print("ok" if agree else "MISSED")


# %%
def draw(count: int = 8) -> Figure:
    """Draw some images, and over each where the network looks."""
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    for column, (axis, below) in enumerate(figure.subplots(2, count).T):
        axis.imshow(test[column, 0], cmap="gray_r")
        below.imshow(test[column, 0], cmap="gray_r", alpha=0.35)
        below.imshow(np.maximum(maps[column].sum(axis=0), 0), cmap="Reds", alpha=0.7, interpolation="bilinear")
        axis.set_title(f"reads {int(model(test[column]).argmax())}", fontsize="small")
        for each in (axis, below):
            each.set(xticks=[], yticks=[])
    return figure


draw().savefig(ARGUMENTS.out, dpi=200)
print(f"\nPicture: {ARGUMENTS.out}")
if not agree:
    raise SystemExit("A conclusion does not hold.")
