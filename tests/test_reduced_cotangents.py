"""`pg.intermediate(name, reduce=...)`: cotangents of values inside a function, reduced in the backward pass."""

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.ad_checkpoint import checkpoint_name as name
from jax.sharding import AxisType, PartitionSpec as P

import partgrad as pg
from helpers.tables import table
from test_intermediates import WRAPS, X, names_twice, rest, wrapped

NAMES = [wrap for wrap in WRAPS if wrap != "while"]
LOOPS = {"scan", "map", "shard_map"}


def measures(cotangent):
    """Several kinds of numbers, in several containers."""
    return {
        "norm": jnp.sum(cotangent**2),
        "zeros": (jnp.mean(cotangent == 0), jnp.sum(cotangent > 0) + 2**30 + 1),
        "signs": cotangent > 0,
        "nothing": None,
    }


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5)


@table("outer, inner, double_where", NAMES, NAMES, [False, True], most=14, quick=2)
def test_it_is_the_reduction_of_the_cotangent_in_every_container(outer, inner, double_where):
    f, containers = wrapped(inner, outer), (inner, outer)
    options = {"double_where": double_where}
    full = pg.grad(f, wrt=pg.intermediate("h"), **options)(X)
    axes = sum(container in LOOPS for container in containers)
    expected = measures
    for _ in range(axes):
        expected = jax.vmap(expected)
    wrt = {"x": None, "h": pg.intermediate("h", reduce=measures)}
    found = jax.jit(pg.grad(f, wrt=wrt, **options))(X)
    same(found["h"], expected(full))
    np.testing.assert_allclose(found["x"], jax.grad(f)(X), rtol=1e-5)


DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
RESULTS = ["int8", "int32", "uint32", "int64", "uint64", "bool", "float32", "float64"]


@table("dtype, result", DTYPES, RESULTS, quick=0, most=8)
def test_every_dtype_comes_back_exactly(dtype, result):
    with jax.enable_x64(True):
        info = jnp.iinfo(result) if result.startswith(("int", "uint")) else None
        numbers = [info.min, info.max, info.max - 1, info.max // 3] if info else [0, 1, 0, 1]
        reduce = lambda cotangent: (cotangent, jnp.array(numbers, result))
        x = jnp.arange(1.0, 4.0).astype(dtype)
        f = lambda x: jnp.sum(jnp.real(name(x * 2, "h") ** 2)).astype(float)
        found, exact = jax.jit(pg.grad(f, wrt=pg.intermediate("h", reduce=reduce)))(x)
        assert [found.dtype, exact.dtype] == [x.dtype, result]
        np.testing.assert_array_equal(found, pg.grad(f, wrt=pg.intermediate("h"))(x))
        np.testing.assert_array_equal(exact, jnp.array(numbers, result))


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    steps=st.integers(1, 4),
    taken=st.lists(st.booleans(), min_size=4, max_size=4),
    is_stopped=st.booleans(),
    is_jitted=st.booleans(),
)
def test_a_step_that_computes_no_value_has_the_reduction_of_zeros(steps, taken, is_stopped, is_jitted):
    def f(x):
        def step(c, is_taken):
            return jax.lax.cond(is_taken, lambda c: jnp.sin(name(c * 1.5, "h")), lambda c: c, c), None

        c, _ = jax.lax.scan(step, x, jnp.array(taken[:steps]))
        return jnp.sum(jax.lax.stop_gradient(c) if is_stopped else c) + jnp.sum(x)

    full = pg.grad(f, wrt=pg.intermediate("h"))(X)
    compiled = jax.jit if is_jitted else lambda f: f
    found = compiled(pg.grad(f, wrt=pg.intermediate("h", reduce=measures)))(X)
    same(found, jax.vmap(measures)(full))


