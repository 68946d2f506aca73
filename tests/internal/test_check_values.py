"""A function has one value: what is not rounding is found, and rounding is never taken for a fault."""

import importlib.util

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from helpers.tables import examples, table
from partgrad._check import values as values_module
from partgrad._check.noise import disagreeing, rounding_noise
from partgrad._check.own import Own
from partgrad._check.program import Program
from partgrad._check.values import Values

equinox = pytest.mark.skipif(importlib.util.find_spec("equinox") is None, reason="needs equinox")


def program(function, *leaves):
    paths = [f"p[{i}]" for i in range(len(leaves))]
    return Program(lambda leaves: function(*leaves), list(map(jnp.asarray, leaves)), paths)


def values_of(function, *leaves):
    traced = program(function, *leaves)
    plain = traced.outputs(traced.leaves)
    own = Own(traced, np.ones(sum(value.size for value in plain)), [plain])
    own.run({})
    return own, Values(own)


def found_in(function, *leaves):
    return values_of(function, *leaves)[1].disagreements()


def ways(found):
    return {way for way, _ in found}


def small(x64):
    """The smallest relative error that has to be found."""
    return 1e-6 if x64 else 1e-3


def wrong_jvp(factor):
    rule = jax.custom_jvp(jnp.sin)
    rule.defjvp(lambda primals, tangents: (factor * jnp.sin(*primals), jnp.cos(*primals) * tangents[0]))
    return rule


def wrong_vjp(factor):
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (factor * jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return rule


def test_a_wrong_primal_of_a_custom_jvp_is_found(x64):
    found = found_in(lambda x: 2 + wrong_jvp(1 + 3 * small(x64))(x), jnp.ones(3))
    assert ways(found) == {"vjp"}
    first = found[0][1]
    assert first.output == 0
    np.testing.assert_allclose(first.absolute, 3 * small(x64) * np.sin(1), rtol=1e-2)


def test_a_wrong_primal_of_a_custom_vjp_is_found_where_there_is_no_jvp(x64):
    found = found_in(lambda x: wrong_vjp(1 + small(x64))(x).sum(), jnp.ones(3))
    assert ways(found) == {"vjp"}


def test_a_right_rule_is_not_blamed(x64):
    assert not found_in(lambda x: wrong_jvp(1)(x) + wrong_vjp(1)(x), jnp.ones(3))


def test_one_wrong_element_of_a_batch_is_found(x64):
    x = jnp.asarray(10.0 ** np.linspace(-12, 12, 2001))

    @jax.custom_jvp
    def double(x):
        return 2 * x

    @double.defjvp
    def _(primals, tangents):
        (x,) = primals
        return jnp.where(jnp.arange(2001) == 1500, 2 * (1 + small(x64)) * x, 2 * x), 2 * tangents[0]

    ((_, found),) = found_in(double, x)
    assert found.first == pytest.approx(2 * float(x[1500]), rel=1e-6)


def test_a_value_clipped_in_a_rule_is_found(x64):
    clipped = jax.custom_jvp(lambda x: x * x)
    clipped.defjvp(lambda p, t: (jnp.clip(p[0] * p[0], 0, 4), 2 * p[0] * t[0]))
    assert not found_in(clipped, jnp.array([1.0, 1.5]))
    assert ways(found_in(clipped, jnp.array([1.0, 3.0]))) == {"vjp"}


def only_under_jit(x):
    return x * (3.0 if isinstance(x, jax.core.Tracer) else 2.0)


def test_what_is_wrong_only_when_traced_is_found(x64):
    assert ways(found_in(only_under_jit, jnp.ones(3))) == {"jit", "vjp"}


def test_shapes_and_numbers_of_outputs_that_differ_are_found():
    first, second = jnp.ones(3), jnp.ones(2)
    (shapes,) = disagreeing([first], [second])
    assert (shapes.output, shapes.absolute) == (0, np.inf)
    (number,) = disagreeing([first], [first, first])
    assert number.output == -1


def test_values_that_are_not_finite():
    of = lambda *numbers: [jnp.array(numbers)]
    assert not disagreeing(of(jnp.nan, jnp.inf, -jnp.inf, 1.0), of(jnp.nan, jnp.inf, -jnp.inf, 1.0))
    for other in (of(1.0), of(-jnp.inf), of(jnp.nan)):
        (found,) = disagreeing(of(jnp.inf), other)
        assert found.absolute == np.inf
    (found,) = disagreeing(of(1.0, 2.0), of(1.0, jnp.nan))
    assert found.first == 2


def test_a_loop_has_no_reverse_derivative():
    loop = lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (x, 0))[0]
    own, values = values_of(loop, jnp.float32(1.1))
    assert isinstance(own.missing, ValueError)
    assert not own.gradients
    assert not values.disagreements()


