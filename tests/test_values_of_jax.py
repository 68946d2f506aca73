"""What JAX and flax call a value: references, leaves of hijax classes, Variables that a function changes."""

import dataclasses
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax

import partgrad as pg
from helpers.messages import refused

X = jnp.arange(3.0)


# --- references ----------------------------------------------------------------------------------------------------


def with_statistics():
    return {"w": jnp.ones(3), "mean": jax.new_ref(jnp.zeros(3))}


def loss(m, x=X):
    m["mean"][...] = 0.5 * m["mean"][...] + 0.5 * jax.lax.stop_gradient(x * m["w"])
    return jnp.sum(m["w"] ** 2 * x)


DERIVATIVES = {
    "grad": lambda wrt: lambda m: pg.grad(loss, wrt=wrt)(m),
    "jacrev": lambda wrt: lambda m: pg.jacrev(loss, wrt=wrt)(m),
    "linearize": lambda wrt: (
        lambda m: jax.tree.map(lambda x: 2 * X, pg.select(m, wrt)) if pg.linearize(loss, m, wrt=wrt) else 0
    ),
    "vjp": lambda wrt: lambda m: pg.vjp(loss, m, wrt=wrt)[1](1.0)[0],
}


@pytest.mark.parametrize("wrt", [None, "w", lambda m: m["w"], {"w": "w"}], ids=["None", "path", "callable", "dict"])
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("jit", [False, True])
def test_a_reference_is_held_and_written(derivative, wrt, jit):
    m = with_statistics()
    found = (jax.jit if jit else lambda f: f)(derivative(wrt))(m)
    found = found["w"] if isinstance(found, dict) else found
    np.testing.assert_allclose(found, 2 * X)
    np.testing.assert_allclose(m["mean"][...], X / 2)


def test_a_reference_is_a_leaf_without_derivative():
    m = with_statistics()
    assert [path for path, _ in pg.items(m)] == ["['w']"]
    selected, rest = pg.partition(m)
    assert selected["mean"] is None
    assert rest["mean"] is m["mean"]
    assert pg.combine(selected, rest)["mean"] is m["mean"]
    assert "Ref{f32[3]}" in str(pg.summary(m))
    assert pg.ravel(m)[1].names == ("['w'][0]", "['w'][1]", "['w'][2]")
    refused(lambda: pg.grad(loss, wrt="mean")(m), TypeError, "cannot be differentiated", "Ref{f32[3]}")


@pytest.mark.slow
def test_a_reference_in_a_dataclass_and_in_a_module():
    @pg.dataclass
    class Model:
        w: jax.Array
        mean: jax.Array

    class Module(eqx.Module):
        w: jax.Array
        mean: jax.Array

    for cls in (Model, Module):
        m = cls(jnp.ones(3), jax.new_ref(jnp.zeros(3)))
        gradient = pg.grad(lambda m: jnp.sum(m.w**2) + 0 * jnp.sum(m.mean[...]))(m)
        assert gradient.mean is None
        np.testing.assert_allclose(gradient.w, 2.0)


# --- hijax ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Box:
    a: jax.Array


@dataclasses.dataclass(frozen=True)
class BoxType(hijax.HiType):
    shape: tuple

    def lo_ty(self):
        return [hijax.ShapedArray(self.shape, jnp.dtype("float32"))]

    def lower_val(self, box):
        return [box.a]

    def raise_val(self, a):
        return Box(a)

    def to_tangent_aval(self):
        return hijax.ShapedArray(self.shape, jnp.dtype("float32"))

    def str_short(self, short_dtypes=False, **_):
        return f"box{list(self.shape)}"


hijax.register_hitype(Box, lambda box: BoxType(box.a.shape))


