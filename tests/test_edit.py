"""select, replace, mask, is_nondiff, stop_gradient, apply_updates and ravel."""

import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from hypothesis import example, given, strategies as st
from jax.sharding import PartitionSpec

import partgrad as pg
from helpers.messages import refused
from helpers.models import RBF, Linear, Periodic, Point, Sum, composite, loss, trees_equal
from helpers.tables import table
from partgrad import NonDiff, errors
from test_laws import mixed

pytestmark = pytest.mark.core

TREE = {"k": RBF(1.0, NonDiff(2.0)), "lin": Linear(jnp.ones(2), 3.0), "n": 4}


# --- select and replace ------------------------------------------------------------------------------------------


def test_select_returns_the_stored_leaves_in_the_shape_of_the_gradient():
    assert pg.select(TREE, "lin.weight") is TREE["lin"].weight
    assert pg.select(TREE, "k.lengthscale") == 2.0
    bias, kernel = pg.select(TREE, lambda t: (t["lin"].bias, t["k"]))
    assert (bias, kernel.variance, kernel.lengthscale) == (3.0, 1.0, None)
    described = pg.select(TREE, Linear)
    assert described["lin"].weight is TREE["lin"].weight
    assert (described["n"], described["k"].variance) == (None, None)


def test_replace_touches_nothing_else():
    new = pg.replace(TREE, "lin.bias", 9.0)
    assert new["lin"].bias == 9.0
    assert new["lin"].weight is TREE["lin"].weight
    assert new["n"] == 4
    assert repr(pg.replace(TREE, "k.lengthscale", 5.0)["k"]) == "RBF(variance=1.0, lengthscale=NonDiff(5.0))"
    doubled = pg.replace(TREE, lambda t: t["lin"], fn=lambda x: x * 2)
    assert (doubled["lin"].bias, doubled["lin"].weight.tolist()) == (6.0, [2.0, 2.0])
    pair = pg.replace(TREE, lambda t: (t["k"].variance, t["lin"].bias), (7.0, 8.0))
    assert (pair["k"].variance, pair["lin"].bias) == (7.0, 8.0)
    part = pg.replace(TREE, lambda t: t["lin"], Linear(jnp.zeros(2), 0.0))
    assert (part["lin"].bias, part["lin"].weight.tolist()) == (0.0, [0.0, 0.0])
    whole = pg.replace(TREE, None, jax.tree.map(lambda x: -x, pg.select(TREE, None)))
    assert (whole["k"].variance, whole["k"].lengthscale, whole["lin"].bias) == (-1.0, 2.0, -3.0)


def test_a_function_is_applied_or_is_a_value():
    tree = {"w": jnp.ones(2), "f": jnp.tanh, "n": 3}
    assert pg.replace(tree, "w", fn=lambda w: 2 * w)["w"].tolist() == [2.0, 2.0]
    assert pg.replace(tree, "f", jnp.sin)["f"] is jnp.sin
    assert pg.replace(tree, lambda t: (t["f"], t["n"]), (jnp.sin, 4))["f"] is jnp.sin
    partial = jax.tree_util.Partial(jnp.add, 1.0)
    for function in (jnp.sin, float, partial, len, lambda w: w):
        for wrt in ("w", "**", None, "n", lambda t: (t["w"], t["f"])):
            refused(lambda wrt=wrt, f=function: pg.replace(tree, wrt, f), TypeError, "are not functions", "fn=function")
    refused(lambda: pg.replace(tree, "w", (jnp.sin,)), TypeError, "fn=function")
    refused(lambda: pg.replace(tree, "w"), TypeError, "neither a value nor a function")
    refused(lambda: pg.replace(tree, "w", 1.0, fn=jnp.sin), TypeError, "a value and a function")


def test_replace_of_another_shape():
    refused(
        lambda: pg.replace(TREE, "lin", {"weight": 1.0}),
        ValueError,
        "The new value of `replace`",
        "Expected Linear, got dict",
    )
    refused(lambda: pg.replace(TREE, "k", RBF(1.0, 2.0)), ValueError, "The new value of `replace`")
    refused(lambda: pg.replace(TREE, "lin.bias", (1.0,)), ValueError, "Expected a leaf, got tuple")


