"""Losses of ordinary models as people write them: their gradients are right, and a check says so."""

import diffrax
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from jax import lax
from numpyro.infer.util import initialize_model

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 23, (4, 12))
IMAGES = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)
LABELS = np.array([0, 2, 1, 2])
SERIES = np.random.default_rng(2).normal(size=(3, 16, 4)).astype(np.float32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(logits):
    return cross_entropy(logits[:, :-1], TOKENS[:, 1:])


def of_linen(module, inputs, loss):
    """The loss of a module of `flax.linen` as a function of its variables, and these."""
    variables = module.init(KEY, inputs)
    statistics = {name: part for name, part in variables.items() if name != "params"}
    mutable = list(statistics) or False

    def f(params):
        outputs = module.apply({"params": params, **statistics}, inputs, mutable=mutable)
        return loss(outputs[0] if mutable else outputs)

    return f, variables["params"]


# --- transformers -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    width: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, qkv_features=self.width, dtype=self.dtype)(y, y)
        y = nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(y))


class Transformer(nn.Module):
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(23, 16, dtype=self.dtype)(tokens) + nn.Embed(12, 16, dtype=self.dtype)(jnp.arange(12))
        for _ in range(2):
            x = Block(16, self.dtype)(x)
        return nn.Dense(23)(nn.LayerNorm()(x))


def transformer():
    return of_linen(Transformer(), TOKENS, next_token)


def transformer_in_bfloat16():
    return of_linen(Transformer(jnp.bfloat16), TOKENS, next_token)


def causal_transformer_of_equinox():
    keys = jax.random.split(KEY, 4)
    model = {
        "embedding": eqx.nn.Embedding(23, 16, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, 16, key=keys[1]),
        "norm": eqx.nn.RMSNorm(16),
        "mlp": eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.silu, key=keys[2]),
        "head": eqx.nn.Linear(16, 23, key=keys[3]),
    }
    rotary, causal = eqx.nn.RotaryPositionalEmbedding(16), np.tri(12, dtype=bool)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(p, tokens):
        m = eqx.combine(p, static)
        x = jax.vmap(m["embedding"])(tokens)
        y = rotary(jax.vmap(m["norm"])(x))
        x = x + m["attention"](y, y, x, mask=causal)
        return jax.vmap(m["head"])(x + jax.vmap(m["mlp"])(x))

    return lambda p: next_token(jax.vmap(logits, (None, 0))(p, TOKENS)), params


def layers_stacked_for_a_scan():
    stack = lambda scale, *shape: scale * jax.random.normal(KEY, (4, *shape))
    params = {"q": stack(0.3, 8, 8), "k": stack(0.3, 8, 8), "v": stack(0.3, 8, 8), "scale": jnp.ones((4, 8))}

    @jax.checkpoint
    def layer(x, p):
        y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]
        weights = jax.nn.softmax(y @ p["q"] @ (y @ p["k"]).mT / 8**0.5)
        return x + weights @ (y @ p["v"]), None

    x = jax.random.normal(KEY, (3, 5, 8))
    return lambda p: jnp.mean(lax.scan(layer, x, p)[0] ** 2), params


def mixture_of_experts():
    params = {
        "router": jax.random.normal(KEY, (8, 4)),
        "up": 0.3 * jax.random.normal(KEY, (4, 8, 16)),
        "down": 0.3 * jax.random.normal(KEY, (4, 16, 8)),
    }
    x = jax.random.normal(jax.random.key(1), (10, 8))

    def f(p):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        outputs = jnp.einsum("neh,ehd->ned", jax.nn.silu(jnp.einsum("nd,edh->neh", x, p["up"])), p["down"])
        picked = jnp.take_along_axis(outputs, chosen[..., None], 1)
        return jnp.mean((x - jnp.sum(gates[..., None] * picked, 1)) ** 2)

    return f, params


# --- images -------------------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = lambda: nn.BatchNorm(use_running_average=False)
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for _ in range(2):
            y = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
            x = nn.relu(x + norm()(nn.Conv(8, (3, 3), use_bias=False)(y)))
        return nn.Dense(3)(x.mean((1, 2)))


