"""What `double_where` adds to a gradient's program, in figures without noise; and that what makes it cheap is exact."""

import gc
import pathlib
import re
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.tables import table
from partgrad._double_where import enter
from partgrad._programs import Recent

ORDERS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
}


def lines(gradient, *arguments):
    return len(jax.jit(gradient).lower(*arguments).as_text().splitlines())


def causal(x, scores):
    mask = jnp.tril(jnp.ones(scores.shape, bool))
    return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ x)


def attention(w):
    x = jnp.sin(jnp.arange(24.0)).reshape(6, 4)
    return causal(x, (x @ w) @ x.T)


def distances(x):
    apart = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    return jnp.sum(jnp.where(jnp.eye(len(x), dtype=bool), 0.0, jnp.sqrt(apart) * jnp.exp(-apart)))


def padded(w):
    data, x = jnp.arange(6) > 1, jnp.ones((6, 4))
    for _ in range(2):
        x = jnp.where(data[:, None], jnp.tanh(x @ w), 0.0)
    return jnp.sum(x**2)


def padded_variance(w):
    # There are 4,200 numbers, which is known, so `var` selects nothing.
    return jnp.where(jnp.arange(60)[:, None] > 9, jnp.tanh(jnp.ones((60, 4)) @ w), 0.0).var()


def relu(w):
    return jnp.sum(jax.nn.relu(jnp.ones((3, 4)) @ w) ** 2)


@pytest.mark.parametrize(
    ("f", "x", "most"),
    [
        pytest.param(attention, jnp.ones((4, 4)), 1.0, id="attention"),
        pytest.param(distances, jnp.arange(6.0).reshape(3, 2), 1.3, id="distances"),
        pytest.param(relu, jnp.ones((4, 4)), 1.2, id="relu"),
        pytest.param(padded_variance, jnp.ones((4, 70)), 0.95, id="variance"),
        # What was just selected by the same mask is not selected again.
        pytest.param(padded, jnp.ones((4, 4)), 1.5, id="padded"),
        pytest.param(lambda w: jnp.sum(jnp.tanh(w @ w)), jnp.ones((4, 4)), 1.0, id="tanh"),
    ],
)
def test_lines_of_the_program(f, x, most):
    assert lines(jax.grad(pg.double_where(f)), x) <= most * lines(jax.grad(f), x)


KEPT, INPUTS = jnp.arange(20) < 15, jnp.sin(jnp.arange(80.0)).reshape(20, 4)


def masked_loop(w, x=INPUTS):
    step = lambda h, now: (jnp.where(now[1], jnp.tanh(w @ h + now[0]), h), None)
    return jnp.sum(jax.lax.scan(step, jnp.zeros(4), (x, KEPT))[0])


def pairs(x):
    """What is selected in the loop depends on no data, and what is demanded of the last state on the state."""

    def step(state, _):
        x, v = state
        apart = x[:, None] - x
        v = v - jnp.where(jnp.eye(3, dtype=bool), 0.0, apart**-3).sum(1)
        return (x + v, v), None

    return jnp.sum(jax.lax.scan(step, (x, x), length=3)[0][0])


