"""Summary: what each leaf is, folding, totals, and what is shown in a terminal and in a notebook."""

import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import RBF, Config, Flax, Linear, Periodic, Point, composite
from partgrad import summary

pytestmark = pytest.mark.core


def statuses(tree, wrt=None):
    return {row.path: row.status for row in summary(tree, wrt).rows}


def shown_paths(tree, wrt=None):
    """The paths in the printed table, which has no blank in a path here."""
    table = str(summary(tree, wrt)).split("\n\n")[0]
    return [line.split()[0] for line in table.splitlines()[2:]]


def dense():
    return {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}


def test_the_text_of_a_small_table():
    tree = {
        "kernel": Periodic(1.0, np.float32(2.0), 3.0),
        "key": jax.random.key(0),
        "layers": [dense(), dense()],
        "step": 0,
    }
    expected = """\
path                    type        status          value
----------------------  ----------  --------------  -----
['kernel'].variance     float       not selected    1
['kernel'].lengthscale  f32[]       not selected    2
['kernel'].period       float       held by a mark  3
['key']                 key<fry>[]  key
['layers'][0..1]['b']   f32[4]      differentiated  1 ± 0
['layers'][0..1]['w']   f32[3,4]    differentiated  1 ± 0
['step']                int         integer         0

differentiated  4 of 9 leaves, 32 of 37 entries
gradient        128 B (140 B without marks and selection)
Adam state      256 B (280 B without marks and selection)"""
    found = summary(tree, "layers")
    assert str(found) == expected
    assert repr(found) == str(found)


def test_every_status():
    tree = {
        "float": 1.0,
        "complex": 1j,
        "wrapped": pg.NonDiff(jnp.arange(3)),
        "static": pg.Static({"grid": (1.0, 2.0), "name": "a"}),
        "config": Config(1.0),
        "int": 3,
        "int4": jnp.zeros(2, jnp.int4),
        "uint8": np.uint8(1),
        "bool": True,
        "bools": jnp.zeros(2, bool),
        "key": jax.random.key(0),
        "str": "a",
        "strs": np.array(["a"]),
        "function": lambda x: x,
        "relu": jax.nn.relu,
        "object": object(),
        "objects": np.array([None]),
        "bytes": b"a",
    }
    assert statuses(tree, lambda t: (t["float"], t["complex"], t["config"])) == {
        "['float']": "differentiated",
        "['complex']": "differentiated",
        "['wrapped']": "held by a mark",
        "['config'].w": "differentiated",
        "['config'].held": "held by a mark",
        "['int']": "integer",
        "['int4']": "integer",
        "['uint8']": "integer",
        "['bool']": "bool",
        "['bools']": "bool",
        "['key']": "key",
        "['str']": "string",
        "['strs']": "string",
        "['function']": "function",
        "['relu']": "function",
        "['object']": "object",
        "['objects']": "ndarray",
        "['bytes']": "bytes",
    }
    assert statuses(tree, "float")["['complex']"] == "not selected"


def test_dtypes_of_other_libraries():
    class Foreign:
        dtype, shape = ["foreign"], (2,)

    assert statuses([Foreign()]) == {"[0]": "Foreign"}
    Foreign.dtype = "foreign"
    assert summary([Foreign()]).rows == (("[0]", "foreign[2]", "Foreign", ""),)
    assert statuses([np.zeros(2, jax.dtypes.float0), np.zeros(2, "M8[s]")]) == {"[0]": "ndarray", "[1]": "ndarray"}


def test_a_named_held_leaf_is_differentiated():
    kernel = composite()
    assert statuses(kernel)["a.variance"] == "held by a mark"
    assert statuses(kernel, "a.variance")["a.variance"] == "differentiated"
    assert statuses(kernel, "a.variance")["a.lengthscale"] == "not selected"
    assert statuses(Config(1.0), "held") == {"w": "not selected", "held": "differentiated"}


def test_marks_above_whole_nodes_hold_what_is_in_them():
    tree = {"a": pg.NonDiff({"x": 1.0, "n": 2, "f": jnp.tanh}), "b": pg.NonDiff(pg.Static("s"))}
    assert statuses(tree) == {
        "['a']['f']": "held by a mark",
        "['a']['n']": "held by a mark",
        "['a']['x']": "held by a mark",
    }