@pytest.mark.skipif(not hasattr(hijax, "HiPrim"), reason="JAX 0.12 differentiates them")
class TestHijax:
    @staticmethod
    def unwrap(box):
        class Unwrap(hijax.HiPrim):
            def __init__(self, aval):
                self.in_avals, self.params = (aval,), {}
                self.out_aval = hijax.ShapedArray(aval.shape, jnp.dtype("float32"))
                super().__init__()

            def expand(self, box):
                return box.a

            def jvp(self, primals, tangents):
                return self(primals[0]), tangents[0]

            def vjp_fwd(self, nzs, box):
                return self(box), None

            def vjp_bwd_retval(self, residuals, cotangent):
                return (cotangent,)

        return Unwrap(jax.typeof(box))(box)

    def loss(self, m):
        return jnp.sum(self.unwrap(m["q"]) ** 2 * m["s"])

    def tree(self):
        return {"q": Box(X), "s": jnp.ones(3), "n": 1}

    def test_a_leaf_that_jax_differentiates_is_differentiated(self):
        tree = self.tree()
        gradient = pg.grad(self.loss)(tree)
        np.testing.assert_allclose(gradient["q"], 2 * X)
        np.testing.assert_allclose(gradient["s"], X**2)
        np.testing.assert_allclose(pg.grad(self.loss, wrt="q")(tree), 2 * X)
        np.testing.assert_allclose(jax.jit(pg.grad(self.loss, wrt=lambda m: m["q"]))(tree), 2 * X)
        assert pg.grad(self.loss, wrt="s")(tree).shape == (3,)

    def test_a_check_checks_the_others(self):
        tree = self.tree()
        for wrt in (None, "q", {"a": "q", "b": "s"}):
            refused(lambda wrt=wrt: pg.check(self.loss, wrt)(tree), TypeError, "cannot check `['q']`")
        others = pg.exclude(pg.path("['q']"))
        assert pg.check(self.loss, others, progress=False)(tree).ok
        built = lambda s: self.loss({"q": Box(s), "s": s})
        assert pg.check(built, progress=False)(X).ok

    def test_what_reads_and_shows_trees_takes_it(self):
        tree = self.tree()
        assert pg.partition(tree)[0]["q"] is tree["q"]
        assert pg.mask(tree) == {"q": True, "s": True, "n": False}
        assert "box[3]" in str(pg.summary(tree))

    def test_a_held_one_is_held(self):
        @pg.dataclass
        class Model:
            q: Box = pg.field(nondiff=True)
            s: jax.Array

        f = lambda m: jnp.sum(self.unwrap(m.q) ** 2 * m.s)
        model = Model(Box(X), jnp.ones(3))
        assert pg.grad(f)(model).q is None
        np.testing.assert_allclose(pg.grad(f, wrt="q")(model), 2 * X)


# --- modules of flax -----------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(2, 2, rngs=rngs)
        self.deep = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.deep(self.hidden(self.norm(x)))))


DATA = jnp.arange(8.0).reshape(4, 2)


def fit(net, x=DATA):
    return jnp.sum(net(x) ** 2)


def state(net):
    return nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngKey)))


STEPS = {
    "grad": (lambda net: pg.grad(fit, wrt=nnx.Param)(net), False),
    "value_and_grad": (lambda net: pg.value_and_grad(fit, wrt=nnx.Param)(net)[1], False),
    "None": (lambda net: pg.grad(fit)(net), False),
    "aux": (lambda net: pg.grad(lambda net: (fit(net), "aux"), has_aux=True)(net)[0], False),
    "jit": (nnx.jit(lambda net: pg.grad(fit)(net)), True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("step", "jit"), STEPS.values(), ids=STEPS)
def test_a_gradient_writes_back_what_the_module_changed(step, jit):
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    reference = nnx.jit(nnx.grad(fit)) if jit else nnx.grad(fit)
    found, drawn = [], []
    for _ in range(3):
        found.append(step(ours))
        drawn.append(reference(theirs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state(ours), state(theirs))
    for one, other in zip(found, drawn, strict=True):
        np.testing.assert_allclose(one.head.kernel[...], other["head"]["kernel"][...], rtol=1e-5)
    # Other masks, other gradients.
    assert not np.allclose(found[0].head.kernel[...], found[1].head.kernel[...])
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(ours)))


