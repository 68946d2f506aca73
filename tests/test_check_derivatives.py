"""Derivatives against finite differences: every fault is found where it is, and nothing is said of what is right."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partgrad._check.derivatives.exact import Exact
from partgrad._check.derivatives.float64 import widened
from partgrad._check.derivatives.reading import Point
from partgrad._check.derivatives.search import derivatives
from partgrad._check.numbered import NumberedProgram
from tables import table

pytestmark = pytest.mark.internal


X = np.array([1.7, 0.4, -0.6, 1.3, -0.9], np.float32)
ONE_ZERO = X * np.array([1, 0, 1, 1, 1], np.float32)
MANY = np.random.default_rng(1).normal(size=300).astype(np.float32)
M = np.random.default_rng(2).normal(size=(3, 3)).astype(np.float32)


def with_jvp(rule):
    """The sine with a forward rule of x and its tangent."""
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(lambda x, t: (jnp.sin(x[0]), rule(x[0], t[0])))
    return sine


def with_vjp(rule):
    """The sine with a reverse rule of x and its cotangent."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (rule(x, c),))
    return sine


slightly_wrong = lambda x, t: 1.0001 * jnp.cos(x) * t
wrong_at_7 = lambda x, t: jnp.cos(x) * t * jnp.ones(x.shape).at[7].set(1.01)


def numbered(function, *leaves):
    program = NumberedProgram(lambda leaves: function(*leaves), list(map(jnp.asarray, leaves)), list(map(str, leaves)))
    program.differentiate()
    return program


def point_of(program):
    exact = Exact(program)
    size = sum(exact.sizes)
    random = np.random.default_rng(1)
    weights = random.choice([-1, 1], size) * random.integers(4, 8, size) / 4.0 if size > 1 else np.ones(size)
    return Point(exact, [widened(leaf) for leaf in program.leaves], weights)


def compared(function, *leaves, **options):
    program = numbered(function, *leaves)
    point = point_of(program)
    try:
        ends = [
            w.astype(a.dtype) for w, a in zip(point.exact.cotangents(point.weights), program.out_avals, strict=True)
        ]
        low = jax.jit(jax.extend.core.jaxpr_as_fun(program.cotangent))(*program.leaves, *ends)
    except Exception:
        low = None
    return derivatives(program, point, np.random.default_rng(0), gradient=low, **options)


def only(function, *leaves, **options):
    (leaf,) = compared(function, *leaves, **options)
    return leaf


RIGHT = {
    "sum": (lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)), X),
    "array": (lambda x: (jnp.tanh(x), jnp.outer(x, x)), X),
    "float16 in the middle": (lambda x: jnp.sin(x.astype(jnp.float16)).astype(jnp.float32).sum(), X),
    "bfloat16": (lambda x: jax.scipy.special.erf(x).sum(), X.astype(jnp.bfloat16)),
    "linear algebra": (lambda a: (jnp.linalg.inv(a), jnp.linalg.slogdet(a), jnp.linalg.solve(a, a[0])), M),
    "scan": (lambda x: lax.scan(lambda c, u: (jnp.tanh(c + u * x), c), x, x), X),
    "complex": (lambda z: (z * z, z.conj(), jnp.abs(z) ** 2, jnp.exp(z)), (M + 1j * M.T).astype(np.complex64)),
    "relu at generic points": (lambda w: jnp.mean(jax.nn.relu(MANY[:, None] * w)), MANY[:40]),
    "draw": (lambda x: (x * jax.random.normal(jax.random.key(0), (5,))).sum(), X),
    "rounded": (lambda x: jnp.round(3 * x).sum(), X),
    "no dependence": (lambda x: jnp.ones(3), X),
    "no elements": (lambda x: x.sum(), X[:0]),
    "scalar": (lambda x: x**3, np.float32(0.7)),
    "right rules": (lambda x: with_jvp(lambda x, t: jnp.cos(x) * t)(x).sum(), X),
    "right reverse rule": (lambda x: with_vjp(lambda x, c: jnp.cos(x) * c)(x).sum(), X),
    "tiny and large": (lambda x: jnp.log(x).sum(), np.float32([1e-6, 1, 10])),
}


@table("name", RIGHT)
def test_what_is_right_agrees(name):
    function, x = RIGHT[name]
    leaf = only(function, x)
    assert (leaf.status, leaf.place, leaf.wrong) == ("agree", "", "")
    assert leaf.element is None
    assert not leaf.excuses


def test_agrees_in_both_precisions(x64):
    leaf = only(lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)), jnp.asarray(X, float))
    assert leaf.status == "agree"
    assert (leaf.precision < 1e-14) == x64


