"""Covariance functions of time, small enough to read, that add and multiply.

A kernel is called with two arrays of times and broadcasts: `kernel(t, t)` is the variance at each time, and
`kernel(s[:, None], t)` the covariance matrix between `s` and `t`. An `amplitude` is a standard deviation and has the
unit of the data, a `lengthscale` and a `period` have the unit of time, and the rest are pure numbers.
"""

import math

import jax
import jax.numpy as jnp

import partgrad as pg


@pg.dataclass
class Kernel:
    """A covariance function. `k1 + k2` and `k1 * k2` are kernels, and `*` binds first as it always does."""

    def __call__(self, s: jax.Array, t: jax.Array) -> jax.Array:
        """The covariance between times `s` and `t`, broadcast."""
        raise NotImplementedError

    def __add__(self, other: "Kernel") -> "Sum":
        mine, theirs = (k.terms if isinstance(k, Sum) else (k,) for k in (self, other))
        return Sum((*mine, *theirs))

    def __mul__(self, other: "Kernel") -> "Product":
        mine, theirs = (k.factors if isinstance(k, Product) else (k,) for k in (self, other))
        return Product((*mine, *theirs))


@pg.dataclass
class Sum(Kernel):
    """Independent processes that are added: their covariances add."""

    terms: tuple[Kernel, ...]

    def __call__(self, s, t):
        """The sum of the terms' covariances."""
        return sum(term(s, t) for term in self.terms)


@pg.dataclass
class Product(Kernel):
    """One process that modulates another: their covariances multiply."""

    factors: tuple[Kernel, ...]

    def __call__(self, s, t):
        """The product of the factors' covariances."""
        return math.prod(factor(s, t) for factor in self.factors)


@pg.dataclass
class RBF(Kernel):
    """Smooth variation on one time scale: amplitude² exp(-r² / 2 lengthscale²)."""

    amplitude: float
    lengthscale: float

    def __call__(self, s, t):
        """The covariance; r = s - t."""
        return self.amplitude**2 * jnp.exp(-0.5 * (s - t) ** 2 / self.lengthscale**2)


@pg.dataclass
class RationalQuadratic(Kernel):
    """Smooth variation on many time scales: amplitude² (1 + r² / 2 alpha lengthscale²)^-alpha.

    A small alpha spreads the time scales widely; an infinite one is an RBF.
    """

    amplitude: float
    lengthscale: float
    alpha: float

    def __call__(self, s, t):
        """The covariance; r = s - t."""
        # The power by its logarithm, which costs half as much to differentiate and is exact where r is small.
        log = jnp.log1p((s - t) ** 2 / (2 * self.alpha * self.lengthscale**2))
        return self.amplitude**2 * jnp.exp(-self.alpha * log)


@pg.dataclass
class Periodic(Kernel):
    """Exact repetition, of variance one: exp(-2 sin²(pi r / period) / smoothness²).

    The period is held: the calendar says what it is, until somebody thaws it.
    """

    smoothness: float
    period: float = pg.field(nondiff=True, default=1.0)

    def __call__(self, s, t):
        """The covariance; r = s - t."""
        return jnp.exp(-2 * (jnp.sin(jnp.pi * (s - t) / self.period) / self.smoothness) ** 2)


@pg.dataclass
class White(Kernel):
    """Noise that is new at every time: amplitude² where s = t, else 0."""

    amplitude: float

    def __call__(self, s, t):
        """The covariance."""
        return self.amplitude**2 * (s == t)
