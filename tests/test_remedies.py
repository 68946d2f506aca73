"""Every remedy that an error of marks, selectors or transforms states is followed literally, and gives the right number."""

import ast
import dataclasses
import functools
import itertools
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import partgrad as pg
from helpers.models import Config, Point
from partgrad import NonDiff, Static, errors

TREE = {"a": {"x": 2.0, "y": 3.0}, "b": 5.0, "n": 4}
LAYERS = {"layers": [{"base": 1.0, "w": 2.0} for _ in range(4)]}
VECTOR = {"w": jnp.array([1.0, 2.0, 3.0]), "b": 5.0}


def twice(x):
    return checkpoint_name(2 * x, "block1") * checkpoint_name(x**2, "block2") / 2


def product(x, y):
    return x * y


def blocks(x):
    """h = x, then 2 h and h^2 in two blocks, and half their product: h^3."""
    h = checkpoint_name(x, "h")
    return checkpoint_name(2 * h, "block1") * checkpoint_name(h**2, "block2") / 2


@jax.custom_jvp
def ruled(x):
    return checkpoint_name(2 * x, "inside")


ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2 * tangents[0]))


def branches(first, second):
    return lambda x: jax.lax.cond(
        x[0] > 0, lambda x: checkpoint_name(x, first).sum(), lambda x: checkpoint_name(x[0], second), x
    )


def value(t):
    """Of TREE: its derivatives are 15, 10 and 6."""
    return t["a"]["x"] * t["a"]["y"] * t["b"]


@pg.dataclass
class K:
    a: Any
    p: Any = pg.field(nondiff=True)

    def __call__(self, x):
        return self.a * self.p * x


def loss(m):
    return (m.a * m.p - 1.0) ** 2


M = K(jnp.float32(2.0), jnp.float32(3.0))


def made(name="Made", decorate=pg.dataclass, bases=(), **members):
    """A class with a field `a: float`, or with those that are given."""
    return decorate(type(name, bases, {"__annotations__": {"a": float}, **members}))


LOCAL = made("Nowhere")


def stored(f, x, *others, **options):
    """What another process reads of a call whose derivative is not finite."""
    with tempfile.TemporaryDirectory() as folder:
        pg.grad(f, nonfinite=pg.KeepCalls(folder))(x)
        return pg.last_nonfinite(folder, *others, **options)


def doubled(model):
    return 2.0 * model.a


class Pair(NamedTuple):
    first: Any
    second: Any


def rebuilt(state):
    @pg.dataclass
    class Versioned:
        a: Any = pg.field(static=True)

        def __setstate__(self, state):
            self.__init__(a=state["a"])

    new = object.__new__(Versioned)
    new.__setstate__(state)
    return new


class Keyed:
    def __init__(self, data):
        self.data = data

    __hash__ = None

    def __eq__(self, other):
        return self.data == other.data


class Hashed(Keyed):
    def __hash__(self):
        return hash(self.data)


class Closed(Hashed):
    def __reduce__(self):
        raise TypeError("closed")


@dataclasses.dataclass
class Forgotten:
    a: Any


def mutable():
    return made("Mutable", functools.partial(pg.dataclass, frozen=False), __call__=lambda self, x: self.a * x)(2.0)


class Computing:
    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(
    Computing, lambda node: ((node.x,), None), lambda _, inner: Computing(1.0 * inner[0])
)


class Unnamed:
    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(Unnamed, lambda node: ((node.x,), None), lambda _, inner: Unnamed(*inner))


def own_init():
    return made(__init__=lambda self: set_in(self, a=1.0))()


def set_in(model, **values):
    for name, new in values.items():
        setattr(model, name, new)
    return model


def deleted(model):
    del model.a


def thawed_diff():
    return pg.grad(lambda t: t["b"] ** 2)(pg.thaw({"b": NonDiff(2.0)}, "b"))["b"]


def old_and_new():
    return made("Model"), made("Model")


OLD, NEW = old_and_new()


def static_field(**options):
    return made("S", __annotations__={"a": float, "n": Any}, n=pg.field(**options))


@pg.register_nondiff
@pg.dataclass
class Buffer:
    x: Any


@pg.dataclass
class Box:
    width: Any
    height: Any

    @property
    def area(self):
        return self.width * self.height

    @property
    def side(self):
        return self.width

    @property
    def shape(self):
        return shape_of(self)


def shape_of(box):
    return f"{box.width} by {box.height + 0}"


def is_vector(leaf):
    return getattr(leaf, "ndim", 0) == 1


# For each: what is wrong, what its remedy says to write, and the numbers that this gives.
SHARED = jnp.arange(3.0)

