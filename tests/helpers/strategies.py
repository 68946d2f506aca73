"""Strategies for hypothesis: trees with every kind of mark, and selectors for them."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import partgrad as pg


@pg.dataclass
class Pair:
    first: Any
    second: Any


@pg.dataclass
class Held:
    free: Any
    held: Any = pg.field(nondiff=True)


@pg.dataclass
class Named:
    value: Any
    name: Any = pg.field(static=True, default="name")


class Coordinates(NamedTuple):
    x: Any
    y: Any


numbers = st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-3)
floats = numbers | numbers.map(lambda x: np.array([x, 0.25], np.float32))


def models(children):
    """Instances of `partgrad.dataclass` with every kind of mark, and with static data."""
    pair = st.tuples(children, children)
    return st.one_of(
        pair.map(lambda p: Pair(*p)),
        pair.map(lambda p: Pair(pg.NonDiff(dynamic(p[0])), p[1])),
        pair.map(lambda p: Held(p[0], dynamic(p[1]))),
        pair.map(lambda p: Held(p[0], pg.Diff(dynamic(p[1])))),
        pair.map(lambda p: Named(p[0])),
        pair.map(lambda p: Named(p[0], (0.5, 1.5))),
    )


def dynamic(value):
    """A marked field cannot be static as well: a number takes the place of static data."""
    inner = value
    while isinstance(inner, pg.NonDiff | pg.Diff | pg.Static):
        if isinstance(inner, pg.Static):
            return 0.5
        inner = inner.value
    return value


def trees(leaves=floats, nodes=(), max_leaves=8):
    """Lists, dicts, tuples, models, wrappers, and the nodes that are given as functions of a strategy for children."""

    def containers(children):
        return st.one_of(
            st.lists(children, max_size=3),
            st.dictionaries(st.sampled_from(["a", "b", "w.x", "second"]), children, max_size=3),
            st.tuples(children, children).map(lambda p: Coordinates(*p)),
            models(children),
            children.map(pg.NonDiff),
            st.just(pg.Static({"n": 2, "grid": (0.5, 0.25)})),
            *(node(children) for node in nodes),
        )

    return st.recursive(leaves, containers, max_leaves=max_leaves)


@st.composite
def marked(draw, trees):
    """Trees with some of their leaves frozen."""
    tree = draw(trees)
    paths = [name for name, _ in pg.items(tree) if name]
    for name in sorted(draw(st.sets(st.sampled_from(paths), max_size=3)) if paths else []):
        tree = pg.freeze(tree, name)
    return tree
