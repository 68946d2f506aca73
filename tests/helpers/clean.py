"""Functions whose gradient is right, as data: a check must not make an error of anything in them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

import mauna_loa
import partgrad as pg
from kernels import RBF, Periodic, White
from partgrad import safe


class Clean(NamedTuple):
    """A function in which there is nothing to find.

    Attributes:
        name: What it is called.
        function: The function.
        args: The point.
        wrt: What is selected.
        kwargs: Keyword arguments.
        quiet: Whether there must be no warning either.
        x64: Whether it takes float64 (True), float32 (False), or either (None).
        verdict: What the report must say: at a jump nothing is decided.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    wrt: Any = None
    kwargs: Mapping[str, Any] = MappingProxyType({})
    quiet: bool = True
    x64: bool | None = False
    verdict: str = "ok"


class Lazy(NamedTuple):
    """A function that is made in the test: another library, or its parameters, takes a while."""

    name: str
    make: Callable[[], Clean]
    x64: bool | None = False


CLEAN: list[Clean | Lazy] = []
KEY = jax.random.key(0)
F = lambda *values: np.array(values, np.float32)
X = F(0.3, -0.7, 1.1, -1.9)


def clean(*args, **kwargs):
    """Decorate a function with the point at which it is clean."""

    def record(function):
        CLEAN.append(Clean(function.__name__, function, args, **kwargs))
        return function

    return record


def lazy(make=None, *, x64=False):
    """Decorate what makes a function and its point."""
    if make is None:
        return lambda make: lazy(make, x64=x64)
    CLEAN.append(Lazy(make.__name__, make, x64))
    return make


def positive(size, seed=0):
    """A symmetric positive definite matrix of a condition of about ten."""
    square = np.random.default_rng(seed).normal(size=(size, size))
    return (square @ square.T / size + np.eye(size)).astype(np.float32)


# --- Gaussian processes ------------------------------------------------------------------------------------------


@lazy(x64=None)
def small_gaussian_process():
    t = np.linspace(0, 3, 12, dtype=np.float32)
    kernel = RBF(1.5, 0.8) * Periodic(1.2) + White(0.3)
    return Clean("", mauna_loa.log_marginal_likelihood, (kernel, t, np.sin(3 * t)), quiet=False)


@lazy(x64=True)
def mauna_loa_likelihood():
    t, co2 = mauna_loa.load_co2()
    likelihood = lambda kernel, t, y: mauna_loa.log_marginal_likelihood(kernel, t, y)
    y = co2 - co2.mean()
    arguments = (mauna_loa.book_kernel(), t[::8], y[::8])
    # The slope of one leaf is 1e-4 of the others', little more than the noise of the solve.
    return Clean("", likelihood, arguments, x64=True)


# --- networks ----------------------------------------------------------------------------------------------------


@lazy
def mlp():
    model = eqx.nn.MLP(3, "scalar", 8, 2, key=KEY)
    loss = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    return Clean("", loss, (model, jax.random.normal(KEY, (5, 3)), jnp.arange(5.0)))


@lazy
def attention():
    model = eqx.nn.MultiheadAttention(2, 4, inference=True, key=KEY)
    mask = np.tril(np.ones((3, 3), bool))
    loss = lambda model, x: jnp.sum(model(x, x, x, mask) ** 2)
    # The probability of its dropout is a leaf that is dead.
    return Clean("", loss, (model, jax.random.normal(KEY, (3, 4))), quiet=False)


@lazy
def convolution():
    layers = [eqx.nn.Conv2d(1, 2, 3, key=KEY), jax.nn.gelu, eqx.nn.AvgPool2d(2)]
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    return Clean("", loss, (eqx.nn.Sequential(map_to_modules(layers)), jax.random.normal(KEY, (1, 6, 6))))


def map_to_modules(layers):
    return [layer if isinstance(layer, eqx.Module) else eqx.nn.Lambda(layer) for layer in layers]


