"""Cases that were wrong where naming, marks and construction meet, each with the true number or the error that is due.

The truths are computed by hand or by JAX from plain arrays, without any model.
"""

import dataclasses
import subprocess
import sys
from typing import Any

import beartype
import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro
import optimistix
import pytest

import partgrad as pg
from partgrad import NonDiff, errors


@pg.dataclass
class K:
    a: Any
    p: Any = pg.field(nondiff=True)


@pg.dataclass
class Osc:
    amp: Any
    freq: Any = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amp * jnp.sin(self.freq * t)


@pg.dataclass
class Ratio:
    a: Any

    def __call__(self, x):
        return x / self.a


def loss(m):
    return (m.a * m.p - 1.0) ** 2


M = K(2.0, 3.0)
ARRAYS = K(jnp.float32(2.0), jnp.float32(3.0))
TIMES = np.linspace(0.1, 1.0, 5).astype(np.float32)
DATA = np.sin(2.0 * TIMES).astype(np.float32)

# --- the value and the gradient of f do not depend on wrt --------------------------------------------------------


def inner_gradient(m):
    return loss(pg.apply_updates(m, jax.tree.map(lambda g: -0.05 * g, pg.grad(loss)(m))))


def true_inner_gradient(p):
    a = 2.0 - 0.05 * jax.grad(lambda a: (a * p - 1.0) ** 2)(2.0)
    return (a * p - 1.0) ** 2


def inner_partition(m):
    selected, rest = pg.partition(m)
    return loss(pg.combine(jax.tree.map(lambda x: 0.9 * x, selected), rest))


def inner_ravel(m):
    vector, unravel = pg.ravel(m)
    return vector.size * loss(unravel(0.9 * vector))


def scaled(p):
    return (1.8 * p - 1.0) ** 2


def solver(m):
    """Least squares in the amplitude alone, which is linear in it."""
    part, rest = pg.partition(m)
    residuals = lambda part, rest: pg.combine(part, rest)(TIMES) - DATA
    fit = optimistix.least_squares(residuals, optimistix.GaussNewton(1e-6, 1e-6), part, args=rest, max_steps=8)
    return fit.value.amp


def true_amplitude(freq):
    basis = jnp.sin(freq * TIMES)
    return basis @ DATA / (basis @ basis)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "m", "wrt", "truth"),
    [
        pytest.param(inner_gradient, M, "p", true_inner_gradient, id="an inner gradient"),
        pytest.param(inner_partition, M, "p", scaled, id="an inner partition"),
        pytest.param(inner_ravel, M, "p", scaled, id="an inner ravel"),
        pytest.param(solver, Osc(1.0, 2.5), "freq", true_amplitude, id="a solver"),
    ],
)
def test_naming_does_not_change_the_function(f, m, wrt, truth):
    got = pg.value_and_grad(f, wrt=wrt)(m)
    np.testing.assert_allclose(got, jax.value_and_grad(truth)(getattr(m, wrt)), rtol=1e-4)


def test_check_reports_what_jax_makes_of_an_open_leaf():
    """The inner `jax.grad` has a zero at the held leaf, and another number at the open one."""
    report = pg.check(lambda m: jax.grad(loss)(m).p + m.a * m.p, wrt="p", progress=False)(M)
    assert [f.kind for f in report.findings if f.severity == "error"] == ["value"]


def with_model(m):
    return loss(m), m


def test_a_model_in_aux_keeps_its_marks():
    _, aux = pg.grad(with_model, wrt="p", has_aux=True)(M)
    assert aux == M
    assert jax.tree.structure(aux) == jax.tree.structure(M)


def test_a_scan_over_a_step_with_aux():
    step = lambda m, _: pg.grad(with_model, wrt="p", has_aux=True)(m)[::-1]
    _, gradients = jax.lax.scan(step, ARRAYS, None, length=2)
    np.testing.assert_allclose(gradients, [20.0, 20.0])


@pytest.mark.parametrize(
    ("f", "truth"),
    [
        (lambda m: jax.vmap(lambda k: k.a * k.p, in_axes=(K(0, None),))(m).sum(), 3.0),
        (lambda m: sum(leaf.sum() for leaf in jax.tree.leaves(jax.tree.map(lambda x, y: (x - y) ** 2, m, M))), 0.0),
        (lambda m: loss(jax.lax.cond(m.p > 0, lambda m: K(m.a, m.p), lambda m: m, m)).sum(), 42.0),
    ],
    ids=["in_axes of the class", "tree.map with a prior", "a branch that rebuilds"],
)
def test_a_structure_from_outside_meets_an_open_one(f, truth):
    """The right number, an error of partgrad, or JAX's with a note that says which mark is open."""
    model = K(jnp.array([1.0, 2.0]), jnp.float32(3.0))
    f(model)
    failure = None
    try:
        np.testing.assert_allclose(pg.grad(f, wrt="p")(model), truth)
    except Exception as error:
        failure = error
    notes = getattr(failure, "__notes__", ())
    assert isinstance(failure, errors.PartgradError | None) or any("open" in note and "p" in note for note in notes)


