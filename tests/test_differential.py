"""Every public function of JAX that takes and returns floats has JAX's own derivatives, wherever JAX's are finite.

`tests/differential.md` lists the functions; running this file as a script rewrites it. A function that
the file does not know, because JAX is newer, is tested if it can be called.
"""

import functools
import importlib
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import partgrad as pg
from helpers.tables import table

FUNCTIONS = pathlib.Path(__file__).parent / "differential.md"
MODULES = [
    "jax.numpy",
    "jax.numpy.linalg",
    "jax.numpy.fft",
    "jax.scipy.special",
    "jax.scipy.linalg",
    "jax.nn",
    "jax.lax",
]
FLOOR = 380
# Without it compiling takes three times as long.
QUICK = {"xla_backend_optimization_level": 0}
GENERIC, SPECIAL = "generic", "special"


class Recipe:
    """How to call a function: what to call, on arrays of which shapes.

    Args:
        call: From the function and arrays to its results.
        *shapes: The shapes of the arrays.
        special: Whether it is also called at zeros and ties; a solver is not, where nothing is left but rounding.
    """

    def __init__(self, call, *shapes, special=True):
        self.call, self.shapes, self.special = call, shapes or ((2, 3),), special


def regular(call, *shapes):
    return Recipe(call, *(shapes or [(3, 3)]), special=False)


def symmetric(a):
    return a + a.T


def definite(a):
    return a @ a.T + 2 * jnp.eye(3)


def well(a):
    """A matrix that is well conditioned."""
    return a + 3 * jnp.eye(3)


NUMBERS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
SCATTERED = lax.ScatterDimensionNumbers((1,), (0,), (0,))
PLACES = np.array([[2], [0], [2], [7]])
scattered = Recipe(lambda f, a, b: f(a, PLACES, b, SCATTERED, mode="drop"), (4, 3), (4, 3))
along = Recipe(lambda f, a: f(a, 1))
of_list = Recipe(lambda f, a, b: f([a, b]), (2, 3), (2, 3))
split = Recipe(lambda f, a: f(a, 2), (2, 4, 2))
pair = Recipe(lambda f, a, b: f(a, b), (2, 3), (2, 3))
vectors = Recipe(lambda f, a, b: f(a, b), (3,), (3,))
reduced = Recipe(lambda f, a: f(a, axes=(1,)))
quantile = Recipe(lambda f, a: f(a, jnp.array([0.25, 0.6]), axis=1), (2, 4))
percentile = Recipe(lambda f, a: f(a, 30.0), (5,))
matrix = Recipe(lambda f, a, b: f(a, b), (2, 3), (3, 2))
image = Recipe(lambda f, a, k: f(a, k, (1, 1), "SAME"), (1, 1, 3, 3), (2, 1, 2, 2))
indexed = Recipe(lambda f, a: f(a, 1, axis=0, keepdims=False), (3, 2))

