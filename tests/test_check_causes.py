"""A gradient with several lines at which it becomes NaN: each line that is a cause is named, and no other."""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import partgrad as pg

F = lambda *values: jnp.array(values, jnp.float32)
X = F(0, 1)


def line(name):
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {name}")]
    return f"test_check_causes.py:{found}"


def entropy(x):
    return jnp.where(x > 0, x * jnp.log(x), 0.0).sum()  # entropy


def root(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()  # root


def square(x):
    return jnp.where(x > 0, x**2 * jnp.log(x), 0.0).sum()  # square


def length(x):
    return jnp.linalg.norm(x * 0.0)  # length


def spread(x):
    return jnp.sqrt(jnp.sum((x - x[::-1][::-1]) ** 2))  # spread


def safe_spread(x):
    return pg.safe.norm(x - x[::-1][::-1])


def pole(x):
    return jnp.arccosh(1.0 + 0.0 * x[0])  # pole


def total(*parts):
    return lambda x: sum(part(x) for part in parts)


def scanned(x, of_all=length):
    step = lambda carry, at: (carry + root(at * jnp.ones(2)), None)
    return lax.scan(step, 0.0, x)[0] + jax.jit(of_all)(x)


def wrapped_inside(x):
    return pg.double_where(entropy)(x) + length(x)


def masked(x):
    """What is stopped is no cause, although its derivative is NaN."""
    return 0.0 * lax.stop_gradient(entropy(x) + root(x)) + length(x)


def blocked(x):
    """NaN that an outer selection takes away is no cause: a double `where`, written by hand around the selection."""
    inside = jnp.where(x > 0, x, 1.0)
    return jnp.where(x > 0, jnp.sqrt(inside) + entropy(inside), 0.0).sum() + length(x) + square(x)


def two_leaves(p):
    return entropy(p["a"]) + length(p["b"]) + length(p["a"]) * root(p["b"])


TAKEN, NOT_TAKEN = "singular", "not taken"
# The function, its point, each line that is a cause with its reason, and the function after the fixes that are stated.
TABLE = {
    "one of each": (
        total(length, entropy),
        X,
        {"length": TAKEN, "entropy": NOT_TAKEN},
        pg.double_where(total(lambda x: pg.safe.norm(x * 0.0), entropy)),
    ),
    "under double_where": (
        pg.double_where(total(length, entropy)),
        X,
        {"length": TAKEN},
        pg.double_where(total(lambda x: pg.safe.norm(x * 0.0), entropy)),
    ),
    "two that are not taken": (
        total(entropy, lambda x: 0.0 * root(x)),
        X,
        {"entropy": NOT_TAKEN, "root": NOT_TAKEN},
        pg.double_where(total(entropy, lambda x: 0.0 * root(x))),
    ),
    "two that are taken": (
        total(length, spread),
        X,
        {"length": TAKEN, "spread": TAKEN},
        total(lambda x: pg.safe.norm(x * 0.0), safe_spread),
    ),
    "four": (
        total(length, spread, entropy, square),
        X,
        {"length": TAKEN, "spread": TAKEN, "entropy": NOT_TAKEN, "square": NOT_TAKEN},
        pg.double_where(total(lambda x: pg.safe.norm(x * 0.0), safe_spread, entropy, square)),
    ),
    "one without a remedy": (total(pole, entropy), X, {"pole": "no remedy", "entropy": "beside"}, None),
    "in a scan and a jit": (
        scanned,
        X,
        {"root": NOT_TAKEN, "length": TAKEN},
        pg.double_where(lambda x: scanned(x, lambda x: pg.safe.norm(x * 0.0))),
    ),
    "double_where inside": (wrapped_inside, X, {"length": TAKEN}, None),
    "stopped": (masked, X, {"length": TAKEN}, None),
    "blocked": (blocked, X, {"length": TAKEN, "square": NOT_TAKEN}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_each_cause_and_no_other(name):
    function, point, causes, fixed = TABLE[name]
    report = pg.check(function, progress=False)(point)
    found = {f.where: f.reason for f in report.findings if f.kind == "nan"}
    assert found == {line(cause): reason for cause, reason in causes.items()}, str(report)
    if fixed:
        # The fixes together are what was tried.
        assert not jnp.isfinite(jax.jit(jax.grad(function))(point)).all()
        assert jnp.isfinite(jax.jit(jax.grad(fixed))(point)).all()
        assert not [f for f in pg.check(fixed, progress=False)(point).findings if f.kind == "nan"]
        tried = [f.fix for f in report.findings if f.kind == "nan" and f.fix]
        # All say the same of the same program.
        assert len({(fix.derivative, fix.slope) for fix in tried}) <= 1


@pytest.mark.slow
def test_leaves_have_their_own_causes():
    report = pg.check(two_leaves, progress=False)({"a": X, "b": X})
    found = {(leaf, f.where): f.reason for f in report.findings if f.kind == "nan" for leaf in f.leaves}
    assert found == {
        ("['a']", line("entropy")): NOT_TAKEN,
        ("['a']", line("length")): TAKEN,
        ("['b']", line("length")): TAKEN,
        ("['b']", line("root")): NOT_TAKEN,
    }, str(report)


@pytest.mark.slow
def test_of_a_fix_the_others_are_said():
    report = pg.check(total(length, entropy), progress=False)(X)
    (taken,) = [f for f in report.findings if f.reason == TAKEN]
    (other,) = [f for f in report.findings if f.reason == NOT_TAKEN]
    assert "write `partgrad.safe.norm` for `norm`, and differentiate `partgrad.double_where(f)`" in taken.message
    assert (
        f"differentiate `partgrad.double_where(f)`, and write `partgrad.safe.norm` at {line('length')}" in other.message
    )
    assert taken.to_dict()["fix"]["beside"] == ["differentiate `partgrad.double_where(f)`"]


# --- forward mode alone ------------------------------------------------------------------------------------------------


def chain(p):
    """Two equal points: the gradient of the others is right, while in forward mode their zero meets an infinity."""
    points = jnp.stack(list(p.values()))
    lengths = jnp.sqrt(jnp.sum((points[1:] - points[:-1]) ** 2, axis=-1))  # chain
    return jnp.sum((lengths - 0.5) ** 2) + points[0, 0]


def beside(p):
    """The root is infinite wherever `bad` is."""
    return jnp.sum(jnp.sqrt(jnp.stack([0 * p["bad"], *(p[name] for name in p if name != "bad")])))  # beside


def stopped(p):
    return jnp.sum(jnp.sqrt(jnp.stack([0 * lax.stop_gradient(p["a"]), p["b"], p["c"]]))) + p["a"]  # stopped


def other(p):
    """What is not finite in forward mode alone, beside a leaf whose gradient is not."""
    return beside(p) + jnp.sum(jnp.sqrt(jnp.stack([jnp.zeros(()), p["b"]])))  # other


def hiding(p):
    """What `a` meets hides what `b` meets later."""
    first = jnp.sum(jnp.sqrt(jnp.stack([jnp.zeros(()), p["a"]])))  # first
    return jnp.sum(jnp.sqrt(jnp.stack([jnp.zeros(()), first, p["b"]])))  # later


S = jnp.float32
POINTS = {"a": F(1, 2), "b": F(0, 1), "c": F(0, 1), "d": F(3, 1)}
NUMBERS = {"a": S(1), "b": S(2), "c": S(3)}
ONE_BAD = {"bad": S(1), "b": S(2), "c": S(3)}
FORWARD = {
    "chain": (chain, POINTS, {"chain": "bc"}, "ad"),
    "beside": (beside, ONE_BAD, {"beside": ["bad"]}, "bc"),
    "stopped": (stopped, NUMBERS, {"stopped": "bc"}, "a"),
    "other": (other, ONE_BAD, {"beside": ["bad"], "other": "b"}, "c"),
    "hiding": (hiding, NUMBERS, {"first": "a", "later": "b"}, ""),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_forward_derivative_that_is_not_finite_where_a_gradient_is_not_is_no_second_finding(name):
    function, point, expected, good = FORWARD[name]
    report = pg.check(function, progress=False)(point)
    found = [finding for finding in report.findings if finding.severity == "error"]
    assert all(finding.kind == "nan" for finding in found)
    paths = lambda leaves: {f"['{leaf}']" for leaf in leaves}
    assert {finding.where: set(finding.leaves) for finding in found} == {
        line(n): paths(ls) for n, ls in expected.items()
    }
    assert len(found) == len(expected)
    verdicts = {row.path: row.verdict for row in report.rows}
    assert all(verdicts[path] == "ok" for path in paths(good))


@jax.custom_vjp
def halved(x):
    return x**2


halved.defvjp(lambda x: (x**2, x), lambda x, cotangent: (x * cotangent,))


@jax.custom_vjp
def ended(x):
    return x**2


ended.defvjp(lambda x: (x**2, None), lambda _, cotangent: (jnp.zeros(3),))

# What makes the gradient of a leaf NaN, and what is wrong with it besides.
NOT_FINITE = {
    "not taken": lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(),
    "singular": lambda x: jnp.linalg.norm(0 * x),
}
BESIDES = {
    "rule": lambda x: halved(x).sum(),
    "rule stop": lambda x: ended(x).sum(),
    "stop": lambda x: jnp.sum(x * lax.stop_gradient(jnp.cos(x))),
}


@pytest.mark.parametrize("reason", BESIDES)
@pytest.mark.parametrize("cause", NOT_FINITE)
def test_what_is_wrong_besides_in_the_same_leaf(cause, reason):
    """A remedy that differences refute for another cause is none for which the branch that is taken is to blame."""
    report = pg.check(lambda x: NOT_FINITE[cause](x) + BESIDES[reason](x), progress=False)(F(-1, 1, 2))
    assert [(f.kind, f.reason) for f in report.findings] == [("nan", cause), ("mismatch", reason)], str(report)


def test_what_is_infinite_in_the_value_is_named_and_not_what_meets_it():
    distances = jnp.array([0.0, 1.2])

    def energy(p):
        ratio = (p["sigma"] / distances) ** 6  # infinite
        pairs = p["epsilon"] * (ratio**2 - ratio)
        return jnp.sum(jnp.where(distances > 0, pairs, 0.0))

    report = pg.check(energy, progress=False)({"sigma": 1.0, "epsilon": 0.7})
    (finding,) = report.findings
    assert finding.leaves == ("['epsilon']", "['sigma']")
    assert "ratio =" in inspect.getsource(sys.modules[__name__]).split("\n")[finding.line - 1]
    assert "first infinity in the value of `/`" in finding.message


def test_a_number_that_is_nan_before_the_function_runs_is_told():
    weights = jnp.array([[0.5, 0.5], [jnp.nan, jnp.nan]])
    report = pg.check(lambda v: jnp.sum(jnp.where(jnp.array([[True], [False]]), weights @ v, 0.0)), progress=False)(
        jnp.ones((2, 3))
    )
    assert "which meets a number that is NaN already" in report.findings[0].message


@pytest.mark.parametrize("rescued", [False, True])
def test_a_mask_is_not_named_for_what_softmax_makes_of_a_row_without_anything_else(rescued):
    """The infinities of a mask are meant: without that row all is finite."""
    mask = jnp.array([[True, False], [False, False]])

    def attention(p):
        scores = p["q"] @ p["k"].T + jnp.where(mask, 0.0, -jnp.inf)
        weights = jax.nn.softmax(scores, -1)
        weights = jnp.where(mask.any(-1, keepdims=True), weights, 0.0) if rescued else weights
        return jnp.sum((weights @ p["v"]) ** 2)

    leaves = {name: jax.random.normal(jax.random.key(seed), (2, 2)) for seed, name in enumerate("qkv")}
    finding, *_ = pg.check(attention, progress=False)(leaves).findings
    assert (finding.kind, finding.operation) == ("nan", "softmax")
