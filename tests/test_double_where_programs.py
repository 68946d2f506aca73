"""What JAX differentiates, `double_where` differentiates: flags, checkpoints, custom rules, primitives of others."""

import re

import diffrax
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec

import partgrad as pg
from helpers.flags import flag_set

MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


SHARDED = PartitionSpec("i")


X = np.array([0.3, 0.7, 1.1], np.float32)


wrapped = pg.double_where


def equal(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@jax.custom_vjp
def with_integer(x, i):
    return 2.0 * x, i + 1


with_integer.defvjp(
    lambda x, i: (with_integer(x, i), None), lambda _, ct: (2.0 * ct[0], np.zeros((), jax.dtypes.float0))
)


def checkpointed_scan(x):
    return jax.checkpoint(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0])(x)


def sharded_branch(x):
    body = lambda v: jnp.where(v > 0, lax.cond(v.sum() > 0, jnp.log, lambda v: v, v), 0.0)
    return jax.shard_map(body, mesh=MESH, in_specs=SHARDED, out_specs=SHARDED)(x).sum()


@jax.custom_batching.custom_vmap
def batched(x):
    return jnp.sin(x)


batched.def_vmap(lambda size, is_batched, x: (jnp.sin(x), is_batched[0]))


@jax.custom_jvp
def zero_beside(x):
    return 2.0 * x, x


zero_beside.defjvp(
    lambda primals, tangents: (zero_beside(*primals), (SymbolicZero(jax.typeof(primals[0])), tangents[0]))
)


def conjugate_gradient(x):
    like = jax.ShapeDtypeStruct((2,), jnp.float32)
    operator = lineax.FunctionLinearOperator(lambda v: v * x * 2.0, like, lineax.positive_semidefinite_tag)
    return lineax.linear_solve(operator, jnp.ones(2), lineax.CG(1e-6, 1e-6)).value.sum()


def root(x):
    return optimistix.root_find(lambda y, a: y * y - a, optimistix.Newton(1e-6, 1e-6), 1.0, x).value


def least_squares(x):
    residuals, solver = lambda y, a: jnp.stack([y * y - a, y]), optimistix.GaussNewton(1e-3, 1e-3)
    return optimistix.least_squares(residuals, solver, jnp.float32(1.0), x, max_steps=2, throw=False).value


def solved(adjoint):
    def f(a):
        field = lambda t, y, a: -y * jnp.where(a > 0, jnp.sqrt(a), 1.0)
        solve = lambda: diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Euler(), 0.0, 1.0, 0.5, jnp.float32(1.0), a, adjoint=adjoint, max_steps=2
        )
        return solve().ys[-1]

    return f


HALF = np.float32(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "x"),
    [
        pytest.param(lambda x: with_integer(x, 1)[0], HALF, id="an integer output"),
        pytest.param(solved(diffrax.RecursiveCheckpointAdjoint()), HALF, id="a checkpointed loop of diffrax"),
        pytest.param(
            lambda x: lax.fori_loop(0, 3, lambda i, c: with_integer(*c), (x, 0))[0], HALF, id="an integer carry"
        ),
        pytest.param(
            lambda x: jax.checkpoint(jnp.multiply, prevent_cse=(True, False))(x, x), HALF, id="a checkpoint's flags"
        ),
        pytest.param(conjugate_gradient, 0.5, id="a float for lineax"),
        pytest.param(root, 0.5, id="a float for optimistix"),
        pytest.param(least_squares, HALF, id="numbers for Gauss-Newton"),
        pytest.param(solved(diffrax.BacksolveAdjoint()), 0.5, id="a float for diffrax, solved backwards"),
    ],
)
def test_what_jax_differentiates(f, x):
    equal(jax.grad(wrapped(f))(x), jax.grad(f)(x))


@pytest.mark.slow
@pytest.mark.parametrize("prevented", [(True, False), (False, True)])
def test_a_checkpoint_hides_what_its_flags_say(prevented):
    f = jax.checkpoint(lambda x, y: jnp.sin(jnp.sin(x)) * jnp.sin(jnp.sin(y)), prevent_cse=prevented)
    text = lambda f: jax.jit(jax.grad(f, argnums=(0, 1))).lower(HALF, HALF).as_text()
    hidden = lambda f: [len(found.split(",")) for found in re.findall(r"optimization_barrier (.*) :", text(f))]
    assert hidden(wrapped(f)) == hidden(f)
    assert hidden(f)


@pytest.mark.slow
def test_a_branch_in_a_shard_map():
    equal(jax.grad(wrapped(sharded_branch))(X), 1 / X)


