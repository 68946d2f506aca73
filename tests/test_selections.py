"""A selection is data: printed as code that makes it again, counted on a tree, and `held` for reading what is held."""

import enum
import re

import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import partgrad as pg
from helpers.messages import refused
from helpers.models import Point
from partgrad import NonDiff, errors

TREE = {"a": 1.0, "k": {"period": NonDiff(2.0), "n": 3}, "q": NonDiff(jnp.ones(2)), "p": Point(3.0, 4.0)}

LEAVES = st.sampled_from([pg.path("a"), pg.path("**.x"), pg.of_type(Point), pg.path(re.compile(".*p.*")), pg.held])
SELECTIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a: ~a, inner),
        st.builds(lambda a: a | None, inner),
    ),
    max_leaves=6,
)


def paths_of(selection):
    try:
        return selection.paths(TREE)
    except errors.SelectionError as error:
        return type(error)


@given(SELECTIONS)
def test_a_selection_is_printed_as_code_that_makes_it(selection):
    again = eval(repr(selection), {"partgrad": pg, "re": re, "Point": Point})
    assert again == selection
    assert hash(again) == hash(selection)
    assert repr(again) == repr(selection)
    assert paths_of(again) == paths_of(selection)


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        (pg.path("a.b"), "partgrad.path('a.b')"),
        (pg.path("a") | "b", "partgrad.path('a') | partgrad.path('b')"),
        ((pg.path("a") | "b") - Point, "(partgrad.path('a') | partgrad.path('b')) - partgrad.of_type(Point)"),
        (~pg.path("a"), "partgrad.exclude(partgrad.path('a'))"),
        (pg.exclude(None), "partgrad.exclude(None)"),
        (pg.path("a") & {"a": True, "b": False}, "partgrad.path('a') & {'a': True, 'b': False}"),
        (pg.matching(lambda path, leaf: leaf.ndim == 2), "partgrad.matching(lambda path, leaf: leaf.ndim == 2)"),
        (pg.each(lambda node: node.weight), "partgrad.each(lambda node: node.weight)"),
        (pg.each(len), "partgrad.each(len)"),
        (pg.held, "partgrad.held"),
    ],
)
def test_how_a_selection_is_printed(selection, text):
    assert repr(selection) == text


def test_a_selection_says_what_it_selects():
    for wrt in ("**", "p", Point, pg.held, lambda t: t["p"]):
        selection = pg.path("a") | wrt
        assert selection.paths(TREE) == [path for path, _ in pg.items(TREE, selection)]
    assert pg.path("**.x").paths(TREE) == ["['p'].x"]
    assert len(pg.path("q").paths(TREE)) == 1
    assert pg.path("w[1:]").paths({"w": jnp.ones(3)}) == ["['w'][1]", "['w'][2]"]


def test_a_selection_shows_no_internals():
    for selection in (pg.path("a"), pg.held, pg.path("a") | "b", pg.matching(lambda path, leaf: True)):
        assert [name for name in dir(selection) if not name.startswith("__")] == ["paths"]
        assert selection.paths.__doc__


def test_no_empty_selection():
    for call in (pg.Selection, lambda: pg.Selection("a"), lambda: pg.types.Selection(3)):
        refused(call, TypeError, "is the class of selectors", "each, path, of_type, matching, exclude")


# --- held --------------------------------------------------------------------------------------------------------------

HELD = ["['k']['period']", "['q']"]


def test_held_is_read():
    assert [path for path, _ in pg.items(TREE, pg.held)] == HELD == pg.held.paths(TREE)
    found = pg.select(TREE, pg.held)
    assert (found["a"], found["k"]["period"], found["k"]["n"], found["p"]) == (None, 2.0, None, Point(None, None))
    assert pg.is_nondiff(TREE, pg.held)
    assert {row.path for row in pg.summary(TREE, pg.held).rows if row.status == "held by a mark"} == set(HELD)
    assert "held 2" in str(pg.show(TREE, pg.held))
    thawed = pg.thaw(TREE, pg.held)
    assert thawed["k"]["period"] == 2.0
    assert pg.items(thawed) == pg.items(pg.thaw(TREE))
    mask = pg.unwrap(pg.mask(TREE, pg.held))
    assert mask == {"a": False, "k": {"period": True, "n": False}, "q": True, "p": Point(False, False)}
    assert pg.replace(TREE, pg.held, fn=lambda x: x * 0)["k"] == {"period": NonDiff(0.0), "n": 3}


