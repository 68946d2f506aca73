"""Time a check beside one gradient of the same function, as a ratio, and count what it evaluates.

Run it with ``python benchmarks/check.py``. The gradient is timed compiled, which is what one step of an optimiser
costs; the check is timed as a user waits for it, tracing and compilation included, the first time and once more.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import partgrad as pg

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from kernels import RBF, Periodic, RationalQuadratic, White

ROUNDS = 11
RANDOM = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(RANDOM.normal(size=shape))


def gaussian_process() -> tuple[Callable[..., Any], Any]:
    t, y = jnp.linspace(0.0, 20.0, 200), normal(200)

    def loss(kernel: Any) -> Any:
        cholesky = jnp.linalg.cholesky(kernel(t[:, None], t))
        return 0.5 * y @ jax.scipy.linalg.cho_solve((cholesky, True), y) + jnp.log(jnp.diagonal(cholesky)).sum()

    kernel = RBF(1.0, 5.0) + RBF(0.5, 50.0) * Periodic(1.0) + RationalQuadratic(0.5, 1.0, 1.0) + White(0.5)
    return loss, kernel


def network() -> tuple[Callable[..., Any], Any]:
    x = normal(256, 64)

    def loss(layers: Any) -> Any:
        h = x
        for layer in layers:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return (h**2).mean()

    return loss, [{"w": 0.1 * normal(64, 64), "b": jnp.zeros(64)} for _ in range(3)]


def long_scan() -> tuple[Callable[..., Any], Any]:
    kicks = normal(1000, 8)

    def loss(parameters: Any) -> Any:
        def step(state: Any, kick: Any) -> Any:
            state = jnp.tanh(parameters["w"] @ state + kick)
            return state, state @ parameters["out"]

        return (lax.scan(step, jnp.zeros(8), kicks)[1] ** 2).mean()

    return loss, {"w": 0.3 * normal(8, 8), "out": normal(8)}


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def report(name: str, loss: Callable[..., Any], model: Any) -> None:
    """Print one line."""
    gradient = jax.jit(pg.value_and_grad(loss))
    compiling = seconds(lambda: gradient(model))
    step = statistics.median(seconds(lambda: gradient(model)) for _ in range(ROUNDS))
    found = []
    check = lambda: found.append(pg.check(loss, progress=False)(model))
    first, again = seconds(check), seconds(check)
    cost = ", ".join(f"{count:,} {what}" for what, count in found[0].cost.items())
    print(
        f"{name:20} gradient {step * 1e3:7.2f} ms (compiled in {compiling:.2f} s)  "
        f"check {first:6.2f} s, again {again:6.2f} s = {again / step:6.0f} gradients  "
        f"{'ok' if found[0].ok else 'NOT OK'}: {cost}",
        flush=True,
    )


if __name__ == "__main__":
    print(f"JAX {jax.__version__}, {jax.default_backend()}")
    report("Gaussian process", *gaussian_process())
    report("network", *network())
    report("scan of 1000 steps", *long_scan())
