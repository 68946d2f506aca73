"""Calls with structures, closures, paths and classes that are never the same: does memory stay flat?

    PYTHONPATH=src python tests/scripts/soak.py 100000

prints, at each twentieth of the calls, how many objects Python holds and how much memory the process has. It fails if over
the second half there is an object more for each call, or 20 MB more. Caches that hold a bounded number fill up: those of
`double_where` after some 25000 calls, but the one of JAX's rules, which takes literals apart. `tests/test_soak.py` makes
fewer calls.

    PYTHONPATH=src python tests/scripts/soak.py 20000 threads

makes the calls from 16 threads at once, and fails if a result is wrong; it is meant for free-threaded builds of Python.
"""

import concurrent.futures
import gc
import itertools
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import partgrad as pg


def structures(i):
    tree = {f"a{i}": 2.0, "held": pg.NonDiff(3.0), "deep": [{f"b{i}": 1.0}] * (i % 3)}
    assert float(pg.grad(lambda t: t[f"a{i}"] * t["held"])(tree)[f"a{i}"]) == 3.0
    selected, rest = pg.partition(tree, f"a{i}")
    assert pg.combine(selected, rest)[f"a{i}"] == 2.0


def closures(i):
    factor, model = float(i), {"w": jnp.ones(3), "n": 3}
    gradient = pg.grad(lambda m: factor * m["w"].sum(), wrt=lambda m: m["w"] if factor >= 0 else m["n"])
    assert float(gradient(model)[0]) == factor


def paths(i):
    tree = {"w": {str(i): jnp.ones(2)}, "v": 1.0}
    frozen = pg.freeze(tree, f"w['{i}']")
    assert pg.is_nondiff(frozen, f"w['{i}']")
    vector, unravel = pg.ravel(pg.thaw(frozen, "**"), pg.path("w.*"))
    assert unravel(2 * vector)["w"][str(i)][0] == 2.0
    assert pg.label(tree, {"slow": f"w['{i}']"}, default="fast")["v"] == "fast"


def elements(i):
    model = {"w": jnp.arange(8.0)}
    assert pg.select(model, lambda m: m["w"][i % 8]) == i % 8


def rewritten(i):
    factor, x = float(i), jnp.array([0.0, 1.0])
    f = pg.consistent_indexing(lambda x: factor * x[jnp.array([9])].sum())
    assert jax.grad(f)(x)[1] == factor


def taken(i):
    factor, x = float(i), jnp.array([0.0, 1.0])
    f = pg.double_where(lambda x: factor * jnp.where(x > 0, jnp.log(x), 0.0).sum())
    assert jax.grad(f)(x)[1] == factor


def drawn(i):
    f = lambda p: pg.draw(lambda key, p: p * jax.random.normal(key), jax.random.key(0), p, gradient="fixed") * i
    assert jax.grad(f)(1.0) == 0.0


def classes(i):
    # JAX keeps the class for good: its registry of pytrees forgets nothing. So there are few.
    cls = pg.dataclass(
        type(f"Model{i}", (), {"__annotations__": {"a": float, "b": float}, "b": pg.field(nondiff=True)})
    )
    assert pg.grad(lambda m: m.a * m.b)(cls(1.0, 2.0)).a == 2.0


# What is cheap comes more often.
KINDS = [*[structures, closures, paths, elements] * 24, rewritten, taken, drawn] * 10 + [classes]


def used():
    """How many objects Python holds, and the megabytes of the process."""
    gc.collect()
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
    return len(gc.get_objects()), pages / 1e6


def soak(calls, marks=10, report=False):
    """Make so many calls; what was used at each of some marks, and printed if asked for."""
    kinds, found = itertools.cycle(KINDS), []
    for i in range(calls):
        next(kinds)(i)
        if (i + 1) % (calls // marks) == 0:
            found.append(used())
            if report:
                print(f"after {i + 1:7} calls  {found[-1][0]:8} objects  {found[-1][1]:7.1f} MB", flush=True)
    return found


def together(calls, threads=16):
    """Make so many calls from several threads at once."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda i: KINDS[i % len(KINDS)](i), range(calls)):
            pass


def main(calls, mode=""):
    begun = time.perf_counter()
    if mode == "threads":
        together(int(calls))
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        print(f"{calls} calls, {'with' if has_lock else 'without'} the GIL, {time.perf_counter() - begun:.0f} s")
        return False
    found = soak(int(calls), 20, report=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    (early, small), (late, large) = found[len(found) // 2 - 1], found[-1]
    return late - early > int(calls) / 2 or large > small + 20


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
