"""Known to be wrong in `double_where`, each with the true number.

Everything under `known` fails today and is marked strictly: whoever puts a case right must remove its mark, and the
case stays as a test. The truths are computed by hand, or are JAX's own where nothing is to be changed.
"""

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
from flags import flag_set

# Cases that are right today; each has its law or its row elsewhere, which run by default.
pytestmark = pytest.mark.slow
OLDER = jax.__version_info__ < (0, 11)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDED = PartitionSpec("i")
wrapped = pg.double_where


def known(why, raises=AssertionError, condition=True):
    """The mark of a case that fails today; `raises` is how, `condition` where."""
    return pytest.mark.xfail(condition, strict=True, raises=raises, reason=why)


def equal(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# --- finite numbers that are changed ---------------------------------------------------------------------------------

X = np.array([0.3, 0.7, 1.1], np.float32)
BEYOND = np.array([5])


def read(x):
    return jnp.sin(x)[BEYOND][0]


def interpolated(x):
    return (0.75 * jnp.exp(x)[np.array([2])] + 0.25 * jnp.exp(x)[np.array([3])])[0]


@pytest.mark.parametrize(
    ("derivative", "f", "truth"),
    [
        (lambda f: jax.jvp(wrapped(f), (X,), (np.ones(3, np.float32),))[1], read, np.cos(1.1)),
        (lambda f: jax.jacfwd(jax.jacfwd(wrapped(f)))(X)[2, 2], read, -np.sin(1.1)),
        (lambda f: jax.grad(pg.consistent_indexing(wrapped(f)))(X)[2], read, np.cos(1.1)),
        (lambda f: jax.jacfwd(wrapped(f))(X)[2], interpolated, np.exp(1.1)),
        (lambda f: jax.jacfwd(pg.consistent_indexing(wrapped(f)))(X)[2], interpolated, np.exp(1.1)),
    ],
    ids=["forward", "second", "reverse, consistent", "interpolation", "interpolation, consistent"],
)
def test_a_read_out_of_bounds(derivative, f, truth):
    np.testing.assert_allclose(derivative(f), truth, rtol=1e-5)


@pytest.mark.parametrize("f", [lambda x: x.at[0].min(5.0)[1], lambda x: x.at[0].max(-5.0)[1]], ids=["min", "max"])
def test_a_scatter_beside_a_nan(f):
    equal(jax.grad(wrapped(f))(np.array([1.0, np.nan], np.float32)), [0.0, 1.0])


def test_a_scatter_multiply_out_of_bounds():
    f = lambda c: jnp.asarray(X).at[BEYOND].multiply(c, mode="promise_in_bounds", unique_indices=True).sum()
    equal(jax.grad(wrapped(f))(7.0), jax.grad(f)(7.0))


@jax.custom_jvp
def constant_rule(x):
    return x


constant_rule.defjvp(lambda primals, tangents: (primals[0], jnp.float32(3.0)))


def test_a_rule_that_ignores_its_tangent():
    equal(jax.jvp(wrapped(constant_rule), (1.0,), (1.0,)), (1.0, 3.0))


@pytest.mark.parametrize(
    ("f", "x"), [(lambda i: i // 2, np.int64(2**40)), (lambda x: x / 3, np.float64(1.0))], ids=["int64", "float64"]
)
def test_an_untransformed_call_is_a_call(f, x):
    got, want = wrapped(f)(x), f(x)
    assert got == want
    assert got.dtype == want.dtype


def test_captured_state_is_read_afresh():
    state = {"w": 2.0}
    f = wrapped(lambda x: x * state["w"])
    equal(jax.value_and_grad(f)(3.0), (6.0, 2.0))
    state["w"] = 5.0
    equal(jax.value_and_grad(f)(3.0), (15.0, 5.0))


# --- crashes where JAX works -----------------------------------------------------------------------------------------


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


def minimum(x):
    adjoint = optimistix.RecursiveCheckpointAdjoint()
    solver = optimistix.GradientDescent(0.4, 1e-3, 1e-3)
    minimise = lambda: optimistix.minimise(
        lambda y, a: (y - a) ** 2, solver, 0.5, x, adjoint=adjoint, max_steps=2, throw=False
    )
    return minimise().value


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
        pytest.param(minimum, HALF, id="a checkpointed loop"),
        pytest.param(solved(diffrax.RecursiveCheckpointAdjoint()), HALF, id="diffrax"),
        pytest.param(solved(diffrax.BacksolveAdjoint()), HALF, id="backsolve"),
        pytest.param(
            lambda x: lax.fori_loop(0, 3, lambda i, c: with_integer(*c), (x, 0))[0], HALF, id="an integer carry"
        ),
        pytest.param(
            lambda x: jax.checkpoint(jnp.multiply, prevent_cse=(True, False))(x, x), HALF, id="a checkpoint's flags"
        ),
        pytest.param(conjugate_gradient, 0.5, id="a float for lineax"),
        pytest.param(root, 0.5, id="a float for optimistix"),
        pytest.param(least_squares, HALF, id="numbers for Gauss-Newton"),
        pytest.param(solved(diffrax.BacksolveAdjoint()), 0.5, id="a float for diffrax"),
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


def test_a_branch_in_a_shard_map():
    equal(jax.grad(wrapped(sharded_branch))(X), 1 / X)


def test_the_hessian_of_a_checkpointed_scan():
    equal(jax.hessian(wrapped(checkpointed_scan))(0.5), jax.hessian(checkpointed_scan)(0.5))


def test_custom_vmap_in_forward_mode():
    equal(jax.jvp(wrapped(batched), (0.5,), (1.0,)), (np.sin(0.5), np.cos(0.5)))


def test_a_rule_that_returns_a_symbolic_zero():
    equal(jax.jvp(wrapped(lambda x: zero_beside(x)[1] * 2.0), (1.0,), (1.0,)), (2.0, 2.0))


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


# --- NaN on paths that are not taken ---------------------------------------------------------------------------------

AT_ZERO = np.array([0.0, 1.0], np.float32)


def across(body, out=SHARDED):
    mapped = jax.shard_map(body, mesh=MESH, in_specs=SHARDED, out_specs=out, check_vma=False)
    return lambda x: mapped(x).sum()


def gathered(v):
    gather = lambda v: lax.all_gather(v, "i", tiled=True)
    return jnp.where(gather(v) > 0, gather(jnp.log(v)), 0.0)


def permuted(v):
    return jnp.where(v > 0, lax.ppermute(jnp.log(v), "i", [(0, 0)]), 0.0)


@pytest.mark.parametrize(
    ("f", "truth"),
    [
        pytest.param(lambda x: jnp.where(np.tile(AT_ZERO > 0, 2), jnp.tile(jnp.log(x), 2), 0.0).sum(), [0, 2]),
        pytest.param(across(gathered, PartitionSpec(None)), [0, 1]),
        pytest.param(across(permuted), [0, 1]),
    ],
    ids=["tile", "all_gather", "ppermute"],
)
def test_a_path_not_taken(f, truth):
    equal(jax.grad(wrapped(f))(AT_ZERO), truth)


@pytest.mark.parametrize("adjoint", [diffrax.RecursiveCheckpointAdjoint(), diffrax.BacksolveAdjoint()], ids=str)
def test_a_selection_in_a_vector_field(adjoint):
    equal(jax.grad(wrapped(solved(adjoint)))(np.float32(0.0)), 0.0)


def test_a_wrapped_body_twice_in_reverse():
    body = wrapped(lambda c: jnp.where(c > 0, jnp.log(c), 0.0))
    f = lambda x: lax.scan(lambda c, _: (body(c) + 1.0, None), x, None, length=2)[0].sum()
    equal(jax.jacrev(jax.jacrev(f))(AT_ZERO), [[0, 0], [0, -2]])


@known("JAX forgets custom derivatives in a scan that is linearized", condition=OLDER)
def test_a_custom_derivative_in_a_loop_twice():
    f = lambda x: lax.scan(lambda c, _: (jax.nn.softplus(c), None), x, None, length=1)[0]
    equal(jax.jacrev(jax.jacfwd(wrapped(f)))(0.0), 0.25)


@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
@pytest.mark.parametrize("where", ["into", "inside", "out of", "by index"])
def test_auto_axes_on_a_mesh_of_explicit_axes(derivative, where):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(AT_ZERO, SHARDED)
        automatic = lambda f: jax.sharding.auto_axes(f, out_sharding=SHARDED)
        chosen = lambda x, y: jnp.where(x > 0, y, 0.0)
        f = {
            "into": lambda x: automatic(chosen)(x, jnp.log(x)),
            "inside": lambda x: automatic(lambda x: chosen(x, jnp.log(x)))(x),
            "out of": lambda x: chosen(x, automatic(jnp.log)(x)),
            "by index": lambda x: chosen(x, jnp.log(x)).at[np.array([1, 0])].get(out_sharding=SHARDED),
        }[where]
        wanted = {jax.grad: [0.0, 1.0], jax.hessian: [[0.0, 0.0], [0.0, -1.0]]}
        equal(derivative(wrapped(lambda x: f(x).sum()))(x), wanted[derivative])
