"""Errors of selectors and transforms: what they say, and that the remedy which they state is right."""

import copy
import dataclasses
import pickle
import typing

import jax
import jax.numpy as jnp
import pytest

import partgrad as pg
from helpers.messages import refused
from helpers.models import Config

TREE = {"a": {"x": 1.0, "y": 2.0}, "b": 3.0, "n": 4}
LAYERS = {"layers": [{"base": 1.0, "w": 2.0} for _ in range(4)]}
TWO = {"k": {"v": 1.0}, "l": {"v": 2.0}}


def product(x, y):
    return x * y


@pg.dataclass
class Call:
    a: float
    b: float

    def __call__(self, x):
        return self.a**x


def redefined():
    @pg.dataclass
    class Model:
        a: float

    return Model


OLD, NEW = redefined(), redefined()


@pytest.mark.parametrize(
    ("tree", "wrt", "fragments"),
    [
        (TREE, ~pg.path("**"), ["The selector ~'**' selects nothing", "so nothing is left"]),
        (TREE, pg.exclude(None), ["The selector ~None", "None selects every differentiable leaf"]),
        (TREE, pg.path("a") & "b", ["('a' & 'b')", "No leaf is selected both by 'a' and by 'b'"]),
        (TREE, pg.path("a") - dict, ["('a' - dict)", "dict selects all that 'a' selects"]),
        (TREE, pg.matching(lambda path, leaf: False), ["is false for all of the 3 leaves"]),
        (TREE, pg.path("b") & (lambda t: t["a"]), ["('b' & the lambda)", "both by 'b' and by the lambda"]),
        (TWO, "v", ["\"['k']['v']\" or \"['l']['v']\", or '**.v' for all of them"]),
        (LAYERS, "layers[*].bse", ["write 'layers[*].base'"]),
        (LAYERS, "layers[3].bse", ["write 'layers[3].base'"]),
        (LAYERS, "layrs[*].base", ["write 'layers[*].base'"]),
        ({"k": Config(1.0)}, "k.n", ["`['k'].n` is static data of `Config`", "make it a field of its own"]),
        ({"k": Config(1.0)}, lambda t: t["k"].n, ["static data is not a leaf", "make it a field of its own"]),
        (Call(1.0, 2.0), Call(True, 2.0), ["It holds bools, as a mask does, and float 2.0 at `b`"]),
        (TREE, 1, ["write argnums=1"]),
        (TREE, (0, 1), ["write argnums=(0, 1)"]),
        (OLD(1.0), NEW, ["another class `Model`: the class was defined anew"]),
        (OLD(1.0), NEW(True), ["Expected Model (the class of that name when the tree was built)"]),
        (LAYERS, lambda t: t["layers"].pop(), ["changes a list or a dict of the tree", "list(m.layers)"]),
    ],
)
def test_what_a_selector_is_told(tree, wrt, fragments):
    refused(lambda: pg.grad(lambda t: 0.0, wrt=wrt)(tree), (ValueError, TypeError), *fragments)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["layers"].pop(),
        lambda t: t["layers"].reverse() or t["layers"][0],
        lambda t: t["layers"][0].update(w=t["layers"][0]["base"]) or t["layers"][0]["w"],
        lambda t: t["layers"][0].setdefault("new", t["layers"][0]["base"]),
        lambda t: t.update(layers=None) or t["layers"],
    ],
)
def test_a_selector_that_changed_the_tree_finds_it_whole_again(change):
    tree = {"layers": [{"base": float(i), "w": 2.0} for i in range(3)]}
    refused(lambda: pg.partition(tree, change), TypeError, "changes a list or a dict of the tree")
    assert [leaf for _, leaf in pg.items(tree, lambda t: [layer["base"] for layer in t["layers"]])] == [0.0, 1.0, 2.0]


def test_remedies_of_paths_are_right():
    assert [path for path, _ in pg.items(TWO, "**.v")] == ["['k']['v']", "['l']['v']"]
    assert len(pg.items(LAYERS, "layers[*].base")) == 4
    assert pg.grad(product, argnums=1)(2.0, 3.0) == 2.0
    assert pg.grad(product, argnames="y")(2.0, 3.0) == 2.0


