"""Pictures: what is drawn of a tree, as text, HTML and SVG."""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import Config, Flax, Linear, Periodic, Point, composite


def rows(picture):
    """The rows of the text: without guides, blanks made one."""
    lines = str(picture).split("\n\n")[0].splitlines()[2:]
    return [" ".join(re.sub("[│├└─]", " ", line).split()) for line in lines]


def test_the_text_of_a_small_picture():
    picture = pg.show(composite(), "a.variance")
    lines = str(picture).splitlines()
    assert lines[2].split() == ["Sum", "◧", "1", "○", "5", "■", "1"]
    assert lines[4].startswith("│  ├─ ◧ variance ")
    assert lines[4].endswith("float     opened by wrt   1")
    assert lines[-2:] == [
        "◧ open 1   ○ not selected 5   ■ held 1",
        "wrt='a.variance' differentiates 1 of 7 leaves, 1 of 7 entries, 4 B",
    ]
    assert repr(picture) == str(picture)


def test_every_kind_has_its_symbol():
    tree = {
        "config": Config(1.0),
        "flax": Flax(jnp.arange(3.0)),
        "key": jax.random.key(0),
        "none": None,
        "point": Point(1, pg.NonDiff([1.0])),
        "static": pg.Static("a"),
    }
    assert rows(pg.show(tree, lambda t: (t["config"].held, t["flax"]))) == [
        "dict ● 1 ◧ 1 ○ 1 ■ 1 · 2",
        "['config'] Config ◧ 1 ○ 1",
        "○ w float not selected 1",
        "◧ held float opened by wrt 2",
        "◆ n int static 3",
        "◆ options dict static {'grid': (0...ame': 'a'}",
        "['flax'] Flax ● 1",
        "● w f32[3] differentiated 1 ± 0.82",
        "◆ size int static 4",
        "· ['key'] key<fry>[] key",
        "['none'] None",
        "['point'] Point ■ 1 · 1",
        "· x int integer 1",
        "y list[1] ■ 1",
        "■ [0] float held by a mark 1",
        "◆ ['static'] str static 'a'",
    ]


def test_what_is_open_inside_of_a_transform_is_shown_so():
    seen = []

    def loss(kernel):
        seen.append((rows(pg.show(kernel)), [row.status for row in pg.summary(kernel).rows]))
        return kernel.variance * kernel.period

    pg.grad(jax.jit(loss), "period")(Periodic(1.0, 2.0, 3.0))
    drawn, statuses = seen[0]
    assert drawn[1:] == [
        "● variance f32[] differentiated",
        "● lengthscale f32[] differentiated",
        "◧ period f32[] open",
    ]
    assert statuses == ["differentiated", "differentiated", "open"]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (2.0, ["● (the tree itself) float differentiated 2"]),
        (None, ["None"]),
        ({}, ["dict"]),
        ((), ["tuple[0]"]),
        (pg.NonDiff(2.0), ["■ (the tree itself) float held by a mark 2"]),
        ([pg.NonDiff({"a": 1.0})], ["list[1] ■ 1", "[0] dict ■ 1", "■ ['a'] float held by a mark 1"]),
    ],
)
def test_small_trees(tree, expected):
    picture = pg.show(tree)
    assert rows(picture) == expected
    ElementTree.fromstring(picture.svg())


def test_selected_elements_are_counted():
    assert rows(pg.show({"w": jnp.ones(5)}, "['w'][1:3]"))[1] == "● ['w'] f32[5] 2 of 5 elements 1 ± 0"
    several = pg.show({"w": jnp.ones(5)}, lambda t: (t["w"][0], t["w"][2:4]))
    assert rows(several)[1] == "● ['w'] f32[5] 3 of 5 elements 1 ± 0"


def test_static_fields_of_a_dataclass_with_slots():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["n"], drop_fields=["late"])
    @dataclasses.dataclass(slots=True)
    class Slotted:
        w: float
        n: int
        late: int = dataclasses.field(init=False)

    slotted = Slotted(1.0, 3)
    assert [row.split()[:3] for row in rows(pg.show([slotted]))][2:] == [["●", "w", "float"], ["◆", "n", "int"]]