# --- an implicit hold on the way is no silent zero -----------------------------------------------------------------


def after_another_derivative(m):
    """Python branches on values, so neither derivative can be traced beforehand."""
    pg.grad(lambda m: m.a * m.p if m.p > 0 else m.p, wrt="p")(M)
    return loss(K(m.a, m.p)) if m.p > 0 else m.p


@pytest.mark.parametrize(
    "f",
    [
        lambda m: loss(K(m.a, m.p)),
        lambda m: loss(K(m.a, m.p)) + m.p,
        lambda m: loss(pg.thaw(K(m.a, m.p), "p")),
        lambda m: loss(jax.tree.unflatten(jax.tree.structure(M), jax.tree.leaves(m))),
        after_another_derivative,
    ],
    ids=["built plainly", "one path of two", "built, then thawed", "unflattened", "after another derivative"],
)
def test_an_implicit_hold_raises(f):
    with pytest.raises(errors.PartgradError, match="Diff"):
        pg.grad(f, wrt="p")(M)


def test_diff_is_the_opposite_of_nondiff():
    np.testing.assert_allclose(jax.grad(lambda p: loss(K(2.0, pg.Diff(p))))(3.0), 20.0)
    np.testing.assert_allclose(pg.grad(lambda m: loss(K(m.a, pg.Diff(m.p))), wrt="p")(M), 20.0)


def test_diff_of_a_sampled_parameter():
    def model():
        freq = numpyro.sample("freq", numpyro.distributions.Normal(0.0, 1.0))
        numpyro.factor("fit", -jnp.sum((Osc(1.0, pg.Diff(freq))(TIMES) - DATA) ** 2))

    density = lambda freq: numpyro.infer.util.log_density(model, (), {}, {"freq": freq})[0]
    truth = lambda freq: -0.5 * freq**2 - jnp.sum((jnp.sin(freq * TIMES) - DATA) ** 2)
    np.testing.assert_allclose(jax.grad(density)(1.5), jax.grad(truth)(1.5), rtol=1e-5)


# --- freezing wraps what was named, and naming opens what is held ---------------------------------------------------

CONV = eqx.nn.Conv1d(1, 1, 2, key=jax.random.key(0))
NET = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
FROZEN = pg.freeze({"c": CONV, "s": 1.0}, "c")


def convolved(t):
    return (t["c"](jnp.ones((1, 3))) * t["s"]).sum()


def test_a_leaf_of_a_frozen_layer_is_named():
    np.testing.assert_allclose(pg.grad(convolved, wrt="c.bias")(FROZEN), [[2.0]])


def test_a_leaf_of_a_frozen_layer_is_thawed():
    thawed = pg.thaw(FROZEN, "c.bias")
    np.testing.assert_allclose(convolved(thawed), convolved(FROZEN))
    assert not pg.is_nondiff(thawed, "c.bias")
    assert pg.is_nondiff(thawed, "c.weight")


def test_a_layer_with_a_frozen_weight_is_called():
    frozen = pg.freeze({"c": CONV, "s": 1.0}, "**.weight")
    np.testing.assert_allclose(convolved(frozen), convolved(FROZEN))


def test_a_frozen_entry_leaves_its_dict_a_dict():
    frozen = pg.freeze({"w": 1.0, "n": 3}, "w")
    assert type(frozen) is dict
    assert pg.is_nondiff({**frozen}, "w")


def product(t):
    return t["k"].amp * t["k"].freq * t["s"]


HELD = pg.freeze({"k": Osc(2.0, 3.0), "s": 5.0}, "k")


def test_naming_a_node_that_is_wholly_held_opens_it():
    gradient = pg.grad(product, wrt="k")(HELD)
    np.testing.assert_allclose((gradient.amp, gradient.freq), (15.0, 10.0))


def test_naming_a_held_node_beside_a_leaf_opens_it():
    node, leaf = pg.grad(product, wrt=lambda t: (t["k"], t["s"]))(HELD)
    assert float(leaf) == 6.0
    assert (node.amp, node.freq) == (15.0, 10.0)


# --- nothing that is written is dropped silently --------------------------------------------------------------------


@dataclasses.dataclass
class Forgotten:
    a: Any


