"""Trees that are large, deep or circular."""

import concurrent.futures
import contextlib
import itertools
import time

import jax
import pytest

import partgrad as pg
from helpers.models import RBF, Periodic
from partgrad import errors


def nested(depth, wrap, tree=2.0):
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


def first(tree):
    return jax.tree.leaves(tree)[0] ** 2


# Of a tree with one leaf, held or not; a selector that names nothing differentiable is refused with an error of partgrad.
NAMING_A_LEAF = {
    "grad": lambda t: pg.grad(first, wrt=lambda m: m)(t),
    "hvp": lambda t: pg.hvp(first, wrt=lambda m: m)(t, pg.select(t, lambda m: m)),
    "vjp": lambda t: pg.vjp(first, t, wrt=lambda m: m),
    "select": lambda t: pg.select(t, lambda m: m),
    "partition": lambda t: pg.combine(*pg.partition(t, lambda m: m)),
    "replace": lambda t: pg.replace(t, "**", fn=lambda x: x + 1.0),
    "freeze": lambda t: pg.freeze(t, "**"),
    "thaw": lambda t: pg.thaw(t, "**"),
    "label": lambda t: pg.label(t, {"a": "**"}, default="b"),
    "ravel": lambda t: pg.ravel(t, lambda m: m),
    "items": pg.items,
    "mask": pg.mask,
    "is_nondiff": lambda t: pg.is_nondiff(t, "**"),
    "stop_gradient": lambda t: pg.stop_gradient(t, lambda m: m),
    "unwrap": pg.unwrap,
    "apply_updates": lambda t: pg.apply_updates(t, t),
    "summary": lambda t: str(pg.summary(t)),
    "show": lambda t: pg.show(t).svg(),
}


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("name", NAMING_A_LEAF)
def test_a_leaf_is_named_at_any_depth_or_refused(name, kind):
    wrap = (lambda t: [t]) if kind is list else (lambda t: {"k": t})
    for depth, leaf in itertools.product((700, 2000), (2.0, pg.NonDiff(2.0))):
        # In a thread: on Python 3.11, JAX leaves the levels that it counted where it met the limit.
        with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.suppress(errors.PartgradError):
            assert thread.submit(NAMING_A_LEAF[name], nested(depth, wrap, leaf)).result() is not None


@pytest.mark.parametrize("name", ["grad", "select", "replace", "freeze", "label"])
def test_a_held_leaf_is_named_below_three_hundred_levels(name):
    assert NAMING_A_LEAF[name](nested(300, lambda t: [t], pg.NonDiff(2.0))) is not None


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
