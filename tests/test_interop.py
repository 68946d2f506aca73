"""The same calls on models of every kind."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import partgrad as pg
from helpers.models import Config, Flax, Point, composite, is_differentiable, trees_equal
from helpers.tables import table
from partgrad import NonDiff

SHARED = jnp.array([1.0, 2.0])


def objective(model):
    """A smooth scalar in which every floating leaf takes part."""
    leaves = list(filter(is_differentiable, jax.tree.leaves(model)))
    return sum(jnp.sum(jnp.sin((i + 1.0) * leaf)) for i, leaf in enumerate(leaves)) ** 2


MODELS = {
    "flax": Flax(Flax(jnp.ones(2))),
    "namedtuple": Point(Point(jnp.ones(2), 3), jnp.array(0.5)),
    "dict of lists": {"a": [jnp.ones(2), jnp.zeros(())], "b": [], "n": 2, "none": None},
    "tied": {"a": SHARED, "b": [SHARED, SHARED]},
    "partgrad": jax.tree.map(jnp.asarray, composite()),
    "equinox": eqx.nn.MLP(2, 1, 3, 2, key=jax.random.key(0)),
    "static data": Config(jnp.ones(2)),
    "wrapped": {"net": NonDiff(Flax(jnp.ones(2))), "w": jnp.array(2.0)},
}


@table("name", MODELS)
def test_every_call_works_on(name):
    model = MODELS[name]
    first = next(path for path, free in zip(*leaf_paths(model), strict=True) if free)
    for wrt in (
        None,
        first,
        pg.each(lambda node: node) & pg.path(first),
        pg.matching(lambda path, leaf: path == first),
    ):
        selected, rest = pg.partition(model, wrt)
        assert trees_equal(pg.combine(selected, rest), model)
        closed = lambda part, rest=rest: objective(pg.combine(part, rest))
        want = jax.grad(closed)(selected)
        got = pg.grad(objective, wrt=wrt)(model)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        vector, unravel = pg.ravel(model, wrt)
        assert len(unravel.names) == vector.size
        again = unravel(vector)
        assert jax.tree.structure(again) == jax.tree.structure(model)
        assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))
        assert trees_equal(pg.replace(model, wrt, pg.select(model, wrt)), model)
        if not (wrt is None or wrt == first):
            continue
        hessian = jax.jit(jax.hessian(lambda v, unravel=unravel: objective(unravel(v))))(vector)
        product = pg.hvp(objective, wrt=wrt)(model, jax.tree.map(jnp.ones_like, got))
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(product)])
        np.testing.assert_allclose(flat, hessian @ jnp.ones_like(vector), rtol=1e-4, atol=1e-4)
    optimiser = optax.adamw(0.1)
    selected, rest = pg.partition(model)
    updates, _ = optimiser.update(pg.grad(objective)(model), optimiser.init(selected), selected)
    assert jax.tree.structure(pg.apply_updates(selected, updates)) == jax.tree.structure(selected)
    assert len(pg.summary(model).rows) == len(jax.tree.leaves(model))
    assert trees_equal(pg.thaw(pg.freeze(model, first), first), model)


def leaf_paths(model):
    rows = pg.summary(model).rows
    return [row.path for row in rows], [row.status == "differentiated" for row in rows]


def test_tied_arrays_are_selected_one_by_one():
    model = MODELS["tied"]
    gradient = pg.grad(lambda m: (m["a"] * m["b"][0] ** 2).sum(), wrt=lambda m: (m["a"], m["b"][0]))(model)
    assert [g.tolist() for g in gradient] == [[1.0, 4.0], [2.0, 8.0]]


@pytest.mark.slow
def test_a_large_tree():
    tree = {"layers": [{"w": np.float32(1.0), "b": np.zeros(2, np.float32), "n": 1} for _ in range(3_334)]}
    selected, rest = pg.partition(tree, "layers[*].w")
    assert len(jax.tree.leaves(selected)) == 3_334
    assert len(jax.tree.leaves(rest)) == 6_668
    assert pg.select(tree, lambda t: t["layers"][-1]["b"][1]) == 0.0
    assert pg.is_nondiff(pg.freeze(tree, "layers[7]"), "layers[7]")
    assert "['layers'][0..3333]['b']" in str(pg.summary(tree))


@table("transform", [jax.jit, jax.checkpoint, lambda f: lambda m: jax.vmap(f)(stacked(m))[0]])
def test_under_and_around_transforms_to_depth_three(transform):
    model = {"a": jnp.array(0.7), "b": jnp.array(1.3), "n": jnp.array(2)}
    f = lambda m: m["a"] ** 3 * jnp.sin(m["b"]) * m["n"]
    once = transform(pg.grad(transform(f), wrt="a"))
    twice = transform(pg.jacfwd(once, wrt="b"))
    thrice = pg.jacrev(twice, wrt="a")(model)
    want = jax.grad(jax.grad(jax.grad(lambda a, b: a**3 * jnp.sin(b) * 2), argnums=1))(0.7, 1.3)
    np.testing.assert_allclose(thrice, want, rtol=1e-5)
    stepped = jax.lax.scan(lambda m, _: (m, once(m)), model, None, length=2)[1]
    np.testing.assert_allclose(stepped, 2 * [once(model)], rtol=1e-6)


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)
