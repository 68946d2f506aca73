"""A jaxpr evaluated in float64 agrees with the function run in float64, at the draws of the function as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.scipy import special

from helpers.tables import table
from partgrad._check.float64 import promoted

diffrax = pytest.importorskip("diffrax")
lx = pytest.importorskip("lineax")
optx = pytest.importorskip("optimistix")

# Numbers that float32 holds exactly: the literals of a jaxpr are rounded, those of a function run in float64 are not.
X = np.array([0.25, 0.8125, 0.4375, 0.625, 0.3125], np.float32)
A = np.random.default_rng(0).integers(-16, 16, (4, 4)).astype(np.float32) / 8
S = A @ A.T + 4 * np.eye(4, dtype=np.float32)
C = (A + 1j * A.T).astype(np.complex64)
KEY = jax.random.key(3)
PERCEPTRON = eqx.nn.MLP(5, 2, 8, 2, key=KEY)


@jax.custom_vjp
def with_vjp(x):
    return x * jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, c: (c * x,))


@jax.custom_jvp
def with_jvp(x):
    return x * jnp.exp(x)


with_jvp.defjvp(lambda x, t: (with_jvp(x[0]), t[0] * x[0]))


def gru(x):
    def step(carry, u):
        z = jax.nn.sigmoid(A @ carry + u)
        return (1 - z) * carry + z * jnp.tanh(A.T @ carry * z), carry.sum()

    return lax.scan(step, jnp.zeros(4, x.dtype), x)


def likelihood(scale):
    covariance = jnp.exp(-(((X[:, None] - X) / scale) ** 2)) + jnp.eye(5, dtype=scale.dtype) / 8
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(covariance), True), jnp.sin(X.astype(scale.dtype)))


def in_half(dtype):
    return lambda x: jnp.sin(jnp.cos(x).astype(dtype)).astype(x.dtype) * x


FUNCTIONS = {
    "gaussian process": (likelihood, np.float32(0.375)),
    "perceptron": (lambda w: jax.nn.silu(w @ jax.nn.softplus(w @ jnp.ones(4, w.dtype))), A),
    "recurrent": (gru, X),
    "recurrent, derived": (jax.grad(lambda x: gru(x)[0].sum()), X),
    "eigh": (jnp.linalg.eigh, S),
    "svd": (jnp.linalg.svd, A),
    "eigvals": (lambda a: jnp.sort(jnp.abs(jnp.linalg.eigvals(a))), A),
    "factors": (lambda a: (jnp.linalg.qr(a), jnp.linalg.inv(a), jnp.linalg.slogdet(a), lax.linalg.lu(a)), S),
    "fft": (lambda a: (jnp.fft.rfft(a), jnp.fft.ifft(a), jnp.fft.fft2(a * 1j)), A),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x), lax.top_k(x, 3), jnp.median(x)), X),
    "special": (lambda x: (special.erf(x), special.gammaln(x), special.digamma(x), special.i0e(x), jnp.cbrt(x)), X),
    "special of two": (lambda x: (special.gammainc(x, 2 * x), special.xlogy(x, x)), X),
    "cond": (lambda x: (lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), lax.switch(1, [jnp.sin, jnp.tan], x)), X),
    "while": (lambda x: lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] * 1.25, c[1] + 1), (x, 0)), X),
    "while of a batch": (
        jax.vmap(lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] * 1.25 + 1 / c[0], c[1] + 1), (x, 0))),
        X,
    ),
    "custom rules": (lambda x: (with_vjp(x), with_jvp(x), jax.vmap(with_vjp)(x), jax.vmap(with_jvp)(x)), X),
    "solve": (lambda a: jnp.linalg.solve(a, jnp.arange(4.0, dtype=a.dtype)), S),
    "solve of many": (jax.vmap(lambda a: jnp.linalg.solve(a, a @ a)), np.stack([S, 2 * S])),
    "solve, derived": (jax.grad(lambda a: jnp.linalg.solve(a, a @ a).sum()), S),
    "iterative solve": (
        lambda a: jax.scipy.sparse.linalg.cg(a, jnp.ones(4, a.dtype), tol=2.0**-40, maxiter=99)[0],
        S,
    ),
    "custom root": (
        lambda b: lax.custom_root(
            lambda y: y**3 - b,
            jnp.ones_like(b),
            lambda f, start: lax.fori_loop(0, 30, lambda _, y: y - f(y) / jax.grad(f)(y), start),
            lambda g, y: y / g(jnp.ones_like(y)),
        ),
        np.float32(2),
    ),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x) ** 2), X),
    "kinks": (lambda x: (jnp.clip(x, 0.375, 0.5), jax.nn.relu(x - 0.5), jnp.maximum(x, 0.5), jnp.abs(x)), X),
    "windows": (
        lambda x: (
            jnp.convolve(x, x[::-1]),
            lax.reduce_window(x, -np.inf, lax.max, (2,), (1,), "VALID"),
            lax.reduce_window(x, x.dtype.type(0), lambda a, b: a + b * b, (2,), (1,), "VALID"),
            lax.reduce(x, x.dtype.type(0), lambda a, b: a * a + b, (0,)),
        ),
        X,
    ),
    "window, derived": (jax.grad(lambda x: lax.reduce_window(x, -np.inf, lax.max, (2,), (1,), "VALID")[0]), X),
    "indices": (
        lambda x: (
            jnp.asarray(x).at[jnp.array([0, 0, 1])].add(x[:3]),
            jnp.asarray(x).at[1].mul(3.0).at[2].set(x[0]).at[3].max(0.5),
            jnp.asarray(x).at[jnp.array([1])].apply(jnp.sin),
            jnp.take(x, jnp.array([0, 9]), mode="fill"),
            jnp.searchsorted(x, 0.5),
        ),
        X,
    ),
    "cumulative": (lambda x: (jnp.cumsum(x), jnp.cumprod(x), lax.cumlogsumexp(x), lax.cummax(x)), X),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), X),
    "complex": (lambda c: (c * c.conj(), jnp.abs(c), jnp.angle(c), jnp.linalg.inv(c), c.real, c.astype(c.dtype)), C),
    "integers": (lambda x: (x + (x * 8).astype(np.int32), jnp.floor(x * 8), jnp.sign(x), x > 0.5, jnp.argmax(x)), X),
    "reductions": (lambda x: (jax.nn.logsumexp(x), jax.nn.softmax(x), jnp.linalg.norm(x), jnp.var(x)), X),
    "second derivative": (jax.hessian(lambda a: jnp.linalg.slogdet(a)[1]), S),
}
DRAWS = {
    "uniform": lambda x: jax.random.uniform(KEY, (5,), x.dtype, -x, x),
    "normal": lambda x: x * jax.random.normal(KEY, (5,)),
    "old key": lambda x: x * jax.random.normal(jax.random.PRNGKey(2), (5,)),
    "split": lambda x: x * jax.random.normal(jax.random.split(jax.random.fold_in(KEY, 4))[0], (5,)),
    "truncated normal": lambda x: jax.random.truncated_normal(KEY, -x, x, (5,)),
    "gamma": lambda x: jax.random.gamma(KEY, x),
    "categorical": lambda x: x[jax.random.categorical(KEY, x, shape=(5,))],
    "bernoulli": lambda x: x * jax.random.bernoulli(KEY, x),
    "randint": lambda x: x * jax.random.randint(KEY, (5,), 0, 9),
    "permutation": lambda x: jax.random.permutation(KEY, x),
}


def evaluated(function, *args):
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args)
    evaluation = promoted(jaxpr)
    with jax.enable_x64(True):
        return jax.jit(evaluation)(*args)


def wide(x):
    return jnp.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def assert_same(got, expected, rtol, atol=0.0):
    for g, e in zip(got, jax.tree.leaves(expected), strict=True):
        assert g.dtype in (np.float64, np.complex128) or not jnp.issubdtype(g.dtype, jnp.inexact)
        np.testing.assert_allclose(g, e, rtol=rtol, atol=atol)


@table("name", FUNCTIONS)
def test_agrees_with_the_function_run_in_float64(name):
    function, x = FUNCTIONS[name]
    got = evaluated(function, x)
    with jax.enable_x64(True):
        assert_same(got, function(wide(x)), rtol=1e-11, atol=1e-12)


@table("name", DRAWS)
def test_draws_what_the_function_draws(name):
    assert_same(evaluated(DRAWS[name], X), DRAWS[name](X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_rounds_nothing_to_a_lower_precision(dtype):
    got = evaluated(in_half(dtype), X)
    with jax.enable_x64(True):
        assert_same(got, in_half(np.float64)(wide(X)), rtol=1e-15)


def test_an_explicit_rounding_is_dropped():
    (got,) = evaluated(lambda x: lax.reduce_precision(x / 3, 5, 2), X)
    np.testing.assert_allclose(got, X.astype(float) / 3, rtol=1e-15)


@pytest.mark.parametrize("name", ["recurrent", "while", "indices"])
def test_changes_nothing_where_all_is_in_float64(name):
    function, x = FUNCTIONS[name]
    with jax.enable_x64(True):
        assert_same(evaluated(function, wide(x)), jax.jit(function)(wide(x)), rtol=1e-13, atol=1e-14)


def test_bits_of_a_number_are_those_of_its_own_width():
    (got,) = evaluated(lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
    np.testing.assert_array_equal(got, X.view(np.int32))


def test_python_code_is_called_as_it_was():
    dtypes = []

    def called(x):
        dtypes.append(x.dtype)
        return np.sin(x)

    (got,) = evaluated(lambda x: jax.pure_callback(called, jax.ShapeDtypeStruct((5,), np.float32), x) * x, X)
    assert set(dtypes) == {np.dtype(np.float32)}
    np.testing.assert_array_equal(got, np.sin(X).astype(float) * X)


def test_prints_nothing(capfd):
    def printing(x):
        jax.debug.print("x = {}", x)
        return 2 * x

    (got,) = evaluated(printing, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(got, 2.0 * X)
    assert not capfd.readouterr().out


def test_known_constants_of_derivatives_are_not_rounded():
    (got,) = evaluated(jax.grad(special.erf), np.float32(0.5))
    np.testing.assert_allclose(got, 2 / np.sqrt(np.pi) * np.exp(-0.25), rtol=1e-15)


def test_a_rule_stands_in_for_equations_at_every_depth():
    twice = lambda chain, operands: [2 * operands[0]] if chain[-1].primitive.name == "sin" else None
    jaxpr = jax.make_jaxpr(lambda x: lax.scan(lambda c, u: (c + jax.jit(jnp.sin)(u), None), 0.0, x)[0])(X)
    evaluation = promoted(jaxpr, twice)
    with jax.enable_x64(True):
        np.testing.assert_allclose(evaluation(X)[0], 2 * X.sum(dtype=float), rtol=1e-12)


class OtherPrimitive:
    """Functions of other libraries, which have primitives of their own."""

    @staticmethod
    def ode(x):
        term = diffrax.ODETerm(lambda t, y, a: -a[0] * y + a[1] * jnp.sin(t))
        start = jnp.array([1, 0.5], x.dtype)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 2, 0.125, start, args=x).ys

    @staticmethod
    def root(x):
        solver = optx.Newton(rtol=2.0**-40, atol=2.0**-40)
        return optx.root_find(lambda y, a: y**3 + a[0] * y - a[1], solver, jnp.array(0.5, x.dtype), args=x).value

    @staticmethod
    def linear(x):
        operator = lx.MatrixLinearOperator(jnp.outer(x, x) + jnp.eye(5, dtype=x.dtype))
        return lx.linear_solve(operator, x).value

    @staticmethod
    def linear_function(x):
        structure = jax.ShapeDtypeStruct((5,), x.dtype)
        operator = lx.FunctionLinearOperator(lambda v: x * v + v.sum(), structure)
        return lx.linear_solve(operator, jnp.ones(5, x.dtype), lx.LU()).value

    @staticmethod
    def perceptron(x):
        return jax.tree.map(lambda leaf: leaf.astype(x.dtype) if eqx.is_array(leaf) else leaf, PERCEPTRON)(x)

    @staticmethod
    def guarded(x):
        return eqx.error_if(x, x[0] < 0, "negative") ** 2

    @staticmethod
    def checkpointed_loop(x):
        step = lambda c: (c[0] + 1, c[1] * x)
        return eqx.internal.while_loop(lambda c: c[0] < 5, step, (0, x), kind="checkpointed", max_steps=16)[1]


@pytest.mark.slow
@pytest.mark.parametrize("function", [f for name, f in vars(OtherPrimitive).items() if name[0] != "_"])
def test_enters_what_other_libraries_add(function):
    got = evaluated(function.__func__, X)
    with jax.enable_x64(True):
        # The coefficients of an ODE solver are rounded.
        assert_same(got, function.__func__(wide(X)), rtol=1e-7 if function.__func__.__name__ == "ode" else 1e-12)


def test_a_primitive_that_runs_python_code_is_left_at_its_own_width():
    (got,) = evaluated(lambda x: eqx.internal.noinline(lambda x: x * jnp.sin(x))(x), X)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, X * np.sin(X), rtol=1e-6)


def test_an_operation_that_refuses_float64_runs_at_its_own_width():
    """As a kernel of the user's does that was written for one dtype."""

    def in_single(x):
        if np.asarray(x).dtype != np.float32:
            raise TypeError("only float32")
        return np.sin(x)

    kernel = Primitive("kernel")
    kernel.def_impl(in_single)
    kernel.def_abstract_eval(lambda aval: aval)
    jaxpr = jax.make_jaxpr(lambda x: 3 * kernel.bind(x) + x)(X)
    with jax.enable_x64(True):
        (found,) = promoted(jaxpr)(X.astype(float))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, 3.0 * np.sin(X).astype(float) + X)