ROWS = {
    "a number where a function belongs": (
        lambda: pg.replace({"a": 1.0}, "a", fn=3.0),
        lambda: pg.replace({"a": 1.0}, "a", 3.0)["a"],
        [3.0],
    ),
    "a direction of another dtype": (
        lambda: pg.jvp(lambda m: m["a"], ({"a": jnp.ones(2)},), ({"a": jnp.ones(2, int)},)),
        lambda: pg.jvp(lambda m: m["a"], ({"a": jnp.ones(2)},), ({"a": jnp.asarray(jnp.ones(2, int), "float32")},))[1],
        [1.0, 1.0],
    ),
    "a complex direction of a real leaf": (
        lambda: pg.jvp(lambda m: m["a"], ({"a": 1.0},), ({"a": 1j},)),
        lambda: pg.jvp(lambda m: m["a"], ({"a": 1.0},), ({"a": 1.0},))[1],
        [1.0],
    ),
    "states of two optimisers": (
        lambda: pg.carry_over({"mean": 1.0}, {"trace": 1.0}),
        lambda: pg.carry_over({"mean": 1.0}, {"mean": pg.partition({"w": 0.0, "b": 1.0}, "w")[0]["w"]})["mean"],
        [1.0],
    ),
    "states of two models": (
        lambda: pg.carry_over({"w": jnp.ones(2), "b": 1.0}, {"w": jnp.ones(3), "b": 0.0}),
        lambda: pg.carry_over({"b": 1.0}, {"w": jnp.ones(3), "b": 0.0})["b"],
        [1.0],
    ),
    "a condition that is a number": (
        lambda: pg.stop_gradient({"a": 1.0}, "a", when=30),
        lambda: pg.stop_gradient({"a": 1.0}, "a", when=30 < 100)["a"],
        [1.0],
    ),
    "a tie that is a word": (
        lambda: pg.ravel({"a": SHARED, "b": SHARED}, tie="yes"),
        lambda: float(pg.ravel({"a": SHARED, "b": SHARED}, tie=True)[1].size),
        [3.0],
    ),
    "a value that is too large": (
        lambda: pg.replace({"a": jnp.zeros(2, "uint8")}, "a[0]", 300),
        lambda: float(pg.replace({"a": jnp.zeros(2, "uint8")}, "a[0]", 255)["a"][0]),
        [255.0],
    ),
    "a fraction in integers": (
        lambda: pg.replace({"a": jnp.array([1, 2])}, "a[0]", 1.5),
        lambda: pg.replace(
            pg.replace({"a": jnp.array([1, 2])}, "['a']", fn=lambda x: x.astype("float32")), "a[0]", 1.5
        )["a"],
        [1.5, 2.0],
    ),
    "a traced integer that may be too large": (
        lambda: jax.jit(lambda x: pg.replace({"a": jnp.zeros(2, "uint8")}, "a[0]", x)["a"])(jnp.int32(3)),
        lambda: jax.jit(lambda x: pg.replace({"a": jnp.zeros(2, "uint8")}, "a[0]", x.astype("uint8"))["a"])(
            jnp.int32(3)
        ),
        [3.0, 0.0],
    ),
    "a traced value in an array of NumPy": (
        lambda: jax.jit(lambda x: pg.replace({"a": np.array([0.1, 0.1])}, "a[0]", x)["a"])(0.5),
        lambda: jax.jit(lambda x: pg.replace({"a": jnp.asarray(np.array([0.5, 0.1]))}, "a[0]", x)["a"][0])(0.5),
        [0.5],
    ),
    "an attribute that is a key": (
        lambda: pg.grad(lambda t: t["a"]["x"] ** 2 * t["b"], wrt=lambda t: t.a)(TREE),
        lambda: pg.grad(lambda t: t["a"]["x"] ** 2 * t["b"], wrt=lambda t: t["a"])(TREE)["x"],
        [20.0],
    ),
    "an index that a list has not": (
        lambda: pg.select([1.0, 2.0], lambda t: t[5]),
        lambda: pg.select([1.0, 2.0], lambda t: t[1]),
        [2.0],
    ),
    "an index that a list of one has not": (
        lambda: pg.select({"layers": [3.0]}, "layers[1]"),
        lambda: pg.select({"layers": [3.0]}, "['layers'][0]"),
        [3.0],
    ),
    "a key in a wrapper": (
        lambda: jax.random.normal(NonDiff(jax.random.key(0))),
        lambda: jax.random.normal(NonDiff(jax.random.key(0)).value) - jax.random.normal(jax.random.key(0)),
        [0.0],
    ),
    "a field without a value": (
        lambda: made(__init__=lambda self: None)(),
        lambda: (doubled(made(__init__=lambda self: setattr(self, "a", 2.0))()), doubled(made(a=3.0)())),
        [4.0, 6.0],
    ),
    "an undeclared attribute": (
        lambda: made(__post_init__=lambda self: set_in(self, c=1.0))(2.0),
        lambda: (
            made(
                __annotations__={"a": float, "c": float},
                c=pg.field(init=False),
                __post_init__=lambda self: set_in(self, c=3 * self.a),
            )(2.0).c,
            made(c=property(lambda self: 3 * self.a))(2.0).c,
        ),
        [6.0, 6.0],
    ),
    "a subclass without the decorator": (
        lambda: type("Sub", (K,), {})(1.0, 2.0),
        lambda: pg.grad(loss)(pg.dataclass(type("Sub", (K,), {}))(2.0, 3.0)).a,
        [30.0],
    ),
    "a misspelled field": (
        lambda: dataclasses.replace(own_init(), aa=2.0),
        lambda: doubled(dataclasses.replace(own_init(), a=2.0)),
        [4.0],
    ),
    "an unknown field": (
        lambda: dataclasses.replace(own_init(), temperature=2.0),
        lambda: doubled(dataclasses.replace(own_init(), a=2.0)),
        [4.0],
    ),
    "assigning": (
        lambda: set_in(made()(1.0), a=2.0),
        lambda: (
            doubled(dataclasses.replace(made()(1.0), a=2.0)),
            doubled(set_in(mutable(), a=2.0)),
        ),
        [4.0, 4.0],
    ),
    "deleting": (lambda: deleted(mutable()), lambda: jax.tree.leaves(set_in(mutable(), a=None)), []),
    "the hash of what may change": (
        lambda: hash(mutable()),
        lambda: (
            jax.jit(lambda m, x: m(x))(mutable(), 3.0),
            jax.jit(made(__call__=lambda self, x: self.a * x)(2.0))(3.0),
        ),
        [6.0, 6.0],
    ),
    "Diff elsewhere": (lambda: pg.grad(lambda t: t["b"] ** 2)({"b": pg.Diff(2.0)}), thawed_diff, [4.0]),
    "Diff in a static field": (
        lambda: static_field(static=True)(1.0, pg.Diff(3.0)),
        lambda: (
            static_field(static=True)(1.0, 3.0).n,
            pg.grad(lambda m: m.a * m.n)(static_field()(1.0, pg.Diff(3.0))).n,
        ),
        [3.0, 1.0],
    ),
    "static data that cannot be taken apart": (
        lambda: Static(Closed((3.0,))),
        lambda: Static(Closed((3.0,)).data).value[0],
        [3.0],
    ),
    "static data that cannot be compared": (
        lambda: Static(Keyed((2.0,))),
        lambda: (Static(Hashed((2.0,))).value.data, Static((2.0,)).value),
        [2.0, 2.0],
    ),
    "a mark in another dataclass": (
        lambda: pg.grad(loss)(
            jax.tree_util.register_dataclass(made("R", dataclasses.dataclass, a=pg.field(nondiff=True)), ["a"], [])(1.0)
        ),
        lambda: (
            pg.is_nondiff(made(a=pg.field(nondiff=True))(1.0), "a"),
            pg.is_nondiff(pg.freeze({"r": Point(1.0, 2.0)}, "r.x"), "r.x"),
        ),
        [True, True],
    ),
    "a model of another version of its class": (
        lambda: made("V", a=pg.field(static=True)).__setstate__(
            object.__new__(made("V", a=pg.field(static=True))), {"a": 1}
        ),
        lambda: rebuilt({"a": 3.0}).a,
        [3.0],
    ),
    "static and nondiff": (
        lambda: pg.field(static=True, nondiff=True),
        lambda: (
            pg.is_nondiff(made(a=pg.field(nondiff=True))(1.0), "a"),
            len(jax.tree.leaves(made(a=pg.field(static=True))(1.0))),
        ),
        [True, 0],
    ),
    "a converter": (
        lambda: made(a=dataclasses.field(metadata={"converter": jnp.asarray})),
        lambda: doubled(made(__post_init__=lambda self: set_in(self, a=jnp.asarray(self.a)))([1.0, 2.0])),
        [2.0, 4.0],
    ),
    "compare=False": (
        lambda: made(a=dataclasses.field(compare=False)),
        lambda: [jax.jit(made(a=pg.field(), __call__=lambda self, x: x / self.a)(a))(1.0) for a in (0.5, 4.0)],
        [2.0, 0.25],
    ),
    "a forgotten decorator": (
        lambda: pg.grad(lambda t: t["f"].a * t["b"])({"f": Forgotten(jnp.float32(2.0)), "b": 3.0}),
        lambda: (
            pg.grad(lambda t: t["f"].a * t["b"])({"f": pg.dataclass(made("F", lambda cls: cls))(2.0), "b": 3.0}),
            pg.grad(lambda t: t["f"].value.a * t["b"])({"f": Static(Hashable(2.0)), "b": 3.0}),
        ),
        [2.0, 3.0, 2.0],
    ),
    "no class": (
        lambda: pg.dataclass(3),
        lambda: (doubled(made()(1.0)), doubled(made("C", pg.dataclass(kw_only=True))(a=1.0))),
        [2.0, 2.0],
    ),
    "an order": (
        lambda: made("O", pg.dataclass(order=True)),
        lambda: [m.a for m in sorted([made()(2.0), made()(1.0)], key=lambda m: float(m.a))],
        [1.0, 2.0],
    ),
    "a base that is not frozen": (
        lambda: made(bases=(Forgotten,)),
        lambda: doubled(made(bases=(made("B", dataclasses.dataclass(frozen=True)),))(1.0)),
        [2.0],
    ),
    "slots": (
        lambda: made("S", pg.dataclass(slots=True)),
        lambda: doubled(made()(1.0)),
        [2.0],
    ),
    "a property with the name of a field": (
        lambda: made("P", bases=(type("B", (), {"a": property(lambda self: 1.0)}),)),
        lambda: doubled(made("P", bases=(type("B", (), {"b": property(lambda self: 1.0)}),))(1.0)),
        [2.0],
    ),
    "two decorators": (lambda: pg.dataclass(made()), lambda: doubled(made()(1.0)), [2.0]),
    "a slot that is kept": (
        lambda: (kept := [], pg.select(TREE, lambda t: kept.append(t["b"]) or t["b"]), kept[0].shape),
        lambda: (
            (shapes := []),
            pg.select(VECTOR, lambda t: shapes.append(t["w"].shape) or t["b"]),
            shapes,
        )[1:],
        [5.0, 3],
    ),
    "an element that is not there": (
        lambda: pg.grad(lambda t: t["w"].sum(), wrt=lambda t: t["w"][7])(VECTOR),
        lambda: [pg.grad(lambda t: (t["w"] ** 2).sum(), wrt=wrt)(VECTOR) for wrt in (lambda t: t["w"][2], "w")],
        [6.0, 2.0, 4.0, 6.0],
    ),
    "computing on a slot": (
        lambda: pg.grad(value, wrt=lambda t: t["b"] * 2)(TREE),
        lambda: pg.grad(lambda b: value({**TREE, "b": b / 2}))(10.0),
        [3.0],
    ),
    "a selector that changes the tree": (
        lambda: pg.select(LAYERS, lambda t: t["layers"].pop()),
        lambda: pg.select(LAYERS, lambda t: list(t["layers"]).pop()["w"]),
        [2.0],
    ),
    "a mask of another structure": (
        lambda: pg.grad(value, wrt={"a": True})(TREE),
        lambda: [
            pg.partition(TREE, mask)[0]
            for mask in (jax.tree.map(lambda leaf: leaf == 5.0, TREE), {"a": False, "b": True, "n": False})
        ],
        [5.0, 5.0],
    ),
    "no parts": (pg.combine, lambda: pg.combine(*pg.partition(TREE)), [2.0, 3.0, 5.0, 4]),
    "parts of two trees": (
        lambda: pg.combine({"a": 1.0}, {"b": 1.0}),
        lambda: pg.combine(*pg.partition(TREE)),
        [2.0, 3.0, 5.0, 4],
    ),
    "parts that overlap": (
        lambda: pg.combine({"a": 1.0}, {"a": 2.0}),
        lambda: pg.combine(*pg.partition(TREE, pg.mask(TREE, "b"))),
        [2.0, 3.0, 5.0, 4],
    ),
    "updates of another structure": (
        lambda: pg.apply_updates(TREE, {"a": 1.0}),
        lambda: (
            pg.apply_updates(pg.partition(TREE, "**.x")[0], pg.partition(TREE, "**.x")[0]),
            pg.apply_updates(TREE, pg.partition(TREE, "**.x")[0])["a"]["x"],
        ),
        [4.0, 4.0],
    ),
    "a path that cannot be read": (
        lambda: pg.grad(value, wrt="a$x")(TREE),
        lambda: [pg.select(LAYERS, "layers[0].base"), pg.select({"w": Point(2.0, 3.0)}, "['w'].x")],
        [1.0, 2.0],
    ),
    "the argument's name": (lambda: pg.select(TREE, "tree.zzz"), lambda: pg.select(TREE, "a.x"), [2.0]),
    "a misspelled path": (lambda: pg.select(TREE, "a.xx"), lambda: pg.select(TREE, "a.x"), [2.0]),
    "what its class holds": (
        lambda: pg.thaw({"b": Buffer(3.0), "w": 2.0}, "b"),
        lambda: pg.grad(lambda t: t["b"].x ** 2 * t["w"], wrt="b.x")({"b": Buffer(3.0), "w": 2.0}),
        [12.0],
    ),
    "what is no class of one's own": (
        lambda: pg.register_nondiff(dict),
        lambda: [pg.partition(pg.freeze(TREE, "a"))[0], pg.partition({"b": Buffer(3.0), "w": 2.0})[0]],
        [5.0, 2.0],
    ),
    "the whole of it": (
        lambda: pg.items(TREE, pg.path(re.compile("x"))),
        lambda: dict(pg.items(TREE, pg.path(re.compile(".*(?:x).*")))),
        [2.0],
    ),
    "a path that no expression matches": (
        lambda: pg.items(TREE, pg.path(re.compile("q"))),
        lambda: dict(pg.items(TREE, pg.path(re.compile(r"\['a'\].*")))),
        [2.0, 3.0],
    ),
    "an expression that is no selector": (
        lambda: pg.items(TREE, re.compile(".*x.*")),
        lambda: dict(pg.items(TREE, pg.path(re.compile(".*x.*")))),
        [2.0],
    ),
    "an index that is not there": (
        lambda: pg.select(LAYERS, "layers[4].w"),
        lambda: [pg.select(LAYERS, "layers[0].w"), pg.select(LAYERS, "layers[3].w")],
        [2.0, 2.0],
    ),
    "a slice that takes nothing": (
        lambda: pg.select(LAYERS, "layers[5:]"),
        lambda: pg.select(LAYERS, "layers[3:]"),
        [1.0, 2.0],
    ),
    "an index as PyTorch writes it": (
        lambda: pg.select(LAYERS, "layers.0.w"),
        lambda: pg.select(LAYERS, "layers[0].w"),
        [2.0],
    ),
    "an index into a named tuple": (
        lambda: pg.select({"p": Pair(2.0, 3.0)}, "p[1]"),
        lambda: pg.select({"p": Pair(2.0, 3.0)}, "['p'].second"),
        [3.0],
    ),
    "the name of the argument": (
        lambda: pg.select(LAYERS, "net.layers[-1]"),
        lambda: pg.select(LAYERS, "layers[-1]"),
        [1.0, 2.0],
    ),
    "static data by its path": (
        lambda: pg.select(static_field(static=True)(1.0, 3.0), "n"),
        lambda: pg.select(static_field()(1.0, 3.0), "n"),
        [3.0],
    ),
    "a path to what is static": (
        lambda: pg.grad(lambda t: t["a"] * 2, wrt="k")({"a": 1.0, "k": Static("x")}),
        lambda: pg.grad(lambda t: t["a"] * t["k"], wrt="k")({"a": 2.0, "k": 3.0}),
        [2.0],
    ),
    "a class that is registered without names": (
        lambda: pg.select({"m": Unnamed(3.0)}, "m.x"),
        lambda: [pg.select({"m": Unnamed(3.0)}, "['m'][0]"), pg.select({"m": Unnamed(3.0)}, lambda t: t["m"].x)],
        [3.0, 3.0],
    ),
    "a property": (
        lambda: pg.grad(lambda m: m.area, wrt="area")(Box(2.0, 3.0)),
        lambda: pg.grad(lambda m: m.area, wrt=lambda m: (m.width, m.height))(Box(2.0, 3.0)),
        [3.0, 2.0],
    ),
    "a property that is computed elsewhere": (
        lambda: pg.grad(lambda m: m.area, wrt="shape")(Box(2.0, 3.0)),
        lambda: pg.grad(lambda m: m.area, wrt=lambda m: (m.width, m.height))(Box(2.0, 3.0)),
        [3.0, 2.0],
    ),
    "a property that is a part": (
        lambda: pg.grad(lambda m: m.area, wrt="side")(Box(2.0, 3.0)),
        lambda: pg.grad(lambda m: m.area, wrt=lambda m: m.side)(Box(2.0, 3.0)),
        [3.0],
    ),
    "a predicate of leaves": (
        lambda: pg.select(VECTOR, is_vector),
        lambda: pg.select(VECTOR, pg.matching(lambda path, leaf: is_vector(leaf))),
        [1.0, 2.0, 3.0],
    ),
    "a predicate that is false of every leaf": (
        lambda: pg.partition(TREE, is_vector),
        lambda: pg.partition(TREE)[0],
        [2.0, 3.0, 5.0],
    ),
    "a question that no leaf answers": (
        lambda: pg.partition(TREE, pg.matching(lambda path, leaf: leaf.ndim == 9)),
        lambda: [
            pg.partition(TREE, pg.matching(lambda path, leaf: "x" in path and leaf.ndim == 0)),
            pg.partition(TREE)[0],
        ],
        [2.0, 3.0, 5.0, 4.0, 2.0, 3.0, 5.0],
    ),
    "a value and a function": (
        lambda: pg.replace(TREE, "b"),
        lambda: [pg.replace(TREE, "b", 7.0)["b"], pg.replace(TREE, "b", fn=lambda x: 2 * x)["b"]],
        [7.0, 10.0],
    ),
    "a function as a value": (
        lambda: pg.replace(TREE, "b", jnp.sqrt),
        lambda: pg.replace(TREE, "b", fn=jnp.sqrt)["b"],
        [5.0**0.5],
    ),
    "one vector for several arguments": (
        lambda: pg.hvp(product, argnums=(0, 1))(2.0, 1.0, 3.0),
        lambda: pg.hvp(product, argnums=(0, 1))(2.0, (1.0, 5.0), 3.0),
        [5.0, 1.0],
    ),
    "updates of a part": (
        lambda: pg.apply_updates(TREE, 2.0),
        lambda: [
            pg.apply_updates(TREE, {"a": {"x": None, "y": None}, "b": 2.0, "n": None})["b"],
            pg.apply_updates(TREE, 2.0, wrt="b")["b"],
        ],
        [7.0, 7.0],
    ),
    "updates of another part": (
        lambda: pg.apply_updates(TREE, {"b": 2.0}, wrt="b"),
        lambda: pg.apply_updates(TREE, pg.grad(value, wrt="b")(TREE), wrt="b")["b"],
        [11.0],
    ),
    "nothing that is floating": (
        lambda: pg.grad(value, wrt=lambda t: [])(TREE),
        lambda: [pg.grad(value, wrt=wrt)(TREE) for wrt in ("b", "a")],
        [6.0, 15.0, 10.0],
    ),
    "static data alone": (
        lambda: pg.grad(lambda m: 0.0, wrt=lambda m: m.options)(Config(1.0)),
        lambda: pg.grad(lambda m: m.a * m.grid.sum(), wrt="grid")(
            made(__annotations__={"a": float, "grid": Any})(2.0, jnp.ones(2))
        ),
        [2.0, 2.0],
    ),
    "all held": (
        lambda: pg.grad(loss, wrt="**.p")(M),
        lambda: [pg.grad(loss, wrt="p")(M), pg.grad(loss, wrt="**.p")(pg.thaw(M, "p")).p],
        [20.0, 20.0],
    ),
    "an integer": (
        lambda: pg.grad(lambda t: t["n"] * 2.0, wrt="n")(TREE),
        lambda: [
            pg.grad(lambda t: t["n"] ** 2, wrt="n")({**TREE, "n": 4.0}),
            pg.grad(value, wrt=lambda t: t)(TREE)["b"],
        ],
        [8.0, 6.0],
    ),
    "a function that is named": (
        lambda: pg.grad(lambda t: t["b"] * 2.0, wrt="f")({"f": abs, "b": 1.0}),
        lambda: [pg.grad(lambda t: t["b"] * 2.0, wrt=wrt)({"f": abs, "b": 1.0}) for wrt in ("b", lambda t: t)],
        [2.0, 2.0],
    ),
    "an array in static data": (
        lambda: Static({"grid": jnp.ones(2)}),
        lambda: pg.grad(lambda m: m.a * m.grid.sum(), wrt="grid")(
            made(__annotations__={"a": float, "grid": Any})(2.0, jnp.ones(2))
        ),
        [2.0, 2.0],
    ),
    "a leaf twice": (
        lambda: pg.grad(value, wrt=lambda t: (t["b"], t["b"]))(TREE),
        lambda: [pg.grad(value, wrt=wrt)(TREE) for wrt in (lambda t: t["b"], lambda t: t["a"])],
        [6.0, 15.0, 10.0],
    ),
    "a vector of another length": (
        lambda: pg.ravel(VECTOR)[1](jnp.ones(2)),
        lambda: (lambda unravel: unravel(jnp.ones(len(unravel.names))))(pg.ravel(VECTOR)[1]),
        [1.0, 1.0, 1.0, 1.0],
    ),
    "a path of two leaves": (
        lambda: pg.select(Both({"a": 1.0}, 2.0), "a"),
        lambda: pg.select(Both({"a": 1.0}, 2.0), lambda m: m.a),
        [2.0],
    ),
    "a class that is not there": (
        lambda: pg.partition(TREE, Point),
        lambda: [pg.partition(TREE, wrt)[0] for wrt in (dict, "b", lambda t: t["b"])],
        [2.0, 3.0, 5.0, 5.0, 5.0],
    ),
    "a class that was defined anew": (
        lambda: pg.partition(OLD(1.0), NEW),
        lambda: pg.partition(NEW(1.0), NEW)[0],
        [1.0],
    ),
    "a float as selector": (
        lambda: pg.grad(value, wrt=2.0),
        lambda: [pg.grad(value, wrt=wrt)(TREE) for wrt in (lambda m: m["b"], "b")],
        [6.0, 6.0],
    ),
    "a number as selector": (lambda: pg.grad(product, 1), lambda: pg.grad(product, argnums=1)(2.0, 3.0), [2.0]),
    "half a mask": (
        lambda: pg.grad(value, wrt={"a": True, "b": 2.0}),
        lambda: pg.partition(TREE, {"a": True, "b": False, "n": False})[0],
        [2.0, 3.0],
    ),
    "freezing without a selector": (
        lambda: pg.freeze(TREE),
        lambda: [pg.is_nondiff(pg.freeze(TREE, None), None), pg.is_nondiff(pg.freeze(TREE, "a"), "a")],
        [True, True],
    ),
    "an array that is not in the tree": (
        lambda: pg.select(VECTOR, jnp.ones(7)),
        lambda: pg.select(VECTOR, "['b']"),
        [5.0],
    ),
    "a selection of nothing": (
        lambda: pg.Selection(),
        lambda: pg.partition(TREE, pg.path("**"))[0],
        [2.0, 3.0, 5.0],
    ),
    "a tuple of functions": (
        lambda: pg.grad(value, wrt=(dict.keys, dict.values))(TREE),
        lambda: pg.grad(value, wrt=lambda m: (m["a"], m["b"]))(TREE),
        [15.0, 10.0, 6.0],
    ),
    "a tuple of selectors": (
        lambda: pg.grad(value, wrt=(lambda m: m["a"], lambda m: m["b"]))(TREE),
        lambda: pg.grad(value, wrt=lambda m: (m["a"], m["b"]))(TREE),
        [15.0, 10.0, 6.0],
    ),
    "a list of paths": (
        lambda: pg.freeze(TREE, ["a", "b"]),
        lambda: pg.select(TREE, pg.path("a") | pg.path("b")),
        [2.0, 3.0, 5.0],
    ),
    "a condition of another shape": (
        lambda: jax.grad(lambda t: pg.stop_gradient(t, "w", when=jnp.array([True, False]))["w"].sum())(VECTOR),
        lambda: [
            jax.grad(lambda t, when=when: pg.stop_gradient(t, "w", when=when)["w"].sum())(VECTOR)["w"]
            for when in (True, jnp.array([True, False, True]))
        ],
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    ),
    "two groups for a leaf": (
        lambda: pg.label(LAYERS, {0: "layers", 1: "layers[0]"}),
        lambda: pg.label(LAYERS, {0: pg.path("layers") - pg.path("layers[0]"), 1: "layers[0]"}),
        [1, 1, 0, 0, 0, 0, 0, 0],
    ),
    "no group for a leaf": (
        lambda: pg.label(TREE, {1: "a"}),
        lambda: pg.label(TREE, {1: "a"}, default=0),
        [1, 1, 0, 0],
    ),
    "elements of a leaf": (
        lambda: pg.partition(VECTOR, "w[0]"),
        lambda: [
            pg.partition(VECTOR, "w")[0],
            pg.grad(lambda t: (t["w"] ** 2).sum(), wrt="w[0]")(VECTOR),
            pg.select(VECTOR, "w[0]"),
            pg.replace(VECTOR, "w[0]", 7.0)["w"],
            pg.ravel(VECTOR, "w[0]")[0],
            jax.grad(lambda t: pg.stop_gradient(t, "w[0]")["w"].sum())(VECTOR)["w"],
        ],
        [1.0, 2.0, 3.0, 2.0, 1.0, 7.0, 2.0, 3.0, 1.0, 0.0, 1.0, 1.0],
    ),
    "a new part of another structure": (
        lambda: pg.replace(TREE, "a", {"x": 1.0}),
        lambda: [
            pg.replace(TREE, "a", {"x": 7.0, "y": 8.0})["a"],
            pg.replace(TREE, "**.x", {"a": {"x": 7.0, "y": None}, "b": None, "n": None})["a"],
        ],
        [7.0, 8.0, 7.0, 3.0],
    ),
    "a traced index": (
        lambda: jax.jit(lambda i: pg.grad(sum, wrt=lambda t: t[i])([1.0, 2.0]))(1),
        lambda: [
            pg.grad(lambda t: t[0] * t[1], wrt=lambda t: t[1])([3.0, 2.0]),
            jax.jit(lambda i: jnp.where(jnp.arange(3) == i, pg.grad(lambda t: t["w"] @ t["w"])(VECTOR)["w"], 0.0))(1),
        ],
        [3.0, 0.0, 4.0, 0.0],
    ),
    "containers with keys of several types": (
        lambda: pg.grad(value, wrt=lambda t: {1: t["b"], "a": t["a"]})(TREE),
        lambda: pg.grad(value, wrt=lambda t: {"1": t["b"], "a": t["a"]})(TREE),
        [6.0, 15.0, 10.0],
    ),
    "what is no part of the tree": (
        lambda: pg.grad(value, wrt=lambda t: abs)(TREE),
        lambda: [pg.grad(value, wrt=wrt)(TREE) for wrt in (lambda t: t["b"], lambda t: t["a"])],
        [6.0, 15.0, 10.0],
    ),
    "a class that computes when it is built": (
        lambda: pg.grad(lambda t: t["s"] * t["w"].x, wrt=lambda t: t["s"])({"w": Computing(3.0), "s": 2.0}),
        lambda: [pg.grad(lambda t: t["s"] * t["w"].x, wrt=wrt)({"w": Computing(3.0), "s": 2.0}) for wrt in ("s", "**")],
        [3.0, 3.0, 2.0],
    ),
    "a misspelled attribute": (
        lambda: pg.select(K(1.0, 2.0), lambda m: m.aa),
        lambda: pg.select(K(1.0, 2.0), lambda m: m.a),
        [1.0],
    ),
    "static data from a callable": (
        lambda: pg.select({"k": Config(1.0)}, lambda t: t["k"].n),
        lambda: [pg.select(static_field()(1.0, 3.0), lambda t: t.n), pg.select({"k": Config(1.0)}, lambda t: t["k"].w)],
        [3.0, 1.0],
    ),
    "an implicit hold": (
        lambda: pg.grad(lambda model: loss(K(model.a, model.p)), wrt="p")(M),
        lambda: [
            pg.grad(f, wrt="p")(M)
            for f in (
                lambda model: loss(dataclasses.replace(model, p=model.p)),
                lambda model: loss(K(model.a, p=pg.Diff(model.p))),
                lambda model: loss(K(model.a, jax.lax.stop_gradient(model.p))),
            )
        ],
        [20.0, 20.0, 0.0],
    ),
    "primals that are no tuple": (
        lambda: pg.jvp(jnp.square, 3.0, (1.0,)),
        lambda: pg.jvp(jnp.square, (3.0,), (1.0,)),
        [9.0, 6.0],
    ),
    "too few tangents": (
        lambda: pg.jvp(product, (2.0, 3.0), (1.0,)),
        lambda: [
            pg.jvp(product, (2.0, 3.0), (1.0, 0.0)),
            pg.jvp(product, (TREE["b"], TREE["a"]["x"]), (1.0, 1.0), wrt=(lambda x: x, None)),
        ],
        [6.0, 3.0, 10.0, 7.0],
    ),
    "a tangent of another shape": (
        lambda: pg.jvp(jnp.sum, (VECTOR["w"],), (jnp.ones(2),)),
        lambda: pg.jvp(jnp.sum, (VECTOR["w"],), (jnp.zeros((3,)) + 1.0,)),
        [6.0, 3.0],
    ),
    "two cotangents": (
        lambda: pg.vjp(lambda x: (x, x**2), 3.0)[1](1.0, 1.0),
        lambda: pg.vjp(lambda x: (x, x**2), 3.0)[1]((1.0, 1.0)),
        [7.0],
    ),
    "a cotangent of another structure": (
        lambda: pg.vjp(lambda x: (x, x**2), 3.0)[1]((1.0,)),
        lambda: pg.vjp(lambda x: (x, x**2), 3.0)[1]((1.0, 1.0)),
        [7.0],
    ),
    "what is no function": (
        lambda: pg.grad(3.0),
        lambda: [pg.grad(loss, wrt="a")(M), pg.grad(wrt="a")(loss)(M)],
        [30.0, 30.0],
    ),
    "argnums that are a name": (
        lambda: pg.grad(product, argnums="y"),
        lambda: pg.grad(product, argnames="y")(2.0, 3.0),
        [2.0],
    ),
    "argnums that are no number": (
        lambda: pg.grad(product, argnums=1.0),
        lambda: [pg.grad(product, argnums=0)(2.0, 3.0), pg.grad(product, argnums=(0, 1))(2.0, 3.0)],
        [3.0, 3.0, 2.0],
    ),
    "argnames that are misspelled": (
        lambda: pg.grad(lambda width: width**2, argnames="widht"),
        lambda: pg.grad(lambda width: width**2, argnames="width")(width=3.0),
        [6.0],
    ),
    "argnames that are unknown": (
        lambda: pg.grad(product, argnames="temperature"),
        lambda: pg.grad(product, argnames="x")(2.0, 3.0),
        [3.0],
    ),
    "an argument twice": (
        lambda: pg.grad(value, argnums=(0, -1))(TREE),
        lambda: pg.grad(value, wrt=lambda m: (m["a"], m["b"]))(TREE),
        [15.0, 10.0, 6.0],
    ),
    "an argument that is not passed by position": (
        lambda: pg.grad(product, argnums=1)(2.0, y=3.0),
        lambda: [pg.grad(product, argnums=1)(2.0, 3.0), pg.grad(product, argnames="y")(2.0, y=3.0)],
        [2.0, 2.0],
    ),
    "an argument that there is not": (
        lambda: pg.grad(product, argnums=5)(2.0, 3.0),
        lambda: pg.grad(product, argnums=1)(2.0, 3.0),
        [2.0],
    ),
    "a default": (
        lambda: pg.grad(lambda x, y=3.0: x * y, argnames="y")(2.0),
        lambda: pg.grad(lambda x, y=3.0: x * y, argnames="y")(2.0, y=3.0),
        [2.0],
    ),
    "one selector for two arguments": (
        lambda: pg.grad(product, wrt="a", argnums=(0, 1)),
        lambda: pg.grad(lambda t, x: t["b"] * x, wrt=("b", None), argnums=(0, 1))(TREE, 3.0),
        [3.0, 5.0],
    ),
    "nothing to differentiate": (
        lambda: pg.grad(lambda n, x: n * x)(3, 2.0),
        lambda: [
            pg.grad(lambda n, x: n * x)(3.0, 2.0),
            pg.grad(lambda n, x: n["h"] * x, wrt="h")({"h": NonDiff(3.0)}, 2.0),
            pg.grad(lambda n, x: n * x, argnums=1)(3, 2.0),
        ],
        [2.0, 2.0, 3.0],
    ),
    "an unknown word for unused": (
        lambda: pg.grad(value, unused="zeros"),
        lambda: pg.grad(lambda t: t["b"])(TREE)["b"],
        [1.0],
    ),
    "what the output does not depend on": (
        lambda: pg.grad(lambda t: t["b"] ** 2, unused="error")(TREE),
        lambda: [
            pg.grad(lambda t: t["b"] ** 2, wrt="b", unused="error")(TREE),
            pg.grad(lambda t: t["b"] ** 2, unused="none")(TREE),
        ],
        [10.0, 10.0],
    ),
    "globs that name the same value": (
        lambda: pg.grad(twice, wrt={"a": pg.intermediate("block*"), "b": pg.intermediate("*2")})(3.0),
        lambda: pg.grad(twice, wrt={"a": pg.intermediate("block1"), "b": pg.intermediate("*2")})(3.0)["a"],
        [4.5],
    ),
    "a number as the name of an argument": (
        lambda: pg.grad(product, argnames=[1.5])(2.0, 3.0),
        lambda: pg.grad(product, argnames="x")(x=2.0, y=3.0),
        [3.0],
    ),
    "a word for a bool": (
        lambda: pg.grad(value, has_aux="yes"),
        lambda: pg.grad(lambda x: (x**2, "aux"), has_aux=True)(3.0)[0],
        [6.0],
    ),
    "a word for a bool, of what takes primals": (
        lambda: pg.vjp(value, 3.0, has_aux="yes"),
        lambda: pg.vjp(lambda x: (x**2, "aux"), 3.0, has_aux=True)[1](1.0)[0],
        [6.0],
    ),
    "another word for a bool, of what takes primals": (
        lambda: pg.jvp(value, (3.0,), (1.0,), double_where="yes"),
        lambda: pg.jvp(lambda x: x**2, (3.0,), (1.0,), double_where=True)[1],
        [6.0],
    ),
    "keys of two kinds": (
        lambda: pg.grad(value, wrt={1: "a.x", "y": "a.y"})(TREE),
        lambda: list(pg.grad(value, wrt={"1": "a.x", "y": "a.y"})(TREE).values()),
        [15.0, 10.0],
    ),
    "a model of references": (
        lambda: pg.grad(lambda m: jnp.sum(m["w"][...]))({"w": jax.new_ref(jnp.ones(2))}),
        lambda: pg.grad(lambda m: jnp.sum(m["w"][...] ** 2))(
            jax.tree.map(lambda leaf: leaf[...] if isinstance(leaf, jax.Ref) else leaf, {"w": jax.new_ref(jnp.ones(2))})
        )["w"],
        [2.0, 2.0],
    ),
    "a value in place of a function of primals": (
        lambda: pg.jvp(3.0, (2.0,), (1.0,)),
        lambda: pg.jvp(lambda x: x**2, (2.0,), (1.0,))[1],
        [4.0],
    ),
    "a module that changes": (
        lambda: pg.vjp(lambda m: m(jnp.ones(2)), counting()),
        lambda: pg.value_and_grad(lambda m: (m(jnp.ones(2)), m), has_aux=True)(counting())[0][1].count[...],
        [1.0],
    ),
    "a field that its class holds, of what is differentiated": (
        lambda: jax.grad(lambda p: holding()(2.0, p).p ** 2)(3.0),
        lambda: [
            jax.grad(lambda p: holding()(2.0, pg.Diff(p)).p ** 2)(3.0),
            jax.grad(lambda p: holding()(p, jax.lax.stop_gradient(p)).p ** 2)(3.0),
        ],
        [6.0, 0.0],
    ),
    "keys that cannot be sorted": (
        lambda: pg.grad(value, wrt={1: "a", "b": "b"}),
        lambda: pg.grad(lambda t: t["b"] ** 2, wrt={"one": "b"})({"b": 3.0})["one"],
        [6.0],
    ),
    "auxiliary data that is not there": (
        lambda: pg.grad(lambda x: x[0], has_aux=True, unused="error")(jnp.ones((3, 3))),
        lambda: [pg.grad(lambda x: (x**2, "aux"), has_aux=True)(3.0)[0], pg.grad(lambda x: x**2)(3.0)],
        [6.0, 6.0],
    ),
    "a container in itself": (
        lambda: pg.grad(lambda t: 0.0)(endless()),
        lambda: pg.grad(lambda t: sum(t) ** 2)([1.0] * 3),
        [6.0, 6.0, 6.0],
    ),
    "elements that do not fit": (
        lambda: pg.replace(VECTOR, lambda t: t["w"][:2], jnp.ones(3)),
        lambda: pg.replace(VECTOR, lambda t: t["w"][:2], jnp.array([7.0, 8.0]))["w"],
        [7.0, 8.0, 3.0],
    ),
    "selectors for some primals": (
        lambda: pg.vjp(product, 2.0, 3.0, wrt=(None,)),
        lambda: [pg.vjp(product, 2.0, 3.0, wrt=wrt)[1](1.0) for wrt in ((None, None), lambda x: x)],
        [3.0, 2.0, 3.0],
    ),
    "a class of leaves": (
        lambda: pg.mask(TREE, float),
        lambda: pg.mask(TREE, pg.matching(lambda path, leaf: leaf.ndim == 0)),
        [True, True, True, False],
    ),
    "a callable of no argument": (
        lambda: pg.grad(value, wrt=lambda: 0)(TREE),
        lambda: pg.grad(value, wrt=lambda m: m["b"])(TREE),
        [6.0],
    ),
    "a matching of one argument": (
        lambda: pg.matching(lambda leaf: True),
        lambda: pg.grad(value, wrt=pg.matching(lambda path, leaf: "b" in path))(TREE)["b"],
        [6.0],
    ),
    "an instance for a class": (
        lambda: pg.of_type(M),
        lambda: pg.grad(loss, wrt=pg.of_type(K))(M).a,
        [30.0],
    ),
    "a union of classes": (
        lambda: pg.mask([M, {"x": 1.0}, 2.0], K | dict),
        lambda: pg.mask([M, {"x": 1.0}, 2.0], pg.of_type(K) | dict),
        [True, False, True, False],
    ),
    "labels that are no dict": (
        lambda: pg.label(TREE, ["a"]),
        lambda: pg.label({"body": [1.0], "head": 2.0}, {7: "body", 8: "head"}),
        [7, 8],
    ),
    "argnames of what has no name": (
        lambda: pg.grad(lambda x, /, **rest: x**2, argnames="x")(3.0),
        lambda: pg.grad(lambda x, /, **rest: x**2, argnums=0)(3.0),
        [6.0],
    ),
    "a base with items of its own": (
        lambda: made(bases=(list,)),
        lambda: pg.grad(doubled)(made(__annotations__={"a": float, "items": list})(1.0, [])).a,
        [2.0],
    ),
    "a mark on what is no field": (
        lambda: made(__annotations__={"a": dataclasses.InitVar}, a=pg.field(nondiff=True)),
        lambda: made(__annotations__={"a": float, "b": Any}, b=pg.field(nondiff=True))(1.0, 2.0).b,
        [2.0],
    ),
    "a mark as a type": (
        lambda: made(__annotations__={"a": NonDiff[float]}),
        lambda: jax.grad(doubled)(made(__annotations__={"a": float}, a=pg.field(nondiff=True))(1.0)).a,
        [0.0],
    ),
    "a mutable default": (
        lambda: made(a=jnp.ones(2)),
        lambda: made(a=pg.field(default_factory=lambda: jnp.ones(2)))().a,
        [1.0, 1.0],
    ),
    "another word for nonfinite": (
        lambda: pg.grad(value, nonfinite="raise"),
        lambda: pg.grad(value, wrt="b", nonfinite="report")(TREE),
        [6.0],
    ),
    "a chunk of no columns": (
        lambda: pg.hessian(value, chunk_size=0),
        lambda: pg.hessian(value, wrt="b", chunk_size=100)(TREE),
        [0.0],
    ),
    "an intermediate value beside another selector": (
        lambda: pg.intermediate("block1") | "b",
        lambda: pg.grad(blocks, wrt=pg.intermediate("block*"))(3.0),
        [4.5, 3.0],
    ),
    "an intermediate value without a name": (
        lambda: pg.intermediate(1),
        lambda: pg.grad(blocks, wrt=pg.intermediate("h"))(3.0),
        [27.0],
    ),
    "a reduction that is no function": (
        lambda: pg.intermediate("h", reduce="norm"),
        lambda: pg.grad(blocks, wrt=pg.intermediate("h", reduce=jnp.linalg.norm))(3.0),
        [27.0],
    ),
    "a reduction that returns text": (
        lambda: pg.grad(blocks, wrt=pg.intermediate("h", reduce=str))(3.0),
        lambda: pg.grad(
            blocks, wrt=pg.intermediate("h", reduce=lambda h: {"norm": jnp.linalg.norm(h), "max": jnp.max(h)})
        )(3.0),
        [27.0, 27.0],
    ),
    "a reduction without a backward pass": (
        lambda: pg.jacfwd(blocks, wrt=pg.intermediate("h", reduce=jnp.linalg.norm)),
        lambda: (
            pg.jacfwd(blocks, wrt=pg.intermediate("h"))(3.0),
            pg.grad(blocks, wrt=pg.intermediate("h", reduce=jnp.linalg.norm))(3.0),
        ),
        [27.0, 27.0],
    ),
    "references of what is reduced": (
        lambda: pg.vjp(blocks, 3.0, wrt=pg.intermediate("h", reduce=jnp.max))[1].with_refs(jax.new_ref(0.0)),
        lambda: pg.vjp(blocks, 3.0, wrt=pg.intermediate("h"))[1].with_refs(jax.new_ref(0.0))(1.0),
        [],
    ),
    "a dtype that is none": (
        lambda: pg.grad(blocks, dtype=int),
        lambda: pg.grad(blocks, dtype=jnp.float32)(3.0),
        [27.0],
    ),
    "a dtype that JAX has not": (
        lambda: pg.grad(blocks, dtype=jnp.float64),
        lambda: pg.grad(blocks, dtype=jnp.float32)(3.0),
        [27.0],
    ),
    "rows beside other elements": (
        lambda: pg.grad(lambda t: t[1], wrt=lambda t: (t[jnp.array([0, 0])], t[1]))(jnp.ones(3)),
        lambda: pg.grad(lambda t: t[1], wrt=lambda t: t[jnp.concatenate([jnp.array([0, 0]), jnp.array([1])])])(
            jnp.ones(3)
        )[2],
        [1.0],
    ),
    "names of rows": (
        lambda: pg.items({"w": jnp.ones(3)}, lambda t: t["w"][jnp.array([0, 0])]),
        lambda: len(pg.items({"w": jnp.ones(3)}, lambda t: t["w"][np.array([0])])),
        [1],
    ),
    "how many calls to keep": (
        lambda: pg.KeepCalls("calls", last=0),
        lambda: int(repr(pg.KeepCalls("calls", last=100)).partition("last=")[2].rstrip(")")),
        [100],
    ),
    "a stored function that has no name": (
        lambda: stored(lambda x: jnp.sqrt(x), 0.0).report,
        lambda: float(stored(lambda x: jnp.sqrt(x), 0.0, jnp.sqrt).report.ok),
        [0.0],
    ),
    "stored arguments of a local class": (
        lambda: stored(lambda m: jnp.sqrt(m.a), LOCAL(jnp.zeros(()))),
        lambda: stored(lambda m: jnp.sqrt(m.a), LOCAL(jnp.zeros(())), doubled, like=(LOCAL(jnp.ones(())),)).args[0].a,
        [0.0],
    ),
    "an intermediate value of a tree": (
        lambda: pg.partition(TREE, pg.intermediate("h")),
        lambda: (
            pg.grad(blocks, wrt=pg.intermediate("h"))(3.0),
            pg.capture_intermediates(blocks, "h")(3.0),
            pg.intervene(blocks, {"h": lambda h: 2 * h})(3.0),
        ),
        [27.0, 27.0, 3.0, 216.0],
    ),
    "an intermediate value of an argument": (
        lambda: pg.grad(blocks, wrt=pg.intermediate("h"), argnums=0),
        lambda: pg.grad(blocks, wrt=pg.intermediate("h"))(3.0),
        [27.0],
    ),
    "a misspelled intermediate value": (
        lambda: pg.grad(blocks, wrt=pg.intermediate("blok1"))(3.0),
        lambda: pg.grad(blocks, wrt=pg.intermediate("block1"))(3.0),
        [4.5],
    ),
    "a name that nothing has": (
        lambda: pg.grad(blocks, wrt=pg.intermediate("zzz"))(3.0),
        lambda: pg.grad(lambda x: checkpoint_name(x, "x") ** 2, wrt=pg.intermediate("x"))(3.0),
        [6.0],
    ),
    "no names": (
        lambda: pg.grad(lambda x: x**2, wrt=pg.intermediate("zzz"))(3.0),
        lambda: pg.grad(lambda x: checkpoint_name(x, "x") ** 2, wrt=pg.intermediate("x"))(3.0),
        [6.0],
    ),
    "a name inside a custom rule": (
        lambda: pg.grad(ruled, wrt=pg.intermediate("inside"))(3.0),
        lambda: pg.grad(
            lambda x: 3 * checkpoint_name(ruled(checkpoint_name(x, "x")), "y"), wrt=pg.intermediate("[xy]")
        )(3.0),
        [6.0, 3.0],
    ),
    "an intermediate value that is rounded": (
        lambda: pg.grad(lambda x: checkpoint_name(jnp.int32(x), "n") * x, wrt=pg.intermediate("n"))(3.0),
        lambda: pg.grad(lambda x: jnp.floor(checkpoint_name(x, "n")) * x, wrt=pg.intermediate("n"))(3.0),
        [0.0],
    ),
    "one name for two kinds of values": (
        lambda: pg.grad(branches("h", "h"), wrt=pg.intermediate("h"))(jnp.ones(2)),
        lambda: pg.grad(branches("h", "k"), wrt=pg.intermediate("h"))(jnp.ones(2)),
        [1.0, 1.0],
    ),
    "a change that is no function": (
        lambda: pg.intervene(blocks, {"h": 1.0}),
        lambda: jax.grad(pg.intervene(blocks, {"h": jax.lax.stop_gradient}))(3.0),
        [0.0],
    ),
    "a change of another shape": (
        lambda: pg.intervene(branches("h", "k"), {"h": lambda h: 5})(jnp.ones(2)),
        lambda: pg.intervene(
            branches("h", "k"), {"h": lambda h: jnp.broadcast_to(jnp.asarray(5), h.shape).astype(h.dtype)}
        )(jnp.ones(2)),
        [10.0],
    ),
    "a name that is no string": (
        lambda: pg.capture_intermediates(blocks, 1),
        lambda: (pg.capture_intermediates(blocks, "h")(3.0)[1], pg.capture_intermediates(blocks, "block*")(3.0)[1]),
        [3.0, 6.0, 9.0],
    ),
    "nothing to capture from": (
        lambda: pg.capture_intermediates(blocks(3.0), "h"),
        lambda: pg.capture_intermediates(blocks, "h")(3.0),
        [27.0, 3.0],
    ),
    "nothing to intervene in": (
        lambda: pg.intervene(blocks(3.0), {"h": jnp.sin}),
        lambda: pg.intervene(blocks, {"h": lambda h: h + 1})(3.0),
        [64.0],
    ),
}


