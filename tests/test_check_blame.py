"""What a finding says where it is easily said of something else: the line, the operation, the leaf."""

import inspect
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg
from helpers.tables import table
from partgrad._check.draws import draws
from partgrad._check.program import Program

S = jnp.float32
F = lambda *values: jnp.array(values, jnp.float32)


def findings(function, *args):
    report = pg.check(function, progress=False)(*args)
    return {(f.kind, f.severity, leaf): f for f in report.findings for leaf in f.leaves or ("",)}


def line(name):
    """The line of this file that ends in a fault's name."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # fault: {name}")]
    return f"test_check_blame.py:{found}"


@eqx.filter_jit
def depth(x, is_used):
    if is_used:
        return jnp.sqrt(x)  # fault: wrapped
    return x


@pytest.mark.slow
def test_the_line_inside_a_function_that_a_library_compiles():
    loss = lambda p: depth(p["x"], True) + p["y"] ** 2
    point = {"x": S(0.0), "y": S(2.0)}
    # Called from here, it is traced with this line.
    jax.grad(loss)(point)
    (finding,) = pg.check(loss, progress=False)(point).findings
    assert (finding.leaves, finding.where) == (("['x']",), line("wrapped"))


@pytest.mark.slow
def test_of_several_that_stop_a_leaf_the_last_is_named():
    def argmax_of_softmax(p):
        chosen = jnp.argmax(jax.nn.softmax(p["logits"]))  # fault: last
        return p["values"][chosen] ** 2

    found = findings(argmax_of_softmax, {"logits": F(0.1, 0.5, 0.2), "values": F(1, 2, 3)})
    finding = found["zero", "warning", "['logits']"]
    assert finding.operation == "argmax"
    assert finding.where == line("last")


def test_indices_of_a_sort_stop_a_leaf():
    def sorted_by(p):
        order = jnp.argsort(p["scores"])  # fault: order
        return jnp.sum(p["values"][order] * F(3, 1, 2))

    found = findings(sorted_by, {"scores": F(0.1, 0.5, 0.2), "values": F(1, 2, 3)})
    assert found["zero", "warning", "['scores']"].where == line("order")


@pytest.mark.slow
def test_what_makes_one_factor_zero_is_not_blamed_for_the_other():
    def dead(p):
        hidden = jnp.maximum(p["inner"] - 50, 0)  # fault: dead
        return jnp.sum(p["outer"] @ hidden)

    found = findings(dead, {"inner": F(1, 2), "outer": jnp.ones((2, 2), jnp.float32)})
    assert found["zero", "warning", "['inner']"].where == line("dead")
    assert found["zero", "info", "['outer']"].operation == "@"


@pytest.mark.parametrize(
    ("draw", "severity", "reason"),
    [
        (lambda key, a: jax.random.lognormal(key, a), "info", "pathwise"),
        (lambda key, a: jax.random.triangular(key, 0.0, a, 5.0), "info", "pathwise"),
        (lambda key, a: jax.random.choice(key, a * F(1, 2, 3)), "info", "pathwise"),
        (lambda key, a: jax.random.binomial(key, 5, a), "warning", "discrete"),
        (lambda key, a: jax.random.multinomial(key, 5, jnp.stack([a, 1 - a])), "warning", "discrete"),
    ],
    ids=["lognormal", "triangular", "choice", "binomial", "multinomial"],
)
def test_a_sampler_that_jax_does_not_compile(draw, severity, reason, request):
    key = jax.random.key(0)
    # Without a derivative, which takes long to compile for some of these.
    function = lambda leaves: jnp.sum(draw(key, leaves[0])) * leaves[1]
    (finding,) = draws(Program(function, [S(0.4), S(2.0)], ["a", "b"], forward=True))
    assert (finding.severity, finding.reason, finding.leaves) == (severity, reason, ("a",))
    assert finding.operation == request.node.callspec.id
    assert finding.where.startswith("test_check_blame.py")


@pytest.mark.slow
@pytest.mark.parametrize(("is_used", "kind"), [(False, "zero"), (True, "mismatch")])
def test_a_draw_that_the_user_fixed_is_no_warning(is_used, kind):
    """It is what the warning about a silently zero draw recommends."""
    normal = lambda key, scale: scale * jax.random.normal(key)
    f = lambda x: pg.draw(normal, jax.random.key(0), x, gradient="fixed") * (x if is_used else 1.0)  # fault: fixed
    report = pg.check(f, progress=False)(2.0)
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.where) == (kind, "info", line("fixed"))
    assert finding.reason == "fixed draw"
    assert report.ok


@pytest.mark.slow
def test_a_draw_by_hand_from_cumulated_probabilities():
    def chosen(p, key):
        cumulated = jnp.cumsum(jax.nn.softmax(p["logits"]))
        return p["values"][jnp.searchsorted(cumulated, jax.random.uniform(key))]

    found = findings(chosen, {"logits": F(0.1, 0.2, 0.3), "values": F(1, 2, 3)}, jax.random.key(0))
    assert ("draw", "warning", "['logits']") in found
    assert ("zero", "warning", "['logits']") not in found


@pytest.mark.slow
def test_every_kind_of_tie():
    def tied(p):
        ordered = (jnp.sort(p["sort"]) * F(1, 2)).sum()
        kinked = (p["floor"] - 2.0) * jnp.floor(p["floor"])
        return jnp.max(p["max"]) + jnp.clip(p["clip"], 0.0, 1.0).sum() + ordered + kinked

    found = findings(tied, {"max": F(1, 1), "clip": F(0, 0.5), "sort": F(2, 2), "floor": S(2.0)})
    assert set(found) == {("tie", "warning", f"['{leaf}']") for leaf in ("max", "clip", "sort", "floor")}
    assert found["tie", "warning", "['floor']"].operation == "floor"


@pytest.mark.slow
def test_every_reason_for_a_zero():
    def constant(p):
        counted = p["cast"].astype(int) + (p["compared"] > 0.0).sum() + 0.0 * p["factor"]
        taken = jax.lax.cond(p["x"] > 0, lambda v: 1.0, lambda v: v, p["branch"])
        stepped = jax.lax.cond(p["x"] > 0, lambda v: 1.0, jnp.floor, p["stepped"])
        return p["x"] ** 2 + counted + taken + stepped

    point = {"x": 2.0, "cast": S(1.5), "compared": F(1, 2), "factor": 3.0, "branch": 1.0, "stepped": 2.5}
    reasons = {leaf: (severity, f.reason, f.operation) for (_, severity, leaf), f in findings(constant, point).items()}
    assert reasons == {
        "['cast']": ("warning", "cast", "astype"),
        "['compared']": ("warning", "compared", ">"),
        "['factor']": ("info", "truly zero", "*"),
        "['branch']": ("warning", "not chosen", "cond"),
        "['stepped']": ("warning", "rounded", "floor"),
    }


def test_an_index_out_of_bounds_of_what_no_derivative_goes_through():
    found = findings(lambda x: x * jnp.arange(3)[jnp.array(7)], 2.0)
    assert found["oob", "warning", ""].reason == "value only"


def test_a_function_that_asks_whether_it_is_traced():
    found = findings(lambda x: x**2 if isinstance(x, jax.core.Tracer) else x**2 + 1.0, 2.0)
    assert found["value", "error", ""].reason == "python"


@pytest.mark.slow
def test_digits_that_cancel():
    found = findings(lambda x: (1.0 - jnp.cos(x)) / x**2, 1e-3)
    assert set(found) == {("precision", "error", "")}
    assert found["precision", "error", ""].where.startswith("test_check_blame.py")


@pytest.mark.slow
def test_the_safe_function_to_call_is_that_of_what_is_written():
    infinite = lambda p: jnp.log(jnp.sum(jnp.exp(p["lse"]))) + jnp.sqrt(jnp.sum(jnp.sin(p["sum"])))
    found = findings(infinite, {"lse": jnp.full(3, -jnp.inf), "sum": F(0, 0)})
    remedies = {leaf: f.fix.by if f.fix else f.details["by"] for (_, _, leaf), f in found.items() if "by" in f.details}
    assert remedies == {"['lse']": "partgrad.safe.logsumexp", "['sum']": "partgrad.safe.sqrt"}


@pytest.mark.slow
def test_a_clipped_minimum_is_an_error_where_its_derivative_disagrees():
    clipped = lambda p: jnp.sum(p["t"].at[jnp.array([5, 1])].min(p["v"], mode="clip"))
    point = {"t": F(1, 2, 3), "v": F(1.5, 1)}
    # So it does in some versions of JAX.
    is_wrong = not np.array_equal(jax.grad(clipped)(point)["v"], [1, 1])
    assert (("oob", "error", "['v']") in findings(clipped, point)) == is_wrong
    # Nor is it blamed for a read that disagrees.
    both = lambda p: clipped(p) + p["v"].at[jnp.array([9])].get(mode="promise_in_bounds")[0]
    found = pg.check(both, progress=False)(point).findings
    assert [(f.kind, f.severity) for f in found if "['v']" in f.leaves].count(("oob", "error")) == 1 + is_wrong


@pytest.mark.slow
def test_how_jax_counts_is_no_read_out_of_bounds():
    found = findings(lambda p: jnp.sum(p["t"][jnp.triu_indices(2, 1)] ** 2), {"t": F(1, 2, 3, 4).reshape(2, 2)})
    ((_, finding),) = found.items()
    assert (finding.reason, finding.details) == ("elements", {"dead": 3, "size": 4})


def test_a_random_callback_is_not_taken_for_rounding():
    random = np.random.RandomState(0)

    def noisy(p):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(lambda: np.float32(random.randn()), shape)  # fault: noisy
        return p["x"] ** 2 + noise

    assert findings(noisy, {"x": S(1.0)})["nondeterminism", "error", ""].where == line("noisy")


@pytest.mark.slow
def test_each_rule_that_changes_the_value_is_told_once():
    def scaled(factor):
        sine = jax.custom_vjp(lambda x: jnp.sin(x))
        sine.defvjp(lambda x: (factor * jnp.sin(x), x), lambda x, c: (3 * factor * c * jnp.cos(x),))
        return sine

    first, second = scaled(2.0), scaled(5.0)

    def total(p):
        a = first(p["a"])
        b = second(p["b"])
        return a + b + p["c"] ** 2

    report = pg.check(total, progress=False)({"a": S(0.3), "b": S(0.4), "c": S(1.0)})
    told = [(f.kind, f.severity, f.reason, f.leaves) for f in report.findings]
    assert told == [("value", "error", "rule", ("['a']",)), ("value", "error", "rule", ("['b']",))]


@pytest.mark.slow
def test_a_rule_with_another_value_is_named_for_leaves_beside_it():
    @jax.custom_jvp
    def wave(x):
        return jnp.sin(x)

    wave.defjvp(lambda p, t: (1.01 * jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))
    found = findings(lambda p: wave(p["x"]) * p["scale"], {"x": S(0.7), "scale": S(2.0)})
    assert {key: finding.operation for key, finding in found.items()} == {
        ("value", "error", "['x']"): "wave",
        ("value", "error", "['scale']"): "wave",
    }


@jax.custom_jvp
def weighed(x, weight):
    return x + x * x * weight


weighed.defjvp(lambda p, t: (weighed(*p), (1 + 2 * p[0] * p[1]) * t[0] + p[0] * t[1]))


@jax.custom_vjp
def both_ways(x):
    return 1e4 * x, x * x


both_ways.defvjp(lambda x: (both_ways(x), x), lambda x, c: (1e4 * c[0] + x * c[1],))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda p: jnp.sum(weighed(p["x"], p["weight"])), "['weight']"),
        (lambda p: jnp.sum(both_ways(p["x"])[1]) + p["weight"], "['x']"),
    ],
    ids=["operand", "result"],
)
def test_a_rule_that_is_wrong_in_what_is_small_beside_the_rest(function, wrong):
    found = findings(function, {"x": F(1e-5, -2e-5), "weight": S(0.7)})
    assert {key: finding.reason for key, finding in found.items()} == {("mismatch", "error", wrong): "rule"}


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2])
def test_a_stop_beside_a_wrong_rule_is_named_too(calls):
    @jax.custom_jvp
    def squared(x):
        return x * x

    squared.defjvp(lambda p, t: (squared(*p), 3 * p[0] * t[0]))

    def function(x):
        for _ in range(calls):
            x = squared(x)
        return x + 2.7 * x * jax.lax.stop_gradient(jnp.sin(x))  # fault: beside

    report = pg.check(lambda p: function(p["x"]) + p["y"], progress=False)({"x": S(0.8), "y": S(1)})
    assert report.verdict == "error"
    assert [(f.reason, f.leaves) for f in report.findings] == [("rule", ("['x']",)), ("stop beside", ("['x']",))]
    assert report.findings[1].where == line("beside")
    # Where the rule explains all, nothing is said of a stop on its path.
    report = pg.check(lambda x: squared(x) - jax.lax.stop_gradient(0 * x), progress=False)(S(0.8))
    assert [f.reason for f in report.findings] == ["rule"]


@pytest.mark.slow
def test_a_rule_is_not_blamed_for_what_goes_into_its_right_operands():
    @jax.custom_jvp
    def squared(x):
        return x * x

    @jax.custom_vjp
    def scaled(x, y):
        return x * y

    squared.defjvp(lambda p, t: (squared(*p), 3 * p[0] * t[0]))
    scaled.defvjp(lambda x, y: (x * y, (x, y)), lambda r, c: (c * r[1], -c * r[0]))
    report = pg.check(lambda p: squared(scaled(p["x"], p["y"])), progress=False)({"x": S(0.4), "y": S(1.1)})
    assert {f.operation: f.leaves for f in report.findings} == {
        "scaled": ("['y']",),
        "squared": ("['x']", "['y']"),
    }


def test_a_linear_leaf_has_no_finding():
    linear = lambda p: jnp.sum(jnp.cos(3 * p["x"])) * p["scale"] + p["offset"]
    assert findings(linear, {"x": F(1.3, 2.1), "scale": S(1.2), "offset": S(0.7)}) == {}


@pytest.mark.slow
def test_two_wrong_rules_on_one_line_are_both_named():
    def wrong(x):
        return x * x

    def worse(x):
        return jnp.cos(x)

    wrong, worse = jax.custom_jvp(wrong), jax.custom_jvp(worse)
    wrong.defjvp(lambda p, t: (p[0] * p[0], 3 * p[0] * t[0]))
    worse.defjvp(lambda p, t: (jnp.cos(p[0]), jnp.sin(p[0]) * t[0]))
    found = pg.check(lambda x: wrong(x) * worse(x), progress=False)(S(0.7)).findings
    assert [f.operation for f in found] == ["wrong", "worse"]
    assert len({f.where for f in found}) == 1


@pytest.mark.slow
def test_a_rule_that_is_checked_by_itself_has_the_line_of_its_function():
    @jax.custom_jvp
    def alone(x):  # fault: alone
        return x * x

    alone.defjvp(lambda p, t: (p[0] * p[0], 3 * p[0] * t[0]))
    (finding,) = pg.check(alone, progress=False)(S(0.7)).findings
    assert int(finding.where.rpartition(":")[2]) in (int(line("alone").rpartition(":")[2]) + shift for shift in (-1, 0))


def test_a_function_that_is_flat_on_both_sides_of_a_tie_is_honestly_zero():
    sinc = lambda x: jnp.where(x == 0, 1.0, jnp.sin(x) / jnp.where(x == 0, 1.0, x))
    (finding,) = findings(sinc, S(0.0)).values()
    assert (finding.severity, finding.reason) == ("info", "truly zero")


def test_a_conversion_beside_a_leaf_is_what_its_gradient_lost_digits_to():
    def centred(p):
        mean = jnp.mean(p["x"].astype(jnp.bfloat16)).astype(jnp.float32)  # fault: centred
        return jnp.sum((p["x"] - mean) ** 2 * p["weights"])

    found = findings(centred, {"x": F(1.1, 2.3, 3.7), "weights": F(1, 2, 3)})
    assert found["precision", "info", "['weights']"].where == line("centred")


def test_of_a_value_that_is_not_finite_nothing_is_compared():
    found = findings(lambda p: jnp.where(p["x"] > 0, -p["x"], -jnp.inf), {"x": S(-2.0)})
    assert {kind for kind, _, _ in found} == {"nan"}


def test_a_function_that_is_singular_on_one_side_of_a_tie_is_not_honestly_zero():
    inverse = pg.double_where(lambda x: jnp.where(jnp.abs(x) > 0, 1 / x, 0.0))
    report = pg.check(inverse, progress=False)(S(0.0))
    assert report.verdict == "inconclusive"
    assert [f.kind for f in report.findings] == ["jump"]


@pytest.mark.slow
def test_the_wrong_derivative_of_a_complex_number_is_shown_along_a_direction():
    norm = jax.custom_vjp(lambda z: jnp.abs(z) ** 2)
    norm.defvjp(lambda z: (jnp.abs(z) ** 2, z), lambda z, c: (2 * c * z,))  # JAX's convention is the conjugate.
    (finding,) = findings(lambda z: norm(z) * 1.5, jnp.complex64(1 + 2j)).values()
    assert isinstance(finding.figures.derivative, float)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_the_last_named_value_before_the_operation_is_said(jit):
    def energy(p):
        hidden = checkpoint_name(jnp.tanh(p["x"] * p["w"]), "hidden")
        total = checkpoint_name(jnp.sum(hidden**2), "total")
        beside = checkpoint_name(2 * p["w"], "beside")
        return jnp.sqrt(total) + beside

    (finding,) = pg.check(jit(energy), progress=False)({"x": S(0.0), "w": S(1.0)}).findings
    assert "What `sqrt` takes there is computed from the value named `total`." in finding.message

    unnamed = pg.check(lambda p: jnp.sqrt(p) + checkpoint_name(p, "after"), progress=False)(S(0.0))
    assert "named" not in unnamed.findings[0].message


@pytest.mark.slow
def test_a_solver_of_a_library_that_stopped_early_is_a_warning():
    optimistix = pytest.importorskip("optimistix")

    def best(p):
        solver = optimistix.GradientDescent(0.2, rtol=1e-2, atol=1e-2)
        bowl = lambda x, p: (x - p["a"]) ** 2 + 0.1 * jnp.cosh(p["a"] * x)
        return optimistix.minimise(bowl, solver, jnp.ones_like(p["a"]), p).value

    with jax.enable_x64(True):
        (finding,) = findings(best, {"a": jnp.array(1.2)}).values()
    assert (finding.kind, finding.severity) == ("precision", "warning")
    assert finding.reason == "unconverged"


@pytest.mark.slow
def test_a_right_rule_hides_those_inside_its_function():
    """Their derivative is used nowhere in it; where they are called by themselves, it is."""
    wrong = jax.custom_jvp(lambda x: x * x)
    wrong.defjvp(lambda p, t: (p[0] * p[0], p[0] * t[0]))
    hiding = jax.custom_jvp(lambda x: jnp.sin(wrong(x)))
    hiding.defjvp(lambda p, t: jax.jvp(lambda x: jnp.sin(x * x), p, t))

    def function(x):
        hidden = jnp.sum(hiding(x))
        return hidden + jnp.sum(wrong(x))

    (finding,) = pg.check(function)(jnp.array([0.8, -0.2])).findings
    assert finding.line == function.__code__.co_firstlineno + 2
    assert pg.check(lambda x: jnp.sum(hiding(x)))(jnp.array([0.8, -0.2])).ok


DRAW_KEY = jax.random.key(0)
count = lambda p: jax.random.poisson(DRAW_KEY, 5 * p).astype(jnp.float32)
coin = lambda p: jax.random.bernoulli(DRAW_KEY, p)

# Logarithms of what was drawn and of a parameter, which are none of a probability.
NO_SCORES = {
    "a sum": lambda p: jnp.log(count(p) + p),
    "an observation": lambda p: -0.5 * (2 - jnp.log(count(p) + p)) ** 2,
    "a sum of exponentials": lambda p: jax.nn.logsumexp(jnp.stack([count(p), p])),
    "a factor": lambda p: jnp.log(coin(p) * p + 0.2),
    "an entropy": lambda p: -(share := count(p) / (count(p) + p)) * jnp.log(share + 0.1),
    "a probability alone": lambda p: coin(p) * jnp.log(p) + (1 - coin(p)) * jnp.log1p(-p),
    "an entropy beside a reward": lambda p: coin(p) + 0.1 * jnp.log(jnp.stack([1 - p, p])[coin(p).astype(int)]),
    "another draw": lambda p: jax.random.poisson(jax.random.key(1), count(p) * p + 1).astype(jnp.float32),
}
SCORES = {
    "chosen by a where": lambda p: (coin(p) + 1) * jnp.log(jnp.where(coin(p), p, 1 - p)),
    "chosen by an index": lambda p: (coin(p) + 1) * jnp.log(jnp.stack([1 - p, p])[coin(p).astype(int)]),
    "a sum of products": lambda p: (coin(p) + 1) * (coin(p) * jnp.log(p) + (1 - coin(p)) * jnp.log1p(-p)),
    "by a function with a rule": lambda p: (count(p) - 3) ** 2 * jax.scipy.stats.poisson.logpmf(count(p), 5 * p),
    "of a sigmoid": lambda p: (
        (c := coin(jax.nn.sigmoid(p)) + 0.0) * (c * jax.nn.log_sigmoid(p) - (1 - c) * jax.nn.softplus(p))
    ),
}


@pytest.mark.parametrize(("name", "severity"), [*((n, "warning") for n in NO_SCORES), *((n, "info") for n in SCORES)])
def test_a_score_is_of_a_probability(name, severity):
    found = findings(lambda x: (NO_SCORES | SCORES)[name](x["p"]), {"p": jnp.float32(0.7)}).values()
    draws = {(f.kind, f.severity, f.reason) for f in found if f.kind == "draw"}
    assert draws == {("draw", severity, "score" if severity == "info" else "discrete")}


@pytest.mark.slow
def test_a_rule_that_one_line_calls_for_several_leaves_is_one_finding():
    step = jax.custom_jvp(lambda w: w**3)
    step.defjvp(lambda p, t: (p[0] ** 3, t[0]))

    def layer(w, x):
        return jnp.tanh(step(w) @ x)

    leaves = {"a": jnp.array([[0.3, -0.7], [0.5, 1.2]]), "b": jnp.array([[1.4, 0.2], [-0.6, 0.8]])}
    report = pg.check(lambda p: jnp.sum(layer(p["a"], layer(p["b"], jnp.array([0.4, -0.9])))), progress=False)(leaves)
    (found,) = report.findings
    assert (found.reason, set(found.leaves)) == ("rule", {"['a']", "['b']"})


@jax.custom_vjp
def response(w, x):
    return jnp.tanh(w @ x)


def of_response(kept, cotangent):
    w, x = kept
    by_w, by_x = jax.vjp(lambda w, x: jnp.tanh(w @ x), w, x)[1](cotangent)
    return by_w * 1.001, by_x * 1.00004


response.defvjp(lambda w, x: (response(w, x), (w, x)), of_response)


def test_a_rule_that_is_hardly_wrong_by_one_operand_is_named_for_it_too():
    generator = np.random.default_rng(7)
    p = {"w": 0.35 * generator.normal(size=(4, 4)), "x": 0.5 * generator.normal(size=4)}
    report = pg.check(lambda p: jnp.sum(response(p["w"], p["x"]) ** 2), progress=False)(jax.tree.map(jnp.asarray, p))
    (finding,) = report.findings
    assert (finding.reason, finding.leaves) == ("rule", ("['w']", "['x']"))


@jax.custom_vjp
def scaled(x, s):
    return x * s


@jax.custom_vjp
def cubed(x):
    return x**3


scaled.defvjp(lambda x, s: (x * s, (x, s)), lambda kept, cotangent: (cotangent * kept[1], cotangent * kept[0]))
cubed.defvjp(lambda x: (x**3, x), lambda x, cotangent: (3 * x**2 * cotangent, cotangent))
REFUSED = {
    "a sum is missing": lambda p: jnp.sum(scaled(jnp.tanh(p["x"]), p["s"]) ** 2),
    "one cotangent too many": lambda p: jnp.sum(cubed(p["x"])) + p["s"],
    "in a scan": lambda p: lax.scan(lambda c, x: (c + jnp.sum(scaled(x, p["s"])), None), 0.0, p["x"][None])[0],
}


@table("name", list(REFUSED), quick=1)
def test_a_rule_that_jax_refuses_is_named(name):
    report = pg.check(REFUSED[name], progress=False)({"x": jnp.arange(3.0), "s": jnp.array(2.0)})
    (finding,) = report.findings
    assert (finding.reason, finding.operation) == ("no reverse", "cubed" if "cotangent" in name else "scaled")
    assert f'"{name}"' in inspect.getsource(sys.modules[__name__]).split("\n")[finding.line - 1]
    assert "there is no gradient: Custom VJP bwd rule" in " ".join(finding.message.split())
