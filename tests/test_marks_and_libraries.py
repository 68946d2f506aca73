"""Marks beside what other libraries and models do: shared weights, ensembles, running statistics, marks of others."""

import html
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import paramax
import pytest
from flax import linen, nnx

import partgrad as pg
from helpers.messages import refused
from helpers.models import Flax
from partgrad import NonDiff, errors


@pytest.mark.slow
def test_a_mark_of_paramax_counts_and_thaw_takes_it_off():
    tree = {"w": paramax.NonTrainable({"x": jnp.float32(2.0), "y": jnp.float32(3.0)}), "s": jnp.float32(4.0)}
    f = lambda t: (lambda t: t["w"]["x"] * t["w"]["y"] * t["s"])(paramax.unwrap(t))
    gradient = pg.grad(f)(tree)
    assert float(gradient["s"]) == 6.0
    assert jax.tree.leaves(gradient["w"]) == []
    for transform in (lambda g: g, jax.jit):
        assert float(transform(pg.grad(f, wrt="w.tree.x"))(tree)) == 12.0
        y, s = transform(pg.grad(f, wrt=lambda t: (t["w"].tree["y"], t["s"])))(tree)
        assert (float(y), float(s)) == (8.0, 6.0)
        assert jax.tree.leaves(transform(pg.grad(f, wrt="w"))(tree)) == [12.0, 8.0]
        assert jax.tree.leaves(transform(pg.grad(f, wrt=pg.path("w") | "s"))(tree)) == [6.0, 12.0, 8.0]
    assert float(pg.jacfwd(pg.grad(f, wrt="s"), wrt="w.tree.x")(tree)) == 3.0
    # Inside the function it is held as outside, and what leaves the function has its own class.
    inner = pg.grad(lambda t: (f(t), (pg.items(t), t)), wrt="w.tree.x", has_aux=True)(tree)[1]
    assert [path for path, _ in inner[0]] == ["['s']"]
    assert jax.tree.structure(inner[1]) == jax.tree.structure(tree)
    assert type(inner[1]["w"]) is paramax.NonTrainable
    thawed = pg.thaw(tree, "w.tree.x")
    assert not pg.is_nondiff(thawed, "w.x")
    assert pg.is_nondiff(thawed, "w.y")
    np.testing.assert_allclose(pg.grad(f, wrt="w.x")(thawed), 12.0)
    assert jax.tree.structure(pg.thaw(tree, None)) == jax.tree.structure({"w": {"x": 0, "y": 0}, "s": 0})
    assert jax.tree.structure(pg.freeze(tree, "w")) == jax.tree.structure(tree)


