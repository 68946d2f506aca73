"""Parts of a tree that a selector builds, and parts that are none."""

from typing import Any

import flax.core
import jax.numpy as jnp
import pytest

import partgrad as pg
from partgrad import NonDiff, errors

ONES = jnp.ones(2)


@pg.dataclass
class Pair:
    w: Any
    b: Any


# --- plans and parts ---------------------------------------------------------------------------------------------------


def test_a_thawing_plan_looks_at_the_leaves_beside_the_named_one():
    pg.partition({"x": NonDiff([1.0, 2])}, "x[0]")
    tree = {"x": NonDiff([1.0, 2.0])}
    selected, rest = pg.partition(tree, "x[0]")
    assert pg.combine(selected, rest)["x"][0] == 1.0
    assert isinstance(pg.combine(selected, rest)["x"][1], NonDiff)


def test_a_node_of_slots_that_the_selector_built_is_no_part():
    with pytest.raises(errors.NoMatchError, match="which is not a part of the tree"):
        pg.partition(Pair(ONES, ONES), lambda t: Pair(w=(t.w, t.b), b=None))
    tree = flax.core.freeze({"params": {"dense": {"w": 1.0, "b": 2.0}}})
    gradient = pg.grad(lambda p: p["params"]["dense"]["w"] ** 2, wrt=lambda p: p["params"])(tree)
    assert list(gradient) == ["dense"]


def test_each_counts_after_marks_are_left_out():
    gradient = pg.grad(lambda t: t["a"]["q"] * t["a"]["p"], wrt=pg.each(lambda m: (m["a"], m["a"]["p"])))(
        {"a": {"p": NonDiff(2.0), "q": 3.0}}
    )
    assert gradient["a"]["q"] == 2.0


def test_each_on_a_tree_without_nodes():
    for tree in (0.0, (), None):
        with pytest.raises(errors.NoMatchError, match="fits no part of the tree"):
            pg.partition(tree, pg.each(lambda n: n["a"]))