@dataclasses.dataclass(frozen=True)
class Hashable:
    a: float


class Both(dict):
    """Has an attribute and a key of one name."""

    def __init__(self, inside, a):
        super().__init__(inside)
        self.a = a


jax.tree_util.register_pytree_with_keys(
    Both,
    lambda node: (((jax.tree_util.DictKey("a"), node["a"]), (jax.tree_util.GetAttrKey("a"), node.a)), None),
    lambda _, children: Both({"a": children[0]}, children[1]),
)


# A warning comes once for each class.
NUMBERS = itertools.count()


def counting():
    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.count = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] = self.count[...] + 1
            return jnp.sum(self.w[...] * x)

    return Counting()


def holding():
    cls = type(f"Holding{next(NUMBERS)}", (), {"__annotations__": {"a": Any, "p": Any}, "p": pg.field(nondiff=True)})
    return pg.dataclass(cls)


def endless():
    found: list[Any] = []
    found.append(found)
    return found


def fix_of(call):
    with pytest.raises((errors.PartgradError, dataclasses.FrozenInstanceError, UserWarning)) as caught:
        call()
    return str(caught.value).partition("\n  Fix: ")[2]


@pytest.mark.parametrize("name", ROWS)
def test_a_remedy_is_followed(name):
    wrong, right, want = ROWS[name]
    assert fix_of(wrong)
    np.testing.assert_allclose(np.concatenate([[], *map(np.ravel, jax.tree.leaves(right()))]), want, rtol=1e-5)


