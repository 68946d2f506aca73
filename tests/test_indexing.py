"""Derivatives of reads and writes by index agree with the values, wherever the index points."""

import functools
import os
import pathlib
import subprocess
import sys

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import partgrad as pg
from helpers.tables import table

SHAPE = (3, 4)
WRITING = ["clip", "drop", "promise_in_bounds"]
MODES = ["clip", "fill", "drop", "promise_in_bounds", None]


def in_every_mode(read, modes=MODES):
    return {f"{read.__name__}-{mode}": functools.partial(read, mode=mode) for mode in modes}


def get(x, i, mode):
    return x.at[i].get(mode=mode)


def get_raw(x, i, mode):
    return x.at[i, 1:].get(mode=mode, wrap_negative_indices=False)


def get_unique(x, i, mode):
    return x.at[i[:, None]].get(mode=mode, unique_indices=True, indices_are_sorted=True)


def take(x, i, mode):
    return jnp.take(x, i, axis=1, mode=mode)


def take_along_axis(x, i, mode):
    return jnp.take_along_axis(x, jnp.stack([i, i + 1, -i]), axis=1, mode=mode)


def window(x, i, mode):
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    return lax.gather(x, jnp.stack([i, i[::-1]], 1), numbers, (2, 3), mode=mode)


def batched_window(x, i, mode):
    numbers = lax.GatherDimensionNumbers((1,), (), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
    return lax.gather(x[:2], i[:, None], numbers, (1, 2), mode=mode)


READS = {
    "array": lambda x, i: x[i],
    "matrix": lambda x, i: x[i[:, None] + jnp.arange(2)],
    "last axis": lambda x, i: x[..., i],
    "two arrays": lambda x, i: x[i, i[::-1]],
    "array and slice": lambda x, i: x[i, 1:3],
    "slice and array": lambda x, i: x[::2, i],
    "split by a slice": lambda x, i: x[None][i, :, i],
    "new axis": lambda x, i: x[None, i, None],
    "scalar": lambda x, i: x[i[0]],
    "two scalars": lambda x, i: x[i[0], i[1]],
    "scalar and array": lambda x, i: x[i[0], i],
    "nothing": lambda x, i: x[i[:0]],
    "complex": lambda x, i: jnp.abs((x + 2j * x)[i]),
    "ravelled": lambda x, i: x.ravel()[i * 3],
    "dynamic_slice": lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 2)),
    "dynamic_index": lambda x, i: lax.dynamic_index_in_dim(x, i[0], 1),
    "vmap of a scalar": lambda x, i: jax.vmap(lambda j: x[j])(i),
    "vmap of an array": lambda x, i: jax.vmap(lambda row: row[i])(x),
    "vmap of both": lambda x, i: jax.vmap(lambda row, j: row[j + i])(x[:2], i),
    "take wrap": functools.partial(take, mode="wrap"),
    **in_every_mode(get),
    **in_every_mode(get_raw, ["clip", "fill", "promise_in_bounds"]),
    **in_every_mode(get_unique, ["clip", "promise_in_bounds"]),
    **in_every_mode(take, ["clip", None]),
    **in_every_mode(take_along_axis, ["clip", "fill", "promise_in_bounds"]),
    **in_every_mode(window, ["fill", "promise_in_bounds"]),
    **in_every_mode(batched_window, ["fill", "promise_in_bounds"]),
}


def written(method, mode, x, u, i, **promises):
    return getattr(x.at[i], method)(u[:2], mode=mode, **promises)


def written_column(method, mode, x, u, i, **promises):
    return getattr(x.at[1:, i], method)(u[1:, :2], mode=mode, **promises)


def written_window(scatter, mode, x, u, i):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return scatter(x, jnp.stack([i, i[::-1]], 1), jnp.stack([u[:2, :3], u[1:, 1:]]), numbers, mode=mode)


WRITES = {
    **{
        f"{method}-{mode}": functools.partial(written, method, mode)
        for method in ["set", "add", "subtract", "min", "max"]
        for mode in WRITING
    },
    **{
        f"{method}-{mode}-column": functools.partial(written_column, method, mode)
        for method in ["set", "max"]
        for mode in ["clip"]
    },
    **{
        f"{scatter.__name__}-{mode}-window": functools.partial(written_window, scatter, mode)
        for scatter in [lax.scatter, lax.scatter_max]
        for mode in ["clip", "promise_in_bounds"]
    },
    **{
        f"{method}-{mode}-unique": functools.partial(written, method, mode, unique_indices=True)
        for method in ["set", "multiply", "divide", "max"]
        for mode in WRITING
    },
    "dynamic_update_slice": lambda x, u, i: lax.dynamic_update_slice(x, u[:2, :3], (i[0], i[1])),
    "vmap of dynamic_update_slice": lambda x, u, i: jax.vmap(
        lambda row, j: lax.dynamic_update_slice(row, u[0, :2], (j,))
    )(x[:2], i),
    "scalar": lambda x, u, i: x.at[i[0]].set(u[0]),
    "scalar clip": lambda x, u, i: x.at[i[0], i[1]].max(u[0, 0], mode="clip"),
    "vmap": lambda x, u, i: jax.vmap(lambda row, v, j: row.at[j + i].set(v, mode="clip"))(x[:2], u[:2, :2], i),
}


def distinct(seed):
    """Numbers of which no two are near, so that small steps change no order."""
    numbers = 1 + np.random.default_rng(seed).permutation(2 * np.prod(SHAPE)) / 10
    return [jnp.asarray(part) for part in numbers.reshape(2, *SHAPE)]


STEP = 1e-3


