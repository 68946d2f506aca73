"""The model that these tests fit: a decay towards a level that is held. The data are exact, so the answer is known."""

import jax
import jax.numpy as jnp
import numpy as np

import partgrad as pg

T = jnp.linspace(0.0, 1.0, 8)
Y = 2.0 * jnp.exp(-3.0 * T) + 0.5


@pg.dataclass
class Decay:
    """Of amplitude 2 and rate 3 in the data, towards the level 0.5."""

    amplitude: jax.Array
    rate: jax.Array
    level: jax.Array = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amplitude * jnp.exp(-self.rate * t) + self.level


def residuals(model):
    return model(T) - Y


def loss(model):
    return (residuals(model) ** 2).mean()


def start():
    return Decay(jnp.array(1.0), jnp.array(1.0), jnp.array(0.5))


def assert_fitted(model, tolerance=1e-2):
    assert pg.is_nondiff(model, "level")
    np.testing.assert_allclose(model.level, 0.5)
    np.testing.assert_allclose([model.amplitude, model.rate], [2.0, 3.0], rtol=tolerance)