@lazy
def maximum_pool():
    model = eqx.nn.Sequential([eqx.nn.Conv1d(1, 2, 3, key=KEY), eqx.nn.MaxPool1d(2, 2)])
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    # What the pool starts from is a float of the model as well, by which JAX has no derivative.
    return Clean("", loss, (model, jax.random.normal(KEY, (1, 8))), wrt=lambda model: model.layers[0])


@lazy
def layer_norm():
    loss = lambda model, x: jnp.sum(model(x) ** 3)
    return Clean("", loss, (eqx.nn.LayerNorm(4), jnp.asarray(X)))


@lazy
def gru():
    def loss(cell, xs):
        step = lambda state, x: (cell(x, state), None)
        return jnp.sum(lax.scan(step, jnp.zeros(3), xs)[0] ** 2)

    return Clean("", loss, (eqx.nn.GRUCell(2, 3, key=KEY), jax.random.normal(KEY, (6, 2))))


@lazy
def dropout():
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=KEY), eqx.nn.Dropout(0.5)])
    loss = lambda model, x, key: jnp.sum(model(x, key=key) ** 2)
    return Clean("", loss, (model, jnp.asarray(X), KEY), quiet=False)


@lazy
def activations():
    names = "relu elu selu gelu silu softplus sigmoid tanh leaky_relu celu mish log_sigmoid soft_sign relu6 hard_tanh"
    functions = [getattr(jax.nn, name) for name in names.split()]
    loss = lambda p: sum(jnp.sum(f(p["x"] * p["w"])) for f in functions)
    return Clean("", loss, ({"x": X, "w": F(0.9, 1.1, 1.3, 0.7)},))


@clean({"logits": F(1, 2, 3, -1, 0.5, 2).reshape(2, 3)}, np.array([0, 2]), x64=None)
def cross_entropy(p, labels):
    log_p = jax.nn.log_softmax(p["logits"])
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))


@clean({"embedding": np.arange(12, dtype=np.float32).reshape(4, 3) / 7, "head": F(1, -2, 0.5)}, np.array([0, 2, 2]))
def embedding(p, tokens):
    return jnp.sum(jnp.tanh(p["embedding"][tokens] @ p["head"]))


# --- solvers -----------------------------------------------------------------------------------------------------


@lazy(x64=None)
def ode_solve():
    import diffrax

    def final(p, t1):
        term = diffrax.ODETerm(lambda t, y, args: -args["rate"] * y + args["drive"] * jnp.sin(t))
        y0 = jnp.stack([p["start"], 2 * p["start"]])
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, t1, 0.1, y0, args=p, max_steps=64).ys

    return Clean("", final, ({"rate": F(0.7)[0], "drive": F(0.4)[0], "start": F(1.2)[0]}, 1.0), quiet=False)


@lazy(x64=None)
def adaptive_ode_solve():
    import diffrax

    def final(p):
        term = diffrax.ODETerm(lambda t, y, args: -args["rate"] * y)
        control = diffrax.PIDController(rtol=1e-3, atol=1e-5)
        return diffrax.diffeqsolve(
            term, diffrax.Bosh3(), 0.0, 1.0, 0.1, p["start"], args=p, stepsize_controller=control, max_steps=64
        ).ys

    return Clean("", final, ({"rate": F(0.7)[0], "start": F(1.2)[0]},), quiet=False)


@lazy(x64=None)
def root_find():
    import optimistix

    def root(p):
        residual = lambda x, p: x**3 + p["a"] * x - p["b"]
        return optimistix.root_find(residual, optimistix.Newton(1e-5, 1e-5), jnp.ones_like(p["a"]), p).value

    return Clean("", root, ({"a": F(1.5)[0], "b": F(2.5)[0]},), quiet=False)


