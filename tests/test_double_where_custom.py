"""Custom rules of every kind, in everything that contains programs, with results that have no derivative."""

import functools
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.tables import table
from random_programs import clipped_vjp, custom_vjp as with_rule


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


slope = lambda x: jnp.sin(x) + x * jnp.cos(x)
product = lambda x, other: (x * jnp.sin(x), other)
no_tangent = lambda value: np.zeros(np.shape(value), jax.dtypes.float0)


def plain(x, other):
    return product(x, other)


def custom_jvp(x, other):
    f = jax.custom_jvp(product)
    f.defjvp(lambda p, t: (f(*p), (t[0] * slope(p[0]), t[1])))
    return f(x, other)


def custom_jvp_with_symbolic_zeros(x, other):
    f = jax.custom_jvp(product)

    def rule(p, t):
        assert isinstance(t[1], jax.custom_derivatives.SymbolicZero)
        return f(*p), (t[0] * slope(p[0]), t[1])

    f.defjvp(rule, symbolic_zeros=True)
    return f(x, other)


def custom_vjp(x, other):
    f = jax.custom_vjp(product)
    f.defvjp(lambda x, other: (product(x, other), x), lambda x, c: (c[0] * slope(x), None))
    return f(x, other)


def custom_vjp_that_clips(x, other):
    f = jax.custom_vjp(product)
    f.defvjp(
        lambda x, other: (product(x, other), x),
        lambda x, c: (jnp.where(jnp.isfinite(c[0]), c[0], 1.0) * slope(x), None),
    )
    return f(x, other)


def custom_vjp_with_symbolic_zeros(x, other):
    f = jax.custom_vjp(product)

    def forward(x, other):
        assert x.perturbed
        return product(x.value, other.value), x.value

    def backward(x, c):
        assert not isinstance(c[0], jax.custom_derivatives.SymbolicZero)
        assert isinstance(c[1], jax.custom_derivatives.SymbolicZero)
        return c[0] * slope(x), None

    f.defvjp(forward, backward, symbolic_zeros=True)
    return f(x, other)


def filter_custom_vjp(x, other):
    @eqx.filter_custom_vjp
    def f(x, other):
        return product(x, other)

    @f.def_fwd
    def forward(perturbed, x, other):
        return product(x, other), None

    @f.def_bwd
    def backward(residual, cotangents, perturbed, x, other):
        assert cotangents[1] is None
        return cotangents[0] * slope(x)

    return f(x, other)


def custom_vmap(x, other):
    f = jax.custom_batching.custom_vmap(product)
    f.def_vmap(lambda size, batched, x, other: (product(x, other), tuple(batched)))
    return f(x, other)


RULES = [
    plain,
    custom_jvp,
    custom_jvp_with_symbolic_zeros,
    custom_vjp,
    custom_vjp_that_clips,
    custom_vjp_with_symbolic_zeros,
    filter_custom_vjp,
    custom_vmap,
]
OTHERS = {
    "float": lambda: jnp.float64(2),
    "int": lambda: jnp.int32(2),
    "bool": lambda: jnp.array(True),
    "key": lambda: jax.random.key(0),
    "complex": lambda: jnp.complex64(1j),
}


def checkpointed(f):
    return lambda x, o: jax.checkpoint(f)(x, o)


def scanned(f):
    return lambda x, o: lax.scan(lambda c, _: (f(*c), None), (x, o), None, length=2)[0]


def counted(f):
    return lambda x, o: lax.fori_loop(0, 2, lambda i, c: f(*c), (x, o))


def chosen(f):
    return lambda x, o: lax.cond(x > 0, f, lambda x, o: (x, o), x, o)


def batched(f):
    return lambda x, o: jax.tree.map(lambda y: y[0], jax.vmap(f, (0, None))(jnp.stack([x, x]), o))


INSIDE = {
    "fori": counted,
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": scanned,
    "cond": chosen,
    "checkpoint": checkpointed,
    "vmap": batched,
    "checkpoint of a scan": lambda f: checkpointed(scanned(f)),
    "scan of a cond": lambda f: scanned(chosen(f)),
}
TRANSFORMS = {
    "reverse": jax.grad,
    "forward": jax.jacfwd,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
}


