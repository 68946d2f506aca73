# %% [markdown]
"""
Two planets of K2-24: their masses, with error bars
===================================================

Masses by radial velocities, with periods and transit times held, and then thawed.

The planets pull the star to and fro. The light curve from the Kepler telescope says to the minute when they pass in
front of it; 32 velocities measured at Keck (Petigura et al. 2016, arXiv:1511.04497) say how heavy they are. So the
parameters known from the light curve are held, by marks that the class sets, and those that the velocities determine
are fitted. Error bars, with names, come from the Hessian. Then the periods are thawed, with the light curve as a
prior and without. The script compares its results with published ones, and with those of radvel 1.6.7 for the same
likelihood, and fails if one is wrong. It also runs as a notebook: its cells begin with `# %%`::

    python -m pip install -e ".[examples]" && python examples/radial_velocities.py [--out radial_velocities.png]
"""

# %%
import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import OptimizeResult, minimize

import partgrad as pg

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description="K2-24: fit two circular orbits to radial velocities.")
parser.add_argument("--out", type=Path, default=Path("radial_velocities.png"), help="where the picture goes")
# A notebook has arguments of its own.
OUT = parser.parse_known_args()[0].out

# %% [markdown]
# Data and model
# --------------
#
# Periods and times of transit are *held* in every orbit, because the class says so. They remain ordinary numbers, but
# no gradient, optimiser or Hessian treats them as parameters until they are named or thawed.

# %%
# A notebook has no file, and runs in its folder.
DATA = (Path(__file__).parent if "__file__" in globals() else Path()) / "data"
error, time, velocity = np.loadtxt(DATA / "epic203771098.csv", delimiter=",", skiprows=1, usecols=(1, 2, 3)).T
MIDDLE = (time.min() + time.max()) / 2


@pg.dataclass
class Orbit:
    """A circular orbit: the star recedes at `amplitude` (m/s) at most. Period and time of transit in days."""

    amplitude: float
    period: float = pg.field(nondiff=True)
    transit: float = pg.field(nondiff=True)

    def __call__(self, t: jax.Array) -> jax.Array:
        """The velocity of the star away from us (m/s); at a transit it begins to approach."""
        return -self.amplitude * jnp.sin(2 * jnp.pi * (t - self.transit) / self.period)


@pg.dataclass
class Star:
    """Orbits, an offset (m/s), a slope (m/s/d) for whatever is further out, and noise of the star itself (m/s)."""

    planets: tuple[Orbit, ...]
    offset: float
    slope: float
    jitter: float

    def __call__(self, t: jax.Array) -> jax.Array:
        """The velocity of the star (m/s)."""
        return self.offset + self.slope * (t - MIDDLE) + sum(planet(t) for planet in self.planets)


def log_likelihood(star: Star) -> jax.Array:
    """The log probability density of the measured velocities, in nats."""
    variance = error**2 + star.jitter**2
    return -0.5 * ((velocity - star(time)) ** 2 / variance + jnp.log(2 * jnp.pi * variance)).sum()


star = Star(
    (Orbit(5.0, period=20.885258, transit=2072.79438), Orbit(5.0, period=42.363011, transit=2082.62516)),
    offset=0.0,
    slope=0.0,
    jitter=2.6,
)
print(pg.summary(star), end="\n\n")
print(pg.check(log_likelihood)(star).raise_if_failed(), end="\n\n")

# %% [markdown]
# Fit
# ---
#
# `pg.ravel` turns the free parameters into one vector, names each entry, and puts a vector back into the model, which
# is all that SciPy and a Hessian need. Nothing here knows which parameters are free; the marks of the model decide. The
# jitter moves in a coordinate that keeps it positive, so the error bars are taken from coordinates to values, by the
# derivative of the one by the other (the delta method).


# %%
class Fit(NamedTuple):
    """A star that maximises the log density (nats), and the error bar of each free parameter."""

    star: Star
    log_density: float
    sigma: dict[str, float]


def fit(star: Star, log_density=log_likelihood) -> Fit:
    """Maximise a log density over every parameter that no mark holds."""
    start, unravel = pg.ravel(star, coordinates={"jitter": pg.coordinates.positive})

    def loss(vector: jax.Array) -> jax.Array:
        return -log_density(unravel(vector))

    value_and_grad, hessian = jax.jit(jax.value_and_grad(loss)), jax.jit(jax.hessian(loss))

    def progress(intermediate_result: OptimizeResult) -> None:
        print(f"\rFitting {start.size} parameters: {-intermediate_result.fun:.6f} nats", end="", flush=True)

    best = minimize(value_and_grad, start, method="trust-exact", jac=True, hess=hessian, callback=progress)
    print()
    by_coordinate = jax.jacobian(lambda vector: pg.ravel(unravel(vector))[0])(best.x)
    sigma = np.sqrt(np.diagonal(by_coordinate @ np.linalg.inv(hessian(best.x)) @ by_coordinate.T))
    return Fit(unravel(best.x), -float(best.fun), dict(zip(unravel.names, sigma, strict=True)))


held = fit(star)

# %% [markdown]
# Thaw
# ----
#
# `pg.thaw` removes the marks. The prior is what the light curve says about the periods, addressed by the same paths
# that select them. The velocities determine the periods a hundred times less precisely. With the prior, masses and
# error bars are those of the fit that held the periods; without it, the error bars show what the velocities alone can
# tell.

