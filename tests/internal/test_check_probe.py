"""What equations answer, in which step; what flows where; from which line an equation comes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import partgrad._programs as flow
from partgrad._check.probe import probe
from partgrad._check.program import Program
from partgrad._programs import line


def here(offset=0):
    """The line of the call, as `file.py:42`."""
    import sys

    return f"test_check_probe.py:{sys._getframe(1).f_lineno + offset}"


def large(chain, operands, results):
    """Which operations named `mul` make something larger than ten, and where in it."""
    if chain[-1].primitive.name != "mul":
        return None
    flat = jnp.ravel(results[0])
    return jnp.where((flat > 10).any(), jnp.argmax(flat > 10), -1)[None]


def answers(function, *operands):
    found = probe(jax.make_jaxpr(function)(*operands), list(map(jnp.asarray, operands)), large)[1]
    return [(answer.steps, int(answer.numbers[0])) for answer in found]


def test_each_step_of_a_loop_answers_for_itself():
    def double(x):
        return lax.scan(lambda x, _: (x * 2, None), x, length=5)[0]

    assert answers(double, 1.0) == [((3,), 0), ((4,), 0)]


def test_a_reversed_scan_counts_what_it_reads_and_runs_backwards():
    def scaled(x):
        return lax.scan(lambda c, x: (c, x * 2.0), 0.0, x, reverse=True)[1]

    assert answers(scaled, jnp.array([9.0, 1.0, 8.0])) == [((2,), 0), ((0,), 0)]


def test_loops_in_loops_and_branches():
    def nested(x):
        inner = lambda x, _: (lax.cond(x > 3, lambda x: x * 2.0, lambda x: x + 3.0, x), None)
        return lax.fori_loop(0, 2, lambda _, x: lax.scan(inner, x, length=2)[0], x)

    assert answers(nested, 1.0) == [((1, 0), 0), ((1, 1), 0)]


def test_a_while_loop_counts_its_steps():
    assert answers(lambda x: lax.while_loop(lambda x: x < 20, lambda x: x * 2.0, x), 3.0) == [((1,), 0), ((2,), 0)]


def test_a_batch_of_while_loops_stops_one_by_one():
    loop = jax.vmap(lambda x: lax.while_loop(lambda x: x < 20, lambda x: x * 2.0, x))
    jaxpr = jax.make_jaxpr(loop)(jnp.array([3.0, 30.0]))
    assert [a.steps for a in probe(jaxpr, [jnp.array([3.0, 30.0])], large)[1]] == [(0,), (1,), (2,)]


def test_inside_of_jit_checkpoint_and_custom_rules():
    rule = jax.custom_jvp(lambda x: x * 3.0)
    rule.defjvps(lambda tangent, _, x: 3.0 * tangent)
    function = lambda x: jax.jit(lambda x: x * 2.0)(x) + jax.checkpoint(lambda x: x * 4.0)(x) + rule(x)
    assert len(answers(function, 6.0)) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_the_same_function_called_twice_has_two_places(count):
    double = jax.jit(lambda x: x * 2.0)

    def function(x):
        for _ in range(count):
            x = double(x)
        return x

    assert len(answers(function, 8.0)) == count


# --- flow --------------------------------------------------------------------------------------------------------


def flowing(function, *operands, how=flow.differentiably):
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    return how(jaxpr, [1 << i for i in range(len(jaxpr.invars))]).outputs


def test_derivatives_flow_through_numbers_only():
    assert flowing(lambda x, y: lax.stop_gradient(x) + y, 1.0, 2.0) == [2]
    assert flowing(lambda x, y: jnp.where(x > 0, y, 0.0), 1.0, 2.0) == [2]
    assert flowing(lambda x, y: x.astype(int) * y, jnp.ones(2), 2.0) == [2]
    assert flowing(lambda x, y: jnp.floor(x) * y, 1.0, 2.0) == [2]


def test_values_flow_through_decisions_too():
    by_value = lambda f, *operands: flowing(f, *operands, how=flow.by_value)
    assert by_value(lambda x, y: jnp.where(x > 0, y, 0.0), 1.0, 2.0) == [3]
    assert by_value(lambda x, y: lax.cond(x > 0, lambda y: y, lambda y: y + 1, y), 1.0, 2.0) == [3]
    assert by_value(lambda n, y: lax.fori_loop(0, n, lambda _, y: y + 1, y), 3, 2.0) == [3]
    assert by_value(lambda x, y: y, 1.0, 2.0) == [2]


def test_what_is_carried_flows_round():
    def rotated(x, y, length):
        return lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), length=length)[0][0]

    # Few steps are followed one by one.
    assert flowing(lambda x, y: rotated(x, y, 3), 1.0, 2.0) == [2]
    assert flowing(lambda x, y: rotated(x, y, 99), 1.0, 2.0) == [3]


def test_reaching_tells_what_the_output_needs():
    def function(x):
        unused = jnp.sin(x)
        del unused
        return jnp.cos(x)

    jaxpr = jax.make_jaxpr(function)(1.0).jaxpr
    chains = flow.by_value(jaxpr, [1]).chains
    assert [c[-1].primitive.name for c in flow.reaching(jaxpr, chains)] == ["cos"]


# --- lines -------------------------------------------------------------------------------------------------------


def lines(function, *operands, name):
    """The line of each equation of a primitive."""
    chains = flow.by_value((jaxpr := jax.make_jaxpr(function)(*operands).jaxpr), [1] * len(jaxpr.invars)).chains
    return [line(chain) for chain in chains if chain[-1].primitive.name == name]


def test_a_function_of_jax_that_was_compiled_before_has_the_line_of_its_call():
    jnp.linalg.norm(jnp.ones(3))

    def function(x):
        first = jnp.linalg.norm(x)
        second = jnp.linalg.norm(2 * x)
        return first + second, here(-2), here(-1)

    *_, before, after = function(jnp.ones(3))
    assert lines(lambda x: function(x)[0], jnp.ones(3), name="sqrt") == [before, after]


def test_a_function_of_the_user_has_its_own_lines():
    @jax.jit
    def root(x):
        return jnp.sqrt(x)

    expected = here(-2)
    root(1.0)
    assert lines(lambda x: root(x) + root(2 * x), 1.0, name="sqrt") == [expected, expected]


# --- programs ----------------------------------------------------------------------------------------------------


def pulled(program, *cotangents):
    return jaxpr_as_fun(program.cotangent)(*program.leaves, *map(jnp.float32, cotangents))


def test_what_is_derived_leads_back():
    def function(leaves):
        (x,) = leaves
        total, _ = lax.scan(lambda c, x: (c + jnp.sin(x), None), 0.0, x)
        return total * jax.jit(jnp.tanh)(x[0])

    program = Program(function, [jnp.arange(3.0)], ["x"])
    chains = flow.of_cotangents(program.cotangent.jaxpr, 1).chains
    origins = {tuple(e.primitive.name for e in program.origin(chain)) for chain in chains}
    assert {("scan", "sin"), ("jit", "tanh"), ("mul",)} <= origins


def test_a_program_computes_what_its_function_does():
    function = lambda leaves: {"a": jnp.linalg.norm(leaves[0]) * leaves[1], "n": 3, "b": 2.0}
    program = Program(function, [jnp.arange(3.0), jnp.float32(2)], ["x", "y"])
    outputs = program.run(program.leaves)
    np.testing.assert_allclose(outputs[0], function(program.leaves)["a"])
    assert len(outputs) == 2
    np.testing.assert_allclose(pulled(program, 1.0, 0.0)[1], jnp.linalg.norm(jnp.arange(3.0)))


def test_there_is_no_forward_derivative_of_a_custom_vjp():
    square = jax.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, cotangent: (2 * x * cotangent,))
    program = Program(lambda leaves: square(leaves[0]), [jnp.float32(2)], [""])
    assert program.tangent is None
    assert "custom_vjp" in str(program.missing["forward"])
    np.testing.assert_allclose(pulled(program, 1.0)[0], 4.0)