def test_a_traced_index():
    f = jax.jit(lambda i: pg.grad(lambda t: t["layers"][0], wrt=lambda t: t["layers"][i])({"layers": [1.0, 2.0]}))
    refused(lambda: f(1), TypeError, "traced value")


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (lambda: pg.grad(product, argnums=5)(1.0, 2.0), TypeError, ["argnums=5", "There is no argument 5 among them"]),
        (lambda: pg.grad(product, argnums=(0, 1))(1.0), TypeError, ["There is no argument 1, `y`, among them"]),
        (lambda: pg.grad(product, argnums="x"), TypeError, ["`argnums` is 'x'", "write argnames='x'"]),
        (lambda: pg.grad(product, argnums=("x", "y")), TypeError, ["write argnames=('x', 'y')"]),
        (lambda: pg.grad(product, argnums=(0, "x")), TypeError, ["write argnums=0, or"]),
        (lambda: pg.grad(product, argnums=1.0), TypeError, ["`argnums` is 1.0", "write argnums=0"]),
        (lambda: pg.vjp(product, 1.0, 2.0)[1](1.0, 1.0), TypeError, ["takes one cotangent, and got 2"]),
        (lambda: pg.vjp(product, 1.0, 2.0)[1]((1.0,)), ValueError, ["The cotangent has a different structure"]),
        (lambda: pg.jvp(product, 0.0, (1.0,)), TypeError, ["`partgrad.jvp` got float 0.0 as primals", "write (x,)"]),
        (lambda: pg.jvp(product, (0.0, 1.0), 1.0), TypeError, ["Expected a tuple of 2 tangents", "got float"]),
        (lambda: pg.linearize(product, 0.0, 1.0)[1](1.0), TypeError, ["Expected a tuple of 2 tangents", "got 1"]),
        (lambda: pg.combine(OLD(1.0), NEW(None)), ValueError, ["another class Model", "defined anew"]),
        (lambda: pg.label(TREE, {"s": "a", "f": "**"}, default="z"), ValueError, ["Two groups select `['a']['x']`"]),
        (lambda: pg.label(TREE, {"s": "a"}), ValueError, ["No group selects `['b']`, `['n']`", "default=..."]),
    ],
)
def test_what_a_call_is_told(call, error, fragments):
    refused(call, error, *fragments)


@pytest.mark.slow
def test_a_misspelled_name_among_many_is_found_in_time():
    tree = {f"name_{i}": 0.0 for i in range(20_000)}
    refused(lambda: pg.partition(tree, "nmae_77"), LookupError, "write 'name_77'", "19990 more")
    refused(lambda: pg.partition(tree, lambda t: t["nmae_77"]), LookupError, "write `name_77` for `nmae_77`")


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_survives_another_process(again):
    with pytest.raises(pg.errors.NoMatchError) as caught:
        pg.grad(lambda p: p["a"], wrt="b")({"a": 1.0})
    assert type(again(caught.value)) is pg.errors.NoMatchError
    assert str(again(caught.value)) == str(caught.value)
    assert str(pg.errors.HeldError("What.", "Where.", fix="this.")) == "What.\n  Where.\n  Fix: this."


@dataclasses.dataclass
class Plain:
    a: float


def marked(annotation, name="p", **declared):
    return type("Marked", (), {"__annotations__": {name: annotation}, **declared})


