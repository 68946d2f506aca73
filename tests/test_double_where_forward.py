"""Values and tangents of a loop in one pass, which is taken apart wherever only the tangents are not known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table

X, XS = 0.7, np.array([0.1, 0.2])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def step(c, x, by_hand):
    taken, guarded = c * x > 0.1, lambda f: jnp.where(taken, f(jnp.where(taken, c * x, 1.0)), 0.0)
    # JAX has a NaN in reverse mode for the first root, and in forward mode for the second.
    first = guarded(jnp.sqrt) if by_hand else jnp.where(taken, jnp.sqrt(c * x), 0.0)
    second = guarded(jnp.cbrt) if by_hand else jnp.cbrt(jnp.where(taken, c * x, 0.0))
    return jnp.where(taken, first, 0.3 * c) + second + X * jnp.sin(c)


def scanned(by_hand):
    def f(x):
        c, ys = lax.scan(lambda c, x: (step(c, x, by_hand), c**2), x, jnp.linspace(-1, 1, 7))
        return c + ys.sum()

    return f


def until(by_hand):
    return lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 0.3, step(c[1], c[0], by_hand)), (-1.0, x))[1]


def branching(by_hand):
    def f(x):
        body = lambda c, x: (lax.cond(x > 0, lambda c: step(c, x, by_hand), lambda c: 0.5 * c, c), None)
        return lax.scan(jax.checkpoint(body), x, jnp.array([-1.0, 0.01, 1.0]))[0]

    return f


LOOPS = {"scan": scanned, "while": until, "checkpoint of cond": branching}

push = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
both = lambda f: lambda x: sum(jax.jvp(f, (x,), (jnp.ones_like(x),)))
pushed = lambda f, x: lambda t: jax.jvp(f, (x,), (t,))[1]
transposed = lambda push, x: jax.linear_transpose(push, x)(1.0)[0]
stepped = lambda f: lambda x: lax.scan(lambda c, y: (0.1 * f(c) * y, None), x, XS)[0]
turned = lambda f: lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.1 * f(c[1])), (0, x))[1]
of_two = lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()
in_one = lambda f, x: lambda t: of_two(lambda a: pushed(f, a)(t))(x)
saving = lambda policy: lambda f: jax.checkpoint(f, policy=policy)
policies = jax.checkpoint_policies

# None of these needs reverse mode of the loop; a `while` has none.
FORWARD = {
    "push": push,
    "both": both,
    "jacfwd": jax.jacfwd,
    "twice": lambda f: push(push(f)),
    "jacfwd twice": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "of a checkpoint": lambda f: push(jax.checkpoint(f)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](1.0),
    "linearize a push": lambda f: lambda x: jax.linearize(push(f), x)[1](1.0),
    "linearize a while": lambda f: lambda x: jax.linearize(turned(f), x)[1](1.0),
    "vmap": lambda f: of_two(push(f)),
    "in a scan": lambda f: push(stepped(f)),
    "in a while": lambda f: push(turned(f)),
    "under double_where": lambda f: pg.double_where(push(f)),
}
REVERSE = {
    "reverse over forward": lambda f: jax.grad(push(f)),
    "forward over reverse": lambda f: push(jax.grad(f)),
    "hessian": jax.hessian,
    "a checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "forward over a checkpoint": lambda f: push(jax.grad(jax.checkpoint(f))),
    "checkpoint of a push": lambda f: jax.grad(jax.checkpoint(push(f))),
    "policy of dots": lambda f: jax.grad(saving(policies.dots_saveable)(f)),
    "policy that saves all": lambda f: jax.grad(saving(policies.everything_saveable)(push(f))),
    "policy of names": lambda f: jax.grad(saving(policies.save_only_these_names("none"))(push(f))),
    "scan": lambda f: jax.grad(stepped(f)),
    "checkpoint of a scan": lambda f: jax.grad(jax.checkpoint(stepped(f))),
    "scan of a checkpoint": lambda f: jax.grad(stepped(jax.checkpoint(f))),
    "scan of a push": lambda f: jax.grad(stepped(push(f))),
    "vmap of reverse over forward": lambda f: of_two(jax.grad(push(f))),
    "reverse of a vmap of a push": lambda f: jax.grad(of_two(push(f))),
    "cond": lambda f: jax.grad(lambda x: lax.cond(x > 0, f, lambda x: x, x)),
    "transposed": lambda f: lambda x: transposed(pushed(f, x), x),
    "transposed in jit": lambda f: lambda x: transposed(jax.jit(pushed(f, x)), x),
    "transposed vmap in jit": lambda f: lambda x: transposed(jax.jit(in_one(f, x)), x),
    "transposed vmap in a checkpoint": lambda f: lambda x: transposed(jax.checkpoint(in_one(f, x)), x),
    "under double_where, then reverse": lambda f: jax.grad(pg.double_where(push(f))),
}
CASES = [(loop, how) for loop in LOOPS for how in [*FORWARD, *([] if loop == "while" else REVERSE)]]


@pytest.mark.slow
@table("case", CASES, most=6, quick=8, kind=lambda case: case[0])
def test_the_derivative_is_that_of_the_guarded_loop(case):
    loop, how = case
    derivative = {**FORWARD, **REVERSE}[how]
    f = derivative(pg.double_where(LOOPS[loop](by_hand=False)))
    expected, compiled = jax.jit(lambda x: (derivative(LOOPS[loop](by_hand=True))(x), f(x)))(X)
    assert np.isfinite(expected)
    np.testing.assert_allclose([compiled, f(X)], [expected] * 2, rtol=1e-9)


@pytest.mark.slow
def test_without_it_there_is_a_nan():
    assert all(np.isnan(push(loop(by_hand=False))(X)) for loop in LOOPS.values())
    assert np.isnan(jax.grad(scanned(by_hand=False))(X))


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_a_loop_that_cut_every_path(derivative):
    cut = lambda x: jnp.maximum(x, 0.0)
    for body in (cut, jax.checkpoint(cut)):
        f = lambda x: jnp.sqrt(lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0])
        assert np.isnan(derivative(f)(-1.0))
        assert derivative(pg.double_where(f))(-1.0) == 0


def test_residuals_of_a_derivative_and_what_has_no_tangent():
    def f(x, n):
        c, ns = lax.scan(lambda c, n: (jnp.where(n > 0, jnp.sin(c), c), n + 1), x, n)
        return c, ns, n.sum(), 2.0

    given = (X, np.arange(3)), (1.0, np.zeros(3, jax.dtypes.float0))
    for one, other in zip(jax.jvp(f, *given), jax.jvp(pg.double_where(f), *given), strict=True):
        for left, right in zip(one, other, strict=True):
            assert jax.typeof(left) == jax.typeof(right)
            np.testing.assert_array_equal(left, right)


@pytest.mark.slow
def test_it_saves_nothing():
    w, h = np.full((64, 64), 0.1, np.float32), np.ones((16, 64), np.float32)
    select = lambda h, _: (jnp.where(h > 0, jnp.tanh(h @ w), h), None)
    f = lambda h: lax.scan(select, h, None, length=100)[0].sum()
    hessian_product = lambda f: lambda h: jax.jvp(jax.grad(f), (h,), (h,))[1]
    bytes_of = lambda g: jax.jit(g).lower(h).compile().cost_analysis()["bytes accessed"]
    for derivative in (push, both, hessian_product):
        assert bytes_of(derivative(pg.double_where(f))) <= 1.1 * bytes_of(derivative(f))
