"""Laws of `double_where` over random programs, at inputs with zeros, ones, ties and tiny numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import partgrad as pg
from helpers.tables import examples, table
from random_programs import (
    COMPETING,
    ENDS,
    NUMBERS,
    ONE,
    SIZE,
    TWO,
    WRAPPERS,
    assert_agree,
    assert_unchanged,
    evaluated,
    has_forward_mode,
    has_one_derivative,
    is_tame,
    program,
    tried,
)

WRAPPER_NAMES = [*["plain"] * 8, *WRAPPERS]
steps = st.lists(
    st.tuples(st.sampled_from([*ONE, *TWO]), st.sampled_from(WRAPPER_NAMES), st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=5,
)
points = st.lists(st.sampled_from(NUMBERS), min_size=SIZE, max_size=SIZE)


# Both modes cancel 1e9 against 1e9 in other ways.
tame_points = st.lists(st.sampled_from([number for number in NUMBERS if number != 1e-9]), min_size=SIZE, max_size=SIZE)


def check_finite_is_unchanged(steps, end, x):
    f = program(steps, end)
    value, expected = evaluated(jax.value_and_grad(f))(x)
    found_value, found = evaluated(jax.value_and_grad(pg.double_where(f)))(x)
    assert_unchanged(found, expected)
    # JAX itself has other last bits of some values, a product's for one, when it differentiates.
    assert np.asarray(found_value).tobytes() in (np.asarray(value).tobytes(), np.asarray(evaluated(f)(x)).tobytes())


def check_forward(steps, end, x):
    f = program(steps, end)
    if not has_forward_mode(steps) or not is_tame(steps, x):
        return
    g = pg.double_where(f)
    found, plain, forward = (evaluated(d)(x) for d in (jax.grad(g), jax.jacfwd(f), jax.jacfwd(g)))
    assert_unchanged(forward, plain, 1e-7, 1e-6)
    if not has_one_derivative(steps):
        return
    assert_agree(found, forward)
    if not any(name in COMPETING for name, _, _, _ in steps):
        assert_unchanged(found, plain, 1e-7, 1e-6)


def check_transformed(steps, end, x):
    f = program(steps, end)
    gradient = jax.grad(pg.double_where(f))
    found = gradient(x)
    points = jnp.stack([x, x[::-1]])
    batched = jax.vmap(gradient)(points)
    plain = jax.grad(f)
    for of_batch, alone, point in zip(batched, (found, gradient(points[1])), points, strict=True):
        if has_forward_mode(steps) and is_tame(steps, point):
            assert_agree(of_batch, alone)
    compiled = jax.jit(plain)(x)
    assert_unchanged(jax.jit(gradient)(x), compiled, 1e-7, 1e-6)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(steps, st.sampled_from(list(ENDS)), points)
def test_what_is_finite_is_unchanged_and_values_are_bit_equal(steps, end, x):
    with jax.enable_x64(True):
        check_finite_is_unchanged(steps, end, jnp.array(x))


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_reverse_is_forward(steps, end, x):
    with jax.enable_x64(True):
        check_forward(steps, end, jnp.array(x))


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_transforms_commute(steps, end, x):
    with jax.enable_x64(True):
        check_transformed(steps, end, jnp.array(x))


def check_second(steps, end, x):
    f = program(steps, end)
    if not has_forward_mode(steps) or not is_tame(steps, x):
        return
    for outer in (jax.jacrev, jax.jacfwd):
        expected = evaluated(outer(jax.grad(f)))(x)
        if np.all(~np.isfinite(expected) | (np.abs(expected) < 1e6)):
            assert_unchanged(evaluated(outer(jax.grad(pg.double_where(f))))(x), expected, 1e-7, 1e-6)


@pytest.mark.slow
@settings(max_examples=examples(24))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_second_derivatives_are_unchanged(steps, end, x):
    with jax.enable_x64(True):
        check_second(steps, end, jnp.array(x))


@table("first", range(0, 120, 2), most=8)
def test_random_programs(first):
    """As `python tests/scripts/random_programs.py` tries many more of."""
    wrong = {seed: tried(seed) for seed in (first, first + 1)}
    wrong = {seed: found for seed, found in wrong.items() if found[1][0] in {"wrong", "raised"}}
    assert not wrong, wrong


def test_a_numpy_constant_in_a_jitted_product():
    f = jax.jit(lambda x: np.eye(2) @ x)
    np.testing.assert_array_equal(jax.jacrev(pg.double_where(f))(jnp.ones(2)), np.eye(2))


# Each move as JAX's own rules write it, with every parameter at work: masks go through these as the numbers do.
MOVES = {
    "reshape": lambda a: lax.reshape(a, (2, 6)),
    "reshape in another order": lambda a: lax.reshape(a, (12,), (1, 0)),
    "reshape of three axes": lambda a: lax.reshape(lax.reshape(a, (3, 2, 2)), (6, 2), (2, 0, 1)),
    "axes that come and go": lambda a: lax.squeeze(lax.expand_dims(a, (0, 2, 4)), (2, 4)),
    "transpose": lambda a: lax.transpose(lax.reshape(a, (3, 2, 2)), (1, 2, 0)),
    "rev": lambda a: lax.rev(a, (1,)),
    "slice": lambda a: lax.slice(a, (0, 1), (3, 4), (2, 2)),
    "halves": lambda a: a[:, :2] * 2.0 + a[:, 2:],
    "pad": lambda a: lax.pad(a, 0.5, [(1, -1, 0), (-1, 2, 1)]),
    "pad with an element": lambda a: lax.pad(a, 2.0 * a[1, 1], [(1, 0, 0), (0, 2, 1)]),
    "broadcast": lambda a: lax.broadcast_in_dim(a[:, :1], (2, 3, 4), (1, 2)),
    "concatenate": lambda a: lax.concatenate([a, a[:, 1:] * 2.0, jnp.ones((3, 1))], 1),
    "split": lambda a: lax.split(a, (1, 2, 1), 1)[1],
    "dynamic slice": lambda a: lax.dynamic_slice(a, (2, -2), (2, 2)),
    "dynamic update": lambda a: lax.dynamic_update_slice(a, a[1:, 1:] * 2.0, (7, 0)),
    "cumulative sum": lambda a: lax.cumsum(a, axis=1, reverse=True),
    "sum": lambda a: jnp.sum(lax.reshape(a, (3, 2, 2)), (0, 2)),
    "tile": lambda a: jnp.tile(a, (2, 1)),
    "window": lambda a: lax.reduce_window(a, 0.0, lax.add, (2, 1), (1, 2), [(1, 0), (0, 0)]),
    "product": lambda a: lax.reduce_prod(a, (1,)),
    "product of planes": lambda a: lax.reduce_prod(lax.reshape(a, (3, 2, 2)), (0, 2)),
}
POINT = np.array([[1.1, -0.4, 0.7, 2.0], [-1.3, 0.9, -0.2, 0.3], [0.6, 1.7, -2.1, -0.8]])


@table("name", MOVES)
def test_masks_go_through_moves_as_numbers_do(name):
    """A selection by data before the move, and one by data or by place after it."""

    def function(a, is_by_hand, is_by_place):
        of_positive = lambda function, a: function(jnp.where(a > 0, a, 1.0) if is_by_hand else a)
        moved = MOVES[name](jnp.where(a > 0, of_positive(jnp.log, a), lax.stop_gradient(a)))
        kept = np.arange(moved.size).reshape(moved.shape) % 3 > 0 if is_by_place else moved > 0.1
        root = jnp.sqrt(jnp.where(kept & (moved > 0), moved, 1.0)) if is_by_hand else jnp.sqrt(moved)
        return jnp.sum(jnp.where(kept & (moved > 0), moved**2 * root, moved * is_by_place))

    with jax.enable_x64(True):
        for is_by_place in (False, True):
            expected = evaluated(jax.grad(lambda a: function(a, True, is_by_place)))(POINT)
            ours = pg.double_where(lambda a: function(a, False, is_by_place))
            for derivative in (jax.grad, jax.jacfwd):
                np.testing.assert_allclose(evaluated(derivative(ours))(POINT), expected, rtol=1e-12, err_msg=name)


def places(shape, axis):
    """The place of each element along an axis, of size one along the others."""
    axis = axis % len(shape) if shape else 0
    sizes = [size if number == axis else 1 for number, size in enumerate(shape)]
    return lax.broadcasted_iota(float, sizes, axis) if shape else jnp.array(1.0)


@pytest.mark.parametrize("name", MOVES)
def test_masks_that_agree_along_axes_go_through_moves(name):
    """The first row, or column, is singular before the move; the first along any axis is not selected after it."""

    def function(a, axis, is_by_hand):
        kept = places(a.shape, axis) > 0
        logarithms = jnp.log(jnp.where(kept, a, 1.0) if is_by_hand else a)
        moved = MOVES[name](jnp.where(kept, logarithms, 0.0))
        total = 0.0
        for along in range(moved.ndim):
            place = places(moved.shape, along)
            divisor = jnp.maximum(place, 1.0) if is_by_hand else place
            total += jnp.sum(jnp.where(place > 0, moved**2 / divisor, 0.0))
        return total

    with jax.enable_x64(True):
        for axis in (0, 1):
            point = np.where(np.arange(12).reshape(3, 4) // [4, 1][axis] % [3, 4][axis] > 0, abs(POINT), 0.0)
            expected = evaluated(jax.grad(lambda a: function(a, axis, True)))(point)
            found = evaluated(jax.grad(pg.double_where(lambda a: function(a, axis, False))))(point)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mask_along_one_axis_and_an_operand_along_the_other(axis):
    """The operand is demanded everywhere, because each of its elements is selected somewhere."""

    def function(a):
        stretched = lax.broadcast_in_dim(jnp.log(a), (3, 3), (0, 1))
        return jnp.sum(jnp.where(places((3, 3), 1 - axis) > 0, stretched, 0.0))

    point = np.array([1.0, 2.0, 4.0]).reshape((1, 3) if axis else (3, 1))
    np.testing.assert_allclose(evaluated(jax.grad(pg.double_where(function)))(point), 2 / point)


# Linear maps of each row, with numbers of its own and with a triangular matrix.
MATRIX = np.sin(np.arange(16.0)).reshape(4, 4)
tridiagonal = lambda own, right: lax.linalg.tridiagonal_solve(
    own.at[:, 0].set(0.0), 4.0 + own**2, own.at[:, -1].set(0.0), right
)
IN_ROWS = {
    "product": lambda a, own, low: a * own,
    "quotient": lambda a, own, low: a / own,
    "selection": lambda a, own, low: jnp.where(own > 1.2, a, 3.0 * a),
    "matrix": lambda a, own, low: a @ MATRIX,
    "matrix on the left": lambda a, own, low: (MATRIX @ a.T).T,
    "matrices": lambda a, own, low: jnp.einsum("bi,bij->bj", a, MATRIX + own[:, None]),
    "scalar products": lambda a, own, low: jnp.einsum("bi,bi->b", a, own)[:, None],
    "convolution": lambda a, own, low: lax.conv_general_dilated(a[:, None], MATRIX[:1, None, :3], (1,), "SAME")[:, 0],
    "triangular solve": lambda a, own, low: jax.scipy.linalg.solve_triangular(low, a[..., None], lower=True)[..., 0],
    "tridiagonal solve": lambda a, own, low: tridiagonal(jnp.asarray(own), a[..., None])[..., 0],
    "factors by index": lambda a, own, low: a.at[:, np.array([0, 3])].multiply(own[:, :2], unique_indices=True),
    "branch": lambda a, own, low: lax.cond(a[0, 0] > 0, lambda a: a * own, jnp.sin, a),
}
OWN = np.array([[2.0, 1.5, -1.0, 0.5], [1.0, 3.0, 2.0, -2.0], [np.inf, np.nan, 0.0, 1.0]])
LOWER = np.tril(np.arange(1.0, 49.0).reshape(3, 4, 4)) * np.array([1.0, 1.0, 0.0])[:, None, None]
ROWS = np.array([[1.5, 2.0, 3.0, 0.7], [1.0, 2.0, 1.0, 2.0], [0.0, 1.0, 0.0, 2.0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ROWS)
def test_rows_that_nothing_is_fed_into_or_demanded_of(name):
    """The second row is padding, whose norm has no derivative. The third is not selected, and nothing of it is finite."""

    def norms(a):
        padded = jnp.where(np.array([[True], [False], [True]]), jnp.log(a), 0.0)
        found = jnp.linalg.norm(IN_ROWS[name](padded, OWN, LOWER), axis=1)
        return jnp.sum(jnp.where(np.array([True, True, False]), found, 0.0))

    def alone(a):
        return jnp.linalg.norm(IN_ROWS[name](jnp.log(a), OWN[:1], LOWER[:1]))

    with jax.enable_x64(True):
        expected = evaluated(jax.grad(alone))(ROWS[:1])
        for derivative in (jax.grad, jax.jacfwd):
            found = evaluated(derivative(pg.double_where(norms)))(ROWS)
            np.testing.assert_allclose(found[:1], expected, rtol=1e-10)
            np.testing.assert_array_equal(found[1:], 0.0)


def test_rows_of_a_solve_that_nothing_is_fed_into_or_demanded_of():
    diagonal = np.array([2.0, np.nan, 4.0])
    divided = lambda _, b: b / diagonal
    solve = lambda b: lax.custom_linear_solve(lambda v: v * diagonal, b, divided, transpose_solve=divided)
    fed, demanded = np.array([True, True, False]), np.array([True, False, True])
    f = pg.double_where(lambda x: jnp.where(demanded, solve(jnp.where(fed, jnp.sin(x), 3.0)), 0.0))
    for derivative in (jax.jacrev, jax.jacfwd):
        np.testing.assert_allclose(evaluated(derivative(f))(np.zeros(3)), np.diag([0.5, 0.0, 0.0]))


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3])
def test_the_matrix_of_a_solve_in_a_loop_is_replaced_at_dead_steps_alone(length):
    """Also where there are as many steps as rows."""

    def function(x, is_by_hand):
        def step(carry, number):
            dead = jnp.where(number > 1, float(is_by_hand), 2.0)
            matrix = dead * jnp.eye(3) + carry[0] * jnp.tril(jnp.ones((3, 3)), -1)
            solved = jax.scipy.linalg.solve_triangular(matrix, carry, lower=True)
            return jnp.where(number > 1, 1.1 * carry, solved), None

        return jnp.sum(lax.scan(step, x, jnp.arange(length))[0] ** 2)

    with jax.enable_x64(True):
        x = np.array([0.3, 0.5, 0.7])
        expected = evaluated(jax.grad(lambda x: function(x, True)))(x)
        for derivative in (jax.grad, jax.jacfwd):
            found = evaluated(derivative(pg.double_where(lambda x: function(x, False))))(x)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_factor_that_the_loop_of_one_branch_leaves_alone_and_another_branch_replaces():
    def function(x, is_by_hand):
        rate = jnp.log(jnp.where(x > 0, x, 1.0) if is_by_hand else x)
        plain = lambda y: jnp.where(x > 0, y * rate, y)
        loop = lambda y: lax.scan(lambda y, _: (plain(y), None), y, length=2)[0]
        return jnp.sum(lax.cond(x[1] > 0, plain, loop, jnp.cos(x)))

    x = np.array([0.0, 0.7, 0.4])
    expected = evaluated(jax.grad(lambda x: function(x, True)))(x)
    np.testing.assert_allclose(
        evaluated(jax.grad(pg.double_where(lambda x: function(x, False))))(x), expected, rtol=1e-5
    )


def summed(divided):
    return jnp.sum(jnp.where(jnp.arange(3) > 0, divided, 0.0))


divided_by_triangle = lambda x, by: lax.linalg.triangular_solve(by, x)
DIVIDED = {
    "plain": lambda x, by: summed(x / by),
    "one predicate": lambda x, by: summed(lax.select(x[0] > 0, x / by, x)),
    "number": lambda x, by: summed(jnp.where(jnp.arange(3) > 0, x / by, x / 0.0)),
    "loop": lambda x, by: lax.scan(lambda total, _: (total + summed(x / by), None), 0.0, length=2)[0] / 2,
    "steps": lambda x, by: lax.scan(lambda c, z: (c + jnp.where(z[1] > 0, z[0] / z[1], 0.0), None), 0.0, (x, by))[0],
    "branch": lambda x, by: lax.cond(x[1] > 0, lambda x: summed(x / by), jnp.sum, x),
    "checkpoint": lambda x, by: jax.checkpoint(lambda x: summed(x / by))(x),
    "triangle": lambda x, by: summed(jax.vmap(divided_by_triangle)(x[:, None, None], by[:, None, None])[:, 0, 0]),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_divisor_that_is_known_to_be_zero_at_places_not_selected(name):
    f = pg.double_where(lambda x: DIVIDED[name](x, jnp.arange(3.0)))
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(evaluated(derivative(f))(np.array([1.0, 2.0, 3.0])), [0.0, 1.0, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["cond", "scan"])
def test_a_chain_of_products_inside_ends_in_a_selection(inside):
    """Its factors come from outside, one for all lanes among them, and from inside; also when differentiated again."""

    def function(x, is_by_hand):
        safe = lambda y: jnp.where(x > 0, y, 1.0) if is_by_hand else y
        root, total, number = jnp.sqrt(safe(x)), jnp.sum(x**2) ** 1.5, jnp.arange(3.0)

        def body(y):
            own = jnp.log(safe(x * y[0])) * jnp.sqrt(safe(x * number))
            return jnp.where(x > 0, (y * total * root) * own / (1.0 + root), y)

        if inside == "cond":
            return jnp.sum(lax.cond(x[1] > 0, body, jnp.sin, jnp.cos(x)) ** 2)
        return jnp.sum(lax.scan(lambda y, _: (body(y), None), jnp.cos(x), length=2)[0] ** 2)

    with jax.enable_x64(True):
        x = np.array([0.0, 0.7, 0.4])
        for derivative in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
            expected = evaluated(derivative(lambda x: function(x, True)))(x)
            found = evaluated(derivative(pg.double_where(lambda x: function(x, False))))(x)
            np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("inside", ["cond", "scan"])
def test_a_divisor_that_is_live_elsewhere(inside):
    """A zero by which dead lanes divide, and with which live ones multiply."""

    def function(x, is_by_hand):
        def body(x):
            total = jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0) if is_by_hand else x), 0.0))
            return jnp.cumsum(x * total)

        if inside == "cond":
            return jnp.sum(lax.cond(x[0] > 0, body, jnp.sin, x))
        return jnp.sum(lax.scan(lambda carry, _: (body(carry), None), x, length=2)[0])

    with jax.enable_x64(True):
        x = np.array([1.2, -1.0, 0.0, 0.3])
        expected = evaluated(jax.grad(lambda x: function(x, True)))(x)
        for derivative in (jax.grad, jax.jacfwd):
            found = evaluated(derivative(pg.double_where(lambda x: function(x, False))))(x)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_a_branch_among_devices_in_forward_mode():
    """The number of the branch differs from device to device, and a batch of tangents selects by it."""
    f = program([("set drop before", ("switch", "across"), 0, 0)], "weights")
    with jax.enable_x64(True):
        x = jnp.array([-0.5, 1.0, 0.0, 0.3])
        np.testing.assert_allclose(evaluated(jax.jacfwd(pg.double_where(f)))(x), evaluated(jax.jacfwd(f))(x))
