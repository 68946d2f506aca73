"""Structures that are equal but differ, classes with constructors of their own, static data with marks inside."""

import dataclasses
import functools
import gc
import inspect
import operator
import typing
import weakref

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad import NonDiff, errors
from partgrad._selection import structures
from partgrad._trees.reach import reaches_array

pytestmark = pytest.mark.internal


class Module(eqx.Module):
    w: jax.Array
    n: typing.Any = eqx.field(static=True)


@pg.dataclass
class Configured:
    w: float
    cfg: typing.Any = pg.field(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converting:
    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        self.w = jnp.asarray(self.w)


class Pair(eqx.Module):
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


# --- equal but different -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrt", ["w", None, lambda m: m.w, pg.each(lambda m: m.w)])
def test_a_plan_made_for_an_equal_structure_does_not_bring_its_data_along(wrt):
    indexed = pg.grad(lambda m: jnp.sum(m.w[m.n] ** 2), wrt=wrt)
    as_array = lambda gradient: np.asarray(jax.tree.leaves(gradient)[0])
    np.testing.assert_array_equal(as_array(indexed(Module(jnp.arange(3.0), 1))), [0, 2, 0])
    np.testing.assert_array_equal(as_array(indexed(Module(jnp.arange(3.0), True))), [0, 2, 4])
    signed = pg.value_and_grad(lambda m: m.w / m.n, wrt=wrt)
    assert signed(Module(1.0, 0.0))[0] == np.inf
    assert signed(Module(1.0, -0.0))[0] == -np.inf


def test_mutable_data_of_one_tree_does_not_become_anothers():
    first, second = Module(1.0, [1, 2]), Module(1.0, [1, 2])
    pg.partition(first)
    pg.combine(*pg.partition(second)).n.append(9)
    assert first.n == [1, 2]
    pg.partition({1: 1.0, 2: 3})
    assert list(pg.partition({True: 1.0, 2: 3})[0]) == [True, 2]
    held = lambda n: {"h": NonDiff(Module(2.0, n)), "x": 1.0}
    named = pg.grad(lambda t: t["x"] * t["h"].w * (t["h"].n is True), wrt=lambda t: t["h"].w)
    assert (named(held(1)), named(held(True))) == (0.0, 1.0)


def test_foreign_data_whose_comparison_raises():
    class Aux:
        def __init__(self, array):
            self.array = array

        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    class Foreign:
        def __init__(self, w, aux):
            self.w, self.aux = w, aux

    jax.tree_util.register_pytree_node(Foreign, lambda f: ((f.w,), f.aux), lambda aux, c: Foreign(c[0], aux))
    g = pg.grad(lambda t: (t[0].w ** 2).sum())
    for _ in range(2):
        assert g((Foreign(jnp.ones(2), Aux(np.arange(3))), 2))[0].w.tolist() == [2.0, 2.0]
        mask = (Foreign(True, Aux(range(3))), False)
        assert pg.partition((Foreign(3.0, Aux(range(3))), 2.0), mask)[0][0].w == 3.0

    @pg.dataclass
    class Holder:
        x: typing.Any

    assert (Holder(Foreign(1.0, Aux(np.arange(3)))) == Holder(Foreign(1.0, Aux(np.arange(3))))) is False


def test_masks_that_cannot_be_compared():
    """They share a structure, for which the plan of the first is kept."""

    class Aux:
        def __eq__(self, other):
            if self is other:
                return True
            raise ValueError("ambiguous")

        def __hash__(self):
            return 3

    class Foreign:
        def __init__(self, w, aux):
            self.w, self.aux = w, aux

    jax.tree_util.register_pytree_node(Foreign, lambda f: ((f.w,), f.aux), lambda aux, c: Foreign(c[0], aux))
    tree = [Foreign(1.0, Aux()), 2.0]
    for _ in range(2):
        assert jax.tree.leaves(pg.partition(tree, [Foreign(True, Aux()), False])[0]) == [1.0]


# --- constructors ------------------------------------------------------------------------------------------------


def test_a_callable_selects_in_a_class_that_converts_its_arguments():
    assert pg.grad(lambda m: m.w * m.b, wrt=lambda m: m.b)(Converting(2.0, 3.0)) == 2.0
    assert pg.grad(lambda t: t[0].w * t[0].b, wrt=lambda t: (t[0].w, t[0].b))([Converting(2.0, 3.0)]) == (3.0, 2.0)


def test_a_class_that_refuses_none_says_what_partgrad_did():
    with pytest.raises(ValueError, match="None is not a valid value") as caught:
        pg.partition(Converting(2.0, 3.0), "b")
    assert "Fix: let the constructor accept None" in caught.value.__notes__[0]


def test_freeze_goes_around_a_class_that_takes_wrappers_apart_and_around_modules():
    frozen = pg.freeze(Converting(2.0, 3.0), "w")
    assert isinstance(frozen, NonDiff)
    assert pg.is_nondiff(frozen, "w")
    assert not pg.is_nondiff(frozen, "b")
    for below, held in [("w", [True, True, False]), ("w.a", [True, False, False])]:
        frozen = pg.freeze(Unwrapping(Pair(1.0, 2.0), 3.0), below)
        assert isinstance(frozen, NonDiff)
        assert [pg.is_nondiff(frozen, path) for path in ("w.a", "w.b", "b")] == held
        assert jax.tree.leaves(pg.unwrap(frozen)) == [1.0, 2.0, 3.0]
        assert isinstance(pg.thaw(frozen, below), Unwrapping)
    frozen = pg.freeze(jax.tree_util.Partial(lambda a, b: a * b, 2.0, b=3.0), "[1].b")
    assert frozen() == 6.0
    assert pg.is_nondiff(frozen, "[1].b")
    assert not pg.is_nondiff(frozen, "[0][0]")


def test_nodes_that_a_class_builds_anew_on_every_access():
    tree = flax.core.freeze({"params": {"dense": {"w": 1.0, "b": 2.0}, "out": {"w": 3.0}}})
    gradient = pg.grad(lambda p: p["params"]["dense"]["w"] ** 2, wrt=lambda p: p["params"]["dense"])(tree)
    assert list(jax.tree.leaves(gradient)) == [0.0, 2.0]


# --- static data with marks inside -------------------------------------------------------------------------------


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


# --- classes -----------------------------------------------------------------------------------------------------


def test_init_variables_keep_the_order_of_declaration():
    seen = []

    @pg.dataclass
    class Model:
        w: float
        a: dataclasses.InitVar[str] = pg.field(kw_only=True)
        b: dataclasses.InitVar[str]

        def __post_init__(self, a, b):
            seen.append((a, b))

    Model(1.0, "B", a="A")
    assert seen == [("A", "B")]


def test_every_undecorated_subclass_is_told():
    @pg.dataclass
    class Base:
        a: float = 1.0

    class Silent(Base):
        def __init__(self):
            pass

    @dataclasses.dataclass(frozen=True)
    class Standard(Base):
        b: float = 1.0

    class Plain(Base):
        pass

    @pg.dataclass
    class Below(Plain):
        c: float = 2.0

    @pg.dataclass
    class Further(Below):
        d: float = 3.0

    with pytest.raises(errors.DataclassError, match="is not decorated itself"):
        Plain()
    for cls in (Silent, Standard):
        with pytest.warns(
            UserWarning, match=rf"is a `{cls.__name__}`[\s\S]*dataclass `Base`[\s\S]*@partgrad.dataclass above"
        ):
            pg.mask({cls.__name__: cls(), "y": 1.0}, None)
    assert jax.tree.leaves(Below()) == [1.0, 2.0]
    assert jax.tree.leaves(Further(5.0)) == [5.0, 2.0, 3.0]


def test_a_dataclass_that_jax_does_not_know_is_an_error_where_it_holds_arrays():
    @dataclasses.dataclass
    class Kernel:
        a: typing.Any

    for model in (Kernel(jnp.ones(2)), {"b": [Kernel({"c": np.ones(2)})]}, {"b": Kernel(Kernel(jnp.ones(())))}):
        with pytest.raises(
            errors.ForgottenDecoratorError, match=r"(?s)is a `Kernel`.*Fix: write @partgrad.dataclass above"
        ):
            pg.grad(lambda t: 0.0)(model)
    around = Kernel(None)
    around.a = around
    assert pg.mask({"b": Kernel(around), "x": 1.0}, None) == {"b": False, "x": True}
    assert pg.mask({"b": Kernel(3), "x": 1.0}, None) == {"b": False, "x": True}
    # The plan for this structure is kept.
    with pytest.raises(errors.ForgottenDecoratorError, match=r"`\['b'\]` is a `Kernel`"):
        pg.mask({"b": Kernel(jnp.ones(2)), "x": 1.0}, None)
    assert pg.grad(lambda t: t["x"])({"b": pg.Static(3), "x": 1.0})["x"] == 1.0


def test_generated_code_is_shown_by_debuggers():
    @pg.dataclass
    class Model:
        a: float
        b: float = 2.0

    assert inspect.getsource(Model.__init__).startswith("def __init__(self, a, b=")


def test_other_decorators_are_refused():
    def decorated(*decorators):
        class Model:
            a: float

        return functools.reduce(lambda cls, decorate: decorate(cls), decorators, Model)

    plain = dataclasses.dataclass(frozen=True)

    def registered(cls):
        jax.tree_util.register_pytree_node(cls, lambda node: ((node.a,), None), lambda _, children: cls(*children))
        return cls

    for decorators in [(pg.dataclass, pg.dataclass), (plain, pg.dataclass), (registered, pg.dataclass)]:
        with pytest.raises(errors.DataclassError, match=r"or registered with JAX, already[\s\S]*only decorator"):
            decorated(*decorators)

    @dataclasses.dataclass(slots=True, frozen=True)
    class Slotted:
        a: float

    with pytest.raises(errors.DataclassError, match="slots"):
        pg.dataclass(type("Child", (Slotted,), {"__annotations__": {"b": float}}))
    with pytest.raises(errors.DataclassError, match="cannot be a partgrad dataclass: cannot inherit frozen"):
        pg.dataclass(type("Child", (decorated(dataclasses.dataclass),), {}))


# --- memory and arguments ----------------------------------------------------------------------------------------


def test_closures_in_a_structure_do_not_stay_alive():
    big = jnp.ones(1000)
    alive = weakref.ref(big)
    model = Configured(1.0, (lambda b: lambda x: x * b)(big))
    pg.grad(lambda m: m.w**2)(model)
    del model, big
    gc.collect()
    assert alive() is None


def test_selecting_leaves_no_cycle_that_holds_leaves():
    gc.collect()
    gc.disable()
    try:
        w = jnp.ones(3)
        alive = weakref.ref(w)
        for wrt in (lambda t: t["a"], operator.itemgetter("a"), "a", pg.each(lambda t: t["a"])):
            pg.partition({"a": w, "b": 1.0}, wrt)
            pg.freeze({"a": w, "b": 1.0}, wrt)
        del w
        assert alive() is None
    finally:
        gc.enable()


def test_of_large_structures_few_are_kept(monkeypatch):
    monkeypatch.setattr(structures, "_structures", type(structures._structures)())
    monkeypatch.setattr(structures, "_LEAVES", 10)
    for size in (1, 2, 3, 4, 5, 30, 6):
        pg.select([1.0] * size, "[0]")
        kept = [len(structure.slots) for structure in structures._structures.values()]
        assert kept[-1] == size
        assert sum(kept[:-1]) <= 10
    assert kept == [6]


def test_no_tracer_leaks():
    with jax.checking_leaks():
        model = lambda x: Configured(x, lambda y: y * x)
        f = lambda x: pg.grad(lambda m: m.w**2, wrt=lambda m: m.w)(model(x))
        assert jax.jit(f)(3.0) == 6.0


def test_what_reaches_an_array():
    array = jnp.ones(2)
    holds = (lambda b: lambda x: x * b)(array)
    # Its data is all that this node has.
    data = jax.tree.structure([pg.Static(holds)])
    for value in (array, [{"a": (array,)}], holds, functools.partial(max, array), jax.jit(holds), data):
        assert reaches_array(value)
    for value in ("x", 3, None, len, jax.nn.relu, lambda x: x, {1: ("a", 2.0)}, jax.tree.structure({"a": 1})):
        assert not reaches_array(value)


def test_an_argument_named_twice_and_none_at_all():
    f = lambda a, b: a * b
    for argnums in ((0, 0), (0, -2)):
        with pytest.raises(errors.ArgumentError, match="name argument 0 twice"):
            pg.grad(f, argnums=argnums)(1.0, 2.0)
    assert pg.grad(f, argnums=())(1.0, 2.0) == ()
    with pytest.raises(ValueError, match="requires at least 3 positional"):
        pg.grad(f, argnums=-3)(1.0, 2.0)
