"""`nonfinite="report"`: the arguments of the first gradient that is not finite are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

X = jnp.ones(2)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    if found := pg.last_nonfinite():
        found.clear()


def loss(model, x):
    return jnp.sum(jnp.sqrt(model["w"] * x)) * model["b"]


def model(w):
    return {"w": jnp.asarray(w), "b": pg.NonDiff(2.0), "n": 3}


gradient = pg.grad(loss, nonfinite="report")
GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([0.0, 2.0])
CONTEXTS = {
    "eager": lambda w: gradient(model(w), X),
    "jit": jax.jit(lambda w: gradient(model(w), X)),
    "vmap": lambda w: jax.vmap(lambda w: gradient(model(w), X))(jnp.stack([GOOD, w, 3 * w])),
    "vmap of vmap": jax.jit(
        jax.vmap(lambda x: jax.vmap(lambda w: gradient(model(w), X))(jnp.stack([GOOD, x])), in_axes=0)
    ),
    "scan": lambda w: jax.lax.scan(lambda c, w: (c, gradient(model(w), X)["w"]), 0.0, jnp.stack([GOOD, w])),
    "shard_map": jax.jit(
        lambda w: jax.shard_map(lambda w: gradient(model(w), X)["w"], mesh=MESH, in_specs=P("i"), out_specs=P("i"))(w)
    ),
    "value_and_grad": lambda w: pg.value_and_grad(loss, nonfinite="report")(model(w), X),
    "has_aux": lambda w: pg.grad(lambda m, x: (loss(m, x), "aux"), has_aux=True, nonfinite="report")(model(w), X),
    "keyword": lambda w: pg.grad(loss, argnames="model", nonfinite="report")(model=model(w), x=X),
}


def last():
    jax.effects_barrier()
    return pg.last_nonfinite()


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_bad_call_is_kept(context, capfd):
    given = (lambda w: w[None]) if context == "vmap of vmap" else lambda w: w
    CONTEXTS[context](given(GOOD))
    assert last() is None
    CONTEXTS[context](given(BAD))
    found = last()
    kept = found.kwargs.get("model") or found.args[0]
    np.testing.assert_array_equal(kept["w"], BAD)
    assert isinstance(kept["b"], pg.NonDiff)
    (finding,) = (finding for finding in found.report.findings if finding.severity == "error")
    assert (finding.kind, finding.operation, finding.leaves) == ("nan", "sqrt", ("['w']",))
    assert capfd.readouterr().err.count("is not finite") == 1


def test_only_the_first_is_kept_until_it_is_dropped(capfd):
    CONTEXTS["jit"](BAD)
    CONTEXTS["jit"](0 * BAD)
    np.testing.assert_array_equal(last().args[0]["w"], BAD)
    assert capfd.readouterr().err.count("`loss`") == 1
    last().clear()
    assert last() is None
    CONTEXTS["jit"](0 * BAD)
    np.testing.assert_array_equal(last().args[0]["w"], 0 * BAD)


def test_a_named_held_leaf_and_donated_buffers():
    step = pg.grad(lambda m: jnp.sqrt(m["b"]), wrt="b", nonfinite="report")
    given = {"b": pg.NonDiff(jnp.zeros(()))}
    jax.jit(step, donate_argnums=0)(given)
    found = last()
    assert found.args[0]["b"].value == 0.0
    assert not found.report.ok


def test_values_are_those_without_it():
    for w in (GOOD, BAD):
        np.testing.assert_array_equal(gradient(model(w), X)["w"], pg.grad(loss)(model(w), X)["w"])


def test_second_derivatives_pass():
    second = jax.jacfwd(lambda w: gradient(model(w), X)["w"])(GOOD)
    np.testing.assert_allclose(second, jax.jacfwd(lambda w: pg.grad(loss)(model(w), X)["w"])(GOOD))


def test_it_is_ignored_by_default_and_refuses_other_words():
    pg.grad(loss)(model(BAD), X)
    assert last() is None
    with pytest.raises(pg.errors.ArgumentError, match="(?s)`nonfinite` is 'raise'.*'ignore' or 'report'"):
        pg.grad(loss, nonfinite="raise")


def test_it_costs_a_reduction():
    w = jnp.ones((200, 200))
    f = lambda w: jnp.sum(jnp.tanh(w @ w) ** 2)
    flops = lambda g: jax.jit(g).lower(w).compile().cost_analysis()["flops"]
    assert flops(pg.grad(f, nonfinite="report")) < 1.02 * flops(pg.grad(f))
