"""What reduced cotangents of named values cost beside taps written by hand, as XLA counts it.

``python -m benchmarks intermediates`` compiles each program once and runs none: floating-point operations, bytes that
are read and written, and temporaries. Each is a ratio to a tap by hand in the same function, and 1.05 is the bound. The
last line is a tap in a function without names: JAX keeps a value that has a name in a loop twice, with and without it.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg

BOUND = 1.05


class Cost(NamedTuple):
    """What a compiled program needs."""

    flops: float
    bytes: float
    temporaries: float


def cost(function: Callable[..., Any], *args: Any) -> Cost:
    """What XLA says of a function of these arguments."""
    compiled = jax.jit(function).lower(*args).compile()
    counted = compiled.cost_analysis()
    return Cost(counted["flops"], counted["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes)


@jax.custom_vjp
def tap(value: Any, norm: Any) -> Any:
    """The value; the cotangent of `norm` is the norm of its cotangent."""
    return value


tap.defvjp(lambda value, norm: (value, None), lambda _, cotangent: (cotangent, _norm(cotangent)))


def _norm(cotangent: Any) -> Any:
    return jnp.sqrt(jnp.sum(cotangent**2))


def _recurrent(width: int, steps: int) -> tuple[Any, Any, Any, Any]:
    """A recurrent network, its parameters and input, and the same with a place for the norm at each step."""
    weights = jax.random.normal(jax.random.key(0), (2, width, width)) / width**0.5
    x = jax.random.normal(jax.random.key(1), (256, width))

    def network(weights: Any, x: Any, named: Callable[..., Any], norms: Any) -> Any:
        def step(h: Any, norm: Any) -> Any:
            h = named(jnp.tanh(h @ weights[0]), norm)
            return jnp.tanh(h @ weights[1]), None

        return jnp.sum(jax.lax.scan(step, x, norms, length=steps)[0] ** 2)

    name = lambda value, _: checkpoint_name(value, "h")
    return lambda w, x: network(w, x, name, None), weights, x, lambda tap: lambda w, norms, x: network(w, x, tap, norms)


def _layers(width: int, layers: int) -> tuple[Any, Any, Any, Any]:
    """A network of residual layers, each under a checkpoint, and the same with a place for a norm in each."""
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (2, width, width)) / width**0.5 for key in keys]
    x = jax.random.normal(jax.random.key(1), (256, width))

    def network(weights: Any, x: Any, named: Callable[..., Any], norms: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, own: Any, norm: Any) -> Any:
            return h + jnp.tanh(named(h @ own[0], norm)) @ own[1]

        for own, norm in zip(weights, norms, strict=True):
            x = layer(x, own, norm)
        return jnp.sum(x**2)

    name = lambda value, _: checkpoint_name(value, "h")
    plain = lambda w, x: network(w, x, name, [jnp.zeros(())] * layers)
    return plain, weights, x, lambda tap: lambda w, norms, x: network(w, x, tap, norms)


PROGRAMS = {
    "a scan of 64 steps": (lambda: _recurrent(128, 64), jnp.zeros(64)),
    "12 layers, checkpointed": (lambda: _layers(128, 12), [jnp.zeros(())] * 12),
}


def measured(made: tuple[Any, Any, Any, Any], norms: Any) -> dict[str, Cost]:
    """The costs of the gradient of the parameters, alone and with norms of cotangents inside."""
    f, parameters, x, with_taps = made
    named = lambda value, norm: tap(checkpoint_name(value, "h"), norm)
    by_hand = lambda tap: cost(lambda p, x: jax.grad(with_taps(tap), (0, 1))(p, norms, x), parameters, x)
    both = lambda **own: {"params": None, "h": pg.intermediate("h", **own)}
    reduced = pg.grad(f, wrt=both(reduce=_norm))
    afterwards = lambda p, x: (lambda own: (own["params"], jax.tree.map(_norm, own["h"])))(pg.grad(f, wrt=both())(p, x))
    twice = lambda p, x: (jax.grad(f)(p, x), pg.grad(f, wrt=pg.intermediate("h", reduce=_norm))(p, x))
    return {
        "the parameters alone": cost(jax.grad(f), parameters, x),
        "a tap by hand": by_hand(named),
        "partgrad, reduce=": cost(reduced, parameters, x),
        "partgrad, reduced afterwards": cost(afterwards, parameters, x),
        "two backward passes": cost(twice, parameters, x),
        "a tap by hand, without names": by_hand(tap),
    }


def main(arguments: list[str]) -> int:
    """Print the table; return how many bounds are missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks intermediates", description=__doc__)
    parser.parse_args(arguments)
    missed = 0
    for title, (made, norms) in PROGRAMS.items():
        found = measured(made(), norms)
        by_hand = found["a tap by hand"]
        print(f"\n{title}: ratios to a tap by hand\n{'':30}{'operations':>12}{'bytes':>12}{'temporaries':>13}")
        for name, own in found.items():
            ratios = [one / other for one, other in zip(own, by_hand, strict=True)]
            print(f"{name:30}{ratios[0]:>12.3f}{ratios[1]:>12.3f}{ratios[2]:>13.3f}")
            missed += name == "partgrad, reduce=" and max(ratios) > BOUND
    print(f"\n{missed} bounds missed")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
