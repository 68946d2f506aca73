import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import PartitionSpec

import partgrad as pg
from helpers.messages import refused
from helpers.tables import table
from helpers.zoo import ZOO

MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
IN_PARTS = PartitionSpec("i")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@table("case", ZOO, most=9, kind=lambda case: case.category, ids=lambda case: f"{case.category}-{case.name}")
def test_zoo(case):
    x = jnp.asarray(case.x, float)
    f = pg.double_where(case.f)
    value, gradient = jax.value_and_grad(f)(x)
    transforms = [jax.grad(f), jax.jacfwd(f) if case.category in "SIP" else jax.grad(case.f)]
    compiled, other = jax.jit(lambda x: [transform(x) for transform in transforms])(x)
    if case.category in "SIP":
        close(gradient, case.expected)
        close(other, case.expected)
    elif case.category in "NV":
        assert not np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(np.isfinite(gradient), np.isfinite(other))
    else:
        close(gradient, other)
    close(compiled, gradient)
    np.testing.assert_array_equal(value, case.f(x))


# --- loops, branches and everything else that contains a program --------------------------------------------------------


class Case(NamedTuple):
    name: str
    f: Any
    x: Any
    expected: Any
    forward: bool = True


def shard(f, out):
    return jax.shard_map(f, mesh=MESH, in_specs=PartitionSpec("i"), out_specs=out)


def multiplied_and_gathered(part, shared):
    """A mask of what devices share is united in each step of the loop."""
    step = lambda c, _: (jnp.where(c > 0, c * lax.pcast(shared, "i", to="varying"), c), None)
    part, _ = lax.scan(step, part, None, length=2)
    return jnp.where(part > 0, lax.all_gather(part, "i", tiled=True)[:2], part)


def custom_jvp_sqrt(x):
    @jax.custom_jvp
    def f(x):
        return jnp.sqrt(x)

    f.defjvp(lambda p, t: (jnp.sqrt(p[0]), t[0] / (2 * jnp.sqrt(p[0]))))
    return f(x)


def custom_vjp_sqrt(x):
    f = jax.custom_vjp(jnp.sqrt)
    f.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, c: (c / (2 * jnp.sqrt(x)),))
    return f(x)


def ruled(function):
    f = jax.custom_vjp(function)
    f.defvjp(lambda x: jax.vjp(function, x), lambda pull, c: pull(c))
    return f


def clipped(clip):
    f = jax.custom_vjp(lambda x: 1.0 * x)
    f.defvjp(lambda x: (1.0 * x, None), lambda _, c: (clip(c),))
    return f


def counting_vjp(x):
    """A backward pass whose loop reads, at an index that a branch counts, what a case is selected by."""
    part = lambda r: jnp.where(r > 0, jnp.sqrt(r), r)
    f = jax.custom_vjp(part)

    def backward(kept, c):
        pull = lambda i, c: (i - 1, jax.vjp(part, lax.dynamic_index_in_dim(kept, i, keepdims=False))[1](c)[0])
        step = lambda carry: lax.cond(carry[0] >= 0, pull, lambda i, c: (i - 1, c), *carry)
        return (lax.while_loop(lambda carry: carry[0] >= 0, step, (0, c))[1],)

    f.defvjp(lambda x: (part(x), x[None]), backward)
    return f(x).sum()


log_if_positive = lambda v: jnp.where(v > 0, jnp.log(v), 0.0)
kept_sum = lambda keep, y: jnp.where(keep, y, 0.0).sum()
add_log = lambda c, v: (c + log_if_positive(v), None)

