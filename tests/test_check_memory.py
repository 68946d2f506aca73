"""A check keeps what it compiled for the next one, and nothing of what it was given."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg
from helpers.tables import table


def wrong_rule(x):
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct,))
    return sine(x).sum()


def constant(x):
    return (x * jnp.full(x.shape, 2.0)).sum()


FUNCTIONS = {
    "smooth": lambda x: (x**2).sum(),
    "a constant": constant,
    "a wrong rule": wrong_rule,
    "a loop": lambda x: jax.lax.scan(lambda c, own: (c * own, None), 1.0, x)[0],
    "an index": lambda x: x[jnp.array([1, 99])].sum(),
    "a NaN": lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(),
    "double_where": pg.double_where(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum()),
    "a jump": lambda x: jnp.round(x).sum() + x.sum(),
    "a branch in Python": lambda x: x.sum() if x[0] < 1 else -x.sum(),
    "a named value": lambda x: (checkpoint_name(x, "h") ** 2).sum(),
}


class _Function:
    """A function that can be referenced weakly, and holds an array."""

    def __init__(self, f, held):
        self.f, self.held = f, held

    def __call__(self, p):
        return self.f(p["x"]) * p["side"].sum() + self.held.sum()


@table("name", FUNCTIONS, quick=0, most=5)
def test_what_was_checked_is_given_back(name):
    f, wrt = FUNCTIONS[name], pg.intermediate("h") if name == "a named value" else "x"
    held = []
    for size in (3, 4):
        x, side, closed_over = jnp.arange(float(size)), jnp.arange(size) + 1, np.ones(size)
        function = _Function(f, closed_over)
        held += map(weakref.ref, (function, x, side, closed_over))
        pg.check(function, wrt, progress=False)({"x": x, "side": side})
        del x, side, closed_over, function
    gc.collect()
    assert [one() for one in held if one() is not None] == []


@pytest.mark.slow
def test_what_was_searched_is_given_back():
    x = jnp.arange(3.0) + 1.0
    held = weakref.ref(x)
    pg.check(lambda x: (x / jnp.sqrt(x)).sum(), search=True, exhaustive=True, progress=False)(x)
    del x
    gc.collect()
    assert held() is None
