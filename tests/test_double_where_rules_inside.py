"""Custom rules that differentiate, depend on constants, or hold traced values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table
from test_double_where_composed import ORDERS, compare

X = np.array([0.0, 1.7, 0.6])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


# --- competitions in a rule that calls `jax.jvp` or `jax.vjp` ---------------------------------------------------------

positive = lambda x: jnp.where(x > 0, x, 1.0)
root = lambda x: jnp.where(x > 0, jnp.sqrt(positive(x)), 0.0)
window = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME")
# What loses at zero, and the same by hand.
COMPETITIONS = {
    "maximum": (
        lambda x: jnp.maximum(jnp.log(x), x - 5.0),
        lambda x: jnp.where(x > 0, jnp.maximum(jnp.log(positive(x)), x - 5.0), x - 5.0),
    ),
    "clip": (
        lambda x: jnp.clip(jnp.log(x), -3.0, 3.0),
        lambda x: jnp.where(x > 0, jnp.clip(jnp.log(positive(x)), -3.0, 3.0), -3.0),
    ),
    "max": (lambda x: jnp.max(jnp.sqrt(x)) * x, lambda x: jnp.max(root(x)) * x),
    "cummax": (lambda x: lax.cummax(jnp.sqrt(x[::-1])), lambda x: lax.cummax(root(x[::-1]))),
    "reduce_window": (lambda x: window(jnp.sqrt(x)), lambda x: window(root(x))),
}


def by_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def by_forward_pass(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, cotangent: pull(cotangent))
    return g


def by_backward_pass(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, cotangent: jax.vjp(f, x)[1](cotangent))
    return g


AROUND = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1],
    "checkpoint": jax.checkpoint,
}


@table(
    "name, rule, around, order",
    COMPETITIONS,
    [by_jvp, by_forward_pass, by_backward_pass],
    AROUND,
    ORDERS,
    most=1,
    quick=0,
    kind=lambda name, rule, around, order: (name, rule),
)
def test_a_competition_in_a_rule(name, rule, around, order):
    own, guarded = COMPETITIONS[name]
    of = lambda f: lambda x: jnp.sum(AROUND[around](f)(x) * x)
    compare(pg.double_where(of(rule(own))), of(guarded), order, atol=1e-12)


# --- rules with a constant operand --------------------------------------------------------------------------------------


@jax.custom_jvp
def twice(a, b):
    return a * jnp.sin(b)


twice.defjvp(lambda p, t: (twice(*p), t[0] * jnp.sin(p[1]) + t[1] * p[0] * jnp.cos(p[1])))
WITH_A_CONSTANT = {
    "softplus": jax.nn.softplus,
    "logaddexp": lambda x: jnp.logaddexp(x, 0.3),
    "logaddexp2": lambda x: jnp.logaddexp2(0.3, x),
    "log_sigmoid": jax.nn.log_sigmoid,
    "mish": jax.nn.mish,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "xlogy": lambda x: jax.scipy.special.xlogy(2.0, x + 100.0),
    "the first": lambda x: twice(2.0, x),
    "the second": lambda x: twice(x, 2.0),
}


@table("name, order", WITH_A_CONSTANT, ORDERS[2:], most=1, quick=0, kind=lambda name, order: name)
def test_a_constant_operand(name, order):
    def program(by_hand):
        inner = lambda x: jnp.log(jnp.where(x > 0, x, 1.0) if by_hand else x)
        return lambda x: jnp.sum(jnp.where(x > 0, WITH_A_CONSTANT[name](inner(x)), x) ** 2)

    compare(pg.double_where(program(False)), program(True), order, atol=1e-12)


# --- rules that hold a traced value -------------------------------------------------------------------------------------


def holding(kind, k):
    value = lambda x: k * jnp.log(x)
    if kind == "argument":
        f = jax.custom_jvp(lambda k, x: k * jnp.log(x), nondiff_argnums=(0,))
        f.defjvp(lambda k, primals, tangents: (k * jnp.log(primals[0]), k * tangents[0] / primals[0]))
        return lambda x: f(k, x)
    if kind == "custom_jvp":
        f = jax.custom_jvp(value)
        f.defjvp(lambda primals, tangents: (value(*primals), k * tangents[0] / primals[0]))
        return f
    f = jax.custom_vjp(value)
    f.defvjp(lambda x: (value(x), x), lambda x, cotangent: (k * cotangent / x,))
    return f


@table("kind, order", ["argument", "custom_jvp", "custom_vjp"], ORDERS, most=2, quick=0, kind=lambda kind, order: kind)
@pytest.mark.parametrize("number", [lambda x: 1 + jnp.argmax(x), lambda x: lax.stop_gradient(2.0 * x[1])])
def test_a_rule_that_holds_a_traced_value(kind, order, number):
    if kind == "custom_vjp" and order[-1] == "forward":
        pytest.skip("JAX has no forward mode for it")

    def program(by_hand):
        def f(x):
            k, inner = number(x), jnp.where(x > 0, x, 1.0) if by_hand else x
            own = (lambda x: k * jnp.log(x)) if by_hand else holding(kind, k)
            return jnp.sum(jnp.where(x > 0, own(inner), x)) * x[2]

        return f

    compare(pg.double_where(program(False)), program(True), order, atol=1e-12)


def calling_itself(kind, k):
    """The same rules, which call the function that they belong to, as a rule does that reuses its value."""
    if kind == "argument":
        f = jax.custom_jvp(lambda k, x: k * jnp.log(x), nondiff_argnums=(0,))
        f.defjvp(lambda k, primals, tangents: (f(k, *primals), k * tangents[0] / primals[0]))
        return lambda x: f(k, x)
    if kind == "custom_jvp":
        f = jax.custom_jvp(lambda x: k * jnp.log(x))
        f.defjvp(lambda primals, tangents: (f(*primals), k * tangents[0] / primals[0]))
        return f
    f = jax.custom_vjp(lambda x: k * jnp.log(x))
    f.defvjp(lambda x: (f(x), x), lambda x, cotangent: (k * cotangent / x,))
    return f


SECOND = {
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "compiled": lambda f: jax.jit(jax.hessian(f)),
    "third": lambda f: jax.grad(lambda x: jnp.sum(jax.jacrev(jax.grad(f))(x))),
}


@table("kind, order", ["argument", "custom_jvp", "custom_vjp"], list(SECOND), quick=0)
def test_a_rule_that_holds_a_traced_value_and_calls_its_own_function(kind, order):
    """A first derivative on a dead path must not reach the second one, though the function is run for each."""
    if kind == "custom_vjp" and order.endswith("over forward"):
        pytest.skip("JAX has no forward mode for it")

    def program(by_hand):
        def f(x):
            k, inner = lax.stop_gradient(2.0 * x[1]), jnp.where(x > 0, x, 1.0) if by_hand else x
            own = (lambda x: k * jnp.log(x)) if by_hand else calling_itself(kind, k)
            y = jnp.where(x > 0, own(inner), x)
            root = jnp.where(x > 0, jnp.sqrt(inner if by_hand else jnp.where(x > 0, x, 0.0)), 0.0)
            return jnp.sum(y * root) ** 2 + jnp.sum(y) * jnp.max(y)

        return f

    # What is differentiated runs by itself; what it is compared with is a program.
    found = SECOND[order](pg.double_where(program(False)))(X)
    np.testing.assert_allclose(found, jax.jit(SECOND[order](program(True)))(X), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argument", "custom_jvp", "custom_vjp"])
def test_a_batch_of_a_rule_that_holds_a_traced_value(kind):
    def summed(wrap, by_hand):
        def f(x, k):
            own = (lambda x: k * jnp.log(x)) if by_hand else holding(kind, k)
            return jnp.sum(jnp.where(x > 0, own(jnp.where(x > 0, x, 1.0) if by_hand else x), x))

        # JAX itself refuses the backward pass of a batch that holds a value of that batch.
        mapped = jax.vmap(wrap(f), (0, None if kind == "custom_vjp" else 0))
        return lambda x, k: jnp.sum(mapped(x, k if kind != "custom_vjp" else k[0]) ** 2)

    x, k = jnp.stack([X, X + 1.0]), jnp.array([2.0, 3.0])
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        found = transform(summed(pg.double_where, False))(x, k)
        np.testing.assert_allclose(found, jax.jit(jax.grad(summed(lambda f: f, True)))(x, k), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [holding, calling_itself])
@pytest.mark.parametrize("kind", ["argument", "custom_jvp", "custom_vjp"])
def test_a_batch_of_derivatives_of_a_rule_that_holds_a_value_of_the_batch(kind, rule):
    def program(wrap, by_hand):
        def of(k):
            own = (lambda x: k * jnp.log(x)) if by_hand else rule(kind, k)
            inner = (lambda x: jnp.where(x > 0, x, 1.0)) if by_hand else lambda x: x
            return wrap(lambda x: jnp.sum(jnp.where(x > 0, own(inner(x)), x) ** 2))

        return of

    k, x = jnp.array([2.0, 3.0]), jnp.stack([X, X + 1.0])
    batches = {
        "the value only": lambda of: jax.vmap(lambda k: jax.grad(of(k))(X))(k),
        "both": lambda of: jax.vmap(lambda k, x: jax.grad(of(k))(x))(k, x),
        "second": lambda of: jax.vmap(lambda k: jax.jacrev(jax.grad(of(k)))(X))(k),
        "compiled": lambda of: jax.jit(jax.vmap(lambda k, x: jax.grad(of(k))(x)))(k, x),
    }
    for name, batch in batches.items():
        found = batch(program(pg.double_where, False))
        expected = jax.jit(lambda batch=batch: batch(program(lambda f: f, True)))()
        np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("around", [lambda g: g, jax.vmap, lambda g: jax.jit(jax.vmap(g))], ids=["", "vmap", "jit"])
def test_second_derivatives_of_a_rule_whose_forward_pass_may_be_left_out(around):
    scale = jnp.arange(1.0, 4.0)
    rule = jax.custom_vjp(lambda x: (jnp.sin(x) * scale).sum())
    rule.defvjp(
        lambda x: ((jnp.sin(x) * scale).sum(), jnp.cos(x)),
        lambda cos, rate: ((rate * cos * scale).sum(),),
        optimize_remat=True,
    )
    f = pg.double_where(lambda x: jnp.where(x > 0, rule(jnp.sqrt(x)), 0.0))
    plain = lambda x: jnp.where(x > 0, (jnp.sin(jnp.sqrt(jnp.where(x > 0, x, 1.0))) * scale).sum(), 0.0)
    x = jnp.asarray(0.5) if around(jnp.sin) is jnp.sin else jnp.array([0.5, 0.0, -1.0])
    for order in (jax.grad, jax.hessian, lambda f: jax.grad(jax.grad(f))):
        np.testing.assert_allclose(around(order(f))(x), jax.jit(around(order(plain)))(x), rtol=1e-5)
