"""`safe`: the values of jax.numpy, its derivatives, and a convention where it has none."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.scipy.special import logsumexp

from helpers.messages import refused
from helpers.tables import table
from partgrad import errors, safe

INF, NAN = np.inf, np.nan
UNARY = {name: getattr(jnp, name) for name in ("sqrt", "cbrt", "log", "reciprocal", "arccos", "arcsin")}
BINARY = {name: getattr(jnp, name) for name in ("divide", "arctan2", "power")}
REDUCTIONS = {"norm": jnp.linalg.norm, "std": jnp.std, "var": jnp.var, "logsumexp": logsumexp}
SECOND = [(jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)]


def dtypes(x64):
    return (jnp.float64,) if x64 else (jnp.float32, jnp.bfloat16, jnp.float16)


def special(dtype):
    """Ordinary, singular, huge, tiny, subnormal, infinite and NaN numbers."""
    info = jnp.finfo(dtype)
    edges = (info.max, -info.max, info.tiny, -info.tiny, info.tiny / 16, info.eps, 1 - info.epsneg, 1 + info.eps)
    return jnp.array([0.0, -0.0, 1, -1, 0.5, -0.5, 2, -3, INF, -INF, NAN, *map(float, edges)], dtype)


def assert_same(found, expected, ulps=0, signs=True):
    """Equal to the bit, but for which NaN, and for the sign of a zero on demand; or to a few units in the last place."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        wide = np.complex128 if jnp.iscomplexobj(f) else np.float64
        rtol = ulps * float(jnp.finfo(f.dtype).eps) if ulps else 0
        np.testing.assert_allclose(np.asarray(f, wide), np.asarray(e, wide), rtol=rtol, atol=0)
        if signs and not ulps and wide is np.float64:
            f, e = (np.asarray(x, wide) for x in (f, e))
            np.testing.assert_array_equal(np.signbit(f)[~np.isnan(f)], np.signbit(e)[~np.isnan(e)])


def pull(f, *args):
    value, back = jax.vjp(f, *args)
    return jax.tree.map(np.asarray, (value, back(jax.tree.map(jnp.ones_like, value))))


# --- elementwise -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_operand(name, x64):
    function, plain = getattr(safe, name), UNARY[name]
    for dtype in dtypes(x64):
        x = special(dtype)
        singular = np.asarray(abs(x) == 1 if name.startswith("arc") else x == 0)
        value, (slope,) = pull(function, x)
        assert_same(function(x), plain(x))
        assert_same(value, plain(x))
        if dtype == dtypes(x64)[0]:
            assert_same(jax.jit(function)(x), jax.jit(plain)(x), ulps=2)
        assert_same(slope[~singular], pull(plain, x)[1][0][~singular], signs=False)
        np.testing.assert_array_equal(np.asarray(slope[singular], float), 0)
        value, tangent = jax.jvp(function, (x,), (jnp.ones_like(x),))
        assert_same(value, plain(x))
        np.testing.assert_array_equal(np.asarray(tangent, float), np.asarray(slope, float))


