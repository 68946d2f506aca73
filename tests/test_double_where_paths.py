"""Paths that are not taken, in vector fields, loops and custom derivatives: no NaN."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import partgrad as pg

MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


SHARDED = PartitionSpec("i")


wrapped = pg.double_where


def equal(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


AT_ZERO = np.array([0.0, 1.0], np.float32)


def across(body, out=SHARDED):
    mapped = jax.shard_map(body, mesh=MESH, in_specs=SHARDED, out_specs=out, check_vma=False)
    return lambda x: mapped(x).sum()


def gathered(v):
    gather = lambda v: lax.all_gather(v, "i", tiled=True)
    return jnp.where(gather(v) > 0, gather(jnp.log(v)), 0.0)


def permuted(v):
    return jnp.where(v > 0, lax.ppermute(jnp.log(v), "i", [(0, 0)]), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "truth"),
    [
        pytest.param(lambda x: jnp.where(np.tile(AT_ZERO > 0, 2), jnp.tile(jnp.log(x), 2), 0.0).sum(), [0, 2]),
        pytest.param(across(gathered, PartitionSpec(None)), [0, 1]),
        pytest.param(across(permuted), [0, 1]),
    ],
    ids=["tile", "all_gather", "ppermute"],
)
def test_a_path_not_taken(f, truth):
    equal(jax.grad(wrapped(f))(AT_ZERO), truth)


def solved(adjoint):
    def f(a):
        field = lambda t, y, a: -y * jnp.where(a > 0, jnp.sqrt(a), 1.0)
        solve = lambda: diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Euler(), 0.0, 1.0, 0.5, jnp.float32(1.0), a, adjoint=adjoint, max_steps=2
        )
        return solve().ys[-1]

    return f


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [diffrax.RecursiveCheckpointAdjoint(), diffrax.BacksolveAdjoint()], ids=str)
def test_a_selection_in_a_vector_field(adjoint):
    equal(jax.grad(wrapped(solved(adjoint)))(np.float32(0.0)), 0.0)


def test_a_wrapped_body_twice_in_reverse():
    body = wrapped(lambda c: jnp.where(c > 0, jnp.log(c), 0.0))
    f = lambda x: lax.scan(lambda c, _: (body(c) + 1.0, None), x, None, length=2)[0].sum()
    equal(jax.jacrev(jax.jacrev(f))(AT_ZERO), [[0, 0], [0, -2]])


def test_a_custom_derivative_in_a_loop_twice():
    f = lambda x: lax.scan(lambda c, _: (jax.nn.softplus(c), None), x, None, length=1)[0]
    equal(jax.jacrev(jax.jacfwd(wrapped(f)))(0.0), 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
@pytest.mark.parametrize("where", ["into", "inside", "out of", "by index"])
def test_auto_axes_on_a_mesh_of_explicit_axes(derivative, where):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(AT_ZERO, SHARDED)
        automatic = lambda f: jax.sharding.auto_axes(f, out_sharding=SHARDED)
        chosen = lambda x, y: jnp.where(x > 0, y, 0.0)
        f = {
            "into": lambda x: automatic(chosen)(x, jnp.log(x)),
            "inside": lambda x: automatic(lambda x: chosen(x, jnp.log(x)))(x),
            "out of": lambda x: chosen(x, automatic(jnp.log)(x)),
            "by index": lambda x: chosen(x, jnp.log(x)).at[np.array([1, 0])].get(out_sharding=SHARDED),
        }[where]
        wanted = {jax.grad: [0.0, 1.0], jax.hessian: [[0.0, 0.0], [0.0, -1.0]]}
        equal(derivative(wrapped(lambda x: f(x).sum()))(x), wanted[derivative])
