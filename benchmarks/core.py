"""Building, reading, taking apart, differentiating; import and compiled size."""

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flax import nnx

import partgrad as pg

from .models import CLASSES, NODES, RegisteredModel, loss, model
from .timing import Effort, Row, compared


def structure(effort: Effort) -> Iterator[Row]:
    """Building, reading, taking apart and putting together."""
    one = jnp.ones(())
    kernels = {name: kernel for name, (_, kernel) in CLASSES.items()}
    build = {name: lambda kernel=kernel: kernel(one, one, one) for name, kernel in kernels.items()}
    yield compared(effort, "construction", build, {"equinox": 0.1})
    marked = {
        "partgrad": lambda: kernels["partgrad"](pg.NonDiff(one), one, one),
        "equinox": build["equinox"],
        "paramax": lambda: kernels["equinox"](paramax.NonTrainable(one), one, one),
    }
    yield compared(effort, "construction, one field held", marked, {"equinox": 0.3})
    # Many reads a call, so that the call itself does not count.
    read = eval(f"lambda m: [{'m.variance,' * 200}]")
    built = {name: make() for name, make in build.items() if name != "flax.nnx"}
    reads = {name: lambda made=made: read(made) for name, made in built.items()}
    yield compared(effort, "attribute read, 200 times", reads, {"equinox": 0.25})
    models = {name: model(name) for name in CLASSES}
    flat = {name: jax.tree.flatten(made) for name, made in models.items()}
    apart = {name: lambda made=made: jax.tree.flatten(made) for name, made in models.items()}
    yield compared(effort, f"flatten, {NODES} nodes", apart, {"equinox": 0.4, "register_dataclass": 2.2})
    together = {name: lambda own=own: jax.tree.unflatten(own[1], own[0]) for name, own in flat.items()}
    yield compared(effort, f"unflatten, {NODES} nodes", together, {"equinox": 0.7, "register_dataclass": 0.55})
    calls = {name: lambda made=made: loss(made) for name, made in models.items()}
    limits = {"equinox": 0.75, "register_dataclass": 1.25}
    yield compared(effort, f"jit call, {NODES} nodes as argument", calls, limits)


def gradients(effort: Effort) -> Iterator[Row]:
    """Eager gradients of a jitted loss; partition and combine."""
    ours, others = model("partgrad"), {name: model(name) for name in CLASSES}
    part = lambda m: m.kernels[3].variance
    one_leaf, described = pg.grad(loss, wrt=part), pg.grad(loss, wrt=lambda k: k.variance)
    by_path = pg.grad(loss, wrt="kernels[3].variance")
    of_part = {
        "partgrad": lambda: one_leaf(ours),
        "closure by hand": _closure(others["register_dataclass"]),
        "flax.struct, by hand": _replaced(others["flax.struct"]),
        "equinox": _filtered(others["equinox"]),
        "flax.nnx": _of_state(others["flax.nnx"]),
        "paramax": _wrapped(others["equinox"]),
    }
    yield compared(effort, "eager gradient of one leaf", of_part, {"closure by hand": 1.05, "equinox": 0.45})
    anew = {
        "partgrad": lambda: pg.grad(loss, wrt=lambda m: m.kernels[3].variance)(ours),
        "closure by hand": of_part["closure by hand"],
        "equinox": of_part["equinox"],
    }
    yield compared(effort, "the same, pg.grad made every call", anew, {"closure by hand": 2.5})
    of_path = {"partgrad": lambda: by_path(ours), "closure by hand": of_part["closure by hand"]}
    yield compared(effort, "the same, by a path", of_path)
    spread = {"partgrad": lambda: described(ours), "equinox": _filtered(others["equinox"], everywhere=True)}
    yield compared(effort, "eager gradient of every variance", spread)
    full, plain, filter_grad, of_nnx = pg.grad(loss), jax.grad(loss), eqx.filter_grad(loss), nnx.grad(loss)
    of_all = {
        "partgrad": lambda: full(ours),
        "jax.grad": lambda: plain(ours),
        "equinox": lambda: filter_grad(others["equinox"]),
        "flax.struct": lambda: plain(others["flax.struct"]),
        "flax.nnx": lambda: of_nnx(others["flax.nnx"]),
    }
    yield compared(effort, "eager gradient of all leaves", of_all, {"jax.grad": 1.05, "equinox": 0.8})
    parts = {
        "partgrad": lambda: pg.combine(*pg.partition(ours)),
        "equinox": lambda: eqx.combine(*eqx.partition(others["equinox"], eqx.is_inexact_array)),
        "flax.nnx": lambda: nnx.merge(*nnx.split(others["flax.nnx"], nnx.Param, ...)),
    }
    yield compared(effort, "partition + combine", parts, {"equinox": 0.25})


def _closure(registered: Any) -> Callable[[], Any]:
    """As it is written by hand: a function of the leaf alone, around the rest."""

    def closure() -> Any:
        def of_variance(variance: jax.Array) -> jax.Array:
            kernels = list(registered.kernels)
            kernels[3] = dataclasses.replace(kernels[3], variance=variance)
            return loss(RegisteredModel(kernels))

        return jax.grad(of_variance)(registered.kernels[3].variance)

    return closure


def _replaced(model: Any) -> Callable[[], Any]:
    def closure() -> Any:
        def of_variance(variance: jax.Array) -> jax.Array:
            kernels = list(model.kernels)
            kernels[3] = kernels[3].replace(variance=variance)
            return loss(model.replace(kernels=kernels))

        return jax.grad(of_variance)(model.kernels[3].variance)

    return closure