@example(math.sin, "**")
@given(mixed, st.sampled_from([None, "**", pg.each(lambda n: n["variance"]), lambda t: t]))
def test_what_is_selected_goes_back_to_where_it_was(tree, wrt):
    try:
        selected = pg.select(tree, wrt)
    except errors.SelectionError:
        return
    if jax.tree.leaves(selected):
        assert trees_equal(pg.replace(tree, wrt, selected), tree)
        assert trees_equal(pg.replace(tree, wrt, fn=lambda x: x), tree)


def test_a_function_is_replaced_by_a_function():
    network = {"w": 2.0, "activation": jnp.tanh}
    assert pg.replace(network, "activation", jnp.sin) == {"w": 2.0, "activation": jnp.sin}
    assert pg.replace(network, lambda n: n["activation"], jnp.sin)["activation"] is jnp.sin
    assert pg.replace(network, "**", fn=type) == {"w": float, "activation": type(jnp.tanh)}
    assert pg.replace({"n": 3}, None, fn=jnp.sin) == {"n": 3}


@pytest.mark.parametrize("leaf", [3, "x", True, math.sin, jnp.arange(3), jax.random.key(0)])
def test_a_leaf_of_any_type_is_read_and_replaced(leaf):
    tree = {"k": [leaf, 1.0], "m": 2.0}
    for wrt in ("k[0]", lambda t: t["k"][0]):
        assert pg.select(tree, wrt) is leaf
        assert pg.replace(tree, wrt, "new")["k"] == ["new", 1.0]
    assert pg.items(tree, "k[*]") == [("['k'][0]", leaf), ("['k'][1]", 1.0)]
    assert pg.items(tree, "k") == [("['k'][1]", 1.0)]
    with pytest.raises(errors.NotDifferentiableError):
        pg.partition(tree, "k[0]")


def test_items_are_paths_that_select():
    tree = {"k": RBF(1.0, NonDiff(2.0)), "w": jnp.arange(4.0).reshape(2, 2), "n": 3}
    assert [path for path, _ in pg.items(tree)] == ["['k'].variance", "['w']"]
    assert [path for path, _ in pg.items(tree, "w[:, 1]")] == ["['w'][0,1]", "['w'][1,1]"]
    for wrt in (None, "**", "k.lengthscale", "w[1]", "w[..., 0]"):
        for path, leaf in pg.items(tree, wrt):
            assert jnp.array_equal(pg.select(tree, path), leaf)


# --- labels ------------------------------------------------------------------------------------------------------


def test_labels_have_the_structure_of_the_tree():
    labels = pg.label(TREE, {"slow": "k", "fast": lambda t: t["lin"].bias, None: "n"}, default=0)
    assert jax.tree.structure(labels, is_leaf=lambda x: x is None) == jax.tree.structure(TREE)
    assert (labels["k"].variance, labels["k"].lengthscale) == ("slow", 0)
    assert (labels["lin"].weight, labels["lin"].bias, labels["n"]) == (0, "fast", None)
    assert pg.label(TREE, {}, default=("any", 1))["lin"].bias == ("any", 1)
    refused(lambda: pg.label(TREE, {"a": "lin.weight[0]"}, default=0), ValueError, "`label` works on whole leaves")


def test_groups_of_an_optimiser_for_a_model_that_can_be_called():
    model = jax.tree.map(jnp.asarray, composite())
    selected, rest = pg.partition(model)
    assert callable(selected)
    groups = {"slow": lambda k: k.b.a, "fast": pg.exclude("b.a")}
    optimiser = optax.multi_transform({"slow": optax.sgd(0.1), "fast": optax.sgd(1.0)}, lambda p: pg.label(p, groups))
    gradient = jax.tree.map(jnp.ones_like, selected)
    updates, _ = optimiser.update(gradient, optimiser.init(selected), selected)
    assert updates.b.a.variance == jnp.float32(-0.1)
    assert updates.a.lengthscale == -1.0
    assert pg.combine(pg.apply_updates(selected, updates), rest).b.b.period == model.b.b.period


def test_labels_are_axes_of_vmap():
    batch = {"k": RBF(jnp.ones(3), jnp.ones(())), "b": jnp.ones(())}
    axes = pg.label(batch, {0: "k.variance"}, default=None)
    assert jax.vmap(lambda t: t["k"].variance * t["b"], in_axes=(axes,))(batch).shape == (3,)


