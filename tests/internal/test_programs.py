"""The one interpreter, the one table of primitives, the one analysis of dependence, and whose line it is."""

import doctest
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, Primitive

import partgrad as pg
from helpers.models import Point
from partgrad._programs import (
    CHECKPOINTS,
    CUSTOM_RULES,
    Dependence,
    arrivals,
    bind,
    by_value,
    differentiably,
    evaluate,
    is_users,
    jaxpr_and_consts,
    kind_of,
    last_of,
    line,
    primal_jaxpr,
    quick_jit,
    reenter,
    rewritten,
    run,
    running_line,
    smoothly,
)
from partgrad._programs.same import Recent, keyed_jaxpr, operation_of


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))


def everything(x):
    """A scan, a loop, a branch, a call, a checkpoint and a custom rule, each with a sine inside."""
    y, ys = lax.scan(lambda c, i: (jnp.sin(c) + i, jnp.sin(c)), x, jnp.arange(3.0))
    y = lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), y)
    y = lax.while_loop(lambda c: c < 2.0, lambda c: c + 1.0 + jnp.sin(c), y)
    y = lax.cond(y > 0, jnp.sin, jnp.cos, y)
    y = jax.jit(lambda v: jnp.sin(v) * 2)(y) + jax.checkpoint(jnp.sin, prevent_cse=(True,))(y)
    return cubed(jnp.sin(y)) + ys.sum()


def interpreted(function, rule, x, **options):
    closed = jax.make_jaxpr(function)(x)
    return run(*jaxpr_and_consts(closed), [x], rule, **options)[0]


def asked(function, x, **options):
    names = []
    interpreted(function, lambda chain, _: names.append("/".join(e.primitive.name for e in chain)), x, **options)
    return names


@pytest.mark.slow
def test_a_rule_that_answers_nothing_leaves_values_and_derivatives_as_they_are():
    same = lambda x: interpreted(everything, lambda chain, operands: None, x)
    np.testing.assert_array_equal(same(0.7), everything(0.7))
    differentiable = lambda x: interpreted(looped, lambda chain, operands: None, x)
    np.testing.assert_array_equal(jax.grad(differentiable)(0.7), jax.grad(looped)(0.7))


def looped(x):
    return cubed(lax.scan(lambda c, i: (jnp.sin(c) + i, None), x, jnp.arange(3.0))[0])


@pytest.mark.slow
def test_a_rule_answers_at_every_depth():
    def of(operation):
        def function(x):
            y, ys = lax.scan(lambda c, i: (operation(c) + i, operation(c)), x, jnp.arange(3.0))
            return lax.cond(y > 0, operation, lambda v: v, y) + ys.sum()

        return function

    cosine = lambda chain, operands: [jnp.cos(operands[0])] if chain[-1].primitive.name == "sin" else None
    np.testing.assert_allclose(interpreted(of(jnp.sin), cosine, 0.7), of(jnp.cos)(0.7), rtol=1e-6)


def test_what_is_asked():
    f = lambda x: jax.jit(lambda v: cubed(jnp.sin(v)))(x) + jnp.exp(x)
    assert asked(f, 0.5) == ["jit", "jit/sin", "jit/custom_vjp_call", "exp", "add"]
    inside = asked(f, 0.5, in_place=CUSTOM_RULES)
    assert "jit/custom_vjp_call/integer_pow" in inside
    wanted = asked(f, 0.5, wanted=lambda equation: equation.primitive.name == "sin")
    assert wanted == ["jit", "jit/sin"]


def test_where_nothing_is_wanted_equations_are_the_same():
    f = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
    same = lambda x: interpreted(f, lambda chain, operands: pytest.fail("asked"), x, wanted=lambda equation: False)
    assert str(jax.make_jaxpr(same)(0.5)) == str(jax.make_jaxpr(f)(0.5))


def test_a_scope_names_the_equations_that_are_run_in_it():
    f = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
    scoped = lambda x: interpreted(f, lambda *_: None, x, context=lambda chain: jax.named_scope(f"depth{len(chain)}"))
    (scan,) = jax.make_jaxpr(scoped)(0.5).eqns
    (sine,) = [e for e in jaxpr_and_consts(scan.params["jaxpr"])[0].eqns if e.primitive.name == "sin"]
    assert "depth1" in str(scan.source_info.name_stack)
    assert "depth2" in str(sine.source_info.name_stack)


