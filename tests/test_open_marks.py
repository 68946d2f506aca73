"""Naming never changes the function: random trees, functions that look at marks inside, and every way to run them."""

import copy
import dataclasses
import pickle
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest
from hypothesis import given, settings, strategies as st

import partgrad as pg
from helpers.models import RBF, Flax, Kernel, Linear, Periodic, Point, Sum, paths
from helpers.tables import examples, table
from partgrad import NonDiff, Static, errors

arrays = st.floats(-2, 2).map(np.float64) | st.just(np.array([0.5, -0.25]))


def containers(children):
    pair = st.tuples(children, children)
    return st.one_of(
        st.lists(children, min_size=1, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b"]), children, min_size=1),
        pair.map(lambda p: Point(*p)),
        pair.map(lambda p: Linear(*p)),
        pair.map(lambda p: pg.freeze(Linear(*p), "weight")),
        pair.map(lambda p: RBF(NonDiff(p[0]), p[1])),
        pair.map(lambda p: Periodic(*p, np.float64(1.5))),
        pair.map(lambda p: Periodic(p[0], 2.0, pg.Diff(p[1]))),
        pair.map(lambda p: Sum(Static("s"), p[1])),
        children.map(Flax),
        children.map(NonDiff),
    )


trees = st.recursive(arrays, containers, max_leaves=5)


def smooth(tree):
    """A smooth function of every leaf, in which the leaves interact."""
    total = 0.3
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        total = total + jnp.sum(jnp.sin(leaf * (number + 1.5))) * jnp.cos(total)
    return total


def is_full(tree):
    return bool(jax.tree.leaves(pg.partition(tree)[0]))


def by_partition(tree, path):
    selected, rest = pg.partition(tree)
    return smooth(pg.combine(jax.tree.map(lambda x: 1.1 * x, selected), rest)) * len(jax.tree.leaves(selected))


def by_gradient(tree, path):
    if not is_full(tree):
        return smooth(tree)
    updates = jax.tree.map(lambda g: -0.1 * g, pg.grad(smooth)(tree))
    return smooth(pg.apply_updates(tree, updates))


def by_ravel(tree, path):
    vector, unravel = pg.ravel(tree)
    return smooth(unravel(0.9 * vector)) * vector.size


def by_mask(tree, path):
    return smooth(jax.tree.map(lambda on, x: 2 * x if on else x, pg.mask(tree, None), tree))


def by_replacing(tree, path):
    return smooth(pg.replace(jax.tree.map(lambda x: 1.1 * x, copy.copy(tree)), path, fn=jnp.sin))


def by_naming(tree, path):
    value, gradient = pg.value_and_grad(smooth, wrt=path)(tree)
    return value + jnp.sum(gradient**2) + (3.0 if pg.is_nondiff(tree, path) else 5.0)


def rebuilt(tree, build):
    """The tree, with every partgrad dataclass in it built anew of its fields."""

    is_built = lambda node: isinstance(node, Kernel)

    def visit(node):
        if not is_built(node):
            return node
        return build(node, {f.name: rebuilt(getattr(node, f.name), build) for f in dataclasses.fields(node)})

    return jax.tree.map(visit, tree, is_leaf=is_built)


def by_dataclasses_replace(tree, path):
    new = rebuilt(tree, lambda node, fields: dataclasses.replace(node, **fields))
    return smooth(jax.tree.map(lambda x: 1.1 * x, new))


def by_diff(tree, path):
    wrapped = lambda value: Static(value) if isinstance(value, str) else pg.Diff(value)
    build = lambda node, fields: type(node)(**{name: wrapped(value) for name, value in fields.items()})
    return smooth(jax.tree.map(lambda x: 1.1 * x, rebuilt(tree, build)))


def by_building_plainly(tree, path):
    plain = lambda value: Static(value) if isinstance(value, str) else value
    build = lambda node, fields: type(node)(**{name: plain(value) for name, value in fields.items()})
    return smooth(rebuilt(tree, build))


INNER = [
    *(by_partition, by_gradient, by_ravel, by_mask, by_replacing, by_naming),
    *(by_dataclasses_replace, by_diff, by_building_plainly),
]


def stacked(function):
    return lambda tree: jax.vmap(function)(jax.tree.map(lambda x: jnp.asarray(x)[None], tree))[0]


def looped(function):
    return lambda tree: jax.lax.scan(lambda t, _: (t, function(t)), jax.tree.map(jnp.asarray, tree), length=2)[1][-1]


def branched(function):
    return lambda tree: jax.lax.cond(jnp.sum(jax.tree.leaves(tree)[0]) < 1e9, function, lambda t: smooth(t) * 2, tree)


def named_twice(path):
    return lambda function: lambda tree: pg.value_and_grad(function, wrt=path)(tree)[0]


RUNS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": stacked,
    "scan": looped,
    "cond": branched,
}


