"""Selectors: what they name or describe, when they are resolved anew, and what they refuse."""

import functools
import gc
import math
import operator
import re
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers import messages
from helpers.models import RBF, Config, Flax, Linear, Periodic, Point, Sum, composite
from partgrad import NonDiff, errors

pytestmark = pytest.mark.core


def chosen(tree, wrt):
    """The paths of the selected leaves, through the public surface."""
    selected, _ = pg.partition(tree, wrt)
    leaves = jax.tree_util.tree_leaves_with_path(selected)
    return [jax.tree_util.keystr(path).removeprefix(".") for path, _ in leaves]


TREE = {"dec": [{"w": 1.0, "b": 2.0}, {"w": 3.0, "b": NonDiff(4.0)}], "enc": Linear(5.0, 6.0), "n": 7}


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (None, ["['dec'][0]['b']", "['dec'][0]['w']", "['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
        (lambda t: t["dec"][0]["w"], ["['dec'][0]['w']"]),
        (lambda t: (t["enc"].bias, t["dec"][1]), ["['dec'][1]['w']", "['enc'].bias"]),
        (lambda t: {"x": [t["enc"]]}, ["['enc'].weight", "['enc'].bias"]),
        (lambda t: t["dec"][1]["b"], ["['dec'][1]['b']"]),
        (lambda t: t["w"], ["['dec'][0]['w']", "['dec'][1]['w']"]),
        (lambda t: [layer["w"] for layer in t["dec"]], ["['dec'][0]['w']", "['dec'][1]['w']"]),
        (lambda t: t.weight, ["['enc'].weight"]),
        (pg.each(lambda t: t["b"]), ["['dec'][0]['b']"]),
        ("dec[0].w", ["['dec'][0]['w']"]),
        ("['dec'][0].w", ["['dec'][0]['w']"]),
        ("['dec'][0]['w']", ["['dec'][0]['w']"]),
        ("dec[-1]", ["['dec'][1]['w']"]),
        ("dec[1].b", ["['dec'][1]['b']"]),
        ("dec[*].w", ["['dec'][0]['w']", "['dec'][1]['w']"]),
        ("dec[*].b", ["['dec'][0]['b']"]),
        ("**.w", ["['dec'][0]['w']", "['dec'][1]['w']"]),
        ("**", ["['dec'][0]['b']", "['dec'][0]['w']", "['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
        ("*.bias", ["['enc'].bias"]),
        ("dec.**", ["['dec'][0]['b']", "['dec'][0]['w']", "['dec'][1]['w']"]),
        ("*.*.**.w", ["['dec'][0]['w']", "['dec'][1]['w']"]),
        (pg.path("enc"), ["['enc'].weight", "['enc'].bias"]),
        (Linear, ["['enc'].weight", "['enc'].bias"]),
        (pg.of_type(list), ["['dec'][0]['b']", "['dec'][0]['w']", "['dec'][1]['w']"]),
        ({"dec": [True, False], "enc": False, "n": True}, ["['dec'][0]['b']", "['dec'][0]['w']"]),
        (
            {"dec": [{"w": False, "b": True}, {"w": True, "b": True}], "enc": Linear(True, False), "n": False},
            ["['dec'][0]['b']", "['dec'][1]['w']", "['enc'].weight"],
        ),
        (True, ["['dec'][0]['b']", "['dec'][0]['w']", "['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
        (
            pg.matching(lambda path, leaf: path.endswith("['w']") and leaf.ndim == 0),
            ["['dec'][0]['w']", "['dec'][1]['w']"],
        ),
        (pg.matching(lambda path, leaf: path.endswith("['w']")) & "dec[1]", ["['dec'][1]['w']"]),
        (pg.exclude("dec"), ["['enc'].weight", "['enc'].bias"]),
        (~pg.path("dec[0].w"), ["['dec'][0]['b']", "['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
        (pg.exclude("**.b"), ["['dec'][0]['w']", "['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
        (pg.exclude("dec[1].b") & Linear, ["['enc'].weight", "['enc'].bias"]),
        (pg.path("dec[0].w") | "enc", ["['dec'][0]['w']", "['enc'].weight", "['enc'].bias"]),
        (Linear | pg.path("dec[0].w"), ["['dec'][0]['w']", "['enc'].weight", "['enc'].bias"]),
        ((lambda t: t["dec"]) - pg.each(lambda t: t["w"]), ["['dec'][0]['b']"]),
        (pg.path("**.w") & (lambda t: t["dec"][0]), ["['dec'][0]['w']"]),
        ("**.w" & pg.path("dec[0]"), ["['dec'][0]['w']"]),
        ("**.w" - pg.path("dec[0]") | Linear, ["['dec'][1]['w']", "['enc'].weight", "['enc'].bias"]),
    ],
)
def test_what_a_selector_selects(wrt, expected):
    assert chosen(TREE, wrt) == expected


def test_slots_are_distinct_where_leaves_are_one_array_and_know_shape_and_dtype():
    shared = jnp.ones(3)
    tree = {"a": shared, "b": shared}
    assert chosen(tree, lambda t: t["b"]) == ["['b']"]
    mixed = {"a": jnp.ones((2, 3)), "b": jnp.ones(4, jnp.bfloat16), "c": 1.0}

    def matrices(t):
        return [leaf for leaf in t.values() if leaf.ndim == 2 and leaf.size == 6 and leaf.shape == (2, 3)]

    assert chosen(mixed, matrices) == ["['a']"]
    assert chosen(mixed, lambda t: [x for x in t.values() if str(x.dtype) == "bfloat16"]) == ["['b']"]


def test_a_selector_that_looked_at_shapes_is_resolved_anew_for_others():
    def largest(t):
        return max(t.values(), key=lambda leaf: leaf.size)

    assert chosen({"a": jnp.ones(2), "b": jnp.ones(3)}, largest) == ["['b']"]
    assert chosen({"a": jnp.ones(4), "b": jnp.ones(3)}, largest) == ["['a']"]


def test_dtypes_are_looked_at_on_every_call():
    wrt = lambda p: (p.x, p.y)
    assert chosen(Point(1.0, 2.0), None) == ["x", "y"]
    assert chosen(Point(1.0, 2), None) == ["x"]
    assert chosen(Point(1.0, 2.0), None) == ["x", "y"]
    assert chosen([Point(1.0, 2)], lambda p: p[0]) == ["[0].x"]
    assert chosen([Point(1.0, 2.0)], lambda p: p[0]) == ["[0].x", "[0].y"]
    assert chosen(Point(1.0, 2.0), wrt) == ["x", "y"]
    with pytest.raises(errors.NotDifferentiableError):
        chosen(Point(1.0, 2), wrt)


INDEX = 0


def test_a_callable_whose_captured_values_change_is_resolved_anew():
    global INDEX
    tree, local, names = [1.0, 2.0, 3.0], 0, ["a"]
    by_global = lambda t: t[INDEX]
    by_closure = lambda t: t[local]
    by_list = lambda t: [t[name] for name in names]
    by_helper = lambda t: helper(t)

    def helper(t):
        return t[INDEX]

    for i in (0, 2, 1):
        INDEX = local = i
        for wrt in (by_global, by_closure, by_helper, lambda t: t[INDEX], lambda t, j=i: t[j]):
            assert chosen(tree, wrt) == [f"[{i}]"]
    assert chosen({"a": 1.0, "b": 2.0}, by_list) == ["['a']"]
    names.append("b")
    assert chosen({"a": 1.0, "b": 2.0}, by_list) == ["['a']", "['b']"]


def test_callables_of_other_kinds():
    class Picker:
        def __call__(self, t):
            return t[1]

        def pick(self, t):
            return t[0]

    tree = [1.0, 2.0]
    assert chosen(tree, operator.itemgetter(1)) == ["[1]"]
    assert chosen(tree, functools.partial(lambda i, t: t[i], 1)) == ["[1]"]
    assert chosen(tree, Picker()) == ["[1]"]
    assert chosen(tree, Picker().pick) == ["[0]"]


class Losing:
    def __init__(self, x=None):
        self.x = x


jax.tree_util.register_pytree_node(
    Losing, lambda node: ((node.x,) if node.x is not None else (), None), lambda _, children: Losing()
)


class Converting:
    def __init__(self, x, cache=None):
        self.x, self.cache = float(x), cache


jax.tree_util.register_pytree_with_keys(
    Converting,
    lambda node: (((jax.tree_util.GetAttrKey("x"), node.x),), None),
    lambda _, children: Converting(*children),
)


@pytest.mark.slow
def test_the_cache_keeps_no_array_alive():
    class Foreign:
        def __init__(self, x, constant):
            self.x, self.constant = x, constant

    jax.tree_util.register_pytree_node(Foreign, lambda f: ((f.x,), (f.constant,)), lambda aux, c: Foreign(c[0], *aux))
    array = jnp.ones(3)
    alive = weakref.ref(array)
    f = pg.grad(lambda m: jnp.sum(m[0].x * m[1].w), wrt=lambda m: m[1].w)
    f([Foreign(1.0, array), Config(array, options={"name": "b"})])
    pg.partition({"a": array}, "a")
    pg.partition({"a": array}, lambda t: [leaf for leaf in t.values() if leaf.ndim == 1])
    with pytest.raises(errors.NoMatchError):
        pg.partition({"a": array}, "b")
    # Its class takes no slots, so that its other attributes are those of the tree.
    pg.items(Converting(1.0, array), "x")
    # What its class builds has no leaves, so that a selector is resolved on the tree itself.
    losing = pg.items([Losing(array)], "[0][0]")
    assert losing[0][1] is array
    del losing
    del array
    gc.collect()
    assert alive() is None


def test_equal_selectors_share_a_plan_and_few_plans_are_kept():
    for _ in range(2):
        assert chosen(TREE, Linear) == ["['enc'].weight", "['enc'].bias"]
        assert chosen(TREE, pg.path("dec[0].w")) == ["['dec'][0]['w']"]
    elements = {"w": np.arange(200.0)}
    assert [int(pg.select(elements, f"w[{i}]")) for i in range(200)] == list(range(200))


def test_selectors_are_resolved_once_per_structure():
    asked = []

    class Kind(type):
        def __instancecheck__(cls, instance):
            asked.append(instance)
            return isinstance(instance, Linear)

    every = Kind("Every", (), {})
    assert chosen(TREE, every) == chosen(TREE, Linear)
    before = len(asked)
    assert chosen(TREE, every) == chosen(TREE, Linear)
    assert len(asked) == before
    calls = []

    def counted(tree):
        calls.append(1)
        return tree["a"]

    resolve = functools.partial(pg.partition, wrt=pg.each(counted))
    resolve({"a": 1.0})
    assert len(calls) == 1
    f = pg.grad(lambda t: t["a"] ** 2, wrt=lambda t: t["a"])
    assert [float(f({"a": x})) for x in (1.0, 2.0)] == [2.0, 4.0]


# --- marks -------------------------------------------------------------------------------------------------------


def test_a_mark_inside_a_named_node_stays_and_one_on_it_or_above_gives_way():
    model = Sum(NonDiff(Sum(RBF(1.0, NonDiff(2.0)), RBF(3.0, 4.0))), RBF(5.0, 6.0))
    assert chosen(model, None) == ["b.variance", "b.lengthscale"]
    assert chosen(model, lambda m: m) == ["b.variance", "b.lengthscale"]
    assert chosen(model, lambda m: m.a) == ["a.a.variance", "a.b.variance", "a.b.lengthscale"]
    assert chosen(model, lambda m: m.a.a) == ["a.a.variance"]
    assert chosen(model, lambda m: m.a.a.lengthscale) == ["a.a.lengthscale"]
    assert chosen(model, "a.b") == ["a.b.variance", "a.b.lengthscale"]
    assert chosen(model, lambda m: (m.a.a, m.a.a.lengthscale)) == ["a.a.variance", "a.a.lengthscale"]
    foreign = {"net": NonDiff(Linear(1.0, 2.0)), "x": 3.0}
    # The wrapper of a module goes around the module as long as a part of it is held.
    for wrt in (lambda t: t["net"].weight, lambda t: t["net"].value.weight, "net.weight"):
        assert chosen(foreign, wrt) == ["['net'].value.weight"]
    assert chosen(foreign, lambda t: t["net"]) == ["['net'].weight", "['net'].bias"]


def test_naming_what_is_static_says_to_make_it_a_field():
    model = Config(1.0)
    foreign = {"s": pg.Static({"grid": (1.0, 2.0), "n": 2}), "x": 1.0}
    assert chosen(model, None) == ["w"]
    assert chosen(foreign, None) == ["['x']"]
    for tree, wrt in [
        (model, "options['grid']"),
        (model, lambda m: m.options["grid"]),
        (model, lambda m: m.options["grid"][0]),
        (model, lambda m: (m.w, m.options["grid"])),
        (model, "options"),
        (model, "options.name"),
        (model, "n"),
        (foreign, lambda t: t["s"].value["grid"]),
        (foreign, "s.grid"),
        (foreign, "s"),
    ]:
        for use in (pg.grad(lambda m: 0.0, wrt=wrt), lambda t, wrt=wrt: pg.partition(t, wrt)):
            messages.refused(lambda use=use, tree=tree: use(tree), ValueError, "static", "make it a", "of its own")
    for wrt in (None, lambda m: m):
        assert chosen(pg.thaw(model, wrt), None) == ["w", "held"]


def test_describing_never_reaches_through_a_mark():
    for wrt in (lambda k: k.period, "**.period", pg.each(lambda k: k.period)):
        with pytest.raises(errors.NoMatchError) as caught:
            pg.partition(composite(), wrt)
        for words in (
            "is held by a mark",
            "Held: `b.b.period`",
            "wrt='b.b.period'",
            "partgrad.thaw(tree, 'b.b.period')",
        ):
            assert words in str(caught.value)
    assert pg.partition({"a": {"b": NonDiff(1.0)}}, "a") == ({"a": {"b": 1.0}}, {"a": {"b": None}})
    assert pg.select({"a": {"b": NonDiff(1.0)}}, "a") == {"b": 1.0}


# --- bad input ---------------------------------------------------------------------------------------------------


def refused(tree, wrt, error, *fragments):
    with pytest.raises(error) as caught:
        pg.grad(lambda t: 0.0, wrt=wrt)(tree)
    assert isinstance(caught.value, errors.PartgradError)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in:\n{message}"
    assert re.search(r"\n  Fix: .+", message)


class Curious:
    """A class that looks at its leaves when it is flattened, as a distribution of distrax does."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(
    Curious, lambda c: ((c.x,), hasattr(c.x, "aval") and None), lambda _, children: Curious(*children)
)


@pytest.mark.parametrize("wrt", ["c[0]", lambda t: t["c"], "**[0]"])
def test_a_class_that_asks_its_leaves_while_it_is_flattened(wrt):
    """The error of a slot that lacks what it is asked for has its path, for which the class was flattened again."""
    gradient = pg.grad(lambda t: t["c"].x ** 2, wrt=wrt)({"c": Curious(3.0), "d": 1.0})
    assert jax.tree.leaves(gradient) == [6.0]


@pytest.mark.parametrize("wrt", ["k", lambda t: t["k"]])
def test_static_data_is_not_taken_for_the_leaf_after_it(wrt):
    """A callable that returned a `Static` selected the next leaf of the tree."""
    tree = {"a": 1.0, "k": pg.Static("a"), "z": 2.0}
    refused(tree, wrt, errors.NoMatchError)
    with pytest.raises(errors.NoMatchError):
        pg.freeze(tree, wrt)
    both = pg.grad(lambda t: t["z"] ** 2, wrt=lambda t: (t["k"], t["z"]))(tree)
    assert both == (pg.Static("a"), 4.0)


def test_what_is_found_has_no_derivative():
    refused({"a": {"n": 1, "x": 1.0}}, "*.n", errors.NotDifferentiableError, "names `['a']['n']`", "store a float")
    refused({"n": 1, "x": 1.0}, lambda t: [], errors.NoMatchError, " `wrt` ")


def test_the_path_of_static_data_says_so():
    refused({"a": 1.0, "k": pg.Static("a")}, "k", errors.NoMatchError, "`k` is static data", "without `Static`")


def test_a_callable_tree_of_bools_is_a_mask_and_marks_do_not_matter_to_it():
    model = Sum(RBF(1.0, 2.0), Periodic(1.0, 2.0, 3.0))
    mask = jax.tree.map(lambda _: True, model)
    assert callable(mask)
    assert chosen(model, mask) == ["a.variance", "a.lengthscale", "b.variance", "b.lengthscale"]
    assert chosen(model, jax.tree.map(lambda _: True, pg.thaw(model, "b.period"))) == chosen(model, mask)
    assert chosen(pg.freeze(model, "a"), mask) == ["b.variance", "b.lengthscale"]
    wrapped = {"a": NonDiff(1.0), "b": 2.0}
    assert chosen(wrapped, {"a": True, "b": True}) == ["['b']"]


def test_a_combination_describes_leaves_and_gives_a_tree():
    gradient = pg.grad(lambda t: t["a"] * t["b"], wrt=pg.path("a") | "b")({"a": 2.0, "b": 3.0, "c": 4.0})
    assert gradient == {"a": 3.0, "b": 2.0, "c": None}
    refused(composite(), pg.path("**.period") | "a", LookupError, "'**.period' selects is held by a mark")
    assert chosen(composite(), pg.path("b.b") | "a") == ["a.lengthscale", "b.b.variance", "b.b.lengthscale"]


def test_combinations_that_overlap_or_select_nothing():
    tree = {"a": {"x": 1.0, "y": 2.0}, "b": 3.0}
    refused(tree, pg.path("a") & "b", ValueError, "The selector ('a' & 'b') selects nothing")
    refused(tree, pg.path("a") - dict, ValueError, "selects nothing")
    refused(tree, pg.path("a") | "nowhere", LookupError, "The path 'nowhere' matches nothing")
    refused(tree, pg.matching(lambda path, leaf: False), LookupError, "matching(...) selects nothing")
    refused(tree | {"p": Point(1, 2)}, pg.path("b") | Point, LookupError, "The selector Point selects nothing")
    with pytest.raises(errors.SelectorTypeError, match="which is not a selector"):
        _ = pg.path("a") | 3


def test_a_union_is_one_of_sets():
    tree = {"layers": [{"w": 1.0, "b": 2.0}, {"w": 3.0, "b": 4.0}], "n": 5}
    assert chosen(tree, pg.path("**.b") | "layers[-1]") == [
        "['layers'][0]['b']",
        "['layers'][1]['b']",
        "['layers'][1]['w']",
    ]
    for twice in (lambda t: (t["layers"], t["layers"][1]["w"]), pg.each(lambda t: (t["w"], t["w"]))):
        refused(tree, twice, ValueError, "['w']` twice")
    everything = pg.each(lambda t: t["w"]) | pg.path("layers[0].w") | (lambda t: t["layers"])
    assert chosen(tree, everything) == chosen(tree, None)
    vector = {"w": jnp.arange(5.0)}
    gradient = pg.grad(lambda t: (t["w"] ** 2).sum(), wrt=pg.path("w[:3]") | "w[1:4]" | pg.path("w[0]"))(vector)
    assert gradient["w"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert pg.grad(lambda t: (t["w"] ** 2).sum(), wrt=pg.path("w[:3]") | "w")(vector)["w"].shape == (5,)


def test_a_name_in_a_union_opens_its_mark_and_nothing_else_does():
    tree = {"a": 2.0, "h": NonDiff(3.0), "k": {"p": NonDiff(5.0), "q": NonDiff(7.0)}}
    f = lambda t: t["a"] * t["h"] * t["k"]["p"] ** 2 * t["k"]["q"]
    for wrt in (pg.path("h") | "a", "h" | pg.path("a"), (pg.path("h") | "a") | "a", pg.path("a") | (lambda t: t["h"])):
        gradient = pg.grad(f, wrt=wrt)(tree)
        assert (gradient["a"], gradient["h"]) == (525.0, 350.0)
        assert jax.tree.leaves(gradient["k"]) == []
        assert jax.tree.structure(gradient) == jax.tree.structure(pg.partition(tree, wrt)[0])
        held = pg.grad(lambda t: (f(t), pg.items(t)), wrt=wrt, has_aux=True)(tree)[1]
        assert [path for path, _ in held] == ["['a']"]
    gradient = pg.grad(f, wrt=pg.path("k") | "a")(tree)
    assert (gradient["k"], gradient["h"]) == ({"p": 420.0, "q": 150.0}, NonDiff(None))
    second = pg.hessian(f, wrt=pg.path("h") | "k.p")(tree)
    assert (second["h"]["k"]["p"], second["k"]["p"]["k"]["p"]) == (140.0, 84.0)
    for wrt in (pg.path("h") & "**", pg.path("h") - "a", ~pg.path("a"), (pg.path("h") - "a") | "k.p.nothing"):
        refused(tree, wrt, LookupError)
    assert chosen(tree, (pg.path("h") | "a") & "**") == ["['a']"]
    assert chosen(tree, ~pg.path("h")) == ["['a']"]


def test_a_class_that_is_not_there():
    refused(
        composite(),
        Linear,
        LookupError,
        "The class Linear selects nothing",
        "Classes of its nodes: Sum, RBF, Product, Periodic",
    )
    refused({"a": [1, 2], "b": 1.0}, list, LookupError, "list selects nothing")


def test_masks_of_another_structure():
    tree = {"a": [1.0, 2.0], "b": 3.0}
    for mask, fragments in [
        ({"a": True}, ["at `['b']`", "Expected True or False, got nothing"]),
        ({"a": [True, None], "b": True}, ["at `['a'][1]`", "got nothing"]),
        ({"a": [True] * 3, "b": True}, ["at `['a'][2]`", "Expected nothing there"]),
        ({"a": (True, True), "b": True}, ["at `['a']`", "Expected list, got tuple"]),
        ({"a": False, "b": False}, ["the mask selects nothing"]),
    ]:
        refused(tree, mask, ValueError, *fragments)
    assert chosen({"a": 1.0, "empty": (), "none": None}, {"a": True}) == ["['a']"]


def test_a_typo_in_a_callable():
    refused(
        composite(),
        lambda k: k.varience,
        LookupError,
        "The selector fits no part of the tree",
        "'Sum' object has no attribute 'varience'",
        "Tried on Sum and the 4 nodes below it",
        "Near names: `variance`",
        "a.variance float (held), a.lengthscale float",
        "write `variance` for `varience`",
    )
    refused({"weight": 1.0}, lambda t: t["weigth"], ValueError, "KeyError: 'weigth'", "Near names: `weight`")
    refused([1.0], lambda t: t[3], LookupError, "IndexError", "Leaves: [0] float")
    refused({"a": 1.0}, max, LookupError, "The selector fits no part", "it returned 'a' (str)")
    refused(2.0, vars, LookupError, "The selector fits no part")
    refused(Flax(1.0), lambda m: m.size, LookupError, "it returned 4 (int), which is not a part of the tree")
    refused({"a": 1.0}, lambda t: t.values, LookupError, "which is not a part of the tree")
    refused({"a": None, "b": 1.0}, lambda t: t["a"], LookupError, "it returned None (NoneType)")
    refused({"a": 1.0, "b": {"x": 2.0}}, lambda t: t["a"]["x"], LookupError, "On the tree itself: KeyError: 'x'")
    refused({"a": "text", "b": 1.0}, lambda t: t["a"][0], LookupError, "TypeError: the leaf `['a']` has no elements")
    slots = []
    chosen({"a": 1.0}, lambda t: slots.append(t["a"]) or t["a"])
    refused({"b": 1.0}, lambda t: slots[0], LookupError, "returned <slot ['a']>, which belongs to another tree")


class Unnamed:
    def __init__(self, w):
        self.w = w


jax.tree_util.register_pytree_node(Unnamed, lambda u: ((u.w,), None), lambda _, children: Unnamed(*children))


def test_a_path_that_matches_nothing():
    refused(
        composite(),
        "b.b.perod",
        LookupError,
        "The path 'b.b.perod' matches nothing",
        "Near names: `b.b.period`",
        "'b.b.period'",
    )
    refused(composite(), "**.nowhere", LookupError, "The path '**.nowhere' matches nothing", "start at the tree itself")
    refused(Point(1.0, 2.0), "[0]", LookupError, "The path '[0]' matches nothing")
    refused([1.0, [2.0]], "[1][3]", LookupError, "Near names: `[1][0]`")
    refused({"weight": [1.0]}, "weigt.x", LookupError, "Near names: `weight`", "write `weight` for `weigt`")
    refused({"a": NonDiff({"weight": 1.0})}, "a.weigt", LookupError, "write 'a.weight'")
    refused(NonDiff({"weight": 1.0}), "weigt", LookupError, "write 'weight'")
    refused({"m": Unnamed(1.0)}, "m.w", LookupError, "`Unnamed` is registered without names: `['m'].w` is `['m'][0]`")
    refused({"a": 1.0}, "a[0", LookupError, "cannot be read at position 1", "a closing bracket")


def test_a_path_that_two_steps_fit():
    class Both:
        pass

    keys = [jax.tree_util.GetAttrKey("w"), jax.tree_util.DictKey("w")]
    jax.tree_util.register_pytree_with_keys(
        Both, lambda b: (zip(keys, (b.w, b.k), strict=True), None), lambda _, c: Both(), lambda b: ((b.w, b.k), None)
    )
    both = Both()
    both.w, both.k = 1.0, 2.0
    refused(both, "w", ValueError, "differ only in the kind of a step", "Found `w` and `['w']`", "use a callable")


def test_selecting_nothing():
    for tree, wrt in [
        (composite(), lambda k: ()),
        (composite(), lambda k: []),
        ({"a": [], "b": 1.0}, "a"),
        ([1, "x"], lambda t: t),
    ]:
        refused(
            tree,
            wrt,
            ValueError,
            "selects nothing to differentiate",
            "Nothing in what it selects is floating or complex",
        )
    refused({"n": 1}, None, TypeError, "nothing to differentiate in argument 0", "n'] int")
    refused({"h": NonDiff(1.0)}, None, TypeError, "['h'] float (held)")


def test_the_same_leaf_twice():
    refused(composite(), lambda k: (k.a, k.a.lengthscale), ValueError, "returns `a.lengthscale` twice")
    refused(composite(), lambda k: [k.b.a.variance] * 2, ValueError, "returns `b.a.variance` twice")
    refused({"d": {"a": 1.0}}, lambda t: (t["a"], t["a"]), ValueError, "returns `['d']['a']` twice")


class Rotten:
    """Has members that go wrong inside, each in a way that a node without what is asked for goes wrong too."""

    @property
    def attribute(self):
        return self.misspelled

    @property
    def key(self):
        return {"w": self.w}["q"]

    def index(self):
        return [self.w][3]

    def type_error(self):
        return len(3)

    nameless = property(lambda self: self.misspelled)

    @functools.cached_property
    def cached(self):
        return self.misspelled

    @property
    def by_another(self):
        return self.attribute


class Plain(Rotten):
    def __init__(self, w):
        self.w = w


class Asking(Plain):
    """Answers what it lacks itself."""

    def __getattr__(self, name):
        if name == "alias":
            return self.w
        raise AttributeError(name)

    def __getitem__(self, key):
        return {"w": self.w}[key]


for _cls in (Plain, Asking):
    jax.tree_util.register_pytree_node(
        _cls, lambda node: ((node.w,), None), lambda _, children, cls=_cls: cls(*children)
    )


@pg.dataclass
class Own(Rotten):
    w: float


class Module(Rotten, eqx.Module):
    w: float


@pytest.mark.parametrize("cls", [Plain, Asking, Own, Module])
@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda m: m.attribute, AttributeError),
        (lambda m: m.key, KeyError),
        (lambda m: m.index(), IndexError),
        (lambda m: m.type_error(), TypeError),
        (lambda m: m.nameless, AttributeError),
        (lambda m: m.cached, AttributeError),
        (lambda m: m.by_another, AttributeError),
        (operator.attrgetter("attribute"), AttributeError),
        (operator.methodcaller("index"), IndexError),
        (lambda m: helper(m), AttributeError),
    ],
)
def test_what_goes_wrong_inside_a_node_is_raised(cls, ask, error):
    """It was taken for a node that does not fit, and other leaves were selected silently."""
    tree = cls(1.0)
    for where in (tree, {"a": tree, "b": {"misspelled": 2.0, "q": 3.0}}):
        with pytest.raises(error) as caught:
            pg.partition(where, ask if where is tree else lambda t: ask(t["a"]))
        assert not isinstance(caught.value, errors.PartgradError)


def helper(model):
    return model.attribute


def test_what_a_node_itself_lacks_means_that_it_does_not_fit():
    tree = {"a": Asking(1.0), "b": {"w": 2.0}}
    missing = [lambda t: t.nowhere, lambda t: t["nowhere"], lambda t: t[7], lambda t: t.w.nowhere, lambda t: t("x")]
    for ask in missing:
        with pytest.raises(errors.SelectionError):
            pg.partition(tree, ask)
    assert chosen(tree, lambda t: t.alias) == chosen(tree, "a[0]")
    assert chosen(tree, lambda t: t["w"]) == [*chosen(tree, "a[0]"), "['b']['w']"]
    assert chosen(tree, lambda t: (lambda inner: inner["b"]["w"])(t)) == ["['b']['w']"]


@pytest.mark.parametrize(
    ("leaf", "words", "fix"),
    [
        (3, "got int", "store a float"),
        (True, "got bool", "store a float"),
        (jnp.arange(2), "got i32[2]", "store a float"),
        (jnp.ones(2, bool), "got bool[2]", "store a float"),
        (np.uint8(2), "got u8[]", "store a float"),
        ("x", "got str", "select a floating leaf"),
        (len, "got function", "select a floating leaf"),
        (jax.random.key(0), "got k", "select a floating leaf"),
    ],
    ids=["int", "bool", "ints", "bools", "uint", "str", "function", "key"],
)
def test_a_leaf_without_a_derivative(leaf, words, fix):
    for wrt in (lambda t: t["n"], lambda t: (t["x"], t["n"]), "n"):
        refused({"x": 1.0, "n": leaf}, wrt, TypeError, "names `['n']`, which cannot be differentiated", words, fix)


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda s: s == 1, "compares with `==`"),
        (lambda s: s != 1, "compares with `!=`"),
        (lambda s: s < 1, "compares with `<`"),
        (lambda s: s <= 1, "compares with `<=`"),
        (lambda s: s > 1, "compares with `>`"),
        (lambda s: s >= 1, "compares with `>=`"),
        (lambda s: [s] if s else s, "asks whether it is true"),
        (lambda s: 1 in s, "uses `in`"),
        (np.asarray, "converts it to an array"),
        (list, "iterates it"),
        (len, "calls `len`"),
        (lambda s: s(1.0), "calls it"),
        (lambda s: s.T, "reads `.T`"),
        (lambda s: s.sum(), "reads `.sum`"),
        (jnp.sin, "gives it to a function of JAX"),
        (jax.lax.sin, "gives it to a function of JAX"),
    ],
)
def test_computing_on_a_slot(compute, operation):
    with pytest.raises(errors.SlotError, match="A selector points at parts") as caught:
        pg.grad(lambda t: 0.0, wrt=lambda t: compute(t["a"]))({"a": jnp.ones(2)})
    assert operation in str(caught.value)
    assert isinstance(caught.value, TypeError)


OPERATORS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.matmul: "@",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    divmod: "divmod",
}


@pytest.mark.parametrize(("compute", "symbol"), OPERATORS.items(), ids=OPERATORS.values())
def test_an_operator_on_a_slot(compute, symbol):
    refused({"a": 1.0}, lambda t: compute(t["a"], 2), errors.SlotError, f"it uses `{symbol}`")
    refused({"a": 1.0}, lambda t: compute(2, t["a"]), errors.SlotError, f"it uses `{symbol}`")


CONVERSIONS = [abs, round, int, float, complex, math.trunc, math.floor, math.ceil]
CONVERSIONS += [operator.neg, operator.pos, operator.invert, operator.index]


@pytest.mark.parametrize("compute", CONVERSIONS, ids=lambda compute: compute.__name__)
def test_a_conversion_of_a_slot(compute):
    refused({"a": 1.0}, lambda t: compute(t["a"]), errors.SlotError, f"it calls `{compute.__name__}`")


@pytest.mark.parametrize(
    ("wrt", "fix"),
    [
        (3, "write argnums=3"),
        ((lambda t: t,), "return the parts from one callable"),
        (["a"], "join the paths: partgrad.path('a')"),
        ({"a": True, "b": 3}, "make every leaf of the mask True or False"),
        (1.5, "write wrt=lambda m: m.the_part"),
        (b"x", "write wrt=lambda m: m.the_part"),
        (object(), "write wrt=lambda m: m.the_part"),
    ],
    ids=["int", "tuple", "list", "mixed mask", "float", "bytes", "object"],
)
def test_a_selector_of_the_wrong_type(wrt, fix):
    refused({"a": 1.0}, wrt, TypeError, f"`wrt` is {type(wrt).__name__}", "which is not a selector", fix)


@pytest.mark.slow
def test_selectors_on_an_equinox_model():
    model = eqx.nn.MLP(2, "scalar", 4, 2, key=jax.random.key(0))
    x = jnp.ones(2)
    gradient = pg.grad(lambda m: m(x), wrt=lambda m: [layer.weight for layer in m.layers])(model)
    assert [g.shape for g in gradient] == [(4, 2), (4, 4), (1, 4)]
    assert pg.grad(lambda m: m(x), wrt="layers[-1].bias")(model).shape == (1,)
    tree = pg.grad(lambda m: m(x), wrt=lambda m: m.weight)(model)
    assert tree.layers[0].weight.shape == (4, 2)
    assert tree.layers[0].bias is None


def test_periodic_is_held_until_named():
    assert chosen(Periodic(1.0, 2.0, 3.0), "period") == ["period"]
    assert chosen(Periodic(1.0, 2.0, 3.0), None) == ["variance", "lengthscale"]