class Norm(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.slow
def test_what_is_no_parameter_of_flax_is_held():
    model, x = Norm(), jnp.array([[1.0, 2.0], [3.0, 5.0]])
    model.eval()
    f = lambda m: (m(x) ** 2).sum()
    statistics = {"norm.mean.value", "norm.var.value"}
    everything = {path for path, _ in pg.items(model, "**")} - {"norm"}
    assert {path for path, _ in pg.items(model)} == everything - statistics
    assert {path for path, _ in pg.items(model, pg.exclude("layers"))} == {"norm.bias.value", "norm.scale.value"}
    assert {row.path for row in pg.summary(model).rows if row.status == "held by a mark"} == statistics
    # Naming gives the derivative, whether the variable or the array in it is named.
    mean = model.norm.mean.get_value()
    want = jax.grad(lambda mean: f(pg.replace(model, "norm.mean.value", mean)))(mean)
    np.testing.assert_allclose(pg.grad(f, wrt="norm.mean.value")(model), want)
    np.testing.assert_allclose(pg.grad(f, wrt=lambda m: m.norm.mean)(model).get_value(), want)
    union = pg.grad(f, wrt=pg.path("norm.mean") | "layers[0].kernel")(model)
    np.testing.assert_allclose(union.norm.mean.get_value(), want)
    refused(lambda: pg.grad(f, wrt="**.mean.*")(model), LookupError, "held by a mark", "wrt='norm.mean.value'")
    refused(lambda: pg.thaw(model, "norm.mean"), ValueError, "the class `BatchStat` holds it", "'norm.mean.value'")
    assert pg.is_nondiff(pg.thaw(model, None), "norm.mean")


@pytest.mark.slow
def test_adamw_leaves_running_statistics_alone():
    model, x = Norm(), jnp.array([[1.0, 2.0], [3.0, 5.0]])
    model.eval()
    selected, rest = pg.partition(model)
    optimiser = optax.adamw(0.1, weight_decay=0.5)
    gradient = jax.grad(lambda part: (pg.combine(part, rest)(x) ** 2).sum())(selected)
    updates, _ = optimiser.update(gradient, optimiser.init(selected), selected)
    after = pg.combine(pg.apply_updates(selected, updates), rest)
    assert after.norm.var.get_value().tolist() == [1.0, 1.0]
    assert after.norm.scale.get_value().tolist() != [1.0, 1.0]


def test_a_class_of_ones_own_is_registered():
    class Statistics(eqx.Module):
        mean: Any
        count: int = 0

    class Newer(Statistics):
        pass

    @pg.dataclass
    class Own:
        mean: Any
        scale: Any = 1.0

    trees = [{"w": 2.0, "s": cls(3.0)} for cls in (Statistics, Newer, Own)]
    f = lambda t: t["w"] * t["s"].mean ** 2
    before = [pg.grad(f)(tree)["s"].mean for tree in trees]
    assert before == [12.0, 12.0, 12.0]
    assert pg.register_nondiff(Statistics) is Statistics
    pg.register_nondiff(Own)
    for tree in trees:
        # What was kept for the structure says otherwise.
        gradient = pg.grad(f)(tree)
        assert (gradient["w"], gradient["s"].mean) == (9.0, None)
        assert pg.grad(f, wrt="s.mean")(tree) == pg.grad(f, wrt="s")(tree).mean == 12.0
        assert pg.is_nondiff(tree, "s")
        assert pg.is_nondiff(pg.freeze(tree, "w"), None)
        assert jax.tree.structure(pg.freeze(tree, "s")) == jax.tree.structure(tree)
        assert pg.select(pg.partition(tree, "s.mean")[0], "s.mean") == 3.0
        refused(lambda tree=tree: pg.thaw(tree, "s"), ValueError, "cannot be thawed", "wrt=")
    for wrong in (dict, list, tuple, 3, "a", float, np.ndarray, jax.Array, type(jnp.ones(1))):
        refused(lambda wrong=wrong: pg.register_nondiff(wrong), TypeError, "register_nondiff", "a class of nodes")


TRUE_DEFAULTS = {
    "equinox": lambda: (
        eqx.nn.MLP(2, 2, 3, 2, key=jax.random.key(0)),
        lambda model: eqx.filter(model, eqx.is_inexact_array),
    ),
    "equinox, with state": lambda: (
        eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")[0],
        lambda model: eqx.filter(model, eqx.is_inexact_array),
    ),
    "paramax": lambda: (
        {"a": paramax.NonTrainable(jnp.ones(2)), "b": jnp.ones(3), "n": 2},
        lambda model: {"a": None, "b": model["b"], "n": None},
    ),
    "flax.nnx": lambda: (Norm(), lambda model: nnx.state(model, nnx.Param)),
    "flax.nnx, split": lambda: (nnx.state(Norm()), lambda state: nnx.split_state(state, nnx.Param, ...)[0]),
    "flax.linen": lambda: (
        linen.Dense(3).init(jax.random.key(0), jnp.ones(2))["params"],
        lambda parameters: parameters,
    ),
    "flax.struct": lambda: (Flax(jnp.ones(2)), lambda model: model),
    "optax": lambda: (optax.adam(0.1).init({"w": jnp.ones(2)}), lambda state: (state[0].mu, state[0].nu)),
    "chex": lambda: (
        pytest.importorskip("chex").dataclass(type("C", (), {"__annotations__": {"w": Any}}))(w=jnp.ones(2)),
        lambda model: model,
    ),
    "distrax": lambda: (pytest.importorskip("distrax").Normal(jnp.ones(2), jnp.ones(())), lambda model: model),
    "gpjax": lambda: (
        pytest.importorskip("gpjax").kernels.RBF(lengthscale=paramax.non_trainable(jnp.array(1.5))),
        lambda kernel: eqx.filter(kernel, eqx.is_array, is_leaf=lambda node: isinstance(node, paramax.NonTrainable)),
    ),
    "tinygp": lambda: (1.5 * pytest.importorskip("tinygp").kernels.Matern32(jnp.array(2.0)), lambda kernel: kernel),
    "lineax": lambda: (
        pytest.importorskip("lineax").MatrixLinearOperator(jnp.ones((2, 2))),
        lambda operator: eqx.filter(operator, eqx.is_inexact_array),
    ),
    "numpyro": lambda: (numpyro.distributions.Normal(jnp.ones(2), 2.0), lambda model: model),
}


@pytest.mark.parametrize("library", TRUE_DEFAULTS)
def test_the_default_selection_is_that_of_the_library(library):
    model, default = TRUE_DEFAULTS[library]()
    own = sorted(str(np.asarray(leaf)) for leaf in jax.tree.leaves(default(model)))
    assert sorted(str(np.asarray(leaf)) for _, leaf in pg.items(model)) == own


@pytest.mark.slow
def test_tied_leaves_are_reported():
    weight = jnp.ones((2, 2))
    model = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[1].weight), small_net(), (weight, weight))
    for tree, paths in [
        (model, ["layers[0].weight", "layers[1].weight"]),
        ({"a": weight, "b": [weight]}, ["['a']", "['b'][0]"]),
        (TiedVariables(), ["layers[0].kernel.value", "tied.value"]),
    ]:
        summary = pg.summary(tree)
        assert summary.tied == (tuple(paths),)
        assert summary.to_dict()["tied"] == [paths]
        f = lambda t: sum((leaf**2).sum() for leaf in jax.tree.leaves(pg.partition(t)[0]))
        for text in (str(summary), summary._repr_html_(), str(pg.show(tree)), str(pg.check(f)(tree))):
            assert "one array at" in text
            for path in paths:
                assert path in html.unescape(text)
    for tree in ({"a": 2.0, "b": 2.0}, [jnp.ones(2), jnp.ones(2)], pg.freeze({"a": weight, "b": weight}, None)):
        assert pg.summary(tree).tied == ()
        assert "one array" not in str(pg.summary(tree))
    assert jax.jit(lambda t: len(pg.summary(t).tied))({"a": weight, "b": weight}) == 0


