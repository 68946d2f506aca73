"""Treedefs that compare equal but differ: what was planned for one tree is not used for another."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad import NonDiff


class Module(eqx.Module):
    w: jax.Array
    n: typing.Any = eqx.field(static=True)


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


def test_a_model_is_not_equal_to_one_whose_arrays_were_donated():
    gone, model = (Scaled(jnp.ones(2) + number) for number in (0.0, 1.0))
    assert jax.jit(gone)(1.0).tolist() == [1.0, 1.0]
    gone.a.delete()
    assert jax.jit(model)(1.0).tolist() == [2.0, 2.0]
    assert model != gone
    assert gone == gone


@pg.dataclass
class Scaled:
    a: jax.Array

    def __call__(self, x):
        return self.a * x
