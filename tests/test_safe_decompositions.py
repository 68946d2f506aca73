"""`safe.matrix_function`, `safe.eigh`, `safe.svd`: derivatives where eigenvalues and singular values are equal."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import expm

from helpers.tables import in_turn, table
from partgrad import errors, safe

SPECTRA = {
    "distinct": [0.4, 0.9, 1.7, 3.0],
    "equal": [1.0, 1.0, 1.0, 1.0],
    "pairs": [1.0, 1.0, 2.0, 2.0],
    "nearly equal": [1.0, 1.0 + 1e-13, 1.0 + 1e-9, 1.0 + 1e-5],
    "two near, two apart": [0.7, 0.7 + 1e-10, 0.9, 2.5],
    "three near": [1.0, 1.001, 1.1, 3.0],
}
# Functions with those of NumPy for complex arguments; all are analytic in a circle around the spectra.
FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "root": (jnp.sqrt, np.sqrt),
    "inverse": (lambda x: 1 / x, lambda z: 1 / z),
    "power": (lambda x: x**-1.5, lambda z: z**-1.5),
    "log": (jnp.log, np.log),
}


def matrices(spectrum, is_complex=False, seed=0):
    """A matrix with a spectrum, and three Hermitian directions."""
    rng = np.random.default_rng(seed)
    n = len(spectrum)
    draw = lambda: rng.normal(size=(n, n)) + (1j * rng.normal(size=(n, n)) if is_complex else 0)
    basis = np.linalg.qr(draw())[0]
    a = (basis * np.array(spectrum)) @ basis.conj().T
    return [(m + m.conj().T) / 2 for m in (a, draw(), draw(), draw())]


def by_contour(fn, a, h, k):
    """The function of a matrix and its first two derivatives, by Cauchy's integral of resolvents.

    The trapezoid rule converges geometrically on a circle, and knows nothing of eigenvalues.
    """
    values = np.linalg.eigvalsh(a)
    centre, radius = (values[0] + values[-1]) / 2, (values[-1] - values[0]) / 2
    # Halfway to the nearest singularity of the functions, which is at 0.
    radius = radius + (centre - radius) / 2
    z = centre + radius * np.exp(2j * np.pi * np.arange(400) / 400)
    weights = fn(z) * (z - centre) / 400
    r = np.linalg.inv(z[:, None, None] * np.eye(len(a)) - a)
    total = lambda terms: np.einsum("z,zij->ij", weights, terms)
    return total(r), total(r @ h @ r), total(r @ h @ r @ k @ r + r @ k @ r @ h @ r)


def scalar(f, w):
    """A nonlinear number made of a matrix."""
    return lambda a: jnp.sum(jnp.real(jnp.conj(w) * f(a))) ** 2


@table("name, spectrum, is_complex", FUNCTIONS, SPECTRA, [False, True], quick=0, most=3)
def test_first_and_second_derivatives_are_those_of_cauchys_integral(name, spectrum, is_complex):
    fn, analytic = FUNCTIONS[name]
    a, h, k, w = matrices(SPECTRA[spectrum], is_complex)
    value, first, second = by_contour(analytic, a, h, k)
    with jax.enable_x64(True):
        f = lambda a: safe.matrix_function(fn, a)
        g = scalar(f, w)
        # Of a number, each order of the modes.
        along = lambda gradient, h: jnp.sum(jnp.real(jnp.conj(gradient) * h))
        # JAX's gradient with respect to complex numbers is the conjugate.
        gradient = lambda a: jnp.conj(jax.grad(g)(a))
        push = lambda a: jax.jvp(g, (a,), (h,))[1]

        @jax.jit
        def everything(a):
            twice = (
                jax.jvp(push, (a,), (k,))[1],
                along(jnp.conj(jax.grad(push)(a)), k),
                along(jax.jvp(gradient, (a,), (k,))[1], h),
                along(jnp.conj(jax.grad(lambda a: along(gradient(a), h))(a)), k),
            )
            return jax.jvp(f, (a,), (h,)), along(gradient(a), h), twice

        (found, slope), along_h, twice = everything(a)
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-12 * (1 + abs(value).max()))
        np.testing.assert_allclose(slope, first, rtol=0, atol=1e-11 * abs(first).max())
        dot = lambda x: np.sum(np.real(np.conj(w) * x))
        slope_along, curvature = 2 * dot(value) * dot(first), 2 * dot(first) * dot(by_contour(analytic, a, k, h)[1])
        curvature += 2 * dot(value) * dot(second)
        assert np.isclose(along_h, slope_along, rtol=1e-10)
        for both in twice:
            assert np.isclose(both, curvature, rtol=1e-8, atol=1e-8 * abs(slope_along))


@pytest.mark.slow
def test_float32_at_equal_eigenvalues():
    a, h, _, _ = (x.astype(np.float32) for x in matrices(SPECTRA["pairs"]))
    assert jax.jvp(lambda a: safe.matrix_function(jnp.exp, a), (a,), (h,))[1].dtype == jnp.float32
    np.testing.assert_allclose(
        jax.jvp(lambda a: safe.matrix_function(jnp.exp, a), (a,), (h,))[1], jax.jvp(expm, (a,), (h,))[1], atol=5e-5
    )


ROOT = functools.partial(safe.matrix_function, jnp.sqrt)


def cubed(a):
    return jnp.sum(ROOT(a) ** 3)


@functools.cache
def one_by_one():
    """Matrices, and the gradient at each by itself."""
    batch = np.stack([matrices(spectrum, seed=i)[0] for i, spectrum in enumerate(SPECTRA.values())])
    return batch, np.stack([jax.grad(cubed)(a) for a in batch])


@pytest.mark.slow
def test_batches():
    with jax.enable_x64(True):
        batch, expected = one_by_one()
        np.testing.assert_allclose(jax.grad(cubed)(batch), expected, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(ROOT(batch) @ ROOT(batch), batch, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("surrounding", [jax.jit, jax.vmap, jax.checkpoint, lambda f: jax.jit(jax.vmap(jax.jit(f)))])
def test_under_transformations(surrounding):
    with jax.enable_x64(True):
        batch, expected = one_by_one()
        f = surrounding(jax.grad(lambda a: cubed(a)))
        np.testing.assert_allclose(f(batch), expected, rtol=1e-10, atol=1e-13)


MODES = (jax.jacfwd, jax.jacrev)


@table("modes", [(mode,) for mode in MODES] + list(itertools.product(MODES, MODES)), quick=0, most=2, kind=len)
def test_what_the_function_closes_over_is_differentiated(modes):
    """The density matrix of electrons, by the matrix, the temperature and the chemical potential."""
    a, w, *_ = matrices([1.0, 1.0, 2.0])

    def density(a, temperature, potential):
        fermi = lambda x: 1 / (jnp.exp((x - potential) / temperature) + 1)
        return jnp.sum(w * safe.matrix_function(fermi, a))

    def exponential(a):
        """By its series, which is sooner compiled than `expm`: an argument of norm 1 / 8, squared four times."""
        total = term = jnp.eye(3)
        for number in range(1, 13):
            term = term @ a / (16 * number)
            total = total + term
        for _ in range(4):
            total = total @ total
        return total

    def by_inverse(a, temperature, potential):
        a = (a + a.T) / 2
        return jnp.sum(w * jnp.linalg.inv(exponential((a - potential * jnp.eye(3)) / temperature) + jnp.eye(3)))

    with jax.enable_x64(True):
        found, expected = density, by_inverse
        for mode in modes:
            found, expected = mode(found, argnums=(0, 1, 2)), mode(expected, argnums=(0, 1, 2))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12),
            *jax.jit(lambda *args: (found(*args), expected(*args)))(a, 0.7, 1.3),
        )


@pytest.mark.slow
def test_a_projector_by_a_step_is_not_smoothed():
    a, h, *_ = matrices([1.0, 1.0, 2.0, 2.0])
    with jax.enable_x64(True):
        step = lambda a: safe.matrix_function(lambda x: jnp.where(x < 1.5, 1.0, 0.0), a)
        _, v = np.linalg.eigh(a)
        inside = v.T @ h @ v
        inside[:2, :2] = inside[2:, 2:] = 0
        expected = v @ (-inside) @ v.T
        np.testing.assert_allclose(jax.jvp(step, (a,), (h,))[1], expected, atol=1e-12)


def test_one_decomposition_serves_value_and_gradient():
    program = str(jax.make_jaxpr(jax.grad(lambda a: safe.matrix_function(jnp.exp, a).sum()))(jnp.eye(3)))
    assert program.count(" eigh[") == 1


@pytest.mark.parametrize(
    ("fn", "a", "words"),
    [
        (jnp.exp, jnp.ones((2, 3)), ["(2, 3)", "square"]),
        (jnp.exp, jnp.ones(3), ["(3,)", "square"]),
        (lambda x: x.sum(), jnp.eye(2), ["float32[]", "float32[2]", "elementwise"]),
        (lambda x: x + 1j, jnp.eye(2), ["complex64[2]", "elementwise"]),
        (lambda x: (x, x), jnp.eye(2), ["elementwise"]),
    ],
)
def test_what_is_no_function_of_a_matrix_is_refused(fn, a, words):
    with pytest.raises(errors.ArgumentError) as caught:
        safe.matrix_function(fn, a)
    assert all(word in str(caught.value) for word in words)


# --- eigh and svd ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_eigh_is_jaxs_where_eigenvalues_differ(is_complex):
    a, h, *_ = matrices([0.4, 0.9, 0.9 + 1e-9, 3.0], is_complex)
    with jax.enable_x64(True):
        found = jax.jvp(safe.eigh, (a,), (h,))
        expected = jax.jvp(jnp.linalg.eigh, (a,), (h,))
        assert type(found[0]) is type(expected[0])
        np.testing.assert_array_equal(safe.eigh(a).eigenvectors, jnp.linalg.eigh(a).eigenvectors)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-14)
        gradient = lambda eigh: jax.grad(lambda a: jnp.real(eigh(a)[1][0, 0] * eigh(a)[0][1]))(a)
        np.testing.assert_allclose(gradient(safe.eigh), gradient(jnp.linalg.eigh), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_eigh_of_a_degenerate_space_as_a_whole(is_complex):
    a, h, _, w = matrices([1.0, 1.0, 1.0, 2.0, 3.0], is_complex)

    def whole(a):
        values, vectors = safe.eigh(a)
        v = vectors[:, :3]
        return jnp.sum(jnp.real(jnp.conj(w) * (v @ v.conj().T))) + jnp.sum(jnp.sin(values[:3])) + values[3] ** 2

    def differences(f, step=1e-4):
        """Central differences of fourth order, of a smooth function."""
        one = lambda s: (f(a + s * h) - f(a - s * h)) / (2 * s)
        return (4 * one(step) - one(2 * step)) / 3

    with jax.enable_x64(True):
        expected = differences(jax.jit(whole))

        @jax.jit
        def everything(a):
            gradient = jax.grad(whole)
            return jax.jvp(whole, (a,), (h,))[1], gradient(a), jax.vmap(gradient)(jnp.stack([a, a]))

        forward, gradient, batch = everything(a)
        assert np.isclose(forward, expected, rtol=1e-9)
        assert np.isclose(jnp.sum(jnp.real(gradient * h)), expected, rtol=1e-9)
        np.testing.assert_array_equal(jnp.isnan(batch), False)


@table("shape, is_complex", in_turn([(3, 3), (5, 3), (3, 5)], [False, True]), quick=0)
def test_svd_is_jaxs_where_singular_values_differ(shape, is_complex):
    rng = np.random.default_rng(1)
    draw = lambda: rng.normal(size=shape) + (1j * rng.normal(size=shape) if is_complex else 0)
    a, h = draw(), draw()
    with jax.enable_x64(True):
        for found, expected in (
            (lambda a: safe.svd(a, False), lambda a: jnp.linalg.svd(a, False)),
            (lambda a: safe.svd(a, compute_uv=False), lambda a: jnp.linalg.svd(a, compute_uv=False)),
        ):
            x, y = jax.jvp(found, (a,), (h,)), jax.jvp(expected, (a,), (h,))
            assert jax.tree.structure(x) == jax.tree.structure(y)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13), x, y)
        # JAX has no derivative of the full matrices: the product must have the tangent of the matrix.
        out, tangent = jax.jvp(safe.svd, (a,), (h,))
        diagonal = lambda s: jnp.zeros(shape, s.dtype).at[jnp.arange(3), jnp.arange(3)].set(s)
        product = (
            tangent[0] @ diagonal(out[1]) @ out[2]
            + out[0] @ diagonal(tangent[1]) @ out[2]
            + out[0] @ diagonal(out[1]) @ tangent[2]
        )
        np.testing.assert_allclose(product, h, atol=1e-13)
        for basis, turned in ((out[0], tangent[0]), (out[2].conj().T, tangent[2].conj().T)):
            np.testing.assert_allclose(turned.conj().T @ basis + basis.conj().T @ turned, 0, atol=1e-13)


SHAPES, SINGULAR = [(3, 3), (5, 3), (3, 5)], [(2.0, 2.0, 1.0), (2.0, 2.0, 2.0), (2.0, 0.0, 0.0)]


@table("shape, singular, is_complex", SHAPES, SINGULAR, [False, True], quick=0, most=5)
def test_svd_of_a_degenerate_space_as_a_whole(shape, singular, is_complex):
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.normal(size=shape) + (1j * rng.normal(size=shape) if is_complex else 0)
    u, v = (np.linalg.qr(draw(n, n))[0] for n in shape)
    a, h = (u[:, :3] * np.array(singular)) @ v[:, :3].conj().T, draw(*shape)
    left, right = (draw(n, n) for n in shape)
    across = draw(*shape)
    rank = sum(s > 1 for s in singular)

    def whole(a):
        u, s, vh = safe.svd(a)
        u, vh = u[:, :rank], vh[:rank]
        total = lambda weight, x: jnp.sum(jnp.real(weight * x))
        return (
            total(left, u @ u.conj().T)
            + total(right, vh.conj().T @ vh)
            + total(across, u @ vh)
            + jnp.sum(s[:rank] ** 3)
        )

    with jax.enable_x64(True):
        one = lambda step: (value(a + step * h) - value(a - step * h)) / (2 * step)
        value = jax.jit(whole)
        expected = (4 * one(1e-4) - one(2e-4)) / 3
        forward, gradient = jax.jit(lambda a: (jax.jvp(whole, (a,), (h,))[1], jax.grad(whole)(a)))(a)
        assert np.isclose(forward, expected, rtol=1e-8)
        assert np.isclose(jnp.sum(jnp.real(gradient * h)), expected, rtol=1e-8)


@pytest.mark.slow
def test_symmetric_and_integer_matrices_and_stacks():
    a = np.array([[2, 1], [1, 2]])
    np.testing.assert_array_equal(safe.svd(a, hermitian=True).U, jnp.linalg.svd(a, hermitian=True).U)
    np.testing.assert_array_equal(safe.eigh(np.stack([a, a])).eigenvalues, jnp.linalg.eigh(np.stack([a, a]))[0])
    np.testing.assert_allclose(safe.matrix_function(jnp.square, a), a @ a, rtol=1e-6)
    lower = jnp.array([[2.0, 0.0], [1.0, 2.0]])
    np.testing.assert_array_equal(safe.eigh(lower, "L", False)[0], jnp.linalg.eigh(lower, "L", False)[0])
    total = lambda a: jnp.sum(safe.svd(a, hermitian=True, compute_uv=False))
    np.testing.assert_allclose(jax.grad(total)(jnp.diag(jnp.array([2.0, -2.0]))), np.diag([1.0, -1.0]), atol=1e-6)