def test_leaves_that_only_look_like_arrays():
    class Odd:
        shape = dtype = None

    assert rows(pg.show([Odd()]))[0] == "list[1] · 1"


def test_alike_neighbours_of_a_large_tree_are_drawn_once():
    layers = [Linear(jnp.full(2, float(i)), 0.0) for i in range(40)]
    assert rows(pg.show({"first": Linear(1.0, 2.0), "layers": [*layers, pg.freeze(layers[0], "bias")]}))[5:] == [
        "['layers'] list[41] ● 81 ■ 1",
        "[0..39] 40 x Linear ● 80",
        "● weight f32[2] differentiated",
        "● bias float differentiated",
        "◆ name str static 'linear'",
        "[40] Linear ● 1 ■ 1",
        "● weight f32[2] differentiated 0 ± 0",
        "■ bias float held by a mark 0",
        "◆ name str static 'linear'",
    ]
    assert len(rows(pg.show(layers[:10]))) == 41


def test_large_trees_are_shortened_and_counted():
    tree = {f"k{i:03}": {"w": 1.0, "n": i} for i in range(300)}
    picture = pg.show(tree)
    drawn = rows(picture)
    assert drawn[0] == "dict ● 300 · 300"
    assert "... 275 more ● 275 · 275" in drawn
    assert len(drawn) < 100
    assert drawn[-1].startswith("['k299']") or drawn[-1].startswith("● ['w']")
    assert rows(pg.show(tree, depth=1))[1] == "['k000'] ... dict ● 1 · 1"
    assert rows(pg.show(tree, depth=0)) == ["dict ... ● 300 · 300"]


def test_deep_trees():
    tree = 1.0
    for _ in range(200):
        tree = [tree]
    picture = pg.show(tree)
    assert "..." in rows(picture)[40]
    ElementTree.fromstring(picture.svg())


HOSTILE = "</span><script>alert('1')</script>&\"\n\u202e\x00\ud800日"


def test_hostile_names_and_values_are_escaped():
    cls = flax.struct.dataclass(type("Evil<b>", (), {"__annotations__": {"w": float}}))
    picture = pg.show({HOSTILE: cls(1.0), "static": pg.Static(HOSTILE)})
    root = ElementTree.fromstring(picture.svg())
    assert not [node for node in root.iter() if node.tag.endswith("script")]
    assert any("<script>" in text and "\\u202e" in text and "\\ud800" in text for text in root.itertext())
    assert all(line.isprintable() for line in str(picture).splitlines())


def test_nothing_comes_from_elsewhere():
    assert re.findall("http[^'\" ]*", pg.show(composite()).svg()) == ["http://www.w3.org/2000/svg"]


def test_svg_shows_the_rows_and_says_what_the_symbols_mean():
    root = ElementTree.fromstring(pg.show(Periodic(1.0, 2.0, 3.0)).svg())
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert [text for text in texts if text.startswith("period")]
    assert {"held 1", "differentiated 2", "held by a mark", "3"} <= set(texts)