@lazy(x64=None)
def least_squares():
    import optimistix

    t = jnp.linspace(0, 1, 5)

    def residual(x, p):
        return x[0] * jnp.exp(-x[1] * t) - p["data"]

    def best(p):
        solver = optimistix.LevenbergMarquardt(1e-4, 1e-4)
        return optimistix.least_squares(residual, solver, jnp.ones(2), p, max_steps=64).value

    return Clean("", best, ({"data": 1.3 * jnp.exp(-0.8 * t)},), quiet=False)


@clean({"a": F(2)[0], "b": F(3)[0]}, x64=None)
def custom_root(p):
    f = lambda x: x**2 - p["a"] * p["b"]

    def solve(f, x):
        return lax.fori_loop(0, 12, lambda _, x: x - f(x) / jax.grad(f)(x), x)

    return lax.custom_root(f, jnp.ones_like(p["a"]), solve, lambda g, y: y / g(jnp.ones_like(y)))


@clean({"matrix": positive(3), "b": F(1, 2, 3)}, x64=None)
def custom_linear_solve(p):
    product = lambda x: p["matrix"] @ x
    solve = lambda product, b: jnp.linalg.solve(p["matrix"], b)
    return lax.custom_linear_solve(product, p["b"], solve, symmetric=True)


@clean({"matrix": positive(3), "b": F(1, 2, 3)}, x64=None, quiet=False)
def conjugate_gradient(p):
    return jsp.sparse.linalg.cg(lambda x: p["matrix"] @ x, p["b"], tol=1e-6)[0]


@jax.custom_vjp
def _fixed_point(a, b):
    return lax.while_loop(lambda s: s[0] < 60, lambda s: (s[0] + 1, jnp.cos(a * s[1]) + b), (0, b))[1]


def _fixed_point_forward(a, b):
    x = _fixed_point(a, b)
    return x, (a, b, x)


def _fixed_point_backward(residuals, g):
    a, b, x = residuals
    _, back = jax.vjp(lambda a, b: jnp.cos(a * x) + b, a, b)
    return back(g / (1 + a * jnp.sin(a * x)))


_fixed_point.defvjp(_fixed_point_forward, _fixed_point_backward)


@clean({"a": F(0.6)[0], "b": F(0.2)[0]}, x64=None)
def implicit_differentiation(p):
    return _fixed_point(p["a"], p["b"])


# --- linear algebra ----------------------------------------------------------------------------------------------

LINALG = {
    "cholesky": lambda m: jnp.linalg.cholesky(m),
    "solve": lambda m: jnp.linalg.solve(m, F(1, 2, 3)),
    "eigenvalues": lambda m: jnp.linalg.eigh(m)[0],
    "eigenvectors": lambda m: jnp.abs(jnp.linalg.eigh(m)[1]),
    "svd": lambda m: jnp.linalg.svd(m[:2], full_matrices=False)[1],
    "qr": lambda m: jnp.linalg.qr(m),
    "inv": lambda m: jnp.linalg.inv(m),
    "slogdet": lambda m: jnp.linalg.slogdet(m)[1],
    "det": lambda m: jnp.linalg.det(m),
    "lstsq": lambda m: jnp.linalg.lstsq(m[:, :2], F(1, 2, 3))[0],
    "pinv": lambda m: jnp.linalg.pinv(m[:, :2]),
    "expm": lambda m: jsp.linalg.expm(m / 4),
    "triangular_solve": lambda m: lax.linalg.triangular_solve(m, m + 1, left_side=True, lower=True),
    "cho_solve": lambda m: jsp.linalg.cho_solve(jsp.linalg.cho_factor(m, lower=True), F(1, 2, 3)),
    "lu": lambda m: jsp.linalg.lu(m)[1:],
    "matrix_norm": lambda m: jnp.linalg.norm(m),
    "nuclear_norm": lambda m: jnp.linalg.norm(m, "nuc"),
    "general_eigenvalues": lambda m: jnp.linalg.eigvals(m + F(0, 1, 2)),
    "matrix_power": lambda m: jnp.linalg.matrix_power(m, 3),
    "einsum": lambda m: jnp.einsum("ij,jk,ki->i", m, m, m),
}
CLEAN += [
    Clean(
        f"linalg_{name}",
        (lambda f: lambda p: f(p["matrix"]))(f),
        ({"matrix": positive(3)},),
        # Its derivative is that of a matrix that moves symmetrically.
        quiet=name != "cho_solve",
        x64=None,
    )
    for name, f in LINALG.items()
    if name != "general_eigenvalues" or jax.default_backend() == "cpu"
]