RECIPES = {
    "jax.numpy": {
        "append": pair,
        "apply_along_axis": Recipe(lambda f, a: f(jnp.sort, 1, a)),
        "apply_over_axes": Recipe(lambda f, a: f(jnp.sum, a, [0, 1])),
        "array_split": split,
        "astype": Recipe(lambda f, a: f(a, jnp.float32)),
        "average": Recipe(lambda f, a, w: f(a, weights=w), (3,), (3,)),
        "block": Recipe(lambda f, a, b: f([[a, b], [b, a]]), (2, 2), (2, 2)),
        "broadcast_arrays": Recipe(lambda f, a, b: f(a, b), (2, 1), (3,)),
        "broadcast_to": Recipe(lambda f, a: f(a, (2, 2, 3))),
        "choose": Recipe(lambda f, a, b: f(np.array([0, 1, 1]), [a, b]), (3,), (3,)),
        "clip": [Recipe(lambda f, a: f(a, -0.5, 0.5)), Recipe(lambda f, *a: f(*a), (3,), (3,), (3,))],
        "column_stack": of_list,
        "compress": Recipe(lambda f, a: f(np.array([True, False, True]), a, axis=1)),
        "concat": of_list,
        "concatenate": of_list,
        "convolve": Recipe(lambda f, a, b: f(a, b), (4,), (2,)),
        "correlate": Recipe(lambda f, a, b: f(a, b), (4,), (2,)),
        "cross": Recipe(lambda f, a, b: f(a, b), (2, 3), (2, 3)),
        "delete": Recipe(lambda f, a: f(a, 1, axis=1)),
        "diag_indices_from": [],
        "dot": matrix,
        "dsplit": Recipe(lambda f, a: f(a, 2), (1, 2, 2)),
        "dstack": of_list,
        "einsum": Recipe(lambda f, a, b: f("ij,kj->ik", a, b), (2, 3), (2, 3)),
        "expand_dims": along,
        "extract": Recipe(lambda f, a: f(a > 0, a, size=3)),
        "fill_diagonal": Recipe(lambda f, a, v: f(a, v, inplace=False), (3, 3), ()),
        "geomspace": Recipe(lambda f, a, b: f(a, b, 4), (3,), (3,)),
        "gradient": Recipe(lambda f, a: f(a), (3, 3)),
        "histogram": Recipe(lambda f, w: f(np.array([0.1, 0.5, 0.9]), 2, weights=w), (3,)),
        "hsplit": split,
        "hstack": of_list,
        "insert": Recipe(lambda f, a, v: f(a, 1, v), (3,), ()),
        "interp": Recipe(lambda f, x, y: f(x, np.array([-1.0, 0.0, 1.0]), y), (4,), (3,)),
        "bincount": Recipe(lambda f, w: f(np.array([0, 2, 2]), w, length=4), (3,)),
        "ldexp": Recipe(lambda f, a: f(a, 2)),
        "linspace": Recipe(lambda f, a, b: f(a, b, 4), (3,), (3,)),
        "logspace": Recipe(lambda f, a, b: f(a, b, 4), (3,), (3,)),
        "matmul": matrix,
        "matvec": Recipe(lambda f, a, b: f(a, b), (2, 3), (3,)),
        "vecmat": Recipe(lambda f, a, b: f(a, b), (2,), (2, 3)),
        "moveaxis": Recipe(lambda f, a: f(a, 0, 1)),
        "pad": [
            Recipe(lambda f, a, mode=m: f(a, 1, mode=mode), (3,))
            for m in ("constant", "reflect", "edge", "linear_ramp", "maximum", "mean")
        ],
        "partition": Recipe(lambda f, a: f(a, 1)),
        "percentile": percentile,
        "nanpercentile": percentile,
        "piecewise": Recipe(lambda f, a: f(a, [a < 0, a >= 0], [jnp.exp, jnp.sqrt])),
        "place": Recipe(lambda f, a, v: f(a, a > 0, v, inplace=False), (4,), (4,)),
        "polydiv": Recipe(lambda f, a, b: f(a, b), (4,), (2,)),
        "polyfit": regular(lambda f, x, y: f(x + jnp.arange(5.0), y, 2), (5,), (5,)),
        "polyval": Recipe(lambda f, p, x: f(p, x), (3,), (2,)),
        "put": Recipe(lambda f, a, v: f(a, np.array([0, 2]), v, inplace=False), (4,), (2,)),
        "put_along_axis": Recipe(lambda f, a, v: f(a, np.array([[0], [2]]), v, 1, inplace=False), (2, 3), (2, 1)),
        "quantile": quantile,
        "nanquantile": quantile,
        "repeat": Recipe(lambda f, a: f(a, 2, axis=1)),
        "reshape": Recipe(lambda f, a: f(a, (3, 2))),
        "resize": Recipe(lambda f, a: f(a, (2, 4))),
        "roll": along,
        "rollaxis": along,
        "roots": regular(lambda f, a: f(a + jnp.array([1.0, 0.0, -7.0]), strip_zeros=False), (3,)),
        "select": Recipe(lambda f, a, b: f([a > 0.5, a > 0], [jnp.sqrt(a), jnp.log(a)], b), (4,), (4,)),
        "split": split,
        "stack": of_list,
        "swapaxes": Recipe(lambda f, a: f(a, 0, 1)),
        "take": Recipe(lambda f, a: f(a, np.array([0, 2, 7]), axis=1, mode="fill", fill_value=0.0)),
        "take_along_axis": Recipe(lambda f, a: f(a, jnp.argsort(a, axis=1), axis=1)),
        "tensordot": matrix,
        "tile": Recipe(lambda f, a: f(a, 2)),
        "trim_zeros": [],
        "unwrap": Recipe(lambda f, a: f(a * 5)),
        "vander": Recipe(lambda f, a: f(a, 3), (3,)),
        "vectorize": Recipe(lambda f, a: f(lambda x: jnp.where(x > 0, jnp.log(x), x))(a)),
        "vdot": pair,
        "vsplit": split,
        "vstack": of_list,
        "where": Recipe(lambda f, a, b: f(a > b, a, b), (4,), (4,)),
    },
    "jax.numpy.linalg": {
        "cholesky": regular(lambda f, a: f(definite(a))),
        "cond": regular(lambda f, a: f(well(a))),
        "cross": Recipe(lambda f, a, b: f(a, b), (2, 3), (2, 3)),
        "det": Recipe(lambda f, a: f(a), (3, 3)),
        "eig": regular(lambda f, a: f(jnp.diag(jnp.arange(3.0)) + 0.1 * a)),
        "eigvals": regular(lambda f, a: f(jnp.diag(jnp.arange(3.0)) + 0.1 * a)),
        "eigh": regular(lambda f, a: f(symmetric(a))),
        "eigvalsh": regular(lambda f, a: f(symmetric(a))),
        "inv": regular(lambda f, a: f(well(a))),
        "lstsq": regular(lambda f, a, b: f(a, b), (4, 2), (4,)),
        "matmul": matrix,
        "matrix_power": Recipe(lambda f, a: f(a, 3), (3, 3)),
        "multi_dot": Recipe(lambda f, a, b, c: f([a, b, c]), (2, 3), (3, 2), (2, 2)),
        "norm": [Recipe(lambda f, a, order=order: f(a, order)) for order in (None, 1, jnp.inf, -1)]
        + [regular(lambda f, a: f(a, 2), (3, 3))],
        "matrix_norm": [Recipe(lambda f, a: f(a), (2, 3)), regular(lambda f, a: f(a, ord="nuc"), (3, 3))],
        "vector_norm": [Recipe(lambda f, a, order=order: f(a, ord=order)) for order in (2, 1, jnp.inf, 3)],
        "pinv": regular(lambda f, a: f(a), (4, 3)),
        "qr": regular(lambda f, a: f(a), (4, 3)),
        "slogdet": regular(lambda f, a: f(well(a))),
        "solve": regular(lambda f, a, b: f(well(a), b), (3, 3), (3,)),
        "svd": regular(lambda f, a: f(a, full_matrices=False), (4, 3)),
        "svdvals": regular(lambda f, a: f(a), (4, 3)),
        "tensordot": matrix,
        "tensorinv": regular(lambda f, a: f(well(a).reshape(3, 1, 3, 1), ind=2)),
        "tensorsolve": regular(lambda f, a, b: f(well(a), b), (3, 3), (3,)),
    },
    "jax.scipy.linalg": {
        "block_diag": pair,
        "cho_factor": regular(lambda f, a: f(definite(a))[0]),
        "cho_solve": regular(lambda f, a, b: f((jnp.linalg.cholesky(definite(a)), True), b), (3, 3), (3,)),
        "cholesky": regular(lambda f, a: f(definite(a))),
        "convolution_matrix": Recipe(lambda f, a: f(a, 3), (2,)),
        "det": Recipe(lambda f, a: f(a), (3, 3)),
        "eigh": regular(lambda f, a: f(symmetric(a))),
        "eigh_tridiagonal": regular(lambda f, a, b: f(a, b, eigvals_only=True), (3,), (2,)),
        "expm": regular(lambda f, a: f(a)),
        "expm_frechet": regular(lambda f, a, b: f(a, b), (3, 3), (3, 3)),
        "funm": [],
        "inv": regular(lambda f, a: f(well(a))),
        "leslie": Recipe(lambda f, a, b: f(a, b), (3,), (2,)),
        "lu": regular(lambda f, a: f(well(a))),
        "lu_factor": regular(lambda f, a: f(well(a))[0]),
        "lu_solve": regular(lambda f, a, b: f((well(a), np.arange(3, dtype=np.int32)), b), (3, 3), (3,)),
        "qr": regular(lambda f, a: f(a, mode="economic"), (4, 3)),
        "polar": regular(lambda f, a: f(a, method="svd"), (3, 3)),
        "solve": regular(lambda f, a, b: f(well(a), b), (3, 3), (3,)),
        "solve_triangular": regular(lambda f, a, b: f(well(a), b), (3, 3), (3,)),
        "svd": regular(lambda f, a: f(a, full_matrices=False), (4, 3)),
        "toeplitz": Recipe(lambda f, a, b: f(a, b), (3,), (3,)),
    },
    "jax.numpy.fft": {
        **dict.fromkeys(("fft", "ifft", "rfft", "hfft", "ihfft", "irfft"), Recipe(lambda f, a: f(a), (4,))),
        **dict.fromkeys(("fft2", "ifft2", "fftn", "ifftn", "rfft2", "rfftn"), Recipe(lambda f, a: f(a), (2, 4))),
        **dict.fromkeys(("irfft2", "irfftn"), Recipe(lambda f, a: f(a), (2, 3))),
        "fftfreq": [],
        "rfftfreq": [],
    },
    "jax.scipy.special": {
        "bernoulli": [],
        "bessel_jn": Recipe(lambda f, a: f(a, v=2, n_iter=20), (3,)),
        "betainc": Recipe(lambda f, x: f(1.5, 2.5, x), (3,)),
        "comb": Recipe(lambda f, a: f(a, 2.0), (3,)),
        "expn": Recipe(lambda f, x: f(2, x), (3,)),
        "gammainc": Recipe(lambda f, x, y: f(x, y), (2,), (2,)),
        "gammaincc": Recipe(lambda f, x, y: f(x, y), (2,), (2,)),
        "hyp2f1": Recipe(lambda f, x: f(0.5, 1.5, 2.5, x), (2,)),
        "hyp1f1": Recipe(lambda f, a, x: f(a, 1.5, x), (2,), (2,)),
        "logsumexp": [Recipe(lambda f, a: f(a, axis=1)), Recipe(lambda f, a, b: f(a, b=b), (3,), (3,))],
        "multigammaln": Recipe(lambda f, a: f(a + 1, 2), (3,)),
        "owens_t": Recipe(lambda f, x, y: f(x, y), (2,), (2,)),
        "polygamma": Recipe(lambda f, x: f(1, x), (3,)),
        "sici": Recipe(lambda f, x: f(x), (2,)),
        "zeta": Recipe(lambda f, q: f(2.0, q), (3,)),
    },
    "jax.nn": {
        "dot_product_attention": Recipe(lambda f, q, k, v: f(q, k, v, is_causal=True), *[(1, 2, 1, 2)] * 3),
        "glu": Recipe(lambda f, a: f(a), (2, 4)),
        "gelu": [Recipe(lambda f, a, approximate=b: f(a, approximate=approximate)) for b in (True, False)],
        "softmax": [along, Recipe(lambda f, a: f(a, where=a > 0, initial=0.0))],
        "log_softmax": [along, Recipe(lambda f, a: f(a, where=a > 0, initial=0.0))],
        "standardize": [along, Recipe(lambda f, a: f(a, where=a > 0))],
        "logsumexp": along,
    },
    "jax.lax": {
        "all_gather": Recipe(lambda f, a: jax.vmap(lambda x: f(x, "i"), axis_name="i")(a)),
        "all_to_all": Recipe(lambda f, a: jax.vmap(lambda x: f(x, "i", 0, 0), axis_name="i")(a), (3, 3)),
        "ppermute": Recipe(lambda f, a: jax.vmap(lambda x: f(x, "i", [(0, 1), (1, 0)]), axis_name="i")(a)),
        **dict.fromkeys(("psum", "pmean"), Recipe(lambda f, a: jax.vmap(lambda x: f(x, "i"), axis_name="i")(a))),
        "psum_scatter": Recipe(lambda f, a: jax.vmap(lambda x: f(x, "i"), axis_name="i")(a), (3, 3)),
        "approx_max_k": along,
        "approx_min_k": along,
        "associative_scan": [Recipe(lambda f, a, op=op: f(op, a), (5,)) for op in (jnp.multiply, jnp.maximum)],
        "batch_matmul": Recipe(lambda f, a, b: f(a, b), (2, 2, 3), (2, 3, 2)),
        "betainc": Recipe(lambda f, x: f(1.5, 2.5, x), (3,)),
        "broadcast": Recipe(lambda f, a: f(a, (2,))),
        "broadcast_in_dim": Recipe(lambda f, a: f(a, (2, 2, 3), (0, 2))),
        "broadcast_to_rank": Recipe(lambda f, a: f(a, 3)),
        "clamp": Recipe(lambda f, a, b, c: f(a, b, c), (3,), (3,), (3,)),
        "collapse": Recipe(lambda f, a: f(a, 0, 2)),
        "complex": pair,
        "composite": Recipe(lambda f, a: f(lambda x: jnp.sqrt(x), name="partgrad.test")(a)),
        "concatenate": Recipe(lambda f, a, b: f([a, b], 0), (2, 3), (2, 3)),
        "cond": Recipe(lambda f, a: f(a[0] > 0, jnp.sqrt, lambda x: x * x, a), (3,)),
        "conv": image,
        "conv_general_dilated": [
            image,
            Recipe(lambda f, a, k: f(a, k, (2,), [(1, 2)], (2,), (1,)), (1, 2, 4), (2, 2, 2)),
            Recipe(lambda f, a, k: f(a, k, (1,), "VALID", feature_group_count=2), (1, 2, 4), (2, 1, 2)),
        ],
        "conv_general_dilated_local": Recipe(lambda f, a, k: f(a, k, (1,), "VALID", (2,)), (1, 1, 3), (1, 2, 2)),
        "conv_general_dilated_patches": Recipe(lambda f, a: f(a, (2,), (1,), "SAME"), (1, 1, 4)),
        "conv_transpose": Recipe(lambda f, a, k: f(a, k, (2,), "SAME"), (1, 3, 1), (2, 1, 2)),
        "conv_with_general_padding": Recipe(lambda f, a, k: f(a, k, (1,), [(1, 1)], None, None), (1, 1, 3), (1, 1, 2)),
        "convert_element_type": Recipe(lambda f, a: f(a, jnp.float32)),
        **dict.fromkeys(("cummax", "cummin", "cumprod", "cumsum", "cumlogsumexp"), Recipe(lambda f, a: f(a, axis=1))),
        "custom_linear_solve": regular(
            lambda f, a, b: f(lambda v: well(a) @ v, b, *[lambda mv, v: jnp.linalg.solve(jax.jacobian(mv)(v), v)] * 2),
            (3, 3),
            (3,),
        ),
        "custom_root": regular(
            lambda f, a: f(
                lambda x: x**3 - 2 - a,
                jnp.ones(()),
                lambda g, x: lax.fori_loop(0, 40, lambda i, y: y - g(y) / (3 * y * y), x),
                lambda g, y: y / g(1.0),
            ),
            (),
        ),
        "dot": matrix,
        "dot_general": [
            Recipe(lambda f, a, b: f(a, b, (((1,), (0,)), ((), ()))), (2, 3), (3, 2)),
            Recipe(lambda f, a, b: f(a, b, (((2,), (1,)), ((0,), (2,)))), (2, 1, 3), (2, 3, 2)),
        ],
        "dynamic_index_in_dim": Recipe(lambda f, a: f(a, jnp.argmax(a[:, 0]), 0), (3, 2)),
        "dynamic_slice": Recipe(lambda f, a: f(a, (jnp.argmax(a),), (2,)), (4,)),
        "dynamic_slice_in_dim": Recipe(lambda f, a: f(a, jnp.argmax(a), 2), (4,)),
        "dynamic_update_index_in_dim": Recipe(lambda f, a, b: f(a, b, jnp.argmax(a), 0), (4,), ()),
        "dynamic_update_slice": Recipe(lambda f, a, b: f(a, b, (jnp.argmax(a),)), (4,), (2,)),
        "dynamic_update_slice_in_dim": Recipe(lambda f, a, b: f(a, b, jnp.argmax(a), 0), (4,), (2,)),
        "expand_dims": Recipe(lambda f, a: f(a, (1,))),
        "fft": Recipe(lambda f, a: f(a, "RFFT", (4,)), (2, 4)),
        "fori_loop": [
            Recipe(lambda f, a: f(0, 3, lambda i, c: jnp.where(i == 1, jnp.sqrt(c), c * a), a), (3,)),
            Recipe(lambda f, a: f(0, jnp.argmax(a) + 1, lambda i, c: c * a, a), (3,)),
        ],
        "full_like": Recipe(lambda f, v: f(jnp.zeros(3), v), ()),
        "full": Recipe(lambda f, v: f((3,), v), ()),
        "gather": [
            Recipe(lambda f, a: f(a, PLACES, NUMBERS, (1, 3), mode="fill", fill_value=2.0), (4, 3)),
            Recipe(lambda f, a: f(a, PLACES, NUMBERS, (1, 3), mode="clip"), (4, 3)),
        ],
        "igamma": Recipe(lambda f, a, b: f(a, b), (2,), (2,)),
        "igammac": Recipe(lambda f, a, b: f(a, b), (2,), (2,)),
        "index_in_dim": indexed,
        "index_take": Recipe(lambda f, a: f(a, (np.array([0, 2]),), (0,)), (3, 2)),
        "integer_pow": [Recipe(lambda f, a, n=n: f(a, n)) for n in (3, -2, 0)],
        "map": Recipe(lambda f, a: f(lambda x: jnp.where(x > 0, jnp.log(x), x), a), (4,)),
        "optimization_barrier": pair,
        "pad": Recipe(lambda f, a, v: f(a, v, [(1, -1, 1)]), (4,), ()),
        "platform_dependent": Recipe(lambda f, a: f(a, default=jnp.sqrt)),
        "polygamma": Recipe(lambda f, x: f(1.0, x), (3,)),
        "ragged_dot": Recipe(lambda f, a, b: f(a, b, np.array([1, 2])), (3, 2), (2, 2, 2)),
        "reduce": [
            Recipe(lambda f, a, op=op, start=start: f(a, start, op, (1,)))
            for op, start in ((lax.add, 0.0), (lax.mul, 1.0), (lax.max, -np.inf), (lax.min, np.inf))
        ],
        **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"), reduced),
        "reduce_precision": Recipe(lambda f, a: f(a, 8, 20)),
        "reduce_window": [
            Recipe(lambda f, a, op=op, start=start: f(a, start, op, (2, 2), (1, 2), "SAME"), (3, 3))
            for op, start in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf))
        ],
        "reshape": Recipe(lambda f, a: f(a, (3, 2))),
        "rev": Recipe(lambda f, a: f(a, (1,))),
        "scan": [
            Recipe(lambda f, a: f(lambda c, x: (c * x, jnp.sin(c)), a[0], a), (4,)),
            Recipe(lambda f, a: f(lambda c, x: (jnp.where(x > 0, x, c), jnp.sqrt(c)), a[0], a, reverse=True), (4,)),
            Recipe(
                lambda f, a, b: f(lambda c, x: (jnp.maximum(c, x * b), lax.cond(x > 0, jnp.log, jnp.exp, x)), a[0], a),
                (4,),
                (),
            ),
        ],
        "scatter": scattered,
        "scatter_add": scattered,
        "scatter_max": scattered,
        "scatter_min": scattered,
        "scatter_sub": scattered,
        "scatter_mul": Recipe(
            lambda f, a, b: f(a, np.array([[2], [0]]), b, SCATTERED, unique_indices=True), (4, 3), (2, 3)
        ),
        "scatter_apply": Recipe(
            lambda f, a: f(a, np.array([[2], [0]]), jnp.sin, SCATTERED, update_shape=(2, 3), unique_indices=True),
            (4, 3),
        ),
        "select": Recipe(lambda f, a, b: f(a > b, a, b), (4,), (4,)),
        "select_n": Recipe(lambda f, a, b, c: f((a > 0).astype(int) + (b > 0), a, b, c), (4,), (4,), (4,)),
        "slice": Recipe(lambda f, a: f(a, (0, 1), (2, 3), (1, 2))),
        "slice_in_dim": Recipe(lambda f, a: f(a, 0, 2), (3, 2)),
        "sort": [Recipe(lambda f, a: f(a)), Recipe(lambda f, a, b: f((a, b), num_keys=1), (4,), (4,))],
        "sort_key_val": Recipe(lambda f, a, b: f(a, b), (4,), (4,)),
        "split": Recipe(lambda f, a: f(a, (1, 3)), (4,)),
        "squeeze": Recipe(lambda f, a: f(a, (1,)), (2, 1, 3)),
        "stack": of_list,
        "switch": Recipe(lambda f, a: f((a[0] > 0).astype(int) + (a[1] > 0), [jnp.sqrt, jnp.exp, jnp.log], a), (3,)),
        "tile": Recipe(lambda f, a: f(a, (1, 2))),
        "top_k": Recipe(lambda f, a: f(a, 2)),
        "transpose": Recipe(lambda f, a: f(a, (1, 0))),
        "while_loop": Recipe(lambda f, a: f(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * jnp.sin(a)), (0, a)), (3,)),
        "zeta": Recipe(lambda f, q: f(2.0, q), (3,)),
    },
}
PLAIN = [
    Recipe(lambda f, a: f(a)),
    Recipe(lambda f, a: f(a), (3,)),
    pair,
    vectors,
    Recipe(lambda f, a, b, c: f(a, b, c), (3,), (3,), (3,)),
]