def test_names_that_occur_twice_and_globs_have_the_shape_of_their_values():
    reduce = lambda cotangent: jnp.abs(cotangent).max()
    for selected in ("a", "b", "*", "block*"):
        found = pg.grad(names_twice, wrt=pg.intermediate(selected, reduce=reduce))(0.5)
        full = pg.grad(names_twice, wrt=pg.intermediate(selected))(0.5)
        same(found, jax.tree.map(jnp.abs, full))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, **own: pg.grad(f, **own),
        lambda f, **own: lambda x: pg.value_and_grad(f, **own)(x)[1],
        lambda f, **own: lambda x: pg.vjp(f, x, **own)[1](1.0)[0],
        lambda f, **own: lambda x: jax.jit(lambda x: pg.vjp(f, x, **own))(x)[1](1.0)[0],
        lambda f, **own: pg.jacrev(f, **own),
        lambda f, **own: pg.jacrev(f, chunk_size=1, **own),
        lambda f, **own: lambda x: jax.tree.map(lambda own: own[0], jax.vmap(pg.grad(f, **own))(x[None])),
    ],
)
def test_every_transform_with_a_backward_pass_takes_it(transform):
    f = wrapped("scan")
    found = transform(f, wrt={"x": None, "h": pg.intermediate("h", reduce=measures)})(X)
    same(found["h"], jax.vmap(measures)(pg.grad(f, wrt=pg.intermediate("h"))(X)))
    np.testing.assert_allclose(found["x"], jax.grad(f)(X), rtol=1e-5)


def test_each_row_of_a_jacobian_has_a_reduction():
    f = wrapped("scan")
    several = lambda x: f(x) * jnp.array([1.0, -2.0, 0.0])
    found = pg.jacrev(several, wrt=pg.intermediate("h", reduce=measures))(X)
    same(found, jax.vmap(jax.vmap(measures))(pg.jacrev(several, wrt=pg.intermediate("h"))(X)))


@pytest.mark.slow
def test_it_may_be_differentiated_and_may_use_what_is_differentiated():
    f, square = wrapped("scan", "checkpoint"), lambda cotangent: jnp.sum(cotangent**2)
    by_hand = lambda x, s: s * jnp.sum(pg.grad(f, wrt=pg.intermediate("h"))(x) ** 2)
    reduced = lambda x, s: jnp.sum(pg.grad(f, wrt=pg.intermediate("h", reduce=lambda c: s * square(c)))(x))
    for transform in (jax.grad, jax.jacfwd, jax.hessian):
        every = lambda own, *args, of=transform: [of(own, argnum)(*args) for argnum in (0, 1)]
        both = jax.jit(lambda *args, every=every: [every(own, *args) for own in (reduced, by_hand)])
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4), *both(X, 1.5))


def test_explicit_shardings():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("i")))
        f = lambda x: jnp.sum(jnp.tanh(name(jnp.sin(x), "h")) ** 3)
        wrt = {"x": None, "h": pg.intermediate("h", reduce=lambda c: (2 * c, measures(c)))}
        found = jax.jit(pg.grad(f, wrt=wrt))(x)
    same(found["h"][1], measures(pg.grad(f, wrt=pg.intermediate("h"))(X)))


class Layer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jax.nn.gelu(name(self.linear(x), "hidden"))