# --- kinks, at generic points and at the kinks -------------------------------------------------------------------

KINKED = {
    "relu": (jax.nn.relu, 0.0),
    "abs": (jnp.abs, 0.0),
    "maximum": (lambda x: jnp.maximum(x, 0.5), 0.5),
    "largest": (jnp.max, 0.0),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), 0.5),
    "sort": (lambda x: jnp.sort(x) * F(1, 2, 3, 4), 0.0),
    "median": (jnp.median, 0.0),
    "leaky_relu": (jax.nn.leaky_relu, 0.0),
    "hinge": (lambda x: jnp.maximum(0, 1 - x), 1.0),
    "huber": (lambda x: jnp.where(jnp.abs(x) < 1, 0.5 * x**2, jnp.abs(x) - 0.5), 1.0),
    "where": (lambda x: jnp.where(x > 0, 2 * x, -x), 0.0),
    "top_k": (lambda x: lax.top_k(x, 2)[0], 0.0),
    "quantile": (lambda x: jnp.quantile(x, 0.3), 0.0),
    "cumulative_maximum": (lax.cummax, 0.0),
    "one_norm": (lambda x: jnp.linalg.norm(x, 1), 0.0),
    "infinity_norm": (lambda x: jnp.linalg.norm(x, jnp.inf), 0.0),
    "modulo": (lambda x: x % 1.0, 1.0),
    "segment_max": (lambda x: jax.ops.segment_max(x, np.array([0, 0, 1, 1]), 2), 0.0),
}
CLEAN += [
    Clean(f"kinked_{name}", (lambda f: lambda p: f(p["x"]) * p["y"])(f), ({"x": X, "y": F(1.5)[0]},), quiet=False)
    for name, (f, _) in KINKED.items()
]
CLEAN += [
    Clean(
        f"kink_of_{name}",
        (lambda f: lambda p: f(p["x"]) * p["y"])(f),
        ({"x": F(kink, kink, 1.7, -0.8), "y": F(1.5)[0]},),
        quiet=False,
        verdict="inconclusive" if name == "modulo" else "ok",
    )
    for name, (f, kink) in KINKED.items()
]

# --- many parameters ---------------------------------------------------------------------------------------------


@clean({"w": np.linspace(-1, 1, 10_000, dtype=np.float32)})
def one_large_leaf(p):
    return jnp.mean(jnp.tanh(p["w"]) ** 2 + p["w"])


@clean({f"w{i:03}": np.linspace(-1, 1, 50, dtype=np.float32) + np.float32(i / 100) for i in range(200)})
def many_leaves(p):
    return sum(jnp.mean(jnp.tanh(w) ** 2) for w in p.values())


# --- float32 alone -----------------------------------------------------------------------------------------------


@clean({"x": X}, x64=None)
def asserts_float32(p):
    assert p["x"].dtype == jnp.float32, f"float32 is what this code is for, not {p['x'].dtype}."
    return jnp.sum(jnp.sin(p["x"]))


@clean({"x": X, "rate": F(0.5)[0]}, x64=None)
def carries_float32(p):
    step = lambda state, x: (state * p["rate"] + jnp.float32(1) * x, None)
    return lax.scan(step, jnp.float32(0), p["x"])[0]


