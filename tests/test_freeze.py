"""Freezing adds marks around what was named, thawing takes them off, and nothing else changes."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import RBF
from partgrad import NonDiff, Static, errors


@pg.dataclass
class Osc:
    amp: Any
    freq: Any = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amp * jnp.sin(self.freq * t)


CONV = eqx.nn.Conv1d(1, 1, 2, key=jax.random.key(0))


NET = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))


FROZEN = pg.freeze({"c": CONV, "s": 1.0}, "c")


def convolved(t):
    return (t["c"](jnp.ones((1, 3))) * t["s"]).sum()


def test_a_leaf_of_a_frozen_layer_is_named():
    np.testing.assert_allclose(pg.grad(convolved, wrt="c.bias")(FROZEN), [[2.0]])


def test_a_leaf_of_a_frozen_layer_is_thawed():
    thawed = pg.thaw(FROZEN, "c.bias")
    np.testing.assert_allclose(convolved(thawed), convolved(FROZEN))
    assert not pg.is_nondiff(thawed, "c.bias")
    assert pg.is_nondiff(thawed, "c.weight")


def test_a_layer_with_a_frozen_weight_is_called():
    frozen = pg.freeze({"c": CONV, "s": 1.0}, "**.weight")
    np.testing.assert_allclose(convolved(frozen), convolved(FROZEN))


def test_a_frozen_entry_leaves_its_dict_a_dict():
    frozen = pg.freeze({"w": 1.0, "n": 3}, "w")
    assert type(frozen) is dict
    assert pg.is_nondiff({**frozen}, "w")


def product(t):
    return t["k"].amp * t["k"].freq * t["s"]


HELD = pg.freeze({"k": Osc(2.0, 3.0), "s": 5.0}, "k")


def test_naming_a_node_that_is_wholly_held_opens_it():
    gradient = pg.grad(product, wrt="k")(HELD)
    np.testing.assert_allclose((gradient.amp, gradient.freq), (15.0, 10.0))


def test_naming_a_held_node_beside_a_leaf_opens_it():
    node, leaf = pg.grad(product, wrt=lambda t: (t["k"], t["s"]))(HELD)
    assert float(leaf) == 6.0
    assert (node.amp, node.freq) == (15.0, 10.0)


@pg.dataclass
class Configured:
    w: Any
    cfg: Any = pg.field(static=True)


@pg.dataclass
class Pair:
    w: Any
    b: Any


def test_freezing_beside_static_data_with_marks():
    for _ in range(3):
        frozen = pg.freeze([Configured(1.0, {"g": NonDiff(2.0)}), 2.0], "[1]")
        assert isinstance(frozen[1], NonDiff)
        assert (
            pg.grad(lambda t: t["w"] ** 2, wrt="w")({"k": Configured(1.0, {"g": NonDiff(2.0)}), "w": NonDiff(2.0)})
            == 4.0
        )


def test_a_mark_above_static_data():
    frozen = pg.freeze({"x": {"s": Static("s"), "w": 1.0}}, "x")
    selected, _ = pg.partition(pg.thaw(frozen, "x.w"))
    assert jax.tree.leaves(selected) == [1.0]
    assert isinstance(pg.freeze({"a": NonDiff(Static("s")), "b": 1.0}, "b")["a"], NonDiff)


def test_nested_wrappers_are_one_mark():
    assert repr(Pair(jax.tree.map(NonDiff, NonDiff(1.0)), 2.0)) == "Pair(w=NonDiff(1.0), b=2.0)"
    np.testing.assert_array_equal(jax.grad(lambda m: m.w * m.b)(Pair(NonDiff(3.0), 2.0)).b, 3.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converting:
    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        self.w = jnp.asarray(self.w)


class Module(eqx.Module):
    a: float
    b: float


@jax.tree_util.register_pytree_with_keys_class
class Unwrapping:
    def __init__(self, w, b):
        self.w, self.b = pg.unwrap(w), pg.unwrap(b)

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), vars(self)[name]) for name in "wb"], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_freeze_goes_around_a_class_that_takes_wrappers_apart_and_around_modules():
    frozen = pg.freeze(Converting(2.0, 3.0), "w")
    assert isinstance(frozen, NonDiff)
    assert pg.is_nondiff(frozen, "w")
    assert not pg.is_nondiff(frozen, "b")
    for below, held in [("w", [True, True, False]), ("w.a", [True, False, False])]:
        frozen = pg.freeze(Unwrapping(Module(1.0, 2.0), 3.0), below)
        assert isinstance(frozen, NonDiff)
        assert [pg.is_nondiff(frozen, path) for path in ("w.a", "w.b", "b")] == held
        assert jax.tree.leaves(pg.unwrap(frozen)) == [1.0, 2.0, 3.0]
        assert isinstance(pg.thaw(frozen, below), Unwrapping)
    frozen = pg.freeze(jax.tree_util.Partial(lambda a, b: a * b, 2.0, b=3.0), "[1].b")
    assert frozen() == 6.0
    assert pg.is_nondiff(frozen, "[1].b")
    assert not pg.is_nondiff(frozen, "[0][0]")


def test_replacing_another_field_keeps_static_data():
    model = Configured(2.0, {"g": (1.0, 1.0), "n": 3})
    selected, rest = pg.partition(model)
    assert pg.combine(dataclasses.replace(selected, w=selected.w * 2), rest).w == 4.0
    gradient = pg.grad(lambda m: m.w * sum(m.cfg["g"]))(model)
    assert jax.tree.structure(dataclasses.replace(gradient, w=0.0)) == jax.tree.structure(gradient)
    assert dataclasses.replace(model, cfg={"g": 1.0}).cfg == {"g": 1.0}
    with pytest.raises(errors.PartsError, match="both hold `w`"):
        pg.combine(selected, rest, selected)


def test_a_node_beside_a_held_leaf_of_its_own():
    @pg.dataclass
    class Model:
        a: float
        p: float = pg.field(nondiff=True, default=3.0)

    f = lambda m: m.a * m.p
    node, p = pg.grad(f, wrt=lambda m: (m, m.p))(Model(2.0))
    assert (node.a, node.p, p) == (3.0, None, 2.0)
    p, node = pg.grad(f, wrt=lambda m: (m.p, m))(Model(2.0))
    assert (node.a, node.p, p) == (3.0, None, 2.0)


def test_freezing_twice_is_freezing_once_for_a_dataclass_inside_a_module():
    class Around(eqx.Module):
        k: Any
        c: Any

    trees = [
        Around(RBF({"x": 1.0, "n": 2}, 2.0), 3.0),
        Around(RBF(1.0, 2.0), 3),
        Around([RBF(1.0, [2.0, 3])], 3.0),
        {"m": Around(RBF({"x": 1.0, "n": 2}, Around(1.0, 2)), 3.0)},
    ]
    for tree in trees:
        paths = [path for path, _ in pg.items(tree)]
        for wrt in (None, RBF, Around, lambda m: m, *paths):
            once = pg.freeze(tree, wrt)
            assert jax.tree.structure(pg.freeze(once, wrt)) == jax.tree.structure(once), (tree, wrt)