CASES = [
    Case("scan", lambda x: lax.scan(add_log, 0.0, x)[0], [0, 1, 2], [0, 1, 0.5]),
    Case(
        "a part without elements",
        lambda x: kept_sum(jnp.repeat(x > 0, 2), jnp.repeat(jnp.concatenate([jnp.log(x)[:0], jnp.sqrt(x)]), 2)),
        [0, 1, 4],
        [0, 1, 0.5],
    ),
    Case(
        "scan of no steps",
        lambda x: kept_sum(x > 0, jnp.sqrt(x)) + lax.scan(lambda c, v: (c * x * v, c), x, jnp.zeros(0))[0].sum(),
        [0, 1, 4],
        [1, 1.5, 1.25],
    ),
    Case(
        "scan of no steps, one carry of which is a number",
        lambda x: (
            kept_sum(x > 0, jnp.sqrt(x))
            + lax.scan(lambda c, v: ((c[0], c[1] * c[0] @ x), v), (x, 2.0), jnp.zeros(0))[0][1]
        ),
        [0, 1, 4],
        [0, 0.5, 0.25],
    ),
    Case(
        "scan of no steps, masked outside",
        lambda x: kept_sum(x > 0, lax.scan(lambda c, v: (c * jnp.log(x) * v, c), jnp.sqrt(x), jnp.zeros(0))[0]),
        [0, 1, 4],
        [0, 0.5, 0.25],
    ),
    Case(
        "scan that stacks, masked outside",
        lambda x: kept_sum(x > 0, lax.scan(lambda c, v: (c, jnp.sqrt(v)), 0.0, x)[1]),
        [0, 1, 4],
        [0, 0.5, 0.25],
    ),
    Case(
        "scan with a constant",
        lambda x: lax.scan(
            lambda c, m: (c + jnp.where(m & (x > 0), jnp.log(x), 0.0), None), 0 * x, np.array([True, False])
        )[0].sum(),
        [0, 1, 2],
        [0, 1, 0.5],
    ),
    Case(
        "scan with a counter in the carry",
        lambda x: lax.fori_loop(0, 3, lambda i, c: c + log_if_positive(x[i]), 0.0),
        [0, 1, 2],
        [0, 1, 0.5],
    ),
    Case(
        "scan in a scan, in reverse",
        lambda x: lax.scan(
            lambda c, v: (lax.scan(lambda d, w: (d + log_if_positive(w) * v, None), c, x)[0], None),
            0.0,
            np.array([1.0, 2.0]),
            reverse=True,
        )[0],
        [0, 1, 2],
        [0, 3, 1.5],
    ),
    Case(
        "scan, the carry decides",
        lambda x: lax.scan(lambda c, v: (jnp.where(c > 2, c, c * jnp.sqrt(v)), None), 3.0, x)[0],
        [0, 1],
        [0, 0],
    ),
    Case("unrolled scan", lambda x: lax.scan(add_log, 0.0, x, unroll=2)[0], [0, 1, 2], [0, 1, 0.5]),
    Case(
        "cond in a scan",
        lambda x: lax.scan(lambda c, v: (c + lax.cond(v > 0, jnp.log, jnp.zeros_like, v), None), 0.0, x)[0],
        [0, 1, 2],
        [0, 1, 0.5],
    ),
    Case(
        "cond in a scan, computed outside the cond",
        lambda x: lax.scan(
            lambda c, v: ((lambda y: c + lax.cond(v > 0, lambda: y, lambda: 0.0))(jnp.log(v)), None), 0.0, x
        )[0],
        [0, 1, 2],
        [0, 1, 0.5],
    ),
    Case("cond", lambda x: lax.cond(x[0] > 0, lambda y: y.sum(), lambda y: y[1], jnp.log(x)), [0, 2], [0, 0.5]),
    Case(
        "cond whose result is locally constant",
        lambda x: jnp.sqrt(lax.cond(x > 0, lambda x: x, lambda x: 0.0, x)),
        -1.0,
        0.0,
    ),
    Case(
        "switch",
        lambda x: lax.switch(jnp.argmax(x), [lambda y: y[0], lambda y: 2 * y[1], jnp.sum], 1 / x),
        [0, 2],
        [0, -0.5],
    ),
    Case(
        "cond under vmap",
        lambda x: jax.vmap(lambda v: (lambda y: lax.cond(v > 0, lambda: y, lambda: 0.0))(jnp.log(v)))(x).sum(),
        [0, 2],
        [0, 0.5],
    ),
    Case(
        "cond in a scan under vmap",
        lambda x: jax.vmap(
            lambda v: lax.scan(
                lambda c, w: ((lambda y: c + lax.cond(v > w, lambda: y, lambda: 0.0))(jnp.log(v)), None),
                0.0,
                np.array([0.0, 1.0]),
            )[0]
        )(x).sum(),
        [0, 2],
        [0, 1],
    ),
    Case("checkpoint", lambda x: jax.checkpoint(lambda x: jnp.sin(log_if_positive(x)))(x).sum(), [0, 1], [0, 1]),
    Case(
        "checkpoint, masked outside",
        lambda x: kept_sum(x > 0, jax.checkpoint(lambda x: jnp.sin(jnp.sqrt(x)))(x)),
        [0, 4],
        [0, np.cos(2) / 4],
    ),
    Case(
        "checkpoint in a scan",
        lambda x: lax.scan(jax.checkpoint(lambda c, v: (c + jnp.sin(log_if_positive(v)), None)), 0.0, x)[0],
        [0, 1],
        [0, 1],
    ),
    Case("jit", lambda x: jax.jit(lambda x: jax.jit(log_if_positive)(x).sum())(x), [0, 2], [0, 0.5]),
    Case("custom_jvp", lambda x: kept_sum(x > 0, custom_jvp_sqrt(x)), [0, 4], [0, 0.25]),
    Case("custom_vjp", lambda x: kept_sum(x > 0, custom_vjp_sqrt(x)), [0, 4], [0, 0.25]),
    Case(
        "custom_vjp that is not linear",
        lambda x: kept_sum(x > 0, 3 * clipped(lambda c: jnp.clip(c, -0.1, 0.1))(jnp.sqrt(x))),
        [0, 4],
        [0, 0.025],
        forward=False,
    ),
    Case(
        "custom_vjp that clips the norm",
        lambda x: kept_sum(x > 0, 3 * clipped(lambda c: c * jnp.minimum(1, 0.1 / jnp.linalg.norm(c)))(jnp.sqrt(x))),
        [0, 4],
        [0, 0.025],
        forward=False,
    ),
    Case(
        "shard_map",
        lambda x: shard(lambda x: lax.psum(log_if_positive(x).sum(), "i"), PartitionSpec())(x),
        [0, 2],
        [0, 0.5],
    ),
    Case(
        "shard_map, masked outside", lambda x: kept_sum(x > 0, shard(jnp.log, PartitionSpec("i"))(x)), [0, 2], [0, 0.5]
    ),
    Case(
        "scan in a shard_map",
        lambda x: shard(
            lambda x: lax.psum(lax.scan(add_log, lax.pcast(0.0, ("i",), to="varying"), x)[0], "i"), PartitionSpec()
        )(x),
        [0, 2],
        [0, 0.5],
    ),
    # linear algebra, one problem of the batch being singular
    Case(
        "solve",
        lambda x: kept_sum(x[:, None] > 0, jnp.linalg.solve(np.eye(2) * x[:, None, None], np.ones((2, 2, 1)))[..., 0]),
        [0, 2],
        [0, -0.5],
    ),
    Case(
        "solve under vmap",
        lambda x: kept_sum(x > 0, jax.vmap(lambda v: jnp.linalg.solve(np.eye(2) * v, np.ones(2)).sum())(x)),
        [0, 2],
        [0, -0.5],
    ),
    Case(
        "cholesky",
        lambda x: kept_sum(x[:, None, None] > 0, jnp.linalg.cholesky(np.eye(2) * x[:, None, None])),
        [0, 4],
        [0, 0.5],
    ),
    Case(
        "inv", lambda x: kept_sum(x[:, None, None] > 0, jnp.linalg.inv(np.eye(2) * x[:, None, None])), [0, 2], [0, -0.5]
    ),
    Case("slogdet", lambda x: kept_sum(x > 0, jnp.linalg.slogdet(np.eye(2) * x[:, None, None])[1]), [0, 2], [0, 1]),
    Case(
        "eigvalsh",
        lambda x: kept_sum(x > 0, jnp.linalg.eigvalsh(np.diag([1.0, 2.0]) * jnp.log(x)[:, None, None]).sum(-1)),
        [0, 2],
        [0, 1.5],
    ),
    Case(
        "svd",
        lambda x: kept_sum(
            x > 0, jnp.linalg.svd(np.diag([1.0, 2.0]) * jnp.sqrt(x)[:, None, None], compute_uv=False).sum(-1)
        ),
        [0, 4],
        [0, 0.75],
    ),
    Case(
        "solve with assume_a",
        lambda x: jax.vmap(
            lambda v: jnp.where(v > 0, jax.scipy.linalg.solve(np.eye(2) * v, np.ones(2), assume_a="pos")[0], 0.0)
        )(x).sum(),
        [0, 2],
        [0, -0.25],
    ),
    Case(
        "triangular_solve in a scan",
        lambda x: lax.scan(
            lambda c, keep: (
                c
                + jnp.where(
                    keep, jax.scipy.linalg.solve_triangular(x[0] * jnp.eye(2), x[1:] * c, lower=True).sum(), 0.0
                ),
                None,
            ),
            1.0,
            np.array([True, False]),
        )[0],
        [2, 3, 4],
        [-1.75, 0.5, 0.5],
    ),
    Case(
        "custom_vjp in a checkpoint",
        lambda x: jax.checkpoint(lambda x: kept_sum(x > 0, custom_vjp_sqrt(x)))(x),
        [0, 4],
        [0, 0.25],
    ),
    Case(
        "custom_vjp in a cond, whose residual multiplies and divides",
        lambda x: lax.cond(x[1] > 0, ruled(lambda x: x @ x + kept_sum(x > 0, x * jnp.log(x))), jnp.sum, x),
        [0, 4],
        [0, 9 + np.log(4)],
    ),
    Case(
        "what one case of a loop divides by, and the other multiplies with",
        lambda x: lax.scan(
            lambda c, _: ((c[0], jnp.where(c[0] > 0, jnp.log(c[0]) * c[1], c[0] * c[1])), None),
            (x, jnp.cos(x)),
            None,
            length=1,
        )[0][1].sum(),
        [0, 4],
        [1, np.cos(4) / 4 - np.log(4) * np.sin(4)],
    ),
    Case(
        "double_where in a cond in a shard_map",
        lambda x: shard(
            lambda part: lax.cond(part[1] > 0, pg.double_where(lambda y: jnp.maximum(y, x)), jnp.sin, part) ** 2,
            IN_PARTS,
        )(x).sum(),
        [0, 4],
        [0, 8],
    ),
    Case(
        "double_where of a loop in a shard_map",
        lambda x: jax.shard_map(
            pg.double_where(multiplied_and_gathered),
            mesh=MESH,
            in_specs=(IN_PARTS, PartitionSpec()),
            out_specs=IN_PARTS,
        )(x, jnp.sqrt(x[1])).sum(),
        [0, 1],
        [1, 2],
    ),
    Case("custom_vjp that counts", counting_vjp, [0, 4], [1, 0.25], forward=False),
    Case(
        "subtract out of bounds",
        lambda x: jnp.zeros(2).at[np.array([7, 1])].subtract(jnp.sqrt(x), mode="drop").sum(),
        [0, 4],
        [0, -0.25],
    ),
    Case(
        "multiply",
        lambda x: kept_sum(
            x > 0, jnp.log(x).at[np.array([0, 1])].multiply(np.array([np.inf, 2.0]), unique_indices=True)
        ),
        [0, 1, 2],
        [0, 2, 0.5],
    ),
    Case(
        "custom_vjp that clips large cotangents",
        lambda x: kept_sum(x > 0, 3 * clipped(lambda c: jnp.where(jnp.abs(c) > 1, jnp.sign(c), c))(jnp.sqrt(x))),
        [0, 4],
        [0, 0.25],
        forward=False,
    ),
    Case(
        "convolve in a shard_map",
        lambda x: shard(lambda x: jnp.where(x > 0, jnp.convolve(jnp.log(x), np.ones(1)), 0.0), IN_PARTS)(x).sum(),
        [0, 4],
        [0, 0.25],
    ),
    Case(
        "custom_vjp that clips in a shard_map",
        lambda x: shard(lambda x: jnp.where(x > 0, clipped(lambda c: jnp.clip(c, -1, 1))(jnp.sqrt(x)), 0.0), IN_PARTS)(
            x
        ).sum(),
        [0, 4],
        [0, 0.25],
        forward=False,
    ),
    Case(
        "custom_vjp that divides by the norm",
        lambda x: kept_sum(x > 0, 3 * clipped(lambda c: c / jnp.maximum(1.0, jnp.linalg.norm(c)))(jnp.sqrt(x))),
        [0, 4],
        [0, 0.25],
        forward=False,
    ),
    Case(
        "triangular_solve",
        lambda x: kept_sum(
            x[:, None] > 0, jax.scipy.linalg.solve_triangular(np.eye(2) * x[:, None, None], np.ones((2, 2, 1)))[..., 0]
        ),
        [0, 2],
        [0, -0.5],
    ),
    Case("fft", lambda x: kept_sum(x[:, :1] > 0, jnp.fft.fft(jnp.log(x)).real), [[0, 0], [2, 3]], [[0, 0], [1, 0]]),
    # products
    Case(
        "dot with padded data",
        lambda w: kept_sum(np.array([True, False]), np.array([[1, 2], [np.nan, np.nan]]) @ w),
        [3, 4],
        [1, 2],
    ),
    Case(
        "batched dot",
        lambda x: kept_sum(x[:, :1] > 0, jnp.einsum("bi,bi->b", jnp.log(x), np.ones((2, 2)))[:, None]),
        [[0, 0], [2, 4]],
        [[0, 0], [0.5, 0.25]],
    ),
    Case("convolve", lambda x: jnp.convolve(jnp.log(x), np.ones(2), mode="valid")[1:].sum(), [0, 1, 2], [0, 1, 0.5]),
    Case(
        "convolve with padded data",
        lambda w: jnp.convolve(np.array([1, 2, np.nan]), w, mode="valid")[:1].sum(),
        [3, 4],
        [2, 1],
    ),
    # moves
    Case(
        "max pooling",
        lambda x: lax.reduce_window(jnp.sqrt(x), -jnp.inf, lax.max, (2,), (2,), "VALID").sum(),
        [0, 4, 1, 0],
        [0, 0.25, 0.5, 0],
    ),
    Case(
        "mean pooling",
        lambda x: lax.reduce_window(jnp.sqrt(x), 0.0, lax.add, (2,), (2,), "VALID")[1],
        [0, 4, 1, 4],
        [0, 0, 0.5, 0.25],
    ),
    Case("sort", lambda x: jnp.sort(jnp.sqrt(x))[1:].sum(), [4, 0, 1], [0.25, 0, 0.5]),
    Case("top_k", lambda x: lax.top_k(jnp.sqrt(x), 2)[0].sum(), [4, 0, 1], [0.25, 0, 0.5]),
    Case("set", lambda x: jnp.log(x).at[np.array([0, 0])].set(np.array([3.0, 4.0])).sum(), [0, 2], [0, 0.5]),
    Case(
        "set, the last one wins",
        lambda x: jnp.zeros(3).at[np.array([0, 1, 1])].set(jnp.sqrt(x)).sum(),
        [1, 0, 4],
        [0.5, 0, 0.25],
    ),
    Case("add out of bounds", lambda x: jnp.zeros(2).at[np.array([0, 5])].add(jnp.sqrt(x)).sum(), [1, 0], [0.5, 0]),
    Case(
        "get out of bounds, then a singular function",
        lambda x: jnp.log(x.at[np.array([0, 5])].get(mode="fill", fill_value=0.0))[0],
        [1, 0],
        [1, 0],
    ),
    Case(
        "take_along_axis",
        lambda x: jnp.take_along_axis(jnp.sqrt(x), np.array([[1], [0]]), 1).sum(),
        [[0, 1], [4, 0]],
        [[0, 0.5], [0.25, 0]],
    ),
    Case(
        "segment_max",
        lambda x: jax.ops.segment_max(jnp.sqrt(x), np.array([0, 0, 1]), 2).sum(),
        [0, 4, 1],
        [0, 0.25, 0.5],
    ),
    Case(
        "segment_sum with an empty segment",
        lambda x: kept_sum(np.array([True, False]), jnp.log(jax.ops.segment_sum(x, np.array([0, 0]), 2))),
        [1, 1],
        [0.5, 0.5],
    ),
    Case("split", lambda x: jnp.split(jnp.sqrt(x), 2)[1].sum(), [0, 4], [0, 0.25]),
    Case("pad", lambda x: lax.pad(jnp.sqrt(x), 0.0, [(-1, 2, 0)]).sum(), [0, 4], [0, 0.25]),
    Case("cumsum", lambda x: jnp.cumsum(jnp.sqrt(x))[0], [4, 0], [0.25, 0]),
    Case("cummin", lambda x: lax.cummin(jnp.sqrt(x))[1], [1, 4, 0], [0.5, 0, 0]),
    Case("cumprod", lambda x: lax.cumprod(jnp.sqrt(x))[0], [4, 0], [0.25, 0]),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(jnp.log(x))[0], [4, 0], [0.25, 0]),
    Case("optimization_barrier", lambda x: lax.optimization_barrier(jnp.sqrt(x))[1], [0, 4], [0, 0.25]),
    Case("a barrier, unused", lambda x: lax.optimization_barrier((jnp.log(x), x))[1].sum(), [0, 4], [1, 1]),
    Case(
        "a barrier, mixed",
        lambda x: sum(lax.optimization_barrier((kept_sum(x > 0, jnp.log(x)), jnp.sqrt(x), x.sum()))[::2]),
        [0, 4],
        [1, 1.25],
    ),
    Case("complex", lambda x: kept_sum(x > 0, jnp.abs(jnp.sqrt(x + 0j))), [0, 4], [0, 0.25]),
    Case(
        "float32 inside", lambda x: kept_sum(x > 0, jnp.sqrt(x.astype(jnp.float32)).astype(x.dtype)), [0, 4], [0, 0.25]
    ),
    Case("relu", lambda x: jnp.sqrt(jax.nn.relu(x)).sum(), [-1, 4], [0, 0.25]),
    # the classics
    Case(
        "norm",
        lambda x: kept_sum((x**2).sum(1) > 0, jnp.linalg.norm(x, axis=1)),
        [[0, 0], [3, 4]],
        [[0, 0], [0.6, 0.8]],
    ),
    Case(
        "distances without the diagonal",
        lambda x: kept_sum(~np.eye(2, dtype=bool), jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))),
        [[0, 0], [3, 4]],
        [[-1.2, -1.6], [1.2, 1.6]],
    ),
    Case(
        "softmax with a row that is all masked",
        lambda x: kept_sum(
            np.array([[True], [False]]),
            jax.nn.softmax(jnp.where(np.array([[True, True], [False, False]]), x, -jnp.inf)) * np.array([1.0, 0]),
        ),
        [[0, 0], [0, 0]],
        [[0.25, -0.25], [0, 0]],
    ),
]


