"""Finite differences: exact where a function is smooth, and never certain of a slope that is not there."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from helpers.tables import examples
from partgrad._check.slopes import JUMP, KINK, SMOOTH, UNSURE, slope

sizes = st.floats(1e-3, 1e3).flatmap(lambda size: st.sampled_from([size, -size]))


def one(function, **options):
    """The slope of a function of one output, as numbers."""
    found = slope(lambda t: np.array([function(t)]), **options)
    return found._replace(
        **{name: getattr(found, name)[0] for name in ("derivative", "error", "kind", "right", "left")}
    )


@given(st.lists(sizes, min_size=1, max_size=6))
@example([1.0, 1.0, 1.0, 0.171875, 1.0, -713.0])  # settles with an error of 1e-6
@example([257.0, 0.00390625, 0.00390625, 320.0, 315.0, 304.0])  # the other terms round more than the slope is large
def test_is_exact_for_polynomials(coefficients):
    found = one(np.polynomial.Polynomial(coefficients))
    size, expected = sum(map(abs, coefficients)), [*coefficients, 0.0][1]
    assert found.kind == SMOOTH
    assert found.error <= max(1e-11 * size, 1e-6 * abs(expected))
    assert abs(found.derivative - expected) <= max(1e-11 * size, 3 * found.error)


SMOOTH_FUNCTIONS = {
    "sin": (np.sin, np.cos),
    "exp": (np.exp, np.exp),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
    "reciprocal": (lambda x: 1 / x, lambda x: -1 / x**2),
    "log": (lambda x: np.log(abs(x)), lambda x: 1 / x),
    "root": (lambda x: np.sqrt(abs(x)), lambda x: 0.5 / np.sqrt(abs(x)) * np.sign(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH_FUNCTIONS)
@given(st.floats(0.01, 20))
def test_is_within_its_aim_for_smooth_functions(name, x):
    function, derivative = SMOOTH_FUNCTIONS[name]
    found = one(lambda t: function(x + t * x))
    expected = x * derivative(x)
    assert found.kind == SMOOTH
    assert abs(found.derivative - expected) <= 1e-9 * max(abs(expected), 0.1)
    assert abs(found.derivative - expected) <= 3 * found.error


@st.composite
def piecewise(draw):
    """A function with kinks and jumps, one of them maybe at zero; and its slope there, or None where it has none."""
    comparable = st.floats(0.1, 10).flatmap(lambda size: st.sampled_from([size, -size]))
    a, b, w = draw(comparable), draw(comparable), draw(st.floats(0.1, 10))
    terms, expected = [lambda t: a * np.sin(w * t + b)], a * w * np.cos(b)
    places = draw(st.lists(st.floats(-5, 0).flatmap(lambda e: st.sampled_from([10**e, -(10**e)])), max_size=4))
    for at in places + [0.0] * draw(st.integers(0, 1)):
        kind, size = draw(st.sampled_from(KINKS)), draw(comparable)
        function, derivative = kind
        # Where jumps make up for each other, what lies between them is narrower than the steps.
        size *= 1 if at else 1.37
        terms.append(lambda t, at=at, size=size, function=function: size * function(t - at))
        expected = None if expected is None or at == 0 else expected + size * derivative(-at)
    return lambda t: sum(term(t) for term in terms), expected


KINKS = [
    (lambda t: max(t, 0.0), lambda t: t > 0),
    (abs, np.sign),
    (lambda t: float(t >= 0), lambda t: 0),
    (lambda t: max(t, 0.0) * t + abs(t), lambda t: 2 * max(t, 0.0) + np.sign(t)),
    (lambda t: np.floor(t / 2), lambda t: 0),
]


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(piecewise())
def test_is_never_certain_of_a_wrong_slope(case):
    function, expected = case
    found = one(function)
    if found.kind == SMOOTH:
        size = abs(function(0.0)) + abs(found.derivative)
        assert expected is not None
        assert found.error <= 1e-6 * size
        assert abs(found.derivative - expected) <= 5 * found.error + 1e-10 * size


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(-3, 3), st.floats(0.1, 10), st.sampled_from([-100, -1, 0.01, 1, 10]))
def test_a_kink_and_a_jump_at_the_point_are_told(offset, scale, size):
    smooth = lambda t: np.cos(scale * t + offset)
    assert one(lambda t: smooth(t) + size * abs(t)).kind == KINK
    assert one(lambda t: smooth(t) + size * max(t, 0)).kind == KINK
    assert one(lambda t: smooth(t) + size * (t >= 0)).kind == JUMP
    assert one(lambda t: smooth(t) + size * np.sign(t)).kind == JUMP


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(-5.5, -1), st.sampled_from([1, -1]), st.floats(-3, 3))
def test_a_kink_or_a_jump_nearby_does_not_matter(exponent, side, offset):
    at = side * 10**exponent
    for broken, beyond in ((np.abs, 1), (lambda t: np.maximum(t, 0), 0), (np.floor, None)):
        found = one(lambda t, broken=broken: np.sin(t + offset) + broken(t - at))
        expected = np.cos(offset) + (0 if beyond is None else (side < 0) - beyond * (side > 0))
        assert found.kind == SMOOTH
        assert abs(found.derivative - expected) <= 1e-7


def test_takes_more_evaluations_only_where_they_help():
    def evaluations(function, *at_zero):
        calls = []
        slope(lambda t: calls.append(t) or function(t), *at_zero)
        return len(calls)

    smooth = lambda t: np.array([np.sin(t), t**2])
    assert evaluations(smooth) in (7, 9)
    assert evaluations(lambda t: np.array([abs(t)])) <= 2 * 11 + 1
    assert evaluations(smooth, np.zeros(2)) == evaluations(smooth) - 1


def test_shrinks_its_steps_into_the_domain():
    found = one(lambda t: np.log(1e-3 + t) if t > -1e-3 else np.nan)
    assert found.kind == SMOOTH
    np.testing.assert_allclose(found.derivative, 1000, rtol=1e-7)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: np.sqrt(t) if t >= 0 else np.nan,
        np.cbrt,
        lambda t: np.nan,
        lambda t: np.inf,
        lambda t: float(np.random.default_rng(abs(hash(t))).normal()),
        lambda t: np.round((1 + t) * 1e5) / 1e5,
        lambda t: np.sin(1 / t) if t else 0.0,
        lambda t: t * np.sin(1 / t) if t else 0.0,
    ],
)
def test_is_not_certain_of_what_has_no_slope(function):
    assert one(function).kind in (JUMP, UNSURE)


def test_of_what_is_rounded_it_knows_the_slope_as_far_as_it_says():
    found = one(lambda t: float(np.float32(np.sin(1 + t))))
    assert found.kind == UNSURE or abs(found.derivative - np.cos(1)) <= 3 * found.error


SIDES = {
    "abs": (abs, 1, -1),
    "relu": (lambda t: max(t, 0.0), 1, 0),
    "two curves": (lambda t: np.exp(t) if t > 0 else 1 - 2 * t + t**2, 1, -2),
    "a logarithm on one side": (lambda t: t * np.log(t) if t > 0 else 2 * t, -np.inf, 2),
    "a power just below one": (lambda t: max(t, 0.0) ** 0.95 + t, np.inf, 1),
    "a root beside a steep slope": (lambda t: np.sqrt(max(t, 0.0)) + 300 * t, np.inf, 300),
    "a root on one side": (lambda t: np.sqrt(max(t, 0.0)) + min(t, 0.0), np.inf, 1),
}


@pytest.mark.parametrize("name", SIDES)
def test_the_slopes_on_the_sides_of_a_kink(name):
    function, right, left = SIDES[name]
    found = one(function)
    assert found.kind == KINK
    np.testing.assert_allclose([found.right, found.left], [right, left], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1e-3, 1e-5, 1e-6])
def test_a_rounded_corner_is_no_kink(width):
    assert one(lambda t: np.sqrt(t * t + width**2)).kind != KINK


@pytest.mark.parametrize("steps", [10, 20, 30])
def test_what_is_steep_does_not_jump(steps):
    def iterated(t, x=0.3):
        x += t
        for _ in range(steps):
            x = 3.9 * x * (1 - x)
        return x

    assert one(iterated).kind in (SMOOTH, UNSURE)


def test_a_constant_has_slope_zero():
    found = slope(lambda t: np.array([0.0, 3.0, 1e300, -1e-300]))
    np.testing.assert_array_equal(found.derivative, 0)
    np.testing.assert_array_equal(found.kind, SMOOTH)


def test_judges_each_output_by_itself():
    found = slope(lambda t: np.array([t, abs(t), np.floor(t), np.nan]))
    np.testing.assert_array_equal(found.kind, [SMOOTH, KINK, JUMP, UNSURE])
    assert found.derivative[0] == pytest.approx(1, rel=1e-12)


def test_many_outputs_are_judged_as_one_is():
    x = np.linspace(-3, 3, 70001)
    found = slope(lambda t: np.maximum(np.sin(x) + t, 0))
    assert (found.kind[np.abs(np.sin(x)) > 1e-5] == SMOOTH).all()
    np.testing.assert_allclose(found.derivative[found.kind == SMOOTH], (np.sin(x) > 0)[found.kind == SMOOTH], atol=1e-7)


def test_no_outputs():
    assert slope(lambda t: np.zeros(0)).derivative.shape == (0,)


def test_complex_outputs():
    found = slope(lambda t: np.array([np.exp(1j * (1 + t)), t + 1j * abs(t)]))
    np.testing.assert_array_equal(found.kind, [SMOOTH, KINK])
    np.testing.assert_allclose(found.derivative[0], 1j * np.exp(1j), rtol=1e-10)


def test_other_steps_give_the_same_slope():
    one_way, other_way = one(np.exp), one(np.exp, shrink=0.7)
    assert one_way.derivative != other_way.derivative
    assert one_way.derivative == pytest.approx(other_way.derivative, rel=1e-10)
