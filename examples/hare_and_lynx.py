# %% [markdown]
"""
Hare and lynx: an ODE whose constants are thawed on a schedule
==============================================================

From 1900 to 1920 the Hudson's Bay Company bought the pelts of lynx and of the hares that they eat (thousands a year).
The equations of Lotka and Volterra describe how the two rise and fall. The two rates at which a species grows or dies
by itself follow from the data at sight: the populations swing about once in ten years. How often the two meet does not.
So the rates are held at first, while the encounters and the first year are fitted, and then thawed. One compiled step
does both: `pg.stop_gradient(model, wrt, when)` takes a traced `when`. The script compares what it finds with the
posterior means of the Stan case study (Carpenter 2018, "Predator-Prey Population Dynamics: the Lotka-Volterra model in
Stan"), and fails if one is missed::

    python -m pip install -e ".[examples-all]" && python examples/hare_and_lynx.py [--out hare_and_lynx.png]
"""

# %%
import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import partgrad as pg

parser = argparse.ArgumentParser(description="Fit the equations of Lotka and Volterra, on a schedule.")
parser.add_argument("--out", type=Path, default=Path("hare_and_lynx.png"), help="where the picture goes")
# A notebook has arguments of its own.
OUT = parser.parse_known_args()[0].out

YEARS = np.arange(1900, 1921)
HARE = "30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7"
LYNX = "4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6"
PELTS = jnp.array([HARE.split(), LYNX.split()], float).T  # thousands, a row for each year

# %% [markdown]
# The model
# ---------
#
# Every number is positive, so the logarithms are fitted. The class marks nothing: what is held is a matter of the fit.


# %%
@pg.dataclass
class Populations:
    """Logarithms of the rates (per year; per year and thousand) and of the first populations (thousands)."""

    birth: jax.Array
    hunted: jax.Array
    death: jax.Array
    feeding: jax.Array
    first: jax.Array

    def slope(self, hare_and_lynx: jax.Array) -> jax.Array:
        """How fast hares and lynx change (thousands per year)."""
        hare, lynx = hare_and_lynx
        return jnp.stack(
            [
                hare * (jnp.exp(self.birth) - jnp.exp(self.hunted) * lynx),
                lynx * (jnp.exp(self.feeding) * hare - jnp.exp(self.death)),
            ]
        )

    def __call__(self, years: int, steps: int = 20) -> jax.Array:
        """Both populations (thousands) in every year, and between the years at so many steps (Runge-Kutta)."""

        def step(now: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            h = 1 / steps
            k1 = self.slope(now)
            k2 = self.slope(now + h / 2 * k1)
            k3 = self.slope(now + h / 2 * k2)
            k4 = self.slope(now + h * k3)
            return now + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), now

        return jax.lax.scan(step, jnp.exp(self.first), length=(years - 1) * steps + 1)[1]


def loss(model: Populations) -> jax.Array:
    """The mean square of the logarithm of (model / data): a lognormal error, as in the case study."""
    return jnp.mean((jnp.log(model(len(YEARS))[::20]) - jnp.log(PELTS)) ** 2)


# %% [markdown]
# The fit
# -------
#
# The rates are held for the first 400 steps. `when` is traced, so the step compiles once. Adam keeps a stopped leaf
# where it is, because its gradient was zero from the start.

# %%
HELD, STEPS = 400, 1500
RATES = ("birth", "death")


@jax.jit
def fit(model: Populations, held: jax.Array) -> tuple[Populations, tuple[Populations, jax.Array]]:
    """Fit for all steps, the rates held for so many; returns the model, and model and loss at every step."""
    adam = optax.adam(optax.cosine_decay_schedule(0.02, STEPS))

    def step(state: tuple[Populations, optax.OptState], number: jax.Array) -> tuple[tuple, tuple]:
        model, memory = state

        def scheduled(model: Populations) -> jax.Array:
            return loss(pg.stop_gradient(model, lambda m: (m.birth, m.death), when=number < held))

        value, gradient = jax.value_and_grad(scheduled)(model)
        updates, memory = adam.update(gradient, memory)
        return (pg.apply_updates(model, updates), memory), (model, value)

    (model, _), history = jax.lax.scan(step, (model, adam.init(model)), jnp.arange(STEPS))
    return model, history


# Small swings have the period 2 pi / sqrt(birth * death).
start = Populations(*map(jnp.log, (0.63, 0.1, 0.63, 0.1)), jnp.log(PELTS[0]))
scheduled, (path, losses) = fit(start, HELD)
at_once, (_, losses_at_once) = fit(start, 0)
print(f"loss: {losses[0]:.3f} at the start, {losses[HELD]:.4f} with the rates held, {losses[-1]:.4f} at the end")
print(f"all numbers from the first step on: {losses_at_once[-1]:.4f}")

# %% [markdown]
# Compared with the case study
# ----------------------------

# %%
agree = []
for name, mean, deviation in (
    ("birth", 0.55, 0.07),
    ("hunted", 0.028, 0.004),
    ("death", 0.80, 0.10),
    ("feeding", 0.024, 0.004),
):
    got = float(jnp.exp(pg.select(scheduled, name)))
    agree.append(abs(got - mean) < deviation)
    print(f"{name:8} expected {mean:5.3f} ± {deviation:5.3f}  got {got:6.4f}  {'ok' if agree[-1] else 'MISSED'}")


# %%
def draw() -> Figure:
    """Draw the data with both fits, and the loss with the rates along the fit."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[3, 2])
    when, curves = np.linspace(1900, 1920, 401), np.asarray(scheduled(len(YEARS)))
    for column, (name, color) in enumerate((("hare", "C0"), ("lynx", "C1"))):
        top.plot(YEARS, PELTS[:, column], "o", color=color, markersize=4)
        top.plot(when, curves[:, column], color=color, label=name)
    top.set(ylabel="pelts (thousands)", xticks=range(1900, 1921, 5))
    top.legend(frameon=False)
    bottom.plot(losses, color="black", label="loss")
    bottom.set(yscale="log", xlabel="step", ylabel="loss")
    bottom.axvline(HELD, color="0.6", linestyle="--", linewidth=0.8)
    bottom.annotate("rates thawed", (HELD, float(losses[0])), xytext=(-4, -8), textcoords="offset points", ha="right")
    rates = bottom.twinx()
    for name, color in zip(RATES, ("C0", "C1"), strict=True):
        rates.plot(jnp.exp(pg.select(path, name)), color=color, linewidth=1, label=f"rate of {name}")
    rates.set_ylabel("rate (per year)")
    rates.legend(frameon=False, loc="upper right")
    return figure


draw().savefig(OUT, dpi=200)
print(f"\nPicture: {OUT}")
if not all(agree):
    raise SystemExit("A published number was missed.")