# --- advice about selectors, followed as it is printed, on models of several kinds ------------------------------------


@pg.dataclass
class OwnLayer:
    weight: Any
    bias: Any

    @property
    def scale(self):
        return self.weight

    @property
    def product(self):
        return self.weight * self.bias


@pg.dataclass
class OwnNet:
    layers: Any


class EquinoxLayer(eqx.Module):
    weight: Any
    bias: Any
    scale = OwnLayer.scale
    product = OwnLayer.product


class EquinoxNet(eqx.Module):
    layers: Any


@flax.struct.dataclass
class FlaxLayer:
    weight: Any
    bias: Any
    scale = OwnLayer.scale
    product = OwnLayer.product


@flax.struct.dataclass
class FlaxNet:
    layers: Any


def net_of(layer, net):
    arrays = [(jnp.arange(1.0, 3.0), jnp.ones(())), (jnp.arange(3.0, 5.0), NonDiff(jnp.ones(())))]
    return net([layer(*pair) for pair in arrays])


NETS = {
    "pg.dataclass": net_of(OwnLayer, OwnNet),
    "equinox": net_of(EquinoxLayer, EquinoxNet),
    "flax.struct": net_of(FlaxLayer, FlaxNet),
    "dict": net_of(lambda weight, bias: {"weight": weight, "bias": bias}, lambda layers: {"layers": layers}),
}

