"""
Carbon dioxide at Mauna Loa: a Gaussian process
===============================================

A Gaussian process is fitted with its period held, and again with its period thawed.

The data are monthly means of 1958-2001 (Keeling & Whorf 2004, from statsmodels); the kernel is that of Rasmussen &
Williams, "Gaussian Processes for Machine Learning" (2006), section 5.4.3. `book_kernel` states the model once, and
marks on it decide what is fitted. The script checks the gradient before it fits, compares its results with published
ones, and fails if either is wrong::

    python examples/mauna_loa.py [--out mauna_loa.png]
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from matplotlib.figure import Figure
from scipy.optimize import OptimizeResult, minimize
from statsmodels.datasets import co2

import partgrad as pg
from kernels import RBF, Kernel, Periodic, RationalQuadratic, Sum, White

UNITS = {"amplitude": "ppm", "lengthscale": "yr", "period": "yr"}
COMPONENTS = ("long-term trend", "seasonal cycle", "years-long anomalies", "months-long anomalies")
FORECAST_YEARS = 20
# scikit-learn's kernel for the same data, as its documentation prints it; the noise, which comes last, as a variance.
SCIKIT_LEARN = ("44.8", "51.6", "2.64", "91.5", "1.48", "0.536", "0.968", "2.89", "0.188", "0.122", "0.0367")


# %%
# Data and model
# --------------
#
# The class of the periodic kernel marks its period, so no fit changes it until it is thawed.


def load_co2() -> tuple[jax.Array, jax.Array]:
    """The middle of each month (yr) and its mean CO2 (ppm); months without a measurement are left out."""
    monthly = co2.load_pandas().data["co2"].resample("MS").mean().dropna()
    return jnp.asarray(monthly.index.year + (monthly.index.month - 0.5) / 12), jnp.asarray(monthly.to_numpy())


def book_kernel() -> Kernel:
    """The kernel of Rasmussen & Williams (eqs. 5.14-5.18) at the values in the book: ppm and years."""
    trend = RBF(amplitude=66.0, lengthscale=67.0)
    seasonal = RBF(amplitude=2.4, lengthscale=90.0) * Periodic(smoothness=1.3)
    irregular = RationalQuadratic(amplitude=0.66, lengthscale=1.2, alpha=0.78)
    noise = RBF(amplitude=0.18, lengthscale=1.6 / 12) + White(amplitude=0.19)
    return trend + seasonal + irregular + noise


# %%
# The likelihood, with a derivative by hand
# -----------------------------------------


def log_marginal_likelihood(kernel: Kernel, t: jax.Array, y: jax.Array) -> jax.Array:
    """The log probability density of data `y` (zero mean, ppm) at times `t` (yr) under a Gaussian process, in nats."""
    return log_normal_density(kernel(t[:, None], t), y)


@jax.custom_jvp
def log_normal_density(covariance: jax.Array, y: jax.Array) -> jax.Array:
    """The log probability density of `y` under a normal distribution with mean zero, in nats."""
    return _log_normal_density(jnp.linalg.cholesky(covariance), y)


def _log_normal_density(cholesky: jax.Array, y: jax.Array) -> jax.Array:
    whitened = solve_triangular(cholesky, y, lower=True)
    return -0.5 * (whitened @ whitened + len(y) * jnp.log(2 * jnp.pi)) - jnp.log(jnp.diagonal(cholesky)).sum()


@log_normal_density.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The derivative as the book has it (eq. 5.9): by the inverse, which costs less than differentiating Cholesky."""
    covariance, y = primals
    cholesky = jnp.linalg.cholesky(covariance)
    inverse = cho_solve((cholesky, True), jnp.eye(len(y)))
    weights = inverse @ y
    by_covariance = 0.5 * (jnp.outer(weights, weights) - inverse)
    return _log_normal_density(cholesky, y), (by_covariance * tangents[0]).sum() - weights @ tangents[1]


