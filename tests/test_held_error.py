"""A derivative that would end silently at a mark of a class is an error, and its remedies work."""

import dataclasses
import enum
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import partgrad as pg
from partgrad import NonDiff, errors


def smooth(tree):
    """A smooth function of every leaf, in which the leaves interact."""
    total = 0.3
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        total = total + jnp.sum(jnp.sin(leaf * (number + 1.5))) * jnp.cos(total)
    return total


def stacked(function):
    return lambda tree: jax.vmap(function)(jax.tree.map(lambda x: jnp.asarray(x)[None], tree))[0]


def looped(function):
    return lambda tree: jax.lax.scan(lambda t, _: (t, function(t)), jax.tree.map(jnp.asarray, tree), length=2)[1][-1]


def branched(function):
    return lambda tree: jax.lax.cond(jnp.sum(jax.tree.leaves(tree)[0]) < 1e9, function, lambda t: smooth(t) * 2, tree)


@pg.dataclass
class K:
    a: Any
    p: Any = pg.field(nondiff=True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Config:
    build: bool


M = K(jnp.float32(2.0), jnp.float32(3.0))


def loss(m):
    return (m.a * m.p - 1.0) ** 2


def is_like(tree, other=M):
    return jax.tree.structure(tree) == jax.tree.structure(other)


def test_an_explicit_stop_ends_the_derivative_without_a_word():
    for stopped in (
        lambda m: loss(pg.freeze(m, "p")),
        lambda m: loss(K(m.a, NonDiff(m.p))),
        lambda m: loss(pg.stop_gradient(m, "p")),
        lambda m: loss({"m": NonDiff(m)}["m"].value),
    ):
        np.testing.assert_allclose(pg.grad(stopped, wrt="p")(M), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.checkpoint, stacked, looped, branched])
def test_an_implicit_hold_raises_wherever_it_is(run):
    build = run(lambda m: loss(K(m.a, m.p)) + 0.0 * m.p)
    with pytest.raises(errors.HeldError, match=r"(?s)ends at another mark: K\.p at test_held_error\.py:\d+.*Diff"):
        pg.grad(build, wrt="p")(M)
    with pytest.raises(errors.HeldError):
        pg.value_and_grad(lambda m: pg.value_and_grad(build, wrt="p")(m)[0], wrt="p")(M)
    np.testing.assert_allclose(pg.grad(run(lambda m: loss(K(m.a, pg.Diff(m.p)))), wrt="p")(M), 20.0)
    np.testing.assert_allclose(pg.grad(run(lambda m: loss(dataclasses.replace(m, p=2 * m.p))), wrt="p")(M), 88.0)
    np.testing.assert_allclose(pg.grad(run(lambda m: loss(K(m.a, m.p))))(M).a, 30.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A derivative ends")
@pytest.mark.parametrize("run", [lambda f: f, jax.jit, looped])
def test_a_named_leaf_whose_mark_was_taken_off_ends_at_a_mark_of_its_class_with_an_error_too(run):
    for model in (K(M.a, pg.Diff(M.p)), pg.thaw(M, "p")):
        with pytest.raises(errors.HeldError, match=r"K\.p at test_held_error"):
            pg.grad(run(lambda m: loss(K(m.a, m.p))), wrt="p")(model)
        with pytest.raises(errors.HeldError, match=r"K\.p at test_held_error"):
            pg.grad(run(lambda m: loss(K(m.a, m.p))), wrt=lambda m: m)(model)
        np.testing.assert_allclose(pg.grad(run(lambda m: loss(K(m.a, pg.Diff(m.p)))), wrt="p")(model), 20.0)
        np.testing.assert_allclose(pg.grad(run(lambda m: loss(K(m.a, m.p))))(model).a, 30.0)


def built(m):
    return loss(K(m.a, m.p))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda: pg.jvp(built, (M,), (jnp.float32(1.0),), wrt="p"),
        lambda: pg.vjp(built, M, wrt="p"),
        lambda: pg.linearize(built, M, wrt="p"),
        lambda: pg.jacfwd(built, wrt="p")(M),
        lambda: pg.hessian(built, wrt="p")(M),
        lambda: pg.hvp(built, wrt="p")(M, jnp.float32(1.0)),
        lambda: pg.grad(built, wrt=lambda m: (m.a, m.p), double_where=True)(M),
        lambda: pg.grad(lambda x, m: x * built(m), wrt=(None, "p"), argnums=(0, 1))(2.0, M),
        lambda: pg.grad(lambda m: pg.grad(built)(m).a, wrt="p")(M),
        lambda: pg.grad(lambda m: jax.grad(lambda a: loss(K(a, m.p)))(m.a), wrt="p")(M),
        lambda: jax.vmap(pg.grad(built, wrt="p"))(jax.tree.map(lambda x: x[None], M)),
    ],
)
def test_every_transform_tells_of_an_implicit_hold(derivative):
    with pytest.raises(errors.HeldError, match=r"ends at another mark: K\.p at test_held_error\.py:\d+\."):
        derivative()