# What is compared takes longer to compile than to run.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}


def is_refused(f, x):
    """Whether JAX refuses a transformed function: a custom backward pass has no forward mode."""
    try:
        jax.eval_shape(f, x)
    except Exception:
        return True
    return False


def check(f, x):
    """Every transform that JAX allows gives JAX's numbers."""
    allowed = [transform for transform in TRANSFORMS.values() if not is_refused(transform(f), x)]
    every = lambda x: [[transform(g)(x) for transform in allowed] for g in (f, pg.double_where(f))]
    expected, found = jax.jit(every, compiler_options=QUICKLY)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def matrix():
    """Every rule beside every dtype, and in everything that contains a program."""
    for rule in RULES:
        # A loop may not carry what a backward pass says nothing of.
        yield from ((rule, inside, "int") for inside in INSIDE)
        yield from ((rule, "fori", other) for other in ("bool", "key", "complex"))
        yield rule, "plain", "float"


@pytest.mark.slow
@table(
    "rule, inside, other",
    list(matrix()),
    most=3,
    kind=lambda rule, inside, other: rule,
    ids=lambda p: p if isinstance(p, str) else p.__name__,
)
def test_custom_rules(rule, inside, other):
    def f(x):
        other_value = lax.stop_gradient(OTHERS[other]())
        return INSIDE[inside](rule)(x, other_value)[0]

    check(f, jnp.float64(1.3))


def test_a_result_that_no_tangent_enters_in_a_loop():
    # A step that takes a tangent is one step, whatever its other results depend on.
    test_custom_rules(custom_vmap, "fori", "complex")


def test_a_rule_that_refuses_other_operands():
    f = jax.custom_vjp(lambda x, y: x * y)

    def forward(x, y):
        assert not y.perturbed
        return x.value * y.value, y.value

    f.defvjp(forward, lambda y, c: (jnp.clip(c, -1.0, 1.0) * y, None), symbolic_zeros=True)
    g = pg.double_where(lambda x: jnp.where(x > 0, f(jnp.sqrt(x), jnp.ones(2)), 0.0).sum())
    # To look for reads in the rule, this gives both operands a tangent.
    np.testing.assert_allclose(jax.grad(pg.consistent_indexing(g))(jnp.array([0.0, 4.0])), [0, 0.25])


@pytest.mark.slow
def test_after_a_rule_that_says_a_result_has_no_derivative():
    @jax.custom_vjp
    def halves(x):
        return x / 2, jnp.sin(x)

    @jax.custom_vjp
    def head(x):
        return x[:2].sum()

    halves.defvjp(lambda x: (halves(x), x), lambda _, given: (given[0] / 2,))
    head.defvjp(lambda x: (head(x), x), lambda x, given: (jnp.zeros_like(x).at[:2].add(given),))
    x = jnp.array([1.0, 2.0, 3.0])
    none = pg.double_where(lambda x: head(halves(x)[1]))
    np.testing.assert_array_equal(jax.grad(none)(x), [0, 0, 0])
    one = pg.double_where(lambda x: head(halves(x)[1]) + head(halves(x)[0]))
    np.testing.assert_array_equal(jax.vmap(jax.grad(one))(x[None]), [[0.5, 0.5, 0]])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def euler(field, y):
    return y + field(y)


def euler_forward(field, y):
    end = euler(field, y)
    return end, end - field(y)


def euler_backward(field, y, c):
    def both(joined):
        y, c = jnp.split(joined, 2)
        rate, pull = jax.vjp(field, y)
        return jnp.concatenate([-rate, *pull(c)])

    return (jnp.split(euler(both, jnp.concatenate([y, c])), 2)[1],)


euler.defvjp(euler_forward, euler_backward)