@table("name", UNARY)
def test_second_derivatives_of_one_operand(name, x64):
    function, plain = getattr(safe, name), UNARY[name]
    x = special(dtypes(x64)[0])
    singular = np.asarray(abs(x) == 1 if name.startswith("arc") else x == 0)
    for outer, inner in SECOND:
        found, expected = (np.asarray(jax.jit(jax.vmap(outer(inner(f))))(x)) for f in (function, plain))
        np.testing.assert_array_equal(found[singular], 0)
        assert_same(found[~singular], expected[~singular], ulps=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands(name, x64):
    function, plain = getattr(safe, name), BINARY[name]
    for dtype in dtypes(x64):
        x, y = map(jnp.ravel, jnp.meshgrid(special(dtype), special(dtype)))
        singular = np.asarray({"divide": y == 0, "arctan2": (x == 0) & (y == 0), "power": x == 0}[name])
        value, slopes = pull(function, x, y)
        assert_same(function(x, y), plain(x, y))
        assert_same(value, plain(x, y))
        assert_same(jax.jit(function)(x, y), jax.jit(plain)(x, y), ulps=4)
        for i, (slope, expected) in enumerate(zip(slopes, pull(plain, x, y)[1], strict=True)):
            assert_same(slope[~singular], expected[~singular], signs=False)
            if name != "power":
                np.testing.assert_array_equal(np.asarray(slope[singular], float), 0)
            one = (lambda x, y=y: function(x, y)) if i == 0 else lambda y, x=x: function(x, y)
            tangent = jax.jvp(one, ((x, y)[i],), (jnp.ones_like(x),))[1]
            # Compiled at the lowest level (conftest.py), a quotient may differ in its last place between the modes.
            assert_same(tangent, jnp.asarray(slope), ulps=2)


@pytest.mark.slow
@table("name", BINARY)
@pytest.mark.parametrize("modes", [*SECOND, (jax.jacrev, jax.jacrev)], ids=["fr", "rf", "rr"])
def test_second_derivatives_of_two_operands(name, modes):
    function, plain = getattr(safe, name), BINARY[name]
    x, y = map(jnp.ravel, jnp.meshgrid(jnp.array([0.0, -0.0, 0.5, 2]), jnp.array([0.0, -0.0, -1, 0.5, 1, 1.5, 2, 3])))
    singular = {"divide": y == 0, "arctan2": (x == 0) & (y == 0), "power": (x == 0) & (y != 2) & (y != 3)}[name]
    singular = np.asarray(singular)
    outer, inner = modes

    def hessian(f):
        return np.array(jax.jit(jax.vmap(outer(inner(f, argnums=(0, 1)), argnums=(0, 1))))(x, y))

    np.testing.assert_array_equal(hessian(function)[..., singular], 0)
    np.testing.assert_allclose(hessian(function)[..., ~singular], hessian(plain)[..., ~singular], rtol=1e-5)


@pytest.mark.slow
def test_power_at_base_zero():
    """Partials that JAX has stay; x ** 1 has slope 1 and x ** y has slope 0 for y > 1."""
    exponents = jnp.array([-2.0, -0.5, 0, 0.5, 1, 1.5, 2, 3])
    base, exponent = jax.vmap(jax.grad(lambda x, y: safe.power(x, y, at_singular=7.0), (0, 1)), (None, 0))(
        0.0, exponents
    )
    np.testing.assert_array_equal(base, [7, 7, 7, 7, 1, 0, 0, 0])
    np.testing.assert_array_equal(exponent, [7, 7, 0, 0, 0, 0, 0, 0])
    assert jax.hessian(safe.power)(0.0, 2.0) == 2
    assert jax.grad(safe.power)(0.0, -1) == jax.grad(jax.grad(safe.power))(0.0, -1) == 0
    assert jax.grad(safe.power)(0.0, -1, at_singular=(3.0, 4.0)) == 3
    assert jax.grad(safe.power)(0.0, jnp.array([-2])[0]) == 0
    assert jax.jit(jax.grad(safe.power))(0.0, -2) == 0
    assert jax.grad(jax.grad(safe.power))(0.0, 2) == 2
    assert jnp.isnan(jax.grad(safe.power, 1)(-2.0, 2.0))
    # A constant exponent has no derivative that could be NaN.
    assert jax.jvp(lambda x: safe.power(x, 2.0), (-2.0,), (1.0,))[1] == -4


@pytest.mark.slow
def test_the_two_derivatives_of_a_pair():
    slopes = jax.grad(safe.divide, (0, 1))
    assert slopes(1.0, 0.0, at_singular=(2.0, 3.0)) == (2, 3)
    assert slopes(1.0, 0.0, at_singular=5.0) == (5, 5)
    assert slopes(1.0, 2.0, at_singular=(2.0, 3.0)) == (0.5, -0.25)
    y, at = jnp.array([0.0, 1, 0]), jnp.array([[1.0], [2]])
    found = jax.grad(lambda y: safe.divide(jnp.ones((2, 1)), y, at_singular=(INF, at)).sum())(y)
    np.testing.assert_array_equal(found, [3, -2, 3])


# --- reductions --------------------------------------------------------------------------------------------------

ROWS = jnp.array([[3.0, 4, 0.5], [0, 0, 0], [2, -2, 2], [0, -0.0, 0], [1, 5, 0], [1e-3, 2e-3, 1e3]])
ORDERS = [None, 1, 2, 1.5, 0.5, 0, -1, INF, -INF]


@pytest.mark.slow
@table("order", ORDERS)
def test_norms_of_vectors(order):
    singular = np.asarray((ROWS == 0).all(1, keepdims=True) | jnp.zeros((1, 3), bool))
    if order == -1:
        singular = singular | np.asarray((ROWS == 0).any(1, keepdims=True))
    if order == 0.5:
        singular = singular | np.asarray(ROWS == 0)
    for dtype in (jnp.float32,) if order else (jnp.float32, jnp.bfloat16):
        x = ROWS.astype(dtype)
        value, (slope,) = pull(lambda x: safe.norm(x, order, axis=-1), x)
        expected, (plain,) = pull(lambda x: jnp.linalg.norm(x, order, axis=-1), x)
        assert_same(safe.norm(x, order, -1), jnp.linalg.norm(x, order, -1))
        assert_same(value, expected)
        assert_same(safe.norm(x, order, 1, True), jnp.linalg.norm(x, order, 1, True))
        np.testing.assert_array_equal(np.asarray(slope, float)[singular], 0)
        np.testing.assert_array_equal(np.asarray(slope, float)[~singular], np.asarray(plain, float)[~singular])
    at = jnp.arange(18.0).reshape(6, 3)
    slope = jax.jit(jax.grad(lambda x: safe.norm(x, order, 1, keepdims=True, at_singular=at).sum()))(ROWS)
    np.testing.assert_array_equal(slope[singular], at[singular])
    forward = jax.jit(jax.jacfwd(lambda x: safe.norm(x, order, 1, at_singular=at).sum()))(ROWS)
    np.testing.assert_allclose(forward, slope, rtol=1e-6)


def test_a_norm_of_another_power_is_jaxs_away_from_zero():
    x = jnp.array([3.0, -4.0, 0.5])
    both = lambda x: [jax.value_and_grad(lambda x: norm(x, 3))(x) for norm in (safe.norm, jnp.linalg.norm)]
    (value, slope), (expected, plain) = jax.jit(both)(x)
    np.testing.assert_allclose([value, *slope], [expected, *plain], rtol=1e-6)


@table("order", [None, 1, 3, 1.5, 0.5, -1])
def test_second_derivatives_of_norms(order):
    rows = jnp.array([[3.0, 4, 0.5], [0, 0, 0], [1, 5, 0]])
    found = [jax.jit(jax.vmap(outer(inner(lambda x: safe.norm(x, order)))))(rows) for outer, inner in SECOND]
    plain = jax.jit(jax.hessian(lambda x: jnp.linalg.norm(x, order)))(rows[0])
    for hessian in found:
        np.testing.assert_array_equal(hessian[1], 0)
        np.testing.assert_allclose(hessian[0], plain, rtol=1e-5, atol=1e-6)
        assert np.isfinite(hessian[2]).all()


@table("order", [None, "fro", "nuc", 1, 2, -2, -INF])
def test_norms_of_matrices(order):
    some = jnp.array([[-3.0, 1], [2, 3], [4, 5.5]])
    x = jnp.stack([jnp.zeros((3, 2)), some])
    value, (slope,) = pull(lambda x: safe.norm(x, order, axis=(1, -1)), x)
    assert_same(value, jnp.linalg.norm(x, order, axis=(1, 2)))
    np.testing.assert_array_equal(slope[0], 0)
    assert_same(slope[1], jax.grad(lambda x: jnp.linalg.norm(x, order))(some), ulps=4)
    x = jnp.moveaxis(x, 0, 1)
    kept = lambda x: safe.norm(x, order, axis=(-1, 0), keepdims=True)
    assert_same(kept(x), jnp.linalg.norm(x, order, axis=(-1, 0), keepdims=True))
    np.testing.assert_allclose(jax.jit(jax.jacfwd(kept))(x), jax.jit(jax.jacrev(kept))(x), rtol=1e-5, atol=1e-6)
    hessian = jax.jit(jax.jacfwd(jax.jacrev(lambda x: safe.norm(x, order))))(jnp.zeros((3, 2)))
    np.testing.assert_array_equal(hessian, 0)


@pytest.mark.slow
def test_the_formulas_of_the_norm():
    """d|x| = x / |x|, and the Hessian is (1 - uu') / |x|."""
    x = jnp.array([2.0, -3, 6])
    np.testing.assert_allclose(jax.grad(safe.norm)(x), x / 7, rtol=1e-6)
    expected = (np.eye(3) - np.outer(x, x) / 49) / 7
    np.testing.assert_allclose(jax.jit(jax.hessian(safe.norm))(x), expected, atol=1e-7)
    assert jax.grad(safe.norm)(jnp.zeros((2, 2, 2))).tolist() == np.zeros((2, 2, 2)).tolist()
    assert jax.grad(safe.norm)(0.0) == 0
    assert safe.norm(jnp.zeros((2, 0)), axis=1).tolist() == [0, 0]
    assert jax.jacrev(lambda x: safe.norm(x, axis=1))(jnp.zeros((2, 0))).shape == (2, 2, 0)


@pytest.mark.slow
def test_a_norm_that_underflows_is_not_at_its_singular_point():
    """The derivative there is JAX's, which is not finite: a real NaN or infinity is not hidden."""
    x = jnp.array([1e-30, 0.0])
    assert safe.norm(x) == 0
    assert_same(jax.grad(safe.norm)(x), jax.grad(jnp.linalg.norm)(x))
    assert not np.isfinite(jax.grad(safe.norm)(x)).all()


SPREAD = jnp.array([[3.0, 4, 0.5], [0.1, 0.1, 0.1], [1, NAN, 2], [INF, INF, INF], [-0.0, 0, 0], [INF, 1, 2]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"ddof": 3}, {"correction": 0.5, "keepdims": True}, {"dtype": jnp.float16}],
    ids=repr,
)
@table("name", ["std", "var"])
def test_deviation_and_variance(name, options):
    function, plain = getattr(safe, name), REDUCTIONS[name]
    value, (slope,) = pull(lambda a: function(a, axis=-1, **options), SPREAD)
    expected, (jax_slope,) = pull(lambda a: plain(a, axis=-1, **options), SPREAD)
    assert_same(function(SPREAD, -1, **options), plain(SPREAD, -1, **options))
    assert_same(value, expected)
    equal = [1, 4] if name == "std" and options != {"ddof": 3} else []
    np.testing.assert_array_equal(slope[np.array(equal, int)], 0)
    rest = [i for i in range(6) if i not in equal]
    assert_same(slope[np.array(rest)], jax_slope[np.array(rest)], ulps=1)


