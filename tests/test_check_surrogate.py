"""check and surrogates: a right one is a note, a wrong one an error, and one is offered where nothing else is learned."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import partgrad as pg
from helpers.tables import in_turn, table

pytestmark = pytest.mark.slow


MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def step(x, at=0.0):
    return jnp.where(x > at, 1.0, 0.0)


def soft(x, at=0.0):
    return jax.nn.sigmoid((x - at) / 0.05)


@jax.custom_jvp
def half(x):
    return x * x


@half.defjvp
def _(primals, tangents):
    return half(*primals), primals[0] * tangents[0]


@jax.custom_vjp
def doubled(x):
    return x * x


doubled.defvjp(lambda x: (x * x, x), lambda x, g: (4 * x * g,))

RIGHT = {
    "step": pg.surrogate(step, soft),
    "straight through": pg.surrogate(lambda x, at: jnp.round((x - at) * 8) / 8, smooth=lambda x, at: x - at),
    "of another size": pg.surrogate(lambda x, at: 30.0 * step(x, at), smooth=lambda x, at: 1e-3 * soft(x, at)),
    "right rule inside": pg.surrogate(step, smooth=lambda x, at: pg.safe.sqrt(soft(x, at))),
    "outside JAX": pg.surrogate(
        lambda x, at: jax.pure_callback(
            lambda x, at: (np.asarray(x) > np.asarray(at)).astype(np.float32),
            jax.ShapeDtypeStruct(jnp.broadcast_shapes(jnp.shape(x), jnp.shape(at)), jnp.float32),
            *(x, at),
            vmap_method="sequential",
        ),
        smooth=soft,
    ),
}
WRONG = {
    "rule": (pg.surrogate(step, smooth=lambda x, at: soft(half(x), at)), "rule"),
    "backward rule": (pg.surrogate(step, smooth=lambda x, at: soft(doubled(x), at)), "rule"),
    "removable": (
        pg.surrogate(step, smooth=lambda x, at: jnp.where(x == 0.82, 0.0, (x - 0.82)) + at),
        "removable",
    ),
    "NaN": (pg.surrogate(step, smooth=lambda x, at: jnp.sqrt(0.0 * (x - at))), "singular"),
}
USES = {
    "plain": lambda gate: lambda p: jnp.sum(gate(p["x"], p["at"]) * p["k"]),
    "not linear": lambda gate: (
        lambda p: jnp.sum(jnp.exp(gate(p["x"], p["at"])) * jnp.sin(p["k"] * gate(p["x"], p["at"])))
    ),
    "loop": lambda gate: (
        lambda p: lax.scan(lambda c, x: (0.5 * c + gate(x + 0.1 * c, p["at"]) * p["k"], c), 0.0, p["x"])[1].sum()
    ),
    "vmap in jit": lambda gate: jax.jit(lambda p: jnp.sum(jax.vmap(gate, (0, None))(p["x"], p["at"]) ** 2) * p["k"]),
    "double_where": lambda gate: pg.double_where(
        lambda p: jnp.sum(jnp.where(p["x"] > 0.75, jnp.log(gate(p["x"], p["at"]) + 2.0), 0.0)) * p["k"]
    ),
    "checkpoint": lambda gate: jax.checkpoint(lambda p: jnp.sum(gate(p["x"], p["at"])) * p["k"]),
    "shard_map": lambda gate: (
        lambda p: (
            jax.shard_map(
                lambda x, at: gate(x, at) * x,
                mesh=MESH,
                in_specs=(PartitionSpec("i"), PartitionSpec()),
                out_specs=PartitionSpec("i"),
            )(p["x"], p["at"]).sum()
            * p["k"]
        )
    ),
    "compared": lambda gate: (
        lambda p: (
            jnp.sum(jnp.where(gate(p["x"], p["at"]) == 1.0, p["k"], p["at"] ** 2))
            * (gate(p["x"], p["at"]).sum() + p["k"])
        )
    ),
}
POINT = {"x": np.array([0.7, 0.82, 0.95], np.float32), "at": np.float32(0.8), "k": np.float32(2.0)}


# Each in two ways, and one in all.
PAIRS = [(gate, use) for gate in RIGHT for use in USES if gate == "step" or use in ("not linear", "loop")]


@pytest.mark.parametrize(("gate", "use"), PAIRS)
def test_a_right_one_is_a_note(gate, use):
    report = pg.check(USES[use](RIGHT[gate]), progress=False)(POINT)
    assert report.ok, report
    assert {f.severity for f in report.findings} <= {"info", "warning"}
    notes = [f for f in report.findings if f.kind == "surrogate"]
    if use == "shard_map":
        # What runs there is asked nothing.
        return
    assert notes, report
    assert all((f.severity, f.reason) == ("info", "declared") for f in notes)
    assert {leaf for f in notes for leaf in f.leaves} >= {"['x']", "['at']"}
    assert not [f for f in report.findings if f.severity == "warning" and f.kind != "zero"], report


@table("name, use", in_turn(WRONG, ["not linear", "loop"]))
def test_a_wrong_one_is_an_error(name, use):
    gate, reason = WRONG[name]
    report = pg.check(USES[use](gate), progress=False)(POINT)
    assert report.verdict == "error"
    assert {row.path: row.verdict for row in report.rows}["['x']"] == "error", report
    errors = [f for f in report.findings if f.severity == "error"]
    assert reason in {f.reason for f in errors}, report
    assert "test_check_surrogate.py" in {f.where.partition(":")[0] for f in errors}


@pytest.mark.parametrize("gate", [gate for gate, _ in WRONG.values()], ids=WRONG)
def test_a_wrong_one_inside_a_shard_map_is_an_error(gate):
    report = pg.check(USES["shard_map"](gate), progress=False)(POINT)
    assert {row.path: row.verdict for row in report.rows}["['x']"] == "error", report


def test_the_note_has_the_largest_distance_of_the_two_values():
    report = pg.check(USES["plain"](RIGHT["step"]), progress=False)(POINT)
    (note,) = [f for f in report.findings if f.kind == "surrogate"]
    expected = np.max(np.abs(step(POINT["x"], 0.8) - np.asarray(soft(POINT["x"], 0.8))))
    np.testing.assert_allclose(note.details["error"], expected, rtol=1e-5)
    assert "`step` at test_check_surrogate.py:" in note.message
    assert "that of `soft`, as declared at test_check_surrogate.py:" in note.message
    assert note.to_dict()["severity"] == "info"


def test_in_a_loop_the_distance_is_that_of_all_steps():
    gate = RIGHT["step"]
    f = lambda x: lax.scan(lambda c, t: (c + gate(x * t, 0.8), None), 0.0, jnp.array([0.1, 1.0, 0.9]))[0]
    (note,) = pg.check(f, progress=False)(jnp.float32(0.85)).findings
    expected = max(abs(float(step(0.85 * t, 0.8)) - float(soft(0.85 * t, 0.8))) for t in (0.1, 1.0, 0.9))
    np.testing.assert_allclose(note.details["error"], expected, rtol=1e-4)


def test_a_stop_in_the_smooth_function_is_a_stop():
    gate = pg.surrogate(step, smooth=lambda x, at: soft(x, at) * lax.stop_gradient(x))
    report = pg.check(lambda x: gate(x, 0.8), progress=False)(0.82)
    assert report.verdict == "stopped"
    assert {f.kind: f.reason for f in report.findings} == {"mismatch": "stop", "surrogate": "undecided"}


def test_only_the_exact_function_depends_on_a_leaf():
    closed = lambda p: pg.surrogate(lambda x: step(x, p["at"]), smooth=soft)(p["x"])
    given = lambda p: pg.surrogate(step, smooth=lambda x, at: soft(x))(p["x"], p["at"])
    for f in (closed, given):
        (zero,) = [f for f in pg.check(f, progress=False)({"x": 0.1, "at": 0.2}).findings if f.kind == "zero"]
        assert (zero.reason, zero.severity, zero.leaves) == ("surrogate", "warning", ("['at']",))
        assert "its smooth function, whose derivative counts, does not" in zero.message


def test_a_search_goes_into_the_smooth_function():
    gate = pg.surrogate(step, smooth=lambda x, at: 1 / (1 + jnp.exp(-20 * (x - at))))
    f = lambda x: gate(x, 0.0) * x
    assert pg.check(f, progress=False)(-0.3).ok
    report = pg.check(f, search=True, progress=False)(-0.3)
    (error,) = [f for f in report.findings if f.severity == "error"]
    assert (error.kind, report.verdict) == ("nan", "error")
    assert jnp.isnan(jax.grad(f)(error.details["moved"][""][1]))


def test_at_a_jump_of_the_exact_function_a_nan_of_the_smooth_one_is_no_infinite_slope():
    gate = pg.surrogate(step, smooth=lambda x, at: jnp.sqrt((x - at) ** 2 + 0.0) / 2)
    report = pg.check(lambda x: gate(x, 0.5), search=True, progress=False)(0.7)
    assert report.verdict == "error", report


def test_a_smooth_function_without_a_value_cannot_be_compared():
    gate = pg.surrogate(step, smooth=lambda x, at: jnp.where(x > at, jnp.inf, x))
    report = pg.check(lambda x: gate(x, 0.8), progress=False)(0.9)
    assert report.verdict == "error", report
    assert ("surrogate", "not finite") in {(f.kind, f.reason) for f in report.findings}


# --- a surrogate as a fix ---------------------------------------------------------------------------------------------

X = {"x": jnp.array([0.3, 1.7, 2.2]), "at": 1.0, "y": jnp.array([1.0, 2.0, 3.0])}


def function_of(line):
    """A line of code as a function of `p`; braces stand for parentheses."""
    code = re.sub(r"\bp\.(\w+)", r"p['\1']", line.replace("{", "(").replace("}", ")"))
    return eval(f"lambda p: {code}", {"partgrad": pg, "jnp": jnp, "lax": lax})


def rewritten(finding, line):
    """A line of code with the fix in it, followed literally."""
    fix, code = finding.fix, line
    if fix.by.endswith("(x, y)"):
        sign = next(sign for sign in (">=", "<=", ">", "<") if f"x {sign} y" in fix.replaces)
        one, _, other = code.partition(f" {sign} ")
        head, one = one.rsplit("{", 1)
        other, tail = other.split("}", 1)
        code = f"{head}{fix.by.removesuffix('(x, y)')}({one}, {other}){tail}"
    else:
        code = code.replace(f"jnp.{fix.replaces}", fix.by)
    if any("jnp.where(c, a, b)" in other for other in fix.beside):
        code = code.replace("jnp.where(", "(lambda c, a, b: b + (a - b) * c)(")
    if any("c & d" in other for other in fix.beside):
        code = code.replace("&", "*")
    if any("cast to integers" in other for other in fix.beside):
        code = code.replace(".astype(int)", "")
    return function_of(code)


MENDED = {
    "where": "jnp.sum(jnp.where({p.x > p.at}, p.y, 0.5))",
    "count": "jnp.sum({p.x >= p.at}) * 1.0",
    "mean": "jnp.mean({p.x < p.at})",
    "cast": "jnp.sum({p.x <= p.at}.astype(jnp.float32) * p.y)",
    "integers": "jnp.sum({p.x > p.at}.astype(int)) * 2.0",
    "both": "jnp.sum(jnp.where({p.x > p.at} & (p.x < 1.8), p.y, 0.0))",
    "round": "jnp.sum(jnp.round(p.x * 8) / 8 * p.y)",
    "floor": "jnp.sum(jnp.floor(p.x) * p.y)",
    "ceil": "jnp.sum(jnp.ceil(p.x) * p.y)",
    "sign": "jnp.sum(jnp.sign(p.x) * p.y)",
    "in a loop": "lax.scan(lambda c, x: (c + jnp.where({x > p.at}, 1.0, 0.0), None), 0.0, p.x)[0]",
}


@pytest.mark.parametrize("name", MENDED)
def test_the_fix_for_what_is_only_compared_or_rounded(name):
    line = MENDED[name]
    point = {leaf: X[leaf] for leaf in X if f"p.{leaf}" in line}
    report = pg.check(function_of(line), progress=False)(point)
    zero = next(f for f in report.findings if f.kind == "zero" and f.severity == "warning")
    assert zero.reason in ("compared", "rounded")
    assert zero.fix is not None, report
    assert "partgrad.surrogate(" in zero.message
    assert "tried: along a random direction" in zero.message
    if name == "in a loop":
        return
    # Followed literally, it leaves nothing to warn of, and the value is the same.
    mended = rewritten(zero, line)
    np.testing.assert_array_equal(mended(point), function_of(line)(point))
    after = pg.check(mended, progress=False)(point)
    others = [f for f in after.findings if f.severity == "warning" and set(f.leaves) & set(zero.leaves)]
    assert not [f for f in others if f.where == zero.where and f.operation == zero.operation], after
    gradient = jax.grad(mended)(point)
    assert all(np.any(gradient[leaf.strip("[]'")] != 0) for leaf in zero.leaves)
    jax.tree.map(lambda g: np.testing.assert_array_equal(np.isfinite(g), True), gradient)


UNMENDED = {
    "argmax": lambda p: p["y"][jnp.argmax(p["x"])],
    "cond": lambda p: lax.cond(p["at"] > 0.5, jnp.sum, lambda y: 0.0, p["y"]),
    "digitize": lambda p: jnp.sum(jnp.digitize(p["x"], jnp.array([0.0, 1.0, 2.0])) * p["y"]),
    "index": lambda p: p["y"][p["x"].astype(int)].sum(),
    "isnan": lambda p: jnp.where(jnp.isfinite(p["x"]), p["y"], 0.0).sum(),
    "no change": lambda p: jnp.sum(jnp.where(p["x"] > p["at"], 1.0, 1.0)) * p["y"].sum(),
}


@pytest.mark.parametrize("f", UNMENDED.values(), ids=UNMENDED)
def test_where_none_is_known_it_stays_a_suggestion(f):
    for zero in pg.check(f, progress=False)(X).findings:
        assert zero.fix is None
        assert "partgrad.surrogate" not in zero.message


# --- what is meant so -------------------------------------------------------------------------------------------------


def by_jvp(exact, smooth):
    @jax.custom_jvp
    def ruled(*args):
        return exact(*args)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), jax.jvp(smooth, primals, tangents)[1]))
    return ruled


def by_vjp(exact, smooth):
    @jax.custom_vjp
    def ruled(*args):
        return exact(*args)

    ruled.defvjp(lambda *args: (exact(*args), args), lambda args, g: jax.vjp(smooth, *args)[1](g))
    return ruled


@table("make, use", in_turn([by_jvp, by_vjp], ["plain", "loop"]))
def test_a_rule_that_is_intended_does_not_excuse_a_wrong_rule_that_it_uses(make, use):
    right, wrong = make(step, soft), make(step, lambda x, at: soft(half(x), at))
    report = pg.check(USES[use](right), intended=right, progress=False)(POINT)
    assert report.ok, report
    assert "Declared by `partgrad.surrogate(exact, smooth=...)`" in report.findings[0].message
    report = pg.check(USES[use](wrong), intended=wrong, progress=False)(POINT)
    assert report.verdict == "error", report
    (error,) = [f for f in report.findings if f.severity == "error"]
    assert error.rule.name.endswith("test_check_surrogate.half")
    assert error.reason == "rule within"


# --- the operators of SoftJAX -----------------------------------------------------------------------------------------


def straight_through(hard, soft):
    """As libraries do it, by `stop_gradient`: off by rounding, and NaN where the two are infinite."""
    return lambda x: lax.stop_gradient(hard(x) - soft(x)) + soft(x)


OPERATORS = {
    "heaviside": (lambda x: jnp.heaviside(x, 0.5), lambda x: jax.nn.sigmoid(x / 0.1)),
    "sign": (jnp.sign, lambda x: jnp.tanh(x / 0.1)),
    "relu": (jax.nn.relu, lambda x: 0.1 * jax.nn.softplus(x / 0.1)),
    "clip": (lambda x: jnp.clip(x, -1, 1), lambda x: jnp.tanh(x)),
    "round": (jnp.round, lambda x: x - jnp.sin(2 * jnp.pi * x) / (2 * jnp.pi)),
    "max": (lambda x: jnp.max(x), lambda x: jax.nn.logsumexp(x / 0.1) * 0.1),
    "argmax": (lambda x: jax.nn.one_hot(jnp.argmax(x), x.size), lambda x: jax.nn.softmax(x / 0.1)),
    "sort": (jnp.sort, lambda x: jnp.sort(x) + 0.1 * (x - x.mean())),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_straight_through_operators(name):
    hard, smooth = OPERATORS[name]
    x = np.array([0.3, -1.2, 0.45], np.float32)
    gate, weights = pg.surrogate(hard, smooth), np.array([1.0, -2.0, 0.5], np.float32)
    loss = lambda f: lambda x: jnp.sum(f(x) * (weights if np.shape(f(x)) else 1.0))
    np.testing.assert_allclose(
        jax.grad(loss(gate))(x), jax.grad(loss(straight_through(hard, smooth)))(x), rtol=1e-5, atol=1e-7
    )
    assert pg.check(loss(gate), progress=False)(x).ok


@pytest.mark.parametrize("name", ["relu", "argmax"])
def test_a_wrong_operator_of_many_elements_is_an_error(name):
    hard, smooth = OPERATORS[name]
    x = np.array([0.3, -1.2, 0.45], np.float32)
    loss = lambda f: lambda x: jnp.sum(f(x) * np.array([1.0, -2.0, 0.5], np.float32))
    planted = pg.surrogate(hard, lambda x: smooth(x) + half(x).sum())
    assert pg.check(loss(planted), progress=False)(x).verdict == "error"
    nan = pg.surrogate(hard, lambda x: smooth(x) + jnp.sqrt(x - x).sum())
    assert pg.check(loss(nan), progress=False)(x).verdict == "error"
