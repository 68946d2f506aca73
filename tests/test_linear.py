"""What vjp and linearize return is a pytree, and slots serve several threads at once."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.messages import refused
from helpers.models import RBF, Periodic

X = jnp.array([0.3, 0.6])


def f(k, x):
    return k.variance * jnp.sin(x * k.lengthscale)


KERNEL = RBF(jnp.array(2.0), jnp.array(0.5))


DIRECTION = RBF(jnp.array(1.0), jnp.array(3.0))


@pytest.mark.parametrize("wrt", [None, "variance", ("lengthscale", None)])
def test_the_pullback_leaves_jit_and_vmap(wrt):
    want = pg.vjp(f, KERNEL, X, wrt=wrt)[1](jnp.ones(2))
    value, pull = jax.jit(lambda k, x: pg.vjp(f, k, x, wrt=wrt))(KERNEL, X)
    same(jax.jit(lambda pull, ct: pull(ct))(pull, jnp.ones(2)), want)
    same(pull(jnp.ones(2)), want)
    assert value.shape == (2,)
    pulls = jax.vmap(lambda x: pg.vjp(f, KERNEL, x, wrt=wrt)[1])(jnp.stack([X, X]))
    same(jax.tree.map(lambda g: g[0], jax.vmap(lambda pull: pull(jnp.ones(2)))(pulls)), want)


@pytest.mark.parametrize("wrt", [None, "variance"])
def test_the_linear_map_leaves_jit(wrt):
    tangents = (DIRECTION, jnp.ones(2)) if wrt is None else (1.0,)
    want = pg.linearize(f, KERNEL, X, wrt=wrt)[1](*tangents)
    _, linear = jax.jit(lambda k, x: pg.linearize(f, k, x, wrt=wrt))(KERNEL, X)
    same(jax.jit(lambda linear, *t: linear(*t))(linear, *tangents), want)


def test_what_they_return_has_the_attributes_of_jaxs():
    for ours, jaxs in [(pg.vjp, jax.vjp), (pg.linearize, jax.linearize)]:
        got, want = ours(jnp.sin, 1.0)[1], jaxs(jnp.sin, 1.0)[1]
        for name in (name for name in dir(want) if not name.startswith("_")):
            kind = type(got) if name == "with_logs" else type(getattr(want, name))
            assert type(getattr(got, name)) is kind
        with pytest.raises(AttributeError):
            _ = got._nothing


def test_a_program_is_compiled_once_for_equal_pullbacks():
    apply = jax.jit(lambda pull: pull(jnp.ones(2)))
    for variance in (1.0, 2.0):
        _, pull = jax.jit(lambda k: pg.vjp(f, k, X, wrt=lambda k: k.variance))(RBF(jnp.array(variance), jnp.array(0.5)))
        apply(pull)
    assert apply._cache_size() <= 2


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_threads_that_share_a_structure_see_their_own_shapes():
    def largest(t):
        return max(t.values(), key=lambda leaf: leaf.size)

    def resolve(n):
        tree = {"a": np.zeros(n % 7), "b": np.zeros(3)}
        return [pg.items(tree, wrt)[0][0] for wrt in (largest, pg.matching(lambda path, leaf: leaf.size > 2))]

    def wanted(n):
        return ["['a']" if n % 7 >= 3 else "['b']", "['a']" if n % 7 > 2 else "['b']"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(resolve, range(400))) == list(map(wanted, range(400)))


def test_a_selector_may_select_itself():
    inner = lambda t: t["a"]
    wrt = lambda t: [leaf for leaf in t.values() if leaf.size == pg.select({"a": 1.0, "b": np.zeros(2)}, inner)]
    assert pg.items({"a": np.zeros(1), "b": np.zeros(2)}, wrt)[0][0] == "['a']"


def test_callables_run_on_every_call_and_see_what_changed():
    class Setting:
        field = "variance"

    wrt = lambda k: getattr(k, Setting.field)
    gradient = pg.grad(lambda k: k.variance * k.lengthscale**2, wrt=wrt)
    assert gradient(KERNEL) == 0.25
    Setting.field = "lengthscale"
    assert gradient(KERNEL) == 2.0
    assert pg.grad(lambda k: k.period * k.variance, wrt=lambda k: k.period)(Periodic(2.0, 1.0, 1.0)) == 2.0


# --- one argument, or some ---------------------------------------------------------------------------------------------


MODEL, NOISE = {"a": 3.0, "n": 1}, {"s": 2.0, "t": 5.0}


def product(model, noise, scale=1.0):
    return model["a"] ** 2 * noise["s"] ** 3 * noise["t"] * scale


@pytest.mark.parametrize("which", [{"argnums": 1}, {"argnums": -1}, {"argnames": "noise"}], ids=str)
def test_one_argument_of_a_linear_map(which):
    for wrt, tangent, want in (("s", 1.0, 540.0), (None, {"s": 1.0, "t": 1.0}, 540.0 + 72.0)):
        value, along = pg.jvp(product, (MODEL, NOISE), (tangent,), wrt=wrt, **which)
        assert (value, along) == (360.0, want)
        assert pg.linearize(product, MODEL, NOISE, wrt=wrt, **which)[1](tangent) == want
        (pulled,) = pg.vjp(product, MODEL, NOISE, wrt=wrt, **which)[1](1.0)
        assert pulled == pg.grad(product, wrt=wrt, **which)(MODEL, NOISE)
        along = jax.jvp(lambda s: pg.grad(product, wrt=wrt, **which)(MODEL, {**NOISE, "s": s}), (2.0,), (1.0,))[1]
        direction = tangent if wrt else {"s": 1.0, "t": 0.0}
        same(pg.hvp(product, wrt=wrt, **which)(MODEL, direction, NOISE), along)


def test_a_tangent_of_another_shape_is_named_by_its_leaf():
    f = lambda m: jnp.sum(m["a"]["x"] ** 2) + m["b"]
    model = {"a": {"x": jnp.ones(3)}, "b": 2.0, "n": 1}
    wrong = {"a": {"x": jnp.ones(2)}, "b": 1.0, "n": None}
    linear = pg.linearize(f, model)[1]
    calls = {
        "tangent": [lambda: pg.jvp(f, (model,), (wrong,)), lambda: linear(wrong), lambda: jax.jit(linear)(wrong)],
        "vector": [lambda: pg.hvp(f)(model, wrong)],
    }
    for what, several in calls.items():
        for call in several:
            refused(call, ValueError, f"The {what} of `['a']['x']` has shape (2,).", "there, (3,).")
    refused(lambda: pg.jvp(f, (model,), (jnp.ones(1),), wrt="b"), ValueError, "`['b']` has shape (1,)", "there, ()")
    refused(lambda: pg.jvp(f, (model,), (1.0,), wrt="a.x"), ValueError, "`['a']['x']` has shape ()")
    # Elements that are selected are a leaf of their own.
    refused(lambda: pg.jvp(f, (model,), (jnp.ones(3),), wrt="a.x[1:]"), ValueError, "has shape (3,)", "there, (2,)")
    assert pg.jvp(f, (model,), (np.ones(2),), wrt="a.x[1:]")[1] == 4.0


@pytest.mark.parametrize("transform", [pg.jacfwd, pg.jacrev, pg.hessian], ids=lambda t: t.__name__)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"double_where": True}], ids=str)
def test_a_jacobian_of_nothing(transform, options):
    f = lambda a, b: {"y": a * b, "z": jnp.ones(2)}
    assert transform(f, argnums=(), **options)(1.0, 2.0) == {"y": (), "z": ()}
    with_aux = lambda tree, x: ((x, x * 2), "aux")
    assert transform(with_aux, has_aux=True, **options)({"empty": []}, 1.0) == (({"empty": []},) * 2, "aux")
    refused(lambda: transform(f, has_aux=True, argnums=(), **options)(1.0, 2.0), TypeError, "has_aux=True")


def test_several_arguments_of_a_linear_map():
    wrt, which = ("s", "a"), {"argnums": (1, 0)}
    assert pg.jvp(product, (MODEL, NOISE), (1.0, 0.0), wrt=wrt, **which)[1] == 540.0
    assert pg.vjp(product, MODEL, NOISE, wrt=wrt, **which)[1](1.0) == (540.0, 240.0)
    assert pg.hvp(product, wrt=wrt, **which)(MODEL, (0.0, 1.0), NOISE) == (360.0, 80.0)
    assert pg.hvp(product, wrt=("s",), argnames=("noise",))(MODEL, (1.0,), noise=NOISE) == (540.0,)
    refused(lambda: pg.hvp(product, wrt=wrt, **which)(MODEL, 1.0, NOISE), ValueError, "a tuple of 2")
    refused(lambda: pg.jvp(product, (MODEL, NOISE), (1.0,), argnums=2), TypeError, "There is no argument 2, `scale`")
    refused(lambda: pg.vjp(product, MODEL, NOISE, wrt=("a", "s"), argnums=0), TypeError, "which is not a selector")


def test_options_of_jax_pass_through():
    assert pg.vjp(product, MODEL, NOISE, reduce_axes=())[1](1.0) == pg.vjp(product, MODEL, NOISE)[1](1.0)
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        pg.vjp(product, MODEL, NOISE, reduce_axes=("i",))
    for transform in (pg.vjp, pg.linearize):
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            transform(product, MODEL, NOISE, nothing=1)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX has these options since 0.12")
def test_options_of_jax_that_are_prefixes_of_the_primals():
    for prefix, want in [(((True, False), (True, False)), (240.0, 540.0, 0.0)), ((False, True), (0.0, 540.0, 72.0))]:
        model, noise = pg.vjp(product, MODEL, NOISE, in_nzs=prefix)[1](1.0)
        assert (model["a"], noise["s"], noise["t"]) == want
        assert pg.vjp(product, MODEL, NOISE, wrt=("a", "t"), in_nzs=prefix)[1](1.0) == want[::2]
    _, pull = pg.vjp(lambda x, y: x["w"] * y, {"w": 3.0, "n": 1}, 2.0, saveable_args=(False, True))
    _, of_jax = jax.vjp(lambda x, y: x * y, 3.0, 2.0, saveable_args=(False, True))
    assert [type(leaf) for leaf in jax.tree.leaves(pull.args_res)] == [
        type(x) for x in jax.tree.leaves(of_jax.args_res)
    ]


def test_what_transforms_return_says_what_it_is():
    for transform in (pg.grad, pg.value_and_grad, pg.jacfwd, pg.jacrev, pg.hessian, pg.hvp):
        assert f"{transform.__name__}(product)" in repr(transform(product))
        assert "(RBF)" in repr(transform(KERNEL))
    assert "partgrad.vjp" in repr(pg.vjp(product, MODEL, NOISE)[1])
    assert "partgrad.linearize" in repr(pg.linearize(product, MODEL, NOISE)[1])
    assert "3 entries" in repr(pg.ravel([1.0, NOISE])[1])
    assert all(word in repr(pg.path("a.b") | "c") for word in ("path", "a.b", "c"))


@pytest.mark.parametrize("linear", [lambda x: pg.vjp(jnp.sin, x)[1], lambda x: pg.linearize(jnp.sin, x)[1]])
def test_linear_maps_leave_jit(linear):
    result = jax.jit(linear)(0.5)(1.0)
    np.testing.assert_allclose(jax.tree.leaves(result), [np.cos(0.5)], rtol=1e-5)


# --- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrt", [None, "a", lambda t: (t["b"], t["a"]), {"x": "a", "y": "b"}], ids=["all", "a", "pair", "dict"]
)
def test_gradients_are_added_to_references(wrt):
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0), "n": 4}
    loss = lambda t, x: jnp.sum(t["a"] ** 2) * t["b"] * x
    gradient = pg.grad(loss, wrt=wrt)(tree, 2.0)

    @jax.jit
    def accumulated(tree, xs):
        refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.ones_like(leaf)), gradient)
        for x in xs:
            value, pull = pg.vjp(lambda t, x=x: loss(t, x), tree, wrt=wrt)
            pull.with_refs(refs)(jnp.ones_like(value))
        return jax.tree.map(jax.freeze, refs)

    found = accumulated(tree, (1.0, 1.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 1 + b), found, gradient)


def test_references_in_a_scan_of_microbatches():
    params = {"w": jnp.arange(4.0).reshape(2, 2), "lora": jnp.ones((2, 2))}
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + x @ p["lora"]) ** 2)
    xs = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)

    def body(refs, x):
        value, pull = pg.vjp(loss, params, x, wrt="lora")
        pull.with_refs(refs)(jnp.ones_like(value))
        return refs, None

    @jax.jit
    def accumulated():
        ref = jax.new_ref(jnp.zeros((2, 2)))
        jax.lax.scan(lambda _, x: ((), body(ref, x)[1]), (), xs)
        return jax.freeze(ref)

    np.testing.assert_allclose(accumulated(), sum(pg.grad(loss, wrt="lora")(params, x) for x in xs), rtol=1e-5)


def test_references_of_the_wrong_structure_are_refused():
    _, pull = pg.vjp(lambda t: t["a"] * t["b"], {"a": 1.0, "b": 2.0})
    refused(lambda: pull.with_refs({"a": jax.new_ref(0.0)}), ValueError, "The reference of argument 0")
    refused(lambda: pull.with_refs(), TypeError, "a tuple of 1 references")


@pytest.mark.skipif(not hasattr(jax, "ad") or not hasattr(jax.ad, "DontWant"), reason="JAX 0.12 has it")
def test_a_gradient_that_is_not_wanted():
    value, pull = pg.vjp(lambda t: t["a"] * t["b"], {"a": 1.0, "b": 2.0}, wrt={"x": "a", "y": "b"})
    ref = jax.new_ref(jnp.array(0.0))
    pull.with_refs({"x": ref, "y": jax.ad.DontWant()})(jnp.ones_like(value))
    assert ref[...] == 2.0


@pytest.mark.skipif(not hasattr(jax.vjp(jnp.sin, 1.0)[1], "with_logs"), reason="JAX 0.12 has it")
def test_logs_of_a_backward_pass():
    _, pull = pg.vjp(lambda t: t["a"] * t["b"], {"a": 1.0, "b": 2.0}, wrt={"x": "a", "y": "b"})
    (gradient,), logs = pull.with_logs(1.0)
    assert gradient == {"x": 2.0, "y": 1.0}
    assert logs == jax.vjp(jnp.sin, 1.0)[1].with_logs(1.0)[1]