@pytest.mark.slow
@pytest.mark.parametrize("order", range(1, 4))
def test_a_rule_that_calls_its_own_function_of_a_derivative(order):
    """As a solver of differential equations does, which saves what it solved and joins it with cotangents."""

    def derivative(field, wrap):
        f = wrap(lambda y: jnp.sum(euler(field, y) ** 2))
        for _ in range(order):
            f = jax.grad(lambda y, f=f: jnp.sum(f(y) * jnp.arange(1.0, 3.0)))
        return f(jnp.array([0.0, 2.0]))

    guarded = lambda y: jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0)
    found = derivative(lambda y: jnp.where(y > 0, jnp.sqrt(y), 0.0), pg.double_where)
    np.testing.assert_allclose(found, derivative(guarded, lambda f: f), rtol=1e-12)


stopped, head = with_rule(lax.stop_gradient), clipped_vjp(lambda x: 2 * x)
both = lambda x, y: lax.stop_gradient(x) + 2 * y * y
pair = with_rule(lambda x, y: (lax.stop_gradient(x), y**2))
# Nothing is demanded of what comes before, so a backward pass is given only zeros that are known as such.
STOPPED = {
    "alone": lambda x: stopped(jnp.sin(x)),
    "before a pass": lambda x: x * head(3 * stopped(jnp.sin(x))),
    "beside a tangent": lambda x: clipped_vjp(both)(x, stopped(jnp.sin(x))) + clipped_vjp(both)(stopped(jnp.sin(x)), x),
    "twice": lambda x: with_rule(both)(jnp.cos(x), stopped(jnp.sin(x))),
    "one of two results": lambda x: head(pair(jnp.sin(x), jnp.cos(x))[0]) * pair(stopped(x), jnp.cos(x))[1],
    "in a loop": lambda x: lax.scan(lambda c, _: (c * head(stopped(jnp.sin(c))), None), x, None, length=2)[0],
    "before a loop": lambda x: lax.scan(lambda c, _: (2 * head(c), None), stopped(jnp.sin(x)), None, length=2)[0],
    "before a branch": lambda x: lax.cond(x[0] > 0, lambda x: head(jnp.sin(x)), jnp.cos, stopped(jnp.sin(x))),
    "in a checkpoint": jax.checkpoint(lambda x: x + head(stopped(jnp.sin(x)))),
    "in a branch": lambda x: lax.cond(x[0] > 0, lambda x: x + head(stopped(jnp.sin(x))), jnp.sin, x),
}


@pytest.mark.slow
@table("name", STOPPED, quick=2)
def test_a_backward_pass_after_what_has_no_derivative(name):
    """Not under `jit`, which drops what raises."""
    f = lambda x: STOPPED[name](x).sum()
    every = lambda f: lambda x: (jax.grad(f)(x), jax.jacrev(jax.grad(f))(x))
    x = jnp.array([0.5, 2.0])
    jax.tree.map(np.testing.assert_allclose, every(pg.double_where(f))(x), every(f)(x))


def test_a_backward_pass_that_prints_in_a_loop(capfd):
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    def backward(x, cotangents):
        def step(carry, now):
            jax.debug.print("at {}", now[0])
            return carry, jnp.cos(now[0]) * now[1]

        return (lax.scan(step, 0.0, (x, cotangents))[1],)

    rule.defvjp(lambda x: (jnp.sin(x), x), backward)
    f = lambda x: jnp.sum(jnp.where(x > 0.5, rule(x), 0.0))
    x = jnp.array([0.25, 1.0])
    np.testing.assert_allclose(jax.grad(pg.double_where(f))(x), [0.0, jnp.cos(1.0)], rtol=1e-6)
    jax.effects_barrier()
    assert "at 0.25" in capfd.readouterr().out


OF_JAX = [jax.nn.relu, jax.nn.relu6, jnp.sin, jax.nn.softplus, lambda x: jnp.logaddexp(x, x), lambda x: x]