@pytest.mark.slow
def test_the_formulas_of_the_deviation():
    a = jnp.array([1.0, 2, 6])  # mean 3, variance 14/3
    np.testing.assert_allclose(jax.grad(safe.std)(a), (a - 3) / (3 * np.sqrt(14 / 3)), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(safe.var)(a), 2 * (a - 3) / 3, rtol=1e-6)
    for outer, inner in SECOND:
        np.testing.assert_array_equal(jax.jit(outer(inner(safe.std)))(jnp.full(3, 0.1)), 0)
        np.testing.assert_allclose(jax.jit(outer(inner(safe.var)))(a), (np.eye(3) - 1 / 3) * 2 / 3, rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(lambda a: safe.std(a, at_singular=a - 1))(jnp.full(2, 3.0)), [2, 2])
    slopes = jax.grad(lambda a, mean: safe.std(a, mean=mean), (0, 1))(jnp.full(2, 3.0), jnp.array(3.0))
    assert slopes[0].tolist() == [0, 0]
    assert slopes[1] == 0
    assert jax.grad(lambda m: safe.std(jnp.full(2, 3.0), mean=m))(jnp.array(2.0)) == -1
    assert jax.grad(lambda c: safe.std(jnp.full(2, 3.0), correction=c))(jnp.array(0.5)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["std", "var", "logsumexp"])
