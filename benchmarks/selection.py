"""Selecting in trees of a hundred to a million leaves: time grows as the tree does."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import partgrad as pg

from .models import Kernel, Model
from .timing import Effort, Row, compared

PATH = "model.kernels[3].variance"


def tree(leaves: int, more: int = 0) -> Any:
    """A model of kernels; `more` leaves make it a structure that was never seen before."""
    value = np.float32(1)
    return {"model": Model([Kernel(value, value, value) for _ in range(leaves // 3)]), "more": [value] * more}


def selecting(effort: Effort) -> Iterator[Row]:
    """One leaf, by its path: of a structure that is new, and of one that is known."""
    for power in range(2, 4 if effort.is_quick else 7):
        leaves = 10**power
        yield _first(effort, leaves, rounds=25 if power < 4 else 3)
        known = tree(leaves)
        again = {
            "partgrad": lambda known=known: pg.select(known, PATH),
            "flatten + unflatten": lambda known=known: _there_and_back(known),
        }
        yield compared(effort, f"select by path, {leaves:,} leaves, again", again, {"flatten + unflatten": 1.0})


def _first(effort: Effort, leaves: int, rounds: int) -> Row:
    ways: dict[str, Callable[[Any], Any]] = {
        "partgrad": lambda new: pg.select(new, PATH),
        "tree_flatten_with_path": jax.tree_util.tree_flatten_with_path,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    pg.select(tree(leaves), PATH)
    for number in range(1, rounds + 1):
        new = tree(leaves, number)
        for name, way in ways.items():
            times[name].append(effort.time(lambda way=way, new=new: way(new), 1))
    costs = {name: statistics.median(values) for name, values in times.items()}
    row = Row(f"select by path, {leaves:,} leaves, first", costs, {"tree_flatten_with_path": 3.0})
    ours, theirs = costs.values()
    if ours > 3 * theirs:
        row.notes = f"{(ours - 3 * theirs) * 1e6:,.0f} us over the bound, once for each structure"
    return row


def _there_and_back(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(leaves)


def callables(effort: Effort) -> Iterator[Row]:
    """A callable runs again on every call, on slots that are kept."""
    known = tree(100)
    ways = {
        "partgrad": lambda: pg.select(known, lambda t: t["model"].kernels[3].variance),
        "flatten + unflatten": lambda: _there_and_back(known),
    }
    yield compared(effort, "select by a callable, 100 leaves, again", ways, {"flatten + unflatten": 1.0})
    ways |= {"partgrad": lambda: pg.mask(known, lambda k: k.variance)}
    yield compared(effort, "mask by a callable, nested, 100 leaves, again", ways)