# What a newcomer writes, and the leaves that are meant: numbers of layers and names.
MEANT = {
    "the argument's name": ("net.layers[-1].weight", {"1 weight"}),
    "its name, with a glob": ("model.layers[*].weight", {"0 weight", "1 weight"}),
    "a node by the argument's name": ("net.layers[0]", {"0 weight", "0 bias"}),
    "a path that begins further down": ("weight", {"0 weight"}, {"1 weight"}, {"0 weight", "1 weight"}),
    "a misspelled name": ("layers[0].wieght", {"0 weight"}),
    "a misspelled name in a glob": ("layers[:].wieght", {"0 weight", "1 weight"}),
    "a list of paths, one of them held": (["layers[0].weight", "layers[1].bias"], {"0 weight", "1 bias"}),
    "a glob of held leaves": ("layers[1:].bias", {"1 bias"}),
    "a regular expression": (re.compile(r".*weight.*"), {"0 weight", "1 weight"}),
    "a part of a path": (pg.path(re.compile("weight")), {"0 weight", "1 weight"}),
    "a part of a path, in any case": (pg.path(re.compile("WEIGHT", re.IGNORECASE)), {"0 weight", "1 weight"}),
    "flags in an expression": (pg.path(re.compile("(?i)Weight")), {"0 weight", "1 weight"}),
    "a predicate": (eqx.is_inexact_array, {"0 weight", "1 weight", "0 bias"}),
    "a predicate of vectors": (lambda leaf: leaf.ndim == 1, {"0 weight", "1 weight"}),
    "a part that is a property": ("layers[0].scale", {"0 weight"}),
    "a computed property": ("layers[0].product", {"0 weight", "0 bias"}),
    "a misspelled attribute": (lambda m: m.wieght, {"0 weight", "1 weight"}),
}