def test_saving(tmp_path):
    picture = pg.show(composite())
    for name, start in (("a.svg", "<svg"), ("a.txt", "tree ")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    picture.save(str(tmp_path / "b.svg"))
    with pytest.raises(ValueError, match=r"Expected a name that ends in \.svg or \.txt"):
        picture.save(tmp_path / "a.png")


def test_notebooks_get_svg_where_treescope_is_not_installed(monkeypatch):
    picture = pg.show(composite())
    assert picture._repr_svg_() == picture.svg()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert picture._repr_html_() is None


def test_pictures_keep_no_tracer():
    with jax.checking_leaks():
        seen = []
        jax.jit(lambda m: (seen.append(pg.show(m)), m["w"])[1])({"w": jnp.ones(2)})
    assert rows(seen[0]) == ["dict ● 1", "● ['w'] f32[2] differentiated"]


def test_arrays_that_have_no_values():
    gone = jnp.ones(2)
    gone.delete()
    tree = {"gone": gone, "large": np.ones(1_000_001, np.float32), "shape": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert [row.split()[4:] for row in rows(pg.show(tree))[1:]] == [["deleted"], [], []]


def test_static_data_is_that_of_the_tree_itself():
    for value in (1, True, 1.0):
        assert rows(pg.show([Flax(jnp.ones(2), value)]))[-1] == f"◆ size {type(value).__name__} static {value}"


def test_selectors_that_do_not_fit_raise():
    with pytest.raises(pg.errors.SelectionError):
        pg.show({"a": 1.0}, "b")


def test_selectors_are_named():
    kernel = composite()
    titles = [
        (None, "wrt=None"),
        ("a", "wrt='a'"),
        (Periodic, "wrt=Periodic"),
        (lambda k: k.a, "wrt=lambda"),
        (pg.mask(kernel), "wrt=the mask"),
        (pg.path("a") | "b", "wrt=('a' | 'b')"),
    ]
    for wrt, title in titles:
        assert str(pg.show(kernel, wrt)).splitlines()[-1].startswith(title + " differentiates ")


@pg.dataclass
class Everything:
    free: jax.Array
    kernel: Periodic
    held: Periodic = pg.field(nondiff=True)
    name: str = pg.field(static=True)
    opened: float = pg.field(nondiff=True)
    steps: int = 3


# treescope imports numpy.char, which newer versions of numpy deprecate.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_treescope_shows_marks_and_the_symbols_of_leaves(monkeypatch):
    treescope = pytest.importorskip("treescope")
    model = Everything(jnp.ones(2), Periodic(1.0, 2.0, 3.0), Periodic(4.0, 5.0, 6.0), "a", pg.Diff(7.0))
    tree = {"model": model, "wrapped": pg.NonDiff({"x": 1.0}), "static": pg.Static("s")}
    assert "differentiates 4 of 10 leaves" in pg.show(tree)._repr_html_()
    # Its text has the same content as its HTML.
    monkeypatch.setattr(treescope, "render_to_html", treescope.render_to_text)
    text = pg.show(tree)._repr_html_().partition("<p")[0]
    assert re.sub(r",?\s+\)", ")", re.sub(r"\(\s+", "(", " ".join(text.split()))) == (
        "{ 'model': Everything(free=● <jax.Array([1., 1.], dtype=float32)>, "
        "kernel=Periodic(variance=● 1.0, lengthscale=● 2.0, period=NonDiff(■ 3.0)), "
        "held=NonDiff(Periodic(variance=■ 4.0, lengthscale=■ 5.0, period=NonDiff(■ 6.0))), "
        "name='a', opened=Diff(● 7.0), steps=· 3), "
        "'wrapped': NonDiff({'x': ■ 1.0}), 'static': Static('s'), }"
    )
    assert "●" not in treescope.render_to_text(model)


DOCS = pathlib.Path(__file__).parent.parent / "docs"


def pictures_of_the_page():
    """The pictures that `docs/guide/pictures.md` shows, by the name of their file, from its own code."""
    scope = {"__name__": "page"}
    for block in re.findall(
        r"^```python\n(.*?)^```", (DOCS / "guide" / "pictures.md").read_text(), re.MULTILINE | re.DOTALL
    ):
        if "save(" not in block:
            exec(block, scope)
    summary = pg.summary(scope["model"])._repr_html_()
    return {"model.svg": scope["picture"].svg(), "summary.html": summary}


def test_the_pictures_of_the_page_are_those_that_are_drawn(capsys):
    """`python tests/test_show.py` writes them anew."""
    for name, text in pictures_of_the_page().items():
        assert (DOCS / "_static" / "pictures" / name).read_text(encoding="utf-8") == text


if __name__ == "__main__":
    for name, text in pictures_of_the_page().items():
        (DOCS / "_static" / "pictures" / name).write_text(text, encoding="utf-8")


def test_a_static_integer_of_five_thousand_digits():
    assert "an int of 16,610 bits" in str(pg.show({"x": 1.0, "n": pg.Static(10**5000), "m": pg.Static([10**5000])}))
