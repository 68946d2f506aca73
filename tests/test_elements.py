"""Elements of one array, selected by index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import partgrad as pg
from helpers.messages import refused
from helpers.models import RBF, Point, Sum
from helpers.tables import examples
from partgrad import NonDiff, errors

KERNEL = RBF(2.0, jnp.array([1.0, 2.0, 3.0]))


def f(k):
    return k.variance * (k.lengthscale**2).sum()


FULL = np.array([4.0, 8.0, 12.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrt", "index"),
    [
        (lambda k: k.lengthscale[0], 0),
        (lambda k: k.lengthscale[-1], 2),
        (lambda k: k.lengthscale[:2], slice(2)),
        (lambda k: k.lengthscale[np.array([True, False, True])], [0, 2]),
        (lambda k: k.lengthscale[jnp.array([2, 0])], [2, 0]),
        (lambda k: k.lengthscale[1:][1], 2),
        (lambda k: k.lengthscale[None, ::2], (None, slice(None, None, 2))),
        ("lengthscale[1]", 1),
        ("lengthscale[-1]", 2),
    ],
)
def test_the_gradient_has_the_shape_of_the_elements(wrt, index):
    for function in (f, jax.jit(f)):
        got = pg.grad(function, wrt=wrt)(KERNEL)
        np.testing.assert_array_equal(got, FULL[index])
        assert got.shape == np.shape(FULL[index])
    np.testing.assert_array_equal(pg.select(KERNEL, wrt), np.array([1.0, 2.0, 3.0])[index])
    assert pg.jacfwd(f, wrt=wrt)(KERNEL).shape == np.shape(FULL[index])
    assert pg.hessian(f, wrt=wrt)(KERNEL).shape == 2 * np.shape(FULL[index])


def test_elements_of_a_matrix():
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "b": 1.0}
    g = lambda t: (t["w"] ** 2).sum() * t["b"]
    assert pg.grad(g, wrt=lambda t: t["w"][0])(tree).tolist() == [0.0, 2.0, 4.0]
    assert pg.grad(g, wrt=lambda t: t["w"][1, 2])(tree) == 10.0
    assert pg.grad(g, wrt=lambda t: t["w"][:, 1])(tree).tolist() == [2.0, 8.0]
    assert pg.grad(g, wrt="w[1,2]")(tree) == 10.0
    assert pg.grad(g, wrt="w[1][2]")(tree) == 10.0
    assert pg.grad(g, wrt=lambda t: t["w"][t["w"].shape[0] - 1, 0])(tree) == 6.0


def test_parts_with_several_elements():
    first, (variance, rest) = pg.grad(f, wrt=lambda k: (k.lengthscale[0], [k.variance, k.lengthscale[1:]]))(KERNEL)
    assert (first, variance, rest.tolist()) == (4.0, 14.0, [8.0, 12.0])
    none, variance = pg.grad(f, wrt=lambda k: (k.lengthscale[:0], k.variance))(KERNEL)
    assert (none.shape, variance) == ((0,), 14.0)
    pair = pg.grad(f, wrt=lambda k: Point(k.variance, {"of": k.lengthscale[1]}))(KERNEL)
    assert pair == Point(14.0, {"of": 8.0})
    named = pg.grad(f, wrt=lambda k: {"z": k.lengthscale[2], "a": k.lengthscale[0]})(KERNEL)
    assert (named["z"], named["a"]) == (12.0, 4.0)


def test_a_tree_shaped_gradient_has_the_elements_shape_at_the_leaf():
    tree = Sum(KERNEL, RBF(1.0, jnp.array([5.0, 6.0, 7.0])))
    g = lambda s: f(s.a) + f(s.b)
    by_node = pg.grad(g, wrt=lambda k: k.lengthscale[0])(tree)
    assert (by_node.a.lengthscale, by_node.b.lengthscale, by_node.a.variance) == (4.0, 10.0, None)
    union = pg.grad(f, wrt=pg.path("lengthscale[0]") | (lambda k: k.lengthscale[2]))(KERNEL)
    assert (union.lengthscale.tolist(), union.variance) == ([4.0, 12.0], None)
    named = {"kernel": KERNEL, "name": "text", "object": object()}
    union = pg.grad(lambda t: f(t["kernel"]), wrt=pg.path("kernel.lengthscale[0]") | "kernel.variance")(named)
    assert (union["kernel"].lengthscale, union["kernel"].variance, union["name"]) == (4.0, 14.0, None)
    rest = pg.grad(f, wrt=~pg.path("lengthscale[1]"))(KERNEL)
    assert (rest.lengthscale.tolist(), rest.variance) == ([4.0, 12.0], 14.0)
    both = pg.grad(f, wrt=pg.each(lambda k: k.lengthscale[:2]) & (lambda k: k.lengthscale[1:]))(KERNEL)
    assert both.lengthscale.tolist() == [8.0]
    assert pg.grad(f, wrt=pg.path("lengthscale") - "lengthscale[0]")(KERNEL).lengthscale.tolist() == [8.0, 12.0]


def test_elements_of_held_leaves():
    held = RBF(2.0, NonDiff(jnp.array([1.0, 2.0, 3.0])))
    assert pg.grad(jax.jit(f), wrt="lengthscale[1]")(held) == 8.0
    with pytest.raises(errors.NoMatchError, match="is held by a mark"):
        pg.grad(lambda s: f(s.a), wrt=lambda k: k.lengthscale[0])(Sum(held, 1.0))


def test_edits_of_elements():
    assert pg.replace(KERNEL, "lengthscale[0]", 9.0).lengthscale.tolist() == [9.0, 2.0, 3.0]
    assert pg.replace(KERNEL, lambda k: k.lengthscale[1:], fn=lambda x: -x).lengthscale.tolist() == [1.0, -2.0, -3.0]
    stopped = pg.grad(lambda k: f(pg.stop_gradient(k, lambda k: k.lengthscale[0])))(KERNEL)
    assert stopped.lengthscale.tolist() == [0.0, 8.0, 12.0]
    vector, unravel = pg.ravel(KERNEL, lambda k: (k.lengthscale[::2], k.variance))
    assert (vector.tolist(), unravel.names) == ([1.0, 3.0, 2.0], ("lengthscale[0]", "lengthscale[2]", "variance"))
    assert unravel(10 * vector).lengthscale.tolist() == [10.0, 2.0, 30.0]
    assert pg.jvp(f, (KERNEL,), (1.0,), wrt="lengthscale[2]")[1] == 12.0
    assert pg.hvp(f, wrt="lengthscale[2]")(KERNEL, 2.0) == 8.0


@given(st.integers(0, 7))
@settings(max_examples=examples(8))
def test_the_names_of_ravel_are_selectors(number):
    tree = {"k": KERNEL, "w": [jnp.arange(4.0).reshape(2, 2)]}
    vector, unravel = pg.ravel(tree)
    assert pg.select(tree, unravel.names[number]) == vector[number]


def test_elements_of_a_tree_that_is_one_array():
    vector, unravel = pg.ravel(jnp.arange(3.0))
    assert unravel.names == ("[0]", "[1]", "[2]")
    assert pg.select(jnp.arange(3.0), "[1]") == vector[1]
    assert pg.grad(lambda x: (x**2).sum(), wrt="[2]")(jnp.arange(3.0)) == 4.0


def test_a_plan_holds_for_one_shape():
    wrt = lambda k: k.lengthscale[-1]
    for size in (3, 5, 2, 3):
        kernel = RBF(1.0, jnp.arange(1.0, size + 1))
        assert pg.grad(f, wrt=wrt)(kernel) == 2.0 * size
        assert pg.grad(f, wrt="lengthscale[-1]")(kernel) == 2.0 * size


def test_bad_elements():
    for wrt in (lambda k: k.lengthscale[3], "lengthscale[3]", lambda k: k.lengthscale[0, 0]):
        refused(
            lambda wrt=wrt: pg.grad(f, wrt=wrt)(KERNEL),
            IndexError,
            "of `lengthscale`, which is out of range",
            "into shape (3,)",
        )
    for wrt in (lambda k: (k.lengthscale[0], k.lengthscale[:2]), lambda k: k.lengthscale[np.array([0, 0])]):
        refused(lambda wrt=wrt: pg.grad(f, wrt=wrt)(KERNEL), ValueError, "returns `lengthscale` twice")
    refused(lambda: pg.grad(f, wrt=lambda k: (k.lengthscale, k.lengthscale[0]))(KERNEL), ValueError, "twice")
    union = pg.path("lengthscale[:2]") | "lengthscale[1:]"
    assert pg.grad(f, wrt=union)(KERNEL).lengthscale.shape == (3,)
    refused(lambda: pg.grad(f, wrt=lambda k: k.lengthscale[:0])(KERNEL), ValueError, "selects nothing")
    refused(
        lambda: pg.grad(f, wrt=lambda k: k.variance[0])(KERNEL),
        LookupError,
        "is a single number, which has no elements",
    )
    refused(lambda: pg.grad(f, wrt="variance[0]")(KERNEL), LookupError)
    refused(lambda: pg.grad(f, wrt=lambda k: k.lengthscale[0] * 2)(KERNEL), TypeError, "computes on")
    for use in (pg.partition, pg.mask, pg.freeze, pg.thaw, pg.is_nondiff):
        refused(
            lambda use=use: use(KERNEL, "lengthscale[0]"),
            ValueError,
            "works on whole leaves",
            "elements of `lengthscale`",
        )


def test_elements_of_a_leaf_that_memory_cannot_hold_are_not_numbered_one_by_one():
    huge = np.broadcast_to(np.float32(2.0), (10**6, 10**6))
    assert pg.select({"w": huge}, lambda m: m["w"][5, ::300_000]).tolist() == [2.0] * 4
    assert pg.items({"w": huge}, "w[-1, :2]")[0][0] == "['w'][999999,0]"


@pytest.mark.parametrize("index", [np.s_[0], np.s_[:, 1], np.s_[1:3, ::2], np.s_[-1, -1], np.s_[:, None, 2]])
def test_elements_in_a_row_are_read_and_written_as_slices(index):
    x = jnp.arange(12.0).reshape(4, 3)
    gradient = pg.grad(lambda m: (m["x"] ** 2).sum(), wrt=lambda m: m["x"][index])
    np.testing.assert_array_equal(gradient({"x": x}), 2 * x[index])
    # No numbers of entries, and the leaf is never flattened: devices would have to send it around.
    program = jax.make_jaxpr(gradient)({"x": x})
    assert not program.consts
    assert "f32[12]" not in str(program)