@pytest.mark.parametrize(("f", "x", "loops"), [(masked_loop, jnp.ones((4, 4)), 1), (pairs, jnp.arange(3.0), 0)])
def test_masks_of_a_loop(f, x, loops):
    """A mask that no step hands on is computed in one small loop; one that all steps share, in none.

    What tangents are multiplied by is neither copied nor computed again for all steps.
    """
    ours, plain = (jax.jit(jax.grad(g)).lower(x) for g in (pg.double_where(f), f))
    assert ours.as_text().count("stablehlo.while") <= plain.as_text().count("stablehlo.while") + loops
    cost = lambda lowered: lowered.compile().cost_analysis()["bytes accessed"]
    assert cost(ours) <= 1.1 * cost(plain)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_of_a_loop_with_padding(order):
    padded = pg.double_where(lambda w: masked_loop(w, jnp.where(KEPT[:, None], INPUTS, jnp.nan)))
    w = 0.1 * jnp.arange(16.0).reshape(4, 4)
    first, second = jax.jit(lambda w: [[of(f)(w) for f in (padded, masked_loop)] for of in (jax.grad, ORDERS[order])])(
        w
    )
    np.testing.assert_allclose(*first, rtol=1e-5)
    np.testing.assert_allclose(*second, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_devices_are_told_nothing_of_masks_written_per_row():
    script = pathlib.Path(__file__).parents[1] / "benchmarks" / "double_where_mesh.py"
    printed = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    figures = {
        name: float(ratio) for name, ratio in re.findall(r"mask of each (\w+(?: by hand)?).* ([\d.]+)x", printed)
    }
    assert figures["row"] == 1.0
    assert figures["number"] <= figures["number by hand"]


# Each with a path not taken on which a chain of products ends in an infinity; and with it written twice, by hand.
CHAINS = {
    "products": lambda x, c, inner: jnp.where(c, 3.0 * jnp.sqrt(inner) * jnp.sin(inner) / (1.0 + inner), 0.0),
    "shared": lambda x, c, inner: jnp.where(c, jnp.sqrt(inner) * jnp.sum(x**2) ** 1.5, x),
    "summed": lambda x, c, inner: jnp.where(c[0], jnp.sum(jnp.log(inner) * jnp.sqrt(inner)), jnp.sum(x)),
    "twice": lambda x, c, inner: jnp.where(c, jnp.log(inner), x) * jnp.where(c, jnp.sqrt(inner) * inner, 1.0),
    "broadcast": lambda x, c, inner: jnp.where(c[:, None], jnp.sqrt(inner)[:, None] * jnp.cos(x), 0.5),
    "rows": lambda x, c, inner: jnp.where(c[:, None], jnp.sqrt(inner)[:, None] * x @ jnp.outer(x, x), 0.0),
}


@table("name, order", CHAINS, ORDERS, quick=0, most=1, kind=lambda name, order: name)
def test_second_derivatives_where_a_selection_ends_a_chain(name, order):
    x = jnp.array([0.0, 0.7, 0.0, 1.3]) if name != "summed" else jnp.array([0.0, 0.7])
    weights = jnp.arange(1.0, 1.0 + x.size)
    taken = lambda x: x > 0.1
    weighted = lambda y: jnp.sum(weights * y) if y.shape == weights.shape else jnp.sum(y * 1.5)
    by_hand = lambda x: weighted(CHAINS[name](x, taken(x), jnp.where(taken(x), x, 0.3)))
    ours = pg.double_where(lambda x: weighted(CHAINS[name](x, taken(x), x)))
    for derivative, rtol, atol in ((jax.grad, 1e-5, 1e-6), (ORDERS[order], 1e-4, 1e-5)):
        found, expected = jax.jit(lambda x, d=derivative: (d(ours)(x), d(by_hand)(x)))(x)
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_a_matrix_that_live_rows_share_with_dead_ones():
    valid, w = jnp.array([True, False]), jnp.array([[jnp.inf, 1.0], [1.0, 2.0]])
    x = jnp.ones((2, 2))
    f = pg.double_where(lambda x: jnp.sum(jnp.where(valid[:, None], x @ w, 0.0)))
    np.testing.assert_array_equal(jax.grad(f)(x), [[jnp.inf, 3.0], [0.0, 0.0]])


@pytest.mark.slow
def test_rows_of_padding_in_both_factors():
    valid, x = jnp.array([True, False]), jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf]])
    f = pg.double_where(lambda w: jnp.sum(jnp.where(valid[:, None], jnp.sin(x @ w), 0.0)))
    expected = jax.grad(lambda w: jnp.sum(jnp.sin(x[:1] @ w)))(jnp.ones((2, 3)))
    np.testing.assert_allclose(jax.grad(f)(jnp.ones((2, 3))), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        lambda: jnp.tril(jnp.ones((3, 3), bool)),
        lambda: ~jnp.eye(3, dtype=bool),
        lambda: jnp.triu(jnp.ones((3, 3)), 1) > 0,
        lambda: jnp.arange(9).reshape(3, 3) % 2 == 0,
        lambda: (jnp.arange(3)[:, None] * 2 - 3 > jnp.arange(3)).T,
        lambda: jnp.broadcast_to(jnp.array([True, False, True]), (3, 3)) | (jnp.arange(3) == 1)[:, None],
        lambda: jnp.zeros((3, 3), bool),
        lambda: jnp.ones((3, 3), bool),
    ],
)
def test_masks_that_no_data_enter(mask):
    x = jnp.where(mask(), 2.0, 0.0)
    f = pg.double_where(lambda x: jnp.sum(jnp.where(mask(), jnp.log(x) * jnp.sqrt(x), 1.0)))
    expected = jnp.where(mask(), jnp.log(2.0) / (2 * 2.0**0.5) + 2.0**-0.5, 0.0)
    np.testing.assert_allclose(jax.grad(f)(x), expected, rtol=1e-6)
    assert jnp.isfinite(jax.jit(jax.hessian(f))(x)).all()


