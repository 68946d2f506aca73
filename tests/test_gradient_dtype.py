"""`dtype=`: gradients of narrow leaves accumulate and arrive in a wider dtype, and values do not change."""

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P

import partgrad as pg
from helpers.tables import in_turn, table

B, F = jnp.bfloat16, jnp.float32
MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
ROWS, STEPS = 256, 16


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape).astype(B)


W, X, C = random(0, 8, 5), random(1, STEPS, ROWS, 8), random(2, STEPS, ROWS, 5)


def exact(x=X, c=C):
    """The gradient of the sum of `c * (x @ w)`, in NumPy's double precision."""
    return np.einsum("srw,srd->wd", np.asarray(x, np.float64), np.asarray(c, np.float64))


def total(product, c):
    return jnp.sum(product.astype(F) * c.astype(F))


def scanned(body):
    def f(w):
        step = lambda sums, own: (sums + total(body(w, own[0]), own[1]), None)
        return jax.lax.scan(step, jnp.float32(0.0), (X, C))[0]

    return f


def carried(w):
    """The weights are carried along, as in a `fori_loop` over a model and its state."""
    step = lambda state, own: ((state[0], state[1] + total(own[0] @ state[0], own[1])), None)
    return jax.lax.scan(step, (w, jnp.float32(0.0)), (X, C))[0][1]


def split(w):
    f = lambda w, x, c: jax.lax.psum(total(x @ w, c), "i")
    run = jax.shard_map(f, mesh=MESH, in_specs=(P(), P("i"), P("i")), out_specs=P())
    return run(w, X.reshape(-1, 8), C.reshape(-1, 5))


# The same sum of products in which the weights go through everything that moves numbers.
PROGRAMS = {
    "one product": lambda w: total(X.reshape(-1, 8) @ w, C.reshape(-1, 5)),
    "a scan": scanned(lambda w, x: x @ w),
    "a scan that carries": carried,
    "jit": scanned(jax.jit(lambda w, x: x @ w)),
    "checkpoint": scanned(jax.checkpoint(lambda w, x: x @ w)),
    "cond": scanned(lambda w, x: jax.lax.cond(x[0, 0] < 100, lambda w: x @ w, lambda w: x @ w + 1, w)),
    "transposed": scanned(lambda w, x: jnp.einsum("dw,rw->rd", w.T, x)),
    "float32 inside": scanned(lambda w, x: x.astype(F) @ w.astype(F)),
    "float32 results": scanned(lambda w, x: jnp.matmul(x, w, preferred_element_type=F)),
    "vmap": lambda w: jnp.sum(jax.vmap(lambda x, c: total(x @ w, c))(X, C)),
    "shard_map": split,
    "double_where": lambda w: pg.double_where(scanned(lambda w, x: x @ w))(w),
    "stacked layers": lambda w: jax.lax.scan(
        lambda sums, own: (sums + total(X.reshape(-1, 8) @ own, C.reshape(-1, 5)), None), jnp.float32(0.0), w[None]
    )[0],
}


@table("program, is_jitted", in_turn(PROGRAMS, [False, True]), quick=3)
def test_contributions_meet_in_the_wide_dtype(program, is_jitted):
    f, compiled = PROGRAMS[program], jax.jit if is_jitted else lambda f: f
    value, gradient = compiled(pg.value_and_grad(f, dtype=F))(W)
    plain, narrow = compiled(pg.value_and_grad(f))(W)
    assert value == plain
    assert gradient.dtype == F
    error = lambda own: np.linalg.norm(np.asarray(own, np.float64) - exact()) / np.linalg.norm(exact())
    assert error(gradient) < 1e-6 < 1e-3 < error(narrow)


@pytest.mark.slow
def test_what_is_added_multiplied_and_looked_up():
    """A bias, a scale and an embedding, which have many contributions each, of ones and of a power of two."""
    rows = jnp.zeros(1000, int)
    tree = {"bias": jnp.ones(4, B), "scale": jnp.ones(4, B), "table": jnp.ones((3, 4), B)}
    f = lambda p: jnp.sum((p["table"][rows] * p["scale"] + p["bias"]).astype(F)) * 1.0078125
    expected = {"bias": jnp.full(4, 1007.8125), "scale": jnp.full(4, 1007.8125)}
    for compiled in (lambda f: f, jax.jit):
        gradient = compiled(pg.grad(f, dtype=F))(tree)
        np.testing.assert_array_equal(gradient["table"][0], expected["bias"])
        for name, own in expected.items():
            np.testing.assert_allclose(gradient[name], own, rtol=1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**16), is_jitted=st.booleans(), is_checkpointed=st.booleans(), steps=st.integers(1, 4))
def test_values_are_the_same_bit_for_bit_and_gradients_agree(seed, is_jitted, is_checkpointed, steps):
    tree = {"w": random(seed, 6, 6), "b": random(seed + 1, 6), "s": random(seed + 2, 6), "wide": jnp.ones(6)}
    x = random(seed + 3, 3, 6)

    def f(p):
        def step(h, _):
            h = jax.nn.gelu(h @ p["w"] + p["b"]) * p["s"]
            return (h / (1 + jnp.max(jnp.abs(h)))).astype(B), p["w"].T.sum()

        step = jax.checkpoint(step) if is_checkpointed else step
        h, sums = jax.lax.scan(step, x, None, length=steps)
        return jnp.sum(h.astype(F) * p["wide"]) + jnp.sum(jnp.linalg.norm(p["w"].astype(F))) + sums[0].astype(F)

    compiled = jax.jit if is_jitted else lambda f: f
    value, gradient = compiled(pg.value_and_grad(f, dtype=F))(tree)
    plain, narrow = compiled(jax.value_and_grad(f))(tree)
    assert value == plain
    for name, own in gradient.items():
        assert own.dtype == F
        np.testing.assert_allclose(own, narrow[name].astype(F), rtol=0.05, atol=0.05 * float(jnp.abs(own).max()))