FAULTS = {
    "forward rule": (lambda x: with_jvp(slightly_wrong)(x).sum(), X, "both", 1e-4),
    "forward rule, array": (lambda x: jnp.exp(with_jvp(slightly_wrong)(x)), X, "both", 1e-4),
    "reverse rule": (lambda x: with_vjp(slightly_wrong)(x).sum(), X, "reverse", 1e-4),
    "reverse rule, array": (lambda x: with_vjp(slightly_wrong)(x), X, "reverse", 1e-4),
    "zero rule": (lambda x: with_jvp(lambda x, t: 0 * t)(x).sum(), X, "both", 1),
    "in a scan": (lambda x: lax.scan(lambda c, u: (with_jvp(slightly_wrong)(c + u), None), 0.0, x)[0], X, "both", 1e-4),
    "behind a kink": (lambda x: with_jvp(slightly_wrong)(jnp.abs(x)).sum(), 0 * X, "both", 1e-4),
    "beside a kink": (
        lambda x: jnp.abs(x).sum() + with_jvp(lambda x, t: 1.1 * jnp.cos(x) * t)(x).sum(),
        ONE_ZERO,
        "both",
        1e-3,
    ),
    "NaN": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0).sum(), X, "reverse", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_mismatches(name):
    function, x, wrong, relative = FAULTS[name]
    leaf = only(function, x)
    assert (leaf.status, leaf.wrong) == ("mismatch", wrong)
    if relative is None:
        assert np.isnan(leaf.got)
    else:
        assert leaf.relative > relative / 20


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
@pytest.mark.parametrize("total", [jnp.sum, lambda y: y])
def test_the_one_wrong_element_of_many_is_found(rule, total):
    leaf = only(lambda x: total(rule(wrong_at_7)(x)), MANY)
    weight = leaf.expected / np.cos(MANY[7])
    assert leaf.status == "mismatch"
    assert leaf.element == 7
    assert leaf.got == pytest.approx(1.01 * leaf.expected, rel=1e-6)
    assert abs(weight) == pytest.approx(1, rel=1e-6) or total is not jnp.sum


def test_a_wrong_element_that_hardly_shows_is_found():
    leaf = only(lambda x: with_jvp(wrong_at_7)(x).sum(), np.linspace(0.1, 0.5, 20000, dtype=np.float32))
    assert (leaf.status, leaf.element) == ("mismatch", 7)


def test_a_function_without_outputs_or_leaves():
    assert only(lambda x: jnp.argmax(x), X).status in ("agree", "inconclusive", "absent")
    assert compared(lambda: jnp.ones(2)) == []


def test_exhaustive_moves_every_element():
    ticks = []
    function = lambda x: with_jvp(wrong_at_7)(x).sum()
    leaf = only(function, MANY[:20], exhaustive=True, directions=1, tick=lambda done, of: ticks.append((done, of)))
    assert (leaf.status, leaf.element) == ("mismatch", 7)
    assert leaf.expected == pytest.approx(np.cos(MANY[7]), rel=1e-6)
    assert ticks == [(i + 1, 20) for i in range(20)]


@pytest.mark.slow
def test_the_leaf_to_blame_is_found_among_few_and_among_many():
    for leaves in (5, 100):
        points = [np.float32([0.1 * i, 1]) for i in range(leaves)]
        pairs = lambda *x: sum(jnp.sin(a * b).sum() for a, b in itertools.pairwise(x))
        found = compared(lambda *x: pairs(*x) + with_jvp(slightly_wrong)(x[3]).sum(), *points, directions=1)
        assert [i for i, leaf in enumerate(found) if leaf.status != "agree"] == [3]


@pytest.mark.parametrize(
    "function",
    [lambda x: jnp.abs(x).sum(), lambda x: jax.nn.relu(x).sum(), jnp.abs, lambda x: jnp.maximum(x, 0 * x).sum()],
)
def test_kinks_are_no_faults(function):
    leaf = only(function, ONE_ZERO)
    assert leaf.status == "agree"
    assert leaf.kinks
    assert only(function, 0 * X).status == "agree"


def test_jumps_are_no_faults():
    leaf = only(lambda x: (jnp.floor(x) + x).sum(), np.float32([1, 2, 0.5]))
    assert leaf.status == "agree"
    assert leaf.jumps


@pytest.mark.parametrize(
    "function", [lambda x: (jnp.abs(x) - 2 * jax.nn.relu(x)).sum(), lambda x: jnp.where(x == 0, 0, x).sum()]
)
def test_a_derivative_that_is_wrong_at_the_point_alone_is_told(function):
    leaf = only(function, ONE_ZERO)
    assert (leaf.status, leaf.place) == ("mismatch", "tie")
    assert leaf.element == 1
    assert abs(leaf.got - leaf.expected) == pytest.approx(abs(leaf.expected) + abs(leaf.got))