def test_values_that_where_leaves_out(name):
    """They have derivative 0, and what they hold does not matter: as if they were not there."""
    function, plain = getattr(safe, name), REDUCTIONS[name]
    where = np.array([True, True, False, True])
    masked = lambda a: function(a, where=jnp.array(where))
    kept = jnp.array([1.0, 2, 4])
    slope, curvature = jax.jit(jax.grad(plain))(kept), jax.jit(jax.hessian(plain))(kept)
    first = [jax.jit(mode(masked)) for mode in (jax.jacfwd, jax.jacrev)]
    second = [jax.jit(outer(inner(masked))) for outer, inner in SECOND]
    for hidden in (NAN, INF, -INF, 5.0):
        a = jnp.array([1.0, 2, hidden, 4])
        assert_same(masked(a), plain(a, where=where))
        for f in first:
            assert f(a)[2] == 0
            np.testing.assert_allclose(np.asarray(f(a))[where], slope, rtol=1e-6)
        for f in second:
            found = np.asarray(f(a))
            np.testing.assert_allclose(found[where][:, where], curvature, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(found[2], 0)


@pytest.mark.slow
def test_logsumexp():
    a = jnp.array([[1.0, 2, 3], [-INF, -INF, -INF], [-INF, 0, 1], [INF, 0, 1], [NAN, INF, 1], [INF, -INF, INF]])
    singular = np.array([1, 3, 5])
    rest = np.array([0, 2, 4])
    for kept in (False, True):
        value, (slope,) = pull(lambda a: safe.logsumexp(a, axis=1, keepdims=kept), a)
        expected, (plain,) = pull(lambda a: logsumexp(a, axis=1, keepdims=kept), a)
        assert_same(value, expected)
        np.testing.assert_array_equal(slope[singular], 0)
        assert_same(slope[rest], plain[rest])
    np.testing.assert_allclose(slope[0], np.exp([1, 2, 3]) / np.exp([1, 2, 3]).sum(), rtol=1e-6)
    for outer, inner in SECOND:
        np.testing.assert_array_equal(jax.jit(jax.vmap(outer(inner(safe.logsumexp))))(a)[singular], 0)
    assert safe.logsumexp(jnp.zeros((0, 2)), axis=0).tolist() == [-INF, -INF]


@pytest.mark.slow
def test_logsumexp_with_factors():
    a, b = jnp.array([[0.0, 0, -INF], [0, 1, 2], [1, 1, 0]]), jnp.array([1.0, -1, 2])
    assert_same(safe.logsumexp(a, 1, b), logsumexp(a, 1, b))
    assert_same(safe.logsumexp(a, 1, b, return_sign=True), logsumexp(a, 1, b, return_sign=True))
    slopes = jax.jit(jax.grad(lambda a, b: safe.logsumexp(a, 1, b).sum(), (0, 1)))(a, b)
    plain = jax.jit(jax.grad(lambda a, b: logsumexp(a, 1, b).sum(), (0, 1)))(a[1:], b)
    np.testing.assert_array_equal(slopes[0][0], 0)
    assert_same(slopes[0][1:], plain[0], ulps=4)
    assert_same(slopes[1], plain[1], ulps=4)
    signed = jax.jit(jax.jacrev(lambda a: safe.logsumexp(a, 1, b, return_sign=True)))(a)
    assert np.isfinite(signed[0]).all()
    assert not signed[1].any()
    # The third is left out of the sum, where exp(1000) would overflow.
    where = jnp.array([True, True, False])
    factors = lambda b: safe.logsumexp(jnp.full(3, -1000.0), b=b, where=where)
    slope = jax.jit(jax.grad(factors))(jnp.array([1.0, 3, NAN]))
    np.testing.assert_array_equal(slope, [0.25, 0.25, 0])


# --- complex -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_complex_numbers():
    z = jnp.array([0, 1 + 1j, -2j, 3, -1, 1e-3j], complex)
    for name in ("sqrt", "log", "arccos"):
        function, plain = getattr(safe, name), UNARY[name]
        singular = np.asarray((z == 1) | (z == -1) if name.startswith("arc") else z == 0)
        value, (slope,) = pull(function, z)
        assert_same(value, plain(z))
        assert_same(slope[~singular], pull(plain, z)[1][0][~singular])
        np.testing.assert_array_equal(slope[singular], 0)
        np.testing.assert_array_equal(jax.jvp(function, (z,), (jnp.ones_like(z),))[1], slope)
        second = jax.jit(jax.vmap(jax.grad(jax.grad(function, holomorphic=True), holomorphic=True)))(z)
        np.testing.assert_array_equal(second[singular], 0)
    for name, other in (("divide", z[::-1]), ("power", z * 0 + 0.5)):
        function, plain = getattr(safe, name), BINARY[name]
        value, slopes = pull(function, z, other)
        singular = np.asarray(other == 0 if name == "divide" else z == 0)
        assert_same(value, plain(z, other))
        for slope, expected in zip(slopes, pull(plain, z, other)[1], strict=True):
            assert_same(slope[~singular], expected[~singular])
            np.testing.assert_array_equal(slope[singular], 0)


@pytest.mark.slow
def test_complex_reductions():
    z = jnp.array([[0, 0], [1j, 2], [3, 1j], [1 + 1j, 1 + 1j]])
    for order in (None, 0.5):
        value, (slope,) = pull(lambda z: safe.norm(z, order, axis=1), z)
        expected, (plain,) = pull(lambda z: jnp.linalg.norm(z, order, axis=1), z)
        assert_same(value, expected)
        np.testing.assert_array_equal(slope[0], 0)
        assert_same(slope[1:], plain[1:])
    slope = jax.jit(jax.grad(lambda z: safe.std(z, axis=1).sum()))(z)
    assert_same(slope[1:3], jax.jit(jax.grad(lambda z: jnp.std(z, axis=1).sum()))(z[1:3]), ulps=4)
    np.testing.assert_array_equal(slope[::3], 0)
    # For a real function of complex numbers, `at_singular` is what `jax.grad` returns.
    np.testing.assert_array_equal(jax.grad(lambda z: safe.norm(z, at_singular=1 + 2j))(z[0]), [1 + 2j] * 2)
    a = jnp.array([[-INF + 0j, -INF], [1j, 2]])
    slope = jax.jit(jax.grad(lambda a: safe.logsumexp(a, axis=1).real.sum()))(a)
    np.testing.assert_array_equal(slope[0], 0)
    assert_same(slope[1], jax.jit(jax.grad(lambda a: logsumexp(a).real))(a[1]), ulps=4)


# --- what goes in ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_types_are_those_of_jax_numpy():
    """Python numbers, integers, bools, NumPy arrays and mixed dtypes promote as they do in jax.numpy."""
    half = jnp.array([0.5, 0], jnp.float16)

    def same(name, plain, *args):
        for found, expected in (
            (jax.eval_shape(getattr(safe, name), *args), jax.eval_shape(plain, *args)),
            (getattr(safe, name)(*args), plain(*args)),
        ):
            assert (found.dtype, found.shape, found.weak_type) == (expected.dtype, expected.shape, expected.weak_type)
        assert_same(found, expected)

    for x in (1, 0.5, np.array([0.25, 1]), half):
        for name, plain in (UNARY | REDUCTIONS).items():
            same(name, plain, x)
        for y in (2, half):
            for name, plain in BINARY.items():
                same(name, plain, x, y)
    for args in ((0, 0.5), (half, 2), (jnp.array([0, 1], jnp.int8), half), (0.0, half)):
        for name in BINARY:
            i = 0 if jnp.issubdtype(jnp.result_type(args[0]), jnp.inexact) else 1
            slope = jax.grad(lambda *a, name=name: getattr(safe, name)(*a).astype(float).sum(), i)(*args)
            assert slope.dtype == jnp.result_type(args[i])


def test_signatures():
    """Names, kinds and defaults are those of jax.numpy, and `at_singular` by keyword."""
    for name, plain in (UNARY | BINARY | REDUCTIONS).items():
        found = dict(inspect.signature(getattr(safe, name)).parameters)
        at = found.pop("at_singular")
        assert at.kind is at.KEYWORD_ONLY
        assert at.default == 0
        expected = inspect.signature(plain).parameters
        assert [(p.name, p.kind, p.default) for p in found.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]
        assert getattr(safe, name).__doc__.count("at_singular") >= 2
    assert set(UNARY | BINARY | REDUCTIONS) == set(safe.__all__) - {"where", "eigh", "svd", "matrix_function"}


def test_what_jax_numpy_refuses_is_refused_in_its_words():
    with pytest.raises(TypeError, match="sqrt requires ndarray or scalar arguments, got <class 'list'>"):
        safe.sqrt([1.0])
    for ours, jaxs in [
        (safe.arctan2, jnp.arctan2),
        (safe.norm, jnp.linalg.norm),
        (safe.std, jnp.std),
        (safe.var, jnp.var),
        (safe.logsumexp, jax.scipy.special.logsumexp),
    ]:
        operands = ([1.0],) * (2 if ours is safe.arctan2 else 1)
        with pytest.raises(TypeError) as own:
            ours(*operands)
        with pytest.raises(TypeError) as that_of_jax:
            jaxs(*operands)
        assert str(own.value) == str(that_of_jax.value)
    with pytest.raises(TypeError, match="incompatible shapes for broadcasting"):
        safe.divide(jnp.ones(2), jnp.ones(3))
    with pytest.raises(ValueError, match="Invalid order 'x' for vector norm"):
        safe.norm(jnp.ones(2), "x")
    with pytest.raises(ValueError, match="ddof and correction can't be provided simultaneously"):
        safe.std(jnp.ones(2), ddof=1, correction=1)
    with pytest.raises(TypeError, match="Integers cannot be raised to negative powers"):
        safe.power(2, -1)


def test_at_singular_that_does_not_fit():
    x = jnp.ones(3)
    shape = "`at_singular` of `safe.sqrt` has shape (2,)", "broadcasts to (3,)"
    refused(lambda: safe.sqrt(x, at_singular=jnp.ones(2)), errors.ArgumentError, *shape)
    refused(lambda: safe.sqrt(1.0, at_singular=x), ValueError, "has shape (3,)", "broadcasts to ()")
    refused(lambda: safe.log(x, at_singular=1j), TypeError, "`safe.log` is complex 1j", "Expected a real number")
    refused(lambda: safe.norm(x, at_singular=None), TypeError, "`safe.norm` is NoneType None")
    refused(lambda: safe.std(x, at_singular=[0.0]), TypeError, "`safe.std` is list [0.0]")
    refused(lambda: safe.divide(x, x, at_singular=(1.0, 1j)), TypeError, "`safe.divide` is complex 1j")
    refused(lambda: safe.sqrt(1j, at_singular="0"), TypeError, "Expected a number or array, real or complex")


# --- transformations ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_transformations_compose():
    x = jnp.array([[0.0, 0, 0], [1, 2, 2]])
    norm = lambda x: safe.norm(x, axis=-1)
    expected = jnp.array([[0, 0, 0], [1, 2, 2]]) / 3
    loss = lambda x: norm(x).sum()
    scanned = lambda x: jax.lax.scan(lambda c, row: (c + safe.norm(row), None), 0.0, x)[0]
    for f in (
        jax.grad(loss),
        jax.jit(jax.grad(loss)),
        jax.grad(jax.jit(loss)),
        jax.vmap(jax.grad(norm)),
        jax.grad(lambda x: jax.vmap(norm)(x).sum()),
        jax.grad(jax.checkpoint(loss)),
        jax.grad(scanned),
        jax.jacfwd(scanned),
        lambda x: jax.linear_transpose(jax.linearize(loss, x)[1], x)(1.0)[0],
    ):
        np.testing.assert_allclose(f(x), expected, rtol=1e-6)
    assert jax.jvp(jax.vmap(jax.grad(norm)), (x,), (x,))[1].shape == (2, 3)


@pytest.mark.slow
def test_a_given_derivative_may_be_traced_and_differentiated():
    slope = lambda at: jax.grad(safe.sqrt)(0.0, at_singular=at)
    assert jax.jit(slope)(3.0) == 3
    assert jax.grad(slope)(3.0) == 1
    assert jax.grad(lambda at: safe.sqrt(0.0, at_singular=at))(3.0) == 0
    np.testing.assert_array_equal(jax.vmap(slope)(jnp.arange(3.0)), jnp.arange(3.0))


@pytest.mark.slow
def test_real_nans_are_not_hidden():
    for call, point in ((safe.sqrt, -1.0), (safe.arccos, 1.5), (safe.arcsin, -2.0)):
        assert jnp.isnan(call(point))
        assert jnp.isnan(jax.grad(call)(point))
    assert jnp.isnan(safe.log(-1.0))
    assert jnp.isnan(safe.divide(0.0, 0.0))
    assert jnp.isnan(safe.power(-1.0, 0.5))
    # The true slope is infinite: a derivative of 0 is a number, and does not absorb an infinity.
    assert jnp.isnan(jax.grad(lambda x: jnp.log(safe.sqrt(x)))(0.0))


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, 1e30, 1e-30, INF, -INF, NAN]), min_size=6, max_size=6),
    st.sampled_from(["norm", "std", "var", "logsumexp"]),
)
@settings(max_examples=6)
def test_law_values_are_those_of_jax_numpy(numbers, name):
    """To the bit, beside a gradient too; and a row of which JAX has the gradient keeps it, or is a zero vector."""
    x = jnp.array(numbers).reshape(2, 3)
    function, plain = getattr(safe, name), REDUCTIONS[name]
    value, (slope,) = pull(lambda x: function(x, axis=1), x)
    expected, (jax_slope,) = pull(lambda x: plain(x, axis=1), x)
    assert_same(value, expected)
    for row in range(2):
        if np.isfinite(jax_slope[row]).all() and not (x[row] == x[row, 0]).all():
            np.testing.assert_allclose(slope[row], jax_slope[row], rtol=3e-7)


