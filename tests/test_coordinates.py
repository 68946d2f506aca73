"""In which coordinates leaves move, and which follow others."""

import math
import pickle
import re
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpyro.distributions import biject_to, constraints, transforms
from scipy.optimize import minimize

import partgrad as pg
from helpers.tables import examples, in_turn, table

positive, interval = pg.coordinates.positive, pg.coordinates.interval


@pg.dataclass
class Beam:
    width: jax.Array | float
    tilt: jax.Array | float
    length: jax.Array | float = pg.field(nondiff=True, default=2.0)


class Layer(eqx.Module):
    w: jax.Array
    b: jax.Array
    act: typing.Callable = eqx.field(static=True, default=jnp.tanh)


class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


INSIDE = {"**.width": positive, "**.tilt": interval(-0.5, 0.5)}


def model():
    return {"a": Beam(1.0, 0.1), "b": [Beam(jnp.array([0.5, 2.0]), -0.3), None], "name": "two", "n": 3}


def spacing(value, resolved):
    """Two units in the last place of a value, and as far as its coordinate resolves it."""
    eps = np.finfo(np.asarray(value).dtype).eps
    return 2 * eps * np.abs(value) + eps * np.abs(resolved)


# --- the maps ---------------------------------------------------------------------------------------------------------

# (a map, its values)
MAPS = {
    "positive": (positive, st.floats(1e-6, 1e6)),
    "interval": (interval(-0.5, 0.5), st.floats(-0.499, 0.499)),
    "unit": (interval(0, 1), st.floats(1e-6, 0.999)),
    "negative": (interval(-2.0, 0.0), st.floats(-1.999, -1e-6)),
    "offset": (interval(2.0, 5.0), st.floats(2.001, 4.999)),
    "above": (interval(1.0, None), st.floats(1.001, 1e6)),
    "below": (interval(None, -1.0), st.floats(-1e6, -1.001)),
    "arrays": (interval(np.float32([-1.0]), np.float32([3.0])), st.floats(-0.99, 2.99)),
    "pair": ((jnp.exp, jnp.log), st.floats(1e-6, 1e6)),
    "constraint": (constraints.positive, st.floats(1e-6, 1e6)),
    "transform": (transforms.SigmoidTransform(), st.floats(1e-3, 0.999)),
    "affine": (transforms.AffineTransform(1.0, -2.0), st.floats(-10.0, 10.0)),
}


def lists(values):
    return st.lists(values, min_size=4, max_size=4)


@table("name, x64", in_turn(MAPS, [False, True]), quick=2)
def test_coordinates_come_back(name, x64):
    own, values = MAPS[name]

    @settings(max_examples=examples(30))
    @given(lists(values))
    def law(numbers):
        leaf = np.array(numbers, np.float64 if x64 else np.float32)
        free, constrain = pg.unconstrain({"x": leaf, "y": 1.0}, {"x": own})
        assert free["x"].dtype == leaf.dtype
        back, resolved = jax.jvp(lambda x: constrain({"x": x, "y": 1.0})["x"], (free["x"],), (free["x"],))
        assert back.dtype == leaf.dtype
        assert np.all(np.abs(back - leaf) <= spacing(leaf, resolved))

    with jax.enable_x64(x64):
        law()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_log_det_is_that_of_the_jacobian(name):
    own, values = MAPS[name]

    @settings(max_examples=examples(30))
    @given(lists(values))
    def law(numbers):
        free, constrain = pg.unconstrain({"x": jnp.array(numbers, float), "y": 1.0}, {"x": own})
        jacobian = jax.jacobian(lambda x: constrain({"x": x, "y": 1.0})["x"])(free["x"])
        expected = np.linalg.slogdet(np.asarray(jacobian, np.float64))[1]
        np.testing.assert_allclose(constrain.log_det(free), expected, rtol=1e-5, atol=1e-5)

    with jax.enable_x64(True):
        law()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["positive", "interval", "unit", "negative", "offset", "above", "below", "pair"])
def test_derivatives_are_finite_everywhere(name):
    own = MAPS[name][0]
    forward = own[0] if name == "pair" else own.forward
    x = jnp.array([-80.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 1.0, 80.0])
    slopes, curvatures = jax.vmap(jax.grad(forward))(x), jax.vmap(jax.grad(jax.grad(forward)))(x)
    assert np.all(np.isfinite(slopes))
    assert np.all(np.isfinite(curvatures))
    assert np.all(slopes[1:-1] > 0)
    if name != "pair":
        expected = [np.log(slope) for slope in slopes[1:-1]]
        np.testing.assert_allclose(own.forward_log_det_jacobian(x)[1:-1], expected, atol=1e-5)
        # The inverse too, also where it takes another form.
        y = forward(x[1:-1])
        np.testing.assert_allclose(jax.vmap(jax.grad(own.inverse))(y), 1 / slopes[1:-1], rtol=1e-3)