@pytest.mark.parametrize(
    "tree",
    [
        {"a": [1.0, 2.0]},
        Point(1.0, jnp.ones(2)),
        Linear(1.0, pg.NonDiff(2.0)),
        Flax(jnp.ones(2)),
        composite(),
        jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        1.0,
    ],
)
def test_rows_follow_the_leaves(tree):
    found = summary(tree)
    for row, leaf in zip(found.rows, jax.tree.leaves(tree), strict=True):
        assert row.path == "" or pg.select(tree, row.path) is leaf
    selected = jax.tree.leaves(pg.mask(tree, None))
    assert [row.status == "differentiated" for row in found.rows] == selected


def test_shapes_and_tracers():
    assert summary(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)).rows == (("", "bf16[2,3]", "differentiated", ""),)
    found = []

    @jax.jit
    def f(kernel):
        found.append(summary(kernel, "a"))
        return kernel.b.a.variance

    f(composite())
    assert found[0].rows[:3] == (
        ("a.variance", "f32[]", "held by a mark", ""),
        ("a.lengthscale", "f32[]", "differentiated", ""),
        ("b.a.variance", "f32[]", "not selected", ""),
    )


@pytest.mark.parametrize("tree", [{}, [], None, {"n": 3}, (True, "a")])
def test_trees_without_differentiable_leaves(tree):
    found = summary(tree)
    assert "\ndifferentiated  0 of " in str(found)
    assert found.to_dict()["gradient_bytes"] == {"differentiated": 0, "all": 0}


def test_selectors_that_do_not_fit_raise():
    with pytest.raises(pg.errors.SelectionError):
        summary({"a": 1.0}, "b")
    with pytest.raises(pg.errors.SelectionError):
        summary({"a": 1.0}, 3)


def test_repeated_layers_fold():
    layers = [Linear(jnp.ones((2, 2)), jnp.ones(2)) for _ in range(8)]
    tree = {"first": Linear(1.0, 2.0), "layers": layers}
    found = summary(tree)
    assert len(found.rows) == 18
    assert shown_paths(tree) == [
        "['first'].weight",
        "['first'].bias",
        "['layers'][0..7].weight",
        "['layers'][0..7].bias",
    ]


def test_folding_keeps_types_and_statuses_apart():
    layers = [dense() for _ in range(6)]
    layers[2] = {"w": jnp.ones((3, 5)), "b": jnp.ones(4)}
    assert shown_paths(layers) == ["[0..1]['b']", "[0..1]['w']", "[2]['b']", "[2]['w']", "[3..5]['b']", "[3..5]['w']"]
    assert shown_paths([1.0, 2.0, pg.NonDiff(3.0), pg.NonDiff(4.0), 5]) == ["[0..1]", "[2..3]", "[4]"]
    assert shown_paths((1.0, 2.0, 3.0), "[1]") == ["[0]", "[1]", "[2]"]


def test_folding_nests():
    block = {"heads": [dense(), dense()], "norm": 1.0}
    assert shown_paths([[block, block, block], [block, block, block]]) == [
        "[0..1][0..2]['heads'][0..1]['b']",
        "[0..1][0..2]['heads'][0..1]['w']",
        "[0..1][0..2]['norm']",
    ]
    assert shown_paths([[block], [block, block]])[:3] == [
        "[0][0]['heads'][0..1]['b']",
        "[0][0]['heads'][0..1]['w']",
        "[0][0]['norm']",
    ]
    assert shown_paths([[1.0, 2.0], [1.0, 2.0], [1.0, 2]]) == ["[0..1][0..1]", "[2][0]", "[2][1]"]


def test_only_neighbours_in_one_list_fold():
    assert shown_paths([1.0, None, 1.0]) == ["[0]", "[2]"]
    assert shown_paths({0: 1.0, 1: 1.0}) == ["[0]", "[1]"]
    assert shown_paths({"a": [1.0], "b": [1.0, 1.0]}) == ["['a'][0]", "['b'][0..1]"]
    assert shown_paths(Point(1.0, 1.0)) == ["x", "y"]
    assert shown_paths([[1.0], 1.0, [1.0]]) == ["[0][0]", "[1]", "[2][0]"]


class Long(NamedTuple):
    a_field_with_a_name_that_is_rather_long_and_goes_on: object
    other: object = 1.0


def a_very_long_class():
    return type("A" * 100, (), {})()


