"""SoftJAX: its hard and soft operators, declared as surrogates, have the derivatives of its straight-through ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

X = jnp.array([0.3, -1.2, 0.45, 2.4])
OPERATORS = ("abs", "heaviside", "relu", "round", "sign", "sort", "rank", "max", "min", "median", "argmax")


@jax.custom_jvp
def half(x):
    return x * x


half.defjvp(lambda primals, tangents: (half(*primals), primals[0] * tangents[0]))


@pytest.mark.parametrize("name", OPERATORS)
def test_softjax(name):
    """straight-through operators, checked: right ones pass, planted errors do not"""
    softjax = pytest.importorskip("softjax")
    soft, straight = getattr(softjax, name), getattr(softjax, f"{name}_st")
    gate = pg.surrogate(lambda x: soft(x, mode="hard"), smooth=soft)
    weights = jax.random.normal(jax.random.key(0), jnp.shape(straight(X)))
    loss = lambda f: lambda x: jnp.sum(f(x) * weights)
    np.testing.assert_array_equal(gate(X), soft(X, mode="hard"))
    np.testing.assert_allclose(jax.grad(loss(gate))(X), jax.grad(loss(straight))(X), rtol=1e-6)
    report = pg.check(loss(gate), progress=False)(X)
    assert report.ok, report
    # By hand, it is cut by a `stop_gradient`, and nobody can say whether it is right.
    assert pg.check(loss(straight), progress=False)(X).verdict == "stopped"
    planted = pg.surrogate(lambda x: soft(x, mode="hard"), smooth=lambda x: soft(x) + half(x).sum())
    assert pg.check(loss(planted), progress=False)(X).verdict == "error"
    nan = pg.surrogate(lambda x: soft(x, mode="hard"), smooth=lambda x: soft(x) + jnp.sqrt(x - x).sum())
    assert pg.check(loss(nan), progress=False)(X).verdict == "error"
