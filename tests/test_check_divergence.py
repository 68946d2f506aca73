"""The line at which two runs of the same Python part."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partgrad._check.divergence import eager_or_traced, parting_line
from partgrad._check.user import is_users

# The package's function of that name hides the module.
divergence_module = importlib.import_module("partgrad._check.divergence")

pytestmark = [pytest.mark.internal, pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is at work")]

ONE = [jnp.float32(1.0)]


def line(function, offset):
    return f"test_check_divergence.py:{function.__code__.co_firstlineno + offset}"


def is_traced(x):
    return isinstance(x, jax.core.Tracer)


def in_a_statement(leaves):
    (x,) = leaves
    y = jnp.sin(x)
    if isinstance(y, jax.core.Tracer):
        y = 2 * y
    return [y]


def in_an_expression(leaves):
    (x,) = leaves
    factor = 3.0 if isinstance(x, jax.core.Tracer) else 2.0
    return [factor * x]


def in_an_operator(leaves):
    (x,) = leaves
    return [(isinstance(x, jax.core.Tracer) and x) or 2 * x]


def in_a_helper(leaves):
    (x,) = leaves
    if is_traced(x):
        return [x]
    return [2 * x]


def in_python(leaves):
    (x,) = leaves
    y = x + 1
    if y > 0:
        y = 2 * y
    return [y]


def in_a_conversion(leaves):
    (x,) = leaves
    return [float(x) + x]


def in_a_loop(leaves):
    (x,) = leaves
    for i in range(5):
        x = x + 1
        x = 2 * x if i < 3 or not isinstance(x, jax.core.Tracer) else x
    return [x]


def in_a_comprehension(leaves):
    return [
        x
        if isinstance(x, jax.core.Tracer)
        else 2 * x
        for x in leaves
    ]  # fmt: skip


def in_a_generator(leaves):
    def items():
        for x in leaves:
            yield x if isinstance(x, jax.core.Tracer) else 2 * x

    return list(items())


def in_an_exception(leaves):
    (x,) = leaves
    try:
        x = x * float(x)
    except jax.errors.ConcretizationTypeError:
        x = 2 * x
    return [x]


PARTING = {
    in_a_statement: 3,
    in_an_expression: 2,
    in_an_operator: 2,
    in_a_helper: 2,
    in_python: 3,
    in_a_conversion: 2,
    in_a_loop: 4,
    in_a_comprehension: 3,
    in_a_generator: 3,
    in_an_exception: 3,
}


@pytest.mark.parametrize("function", PARTING, ids=lambda function: function.__name__)
def test_the_line_where_eager_and_traced_part(function):
    # Twice: the first run may fill JAX's caches.
    found = {eager_or_traced(function, ONE) for _ in range(2)}
    offsets = {PARTING[function]} | ({2} if function is in_a_comprehension else set())
    assert found <= {line(function, offset) for offset in offsets}


def test_a_function_that_a_library_calls():
    def body(x):
        y = x + 1
        return y if isinstance(x, jax.core.Tracer) else 2 * y

    assert eager_or_traced(lambda leaves: jax.tree.map(body, leaves), ONE) == line(body, 2)


@jax.jit
def cached(x):
    return x + 1


@jax.custom_jvp
def ruled(x):
    return 2 * x


@ruled.defjvp
def _(primals, tangents):
    return ruled(*primals), 2 * tangents[0]


def steady(leaves):
    (x,) = leaves
    x = cached(cached(x)) + ruled(x)
    x = lax.scan(lambda c, _: (c + x, None), x, None, length=3)[0]
    x = lax.cond(x > 0, lambda x: x, lambda x: -x, x)
    return [jax.vmap(lambda y: y * x)(jnp.ones(3)), jax.grad(jnp.sin)(x)]


def test_runs_that_do_not_part():
    cached.clear_cache()
    for _ in range(2):
        assert eager_or_traced(steady, ONE) == ""
        assert parting_line(functools.partial(steady, ONE), functools.partial(steady, ONE)) == ""


def test_two_eager_runs_that_part():
    drawn = iter([0.2, 0.8])

    def function():
        number = next(drawn)
        return 1 if number < 0.5 else 2

    assert parting_line(function, function) == line(function, 2)


def test_the_earlier_of_two_partings():
    def function(leaves):
        (x,) = leaves
        for y in jax.tree.map(lambda x: x if isinstance(x, jax.core.Tracer) else 2 * x, [x]):
            x = y if isinstance(y, jax.core.Tracer) else 3 * y
        return [x]

    assert eager_or_traced(function, ONE) == line(function, 2)


def test_long_runs_end_soon_and_are_not_judged_by_their_end(monkeypatch):
    monkeypatch.setattr(divergence_module, "_MOST_STEPS", 200)

    def function(count):
        for _ in range(count):
            pass
        return count

    counts = iter([1000, 10])
    assert parting_line(*[lambda: function(next(counts))] * 2) == line(function, 1)
    counts = iter([1000, 2000])
    assert parting_line(*[lambda: function(next(counts))] * 2) == ""
    monkeypatch.setattr(divergence_module, "_MOST_STEPS", 10**9)
    monkeypatch.setattr(divergence_module, "_MOST_SECONDS", 0.0)
    assert parting_line(*[functools.partial(function, 2000)] * 2) == ""


def test_another_tracer_is_left_alone():
    tracer = lambda frame, event, argument: None
    sys.settrace(tracer)
    try:
        assert eager_or_traced(in_a_statement, ONE) == ""
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)


def test_no_tracer_stays():
    eager_or_traced(in_python, ONE)
    assert sys.gettrace() is None

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parting_line(interrupted, interrupted)
    assert sys.gettrace() is None


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (__file__, True),
        (jax.__file__, False),
        (np.__file__, False),
        (functools.__file__, False),
        (divergence_module.__file__, False),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        ("<ipython-input-3-0123>", True),
        ("/tmp/ipykernel_1/123.py", True),
    ],
)
def test_which_files_are_the_users(file, expected):
    assert is_users(file) is expected
