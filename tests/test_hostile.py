"""Objects that answer no question: nothing asks a user's object whether it is true, how long it is or what it equals."""

import dataclasses
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg


def _refuse(self, *_):
    raise RuntimeError("an object was asked a question that nobody put to it")


# What a class may answer as it likes, or not at all.
QUESTIONS = dict.fromkeys(
    [
        "__bool__",
        "__len__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__hash__",
        "__contains__",
        "__iter__",
        "__getitem__",
        "__repr__",
        "__str__",
        "__format__",
    ],
    _refuse,
)


def hostile(cls):
    """A class whose instances raise when they are asked anything."""
    for name, function in QUESTIONS.items():
        setattr(cls, name, function)
    return cls


@hostile
class Opaque:
    """A leaf, or static data."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self)


@hostile
@pg.dataclass(eq=False, repr=False)
class Model:
    w: Any
    p: Any = pg.field(nondiff=True)
    extra: Any = 1

    def __init__(self, w, p, extra=1):
        self.w, self.p, self.extra = w, p, extra


@hostile
@pg.dataclass(eq=False, repr=False)
class Generated:
    w: Any
    p: Any = pg.field(nondiff=True)
    extra: Any = 1


@hostile
class Module(eqx.Module):
    w: Any
    p: Any
    extra: Any = 1


@hostile
@jax.tree_util.register_pytree_with_keys_class
class Node:
    def __init__(self, w, p, extra=1):
        self.w, self.p, self.extra = w, p, extra

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("w"), self.w), (key("p"), self.p), (key("extra"), self.extra)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


MODELS = [Model, Generated, Module, Node]


def loss(model, x=1.0):
    return model.w**2 * model.p * x


# Every public function that takes a tree, of a model with the leaves `w` and `p`.
FUNCTIONS = {
    "select": lambda m: pg.select(m, "w"),
    "select itself": lambda m: pg.select(m, lambda k: k),
    "items": lambda m: list(pg.items(m)),
    "items at": lambda m: list(pg.items(m, "w")),
    "mask": pg.mask,
    "is_nondiff": lambda m: pg.is_nondiff(m, "w"),
    "replace": lambda m: pg.replace(m, "w", 3.0),
    "replace by itself": lambda m: pg.replace({"m": m}, "m", pg.select({"m": m}, "m")),
    "replace by fn": lambda m: pg.replace(m, "w", fn=lambda w: w + 1),
    "partition": lambda m: pg.combine(*pg.partition(m, lambda k: k.w)),
    "partition all": lambda m: pg.combine(*pg.partition(m)),
    "label": lambda m: pg.label(m, {"fast": "w"}, default="slow"),
    "freeze": lambda m: pg.freeze(m, "w"),
    "thaw": lambda m: pg.thaw(pg.freeze(m, "p"), "p"),
    "freeze itself": lambda m: pg.freeze({"m": m}, "m"),
    "stop_gradient": pg.stop_gradient,
    "ravel": lambda m: pg.ravel(m)[1](pg.ravel(m)[0]),
    "apply_updates": lambda m: pg.apply_updates(m, pg.grad(loss)(m)),
    "unwrap": pg.unwrap,
    "NonDiff": lambda m: jax.tree.leaves({"m": pg.NonDiff(m)}),
    "summary": lambda m: str(pg.summary(m)),
    "show": lambda m: str(pg.show(m)),
    "by class": lambda m: pg.grad(lambda t: loss(t["m"]), wrt=type(m))({"m": m}),
    "by mask": lambda m: pg.grad(loss, wrt=pg.mask(m))(m),
    "matching": lambda m: pg.grad(loss, wrt=pg.matching(lambda path, _: path == "w"))(m),
    "each": lambda m: pg.grad(loss, wrt=pg.each(lambda k: k.w))(m),
    "below": lambda m: pg.grad(lambda t: loss(t["m"]), wrt=lambda k: k.w)({"m": m}),
    "union": lambda m: pg.grad(loss, wrt=pg.path("w") | pg.path("p"))(m),
    "exclude": lambda m: pg.grad(loss, wrt=pg.exclude("p"))(m),
    "grad": pg.grad(loss),
    "grad of a name": pg.grad(loss, wrt="p"),
    "grad of a callable": pg.grad(loss, wrt=lambda k: (k.w, k.p)),
    "value_and_grad": pg.value_and_grad(lambda m: (loss(m), m), has_aux=True),
    "unused": pg.grad(loss, wrt="w", unused="error"),
    "nonfinite": pg.grad(loss, wrt="w", nonfinite="report"),
    "jacfwd": pg.jacfwd(loss),
    "jacrev": pg.jacrev(loss),
    "hessian": pg.hessian(loss, wrt="w"),
    "jvp": lambda m: pg.jvp(loss, (m,), (1.0,), wrt="w"),
    "vjp": lambda m: pg.vjp(loss, m, wrt="w")[1](1.0),
    "linearize": lambda m: pg.linearize(loss, m, wrt="w")[1](1.0),
    "hvp": lambda m: pg.hvp(loss, wrt="w")(m, 1.0),
    "double_where": lambda m: jax.grad(lambda w: pg.double_where(loss)(pg.replace(m, "w", w)))(2.0),
    "consistent_indexing": lambda m: jax.grad(lambda w: pg.consistent_indexing(loss)(pg.replace(m, "w", w)))(2.0),
    "check": lambda m: str(pg.check(loss, wrt="w")(m)),
}


@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_asks_a_model(name, cls):
    FUNCTIONS[name](cls(2.0, 3.0))


# What differentiates a leaf that is no array, too, as JAX does not.
OF_LEAVES = sorted(FUNCTIONS.keys() - {"double_where", "consistent_indexing", "check"})


@pytest.mark.parametrize("name", OF_LEAVES)
def test_nothing_asks_a_leaf(name):
    FUNCTIONS[name](Model(2.0, 3.0, Opaque()))
    FUNCTIONS[name](Node(2.0, 3.0, Opaque()))


@hostile
class Functor:
    """A function or a sampler."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