def small_net():
    return eqx.nn.MLP(2, 2, 2, 2, key=jax.random.key(0))


class TiedVariables(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.tied = self.layers[0].kernel


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        pair = tuple(eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(seed)) for seed in (0, 1))
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, x):
        first, second = self.shared()
        return second(jax.nn.tanh(first(x))).sum()


def test_tied_weights_of_equinox():
    model, x = Tied(), jnp.array([1.0, -2.0])
    want = jax.grad(lambda w: (w @ jax.nn.tanh(w @ x)).sum())(model.shared.pytree[0].weight)
    np.testing.assert_allclose(pg.grad(lambda m: m(x))(model).shared.pytree[0].weight, want)
    np.testing.assert_allclose(pg.grad(lambda m: m(x), wrt="shared.pytree[0].weight")(model), want)
    frozen = pg.freeze(model, "shared.pytree[0].weight")
    np.testing.assert_allclose(frozen(x), model(x))
    np.testing.assert_allclose(pg.grad(lambda m: m(x), wrt="shared.pytree[0].weight")(frozen), want)
    assert pg.is_nondiff(frozen, "shared.pytree[0].weight")


def test_the_class_of_a_wrapped_module_is_that_of_the_wrapper():
    frozen = pg.freeze(eqx.nn.Linear(2, 2, key=jax.random.key(0)), "weight")
    assert (isinstance(frozen, eqx.nn.Linear), isinstance(pg.unwrap(frozen), eqx.nn.Linear)) == (False, True)
    assert frozen.in_features == 2


def test_one_array_at_two_places_is_two_leaves():
    """Each place has its own gradient; the derivative of tying them is the sum. A mark belongs to a place."""
    w = jnp.float32(3.0)
    tree = {"a": w, "b": w}
    gradient = pg.grad(lambda t: t["a"] ** 2 * t["b"])(tree)
    assert (float(gradient["a"]), float(gradient["b"])) == (18.0, 9.0)
    frozen = pg.freeze(tree, "b")
    assert (pg.is_nondiff(frozen, "a"), pg.is_nondiff(frozen, "b")) == (False, True)
    assert float(pg.grad(lambda w: (lambda t: t["a"] ** 2 * t["b"])({"a": w, "b": w}))(w)) == 27.0