@functools.cache
def measured(write, name):
    """The values, and the derivatives in both modes and by central differences, compiled once."""
    function = WRITES[name] if write else lambda x, _, i: READS[name](x, i)
    consistent = pg.consistent_indexing(function)

    @jax.jit
    def measure(x, u, i):
        flat = jnp.concatenate([x.ravel(), u.ravel()])
        at = lambda f: lambda flat: f(*flat.reshape(2, *SHAPE), i).ravel()
        central = jax.vmap(lambda e: (at(function)(flat + e) - at(function)(flat - e)) / (2 * STEP), out_axes=1)
        return (
            at(function)(flat),
            at(consistent)(flat),
            jax.jacrev(at(consistent))(flat),
            jax.jacfwd(at(consistent))(flat),
            central(STEP * jnp.eye(flat.size)),
        )

    return measure


def assert_consistent(write, name, i, seed):
    with jax.enable_x64(True):
        before, after, reverse, forward, central = measured(write, name)(*distinct(seed), jnp.asarray(i))
        np.testing.assert_array_equal(before, after)
        central = np.where(np.isnan(before)[:, None], 0.0, central)
        np.testing.assert_allclose(reverse, central, rtol=1e-4, atol=1e-8)
        np.testing.assert_allclose(forward, central, rtol=1e-4, atol=1e-8)


INDICES = st.tuples(st.integers(-7, 7), st.integers(-7, 7)) | st.tuples(*[st.integers(-(10**9), 10**9)] * 2)


@table("name", READS, most=20, kind=lambda name: "-" in name)
@settings(max_examples=6)
@given(INDICES, st.integers(0, 10**6))
def test_reads(name, i, seed):
    assert_consistent(False, name, i, seed)


@table("name", WRITES, most=20, kind=lambda name: name.endswith("unique"))
@settings(max_examples=6)
@given(INDICES, st.integers(0, 10**6))
def test_writes(name, i, seed):
    if name.endswith("unique") and len({min(max(j + 3 * (j < 0), 0), 2) for j in i}) < 2:
        # The promise would be broken, and the value undefined.
        i = (0, 7)
    assert_consistent(True, name, i, seed)


@pytest.mark.slow
def test_the_report(x64):
    """What jax#5760 reported, in the shapes in which it is still there."""
    x = jnp.arange(2.0)
    for read in (lambda x: x[jnp.array([x.shape[0]])].sum(), lambda x: x[jnp.argmax(x) + jnp.array([4])][0]):
        assert jax.grad(read)(x).tolist() == [0, 0]
        consistent = pg.consistent_indexing(read)
        assert consistent(x) == read(x) == 1
        for derivative in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
            gradient = derivative(consistent)(x)
            assert gradient.tolist() == [0, 1]
            assert gradient.dtype == x.dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_indices_of_every_dtype(dtype):
    """Every index reads and writes where its derivative says it does, the largest and the smallest too."""
    with jax.enable_x64(True):
        assert_every_index_agrees(dtype)


@pytest.mark.slow
def test_indices_of_eight_bits():
    """As a user's program is compiled: the kernels of conftest.py (JAX 0.10.2) compare the size, 300, in eight bits."""
    tests = str(pathlib.Path(__file__).parent)
    script = "import test_indexing; [test_indexing.assert_every_index_agrees(dtype) for dtype in ('int8', 'uint8')]"
    environment = {"PYTHONPATH": os.pathsep.join([tests, *sys.path]), "XLA_FLAGS": "", "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | environment, check=True)


def assert_every_index_agrees(dtype):
    limits = jnp.iinfo(dtype)
    i = np.array([limits.min, limits.min + 1, 0, 1, 100, limits.max - 1, limits.max], dtype)[:, None]
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    places = jnp.arange(300.0)

    def read(x, mode):
        return lax.gather(x, i, numbers, (1,), mode=mode)

    consistent = pg.consistent_indexing(functools.partial(read, mode="promise_in_bounds"))
    for run in (lambda f: f, jax.jit):
        found = run(consistent)(places)
        np.testing.assert_array_equal(found, run(functools.partial(read, mode="promise_in_bounds"))(places))
        weights = jnp.arange(1.0, 8.0)
        expected = np.zeros(300)
        np.add.at(expected, np.asarray(found, int), np.asarray(weights))
        np.testing.assert_array_equal(run(jax.grad(lambda x: weights @ consistent(x)))(places), expected)

    def write(x, u):
        return lax.scatter_max(x, i, u, lax.ScatterDimensionNumbers((), (0,), (0,)), mode="clip")

    updates = jnp.arange(1.0, 8.0)
    consistent = pg.consistent_indexing(write)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(run(consistent)(0 * places, updates), run(write)(0 * places, updates))
        reverse = run(jax.jacrev(consistent, 1))(0 * places, updates)
        np.testing.assert_array_equal(reverse, run(jax.jacfwd(consistent, 1))(0 * places, updates))
        np.testing.assert_allclose(reverse @ updates, write(0 * places, updates))


@pytest.mark.slow
def test_ties_keep_the_convention_of_jax(x64):
    x, u = jnp.array([1.0, 2.0, 2.0]), jnp.array([2.0, 2.0, 1.0, 3.0])
    inside, outside = jnp.array([2, 2, 0, 1]), jnp.array([5, 9, 0, 1])
    for method in ("max", "min"):
        write = lambda x, u, i, mode: getattr(x.at[i], method)(u, mode=mode)
        expected = jax.jacrev(write, (0, 1))(x, u, inside, "drop")
        for found in (jax.jacrev, jax.jacfwd):
            found = found(pg.consistent_indexing(lambda x, u: write(x, u, outside, "clip")), (0, 1))(x, u)
            jax.tree.map(np.testing.assert_allclose, found, expected)