def test_updates_of_integers():
    tree = {"n": 3, "w": 1.0}
    gradient = jax.grad(lambda t: t["w"] ** 2, allow_int=True)(tree)
    assert pg.apply_updates(tree, gradient) == {"n": 3, "w": 3.0}


# --- mask and is_nondiff -----------------------------------------------------------------------------------------


def test_mask_has_one_bool_for_each_leaf_and_selects_the_same():
    mask = pg.mask(TREE, lambda t: (t["lin"].bias, t["k"]))
    assert (mask["lin"].weight, mask["lin"].bias, mask["k"].variance, mask["k"].lengthscale) == (
        False,
        True,
        True,
        False,
    )
    assert mask["n"] is False
    assert trees_equal(pg.partition(TREE, mask), pg.partition(TREE, lambda t: (t["lin"].bias, t["k"])))
    assert pg.mask({"n": 3}, None) == pg.mask({"n": 3}) == {"n": False}


def test_a_mask_drives_an_optimiser():
    selected, _ = pg.partition(TREE)
    optimiser = optax.masked(optax.sgd(1.0), pg.mask(selected, "lin.bias"))
    gradient = jax.tree.map(jnp.ones_like, selected)
    updates, _ = optimiser.update(gradient, optimiser.init(selected))
    assert updates["lin"].bias == -1.0


def test_is_nondiff():
    assert pg.is_nondiff(TREE, "k.lengthscale") is True
    assert pg.is_nondiff(TREE, "k") is False
    assert pg.is_nondiff(pg.freeze(TREE, "k"), "k") is True
    assert pg.is_nondiff(composite(), lambda k: k.period) is True
    assert pg.is_nondiff(composite(), None) is False
    refused(lambda: pg.is_nondiff(TREE, "nowhere"), LookupError, "matches nothing")


# --- stop_gradient -----------------------------------------------------------------------------------------------


def test_stop_gradient_holds_in_this_trace_only():
    f = lambda t: t["a"] ** 2 * t["b"] * t["n"]
    tree = {"a": 3.0, "b": 2.0, "n": 1}
    stopped = pg.grad(lambda t: f(pg.stop_gradient(t, "a")))(tree)
    assert (stopped["a"], stopped["b"]) == (0.0, 9.0)
    assert pg.grad(f)(tree)["a"] == 12.0
    assert pg.stop_gradient(tree, "a") == tree
    assert isinstance(pg.stop_gradient(tree, "a")["a"], float)


def test_a_schedule_runs_in_one_compiled_step():
    traces = []

    @jax.jit
    def step(t, frozen):
        traces.append(1)
        return jax.grad(lambda t: (pg.stop_gradient(t, Linear, when=frozen)["lin"].weight ** 2).sum())(t)["lin"].weight

    arrays = {"lin": Linear(jnp.array([1.0, 2.0]), jnp.array(3.0))}
    for frozen, expected in [(True, [0, 0]), (False, [2, 4]), (True, [0, 0])]:
        assert step(arrays, frozen).tolist() == expected
    assert len(traces) == 1


def test_a_condition_for_each_element_and_each_leaf():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    f = lambda t: (t["a"] ** 2).sum() * t["b"]
    by_element = jax.grad(lambda t: f(pg.stop_gradient(t, "a", when=jnp.array([True, False]))))(tree)
    assert by_element["a"].tolist() == [0.0, 12.0]
    by_leaf = jax.grad(lambda t: f(pg.stop_gradient(t, when={"a": False, "b": True})))(tree)
    assert (by_leaf["a"].tolist(), by_leaf["b"]) == ([6.0, 12.0], 0.0)
    refused(lambda: pg.stop_gradient(tree, when={"a": True}), ValueError, "The condition of `stop_gradient`")


# --- apply_updates -----------------------------------------------------------------------------------------------


