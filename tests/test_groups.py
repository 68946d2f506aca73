"""`wrt=` as a dict of selectors: a dict of gradients, from one backward pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg
from helpers.messages import refused

TREE = {"body": [jnp.array([1.0, 2.0]), jnp.array(3.0)], "head": {"w": jnp.array([4.0, 5.0]), "b": 6.0}, "n": 7}


def loss(tree, x=2.0):
    body, head = tree["body"], tree["head"]
    return jnp.sum(body[0] ** 2 * head["w"]) * body[1] + head["b"] ** 3 * x


# A dict of selectors, and the selector of each part alone.
GROUPS = {
    "paths": {"slow": "body", "fast": "head.w"},
    "a callable": {"a": lambda t: t["body"][1], "b": "head.*"},
    "a callable that returns a container": {"pair": lambda t: (t["body"][0], t["head"]["b"])},
    "elements of one leaf": {"first": "body[0][0]", "second": "body[0][1]"},
    "a mask": {"m": {"body": True, "head": False, "n": False}, "h": "head.b"},
    "a class and a glob": {"l": list, "g": "head.*"},
    "a combination": {"c": pg.path("body") - "body[1]", "d": pg.path("body[1]") | "head.b"},
    "a dict in a dict": {"outer": {"x": "head.w", "y": "head.b"}, "z": "body"},
    "one entry": {"only": None},
}


def alone(transform, wrt, *args):
    if isinstance(wrt, dict) and not all(isinstance(leaf, bool) for leaf in jax.tree.leaves(wrt)):
        return {name: alone(transform, own, *args) for name, own in wrt.items()}
    return transform(loss, wrt=wrt)(*args)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


@pytest.mark.parametrize("wrt", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("transform", [pg.grad, pg.jacfwd, pg.jacrev], ids=lambda t: t.__name__)
def test_the_gradient_is_the_dict_of_the_gradients(transform, wrt):
    same(transform(loss, wrt=wrt)(TREE), alone(transform, wrt, TREE))


@pytest.mark.parametrize("wrt", GROUPS.values(), ids=GROUPS)
def test_the_function_runs_once(wrt):
    runs = []
    counted = lambda tree: runs.append(1) or loss(tree)
    same(jax.jit(pg.grad(counted, wrt=wrt))(TREE), alone(pg.grad, wrt, TREE))
    assert len(runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrt", GROUPS.values(), ids=GROUPS)
def test_linear_maps_take_and_give_dicts(wrt):
    gradient = pg.grad(loss, wrt=wrt)(TREE)
    value, pull = pg.vjp(loss, TREE, wrt=wrt)
    same(pull(jnp.ones_like(value))[0], gradient)
    square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(pg.jvp(loss, (TREE,), (gradient,), wrt=wrt)[1], square, rtol=1e-6)
    np.testing.assert_allclose(pg.linearize(loss, TREE, wrt=wrt)[1](gradient), square, rtol=1e-6)
    product = pg.hvp(loss, wrt=wrt)(TREE, gradient)
    along = jax.jvp(
        lambda s: pg.grad(loss, wrt=wrt)(pg.apply_updates(TREE, s, wrt)),
        *((t,) for t in (zeros(gradient), gradient)),
    )
    same(product, along[1])


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


@pytest.mark.slow
def test_a_hessian_has_a_dict_on_each_side():
    hessian = pg.hessian(loss, wrt={"w": "head.w", "b": lambda t: t["head"]["b"]})(TREE)
    assert hessian["w"]["b"].shape == (2,)
    assert hessian["b"]["w"].shape == (2,)
    np.testing.assert_allclose(hessian["b"]["b"], 6 * 6.0 * 2.0)


@pytest.mark.parametrize("wrt", list(GROUPS.values()), ids=GROUPS)
def test_reading_and_editing_take_dicts(wrt):
    parts = pg.select(TREE, wrt)
    assert set(parts) == set(wrt)
    replaced = pg.replace(TREE, wrt, jax.tree.map(lambda x: x + 1, parts))
    same(pg.select(replaced, wrt), jax.tree.map(lambda x: x + 1, parts))
    same(pg.apply_updates(TREE, jax.tree.map(jnp.ones_like, parts), wrt), replaced)


def test_parts_of_a_model_with_marks():
    @pg.dataclass
    class Model:
        a: jax.Array
        p: jax.Array = pg.field(nondiff=True)
        layers: list

    model = Model(jnp.array(2.0), jnp.array(3.0), [jnp.array(5.0)])
    f = lambda m: m.a**2 * m.p**2 * m.layers[0]
    gradient = pg.grad(f, wrt={"named": "p", "rest": "layers.**"})(model)
    assert gradient["named"] == 2 * 4 * 3 * 5
    assert gradient["rest"].layers == [36.0]
    assert gradient["rest"].a is None
    # Describing skips what is held, in a dict as elsewhere.
    refused(lambda: pg.grad(f, wrt={"x": pg.each(lambda m: m.p)})(model), ValueError, "is held by a mark")
    selected, rest = pg.partition(model, {"named": "p", "rest": "layers.**"})
    assert (selected.p, selected.layers, selected.a, rest.p) == (3.0, [5.0], None, None)


def test_entries_that_overlap_are_an_error_that_names_the_overlap():
    for wrt in ({"a": "body", "b": "body[1]"}, {"a": "body[0]", "b": "body[0][1]"}, {"a": None, "b": "head.b"}):
        refused(
            lambda wrt=wrt: pg.grad(loss, wrt=wrt)(TREE), ValueError, "Two entries of the dict select", "'a' and 'b'"
        )
    fixed = {"a": pg.path("body") - "body[1]", "b": "body[1]"}
    assert set(pg.grad(loss, wrt=fixed)(TREE)) == {"a", "b"}


def test_a_dict_of_bools_is_a_mask():
    mask = {"body": True, "head": False, "n": False}
    assert pg.grad(loss, wrt=mask)(TREE)["head"] == {"w": None, "b": None}


def test_several_arguments_each_have_a_dict():
    gradients = pg.grad(loss, wrt=({"w": "head.w"}, None), argnums=(0, 1))(TREE, 2.0)
    assert set(gradients[0]) == {"w"}
    assert gradients[1] == 216.0


@pytest.mark.slow
def test_an_equinox_model():
    model = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    f = lambda m: m(jnp.ones(2)) ** 2
    found = eqx.filter_jit(pg.grad(f, wrt={"last": lambda m: m.layers[-1].weight, "biases": "**.bias"}))(model)
    whole = eqx.filter_grad(f)(model)
    same(found["last"], whole.layers[-1].weight)
    same(found["biases"].layers[0].bias, whole.layers[0].bias)
    assert found["biases"].layers[0].weight is None


# --- with values inside the function -------------------------------------------------------------------------------


def network(params, x, scale=1.0):
    def block(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "h"), None

    h, _ = jax.lax.scan(block, x, params["blocks"])
    out = checkpoint_name(h @ params["head"], "out")
    return jnp.sum(out**2) * scale


PARAMS = {
    "blocks": jax.random.normal(jax.random.key(0), (3, 4, 4)) / 2,
    "head": jax.random.normal(jax.random.key(1), (4, 2)),
    "n": 3,
}
X = jnp.linspace(-1.0, 1.0, 4)
MIXED = {"weights": "blocks", "h": pg.intermediate("h"), "out": pg.intermediate("o*")}


@pytest.mark.slow
@pytest.mark.parametrize("double_where", [False, True])
def test_parameters_and_values_inside_in_one_pass(double_where):
    found = pg.grad(network, wrt=MIXED, double_where=double_where)(PARAMS, X, scale=2.0)
    same(found["weights"], pg.grad(network, wrt="blocks")(PARAMS, X, scale=2.0))
    same(found["h"], pg.grad(network, wrt=pg.intermediate("h"))(PARAMS, X, scale=2.0))
    same(found["out"], pg.grad(network, wrt=pg.intermediate("o*"))(PARAMS, X, scale=2.0))
    assert found["h"].shape == (3, 4)
    jitted = jax.jit(pg.grad(network, wrt=MIXED, double_where=double_where), static_argnums=2)
    same(jitted(PARAMS, X, 2.0), found)


def test_values_inside_alone_in_a_dict():
    only = {name: own for name, own in MIXED.items() if name != "weights"}
    same(pg.grad(network, wrt=only)(PARAMS, X)["h"], pg.grad(network, wrt=pg.intermediate("h"))(PARAMS, X))


def test_other_transforms_of_both():
    gradient = pg.grad(network, wrt=MIXED)(PARAMS, X)
    value, pull = pg.vjp(network, PARAMS, X, wrt=MIXED)
    same(pull(jnp.ones_like(value))[0], gradient)
    square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(pg.jvp(network, (PARAMS, X), (gradient,), wrt=MIXED)[1], square, rtol=1e-5)
    pair = lambda params: (network(params, X), "aux")
    assert pg.grad(pair, wrt=MIXED, has_aux=True)(PARAMS)[1] == "aux"
    missing = {name: own for name, own in gradient.items() if name != "h"}
    refused(lambda: pg.jvp(network, (PARAMS, X), (missing,), wrt=MIXED), ValueError, "different structure")


def test_a_held_parameter_beside_a_value_inside():
    @pg.dataclass
    class Model:
        w: jax.Array
        p: jax.Array = pg.field(nondiff=True)

    f = lambda m: checkpoint_name(m.w * m.p, "h") ** 2
    gradient = pg.grad(f, wrt={"p": "p", "h": pg.intermediate("h")})(Model(jnp.array(2.0), jnp.array(3.0)))
    assert (gradient["p"], gradient["h"]) == (24.0, 12.0)


def test_what_does_not_fit_is_refused():
    refused(
        lambda: pg.grad(network, wrt={"a": pg.intermediate("h"), "b": pg.intermediate("*")})(PARAMS, X),
        ValueError,
        "Two entries of `wrt` select the value `h`: {'a': partgrad.intermediate('h'), 'b': partgrad.intermediate('*')}",
    )
    refused(lambda: pg.grad(network, wrt=MIXED, argnums=0)(PARAMS, X), TypeError, "without argnums and argnames")
    refused(
        lambda: pg.grad(network, wrt={"w": "blocks", "h": pg.intermediate("g")})(PARAMS, X), LookupError, "got h, out"
    )
    refused(lambda: pg.partition(PARAMS, MIXED), TypeError, "a value inside a function")


@pytest.mark.parametrize("key", [None, "", 0, False, ("a", 1)], ids=repr)
def test_any_key_has_its_part(key):
    f = lambda m: checkpoint_name(m["w"] * m["b"], "h") ** 2
    tree = {"w": jnp.array(2.0), "b": jnp.array(3.0)}
    assert pg.grad(f, wrt={key: "w"})(tree) == {key: 36.0}
    assert pg.grad(f, wrt={key: pg.intermediate("h")})(tree) == {key: 12.0}
    assert pg.grad(f, wrt={key: pg.intermediate("h"), "w": "w"})(tree) == {key: 12.0, "w": 36.0}


def test_a_dict_of_masks():
    tree = {"w": jnp.array(2.0), "b": jnp.array(3.0)}
    f = lambda m: m["w"] * m["b"] ** 2
    first, second = {"w": True, "b": False}, {"w": False, "b": True}
    assert pg.grad(f, wrt={"x": first, "y": second})(tree) == {"x": {"w": 9.0, "b": None}, "y": {"w": None, "b": 12.0}}
    assert pg.grad(f, wrt={"x": first, "y": "b"})(tree) == {"x": {"w": 9.0, "b": None}, "y": 12.0}
    # A mask comes first.
    assert pg.grad(f, wrt=first)(tree) == {"w": 9.0, "b": None}
    refused(lambda: pg.grad(f, wrt={"x": {"v": True}})(tree), ValueError, "The mask has a different structure")


def test_what_is_wrong_with_one_entry():
    tree = {"weight": jnp.array(2.0), "bias": jnp.array(3.0)}
    f = lambda m: checkpoint_name(m["weight"] * m["bias"], "h") ** 2
    # The keys are names of the tree, as they are for labels.
    for wrt in ({"weight": "weigth"}, {"weight": "weight", "bias": "bais"}, {"bias": "bias", "weight": "nothing"}):
        refused(lambda wrt=wrt: pg.grad(f, wrt=wrt)(tree), LookupError, "matches nothing in the tree")
    refused(lambda: pg.grad(f, wrt={"weight": "train", "bias": "no"})(tree), TypeError, "partgrad.label(tree")
    refused(lambda: pg.grad(f, wrt={1: "weight", "b": "bias"})(tree), TypeError, "cannot be sorted: 1, 'b'")
    refused(
        lambda: pg.jvp(f, (tree,), ({"w": 1.0},), wrt={"w": "weight", "h": pg.intermediate("h")}),
        ValueError,
        "The tangent of values inside the function has a different structure",
    )