@pytest.mark.slow
def test_the_hessian_of_a_checkpointed_scan():
    equal(jax.hessian(wrapped(checkpointed_scan))(0.5), jax.hessian(checkpointed_scan)(0.5))


def test_custom_vmap_in_forward_mode():
    equal(jax.jvp(wrapped(batched), (0.5,), (1.0,)), (np.sin(0.5), np.cos(0.5)))


def test_a_rule_that_returns_a_symbolic_zero():
    equal(jax.jvp(wrapped(lambda x: zero_beside(x)[1] * 2.0), (1.0,), (1.0,)), (2.0, 2.0))


@pytest.mark.slow
def test_a_custom_rule_inside_of_a_backward_pass_that_clips():
    scaled = jax.custom_jvp(lambda x, c: x * c)
    scaled.defjvp(lambda p, t: (scaled(*p), t[0] * p[1] + p[0] * t[1]))
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (scaled(jnp.clip(ct, -1.0, 1.0), jnp.cos(x)),))
    selected = lambda x: jnp.where(x > 0, f(x), 0.0).sum()
    twice = jax.jacrev(jax.jacrev(wrapped(selected)))
    equal(twice(np.array([0.5, -1.0], np.float32)), [[-np.sin(0.5), 0], [0, 0]])


def test_zeros_stay_symbolic():
    seen = []
    f = jax.custom_vjp(lambda x, y: (2.0 * x, 3.0 * y))

    def backward(_, ct):
        seen.append([isinstance(c, SymbolicZero) for c in ct])
        return 2.0 * ct[0], None

    f.defvjp(lambda x, y: ((2.0 * x.value, 3.0 * y.value), None), backward, symbolic_zeros=True)
    equal(jax.grad(wrapped(lambda x: f(x, 2.0)[0]))(1.0), 2.0)
    assert seen == [[False, True]]


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3"])
def test_opt_in_flags(flag):
    with flag_set(flag):
        f = jax.custom_vjp(lambda x: jnp.sin(x))
        f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
        equal(jax.grad(wrapped(lambda x: f(jax.checkpoint(jnp.sin)(x))))(0.5), np.cos(np.sin(0.5)) * np.cos(0.5))


@pytest.mark.slow
def test_checkpoints_under_a_flag():
    with flag_set("jax_remat3"):
        step = jax.checkpoint(lambda c: jnp.where(c > 0, 1.0 + jnp.log(checkpoint_name(c, "kept")), c))
        f = wrapped(lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0])
        equal([jax.grad(f)(x) for x in (0.0, 2.0)], [1.0, 1 / (2 * (1 + np.log(2)))])
        assert np.isfinite(jax.grad(jax.grad(f))(0.0))
        linear = jax.linearize(wrapped(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))), 0.5)[1]
        assert "cosine" in jax.jit(linear).lower(1.0).as_text()


@pytest.mark.parametrize("number", [2.0, np.float32(2.0), np.array(2.0, np.float32)], ids=["float", "scalar", "array"])
def test_primitives_of_others_are_transposed_at_arrays(number):
    """The rules of lineax and optimistix treat anything that is not a JAX array as static data."""
    scaled, seen = Primitive("scaled"), []
    scaled.def_impl(jnp.multiply)
    scaled.def_abstract_eval(lambda x, c: x)

    def transposed(cotangent, x, c):
        seen.append(isinstance(c, jax.Array))
        return cotangent * c, None

    ad.primitive_jvps[scaled] = lambda primals, tangents: (scaled.bind(*primals), scaled.bind(tangents[0], primals[1]))
    ad.primitive_transposes[scaled] = transposed
    mlir.register_lowering(scaled, mlir.lower_fun(jnp.multiply, multiple_results=False))
    f = lambda x: scaled.bind(x, number) * x
    assert jax.grad(pg.double_where(f))(3.0) == 12.0
    assert seen
    assert all(seen)


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
def test_under_jit_a_flag_stops_only_at_what_is_returned(flag):
    guarded = pg.double_where(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0))
    selected = pg.double_where(lambda x: jnp.where(x >= 0, jnp.log(x), 0.0))
    with flag_set(flag):
        assert jax.jit(jax.grad(guarded))(0.0) == 0.0
        assert jax.jit(jax.grad(jax.grad(guarded)))(0.0) == 0.0
        assert jax.jit(lambda x: jax.jvp(guarded, (x,), (1.0,))[1])(0.0) == 0.0
        if flag == "jax_debug_infs":
            with pytest.raises(FloatingPointError):
                jax.jit(jax.grad(selected))(0.0)
