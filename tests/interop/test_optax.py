import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decay import Decay, assert_fitted, loss, start

import partgrad as pg

pytestmark = pytest.mark.library("optax")


def descend(step, carry, steps=400):
    """`step` maps a carry to the next, inside a compiled loop."""
    return jax.jit(lambda carry: jax.lax.fori_loop(0, steps, lambda _, carry: step(carry), carry))(carry)


@pytest.mark.library(lines="optimiser.init(pg.partition(model)[0])")
def test_loop():
    """a loop with Adam: state for what is fitted only"""
    optimiser = optax.adam(0.05)

    def step(carry):
        model, state = carry
        updates, state = optimiser.update(pg.grad(loss)(model), state)
        return pg.apply_updates(model, updates), state

    model = start()
    model, state = descend(step, (model, optimiser.init(pg.partition(model)[0])))
    assert_fitted(model)
    assert len(jax.tree.leaves(state)) == 1 + 2 * 2


@pytest.mark.library(lines="selected, rest = pg.partition(start())")
def test_apply_updates_of_optax():
    """`optax.apply_updates`, with weight decay that leaves alone what is held"""
    optimiser = optax.adamw(0.05, weight_decay=1e-5)
    selected, rest = pg.partition(start())

    def step(carry):
        selected, state = carry
        gradient = jax.grad(lambda selected: loss(pg.combine(selected, rest)))(selected)
        updates, state = optimiser.update(gradient, state, selected)
        return optax.apply_updates(selected, updates), state

    selected, _ = descend(step, (selected, optimiser.init(selected)))
    assert_fitted(pg.combine(selected, rest))


@pytest.mark.library(lines="mask = pg.mask(model)")
def test_masked():
    """`optax.masked` around the optimiser of a whole model, with plain `jax.grad`"""
    model = {"curve": start()}
    mask = pg.mask(model)
    optimiser = optax.masked(optax.adam(0.05), mask)

    def step(carry):
        model, state = carry
        updates, state = optimiser.update(jax.grad(lambda m: loss(m["curve"]))(model), state)
        return optax.apply_updates(model, updates), state

    model, _ = descend(step, (model, optimiser.init(model)))
    assert_fitted(model["curve"])


@pytest.mark.library(lines="lambda tree: pg.mask(tree)")
def test_masks_of_a_model_with_call():
    """masks and labels for a model that has a `__call__`"""
    # A mask tree of this model could be called itself, and optax calls what it can.
    optimiser = optax.adamw(0.05, weight_decay=1e-5, mask=lambda tree: pg.mask(tree))

    def step(carry):
        model, state = carry
        updates, state = optimiser.update(jax.grad(loss)(model), state, model)
        return optax.apply_updates(model, updates), state

    model, _ = descend(step, (start(), optimiser.init(start())))
    assert_fitted(model)


@pytest.mark.library(lines='lambda tree: pg.label(tree, {"fast": "rate"}, default="slow")')
def test_multi_transform():
    """a rate for each group by `multi_transform`, one of them on a schedule"""
    schedule = optax.exponential_decay(0.1, 100, 0.5)
    optimiser = optax.multi_transform(
        {"fast": optax.adam(schedule), "slow": optax.adam(0.05)},
        lambda tree: pg.label(tree, {"fast": "rate"}, default="slow"),
    )

    def step(carry):
        model, state = carry
        updates, state = optimiser.update(pg.grad(loss)(model), state)
        return pg.apply_updates(model, updates), state

    model, _ = descend(step, (start(), optimiser.init(pg.partition(start())[0])))
    assert_fitted(model)


@pytest.mark.library(lines="selected, rest = pg.partition(start())")
def test_lbfgs():
    """`optax.lbfgs`, whose line search calls the function itself"""
    selected, rest = pg.partition(start())
    function = lambda selected: loss(pg.combine(selected, rest))
    optimiser, value_and_grad = optax.lbfgs(), optax.value_and_grad_from_state(function)

    def step(carry):
        selected, state = carry
        value, gradient = value_and_grad(selected, state=state)
        updates, state = optimiser.update(gradient, state, selected, value=value, grad=gradient, value_fn=function)
        return optax.apply_updates(selected, updates), state

    selected, _ = descend(step, (selected, optimiser.init(selected)), steps=20)
    assert_fitted(pg.combine(selected, rest), 1e-3)


def test_a_held_leaf_that_is_named():
    """fit a held parameter by naming it, the others constant"""
    optimiser, wrt = optax.adam(0.05), "level"
    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(-1.0))

    def step(carry):
        level, state = carry
        gradient = pg.grad(loss, wrt)(pg.replace(model, wrt, level))
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(level, updates), state

    level, _ = descend(step, (model.level, optimiser.init(model.level)))
    np.testing.assert_allclose(level, 0.5, rtol=1e-2)