@pytest.mark.slow
@given(st.floats(allow_nan=False, width=32))
def test_values_stay_inside(x):
    x = np.float32(x)
    assert positive.forward(x) >= 0
    for low, high in ((-0.5, 0.5), (0.0, 1.0), (-2.0, 0.0), (0.1, 0.3), (-0.7, 1e-3)):
        assert np.float32(low) <= interval(low, high).forward(x) <= np.float32(high)


@pytest.mark.slow
def test_inverses_against_more_digits():
    """In float32, against float64."""
    y = np.float32(np.concatenate([np.geomspace(1e-30, 1e30, 400), np.log(2) * (1 + np.linspace(-1e-3, 1e-3, 101))]))
    with jax.enable_x64(True):
        exact = np.asarray(positive.inverse(y.astype(np.float64)))
    np.testing.assert_allclose(positive.inverse(y), exact, rtol=8 * 2.0**-23)
    wide = y.astype(np.float64)
    reference = np.where(wide > 30, wide, np.log(np.expm1(np.minimum(wide, 30))))
    np.testing.assert_allclose(exact, reference, rtol=1e-9, atol=1e-15)


BAD_INTERVALS = [
    ((None, None), "no bound"),
    ((-math.inf, math.inf), "no bound"),
    ((1.0, 1.0), "lower bound below"),
    ((2, 1), "lower bound below"),
    ((np.zeros(2), np.array([1.0, 0.0])), "lower bound below"),
    ((math.nan, 1.0), "real number"),
    (("0", 1.0), "real number"),
    ((1j, 2.0), "real number"),
    ((False, True), "real number"),
]


@pytest.mark.parametrize(("bounds", "words"), BAD_INTERVALS)
def test_bad_intervals(bounds, words):
    with pytest.raises(pg.errors.ArgumentError, match=words):
        interval(*bounds)


def test_how_maps_are_written():
    assert repr(positive) == repr(interval(0, math.inf)) == "positive"
    assert repr(interval(-0.5, 0.5)) == "interval(-0.5, 0.5)"
    assert repr(interval(None, 3)) == "interval(None, 3)"
    assert repr(interval(np.zeros(2), 1)) == "interval(array, 1)"


# --- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_free_is_like_the_first_part_of_partition():
    tree = model()
    free, constrain = pg.unconstrain(tree, INSIDE)
    assert jax.tree.structure(free) == jax.tree.structure(pg.partition(tree)[0])
    assert free["a"].length is None
    assert free["name"] is None
    assert free["n"] is None
    again = constrain(free)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert type(again["a"]) is Beam
    assert pg.is_nondiff(again, "**.length")
    assert again["name"] is tree["name"]
    assert again["a"].length == 2.0
    np.testing.assert_allclose(again["b"][0].width, [0.5, 2.0], rtol=1e-6)


def test_what_has_no_map_is_the_same_object():
    tree = {"x": jnp.ones(2), "y": 2.0, "held": pg.NonDiff(jnp.ones(3))}
    free, constrain = pg.unconstrain(tree, {"y": positive})
    assert free["x"] is tree["x"]
    assert constrain(free)["x"] is tree["x"]
    assert constrain(free)["held"].value is tree["held"].value


def test_wrt_narrows_and_a_name_opens():
    tree = model()
    free, _ = pg.unconstrain(tree, INSIDE, wrt="a")
    assert [path for path, _ in pg.items(free)] == ["['a'].width", "['a'].tilt"]
    table = {**INSIDE, "**.length": positive}
    free, constrain = pg.unconstrain(tree, table)
    assert free["a"].length is None
    free, constrain = pg.unconstrain(tree, table, wrt=lambda m: m["a"].length)
    assert [path for path, _ in pg.items(free)] == ["['a'].length"]
    slope = jax.grad(lambda free: constrain(free)["a"].length ** 2)(free)["a"].length
    # length is 2, and softplus has the slope 1 - exp(-length) there.
    np.testing.assert_allclose(slope, 4 * (1 - np.exp(-2.0)), rtol=1e-6)
    assert jax.tree.structure(constrain(free)) == jax.tree.structure(pg.thaw(tree, "a.length"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [
        {"w": jnp.ones(3), "s": 2.0},
        Pair(jnp.ones(3), {"s": 2.0}),
        Layer(jnp.ones((2, 2)), jnp.full(2, 0.5)),
        pg.freeze({"w": jnp.ones(3), "s": 2.0}, "s"),
        [jnp.ones(()), (np.float32(3.0), np.ones(2))],
    ],
)
def test_any_tree(tree):
    free, constrain = pg.unconstrain(tree, {"**": positive})
    loss = lambda tree: sum(jnp.sum(jnp.sin(leaf)) for _, leaf in pg.items(tree))
    found = jax.grad(lambda free: loss(constrain(free)))(free)
    # The chain rule, by hand: the derivative of softplus at the coordinate of y is 1 - exp(-y).
    by_value = pg.partition(pg.grad(loss)(tree))[0]
    expected = jax.tree.map(lambda slope, y: slope * (1 - jnp.exp(-y)), by_value, pg.partition(tree)[0])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, expected)