def _is_held_by_class(path):
    """Whether a class above the leaf declares the mark of the field that it is in."""
    return re.search(r"\bperiod\b", path) is not None


@pytest.mark.slow
@table("run", RUNS)
@given(trees, st.data())
@settings(max_examples=examples(12))
def test_the_value_and_the_gradient_do_not_depend_on_wrt(run, tree, data):
    with jax.enable_x64(True):
        named = list(filter(None, paths(tree)))
        if not named:
            return
        path, inner = data.draw(st.sampled_from(named)), data.draw(st.sampled_from(INNER))
        function = RUNS[run](lambda t: inner(t, path))
        value = function(tree)
        if data.draw(st.booleans()):
            function = named_twice(path)(function)
        both = pg.value_and_grad(lambda t: (function(t), t), wrt=path, has_aux=True)
        if inner is by_building_plainly and _is_held_by_class(path):
            with pytest.raises(errors.HeldError):
                both(tree)
            return
        (got, aux), gradient = both(tree)
        np.testing.assert_allclose(got, value, rtol=1e-9, atol=1e-9)
        assert jax.tree.structure(aux) == jax.tree.structure(tree)
        leaf = pg.select(tree, path)
        direction = np.cos(np.arange(np.size(leaf))).reshape(np.shape(leaf))
        up, down = (function(pg.replace(tree, path, leaf + h * direction)) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(np.sum(gradient * direction), (up - down) / 2e-5, rtol=1e-4, atol=1e-5)


def are_held(tree):
    return [row.status == "held by a mark" for row in pg.summary(tree).rows]


@given(trees, st.data())
@settings(max_examples=examples(60))
def test_freezing_marks_what_was_named_in_any_order(tree, data):
    steps = [re.findall(r"\.?\w+|\[[^]]*\]", path) for path in paths(tree)]
    places = sorted({"".join(own[:end]) for own in steps for end in range(1, len(own) + 1)})
    if not places:
        return
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
    one, other = tree, tree
    for path in chosen:
        one = pg.freeze(one, path)
    for path in reversed(chosen):
        other = pg.freeze(other, path)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(tree)))
    named = [any(p == c or p.startswith((f"{c}.", f"{c}[")) for c in chosen) for p in paths(tree)]
    assert are_held(one) == [was or is_named for was, is_named in zip(are_held(tree), named, strict=True)]
    assert jax.tree.structure(pickle.loads(pickle.dumps(one))) == jax.tree.structure(one)
    thawed = pg.thaw(one, chosen[0])
    assert not any(pg.is_nondiff(thawed, path) for path in chosen[:1])
    assert jax.tree.structure(pg.thaw(one, None)) == jax.tree.structure(pg.thaw(tree, None))


# --- one model ---------------------------------------------------------------------------------------------------------


@pg.dataclass
class K:
    a: Any
    p: Any = pg.field(nondiff=True)


@pg.dataclass
class Three:
    a: Any
    p: Any = pg.field(nondiff=True)
    q: Any = pg.field(nondiff=True)


M = K(jnp.float32(2.0), jnp.float32(3.0))


def loss(m):
    return (m.a * m.p - 1.0) ** 2


def squares(m):
    return jax.tree.map(lambda x: x**2, m)


def is_like(tree, other=M):
    return jax.tree.structure(tree) == jax.tree.structure(other)


def test_a_function_is_traced_once_for_the_held_and_once_for_the_open_model():
    traces = []

    @jax.jit
    def product(m):
        traces.append(not is_like(m))
        return m.a * m.p

    for _ in range(3):
        assert float(product(M)) == 6.0
        assert float(pg.grad(product, wrt="p")(M)) == 2.0
        assert pg.grad(product)(M).p is None
        assert float(jax.grad(product)(M).p) == 0.0
    assert traces == [False, True]