@table("case", CASES, quick=3, most=50, ids=lambda case: case.name)
def test_cases(case):
    x, f = jnp.asarray(case.x, float), pg.double_where(case.f)
    value, gradient = jax.value_and_grad(f)(x)
    np.testing.assert_array_equal(value, case.f(x))
    close(gradient, case.expected)
    if not case.forward:
        return
    modes = (jax.jacfwd(f), jax.jacfwd(jax.grad(f)), jax.jacrev(jax.grad(f)))
    forward, forward_over_reverse, reverse_over_reverse = jax.jit(lambda x: [mode(x) for mode in modes])(x)
    close(forward, case.expected)
    assert np.all(np.isfinite(forward_over_reverse))
    close(reverse_over_reverse, forward_over_reverse)


@table("case", CASES, most=8, ids=lambda case: case.name)
def test_vmap_inside_and_outside(case):
    x, f = jnp.asarray(case.x, float), pg.double_where(case.f)
    both = jnp.stack([x, x])
    if "shard_map" not in case.name:
        summed = lambda f: lambda x: jax.vmap(f)(x).sum()
        outside = [jax.vmap(jax.grad(f)), jax.grad(summed(f)), jax.grad(pg.double_where(summed(case.f)))]
        for gradient in jax.jit(lambda both: [transform(both) for transform in outside])(both):
            close(gradient, [case.expected] * 2)
    close(jax.grad(jax.checkpoint(jax.jit(pg.double_where(f))))(x), case.expected)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (lambda x: jnp.sqrt(x) ** 2, 0.0),
        (lambda x: 0.0 * jnp.log(x), 0.0),
        (lambda x: jnp.where(x >= 0, jnp.sqrt(x), 0.0), 0.0),
        (lambda x: lax.cond(x >= 0, jnp.sqrt, jnp.zeros_like, x), 0.0),
        (lambda x: lax.scan(lambda c, _: (c * jnp.sqrt(x), None), 0.0, None, length=2)[0], 0.0),
        (lambda x: jnp.max(jnp.stack([jnp.sqrt(x), x])), 0.0),
    ],
)
def test_a_number_that_is_zero_is_no_selection(f, x):
    assert not np.isfinite(jax.grad(pg.double_where(f))(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max", "min", "reduce", "clip", "scatter", "cummax", "pool", "abs", "sort"])
def test_ties_are_shared_as_jax_shares_them(name):
    functions = {
        "max": lambda x: jnp.maximum(x[0], x[1]) * 3,
        "min": lambda x: jnp.minimum(x, x[::-1]) @ np.arange(3.0),
        "reduce": lambda x: jnp.max(x) + 2 * jnp.min(x),
        "clip": lambda x: jnp.clip(x, 1.0, 1.0) @ np.arange(3.0),
        "scatter": lambda x: x.at[np.array([0, 1, 1])].max(x[::-1]) @ np.arange(1, 4.0),
        "cummax": lambda x: lax.cummax(x) @ np.arange(1, 4.0),
        "pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME") @ np.arange(1, 4.0),
        "abs": lambda x: jnp.abs(x - 1).sum(),
        "sort": lambda x: jnp.sort(x) @ np.arange(3.0),
    }
    f, x = functions[name], jnp.array([1.0, 1.0, 1.0])
    modes = (jax.grad(pg.double_where(f)), jax.grad(f), jax.jacfwd(pg.double_where(f)), jax.jacfwd(f))
    reverse, expected, forward, expected_forward = jax.jit(lambda x: [mode(x) for mode in modes])(x)
    close(reverse, expected)
    close(forward, expected_forward)


def test_a_zero_the_user_makes_of_nothing_stays():
    f = jax.custom_vjp(lambda x: 1.0 * x)
    f.defvjp(lambda x: (1.0 * x, None), lambda _, c: (c + 1,))
    loss = lambda x: kept_sum(np.array([True, False]), f(x * np.array([2.0, 3.0])))
    close(jax.grad(pg.double_where(loss))(jnp.ones(2)), jax.grad(loss)(jnp.ones(2)))


def test_a_constant_part_of_a_backward_pass_stays():
    f = jax.custom_vjp(lambda y, aux: y)
    f.defvjp(lambda y, aux: (y, None), lambda _, c: (c, jnp.ones(())))
    assert jax.grad(pg.double_where(lambda x: f(2 * x, x**2)))(3.0) == 8


def set_first(c):
    reference = jax.new_ref(3.0 * c)
    reference[0] = jnp.sin(c[0])
    return reference[...]


BACKWARD = {
    "across devices": shard(jnp.cos, IN_PARTS),
    "a norm across devices": shard(lambda c: c * lax.rsqrt(1.0 + lax.psum(c @ c, "i")), IN_PARTS),
    "an exponential": lambda c: jnp.exp(-c),
    "a product of cotangents": lambda c: (c * (1 + c)) @ jnp.diag(c),
    "a quotient": lambda c: c / (1.0 + c) + 1.0 / (1.0 + c),
    "a factor of another's": lambda c: c * (1.0 + c[::-1]),
    "a quotient by another's": lambda c: (1.0 + c) / (2.0 + c[::-1]) - 0.5,
    "a sum of products of cotangents": lambda c: c * jnp.sum(c @ jnp.diag(c)),
    "a read where it says": lambda c: c[jnp.argsort(c)] * jnp.array([2.0, 3.0]),
    "a loop until": lambda c: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, c))[1],
    "a checkpoint": jax.checkpoint(lambda c: jnp.clip(c * jnp.array([2.0, 3.0]), -9.0, 8.0)),
    "a solve": lambda c: lax.custom_linear_solve(lambda v: (1 + c * c) * v, c, lambda _, b: b / (1 + c * c)),
    "a mutable reference": set_first,
    "a loop that counts": lambda c: lax.fori_loop(0, 2, lambda i, c: c * jnp.array([2.0, 3.0])[i], c),
    "a read that fills": lambda c: c.at[jnp.array([0, 9])].get(mode="fill", fill_value=1.0) * jnp.array([2.0, 3.0]),
    "a factor by index": lambda c: np.ones(2) * lax.stop_gradient(c).at[:1].multiply(c[:1], unique_indices=True),
}


