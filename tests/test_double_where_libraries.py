"""Programs of libraries under `double_where`: their own numbers, and the true one where they leave a NaN."""

import diffrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optimistix
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

import partgrad as pg

pytestmark = pytest.mark.slow


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attend = nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(4)(nn.relu(nn.Dense(4)(x)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens, valid):
        mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(valid, valid))
        return nn.Dense(5)(nn.remat(Layer)()(nn.Embed(5, 4)(tokens), mask))


def test_a_flax_transformer_with_padding():
    tokens = np.array([[1, 2, 3], [4, 0, 0]])
    valid = tokens > 0
    parameters = Transformer().init(jax.random.key(0), tokens, valid)

    def loss(parameters):
        scores = jax.nn.log_softmax(Transformer().apply(parameters, tokens, valid))
        return -jnp.sum(jnp.where(valid, jnp.take_along_axis(scores, tokens[..., None], -1)[..., 0], 0.0))

    expected, found = (jax.jit(jax.grad(f))(parameters) for f in (loss, pg.double_where(loss)))
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5), found, expected)


def test_nuts_draws_the_same():
    def model(seen):
        mean, scale = numpyro.sample("mean", dist.Normal(0.0, 1.0)), numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(mean, scale).mask(seen), obs=np.array([0.3, -0.2, 0.0]))

    start = initialize_model(jax.random.key(0), model, model_args=(np.array([True, True, False]),))

    def drawn(wrap):
        kernel = NUTS(potential_fn=wrap(lambda z: start.potential_fn(z)), max_tree_depth=2)
        chain = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
        chain.run(jax.random.key(1), init_params=start.param_info.z)
        return chain.get_samples()

    jax.tree.map(np.testing.assert_allclose, drawn(pg.double_where), drawn(lambda f: f))


def test_the_time_of_an_event():
    """A ball falls from a height; the time at which it arrives, by the height."""

    def lands(height):
        field = lambda t, y, gravity: jnp.array([y[1], -jnp.where(gravity > 0, jnp.sqrt(gravity), 0.0)])
        event = diffrax.Event(lambda t, y, args, **_: y[0], optimistix.Newton(1e-5, 1e-5))
        start = jnp.array([height, 0.0])
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Heun(), 0.0, 3.0, 0.5, start, 96.04, event=event, max_steps=8
        ).ts[-1]

    with jax.enable_x64(True):
        np.testing.assert_allclose(
            jax.jit(jax.grad(pg.double_where(lands)))(5.0), 1 / np.sqrt(2 * 9.8 * 5.0), rtol=1e-6
        )


def test_a_stochastic_differential_equation():
    """Where its noise is selected away only the drift counts, whose derivative is -1; JAX has a NaN."""

    def end(rate):
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, 0.25, (), jax.random.key(0))
        diffusion = lambda t, y, rate: jnp.where(rate > 0, jnp.sqrt(rate) * y, 0.0)
        drift = diffrax.ODETerm(lambda t, y, rate: -rate * y)
        terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(diffusion, noise))
        start = jnp.float32(1.0)
        return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.5, start, rate, max_steps=4).ys[-1]

    np.testing.assert_allclose(jax.jit(jax.grad(pg.double_where(end)))(np.float32(0.0)), -1.0, rtol=1e-6)
