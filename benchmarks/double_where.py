"""Measure the gradient of `double_where` beside `jax.grad`, and beside the double-where trick written by hand.

Run it with ``python -m benchmarks double_where [name ...]``. The first table needs no quiet machine: what XLA counts,
how long the program is, what devices communicate. ``--time`` adds running times: what is compared is timed in turns, so
a machine that slows down slows down all, and ratios are medians of the ratios of single turns.
"""

import gc
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import partgrad as pg

from .double_where_programs import ALL, COMPOSED, Built
from .timing import environment

ROUNDS = 31
TRACES = 5
Figures = dict[str, float]


def figures(gradient: Callable[..., Any], argument: Any) -> Figures:
    """What XLA counts in a compiled gradient, and the lines of its StableHLO."""
    lowered = jax.jit(gradient).lower(argument)
    compiled = lowered.compile()
    counted, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert counted is not None
    assert memory is not None
    return {
        "FLOPs": counted["flops"],
        "bytes": counted["bytes accessed"],
        "temporaries": float(memory.temp_size_in_bytes),
        "StableHLO": float(len(lowered.as_text().splitlines())),
    }


def trace_seconds(build: Callable[..., Built], wrap: Callable[..., Any], more: int) -> tuple[float, float]:
    """The processor time that tracing takes the first time, and again for a new function of the same structure."""
    loss, argument, _ = build(more)

    def once() -> float:
        # Without collections, like `timeit`: one takes as long as tracing a small function, whoever's turn it is.
        gc.collect()
        gc.disable()
        start = time.thread_time()
        jax.jit(jax.grad(wrap(lambda p: loss(p)))).trace(argument)
        seconds = time.thread_time() - start
        gc.enable()
        return seconds

    return once(), statistics.median(once() for _ in range(3))


def traces(build: Callable[..., Built]) -> tuple[float, float]:
    """The times of `trace_seconds` as multiples of those of `jax.grad`, on sizes that were never seen before."""
    pairs = []
    for number in range(1, TRACES + 1):
        plain = trace_seconds(build, lambda f: f, 2 * number)
        ours = trace_seconds(build, pg.double_where, 2 * number + 1)
        pairs.append((ours[0] / plain[0], ours[1] / plain[1]))
    first, again = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(again)


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


def report(name: str, build: Callable[..., Built]) -> None:
    """Print a line against `jax.grad`, and one against the trick written by hand, where there is one."""
    loss, argument, by_hand = build()
    ours = figures(jax.grad(pg.double_where(loss)), argument)
    first, again = traces(build)
    times = f"  trace {first:4.1f}, again {again:4.1f}"
    for reference, shown, last in [(loss, name, times), *([(by_hand, "  by hand", "")] if by_hand else [])]:
        _line(shown, ours, figures(jax.grad(reference), argument), last)


def report_composed(name: str) -> None:
    """Print a line for a derivative other than a gradient of the whole function."""
    derivative, argument = COMPOSED[name]()
    _line(name, figures(derivative(pg.double_where), argument), figures(derivative(lambda f: f), argument))


def _line(shown: str, ours: Figures, others: Figures, last: str = "") -> None:
    counted = "  ".join(f"{key} {_ratio(ours[key], others[key])}" for key in ours)
    print(f"{shown:30} {counted}{last}", flush=True)


def _ratio(one: float, other: float) -> str:
    return f"{one / other:5.2f}" if other else "    -"


def timed(name: str, build: Callable[..., Built]) -> None:
    """Print one line of running times."""
    loss, argument, by_hand = build()
    losses = [loss, pg.double_where(loss), *([by_hand] if by_hand else [])]
    run = ratios([jax.jit(jax.grad(each)).lower(argument).compile() for each in losses], argument)
    hand = f", {run[1] / run[2]:.2f}x of the one by hand" if by_hand else ""
    print(f"{name:30} run {run[1]:.2f}x of jax.grad{hand}", flush=True)


def eager() -> None:
    """Print what a small function costs without jit, after the first call."""
    f = lambda x: jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0) * jnp.sin(x))
    x, g = jnp.arange(3.0), pg.double_where(f)
    for name, one, other in [("value", f, g), ("gradient", jax.grad(f), jax.grad(g))]:
        one(x), other(x)
        print(f"eager {name:24} run {ratios([one, other], x)[1]:.2f}x")


def main(arguments: list[str]) -> None:
    """Measure the programs of these names, or all."""
    jax.config.update("jax_enable_x64", True)
    print(environment())
    names = [argument for argument in arguments if not argument.startswith("-")]
    is_chosen = lambda name: not names or any(part in name for part in names)
    chosen = {name: build for name, build in ALL.items() if is_chosen(name)}
    for name, build in chosen.items():
        report(name, build)
    for name in filter(is_chosen, COMPOSED):
        report_composed(name)
    if not names:
        subprocess.run([sys.executable, str(pathlib.Path(__file__).with_name("double_where_mesh.py"))], check=True)
    if "--time" in arguments:
        for name, build in chosen.items():
            timed(name, build)
        eager()