def test_a_callback_has_no_derivative():
    call = lambda x: jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((), np.float32), x)
    own, values = values_of(call, jnp.float32(1.1))
    assert own.missing is not None
    assert not values.disagreements()


def test_prints_and_callbacks_are_not_run_by_the_noise():
    printed = []

    def prints(x):
        jax.debug.callback(lambda x: printed.append(x), x)
        return jnp.sin(x)

    traced = program(prints, jnp.ones(3))
    rounding_noise(traced.jaxpr, traced.leaves)
    jax.effects_barrier()
    assert not printed


def likelihood(size):
    """The negative log marginal likelihood of a Gaussian process with a badly conditioned covariance."""
    times = jnp.linspace(0.0, 43.0, size)
    distances = times[:, None] - times[None]
    data = jnp.sin(2 * jnp.pi * times) + 0.1 * times

    def function(p):
        smooth = jnp.exp(2 * p[0] - 0.5 * (distances / jnp.exp(p[1])) ** 2)
        periodic = jnp.exp(-2 * jnp.sin(jnp.pi * distances / p[2]) ** 2)
        factor = jnp.linalg.cholesky(smooth + periodic + jnp.exp(2 * p[3]) * jnp.eye(size))
        weights = jax.scipy.linalg.cho_solve((factor, True), data)
        return 0.5 * data @ weights + jnp.log(jnp.diagonal(factor)).sum()

    return function


def attention(x):
    scores = x @ x.T / jnp.sqrt(jnp.asarray(x.shape[-1], x.dtype))
    return jax.nn.softmax(jnp.where(jnp.tri(x.shape[0], dtype=bool), scores, -jnp.inf)) @ x


def recurrent(x):
    step = lambda h, row: (jnp.tanh(0.9 * h + row), h.sum())
    return lax.scan(step, jnp.zeros_like(x[0]), jnp.concatenate([x] * 20))


def loops(x):
    grow = lambda carry: (carry[0] * 1.01 + x[0], carry[1] + 1)
    return lax.while_loop(lambda carry: carry[1] < 50, grow, (x[0], 0))[0]


def newton(x):
    """A loop that ends when it converges to the last bits."""
    target = jnp.abs(x) + 1
    step = lambda c: (0.5 * (c[0] + target / c[0]), c[0])
    unit = 4 * jnp.finfo(x.dtype).eps
    goes_on = lambda c: jnp.any(jnp.abs(c[0] - c[1]) > unit * jnp.abs(c[1]))
    return lax.while_loop(goes_on, step, (target, 2 * target))[0]


MATRIX = np.random.default_rng(1).normal(size=(8, 8))
RIGHT = {
    "softmax_large": lambda x: jax.nn.softmax(1e4 * x),
    "logsumexp_large": lambda x: jax.nn.logsumexp(1e4 * x, axis=0),
    "softmax_sum": lambda x: jax.nn.softmax(x).sum() - 1,
    "cancels": lambda x: (x - x.mean()).sum() + ((x + 1e4) - 1e4),
    "exactly_zero": lambda x: jnp.log(jnp.exp(x)) - x,
    "attention": attention,
    "layer_norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
    "solve": lambda x: jnp.linalg.solve(x, x[0]),
    "hilbert": lambda x: jnp.linalg.solve(x * 0 + 1 / (1 + jnp.arange(8)[:, None] + jnp.arange(8)), x[0]),
    "eigh": lambda x: jnp.linalg.eigh(x @ x.T),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "qr": lambda x: jnp.linalg.qr(x),
    "slogdet": lambda x: jnp.linalg.slogdet(x)[1],
    "complex": lambda x: {"z": jnp.fft.fft(x) * 1j, "log": jnp.log(x + 2j)},
    "irfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
    "sort": lambda x: (jnp.sort(x, axis=None), lax.top_k(x, 2)[0], jnp.argsort(x)),
    "scan": recurrent,
    "while": loops,
    "newton": newton,
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "kinks": lambda x: jax.nn.relu(x) + jnp.abs(x) + jnp.maximum(x, 0.5) + jnp.round(x),
    "special": lambda x: (jax.scipy.special.gammaln(jnp.abs(x) + 1), jax.scipy.special.erfinv(jnp.tanh(x))),
    "large_angle": lambda x: jnp.sin(1e5 * x) + jnp.tan(x),
    "bfloat16": lambda x: attention(x.astype(jnp.bfloat16)).astype(x.dtype),
    "float16": lambda x: recurrent(x.astype(jnp.float16)),
    "checkpoint": jax.checkpoint(attention),
    "nested": jax.jit(lambda x: jax.vmap(jax.jit(jnp.sinh))(x) @ x),
    "gradient": jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) ** 3)),
    "random": lambda x: (
        jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1) + jax.random.normal(jax.random.key(1), x.shape)
    ),
    "tree": lambda x: {"a": (x.sum(), 2), "b": [x[0], None, jnp.arange(3)], "c": 1.5},
    "cumulative": lambda x: (jnp.cumsum(x), jnp.cumprod(x[0])),
    "not_finite": lambda x: jnp.log(x) + jnp.array([jnp.inf] * 8),
    "huge": lambda x: jnp.exp(100 * x) * 1e-30,
    "empty": lambda x: x[:0],
}