# `inspect.signature` compares what it is given with `type`.
del Functor.__eq__, Functor.__hash__


AROUND = {
    "grad": lambda f: pg.grad(f),
    "value_and_grad": lambda f: pg.value_and_grad(f, has_aux=False),
    "jacrev": lambda f: pg.jacrev(f),
    "hessian": lambda f: pg.hessian(f),
    "jvp": lambda f: lambda x: pg.jvp(f, (x,), (1.0,)),
    "vjp": lambda f: lambda x: pg.vjp(f, x)[1](1.0),
    "linearize": lambda f: lambda x: pg.linearize(f, x)[1](1.0),
    "hvp": lambda f: lambda x: pg.hvp(f)(x, 1.0),
    "double_where": lambda f: jax.grad(pg.double_where(f)),
    "consistent_indexing": lambda f: jax.grad(pg.consistent_indexing(f)),
    "check": lambda f: pg.check(f),
    "fn": lambda f: lambda x: pg.replace(x, None, fn=f),
    "each": lambda f: lambda x: pg.grad(lambda t: t["x"] ** 2, wrt=pg.each(Functor(lambda t: t["x"])))({"x": x}),
    "callable": lambda f: lambda x: pg.grad(lambda t: t["x"] ** 2, wrt=Functor(lambda t: t["x"]))({"x": x}),
    "matching": lambda f: lambda x: pg.grad(f, wrt=pg.matching(Functor(lambda path, leaf: leaf.ndim == 0)))(x),
    "draw": lambda f: lambda x: pg.draw(Functor(lambda key, x: x), jax.random.key(0), x, gradient="pathwise"),
    "capture": lambda f: pg.capture_intermediates(lambda x: checkpoint_name(f(x), "y"), "*"),
}


@pytest.mark.parametrize("name", AROUND)
def test_nothing_asks_a_function(name):
    AROUND[name](Functor(lambda x: x**2))(2.0)


@pytest.mark.parametrize("cls", [Model, Generated])
def test_nothing_asks_an_instance_that_is_rebuilt(cls):
    for model in (cls(2.0, pg.Diff(3.0)), pg.thaw(cls(2.0, 3.0), "p")):
        for rebuilt in (
            dataclasses.replace(model, w=4.0),
            jax.jit(lambda m: dataclasses.replace(m, w=m.w + 1))(model),
            jax.tree.map(lambda leaf: leaf + 1, model),
            pickle.loads(pickle.dumps(model)),
        ):
            assert pg.grad(loss)(rebuilt).p is not None
    frozen = pg.freeze(cls(2.0, pg.Diff(3.0)), "w")
    assert pg.grad(loss)(dataclasses.replace(frozen, w=5.0)).w is None


class Net:
    layers: tuple
    p: float = pg.field(nondiff=True)

    def __init__(self, layers, p):
        self.layers, self.p = layers, p


def _answering(name, answer):
    return pg.dataclass(type("Net", (Net,), {**vars(Net), name: answer}))


ANSWERS = {
    "no layers": ("__len__", lambda self: len(self.layers)),
    "false": ("__bool__", lambda self: False),
    "traced": ("__bool__", lambda self: bool(jnp.any(self.p > 0))),
    "raises": ("__bool__", _refuse),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_replace_keeps_the_marks_of_a_model_whatever_its_truth(name):
    cls = _answering(*ANSWERS[name])
    assert repr(dataclasses.replace(cls((), pg.Diff(2.0)), p=3.0)) == "Net(layers=(), p=Diff(3.0))"
    assert repr(dataclasses.replace(pg.freeze(cls((), pg.Diff(2.0)), "p"), p=3.0)) == "Net(layers=(), p=NonDiff(3.0))"
    assert jax.jit(lambda m: dataclasses.replace(m, p=m.p + 1).p)(cls((), 1.0)) == 2.0