def posterior(part: Kernel, kernel: Kernel, t: jax.Array, y: jax.Array, when: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean and standard deviation, in ppm at times `when` (yr), of one part of the process, given all the data."""
    cholesky = jnp.linalg.cholesky(kernel(t[:, None], t))
    whitened, explained = (solve_triangular(cholesky, b, lower=True) for b in (y, part(t[:, None], when)))
    return explained.T @ whitened, jnp.sqrt(part(when, when) - (explained**2).sum(axis=0))


# %%
# The fit
# -------
#
# An optimiser of SciPy sees one vector: the logarithms of what no mark holds. That every parameter is positive is said
# here, and nowhere in the model.

LOGARITHMS = {"**": (jnp.exp, jnp.log)}


class Fit(NamedTuple):
    """A kernel that maximises the log marginal likelihood (nats), and the gradient there by log parameter."""

    kernel: Kernel
    log_marginal_likelihood: float
    gradient: dict[str, float]


def fit(kernel: Kernel, t: jax.Array, y: jax.Array) -> Fit:
    """Maximise the log marginal likelihood over every parameter that no mark holds, starting from their values."""
    start, unravel = pg.ravel(kernel, coordinates=LOGARITHMS)

    @jax.jit
    @jax.value_and_grad
    def loss(vector: jax.Array) -> jax.Array:
        return -log_marginal_likelihood(unravel(vector), t, y)

    fitting = f"Fitting {start.size} parameters"

    def progress(intermediate_result: OptimizeResult) -> None:
        if sys.stdout.isatty():
            print(f"\r{fitting}: {-intermediate_result.fun:.6f} nats", end="", flush=True)

    best = minimize(loss, start, method="BFGS", jac=True, callback=progress, options={"gtol": 1e-3})
    print(f"\r{fitting}: {-best.fun:.6f} nats" if sys.stdout.isatty() else f"{fitting}: {-best.fun:.6f} nats")
    return Fit(unravel(best.x), -float(best.fun), dict(zip(unravel.names, -best.jac, strict=True)))


# %%
# What it prints
# --------------


def by_path(tree: Kernel) -> dict[str, float]:
    """The leaves of a kernel by path, without those that are None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).removeprefix("."): float(leaf) for path, leaf in leaves}


def print_report(kernel: Kernel, t: jax.Array, y: jax.Array) -> None:
    """Print what `partgrad.check` says about the gradient used in the fit; an error stops the script."""
    # A matrix of a quarter of the size is the same program, and is differentiated many times here.
    report = pg.check(log_marginal_likelihood)(kernel, t[::4], y[::4])
    print(report.raise_if_failed(), end="\n\n")


def print_gradients(book: Kernel, held: Fit, t: jax.Array, y: jax.Array) -> None:
    """Print two gradients, each with one selector: every amplitude, and the period despite its mark."""
    amplitudes = by_path(pg.grad(log_marginal_likelihood, wrt=lambda k: k.amplitude)(book, t, y))
    print("\nGradient by amplitude at the book's values (nats/ppm), wrt=lambda k: k.amplitude")
    print("  " + ", ".join(f"{path.removesuffix('.amplitude')} {slope:.3g}" for path, slope in amplitudes.items()))
    slope = pg.grad(log_marginal_likelihood, wrt="terms[1].factors[1].period")(held.kernel, t, y)
    print(f"Gradient by the period where it was held, named in spite of its mark: {slope:.0f} nats/yr")


def print_table(start: Kernel, held: Fit, thawed: Fit) -> None:
    """Print both fits parameter by parameter."""
    print(f"\n{'parameter':31}{'unit':>5}{'mark':>6}{'start':>8}{'fit':>10}{'slope':>8}{'thawed':>10}{'slope':>8}")
    values = [by_path(tree) for tree in (start, held.kernel, thawed.kernel)]
    columns = (values[0], values[1], held.gradient, values[2], thawed.gradient)
    for path in columns[0]:
        first, fit1, slope1, fit2, slope2 = (column.get(path) for column in columns)
        unit = UNITS.get(path.rpartition(".")[2], "-")
        mark, slope = ("held", "-") if slope1 is None else ("free", f"{slope1:.0e}")
        print(f"{path:31}{unit:>5}{mark:>6}{first:8.3g}{fit1:10.5g}{slope:>8}{fit2:10.5g}{slope2:8.0e}")
    print("(slope: gradient of the log marginal likelihood by the logarithm of the parameter, in nats)")
    print(f"log marginal likelihood (nats): {held.log_marginal_likelihood:.6f}, {thawed.log_marginal_likelihood:.6f}")


def print_check(what: str, expected: str, got: str, agrees: bool) -> bool:
    """Print one comparison; return whether it agrees."""
    print(f"{what:44}{expected:>15}{got:>15}  {'ok' if agrees else 'MISSED'}")
    return agrees


