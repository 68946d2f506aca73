"""The examples. Mauna Loa: its kernels, its gradients, and a whole run on the real data. Fits on many devices."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mauna_loa
import partgrad as pg
from kernels import RBF, Periodic, Product, RationalQuadratic, Sum, White

SCRIPT = Path(mauna_loa.__file__)
T = np.array([0.0, 0.3, 1.0, 7.25])
R = T[:, None] - T


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def data(every=1):
    t, co2_ppm = mauna_loa.load_co2()
    return t[::every], (co2_ppm - co2_ppm.mean())[::every]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (RBF(2.0, 3.0), 4 * np.exp(-(R**2) / 18)),
        (RationalQuadratic(2.0, 3.0, 0.5), 4 * (1 + R**2 / 9) ** -0.5),
        (Periodic(1.5, 0.9), np.exp(-2 * np.sin(np.pi * R / 0.9) ** 2 / 1.5**2)),
        (White(0.2), 0.04 * np.eye(4)),
        (RBF(2.0, 3.0) + White(0.2), 4 * np.exp(-(R**2) / 18) + 0.04 * np.eye(4)),
        (RBF(2.0, 3.0) * RBF(0.5, 1.0), np.exp(-(R**2) / 18 - R**2 / 2)),
        (
            White(0.2) + RBF(2.0, 3.0) * Periodic(1.5),
            0.04 * np.eye(4) + 4 * np.exp(-(R**2) / 18 - 8 / 9 * np.sin(np.pi * R) ** 2),
        ),
    ],
    ids=["rbf", "rational quadratic", "periodic", "white", "sum", "product", "sum with product"],
)
def test_kernel_is_its_formula(kernel, expected):
    t = jnp.asarray(T)
    np.testing.assert_allclose(kernel(t[:, None], t), expected, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(kernel(t, t), np.diag(expected), rtol=1e-14)


def test_operators_build_flat_sums_and_products():
    a, b, c, d = RBF(1.0, 2.0), Periodic(3.0), White(4.0), RBF(5.0, 6.0)
    assert a + b * d + c == Sum((a, Product((b, d)), c))
    assert (a + b) + (c + d) == Sum((a, b, c, d))
    assert (a * b) * (c * d) == Product((a, b, c, d))
    assert (a + b) * c == Product((Sum((a, b)), c))


@pytest.mark.slow
def test_selectors_reach_into_a_kernel_sum():
    t = jnp.asarray(T)
    kernel = RBF(1.0, 2.0) + RBF(3.0, 4.0) * Periodic(1.5)

    def variance(k):
        return k(t, t).sum()

    amplitudes = pg.grad(variance, wrt=lambda k: k.amplitude)(kernel)
    # Not `== RBF(8.0, None)`: models compare as `jit` does, for which an array is another thing than a Python number.
    assert vars(amplitudes.terms[0]) == vars(RBF(8.0, None))
    assert vars(amplitudes.terms[1].factors[0]) == vars(RBF(24.0, None))
    assert jax.tree.leaves(amplitudes.terms[1].factors[1]) == []
    np.testing.assert_allclose(pg.grad(variance, wrt="terms[1].factors[0].amplitude")(kernel), 24.0)
    np.testing.assert_allclose(pg.grad(variance, wrt=lambda k: k.terms[0])(kernel).amplitude, 8.0)


@pytest.mark.slow
def test_period_is_held_until_it_is_thawed():
    t = jnp.asarray(T)
    kernel = RBF(1.0, 2.0) + RBF(3.0, 4.0) * Periodic(1.5)

    def covariance(k):
        return k(t[:, None], t).sum()

    held = pg.grad(covariance)(kernel)
    thawed = pg.grad(covariance)(pg.thaw(kernel, lambda k: k.period))
    assert held.terms[1].factors[1].period is None
    assert thawed.terms[1].factors[1].period == pg.grad(covariance, wrt="terms[1].factors[1].period")(kernel) != 0


@pytest.mark.slow
def test_log_marginal_likelihood_is_the_density_of_the_data():
    t, y = data(every=40)
    kernel = mauna_loa.book_kernel()
    covariance = np.asarray(kernel(t[:, None], t))
    expected = -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    np.testing.assert_allclose(mauna_loa.log_marginal_likelihood(kernel, t, y), expected, rtol=1e-11)


@pytest.mark.slow
def test_log_marginal_likelihood_at_the_values_of_the_book():
    t, y = data()
    assert len(t) == 521
    assert abs(mauna_loa.log_marginal_likelihood(mauna_loa.book_kernel(), t, y) - -116.98344547) < 1e-7


@pytest.mark.slow
def test_the_derivative_of_the_density_is_that_through_its_cholesky_factor():
    r = np.arange(4.0)
    vector = np.cos(r)

    def density(of, a):
        return of(jnp.exp(-a * (r[:, None] - r) ** 2) + a * jnp.eye(4), a**2 * vector)

    plain = lambda covariance, y: mauna_loa._log_normal_density(jnp.linalg.cholesky(covariance), y)
    for differentiate in (jax.value_and_grad, jax.hessian):
        by_rule, through = (
            jax.jit(differentiate(functools.partial(density, of)))(0.7) for of in (mauna_loa.log_normal_density, plain)
        )
        np.testing.assert_allclose(by_rule, through, rtol=1e-9)


@pytest.mark.slow
def test_gradient_is_the_central_difference():
    t, y = (values[:100] for values in data())
    kernel = pg.thaw(mauna_loa.book_kernel(), lambda k: k.period)
    parameters, treedef = jax.tree.flatten(kernel)
    gradient = np.array(jax.tree.leaves(pg.grad(mauna_loa.log_marginal_likelihood)(kernel, t, y)))
    value = jax.jit(mauna_loa.log_marginal_likelihood)

    def difference(i, step=1e-4):
        """By the logarithm of parameter i, so that one step suits them all."""
        ends = [[p * np.exp(h) if k == i else p for k, p in enumerate(parameters)] for h in (-step, step)]
        low, high = (value(treedef.unflatten(end), t, y) for end in ends)
        return (high - low) / (2 * step)

    assert len(parameters) == 12
    differences = [difference(i) for i in range(12)]
    np.testing.assert_allclose(gradient * parameters, differences, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_components_add_up_to_the_signal():
    t, y = data(every=10)
    kernel = mauna_loa.book_kernel()
    *components, signal = (
        mauna_loa.posterior(part, kernel, t, y, t)[0] for part in [*kernel.terms[:-1], Sum(kernel.terms[:-1])]
    )
    np.testing.assert_allclose(sum(components), signal, atol=1e-8)
    np.testing.assert_allclose(signal, y, atol=4 * 0.19)


@pytest.mark.slow
def test_script_reproduces_every_published_number(tmp_path):
    """As a user runs it, once for everything that it has to show, since it takes long."""
    command = [sys.executable, "-W", "error", str(SCRIPT), "--out", "picture.png"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    # A check that takes long says so.
    assert [line for line in run.stderr.splitlines() if not line.startswith("check: ")] == []
    assert run.returncode == 0
    assert "MISSED" not in run.stdout
    checks = [line for line in run.stdout.splitlines() if line.endswith("  ok")]
    assert len(checks) == 4 + 11
    for number in ("-116.98344547", "-115.05029767", "-114.16557611", "0.99957"):
        assert any(number in line for line in checks)
    # It reports every parameter.
    rows = dict(re.findall(r"^(terms\S+) +(?:ppm|yr|-) +(free|held) ", run.stdout, re.MULTILINE))
    assert len(rows) == 12
    assert [path for path, mark in rows.items() if mark == "held"] == ["terms[1].factors[1].period"]
    assert "Fitting 11 parameters" in run.stdout
    assert "Fitting 12 parameters" in run.stdout
    # It checks its gradient first.
    report = run.stdout.partition("\nFitting ")[0]
    assert report.startswith("log_marginal_likelihood: ok")
    verdicts = dict(re.findall(r"^(terms\S+) +float +(.*?)(?:  |$)", report, re.MULTILINE))
    held = "terms[1].factors[1].period"
    assert len(verdicts) == 12
    assert [path for path, verdict in verdicts.items() if verdict != "ok"] == [held]
    assert re.search(rf"^{re.escape(held)} +float +held by a mark$", report, re.MULTILINE)
    # It draws its picture, and leaves nothing else.
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_script_fails_where_a_number_is_missed(capsys):
    book = mauna_loa.book_kernel()
    unfitted = mauna_loa.Fit(book, -117.0, book)
    assert not mauna_loa.print_checks(-116.98344547, unfitted, unfitted)
    out = capsys.readouterr().out
    assert out.count("MISSED") > 3
    assert out.count("  ok\n") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded_fit.py", "multihost_fit.py"])
def test_fits_on_many_devices_have_the_numbers_of_one(name):
    run = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT.with_name(name))], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = re.findall(r"^(\w[\w ]+?)  +loss (\S+) -> (\S+)  ok$", run.stdout, re.MULTILINE)
    assert [found[0] for found in losses] == ["one device", "data split", "parameters split too"]
    assert len({found[1:] for found in losses}) == 1