@pytest.mark.filterwarnings("ignore:the tree itself is a `Plain`")
@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        # Dataclasses without the decorator that hold Python floats.
        (lambda: pg.mask(Plain(1.0), "a"), TypeError, ["the tree itself is a `Plain`", "write @partgrad.dataclass"]),
        (lambda: pg.mask([Plain(1.0)], "[0].a"), TypeError, ["`[0]` is a `Plain`", "write @partgrad.dataclass"]),
        (lambda: pg.mask([Plain(1.0)], lambda t: t[0].a), TypeError, ["write @partgrad.dataclass"]),
        (lambda: pg.grad(lambda t: t.a)(Plain(1.0)), TypeError, ["write @partgrad.dataclass"]),
        (lambda: pg.mask([Plain(1.0), 1.0], "q"), LookupError, ["matches nothing", "a path to one of these"]),
        # What a function that makes selectors is given.
        (lambda: pg.each("a"), TypeError, ["`partgrad.each` got str 'a'", "lambda node: node.the_part"]),
        (lambda: pg.path(len), TypeError, ["`partgrad.path` got builtin", "without `path` around it"]),
        (lambda: pg.of_type(Call(1.0, 2.0)), TypeError, ["write partgrad.of_type(Call)"]),
        (lambda: pg.matching("a"), TypeError, ["`partgrad.matching` got str", "matching(lambda path, leaf: ...)"]),
        (
            lambda: pg.mask(TREE, pg.matching(lambda leaf: True)),
            TypeError,
            ["of the path and the leaf", "lambda path, leaf:"],
        ),
        (lambda: pg.mask(TREE, lambda: 0), TypeError, ["takes 0 positional", "write wrt=lambda m: m.the_part"]),
        (lambda: pg.mask(TREE, Call | dict), TypeError, ["write partgrad.of_type(Call) | dict"]),
        (lambda: pg.mask(TREE, float), LookupError, ["here it is that of a leaf", "partgrad.matching(lambda"]),
        (lambda: pg.mask(TREE, False), ValueError, ["It is False everywhere"]),
        (lambda: pg.label(TREE, ["a"]), TypeError, ["`partgrad.label` got list ['a']", "from labels to selectors"]),
        (lambda: pg.select({"w": jnp.ones(2)}, "w[2:]"), LookupError, ["Its index takes no element"]),
        (lambda: pg.mask(1.0, lambda t: t.a), LookupError, ["the tree, which is one leaf, has no attribute 'a'"]),
        (lambda: pg.grad(lambda *args: 1.0, argnames="args")(1.0), TypeError, ["args", "which is not a parameter"]),
        (lambda: pg.grad(lambda *args, **k: 1.0, argnames="args")(1.0), TypeError, ["argnums=..."]),
        (lambda: pg.grad(lambda x, /, **k: 1.0, argnames="x")(1.0), TypeError, ["argnums=..."]),
        # Classes.
        (lambda: pg.dataclass(marked(pg.NonDiff[float])), TypeError, ["marks nothing", "field(nondiff=True)`"]),
        (lambda: pg.dataclass(marked(typing.Annotated[float, pg.NonDiff])), TypeError, ["field(nondiff=True)`"]),
        (
            lambda: pg.dataclass(marked(typing.Annotated[float, "m", pg.NonDiff(0)])),
            TypeError,
            ["field(nondiff=True)`"],
        ),
        (lambda: pg.dataclass(marked("typing.Annotated[pg.Static[int], 0]")), TypeError, ["field(static=True)`"]),
        (lambda: pg.dataclass(marked("pg.NonDiff")), TypeError, ["marks nothing", "p: float = partgrad.field"]),
        (lambda: pg.dataclass(marked(pg.Static[int])), TypeError, ["marks nothing", "field(static=True)`"]),
        (
            lambda: pg.dataclass(marked(dataclasses.InitVar, p=pg.field(nondiff=True))),
            TypeError,
            ["is marked, but it is a ClassVar or an InitVar", "make it a field"],
        ),
        (
            lambda: pg.dataclass(marked(typing.ClassVar[float], p=pg.field(static=True, default=1.0))),
            TypeError,
            ["is marked, but it is a ClassVar or an InitVar"],
        ),
        (lambda: pg.dataclass(marked(float, p=[])), TypeError, ["mutable default", "field(default_factory=lambda"]),
        (lambda: pg.dataclass(type("X", (), {"p": pg.field()})), TypeError, ["annotate it: `name: float"]),
        (lambda: pg.dataclass(type("X", (list,), {})), TypeError, ["derives from `list`", "make the list a field"]),
        (lambda: pg.Static(pg.Diff(1.0)), TypeError, ["A `Diff` was given to something other than a field"]),
    ],
)
def test_a_newcomer_is_told(call, error, fragments):
    refused(call, error, *fragments)


def test_annotations_that_contain_marks_are_kept():
    assert pg.dataclass(marked(typing.Annotated[float, "metres"]))(1.0).p == 1.0
    cls = pg.dataclass(marked(dict[str, pg.NonDiff[float]]))
    assert jax.tree.leaves(cls({"a": pg.NonDiff(1.0)})) == [1.0]
