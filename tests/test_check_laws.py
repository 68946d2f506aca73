"""What a check says of rules, stops, remedies and options: cases that were once wrong, one behaviour each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest
from jax import lax
from jax.lax import stop_gradient

import partgrad as pg

pytestmark = pytest.mark.slow


def check(f, *args, wrt=None, **options):
    return pg.check(f, wrt, progress=False, **options)(*args)


def found(report, *severities):
    """Kinds and leaves of the findings of these severities, by default of errors and warnings."""
    severities = severities or ("error", "warning")
    return [(f.kind, leaf) for f in report.findings if f.severity in severities for leaf in f.leaves or ("",)]


def here(function, offset):
    """A line of a function, as findings write it."""
    return f"{__file__.rpartition('/')[2]}:{function.__code__.co_firstlineno + offset}"


def rule(f, derivative):
    """A function with a forward rule of its own."""
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), derivative(*primals) * tangents[0]))
    return f


twice_too_large = rule(lambda x: jnp.sin(x), lambda x: 2 * jnp.cos(x))
another_wrong_one = rule(lambda x: jnp.cos(x), lambda x: 3 * jnp.cos(x))

# --- of the wrapped function that of the plain one, less what wrapping put right -------------------------------------


def stopped(p):
    return p["q"] ** 2 + stop_gradient(p["s"]) * p["q"]


def read_beyond(p):
    return (p["a"] * jnp.array([1.0, 2.0]))[jnp.array([5])][0] * p["b"] + p["c"]


def rounded(p):
    return jnp.round(p["a"]) + p["b"]


def with_wrong_rule(p):
    return twice_too_large(p["a"]) + p["b"]


def with_norm(p):
    return jnp.linalg.norm(p["a"]) + p["b"]


ABC = {"a": 3.2, "b": 1.5, "c": 1.0}
AB = {"a": 3.2, "b": 1.5}


@pytest.mark.parametrize(
    ("f", "point"),
    [
        (stopped, {"q": 1.5, "s": 0.7}),
        (read_beyond, ABC),
        (rounded, AB),
        (with_wrong_rule, AB),
        (with_norm, {"a": jnp.zeros(2), "b": 1.5}),
    ],
    ids=["stop_gradient", "out of bounds", "round", "a rule", "a singularity"],
)
def test_the_report_of_the_wrapped_function(f, point):
    plain, wrapped = check(f, point), check(pg.double_where(f), point)
    data = lambda report: [(f.kind, f.severity, f.reason, f.leaves, f.where, f.operation) for f in report.findings]
    assert data(wrapped) == data(plain)
    assert wrapped.verdict == plain.verdict


# --- ties and removable singularities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.where(x == 0, 1.0, jnp.log1p(x) / jnp.where(x == 0, 1.0, x)),
        lambda x: jax.nn.relu(x) - jax.nn.relu(-x),
    ],
    ids=["where", "relu"],
)
def test_a_removable_singularity_is_no_tie(f):
    report = check(f, 0.0)
    assert not report.ok
    assert ("mismatch", "") in found(report, "error")


def test_a_remedy_that_is_finite_and_wrong():
    report = check(lambda x: jnp.where(x == 0, 1.0, jnp.log1p(x) / x), 0.0)
    assert not report.ok
    assert "double_where" not in str(report).replace("neither `double_where`", "")


# --- complex outputs ---------------------------------------------------------------------------------------------------


@jax.custom_vjp
def drops_the_imaginary_part(x):
    return x * (1 + 2j)


drops_the_imaginary_part.defvjp(lambda x: (x * (1 + 2j), None), lambda _, ct: (ct.real,))


def test_a_complex_output_of_a_wrong_rule():
    assert ("mismatch", "") in found(check(drops_the_imaginary_part, np.float32(1.5)), "error")


def test_an_imaginary_output_is_not_zero():
    assert check(lambda p: 1j * p**2, np.float32(1.5)).findings == ()


# --- rules -------------------------------------------------------------------------------------------------------------


def beside_a_loop(x):
    slightly_wrong = rule(lambda x: jnp.sin(x), lambda x: 1.0008 * jnp.cos(x))
    count = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))
    return slightly_wrong(x) + count[1]


def test_a_wrong_rule_beside_a_loop():
    assert ("mismatch", "") in found(check(beside_a_loop, 0.7), "error")


def in_a_product(x):
    u = twice_too_large(x)
    v = another_wrong_one(x)
    return u * v


def in_a_sum(x):
    u = twice_too_large(x)
    v = another_wrong_one(x)
    return u + v


def on_two_lines(x):
    u = twice_too_large(x)
    v = twice_too_large(2 * x)
    return u + v


@pytest.mark.parametrize("f", [in_a_product, in_a_sum, on_two_lines])
def test_every_wrong_rule_is_named_with_its_line(f):
    report = check(f, 0.7)
    text = str(report)
    assert ("mismatch", "") in found(report, "error")
    assert here(f, 1) in text
    assert here(f, 2) in text


called = rule(
    lambda x: jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct((), np.float32), x), lambda x: 3 * jnp.cos(x)
)


def test_inconclusive_is_not_ok():
    headline = str(check(called, np.float32(0.7))).splitlines()[0]
    assert ": ok" not in headline


def test_a_rule_that_returns_nan():
    report = check(rule(lambda x: jnp.sin(x), lambda x: jnp.nan), 1.0)
    assert not report.ok
    assert "true singularity" not in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "verdict"), [(1e-3, "inconclusive"), (1e-4, "ok")])
def test_a_loosely_converged_solver(tolerance, verdict):
    """The derivative of the limit is 1.8 % off where the steps end at 1e-3: less than two right digits."""
    solver = optimistix.FixedPointIteration(tolerance, tolerance)
    f = lambda a: optimistix.fixed_point(lambda y, a: jnp.cos(a * y), solver, jnp.array(0.5), a).value
    report = check(f, 0.8)
    assert [row.verdict for row in report.rows] == [verdict]
    assert report.ok == (verdict == "ok")
    assert "tolerance" in str(report)


# --- what is lost, in bits and elements ----------------------------------------------------------------------------


def stopped_with_bits(p):
    first, second = jax.random.split(jax.random.key(0))
    chance = stop_gradient(jax.random.uniform(second, (20,)) ** p["a"])
    return jnp.where(jax.random.uniform(first, (20,)) < chance, 1.0, 0.0).sum()


def test_a_leaf_stopped_together_with_random_bits():
    assert "['a']" in [leaf for _, leaf in found(check(stopped_with_bits, {"a": 1.3}))]


def test_a_cast_to_float32_in_x64():
    with jax.enable_x64(True):
        report = check(lambda x: (x.astype(jnp.float32) ** 2).astype(jnp.float64), jnp.float64(0.7))
    assert "precision" in [f.kind for f in report.findings]


def test_a_dead_element():
    report = check(lambda x: jnp.sum(x[:2] ** 2), jnp.array([1.0, 2.0, 3.0]))
    assert "zero" in [f.kind for f in report.findings]


# --- it reports, whatever is set -----------------------------------------------------------------------------------


def test_the_line_of_a_value_that_is_not_finite():
    f = lambda p: jnp.where(p > 0, -p, -jnp.inf)
    (finding,) = check(f, -1.0).findings
    assert finding.where == here(f, 0)


def masked_log(x):
    return jnp.where(x > 0, jnp.log(x), 0.0).sum()


def test_under_debug_nans():
    with jax.debug_nans(True):
        report = check(masked_log, jnp.array([0.0, 1.0]))
    assert found(report, "error") == [("nan", "")]


@pytest.mark.parametrize("search", [False, True])
def test_under_disable_jit(search):
    looped = lambda x: jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * x, x)
    with jax.disable_jit():
        assert pg.check(looped, search=search, progress=False)(1.0).ok
        report = pg.check(masked_log, search=search, progress=False)(jnp.array([0.0, 1.0]))
    assert found(report, "error") == [("nan", "")]


def test_under_a_transfer_guard():
    x = jnp.array([0.5, 1.0])
    with jax.transfer_guard("disallow"):
        assert check(lambda x: (x**2).sum(), x).ok


def test_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        report = check(masked_log, jnp.array([0.0, 1.0]))
        assert check(lambda x: (x**2).sum(), jnp.ones((2, 2))).ok
    assert found(report, "error") == [("nan", "")]


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.array(0.0))

    def __call__(self, x, state):
        count = state.get(self.index)
        return x**2 * (1 + count), state.set(self.index, count + 1)


def test_a_state_of_equinox():
    layer, state = eqx.nn.make_with_state(Counter)()
    assert check(lambda x, state: layer(x, state)[0], 1.5, state).ok


def test_a_tracer_in_the_closure():
    with pytest.raises(pg.errors.PartgradError):
        jax.jit(lambda y: check(lambda x: x * y, 2.0).ok)(1.0)


def test_keywords_of_the_function():
    """Either f gets its keyword, or the name is refused."""
    with pytest.raises((AssertionError, TypeError)):
        pg.testing.assert_gradients(lambda x, seed=0: x * jnp.float32(np.nan if seed == 3 else 1.0), 1.0, seed=3)


def test_eighty_columns():
    tree = {"a_rather_long_name_of_a_parameter": {"another_rather_long_name_of_a_group": {"and_the_first_one": 0.7}}}
    report = check(lambda p: sum(map(twice_too_large, jax.tree.leaves(p))), tree)
    assert max(map(len, str(report).splitlines())) <= 80