# %%
LIGHT_CURVE = {"planets[0].period": (20.8851, 0.0003), "planets[1].period": (42.3633, 0.0006)}


def log_posterior(star: Star) -> jax.Array:
    """Log likelihood and log prior of the periods, up to a constant."""
    return log_likelihood(star) - 0.5 * sum(
        ((pg.select(star, path) - mean) / sigma) ** 2 for path, (mean, sigma) in LIGHT_CURVE.items()
    )


free = pg.thaw(held.star, "planets[*].period")
with_prior = fit(free, log_posterior)
without_prior = fit(free)

# %% [markdown]
# Results
# -------


# %%
def masses(fit: Fit, stellar_mass: float = 1.12) -> list[tuple[float, float]]:
    """The mass of each planet and its error bar, in Earth masses; the star's mass is in solar masses."""
    # A planet of Jupiter's mass (317.83 Earths) pulls the Sun at 28.4329 m/s from a circular orbit of one year.
    unit = [
        317.83 / 28.4329 * stellar_mass ** (2 / 3) * (orbit.period / 365.25) ** (1 / 3) for orbit in fit.star.planets
    ]
    return [
        (scale * orbit.amplitude, scale * fit.sigma[f"planets[{i}].amplitude"])
        for i, (scale, orbit) in enumerate(zip(unit, fit.star.planets, strict=True))
    ]


def print_table(fits: dict[str, Fit]) -> None:
    """Print every parameter that any of the fits left free, with its error bar."""
    print(f"\n{'parameter':22}" + "".join(f"{name:>24}" for name in fits))
    for path, _ in pg.items(free):
        values = [f"{pg.select(fit.star, path):.4f} ± {fit.sigma.get(path, 0):.4f}" for fit in fits.values()]
        print(f"{path:22}" + "".join(f"{value.replace('± 0.0000', '(held)'):>24}" for value in values))
    print(f"{'log density (nats)':22}" + "".join(f"{fit.log_density:>24.4f}" for fit in fits.values()))
    for i, name in enumerate(("b", "c")):
        rows = [masses(fit)[i] for fit in fits.values()]
        print(
            f"{f'mass of {name} (Earths)':22}" + "".join(f"{f'{mass:.1f} ± {sigma:.1f}':>24}" for mass, sigma in rows)
        )


def agrees(what: str, expected: float, got: float, tolerance: float) -> bool:
    """Print one comparison; return whether it agrees."""
    ok = abs(got - expected) <= tolerance
    print(f"{what:44}{expected:>12.8g}{got:>12.8g}  {'ok' if ok else 'MISSED'}")
    return bool(ok)


print_table({"periods held": held, "thawed, with prior": with_prior, "thawed, no prior": without_prior})

print(f"\n{'':44}{'expected':>12}{'got':>12}")
agree = [agrees("log likelihood, periods held (nats)", -85.3245, held.log_density, 1e-4)]
# Amplitudes and their error bars (m/s), and the published masses, which come from a posterior with free eccentricities.
for i, (amplitude, sigma, mass, mass_sigma) in enumerate([(4.766, 0.91, 21.0, 5.4), (4.864, 0.90, 27.0, 6.9)]):
    path = f"planets[{i}].amplitude"
    agree += [
        agrees(f"{path} (m/s)", amplitude, pg.select(held.star, path), 1e-3),
        agrees(f"  its error bar (m/s), from {len(held.sigma)} parameters", sigma, held.sigma[path], 5e-3),
        agrees("  the same with the period thawed (m/s)", sigma, with_prior.sigma[path], 5e-3),
        agrees("  mass (Earths), to half its error bar", mass, masses(held)[i][0], mass_sigma / 2),
    ]

# %% [markdown]
# Picture
# -------


# %%
def draw(star: Star) -> Figure:
    """Draw the velocities with the fit, and each planet's contribution against the phase of its orbit."""
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    top, *panels = figure.subplot_mosaic("AA;BC").values()
    sigma = np.hypot(error, star.jitter)
    when = np.linspace(time.min() - 3, time.max() + 3, 1000)
    points = {"fmt": ".", "color": "black", "ecolor": "0.6", "elinewidth": 0.8}
    top.errorbar(time, velocity, sigma, **points)
    top.plot(when, star(when), color="C0", linewidth=1)
    top.set(xlabel="time (BJD - 2454833, days)", ylabel="velocity of K2-24 (m/s)")
    for axis, letter, planet, (mass, mass_sigma) in zip(panels, "bc", star.planets, masses(held), strict=True):
        phase = (time - planet.transit) / planet.period % 1
        axis.errorbar(phase, velocity - star(time) + planet(time), sigma, **points)
        circle = np.linspace(0, 1, 200)
        axis.plot(circle, planet(planet.transit + circle * planet.period), color="C0", linewidth=1)
        axis.set_title(f"{letter}: {mass:.0f} ± {mass_sigma:.0f} Earth masses", loc="left", fontsize="medium")
        axis.set(xlabel=f"phase of {planet.period:.2f} days since transit", ylim=(-16, 17))
    panels[0].set_ylabel("its part of the velocity (m/s)")
    return figure


draw(held.star).savefig(OUT, dpi=200)
print(f"\nPicture: {OUT}")
if not all(agree):
    raise SystemExit("A published number was missed.")
