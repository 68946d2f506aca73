"""The gradient of some of 32 layers that are stacked for a scan, beside the scan split by hand.

``python -m benchmarks stacked_layers`` compiles each program once and runs none. Operations and bytes are counted with
the body of a loop as often as it runs (see `executed`). Each is a ratio to the scan split by hand: 1.02 is the bound
for operations and bytes, 1.1 for temporaries. With equinox and nnx, what a user writes is the gradient of all layers
under a mask, or `stop_gradient` on what is held; the last line is the gradient of all layers, sliced afterwards.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import partgrad as pg

from .executed import Executed, executed

BOUNDS = Executed(1.02, 1.02, 1.1)
LAYERS = 32
Layers = dict[str, Any]
SELECTED = {"the last 2 of 32": slice(30, 32), "the last 16 of 32": slice(16, 32), "the first 2 of 32": slice(0, 2)}


def _step(x: Any, layer: Layers) -> tuple[Any, None]:
    return x + jnp.tanh(x @ layer["w"] + layer["b"]), None


def network(model: Any, x: Any, step: Callable[..., Any] = _step) -> Any:
    """A network of residual layers."""
    return jnp.mean(lax.scan(step, x, model["layers"])[0] ** 2)


def model_of(width: int) -> tuple[Any, Any]:
    """Its parameters, and an input."""
    key = jax.random.key(0)
    layers = {"w": jax.random.normal(key, (LAYERS, width, width)) / width**0.5, "b": jnp.zeros((LAYERS, width))}
    return {"layers": layers}, jax.random.normal(key, (64, width))


def split_by_hand(own: slice, step: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of some layers, from a network that is written for these layers."""

    def split(selected: Layers, model: Any, x: Any) -> Any:
        before = jax.tree.map(lambda leaf: leaf[: own.start], model["layers"])
        after = jax.tree.map(lambda leaf: leaf[own.stop :], model["layers"])
        for layers in (before, selected, after):
            x = lax.scan(step, x, layers)[0] if layers["w"].shape[0] else x
        return jnp.mean(x**2)

    return lambda model, x: jax.grad(split)(jax.tree.map(lambda leaf: leaf[own], model["layers"]), model, x)


class _Module(nnx.Module):
    def __init__(self, layers: Layers):
        self.layers = nnx.data(jax.tree.map(nnx.Param, layers))


def gradients(own: slice, step: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of the parameters and the input that compute the gradient of some layers, by who computes it."""
    cut = lambda layers: jax.tree.map(lambda leaf: leaf[own], layers)
    loss = lambda model, x: network(model, x, step)
    yield "a scan split by hand", split_by_hand(own, step)
    yield "partgrad", pg.grad(loss, wrt=f"layers.**[{own.start}:{own.stop}]")
    yield "partgrad, double_where=True", pg.grad(loss, wrt=f"layers.**[{own.start}:{own.stop}]", double_where=True)

    def with_stops(model: Any, x: Any) -> Any:
        held = lambda leaf: lax.stop_gradient(leaf).at[own].set(leaf[own])
        return loss({"layers": jax.tree.map(held, model["layers"])}, x)

    yield "equinox, stop_gradient on the rest", lambda model, x: cut(eqx.filter_grad(with_stops)(model, x)["layers"])

    def of_nnx(model: Any, x: Any) -> Any:
        read = lambda module: {"layers": jax.tree.map(lambda leaf: leaf[...], dict(module.layers))}
        found = nnx.grad(lambda module, x: with_stops(read(module), x))(_Module(model["layers"]), x)
        return cut(jax.tree.map(lambda leaf: leaf[...], dict(found["layers"])))

    yield "nnx, stop_gradient on the rest", of_nnx
    yield "JAX, all layers, sliced", lambda model, x: cut(jax.grad(loss)(model, x)["layers"])


def ratios(own: slice, step: Callable[..., Any], width: int) -> Iterator[tuple[str, Executed]]:
    """What each needs, divided by what the scan split by hand needs."""
    given = model_of(width)
    found = {name: executed(gradient, *given) for name, gradient in gradients(own, step)}
    by_hand = found["a scan split by hand"]
    for name, one in found.items():
        yield name, Executed(*(part / base for part, base in zip(one, by_hand, strict=True)))


def main(arguments: list[str]) -> int:
    """Print the tables; return how many bounds are missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stacked_layers", description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="the width of a layer")
    width = parser.parse_args(arguments).width
    missed = 0
    for kind, step in {"": _step, ", checkpointed": jax.checkpoint(_step)}.items():
        for title, own in SELECTED.items():
            print(f"\n{title}{kind}: ratios to a scan split by hand")
            print(f"{'':36}{'operations':>12}{'bytes':>12}{'temporaries':>13}")
            for name, found in ratios(own, step, width):
                print(f"{name:36}{found.flops:12.3f}{found.bytes:12.3f}{found.temporaries:13.3f}", flush=True)
                if name.startswith("partgrad"):
                    missed += sum(one > most for one, most in zip(found, BOUNDS, strict=True))
    print(f"\n{missed} bounds missed")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
