"""Time partgrad beside its peers, in one process, as ratios of medians.

Run it with ``python benchmarks/core.py``; it needs equinox. What is compared is timed in turns, so a machine that slows
down slows down both. The last column is the most that the project allows itself.
"""

import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import partgrad as pg

NODES = 20
ROUNDS = 15
SECONDS = 0.02


@pg.dataclass
class Kernel:
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


@pg.dataclass
class Model:
    kernels: list[Kernel]


class EquinoxKernel(eqx.Module):
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


class EquinoxModel(eqx.Module):
    kernels: list[EquinoxKernel]


@dataclass(frozen=True)
class RegisteredKernel:
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


@dataclass(frozen=True)
class RegisteredModel:
    kernels: list[RegisteredKernel]


jax.tree_util.register_dataclass(RegisteredKernel, ["variance", "lengthscale", "noise"], [])
jax.tree_util.register_dataclass(RegisteredModel, ["kernels"], [])


@jax.jit
def loss(model: Any) -> jax.Array:
    return sum(k.variance * k.lengthscale**2 + k.noise for k in model.kernels)


def median_times(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds a call of each function, timed in turns."""
    numbers = {}
    for name, function in functions.items():
        function()
        once = max(timeit.timeit(function, number=3) / 3, 1e-8)
        numbers[name] = max(1, int(SECONDS / once))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            times[name].append(timeit.timeit(function, number=numbers[name]) / numbers[name])
    return {name: statistics.median(values) for name, values in times.items()}


def report(title: str, functions: dict[str, Callable[[], Any]], limits: dict[str, float]) -> None:
    """Print the ratio of the first function to each of the others."""
    times = median_times(functions)
    ours = next(iter(functions))
    for peer, limit in limits.items():
        line(title, f"{times[ours] * 1e6:10.2f} us", peer, times[ours] / times[peer], limit)


def line(title: str, cost: str, peer: str, ratio: float, limit: float) -> None:
    """Print one comparison."""
    verdict = "" if ratio <= limit else "  over"
    print(f"{title:34} {cost}  / {peer:22} {ratio:6.3f}   (at most {limit}){verdict}", flush=True)


def structure() -> None:
    """Time building, reading, taking apart and putting together."""
    one = jnp.ones(())
    ours, equinox = Kernel(one, one, one), EquinoxKernel(one, one, one)
    report(
        "construction",
        {"partgrad": lambda: Kernel(one, one, one), "equinox": lambda: EquinoxKernel(one, one, one)},
        {"equinox": 0.1},
    )
    report(
        "construction, inline NonDiff",
        {"partgrad": lambda: Kernel(pg.NonDiff(one), one, one), "equinox": lambda: EquinoxKernel(one, one, one)},
        {"equinox": 0.3},
    )
    # Many reads a call, so that the call itself does not count.
    read = {name: f"{name}.variance;" * 200 for name in ("ours", "equinox")}
    compiled = {name: eval(f"lambda ours, equinox: [{code.replace(';', ',')}]") for name, code in read.items()}
    report(
        "attribute read (x200)",
        {"partgrad": lambda: compiled["ours"](ours, equinox), "equinox": lambda: compiled["equinox"](ours, equinox)},
        {"equinox": 0.25},
    )
    models = {"partgrad": our_model(), "equinox": equinox_model(), "register_dataclass": registered_model()}
    flat = {name: jax.tree.flatten(model) for name, model in models.items()}
    report(
        f"flatten, {NODES} nodes",
        {name: lambda model=model: jax.tree.flatten(model) for name, model in models.items()},
        {"equinox": 0.4, "register_dataclass": 2.2},
    )
    report(
        f"unflatten, {NODES} nodes",
        {name: lambda flat=f: jax.tree.unflatten(flat[1], flat[0]) for name, f in flat.items()},
        {"equinox": 0.7, "register_dataclass": 0.55},
    )
    report(
        f"jit call, {NODES} nodes as argument",
        {name: lambda model=model: loss(model) for name, model in models.items()},
        {"equinox": 0.75, "register_dataclass": 1.25},
    )


def our_model() -> Model:
    return Model([Kernel(jnp.ones(()), jnp.ones(()), jnp.ones(())) for _ in range(NODES - 1)])


def equinox_model() -> EquinoxModel:
    return EquinoxModel([EquinoxKernel(jnp.ones(()), jnp.ones(()), jnp.ones(())) for _ in range(NODES - 1)])


def registered_model() -> RegisteredModel:
    return RegisteredModel([RegisteredKernel(jnp.ones(()), jnp.ones(()), jnp.ones(())) for _ in range(NODES - 1)])


def gradients() -> None:
    """Time eager gradients of a jitted loss."""
    ours, equinox, registered = our_model(), equinox_model(), registered_model()

    def closure() -> Any:
        def of_variance(variance: jax.Array) -> jax.Array:
            kernels = list(registered.kernels)
            kernels[3] = replace(kernels[3], variance=variance)
            return loss(RegisteredModel(kernels))

        return jax.grad(of_variance)(registered.kernels[3].variance)

    def filtered() -> Any:
        spec = jax.tree.map(lambda _: False, equinox)
        spec = eqx.tree_at(lambda m: m.kernels[3].variance, spec, True)
        selected, rest = eqx.partition(equinox, spec)
        return eqx.filter_grad(lambda part: loss(eqx.combine(part, rest)))(selected)

    one_leaf = pg.grad(loss, wrt=lambda m: m.kernels[3].variance)
    report(
        "eager gradient of one leaf",
        {"partgrad": lambda: one_leaf(ours), "closure by hand": closure, "equinox": filtered},
        {"closure by hand": 1.05, "equinox": 0.45},
    )
    report(
        "the same, pg.grad made every call",
        {"partgrad": lambda: pg.grad(loss, wrt=lambda m: m.kernels[3].variance)(ours), "closure by hand": closure},
        {"closure by hand": 2.5},
    )
    full, plain, filter_grad = pg.grad(loss), jax.grad(loss), eqx.filter_grad(loss)
    report(
        "eager gradient of all leaves",
        {"partgrad": lambda: full(ours), "jax.grad": lambda: plain(ours), "filter_grad": lambda: filter_grad(equinox)},
        {"jax.grad": 1.05, "filter_grad": 0.8},
    )
    report(
        "partition + combine",
        {
            "partgrad": lambda: pg.combine(*pg.partition(ours)),
            "equinox": lambda: eqx.combine(*eqx.partition(equinox, eqx.is_inexact_array)),
        },
        {"equinox": 0.25},
    )


def flops() -> None:
    """Compare the compiled cost of the last of eight layers with a split by hand."""
    layers = [jnp.ones((64, 64)) for _ in range(8)]
    x = jnp.ones((32, 64))

    def network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.sum()

    def cost(function: Callable[..., Any]) -> float:
        return jax.jit(function).lower(layers, x).compile().cost_analysis()["flops"]

    ours = cost(pg.grad(network, wrt=lambda weights: weights[-1]))
    by_hand = cost(lambda weights, x: jax.grad(lambda last: network([*weights[:-1], last], x))(weights[-1]))
    line("compiled FLOPs, last of 8 layers", f"{ours:10.0f}   ", "split by hand", ours / by_hand, 1.0)


def imports() -> None:
    """Compare import times, in new interpreters that have imported JAX already."""
    code = "import jax, time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    times: dict[str, list[float]] = {"partgrad": [], "equinox": []}
    for _ in range(7):
        for name, values in times.items():
            out = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True)
            values.append(float(out.stdout))
    ours, theirs = (statistics.median(values) for values in times.values())
    line("import, after JAX", f"{ours * 1e6:10.0f} us", "equinox", ours / theirs, 0.35)


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}, equinox {eqx.__version__}")
    structure()
    gradients()
    flops()
    imports()