def public_functions():
    """The names of what can be called in the modules."""
    for module in MODULES:
        members = vars(importlib.import_module(module))
        for name, member in sorted(members.items()):
            if not name.startswith("_") and callable(member) and not inspect.isclass(member) and name[0].islower():
                yield f"{module}.{name}"


def floats_of(call):
    """The function of arrays whose results are the floating ones, complex numbers in two parts."""

    def function(*arrays):
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(call(*arrays)) if not isinstance(leaf, str)]
        parts = [[leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf] for leaf in leaves]
        return [part for both in parts for part in both if jnp.issubdtype(part.dtype, jnp.floating)]

    return function


def reverse(f, arrays):
    """The values, and their Jacobian by reverse mode."""
    values, pull = jax.vjp(f, *arrays)
    flat, unravel = ravel_pytree(values)
    return values, jax.vmap(lambda row: pull(unravel(row)))(jnp.eye(flat.size, dtype=flat.dtype))


def forward(f, arrays):
    flat, unravel = ravel_pytree(arrays)
    return jax.vmap(lambda row: jax.jvp(f, arrays, unravel(row)))(jnp.eye(flat.size))


def modes(f, arrays):
    """The modes in which JAX has a derivative of a function that returns floats."""
    try:
        if not jax.tree.leaves(jax.eval_shape(f, *arrays)):
            return []
    except Exception:
        return []
    return [mode for mode in (reverse, forward) if _works(mode, f, arrays)]