@pytest.mark.slow
def test_every_transform_of_partgrad_takes_the_coordinates():
    tree = model()
    free, constrain = pg.unconstrain(tree, INSIDE)

    def energy(tree):
        return jnp.log(tree["a"].width) ** 2 + jnp.sum(tree["b"][0].width * tree["b"][0].tilt) * tree["a"].length

    loss = lambda free: energy(constrain(free))
    assert pg.grad(loss, wrt=lambda free: free["b"][0].width)(free).shape == (2,)
    groups = pg.grad(loss, wrt={"one": "a", "other": "b"})(free)
    assert set(groups) == {"one", "other"}
    assert groups["one"].length is None
    blocks = pg.hessian(loss, wrt=lambda free: (free["a"].width, free["b"][0].tilt))(free)
    plain = jax.hessian(lambda pair: loss(pg.replace(pg.replace(free, "a.width", pair[0]), "b[0].tilt", pair[1])))
    expected = plain((free["a"].width, free["b"][0].tilt))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), blocks, expected)
    assert pg.check(loss)(free).ok
    vector, unravel = pg.ravel(free)
    np.testing.assert_allclose(loss(unravel(vector)), loss(free))
    assert set(jax.tree.leaves(pg.label(free, {"slow": "a"}, default="fast"))) == {"slow", "fast"}
    guarded = jax.grad(pg.double_where(loss))(free)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), guarded, jax.grad(loss)(free))


def test_a_schedule_and_freezing_work_on_the_result():
    free, constrain = pg.unconstrain({"a": 1.0, "b": 2.0}, {"**": positive})
    loss = lambda free: (lambda tree: tree["a"] * tree["b"])(pg.stop_gradient(constrain(free), "a"))
    slopes = jax.grad(loss)(free)
    assert slopes["a"] == 0
    assert slopes["b"] > 0
    held = lambda free: (lambda tree: tree["a"].value * tree["b"])(pg.freeze(constrain(free), "a"))
    assert jax.grad(held)(free)["a"] == 0


# --- constrain as a value ---------------------------------------------------------------------------------------------


def test_it_is_an_argument_of_jit_and_compiles_once():
    count = []

    @jax.jit
    def value(constrain, free):
        count.append(None)
        return constrain(free)["w"].sum() + constrain.log_det(free)

    def made(scale):
        tree = {"w": scale * jnp.ones(2), "held": pg.NonDiff(scale)}
        bounded = {"w": interval(jnp.zeros(2), scale * jnp.full(2, 3.0))}
        return pg.unconstrain(tree, bounded)

    values = []
    for scale in (jnp.float32(1.0), jnp.float32(2.0)):
        free, constrain = made(scale)
        values.append(value(constrain, free))
    assert len(count) == 1
    # Twice the width: the value twice as large, the determinant by log 2 for each element.
    np.testing.assert_allclose(values[1] - values[0], 2.0 + 2 * np.log(2), rtol=1e-5)


def test_functions_and_strings_are_static():
    """So `jit` takes it as an argument, and compiles once for equal ones."""
    model = {"net": eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), "name": "x", "sigma": 1.0, "none": None}
    both = [pg.unconstrain(model | {"sigma": sigma}, {"sigma": pg.coordinates.positive}) for sigma in (1.0, 2.0)]

    @jax.jit
    def called(constrain, free):
        tree = constrain(free)
        assert tree["name"] == "x"
        assert tree["none"] is None
        return tree["net"](jnp.ones(2)) * tree["sigma"]

    (free, constrain), other = both
    np.testing.assert_allclose(called(other[1], other[0]), 2 * called(constrain, free), rtol=1e-6)
    assert called._cache_size() == 1
    assert constrain(free)["net"].activation is model["net"].activation

    class Unhashable:
        __hash__ = None

    stored = Unhashable()
    free, constrain = pg.unconstrain({"w": 1.0, "object": stored, "set": lambda: [stored]})
    assert constrain(free)["object"] is stored


@pytest.mark.slow
def test_it_is_mapped_pickled_and_printed():
    free, constrain = pg.unconstrain(model(), INSIDE)
    batch = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x), jnp.asarray(x) + 1]), free)
    widths = jax.vmap(lambda free: constrain(free)["b"][0].width)(batch)
    np.testing.assert_allclose(widths, positive.forward(batch["b"][0].width), rtol=1e-6)
    constrain(free)
    again = pickle.loads(pickle.dumps(constrain))
    assert repr(again) == repr(constrain)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other), again(free)["a"], constrain(free)["a"])
    assert repr(constrain) == (
        "<partgrad.unconstrain: back to dict\n"
        "  ['a'].width     positive\n"
        "  ['a'].tilt      interval(-0.5, 0.5)\n"
        "  ['b'][0].width  positive\n"
        "  ['b'][0].tilt   interval(-0.5, 0.5)>"
    )


