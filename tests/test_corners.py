"""Corners: constructions, marks and parts that two attacks on the library found wrong."""

import copy
import dataclasses
import typing

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad import NonDiff, Static, errors

Any = typing.Any
ONES = jnp.ones(2)


@pg.dataclass
class Configured:
    w: Any
    cfg: Any = pg.field(static=True)


@pg.dataclass
class Pair:
    w: Any
    b: Any


# --- construction ------------------------------------------------------------------------------------------------


def test_factories_of_marked_fields():
    @pg.dataclass
    class Model:
        p: Any = pg.field(nondiff=True, default_factory=lambda: jnp.ones(3))
        q: Any = pg.field(default_factory=lambda: NonDiff(3.0))
        r: Any = pg.field(default_factory=list)

    model = Model()
    assert (model.p.shape, model.q, model.r) == ((3,), 3.0, [])
    assert repr(model) == "Model(p=NonDiff([1., 1., 1.]), q=NonDiff(3.0), r=[])"
    assert Model(q=1.0).q == 1.0


def test_post_init_under_an_init_by_hand_sees_held_plain_values():
    @pg.dataclass
    class Base:
        p: Any = pg.field(nondiff=True)
        s: Any = pg.field(init=False, default=None)

        def __post_init__(self):
            self.s = jax.lax.mul(self.p, 2.0)

    @pg.dataclass
    class Child(Base):
        def __init__(self, p):
            super().__init__(p)

    for cls in (Base, Child):
        assert jax.grad(lambda x, cls=cls: cls(x).s)(3.0) == 0.0


def test_replace_with_a_typo_on_a_class_with_its_own_init():
    @pg.dataclass
    class Model:
        period: Any
        c: Any

        def __init__(self, x):
            self.period, self.c = x, 2 * x

    with pytest.raises(errors.DataclassError, match=r"has no field `perido`[\s\S]*write `period`"):
        dataclasses.replace(Model(1.0), perido=9.0)
    assert dataclasses.replace(Model(1.0), period=9.0).period == 9.0


def test_an_undecorated_subclass_of_a_class_with_its_own_init_subclass():
    seen = []

    @pg.dataclass
    class Base:
        a: Any

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    class Child(Base):
        def __init__(self):
            self.a = 1.0

    assert seen == ["Child"]
    with pytest.raises(errors.DataclassError, match="`Child` derives .* not decorated"):
        Child()


def test_a_copy_made_while_building_is_frozen():
    copies = []

    @pg.dataclass
    class Model:
        a: Any

        def __post_init__(self):
            copies.append(copy.copy(self))

    Model(1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        copies[0].a = 5.0


def test_fields_of_mutable_instances_cannot_be_deleted():
    @pg.dataclass(frozen=False)
    class Model:
        a: Any

    model = Model(1.0)
    with pytest.raises(errors.DataclassError, match=r"cannot delete field `Model.a`[\s\S]*instance.a = None"):
        del model.a


# --- static data -------------------------------------------------------------------------------------------------


def test_auxiliary_data_in_static_data_is_compared_by_type():
    class Module(eqx.Module):
        w: Any
        n: Any = eqx.field(static=True)

    f = jax.jit(lambda k: k.w * (2.0 if k.cfg.n is True else 3.0))
    assert (f(Configured(1.0, Module(2.0, True))), f(Configured(1.0, Module(2.0, 1)))) == (2.0, 3.0)
    assert Static(Module(2.0, 1)) != Static(Module(2.0, 1.0))
    assert Static({1: 2}) != Static({True: 2})


def test_containers_in_static_data_are_refused_at_any_depth():
    for cfg, path, function in [
        (Pair(1.0, {"g": 2.0, "n": 3}), "cfg.b", lambda k: k.cfg.b["g"]),
        ({"s": NonDiff({"g": 2.0, "n": 3})}, "cfg.s", lambda k: k.cfg["s"].value["g"]),
        ([Pair(1.0, {"g": 2.0, "n": 3})], "cfg[0].b", lambda k: k.cfg[0].b["g"]),
        (Configured(2.0, {"g": 2.0, "n": 3}), "cfg", lambda k: k.cfg.cfg["g"]),
    ]:
        for wrt in (path, function):
            with pytest.raises(errors.SelectionError, match="static[\\s\\S]*make it a field of its own"):
                pg.grad(lambda k: k.w, wrt=wrt)(Configured(3.0, cfg))


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


# --- plans and parts ---------------------------------------------------------------------------------------------


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


def test_a_container_that_jax_cannot_flatten():
    with pytest.raises(errors.SelectionError, match=r"a container that JAX cannot flatten[\s\S]*Fix: use dict keys"):
        pg.partition({"a": 1.0, "b": 2.0}, lambda m: {1: m["a"], "b": m["b"]})


def test_a_static_constant_says_so():
    with pytest.raises(
        errors.NoMatchError, match=r"it returned 3 \(int\), which is not a part of the tree; static data is not a leaf"
    ):
        pg.partition(Configured(1.0, 3), lambda m: m.cfg)


def test_nested_wrappers_are_one_mark():
    assert repr(Pair(jax.tree.map(NonDiff, NonDiff(1.0)), 2.0)) == "Pair(w=NonDiff(1.0), b=2.0)"
    np.testing.assert_array_equal(jax.grad(lambda m: m.w * m.b)(Pair(NonDiff(3.0), 2.0)).b, 3.0)


def test_each_on_a_tree_without_nodes():
    for tree in (0.0, (), None):
        with pytest.raises(errors.NoMatchError, match="fits no part of the tree"):
            pg.partition(tree, pg.each(lambda n: n["a"]))
