"""NonDiff: behaves like its value, in any container, and is not differentiated."""

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import Linear, Point
from partgrad import NonDiff

pytestmark = pytest.mark.core

ARRAY = jnp.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "operation",
    [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, divmod],
)
@pytest.mark.parametrize(
    "other", [ARRAY, np.array([2.0, 1.0, 4.0]), 2.0, 3, jnp.float32(2.0)], ids=lambda o: type(o).__name__
)
def test_arithmetic_on_both_sides_equals_that_of_the_value_and_returns_plain_arrays(operation, other):
    for got, want in [
        (operation(NonDiff(ARRAY), other), operation(ARRAY, other)),
        (operation(other, NonDiff(ARRAY)), operation(other, ARRAY)),
        (operation(NonDiff(ARRAY), NonDiff(other)), operation(ARRAY, other)),
    ]:
        assert not isinstance(got, NonDiff)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("operation", [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift])
def test_bitwise_arithmetic(operation):
    a, b = jnp.array([6, 5]), jnp.array([1, 2])
    np.testing.assert_array_equal(operation(NonDiff(a), b), operation(a, b))
    np.testing.assert_array_equal(operation(b, NonDiff(a)), operation(b, a))


def test_matmul_unary_comparison_indexing_and_length():
    m = jnp.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(NonDiff(m) @ m, m @ m)
    np.testing.assert_array_equal(m @ NonDiff(m), m @ m)
    np.testing.assert_array_equal(-NonDiff(ARRAY), -ARRAY)
    np.testing.assert_array_equal(abs(NonDiff(-ARRAY)), ARRAY)
    np.testing.assert_array_equal(NonDiff(ARRAY) > 1.5, ARRAY > 1.5)
    np.testing.assert_array_equal(NonDiff(ARRAY) == ARRAY, [True] * 3)
    np.testing.assert_array_equal(NonDiff(ARRAY)[1:], ARRAY[1:])
    assert len(NonDiff(ARRAY)) == 3
    assert [float(x) for x in NonDiff(ARRAY)] == [1.0, 2.0, 3.0]
    assert 2.0 in NonDiff([1.0, 2.0])


def test_numbers_convert_as_their_value_does():
    assert float(NonDiff(2.5)) == 2.5
    assert int(NonDiff(2.5)) == 2
    assert complex(NonDiff(2.5)) == 2.5
    assert bool(NonDiff(0.0)) is False
    assert round(NonDiff(2.567), 1) == 2.6
    assert round(NonDiff(2.567)) == 3
    assert f"{NonDiff(2.567):.1f}" == "2.6"
    assert math.floor(NonDiff(2.5)) == 2
    assert [10, 20, 30][NonDiff(1)] == 20
    assert pow(NonDiff(3), 4, 5) == 1
    assert hash(NonDiff(2.5)) == hash(2.5)


def test_around_a_node_without_powers_the_exponent_gets_the_wrapper():
    """equinox's `tree**ω`, with which optimistix computes, takes what is before the power for a whole tree."""
    tree = lambda value: value
    omega = type("Meta", (type,), {"__rpow__": lambda cls, value: tree(value)})("Omega", (), {})
    wrapper = NonDiff({"a": 1.0})
    assert wrapper**omega is wrapper
    with pytest.raises(TypeError, match="NonDiff"):
        wrapper**2


def test_jnp_functions_and_numpy_take_it():
    np.testing.assert_array_equal(jnp.sin(NonDiff(ARRAY)), jnp.sin(ARRAY))
    np.testing.assert_array_equal(jnp.where(NonDiff(ARRAY) > 2, NonDiff(ARRAY), 0.0), [0.0, 0.0, 3.0])
    np.testing.assert_array_equal(np.asarray(NonDiff(ARRAY)), ARRAY)
    np.testing.assert_array_equal(np.sin(NonDiff(ARRAY)), np.sin(np.asarray(ARRAY)))
    assert np.asarray(NonDiff(1.5), dtype=np.float64).dtype == np.float64


def test_attributes_and_calls_of_a_wrapped_model():
    wrapped = NonDiff(Linear(2.0, jnp.ones(3)))
    assert wrapped.weight == 2.0
    assert wrapped.bias.shape == (3,)
    np.testing.assert_array_equal(wrapped(2.0), [5.0, 5.0, 5.0])
    assert NonDiff(ARRAY).shape == (3,)
    assert NonDiff(ARRAY).dtype == ARRAY.dtype
    with pytest.raises(AttributeError, match="nowhere"):
        _ = wrapped.nowhere


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 3.0, "b": NonDiff(2.0)},
        (3.0, NonDiff(2.0)),
        [3.0, NonDiff(2.0)],
        Point(3.0, NonDiff(2.0)),
        Linear(3.0, NonDiff(2.0)),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_every_transform_of_jax_sees_a_constant(tree):
    def f(tree):
        a, b = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NonDiff))
        return a**2 * b + b**3

    for differentiate in (jax.grad, jax.jacfwd, jax.jacrev):
        a, b = jax.tree.leaves(jax.jit(differentiate(f))(tree))
        assert (a, b) == (12.0, 0.0)
    assert jax.tree.leaves(pg.grad(f)(tree)) == [12.0]