def test_none_means_stay():
    updates = pg.replace(pg.select(TREE, pg.path("lin.bias") & Linear), Linear, fn=lambda _: 0.5)
    new = pg.apply_updates(TREE, updates)
    assert new["lin"].bias == 3.5
    assert new["lin"].weight is TREE["lin"].weight
    assert (
        pg.apply_updates({"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.ones(2, jnp.float32)})["w"].dtype == jnp.bfloat16
    )


@pytest.mark.parametrize(
    "wrt",
    [
        *("k.variance", "k.lengthscale", "lin.weight[1]", "lin", Linear, pg.path("k.lengthscale") | "lin", None),
        lambda t: (t["k"].variance, t["lin"].bias),
    ],
    ids=lambda wrt: getattr(wrt, "__name__", str(wrt)),
)
def test_updates_in_the_shape_of_a_gradient(wrt):
    f = lambda t: t["k"].variance ** 2 * t["k"].lengthscale + (t["lin"].weight ** 2).sum() * t["lin"].bias
    gradient = pg.grad(f, wrt=wrt)(TREE)
    new = pg.apply_updates(TREE, gradient, wrt=wrt) if wrt is not None else pg.apply_updates(TREE, gradient)
    assert jax.tree.structure(new) == jax.tree.structure(TREE)
    changed = pg.select(new, wrt)
    want = jax.tree.map(lambda leaf, change: leaf + change, pg.select(TREE, wrt), gradient)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, changed, want))
    chosen = {path.partition("[1]")[0] for path, _ in pg.items(TREE, wrt)}
    for (path, leaf), (_, after) in zip(pg.items(TREE, "**"), pg.items(new, "**"), strict=True):
        assert path in chosen or after is leaf


def test_updates_of_a_part_that_stay_or_do_not_fit():
    both = lambda t: (t["k"].variance, t["lin"].weight)
    assert pg.apply_updates(TREE, (0.5, None), wrt=both)["k"].variance == 1.5
    for update, wrt in [((0.5, "x"), both), ((0.5, jnp.ones(3)), both), (0.5, both), ((0.5,), "k.variance")]:
        refused(lambda u=update, w=wrt: pg.apply_updates(TREE, u, wrt=w), ValueError, "this wrt=")
    described = pg.select(TREE, Linear)
    refused(
        lambda: pg.apply_updates(TREE, {**described, "n": 1}, wrt=Linear), ValueError, "None at what is not selected"
    )
    refused(lambda: pg.apply_updates(TREE, 0.5), ValueError, "wrt=")
    for leaf in ("x", jax.random.key(0), len):
        refused(lambda leaf=leaf: pg.apply_updates({"s": leaf}, {"s": 1.0}), ValueError, "`['s']`", "wrt=")
    refused(lambda: pg.apply_updates({"s": 1.0}, {"s": "x"}), ValueError, "`['s']`", "wrt=")


def test_updates_of_another_structure():
    refused(
        lambda: pg.apply_updates({"a": 1.0, "b": 2.0}, {"a": 1.0}),
        ValueError,
        "The updates have a different structure",
        "`['b']`",
    )
    refused(lambda: pg.apply_updates({"a": None}, {"a": 1.0}), ValueError, "at `['a']`", "Expected None, got float")
    refused(lambda: pg.apply_updates([1.0], (1.0,)), ValueError, "Expected list, got tuple")


OPTIMISERS = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5),
    "lion": lambda: optax.lion(0.1, weight_decay=0.5),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.5),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "adafactor": lambda: optax.adafactor(0.1),
    "lbfgs": lambda: optax.lbfgs(),
}


@table("name", OPTIMISERS)
def test_a_training_loop_leaves_what_is_frozen_bit_identical(name):
    model = pg.freeze({"k": jax.tree.map(jnp.float32, composite()), "n": 3}, "k.b.a")
    optimiser = OPTIMISERS[name]()

    def objective(selected, rest):
        return -loss(pg.combine(selected, rest)["k"])

    @jax.jit
    def step(model, state):
        selected, rest = pg.partition(model)
        value, gradient = pg.value_and_grad(objective)(selected, rest)
        extra = {"value": value, "grad": gradient, "value_fn": lambda s: objective(s, rest)} if name == "lbfgs" else {}
        updates, state = optimiser.update(gradient, state, selected, **extra)
        return pg.combine(pg.apply_updates(selected, updates), rest), state

    state, fitted = optimiser.init(pg.partition(model)[0]), model
    for _ in range(4):
        fitted, state = step(fitted, state)
    for path in ("k.a.variance", "k.b.a.variance", "k.b.a.lengthscale", "k.b.b.period"):
        assert np.asarray(pg.select(fitted, path)).tobytes() == np.asarray(pg.select(model, path)).tobytes()
    assert fitted["n"] == 3
    assert pg.select(fitted, "k.b.b.variance") != pg.select(model, "k.b.b.variance")


