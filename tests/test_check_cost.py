"""What a check compiles: little for a function without findings, and nothing for the next check of the same one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg

X = np.linspace(0.3, 1.1, 4, dtype=np.float32)
A = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

FUNCTIONS = {
    "elementwise": lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)),
    "array": lambda x: jnp.tanh(A @ x),
    "relu": lambda x: jnp.sum(jax.nn.silu(A @ x) ** 2),
    "scan": lambda x: lax.scan(lambda c, u: (jnp.tanh(c + u), c), x[0], x)[0],
    "linear algebra": lambda x: jnp.linalg.slogdet(A @ A.T + jnp.diag(x))[1],
    "indices": lambda x: jnp.sum(x[np.array([0, 2, 1, 3])] ** 2),
    "jit": jax.jit(lambda x: jnp.prod(x) + jnp.sum(x**3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_most_three_times_those_of_a_gradient_and_then_none(name, compilations):
    function, point = FUNCTIONS[name], jnp.asarray(X)
    compilations[0] = 0
    jax.block_until_ready(jax.jit(jax.value_and_grad(lambda x: jnp.sum(function(x))))(point))
    alone, compilations[0] = compilations[0], 0
    first = pg.check(function, progress=False)(point)
    assert first.ok
    assert [f for f in first.findings if f.severity != "info"] == []
    assert compilations[0] <= 3 * alone
    compilations[0] = 0
    again = pg.check(function, progress=False)(point)
    assert compilations[0] == 0
    assert again.to_dict() == first.to_dict()


@pytest.mark.slow
def test_what_is_kept_is_of_the_program_and_not_of_its_numbers():
    """Constants that change between two checks of the same program count."""
    for factor in (2.0, 3.0):
        scale = np.float32(factor) * X
        wrong = jax.custom_jvp(lambda x, s=scale: jnp.sum(s * x))
        wrong.defjvp(lambda p, t, s=scale: (jnp.sum(s * p[0]), jnp.sum(2 * X * t[0])))
        assert pg.check(lambda x, rule=wrong: rule(x), progress=False)(X).ok == (factor == 2.0)


@pytest.mark.slow
def test_lines_are_those_of_the_function_that_is_checked():
    first = lambda x: jnp.sum(jnp.sqrt(x - x))
    second = lambda x: jnp.sum(jnp.sqrt(x - x))
    lines = [pg.check(f, progress=False)(X).findings[0].line for f in (first, second)]
    assert lines[1] == lines[0] + 1
    reads = [lambda x: x[jnp.array([9])].sum(), lambda x: x[jnp.array([9])].sum()]
    lines = [next(f.line for f in pg.check(f, progress=False)(X).findings if f.kind == "oob") for f in reads]
    assert len(lines) == 2


squared = jax.custom_jvp(lambda x: x**2)
squared.defjvp(lambda p, t: (squared(p[0]), 3 * p[0] * t[0]))

CAUSES = {
    "a path not taken": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), -1.0),
    "a singularity": (lambda x: jnp.sqrt(x**2), 0.0),
    "a wrong rule": (squared, 1.3),
    "a stop": (lambda x: lax.stop_gradient(x) * x, 1.3),
    "a tie": (lambda x: jnp.maximum(x, 0.5), 0.5),
    "a jump": (lambda x: jnp.floor(x) + x, 1.0),
    "a zero": (lambda x: jnp.maximum(x, 0.5), 0.25),
    "an index": (lambda x: (x * jnp.ones(3))[jnp.array([5])], 1.0),
    "lost digits": (lambda x: (x + 1e6) - 1e6, 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
def test_what_is_compiled_goes_with_causes_and_not_with_leaves(name, compilations):
    """Six programs at most for a cause, however many leaves it has."""
    function, point = CAUSES[name]
    for number in (1, 8):
        leaves = {f"x{i}": jnp.float32(point) for i in range(number)}
        compilations[0] = 0
        report = pg.check(lambda p: sum(jnp.sum(function(x)) for x in p.values()), progress=False)(leaves)
        assert report.findings or name == "lost digits"
        assert compilations[0] <= 6, number


def roots(*values):
    return jnp.sum(jnp.sqrt(jnp.stack(values)))


def chain(*values):
    points = jnp.stack(values)
    return jnp.sum((jnp.sqrt((points[1:] - points[:-1]) ** 2) - 0.5) ** 2)


# Leaves whose gradient is right beside one whose is not, and leaves that have no forward derivative; and how many
# programs may be compiled beyond those of one cause.
BESIDE_OTHERS = {
    "one of many": (lambda first, *xs: jnp.sqrt((first - 1) ** 2) + sum(map(jnp.sqrt, xs)), 0),
    "a zero tangent meets an infinity": (lambda first, *xs: chain(jnp.ones(()), first, *xs), 0),
    "and meets it wherever that leaf is": (lambda first, *xs: roots(0 * first, *xs), 1),
    "forward mode alone": (lambda first, *xs: roots(jnp.zeros(()), *xs) + first, 0),
    "two causes": (lambda first, *xs: roots(jnp.zeros(()), first, *xs[::2]) * roots(jnp.zeros(()), *xs[1::2]), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_OTHERS)
def test_leaves_beside_those_of_a_cause_compile_nothing(name, compilations):
    function, more = BESIDE_OTHERS[name]
    counts = []
    for number in (3, 60):
        values = np.random.default_rng(0).uniform(1, 2, number).astype(np.float32)
        leaves = {f"x{i}": jnp.asarray(value) for i, value in enumerate([np.float32(1), *values[1:]])}
        compilations[0] = 0
        report = pg.check(lambda p: function(*p.values()), progress=False)(leaves)
        assert any(f.kind == "nan" for f in report.findings)
        counts.append(compilations[0])
    assert counts[0] == counts[1] <= 6 + more


@pytest.mark.slow
def test_another_cause_takes_two_more_at_most(compilations):
    wrong, sine = (jax.custom_jvp(f) for f in (lambda x: x**3, jnp.sin))
    wrong.defjvp(lambda p, t: (wrong(p[0]), 2 * p[0] * t[0]))
    sine.defjvp(lambda p, t: (sine(p[0]), -jnp.cos(p[0]) * t[0]))
    causes = [squared, lambda x: lax.stop_gradient(x) * x, wrong, sine, lambda x: jnp.floor(x) * x]
    counts = {}
    for number in (1, 3, len(causes)):
        leaves = {f"x{i}": jnp.float32(1.3) for i in range(number)}
        compilations[0] = 0
        pairs = lambda p: zip(causes, p.values(), strict=False)
        report = pg.check(lambda p: sum(f(x) for f, x in pairs(p)), progress=False)(leaves)
        assert len(report.findings) >= min(number, 4)
        counts[number] = compilations[0]
    assert all(count <= 6 + 2 * (number - 1) for number, count in counts.items()), counts


@pytest.mark.slow
def test_an_ordinary_loss_is_not_run_eagerly(compilations):
    """A hundred different operations are compiled as one."""

    def loss(p):
        return sum(jnp.sum(jnp.sin(i * p["x"][: i + 1]) ** 2 / (1 + i)) for i in range(1, 40))

    assert pg.check(loss, progress=False)({"x": jnp.linspace(0.1, 1.0, 50)}).ok
    assert compilations[0] <= 4


def python_that_looks(x):
    return 2 * x if isinstance(x, jax.core.Tracer) else 3 * x


def python_that_catches(x):
    try:
        return x * float(x)
    except jax.errors.ConcretizationTypeError:
        return 2 * x


def asking(x):
    return isinstance(x, jax.core.Tracer)


def python_that_asks_another(x):
    return 2 * x if asking(x) else 3 * x


@pytest.mark.parametrize("function", [python_that_looks, python_that_catches, python_that_asks_another])
def test_python_that_looks_at_what_is_traced_runs_eagerly(function):
    (finding,) = pg.check(lambda x: jnp.sum(function(x) ** 2))(jnp.float32(5.0)).findings
    assert (finding.kind, finding.reason) == ("value", "python")


def test_python_that_computes_something_else_each_time():
    numbers = iter(range(1, 100))
    (finding,) = pg.check(lambda x: x**2 * next(numbers))(jnp.float32(5.0)).findings
    assert finding.kind == "nondeterminism"
    arrays = np.random.default_rng(0)
    (finding,) = pg.check(lambda x: jnp.sum(x**2 * arrays.normal(size=3)))(jnp.ones(3)).findings
    assert finding.kind == "nondeterminism"