def test_what_is_held_and_what_is_free_are_everything():
    held, free = pg.held.paths(TREE), [path for path, _ in pg.items(TREE)]
    assert not set(held) & set(free)
    assert set(held) | set(free) == {path for path, _ in pg.items(pg.thaw(TREE))}


def test_held_combines():
    assert (pg.held - pg.path("q")).paths(TREE) == HELD[:1]
    assert (pg.held & "k").paths(TREE) == HELD[:1]
    assert (pg.path("a") | pg.held).paths(TREE) == ["['a']", *HELD]
    assert (~pg.held).paths(TREE) == [path for path, _ in pg.items(TREE)]
    thawed = pg.thaw(TREE, pg.held & "k")
    assert isinstance(thawed["q"], NonDiff)
    assert thawed["k"]["period"] == 2.0
    assert pg.unwrap(pg.mask(TREE, pg.held - pg.path("q")))["q"] is False


@pytest.mark.parametrize("f", [pg.partition, pg.ravel, pg.stop_gradient, lambda t, w: pg.grad(lambda t: 0.0, wrt=w)(t)])
def test_held_leaves_are_not_differentiated_by_description(f):
    """`held` describes, so rule 6 asks for a name, or to thaw; both remedies are followed."""
    refused(lambda: f(TREE, pg.held), LookupError, "held by a mark", "partgrad.thaw(tree, partgrad.held)")
    assert pg.grad(lambda t: t["k"]["period"] ** 2, wrt="['k']['period']")(TREE) == 4.0
    assert pg.grad(lambda t: t["k"]["period"] ** 2, wrt="**.period")(pg.thaw(TREE, pg.held))["k"]["period"] == 4.0


def test_nothing_is_held():
    refused(lambda: pg.items({"a": 1.0}, pg.held), LookupError, "No mark holds any floating or complex leaf")


@pytest.mark.parametrize(
    "wrt", ["**.period", pg.matching(lambda path, leaf: "period" in path), pg.path("**.period") & "k"]
)
def test_reading_what_is_held_is_not_refused(wrt):
    assert pg.items(TREE, wrt) == [(HELD[0], 2.0)]
    assert pg.select(TREE, wrt)["k"]["period"] == 2.0
    assert pg.is_nondiff(TREE, wrt)
    assert pg.summary(TREE, wrt).rows[1].status == "integer"
    refused(lambda: pg.partition(TREE, wrt), LookupError)
    # Beside free leaves, what is described is free, as ever; what is named is read.
    assert [path for path, _ in pg.items(TREE, "**")] == ["['a']", "['k']['n']", "['p'].x", "['p'].y"]
    assert [path for path, _ in pg.items(TREE, pg.path("a") | wrt)] == ["['a']", HELD[0]]


# --- keys that compare equal -------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


TYPED = {"int": {1: 1.0, 2: 2.0}, "enum": {Colour.RED: 1.0, 2: 2.0}, "bool": {True: 1.0, 2: 2.0}}


@pytest.mark.parametrize("first", TYPED)
@pytest.mark.parametrize("then", TYPED)
def test_a_path_means_the_same_whatever_tree_came_before(first, then):
    """Structures whose keys compare equal are told apart by the types of the keys."""
    for name in (first, then):
        tree = TYPED[name]
        key = next(iter(tree))
        assert pg.items(tree, None)[0][0] == f"[{key!r}]"
        assert pg.select(tree, f"[{key!r}]") == 1.0
        for other in ("[1]", "[True]", "[<Colour.RED: 1>]"):
            if other != f"[{key!r}]":
                refused(lambda tree=tree, other=other: pg.select(tree, other), LookupError)


@pytest.mark.parametrize("tree", [3.0, jnp.ones(2), "text", NonDiff(2.0)])
def test_the_path_of_a_tree_that_is_one_leaf(tree):
    assert pg.select(tree, "") is not None
    assert pg.items(tree, "")[0][0] == ""
    if not isinstance(tree, str):
        assert pg.grad(lambda x: jnp.sum(3 * x), wrt="")(tree) is not None
    for other in ({"a": 1.0}, [1.0], [], None):
        refused(lambda other=other: pg.select(other, ""), LookupError, "the path of a tree that is one leaf")
