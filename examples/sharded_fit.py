"""
One fit on one device and on eight
==================================

The same fit three times: on one device, with the data split over eight, and with the parameters split as well.

Run it with ``python examples/sharded_fit.py``, which uses eight virtual devices on the CPU. The model, the loss and the
fit know nothing about devices. Only the placement of the arrays differs, and the numbers are the same.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import partgrad as pg

STEPS = 60


@pg.dataclass
class Net:
    """Sines of the inputs, a layer, and a sum. The frequencies are held: the class says so."""

    frequencies: Any = pg.field(nondiff=True)
    hidden: Any
    out: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """What the net makes of inputs of shape (rows, inputs)."""
        return jnp.tanh(jnp.sin(x @ self.frequencies) @ self.hidden) @ self.out


# Where the axes of each array go on a mesh with axes `data` and `model`: nowhere, or half of each layer to a device.
WHOLE = Net(P(), P(), P())
SPLIT = Net(P(None, "model"), P("model", None), P())


def make_problem(rows: int = 256, inputs: int = 4, width: int = 32) -> tuple[Net, np.ndarray, np.ndarray]:
    """A net to begin with, inputs, and what it should make of them."""
    random = np.random.default_rng(0)
    net = Net(
        frequencies=random.normal(size=(inputs, width)),
        hidden=random.normal(size=(width, width)) / width**0.5,
        out=np.zeros(width),
    )
    x = random.normal(size=(rows, inputs))
    return net, x, np.sin(2 * x[:, 0]) * x[:, 1]


def loss(net: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((net(x) - y) ** 2)


@jax.jit
def fit(net: Net, x: jax.Array, y: jax.Array) -> tuple[Net, jax.Array]:
    """Descend with momentum; whatever is held stays where it is, and has no velocity."""
    selected, rest = pg.partition(net)

    def step(state: tuple[Net, Net], _: None) -> tuple[tuple[Net, Net], jax.Array]:
        part, velocity = state
        value, gradient = pg.value_and_grad(lambda part: loss(pg.combine(part, rest), x, y))(part)
        velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.05 * g, velocity, gradient)
        return (pg.apply_updates(part, velocity), velocity), value

    start = selected, jax.tree.map(jnp.zeros_like, selected)
    (selected, _), losses = jax.lax.scan(step, start, length=STEPS)
    return pg.combine(selected, rest), losses


def put(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Arrays of NumPy on the devices of a mesh; of several processes each puts what its own devices hold."""

    def placed(leaf: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), leaf.__getitem__)

    return jax.tree.map(placed, tree, specs)


def fits(devices: Sequence[Any]) -> list[tuple[str, Net, jax.Array]]:
    """The fit on one local device, with the data split over all devices, and with the parameters split as well."""
    net, x, y = make_problem()
    done = []
    for name, own, shape, specs in [
        ("one device", jax.local_devices()[:1], (1, 1), WHOLE),
        ("data split", devices, (len(devices), 1), WHOLE),
        ("parameters split too", devices, (len(devices) // 2, 2), SPLIT),
    ]:
        # Automatic axes: what the devices tell each other is left to the compiler.
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=own)
        fitted, losses = fit(put(net, specs, mesh), *put((x, y), (P("data"), P("data")), mesh))
        # What the devices print while they connect would stand between the lines of the report.
        done.append((name, *jax.block_until_ready((fitted, losses))))
    return done


def report(done: list[tuple[str, Net, jax.Array]]) -> bool:
    """Print the numbers of each fit beside those of the first; whether they agree."""
    expected = local(done[0][2])
    agree = True
    for name, fitted, losses in done:
        hidden, first = fitted.hidden, fitted.hidden.addressable_data(0)
        same = np.allclose(local(losses), expected, rtol=1e-9, atol=0)
        agree &= same
        print(f"{name:21}  loss {local(losses)[0]:.10f} -> {local(losses)[-1]:.10f}  {'ok' if same else 'MISSED'}")
        print(f"{'':21}  devices with `hidden`: {hidden.sharding.num_devices}, and {first.shape} of it on each")
    return agree


def local(array: jax.Array) -> np.ndarray:
    """An array that is whole on every device, from one of this process."""
    return np.asarray(array.addressable_data(0))


def main() -> None:
    """Fit and compare."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    if not report(fits(jax.devices())):
        sys.exit("The fits differ.")


if __name__ == "__main__":
    main()
