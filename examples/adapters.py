# %% [markdown]
"""
Low-rank adapters on a transformer
==================================

A character-level language model is trained on the text of Python's manual, which ships with the interpreter. Then each
of its linear maps gets an adapter, the rest is frozen, and the adapters learn the source code of the standard library.
The model is made of equinox modules, and one line freezes it: `pg.freeze(adapted, ~own)`. The script measures what that
saves (the bytes of the gradient and of the working memory, from XLA's analysis, the bytes of the optimiser's state, and
the time), and compares it with training everything, and with `optax.masked`, which computes every gradient and then
discards those that are not wanted. It fails if freezing does not save what it should. It also runs as a notebook: its
cells begin with `# %%`::

    python -m pip install -e ".[examples-all]" && python examples/adapters.py [--out adapters.png]
"""

# %%
import argparse
import dataclasses
import inspect
import statistics
import time
import typing
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import partgrad as pg

parser = argparse.ArgumentParser(description="Train a small transformer, freeze it, and train adapters.")
parser.add_argument("--out", type=Path, default=Path("adapters.png"), help="where the picture goes")
parser.add_argument(
    "--steps", type=int, default=150, help="steps of training of the whole transformer; adapters take half"
)
# A notebook has arguments of its own.
ARGUMENTS = parser.parse_known_args()[0]

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH, RANK = 128, 4, 2, 64, 16, 4


def characters(text: str) -> np.ndarray:
    """The text as numbers below 128."""
    return np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8).astype(np.int32)


MANUAL = characters("\n".join(topics.values()))
CODE = characters("".join(inspect.getsource(module) for module in (argparse, dataclasses, inspect, typing)))


# %% [markdown]
# A transformer, in equinox
# -------------------------


# %%
class Block(eqx.Module):
    """Causal attention, then a network of two layers, each with a residual connection."""

    mix: eqx.nn.Linear
    merge: eqx.nn.Linear
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.mix = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.merge = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.widen = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[2])
        self.narrow = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[3])
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        """For one text: an array of places by features."""
        mixed = jax.vmap(self.mix)(jax.vmap(self.norms[0])(x))
        query, key, value = jnp.split(mixed.reshape(len(x), HEADS, -1), 3, axis=-1)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + jax.vmap(self.merge)(attended.reshape(x.shape))
        return x + jax.vmap(self.narrow)(jax.nn.gelu(jax.vmap(self.widen)(jax.vmap(self.norms[1])(x))))