def _works(mode, f, arrays):
    try:
        jax.eval_shape(lambda *arrays: mode(f, arrays), *arrays)
    except Exception:
        return False
    return True


def cases(name):
    """The recipes by which a function can be called, each with the modes of its derivative."""
    module, _, short = name.rpartition(".")
    function = getattr(importlib.import_module(module), short)
    recipes = RECIPES.get(module, {}).get(short)
    if recipes is None:
        first = next(filter(None, (_case(function, recipe) for recipe in PLAIN)), None)
        return [first] if first else []
    recipes = recipes if isinstance(recipes, list) else [recipes]
    return [case for recipe in recipes if (case := _case(function, recipe))]


def _case(function, recipe):
    f = floats_of(functools.partial(recipe.call, function))
    found = modes(f, [jnp.full(shape, 0.5) for shape in recipe.shapes])
    return (f, recipe, found) if found else None


def points_of(recipe):
    """Generic points of several domains, and such with zeros, ones and ties."""
    generator = np.random.default_rng(0)
    domains = [(0.1, 0.9), (-2.0, 2.0), (1.1, 3.0), (-0.9, 0.9)]
    drawn = [[generator.uniform(*domain, shape) for shape in recipe.shapes] for domain in domains]
    if not recipe.special:
        return drawn
    values = [[0.0], [1.0], [0.0, 1.0, -1.0], [0.5, 0.5, 2.0], [-0.5, 0.0, 0.5], [1e-9, 0.0, -3.0]]
    tied = [[np.resize(value, shape) for shape in recipe.shapes] for value in values]
    chosen = [[generator.choice([0.0, 1.0, -1.0, 0.5], shape) for shape in recipe.shapes] for _ in range(2)]
    return [*drawn, *tied, *chosen]