@pytest.mark.parametrize(
    "tree",
    [
        {"x" * 200: 1.0},
        Long(Long(Long(1.0))),
        {"日本語" * 30: jnp.ones((1, 2)), "e\u0301" * 90: 2.0, "a": jnp.ones((1,) * 30)},
        {"y" * 100: a_very_long_class()},
        {"new\nline": a_very_long_class()},
        jax.ShapeDtypeStruct((10**30, 10**30), jnp.float32),
    ],
)
def test_at_most_80_columns(tree):
    lines = str(summary(tree)).splitlines()
    wide = "日本語"
    assert max(len(line) + sum(line.count(c) for c in wide) - line.count("\u0301") for line in lines) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert len(lines) == len(jax.tree.leaves(tree)) + 6


def test_long_paths_lose_their_middle():
    line = str(summary(Long(Long(Long(1.0))))).splitlines()[2]
    assert line.startswith("a_field_with_a_name_that")
    assert "..." in line
    assert line.split()[0].endswith("and_goes_on")
    assert line.endswith("  float  differentiated  1")


def test_html():
    tree = {"<b>&": [dense(), dense()], "f": type("<T>", (), {})()}
    text = summary(tree)._repr_html_()
    row = "<td>[&#x27;&lt;b&gt;&amp;&#x27;][0..1][&#x27;w&#x27;]</td><td>f32[3,4]</td><td><span [^>]*>●</span> differentiated</td>"
    assert re.search(re.escape(row).replace(re.escape("[^>]*"), "[^>]*"), text)
    assert "<td>&lt;T&gt;</td>" in text
    assert "<b>" not in text
    assert "<T>" not in text
    assert "4 of 5 leaves, 32 of 32 entries" in text
    assert text.count("<tr>") == 1 + 3 + 3


def test_totals(x64):
    tree = {
        "a": jnp.ones((10, 20), jnp.float32),
        "b": pg.NonDiff(jnp.ones(5, jnp.complex64)),
        "c": 1.0,
        "d": np.ones(3),
        "e": jnp.ones(7, jnp.bfloat16),
        "n": jnp.arange(4),
        "s": "text",
    }
    wide = 8 if x64 else 4
    here, everything = 800 + 4 * wide, 800 + 5 * 8 + 4 * wide + 14
    found = summary(tree, lambda t: (t["a"], t["c"], t["d"]))
    totals = found.to_dict()
    assert totals["leaves"] == {"differentiated": 3, "all": 7}
    assert totals["entries"] == {"differentiated": 204, "all": 220}
    assert totals["gradient_bytes"] == {"differentiated": here, "all": everything}
    assert totals["adam_bytes"] == {"differentiated": 2 * here, "all": 2 * everything}
    gradient = jax.grad(lambda x: x.sum())(jnp.asarray(tree["d"]))
    assert gradient.nbytes == 3 * wide
    assert f"gradient        {here} B ({everything} B without" in str(found)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (249, "996 B"),
        (250, "1.0 kB"),
        (12_345, "49.4 kB"),
        (249_987, "999.9 kB"),
        (249_988, "1.0 MB"),
        (250_000_000, "1.0 GB"),
        (175 * 10**9, "700.0 GB"),
    ],
)
def test_units(entries, text):
    tree = jax.ShapeDtypeStruct((entries,), jnp.float32)
    assert f"gradient        {text} ({text} without marks and selection)" in str(summary(tree))


def test_values_of_numbers_and_of_arrays():
    leaves = [0.123456, 3, True, 2 + 1j, np.float32(1e-9), jnp.array([1.0, 3.0]), jnp.array([jnp.nan]), jnp.arange(3)]
    texts = ["0.1235", "3", "True", "2+1j", "1e-09", "2 ± 1", "nan", ""]
    assert [row.value for row in summary([*leaves, jnp.ones((2, 0)), jnp.ones(2, jnp.bfloat16)]).rows] == [
        *texts,
        *("", "1 ± 0"),
    ]
    # What is folded has a value where all of it has that.
    layers = [{"w": 1.0, "b": 2.0}, {"w": 1.0, "b": 3.0}, {"w": 1.0, "b": 2.0}]
    rows = [line.split() for line in str(summary(layers)).splitlines()[2:4]]
    assert rows == [["[0..2]['b']", "float", "differentiated"], ["[0..2]['w']", "float", "differentiated", "1"]]


def test_to_dict_is_plain_data():
    found = summary({"layers": [RBF(1.0, 2.0), RBF(1.0, 2.0)]}).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert len(found["rows"]) == 4
    assert found["rows"][0] == {
        "path": "['layers'][0].variance",
        "type": "float",
        "status": "differentiated",
        "value": "1",
    }
