"""Laws over random trees, selectors and functions."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import partgrad as pg
from helpers.models import RBF, Config, Flax, Linear, is_differentiable, paths, trees_equal
from helpers.strategies import trees
from helpers.tables import examples
from partgrad import NonDiff

SHARED = jnp.array([0.5, 0.25])

floats = st.one_of(
    st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-3),
    st.sampled_from(
        [SHARED, np.array([0.1, 0.2, 0.3], np.float32), jnp.float32(0.7), jnp.ones((), jnp.bfloat16), jnp.ones((2, 0))]
    ),
)
others = st.sampled_from([3, True, "x", None, math.sin, jnp.arange(2), np.array([True]), jax.random.key(0)])


NODES = [
    lambda children: st.tuples(children, children).map(lambda p: Linear(*p)),
    lambda children: st.tuples(children, children).map(lambda p: RBF(NonDiff(p[0]), p[1])),
    lambda children: children.map(Flax),
    lambda children: children.map(Config),
]


mixed, smooth = trees(st.one_of(floats, others), NODES), trees(floats, NODES)


def f(tree):
    """A smooth function of every floating leaf, in which the leaves interact."""
    total = 0.3
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if is_differentiable(leaf):
            total = total + jnp.sum(jnp.sin(jnp.asarray(leaf, jnp.float32) * (i + 1.5))) * jnp.cos(total)
    return total


@given(mixed)
def test_combine_undoes_partition(tree):
    parts = pg.partition(tree)
    assert trees_equal(pg.combine(*parts), tree)
    assert trees_equal(pg.combine(*parts[::-1]), tree)


@pytest.mark.slow
@given(smooth.filter(lambda t: jax.tree.leaves(t)))
@settings(max_examples=examples(60))
def test_it_equals_jax_on_trees_of_floats(tree):
    tree = pg.thaw(tree, None)
    got, want = pg.value_and_grad(f)(tree), jax.value_and_grad(f)(tree)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@given(mixed, st.data())
@settings(max_examples=examples(60))
def test_a_named_leaf_gets_the_gradient_of_the_function_closed_over_the_rest(tree, data):
    leaves = jax.tree.leaves(tree)
    places = [(i, p) for i, p in enumerate(paths(tree)) if is_differentiable(leaves[i])]
    if not places:
        return
    i, path = data.draw(st.sampled_from(places))
    if path == "":
        return

    def closed(x):
        # Without marks: the leaf is named, so it is differentiated even if one holds it.
        return f([x if j == i else leaf for j, leaf in enumerate(leaves)])

    got = pg.grad(jax.jit(f) if all(hasattr(leaf, "dtype") for leaf in leaves) else f, wrt=path)(tree)
    want = jax.grad(closed)(leaves[i])
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=1e-4)


@pytest.mark.slow
@example(NonDiff(Config(NonDiff([]))))
@example(Flax(Flax((0.0, NonDiff(3)))))
@example(Flax(Linear(0.0, RBF(NonDiff(None), 0.0))))
@given(mixed)
def test_freeze_then_thaw_changes_nothing_but_marks(tree):
    frozen, thawed = pg.freeze(tree, None), pg.thaw(tree, None)
    for other in (frozen, thawed):
        leaves = [a is b for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(tree), strict=True)]
        assert all(leaves)
    assert not any(is_differentiable(leaf) for leaf in jax.tree.leaves(pg.partition(frozen)[0]))
    assert len(jax.tree.leaves(pg.partition(thawed)[0])) == sum(map(is_differentiable, jax.tree.leaves(tree)))
    assert trees_equal(pg.thaw(frozen, None), thawed)


@pytest.mark.slow
@given(mixed)
def test_the_gradient_has_none_exactly_where_nothing_was_differentiated(tree):
    selected, _ = pg.partition(tree)
    if jax.tree.leaves(selected):
        gradient = pg.grad(f)(tree)
        assert jax.tree.structure(gradient) == jax.tree.structure(selected)
        assert [np.shape(g) for g in jax.tree.leaves(gradient)] == [np.shape(x) for x in jax.tree.leaves(selected)]


@given(floats, floats, st.sampled_from(["variance", "lengthscale", None]))
def test_replace_keeps_marks_and_values(variance, lengthscale, marked):
    kernel = RBF(variance, lengthscale) if marked is None else pg.freeze(RBF(variance, lengthscale), marked)
    assert dataclasses.replace(kernel) == kernel


@pytest.mark.slow
@given(smooth, st.data())
@settings(max_examples=examples(40))
def test_every_transform_is_that_of_jax_closed_over_the_rest(tree, data):
    leaves, rows = jax.tree.leaves(tree), pg.summary(tree).rows
    free = [
        row.path for row, leaf in zip(rows, leaves, strict=True) if row.status != "held by a mark" and jnp.size(leaf)
    ]
    if not free:
        return
    chosen = data.draw(st.sets(st.sampled_from(free), min_size=1))
    wrt = pg.matching(lambda path, leaf: path in chosen)
    selected, rest = pg.partition(tree, wrt)
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), selected)
    tree = pg.combine(arrays, rest)
    closed = lambda part: f(pg.combine(part, rest))
    tangent = jax.tree.map(lambda x: jnp.full(jnp.shape(x), 0.25), arrays)

    def same(one, other):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)

    same(pg.grad(f, wrt=wrt)(tree), jax.grad(closed)(arrays))
    same(pg.jacfwd(f, wrt=wrt)(tree), jax.jacfwd(closed)(arrays))
    same(pg.jvp(f, (tree,), (tangent,), wrt=wrt), jax.jvp(closed, (arrays,), (tangent,)))
    same(pg.vjp(f, tree, wrt=wrt)[1](1.0), jax.vjp(closed, arrays)[1](1.0))
    same(pg.hvp(f, wrt=wrt)(tree, tangent), jax.jvp(jax.grad(closed), (arrays,), (tangent,))[1])
    same(pg.select(tree, wrt), arrays)


def selected(tree, wrt):
    """The numbers of the leaves that a selector differentiates; None if it refuses the tree."""
    try:
        return {i for i, chosen in enumerate(jax.tree.leaves(pg.mask(tree, wrt))) if chosen}
    except pg.errors.SelectionError:
        return None


@st.composite
def selectors(draw, leaves):
    """A selector that names or describes some of these leaves, in one of many ways."""
    above = {path[:end] for path in leaves for end, letter in enumerate(path + ".") if letter in ".[" and end}
    several = draw(st.sets(st.sampled_from(leaves)))
    describing = [
        *(None, "**", "**[*]", "**.weight", "**.*s*", "*[:1].**", Linear, RBF, Flax, list, tuple, dict),
        *(pg.each(lambda node: node.variance), lambda node: node.weight, pg.each(lambda node: node[-1])),
        pg.matching(lambda path, leaf: path in several),
        pg.path(re.compile("|".join(map(re.escape, sorted(several)))) if several else re.compile(".*0.*")),
    ]
    return draw(st.sampled_from(describing) | st.sampled_from(sorted(above)) | st.sampled_from(leaves))


def as_selection(selector):
    """The same as an object that has `&`, `-` and `~`; every leaf in place of a callable."""
    if isinstance(selector, pg.Selection):
        return selector
    return (
        pg.of_type(selector) if isinstance(selector, type) else pg.path(selector if isinstance(selector, str) else "**")
    )


@pytest.mark.slow
@given(mixed, st.data())
@settings(max_examples=examples(100))
def test_combinations_are_those_of_sets(tree, data):
    places = paths(tree)
    if not all(places) or not places:
        return
    first, second = (data.draw(selectors(places)) for _ in range(2))
    first = as_selection(first)
    one, other, free = selected(tree, first), selected(tree, second), selected(tree, None)
    if one is None or other is None:
        return
    # What a name opens is open in a union alone.
    assert (selected(tree, ~first) or set()) == free - one
    assert (selected(tree, first & second) or set()) == one & other & free
    assert (selected(tree, first - second) or set()) == (one - other) & free
    if one and other:
        for union in (first | second, second | first, (first | second) | first):
            assert selected(tree, union) == one | other
            part = pg.partition(tree, union)[0]
            assert jax.tree.structure(pg.grad(f, wrt=union)(tree)) == jax.tree.structure(part)
