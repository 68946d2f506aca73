"""Memory, threads, transfers and JAX's strict modes: small shares of `tests/scripts/soak.py` and `tests/scripts/under.py`."""

import concurrent.futures
import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
import soak
import under
from helpers.models import RBF, Sum


@pytest.mark.slow
def test_memory_is_flat_where_nothing_is_the_same_twice():
    jax.clear_caches()
    (early, _), *_, (late, _) = soak.soak(2000, marks=4)[1:]
    # JAX's caches and those of `double_where` still fill, by five objects for each of the thousand calls (4.6 on JAX
    # 0.12); `python tests/scripts/soak.py 100000` goes on until they are full.
    assert late - early < 6000


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


def model_of(number):
    return {"w": jnp.full((2, 3), float(number) + 1.0), "v": np.array([float(number), 2.0]), "n": number}


def squares(m):
    return jnp.sum(m["w"] ** 2) * m["v"][1]


def fresh(number):
    return lambda m: jnp.sum(jnp.where(m["w"] > 0, jnp.log(m["w"]), 0.0)) * float(number)


# By name, a call with the number of the call.
CALLS = {
    "select": lambda i: pg.select(model_of(i), "w[0]"),
    "replace": lambda i: pg.replace(model_of(i), "w[0,1]", float(i)),
    "replace in NumPy": lambda i: pg.replace(model_of(i), "v[0]", jnp.float32(i)),
    "apply_updates": lambda i: pg.apply_updates(model_of(i), {"w": jnp.ones((2, 3)), "v": np.ones(2), "n": None}),
    "ravel": lambda i: (lambda vector, unravel: unravel(2 * vector))(*pg.ravel(model_of(i))),
    "partition": lambda i: pg.combine(*pg.partition(model_of(i), "w")),
    "freeze": lambda i: pg.thaw(pg.freeze(model_of(i), "w"), "w"),
    "label": lambda i: pg.label(model_of(i), {"a": "w"}, default="b"),
    "mask": lambda i: (pg.mask(model_of(i)), pg.items(model_of(i)), pg.is_nondiff(model_of(i), "w")),
    "stop_gradient": lambda i: jax.grad(lambda m: squares(pg.stop_gradient(m, "w")), allow_int=True)(model_of(i)),
    "summary": lambda i: str(pg.summary(model_of(i))),
    "show": lambda i: pg.show(model_of(i)).svg(),
    "grad": lambda i: pg.grad(squares, wrt="w[0]")(model_of(i)),
    "nonfinite": lambda i: pg.value_and_grad(squares, nonfinite="report")(model_of(i)),
    "nonfinite under vmap": lambda i: jax.vmap(pg.grad(jnp.sum, nonfinite="report"))(jnp.full((3, 2), float(i))),
    "hessian": lambda i: pg.hessian(squares, wrt="w[0]")(model_of(i)),
    "jvp": lambda i: pg.jvp(squares, (model_of(i),), (jnp.ones((2, 3)),), wrt="w"),
    "vjp": lambda i: pg.vjp(squares, model_of(i), wrt="w")[1](1.0),
    "linearize": lambda i: pg.linearize(squares, model_of(i), wrt="w")[1](jnp.ones((2, 3))),
    "hvp": lambda i: pg.hvp(squares, wrt="w")(model_of(i), jnp.ones((2, 3))),
    "double_where": lambda i: pg.grad(pg.double_where(fresh(1)), wrt="w")(model_of(i)),
    "a fresh function": lambda i: pg.grad(pg.double_where(fresh(i)), wrt="w")(model_of(i)),
    "safe": lambda i: jax.grad(lambda x: pg.safe.norm(x) + pg.safe.std(x))(jnp.full(3, float(i))),
    "equality": lambda i: model_of(i)["w"].tolist() == pg.unwrap(model_of(i))["w"].tolist(),
    "draw": lambda i: pg.draw(jax.random.normal, jax.random.key(i), (2,), gradient="fixed"),
}


def is_alive(value):
    """Whether an object is more than a weak reference to nothing.

    JAX keeps one for each function that it sees once: `jax.hessian(lambda x: ...)(x)` does, without partgrad.
    """
    return type(value) is not weakref.ReferenceType or value() is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_no_call_keeps_arrays_or_objects(name):
    def count():
        jax.effects_barrier()
        gc.collect()
        return len(jax.live_arrays()), sum(map(is_alive, gc.get_objects()))

    # What is kept in bounded number is full by then.
    for number in range(120):
        CALLS[name](number % 100)
    arrays, objects = count()
    for number in range(50):
        CALLS[name](number % 100)
    later_arrays, later_objects = count()
    assert later_arrays <= arrays
    assert later_objects - objects < 45


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