def test_closed_call_is_a_call():
    """It calls its jaxpr `call_jaxpr`; the derivative of a checkpoint around a scan has had some."""
    inner = jax.make_jaxpr(jnp.sin)(0.5)
    (call,) = jax.make_jaxpr(jax.jit(jnp.sin))(0.5).eqns
    closed_call = call.replace(primitive=Primitive("closed_call"), params={"call_jaxpr": inner})
    np.testing.assert_array_equal(reenter(closed_call, [0.5], evaluate)[0], jnp.sin(0.5))
    assert primal_jaxpr(closed_call) is inner


@pytest.mark.parametrize("prevent_cse", [True, False, (True, False)])
def test_a_checkpoint_is_entered_whatever_it_prevents(prevent_cse):
    f = jax.checkpoint(lambda x, y: jnp.sin(x) * y, prevent_cse=prevent_cse)
    closed = jax.make_jaxpr(f)(0.5, 2.0)
    (equation,) = [e for e in closed.jaxpr.eqns if e.primitive.name in CHECKPOINTS]
    again = jax.make_jaxpr(lambda x, y: reenter(equation, [x, y], evaluate))(0.5, 2.0)
    (other,) = [e for e in again.jaxpr.eqns if e.primitive.name in CHECKPOINTS]
    assert other.params["prevent_cse"] == equation.params["prevent_cse"]
    np.testing.assert_allclose(pg.grad(pg.consistent_indexing(f))(0.5, 2.0), 2 * np.cos(0.5), rtol=1e-6)


# --- dependence ------------------------------------------------------------------------------------------------------

X, Y = 0b01, 0b10


def overwritten(x, y):
    return lax.scan(lambda carry, _: (jnp.sin(y), None), x, None, length=3)[0]


def sliced_away(x, y):
    return jnp.concatenate([x[None], y[None]])[1] * 2.0


def padded(x, y):
    return jnp.pad(x[None] * y, (1, 1))[0] + y


def turned(x, y):
    return jnp.stack([jnp.stack([x, y]), jnp.stack([y, y])]).T[1].sum()


def parted(x, y):
    first, second = jnp.stack([x, y])
    return jnp.split(jnp.stack([first, second, y]), [1])[1].sum() + jnp.tile(second, 3)[0]


def kept(x, y):
    return lax.cond(y > 0, lambda x, y: x, lambda x, y: x + 1.0, x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (overwritten, Y),
        (sliced_away, Y),
        (padded, Y),
        (turned, Y),
        (parted, Y),
        (kept, X),
        (lambda x, y: jnp.sign(x) * y, Y),
        (lambda x, y: lax.rev(jnp.stack([x, y]), (0,))[0], Y),
        (lambda x, y: jnp.stack([jnp.stack([x, x]), jnp.stack([y, y])]).max(1)[1], Y),
        (lambda x, y: lax.dynamic_slice(jnp.stack([x, y]), (7,), (1,))[0], Y),
        (lambda x, y: lax.dynamic_slice(jnp.stack([x, y]), (jnp.argsort(jnp.ones(2))[0],), (1,))[0], X | Y),
        (lambda x, y: lax.pad(jnp.stack([x, y]), 0.0, [(-1, 0, 0)])[0], X | Y),
        (lambda x, y: lax.optimization_barrier((x, y))[1], Y),
    ],
)
def test_what_the_derivative_depends_on_is_what_is_used(function, expected):
    """The same answer from the program itself, which `check` asks, as from the derivative that `unused=` reads."""
    jaxpr = jax.make_jaxpr(function)(0.5, 2.0).jaxpr
    assert differentiably(jaxpr, [X, Y]).outputs == [expected]
    loss = lambda leaves: function(jnp.asarray(leaves[0]), jnp.asarray(leaves[1]))
    gradient = pg.grad(loss, unused="none")([0.5, 2.0])
    assert [leaf is not None for leaf in gradient] == [bool(expected & X), bool(expected & Y)]


@pytest.mark.parametrize("function", [overwritten, sliced_away])
def test_check_and_unused_agree_on_why_a_leaf_is_dead(function):
    loss, given = lambda p: function(p["x"], p["y"]), {"x": 0.5, "y": 2.0}
    (finding,) = pg.check(loss, progress=False)(given).findings
    assert (finding.kind, finding.reason, finding.leaves) == ("zero", "no path", ("['x']",))
    with pytest.raises(pg.errors.SelectionError, match=r"cannot depend on `\['x'\]`"):
        pg.grad(loss, unused="error")(given)


def test_a_condition_counts_for_the_value_only():
    jaxpr = jax.make_jaxpr(kept)(0.5, 2.0).jaxpr
    assert by_value(jaxpr, [X, Y]).outputs == [X | Y]


