# %% [markdown]
"""
Handwritten digits: freeze a trained body
=========================================

Train a network on one task, freeze its body, and learn a second task from few labels.

A network that can tell ten digits apart has learnt features that help with a second question: is the digit odd or
even? With few labels, freezing its body and training a new head beats training everything. Features of 0 to 4 say
little about 5 to 9, and there freezing loses, even to a network that starts from scratch. Ten seeds run at once
(`jax.vmap`), each with its own weights and its own choice of images; accuracies are means over the seeds, with their
spread. Marks on the model decide what is trained: the training function does not know what is frozen. The script
fails if a conclusion does not hold, that is, if a lead is less than two standard errors. It also runs as a notebook:
its cells begin with `# %%`::

    python -m pip install -e ".[examples-all]" && python examples/frozen_digits.py [--out frozen_digits.png]
"""

# %%
import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import partgrad as pg

parser = argparse.ArgumentParser(description="Digits: freeze a trained body, or train all of it again.")
parser.add_argument("--out", type=Path, default=Path("frozen_digits.png"), help="where the picture goes")
parser.add_argument("--seeds", type=int, default=10, help="how many networks")
# A notebook has arguments of its own.
ARGUMENTS = parser.parse_known_args()[0]
SEEDS = range(ARGUMENTS.seeds)

LABELS = jnp.array([10, 20, 50, 150])  # how many labels of the second task there are
PIXELS, DIGITS = load_digits(return_X_y=True)
PIXELS = jnp.asarray(PIXELS / 16, jnp.float32)


# %%
@pg.dataclass
class Layer:
    """A linear map."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply it to rows."""
        return x @ self.weight + self.bias


