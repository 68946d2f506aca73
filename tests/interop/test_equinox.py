from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decay import Decay, assert_fitted, loss, start

import partgrad as pg

pytestmark = pytest.mark.library("equinox")


class Scaled(eqx.Module):
    """An equinox module around a partgrad model."""

    curve: Decay
    scale: jax.Array
    name: str = eqx.field(static=True, default="scaled")

    def __call__(self, t):
        return self.scale * self.curve(t)


def train(model, loss, steps=400):
    """As the equinox pages write it."""
    optimiser = optax.adam(0.05)

    @eqx.filter_jit
    def run(model):
        arrays, static = eqx.partition(model, eqx.is_array)

        def step(_, carry):
            arrays, state = carry
            updates, state = optimiser.update(pg.grad(loss)(eqx.combine(arrays, static)), state)
            return pg.apply_updates(arrays, updates), state

        carry = arrays, optimiser.init(pg.partition(arrays)[0])
        return eqx.combine(jax.lax.fori_loop(0, steps, step, carry)[0], static)

    return run(model)


def test_partgrad_inside_equinox():
    """a pg.dataclass inside an `eqx.Module`, trained under `filter_jit`"""
    model = pg.freeze(Scaled(start(), jnp.array(1.0)), "scale")
    fitted = train(model, lambda m: loss(lambda t: m(t)))
    assert_fitted(fitted.curve)


@pg.dataclass
class Residual:
    """A partgrad model around equinox modules, with a function among its fields."""

    curve: Decay
    correction: eqx.nn.MLP
    activation: Any = pg.field(static=True, default=jax.nn.tanh)

    def __call__(self, t):
        return self.curve(t) + 1e-3 * self.activation(jax.vmap(self.correction)(t[:, None])[:, 0])


def test_equinox_inside_partgrad():
    """an `eqx.nn.MLP` inside a pg.dataclass; its layers frozen by their class"""
    mlp = eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0))
    model = pg.freeze(Residual(start(), mlp), pg.of_type(eqx.nn.Linear))
    assert [path for path, _ in pg.items(model)] == ["curve.amplitude", "curve.rate"]
    fitted = train(model, lambda m: loss(lambda t: m(t)))
    assert_fitted(fitted.curve, 5e-2)
    np.testing.assert_array_equal(fitted.correction.layers[0].weight, mlp.layers[0].weight)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.head(x), state


def test_state():
    """a model with `eqx.nn.State` (a batch norm) that is frozen but for its head"""
    make = lambda: Normed(eqx.nn.BatchNorm(3, "batch", mode="batch"), eqx.nn.Linear(3, 1, key=jax.random.key(1)))
    model, state = eqx.nn.make_with_state(make)()
    model = pg.freeze(model, "norm")
    x = jax.random.normal(jax.random.key(2), (32, 3)) * 4 + 1
    optimiser = optax.sgd(0.3)

    def squares(model, state):
        y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return ((y[:, 0] - (x - x.mean(axis=0)) @ jnp.array([1.0, -1.0, 2.0]) - 3) ** 2).mean(), state

    @eqx.filter_jit
    def step(model, state, rule):
        gradient, state = pg.grad(squares, has_aux=True)(model, state)
        updates, rule = optimiser.update(gradient, rule)
        return pg.apply_updates(model, updates), state, rule

    rule = optimiser.init(eqx.filter(pg.partition(model)[0], eqx.is_array))
    for _ in range(60):
        model, state, rule = step(model, state, rule)
    np.testing.assert_allclose(model.head.weight[0], jnp.array([1.0, -1.0, 2.0]) * x.std(axis=0), rtol=1e-2)
    np.testing.assert_allclose(model.head.bias, [3.0], rtol=1e-2)


def test_serialisation(tmp_path):
    """`tree_serialise_leaves` and back, of a model with marks"""
    model = Residual(start(), eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0)))
    model = pg.freeze(model, "correction")
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_array(leaf) else leaf, model)
    again = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", blank)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert eqx.tree_equal(again, model)


def test_tree_at():
    """`tree_at` on a model of which a part is frozen"""
    frozen = pg.freeze(Scaled(start(), jnp.array(1.0)), "scale")
    changed = eqx.tree_at(lambda m: m.curve.rate, frozen, jnp.array(3.0))
    assert pg.is_nondiff(changed, "curve.level")
    assert pg.is_nondiff(changed, "scale")
    np.testing.assert_allclose(
        pg.grad(lambda m: m(jnp.array(1.0)), wrt="curve.amplitude")(changed), np.exp(-3), rtol=1e-6
    )
    # A leaf of a frozen module, addressed as if it were not frozen.
    layers = pg.freeze(eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0)), pg.of_type(eqx.nn.Linear))
    changed = eqx.tree_at(lambda m: m.layers[1].bias, layers, jnp.array([5.0]))
    np.testing.assert_allclose(changed(jnp.zeros(1)) - layers(jnp.zeros(1)), 5.0 - layers.layers[1].bias, rtol=1e-5)