def test_a_gradient_that_is_nan_at_the_point_alone_is_no_tie():
    leaf = only(lambda x: jnp.where(x > 0.5, jnp.sqrt(jnp.abs(x)), x).sum(), ONE_ZERO)
    assert (leaf.status, leaf.place, leaf.element) == ("mismatch", "tie", 1)
    assert np.isnan(leaf.got)
    assert leaf.expected == pytest.approx(1)


STOPPED = {
    "plain": (lambda x: (lax.stop_gradient(x) * x).sum(), 1),
    "in a scan": (lambda x: lax.scan(lambda c, u: (c * lax.stop_gradient(u) + u, None), 1.0, x)[0], 1),
    "beside a library's": (lambda x: (lax.stop_gradient(x) * x).sum() + jax.nn.logsumexp(x), 1),
    "beside a solve": (lambda x: jnp.linalg.solve(jnp.outer(x, x) + jnp.eye(5), lax.stop_gradient(x)), 1),
    "two": (lambda x: (lax.stop_gradient(x) * jnp.exp(x) + x * jnp.sin(lax.stop_gradient(x) + 1)).sum(), 2),
    "straight through": (lambda x: (x + lax.stop_gradient(jnp.round(3 * x) / 3 - x)).sum(), 1),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_gradient_that_explains_a_mismatch_is_named(name):
    function, stops = STOPPED[name]
    leaf = only(function, X)
    assert leaf.status == "stopped"
    assert len(leaf.excuses) == stops
    assert {chain[-1].primitive.name for chain in leaf.excuses} == {"stop_gradient"}


def test_ties_and_stops_do_not_excuse_the_faults_of_other_elements():
    bad_at_2 = lambda x: with_jvp(lambda x, t: jnp.cos(x) * t * jnp.ones(5).at[2].set(1.01))(x).sum()
    tie = only(lambda x: bad_at_2(x) + jnp.where(x == 0, 0, x)[:2].sum(), ONE_ZERO)
    stop = only(lambda x: bad_at_2(x) + (lax.stop_gradient(x) * x)[:2].sum(), X)
    assert (tie.status, tie.element) == ("mismatch", 2)
    assert stop.status == "mismatch"


def test_a_stop_gradient_that_does_not_explain_a_mismatch_is_not():
    leaf = only(lambda x: (lax.stop_gradient(x) * x).sum() + with_jvp(slightly_wrong)(x).sum(), X)
    assert leaf.status == "mismatch"
    assert not leaf.excuses


def test_what_an_iterative_solver_leaves_is_no_fault():
    def root(a):
        solved = lambda y: jnp.abs(y * y - a) > 1e-4
        step = lambda y: (y + lax.stop_gradient(a) / y) / 2
        y = lax.stop_gradient(lax.while_loop(solved, step, a))
        return y + (a - y * y) / (2 * lax.stop_gradient(y))

    assert only(root, np.float32(2), slack={0: 1e-3}).status in ("agree", "rounding")


def test_a_derivative_that_is_not_there_is_said_to_be_absent():
    reverse = numbered(lambda x: with_vjp(lambda x, c: jnp.cos(x) * c)(x).sum(), X)
    forward = numbered(lambda x: lax.while_loop(lambda y: y < 9, lambda y: 2 * y, x), np.float32(1.1))
    neither = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((5,), np.float32), x)
    for program, has_forward in ((reverse, False), (forward, True)):
        point = point_of(program)
        assert (point.exact.forward(point.leaves, point.leaves) is not None) == has_forward
        assert (point.gradient is None) == has_forward
        assert [leaf.status for leaf in derivatives(program, point, np.random.default_rng(0))] == ["agree"]
    leaf = only(neither, X)
    assert (leaf.status, leaf.precision) == ("absent", None)


def test_says_how_exact_the_gradient_is_in_low_precision():
    function = lambda dtype: lambda x: jnp.exp(jnp.sin(x.astype(dtype))).astype(jnp.float32).sum()
    single, half = only(function(jnp.float32), X).precision, only(function(jnp.float16), X).precision
    assert 0 < single < 1e-6 < 1e-4 < half < 1e-2


def test_a_point_that_the_function_refuses_is_not_asked_for():
    def refusing(x):
        if not (np.asarray(x) > 0.99).all():
            raise ValueError("too small")
        return x

    def function(x):
        wanted = jax.ShapeDtypeStruct((2,), np.float32)
        return jnp.sin(x) + 0 * jax.pure_callback(refusing, wanted, lax.stop_gradient(x))

    assert only(function, np.float32([1, 2])).status in ("agree", "inconclusive")


def test_counts_its_evaluations():
    program = numbered(lambda x: jnp.sin(x).sum(), X)
    point = point_of(program)
    derivatives(program, point, np.random.default_rng(0), directions=2)
    assert 5 + 2 * 6 <= point.exact.evaluations <= 5 + 2 * 8


def test_the_same_seed_says_the_same():
    function = lambda x: with_jvp(slightly_wrong)(x).sum()
    assert only(function, X) == only(function, X)