@pytest.mark.slow
def test_a_module_inside_of_a_dict():
    tree = {"net": Net(nnx.Rngs(0)), "scale": jnp.array(2.0)}
    before = state(tree["net"])
    pg.grad(lambda t: fit(t["net"]) * t["scale"], wrt="scale")(tree)
    assert not np.allclose(state(tree["net"])["norm"]["mean"], before["norm"]["mean"])


class Counting(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.first = self.shared = nnx.BatchStat(jnp.array(1.0))
        self.last = nnx.BatchStat(jnp.array(5.0))
        self.raw = nnx.data(jnp.zeros(1))


def slope_of(change):
    """A function of modules that changes them first."""

    def function(*modules, **others):
        change(*modules, **others)
        return jnp.sum(modules[0].w[...] ** 2) * modules[0].last[...]

    return function


def double(variable):
    variable[...] = variable[...] * 2


def replace_shared(net):
    del net.first
    net.added = nnx.BatchStat(jnp.ones((3, 3)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda net: double(net.first), (2.0, 2.0, 5.0)),
        (lambda net: double(net.shared), (2.0, 2.0, 5.0)),
        (lambda net: double(net.last), (1.0, 1.0, 10.0)),
        (lambda net: None, (1.0, 1.0, 5.0)),
        # What is added is not written to what stays.
        (replace_shared, (1.0, 1.0, 5.0)),
    ],
    ids=["shared, first", "shared, later", "other", "nothing", "added and removed"],
)
def test_variables_that_are_shared_added_and_removed(change, expected):
    for wrt, double_where in ((None, False), ("w", True), ("last", True), ({"w": "w"}, False)):
        net = Counting()
        pg.grad(slope_of(change), wrt=wrt, double_where=double_where)(net)
        assert tuple(float(own[...]) for own in (net.first, net.shared, net.last)) == expected
        assert net.first is net.shared


def test_arrays_and_selected_variables_are_written_too():
    def change(net):
        double(net.w)
        double(net.last)
        net.raw = net.raw + 1

    for wrt, double_where in ((None, False), (None, True), ("w", False), ("last", True), ("w.value[0]", True)):
        ours, theirs = Counting(), Counting()
        pg.grad(slope_of(change), wrt=wrt, double_where=double_where)(ours)
        nnx.grad(slope_of(change))(theirs)
        jax.tree.map(
            np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs))
        )


@pytest.mark.parametrize(
    "options",
    [{"unused": "none"}, {"unused": "error"}, {"nonfinite": "report"}, {"unused": "none", "double_where": True}],
    ids=str,
)
def test_a_look_at_the_program_says_nothing_of_a_change(options):
    net = Counting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg.grad(slope_of(lambda net: double(net.last)), wrt={"w": "w", "last": "last"}, **options)(net)
    assert float(net.last[...]) == 10.0


def test_one_module_that_is_two_arguments():
    def change(one, other):
        double(one.last)
        double(other.first)

    net = Counting()
    pg.grad(slope_of(change), argnums=(0, 1))(net, net)
    assert (float(net.last[...]), float(net.first[...])) == (10.0, 2.0)


