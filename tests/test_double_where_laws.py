"""Laws of `double_where` over random programs, at inputs with zeros, ones, ties and tiny numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax

import partgrad as pg
from tiers import examples

SIZE = 4
MATRIX = np.array([[1.0, 0.0, -2.0, 0.5], [0.0, 0.0, 1.0, 0.0], [3.0, -1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
WEIGHTS = np.array([1.0, -2.0, 0.0, 0.5])
INDICES = np.array([2, 0, 2, 3])
BEYOND = np.array([2, 0, 7, 1])


def spread(number):
    return jnp.broadcast_to(number, (SIZE,))


# Each maps a vector to a vector, lane by lane.
LANES = {
    "sin": jnp.sin,
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "neg": lambda a: -a,
    "add one": lambda a: a + 1.0,
    "times zero": lambda a: a * 0.0,
    "times": lambda a: a * WEIGHTS,
    "square": lambda a: a * a,
    "abs": jnp.abs,
    "sqrt": jnp.sqrt,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "reciprocal": lambda a: 1.0 / a,
    "power": lambda a: a**0.5,
    "cbrt": jnp.cbrt,
    "arccos": jnp.arccos,
    "arctanh": jnp.arctanh,
    "xlogy": lambda a: jax.scipy.special.xlogy(a, a),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "positive log": lambda a: jnp.where(a > 0, jnp.log(a), 0.0),
    "sqrt of positive": lambda a: jnp.where(a > 0.5, jnp.sqrt(a), a),
    "sinc": lambda a: jnp.where(a == 0, 1.0, jnp.sin(a) / a),
    "three cases": lambda a: lax.select_n((a > 0).astype(int) + (a > 0.5), a, jnp.sqrt(a), 1.0 / a),
    "clip": lambda a: jnp.clip(a, -0.5, 0.5),
    "integer": lambda a: jnp.floor(a).astype(int) * a,
    "stop": lax.stop_gradient,
}
MOVES = {
    "flip": lambda a: jnp.flip(a),
    "roll": lambda a: jnp.roll(a, 1),
    "slice": lambda a: jnp.concatenate([a[2:], a[:2] * 2.0]),
    "drop": lambda a: jnp.concatenate([a[1:3], a[1:3]]),
    "pad": lambda a: jnp.pad(a[1:3], (1, 1)),
    "pad within": lambda a: lax.pad(a[:2], jnp.float64(0.5), [(0, 1, 1)]),
    "gather": lambda a: a[INDICES],
    "gather from order": lambda a: a[jnp.argsort(-a)],
    "fill": lambda a: a.at[jnp.array([0, 5, 1, 2])].get(mode="fill", fill_value=1.0),
    "dynamic": lambda a: lax.dynamic_update_slice(a, a[2:3], (jnp.argmax(a),)),
    "set constant": lambda a: a.at[1].set(0.5),
    "set": lambda a: a.at[INDICES[1:]].set(jnp.log(a[:3])),
    "add at": lambda a: a.at[INDICES].add(a),
    "drop out of bounds": lambda a: a.at[jnp.array([1, 9])].set(a[:2], mode="drop"),
    "matmul": lambda a: jnp.asarray(MATRIX) @ a,
    "grid": lambda a: (a.reshape(2, 2) @ a.reshape(2, 2).T).ravel(),
    "transpose": lambda a: a.reshape(2, 2).T.ravel(),
    "cumsum": lambda a: jnp.cumsum(a),
    "sum": lambda a: spread(a.sum()),
    "mean": lambda a: a - a.mean(),
    "norm": lambda a: spread(jnp.linalg.norm(a)),
    "deviation": lambda a: spread(jnp.std(a)),
    "masked sum": lambda a: spread(jnp.sum(a, where=a > 0)),
    "convolve": lambda a: jnp.convolve(a, a[1:], mode="same"),
    "triangular": lambda a: jnp.tril(a.reshape(2, 2)).ravel(),
    "window": lambda a: lax.reduce_window(a, 0.0, lax.add, (2,), (1,), "SAME"),
    "tile": lambda a: jnp.tile(a[:2], 2),
    "clipped read": lambda a: a.at[BEYOND].get(mode="clip"),
    "clipped set": lambda a: a.at[BEYOND[1:]].set(2.0 * a[:3], mode="clip"),
    "promised read": lambda a: a.at[BEYOND].get(mode="promise_in_bounds", wrap_negative_indices=False),
    "promised add": lambda a: a.at[BEYOND].add(jnp.log(a), mode="promise_in_bounds"),
    "promised set": lambda a: a.at[BEYOND].set(jnp.sqrt(a), mode="promise_in_bounds", unique_indices=True),
}
COMPETITIONS = {
    "sort": lambda a: jnp.sort(a),
    "top k": lambda a: jnp.pad(lax.top_k(a, 2)[0], (1, 1)),
    "cummax": lambda a: lax.cummax(a, axis=0),
    "max": lambda a: spread(a.max()),
    "min of two": lambda a: a.reshape(2, 2).min(0)[jnp.array([0, 1, 0, 1])],
    "prod": lambda a: spread(jnp.prod(a)),
    "cumprod": lambda a: jnp.cumprod(a),
    "logsumexp": lambda a: a - jax.scipy.special.logsumexp(a),
    "softmax": lambda a: jax.nn.softmax(a),
    "median": lambda a: spread(jnp.median(a)),
    "max window": lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (2,), (1,), "SAME"),
}
PAIRS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "arctan2": jnp.arctan2,
    "hypot": jnp.hypot,
    "pow": lambda a, b: jnp.abs(a) ** b,
    "where": lambda a, b: jnp.where(a > b, a, b * 2.0),
    "where positive": lambda a, b: jnp.where(a > 0, b, a),
    "safe division": lambda a, b: jnp.where(b == 0, 0.0, a / b),
    "dot": lambda a, b: spread(a @ b),
    "outer": lambda a, b: jnp.outer(a, b).sum(0),
    "set from": lambda a, b: a.at[1:3].set(b[:2]),
    "multiply at": lambda a, b: a.at[jnp.array([0, 2])].multiply(b[:2], unique_indices=True),
    "promised multiply": lambda a, b: a.at[BEYOND].multiply(b, mode="promise_in_bounds", unique_indices=True),
    "concatenate": lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    "choose": lambda a, b: lax.cond(a[0] > b[1], lambda: jnp.sqrt(a), lambda: jnp.log(b)),
}
COMPETING_PAIRS = {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "max at": lambda a, b: a.at[INDICES].max(b),
    "dropped min at": lambda a, b: a.at[BEYOND].min(b, mode="drop"),
    "clamp": lambda a, b: lax.clamp(-0.5, a, b),
    "fmax": jnp.fmax,
}


def looped(f):
    """A scan that carries, stacks and reads what is scanned."""
    return lambda a: sum(lax.scan(lambda c, x: (f(c) + x, f(c * x)[0]), a, a))


def carried(f):
    """A scan that overwrites what it carries at some steps."""
    step = lambda c, x: (jnp.where(x > 0, f(c), x), None)
    return lambda a: lax.scan(step, a, a)[0]


def counted(f):
    return lambda a: lax.fori_loop(0, 2, lambda i, c: jnp.where(i == 0, f(c), c), a)


def custom_jvp(f):
    """The derivative of a custom rule is the user's: that of the same function."""
    function = jax.custom_jvp(f)
    function.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return lambda *operands: function(*operands)


