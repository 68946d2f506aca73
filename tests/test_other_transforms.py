"""The other transforms: Jacobians, Hessians, jvp, vjp, linearize, hvp, and arguments by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import partgrad as pg
from helpers.messages import refused
from helpers.models import RBF, Linear, Periodic, Sum, composite
from helpers.tables import examples
from partgrad import NonDiff, errors

MODEL = {
    "k": RBF(1.5, jnp.array([0.5, 2.0])),
    "lin": Linear(jnp.ones((2, 2)), 0.3),
    "h": NonDiff(2.0),
    "n": 3,
    "name": "x",
}


SELECTORS = [
    None,
    "k",
    "lin.bias",
    "h",
    "**.lengthscale",
    RBF,
    lambda m: (m["k"].lengthscale, {"z": m["lin"]}),
    lambda m: m.variance,
    pg.exclude("k"),
    pg.path("k.variance") | Linear,
]


def f(m, x):
    """A vector and a scalar that depend on every leaf."""
    y = jnp.tanh(m["lin"].weight @ (x * m["k"].lengthscale) + m["lin"].bias) * m["k"].variance
    return {"y": y, "s": (y**2).sum() * m["h"] ** 2 * m["n"]}


def split(wrt):
    """The function closed over the unselected rest, its leaves, and how they are shaped: a reference by plain JAX."""
    selected, rest = pg.partition(MODEL, wrt)
    leaves, structure = jax.tree.flatten(selected)

    def closed(leaves, x):
        return f(pg.combine(structure.unflatten(leaves), rest), x)

    return closed, [jnp.asarray(leaf) for leaf in leaves]


X = jnp.array([0.7, -1.1])


def same(one, other):
    """The same leaves, in whichever order: a selector may arrange them as it likes."""
    left = jax.tree.leaves(other)
    for leaf in jax.tree.leaves(one):
        equal = [jnp.shape(leaf) == jnp.shape(x) and np.allclose(leaf, x, rtol=1e-5, atol=1e-6) for x in left]
        assert any(equal), f"{leaf} is not among {left}"
        del left[equal.index(True)]
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("wrt", SELECTORS, ids=range(len(SELECTORS)))
def test_each_transform_is_that_of_jax_on_the_function_closed_over_the_rest(wrt):
    closed, leaves = split(wrt)
    ours = pg.jacfwd, pg.jacrev, pg.jacobian, pg.hessian
    theirs = jax.jacfwd, jax.jacrev, jax.jacobian, jax.hessian
    both = jax.jit(
        lambda leaves, x: ([own(f, wrt=wrt)(MODEL, x) for own in ours], [own(closed)(leaves, x) for own in theirs])
    )
    for got, want in zip(*both(leaves, X), strict=True):
        assert list(got) == ["s", "y"]
        same(got["s"], want["s"])
        same(got["y"], want["y"])
    gradient = pg.grad(lambda m, x: f(m, x)["s"], wrt=wrt)(MODEL, X)
    tangent = jax.tree.map(lambda g: jnp.full(jnp.shape(g), 0.5, jnp.result_type(g)), gradient)
    tangents = [jnp.full(leaf.shape, 0.5) for leaf in leaves]
    want = jax.jvp(lambda p: closed(p, X), (leaves,), (tangents,))
    selector = pg.each(lambda m: m) if wrt is None else wrt
    same(pg.jvp(f, (MODEL, X), (tangent,), wrt=selector), want)
    value, linear = pg.linearize(f, MODEL, X, wrt=selector)
    same((value, linear(tangent)), want)
    value, pull = pg.vjp(f, MODEL, X, wrt=selector)
    (pulled,) = pull(jax.tree.map(jnp.ones_like, value))
    assert jax.tree.structure(pulled) == jax.tree.structure(gradient)
    same(pulled, jax.vjp(lambda p: closed(p, X), leaves)[1](jax.tree.map(jnp.ones_like, value)))
    product = pg.hvp(lambda m, x: f(m, x)["s"], wrt=wrt)(MODEL, tangent, X)
    assert jax.tree.structure(product) == jax.tree.structure(gradient)
    same(product, jax.jvp(jax.grad(lambda p: closed(p, X)["s"]), (leaves,), (tangents,))[1])


@pytest.mark.slow
def test_a_jacobian_over_a_part_has_the_parts_structure():
    jacobian = pg.jacrev(f, wrt=lambda m: (m["k"], m["lin"].bias))(MODEL, X)
    kernel, bias = jacobian["y"]
    assert isinstance(kernel, RBF)
    assert (kernel.variance.shape, kernel.lengthscale.shape, bias.shape) == ((2,), (2, 2), (2,))
    over_model = pg.jacfwd(f)(MODEL, X)["s"]
    assert (over_model["n"], over_model["name"], over_model["h"].value) == (None, None, None)
    hessian = pg.hessian(lambda m: f(m, X)["s"], wrt=lambda m: (m["k"].variance, m["lin"].bias))(MODEL)
    assert [[entry.shape for entry in row] for row in hessian] == [[(), ()], [(), ()]]
    assert pg.hessian(lambda k: k.variance**2 * k.lengthscale)(RBF(2.0, 3.0)).variance.lengthscale == 4.0


@pytest.mark.slow
@given(st.data())
@settings(max_examples=examples(30))
def test_transforms_nest(data):
    names = st.sampled_from(["a", "b", "c"])
    outer, middle, inner = data.draw(names), data.draw(names), data.draw(names)
    g = lambda t: t["a"] ** 3 * t["b"] ** 2 * jnp.sin(t["c"])
    tree = {"a": 0.7, "b": 1.3, "c": 0.4, "n": 2}
    transforms = [pg.grad, pg.jacfwd, pg.jacrev]
    nested, plain = g, lambda a, b, c: g({"a": a, "b": b, "c": c})
    for name in (inner, middle, outer):
        transform = data.draw(st.sampled_from(transforms))
        wrap = data.draw(st.sampled_from([lambda h: h, jax.jit, jax.checkpoint]))
        nested = transform(wrap(nested), wrt=name)
        plain = jax.grad(plain, argnums="abc".index(name))
    np.testing.assert_allclose(nested(tree), plain(0.7, 1.3, 0.4), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_held_leaves_that_are_named_are_reached_through_jit():
    kernel = composite()
    g = jax.jit(lambda k: k(jnp.linspace(0.1, 0.9, 5)).sum())
    want = pg.grad(g, wrt="b.b.period")(kernel)
    assert want != 0.0
    assert pg.jvp(g, (kernel,), (1.0,), wrt="b.b.period")[1] == pytest.approx(float(want), rel=1e-5)
    assert pg.vjp(g, kernel, wrt="b.b.period")[1](1.0)[0] == pytest.approx(float(want), rel=1e-5)
    assert pg.jacfwd(g, wrt=lambda k: k.b.b.period)(kernel) == pytest.approx(float(want), rel=1e-5)


# --- primals -----------------------------------------------------------------------------------------------------------


def test_without_wrt_every_primal_is_selected_as_in_jax():
    g = lambda p, x: jnp.sin(p["a"]) * x
    primals, tangents = ({"a": 2.0}, jnp.ones(2)), ({"a": 1.0}, jnp.full(2, 3.0))
    same(pg.jvp(g, primals, tangents), jax.jvp(g, primals, tangents))
    assert jax.tree.structure(pg.vjp(g, *primals)[1](jnp.ones(2))) == jax.tree.structure(
        jax.vjp(g, *primals)[1](jnp.ones(2))
    )
    same(pg.vjp(g, *primals)[1](jnp.ones(2)), jax.vjp(g, *primals)[1](jnp.ones(2)))
    same(pg.linearize(g, *primals)[1](*tangents), jax.linearize(g, *primals)[1](*tangents))


def test_primals_one_by_one():
    g = lambda p, x, q: p["a"] * x * q["b"]
    primals = ({"a": 2.0, "n": 1}, 3.0, {"b": 5.0, "c": 1.0})
    pulled = pg.vjp(g, *primals, wrt=("a", None, lambda q: q["b"]))[1](1.0)
    assert pulled == (15.0, 10.0, 6.0)
    assert pg.vjp(g, *primals)[1](1.0) == ({"a": 15.0, "n": None}, 10.0, {"b": 6.0, "c": 0.0})
    assert pg.vjp(g, *primals, wrt="a")[1](1.0) == (15.0,)
    assert pg.jvp(g, primals, ({"a": 1.0, "n": None}, 0.0, {"b": 0.0, "c": 0.0}))[1] == 15.0
    assert pg.vjp(lambda x, n: x * n, 2.0, 3)[1](1.0) == (3.0, None)


def test_aux_is_handed_through():
    g = lambda p: (p["a"] ** 2, {"aux": "kept"})
    tree = {"a": 3.0, "n": 1}
    assert pg.jvp(g, (tree,), (1.0,), wrt="a", has_aux=True) == (9.0, 6.0, {"aux": "kept"})
    value, pull, aux = pg.vjp(g, tree, wrt="a", has_aux=True)
    assert (value, pull(1.0), aux) == (9.0, (6.0,), {"aux": "kept"})
    value, along, aux = pg.linearize(lambda p: (p["a"] ** 2, 2 * p["a"]), tree, wrt="a", has_aux=True)
    assert (value, along(1.0), aux) == (9.0, 6.0, 6.0)
    h = lambda p: (p["a"] ** 2, {"aux": 2 * p["a"]})
    for transform, derivative in ((pg.jacfwd, 6.0), (pg.jacrev, 6.0), (pg.hessian, 2.0)):
        assert transform(h, wrt="a", has_aux=True)(tree) == (derivative, {"aux": 6.0})


def test_tangents_of_the_wrong_structure():
    g = lambda p: p["a"] * p["b"]
    tree = {"a": 2.0, "b": 3.0, "n": 1}
    for tangent, words in [
        ({"a": 1.0}, "got nothing"),
        ({"a": 1.0, "b": 1.0, "n": 0}, "at `['n']`.\n  Expected None, got a leaf"),
        ({"a": 1.0, "b": None, "n": None}, "at `['b']`.\n  Expected a leaf, got None"),
        ([1.0], "at the tree itself.\n  Expected dict, got list"),
    ]:
        for call in (lambda t=tangent: pg.jvp(g, (tree,), (t,)), lambda t=tangent: pg.linearize(g, tree)[1](t)):
            refused(call, ValueError, "The tangent of argument 0 has a different structure", words)
    refused(
        lambda: pg.hvp(g, wrt="a")(tree, {"a": 1.0}), ValueError, "The vector of argument 0 has a different structure"
    )
    refused(
        lambda: pg.jvp(g, (tree,), (1.0, 2.0), wrt="a"),
        TypeError,
        "Expected a tuple of 1 tangents, one for each selected argument, got 2",
    )
    refused(lambda: pg.jvp(g, (tree,), 1.0, wrt="a"), TypeError, "Expected a tuple of 1 tangents", "got float")
    refused(lambda: pg.vjp(g, tree, wrt=("a", "b")), TypeError, "2 selectors for 1 arguments")
    refused(lambda: pg.vjp(g, {"n": 1}), TypeError, "nothing to differentiate in argument 0")
    refused(lambda: pg.jvp(3, (tree,), (1.0,)), TypeError, "`partgrad.jvp` got int 3, which cannot be called")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.complex64])
def test_a_direction_of_another_dtype(dtype):
    tree, direction = {"a": jnp.ones(2), "b": 1.0}, {"a": jnp.ones(2, dtype), "b": 1.0}
    g = lambda p: jnp.sum(p["a"]) ** 2 * p["b"]
    for call in (
        lambda direction: pg.jvp(g, (tree,), (direction,)),
        lambda direction: pg.linearize(g, tree)[1](direction),
        lambda direction: pg.hvp(g)(tree, direction),
    ):
        remedy = "give a real one" if dtype == jnp.complex64 else "'float32')."
        refused(lambda: call(direction), TypeError, f"of `['a']` has dtype {dtype.__name__}", "float32", remedy)
        call({"a": direction["a"].real.astype("float32"), "b": 1.0})


def test_errors_of_jax_stay():
    with pytest.raises(TypeError, match="real-valued"):
        pg.jacrev(lambda p: p["a"])({"a": 1.0 + 1.0j, "n": 1})


# --- arguments by name -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_argnames():
    def g(kernel, x, *, noise, n=2):
        return kernel["a"] * x * noise["s"] ** 2 * n

    kernel, noise = {"a": 2.0, "i": 1}, {"s": 3.0}
    assert pg.grad(g, argnames="noise")(kernel, 5.0, noise=noise) == {"s": 120.0}
    assert pg.grad(g, argnames=("kernel", "noise"))(kernel, 5.0, noise=noise) == ({"a": 90.0, "i": None}, {"s": 120.0})
    assert pg.grad(g, wrt=("a", "s"), argnames=["kernel", "noise"])(kernel=kernel, x=5.0, noise=noise) == (90.0, 120.0)
    assert pg.grad(g, argnums=0, argnames="noise", wrt=("a", "s"))(kernel, 5.0, noise=noise) == (90.0, 120.0)
    assert pg.grad(g, argnames="x")(kernel, 5.0, noise=noise) == 36.0
    assert pg.jacfwd(g, argnames="noise", wrt="s")(kernel, 5.0, noise=noise) == 120.0
    assert pg.hessian(g, argnames=("x", "noise"))(kernel, 5.0, noise=noise)[0][1]["s"] == 24.0
    assert pg.grad(lambda **kw: kw["q"] ** 2, argnames="q")(q=3.0) == 6.0


def test_argument_names_that_do_not_fit():
    def g(kernel, noise=1.0):
        return kernel * noise

    refused(
        lambda: pg.grad(g, argnames="nose"),
        TypeError,
        "argnames names `nose`, which is not a parameter",
        "write 'noise'",
    )
    refused(
        lambda: pg.grad(g, argnames="noise")(1.0), TypeError, "names `noise`, which the caller did not pass", "pass it"
    )
    refused(lambda: pg.grad(g, argnums=0, argnames="kernel")(1.0), TypeError, "name argument 0 twice")
    refused(
        lambda: pg.grad(g, argnames=("kernel", "noise"), wrt=(None,)),
        TypeError,
        "1 selectors for 2 arguments, ['kernel', 'noise']",
    )


@pytest.mark.parametrize("transform", [pg.grad, pg.value_and_grad, pg.jacfwd, pg.jacrev, pg.hessian])
def test_a_decorator_keeps_its_options(transform):
    f = lambda x, y: x * y**3
    decorated, direct = transform(argnums=1)(f)(2.0, 3.0), transform(f, argnums=1)(2.0, 3.0)
    assert jax.tree.leaves(decorated) == jax.tree.leaves(direct)
    assert jax.tree.leaves(transform(f, argnums=0)(2.0, 3.0)) != jax.tree.leaves(direct)


def test_decorators():
    @pg.jacfwd(wrt="a")
    def jacobian(p):
        """Doubles."""
        return p["a"] * jnp.ones(2)

    @pg.hessian
    def second(x):
        return x**3

    assert jacobian({"a": 1.0, "n": 2}).tolist() == [1.0, 1.0]
    assert (jacobian.__name__, jacobian.__doc__) == ("jacobian", "Jacobian of `jacobian`.\n\nDoubles.")
    assert second(2.0) == 12.0


@pytest.mark.slow
def test_compiled_cost_equals_the_split_by_hand():
    weights = [jnp.ones((8, 8)) for _ in range(6)]

    def network(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    def flops(g):
        return jax.jit(g).lower(weights, jnp.ones((4, 8))).compile().cost_analysis()["flops"]

    def by_hand(transform):
        return flops(lambda w, x: transform(lambda last: network([*w[:-1], last], x))(w[-1]))

    for ours, theirs in ((pg.jacrev, jax.jacrev), (pg.jacfwd, jax.jacfwd), (pg.hessian, jax.hessian)):
        assert flops(ours(network, wrt=lambda w: w[-1])) == by_hand(theirs)


def test_sum_of_kernels_by_class():
    gradient = pg.grad(lambda k: k(0.3), wrt=Periodic)(composite())
    assert isinstance(gradient, Sum)
    assert (gradient.b.a.variance, gradient.b.b.period) == (None, None)
    assert gradient.b.b.variance is not None


# --- unused leaves -----------------------------------------------------------------------------------------------------


def test_unused_leaves():
    def g(p, q=2.0):
        return p["a"] ** 2 * jax.lax.stop_gradient(p["b"]) + 0.0 * p["c"] + q, p["n"]

    tree = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 5.0, "n": 1}
    zero, _ = pg.grad(g, has_aux=True)(tree)
    assert (zero["b"], zero["c"], zero["d"], zero["n"]) == (0.0, 0.0, 0.0, None)
    none, _ = pg.grad(g, has_aux=True, unused="none")(tree)
    assert (none["a"], none["b"], none["c"], none["d"]) == (12.0, None, 0.0, None)
    (value, _), both = jax.jit(pg.value_and_grad(g, has_aux=True, unused="none", argnums=(0, 1)))(tree, 1.0)
    assert (value, both[0]["d"], both[1]) == (19.0, None, 1.0)
    refused(
        lambda: pg.grad(g, has_aux=True, unused="error")(tree),
        ValueError,
        "The output cannot depend on `['b']`, `['d']`.",
        "unused='none'",
    )
    assert pg.grad(g, wrt=lambda p: (p["a"], p["c"]), has_aux=True, unused="error")(tree)[0] == (12.0, 0.0)
    refused(lambda: pg.grad(g, unused="warn"), TypeError, "`unused` is 'warn'", "Expected 'zero', 'none' or 'error'")

    @pg.value_and_grad(wrt="a", unused="error")
    def h(p):
        return p["b"] * 1.0

    refused(lambda: h(tree), ValueError, "The output cannot depend on `['a']`.")


# --- arguments by name -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_argument_named_twice_and_none_at_all():
    f = lambda a, b: a * b
    for argnums in ((0, 0), (0, -2)):
        with pytest.raises(errors.ArgumentError, match="name argument 0 twice"):
            pg.grad(f, argnums=argnums)(1.0, 2.0)
    assert pg.grad(f, argnums=())(1.0, 2.0) == ()
    with pytest.raises(ValueError, match="requires at least 3 positional"):
        pg.grad(f, argnums=-3)(1.0, 2.0)
