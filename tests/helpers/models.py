"""Models that the tests share: the kernels of the README, and trees of other libraries."""

from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp

import partgrad as pg


@pg.dataclass
class Kernel:
    def __add__(self, other):
        return Sum(self, other)

    def __mul__(self, other):
        return Product(self, other)


@pg.dataclass
class RBF(Kernel):
    variance: jax.Array
    lengthscale: jax.Array

    def __call__(self, r):
        return self.variance * jnp.exp(-0.5 * (r / self.lengthscale) ** 2)


@pg.dataclass
class Periodic(Kernel):
    variance: jax.Array
    lengthscale: jax.Array
    period: jax.Array = pg.field(nondiff=True)

    def __call__(self, r):
        return self.variance * jnp.exp(-2 * (jnp.sin(jnp.pi * r / self.period) / self.lengthscale) ** 2)


@pg.dataclass
class Sum(Kernel):
    a: Kernel
    b: Kernel

    def __call__(self, r):
        return self.a(r) + self.b(r)


@pg.dataclass
class Product(Kernel):
    a: Kernel
    b: Kernel

    def __call__(self, r):
        return self.a(r) * self.b(r)


def composite():
    return RBF(pg.NonDiff(1.0), 2.0) + RBF(0.5, 0.7) * Periodic(1.0, 1.3, 1.0)


def loss(kernel):
    return kernel(jnp.linspace(0.1, 0.9, 5)).sum()


@pg.dataclass
class Config:
    """A class with every kind of field."""

    w: Any
    held: Any = pg.field(nondiff=True, default=2.0)
    n: int = pg.field(static=True, default=3)
    options: Any = pg.field(static=True, default_factory=lambda: {"grid": (0.0, 1.0, 2.0), "name": "a"})


class Point(NamedTuple):
    x: Any
    y: Any


class Linear(eqx.Module):
    weight: Any
    bias: Any
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return self.weight * x + self.bias


@flax.struct.dataclass
class Flax:
    w: Any
    size: int = flax.struct.field(pytree_node=False, default=4)


@pg.dataclass
class _Box:
    tree: Any


def trees_equal(first, second):
    """Whether two trees have equal leaves and equal structures, marks included."""
    return _Box(first) == _Box(second)


def is_differentiable(leaf):
    return len(jax.tree.leaves(pg.partition([leaf])[0])) == 1


def paths(tree):
    """The paths of the leaves."""
    return [row.path for row in pg.summary(tree).rows]