@clean({"x": X, "w": X}, x64=None, quiet=False)
def bfloat16_inside(p):
    hidden = (p["x"].astype(jnp.bfloat16) * p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.sum(jnp.tanh(hidden))


@clean({"x": X, "w": X}, x64=None, quiet=False)
def float16_matmul(p):
    return jnp.dot(p["x"].astype(jnp.float16), p["w"].astype(jnp.float16), preferred_element_type=jnp.float32) ** 2


@clean({"x": X.astype(np.float16)}, quiet=False)
def float16_leaf(p):
    return jnp.sum(jnp.sin(p["x"]))


@clean({"x": jnp.asarray(X, jnp.bfloat16), "y": X}, quiet=False)
def mixed_leaves(p):
    return jnp.sum(jnp.exp(p["x"]) * p["y"])


@clean({"x": F(1.5, 2.5)}, x64=None)
def bits_of_a_float(p):
    exponent = (lax.bitcast_convert_type(p["x"], jnp.int32) >> 23) - 127
    return jnp.sum(p["x"] * 2.0 ** -exponent.astype(jnp.float32))


# --- control flow ------------------------------------------------------------------------------------------------


@clean({"x": X, "rate": F(0.5)[0]}, x64=None)
def scanned(p):
    def step(state, x):
        state = jnp.tanh(p["rate"] * state + x)
        return state, state**2

    last, outputs = lax.scan(step, jnp.zeros_like(p["rate"]), p["x"])
    return {"last": last, "outputs": outputs}


@clean({"x": F(0.5)[0], "y": F(2)[0]}, x64=None)
def branched(p):
    return lax.cond(p["x"] > 0, lambda x: jnp.sin(x), lambda x: x**3, p["x"]) * p["y"]


@clean({"x": X, "y": F(2)[0]}, np.int32(1))
def switched(p, which):
    return jnp.sum(lax.switch(which, [jnp.sin, jnp.cos, jnp.exp], p["x"])) * p["y"]


@clean({"x": F(0.5)[0], "rate": F(1.5)[0]})
def repeated(p):
    return lax.fori_loop(0, 5, lambda i, x: jnp.sin(p["rate"] * x) + 0.1 * i, p["x"])


@clean({"x": F(0.5)[0], "rate": F(1.5)[0]}, np.int32(4))
def repeated_a_side_argument_of_times(p, count):
    return lax.fori_loop(0, count, lambda i, x: jnp.sin(p["rate"] * x), p["x"])


@clean({"x": X}, 7)
def counts_in_a_while(p, number):
    steps = lax.while_loop(lambda s: s[1] > 1, lambda s: (s[0] + 1, s[1] // 2), (0, number))[0]
    return jnp.sum(p["x"] ** 2) * steps


@clean({"x": X, "w": X})
def rematerialised(p):
    return jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(x * w) ** 2))(p["x"], p["w"])


@clean({"x": np.outer(X, X), "w": X})
def vectorised(p):
    return jax.vmap(lambda row, w: jnp.tanh(row @ p["w"]) * w)(p["x"], p["w"])


@clean({"x": F(1, 0, 4), "y": F(2)[0]}, quiet=False)
def branches_in_vmap(p):
    radius = lambda x: lax.cond(x > 0, lambda x: x**0.5, lambda x: x, x)
    return jnp.sum(jax.vmap(radius)(p["x"])) * p["y"]


@clean({"x": X, "y": F(2)[0]})
def gradient_inside(p):
    return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(x) * p["y"]))(p["x"]) ** 2)


@clean({"start": F(2)[0], "rate": F(0.5)[0]})
def unused_carry(p):
    step = lambda state, _: ((state[0] * p["rate"], jnp.log(state[0] - state[0])), None)
    return lax.scan(step, (p["start"], p["start"]), length=2)[0][0]


# --- transforms and special functions ----------------------------------------------------------------------------