@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_a_hold_that_is_on_no_way_is_no_error():
    np.testing.assert_allclose(pg.grad(lambda m: K(m.a, m.p).a * m.p, wrt="p")(M), 2.0)
    slope, model = pg.grad(lambda m: (m.a * m.p, K(m.a, m.p)), wrt="p", has_aux=True)(M)
    assert float(slope) == 2.0
    assert is_like(model)


def test_an_implicit_hold_in_a_function_that_branches_on_values():
    def build(m, p):
        return loss(K(m.a, p(m.p))) if m.p > 0 else m.a

    with pytest.raises(errors.HeldError, match=r"K\.p at test_held_error\.py"):
        pg.grad(lambda m: build(m, lambda p: p), wrt="p")(M)
    with pytest.raises(errors.HeldError, match=r"K\.p at test_held_error\.py"):
        pg.grad(lambda m: build(m, lambda p: p) * jax.jit(lambda m: loss(K(m.a, m.p)))(m), wrt=lambda m: (m.a, m.p))(M)
    np.testing.assert_allclose(pg.grad(lambda m: build(m, pg.Diff), wrt="p")(M), 20.0)
    np.testing.assert_allclose(pg.grad(lambda m: build(m, lambda p: 3.0) * m.p, wrt="p")(M), 25.0)


class Mode(enum.Enum):
    KEEP = 1
    BUILD = 2


@pytest.mark.parametrize(
    ("decide", "quiet", "loud"),
    [
        (lambda a, b: b, {"a": True, "b": False}, {"b": True, "a": False}),
        (lambda mode: mode is Mode.BUILD, {"mode": Mode.KEEP}, {"mode": Mode.BUILD}),
        (lambda mode: bool(mode), {"mode": np.bool_(False)}, {"mode": np.bool_(True)}),
        (lambda mode: mode > 1.0, {"mode": 0.5}, {"mode": 1.5}),
        (lambda mode: mode == "build", {"mode": "keep"}, {"mode": "build"}),
        (lambda config: config["build"], {"config": {"build": False}}, {"config": {"build": True}}),
        (lambda config: config["build"], {"config": {1: 0, "build": False}}, {"config": {1: 0, "build": True}}),
        (lambda config: config.build, {"config": Config(False)}, {"config": Config(True)}),
        (lambda xs: len(xs) > 1, {"xs": (1.0,)}, {"xs": (1.0, 1.0)}),
        (lambda x: x.shape[0] > 2, {"x": jnp.ones(2)}, {"x": jnp.ones(3)}),
        (lambda x: x.dtype == jnp.int32, {"x": jnp.ones(2)}, {"x": jnp.ones(2, jnp.int32)}),
        (lambda x: x > 1, {"x": jnp.float32(0.5)}, {"x": jnp.float32(1.5)}),
        (lambda choose: choose(), {"choose": lambda: False}, {"choose": lambda: True}),
    ],
)
def test_an_implicit_hold_in_the_branch_that_a_later_call_takes(decide, quiet, loud):
    def build(m, **given):
        return loss(K(m.a, m.p)) if decide(**given) else m.p * m.a

    slope = pg.grad(build, wrt="p")
    for _ in range(2):
        assert float(slope(M, **quiet)) == 2.0
    with pytest.raises(errors.HeldError):
        slope(M, **loud)


def test_an_implicit_hold_for_later_shapes_dtypes_and_integers_of_the_model():
    def build(m):
        return jnp.sum(loss(K(m.a, m.p)) if jnp.ndim(m.a) or jnp.asarray(m.a).dtype == jnp.int32 else m.p * m.a)

    slope = pg.grad(build, wrt="p")
    assert float(slope(M)) == 2.0
    for a in (jnp.ones(2), jnp.int32(1)):
        with pytest.raises(errors.HeldError):
            slope(K(a, jnp.float32(3.0)))


def test_a_function_is_asked_once_for_calls_that_it_cannot_tell_apart():
    runs = []

    def product(m, x, *, flag, function):
        runs.append(None)
        return m.p * m.a * x

    slope = pg.grad(product, wrt="p")
    for x in (1.0, 2.0, 3.0):
        slope(K(jnp.float32(x), M.p), jnp.float32(x), flag=True, function=loss)
    assert len(runs) == 4