def test_through_what_is_not_known_everything_goes():
    many = lambda x, y: jnp.concatenate([jnp.full(2000, x), y[None]])[0]
    jaxpr = jax.make_jaxpr(many)(0.5, 2.0).jaxpr
    assert differentiably(jaxpr, [X, Y]).outputs == [X | Y]


def test_what_goes_into_an_equation_is_the_union_over_all_steps():
    f = lambda x, y: lax.scan(lambda carry, _: (jnp.sin(y), jnp.cos(carry)), x, None, length=3)
    flow = Dependence(jax.make_jaxpr(f)(0.5, 2.0).jaxpr, [X, Y], smoothly)
    assert [flow.into(chain) for chain in flow.chains if chain[-1].primitive.name == "cos"] == [[X | Y]]
    assert flow.outputs == [Y, X | Y]


def test_the_last_of_some_equations_hide_those_before():
    f = lambda x: jnp.sin(jnp.sin(x))
    jaxpr = jax.make_jaxpr(f)(0.5).jaxpr
    chains = [(equation,) for equation in jaxpr.eqns]
    assert last_of(jaxpr, chains) == chains[1:]


def test_arrivals_find_what_is_held_inside_everything():
    @jax.custom_jvp
    def own(x):
        return lax.stop_gradient(x)

    own.defjvp(lambda p, t: (own(*p), t[0]))

    def held(x, y):
        with jax.named_scope("marks"):
            step = lambda c: c + jax.jit(own)(x) + lax.cond(c > 0, own, lambda v: v, y)
            return lax.while_loop(lambda c: c < 3.0, step, 0.0)

    in_scope = lambda chain: any("marks" in str(equation.source_info.name_stack) for equation in chain)
    stop = lambda chain: chain[-1].primitive.name == "stop_gradient" and in_scope(chain)
    jaxpr = jax.make_jaxpr(held)(0.5, 2.0).jaxpr
    assert sorted(sources for _, sources in arrivals(jaxpr, [X, Y], stop)) == [[X], [Y]]
    assert list(arrivals(jaxpr, [0, 0], stop)) == []


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("<string>", True),
        ("<stdin>", True),
        ("<ipython-input-3-abc>", True),
        ("<frozen importlib._bootstrap>", False),
        (jax.__file__, False),
        (pg.__file__, False),
        (doctest.__file__, False),
        (__file__, True),
        ("/opt/python/lib/python3.11/site-packages/numpyro/infer/hmc.py", False),
    ],
)
def test_whose_a_file_is(file, expected):
    assert is_users(file) is expected


def test_the_line_that_is_running_is_that_of_this_test():
    assert running_line().startswith("test_programs.py:")


LIBRARY = """
import jax
import partgrad as pg

def noisy(p):
    return pg.draw(jax.random.normal, jax.random.key(0), (3,), gradient="error").sum() + drawn(p)

def drawn(p):
    return pg.draw(lambda key: p * jax.random.normal(key), jax.random.key(0), gradient="error")
"""


