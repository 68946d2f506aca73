"""Memory, threads, transfers and JAX's strict modes: small shares of `tests/scripts/soak.py` and `tests/scripts/under.py`."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import partgrad as pg
import soak
import under
from models import RBF, Sum


@pytest.mark.slow
def test_memory_is_flat_where_nothing_is_the_same_twice():
    jax.clear_caches()
    # Caches are full after a thousand; `python tests/scripts/soak.py 100000` has the rest.
    (early, _), *_, (late, _) = soak.soak(2000, marks=4)[1:]
    assert late < 1.02 * early


def used_by_a_thread(number):
    model = Sum(RBF(pg.NonDiff(1.0), float(number)), RBF(2.0, jnp.arange(1.0, 3.0 + number % 3)))
    held = pg.freeze(model, "b.lengthscale")
    first, rest = pg.partition(held)
    return (
        float(SHARED(model, 2.0).a.lengthscale) == 4.0 * number,
        bool((NAMED(held) == 2 * held.b.lengthscale).all()),
        jax.tree.structure(pg.combine(first, rest)) == jax.tree.structure(held),
        bool(jnp.isfinite(TAKEN(jnp.arange(float(2 + number % 3)))).all()),
    )


SHARED = pg.grad(lambda m, x: x * m.a.lengthscale**2)
NAMED = pg.grad(lambda m: (m.b.lengthscale**2).sum(), wrt=lambda m: m.b.lengthscale)
TAKEN = jax.grad(pg.double_where(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum()))


@pytest.mark.slow
def test_sixteen_threads_share_transforms():
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for outcome in threads.map(used_by_a_thread, range(48)):
            assert outcome == (True,) * 4


def test_nothing_is_sent_to_a_device_behind_the_back():
    model, x = jax.device_put((RBF(jnp.array(2.0), jnp.array([1.0, 3.0])), jnp.array([0.5, 2.0])))
    loss = lambda m, x: jnp.sum(m.variance * jnp.cos(x) * m.lengthscale)
    ones, key = jax.tree.map(jnp.ones_like, model), jax.random.key(0)
    # Eagerly, `jax.grad` itself sends the one that it pulls back.
    gradient = jax.jit(pg.value_and_grad(loss, wrt=lambda m: m.lengthscale))
    with jax.transfer_guard("disallow"):
        gradient(model, x)
        jax.jit(pg.hvp(loss))(model, ones, x)
        jax.jit(pg.grad(pg.double_where(loss)))(pg.freeze(model, "variance"), x)
        pg.jvp(loss, (model, x), (ones,), wrt="**")
        pg.vjp(loss, model, x, wrt="variance")
        pg.combine(*pg.partition(pg.thaw(pg.freeze(model, "variance"), "**"), "variance"))
        pg.apply_updates(model, ones)
        pg.ravel(model)
        pg.draw(jax.random.normal, key, x.shape, gradient="error")
        pg.mask(model), pg.summary(model)


@pytest.mark.slow
def test_strict_modes_and_flags_of_coming_behaviour():
    """All at once, on a few tests; `python tests/scripts/under.py` has each by itself, on many."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "under", "--under", ",".join(under.MODES)]
    tests = [f"{under.TESTS}/internal/test_used_leaves.py"]
    run = subprocess.run(
        [*command, *tests], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": under.PATH}
    )
    assert run.returncode == 0, run.stdout