@pytest.mark.slow
def test_an_ensemble_of_whole_fits():
    """Models, bounds and coordinates are all batched."""
    scales = jnp.array([1.0, 2.0, 5.0])
    make = lambda scale: pg.unconstrain(
        {"w": scale, "held": pg.NonDiff(scale)}, {"w": interval(0.5 * scale, 3 * scale)}
    )
    free, constrain = jax.vmap(make)(scales)
    np.testing.assert_allclose(
        jax.vmap(lambda constrain, free: constrain(free)["w"])(constrain, free), scales, rtol=1e-6
    )


@pytest.mark.slow
def test_maps_that_change_the_shape():
    tree = {"mix": jnp.array([0.2, 0.3, 0.5]), "scale": jnp.array([[2.0, 0.0], [0.3, 1.0]]), "x": 1.0}
    simplex, cholesky = constraints.simplex, constraints.lower_cholesky
    free, constrain = pg.unconstrain(tree, {"mix": simplex, "scale": cholesky})
    assert free["mix"].shape == (2,)
    assert free["scale"].shape == (3,)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), constrain(free), tree)
    expected = 0.0
    for name, constraint in (("mix", simplex), ("scale", cholesky)):
        bijection = biject_to(constraint)
        expected += bijection.log_abs_det_jacobian(free[name], bijection(free[name]))
    np.testing.assert_allclose(constrain.log_det(free), expected, rtol=1e-5)
    vector, unravel = pg.ravel(tree, coordinates={"mix": simplex, "scale": cholesky})
    assert vector.shape == (6,)
    assert unravel.names[:2] == ("['mix'][0]", "['mix'][1]")
    np.testing.assert_allclose(unravel(vector)["mix"], tree["mix"], rtol=1e-5)
    np.testing.assert_allclose(unravel.log_det(vector), expected, rtol=1e-5)


@pytest.mark.slow
def test_the_determinant_of_a_batch_of_events():
    """numpyro's constant logarithms are summed over every element, a simplex over every row."""
    rows = jnp.array([[0.2, 0.8], [0.5, 0.5], [0.6, 0.4]])
    tree = {"rows": rows, "shifted": jnp.ones((2, 3))}
    maps = {"rows": constraints.simplex, "shifted": transforms.AffineTransform(0.0, 3.0)}
    free, constrain = pg.unconstrain(tree, maps)
    stick = biject_to(constraints.simplex)
    expected = stick.log_abs_det_jacobian(free["rows"], rows).sum() + 6 * np.log(3)
    np.testing.assert_allclose(constrain.log_det(free), expected, rtol=1e-5)


@pytest.mark.slow
def test_the_interfaces_of_other_libraries():
    """Bijectors with the methods of TensorFlow Probability, distrax and flowjax."""

    class Tfp:
        forward_min_event_ndims = 0

        def forward(self, x):
            return 3 * x

        def inverse(self, y):
            return y / 3

        def forward_log_det_jacobian(self, x, event_ndims=0):
            # A constant, which it leaves for one element unless it is told how many axes count.
            return np.log(3) * (x.size if event_ndims else 1)

    class Distrax:
        event_ndims_in = 1

        def forward(self, x):
            return x[..., ::-1] * 2

        def inverse(self, y):
            return y[..., ::-1] / 2

        def forward_log_det_jacobian(self, x):
            return jnp.full(x.shape[:-1], x.shape[-1] * np.log(2))

    class Flowjax:
        def transform(self, x):
            return jnp.exp(x)

        def inverse(self, y):
            return jnp.log(y)

        def transform_and_log_det(self, x):
            return jnp.exp(x), x.sum()

    leaf = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    free, constrain = pg.unconstrain({"a": leaf, "b": leaf, "c": leaf}, {"a": Tfp(), "b": Distrax(), "c": Flowjax()})
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), constrain(free)["b"], leaf)
    expected = 6 * np.log(3) + 6 * np.log(2) + np.log(leaf).sum()
    np.testing.assert_allclose(constrain.log_det(free), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_pair_that_mixes_elements_does_not_say_its_determinant():
    increasing = (
        lambda x: jnp.cumsum(jnp.exp(x)),
        lambda y: jnp.log(jnp.diff(y, prepend=0)),
    )
    free, constrain = pg.unconstrain({"x": jnp.arange(1.0, 4.0)}, {"x": increasing})
    np.testing.assert_allclose(constrain(free)["x"], [1, 2, 3], rtol=1e-6)
    with pytest.raises(pg.errors.ArgumentError, match=r"\(forward, inverse, log_det\)"):
        constrain.log_det(free)
    with pytest.raises(pg.errors.ArgumentError, match="no bounds"):
        _ = constrain.bounds
    free, constrain = pg.unconstrain({"x": jnp.arange(1.0, 4.0)}, {"x": (*increasing, lambda x: x.sum())})
    jacobian = jax.jacobian(lambda x: constrain({"x": x})["x"])(free["x"])
    np.testing.assert_allclose(constrain.log_det(free), np.linalg.slogdet(jacobian)[1], atol=1e-6)


# Each mixes elements or takes each alone: (function, whether it takes each alone)
ELEMENTWISE = {
    "softplus": (jax.nn.softplus, True),
    "jit": (jax.jit(lambda x: jnp.where(x > 0, x, jnp.expm1(x))), True),
    "checkpoint": (jax.checkpoint(jnp.sinh), True),
    "by an array": (lambda x: x * jnp.array([1.0, 2.0, 3.0]) + jnp.array([1.0, 2.0, 3.0]).sum(), True),
    "clip": (lambda x: jnp.clip(x, -1, 1) + x, True),
    "sum": (lambda x: x + x.sum(), False),
    "reversed": (lambda x: x[::-1], False),
    "sorted": (jnp.sort, False),
    "softmax": (jax.nn.softmax, False),
    "matrix": (lambda x: jnp.eye(3) @ x, False),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, c + y), 0.0, x)[1], False),
    "outer": (lambda x: (x[:, None] * x[None, :])[0], False),
    "jit of a sum": (lambda x: jax.jit(lambda x: x * x.max())(x), False),
}


