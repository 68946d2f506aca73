"""Layers that are stacked for a scan, of which some are selected: the gradient is that of all layers, sliced."""

import importlib
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import partgrad as pg
from helpers.tables import examples, in_turn, table

sys.path.append(str(pathlib.Path(__file__).parent.parent))

LENGTH, WIDTH = 6, 3
KEY = jax.random.key(0)
LAYERS = {
    "w": jax.random.normal(KEY, (LENGTH, WIDTH, WIDTH)) / 2,
    "b": jax.random.normal(KEY, (LENGTH, WIDTH)),
}
X = jnp.arange(1.0, 1.0 + WIDTH) / WIDTH
LAST = slice(4, 6)


def step(h, layer):
    return jnp.tanh(h @ layer["w"] + layer["b"]), h.sum()


def loss(layers, x):
    h, seen = lax.scan(step, x, layers)
    return h.sum() + (seen**2).sum()


def scans(function, *args):
    """How many loops a gradient has."""
    return str(jax.make_jaxpr(function)(*args)).count("scan[")


def close(got, expected, bound=3e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=bound, atol=bound), got, expected)


def cut(tree, own=LAST):
    return jax.tree.map(lambda leaf: leaf[own], tree)


# --- the law ---------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    """A loss of stacked layers with everything that a scan may have, and ranges of two of its leaves."""
    length = draw(st.integers(1, 7))
    start = st.integers(0, length - 1)
    ranges = [slice(own, draw(st.integers(own + 1, length))) for own in (draw(start), draw(start))]
    is_reversed, unroll = draw(st.booleans()), draw(st.sampled_from([1, 2, 5, True]))
    checkpointed, depends = draw(st.booleans()), draw(st.sampled_from([None, "carry", "regulariser", "outer scan"]))
    wrapped = draw(st.sampled_from([lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))]))
    own_step = jax.checkpoint(step) if checkpointed else step

    def of_layers(layers, x):
        start = x + (jnp.sin(layers["w"][0]).sum() if depends == "carry" else 0)
        scan = lambda x: lax.scan(own_step, x, layers, reverse=is_reversed, unroll=unroll)
        if depends == "outer scan":
            h, seen = lax.scan(lambda h, t: scan(h + t), start, jnp.arange(3.0))
        else:
            h, seen = scan(start)
        added = (layers["w"] ** 2).sum() if depends == "regulariser" else 0
        return h.sum() + (seen**2).sum() + added

    return length, ranges, wrapped(of_layers)


@pytest.mark.slow
@settings(max_examples=examples(10))
@given(programs(), st.booleans(), st.booleans())
def test_the_gradient_is_that_of_all_layers_sliced(program, double_where, compiled):
    length, ranges, function = program
    layers = jax.tree.map(lambda leaf: jnp.tile(leaf, (2, *[1] * (leaf.ndim - 1)))[:length], LAYERS)
    gradient = pg.grad(
        function, wrt=lambda m: {"w": m["w"][ranges[0]], "b": m["b"][ranges[1]]}, double_where=double_where
    )
    found = (jax.jit(gradient) if compiled else gradient)(layers, X)
    all_of_them = jax.grad(function)(layers, X)
    close(found, {"w": all_of_them["w"][ranges[0]], "b": all_of_them["b"][ranges[1]]}, 2e-5)


# --- where the scan is ----------------------------------------------------------------------------------------------


