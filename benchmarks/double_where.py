"""Time the gradient of `double_where` beside `jax.grad` and the double-where trick written by hand, as ratios.

Run it with ``python benchmarks/double_where.py``. What is compared is compiled, then timed in turns, so a machine that
slows down slows down all; ratios are medians of the ratios of single turns.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import partgrad as pg

ROUNDS = 31
RANDOM = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(RANDOM.normal(size=shape))


def gaussian_process(by_hand: bool = False) -> tuple[Callable[[Any], Any], Any]:
    x, y = normal(400, 2), normal(400)

    def loss(parameters: Any) -> Any:
        length, scale, noise = jnp.exp(parameters)
        squares = ((x[:, None] - x[None]) ** 2).sum(-1) / length**2
        inner = jnp.where(squares > 0, squares, 1.0) if by_hand else squares
        r = jnp.sqrt(3.0) * jnp.where(squares > 0, jnp.sqrt(inner), 0.0)
        cholesky = jnp.linalg.cholesky(scale**2 * (1 + r) * jnp.exp(-r) + noise**2 * jnp.eye(400))
        solved = jax.scipy.linalg.cho_solve((cholesky, True), y)
        return 0.5 * y @ solved + jnp.log(jnp.diag(cholesky)).sum()

    return loss, jnp.zeros(3)


def attention(masked: bool = True) -> tuple[Callable[[Any], Any], Any]:
    batch, length, heads, size = 2, 128, 4, 64
    x0, mask = normal(batch, length, size), jnp.tril(jnp.ones((length, length), bool))
    split = lambda y: y.reshape(batch, length, heads, size // heads)

    def loss(weights: Any) -> Any:
        x = x0
        for w in weights:
            q, k, v = (split(x @ w[i]) for i in range(3))
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
            scores = jnp.where(mask, scores, -jnp.inf) if masked else scores
            mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
            x = jax.nn.gelu(x + mixed.reshape(batch, length, size) @ w[3])
        return (x**2).sum()

    return loss, [0.1 * normal(4, size, size) for _ in range(3)]


def recurrent() -> tuple[Callable[[Any], Any], Any]:
    xs, keep = normal(200, 32, 64), jnp.asarray(RANDOM.random((200, 32, 1)) > 0.3)

    def loss(weights: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            x, keep = x
            return jnp.where(keep, jnp.tanh(h @ weights[0] + x @ weights[1]), h), None

        return (lax.scan(step, jnp.zeros((32, 64)), (xs, keep))[0] ** 2).sum()

    return loss, [0.1 * normal(64, 64) for _ in range(2)]


def network() -> tuple[Callable[[Any], Any], Any]:
    x = normal(256, 64)

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).sum()

    return loss, [0.1 * normal(64, 64) for _ in range(3)]


def compiled(gradient: Callable[..., Any], argument: Any) -> tuple[Any, float]:
    """The compiled gradient, and how many seconds tracing and compiling took."""
    start = time.perf_counter()
    program = jax.jit(gradient).lower(argument).compile()
    return program, time.perf_counter() - start


def ratios(programs: list[Any], argument: Any) -> list[float]:
    """Median times as multiples of the first program's, taken in turns."""
    times = []
    for _ in range(ROUNDS):
        turn = []
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(program(argument))
            turn.append(time.perf_counter() - start)
        times.append([seconds / turn[0] for seconds in turn])
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def report(name: str, loss: Callable[[Any], Any], argument: Any, *others: Callable[[Any], Any]) -> None:
    """Print one line."""
    losses = [loss, pg.double_where(loss), *others]
    programs, seconds = zip(*(compiled(jax.grad(each), argument) for each in losses), strict=True)
    again = [compiled(jax.grad(lambda p, each=each: each(p)), argument)[1] for each in losses[:2]]
    flops = [program.cost_analysis()["flops"] for program in programs]
    run = ratios(list(programs), argument)
    hand = f"{run[1] / run[2]:.2f}x of the one by hand" if others else ""
    print(
        f"{name:28} run {run[1]:.2f}x  trace and compile {(seconds[1] + again[1]) / (seconds[0] + again[0]):.2f}x  "
        f"FLOPs {flops[1] / flops[0]:.3f}x  {hand}"
    )


def eager() -> None:
    """Print what a small function costs without jit, after the first call."""
    f = lambda x: jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0) * jnp.sin(x))
    x, g = jnp.arange(3.0), pg.double_where(f)
    for name, one, other in [("value", f, g), ("gradient", jax.grad(f), jax.grad(g))]:
        one(x), other(x)
        print(f"eager {name:22} run {ratios([one, other], x)[1]:.2f}x")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    compiled(jax.grad(lambda x: jnp.sin(x)), 1.0)
    report("Gaussian process", *gaussian_process(), gaussian_process(by_hand=True)[0])
    report("masked attention", *attention())
    report("attention without a mask", *attention(masked=False))
    report("masked recurrent network", *recurrent())
    report("network without a selection", *network())
    eager()