@table("name", list(ELEMENTWISE), quick=3)
def test_which_pairs_take_each_element_alone(name):
    function, expected = ELEMENTWISE[name]
    free = {"x": jnp.array([0.1, 0.2, 0.3])}
    leaf = {"x": function(free["x"])}
    # Its inverse is not asked for more than the one value.
    _, constrain = pg.unconstrain(leaf, {"x": (function, lambda y: free["x"])})
    if expected:
        slope = np.diagonal(jax.jacobian(function)(free["x"]))
        np.testing.assert_allclose(constrain.log_det(free), np.log(np.abs(slope)).sum(), rtol=1e-5)
    else:
        with pytest.raises(pg.errors.ArgumentError, match="determinant"):
            constrain.log_det(free)


# --- ties -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tie_is_the_model_with_one_leaf():
    """Gradients, second derivatives and updates agree with the model that is written with one parameter."""

    def energy(a, b):
        return jnp.sin(a) * b**2 + a * b

    free, constrain = pg.unconstrain({"a": 1.5, "b": 3.0}, ties={"b": ("a", lambda a: 2 * a)})
    assert free["b"] is None
    loss = lambda free: energy(**constrain(free))
    one = lambda a: energy(a, 2 * a)
    np.testing.assert_allclose(jax.grad(loss)(free)["a"], jax.grad(one)(1.5), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(loss)(free)["a"]["a"], jax.hessian(one)(1.5), rtol=1e-5)
    assert constrain({"a": 2.0, "b": None}) == {"a": 2.0, "b": 4.0}


def test_chains_and_several_sources():
    tree = {"a": 0.2, "b": 0.3, "c": 0.5, "d": 1.0, "e": 1.0}
    ties = {"e": "d", "d": ("c", lambda c: 2 * c), "c": ("a", "b", lambda a, b: 1 - a - b)}
    free, constrain = pg.unconstrain(tree, {"*": interval(0, 2)}, ties)
    assert [path for path, _ in pg.items(free)] == ["['a']", "['b']"]
    slopes = jax.grad(lambda free: constrain(free)["e"])(free)
    expected = jax.grad(lambda x: 2 * (1 - interval(0, 2).forward(x)))(free["a"])
    np.testing.assert_allclose(slopes["a"], expected, rtol=1e-6)
    assert "['e']  follows ['d']" in repr(constrain)
    assert "follows ['a'], ['b'], by a function" in repr(constrain)


def coder(tied=True):
    one = lambda: {"w": jnp.ones(2), "b": jnp.zeros(2)}
    return {
        "encoder": {"one": one(), "two": one()},
        "decoder": {"one": one(), "two": one()},
        "conv1": 1.0,
        "norm1": 1.0,
    }


# (ties, what follows what)
GLOBS = {
    "a step": ({"decoder.*.w": "encoder.*.w"}, {"decoder.one.w": "encoder.one.w", "decoder.two.w": "encoder.two.w"}),
    "steps": ({"decoder.**.w": "encoder.**.w"}, {"decoder.one.w": "encoder.one.w", "decoder.two.w": "encoder.two.w"}),
    "part of a name": ({"norm*": "conv*"}, {"norm1": "conv1"}),
    "two": (
        {"decoder.*.*": "encoder.*.*"},
        {f"decoder.{n}.{x}": f"encoder.{n}.{x}" for n in ("one", "two") for x in "bw"},
    ),
    "a node": ({"decoder.one": "encoder.one"}, {"decoder.one.b": "encoder.one.b", "decoder.one.w": "encoder.one.w"}),
    "nodes": (
        {"decoder.*": "encoder.*"},
        {f"decoder.{n}.{x}": f"encoder.{n}.{x}" for n in ("one", "two") for x in "bw"},
    ),
    "all below": (
        {"decoder.**": "encoder.**"},
        {f"decoder.{n}.{x}": f"encoder.{n}.{x}" for n in ("one", "two") for x in "bw"},
    ),
    "one for all": (
        {"**.w": "encoder.one.w"},
        dict.fromkeys(("decoder.one.w", "decoder.two.w", "encoder.two.w"), "encoder.one.w"),
    ),
    "functions": ({"conv1": lambda t: t["norm1"]}, {"conv1": "norm1"}),
}


