"""`chunk_size=`: Jacobians and Hessians a few columns or rows at a time, equal to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.tables import table

TRANSFORMS = [pg.jacfwd, pg.jacrev, pg.jacobian, pg.hessian]
MODEL = {"w": np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(4, 3), "b": np.float32([0.1, 0.2, 0.3]), "a": 2.0}
SELECTORS = {"all": None, "one": "w", "two": lambda p: (p["a"], p["b"])}


def several(p):
    return {"y": jnp.sin(p["w"] @ p["b"]) * p["a"], "s": jnp.sum(p["w"] ** 3), "none": jnp.zeros((0, 2)) * p["a"]}


def assert_close(whole, pieces):
    assert jax.tree.structure(whole) == jax.tree.structure(pieces)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@table(
    "transform, wrt, chunk_size",
    TRANSFORMS,
    SELECTORS,
    [1, 2, 5, 7, 12, 16, 100],
    most=4,
    kind=lambda transform, *_: transform,
)
def test_pieces_equal_the_whole(transform, wrt, chunk_size):
    wrt = SELECTORS[wrt]
    whole, pieces = transform(several, wrt=wrt), transform(several, wrt=wrt, chunk_size=chunk_size)
    assert_close(*jax.jit(lambda model: (whole(model), pieces(model)))(MODEL))


@table("transform, double_where", TRANSFORMS, [False, True], quick=2)
def test_pieces_within_other_transforms(transform, double_where):
    options = {"double_where": double_where, "argnums": (0, 1), "wrt": ("b", None)}
    f = lambda p, x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0) * p["b"].sum() ** 2
    batch = lambda chunk_size: jax.jit(jax.vmap(transform(f, chunk_size=chunk_size, **options), (None, 0)))
    xs = jnp.arange(6.0).reshape(3, 2)
    assert_close(batch(None)(MODEL, xs), batch(3)(MODEL, xs))


@table("transform", TRANSFORMS)
def test_the_auxiliary_output_is_of_the_point_itself(transform):
    f = lambda p: (p["w"] ** 2, {"sum": p["w"].sum()})
    whole, pieces = (transform(f, wrt="w", has_aux=True, chunk_size=size)(MODEL) for size in (None, 5))
    assert_close(whole, pieces)


@table("transform", [pg.jacfwd, pg.jacrev])
def test_holomorphic_functions(transform):
    f, z = (lambda p: jnp.exp(p["z"] * 1j)), {"z": jnp.array([1.0 + 2.0j, 0.5j, 3.0])}
    assert_close(transform(f, holomorphic=True)(z), transform(f, holomorphic=True, chunk_size=2)(z))


@pytest.mark.parametrize("chunk_size", [0, -1, True, 2.5, "3"])
def test_a_size_that_is_not_a_positive_integer_is_refused(chunk_size):
    with pytest.raises(pg.errors.ArgumentError, match=f"(?s)chunk_size.*{chunk_size}.*chunk_size=100"):
        pg.hessian(several, chunk_size=chunk_size)


@table("transform", [pg.jacfwd, pg.jacrev, pg.hessian])
def test_temporaries_are_those_of_a_piece(transform):
    def f(x):
        for _ in range(3):
            x = jnp.tanh(x @ x.T / 20 + x)
        return jnp.sum(x**2) if transform is pg.hessian else x

    def temporaries(chunk_size):
        compiled = jax.jit(transform(f, chunk_size=chunk_size)).lower(jnp.ones((20, 20))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert 10 * temporaries(4) < temporaries(None)


@pytest.mark.slow
def test_integer_outputs_and_functions_that_branch_on_values():
    f = lambda x: (x**2 if x[0] > 0 else x, jnp.argmax(x))
    x = jnp.array([0.3, 0.7])
    assert_close(pg.jacfwd(f)(x), pg.jacfwd(f, chunk_size=1)(x))
    g = lambda x: jnp.sum(f(x)[0] ** 2)
    assert_close(pg.hessian(g)(x), pg.hessian(g, chunk_size=1)(x))


@pytest.mark.slow
@table("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_on_a_mesh(transform, kind):
    axis_type = jax.sharding.AxisType.Auto if kind == "shard_map" else jax.sharding.AxisType.Explicit
    mesh, spec = jax.make_mesh((1,), ("i",), axis_types=(axis_type,)), jax.sharding.PartitionSpec("i")
    f, x = lambda x: jnp.sum(x**3), jnp.arange(4.0)
    if kind == "shard_map":
        run = lambda t: jax.shard_map(t, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    else:
        run = lambda t: t(jax.device_put(x, jax.NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh):
        assert_close(run(jax.jit(transform(f))), run(jax.jit(transform(f, chunk_size=2))))
