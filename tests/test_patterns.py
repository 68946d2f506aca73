"""Globs and paths as text: what a star matches, and that the work grows with pattern times tree and no faster."""

import ast
import itertools
import re
import sys

import pytest
from hypothesis import example, given, strategies as st

import partgrad as pg
from partgrad import errors
from partgrad._marks import Layout
from partgrad._skeletons import patterns

GLOBS = st.lists(st.sampled_from(["a", "b", "ab", "*"]), min_size=1, max_size=7).map("".join)
NAMES = st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=1, max_size=9).map("".join)


def selected(tree, pattern):
    try:
        return [path for path, _ in pg.items(tree, pattern)]
    except errors.NoMatchError:
        return []


@given(glob=GLOBS, name=NAMES)
@example(glob="a*a", name="a")
@example(glob="ab*ba", name="aba")
@example(glob="*a*", name="a")
def test_a_star_is_any_part_of_a_name(glob, name):
    expected = re.fullmatch(glob.replace("*", ".*"), name) is not None
    assert patterns.fits(glob, name) == expected
    if "**" not in glob:
        assert bool(selected({name: 1.0, "other": 2.0}, glob)) == expected or glob == "*"


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*a" * 9 + "*b", "a" * 50, False),
        ("*a" * 9 + "*", "a" * 50, True),
        ("*b*a" * 9 + "*c", "ab" * 40, False),
        ("*a" * 2000 + "*b", "a" * 20_000, False),
        ("*a" * 2000, "a" * 20_000, True),
        ("conv*" + "1*" * 30, "conv" + "1" * 29, False),
        ("*é*é*é*é*é*é*é*é*z", "é" * 60, False),
    ],
)
def test_many_stars_in_a_name(glob, name, matches):
    assert bool(selected({name: 1.0, "q": 2.0}, glob)) is matches
    assert bool(selected({"in": [{name: 1.0}], "q": 2.0}, f"in[*].{glob}")) is matches


def test_the_key_in_brackets_is_no_glob():
    assert selected({"a*": 1.0, "ab": 2.0}, "['a*']") == ["['a*']"]
    assert selected({"a": [1.0, 2.0], "b": {"x": 3.0}}, "a[*]") == ["['a'][0]", "['a'][1]"]


def chain(depth):
    tree = 1.0
    for _ in range(depth):
        tree = {"x": tree, "y": 1.0}
    return tree


class Counted(Layout):
    asked = 0

    def children(self, place):
        self.asked += 1
        return super().children(place)


@pytest.mark.parametrize("pattern", ["**.x", "**.**.**.x", ".".join(["**"] * 20), ".".join(["**.x"] * 12), "**.*.**.y"])
def test_every_place_is_asked_once_at_each_step(pattern):
    steps = patterns.parse(pattern)
    counts = []
    for depth in (25, 100):
        layout = Counted(chain(depth))
        patterns.matching_places(layout, steps)
        counts.append(layout.asked)
        assert layout.asked <= len(steps) * len(layout.places)
    assert counts[1] <= 5 * counts[0]


def calls_for(tree, pattern):
    """How many functions an error calls, which says how far the pattern leads and what it may mean."""
    calls, before = itertools.count(), sys.getprofile()
    sys.setprofile(lambda frame, event, _: next(calls) if event == "call" else None)
    try:
        with pytest.raises(errors.NoMatchError):
            pg.items(tree, pattern)
    finally:
        sys.setprofile(before)
    return next(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        ".".join(["**.x"] * 12) + ".q",
        ".".join(["**.*"] * 12) + ".q",
        "x." * 99 + "q",
        "*." * 99 + "q",
        "y" + "[0]" * 200,
        "/".join(["**/x"] * 12) + "/q",
        "*/" * 60 + "q",
    ],
)
def test_what_matches_nothing_in_a_deep_tree_is_an_error_soon(pattern):
    assert calls_for(chain(100), pattern) <= 6 * calls_for(chain(50), pattern) <= 6_000_000


@pytest.mark.parametrize(
    ("typed", "meant", "count"),
    [
        ("mlp.*.w", "'mlp.**.w'", 2),
        ("mlp.*.*.*.w", "'mlp.**.w'", 2),
        ("mlp.layers.*.*.b", "'mlp.layers.**.b'", 1),
        ("mlp.w", "\"['mlp']['layers'][0]['w']\" or \"['mlp']['layers'][1]['w']\", or 'mlp.**.w' for all of them", 2),
        ("norm.scale.w", "\"['norm']['w']\"", 1),
    ],
)
def test_a_path_that_does_not_reach_far_enough(typed, meant, count):
    """It stays below what it names: another part of the tree has leaves of the same names."""
    tree = {"mlp": {"layers": [{"w": 1.0}, {"w": 2.0, "b": 3.0}]}, "norm": {"w": 4.0}, "w": 5.0}
    with pytest.raises(pg.errors.NoMatchError, match=re.escape(f"Fix: write {meant}.")):
        pg.items(tree, typed)
    code = re.findall(r"""'[\w.*]+'|"[^"]+\"""", meant)[-1]
    assert len(pg.items(tree, ast.literal_eval(code))) == count


@pytest.mark.parametrize("key", ["(" * 5000, "-" * 20_000 + "1", "9" * 6000, "[" * 3000, "'" * 3000])
def test_a_key_that_python_cannot_read(key):
    with pytest.raises(errors.NoMatchError):
        pg.items({"w": 1.0}, f"[{key}]")
