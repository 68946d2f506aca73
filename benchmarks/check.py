"""Time a check, and count what XLA compiles for it, beside `jax.test_util.check_grads` and one `jit(grad)`.

Run it with ``python -m benchmarks check [name ...]``. Each case is timed as a user waits for it: the first call in a
process in which nothing like it was compiled before. Wall seconds depend on who else uses the machine; seconds of the
processor do so less. Where cores are shared, set OPENBLAS_NUM_THREADS=1: threads of the linear algebra that wait for
each other count as seconds of the processor.
"""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, monitoring
from jax.test_util import check_grads

import partgrad as pg

from . import check_public
from .timing import environment, example

RANDOM = np.random.default_rng(0)
normal = lambda *shape: RANDOM.normal(size=shape).astype(np.float32)
compilations: list[float] = []


@monitoring.register_event_duration_secs_listener
def listen(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(seconds)


def scalar() -> tuple[Callable[..., Any], Any]:
    return lambda x: jnp.sin(x) * x, np.float32(0.5)


def two_leaves() -> tuple[Callable[..., Any], Any]:
    return lambda p: jnp.sum(jnp.sin(p["x"]) * p["scale"]), {"x": normal(2), "scale": np.float32(2)}


def many_leaves() -> tuple[Callable[..., Any], Any]:
    return lambda p: sum(jnp.sum(jnp.sin(x) * i) for i, x in enumerate(p, 1)), [normal(2) for _ in range(300)]


def perceptron() -> tuple[Callable[..., Any], Any]:
    model, x = eqx.nn.MLP(4, "scalar", 32, 2, activation=jnp.tanh, key=jax.random.key(0)), normal(64, 4)
    return lambda model: jnp.mean(jax.vmap(model)(x) ** 2), model


def carbon_dioxide() -> tuple[Callable[..., Any], Any]:
    mauna_loa = example("mauna_loa")
    t, y = mauna_loa.load_co2()
    data = y - y.mean()
    return lambda kernel: mauna_loa.log_marginal_likelihood(kernel, t[::4], data[::4]), mauna_loa.book_kernel()


def transformer() -> tuple[Callable[..., Any], Any]:
    width, tokens = 32, normal(16, 32)
    layer = lambda: {
        "qkv": normal(width, 3 * width) / 6,
        "out": normal(width, width) / 6,
        "up": normal(width, 4 * width) / 6,
        "down": normal(4 * width, width) / 12,
        "scale": np.ones(width, np.float32),
    }

    def loss(layers: Any) -> Any:
        h = jnp.asarray(tokens)
        for p in layers:
            q, k, v = jnp.split(h @ p["qkv"], 3, axis=-1)
            h = h + jax.nn.softmax(q @ k.T / jnp.sqrt(jnp.float32(width))) @ v @ p["out"]
            normed = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * p["scale"]
            h = h + jax.nn.gelu(normed @ p["up"]) @ p["down"]
        return jnp.mean(h**2)

    return loss, [layer() for _ in range(6)]


def solve() -> tuple[Callable[..., Any], Any]:
    import diffrax

    def loss(p: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: jnp.stack([y[1], -p["k"] * y[0] - p["damping"] * y[1]]))
        start = jnp.stack([p["start"], 0 * p["start"]])
        solution = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 2.0, 0.1, start, max_steps=256)
        return jnp.sum(solution.ys**2)

    return loss, {"k": np.float32(1.3), "damping": np.float32(0.2), "start": np.float32(1.0)}


def long_scan() -> tuple[Callable[..., Any], Any]:
    kicks = normal(1000, 8)

    def loss(p: Any) -> Any:
        def step(state: Any, kick: Any) -> Any:
            state = jnp.tanh(p["w"] @ state + kick)
            return state, state @ p["out"]

        return (lax.scan(step, jnp.zeros(8), kicks)[1] ** 2).mean()

    return loss, {"w": normal(8, 8) / 4, "out": normal(8)}


CASES = (scalar, two_leaves, many_leaves, perceptron, carbon_dioxide, transformer, solve, long_scan)


def timed(function: Callable[[], Any]) -> tuple[str, Any]:
    """What a call took, in words, and what it returned."""
    compilations.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        result = function()
        jax.block_until_ready(result)
    except Exception as error:
        return type(error).__name__, None
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{wall:6.2f} s ({cpu:5.2f} of the processor), {len(compilations):3} compilations", result


def report(case: Callable[[], tuple[Callable[..., Any], Any]]) -> None:
    """Print what each way to test a gradient takes."""
    with jax.enable_x64(case is carbon_dioxide):
        loss, point = case()
        free, held = pg.partition(point)
        of_free = lambda free: loss(pg.combine(free, held))
        ways = {
            "check": lambda: pg.check(loss, progress=False)(point),
            "check_grads": lambda: check_grads(of_free, (free,), 1, rtol=1.0, atol=1.0),
            "jit(grad)": lambda: jax.jit(jax.grad(of_free))(free),
        }
        for way, run in ways.items():
            # Nothing of one is in a cache for the other.
            jax.clear_caches()
            took, result = timed(run)
            verdict = "" if way != "check" or result is None else f"  {str(result).partition(chr(10))[0]}"
            print(f"{case.__name__:18} {way:12} {took}{verdict}", flush=True)


def main(names: list[str]) -> None:
    """Measure the cases of these names, or all."""
    print(environment())
    for each in (*CASES, *check_public.CASES):
        if not names or each.__name__ in names:
            try:
                report(each)
            except ImportError as error:
                print(f"{each.__name__:18} left out: {error}")