def test_functions_of_one_structure_keep_their_own_masks_and_numbers():
    def made(mask, number):
        return pg.double_where(lambda x: jnp.sum(jnp.where(mask, jnp.log(x), number * x)))

    x = jnp.array([0.0, 1.0])
    for mask, number in [([False, True], 2.0), ([True, True], 2.0), ([False, True], -0.0), ([False, True], 3.0)]:
        mask = jnp.array(mask)
        np.testing.assert_array_equal(jax.grad(made(mask, number))(x), jnp.where(mask, 1 / x, number))


@pytest.mark.slow
def test_checkpoints_of_one_structure():
    block = jax.checkpoint(lambda x, w: x + jnp.where(x > 0.1, jnp.log(x * w), 0.0))
    by_hand = lambda x, w: x + jnp.where(x > 0.1, jnp.log(jnp.where(x > 0.1, x * w, 1.0)), 0.0)
    f = lambda block: lambda x: jnp.sum(block(block(x, 1.5), x + 2.0))
    x = jnp.array([0.0, 0.5, 2.0])
    for derivative in (jax.grad, *ORDERS.values()):
        ours, hand = derivative(pg.double_where(f(block)))(x), derivative(f(by_hand))(x)
        np.testing.assert_allclose(ours, hand, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_value_that_nobody_reads_is_not_computed():
    f = pg.double_where(lambda x: jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0) + jnp.arctan(x)))
    x = jnp.arange(3.0)
    for gradient in (jax.grad(f), lambda x: jax.vmap(jax.grad(f))(x[None]), jax.hessian(f)):
        program = jax.jit(gradient).lower(x).as_text()
        assert not re.search("atan|stablehlo.log ", program)
        np.testing.assert_allclose(jax.jit(gradient)(x), gradient(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda w: -f(w), lambda f: lambda w: f(w[::-1].T.T)])
def test_a_function_under_jit_runs_compiled_outside_of_jit(around, compilations):
    """Where JAX runs a few compiled programs, `double_where` does too, and not one for each operation."""

    def layers(w):
        x = jnp.ones((3, 4))
        for order in range(1, 6):
            x = jnp.where(x > 0, jnp.log(x + order) @ w, jnp.tanh(x) / order) + jnp.cbrt(x)
        return jnp.sum(x**2)

    function, w = around(jax.jit(layers)), jnp.eye(4) + 0.1
    jax.block_until_ready(jax.value_and_grad(function)(w))
    compilations[0] = 0
    found = jax.block_until_ready(jax.value_and_grad(pg.double_where(function))(w))
    assert compilations[0] <= 4
    compilations[0] = 0
    again = jax.block_until_ready(jax.value_and_grad(pg.double_where(function))(w))
    assert compilations[0] == 0
    expected = jax.value_and_grad(function)(w)
    for one, other, wanted in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, wanted, rtol=1e-5)


@pytest.mark.slow
def test_what_rounds_beside_a_call_is_not_compiled_with_it():
    """Compiled, the sum of two operations may round otherwise: values stay those that the function has alone."""
    part = jax.jit(lambda x: jnp.where(x > 0, jnp.exp(x), 0.0))
    for function in (lambda x: jnp.sum(part(x) * x + x), lambda x: jnp.sum(part(part(x)))):
        x = jnp.linspace(-1.0, 3.0, 50)
        assert jax.value_and_grad(pg.double_where(function))(x)[0] == function(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [True, False])
def test_what_is_compiled_lasts_as_long_as_the_cache(is_cached, monkeypatch):
    """JAX keeps a compiled program as long as its function, so nothing that the program holds may hold the function."""
    monkeypatch.setattr(enter, "_programs", Recent(1))

    def gradient(size):
        function = pg.double_where(jax.jit(lambda x: jnp.sum(jnp.where(x > 0, jnp.log(x), x))))
        np.testing.assert_array_equal(jax.grad(function)(jnp.ones(size)), jnp.ones(size))
        _, compiled = next(iter(enter._programs.values()))
        return weakref.ref(compiled.__wrapped__)

    found = gradient(2)
    if not is_cached:
        gradient(3)
    gc.collect()
    assert (found() is not None) == is_cached