class Transformer(eqx.Module):
    """From characters to logits for the character that follows each of them."""

    embedding: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, BLOCKS + 3)
        self.embedding = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (128, WIDTH)))
        self.places = 0.1 * jax.random.normal(keys[1], (CONTEXT, WIDTH))
        self.blocks = [Block(key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, 128, key=keys[2])

    def __call__(self, text):
        """For one text."""
        x = jax.vmap(self.embedding)(text) + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class Adapter(eqx.Module):
    """A linear map with a low-rank correction, which starts at zero."""

    linear: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __init__(self, linear, key):
        self.linear = linear
        self.down = jax.random.normal(key, (RANK, linear.in_features)) / jnp.sqrt(linear.in_features)
        self.up = jnp.zeros((linear.out_features, RANK))

    def __call__(self, x):
        """For one place."""
        return self.linear(x) + self.up @ (self.down @ x)


def loss(model, texts):
    """The mean of -log p(next character), in nats."""
    logits = jax.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


# %% [markdown]
# Training
# --------
#
# The optimiser is given the part of the model that no mark holds. For a model without marks that is all of it.


# %%
def texts(source: np.ndarray, seed: int, count: int = BATCH) -> np.ndarray:
    """Random pieces of a text. A negative seed draws from the last tenth, which is kept for tests."""
    border = len(source) * 9 // 10
    low, high = (border, len(source) - CONTEXT - 1) if seed < 0 else (0, border - CONTEXT - 1)
    starts = np.random.default_rng(abs(seed)).integers(low, high, count)
    return source[starts[:, None] + np.arange(CONTEXT + 1)]


def stepper(optimiser: optax.GradientTransformation):
    """One step of training for any model, whatever is held in it."""

    @eqx.filter_jit
    def step(model, state, batch):
        value, gradient = pg.value_and_grad(loss)(model, batch)
        updates, state = optimiser.update(gradient, state, pg.partition(model)[0])
        return pg.apply_updates(model, updates), state, value

    return step


class Run(NamedTuple):
    """A trained model, and the loss (nats) at each step."""

    model: Transformer
    losses: list[float]


def adam(steps: int) -> optax.GradientTransformation:
    """Adam, with a learning rate that decays to zero in this many steps."""
    return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


def train(
    name: str, model: Transformer, source: np.ndarray, steps: int, optimiser: optax.GradientTransformation
) -> Run:
    """Train what is free in a model."""
    step, state, losses = stepper(optimiser), optimiser.init(pg.partition(model)[0]), []
    for number in range(1, steps + 1):
        model, state, value = step(model, state, texts(source, number))
        losses.append(float(value))
        if number % 5 == 0:
            print(f"\r{name}: step {number} of {steps}, {np.mean(losses[-10:]):.3f} nats", end="", flush=True)
    print()
    return Run(model, losses)


STEPS = ARGUMENTS.steps
transformer = train("the transformer, on the manual", Transformer(jax.random.key(0)), MANUAL, STEPS, adam(STEPS)).model

# %% [markdown]
# Adapters
# --------
#
# Every linear map in the blocks gets one, and everything else is frozen. Frozen parts are called as before: the model's
# code does not change. Without partgrad you would use `optax.masked`, which acts after the gradient.


# %%
def is_linear(node) -> bool:
    """Whether a node of the model is a linear map."""
    return isinstance(node, eqx.nn.Linear)


keys = iter(jax.random.split(jax.random.key(1), 4 * BLOCKS))
blocks = jax.tree.map(
    lambda node: Adapter(node, next(keys)) if is_linear(node) else node, transformer.blocks, is_leaf=is_linear
)
adapted = eqx.tree_at(lambda model: model.blocks, transformer, blocks)
own = pg.path("**.down") | pg.path("**.up")
frozen = pg.freeze(adapted, ~own)
print(pg.summary(frozen))

mask = pg.mask(adapted, own)
masked = optax.chain(
    optax.masked(adam(STEPS // 2), lambda _: mask),
    optax.masked(optax.set_to_zero(), lambda _: jax.tree.map(lambda trained: not trained, mask)),
)
WAYS = {
    "all trained": (adapted, adam(STEPS // 2)),
    "optax.masked": (adapted, masked),
    "frozen": (frozen, adam(STEPS // 2)),
}
runs = {name: train(f"{name}, on code", model, CODE, STEPS // 2, rule) for name, (model, rule) in WAYS.items()}

# %% [markdown]
# What it costs
# -------------


# %%
class Cost(NamedTuple):
    """The cost of one way to train: bytes of the gradient, of its working memory and of the state; seconds."""

    gradient: int
    working: int
    state: int
    seconds: list[float]


def state_size(model: Transformer, optimiser: optax.GradientTransformation) -> int:
    """The bytes of the state that an optimiser keeps."""
    state = jax.eval_shape(optimiser.init, pg.partition(model)[0])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


batch, costs = texts(CODE, 0), {}
# `optax.masked` computes the gradient of a model without marks.
whole, part = (jax.jit(pg.grad(loss)).lower(model, batch).compile() for model in (adapted, frozen))
programs = {"all trained": whole, "optax.masked": whole, "frozen": part}
for name, (model, optimiser) in WAYS.items():
    memory = programs[name].memory_analysis()
    size = memory.output_size_in_bytes, memory.temp_size_in_bytes, state_size(model, optimiser)
    costs[name] = Cost(*size, [])
for _ in range(10):  # interleaved, so that other load on the machine affects all alike
    for name, (model, _) in WAYS.items():
        start = time.perf_counter()
        jax.block_until_ready(programs[name](model, batch))
        costs[name].seconds.append(time.perf_counter() - start)

milliseconds = {name: 1e3 * statistics.median(of.seconds) for name, of in costs.items()}
test, evaluate = texts(CODE, -1, count=128), jax.jit(loss)
before = float(evaluate(transformer, test))
after = {name: float(evaluate(run.model, test)) for name, run in runs.items()}

print(f"\n{'':14}{'gradient':>11}{'working':>11}{'Adam state':>12}{'gradient':>12}{'loss on new code':>18}")
for name, of in costs.items():
    print(
        f"{name:14}{of.gradient / 1e6:8.2f} MB{of.working / 1e6:8.2f} MB{of.state / 1e6:9.2f} MB"
        f"{milliseconds[name]:9.1f} ms{after[name]:13.3f} nats"
    )
print(f"{'not adapted':60}{before:13.3f} nats")


# %%
def draw() -> Figure:
    """Draw the losses while the second task is learnt, and the costs as bars."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    panels = figure.subplot_mosaic("AAA;BCD", height_ratios=[3, 2])
    colors = dict(zip(WAYS, ("C1", "0.5", "C0"), strict=True))
    top, width = panels["A"], max(1, STEPS // 30)
    for name, run in runs.items():
        smooth = np.convolve(run.losses, np.ones(width) / width, mode="valid")
        style = {"linestyle": "--", "linewidth": 2.5} if name == "optax.masked" else {"linewidth": 1.2}
        top.plot(np.arange(len(smooth)) + width, smooth, color=colors[name], label=name, **style)
    top.axhline(before, color="0.7", linewidth=0.8, label="not adapted")
    top.set(xlabel="step", ylabel="loss on code (nats per character)")
    top.legend(frameon=False)
    for axis, title, values in (
        (panels["B"], "gradient (MB)", [of.gradient / 1e6 for of in costs.values()]),
        (panels["C"], "Adam state (MB)", [of.state / 1e6 for of in costs.values()]),
        (panels["D"], "time of a gradient (ms)", list(milliseconds.values())),
    ):
        bars = axis.bar(list(WAYS), values, color=list(colors.values()), width=0.6)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
        axis.set_title(title, loc="left", fontsize="medium")
        axis.margins(y=0.15)
        axis.tick_params(axis="x", labelsize="small", rotation=20)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


draw().savefig(ARGUMENTS.out, dpi=200)
print(f"\nPicture: {ARGUMENTS.out}\n")
sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(pg.partition(model)[0])) for name, (model, _) in WAYS.items()}
agree = {
    "frozen: a gradient of the adapters' numbers only": costs["frozen"].gradient < 1.1 * 4 * sizes["frozen"],
    "frozen: Adam's state is twice that": costs["frozen"].state == 8 * sizes["frozen"] + 8,
    "optax.masked: a gradient of everything": costs["optax.masked"].gradient >= 4 * sizes["all trained"],
    "frozen: less working memory than masked": costs["frozen"].working < costs["optax.masked"].working,
    "frozen and masked learn the same": np.allclose(runs["frozen"].losses, runs["optax.masked"].losses, rtol=1e-3),
    "adapters read code better than before": after["frozen"] < before - 0.02,
}
for what, ok in agree.items():
    print(f"{what:50}{'ok' if ok else 'MISSED':>8}")
if not all(agree.values()):
    raise SystemExit("A conclusion does not hold.")