@pg.dataclass
class Line:
    slope: Any
    origin: Any = pg.field(nondiff=True)

    def __call__(self, x):
        return self.slope * x + self.origin


def test_an_ensemble_by_vmap_keeps_marks_and_is_named_like_one_model():
    ensemble = jax.vmap(Line)(jnp.arange(3.0), jnp.ones(3))
    assert pg.is_nondiff(ensemble, "origin")
    loss = lambda m: (jax.vmap(lambda line: line(2.0))(m) ** 2).sum()
    gradient = pg.grad(loss)(ensemble)
    assert gradient.origin is None
    np.testing.assert_allclose(gradient.slope, [4.0, 12.0, 20.0])
    np.testing.assert_allclose(pg.grad(loss, wrt="origin")(ensemble), [2.0, 6.0, 10.0])
    each = jax.vmap(pg.grad(lambda line: line(2.0) ** 2, wrt="origin"))(ensemble)
    np.testing.assert_allclose(each, [2.0, 6.0, 10.0])


def test_running_statistics_are_held_and_updated():
    """A batch norm by hand: the statistics are state, not parameters, and come back with their mark."""

    @pg.dataclass
    class Norm:
        scale: Any
        mean: Any = pg.field(nondiff=True)

        def __call__(self, x):
            return self.scale * (x - x.mean()), pg.replace(self, "mean", 0.9 * self.mean + 0.1 * x.mean())

    @jax.jit
    def step(model, x):
        def loss(model):
            y, model = model(x)
            return (y**2).sum(), model

        gradient, model = pg.grad(loss, has_aux=True)(model)
        return pg.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

    model = Norm(jnp.float32(1.0), jnp.float32(0.0))
    trained = step(step(model, jnp.array([1.0, 3.0])), jnp.array([1.0, 3.0]))
    assert jax.tree.structure(trained) == jax.tree.structure(model)
    np.testing.assert_allclose(trained.mean, 0.38, rtol=1e-6)
    assert float(trained.scale) < 1.0


def test_a_custom_vjp_function_takes_a_marked_model():
    @jax.custom_vjp
    def f(line, x):
        return line(x) ** 2

    def backward(saved, g):
        line, x = saved
        return jax.tree.map(lambda d: g * d, jax.grad(lambda line, x: line(x) ** 2, argnums=(0, 1))(line, x))

    f.defvjp(lambda line, x: (f(line, x), (line, x)), backward)
    line = Line(jnp.float32(2.0), jnp.float32(1.0))
    gradient = pg.grad(f)(line, 3.0)
    assert (float(gradient.slope), gradient.origin) == (42.0, None)
    assert float(pg.grad(f, wrt="origin")(line, 3.0)) == 14.0
    assert float(jax.grad(f)(line, 3.0).origin) == 0.0


def test_a_key_is_given_to_jax_random_by_its_value():
    tree = {"key": NonDiff(jax.random.key(0)), "s": 1.0}
    samplers = (jax.random.normal, jax.random.split, lambda key: jax.random.fold_in(key, 1), jax.jit(jax.random.normal))
    for sampler in samplers:
        refused(lambda sampler=sampler: sampler(tree["key"]), TypeError, "NonDiff(key<fry>[])", "give it the `.value`")
    want = jax.random.normal(jax.random.key(0))
    np.testing.assert_allclose(pg.grad(lambda t: t["s"] * jax.random.normal(t["key"].value))(tree)["s"], want)


@pytest.mark.slow
def test_nuts_samples_the_posterior_of_what_a_class_holds_and_diff_frees():
    t = np.linspace(-1.0, 2.0, 12)
    y = 0.8 * t - 0.5 + 0.3 * np.sin(40.0 * t)

    def model():
        slope = numpyro.sample("slope", numpyro.distributions.Normal(0.0, 1.0))
        origin = numpyro.sample("origin", numpyro.distributions.Normal(0.0, 1.0))
        numpyro.sample("y", numpyro.distributions.Normal(Line(slope, pg.Diff(origin))(t), 0.3), obs=y)

    kernel = numpyro.infer.NUTS(model)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=300, num_samples=1500, progress_bar=False)
    mcmc.run(jax.random.key(0))
    draws = np.stack([mcmc.get_samples()["slope"], mcmc.get_samples()["origin"]])
    # The posterior of a linear model with normal priors and normal noise.
    design = np.stack([t, np.ones_like(t)], 1)
    covariance = np.linalg.inv(design.T @ design / 0.3**2 + np.eye(2))
    mean = covariance @ design.T @ y / 0.3**2
    spread = np.sqrt(np.diag(covariance))
    assert (abs(draws.mean(1) - mean) < 0.2 * spread).all()
    np.testing.assert_allclose(draws.std(1), spread, rtol=0.15)


