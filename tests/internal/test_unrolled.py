"""Iterations that Python unrolled are found in a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partgrad._programs import apart, evaluate, iterations


def test_the_last_turn_is_found_and_what_it_carries():
    def function(a, b):
        x = y = a
        for _ in range(4):
            x, y = jnp.sin(x * b), jnp.cos(x + y)
        return x - 2 * y, b

    closed = jax.make_jaxpr(function)(1.0, 2.0)
    (iteration,) = iterations(closed.jaxpr)
    assert len(iteration.carried) == 2
    parts = apart(closed.jaxpr, iteration)
    known = evaluate(parts.before, [], [1.0, 2.0])
    count = len(parts.is_float)
    results, others = known[:count], known[count:]
    for _ in range(3):
        results = evaluate(parts.turn, [], [*parts.carried(results), *others])
    found = evaluate(parts.after, [], [*results, *parts.carried(results), *others])
    x = y = jnp.float32(1.0)
    for _ in range(7):
        x, y = jnp.sin(x * 2.0), jnp.cos(x + y)
    np.testing.assert_allclose(found, [x - 2 * y, 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sin(jnp.sin(x)),
        lambda x: ((x * 2.0 + 1.0) * 2.5 + 1.0) * 3.0 + 1.0,
        lambda x: jnp.sin(x) + jnp.sin(x) + jnp.sin(x),
        lambda x: jnp.cos(jnp.tanh(jnp.sin(x))),
    ],
    ids=["twice", "polynomial", "sum", "three functions"],
)
def test_a_formula_is_no_iteration(function):
    assert not iterations(jax.make_jaxpr(function)(1.0).jaxpr)
