# %% [markdown]
"""
What a transit can teach: a survey of a simulator
=================================================

A planet passes in front of its star, which grows dimmer for a few hours. jaxoplanet computes the light curve. At which
times does it depend on which parameter? `pg.survey` takes the gradients at all times, with one compiled program, and
says where a parameter is dead, where its gradient is not finite, and which operation makes it so. The planet is
K2-24 b, with the published size (Petigura et al. 2016, arXiv:1511.04497), and a usual first guess: that it crosses the
middle of the star. Neither a fit nor a sampler can leave that guess by its gradient; the script fails if the survey
does not say so::

    python -m pip install -e ".[examples-all]" && python examples/transits.py [--out transits.png]
"""

# %%
import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxoplanet.light_curves import limb_dark_light_curve
from jaxoplanet.orbits import TransitOrbit
from matplotlib.figure import Figure

import partgrad as pg

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description="K2-24 b: which parameters a light curve depends on, and when.")
parser.add_argument("--out", type=Path, default=Path("transits.png"), help="where the picture goes")
# A notebook has arguments of its own.
OUT = parser.parse_known_args()[0].out

# %% [markdown]
# The simulator
# -------------
#
# The planet has 5.68 radii of the Earth, the star 1.16 of the sun; a transit takes about 5.5 hours and comes every 20.9
# days. The limb darkening, by which a star is dimmer near its edge, has two coefficients.

# %%
RADIUS = 5.68 * 6378.1 / (1.16 * 695700.0)
GUESS = {
    "period": 20.885258,  # days
    "duration": 5.5 / 24,  # days
    "time_transit": 0.0,  # days
    "impact_param": 0.0,  # radii of the star, from its middle
    "radius_ratio": RADIUS,
    "limb": jnp.array([0.4, 0.2]),
}


def brightness(planet: dict[str, Any], day: jax.Array) -> jax.Array:
    """What is added to the star's light at a time (days), as a fraction of it."""
    orbit = TransitOrbit(**{name: value for name, value in planet.items() if name != "limb"})
    return limb_dark_light_curve(orbit, planet["limb"])(day)


print(f"shortly after the middle of the transit {float(-brightness(GUESS, 0.001)):.4%} of the light is missing")

# %% [markdown]
# The survey
# ----------
#
# One night, a measurement every minute. `in_axes` is that of `jax.vmap`: the times differ.

# %%
NIGHT = jnp.arange(-288, 289) / 1440
survey = pg.survey(brightness, in_axes=(None, 0))
first = survey(GUESS, NIGHT)
print(first)

# %% [markdown]
# Two parameters are dead at all times. The period is, since one transit has none. The distance from the middle of the
# star is dead because of the guess: the light curve is even in it, and its derivative at 0 is 0. In the middle of the
# transit, planet and star have the same centre, and the simulator takes the root of 0.
#
# Another guess, and the nights of four transits:

# %%
NIGHTS = jnp.concatenate([NIGHT[::4] + number * GUESS["period"] for number in range(4)])
second = survey({**GUESS, "impact_param": 0.3}, NIGHTS)
print(second)

# %%
figure = Figure(figsize=(9, 6.5), layout="constrained")
for report, ax, title in zip(
    (first, second),
    figure.subplots(2, 1),
    ("first guess, one transit", "another guess, four transits"),
    strict=True,
):
    report.plot(ax).set_title(title, loc="left", fontsize="medium")
figure.savefig(OUT, dpi=150)
print(f"The picture is in {OUT}.")

# %%
agree = []
for what, is_so in (
    ("distance and period are dead at the first guess", len(first.dead) == 2),
    (
        "the gradient is not finite in the middle of it",
        any(f.kind == "nan" and f.operation == "sqrt" for f in first.findings),
    ),
    ("nothing is dead at the other", second.dead == ()),
    ("every gradient is finite there", all(row.not_finite == 0 for row in second.rows)),
):
    agree.append(is_so)
    print(f"{what:50}  {'ok' if is_so else 'MISSED'}")
if not all(agree):
    raise SystemExit("The survey did not say what it should.")
