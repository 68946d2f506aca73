"""carry_over: the state of an optimiser, for another selection."""

import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import partgrad as pg
from helpers.models import RBF, Periodic, Product, Sum

LEAVES = ("a.variance", "a.lengthscale", "b.a.variance", "b.a.lengthscale", "b.b.variance", "b.b.period")


def kernel():
    return Sum(RBF(1.0, 2.0), Product(RBF(0.5, 0.7), Periodic(1.0, 1.3, 1.0)))


def trained(optimiser, model, wrt, steps=3):
    """The state after some steps."""
    free, _ = pg.partition(model, wrt)
    state = optimiser.init(free)
    for _ in range(steps):
        _, state = optimiser.update(jax.tree.map(jnp.ones_like, free), state, free)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", [optax.adam(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9))])
@given(st.sets(st.sampled_from(LEAVES), min_size=1), st.sets(st.sampled_from(LEAVES), min_size=1))
def test_what_goes_on_keeps_its_state_and_what_is_new_starts(optimiser, before, after):
    model = kernel()
    select = lambda names: pg.partition(model, functools.reduce(operator.or_, map(pg.path, sorted(names))))[0]
    state = jax.tree.map(lambda x: x + 1, optimiser.init(select(before)))
    fresh = optimiser.init(select(after))
    old, new = dict(pg.items(state)), dict(pg.items(fresh))
    if not old.keys() & new.keys() and "count" not in getattr(state[0], "_fields", ()):
        with pytest.raises(pg.errors.PartsError, match="no leaf at the same path"):
            pg.carry_over(state, fresh)
        return
    found = pg.carry_over(state, fresh)
    assert jax.tree.structure(found) == jax.tree.structure(fresh)
    for path, leaf in pg.items(found):
        np.testing.assert_array_equal(leaf, old.get(path, new[path]))


def test_marks_take_no_step():
    """A parameter that was held, and is thawed, frozen or named later."""
    optimiser, model = optax.adam(0.1), pg.freeze(kernel(), "b")
    state = trained(optimiser, model, None)
    wider = pg.thaw(model, "b.a")
    found = pg.carry_over(state, optimiser.init(pg.partition(wider)[0]))
    assert int(found[0].count) == 3
    assert float(found[0].mu.a.variance) > 0
    assert float(found[0].mu.b.a.variance) == 0
    named = pg.carry_over(state, optimiser.init(pg.partition(model, pg.path("a.variance") | "b.a.variance")[0]))
    assert float(named[0].mu.a.variance) > 0
    assert float(named[0].mu.b.a.variance) == 0
    assert named[0].mu.a.lengthscale is None
    back = pg.carry_over(found, optimiser.init(pg.partition(model)[0]))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert back[0].mu.a == state[0].mu.a


def test_groups_whose_masks_leave_leaves_out():
    """`optax.MaskedNode` has no leaf where another selection has one."""
    model = {"a": jnp.ones(2), "b": jnp.ones(3)}
    groups = {"slow": "a", "fast": "b"}
    optimiser = optax.multi_transform(
        {"slow": optax.adam(0.1), "fast": optax.adam(1.0), "none": optax.set_to_zero()},
        lambda tree: pg.label(tree, {name: path for name, path in groups.items() if tree[path] is not None}, "none"),
    )
    state = trained(optimiser, model, "a")
    found = pg.carry_over(state, optimiser.init(model))
    inner = found.inner_states
    # Both counted, though the second had nothing to move.
    assert int(inner["slow"].inner_state[0].count) == int(inner["fast"].inner_state[0].count) == 3
    assert (inner["slow"].inner_state[0].mu["a"] > 0).all()
    assert (inner["fast"].inner_state[0].mu["b"] == 0).all()


@pytest.mark.slow
def test_an_equinox_model_under_jit():
    model = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
    optimiser = optax.adam(0.1)
    state = trained(optimiser, model, pg.path("layers[-1]"))
    wide = pg.path("layers[-1]") | "layers[0].bias"
    carry = eqx.filter_jit(lambda state, free: pg.carry_over(state, optimiser.init(free)))
    found = carry(state, pg.partition(model, wide)[0])
    np.testing.assert_array_equal(found[0].nu.layers[-1].weight, state[0].nu.layers[-1].weight)
    assert (found[0].nu.layers[0].bias == 0).all()
    assert found[0].nu.layers[0].weight is None


def test_errors():
    state = optax.adam(0.1).init({"a": jnp.ones(2), "b": None})
    with pytest.raises(
        pg.errors.PartsError, match=r"(?s)shapes at `\[0\]\.mu\['a'\]`.*f32\[3\], got f32\[2\].*begin anew"
    ):
        pg.carry_over(state, optax.adam(0.1).init({"a": jnp.ones(3), "b": None}))
    with pytest.raises(pg.errors.PartsError, match=r"(?s)no leaf at the same path.*optimiser\.init"):
        pg.carry_over({"a": 1.0}, {"b": 1.0})
    assert pg.carry_over((), ()) == ()