@pytest.mark.slow
def test_a_backward_pass_is_jaxs():
    """Most of these are not linear. Also what they make of the zeros that they are given where nothing is selected.

    The sine before them has another derivative wherever that is taken to be dead.
    """
    passed = {name: clipped(backward) for name, backward in BACKWARD.items()}
    f = lambda x: sum(jnp.where(x[name] > 0, 3.0 * passed[name](jnp.sin(x[name])), x[name]).sum() for name in passed)
    points = dict.fromkeys(passed, np.array([[-1.0, -2.0], [-1.0, 2.0], [2.0, -1.0]]))
    found, expected = (jax.jit(jax.vmap(jax.grad(g)))(points) for g in (pg.double_where(f), f))
    jax.tree.map(close, found, expected)


LINEAR_PASSES = {
    "product": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "shard_map": lambda f: shard(f, IN_PARTS),
    "branch": lambda f: lambda r, c: lax.cond(r[1] > 0, f, lambda r, c: c, r, c),
    "switch in a loop": lambda f: (
        lambda r, c: lax.fori_loop(0, 2, lambda i, c: lax.switch(i, [lambda c: c, lambda c: f(r, c)], c), c)
    ),
    "loop": lambda f: lambda r, c: lax.scan(lambda c, k: (k * c, None), c, jnp.stack([3.0 * r, r]))[0],
    "loop that sums": lambda f: lambda r, c: lax.scan(lambda s, k: (s + k * f(r, c), None), 0 * r, jnp.full(2, 0.5))[0],
    "loop over elements": lambda f: lambda r, c: lax.map(lambda rc: f(*rc), (r, c)),
    "checkpoint of a loop": lambda f: jax.checkpoint(lambda r, c: lax.map(lambda rc: f(*rc), (r, c))),
    "loop of a checkpoint": lambda f: lambda r, c: lax.map(lambda rc: jax.checkpoint(f)(*rc), (r, c)),
    "read": lambda f: lambda r, c: f(r[::-1], jnp.flip(c))[jnp.array([1, 0])],
    "write": lambda f: lambda r, c: jnp.zeros_like(c).at[jnp.array([1, 0])].add(f(r, c)[::-1]),
    "slice": lambda f: lambda r, c: lax.dynamic_update_slice(0 * c, lax.dynamic_slice(f(r, c), (0,), (2,)), (0,)),
    "parts": lambda f: lambda r, c: shard(lambda c: lax.psum(c, "i"), IN_PARTS)(f(r, c)),
    "complex": lambda f: lambda r, c: lax.complex(f(r, c), 0 * c).real,
}