@pytest.mark.parametrize("name", GLOBS)
def test_globs_of_ties(name):
    ties, expected = GLOBS[name]
    free, constrain = pg.unconstrain(coder(), ties=ties)
    simple = lambda path: re.sub(r"\['(\w+)'\]", r".\1", path).removeprefix(".")
    found = {
        simple(path): simple(source)
        for path, source in re.findall(r"^  (\S+) +follows (\S+?)>?$", repr(constrain), re.M)
    }
    assert found == expected
    assert {simple(path) for path, _ in pg.items(free)}.isdisjoint(expected)
    moved = constrain(jax.tree.map(lambda x: x + 7, free))
    for follower, source in expected.items():
        np.testing.assert_array_equal(pg.select(moved, follower), pg.select(moved, source))


def test_a_follower_that_a_mark_holds_moves_with_its_source():
    tree = [Beam(1.0, 0.1), Beam(1.0, 0.2)]
    ties = {"[1].length": "[0].length", "[1].width": "[0].width"}
    free, constrain = pg.unconstrain(tree, ties=ties)
    # Its source is held, and so is it.
    assert pg.is_nondiff(constrain(free), "[*].length")
    free, constrain = pg.unconstrain(tree, ties=ties, wrt=lambda m: m[0].length)
    moved = constrain(jax.tree.map(lambda x: x + 1, free))
    assert moved[1].length == 3.0
    assert jax.grad(lambda free: constrain(free)[1].length)(free)[0].length == 1.0


# --- errors, and their remedies ---------------------------------------------------------------------------------------

