"""numpyro, blackjax, distrax, tfp, and the Gaussian processes of GPJax and tinygp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decay import Decay, T, Y, residuals, start

import partgrad as pg

SIGMA = 0.05


def laplace(model):
    """The error bars of amplitude and rate, which a sampler must find again."""
    vector, unravel = pg.ravel(model)
    density = lambda vector: (residuals(unravel(vector)) ** 2).sum() / (2 * SIGMA**2)
    return np.sqrt(np.diagonal(np.linalg.inv(jax.hessian(density)(vector))))


def assert_posterior(amplitude, rate):
    truth = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))
    np.testing.assert_allclose([amplitude.mean(), rate.mean()], [2.0, 3.0], atol=0.08)
    np.testing.assert_allclose([amplitude.std(), rate.std()], laplace(truth), rtol=0.25)


@pytest.mark.library("numpyro", lines="for path, leaf in pg.items(model):")
def test_numpyro():
    """NUTS over what is free: a site for each path, put into the model by `pg.replace`"""
    numpyro = pytest.importorskip("numpyro")
    from numpyro.infer import MCMC, NUTS

    def program(model):
        for path, leaf in pg.items(model):
            model = pg.replace(model, path, numpyro.sample(path, numpyro.distributions.Normal(leaf, 10.0)))
        numpyro.sample("y", numpyro.distributions.Normal(model(T), SIGMA), obs=Y)

    mcmc = MCMC(NUTS(program), num_warmup=200, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(0), start())
    samples = mcmc.get_samples()
    assert set(samples) == {"amplitude", "rate"}
    assert_posterior(samples["amplitude"], samples["rate"])


@pytest.mark.library("numpyro", lines='Decay(2.0, 3.0, pg.Diff(numpyro.sample("level", prior)))')
def test_numpyro_diff():
    """a prior on a parameter that the class holds"""
    numpyro = pytest.importorskip("numpyro")
    prior = numpyro.distributions.Normal(0.0, 1.0)

    def program():
        model = Decay(2.0, 3.0, pg.Diff(numpyro.sample("level", prior)))
        numpyro.sample("y", numpyro.distributions.Normal(model(T), SIGMA), obs=Y)

    density = lambda level: numpyro.infer.util.log_density(program, (), {}, {"level": level})[0]
    # At the true level nothing but the prior pulls: the derivative of log Normal(0, 1) at 0.5.
    np.testing.assert_allclose(jax.grad(density)(jnp.array(0.5)), -0.5, atol=1e-3)
    assert jax.grad(density)(jnp.array(0.4)) > 100


@pytest.mark.library("numpyro.distributions")
def test_numpyro_distributions():
    """a distribution as a model: the derivative of its log density by one of its parameters"""
    dist = pytest.importorskip("numpyro.distributions")
    normal = dist.Normal(jnp.array(1.0), jnp.array(2.0))
    gradient = pg.grad(lambda d: d.log_prob(2.0), wrt=lambda d: d.loc)(normal)
    np.testing.assert_allclose(gradient, 0.25)
    frozen = pg.freeze(normal, lambda d: d.scale)
    assert [float(leaf) for leaf in jax.tree.leaves(pg.grad(lambda d: d.log_prob(2.0))(frozen))] == [0.25]


@pytest.mark.library("blackjax", lines="selected, rest = pg.partition(start())")
def test_blackjax():
    """NUTS with window adaptation, its position the selected part"""
    blackjax = pytest.importorskip("blackjax")
    selected, rest = pg.partition(start())

    def density(selected):
        return -(residuals(pg.combine(selected, rest)) ** 2).sum() / (2 * SIGMA**2)

    @jax.jit
    def sample(key):
        warmup = blackjax.window_adaptation(blackjax.nuts, density)
        (state, parameters), _ = warmup.run(key, selected, num_steps=200)
        kernel = blackjax.nuts(density, **parameters)

        def step(state, key):
            state, _ = kernel.step(key, state)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(key, 500))[1]

    samples = sample(jax.random.key(0))
    assert samples.level is None
    assert_posterior(samples.amplitude, samples.rate)


@pytest.mark.library("distrax", lines='wrt="[0]"')
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_distrax():
    """a distribution as a model: the derivative of its log density by one of its parameters"""
    distrax = pytest.importorskip("distrax")
    normal = distrax.Normal(jnp.array(1.0), jnp.array(2.0))
    gradient = pg.grad(lambda d: d.log_prob(2.0), wrt="[0]")(normal)
    np.testing.assert_allclose(jax.tree.leaves(gradient), [0.25])


@pytest.mark.library("tensorflow_probability")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tfp():
    """distributions (JAX substrate) of the parameters of a model"""
    tfd = pytest.importorskip("tensorflow_probability.substrates.jax").distributions
    gradient = pg.grad(lambda m: tfd.Normal(m.amplitude, m.rate).log_prob(2.0))(Decay(1.0, 2.0, 0.0))
    np.testing.assert_allclose([gradient.amplitude, gradient.rate], [0.25, -0.375])
    assert gradient.level is None


X = jnp.linspace(0.0, 3.0, 12)


def dense(amplitude, scale, noise):
    """The log marginal likelihood of sin at X, by hand."""
    covariance = amplitude**2 * jnp.exp(-0.5 * ((X[:, None] - X) / scale) ** 2) + noise**2 * jnp.eye(len(X))
    y = jnp.sin(X)
    return -0.5 * (y @ jnp.linalg.solve(covariance, y) + jnp.linalg.slogdet(2 * jnp.pi * covariance)[1])


@pytest.mark.library("tinygp")
def test_tinygp():
    """the likelihood of a kernel with Python floats, its length scale held"""
    tinygp = pytest.importorskip("tinygp")
    kernel = 1.21 * tinygp.kernels.ExpSquared(scale=0.7)

    def likelihood(kernel):
        return tinygp.GaussianProcess(kernel, X, diag=0.01).log_probability(jnp.sin(X))

    want = jax.grad(dense, argnums=(0, 1))(1.1, 0.7, 0.1)
    by_path = dict(pg.items(pg.grad(likelihood)(kernel)))
    assert sorted(by_path) == ["kernel1.value", "kernel2.scale"]
    np.testing.assert_allclose(by_path["kernel1.value"] * 2 * 1.1, want[0], rtol=1e-6)
    np.testing.assert_allclose(by_path["kernel2.scale"], want[1], rtol=1e-6)
    frozen = pg.freeze(kernel, "kernel2.scale")
    np.testing.assert_allclose(likelihood(frozen), dense(1.1, 0.7, 0.1))
    assert list(dict(pg.items(pg.grad(likelihood)(frozen)))) == ["kernel1.value"]


@pytest.mark.library("gpjax", lines="paramax.unwrap(posterior)")
def test_gpjax():
    """the log likelihood of a posterior, its noise frozen by path"""
    gpx = pytest.importorskip("gpjax")
    import paramax

    kernel = gpx.kernels.RBF(lengthscale=0.7, variance=1.21)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel)
    posterior = prior * gpx.likelihoods.Gaussian(obs_stddev=0.1)
    data = gpx.Dataset(X=X[:, None], y=jnp.sin(X)[:, None])

    def likelihood(posterior):
        return gpx.objectives.conjugate_mll(paramax.unwrap(posterior), data)

    paths = [path for path, _ in pg.items(posterior)]
    noise = next(path for path in paths if "obs_stddev" in path)
    np.testing.assert_allclose(likelihood(posterior), dense(1.1, 0.7, 0.1), rtol=1e-3)
    gradient = pg.grad(likelihood)(pg.freeze(posterior, noise))
    assert [path for path, _ in pg.items(gradient)] == [path for path in paths if path != noise]


@pytest.mark.library("numpyro", lines="constrain.log_det(free)")
def test_numpyro_and_blackjax_in_coordinates():
    """the posterior of a model whose coordinates `unconstrain` gives, beside the same model written in numpyro"""
    numpyro = pytest.importorskip("numpyro")
    blackjax = pytest.importorskip("blackjax")
    dist, infer = numpyro.distributions, numpyro.infer
    data = 1.0 + 0.7 * np.random.default_rng(1).normal(size=40)

    def theirs():
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        mix = numpyro.sample("mix", dist.Dirichlet(jnp.ones(2)))
        numpyro.sample("y", dist.Normal(3 * mix[0], scale), obs=data)

    def density(model):
        prior = dist.HalfNormal(2.0).log_prob(model["scale"]) + dist.Dirichlet(jnp.ones(2)).log_prob(model["mix"])
        return prior + dist.Normal(3 * model["mix"][0], model["scale"]).log_prob(data).sum()

    coordinates = {"scale": pg.coordinates.positive, "mix": dist.constraints.simplex}
    free, constrain = pg.unconstrain({"scale": 1.0, "mix": jnp.array([0.4, 0.6])}, coordinates)
    target = lambda free: density(constrain(free)) + constrain.log_det(free)

    def run(program=None, **options):
        mcmc = infer.MCMC(infer.NUTS(program, **options), num_warmup=300, num_samples=2000, progress_bar=False)
        mcmc.run(jax.random.key(0), init_params=free if program is None else None)
        return mcmc.get_samples()

    def sample(key):
        warmup = blackjax.window_adaptation(blackjax.nuts, target)
        (state, parameters), _ = warmup.run(key, free, num_steps=300)
        kernel = blackjax.nuts(target, **parameters)
        step = lambda state, key: (lambda state: (state, state.position))(kernel.step(key, state)[0])
        return jax.lax.scan(step, state, jax.random.split(key, 2000))[1]

    expected = run(theirs)
    for samples in (run(potential_fn=lambda free: -target(free)), jax.jit(sample)(jax.random.key(1))):
        values = jax.vmap(constrain)(samples)
        for name in ("scale", "mix"):
            mine, other = values[name].reshape(2000, -1)[:, 0], expected[name].reshape(2000, -1)[:, 0]
            # 2,000 draws, of which a third are as good as independent: a Monte Carlo error of 1/25 of the width.
            np.testing.assert_allclose(mine.mean(), other.mean(), atol=0.15 * other.std())
            np.testing.assert_allclose(mine.std(), other.std(), rtol=0.15)
