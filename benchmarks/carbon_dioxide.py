"""The log marginal likelihood of the Mauna Loa data with its gradient, from the same parameters in each library."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import partgrad as pg

from .timing import Effort, Row, compared, example

# Relative, of the value and of the gradient by the logarithm of each parameter.
AGREES = 1e-6
Way = Callable[[], tuple[float, np.ndarray]]


def likelihood(effort: Effort) -> Iterator[Row]:
    """One value and gradient by eleven parameters, the period held."""
    mauna_loa = example("mauna_loa")
    with jax.enable_x64(True):
        t, y = mauna_loa.load_co2()
        y = y - y.mean()
        if effort.is_quick:
            t, y = t[::8], y[::8]
        kernel = mauna_loa.book_kernel()
        ways: dict[str, Way] = {"partgrad": _ours(mauna_loa, kernel, t, y)}
        left_out = []
        for name, make in (("scikit-learn", _scikit_learn), ("tinygp", _tinygp), ("GPJax", _gpjax)):
            try:
                ways[name] = make(kernel, t, y)
            except ImportError as error:
                left_out.append(f"{name}: {error}")
        value, gradient = ways["partgrad"]()
        for name, way in ways.items():
            theirs, slopes = way()
            agrees = np.allclose(theirs, value, rtol=AGREES, atol=0)
            agrees &= np.allclose(slopes, gradient, rtol=AGREES, atol=AGREES * np.abs(gradient).max())
            if not agrees:
                raise AssertionError(f"{name} has another likelihood: {theirs} {slopes}, not {value} {gradient}")
        limits = dict.fromkeys(list(ways)[1:], 1.0)
        row = compared(effort, f"log likelihood and gradient, {len(t)} points", ways, limits)
        ours = (
            "partgrad's example states its derivative by the inverse (Rasmussen & Williams, eq. 5.9); tinygp and GPJax "
            "differentiate the Cholesky factorisation, which costs one more product of matrices"
        )
        row.notes = "; ".join([f"value {value:.8f}, all agree to {AGREES:g}", ours, *left_out])
        yield row


def _flat(free: Any) -> np.ndarray:
    return np.array([float(leaf) for leaf in jax.tree.leaves(free)])


def _ours(mauna_loa: Any, kernel: Any, t: Any, y: Any) -> Way:
    log = jax.tree.map(jnp.log, kernel)
    both = jax.jit(pg.value_and_grad(lambda k: mauna_loa.log_marginal_likelihood(jax.tree.map(jnp.exp, k), t, y)))

    def way() -> tuple[float, np.ndarray]:
        value, gradient = both(log)
        return float(value), _flat(gradient)

    return way


def _parameters(kernel: Any) -> Any:
    """The logarithms of the eleven free parameters, in the order of the leaves."""
    return jnp.log(jnp.asarray(_flat(pg.partition(kernel)[0])))


def _scikit_learn(kernel: Any, t: Any, y: Any) -> Way:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import (
        RBF,
        ConstantKernel,
        ExpSineSquared,
        RationalQuadratic,
        WhiteKernel,
    )

    trend, (seasonal, periodic), irregular, short, noise = (getattr(term, "factors", term) for term in kernel.terms)
    squared = lambda k: ConstantKernel(float(k.amplitude) ** 2)
    cycle = ExpSineSquared(float(periodic.smoothness), float(periodic.period), periodicity_bounds="fixed")
    whole = (
        squared(trend) * RBF(float(trend.lengthscale))
        + squared(seasonal) * RBF(float(seasonal.lengthscale)) * cycle
        + squared(irregular) * RationalQuadratic(float(irregular.lengthscale), float(irregular.alpha))
        + squared(short) * RBF(float(short.lengthscale))
        + WhiteKernel(float(noise.amplitude) ** 2)
    )
    process = GaussianProcessRegressor(whole, alpha=0.0, optimizer=None)
    process.fit(np.asarray(t)[:, None], np.asarray(y))
    theta = process.kernel_.theta
    # Its parameters in the order of partgrad's leaves; it differentiates by the logarithm of a variance.
    names = [h.name for h in process.kernel_.hyperparameters if not h.fixed]
    order = [names.index(name) for name in _scikit_learn_names()]
    factors = np.array(
        [2.0 if name.endswith(("constant_value", "noise_level")) else 1.0 for name in _scikit_learn_names()]
    )

    def way() -> tuple[float, np.ndarray]:
        value, gradient = process.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
        return float(value), gradient[order] * factors

    return way


def _scikit_learn_names() -> list[str]:
    trend, seasonal, irregular = "k1__k1__k1__k1__", "k1__k1__k1__k2__", "k1__k1__k2__"
    short, noise = "k1__k2__", "k2__"
    return [
        *(trend + "k1__constant_value", trend + "k2__length_scale"),
        *(seasonal + "k1__k1__constant_value", seasonal + "k1__k2__length_scale", seasonal + "k2__length_scale"),
        *(irregular + "k1__constant_value", irregular + "k2__length_scale", irregular + "k2__alpha"),
        *(short + "k1__constant_value", short + "k2__length_scale"),
        noise + "noise_level",
    ]


def _tinygp(kernel: Any, t: Any, y: Any) -> Way:
    import tinygp

    ks, period = tinygp.kernels, float(kernel.terms[1].factors[1].period)

    @jax.jit
    @jax.value_and_grad
    def both(log: Any) -> Any:
        p = jnp.exp(log)
        whole = p[0] ** 2 * ks.ExpSquared(p[1])
        whole += p[2] ** 2 * ks.ExpSquared(p[3]) * ks.ExpSineSquared(scale=period, gamma=2 / p[4] ** 2)
        whole += p[5] ** 2 * ks.RationalQuadratic(scale=p[6], alpha=p[7])
        whole += p[8] ** 2 * ks.ExpSquared(p[9])
        return tinygp.GaussianProcess(whole, t, diag=p[10] ** 2).log_probability(y)

    log = _parameters(kernel)

    def way() -> tuple[float, np.ndarray]:
        value, gradient = both(log)
        return float(value), np.asarray(gradient)

    return way


def _gpjax(kernel: Any, t: Any, y: Any) -> Way:
    import gpjax

    ks, period = gpjax.kernels, float(kernel.terms[1].factors[1].period)
    data = gpjax.Dataset(X=t[:, None], y=y[:, None])

    @jax.jit
    @jax.value_and_grad
    def both(log: Any) -> Any:
        p = jnp.exp(log)
        whole = ks.RBF(lengthscale=p[1], variance=p[0] ** 2)
        # Its lengthscale of a period is half the book's.
        cycle = ks.Periodic(lengthscale=p[4] / 2, variance=jnp.ones_like(p[4]), period=jnp.asarray(period))
        whole += ks.RBF(lengthscale=p[3], variance=p[2] ** 2) * cycle
        whole += ks.RationalQuadratic(lengthscale=p[6], variance=p[5] ** 2, alpha=p[7])
        whole += ks.RBF(lengthscale=p[9], variance=p[8] ** 2)
        prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=whole, jitter=0.0)
        model = prior * gpjax.likelihoods.Gaussian(obs_stddev=p[10])
        return gpjax.objectives.conjugate_mll(model, data)

    log = _parameters(kernel)

    def way() -> tuple[float, np.ndarray]:
        value, gradient = both(log)
        return float(value), np.asarray(gradient)

    return way