@table("f, kind", OF_JAX, ["defjvp", "defjvps", "constant", "defvjp"], quick=0, most=8)
def test_another_rule_for_a_function_of_jax(f, kind):
    """As straight-through estimators have. The rule counts, however often one is made in the same line."""
    jax.grad(pg.double_where(lambda x: f(x) * jnp.where(x > 0, x, 0.0)))(2.0)
    for factor in (3.0, 5.0):
        ruled = jax.custom_vjp(f) if kind == "defvjp" else jax.custom_jvp(f)
        {
            "defjvp": lambda g, by: g.defjvp(lambda p, t: (f(*p), by * t[0])),
            "defjvps": lambda g, by: g.defjvps(lambda t, out, x: by * t),
            "constant": lambda g, by: g.defjvp(lambda p, t: (f(*p), jnp.full_like(p[0], by))),
            "defvjp": lambda g, by: g.defvjp(lambda x: (f(x), None), lambda _, c: (by * c,)),
        }[kind](ruled, factor)
        selected = lambda x, ruled=ruled: ruled(x) * jnp.where(x > 0, x, 0.0)
        if kind != "defvjp":
            want = jax.jvp(selected, (2.0,), (1.0,))[1]
            assert jax.jvp(pg.double_where(selected), (2.0,), (1.0,))[1] == want
        if kind != "constant":
            assert jax.grad(pg.double_where(selected))(2.0) == jax.grad(selected)(2.0) == 2 * factor + f(2.0)


def test_a_rule_of_a_library_whose_name_begins_with_jax():
    path = os.path.join(f"{os.path.dirname(jax.__file__)}other", "rules.py")
    scope = {}
    exec(compile("rule = lambda primals, tangents: (primals[0] ** 2, 0 * primals[0] + 7.0)", path, "exec"), scope)
    f = jax.custom_jvp(jnp.square)
    f.defjvp(scope["rule"])
    assert jax.jvp(pg.double_where(f), (2.0,), (1.0,))[1] == jax.jvp(f, (2.0,), (1.0,))[1] == 7.0


def test_a_batch_of_calls_whose_backward_pass_has_a_mutable_reference():
    def backward(slope, cotangent):
        reference = jax.new_ref(slope * cotangent)
        return (reference[...],)

    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), backward)
    rooted = jax.vmap(pg.double_where(lambda x: jnp.where(x > 0, jnp.sqrt(x), sine(x))))
    np.testing.assert_allclose(jax.grad(lambda x: rooted(x).sum())(np.array([0.0, 4.0])), [1, 0.25])


def test_a_backward_pass_that_indexes_a_numpy_array():
    table = np.array([1.0, 2.0, 4.0])
    f = jax.custom_vjp(lambda x, table: x * jnp.sum(table))

    def backward(table, cotangent):
        return lax.fori_loop(0, 3, lambda i, total: total + cotangent * table[i], 0.0 * cotangent), None

    f.defvjp(lambda x, table: (f(x, table), table), backward)
    assert jax.grad(pg.double_where(jax.jit(lambda x: f(x, table))))(2.0) == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "jit", "checkpoint", "vmap", "scan"])
def test_a_rule_that_saves_a_shape(how):
    total = jax.custom_vjp(lambda x: x.sum())
    total.defvjp(lambda x: (x.sum(), x.shape), lambda shape, cotangent: (jnp.full(shape, cotangent),))
    around = {
        "plain": lambda f: f,
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
        "scan": lambda f: lambda x: lax.scan(lambda c, x: (c + f(x), None), 0.0, x[None])[0],
    }[how]
    f = around(lambda x: total(jnp.where(x > 0, jnp.log(x) * x, 0.0)))
    x = jnp.array([0.0, 1.5])
    slope = np.log(1.5) + 1
    np.testing.assert_allclose(jax.grad(pg.double_where(f))(x), [0, slope], rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(pg.double_where(f))(x), [[0, 0], [0, 1 / 1.5]], rtol=1e-6)


def saved_pull(f):
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda a: jax.vjp(f, a), lambda pull, cotangent: pull(cotangent))
    return ruled


def pushed_again(f):
    ruled = jax.custom_jvp(f)
    ruled.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return ruled