@pg.dataclass
class Network:
    """Layers followed by tanh, and a head without it."""

    body: tuple[Layer, ...]
    head: Layer

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of each image."""
        for layer in self.body:
            x = jnp.tanh(layer(x))
        return self.head(x)


def new_layer(key: jax.Array, inputs: int, outputs: int) -> Layer:
    """A layer with random weights that preserve the scale of its input."""
    return Layer(jax.random.normal(key, (inputs, outputs)) / jnp.sqrt(inputs), jnp.zeros(outputs))


def new_network(key: jax.Array, classes: int) -> Network:
    """A 64-64-32-classes network with random weights."""
    keys = jax.random.split(key, 3)
    return Network((new_layer(keys[0], 64, 64), new_layer(keys[1], 64, 32)), new_layer(keys[2], 32, classes))


# %% [markdown]
# Training
# --------
#
# `pg.partition` gives the optimiser whatever no mark holds, so a frozen layer has neither a gradient nor optimiser
# state. `None` in an update means "leave this alone". Nothing else in this function is about freezing.


# %%
def train(network: Network, classes: jax.Array, images: jax.Array, count: int, key: jax.Array, steps: int) -> Network:
    """Train whatever is not frozen on the first `count` of `images`; `classes` has the right answer for each image."""
    optimiser = optax.adam(3e-3)

    def loss(network: Network, batch: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(network(PIXELS[batch]), classes[batch]).mean()

    def step(carry, key):
        network, state = carry
        batch = images[jax.random.randint(key, (32,), 0, count)]
        updates, state = optimiser.update(pg.grad(loss)(network, batch), state)
        return (pg.apply_updates(network, updates), state), None

    start = network, optimiser.init(pg.partition(network)[0])
    return jax.lax.scan(step, start, jax.random.split(key, steps))[0][0]


def accuracy(network: Network, classes: jax.Array, images: jax.Array) -> jax.Array:
    """The share of images that are classified correctly."""
    return (network(PIXELS[images]).argmax(axis=-1) == classes[images]).mean()


# %% [markdown]
# Two transfers
# -------------
#
# Each seed splits the images differently: 900 for the first task, 400 to draw the few labels from, 497 for the test.


# %%
def split(seed: int, first: range, second: range) -> tuple[np.ndarray, ...]:
    """The images to train on, to draw the few labels from, and to test with, for the digits of the two tasks."""
    order = np.random.default_rng(seed).permutation(len(DIGITS))
    parts = zip(np.split(order, (900, 1300)), (first, second, second), (400, 150, 200), strict=True)
    return tuple(part[np.isin(DIGITS[part], digits)][:size] for part, digits, size in parts)


def transfer(first: range, second: range, classes: np.ndarray) -> dict[str, np.ndarray]:
    """Learn the first task, then the second in three ways: accuracy by seed and number of labels."""
    keys = jax.random.split(jax.random.key(0), len(SEEDS))
    images, few, test = (
        jnp.asarray(part) for part in zip(*(split(seed, first, second) for seed in SEEDS), strict=True)
    )
    outputs, classes = classes.max() + 1, jnp.asarray(classes)

    @jax.jit
    @jax.vmap
    def learn_first(key, images):
        return train(new_network(key, 10), jnp.asarray(DIGITS), images, len(images), key, steps=400)

    @jax.jit
    @jax.vmap
    def learn_second(key, network, few, test):
        results = jax.vmap(lambda count: accuracy(train(network, classes, few, count, key, steps=200), classes, test))
        return results(LABELS)

    trained = learn_first(keys, images)
    fresh = jax.vmap(lambda key: new_network(key, outputs))(jax.random.split(jax.random.key(1), len(SEEDS)))
    tuned = pg.replace(fresh, "body", trained.body)
    found = {}
    for name, start in {"body frozen": pg.freeze(tuned, "body"), "all trained": tuned, "from scratch": fresh}.items():
        found[name] = np.asarray(learn_second(keys, start, few, test))
        cells = zip(found[name].mean(axis=0), found[name].std(axis=0), strict=True)
        print(f"  {name:14}" + " ".join(f"{mean:6.1%} ± {spread:4.1%}" for mean, spread in cells), flush=True)
    return found


print(f"Accuracy with {', '.join(map(str, LABELS))} labels: mean and spread over {len(SEEDS)} seeds")
print("ten digits, then odd or even")
parity = transfer(range(10), range(10), DIGITS % 2)
print("0 to 4, then 5 to 9")
digits = transfer(range(5), range(5, 10), np.maximum(DIGITS - 5, 0))

# %% [markdown]
# Conclusions
# -----------


# %%
def lead(found: dict[str, np.ndarray], winner: str, loser: str, labels: int) -> tuple[float, float]:
    """How far one way is ahead of another: the mean over the seeds, and its standard error."""
    ahead = (found[winner] - found[loser])[:, LABELS.tolist().index(labels)]
    return float(ahead.mean()), float(ahead.std(ddof=1) / np.sqrt(len(ahead)))


def draw() -> Figure:
    """Draw mean accuracies against the number of labels, with the spread over the seeds as a band."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    for axis, found, title in zip(
        figure.subplots(1, 2, sharey=True),
        (parity, digits),
        ("ten digits → odd or even", "0 to 4 → 5 to 9"),
        strict=True,
    ):
        for name, color, marker in zip(found, ("C0", "C1", "0.4"), "os^", strict=True):
            mean, spread = found[name].mean(axis=0), found[name].std(axis=0)
            axis.plot(LABELS, mean, marker=marker, color=color, markersize=4, linewidth=1, label=name)
            axis.fill_between(LABELS, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
        axis.set_title(title, loc="left", fontsize="medium")
        axis.set(xscale="log", xticks=LABELS, xticklabels=LABELS.tolist(), xlabel="labels of the second task")
        axis.minorticks_off()
        axis.grid(axis="y", color="0.9")
    figure.axes[0].set_ylabel("accuracy on unseen images")
    figure.axes[1].legend(loc="lower right", frameon=False)
    return figure


draw().savefig(ARGUMENTS.out, dpi=200)
print(f"\nPicture: {ARGUMENTS.out}\n")
agree = []
for what, found, winner, loser, labels in (
    ("odd or even, 10 labels: freezing wins", parity, "body frozen", "all trained", 10),
    ("odd or even, 20 labels: freezing wins", parity, "body frozen", "all trained", 20),
    ("5 to 9, 20 labels: freezing loses", digits, "all trained", "body frozen", 20),
    ("5 to 9, 150 labels: to a fresh network too", digits, "from scratch", "body frozen", 150),
):
    mean, error = lead(found, winner, loser, labels)
    agree.append(mean > 2 * error)
    print(f"{what:44} by {mean:5.1%} ± {error:.1%}  {'ok' if agree[-1] else 'MISSED'}")
if not all(agree):
    raise SystemExit("A conclusion does not hold.")