# --- where -------------------------------------------------------------------------------------------------------


def test_where_gives_functions_only_what_is_selected_for_them():
    seen = []

    def log(x):
        seen.append(np.asarray(x))
        return jnp.log(x)

    x = jnp.array([-1.0, 4, 0, 2])
    found = safe.where(x > 0, log, lambda x: x, x)
    np.testing.assert_array_equal(seen[0], [4, 4, 4, 2])
    np.testing.assert_array_equal(found, jnp.where(x > 0, jnp.log(x), x))
    safe.where(x > 9, log, lambda x: x, x)
    np.testing.assert_array_equal(seen[1], 1)
    safe.where(jnp.zeros((0, 4), bool), log, lambda x: x, x)
    assert seen[2].shape == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_of_where(wrap):
    """jax#1052: the functions are those of the thread, and each derivative is that of the function selected."""
    f = wrap(lambda x: safe.where(x > 0.5, lambda x: jnp.arctan2(x, x), lambda x: 0.0, x))
    assert jax.grad(f)(0.0) == jax.jacfwd(f)(0.0) == jax.grad(jax.grad(f))(0.0) == 0
    x = jnp.array([0.0, 1, 4, -1])
    g = wrap(lambda x: safe.where(x > 0, jnp.sqrt, lambda x: x**3, x))
    for mode in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(mode(g)(x), np.diag([0, 0.5, 0.25, 3]))
    for outer, inner in SECOND:
        second = jnp.einsum("iii->i", jax.jit(outer(inner(g)))(x))
        np.testing.assert_allclose(second, [0, -0.25, -0.03125, -6], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(g))(x), [0, 0.5, 0.25, 3])


