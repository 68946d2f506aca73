"""What a mesh does to a function under `double_where`: batches that it shards, sums that no device has whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import partgrad as pg
from random_programs import compared

BATCH = np.array([[0.0, 1.0, 2.0], [4.0, 0.0, -1.0]])
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh(axis_type):
    return jax.set_mesh(jax.make_mesh((1, 1), ("i", "j"), axis_types=(axis_type,) * 2))


def selected(x):
    return jnp.where(x > 0, jnp.log(x), 0.0)


# Where the examples themselves are: on no axis, on one of their own, and there inside a `shard_map`.
INSIDE = {
    "whole": lambda x: selected(x).sum(),
    "sharded": lambda x: selected(jax.reshard(x, P("j"))).sum(),
    "shard_map": lambda x: jax.shard_map(selected, in_specs=P("j"), out_specs=P("j"))(jax.reshard(x, P("j"))).sum(),
}
DERIVATIVES = {
    "value": (lambda f: f, np.where(BATCH > 0, np.log(np.where(BATCH > 0, BATCH, 1)), 0).sum(-1)),
    "reverse": (jax.grad, np.where(BATCH > 0, 1 / np.where(BATCH > 0, BATCH, 1), 0)),
    "forward": (jax.jacfwd, np.where(BATCH > 0, 1 / np.where(BATCH > 0, BATCH, 1), 0)),
    "one direction": (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], np.sum(BATCH > 0, axis=-1)),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_batch_stays_sharded_over_explicit_axes(inside, derivative):
    transform, wanted = DERIVATIVES[derivative]
    with mesh(EXPLICIT):
        batch = jax.device_put(BATCH, P("i", None))
        found = jax.jit(jax.vmap(transform(pg.double_where(INSIDE[inside]))))(batch)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert jax.typeof(found).sharding.spec[0] == "i"


def summed(x):
    """The cotangent of a parameter that is `reduced` is a sum over devices that nobody has taken."""
    return jax.shard_map(lambda x: jax.lax.pcast(x, "i", to="varying"), out_specs=P("i"))(x).sum()


def test_an_unreduced_cotangent_is_left_to_jax():
    with mesh(EXPLICIT):
        x = jax.device_put(np.arange(4.0), P(reduced={"i"}))
        found, wanted = (jax.make_jaxpr(jax.grad(f))(x) for f in (pg.double_where(summed), summed))
        assert found.out_avals == wanted.out_avals
        assert wanted.out_avals[0].sharding.spec.unreduced == {"i"}


def test_a_shard_map_inside_of_one_over_other_axes():
    half = jax.shard_map(selected, in_specs=P(None, "j"), out_specs=P(None, "j"))

    @jax.jit
    def f(x):
        return jax.shard_map(half, in_specs=P("i"), out_specs=P("i"), check_vma=False, axis_names={"i"})(x).sum()

    with mesh(AUTO):
        found = jax.grad(pg.double_where(f))(BATCH)
        np.testing.assert_allclose(found, DERIVATIVES["reverse"][1], rtol=1e-6)


@pytest.mark.slow
def test_masks_of_a_loop_vary_over_devices_as_its_carry_does():
    steps = [("concatenate", ("backwards", "switch", "across"), 2, 3), ("reciprocal", (), 2, 3)]
    with jax.enable_x64(True):
        x = jnp.array([0.5, 0.0, 2.0, -0.5])
        assert compared("reverse over reverse", steps, "first", x) == ("same", "")