@clean({"x": X, "y": X}, x64=None)
def fourier(p):
    return jnp.sum(jnp.abs(jnp.fft.rfft(p["x"]) * jnp.fft.rfft(p["y"])) ** 2)


@clean({"z": np.array([1 + 2j, -0.5 + 0.3j], np.complex64), "w": F(1, 2)}, x64=None)
def complex_leaf(p):
    return jnp.sum(jnp.abs(jnp.exp(p["z"]) * p["w"]) ** 2)


@clean({"z": np.array([1 + 2j, -0.5 + 0.3j], np.complex64)})
def complex_output(p):
    return p["z"] ** 2 * jnp.sin(p["z"])


SPECIAL = {
    "gammaln": jsp.special.gammaln,
    "digamma": jsp.special.digamma,
    "erf": jsp.special.erf,
    "erfinv": lambda x: jsp.special.erfinv(x / 4),
    "betaln": lambda x: jsp.special.betaln(x, x + 1),
    "logsumexp": jsp.special.logsumexp,
    "i0e": jsp.special.i0e,
    "ndtri": lambda x: jsp.special.ndtri(x / 4),
    "log_ndtr": jsp.special.log_ndtr,
    "gammainc": lambda x: jsp.special.gammainc(2.5, x),
    "zeta": lambda x: jsp.special.zeta(3.0, x),
    "expit": jsp.special.expit,
    "xlogy": lambda x: jsp.special.xlogy(x, x),
    "normal_log_density": lambda x: jsp.stats.norm.logpdf(x, 0.5, x),
    "gamma_log_density": lambda x: jsp.stats.gamma.logpdf(x, 2.5),
}
CLEAN += [
    Clean(f"special_{name}", (lambda f: lambda p: f(p["x"]) * p["y"])(f), ({"x": F(0.7, 1.3), "y": F(2)[0]},))
    for name, f in SPECIAL.items()
]
SMOOTH = {
    "sinc": jnp.sinc,
    "interpolation": lambda x: jnp.interp(x, F(0, 1, 2), F(1, 3, 2)),
    "convolution": lambda x: jnp.convolve(x, F(1, -2, 1)),
    "cumulative_product": jnp.cumprod,
    "standard_deviation": jnp.std,
    "power": lambda x: jnp.abs(x) ** x,
    "arctan2": lambda x: jnp.arctan2(x, x + 2),
    "polynomial": lambda x: jnp.polyval(F(1, 2, 3), x),
    "logarithm": lambda x: jnp.log(jnp.abs(x) * 1e-6),
    "scattered": lambda x: jnp.zeros(5).at[np.array([0, 1, 1, 3])].add(x) ** 2,
    "rolled": lambda x: jnp.roll(x, 1) * x,
    "padded": lambda x: jnp.pad(x, 2, mode="reflect") ** 2,
    "windows": lambda x: lax.dynamic_slice(x, (1,), (2,)) ** 2,
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
}
CLEAN += [
    Clean(f"smooth_{name}", (lambda f: lambda p: f(p["x"] * p["y"]))(f), ({"x": X, "y": F(1.5)[0]},), quiet=False)
    for name, f in SMOOTH.items()
]

# --- rules that are right ----------------------------------------------------------------------------------------

_softplus = jax.custom_jvp(lambda x: jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0))
_softplus.defjvp(lambda primals, tangents: (_softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))

_weighted = jax.custom_vjp(lambda w, x: w @ x)
_weighted.defvjp(lambda w, x: (w @ x, (w, x)), lambda wx, g: (jnp.outer(g, wx[1]), wx[0].T @ g))


@clean({"x": F(0.5, -1.5, 0.2), "y": F(1.5)[0]}, x64=None)
def right_forward_rule(p):
    return jnp.sum(jax.vmap(_softplus)(p["x"])) * p["y"]


