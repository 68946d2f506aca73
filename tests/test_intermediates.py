"""Values inside a function: derivatives with respect to them, reading them, replacing them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as name
from jax.sharding import AxisType, PartitionSpec as P

import partgrad as pg
from helpers.tables import table

MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
X = jnp.array([0.3, 0.7, -0.4])


def rest(h):
    """What follows the named value."""
    return jnp.sum(jnp.tanh(h) * jnp.array([1.0, -2.0, 3.0])) * h[0]


def before(x):
    return jnp.sin(x) * 2.0


# Around the naming of a value, one container; `rest` follows outside of it.
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: jax.lax.switch(1, [jnp.cos, f, jnp.sin], x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(x), None), x, None, length=1)[0],
    "map": lambda f: lambda x: jax.lax.map(f, x[None])[0],
    "while": lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(x)), (0, x))[1],
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i")),
    "double_where": lambda f: pg.double_where(f),
}
STACKING = {"scan", "map", "vmap", "shard_map"}


def wrapped(*containers):
    named = lambda x: name(before(x), "h")
    for container in containers:
        named = WRAPS[container](named)
    return lambda x: rest(named(x))


def axes(containers):
    return (1,) * sum(container in STACKING for container in containers)


@table("outer, inner", WRAPS, WRAPS, most=11, quick=2)
def test_the_derivative_is_that_of_what_follows(outer, inner):
    f, containers = wrapped(inner, outer), (inner, outer)
    tangent = jnp.array([1.0, -1.0, 0.5])
    value, along = pg.jvp(f, (X,), (tangent.reshape(*axes(containers), 3),), wrt=pg.intermediate("h"))
    expected = jax.jvp(rest, (before(X),), (tangent,))
    np.testing.assert_allclose((value, along), expected, rtol=1e-6)
    if "while" not in containers:
        gradient = pg.grad(f, wrt=pg.intermediate("h"))(X)
        assert gradient.shape == (*axes(containers), 3)
        np.testing.assert_allclose(gradient.reshape(3), jax.grad(rest)(before(X)), rtol=1e-6)


@table("outer, inner", WRAPS, WRAPS, most=11, quick=2)
def test_values_are_captured_and_replaced(outer, inner):
    f, containers = wrapped(inner, outer), (inner, outer)
    output, values = jax.jit(pg.capture_intermediates(f))(X)
    np.testing.assert_allclose(output, f(X), rtol=1e-6)
    np.testing.assert_allclose(values["h"], before(X).reshape(*axes(containers), 3), rtol=1e-6)
    patched = pg.intervene(f, {"h": lambda h: h.at[..., 1].set(0.0)})
    np.testing.assert_allclose(patched(X), rest(before(X).at[1].set(0.0)), rtol=1e-6)
    if "while" not in containers:
        assert not jax.grad(pg.intervene(f, {"h": jax.lax.stop_gradient}))(X).any()


@table(
    "transform, expected",
    [
        (pg.grad, jax.grad),
        (lambda f, **own: lambda x: pg.value_and_grad(f, **own)(x)[1], jax.grad),
        (pg.jacfwd, jax.jacfwd),
        (pg.jacrev, jax.jacrev),
        (pg.hessian, jax.hessian),
        (lambda f, **own: pg.hessian(f, chunk_size=2, **own), jax.hessian),
        (lambda f, **own: lambda x: pg.hvp(f, **own)(x, jnp.ones(3)), lambda f: lambda h: jax.hessian(f)(h).sum(1)),
        (lambda f, **own: lambda x: pg.vjp(f, x, **own)[1](1.0)[0], jax.grad),
        (
            lambda f, **own: lambda x: pg.linearize(f, x, **own)[1](jnp.ones(3)),
            lambda f: lambda h: jax.grad(f)(h).sum(),
        ),
    ],
)
@pytest.mark.parametrize("double_where", [False, True])
def test_every_transform_takes_it(transform, expected, double_where):
    found = transform(wrapped("jit"), wrt=pg.intermediate("h"), double_where=double_where)(X)
    np.testing.assert_allclose(found, expected(rest)(before(X)), rtol=1e-5)


def names_twice(x):
    x = name(jnp.sin(x), "a")
    x, _ = jax.lax.scan(lambda c, k: (name(c * k, "b"), None), x, jnp.arange(1.0, 3.0))
    x = name(x**2, "a")
    return name(x, "block1.out") * name(jnp.cos(x), "block2.out")


@pytest.mark.slow
def test_a_name_that_occurs_twice_has_a_tuple_and_a_glob_a_dict():
    first, second = pg.grad(names_twice, wrt=pg.intermediate("a"))(0.5)
    last = lambda x: x * jnp.cos(x)
    u = jnp.sin(0.5)
    np.testing.assert_allclose(second, jax.grad(last)((2 * u) ** 2), rtol=1e-6)
    np.testing.assert_allclose(first, jax.grad(lambda u: last((2 * u) ** 2))(u), rtol=1e-6)
    assert pg.grad(names_twice, wrt=pg.intermediate("b"))(0.5).shape == (2,)
    found = pg.grad(names_twice, wrt=pg.intermediate("block*"))(0.5)
    assert list(found) == ["block1.out", "block2.out"]
    _, values = pg.capture_intermediates(names_twice)(0.5)
    assert {key: jax.tree.map(jnp.shape, value) for key, value in values.items()} == {
        "a": ((), ()),
        "b": (2,),
        "block1.out": (),
        "block2.out": (),
    }


@pytest.mark.slow
def test_under_transformations_of_the_caller():
    f = wrapped("scan")
    gradient = pg.grad(f, wrt=pg.intermediate("h"))
    xs = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient))(xs)[1], gradient(2 * X), rtol=1e-5)
    # The value itself depends on x.
    along = jax.jacfwd(lambda x: gradient(x)[0])(X)
    np.testing.assert_allclose(along, jax.hessian(rest)(before(X)) @ jax.jacfwd(before)(X), rtol=1e-5)


@pytest.mark.slow
def test_a_branch_that_is_not_taken_has_zeros():
    f = lambda x: jax.lax.cond(x > 0, lambda x: name(x**2, "square"), lambda x: name(x, "same") * 3, x)
    assert pg.grad(f, wrt=pg.intermediate("*"))(2.0) == {"square": 1.0, "same": 0.0}
    assert pg.capture_intermediates(f)(-2.0) == (-6.0, {"square": 0.0, "same": -2.0})
    both = lambda x: jax.lax.cond(x > 0, lambda x: name(x**2, "h") * 2, lambda x: name(x, "h") * 3, x)
    assert [pg.grad(both, wrt=pg.intermediate("h"))(x) for x in (2.0, -2.0)] == [2.0, 3.0]
    uneven = lambda x: jax.lax.cond(x[0] > 0, lambda x: name(x, "h"), lambda x: name(x[0], "h") * x, x)
    with pytest.raises(pg.errors.SelectionError, match=r"(?s)`h`.*float32\[\] and float32\[3\].*different names"):
        pg.grad(lambda x: uneven(x).sum(), wrt=pg.intermediate("h"))(X)


class Layer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jax.nn.gelu(name(self.linear(x), "hidden"))


@pytest.mark.slow
def test_equinox_and_flax_models():
    layer = Layer(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
    loss = lambda layer, x: jnp.sum(layer(x) ** 2)
    expected = jax.grad(lambda h: jnp.sum(jax.nn.gelu(h) ** 2))(layer.linear(X))
    np.testing.assert_allclose(pg.grad(loss, wrt=pg.intermediate("hidden"))(layer, X), expected, rtol=1e-5)
    np.testing.assert_allclose(
        eqx.filter_jit(pg.grad(loss, wrt=pg.intermediate("hidden")))(layer, X), expected, rtol=1e-5
    )

    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.nn.gelu(name(self.linear(x), "hidden"))

    graph, state = nnx.split(Model())
    loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2)
    expected = jax.grad(lambda h: jnp.sum(jax.nn.gelu(h) ** 2))(nnx.merge(graph, state).linear(X))
    np.testing.assert_allclose(pg.grad(loss, wrt=pg.intermediate("hidden"))(state, X), expected, rtol=1e-5)


def test_auxiliary_output_and_keyword_arguments():
    f = lambda x, *, scale: (rest(name(x * scale, "h")), {"scale": scale, "text": "kept"})
    value, aux = pg.grad(f, wrt=pg.intermediate("h"), has_aux=True)(X, scale=2.0)
    np.testing.assert_allclose(value, jax.grad(rest)(2 * X), rtol=1e-6)
    assert aux["text"] == "kept"


def test_a_value_is_what_it_was_to_the_last_bit():
    f = lambda x: 1 / name(x * -1.0, "h")
    assert pg.value_and_grad(f, wrt=pg.intermediate("h"))(0.0)[0] == -jnp.inf
    assert pg.value_and_grad(f, wrt=pg.intermediate("h"))(-0.0)[0] == jnp.inf


def test_complex_values_keep_the_signs_of_their_zeros():
    """The logarithm has its branch cut there."""
    f = lambda x: jnp.imag(jnp.log(name(x, "h"))) ** 2
    x = jnp.array(complex(-1.0, -0.0), jnp.complex64)
    np.testing.assert_allclose(pg.grad(f, wrt=pg.intermediate("h"))(x), jax.grad(f)(x))


def test_a_name_may_look_like_a_glob():
    f = lambda x: name(x * 2, "layers[0].attn") ** 2 * name(x, "layers[1].attn")
    assert pg.grad(f, wrt=pg.intermediate("layers[0].attn"))(1.0) == 4.0
    assert list(pg.grad(f, wrt=pg.intermediate("layers*"))(1.0)) == ["layers[0].attn", "layers[1].attn"]
    assert list(pg.capture_intermediates(f, "layers[1].attn")(1.0)[1]) == ["layers[1].attn"]


def test_lanes_of_a_loop_that_stop_on_their_own():
    f = jax.vmap(lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: name(c * 1.5, "h") + 1, x))
    output, values = pg.capture_intermediates(f)(jnp.array([0.0, 2.0]))
    np.testing.assert_array_equal(output, [4.75, 4.0])
    np.testing.assert_array_equal(values["h"], [3.75, 3.0])
    np.testing.assert_array_equal(pg.intervene(f, {"h": lambda h: h * 2})(jnp.array([0.0, 5.0])), [4.0, 5.0])


def test_names_in_the_condition_of_a_loop():
    named = lambda body: lambda x: jax.lax.while_loop(lambda c: name(c, "h") < 5.0, body, x)
    with pytest.raises(pg.errors.NoMatchError, match=r"(?s)`h`.*condition of a loop at test_intermed.*outside of it"):
        pg.capture_intermediates(named(lambda c: c * 2), "h")(1.0)
    f = named(lambda c: name(c * 2, "h"))
    assert pg.intervene(f, {"h": lambda h: h + 10})(1.0) == 1.0


def test_checkpoints_save_the_replaced_value():
    """The name stays with the value that is used, for the policies that go by it."""
    policy = jax.checkpoint_policies.save_only_these_names("h")
    m = jnp.arange(9.0).reshape(3, 3)
    f = jax.checkpoint(lambda x: jnp.sum(jnp.sin(name(x @ m, "h"))), policy=policy)
    doubled = pg.intervene(f, {"h": lambda h: 2 * h})
    np.testing.assert_allclose(jax.grad(doubled)(X), jax.grad(lambda x: jnp.sum(jnp.sin(2 * (x @ m))))(X), rtol=1e-5)
    # The product is not computed a second time.
    assert str(jax.make_jaxpr(jax.grad(doubled))(X)).count("dot_general[") == 2


def flops(f, *args):
    return jax.jit(f).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.slow
def test_operations_are_those_of_the_program_split_by_hand():
    w = jnp.ones((60, 60))
    step = lambda h, w: jnp.tanh(h @ w)
    f = lambda x, w: jnp.sum(step(step(name(step(x, w), "h"), w), w) ** 2)
    split = lambda x, w: jax.grad(lambda h: jnp.sum(step(step(h, w), w) ** 2))(step(x, w))
    x = jnp.ones((50, 60))
    assert flops(pg.grad(f, wrt=pg.intermediate("h")), x, w) < 1.02 * flops(split, x, w)


# --- errors ----------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def ruled(x):
    return name(2 * x, "inside")


ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2 * tangents[0]))


def several(x):
    return ruled(name(x, "outer")) + name(jnp.int32(x), "rounded")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("outre", "`outre`.*outer.*write 'outer'"),
        ("inside", "`inside`.*ruled.*outside of it"),
        ("rounded", r"`rounded`.*int32\[\].*before it is rounded"),
        ("zzz*", r"zzz.*outer, rounded.*choose one of these"),
    ],
)
def test_what_cannot_be_differentiated_is_refused_by_name(wanted, said):
    with pytest.raises(pg.errors.SelectionError, match=f"(?s){said}"):
        pg.grad(several, wrt=pg.intermediate(wanted))(1.5)


@pytest.mark.parametrize("use", [pg.partition, pg.freeze, pg.mask, pg.select, pg.thaw, pg.ravel])
def test_what_takes_leaves_of_a_tree_refuses_it(use):
    with pytest.raises(
        pg.errors.SelectorTypeError, match=r"(?s)intermediate\('h'\).*leaves of a tree.*capture_intermed"
    ):
        use({"h": 1.0}, pg.intermediate("h"))


def test_an_intermediate_value_is_part_of_no_argument():
    for options in ({"argnums": 0}, {"argnums": (0, 1)}, {"argnames": "x"}):
        with pytest.raises(pg.errors.ArgumentError, match=r"(?s)intermediate\('h'\).*argn.*without"):
            pg.grad(rest, wrt=pg.intermediate("h"), **options)
    with pytest.raises(pg.errors.SelectorTypeError, match=r"(?s)intermediate\('h'\).*alone"):
        pg.grad(rest, wrt=(pg.intermediate("h"), None), argnums=(0, 1))


def test_a_change_of_another_shape_is_refused():
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)`h`.*float32\[3\].*float32\[1, 3\].*broadcast_to"):
        pg.intervene(wrapped("jit"), {"h": lambda h: h[None]})(X)


@pytest.mark.parametrize("changes", ["h", {}, {"h": 1.0}, {1: jnp.sin}])
def test_changes_are_functions_by_name(changes):
    with pytest.raises(pg.errors.ArgumentError, match="(?s)intervene.*got.*Expected.*write"):
        pg.intervene(rest, changes)