def _filtered(model: Any, everywhere: bool = False) -> Callable[[], Any]:
    """With a mask by `tree_at`, `partition`, and `filter_grad` of the selected part."""
    where = (lambda m: [k.variance for k in m.kernels]) if everywhere else (lambda m: [m.kernels[3].variance])

    def filtered() -> Any:
        mask = jax.tree.map(lambda _: False, model)
        mask = eqx.tree_at(where, mask, replace_fn=lambda _: True)
        selected, rest = eqx.partition(model, mask)
        return eqx.filter_grad(lambda part: loss(eqx.combine(part, rest)))(selected)

    return filtered


def _of_state(model: Any) -> Callable[[], Any]:
    """With `DiffState`: the one parameter whose path matches."""
    chosen = lambda path, value: tuple(path)[:3] == ("kernels", 3, "variance")
    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, chosen))
    return lambda: gradient(model)


def _wrapped(model: Any) -> Callable[[], Any]:
    """With all other leaves in `NonTrainable`, which `unwrap` takes off in the loss; their gradients are zeros."""
    mask = eqx.tree_at(lambda m: m.kernels[3].variance, jax.tree.map(lambda _: False, model), True)
    wrapped = jax.tree.map(lambda leaf, free: leaf if free else paramax.NonTrainable(leaf), model, mask)
    gradient = eqx.filter_grad(lambda m: loss(paramax.unwrap(m)))
    return lambda: gradient(wrapped)


def training(effort: Effort) -> Iterator[Row]:
    """A compiled step of Adam on the last of eight layers: what is not selected costs neither gradient nor state."""
    width = 32 if effort.is_quick else 256
    layers = [jnp.full((width, width), 1.0 / width) for _ in range(8)]
    x = jnp.ones((32, width))
    adam = optax.adam(1e-3)

    def network(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def selected(layers: Any, state: Any) -> Any:
        part, rest = pg.partition(layers, lambda w: w[-1])
        gradient = jax.grad(lambda part: network(pg.combine(part, rest), x))(part)
        updates, state = adam.update(gradient, state)
        return pg.combine(optax.apply_updates(part, updates), rest), state

    labels = ["held"] * 7 + ["free"]
    several = optax.multi_transform({"free": adam, "held": optax.set_to_zero()}, labels)

    def masked(layers: Any, state: Any) -> Any:
        updates, state = several.update(jax.grad(network)(layers, x), state)
        return optax.apply_updates(layers, updates), state

    states = adam.init(pg.partition(layers, lambda w: w[-1])[0]), several.init(layers)
    steps = [
        jax.jit(step).lower(layers, state).compile() for step, state in zip((selected, masked), states, strict=True)
    ]
    run = lambda step, state: lambda: jax.block_until_ready(step(layers, state))
    functions = {name: run(*own) for name, *own in zip(("partgrad", "optax mask"), steps, states, strict=True)}
    yield compared(effort, "Adam step, seven of eight layers held", functions, {"optax mask": 1.0})

    def cost(gradient: Callable[..., Any]) -> float:
        return jax.jit(gradient).lower(layers, x).compile().cost_analysis()["flops"]

    by_hand = lambda weights, x: jax.grad(lambda last: network([*weights[:-1], last], x))(weights[-1])
    costs = {"partgrad": cost(pg.grad(network, wrt=lambda w: w[-1])), "split by hand": cost(by_hand)}
    yield Row("gradient of the last of eight layers", costs, {"split by hand": 1.0}, "FLOPs")


def coordinates(effort: Effort) -> Iterator[Row]:
    """A gradient in other coordinates: four maps on 20 leaves, beside the same written into the loss."""
    width = 8 if effort.is_quick else 64
    names = [f"p{i}" for i in range(20)]
    tree = {name: jnp.full((width, width), 0.3) for name in names}
    positive, interval = pg.coordinates.positive, pg.coordinates.interval
    table = {"p1": positive, "p5": interval(-0.5, 0.5), "p7": (jnp.exp, jnp.log), "p19": interval(0.0, 1.0)}
    maps = {"p1": jax.nn.softplus, "p5": lambda x: -0.5 + jax.nn.sigmoid(x), "p7": jnp.exp, "p19": jax.nn.sigmoid}

    def energy(tree: Any) -> Any:
        x = jnp.eye(width)
        for name in names:
            x = jnp.tanh(x @ tree[name])
        return x.sum()

    def by_hand(free: Any) -> Any:
        return energy({name: maps[name](leaf) if name in maps else leaf for name, leaf in free.items()})

    free, constrain = pg.unconstrain(tree, table)
    gradients = {"partgrad": jax.grad(lambda free: energy(constrain(free))), "by hand": jax.grad(by_hand)}
    flops = {name: jax.jit(own).lower(free).compile().cost_analysis()["flops"] for name, own in gradients.items()}
    yield Row("gradient by 20 leaves, four with a map", flops, {"by hand": 1.02}, "FLOPs")
    run = lambda own: lambda: jax.block_until_ready(own(free))
    eager = {name: run(own) for name, own in gradients.items()}
    yield compared(effort, "gradient by 20 leaves, four with a map, eager", eager, {"by hand": 1.1})


def imports(effort: Effort) -> Iterator[Row]:
    """Importing, in new interpreters that have imported JAX already."""
    code = "import jax, time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    names = ("partgrad", "equinox", "flax.nnx")
    times: dict[str, list[float]] = {name: [] for name in names}
    # As installed packages are imported: with their bytecode, which the first time may write.
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2 if effort.is_quick else 8):
        for name, values in times.items():
            command = [sys.executable, "-c", code.format(name)]
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
            values.append(float(out.stdout))
    costs = {name: statistics.median(values[1:]) for name, values in times.items()}
    yield Row("import, after JAX", costs, {"equinox": 0.35})