def custom_vjp(f):
    function = jax.custom_vjp(f)
    function.defvjp(lambda *operands: jax.vjp(f, *operands), lambda pull, cotangent: pull(cotangent))
    return lambda *operands: function(*operands)


def beside_an_integer(f):
    """A custom rule with a result that has no derivative, in a loop that carries it."""
    count = jax.custom_vjp(lambda i, a: (f(a), i + 1))
    forward = lambda i, a: ((f(a), i + 1), a)
    count.defvjp(forward, lambda a, cotangents: (None, *jax.vjp(f, a)[1](cotangents[0])))
    return lambda a: lax.fori_loop(0, 1, lambda _, carry: count(carry[1], carry[0]), (a, 0))[0]


def sharded(f):
    whole = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole)


WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda a: jax.vmap(f)(jnp.stack([a, a[::-1]])).sum(0),
    "batched cond": lambda f: lambda a: jax.vmap(lambda x: lax.cond(x > 0, lambda: f(spread(x))[0], lambda: x))(a),
    "cond": lambda f: lambda a: lax.cond(a[0] > 0, f, lambda b: b * 2.0, a),
    "switch": lambda f: lambda a: lax.switch((a[1] > 0).astype(int) + (a[2] > 0), [f, jnp.sqrt, jnp.sin], a),
    "scan": looped,
    "carried": carried,
    "counted": counted,
    "custom jvp": custom_jvp,
    "custom vjp": custom_vjp,
    "integer": beside_an_integer,
    "shard map": sharded,
}
# They may not close over what is differentiated.
CUSTOM = {"custom jvp", "custom vjp"}
# Custom backward passes have no forward mode.
REVERSE_ONLY = {"custom vjp", "integer"}
ONE = {**LANES, **MOVES, **COMPETITIONS}
TWO = {**PAIRS, **COMPETING_PAIRS}
COMPETING = {*COMPETITIONS, *COMPETING_PAIRS, "clip", "relu", "dynamic"}
ENDS = {
    "sum": jnp.sum,
    "first": lambda a: a[0],
    "weights": lambda a: a @ WEIGHTS,
    "positive": lambda a: jnp.sum(a, where=a > 0),
    "finite": lambda a: jnp.sum(jnp.where(jnp.isfinite(a), a, 0.0)),
}