# --- ravel -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ravel_and_unravel():
    tree = {
        "a": jnp.arange(4.0).reshape(2, 2),
        "b": 5.0,
        "h": NonDiff(1.0),
        "n": 3,
        "c": jnp.array([7.0], jnp.bfloat16),
    }
    vector, unravel = pg.ravel(tree)
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 5.0, 7.0]
    assert unravel.names == ("['a'][0,0]", "['a'][0,1]", "['a'][1,0]", "['a'][1,1]", "['b']", "['c'][0]")
    again = unravel(vector * 2)
    assert again["a"].tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert (again["n"], again["h"].value, again["c"].dtype) == (3, 1.0, jnp.bfloat16)
    part, unravel = pg.ravel(Periodic(1.0, 2.0, 3.0), "period")
    assert part.tolist() == [3.0]
    assert repr(unravel(part * 2)) == "Periodic(variance=1.0, lengthscale=2.0, period=Diff(6.0))"
    empty, unravel = pg.ravel({"n": 3})
    assert (empty.shape, unravel(empty)) == ((0,), {"n": 3})
    mixed_types, unravel = pg.ravel(Point(1.0 + 2.0j, 3.0))
    assert mixed_types.dtype == jnp.complex64
    assert unravel(mixed_types).y.dtype == jnp.float32
    refused(lambda: pg.ravel({"a": 1.0})[1](jnp.ones(2)), ValueError, "Expected shape (1,), got (2,)")


def test_tied_leaves_stay_one_in_a_vector():
    weight = jnp.arange(3.0)
    tree = {"a": weight, "b": [weight, 2.0], "c": jnp.arange(3.0), "h": NonDiff(weight)}
    vector, unravel = pg.ravel(tree, tie=True)
    assert unravel.names == ("['a'][0]", "['a'][1]", "['a'][2]", "['b'][1]", "['c'][0]", "['c'][1]", "['c'][2]")
    new = unravel(2 * vector)
    assert new["a"] is new["b"][0]
    assert (new["c"].tolist(), new["h"].value) == ([0.0, 2.0, 4.0], weight)
    f = lambda t: (t["a"] * t["b"][0]).sum() * t["b"][1]
    gradient = jax.jit(jax.grad(lambda v: f(unravel(v))))(vector)
    np.testing.assert_allclose(gradient[:3], 2 * weight * 2.0)
    assert pg.ravel(tree)[0].shape == (10,)
    assert pg.ravel(tree, "b", tie=True)[1].names[0] == "['b'][0][0]"
    number = 2.0
    assert pg.ravel([number, number], tie=True)[0].shape == (2,)


def test_unravel_puts_leaves_back_where_they_were_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        tree = {"split": jax.device_put(jnp.ones((2, 3)), PartitionSpec(None, "i")), "b": jnp.zeros(2)}
        vector, unravel = pg.ravel(tree)
        assert jax.typeof(vector).sharding.spec == PartitionSpec(None)
        put_back = jax.tree.map(jax.typeof, unravel(2 * vector))
        assert put_back == jax.tree.map(jax.typeof, tree)


@pytest.mark.slow
def test_unravel_under_jit_and_grad_and_with_scipy(x64):
    model = Sum(RBF(0.5, 0.7), Periodic(1.0, 1.3, 1.0))
    vector, unravel = pg.ravel(model)
    objective = lambda v: ((loss(unravel(v)) - 3.0) ** 2) + 0.01 * (v**2).sum()
    gradient = jax.jit(jax.grad(objective))(vector)
    tree_gradient = pg.grad(lambda m: (loss(m) - 3.0) ** 2)(model)
    np.testing.assert_allclose(gradient - 0.02 * vector, pg.ravel(tree_gradient)[0], rtol=1e-4, atol=1e-5)
    best = scipy.optimize.minimize(
        jax.jit(jax.value_and_grad(objective)), vector, jac=True, method="BFGS", options={"maxiter": 30}
    )
    assert best.fun < objective(vector)
    assert unravel(best.x).b.period == 1.0


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_refused():
    w = {"w": jnp.arange(6.0).reshape(2, 3)}
    element = pg.grad(lambda t: (t["w"] ** 2).sum(), wrt=pg.each(lambda t: t["w"][1, 2]))(w)
    refused(lambda: pg.apply_updates(w, element), ValueError, "at `['w']`", "Expected shape (2, 3), got shape ()")
    refused(lambda: pg.replace(w, "w[0]", 7.0), ValueError, "Expected shape (3,), got ()")
    stop = lambda a: pg.stop_gradient({"a": a}, "a", when=jnp.array([True, False]))["a"]
    refused(lambda: jax.jit(stop)(2.0), ValueError, "broadcast to shape (), got shape (2,)")
    precise = pg.replace({"w": np.array([1 + 1e-12, 2.0])}, "w[1]", 5.0)["w"]
    assert (precise.dtype, precise[0]) == (np.float64, 1 + 1e-12)


