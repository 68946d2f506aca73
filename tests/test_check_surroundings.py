"""Each fault in each surrounding: found, in the right leaf, at the right line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest
from equinox.internal import while_loop
from jax import lax

import partgrad as pg
from helpers import tables


def ruled(function, slope):
    """A function with a forward rule."""
    rule = jax.custom_jvp(function)
    rule.defjvp(lambda primals, tangents: (function(*primals), slope(*primals) * tangents[0]))
    return rule


wrong_sine = ruled(jnp.sin, lambda x: 1.5 * jnp.cos(x))
nan_square = ruled(jnp.square, lambda x: x * jnp.nan)
wrong_twice = jax.custom_vjp(lambda x: 2 * x)
wrong_twice.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))


def wrong_rule(a, b):
    return wrong_sine(a) * b  # fault: wrong_rule


def wrong_reverse_rule(a, b):
    return wrong_twice(a) * b  # fault: wrong_reverse_rule


def nan_rule(a, b):
    return nan_square(a) * b  # fault: nan_rule


def stopped(a, b):
    return lax.stop_gradient(jnp.tanh(a)) * b  # fault: stopped


def partly_stopped(a, b):
    return lax.stop_gradient(a) * a * b  # fault: partly_stopped


def rounded(a, b):
    return jnp.round(3 * a) * b  # fault: rounded


def singular(a, b):
    return jnp.sqrt(a - a) + b * b  # fault: singular


def out_of_bounds(a, b):
    return jnp.stack([a, b * b])[jnp.int32(5) + jnp.int32(0 * a)]  # fault: out_of_bounds


def equal(a, b):
    return jnp.maximum(a, 0.7) * b  # fault: equal


# By function: kind, severity and leaf of the finding.
FAULTS = {
    wrong_rule: ("mismatch", "error", "['a']"),
    wrong_reverse_rule: ("mismatch", "error", "['a']"),
    nan_rule: ("nan", "error", "['a']"),
    stopped: ("zero", "warning", "['a']"),
    partly_stopped: ("mismatch", "warning", "['a']"),
    rounded: ("zero", "warning", "['a']"),
    singular: ("nan", "error", "['a']"),
    out_of_bounds: ("oob", "warning", "['b']"),
    equal: ("tie", "warning", "['a']"),
}


def plain(f):
    return f


def double_where(f):
    return pg.double_where(f)


def scan(f):
    return lambda a, b: lax.scan(lambda c, _: (c + f(a, b), None), jnp.zeros_like(a), None, length=2)[0]


def cond(f):
    return lambda a, b: lax.cond(b > 0, f, lambda a, b: a, a, b)


def checkpoint(f):
    return jax.checkpoint(f)


def vmap(f):
    return lambda a, b: jax.vmap(f)(jnp.stack([a, a]), jnp.stack([b, 2 * b])).sum()


def jit(f):
    return jax.jit(f)


def double_where_of_scan(f):
    return pg.double_where(scan(f))


def scan_of_double_where(f):
    return scan(pg.double_where(f))


def complex_output(f):
    return lambda a, b: f(a, b) * (1 + 2j)


def complex_leaf(f):
    return lambda a, b: f(a.real, b)


def root_of_a_library(f):
    """The root of `x = f`, by the rule of a library for implicit functions."""
    root = lambda x, both: x - f(*both)
    return lambda a, b: optimistix.root_find(root, optimistix.Newton(1e-8, 1e-8), jnp.zeros_like(a), (a, b)).value


def loop_of_a_library(f):
    """Two steps by the rule for loops with which equinox and diffrax differentiate backwards, from checkpoints."""

    def final(a, b):
        step = lambda state: (state[0] + 1, state[1] + f(a, b))
        start = jnp.int32(0), jnp.zeros_like(a)
        return while_loop(lambda state: state[0] < 2, step, start, max_steps=2, kind="checkpointed")[1]

    return final


SURROUNDINGS = [plain, double_where, scan, cond, checkpoint, vmap, jit, double_where_of_scan, scan_of_double_where]
SURROUNDINGS += [complex_output, complex_leaf, root_of_a_library, loop_of_a_library]
# What the solvers of libraries refuse or iterate away is left out, and so is what takes many seconds.
OF_LIBRARIES = {
    root_of_a_library: [wrong_rule, stopped, partly_stopped, rounded],
    loop_of_a_library: [singular, wrong_rule],
}
CASES = [(fault, surrounding) for surrounding in SURROUNDINGS for fault in OF_LIBRARIES.get(surrounding, FAULTS)]


def in_turn():
    """Two faults in each surrounding, by which every fault is in several."""
    for number, surrounding in enumerate(SURROUNDINGS):
        faults = [fault for fault, where in CASES if where is surrounding]
        yield from ((faults[(2 * number + other) % len(faults)], surrounding) for other in (0, 1))


@functools.cache
def line_of(fault):
    with open(__file__) as source:
        lines = source.read().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # fault: {fault.__name__}")]
    return f"test_check_surroundings.py:{number}"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "surrounding"), CASES if tables.whole else list(in_turn()), ids=lambda f: f.__name__)
def test_it_is_found_where_it_is(fault, surrounding):
    function = surrounding(fault)
    with jax.enable_x64(CASES.index((fault, surrounding)) % 2 == 1):
        point = {"a": jnp.asarray(0.7 + (0.2j if surrounding is complex_leaf else 0)), "b": jnp.asarray(1.3)}
        report = pg.check(lambda p: function(p["a"], p["b"]), progress=False)(point)
    kind, severity, leaf = FAULTS[fault]
    found = {(f.kind, f.severity, path, f.where) for f in report.findings for path in f.leaves}
    assert (kind, severity, leaf, line_of(fault)) in found, str(report)
    assert report.ok == (severity != "error" and fault not in (stopped, partly_stopped))
    others = {path for f in report.findings if f.severity == "error" for path in f.leaves} - {leaf}
    assert not others, str(report)


# --- remedies --------------------------------------------------------------------------------------------------------


def masked(p):
    return jnp.where(p["a"] > 1, jnp.sqrt(p["a"] - 1), 0.0) * p["b"]


def norm(p):
    return jnp.sqrt(jnp.sum(p["a"] ** 2)) + p["b"]


def safe_norm(p):
    return pg.safe.norm(p["a"]) + p["b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "point", "word", "remedied"),
    [
        (masked, {"a": 0.7, "b": 1.3}, "partgrad.double_where(f)", pg.double_where(masked)),
        (norm, {"a": np.zeros(2, np.float32), "b": 1.3}, "partgrad.safe.norm", safe_norm),
    ],
    ids=["double_where", "safe"],
)
def test_the_remedy_makes_the_report_clean(f, point, word, remedied):
    assert word in str(pg.check(f, progress=False)(point))
    assert pg.check(remedied, progress=False)(point).ok


# --- options ---------------------------------------------------------------------------------------------------------


def sine(x, y):
    return wrong_sine(x) * y


@pytest.mark.slow
def test_arguments_by_position_and_name():
    report = pg.check(sine, argnums=(0, 1), progress=False)(0.7, 1.3)
    assert [row.path for row in report.rows] == ["args[0]", "args[1]"]
    assert [f.leaves for f in report.findings] == [("args[0]",)]
    assert pg.check(sine, argnames="y", progress=False)(0.7, y=1.3).ok


def test_an_auxiliary_output_is_not_looked_at():
    f = lambda x: (x**2, jnp.log(-x))
    assert pg.check(f, has_aux=True, progress=False)(0.7).findings == ()
    assert not pg.check(f, progress=False)(0.7).ok


def test_forward_mode_alone_needs_no_gradient():
    loop = lambda x: lax.while_loop(lambda c: c < 20, lambda c: c * x, x)
    assert not pg.check(loop, progress=False)(1.7).ok
    report = pg.check(loop, forward=True, progress=False)(1.7)
    assert report.ok
    assert report.rows[0].status == "checked"


@pytest.mark.slow
@pytest.mark.parametrize("what", [wrong_sine, sine, "args[0]"], ids=["rule", "function", "leaf"])
def test_what_is_intended_is_a_note(what):
    report = pg.check(sine, argnums=(0, 1), intended=[what], progress=False)(0.7, 1.3)
    assert report.ok
    assert [f.severity for f in report.findings] == ["info"]


@pytest.mark.parametrize("x", [1.0, np.ones(2), {"a": 1.0}])
def test_a_point_in_the_place_of_a_selector_is_answered(x):
    with pytest.raises(pg.errors.ArgumentError, match=r"check\(f\)\(x\)"):
        pg.check(sine, x)


def test_what_is_intended_and_not_found_is_told():
    report = pg.check(sine, intended=["args[1]", wrong_sine, wrong_twice], argnums=(0, 1), progress=False)(0.7, 1.3)
    assert report.ok
    stale = [f for f in report.findings if f.kind == "intended"]
    assert [f.severity for f in stale] == ["warning", "warning"]
    assert stale[0].details["entry"] == "args[1]"
    assert "1 note" in str(report)


@pytest.mark.slow
def test_one_thing_that_is_intended_needs_no_list():
    report = pg.check(lambda p: sine(p["x"], p["y"]), intended="['x']", progress=False)({"x": 0.7, "y": 1.3})
    assert {f.severity for f in report.findings} == {"info"}
    pg.testing.assert_gradients(sine, 0.7, 1.3, intended=sine, argnums=(0, 1))


def test_a_callback_without_a_rule_is_named():
    def f(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)  # fault: f

    (finding,) = pg.check(f, progress=False)(jnp.asarray(0.7)).findings
    assert finding.where == line_of(f)
    assert finding.operation == "pure_callback"


@pytest.mark.slow
def test_numpy_is_told_from_a_branch():
    (finding,) = pg.check(lambda x: x * np.sin(np.asarray(x)), progress=False)(0.7).findings
    assert finding.reason == "numpy"
