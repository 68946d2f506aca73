"""Gradients that go wrong: a function of one array, a point, the derivative there, and where it was reported.

S: the value does not depend on the bad path (a selection, an index, an overwrite, a lost maximum cuts it).
I: the zero is on the input side: the function is locally constant.
N: truly singular: NaN or infinity must stay.
O: out-of-bounds reads, for consistent indexing.
M: smooth as a whole although a step is singular: needs a function with a derivative of its own.
G: gauge-invariant linear algebra. C: a convention. V: the value itself overflows. P: a selection with a rule of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

nan, inf = jnp.nan, jnp.inf


class Case(NamedTuple):
    name: str
    f: Any
    x: Any
    expected: Any
    category: str
    source: str
    note: str


ZOO = []


def case(name, f, x, expected, category, source, note=""):
    ZOO.append(Case(name, f, np.asarray(x), np.asarray(expected), category, source, note))


A = lambda *v: np.array(v)

case("where_atan2", lambda x: jnp.where(x > 0.5, jnp.arctan2(x, x), 0.0), 0.0, 0.0, "S", "jax#1052")
case(
    "where_atan2_vec",
    lambda a: jnp.sum(jnp.where(A(0.0, 1.0, 0.0) > 0.5, 0.0, jnp.arctan2(a, a))),
    A(3.0, 0.0, -5.0),
    A(0.0, 0.0, 0.0),
    "S",
    "jax#1052",
)
case("index_recip", lambda x: jnp.array([0.0, 1.0 / x])[0], 0.0, 0.0, "S", "jax#1052")
case(
    "where_sqrt_norm",
    lambda x: jnp.sum((lambda n: jnp.where(n > 0.5, n, 1.0))(jnp.sqrt(jnp.sum(x**2, axis=1)))),
    np.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]),
    np.array([[1 / 5**0.5, 2 / 5**0.5], [0.6, 0.8], [0.0, 0.0]]),
    "S",
    "jax#347",
)
case("where_log_const", lambda x: jnp.where(True, x, jnp.log(x)), 0.0, 1.0, "S", "jax#1052 (mattjj 2019-07-27)")
case(
    "scan_dead_carry",
    lambda x: jax.lax.scan(lambda c, _: ([c[0], jnp.nan * c[0]], None), [x, x], None, length=1)[0][0],
    1.0,
    1.0,
    "S",
    "jax#1052 (mattjj 2023-09-07)",
)
case("select_inf", lambda x: jnp.where(x > 0, 0.0, x * jnp.inf), 1.0, 0.0, "S", "jax#2630")
case("where_exp_overflow", lambda a: jnp.where(a <= 0, jnp.exp(a), 1 + a), 1000.0, 1.0, "S", "pytorch#68425")
case(
    "where_div_sqrt",
    lambda x: jnp.sum(jnp.where(x == 0.0, x / 2, jnp.sqrt(x) + 1)),
    A(16.0, 0.0),
    A(0.125, 0.5),
    "S",
    "pytorch#23395",
)
case(
    "max_sqrt_floor",
    lambda x: jnp.maximum(jnp.sqrt(x[0] ** 2 + x[1] ** 2), 1e-10),
    A(0.0, 0.0),
    A(0.0, 0.0),
    "S",
    "mlx#3668",
)
case("where_xsqrtx", lambda x: jnp.where(x == 0, 0.0, x * jnp.sqrt(x)), 0.0, 0.0, "S", "tinygrad#12409")
case(
    "softmax_where_big",
    lambda x: jnp.sum(jax.nn.softmax(x, axis=0, where=jnp.array([True, True, False]))),
    A(1.0, 1.0, 1000.0),
    A(0.0, 0.0, 0.0),
    "S",
    "jax#17117",
)


def ent(lg):
    w = A(True, True, False)
    at = jax.nn.softmax(lg, axis=0, where=w)
    at = at * jnp.sum(at) ** -1
    return jnp.sum(at * -jnp.log2(at), where=w, initial=1.0)


case("masked_entropy", ent, A(0.3, 0.3, 0.1), A(0.0, 0.0, 0.0), "S", "jax#17070")
case(
    "triu_dist",
    lambda c: jnp.sum(jnp.sqrt(jnp.sum((c[:, None] - c[None]) ** 2, -1))[jnp.triu_indices(2, 1)]),
    np.array([[0.0, 0.0], [3.0, 4.0]]),
    np.array([[-0.6, -0.8], [0.6, 0.8]]),
    "S",
    "jax#654-like (index form)",
)
case("nanstd", jnp.nanstd, A(np.nan, 1.0, 3.0), A(0.0, -0.5, 0.5), "S", "jax#8128 (fixed)")
case(
    "svd_singvals_deg",
    lambda a: jnp.linalg.norm((lambda u, s, v: (u * s) @ v)(*jnp.linalg.svd(a, full_matrices=False))),
    jnp.diag(A(1.0, 1.0, 2.0, 3.0)),
    np.diag(A(1.0, 1.0, 2.0, 3.0)) / np.sqrt(15.0),
    "G",
    "jax#8732",
    "gauge-invariant; needs eigh/svd rule not masks",
)
case(
    "vmap_cond_log",
    lambda x: jnp.sum(jax.vmap(lambda t: jax.lax.cond(t > 0, jnp.log, lambda t: 0.0 * t, t))(x)),
    A(1.0, 0.0),
    A(1.0, 0.0),
    "S",
    "jax PR#5658 (already handled)",
)
case(
    "dyn_slice",
    lambda x: jax.lax.dynamic_slice(jnp.log(x), (jnp.argmax(x) * 0 + 1,), (2,)).sum(),
    A(0.0, 1.0, 2.0),
    A(0.0, 1.0, 0.5),
    "S",
    "jax#1052 indexing class",
)
case(
    "concat_slice",
    lambda x: jnp.concatenate([jnp.log(x), x])[2:].sum(),
    A(0.0, 1.0),
    A(1.0, 1.0),
    "S",
    "class: concat+slice",
)
case(
    "matmul_masked",
    lambda x: (jnp.ones((2, 2)) @ jnp.where(A(True, False), x, jnp.log(x))).sum(),
    A(3.0, 0.0),
    A(2.0, jnp.inf),
    "N",
    "selected log(0)",
    "live singular path must stay inf",
)
case("max_reduce", lambda x: jnp.max(jnp.where(x > 0, x, -1.0) * 1.0 + 0 * x), A(1.0, 2.0), A(0.0, 1.0), "S", "sanity")
case(
    "while_fwd_select",
    lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.where(x > 0, jnp.log(x), 0.0), 0.0),
    0.0,
    0.0,
    "S",
    "fori (scan) class",
)
case(
    "segment_oob",
    lambda d: jax.ops.segment_sum(d, jnp.array([2, 3]), 2).sum(),
    A(1.0, 1.0),
    A(0.0, 0.0),
    "O",
    "jax#8634 (fixed)",
)
case(
    "oob_default",
    lambda p: p[jnp.array([5])].sum(),
    A(1.0, 2.0),
    A(0.0, 1.0),
    "O",
    "jax#5760 (x[i] gather defaults to PROMISE_IN_BOUNDS)",
)
case(
    "oob_scalar_dyn",
    lambda p: p[jnp.argmax(p) + 4],
    A(1.0, 2.0),
    A(0.0, 1.0),
    "O",
    "jax#5760, scalar index lowers to dynamic_slice (clamps both ways)",
)
case(
    "norm_sq",
    lambda x: jnp.linalg.norm(x) ** 2,
    A(0.0, 0.0),
    A(0.0, 0.0),
    "M",
    "jax#21723",
    "composite smooth; mask must NOT claim, strict -> NaN",
)
case("sqrt_sq", lambda x: jnp.sqrt(x) ** 2, 0.0, nan, "N", "jax#1052", "keep NaN")
case("atan2_00", lambda x: jnp.arctan2(x, x), 0.0, nan, "N", "jax#1052")
case("std_const", jnp.std, A(1.0, 1.0), A(nan, nan), "N", "jax#11716")
case(
    "arccos_clip_out",
    lambda y: jnp.arccos(jnp.clip(y, -1.0, 1.0)),
    10.0,
    0.0,
    "I",
    "jax#23649",
    "zero on INPUT side: clip kills tangent; f is locally constant => 0",
)
case("sqrt_where_neg", lambda x: jnp.sqrt(jnp.where(x > 0, x, 0.0)), -1.0, 0.0, "I", "rev ok, fwd NaN")
case("pow_float_exp", lambda x: x**2.0, 0.0, 0.0, "M", "sanity")
case("pow_xy_00", lambda xy: xy[0] ** xy[1], A(0.0, 2.0), A(0.0, 0.0), "M", "0**y=0 for y>0")
case("pow_half", lambda x: x**0.5, 0.0, inf, "N", "true derivative +inf")
case("sinc0_dd", jax.grad(jnp.sinc), 0.0, -(np.pi**2) / 3, "M", "sinc'' = -pi^2/3")
case("logaddexp_inf", lambda x: jnp.logaddexp(-jnp.inf + 0 * x, x), 1.0, 1.0, "M", "logaddexp(-inf,x)=x")
case("xlogy_00", lambda x: jax.scipy.special.xlogy(0.0 * x, x), 0.0, nan, "N", "")
case("tanh_big", jnp.tanh, 200.0, 0.0, "M", "jax#764 (fixed)")
case(
    "rbf_of_norm",
    lambda x: jnp.exp(-0.5 * jnp.linalg.norm(x - A(1.0, 2.0)) ** 2),
    A(1.0, 2.0),
    A(0.0, 0.0),
    "M",
    "smooth composite",
)
case(
    "cosine_zero",
    lambda x: jnp.vdot(x, A(1.0, 0.0)) / (jnp.linalg.norm(x) * 1.0),
    A(0.0, 0.0),
    A(nan, nan),
    "N",
    "0/0 value also NaN",
)
case("cumprod_zero", lambda x: jnp.cumprod(x).sum(), A(0.0, 2.0, 3.0), A(1 + 2 + 6.0, 0.0, 0.0), "M", "sanity")
case("abs0", jnp.abs, 0.0, 1.0, "C", "convention: abs rule is select(x>=0,g,-g) => +1")
case("abs_complex0", lambda x: jnp.abs(x + 0j), 0.0, 0.0, "C", "jax#10515/PR#10800")
case("det3_sing", lambda m: jnp.linalg.det(m), jnp.ones((3, 3)), jnp.zeros((3, 3)), "M", "rank1 3x3: adjugate 0")
case(
    "softplus_log1pexp",
    lambda x: jnp.log(1 + jnp.exp(x)),
    1000.0,
    nan,
    "V",
    "primal inf; numerical overflow not structural",
)
case("double_where_ok", lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0), 0.0, 0.0, "S", "FAQ")
case("where_sqrt_x_5798", lambda x: jnp.where(x < 1.0, x, jnp.sqrt(x)), 0.0, 1.0, "S", "jax#5798")
case(
    "cond_in_vmap_const",
    lambda x: jax.vmap(lambda t: jnp.where(t > 0, 1 / t, 0.0))(x).sum(),
    A(0.0, 2.0),
    A(0.0, -0.25),
    "S",
    "class",
)
case("clip_recip", lambda x: jnp.clip(1.0 / x, -5.0, 5.0), 0.0, 0.0, "S", "jax#23649 class")
case(
    "argmax_gather",
    lambda x: jnp.take_along_axis(jnp.log(x), jnp.array([1]), 0).sum(),
    A(0.0, 2.0),
    A(0.0, 0.5),
    "S",
    "jax#1052 indexing",
)
case(
    "attn_allmasked_row",
    lambda s: jnp.where(False, jax.nn.softmax(jnp.where(jnp.array([False, False]), s, -jnp.inf)).sum(), 0.0),
    A(0.0, 1.0),
    A(0.0, 0.0),
    "S",
    "class",
)
case(
    "huber_norm",
    lambda x: jnp.where(jnp.sum(x**2) < 1, 0.5 * jnp.sum(x**2), jnp.sqrt(jnp.sum(x**2)) - 0.5),
    A(0.0, 0.0),
    A(0.0, 0.0),
    "S",
    "jax#3058/#347 class",
)
case(
    "so3_exp_theta",
    lambda w: (lambda th: jnp.where(th < 1e-08, 1.0, jnp.sin(th) / th))(jnp.sqrt(jnp.sum(w**2))),
    A(0.0, 0.0, 0.0),
    A(0.0, 0.0, 0.0),
    "S",
    "robotics SO(3) exp at 0",
)
case("lgamma_where", lambda x: jnp.where(x > 0, jax.lax.lgamma(x), 0.0), 0.0, 0.0, "S", "class")
case(
    "logaddexp_scan",
    lambda x: jax.lax.scan(lambda c, v: (jnp.logaddexp(c, v), None), -jnp.inf, x)[0],
    A(0.0, 0.0),
    A(0.5, 0.5),
    "S",
    "class",
)
case("logaddexp_2neginf", lambda x: jnp.logaddexp(-jnp.inf, x), -jnp.inf, nan, "N", "jax#6811")
case("cummax", lambda x: jax.lax.cummax(jnp.sqrt(x))[-1], A(0.0, 4.0), A(0.0, 0.25), "P", "needs cummax rule")
case(
    "at_set_src",
    lambda x: jnp.zeros(2).at[0].set(jnp.sqrt(x[1])).at[1].set(jnp.sqrt(x[0])).at[1].set(0.0).sum(),
    A(0.0, 4.0),
    A(0.0, 0.25),
    "S",
    "class",
)
case(
    "tril_log",
    lambda x: jnp.tril(jnp.log(x)).sum(),
    np.array([[1.0, 0.0], [2.0, 4.0]]),
    np.array([[1.0, 0.0], [0.5, 0.25]]),
    "S",
    "class: tril",
)
case(
    "conv_masked",
    lambda x: jnp.convolve(jnp.where(x > 0, jnp.sqrt(x), 0.0), A(1.0, 1.0)).sum(),
    A(0.0, 4.0),
    A(0.0, 0.5),
    "S",
    "class",
)
case("chol_where", lambda x: jnp.where(x > 0, jnp.linalg.cholesky(jnp.eye(2) * x).sum(), 0.0), 0.0, 0.0, "S", "class")
