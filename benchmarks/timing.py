"""How everything is timed: what is compared takes turns in one process, so a machine that slows down slows down all."""

import importlib
import importlib.metadata
import os
import platform
import random
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

Functions = dict[str, Callable[[], object]]
OURS = "partgrad"
# The packages whose versions a report states.
PEERS = ("jax", "numpy", "equinox", "flax", "paramax", "optax", "scikit-learn", "tinygp", "gpjax")


@dataclass
class Effort:
    """How long is measured.

    Attributes:
        rounds: How often each function takes its turn; many short turns, since a shared machine changes its speed.
        seconds: How long a turn takes at least, where one call takes less.
        clock: What tells the time; the processor's seconds count less of what else a busy machine does.
        is_quick: Whether sizes are small: to see that everything runs, not to quote.
    """

    rounds: int = 75
    seconds: float = 0.004
    clock: Callable[[], float] = time.perf_counter
    is_quick: bool = False

    def time(self, function: Callable[[], object], number: int) -> float:
        """The seconds that a call takes, of so many in a row."""
        return timeit.timeit(function, number=number, timer=self.clock) / number


@dataclass
class Row:
    """One comparison.

    Attributes:
        title: What is compared.
        costs: What it costs in each way: seconds, or what `unit` says. The first is partgrad's.
        limits: The most that partgrad may take, as a multiple of a peer.
        unit: What is counted.
        notes: What else there is to say.
    """

    title: str
    costs: dict[str, float]
    limits: dict[str, float] = field(default_factory=dict)
    unit: str = "s"
    notes: str = ""

    def ratios(self) -> Iterator[tuple[str, float, float | None]]:
        """Of each peer its name, partgrad's cost as a multiple of its own, and the most that may be."""
        ours = next(iter(self.costs.values()))
        for peer, cost in list(self.costs.items())[1:]:
            yield peer, ours / cost, self.limits.get(peer)

    def cost(self) -> str:
        """What partgrad's way costs, in words."""
        ours = next(iter(self.costs.values()))
        if self.unit != "s":
            return f"{ours:,.0f} {self.unit}"
        scale, unit = next(pair for pair in ((1e9, "ns"), (1e6, "us"), (1e3, "ms"), (1, "s")) if ours * pair[0] < 1e3)
        return f"{ours * scale:.3g} {unit}"

    def lines(self) -> Iterator[str]:
        """The comparison as text."""
        for number, (peer, ratio, limit) in enumerate(self.ratios()):
            start = f"{self.title:42} {self.cost():>12}" if number == 0 else " " * 55
            bound = "" if limit is None else f"   (at most {limit:g})" + ("" if ratio <= limit else "  OVER")
            yield f"{start}  / {peer:24} {ratio:7.3f}{bound}"
        if self.notes:
            yield f"    {self.notes}"


def compared(effort: Effort, title: str, functions: Functions, limits: dict[str, float] | None = None) -> Row:
    """Time functions in turns, in another order each round; the costs are medians."""
    numbers = {}
    for name, function in functions.items():
        function()
        once = max(effort.time(function, 3), 1e-8)
        numbers[name] = max(1, int(effort.seconds / once))
    times: dict[str, list[float]] = {name: [] for name in functions}
    # Whoever follows a slow neighbour finds the caches cold.
    order, draw = list(functions), random.Random(0)
    for _ in range(effort.rounds):
        draw.shuffle(order)
        for name in order:
            times[name].append(effort.time(functions[name], numbers[name]))
    return Row(title, {name: statistics.median(values) for name, values in times.items()}, limits or {})


def example(name: str) -> Any:
    """A module of `examples`."""
    folder = str(Path(__file__).parent.parent / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def environment() -> str:
    """Where this runs: machine, Python, and the versions of what is compared."""
    versions = []
    for name in PEERS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    busy = f", load average {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    machine = f"{_processor()}, {os.cpu_count()} cores{busy}, {jax.default_backend()}"
    return f"{machine}; Python {platform.python_version()}, {', '.join(versions)}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
