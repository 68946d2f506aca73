"""What a check compiles: little for a function without findings, and nothing for the next check of the same one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg

X = np.linspace(0.3, 1.1, 4, dtype=np.float32)
A = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

FUNCTIONS = {
    "elementwise": lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)),
    "array": lambda x: jnp.tanh(A @ x),
    "relu": lambda x: jnp.sum(jax.nn.silu(A @ x) ** 2),
    "scan": lambda x: lax.scan(lambda c, u: (jnp.tanh(c + u), c), x[0], x)[0],
    "linear algebra": lambda x: jnp.linalg.slogdet(A @ A.T + jnp.diag(x))[1],
    "indices": lambda x: jnp.sum(x[np.array([0, 2, 1, 3])] ** 2),
    "jit": jax.jit(lambda x: jnp.prod(x) + jnp.sum(x**3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_most_three_times_those_of_a_gradient_and_then_none(name, compilations):
    function = FUNCTIONS[name]
    point = jnp.asarray(X)
    # What the function compiles when it runs eagerly is its own.
    jax.block_until_ready(function(point))
    compilations[0] = 0
    jax.block_until_ready(function(point))
    eagerly, compilations[0] = 2 * compilations[0], 0
    jax.block_until_ready(jax.jit(jax.value_and_grad(lambda x: jnp.sum(function(x))))(point))
    alone, compilations[0] = compilations[0], 0
    first = pg.check(function, progress=False)(point)
    assert first.ok
    assert [f for f in first.findings if f.severity != "info"] == []
    assert compilations[0] <= 3 * alone + eagerly
    compilations[0] = 0
    again = pg.check(function, progress=False)(point)
    assert compilations[0] == eagerly
    assert again.to_dict() == first.to_dict()


def test_what_is_kept_is_of_the_program_and_not_of_its_numbers():
    """Constants that change between two checks of the same program count."""
    for factor in (2.0, 3.0):
        scale = np.float32(factor) * X
        wrong = jax.custom_jvp(lambda x, s=scale: jnp.sum(s * x))
        wrong.defjvp(lambda p, t, s=scale: (jnp.sum(s * p[0]), jnp.sum(2 * X * t[0])))
        assert pg.check(lambda x, rule=wrong: rule(x), progress=False)(X).ok == (factor == 2.0)


@pytest.mark.slow
def test_lines_are_those_of_the_function_that_is_checked():
    first = lambda x: jnp.sum(jnp.sqrt(x - x))
    second = lambda x: jnp.sum(jnp.sqrt(x - x))
    lines = [pg.check(f, progress=False)(X).findings[0].line for f in (first, second)]
    assert lines[1] == lines[0] + 1
    reads = [lambda x: x[jnp.array([9])].sum(), lambda x: x[jnp.array([9])].sum()]
    lines = [next(f.line for f in pg.check(f, progress=False)(X).findings if f.kind == "oob") for f in reads]
    assert len(lines) == 2
