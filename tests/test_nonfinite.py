"""`nonfinite="report"`: the arguments of the first gradient that is not finite are kept."""

import datetime
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.tables import in_turn, table

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_second_derivatives_pass():
    second = jax.jacfwd(lambda w: gradient(model(w), X)["w"])(GOOD)
    np.testing.assert_allclose(second, jax.jacfwd(lambda w: pg.grad(loss)(model(w), X)["w"])(GOOD))


def test_it_is_ignored_by_default_and_refuses_other_words():
    pg.grad(loss)(model(BAD), X)
    assert last() is None
    with pytest.raises(pg.errors.ArgumentError, match="(?s)`nonfinite` is 'raise'.*'ignore' or 'report'"):
        pg.grad(loss, nonfinite="raise")


def test_it_costs_a_reduction():
    w, x = jnp.ones((200, 200)), jnp.ones((1000, 200))
    f = lambda w: jnp.sum(jnp.tanh(x @ w) ** 2)
    flops = lambda g: jax.jit(g).lower(w).compile().cost_analysis()["flops"]
    assert flops(pg.grad(f, nonfinite="report")) < 1.001 * flops(pg.grad(f))


def alive():
    jax.effects_barrier()
    gc.collect()
    return len(jax.live_arrays())


def calls():
    g = pg.grad(lambda x: jnp.sum(jnp.tanh(x)), nonfinite="report")
    return {
        "eager": lambda x: g(x),
        "value_and_grad": lambda x: pg.value_and_grad(lambda y: jnp.sum(jnp.tanh(y * x)), nonfinite="report")(x),
        "vmap": lambda x: jax.vmap(g)(jnp.stack([x, x])),
        "vmap of vmap": lambda x: jax.vmap(jax.vmap(g))(jnp.stack([x, x])[None]),
        "vmap of jit": lambda x: jax.vmap(jax.jit(g))(jnp.stack([x, x])),
        "second derivative": lambda x: jax.jacfwd(g)(x),
        "scan": lambda x: jax.lax.scan(lambda carry, row: (carry, g(row)), 0.0, x[None]),
        "jit": jax.jit(g),
    }


@pytest.mark.slow
@pytest.mark.parametrize("context", calls())
def test_nothing_is_kept_alive_while_all_is_well(context):
    call = calls()[context]
    call(jnp.ones(5))
    before = alive()
    for number in range(5):
        call(jnp.full(5, float(number)))
    assert alive() == before


@table("context, value", in_turn(calls(), [1.0, jnp.nan]), quick=0)
def test_no_tracer_leaks(context, value):
    with jax.checking_leaks():
        calls()[context](jnp.full(3, value))
    assert (last() is None) == (value == 1.0)


def test_an_eager_call_compiles_nothing_and_traces_the_function_once(compilations):
    traced, given = [], [jnp.full(5, float(number)) for number in range(4)]
    g = pg.grad(lambda x: (traced.append(1), jnp.sum(jnp.tanh(x)))[1], nonfinite="report")
    g(given[0])
    compilations[0] = 0
    for x in given:
        g(x)
    assert (len(traced), compilations[0]) == (5, 0)


LEAVES = {
    "empty dict": {},
    "timedelta": datetime.timedelta(1),
    "timedelta of NumPy": np.timedelta64(1, "s"),
    "timedeltas": np.array([1, 2], "m8[s]"),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "text": np.array(["a"]),
    "objects": np.array([None]),
    "string": np.str_("a"),
    "key": jax.random.key(0),
    "int": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_any_leaf_may_stand_beside_the_differentiated_ones(leaf):
    f = lambda t, other: jnp.sum(jnp.sqrt(t["w"]))
    call = lambda value: pg.grad(f, nonfinite="report")({"w": jnp.full(2, value), "other": LEAVES[leaf]}, LEAVES[leaf])
    call(1.0)
    assert last() is None
    call(0.0)
    assert str(last().args[1]) == str(LEAVES[leaf])
    # A check takes seconds, and holds every kind of leaf alike.
    assert leaf not in ("key", "objects") or not last().report.ok


def test_a_tree_without_leaves_has_the_gradient_that_jax_says():
    for tree in ((), {}, None):
        assert pg.grad(lambda t: 1.0, nonfinite="report")(tree) == jax.grad(lambda t: 1.0)(tree)


def writes(t, ref):
    ref[...] = ref[...] + 1
    return jnp.sum(jnp.sqrt(t["w"])) * ref[0]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("value", [1.0, 0.0])
def test_references_are_written_once_and_kept_as_copies(wrap, value):
    w, ref = {"w": jnp.full(2, value)}, jax.new_ref(jnp.zeros(2))
    wrap(pg.grad(writes, nonfinite="report"))(w, ref)
    wrap(pg.grad(lambda t: writes(t, ref), nonfinite="report"))(w)
    assert ref[...].tolist() == [2.0, 2.0]
    found = last()
    assert (found is None) == (value == 1.0)
    if found is not None:
        assert found.args[1][...].tolist() == [1.0, 1.0]
        assert {finding.operation for finding in found.report.findings if finding.severity == "error"} == {"sqrt"}
        assert ref[...].tolist() == [2.0, 2.0]
