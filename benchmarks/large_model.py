"""What a step of a transformer of 69 billion parameters needs on each of 64 devices, with one percent of them selected.

Run it with ``python benchmarks/large_model.py``; no such devices are needed. The model is shapes and shardings alone,
each program is compiled ahead of time for virtual devices, and XLA says how much memory it takes. ``--small`` does the
same with a tiny model on eight devices. Everything is in float32; words after the options choose some of the ways.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import partgrad as pg


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, of its batch and of the mesh."""

    layers: int = 80
    width: int = 8192
    inner: int = 28672
    heads: int = 64
    groups: int = 8
    vocabulary: int = 32000
    rows: int = 16
    length: int = 2048
    mesh: tuple[int, int] = (8, 8)


SMALL = Sizes(layers=3, width=64, inner=192, heads=8, groups=2, vocabulary=64, rows=8, length=16, mesh=(4, 2))


@pg.dataclass
class Block:
    """A layer, or all of them with a leading axis."""

    norms: Any
    query: Any
    key: Any
    value: Any
    out: Any
    gate: Any
    up: Any
    down: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """What the layer makes of (rows, length, width)."""
        x = x + self._attended(_normalised(x, self.norms[0]))
        h = _normalised(x, self.norms[1])
        return x + (jax.nn.silu(h @ self.gate) * (h @ self.up)) @ self.down

    def _attended(self, x: jax.Array) -> jax.Array:
        query, key, value = (jnp.einsum("blw,whd->blhd", x, w) for w in (self.query, self.key, self.value))
        rows, length, heads, depth = query.shape
        query = query.reshape(rows, length, key.shape[2], -1, depth)
        scores = jnp.einsum("bqghd,bkgd->bghqk", query, key) / depth**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        attended = jnp.einsum("bghqk,bkgd->bqghd", jax.nn.softmax(scores), value)
        return jnp.einsum("blhd,hdw->blw", attended.reshape(rows, length, heads, depth), self.out)


@pg.dataclass
class Transformer:
    """An embedding, layers with a leading axis, and the way back to the vocabulary."""

    embedding: Any
    layers: Block
    norm: Any
    unembedding: Any

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        x = jax.checkpoint(lambda e: _between(e[tokens]))(self.embedding)
        layer = jax.checkpoint(lambda x, block: (_between(block(x)), None))
        x, _ = jax.lax.scan(layer, x, self.layers)
        return _normalised(x, self.norm) @ self.unembedding


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _between(x: jax.Array) -> jax.Array:
    # What stays in memory of each layer is split over all devices.
    return jax.lax.with_sharding_constraint(x, P("data", "model", None))


def shapes(sizes: Sizes) -> Transformer:
    """The model as shapes."""
    depth = sizes.width // sizes.heads
    width, inner, layers = sizes.width, sizes.inner, sizes.layers
    block = Block(
        norms=(layers, 2, width),
        query=(layers, width, sizes.heads, depth),
        key=(layers, width, sizes.groups, depth),
        value=(layers, width, sizes.groups, depth),
        out=(layers, sizes.heads, depth, width),
        gate=(layers, width, inner),
        up=(layers, width, inner),
        down=(layers, inner, width),
    )
    return Transformer((sizes.vocabulary, width), block, (width,), (width, sizes.vocabulary))


# Every matrix is split over both axes of the mesh: by heads and inner numbers over `model`, the other way over `data`.
SPECS = Transformer(
    embedding=P("model", "data"),
    layers=Block(
        norms=P(),
        query=P(None, "data", "model"),
        key=P(None, "data", "model"),
        value=P(None, "data", "model"),
        out=P(None, "model", None, "data"),
        gate=P(None, "data", "model"),
        up=P(None, "data", "model"),
        down=P(None, "model", "data"),
    ),
    norm=P(),
    unembedding=P("data", "model"),
)


def loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """The mean surprise at the next token."""
    logits = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


# --- a step of adam in several ways: what it differentiates, the gradient, the optimiser, how updates are applied -----

ADAM = optax.adam(1e-4)
SELECTED = "layers.value"
Way = tuple[Callable[[Any], Any], Callable[..., Any], Any, Callable[..., Any]]


def _mask(model: Transformer) -> Any:
    return pg.mask(model, SELECTED)


def _stopped(model: Transformer, tokens: jax.Array) -> jax.Array:
    return loss(jax.tree.map(lambda on, x: x if on else jax.lax.stop_gradient(x), _mask(model), model), tokens)


def _with_values(model: Transformer, value: Any) -> Transformer:
    return dataclasses.replace(model, layers=dataclasses.replace(model.layers, value=value))


