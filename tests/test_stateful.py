"""Any sequence of freezing, thawing, replacing, parting, labelling, pickling and compiling keeps values, marks and paths.

`python -m pytest -m "" --hypothesis-profile=long tests/test_stateful.py` runs ten thousand of them.
"""

import copy
import pickle

import cloudpickle
import hypothesis.stateful
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import partgrad as pg
from helpers.models import Flax, Linear
from helpers.strategies import marked, trees
from helpers.tables import examples

NODES = [
    lambda children: st.tuples(children, children).map(lambda p: Linear(*p)),
    lambda children: children.map(Flax),
]
numbers = st.floats(-2, 2, width=32).map(np.float32) | st.sampled_from(
    [np.array([0.5, -0.25], np.float32), np.int32(3)]
)
LONGEST = 8


class Leaf:
    """What is known of a leaf: its path, value, and status in `partgrad.summary`."""

    def __init__(self, row, value):
        self.path, self.value, self.status = row.path, value, row.status

    @property
    def is_free(self):
        return self.status == "differentiated"

    @property
    def can_be_named(self):
        return (
            self.status in ("differentiated", "held by a mark") and self.path and np.result_type(self.value).kind == "f"
        )


def key_paths(tree):
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


class Edited(hypothesis.stateful.RuleBasedStateMachine):
    @initialize(tree=marked(trees(numbers, NODES, max_leaves=6)))
    def begin(self, tree):
        self.tree = tree
        rows = pg.summary(tree).rows
        self.leaves = [Leaf(row, value) for row, value in zip(rows, jax.tree.leaves(tree), strict=True)]

    def named(self):
        return [leaf for leaf in self.leaves if leaf.can_be_named]

    def one(self, data):
        return data.draw(st.sampled_from(self.named()))

    @precondition(lambda self: self.named())
    @rule(data=st.data())
    def freeze(self, data):
        leaf = self.one(data)
        self.tree = pg.freeze(self.tree, leaf.path)
        leaf.status = "held by a mark"

    @rule()
    def freeze_all(self):
        self.tree = pg.freeze(self.tree, None)
        for leaf in self.leaves:
            if leaf.is_free:
                leaf.status = "held by a mark"

    @precondition(lambda self: self.named())
    @rule(data=st.data())
    def thaw(self, data):
        leaf = self.one(data)
        self.tree = pg.thaw(self.tree, leaf.path)
        leaf.status = "differentiated"

    @precondition(lambda self: self.named())
    @rule(data=st.data(), factor=st.sampled_from([0.5, 2.0]))
    def replace(self, data, factor):
        leaf = self.one(data)
        leaf.value = np.asarray(leaf.value * np.float32(factor))
        self.tree = pg.replace(self.tree, leaf.path, leaf.value)

    @rule(reverse=st.booleans())
    def part_and_combine(self, reverse):
        parts = pg.partition(self.tree)
        free = [leaf.value for leaf in self.leaves if leaf.is_free]
        assert len(jax.tree.leaves(parts[0])) == len(free)
        self.tree = pg.combine(*(parts[::-1] if reverse else parts))

    @precondition(lambda self: self.named())
    @rule(data=st.data())
    def part_a_named_leaf(self, data):
        leaf = self.one(data)
        selected, rest = pg.partition(self.tree, leaf.path)
        assert [x is leaf.value or np.array_equal(x, leaf.value) for x in jax.tree.leaves(selected)] == [True]
        # A named mark is off in what `combine` makes of the parts.
        self.tree, leaf.status = pg.combine(selected, rest), "differentiated"

    @precondition(lambda self: any(leaf.is_free and leaf.path for leaf in self.leaves))
    @rule(data=st.data())
    def label(self, data):
        leaf = data.draw(st.sampled_from([leaf for leaf in self.leaves if leaf.is_free and leaf.path]))
        labels = pg.label(self.tree, {"this": leaf.path}, default="other")
        assert jax.tree.structure(labels) == jax.tree.structure(self.tree)
        assert jax.tree.leaves(labels).count("this") == 1

    @rule(
        way=st.sampled_from(
            [
                copy.copy,
                copy.deepcopy,
                lambda t: pickle.loads(pickle.dumps(t)),
                lambda t: cloudpickle.loads(cloudpickle.dumps(t)),
            ]
        )
    )
    def copy(self, way):
        self.tree = way(self.tree)

    @rule()
    def flatten(self):
        leaves, structure = jax.tree.flatten(self.tree)
        self.tree = jax.tree.map(lambda x: x, structure.unflatten(leaves))

    @rule()
    def compile(self):
        # Traced and put together again as `jit` does it, without compiling.
        structure = jax.tree.structure(self.tree)
        assert jax.tree.structure(jax.eval_shape(lambda t: t, self.tree)) == structure
        assert jax.tree.structure(jax.jit(lambda t: t).trace(self.tree).out_info) == structure

    @precondition(lambda self: any(leaf.is_free for leaf in self.leaves))
    @rule()
    def ravel(self):
        vector, unravel = pg.ravel(self.tree)
        self.tree = unravel(vector)
        assert len(unravel.names) == vector.size

    @invariant()
    def is_as_it_should_be(self):
        leaves, rows = jax.tree.leaves(self.tree), pg.summary(self.tree).rows
        assert [row.path for row in rows] == [leaf.path for leaf in self.leaves]
        for leaf, row, value in zip(self.leaves, rows, leaves, strict=True):
            # What is wrapped whole holds its integers as well, which changes nothing.
            assert row.status == leaf.status or {row.status, leaf.status} == {"integer", "held by a mark"}
            assert np.array_equal(np.asarray(leaf.value), np.asarray(value))
            assert np.shape(leaf.value) == jnp.shape(value)
        assert len(key_paths(self.tree)) == len(set(key_paths(self.tree))) == len(leaves)


TestEdited = pytest.mark.slow(Edited.TestCase)
TestEdited.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=LONGEST)