def assert_equal_where_finite(found, expected, where):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        finite = np.isfinite(theirs)
        scale = np.abs(theirs[finite]).max(initial=0.0)
        relative, absolute = (1e-9, 1e-12) if theirs.dtype == np.float64 else (1e-5, 1e-6)
        close = {"rtol": relative, "atol": absolute * (scale + 0.01)}
        np.testing.assert_allclose(ours[finite], theirs[finite], err_msg=where, **close)


def _compiled(f, mode, arrays):
    return jax.jit(lambda *arrays: mode(f, arrays)).lower(*arrays).compile(compiler_options=QUICK)


def check(name):
    """Compare all that is known of a function; whether there was a derivative to compare."""
    with jax.enable_x64(True):
        found = cases(name)
        finite = 0
        for f, recipe, found_modes in found:
            points = points_of(recipe)
            value = lambda g, arrays: g(*arrays)
            runs = [[_compiled(g, mode, points[0]) for g in (f, pg.double_where(f))] for mode in (value, *found_modes)]
            for arrays in points:
                (values, our_values), *derivatives = ([run(*arrays) for run in pair] for pair in runs)
                expected, ours = ([pair[which] for pair in derivatives] for which in (0, 1))
                where = f"{name} at {arrays}"
                for value, our_value in zip(values, our_values, strict=True):
                    assert np.asarray(value).tobytes() == np.asarray(our_value).tobytes(), where
                assert_equal_where_finite(ours, expected, where)
                finite += all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
        assert finite or not found, f"{name} has a finite derivative at no point"
        return bool(found)


