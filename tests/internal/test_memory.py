"""What partgrad keeps alive, and for how long."""

import functools
import gc
import operator
import typing
import weakref

import jax
import jax.numpy as jnp
import pytest

import partgrad as pg
from partgrad._marks import hold
from partgrad._skeletons import skeletons
from partgrad._trees.reach import reaches_array


@pg.dataclass
class Configured:
    w: float
    cfg: typing.Any = pg.field(static=True)


@pytest.mark.slow
def test_closures_in_a_structure_do_not_stay_alive():
    big = jnp.ones(1000)
    alive = weakref.ref(big)
    model = Configured(1.0, (lambda b: lambda x: x * b)(big))
    pg.grad(lambda m: m.w**2)(model)
    del model, big
    gc.collect()
    assert alive() is None


@pytest.mark.slow
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


def test_of_large_skeletons_few_are_kept(monkeypatch):
    monkeypatch.setattr(skeletons, "_skeletons", type(skeletons._skeletons)())
    monkeypatch.setattr(skeletons, "_LEAVES", 10)
    for size in (1, 2, 3, 4, 5, 30, 6):
        pg.select([1.0] * size, "[0]")
        kept = [len(skeleton.slots) for skeleton in skeletons._skeletons.values()]
        assert kept[-1] == size
        assert sum(kept[:-1]) <= 10
    assert kept == [6]


@pytest.mark.slow
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


def test_nothing_is_remembered_of_held_values_after_a_trace():
    jax.eval_shape(lambda x: pg.NonDiff(x), 1.0)
    gc.collect()
    assert not hold._held