def test_a_tracer_on_the_other_side_keeps_its_derivative():
    assert jax.grad(lambda x: (NonDiff(x) * x) + x * NonDiff(x))(3.0) == 6.0
    array = np.array([1.0, 2.0])
    np.testing.assert_array_equal(jax.jit(lambda x: array * NonDiff(x))(2.0), [2.0, 4.0])


def test_it_is_one_wrapper_however_often_applied():
    assert NonDiff(NonDiff(1.0)).value == 1.0
    assert isinstance(NonDiff(NonDiff(1.0)).value, float)


def test_it_survives_transforms_and_copies():
    tree = {"w": 1.0, "h": NonDiff(jnp.ones(2))}
    for again in (
        jax.jit(lambda t: t)(tree),
        jax.tree.map(lambda x: x * 2, tree),
        jax.lax.scan(lambda t, _: (t, None), jax.tree.map(jnp.asarray, tree), None, length=2)[0],
        copy.copy(tree),
        copy.deepcopy(tree),
        pickle.loads(pickle.dumps(tree)),
    ):
        assert isinstance(again["h"], NonDiff)
        assert again["h"].value.shape == (2,)
    partly = pg.freeze(jax.tree_util.Partial(pow, 2.0, 3.0), "[0][1]")
    for again in (copy.copy(partly), copy.deepcopy(partly), pickle.loads(pickle.dumps(partly))):
        assert jax.tree.structure(again) == jax.tree.structure(partly)
        assert pg.is_nondiff(again, "[0][1]")
    out = jax.vmap(lambda t: t["h"] * 2, in_axes=({"w": None, "h": NonDiff(0)},))(tree)
    np.testing.assert_array_equal(out, [2.0, 2.0])


def test_a_new_value_does_not_recompile():
    traces = []

    @jax.jit
    def f(tree):
        traces.append(1)
        return tree["h"] * 2

    assert [float(f({"h": NonDiff(v)})) for v in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert len(traces) == 1


def test_unwrap_takes_wrappers_out_at_any_depth():
    tree = {"a": NonDiff({"b": NonDiff(1.0), "c": pg.Static("x")}), "d": [pg.Static({"e": NonDiff(2.0)})]}
    assert pg.unwrap(tree) == {"a": {"b": 1.0, "c": "x"}, "d": [{"e": 2.0}]}
    assert pg.unwrap(NonDiff(3.0)) == 3.0


def test_placeholders_of_any_kind_are_leaves():
    structure = jax.tree.structure({"a": NonDiff(1.0)})
    for placeholder in (None, object(), True, "x", jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert jax.tree.unflatten(structure, [placeholder])["a"].value is placeholder


def holds(f, *args):
    """The scopes of the equations that hold something, in the jaxpr of a function."""
    equations = jax.make_jaxpr(f)(*args).eqns
    return [str(e.source_info.name_stack) for e in equations if e.primitive.name == "stop_gradient"]


def test_a_traced_program_says_which_mark_holds_what():
    @pg.dataclass
    class Wave:
        size: float
        period: float = pg.field(nondiff=True, default=1.0)

    size, period, wrapped = (f"partgrad.held {name}" for name in ("Wave.size", "Wave.period", "NonDiff"))
    assert holds(lambda w: w.size, Wave(1.0)) == [period]
    assert holds(lambda w: w.size, Wave(NonDiff(1.0))) == [size, period]
    assert holds(lambda w: w.size, pg.freeze(Wave(1.0), "size")) == [size, period]
    assert holds(lambda x: Wave(1.0, x).period, 2.0) == [period]
    # What is held already stays the object that it is.
    assert holds(lambda x: Wave(NonDiff(x)).size, 2.0) == [wrapped]
    assert holds(lambda x: Wave({"a": x}, {"b": x}).size, 2.0) == [period]
    assert holds(lambda t: t["a"].value, {"a": NonDiff(1.0)}) == ["partgrad.held a NonDiff wrapper"]
    assert holds(lambda x: NonDiff({"a": x}).value, 1.0) == [wrapped]


def test_the_mark_is_named_in_a_derivative_and_under_jit():
    def loss(x):
        return x * NonDiff(x).value

    assert "partgrad.held NonDiff" in str(jax.jit(jax.grad(loss)).trace(1.0).jaxpr.pretty_print(name_stack=True))
    assert jax.jit(jax.grad(loss))(3.0) == 3.0