@table("name", LINEAR_PASSES, quick=2)
def test_no_nan_goes_back_through_a_linear_backward_pass(name):
    """The selection comes after the rule and the root before it, so the masks go back through the pass."""
    cube = jax.custom_vjp(lambda r: r**3)
    cube.defvjp(lambda r: (r**3, r), lambda r, c: (LINEAR_PASSES[name](lambda r, c: 3.0 * r**2 * c)(r, c),))
    f = pg.double_where(lambda x: jnp.where(x > 0, cube(jnp.sqrt(x)), x).sum())
    x = np.array([0.0, 4.0])
    every = jax.jit(lambda x: (jax.grad(f)(x), jax.jacrev(jax.grad(f))(x), jax.jacfwd(f)(x), jax.hessian(f)(x)))
    gradient, curvature, forward, hessian = every(x)
    for found in gradient, forward:
        close(found, [1.0, 3.0])
    for found in curvature, hessian:
        close(found, np.diag([0.0, 0.375]))


def test_a_backward_pass_of_two_results_of_which_one_is_used_outside():
    both = jax.custom_vjp(lambda x: (1.0 * x, 2.0 * x))
    both.defvjp(lambda x: ((1.0 * x, 2.0 * x), None), lambda _, c: (jnp.clip(c[0], -0.5, 0.5) + c[1],))
    f = pg.double_where(lambda x: jax.tree.map(lambda y: jnp.where(x > 0, y, x), both(jnp.sqrt(x))))
    close([jax.grad(lambda x: f(x)[number].sum())(np.array([0.0, 4.0])) for number in (0, 1)], [[1, 0.125], [1, 0.25]])


def outer(r, c):
    return (r[:, None] * c[None] * c[:, None]).sum(0)


# What a pass returns where it is given zeros; each is zero at r == 0, and its derivative by r is not.
ADDED = {
    "what it knows": lambda r, c: 2.0 * r,
    "sum": lambda r, c: c + r,
    "choice": lambda r, c: jnp.where(c > 9.0, c, r),
    "choice by cotangent": lambda r, c: jnp.where(c > 0.3, r * c, c + r),
    "write": lambda r, c: c.at[1].set(r[1]),
    "scaled write": lambda r, c: jnp.full(2, 4.0).at[:].multiply(r, unique_indices=True) * jnp.exp(-c),
    "quotient": lambda r, c: r / (1.0 + c),
    "bound": lambda r, c: jnp.maximum(jnp.clip(c, -9.0, 9.0), r),
    "nested rule": lambda r, c: jnp.maximum(jax.nn.relu(c) + r, r),
    "branch": lambda r, c: lax.cond(c[0] > 0, lambda: c + r, lambda: c * r),
    "branches": lambda r, c: lax.cond(r[0] < 9.0, outer, lambda r, c: 2.0 * outer(r, c), r, c) + outer(c, r),
}


@pytest.mark.slow
@table("name", ADDED, quick=2)
def test_what_a_backward_pass_adds_has_its_derivative(name):
    """It goes through the slope of what comes before, where the number itself is zero."""
    rule = jax.custom_vjp(lambda r: r**2)
    rule.defvjp(lambda r: (r**2, r), lambda r, c: (ADDED[name](r, c),))
    f = lambda x: jnp.where(x > np.array([-1.0, 1.0]), rule(x * (x + 3.0)), x).sum()
    every = lambda f: lambda x: (jax.grad(f)(x), jax.jacfwd(jax.grad(f))(x), jax.jacrev(jax.grad(f))(x))
    for x in np.zeros(2), np.array([0.3, -0.2]):
        jax.tree.map(close, jax.jit(every(pg.double_where(f)))(x), jax.jit(every(f))(x))


def test_a_backward_pass_with_a_rule_in_it_that_has_no_forward_mode():
    scaled, f = ruled(lambda c, x: jnp.sin(c) * x), jax.custom_vjp(lambda x: 1.0 * x)
    f.defvjp(lambda x: (1.0 * x, x), lambda x, c: (scaled(c, x),))
    loss, x = lambda x: jnp.where(x > 0, f(jnp.exp(x)), x).sum(), np.array([-1.0, 2.0])
    close(jax.grad(pg.double_where(loss))(x), jax.grad(loss)(x))


def with_rule(cotangent):
    def of(f):
        rule = jax.custom_vjp(f)
        rule.defvjp(lambda *operands: jax.vjp(f, *operands), lambda pull, c: pull(cotangent(c)))
        return rule

    return of


UNITS = {
    "checkpoint": jax.checkpoint,
    "loop in a checkpoint": lambda f: jax.checkpoint(
        lambda r, x: lax.scan(lambda c, _: (c + f(r, x), None), 0.0 * x, None, length=1)[0]
    ),
    "shard_map": lambda f: shard(f, IN_PARTS),
    "linear backward pass": with_rule(lambda c: c),
    "backward pass that clips": with_rule(lambda c: jnp.clip(c, -9.0, 9.0)),
}


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_unit_does_not_need_is_not_differentiated_a_second_time(unit):
    """The unit sends back exact zeros for the roots that it does not select, and their derivatives are infinite."""
    inside = UNITS[unit](lambda r, x: jnp.where(x > 0, jnp.unstack(jnp.stack([r, x]))[0] ** 3, x**2))
    f = pg.double_where(lambda x: inside(jnp.sqrt(x), x).sum())
    close(jax.jit(jax.jacrev(jax.grad(f)))(np.array([0.0, 1.0])), np.diag([2.0, 0.75]))