def honoured(make):
    """What it makes, or None where partgrad refuses it with a reason."""
    try:
        return make()
    except errors.PartgradError:
        return None


def test_a_forgotten_decorator_is_an_error():
    with pytest.raises(errors.PartgradError, match="Forgotten"):
        pg.grad(lambda t: t["m"].a ** 2 * t["s"])({"m": Forgotten(jnp.ones(())), "s": 2.0})


def test_a_nondiff_field_of_a_foreign_class():
    def use():
        class Module(eqx.Module):
            a: Any
            p: Any = pg.field(nondiff=True)

        pg.grad(lambda m: m.a * m.p)(Module(1.0, 2.0))

    with pytest.raises(errors.PartgradError):
        use()


def test_a_converter_of_equinox():
    def make():
        @pg.dataclass
        class Converted:
            a: Any = eqx.field(converter=jnp.asarray)

        return Converted([1.0, 2.0]).a

    made = honoured(make)
    assert made is None or isinstance(made, jax.Array)


def test_a_field_that_is_not_compared():
    def make():
        @pg.dataclass
        class Uncompared:
            a: Any
            name: str = dataclasses.field(default="", compare=False, metadata=pg.field(static=True).metadata)

        return Uncompared(1.0, "a") == Uncompared(1.0, "b")

    assert honoured(make) in (None, True)


def test_an_undeclared_attribute():
    @pg.dataclass
    class Undeclared:
        a: Any

        def __post_init__(self):
            self.b = 2

    with pytest.raises(errors.PartgradError, match="b"):
        Undeclared(1.0)


def test_a_subclass_that_changes_a_default_inherits_the_mark():
    @pg.dataclass
    class Sub(K):
        p: Any = 1.0

    assert pg.is_nondiff(Sub(1.0, 2.0), "p")
    assert pg.grad(lambda m: m.a * m.p)(Sub(2.0, 3.0)).p is None


# --- no program is reused for another number ------------------------------------------------------------------------


def test_signed_zeros_of_a_model_that_is_the_function():
    models = [Ratio(0.0), Ratio(-0.0)]
    assert [float(jax.jit(model)(1.0)) for model in models] == [np.inf, -np.inf]


@pytest.mark.parametrize(("values", "dtypes"), [((1.0, jnp.ones(())), ("float16", "float32"))])
def test_dtypes_of_a_static_argument(values, dtypes):
    f = jax.jit(lambda m, x: m.a * x, static_argnums=0)
    models = [Ratio(value) for value in values]
    assert [f(model, jnp.float16(1)).dtype for model in models] == list(dtypes)


@pytest.mark.parametrize("around", [lambda x: x, lambda x: (x,), lambda x: {"k": [x]}], ids=["plain", "tuple", "dict"])
def test_signed_zeros_in_static(around):
    f = jax.jit(lambda s, x: x / jax.tree.leaves(s.value)[0])
    assert [float(f(pg.Static(around(zero)), 1.0)) for zero in (0.0, -0.0)] == [np.inf, -np.inf]


# --- beside other libraries -------------------------------------------------------------------------------------------


def test_a_runtime_checker_over_a_dataclass():
    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    @pg.dataclass
    class Typed:
        x: jaxtyping.Float[jax.Array, "3"]

    assert pg.is_nondiff(Typed(NonDiff(jnp.ones(3))), "x")


@pytest.mark.slow
def test_a_class_from_another_process(tmp_path):
    Shipped = pg.dataclass(type("Shipped", (), {"__annotations__": {"a": Any, "p": Any}, "__module__": "__main__"}))
    (tmp_path / "model").write_bytes(cloudpickle.dumps(Shipped(1.0, NonDiff(2.0))))
    program = (
        "import pickle, sys, partgrad as pg, jax; m = pickle.load(open(sys.argv[1], 'rb')); "
        "assert jax.tree.leaves(jax.tree.map(lambda x: 2 * x, m)) == [2., 4.]; assert pg.is_nondiff(m, 'p')"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_updates_without_a_derivative():
    tree = {"n": jnp.int32(3), "w": jnp.float32(1.0)}
    updates = jax.grad(lambda t: 2.0 * t["w"] * t["n"], allow_int=True)(tree)
    updated = pg.apply_updates(tree, updates)
    assert (int(updated["n"]), float(updated["w"])) == (3, 7.0)


@pytest.mark.parametrize("linear", [lambda x: pg.vjp(jnp.sin, x)[1], lambda x: pg.linearize(jnp.sin, x)[1]])
def test_linear_maps_leave_jit(linear):
    result = jax.jit(linear)(0.5)(1.0)
    np.testing.assert_allclose(jax.tree.leaves(result), [np.cos(0.5)], rtol=1e-5)