def test_held_leaves_do_not_count_in_nested_combinations():
    tree = {"p": {"h": NonDiff(1.0), "x": 2.0}, "q": {"y": 4.0}, "z": 5.0}
    first = {"p": {"h": True, "x": True}, "q": False, "z": False}
    second = {"p": {"h": True, "x": False}, "q": True, "z": False}
    union = (pg.exclude({"p": False, "q": True, "z": True}) | second) | "z"
    assert pg.select(tree, union)["q"]["y"] == 4.0
    assert pg.mask(tree, ~(pg.exclude(pg.exclude(first)) | second))["z"] is True


def test_wrappers_that_a_map_puts_into_fields_become_marks_of_the_fields():
    model = RBF(1.0, 2.0)
    assert pg.thaw(jax.tree.map(NonDiff, model), "lengthscale") == pg.freeze(model, "variance")


class Layer(eqx.Module):
    weight: Any
    inner: Any


class Layers(eqx.Module):
    layers: Any


@pytest.mark.parametrize("part", ["layers[0].weight", "layers[0].inner.variance", "layers[1].weight"])
def test_freezing_a_node_says_the_same_whatever_was_held_inside(part):
    layers = [Layer(1.0, RBF(2.0, 3.0)), Layer(4.0, [5.0, 6.0])]
    for tree in (Layers(layers), {"layers": layers}):
        assert trees_equal(pg.freeze(pg.freeze(tree, part), "layers"), pg.freeze(tree, "layers"))


NESTED = {
    "module": Layers([Layer(1.0, RBF(2.0, 3.0)), Layer(4.0, [5.0, 6.0])]),
    "model": RBF(Layer(1.0, {"u": 2.0, "v": 3.0}), [4.0, RBF(5.0, 6.0)]),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_held_after_two_changes(name):
    """The second one changes what it names, and nothing else, wherever the first one put its marks."""
    tree = NESTED[name]
    leaves = {path for path, _ in pg.items(tree)}
    steps = [path.replace("[", ".[").split(".") for path in leaves]
    above = {".".join(step[:count]).replace(".[", "[") for step in steps for count in range(1, len(step) + 1)}
    below = {
        path: {leaf for leaf in leaves if (leaf + ".").replace("[", ".[").startswith((path + ".").replace("[", ".["))}
        for path in sorted(above)
    }
    for first, second in itertools.product(below, repeat=2):
        frozen = pg.freeze(tree, first)
        for change, free in (
            (pg.freeze, leaves - below[first] - below[second]),
            (pg.thaw, leaves - (below[first] - below[second])),
        ):
            found = {path for path, _ in pg.items(change(frozen, second))} if free else set()
            assert found == free, (first, change.__name__, second)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_a_condition_of_stop_gradient_has_to_fit(shape):
    stopped = lambda x: pg.stop_gradient(x, when=jnp.ones(shape, bool))
    refused(lambda: jax.eval_shape(stopped, jnp.ones(2)), ValueError, "shape (2,)", f"got shape {shape}")


def test_the_free_part_of_a_field_that_is_partly_held_has_a_gradient():
    model = pg.freeze(RBF(5.0, {"u": 2.0, "v": 3.0}), "lengthscale['u']")
    product = lambda m: m.variance * m.lengthscale["u"] * m.lengthscale["v"]
    inside = lambda m: product(pg.freeze(m, "lengthscale['u']"))
    for gradient in (jax.grad, pg.grad, lambda f: jax.jit(jax.grad(f))):
        for found in (gradient(product)(model), gradient(inside)(pg.thaw(model, "lengthscale"))):
            assert (found.variance, found.lengthscale["v"]) == (6.0, 10.0)
    assert [pg.is_nondiff(model, f"lengthscale['{name}']") for name in "uv"] == [True, False]