@pytest.mark.slow
@pytest.mark.parametrize("solve", ["solve", "inv", "positive", "masked", "likelihood"])
def test_second_derivatives_of_linear_solves(solve):
    y = jnp.array([1.0, 2.0])
    matrix = lambda p: jnp.exp(p[0]) * jnp.array([[2.0, 0.5], [0.3, 1.0]]) + jnp.exp(p[1]) * jnp.eye(2)
    symmetric = lambda p: matrix(p) + matrix(p).T
    f = {
        "solve": lambda p: jnp.linalg.solve(matrix(p), y)[0],
        "inv": lambda p: jnp.linalg.inv(matrix(p))[0, 0],
        "positive": lambda p: jax.scipy.linalg.solve(symmetric(p), y, assume_a="pos")[0],
        "masked": lambda p: jnp.where(np.array([True, False]), jnp.linalg.solve(matrix(p), y), 0.0).sum(),
        "likelihood": lambda p: 0.5 * y @ jnp.linalg.solve(symmetric(p), y) + 0.5 * jnp.linalg.slogdet(symmetric(p))[1],
    }[solve]
    p = jnp.array([0.1, 0.2])
    ours = pg.double_where(f)
    modes = (jax.hessian(ours), jax.jacrev(jax.grad(ours)), jax.hessian(f))
    forward_over_reverse, reverse_over_reverse, expected = jax.jit(lambda p: [mode(p) for mode in modes])(p)
    close(forward_over_reverse, expected)
    close(reverse_over_reverse, expected)


@pytest.mark.slow
def test_solvers_that_are_loops_are_transposed_as_the_user_says():
    a = jnp.array([[2.0, 1.0], [0.5, 3.0]])
    iterate = lambda mv, b: lax.fori_loop(0, 3, lambda i, x: x + 0.3 * (b - mv(x)), jnp.zeros_like(b))
    exact = lambda mv, b: jnp.linalg.inv(a.T) @ b
    solve = lambda b: lax.custom_linear_solve(lambda v: a @ v, b, iterate, transpose_solve=exact)
    b = jnp.array([1.0, -1.0])
    for f in (
        lambda b: solve(b)[0],
        lambda b: jnp.where(b > 0, solve(b), 1.0).sum(),
        lambda b: jax.scipy.sparse.linalg.cg(lambda v: (a + a.T) @ v, b)[0].sum(),
    ):
        close(jax.grad(pg.double_where(f))(b), jax.grad(f)(b))


def test_a_loop_that_is_not_selected_comes_to_an_end():
    def f(x):
        return jnp.where(x > 10, lax.while_loop(lambda c: c > 0.5, lambda c: c * c, x), 2 * x)

    close(jax.jvp(pg.double_where(f), (0.9,), (1.0,)), (1.8, 2.0))


def on_explicit_axes(x):
    """Selections whose masks go through what a mesh of explicit axes is particular about."""
    rows, columns = (lambda y: jax.sharding.reshard(y, PartitionSpec("i", None))), PartitionSpec(None, "j")
    kept = lambda y: jnp.where(y > 0, jnp.log(y), 0.0)
    product = jnp.einsum("ki,kj->ij", kept(x), rows(kept(x)), out_sharding=columns)
    flat = lax.reshape(kept(x), (x.size,), out_sharding=PartitionSpec("i"))
    scanned = lax.scan(lambda c, _: (kept(c) + 1.0, kept(c)), x, None, length=2)[1]
    chosen = lax.cond(x[0, 0] > 5, lambda x: kept(x), lambda x: jnp.sqrt(kept(x) + x), x)
    mapped = jax.shard_map(kept, in_specs=PartitionSpec("i", "j"), out_specs=PartitionSpec("i", "j"))(x)
    parts = kept(product), kept(flat), scanned, chosen, mapped, jnp.max(kept(x), 0), jax.checkpoint(kept)(x)
    return sum(part.sum() for part in parts) + jnp.where(jnp.arange(2) > 0, kept(x).T, 0.0).sum()


def test_a_primitive_with_parameters_that_have_no_hash():
    """JAX cannot compile it, and runs it outside of `jit`."""
    scale = Primitive("scale")
    scale.def_impl(lambda x, options: x * options["by"])
    scale.def_abstract_eval(lambda x, options: x)
    ad.deflinear2(scale, lambda cotangent, x, options: [scale.bind(cotangent, options=options)])
    f = lambda x: scale.bind(jnp.where(x > 0, jnp.sqrt(x), x), options={"by": 2.0})
    try:
        assert jax.grad(pg.double_where(f))(0.0) == 2
        assert jax.grad(pg.double_where(f))(4.0) == 0.5
    finally:
        # Another test asks which primitives have derivatives.
        del ad.primitive_jvps[scale], ad.primitive_transposes[scale]


@pytest.mark.slow
def test_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((1, 1), ("i", "j"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    regular, singular = np.array([[1.5, 2.0], [3.0, 4.0]]), np.array([[1.5, 0.0], [3.0, 4.0]])
    with jax.set_mesh(mesh):
        plain, gradient = (jax.jit(jax.grad(f)) for f in (on_explicit_axes, pg.double_where(on_explicit_axes)))
        place = lambda x: jax.device_put(x, PartitionSpec("i", "j"))
        close(gradient(place(regular)), plain(place(regular)))
        found, slope = gradient(place(singular)), np.ones_like(regular)
        assert np.isfinite(found).sum() == 3, "only chosen's square root of zero has no derivative"
        for_each = lambda x, slope: [
            jax.jvp(jax.grad(f), (x,), (slope,))[1] for f in (pg.double_where(on_explicit_axes), on_explicit_axes)
        ]
        close(*jax.jit(for_each)(place(regular), place(slope)))


@pytest.mark.slow
def test_a_loop_with_a_counter_differentiated_inside():
    def loops(x, is_by_hand):
        safe = jnp.where(x > 0, x, 1.0) if is_by_hand else x
        inner = lambda c: lax.fori_loop(0, 2, lambda i, d: jnp.where(x > 0, d * jnp.sin(x[i]) * jnp.log(safe), d), c)
        return lax.scan(lambda c, _: (inner(c), None), x, length=2)[0].sum()

    slopes = lambda f: lambda x: (jax.grad(f)(x) ** 2).sum()
    inner, by_hand = pg.double_where(lambda x: loops(x, False)), lambda x: loops(x, True)
    x = np.array([0.0, 0.5, 2.0])
    close(jax.jit(jax.grad(pg.double_where(slopes(inner))))(x), jax.jit(jax.grad(slopes(by_hand)))(x))


def test_tokens_have_no_derivative():
    def f(x, token):
        lax.after_all(token)
        return jnp.sin(x)

    token = lax.create_token()
    close(jax.grad(pg.double_where(lambda x: f(x, token)))(0.5), np.cos(0.5))
    inside = lambda x, token: jax.grad(pg.double_where(lambda x: f(x, token)))(x)
    close(jax.jit(lambda x: inside(x, lax.create_token()))(0.5), np.cos(0.5))


def test_a_callback_sees_values():
    seen = []

    def f(x):
        jax.debug.callback(seen.append, x * x)
        return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()

    close(jax.grad(pg.double_where(f))(np.array([0.0, 4.0])), [0, 0.25])
    jax.effects_barrier()
    close(seen, [[0, 16]])


def test_each_platform_compiles_its_branch():
    loop = lambda x: lax.scan(lambda c, v: (c + jax.nn.relu(v) ** 2, None), 0.0, x)[0]
    f = lambda x: jnp.sin(lax.platform_dependent(x, cpu=lambda x: jnp.dot(jax.nn.relu(x), x), default=loop))
    x = np.array([1.0, -2.0, 3.0])
    gradient = jax.jit(jax.grad(pg.double_where(f)))
    close(gradient(x), np.cos(10.0) * 2 * np.array([1, 0, 3]))
    assert "while(" not in gradient.lower(x).as_text("hlo")


def root_where_positive(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0)


def makes(x, reference):
    own = jax.new_ref(x * 1.0)
    own[...] = root_where_positive(own[...])
    return (own[...] * reference[...]).sum()


def makes_in_a_loop(x, reference):
    def step(carry, v):
        own = jax.new_ref(carry)
        own[...] += root_where_positive(v)
        return own[...], None

    return lax.scan(step, 0.0, x * reference[...] ** 2)[0]


def adds_in_a_loop(x, reference):
    own = jax.new_ref(jnp.zeros_like(x))

    def step(i, _):
        own[...] += reference[...] * root_where_positive(x) * i

    lax.fori_loop(0, 2, step, None)
    return own[...].sum()


def writes(x, reference):
    weights = reference[...]
    roots = root_where_positive(x)
    reference[...] = lax.stop_gradient(roots)
    return (roots * weights).sum()


def writes_under_jit(x, reference):
    return jax.jit(writes)(x, reference)


@pytest.mark.parametrize("f", [makes, makes_in_a_loop, adds_in_a_loop, writes, writes_under_jit])
def test_mutable_references_are_followed(f):
    x, left = jnp.array([0.0, 4.0]), [0, 2] if "writes" in f.__name__ else [2, 3]
    pushed = lambda f: lambda x, r: [jax.jvp(lambda x: f(x, r), (x,), (t,))[1] for t in jnp.eye(2)[1:]]
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f)), pushed):
        reference = jax.new_ref(jnp.array([2.0, 3.0]))
        close(run(pg.double_where(f))(x, reference)[-1], 0.75)
        close(reference[...], left)
    if "writes" not in f.__name__:
        batch = jax.vmap(jax.grad(pg.double_where(f)), (0, None))
        close(batch(jnp.stack([x, x]), jax.new_ref(jnp.array([2.0, 3.0]))), [[0, 0.75]] * 2)