def print_checks(at_book: float, held: Fit, thawed: Fit) -> bool:
    """Compare log marginal likelihoods (nats) and fitted parameters with published ones; return whether all agree."""
    print(f"\n{'':44}{'expected':>15}{'got':>15}")
    agree = [
        print_check(what, f"{expected:.8f}", f"{got:.8f}", abs(got - expected) <= tolerance)
        for what, expected, got, tolerance in (
            ("log marginal likelihood, book's values", -116.98344547, at_book, 1e-7),
            ("its maximum, period held", -115.05029767, held.log_marginal_likelihood, 1e-4),
            ("its maximum, period thawed", -114.16557611, thawed.log_marginal_likelihood, 1e-4),
        )
    ]
    fitted = by_path(pg.partition(held.kernel)[0])
    fitted["terms[4].amplitude ** 2"] = fitted.pop("terms[4].amplitude") ** 2
    published = [(path, text, f"{fitted[path]:.3g}") for path, text in zip(fitted, SCIKIT_LEARN, strict=True)]
    period = thawed.kernel.terms[1].factors[1].period
    for what, expected, got in [("period, thawed", "0.99957", f"{period:.5f}"), *published]:
        agree.append(print_check(what, expected, got, got == expected))
    return all(agree)


# %%
# The picture, and everything in order
# ------------------------------------


def draw(kernel: Kernel, t: jax.Array, co2_ppm: jax.Array, out: Path) -> None:
    """Draw the data, the fit with its forecast, and the posterior mean of the four components."""
    when, mean = jnp.arange(t[0], t[-1] + FORECAST_YEARS, 1 / 24), co2_ppm.mean()
    # The last term is noise; what is drawn is the concentration without it.
    signal = kernel.terms[:-1]
    figure = Figure(figsize=(7, 8), layout="constrained")
    top, *rows = figure.subplots(1 + len(signal), sharex=True, height_ratios=[4, 1, 1, 1, 1])
    inset = top.inset_axes((0.75, 0.09, 0.23, 0.46), xlim=(1999, 2005), ylim=(362, 381), xticks=range(2000, 2005, 2))
    inset.tick_params(labelsize="small")

    middle, deviation = posterior(Sum(signal), kernel, t, co2_ppm - mean, when)
    low, high = mean + middle - 2 * deviation, mean + middle + 2 * deviation
    for axis in (top, inset):
        axis.plot(t, co2_ppm, ".", color="black", markersize=2.5, label="monthly mean")
        axis.plot(when, mean + middle, color="C0", linewidth=0.8, label="fit and forecast")
        axis.fill_between(when, low, high, color="C0", alpha=0.3, linewidth=0, label="± 2 standard deviations")
    for axis, part, name, offset in zip(rows, signal, COMPONENTS, (mean, 0, 0, 0), strict=True):
        axis.plot(when, offset + posterior(part, kernel, t, co2_ppm - mean, when)[0], color="C0", linewidth=0.8)
        axis.set_title(name, loc="left", fontsize="medium")
        axis.set_ylabel("ppm")
    for axis in (top, inset, *rows):
        axis.axvline(t[-1], color="0.4", linewidth=0.8, linestyle="--", label="end of the data")
    top.legend(loc="upper left", frameon=False)
    top.set(ylabel="CO$_2$ at Mauna Loa (ppm)", xlim=(when[0], when[-1]))
    rows[-1].set_xlabel("year")
    figure.align_ylabels()
    figure.savefig(out, dpi=200)


def main() -> int:
    """Fit, thaw, fit again; return 1 if a published number is missed."""
    parser = argparse.ArgumentParser(description="Mauna Loa: fit a Gaussian process, with its period held and thawed.")
    parser.add_argument("--out", type=Path, default=Path("mauna_loa.png"), help="where the picture goes")
    out = parser.parse_args().out
    # In single precision this covariance matrix has no Cholesky factor: the likelihood is NaN.
    jax.config.update("jax_enable_x64", True)

    t, co2_ppm = load_co2()
    y = co2_ppm - co2_ppm.mean()
    book = book_kernel()
    print_report(book, t, y)
    held = fit(book, t, y)
    thawed = fit(pg.thaw(held.kernel, lambda k: k.period), t, y)

    print_table(book, held, thawed)
    print_gradients(book, held, t, y)
    agree = print_checks(float(log_marginal_likelihood(book, t, y)), held, thawed)
    draw(thawed.kernel, t, co2_ppm, out)
    print(f"\nPicture: {out}")
    return 0 if agree else 1


if __name__ == "__main__" and main():
    raise SystemExit("A published number was missed.")