class Scaled(eqx.Module):
    a: float
    b: float
    n: object = eqx.field(static=True)


def test_a_selector_reads_the_static_data_of_its_own_tree():
    # For structures too 1 == True == 1.0.
    for n in (1, True, 1.0, True):
        chosen = pg.select(Scaled(1.0, 2.0, n), lambda model: model.a if model.n is True else model.b)
        assert chosen == (1.0 if n is True else 2.0)
        in_a_dict = pg.select(Scaled(1.0, 2.0, {"n": n}), lambda model: model.a if model.n["n"] is True else model.b)
        assert in_a_dict == chosen


@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_what_is_held_stays_the_object_that_it_is():
    """Libraries map the identity over a tree, and look whether they find their leaves again (`eqx.tree_at` in diffrax)."""
    line = Line(jnp.float32(2.0), jnp.float32(1.0))

    @jax.jit
    def f(line, wrapped):
        again = jax.tree.map(lambda leaf: leaf, (line, wrapped))
        assert again[0].origin is line.origin
        assert again[1].value is wrapped.value
        moved = eqx.tree_at(
            lambda pair: jax.tree.leaves(jax.tree.map(lambda leaf: leaf, pair[0])), again, replace_fn=lambda x: x + 1
        )
        return moved[0](3.0) * jax.grad(lambda line: line(3.0))(line).origin

    assert float(f(line, NonDiff(jnp.float32(3.0)))) == 0.0
    assert float(jax.grad(lambda p: jax.jit(lambda m: jax.tree.map(lambda x: x, m)(3.0))(Line(2.0, p)))(1.0)) == 0.0


class Numbered:
    """As numpyro registers its distributions: without names for the leaves."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale


class Picky(Numbered):
    """As distrax does it: what it does not know for a number is no leaf."""


jax.tree_util.register_pytree_node(Numbered, lambda n: ((n.loc, n.scale), None), lambda _, leaves: Numbered(*leaves))


jax.tree_util.register_pytree_node(
    Picky,
    lambda n: ([leaf for leaf in (n.loc, n.scale) if hasattr(leaf, "dtype")], None),
    lambda _, leaves: Picky(*leaves),
)


@pytest.mark.slow
def test_leaves_without_names():
    f = lambda n: n.loc**2 * n.scale
    numbered = Numbered(jnp.float32(3.0), jnp.float32(2.0))
    assert float(pg.grad(f, wrt=lambda n: n.loc)(numbered)) == 12.0
    with pytest.raises(errors.NoMatchError, match=r"(?s)registered without names: `loc` is `\[0\]`.*write '\[0\]'"):
        pg.grad(f, wrt="loc")(numbered)
    assert float(pg.grad(f, wrt="[0]")(numbered)) == 12.0
    picky = Picky(jnp.float32(3.0), jnp.float32(2.0))
    with pytest.raises(errors.SelectionError, match=r"(?s)slots.*Leaves: \[0\].*write a path"):
        pg.grad(f, wrt=lambda n: n.loc)(picky)
    assert float(pg.grad(f, wrt="[0]")(picky)) == 12.0


def test_equinox_prints_the_marks_of_what_its_modules_hold():
    model = Scaled(pg.freeze(Line(jnp.ones(2), 1.0), "slope"), 2.0, 3)
    assert repr(model) == "Scaled(a=Line(slope=NonDiff(f32[2]), origin=NonDiff(1.0)), b=2.0, n=3)"


def test_updates_without_a_derivative():
    tree = {"n": jnp.int32(3), "w": jnp.float32(1.0)}
    updates = jax.grad(lambda t: 2.0 * t["w"] * t["n"], allow_int=True)(tree)
    updated = pg.apply_updates(tree, updates)
    assert (int(updated["n"]), float(updated["w"])) == (3, 7.0)