def test_a_draw_in_a_library_has_the_line_of_its_call(tmp_path, monkeypatch):
    """`DrawError` and `check` name the same line: the user's, not that of the installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "an_installed_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    library = __import__("an_installed_library")
    noisy = lambda p: library.noisy(p)
    with pytest.raises(pg.errors.DrawError) as raised:
        jax.grad(noisy)(1.0)
    named = re.search(r"At: (\S+)\.\n", str(raised.value)).group(1)
    jaxpr = jax.make_jaxpr(noisy)(1.0).jaxpr
    draws = [chain for chain in by_value(jaxpr, [1]).chains if chain[-1].primitive.name == "random_bits"]
    assert len(draws) == 2
    assert {line(chain) for chain in draws} == {named}
    assert named.startswith("test_programs.py:")


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_knows_the_primitives_of_a_program():
    jaxpr = jax.make_jaxpr(jax.grad(looped))(0.7)
    assert all(kind_of(equation.primitive.name) for equation in jaxpr.eqns)


def test_a_trace_that_is_the_same_but_for_its_constants_is_rewritten_once():
    state, seen = {"scale": jnp.arange(3.0)}, []

    def rewrite(jaxpr):
        seen.append(jaxpr)
        return lambda consts, operands, _: evaluate(jaxpr, consts, operands)

    wrapped = rewritten(lambda x, n=1: (x * state["scale"]).sum() * n, rewrite)
    assert jax.grad(wrapped)(jnp.ones(3)).tolist() == [0, 1, 2]
    state["scale"] = jnp.arange(3.0) + 1
    assert jax.grad(wrapped)(jnp.ones(3)).tolist() == [1, 2, 3]
    assert len(seen) == 1
    jax.grad(wrapped)(jnp.ones(3), 2)
    assert len(seen) == 2


def test_a_call_that_nothing_transforms_fails_as_the_function_does():
    for wrapped in (pg.double_where, pg.consistent_indexing):
        with pytest.raises(AttributeError, match="'float' object has no attribute 'nothing'"):
            wrapped(lambda x: x.nothing)(1.0)
        assert wrapped(Point)(1.0, 2.0) == Point(1.0, 2.0)


def test_a_tracer_in_a_dict_whose_keys_cannot_be_sorted():
    def over(x):
        odd = {1: x, "a": 2.0}
        return pg.double_where(lambda y: jnp.where(y > 1.0, jnp.sqrt(odd[1] - 2.0), odd[1] * y))(1.0)

    assert jax.grad(over)(2.0) == 1.0


def test_numbers_that_differ_in_sign_or_type_are_not_the_same():
    key = lambda n: keyed_jaxpr(jax.make_jaxpr(lambda x: x / n)(1.0).jaxpr, exact=False)
    keys = [key(n) for n in (0.0, -0.0, 1.0, np.float32(1), np.nan)]
    assert len(set(keys)) == len(keys)
    assert key(np.nan) == keys[-1]


def test_of_what_was_made_the_least_recent_is_dropped():
    made, recent = [], Recent(2)
    for key in ("a", "b", "a", "c", "a", "b", None, None):
        assert recent.of(key, lambda key=key: made.append(key) or f"of {key}") == f"of {key}"
    assert made == ["a", "b", "c", "b", None, None]
    recent.of("d", lambda: made.append("d") or "of d", lasts=lambda made: False)
    assert list(recent) == ["a", "b"]


def test_what_holds_large_constants_has_no_key():
    large = np.arange(100.0)
    closed = jax.make_jaxpr(jax.jit(jax.jit(lambda x: x * large)))(1.0)
    assert keyed_jaxpr(closed.jaxpr, exact=True) is None
    (equation,) = jax.make_jaxpr(lambda x: x * x)(1.0).eqns
    literal = Literal(large, jax.typeof(large))
    assert operation_of(equation) is not None
    assert operation_of(equation.replace(invars=[equation.invars[0], literal])) is None


def test_a_jaxpr_with_a_custom_rule_has_no_key():
    assert keyed_jaxpr(jax.make_jaxpr(cubed)(1.0).jaxpr, exact=False) is None


@pytest.mark.parametrize("exact", [True, False])
def test_a_rule_of_jax_that_reads_only_its_operands_has_a_key(exact):
    def key(f):
        # A new function, since JAX keeps traces.
        return keyed_jaxpr(jax.make_jaxpr(lambda x: jnp.sum(f(x * 2)))(jnp.ones(3)).jaxpr, exact=exact)

    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda primals, tangents: (relu(*primals), 3 * tangents[0]))
    functions = [jax.nn.relu, jax.nn.relu6, jax.nn.softplus, lambda x: jax.scipy.special.xlog1py(x, x)]
    keys = [key(f) for f in functions]
    assert None not in keys
    assert keys == [key(f) for f in functions]
    assert len({*keys, key(relu), key(lambda x: jnp.maximum(x, 0))}) == len(keys) + 2


def test_bind_runs_an_equation_with_other_parameters():
    (equation,) = jax.make_jaxpr(lambda x: jnp.sum(x, 0))(jnp.ones((2, 3))).eqns
    np.testing.assert_array_equal(bind(equation, [jnp.ones((2, 3))], axes=(1,))[0], [3.0, 3.0])


@pytest.mark.parametrize(
    ("function", "level"),
    [
        (lambda x: jnp.convolve(x, x), 1),
        (lambda x: jnp.sin(x), 0),
        (lambda x: lax.map(lambda y: jnp.convolve(x, x) * y, x), 1),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_convolutions_of_float64_are_compiled_at_the_next_level(monkeypatch, function, level, dtype):
    """At the lowest level, XLA runs one ten times as long."""
    levels, jit = [], jax.jit

    class Recording:
        def __init__(self, function, compiler_options):
            self._jitted = jit(function, compiler_options=compiler_options)
            self._level, self.trace = compiler_options["xla_backend_optimization_level"], self._jitted.trace

        def __call__(self, *args):
            levels.append(self._level)
            return self._jitted(*args)

    monkeypatch.setattr(jax, "jit", Recording)
    quick = quick_jit(function)
    monkeypatch.undo()
    with jax.enable_x64(True):
        x = np.ones(3, dtype)
        np.testing.assert_allclose(quick(x), function(x), rtol=1e-6)
    assert levels == [level if dtype == np.float64 else 0]
