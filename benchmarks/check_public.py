"""Losses of public libraries for `python -m benchmarks check`: each is clean, and small enough to wait for.

What is not installed is left out: `python -m pip install diffrax dLux equinox jaxopt numpyro optax optimistix ott-jax
tinygp`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Case = tuple[Callable[..., Any], Any]
RANDOM = np.random.default_rng(1)
normal = lambda *shape: RANDOM.normal(size=shape).astype(np.float32)


def equinox_cnn() -> Case:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 8, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(8, 16, 3, key=keys[1]),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16 * 11 * 11, 10, key=keys[2]),
        ]
    )
    images, labels = normal(8, 1, 28, 28), RANDOM.integers(0, 10, 8)

    def loss(model: Any) -> Any:
        logits = jax.nn.log_softmax(jax.vmap(model)(images))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    return loss, model


def ott_sinkhorn() -> Case:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    y = normal(24, 2) + 1.0

    def loss(x: Any) -> Any:
        problem = linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.5))
        return sinkhorn.Sinkhorn(threshold=1e-6, max_iterations=2000)(problem).reg_ot_cost

    return loss, normal(20, 2)


def jaxopt_implicit() -> Case:
    import jaxopt

    a, b = normal(12, 4), normal(12)

    def loss(p: Any) -> Any:
        ridge = lambda w, p: jnp.mean((a @ w - b) ** 2) + jax.nn.softplus(p) * jnp.sum(w**2)
        found = jaxopt.BFGS(ridge, maxiter=50, tol=1e-5).run(jnp.zeros(4), p).params
        return jnp.sum(jnp.sin(found))

    return loss, np.float32(0.3)


def numpyro_potential() -> Case:
    import numpyro
    from numpyro import distributions
    from numpyro.infer.util import initialize_model

    effects, errors = np.float32([28, 8, -3, 7, -1, 1, 18, 12]), np.float32([15, 10, 16, 11, 9, 11, 10, 18])

    def eight_schools() -> None:
        mu = numpyro.sample("mu", distributions.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", distributions.HalfCauchy(5.0))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", distributions.Normal(mu, tau))
            numpyro.sample("effect", distributions.Normal(theta, errors), obs=effects)

    found = initialize_model(jax.random.key(0), eight_schools)
    return found.potential_fn, found.param_info.z


def optax_losses() -> Case:
    import equinox as eqx
    import optax

    model = eqx.nn.MLP(5, 3, 16, 2, activation=jax.nn.gelu, key=jax.random.key(2))
    inputs, labels, targets = normal(20, 5), RANDOM.integers(0, 3, 20), normal(20, 3)

    def loss(model: Any) -> Any:
        logits = jax.vmap(model)(inputs)
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, 3), 0.1)
        return (
            optax.softmax_cross_entropy(logits, smooth).mean()
            + optax.huber_loss(logits, targets).mean()
            + optax.cosine_distance(logits, targets).mean()
            + optax.sigmoid_focal_loss(logits, smooth).mean()
        )

    return loss, model


def tinygp_likelihood() -> Case:
    from tinygp import GaussianProcess, kernels

    t = np.sort(RANDOM.uniform(0, 10, 40)).astype(np.float32)
    y = np.sin(t) + 0.1 * normal(40)

    def loss(p: Any) -> Any:
        kernel = jnp.exp(p["amplitude"]) * kernels.ExpSquared(jnp.exp(p["scale"])) + kernels.Cosine(p["period"])
        return -GaussianProcess(kernel, t, diag=jnp.exp(p["noise"])).log_probability(y)

    return loss, {
        name: np.float32(value)
        for name, value in (("amplitude", 0.1), ("scale", 0.2), ("period", 3.0), ("noise", -1.0))
    }


def dlux_optics() -> Case:
    import dLux

    optics = dLux.AngularOpticalSystem(
        wf_npixels=32,
        diameter=1.0,
        layers=[("aperture", dLux.layers.TransmissiveLayer(jnp.ones((32, 32)), normalise=True))],
        psf_npixels=16,
        psf_pixel_scale=0.2,
    )
    source = dLux.PointSource(wavelengths=np.float32([1e-6, 1.1e-6]))
    data = normal(16, 16)

    def loss(p: Any) -> Any:
        star = source.set(["position", "flux"], [p["position"] * 1e-6, p["flux"]])
        return jnp.sum((optics.model(star) * 100.0 - data) ** 2)

    return loss, {"position": np.float32([0.1, -0.2]), "flux": np.float32(1.5)}


def diffrax_neural_ode() -> Case:
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(2, 2, 16, 2, activation=jnp.tanh, key=jax.random.key(1))
    times, data = np.linspace(0, 1, 5, dtype=np.float32), normal(5, 2)

    def loss(field: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: field(y)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            jnp.ones(2),
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
            max_steps=64,
        )
        return jnp.mean((solution.ys - data) ** 2)

    return loss, field


def optimistix_fit() -> Case:
    import optimistix

    t = np.linspace(0, 2, 12, dtype=np.float32)
    y = np.exp(-1.3 * t).astype(np.float32)

    def loss(p: Any) -> Any:
        residuals = lambda w, p: w[0] * jnp.exp(-w[1] * t) - y * p["gain"] + p["offset"]
        solver = optimistix.LevenbergMarquardt(1e-5, 1e-5)
        found = optimistix.least_squares(residuals, solver, jnp.ones(2), p, max_steps=64).value
        return jnp.sum(found**2)

    return loss, {"gain": np.float32(1.1), "offset": np.float32(0.1)}


CASES = (
    equinox_cnn,
    ott_sinkhorn,
    jaxopt_implicit,
    numpyro_potential,
    optax_losses,
    tinygp_likelihood,
    dlux_optics,
    diffrax_neural_ode,
    optimistix_fit,
)