def code_in(fix):
    """The expressions that a remedy says to write."""
    pattern = r"wrt=lambda .*(?=\.)|partgrad\.\w+\(.*\)(?: \| partgrad\.\w+\(.*\))*|'(?:[^'\\]|\\.)*'|\"[^\"]*\"|`\w+` for `\w+`"
    return [found.removeprefix("wrt=") for found in re.findall(pattern, fix)]


def leaves_of(net, wrt):
    names = (path.replace("['", ".").replace("']", "").split(".") for path, _ in pg.items(net, wrt))
    return {f"{re.search('[0-9]', ''.join(parts))[0]} {parts[-1]}" for parts in names}


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("name", MEANT)
def test_advice_gives_what_was_meant(name, kind):
    net, (wrt, *meant) = NETS[kind], MEANT[name]
    if kind == "dict" and "propert" in name:
        return
    if name == "a misspelled attribute" and kind == "dict":
        wrt = lambda m: m["wieght"]
    fix = fix_of(lambda: pg.partition(net, wrt))
    known = {"partgrad": pg, "re": re, "wrt": wrt, "eqx": eqx}
    if name == "a misspelled attribute":
        assert fix == "write `weight` for `wieght`."
        written = [(lambda m: m["weight"]) if kind == "dict" else lambda m: m.weight]
    else:
        # Of a remedy that leaves a choice, the last one may change the tree.
        written = [eval(code, known) for code in code_in(fix) if not code.startswith("partgrad.thaw")]
    assert [leaves_of(net, own) for own in written[: len(meant)]] == meant, fix
    thawed = [code for code in code_in(fix) if code.startswith("partgrad.thaw")]
    for code in thawed:
        assert leaves_of(eval(code, {"partgrad": pg, "tree": net}), wrt) == meant[0]


ROOMS = ("_intermediates", "_marks", "_selection", "_transforms", "_trees")
FILES = [path for room in ROOMS for path in sorted((pathlib.Path(pg.__file__).parent / room).glob("*.py"))]


def texts(node):
    """What an expression of strings may be, as patterns: values that are put into it are any text."""
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.escape(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in node.values]
        return ["".join(parts)]
    return []


def stated(path):
    """The remedies that a module states."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (isinstance(node, ast.keyword) and node.arg == "fix") or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "fix"
        ):
            yield from texts(node.value)


def test_every_remedy_has_a_row():
    found = [fix_of(wrong) for wrong, *_ in ROWS.values()]
    missing = [
        f"{path.name}: {pattern}"
        for path in FILES
        for pattern in stated(path)
        if not any(re.fullmatch(pattern.replace(r"\{0\}", ".*"), text, re.DOTALL) for text in found)
    ]
    assert not missing, "no row follows these remedies:\n" + "\n".join(missing)