# (tree, arguments, class, words)
ERRORS = {
    "negative": (
        {"w": -1.0},
        ({"w": positive},),
        "ArgumentError",
        r"`\['w'\]` is outside of the values of its map, positive",
    ),
    "which entry": ({"w": jnp.array([1.0, 7.0])}, ({"w": interval(0, 5)},), "ArgumentError", r"got 7 at \[1\]"),
    "nan": ({"w": math.nan}, ({"w": positive},), "ArgumentError", "outside"),
    "no simplex": ({"w": jnp.array([0.5, 0.9])}, ({"w": constraints.simplex},), "ArgumentError", "outside"),
    "typo": ({"width": 1.0}, ({"widht": positive},), "NoMatchError", "width"),
    "no map": ({"w": 1.0}, ({"w": 1.0},), "ArgumentError", "forward and an inverse"),
    "bounds": ({"w": 1.0}, ({"w": (0, 2)},), "ArgumentError", r"interval\(0, 2\)"),
    "a function": ({"w": 1.0}, ({"w": jnp.exp},), "ArgumentError", "with its inverse"),
    "a class": ({"w": 1.0}, ({"w": transforms.ExpTransform},), "ArgumentError", r"make one: ExpTransform\("),
    "an int": ({"w": 1.0, "n": 3}, ({"n": positive},), "NotDifferentiableError", "int"),
    "twice": ({"w": 1.0}, ({"w": positive, "*": positive},), "SelectionError", "'w' and '\\*'"),
    "elements": ({"w": jnp.ones(3)}, ({"w[0]": positive},), "SelectionError", "whole leaves"),
    "no dict": ({"w": 1.0}, (positive,), "SelectorTypeError", "dict from selectors"),
    "shape": ({"w": jnp.ones(3)}, ({"w": (lambda x: x.sum(), lambda y: y)},), "ArgumentError", "does not fit"),
    "disagree": ({"a": 1.0, "b": 2.0}, (None, {"b": "a"}), "PartsError", "Expected 1.0, got 2.0"),
    "shapes": ({"a": 1.0, "b": jnp.ones(2)}, (None, {"b": "a"}), "PartsError", "shape"),
    "circle": ({"a": 1.0, "b": 1.0}, (None, {"b": "a", "a": "b"}), "PartsError", "circle"),
    "itself": ({"a": 1.0}, (None, {"a": "a"}), "PartsError", "circle"),
    "no ties": ({"a": 1.0}, (None, [("a", "b")]), "SelectorTypeError", "dict"),
    "no function": ({"a": 1.0, "b": 1.0}, (None, {"b": ("a", 2)}), "SelectorTypeError", "function"),
    "two ties": ({"a": 1.0, "b": 1.0, "c": 1.0}, (None, {"b": "a", "*": "c"}), "SelectionError", "Two ties"),
    "wildcards": (coder(), (None, {"decoder.*.*": "encoder.*.w"}), "SelectionError", "wildcards"),
    "no source": (coder(), (None, {"decoder.*.w": "encoder.*.v"}), "SelectionError", "nothing to follow"),
    "how many": (coder(), (None, {"decoder.one.w": "encoder.*.w"}), "SelectionError", "which leaf follows which"),
    "other leaves": (coder(), (None, {"decoder.one": "encoder"}), "SelectionError", "different leaves"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    tree, arguments, error, words = ERRORS[name]
    with pytest.raises(getattr(pg.errors, error), match=words) as caught:
        pg.unconstrain(tree, *arguments)
    assert "Fix: " in str(caught.value)


def test_an_error_of_a_map_says_of_which_leaf():
    mixed = (lambda x: x, lambda y: y @ jnp.ones(4))
    with pytest.raises(TypeError) as caught:
        pg.unconstrain({"w": jnp.ones(3)}, {"w": mixed})
    assert any(note.endswith("of `['w']`, f32[3].") for note in caught.value.__notes__)


def test_a_map_of_another_precision():
    with jax.enable_x64(True):
        wide = (lambda x: jnp.exp(x.astype(jnp.float64)), jnp.log)
        free, constrain = pg.unconstrain({"w": jnp.float32(2.0)}, {"w": wide})
        assert free["w"].dtype == constrain(free)["w"].dtype == jnp.float32


def test_naming_what_follows():
    tree = {"a": 1.0, "b": 1.0, "c": 2.0}
    for wrt in ("b", lambda t: t["b"], lambda t: (t["b"], t["c"])):
        with pytest.raises(pg.errors.SelectionError, match="follows something else"):
            pg.unconstrain(tree, ties={"b": "a"}, wrt=wrt)
    # Described, it stays out.
    free, _ = pg.unconstrain(tree, ties={"b": "a"}, wrt=pg.path("*") - "a")
    assert free == {"a": None, "b": None, "c": 2.0}


def test_remedies_followed():
    tree = {"a": 1.0, "b": 2.0}
    with pytest.raises(pg.errors.PartsError) as caught:
        pg.unconstrain(tree, ties={"b": "a"})
    remedy = re.search(r"Fix: set it first: (.*)\.$", str(caught.value))[1]
    scope = {"tree": tree, "partgrad": pg, "value": 1.0}
    exec(remedy, scope)
    assert pg.unconstrain(scope["tree"], ties={"b": "a"})[0] == {"a": 1.0, "b": None}
    with pytest.raises(pg.errors.ArgumentError) as caught:
        pg.unconstrain(tree, {"a": (0, 2)})
    made = eval(re.search(r"Fix: write (.*)\.$", str(caught.value))[1], {"partgrad": pg})
    assert repr(pg.unconstrain(tree, {"a": made})[1]).count("interval(0, 2)") == 1
    with pytest.raises(pg.errors.SelectionError) as caught:
        pg.unconstrain({"noise": {"width": 1.0}, "width": 1.0}, {"**.width": positive, "noise.width": positive})
    remedy = re.search(r"as in (.*)\.$", str(caught.value))[1]
    key = eval(remedy, {"partgrad": pg})
    pg.unconstrain({"noise": {"width": 1.0}, "width": 1.0}, {key: positive, "noise.width": positive})


def test_coordinates_of_another_structure():
    free, constrain = pg.unconstrain({"x": 1.0, "n": 2}, {"x": positive})
    for wrong, words in (
        ({"x": None, "n": None}, "Expected coordinates, got None"),
        ({"x": 1.0, "n": 2}, r"at `\['n'\]`"),
        ({"y": 1.0}, "different structure"),
        (1.0, "different structure"),
    ):
        with pytest.raises(pg.errors.PartsError, match=words):
            constrain(wrong)
        with pytest.raises(pg.errors.PartsError, match=words):
            constrain.log_det(wrong)
    assert constrain(free) == {"x": 1.0, "n": 2}


# --- as one vector ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_vector_of_coordinates():
    tree = model()
    table = {"**.width": positive, "a.tilt": interval(-0.5, None)}
    vector, unravel = pg.ravel(tree, coordinates=table, ties={"b[0].tilt": ("a.tilt", lambda tilt: -3 * tilt)})
    assert unravel.names == ("['a'].width", "['a'].tilt", "['b'][0].width[0]", "['b'][0].width[1]")
    np.testing.assert_allclose(unravel(vector)["b"][0].width, [0.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(unravel(vector)["b"][0].tilt, -0.3, rtol=1e-6)
    np.testing.assert_array_equal(unravel.bounds.lb, np.float32([0, -0.5, 0, 0]))
    np.testing.assert_array_equal(unravel.bounds.ub, np.full(4, np.inf))
    jacobian = jax.jacobian(lambda v: pg.ravel(unravel(v), pg.path("**.width") | "a.tilt")[0])(vector)
    np.testing.assert_allclose(unravel.log_det(vector), np.linalg.slogdet(jacobian)[1], rtol=1e-4)
    with pytest.raises(pg.errors.ArgumentError, match="tie=True"):
        pg.ravel(tree, coordinates=table, tie=True)


@pytest.mark.slow
def test_bounds_instead_of_coordinates():
    """An optimiser with bounds and one in coordinates find the same minimum."""
    tree = {"w": jnp.array([1.0, 2.0]), "tilt": 0.1, "x": 3.0}
    table = {"w": positive, "tilt": interval(-0.5, 0.5)}

    def energy(tree):
        return jnp.sum((jnp.log(tree["w"]) - 1.0) ** 2) + (tree["tilt"] - 3.0) ** 2 + (tree["x"] + 1) ** 2

    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.asarray(x, float), tree)
        start, unravel = pg.ravel(tree, coordinates=table)
        free = minimize(jax.value_and_grad(lambda v: energy(unravel(v))), start, jac=True, method="BFGS")
        plain, put = pg.ravel(tree)
        bounded = minimize(
            jax.value_and_grad(lambda v: energy(put(v))), plain, jac=True, method="L-BFGS-B", bounds=unravel.bounds
        )
        for name, tolerance in (("w", 1e-3), ("x", 1e-3), ("tilt", 1e-3)):
            np.testing.assert_allclose(put(bounded.x)[name], unravel(free.x)[name], atol=tolerance)
        assert put(bounded.x)["tilt"] == 0.5


@pytest.mark.slow
def test_bounds_of_any_map_of_single_elements():
    tree = {name: jnp.float32(0.25) for name in "abcd"}
    table = {
        "a": transforms.SigmoidTransform(),
        "b": (lambda x: 1 - jnp.exp(x), lambda y: jnp.log1p(-y)),
        "c": positive,
    }
    low, high = pg.unconstrain(tree, table)[1].bounds
    np.testing.assert_allclose(low["a"], 0, atol=1e-6)
    np.testing.assert_allclose(high["a"], 1, atol=1e-6)
    assert (low["b"], high["b"]) == (-np.inf, 1)
    assert (low["c"], high["c"], low["d"], high["d"]) == (0, np.inf, -np.inf, np.inf)
    wiggle = (lambda x: x + 0.5 * jnp.sin(x), lambda y: jnp.float32(0.1668))
    with pytest.raises(pg.errors.ArgumentError, match="no bounds"):
        _ = pg.unconstrain({"a": wiggle[0](jnp.float32(0.1668))}, {"a": wiggle})[1].bounds


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_costs_what_the_transformation_in_the_loss_costs():
    """A gradient with four maps on 20 leaves, against the transformations written into the loss."""
    names = [f"p{i}" for i in range(20)]
    tree = {name: jnp.full((8, 8), 0.3) for name in names}
    table = {"p1": positive, "p5": interval(-0.5, 0.5), "p7": (jnp.exp, jnp.log), "p19": interval(0.0, 1.0)}
    by_hand = {"p1": jax.nn.softplus, "p5": lambda x: -0.5 + jax.nn.sigmoid(x), "p7": jnp.exp, "p19": jax.nn.sigmoid}

    def energy(tree):
        x = jnp.eye(8)
        for name in names:
            x = jnp.tanh(x @ tree[name])
        return x.sum()

    free, constrain = pg.unconstrain(tree, table)
    hand = lambda free: energy({name: by_hand.get(name, lambda x: x)(leaf) for name, leaf in free.items()})
    flops = lambda f: jax.jit(jax.grad(f)).lower(free).compile().cost_analysis()["flops"]
    assert flops(lambda free: energy(constrain(free))) <= 1.02 * flops(hand)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7),
        jax.grad(lambda free: energy(constrain(free)))(free),
        jax.grad(hand)(free),
    )


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_names_the_map_that_has_lost_its_digits():
    """Softplus of -100 is zero in float32, and a value at the boundary has an infinite coordinate."""
    _, constrain = pg.unconstrain({"deep/w": 2.0, "s": 1.0}, {"*": positive})
    loss = lambda free: constrain(free)["deep/w"] * constrain(free)["s"] ** 2
    for coordinate in (-100.0, -jnp.inf):
        report = pg.check(loss)({"deep/w": jnp.float32(coordinate), "s": jnp.float32(1.0)})
        (finding,) = [own for own in report.findings if own.leaves == ("['deep/w']",)]
        assert "(in the map `positive` of `['deep/w']`)" in " ".join((finding.message + finding.suggestion).split())
    report = pg.check(loss)({"deep/w": jnp.float32(1.0), "s": jnp.float32(1.0)})
    assert not report.findings


@pytest.mark.slow
def test_shardings_are_kept():
    """On a mesh of one device, which says of every leaf how it is split."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"a": jax.device_put(jnp.ones(4), split), "b": jax.device_put(jnp.full(4, 0.2), split), "c": jnp.ones(2)}
    with jax.set_mesh(mesh):
        free, constrain = pg.unconstrain(tree, {"a": positive, "b": interval(-0.5, 0.5)})
        for one in (free, jax.jit(lambda free: constrain(free))(free)):
            assert jax.typeof(one["a"]).sharding.spec == split.spec
            assert jax.typeof(one["b"]).sharding.spec == split.spec
