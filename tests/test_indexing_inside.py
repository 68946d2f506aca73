"""Consistent indexing inside control flow and custom rules, and what it leaves as it is."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import partgrad as pg
from helpers.flags import flag_set
from helpers.messages import refused
from helpers.tables import table

# Of 32 bits: JAX keeps what it makes of wider NumPy indices when the precision changes.
FAR = np.array([9, 1], np.int32)


def far(x):
    """Reads the last element, then the second."""
    return x[FAR]


@jax.custom_jvp
def with_jvp(x, k):
    return 2 * far(x), k + 1


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), (2 * far(tangents[0]), tangents[1])))


@jax.custom_jvp
def only_its_rule_reads(x):
    return jnp.stack([x[-1], x[1]])


only_its_rule_reads.defjvp(lambda x, t: (only_its_rule_reads(*x), far(t[0])))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_a_static_argument(scale, x):
    return scale * far(x)


with_a_static_argument.defjvp(lambda scale, x, t: (scale * far(x[0]), scale * far(t[0])))


def with_symbolic_zeros(x):
    f = jax.custom_jvp(lambda x, y: far(x) * y)

    def rule(primals, tangents):
        assert isinstance(tangents[1], jax.custom_derivatives.SymbolicZero)
        return f(*primals), far(tangents[0]) * primals[1]

    f.defjvp(rule, symbolic_zeros=True)
    return f(x, 2.0)


SMOOTH = {
    "jit": jax.jit(far),
    "scan": lambda x: lax.scan(
        lambda c, i: (c + x[i + FAR], c * x[i + FAR].sum()), far(x), np.arange(4, dtype=np.int32)
    ),
    "reverse scan": lambda x: lax.scan(lambda c, v: (c + v * far(x), v), far(x), x, reverse=True, unroll=2)[0],
    "scan over scan": lambda x: lax.scan(
        lambda c, _: (lax.scan(lambda d, i: (d * x[i + FAR].sum(), None), c, np.arange(2, dtype=np.int32))[0], c),
        x[0],
        None,
        length=2,
    ),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + x[i + FAR], far(x)),
    "map": lambda x: lax.map(lambda i: x[i + FAR] ** 2, np.arange(3, dtype=np.int32)),
    "cond": lambda x: lax.cond(x[0] > 0, far, lambda x: x[:2], x),
    "cond not taken": lambda x: lax.cond(x[0] < 0, far, lambda x: x[:2] ** 2, x),
    "switch": lambda x: lax.switch(np.int32(1), [lambda x: x[:2], far, lambda x: x[1:]], x),
    "vmap of cond": lambda x: jax.vmap(lambda v: lax.cond(v > 2, lambda: far(x) * v, lambda: far(x)))(x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(far(jnp.sin(x)))),
    "checkpoint with a policy": jax.checkpoint(
        lambda x: jnp.sin(far(jnp.sin(x))), policy=jax.checkpoint_policies.everything_saveable
    ),
    "linear solve": lambda x: lax.custom_linear_solve(
        lambda v: far(x)[0] * v, x, lambda _, b: b / far(x)[0], lambda _, b: b / far(x)[0]
    ),
    "solve": lambda x: jnp.linalg.solve(jnp.diag(x) + far(x)[0], x),
    "custom_jvp": lambda x: with_jvp(x**2, 3)[0],
    "custom_jvp, the rule alone": lambda x: only_its_rule_reads(x**2),
    "custom_jvp in scan": lambda x: lax.scan(lambda c, _: (with_jvp(c, 3)[0][:1] * c, c), x / 9, None, length=2),
    "vmap of custom_jvp": lambda x: jax.vmap(lambda v: with_jvp(v * x, 3)[0])(x),
    "custom_jvp with a static argument": lambda x: with_a_static_argument(3.0, x**2),
    "custom_jvp with symbolic zeros": with_symbolic_zeros,
    "custom_root": lambda x: lax.custom_root(
        lambda v: v**2 - far(x).sum(),
        1.0,
        lambda f, start: lax.fori_loop(0, 20, lambda _, v: v - f(v) / (2 * v), start),
        lambda g, y: y / g(1.0),
    ),
    "derivative": lambda x: jax.jacfwd(lambda x: far(x) ** 3)(x),
    "linear transpose": lambda x: jax.linear_transpose(lambda v: v * far(x)[0], 1.0)(x[0] ** 2),
}


@table("name", SMOOTH)
def test_inside_everything(name):
    with jax.enable_x64(True):
        function, consistent = SMOOTH[name], pg.consistent_indexing(SMOOTH[name])
        x, step = jnp.array([1.5, 2.5, 3.5]), 1e-5
        jax.tree.map(np.testing.assert_array_equal, function(x), consistent(x))

        @jax.jit
        def measure(x):
            central = lambda f: jax.vmap(
                lambda e: jax.tree.map(lambda a, b: (a - b) / (2 * step), f(x + step * e), f(x - step * e)), out_axes=-1
            )(jnp.eye(3))
            reverse = jax.jacrev(consistent)
            return [reverse(x), jax.jacfwd(consistent)(x), central(function)], [
                jax.jacrev(reverse)(x),
                central(reverse),
            ]

        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
        for derivatives in measure(x):
            for other in derivatives[1:]:
                jax.tree.map(close, derivatives[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "vmap of cond", "checkpoint", "custom_jvp"])
def test_under_vmap(name):
    consistent = pg.consistent_indexing(SMOOTH[name])
    batch = jnp.array([[1.5, 2.5, 3.5], [3.5, 1.0, 2.0]])
    slope = jax.jacrev(consistent)
    each, stacked = jax.jit(lambda batch: ([slope(row) for row in batch], jax.vmap(slope)(batch)))(batch)
    jax.tree.map(lambda s, *rows: np.testing.assert_allclose(s, jnp.stack(rows), rtol=1e-5), stacked, *each)


def test_while_forward():
    function = lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].at[9].max(x[0], mode="clip")), (0, x)
    )[1]
    found = jax.jacfwd(pg.consistent_indexing(function))(jnp.array([4.0, 2.0]))
    assert found.tolist() == [[1, 0], [1, 0]]


@pytest.mark.slow
def test_in_shard_map(x64):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    x = jnp.array([1.5, 2.5, 3.5])
    inside = jax.shard_map(pg.consistent_indexing(lambda x: far(x) ** 2), mesh=mesh, in_specs=spec, out_specs=spec)
    outside = pg.consistent_indexing(jax.shard_map(lambda x: far(x) ** 2, mesh=mesh, in_specs=spec, out_specs=spec))
    for function in (inside, outside, jax.jit(outside)):
        assert function(x).tolist() == [3.5**2, 2.5**2]
        assert jax.grad(lambda x: function(x).sum())(x).tolist() == [0, 5, 7]


@pytest.mark.slow
def test_a_backward_function_is_left_alone(x64):
    @jax.custom_vjp
    def f(x, k):
        return 2 * far(x), k

    def backward(residual, cotangents):
        read, _ = residual
        return jnp.zeros(3, read.dtype).at[FAR].add(cotangents[0] * read.sum(), mode="drop"), None

    f.defvjp(lambda x, k: (f(x, k), (far(x) ** 2, k)), backward)
    scalar = lambda x: f(jnp.sin(x), 3)[0].sum()
    consistent = pg.consistent_indexing(scalar)
    x = jnp.array([1.5, 2.5, 3.5])
    assert consistent(x) == scalar(x)
    np.testing.assert_array_equal(jax.grad(consistent)(x), jax.grad(scalar)(x))
    assert jax.grad(consistent)(x)[2] == 0
    # What it computes from was read by the forward function, whose derivative is consistent.
    second, plain = jax.jit(lambda x: [jax.jacrev(jax.grad(f))(x) for f in (consistent, scalar)])(x)
    assert plain[1, 2] == 0
    step = 1e-3
    central = (jax.grad(scalar)(x.at[2].add(step)) - jax.grad(scalar)(x.at[2].add(-step))) / (2 * step)
    np.testing.assert_allclose(second[1, 2], central[1], rtol=1e-2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(consistent)(x)


@pytest.mark.slow
def test_what_a_custom_vjp_closes_over_has_no_derivative(x64):
    """The solver of differential equations has a backward function of its own and closes over the indices."""
    from jax.experimental.ode import odeint

    solve = lambda p: odeint(lambda y, t, p: -p[FAR].sum() * y, jnp.array(1.0), jnp.arange(2.0), p)[-1]
    x = jnp.array([1.5, 2.5, 3.5])
    both = jax.jit(lambda x: [jax.grad(f)(x) for f in (pg.consistent_indexing(solve), solve)])(x)
    np.testing.assert_allclose(*both, rtol=1e-5)


def test_a_custom_vjp_with_symbolic_zeros():
    f = jax.custom_vjp(lambda x, y: far(x) * y)

    def forward(x, y):
        return far(x.value) * y.value, far(x.value)

    f.defvjp(forward, lambda read, ct: (jnp.array([1.0, 2.0, 3.0]) * ct.sum(), None), symbolic_zeros=True)
    assert jax.grad(lambda x: pg.consistent_indexing(f)(x, 2.0).sum())(jnp.arange(3.0)).tolist() == [2, 4, 6]


@jax.custom_jvp
def endless(x, n):
    return jnp.sin(x) + n


endless.defjvp(lambda x, t: (endless(*x), t[0] * endless(x[0], x[1] + 1)))


UNCHANGED = {
    "arithmetic": lambda x: jnp.tanh(x) @ x,
    "slices": lambda x: x[1:] * x[:-1] + x[0],
    "static index": lambda x: x[7] + x[-9],
    "traced scalar index": lambda x: x[jnp.argmax(x) + 4],
    "take": lambda x: jnp.take(x, FAR) + jnp.take(x, FAR, mode="clip"),
    "get": lambda x: x.at[FAR].get(mode="fill", fill_value=2.0) + x.at[FAR].get(mode="clip"),
    "set": lambda x: x.at[FAR].set(2.0).at[FAR].add(1.0, mode="clip").at[FAR].max(x[0]).at[FAR].set(0.0, mode="clip"),
    "multiply": lambda x: x.at[FAR].multiply(2.0, unique_indices=True).at[0].multiply(x[0], mode="clip"),
    "apply": lambda x: x.at[FAR].apply(jnp.sin),
    "integers": lambda x: x * jnp.arange(3)[FAR].sum(),
    "segment_sum": lambda x: jax.ops.segment_sum(x, np.array([0, 7, 1]), 2),
    "dynamic": lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (7,), (2,)), (5,)),
    "vmap of dynamic": lambda x: jax.vmap(lambda i: lax.dynamic_update_slice(x, x[:2], (i,)))(
        np.arange(3, dtype=np.int32)
    ),
    "control flow": lambda x: lax.scan(lambda c, v: (lax.cond(v > 0, jnp.sin, jnp.cos, c * v), c), 1.0, x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * jnp.take(x, i), 1.0),
    "custom rules": lambda x: jax.nn.relu(x) + jax.nn.softplus(x) + jnp.sinc(x) + jnp.logaddexp(x, x),
    "a rule that calls itself": lambda x: endless(x, 1.0),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "custom_root": lambda x: lax.custom_root(lambda v: v - x[0], 1.0, lambda f, v: v - f(v), lambda g, y: y / g(1.0)),
    "random": lambda x: x * jax.random.normal(jax.random.key(0), (3,)),
    "a function of JAX": jax.nn.gelu,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_needs_nothing_is_the_same_equation_for_equation(name):
    function = UNCHANGED[name]
    trace = lambda f: jax.make_jaxpr(f)(jnp.array([1.5, 2.5, 3.5])).pretty_print(source_info=True)
    assert trace(pg.consistent_indexing(function)) == trace(function)


def test_the_rest_of_a_function_is_the_same_equation_for_equation():
    function = lambda x: lax.scan(lambda c, v: (c + jnp.sin(x)[FAR].sum(), v), x[0], x)
    x = jnp.arange(3.0)
    trace = lambda f: jax.make_jaxpr(f)(x).pretty_print(source_info=True)
    changed = trace(pg.consistent_indexing(function))
    assert changed == trace(function).replace("GatherScatterMode.PROMISE_IN_BOUNDS", "GatherScatterMode.CLIP")
    assert changed != trace(function)
    assert trace(pg.consistent_indexing(pg.consistent_indexing(function))) == changed


@pytest.mark.slow
def test_errors_of_jax_stay():
    x = jnp.arange(3.0)
    for mode in ("clip", "drop", "promise_in_bounds"):
        multiply = pg.consistent_indexing(lambda x: x.at[FAR].multiply(x[:2], mode=mode))
        for derivative in (jax.jacfwd, jax.jacrev):
            with pytest.raises(NotImplementedError, match="unique_indices=True"):
                derivative(multiply)(x)
    with pytest.raises(NotImplementedError, match="scatter_apply"):
        jax.jacrev(pg.consistent_indexing(lambda x: x.at[FAR].apply(jnp.sin, mode="promise_in_bounds")))(x)
    with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
        jax.grad(pg.consistent_indexing(lambda i: x[i].sum()))(FAR)

    @jax.custom_jvp
    def refusing(x):
        return far(x)

    @refusing.defjvp
    def _(primals, tangents):
        raise RuntimeError("no derivative")

    consistent = pg.consistent_indexing(refusing)
    np.testing.assert_array_equal(consistent(x), far(x))
    with pytest.raises(RuntimeError, match="no derivative"):
        jax.jacfwd(consistent)(x)


def test_refuses_what_cannot_be_called():
    refused(lambda: pg.consistent_indexing(3.0), TypeError, "`partgrad.consistent_indexing` got float 3.0")


def test_as_a_decorator_of_any_function():
    class Model:
        @pg.consistent_indexing
        def read(self, params, i, *, scale=1, kind="sum", power=None):
            """Reads."""
            assert isinstance(scale, int)
            assert kind == "sum"
            assert power is None
            return {"read": params["w"][i] * scale, "kind": kind}, scale, None, params["n"]

    model = Model()
    assert Model.read.__name__ == "read"
    assert Model.read.__doc__ == "Reads."
    assert list(inspect.signature(Model.read).parameters) == ["self", "params", "i", "scale", "kind", "power"]
    params = {"w": jnp.arange(3.0), "n": 7}
    outputs, scale, nothing, n = model.read(params, FAR, scale=2)
    assert (outputs["kind"], scale, nothing, n) == ("sum", 2, None, 7)
    assert type(scale) is type(n) is int
    assert outputs["read"].tolist() == [4, 2]
    gradient = jax.grad(lambda w: model.read({"w": w, "n": 7}, FAR, scale=2)[0]["read"].sum())(params["w"])
    assert gradient.tolist() == [0, 2, 2]
    gradient = pg.grad(lambda p: model.read(p, FAR, scale=2)[0]["read"].sum(), wrt="w")(params)
    assert gradient.tolist() == [0, 2, 2]


@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_of_a_model_with_marks():
    @pg.dataclass
    class Table:
        values: jax.Array
        offset: jax.Array = pg.field(nondiff=True)

        def __call__(self, i):
            return (self.values[i] + self.offset[i]).sum()

    table = Table(jnp.arange(3.0), jnp.ones(3))
    function = pg.consistent_indexing(lambda table: table(FAR))
    gradient = pg.grad(function)(table)
    assert gradient.values.tolist() == [0, 1, 1]
    assert pg.grad(function, wrt="offset")(table).tolist() == [0, 1, 1]
    # The model itself, with parameters that are being differentiated.
    assert jax.grad(lambda v: pg.consistent_indexing(Table(v, v))(FAR))(jnp.arange(3.0)).tolist() == [0, 1, 1]


def test_a_function_runs_once_for_each_call_and_follows_what_it_closes_over():
    calls = []

    @pg.consistent_indexing
    def read(x, n=1):
        calls.append(n)
        return x[FAR] * n

    for x in (jnp.arange(3.0), jnp.ones(3)):
        jax.grad(lambda x: read(x).sum())(x)
    assert calls == [1, 1]
    jax.grad(lambda x: read(x, 2).sum())(x)
    assert calls == [1, 1, 2]
    gradient = jax.jit(jax.grad(lambda x: read(x, 3).sum()))
    assert gradient(x).tolist() == gradient(x).tolist() == [0, 3, 3]
    assert calls == [1, 1, 2, 3]
    assert read(x).tolist() == far(x).tolist()

    def outer(y):
        return pg.consistent_indexing(lambda x: far(x * y))(y).sum()

    assert jax.grad(outer)(jnp.arange(3.0)).tolist() == [0, 2, 4]
    assert jax.jit(jax.hessian(outer))(jnp.arange(3.0)).tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3"])
def test_opt_in_flags_of_jax(flag):
    """They make checkpoints and custom rules primitives of another kind, for `unused=` too."""
    with flag_set(flag):
        gradient = gradient_of_a_checkpoint_and_a_rule()
    np.testing.assert_allclose(gradient["x"], [0, 4 * np.cos(0.25), 4 * np.cos(1.0)], rtol=1e-6)
    assert gradient["not"] is None


def gradient_of_a_checkpoint_and_a_rule():
    doubled = jax.custom_vjp(lambda x: 2 * x)
    doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))

    def function(p):
        return jax.checkpoint(lambda x: jnp.sin(x)[FAR].sum())(p["x"]) * doubled(p["scale"])

    given = {"x": jnp.array([0.5, 0.25, 1.0]), "scale": 2.0, "not": 3.0}
    return pg.grad(pg.consistent_indexing(function), unused="none")(given)


@pytest.mark.slow
def test_what_a_function_captures_is_read_afresh():
    state = {"far": FAR}
    read = pg.consistent_indexing(lambda x: x[state["far"]].sum())
    x = jnp.arange(3.0)
    assert jax.grad(read)(x).tolist() == [0, 1, 1]
    state["far"] = jnp.array([7, 8, 9])
    assert jax.grad(read)(x).tolist() == [0, 0, 3]
    compiled = jax.jit(jax.grad(read))
    assert compiled(x).tolist() == [0, 0, 3]
    state["far"] = FAR
    assert compiled(x).tolist() == [0, 0, 3]


@pytest.mark.slow
def test_of_derivatives():
    """A gradient that JAX computes without consistency is a function like any other; its own derivative agrees."""
    x = jnp.array([1.0, 2.0, 3.0])
    gradient = jax.grad(lambda x: (far(x) ** 3).sum())
    assert gradient(x).tolist() == [0, 12, 0]
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert jacobian(pg.consistent_indexing(gradient))(x).tolist() == [[0, 0, 0], [0, 12, 0], [0, 0, 0]]
    consistent = pg.consistent_indexing(lambda x: (far(x) ** 3).sum())
    assert jax.hessian(consistent)(x).tolist() == [[0, 0, 0], [0, 12, 0], [0, 0, 18]]
    assert pg.hessian(consistent)(x).tolist() == [[0, 0, 0], [0, 12, 0], [0, 0, 18]]
    value, linear = jax.linearize(consistent, x)
    assert (value, linear(jnp.ones(3))) == (35, 39)


def holding(kind, k):
    if kind == "argument":
        f = jax.custom_jvp(lambda k, x: k * jnp.log(x), nondiff_argnums=(0,))
        f.defjvp(lambda k, primals, tangents: (k * jnp.log(primals[0]), k * tangents[0] / primals[0]))
        return lambda x: f(k, x)
    if kind == "custom_jvp":
        f = jax.custom_jvp(lambda x: k * jnp.log(x))
        f.defjvp(lambda primals, tangents: (k * jnp.log(primals[0]), k * tangents[0] / primals[0]))
        return f
    f = jax.custom_vjp(lambda x: k * jnp.log(x))
    f.defvjp(lambda x: (k * jnp.log(x), x), lambda x, cotangent: (k * cotangent / x,))
    return f


HELD = {"integer": lambda x: 1 + jnp.argmax(x), "float": lambda x: lax.stop_gradient(x[1]), "bool": lambda x: x[1] > 0}
JACOBIANS = [jax.jacrev, jax.jacfwd]


@pytest.mark.slow
@table("held, kind, reads", HELD, ["argument", "custom_jvp", "custom_vjp"], [False, True], quick=1)
def test_a_rule_that_holds_a_traced_value(held, kind, reads):
    def program(own, read):
        return lambda x: jnp.sum(own(HELD[held](x))(x)) * (read(x)[0] if reads else x[0])

    x = jnp.array([1.5, 2.5, 3.5])
    clamped = lambda x: jnp.take(x, FAR, mode="clip")
    ours = pg.consistent_indexing(program(lambda k: holding(kind, k), far))
    expected = program(lambda k: lambda x: k * jnp.log(x), clamped)
    if kind == "custom_vjp" and reads:
        with pytest.raises(pg.errors.ArgumentError, match="make what the rule closes over an argument"):
            jax.grad(ours)(x)
        return
    inner = JACOBIANS if kind != "custom_vjp" else [jax.jacrev]
    twice = [lambda f, o=outer, i=i: o(i(f)) for outer, i in itertools.product(JACOBIANS, inner)]
    both = jax.jit(lambda x: [[order(f)(x) for order in (*inner, *twice)] for f in (ours, expected)])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), *both(x))