@pytest.mark.slow
def test_where_takes_trees_and_broadcasts_them():
    pred = jnp.array([[True], [False]])
    p = {"x": jnp.array([1.0, 2, 4]), "n": 2}
    found = safe.where(pred, lambda p, s: (p["x"] / s, p["n"]), lambda p, s: (p["x"] * 0, 1.5), p, 2.0)
    np.testing.assert_array_equal(found[0], [[0.5, 1, 2], [0, 0, 0]])
    np.testing.assert_array_equal(found[1], [[2], [1.5]])
    slope = jax.grad(lambda s: safe.where(pred, lambda x, s: x / s, lambda x, s: x, p["x"], s).sum())(2.0)
    assert slope == -1.75
    keys = jax.random.split(jax.random.key(0), 2)
    drawn = safe.where(jnp.array([True, False]), lambda k: jax.vmap(jax.random.uniform)(k), lambda k: 0.0, keys)
    np.testing.assert_array_equal(drawn, [jax.random.uniform(keys[0]), 0])


@pytest.mark.slow
def test_where_keeps_rows_whole():
    """Along axes in which `pred` has size 1, a function may mix elements."""
    rows = jnp.array([[0.0, 0], [3, 4], [0, 0]])
    use = jnp.array([False, True, False])[:, None]
    f = lambda x: safe.where(use, lambda x: jnp.linalg.norm(x, axis=1, keepdims=True), lambda x: 0.0, x).sum()
    np.testing.assert_allclose(jax.grad(f)(rows), [[0, 0], [0.6, 0.8], [0, 0]], rtol=1e-6)