def _with_second(operation, second, first):
    return operation(first, second)


def program(steps, end):
    """A function of a vector from its steps, each of which reads results of earlier ones."""

    def function(x):
        values = [x]
        for name, wrapper, first, second in steps:
            read = lambda number: values[-1 - number % len(values)]
            operation, wrapped, operands = {**ONE, **TWO}[name], WRAPPERS[wrapper], [read(first)]
            if name in TWO and wrapper in CUSTOM:
                operands.append(read(second))
            elif name in TWO:
                operation = functools.partial(_with_second, operation, read(second))
            values.append(wrapped(operation)(*operands))
        return ENDS[end](values[-1])

    return function


NUMBERS = [0.0, 0.0, 1.0, 1.0, -1.0, 0.5, 0.5, -0.5, 2.0, 1e-9, 0.3, -1.7]
WRAPPER_NAMES = [*["plain"] * 8, *WRAPPERS]
steps = st.lists(
    st.tuples(st.sampled_from([*ONE, *TWO]), st.sampled_from(WRAPPER_NAMES), st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=5,
)
points = st.lists(st.sampled_from(NUMBERS), min_size=SIZE, max_size=SIZE)


# Both modes cancel 1e9 against 1e9 in other ways.
tame_points = st.lists(st.sampled_from([number for number in NUMBERS if number != 1e-9]), min_size=SIZE, max_size=SIZE)


def has_forward_mode(steps):
    return all(wrapper not in REVERSE_ONLY for _, wrapper, _, _ in steps)


def has_one_derivative(steps):
    """Whether JAX's two modes agree: out of bounds they do not."""
    return not any(name.startswith("promised") for name, _, _, _ in steps)


def assert_unchanged(found, expected, relative=1e-9, absolute=1e-13):
    """What is finite in JAX's is the same; what is rounded differs by no more than a part of the largest."""
    found, expected = np.asarray(found), np.asarray(expected)
    finite = np.isfinite(expected)
    scale = np.abs(expected[finite]).max(initial=0.0)
    # A sum that cancels leaves rounding of its summands.
    np.testing.assert_allclose(found[finite], expected[finite], rtol=relative, atol=relative * scale + absolute)


def assert_agree(found, expected):
    """Equal where both are finite."""
    found = np.asarray(found)
    assert_unchanged(np.where(np.isfinite(found), found, expected), expected, 1e-7, 1e-6)


def is_tame(steps, x):
    """Whether no intermediate number is so large that rounding decides what is left of it."""
    values = []
    for length in range(1, len(steps) + 1):
        values.append(jax.jacfwd(program(steps[:length], "sum"))(x))
        values.append(program(steps[:length], "sum")(x))
    return all(np.all(~np.isfinite(v) | (np.abs(v) < 1e6)) for v in values)


def check_finite_is_unchanged(steps, end, x):
    f = program(steps, end)
    value, expected = jax.value_and_grad(f)(x)
    found_value, found = jax.value_and_grad(pg.double_where(f))(x)
    assert_unchanged(found, expected)
    # JAX itself has other last bits of some values, a product's for one, when it differentiates.
    assert np.asarray(found_value).tobytes() in (np.asarray(value).tobytes(), np.asarray(f(x)).tobytes())
    return found


def check_forward(steps, end, x):
    f = program(steps, end)
    if not has_forward_mode(steps) or not is_tame(steps, x):
        return
    g = pg.double_where(f)
    found, plain, forward = jax.grad(g)(x), jax.jacfwd(f)(x), jax.jacfwd(g)(x)
    assert_unchanged(forward, plain, 1e-7, 1e-6)
    if not has_one_derivative(steps):
        return
    assert_agree(found, forward)
    if not any(name in COMPETING for name, _, _, _ in steps):
        assert_unchanged(found, plain, 1e-7, 1e-6)


def check_transformed(steps, end, x):
    f = program(steps, end)
    gradient = jax.grad(pg.double_where(f))
    found = gradient(x)
    points = jnp.stack([x, x[::-1]])
    batched = jax.vmap(gradient)(points)
    plain = jax.grad(f)
    for of_batch, alone, point in zip(batched, (found, gradient(points[1])), points, strict=True):
        if has_forward_mode(steps) and is_tame(steps, point):
            assert_agree(of_batch, alone)
    compiled = jax.jit(plain)(x)
    assert_unchanged(jax.jit(gradient)(x), compiled, 1e-7, 1e-6)


@settings(max_examples=examples(60))
@given(steps, st.sampled_from(list(ENDS)), points)
def test_what_is_finite_is_unchanged_and_values_are_bit_equal(steps, end, x):
    with jax.enable_x64(True):
        check_finite_is_unchanged(steps, end, jnp.array(x))


@settings(max_examples=examples(15))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_reverse_is_forward(steps, end, x):
    with jax.enable_x64(True):
        check_forward(steps, end, jnp.array(x))


@settings(max_examples=examples(6))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_transforms_commute(steps, end, x):
    with jax.enable_x64(True):
        check_transformed(steps, end, jnp.array(x))


def check_second(steps, end, x):
    f = program(steps, end)
    if not has_forward_mode(steps) or not is_tame(steps, x):
        return
    for outer in (jax.jacrev, jax.jacfwd):
        expected = outer(jax.grad(f))(x)
        if np.all(~np.isfinite(expected) | (np.abs(expected) < 1e6)):
            assert_unchanged(outer(jax.grad(pg.double_where(f)))(x), expected, 1e-7, 1e-6)


@settings(max_examples=examples(24))
@given(steps, st.sampled_from(list(ENDS)), tame_points)
def test_second_derivatives_are_unchanged(steps, end, x):
    with jax.enable_x64(True):
        check_second(steps, end, jnp.array(x))


def test_a_numpy_constant_in_a_jitted_product():
    f = jax.jit(lambda x: np.eye(2) @ x)
    np.testing.assert_array_equal(jax.jacrev(pg.double_where(f))(jnp.ones(2)), np.eye(2))
