"""A function that gives other numbers each time is found, with the operation to blame; gradients of unlike size too."""

import itertools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

from partgrad._check.program import Program
from partgrad._check.stability import condition, unlike_in_scale, unstable, unstable_equation
from partgrad._check.values import program_noise, values

pytestmark = pytest.mark.internal

generator = np.random.default_rng(0)
count = itertools.count()
POINT = jnp.linspace(0.5, 1.5, 3, dtype=jnp.float32)


def program(function, *leaves):
    return Program(lambda leaves: function(*leaves), list(leaves), [f"p[{i}]" for i in range(len(leaves))])


def ways(traced):
    found = values(traced.outputs, traced.leaves, program_noise(traced))
    again = unstable(
        traced.outputs, traced.leaves, found.plain, found.cotangents, found.gradient, program_noise(traced)
    )
    return {entry.way: entry for entry in again}


def names(chain):
    return [equation.primitive.name for equation in chain]


def noisy(x):
    return np.asarray(x) + np.float32(next(count))


def call(function, x):
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def honest(x):
    return call(np.asarray, x)


def test_a_number_that_python_draws():
    traced = program(lambda x: jnp.sin(x) * generator.normal() + x, POINT)
    found = ways(traced)
    assert set(found) == {"eager", "gradient"}
    assert not found["eager"].is_rounding
    assert found["eager"].absolute >= found["eager"].apart[0].absolute > 0
    assert names(unstable_equation(traced)) == ["mul"]


def test_an_array_that_python_draws():
    traced = program(lambda x: jnp.cos(x) + jnp.asarray(generator.normal(size=3), jnp.float32), POINT)
    assert names(unstable_equation(traced)) == ["add"]


def test_a_seed_that_python_draws():
    traced = program(lambda x: x * jax.random.normal(jax.random.key(int(generator.integers(1000)))), POINT)
    assert "random_seed" in names(unstable_equation(traced))[-1]


def test_a_number_that_python_draws_in_a_loop():
    traced = program(lambda x: lax.scan(lambda c, _: (c * generator.normal(), None), x, None, length=3)[0], POINT)
    assert names(unstable_equation(traced)) == ["scan", "mul"]


def test_a_path_that_python_draws():
    turns = itertools.cycle([jnp.sin, jnp.cos])
    traced = program(lambda x: next(turns)(x + 1) * 2, POINT)
    assert names(unstable_equation(traced))[-1] in ("sin", "cos")


def test_a_callback_that_answers_otherwise_each_time():
    traced = program(lambda x: honest(x) + call(noisy, 2 * x) + honest(3 * x), POINT)
    found = ways(traced)
    assert set(found) == {"eager", "jit"}
    chain = unstable_equation(traced)
    assert chain == (traced.jaxpr.eqns[2],)
    assert names(chain) == ["pure_callback"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: lax.scan(lambda c, _: (call(noisy, c), None), x, None, length=3)[0], ["scan", "pure_callback"]),
        (lambda x: jax.jit(lambda x: call(noisy, x))(x), ["jit", "pure_callback"]),
        (lambda x: lax.cond(x[0] > 0, lambda x: call(noisy, x), lambda x: x, x), ["cond", "pure_callback"]),
        (lambda x: jax.vmap(lambda x: call(noisy, x))(x), ["scan", "pure_callback"]),
        (
            lambda x: jax.experimental.io_callback(noisy, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
            ["io_callback"],
        ),
    ],
)
def test_a_callback_inside(function, expected):
    chain = unstable_equation(program(function, POINT))
    assert names(chain)[-1] == expected[-1]
    assert len(chain) >= len(expected) - 1


def test_a_callback_in_a_custom_rule():
    rule = jax.custom_jvp(lambda x: call(noisy, x))
    rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0]))
    traced = program(lambda x: rule(x) + honest(x), POINT)
    assert set(ways(traced)) == {"eager", "jit"}
    assert names(unstable_equation(traced)) == ["custom_jvp_call", "pure_callback"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sin(x) * np.float32(3.0) + np.ones(3, np.float32),
        lambda x: honest(x) + honest(x + 1),
        lambda x: lax.scan(lambda c, _: (honest(c), c), x, None, length=3),
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: jax.nn.relu(x) + np.nan,
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: 2 * c, x),
    ],
)
def test_what_gives_the_same_each_time(function):
    traced = program(function, POINT)
    assert not ways(traced)
    assert unstable_equation(traced) is None


def test_a_difference_of_rounding_is_told_apart():
    turn = itertools.count()
    point = [jnp.float32(1.0)]

    def outputs(leaves):
        return [leaves[0] * (1 + 1e-7 * (next(turn) % 2))]

    plain = outputs(point)
    (found,) = unstable(outputs, point, plain, [], None)
    assert found.is_rounding
    assert 0 < found.absolute < 1e-6


def test_gradients_of_unlike_size():
    leaves = [jnp.ones(4), jnp.ones(2), jnp.ones(3), jnp.ones(3)]
    gradients = [jnp.full(4, 1e8), jnp.full(2, 10.0), jnp.full(3, 1e-3), jnp.zeros(3)]
    found = unlike_in_scale(gradients, leaves)
    assert (found.largest, found.smallest) == (0, 2)
    assert found.ratio == pytest.approx(1e11, rel=1e-5)
    assert found.gradients == pytest.approx((1e8, 1e-3))
    assert found.magnitudes == (1.0, 1.0)


def test_gradients_as_unlike_as_the_leaves_are_take_one_step_size():
    leaves = [jnp.full(3, 1e5), jnp.full(3, 1e-5)]
    assert unlike_in_scale([jnp.full(3, 1e5), jnp.full(3, 1e-5)], leaves) is None


def test_a_gradient_that_is_all_rounding_is_not_counted():
    leaves = [jnp.ones(3), jnp.ones(3)]
    gradients = [jnp.ones(3), jnp.full(3, 1e-8)]
    assert unlike_in_scale(gradients, leaves) is not None
    assert unlike_in_scale(gradients, leaves, lambda: [np.full(3, 1e-8)] * 2) is None
    assert unlike_in_scale(gradients, leaves, lambda: [np.full(3, 1e-12)] * 2) is not None


@given(st.lists(st.floats(1e-2, 1e2), min_size=1, max_size=5))
def test_gradients_of_like_size(sizes):
    assert unlike_in_scale([np.full(2, size) for size in sizes], [np.ones(2)] * len(sizes)) is None


def test_leaves_that_are_zero_or_empty_or_without_a_number():
    leaves = [jnp.zeros(2), jnp.zeros(0), jnp.ones(2), jnp.ones(2)]
    gradients = [jnp.full(2, 1e9), jnp.zeros(0), jnp.ones(2), jnp.full(2, jnp.nan)]
    found = unlike_in_scale(gradients, leaves)
    assert (found.largest, found.smallest) == (0, 2)


def test_the_condition_of_a_diagonal():
    found = condition([2.0, -8e6, 0.0, np.nan, 4.0])
    assert (found.largest, found.smallest) == (1, 0)
    assert found.number == pytest.approx(4e6)
    assert condition([4.0, 4.0], lengths=[1.0, 2.0]).number == pytest.approx(4)
    assert condition([1.0, 0.0]) is None
    assert condition([]) is None