@clean({"w": positive(3), "x": F(1, 2, 3)}, x64=None)
def right_reverse_rule(p):
    return jnp.tanh(jax.jit(_weighted)(p["w"], p["x"]))


@clean({"x": F(3, 4), "y": F(2)[0]}, quiet=False)
def safe_functions(p):
    return safe.norm(p["x"]) * p["y"] + jnp.sum(safe.sqrt(p["x"]) + safe.log(p["x"]))


@clean({"x": F(0, 0), "y": F(2)[0]}, quiet=False)
def safe_norm_at_zero(p):
    return safe.norm(p["x"]) * p["y"]


# Beside zero, the logarithm is as large as one likes.
@clean({"x": F(0, 1, 4), "y": F(2)[0]}, quiet=False, verdict="inconclusive")
def protected_by_double_where(p):
    root = pg.double_where(lambda x: jnp.where(x > 0, jnp.log(x), 0.0))
    return jnp.sum(root(p["x"])) * p["y"]


@clean({"x": F(0, 1, 4), "y": F(2)[0]}, quiet=False, verdict="inconclusive")
def protected_by_hand(p):
    inside = jnp.where(p["x"] > 0, p["x"], 1.0)
    return jnp.sum(jnp.where(p["x"] > 0, jnp.log(inside), 0.0)) * p["y"]


# --- draws whose gradient is right -------------------------------------------------------------------------------


@clean({"mean": F(1)[0], "scale": F(0.5)[0]}, KEY, x64=None)
def reparameterised_normal(p, key):
    return jnp.mean((p["mean"] + p["scale"] * jax.random.normal(key, (8,))) ** 2)


@clean({"mean": F(1, 2), "factor": np.linalg.cholesky(positive(2))}, KEY)
def reparameterised_normals(p, key):
    return jnp.sum(jnp.sin(p["mean"] + jax.random.normal(key, (4, 2)) @ p["factor"].T))


# --- arguments and outputs ---------------------------------------------------------------------------------------


class Model(NamedTuple):
    weight: Any
    steps: Any
    flag: Any
    nothing: Any
    held: Any


@pg.dataclass
class Held:
    rate: Any
    period: Any = pg.field(nondiff=True, default=1.5)
    degree: int = pg.field(static=True, default=2)


@clean(Model(X, 3, True, None, np.array([1, 2])))
def integers_and_nothing(model):
    return jnp.sum(model.weight**2) * model.steps + jnp.where(model.flag, model.held[1], 0)


@clean(Held(F(0.5)[0]))
def marked_leaves(model):
    return jnp.sin(model.rate / model.period) ** model.degree


@clean(Held(F(0.5)[0]), wrt="period")
def selected_leaf(model):
    return jnp.sin(model.rate / model.period) ** model.degree


@clean({"x": X}, X, kwargs={"power": 3, "offset": F(2)[0], "mode": "sum"})
def keyword_arguments(p, y, *, power, offset, mode):
    return getattr(jnp, mode)((p["x"] + y + offset) ** power)


@clean({"x": X, "y": F(2)[0]})
def tuple_and_integer_outputs(p):
    return jnp.sum(p["x"] ** 2) * p["y"], {"best": jnp.argmax(p["x"]), "x": p["x"] * p["y"]}, "done"


@clean(1.5)
def python_number(x):
    return x**2 * np.pi


@clean({"a": 1.5, "b": [2.5, (3.5,)]}, x64=None)
def python_numbers(p):
    return p["a"] * p["b"][0] ** p["b"][1][0]


@clean({"x": X, "y": F(2)[0]})
def numpy_constants(p):
    return jnp.sum(np.eye(4, dtype=np.float32) @ p["x"] * np.arange(4)) * p["y"]


@clean({"x": F(1e-6, 2e-6), "y": F(1e6)[0]}, quiet=False)
def unlike_but_fine(p):
    return jnp.sum(jnp.log(p["x"])) * jnp.log(p["y"])
