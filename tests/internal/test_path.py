"""Key paths as text."""

import enum
import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import partgrad as pg
from helpers.messages import refused
from helpers.models import RBF, Config, Flax, Linear, Point
from partgrad import NonDiff, errors
from partgrad._marks.layout import Layout
from partgrad._skeletons import patterns as key_paths
from partgrad._trees import paths as text_of_paths


class Colour(enum.Enum):
    RED = 1


def paths(tree):
    return [leaf.path for leaf in Layout(tree).leaves]


def test_paths_read_as_python():
    tree = {"dec": [{"w": 1.0}, Point(2.0, Config(3.0))]}
    assert paths(tree) == [
        "['dec'][0]['w']",
        "['dec'][1].x",
        "['dec'][1].y.w",
        "['dec'][1].y.held",
    ]
    assert paths(1.0) == [""]


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "a name"),
        ("a..b", 2, "a name"),
        (".", 1, "a name"),
        ("a**", 0, "a name"),
        ("a.", 2, "a name"),
        ("a b", 1, "a dot or a bracket"),
        ("a[", 1, "a closing bracket"),
        ("a[]", 1, "an index, a key"),
        ("a[0]b", 4, "a dot or a bracket"),
        ("3", 0, "a name"),
    ],
)
def test_what_cannot_be_read_says_where_and_what_was_expected(text, position, expected):
    with pytest.raises(errors.NoMatchError, match=f"cannot be read at position {position}.*\n  Expected {expected}"):
        key_paths.parse(text)


@given(st.dictionaries(st.text(min_size=1), st.floats(), min_size=1, max_size=4))
def test_every_written_path_is_read_back_to_the_same_leaf(tree):
    layout = Layout(tree)
    for leaf in layout.leaves:
        (step,) = key_paths.parse(leaf.path)
        assert [other.path for other in layout.leaves if step.matches(other.step, len(tree))] == [leaf.path]


def test_keys_of_other_kinds():
    for key in [(1, "a"), 2, -1, True, "it's", 'a"b', "a]b", "x.y", Colour.RED]:
        (leaf,) = Layout({key: 1.0}).leaves
        (step,) = key_paths.parse(leaf.path)
        assert step.matches(leaf.step, 1), leaf.path
    (step,) = key_paths.parse("[1]")
    assert not step.matches(jax.tree_util.DictKey(True), 1)


@jax.tree_util.register_pytree_node_class
class Unkeyed:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Registered:
    def __init__(self, w):
        self.w = w


class Own:
    def __repr__(self):
        return "Own('w')"


jax.tree_util.register_pytree_with_keys(
    Registered, lambda r: (((Own(), r.w),), None), lambda _, children: Registered(*children)
)


def test_a_key_of_a_class_of_its_own_is_read_back():
    tree = {"a": Registered([1.0, 2.0])}
    assert paths(tree) == ["['a'][Own('w')][0]", "['a'][Own('w')][1]"]
    assert pg.select(tree, "a[Own('w')][1]") == 2.0


LIBRARIES = {
    "pg.dataclass": lambda: RBF([Point(1.0, {"a b": 2.0}), {"c": NonDiff(3.0)}], Config(4.0)),
    "equinox": lambda: {"net": eqx.nn.MLP(2, 2, 3, 2, key=jax.random.key(0)), "held": NonDiff(Linear(1.0, 2.0))},
    "flax": lambda: {"net": Flax((1.0, [2.0, {(1, "x"): 3.0, (2, "]"): 4.0}, {2: 5.0, -1: 6.0}]))},
    "registered without names": lambda: {"deep": [Unkeyed(1.0, [2.0, 3.0])], "x": 4.0},
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_jax_writes_is_read(name):
    tree = LIBRARIES[name]()
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(tree), Layout(tree).leaves, strict=True):
        assert pg.items(tree, jax.tree_util.keystr(path)) == pg.items(tree, place.path) == [(place.path, leaf)]


GLOBS = {
    "conv1": {"kernel": 1.0, "bias": 2.0},
    "conv2": {"kernel": 3.0, "scale": 4.0},
    "head": [5.0, 6.0, 7.0],
    "*": 8.0,
}


@pytest.mark.parametrize(
    ("pattern", "leaves"),
    [
        ("conv*", [1, 2, 3, 4]),
        ("conv*.k*", [1, 3]),
        ("*1.*", [1, 2]),
        ("c*v*.*l*", [1, 3, 4]),
        ("**.*e*", [1, 3, 4, 5, 6, 7]),
        ("head[1:]", [6, 7]),
        ("head[::-2]", [5, 7]),
        ("head[:]", [5, 6, 7]),
        ("**[-2:]", [6, 7]),
        ("['*']", [8]),
        (re.compile(r".*'bias'.*|\['head'\]\[0\]"), [2, 5]),
        (re.compile(".*"), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_pattern_describes(pattern, leaves):
    selection = pg.path(pattern)
    assert sorted(leaf for _, leaf in pg.items(GLOBS, selection)) == leaves
    assert isinstance(pg.select(GLOBS, selection), float if pattern == "['*']" else dict)
    assert selection == pg.path(pattern)
    assert hash(selection) == hash(pg.path(pattern))
    assert pickle.loads(pickle.dumps(selection)) == selection


def test_a_slice_of_a_sequence_describes_and_one_of_an_array_names():
    tree = {"layers": [{"w": jnp.arange(3.0)}, {"w": jnp.arange(3.0)}]}
    assert pg.select(tree, "layers[1].w[1:]").tolist() == [1.0, 2.0]
    elements = pg.select(tree, "layers[1:].w[1:]")
    assert (elements["layers"][0]["w"], elements["layers"][1]["w"].tolist()) == (None, [1.0, 2.0])
    for slices in ("layers[2:]", "layers[1:].x"):
        with pytest.raises(errors.NoMatchError):
            pg.select(tree, slices)


def test_negative_indices_count_from_the_end():
    (step,) = key_paths.parse("[-1]")
    assert step.matches(jax.tree_util.SequenceKey(2), 3)
    assert not step.matches(jax.tree_util.SequenceKey(1), 3)


def test_a_path_lays_out_only_what_it_goes_through():
    tree = {"a": [1.0] * 5, "b": [{"w": 2.0}] * 5, "c": {"w": [3.0]}}
    layout = Layout(tree)
    (place,) = key_paths.matching_places(layout, key_paths.parse("b[3].w"))
    assert (place.path, place.value, place.start, place.route) == ("['b'][3]['w']", 2.0, 8, (1, 3, 0))
    assert len(layout._children) == 3
    assert [leaf.start for leaf in layout.leaves] == list(range(11))
    assert place in layout.leaves


WIDE = {"layers": [{"base": 1.0, "w": 2.0} for _ in range(5000)], "head": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrt", "fragments"),
    [
        ("layers[3].bse", ["write 'layers[3].base'"]),
        ("layers[*].bse", ["write 'layers[*].base'", "... 4990 more"]),
        ("haed", ["write 'head'"]),
        ("zzz.w", ["start at the tree itself"]),
        (lambda t: t["haed"], ["write `head` for `haed`"]),
    ],
)
def test_an_error_about_many_leaves_writes_few_paths(wrt, fragments, monkeypatch):
    # Text is what takes long: a message shows some ten paths, and compares what is misspelled with different names.
    written = []
    write_step = text_of_paths.write_step
    monkeypatch.setattr(text_of_paths, "write_step", lambda step: written.append(step) or write_step(step))
    refused(lambda: pg.partition(WIDE, wrt), ValueError, *fragments)
    assert len(written) < 500