def resnet():
    return of_linen(ResNet(), IMAGES, lambda logits: cross_entropy(logits, LABELS))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        down = nn.swish(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        low = nn.swish(nn.Conv(8, (3, 3))(nn.avg_pool(down, (2, 2), (2, 2))))
        up = nn.ConvTranspose(4, (2, 2), (2, 2))(low)
        return nn.Conv(3, (3, 3))(jnp.concatenate([down, up], -1))


def unet_that_denoises():
    noise = jax.random.normal(jax.random.key(3), IMAGES.shape)
    return of_linen(UNet(), IMAGES + 0.3 * noise, lambda predicted: jnp.mean((predicted - noise) ** 2))


def cnn_of_equinox():
    keys = jax.random.split(KEY, 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 4, 3, key=keys[0]),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(36, 16, key=keys[1]),
            eqx.nn.Lambda(jax.nn.sigmoid),
            eqx.nn.Linear(16, 3, key=keys[2]),
            eqx.nn.Lambda(jax.nn.log_softmax),
        ]
    )
    images = IMAGES.transpose(0, 3, 1, 2)
    # A pool holds its initial value, a Python number, which JAX does not differentiate.
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def f(p):
        log_probabilities = jax.vmap(eqx.combine(p, static))(images)
        return -jnp.mean(jnp.take_along_axis(log_probabilities, LABELS[:, None], 1))

    return f, params


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.norm(self.first(x))))


def perceptron_of_nnx():
    return lambda m: jnp.mean(optax.huber_loss(m(SERIES[:, 0]), jnp.ones((3, 2)))), Perceptron(nnx.Rngs(0))


def variational_autoencoder():
    keys = jax.random.split(KEY, 2)
    model = {"encoder": eqx.nn.MLP(4, 4, 8, 1, key=keys[0]), "decoder": eqx.nn.MLP(2, 4, 8, 1, key=keys[1])}
    x, epsilon = SERIES[:, 0], jax.random.normal(jax.random.key(4), (3, 2))

    def f(m):
        mean, log_variance = jnp.split(jax.vmap(m["encoder"])(x), 2, axis=-1)
        decoded = jax.vmap(m["decoder"])(mean + jnp.exp(0.5 * log_variance) * epsilon)
        divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, -1)
        return jnp.mean(jnp.sum((decoded - x) ** 2, -1) + divergence)

    return f, model


# --- sequences, graphs, fields ------------------------------------------------------------------------------------


def lstm():
    class Reader(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.RNN(nn.OptimizedLSTMCell(6))(x)[:, -1])

    return of_linen(Reader(), SERIES, lambda y: jnp.mean((y[:, 0] - 1.0) ** 2))


def diagonal_state_space():
    params = {
        "log_rate": jnp.log(jnp.array([0.5, 0.1, 1.3])),
        "frequency": jnp.array([1.0, 2.0, 0.3]),
        "b": jnp.ones((3, 4)) + 0j,
        "c": jax.random.normal(KEY, (3,)) + 0.5j,
        "log_step": jnp.array(-1.0),
    }

    def f(p):
        step = jnp.exp(p["log_step"])
        decay = jnp.exp(step * (-jnp.exp(p["log_rate"]) + 1j * p["frequency"]))
        driven = SERIES @ p["b"].T * step
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        states = lax.associative_scan(combine, (jnp.broadcast_to(decay, driven.shape), driven), axis=1)[1]
        return jnp.mean(jnp.real(states @ p["c"]) ** 2)

    return f, params


def graph_network():
    senders, receivers = np.array([0, 1, 2, 3, 4, 0, 2]), np.array([1, 2, 3, 4, 0, 2, 4])
    nodes = jax.random.normal(KEY, (5, 4))
    keys = jax.random.split(KEY, 3)
    params = {name: 0.5 * jax.random.normal(key, (8, 4)) for name, key in zip("mu", keys, strict=False)}
    params["attention"] = jax.random.normal(keys[2], (8,))

    def layer(p, x):
        pairs = jnp.concatenate([x[senders], x[receivers]], -1)
        logits = jax.nn.leaky_relu(pairs @ p["attention"])
        logits = jnp.exp(logits - jax.ops.segment_max(logits, receivers, 5)[receivers])
        weights = logits / jax.ops.segment_sum(logits, receivers, 5)[receivers]
        received = jax.ops.segment_sum(weights[:, None] * (pairs @ p["m"]), receivers, 5)
        return jnp.tanh(jnp.concatenate([x, received], -1) @ p["u"])

    return lambda p: jnp.mean(layer(p, layer(p, nodes)) ** 2), params


