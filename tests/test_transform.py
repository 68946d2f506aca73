"""grad and value_and_grad."""

import dataclasses
import functools
import inspect
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import partgrad as pg
from helpers.models import RBF, Flax, Kernel, Linear, Periodic, Point, Sum, composite, loss
from partgrad import NonDiff, Static, errors

pytestmark = pytest.mark.core


def same(one, other):
    """Equal in structure, values, dtypes and weak types."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


TREES = [
    3.0,
    {"a": 1.0, "b": jnp.ones(2)},
    Point(jnp.ones(2, jnp.bfloat16), np.ones(2)),
    [1.0, (jnp.float32(2.0), {"c": jnp.ones(())})],
    RBF(1.0, jnp.ones(2)),
    Linear(1.0, jnp.ones(2)),
    Flax(jnp.ones(3)),
    {"a": 1.0, "none": None, "empty": []},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: type(t).__name__)
def test_on_trees_of_floats_it_is_jax(tree, x64):
    def f(tree):
        return sum(jnp.sum(jnp.sin(leaf).astype(float)) for leaf in jax.tree.leaves(tree))

    same(pg.grad(f)(tree), jax.grad(f)(tree))
    same(pg.value_and_grad(f)(tree), jax.value_and_grad(f)(tree))
    g = lambda t: (f(t), {"aux": 1, "x": jax.tree.leaves(t)[0]})
    same(pg.grad(g, has_aux=True)(tree), jax.grad(g, has_aux=True)(tree))
    same(pg.value_and_grad(g, has_aux=True)(tree), jax.value_and_grad(g, has_aux=True)(tree))


def test_the_gradient_has_the_shape_of_what_was_named():
    tree = {"a": 2.0, "k": RBF(3.0, jnp.array([1.0, 2.0])), "n": 4}

    def f(t):
        return t["a"] ** 2 * t["k"].variance * t["k"].lengthscale.sum() * t["n"]

    same(pg.grad(f, wrt="a")(tree), jax.grad(lambda a: f({**tree, "a": a}))(2.0))
    same(pg.grad(f, wrt=lambda t: t["k"])(tree), jax.grad(lambda k: f({**tree, "k": k}))(tree["k"]))
    variance, (a,) = pg.grad(f, wrt=lambda t: (t["k"].variance, [t["a"]]))(tree)
    assert (variance, a) == (48.0, 144.0)
    named = pg.grad(f, wrt=lambda t: {"z": t["a"], "b": t["k"].lengthscale})(tree)
    assert list(named) == ["b", "z"]
    assert (named["z"], named["b"].shape) == (144.0, (2,))
    described = pg.grad(f, wrt="**.variance")(tree)
    assert (described["a"], described["n"], described["k"].lengthscale) == (None, None, None)
    assert described["k"].variance == 48.0
    whole = pg.grad(f)(tree)
    assert (whole["a"], whole["n"]) == (144.0, None)


def test_unselected_leaves_are_constants_of_this_transform_only():
    f = lambda p: p["a"] ** 2 * p["b"] ** 2
    inner = lambda p: pg.grad(f, wrt="b")(p)
    assert pg.grad(inner, wrt="a")({"a": 3.0, "b": 5.0}) == 4 * 3.0 * 5.0
    assert jax.grad(lambda p: pg.grad(f, wrt="a")(p))({"a": 3.0, "b": 5.0})["b"] == 4 * 3.0 * 5.0


# --- marks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_named_held_leaf_is_differentiated_through_jit_scan_and_rebuilding():
    kernel = composite()
    want = jax.grad(closed)(1.0)

    def scanned(k):
        return jax.lax.scan(lambda k, r: (k, k(r)), jax.tree.map(jnp.asarray, k), jnp.linspace(0.1, 0.9, 5))[1].sum()

    def rebuilt(k):
        return loss(jax.tree.map(lambda x: x * 1.0, k))

    def replaced(k):
        return loss(dataclasses.replace(k, a=dataclasses.replace(k.a, lengthscale=k.a.lengthscale)))

    def vmapped(k):
        return jax.vmap(lambda r, k: k(r), in_axes=(0, None))(jnp.linspace(0.1, 0.9, 5), k).sum()

    for f in (
        loss,
        jax.jit(loss),
        scanned,
        jax.checkpoint(loss),
        rebuilt,
        replaced,
        vmapped,
        jax.jit(jax.jit(scanned)),
    ):
        for wrt in (lambda k: k.b.b.period, "b.b.period"):
            assert pg.grad(f, wrt=wrt)(kernel) == pytest.approx(float(want), rel=1e-5)
            assert jax.jit(pg.grad(f, wrt=wrt))(kernel) == pytest.approx(float(want), rel=1e-5)


def closed(period):
    r = jnp.linspace(0.1, 0.9, 5)
    rbf = 0.5 * jnp.exp(-0.5 * (r / 0.7) ** 2)
    return (rbf * jnp.exp(-2 * (jnp.sin(jnp.pi * r / period) / 1.3) ** 2)).sum()


def test_a_held_wrapper_in_a_foreign_container_is_handed_over_plain():
    tree = {"a": 3.0, "h": NonDiff(jnp.array(2.0))}
    f = jax.jit(lambda t: t["a"] * t["h"] ** 2)
    assert pg.grad(f, wrt="h")(tree) == 12.0
    assert pg.grad(f, wrt=lambda t: (t["h"], t["a"]))(tree) == (12.0, 4.0)
    assert pg.grad(f, wrt=lambda t: t["net"].bias)({"a": 1.0, "h": 2.0, "net": NonDiff(Linear(1.0, 2.0))}) == 0.0


@pytest.mark.slow
def test_the_gradient_of_a_named_held_leaf_is_built_thawed():
    gradient = pg.grad(loss, wrt=lambda k: k.b.b)(composite())
    assert repr(gradient).endswith("period=NonDiff(None))")


def test_parts_of_a_named_held_leaf_are_differentiable_by_plain_jax():
    selected, rest = pg.partition(composite(), "b.b.period")
    gradient = jax.grad(lambda s: loss(pg.combine(s, rest)))(selected)
    assert gradient.b.b.period == pytest.approx(float(jax.grad(closed)(1.0)), rel=1e-5)


def test_integers_held_by_a_mark_stay_out():
    assert pg.grad(lambda s: jnp.exp(s.x) ** 2 / s.y)(Point(2.0, NonDiff(100))).x == pytest.approx(1.0919630)
    assert pg.grad(lambda s: jnp.exp(s.x) ** 2 / s.y.value)(Point(2.0, Static(100))).x == pytest.approx(1.0919630)


# --- arguments ---------------------------------------------------------------------------------------------------


def test_argnums_as_in_jax():
    f = lambda x, y, z: x["a"] * y**2 * z["k"].variance
    args = ({"a": 2.0}, 3.0, {"k": RBF(4.0, 1.0)})
    for argnums in (0, 1, -1, -2, (0, 2), (2, 0), (1,), [0, 1], (-1, 0)):
        same(pg.grad(f, argnums=argnums)(*args), jax.grad(f, argnums=argnums)(*args))
    assert pg.grad(f, wrt="k.variance", argnums=2)(*args) == 18.0
    both = pg.grad(f, wrt=(None, lambda z: z["k"].variance), argnums=(0, 2))(*args)
    assert both == ({"a": 36.0}, 18.0)
    assert pg.grad(lambda x, *, scale: x * scale)(2.0, scale=3.0) == 3.0


def test_wrt_and_argnums_of_different_lengths():
    for wrt, argnums in [((None,), (0, 1)), ("a", (0, 1)), ((None, None, None), (0, 1))]:
        with pytest.raises(errors.ArgumentError, match="`wrt` and the arguments do not go together") as caught:
            pg.grad(lambda a, b: a, wrt=wrt, argnums=argnums)
        assert "Fix: write wrt=(selector, None) beside argnums=(0, 1)" in str(caught.value)


def test_too_few_arguments_is_worded_as_in_jax():
    for argnums, given in [(0, ()), (2, (1.0,)), ((0, 1), (1.0,))]:
        words = r"differentiating with respect to argnums=.* requires at least \d positional arguments"
        with pytest.raises(TypeError, match=words):
            pg.grad(lambda *a: 0.0, argnums=argnums)(*given)


def test_holomorphic():
    f = lambda p: p["z"] ** 2 * p["n"]
    tree = {"z": 1.0 + 2.0j, "n": 3}
    assert pg.grad(f, holomorphic=True)(tree)["z"] == 6.0 + 12.0j
    with pytest.raises(TypeError, match="holomorphic"):
        pg.grad(f)(tree)


def test_errors_of_jax_stay():
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        pg.grad(lambda p: p["a"] * jnp.ones(2))({"a": 1.0, "n": 2})
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        pg.grad(lambda p: {"x": p["a"]})({"a": 1.0, "n": 2})
    with pytest.raises(TypeError, match="real-valued outputs"):
        pg.grad(lambda p: jnp.int32(p["n"]))({"a": 1.0, "n": 2})
    with pytest.raises(TypeError, match="nothing to differentiate in argument 0"):
        pg.grad(lambda x: x * 1.0)(3)
    assert pg.grad(lambda t: 0.0)(()) == ()
    assert pg.grad(lambda t: 0.0)({"a": None}) == {"a": None}


# --- the function that comes back --------------------------------------------------------------------------------


def test_decorators_and_plain_functions():
    @pg.grad
    def first(x):
        """Square."""
        return x**2

    @pg.value_and_grad(wrt=lambda p: p["a"], has_aux=True)
    def second(p, scale=2.0):
        return p["a"] ** 2 * scale, "aux"

    assert first(3.0) == 6.0
    assert second({"a": 3.0, "n": 1}) == ((18.0, "aux"), 12.0)
    for function, name in ((first, "first"), (second, "second")):
        assert inspect.isfunction(function)
        assert function.__name__ == name
    assert str(inspect.signature(second)) == "(p, scale=2.0)"
    assert first.__doc__ == "Gradient of `first`.\n\nSquare."
    for wrong in (3, "a"):
        with pytest.raises(errors.ArgumentError, match=r"`partgrad.grad` got .* cannot be called[\s\S]*Fix: write"):
            pg.grad(wrong)


@pytest.mark.parametrize("transform", [pg.grad, pg.value_and_grad, pg.jacfwd, pg.jacrev])
def test_the_function_runs_once_for_each_call(transform):
    ran = []
    slope = transform(lambda x, y: ran.append(1) or x * y)
    for _ in range(2):
        slope(2.0, 3.0)
    assert len(ran) == 2


def test_they_bind_as_methods():
    class Plain:
        scale = 2.0

        @pg.grad(argnums=1)
        def slope(self, x):
            return self.scale * x**2

    class Module(eqx.Module):
        w: float

        @pg.grad(wrt=lambda m: m.w)
        def slope(self, x):
            return self.w**2 * x

        @pg.value_and_grad
        def both(self, x):
            return self.w**2 * x

    @pg.dataclass
    class Model:
        w: float
        p: float = pg.field(nondiff=True, default=3.0)

        @functools.partial(pg.grad, wrt="p")
        def slope(self, x):
            return self.w * self.p**2 * x

    assert Plain().slope(3.0) == 12.0
    assert Module(3.0).slope(2.0) == 12.0
    assert eqx.filter_jit(Module(3.0).slope)(2.0) == 12.0
    value, gradient = Module(3.0).both(2.0)
    assert (value, gradient.w) == (18.0, 12.0)
    assert Model(2.0).slope(1.0) == 12.0
    assert pg.grad(Model(2.0).slope)(1.0) == 12.0
    assert pg.grad(Linear(2.0, 1.0))(5.0) == 2.0


# --- under and around the transforms of JAX ----------------------------------------------------------------------


@pytest.mark.slow
def test_under_and_around_every_transform():
    tree = {"a": jnp.array(2.0), "b": jnp.array(3.0), "h": NonDiff(jnp.array(4.0))}
    f = lambda t: t["a"] ** 3 * t["b"] * t["h"]
    g = pg.grad(f, wrt="a")
    want = 3 * 4.0 * 3.0 * 4.0
    assert jax.jit(g)(tree) == want
    assert jax.checkpoint(g)(tree) == want
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    assert jax.vmap(g)(stacked).tolist() == [want, want]
    assert jax.lax.scan(lambda c, _: (c, g(c)), tree, None, length=2)[1].tolist() == [want, want]
    assert jax.lax.cond(True, g, lambda t: t["a"], tree) == want
    assert jax.hessian(lambda a: f({**tree, "a": a}))(2.0) == jax.grad(lambda a: g({**tree, "a": a}))(2.0)
    assert jax.jacfwd(lambda a: g({**tree, "a": a}))(2.0) == 6 * 2.0 * 3.0 * 4.0
    assert pg.grad(lambda t: pg.grad(lambda u: pg.grad(f, wrt="a")(u), wrt="a")(t), wrt="b")(tree) == 6 * 2.0 * 4.0
    for inner in (jax.jit(f), jax.checkpoint(f), lambda t: jax.lax.cond(True, f, f, t)):
        assert pg.grad(inner, wrt="a")(tree) == want
    assert jax.eval_shape(g, tree).shape == ()


@pytest.mark.slow
def test_custom_rules_and_shard_map():
    @jax.custom_vjp
    def triple(t):
        return t["a"] * t["b"]

    triple.defvjp(lambda t: (triple(t), t), lambda t, g: ({"a": 3 * g * t["b"], "b": 3 * g * t["a"]},))
    assert pg.grad(triple, wrt="a")({"a": 2.0, "b": 5.0}) == 15.0
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    g = pg.grad(lambda t: (t["a"] * t["b"]).sum(), wrt="a")
    specs = {"a": PartitionSpec("i"), "b": PartitionSpec("i")}
    mapped = jax.shard_map(g, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("i"))
    assert mapped({"a": jnp.ones(2), "b": jnp.array([3.0, 4.0])}).tolist() == [3.0, 4.0]


def test_compiled_cost_equals_the_split_by_hand():
    weights = [jnp.ones((8, 8)) for _ in range(8)]

    def network(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    def flops(f):
        return jax.jit(f).lower(weights, jnp.ones((4, 8))).compile().cost_analysis()["flops"]

    by_hand = flops(lambda w, x: jax.grad(lambda last: network([*w[:-1], last], x))(w[-1]))
    assert flops(pg.grad(network, wrt=lambda w: w[-1])) == by_hand
    assert flops(pg.grad(network)) > 2 * by_hand


# --- the four proposals of jax#2588 ------------------------------------------------------------------------------


def test_a_structure_with_an_integer_count():
    class DifferentiableView(typing.NamedTuple):
        parameter: jnp.ndarray
        num_data: int

    def func(s):
        return jnp.exp(s.parameter) ** 2 / s.num_data

    for count in (100, NonDiff(100)):
        gradient = pg.grad(func)(DifferentiableView(2.0, count))
        assert gradient.parameter == pytest.approx(2 * np.exp(4.0) / 100, rel=1e-5)


def test_a_non_differentiable_value_under_plain_grad():
    @pg.dataclass
    class Base:
        variance: float

    @pg.dataclass
    class SquaredExponential(Base):
        lengthscale: float

    f = lambda k: 2 * k.variance + 3 * k.lengthscale if hasattr(k, "lengthscale") else 2 * k.variance
    gradient = jax.grad(f)(SquaredExponential(NonDiff(1.0), 1.0))
    assert (gradient.variance, gradient.lengthscale) == (0.0, 3.0)
    assert jax.grad(f)(Base(1.0)).variance == 2.0
    a = jnp.zeros(10)
    assert type(NonDiff(a) + a) is type(a)


def test_attribute_grad_and_fancy_grad_are_one_line():
    def attribute_grad(f, name):
        return pg.grad(f, wrt=name)

    def fancy_grad(f, extract, replace=None):
        return pg.grad(f, wrt=extract)

    kernel = RBF(1.4, 3.2)
    f = lambda k: 2 * k.variance + 3 * k.lengthscale
    assert attribute_grad(f, "variance")(kernel) == 2.0
    assert fancy_grad(f, lambda k: k.variance, lambda k, v: dataclasses.replace(k, variance=v))(kernel) == 2.0


def test_composite_kernels():
    gradient = pg.grad(loss, wrt=lambda k: k.variance)(RBF(1.0, 2.0) + RBF(0.5, 0.7) * Periodic(1.0, 1.3, 1.0))
    assert isinstance(gradient, Kernel)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradient)] == [
        ".a.variance",
        ".b.a.variance",
        ".b.b.variance",
    ]
    assert isinstance(gradient, Sum)


def test_the_function_of_hvp_may_have_parameters_of_any_name():
    f = lambda p, x, v: p**3 * x * v
    np.testing.assert_allclose(pg.hvp(f)(2.0, 1.0, x=3.0, v=5.0), 180.0)