INSIDE = pg.intermediate("h")
LOST = {
    "jacrev": lambda f, net: pg.jacrev(f, double_where=True)(net, 2.0),
    "vjp": lambda f, net: pg.vjp(f, net, 2.0, double_where=True),
    "not selected": lambda f, net: pg.grad(lambda x, net: f(net, x), double_where=True)(2.0, net),
    "not selected, by name": lambda f, net: pg.grad(lambda x, *, net: f(net, x), double_where=True)(2.0, net=net),
    "inside": lambda f, net: pg.grad(f, wrt=INSIDE)(net, 2.0),
    "inside, double_where": lambda f, net: pg.grad(f, wrt=INSIDE, double_where=True)(net, 2.0),
    "inside and outside": lambda f, net: pg.grad(f, wrt={"h": INSIDE, "w": "w"})(net, 2.0),
    "nnx.grad of double_where": lambda f, net: nnx.grad(pg.double_where(f))(net, 2.0),
    "grad of double_where": lambda f, net: pg.grad(pg.double_where(f))(net, 2.0),
    "captured": lambda f, net: pg.capture_intermediates(f, "h")(net, 2.0),
    "captured by a derivative": lambda f, net: nnx.grad(lambda net: pg.capture_intermediates(f)(net, 2.0)[0])(net),
    "changed inside": lambda f, net: pg.intervene(f, {"h": jnp.sin})(net, 2.0),
    "consistent_indexing": lambda f, net: nnx.grad(pg.consistent_indexing(f))(net, 2.0),
}


@pytest.mark.parametrize("derivative", LOST.values(), ids=LOST)
def test_a_change_of_a_copy_is_not_lost_silently(derivative):
    def f(net, x):
        double(net.last)
        return jnp.sum(checkpoint_name(net.w[...] * x, "h"))

    # A class of its own: a warning comes once for each.
    net = type("Counting", (Counting,), {})()
    with pytest.warns(UserWarning, match=r"changes `last.value` of its argument \w+, a `Counting`, and .* is lost"):
        derivative(f, net)
    assert float(net.last[...]) == 5.0


def test_a_variable_without_a_module():
    tree = {"w": nnx.Param(jnp.ones(2)), "mean": nnx.BatchStat(jnp.array(1.0))}

    def function(tree):
        double(tree["mean"])
        return jnp.sum(tree["w"][...])

    pg.grad(function)(tree)
    assert float(tree["mean"][...]) == 2.0


def test_nothing_is_written_where_nothing_changed():
    net = Net(nnx.Rngs(0))
    net.eval()
    before = jax.tree.leaves(nnx.state(net))
    pg.grad(fit)(net)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(net)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "derivative",
    [
        lambda net: pg.vjp(fit, net),
        lambda net: pg.jacrev(fit)(net),
        lambda net: jax.jit(lambda x: pg.grad(fit)(net, x))(DATA),
    ],
    ids=["vjp", "jacrev", "closed over under jit"],
)
def test_what_cannot_be_written_back_is_said_once(derivative):
    # A class of its own: a warning comes once for each.
    cls = type("Net", (Net,), {})
    net = cls(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="the change is lost") as caught:
        derivative(net)
    (warning,) = caught
    assert "has_aux=True" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derivative(net)
    # The remedy, literally.
    step = pg.value_and_grad(lambda net: (fit(net), net), has_aux=True)
    (_, after), _ = step(net)
    assert after.drop.rngs.count[...] == 1


def test_statistics_as_references():
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(2, 1, rngs=rngs)
            with nnx.var_defaults(ref=True):
                self.mean = nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            self.mean[...] = self.mean[...] / 2 + x.mean(0) / 2
            return self.head(x - self.mean[...])

    net = Small(nnx.Rngs(0))
    gradient = pg.grad(fit, wrt="head.kernel")(net)
    assert gradient[...].shape == (2, 1)
    np.testing.assert_allclose(net.mean[...], DATA.mean(0) / 2)


@pytest.mark.slow
def test_a_module_whose_parameters_are_references():
    with nnx.var_defaults(ref=True):
        net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    refused(
        lambda: pg.grad(fit)(net), TypeError, "nothing to differentiate", "Ref{f32[2,1]}", "lambda leaf: leaf[...] if"
    )
    values = jax.tree.map(lambda leaf: leaf[...] if isinstance(leaf, jax.Ref) else leaf, net)
    np.testing.assert_allclose(
        pg.grad(fit)(values).kernel[...], nnx.grad(fit)(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))["kernel"][...], rtol=1e-6
    )