@table("name", RIGHT)
def test_rounding_is_not_a_fault(name):
    right(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "hilbert", "eigh", "complex", "newton", "bfloat16"])
def test_rounding_is_not_a_fault_in_double_precision(name):
    with jax.enable_x64(True):
        right(name)


def right(name):
    assert not found_in(RIGHT[name], jnp.asarray(MATRIX))


@pytest.mark.slow
def test_a_large_ill_conditioned_likelihood_has_no_fault_and_shows_one(x64):
    function, point = likelihood(200 if x64 else 521), jnp.array([3.0, 3.0, 1.0, -1.0])
    own, values = values_of(function, point)
    assert not values.disagreements()
    for factor in (1 + small(x64), 1 - small(x64)):
        assert disagreeing(own.plain, [factor * value for value in own.plain], values.noise)


@pytest.mark.slow
@equinox
def test_networks_have_no_fault():
    import equinox as eqx

    for make, shape in (
        (lambda key: eqx.nn.MLP(4, 1, 32, 3, key=key), (4,)),
        (lambda key: (lambda attend: lambda x: attend(x, x, x))(eqx.nn.MultiheadAttention(2, 8, key=key)), (5, 8)),
    ):
        model = make(jax.random.key(0))
        own, values = values_of(model, jax.random.normal(jax.random.key(1), shape))
        assert (values.disagreements(), own.missing) == ([], None)


def test_of_a_program_whose_operations_cannot_be_run_the_units_of_the_array_are_let_pass(monkeypatch):
    def fails(*_):
        raise NotImplementedError

    monkeypatch.setattr(values_module, "rounding_noise", fails)
    own, values = values_of(lambda x: jnp.sin(x) - x, jnp.ones(3))
    assert values.noise() is None
    unit = float(jnp.finfo(own.plain[0].dtype).eps)
    assert not disagreeing(own.plain, [own.plain[0] * (1 + 3 * unit)], values.noise)
    assert disagreeing(own.plain, [own.plain[0] * 1.01], values.noise)


@pytest.mark.slow
def test_each_type_keeps_its_noise(x64):
    moves = {}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        traced = program(lambda x: jnp.exp(x) * 3, jnp.linspace(1, 2, 50, dtype=dtype))
        (noise,) = rounding_noise(traced.jaxpr, traced.leaves)
        moves[dtype] = np.median(noise / np.asarray(traced.outputs(traced.leaves)[0], float)) / float(
            jnp.finfo(dtype).eps
        )
    assert all(0.3 < units < 3 for units in moves.values()), moves


def test_noise_grows_where_numbers_cancel(x64):
    traced = program(lambda x: ((x + 1e3) ** 2 - 1e6) - 2e3 * x, jnp.linspace(0.1, 1, 20))
    unit = float(jnp.finfo(traced.leaves[0].dtype).eps)
    (noise,) = rounding_noise(traced.jaxpr, traced.leaves)
    assert np.all((noise > 1e4 * unit) & (noise < 1e8 * unit))


def test_what_rounds_nothing_has_no_noise(x64):
    traced = program(
        lambda x: (jnp.sort(x)[::-1], jnp.floor(x), -x.reshape(2, 5), jnp.maximum(x, 1)), jnp.linspace(0, 3, 10)
    )
    assert not any(np.any(noise) for noise in rounding_noise(traced.jaxpr, traced.leaves))


@pytest.mark.parametrize(
    "f", [lambda x: x @ x, lambda x: jax.lax.linalg.symmetric_product(x, x)], ids=["matmul", "symmetric_product"]
)
def test_products_round(f):
    traced = program(f, jnp.linspace(0.1, 1, 16).reshape(4, 4))
    (noise,) = rounding_noise(traced.jaxpr, traced.leaves)
    assert np.any(noise)


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([1e-3, 1.0, 1e4]))
def test_the_order_of_a_sum_is_rounding_and_more_is_not(seed, size, spread):
    generator = np.random.default_rng(seed)
    x = jnp.asarray(generator.normal(size=size) * spread ** generator.uniform(size=size), jnp.float32)
    order = generator.permutation(size)
    own, values = values_of(lambda x: sum(x[i] for i in range(size)), x)
    other = sum(x[i] for i in order)
    noise, plain = values.noise, own.plain
    assert not disagreeing(plain, [other], noise)
    beyond = 1e-3 * jnp.max(jnp.abs(x))
    assert disagreeing(plain, [other + beyond], noise)
