"""Reads and writes by index, in and out of bounds, in every mode: what the value reads is live.

The truth is a function of NumPy, differentiated by differences. JAX's own derivative of a read or write out of bounds
is not always that of the value: then `double_where` keeps it, and with `consistent_indexing` it is the value's.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg

X = np.array([0.3, 0.7, 1.1])
U = np.array([0.4, 0.9])
WEIGHTS = np.array([1.0, 2.0, 3.0])
PLACES = {"above": [5, 1], "below": [1, -9]}
MODES = ("promise_in_bounds", "clip", "fill")
WRITES = {
    "set": lambda old, new: new,
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
}
# What takes longer to compile than to run.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def read(places, mode):
    fill = {"fill_value": 1.0} if mode == "fill" else {}

    def function(x, u):
        return (x.at[np.array(places)].get(mode=mode, wrap_negative_indices=False, **fill) * u).sum()

    def truth(x, u):
        inside = [mode != "fill" or 0 <= place < 3 for place in places]
        return sum(u[n] * (x[np.clip(place, 0, 2)] if inside[n] else 1.0) for n, place in enumerate(places))

    return function, truth


def write(places, mode, name, unique):
    def function(x, u):
        at = x.at[np.array(places)]
        written = getattr(at, name)(u, mode=mode, unique_indices=unique, wrap_negative_indices=False)
        return (written * WEIGHTS).sum()

    def truth(x, u):
        x = np.array(x)
        for place, update in zip(places, u, strict=True):
            # Only a clamped write is written elsewhere.
            if mode == "clip" or 0 <= place < 3:
                place = np.clip(place, 0, 2)
                x[place] = WRITES[name](x[place], update)
        return (x * WEIGHTS).sum()

    return function, truth


def dynamic_read(start):
    where = np.clip(start, 0, 1)
    return lambda x, u: (lax.dynamic_slice(x, (start,), (2,)) * u).sum(), lambda x, u: (x[where:][:2] * u).sum()


def dynamic_write(start):
    where = np.clip(start, 0, 1)
    function = lambda x, u: (lax.dynamic_update_slice(x, u, (start,)) * WEIGHTS).sum()
    return function, lambda x, u: (np.concatenate([x[:where], u, x[where + 2 :]]) * WEIGHTS).sum()


TABLE = {f"{make.__name__} {start}": make(start) for make in (dynamic_read, dynamic_write) for start in (0, 9, -9)}
TABLE |= {f"read {mode} {place}": read(PLACES[place], mode) for mode, place in itertools.product(MODES, PLACES)}
TABLE |= {
    f"{name} {mode} {place}{' unique' * unique}": write(PLACES[place], mode, name, unique)
    for name, mode, place, unique in itertools.product(WRITES, MODES, PLACES, (False, True))
    # JAX differentiates a product only where it may take the places for different ones, which clamping can make equal.
    if unique == (name == "multiply") or name == "set"
}


def inner(x, u):
    return jnp.sin(x), jnp.cos(u)


def stacked(names):
    """Entries of the table, each of numbers of its own."""
    return lambda x, u: jnp.stack([TABLE[name][0](*inner(x, u)) for name in names])


def slopes(truth):
    points = np.concatenate([X, U])
    at = lambda p: truth(np.sin(p[:3]), np.cos(p[3:]))
    return np.array([(at(points + step) - at(points - step)) / 2e-6 for step in 1e-6 * np.eye(5)])


def jacobian(transform, f):
    found = jax.jit(transform(f, (0, 1)), compiler_options=QUICKLY)(X, U)
    return np.concatenate(found, axis=1)


TRUTHS = np.stack([slopes(truth) for _, truth in TABLE.values()])
# Of a clamped extremal write JAX divides by a count of zero, and the NaN is in every row that is pulled back.
WHERE_JAX_IS_FINITE = [name for name in TABLE if not name.startswith("min clip")]


def assert_rows(found, expected, names):
    wrong = [name for name, *rows in zip(names, found, expected, strict=True) if not np.allclose(*rows, atol=1e-8)]
    assert not wrong, wrong


@pytest.mark.slow
def test_forward_mode_is_the_derivative_of_the_value():
    assert_rows(jacobian(jax.jacfwd, pg.double_where(stacked(TABLE))), TRUTHS, TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["double_where", "consistent_indexing"])
def test_with_consistent_indexing_both_modes_are(first):
    wrappers = [pg.double_where, pg.consistent_indexing]
    inner, outer = wrappers if first == "double_where" else wrappers[::-1]
    f = outer(inner(stacked(TABLE)))
    assert_rows(jacobian(jax.jacrev, f), TRUTHS, TABLE)
    assert_rows(jacobian(jax.jacfwd, f), TRUTHS, TABLE)


TRANSFORMS = {
    "reverse": jax.jacrev,
    "forward over reverse": lambda f, a: jax.jacfwd(jax.jacrev(f, a), a),
    "reverse over reverse": lambda f, a: jax.jacrev(jax.jacrev(f, a), a),
    "vmap": lambda f, a: lambda x, u: [d[0] for d in jax.vmap(jax.jacfwd(f, a))(x[None], u[None])],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_jaxs(name):
    f = stacked(WHERE_JAX_IS_FINITE)
    derivatives = lambda f: jax.jit(TRANSFORMS[name](f, (0, 1)), compiler_options=QUICKLY)(X, U)
    expected, found = (jax.tree.leaves(derivatives(g)) for g in (f, pg.double_where(f)))
    for pair in zip(found, expected, strict=True):
        assert_rows(*pair, WHERE_JAX_IS_FINITE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["min", "max"])
def test_a_nan_beside_an_extremal_write(mode, name):
    x = np.array([1.0, np.nan, 2.0, np.nan])
    f = lambda x: getattr(x.at[np.array([0, 3])], name)(np.array([1.5, 0.0]), mode=mode) * np.arange(1.0, 5)
    expected = jax.jacrev(f)(x)
    for transform in (jax.jacrev, jax.jacfwd):
        np.testing.assert_array_equal(transform(pg.double_where(f))(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_no_read_touches_is_dead(mode):
    f = lambda x: jnp.sqrt(x).at[np.array([5, 1])].get(mode=mode, fill_value=0.0 if mode == "fill" else None).sum()
    x = np.array([0.0, 1.0, 4.0])
    truth = [0, 0.5, 0 if mode == "fill" else 0.25]
    np.testing.assert_allclose(jax.jacfwd(pg.double_where(f))(x), truth)
    np.testing.assert_allclose(jax.grad(pg.consistent_indexing(pg.double_where(f)))(x), truth)
