"""Which leaves the output of a function depends on differentiably, decided by tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import partgrad as pg
from helpers.flags import flag_set
from helpers.tables import table
from partgrad._transforms.unused import used_leaves

CASES = {}
FORWARD_ONLY = {"while_carry", "while_constant", "while_beside_custom_vjp"}


def case(*expected):
    def register(function):
        CASES[function.__name__] = (function, list(expected))
        return function

    return register


@jax.custom_jvp
def first_only(x, y):
    return x * y


@first_only.defjvp
def _(primals, tangents):
    return first_only(*primals), tangents[0] * primals[1]


def with_rule(rule):
    product = jax.custom_vjp(lambda x, y: x * y)
    product.defvjp(lambda x, y: (x * y, (x, y)), rule)
    return product


none_rule = with_rule(lambda residuals, ct: (ct * residuals[1], None))
zeros_rule = with_rule(lambda residuals, ct: (ct * residuals[1], jnp.zeros_like(residuals[1])))
zeros_like_ct_rule = with_rule(lambda residuals, ct: (jnp.zeros_like(ct), ct * residuals[0]))
ignoring_rule = with_rule(lambda residuals, ct: (residuals[1], jnp.ones_like(ct)))
numeric_rule = with_rule(lambda residuals, ct: (ct, 0.0 * ct))


@case(True, False, True, False)
def arithmetic(s):
    return s[0] * jnp.sin(s[2])


@case(False, False, True, False)
def reshaped_in_another_order(s):
    return lax.reshape(jnp.stack(s).reshape(2, 2), (4,), (1, 0))[1]


@case(False, False, False, False)
def constant(s):
    return jnp.float32(3.0)


@case(True, False, False, True)
def stopped(s):
    return s[0] * lax.stop_gradient(s[1]) + lax.stop_gradient(s[2] * s[3]) + s[3]


@case(True, True, False, False)
def literal_zero(s):
    return s[0] * 0.0 + jnp.zeros(()) * s[1]


@case(False, False, False, True)
def integers(s):
    return s[0].astype(int).astype(float) + (s[1] > 0) + s[3] + jnp.argmax(jnp.stack([s[2], s[0]]))


@case(False, False, False, True)
def steps(s):
    return jnp.round(s[0]) + jnp.floor(s[1]) * s[3] + jnp.sign(s[2])


@case(True, False, True, True)
def where_predicate(s):
    return jnp.where(s[1] > 0, s[0], s[2]) + s[3]


@case(True, False, False, True)
def nested_jit(s):
    inner = jax.jit(lambda x, y, z: (x + 1, y, z))
    first, _, last = jax.jit(lambda a, b, c: inner(a, b, c))(s[0], s[1], s[3])
    return first * last


@case(True, False, True, False)
def scan_carry(s):
    def body(carry, _):
        p, q, r = carry
        return (p * r, q + s[3], r), None

    return lax.scan(body, (s[0], s[1], s[2]), None, length=3)[0][0]


@case(False, False, True, False)
def scan_rotation(s):
    return lax.scan(lambda c, _: ((c[1], c[2], c[0], c[3]), None), tuple(s), None, length=2)[0][0]


@case(True, True, True, False)
def scan_rotation_long(s):
    carry, ys = lax.scan(lambda c, _: ((c[1], c[2], c[0], c[3]), c[0]), tuple(s), None, length=100)
    return carry[0] + ys.sum()


@case(False, True, False, True)
def scan_overwritten(s):
    return lax.scan(lambda c, x: ((x, c[1] * s[1]), None), (s[0], s[2]), jnp.ones(3) * s[3])[0][0] * s[1]


@case(True, False, False, False)
def scan_without_steps(s):
    return lax.scan(lambda c, x: (c * s[1], None), s[0], None, length=0)[0]


@case(True, False, False, True)
def scan_outputs(s):
    def body(carry, x):
        return carry, (x[0] * s[0], x[1] * s[1], carry)

    xs = (jnp.ones(3) * s[3], jnp.ones(3) * s[2])
    return lax.scan(body, s[1], xs)[1][0].sum()


@case(True, False, True, False)
def nested_scan(s):
    inner = lambda c, x: ((c[0] * x, c[1] + s[3]), c[1])
    outer = lambda c, _: (lax.scan(inner, c, jnp.ones(2) * s[2])[0], c[1])
    return lax.scan(outer, (s[0], s[1]), None, length=2)[0][0]


@case(True, False, True, False)
def fori(s):
    return lax.fori_loop(0, 3, lambda i, c: (c[0] * s[2], c[1] + s[3]), (s[0], s[1]))[0]


@case(True, False, True, False)
def while_carry(s):
    body = lambda c: (c[0] * c[2], c[1] * c[3], c[2], c[3], c[4] + 1)
    return lax.while_loop(lambda c: c[4] < 3, body, (*s, 0))[0]


@case(True, False, True, False)
def while_constant(s):
    body = lambda c: (c[0] + s[2], c[1] * s[3])
    return lax.while_loop(lambda c: c[0] + s[3] < 3, body, (s[0], s[1]))[0]


@case(True, False, True, False)
def cond_operands(s):
    return lax.cond(s[1] > 0, lambda a, b, c: a, lambda a, b, c: c * 2, s[0], s[1], s[2])


@case(False, True, False, True)
def switch_operands(s):
    branches = [lambda a, b: (a, b), lambda a, b: (s[2], b * 2), lambda a, b: (a, s[3])]
    return lax.switch(jnp.int32(1), branches, s[0], s[1])[1]


@case(True, False, True, False)
def remat(s):
    @jax.checkpoint
    def pair(a, b, c, d):
        return jnp.sin(a) * jnp.exp(c), jnp.sin(b * d)

    return pair(*s)[0]


@case(True, False, False, True)
def remat_in_scan(s):
    body = jax.checkpoint(lambda c, x: ((jnp.sin(c[0]) * x, jnp.cos(c[1])), None))
    return lax.scan(body, (s[0], s[1]), jnp.ones(3) * s[3])[0][0]


@case(True, False, True, False)
def own_jvp(s):
    return first_only(s[0], s[1]) + s[2]


@case(True, False, False, False)
def own_jvp_in_jitted_scan(s):
    body = lambda c, _: (first_only(c, s[1]), None)
    return jax.jit(lambda x: lax.scan(body, x, None, length=3)[0])(s[0])


@case(True, False, True, False)
def own_vjp_none(s):
    return none_rule(s[0], s[1]) * s[2]


@case(True, False, True, True)
def own_vjp_zeros(s):
    return zeros_rule(s[0], jnp.sin(s[1]) * 2) + s[2] * s[3]


@case(False, True, False, False)
def own_vjp_zeros_like_cotangent(s):
    return zeros_like_ct_rule(jnp.exp(s[0]), s[1])


@case(True, True, False, False)
def own_vjp_ignores_its_cotangent(s):
    return ignoring_rule(s[0], s[1])


@case(True, True, False, False)
def own_vjp_numeric_zero(s):
    return numeric_rule(s[0], s[1])


@case(True, False, True, False)
def own_vjp_in_scan(s):
    return lax.scan(lambda c, x: (none_rule(c, s[1]) * x, s[3]), s[0], jnp.ones(3) * s[2])[0]


@case(True, False, False, False)
def own_vjp_under_vmap(s):
    return jax.vmap(lambda x: none_rule(x * s[0], s[1]))(jnp.arange(3.0)).sum()


# Neither mode of JAX goes through both, so that nothing tells that the rule returns None.
@case(True, True, True, False)
def while_beside_custom_vjp(s):
    looped = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * s[3]), (s[2], s[3]))[0]
    return none_rule(s[0], s[1]) + looped


@case(True, False, True, False)
def vmapped(s):
    outputs = jax.vmap(lambda x: (x * s[0], x * s[1], s[2]))(jnp.arange(3.0))
    return outputs[0].sum() + outputs[2].sum()


@case(False, True, True, False)
def gradient_inside(s):
    return jax.grad(lambda x: x * s[1] * s[2] + s[0])(s[3])


@case(True, True, True, False)
def linear_algebra(s):
    matrix = jnp.eye(2) * s[0]
    return jnp.linalg.solve(matrix, jnp.ones(2) * s[1]).sum() + jnp.linalg.solve(jnp.eye(2) * s[2], jnp.ones(2))[0] * 0


@case(True, True, True, False)
def indexing(s):
    return jnp.stack(s[:3])[lax.stop_gradient(s[3]).astype(int)] + jnp.sort(jnp.stack(s[:3]))[0]


@case(True, False, False, False)
def written(s):
    return jnp.zeros(3).at[0].set(s[0]).sum() + lax.stop_gradient(jnp.ones(3).at[1].add(s[1]))[1]


LEAVES = [jnp.float32(v) for v in (0.5, 1.5, 2.0, 0.25)]


@pytest.mark.parametrize("name", CASES)
def test_structure(name):
    function, expected = CASES[name]
    assert used_leaves(function, LEAVES) == expected


@pytest.mark.parametrize("name", CASES)
def test_under_jit(name):
    function, expected = CASES[name]
    found = []
    jax.jit(lambda leaves: found.append(used_leaves(function, leaves)))(LEAVES)
    assert found == [expected]


@table("name", CASES, quick=4)
@settings(max_examples=5)
@given(values=st.lists(st.floats(0.25, 2.5, width=32), min_size=4, max_size=4))
def test_an_unused_leaf_has_a_zero_gradient(name, values):
    function, _ = CASES[name]
    leaves = [jnp.float32(v) for v in values]
    if name in FORWARD_ONLY:
        if name == "while_beside_custom_vjp":
            return
        gradients = jax.jit(jax.jacfwd(function))(leaves)
    else:
        gradients = jax.jit(jax.grad(function))(leaves)
    for used, gradient in zip(used_leaves(function, leaves), gradients, strict=True):
        assert used or not np.any(gradient)


def test_python_floats_numpy_arrays_and_shapes():
    leaves = [1.0, np.ones(3, np.float32), jnp.ones((2, 2)), 2.0, 1j]
    assert used_leaves(lambda s: (s[0] * s[1]).sum() + abs(s[4]), leaves) == [True, True, False, False, True]


def test_auxiliary_data_does_not_use_a_leaf():
    for function, aux in ((lambda s: (s[0], s[1]), 2.0), (lambda s: (s[0], "text"), "text")):
        assert pg.grad(function, has_aux=True, unused="none")([1.0, 2.0]) == ([1.0, None], aux)


def test_no_leaves():
    assert used_leaves(lambda s: jnp.ones(()), []) == []
    assert used_leaves(lambda s: (), [1.0]) == [False]


def test_branches_in_python_on_a_value():
    function = lambda s: s[1] * 2 if s[0] > 0 else s[2]
    assert used_leaves(function, LEAVES[:3]) == [False, True, False]
    assert used_leaves(function, [-1.0, 1.0, 1.0]) == [False, False, True]


def test_a_branch_in_python_beside_an_own_rule():
    function = lambda s: none_rule(s[0], s[1]) if s[0] > 0 else s[2]
    assert used_leaves(function, LEAVES[:3]) == [True, False, False]


@pytest.mark.parametrize("zero", [0.0, np.float32(0.0), jnp.float32(0.0)])
def test_a_residual_that_happens_to_be_zero_is_no_structural_zero(zero):
    function = lambda s: ignoring_rule(s[0], s[1]) if s[0] >= 0 else s[2]
    assert used_leaves(function, [zero] * 3) == [True, True, False]


def test_inside_grad():
    found = []

    def outer(x):
        found.append(used_leaves(lambda s: s[0] * x, [x, x]))
        return x

    jax.grad(outer)(1.0)
    assert found == [[True, False]]


def test_values_do_not_decide():
    assert used_leaves(arithmetic, [0.0] * 4) == [True, False, True, False]


def test_nothing_is_computed():
    calls = []

    def function(s):
        return s[0] * jax.pure_callback(lambda: calls.append(1) or np.float32(1.0), jax.ShapeDtypeStruct((), "float32"))

    assert used_leaves(function, LEAVES[:2]) == [True, False]
    assert calls == []


def test_mutable_references_are_conservative():
    def function(s):
        reference = jax.new_ref(s[0])
        reference[...] = s[0] * s[1]
        return reference[...]

    assert used_leaves(function, LEAVES[:2]) == [True, True]


def test_mutable_references_in_a_backward_rule_are_conservative():
    def rule(residuals, cotangent):
        reference = jax.new_ref(cotangent * residuals[1])
        return reference[...], None

    product = with_rule(rule)
    assert used_leaves(lambda s: product(s[0], s[1]), LEAVES[:3]) == [True, True, False]


def test_an_own_rule_that_has_a_reverse_mode_only():
    with flag_set("jax_custom_vjp3"):
        rule = with_rule(lambda residuals, ct: (ct * residuals[1], None))
        assert used_leaves(lambda s: (rule(s[0], s[1]), jnp.zeros(2)), LEAVES[:3]) == [True, False, False]
        assert used_leaves(lambda s: rule(s[0], s[1]) if s[0] > 0 else s[2], LEAVES[:3]) == [True, False, False]
