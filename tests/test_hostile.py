"""Input that nobody would write on purpose: a clear error or the right answer, never a hang or a wrong number."""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import pickle
import subprocess
import sys
import time
import types
import typing
import unittest.mock

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from models import RBF, Periodic
from partgrad import errors

# --- leaves ----------------------------------------------------------------------------------------------------------


def raises(*names):
    """An object whose methods of these names raise."""

    def method(self, *args, **kwargs):
        raise RuntimeError("hostile")

    return type("Hostile", (), {"__hash__": object.__hash__} | dict.fromkeys(names, method))()


class Everything:
    """Has every attribute."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args):
        return self

    def __getitem__(self, index):
        return self

    def __len__(self):
        return 3


class Nothing:
    """Has no attribute at all, except what `isinstance` asks for."""

    def __getattribute__(self, name):
        if name == "__class__":
            return Nothing
        raise RuntimeError("hostile")


class Liar:
    __class__ = property(lambda self: float)


class Typed:
    dtype, shape = "float32", (2,)


class Float(float):
    """A float of another class."""


class Kind(enum.Enum):
    ONE = 1


LEAVES = {
    "repr": raises("__repr__", "__str__"),
    "eq": raises("__eq__", "__ne__"),
    "bool": raises("__bool__", "__len__"),
    "array": raises("__array__"),
    "jax array": raises("__jax_array__"),
    "getattr": raises("__getattr__"),
    "getattribute": Nothing(),
    "hash": raises("__hash__"),
    "everything": Everything(),
    "mock": unittest.mock.MagicMock(),
    "liar": Liar(),
    "a dtype that is text": Typed(),
    "enum": Kind.ONE,
    "class": RBF,
    "module": types,
    "strings": np.array(["a"]),
    "objects": np.array([object()]),
    "record": np.zeros(2, [("x", "f4")]),
    "date": np.datetime64("2020-01-01"),
    "ellipsis": ...,
    "NotImplemented": NotImplemented,
    "a large int": 10**400,
    "bytes": b"x",
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
}


def first(tree):
    return tree["w"] ** 2


OPERATIONS = {
    "grad": lambda t: pg.grad(first)(t)["w"] == 4.0,
    "named": lambda t: pg.grad(first, wrt=lambda t: t["w"])(t) == 4.0,
    "path": lambda t: pg.value_and_grad(first, wrt="w")(t) == (4.0, 4.0),
    "partition": lambda t: pg.combine(*pg.partition(t))["h"] is t["h"],
    "mask": lambda t: pg.mask(t, None) == {"h": False, "w": True},
    "ravel": lambda t: pg.ravel(t)[1](pg.ravel(t)[0])["h"] is t["h"],
    "freeze": lambda t: pg.thaw(pg.freeze(t, "w"), "w")["h"] is t["h"],
    "items": lambda t: pg.items(t) == [("['w']", 2.0)],
    "replace": lambda t: pg.replace(t, "w", 3.0)["w"] == 3.0,
    "label": lambda t: pg.label(t, {"slow": "w"}, default="other")["w"] == "slow",
    "summary": lambda t: "'w'" in str(pg.summary(t)),
    "wrapper": lambda t: "NonDiff" in repr(pg.NonDiff([t["h"]])),
    "model": lambda t: "RBF(" in repr(RBF(t["h"], 2.0)),
    "static": lambda t: "Static" in repr(pg.Static([t["h"]])),
    "diff": lambda t: "Diff([" in repr(pg.Diff([t["h"]])),
}
NOT_STATIC = ("key", "eq", "hash", "objects", "record", "date", "float0", "strings", "getattribute")


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_is_not_differentiated_may_be_anything(name):
    tree = {"h": LEAVES[name], "w": 2.0}
    for operation, holds in OPERATIONS.items():
        try:
            assert holds(tree), operation
        except errors.StaticError:
            assert (operation, name in NOT_STATIC) == ("static", True)
    with pytest.raises(errors.NotDifferentiableError, match="cannot be differentiated"):
        pg.grad(first, wrt="h")(tree)
    with pytest.raises(errors.NoMatchError, match="matches nothing"):
        pg.select(tree, "nowhere")


def test_a_subclass_of_float_is_a_number():
    tree = {"h": Float(3.0), "w": 2.0}
    vector, unravel = pg.ravel(tree)
    assert vector.tolist() == [3.0, 2.0]
    assert unravel(vector)["h"] == 3.0
    assert pg.grad(lambda t: t["h"] ** 2)(tree)["h"] == 6.0


class Mute(float):
    def __repr__(self):
        raise RuntimeError("hostile")


class Alike(float):
    def __repr__(self):
        return "?"


def test_static_numbers_are_told_apart_by_value_whatever_they_print():
    assert repr(pg.Diff(Mute(1.0))) == "Diff(<Mute>)"
    for kind in (Mute, Alike):
        assert pg.Static(kind(1.0)) == pg.Static(kind(1.0)) != pg.Static(kind(2.0))
        assert pg.Static(kind(0.0)) != pg.Static(kind(-0.0))
        assert pg.Static(kind("nan")) == pg.Static(kind("nan"))
    scaled = jax.jit(lambda static, x: x * static.value)
    assert [scaled(pg.Static(Alike(number)), 1.0) for number in (1.0, 2.0)] == [1.0, 2.0]


def test_a_donated_array_is_shown():
    gone = jnp.ones(2) + 1
    gone.delete()
    model = RBF(gone, pg.NonDiff(2.0))
    assert repr(model) == "RBF(variance=deleted f32[2], lengthscale=NonDiff(2.0))"
    assert "deleted" in str(pg.summary(model))
    with pytest.raises(RuntimeError, match="deleted"):
        pg.grad(lambda k: k.variance.sum())(model)


@pytest.mark.parametrize(
    ("leaf", "word"), [(np.ma.array([1.0, 2.0], mask=[0, 1]), "masked"), (np.longdouble(1.5), "float128")]
)
def test_floats_that_jax_does_not_take(leaf, word):
    with pytest.raises((TypeError, ValueError), match=word):
        pg.grad(lambda t: t["w"])({"h": leaf, "w": 2.0})


# --- keys and names --------------------------------------------------------------------------------------------------


@functools.total_ordering
class Key:
    def __init__(self, number, text="weird[key].*"):
        self.number, self.text = number, text

    def __eq__(self, other):
        if not isinstance(other, Key):
            raise TypeError("hostile")
        return self.number == other.number

    def __lt__(self, other):
        return self.number < other.number

    def __hash__(self):
        return hash(self.number)

    def __repr__(self):
        if self.text is None:
            raise RuntimeError("hostile")
        return self.text


class Text(str):
    """A string of another class."""


STRINGS = ["", " ", "é", "e\u0301", "a\nb", "'", '"', "\\", "*", "**", "a.b", "[0]", "]", "\ud800", "\u202e", "None"]
STRINGS += ["self", "__class__", "lambda", "value", "class"]
KEYS = {
    "strings": STRINGS,
    "tuples": [(1, 2), (1, 3)],
    "floats": [0.5, 1.5, float("inf")],
    "ints": [-1, 0, 7],
    "bools": [False, True],
    "bytes": [b"a", b"b"],
    "other strings": [Text("w"), Text("x")],
    "enums": [Kind.ONE],
    "None": [None],
    "NaN": [float("nan")],
    "objects": [Key(1, "Key(1)"), Key(2, "Key(2)")],
    "reprs that raise": [Key(1, None), Key(2, None)],
    "reprs that are patterns": [Key(1), Key(2)],
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_dicts(kind):
    tree = collections.OrderedDict((key, float(number)) for number, key in enumerate(KEYS[kind], 1))
    squares = lambda t: sum(x**2 for x in jax.tree.leaves(t))
    assert list(pg.grad(squares)(tree).values()) == [2.0 * x for x in tree.values()]
    for key in tree:
        assert pg.grad(squares, wrt=lambda t, key=key: t[key])(tree) == 2.0 * tree[key]
    if "repr" not in kind:
        for path, value in pg.items(tree):
            assert pg.select(tree, path) == value, path
    assert str(pg.summary(tree))
    assert repr(RBF(dict(tree), 1.0))
    with pytest.raises(errors.NoMatchError):
        pg.select(tree, "nowhere")


def test_fields_of_unusual_names():
    names = [
        "value",
        "é",
        "ñandú",
        "self",
        "_x",
        "__dunder__",
        "marks",
        "tree",
        "leaves",
        "cls",
        "object",
        "hold",
    ]
    cls = pg.dataclass(type("Names", (), {"__annotations__": dict.fromkeys(names, typing.Any)}))
    model = cls(*map(float, range(1, len(names) + 1)))
    assert [path for path, _ in pg.items(model)] == names
    for name in names:
        assert pg.grad(lambda m: sum(x**2 for x in jax.tree.leaves(m)), wrt=name)(model) == 2 * getattr(model, name)
        assert pg.thaw(pg.freeze(model, name), name) == model


@pytest.mark.parametrize("name", ["class", "a b", "__dict__", "__class__"])
def test_names_that_no_field_can_have(name):
    cls = type("Reserved", (), {"__annotations__": {name: typing.Any}})
    with pytest.raises(errors.DataclassError, match="cannot be a partgrad dataclass|is a field"):
        pg.dataclass(cls)


# --- classes ---------------------------------------------------------------------------------------------------------


def test_a_class_whose_getattr_answers_everything():
    @pg.dataclass
    class Model:
        a: typing.Any
        p: typing.Any = pg.field(nondiff=True, default=3.0)

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return 42.0

    model = Model(2.0)
    f = lambda m: m.a**2 * m.p * m.other
    assert (pg.grad(f)(model).a, pg.grad(f)(model).p) == (504.0, None)
    assert pg.grad(f, wrt="p")(model) == 168.0
    for copied in (
        copy.copy(model),
        copy.deepcopy(model),
        dataclasses.replace(model),
        pg.combine(*pg.partition(model)),
    ):
        assert copied == model


def test_a_class_whose_getattr_raises():
    @pg.dataclass
    class Model:
        a: typing.Any

        def __getattr__(self, name):
            raise RuntimeError(f"no {name}")

    assert pg.grad(lambda m: m.a**2)(Model(2.0)).a == 4.0
    assert "Model(a=2.0)" in repr(Model(2.0))
    assert pg.grad(lambda t: t[0].a ** 2, wrt="[0].a")([Model(2.0)]) == 4.0


class Doubling:
    """A descriptor that hides what an instance stores."""

    def __get__(self, instance, owner=None):
        return 2.0

    def __set__(self, instance, value):
        pass


@pytest.mark.parametrize("descriptor", [property(lambda self: 7.0), Doubling()])
def test_descriptors_with_the_names_of_fields_are_refused(descriptor):
    with pytest.raises(errors.DataclassError, match=r"(?s)`Model.a` is a field.*another name"):
        pg.dataclass(type("Model", (), {"__annotations__": {"a": typing.Any}, "a": descriptor}))
    base = pg.dataclass(type("Base", (), {"__annotations__": {"a": typing.Any}}))
    with pytest.raises(errors.DataclassError, match=r"`Model.a` is a field"):
        pg.dataclass(type("Model", (base,), {"a": descriptor}))


def test_a_cached_property_and_a_function_may_be_defaults():
    @pg.dataclass
    class Model:
        a: typing.Any
        activation: typing.Callable = jnp.tanh

        @functools.cached_property
        def square(self):
            return self.a**2

    assert pg.grad(lambda m: m.activation(0.0) + m.square)(Model(2.0)).a == 4.0


def test_multiple_inheritance():
    @pg.dataclass
    class Left:
        a: typing.Any = 1.0
        p: typing.Any = pg.field(nondiff=True, default=2.0)

    @pg.dataclass
    class Right:
        p: typing.Any = 5.0
        q: typing.Any = pg.field(nondiff=True, default=3.0)

    @pg.dataclass
    class Mixin:
        def total(self):
            return sum(x**2 for x in jax.tree.leaves(self))

    @pg.dataclass
    class One(Left, Right, Mixin):
        r: typing.Any = 4.0

    @pg.dataclass
    class Other(Right, Left, Mixin):
        r: typing.Any = 4.0

    for cls in (One, Other):
        model = cls()
        declared = {field.name: field.metadata.get("nondiff", False) for field in dataclasses.fields(cls)}
        assert declared == {"a": False, "p": cls is One, "q": True, "r": False}
        gradient = pg.grad(cls.total)(model)
        for name, held in declared.items():
            assert getattr(gradient, name) == (None if held else 2 * getattr(model, name))
        assert pickle.loads(cloudpickle.dumps(model)) is not None


def test_classes_of_one_name():
    def define(power):
        @pg.dataclass
        class Model:
            a: typing.Any
            p: typing.Any = pg.field(nondiff=power == 2, default=1.0)

            def __call__(self):
                return self.a**power * self.p

        return Model

    first, second = define(2)(3.0), define(3)(3.0)
    f = pg.grad(lambda m: m(), wrt=lambda m: m.a)
    assert [f(first), f(second), f(first)] == [6.0, 27.0, 6.0]
    assert (pg.grad(lambda m: m())(first).p, pg.grad(lambda m: m())(second).p) == (None, 27.0)
    assert first != second
    with pytest.raises(errors.PartsError, match="a different structure"):
        pg.combine(pg.partition(first)[0], pg.partition(second)[1])


# --- size and depth --------------------------------------------------------------------------------------------------


def nested(depth, wrap):
    tree = 2.0
    for _ in range(depth):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize("wrap", [lambda t: pg.NonDiff([t]), lambda t: Periodic(1.0, 1.0, t)], ids=["wrapper", "field"])
def test_marks_inside_of_marks_take_no_exponential_time(wrap):
    tree = nested(60, wrap)
    start = time.process_time()
    f = lambda t: sum(x**2 for x in jax.tree.leaves(t))
    assert jax.make_jaxpr(f)(tree).out_avals[0].shape == ()
    assert {float(x) for x in jax.tree.leaves(jax.grad(f)(tree))} <= {0.0, 2.0}
    assert time.process_time() - start < 20


ON_ANY_TREE = {
    "grad": pg.grad(lambda t: 1.0),
    "double_where": lambda t: pg.double_where(lambda t, x: x**2)(t, 2.0) == 4.0,
    "summary": pg.summary,
    "partition": pg.partition,
    "freeze": lambda t: pg.freeze(t, None),
    "thaw": lambda t: pg.thaw(t, None),
    "NonDiff": pg.NonDiff,
    "Static": pg.Static,
}


@pytest.mark.parametrize("depth", [200, 900, 3000])
def test_depth(depth):
    tree = nested(depth, lambda t: [t])
    for use in ON_ANY_TREE.values():
        # How deep is too deep for JAX differs between versions of Python.
        refusal = (errors.ArgumentError, errors.StaticError) if depth > 500 else ()
        with contextlib.suppress(*refusal):
            assert use(tree) is not None
    assert repr(RBF(tree, 1.0))


@pytest.mark.parametrize("name", [*ON_ANY_TREE, "check"])
def test_a_list_that_contains_itself(name):
    # Not a dict or a model: after those JAX leaves the interpreter with no levels to call anything.
    tree = [1.0]
    tree.append(tree)
    use = ON_ANY_TREE.get(name) or (lambda t: pg.check(lambda t: t[0])(t))
    with pytest.raises(errors.ArgumentError, match="contains itself"):
        use(tree)


class Losing:
    """Registered, by a function that forgets to return what it builds."""


jax.tree_util.register_pytree_node(Losing, lambda node: ((1.0, 2.0), None), lambda data, children: None)


def test_a_class_that_loses_its_leaves():
    assert pg.items(Losing()) == [("[0]", 1.0), ("[1]", 2.0)]
    with pytest.raises(errors.SelectionError, match="does not keep the slots"):
        pg.select(Losing(), lambda t: t.a)


@pytest.mark.slow
def test_twenty_thousand_leaves():
    tree = {"w": [0.5] * 20_000, "s": 2.0}
    start = time.process_time()
    assert pg.grad(lambda t: t["s"] ** 2, wrt="s")(tree) == 4.0
    selected, rest = pg.partition(tree, "s")
    assert pg.combine(selected, rest) == tree
    assert sum(jax.tree.leaves(pg.mask(tree, "w"))) == 20_000
    frozen = pg.freeze(tree, "w")
    assert len(jax.tree.leaves(pg.partition(frozen)[0])) == 1
    assert "20,001" in str(pg.summary(tree)) or "20001" in str(pg.summary(tree))
    assert time.process_time() - start < 60


# --- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cloudpickle_takes_classes_to_another_process(tmp_path):
    @pg.dataclass
    class Local:
        a: typing.Any
        p: typing.Any = pg.field(nondiff=True)
        name: str = pg.field(static=True, default="x")

        def loss(self):
            return (self.a * self.p) ** 2

    models = [
        Local(2.0, 3.0),
        pg.freeze(Local(2.0, 3.0), "a"),
        Local(2.0, pg.Diff(3.0)),
        {"w": pg.NonDiff(Local(1.0, 2.0))},
    ]
    gradients = pg.grad(lambda m: m.loss(), wrt=lambda m: (m.a, m.p))
    path = tmp_path / "models.pickle"
    path.write_bytes(cloudpickle.dumps((models, gradients)))
    program = (
        "import pickle, sys, partgrad as pg\n"
        "models, gradients = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(models)\n"
        "print([tuple(map(float, gradients(m))) for m in models[:3]], pg.grad(type(models[0]).loss)(models[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        str(models),
        "[(36.0, 24.0), (36.0, 24.0), (36.0, 24.0)] " + str(pg.grad(Local.loss)(models[0])),
    ], done.stderr