def listed():
    """The functions that the file lists, and those that it says are not tested."""
    tested, _, others = FUNCTIONS.read_text().partition("## Not tested")
    names = lambda text: [
        f"{module}.{name}"
        for module, block in re.findall(r"^\*\*`([\w.]+)`\*\*(.*?)(?=^\*\*|\Z)", text, re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`(\w+)`", block)
    ]
    return names(tested), names(others)


TESTED, OTHERS = listed() if FUNCTIONS.exists() else ([], [])
HERE = list(public_functions())


# The XLA of older versions takes minutes over some polynomials of this module.
SLOW_MODULE = "jax.scipy.special" if jax.__version_info__ < (0, 11) else "none"
ROWS = [name for name in HERE if name in set(TESTED) and not name.startswith(SLOW_MODULE)]


@pytest.mark.filterwarnings("ignore")
@table("name", ROWS, most=5, kind=lambda name: name.rpartition(".")[0])
def test_derivatives_are_those_of_jax(name):
    assert check(name), "the file lists it, but it cannot be called"


@pytest.mark.filterwarnings("ignore")
@table("name", [name for name in HERE if name not in {*TESTED, *OTHERS}])
def test_derivatives_of_what_is_new_in_jax(name):
    if not check(name):
        pytest.skip("it cannot be called on arrays of floats, or has no derivative")


def test_the_file_lists_enough():
    assert len(set(TESTED) & set(HERE)) >= FLOOR
    assert not set(TESTED) & set(OTHERS)


LIST = """# The functions that `tests/test_differential.py` differentiates

{tested}
## Not tested

They take or return no floats, need arguments that are no arrays of floats, or have no derivative in JAX.

{others}"""


def write():
    import textwrap
    import warnings

    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    covered = {name: bool(cases(name)) for name in public_functions()}

    def section(wanted):
        text = ""
        for module in MODULES:
            names = [n.rpartition(".")[2] for n in covered if n.rpartition(".")[0] == module and covered[n] is wanted]
            if names:
                text += f"**`{module}`**\n" + textwrap.fill(", ".join(f"`{name}`" for name in names), 120) + "\n\n"
        return text.rstrip() + "\n"

    FUNCTIONS.write_text(LIST.format(tested=section(True), others=section(False)))


if __name__ == "__main__":
    write()