def test_references_are_differentiated_again():
    second = jax.hessian(pg.double_where(makes))(jnp.array([0.0, 4.0]), jax.new_ref(jnp.array([2.0, 3.0])))
    close(second, [[0, 0], [0, -3 / 32]])


def test_one_reference_that_is_given_twice():
    def f(x, model):
        model["a"][...] = model["b"][...] + 1
        return (x * model["b"][...]).sum()

    reference = jax.new_ref(jnp.zeros(2))
    close(jax.grad(pg.double_where(f))(jnp.ones(2), {"a": reference, "b": reference}), [1, 1])
    close(reference[...], [1, 1])


def test_a_number_that_has_a_derivative_is_refused_by_a_reference_as_in_jax():
    def f(x, reference):
        reference[...] = x
        return (x**2).sum()

    with pytest.raises(Exception, match="differentiated value on a non-differentiated array reference"):
        jax.grad(pg.double_where(f))(jnp.ones(2), jax.new_ref(jnp.zeros(2)))


@pytest.mark.slow
def test_no_tracer_outlives_its_trace():
    cond = lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)
    scan = lambda x: lax.scan(lambda c, v: (jnp.where(v > 0, c * x, c), None), x, jnp.arange(3.0))[0]
    checkpoint = jax.checkpoint(lambda x: jnp.where(x > 0, jnp.sin(x), x))
    sharded = jax.shard_map(scan, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    clipped = jax.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, x), lambda x, c: (x * jnp.clip(c, -9, 9),))
    selected = lambda x: clipped(jnp.where(x > 0, jnp.sqrt(x), x))
    loop = lambda x: lax.fori_loop(0, 3, lambda i, c: clipped(c * x), x)
    for f in (cond, scan, checkpoint, sharded, selected, loop):
        with jax.checking_leaks():
            found = jax.grad(pg.double_where(f))(1.0)
        close(found, jax.grad(f)(1.0))


@pytest.mark.slow
def test_what_nothing_is_known_of_is_live_as_a_whole():
    groups = np.array([1, 2])
    f = lambda x: lax.ragged_dot(x, np.ones((2, 2, 2)), groups).sum()
    x = jnp.arange(6.0).reshape(3, 2)
    close(jax.grad(pg.double_where(f))(x), jax.grad(f)(x))
    masked = jax.grad(pg.double_where(lambda x: f(jnp.where(x > 0, jnp.sqrt(x), 0))))(x)
    close(masked.ravel(), [0, *1 / np.sqrt(np.arange(1, 6))])


@pytest.mark.slow
def test_nothing_is_computed_without_a_selection():
    weights = [jnp.eye(8) * 0.5] * 3
    f = lambda ws: functools.reduce(lambda h, w: jnp.tanh(h @ w), ws, jnp.ones((4, 8))).sum()
    flops = lambda g: jax.jit(g).lower(weights).compile().cost_analysis()["flops"]
    assert flops(jax.grad(pg.double_where(f))) == flops(jax.grad(f))


# --- functions as users write them --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_arguments_and_outputs():
    @pg.double_where
    def f(model, n, *, kind, scale=2.0):
        assert isinstance(n, int)
        y = jnp.where(model["x"][:n] > 0, getattr(jnp, kind)(model["x"][:n]), 0.0) * scale
        return y.sum(), {"kind": kind, "n": n, "y": y, "none": None}

    model = {"x": jnp.array([0.0, 4.0, 9.0]), "label": "data", "count": 3}
    value, aux = f(model, 2, kind="sqrt")
    assert (value, aux["kind"], aux["n"], aux["none"]) == (4.0, "sqrt", 2, None)
    (value, aux), gradient = pg.value_and_grad(f, wrt="x", has_aux=True)(model, 2, kind="sqrt", scale=3.0)
    close(gradient, [0, 0.75, 0])
    assert (value, aux["kind"]) == (6.0, "sqrt")
    close(pg.grad(f, wrt="x", has_aux=True)(model, 3, kind="log")[0], [0, 0.5, 2 / 9])


def test_equal_numbers_of_other_types_are_other_calls():
    f = pg.double_where(
        lambda x, n: x * (2.0 if n is True else 3.0 if isinstance(n, float) else 5.0) + np.copysign(1, n)
    )
    gradient = jax.value_and_grad(f)
    assert [gradient(1.0, n)[1] for n in (1, True, 1.0)] == [5, 2, 3]
    assert gradient(1.0, 0.0)[0] - gradient(1.0, -0.0)[0] == 2


@pytest.mark.slow
def test_method_and_module():
    class Model(eqx.Module):
        scale: jax.Array
        act: Any = eqx.field(static=True)

        @pg.double_where
        def loss(self, x):
            return kept_sum(x > 0, self.act(self.scale * x))

    model, x = Model(jnp.array(2.0), jnp.sqrt), jnp.array([0.0, 2.0])
    close(jax.grad(lambda m: m.loss(x))(model).scale, 0.5)
    close(jax.grad(model.loss)(x), [0, 0.5])
    network = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    loss = lambda m: jnp.where(m(jnp.ones(2)) > jnp.inf, jnp.log(-(m(jnp.ones(2)) ** 2)), m(jnp.ones(2)))
    plain = eqx.filter_grad(lambda m: m(jnp.ones(2)))(network)
    close(jax.tree.leaves(pg.grad(loss, double_where=True)(network))[0], jax.tree.leaves(plain)[0])