def test_what_a_transform_returns_has_its_marks():
    for transform in (pg.jacfwd, pg.jacrev, lambda *args, **kw: jax.jit(pg.jacrev(*args, **kw))):
        jacobian = transform(squares, wrt="p")(M)
        assert is_like(jacobian)
        assert (float(jacobian.a), float(jacobian.p)) == (0.0, 6.0)
    assert float(pg.hessian(squares, wrt="p")(M).p) == 2.0
    value, pull = pg.vjp(squares, M, wrt="p")
    assert is_like(value)
    assert float(pull(M)[0]) == 18.0
    value, tangent = pg.jvp(squares, (M,), (jnp.float32(1.0),), wrt="p")
    assert is_like(value)
    assert is_like(tangent)
    value, linear = pg.linearize(squares, M, wrt="p")
    assert is_like(value)
    assert is_like(linear(jnp.float32(1.0)))
    with pytest.raises(errors.PartsError, match="cotangent"):
        pull((1.0, 2.0))


def test_a_call_closes_only_what_it_opened():
    model = Three(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0))

    def outer(m):
        step = lambda m: (m.a * m.p * m.q, dataclasses.replace(m, a=m.a))
        (_, inner), slope = pg.value_and_grad(step, wrt="q", has_aux=True)(m)
        assert is_like(inner, m)
        return inner.a * inner.p * inner.q + slope

    for function in (outer, jax.jit(outer)):
        value, slope = pg.value_and_grad(function, wrt="p")(model)
        assert (float(value), float(slope)) == (36.0, 12.0)


def test_the_backward_rule_of_a_custom_vjp_runs_after_the_model_was_closed():
    @jax.custom_vjp
    def f(m):
        return loss(m)

    f.defvjp(
        lambda m: (loss(m), m), lambda m, g: (jax.tree.map(lambda x: g * x, pg.grad(loss, lambda m: (m.a, m.p))(m)),)
    )
    with pytest.raises(Exception, match="structure|pytree"):
        pg.grad(f, wrt="p")(M)
    f.defvjp(lambda m: (loss(m), m), lambda m, g: (jax.tree.map(lambda x: g * x, jax.grad(loss)(m)),))
    np.testing.assert_allclose(pg.grad(f, wrt="p")(M), 20.0)
    np.testing.assert_allclose(pg.grad(f)(M).a, 30.0)


@pytest.mark.parametrize("in_order", [True, False])
def test_parts_combine_if_marks_are_open_in_one_of_them(in_order):
    def loss(m):
        parts = [pg.partition(M, "a")[0], pg.partition(m, "a")[1]]
        whole = pg.combine(*parts if in_order else parts[::-1])
        return whole.a * whole.p

    assert float(pg.grad(loss, wrt="p")(M)) == 2.0


@pytest.mark.parametrize("transform", [pg.grad, pg.jacrev])
def test_a_backward_rule_that_builds_a_model_is_told_which_mark_is_open(transform):
    def differentiated(cotangent):
        f = jax.custom_vjp(loss)
        f.defvjp(lambda m: (loss(m), m), lambda m, g: (cotangent(m, 2 * g * (m.a * m.p - 1.0)),))
        return transform(lambda m: f(m), wrt="p")(M)

    with pytest.raises(TypeError, match="structure") as caught:
        differentiated(lambda m, g: K(g * m.p, g * m.a))
    (note,) = [note for note in caught.value.__notes__ if note.startswith("partgrad: ")]
    assert "names `p`" in note
    assert "build models here by dataclasses.replace" in note
    right = differentiated(lambda m, g: dataclasses.replace(m, a=g * m.p, p=g * m.a))
    np.testing.assert_allclose(right, transform(loss, wrt="p")(M))


def test_nested_calls_say_once_which_mark_is_open():
    def mapped(m):
        return pg.grad(lambda k: jax.tree.map(lambda a, b: a + b, k, M).a, wrt="p")(m)

    with pytest.raises(ValueError, match="different pytree metadata") as caught:
        pg.grad(mapped, wrt="p")(M)
    assert len([note for note in caught.value.__notes__ if note.startswith("partgrad: ")]) == 1


def test_no_note_on_structures_where_a_wrapper_is_given_to_lax():
    with pytest.raises(ValueError, match="__jax_array__") as caught:
        pg.grad(lambda t: jax.lax.sin(t["b"]), wrt="b")({"b": NonDiff(2.0)})
    assert not any(note.startswith("partgrad: ") for note in getattr(caught.value, "__notes__", ()))