@pytest.mark.slow
def test_parameters_of_a_module_beside_it():
    layer = Layer(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
    loss = lambda layer, x: jnp.sum(layer(x) ** 2)
    wrt = {"weight": lambda m: m.linear.weight, "hidden": pg.intermediate("hid*", reduce=jnp.linalg.norm)}
    found = eqx.filter_jit(pg.grad(loss, wrt=wrt))(layer, X)
    np.testing.assert_allclose(found["weight"], eqx.filter_grad(loss)(layer, X).linear.weight, rtol=1e-5)
    expected = jax.grad(lambda h: jnp.sum(jax.nn.gelu(h) ** 2))(layer.linear(X))
    np.testing.assert_allclose(found["hidden"]["hidden"], jnp.linalg.norm(expected), rtol=1e-5)


@pytest.mark.slow
def test_other_options():
    f = lambda x: jnp.sum(jnp.sqrt(jax.lax.stop_gradient(name(x, "cut"))) + jnp.sqrt(name(x, "h")))
    norm = lambda cotangent: jnp.sum(cotangent**2)
    wrt = {key: pg.intermediate(key, reduce=norm) for key in ("cut", "h")}
    found = pg.grad(f, wrt=wrt, unused="none")(jnp.ones(2))
    assert found == {"cut": None, "h": 0.5}
    with pytest.raises(pg.errors.SelectionError, match="cut"):
        pg.grad(f, wrt=wrt, unused="error")(jnp.ones(2))
    assert jnp.isinf(pg.grad(f, wrt=wrt, nonfinite="report")(jnp.zeros(2))["h"])
    last = pg.last_nonfinite()
    last.clear()
    assert {finding.operation for finding in last.report.findings if finding.severity == "error"} == {"sqrt"}
    assert pg.check(f, wrt=pg.intermediate("h", reduce=norm))(jnp.ones(2)).ok


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["jacfwd", "hessian", "hvp", "jvp", "linearize"])
def test_what_has_no_backward_pass_refuses_it(transform):
    selected = pg.intermediate("h", reduce=jnp.linalg.norm)
    function, arguments = getattr(pg, transform), {"jvp": ((X,), (X,)), "linearize": (X,)}.get(transform, ())
    with pytest.raises(pg.errors.ArgumentError, match=rf"(?s){transform}.*reduce=norm.*leave `reduce` out.*jacrev"):
        function(rest, *arguments, wrt={"h": selected})
    # The remedy.
    without = pg.intermediate("h")
    assert callable(function(wrapped(), wrt=without)) if not arguments else True


@pytest.mark.parametrize("returned", ["text", object(), lambda: None])
def test_a_reduction_returns_arrays(returned):
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`reduce`.*`h` returns.*pytree of arrays.*return arrays"):
        pg.grad(wrapped(), wrt=pg.intermediate("h", reduce=lambda _: returned))(X)


def test_an_error_inside_says_of_which_value():
    with pytest.raises(TypeError) as caught:
        pg.grad(wrapped("scan"), wrt=pg.intermediate("h", reduce=lambda c: c @ jnp.ones((7, 7))))(X)
    assert any("`h`, float32[3]" in note for note in caught.value.__notes__)


def test_it_is_a_function():
    with pytest.raises(pg.errors.SelectorTypeError, match=r"(?s)str 'norm' as `reduce`.*linalg.norm"):
        pg.intermediate("h", reduce="norm")
    with pytest.raises(pg.errors.NoMatchError, match="(?s)`hh`.*write 'h'"):
        pg.grad(wrapped(), wrt=pg.intermediate("hh", reduce=jnp.max))(X)
    _, pull = pg.vjp(wrapped(), X, wrt=pg.intermediate("h", reduce=jnp.max))
    with pytest.raises(pg.errors.ArgumentError, match="(?s)references.*reduced.*leave `reduce` out"):
        pull.with_refs(jax.new_ref(jnp.zeros(3)))


def test_values_and_cotangents_have_the_same_shape_and_names():
    """What `capture_intermediates` returns is differentiated in the same pass."""

    def f(x):
        x, _ = jax.lax.scan(lambda c, _: (name(jnp.sin(c), "h"), None), x, None, length=3)
        return jnp.sum(name(x, "a") * name(x, "a"))

    wrt = {"x": None, "inside": pg.intermediate("*")}
    (_, values), found = jax.jit(pg.value_and_grad(pg.capture_intermediates(f), wrt=wrt, has_aux=True))(X)
    jax.tree.map(lambda value, own: np.testing.assert_array_equal(value.shape, own.shape), values, found["inside"])
    same(values, pg.capture_intermediates(f)(X)[1])
    np.testing.assert_allclose(found["x"], jax.grad(f)(X), rtol=1e-5)