def test_closing_over_what_is_differentiated():
    outer = lambda y: pg.double_where(lambda x: jnp.where(y > 0, jnp.log(y) * x, 0.0))(3.0)
    assert jax.grad(outer)(0.0) == 0
    close(jax.jit(jax.grad(outer))(2.0), 1.5)
    scanned = lambda y: lax.scan(
        lambda c, v: (c + pg.double_where(lambda x: jnp.where(y > x, jnp.log(y), 0.0))(v), None), 0.0, jnp.arange(2.0)
    )[0]
    assert jax.grad(scanned)(0.0) == 0
    close(jax.grad(scanned)(2.0), 1)


@pytest.mark.slow
def test_values_from_numpy_that_the_function_needs():
    keep = np.array([True, False, True])
    select = pg.double_where(lambda x, keep, n: (x[keep] ** 2).sum() + x[: int(n)].sum())
    close(jax.grad(select)(jnp.arange(3.0), keep, np.int64(1)), [1, 0, 4])
    aux = jax.grad(pg.double_where(lambda x: (x * x, np.zeros(2))), has_aux=True)
    aux(1.0)[1][0] = 7
    assert aux(1.0)[1][0] == 0


def test_python_runs_once_for_each_eager_call_and_under_jit_for_each_shape():
    calls = []
    inside = jax.grad(lambda x: pg.double_where(lambda: (calls.append(()), x * x)[1])())
    close(inside(2.0), 4)
    assert calls == [()]
    calls.clear()

    @pg.double_where
    def f(x):
        calls.append(x.shape)
        return log_if_positive(x).sum()

    for gradient, each in ((jax.grad(f), 3), (jax.jit(jax.grad(f)), 1)):
        calls.clear()
        for _ in range(3):
            gradient(jnp.zeros(2))
            gradient(jnp.ones(3))
        assert calls == [(2,), (3,)] * each


@pytest.mark.slow
def test_dtypes_and_weak_types():
    f = lambda x, n, key: (jnp.where(x > 0, jnp.log(x), 0.0), n + 1, x > 0, jax.random.normal(key, dtype=x.dtype) * x)
    g = pg.double_where(f)
    for x in (jnp.float32(2), jnp.bfloat16(2), 2.0, jnp.ones((0, 3)), jnp.float16(0)):
        given = (jnp.asarray(x), jnp.arange(3), jax.random.key(0))
        plain, ours = (jax.eval_shape(h, *given) for h in (f, g))
        assert [(o.dtype, o.weak_type) for o in plain] == [(o.dtype, o.weak_type) for o in ours]
        total = lambda h: lambda x: h(x, *given[1:])[0].sum() + h(x, *given[1:])[3].sum()
        plain, ours = (jax.grad(total(h))(given[0]) for h in (f, g))
        assert (plain.dtype, plain.weak_type, plain.shape) == (ours.dtype, ours.weak_type, ours.shape)
    _, tangent = jax.jvp(lambda x: g(x, jnp.arange(3), jax.random.key(0)), (2.0,), (1.0,))
    assert [t.dtype for t in tangent] == [float, jax.dtypes.float0, jax.dtypes.float0, float]


@pytest.mark.slow
def test_third_derivative():
    f = lambda x: jnp.where(x > 0, jnp.log(x), x**3)
    third = jax.grad(jax.grad(jax.grad(pg.double_where(f))))
    close([third(0.0), third(2.0)], [6, 2 / 8])


@pytest.mark.slow
def test_option_of_the_transforms():
    f = lambda m: jnp.where(m["x"] > 0, jnp.log(m["x"]), 0.0)
    model = {"x": jnp.array([0.0, 2.0]), "n": 1}
    loss, expected = lambda m: f(m).sum(), np.array([0, 0.5])
    close(pg.grad(loss, "x", double_where=True)(model), expected)
    close(pg.grad(wrt="x", double_where=True)(loss)(model), expected)
    close(pg.value_and_grad(loss, double_where=True)(model)[1]["x"], expected)
    for jacobian in (pg.jacrev, pg.jacfwd, pg.jacobian):
        close(jacobian(f, "x", double_where=True)(model), np.diag(expected))
    close(pg.hessian(loss, "x", double_where=True)(model), np.diag([0, -0.25]))
    close(pg.hvp(loss, "x", double_where=True)(model, jnp.ones(2)), [0, -0.25])
    close(pg.jvp(f, (model,), (jnp.ones(2),), wrt="x", double_where=True)[1], expected)
    close(pg.vjp(f, model, wrt="x", double_where=True)[1](jnp.ones(2))[0], expected)
    pushed = pg.linearize(f, model, wrt="x", double_where=True)[1]
    close(pushed(jnp.ones(2)), expected)
    close(jax.linear_transpose(pushed, jnp.ones(2))(jnp.ones(2))[0], expected)
    assert np.isnan(pg.grad(loss, "x")(model)[0])


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        if "jaxpr" in equation.params:
            yield from _equations(getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"]))


def test_source_lines_are_the_users():
    from jax.extend import source_info_util

    # What is kept of the first function serves for the same operations of the second, but not with its lines.
    jax.grad(pg.double_where(lambda x: jnp.where(x > 0, jnp.log(jnp.sinh(x)), 0.0)))(1.0)

    def second(x):
        return jnp.where(x > 0, jnp.log(jnp.sinh(x)), 0.0)

    here = f"{__file__}:{second.__code__.co_firstlineno + 1}"
    found = {"log": [], "mul": [], "div": []}
    for equation in _equations(jax.make_jaxpr(jax.grad(pg.double_where(second)))(1.0).jaxpr):
        if equation.primitive.name in found:
            found[equation.primitive.name].append(source_info_util.summarize(equation.source_info))
    assert all(found.values())
    assert [line for lines in found.values() for line in lines if not line.startswith(here)] == []


def test_not_a_function():
    refused(
        lambda: pg.double_where(3.0), TypeError, "`partgrad.double_where` got float 3.0", "pass the function itself"
    )


@pytest.mark.slow
def test_errors_of_the_function_are_its_own():
    with pytest.raises(ZeroDivisionError, match="mine"):
        jax.grad(pg.double_where(lambda x: x / (_ for _ in ()).throw(ZeroDivisionError("mine"))))(1.0)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.grad(pg.double_where(lambda x: x if x > 0 else -x))(1.0)


@pytest.mark.slow
def test_reverse_mode_through_while_is_jaxs_error():
    f = lambda x: lax.while_loop(lambda c: c < 10, lambda c: c * jnp.maximum(x, 1.0) * 2, x)
    close(jax.jvp(pg.double_where(f), (2.0,), (1.0,))[1], jax.jvp(f, (2.0,), (1.0,))[1])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
        jax.grad(pg.double_where(f))(2.0)


@pytest.mark.slow
def test_a_mask_as_an_index_is_refused_with_what_to_write():
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as caught:
        jax.grad(pg.double_where(lambda x: x.at[x == 0].set(0.0).sum()))(jnp.ones(2))
    assert "jnp.where(mask, y, x)" in "".join(caught.value.__notes__)
    remedy = pg.double_where(lambda x: jnp.where(x == 0, 0.0, x).sum())
    close(jax.grad(remedy)(jnp.array([0.0, 2.0])), [0, 1])