def test_the_remedies_for_an_implicit_hold():
    with pytest.raises(errors.HeldError) as caught:
        pg.grad(lambda model: loss(K(model.a, model.p)), wrt="p")(M)
    for remedy in ("dataclasses.replace(model, p=...)", "p=partgrad.Diff(x)", "jax.lax.stop_gradient(x)"):
        assert remedy in str(caught.value)
    np.testing.assert_allclose(pg.grad(lambda model: loss(dataclasses.replace(model, p=model.p)), wrt="p")(M), 20.0)
    np.testing.assert_allclose(pg.grad(lambda model: loss(K(a=model.a, p=pg.Diff(model.p))), wrt="p")(M), 20.0)
    np.testing.assert_allclose(pg.grad(lambda model: loss(K(model.a, jax.lax.stop_gradient(model.p))), wrt="p")(M), 0.0)


@pg.dataclass
class Osc:
    amp: Any
    freq: Any = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amp * jnp.sin(self.freq * t)


FLOATS = K(2.0, 3.0)


TIMES = np.linspace(0.1, 1.0, 5).astype(np.float32)


DATA = np.sin(2.0 * TIMES).astype(np.float32)


def after_another_derivative(m):
    """Python branches on values, so neither derivative can be traced beforehand."""
    pg.grad(lambda m: m.a * m.p if m.p > 0 else m.p, wrt="p")(FLOATS)
    return loss(K(m.a, m.p)) if m.p > 0 else m.p


@pytest.mark.parametrize(
    "f",
    [
        lambda m: loss(K(m.a, m.p)),
        lambda m: loss(K(m.a, m.p)) + m.p,
        lambda m: loss(pg.thaw(K(m.a, m.p), "p")),
        lambda m: loss(jax.tree.unflatten(jax.tree.structure(FLOATS), jax.tree.leaves(m))),
        after_another_derivative,
    ],
    ids=["built plainly", "one path of two", "built, then thawed", "unflattened", "after another derivative"],
)
def test_an_implicit_hold_raises(f):
    with pytest.raises(errors.PartgradError, match="Diff"):
        pg.grad(f, wrt="p")(FLOATS)


def test_diff_is_the_opposite_of_nondiff():
    np.testing.assert_allclose(jax.grad(lambda p: loss(K(2.0, pg.Diff(p))))(3.0), 20.0)
    np.testing.assert_allclose(pg.grad(lambda m: loss(K(m.a, pg.Diff(m.p))), wrt="p")(FLOATS), 20.0)


@pytest.mark.slow
def test_diff_of_a_sampled_parameter():
    def model():
        freq = numpyro.sample("freq", numpyro.distributions.Normal(0.0, 1.0))
        numpyro.factor("fit", -jnp.sum((Osc(1.0, pg.Diff(freq))(TIMES) - DATA) ** 2))

    density = lambda freq: numpyro.infer.util.log_density(model, (), {}, {"freq": freq})[0]
    truth = lambda freq: -0.5 * freq**2 - jnp.sum((jnp.sin(freq * TIMES) - DATA) ** 2)
    np.testing.assert_allclose(jax.grad(density)(1.5), jax.grad(truth)(1.5), rtol=1e-5)


def test_a_model_that_is_built_of_what_is_differentiated_warns_once():
    @pg.dataclass
    class Sampled:
        scale: jax.Array
        period: jax.Array = pg.field(nondiff=True)

    model = Sampled(jnp.float32(2.0), jnp.float32(3.0))
    f = lambda m: m.scale * m.period**2
    # A model that is passed arrives without a tangent in the field, and one built of values has none.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(f)(model)
        jax.jit(jax.grad(f))(model)
        jax.grad(lambda m: f(dataclasses.replace(m, scale=m.scale * 2)))(model)
        pg.grad(lambda m: f(dataclasses.replace(m, period=m.period * 2)), wrt="period")(model)
        jax.grad(lambda s: f(Sampled(s, 3.0)))(2.0)
        jax.grad(lambda p: f(Sampled(2.0, pg.Diff(p))))(3.0)
        jax.grad(lambda p: f(Sampled(2.0, jax.lax.stop_gradient(p))))(3.0)
        jax.grad(lambda p: f(Sampled(p, NonDiff(p))))(3.0)
        jax.grad(lambda p: p * Sampled(p, {"a": NonDiff(p), "b": [jax.lax.stop_gradient(p), 3.0]}).scale)(3.0)
    potential = lambda parameters: f(Sampled(**parameters))
    with pytest.warns(UserWarning, match=r"ends at `Sampled\.period`") as caught:
        jax.jit(jax.grad(potential))({"scale": 2.0, "period": 3.0})
    assert "partgrad.Diff(x)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax.grad(potential)({"scale": 2.0, "period": 3.0})["period"] == 0.0


def test_a_derivative_that_ends_inside_of_a_field_warns_too():
    @pg.dataclass
    class Fixed:
        scale: jax.Array
        table: dict[str, jax.Array] = pg.field(nondiff=True)

    with pytest.warns(UserWarning, match=r"ends at `.*Fixed\.table`"):
        jax.grad(lambda p: p * Fixed(p, {"a": p, "b": 1.0}).table["a"])(3.0)