@pytest.mark.skipif(not hasattr(hijax, "HiPrim"), reason="JAX 0.12 differentiates them")
def test_variables_that_are_leaves():
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(2, 1, rngs=rngs)
            self.mean = nnx.BatchStat(jnp.ones(2))

        def __call__(self, x):
            return self.head(x - self.mean[...])

    plain = nnx.grad(fit)(Small(nnx.Rngs(0)))["head"]["kernel"][...]
    with nnx.var_defaults(hijax=True):
        net = Small(nnx.Rngs(0))
        gradient = pg.grad(fit)(net)
        assert gradient.mean is None
        np.testing.assert_allclose(gradient.head.kernel[...], plain, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(pg.grad(fit, wrt="head.kernel"))(net)[...], plain, rtol=1e-5)
        assert "mean" in str(pg.summary(net))


# --- Python numbers that are traced --------------------------------------------------------------------------------


def notes(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("partgrad: ")]


class Branching(eqx.Module):
    w: jax.Array
    p: float = 0.5

    def __call__(self):
        return self.w**2 if self.p > 0 else self.w


ATTENTION = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
CAUSED = {
    "equinox's attention": (ATTENTION, lambda m: jnp.sum(m(*[jnp.ones((3, 4))] * 3)), "dropout.p"),
    "a branch": (Branching(jnp.array(2.0)), lambda m: m(), "p"),
    "many numbers": ([Branching(jnp.array(2.0)) for _ in range(6)], lambda ms: sum(m() for m in ms), "[5].p"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "f", "path"), CAUSED.values(), ids=CAUSED)
@pytest.mark.parametrize("transform", [pg.grad, pg.jacrev, pg.hessian], ids=lambda t: t.__name__)
def test_an_error_that_a_traced_number_causes_names_it(transform, model, f, path):
    derivative = eqx.filter_jit(transform(f))
    (note,) = notes(lambda: derivative(model))
    assert f"`{path}`" in note
    # The remedy, literally.
    (fix,) = re.findall(r"model = (partgrad\.freeze\(.*\)), or", note)
    assert jax.tree.leaves(derivative(eval(fix, {"partgrad": pg, "model": model})))


def test_an_error_that_has_another_cause_gets_no_note():
    def wrong(m):
        raise KeyError("no")

    assert notes(lambda: pg.grad(wrong)(Branching(jnp.array(2.0)))) == []
    assert notes(lambda: pg.grad(lambda m: jnp.zeros(2) @ jnp.zeros(3))(Branching(jnp.array(2.0)))) == []
    assert notes(lambda: pg.grad(lambda m: m(), wrt="w")(Branching(jnp.array(2.0), jnp.array([1.0, 2.0])))) == []


class Once:
    """Raises an error in the first call alone, as a file or a network may."""

    def __init__(self, error):
        self.error = error

    def __call__(self, m):
        self.error, error = None, self.error
        if error is not None:
            raise error
        return m.w * m.p


def refuse(x):
    raise ValueError("no")


@pytest.mark.parametrize(
    "function",
    [
        lambda m: jnp.log(-m.w) * m.p,
        lambda m: eqx.error_if(m.w, m.w > 0, "no") * m.p,
        lambda m: jax.pure_callback(refuse, jax.typeof(m.w), jax.lax.stop_gradient(m.w)) * m.p,
        Once(OSError("no")),
        Once(ValueError("no")),
    ],
    ids=["nan", "equinox", "callback", "file", "once"],
)
def test_an_error_at_run_time_gets_no_note(function):
    with jax.debug_nans(True):
        assert notes(lambda: pg.grad(function)(Branching(jnp.array(2.0)))) == []


def test_an_error_of_the_world_is_not_tried_again():
    runs = []

    def read(m):
        runs.append(None)
        raise OSError("no")

    notes(lambda: pg.grad(read)(Branching(jnp.array(2.0))))
    assert len(runs) == 1
