"""flax (nnx, linen, serialization), quax and penzai: networks of other makes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decay import Decay, assert_fitted, loss, start

import partgrad as pg

X = jax.random.normal(jax.random.key(0), (32, 2), jnp.float32)
TARGET = X @ jnp.array([[1.0], [-2.0]], jnp.float32) + 3.0


def descend(gradient, parameters, steps=200):
    """Adam on whatever has a gradient."""
    optimiser = optax.adam(0.1)

    def step(_, carry):
        parameters, state = carry
        updates, state = optimiser.update(gradient(parameters), state)
        return pg.apply_updates(parameters, updates), state

    state = optimiser.init(jax.eval_shape(gradient, parameters))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return jax.jit(lambda carry: jax.lax.fori_loop(0, steps, step, carry))((parameters, state))[0]


@pytest.mark.library("flax.nnx", lines="graph, state = nnx.split(model)")
def test_nnx():
    """train one layer of an nnx model, the other left as it is"""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(2, 6, rngs=rngs)
            self.head = nnx.Linear(6, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.body(x))

    model = Net(nnx.Rngs(0))
    graph, state = nnx.split(model)
    before = state["body"]["kernel"].get_value()
    squares = lambda state: ((nnx.merge(graph, state)(X) - TARGET) ** 2).mean()
    state = descend(pg.grad(squares, wrt="head.**"), state)
    nnx.update(model, state)
    np.testing.assert_allclose(model(X), TARGET, atol=1e-2)
    np.testing.assert_array_equal(model.body.kernel.get_value(), before)


@pytest.mark.library("flax.linen")
def test_linen():
    """train one layer of a linen model, selected by the path in its variables"""
    nn = pytest.importorskip("flax.linen")
    net = nn.Sequential([nn.Dense(6), nn.Dense(1)])
    variables = net.init(jax.random.key(0), X)
    squares = lambda variables: ((net.apply(variables, X) - TARGET) ** 2).mean()
    trained = descend(pg.grad(squares, wrt="params.layers_1.*"), variables)
    np.testing.assert_allclose(net.apply(trained, X), TARGET, atol=1e-2)
    body = [v["params"]["layers_0"]["kernel"] for v in (variables, trained)]
    np.testing.assert_array_equal(*body)


@pytest.mark.library("flax.linen", lines="pg.unwrap(variables)")
def test_linen_frozen():
    """a frozen part of the variables of a linen model, given to `apply`"""
    nn = pytest.importorskip("flax.linen")
    net = nn.Dense(1)
    variables = pg.freeze(net.init(jax.random.key(0), X), "params.bias")
    gradient = pg.grad(lambda variables: ((net.apply(pg.unwrap(variables), X) - TARGET) ** 2).mean())(variables)
    assert [path for path, _ in pg.items(gradient)] == ["['params']['kernel']"]


@pytest.mark.library("flax.serialization", lines="serialization.to_bytes(jax.tree.leaves(model))")
def test_serialization():
    """`to_bytes` and `from_bytes` of a pg.dataclass"""
    serialization = pytest.importorskip("flax.serialization")
    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))
    saved = serialization.to_bytes(jax.tree.leaves(model))
    leaves, structure = jax.tree.flatten(start())
    again = structure.unflatten(serialization.from_bytes(leaves, saved))
    assert_fitted(again)


@pytest.mark.library("quax")
def test_quax():
    """an adapter that is a quax array (LoRA), its weight held by a mark"""
    quax = pytest.importorskip("quax")
    from quax.examples import lora

    weight = jax.random.normal(jax.random.key(0), (1, 2), jnp.float32)
    array = lora.LoraArray(weight, rank=1, stop_gradient=False, key=jax.random.key(1), allow_materialise=True)
    model = pg.freeze({"w": array, "b": jnp.zeros(1, jnp.float32)}, "w._w")
    squares = lambda m: (
        (quax.quaxify(lambda w, x: jax.vmap(lambda x: w @ x)(x))(m["w"], X) + m["b"] - TARGET) ** 2
    ).mean()
    trained = descend(pg.grad(squares), model)
    assert float(squares(trained)) < 1e-3
    assert pg.is_nondiff(trained, "w._w")


@pytest.mark.library("penzai")
def test_penzai():
    """`pz.select` on a pg.dataclass, and pg.grad of a penzai structure"""
    pz = pytest.importorskip("penzai.pz")
    model = pz.select(start()).at(lambda m: m.rate).set(jnp.array(3.0))
    model = pz.select(model).at(lambda m: m.amplitude).apply(lambda a: 2 * a)
    assert_fitted(model)

    @pz.pytree_dataclass
    class Pair(pz.Struct):
        curve: Decay
        scale: jax.Array

    pair = Pair(model, jnp.array(2.0))
    gradient = pg.grad(lambda p: p.scale * p.curve(1.0), wrt="scale")(pair)
    np.testing.assert_allclose(gradient, model(1.0))
    gradient = pg.grad(lambda p: p.scale * p.curve(1.0))(pair)
    assert [path for path, _ in pg.items(gradient)] == ["curve.amplitude", "curve.rate", "scale"]


@pytest.mark.library("paramax", lines="selected, rest = pg.partition(model)")
def test_paramax():
    """`paramax.non_trainable` and a positive parameter in one model"""
    paramax = pytest.importorskip("paramax")
    model = {
        "curve": paramax.Parameterize(
            lambda amplitude, rate, level: Decay(amplitude, jnp.exp(rate), level),
            jnp.array(1.0),
            jnp.array(0.0),
            paramax.NonTrainable(jnp.array(0.5)),
        )
    }
    selected, rest = pg.partition(model)
    of = lambda selected: paramax.unwrap(pg.combine(selected, rest))["curve"]
    assert_fitted(of(descend(pg.grad(lambda selected: loss(of(selected))), selected, steps=400)))