def test_a_part_of_a_wrapped_tree_is_open():
    tree = {"w": NonDiff({"x": jnp.float32(2.0), "y": jnp.float32(3.0)}), "s": jnp.float32(4.0)}

    def f(t):
        return t["w"]["x"] * t["w"]["y"] * t["s"] + len(jax.tree.leaves(pg.partition(t)[0]))

    for function in (f, jax.jit(f)):
        value, gradient = pg.value_and_grad(function, wrt="w.x")(tree)
        assert (float(value), float(gradient)) == (25.0, 12.0)
        value, gradient = pg.value_and_grad(function, wrt="w")(tree)
        assert (float(value), float(gradient["y"])) == (25.0, 8.0)
        with_plain = lambda t, function=function: (function(t), jax.grad(function)(t))
        (_, plain), _ = pg.value_and_grad(with_plain, wrt="w.x", has_aux=True)(tree)
        # Plain JAX differentiates what is open, and y is not.
        assert [float(plain["w"]["x"]), float(plain["w"]["y"])] == [12.0, 0.0]


def test_freezing_inside_leaves_the_open_leaves_of_a_wrapper_open():
    tree = {"w": NonDiff({"x": jnp.float32(2.0), "y": jnp.float32(3.0)}), "s": jnp.float32(4.0)}

    def f(t):
        frozen = pg.freeze(t, "s")
        return frozen["w"]["x"] * frozen["w"]["y"] * frozen["s"] ** 2

    by_x, by_y, by_s = pg.grad(f, wrt=lambda t: (t["w"]["x"], t["w"]["y"], t["s"]))(tree)
    assert (by_x, by_y, by_s) == (48.0, 32.0, 0.0)


def test_a_program_that_was_traced_while_marks_were_watched_serves_afterwards():
    product = jax.jit(lambda a, p: K(a, p).p * a)
    f = lambda m: product(m.a, m.a) + m.p if m.p > 0 else m.a
    for _ in range(2):
        assert pg.grad(f, wrt=lambda m: (m.a, m.p))(M) == (float(M.a), 1.0)


def test_parts_of_a_module_whose_marks_cover_a_part():
    frozen = pg.freeze({"c": eqx.nn.Linear(2, 2, key=jax.random.key(0)), "s": jnp.float32(1.0)}, "c.weight")
    f = lambda t: (t["c"](jnp.ones(2)) ** 2).sum() * t["s"]
    selected, rest = pg.partition(frozen)
    assert selected["c"].weight is None
    # None in the place of the weight does not make the bias the first leaf.
    through_jit = jax.jit(lambda s: jax.grad(lambda s: f(pg.combine(s, rest)))(s))(selected)
    np.testing.assert_allclose(through_jit["c"].bias, pg.grad(f)(frozen)["c"].bias)
    assert np.abs(through_jit["c"].bias).sum() > 0
    described = []
    pg.grad(lambda t: described.append(pg.mask(t)["c"]) or f(t), wrt="c.weight")(frozen)
    assert [(mask.weight, mask.bias) for mask in described] == [(False, True)] * len(described)
    node = pg.grad(f, wrt="c")(frozen)
    assert node.weight is None
    assert pg.grad(f, wrt="c.weight")(frozen).shape == (2, 2)
    assert "of='.weight'" in repr(frozen)


# --- every remedy is followed literally --------------------------------------------------------------------------------


def test_the_remedies_for_a_structure_from_outside():
    model, prior = K(jnp.array([1.0, 2.0]), jnp.float32(3.0)), K(jnp.zeros(2), jnp.float32(1.0))

    def distance(m, other):
        return sum(jnp.sum(d) for d in jax.tree.leaves(jax.tree.map(lambda x, y: (x - y) ** 2, m, other)))

    with pytest.raises(ValueError, match="Mismatch|structure") as caught:
        pg.grad(distance, wrt="p")(model, prior)
    for remedy in ("dataclasses.replace", "partgrad.replace", "jax.tree.map", "partgrad.thaw(model, ...)"):
        assert remedy in caught.value.__notes__[0]
    np.testing.assert_allclose(pg.grad(distance, wrt="p")(pg.thaw(model, "p"), pg.thaw(prior, "p")), 4.0)
    rebuilt = lambda m: distance(m, dataclasses.replace(m, a=prior.a, p=prior.p))
    np.testing.assert_allclose(pg.grad(rebuilt, wrt="p")(model), 4.0)
    rebuilt = lambda m: distance(m, pg.replace(m, "p", prior.p))
    np.testing.assert_allclose(pg.grad(rebuilt, wrt="p")(model), 4.0)

    def each(m):
        axes = dataclasses.replace(jax.tree.map(lambda _: 0, m), p=None)
        return jax.vmap(lambda k: k.a * k.p, in_axes=(axes,))(m).sum()

    np.testing.assert_allclose(pg.grad(each, wrt="p")(model), 3.0)