def test_where_differentiates_what_its_functions_close_over():
    x = jnp.array([0.0, np.e])
    f = lambda scale: safe.where(x > 0, lambda x: scale * jnp.log(x), lambda x: 0.0, x).sum()
    assert jax.grad(f)(2.0) == pytest.approx(1)


def test_where_refuses():
    x = jnp.ones(2)
    branch = "`true_fun` of `safe.where` is", "which is not callable", "jnp.where"
    refused(lambda: safe.where(x > 0, x, jnp.log, x), TypeError, *branch)
    refused(
        lambda: safe.where(x > 0, jnp.log, 0.0, x), errors.ArgumentError, "`false_fun` of `safe.where` is float 0.0"
    )
    trees = "return trees of different structures", "`true_fun` returned PyTreeDef((*, *))"
    refused(lambda: safe.where(x > 0, lambda x: (x, x), lambda x: x, x), ValueError, *trees)


# --- the page ----------------------------------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "guide" / "safe.md"
CASES = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "point", "written", "derivative"), CASES, ids=[case[0] for case in CASES])
def test_the_answers_of_the_page(name, point, written, derivative):
    with jax.enable_x64(True):
        scope = {"jax": jax, "jnp": jnp, "safe": safe, "pi": np.pi, "inf": INF, "A": lambda *v: jnp.array(v)}
        x, expected = (jnp.asarray(eval(text, scope), float) for text in (point, derivative))
        f = eval(f"lambda x: {written}", scope)
        for mode in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(mode(f))(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_page_has_the_cases():
    assert len(CASES) >= 9
