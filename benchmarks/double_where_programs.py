"""The functions whose gradients `benchmarks/double_where.py` measures.

Each builder takes a number that makes it a little larger, so that a process can trace a function it has never seen.
It returns the function, its argument and, where there is one, the same function with the trick written by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Loss = Callable[[Any], Any]
Built = tuple[Loss, Any, Loss | None]
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape))


def gaussian_process(more: int = 0) -> Built:
    points = 400 + more
    x, y = normal(points, 2), normal(points)

    def loss(parameters: Any, by_hand: bool = False) -> Any:
        length, scale, noise = jnp.exp(parameters)
        squares = ((x[:, None] - x[None]) ** 2).sum(-1) / length**2
        inner = jnp.where(squares > 0, squares, 1.0) if by_hand else squares
        r = jnp.sqrt(3.0) * jnp.where(squares > 0, jnp.sqrt(inner), 0.0)
        cholesky = jnp.linalg.cholesky(scale**2 * (1 + r) * jnp.exp(-r) + noise**2 * jnp.eye(points))
        solved = jax.scipy.linalg.cho_solve((cholesky, True), y)
        return 0.5 * y @ solved + jnp.log(jnp.diag(cholesky)).sum()

    return lambda p: loss(p), jnp.zeros(3), lambda p: loss(p, by_hand=True)


def _heads(x: Any, w: Any, mask: Any, heads: int) -> Any:
    """Attention with four square matrices; without a mask where that is None."""
    batch, length, size = x.shape
    q, k, v = ((x @ w[i]).reshape(batch, length, heads, size // heads) for i in range(3))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, size) @ w[3]


def attention(more: int = 0, *, masked: bool = True) -> Built:
    batch, length, heads, size = 2, 128 + more, 4, 64
    x0, mask = normal(batch, length, size), jnp.tril(jnp.ones((length, length), bool)) if masked else None

    def loss(weights: Any) -> Any:
        x = x0
        for w in weights:
            x = jax.nn.gelu(x + _heads(x, w, mask, heads))
        return (x**2).sum()

    return loss, [0.1 * normal(4, size, size) for _ in range(3)], None


def recurrent(more: int = 0) -> Built:
    batch = 32 + more
    xs, keep = normal(200, batch, 64), jnp.asarray(RANDOM.random((200, batch, 1)) > 0.3)

    def loss(weights: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            x, keep = x
            return jnp.where(keep, jnp.tanh(h @ weights[0] + x @ weights[1]), h), None

        return (lax.scan(step, jnp.zeros((batch, 64)), (xs, keep))[0] ** 2).sum()

    return loss, [0.1 * normal(64, 64) for _ in range(2)], None


def _layers(activation: Callable[[Any], Any], more: int) -> Built:
    x = normal(256 + more, 64)

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = activation(h @ w)
        return (h**2).sum()

    return loss, [0.1 * normal(64, 64) for _ in range(3)], None


def relu_network(more: int = 0) -> Built:
    return _layers(jax.nn.relu, more)


def tanh_network(more: int = 0) -> Built:
    return _layers(jnp.tanh, more)


def log_posterior(more: int = 0) -> Built:
    """A hierarchical regression with bounded parameters and missing observations."""
    count, groups = 500 + more, 8
    x, y = normal(count, 3), normal(count)
    group, seen = jnp.arange(count) % groups, jnp.asarray(RANDOM.random(count) > 0.2)

    def loss(p: Any, by_hand: bool = False) -> Any:
        """By hand, such that all of a missing observation may be NaN."""
        kept = lambda values, seen=seen: jnp.where(seen, values, 1.0) if by_hand else values
        scale, noise = jax.nn.softplus(p["scale"]), jnp.exp(p["noise"])
        mean = kept(x, seen[:, None]) @ p["slope"] + scale * p["offset"][group]
        each = jax.scipy.stats.norm.logpdf(kept(y), kept(mean), noise)
        prior = sum(jax.scipy.stats.norm.logpdf(p[name]).sum() for name in ("slope", "offset", "noise"))
        bounded = jnp.where(scale < 5.0, jnp.log(scale) - scale, -jnp.inf)
        return -(jnp.where(seen, each, 0.0).sum() + prior + bounded)

    zero = jnp.zeros(())
    parameters = {"slope": normal(3), "offset": normal(groups), "scale": zero, "noise": zero}
    return lambda p: loss(p), parameters, lambda p: loss(p, by_hand=True)


def n_body(more: int = 0) -> Built:
    bodies = 64 + more
    start = normal(2, bodies, 3)

    def loss(masses: Any, by_hand: bool = False) -> Any:
        """By hand, such that what is on the diagonal may be NaN."""

        def step(state: Any, _: Any) -> Any:
            x, v = state
            same = jnp.eye(bodies, dtype=bool)
            apart = x[:, None] - x[None]
            squares = (apart**2).sum(-1)
            if by_hand:
                squares, apart = jnp.where(same, 1.0, squares), jnp.where(same[..., None], 1.0, apart)
            cubes = jnp.where(same, 0.0, squares**-1.5)
            v = v - 0.01 * jnp.einsum("ij,ijk,j->ik", cubes, apart, masses)
            return (x + 0.01 * v, v), None

        (x, _), _ = lax.scan(step, (start[0], start[1]), length=20)
        return (x**2).sum()

    return lambda masses: loss(masses), jnp.ones(bodies), lambda masses: loss(masses, by_hand=True)


def transformer(more: int = 0) -> Built:
    """Twelve layers with layer norms, a causal mask and padding."""
    batch, length, size = 2, 64 + more, 64
    x0, real = normal(batch, length, size), jnp.asarray(RANDOM.random((batch, length)) > 0.1)

    def norm(x: Any, gain: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return gain * x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def loss(layers: Any) -> Any:
        causal = jnp.tril(jnp.ones((length, length), bool))
        x = x0
        for w in layers:
            x = x + _heads(norm(x, w["gain"][0]), w["heads"], causal & real[:, None, None, :], 4)
            x = x + jax.nn.gelu(norm(x, w["gain"][1]) @ w["up"]) @ w["down"]
        return jnp.where(real[..., None], x, 0.0).var()

    def layer() -> Any:
        up, down = 0.1 * normal(size, 4 * size), 0.1 * normal(4 * size, size)
        return {"gain": jnp.ones((2, size)), "heads": 0.1 * normal(4, size, size), "up": up, "down": down}

    return loss, [layer() for _ in range(12)], None


def checkpoints(more: int = 0) -> Built:
    x0 = normal(64 + more, 32)

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return x + jnp.where(h > 0.1, jnp.log(h), 0.0)

    def loss(weights: Any) -> Any:
        x = x0
        for w in weights:
            x = block(x, w)
        return (x**2).sum()

    return loss, [0.1 * normal(32, 32) for _ in range(12)], None


Wrap = Callable[[Any], Any]


def shared_weights() -> tuple[Callable[[Wrap], Any], Any]:
    """A gradient through `vmap(wrap(f), (None, 0))`: the examples share the weights."""
    xs, weights = normal(128, 64), [0.1 * normal(64, 64) for _ in range(3)]

    def of_one(weights: Any, x: Any) -> Any:
        for w in weights:
            h = x @ w
            x = jnp.where(h > 0, jnp.log1p(h), 0.0)
        return (x**2).sum()

    return lambda wrap: jax.grad(lambda w: jax.vmap(wrap(of_one), (None, 0))(w, xs).sum()), weights


def hessian_product(build: Callable[[], Built]) -> tuple[Callable[[Wrap], Any], Any]:
    """The Hessian times a vector, forward over reverse."""
    loss, argument, _ = build()
    direction = jax.tree.map(jnp.ones_like, argument)
    return lambda wrap: lambda p: jax.jvp(jax.grad(wrap(loss)), (p,), (direction,))[1], argument


def value_and_tangent(build: Callable[[], Built]) -> tuple[Callable[[Wrap], Any], Any]:
    """The value and the derivative along a vector, in forward mode."""
    loss, argument, _ = build()
    direction = jax.tree.map(jnp.ones_like, argument)
    return lambda wrap: lambda p: jax.jvp(wrap(loss), (p,), (direction,)), argument


# Derivatives other than a gradient of the whole: from what wraps the function to the derivative, and its argument.
COMPOSED: dict[str, Callable[[], tuple[Callable[[Wrap], Any], Any]]] = {
    "vmap, shared weights": shared_weights,
    "value and tangent, recurrent": lambda: value_and_tangent(recurrent),
    "Hessian product, recurrent": lambda: hessian_product(recurrent),
    "Hessian product, log posterior": lambda: hessian_product(log_posterior),
}
ALL: dict[str, Callable[..., Built]] = {
    "Gaussian process, 400 points": gaussian_process,
    "masked attention, 3 layers": attention,
    "attention without a mask": lambda more=0: attention(more, masked=False),
    "masked recurrent, scan of 200": recurrent,
    "relu network": relu_network,
    "tanh network": tanh_network,
    "log posterior": log_posterior,
    "n-body": n_body,
    "transformer, 12 layers": transformer,
    "twelve checkpoints": checkpoints,
}
