"""partition, combine, freeze and thaw."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import partgrad as pg
from helpers.models import RBF, Flax, Linear, Periodic, Product, Sum, composite, loss, trees_equal
from partgrad import NonDiff, errors

pytestmark = pytest.mark.core


@pytest.mark.slow
def test_parts_have_the_trees_node_types_and_marks_and_the_gradients_structure():
    tree = {"k": composite(), "n": 3, "name": "x", "f": len, "h": NonDiff(1.0), "none": None}
    selected, rest = pg.partition(tree)
    gradient = pg.grad(lambda t: loss(t["k"]))(tree)
    assert jax.tree.structure(selected) == jax.tree.structure(gradient)
    assert selected["k"] == Sum(RBF(NonDiff(None), 2.0), Product(RBF(0.5, 0.7), Periodic(1.0, 1.3, None)))
    assert rest["k"] == Sum(RBF(NonDiff(1.0), None), Product(RBF(None, None), Periodic(None, None, 1.0)))
    assert (rest["n"], rest["name"], rest["f"], rest["h"].value) == (3, "x", len, 1.0)
    assert trees_equal(pg.combine(selected, rest), tree)


def test_naming_a_held_leaf_builds_both_parts_thawed_there():
    model = Sum(NonDiff(RBF(1.0, 2.0)), Periodic(1.0, 2.0, 3.0))
    selected, rest = pg.partition(model, lambda m: (m.a.variance, m.b.period))
    assert repr(selected.a) == "RBF(variance=1.0, lengthscale=NonDiff(None))"
    assert (
        repr(rest)
        == "Sum(a=RBF(variance=None, lengthscale=NonDiff(2.0)), b=Periodic(variance=1.0, lengthscale=2.0, period=Diff(None)))"
    )
    assert pg.combine(selected, rest) == pg.thaw(model, lambda m: (m.a.variance, m.b.period))


def test_a_module_in_a_field_is_held_in_part():
    model = pg.freeze(RBF(5.0, Linear(2.0, 3.0)), "lengthscale.weight")
    assert [pg.is_nondiff(model, f"lengthscale.{name}") for name in ("weight", "bias")] == [True, False]
    gradient = pg.grad(lambda m: m.variance * m.lengthscale.weight * m.lengthscale.bias)(model)
    assert (gradient.variance, gradient.lengthscale.weight, gradient.lengthscale.bias) == (6.0, None, 10.0)


def test_a_combination_thaws_what_its_sides_hold():
    held = {"a": NonDiff(1.0), "b": NonDiff(2.0), "c": NonDiff(3.0)}
    assert pg.thaw(held, pg.path("a") | "b") == {"a": 1.0, "b": 2.0, "c": NonDiff(3.0)}
    assert pg.thaw(held, ~pg.path("a")) == {"a": NonDiff(1.0), "b": 2.0, "c": 3.0}


def test_parts_that_differ_in_static_data_alone():
    parts = [pg.partition(Flax(1.0, size), lambda m: m.w)[i] for i, size in enumerate((4, 5))]
    with pytest.raises(pg.errors.PartsError, match=r"Expected .*Flax.*4.*, got .*Flax.*5"):
        pg.combine(*parts)


def test_parts_of_several_kinds_combine():
    tree = {"a": 1.0, "b": 2.0, "c": 3}
    first, rest = pg.partition(tree, "a")
    second, rest = pg.partition(rest, "b")
    assert pg.combine(rest, first, second) == tree
    assert pg.combine(tree) == tree
    assert pg.combine(None, 1.0) == 1.0


def test_a_tree_without_leaves_to_select_is_accepted_for_none():
    assert trees_equal(pg.partition({"n": 3}), ({"n": None}, {"n": 3}))
    assert pg.partition(()) == ((), ())


def refused(parts, *fragments):
    with pytest.raises(errors.PartsError) as caught:
        pg.combine(*parts)
    assert isinstance(caught.value, ValueError)
    for fragment in (*fragments, "\n  Fix: "):
        assert fragment in str(caught.value)


def test_overlapping_and_mismatched_parts():
    selected, rest = pg.partition({"a": [1.0, 2], "b": NonDiff(3.0)})
    refused([selected, rest, rest], "Parts 1 and 2 both hold `['a'][1]`")
    refused(
        [selected, {**rest, "b": 3.0}],
        "Part 1 has a different structure from part 0, at `['b']`",
        "Expected NonDiff, got a leaf",
    )
    refused([selected, {"a": [None, 2]}], "Expected `['b']`, got nothing")
    refused([selected, {**rest, "a": (None, 2)}], "at `['a']`", "Expected list, got tuple")
    kernel, _ = pg.partition(Periodic(1.0, 2.0, 3.0))
    refused([kernel, pg.thaw(Periodic(None, None, 3.0), "period")], "the marks [period=NonDiff]", "the marks []")
    refused([], "`combine` got no parts")


@pytest.mark.slow
def test_an_optimiser_takes_both_gradient_and_part_and_leaves_the_rest_alone():
    model = {"k": composite(), "n": 3}
    selected, rest = pg.partition(model)
    optimiser = optax.adamw(0.1, weight_decay=0.5)
    state = optimiser.init(selected)
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.shape == ()) == 2 * 5 + 1

    def step(selected, state):
        gradient = pg.grad(lambda s: loss(pg.combine(s, rest)["k"]))(selected)
        updates, state = optimiser.update(gradient, state, selected)
        return optax.apply_updates(selected, updates), state

    for _ in range(3):
        selected, state = step(selected, state)
    fitted = pg.combine(selected, rest)
    assert (fitted["k"].a.variance, fitted["k"].b.b.period, fitted["n"]) == (1.0, 1.0, 3)
    assert fitted["k"].a.lengthscale != 2.0


# --- freeze and thaw ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_freeze_marks_fields_without_changing_values_or_paths():
    model = Sum(RBF(1.0, 2.0), Periodic(1.0, 2.0, 3.0))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    for wrt in ("a.variance", lambda m: m.a, "**.lengthscale", None, lambda m: m):
        frozen = pg.freeze(model, wrt)
        assert [path for path, _ in jax.tree_util.tree_leaves_with_path(frozen)] == paths
        assert jax.tree.leaves(frozen) == jax.tree.leaves(model)
    assert repr(pg.freeze(model, "a.variance").a) == "RBF(variance=NonDiff(1.0), lengthscale=2.0)"
    assert isinstance(pg.freeze(model, lambda m: m), Sum)
    gradient = pg.grad(lambda m: loss(m))(pg.freeze(model, "**.lengthscale"))
    assert (gradient.a.lengthscale, gradient.b.lengthscale) == (None, None)
    assert gradient.a.variance is not None


@pytest.mark.slow
def test_thaw_removes_what_freeze_added_and_what_the_class_declared():
    model = Sum(RBF(1.0, 2.0), RBF(3.0, 4.0))
    for wrt in ("a.variance", "a", lambda m: m.variance, None):
        assert pg.thaw(pg.freeze(model, wrt), wrt) == model
    assert (
        repr(pg.thaw(Periodic(1.0, 2.0, 3.0), lambda k: k.period))
        == "Periodic(variance=1.0, lengthscale=2.0, period=Diff(3.0))"
    )
    assert pg.grad(loss)(pg.thaw(composite(), lambda k: k.period)).b.b.period is not None
    assert jax.grad(loss)(pg.thaw(composite(), "**.period")).b.b.period != 0.0


def test_thawing_one_leaf_of_a_frozen_node_keeps_the_rest_held():
    model = pg.freeze(Sum(Sum(RBF(1.0, 2.0), RBF(3.0, 4.0)), RBF(5.0, 6.0)), "a")
    thawed = pg.thaw(model, "a.b.variance")
    gradient = pg.grad(loss)(thawed)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradient)] == [
        ".a.b.variance",
        ".b.variance",
        ".b.lengthscale",
    ]
    assert pg.thaw(pg.freeze(thawed, "a.b"), "a.b.lengthscale").a.b == pg.thaw(RBF(NonDiff(3.0), 4.0), "lengthscale")


def test_a_foreign_container_gets_a_wrapper_around_the_largest_node():
    model = {"body": Linear(jnp.ones(2), jnp.zeros(2)), "head": [1.0, 2.0]}
    frozen = pg.freeze(model, lambda m: (m["body"], m["head"][0]))
    assert isinstance(frozen["body"], NonDiff)
    assert frozen["body"](3.0).shape == (2,)
    assert frozen["head"][0] + 1 == 2.0
    assert frozen["head"][1] == 2.0
    assert trees_equal(pg.thaw(frozen, None), model)
    half = pg.thaw(frozen, lambda m: m["body"].bias)
    assert repr(half["body"]).endswith("of='.weight')")
    assert half["body"](3.0).shape == (2,)
    assert pg.is_nondiff(half, "body.weight")
    assert pg.partition(half)[0]["body"].bias is half["body"].bias


def test_a_partgrad_node_in_a_foreign_container_is_held_by_its_fields():
    frozen = pg.freeze([RBF(1.0, 2.0), 3.0], lambda t: t[0])
    assert repr(frozen) == "[RBF(variance=NonDiff(1.0), lengthscale=NonDiff(2.0)), 3.0]"


def test_freeze_and_thaw_refuse_what_selects_nothing():
    for edit in (pg.freeze, pg.thaw):
        with pytest.raises(errors.NoMatchError, match="matches nothing"):
            edit(composite(), "nowhere")
        with pytest.raises(errors.NotDifferentiableError, match="got int"):
            edit({"n": 3}, "n")


def test_unravel_gives_leaves_the_precision_that_jax_has():
    vector, unravel = pg.ravel({"a": np.ones(2), "b": np.float64(2.0)})
    # With x64 disabled, JAX warns of a conversion to float64.
    assert unravel(vector)["a"].dtype == jnp.result_type(float)


def test_a_scalar_type_of_jax_is_no_number():
    tree = {"w": 2.0, "dtype": jnp.float32}
    f = lambda t: t["w"] ** 2 * jnp.ones((), t["dtype"])
    gradient = pg.grad(f)(tree)
    assert (float(gradient["w"]), gradient["dtype"]) == (4.0, None)
    assert pg.mask(tree) == {"w": True, "dtype": False}
    refused = pytest.raises(TypeError, match="cannot be differentiated")
    with refused:
        pg.grad(f, wrt="dtype")(tree)
