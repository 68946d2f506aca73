"""What a gradient keeps: no more than JAX's, whatever nests; and what examples share is multiplied once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table

W, H = np.full((64, 64), 0.1, np.float32), np.ones((16, 64), np.float32)

repeated = lambda g, length=32: lambda h: lax.scan(lambda c, _: (g(c), None), h, None, length=length)[0]
chosen = lambda g: lambda h: lax.cond(h[0, 0] > -5, g, lambda h: h, h)
saving = lambda g: jax.checkpoint(g, policy=jax.checkpoint_policies.dots_saveable)
hidden = lambda g: jax.checkpoint(g, prevent_cse=False)
NESTED = {
    "scan": repeated,
    "scan of checkpoint": lambda g: repeated(jax.checkpoint(g)),
    "checkpoint of scan": lambda g: jax.checkpoint(repeated(g)),
    "checkpoint of scan of checkpoint": lambda g: jax.checkpoint(repeated(jax.checkpoint(g))),
    "scan of checkpoint of scan": lambda g: repeated(jax.checkpoint(repeated(g, 8))),
    "scan of scan of checkpoint": lambda g: repeated(repeated(jax.checkpoint(g), 8)),
    "four": lambda g: repeated(jax.checkpoint(repeated(jax.checkpoint(g), 8))),
    "scan of cond of checkpoint": lambda g: repeated(chosen(jax.checkpoint(g))),
    "scan of checkpoint of cond": lambda g: repeated(jax.checkpoint(chosen(g))),
    "a policy": lambda g: repeated(saving(g)),
    "without barriers": lambda g: repeated(hidden(g)),
}


def temporaries(gradient):
    return jax.jit(gradient).lower(W, H).compile().memory_analysis().temp_size_in_bytes


@table("selects, name", [False, True], NESTED, most=3, quick=0, kind=lambda selects, name: selects)
def test_temporaries(selects, name):
    def f(w, h):
        step = lambda h: jnp.where(h > 0, jnp.tanh(h @ w), h) if selects else jnp.tanh(h @ w)
        return jnp.sum(NESTED[name](step)(h) ** 2)

    ours, plain = temporaries(jax.grad(pg.double_where(f), (0, 1))), temporaries(jax.grad(f, (0, 1)))
    assert ours <= 1.1 * plain


@pytest.mark.slow
def test_weights_that_all_examples_share():
    def f(w, x):
        for _ in range(3):
            x = jnp.where(x > 0, jnp.tanh(x @ w), x)
        return jnp.sum(x**2)

    w, x = np.full((64, 64), 0.1, np.float32), np.ones((128, 64), np.float32)
    cost = lambda g: jax.jit(jax.grad(g)).lower(w).compile().cost_analysis()["bytes accessed"]
    of = lambda f: lambda w: jnp.mean(jax.vmap(f, (None, 0))(w, x))
    assert cost(of(pg.double_where(f))) <= 1.6 * cost(of(f))


@pytest.mark.parametrize("batch", [False, True])
def test_a_printed_derivative_shows_what_it_computes_again(batch):
    def text(policy):
        f = jax.checkpoint(lambda x: jnp.where(x > 0, jnp.sin(jnp.sin(x)), x), policy=policy)
        f = pg.double_where(jax.vmap(f) if batch else f)
        at = jnp.array([4.0]) if batch else 4.0
        return str(jax.make_jaxpr(jax.linearize(f, at)[1])(at))

    assert " sin " in text(jax.checkpoint_policies.nothing_saveable)
    assert " sin " not in text(jax.checkpoint_policies.everything_saveable)
    linear = lambda t: jax.vmap(jax.linearize(pg.double_where(jnp.cos), 1.0)[1])(t)
    assert " mul " in str(jax.make_jaxpr(linear)(jnp.ones(2)))