def test_the_remedies_for_what_is_refused_in_a_class():
    @pg.dataclass
    class Kernel:
        a: Any
        b: Any = pg.field(init=False)

        def __post_init__(self):
            self.a = jnp.asarray(self.a)
            self.b = 2.0 * self.a

    np.testing.assert_allclose(pg.grad(lambda k: (k.a * k.b).sum())(Kernel([1.0, 2.0])).a, [2.0, 4.0])
    with pytest.raises(errors.DataclassError, match=r"(?s)order=True.*key=lambda m: float\(m.a\)"):
        pg.dataclass(order=True)(type("Ordered", (), {"__annotations__": {"a": float}}))
    models = sorted([K(2.0, 1.0), K(1.0, 2.0)], key=lambda m: float(m.a))
    assert [m.a for m in models] == [1.0, 2.0]
    with pytest.raises(errors.DataclassError, match=r"(?s)`Diff`.*pass the value itself; partgrad.thaw"):
        pg.grad(lambda t: t["b"])({"b": pg.Diff(2.0)})
    with pytest.raises(errors.DataclassError, match=r"(?s)is static.*without static=True"):
        pg.dataclass(type("S", (), {"__annotations__": {"n": int}, "n": pg.field(static=True)}))(pg.Diff(3))


# --- other ways to differentiate inside --------------------------------------------------------------------------------


@pg.dataclass
class Osc:
    amp: Any
    freq: Any = pg.field(nondiff=True)

    def __call__(self, t):
        return self.amp * jnp.sin(self.freq * t)


FLOATS = K(2.0, 3.0)


TIMES = np.linspace(0.1, 1.0, 5).astype(np.float32)


DATA = np.sin(2.0 * TIMES).astype(np.float32)


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
        pytest.param(inner_gradient, FLOATS, "p", true_inner_gradient, id="an inner gradient"),
        pytest.param(inner_partition, FLOATS, "p", scaled, id="an inner partition"),
        pytest.param(inner_ravel, FLOATS, "p", scaled, id="an inner ravel"),
        pytest.param(solver, Osc(1.0, 2.5), "freq", true_amplitude, id="a solver"),
    ],
)
def test_naming_does_not_change_the_function(f, m, wrt, truth):
    got = pg.value_and_grad(f, wrt=wrt)(m)
    np.testing.assert_allclose(got, jax.value_and_grad(truth)(getattr(m, wrt)), rtol=1e-4)


def test_check_reports_what_jax_makes_of_an_open_leaf():
    """The inner `jax.grad` has a zero at the held leaf, and another number at the open one."""
    report = pg.check(lambda m: jax.grad(loss)(m).p + m.a * m.p, wrt="p", progress=False)(FLOATS)
    assert [f.kind for f in report.findings if f.severity == "error"] == ["value"]


def with_model(m):
    return loss(m), m


def test_a_model_in_aux_keeps_its_marks():
    _, aux = pg.grad(with_model, wrt="p", has_aux=True)(FLOATS)
    assert aux == FLOATS
    assert jax.tree.structure(aux) == jax.tree.structure(FLOATS)


def test_a_scan_over_a_step_with_aux():
    step = lambda m, _: pg.grad(with_model, wrt="p", has_aux=True)(m)[::-1]
    _, gradients = jax.lax.scan(step, M, None, length=2)
    np.testing.assert_allclose(gradients, [20.0, 20.0])


@pytest.mark.parametrize(
    ("f", "truth"),
    [
        (lambda m: jax.vmap(lambda k: k.a * k.p, in_axes=(K(0, None),))(m).sum(), 3.0),
        (
            lambda m: sum(leaf.sum() for leaf in jax.tree.leaves(jax.tree.map(lambda x, y: (x - y) ** 2, m, FLOATS))),
            0.0,
        ),
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
