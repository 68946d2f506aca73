"""What vjp and linearize return is a pytree, and slots serve several threads at once."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from models import RBF, Periodic

X = jnp.array([0.3, 0.6])


def f(k, x):
    return k.variance * jnp.sin(x * k.lengthscale)


KERNEL = RBF(jnp.array(2.0), jnp.array(0.5))
DIRECTION = RBF(jnp.array(1.0), jnp.array(3.0))


@pytest.mark.parametrize("wrt", [None, "variance", ("lengthscale", None)])
def test_the_pullback_leaves_jit_and_vmap(wrt):
    want = pg.vjp(f, KERNEL, X, wrt=wrt)[1](jnp.ones(2))
    value, pull = jax.jit(lambda k, x: pg.vjp(f, k, x, wrt=wrt))(KERNEL, X)
    same(jax.jit(lambda pull, ct: pull(ct))(pull, jnp.ones(2)), want)
    same(pull(jnp.ones(2)), want)
    assert value.shape == (2,)
    pulls = jax.vmap(lambda x: pg.vjp(f, KERNEL, x, wrt=wrt)[1])(jnp.stack([X, X]))
    same(jax.tree.map(lambda g: g[0], jax.vmap(lambda pull: pull(jnp.ones(2)))(pulls)), want)


@pytest.mark.parametrize("wrt", [None, "variance"])
def test_the_linear_map_leaves_jit(wrt):
    tangents = (DIRECTION, jnp.ones(2)) if wrt is None else (1.0,)
    want = pg.linearize(f, KERNEL, X, wrt=wrt)[1](*tangents)
    _, linear = jax.jit(lambda k, x: pg.linearize(f, k, x, wrt=wrt))(KERNEL, X)
    same(jax.jit(lambda linear, *t: linear(*t))(linear, *tangents), want)


def test_what_they_return_has_the_attributes_of_jaxs():
    for ours, jaxs in [(pg.vjp, jax.vjp), (pg.linearize, jax.linearize)]:
        got, want = ours(jnp.sin, 1.0)[1], jaxs(jnp.sin, 1.0)[1]
        for name in (name for name in dir(want) if not name.startswith("_")):
            assert type(getattr(got, name)) is type(getattr(want, name))
        with pytest.raises(AttributeError):
            _ = got._nothing


def test_a_program_is_compiled_once_for_equal_pullbacks():
    apply = jax.jit(lambda pull: pull(jnp.ones(2)))
    for variance in (1.0, 2.0):
        _, pull = jax.jit(lambda k: pg.vjp(f, k, X, wrt=lambda k: k.variance))(RBF(jnp.array(variance), jnp.array(0.5)))
        apply(pull)
    assert apply._cache_size() <= 2


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_threads_that_share_a_structure_see_their_own_shapes():
    def largest(t):
        return max(t.values(), key=lambda leaf: leaf.size)

    def resolve(n):
        tree = {"a": np.zeros(n % 7), "b": np.zeros(3)}
        return [pg.items(tree, wrt)[0][0] for wrt in (largest, pg.matching(lambda path, leaf: leaf.size > 2))]

    def wanted(n):
        return ["['a']" if n % 7 >= 3 else "['b']", "['a']" if n % 7 > 2 else "['b']"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(resolve, range(400))) == list(map(wanted, range(400)))


def test_a_selector_may_select_itself():
    inner = lambda t: t["a"]
    wrt = lambda t: [leaf for leaf in t.values() if leaf.size == pg.select({"a": 1.0, "b": np.zeros(2)}, inner)]
    assert pg.items({"a": np.zeros(1), "b": np.zeros(2)}, wrt)[0][0] == "['a']"


def test_callables_run_on_every_call_and_see_what_changed():
    class Setting:
        field = "variance"

    wrt = lambda k: getattr(k, Setting.field)
    gradient = pg.grad(lambda k: k.variance * k.lengthscale**2, wrt=wrt)
    assert gradient(KERNEL) == 0.25
    Setting.field = "lengthscale"
    assert gradient(KERNEL) == 2.0
    assert pg.grad(lambda k: k.period * k.variance, wrt=lambda k: k.period)(Periodic(2.0, 1.0, 1.0)) == 2.0