PRODUCTS = {
    "reversed": lambda a: a * a[::-1],
    "convolution": lambda a: jnp.convolve(a, a[1:], mode="same"),
    "cumulative": lambda a: jnp.cumprod(a),
}


@table("name, rule, around", PRODUCTS, [with_rule, saved_pull, pushed_again], ["plain", "scan"], quick=0, most=6)
def test_a_rule_may_call_a_function_under_double_where(name, rule, around):
    # What such a call saves has no derivative of its own, so the derivative of a pass has to see how it is computed.
    surroundings = {
        "plain": lambda f: f,
        "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    }
    run = surroundings[around](rule(pg.double_where(PRODUCTS[name])))
    x = jnp.array([0.3, 1.0, 2.0, 0.7])
    f = lambda x: jnp.sum(jnp.where(x > 0.5, jnp.sin(run(x)), x))
    second = lambda f: jax.jacrev(jax.grad(f))
    both = jax.jit(lambda x: (second(pg.double_where(f))(x), second(f)(x)))(x)
    np.testing.assert_allclose(*both, rtol=1e-8, atol=1e-8)


# --- rules whose value is not that of their function -------------------------------------------------------------------


@jax.custom_jvp
def clipped_root(x):
    return jnp.sqrt(x)


@clipped_root.defjvp
def _(primals, tangents):
    root = jnp.sqrt(jnp.maximum(primals[0], 1e-8))
    return root, 0.5 * tangents[0] / root


@jax.custom_jvp
def clipped_arcsin(x):
    return jnp.arcsin(x)


@clipped_arcsin.defjvp
def _(primals, tangents):
    inside = jnp.clip(primals[0], -0.99, 0.99)
    return jnp.arcsin(inside), tangents[0] / jnp.sqrt(1 - inside**2)


AT_THE_VALUE_OF_THE_RULE = {
    "a product": (lambda x: clipped_root(x) * clipped_root(x), 0.0),
    "a root": (lambda x: jnp.sqrt(clipped_root(x)), 0.0),
    "an arcsin": (lambda x: jnp.sin(clipped_arcsin(x)) * clipped_arcsin(x), 1.0),
    "in a scan": (
        lambda x: lax.scan(lambda c, _: (clipped_root(c) * c, clipped_root(c)), x, None, length=3)[1].sum(),
        0.0,
    ),
    "in a cond": (lambda x: lax.cond(x < 1, lambda x: clipped_root(x) ** 3, jnp.sin, x), 0.0),
    "checkpointed": (jax.checkpoint(lambda x: clipped_root(x) ** 2), 0.0),
}
OF_A_RULE = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
    "value_and_grad": jax.value_and_grad,
    "jit": lambda f: jax.jit(jax.value_and_grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
    "second": lambda f: jax.grad(jax.grad(f)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](1.0),
}


@table("name, transform", AT_THE_VALUE_OF_THE_RULE, OF_A_RULE, most=3, kind=lambda name, transform: name)
def test_what_follows_a_rule_is_differentiated_at_its_value(name, transform):
    """As in JAX: a finite derivative is never changed."""
    f, x = AT_THE_VALUE_OF_THE_RULE[name]
    expected = OF_A_RULE[transform](f)(jnp.float64(x))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(expected))
    found = OF_A_RULE[transform](pg.double_where(f))(jnp.float64(x))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), found, expected)


@pytest.mark.slow
def test_a_residual_that_jax_computes_while_it_traces():
    """With JAX 0.12, what `top_k` saves inside of a loop is a number once it is batched."""
    largest = clipped_vjp(lambda a: jnp.pad(lax.top_k(a, 2)[0], (1, 1)))
    f = lambda a: lax.scan(lambda c, x: (jnp.where(x > 0, largest(c), x), None), a, a)[0].sum()
    points = jnp.array([[-0.5, 1e-9, 0.5, 1.0], [1.0, 0.5, 1e-9, -0.5]])
    found, expected = jax.vmap(jax.grad(pg.double_where(f)))(points), jax.vmap(jax.grad(f))(points)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