def physics_informed_network():
    model = eqx.nn.MLP(1, 1, 8, 2, activation=jnp.tanh, key=KEY)
    points = np.linspace(0.1, 1.0, 6, dtype=np.float32)

    def f(m):
        u = lambda t: m(t[None])[0]
        residual = jax.vmap(lambda t: jax.grad(jax.grad(u))(t) + u(t))(points)
        return jnp.mean(residual**2) + (u(jnp.zeros(())) - 1.0) ** 2

    return f, model


def normalizing_flow():
    keys = jax.random.split(KEY, 3)
    model = [eqx.nn.MLP(2, 4, 8, 1, key=key) for key in keys]
    x = SERIES[0]

    def log_density(m, x):
        total = 0.0
        for number, net in enumerate(m):
            fixed, moved = (x[:2], x[2:]) if number % 2 == 0 else (x[2:], x[:2])
            shift, log_scale = jnp.split(net(fixed), 2)
            moved, total = moved * jnp.exp(jnp.tanh(log_scale)) + shift, total + jnp.sum(jnp.tanh(log_scale))
            x = jnp.concatenate([fixed, moved] if number % 2 == 0 else [moved, fixed])
        return total - 0.5 * jnp.sum(x**2)

    return lambda m: -jnp.mean(jax.vmap(log_density, (None, 0))(m, x)), model


# --- inference and simulation -------------------------------------------------------------------------------------


def potential_of_numpyro():
    x, y = np.linspace(-1, 1, 8), np.linspace(-1, 1, 8) ** 2

    def model():
        slope, offset = numpyro.sample("slope", dist.Normal(0, 1)), numpyro.sample("offset", dist.Cauchy(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("y", dist.StudentT(4.0, slope * x + offset * shares[0], sigma), obs=y)

    found = initialize_model(KEY, model)
    return found.potential_fn, found.param_info.z


def kalman_filter():
    observed = SERIES[0, :, 0]

    def f(p):
        q, r = jnp.exp(p["log_q"]), jnp.exp(p["log_r"])

        def step(carry, y):
            mean, variance = carry[0] * p["a"], carry[1] * p["a"] ** 2 + q
            total = variance + r
            gain = variance / total
            log_density = -0.5 * ((y - mean) ** 2 / total + jnp.log(2 * jnp.pi * total))
            return (mean + gain * (y - mean), (1 - gain) * variance), log_density

        return -jnp.sum(lax.scan(step, (0.0, 1.0), observed)[1])

    return f, {"a": jnp.array(0.9), "log_q": jnp.array(-1.0), "log_r": jnp.array(0.2)}


def neural_ordinary_differential_equation():
    model = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=KEY)
    times = np.linspace(0, 1, 5)

    def f(m):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: m(y)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.25,
            jnp.array([1.0, 0.0]),
            saveat=diffrax.SaveAt(ts=times),
        )
        return jnp.mean((solution.ys - np.cos(times)[:, None]) ** 2)

    return f, model


def heat_equation():
    def f(p):
        grid = np.linspace(0, 1, 16)
        start = jnp.exp(-((grid - p["center"]) ** 2) / (2 * p["width"] ** 2))
        step = lambda u, _: (u + 0.2 * p["rate"] * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)), None)
        return jnp.mean((lax.scan(step, start, None, length=40)[0] - grid) ** 2)

    return f, {"center": jnp.array(0.4), "width": jnp.array(0.1), "rate": jnp.array(0.7)}


MODELS = [
    transformer,
    transformer_in_bfloat16,
    causal_transformer_of_equinox,
    layers_stacked_for_a_scan,
    mixture_of_experts,
    resnet,
    unet_that_denoises,
    cnn_of_equinox,
    perceptron_of_nnx,
    variational_autoencoder,
    lstm,
    diagonal_state_space,
    graph_network,
    physics_informed_network,
    normalizing_flow,
    potential_of_numpyro,
    kalman_filter,
    neural_ordinary_differential_equation,
    heat_equation,
]
