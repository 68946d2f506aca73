"""A tap shows values when a program runs, and no transformation around it sees it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.experimental import jet
from jax.sharding import AxisType, PartitionSpec

from helpers.tables import table
from partgrad._audit.states import States
from partgrad._audit.tap import tapped

X = jnp.array([0.5, 1.0, 2.0])


def loss(tap, x):
    return jnp.sum(jnp.sin(tap(x)) ** 2)


def stopped_loop(tap, x):
    """Reverse mode skips the loop, as nothing of it is differentiated; an effect in it would not let it."""
    found = jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + loss(tap, c) * x.sum() + 1, x)
    return jnp.sum(x * jax.lax.stop_gradient(found))


def of_tangents(tap, x):
    """A tap beside values and tangents in a rule."""
    squared = jax.custom_jvp(lambda x: x**2)

    @squared.defjvp
    def _(primals, tangents):
        x, t = tap(primals[0], tangents[0])
        return squared(x), 2 * jnp.sin(x) * t

    return jnp.sum(squared(x))


def of_residuals(tap, x):
    squared = jax.custom_vjp(lambda x: x**2)
    squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * tap(x) * g,))
    return jnp.sum(squared(x))


FUNCTIONS = {
    "plain": loss,
    "a stopped loop": stopped_loop,
    "a scan": lambda tap, x: jax.lax.scan(lambda c, _: (c + loss(tap, c) * x, None), x, None, length=3)[0].sum(),
    "a branch": lambda tap, x: jax.lax.cond(x.sum() > 0, functools.partial(loss, tap), lambda x: 0.0, x),
    "a checkpoint": lambda tap, x: jax.checkpoint(functools.partial(loss, tap))(jnp.sin(x)),
    "a checkpoint of tangents": lambda tap, x: jax.checkpoint(functools.partial(of_tangents, tap))(jnp.sin(x)),
    "tangents": of_tangents,
    "a backward pass": of_residuals,
    "a solve": lambda tap, x: jax.scipy.sparse.linalg.cg(lambda v: tap(v) * x, jnp.ones(3))[0].sum(),
    "a gradient inside": lambda tap, x: jnp.sum(jax.grad(functools.partial(loss, tap))(x) ** 2),
}
AROUND = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jacfwd": jax.jacfwd,
    "jacrev": lambda f: jax.jacrev(lambda x: jnp.stack([f(x), f(2 * x)])),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x + 1])),
    "jit of vmap of vmap": lambda f: lambda x: jax.jit(jax.vmap(jax.vmap(f)))(jnp.stack([[x, x], [x, x + 1]])),
    "hessian": jax.hessian,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jet": lambda f: lambda x: jet.jet(f, (x,), ((x, x),)),
}
# Functions that show nothing: what is linear and runs in a transpose only, and a backward pass without one.
SILENT = ("tangents", "a checkpoint of tangents", "a solve", "a backward pass")


def passing(*values):
    return values[0] if len(values) == 1 else values


@table("function, around", FUNCTIONS, AROUND, most=2, quick=0, kind=lambda function, around: function)
def test_no_transformation_sees_a_tap(function, around):
    seen = []

    def tap(*values):
        return passing(*tapped(lambda *shown: seen.append(shown), values, values))

    def run(how):
        try:
            return jax.tree.leaves(AROUND[around](functools.partial(FUNCTIONS[function], how))(X))
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            # Not every function has every derivative.
            return type(error)

    expected, found = run(passing), run(tap)
    jax.effects_barrier()
    if isinstance(expected, type):
        assert found is expected
        return
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert seen or function in SILENT


def test_elements_of_a_batch_are_shown():
    seen = []
    tap = lambda x, y: tapped(lambda *shown: seen.append([float(value) for value in shown]), [x, y], [x])[0]
    inner = jax.vmap(tap, (0, None))
    jax.block_until_ready(jax.jit(jax.vmap(inner, (None, 0)))(jnp.arange(3.0), jnp.arange(10.0, 12.0)))
    jax.effects_barrier()
    assert sorted(seen) == sorted([x, y] for x in (0.0, 1.0, 2.0) for y in (10.0, 11.0))
    seen.clear()
    jax.block_until_ready(inner(jnp.arange(1000.0), jnp.array(1.0)))
    assert len(seen) == 16
    assert (seen[0], seen[-1]) == ([0.0, 1.0], [999.0, 1.0])


def test_keys_and_meshes():
    seen = []
    tap = lambda x: tapped(lambda shown: seen.append(shown), [x], [x])[0]
    jax.block_until_ready(jax.jit(lambda key: jax.random.normal(tap(key)))(jax.random.key(0)))
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(lambda x: jnp.sin(tap(x)), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: mapped(x).sum()))(X), jnp.cos(X), rtol=1e-6)
    jax.effects_barrier()
    assert len(seen) == 2


def test_a_linear_function_can_be_transposed():
    double = lambda x: 2 * tapped(lambda shown: None, [x], [x])[0]
    np.testing.assert_array_equal(jax.linear_transpose(double, X)(X)[0], 2 * X)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 5))
def test_states_are_few_and_different(values, most):
    states = States(most)
    for value in values:
        states.offer([np.array(value)], lambda value=value: value)
    kept = list(states)
    assert kept[0] == values[0]
    assert len(kept) == min(most, len(kept)) <= len(set(values))
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("values", [[1.0, 1.1, 1.2, 0.0, 1.3], [1.0, 1.1, 1.2, 1.3, -5.0], [1.0, 1.1, np.nan, 1.2]])
def test_what_stands_out_is_kept(values):
    states = States(2)
    for value in values:
        states.offer([np.array([1.0, value])], lambda value=value: value)
    odd = [value for value in values if not 1.0 <= value <= 1.3]
    np.testing.assert_array_equal(list(states), [1.0, *odd])
