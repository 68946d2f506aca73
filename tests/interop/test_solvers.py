"""optimistix, lineax, diffrax, jaxopt and scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decay import Decay, assert_fitted, loss, residuals, start

import partgrad as pg


def split():
    selected, rest = pg.partition(start())
    return selected, rest, lambda function: lambda selected, rest: function(pg.combine(selected, rest))


@pytest.mark.library("optimistix", lines="selected, rest = pg.partition(start())")
@pytest.mark.parametrize("solver", ["BFGS", "LevenbergMarquardt"])
def test_optimistix_minimise_and_least_squares(solver):
    """`minimise` and `least_squares` over what is free; the rest goes in `args`"""
    optx = pytest.importorskip("optimistix")
    selected, rest, of = split()
    if solver == "BFGS":
        solution = optx.minimise(of(loss), optx.BFGS(1e-6, 1e-6), selected, rest, max_steps=100)
    else:
        solution = optx.least_squares(of(residuals), optx.LevenbergMarquardt(1e-6, 1e-6), selected, rest)
    assert_fitted(pg.combine(solution.value, rest))


@pytest.mark.library("optimistix", lines="selected, rest = pg.partition(start())")
def test_optimistix_over_a_frozen_equinox_module():
    """`least_squares` over an equinox module, of which a part is frozen"""
    optx, eqx = pytest.importorskip("optimistix"), pytest.importorskip("equinox")

    class Line(eqx.Module):
        slope: jax.Array
        offset: jax.Array

    x = jnp.arange(4.0)
    line = pg.freeze(Line(jnp.array(1.0), jnp.array(0.5)), "offset")
    misfit = lambda line: line.slope * x + line.offset - (3.0 * x + 0.5)
    selected, rest = pg.partition(line)
    of = lambda selected, rest: misfit(pg.combine(selected, rest))
    solution = optx.least_squares(of, optx.LevenbergMarquardt(1e-6, 1e-6), selected, rest)
    fitted = pg.combine(solution.value, rest)
    np.testing.assert_allclose((fitted.slope, fitted.offset), (3.0, 0.5), rtol=1e-5)


@pytest.mark.library("optimistix")
def test_optimistix_implicit_derivative():
    """the derivative of a root by a named parameter (implicit differentiation)"""
    optx = pytest.importorskip("optimistix")

    def half_life(model):
        """The time at which half of the amplitude is left: log 2 / rate."""
        equation = lambda t, model: model(t) - model.level - 0.5 * model.amplitude
        return optx.root_find(equation, optx.Newton(1e-6, 1e-6), jnp.array(0.1), model).value

    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))
    gradient = pg.grad(half_life)(model)
    np.testing.assert_allclose(gradient.rate, -np.log(2) / 9, rtol=1e-4)
    np.testing.assert_allclose(gradient.amplitude, 0, atol=1e-5)
    assert gradient.level is None


@pytest.mark.library("lineax", lines="selected, rest = pg.partition(start())")
def test_lineax():
    """Gauss-Newton steps by `linear_solve`, on operators whose structure is the selected part"""
    lx = pytest.importorskip("lineax")
    selected, rest, of = split()

    @jax.jit
    def step(selected):
        operator = lx.JacobianLinearOperator(of(residuals), selected, rest)
        normal = lx.TaggedLinearOperator(operator.T @ operator, lx.positive_semidefinite_tag)
        downhill = operator.T.mv(-of(residuals)(selected, rest))
        return pg.apply_updates(selected, lx.linear_solve(normal, downhill, lx.CG(1e-6, 1e-6)).value)

    for _ in range(12):
        selected = step(selected)
    assert_fitted(pg.combine(selected, rest), 1e-3)


ADJOINTS = ["RecursiveCheckpointAdjoint", "DirectAdjoint", "BacksolveAdjoint", "ForwardMode"]


@pytest.mark.library("diffrax")
@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_diffrax(adjoint):
    """`diffeqsolve` with a model as its `args`, by every adjoint"""
    diffrax = pytest.importorskip("diffrax")
    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))

    def end(model):
        """y(1) of y' = rate (level - y), y(0) = level + amplitude, which is model(1)."""
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, model: model.rate * (model.level - y)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            model.level + model.amplitude,
            model,
            adjoint=getattr(diffrax, adjoint)(),
            stepsize_controller=diffrax.PIDController(1e-5, 1e-6),
            max_steps=64,
        )
        return solution.ys[0]

    derivative = pg.jacfwd if adjoint == "ForwardMode" else pg.grad
    gradient = derivative(end)(model)
    np.testing.assert_allclose([gradient.amplitude, gradient.rate], [np.exp(-3), -2 * np.exp(-3)], rtol=1e-2)
    assert gradient.level is None
    np.testing.assert_allclose(derivative(end, wrt="level")(model), 1.0, rtol=1e-3)


@pytest.mark.library("diffrax")
def test_diffrax_steady_state():
    """a steady state, by `ImplicitAdjoint`"""
    diffrax = pytest.importorskip("diffrax")
    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))

    def settled(model):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, model: model.rate * (model.level * model.amplitude - y)),
            diffrax.Tsit5(),
            0.0,
            jnp.inf,
            0.1,
            jnp.array(0.0),
            model,
            adjoint=diffrax.ImplicitAdjoint(),
            stepsize_controller=diffrax.PIDController(1e-5, 1e-6),
            event=diffrax.Event(diffrax.steady_state_event()),
            max_steps=None,
        )
        return solution.ys[0]

    gradient = pg.grad(settled)(model)
    np.testing.assert_allclose([gradient.amplitude, gradient.rate], [0.5, 0.0], atol=1e-3)
    np.testing.assert_allclose(pg.grad(settled, wrt="level")(model), 2.0, rtol=1e-3)


@pytest.mark.library("jaxopt", lines="selected, rest = pg.partition(start())")
def test_jaxopt():
    """`LBFGS` over what is free"""
    with pytest.warns(DeprecationWarning, match="JAXopt"):
        import jaxopt
    selected, rest, of = split()
    selected, _ = jaxopt.LBFGS(of(loss), maxiter=50).run(selected, rest)
    assert_fitted(pg.combine(selected, rest))


@pytest.mark.library("scipy", lines="vector, unravel = pg.ravel(model)")
@pytest.mark.parametrize("function", ["minimize", "least_squares"])
def test_scipy(function):
    """`minimize` and `least_squares`, by one vector with names"""
    optimize = pytest.importorskip("scipy.optimize")
    model = start()
    vector, unravel = pg.ravel(model)
    if function == "minimize":
        value_and_grad = jax.jit(jax.value_and_grad(lambda vector: loss(unravel(vector))))
        best = optimize.minimize(value_and_grad, vector, jac=True, method="BFGS", options={"gtol": 1e-7})
    else:
        flat = jax.jit(lambda vector: residuals(unravel(vector)))
        best = optimize.least_squares(flat, vector, jac=jax.jit(jax.jacfwd(flat)))
    assert unravel.names == ("amplitude", "rate")
    assert_fitted(unravel(best.x))