def _in_shard_map(layers, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    own = jax.shard_map(
        lambda x: lax.scan(step, x, layers)[0], mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    return own(x).sum()


def _in_outer_scan(layers, x):
    return lax.scan(lambda h, t: (lax.scan(step, h + t, layers)[0], None), x, jnp.arange(3.0))[0].sum()


def _with_keys(layers, x):
    def noisy(h, own):
        layer, key, number = own
        return step(h, layer)[0] + jax.random.normal(key, h.shape) * number, key

    return lax.scan(noisy, x, (layers, jax.random.split(KEY, LENGTH), jnp.arange(LENGTH)))[0].sum()


def _cast(layers, x):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layers)
    return lax.scan(step, x.astype(jnp.bfloat16), half)[0].sum().astype(jnp.float32)


SPLIT = {
    "a scan": loss,
    "reversed": lambda layers, x: lax.scan(step, x, layers, reverse=True)[0].sum(),
    "unrolled": lambda layers, x: lax.scan(step, x, layers, unroll=4)[0].sum(),
    "a checkpoint around the body": lambda layers, x: lax.scan(jax.checkpoint(step), x, layers)[0].sum(),
    "a checkpoint around it": jax.checkpoint(loss),
    "jit": jax.jit(loss),
    "jit that closes over them": lambda layers, x: jax.jit(lambda x: loss(layers, x))(x),
    "a scan around it": _in_outer_scan,
    "a scan around it under jit": jax.jit(_in_outer_scan),
    "a branch": lambda layers, x: lax.cond(x.sum() > 0, loss, lambda layers, x: layers["w"].sum(), layers, x),
    "vmap": lambda layers, x: jax.vmap(loss, (None, 0))(layers, jnp.stack([x, 2 * x])).sum(),
    "lax.map": lambda layers, x: lax.map(lambda layer: (x @ layer["w"]).sum() ** 2, layers).sum(),
    "the gradient of an input": lambda layers, x: (jax.grad(loss, 1)(layers, x) ** 2).sum(),
    "shard_map": _in_shard_map,
    "keys and numbers": _with_keys,
    "a cast": _cast,
    "a cast under jit": jax.jit(_cast),
    "read whole too": lambda layers, x: loss(layers, x) + jnp.sin(layers["w"]).sum(),
}


@table("name, double_where", SPLIT, [False, True], quick=0, most=1, kind=lambda name, double_where: name)
def test_the_scan_is_split_wherever_it_is(name, double_where):
    function = SPLIT[name]
    gradient = pg.grad(function, wrt="**[4:]", double_where=double_where)
    bound = 3e-2 if "cast" in name else 3e-6
    expected = cut(jax.jit(jax.grad(function))(LAYERS, X))
    close(gradient(LAYERS, X), expected, bound)
    close(jax.jit(gradient)(LAYERS, X), expected, bound)
    assert scans(gradient, LAYERS, X) > scans(jax.grad(function), LAYERS, X)


def _custom(layers, x):
    own = jax.custom_vjp(loss)
    own.defvjp(
        lambda layers, x: (loss(layers, x), (layers, x)),
        lambda kept, ct: jax.tree.map(lambda g: ct * g, jax.grad(loss, (0, 1))(*kept)),
    )
    return own(layers, x)


LEFT = {
    "computed": (lambda layers, x: loss(jax.tree.map(jnp.sin, layers), x), "**[4:]"),
    "no scan": (lambda layers, x: lax.fori_loop(0, LENGTH, lambda i, h: step(h, cut(layers, i))[0], x).sum(), "**[4:]"),
    "a custom rule around it": (_custom, "**[4:]"),
    "all steps": (loss, "**[0:]"),
    "a traced range": (loss, lambda layers: layers["w"][jnp.array([4, 5])]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_elsewhere_nothing_changes(name):
    function, wrt = LEFT[name]
    assert scans(pg.grad(function, wrt=wrt), LAYERS, X) <= scans(jax.grad(function), LAYERS, X)
    close(jax.tree.leaves(pg.grad(function, wrt=wrt)(LAYERS, X))[-1][-1], jax.grad(function)(LAYERS, X)["w"][-1])


def test_few_other_steps_are_not_worth_a_copy_of_what_else_is_read():
    inputs = jnp.ones((LENGTH, 50))
    function = lambda b, inputs: lax.scan(lambda h, own: (h * own[0] + own[1].sum(), None), 1.0, (b, inputs))[0]
    b = jnp.arange(1.0, 7.0)
    assert scans(pg.grad(function, wrt=lambda b: b[1:]), b, inputs) == scans(jax.grad(function), b, inputs)
    assert scans(pg.grad(function, wrt=lambda b: b[5:]), b, inputs) > scans(jax.grad(function), b, inputs)


# --- what is selected -----------------------------------------------------------------------------------------------

SELECTED = {
    "one step": lambda m: m["w"][5],
    "one number": lambda m: m["w"][5, 0, 1],
    "a column of some steps": lambda m: m["w"][3:5, :, 1],
    "several ranges": lambda m: (m["w"][0], m["w"][4:], m["b"][3]),
    "steps one by one": lambda m: m["w"][np.array([1, 3, 4])],
    "steps in another order": lambda m: m["w"][np.array([4, 3])],
    "a dict": lambda m: jax.tree.map(lambda leaf: leaf[2:4], {"w": m["w"], "b": m["b"]}),
}


@table("name, double_where", in_turn(SELECTED, [False, True]), quick=0)
def test_any_selection_within_some_steps(name, double_where):
    wrt = SELECTED[name]
    gradient = pg.grad(loss, wrt=wrt, double_where=double_where)
    close(gradient(LAYERS, X), wrt(jax.jit(jax.grad(loss))(LAYERS, X)))
    assert scans(gradient, LAYERS, X) > 2


@pytest.mark.slow
def test_groups_and_another_argument():
    found = pg.grad(
        lambda layers, scale, x: loss(layers, x) * scale, wrt=({"a": "w[4:]", "b": "b[:2]"}, None), argnums=(0, 1)
    )
    expected = jax.grad(lambda layers, scale, x: loss(layers, x) * scale, (0, 1))(LAYERS, 2.0, X)
    close(found(LAYERS, 2.0, X), ({"a": expected[0]["w"][4:], "b": expected[0]["b"][:2]}, expected[1]))


# --- models ---------------------------------------------------------------------------------------------------------


class OfEquinox(eqx.Module):
    w: jax.Array
    b: jax.Array

    def __check_init__(self):
        assert self.w.ndim == 3

    def __call__(self, x):
        arrays, rest = eqx.partition(self, eqx.is_array)

        def own(h, layer):
            layer = eqx.combine(layer, rest)
            return jnp.tanh(h @ layer.w + layer.b), None

        return lax.scan(own, x, arrays)[0].sum()


class OfNnx(nnx.Module):
    def __init__(self, w, b):
        self.w, self.b, self.calls = nnx.Param(w), nnx.Param(b), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return lax.scan(step, x, {"w": self.w[...], "b": self.b[...]})[0].sum()


@pg.dataclass
class OfPartgrad:
    w: jax.Array
    b: jax.Array = pg.field(nondiff=True)

    def __call__(self, x):
        return lax.scan(lambda h, layer: (jnp.tanh(h @ layer.w + layer.b), None), x, self)[0].sum()


@table("kind, double_where, name", [OfEquinox, OfNnx, OfPartgrad], [False, True], ["w", "b"], quick=0, most=6)
def test_modules(kind, double_where, name):
    model, function = kind(**LAYERS), lambda model, x: model(x)
    gradient = pg.grad(function, wrt=lambda m: getattr(m, name)[4:], double_where=double_where)
    by_hand = lambda layers, x: lax.scan(step, x, layers)[0].sum()
    expected = jax.jit(jax.grad(by_hand))(LAYERS, X)[name][4:]
    close(gradient(model, X), expected)
    assert scans(gradient, model, X) == 3
    if kind is OfNnx:
        assert model.calls[...] == 1


# --- with the other options and transforms --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("double_where", [False, True])
def test_transforms(double_where):
    options = {"wrt": "w[4:]", "double_where": double_where}
    expected = jax.jit(jax.grad(loss))(LAYERS, X)["w"][4:]
    value, gradient = pg.value_and_grad(loss, **options)(LAYERS, X)
    close((value, gradient), (loss(LAYERS, X), expected))
    value, pull = pg.vjp(loss, LAYERS, X, **options)
    close((value, *pull(1.0)), (loss(LAYERS, X), expected))
    along = jnp.ones_like(expected)
    close(pg.linearize(loss, LAYERS, X, **options)[1](along), expected.sum(), 1e-5)
    close(pg.jvp(loss, (LAYERS, X), (along,), **options)[1], expected.sum(), 1e-5)
    rows = lambda f, **own: pg.hessian(f, **own)(LAYERS, X)
    at = lambda w: loss({**LAYERS, "w": LAYERS["w"].at[5, 0].set(w)}, X)
    close(rows(loss, wrt="w[5,0]", double_where=double_where), jax.jit(jax.hessian(at))(LAYERS["w"][5, 0]), 1e-5)


@pytest.mark.slow
def test_a_derivative_of_the_gradient_with_respect_to_all_layers():
    of_some = lambda layers: (pg.grad(loss, wrt="w[4:]")(layers, X) ** 2).sum()
    of_all = lambda layers: (jax.grad(loss)(layers, X)["w"][4:] ** 2).sum()
    for wrapped in (lambda f: f, jax.jit):
        close(jax.grad(wrapped(of_some))(LAYERS), jax.jit(jax.grad(of_all))(LAYERS), 1e-5)


@pytest.mark.slow
def test_a_gradient_of_some_layers_inside():
    of_some = lambda layers: (pg.grad(loss, wrt="w[5]")(layers, X) ** 2).sum()
    of_all = lambda layers: (jax.grad(loss)(layers, X)["w"][5] ** 2).sum()
    close(pg.grad(of_some, wrt="**[4:]")(LAYERS), cut(jax.jit(jax.grad(of_all))(LAYERS)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("double_where", [False, True])
def test_a_model_that_is_returned(double_where):
    model = OfPartgrad(**LAYERS)
    with_aux = lambda model, x: (model(x), model)
    _, aux = pg.grad(with_aux, wrt=lambda m: m.b[4:], has_aux=True, double_where=double_where)(model, X)
    close(aux, model)
    _, aux = jax.jit(pg.grad(with_aux, wrt="w[4:]", has_aux=True, double_where=double_where))(model, X)
    close(aux, model)


@pytest.mark.slow
def test_options():
    with_aux = lambda layers, x: (loss(layers, x), {"w": layers["w"], "half": layers["b"].astype(jnp.bfloat16), "n": 1})
    gradient, aux = pg.grad(with_aux, wrt="**[4:]", has_aux=True, nonfinite="report", unused="error")(LAYERS, X)
    close(gradient, cut(jax.grad(loss)(LAYERS, X)))
    np.testing.assert_array_equal(aux["w"], LAYERS["w"])
    assert type(aux["w"]) is type(aux["half"]) is type(X)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), LAYERS)
    of_half = lambda layers, x: loss(layers, x).astype(jnp.float32)
    wide = pg.grad(of_half, wrt="**[4:]", dtype=jnp.float32)
    assert jax.tree.map(lambda leaf: leaf.dtype, wide(half, X)) == {"w": jnp.float32, "b": jnp.float32}
    close(wide(half, X), cut(pg.grad(of_half, dtype=jnp.float32)(half, X)), 1e-5)
    assert scans(wide, half, X) == 3


# --- the function runs as it is -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_branches_prints_and_side_effects(capsys):
    runs = []

    def function(layers, x):
        runs.append(layers["w"].shape)
        print("running")
        if x.sum() > 0 and layers["w"][0, 0, 0] > -100 and bool(layers["w"][:1, 0, 0] > -100):
            return loss(layers, x)
        return 0.0

    close(pg.grad(function, wrt="w[4:]")(LAYERS, X), jax.grad(loss)(LAYERS, X)["w"][4:])
    assert runs == [(LENGTH, WIDTH, WIDTH)]
    assert capsys.readouterr().out == "running\n"


@pytest.mark.slow
def test_effects_keep_their_order(capsys):
    def told(h, layer):
        jax.debug.print("{}", h[0].round(3), ordered=True)
        return step(h, layer)

    jax.grad(lambda layers: lax.scan(told, X, layers)[0].sum())(LAYERS)
    jax.effects_barrier()
    expected = capsys.readouterr().out
    pg.grad(lambda layers: lax.scan(told, X, layers)[0].sum(), wrt="w[2:4]")(LAYERS)
    jax.effects_barrier()
    assert capsys.readouterr().out == expected
    assert expected.count("\n") == LENGTH


def test_a_function_under_jit_is_compiled_once():
    traced = []

    @jax.jit
    def function(layers, x):
        traced.append(x)
        return loss(layers, x)

    gradient = pg.grad(function, wrt="w[4:]")
    gradient(LAYERS, X)
    stacking = importlib.import_module("partgrad._programs.stacking")
    kept = list(stacking._programs)
    gradient(LAYERS, 2 * X)
    assert len(traced) == 1
    assert list(stacking._programs) == kept


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(TypeError, match="dot_general"):
        pg.grad(
            lambda layers: lax.scan(lambda h, layer: (h @ layer["w"], None), jnp.ones(7), layers)[0].sum(), wrt="w[4:]"
        )(LAYERS)


def test_a_value_that_escapes_is_refused():
    escaped = []
    pg.grad(lambda layers: (escaped.append(layers["w"]), loss(layers, X))[1], wrt="w[4:]")(LAYERS)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jnp.sin(escaped[0])


# --- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cost_is_that_of_a_scan_split_by_hand():
    benchmark = importlib.import_module("benchmarks.stacked_layers")
    for own in benchmark.SELECTED.values():
        for name, found in benchmark.ratios(own, benchmark._step, 64):
            if name.startswith("partgrad"):
                assert found.flops <= 1.02, name
                assert found.bytes <= 1.02, name
                assert found.temporaries <= 1.1, name


def test_the_body_of_a_loop_is_counted_as_often_as_it_runs():
    executed = importlib.import_module("benchmarks.executed").executed
    w = jnp.ones((16, 32, 32))
    once = executed(lambda x, w: x @ w[0], jnp.ones((8, 32)), w).flops
    assert once == 2 * 8 * 32 * 32
    found = executed(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0], jnp.ones((8, 32)), w)
    assert 16 * once <= found.flops <= 16 * (once + 10)
    assert found.bytes >= 4 * w.size


# --- whatever else a function does -----------------------------------------------------------------------------------


def solved(w):
    """A root whose derivative is implicit, and a linear solve."""
    square = w[0] @ w[0].T + jnp.eye(WIDTH)
    found = lax.custom_linear_solve(
        lambda v: square @ v, w[1, 0], lambda _, b: jnp.linalg.solve(square, b), symmetric=True
    )
    root = lax.custom_root(lambda y: y**3 - w[5, 0, 0], 1.0, lambda f, y: jnp.cbrt(w[5, 0, 0]), lambda g, y: y / g(1.0))
    return found.sum() + root


def with_reference(w):
    own = jax.new_ref(jnp.zeros(()))
    for layer in w:
        own[...] += jnp.sum(layer**2)
    return own[...]


ANYTHING = {
    "an array of NumPy's": lambda w: jnp.sum(w * jnp.array(np.arange(float(LENGTH)))[:, None, None]),
    "a list": lambda w: jnp.sum(w * jnp.asarray([1.0, 2.0, 3.0])),
    "the leaf as an array": lambda w: jnp.sum(jnp.array(w) ** 2) + jnp.sum(jnp.asarray(w)),
    "random numbers": lambda w: jnp.sum(w * jax.random.normal(jax.random.key(3), w.shape)),
    "dropout": lambda w: jnp.sum(jnp.where(jax.random.bernoulli(jax.random.PRNGKey(0), 0.5, w.shape), w, 0.0)),
    "NumPy's functions": lambda w: jnp.sum(np.ones(3) * w) + jnp.mean(np.float32(2) * w),
    "decompositions": lambda w: jnp.linalg.svd(w)[1].sum() + jnp.linalg.slogdet(w[0] @ w[0].T + jnp.eye(3))[1],
    "a transform of Fourier": lambda w: jnp.sum(jnp.abs(jnp.fft.fft(w)) ** 2),
    "sorting and indices": lambda w: jnp.sort(w.ravel())[::2].sum() + w[jnp.array([1, 4, 1])].sum() + w[-1, 0].max(),
    "writing": lambda w: jnp.sum(w.at[1].set(0.0).at[2].mul(3.0) ** 2),
    "solvers": solved,
    "a callback": lambda w: (
        jnp.sum(w**2) + jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), "float32"))
    ),
    "a print": lambda w: (jax.debug.print("{}", w[0, 0, 0]), jnp.sum(w**2))[1],
    "a reference": with_reference,
    "branches": lambda w: lax.cond(w[0, 0, 0] > 0, jnp.sum, lambda w: jnp.sum(w**2), w),
    "a switch": lambda w: lax.switch(1, [jnp.sum, lambda w: jnp.sum(w**2)], w),
    "a loop": lambda w: lax.fori_loop(0, LENGTH, lambda i, c: c + jnp.sum(w[i] ** 2), 0.0),
    "map": lambda w: jnp.sum(lax.map(lambda own: own @ own, w)),
    "vmap": lambda w: jnp.sum(jax.vmap(lambda own: own @ own)(w) * jax.vmap(jnp.sin, 1, 1)(w)),
    "derivatives inside": lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(w**3))(w)) + jax.jvp(jnp.sum, (w,), (w,))[1],
    "a barrier and a name": lambda w: jnp.sum(checkpoint_name(lax.optimization_barrier(w), "w") ** 2),
    "an einsum and a norm": lambda w: jnp.einsum("lij,ljk->", w, w) + jnp.linalg.norm(w) + jax.nn.logsumexp(w),
    "shapes and dtypes": lambda w: jnp.sum(jnp.stack([w, w.astype("bfloat16").astype("float32")]).reshape(-1, 2) ** 2),
    "no use of it": lambda w: jnp.array(2.0),
}


@table("name, way", in_turn(ANYTHING, ["eager", "jit", "double_where"]), quick=6)
def test_whatever_else_a_function_does(name, way):
    f = ANYTHING[name]
    gradient = pg.grad(lambda layers: f(layers["w"]), wrt="w[4:]", double_where=way == "double_where")
    found = (jax.jit(gradient) if way == "jit" else gradient)(LAYERS)
    close(jax.tree.leaves(found), [jax.grad(f)(LAYERS["w"])[4:]], 1e-5)
