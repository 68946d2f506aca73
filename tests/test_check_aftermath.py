"""What JAX does after a check is what it does in a process without one: its caches keep rules of libraries."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import pytest

import partgrad as pg


def ode(solver=None, adjoint=None, **more):
    field = lambda t, y, p: -p["a"] * y + p["b"] * jnp.sin(t)
    steps = diffrax.PIDController(rtol=1e-5, atol=1e-7)
    adjoint = adjoint or diffrax.RecursiveCheckpointAdjoint()

    def solved(p):
        term, start = diffrax.ODETerm(field), jnp.array([1.0, 0.5])
        solve = functools.partial(diffrax.diffeqsolve, adjoint=adjoint, stepsize_controller=steps, **more)
        return jnp.sum(solve(term, solver or diffrax.Tsit5(), 0.0, 1.0, 0.1, start, args=p, max_steps=64).ys ** 2)

    return solved


def root():
    residual = lambda y, p: y**3 + p["a"] * y - p["b"]
    newton = optimistix.Newton(rtol=1e-7, atol=1e-7)
    return lambda p: optimistix.root_find(residual, newton, jnp.array(0.5), p).value ** 2


def fitted():
    residual = lambda y, p: jnp.stack([y[0] - p["a"], y[1] * y[0] - p["b"], 0.1 * y[1]])
    solver = optimistix.LevenbergMarquardt(rtol=1e-7, atol=1e-7)
    return lambda p: jnp.sum(optimistix.least_squares(residual, solver, jnp.array([1.0, 0.3]), p).value)


def linear():
    def solved(p):
        matrix = jnp.array([[2.0, 0.3], [0.3, 1.0]]) * p["a"]
        return jnp.sum(lineax.linear_solve(lineax.MatrixLinearOperator(matrix), p["b"] * jnp.arange(1.0, 3.0)).value)

    return solved


def ruled():
    @eqx.filter_custom_vjp
    def product(pair, scale):
        return pair[0] * pair[1] * scale

    product.def_fwd(lambda perturbed, pair, scale: (product(pair, scale), None))
    product.def_bwd(lambda kept, cotangent, perturbed, pair, scale: (cotangent * pair[1], cotangent * pair[0]))
    return lambda p: product((jnp.sin(p["a"]), jnp.cos(p["b"])), 1.0) ** 2


PROGRAMS = {
    "steps that adapt": lambda: ode(saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 5))),
    "an implicit solver": lambda: ode(diffrax.Kvaerno3()),
    "an adjoint backwards in time": lambda: ode(adjoint=diffrax.BacksolveAdjoint()),
    "a root": root,
    "a least-squares fit": fitted,
    "a linear solve": linear,
    "a rule of equinox": ruled,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_derivatives_after_a_check_are_those_of_a_process_without_one(name):
    function, at = PROGRAMS[name](), {"a": jnp.array(1.3), "b": jnp.array(0.4)}
    jax.clear_caches()
    report = pg.check(function, progress=False)(at)
    assert report.ok, str(report)
    after = [jax.grad(function)(at), jax.jit(jax.grad(function))(at)]
    jax.clear_caches()
    for found in after:
        np.testing.assert_allclose(*([tree["a"], tree["b"]] for tree in (found, jax.grad(function)(at))), rtol=1e-5)
    assert str(pg.check(function, progress=False)(at)) == str(report)