@pytest.mark.slow
def test_every_transform_and_selector():
    f = scanned(lambda w, x: x @ w)
    np.testing.assert_allclose(pg.vjp(f, W, dtype=F)[1](1.0)[0], exact(), rtol=1e-4)
    value, pull = jax.jit(lambda w: pg.vjp(f, w, dtype=F))(W)
    np.testing.assert_allclose(pull(2 * jnp.ones_like(value))[0], 2 * exact(), rtol=1e-4)
    accumulated = jax.new_ref(jnp.zeros(W.shape))
    pg.vjp(f, W, dtype=F)[1].with_refs(accumulated)(1.0)
    np.testing.assert_allclose(accumulated[...], exact(), rtol=1e-4)
    both = lambda p: f(p["w"]) + jnp.sum(checkpoint_name(p["w"] * 2, "h").astype(F)) + p["n"]
    wrt = {"w": "w", "h": pg.intermediate("h"), "norm": pg.path("n")}
    found = pg.grad(both, wrt=wrt, dtype=F)({"w": W, "n": 1.0})
    np.testing.assert_allclose(found["w"], exact() + 2, rtol=1e-4)
    assert found["h"].dtype == F
    assert found["norm"] == 1.0
    element = pg.grad(lambda p: f(p["w"]), wrt=lambda p: p["w"][0], dtype=F, double_where=True)({"w": W})
    np.testing.assert_allclose(element, exact()[0], rtol=1e-4)
    # Two leaves that are one array.
    tied = pg.grad(lambda p: f(p[0]) + 2 * f(p[1]), dtype=F)([W, W])
    np.testing.assert_allclose(tied, [exact(), 2 * exact()], rtol=1e-4)


@pytest.mark.slow
def test_second_order_and_vmap():
    f = lambda w: jnp.sum(jnp.sin((X[0] @ w).astype(F)))
    inner = lambda w: jnp.sum(pg.grad(f, dtype=F)(w) ** 2)
    plain = lambda w: jnp.sum(jax.grad(f)(w) ** 2)
    wide = W.astype(F)
    for transform in (jax.grad, jax.jacfwd):
        found, expected = jax.jit(lambda *at, of=transform: (of(inner)(at[0]), of(plain)(at[1])))(W, wide)
        assert jnp.linalg.norm(found.astype(F) - expected) < 0.02 * jnp.linalg.norm(expected)
    several = jnp.stack([W, 2 * W])
    found = jax.vmap(pg.grad(f, dtype=F))(several)
    np.testing.assert_allclose(found[1], pg.grad(f, dtype=F)(2 * W), rtol=1e-5)


def test_leaves_that_are_wide_keep_their_dtype():
    with jax.enable_x64(True):
        tree = {"half": jnp.ones(2, "float16"), "single": jnp.ones(2, F), "double": jnp.ones(2), "z": jnp.ones(2) * 1j}
        f = lambda p: sum(jnp.sum(jnp.real(own).astype(float)) for own in p.values())
        for wide, expected in ((F, [F, F]), (jnp.float64, [float, float]), (B, [jnp.float16, F])):
            found = pg.grad(f, dtype=wide)(tree)
            assert [found["half"].dtype, found["single"].dtype] == expected
            assert [found["double"].dtype, found["z"].dtype] == [float, complex]


@pytest.mark.slow
def test_models_of_equinox_and_flax():
    mlp = eqx.nn.MLP(8, 5, 16, 2, key=jax.random.key(0))
    mlp = jax.tree.map(lambda leaf: leaf.astype(B) if eqx.is_inexact_array(leaf) else leaf, mlp)
    loss = lambda m, x: jnp.mean(jax.vmap(m)(x).astype(F) ** 2)
    value, gradient = eqx.filter_jit(pg.value_and_grad(loss, dtype=F))(mlp, X[0])
    plain, narrow = eqx.filter_jit(eqx.filter_value_and_grad(loss))(mlp, X[0])
    assert value == plain
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(narrow), strict=True):
        assert one.dtype == F
        np.testing.assert_allclose(one, other.astype(F), rtol=0.1, atol=1e-3)

    model = nnx.Sequential(
        nnx.Linear(8, 5, param_dtype=B, dtype=B, rngs=nnx.Rngs(0)), nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    )
    before = model.layers[1].mean[...]
    gradient = pg.grad(lambda m, x: jnp.mean(m(x).astype(F) ** 2), dtype=F)(model, X[0])
    assert all(leaf.dtype == F for leaf in jax.tree.leaves(gradient))
    # What a module changes in place is still written back.
    assert (model.layers[1].mean[...] != before).any()


def memory(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_that_of_a_version_by_hand():
    w, x = random(0, 24, 256, 256) / 16, random(1, 512, 256)

    def f(w, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].astype(F))

    by_hand = lambda w, x: jax.value_and_grad(lambda wide: f(wide.astype(B), x))(w.astype(F))
    # On JAX 0.12 the one by hand takes less than a gradient in bfloat16 does.
    expected = max(memory(by_hand, w, x), memory(jax.value_and_grad(f), w, x))
    assert memory(pg.value_and_grad(f, dtype=F), w, x) <= 1.05 * expected


@pytest.mark.parametrize("given", ["wide", int, jnp.complex64, 32, jnp.float64])
def test_what_is_no_dtype_of_gradients_is_refused(given):
    for use in (pg.grad, pg.value_and_grad, lambda f, **own: pg.vjp(f, 1.0, **own)):
        with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`dtype` is .*floating dtype.*jax.numpy.float32"):
            use(jnp.sin, dtype=given)
