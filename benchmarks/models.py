"""The same model in each library: some kernels with three numbers each."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

import partgrad as pg

# Of the models that are timed: the model, and its kernels.
NODES = 20


@pg.dataclass
class Kernel:
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


@pg.dataclass
class Model:
    kernels: list[Kernel]


class EquinoxKernel(eqx.Module):
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


class EquinoxModel(eqx.Module):
    kernels: list[EquinoxKernel]


@dataclass(frozen=True)
class RegisteredKernel:
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


@dataclass(frozen=True)
class RegisteredModel:
    kernels: list[RegisteredKernel]


jax.tree_util.register_dataclass(RegisteredKernel, ["variance", "lengthscale", "noise"], [])
jax.tree_util.register_dataclass(RegisteredModel, ["kernels"], [])


@flax.struct.dataclass
class FlaxKernel:
    variance: jax.Array
    lengthscale: jax.Array
    noise: jax.Array


@flax.struct.dataclass
class FlaxModel:
    kernels: list[FlaxKernel]


class NnxKernel(nnx.Module):
    def __init__(self, variance: Any, lengthscale: Any, noise: Any):
        self.variance = nnx.Param(variance)
        self.lengthscale = nnx.Param(lengthscale)
        self.noise = nnx.Param(noise)


class NnxModel(nnx.Module):
    def __init__(self, kernels: Any):
        self.kernels = nnx.List(kernels)


CLASSES = {
    "partgrad": (Model, Kernel),
    "register_dataclass": (RegisteredModel, RegisteredKernel),
    "equinox": (EquinoxModel, EquinoxKernel),
    "flax.struct": (FlaxModel, FlaxKernel),
    "flax.nnx": (NnxModel, NnxKernel),
}


def model(library: str) -> Any:
    """A model of 20 nodes and 57 leaves."""
    outer, kernel = CLASSES[library]
    return outer([kernel(jnp.ones(()), jnp.ones(()), jnp.ones(())) for _ in range(NODES - 1)])


@jax.jit
def loss(model: Any) -> jax.Array:
    """What is differentiated; compiled, so that what is left is the way in and out."""
    return sum(k.variance * k.lengthscale**2 + k.noise for k in model.kernels)