WAYS: dict[str, Way] = {
    "nothing frozen": (lambda model: model, jax.grad(loss), ADAM, optax.apply_updates),
    "zero gradients, optax.masked": (
        lambda model: model,
        jax.grad(_stopped),
        optax.masked(ADAM, _mask),
        optax.apply_updates,
    ),
    "partgrad": (
        lambda model: pg.select(model, SELECTED),
        pg.grad(loss, wrt=SELECTED),
        ADAM,
        lambda model, updates: pg.replace(model, SELECTED, pg.select(model, SELECTED) + updates),
    ),
    "partgrad, partition": (
        lambda model: pg.partition(model, SELECTED)[0],
        lambda model, tokens: pg.grad(lambda part: loss(pg.combine(part, pg.partition(model, SELECTED)[1]), tokens))(
            pg.partition(model, SELECTED)[0]
        ),
        ADAM,
        pg.apply_updates,
    ),
    "partgrad, marks": (
        lambda model: pg.partition(_frozen(model))[0],
        lambda model, tokens: pg.grad(loss)(_frozen(model), tokens),
        ADAM,
        lambda model, updates: pg.replace(model, SELECTED, pg.select(model, SELECTED) + updates.layers.value),
    ),
    "by hand": (
        lambda model: model.layers.value,
        lambda model, tokens: jax.grad(lambda value: loss(_with_values(model, value), tokens))(model.layers.value),
        ADAM,
        lambda model, updates: _with_values(model, model.layers.value + updates),
    ),
}


def _frozen(model: Transformer) -> Transformer:
    return pg.freeze(model, pg.exclude(SELECTED))


class Row(NamedTuple):
    """Bytes on each device: of arrays that a step is given, of its gradient, and of what it needs besides."""

    parameters: int
    gradient: int
    state: int
    temporary: int
    collectives: int
    communicated: int
    seconds: float


_COLLECTIVE = re.compile(r" = (\S.*?) (?:all-reduce|all-gather|all-to-all|collective-\w+|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def communicated(text: str) -> tuple[int, int]:
    """How many collectives a program has, and how many bytes they return on each device, those of a loop once."""
    found = _COLLECTIVE.findall(text)
    arrays = [array for shapes in found for array in _ARRAY.findall(shapes)]
    sizes = ((int(bits) // 8, np.prod([int(axis) for axis in axes.split(",") if axis])) for bits, axes in arrays)
    return len(found), int(sum(width * count for width, count in sizes))


def rows(sizes: Sizes, ways: list[str]) -> Iterator[tuple[str, Row]]:
    """Compile a step in each of some ways."""
    devices = jax.devices()[: sizes.mesh[0] * sizes.mesh[1]]
    mesh = jax.make_mesh(sizes.mesh, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    model = abstract(sizes, mesh)
    tokens = jax.ShapeDtypeStruct((sizes.rows, sizes.length), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        for name in ways:
            begun = time.perf_counter()
            yield name, compiled(model, tokens, *WAYS[name], begun)


def abstract(sizes: Sizes, mesh: Mesh) -> Transformer:
    """The model as shapes that say where they are."""
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(place, shapes(sizes), SPECS, is_leaf=lambda node: type(node) is tuple)


def compiled(model: Any, tokens: Any, selected: Any, gradient: Any, optimiser: Any, applied: Any, begun: float) -> Row:
    """What XLA says of one way."""
    places = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
    state = jax.eval_shape(lambda model: optimiser.init(selected(model)), model)
    # Moments and gradients are where their parameters are.
    where = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(model)}
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where.get(leaf.shape))
    state = jax.tree.map(placed, state)
    shaped = jax.tree.map(placed, jax.eval_shape(gradient, model, tokens))

    def step(model: Any, state: Any, tokens: Any) -> Any:
        updates, new = optimiser.update(gradient(model, tokens), state, selected(model))
        return applied(model, updates), new

    differentiated = jax.jit(gradient, out_shardings=places(shaped)).lower(model, tokens).compile()
    whole = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places(model), places(state)))
    memory = whole.lower(model, state, tokens).compile().memory_analysis()
    of_gradient = differentiated.memory_analysis()
    told = communicated(differentiated.as_text() or "")
    return Row(
        parameters=of_gradient.argument_size_in_bytes,
        gradient=of_gradient.output_size_in_bytes,
        state=memory.argument_size_in_bytes - of_gradient.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        collectives=told[0],
        communicated=told[1],
        seconds=time.perf_counter() - begun,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on eight devices")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"all of: {', '.join(WAYS)}")
    arguments = parser.parse_args()
    sizes = SMALL if arguments.small else Sizes()
    jax.config.update("jax_num_cpu_devices", sizes.mesh[0] * sizes.mesh[1])
    leaves = jax.tree.leaves(shapes(sizes), is_leaf=lambda node: type(node) is tuple)
    every, chosen = sum(map(np.prod, leaves)), np.prod(shapes(sizes).layers.value)
    unit, name = (1e9, "GB") if sizes == Sizes() else (1e3, "kB")
    print(f"{every:,} parameters, {chosen:,} selected ({chosen / every:.2%}), {sizes.mesh[0] * sizes.mesh[1]} devices")
    print(f"{name} on each device             parameters  gradient  Adam state  temporary  collectives (once a loop)")
    for way, row in rows(sizes, arguments.ways or list(WAYS)):
        figures = [getattr(row, field) / unit for field in ("parameters", "gradient", "state", "temporary")]
        print(
            f"{way:30} {figures[0]:10.3f} {figures[1]:9.3f} {figures[2]:11.3f} {figures[3]:10.3f}"
            f"  {row.collectives:4}, {row.communicated / unit:.3f} {name}   compiled in {row.seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
