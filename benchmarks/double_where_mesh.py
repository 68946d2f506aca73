"""Count what the devices of a 4 x 2 mesh tell each other for the gradient of four layers, with `double_where` or not.

Run it with ``python benchmarks/double_where_mesh.py``; eight virtual devices on the CPU are enough. The batch is split
over one axis of the mesh and the weights over the other. After each layer comes a `where`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import partgrad as pg

_COLLECTIVE = re.compile(r" = (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\]")


def communicated(gradient: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """How many collectives a compiled gradient has, and how many bytes they return on each device."""
    text = jax.jit(gradient).lower(*arguments).compile().as_text()
    assert text is not None
    found = _COLLECTIVE.findall(text)
    return len(found), sum(_size(*array) for shapes, _ in found for array in _ARRAY.findall(shapes))


def _size(kind: str, bits: str, axes: str) -> int:
    return int(np.prod([int(axis) for axis in axes.split(",") if axis], dtype=int)) * max(int(bits or 8) // 8, 1)


def layers(per_row: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Four layers with a `where` after each: of each number's own sign, or of whether its row is one of data."""
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    put = lambda value, *axes: jax.device_put(value, NamedSharding(mesh, P(*axes)))
    random = np.random.default_rng(0)
    weights = [put(random.normal(size=(256, 256)).astype(np.float32), None, "model") for _ in range(4)]
    x = put(random.normal(size=(512, 256)).astype(np.float32), "batch", None)
    data = put(random.random(512) > 0.2, "batch")

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            h = x @ w
            x = jnp.where(data[:, None] if per_row else h > 0, jnp.tanh(h), 0.0)
        return (x**2).sum()

    return loss, (weights, x)


@jax.custom_vjp
def by_hand(x: Any, w: Any) -> Any:
    """A layer in whose derivative rows and columns may be NaN where no number of them is selected."""
    return _forward(x, w)[0]


def _forward(x: Any, w: Any) -> tuple[Any, Any]:
    h = x @ w
    return jnp.where(h > 0, jnp.tanh(h), 0.0), (x, w, h)


def _backward(kept: Any, cotangent: Any) -> tuple[Any, Any]:
    x, w, h = kept
    live = h > 0
    cotangent = jnp.where(live, cotangent * (1 - jnp.tanh(h) ** 2), 0.0)
    of_x = cotangent @ jnp.where(live.any(0), w, 1.0).T
    return of_x, jnp.where(live.any(1)[:, None], x, 1.0).T @ cotangent


by_hand.defvjp(_forward, _backward)


def of_layers_by_hand(weights: Any, x: Any) -> Any:
    for w in weights:
        x = by_hand(x, w)
    return (x**2).sum()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for name, per_row in [("mask of each number", False), ("mask of each row", True)]:
        loss, arguments = layers(per_row)
        others = [("", pg.double_where(loss)), *([] if per_row else [(" by hand", of_layers_by_hand)])]
        plain, few = communicated(jax.grad(loss), *arguments)
        for how, other in others:
            ours, many = communicated(jax.grad(other), *arguments)
            print(f"4 x 2 mesh, {name + how:27} collectives {plain} -> {ours}, bytes {many / few:.2f}x")
